"""How far random-feature attention is from softmax attention on given queries and keys.

Notation: q_i and k_j after the factor sqrt(scale) each; mu_ij = exp(q_i.k_j), of which k^_ij is the
estimate from m frequencies; t queries and N keys that exist; mu_i = (1/N) sum_j mu_ij;

    A_ij = mu_ij / (N mu_i)      A^_ij = k^_ij / sum_j k^_ij      rho_i = sum_j k^_ij / (N mu_i)

E, Var and Cov are over draws of the frequencies. With delta_ij = k^_ij - mu_ij the error of one
entry is, to first order (VRC Eqs 44 and 45),

    E (A^_ij - A_ij)^2 = [Var_ij - 2 (mu_ij / mu_i) (1/N) sum_l Cov(ij, il)
                          + (mu_ij / mu_i)^2 (1/N^2) sum_lr Cov(il, ir)] / (N mu_i)^2
                       = E (delta_ij - A_ij sum_l delta_il)^2 / (N mu_i)^2

VRC Eq. 45 prints the coefficients 4 and 3 instead of 2 and 1; Eqs 46 and 8 are right: if all mu_ij
of a row are equal, the mean over j is (variance - covariance) / N^2 in the terms of
`AttentionError`.

With an exact window k^_ij = mu_ij for near pairs, in all of this.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from performer import _moments, couplings
from performer._masks import Pairs, key_mask
from performer.attention import _checks
from performer.calibration import Calibration
from performer.typing import Coupling

PerHead = Float[np.ndarray, "*b n"]


class Estimate(NamedTuple):
    """A mean over draws and its standard error, each with one entry for each head.

    Errors have heavy tails where |q + k|^2 is large; the standard error is then itself uncertain.
    """

    value: PerHead
    standard_error: PerHead


@dataclass(frozen=True, eq=False)
class AttentionError:
    """Errors of estimated attention, for each batch entry and head; float64.

    Its `str` has the means over them, and the largest.

    Attributes:
        attention: E |A^ - A|^2 / |A|^2, squared Frobenius norms.
        output: E |A^ v - A v|^2 / |A v|^2; None without values.
        row_sum: (E (rho_i - 1)^2)^(1/2), the mean taken over rows too. The rows of A^ sum to 1
            exactly; this is the relative error of the softmax denominator before it is divided out.
        variance: Var(k^_ij) / mu_i^2, the mean over i and j (VRC Eq. 8, first term).
        covariance: Cov(k^_ij, k^_il) / mu_i^2, the mean over i, j and l (VRC Eq. 8, second term);
            it is the mean of Var(rho_i), so that of an unbiased coupling it is about row_sum^2.
        predicted: `attention` to first order, from variances and covariances (VRC Eq. 45 corrected,
            with the actual mu_ij). Within 10% where row_sum was below 0.05, too large above that.
        uniform_attention: `attention` of A^ = 1/N, which needs no features at all.
        uniform_output: `output` of the same; None without values.
    """

    attention: Estimate
    output: Estimate | None
    row_sum: Estimate
    variance: Estimate
    covariance: Estimate
    predicted: Estimate
    uniform_attention: PerHead
    uniform_output: PerHead | None

    @property
    def worse_than_uniform(self) -> np.ndarray:
        """Where `attention` is above `uniform_attention`: booleans (*b, n)."""
        return self.attention.value > self.uniform_attention

    def __str__(self) -> str:
        """Means over batch entries and heads, and the largest."""

        def shown(name: str, estimate: Estimate, uniform: PerHead | None = None) -> str:
            value = estimate.value
            text = f"{name:20} {value.mean():.3g}, at most {value.max():.3g}"
            return text if uniform is None else f"{text}; uniform attention {uniform.mean():.3g}"

        lines = [shown("error of attention", self.attention, self.uniform_attention)]
        if self.output is not None:
            lines.append(shown("error of output", self.output, self.uniform_output))
        worse = self.worse_than_uniform
        return "\n".join(
            [
                *lines,
                shown("error of row sums", self.row_sum),
                f"worse than uniform   {worse.sum()} of {worse.size} heads",
            ]
        )


@dataclass(frozen=True)
class Recommendation:
    """What `recommend` found; its `str` says it in a few lines.

    Attributes:
        num_features: m, or None if no m up to the limit is enough.
        error: the mean relative attention error with these m, or with the most that were tried.
        most: the largest m that was tried.
        tolerance: what was asked for.
        uniform: the mean relative error of uniform attention.
        median, largest: of |q + k|^2 over pairs of a query and a key, scaled and calibrated.
        coupling: its name, or its repr.
    """

    num_features: int | None
    error: float
    most: int
    tolerance: float
    uniform: float
    median: float
    largest: float
    coupling: str

    def __str__(self) -> str:
        """What was found, and the numbers that explain it."""
        found = f"{self.num_features} features of {self.coupling} are enough."
        if self.num_features is None:
            found = f"No number of features up to {self.most} is enough with {self.coupling}."
        return (
            f"{found}\n"
            f"  relative attention error  {self.error:.3g} with {self.most}, at most"
            f" {self.tolerance:g} is asked for\n"
            f"  of uniform attention      {self.uniform:.3g}\n"
            f"  |q + k|^2                 median {self.median:.3g}, maximum {self.largest:.3g}\n"
            "One N(0, I) frequency estimates the kernel with the relative variance\n"
            "e^(|q + k|^2) - 1."
        )


def attention_error(
    query: Float[Array, "*b t n h"],
    key: Float[Array, "*b s k h"],
    value: Float[Array, "*b s k v"] | None = None,
    *,
    coupling: str | Coupling,
    num_features: int,
    draws: int = 32,
    calibration: Calibration | None = None,
    scale: float | None = None,
    mask: ArrayLike | None = None,
    exact_window: int = 0,
    exact_first: int = 0,
    seed: int = 0,
) -> AttentionError:
    """How far random-feature attention is from softmax attention on these queries and keys.

    Bidirectional attention with positive features, in float32 whatever is given. One batch entry,
    head and block of `BLOCK` rows at a time: the memory is a few times BLOCK x s numbers, never
    t x s, and draws x m x h for the frequencies of one head.

    Args:
        query: (..., t, n, h), with any leading axes, such as layers and batch.
        key: (..., s, k, h), n a multiple of k.
        value: (..., s, k, v), or None to leave out the errors of the output.
        coupling: a name that `performer.couplings.get` knows, or a coupling: any function
            (key, m, h) -> (m, h).
        num_features: m.
        draws: D, independent draws of the frequencies. Each key head has its own; the leading axes
            share them. Draw i, (k, m, h), is
            `couplings.draw(jax.random.fold_in(jax.random.key(seed), i), coupling, m, h, k)`.
        calibration: as for `performer_attention`.
        scale: the factor on q.k; 1 / sqrt(h) if None.
        mask: which keys exist, as in `performer_attention`.
        exact_window: near keys are exact, as there; 0 for none.
        exact_first: so are the first keys.
        seed: of the draws.

    Returns:
        Arrays (..., n).

    Raises:
        ValueError: when shapes or dtypes do not fit, for an unknown coupling or one that does not
            give (m, h), fewer than 3 draws or 1 feature, or a batch entry without keys.

    Example:
        >>> error = attention_error(query, key, value, coupling="pm-antithetic", num_features=128)
        >>> error.attention.value, error.attention.standard_error, error.worse_than_uniform
    """
    return _errors(
        query,
        key,
        value,
        coupling,
        num_features,
        num_features,
        draws,
        calibration,
        scale,
        mask,
        (exact_window, exact_first),
        seed,
    )


def recommend(
    query: Float[Array, "*b t n h"],
    key: Float[Array, "*b s k h"],
    *,
    coupling: str | Coupling,
    tolerance: float,
    limit: int = 1024,
    show: Callable[[str], Any] | None = None,
    **options: Any,
) -> Recommendation:
    """The smallest power of two of features, 2 to `limit`, with which attention is accurate enough.

    That is: the mean over all batch entries and heads of the relative attention error
    (`AttentionError.attention`) is at most `tolerance`. It is measured, from 2 upwards, with the
    noise of its draws.

    Args:
        query: (..., t, n, h).
        key: (..., s, k, h).
        coupling: as for `attention_error`.
        tolerance: above 0.
        limit: the most features to try, at least 2. One program measures all numbers of them.
        show: is given a line for each number that was tried; None prints them to a terminal.
        options: draws, calibration, scale, mask, exact_window, exact_first and seed, as for
            `attention_error`.

    Raises:
        ValueError: for a tolerance or limit that is too small, and as `attention_error`.

    Example:
        >>> print(recommend(query, key, coupling="orf-antithetic", tolerance=0.1))
    """
    show = show or _print
    if not tolerance > 0:
        raise ValueError(f"tolerance must be positive, such as 0.1, got {tolerance}")
    if limit < 2:
        raise ValueError(f"limit must be at least 2, the fewest features tried, got {limit}")
    window = options.pop("exact_window", 0), options.pop("exact_first", 0)
    given = dict(draws=32, calibration=None, scale=None, mask=None, seed=0) | options
    given["window"] = window
    most = 2 ** (limit.bit_length() - 1)
    for m in (2**i for i in range(1, limit.bit_length())):
        error = _errors(query, key, None, coupling, m, most, **given)
        mean = float(error.attention.value.mean())
        show(f"{m} features: relative attention error {mean:.3g}, {tolerance:g} is asked for")
        if mean <= tolerance:
            break
    places = (given[name] for name in ("calibration", "scale", "mask", "window"))
    tokens, *rest = _prepare(query, key, None, coupling, m, *places)
    lengths = _squared_lengths(*tokens[:2], *rest)
    return Recommendation(
        num_features=m if mean <= tolerance else None,
        error=mean,
        most=m,
        tolerance=tolerance,
        uniform=float(error.uniform_attention.mean()),
        median=float(np.median(lengths)),
        largest=float(np.max(lengths)),
        coupling=getattr(coupling, "__name__", str(coupling)),
    )


def _print(line: str) -> None:
    """Progress: on a terminal alone, beside what the program writes."""
    if sys.stderr.isatty():
        print(line, file=sys.stderr)


def _errors(
    query, key, value, coupling, num_features, most, draws, calibration, scale, mask, window, seed
) -> AttentionError:
    """`attention_error`, by a program that serves up to `most` features."""
    if draws < 3:
        raise ValueError(f"draws must be at least 3, for errors of variances, got {draws}")
    tokens, exists, calibration, scale = _prepare(
        query, key, value, coupling, num_features, calibration, scale, mask, window
    )
    lead, (t, n, h), k = query.shape[:-3], query.shape[-3:], key.shape[-2]
    # `fold` leaves det L out of the weights: attention does not see it, the kernel does.
    root = np.eye(h) if calibration.root is None else np.asarray(calibration.root, np.float64)
    log_det = np.broadcast_to(np.linalg.slogdet(root).logabsdet.astype(np.float32), k)
    rest = -num_features + -(-most // _moments.FEATURES) * _moments.FEATURES
    of_key_heads = []
    for head in range(k):
        w = _moments.drawn(coupling, num_features, most, jax.random.key(seed), head, h, draws, k)
        w = np.pad(w, ((0, 0), (0, rest), (0, 0)))
        settings = exists, calibration, log_det[head], scale
        counts = np.int32(num_features), head, window if window[0] else None
        of_key_heads.append(_moments.measure(*tokens, *settings, w, *counts))
    sums, norms = jax.tree.map(  # (b, n / k, ...) of each key head -> (..., n, ...)
        lambda *x: np.concatenate(x, 1, dtype=np.float64).reshape(*lead, n, *x[0].shape[2:]),
        *of_key_heads,
    )

    def estimate(name: str, size: np.ndarray, first: int = 0) -> Estimate:
        sample = sums[name][..., first:] / size[..., None]
        return Estimate(sample.mean(-1), sample.std(-1, ddof=1) / math.sqrt(sample.shape[-1]))

    rows = np.full((*lead, n), float(t))
    square, its_error = estimate("row_sum", rows)
    row_sum = np.sqrt(square)
    return AttentionError(
        attention=estimate("attention", norms["attention"]),
        output=None if value is None else estimate("output", norms["output"]),
        row_sum=Estimate(row_sum, its_error / np.maximum(2 * row_sum, 1e-30)),
        variance=estimate("variance", rows, 1),
        covariance=estimate("covariance", rows, 1),
        predicted=estimate("predicted", norms["attention"], 1),
        uniform_attention=norms["uniform_attention"] / norms["attention"],
        uniform_output=None if value is None else norms["uniform_output"] / norms["output"],
    )


def _squared_lengths(query, key, exists, calibration, scale) -> np.ndarray:
    """|M q + M^-1 (k - c)|^2 for pairs of up to 256 queries and 256 keys of every head."""
    lengths = []
    for head in range(key.shape[2]):
        _, queries, keys, *_ = _moments.transform(query, key, calibration, scale, head)
        for x, y, seen in zip(*map(np.asarray, (queries, keys, exists)), strict=True):
            x, y = (
                z[np.linspace(0, len(z) - 1, min(len(z), 256)).astype(int)] for z in (x, y[seen])
            )
            squares = np.sum(x**2, axis=-1)[..., None] + np.sum(y**2, axis=-1)
            lengths.append(np.ravel(squares + 2 * x @ y.T))
    return np.concatenate(lengths)


def _prepare(query, key, value, coupling, num_features, calibration, scale, mask, window):
    """Tokens with one batch axis, which keys exist (b, s), the calibration and the scale.

    Raises ValueError for what does not fit.
    """
    if num_features < 1:
        raise ValueError(f"num_features must be at least 1, got {num_features}")
    lead, h = query.shape[:-3], query.shape[-1]
    scale = h**-0.5 if scale is None else scale
    if not scale > 0:
        raise ValueError(f"scale must be positive, got {scale}")
    value = jnp.zeros((*key.shape[:-1], 0), key.dtype) if value is None else value
    if key.shape[:-3] != lead or value.shape[:-3] != lead or not query.size:
        raise ValueError(
            f"query has shape {query.shape}, key {key.shape} and value {value.shape}: their batch"
            " axes must be the same, and no axis empty"
        )
    function = couplings.get(coupling)
    frequencies = jax.eval_shape(lambda x: function(x, num_features, h), jax.random.key(0))
    if frequencies.shape != (num_features, h):
        raise ValueError(
            f"the coupling gives frequencies of shape {frequencies.shape}; expected one row for"
            f" each feature, {(num_features, h)}"
        )
    calibration = Calibration() if calibration is None else calibration
    tokens = _checks.with_one_batch_axis(_checks.Tokens(query, key, value))
    estimate = _checks.Estimate(jnp.zeros((num_features, h)), calibration=calibration, scale=scale)
    _checks.check_estimate(estimate, tokens)
    _checks.check_exact(_checks.Exact(*window), tokens, estimate, Pairs())
    exists = key_mask(mask, None, lead, tokens.key)
    exists = np.ones(tokens.key.shape[:2], bool) if exists is None else np.asarray(exists)
    empty = np.sum(~exists.any(axis=1))
    if empty:
        raise ValueError(f"{empty} batch entries have no key that exists: leave them out")
    return tokens, exists, calibration, scale
