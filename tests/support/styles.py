"""Attention in the styles of public repositories, rewritten as small functions.

A form is a function of queries, keys and values (b, t, n, h); defaults of further parameters are
arguments also. The docstring names what public code writes attention in this way. A form under
`read` is replaced: with all keys exact it is the given function, and its error falls as 1 / m.
A form under `exact` stays as it is, for the reason in the decorator, which is true of it; numbers
of a batch decide if it is `measured`. A form under `none` is no softmax attention of several
queries to keys: nothing is said of it.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from tests.support.forms import IDS, SLOPES, VALID, B, H, N, T, distance, output, scores, tri

READ, EXACT, NONE = [], {}, []
MEASURED = set()
"""Forms of EXACT whose reason comes from the batches."""
RANDOM = np.random.default_rng(0).random((B, 1, T, T)) < 0.7
"""A mask of any pairs; each query sees itself."""
RANDOM |= np.eye(T, dtype=bool)
SQUARE = np.random.default_rng(1).normal(size=(T, T)).astype(np.float32)
WIDTHS = np.random.default_rng(2).normal(size=(N, H)).astype(np.float32)
BIASES = np.sin(np.arange(T * N, dtype=np.float32)).reshape(N, T)
MIX = np.eye(N, dtype=np.float32) + 0.1
POSITIONS = np.sin(np.arange(2 * T * H, dtype=np.float32)).reshape(2 * T, H)
BETA, POSITION, LENGTHS = np.float32(0.4), np.int32(7), np.array([12, 7], np.int32)
MEDIA = np.minimum(np.arange(T) // 4, 2)[None].repeat(B, 0)
PACKED = np.arange(T)[None].repeat(B, 0) // 5
STARTS = (np.arange(T) >= 5)[None].repeat(B, 0)
LARGE = -1e30


def read(form):
    """Register a form that is replaced."""
    READ.append(form)
    return form


def exact(reason, measured=False):
    """Register a form that stays exact for this reason."""

    def register(form):
        EXACT[form] = reason
        MEASURED.update([form] * measured)
        return form

    return register


def none(form):
    """Register a form that is no softmax attention."""
    NONE.append(form)
    return form


def by_head(*arrays):
    """(b, n, t, h)."""
    return [jnp.swapaxes(x, 1, 2) for x in arrays]


# Vision


@read
def big_vision_vit(q, k, v):
    """big_vision, scenic: the function of Flax, deterministic."""
    return linen.dot_product_attention(q, k, v, dropout_rate=0.1, deterministic=True)


@read
def big_vision_map_head(q, k, v):
    """big_vision: a learned probe attends to all patches."""
    probe = jnp.tile(q[:1, :1], (k.shape[0], 1, 1, 1))
    return linen.dot_product_attention(probe, k, v)


@read
def scenic_ellipsis(q, k, v):
    """scenic: any number of leading axes."""
    q = q / jnp.sqrt(q.shape[-1]).astype(q.dtype)
    weights = jnp.einsum("...qhd,...khd->...hqk", q, k, precision=None)
    weights = jax.nn.softmax(weights, axis=-1)
    return jnp.einsum("...hqk,...khd->...qhd", weights, v)


@read
def timesformer_time(q, k, v):
    """scenic, TimeSformer: attention in time, for each place."""
    q, k, v = (x.reshape(B, T // 2, 2, N, H).transpose(0, 2, 1, 3, 4) for x in (q, k, v))
    s = jnp.einsum("bpqhd,bpkhd->bphqk", q, k) * H**-0.5
    return jnp.einsum("bphqk,bpkhd->bpqhd", jax.nn.softmax(s), v)


@read
def axial_columns(q, k, v):
    """axial-deeplab: along one axis of a picture."""
    q, k, v = (x.reshape(B, 2, T // 2, N, H) for x in (q, k, v))
    s = jnp.einsum("bijhd,bikhd->bihjk", q, k) / math.sqrt(H)
    return jnp.einsum("bihjk,bikhd->bijhd", jax.nn.softmax(s), v)


@read
def windows_in_the_batch(q, k, v):
    """Swin, MaxViT: windows are examples."""
    q, k, v = (x.reshape(B * 3, T // 3, N, H) for x in (q, k, v))
    s = jnp.einsum("wqhd,wkhd->whqk", q * H**-0.5, k)
    return jnp.einsum("whqk,wkhd->wqhd", jax.nn.softmax(s), v).reshape(B, T, N, H)


@exact("a bias that is no mask", measured=True)
def swin_bias(q, k, v):
    """Swin: a table of relative positions in a window."""
    table, at = jnp.sin(jnp.arange(2.0 * T * N)).reshape(2 * T, N), np.arange(T)
    bias = table[(at[:, None] - at + T).reshape(-1)].reshape(T, T, N)
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k) * H**-0.5 + bias.transpose(2, 0, 1)[None]
    return output(jax.nn.softmax(s), v)


@exact("by gather")
def levit_bias(q, k, v, table=BIASES):
    """LeViT: learned biases by distance."""
    bias = table[:, np.abs(np.arange(T)[:, None] - np.arange(T))]
    q, k, v = by_head(q, k, v)
    return jax.nn.softmax(q @ k.mT * H**-0.5 + bias) @ v


@read
def cait_class_token(q, k, v):
    """CaiT: the class token alone asks."""
    q, k, v = by_head(q[:, :1], k, v)
    weights = jax.nn.softmax((q * H**-0.5) @ jnp.swapaxes(k, -2, -1), axis=-1)
    return (weights @ v).transpose(0, 2, 1, 3).reshape(B, 1, N * H)


@exact("axes of the scores are lost|heads are mixed before")
def cait_talking_heads(q, k, v, mix=MIX):
    """CaiT: heads are mixed before the softmax."""
    s = jnp.einsum("bhqk,hg->bgqk", scores(q, k), mix)
    return output(jax.nn.softmax(s), v)


@read
def xcit_channels(q, k, v, temperature=SLOPES):
    """XCiT: channels attend to channels; tokens are their entries."""
    q, k, v = (x.transpose(0, 2, 3, 1) for x in (q, k, v))
    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    weights = jax.nn.softmax(q @ k.mT * temperature[:, None, None])
    return (weights @ v).transpose(0, 3, 1, 2)


@read
def pvt_reduced_keys(q, k, v):
    """PVT: keys are means of three."""
    k, v = (x.reshape(B, T // 3, 3, N, H).mean(axis=2) for x in (k, v))
    return linen.dot_product_attention(q, k, v)


@read
def detr_padding(q, k, v, valid=VALID):
    """DETR: positions are added to queries and keys, padding is -inf."""
    at = jnp.sin(jnp.arange(1.0 * T)[:, None, None] / 3)
    s = jnp.einsum("bqhd,bkhd->bhqk", q + at, k + at) / np.sqrt(H)
    s = s + jnp.where(valid, 0.0, -jnp.inf)[:, None, None, :]
    return output(jax.nn.softmax(s), v)


@exact("changed after the softmax, by reduce_sum")
def slot_attention(q, k, v):
    """slot-attention: slots compete for each input."""
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) * H**-0.5, axis=-2) + 1e-8
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return output(weights, v)


@exact("a sum of several products")
def sam_relative_positions(q, k, v, rows=SQUARE[:, :H]):
    """segment-anything: products of the queries with a table of positions are added."""
    s = scores(q, k) + jnp.einsum("bqhd,kd->bhqk", q, rows)
    return output(jax.nn.softmax(s), v)


@read
def clip_text(q, k, v):
    """CLIP: a triangle of -inf is added."""
    mask = jnp.triu(jnp.full((T, T), -jnp.inf), 1)
    q, k, v = by_head(q, k, v)
    return by_head(jax.nn.softmax(q @ k.mT / H**0.5 + mask) @ v)[0]


@exact("read elsewhere")
def dino_maps(q, k, v):
    """DINO: the attention of the class token is returned."""
    weights = jax.nn.softmax(scores(q, k))
    return output(weights, v), weights[:, :, 0, 1:]


@read
def diffusers_heads_in_the_batch(q, k, v):
    """diffusers: batch and heads in one axis, the scale after the product."""
    q, k, v = (x.transpose(0, 2, 1, 3).reshape(B * N, T, H) for x in (q, k, v))
    s = jnp.einsum("b i d, b j d->b i j", q, k) * H**-0.5
    o = jnp.einsum("b i j, b j d -> b i d", jax.nn.softmax(s, axis=-1), v)
    return o.reshape(B, N, T, H).transpose(0, 2, 1, 3).reshape(B, T, N * H)


@exact("in a loop over queries")
def diffusers_chunks(q, k, v):
    """diffusers: memory-efficient attention, chunks of queries in a scan."""

    def chunk(start, _):
        part = jax.lax.dynamic_slice(q, (0, start, 0, 0), (B, 4, N, H))
        return start + 4, output(jax.nn.softmax(scores(part, k)), v)

    return jax.lax.scan(chunk, 0, None, length=T // 4)[1]


@read
def score_sde_picture(q, k, v):
    """score_sde, DDPM: keys have two axes, which the softmax joins."""
    q, k, v = (x[:, :, 0].reshape(B, 3, T // 3, H) for x in (q, k, v))
    s = jnp.einsum("bhwc,bHWc->bhwHW", q, k) * H**-0.5
    weights = jax.nn.softmax(s.reshape(B, 3, T // 3, T), axis=-1)
    return jnp.einsum("bhwHW,bHWc->bhwc", weights.reshape(s.shape), v)


@read
def vqgan_one_head(q, k, v):
    """taming-transformers: one head over a flattened picture, keys transposed."""
    q, k, v = (x.reshape(B, T, N * H) for x in (q, k, v))
    s = jax.lax.batch_matmul(q, k.transpose(0, 2, 1)) * (N * H) ** -0.5
    return jnp.matmul(jax.nn.softmax(s), v)


@exact("neither of keys, nor causal", measured=True)
def mask2former(q, k, v, mask=RANDOM):
    """Mask2Former: each query sees its own region."""
    return output(jax.nn.softmax(jnp.where(mask, scores(q, k), LARGE)), v)


@read
def vit22b_norms(q, k, v, gains=WIDTHS):
    """ViT-22B, DiT: layer norms of queries and keys with learned gains."""
    q, k = (jax.nn.standardize(x, epsilon=1e-6) for x in (q, k))
    return linen.dot_product_attention(q * gains / 2, k * gains / 2, v)


@read
def swin2_cosine(q, k, v, temperature=SLOPES[:, None, None]):
    """Swin V2: cosines with a learned scale that is at most 100."""
    q, k, v = by_head(q, k, v)
    q, k = (x * jax.lax.rsqrt(jnp.sum(x**2, -1, keepdims=True) + 1e-6) for x in (q, k))
    s = (q @ k.mT) * jnp.exp(jnp.minimum(temperature, jnp.log(100.0)))
    return jax.nn.softmax(s) @ v


@exact("changed after the softmax, as by dropout")
def vit_dropout(q, k, v):
    """vision_transformer in training."""
    key = jax.random.key(0)
    return linen.dot_product_attention(
        q, k, v, dropout_rng=key, dropout_rate=0.1, deterministic=False
    )


@read
def mmdit_joined_streams(q, k, v):
    """Stable Diffusion 3, pi0: tokens of two streams are joined, and parted after."""
    q, k, v = (jnp.concatenate([x[:, :5], 2 * x[:, 5:]], axis=1) for x in (q, k, v))
    o = jax.nn.dot_product_attention(q, k, v)
    return o[:, :5], o[:, 5:]


@none
def attention_pool_of_instances(q, k, v):
    """MIL: weights of tokens by a learned vector."""
    logits = jnp.tanh(q[:, :, 0]) @ jnp.linspace(-1, 1, H)
    return jnp.einsum("bt,bth->bh", jax.nn.softmax(logits), v[:, :, 0])


# Language


@read
def nanogpt(q, k, v):
    """nanoGPT in JAX: a triangle of floats, which is compared with 0."""
    q, k, v = by_head(q, k, v)
    attention = (q @ jnp.swapaxes(k, -2, -1)) * (1.0 / math.sqrt(k.shape[-1]))
    mask = jnp.tril(jnp.ones((T, T))).reshape(1, 1, T, T)
    attention = jnp.where(mask == 0, float("-inf"), attention)
    return (jax.nn.softmax(attention, axis=-1) @ v).transpose(0, 2, 1, 3)


@read
def picogpt(q, k, v):
    """picoGPT: a list of heads of one example, with an additive triangle."""

    def attend(q, k, v):
        return jax.nn.softmax(q @ k.T / np.sqrt(H) + (1 - np.tri(T, dtype=np.float32)) * -1e10) @ v

    heads = [jax.vmap(attend)(*(x[:, :, i] for x in (q, k, v))) for i in range(2)]
    return jnp.concatenate(heads, axis=-1)


@read
def gpt2_by_products(q, k, v):
    """GPT-2: scores times the mask, and -1e10 where it is 0."""
    mask = jnp.tri(T)
    w = scores(q, k)
    return output(jax.nn.softmax(w * mask - 1e10 * (1 - mask)), v)


@exact("is not what it computes", measured=True)
def zeros_that_are_seen(q, k, v):
    """GPT-2 without the bias: scores of later keys are 0, and their weights are not."""
    return output(jax.nn.softmax(scores(q, k) * jnp.tri(T)), v)


@exact("its scale differs between pairs")
def decayed_by_distance(q, k, v):
    """Scores times a number of each distance."""
    return output(jax.nn.softmax(scores(q, k) * jnp.exp(-distance(T) / 8)), v)


@read
def transformers_bert(q, k, v, valid=VALID):
    """transformers, BERT: a bias of the least float from the mask of the keys."""
    mask = jnp.expand_dims(valid, axis=(-3, -2))
    bias = jax.lax.select(
        mask > 0,
        jnp.full(mask.shape, 0.0).astype(q.dtype),
        jnp.full(mask.shape, jnp.finfo(q.dtype).min).astype(q.dtype),
    )
    weights = linen.attention.dot_product_attention_weights(q, k, bias=bias, dtype=q.dtype)
    return jnp.einsum("...hqk,...khd->...qhd", weights, v)


@exact("not read as attention: .* dot_general")
def transformers_head_mask(q, k, v, heads=SLOPES):
    """transformers: a factor of each head, on the weights."""
    weights = linen.attention.dot_product_attention_weights(q, k)
    weights = jnp.einsum("...hqk,h->...hqk", weights, heads)
    return jnp.einsum("...hqk,...khd->...qhd", weights, v)


@read
def transformers_gpt2(q, k, v, valid=VALID):
    """transformers, GPT-2: a slice of a large triangle, combined with padding."""
    whole = linen.make_causal_mask(jnp.ones((1, 2 * T), dtype="bool"), dtype="bool")
    causal = jnp.broadcast_to(whole[:, :, :T, :T], (B, 1, T, T))
    padding = jnp.broadcast_to(jnp.expand_dims(valid, axis=(-3, -2)), causal.shape)
    mask: Any = linen.combine_masks(padding, causal, dtype="bool")
    bias = jax.lax.select(mask > 0, jnp.full(mask.shape, 0.0), jnp.full(mask.shape, -1e9))
    weights = linen.attention.dot_product_attention_weights(q, k, bias=bias)
    return jnp.einsum("...hqk,...khd->...qhd", weights, v)


@read
def transformers_bart_decoder(q, k, v):
    """transformers, BART: a dynamic slice of a large triangle, at position 0."""
    whole = jnp.tril(jnp.ones((1, 1, 2 * T, 2 * T), bool))
    mask = jax.lax.dynamic_slice(whole, (0, 0, 0, 0), (1, 1, T, T))
    return linen.dot_product_attention(q, k, v, mask=mask)


@exact("a bias that is no mask|by gather|computed for all pairs")
def transformers_t5(q, k, v, table=WIDTHS):
    """transformers, T5: biases by logarithmic buckets, no scale."""
    far = jnp.abs(jnp.arange(T)[:, None] - jnp.arange(T))
    bucket = jnp.where(far < 4, far, 3 + jnp.log1p(far / 4).astype(int))
    bias = table.T[bucket].transpose(2, 0, 1)[None]
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias
    return output(jax.nn.softmax(s), v)


@read
def transformers_t5_cross(q, k, v, valid=VALID):
    """transformers, T5: zeros for the bias of cross attention."""
    bias = jnp.zeros((1, N, T, T)) + jnp.where(valid, 0.0, -1e10)[:, None, None]
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias
    return output(jax.nn.softmax(s), v)


@read
def transformers_bloom(q, k, v, valid=VALID, slopes=SLOPES):
    """transformers, BLOOM: slopes times positions that are counted without padding."""
    at = (jnp.cumsum(valid, axis=-1) - 1) * valid
    alibi = (slopes[:, None] * at[:, None]).reshape(B, N, 1, T)
    mask = tri(T) & valid[:, None, None]
    return output(jax.nn.softmax(jnp.where(mask, scores(q, k) + alibi, -1e9)), v)


@read
def transformers_whisper(q, k, v):
    """transformers, Whisper: the queries are scaled first."""
    weights = linen.dot_product_attention_weights(q * H**-0.5 * H**0.5, k)
    return jnp.einsum("...hqk,...khd->...qhd", weights, v)


@read
def transformers_llama(q, k, v, valid=VALID):
    """transformers, Llama: keys are repeated, softmax in float32."""
    k, v = (jnp.repeat(x[:, :, :2], 2, axis=2) for x in (k, v))
    mask = jnp.logical_and(tri(T), valid[:, None, None])
    bias = jnp.where(mask, 0.0, jnp.finfo(jnp.float32).min)
    weights = linen.dot_product_attention_weights(q, k, bias=bias, dtype=jnp.float32)
    return jnp.einsum("...hqk,...khd->...qhd", weights.astype(v.dtype), v)


@exact("neither of keys, nor causal", measured=True)
def transformers_mistral(q, k, v):
    """transformers, Mistral: a causal window."""
    mask = jnp.tril(jnp.ones((T, T), bool)) & jnp.triu(jnp.ones((T, T), bool), -4)
    return linen.dot_product_attention(q, k, v, mask=mask[None, None])


@exact("neither of keys, nor causal", measured=True)
def bigbird_blocks(q, k, v):
    """BigBird: near blocks, and global tokens."""
    block = np.arange(T) // 3
    near = np.abs(block[:, None] - block) < 2
    mask = near | (block == 0)[:, None] | (block == 0)
    return output(jax.nn.softmax(jnp.where(mask, scores(q, k), -1e9)), v)


@read
def t5x_bias(q, k, v, ids=IDS):
    """T5X: the mask becomes a bias, scores in float32."""
    mask: Any = linen.combine_masks(
        linen.make_causal_mask(ids), linen.make_attention_mask(ids, ids, jnp.equal)
    )
    bias = jax.lax.select(mask > 0, jnp.full(mask.shape, 0.0), jnp.full(mask.shape, -1e10))
    weights = jnp.einsum("bqhd,bkhd->bhqk", q.astype(jnp.float32), k.astype(jnp.float32))
    weights = jax.nn.softmax(weights + bias).astype(q.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


@read
def t5x_multi_query(q, k, v):
    """T5X, PaLM: one head of keys and values."""
    s = jnp.einsum("bqhd,bkd->bhqk", q, k[:, :, 0]) + jnp.where(tri(T), 0.0, -1e10)
    return jnp.einsum("bhqk,bkd->bqhd", jax.nn.softmax(s), v[:, :, 0])


@exact("nor of packed sequences with as many queries as keys", measured=True)
def t5x_packed_cross(q, k, v, ids=IDS):
    """T5X: packed targets see their own inputs, of another length."""
    mask = linen.make_attention_mask(ids[:, :8], ids, jnp.equal)
    return linen.dot_product_attention(q[:, :8], k, v, mask=mask)


@read
def maxtext_late_division(q, k, v):
    """MaxText: grouped heads; the sums of the exponentials divide at the end."""
    q = q.reshape(B, T, 2, N // 2, H)
    s = jnp.einsum("btkgd,bskd->bkgts", q, k[:, :, :2])
    s = jnp.where(jnp.where(tri(T), 0.0, -2e38) >= -1e38, s, -2e38)
    top = jnp.max(s, axis=-1, keepdims=True)
    e = jnp.exp(s - top)
    total = jnp.moveaxis(jnp.sum(e, axis=-1, keepdims=True), -2, 1).reshape(B, T, N, 1)
    o = jnp.einsum("bkgts,bskd->btkgd", e, v[:, :, :2]).reshape(B, T, N, H)
    return o / total


@read
def maxtext_segments(q, k, v, ids=IDS):
    """MaxText: segments, and positions that are compared."""
    same = ids[:, :, None] == ids[:, None, :]
    rows, columns = (jax.lax.broadcasted_iota(jnp.int32, (T, T), i) for i in (0, 1))
    mask = jnp.logical_and(same[:, None, None], (columns <= rows)[None, None, None])
    q = q.reshape(B, T, 2, N // 2, H)
    s = jnp.einsum("btkgd,bskd->bkgts", q, k[:, :, :2])
    weights = jax.nn.softmax(s + jnp.where(mask, 0.0, -2e38))
    return jnp.einsum("bkgts,bskd->btkgd", weights, v[:, :, :2]).reshape(B, T, N, H)


@read
def maxtext_chunks(q, k, v):
    """MaxText, Llama 4: causal within chunks of the sequence."""
    chunk = np.arange(T) // 4
    mask = (chunk[:, None] == chunk) & np.tri(T, dtype=bool)
    return output(jax.nn.softmax(jnp.where(mask, scores(q, k), -2e38)), v)


@read
def gemma_heads_in_the_middle(q, k, v):
    """gemma: scores (b, t, n, s)."""
    logits = jnp.einsum("BTNH,BSNH->BTNS", q * H**-0.5, k)
    logits = jnp.where(jnp.expand_dims(tri(T)[None], -2), logits, -2.3819763e38)
    probs = jax.nn.softmax(logits, axis=-1).astype(k.dtype)
    return jnp.einsum("BTNS,BSNH->BTNH", probs, v)


@exact("changed by tanh")
def gemma2_cap(q, k, v):
    """gemma 2, grok-1: a soft cap."""
    logits = jnp.tanh(scores(q, k) / 30.0) * 30.0
    return output(jax.nn.softmax(jnp.where(tri(T), logits, LARGE)), v)


@read
def gemma3_joined_groups(q, k, v):
    """gemma 3: key heads and groups are one axis of the scores at the mask."""
    q, k = (x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) for x in (q, k))
    q = q.reshape(B, T, 2, N // 2, H) * H**-0.5
    logits = jnp.einsum("BTKGH,BSKH->BTKGS", q, k[:, :, :2]).reshape(B, T, N, T)
    logits = jnp.where(tri(T)[None, :, None], logits, -2e38)
    probs = jax.nn.softmax(logits, axis=-1).reshape(B, T, 2, N // 2, T)
    return jnp.einsum("BTKGS,BSKH->BTKGH", probs, v[:, :, :2]).reshape(B, T, N, H)


@read
def bonsai_keys_in_the_middle(q, k, v, valid=VALID):
    """Bonsai: softmax over the third of five axes, causal by positions."""
    q = q.reshape(B, T, 2, N // 2, H)
    logits = jnp.einsum("BTKGH,BSKH->BTSKG", q, k[:, :, :2]) * H**-0.5
    at = jnp.arange(T)
    mask = (at[None, None] <= at[None, :, None]) & valid[:, None]
    weights = jax.nn.softmax(jnp.where(mask[..., None, None], logits, -1e30), axis=2)
    return jnp.einsum("BTSKG,BSKH->BTKGH", weights, v[:, :, :2]).reshape(B, T, N, H)


@read
def gpt_oss_sinks(q, k, v, sinks=SLOPES):
    """gpt-oss: a learned logit of each head is joined to the scores."""
    s = jnp.where(tri(T), scores(q, k), -jnp.inf)
    sink = jnp.broadcast_to(sinks[None, :, None, None], (B, N, T, 1))
    weights = jax.nn.softmax(jnp.concatenate([s, sink], axis=-1), axis=-1)[..., :-1]
    return output(weights, v)


@read
def sinks_with_slopes(q, k, v, sinks=SLOPES):
    """Learned sinks beside ALiBi: the bias is of the keys alone."""
    bias = -SLOPES[:, None, None] * distance(T)
    s = jnp.where(tri(T), scores(q, k) + bias, -jnp.inf)
    sink = jnp.broadcast_to(sinks[None, :, None, None], (B, N, T, 1))
    return output(jax.nn.softmax(jnp.concatenate([s, sink], axis=-1))[..., :T], v)


@read
def sinks_of_packed_sequences(q, k, v, sinks=SLOPES, segments=PACKED):
    """Learned sinks in packed sequences."""
    same = segments[:, None, :, None] == segments[:, None, None]
    s = jnp.where(same & tri(T), scores(q, k), -1e30)
    sink = jnp.broadcast_to(sinks[None, :, None, None], (B, N, T, 1))
    return output(jax.nn.softmax(jnp.concatenate([s, sink], axis=-1))[..., :T], v)


@read
def gpt_oss_zero_sink(q, k, v):
    """A sink of 0 by padding of the scores."""
    s = jnp.pad(scores(q, k), ((0, 0), (0, 0), (0, 0), (0, 1)))
    return output(jax.nn.softmax(s)[..., :T], v)


@read
def several_sinks(q, k, v, sinks=WIDTHS[:, :3]):
    """EasyDeL: several sinks of each head."""
    q, k, v = by_head(q, k, v)
    sink = jnp.broadcast_to(sinks[None, :, None], (B, N, T, 3))
    s = jnp.concatenate([(q @ k.mT) * H**-0.5, sink], axis=-1)
    return jax.nn.softmax(s, axis=-1)[..., :T] @ v


@read
def sink_first(q, k, v, sinks=SLOPES):
    """A sink before all keys, and its weight cut off."""
    sink = jnp.tile(sinks[:, None, None], (B, 1, T, 1))
    s = jnp.concatenate([sink, scores(q, k)], axis=-1)
    return output(jax.nn.softmax(s)[..., 1:], v)


@read
def sink_in_the_sum(q, k, v, sinks=SLOPES[:, None, None]):
    """The exponential of the sink is added to the sum."""
    s = jnp.where(tri(T), scores(q, k), LARGE)
    top = jnp.maximum(jnp.max(s, axis=-1, keepdims=True), sinks)
    e = jnp.exp(s - top)
    return output(e / (jnp.sum(e, axis=-1, keepdims=True) + jnp.exp(sinks - top)), v)


@exact("neither of keys, nor causal", measured=True)
def recurrentgemma_window(q, k, v, ids=IDS):
    """recurrentgemma: a window within a segment."""
    near = (distance(T) < 4) & tri(T)
    mask = near & (ids[:, :, None] == ids[:, None, :])
    return output(jax.nn.softmax(jnp.where(mask[:, None], scores(q, k), LARGE)), v)


@read
def mesh_transformer(q, k, v):
    """mesh-transformer-jax: one example, heads before tokens, the batch by vmap."""

    def attend(q, k, v):
        bias = jnp.where(jnp.tril(jnp.ones((T, T))), 0.0, -1e10)
        logits = jnp.einsum("thd,Thd->htT", q, k) / np.sqrt(H).astype(k.dtype) + bias
        return jnp.einsum("htT,Thd->thd", jax.nn.softmax(logits), v)

    return jax.vmap(attend)(q, k, v)


@read
def trax_logsumexp(q, k, v):
    """trax: the exponential of what is left of logsumexp."""
    q, k, v = by_head(q, k, v)
    dots = jnp.matmul(q, jnp.swapaxes(k, -1, -2)) / jnp.sqrt(1.0 * H)
    dots = jnp.where(tri(T), dots, jnp.full_like(dots, -1e9))
    return jnp.exp(dots - jax.nn.logsumexp(dots, axis=-1, keepdims=True)) @ v


@exact("largest|top-k|sort")
def knn_top_scores(q, k, v):
    """memorizing transformers: the four largest scores."""
    s = scores(q, k)
    return output(jax.nn.softmax(jnp.where(s >= jax.lax.top_k(s, 4)[0][..., -1:], s, LARGE)), v)


@exact("read elsewhere")
def easylm_blocks_of_keys(q, k, v):
    """EasyLM, ring attention: a scan over keys with a running maximum."""
    blocks = [jnp.moveaxis(x.reshape(B, 3, T // 3, N, H), 1, 0) for x in (k, v)]

    def step(carry, block):
        top, total, o = carry
        s = scores(q, block[0])
        new = jnp.maximum(top, jnp.max(s, axis=-1))
        e, before = jnp.exp(s - new[..., None]), jnp.exp(top - new)
        o = o * jnp.swapaxes(before, 1, 2)[..., None] + output(e, block[1])
        return (new, total * before + jnp.sum(e, axis=-1), o), None

    start = jnp.full((B, N, T), -jnp.inf), jnp.zeros((B, N, T)), jnp.zeros_like(v)
    _, total, o = jax.lax.scan(step, start, tuple(blocks))[0]
    return o / jnp.swapaxes(total, 1, 2)[..., None]


@read
def levanter_upcast(q, k, v):
    """levanter: scores of bfloat16 in float32."""
    q, k = (x.astype(jnp.bfloat16).astype(jnp.float32) for x in (q, k))
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) * H**-0.5
    return output(jax.nn.softmax(jnp.where(tri(T), s, -1e9)), v)


@read
def penzai_named_axes(q, k, v):
    """penzai: the softmax is mapped over all other axes."""
    s = jnp.tensordot(q.transpose(0, 2, 1, 3)[0], k.transpose(0, 2, 3, 1)[0], ((2,), (1,)))
    s = jnp.einsum("bqhd,bkhd->qkhb", q, k) * H**-0.5 + 0 * jnp.sum(s)
    softmax = jax.vmap(jax.vmap(jax.vmap(jax.nn.softmax, 0, 0), 2, 2), 3, 3)
    return jnp.einsum("qkhb,bkhd->bqhd", softmax(s), v)


@read
def haiku_heads(q, k, v):
    """haiku: upper-case letters for the keys, 1e30."""
    logits = jnp.einsum("...thd,...Thd->...htT", q, k) * (1 / np.sqrt(H))
    logits = jnp.where(tri(T)[None, None], logits, -1e30)
    return jnp.einsum("...htT,...Thd->...thd", jax.nn.softmax(logits), v).reshape(B, T, -1)


@read
def alphafold_gated(q, k, v, valid=VALID):
    """AlphaFold: a bias of 1e9 (mask - 1), and a gate after the values."""
    bias = 1e9 * (valid.astype(jnp.float32) - 1.0)[:, None, None, :]
    logits = jnp.einsum("bqhc,bkhc->bhqk", q * H**-0.5, k) + bias
    o = jnp.einsum("bhqk,bkhc->bqhc", jax.nn.softmax(logits), v)
    return o * jax.nn.sigmoid(v)


@exact("a bias that is no mask|computed for all pairs", measured=True)
def alphafold_pair_bias(q, k, v, pair=SQUARE):
    """AlphaFold: a bias of each pair."""
    logits = jnp.einsum("bqhc,bkhc->bhqk", q * H**-0.5, k) + pair
    return jnp.einsum("bhqk,bkhc->bqhc", jax.nn.softmax(logits), v)


@read
def alphafold_global(q, k, v):
    """AlphaFold: the mean of the queries asks, by one head of keys."""
    q = jnp.mean(q, axis=1, keepdims=True)
    s = jnp.einsum("bqhc,bkc->bqhk", q * H**-0.5, k[:, :, 0])
    return jnp.einsum("bqhk,bkc->bqhc", jax.nn.softmax(s), v[:, :, 0])


@exact("a sum of several products")
def shaw_relative(q, k, v, table=SQUARE):
    """tensor2tensor: products of queries with vectors of relative positions."""
    vectors = jnp.asarray(table)[:, :H][np.abs(np.arange(T)[:, None] - np.arange(T)) % T]
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k) + jnp.einsum("bqhd,qkd->bhqk", q, vectors)
    return output(jax.nn.softmax(s / H**0.5), v)


@exact("computed for all pairs of a query and a key, by slice")
def transformer_xl(q, k, v, far=POSITIONS):
    """Transformer-XL, Enformer: products with positions are shifted by a reshape."""
    content = jnp.einsum("bqhd,bkhd->bhqk", q + 0.1, k)
    x = jnp.einsum("bqhd,kd->bhqk", q - 0.1, far)[..., : 2 * T - 1]
    x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (1, 0))).reshape(B, N, 2 * T, T)[:, :, 1:]
    x = x.reshape(B, N, T, 2 * T - 1)[..., :T]
    return output(jax.nn.softmax((content + x) / H**0.5), v)


@exact("a sum of several products|computed for all pairs")
def deberta(q, k, v, table=SQUARE[:, :H]):
    """DeBERTa: content to position, gathered along the keys."""
    at = np.clip(np.arange(T)[:, None] - np.arange(T) + T // 2, 0, T - 1)
    c2p = jnp.einsum("bqhd,kd->bhqk", q, table)
    c2p = jnp.take_along_axis(c2p, jnp.broadcast_to(at, c2p.shape), axis=-1)
    return output(jax.nn.softmax((jnp.einsum("bqhd,bkhd->bhqk", q, k) + c2p) / (3 * H) ** 0.5), v)


@read
def complex_rotary(q, k, v):
    """llama-jax: rotations as products of complex numbers."""
    angles = jnp.exp(1j * jnp.arange(T)[:, None] / 10 ** jnp.arange(H // 2))[:, None]

    def turned(x):
        x = x.reshape(*x.shape[:-1], -1, 2)
        y = jax.lax.complex(x[..., 0], x[..., 1]) * angles
        return jnp.stack([jnp.real(y), jnp.imag(y)], axis=-1).reshape(B, T, N, H)

    return linen.dot_product_attention(turned(q), turned(k), v, mask=tri(T)[None, None])


@exact("a bias that is no mask")
def kerple(q, k, v, rates=SLOPES):
    """KERPLE: a logarithm of distances."""
    bias = -rates[:, None, None] * jnp.log1p(rates[:, None, None] * distance(T))
    return output(jax.nn.softmax(jnp.where(tri(T), scores(q, k) + bias, LARGE)), v)


@exact("changed after the softmax|not read as attention")
def differential(q, k, v):
    """Differential transformer: the difference of two softmaxes."""
    one, two = (jax.nn.softmax(scores(*x)) for x in ((q, k), (k, q)))
    return output(one - 0.3 * two, v)


@read
def softmax_one(q, k, v):
    """ "Attention is off by one": 1 is added to the sum, without a shift."""
    e = jnp.exp(scores(q, k))
    return output(e / (1 + jnp.sum(e, axis=-1, keepdims=True)), v)


@none
def sparsemax(q, k, v):
    """sparsemax: a projection on the simplex."""
    s = scores(q, k)
    z = jnp.flip(jnp.sort(s, axis=-1), axis=-1)
    total = (jnp.cumsum(z, axis=-1) - 1) / jnp.arange(1, T + 1)
    threshold = jnp.max(jnp.where(z > total, total, -jnp.inf), axis=-1, keepdims=True)
    return output(jnp.maximum(s - threshold, 0), v)


@none
def relu_attention(q, k, v):
    """big_vision: relu by the number of keys."""
    return output(jax.nn.relu(scores(q, k)) / T, v)


@none
def retention(q, k, v):
    """RetNet: powers of a number by distance."""
    return output(scores(q, k) * jnp.where(tri(T), 0.9 ** distance(T), 0), v)


@none
def linear_transformer(q, k, v):
    """fast transformers: elu + 1."""
    q, k = (jax.nn.elu(x) + 1 for x in (q, k))
    state = jnp.einsum("bsnh,bsnv->bnhv", k, v)
    return (
        jnp.einsum("btnh,bnhv->btnv", q, state)
        / jnp.einsum("btnh,bnh->btn", q, k.sum(1))[..., None]
    )


@none
def efficient_attention(q, k, v):
    """Efficient attention: a softmax of queries and one of keys."""
    state = jnp.einsum("bsnh,bsnv->bnhv", jax.nn.softmax(k, axis=1), v)
    return jnp.einsum("btnh,bnhv->btnv", jax.nn.softmax(q), state)


@read
def nystromformer(q, k, v):
    """Nystromformer: three softmaxes with landmarks, two of which have values."""
    q, k, v = by_head(q * H**-0.25, k * H**-0.25, v)
    few_q, few_k = (x.reshape(B, N, 3, T // 3, H).mean(-2) for x in (q, k))
    middle = jnp.linalg.inv(jax.nn.softmax(few_q @ few_k.mT) + jnp.eye(3))
    return jax.nn.softmax(q @ few_k.mT) @ (middle @ (jax.nn.softmax(few_q @ k.mT) @ v))


@read
def set_transformer(q, k, v):
    """Set transformer: heads are joined to the batch, the scale is of all entries."""
    q, k, v = (jnp.concatenate([x[:, :, i] for i in range(N)], axis=0) for x in (q, k, v))
    weights = jax.nn.softmax(q @ k.transpose(0, 2, 1) / math.sqrt(N * H), axis=2)
    o = q + weights @ v
    return jnp.concatenate(jnp.split(o, N, axis=0), axis=2)


@read
def hopfield(q, k, v, beta=BETA):
    """Modern Hopfield networks: two steps of retrieval."""
    state = jnp.einsum(
        "bhqk,bkhd->bqhd", jax.nn.softmax(beta * jnp.einsum("bqhd,bkhd->bhqk", q, k)), k
    )
    return output(jax.nn.softmax(beta * jnp.einsum("bqhd,bkhd->bhqk", state, k)), v)


@exact("changed by tanh")
def pointer_network(q, k, v):
    """Attention model for routes: logits 10 tanh."""
    return output(jax.nn.softmax(10 * jnp.tanh(scores(q, k))), v)


@exact("neither of keys, nor causal", measured=True)
def graph_transformer(q, k, v, edges=RANDOM):
    """Graph transformers: edges as a mask, and 0 for rows of nan."""
    weights = jax.nn.softmax(jnp.where(edges, scores(q, k), -jnp.inf))
    return output(jnp.where(jnp.isnan(weights), 0, weights), v)


@none
def gat(q, k, v):
    """GAT: a sum of two numbers and a leaky relu."""
    left, right = q[:, :, 0] @ jnp.ones(H), k[:, :, 0] @ jnp.ones(H)
    logits = jax.nn.leaky_relu(left[:, :, None] + right[:, None])
    return jax.nn.softmax(logits) @ v[:, :, 0]


@none
def bahdanau(q, k, v):
    """Additive attention: tanh of a sum, and a learned vector."""
    pairs = jnp.tanh(q[:, :, None] + k[:, None])
    return output(jax.nn.softmax(jnp.einsum("btsnh,h->bnts", pairs, jnp.ones(H))), v)


@exact("in a loop over queries")
def luong_decoder(q, k, v):
    """Luong attention: a step of the decoder at a time."""

    def step(state, x):
        weights = jax.nn.softmax(jnp.einsum("bh,bsh->bs", state + x, k[:, :, 0]))
        context = jnp.einsum("bs,bsh->bh", weights, v[:, :, 0])
        return jnp.tanh(context + x), context

    return jax.lax.scan(step, jnp.zeros((B, H)), q[:, :, 0].swapaxes(0, 1))[1]


@none
def neural_turing_machine(q, k, v):
    """NTM: the weights read, and erase."""
    weights = jax.nn.softmax(jnp.einsum("bnh,bsnh->bns", q[:, 0], k))
    return jnp.einsum("bns,bsnh->bnh", weights, v), v * (1 - weights.swapaxes(1, 2))[..., None]


@exact("that all examples share")
def matching_network(q, k, v):
    """Matching networks: a support set with labels, shared by all queries."""
    support, labels = (
        jnp.sin(jnp.arange(9.0 * H)).reshape(9, H),
        jax.nn.one_hot(np.arange(9) % 3, 3),
    )
    q = q / jnp.linalg.norm(q, axis=-1, keepdims=True)
    return jax.nn.softmax(jnp.einsum("btnh,sh->btns", q, support)) @ labels


@read
def lipschitz_distances(q, k, v):
    """L2 attention: minus squared distances."""
    squares = [jnp.sum(x**2, axis=-1).swapaxes(1, 2) for x in (q, k)]
    d = squares[0][..., None] - 2 * jnp.einsum("bqhd,bkhd->bhqk", q, k) + squares[1][:, :, None]
    return output(jax.nn.softmax(-d / H**0.5), v)


@none
def laplace_attention(q, k, v):
    """Neural processes: minus distances in L1, without a product."""
    d = jnp.sum(jnp.abs(q[:, :, None] - k[:, None]), axis=-1)
    return output(jax.nn.softmax(jnp.moveaxis(-d, -1, 1)), v)


@exact("neither of keys, nor causal", measured=True)
def transformer_xl_memory(q, k, v):
    """GTrXL: queries are the last tokens of the keys."""
    mask = np.tri(6, T, T - 6, dtype=bool)
    return output(jax.nn.softmax(jnp.where(mask, scores(q[:, -6:], k), LARGE)), v)


@exact("inside while")
def universal_transformer(q, k, v):
    """Universal transformer: layers until a condition holds."""
    layer = lambda x: (x[0] + 1, output(jax.nn.softmax(scores(x[1], k)), v))  # noqa: E731
    return jax.lax.while_loop(lambda x: (x[0] < 3) & jnp.all(x[1] < 1e3), layer, (0, q))[1]


@read
def layers_in_a_fori_loop(q, k, v):
    """A fixed number of layers in a loop."""
    layer = lambda i, x: x + output(jax.nn.softmax(scores(x, k)), v) / (i + 1)  # noqa: E731
    return jax.lax.fori_loop(0, 2, layer, q)


@none
def mixture_of_experts(q, k, v):
    """flaxformer: a router and the outputs of experts."""
    gates = jax.nn.softmax(q[:, :, 0] @ jnp.ones((H, 3)))
    experts = jnp.einsum("bth,ehd->bted", v[:, :, 0], jnp.ones((3, H, H)))
    return jnp.einsum("bte,bted->btd", gates, experts)


@exact("read elsewhere|that all examples share|not divided by their sum")
def soft_moe(q, k, v, slots=SQUARE[:, :H]):
    """Soft mixture of experts: one product for slots and tokens."""
    logits = jnp.einsum("bth,sh->bts", q[:, :, 0], slots)
    inputs = jnp.einsum("bts,bth->bsh", jax.nn.softmax(logits, axis=1), v[:, :, 0])
    return jnp.einsum("bts,bsh->bth", jax.nn.softmax(logits, axis=2), jnp.tanh(inputs))


@exact("its values have examples or heads that its keys do not have")
def synthesizer(q, k, v, weights=SQUARE[:H]):
    """Synthesizer: a layer computes the scores."""
    s = jnp.einsum("btnh,hs->bnts", q, weights)
    return output(jax.nn.softmax(s), v)


@none
def networks_with_exponentials(q, k, v, w=SQUARE[:H, :H]):
    """elu, softplus and an exponential between layers, and norms after them."""
    y = jax.nn.elu(q[:, :, 0] @ w) @ w + jax.nn.softplus(k[:, :, 0] @ w) @ w
    y = y / jnp.linalg.norm(y, axis=-1, keepdims=True)
    mean, log = jnp.split(y @ w, 2, axis=-1)
    return (mean * jnp.exp(0.5 * log)) @ w[:4] + jnp.exp(v[:, :, 0] @ w) @ w / 3


@none
def contrastive_loss(q, k, v):
    """CLIP: cross entropy of all pairs of a batch."""
    logits = q.mean((1, 2)) @ k.mean((1, 2)).T
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(logits))) + jnp.sum(v)


@read
def memorizing_gate(q, k, v):
    """Memorizing transformers: a gate between attention to two sets of keys."""
    local = output(jax.nn.softmax(jnp.where(tri(T), scores(q, k), LARGE)), v)
    far = output(jax.nn.softmax(scores(q, k[:, :7])), v[:, :7])
    gate = jax.nn.sigmoid(jnp.linspace(-1, 1, N))[:, None]
    return gate * local + (1 - gate) * far


@read
def null_key(q, k, v, null=WIDTHS):
    """imagen, dalle2: a learned key and value before all others."""
    k, v = (jnp.concatenate([jnp.broadcast_to(null / 3, (B, 1, N, H)), x], axis=1) for x in (k, v))
    return linen.dot_product_attention(q, k, v)


@read
def null_key_and_padding(q, k, v, valid=VALID):
    """lucidrains: a null key, the mask padded with true."""
    k, v = (jnp.pad(x, ((0, 0), (1, 0), (0, 0), (0, 0))) for x in (k, v))
    mask = jnp.pad(valid, ((0, 0), (1, 0)), constant_values=True)[:, None, None]
    s = jnp.where(mask, scores(q, k), -jnp.finfo(jnp.float32).max)
    s = s - jax.lax.stop_gradient(jnp.amax(s, axis=-1, keepdims=True))
    return output(jax.nn.softmax(s), v)


@exact("neither of keys, nor causal", measured=True)
def flamingo(q, k, v, when=MEDIA):
    """Flamingo: text sees the media before it, three latents each."""
    media = jnp.repeat(jnp.arange(3), 3)
    mask = when[:, :, None] == media
    s = scores(q, k[:, :9])
    return output(jax.nn.softmax(jnp.where(mask[:, None], s, LARGE)), v[:, :9])


@exact("neither of keys, nor causal", measured=True)
def prefix_lm(q, k, v, starts=STARTS):
    """PaliGemma, big_vision: blocks by a cumulative sum."""
    block = jnp.cumsum(starts, axis=1)
    mask = block[:, None, :] <= block[:, :, None]
    return output(jax.nn.softmax(jnp.where(mask[:, None], scores(q, k), LARGE)), v)


@exact("neither of keys, nor causal", measured=True)
def octo_steps(q, k, v):
    """octo: tokens of a time step see each other and earlier steps."""
    step = np.arange(T) // 3
    return linen.dot_product_attention(q, k, v, mask=(step[:, None] >= step)[None, None])


@read
def decision_transformer(q, k, v, valid=VALID):
    """Decision transformer: padding and a triangle by broadcasting."""
    mask = valid[:, None, None, :] * jnp.tril(jnp.ones((1, 1, T, T)))
    s = scores(q, k) * 1.0
    return output(jax.nn.softmax(jnp.where(mask, s, -1e9)), v)


@read
def decode_with_a_cache(q, k, v, position=POSITION):
    """flax: one token sees the keys up to its position."""
    mask = jnp.broadcast_to(jnp.arange(T) <= position, (B, 1, 1, T))
    return linen.dot_product_attention(q[:, :1], k, v, mask=mask)


@read
def flax_module(q, k, v):
    """flax: nnx.dot_product_attention with a mask."""
    mask = nnx.make_causal_mask(q[:, :, 0, 0])
    return nnx.dot_product_attention(q, k, v, mask=mask)


@read
def jax_lengths(q, k, v, lengths=LENGTHS):
    """jax.nn: lengths of queries and keys."""
    given: Any = dict(query_seq_lengths=lengths, key_value_seq_lengths=lengths)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, **given)


@exact("neither of keys, nor causal", measured=True)
def jax_window(q, k, v):
    """jax.nn: a local window."""
    return jax.nn.dot_product_attention(q, k, v, local_window_size=2)


@read
def written_out_twice(q, k, v):
    """The exponential twice, above and below."""
    s = scores(q, k)
    return output(jnp.exp(s) / jnp.exp(s).sum(-1, keepdims=True), v)


@read
def rows_without_keys(q, k, v, valid=VALID):
    """haliax: nan of padding becomes 0."""
    mask = valid[:, None, :, None] & valid[:, None, None]
    weights = jax.nn.softmax(jnp.where(mask, scores(q, k), -jnp.inf))
    return output(jnp.nan_to_num(weights), v) * valid[..., None, None]


@read
def mask_on_the_weights(q, k, v):
    """The weights times the mask of the scores."""
    mask = tri(T)
    weights = jax.nn.softmax(jnp.where(mask, scores(q, k), -1e9))
    return output(weights * mask, v)


@read
def log_length_scale(q, k, v):
    """A scale with the logarithm of the length."""
    return output(jax.nn.softmax(scores(q, k) * jnp.log(T) / jnp.log(9.0)), v)


@read
def praxis_scale_per_entry(q, k, v, scale=WIDTHS[0]):
    """praxis: a learned scale of each entry."""
    q = q * jax.nn.softplus(scale) * 1.442695041 / math.sqrt(H)
    return output(jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k)), v)


@read
def bilinear(q, k, v, middle=WIDTHS):
    """A learned matrix between queries and keys, in one einsum."""
    s = jnp.einsum("btnh,nh,bsnh->bnts", q, middle, k) / H**0.5
    return output(jax.nn.softmax(s), v)


@read
def projected_in_one_einsum(q, k, v, w=WIDTHS):
    """haiku: values, weights and the output projection in one einsum."""
    weights = jax.nn.softmax(scores(q, k))
    return jnp.einsum("bnts,bsnh,nh->btn", weights, v, w)


@read
def dual_chunks(q, k, v):
    """RETRO: chunks of queries see their neighbours, of another length."""
    q = q.reshape(B * 2, T // 2, N, H)
    k, v = (jnp.concatenate([x[:, :5], x[:, 7:]]) for x in (k[:, :12], v[:, :12]))
    return output(jax.nn.softmax(scores(q, k)), v)


@exact("neither of keys, nor causal|several products|in blocks", measured=True)
def longt5_local(q, k, v):
    """LongT5, progen: blocks see themselves and the block before, causally."""
    q, k, v = (x.reshape(B, 3, 4, N, H) for x in (q, k, v))
    k, v = (
        jnp.concatenate([jnp.pad(x, [(0, 0), (1, 0)] + 3 * [(0, 0)])[:, :-1], x], 2) for x in (k, v)
    )
    mask = np.tri(4, 8, 4, dtype=bool) & (np.arange(8) + 4 * np.arange(3)[:, None, None] >= 4)
    s = jnp.einsum("bcqhd,bckhd->bchqk", q, k) * H**-0.5
    weights = jax.nn.softmax(jnp.where(mask[:, None], s, -1e10))
    return jnp.einsum("bchqk,bckhd->bcqhd", weights, v).reshape(B, T, N, H)


@exact("not read as attention|joined|concatenate")
def longformer_joined_scores(q, k, v):
    """Longformer: scores of two sets of keys under one softmax."""
    s = jnp.concatenate([scores(q, k[:, :3]), scores(q, k[:, 3:])], axis=-1)
    return output(jax.nn.softmax(s), v)


@read
def loop_over_heads(q, k, v):
    """A map over heads."""

    def one(head):
        q, k, v = head
        return jax.nn.softmax(q @ k.mT * H**-0.5) @ v

    return jax.lax.map(one, tuple(jnp.moveaxis(x, 2, 0) for x in (q, k, v)))


@read
def rematerialised_module(q, k, v):
    """flax: nnx.remat of a causal layer."""
    return nnx.remat(
        lambda q, k, v: output(jax.nn.softmax(jnp.where(tri(T), scores(q, k), LARGE)), v)
    )(q, k, v)


@read
def keys_transposed_before(q, k, v):
    """A cache of transposed keys (b, n, h, s), as for decoding on TPU."""
    k = k.transpose(0, 2, 3, 1)
    s = jnp.einsum("btnh,bnhs->bnts", q, k) / H**0.5
    return jnp.einsum("bnts,bsnh->bthn", jax.nn.softmax(s), v)


@read
def tokens_first(q, k, v):
    """Transformer-XL: tokens before examples."""
    q, k, v = (x.swapaxes(0, 1) for x in (q, k, v))
    s = jnp.einsum("ibnd,jbnd->bnij", q, k)
    s = jnp.where(jnp.triu(jnp.ones((T, T), bool), 1)[None, None], -1e30, s)
    return jnp.einsum("bnij,jbnd->ibnd", jax.nn.softmax(s / H**0.5, axis=3), v)


@read
def numpy_softmax(q, k, v):
    """Softmax by hand of scores minus their maximum over all axes."""
    s = scores(q, k)
    e = jnp.exp(s - s.max())
    return output(e / e.sum(axis=-1)[..., None], v)


@read
def inverse_of_the_sum(q, k, v):
    """The exponentials times the reciprocal of their sum."""
    s = scores(q, k)
    e = jnp.exp(s - jnp.max(s, -1, keepdims=True))
    return output(e * (1.0 / jnp.sum(e, -1, keepdims=True)), v)


@read
def sum_by_a_product(q, k, v):
    """The sum is the product with ones: values have a column more."""
    e = jnp.exp(scores(q, k))
    v = jnp.concatenate([v, jnp.ones((B, T, N, 1))], axis=-1)
    o = output(e, v)
    return o[..., :-1] / o[..., -1:]


@none
def elementwise_product(q, k, v):
    """Scores by a product of all pairs and a sum."""
    s = jnp.sum(q[:, :, None] * k[:, None], axis=-1) * H**-0.5
    weights = jax.nn.softmax(s, axis=2)
    return jnp.sum(weights[..., None] * v[:, None], axis=2)


PARTLY = {nystromformer}
"""Forms of READ with a softmax that stays exact: its product is inverted."""
