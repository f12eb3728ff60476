"""Copulas of the lengths: the family, its limits PNC and PM, and what learning makes of it."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

from experiments.tabular import learned
from performer import couplings, features, testing, theory

D = 4
THETA = jax.random.normal(jax.random.key(0), (D * (D - 1) // 2,))


def test_cholesky_matches_the_equation():
    """VRC Eq. 34, with j <= i."""
    theta, at = np.asarray(THETA, np.float64), 0
    want = np.zeros((D, D))
    for i in range(D):
        row = [*theta[at : at + i], 1.0]
        at += i
        for j, value in enumerate(row):
            want[i, j] = value / np.sqrt(sum(v**2 for v in row))
    np.testing.assert_allclose(learned.cholesky(THETA), want, rtol=1e-6)
    np.testing.assert_allclose(np.diag(want @ want.T), 1)
    np.testing.assert_allclose(learned.parameters(jnp.asarray(want @ want.T)), theta, rtol=1e-4)


def test_scores_have_the_correlation():
    """Spearman correlations of 40,000 blocks are the copula's, within 5 / sqrt(40,000)."""
    L = np.asarray(learned.cholesky(THETA), np.float64)
    keys = jax.random.split(jax.random.key(1), 40_000)
    lengths = jax.vmap(lambda key: learned.norms(THETA)(key, D, D))(keys)
    want = 6 / np.pi * np.arcsin(L @ L.T / 2)
    got = stats.spearmanr(np.asarray(lengths)).statistic
    assert (abs(got - want) < 5 / 200).all()


def test_the_losses_are_those_of_their_definitions():
    """In NumPy: the error of softmax(q.k) by positive features, of the kernel by sines, cosines."""
    q, k, w = np.random.default_rng(0).normal(size=(3, 6, D)) / 2
    estimate, exact = np.exp(q @ w.T) @ np.exp(w @ k.T - np.sum(k**2, axis=1) / 2), np.exp(q @ k.T)
    off = estimate / estimate.sum(1, keepdims=True) - exact / exact.sum(1, keepdims=True)
    of_q, of_k, of_w = (jnp.asarray(x, jnp.float32) for x in (q, k, w))
    np.testing.assert_allclose(learned.attention_mse(of_q, of_k)(of_w), np.mean(off**2), rtol=1e-4)
    differences = q[:, None] - q
    off = np.cos(differences @ w.T).mean(-1) - np.exp(-np.sum(differences**2, -1) / 2)
    np.testing.assert_allclose(learned.kernel_rmse(of_q)(of_w), np.sqrt(np.mean(off**2)), rtol=1e-4)


def test_the_attention_loss_of_rounded_inputs_is_that_in_float32():
    """Weights in bfloat16 would be off by 3e-3 of their size."""
    q, k, w = jax.random.normal(jax.random.key(0), (3, 6, D), jnp.bfloat16)
    wide_q, wide_k, wide_w = (x.astype(jnp.float32) for x in (q, k, w))
    want = learned.attention_mse(wide_q, wide_k)(wide_w)
    np.testing.assert_allclose(learned.attention_mse(q, k)(wide_w), want, rtol=1e-5)


def test_a_factor_is_no_correlation():
    with pytest.raises(ValueError, match="symmetric: pass L L"):
        learned.parameters(jnp.array([[1, 0], [0.5, 1]]))


def test_an_error_of_zero_has_the_gradient_zero():
    """Features of the origin are exact, whatever the frequencies are."""
    w = jnp.ones((4, D), jnp.float32)
    value, gradient = jax.value_and_grad(learned.kernel_rmse(jnp.zeros((1, D))))(w)
    np.testing.assert_array_equal(value, 0)
    np.testing.assert_array_equal(gradient, 0)


@pytest.mark.thorough
def test_rows_are_normal():
    """With correlations near 1 and -1."""
    testing.assert_gaussian_marginals(learned.orthogonal(30 * THETA), 2 * D, D)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "limit"), [("pnc", learned.pairwise), ("pm", learned.monotone)], ids=["pnc", "pm"]
)
def test_expresses(name, limit):
    """The mean squared kernel error over 40,000 draws is that coupling's, within 5 standard errors.

    They differ by tens of standard errors from those of independent lengths.
    """
    x = np.full((2, D), 0.5) * [[1], [-1]] * [1, 0.5, 1, 0.5]
    coupling = learned.orthogonal(learned.parameters(limit(D)))
    keys = jax.random.split(jax.random.key(2), 40_000)

    @jax.vmap
    def estimate(key):
        phi = features.trigonometric(jnp.asarray(x, jnp.float32), coupling(key, D, D))
        return phi[0] @ phi[1]

    exact = np.exp(-np.sum((x[0] - x[1]) ** 2) / 2)
    squares = (np.asarray(estimate(keys), np.float64) - exact) ** 2
    error = squares.std() / np.sqrt(len(squares))
    want, of_orf = (
        float(theory.kernel_mse(n, x[0], x[1], D, features="trigonometric")) for n in (name, "orf")
    )
    assert abs(squares.mean() - want) < 5 * error
    assert abs(of_orf - want) > 20 * error


def test_losses_that_still_fall_warn():
    """The figure is the slope of the last ten losses, over five steps; noise is no fall."""
    x = jax.random.normal(jax.random.key(4), (8, D)) / D**0.5
    options = dict(num_features=D, num_draws=1000, num_steps=20)
    rate = optax.adam(0.1)
    with pytest.warns(UserWarning, match="the loss still falls: by") as told:
        _, losses = learned.learn(
            jax.random.key(6), learned.kernel_rmse(x), THETA, optimizer=rate, **options
        )
    line = stats.linregress(np.arange(10), np.asarray(losses[-10:], np.float64))
    figure = f"by {-5 * line.slope:.3g} ± {5 * line.stderr:.2g} over the last 5 of 20 steps"
    assert figure in str(told[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learned.warn_if_falling(jax.random.normal(jax.random.key(0), (200,)), 1)


@pytest.mark.thorough
def test_learning_recovers_pnc_from_a_random_start():
    """VRC Fig. 6: at most 2% above PNC's error, where independent lengths are 15% above."""
    x = jax.random.normal(jax.random.key(4), (32, D)) / D**0.5
    loss = learned.kernel_rmse(x)
    keys = jax.random.split(jax.random.key(5), 4000)

    @jax.jit
    def error(frequencies):
        return jax.vmap(loss)(frequencies).mean()

    def of(coupling):
        return float(error(jax.vmap(lambda key: coupling(key, D, D))(keys)))

    theta, losses = learned.learn(
        jax.random.key(6),
        loss,
        THETA,
        num_features=D,
        num_draws=16,
        num_steps=300,
        optimizer=optax.adam(0.1),
    )
    assert losses.shape == (300,)  # and no warning
    assert of(couplings.get("orf")) > 1.1 * of(couplings.get("pnc"))
    assert of(learned.orthogonal(theta)) < 1.02 * of(couplings.get("pnc"))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: learned.cholesky(jnp.ones(4)), "theta has 4 parameters; .* as 3 for m = 3"),
        (
            lambda: learned.orthogonal(jnp.ones(6))(jax.random.key(0), 3, 3),
            "couples 4 lengths, the block has 3",
        ),
        (lambda: learned.parameters(2 * jnp.eye(3)), "ones on its diagonal"),
        (
            lambda: learned.parameters(jnp.array([[1.0, 2], [2, 1]])),
            "its least eigenvalue is -1",
        ),
        (
            lambda: learned.kernel_rmse(jnp.eye(4), lengthscale=0.0),
            "lengthscale must be positive",
        ),
    ],
)
def test_parameters_that_cannot_be_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
