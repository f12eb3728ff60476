"""A trained model with exact attention -> one with random features, without retraining."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any, TypeVar

import jax
from flax import nnx
from jaxtyping import Array

from performer.attention import Features
from performer.linearization.function import LINEAR, UNCHOSEN, require_one, warn
from performer.linearization.layers import Layer, Measured
from performer.linearization.layout import Unfit
from performer.linearization.measure import examples, layer_of, observe, steps_of
from performer.linearization.outputs import Remembered, compared, prepared
from performer.linearization.program import Named
from performer.linearization.recipes import Options, replacements
from performer.linearization.report import Report
from performer.nnx import _hooks as hooks_
from performer.nnx.layer import PerformerAttention

Model = TypeVar("Model", bound=nnx.Module)
Call = Callable[[Any, Any], Any]
NOT_HELD = "no layer that the model holds: performer.linearize replaces it"


def linearize(
    model: Model,
    batches: Iterable[Any],
    *,
    where: Callable[[str], bool] | None = None,
    call: Call | None = None,
    measured: Measured | None = None,
    **options: Any,
) -> tuple[Model, Report]:
    """Replace exact attention in a model by `PerformerAttention`, whose frequencies are state.

    `performer.linearize` does the same for any function. This front returns a model instead:
    checkpoints, fine-tuning, redraws and Flax's decoding cache work on. Every layer measures its
    queries and keys on the batches: their moments, whose size does not depend on the number of
    batches. The moments calibrate it, its frequencies are drawn, and with `refine_steps` moved
    towards softmax attention on the queries and keys of all batches, one layer after another, as
    the original model computes them. Those that come through replaced layers did no better (docs,
    "Results").

    Layers are `nnx.MultiHeadAttention`, with self or cross attention, grouped heads, normalised
    queries and keys, or a decoding cache; and any attribute of a module that is
    `nnx.dot_product_attention`, `jax.nn.dot_product_attention`, or a `functools.partial` of one.
    Masks may be masks of keys, causal, or block-diagonal (packed sequences), also as arrays over
    pairs of a query and a key: the kind is detected from the batches. Moments are over the pairs
    that exist. A layer stays exact if it has a bias, another mask, attention dropout (evaluation
    mode has none), a local window or another function, if it is not called, or if `nnx.vmap` or
    `nnx.scan` stacks it. So does attention that no attribute holds, such as a call of
    `jax.nn.dot_product_attention` by its name. A warning and the report name it, with the reason.
    Replaced layers of Flax lose their attention dropout, which linear attention cannot apply.

    Args:
        model: any module. It is not changed.
        batches: inputs of the model: arrays, tuples of arguments, or dicts of them by name; with
            `call`, anything. They are read once, and with `refine_steps` once more for each layer.
        where: path -> whether that layer is replaced, as `lambda path: "encoder" in path`; all if
            None. Paths are those of the report, as "blocks.0.attention".
        call: (model, batch) -> output, for a model that is called otherwise.
        measured: result of `measure` on this model, to leave out the first passes. Only `measure`
            takes a `where` then.
        options: `coupling`, `num_features`, `calibration`, `refine_steps`, `keep`, `tolerance`,
            `seed`, `show`, `exact`, `recipes` and `time`, as of `performer.linearize`. Without
            sizes each layer has the fastest within the tolerance, if it is faster than exact
            attention.

    Returns:
        A new model of the same parameters, in evaluation mode, and the report.

    Raises:
        ValueError: for batches that cannot be read again, numbers below 0, exact first
            keys without a window, an unknown coupling or calibration, `where` with `measured`, a
            measurement of another model, or a model without attention.

    Example:
        >>> model, report = linearize(model, [x], num_features=8)
        >>> print(report)
    """
    chosen, call = Options.of(batches, **options), call or apply_to
    require_one(measured, where)
    measured = measured or measure(model, batches, where=where, call=call)
    function, state, _ = _function(model, call)
    _check_same(measured, state)
    replaced, report = replacements(
        measured, lambda layer: examples(function, _with(state, batches), layer), chosen
    )
    new = evaluated(model)
    found = {hook.path: hook for hook in hooks_.hooks(new)}
    for number, linear in replaced.items():
        layer = measured.layers[number]
        attention, hook = _attention(layer, linear, chosen), found[layer.path]
        if isinstance(hook.module, nnx.MultiHeadAttention):
            hook.module.dropout_rate = 0.0
        if layer.masked or not hook.in_layer:
            attention = hooks_.Adapter(attention, hook.function, layer.kind)
        hook.put(attention)
    if replaced:
        arguments = nnx.state(new), measured.arguments[1]
        after = _function(new, call)[0]
        change, whole = compared(measured.before(), after, arguments, chosen.time)
        change = change._replace(is_held_out=measured.is_held_out)
        report = replace(report, change=change, whole=whole)
    report.warn()
    return new, report


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
    left = {hook.path: _unfit(hook, where) for hook in hooks_.hooks(model)}
    function, state, noted = _function(model, call or apply_to)

    def is_chosen(place: Named) -> bool:
        path = hooks_.path_of(place.place.scope)
        return path is not None and not left[path]

    batches = Remembered(_with(state, batches))
    seen, layers = observe(function, batches, is_chosen), []
    calls: dict[str, list] = {}
    for place in seen.places:
        path = hooks_.path_of(place.place.scope)
        if path is None:
            left[place.name] = NOT_HELD
        elif not left[path]:
            calls.setdefault(path, []).extend(
                (place.number, i) for i in steps_of(seen, place.number)
            )
    for name, (scope, reason) in seen.left.items():
        path = hooks_.path_of(scope)
        left[path or name] = reason if path is None else f"{reason} ({name})"
    for path, own in calls.items():
        if left[path]:  # another of its calls cannot be replaced
            continue
        try:
            if noted[path].refused:
                raise Unfit(noted[path].refused)
            layers.append(layer_of(seen, path, own)._replace(masked=noted[path].masked))
        except Unfit as reason:
            left[path] = f"{reason} ({seen.places[own[0][0]].name})"
    idle = left.keys() - {layer.path for layer in layers}
    left |= {path: left[path] or "not called" for path in idle}
    left = {path: reason for path, reason in left.items() if reason}
    before = cache(partial(prepared, function, batches.last))
    measured = Measured(layers, left, seen.places, tuple(batches.last), before, seen.is_held_out)
    warn(measured)
    return measured


def _check_same(measured: Measured, state: nnx.State) -> None:
    """Raise ValueError for the measurement of another model."""
    before, here = (
        {path: x.shape for path, x in nnx.to_flat_state(each) if hasattr(x, "shape")}
        for each in (measured.arguments[0], state)
    )
    if before != here:
        path = next(x for x in (*before, *here) if before.get(x) != here.get(x))
        raise ValueError(
            f"measured is of another model: {'.'.join(map(str, path))} has the shape"
            f" {before.get(path)} there and {here.get(path)} here; call measure on this model"
        )


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


def _unfit(hook: hooks_.Hook, where: Callable[[str], bool] | None) -> str:
    """Reason why the hook is not measured, or ""."""
    if where is not None and not where(hook.path):
        return UNCHOSEN
    if isinstance(hook.function, PerformerAttention | hooks_.Adapter):
        return LINEAR
    if not hooks_.is_exact(hook.function):
        name = getattr(hook.function, "__name__", type(hook.function).__name__)
        return f"its attention_fn is {name}, not Flax's or JAX's exact attention"
    if isinstance(hook.module, nnx.MultiHeadAttention) and hook.module.query.kernel.ndim != 3:
        return "one of a stack, of nnx.vmap or nnx.scan: make them a list of layers"
    return ""


def _function(
    model: nnx.Module, call: Call
) -> tuple[Callable[..., Any], nnx.State, dict[str, hooks_.Note]]:
    """The model as a function of its state and a batch; the state; and path -> how it is called."""
    new, noted = evaluated(model), {}
    for hook in list(hooks_.hooks(new)):
        hook.trace(noted)
    graph, state = nnx.split(new)

    def function(state: nnx.State, batch: Any) -> list[Array]:
        output = call(nnx.merge(graph, state), batch)
        return [x for x in jax.tree.leaves(output) if hasattr(x, "shape")]

    return function, state, noted


def _with(state: nnx.State, batches: Iterable[Any]) -> Iterator[tuple[nnx.State, Any]]:
    return ((state, batch) for batch in batches)


def _attention(layer: Layer, linear: Features, options: Options) -> PerformerAttention:
    """Module of a layer's attention, with its frequencies and calibration as state."""
    w, transferred = linear.frequencies, linear.weights is not None
    calibrated = linear.calibration is not None
    attention = PerformerAttention(
        0 if w is None else w.shape[-2],
        layer.head_dim,
        coupling=options.coupling,
        num_heads=layer.held_out.key.shape[2],
        calibration=options.calibration if calibrated else "none",
        use_running_average=True,
        transferred=transferred,
        exact=linear.exact,
        rngs=nnx.Rngs(frequencies=0),
    )
    if attention.frequencies is not None:
        attention.frequencies[...] = w
    for name, x in attention.learned.items():
        x[...] = getattr(linear, name)
    if attention.calibration is not None:
        attention.calibrate(layer.moments)
    return attention
