"""Attention by kernels: three functions of arrays, each with a derivative of its own.

    attention   queries, keys   -> output, L    the fused kernels
    summarise   keys            -> state        of all keys
    look_up     queries, state  -> output, L    of any state: of several calls or devices

`attention` is `look_up` of `summarise`, in fewer kernels, and the one that can be causal. L is the
logarithm of the normaliser of a query,

    L = log sum_j e^{w_j q + c_j} s_j,   -inf without keys,

with w_j times the root of the scale. State(L, 1, output) are rows, which `state.combine` joins with
those of other keys. Neither |q|^2 / 2 nor the shift of calibrated keys is in L: `Arguments.shift`
and `given` are not read, and who needs e^{q.k} itself adds them to L.

A traced function may be compiled for another platform than the one of this process:
`jax.lax.platform_dependent` chooses, inside one `jax.custom_vjp`. Other platforms compute
`ordinary`, a function of the same arrays.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AxisType
from jaxtyping import Array, Float

from performer.attention import sizes
from performer.attention.kernels.which import MODULES, Kernel, Wanted, padded_size
from performer.attention.maps import Arguments
from performer.attention.state import Keys, State, varying

Rows = tuple[Float[Array, "b t n v"], Float[Array, "b t n"] | None]
"""Outputs, and L if asked for."""


def attention(
    x: Arguments,
    ordinary: Callable[..., Rows],
    settings: Kernel,
    *,
    before: State | None = None,
    log: bool = True,
) -> Rows:
    """Return attention over all keys and L, or None if not `log`.

    `before` is the state (k, b, m) of earlier keys, for causal attention alone; `ordinary` has it
    as a second argument then.
    """
    x = Arguments(x.query, Keys(*x.keys[:3]), x.w_query, x.w_key, x.feature_bias)
    kernels, args = _kernels(settings), (x,) if before is None else (x, before)
    width = x.keys.value.shape[-1]
    return _rows((kernels.forward, kernels.backward), args, width, ordinary, settings, log)


def summarise(x: Arguments, ordinary: Callable[[Arguments], State], settings: Kernel) -> State:
    """Return the state (k, b, m) of all keys in float32; its maxima have no gradient.

    Of x only keys, their frequencies and the weights are read, and known to `ordinary`.
    """
    nothing: Any = None
    x = Arguments(nothing, Keys(*x.keys[:3]), nothing, x.w_key, x.feature_bias)
    kernels, (m, width) = _kernels(settings), (x.w_key.shape[-2], x.keys.value.shape[-1])

    def kernel(args, residuals):
        state = kernels.forward_of_keys(_to_sizes(args, settings)[0], settings)
        c, s, z = swapped(state)
        return State(c[..., :m], s[..., :m], z[..., :m, :width]), state.maximum

    def gradients(args, maximum, given, absent, wanted):
        (y, _), pull = jax.vjp(partial(_to_sizes, settings=settings), args)
        more = maximum.shape[-1] - m, y.keys.value.shape[-1] - width
        _, *sums = swapped(wider_state(given, *more))
        return pull((kernels.backward_of_keys(y, maximum, sums, settings, wanted), None))[0]

    return _over_batch(kernel, gradients, ordinary, (x,), settings, batch_axis=1)


def look_up(
    x: Arguments,
    state: State,
    ordinary: Callable[[Arguments, State], Rows],
    settings: Kernel,
    *,
    log: bool = True,
) -> Rows:
    """Return attention over the features of a state (k, b, m) and L, or None if not `log`.

    Of x only queries and their frequencies are read, and known to `ordinary`.
    """
    nothing: Any = None
    x = Arguments(x.query, Keys(nothing, nothing, None), x.w_query, nothing, None)
    kernels, width = _kernels(settings), state.numerator.shape[-1]
    parts = kernels.forward_of_queries, kernels.backward_of_queries
    return _rows(parts, (x, state), width, ordinary, settings, log)


def _kernels(settings: Kernel) -> Any:
    return import_module(MODULES[settings.platform])


def _rows(parts: tuple[Callable, Callable], args, width: int, ordinary, settings, log) -> Rows:
    """Outputs, so many numbers wide, and L by kernels forward and backward."""
    forward, backward = parts
    to_sizes = partial(_to_sizes, settings=settings)

    def otherwise(*args):
        output, L = ordinary(*args)
        return output, L if log else None

    def kernel(args, residuals):
        output, L, rest = forward(*to_sizes(args), settings, log, residuals)
        if log:  # (b, n, t) -> (b, t, n), in kernels inf without keys
            L = jnp.where(jnp.isinf(L), -jnp.inf, L).swapaxes(1, 2)
        return (output[..., :width], L if log else None), rest

    def gradients(args, rest, given, absent, wanted):
        y, pull = cast(Any, jax.vjp(to_sizes, args))
        gradient, dL = given
        gradient = _wider(gradient, -1, padded_size(width, settings.platform) - width)
        dL = None if absent[1] in (None, True) else dL.swapaxes(1, 2)
        grads, sums = backward(*y, rest, gradient, dL, settings, wanted)
        return pull((grads, None if sums is None else state_gradient(y[1], *sums)))[0]

    return _over_batch(kernel, gradients, otherwise, args, settings)


def state_gradient(state: State, ds: Array, dz: Array) -> State:
    """The gradient of a state: s and z are relative to e^c."""
    return State(state.normaliser * ds + jnp.sum(state.numerator * dz, axis=-1), ds, dz)


def _to_sizes(args, settings: Kernel) -> tuple[Arguments, State | None]:
    """Arguments in the sizes of the kernels, and the state, if any, with its batch first."""
    x, state = args if len(args) == 2 else (*args, None)
    x, state = padded(x, state, settings.platform)
    return x, state if state is None else swapped(state)


def swapped(state: State) -> State:
    """(k, b, ...) -> (b, k, ...), or back."""
    return State(*(x.swapaxes(0, 1) for x in state))


def padded(x: Arguments, state: State | None, platform: str) -> tuple[Arguments, State | None]:
    """The same attention in the sizes of a platform's kernels.

    Zeros are added to queries, keys, values and frequencies. Further features repeat the last one,
    so that no maximum over features changes, with weight 0; no key of a state has them.
    """
    w: Any = x.w_query if x.w_key is None else x.w_key
    values = x.keys.value if state is None else state.numerator
    (m, h), v = w.shape[-2:], values.shape[-1]
    size = partial(padded_size, platform=platform)
    if (size(h), size(v), size(m)) == (h, v, m):
        return x, state

    to_h, to_v, to_m = size(h) - h, size(v) - v, size(m) - m

    def wider(y, by, axis=-1, **mode):
        return jax.tree.map(lambda y: _wider(y, axis, by, **mode), y)

    query, key = wider((x.query, x.keys.key), to_h)
    w_query, w_key = wider(wider((x.w_query, x.w_key), to_h), to_m, axis=-2, mode="edge")
    bias = x.feature_bias
    if to_m and w_key is not None:
        bias = jnp.zeros(m, w_key.dtype) if bias is None else bias
        bias = _wider(bias, -1, to_m, constant_values=-jnp.inf)
    keys = x.keys._replace(key=key, value=wider(x.keys.value, to_v))
    state = state if state is None else wider_state(state, to_m, to_v)
    return Arguments(query, keys, w_query, cast(Any, w_key), bias), state


def wider_state(state: State, to_m: int, to_v: int) -> State:
    """The state with more features, of no key, and more numbers in each value."""
    c, s, z = state
    z = _wider(_wider(z, -1, to_v), -2, to_m)
    return State(_wider(c, -1, to_m, constant_values=-jnp.inf), _wider(s, -1, to_m), z)


def _wider(x: Array, axis: int, more: int, **mode) -> Array:
    """The array with more entries at the end of an axis; zeros, or by the mode of `jnp.pad`."""
    axes = [(0, 0)] * x.ndim
    axes[axis] = (0, more)
    return jnp.pad(x, axes, **mode)


def _over_batch(kernel, gradients, ordinary, args, settings: Kernel, batch_axis: int = 0) -> Any:
    """`_differentiable` on the devices of the mesh in context; results have this batch axis.

    Compilers do not shard kernels: each device has a part of the batch.
    """

    def here(*args):
        return _differentiable(kernel, gradients, ordinary, args, settings)

    mesh, batch = jax.sharding.get_abstract_mesh(), len(jax.tree.leaves(args)[0])
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    axes = tuple(name for name, kind in kinds if kind == AxisType.Auto)
    if not axes or sizes.devices() == 1 or batch % sizes.devices():
        return here(*args)
    split, whole, of_state = jax.P(axes), jax.P(), jax.P(None, axes)
    specs = Arguments(*cast(Any, (split, split, whole, whole, whole))), of_state
    run = jax.shard_map(
        here,
        in_specs=specs[: len(args)],
        out_specs=of_state if batch_axis else split,
        check_vma=not settings.interpret,
    )
    return run(*args)


def _differentiable(kernel, gradients, ordinary, args, settings: Kernel) -> Any:
    """A function of arrays by its kernel and, elsewhere, by `ordinary`, on one device.

    kernel(args, residuals) returns the results and what `gradients` needs; gradients(args, rest,
    given, absent, wanted) returns gradients of args. `absent` marks results without a gradient.
    """

    def by_platform(kernel: Callable, otherwise: Callable, *args):
        if settings.interpret:
            return kernel(*args)
        return jax.lax.platform_dependent(*args, **{settings.platform: kernel}, default=otherwise)

    @jax.custom_vjp
    def run(*args):
        return by_platform(lambda *args: kernel(args, False)[0], ordinary, *args)

    def forward(*primals):
        args, perturbed = (
            jax.tree.map(lambda p, name=name: getattr(p, name), primals)
            for name in ("value", "perturbed")
        )

        def with_residuals(*args):
            return kernel(args, True)

        def otherwise(*args):
            _, rest = jax.eval_shape(with_residuals, *args)
            zeros = jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), rest)
            return ordinary(*args), varying(zeros, args)

        results, rest = by_platform(with_residuals, otherwise, *args)
        x = perturbed[0]
        arguments = x.w_query, x.w_key, x.feature_bias, x.keys.log_weights
        return results, (args, rest, Wanted(*map(bool, arguments)))

    def backward(saved, given):
        args, rest, wanted = saved
        absent = jax.tree.map(lambda g: isinstance(g, SymbolicZero), given)
        given = jax.tree.map(
            lambda g, zero: jnp.zeros(g.shape, g.dtype) if zero else g, given, absent
        )

        def by_kernel(args, rest, given):
            return gradients(args, rest, given, absent, wanted)

        def otherwise(args, rest, given):
            return jax.vjp(ordinary, *args)[1](given)

        return by_platform(by_kernel, otherwise, args, rest, varying(given, args))

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run(*varying(args))
