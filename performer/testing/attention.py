"""Assertions about attention: a kernel, a sampler, a converted model of your own.

`assert_attention_matches`, `assert_causal` and `assert_streams` are deterministic: fixed inputs,
and limits derived from the rounding of the dtype, so that a correct implementation never fails.
Assertions about errors are statistical, with `testing.FALSE_ALARM_RATE` (1e-4) each.
"""

import importlib
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy import stats

from performer import analysis
from performer.attention.values import Features
from performer.calibration import Calibration
from performer.testing import couplings
from performer.testing.reference import reference_attention
from performer.typing import Coupling

AttentionFn = Callable[..., Array]
"""fn(query, key, value, frequencies, **options) -> output, shapes of `performer_attention`."""

ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Relative error of one operation."""
FAR = 100
"""Length of the new tokens in `assert_causal`, relative to the old ones."""


class Case(NamedTuple):
    """Inputs of one comparison."""

    b: int = 2
    t: int = 9
    s: int = 9
    n: int = 2
    k: int = 2
    h: int = 16
    v: int = 16
    m: int = 16
    norm: float = 0.0
    """Length of queries and keys; 0 leaves them normal."""
    dtype: str = "float32"
    masked: bool = False
    junk: float = 0.0
    """Entries of masked keys; 0 leaves them normal. Masked values are 50."""
    is_causal: bool = False
    scale: float = 0.0
    """Factor on q.k; 0 leaves the default."""
    batch_axes: int = 1
    """With 2, the b examples are (2, b / 2)."""

    def __str__(self) -> str:
        """The fields that differ from their defaults."""
        changed = {x: y for x, y in self._asdict().items() if y != Case._field_defaults[x]}
        return ", ".join(f"{x}={y}" for x, y in changed.items()) or "default sizes"

    def arrays(self) -> list[np.ndarray]:
        """Queries, keys, values, frequencies."""
        rng = np.random.default_rng(0)
        shapes = [(self.b, self.t, self.n), (self.b, self.s, self.k)]
        query, key = (rng.standard_normal((*shape, self.h)) for shape in shapes)
        value = rng.standard_normal((*shapes[1], self.v))
        frequencies = rng.standard_normal((self.m, self.h))
        if self.norm:
            query, key = (
                x * self.norm / np.linalg.norm(x, axis=-1, keepdims=True) for x in (query, key)
            )
        arrays = (*map(self.batched, (query, key, value)), frequencies)
        return [x.astype(jnp.dtype(self.dtype)) for x in arrays]

    def batched(self, x: np.ndarray) -> np.ndarray:
        """The array with the batch axes of the case."""
        return x if self.batch_axes == 1 else x.reshape(2, self.b // 2, *x.shape[1:])

    def options(self) -> dict[str, Any]:
        """Keywords: a mask with a row that has no key, `is_causal`, `scale`."""
        options: dict[str, Any] = {"is_causal": True} if self.is_causal else {}
        if self.scale:
            options["scale"] = self.scale
        if self.masked:
            mask = np.random.default_rng(1).random((self.b, 1, 1, self.s)) < 0.6
            mask[0, ..., 0], mask[-1] = True, self.b == 1
            options["mask"] = self.batched(mask)
        return options

    def without(self, skip: Collection[str]) -> "Case":
        """The case without the properties that fn does not support, by names of families."""
        changes: dict[str, dict[str, Any]] = {
            "grouped heads": dict(n=self.k),
            "cross attention": dict(s=self.t),
            "mask": dict(masked=False),
            "causal mask": dict(masked=self.masked and not self.is_causal),
            "causal": dict(is_causal=False),
            "bfloat16": dict(dtype="float32"),
            "scale": dict(scale=0.0),
            "batch axes": dict(batch_axes=1),
        }
        return self._replace(**{k: v for name in skip for k, v in changes.get(name, {}).items()})


NORMS = (1e-4, 1.0, 10.0, 1e2, 1e4)
LONG_SEQUENCE = Case(b=1, t=300, s=300, n=1, k=1, h=4, v=5, m=6)
"""Two blocks of 128 tokens and a part of a third."""
CASES: dict[str, tuple[Case, ...]] = {
    "shapes": (Case(), Case(b=1, t=33, s=33, n=3, k=3, h=4, v=5, m=6), LONG_SEQUENCE),
    "one token": (Case(b=1, t=1, s=1, n=1, k=1),),
    "cross attention": (Case(t=5), Case(s=4)),
    "grouped heads": (Case(n=4, k=2), Case(n=3, k=1)),
    "mask": (Case(masked=True), Case(masked=True, junk=50.0), Case(masked=True, b=1, s=12)),
    "causal": (
        Case(is_causal=True),
        Case(is_causal=True, t=21, s=21),
        LONG_SEQUENCE._replace(is_causal=True),
    ),
    "causal mask": (Case(is_causal=True, masked=True),),
    "norms": tuple(Case(norm=norm) for norm in NORMS),
    "causal norms": tuple(Case(norm=norm, is_causal=True) for norm in NORMS),
    "scale": (Case(scale=0.6),),
    "batch axes": (Case(b=4, batch_axes=2),),
    "bfloat16": (Case(dtype="bfloat16", t=21, s=21),),
    "float16": (Case(dtype="float16", t=21, s=21),),
}
"""Families of cases; their names are those that `skip` accepts."""
WIDE: dict[str, Any] = dict(h=24, v=20, m=40)
LONG = LONG_SEQUENCE._replace(n=2, k=2)
CROSSED = (
    Case(b=3, n=4, masked=True, junk=50.0),
    Case(b=4, batch_axes=2, is_causal=True, scale=0.6, dtype="bfloat16", **WIDE),
    Case(b=4, batch_axes=2, t=5, n=4, scale=0.6, dtype="bfloat16"),
    Case(b=3, t=5, is_causal=True, masked=True, junk=50.0, **WIDE),
    Case(b=4, batch_axes=2, s=6, is_causal=True),
    Case(b=3, s=6, n=4, masked=True, junk=50.0, scale=0.6, dtype="bfloat16", **WIDE),
    LONG._replace(b=2, batch_axes=2, masked=True, junk=50.0, dtype="bfloat16"),
    LONG._replace(n=4, is_causal=True, scale=0.6),
)
"""Each pair of properties in a row: grouped heads, causal, masked, more keys, more queries, 300
tokens, bfloat16, a scale, two batch axes, and sizes above 16 (those not with 300 tokens)."""
TRANSFORMS = ("jit", "vmap", "scan", "gradients")
STEP = 1e-6
"""Step of differences in float64."""
SLOPES = {"float32": 5e-5, "bfloat16": 0.15}
"""Largest error of a derivative, relative to the gradient or the derivative."""
GAIN = {"float16": 2e-3, "bfloat16": 8e-3}
"""Largest difference from 1 of the factor between outputs and reference, by least squares: two
roundings. The bound of one output allows more, but errors that differ in sign cancel."""

HINTS = {
    "mask": "Masked keys must leave numerator, normaliser and maximum; a row without keys is 0.",
    "causal mask": "A query that sees no key returns 0.",
    "causal": "Query i attends to the keys up to i.",
    "norms": "An epsilon, or one maximum for all features, changes the estimate of long vectors.",
    "causal norms": "One maximum for a chunk loses early queries; 'robust' keeps them.",
    "grouped heads": "Each key head serves n / k consecutive query heads.",
    "cross attention": "The numbers of queries and keys differ.",
}


def assert_attention_matches(
    fn: AttentionFn,
    *,
    skip: Collection[str] = (),
    feature_map: Any = "positive",
    tolerance: float = 4.0,
) -> None:
    """Assert that a function computes the estimate of `reference_attention`, case by case.

    The cases (`CASES`) vary one property each: shapes, grouped heads, masks with a row without keys
    and with long masked keys, causal attention, a scale, two batch axes, dtypes, norms of queries
    and keys from 1e-4 to 1e4, and lengths up to 300 tokens, for functions that compute in blocks of
    up to 128. Eight more (`CROSSED`) cross them: each pair of properties is in one of them. There
    and in the first case the gradients of queries, keys and values are compared. Then follow
    `jit`, `vmap` and `scan`. The limit of an output is `tolerance` times its first-order bound for
    the dtype. Where the bound is larger than the values (norms above 100), outputs must be finite
    and, for maps that are not negative, within the values. In narrow dtypes outputs may not be too
    large or too small by a common factor (`GAIN`).

    Args:
        fn: (query, key, value, frequencies, **options) -> output. Cases with a mask pass `mask`
            (b, 1, 1, s), causal cases `is_causal=True`, those with a scale `scale`.
        skip: families and transformations that fn does not support, names of `CASES` and
            `TRANSFORMS`. Crossed cases are compared without these properties.
        feature_map: as in the features of `reference_attention`. Skip "gradients" and norms for
            maps that may be negative: their normalisers may nearly cancel, and gradients have no
            bound.
        tolerance: factor on the bound.

    Raises:
        AssertionError: with the case, the position and the error, and what fn computes instead if
            that is a known fault.
        ValueError: for an unknown name in `skip`.

    Example:
        >>> performer.testing.assert_attention_matches(
        ...     performer.performer_attention, skip=("causal norms",)
        ... )
    """
    known = {*CASES, *TRANSFORMS}
    if unknown := set(skip) - known:
        raise ValueError(f"skip has {sorted(unknown)}; expected names of {sorted(known)}")
    for family, cases in CASES.items():
        for case in cases if family not in skip else ():
            _compare(fn, family, case, feature_map, tolerance)
    for name in ("jit", "vmap", "scan"):
        if name not in skip:
            _transformed(fn, name, feature_map, tolerance)
    for case in dict.fromkeys(case.without(skip) for case in CROSSED):
        _compare(fn, "crossed", case, feature_map, tolerance)
        if "gradients" not in skip:
            _gradients(fn, case, feature_map)


def _compare(fn: AttentionFn, family: str, case: Case, feature_map: Any, tolerance: float) -> None:
    arrays, options = case.arrays(), case.options()
    want, limit, largest = _wanted(arrays, options, case.dtype, feature_map, tolerance)
    given = list(arrays)
    if case.masked:  # what stands at masked keys must not matter
        junk = ~options["mask"][..., 0, 0, :, None, None]
        if case.junk:
            given[1] = np.where(junk, np.asarray(case.junk, arrays[1].dtype), arrays[1])
        given[2] = np.where(junk, np.asarray(50, arrays[2].dtype), arrays[2])
    traced = {name: jnp.asarray(x) for name, x in options.items() if name == "mask"}
    static = {name: x for name, x in options.items() if name != "mask"}
    run = jax.jit(lambda arrays, traced: fn(*arrays, **traced, **static))
    got = np.asarray(run([jnp.asarray(x) for x in given], traced)).astype(np.float64)
    assert got.shape == want.shape, (
        f"{family} ({case}): the output has shape {got.shape}, expected {want.shape}"
    )
    assert np.all(np.isfinite(got)), (
        f"{family} ({case}): {np.sum(~np.isfinite(got))} outputs are not finite."
        f" {HINTS.get(family, '')}"
    )
    error, unsure = np.abs(got - want).max(axis=-1), limit > largest
    if feature_map in ("positive", "hyperbolic"):  # rows of A^ are weights: outputs are means
        outside = np.where(unsure, np.abs(got).max(axis=-1) - 1.01 * largest, -1)
        _fail_above(family, case, outside, np.zeros_like(outside), got, want, "")
    where = np.where(unsure, 0, error)

    def hint():
        known = _diagnosis(arrays, given, options, got, limit, feature_map)
        return known or HINTS.get(family, "")

    _fail_above(family, case, where, limit, got, want, hint)
    if case.dtype in GAIN:
        sure = want * ~unsure[..., None]
        gain = np.vdot(got, sure) / np.vdot(want, sure) if np.any(sure) else 1.0
        assert abs(gain - 1) <= GAIN[case.dtype], (
            f"{family} ({case}): outputs are {gain:.4g} times the reference, by least squares."
            f" {hint()}".rstrip()
        )


def _wanted(arrays, options, dtype: str, feature_map: Any, tolerance: float):
    """Reference, limit of its error (b, t, n), and the largest value."""
    query, key, value, w = arrays
    features = Features(w, feature_map=feature_map)
    want, bound = reference_attention(query, key, value, features, **options, with_bound=True)
    largest = float(np.abs(arrays[2].astype(np.float64)).max(initial=0))
    limit = tolerance * ROUNDOFF[dtype] * (bound + 2 * np.abs(want).max(axis=-1, initial=0))
    return want, limit + 1e-30, largest


def _fail_above(family, case, error, limit, got, want, hint) -> None:
    """Raise AssertionError for the worst position, if its error is above the limit."""
    worst = np.unravel_index(np.argmax(error / np.maximum(limit, 1e-30)), error.shape)
    if error[worst] <= limit[worst]:
        return
    *batch, position, head = worst
    batch = ", ".join(map(str, batch))
    shown = [np.array2string(x[worst][:4], precision=5) for x in (got, want)]
    hint = hint() if callable(hint) else hint
    raise AssertionError(
        f"{family} ({case}): batch entry {batch}, query {position}, head {head}: the output begins"
        f" {shown[0]}, the reference {shown[1]}; the error {error[worst]:.3g} is"
        f" {error[worst] / max(limit[worst], 1e-30):.3g} times its limit. {hint}".rstrip()
    )


def _diagnosis(arrays, given, options, got, limit, feature_map) -> str:
    """Name what the function computes instead, if it is a known fault."""
    query, key, value, frequencies = arrays

    def attend(query, key, value, frequencies, **options):
        features = Features(frequencies, feature_map=feature_map)
        return reference_attention(query, key, value, features, **options)

    suspects: dict[str, Callable[[], np.ndarray]] = {
        "attention without the factor 1 / sqrt(head_dim)": lambda: attend(
            *arrays, **options | {"scale": 1.0}
        ),
        "the estimate with one maximum for all features and an epsilon of 1e-6": lambda: attend(
            *arrays, **options, with_epsilon=True
        ),
    }
    if options.get("is_causal"):
        without = options | {"is_causal": False}
        suspects["attention that sees later keys"] = lambda: attend(*arrays, **without)
    if "mask" in options:
        unmasked = {name: x for name, x in options.items() if name != "mask"}
        exists = options["mask"][..., 0, 0, :, None, None]
        kept = np.where(exists, given[2].astype(np.float64), 0)
        suspects |= {
            "attention without the mask": lambda: attend(*given, **unmasked),
            "attention whose values are masked and whose keys are not: they stay in the"
            " normaliser": lambda: attend(query, given[1], kept, frequencies, **unmasked),
        }
    if query.shape[-2] != key.shape[-2]:
        groups = query.shape[-2] // key.shape[-2]
        tiled = [np.concatenate([x] * groups, axis=-2) for x in (key, value)]
        suspects["attention whose query heads take the key heads in turn"] = lambda: attend(
            query, tiled[0], tiled[1], frequencies, **options
        )
    want = attend(query, key, value, frequencies, **options)
    for name, compute in suspects.items():
        with np.errstate(all="ignore"):
            suspect = compute()
            near, same = (np.abs(x - suspect).max(axis=-1) <= 100 * limit for x in (got, want))
        if np.all(near) and not np.all(same):
            return f"This is {name}."
    if np.abs(got - want).max() < 0.05 * np.abs(want).max():
        return (
            "Errors as small as this come from an epsilon that is added to features or normaliser,"
            " or from products in low precision."
        )
    return ""


def _transformed(fn: AttentionFn, name: str, feature_map: Any, tolerance: float) -> None:
    """Compare a transformation of fn with the reference."""
    case = Case(t=11, s=11)
    arrays = case.arrays()
    query, key, value, frequencies = (jnp.asarray(x) for x in arrays)
    both = jnp.stack([query, 2 * query])
    if name == "jit":
        got = [jax.jit(fn)(x, key, value, frequencies) for x in both]
    elif name == "vmap":
        got = jax.vmap(fn, in_axes=(0, None, None, None))(both, key, value, frequencies)
    else:
        step = lambda carry, x: (carry, fn(x, key, value, frequencies))  # noqa: E731
        _, got = jax.lax.scan(step, None, both)
    for i, x in enumerate(both):
        given = [np.asarray(x), *arrays[1:]]
        want, limit, _ = _wanted(given, {}, case.dtype, feature_map, tolerance)
        mine = np.asarray(got[i]).astype(np.float64)
        _fail_above(name, case, np.abs(mine - want).max(axis=-1), limit, mine, want, "")


def _gradients(fn: AttentionFn, case: Case, feature_map: Any) -> None:
    """Gradients of queries, keys and values along two directions, against differences."""
    (*tokens, frequencies), options = case.arrays(), case.options()
    given = {name: jnp.asarray(x) if name == "mask" else x for name, x in options.items()}
    rng = np.random.default_rng(3)
    weight = case.batched(rng.standard_normal((case.b, case.t, case.n, case.v)))

    def loss(*tokens):
        output = fn(*tokens, jnp.asarray(frequencies), **given)
        return jnp.sum(jnp.sin(output) * jnp.asarray(weight, output.dtype))

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*map(jnp.asarray, tokens))
    wide = [x.astype(np.float64) for x in tokens]

    def reference_loss(query, key, value):
        features = Features(frequencies, feature_map=feature_map)
        output = reference_attention(query, key, value, features, **options)
        return np.sum(np.sin(output) * weight)

    for i, name in enumerate(("query", "key", "value")):
        gradient = np.asarray(gradients[i], np.float64)
        assert np.all(np.isfinite(gradient)), (
            f"gradients ({case}): the gradient of the {name} is not finite"
        )
        for along in rng.standard_normal((2, *gradient.shape)):
            ends = [
                reference_loss(*(x + sign * along if i == j else x for j, x in enumerate(wide)))
                for sign in (STEP, -STEP)
            ]
            slope, got = (ends[0] - ends[1]) / (2 * STEP), np.vdot(gradient, along)
            size = max(np.linalg.norm(gradient), abs(slope))
            assert abs(got - slope) <= SLOPES[case.dtype] * size, (
                f"gradients ({case}): the derivative along a direction of the {name} is {got:.6g},"
                f" the reference has {slope:.6g}"
            )


# Causality and streams


def assert_causal(
    fn: Callable[..., Array], *arrays: Array, tolerance: float = 0.0, axis: int = 1
) -> None:
    """Assert that later tokens change no earlier output.

    Args:
        fn: function of queries, keys, values, and whatever follows; it returns one output for each
            token.
        arrays: arguments of fn; the first three are changed, 100 times as large. Random ones for
            `performer_attention`, of 23 and of 300 tokens, if none are given.
        tolerance: largest change of an earlier output, relative to the largest output; 0 requires
            equal bits.
        axis: axis of the tokens.

    Raises:
        AssertionError: with the positions and the change, or if later outputs do not change.
        ValueError: for fewer than two tokens.

    Example:
        >>> attend = partial(performer_attention, is_causal=True)
        >>> performer.testing.assert_causal(attend)
    """
    cases = [Case(t=23, s=23, h=8).arrays(), LONG_SEQUENCE.arrays()]
    for given in [arrays] if arrays else cases:
        _no_leak(fn, tuple(map(jnp.asarray, given)), tolerance, axis)


def _no_leak(
    fn: Callable[..., Array], arrays: tuple[Array, ...], tolerance: float, axis: int
) -> None:
    """Change all tokens from a cut on, for several cuts."""
    tokens, rest = arrays[:3], arrays[3:]
    run, length = jax.jit(fn), tokens[0].shape[axis]
    if length < 2:
        raise ValueError(f"axis {axis} has {length} tokens: give two or more, or another axis")
    before = np.asarray(run(*tokens, *rest), np.float64)
    largest = np.abs(before).max()
    ends_of_blocks = range(64, length, 64)
    cuts = {1, 2, length // 3, length // 2, length - 1, *ends_of_blocks}
    for cut in sorted(cuts & set(range(1, length))):
        shape = [1] * tokens[0].ndim
        shape[axis] = length
        later = (jnp.arange(length) >= cut).reshape(shape)
        changed = [jnp.where(later, -FAR * x + x.dtype.type(7), x) for x in tokens]
        after = np.asarray(run(*changed, *rest), np.float64)
        earlier = [np.take(x, np.arange(cut), axis) for x in (before, after)]
        change = np.abs(earlier[0] - earlier[1])
        bad = ~(change <= tolerance * largest)
        if np.any(bad):
            first = np.argwhere(bad)[0][axis]
            raise AssertionError(
                f"tokens from {cut} on change the output of token {first} by"
                f" {np.nanmax(np.where(bad, change, 0)):.3g} (largest output {largest:.3g}): it"
                " must depend on tokens up to its own alone"
            )
        rows = [np.take(x, np.arange(cut, length), axis) for x in (before, after)]
        assert np.any(rows[0] != rows[1]), "the output does not depend on the tokens"


def assert_streams(
    fn: AttentionFn,
    step_fn: Callable[..., tuple[Array, Any]],
    *,
    pieces: Sequence[int] = (1, 1, 5, 2, 14),
    tolerance: float = 1e-5,
) -> None:
    """Assert that a sequence in pieces, with a state from one to the next, is the whole.

    Args:
        fn: (query, key, value, frequencies) -> output of causal attention.
        step_fn: (state, query, key, value, frequencies) -> (output, state) of one piece; the state
            before the first is None.
        pieces: lengths of the pieces.
        tolerance: largest error, relative to the largest output.

    Raises:
        AssertionError: with the piece and the error.

    Example:
        >>> causal = partial(performer_attention, is_causal=True)
        >>> performer.testing.assert_streams(
        ...     causal,
        ...     lambda state, *tokens: performer.attention.stream(*tokens, state),
        ... )
    """
    length = sum(pieces)
    *tokens, frequencies = map(jnp.asarray, Case(t=length, s=length, h=8).arrays())
    want = np.asarray(fn(*tokens, frequencies), np.float64)
    state, start = None, 0
    for number, piece in enumerate(pieces):
        part = [x[:, start : start + piece] for x in tokens]
        output, state = step_fn(state, *part, frequencies)
        error = np.abs(np.asarray(output, np.float64) - want[:, start : start + piece]).max()
        assert error <= tolerance * np.abs(want).max(), (
            f"piece {number} (tokens {start} to {start + piece - 1}) is away from the whole by"
            f" {error:.3g}, of outputs up to {np.abs(want).max():.3g}"
        )
        start += piece


# Errors of estimates


def _mean_error(query, key, coupling, num_features, draws, seed, **options) -> tuple[float, float]:
    """Attention error, the mean over batch entries and heads, and its standard error at most."""
    error = analysis.attention_error(
        *(query, key),
        coupling=coupling,
        num_features=num_features,
        draws=draws,
        seed=seed,
        **options,
    ).attention
    is_random = np.any(error.standard_error > 1e-6 * error.value - 1e-12)  # 0: all keys are exact
    assert is_random or not num_features, (
        f"the attention error of {coupling} is the same for {draws} keys: its frequencies must"
        " depend on the key"
    )
    # Heads share their draws: the standard error of the mean is at most the mean one.
    return float(error.value.mean()), float(error.standard_error.mean())


def assert_attention_error(
    query: Float[Array, "*b t n h"],
    key: Float[Array, "*b s k h"],
    coupling: str | Coupling,
    num_features: int,
    *,
    at_most: float,
    calibration: Calibration | None = None,
    draws: int = 100,
    seed: int = 0,
    **options: Any,
) -> None:
    """Assert that the attention error on your queries and keys is at most a number.

    The error is |A^ - A|^2 / |A|^2, the mean over batch entries, heads and draws
    (`analysis.attention_error`). An error of exactly `at_most` fails with the probability
    `FALSE_ALARM_RATE` at most; one that is larger by two thresholds (some 8 standard errors of the
    mean over draws) is found almost surely.

    Args:
        query: (..., t, n, h).
        key: (..., s, k, h).
        coupling: a name, or (key, m, d) -> (m, d).
        num_features: m.
        at_most: largest error.
        calibration: of the queries and keys.
        draws: number of draws.
        seed: of the draws.
        options: keywords of `analysis.attention_error`, such as `is_causal` and `exact`.

    Raises:
        AssertionError: with the error, its standard error and the error of uniform attention.

    Example:
        >>> performer.testing.assert_attention_error(
        ...     query, key, "pm-antithetic", 128, at_most=0.5, draws=8
        ... )
    """
    options = dict(calibration=calibration, draws=draws, seed=seed) | options
    value, standard_error = _mean_error(query, key, coupling, num_features, **options)
    threshold = stats.norm.isf(couplings.FALSE_ALARM_RATE)
    assert value - at_most <= threshold * standard_error, (
        f"the attention error of {coupling} with {num_features} features is {value:.4g} +-"
        f" {standard_error:.2g}, above {at_most:g} by"
        f" {(value - at_most) / standard_error:.1f} standard errors"
    )


def assert_lower_attention_error(
    coupling: str | Coupling,
    other: str | Coupling,
    query: Float[Array, "*b t n h"],
    key: Float[Array, "*b s k h"],
    num_features: int,
    *,
    draws: int = 400,
    seed: int = 0,
    **options: Any,
) -> None:
    """Assert that a coupling has a lower attention error than another on your queries and keys.

    The two have independent draws. Equal couplings pass with the probability `FALSE_ALARM_RATE`.

    Args:
        coupling: the one with the lower error.
        other: the one that it is compared with.
        query: (..., t, n, h).
        key: (..., s, k, h).
        num_features: m of both.
        draws: number of draws of each.
        seed: of the draws.
        options: keywords of `analysis.attention_error`.

    Raises:
        AssertionError: with both errors, and by how many standard errors they are apart.

    Example:
        >>> performer.testing.assert_lower_attention_error(
        ...     "pm-antithetic", "iid", query / 4, key / 4, 16, draws=20
        ... )
    """
    mine = _mean_error(query, key, coupling, num_features, draws, 2 * seed, **options)
    theirs = _mean_error(query, key, other, num_features, draws, 2 * seed + 1, **options)
    apart = (theirs[0] - mine[0]) / np.hypot(mine[1], theirs[1])
    assert apart > stats.norm.isf(couplings.FALSE_ALARM_RATE), (
        f"the attention error of {coupling} with {num_features} features is {mine[0]:.4g} +-"
        f" {mine[1]:.2g}, not lower than {theirs[0]:.4g} +- {theirs[1]:.2g} of {other}:"
        f" {apart:.1f} standard errors apart"
    )


def assert_attention_consistent(
    coupling: str | Coupling,
    *,
    head_dim: int = 8,
    num_features: Sequence[int] = (64, 512, 4096),
    draws: int = 200,
    seed: int = 0,
) -> None:
    """Assert that the attention error of a coupling falls as 1 / m.

    Queries and keys are normal, of mean square length 1/4 after scaling, where the error is of
    first order. The slope of log error against log m must not be above -0.95 by more than its
    interval at `FALSE_ALARM_RATE`. A bias of the kernel makes the error fall to a floor. Fixed
    lengths, whose floor is about the error at m = 4,096, have the slope -0.84 +- 0.04 by default;
    built-in couplings have -1.02 to -0.99.

    Args:
        coupling: a name, or (key, m, d) -> (m, d).
        head_dim: d.
        num_features: increasing m, multiples of d, so that all have whole blocks.
        draws: number of draws for each m.
        seed: of the draws.

    Raises:
        AssertionError: with the slope, its interval and the errors.

    Example:
        >>> performer.testing.assert_attention_consistent("orf", num_features=(16, 64), draws=50)
    """
    rng = np.random.default_rng(0)
    scale = head_dim**-0.25 / 2  # |q|^2 = 1/4 after the factor sqrt(scale)
    query, key = (scale * rng.standard_normal((2, 1, 24, 1, head_dim))).astype(np.float32)
    errors = [
        _mean_error(jnp.asarray(query), jnp.asarray(key), coupling, m, draws, seed + i)
        for i, m in enumerate(num_features)
    ]
    value, spread = np.array(errors).T
    weights, x = (value / spread) ** 2, np.log(num_features)
    x = x - np.sum(weights * x) / np.sum(weights)
    slope = np.sum(weights * x * np.log(value)) / np.sum(weights * x**2)
    interval = stats.norm.isf(couplings.FALSE_ALARM_RATE) / np.sqrt(np.sum(weights * x**2))
    listed = ", ".join(f"{e:.3g} at m = {m}" for e, m in zip(value, num_features, strict=True))
    assert slope - interval <= -0.95, (
        f"the attention error of {coupling} falls as m^{slope:.2f} (+- {interval:.2f}), expected"
        f" m^-1: {listed}"
    )


# Converted models


def assert_layers_close(
    model: Callable[..., Any],
    converted: Callable[..., Any],
    batches: Iterable[Any],
    *,
    at_most: float,
    min_agreement: float = 0.0,
) -> None:
    """Assert that a converted model is close to its original, layer by layer and in the output.

    Errors are |x' - x|^2 / |x|^2 over all batches. Layers are the attention functions of Flax nnx
    modules (`performer.nnx.linearize` converts them): each is called with the inputs that it has in
    the original, so that errors do not add up. Other functions are compared by their output alone.

    Args:
        model: the original, a function or an nnx module in evaluation mode.
        converted: the converted one.
        batches: arguments: a tuple for each call, or one array.
        at_most: largest error of the output and of each layer's output.
        min_agreement: least share of equal argmax of the output, over its last axis.

    Raises:
        AssertionError: with the errors of all layers, of the output, and the share of equal argmax.

    Example:
        >>> double = lambda x: 2 * x
        >>> performer.testing.assert_layers_close(double, double, [jnp.ones((2, 3))], at_most=0.1)
    """
    sums: dict[str, np.ndarray] = {}
    agreed = []

    def add(name: str, want: Any, got: Any) -> None:
        want, got = (np.asarray(x).astype(np.float64) for x in (want, got))
        pair = np.array([np.sum((got - want) ** 2), np.sum(want**2)])
        sums[name] = sums.get(name, np.zeros(2)) + pair

    for batch in batches:
        arguments = batch if isinstance(batch, tuple) else (batch,)
        # An nnx model has imported Flax, which this module does not need otherwise.
        has_flax = "flax.nnx" in sys.modules
        nnx: Any = importlib.import_module("performer.nnx._hooks") if has_flax else None
        calls, output = nnx.recorded(model, arguments) if nnx else ({}, model(*arguments))
        for path, (name, args, options, want) in calls.items():
            add(path, want, nnx.attention_at(converted, path, name)(*args, **options))
        new = converted(*arguments)
        add("output", output, new)
        agreed.append(np.argmax(np.asarray(output), -1) == np.argmax(np.asarray(new), -1))
    errors = {name: above / max(below, 1e-300) for name, (above, below) in sums.items()}
    agreement = float(np.mean(np.concatenate([x.ravel() for x in agreed])))
    listed = "\n".join(f"  {name}: {error:.3g}" for name, error in errors.items())
    too_far = [name for name, error in errors.items() if not error <= at_most]
    is_close = not too_far and agreement >= min_agreement
    assert is_close, (
        f"above {at_most:g}: {', '.join(too_far) or 'nothing'}; equal argmax {agreement:.1%},"
        f" required {min_agreement:.1%}. Errors:\n{listed}"
    )
