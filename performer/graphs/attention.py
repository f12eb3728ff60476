"""Random-feature attention on the nodes of a graph, masked by graph random features.

    output_i = sum_j K(q_i, k_j) M_ij v_j / sum_j K(q_i, k_j) M_ij,    M = Phi Phi^T

(Reid et al. 2025, "Linear transformer topological masking with graph random features"), with
K(q, k) = sum_f phi_f(q) phi_f(k) the kernel of `performer_attention`. Each pair (x, f) of a node
and a feature is a landmark that attends over the keys whose walks visit x:

    c_xf = max_j l_f(k_j),    U_xf = sum_j Phi_jx e^{l_f(k_j) - c_xf} (v_j, 1),

l_f the exponent of phi_f. Each query attends over the landmarks that its walks visit, with the
exponents l_f(q_i) + c_xf less their maximum. The maxima cancel in the ratio. No term is above 1 in
absolute value, so that nothing overflows, and a row has a term 1, so that a normaliser of
non-negative terms is at least 1. Time and memory are linear in the visits of the walks.

Where few walks meet at a node, the pairs (i, j) that share one are as few, and cheaper: each has
m + v multiplications, each visit m v. Their sums have one maximum for each row, over pairs and
features.

The maxima include log |Phi_jx|. An entry of Phi may be 0 or tiny, at steps beyond the degree of a
polynomial kernel or deep in a series that decays. A key that a query reaches by such entries alone
would otherwise set its maximum, and the other keys would vanish next to it.
"""

from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from performer.attention import values
from performer.attention.maps import features_of
from performer.choices import unknown
from performer.features import Split
from performer.graphs.features import EstimatedKernel, Features
from performer.numerics import anywhere, dot, exponentials, finite, normalised

DENSE = 1024
"""Largest number of nodes for which the mask is formed as a matrix."""
CHUNK = 4
"""Features of a chunk of the sums over visits."""
BLOCK = 2048
"""Pairs of a block of the sums over pairs."""


class Links(NamedTuple):
    """Pairs of entries of Phi in one column, by query, in blocks (., B); made by `link`."""

    left_entry: Array
    """Entry of each visit on the side of the queries (T,)."""
    right_entry: Array
    left: Array
    """Entry of the query of each pair."""
    right: Array
    query: Array
    """Its node."""
    key: Array
    exists: Array
    """False for padding."""


def masked_attention(
    query: Float[Array, "*b t n h"],
    key: Float[Array, "*b s k h"],
    value: Float[Array, "*b s k v"],
    features: values.Features | Float[Array, "*n m h"],
    mask: EstimatedKernel | Float[Array, "*k t s"],
    *,
    key_mask: ArrayLike | None = None,
    scale: float | None = None,
    implementation: Literal["dense", "sparse"] | None = None,
    links: Links | None = None,
) -> Float[Array, "*b t n v"]:
    """Estimate (softmax kernel x graph kernel) attention between the nodes of a graph.

    Numerator and normaliser are unbiased, off the diagonal of the mask or with its
    `unbiased_diagonal`, for independent frequencies and walks. They have gradients with respect to
    all floats, also the modulation of the walks (`features.modulate`).

    The entries of the mask are non-negative if its modulation and the weights of the graph are, as
    for the kernels `RegularisedLaplacian`, `Diffusion`, `Matern` and `Resolvent`. The modulations
    of `RandomWalk` with odd p, `InverseCosine` and many a `FromSeries` change their sign: rows then
    sum to 1, but an attention weight may be negative, and a normaliser may come near 0.

    Args:
        query: (b, nodes, n, h), with any number of batch axes, all on the same graph.
        key: (b, nodes, k, h). Each key head serves n / k consecutive query heads.
        value: (b, nodes, k, v).
        features: as in `performer_attention`, without exact pairs.
        mask: estimate of `graph_random_features`, maybe with one modulation for each head
            (`features.modulate`), or a dense matrix (nodes, nodes) or (n, nodes, nodes).
        key_mask: keys that exist, like the `mask` of `performer_attention`.
        scale: factor on q.k; 1 / sqrt(h) if None.
        implementation: "sparse" sums over the visits of the walks: linear. "dense" forms the mask:
            faster for small graphs, unless norms above about 10 require one maximum for each row.
            None is "dense" up to `DENSE` nodes. Forward mode (`jax.jvp`) requires "dense", or a
            mask that `jit` traces.
        links: result of `link`, for a mask that `jit` traces; computed in each other call.

    Returns:
        (b, nodes, n, v) in the dtype of `value`; 0 in a row without mass. Sums are float32, or
        float64 for float64 inputs.

    Raises:
        ValueError: as `performer_attention`, or for a mask that does not fit the nodes and heads.

    Example:
        >>> kernel = graphs.kernels.Diffusion(sigma=1.0)
        >>> mask = graphs.graph_random_features(key, graph, kernel, num_walks=8, p_halt=0.3)
        >>> drawn = performer.Features.draw(key, "pm-antithetic", 128, 64)
        >>> output = graphs.masked_attention(q, k, v, drawn, mask)
    """
    if implementation not in (None, "dense", "sparse"):
        raise ValueError(unknown("implementation", implementation, ("dense", "sparse")))
    given = features_of(query, key, value, features, mask=key_mask, scale=scale)
    m = values.as_features(features).num_features
    _check_mask(mask, query.shape[-3], key.shape[-3], query.shape[-2])
    if not isinstance(mask, EstimatedKernel) and implementation == "sparse":
        raise ValueError("implementation='sparse' needs walks, and this mask is a dense matrix")
    sparse = implementation == "sparse" or (implementation is None and query.shape[-3] > DENSE)
    sparse = sparse and isinstance(mask, EstimatedKernel)
    if sparse and links is None:
        links = link(cast(EstimatedKernel, mask), min(m, value.shape[-1]))
    try:
        output = _attention(*given, mask, links, sparse).astype(value.dtype)
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise TypeError(
            "forward mode (jax.jvp, jax.jacfwd) is not supported by sums over the pairs of a sparse"
            " mask: pass implementation='dense'"
        ) from error
    return output.reshape(*query.shape[:-1], value.shape[-1])


def _check_mask(mask: EstimatedKernel | Array, t: int, s: int, n: int) -> None:
    heads = mask.left.value.shape[:-1] if isinstance(mask, EstimatedKernel) else mask.shape[:-2]
    if not mask.shape[-2:] == (t, t) == (s, s) or heads not in ((), (n,)):
        raise ValueError(
            f"the mask is {(*heads, *mask.shape[-2:])} for {t} queries and {s} keys of {n} heads:"
            f" expected {(s, s)} for all heads or {(n, s, s)}, and as many queries as keys. The"
            " mask of a graph cannot be combined with a causal or streaming order"
        )


@partial(jax.jit, static_argnums=5)
def _attention(
    query: Split,
    key: Split,
    value: Float[Array, "n b s v"],
    mask: EstimatedKernel | Array,
    links: Links | None,
    sparse: bool,
) -> Float[Array, "b t n v"]:
    # XLA took 24 s to fold the product of Phi of 1,000 nodes, constant in a caller's `jit`.
    mask = jax.lax.optimization_barrier(mask)
    rows, _ = _sums(query, key, value, mask, links, sparse)  # (n, b, t, v + 1)
    return normalised(rows[..., :-1], rows[..., -1]).transpose(1, 2, 0, 3)


def _sums(query: Split, key: Split, value, mask, links, sparse) -> tuple[Array, Array]:
    """Numerators and normalisers (n, b, t, v + 1), and the exponents taken out (n, b, t)."""
    (n, b, t, v), dtype = value.shape, value.dtype
    value = jnp.concatenate([value, jnp.ones((n, b, t, 1), dtype)], axis=-1)
    if not sparse:
        return _dense(query, key, value, mask.gram() if isinstance(mask, EstimatedKernel) else mask)
    left, right = _phi(cast(EstimatedKernel, mask))
    heads = lambda y: jnp.broadcast_to(y, (n, b, *y.shape[-1:])).reshape(n * b, -1)  # noqa: E731
    per_head = [y.value if y.value.ndim == 1 else y.value[:, None] for y in (left, right)]
    per_head = [heads(y.astype(dtype)) for y in per_head]
    flat = jax.tree.map(lambda y: y.reshape(n * b, t, -1), (query, key, value))

    def one(operands):
        (query, key, value), (left_value, right_value) = operands
        if links is not None:
            ends = (
                jax.ops.segment_sum(left_value, links.left_entry, len(left.start)),
                jax.ops.segment_sum(right_value, links.right_entry, len(right.start)),
            )
            weights = ends[0][links.left] * ends[1][links.right] * links.exists
            return _over_links(query, key, value, links, weights)
        sides = replace(left, value=left_value), replace(right, value=right_value)
        return _sparse(query, key, value, *sides)

    rows, tops = jax.lax.map(one, (flat, per_head))
    return rows.reshape(n, b, t, v + 1), tops.reshape(n, b, t)


def _dense(query: Split, key: Split, value: Array, mask: Array) -> tuple[Array, Array]:
    mask = mask.astype(value.dtype).reshape(-1, 1, *mask.shape[-2:])  # (n or 1, 1, t, s)
    highest = jax.lax.stop_gradient(jnp.max(key[0], axis=-2))  # (n, b, m)
    exponent = query[0] + highest[..., None, :]
    top = finite(jax.lax.stop_gradient(jnp.max(exponent, axis=-1, keepdims=True)))
    left = exponentials((exponent, query[1]), top)
    right = exponentials(key, highest[..., None, :])
    weights = dot("nbtm,nbsm->nbts", left, right, value.dtype) * mask
    # The maxima ignore the mask: next to a masked key, the others of a row may vanish. The square
    # of what remains, in the derivative of a ratio, must not.
    exists = jnp.max(key[0], axis=-1)[..., None, :] > -jnp.inf
    mass = jnp.sum(jnp.abs(weights), axis=-1)
    lost = (mass < jnp.finfo(mass.dtype).tiny ** 0.5) & jnp.any((mask != 0) & exists, axis=-1)
    return jax.lax.cond(
        anywhere(lost),
        lambda: _by_rows(query, key, value, mask),
        lambda: (dot("nbts,nbsv->nbtv", weights, value, value.dtype), top[..., 0]),
    )


def _by_rows(query: Split, key: Split, value: Array, mask: Array) -> tuple[Array, Array]:
    """Same result as `_dense`, with one maximum for each row, over pairs and features."""

    @jax.checkpoint
    def row(x):
        (exponent, factor), entries = x  # (n, b, 1, m) of one node, (n or none, 1, s)
        exponent = exponent + key[0]
        top = jax.lax.stop_gradient(exponent + _log_size(entries)[..., None])
        top = finite(jnp.max(top, axis=(-2, -1)))
        terms = _scaled(exponent - top[..., None, None], entries[..., None])  # (n, b, s, m)
        for y in (factor, key[1]):
            terms = terms if y is None else terms * y
        return dot("nbs,nbsv->nbv", jnp.sum(terms, axis=-1), value, value.dtype), top

    nodes = jax.tree.map(lambda y: jnp.moveaxis(y, 2, 0)[..., None, :], query)
    rows, tops = jax.lax.map(row, (nodes, jnp.moveaxis(mask, -2, 0)))
    return jnp.moveaxis(rows, 0, 2), jnp.moveaxis(tops, 0, 2)


def _phi(mask: EstimatedKernel) -> tuple[Features, Features]:
    """Phi of queries and of keys, whose product is the mask (times 2 for two ensembles)."""
    one, two = mask.left, mask.right
    if two is None:
        return one, one
    # Phi_1 Phi_2^T + Phi_2 Phi_1^T = (Phi_1 Phi_2) (Phi_2 Phi_1)^T, with 2 N columns

    def side_by_side(one: Features, two: Features) -> Features:
        two = replace(two, node=two.node + two.num_nodes)
        both = jax.tree.map(lambda *x: jnp.concatenate(x, axis=-1), one, two)
        return replace(both, num_nodes=2 * two.num_nodes)

    return side_by_side(one, two), side_by_side(two, one)


def link(mask: EstimatedKernel, most: int = 32) -> Links | None:
    """Find the pairs of nodes whose walks meet, for sums over pairs.

    The values of the mask are ignored: pairs serve all modulations of the same walks.

    Args:
        mask: estimate with concrete walks.
        most: largest number of pairs for each entry of Phi, above which sums over visits are
            cheaper; about the lesser of m and v.

    Returns:
        The pairs; None if there are more, or if the walks are traced.
    """
    left, right = _phi(mask)
    if any(isinstance(y, Tracer) for y in (left.start, left.node, right.start, right.node)):
        return None

    def entries(first, second):  # visits of equal (first, second) are one entry of Phi
        first, second = (np.asarray(y, np.int64) for y in (first, second))
        size = int(second.max()) + 1
        merged, index = np.unique(first * size + second, return_inverse=True)
        return *np.divmod(merged, size), index

    start, node, left_entry = entries(left.start, left.node)  # in the order of the queries
    column, keys, right_entry = entries(right.node, right.start)  # in the order of the columns
    begin = np.searchsorted(column, np.arange(right.num_nodes + 1))
    count = np.diff(begin)[node]  # entries in the column of each entry of a query
    total = int(count.sum())
    if total > most * len(start):
        return None
    entry = np.repeat(np.arange(len(start)), count)
    # The k-th pair of an entry has the k-th entry of its column.
    other = np.arange(total) - np.repeat(np.cumsum(count) - count, count) + begin[node][entry]

    def blocks(y):
        return jnp.asarray(np.pad(y, (0, -total % BLOCK)).reshape(-1, BLOCK), jnp.int32)

    return Links(
        jnp.asarray(left_entry, jnp.int32),
        jnp.asarray(right_entry, jnp.int32),
        blocks(entry),
        blocks(other),
        blocks(start[entry]),
        blocks(keys[other]),
        blocks(np.ones(total)) > 0,
    )


def _over_links(
    query: Split, key: Split, value: Array, links: Links, weights: Array
) -> tuple[Array, Array]:
    """Same result as `_sparse`, summed over pairs (i, j) with weights M_ij (blocks, B)."""
    ends = links.query, links.key  # nodes, (blocks, B) each
    stopped = jax.lax.stop_gradient((query[0], key[0]))

    def highest(top, x):
        ((i, j), size), (a, b) = x, stopped
        return top.at[i].max(jnp.max(a[i] + b[j], axis=-1) + size), None  # (B, m) -> (B,) -> rows i

    xs = ends, _log_size(weights)
    top = jax.lax.scan(highest, jnp.full_like(value[:, 0], -jnp.inf), xs)[0]
    top = finite(top)
    tables = (*query, top[:, None]), (*key, value)  # rows of nodes, gathered block by block
    return _pair_sums(*tables, weights, ends), top


def _pair_rows(query_rows, key_rows, weights: Array) -> Array:
    """Summands of numerators and normalisers (B, v + 1), given the rows of queries and keys."""
    (a, left, top), (b, right, value) = query_rows, key_rows
    terms = _scaled(a + b - top, weights[:, None])  # (B, m), at most 1
    for factor in (left, right):
        terms = terms if factor is None else terms * factor
    return jnp.sum(terms, axis=-1, keepdims=True) * value


def _log_size(entries: Array) -> Array:
    """Return log |entries|; -inf if they are 0, or subnormal, which processors may round to 0."""
    size = jnp.abs(jax.lax.stop_gradient(entries))
    return jnp.where(size < jnp.finfo(size.dtype).tiny, -jnp.inf, jnp.log(size))


def _scaled(exponent: Array, entries: Array) -> Array:
    """Return exp(x) entry. Entries of 0, which set no maximum, must not meet an infinite exp."""
    absent = _log_size(entries) == -jnp.inf
    return jnp.exp(jnp.where(absent, jnp.minimum(exponent, 40), exponent)) * entries


def _rows(table, index: Array):
    return jax.tree.map(lambda y: y[index], table)


@jax.custom_vjp
def _pair_sums(query_table, key_table, weights: Array, ends: tuple[Array, Array]) -> Array:
    """Sum the summands of all pairs at their queries (t, v + 1), block by block.

    The derivative adds to the gradients of the tables in place. The derivative of `scan` would make
    a table for each block.
    """

    def add(total, x):
        (i, j), w = x
        return total.at[i].add(_pair_rows(_rows(query_table, i), _rows(key_table, j), w)), None

    return jax.lax.scan(add, jnp.zeros_like(key_table[-1]), (ends, weights))[0]


def _pair_sums_forward(query_table, key_table, weights, ends):
    return _pair_sums(query_table, key_table, weights, ends), (
        query_table,
        key_table,
        weights,
        ends,
    )


def _pair_sums_backward(saved, change):
    query_table, key_table, weights, ends = saved

    def add(totals, x):
        (i, j), w = x
        pull = jax.vjp(_pair_rows, _rows(query_table, i), _rows(key_table, j), w)[1]
        *gradients, weight_gradient = pull(change[i])
        totals = [
            jax.tree.map(lambda y, z, at=at: y.at[at].add(z), total, gradient)
            for total, gradient, at in zip(totals, gradients, (i, j), strict=True)
        ]
        return totals, weight_gradient

    zeros = [jax.tree.map(jnp.zeros_like, y) for y in (query_table, key_table)]
    (query_table, key_table), weight_gradient = jax.lax.scan(add, zeros, (ends, weights))
    return query_table, key_table, weight_gradient, None


_pair_sums.defvjp(_pair_sums_forward, _pair_sums_backward)


def _sparse(
    query: Split, key: Split, value: Array, left: Features, right: Features
) -> tuple[Array, Array]:
    """Rows (t, v + 1) of one head, and the exponents taken out (t,).

    Arrays over the T visits of the walks; x landmarks, c features of a chunk.
    """
    nodes, landmarks = len(value), right.num_nodes
    factors = jax.tree.map(lambda y: _chunks(y, 0.0), (query[1], key[1]))
    m = max(y.shape[1] for y in jax.tree.leaves((query, key)))
    exponents = tuple(  # (m / c, t, c) of queries and of keys
        _chunks(jnp.broadcast_to(y, (nodes, m)), fill)
        for y, fill in ((query[0], 0.0), (key[0], -jnp.inf))
    )

    left_size, right_size = (_log_size(y.value)[:, None] for y in (left, right))

    def highest(key):  # (t, c) -> (T, c) -> c_xf (x, c)
        top = jax.ops.segment_max(key[right.start] + right_size, right.node, landmarks)
        return finite(top), top

    def tops(query, key):  # largest exponent of each row, (t,)
        exponent = query[left.start] + highest(key)[1][left.node] + left_size
        return jax.ops.segment_max(jnp.max(exponent, axis=-1), left.start, nodes)

    top = jax.lax.stop_gradient(
        jax.lax.scan(
            lambda top, x: (jnp.maximum(top, tops(*x)), None),
            jnp.full_like(value[:, 0], -jnp.inf),
            jax.lax.stop_gradient(exponents),
        )[0]
    )
    top = finite(top)

    @jax.checkpoint  # (T, c, v + 1) is the largest array, of one chunk at a time
    def part(query, key, query_factor, key_factor):
        most, exact = jax.lax.stop_gradient(highest(key))
        weights = _scaled(key[right.start] - most[right.node], right.value[:, None])
        if key_factor is not None:
            weights = weights * key_factor[right.start]
        moved = weights[:, :, None] * value[right.start][:, None, :]  # (T, c, v + 1)
        sums = jax.ops.segment_sum(moved, right.node, landmarks)  # U_xf (x, c, v + 1)
        exponent = query[left.start] + exact[left.node] - top[left.start][:, None]
        weights = _scaled(exponent, left.value[:, None])
        if query_factor is not None:
            weights = weights * query_factor[left.start]
        visits = jnp.sum(weights[:, :, None] * sums[left.node], axis=1)  # (T, v + 1)
        return jax.ops.segment_sum(visits, left.start, nodes)

    xs = (*exponents, *factors)
    rows = jax.lax.scan(lambda rows, x: (rows + part(*x), None), jnp.zeros_like(value), xs)[0]
    return rows, top


def _chunks(x: Array, fill: float) -> Array:
    """(t, m) -> (m / c, t, c), filled to whole chunks."""
    count = -(-x.shape[1] // CHUNK)
    x = jnp.pad(x, ((0, 0), (0, count * CHUNK - x.shape[1])), constant_values=fill)
    return x.reshape(len(x), count, CHUNK).swapaxes(0, 1)
