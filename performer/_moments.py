"""Sums of squares over draws of A^ - A and of its parts, for one key head.

Notation and equations are those of `performer.analysis`, which makes its estimates of these sums.
Everything is computed from A^_ij and rho_i, each with the row's maximum taken out, so that nothing
overflows: k^_ij / (N mu_i) = A^_ij rho_i. Second moments over draws come from Helmert's residuals

    e_d = sqrt((d - 1) / d) (x_d - mean(x_1 .. x_{d-1})),      d = 2 .. D,

which are uncorrelated and have the covariance of x. The mean of their squares is exactly the sample
variance, that with D - 1: in one pass, without cancellation, and whatever the bias of a coupling.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from performer import couplings
from performer.attention.state import finite
from performer.calibration import RANKS, Calibration, fold, transform_keys
from performer.typing import Coupling

BLOCK = 256
"""Rows of the attention matrix that exist at a time."""
FEATURES = 64
"""Features that exist at a time."""


def drawn(coupling, m, most, *rest) -> Float[np.ndarray, "draws m h"]:
    """Frequencies of one key head, the first of `most` where these are the same.

    So one program draws all numbers of them.
    """
    coupling = couplings.get(coupling)
    if isinstance(coupling, couplings.Antithetic):
        half = drawn(coupling.coupling, m // 2, most // 2, *rest)
        return np.concatenate([half, -half], axis=1)
    return np.asarray(_draw(coupling, most if _nested(coupling) else m, *rest))[:, :m]


def _nested(coupling: Coupling) -> bool:
    """Whether fewer frequencies are the first of more that are drawn with the same key."""
    if isinstance(coupling, couplings.Padded):
        return _nested(coupling.coupling)
    return isinstance(coupling, couplings.Blocks | couplings.Halton)


@partial(jax.jit, static_argnums=(0, 1, 4, 5, 6))
def _draw(coupling, m, key, head, h, draws, k) -> Float[Array, "draws m h"]:
    """Frequencies of one key head."""
    keys = jax.vmap(lambda i: jax.random.split(jax.random.fold_in(key, i), k)[head])
    drawn = jax.vmap(lambda x: coupling(x, m, h))(keys(jnp.arange(draws)))
    return drawn.astype(jnp.float32)


@jax.jit
def measure(
    query,
    key,
    value,
    exists,
    calibration,
    log_det,
    scale,
    frequencies,
    num_features,
    head,
    window=None,
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Sums of squares over the matrices of the g query heads of one key head.

    For each draw, (b, g, draws), and without draws, (b, g). Of the frequencies the first
    `num_features` count, which is traced: one program serves all numbers that fit.
    """
    with jax.default_matmul_precision("highest"):
        value = jnp.where(exists[..., None], value[:, :, head].astype(jnp.float32), 0)
        key = jnp.where(exists[..., None, None], key, 0)
        calibration, *moved, query, key = transform(query, key, calibration, scale, head)
        _, w, log_weights = fold(calibration, frequencies)
        log_weights = jnp.zeros(w.shape[:-1], w.dtype) if log_weights is None else log_weights
        log_weights = log_weights + log_det - jnp.log(num_features.astype(w.dtype))
        counts = jnp.arange(w.shape[-2]) < num_features
        features = w, jnp.where(counts, log_weights, -jnp.inf)
        tokens = key, moved[1], value, exists
        (b, t, g, _), blocks = query.shape, -(-query.shape[1] // BLOCK)
        size = -(-t // blocks)

        def rows(x):  # (b, t, g, ...) to (b, g blocks, size, ...), with zeros at the end
            x = jnp.pad(x, ((0, 0), (0, blocks * size - t), *[(0, 0)] * (x.ndim - 2)))
            return jnp.moveaxis(x, 2, 1).reshape(b, -1, size, *x.shape[3:])

        used = -(-num_features // FEATURES)

        def entry(args):
            tokens, rows = args
            return jax.lax.map(lambda x: _block(tokens, features, used, window, *x), rows)

        # exp(q.(k - c)) is what k^_ij estimates once keys are shifted: exp(-q.c) times the kernel.
        ones = jnp.ones((b, t, g), query.dtype)
        place = jnp.broadcast_to(jnp.arange(t)[:, None], ones.shape)
        along = 0 * ones if calibration.shift is None else query @ calibration.shift
        args = query, moved[0], along, ones, place
        sums = jax.lax.map(entry, (tokens, tuple(map(rows, args))))
    return jax.tree.map(lambda x: x.reshape(b, g, blocks, *x.shape[2:]).sum(2), sums)


@jax.jit
def transform(query, key, calibration, scale, head):
    """Of one key head: calibration, M q, M^-1 (k - c), and q (b, t, g, h), k (b, s, h)."""
    query = query.reshape(*query.shape[:2], key.shape[2], -1, query.shape[-1])
    query, key = (x[:, :, head].astype(jnp.float32) * scale**0.5 for x in (query, key))
    calibration = Calibration(
        *(
            x if x is None else (x if x.ndim == rank else x[head]).astype(jnp.float32)
            for x, rank in zip(calibration, RANKS, strict=True)
        )
    )
    moved = query if calibration.scale is None else query @ calibration.scale.T
    return calibration, moved, transform_keys(calibration, key), query, key


def _block(
    tokens, features, used, window, query, moved_query, along, counts, place
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Sums of squares over the rows of these queries, (r, h), as many times as `counts` says."""
    key, moved_key, value, exists = tokens

    def squares(x):
        return counts @ jnp.sum(x**2, axis=-1)

    logits = jnp.where(exists, query @ key.T, -jnp.inf)
    log_sum = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    A = jnp.exp(logits - log_sum)
    N = jnp.sum(exists, dtype=A.dtype)
    uniform = jnp.broadcast_to(exists.astype(A.dtype) / N, A.shape)
    half_norms = jnp.sum(moved_key**2, axis=-1, keepdims=True) / 2
    offset = (along - jnp.sum(moved_query**2, axis=-1) / 2)[:, None] - log_sum
    near = None if window is None else _near(place, jnp.arange(len(key)), *window)

    def draw(mean, features):
        w, log_weights, i = features
        top, kernel = _kernel(moved_query, moved_key, exists, half_norms, w, log_weights, used)
        if near is not None:
            exact = jnp.where(near, logits - log_sum - offset, -jnp.inf)
            new = jnp.maximum(top, jnp.max(exact, axis=-1, keepdims=True))
            kernel = jnp.where(near, jnp.exp(exact - new), kernel * jnp.exp(top - new))
            top = new
        total = jnp.sum(kernel, axis=-1, keepdims=True)  # at least 1 without a window
        estimate = kernel / total
        rho = total * jnp.exp(top + offset)
        change = estimate * rho - mean
        residual = jnp.sqrt(i / (i + 1)) * change
        of_sum = jnp.sum(residual, axis=-1, keepdims=True)
        return mean + change / (i + 1), {
            "attention": squares(estimate - A),
            "output": squares((estimate - A) @ value),
            "row_sum": squares(rho - 1),
            "variance": N * squares(residual),
            "covariance": squares(of_sum),
            "predicted": squares(residual - A * of_sum),  # VRC Eq. 45, corrected
        }

    earlier_draws = jnp.arange(len(features[0]), dtype=jnp.float32)
    _, sums = jax.lax.scan(draw, jnp.zeros_like(A), (*features, earlier_draws))
    return sums, {
        "attention": squares(A),
        "output": squares(A @ value),
        "uniform_attention": squares(A - uniform),
        "uniform_output": squares((A - uniform) @ value),
    }


def _near(query: Array, key: Array, exact_window: Array, exact_first: Array) -> Array:
    """Which pairs of these places are exact."""
    apart = query[:, None] // exact_window - key // exact_window
    return (jnp.abs(apart) <= 1) | (key < exact_first)


def _kernel(query, key, exists, half_norms, w, log_weights, used) -> tuple[Array, Array]:
    """The estimated kernel (r, s) without the maximum of each row, and that maximum (r, 1).

    In the first `used` blocks of features, by an online softmax.
    """

    def add(block, carry):
        top, kernel = carry
        rows = partial(jax.lax.dynamic_slice_in_dim, start_index=block * FEATURES)
        of_block, log_weight = (rows(x, slice_size=FEATURES) for x in (w, log_weights))
        on_keys = key @ of_block.T - half_norms + log_weight[None]
        on_keys = jnp.where(exists[:, None], on_keys, -jnp.inf)
        top_key = jnp.max(on_keys, axis=0)
        on_queries = query @ of_block.T + top_key[None]
        new = jnp.maximum(top, jnp.max(on_queries, axis=-1, keepdims=True))
        on_keys = on_keys - finite(top_key)[None]
        product = jnp.exp(on_queries - new) @ jnp.exp(on_keys).T
        return new, kernel * jnp.exp(top - new) + product

    kernel = jnp.zeros((len(query), len(key)), query.dtype)
    top = jnp.full((len(query), 1), -jnp.inf, query.dtype)
    return jax.lax.fori_loop(0, used, add, (top, kernel))
