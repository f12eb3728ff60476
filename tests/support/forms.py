"""Forms of attention as public code has them: small functions, each with what is expected.

A form is a function of queries, keys and values (b, t, n, h), with an argument more in
ALONG_FACTORS. Forms of ALONG_FACTORS and READ become linear and, with all keys exact, equal the
given function. Forms of EXACT stay as they are, for a reason that is true of them.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen

B, T, N, H = 2, 12, 4, 8
"""Examples, tokens, heads, width."""


def heads(t=T, n=N, h=H, count=3, b=B):
    """Shapes of queries, keys and values."""
    return [(b, t, n, h)] * count


def scores(q, k):
    return jnp.einsum("btnh,bsnh->bnts", q, k) / q.shape[-1] ** 0.5


def output(weights, v):
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def attend(q, k, v, mask=None, bias=None):
    s = scores(q, k)
    s = s if bias is None else s + bias
    s = s if mask is None else jnp.where(mask, s, -1e9)
    return output(jax.nn.softmax(s), v)


def exists(valid):
    return jnp.arange(valid.shape[1]) < jnp.sum(valid, axis=1, keepdims=True)


def distance(t):
    return jnp.abs(jnp.arange(t)[:, None] - jnp.arange(t))


def tri(t):
    return jnp.tri(t, dtype=bool)


# Masks, biases and scales that are arguments: a pair of an array for queries and one for keys


def padding(q, k, v, valid):
    """BERT in Flax: a mask of queries and keys."""
    return linen.dot_product_attention(q, k, v, mask=linen.make_attention_mask(valid, valid))


def padding_causal(q, k, v, valid):
    """A decoder in Flax."""
    mask = linen.combine_masks(
        linen.make_attention_mask(valid, valid), linen.make_causal_mask(valid)
    )
    return linen.dot_product_attention(q, k, v, mask=mask)


def padding_as_bias(q, k, v, valid):
    """The mask becomes numbers, as in BERT."""
    mask = linen.make_attention_mask(valid, valid)
    bias = jax.lax.select(mask > 0, jnp.zeros(mask.shape), jnp.full(mask.shape, -1e10))
    return linen.dot_product_attention(q, k, v, bias=bias)


def padding_times_number(q, k, v, valid):
    """(1 - mask) times -1e9."""
    mask = (valid[:, None, :, None] * valid[:, None, None, :]).astype(jnp.float32)
    return attend(q, k, v, bias=(1.0 - mask) * -1e9)


def padding_forbidden(q, k, v, valid):
    """Where a query or a key does not exist."""
    forbidden = ~valid[:, None, :, None] | ~valid[:, None, None, :]
    return output(jax.nn.softmax(jnp.where(forbidden, -jnp.inf, scores(q, k))), v)


def keys_as_bias(q, k, v, valid):
    return attend(q, k, v, bias=(1 - valid[:, None, None].astype(jnp.float32)) * -1e9)


def segments(q, k, v, ids):
    """Packed sequences."""
    mask = linen.make_attention_mask(ids, ids, jnp.equal)
    return linen.dot_product_attention(q, k, v, mask=mask)


def segments_causal(q, k, v, ids):
    """T5X's mask of a decoder."""
    masks = [
        linen.make_causal_mask(ids),
        linen.make_attention_mask(ids > 0, ids > 0),
        linen.make_attention_mask(ids, ids, jnp.equal),
    ]
    return linen.dot_product_attention(q, k, v, mask=linen.combine_masks(*masks))


def segments_in_where(q, k, v, ids):
    same = ids[:, :, None] == ids[:, None, :]
    return attend(q, k, v, (same & tri(q.shape[1]))[:, None])


def positions(q, k, v, valid):
    """Causal by positions that are counted."""
    at = jnp.cumsum(valid, axis=1) - 1
    mask = (at[:, None, :, None] >= at[:, None, None, :]) & valid[:, None, None, :]
    return attend(q, k, v, mask)


def slopes(q, k, v, slope):
    """ALiBi, its slopes among the parameters."""
    t = q.shape[1]
    bias = -jnp.abs(slope)[:, None, None] * distance(t)
    return attend(q, k, v, tri(t), bias)


def slopes_of_keys(q, k, v, slope):
    """ALiBi as in BLOOM: the positions of the keys."""
    t = q.shape[1]
    return attend(q, k, v, tri(t), jnp.abs(slope)[:, None, None] * jnp.arange(t))


def slopes_of_counted_keys(q, k, v, valid):
    """BLOOM: positions are counted without padding, so that the code has no distance."""
    bias = SLOPES[:, None, None] * (jnp.cumsum(valid, axis=1) - 1)[:, None, None]
    return attend(q, k, v, tri(q.shape[1]) & valid[:, None, None], bias)


def temperature(q, k, v, number):
    s = jnp.einsum("btnh,bsnh->bnts", q, k) * jnp.exp(number)[:, None, None]
    return output(jax.nn.softmax(jnp.where(tri(q.shape[1]), s, -1e9)), v)


def temperature_of_queries(q, k, v, number):
    """A scale of each query."""
    s = jnp.einsum("btnh,bsnh->bnts", q, k) * number[:, None, :, None]
    return output(jax.nn.softmax(s), v)


def mask_after_the_sum(q, k, v, valid):
    """softmax(where=)."""
    mask = linen.make_attention_mask(valid, valid, dtype=bool)
    mask = jnp.broadcast_to(mask, (q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
    return output(jax.nn.softmax(scores(q, k), axis=-1, where=mask), v)


def mask_of_exponentials(q, k, v, valid):
    """Multiplied twice: in the sum and before the product with the values."""
    mask, s = (valid[:, :, None] & valid[:, None])[:, None], scores(q, k)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    total = jnp.sum(jax.lax.reduce_precision(e, 8, 23) * mask, axis=-1)
    return output(e * mask, v) / (total.swapaxes(1, 2)[..., None] + 1e-9)


def mask_of_weights(q, k, v, valid):
    """Masked after the softmax, and divided by their sum again."""
    weights = jax.nn.softmax(jnp.where(tri(q.shape[1]), scores(q, k), -1e9))
    weights = jnp.where(valid[:, None, None], weights, 0)
    return output(weights / jnp.sum(weights, axis=-1, keepdims=True), v)


def segments_of_exponentials(q, k, v, ids):
    """A causal mask in the scores, segments after the exponential."""
    s = jnp.where(tri(q.shape[1]), scores(q, k), -1e9)
    e = jnp.exp(s - s.max(-1, keepdims=True)) * (ids[:, None, :, None] == ids[:, None, None])
    return output(e / jnp.sum(e, axis=-1, keepdims=True), v)


def weights_of_keys(q, k, v, numbers):
    """Exponentials times a number of each query and of each key."""
    e = jnp.exp(scores(q, k)) * (numbers[:, None, :, None] * numbers[:, None, None])
    return output(e / jnp.sum(e, axis=-1, keepdims=True), v)


def relevance(q, k, v, numbers):
    """A number of each key, of the example."""
    return attend(q, k, v, bias=numbers[:, None, None])


def relevance_causal(q, k, v, numbers):
    """A gate of each key, scaled with the scores."""
    s = jnp.einsum("btnh,bsnh->bnts", q, k) + jax.nn.log_sigmoid(5 * numbers)[:, None, None]
    return output(jax.nn.softmax(jnp.where(tri(q.shape[1]), s / 3, -1e9)), v)


def relevance_of_heads(q, k, v, numbers):
    """A slope of each head, without a causal mask: no ALiBi. One key is masked."""
    at = jnp.arange(q.shape[1])
    return attend(q, k, v, bias=numbers[:, None, None] * jnp.where(at == 1, -1e9, at))


def minus_squared_distance(q, k, v, number):
    """The norms of the keys are a bias."""
    norms = [jnp.sum(x**2, axis=-1).swapaxes(1, 2) for x in (q, k)]
    s = 2 * jnp.einsum("btnh,bsnh->bnts", q, k) - norms[0][..., None] - norms[1][..., None, :]
    return output(jax.nn.softmax(number[:, None, None] * s / 5), v)


VALID = np.arange(T) < np.array([[T], [T - 5]])
IDS = np.array([[1] * 5 + [2] * 4 + [3] * 3, [1] * 2 + [2] * 7 + [0] * 3])
SLOPES = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
QUERIES = np.linspace(0.2, 0.6, B * T, dtype=np.float32).reshape(B, T)
ALONG_FACTORS = {
    **dict.fromkeys((padding, padding_causal, padding_as_bias, padding_times_number), VALID),
    **dict.fromkeys((padding_forbidden, keys_as_bias, positions, mask_after_the_sum), VALID),
    **dict.fromkeys((slopes_of_counted_keys, mask_of_exponentials, mask_of_weights), VALID),
    **dict.fromkeys((segments, segments_causal, segments_in_where), IDS),
    segments_of_exponentials: IDS,
    **dict.fromkeys((slopes, slopes_of_keys, temperature), SLOPES),
    **dict.fromkeys((temperature_of_queries, relevance, relevance_causal), QUERIES),
    weights_of_keys: QUERIES,
    **dict.fromkeys((relevance_of_heads, minus_squared_distance), SLOPES),
}
"""Form -> its last argument; they are read in linear time."""


# Ways to write softmax


def base_two(q, k, v):
    """2^x, as in kernels."""
    s = scores(q, k) * 1.4427
    e = jnp.exp2(s - jnp.max(s, axis=-1, keepdims=True))
    return output(e / jnp.sum(e, axis=-1, keepdims=True), v)


def base_two_causal(q, k, v):
    s = jnp.where(tri(q.shape[1]), scores(q, k) / 0.6931, -1e30)
    e = jnp.exp2(s - jnp.max(s, axis=-1, keepdims=True))
    return output(e / jnp.sum(e, axis=-1, keepdims=True), v)


def divided_late(q, k, v):
    """A division after the product with the values."""
    s = scores(q, k)
    e = jnp.exp(s - jnp.max(s, axis=-1, keepdims=True))
    return jnp.einsum("bnts,bsnh->bnth", e, v) / jnp.sum(e, axis=-1)[..., None]


def divided_late_causal(q, k, v):
    """Tokens before heads, a number against 0 / 0, a mask after the exponential."""
    mask = tri(q.shape[1])
    s = jnp.where(mask, scores(q, k), -1e30)
    e = jnp.where(mask, jnp.exp(s - jax.lax.stop_gradient(jnp.max(s, -1, keepdims=True))), 0)
    total = jnp.sum(e, axis=-1)
    return output(e, v) / jnp.maximum(total, 1e-9).swapaxes(1, 2)[..., None]


def with_ones(v):
    return jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1)


def column_of_ones(q, k, v):
    """The sum is a column of the product."""
    o = output(jnp.exp(scores(q, k)), with_ones(v))
    return o[..., :-1] / (o[..., -1:] + 1e-8)


def column_of_ones_causal(q, k, v):
    """The first column, by pad and split, with a reciprocal; head by head."""

    def one(q, k, v):
        s = jnp.where(tri(len(q)), q @ k.T / 3, -1e9)
        o = jnp.exp(s - s.max(-1, keepdims=True)) @ jnp.pad(v, ((0, 0), (1, 0)), constant_values=1)
        total, above = jnp.split(o, [1], axis=-1)
        return (1 / total) * above

    return jax.vmap(jax.vmap(one, 1, 1))(q, k, v)


def masked_exponentials(q, k, v):
    """The scores have no mask."""
    o = output(jnp.where(tri(q.shape[1]), jnp.exp(scores(q, k)), 0), with_ones(v))
    return o[..., :-1] / o[..., -1:]


def weighted_exponentials(q, k, v):
    """2^x times a number of each key; a number of all pairs is divided out."""
    s = scores(q, k)
    e = 3 * jnp.exp2(s - s.max(-1, keepdims=True)) * jnp.arange(1.0, 1 + k.shape[1])
    return output(e / e.sum(-1, keepdims=True), v)


def product_with_ones(q, k, v):
    e = jnp.exp(scores(q, k))
    return output(e, v) / output(e, np.ones((*k.shape[:3], 1), np.float32))


def unshifted(q, k, v):
    e = jnp.exp(scores(q, k))
    return output(e / (jnp.sum(e, axis=-1, keepdims=True) + 1e-8), v)


def one_more(q, k, v):
    """softmax-one."""
    e = jnp.exp(scores(q, k))
    return output(e / (1 + jnp.sum(e, axis=-1, keepdims=True)), v)


def log_softmax(q, k, v):
    return output(jnp.exp(jax.nn.log_softmax(scores(q, k))), v)


def prior(q, k, v):
    """A number of each key, written in the code."""
    return attend(q, k, v, bias=jnp.log1p(jnp.arange(q.shape[1], dtype=jnp.float32)))


def rows_and_columns(*arrays):
    """Tokens on two axes."""
    return (x.reshape(len(x), -1, 4, *x.shape[2:]) for x in arrays)


def grid(q, k, v):
    q, k, v = rows_and_columns(q, k, v)
    s = jnp.einsum("bijnh,bklnh->bnijkl", q, k) / 3
    return jnp.einsum("bnijkl,bklnh->bijnh", jax.nn.softmax(s, axis=(-2, -1)), v)


def grid_by_hand(q, k, v):
    """Reduced in two steps, the keys transposed, a bias of each column of keys."""
    q, k, v = rows_and_columns(q, k, v)
    s = jnp.einsum("bijnh,blknh->bijnkl", q, k.swapaxes(1, 2)) + jnp.arange(4) / 3
    e = jnp.exp(s / 3 - (s / 3).max(-1).max(-1)[..., None, None])
    return jnp.einsum("bijnkl,bklnh->bijnh", e, v) / e.sum(-1).sum(-1)[..., None]


def grid_as_tokens(q, k, v):
    """Each row sees itself; weights on one axis of the keys."""
    x, y, _ = rows_and_columns(q, k, v)
    s = jnp.einsum("bijnh,bklnh->bnijkl", x, y) / 3
    s = jnp.where(jnp.eye(x.shape[1], dtype=bool)[:, None, :, None], s, -jnp.inf)
    weights = jax.nn.softmax(s.reshape(*s.shape[:4], -1))
    return jnp.einsum("bnijs,bsnh->bijnh", weights, v)


def entries_on_two_axes(q, k, v):
    """Heads are entries."""
    weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bts", q, k) / 3)
    return jnp.einsum("bts,bsnh->btnh", weights, v)


def cosine(q, k, v):
    """Products divided by the norms of queries and keys."""
    norms = jnp.linalg.norm(q, axis=-1), jnp.linalg.norm(k, axis=-1)
    pairs = (
        jnp.einsum("btn->bnt", norms[0])[..., None] * jnp.einsum("bsn->bns", norms[1])[:, :, None]
    )
    return output(jax.nn.softmax(3 * jnp.einsum("btnh,bsnh->bnts", q, k) / pairs), v)


def qk_norm(q, k, v):
    """RMS norms of queries and keys."""
    q, k = (x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) for x in (q, k))
    return attend(q, k, v, tri(q.shape[1]))


def scale_after_mask(q, k, v):
    s = jnp.where(tri(q.shape[1]), jnp.einsum("btnh,bsnh->bnts", q, k), -1e9)
    return output(jax.nn.softmax(s / 3), v)


def negative_scale(q, k, v):
    return output(jax.nn.softmax(-jnp.einsum("btnh,bsnh->bnts", q, k) / 3), v)


def minus_a_penalty(q, k, v):
    return output(jax.nn.softmax(scores(q, k) - 1e9 * (1 - tri(q.shape[1]).astype(float))), v)


def log_of_the_mask(q, k, v):
    return attend(q, k, v, bias=jnp.log(tri(q.shape[1]).astype(jnp.float32)))


def heads_as_many_as_tokens(q, k, v):
    """Multi-query attention of 12 heads at 12 tokens, heads first, causal."""
    q = jnp.tile(q, (1, 1, 3, 1))
    s = jnp.einsum("btnh,bsh->bnts", q, k[:, :, 0])
    return jnp.einsum("bnts,bsh->btnh", jax.nn.softmax(jnp.where(tri(T), s, -1e9)), v[:, :, 0])


def batch_last(q, k, v):
    """Tokens, heads, batch."""
    q, k, v = (jnp.transpose(x, (1, 2, 3, 0)) for x in (q, k, v))
    s = jnp.einsum("tnhb,snhb->bnts", q, k) / 3
    return jnp.einsum("bnts,snhb->tnhb", jax.nn.softmax(s), v)


def keys_first(q, k, v):
    s = jnp.einsum("bsnh,btnh->bnst", k, q)
    return jnp.einsum("bnst,bsnh->btnh", jax.nn.softmax(s, axis=2), v)


def grouped(q, k, v):
    return jax.nn.dot_product_attention(q, k[:, :, :2], v[:, :, :2], is_causal=True)


def repeated_keys(q, k, v):
    k, v = (jnp.repeat(x[:, :, :2], 2, axis=2) for x in (k, v))
    return attend(q, k, v, tri(q.shape[1]))


def under_checkpoint(q, k, v):
    return jax.checkpoint(attend)(q, k, v)


def under_vmap(q, k, v):
    def one(q, k, v):
        return jax.nn.softmax(q @ k.T / 3) @ v

    return jax.vmap(jax.vmap(one, 1, 1))(q, k, v)


def layers_in_a_scan(q, k, v):
    """The mask is a constant outside."""
    mask = tri(q.shape[1])
    return jax.lax.scan(lambda x, _: (attend(x, x + k, v, mask), None), q, length=2)[0]


READ = (
    *(base_two, base_two_causal, divided_late, divided_late_causal, unshifted, one_more),
    *(log_softmax, cosine, prior, column_of_ones, column_of_ones_causal, product_with_ones),
    *(masked_exponentials, weighted_exponentials),
    *(grid, grid_by_hand, grid_as_tokens, entries_on_two_axes),
    *(qk_norm, scale_after_mask, negative_scale, minus_a_penalty, log_of_the_mask, batch_last),
    *(heads_as_many_as_tokens, keys_first, grouped, repeated_keys, under_checkpoint, under_vmap),
    layers_in_a_scan,
)
"""Forms without another argument that are read."""


# What stays exact


def vocabulary(q, k, v):
    """The next token's embedding."""
    table = jnp.sin(jnp.arange(9.0 * H)).reshape(9, H)
    return jax.nn.softmax(q @ table.T) @ table


def expected_bin(q, k, v):
    """Soft argmax: the expected position of a match."""
    return jax.nn.softmax(q[:, :, 0] @ k[:, :, 0].mT) @ jnp.arange(T, dtype=float)[:, None]


def sum_is_returned(q, k, v):
    s = scores(q, k)
    return output(jax.nn.softmax(s), v), jax.nn.logsumexp(s, axis=-1)


def halves_are_merged(q, k, v):
    """Two halves of the keys, merged by the sums of their exponentials."""
    parts = []
    for x, y in zip(jnp.split(k, 2, 1), jnp.split(v, 2, 1), strict=True):
        e = jnp.exp(scores(q, x))
        parts.append((output(e, y), jnp.sum(e, axis=-1).swapaxes(1, 2)[..., None]))
    return (parts[0][0] + parts[1][0]) / (parts[0][1] + parts[1][1])


def numerator_is_returned(q, k, v):
    e = jnp.exp(scores(q, k))
    o = jnp.einsum("bnts,bsnh->bnth", e, v)
    return o / jnp.sum(e, axis=-1, keepdims=True), o


def halves_of_a_numerator(q, k, v):
    """Columns that are divided apart."""
    o = output(jnp.exp(scores(q, k)), with_ones(v))
    return o[..., :4] / o[..., -1:], 2 * o[..., 4:-1] / o[..., -1:]


def divided_by_another_column(q, k, v):
    o = output(jnp.exp(scores(q, k)), with_ones(v))
    return o[..., 1:] / o[..., :1]


def divided_by_a_product(q, k, v):
    """With numbers that are not 1."""
    e = jnp.exp(scores(q, k))
    return output(e, v) / output(e, np.full((*k.shape[:3], 1), 2, np.float32))


def column_of_twos(q, k, v):
    """Half of attention."""
    twos = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, 1)), constant_values=2)
    o = output(jnp.exp(scores(q, k)), twos)
    return o[..., :-1] / o[..., -1:]


def grid_causal_in_rows(q, k, v):
    """Rows see earlier rows, as frames of a video."""
    q, k, v = rows_and_columns(q, k, v)
    s = jnp.einsum("bijnh,bklnh->bnijkl", q, k) / 3
    s = jnp.where(tri(q.shape[1])[:, None, :, None], s, -1e9)
    return jnp.einsum("bnijkl,bklnh->bijnh", jax.nn.softmax(s, axis=(-2, -1)), v)


def softmax_of_each_row(q, k, v):
    """Over the columns of keys; rows are summed."""
    q, k, v = rows_and_columns(q, k, v)
    s = jnp.einsum("bijnh,bklnh->bnijkl", q, k) / 3
    return jnp.einsum("bnijkl,bklnh->bijnh", jax.nn.softmax(s), v)


def decaying_exponentials(q, k, v):
    """A factor of each pair."""
    e = jnp.exp(scores(q, k)) * 0.5 ** distance(T)
    return output(e / jnp.sum(e, axis=-1, keepdims=True), v)


def other_exponentials_summed(q, k, v, valid):
    """The sum has a mask that the weights do not have."""
    e = jnp.exp(scores(q, k))
    total = jnp.sum(e * valid[:, None, None], axis=-1, keepdims=True)
    return output(e / total, v)


def other_weights_summed(q, k, v, valid):
    """Weights divided by a sum of masked exponentials."""
    e = jnp.exp(scores(q, k))
    masked = e / jnp.sum(e, axis=-1, keepdims=True) * valid[:, None, None]
    return output(masked / jnp.sum(e * valid[:, None, None], axis=-1, keepdims=True), v)


def mask_of_queries_after_keys(q, k, v, valid):
    """One array masks keys in the scores and queries in the weights."""
    weights = jax.nn.softmax(jnp.where(valid[:, None, None], scores(q, k), -1e9))
    return output(weights * valid[:, None, :, None], v)


def joined_after_the_scale(q, k, v):
    s = [scores(q, x) for x in jnp.split(k, 2, axis=1)]
    return output(jax.nn.softmax(jnp.concatenate(s, axis=-1)), v)


def every_second_key(q, k, v):
    """The weights of a sink and of half of the keys are left out."""
    s = jnp.concatenate([jnp.zeros((B, N, T, 1)), scores(q, k)], axis=-1)
    return output(jax.nn.softmax(s)[..., 1::2], v[:, ::2])


def loop_over_queries(q, k, v):
    def one(q):
        weights = jax.nn.softmax(jnp.einsum("bnh,bsnh->bns", q, k))
        return jnp.einsum("bns,bsnh->bnh", weights, v)

    return jax.lax.map(one, q.swapaxes(0, 1))


def loop_over_blocks(q, k, v):
    """A few queries at each step."""
    blocks = jnp.moveaxis(q.reshape(B, 3, T // 3, N, H), 1, 0)
    return jax.lax.map(lambda q: attend(q, k, v), blocks)


def relative_bias(q, k, v):
    """T5: a table of distances."""
    table = jnp.sin(jnp.arange(2 * T * N)).reshape(N, 2 * T)
    i = jnp.arange(T)
    return attend(q, k, v, bias=table[:, i[:, None] - i + T])


def table_of_distances(q, k, v, table):
    """T5: the table is a parameter."""
    i = jnp.arange(T)
    return attend(q, k, v, bias=table[:, i[:, None] - i + T])


def relevance_in_groups(q, k, v, numbers):
    """Two query heads of a key head have two biases."""
    return jax.nn.dot_product_attention(q, k[:, :, :2], v[:, :, :2], bias=numbers[None, :, None])


def either_exists(q, k, v, valid):
    """No product: pairs of which one exists."""
    return attend(q, k, v, valid[:, None, :, None] | valid[:, None, None])


def window(q, k, v):
    return attend(q, k, v, distance(T) < 3)


def capped(q, k, v):
    return output(jax.nn.softmax(50 * jnp.tanh(scores(q, k) / 50)), v)


def dropped(q, k, v):
    kept = jax.random.bernoulli(jax.random.key(0), 0.9, (B, N, T, T))
    return output(jax.nn.softmax(scores(q, k)) * kept / 0.9, v)


def gated(q, k, v):
    return output(jax.nn.softmax(scores(q, k)) * 2, v)


def weights_where_masked(q, k, v, valid):
    """The weights of the pairs that the scores do not have."""
    weights = jax.nn.softmax(jnp.where(valid[:, None, None], scores(q, k), -1e9))
    return output(jnp.where(valid[:, None, None], 0, weights), v)


def other_shift(q, k, v):
    """A sink whose maximum is of other rows."""
    s = scores(q, k)
    top = jnp.max(s, axis=-1, keepdims=True)
    e, other = jnp.exp(s - top), jnp.exp(0.5 - jnp.max(s / 3, axis=-1, keepdims=True))
    return output(e / (jnp.sum(e, axis=-1, keepdims=True) + other), v)


def divided_by_other_sums(q, k, v):
    """The sum of row j divides column j."""
    e = jnp.exp(scores(q, k))
    return output(e / jnp.sum(e, axis=-1)[:, :, None], v)


def sigmoid(q, k, v):
    return output(jax.nn.sigmoid(scores(q, k)), v)


EXACT = {
    vocabulary: "that all examples share",
    expected_bin: "that all examples share",
    sum_is_returned: "read elsewhere",
    halves_are_merged: "changed by add before it is divided",
    numerator_is_returned: "read elsewhere",
    halves_of_a_numerator: "read elsewhere",
    divided_by_a_product: "changed by div before it is divided",
    grid_causal_in_rows: "neither of keys, nor causal",
    softmax_of_each_row: "sums over more axes than the softmax",
    column_of_twos: "changed by slice before it is divided",
    divided_by_another_column: "changed by slice before it is divided",
    decaying_exponentials: "multiplied by a number for each pair of a query and a key",
    other_exponentials_summed: "changed after the softmax, by div",
    other_weights_summed: "changed after the softmax, by div",
    mask_of_queries_after_keys: "changed after the softmax, by mul",
    joined_after_the_scale: "scores of several products are joined",
    every_second_key: "changed after the softmax, by slice",
    loop_over_queries: "in a loop over queries",
    loop_over_blocks: "in a loop over queries",
    relative_bias: "a bias that is no mask",
    table_of_distances: "computed for all pairs of a query and a key, by gather",
    relevance_in_groups: "differs between query heads of one key head",
    either_exists: "no product of one of the queries and one of the keys, by or",
    window: "neither of keys, nor causal",
    capped: "changed by tanh",
    dropped: "changed after the softmax",
    gated: "changed after the softmax",
    weights_where_masked: "changed after the softmax, by select_n",
    other_shift: "changed after the softmax, by add",
    divided_by_other_sums: "changed after the softmax, by div",
    sigmoid: "no softmax attention was found",
}
"""Form -> why it stays exact."""
MORE = {
    table_of_distances: np.sin(np.arange(2.0 * T * N)).reshape(N, 2 * T),
    relevance_in_groups: np.sin(np.arange(N * float(T))).reshape(N, T),
    either_exists: VALID,
    **dict.fromkeys((weights_where_masked, mask_of_queries_after_keys), np.ones((B, T), bool)),
    **dict.fromkeys((other_exponentials_summed, other_weights_summed), VALID),
}
"""Form of EXACT -> its last argument."""
