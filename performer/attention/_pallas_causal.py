"""Causal attention in one kernel for TPU (Pallas), chunk by chunk; the notation is `_tiles`'s.

Of the keys before its chunk a query sees the state (c, s, z), which stays in the core's memory from
chunk to chunk; those of its chunk it sees in pairs, stabilised as in `_sweep`: with mu_s the
largest exponent of a key, nu_t that of a query, and y = W_q q,

    A = e^{l - mu},   B = e^{y - nu},   K = A^T B,   M_st = mu_s for s <= t, else -inf
    w_st = (K_st + TINY) e^{M_st - F_t},   p = e^{y + c - L},   output = z^T p + v w

L and F are such that all weights p.s + sum_s w of a query sum to 1. The backward pass has them, one
number a token each, and the state before each chunk, and goes over the chunks in reverse, with
[dz ds] of the state after the chunk. There, with u = z^T g and r = v^T g,

    a = p.u + sum_s w_s r_s,   dy = p (u - s a) + B * A D,   D = e^{M - F} (r - a)
    dl = A * B D^T + f (dz v + ds),   dv = dz^T f + g w^T

and [dz ds] of the state before is e^{c - c'} times that after, plus p [g; -a]^T.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from performer.attention import _pallas as blocks
from performer.attention import _tiles as tiles
from performer.attention._pallas import Out, pieces
from performer.attention._sizes import LANES, ROWS
from performer.attention._sweep import LAST, LOST, TINY
from performer.attention._tiles import Operands, Settings, dot, gathered, shared
from performer.attention.state import finite

CHUNK = LANES
"""Tokens."""


def within_chunk(x: Operands, exponents: Array):
    """y, A, B, K and M; M (k, s, t), the others for each of the n query heads."""
    n, dtype = len(x.query), x.query.dtype
    y = dot(shared(x.of_query, n), x.query)
    mu = jnp.max(exponents, axis=1, keepdims=True)
    A = shared(jnp.exp(exponents - finite(mu)), n)
    B = jnp.exp(y - jnp.max(y, axis=1, keepdims=True))
    K = dot(A.astype(dtype), B.astype(dtype), (1, 1))
    s, t = (jax.lax.broadcasted_iota(jnp.int32, (1, CHUNK, CHUNK), axis) for axis in (1, 2))
    return y, A, B, K, jnp.where(s <= t, mu.swapaxes(1, 2), -jnp.inf)


def attend(x: Operands, exponents: Array, c: Array, zs: Array):
    """The output, L and F."""
    n, dtype, width = len(x.query), x.query.dtype, x.value.shape[1]
    y, _, _, K, M = within_chunk(x, exponents)
    nu, largest = jnp.max(y, axis=1, keepdims=True), jnp.max(M, axis=1, keepdims=True)
    weights = (K + TINY) * shared(jnp.exp(M - finite(largest)), n)
    largest = shared(largest, n)
    total = jnp.sum(weights, axis=1, keepdims=True)
    lost = (total < LOST) & (largest > -jnp.inf)
    total = jnp.where(total == 0, 1.0, total)
    maximum = jnp.where(lost, LAST, nu + largest + jnp.log(total))
    past = y + shared(c, n)
    top = finite(jnp.maximum(jnp.max(past, axis=1, keepdims=True), maximum))
    weights *= jnp.exp(maximum - top) / total
    rows = dot(shared(zs, n), jnp.exp(past - top).astype(dtype))
    rows += dot(shared(tiles.with_ones(x.value), n), weights.astype(dtype))
    d = jnp.sum(rows[:, width:], axis=1, keepdims=True)
    log_d = jnp.where(d == 0, jnp.inf, jnp.log(d))
    output = rows[:, :width] * (1 / jnp.where(d == 0, 1.0, d))
    return output, top + log_d, finite(largest) - (maximum - top) + jnp.log(total) + log_d


def backward_of_chunk(x: Operands, exponents, c, z, after, dz, L, F, gradient, scale: float):
    """dq, dk, dv, dy, dl and [dz ds] of the state before; `after` and dz are of the one after."""
    (n, k), dtype, width = (len(x.query), len(x.key)), x.query.dtype, x.value.shape[1]
    y, A, B, K, M = within_chunk(x, exponents)
    p = jnp.exp(y + shared(c, n) - L)
    near = jnp.exp(shared(M, n) - F)
    w = (K + TINY) * near
    s = shared(z[:, :, width : width + 1], n)
    u = tiles.fine(shared(z[:, :, :width], n), gradient)
    r = dot(shared(x.value, n), gradient, (1, 1))
    total = jnp.sum(p * s, axis=1, keepdims=True) + jnp.sum(w, axis=1, keepdims=True)
    a = jnp.sum(p * u, axis=1, keepdims=True) + jnp.sum(w * r, axis=1, keepdims=True)
    a = a / jnp.where(total == 0, 1.0, total)
    D = (near * (r - a)).astype(dtype)
    dy = p * (u - s * a) + B * dot(A.astype(dtype), D)
    within = gathered(A * dot(B.astype(dtype), D, (2, 2)), k)
    f = jnp.exp(exponents - finite(after))
    dk, dv, dl = tiles.from_keys(x, f, dz, scale, within)
    dv += gathered(dot(gradient, w.astype(dtype), (2, 2)), k)
    dz = dz * jnp.exp(c - finite(after)) + tiles.gradient_of_state(p, gradient, a, k)
    dy = dy.astype(dtype)
    return dot(shared(x.of_query, n).swapaxes(1, 2), dy), dk, dv, dy, dl, dz


def _forward(x, output, logs, states, c, z, *, scale, lengths):
    i = pl.program_id(2)
    blocks.start(c, z, i == 0)
    x = tiles.real_keys(blocks.read(x), lengths[1], i)
    exponents = tiles.exponents_of_keys(x, scale)
    before = c[...], z[...]
    if states is not None:
        states[0][...], states[1][...] = before[0][:, :, :1], before[1]
    out, *both = attend(x, exponents, before[0], tiles.numerators(before[1], x.query.dtype))
    output[...] = out.astype(output.dtype)
    if logs is not None:
        logs[0][...], logs[1][...] = both
    _, c[...], z[...] = tiles.fold(exponents, x.value, *before)


def _backward(x, states, logs, gradient, grads, dz, *, scale, lengths):
    i = pl.num_programs(2) - 1 - pl.program_id(2)

    @pl.when(pl.program_id(2) == 0)
    def _():
        dz[...] = jnp.zeros_like(dz)

    x = tiles.real_keys(blocks.read(x), lengths[1], i)
    exponents = tiles.exponents_of_keys(x, scale)
    c, z = blocks.read(states)
    after = jnp.maximum(c, jnp.max(exponents, axis=2, keepdims=True))
    x, (L, F), gradient = tiles.real_queries(x, blocks.read(logs), gradient[...], lengths[0], i)
    dq, dk, dv, dy, dl, dz[...] = backward_of_chunk(
        x, exponents, c, z, after, dz[...], L, F, gradient, scale
    )
    blocks.write_queries(x, dq, dy, grads)
    blocks.write_keys(x, dk, dv, dl, grads)


def forward(x: Operands, settings: Settings, residuals: bool = True):
    """The output (b, n, v, t), and for the backward pass L and F and the states before chunks."""
    (b, n, _, t), (k, m, _), width = x.query.shape, x.of_key.shape, x.value.shape[2]
    chunks, state = -(-t // CHUNK), ((m, 1), (m, width + ROWS))
    logs = states = None
    if residuals:
        logs = (Out((b, n, 1, t), jnp.float32),) * 2
        states = tuple(Out((b, chunks, k, *shape), jnp.float32) for shape in state)
    outs = pieces(Out((b, n, width, t), x.value.dtype), "tokens"), pieces(logs, "tokens")
    outs = *outs, pieces(states, "states")
    scratch = (m, CHUNK), (m, width + ROWS)
    return blocks.call(_forward, settings, (t, t), (blocks.operands(x),), outs, scratch)


def backward(x: Operands, settings: Settings, wanted, logs, states, gradient) -> Operands:
    """The gradients of the operands, None for those that are not wanted."""
    t, width = x.query.shape[3], x.value.shape[2]
    ins = blocks.operands(x), pieces(states, "states"), pieces(logs, "tokens")
    ins = *ins, pieces(gradient, "tokens")
    outs = (blocks.operands(blocks.gradients(x, wanted)),)
    scratch = ((x.of_key.shape[1], width + ROWS),)
    return blocks.call(_backward, settings, (t, t), ins, outs, scratch, backwards=True)[0]
