"""Any function with softmax attention -> the same function with random features in its place."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from performer.attention import performer_attention
from performer.attention.calibration import Calibration, pair_moments
from performer.attention.refinement import Sample
from performer.linearization.layers import (
    EXAMPLES,
    Layer,
    Linear,
    Measured,
    check,
    draw,
    joined,
    parted,
    refined,
    report_of,
    worst,
)
from performer.linearization.places import (
    FILL,
    MASKED,
    Named,
    Place,
    Program,
    Values,
    left_in,
    named,
    run,
    traced,
)
from performer.linearization.report import Report
from performer.typing import Coupling, Window, float32_or_wider

KINDS = ("of keys", "causal", "of segments", "causal, of segments")
"""Masks that linear attention has, the simplest first."""
TOLERANCE = {"float32": 1e-3, "float64": 1e-6}
"""Of what was read out, relative to the largest output; 0.05 for narrower types."""


class Replacement(NamedTuple):
    """Arrays of one place; in a scan with an axis of its steps before all others."""

    frequencies: Float[Array, "*l k m h"]
    calibration: Calibration | None
    scale: Float[Array, "*l n"]
    slopes: Float[Array, "*l n"] | None


class Setting(NamedTuple):
    """Static facts of a place that is replaced."""

    kind: str
    window: Window
    words: tuple[str, ...]
    name: str


def linearize(
    function: Callable[..., Any],
    batches: Iterable[Sequence[Any]],
    *,
    coupling: str | Coupling = "orf-antithetic",
    num_features: int | None = None,
    calibration: str = "full",
    refine_steps: int = 0,
    keep: int = 0,
    exact_window: int = 0,
    exact_first: int = 0,
    where: Callable[[str], bool] | None = None,
    seed: int = 0,
) -> tuple[Callable[..., Any], Report]:
    """The function with random-feature attention in the place of its exact attention.

    It may be anything that `jax.make_jaxpr` traces: plain JAX, `module.apply` of linen or Haiku, an
    Equinox model that is called, an nnx model that is merged inside; with its parameters as
    arguments. How attention is written does not matter: einsum, softmax and einsum,
    `jax.nn.dot_product_attention` or a layer of Flax, with grouped heads, under `jax.checkpoint`,
    or in the body of a `jax.lax.scan`, each of whose steps then has its own frequencies.

    Each place is verified on the batches before it is replaced: softmax of the queries, keys, scale
    and bias that were read out of the program must give what the program computes. Masks may say
    which keys exist, be causal, or block-diagonal (packed sequences); a bias may be ALiBi's. A
    place with anything else (another bias, a soft cap, a local window, attention dropout) stays
    exact, and a warning and the report name file, line and reason, as they do for a kernel like
    flash attention and for attention inside `while_loop` and `cond`.

    Args:
        function: of arrays, or pytrees of them. What is no array is static.
        batches: tuples of its arguments. Read once, and once more with `refine_steps`.
        coupling: of the frequencies; every place and key head has its own draw.
        num_features: m; twice the head_dim if None.
        calibration: what of it is fitted, as in `performer.calibration.calibrate`.
        refine_steps: of Adam for each layer, at most; see `performer.refinement`.
        keep: so many places, those with the largest errors, stay exact; a scan is one place.
        exact_window: near keys are exact, as in `performer.performer_attention`, where there are as
            many queries as keys.
        exact_first: so are the first keys.
        where: name -> whether that place is replaced; names are those of the report, "model.py:57",
            with " #1" for the second place of a line.
        seed: of the frequencies.

    Returns:
        The new function and the report. The function is a pytree (`jax.tree_util.Partial`) whose
        leaves are the frequencies and calibrations: it can be an argument of `jax.jit`,
        differentiated and saved. It traces the given function each time it is called: put it under
        `jax.jit`. Its errors of attention with ALiBi are those without the bias. A single batch
        axis of the scores counts as examples, not as heads: heads then share their frequencies.

    Raises:
        ValueError: if no attention can be replaced, with the reason for each place; for batches
            that cannot be read again, numbers below 0, or an unknown coupling or calibration. The
            new function raises it for arguments with which its attention is computed differently
            from when it was measured, as with dropout; a mask of another kind makes the output NaN.

    Example:
        >>> def attend(x):
        ...     scores = jnp.einsum("bqh,bkh->bqk", x, x) / x.shape[-1] ** 0.5
        ...     return jnp.einsum("bqk,bkh->bqh", jax.nn.softmax(scores), x)
        >>> new, report = linearize(attend, [(q[:, :, 0],)], num_features=8)
        >>> output = jax.jit(new)(q[:, :, 0])
    """
    window = Window(exact_window, exact_first)
    check(batches, coupling, calibration, refine_steps, keep, window)
    places, measured, found = _measured(function, batches, where)
    if not measured.layers:
        raise ValueError(_nothing(measured.left))
    unread = {name: why for name, why in measured.left.items() if why != UNCHOSEN}
    if unread:
        lines = "\n".join(f"  {name}: {why}" for name, why in unread.items())
        warnings.warn(f"attention that stays exact:\n{lines}", stacklevel=2)
    drawn = draw(measured.layers, coupling, num_features, calibration, seed, window)
    if refine_steps:
        seen = (_examples(function, batches, each.at, each.step) for each in found)
        each = zip(drawn, measured.layers, seen, strict=True)
        drawn = [refined(*parts, refine_steps) for parts in each]
    kept = _kept(found, measured.layers, drawn, keep)
    settings, replacements = {}, {}
    for at in dict.fromkeys(each.at for each in found):
        own = [i for i, each in enumerate(found) if each.at == at]
        if own[0] in kept:
            continue
        first, place = found[own[0]], places[at]
        settings[at] = Setting(first.kind, drawn[own[0]].window, place.place.words, place.name)
        each = [_replacement(drawn[i], found[i]) for i in own]
        stacked = jax.tree.map(lambda *x: jnp.stack(x).reshape(*place.lengths, *x[0].shape), *each)
        replacements[at] = stacked
    new = jax.tree_util.Partial(partial(_call, function, settings, tuple(places)), replacements)
    return new, report_of(measured, drawn, kept)


UNCHOSEN = "not chosen by where"


class Found(NamedTuple):
    """A layer of a place, as measured: one, or a step of a scan."""

    at: tuple[int, ...]
    step: tuple[int, ...]
    kind: str
    scale: Array
    slopes: Array | None


def _nothing(left: dict[str, str]) -> str:
    if not left:
        return (
            "no softmax attention was found in this function: it looks for softmax(scale q k^T +"
            " bias) v in plain operations, as einsum or jax.nn.dot_product_attention have them"
        )
    return "no attention can be replaced:\n" + "\n".join(f"  {x}: {why}" for x, why in left.items())


def _measured(
    function: Callable[..., Any], batches: Iterable[Any], where: Callable[[str], bool] | None
) -> tuple[dict[tuple, Named], Measured, list[Found]]:
    """All places; the layers that can be replaced, and reasons for the others; facts of each."""
    places: dict[tuple, Named] = {}
    left: dict[str, str] = {}
    total: dict[tuple, Any] = {}
    for arguments in batches:
        settings, arrays = parted(tuple(arguments))
        program, _ = _traced(function, settings, arrays)
        new = {each.at: each for each in named(program)}
        if places and {at: x.place.words for at, x in new.items()} != {
            at: x.place.words for at, x in places.items()
        }:
            raise ValueError("the batches run different programs: linearize on one kind of batches")
        places = new
        for line, why in left_in(program):
            left[line if left.get(line, why) == why else f"{line}, too"] = why
        chosen = [at for at, each in places.items() if where is None or where(each.name)]
        seen = jax.jit(partial(_observed, program, chosen))(_arrays(arrays))
        total = {at: _together(total.get(at), jax.device_get(x)) for at, x in seen.items()}
    layers, found = [], []
    for at, each in places.items():
        if at not in total:
            left[each.name] = UNCHOSEN
            continue
        steps = list(np.ndindex(each.lengths))
        records = [jax.tree.map(lambda x, i=i: x[i], total[at]) for i in steps]
        why = next(filter(None, map(_unfit, records)), "")
        if why:
            left[each.name] = why
            continue
        fits = np.all([record["kinds"] for record in records], axis=0)
        kind = KINDS[int(np.argmax(fits))]
        if not fits.any():
            left[each.name] = "its masks are neither of keys, nor causal, nor of packed sequences"
            continue
        for step, record in zip(steps, records, strict=True):
            name = each.name + "".join(f"[{i}]" for i in step)
            sample = Sample(**record["sample"])
            if "segments" not in kind:
                sample = sample._replace(segments=None)
            moments = jnp.asarray(record["moments"] / record["count"])
            sample = jax.tree.map(jnp.asarray, sample)
            layers.append(Layer(name, moments, sample, "causal" in kind, False, False))
            slopes = record["slopes"] / record["batches"]
            biased = bool(np.any(np.abs(slopes) > 1e-6))
            scale = jnp.asarray(record["scale"])
            found.append(Found(at, step, kind, scale, jnp.asarray(slopes) if biased else None))
    return places, Measured(layers, left), found


def _unfit(record: dict[str, Any]) -> str:
    """Reason why a measured place stays exact, or ""."""
    if not record["affine"]:
        return "its scores are not scale q.k + bias: is there a soft cap?"
    if not record["same heads"]:
        return "its masks differ between heads"
    if not record["alibi"]:
        return "a bias that is no mask"
    if not record["exact"]:
        return (
            "softmax(scale q.k + bias) v is not what it computes: is there dropout, or a division"
            " after the product with v?"
        )
    return ""


def _traced(function: Callable[..., Any], settings: tuple, arrays: list) -> tuple[Program, Any]:
    """The program for these arrays, which are its inputs."""
    given = [x is not None for x in arrays]

    def of_arrays(*present: Any) -> Any:
        left = iter(present)
        return function(*joined(settings, [next(left) if x else None for x in given]))

    return traced(of_arrays, _arrays(arrays))


def _arrays(arrays: list) -> list:
    return [x for x in arrays if x is not None]


def _nested(flat: dict[tuple, Any]) -> dict[int, Any]:
    """{(1, 2): x} -> {1: {2: x}}, as `places.run` takes settings."""
    nested: dict[int, Any] = {}
    for at, x in flat.items():
        inner = nested
        for number in at[:-1]:
            inner = inner.setdefault(number, {})
        inner[at[-1]] = x
    return nested


def _flat(nested: dict[int, Any], paths: Iterable[tuple]) -> dict[tuple, Any]:
    """Inverse of `_nested`, for these paths."""
    flat = {}
    for at in paths:
        x: Any = nested
        for number in at:
            x = x[number]
        flat[at] = x
    return flat


def _observed(
    program: Program, chosen: Sequence[tuple], arrays: list, whole: bool = False
) -> dict[tuple, Any]:
    """A record of each chosen place, by the numbers that lead to it."""

    def record(values: Values, place: Place, at: tuple, setting: Any) -> tuple[Array, Any]:
        del at, setting
        inputs = values.program.ops[place.output]
        output = values.bind(inputs, values.read)[0]
        return output, _record(values, place, output, whole)

    nothing = _nested(dict.fromkeys(chosen, ()))  # an empty tree: nothing is read ahead
    _, kept = run(program, arrays, nothing, record)
    return _flat(kept, chosen)


class Read(NamedTuple):
    """A place in the terms of `performer_attention`, as its values say."""

    sample: Sample
    visible: Bool[Array, "b t s"]
    bias: Float[Array, "b n t s"]
    scale: Float[Array, "b n"]
    value: Array


def _read(values: Values, place: Place) -> Read:
    """Measure a place; queries come as if the scale were 1 / sqrt(h)."""
    query, key, value = values.operands(place)
    bias = values.scores(place, 0.0)
    dtype = float32_or_wider(query, key)
    query, key, bias = (x.astype(dtype) for x in (query, key, bias))
    slope = (values.scores(place, FILL).astype(dtype) - bias) / FILL
    seen = bias > MASKED
    scale = jnp.max(jnp.where(seen, slope, -jnp.inf), axis=(2, 3))
    scale = jnp.where(jnp.isfinite(scale), scale, jnp.nan)
    visible = jnp.any(seen, axis=1)
    queries, keys = jnp.any(visible, axis=2), jnp.any(visible, axis=1)
    factor = jnp.nan_to_num(scale)[:, None, :, None] * query.shape[-1] ** 0.5
    sample = Sample(query * factor, key, queries, keys, jnp.argmax(visible, axis=-1))
    return Read(sample, visible, bias, scale, value)


def _record(values: Values, place: Place, output: Array, whole: bool) -> dict[str, Any]:
    """What is kept of one call of a place: sums over batches, facts, and a few examples."""
    read = _read(values, place)
    sample, visible, bias, scale, value = read
    if whole:
        return {"sample": sample._asdict()}
    _, t, n, h = sample.query.shape
    s, k = sample.key.shape[1:3]
    groups = n // k
    query = sample.query.reshape(len(bias), t, k, groups, h)
    logits = jnp.einsum("btkgh,bskh->bkgts", query, sample.key, precision="highest") / h**0.5
    weights = jax.nn.softmax(logits.reshape(bias.shape) + bias)
    weights = weights.reshape(len(bias), k, groups, t, s)
    exact = jnp.einsum(
        "bkgts,bskv->btkgv", weights, value.astype(weights.dtype), precision="highest"
    )
    exact = place.layout.back(exact.reshape(len(bias), t, n, -1)).astype(weights.dtype)
    got = output.astype(weights.dtype)
    both = jnp.isnan(exact) & jnp.isnan(got)
    apart = jnp.max(jnp.where(both, 0, jnp.abs(exact - got)), initial=0)
    largest = jnp.max(jnp.where(jnp.isnan(got), 0, jnp.abs(got)), initial=1e-30)
    dtypes = (output.dtype, value.dtype, values.operands(place)[0].dtype)
    tolerance = max(TOLERANCE.get(jnp.dtype(x).name, 0.05) for x in dtypes)
    seen = bias > MASKED
    slope = (values.scores(place, 2 * FILL).astype(bias.dtype) - bias) / (2 * FILL)
    bend = jnp.where(seen, jnp.abs(slope - jnp.nan_to_num(scale)[..., None, None]), 0)
    slopes, alibi = _alibi(bias, seen)
    count = jnp.float32(sample.queries.size)
    pairs = (visible & sample.queries[..., None])[:, None]
    of_heads = jnp.nanmax(scale, axis=0)
    one_scale = jnp.all(jnp.isnan(scale) | (jnp.abs(scale - of_heads) <= 1e-3 * jnp.abs(of_heads)))
    few = {name: x[:EXAMPLES] for name, x in sample._asdict().items()}
    return {
        "moments": pair_moments(sample.query, sample.key, mask=pairs) * count,
        "count": count,
        "batches": jnp.float32(1),
        "slopes": slopes,
        "scale": jnp.nan_to_num(of_heads),
        "affine": jnp.max(bend) <= 0.01 * jnp.max(jnp.abs(of_heads)),
        "same heads": jnp.all(seen == visible[:, None]),
        "alibi": alibi,
        "exact": (apart <= tolerance * largest) & (one_scale | jnp.array(place.scaled)),
        "kinds": jnp.stack([_fits(sample, visible, kind) for kind in KINDS]),
        "sample": few,
    }


def _alibi(bias: Array, seen: Array) -> tuple[Float[Array, " n"], Bool[Array, ""]]:
    """Slopes, and whether the bias is -slope |i - j| but for what is added to whole rows."""
    t, s = bias.shape[-2:]
    slopes, distance = jnp.zeros(bias.shape[1], bias.dtype), jnp.zeros((t, s), bias.dtype)
    level = jnp.where(seen, bias, 0)
    if t == s > 1:
        distance = jnp.abs(jnp.arange(t)[:, None] - jnp.arange(t)).astype(bias.dtype)
        here, before = (jnp.diagonal(x[..., 1:, :], y, -2, -1) for x, y in ((level, 1), (level, 0)))
        both = jnp.diagonal(seen[..., 1:, :], 1, -2, -1) & jnp.diagonal(seen[..., 1:, :], 0, -2, -1)
        total = jnp.sum(jnp.where(both, here - before, 0), axis=(0, 2))
        slopes = total / jnp.maximum(jnp.sum(both, axis=(0, 2)), 1)
    flat = level + slopes[:, None, None] * distance
    high = jnp.max(jnp.where(seen, flat, -jnp.inf), axis=-1)
    low = jnp.min(jnp.where(seen, flat, jnp.inf), axis=-1)
    spread = jnp.max(jnp.where(high >= low, high - low, 0), initial=0)
    return slopes, spread <= 1e-3 * (1 + 0.01 * jnp.max(jnp.abs(level)))


def _fits(sample: Sample, visible: Bool[Array, "b t s"], kind: str) -> Bool[Array, ""]:
    """True if existing queries and keys, causality and segments determine what is visible."""
    _, t, s = visible.shape
    if kind != "of keys" and t != s:
        return jnp.array(False)
    if "segments" not in kind:
        sample = sample._replace(segments=None)
    pairs = sample.pairs("causal" in kind)[:, 0]
    return jnp.all((visible == pairs) | ~sample.queries[..., None])


def _together(before: Any, new: Any) -> Any:
    """Records of two batches as one."""
    if before is None:
        return new
    sums = {name: before[name] + new[name] for name in ("moments", "count", "batches", "slopes")}
    facts = ("affine", "same heads", "alibi", "exact", "kinds")
    return before | sums | {name: before[name] & new[name] for name in facts}


def _examples(
    function: Callable[..., Any], batches: Iterable[Any], at: tuple, step: tuple
) -> Sample:
    """Queries and keys of one layer in all batches."""
    parts = []
    for arguments in batches:
        settings, arrays = parted(tuple(arguments))
        program, _ = _traced(function, settings, arrays)
        seen = jax.jit(partial(_observed, program, [at], whole=True))(_arrays(arrays))
        parts.append(Sample(**jax.tree.map(lambda x: x[step], seen[at]["sample"])))
    return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)


def _kept(found: list[Found], layers: list[Layer], drawn: list[Linear], keep: int) -> set[int]:
    """Numbers of the layers of the `keep` places with the largest errors."""
    if not keep:
        return set()
    ranked = worst(layers, drawn, len(layers))
    chosen = list(dict.fromkeys(found[i].at for i in ranked))[:keep]
    return {i for i, each in enumerate(found) if each.at in chosen}


def _replacement(linear: Linear, found: Found) -> Replacement:
    return Replacement(linear.frequencies, linear.calibration, found.scale, found.slopes)


def _call(
    function: Callable[..., Any],
    settings: dict[tuple, Setting],
    paths: tuple[tuple, ...],
    replacements: dict[tuple, Replacement],
    *arguments: Any,
) -> Any:
    """The function on these arguments, its places replaced."""
    static, arrays = parted(arguments)
    program, result = _traced(function, static, arrays)
    places = {each.at: each.place for each in named(program)}
    for at, setting in settings.items():
        if tuple(places) != paths or places[at].words != setting.words:
            raise ValueError(
                f"attention at {setting.name} is computed differently with these arguments than"
                " with those it was measured on (as in training mode, with dropout): linearize on"
                " batches with the same settings"
            )

    def attend(values: Values, place: Place, at: tuple, own: Replacement) -> tuple[Array, Any]:
        return _attended(values, place, settings[at], own), ()

    outputs, _ = run(program, _arrays(arrays), _nested(replacements), attend)
    return jax.tree.unflatten(result, outputs)


def _attended(values: Values, place: Place, setting: Setting, own: Replacement) -> Array:
    """Linear attention at a place, as the program has its output."""
    query, key, value = values.operands(place)
    scale, mask, segments, fits = own.scale[None], None, None, None
    if place.scaled or place.by_pairs:
        sample, visible, _, scale, _ = _read(values, place)
        fits = _fits(sample, visible, setting.kind)
        mask = sample.keys[:, None, None]
        segments = sample.segments if "segments" in setting.kind else None
        scale = jnp.nan_to_num(scale) if place.scaled else own.scale[None]
    elif place.masked or setting.kind != "of keys":
        # Every row of a mask of keys, and the last of a causal one, shows which keys exist.
        last = values.scores(place, 0.0)[:, :1, -1:] > MASKED
        mask = last if place.masked else None
    if "segments" in setting.kind and segments is None:  # written in the code: a constant
        seen = values.scores(place, 0.0)[:, 0] > MASKED
        segments, mask = jnp.argmax(seen, axis=-1), jnp.any(seen, axis=1)[:, None, None]
    factor = scale[:, None, :, None] * query.shape[-1] ** 0.5
    output = performer_attention(
        (query.astype(float32_or_wider(query)) * factor).astype(query.dtype),
        key,
        value,
        own.frequencies,
        mask=mask,
        is_causal="causal" in setting.kind,
        calibration=own.calibration,
        alibi_slopes=own.slopes,
        segment_ids=segments,
        **setting.window._asdict(),
    )
    assert isinstance(output, jax.Array)
    output = place.layout.back(output)
    return output if fits is None else jnp.where(fits, output, jnp.nan)
