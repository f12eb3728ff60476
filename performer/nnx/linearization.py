"""A trained model with exact attention -> one with random features, without retraining."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from performer import calibration as calibrations
from performer import couplings
from performer.nnx import _hooks as hooks_
from performer.nnx.layer import PerformerAttention
from performer.nnx.report import Report, head_errors, rows_of
from performer.refinement import Sample, refine
from performer.typing import Coupling

Model = TypeVar("Model", bound=nnx.Module)
Call = Callable[[Any, Any], Any]


class Layer(NamedTuple):
    """What `measure` found at one place of a model."""

    path: str
    moments: calibrations.Moments
    sample: Sample
    """Of a few examples."""
    is_causal: bool
    masks: bool
    """Whether it is called with masks over pairs of a query and a key, """
    masks_are_causal: bool
    """and whether these are causal."""


class Measured(NamedTuple):
    """What `measure` found: layers in the order of their calls, and path -> why it cannot be."""

    layers: list[Layer]
    left: dict[str, str]


def linearize(
    model: Model,
    batches: Iterable[Any],
    *,
    coupling: str | Coupling = "orf-antithetic",
    num_features: int | None = None,
    calibration: str = "full",
    refine_steps: int = 0,
    keep: int = 0,
    where: Callable[[str], bool] | None = None,
    call: Call | None = None,
    measured: Measured | None = None,
    seed: int = 0,
) -> tuple[Model, Report]:
    """The model with random-feature attention in the place of its exact attention.

    It is called on the batches, and every layer of attention measures its queries and keys: their
    moments, whose size does not depend on how many batches there are. From these it is calibrated;
    frequencies are drawn; and, with `refine_steps`, moved towards softmax attention on the queries
    and keys of all batches, one layer after another. These are those of the model itself: those
    that come through layers already replaced did no better (docs, "Results: FAVOR").

    Layers are `nnx.MultiHeadAttention`, with self or cross attention, grouped heads, normalised
    queries and keys, or a cache for decoding; and any attribute of any module that is
    `nnx.dot_product_attention` or `jax.nn.dot_product_attention`, or a `functools.partial` of them.
    Masks may say which keys exist, and be causal, also as arrays over pairs of a query and a key:
    of what kind these are is seen in the batches. Moments are over the pairs that exist. A layer is
    left as it is, and named in the report, where a bias, another mask, attention dropout
    (evaluation mode has none), a local window or another function is found, or no call. So is one
    in a stack of `nnx.vmap` or `nnx.scan`. What calls exact attention by a name that is no
    attribute cannot be seen.

    Args:
        model: any module. It stays as it is.
        batches: what the model is called with: an array, a tuple of arguments, or a dict of them by
            name; with `call`, anything. Read once, but once for each layer with `refine_steps`.
        coupling: of the frequencies; every layer and key head has its own draw.
        num_features: m; twice the head_dim of a layer if None, where head_dim 16 kept 98.9% of the
            accuracy without a gradient (docs, "Results: training").
        calibration: as of `PerformerAttention`.
        refine_steps: of Adam for each layer, at most; see `performer.refinement`.
        keep: so many layers, those with the largest errors, stay exact.
        where: path -> whether that layer is replaced, as `lambda path: "encoder" in path`; all if
            None. Paths are those of the report, as "blocks.0.attention".
        call: (model, batch) -> anything, for a model that is called otherwise.
        measured: of `measure` on this model, to leave out the first passes.
        seed: of the frequencies.

    Returns:
        A new model of the same parameters, in evaluation mode, and the report.

    Raises:
        ValueError: for batches that cannot be read again, a negative `keep`, or an unknown coupling
            or calibration.

    Example:
        >>> model, report = linearize(model, [x], num_features=8)
        >>> print(report)
    """
    calibrations.parts(calibration, coupling)
    couplings.get(coupling)
    batches = _readable(batches, again=refine_steps > 0)
    if keep < 0:
        raise ValueError(f"keep must not be negative, got {keep}")
    measured = measured or measure(model, batches, where=where, call=call)
    call, new = call or _call, evaluated(model)
    parts = partial(_parts, coupling=coupling, m=num_features, calibration=calibration)
    keys = jax.random.split(jax.random.key(seed), max(1, len(measured.layers)))
    drawn = [parts(key, layer) for key, layer in zip(keys, measured.layers, strict=False)]
    kept = _worst(measured.layers, drawn, keep)
    rows = []
    for number, (layer, attention) in enumerate(zip(measured.layers, drawn, strict=True)):
        if number not in kept:
            if refine_steps:
                _refine(model, layer, attention, batches, call, refine_steps)
            _put(new, layer, attention)
        state = "exact" if number in kept else "linear"
        rows += rows_of(number, layer.path, state, _errors(layer, attention))
    return new, Report(rows, measured.left)


def measure(
    model: nnx.Module,
    batches: Iterable[Any],
    *,
    where: Callable[[str], bool] | None = None,
    call: Call | None = None,
) -> Measured:
    """What `linearize` needs to know of a model; its arguments are explained there.

    Example:
        >>> measured = measure(model, [x])
        >>> models = [linearize(model, [x], num_features=m, measured=measured) for m in (8, 16)]
    """
    new, notes, left = evaluated(model), hooks_.Notes(), {}
    for hook in list(hooks_.hooks(new)):
        reason = _unfit(hook, where)
        if reason:
            left[hook.path] = reason
        else:
            recorder = hooks_.Recorder(hook.function, hook.path, notes.record)
            hook.put(recorder)
            left[hook.path] = "not called"
    total: dict[str, dict[str, Array]] = {}
    for seen in _observed(new, batches, call or _call):
        joined = {path: hooks_.together(total[path], seen[path]) for path in total.keys() & seen}
        total = total | seen | joined
    layers = []
    for path, refused in notes.refused.items():
        left[path] = refused
        if not refused:
            layer, left[path] = _layer(path, total[path], notes)
            layers += [layer] if not left[path] else []
    return Measured(layers, {path: why for path, why in left.items() if why})


def evaluated(model: Model) -> Model:
    """A copy in evaluation mode."""
    model = nnx.clone(model)
    model.eval()
    return model


def _call(model: Any, batch: Any) -> Any:
    """As `batches` of `linearize` says."""
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def _readable(batches: Iterable[Any], *, again: bool) -> Iterable[Any]:
    if again and iter(batches) is batches:
        raise ValueError(
            "refine_steps reads the batches once for each layer, and these can be read only once:"
            " pass a list of them"
        )
    return batches


def _unfit(hook: hooks_.Hook, where: Callable[[str], bool] | None) -> str:
    """Why nothing is recorded there; "" if something is."""
    if where is not None and not where(hook.path):
        return "not chosen by where"
    if isinstance(hook.function, PerformerAttention | hooks_.Adapter):
        return "linear already"
    if not hook.is_exact:
        name = getattr(hook.function, "__name__", type(hook.function).__name__)
        return f"its attention_fn is {name}, not Flax's or JAX's exact attention"
    if isinstance(hook.module, nnx.MultiHeadAttention) and hook.module.query.kernel.ndim != 3:
        return "one of a stack, of nnx.vmap or nnx.scan: make them a list of layers"
    return ""


def _observed(
    model: nnx.Module, batches: Iterable[Any], call: Call
) -> Iterator[dict[str, dict[str, Array]]]:
    """For each batch: path -> what the recorder there has seen."""
    graph, state = nnx.split(model)
    for batch in batches:
        leaves, tree = jax.tree.flatten(batch)
        arrays = [x if hasattr(x, "shape") else None for x in leaves]
        settings = tuple(None if hasattr(x, "shape") else x for x in leaves)
        yield _seen(graph, call, tree, settings, state, arrays)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _seen(graph, call, tree, settings, state, arrays):
    model = nnx.merge(graph, state)
    leaves = [y if x is None else x for x, y in zip(arrays, settings, strict=True)]
    call(model, jax.tree.unflatten(tree, leaves))
    recorders = [m for _, m in nnx.iter_modules(model) if isinstance(m, hooks_.Recorder)]
    return {r.path: r.seen.get_value() for r in recorders if r.seen is not None}


def _layer(path: str, seen: dict[str, Array], notes: hooks_.Notes) -> tuple[Layer, str]:
    """The layer, and why it cannot be replaced after all."""
    by_keys, causal = bool(seen["by_keys"]), bool(seen["causal"])
    sample = Sample(*(seen[name] for name in Sample._fields))
    is_causal = notes.is_causal[path]
    layer = Layer(
        path=path,
        moments=seen["moments"] / seen["count"],
        sample=sample,
        is_causal=is_causal or not by_keys,
        masks=path in notes.masks,
        masks_are_causal=not by_keys,
    )
    return layer, "" if by_keys or causal else "its masks are neither causal nor of keys alone"


def _parts(
    key: Array, layer: Layer, *, coupling: str | Coupling, m: int | None, calibration: str
) -> PerformerAttention:
    """Drawn and calibrated."""
    heads, head_dim = layer.sample.key.shape[-2:]
    attention = PerformerAttention(
        m or 2 * head_dim,
        head_dim,
        coupling=coupling,
        num_heads=heads,
        calibration=calibration,
        use_running_average=True,
        rngs=nnx.Rngs(frequencies=key),
    )
    drawn = couplings.draw(key, coupling, m or 2 * head_dim, head_dim, heads)
    attention.frequencies[...] = drawn
    if attention.calibration is not None:
        attention.calibrate(layer.moments)
    return attention


def _errors(layer: Layer, attention: PerformerAttention) -> dict[str, Float[Array, " n"]]:
    frequencies = attention.frequencies[...]
    return head_errors(layer.sample, frequencies, attention.calibration, layer.is_causal)


def _worst(layers: list[Layer], drawn: list[PerformerAttention], keep: int) -> set[int]:
    """Numbers of the layers with the largest errors."""
    if not keep:
        return set()
    pairs = zip(layers, drawn, strict=True)
    errors = [float(jnp.mean(_errors(*pair)["attention error"])) for pair in pairs]
    return set(sorted(range(len(layers)), key=lambda i: -errors[i])[:keep])


def _hook(model: nnx.Module, path: str) -> hooks_.Hook:
    return next(hook for hook in hooks_.hooks(model) if hook.path == path)


def _put(model: nnx.Module, layer: Layer, attention: PerformerAttention) -> None:
    hook = _hook(model, layer.path)
    if not hook.in_layer or layer.masks:
        attention = hooks_.Adapter(attention, hook.function, layer.masks_are_causal)
    hook.put(attention)


def _refine(
    model: nnx.Module,
    layer: Layer,
    attention: PerformerAttention,
    batches: Iterable[Any],
    call: Call,
    steps: int,
) -> None:
    """Moves the frequencies, on what comes to the layer in the model; one layer is in memory."""
    model = evaluated(model)
    hook = _hook(model, layer.path)
    recorder = hooks_.Recorder(hook.function, hook.path, hooks_.examples)
    hook.put(recorder)
    seen = [x[layer.path] for x in _observed(model, batches, call)]
    sample = Sample(*(jnp.concatenate([x[name] for x in seen]) for name in Sample._fields))
    attention.frequencies[...] = refine(
        attention.frequencies[...],
        attention.calibration,
        sample,
        steps=steps,
        is_causal=layer.is_causal,
    )
