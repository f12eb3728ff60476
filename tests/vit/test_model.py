"""The ViT: shapes, variants, positions, what depends on the seed and what on the coupling."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from performer.nnx import Frequencies, Statistics
from tests.support.small import CALIBRATED, TINY, new_vit, shapes, small_config
from tests.support.tiers import tiers
from vit import config
from vit.model import sincos_positions, z_order

pytestmark = pytest.mark.usefixtures("tiny")
IMAGES = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 1)).astype(np.uint8)


def vit(seed=0, **sections):
    return new_vit(small_config(**sections), seed)


@nnx.jit
def forward(model):
    return model(jnp.asarray(IMAGES))


@pytest.mark.parametrize(
    ("pooling", "position"), tiers([("token", "learned"), ("mean", "sincos")], 0)
)
def test_shapes_and_intermediates(pooling, position):
    model = vit(model=config.Model("XS/2", pooling=pooling, position=position))
    logits, intermediates = forward(model)
    tokens = 16 + (pooling == "token")
    assert logits.shape == (3, 5)
    assert {name: x.shape for name, x in intermediates.items()} == {
        "embedded": (3, tokens, 16),
        "block00/attention_input": (3, tokens, 16),
        "block00/output": (3, tokens, 16),
        "block01/attention_input": (3, tokens, 16),
        "block01/output": (3, tokens, 16),
        "pooled": (3, 16),
    }


@pytest.mark.parametrize(
    ("variant", "millions"),
    tiers([("B/16", 86.4), ("Ti/16", 5.7), ("S/16", 22.0), ("L/16", 304.1)], 1),
)
def test_variants_have_the_published_sizes(variant, millions):
    """Parameters without the head, as published: Ti 5.7 and S 22 (DeiT), B 86 and L 307 (ViT)."""
    settings = small_config(
        model=config.Model(variant, pooling="token"),
        attention=config.Attention(kind="softmax"),  # the parameters are the same
        data=config.Data(image_size=224),
    )
    model = shapes(settings, 1000, 3)
    count = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    head = (config.SIZES[variant.split("/")[0]].width + 1) * 1000
    assert (count - head) / 1e6 == pytest.approx(millions, rel=0.05)


@pytest.mark.thorough
def test_only_the_frequencies_depend_on_coupling_and_kind():
    """Layers and heads have their own, unless heads share them."""
    shared = config.Attention(coupling="iid-antithetic", num_features=4, share_heads=True)
    own = config.Attention(coupling="pm", num_features=8)
    states, frequencies = [], []
    for attention in (own, shared, config.Attention(kind="softmax")):
        model = vit(attention=attention)
        states.append(nnx.state(model, nnx.Param))
        frequencies.append(jax.tree.leaves(nnx.state(model, Frequencies)))
    for other in states[1:]:
        assert jax.tree.structure(states[0]) == jax.tree.structure(other)
        jax.tree.map(np.testing.assert_array_equal, states[0], other)
    shapes = [[x.shape for x in each] for each in frequencies]
    assert shapes == [[(2, 8, 8)] * 2, [(4, 8)] * 2, []]
    assert len({np.asarray(x).tobytes() for x in np.concatenate(frequencies[0])}) == 4


@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (1, 6), (3, 5), (7, 7), (14, 14)])
def test_the_z_order_curve_is_that_of_interleaved_bits(rows, columns):
    """By strings of digits; every place once; of a whole one 16 in a row are a square."""
    order = z_order(rows, columns)
    np.testing.assert_array_equal(np.sort(order), np.arange(rows * columns))
    pairs = [divmod(int(place), columns) for place in order]
    codes = ["".join(a + b for a, b in zip(f"{r:09b}", f"{c:09b}", strict=True)) for r, c in pairs]
    assert codes == sorted(codes)
    if rows == 8:
        for chunk in np.array(pairs).reshape(4, 16, 2):
            assert (np.ptp(chunk, axis=0) == 3).all()


KINDS = {
    "token": config.Model("XS/1", pooling="token"),
    "registers": config.Model("XS/2", pooling="token+mean", position="sincos", registers=2),
}


@pytest.mark.parametrize("kind", tiers(KINDS, ["token"]))
def test_softmax_attention_does_not_see_the_order_that_a_window_wants(kind):
    """Logits and what the head reads, of images of patches that all differ."""
    outputs, side = [], 8 // KINDS[kind].patch_size
    order = z_order(side, side)
    for window in (0, 4):
        attention = config.Attention(kind="softmax", exact_window=window)
        model = vit(model=KINDS[kind], attention=attention)
        model.head.kernel[...] = jax.random.normal(jax.random.key(0), model.head.kernel.shape)
        outputs.append(forward(model))
        np.testing.assert_array_equal(model.order, order if window else np.arange(side**2))
    (logits, plain), (same, ordered) = outputs
    np.testing.assert_allclose(same, logits, rtol=1e-4, atol=1e-4)
    prefix = KINDS[kind].num_prefix
    for name in ("embedded", "block01/output"):
        want = np.concatenate([plain[name][:, :prefix], plain[name][:, prefix + order]], axis=1)
        np.testing.assert_allclose(ordered[name], want, rtol=1e-4, atol=1e-4)


@pytest.mark.thorough
def test_options_of_the_head_and_the_mlp(monkeypatch):
    """scenic's: tanh before the head, classes that are unlikely at first, Glorot's scale."""
    monkeypatch.setitem(config.SIZES, "XS", TINY._replace(depth=1, mlp_dim=2048))
    options = {"mlp_init": "xavier_uniform", "pre_logits": True, "head_bias": -10.0}
    model = vit(model=config.Model("XS/4", pooling="mean", **options))
    logits, passed = forward(model)
    np.testing.assert_array_equal(logits, np.full((3, 5), -10.0))
    layer = model.pre_logits
    pooled = np.asarray(model.norm(passed["block00/output"])).mean(axis=1)
    want = np.tanh(pooled @ layer.kernel[...] + layer.bias[...])
    np.testing.assert_allclose(passed["pooled"], want, rtol=1e-5, atol=1e-6)
    kernel, bias = model.blocks[0].mlp_in.kernel[...], model.blocks[0].mlp_in.bias[...]
    bound = np.sqrt(6 / (16 + 2048))
    assert 0.99 * bound < np.abs(kernel).max() < bound
    assert 0 < np.abs(bias).max() < 1e-5
    plain = vit(model=config.Model("XS/4", pooling="mean"))
    assert np.std(plain.blocks[0].mlp_in.kernel[...]) == pytest.approx(16**-0.5, rel=0.02)
    assert plain.pre_logits is None


@pytest.mark.thorough
def test_tokens_without_a_place_and_what_the_head_reads():
    """Class token and registers stand before the patches, and no mean counts them."""
    options = {"registers": 2, "layer_scale": 0.5, "epsilon": 1e-3, "final_norm": "none"}
    model = vit(model=config.Model("XS/4", pooling="token+mean", **options))
    assert model.blocks[0].attention_norm.epsilon == model.blocks[1].mlp_norm.epsilon == 1e-3
    np.testing.assert_array_equal(model.blocks[0].mlp_scale[...], np.full(16, 0.5))
    assert model.norm is None
    patches = np.random.default_rng(0).normal(size=(3, 4, 16)).astype(np.float32)
    x = np.array(model.with_prefix(jnp.asarray(patches)))
    np.testing.assert_array_equal(x[1, 1:3], model.registers[...])
    assert np.std(x[1, 1:3]) == pytest.approx(0.02, rel=0.5)  # told apart from the start
    np.testing.assert_array_equal(x[:, 3:], patches)
    x[:, :3] = np.arange(3)[:, None]
    mean = patches.mean(axis=1)
    for pooling, want in {
        "token+mean": [np.zeros((3, 16)), mean],
        "token+register": [np.zeros((3, 16)), np.ones((3, 16))],
        "token": [np.zeros((3, 16))],
    }.items():
        model.pooling = pooling
        got = model.pooled(jnp.asarray(x))
        np.testing.assert_allclose(got, np.concatenate(want, axis=-1), rtol=1e-5, atol=1e-6)
    model.pooling, model.has_token = "mean", False
    np.testing.assert_allclose(model.pooled(jnp.asarray(x)), mean, rtol=1e-5, atol=1e-6)


def test_stochastic_depth_has_the_law_of_its_definition(monkeypatch):
    """Block 1 of 3 drops each summand of an example with p / 2, block 2 with p, block 0 none.

    A summand that stays is divided by 1 - p. 4,000 examples: false-alarm rate 6e-7 for each mean.
    """
    monkeypatch.setitem(config.SIZES, "XS", TINY._replace(depth=3))
    settings = small_config(model=config.Model("XS/4", drop_path=0.6, dropout=0.1))
    model, n, ones = new_vit(settings), 4000, jnp.ones((4000, 3, 2))
    assert [block.drop_path.rate for block in model.blocks] == pytest.approx([0, 0.3, 0.6])
    for block, rate in zip(model.blocks, (0.0, 0.3, 0.6), strict=True):
        np.testing.assert_array_equal(block.drop_path(ones), ones)  # in evaluation
        block.drop_path.deterministic = False
        got = np.asarray(block.drop_path(ones))
        assert (got == got[:, :1, :1]).all()  # an example as a whole
        kept = got[:, 0, 0] > 0
        np.testing.assert_allclose(got[kept], 1 / (1 - rate), rtol=1e-6)
        assert abs(kept.mean() - (1 - rate)) <= 5 * np.sqrt(rate * (1 - rate) / n)
    block, x = model.blocks[0], jax.random.normal(jax.random.key(0), (3, 4, 16))
    block.dropout.deterministic = False
    assert not np.allclose(block(x)[0], block(x)[0])  # dropout


def test_sincos_positions_are_distinct_and_of_unit_amplitude():
    table = np.asarray(sincos_positions(4, 16))
    assert table.shape == (16, 16)
    np.testing.assert_allclose(np.sum(table**2, axis=-1), 8, rtol=1e-5)
    distances = np.linalg.norm(table[:, None] - table[None], axis=-1)
    assert distances[~np.eye(16, dtype=bool)].min() > 0.1
    with pytest.raises(ValueError, match="divisible by 4, got 6"):
        sincos_positions(2, 6)


@cache
def gradients(**model):
    """Loss and gradients in training mode, and what the pass left in the model."""
    net = vit(model=config.Model("XS/4", depth=1, dropout=0.1, **model), attention=CALIBRATED)
    net.head.kernel[...] = jax.random.normal(jax.random.key(0), (16, 5))
    net.train()

    @nnx.jit
    def run(net):
        return nnx.value_and_grad(lambda net: jnp.mean(net(jnp.asarray(IMAGES))[0] ** 2))(net)

    loss, grads = run(net)
    return loss, nnx.to_pure_dict(grads), nnx.to_pure_dict(nnx.state(net, Statistics))


@pytest.mark.thorough
def test_remat_changes_nothing_but_memory():
    """Dropout masks and running statistics are those of one pass, not of two."""
    for kept, again in zip(gradients(), gradients(remat=True), strict=True):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), kept, again
        )


@pytest.mark.thorough
def test_bfloat16_is_near_float32_and_leaves_parameters_and_statistics_float32():
    exact, half = gradients(), gradients(dtype="bfloat16")
    assert float(half[0]) == pytest.approx(float(exact[0]), rel=0.05)
    assert float(half[0]) != pytest.approx(float(exact[0]), rel=1e-6)
    for tree in half[1:]:
        assert {x.dtype for x in jax.tree.leaves(tree)} == {jnp.dtype("float32")}
    logits, intermediates = forward(vit(model=config.Model("XS/4", depth=1, dtype="bfloat16")))
    assert logits.dtype == intermediates["pooled"].dtype == jnp.float32
    assert intermediates["block00/output"].dtype == jnp.bfloat16
