"""Drop-in attention for Flax linen, and what puts it into modules that are trained."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from performer.attention._dropin import attention_fn
from performer.attention.calibration import Calibration
from performer.nnx._hooks import Notes, Record, call_of, examples, together, understood
from performer.nnx.layer import NO_WINDOW, Window
from performer.nnx.linearization import (
    added,
    apply_to,
    check,
    draw,
    found,
    joined,
    parted,
    refine_layer,
    report_of,
    sample_of,
    worst,
)
from performer.nnx.report import Report
from performer.typing import Coupling


def performer_attention_fn(
    query: Float[Array, "*b t n h"],
    key: Float[Array, "*b s n h"],
    value: Float[Array, "*b s n v"],
    *,
    frequencies: Float[Array, "*n m h"],
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: linen.Module | None = None,
    force_fp32_for_softmax: bool = False,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    is_causal: bool = False,
    **options: Any,
) -> Float[Array, "*b t n v"]:
    """FAVOR+ as the `attention_fn` of `linen.MultiHeadDotProductAttention`.

    linen passes only keywords that are named in a function's signature, so all of its keywords are
    named here; what cannot be honoured is an error. The frequencies and the options are given by
    `functools.partial`, the former from a variable of your module: in the checkpoint, and not
    trained.

    Args:
        query: (..., t, n, h).
        key: (..., s, n, h).
        value: (..., s, n, v).
        frequencies: (m, h), or (n, m, h) with one draw for each head.
        bias: must be None.
        mask: over keys only, broadcasting to (..., 1, 1, s), bool or float. linen's dense causal
            masks cannot be told from others: pass is_causal=True (by `partial`) instead.
        broadcast_dropout: not used.
        dropout_rng: not used.
        dropout_rate: must be 0 unless deterministic.
        deterministic: no dropout.
        dtype: of the computation; that of the inputs if None.
        precision: not used; products are always exact.
        module: with the layer's `sow_weights=True`, where the estimated attention matrix is sown as
            `attention_weights`, in quadratic time.
        force_fp32_for_softmax: not used; it is always in float32.
        qk_attn_weights_einsum: must be None, there is no such product.
        attn_weights_value_einsum: must be None, likewise.
        is_causal: query i sees the keys up to i.
        options: keywords of `performer.performer_attention`, as `calibration` and `feature_map`;
            `exact_window`, `exact_first` and `alibi_slopes` are for self attention, with a cache
            for decoding or without.

    Returns:
        (..., t, n, v).

    Raises:
        ValueError: for what linear attention cannot honour; the message names the fix.

    Example:
        >>> class Layer(linen.Module):
        ...     @linen.compact
        ...     def __call__(self, x):
        ...         frequencies = self.variable(
        ...             "frequencies",
        ...             "frequencies",
        ...             lambda: couplings.draw(self.make_rng("frequencies"), "pm", 128, 64, 12),
        ...         )
        ...         attention_fn = partial(performer_attention_fn, frequencies=frequencies.value)
        ...         return linen.MultiHeadDotProductAttention(12, attention_fn=attention_fn)(x)

        `couplings.redraw(...)`, assigned to `frequencies.value` in training, draws new ones.
    """
    if qk_attn_weights_einsum is not None or attn_weights_value_einsum is not None:
        raise ValueError(
            "linear attention has no products of queries with keys, or of weights with values;"
            " leave out qk_attn_weights_einsum_cls and attn_weights_value_einsum_cls"
        )
    output, weights = attention_fn(
        query,
        key,
        value,
        frequencies,
        mask=mask,
        bias=bias,
        dropout_rate=dropout_rate,
        deterministic=deterministic,
        dtype=dtype,
        is_causal=is_causal,
        weights=module is not None,
        **options,
    )
    if module is not None:
        module.sow("intermediates", "attention_weights", weights)
    return output


COLLECTION = "linearized"
"""Where `linearize` leaves what it sees, during a call of `apply`."""


class LinearAttention(NamedTuple):
    """Replacement of one layer's exact attention."""

    frequencies: Float[Array, "k m h"]
    calibration: Calibration | None
    masks_are_causal: bool
    """True if its masks over pairs of a query and a key are causal; else they are over keys."""
    window: Window = NO_WINDOW


def linearize(
    module: linen.Module,
    variables: Any,
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
    call: Callable[[Callable[..., Any], Any], Any] = apply_to,
    seed: int = 0,
) -> tuple[dict[str, LinearAttention], Report]:
    """`performer.nnx.linearize` for a linen module: what its layers become, and the report.

    As modules cannot be changed, `linearized` takes what this returns, and is the context in which
    they are called. Layers are `linen.MultiHeadDotProductAttention` and what derives from it, with
    the `attention_fn` that it has of itself; their masks as in nnx. In linen that is all: a
    function of attention that a module calls cannot be seen, nor layers in a `linen.scan`, which
    stay exact. Frequencies and calibrations are in no collection of variables: save them beside.

    Args:
        module: unbound.
        variables: of the module, trained.
        batches: what `module.apply` is called with after the variables: an array, a tuple of
            arguments, or a dict of them by name; with `call`, anything.
        coupling: as all of the rest, of `performer.nnx.linearize`.
        num_features: m.
        calibration: its method.
        refine_steps: for each layer, at most.
        keep: so many layers stay exact.
        exact_window: near keys are exact, where there are as many queries as keys.
        exact_first: so are the first ones.
        where: path -> whether that layer is replaced; a path is "block_0/attention".
        call: (apply, batch) -> anything, for other arguments, as in
            `lambda apply, batch: apply(batch, deterministic=True)`.
        seed: of the frequencies.

    Raises:
        ValueError: as `performer.nnx.linearize`.

    Example:
        >>> layers, report = linearize(module, variables, [x], num_features=8)
        >>> with linearized(layers):
        ...     output = module.apply(variables, x)
    """
    window = Window(exact_window, exact_first)
    check(batches, coupling, calibration, refine_steps, keep, window)
    notes, left = Notes(), {}

    def fits(path: str, layer: linen.Module) -> bool:
        left.update({path: why} if (why := _unfit(path, layer, where)) else {})
        return path not in left

    see = partial(_observed, module, variables, batches, call)
    measured = found(added(see(fits, notes.record)), notes, left)
    drawn = draw(measured.layers, coupling, num_features, calibration, seed, window)
    for layer, attention in zip(measured.layers, drawn, strict=True) if refine_steps else ():
        seen = see(lambda path, _, own=layer.path: path == own, examples)
        refine_layer(attention, layer, sample_of(x[layer.path] for x in seen), refine_steps)
    kept = worst(measured.layers, drawn, keep)
    layers = {
        layer.path: LinearAttention(
            attention.frequencies[...],
            attention.calibration,
            layer.masks_are_causal,
            attention.window,
        )
        for number, (layer, attention) in enumerate(zip(measured.layers, drawn, strict=True))
        if number not in kept
    }
    return layers, report_of(measured, drawn, kept)


def linearized(layers: Mapping[str, LinearAttention]) -> AbstractContextManager:
    """The context in which linen modules have this attention, by the paths of their layers."""

    def of(path: str, layer: linen.Module) -> Any:
        return _linear(layers[path]) if path in layers else None

    return linen.intercept_methods(partial(_intercept, of))


def _intercept(of: Callable[[str, Any], Any], function, args, kwargs, context) -> Any:
    """Calls a layer with what `of` puts in the place of its attention, if anything."""
    layer = context.module
    called = context.method_name == "__call__"
    if not (called and isinstance(layer, linen.MultiHeadDotProductAttention)):
        return function(*args, **kwargs)
    own = layer.attention_fn
    new = of("/".join(layer.path) or "attention_fn", layer)
    object.__setattr__(layer, "attention_fn", new or own)  # modules are frozen
    try:
        return function(*args, **kwargs)
    finally:
        object.__setattr__(layer, "attention_fn", own)


def _linear(layer: LinearAttention) -> Callable[..., Array]:
    @wraps(linen.dot_product_attention)  # linen passes what the signature names
    def attend(query, key, value, bias=None, mask=None, **options):
        call = call_of(query, key, bias, mask, **options)
        mask, is_causal, fits = understood(call, key, layer.masks_are_causal)
        passed = {name: options[name] for name in ("dtype", "module") if name in options}
        passed |= {"mask": mask, "is_causal": is_causal}
        output = performer_attention_fn(
            call.query,
            key,
            value,
            frequencies=layer.frequencies,
            calibration=layer.calibration,
            **layer.window._asdict(),
            deterministic=True,
            **passed,
        )
        return output if fits is None else jnp.where(fits, output, jnp.nan)

    return attend


def _recording(path: str, layer: linen.Module, record: Record) -> Callable[..., Array]:
    @wraps(linen.dot_product_attention)
    def attend(query, key, value, bias=None, mask=None, **options):
        new = record(path, call_of(query, key, bias, mask, **options), key)
        if new is not None:
            add = lambda old, new: new if old is None else together(old, new)  # noqa: E731
            layer.sow(COLLECTION, "seen", new, init_fn=lambda: None, reduce_fn=add)
        return linen.dot_product_attention(query, key, value, bias=bias, mask=mask, **options)

    return attend


def _unfit(path: str, layer: linen.Module, where: Callable[[str], bool] | None) -> str:
    if where is not None and not where(path):
        return "not chosen by where"
    if layer.attention_fn is not linen.dot_product_attention:
        name = getattr(layer.attention_fn, "__name__", type(layer.attention_fn).__name__)
        return f"its attention_fn is {name}, not linen's own"
    return ""


def _observed(
    module: linen.Module,
    variables: Any,
    batches: Iterable[Any],
    call: Callable[[Callable[..., Any], Any], Any],
    chosen: Callable[[str, Any], bool],
    record: Record,
) -> Iterator[dict[str, dict[str, Array]]]:
    """For each batch: path -> what was seen there."""

    def of(path: str, layer: linen.Module) -> Any:
        return _recording(path, layer, record) if chosen(path, layer) else None

    @partial(jax.jit, static_argnums=0)
    def seen(settings, variables, arrays):
        state = {}

        def apply(*args, **kwargs):
            output, new = module.apply(variables, *args, mutable=[COLLECTION], **kwargs)
            state.update(new)
            return output

        with linen.intercept_methods(partial(_intercept, of)):
            call(apply, joined(settings, arrays))
        return dict(_by_path(state.get(COLLECTION, {})))

    for batch in batches:
        settings, arrays = parted(batch)
        yield seen(settings, variables, arrays)


def _by_path(tree: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if name == "seen":
            yield "/".join(path) or "attention_fn", value
        else:
            yield from _by_path(value, (*path, name))
