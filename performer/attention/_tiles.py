"""The sums of attention over a block of heads and tokens, as the kernels for TPU form them.

Positive features, tokens in the lanes: queries (n, h, t), keys (n, h, s), values (n, v, s),
features (n, m, t), for the heads and tokens of a block. With the exponents

    l = W_k k - scale |k|^2 / 2 + log-weights of the keys + log-weights of the features
    x = W_q q + c

    keys      c_j = max_k l_j(k),   f = e^{l - c},   [z s] = f [v; 1]^T
    queries   r = max_j x_j,   [o; d] = [z s]^T e^{x - r},   output = o / d,   L = r + log d

The backward pass computes features again, those of queries normalised: p = e^{x - L}, for which
z^T p is the output and s^T p = 1. With g the gradient of the output, and d for "gradient of",

    queries   u = z^T g,  a = p.u / p.s,  dx = p (u - s a),  dq = W_q^T dx,  [dz ds] = p [g; -a]^T
    keys      dl = f (dz v + ds),   dk = W_k^T dl - scale k sum_j dl_j,   dv = dz^T f

c and r cancel, and have no gradient. That of a log-weight is the sum of dl over the others; those
of the frequencies are dx q^T and dl k^T.

Products take operands of the dtype of the inputs and add in float32. In bfloat16 s and a, which
make the normaliser and its gradient, are three operands each, that add up to 24 bits, and z and dz
are two in z^T g and dz v, from which s a and -ds take the largest part away.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from performer.attention._sizes import ROWS
from performer.attention.state import finite


class Settings(NamedTuple):
    """The static values of a call."""

    scale: float
    is_causal: bool
    heads: int
    """Key heads of a block."""
    block: int
    """Tokens of a block."""
    interpret: bool = False


class Operands(NamedTuple):
    """What attention is of, or a gradient for each, or blocks or references: None for none.

    Tokens come last, of k key heads and n query heads: query (b, n, h, t), key (b, k, h, s), value
    (b, k, v, s), W_q and W_k (k, m, h), log-weights of features (k, m, 1), of keys (b, k, 1, s).
    """

    query: Any = None
    key: Any = None
    value: Any = None
    of_query: Any = None
    of_key: Any = None
    of_features: Any = None
    log_weights: Any = None


def dot(left: Array, right: Array, over: tuple[int, int] = (2, 1)) -> Array:
    """Products of heads (n, ., .), summed over these axes in float32."""
    return jax.lax.dot_general(
        left,
        right,
        (((over[0],), (over[1],)), ((0,), (0,))),
        precision=None if left.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def parts(x: Array, axis: int, dtype: jnp.dtype) -> Array:
    """Rows (axis 1) or columns (axis 2) in `dtype` that add up to x, of one, in float32."""
    rows = [x]
    if dtype == jnp.bfloat16:
        high = x.astype(dtype).astype(x.dtype)
        middle = (x - high).astype(dtype).astype(x.dtype)
        rows = [high, middle, x - high - middle]
    return jnp.concatenate(rows + [jnp.zeros_like(x)] * (ROWS - len(rows)), axis).astype(dtype)


def fine(left: Array, right: Array) -> Array:
    """The product of float32 with an operand: in bfloat16 the left side is two operands.

    They lie side by side in the sum, where 64 of its 128 places would be empty.
    """
    if right.dtype != jnp.bfloat16:
        return dot(left, right)
    high = left.astype(right.dtype)
    low = (left - high.astype(left.dtype)).astype(right.dtype)
    return dot(jnp.concatenate([high, low], axis=2), jnp.concatenate([right, right], axis=1))


def shared(x: Array, n: int) -> Array:
    """One for each of n query heads, of which consecutive ones share a key head."""
    if len(x) == n:
        return x
    each = jnp.broadcast_to(x[:, None], (len(x), n // len(x), *x.shape[1:]))
    return each.reshape(n, *x.shape[1:])


def gathered(x: Array, k: int) -> Array:
    """The sums over the query heads of each key head."""
    return x if len(x) == k else jnp.sum(x.reshape(k, len(x) // k, *x.shape[1:]), axis=1)


def exponents_of_keys(x: Operands, scale: float) -> Float[Array, "k m s"]:
    """l."""
    squares = jnp.square(x.key.astype(jnp.float32))
    of_tokens = -scale / 2 * jnp.sum(squares, axis=1, keepdims=True)
    if x.log_weights is not None:
        of_tokens += x.log_weights
    exponents = dot(x.of_key, x.key) + of_tokens
    return exponents if x.of_features is None else exponents + x.of_features


def fold(
    exponents: Array, value: Array, c: Array | None = None, z: Array | None = None
) -> tuple[Array, Array, Array]:
    """f, c and [z s], after those of earlier keys."""
    largest = jnp.max(exponents, axis=2, keepdims=True)
    largest = largest if c is None else jnp.maximum(c, largest)
    f = jnp.exp(exponents - columns(finite(largest), exponents.shape[2]))
    own = dot(f.astype(value.dtype), with_ones(value), (2, 2))
    if c is not None and z is not None:
        own += z * columns(jnp.exp(c - finite(largest)), z.shape[2])
    return f, largest, own


def columns(x: Array, count: int) -> Array:
    """So many columns, if there are `LANES` equal ones: one must be copied to all lanes first."""
    if x.shape[2] == 1:
        return x
    return jnp.concatenate([x] * -(-count // x.shape[2]), axis=2)[:, :, :count]


def with_ones(value: Float[Array, "k v s"]) -> Float[Array, "k w s"]:
    """[v; 1], and rows of zeros."""
    one = jnp.ones((len(value), 1, value.shape[2]), jnp.float32)
    return jnp.concatenate([value, parts(one, 1, value.dtype)], axis=1)


def numerators(z: Float[Array, "k m w"], dtype: jnp.dtype) -> Float[Array, "k w m"]:
    """[z s]^T as an operand, s in parts."""
    width = z.shape[2] - ROWS
    s = parts(z[:, :, width:].swapaxes(1, 2)[:, :1], 1, dtype)
    return jnp.concatenate([z[:, :, :width].astype(dtype).swapaxes(1, 2), s], axis=1)


def attend(x: Operands, c: Array, zs: Array) -> tuple[Float[Array, "n v t"], Float[Array, "n 1 t"]]:
    """The output and L, which is inf for a query without any key."""
    n, dtype, width = len(x.query), x.query.dtype, zs.shape[1] - ROWS
    exponents = dot(shared(x.of_query, n), x.query) + shared(c, n)
    largest = finite(jnp.max(exponents, axis=1, keepdims=True))
    rows = dot(shared(zs, n), jnp.exp(exponents - largest).astype(dtype))
    d = jnp.sum(rows[:, width:], axis=1, keepdims=True)
    output = rows[:, :width] * (1 / jnp.where(d == 0, 1.0, d))
    return output, jnp.where(d == 0, jnp.inf, largest + jnp.log(d))


def from_queries(x: Operands, c: Array, z: Array, logsum: Array, gradient: Array):
    """dq, [dz ds] and dx."""
    (n, k), dtype, width = (len(x.query), len(c)), x.query.dtype, gradient.shape[1]
    p = jnp.exp(dot(shared(x.of_query, n), x.query) + shared(c, n) - logsum)
    s = shared(z[:, :, width : width + 1], n)
    u = fine(shared(z[:, :, :width], n), gradient)
    total = jnp.sum(p * s, axis=1, keepdims=True)
    a = jnp.sum(p * u, axis=1, keepdims=True) / jnp.where(total == 0, 1.0, total)
    dx = (p * (u - s * a)).astype(dtype)
    dz = gradient_of_state(p, gradient, a, k)
    return dot(shared(x.of_query, n).swapaxes(1, 2), dx), dz, dx


def gradient_of_state(p: Array, gradient: Array, a: Array, k: int) -> Float[Array, "k m w"]:
    """[dz ds] of k key heads."""
    width, dtype = gradient.shape[1], gradient.dtype
    rows = jnp.concatenate([gradient, parts(-a, 1, dtype)], axis=1)
    dz = gathered(dot(p.astype(dtype), rows, (2, 2)), k)
    ds = jnp.sum(dz[:, :, width:], axis=2, keepdims=True)
    return jnp.concatenate([dz[:, :, :width], ds, jnp.zeros_like(dz[:, :, width + 1 :])], axis=2)


def from_keys(x: Operands, f: Array, dz: Array, scale: float, within: Array | float = 0.0):
    """dk, dv and dl, to which `within` is added."""
    dtype, width = x.key.dtype, x.value.shape[1]
    dz, ds = dz[:, :, :width], dz[:, :, width : width + 1]
    dl = within + f * (fine(dz, x.value) + ds)
    dk = dot(x.of_key.swapaxes(1, 2), dl.astype(dtype))
    dk -= scale * x.key.astype(jnp.float32) * jnp.sum(dl, axis=1, keepdims=True)
    return dk, dot(dz.astype(dtype).swapaxes(1, 2), f.astype(dtype)), dl


def real_keys(x: Operands, length: int, i: Array | int = 0) -> Operands:
    """The i-th block of keys; past their number zeros, that do not count."""
    inside = within(x.key.shape[2], length, i)
    if inside is None:
        return x
    weights = x.log_weights
    if weights is None:
        weights = jnp.zeros(inside.shape, jnp.float32)
    key, value = (jnp.where(inside, y, 0) for y in (x.key, x.value))
    weights = jnp.where(inside, weights, -jnp.inf)
    return x._replace(key=key, value=value, log_weights=weights)


def real_queries(x: Operands, logsum, gradient: Array, length: int, i: Array | int = 0):
    """The i-th block of queries, their L and g; past their number p is 0."""
    inside = within(x.query.shape[2], length, i)
    if inside is None:
        return x, logsum, gradient
    query, gradient = (jnp.where(inside, y, 0) for y in (x.query, gradient))
    logsum = jax.tree.map(lambda y: jnp.where(inside, y, jnp.inf), logsum)
    return x._replace(query=query), logsum, gradient


def within(block: int, length: int, i: Array | int) -> Array | None:
    """Which tokens of the i-th block there are, (1, 1, block); None for all of every block."""
    if length % block == 0:
        return None
    return i * block + jax.lax.broadcasted_iota(jnp.int32, (1, 1, block), 2) < length
