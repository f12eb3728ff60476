"""The schedule, and which parameters decay."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.support.small import shapes, small_config
from vit import config
from vit.model import classification
from vit.run import optim


def test_schedule():
    section = config.Optim(
        learning_rate=1.0, final_learning_rate=0.1, warmup_steps=10, constant_steps=5
    )
    rate = optim.schedule(section, num_steps=35)
    assert [float(rate(step)) for step in (0, 5, 10, 15)] == pytest.approx([0, 0.5, 1, 1])
    assert float(rate(25)) == pytest.approx(0.55)
    assert float(rate(35)) == pytest.approx(0.1)
    with pytest.raises(ValueError, match=r"warmup_steps=10 .* are 15 steps, .* has 15"):
        optim.schedule(section, num_steps=15)
    shares = optim.schedule(
        config.Optim(
            learning_rate=1.0, final_learning_rate=0.0, warmup_steps=0.25, constant_steps=0.5
        ),
        8,
    )
    assert [float(shares(step)) for step in (1, 2, 6, 7)] == pytest.approx(
        [0.5, 1, 1, 0.5], abs=1e-4
    )
    default = optim.schedule(config.Optim(warmup_steps=0), 10)
    assert [float(default(step)) for step in (0, 10)] == pytest.approx([1e-3, 1e-5])


def ones(settings):
    """Parameters of a ViT, all of them 1."""
    params = nnx.state(shapes(settings, 5, 1), nnx.Param)
    return jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), params)


def test_distances_are_those_of_the_tree_that_is_trained(tiny):
    """An optimiser of Flax passes arrays: the path of "position" ends with that name."""
    settings = small_config(model=config.Model("XS/4", pre_logits=True))
    params = nnx.state(shapes(settings, 5, 1), nnx.Param)
    found = classification.distances(nnx.as_pure(params))
    assert found["position"] == found["token"] == 3
    assert {*jax.tree.leaves(found["blocks"][0])} == {2}
    assert {*jax.tree.leaves([found["head"], found["norm"]])} == {0}


@pytest.mark.thorough
def test_layers_learn_by_their_distance_from_the_head(tiny):
    """Rate and decay of weights, against AdamW alone: 0.5 of it for each layer in between."""
    settings = small_config(model=config.Model("XS/4", pre_logits=True))
    params = ones(settings)
    gradients = params

    def updates(**fields):
        section = config.Optim(weight_decay=0.1, clip_norm=0.0, **fields)
        transform = optim.optimizer(section, lambda step: 0.1, classification.distances)
        return jax.jit(lambda: transform.update(gradients, transform.init(params), params))()[0]

    decayed, plain = (dict(nnx.to_flat_state(updates(**f))) for f in ({"layer_decay": 0.5}, {}))
    distance = {"embed": 3, "position": 3, "token": 3, (0,): 2, (1,): 1}
    distance |= dict.fromkeys(("norm", "pre_logits", "head"), 0)
    seen = set()
    for path, update in decayed.items():
        layer = path[1:2] if path[0] == "blocks" else path[0]
        seen.add(layer)
        np.testing.assert_allclose(
            update[...], plain[path][...] * 0.5 ** distance[layer], rtol=1e-6
        )
    assert seen == set(distance)
    with pytest.raises(ValueError, match="layer_decay must be 1.0: the task of this run does not"):
        optim.optimizer(config.Optim(layer_decay=0.5), lambda step: 0.1).init(params)


def test_b2_is_that_of_adam():
    """After gradients 2 and 0: m = .18 / .19 of its correction, v = b2 (1 - b2) 4 / (1 - b2^2).

    Clipping comes before, so that it divides both alike.
    """
    section = config.Optim(weight_decay=0.0, clip_norm=0.5, b2=0.9)
    transform = optim.optimizer(section, optax.constant_schedule(1.0))
    params = {"bias": jnp.zeros(())}
    state = transform.init(params)
    for gradient in (2.0, 0.0):
        updates, state = transform.update({"bias": jnp.asarray(gradient)}, state, params)
    want = -(0.18 / 0.19) / np.sqrt(0.9 * 0.1 * 4 / 0.19)
    assert float(updates["bias"]) == pytest.approx(want, rel=1e-6)


def test_only_weights_of_linear_maps_decay(tiny):
    params = ones(small_config())
    transform = optim.optimizer(config.Optim(weight_decay=0.1), optax.constant_schedule(1.0))
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(lambda: transform.update(zeros, transform.init(params), params))()
    decayed = {}
    for path, update in nnx.to_flat_state(updates):
        decayed[path] = bool(np.any(np.asarray(update[...]) != 0))
    assert {path[-1] for path, yes in decayed.items() if yes} == {"kernel"}
    assert {path[-1] for path, yes in decayed.items() if not yes} == {"bias", "scale", "position"}


def test_running_mean():
    """Against the recursion in NumPy; the updates pass through."""
    section = config.Optim(ema=0.5, clip_norm=0.0, weight_decay=0.0)
    transform = optim.optimizer(section, optax.constant_schedule(0.1))
    plain = optim.optimizer(config.Optim(clip_norm=0.0, weight_decay=0.0), lambda step: 0.1)
    params = {"w": jnp.asarray([1.0, -2.0])}
    state, bare, mean = transform.init(params), plain.init(params), np.asarray(params["w"])
    for t in range(8):
        gradient = {"w": jnp.asarray([t - 3.0, 1.0])}
        updates, state = transform.update(gradient, state, params)
        want, bare = plain.update(gradient, bare, params)
        np.testing.assert_array_equal(updates["w"], want["w"])
        params = optax.apply_updates(params, updates)
        decay = min(0.5, (1 + t) / (10 + t))
        mean = decay * mean + (1 - decay) * np.asarray(params["w"])
        np.testing.assert_allclose(optax.tree_utils.tree_get(state, "mean")["w"], mean, rtol=1e-6)
