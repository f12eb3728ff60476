"""Attention errors against a float64 oracle written from the equations, and their statistics."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import helmert
from scipy.special import logsumexp, softmax

from performer import Exact, Features, analysis, couplings
from performer.analysis import attention_error, recommend
from performer.calibration import Calibration
from performer.testing import softmax_attention
from tests.support.attention_inputs import matrix_of_op

T, S, N, K, H, V, M, DRAWS = 10, 12, 4, 2, 4, 3, 6, 8


def inputs(lead=(2,), norm=1.0, t=T, s=S, n=N, k=K):
    rng = np.random.default_rng(0)
    query, key, value = (
        rng.standard_normal((*lead, *shape)) for shape in ((t, n, H), (s, k, H), (s, k, V))
    )
    return tuple(jnp.asarray(x, jnp.float32) for x in (norm * query, norm * key + 0.3, value))


def gaussian(key, m, d):
    """Compiles faster than the couplings by name."""
    return jax.random.normal(key, (m, d))


@cache
def documented_draws(coupling, seed=0, draws=DRAWS, m=M, k=K):
    """(draws, k, m, h), as the docstring of `attention_error` says."""

    def draw(i):
        key = jax.random.fold_in(jax.random.key(seed), i)
        if isinstance(coupling, str):
            return couplings.draw(key, coupling, m, H, k)
        return jax.vmap(lambda x: coupling(x, m, H))(jax.random.split(key, k))

    return jax.jit(jax.vmap(draw))(jnp.arange(draws))


def estimates(q, k, g, calibration):
    """k^ (draws, t, s) and what it estimates, exp(q.(k - c)), of one head; VRC Eq. 44's X and mu.

    With frequencies from N(mean, L L^T), each feature counts N(w; 0, I) / N(w; mean, L L^T) times.
    """
    eye, zero = np.eye(H), np.zeros(H)
    c, M, _, mean, L = (
        default if x is None else np.asarray(x, np.float64)
        for x, default in zip(calibration, (zero, eye, eye, zero, eye), strict=True)
    )
    x, y = q @ M.T, (k - c) @ np.linalg.inv(M).T
    w = mean + g @ L.T
    away = np.einsum("dmx,xy,dmy->dm", w - mean, np.linalg.inv(L @ L.T), w - mean)
    density = np.exp(away / 2 - np.sum(w**2, -1) / 2) * np.sqrt(np.linalg.det(L @ L.T))
    exponents = np.einsum("dmx,ijx->dmij", w, x[:, None] + y)
    exponents -= np.sum(x**2, -1)[:, None] / 2 + np.sum(y**2, -1) / 2
    return np.mean(density[..., None, None] * np.exp(exponents), axis=1), np.exp(q @ (k - c).T)


def oracle(q, k, v, g, calibration=Calibration(), coefficients=(2, 1)):  # noqa: B008
    """{field: (value, standard error)} of one head, float64, from the equations."""
    X, mu = estimates(q, k, g, calibration)
    draws, t, s = X.shape
    row_mean = mu.mean(1, keepdims=True)
    A, A_hat = mu / mu.sum(1, keepdims=True), X / X.sum(2, keepdims=True)

    def mean(sample):
        return sample.mean(), sample.std(ddof=1) / np.sqrt(len(sample))

    def relative(error, exact):
        return np.sum(error**2, axis=(-2, -1)) / np.sum(exact**2)

    rows = mean(np.mean((X.sum(2) / mu.sum(1) - 1) ** 2, axis=1))
    covariance = np.stack([np.cov(X[:, i].T, ddof=1) for i in range(t)])  # (t, s, s)
    ratio = mu / row_mean

    def predicted(variance, to_row, of_row):  # VRC Eq. 45: Var_ij, sum_k Cov(ij, ik), sum_kl Cov
        a, b = coefficients
        entries = variance - a * ratio * to_row / s + b * ratio**2 * of_row[..., None] / s**2
        return np.sum(entries / (s * row_mean) ** 2, axis=(-2, -1)) / np.sum(A**2)

    moments = (
        np.mean(np.diagonal(covariance, axis1=1, axis2=2) / row_mean**2),
        np.mean(covariance / row_mean[..., None] ** 2),
        predicted(
            np.diagonal(covariance, axis1=1, axis2=2), covariance.sum(2), covariance.sum((1, 2))
        ),
    )
    # One number for each residual of the Helmert transform, whose mean is the moment.
    e = np.einsum("ed,dij->eij", helmert(draws), X)
    total = e.sum(2)
    samples = (
        np.mean((e / row_mean) ** 2, axis=(1, 2)),
        np.mean((e.mean(2) / row_mean[:, 0]) ** 2, axis=1),
        predicted(e**2, e * total[..., None], total**2),
    )
    uniform = np.full((t, s), 1 / s) - A
    return {
        "attention": mean(relative(A_hat - A, A)),
        "output": mean(relative((A_hat - A) @ v, A @ v)),
        "row_sum": (np.sqrt(rows[0]), rows[1] / (2 * np.sqrt(rows[0]))),
        **{
            name: (moment, mean(sample)[1])
            for name, moment, sample in zip(
                ("variance", "covariance", "predicted"), moments, samples, strict=True
            )
        },
        "uniform_attention": relative(uniform, A),
        "uniform_output": relative(uniform @ v, A @ v),
    }


def head_of(calibration, head, shared):
    """Of a calibration with an entry for each key head, or with one for all."""
    return (
        calibration if shared else Calibration(*(x if x is None else x[head] for x in calibration))
    )


def assert_matches(error, query, key, value, g, calibration=Calibration(), shared=True, mask=None):  # noqa: B008
    """All fields of all heads; queries and keys with the factor sqrt(scale) in them."""
    query, key, value, g = (np.asarray(x, np.float64) for x in (query, key, value, g))
    for b, n in np.ndindex(query.shape[0], query.shape[2]):
        head = n * key.shape[2] // query.shape[2]
        seen = np.ones(key.shape[1], bool) if mask is None else np.asarray(mask[b])
        own = head_of(calibration, head, shared)
        args = query[b, :, n], key[b, seen, head], value[b, seen, head], g[:, head]
        for name, want in oracle(*args, own).items():
            got = getattr(error, name)
            got = got[b, n] if "uniform" in name else [x[b, n] for x in got]
            np.testing.assert_allclose(got, want, rtol=2e-4, err_msg=f"{name} of {b}, {n}")


def test_a_named_coupling():
    query, key, value = inputs()
    options = dict(coupling="iid-antithetic", num_features=M, draws=DRAWS, seed=3)
    error = attention_error(query, key, value, **options)
    assert error.attention.value.shape == error.output.standard_error.shape == (2, N)
    root = H**-0.25
    assert_matches(error, root * query, root * key, value, documented_draws("iid-antithetic", 3))
    worse = error.attention.value > error.uniform_attention
    np.testing.assert_array_equal(error.worse_than_uniform, worse)
    assert worse.any()
    without = attention_error(query, key, **options)
    assert without.output is None
    assert without.uniform_output is None
    np.testing.assert_allclose(without.predicted, error.predicted, rtol=1e-5)


def test_a_function_a_mask_and_a_scale():
    query, key, value = inputs()
    mask = jnp.arange(S) < jnp.array([7, S])[:, None]
    hidden = ~mask[:, :, None, None]
    error = attention_error(
        *(query, jnp.where(hidden, jnp.nan, key), jnp.where(hidden, jnp.nan, value)),
        **dict(coupling=gaussian, num_features=M, draws=DRAWS, scale=0.3),
        mask=mask[:, None, None],
    )
    root = 0.3**0.5
    g = documented_draws(gaussian)
    assert_matches(error, root * query, root * key, value, g, mask=mask)


@pytest.mark.parametrize("drawn", [None, [1.0], np.ones((H, M))])
def test_couplings_without_a_row_for_each_feature_are_refused(drawn):
    query, key, _ = inputs()
    with pytest.raises(ValueError, match=r"the coupling gives .*; expected an array with one row"):
        attention_error(query, key, num_features=M, coupling=lambda key, m, d: drawn)


def full_calibration():
    """For each key head a shift, a symmetric scale, a mean and a root that is not symmetric."""
    rng = np.random.default_rng(0)
    a = np.eye(H) + 0.2 * rng.standard_normal((K, H, H))
    M = a @ a.swapaxes(-1, -2)
    leaves = (
        *(rng.standard_normal((K, H)), M, np.linalg.inv(M)),
        *(0.2 * rng.standard_normal((K, H)), 1.3 * np.eye(H) + 0.2 * rng.random((K, H, H))),
    )
    return Calibration(*(jnp.asarray(x, jnp.float32) for x in leaves))


@pytest.mark.thorough
def test_a_calibration():
    """One for each key head, and one for all; the oracle's kernel estimates are unbiased."""
    query, key, value = inputs(norm=0.8)
    g, root = documented_draws(gaussian), H**-0.25
    for shared in (False, True):
        calibration = head_of(full_calibration(), 0, not shared)
        options = dict(coupling=gaussian, num_features=M, draws=DRAWS, calibration=calibration)
        error = attention_error(query, key, value, **options)
        assert_matches(error, root * query, root * key, value, g, calibration, shared)
    q, k = (np.asarray(x, np.float64)[0, :, 0] * root for x in (query, key))
    many = np.random.default_rng(1).standard_normal((20_000, M, H))
    X, mu = estimates(q, k, many, calibration)
    score = (X / mu - 1).mean(0) / ((X / mu).std(0) / np.sqrt(len(many)))
    assert np.abs(score).max() < 5


def test_a_window_without_features():
    """The first query sees a far key alone, which is not estimated: its row is 0."""
    _, key, value = inputs()
    query, mask = jnp.repeat(key, N // K, axis=-2), np.arange(S) >= 2
    window = Exact(window=1)
    error = attention_error(query, key, value, num_features=0, draws=3, exact=window, mask=mask)
    alone = Features(None, exact=window)
    estimate = np.asarray(matrix_of_op(query, key, alone, mask=mask), np.float64)
    assert not estimate[:, :, 0].any()
    repeated = np.repeat(np.asarray(key, np.float64), N // K, axis=-2)
    kernel = mask * np.exp(np.einsum("bthx,bshx->bhts", repeated, repeated) / H**0.5)
    A = kernel / kernel.sum(axis=-1, keepdims=True)
    want = np.sum((estimate - A) ** 2, (-2, -1)) / np.sum(A**2, (-2, -1))
    np.testing.assert_allclose(error.attention.value, want, rtol=1e-4)
    assert all(np.isfinite(leaf).all() for leaf in (*error.output, *error.row_sum))


def test_left_padding_is_no_first_key():
    """Far from their window all queries see the first key that exists, exactly."""
    _, key, value = inputs()
    query, mask = jnp.repeat(key, N // K, axis=-2), np.arange(S) >= 2
    near = Exact(window=1, first=1)
    error = attention_error(query, key, value, num_features=0, draws=3, exact=near, mask=mask)
    alone = Features(None, exact=near)
    estimate = np.asarray(matrix_of_op(query, key, alone, mask=mask), np.float64)
    assert estimate[..., 2].all()
    unit = np.broadcast_to(np.eye(S)[:, None], (len(key), S, K, S))
    A = np.moveaxis(softmax_attention(query, key, unit, mask=mask), 2, 1)
    want = np.sum((estimate - A) ** 2, (-2, -1)) / np.sum(A**2, (-2, -1))
    np.testing.assert_allclose(error.attention.value, want, rtol=1e-4)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nothing_is_recommended_for_what_is_no_number(bad):
    query, key, _ = inputs(norm=0.5)
    given = dict(coupling=gaussian, draws=3, tolerance=0.1)
    with pytest.raises(ValueError, match="the attention error with 2 features is nan: is there a"):
        recommend(query.at[0, 1].set(bad), key, **given)


@pytest.mark.thorough
def test_an_exact_window_is_that_of_the_package():
    """With as many queries as keys; all pairs exact are no error, and row sums are exact then."""
    query, key, value = inputs(norm=0.8)
    query = jnp.concatenate([query, query], axis=1)[:, :S]
    repeated = jnp.repeat(key, N // K, axis=-2)
    logits = jnp.einsum("bthx,bshx->bhts", query, repeated, precision="highest") / H**0.5
    for calibration, is_causal, window, first, keys in (
        (None, False, 0, 0, 2), (full_calibration(), False, 2, 1, 0), (None, True, 2, 1, 0)
    ):  # fmt: skip
        A = jax.nn.softmax(jnp.where(jnp.tri(S, dtype=bool) | (not is_causal), logits, -jnp.inf))
        options = dict(coupling=gaussian, num_features=M, draws=DRAWS)
        both = dict(calibration=calibration, is_causal=is_causal)
        near = Exact(window, first, keys, int(not is_causal))
        error = attention_error(query, key, value, **options, **both, exact=near)

        def measure(w, fitted=calibration, near=near, is_causal=is_causal):
            features = Features(w, fitted, exact=near)
            return matrix_of_op(query, key, features, is_causal=is_causal)

        measured = jax.jit(jax.vmap(measure))(documented_draws(gaussian))
        want = np.mean(np.sum((measured - A) ** 2, (-2, -1)), axis=0)
        want = want / np.sum(A**2, axis=(-2, -1))
        np.testing.assert_allclose(error.attention.value, want, rtol=2e-4)
        whole = attention_error(query, key, value, **options, **both, exact=Exact(S))
        assert whole.attention.value.max() < 1e-10
        assert whole.row_sum.value.max() < 1e-5
    show = dict(tolerance=1e-6, limit=2, scale=0.3, exact=Exact(S), show=lambda _: None)
    assert recommend(query, key, coupling=gaussian, draws=DRAWS, **show).num_features == 2


def test_causal_errors_are_those_of_each_row_and_its_keys():
    """Row i alone, with the keys up to i, has a mask of keys; means and norms put rows together."""
    query, key, value = inputs(lead=(1,), t=5, s=5)
    exists = jnp.arange(5) != 0  # the first row has no key
    options = dict(coupling=gaussian, num_features=M, draws=DRAWS)
    whole = attention_error(query, key, value, **options, is_causal=True, mask=exists)
    rows = [
        attention_error(
            query[:, i : i + 1], key, value, **options, mask=exists & (jnp.arange(5) <= i)
        )
        for i in range(1, 5)
    ]
    repeated = jnp.repeat(key, N // K, axis=-2)
    logits = jnp.einsum("bthx,bshx->bhts", query, repeated, precision="highest") / H**0.5
    logits = jnp.where(jnp.tri(5, dtype=bool) & exists, logits, -jnp.inf)[:, :, 1:]
    A = np.asarray(jax.nn.softmax(logits), np.float64)
    sizes = {"attention": np.moveaxis(np.sum(A**2, axis=-1), -1, 0)}
    sizes["predicted"] = sizes["uniform_attention"] = sizes["attention"]
    for name in ("attention", "predicted", "uniform_attention", "variance", "covariance"):
        each = [getattr(row, name) for row in (*rows, whole)]
        *each, got = (x if isinstance(x, np.ndarray) else x.value for x in each)
        weights = sizes.get(name, np.ones((4, 1, N)))
        np.testing.assert_allclose(got, np.average(each, axis=0, weights=weights), rtol=2e-4)
    squares = np.mean([row.row_sum.value**2 for row in rows], axis=0)
    np.testing.assert_allclose(whole.row_sum.value**2, squares, rtol=2e-4)
    few = dict(limit=2, draws=3, show=lambda _: None)
    found = recommend(query, key, coupling=gaussian, tolerance=1e6, is_causal=True, **few)
    assert found.num_features == 2


@pytest.mark.thorough
def test_blocks_of_rows(monkeypatch):
    """Three blocks of four rows, two of them padding, make what one block makes."""
    options = dict(coupling=gaussian, num_features=M, draws=DRAWS)
    query, key, value = inputs()
    near = jnp.concatenate([query, query], axis=1)[:, :S], key, value
    whole = attention_error(*inputs(), **options)
    of_near = attention_error(*near, **options, exact=Exact(2), is_causal=True)
    function = analysis._measure.__wrapped__
    monkeypatch.setattr(
        analysis, "_measure", jax.jit(lambda *args: function(*args), static_argnums=(5, 6))
    )
    monkeypatch.setattr(analysis, "BLOCK", 4)
    assert_same(whole, attention_error(*inputs(), **options))
    assert_same(of_near, attention_error(*near, **options, exact=Exact(2), is_causal=True))


def assert_same(one, other):
    for name in ("attention", "output", "row_sum", "variance", "covariance", "predicted"):
        np.testing.assert_allclose(getattr(one, name), getattr(other, name), rtol=1e-4)
    np.testing.assert_allclose(one.uniform_output, other.uniform_output, rtol=1e-5)


@pytest.mark.thorough
def test_first_order_prediction():
    """Within 5% where errors are small; with the printed coefficients 4 and 3 it is not."""
    query, key, value = inputs(lead=(1,), norm=0.4, n=1, k=1)
    m, draws = 1024, 32
    error = attention_error(query, key, value, coupling=gaussian, num_features=m, draws=draws)
    measured, predicted = error.attention.value[0, 0], error.predicted.value[0, 0]
    assert abs(predicted / measured - 1) < 0.05
    assert not error.worse_than_uniform.any()
    args = (np.asarray(x, np.float64)[0, :, 0] * H**-0.25 for x in (query, key))
    g = np.asarray(documented_draws(gaussian, 0, draws, m, 1), np.float64)[:, 0]
    printed, _ = oracle(*args, np.ones((S, 1)), g, coefficients=(4, 3))["predicted"]
    assert abs(printed / measured - 1) > 0.1


def test_long_vectors_overflow_nothing():
    error = attention_error(*inputs(norm=20.0), coupling=gaussian, num_features=M, draws=DRAWS)
    for name, field in vars(error).items():
        assert np.isfinite(field).all(), name


@pytest.mark.parametrize(("norm", "shift"), [(20.0, 0), (1.0, 20)])
def test_attention_of_long_vectors(norm, shift):
    """If q = -k nearly, no feature is negligible, though features of the keys differ by e^100."""
    query, key, _ = inputs(lead=(1,), norm=norm)
    query, key, w = query - shift, key + shift, documented_draws(gaussian)
    error = attention_error(query, key, coupling=gaussian, num_features=M, draws=DRAWS)
    q, k, w = (np.asarray(x, np.float64) for x in (query[0, :, 0], key[0, :, 0], w[:, 0]))
    q, k = q * H**-0.25, k * H**-0.25
    exponents = np.einsum("dmx,ijx->dijm", w, q[:, None] + k) - np.sum(k**2, -1)[:, None] / 2
    A_hat, A = softmax(logsumexp(exponents, axis=-1), axis=-1), softmax(q @ k.T, axis=-1)
    want = np.mean(np.sum((A_hat - A) ** 2, axis=(1, 2))) / np.sum(A**2)
    np.testing.assert_allclose(error.attention.value[0, 0], want, rtol=5e-3)


@pytest.mark.parametrize("most", [2, 9])
def test_the_program_for_more_or_fewer_features_is_the_same(most):
    query, key, _ = inputs(lead=(1,))
    options = dict(coupling="orf", num_features=M, draws=DRAWS)
    error = attention_error(query, key, most=most, **options)
    np.testing.assert_allclose(error.attention, attention_error(query, key, **options).attention)


def test_memory_at_4096():
    token = jax.ShapeDtypeStruct((1, 4096, 1, 64), jnp.float32)
    exists = jax.ShapeDtypeStruct((1, 4096), bool)
    w = jax.ShapeDtypeStruct((32, 1, 128, 64), jnp.float32)
    features = Features(None, weights=np.full(128, 1 / 128, np.float32))
    measure = jax.jit(lambda *given: analysis._measure(*given, features, None))
    compiled = measure.lower((token,) * 3, exists, w).compile()
    # 5.6 blocks of rows were measured; all rows at once are 16 blocks.
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * analysis.BLOCK * 4096 * 4


def test_recommend():
    query, key, _ = inputs(norm=0.5)
    options = dict(coupling=gaussian, draws=DRAWS, scale=0.3)
    errors = {
        m: attention_error(query, key, num_features=m, **options).attention.value.mean()
        for m in (2, 4)
    }
    assert errors[2] > errors[4]
    tolerance = (errors[2] * errors[4]) ** 0.5
    found = recommend(query, key, tolerance=tolerance, **options)
    assert found.num_features == found.most == 4
    assert found.error == errors[4]
    q, k = np.asarray(query), np.repeat(np.asarray(key), N // K, axis=2)
    lengths = np.sum((q[:, :, None] + k[:, None]) ** 2, axis=-1) * 0.3
    expected = np.median(lengths), lengths.max()
    np.testing.assert_allclose((found.median, found.largest), expected, rtol=1e-5)
    assert str(found).startswith("4 features of gaussian are enough.\n")
    none = recommend(query, key, tolerance=tolerance, limit=3, **options)
    assert (none.num_features, none.most, none.error) == (None, 2, errors[2])
    assert str(none).startswith("No number of features up to 2 is enough with gaussian.\n")
    tried = []
    options |= dict(tolerance=1e-9, limit=4, exact=Exact(keys=S), show=tried.append)
    with jax.numpy_rank_promotion("raise"):
        found = recommend(query, key, **options)
    assert (found.num_features, found.exact_keys) == (2, S)
    assert str(found).startswith(f"2 features of gaussian with {S} exact keys are enough.\n")
    order = [line.split(":")[0] for line in tried]
    half = f" and {S // 2} exact keys"
    assert order == [
        *("2 features", "4 features", f"2 features{half}", f"4 features{half}"),
        f"2 features and {S} exact keys",
    ]


@pytest.mark.thorough
def test_lengths_are_those_after_the_calibration():
    """Keys moved and stretched, queries shrunk: a calibration takes it back, and leaves masks."""
    query, key, _ = inputs(norm=0.5)
    options = dict(coupling=gaussian, draws=DRAWS, limit=2, tolerance=1e-6, scale=1.0)
    mask = jnp.arange(S) < 9
    plain = recommend(query, key, mask=mask, **options)
    calibration = Calibration(jnp.full((K, H), 5.0), 2 * jnp.eye(H), jnp.eye(H) / 2)
    other = recommend(query / 2, 2 * key + 5, calibration=calibration, mask=mask, **options)
    np.testing.assert_allclose(other.largest, plain.largest, rtol=1e-5)
    np.testing.assert_allclose(other.median, plain.median, rtol=1e-5)
