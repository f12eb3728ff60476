"""The mask of the grid of patches in the Vision Transformer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from performer.graphs import kernels
from tests.graph_examples import masked
from tests.small import new_vit, small_config
from vit import config
from vit.model.grid import GridAttention, grid

HEADS, SIDE, PREFIX = 4, 3, 2
SHALLOW = config.Model("XS/4", pooling="mean", depth=1)


def layer(**options):
    return GridAttention(
        HEADS, SIDE, PREFIX, 8, 4, num_heads=HEADS, rngs=nnx.Rngs(0, frequencies=1), **options
    )


def qkv():
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, (2, PREFIX + SIDE**2, HEADS, 4)) for key in keys]


def test_neighbours_in_the_grid():
    found = np.asarray(grid(3).to_dense())
    for i in range(9):
        for j in range(9):
            apart = abs(i // 3 - j // 3) + abs(i % 3 - j % 3)
            assert found[i, j] == (apart == 1), (i, j)
    assert grid(1).num_nodes == 1


def test_the_mean_mask_is_the_kernel_of_the_grid():
    """Off the diagonal, of 400 draws: 4.5 standard errors are exceeded in 1 of 4,000 runs."""

    @jax.jit
    def draw(key):
        return GridAttention(1, SIDE, 0, 8, 4, rngs=nnx.Rngs(frequencies=key)).matrix[0] - 1  # w^2

    drawn = np.asarray(jax.lax.map(draw, jax.random.split(jax.random.key(3), 400)), np.float64)
    mean, error = drawn.mean(0), drawn.std(0, ddof=1) / 20
    exact = np.asarray(kernels.Diffusion().dense(grid(SIDE)))
    apart = ~np.eye(SIDE**2, dtype=bool)
    assert np.abs((mean - exact) / error)[apart].max() < 4.5


def test_attention_is_that_of_the_weights_times_the_mask():
    attention = layer()
    attention.joined[...] = jnp.linspace(-1, 1, HEADS)
    mask = np.asarray(attention.matrix, np.float64)
    np.testing.assert_allclose(mask[:, :PREFIX, :PREFIX], 1)
    joined = np.exp(np.linspace(-1, 1, HEADS))[:, None, None]
    np.testing.assert_allclose(
        mask[:, :PREFIX, PREFIX:], np.broadcast_to(joined, (HEADS, PREFIX, 9)), rtol=1e-6
    )
    expected = masked(*qkv(), attention.frequencies[...], mask)
    found = nnx.jit(lambda layer, *tokens: layer(*tokens))(attention, *qkv())
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options", [dict(is_causal=True), dict(bias=jnp.ones(())), dict(segment_ids=jnp.ones((2, 11)))]
)
def test_what_an_image_does_not_have_is_refused(options):
    with pytest.raises(ValueError, match="no causal order and no streaming"):
        layer()(*qkv(), **options)


@pytest.mark.thorough
def test_a_vit_learns_its_mask():
    attention = config.Attention(mask="grid", num_features=8)
    model = new_vit(small_config(model=SHALLOW, attention=attention))

    def loss(model):
        return jnp.mean(model(jnp.ones((2, 8, 8, 1)))[0] ** 2)

    model.head.kernel[...] = jnp.ones_like(model.head.kernel[...])
    gradients = nnx.jit(nnx.grad(loss))(model)
    own = gradients["blocks"][0]["attention"]["attention_fn"]
    assert set(own) == {"modulation", "joined"}  # the walks are state
    assert jnp.all(own["modulation"][...] != 0)
    assert jnp.isfinite(own["joined"][...]).all()


@pytest.mark.thorough
def test_alibi_has_a_slope_for_each_head():
    attention = config.Attention(mask="alibi", num_features=8)
    model = new_vit(small_config(model=SHALLOW, attention=attention))
    slopes = model.blocks[0].attention.attention_fn.estimate["alibi_slopes"]
    assert slopes.tolist() == [1 / 4, 1 / 16, 1 / 64, 1 / 256]
