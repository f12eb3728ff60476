"""GraphAttention: projections, mask and features against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from performer.graphs import features, kernels
from performer.nnx import GraphAttention
from tests.support.graph_examples import karate, masked

X = jax.random.normal(jax.random.key(0), (34, 8))
WALKS = features.sample(jax.random.key(1), karate(), num_walks=4, p_halt=0.3)


def layer(**options):
    return GraphAttention(2, 8, 6, rngs=nnx.Rngs(params=0, frequencies=1), **options)


def changed(model):
    """With parameters off their initial values, each head its own."""
    leaves, tree = jax.tree.flatten(nnx.state(model, nnx.Param))
    keys = jax.random.split(jax.random.key(9), len(leaves))
    new = [x + 0.3 * jax.random.normal(key, x.shape) for x, key in zip(leaves, keys, strict=True)]
    nnx.update(model, jax.tree.unflatten(tree, new))
    return model


def dense(model, x, mask):
    """The layer written out, with a mask (n, N, N)."""
    params = jax.tree.map(
        lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(nnx.state(model, nnx.Param))
    )
    heads = {}
    for name in ("query", "key", "value"):
        heads[name] = np.einsum("id,dnh->inh", np.asarray(x, np.float64), params[name]["kernel"])
        heads[name] += params[name]["bias"]
    tokens = (x[None] for x in heads.values())
    (attended,), output = (
        masked(*tokens, model.attention_fn.frequencies[...], mask),
        params["output"],
    )
    return np.einsum("inh,nhd->id", attended, output["kernel"]) + output["bias"]


def learned_mask(model):
    """(sum_t f_t A^t)^2 of the walks, visit by visit."""
    f = np.exp(np.asarray(model.modulation[...], np.float64))
    phi = np.zeros((2, 34, 34))
    visits = (WALKS.start, WALKS.node, WALKS.step, np.asarray(WALKS.load, np.float64))
    for start, node, step, load in zip(*map(np.asarray, visits), strict=True):
        if step < f.shape[1]:
            phi[:, start, node] += f[:, step] * load / 4
    return phi @ phi.swapaxes(1, 2)


def test_the_layer_is_that_of_the_equations():
    model = changed(layer(mask=WALKS, num_terms=4))
    expected = dense(model, X, learned_mask(model))
    for output in nnx.jit(lambda model: (model(X), model(X[None])[0]))(model):
        np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.thorough
def test_a_mask_of_the_call_replaces_that_of_the_layer():
    gram = kernels.Diffusion(1.0).dense(karate())
    held, bare = (changed(layer(**options)) for options in (dict(mask=WALKS), {}))
    expected = dense(held, X, np.asarray(gram, np.float64))
    np.testing.assert_allclose(held(X, gram), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(bare(X, WALKS), held(X), atol=1e-5)
    np.testing.assert_allclose(bare(X), dense(bare, X, 1.0), rtol=1e-4, atol=1e-4)
    alone = held(X, key_mask=jnp.arange(34) < 20)
    gram = learned_mask(held) * (np.arange(34) < 20)
    np.testing.assert_allclose(alone, dense(held, X, gram), rtol=1e-4, atol=1e-4)


def test_the_initial_kernel_is_diffusion():
    """The coefficients are those of its root; the rest of the series is below 1e-6."""
    model = layer(mask=WALKS)
    estimate = features.EstimatedKernel(features.modulate(WALKS, kernels.Diffusion(1.0)))
    np.testing.assert_allclose(model(X), model(X, estimate), atol=1e-4)


def test_calibration_is_fitted_with_the_mask_of_a_graph_too():
    """Running moments are as without the graph; evaluation keeps them."""
    moments, exists = [], jnp.arange(34) < 20
    for mask in None, WALKS:
        model = layer(mask=mask, calibration="full")
        step = nnx.jit(lambda model: model(X[None], key_mask=exists))
        step(model)
        moments.append(model.attention_fn.statistics["moments"][...])
        assert model.attention_fn.calibration is not None
        model.eval()
        kept = step(model)
        np.testing.assert_array_equal(model.attention_fn.statistics["moments"][...], moments[-1])
        np.testing.assert_array_equal(step(model), kept)
    assert moments[0][0, 0, 0] == pytest.approx(0.1, rel=1e-5)
    np.testing.assert_array_equal(*moments)
