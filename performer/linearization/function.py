"""Any function with softmax attention -> the same function with random features in its place."""

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from performer import couplings
from performer.attention import Bias, Exact, performer_attention
from performer.linearization.compare import Setting, require_constants
from performer.linearization.layers import Layer, Measured
from performer.linearization.layout import Unfit
from performer.linearization.measure import (
    Observed,
    examples,
    layer_of,
    nested,
    observe,
    program_of,
    steps_of,
    words_of,
)
from performer.linearization.outputs import Remembered, compared, prepared
from performer.linearization.program import (
    Named,
    Place,
    Program,
    Values,
    named,
    run,
    single_in,
)
from performer.linearization.reading import of_key_heads, read
from performer.linearization.recipes import Options, replacements
from performer.linearization.report import Report
from performer.linearization.saved import Replacement, Replacements, write
from performer.linearization.saved import read as read_file
from performer.typing import Coupling

UNCHOSEN = "not chosen by where"
LINEAR = "linear already"


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Linearized:
    """A function with linear attention: the result of `linearize`, called like the given one.

    A pytree, whose leaves are frequencies, calibrations and scales: it can be an argument of
    `jax.jit`. It is compiled once for each structure and shapes of its arguments.
    """

    arrays: dict[int, Replacement]
    """Arrays of each place of attention that is replaced."""
    program: "Compiled" = field(metadata=dict(static=True))

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """The function of these arguments."""
        return self.program(self.arrays, *arguments, **keywords)

    def save(self, path: str | os.PathLike) -> None:
        """Write the arrays and what they replace to one .npz file, for `performer.load`.

        The function itself, and its parameters, are not in the file.
        """
        write(path, Replacements(self.arrays, self.program.settings, self.program.words))


class Compiled:
    """The program of a `Linearized` function, without its arrays; equal to itself alone."""

    def __init__(
        self,
        function: Callable[..., Any],
        settings: dict[int, Setting],
        words: tuple[tuple[str, ...], ...],
    ):
        self.settings, self.words = settings, words
        self._run = jax.jit(partial(_run, function, settings, words), static_argnums=1)

    def __call__(
        self, replacements: dict[int, Replacement], *arguments: Any, **keywords: Any
    ) -> Any:
        """The function with these arrays."""
        leaves, tree = jax.tree.flatten((arguments, keywords))
        arrays = [x for x in leaves if hasattr(x, "shape")]
        others = tuple(None if hasattr(x, "shape") else x for x in leaves)
        return self._run(replacements, _Structure(tree, tuple(map(type, others)), others), arrays)


def load(path: str | os.PathLike, function: Callable[..., Any]) -> Linearized:
    """Return a linearized function that `Linearized.save` has written, without measuring again.

    Args:
        path: the file.
        function: the function that was given to `linearize`: the same attention, in the same code.

    Raises:
        ValueError: for another file; at a call, if the attention of the function is another one.

    Example:
        >>> def apply(x):
        ...     return jax.nn.dot_product_attention(x, x, x)
        >>> linear, report = linearize(apply, [(q,)], num_features=8)
        >>> linear.save(path)
        >>> linear = load(path, apply)  # in another process
    """
    given = read_file(path)
    return Linearized(given.arrays, Compiled(function, given.settings, given.words))


def linearize(
    function: Callable[..., Any],
    batches: Iterable[Any],
    *,
    coupling: str | Coupling = couplings.DEFAULT,
    num_features: int | None = None,
    calibration: str = "full",
    refine_steps: int = 0,
    keep: int = 0,
    tolerance: float | None = None,
    where: Callable[[str], bool] | None = None,
    measured: Measured | None = None,
    seed: int = 0,
    show: Callable[[str], Any] | None = None,
    exact: Exact | None = None,
    recipes: Mapping[str, tuple[int, Exact]] | None = None,
    time: str | None = "forward",
) -> tuple[Linearized, Report]:
    """Replace exact attention in a function by random-feature attention.

    The function is anything that `jax.make_jaxpr` traces: plain JAX, `module.apply` of linen or
    Haiku, an Equinox model, an nnx model that is merged inside, with parameters as arguments.
    Attention may be written in any way: einsum, softmax and einsum, `jax.nn.dot_product_attention`
    or a layer of Flax, with grouped heads, under `jax.checkpoint`, or in the body of a
    `jax.lax.scan`, each step of which gets its own frequencies.

    Each place is verified on the batches before it is replaced: softmax of the queries, keys, scale
    and bias read from the program must equal what the program computes. Supported masks are masks
    of keys, causal masks and block-diagonal ones (packed sequences). The only supported bias is
    ALiBi's. A place with another bias, a soft cap, a local window or attention dropout stays exact.
    So does a kernel such as flash attention, and attention inside `while_loop` and `cond`. A
    warning and the report name the file, the line and the reason.

    Without sizes each place gets the fastest recipe whose attention error on held-out examples is
    within the tolerance, mean over heads; of recipes that take up to 5% longer the one with the
    smallest error, unless they are refined. Recipes and exact attention, as the function computes
    it, are timed on this device at the shapes of the batches; a table of times, which takes
    seconds, serves all places of a shape. Recipes are

        features   m = head_dim / 4, head_dim / 2, ... or 4 head_dim, at least 8, calibrated
        keys       16, 32, 64 or 128 exact keys, in layers without causality, segments and ALiBi
        rows       1 there, if the row of the first query (a class token) is not within the
                   tolerance
        windows    of 16, 32, 64 or 128 with one first key in other layers, with features or (not
                   refined) without

    A place for which no recipe is within the tolerance stays exact, with a warning. So does one for
    which no recipe is faster than exact attention, unless a tolerance is given. Sizes that you give
    hold for all layers, whatever error and time.

    Args:
        function: takes arrays or pytrees of them. Other arguments are static.
        batches: tuples of its arguments, like those that it will be called with. One example of
            eight is held out, and of four batches or more the last one, on which the answers of
            both functions are compared. They are read once, and with `refine_steps` once more for
            each layer.
        coupling: of the frequencies; every place and key head has its own draw.
        num_features: m of all layers; 0 for the exact pairs of a window alone. If only exact pairs
            are given, twice the head_dim.
        calibration: method of `performer.calibration.calibrate`.
        refine_steps: largest number of steps of Adam for each layer, which move its frequencies
            towards softmax attention (`performer.refinement`); 300 are enough. With an exact window
            features of the far keys are learned also: frequencies of queries and of keys, a bias
            of each feature and a weight of the far part. The variant with the lower error on
            held-out examples serves all layers.
        keep: number of places, those with the largest errors, that stay exact. A scan is one place.
        tolerance: largest attention error of a layer; by default 0.1, refined 0.05. If sizes are
            given, `num_features` and the exact keys are limits for it: each place has the cheapest
            numbers, down to an eighth of the features, that meet it, and stays exact if none do.
        where: name -> whether that place is replaced. Names follow the report: "model.py:57",
            and "model.py:57 #1" for the second place of a line.
        measured: result of `measure` on the same batches, to try several options. Only `measure`
            takes a `where` then.
        seed: of the frequencies.
        show: is called with a line of progress for each table of times and each refined layer; None
            prints it to a terminal.
        exact: pairs with exact attention, as in `performer.Features`. A window applies where there
            are as many queries as keys, exact keys in layers without causality, segments and ALiBi.
        recipes: sizes of each layer by its path in the report: (num_features, exact pairs). They
            hold whatever error and time, and layers without a recipe stay exact. `report.recipes`
            of an earlier call has them.
        time: "forward", or "train" for forward and backward pass. "cpu", "gpu" or "tpu" for a
            function that runs there and not here: nothing is timed, no layer stays exact for its
            time, and recipes have the order of their costs, by coefficients of that platform
            (docs, "Speed"). None for this platform, if nothing shall be timed.

    Returns:
        The new function (`Linearized`, which `save` writes to a file) and the report. The function
        takes the arguments of the given one, also by name. It has no cache for decoding: give a
        function of whole sequences, or convert an nnx model with `performer.nnx.linearize`.
        The report's errors of attention with ALiBi are those without the bias. A single batch axis
        of the scores counts as examples, not as heads: heads then share their frequencies.

    Raises:
        ValueError: if no attention can be replaced, with the reason for each place; for batches
            that cannot be read again, numbers below 0, an unknown coupling or calibration, or
            `where` with `measured`. The new function raises it for arguments with which attention
            is computed differently, for example with dropout. A mask or bias of another kind makes
            its output NaN.

    Example:
        >>> def attend(x):
        ...     scores = jnp.einsum("bqh,bkh->bqk", x, x) / x.shape[-1] ** 0.5
        ...     return jnp.einsum("bqk,bkh->bqh", jax.nn.softmax(scores), x)
        >>> new, report = linearize(attend, [(q[:, :, 0],)])
        >>> output = jax.jit(new)(q[:, :, 0])

        Several options of one measurement:

        >>> measured = measure(attend, [(q[:, :, 0],)])
        >>> for m in (8, 16):
        ...     new, report = linearize(attend, [], measured=measured, num_features=m)
    """
    given: Any = dict(coupling=coupling, num_features=num_features, calibration=calibration)
    given |= dict(refine_steps=refine_steps, keep=keep, tolerance=tolerance, seed=seed, show=show)
    options = Options.of(batches, **given, exact=exact, recipes=recipes, time=time)
    require_one(measured, where)
    measured = measured or measure(function, batches, where=where)
    layers, places = measured.layers, measured.places
    new, report = replacements(measured, partial(examples, function, batches), options)
    by_place: dict[int, list[int]] = {}  # a scan is one place of several layers
    for i in new:
        by_place.setdefault(layers[i].place, []).append(i)
    settings, arrays = {}, {}
    for number, numbers in by_place.items():
        each = [Replacement(new[i], layers[i].scale, layers[i].slopes) for i in numbers]
        first, padded = layers[numbers[0]], any(layers[i].padded for i in numbers)
        square = first.kind != "of keys" or first.slopes is not None
        square = square or new[numbers[0]].exact.window > 0
        place = places[number].place
        facts = (first.kind, padded, square, place.layout.roles, place.layout.lengths)
        slopes = None if first.slopes is None else np.asarray(first.slopes)
        settings[number] = Setting(*facts, np.asarray(first.scale), slopes, first.has_key_bias)
        arrays[number] = jax.jit(partial(_stacked, places[number].lengths))(*each)
    linear = Linearized(arrays, Compiled(function, settings, tuple(words_of(places))))
    if new:
        change, whole = compared(measured.before(), linear, measured.arguments, time)
        change = change._replace(is_held_out=measured.is_held_out)
        report = replace(report, change=change, whole=whole)
    report.warn()
    return linear, report


def measure(
    function: Callable[..., Any],
    batches: Iterable[Any],
    *,
    where: Callable[[str], bool] | None = None,
) -> Measured:
    """Measure the attention of a function for `linearize`, which explains arguments and errors.

    The result holds moments of queries and keys, and a few examples of them; its size does not
    depend on the number of batches. With it `linearize` needs no batches, except to refine.
    """
    batches = Remembered(batches)
    observed = observe(function, batches, lambda place: where is None or where(place.name))
    layers, left = [], {name: reason for name, (_, reason) in observed.left.items()}
    for number, place in enumerate(observed.places):
        try:
            layers += _layers_at(observed, number)
        except Unfit as reason:
            left[place.name] = str(reason)
    if left and not layers:
        lines = "\n".join(f"  {name}: {reason}" for name, reason in left.items())
        raise ValueError(f"no attention can be replaced:\n{lines}")
    arguments = tuple(batches.last)
    before = cache(partial(prepared, function, arguments))
    measured = Measured(layers, left, observed.places, arguments, before, observed.is_held_out)
    warn(measured)
    return measured


def require_one(measured: Measured | None, where: Callable[[str], bool] | None) -> None:
    """Raise ValueError for a choice of places that comes after they were measured."""
    if measured is not None and where is not None:
        raise ValueError(
            "where chooses the places that are measured: pass it to measure, not with measured="
        )


def _stacked(lengths: tuple[int, ...], *layers: Replacement) -> Replacement:
    """Layers of a scan with axes of its steps, whose lengths these are, before all others."""
    return jax.tree.map(lambda *x: jnp.stack(x).reshape(*lengths, *x[0].shape), *layers)


def _layers_at(observed: Observed, number: int) -> list[Layer]:
    """The layers of a place, one for each step of the scans around it.

    Raises:
        Unfit: with the reason why it stays exact.
    """
    if number not in observed.records:
        raise Unfit(UNCHOSEN)
    step_layers = []
    for step in steps_of(observed, number):
        name = observed.places[number].name + "".join(f"[{i}]" for i in step)
        step_layers.append(layer_of(observed, name, [(number, step)]))
    if len({(x.kind, x.slopes is None) for x in step_layers}) > 1:
        raise Unfit("its masks or biases are of another kind in each step of a scan")
    return step_layers


def warn(measured: Measured) -> None:
    """Warn of attention that stays exact, and that the user did not choose to leave.

    Raises:
        ValueError: if there is no attention at all.
    """
    layers, left = measured.layers, measured.left
    if not layers and not left:
        raise ValueError(
            "no softmax attention was found: it is looked for as softmax(scale q k^T + bias) v in"
            " plain operations, such as einsum, or as jax.nn.dot_product_attention"
        )
    lines = [
        f"  {name}: {reason}" for name, reason in left.items() if reason not in (UNCHOSEN, LINEAR)
    ]
    if lines:
        warnings.warn("\n".join(["attention that stays exact:", *lines]), stacklevel=3)


class _Structure(NamedTuple):
    """Arguments without their arrays."""

    tree: Any
    types: tuple[type, ...]
    """Types of the leaves, for 1, 1.0 and True are equal."""
    leaves: tuple[Any, ...]
    """None for an array."""


def _run(
    function: Callable[..., Any],
    settings: dict[int, Setting],
    words: Sequence[tuple[str, ...]],
    replacements: dict[int, Replacement],
    structure: _Structure,
    arrays: list[Any],
) -> Any:
    """The function on these arguments, its places replaced."""
    given = iter(arrays)
    leaves = [next(given) if x is None else x for x in structure.leaves]
    arguments, keywords = jax.tree.unflatten(structure.tree, leaves)
    program, arrays, result = program_of(function, arguments, keywords)
    matched = _matched(program, words)
    places = {i: place for i, place in enumerate(matched or ()) if place is not None}
    replacements = {i: x for i, x in replacements.items() if not matched or i in places}
    for number in replacements:
        setting = settings[number]
        same = matched and places[number].place.layout.take(setting.roles)
        if not same or (setting.square and len({*places[number].place.layout.lengths}) > 1):
            raise ValueError(
                "attention is computed differently with these arguments than with those it was"
                " measured on, as in training mode with dropout or in decoding with a cache:"
                " linearize on batches of the same kind"
            )
        (before, here) = (replacements[number].scale.shape[:-1], places[number].lengths)
        if before != here:
            raise ValueError(
                f"{places[number].name}: the scans around it had {before} steps when it was"
                f" measured and have {here} here: each step has frequencies of its own, so use"
                " jax.vmap for an axis of examples"
            )
    numbers = {places[number].at: number for number in replacements}

    def attend(values: Values, place: Place, at: tuple, new: Replacement) -> tuple[Array, Any]:
        return _attended(values, place, settings[numbers[at]], new), ()

    outputs, _ = run(program, arrays, nested(places, replacements), attend)
    return jax.tree.unflatten(result, outputs)


def _matched(program: Program, words: Sequence[tuple[str, ...]]) -> list[Named | None] | None:
    """The place of each measured one, None for a single key; None if others are computed."""
    here: list[tuple] = [(place.at, place.place.words, place) for place in named(program)]
    here += [(at, word, None) for at, word in single_in(program)]
    left, matched = iter(sorted(here, key=lambda x: x[0])), []
    for expected in words:
        for _, word, place in left:
            if word == expected:
                matched.append(place)
                break
            if place is not None:
                return None
    complete = len(matched) == len(words) and not any(place for *_, place in left)
    return matched if complete else None


def _attended(values: Values, place: Place, setting: Setting, replacement: Replacement) -> Array:
    """Linear attention at a place, as the program has its output."""
    query, key, value = values.operands(place)
    heads, w = (key.shape[-2], replacement.scale.shape[0]), replacement.attention.frequencies
    if w is not None:
        heads = (w.shape[0], heads[1])
    if heads != (key.shape[-2], query.shape[-2]):
        raise ValueError(
            f"{place.line}: its axis of heads had length {heads[1]} when it was measured and has"
            f" {query.shape[-2]} here: if it is a batch axis, make it the first one of the scores"
        )
    if w is not None and w.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"{place.line}: its queries had {w.shape[-1]} entries when it was measured and have"
            f" {query.shape[-1]} here: linearize on batches of one size"
        )
    zero = np.zeros(replacement.scale.shape[-1])
    slopes = zero if setting.slopes is None else setting.slopes
    found = read(values, place, setting.kind, slopes, setting.has_key_bias)
    require_constants(place, setting, found)
    valid = [] if found.valid is None else [found.valid]
    query, key, same = found.scaled(query, key)
    if found.key_scale is not None:
        valid.append(same)
    key_bias = found.key_bias
    if key_bias is not None:
        key_bias, same = of_key_heads(key_bias, key.shape[2])
        valid.append(same)
    alibi = replacement.slopes
    if found.slopes is not None and alibi is None:
        valid.append(jnp.allclose(found.slopes, 0, atol=1e-4))
    elif found.slopes is not None:
        alibi = found.slopes
    attend = partial(
        performer_attention,
        query,
        key,
        value,
        replacement.attention,
        bias=Bias(key_bias, None if alibi is None else -alibi),
        mask=found.keys[:, None, None],
        is_causal="causal" in setting.kind,
        segment_ids=found.segments,
    )
    if found.sinks is None:
        output = attend()
    else:  # the sum has e^sink also
        output, total = attend(return_residual=True)
        share = jax.nn.sigmoid(total - found.sinks[:, None])[..., None]
        output = (output * share).astype(output.dtype)
    output = place.layout.back(output)
    return jnp.where(jnp.all(jnp.stack(valid)), output, jnp.nan) if valid else output
