"""Experiments on attention between nodes, and searches, in small."""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.graphs import transformer
from tests.support.graph_examples import karate
from tests.support.small import read_csv

pytestmark = pytest.mark.thorough


def test_transformer(tmp_path):
    """Each method learns to turn positions into normals better than by chance, in 20 steps."""
    methods = ("performer", "masked", "exact masked")
    transformer.main(repeats=2, steps=20, methods=methods, out=tmp_path)
    rows = read_csv(tmp_path / "transformer.csv")
    assert [row["attention"] for row in rows] == [*methods]
    assert all(float(row["mean"]) > 0.3 for row in rows)
    assert (tmp_path / "transformer.png").exists()


def test_exact_masked_attention_is_that_of_the_equations():
    """e^{q.k / sqrt(h)} times (sum_t f_t A^t)^2, in NumPy: the kernel by its square."""
    layer = transformer.Exact(2, 8, 4, num_terms=transformer.TERMS, rngs=transformer.nnx.Rngs(0))
    q, k, v = np.random.default_rng(0).normal(size=(3, 34, 2, 4))
    f = np.exp(np.asarray(layer.modulation[...], np.float64))
    a = karate().normalised().to_scipy().toarray()
    for n in range(2):
        root = sum(f[n, t] * np.linalg.matrix_power(a, t) for t in range(transformer.TERMS))
        weights = np.exp(q[:, n] @ k[:, n].T / 2) * (root @ root)
        expected = weights @ v[:, n] / weights.sum(axis=1, keepdims=True)
        found = layer.attend(*map(jnp.asarray, (q, k, v)), transformer.powers(karate()), None)
        np.testing.assert_allclose(found[:, n], expected, rtol=1e-4, atol=1e-5)
