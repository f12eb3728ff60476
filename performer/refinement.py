"""Attention transfer: parameters of an estimate of attention, moved towards softmax attention.

Kasai et al. 2021 and Zhang et al. 2024 train feature maps in this way; here frequencies move. Only
queries and keys are needed: A is softmax attention on them, A^ its estimate. Adam on minibatches
lowers, for each head, the `divergence`,

    mean over rows of sum_j A_ij log(A_ij / A^_ij)

which led to better models than the squared error. A part of the examples is held out. Each head
keeps the parameters with the lowest held-out loss, and the search stops early when no head
improves. The result is no longer unbiased.

Beside an exact window only far pairs are estimated, by
features all of whose parameters move (`Far`). Near pairs are exact in A^ and do not move them.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from performer.attention import attention_weights
from performer.attention.values import NOT_EXACT, Exact, Features
from performer.calibration import (
    Calibration,
    fit,
    fold,
    for_heads,
    log_determinant,
    pair_moments,
    transform_keys,
    transform_queries,
)
from performer.choices import positive_integer
from performer.features import FeatureMap
from performer.numerics import anywhere, finite
from performer.typing import Coupling, float32_or_wider

ADAM, RATE = optax.scale_by_adam(), 0.1
"""Optimizer, and its learning rate at the start."""
EXAMPLES = 16
"""The most in a step."""
ENTRIES = 2**21
"""The most entries of attention matrices in a step; fewer examples where they would be more.

2^24 took 1.8 times as long for a language model of 256 tokens, for an error of 0.035, not 0.038.
"""
ROUNDS, PATIENCE = 20, 4
"""Evaluations of the held-out loss, and those without progress before early stopping."""
HELD_OUT = 8
"""One example of so many is held out."""
LOST = 1e-23
"""Sums of features below this have lost terms to underflow."""
START = 0.3
"""Size of the frequencies at the start of `refine_far`, relative to those of a coupling."""

Parameters = TypeVar("Parameters")


class Sample(NamedTuple):
    """Queries and keys of one layer, and which of them exist."""

    query: Float[Array, "b t n h"]
    key: Float[Array, "b s k h"]
    queries: Bool[Array, "b t"]
    keys: Bool[Array, "b s"]
    segments: Int[Array, "b t"] | None = None
    """Number of each token's sequence if several are packed: tokens attend to their own."""

    @classmethod
    def of(cls, query: Float[Array, "b t n h"], key: Float[Array, "b s k h"]) -> "Sample":
        """Sample in which all queries and keys exist."""
        return cls(query, key, jnp.ones(query.shape[:2], bool), jnp.ones(key.shape[:2], bool))

    def pairs(self, is_causal: bool) -> Bool[Array, "b 1 t s"]:
        """Mask of the keys that each query attends to."""
        allowed = self.queries[:, None, :, None] & self.keys[:, None, None]
        if self.segments is not None:
            allowed &= (self.segments[:, :, None] == self.segments[:, None])[:, None]
        return (
            allowed & jnp.tri(*allowed.shape[-2:], dtype=bool)[None, None] if is_causal else allowed
        )

    def near(self, exact: Exact) -> Bool[Array, "#b 1 t s"]:
        """Mask of the pairs that a window makes exact, if both exist and see one another.

        As in `performer_attention` packed sequences form chunks one after another, in the order of
        their numbers, and each has its own first keys. Keys that do not exist are not counted.
        """
        query, key = (jnp.arange(x.shape[1], dtype=jnp.int32)[None] for x in self[:2])
        before = jnp.cumsum(self.keys, axis=1, dtype=jnp.int32) - self.keys.astype(jnp.int32)
        if self.segments is not None:
            same = self.segments[:, :, None] == self.segments[:, None]
            earlier = jnp.tri(same.shape[1], k=-1, dtype=bool)[None] & same & self.keys[:, None]
            before = jnp.sum(earlier, axis=-1, dtype=jnp.int32)
            order = jnp.argsort(jnp.argsort(self.segments, stable=True))
            query = key = order.astype(jnp.int32)
        return is_near(query, key, before, exact)[:, None]


def is_near(query: Any, key: Any, before: Any, exact: Exact) -> Any:
    """Mask (..., t, s) of near pairs of queries (..., t) and keys (..., s) at these positions.

    `before` is the number of keys that exist before each key, in its own sequence.
    """
    query, key = (x // jnp.maximum(exact.window, 1) for x in (query, key))
    near = abs(query[..., :, None] - key[..., None, :]) <= 1
    return (near | (before < exact.first)[..., None, :]) & (exact.window > 0)


def traced(exact: Exact) -> Exact:
    """Numbers of pairs as arrays, so that one program serves all of them."""
    return Exact(*map(jnp.int32, exact))


def softmax_attention(sample: Sample, is_causal: bool = False) -> Float[Array, "b n t s"]:
    """A in float32, or float64 if queries or keys are; rows without a query or key are 0."""
    dtype, pairs = float32_or_wider(*sample[:2]), sample.pairs(is_causal)
    query, key = (x.astype(dtype) for x in sample[:2])
    b, t, n, h = query.shape
    query = query.reshape(b, t, key.shape[2], -1, h)
    logits = jnp.einsum("btkgh,bskh->bkgts", query, key, precision="highest") / h**0.5
    logits = logits.reshape(b, n, t, -1)
    return jnp.where(pairs, jax.nn.softmax(jnp.where(pairs, logits, -jnp.inf), where=pairs), 0)


class Far(NamedTuple):
    """Features of far pairs; for each key head they estimate e^{q.k}, after the factor sqrt(scale).

        e^weight sum_j exp(w_j.q + u_j.k + bias_j) / m

    With the factor e^{-|q|^2 / 2 - |k|^2 / 2} before the sum, w = u of a coupling, bias 0 and
    weight 0 are unbiased. Learned features do better without it, for they would have to undo it.
    With a weight of -inf only the window attends.
    """

    w_query: Float[Array, "k m h"]
    """w."""
    w_key: Float[Array, "k m h"]
    """u."""
    bias: Float[Array, "k m"]
    weight: Float[Array, " k"]

    @classmethod
    def of(cls, frequencies: Float[Array, "k m h"]) -> "Far":
        """Features with the same frequencies for queries and keys."""
        zeros = jnp.zeros(frequencies.shape[:2], frequencies.dtype)
        return cls(frequencies, frequencies, zeros, zeros[:, 0])

    @property
    def weights(self) -> Float[Array, "k m"]:
        """Weights of the features, as `performer_attention` accepts them."""
        return jnp.exp(self.bias + self.weight[:, None]) / self.bias.shape[-1]

    def features(self, exact: Exact = NOT_EXACT) -> Features:
        """The features as `performer_attention` accepts them, beside these exact pairs."""
        learned = dict(weights=self.weights, query_frequencies=self.w_query, feature_map=LEARNED)
        return Features(self.w_key, exact=exact, **cast(Any, learned))


def _learned(projections: Array, half: Array) -> tuple[Array, None]:
    del half
    return projections, None


LEARNED = FeatureMap(_learned, kernel="softmax")
"""exp(w.x), the feature map of `learned_estimate`: it estimates e^{q.k} once it has learned to."""


def performer_estimate(
    features: Features, sample: Sample, is_causal: bool = False
) -> Float[Array, "b n t s"]:
    """A^ of these features."""
    options: Any = dict(mask=sample.keys[:, None, None], segment_ids=sample.segments)
    return attention_weights(*sample[:2], features, is_causal=is_causal, **options)


Fixed = tuple[Calibration | None, Exact]
"""The calibration, and the exact pairs, whose numbers may be traced: one program serves all."""


def positive_estimate(
    frequencies: Float[Array, "k m h"] | None,
    fixed: Fixed,
    sample: Sample,
    is_causal: bool = False,
) -> Float[Array, "b n t s"]:
    """A^ of positive features and exact pairs, as `performer_estimate`, in quadratic time.

    It forms the kernel matrix from exponents of features, and is several times as fast to compile
    and to differentiate for the short sequences that calibrate a model. Features may underflow
    where `performer_attention` has a stabilizer for each block of queries.
    """
    calibration, exact = fixed
    query, key = _scaled(sample, calibration)
    if frequencies is None:
        far = jnp.full((*query.shape[:3:2], query.shape[1], key.shape[1]), -jnp.inf, query.dtype)
        return _rows(far, query, key, exact, sample, is_causal)
    bias, w = None, frequencies.astype(query.dtype)
    if calibration is not None:
        _, w, bias = fold(calibration, w)
        if calibration.root is not None and bias is not None:
            bias = bias + log_determinant(calibration.root)[..., None]
    half_query, half_key = (
        jnp.sum(x**2, axis=-1).swapaxes(1, 2)[..., None] / 2 for x in (query, key)
    )
    w = jnp.broadcast_to(w, (sample.key.shape[2], *w.shape[-2:]))
    query_exponents, key_exponents = (
        _exponents(query, w) - half_query,
        _exponents(key, w) - half_key,
    )
    if bias is not None:
        bias = jnp.broadcast_to(bias, w.shape[:2])
        key_exponents += jnp.repeat(bias, key_exponents.shape[1] // len(bias), axis=0)[
            None, :, None
        ]
    return _rows(_log_kernel(query_exponents, key_exponents), query, key, exact, sample, is_causal)


def learned_estimate(
    far: Far, fixed: Fixed, sample: Sample, is_causal: bool = False
) -> Float[Array, "b n t s"]:
    """A^ of the features `LEARNED` and exact pairs, in quadratic time.

    Raises:
        ValueError: for a calibration with a tilt or a proposal.
    """
    calibration, exact = fixed
    if calibration is not None and calibration.changes_law:
        raise ValueError(
            "features of far pairs require a calibration of shift and scale: leave out its mean and"
            " root (calibration._replace(mean=None, root=None)), a distribution that frequencies"
            " are drawn from, because these are learned"
        )
    query, key = _scaled(sample, calibration)
    w_query, w_key, bias, weight = (x.astype(query.dtype) for x in far)
    bias = bias + weight[:, None]
    bias = jnp.repeat(bias, query.shape[2] // len(bias), axis=0)[None, :, None]
    kernel = _log_kernel(_exponents(query, w_query), _exponents(key, w_key) + bias)
    return _rows(kernel, query, key, exact, sample, is_causal)


def _scaled(sample: Sample, calibration: Calibration | None) -> tuple[Array, Array]:
    """Queries and keys (b, t, n, h), times sqrt(scale), moved by the shift and scale."""
    dtype = float32_or_wider(sample.query, sample.key)
    query, key = (x.astype(dtype) * x.shape[-1] ** -0.25 for x in sample[:2])
    if calibration is not None:
        query, key = transform_queries(calibration, query), transform_keys(calibration, key)
    return query, jnp.repeat(key, query.shape[2] // key.shape[2], axis=2)


def _exponents(x: Float[Array, "b t n h"], w: Float[Array, "k m h"]) -> Float[Array, "b n t m"]:
    w = jnp.repeat(w, x.shape[2] // len(w), axis=0)
    return jnp.einsum("btnh,nmh->bntm", x, w, precision="highest")


def _log_kernel(query_exponents: Array, key_exponents: Array) -> Float[Array, "b n t s"]:
    """log (sum_j e^{a_j + b_j} / m), whatever the other keys.

    The maxima over the features of each query and of each key are taken out. Pairs whose sum
    underflows all the same are computed again in logarithms, key by key.
    """
    nu, mu = (
        jax.lax.stop_gradient(finite(jnp.max(x, axis=-1, keepdims=True)))
        for x in (query_exponents, key_exponents)
    )
    features = jnp.exp(query_exponents - nu), jnp.exp(key_exponents - mu)
    sums = jnp.einsum("bntm,bnsm->bnts", *features, precision="highest")
    largest = jnp.swapaxes(mu, -1, -2)
    exists = jnp.any(key_exponents > -jnp.inf, axis=-1)[..., None, :]  # not a weight of -inf
    lost = exists & (sums < LOST)
    kernel = jnp.where(exists, jnp.log(jnp.maximum(sums, LOST)) + nu + largest, -jnp.inf)

    def again(kernel):
        @partial(jax.checkpoint, prevent_cse=False)
        def of_key(exponents):  # (b, n, m)
            return jax.nn.logsumexp(query_exponents + exponents[..., None, :], axis=-1)

        every = jax.lax.map(of_key, jnp.moveaxis(key_exponents, -2, 0))  # (s, b, n, t)
        return jnp.where(lost, jnp.moveaxis(every, 0, -1), kernel)

    kernel = jax.lax.cond(anywhere(lost), again, lambda kernel: kernel, kernel)
    return kernel - math.log(key_exponents.shape[-1])


def _rows(
    log_kernel: Float[Array, "b n t s"],
    query: Float[Array, "b t n h"],
    key: Float[Array, "b s n h"],
    exact: Exact,
    sample: Sample,
    is_causal: bool,
) -> Float[Array, "b n t s"]:
    """Rows of A^ in which exact pairs have q.k in the place of the logarithm of their kernel."""
    pairs, (b, n, t, s) = sample.pairs(is_causal), log_kernel.shape
    # The weight of a key: a sum over all queries, and the query heads of a key head.
    exists, heads = sample.keys[:, None, None], sample.key.shape[2]
    features_alone = jax.lax.stop_gradient(jnp.where(exists, log_kernel, -jnp.inf))
    weights = jnp.sum(jax.nn.softmax(features_alone, where=exists), axis=2)
    weights = jnp.sum(weights.reshape(b, heads, -1, s), axis=2)
    rank = jnp.argsort(jnp.argsort(-weights, axis=-1), axis=-1).astype(jnp.int32)
    is_heavy = jnp.repeat(rank < exact.keys, n // heads, axis=1)[:, :, None]
    is_row = (jnp.arange(t, dtype=jnp.int32) < exact.rows)[None, None, :, None]
    near = sample.near(exact) | is_heavy | is_row
    logits = jnp.einsum("btnh,bsnh->bnts", query, key, precision="highest")
    logits = jnp.where(pairs, jnp.where(near, logits, log_kernel), -jnp.inf)
    return jax.nn.softmax(logits, where=pairs)


def calibrated_far(
    frequencies: Float[Array, "k m h"],
    exact: Exact,
    sample: Sample,
    *,
    method: str = "shift+scale",
    coupling: str | Coupling | None = None,
    is_causal: bool = False,
) -> tuple[Far, Calibration]:
    """Features with these frequencies, calibrated to the far pairs.

    Args:
        frequencies: draw of a coupling.
        exact: near pairs have no part in the fit.
        sample: queries and keys.
        method: of `performer.calibration.calibrate`. A tilt or proposal becomes frequencies and
            biases of the features.
        coupling: of the frequencies, as in `performer.calibration.calibrate`. Beside a window a
            tilt is never traceless.
        is_causal: query i sees the keys up to i.

    Returns:
        The features, and their calibration of shift and scale.
    """
    far_pairs = sample.pairs(is_causal) & ~sample.near(exact)
    moments = pair_moments(*sample[:2], mask=far_pairs, num_queries=64)
    calibration = fit(moments, method, coupling, exact.mixed)
    _, w_key, log_weights = fold(calibration, frequencies)
    far = Far.of(jnp.broadcast_to(w_key, frequencies.shape))
    if log_weights is not None and calibration.root is not None:
        far = far._replace(bias=log_weights + log_determinant(calibration.root)[:, None])
    return far, calibration._replace(mean=None, root=None)


def absorbed(far: Far, calibration: Calibration) -> Far:
    """Features `LEARNED` of queries and keys as they are, from those of calibrated ones.

    With M and c of `performer.calibration`, w.(M q) + u.M^-1 (k - c) + q.c, an exponent that
    estimates q.k, is (M w + c).q + (M^-1 u).k - u.M^-1 c.
    """
    w_query, w_key, bias, weight = far
    heads = for_heads(calibration, len(w_key))
    if heads.scale is not None:
        w_query = jnp.einsum("kmx,kxy->kmy", w_query, heads.scale, precision="highest")
        w_key = jnp.einsum("kmx,kxy->kmy", w_key, heads.inverse_scale, precision="highest")
    if heads.shift is not None:
        shift = jnp.broadcast_to(heads.shift, w_key.shape[::2])[:, None]
        w_query, bias = w_query + shift, bias - jnp.sum(w_key * shift, axis=-1)
    return Far(w_query, w_key, bias, weight)


def row_squares(x: Float[Array, "b n t s"], pairs: Bool[Array, "b 1 t s"]) -> Float[Array, "b n t"]:
    """Sums of the squares of each row over the pairs that exist."""
    return jnp.sum(jnp.where(pairs, x, 0) ** 2, axis=-1)


def squared(estimate: Array, exact: Array, pairs: Bool[Array, "b 1 t s"]) -> Float[Array, " n"]:
    """|A^ - A|^2 / |A|^2 of each head; 0 without pairs."""
    error, size = (jnp.sum(row_squares(x, pairs), (0, 2)) for x in (estimate - exact, exact))
    return error / jnp.where(size > 0, size, 1)


def divergence(estimate: Array, exact: Array, pairs: Bool[Array, "b 1 t s"]) -> Float[Array, " n"]:
    """Kullback-Leibler divergence of the rows of A^ from the rows of A, their mean, of each head.

    It is 0 without pairs.
    """
    positive = pairs & (exact > 0)
    exact, estimate = (jnp.where(positive, x, 1) for x in (exact, jnp.maximum(estimate, 1e-30)))
    rows = jnp.sum(jnp.any(pairs, axis=-1), dtype=exact.dtype)
    return jnp.sum(exact * (jnp.log(exact) - jnp.log(estimate)), (0, 2, 3)) / jnp.maximum(rows, 1)


@partial(jax.jit, static_argnames=("estimate", "steps", "is_causal", "examples"))
def transfer(
    estimate: Callable[..., Float[Array, "b n t s"]],
    start: Parameters,
    fixed: Any,
    sample: Sample,
    *,
    steps: int,
    is_causal: bool = False,
    rate: float | Array = RATE,
    examples: int = EXAMPLES,
) -> Parameters:
    """Parameters with a lower divergence than `start`, on examples that they have not seen.

    Args:
        estimate: (parameters, fixed, sample, is_causal) -> A^, a function of a module: it is
            compiled once for all layers of a shape.
        start: pytree of arrays whose first axis is that of the key heads.
        fixed: pytree of arrays that stay.
        sample: of the layer, its first axis the examples; one of eight is held out.
        steps: at most; above 20, rounded up to a multiple of ceil(steps / 20).
        is_causal: query i sees the keys up to i.
        rate: learning rate of the first step; it falls as half a cosine.
        examples: of a step, at most.

    Raises:
        ValueError: for steps that are not a positive integer.

    Example:
        >>> frequencies = couplings.draw(random_key, "orf-antithetic", 8, 64, 12)
        >>> refined = transfer(
        ...     positive_estimate, frequencies, (None, Exact()), Sample.of(q, k), steps=2
        ... )
    """
    positive_integer("steps", steps)
    (training, held_out), key = parted(sample), jax.random.key(0)
    size, length = _size(training, examples), -(-steps // ROUNDS)
    rounds = -(-steps // length)
    shares = (1 + np.cos(np.pi * np.arange(rounds * length) / (rounds * length))) / 2
    rates = rate * jnp.asarray(shares.reshape(rounds, length), jnp.float32)
    mean_losses = partial(_mean_losses, estimate, divergence, is_causal, fixed, held_out, examples)

    def step(carry, xs):
        (trained, state), (key, rate) = carry, xs
        chosen = jax.random.choice(key, len(training.query), (size,), replace=False)
        batch = _chosen(training, chosen)
        losses = partial(_losses, estimate, divergence, is_causal, fixed, batch)
        gradient = jax.grad(lambda trained: jnp.sum(losses(trained)))(trained)
        updates, state = ADAM.update(gradient, state)
        trained = jax.tree.map(lambda x, y: x - rate.astype(x.dtype) * y, trained, updates)
        return (trained, state), None

    def round_(search):
        number, since, moving, best, least = search
        xs = jax.random.split(jax.random.fold_in(key, number), length), rates[number]
        moving, _ = jax.lax.scan(step, moving, xs)
        reached = mean_losses(moving[0])
        better = reached < least
        best = jax.tree.map(partial(jax.vmap(jnp.where), better), moving[0], best)
        since = jnp.where(jnp.any(better), 0, since + 1)
        return number + 1, since, moving, best, jnp.where(better, reached, least)

    def goes_on(search):
        number, since, *_ = search
        return (number < rounds) & (since < PATIENCE)

    moving: Any = start, ADAM.init(start)  # pyright: ignore (any pytree)
    search = jnp.int32(0), jnp.int32(0), moving, start, mean_losses(start)
    *_, best, _ = jax.lax.while_loop(goes_on, round_, search)
    return best


def refine_far(
    far: Far,
    calibration: Calibration | None,
    exact: Exact,
    sample: Sample,
    *,
    steps: int,
    is_causal: bool = False,
    **options: Any,
) -> Far:
    """Move the features `LEARNED` towards a lower error of attention, near pairs exact.

    A head whose squared error with them is not below the error of its near pairs alone gets the
    weight -inf: on the held-out examples no head is worse than its window.

    Args:
        far: start, with small frequencies, such as `START` times a draw.
        calibration: shift and scale, which stay.
        exact: the exact pairs.
        sample: queries and keys of the layer.
        steps: largest number of steps of Adam, rounded up as in `transfer`.
        is_causal: query i sees the keys up to i.
        options: rate and examples, as of `transfer`.

    Returns:
        Features of queries and keys as they are, without the calibration (see `absorbed`).

    Raises:
        ValueError: for a calibration with a tilt or a proposal.

    Example:
        >>> exact = Exact(window=4, first=1)
        >>> frequencies = couplings.draw(random_key, "orf-antithetic", 8, 64, 12)
        >>> far, fitted = calibrated_far(frequencies, exact, Sample.of(q, k), is_causal=True)
        >>> start = Far.of(START * far.w_key)
        >>> far = refine_far(start, fitted, exact, Sample.of(q, k), steps=2, is_causal=True)

        `performer_attention` runs the result:

        >>> output = performer_attention(q, k, v, far.features(exact), is_causal=True)
    """
    fixed = calibration, traced(exact)
    options |= dict(steps=steps, is_causal=is_causal)
    moved = transfer(learned_estimate, far, fixed, sample, **options)
    moved = at_least_near(learned_estimate, moved, fixed, sample, is_causal)
    return absorbed(moved, calibration or Calibration())


@partial(jax.jit, static_argnums=(0, 4))
def at_least_near(
    estimate: Callable[..., Float[Array, "b n t s"]],
    far: Far,
    fixed: Fixed,
    sample: Sample,
    is_causal: bool = False,
) -> Far:
    """Set the weight -inf for heads whose held-out squared error it does not raise.

    Heads keep their features where a query has no near pair: its row would have no pair at all.
    """
    _, held_out = parted(sample)
    alone = far._replace(weight=jnp.full_like(far.weight, -jnp.inf))
    errors = [
        _mean_losses(estimate, squared, is_causal, fixed, held_out, 1, each)
        for each in (far, alone)
    ]
    kept = (errors[0] < errors[1]) | jnp.isnan(errors[1]) | (fixed[1].window == 0)
    return far._replace(weight=jnp.where(kept, far.weight, -jnp.inf))


def refined(features: Features, sample: Sample, *, steps: int, is_causal: bool = False) -> Features:
    """Features with frequencies moved towards softmax attention by `transfer`.

    Calibration and exact pairs stay. All parameters of the features of far pairs move in
    `refine_far`.

    Args:
        features: positive, with frequencies for each key head (a shared draw becomes one for each).
        sample: queries and keys of the layer.
        steps: largest number of steps of Adam, rounded up as in `transfer`.
        is_causal: query i sees the keys up to i.

    Raises:
        ValueError: for other features, and steps that are not a positive integer.

    Example:
        >>> features = Features.draw(random_key, "orf-antithetic", 8, 64, 12).calibrated(q, k)
        >>> features = refined(features, Sample.of(q, k), steps=2)
    """
    w = features.frequencies
    if w is None or not features.map.exponential or features.weights is not None:
        raise ValueError(
            "refinement moves the frequencies of positive features without weights, got"
            f" feature_map={features.map}, {'no' if w is None else 'given'} frequencies and"
            f" {'no' if features.weights is None else 'given'} weights"
        )
    w = jnp.broadcast_to(w, (sample.key.shape[2], *w.shape[-2:]))
    fixed = features.calibration, traced(features.exact)
    how: Any = dict(steps=steps, is_causal=is_causal)
    return replace(features, frequencies=transfer(positive_estimate, w, fixed, sample, **how))


def _losses(estimate, loss, is_causal, fixed, sample: Sample, trained) -> Float[Array, " k"]:
    exact = softmax_attention(sample, is_causal)
    losses = loss(estimate(trained, fixed, sample, is_causal), exact, sample.pairs(is_causal))
    return jnp.mean(losses.reshape(sample.key.shape[2], -1), axis=-1)


def _mean_losses(
    estimate, loss, is_causal, fixed, sample: Sample, examples: int, trained
) -> Float[Array, " k"]:
    """The mean over batches of as many examples as a step has; the rest is left out."""
    size = _size(sample, examples)
    count = len(sample.query) // size
    batches = jax.tree.map(lambda x: x[: count * size].reshape(count, size, *x.shape[1:]), sample)
    losses = partial(_losses, estimate, loss, is_causal, fixed)
    return jnp.mean(jax.lax.map(lambda batch: losses(batch, trained), batches), axis=0)


def _size(sample: Sample, examples: int) -> int:
    """Examples in a step."""
    b, t, n, _ = sample.query.shape
    return min(b, examples, max(1, ENTRIES // (n * t * sample.key.shape[1])))


@jax.jit
def parted(sample: Sample) -> tuple[Sample, Sample]:
    """Training and held-out examples; a single example is both."""
    if len(sample.query) == 1:
        return sample, sample
    out = is_held_out(len(sample.query))
    return _chosen(sample, ~out), _chosen(sample, out)


def is_held_out(number: int) -> np.ndarray:
    """Mask of the examples that are held out, evenly spread; none of a single one."""
    return (np.arange(number) % HELD_OUT == min(number, HELD_OUT) // 2) & (number > 1)


def _chosen(sample: Sample, chosen: Array | np.ndarray) -> Sample:
    return jax.tree.map(lambda x: x[chosen], sample)
