"""Attention in kernels for TPU (Pallas): features never leave the core's memory.

Positive features, tokens in the lanes: queries (n, h, t), keys (n, h, s), values (n, v, s),
features (n, m, t), for the heads and tokens of a block. `Operands` are query (b, n, h, t), key
(b, k, h, s), value (b, k, v, s), W_q and W_k (k, m, h), log-weights of features (k, m, 1) and of
keys (b, k, 1, s). With the exponents

    l = W_k k - scale |k|^2 / 2 + log-weights of the keys + log-weights of the features
    x = y + c,   y = W_q q

    keys      c_j = max_k l_j(k),   f = e^{l - c},   [z s] = f [v; 1]^T
    queries   r = max_j x_j,   [o; d] = [z s]^T e^{x - r},   output = o / d,   L = r + log d

The backward pass computes features again, normalised for queries: p = e^{x - L}, for which
z^T p is the output and s^T p = 1. With g the gradient of the output, and d for "gradient of",

    queries   u = z^T g,  a = p.u / p.s,  dx = p (u - s a),  dq = W_q^T dx,  [dz ds] = p [g; -a]^T
    keys      dl = f (dz v + ds),   dk = W_k^T dl - scale k sum_j dl_j,   dv = dz^T f

c and r cancel, and have no gradient. The gradient of a log-weight is the sum of dl over the other
axes; the gradients of the frequencies are dx q^T and dl k^T.

Bidirectional: if the tokens fit into one block, keys and queries are one kernel, whose backward
pass folds the keys again; else each is a kernel that iterates over blocks.

Causal: one kernel, chunk by chunk. Keys before the chunk enter through the state (c, s, z), which
stays in the core's memory. Keys of the chunk enter pair by pair, stabilised as in `sweep`: with
mu_s the largest exponent of a key and nu_t the largest of a query,

    A = e^{l - mu},   B = e^{y - nu},   K = A^T B,   M_st = mu_s for s <= t, else -inf
    w_st = K_st e^{M_st - F_t},   p = e^{x - L},   output = z^T p + v w

L and F make all weights p.s + sum_s w of a query sum to 1. The backward pass reads them, one number
a token each, and the state before each chunk. It iterates over the chunks in reverse, with [dz ds]
of the state after the chunk. With r = v^T g,

    a = p.u + sum_s w_s r_s,   dy = dx + B * A D,   D = e^{M - F} (r - a)
    dl = A * B D^T + f (dz v + ds),   dv = dz^T f + g w^T

and [dz ds] of the state before the chunk is e^{c - c'} times [dz ds] of the state after it, plus
p [g; -a]^T.

Products have operands in the dtype of the inputs and sum in float32. In bfloat16 s and a, of the
normaliser and its gradient, are three operands each, of 24 bits together; z and dz are two in z^T g
and dz v, most of which s a and -ds cancel.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from performer.attention.kernels.which import Kernel, Operands
from performer.attention.maps import Arguments
from performer.attention.sizes import LANES, ROWS
from performer.attention.state import State
from performer.attention.sweep import ABOVE_LOST, LOST
from performer.numerics import finite, rounded

Out = jax.ShapeDtypeStruct
CHUNK = LANES
"""Tokens of a causal chunk."""


def dot(left: Array, right: Array, over: tuple[int, int] = (2, 1)) -> Array:
    """Products of heads (n, ., .) over these axes, in float32."""
    return jax.lax.dot_general(
        left,
        right,
        (((over[0],), (over[1],)), ((0,), (0,))),
        precision=None if left.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def through_bfloat16(x: Array) -> Array:
    """x rounded within a kernel; outside one XLA may skip it."""
    return x.astype(jnp.bfloat16).astype(x.dtype)


def parts(x: Array, axis: int, dtype: jnp.dtype, rounding: Callable = through_bfloat16) -> Array:
    """Rows (axis 1) or columns (axis 2) in `dtype` that add up to x, one in float32."""
    rows = [x]
    if dtype == jnp.bfloat16:
        high = rounding(x)
        middle = rounding(x - high)
        rows = [high, middle, x - high - middle]
    return jnp.concatenate(rows + [jnp.zeros_like(x)] * (ROWS - len(rows)), axis).astype(dtype)


def fine(left: Array, right: Array) -> Array:
    """The product of float32 with an operand: in bfloat16 the left side is two operands.

    They lie side by side in the summed axis, of which 64 fill only half a register.
    """
    if right.dtype != jnp.bfloat16:
        return dot(left, right)
    high = left.astype(right.dtype)
    low = (left - high.astype(left.dtype)).astype(right.dtype)
    return dot(jnp.concatenate([high, low], axis=2), jnp.concatenate([right, right], axis=1))


def shared(x: Array, n: int) -> Array:
    """Repeat for n query heads; consecutive ones share a key head."""
    if len(x) == n:
        return x
    each = jnp.broadcast_to(x[:, None], (len(x), n // len(x), *x.shape[1:]))
    return each.reshape(n, *x.shape[1:])


def gathered(x: Array, k: int) -> Array:
    """Sum over the query heads of each key head."""
    return x if len(x) == k else jnp.sum(x.reshape(k, len(x) // k, *x.shape[1:]), axis=1)


def key_exponents(x: Operands, scale: float) -> Float[Array, "k m s"]:
    """l."""
    squares = jnp.square(x.key.astype(jnp.float32))
    token_exponents = -scale / 2 * jnp.sum(squares, axis=1, keepdims=True)
    if x.log_weights is not None:
        token_exponents += x.log_weights
    exponents = dot(x.w_key, x.key) + token_exponents
    return exponents if x.feature_bias is None else exponents + x.feature_bias


def fold(
    exponents: Array, value: Array, c: Array | None = None, z: Array | None = None
) -> tuple[Array, Array, Array]:
    """f, c and [z s], after c and [z s] of earlier keys."""
    largest = jnp.max(exponents, axis=2, keepdims=True)
    largest = largest if c is None else jnp.maximum(c, largest)
    f = jnp.exp(exponents - columns(finite(largest), exponents.shape[2]))
    sums = dot(f.astype(value.dtype), with_ones(value), (2, 2))  # (k, m, w)
    if c is not None and z is not None:
        sums += z * columns(jnp.exp(c - finite(largest)), z.shape[2])
    return f, largest, sums


def columns(x: Array, count: int) -> Array:
    """Repeat `LANES` equal columns to `count`; a single one broadcasts."""
    if x.shape[2] == 1:
        return x
    return jnp.concatenate([x] * -(-count // x.shape[2]), axis=2)[:, :, :count]


def with_ones(value: Float[Array, "k v s"]) -> Float[Array, "k w s"]:
    """[v; 1], and rows of zeros."""
    one = jnp.ones((len(value), 1, value.shape[2]), jnp.float32)
    return jnp.concatenate([value, parts(one, 1, value.dtype)], axis=1)


def numerators(
    z: Float[Array, "k m w"], dtype: jnp.dtype, rounding: Callable = through_bfloat16
) -> Float[Array, "k w m"]:
    """[z s]^T as an operand, s in parts."""
    width = z.shape[2] - ROWS
    s = parts(z[:, :, width:].swapaxes(1, 2)[:, :1], 1, dtype, rounding)
    return jnp.concatenate([z[:, :, :width].astype(dtype).swapaxes(1, 2), s], axis=1)


def in_chunk(x: Operands, y: Array, exponents: Array):
    """A, B, K and M; M (k, s, t), the others for each of the n query heads."""
    n, dtype = len(x.query), x.query.dtype
    mu = jnp.max(exponents, axis=1, keepdims=True)  # (k, 1, s)
    A = shared(jnp.exp(exponents - finite(mu)), n)
    B = jnp.exp(y - jnp.max(y, axis=1, keepdims=True))
    K = dot(A.astype(dtype), B.astype(dtype), (1, 1))  # (n, s, t)
    s, t = (jax.lax.broadcasted_iota(jnp.int32, (1, CHUNK, CHUNK), axis) for axis in (1, 2))
    return A, B, K, jnp.where(s <= t, mu.swapaxes(1, 2), -jnp.inf)


def query_exponents(x: Operands) -> Float[Array, "n m t"]:
    """y."""
    return dot(shared(x.w_query, len(x.query)), x.query)


def attend(
    x: Operands, y: Array, c: Array, zs: Array, near: tuple[Array, Array] | None = None
) -> tuple[Float[Array, "n v t"], Float[Array, "n 1 t"]]:
    """The output and L, inf for a query without keys.

    `near` is the weights of pairs (n, s, t) relative to e^maximum, and the maximum (n, 1, t).
    """
    n, dtype, width = len(x.query), x.query.dtype, zs.shape[1] - ROWS
    exponents = y + shared(c, n)
    largest = jnp.max(exponents, axis=1, keepdims=True)
    largest = finite(largest if near is None else jnp.maximum(largest, near[1]))
    rows = dot(shared(zs, n), jnp.exp(exponents - largest).astype(dtype))  # [o; d] (n, w, t)
    if near is not None:
        weights = near[0] * jnp.exp(near[1] - largest)
        rows += dot(shared(with_ones(x.value), n), weights.astype(dtype))
    d = jnp.sum(rows[:, width:], axis=1, keepdims=True)
    if near is not None:
        d = jnp.where((d < 0.5) & (near[1] > -jnp.inf), jnp.nan, d)  # lost, and it matters
    output = rows[:, :width] * (1 / jnp.where(d == 0, 1.0, d))
    return output, jnp.where(d == 0, jnp.inf, largest + jnp.log(d))


class Given(NamedTuple):
    """Gradients of the output and, if it has one, of L."""

    output: Any
    log: Any = None


def from_queries(x: Operands, y: Array, c: Array, z: Array, L: Array, given: Given, near=None):
    """dx, [dz ds] and a; `near` is w and r of pairs (n, s, t)."""
    gradient, dL = given
    (n, k), width = (len(x.query), len(c)), gradient.shape[1]
    p = jnp.exp(y + shared(c, n) - L)
    s = shared(z[:, :, width : width + 1], n)  # (n, m, 1)
    u = fine(shared(z[:, :, :width], n), gradient)  # (n, m, t)
    total, a = (jnp.sum(p * by, axis=1, keepdims=True) for by in (s, u))
    if near is not None:
        w, r = near
        total += jnp.sum(w, axis=1, keepdims=True)
        a += jnp.sum(w * r, axis=1, keepdims=True)
    a = a / jnp.where(total == 0, 1.0, total)  # (n, 1, t); total is 1 up to rounding
    a = a if dL is None else a - dL
    rows = jnp.concatenate([gradient, parts(-a, 1, gradient.dtype)], axis=1)
    dz = gathered(dot(p.astype(gradient.dtype), rows, (2, 2)), k)  # (k, m, w), ds in parts
    ds = jnp.sum(dz[:, :, width:], axis=2, keepdims=True)
    dz = jnp.concatenate([dz[:, :, :width], ds, jnp.zeros_like(dz[:, :, width + 1 :])], axis=2)
    return p * (u - s * a), dz, a


def from_keys(x: Operands, f: Array, dz: Array, scale: float, within: Array | float = 0.0):
    """dk, dv and dl, which includes `within`."""
    dtype, width = x.key.dtype, x.value.shape[1]
    dz, ds = dz[:, :, :width], dz[:, :, width : width + 1]
    dl = within + f * (fine(dz, x.value) + ds)
    dk = dot(x.w_key.swapaxes(1, 2), dl.astype(dtype))
    dk -= scale * x.key.astype(jnp.float32) * jnp.sum(dl, axis=1, keepdims=True)
    return dk, dot(dz.astype(dtype).swapaxes(1, 2), f.astype(dtype)), dl


def real_keys(x: Operands, length: int, i: Array | int = 0) -> Operands:
    """The i-th block of keys; keys past the last do not count."""
    inside = within(x.key.shape[2], length, i)
    if inside is None:
        return x
    weights = x.log_weights
    if weights is None:
        weights = jnp.zeros(inside.shape, jnp.float32)
    key, value = (jnp.where(inside, y, 0) for y in (x.key, x.value))
    weights = jnp.where(inside, weights, -jnp.inf)
    return x._replace(key=key, value=value, log_weights=weights)


def real_queries(x: Operands, logsum, given: Given, length: int, i: Array | int = 0):
    """The i-th block of queries, their L and gradients; p is 0 past the last."""
    inside = within(x.query.shape[2], length, i)
    if inside is None:
        return x, logsum, given
    query, given = jax.tree.map(lambda y: jnp.where(inside, y, 0), (x.query, given))
    logsum = jax.tree.map(lambda y: jnp.where(inside, y, jnp.inf), logsum)
    return x._replace(query=query), logsum, given


def within(block: int, length: int, i: Array | int) -> Array | None:
    """Mask (1, 1, block) of the tokens in the i-th block; None if all blocks are full."""
    if length % block == 0:
        return None
    return i * block + jax.lax.broadcasted_iota(jnp.int32, (1, 1, block), 2) < length


def attend_in_chunk(x: Operands, exponents: Array, c: Array, zs: Array):
    """The output, L and F."""
    n, y = len(x.query), query_exponents(x)
    _, _, K, M = in_chunk(x, y, exponents)
    nu, largest = jnp.max(y, axis=1, keepdims=True), jnp.max(M, axis=1, keepdims=True)
    weights = K * shared(jnp.exp(M - finite(largest)), n)
    largest = shared(largest, n)
    total = jnp.sum(weights, axis=1, keepdims=True)
    lost, total = total < LOST, jnp.maximum(total, LOST)
    maximum = nu + largest + jnp.where(lost, ABOVE_LOST, jnp.log(total))
    output, L = attend(x, y, c, zs, (weights * jnp.where(lost, 0.0, 1 / total), maximum))
    # w is e^{maximum - L} times the weights; 0 if the sum is lost, as without keys.
    return output, L, jnp.where(lost, jnp.inf, L - nu)


def backward_of_chunk(x: Operands, exponents, c, z, after, dz, L, F, given: Given, scale: float):
    """dk, dv, dy, dl and [dz ds] of the state before the chunk; `after` is c after it."""
    (n, k), dtype, y = (len(x.query), len(x.key)), x.query.dtype, query_exponents(x)
    gradient = given.output
    A, B, K, M = in_chunk(x, y, exponents)
    near = jnp.exp(shared(M, n) - F)
    w, r = K * near, dot(shared(x.value, n), gradient, (1, 1))
    dx, dz_before, a = from_queries(x, y, c, z, L, given, (w, r))
    D = (near * (r - a)).astype(dtype)
    dy = dx + B * dot(A.astype(dtype), D)
    within = gathered(A * dot(B.astype(dtype), D, (2, 2)), k)
    f = jnp.exp(exponents - finite(after))
    dk, dv, dl = from_keys(x, f, dz, scale, within)
    dv += gathered(dot(gradient, w.astype(dtype), (2, 2)), k)
    dz = dz * jnp.exp(c - finite(after)) + dz_before
    return dk, dv, dy, dl, dz


def read(refs):
    """Return the arrays of references."""
    return jax.tree.map(lambda ref: ref[...], refs)


def _forward(x, output, logsum, *, scale, lengths):
    x = real_keys(read(x), lengths[1])
    _, c, z = fold(key_exponents(x, scale), x.value)
    out, logsum[...] = attend(x, query_exponents(x), c, numerators(z, x.query.dtype))
    output[...] = out.astype(output.dtype)


def _keys(x, c, z, zs, wide, *, scale, lengths):
    i = pl.program_id(2)
    start(wide, z, i == 0)
    x = real_keys(read(x), lengths[1], i)
    wide[...], z[...] = fold(key_exponents(x, scale), x.value, wide[...], z[...])[1:]
    c[...] = wide[:, :, :1]

    @pl.when(i == pl.num_programs(2) - 1)  # outside the kernel XLA may skip a rounding
    def _():
        zs[...] = numerators(z[...], zs.dtype)


def _queries(x, c, zs, output, logsum, *, scale, lengths):
    x = read(x)
    out, logsum[...] = attend(x, query_exponents(x), c[...], zs[...])
    output[...] = out.astype(output.dtype)


def _backward(x, logsum, given, grads, *, scale, lengths):
    x = real_keys(read(x), lengths[1])
    f, c, z = fold(key_exponents(x, scale), x.value)
    x, logsum, given = real_queries(x, logsum[...], read(given), lengths[0])
    dx, dz, _ = from_queries(x, query_exponents(x), c, z, logsum, given)
    write_queries(x, dx, grads)
    write_keys(x, *from_keys(x, f, dz, scale), grads)


def _queries_backward(x, c, z, logsum, given, grads, dz, *, scale, lengths):
    i = pl.program_id(2)
    x, logsum, given = real_queries(read(x), logsum[...], read(given), lengths[0], i)
    dx, dz_block, _ = from_queries(x, query_exponents(x), c[...], z[...], logsum, given)
    add(dz, dz_block, i == 0)
    write_queries(x, dx, grads)


def _keys_backward(x, c, dz, grads, *, scale, lengths):
    x = real_keys(read(x), lengths[1], pl.program_id(2))
    f = jnp.exp(key_exponents(x, scale) - finite(c[...]))
    write_keys(x, *from_keys(x, f, dz[...], scale), grads)


def write_queries(x: Operands, dx: Array, grads: Operands) -> None:
    """Write gradients of the queries and, if wanted, of their frequencies."""
    dx = dx.astype(x.query.dtype)
    dq = dot(shared(x.w_query, len(x.query)).swapaxes(1, 2), dx)
    grads.query[...] = dq.astype(grads.query.dtype)
    if grads.w_query is not None:
        add(grads.w_query, gathered(dot(dx, x.query, (2, 2)), len(x.w_query)), _first())


def write_keys(x: Operands, dk: Array, dv: Array, dl: Array, grads: Operands) -> None:
    """Write gradients of keys, values and, if wanted, of the weights and frequencies of keys."""
    grads.key[...], grads.value[...] = dk.astype(grads.key.dtype), dv.astype(grads.value.dtype)
    if grads.log_weights is not None:
        grads.log_weights[...] = jnp.sum(dl, axis=1, keepdims=True)
    if grads.w_key is not None:
        add(grads.w_key, dot(dl.astype(x.key.dtype), x.key, (2, 2)), _first())
    if grads.feature_bias is not None:
        add(grads.feature_bias, jnp.sum(dl, axis=2, keepdims=True), _first())


def start(c, z, first: Array, state=None) -> None:
    """Set a state, by default the state of no keys, at the first step of the grid."""

    @pl.when(first)
    def _():
        if state is None:
            c[...] = jnp.full_like(c, -jnp.inf)
            z[...] = jnp.zeros_like(z)
        else:
            c[...], z[...] = jnp.broadcast_to(state[0][...], c.shape), state[1][...]


def add(ref, value: Array, first: Array) -> None:
    """Add to a sum over steps of the grid."""

    @pl.when(first)
    def _():
        ref[...] = jnp.zeros_like(ref)

    ref[...] += value


def _first() -> Array:
    return (pl.program_id(1) == 0) & (pl.program_id(2) == 0)


@dataclasses.dataclass(frozen=True)
class Piece:
    """An operand or result: "tokens", cut along them, "weights", "state" or "states" of chunks."""

    array: Any
    kind: str

    def spec(self, settings: Kernel, k: int, last: int | None) -> pl.BlockSpec:
        """The block of a step (group of heads, batch entry, tokens) of the grid.

        Steps of tokens run backwards from `last` if it is not None.
        """
        shape = self.array.shape

        def at(i):
            return i if last is None else last - i

        if self.kind == "weights":
            return pl.BlockSpec((settings.heads, *shape[1:]), lambda g, b, i: (g, 0, 0))
        if self.kind == "states":
            sizes = (None, None, settings.heads, *shape[3:])
            return pl.BlockSpec(sizes, lambda g, b, i: (b, at(i), g, 0, 0))
        here = (None, settings.heads * shape[1] // k)
        if self.kind == "state":
            return pl.BlockSpec((*here, *shape[2:]), lambda g, b, i: (b, g, 0, 0))
        return pl.BlockSpec((*here, shape[2], settings.block), lambda g, b, i: (b, g, 0, at(i)))


def pieces(tree, kind: str):
    """All arrays of a tree as parts of one kind."""
    return jax.tree.map(partial(Piece, kind=kind), tree)


def operands(x: Operands) -> Operands:
    """The operands as parts, each of its kind."""
    kinds = ("tokens", "tokens", "tokens", "weights", "weights", "weights", "tokens")
    return Operands(*(pieces(y, kind) for y, kind in zip(x, kinds, strict=True)))


def call(kernel, settings: Kernel, lengths, ins, outs, scratch=(), backwards: bool = False):
    """Run a kernel over the blocks of the pieces; return the arrays of `outs`.

    Its arguments are references to the blocks of `ins` and `outs`, and to arrays of the shapes
    `scratch` for its heads, which persist over the steps of tokens.
    """
    leaves = jax.tree.leaves((ins, outs))
    k = next(len(x.array) for x in leaves if x.kind == "weights")
    tokens = [x.array.shape for x in leaves if x.kind == "tokens"]
    steps = max(-(-shape[-1] // settings.block) for shape in tokens)
    last = steps - 1 if backwards else None
    ins, outs = (
        [
            jax.tree.map(look, tree)
            for look in (lambda x: x.array, lambda x: x.spec(settings, k, last))
        ]
        for tree in (ins, outs)
    )
    # Inside `jax.shard_map` results vary over the axes of the arguments.
    varies = [jax.typeof(x).manual_axis_type for x in jax.tree.leaves(ins[0])]
    results = jax.tree.map(lambda x: Out(x.shape, x.dtype, manual_axis_type=varies[0]), outs[0])
    sums = any(len(x.shape) == 3 for x in jax.tree.leaves(outs[0]))
    return pl.pallas_call(
        partial(kernel, scale=settings.scale, lengths=lengths),
        grid=(k // settings.heads, tokens[0][0], steps),
        in_specs=ins[1],
        out_specs=outs[1],
        out_shape=results,
        scratch_shapes=[pltpu.VMEM((settings.heads, *shape), jnp.float32) for shape in scratch],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary" if sums else "parallel", "arbitrary")
        ),
        interpret=settings.interpret,
    )(*ins[0])


def results(x: Operands, width: int) -> Any:
    """The output, of so many numbers for a query, and L."""
    b, n, _, t = x.query.shape
    output = Out((b, n, width, t), x.query.dtype), Out((b, n, 1, t), jnp.float32)
    return pieces(output, "tokens")


def state_of_keys(x: Operands, settings: Kernel):
    """c (b, k, m, 1) and [z s] (b, k, m, w) of all keys; [z s]^T as an operand of queries."""
    (b, k, width, s), m = x.value.shape, x.w_key.shape[1]
    shapes = (m, 1), (m, width + ROWS), (width + ROWS, m)
    dtypes = jnp.float32, jnp.float32, x.key.dtype
    outs = [Out((b, k, *y), dtype) for y, dtype in zip(shapes, dtypes, strict=True)]
    ins, outs = (operands(_key_operands(x)),), pieces(outs, "state")
    return call(_keys, settings, (s, s), ins, outs, [(m, LANES)])


def rows_of_queries(x: Operands, c: Array, zs: Array, settings: Kernel):
    """The output (b, n, v, t) and L, from a state."""
    ins, t = (operands(_query_operands(x)), *pieces((c, zs), "state")), x.query.shape[3]
    return call(_queries, settings, (t, t), ins, results(x, zs.shape[2] - ROWS))


def query_gradients(x: Operands, state, logsum: Array, given: Given, settings: Kernel, wanted):
    """Gradients of the operands of queries, None if not wanted; and [dz ds]."""
    y, t, (c, z) = _query_operands(x), x.query.shape[3], state
    ins = operands(y), *pieces((c, z), "state"), *pieces((logsum, given), "tokens")
    outs = operands(gradients(y, wanted)), Piece(Out(z.shape, z.dtype), "state")
    return call(_queries_backward, settings, (t, t), ins, outs)


def key_gradients(x: Operands, c: Array, dz: Array, settings: Kernel, wanted) -> Operands:
    """Gradients of the operands of keys, None if not wanted."""
    y, s = _key_operands(x), x.key.shape[3]
    ins, outs = (operands(y), *pieces((c, dz), "state")), (operands(gradients(y, wanted)),)
    return call(_keys_backward, settings, (s, s), ins, outs)[0]


def forward_of_blocks(x: Operands, settings: Kernel):
    """The output (b, n, v, t), and for the backward pass L and (c, [z s])."""
    lengths = x.query.shape[3], x.key.shape[3]
    if settings.block >= max(lengths):
        outs = results(x, x.value.shape[2])
        return *call(_forward, settings, lengths, (operands(x),), outs), None
    c, z, zs = state_of_keys(x, settings)
    return *rows_of_queries(x, c, zs, settings), (c, z)


def backward_of_blocks(x: Operands, logsum, state, given: Given, settings, wanted) -> Operands:
    """Gradients of the operands, None if not wanted."""
    lengths = x.query.shape[3], x.key.shape[3]
    if settings.block >= max(lengths):
        ins = operands(x), *pieces((logsum, given), "tokens")
        outs = (operands(gradients(x, wanted)),)
        return call(_backward, settings, lengths, ins, outs)[0]
    of_queries, dz = query_gradients(x, state, logsum, given, settings, wanted)
    grads = key_gradients(x, state[0], dz, settings, wanted)
    return grads._replace(query=of_queries.query, w_query=of_queries.w_query)


def gradients(x: Operands, wanted) -> Operands:
    """Shapes and dtypes of the wanted gradients, float32 for frequencies and weights."""
    like = Operands(
        *(y if getattr(wanted, name, True) else None for name, y in x._asdict().items())
    )
    return jax.tree.map(lambda y: Out(y.shape, y.dtype if y.ndim == 4 else jnp.float32), like)


def _key_operands(x: Operands) -> Operands:
    return x._replace(query=None, w_query=None)


def _query_operands(x: Operands) -> Operands:
    return Operands(query=x.query, w_query=x.w_query)


def _causal(x, first, output, logs, states, c, z, *, scale, lengths):
    i = pl.program_id(2)
    start(c, z, i == 0, first)
    x = real_keys(read(x), lengths[1], i)
    exponents = key_exponents(x, scale)
    before = c[...], z[...]
    if states is not None:
        states[0][...], states[1][...] = before[0][:, :, :1], before[1]
    out, *both = attend_in_chunk(x, exponents, before[0], numerators(before[1], x.query.dtype))
    output[...] = out.astype(output.dtype)
    if logs is not None:
        logs[0][...], logs[1][...] = both
    _, c[...], z[...] = fold(exponents, x.value, *before)


def _causal_backward(x, states, logs, given, grads, first, dz, *, scale, lengths):
    i = pl.num_programs(2) - 1 - pl.program_id(2)

    @pl.when(pl.program_id(2) == 0)
    def _():
        dz[...] = jnp.zeros_like(dz)

    x = real_keys(read(x), lengths[1], i)
    exponents = key_exponents(x, scale)
    c, z = read(states)
    after = jnp.maximum(c, jnp.max(exponents, axis=2, keepdims=True))
    x, (L, F), given = real_queries(x, read(logs), read(given), lengths[0], i)
    dk, dv, dy, dl, dz[...] = backward_of_chunk(
        x, exponents, c, z, after, dz[...], L, F, given, scale
    )
    write_queries(x, dy, grads)
    write_keys(x, dk, dv, dl, grads)
    if first is not None:  # the last step writes that of the first chunk
        first[...] = dz[...]


def forward_of_chunks(x: Operands, first: Any, settings: Kernel, log: bool, residuals: bool):
    """The output (b, n, v, t); for the backward pass (L, F) and the states before chunks."""
    (b, k, width, t), n, m = x.value.shape, x.query.shape[1], x.w_key.shape[1]
    chunks, state = -(-t // CHUNK), ((m, 1), (m, width + ROWS))
    logs = states = None
    if log or residuals:
        logs = (Out((b, n, 1, t), jnp.float32),) * 2
    if residuals:
        states = tuple(Out((b, chunks, k, *shape), jnp.float32) for shape in state)
    outs = pieces(Out((b, n, width, t), x.value.dtype), "tokens"), pieces(logs, "tokens")
    ins, outs = (operands(x), pieces(first, "state")), (*outs, pieces(states, "states"))
    scratch = (m, CHUNK), (m, width + ROWS)
    return call(_causal, settings, (t, t), ins, outs, scratch)


def backward_of_chunks(
    x: Operands, has_first: bool, logs, states, given: Given, settings: Kernel, wanted
):
    """Gradients of the operands, None if not wanted; and [dz ds] of the state before, if any."""
    (b, k, width, t), m = x.value.shape, x.w_key.shape[1]
    ins = operands(x), pieces(states, "states"), *pieces((logs, given), "tokens")
    before = Out((b, k, m, width + ROWS), jnp.float32) if has_first else None
    outs, scratch = (operands(gradients(x, wanted)), pieces(before, "state")), ((m, width + ROWS),)
    return call(_causal_backward, settings, (t, t), ins, outs, scratch, backwards=True)


def forward(x: Arguments, first: State | None, settings: Kernel, log: bool, residuals: bool):
    """The output (b, t, n, v), L (b, n, t) if `log`, and the residuals of the backward pass.

    `first` is the state (b, k, ...) of earlier keys, if causal.
    """
    y = tokens_last(x, settings.scale, x.keys.key.shape[2])
    if settings.is_causal:
        before = None if first is None else kernel_state(first)
        output, logs, state = forward_of_chunks(y, before, settings, log, residuals)
    else:
        output, logs, state = forward_of_blocks(y, settings)
    return tokens_first(output), log_of(logs) if log else None, (logs, state)


def forward_of_keys(x: Arguments, settings: Kernel) -> State:
    """The state (b, k, ...) of the keys."""
    c, z, _ = state_of_keys(tokens_last(x, settings.scale, x.keys.key.shape[2]), settings)
    return State(c[..., 0], z[..., -ROWS], z[..., :-ROWS])


def forward_of_queries(x: Arguments, state: State, settings: Kernel, log: bool, residuals: bool):
    """The output from a state, L, and the residuals, as in `forward`."""
    y, (c, z) = tokens_last(x, settings.scale, state.maximum.shape[1]), kernel_state(state)
    zs = jax.vmap(partial(numerators, dtype=y.query.dtype, rounding=rounded))(z)
    output, logsum = rows_of_queries(y, c, zs, settings)
    return tokens_first(output), log_of(logsum) if log else None, logsum


def backward(
    x: Arguments,
    first: State | None,
    residuals: Any,
    gradient: Array,
    log_gradient: Array | None,
    settings: Kernel,
    wanted,
) -> tuple[Arguments, Any]:
    """Gradients of the arguments, 0 if not wanted; and ds and dz of `first`, None without it."""
    y, pull = jax.vjp(partial(tokens_last, scale=settings.scale, k=x.keys.key.shape[2]), x)
    (logs, state), dz = residuals, None
    given = given_last(logs, gradient, log_gradient)
    if settings.is_causal:
        has_first = first is not None
        grads, dz = backward_of_chunks(y, has_first, logs, state, given, settings, wanted)
    else:
        grads = backward_of_blocks(y, logs, state, given, settings, wanted)
    return pull(filled(grads, y))[0], None if dz is None else sums_of(dz)


def backward_of_keys(x: Arguments, maximum: Array, sums, settings: Kernel, wanted) -> Arguments:
    """Gradients of the arguments of keys from ds and dz (b, k, ...); 0 if not wanted."""
    y, pull = jax.vjp(partial(tokens_last, scale=settings.scale, k=x.keys.key.shape[2]), x)
    c, dz = kernel_state(State(maximum, *sums))
    return pull(filled(key_gradients(y, c, dz, settings, wanted), y))[0]


def backward_of_queries(
    x: Arguments,
    state: State,
    logsum: Array,
    gradient: Array,
    log_gradient: Array | None,
    settings: Kernel,
    wanted,
) -> tuple[Arguments, Any]:
    """Gradients of the arguments of queries, 0 if not wanted; and ds and dz (b, k, ...)."""
    y, pull = jax.vjp(partial(tokens_last, scale=settings.scale, k=state.maximum.shape[1]), x)
    given = given_last(logsum, gradient, log_gradient)
    grads, dz = query_gradients(y, kernel_state(state), logsum, given, settings, wanted)
    return pull(filled(grads, y))[0], sums_of(dz)


def kernel_state(state: State) -> tuple[Array, Array]:
    """c (b, k, m, 1) and [z s] (b, k, m, w)."""
    c, s, z = state
    zeros = jnp.zeros((*s.shape, ROWS - 1), s.dtype)
    return c[..., None], jnp.concatenate([z, s[..., None], zeros], axis=-1)


def sums_of(dz: Array) -> tuple[Array, Array]:
    """ds and dz, from [dz ds]."""
    return dz[..., -ROWS], dz[..., :-ROWS]


def log_of(logs) -> Array:
    """L (b, n, t)."""
    return jax.tree.leaves(logs)[0][:, :, 0]


def given_last(logs, gradient: Array, log_gradient: Array | None) -> Given:
    """Gradients of the output (b, n, v, t) and of L (b, n, 1, t); a query without keys has no L."""
    if log_gradient is not None:
        L = jax.tree.leaves(logs)[0]
        log_gradient = jnp.where(jnp.isinf(L), 0.0, log_gradient[:, :, None])
    return Given(gradient.transpose(0, 2, 3, 1), log_gradient)


def filled(grads: Operands, x: Operands) -> Operands:
    """Gradients of the operands, 0 for those that are not wanted."""
    return Operands(
        *(
            None if y is None else jnp.zeros_like(y) if dy is None else dy.astype(y.dtype)
            for y, dy in zip(x, grads, strict=True)
        )
    )


def tokens_first(output: Float[Array, "b n v t"]) -> Float[Array, "b t n v"]:
    """The output as queries are given."""
    return output.transpose(0, 3, 1, 2)


def tokens_last(x: Arguments, scale: float, k: int) -> Operands:
    """Operands in the layout of the kernels: tokens last, with an axis of k key heads."""
    tokens = x.query, x.keys.key, x.keys.value
    dtype = next(y.dtype for y in tokens if y is not None)

    def frequencies(w):  # the root of the scale is in W, rounded once, as without kernels
        return jnp.broadcast_to((w * scale**0.5).astype(dtype), (k, *w.shape[-2:]))

    # (b, t, n, h) -> (b, n, h, t)
    query, key, value = jax.tree.map(lambda y: y.transpose(0, 2, 3, 1), tokens)
    w_query, w_key = jax.tree.map(frequencies, (x.w_query, x.w_key))
    bias, weights = x.feature_bias, x.keys.log_weights
    if bias is not None:
        bias = jnp.broadcast_to(bias, (k, bias.shape[-1]))[..., None]
    if weights is not None:
        weights = jnp.broadcast_to(weights, (*weights.shape[:2], k)).transpose(0, 2, 1)[:, :, None]
    return Operands(query, key, value, w_query, w_key, bias, weights)
