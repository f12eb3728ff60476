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

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from performer.attention import matrix
from performer.attention.values import NOT_EXACT, Exact, Features, Pairs
from performer.calibration import (
    Calibration,
    fit,
    fold,
    for_heads,
    log_determinant,
    pair_moments,
)
from performer.choices import positive_integer
from performer.features import FeatureMap
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
    key_bias: Float[Array, "b s #k"] | None = None
    """Numbers that are added to the logits of each key."""

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
        """Mask of the pairs that a window makes exact, if both exist and see one another."""
        segments = None if self.segments is None else (self.segments, None)
        return matrix.near(exact, self.query.shape[1], self.keys, segments)


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
    if sample.key_bias is not None:
        by_head = jnp.moveaxis(sample.key_bias, 2, 1)  # (b, k, s)
        logits += jnp.repeat(by_head, n // by_head.shape[1], axis=1)[:, :, None]
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
"""exp(w.x), the feature map of `learned_features`: it estimates e^{q.k} once it has learned to."""


def estimate(
    features: Features, sample: Sample, is_causal: bool = False
) -> Float[Array, "b n t s"]:
    """A^ of these features, in quadratic time. The numbers of exact pairs may be traced."""
    segments = None if sample.segments is None else (sample.segments, None)
    pairs = Pairs(sample.key_bias, sample.keys, segments=segments, is_causal=is_causal)
    scale = sample.query.shape[-1] ** -0.5
    return matrix.attention_matrix(*sample[:2], features, pairs, scale)


Fixed = tuple[Calibration | None, Exact]
"""The calibration, and the exact pairs, whose numbers may be traced: one program serves all."""


def positive_features(frequencies: Float[Array, "k m h"] | None, fixed: Fixed) -> Features:
    """Positive features of these frequencies."""
    calibration, exact = fixed
    return Features(frequencies, calibration, exact=exact)


def learned_features(far: Far, fixed: Fixed) -> Features:
    """Features `LEARNED` for the far pairs.

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
    return replace(far.features(exact), calibration=calibration)


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


@partial(jax.jit, static_argnames=("features_of", "steps", "is_causal", "examples"))
def transfer(
    features_of: Callable[..., Features],
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
        features_of: (parameters, fixed) -> features, a function of a module: it is compiled once
            for all layers of a shape.
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
        ...     positive_features, frequencies, (None, Exact()), Sample.of(q, k), steps=2
        ... )
    """
    positive_integer("steps", steps)
    (training, held_out), key = parted(sample), jax.random.key(0)
    size, length = _size(training, examples), -(-steps // ROUNDS)
    rounds = -(-steps // length)
    shares = (1 + np.cos(np.pi * np.arange(rounds * length) / (rounds * length))) / 2
    rates = rate * jnp.asarray(shares.reshape(rounds, length), jnp.float32)
    mean_losses = partial(
        _mean_losses, features_of, divergence, is_causal, fixed, held_out, examples
    )

    def step(carry, xs):
        (trained, state), (key, rate) = carry, xs
        chosen = jax.random.choice(key, len(training.query), (size,), replace=False)
        batch = _chosen(training, chosen)
        losses = partial(_losses, features_of, divergence, is_causal, fixed, batch)
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
    moved = transfer(learned_features, far, fixed, sample, **options)
    moved = at_least_near(moved, fixed, sample, is_causal)
    return absorbed(moved, calibration or Calibration())


@partial(jax.jit, static_argnums=3)
def at_least_near(far: Far, fixed: Fixed, sample: Sample, is_causal: bool = False) -> Far:
    """Set the weight -inf for heads whose held-out squared error it does not raise.

    Heads keep their features where a query has no near pair: its row would have no pair at all.
    """
    _, held_out = parted(sample)
    pairs = held_out.pairs(is_causal)
    alone = jnp.any(pairs, axis=-1) & ~jnp.any(pairs & held_out.near(fixed[1]), axis=-1)
    window_only = far._replace(weight=jnp.full_like(far.weight, -jnp.inf))
    losses = partial(_mean_losses, learned_features, squared, is_causal, fixed, held_out, 1)
    kept = (losses(far) < losses(window_only)) | jnp.any(alone)
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
    w, others = features.frequencies, ("weights", "query_frequencies")
    given = [name for name in others if getattr(features, name) is not None]
    if w is None or not features.map.exponential or given:
        raise ValueError(
            "refinement moves the frequencies of positive features alone, got"
            f" feature_map={features.map}, {'no' if w is None else 'given'} frequencies and"
            f" {' and '.join(given) or 'no weights'}; `refine_far` moves learned features"
        )
    w = jnp.broadcast_to(w, (sample.key.shape[2], *w.shape[-2:]))
    fixed = features.calibration, traced(features.exact)
    how: Any = dict(steps=steps, is_causal=is_causal)
    return replace(features, frequencies=transfer(positive_features, w, fixed, sample, **how))


def _losses(features_of, loss, is_causal, fixed, sample: Sample, trained) -> Float[Array, " k"]:
    exact, features = softmax_attention(sample, is_causal), features_of(trained, fixed)
    losses = loss(estimate(features, sample, is_causal), exact, sample.pairs(is_causal))
    return jnp.mean(losses.reshape(sample.key.shape[2], -1), axis=-1)


def _mean_losses(
    features_of, loss, is_causal, fixed, sample: Sample, examples: int, trained
) -> Float[Array, " k"]:
    """The mean over batches of as many examples as a step has; the rest is left out."""
    size = _size(sample, examples)
    count = len(sample.query) // size
    batches = jax.tree.map(lambda x: x[: count * size].reshape(count, size, *x.shape[1:]), sample)
    losses = partial(_losses, features_of, loss, is_causal, fixed)
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
