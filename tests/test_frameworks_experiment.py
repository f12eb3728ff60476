"""The experiment on Flax, Equinox and Haiku: one model and its table."""

import jax
import jax.numpy as jnp
import pytest

from experiments.attention import frameworks
from tests.small import read_csv

pytestmark = pytest.mark.thorough


def test_the_models_are_of_one_size():
    """Haiku and Equinox have the same parameters as linen, under other names."""
    sizes = {}
    for name, model in frameworks.MODELS.items():
        parameters, apply = model(jax.random.key(0))
        sizes[name] = sorted(x.size for x in jax.tree.leaves(parameters))
        assert apply(parameters, jnp.zeros((2, 16, 4))).shape == (2, 10)
    assert sizes["linen"] == sizes["equinox"] == sizes["haiku"]


def test_tables(tmp_path):
    options = dict(num_features=(8,), epochs=2, steps=2, draws=2, images=32)
    frameworks.main(("haiku",), **options, out=tmp_path)
    exact, *rows = read_csv(tmp_path / "digits.csv")
    assert exact["attention"] == "exact"
    assert [row["attention"] for row in rows] == list(frameworks.METHODS)
    assert all(row["m"] == "8" for row in rows)
    drawn, calibrated, _ = (float(row["attention error"]) for row in rows)
    assert calibrated < drawn
    assert all(float(row["accuracy ±"]) >= 0 for row in rows)
