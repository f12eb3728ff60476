"""The state (c, s, z), a summary of keys, and its monoid.

    summarise   keys -> state           every feature attends over the keys
    look_up     queries, state -> rows  every query attends over the features
    attend      queries, state -> output  both at once, with exact keys as further features
    by_block    a function of tokens, block by block
    combine     the state of the keys of two states; also the rows of two sets of keys
    ratio       rows -> output          numerator / normaliser

Heads come first, (k, b, ..., t, h), so that a projection with one draw per head is one batched
product. The log-weight of a key is added to its exponents; -inf removes it from numerator,
normaliser and maximum.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from performer.attention.sizes import blocks
from performer.features import Split
from performer.numerics import (
    dot,
    exponentials,
    finite,
    normalised,
    operand_dtype,
    rounded,
    weighted,
)
from performer.typing import Size, float32_or_wider

Map = Callable[[Array], Split]
"""Features of queries or of keys (k, b, ..., t, h)."""


class Queries(NamedTuple):
    """Queries, the g query heads of a key head apart."""

    query: Float[Array, "b t k g h"]
    given: Float[Array, "b t k g h"] | None = None
    """Queries before calibration, None if it does not change them."""

    @property
    def exact(self) -> Array:
        """Queries of exact pairs: (M q).(M^-1 k) would cost q.k digits if M is ill-conditioned."""
        return self.query if self.given is None else self.given


class Keys(NamedTuple):
    """Keys, values and weights."""

    key: Float[Array, "b s k h"]
    value: Float[Array, "b s k v"]
    log_weights: Float[Array, "b s #k"] | None
    """Log-weights of keys, shared or for each head; -inf for no key, None for 0 everywhere."""
    log_decay: Float[Array, "b s k"] | None = None
    """Log-decay of earlier keys at this one; None for 0 everywhere."""
    given: Float[Array, "b s k h"] | None = None
    """Keys before calibration, None if it does not change them or no pair is exact."""

    @property
    def exact(self) -> Array:
        """Keys of exact pairs."""
        return self.key if self.given is None else self.given


class State(NamedTuple):
    """Sums over the keys of each batch entry and key head, of constant size; float32 or float64.

    `performer_attention` returns leaves (b, k, m), (b, k, m) and (b, k, m, v), with its batch axes.
    m is the number of features: twice the number of frequencies for `hyperbolic` and
    `trigonometric`.

    Rows have the same fields, with a query instead of a feature: (*t), (*t) and (*t, v). Their
    `ratio` is the output of attention.
    """

    maximum: Float[Array, "*b m"]
    """c_j, the largest exponent of feature j over the keys; -inf without any key."""
    normaliser: Float[Array, "*b m"]
    """s_j = sum_k phi_j(k) e^{-c_j}."""
    numerator: Float[Array, "*b m v"]
    """z_j = sum_k phi_j(k) e^{-c_j} v(k)."""


class WindowState(NamedTuple):
    """State of causal attention with an exact window, of constant size.

    Its keys are those after calibration; `given` holds them before it.
    """

    far: State
    """State of the keys before `near`."""
    near: Keys
    """(b, 2 w, k, .): the window before the next token's, then its own, not yet full."""
    first: Keys
    """(b, f, k, .): the first keys that exist."""
    places: Int[Array, "*b f"]
    """Their positions; 2^31 - 1 for none yet."""
    position: Int[Array, "*b"]
    """Number of keys so far."""


def empty(
    key: Float[Array, "b s k h"], num_features: Size, value_width: Size, *like: Array | None
) -> State:
    """Return the state (k, b, m) of no keys, the neutral element of `combine`.

    It is sharded as the keys are. As the carry of a scan it varies over the axes of `jax.shard_map`
    that the arrays `like` vary over.
    """
    zeros = jnp.zeros_like(key[:, 0, :, :1], dtype=float32_or_wider(key)).swapaxes(0, 1)
    zeros = jnp.broadcast_to(zeros, (*zeros.shape[:2], num_features))
    numerator = jnp.broadcast_to(zeros[..., None], (*zeros.shape, value_width))
    return varying(State(zeros - jnp.inf, zeros, numerator), *like)


def varying(tree, *like):
    """Make all arrays vary over the axes of `jax.shard_map` that any, or `like`, varies over."""
    per_array = [jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves((tree, like))]
    axes = frozenset().union(*per_array)

    def cast(x):
        missing = axes - jax.typeof(x).manual_axis_type.varying
        return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

    return jax.tree.map(cast, tree)


def combine(left: State, right: State) -> State:
    """Return the state of the keys of both: associative and commutative."""
    maximum = jnp.maximum(left.maximum, right.maximum)
    a, b = (jnp.exp(x.maximum - finite(maximum)) for x in (left, right))
    return State(
        maximum,
        left.normaliser * a + right.normaliser * b,
        left.numerator * a[..., None] + right.numerator * b[..., None],
    )


def ratio(rows: State) -> Float[Array, "*t v"]:
    """Return the output of attention: numerator / normaliser, 0 for a query without keys."""
    return normalised(rows.numerator, rows.normaliser)


def finished(rows: State) -> tuple[Float[Array, "*t v"], Float[Array, "*t"]]:
    """The output of rows, and the logarithms of their normalisers: -inf without keys."""
    nothing = rows.normaliser <= 0  # not NaN: a lost row
    logs = rows.maximum + jnp.log(jnp.where(nothing, 1.0, rows.normaliser))
    return ratio(rows), jnp.where(nothing, -jnp.inf, logs)


# Keys -> state


def state_of(split: Split, value: Float[Array, "..."]) -> State:
    """Every feature attends over the keys: features (..., s, m), values (..., s, v)."""
    exponent, _ = split
    # The maximum cancels, so its gradient is zero.
    maximum = jax.lax.stop_gradient(jnp.max(exponent, axis=-2))
    return state_relative(maximum, exponentials(split, maximum[..., None, :]), value)


def state_relative(
    maximum: Float[Array, "... #m"],
    weights: Float[Array, "... s m"],
    value: Float[Array, "..."],
    kept: Bool[Array, "... s"] | None = None,
) -> State:
    """The state of features e^maximum times these weights of keys, of the kept ones if not None."""
    dtype = operand_dtype(value)
    over_keys = _over_keys_narrow if dtype == jnp.bfloat16 else _over_keys
    if kept is None or dtype == jnp.bfloat16:
        weights = weights if kept is None else jnp.where(kept[..., None], weights, 0.0)
        normaliser, numerator = over_keys(weights, value, dtype)
    else:  # values are narrower than features: no copy of these is made
        _, numerator = over_keys(weights, jnp.where(kept[..., None], value, 0), dtype)
        normaliser = dot("...sm,...s->...m", weights, kept.astype(weights.dtype), weights.dtype)
    return State(jnp.broadcast_to(maximum, normaliser.shape), normaliser, numerator)


def _over_keys(weights: Array, value: Array, dtype: jnp.dtype) -> tuple[Array, Array]:
    """s = sum_k f(k), z = sum_k f(k) v(k)."""
    z = dot("...sv,...sm->...vm", value.astype(dtype), weights.astype(dtype), dtype)
    return jnp.sum(weights, axis=-2), transposed(z)


_over_keys_narrow = jax.custom_jvp(_over_keys, nondiff_argnums=(2,))


@_over_keys_narrow.defjvp
def _(dtype, primals, tangents):
    """Round dz only after subtracting ds times the mean of the values, z / s."""
    (weights, value), (d_weights, d_value) = primals, tangents
    s, z = jnp.sum(weights, axis=-2), dot("...sm,...sv->...mv", weights, value, dtype)
    ds = jnp.sum(d_weights, axis=-2)
    mean = z / jnp.where(s == 0, 1.0, s)[..., None] * ds[..., None]
    dz = dot("...sm,...sv->...mv", d_weights, value, dtype) - mean
    dz += dot("...sm,...sv->...mv", weights, d_value, dtype)
    return (s, z), (ds, rounded(dz) + mean)


def summarise(key_map: Map, keys: Keys, initial: State, block: Size) -> State:
    """Return the state of `initial` (k, b, m) and all keys, `block` at a time, without decay."""
    s = keys.key.shape[1]
    count, length = blocks(s, block)

    @partial(jax.checkpoint, prevent_cse=count == 1)
    def add(state, xs):
        key, value, log_weights = jax.tree.map(heads_first, xs)
        split, value, log_weights = jax.tree.map(flat, (key_map(key), value, log_weights))
        return combine(state, state_of(weighted(split, log_weights), value))

    keys = extended(keys, 0, count * length - s)
    xs = jax.tree.map(lambda x: in_blocks(x, count, length), tuple(keys[:3]))
    state = jax.tree.map(flat, initial)
    if count == 1:
        state = add(state, jax.tree.map(lambda x: x[0], xs))
    else:
        state = jax.lax.scan(lambda state, x: (add(state, x), None), state, xs)[0]
    return State(*(x.reshape(y.shape) for x, y in zip(state, initial, strict=True)))


# Queries, state -> rows


def look_up(
    query_map: Map, query: Float[Array, "b t k g h"], state: State, dtype: jnp.dtype
) -> State:
    """Return the rows (b, t, k, g) of queries over the features of a state (k, b, m).

    The g query heads of a key head share its state. The operands of large products have the dtype
    `dtype`.
    """
    weights, maximum, s, z = _weights(query_map, Queries(query), state)
    sums = _over_features(weights, s, z, dtype)
    return State(*(_tokens_first(x, query) for x in (maximum, *sums)))


def attend(
    query_map: Map,
    queries: Queries,
    state: State,
    dtype: jnp.dtype,
    keys: Keys | None = None,
    scale: float = 1.0,
) -> Float[Array, "b t k g v"]:
    """Return ratio(look_up(...)), as one function with one derivative if `dtype` is bfloat16.

    It rounds the change of the output, not the changes of numerator and normaliser, which cancel.

    Exact `keys` (b, f, k, .) are f further features, of exponent `scale` q.k, whose state is the
    key itself. One product sums over all: a fifth faster than separate rows.
    """
    weights, _, s, z = _weights(query_map, queries, state, keys, scale)
    output = _output_narrow if dtype == jnp.bfloat16 else _output
    return _tokens_first(output(weights, s, z, dtype), queries.query)


def _weights(
    query_map: Map,
    queries: Queries,
    state: State,
    keys: Keys | None = None,
    scale: float = 1.0,
):
    """Weights of the features (k, b, t g, m), their maxima, and the sums s and z of the state."""
    b, t, k, g, h = queries.query.shape

    def rows(query):  # (b, t, k, g, h) -> (k, b, t g, h): the query heads of a key head are rows
        return heads_first(query).reshape(k, b, t * g, h)

    query = rows(queries.query)
    (exponent, factor), (c, s, z) = jax.tree.map(flat, (query_map(query), tuple(state)))
    exponent = exponent + c[..., None, :]
    if keys is not None:
        logits, *of_keys = _of_keys(queries, keys, scale, s.dtype)
        exponent = jnp.broadcast_to(exponent, (*logits.shape[:-1], s.shape[-1]))
        exponent = jnp.concatenate([exponent, logits], axis=-1)
        if factor is not None:
            factor = jnp.concatenate([factor, jnp.ones_like(logits)], axis=-1)
        s = jnp.concatenate([s, of_keys[0]], axis=-1)
        z = jnp.concatenate([z, of_keys[1]], axis=-2)
    maximum = jax.lax.stop_gradient(jnp.max(exponent, axis=-1, keepdims=True))
    return exponentials((exponent, factor), maximum), maximum[..., 0], s, z


def attend_with(
    weights: Float[Array, "k b r m"],
    maximum: Float[Array, "k b r"],
    state: State,
    queries: Queries,
    keys: Keys,
    scale: float,
    dtype: jnp.dtype,
) -> Float[Array, "b t k g v"]:
    """Return `attend` of features e^maximum times these weights of queries."""
    (weights, maximum), (_, s, z) = jax.tree.map(flat, ((weights, maximum), tuple(state)))
    logits, s_keys, z_keys = _of_keys(queries, keys, scale, s.dtype)
    top = jax.lax.stop_gradient(jnp.maximum(maximum, jnp.max(logits, axis=-1)))
    weights = weights * jnp.exp(maximum - finite(top))[..., None]
    weights = jnp.concatenate([weights, jnp.exp(logits - finite(top)[..., None])], axis=-1)
    s, z = jnp.concatenate([s, s_keys], axis=-1), jnp.concatenate([z, z_keys], axis=-2)
    output = _output_narrow if dtype == jnp.bfloat16 else _output
    return _tokens_first(output(weights, s, z, dtype), queries.query)


def _of_keys(queries: Queries, keys: Keys, scale: float, dtype: jnp.dtype):
    """Logits (k, b, t g, f) of exact keys, as of further features, and their sums s and z."""
    assert keys.log_weights is not None
    b, t, k, g, h = queries.query.shape
    by_head = (keys.exact, keys.value, keys.log_weights)
    key, value, log_weights = (flat(heads_first(x)) for x in by_head)
    query = flat(heads_first(queries.exact).reshape(k, b, t * g, h))
    logits = dot("...th,...fh->...tf", query, key, query.dtype) * scale
    ones = jnp.ones_like(log_weights, dtype)
    return logits + log_weights[..., None, :], ones, value.astype(dtype)


def _tokens_first(x: Array, query: Float[Array, "b t k g h"]) -> Float[Array, "b t k g *v"]:
    """(k, b, t g, ...) -> (b, t, k, g, ...), also with k and b as one axis."""
    b, t, k, g, _ = query.shape
    rows = 2 if 1 in (k, b) else 3
    x = x.reshape(k, b, t, g, *x.shape[rows:])
    return x.transpose(1, 2, 0, 3, *range(4, x.ndim))


def by_block(function: Callable[[Any], Any], tokens: Any, block: Size) -> Any:
    """Apply a function, (b, length, ...) -> (b, length, ...), to `block` tokens at a time.

    Tokens and results are an array or several. The backward pass computes each block again.
    """
    b, t = jax.tree.leaves(tokens)[0].shape[:2]
    count, length = blocks(t, block)
    function = jax.checkpoint(function, prevent_cse=count == 1)
    tokens = jax.tree.map(lambda x: in_blocks(x, count, length), tokens)
    if count == 1:
        outputs = function(jax.tree.map(lambda x: x[0], tokens))
        return jax.tree.map(lambda x: x[:, :t], outputs)

    def joined(x):  # (count, b, length, ...) -> (b, count length, ...)
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(b, count * length, *x.shape[3:])[:, :t]

    return jax.tree.map(joined, jax.lax.map(function, tokens))


def _over_features(weights: Array, s: Array, z: Array, dtype: jnp.dtype) -> tuple[Array, Array]:
    """sum_j a_j s_j, sum_j a_j z_j."""
    normaliser = dot("...tm,...m->...t", weights, s, s.dtype)
    z = transposed(z.astype(dtype))
    return normaliser, dot("...tm,...vm->...tv", weights.astype(dtype), z, dtype)


def _mean(s: Array, z: Array) -> Float[Array, "... 1 v"]:
    """Mean of the values over all features."""
    total = jnp.sum(s, axis=-1)[..., None]
    return (jnp.sum(z, axis=-2) / jnp.where(total == 0, 1.0, total))[..., None, :]


def _output(weights: Array, s: Array, z: Array, dtype: jnp.dtype) -> Array:
    """sum_j a_j z_j / sum_j a_j s_j."""
    normaliser, numerator = _over_features(weights, s, z, dtype)
    return normalised(numerator, normaliser)


_output_narrow = jax.custom_jvp(_output, nondiff_argnums=(3,))


@_output_narrow.defjvp
def _(dtype, primals, tangents):
    """sum_j a_j s_j do = sum_j (z_j - o s_j) da_j + ..., relative to the mean of the values.

    Relative to it, o and all z_j are small, and rounding costs little.
    """
    (weights, s, z), (d_weights, ds, dz) = primals, tangents
    mean = _mean(s, z)
    near, d_near = z - mean * s[..., None], dz - mean * ds[..., None]
    over_z = partial(dot, "...tm,...mv->...tv", dtype=dtype)
    over_s = partial(dot, "...tm,...m->...t", dtype=s.dtype)
    denominator = over_s(weights, s)
    change = over_z(d_weights, near) + over_z(weights, d_near)
    d_denominator = (over_s(d_weights, s) + over_s(weights, ds))[..., None]
    change -= normalised(over_z(weights, near), denominator) * d_denominator
    return normalised(over_z(weights, z), denominator), normalised(rounded(change), denominator)


def transposed(z: Array) -> Array:
    """(..., v, m) -> (..., m, v), or back.

    A CPU transposes the left operand of a product over tokens: values, which are narrower than
    features. Without the barriers XLA would exchange the operands.
    """
    apart = jax.lax.optimization_barrier
    return apart(jnp.swapaxes(apart(z), -1, -2))


# Tokens in blocks


def pad(x: Array, before: Size, after: Size, fill: float = 0) -> Array:
    """Pad the tokens of (b, t, ...) with `fill`."""
    widths = [(0, 0), (before, after)] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, widths, constant_values=fill)


def extended(keys: Keys, before: Size, after: Size) -> Keys:
    """Pad with keys that do not exist."""
    if before == after == 0:
        return keys
    key, value, log_weights, log_decay, given = keys
    if log_decay is not None:
        log_decay = pad(log_decay, before, after)
    if log_weights is None:
        log_weights = jnp.zeros_like(key[..., :1, 0], dtype=float32_or_wider(key))
    key, value, given = jax.tree.map(lambda x: pad(x, before, after), (key, value, given))
    return Keys(key, value, pad(log_weights, before, after, -jnp.inf), log_decay, given)


def in_blocks(x: Array, count: Size, length: Size) -> Array:
    """(b, t, ...) -> (count, b, length, ...), padded with zeros."""
    x = pad(x, 0, count * length - x.shape[1])
    return jnp.moveaxis(x.reshape(x.shape[0], count, length, *x.shape[2:]), 1, 0)


def heads_first(x: Array) -> Array:
    """(b, t, k, ...) -> (k, b, t, ...)."""
    return jnp.moveaxis(x, 2, 0)


def moved_once(x: Array) -> Array:
    """x (b, t, k, ...), with heads first in memory: XLA would move it again for each use."""
    return jnp.moveaxis(jax.lax.optimization_barrier(heads_first(x)), 0, 2)


def flat(x: Array) -> Array:
    """(k, b, ...) as one axis if either is 1: fewer batch axes make faster products on CPU.

    Axes above 1 stay apart: either may be sharded.
    """
    k, b = x.shape[:2]
    return x.reshape(k * b, *x.shape[2:]) if 1 in (k, b) else x


def take(x: Array, index: Int[Array, "b i"]) -> Array:
    """Return tokens of (b, t, ...) at the positions (b, i)."""
    return jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 2)), axis=1)
