"""A trained model with exact attention -> one with random features, without retraining."""

from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from performer import couplings
from performer.attention import calibration as calibrations
from performer.attention.refinement import Sample, performer_estimate, transfer
from performer.nnx import _hooks as hooks_
from performer.nnx.layer import NO_WINDOW, PerformerAttention, Window
from performer.nnx.report import Report, head_errors, rows_of
from performer.typing import Coupling

Model = TypeVar("Model", bound=nnx.Module)
Call = Callable[[Any, Any], Any]


class Layer(NamedTuple):
    """One layer of attention, as measured."""

    path: str
    moments: calibrations.Moments
    sample: Sample
    """Queries and keys of a few examples."""
    is_causal: bool
    masks: bool
    """True if it is called with masks over pairs of a query and a key."""
    masks_are_causal: bool
    """True if these masks are causal."""


class Measured(NamedTuple):
    """Layers in the order of their calls, and path -> reason for those that stay exact."""

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
    exact_window: int = 0,
    exact_first: int = 0,
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
    that come through layers already replaced did no better (docs, "Results").

    Layers are `nnx.MultiHeadAttention`, with self or cross attention, grouped heads, normalised
    queries and keys, or a cache for decoding; and any attribute of any module that is
    `nnx.dot_product_attention` or `jax.nn.dot_product_attention`, or a `functools.partial` of them.
    Masks may say which keys exist, and be causal, also as arrays over pairs of a query and a key:
    of what kind these are is seen in the batches. Moments are over the pairs that exist. A layer is
    left as it is, and named in the report, where a bias, another mask, attention dropout
    (evaluation mode has none), a local window or another function is found, or no call. So is one
    in a stack of `nnx.vmap` or `nnx.scan`. Replaced layers of Flax lose their attention dropout,
    which linear attention cannot apply, so that the model can be trained on. What calls exact
    attention by a name that is no attribute cannot be seen.

    Args:
        model: any module. It stays as it is.
        batches: what the model is called with: an array, a tuple of arguments, or a dict of them by
            name; with `call`, anything. Read once, but once for each layer with `refine_steps`.
        coupling: of the frequencies; every layer and key head has its own draw.
        num_features: m; twice the head_dim of a layer if None, which with head_dim 16 kept 97% of
            the accuracy without a gradient, and 99% refined (docs, "Results").
        calibration: as of `PerformerAttention`.
        refine_steps: of Adam for each layer, at most; see `performer.refinement`.
        keep: so many layers, those with the largest errors after refinement, stay exact.
        exact_window: near keys are exact, as in `performer.performer_attention`, in layers of as
            many queries as keys; the errors are those with it.
        exact_first: so are the first keys.
        where: path -> whether that layer is replaced, as `lambda path: "encoder" in path`; all if
            None. Paths are those of the report, as "blocks.0.attention".
        call: (model, batch) -> anything, for a model that is called otherwise.
        measured: of `measure` on this model, to leave out the first passes.
        seed: of the frequencies.

    Returns:
        A new model of the same parameters, in evaluation mode, and the report.

    Raises:
        ValueError: for batches that cannot be read again, numbers below 0, `exact_first` without a
            window, or an unknown coupling or calibration.

    Example:
        >>> model, report = linearize(model, [x], num_features=8)
        >>> print(report)
    """
    window, call = Window(exact_window, exact_first), call or apply_to
    check(batches, coupling, calibration, refine_steps, keep, window)
    measured = measured or measure(model, batches, where=where, call=call)
    drawn = draw(measured.layers, coupling, num_features, calibration, seed, window)
    pairs = list(zip(measured.layers, drawn, strict=True))
    for layer, attention in pairs if refine_steps else ():
        refine_layer(attention, layer, _examples(model, layer.path, batches, call), refine_steps)
    kept, new = worst(measured.layers, drawn, keep), evaluated(model)
    for number, (layer, attention) in enumerate(pairs):
        if number in kept:
            continue
        hook = _hook(new, layer.path)
        if isinstance(hook.module, nnx.MultiHeadAttention):
            hook.module.dropout_rate = 0.0
        if layer.masks or not hook.in_layer:
            attention = hooks_.Adapter(attention, hook.function, layer.masks_are_causal)
        hook.put(attention)
    return new, report_of(measured, drawn, kept)


def measure(
    model: nnx.Module,
    batches: Iterable[Any],
    *,
    where: Callable[[str], bool] | None = None,
    call: Call | None = None,
) -> Measured:
    """Measure the attention layers of a model for `linearize`, which explains the arguments.

    Example:
        >>> measured = measure(model, [x])
        >>> models = [linearize(model, [x], num_features=m, measured=measured) for m in (8, 16)]
    """
    new, notes, left = evaluated(model), hooks_.Notes(), {}
    for hook in list(hooks_.hooks(new)):
        left[hook.path] = _unfit(hook, where) or "not called"
        if left[hook.path] == "not called":
            hook.put(hooks_.Recorder(hook.function, hook.path, notes.record))
    return found(added(_observed(new, batches, call or apply_to)), notes, left)


def evaluated(model: Model) -> Model:
    """A copy in evaluation mode."""
    model = nnx.clone(model)
    model.eval()
    return model


def apply_to(model: Any, batch: Any) -> Any:
    """Call the model on a batch: an array, a tuple of arguments, or a dict by name."""
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def check(
    batches: Iterable[Any],
    coupling: str | Coupling,
    calibration: str,
    refine_steps: int,
    keep: int,
    window: Window = NO_WINDOW,
) -> None:
    """Raise ValueError for invalid arguments of `linearize`."""
    calibrations.parts(calibration, coupling)
    counts = dict(refine_steps=refine_steps, keep=keep) | window._asdict()
    for name, count in counts.items():
        if count < 0:
            raise ValueError(f"{name} must not be negative, got {count}")
    if window.exact_first and not window.exact_window:
        raise ValueError(f"{window}: first keys go with an exact_window; give that one, too")
    if refine_steps and iter(batches) is batches:
        raise ValueError(
            "refine_steps reads the batches once for each layer, and these can be read only once:"
            " pass a list of them"
        )


def _unfit(hook: hooks_.Hook, where: Callable[[str], bool] | None) -> str:
    """Reason why the hook is not measured, or ""."""
    if where is not None and not where(hook.path):
        return "not chosen by where"
    if isinstance(hook.function, PerformerAttention | hooks_.Adapter):
        return "linear already"
    if not hooks_.is_exact(hook.function):
        name = getattr(hook.function, "__name__", type(hook.function).__name__)
        return f"its attention_fn is {name}, not Flax's or JAX's exact attention"
    if isinstance(hook.module, nnx.MultiHeadAttention) and hook.module.query.kernel.ndim != 3:
        return "one of a stack, of nnx.vmap or nnx.scan: make them a list of layers"
    return ""


def _observed(
    model: nnx.Module, batches: Iterable[Any], call: Call
) -> Iterator[dict[str, dict[str, Array]]]:
    """Records of each batch, by path."""
    graph, state = nnx.split(model)

    @partial(jax.jit, static_argnums=0)
    def seen(settings, state, arrays):  # the graph is closed over: attributes need not be hashable
        model = nnx.merge(graph, state)
        call(model, joined(settings, arrays))
        recorders = [m for _, m in nnx.iter_modules(model) if isinstance(m, hooks_.Recorder)]
        return {r.path: r.seen.get_value() for r in recorders if r.seen is not None}

    for batch in batches:
        settings, arrays = parted(batch)
        yield seen(settings, state, arrays)


def parted(batch: Any) -> tuple[tuple, list]:
    """Split a batch into its static part, which is hashable, and its arrays."""
    leaves, tree = jax.tree.flatten(batch)
    settings = tuple(None if hasattr(x, "shape") else x for x in leaves)
    return (tree, settings), [x if hasattr(x, "shape") else None for x in leaves]


def joined(settings: tuple, arrays: list) -> Any:
    """Inverse of `parted`."""
    tree, others = settings
    leaves = [y if x is None else x for x, y in zip(arrays, others, strict=True)]
    return jax.tree.unflatten(tree, leaves)


def added(batches: Iterable[dict[str, dict[str, Array]]]) -> dict[str, dict[str, Array]]:
    """Records of all batches together, by path."""
    total: dict[str, dict[str, Array]] = {}
    for seen in batches:
        both = {path: hooks_.together(total[path], seen[path]) for path in total.keys() & seen}
        total = total | seen | both
    return total


def found(total: dict[str, dict[str, Array]], notes: hooks_.Notes, left: dict) -> Measured:
    """The layers that can be replaced, and why the others cannot."""
    layers = []
    for path, refused in notes.refused.items():
        left[path] = refused
        if refused:
            continue
        seen = total[path]
        by_keys, causal = bool(seen["by_keys"]), bool(seen["causal"])
        if not (by_keys or causal):
            left[path] = "its masks are neither causal nor of keys alone"
            continue
        layers.append(
            Layer(
                path=path,
                moments=seen["moments"] / seen["count"],
                sample=Sample(*(seen[name] for name in Sample._fields)),
                is_causal=notes.is_causal[path] or not by_keys,
                masks=path in notes.masks,
                masks_are_causal=not by_keys,
            )
        )
    return Measured(layers, {path: why for path, why in left.items() if why})


def draw(
    layers: list[Layer],
    coupling: str | Coupling,
    num_features: int | None,
    calibration: str,
    seed: int,
    window: Window = NO_WINDOW,
) -> list[PerformerAttention]:
    """Attention for each layer, calibrated."""
    drawn = []
    for key, layer in zip(jax.random.split(jax.random.key(seed), len(layers)), layers, strict=True):
        heads, head_dim = layer.sample.key.shape[-2:]
        m = num_features or 2 * head_dim
        itself = layer.sample.query.shape[1] == layer.sample.key.shape[1]
        attention = PerformerAttention(
            m,
            head_dim,
            coupling=coupling,
            num_heads=heads,
            calibration=calibration,
            use_running_average=True,
            **(window if itself else NO_WINDOW)._asdict(),
            rngs=nnx.Rngs(frequencies=key),
        )
        attention.frequencies[...] = couplings.draw(key, coupling, m, head_dim, heads)
        if attention.calibration is not None:
            attention.calibrate(layer.moments)
        drawn.append(attention)
    return drawn


def worst(layers: list[Layer], drawn: list[PerformerAttention], keep: int) -> set[int]:
    """Return the numbers of the `keep` layers with the largest errors."""
    pairs = zip(layers, drawn, strict=True)
    errors = [float(jnp.mean(errors_of(*pair)["attention error"])) for pair in pairs if keep]
    return set(sorted(range(len(errors)), key=lambda i: -errors[i])[:keep])


def errors_of(layer: Layer, attention: PerformerAttention) -> dict[str, Float[Array, " n"]]:
    """`head_errors` on the examples of the layer."""
    own = attention.frequencies[...], attention.calibration
    return head_errors(layer.sample, *own, layer.is_causal, attention.window)


def refine_layer(attention: PerformerAttention, layer: Layer, sample: Sample, steps: int) -> None:
    """Moves its frequencies, towards lower errors with its window."""
    attention.frequencies[...] = transfer(
        _estimate_with(attention.window),
        attention.frequencies[...],
        attention.calibration,
        sample,
        steps=steps,
        is_causal=layer.is_causal,
    )


@cache  # the same function for the same window is the same program
def _estimate_with(window: Window) -> Callable[..., Float[Array, "b n t s"]]:
    return partial(performer_estimate, **window._asdict())


def report_of(measured: Measured, drawn: list[PerformerAttention], kept: set[int]) -> Report:
    """Report of all layers."""
    rows = []
    for number, (layer, attention) in enumerate(zip(measured.layers, drawn, strict=True)):
        state = "exact" if number in kept else "linear"
        rows += rows_of(number, layer.path, state, errors_of(layer, attention))
    return Report(rows, measured.left)


def _hook(model: nnx.Module, path: str) -> hooks_.Hook:
    return next(hook for hook in hooks_.hooks(model) if hook.path == path)


def _examples(model: nnx.Module, path: str, batches: Iterable[Any], call: Call) -> Sample:
    """Queries and keys of one layer in all batches."""
    model = evaluated(model)
    hook = _hook(model, path)
    hook.put(hooks_.Recorder(hook.function, hook.path, hooks_.examples))
    return sample_of(seen[path] for seen in _observed(model, batches, call))


def sample_of(batches: Iterable[dict[str, Array]]) -> Sample:
    """One sample of all batches."""
    columns = zip(*([x[name] for name in Sample._fields] for x in batches), strict=True)
    return Sample(*map(jnp.concatenate, columns))
