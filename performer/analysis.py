"""Error of random-feature attention against softmax attention on given queries and keys.

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

Everything is computed from A^_ij and rho_i, each with the row's maximum taken out, so that nothing
overflows: k^_ij / (N mu_i) = A^_ij rho_i. Second moments over draws come from Helmert's residuals

    e_d = sqrt((d - 1) / d) (x_d - mean(x_1 .. x_{d-1})),      d = 2 .. D,

which are uncorrelated and have the covariance of x. The mean of their squares is exactly the sample
variance, that with D - 1: in one pass, without cancellation, and whatever the bias of a coupling.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from performer import couplings
from performer import features as maps
from performer.attention import matrix, performer_attention
from performer.attention.masks import key_mask
from performer.attention.values import NOT_EXACT, Exact, Features, Pairs
from performer.calibration import Calibration, of_head, transform_keys, transform_queries
from performer.features import FeatureMap
from performer.numerics import finite
from performer.typing import Coupling, jit_static

BLOCK = 256
"""Rows of the attention matrix that exist at a time."""
FEATURES = 64
"""Frequencies are filled up to a multiple of this, so that few programs serve all numbers."""

PerHead = Float[np.ndarray, "*b n"]


class Mean(NamedTuple):
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

    attention: Mean
    output: Mean | None
    row_sum: Mean
    variance: Mean
    covariance: Mean
    predicted: Mean
    uniform_attention: PerHead
    uniform_output: PerHead | None

    @property
    def worse_than_uniform(self) -> np.ndarray:
        """Mask (*b, n) of the heads whose `attention` is above `uniform_attention`."""
        return self.attention.value > self.uniform_attention

    def __str__(self) -> str:
        """Means over batch entries and heads, and the largest."""
        worse, lines = self.worse_than_uniform, []
        for name, estimate, uniform in (
            ("error of attention", self.attention, self.uniform_attention),
            ("error of output", self.output, self.uniform_output),
            ("error of row sums", self.row_sum, None),
        ):
            if estimate is not None:
                value = estimate.value
                line = f"{name:20} {value.mean():.3g}, at most {value.max():.3g}"
                baseline = "" if uniform is None else f"; uniform attention {uniform.mean():.3g}"
                lines.append(line + baseline)
        return "\n".join([*lines, f"worse than uniform   {worse.sum()} of {worse.size} heads"])


@dataclass(frozen=True)
class Recommendation:
    """Result of `recommend`; its `str` is a summary.

    Attributes:
        num_features: m, or None if no m up to the limit is enough.
        exact_keys: the number of exact keys with them, or None.
        error: the mean relative attention error with these, or with the most that were tried.
        most: the last m that was tried.
        tolerance: what was asked for.
        uniform: the mean relative error of uniform attention.
        median, largest: of |q + k|^2 over pairs of a query and a key, scaled and calibrated.
        coupling: its name, or its repr.
    """

    num_features: int | None
    exact_keys: int | None
    error: float
    most: int
    tolerance: float
    uniform: float
    median: float
    largest: float
    coupling: str

    def __str__(self) -> str:
        """The result, and the numbers that explain it."""
        keys = f" with {self.exact_keys} exact keys" if self.exact_keys else ""
        verdict = f"{self.num_features} features of {self.coupling}{keys} are enough."
        if self.num_features is None:
            verdict = f"No number of features up to {self.most} is enough with {self.coupling}."
        return (
            f"{verdict}\n"
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
    coupling: str | Coupling = couplings.DEFAULT,
    num_features: int,
    draws: int = 32,
    calibration: Calibration | None = None,
    feature_map: str | FeatureMap = "positive",
    scale: float | None = None,
    mask: ArrayLike | None = None,
    is_causal: bool = False,
    seed: int = 0,
    most: int | None = None,
    exact: Exact = NOT_EXACT,
) -> AttentionError:
    """Measure the error of random-feature attention on these queries and keys.

    Attention in float32 whatever is given, pair by pair (`performer.attention.matrix`). One batch
    entry, head and block of `BLOCK` rows at a time: the memory is a few times BLOCK x s numbers,
    never t x s, and draws x k x m x h for the frequencies. Rows without keys do not count.

    Args:
        query: (..., t, n, h), with any leading axes, such as layers and batch.
        key: (..., s, k, h), n a multiple of k.
        value: (..., s, k, v), or None to leave out the errors of the output.
        coupling: a name that `performer.couplings.get` knows, or a coupling: any function
            (key, m, h) -> (m, h).
        num_features: m; 0 for the pairs of an exact window alone.
        draws: D, independent draws of the frequencies. Each key head has its own; the leading axes
            share them. Draw i, (k, m, h), is
            `couplings.draw(jax.random.fold_in(jax.random.key(seed), i), coupling, m, h, k)`.
        calibration: as of `performer.Features`.
        feature_map: as there, one that estimates softmax.
        scale: the factor on q.k; 1 / sqrt(h) if None.
        mask: which keys exist, as in `performer_attention`.
        is_causal: query i sees the keys up to i; uniform attention is then the mean over these.
        seed: of the draws.
        most: number of features up to which one program serves all; `num_features` if None or
            smaller.
        exact: exact pairs, as there; keys are chosen for each draw.

    Returns:
        Arrays (..., n).

    Raises:
        ValueError: when shapes or dtypes do not fit, for an unknown coupling or one that does not
            give (m, h), fewer than 3 draws or 1 feature, or a batch entry without keys.

    Example:
        >>> error = attention_error(query, key, value, num_features=128)
        >>> error.attention.value, error.attention.standard_error, error.worse_than_uniform
    """
    if draws < 3:
        raise ValueError(f"draws must be at least 3, for errors of variances, got {draws}")
    lead, h = query.shape[:-3], query.shape[-1]
    most = max(1, num_features, most or 0)
    estimated = Features(None, calibration, feature_map=feature_map, exact=exact)
    _check((query, key, value), coupling, num_features, estimated, scale, is_causal)
    tokens, exists, fitted = _tokens(query, key, value, calibration, scale, mask)
    m, k, keys = num_features, key.shape[-2], jax.random.key(seed)
    frequencies = np.zeros((draws, k, 0, h), np.float32)
    if m:
        frequencies = np.asarray(_frequencies(couplings.get(coupling), m, most, h, k, draws, keys))
    frequencies = np.pad(frequencies, [(0, 0), (0, 0), (0, most + -most % FEATURES - m), (0, 0)])
    used = np.arange(frequencies.shape[-2]) < m
    weights = np.where(used, 1 / max(1, m), 0).astype(np.float32)
    features = Features(None, fitted, weights, feature_map=maps.get(feature_map))
    pairs = (exact if any(exact) else None), is_causal, exact.keys > 0
    sums, norms = _measure(tokens, exists, frequencies, features, *pairs)
    sums, norms = jax.tree.map(  # (b, n, ...) -> (..., n, ...)
        lambda x: np.asarray(x, np.float64).reshape(*lead, *x.shape[1:]), (sums, norms)
    )

    def estimate(name: str, size: Any, first: int = 0) -> Mean:
        sample = sums[name][..., first:] / np.asarray(size)[..., None]
        return Mean(sample.mean(-1), sample.std(-1, ddof=1) / math.sqrt(sample.shape[-1]))

    square, its_error = estimate("row_sum", norms["rows"])
    row_sum = np.sqrt(square)
    return AttentionError(
        attention=estimate("attention", norms["attention"]),
        output=None if value is None else estimate("output", norms["output"]),
        row_sum=Mean(row_sum, its_error / np.maximum(2 * row_sum, 1e-30)),
        variance=estimate("variance", norms["rows"], 1),
        covariance=estimate("covariance", norms["rows"], 1),
        predicted=estimate("predicted", norms["attention"], 1),
        uniform_attention=norms["uniform_attention"] / norms["attention"],
        uniform_output=None if value is None else norms["uniform_output"] / norms["output"],
    )


def recommend(
    query: Float[Array, "*b t n h"],
    key: Float[Array, "*b s k h"],
    *,
    coupling: str | Coupling = couplings.DEFAULT,
    tolerance: float,
    limit: int = 1024,
    exact: Exact = NOT_EXACT,
    show: Callable[[str], Any] | None = None,
    **options: Any,
) -> Recommendation:
    """The cheapest numbers of features and exact keys with which attention is accurate enough.

    That is: the mean over all batch entries and heads of the relative attention error
    (`AttentionError.attention`) is at most `tolerance`. It is measured, from the cheapest upwards,
    with the noise of its draws. Features are powers of two from 2 to `limit`.

    Args:
        query: (..., t, n, h).
        key: (..., s, k, h).
        coupling: as for `attention_error`.
        tolerance: above 0.
        limit: the most features to try, at least 2. One program measures all of them.
        exact: exact pairs; its `keys` are the most to try: none, half of them and all are tried.
        show: is given a line for each number that was tried; None prints them to a terminal.
        options: draws, calibration, feature_map, scale, mask, is_causal and seed, as for
            `attention_error`.

    Raises:
        ValueError: for a tolerance or limit that is too small, an error that is no number, and as
            `attention_error`.

    Example:
        >>> print(recommend(query, key, tolerance=0.1))
    """
    show = show or _print
    if not tolerance > 0:
        raise ValueError(f"tolerance must be positive, such as 0.1, got {tolerance}")
    if limit < 2:
        raise ValueError(f"limit must be at least 2, the fewest features tried, got {limit}")
    for m, f in by_cost([2**i for i in range(1, limit.bit_length())], exact.keys):
        how: Any = dict(coupling=coupling, num_features=m, most=limit)
        how["exact"] = exact._replace(keys=f)
        error = attention_error(query, key, **how, **options)
        mean = float(error.attention.value.mean())
        if not np.isfinite(mean):
            raise ValueError(
                f"the attention error with {m} features is {mean}: is there a NaN or an infinity in"
                " the queries and keys?"
            )
        keys = f" and {f} exact keys" if f else ""
        line = f"{m} features{keys}: relative attention error {mean:.3g}"
        show(f"{line}, {tolerance:g} is asked for")
        if mean <= tolerance:
            break
    token_options = (options.get(name) for name in ("calibration", "scale", "mask"))
    lengths = _squared_lengths(*_tokens(query, key, None, *token_options))
    return Recommendation(
        num_features=m if mean <= tolerance else None,
        exact_keys=f if mean <= tolerance else None,
        error=mean,
        most=m,
        tolerance=tolerance,
        uniform=float(error.uniform_attention.mean()),
        median=float(np.median(lengths)),
        largest=float(np.max(lengths)),
        coupling=getattr(coupling, "__name__", str(coupling)),
    )


def by_cost(features: Sequence[int], exact_keys: int) -> list[tuple[int, int]]:
    """Pairs of these m with 0, half and all of the exact keys, the cheapest first.

    By operations two exact keys cost as much as one feature.
    """
    pairs = {(m, f) for m in features for f in (0, exact_keys // 2, exact_keys)}
    return sorted(pairs, key=lambda pair: (2 * pair[0] + pair[1], pair))


def _print(line: str) -> None:
    """Progress: on a terminal alone, apart from what the program writes."""
    if sys.stderr.isatty():
        print(line, file=sys.stderr)


def _check(tokens, coupling, m, features: Features, scale, is_causal) -> None:
    """Check shapes and sizes, also by tracing the op; raises ValueError."""
    query, key, value = tokens
    if not features.map.estimates_softmax:
        raise ValueError(
            f"feature_map={features.feature_map!r} has a kernel of its own: there is no error"
            " against softmax attention; use a map that estimates it, such as 'positive'"
        )
    if m < (0 if features.exact.window else 1):
        raise ValueError(f"num_features must be at least 1 without an exact window, got {m}")
    if key.shape[:-3] != query.shape[:-3] or not query.size:
        raise ValueError(
            f"query has shape {query.shape} and key {key.shape}: their batch axes must be the same,"
            " and no axis empty"
        )
    function, h, frequencies = couplings.get(coupling), query.shape[-1], None
    if m:
        frequencies = jax.eval_shape(lambda x: function(x, m, h), jax.random.key(0))
        shape = getattr(frequencies, "shape", None)
        if shape != (m, h):
            got = f"of shape {shape}" if shape else f"as a {type(frequencies).__name__}"
            raise ValueError(
                f"the coupling gives frequencies {got}; expected an array with one row for each"
                f" feature, {(m, h)}"
            )
    features = replace(features, frequencies=frequencies)
    attend = partial(performer_attention, scale=scale, is_causal=is_causal)
    jax.eval_shape(attend, query, key, key if value is None else value, features)


def _tokens(query, key, value, calibration, scale, mask):
    """Queries and keys times sqrt(scale), and values; existing keys (b, s); the calibration.

    All in float32 and with one batch axis. Keys and values that do not exist are 0.
    """
    lead = query.shape[:-3]
    value = jnp.zeros((*key.shape[:-1], 0)) if value is None else value
    query, key, value = (
        x.reshape(math.prod(lead), *x.shape[-3:]).astype(jnp.float32) for x in (query, key, value)
    )
    exists = key_mask(mask, None, lead, key)
    exists = np.ones(key.shape[:2], bool) if exists is None else np.asarray(exists)
    empty = np.sum(~exists.any(axis=1))
    if empty:
        raise ValueError(f"{empty} batch entries have no key that exists: leave them out")
    root = (query.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
    key, value = (jnp.where(exists[..., None, None], x, 0) for x in (key, value))
    calibration = jax.tree.map(lambda x: x.astype(jnp.float32), calibration or Calibration())
    return (query * root, key * root, value), exists, calibration


def _squared_lengths(tokens, exists, calibration) -> np.ndarray:
    """|M q + M^-1 (k - c)|^2 for pairs of up to 256 queries and 256 keys of every head."""

    def some(x):
        return x[np.linspace(0, len(x) - 1, min(len(x), 256)).astype(int)]

    query, key = transform_queries(calibration, tokens[0]), transform_keys(calibration, tokens[1])
    lengths = []
    for x, y, present in zip(np.asarray(query), np.asarray(key), exists, strict=True):
        x, y = some(x), np.repeat(some(y[present]), x.shape[1] // y.shape[1], axis=1)
        squares = np.sum(x**2, axis=-1)[:, None] + np.sum(y**2, axis=-1)  # (t, s, n)
        lengths.append(np.ravel(squares + 2 * np.einsum("tnh,snh->tsn", x, y)))
    return np.concatenate(lengths)


def _frequencies(coupling: Coupling, m: int, most: int, *rest: Any) -> Float[Array, "draws k m h"]:
    """Independent draws of m frequencies for each key head.

    Where fewer frequencies are the first of more, they are cut from `most`: one program draws all.
    """
    if isinstance(coupling, couplings.Antithetic):
        half = _frequencies(coupling.coupling, m // 2, most // 2, *rest)
        return jnp.concatenate([half, -half], axis=-2)
    inner = coupling.coupling if isinstance(coupling, couplings.Padded) else coupling
    nested = isinstance(inner, couplings.Blocks | couplings.Halton)
    return _draw(coupling, most if nested else m, *rest)[..., :m, :]


@jit_static(0, 1, 2, 3, 4)
def _draw(coupling: Coupling, m: int, h: int, k: int, draws: int, key: Array) -> Array:
    keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(draws))
    return jax.vmap(lambda key: couplings.draw(key, coupling, m, h, k))(keys).astype(jnp.float32)


@partial(jax.jit, static_argnames=("is_causal", "chooses"))
def _measure(
    tokens,
    exists,
    frequencies,
    features: Features,
    exact: Exact | None,
    is_causal=False,
    chooses=False,
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Sums of squares over the matrices of each head.

    For each draw, (b, n, draws), and without draws, (b, n). One key head of one batch entry and one
    block of rows exist at a time. `features` have everything but frequencies and exact pairs; the
    numbers of these are traced, and `chooses` is True with exact keys.
    """
    with jax.default_matmul_precision("highest"):
        query, key, value = tokens
        (b, t, n, _), k = query.shape, key.shape[2]
        blocks = -(-t // BLOCK)
        size = -(-t // blocks)
        place = jnp.arange(blocks * size).reshape(blocks, size)

        def rows(x):  # (b, t, n, h) -> (b k, g blocks, size, h), with zeros at the end
            x = jnp.pad(x, ((0, 0), (0, blocks * size - t), (0, 0), (0, 0)))
            return jnp.moveaxis(x, 2, 1).reshape(b * k, -1, size, x.shape[-1])

        def keys(x):  # (b, s, k, h) -> (b k, s, h)
            return jnp.moveaxis(x, 2, 1).reshape(b * k, *x.shape[1::2])

        def head_sums(args):
            head, keys, queries = args
            calibration = of_head(features.calibration or Calibration(), head)
            places = jnp.tile(place, (n // k, 1))
            log_kernel = partial(_log_kernel, replace(features, calibration=calibration), keys)
            w, chosen = frequencies[:, head], None
            if chooses and exact is not None:
                weigh = partial(_heaviest, log_kernel, keys, exact, queries, places < t)
                chosen = jax.lax.map(weigh, w)
            block = partial(_block, log_kernel, keys, (w, chosen), exact, t, is_causal)
            return jax.lax.map(lambda x: block(*x), (queries, places))

        key_data = (*map(keys, (key, value)), jnp.repeat(exists, k, 0))
        heads = jnp.tile(jnp.arange(k), b)
        sums = jax.lax.map(head_sums, (heads, key_data, rows(query)))
    return jax.tree.map(lambda x: x.reshape(b, n, blocks, *x.shape[2:]).sum(2), sums)


def _log_kernel(
    features: Features, keys: tuple[Array, Array, Array], w: Array, query: Float[Array, "r h"]
) -> matrix.Logs:
    """log k^ (r, s) of one head, estimated by these frequencies (m, h)."""
    features = replace(features, frequencies=w)
    query, key = (x[None, :, None] for x in (query, keys[0]))
    x = matrix.moved(query, key, features, Pairs(), scale=1.0)
    return jax.tree.map(lambda y: y[0, 0], matrix.log_kernel(x, features, scale=1.0))


def _heaviest(log_kernel, keys, exact: Exact, queries, counts, w) -> Bool[Array, " s"]:
    """The exact keys of this draw, for all blocks of queries."""

    def of_block(args):
        query, counts = args
        size, sign = log_kernel(w, query)
        allowed = counts[:, None] & keys[2][None]
        return matrix.column_sums(matrix.Logs(jnp.where(allowed, size, -jnp.inf), sign))

    sums = jnp.sum(jax.lax.map(of_block, (queries, counts)), axis=0)
    return matrix.heaviest(sums[None, None], 1, exact.keys)[0, 0]


def _block(
    log_kernel, keys, draws, exact: Exact | None, t, is_causal, query, place
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Sums of squares over the rows of these queries, (r, h): those below t that have keys."""
    key, value, exists = keys
    positions = jnp.arange(len(key))
    before = jnp.cumsum(exists) - exists.astype(positions.dtype)
    allowed = jnp.broadcast_to(exists, (len(place), len(key)))
    if is_causal:
        allowed &= positions[None] <= place[:, None]
    counts = (place < t) & jnp.any(allowed, axis=-1)

    def squares(x):
        return jnp.sum(jnp.where(counts, jnp.sum(x**2, axis=-1), 0))

    logits = query @ key.T
    A, total, top = matrix.normalised(matrix.Logs(jnp.where(allowed, logits, -jnp.inf)))
    log_sum = finite(jnp.log(total)) + top
    N = jnp.maximum(jnp.sum(allowed, axis=-1, keepdims=True, dtype=A.dtype), 1)
    uniform = allowed.astype(A.dtype) / N

    def draw(mean, args):
        w, chosen, i = args
        logs = log_kernel(w, query)
        if exact is not None:
            near = matrix.is_near(place, positions, before, exact)
            near = near if chosen is None else near | chosen[None]
            logs = matrix.with_exact(logs, logits, near)
        logs = logs._replace(size=jnp.where(allowed, logs.size, -jnp.inf))
        estimate, total, top = matrix.normalised(logs)
        rho = total * jnp.exp(top - log_sum)
        change = estimate * rho - mean
        residual = jnp.sqrt(i / (i + 1)) * change
        row_errors = jnp.sum(residual, axis=-1, keepdims=True)
        return mean + change / (i + 1), {
            "attention": squares(estimate - A),
            "output": squares((estimate - A) @ value),
            "row_sum": squares(rho - 1),
            "variance": squares(jnp.sqrt(N) * residual),
            "covariance": squares(row_errors),
            "predicted": squares(residual - A * row_errors),  # VRC Eq. 45, corrected
        }

    earlier_draws = jnp.arange(len(draws[0]), dtype=jnp.float32)
    _, sums = jax.lax.scan(draw, jnp.zeros_like(A), (*draws, earlier_draws))
    return sums, {
        "attention": squares(A),
        "output": squares(A @ value),
        "uniform_attention": squares(A - uniform),
        "uniform_output": squares((A - uniform) @ value),
        "rows": jnp.sum(counts, dtype=A.dtype),
    }
