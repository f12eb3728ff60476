"""Linearized functions in files: the same outputs in another process, without batches."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import performer
from performer import Exact
from performer.linearization import Linearized

X = jax.random.normal(jax.random.key(0), (2, 24, 2, 8))


def attend(x):
    return jax.nn.dot_product_attention(x, 2 * x, x)


def causal(x):
    return jax.nn.dot_product_attention(x, x, x, is_causal=True)


def layers(x):
    """Two steps of a scan, each with frequencies of its own."""
    return jax.lax.scan(lambda x, factor: (x + attend(factor * x), None), x, jnp.ones(2))[0]


def with_distances(x):
    """ALiBi, whose slopes are measured."""
    i = jnp.arange(x.shape[1])
    bias = -jnp.array([0.5, 0.1])[:, None, None] * jnp.abs(i[:, None] - i)
    scores = jnp.einsum("bthd,bshd->bhts", x, x) / 8**0.5 + bias
    scores = jnp.where(i[:, None] >= i, scores, -jnp.inf)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), x)


CASES = {
    "exact keys and rows": (attend, dict(exact=Exact(keys=4, rows=1))),
    "learned, with a window": (causal, dict(exact=Exact(window=4, first=1), refine_steps=2)),
    "a scan": (layers, dict(calibration="shift+scale")),
    "ALiBi": (with_distances, dict(coupling=performer.couplings.get("orf"))),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_saved_is_loaded(name, tmp_path):
    """All arrays and static facts: the pytrees are equal, and so are outputs, bit for bit."""
    function, options = CASES[name]
    new, _ = performer.linearize(function, [(X,)], num_features=8, **options)
    new.save(tmp_path / "linear.npz")
    loaded = performer.load(tmp_path / "linear.npz", function)
    for x, y in zip(new.arrays.items(), loaded.arrays.items(), strict=True):
        if "coupling" in options:  # a function has no name to be saved by
            x[1].attention.__dict__["coupling"] = None
        jax.tree.map(np.testing.assert_array_equal, x, y)
    assert loaded.program.words == new.program.words
    assert [*map(str, loaded.program.settings.values())] == [
        *map(str, new.program.settings.values())
    ]
    np.testing.assert_array_equal(loaded(X), new(X))
    assert [path.name for path in tmp_path.iterdir()] == ["linear.npz"]


def test_another_function_or_file_is_refused(tmp_path):
    new, _ = performer.linearize(attend, [(X,)], num_features=8)
    new.save(tmp_path / "linear.npz")
    other = performer.load(tmp_path / "linear.npz", causal)
    with pytest.raises(ValueError, match="attention is computed differently|differ"):
        other(X)
    np.savez(tmp_path / "arrays.npz", x=np.ones(3))
    (tmp_path / "text.npz").write_text("no archive")
    for name in ("arrays.npz", "text.npz"):
        with pytest.raises(ValueError, match=rf"{name} is no linearized function"):
            performer.load(tmp_path / name, attend)


def test_a_linearized_function_is_a_pytree():
    new, _ = performer.linearize(attend, [(X,)], num_features=8)
    leaves, tree = jax.tree.flatten(new)
    again = jax.tree.unflatten(tree, leaves)
    assert isinstance(again, Linearized)
    got = jax.jit(lambda f, x: f(x))(again, X)  # arrays that are constants round otherwise
    np.testing.assert_allclose(got, new(X), atol=1e-5)


PROGRAM = """
import sys, jax, numpy, performer
def attend(x):
    return jax.nn.dot_product_attention(x, 2 * x, x)
x = jax.random.normal(jax.random.key(0), (2, 24, 2, 8))
numpy.save(sys.argv[2], performer.load(sys.argv[1], attend)(x))
"""


def test_another_process_loads_it_without_batches(tmp_path):
    new, _ = performer.linearize(attend, [(X,)], num_features=8, exact=Exact(keys=4))
    new.save(tmp_path / "linear.npz")
    words = [sys.executable, "-c", PROGRAM, tmp_path / "linear.npz", tmp_path / "output.npy"]
    subprocess.run(words, check=True)
    np.testing.assert_allclose(np.load(tmp_path / "output.npy"), new(X), atol=1e-6)
