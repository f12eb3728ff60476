"""Published ViT weights become a run: whole error messages, nothing half done.

That the network is the same function is tested against PyTorch in `test_published.py`.
"""

import dataclasses
import itertools
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy import ndimage, special

from tests.support.small import TINY, sized, small_config
from tests.support.tiers import tiers
from vit import config, data, pretrained
from vit import weights as published
from vit.model import ViT, random_streams, sincos_positions
from vit.weights import transfer

WIDTH, DEPTH, HEADS, MLP = TINY.width, TINY.depth, TINY.num_heads, TINY.mlp_dim
PATCH, GRID, CLASSES = 4, 2, 10


_tiny = sized(TINY)


def settings(kind="softmax", **sections):
    return small_config(attention=config.Attention(kind=kind, num_features=8), **sections)


def parts(layout):
    """Names of the norms, the attention and the MLP of a block."""
    if layout == "augreg":
        norms = ("LayerNorm_0", "LayerNorm_2")
        return norms, "MultiHeadDotProductAttention_1", "MlpBlock_3"
    return ("LayerNorm_0", "LayerNorm_1"), "MultiHeadDotProductAttention_0", "MlpBlock_0"


def weights(pooling="token", layout="augreg", classes=CLASSES, depth=DEPTH):
    """Random arrays, none of them near its initialisation."""
    rng = np.random.default_rng(0)
    augreg = layout == "augreg"
    norms, attention, mlp = parts(layout)

    def draw(*shape):
        return rng.normal(0, 0.5, shape).astype(np.float32)

    token = pooling.startswith("token")
    arrays = {"embedding/kernel": draw(PATCH, PATCH, 1, WIDTH), "embedding/bias": draw(WIDTH)}
    if token:
        arrays["cls"] = draw(1, 1, WIDTH)
    position = draw(1, GRID**2 + (token and augreg), WIDTH)
    arrays["Transformer/posembed_input/pos_embedding" if augreg else "pos_embedding"] = position
    shapes = {f"{attention}/out": (HEADS, WIDTH // HEADS, WIDTH)}
    for name in ("query", "key", "value"):
        shapes[f"{attention}/{name}"] = (WIDTH, HEADS, WIDTH // HEADS)
    shapes |= {f"{mlp}/Dense_0": (WIDTH, MLP), f"{mlp}/Dense_1": (MLP, WIDTH)}
    for i in range(depth):
        block = f"Transformer/encoderblock_{i}"
        for norm in norms:
            arrays[f"{block}/{norm}/scale"] = 1 + draw(WIDTH)
            arrays[f"{block}/{norm}/bias"] = draw(WIDTH)
        for name, shape in shapes.items():
            arrays[f"{block}/{name}/kernel"] = draw(*shape)
            bias = shape[1:] if len(shape) < 3 or shape[0] == WIDTH else shape[2:]
            arrays[f"{block}/{name}/bias"] = draw(*bias)
    if pooling == "attention":
        block = "Transformer/encoderblock_0"
        pool = [name for name in arrays if block in name and "LayerNorm_1" not in name]
        arrays |= {name.replace(block, "MAPHead_0"): arrays[name] + 0.1 for name in pool}
        arrays["MAPHead_0/probe"] = draw(1, 1, WIDTH)
    if pooling == "token, pre_logits":
        arrays |= {"pre_logits/kernel": draw(WIDTH, WIDTH), "pre_logits/bias": draw(WIDTH)}
    arrays["Transformer/encoder_norm/scale"] = 1 + draw(WIDTH)
    arrays["Transformer/encoder_norm/bias"] = draw(WIDTH)
    return arrays | {"head/kernel": draw(WIDTH, classes), "head/bias": draw(classes)}


MINE = {
    **{f"embed/{leaf}": f"embedding/{leaf}" for leaf in ("kernel", "bias")},
    **{f"norm/{leaf}": f"Transformer/encoder_norm/{leaf}" for leaf in ("scale", "bias")},
    **{name: name for name in ("head/kernel", "head/bias")},
}
"""Our names outside of the blocks -> theirs."""


def of_block(number, layout):
    """The same of a block."""
    (first, second), attention, mlp = parts(layout)
    places = {"attention_norm": first, "mlp_norm": second}
    places |= {f"attention/{x}": f"{attention}/{x}" for x in ("query", "key", "value", "out")}
    places |= {"mlp_in": f"{mlp}/Dense_0", "mlp_out": f"{mlp}/Dense_1"}
    return {
        f"blocks/{number}/{ours}/{leaf}": f"Transformer/encoderblock_{number}/{theirs}/{leaf}"
        for ours, theirs in places.items()
        for leaf in (("scale" if "norm" in ours else "kernel"), "bias")
    }


@pytest.fixture
def file(tmp_path):
    def write(arrays):
        np.savez(tmp_path / "weights.npz", **arrays)
        return tmp_path / "weights.npz"

    return write


def loaded(path):
    """The model of a file, and the lines on it but the first two, of sizes and normalisation."""
    encoder = published.read(path)
    options = pretrained.of_encoder(settings(), encoder)
    model = ViT(options, num_classes=CLASSES, channels=1, rngs=random_streams(0))
    dataset = data.Dataset((), (), tuple(map(str, range(CLASSES))), 1)
    named, lines = pretrained.fitted(encoder, model, dataset)
    return model, [*encoder.lines[2:], *lines, *pretrained.load(model, named, str(path))]


def params(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


@pytest.mark.parametrize(
    ("pooling", "layout"), tiers(itertools.product(["token", "mean"], ["augreg", "big_vision"]), 2)
)
def test_the_arrays_are_those_of_the_file(file, pooling, layout):
    """Pooling and sizes, too; the older layout adds a position to the class token."""
    arrays = weights(pooling, layout)
    model, lines = loaded(file(arrays))
    assert (lines, model.pooling) == ([], pooling)
    said = published.read(file(arrays)).model
    want = {"variant": "XS/4", "pooling": pooling, "position": "learned", "final_norm": "before"}
    assert said | want | {"activation": "gelu_tanh", "epsilon": 1e-6, "pre_logits": False} == said
    position = next(x[0] for name, x in arrays.items() if name.endswith("pos_embedding"))
    names = MINE | of_block(0, layout) | of_block(1, layout)
    want = {ours: arrays[theirs] for ours, theirs in names.items()}
    want["position"] = position[-(GRID**2) :]
    if pooling == "token":
        want["token"] = arrays["cls"][0, 0] + (position[0] if layout == "augreg" else 0)
    got = {name: x[...] for name, x in transfer.parameters(model).items()}
    assert set(got) == set(want)
    for name, x in want.items():
        np.testing.assert_allclose(got[name], x, rtol=1e-6, err_msg=name)


def by_hand(arrays, pooling, layout, images):
    """Logits as the library of the file computes them, in float64, by the names of the file."""
    arrays = {name: x.astype(np.float64) for name, x in arrays.items()}
    norms, attention, mlp = parts(layout)

    def dense(x, name):
        return x @ arrays[f"{name}/kernel"] + arrays[f"{name}/bias"]

    def norm(x, name):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
        return x * arrays[f"{name}/scale"] + arrays[f"{name}/bias"]

    def attend(x, y, name):
        def heads(z, part):
            kernel, bias = (arrays[f"{name}/{part}/{leaf}"] for leaf in ("kernel", "bias"))
            return np.einsum("bsw,whd->bhsd", z, kernel) + bias[:, None]

        logits = heads(x, "query") @ heads(y, "key").swapaxes(2, 3) / np.sqrt(WIDTH // HEADS)
        rows = special.softmax(logits, axis=-1) @ heads(y, "value")
        out = np.einsum("bhsd,hdw->bsw", rows, arrays[f"{name}/out/kernel"])
        return out + arrays[f"{name}/out/bias"]

    def perceptron(x, name):
        x = dense(x, f"{name}/Dense_0")
        x = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
        return dense(x, f"{name}/Dense_1")

    b, side = len(images), images.shape[1] // PATCH
    pixels = (images / 127.5 - 1).reshape(b, side, PATCH, side, PATCH, 1)
    x = np.einsum("byixjc,ijcw->byxw", pixels, arrays["embedding/kernel"])
    x = x.reshape(b, side**2, WIDTH) + arrays["embedding/bias"]
    position = next(p[0] for name, p in arrays.items() if name.endswith("pos_embedding"))
    grid = position[-(GRID**2) :].reshape(GRID, GRID, WIDTH)
    grid = ndimage.zoom(grid, (side / GRID, side / GRID, 1), order=1)
    x = x + grid.reshape(side**2, WIDTH)
    if "cls" in arrays:
        token = arrays["cls"] + (position[0] if layout == "augreg" else 0)
        x = np.concatenate([np.tile(token, (b, 1, 1)), x], axis=1)
    for i in range(DEPTH):
        block = f"Transformer/encoderblock_{i}"
        normed = norm(x, f"{block}/{norms[0]}")
        x = x + attend(normed, normed, f"{block}/{attention}")
        x = x + perceptron(norm(x, f"{block}/{norms[1]}"), f"{block}/{mlp}")
    x = norm(x, "Transformer/encoder_norm")
    if pooling == "attention":
        y = attend(np.tile(arrays["MAPHead_0/probe"], (b, 1, 1)), x, f"MAPHead_0/{attention}")
        x = y + perceptron(norm(y, "MAPHead_0/LayerNorm_0"), f"MAPHead_0/{mlp}")
    x = x.mean(axis=1) if pooling == "mean" else x[:, 0]
    if "pre_logits/kernel" in arrays:
        x = np.tanh(dense(x, "pre_logits"))
    return dense(x, "head")


FORMS = [
    ("token", "augreg"),
    ("token, pre_logits", "augreg"),
    *((pooling, "big_vision") for pooling in ("token", "mean", "attention")),
]


@pytest.mark.parametrize(("side", "form"), tiers(itertools.product((5, GRID), FORMS), 6))
def test_the_function_is_that_of_the_library(file, form, side):
    """A run without a config, at a size whose positions are resampled and at the file's own."""
    arrays = weights(*form)
    images = np.random.default_rng(1).integers(0, 256, (3, *[side * PATCH] * 2, 1))
    encoder = published.read(file(arrays))
    options = pretrained.of_encoder(None, encoder)
    options = dataclasses.replace(options, data=config.Data(image_size=side * PATCH))
    model = ViT(options, num_classes=CLASSES, channels=1, rngs=random_streams(0))
    dataset = data.Dataset((), (), tuple(map(str, range(CLASSES))), 1)
    named, lines = pretrained.fitted(encoder, model, dataset)
    pretrained.load(model, named, "file", needs_head=True)
    told = f"position: resampled from 2 x 2 to {side} x {side} patches, linear with aligned corners"
    assert lines == [told] * (side != GRID)
    got = nnx.jit(lambda model, x: model(x)[0])(model, jnp.asarray(images, jnp.uint8))
    want = by_hand(arrays, *form, images)
    assert abs(got - want).max() < 1e-5 * abs(want).max()


def test_a_run_without_data_never_loses_the_head_of_its_file(file, tmp_path):
    """Its logits would all be 0."""
    strange = weights() | {"expander/kernel": np.eye(WIDTH)}
    message = r"a head behind layers that this ViT lacks \(expander/kernel\): give --config"
    with pytest.raises(ValueError, match=message):
        pretrained.pretrained(file(strange), None, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    pooled = weights("attention", "big_vision")
    pooled["MAPHead_0/MultiHeadDotProductAttention_0/query/kernel"] = np.zeros((WIDTH, 1, WIDTH))
    with pytest.raises(ValueError, match=r"MAPHead_0 has queries \(16, 1, 16\), the blocks have"):
        published.read(file(pooled))


@pytest.mark.thorough
def test_prefixes_and_stacked_blocks_are_the_same_weights(file):
    arrays = weights(layout="big_vision")
    plain = params(loaded(file(arrays))[0])
    stacked = {name: x for name, x in arrays.items() if "encoderblock" not in name}
    for name in arrays:
        if "encoderblock_0" in name:
            layers = [arrays[name.replace("_0/", f"_{i}/", 1)] for i in range(DEPTH)]
            stacked[name.replace("encoderblock_0", "encoderblock")] = np.stack(layers)
    beside = {"opt/0/mu/head/bias": np.full(3, np.nan), "opt/0/count": np.array(5)}
    target = {f"opt/target/{n}": x for n, x in arrays.items()} | {"opt/state/step": np.array(3)}
    for variant, told in [
        (stacked, []),
        ({f"params/{n}": x for n, x in stacked.items()} | beside, ["opt: 2 arrays left out"]),
        (target, ["opt: 1 arrays left out"]),
        (arrays | beside, ["opt: 2 arrays left out"]),
    ]:
        model, lines = loaded(file(variant))
        assert lines == told
        jax.tree.map(np.testing.assert_array_equal, params(model), plain)


def test_a_file_without_positions_has_fixed_ones(file):
    arrays = weights("mean", "big_vision")
    del arrays["pos_embedding"]
    model, lines = loaded(file(arrays))
    assert lines == []
    np.testing.assert_array_equal(model.position[...], sincos_positions(GRID, WIDTH))


@pytest.mark.thorough
def test_a_head_that_cannot_be_used_stays_fresh_and_is_told(file):
    told = "head/kernel: (16, 10) new, "
    more = weights(classes=21)
    behind = weights() | {"pre_logits/kernel": np.eye(WIDTH), "pre_logits/bias": np.zeros(WIDTH)}
    headless = {name: array for name, array in weights().items() if "head/" not in name}
    for arrays, line in [
        (more, told + "(16, 21) there"),
        (behind, told + "(16, 10) there"),  # its input was another
        (headless, told + "not there"),
    ]:
        model, lines = loaded(file(arrays))
        assert line in lines
        assert not np.any(model.head.kernel[...])
        np.testing.assert_array_equal(model.norm.bias[...], arrays["Transformer/encoder_norm/bias"])
    assert loaded(file(behind))[1][-2:] == [
        "pre_logits/kernel: left out, no place here",
        "head: new, for it follows pre_logits; --config.model.pre_logits=True keeps both",
    ]


def test_all_that_does_not_fit_is_listed_at_once(file, tmp_path):
    arrays = weights()
    del arrays["Transformer/encoderblock_0/LayerNorm_0/scale"]
    del arrays["head/bias"]
    arrays["Transformer/encoderblock_1/MlpBlock_3/Dense_0/kernel"] = np.zeros((WIDTH, MLP + 1))
    with pytest.raises(ValueError, match="does not fit the model") as error:
        pretrained.pretrained(file(arrays), settings(), tmp_path / "run")
    lines = [line.strip() for line in str(error.value).splitlines()[1:]]
    assert lines == [
        "blocks/0/attention_norm/scale: (16,) here, not there",
        "blocks/1/mlp_in/kernel: (16, 32) here, (16, 33) there",
        "head/bias: (10,) here, not there",
        "head/kernel: (16, 10) here, (16, 10) there",
    ]
    assert not (tmp_path / "run").exists()


def test_files_that_are_no_weights(file, tmp_path):
    def refused(path, message):
        with pytest.raises(ValueError, match=message):
            pretrained.pretrained(path, settings(), tmp_path / "run")
        assert not (tmp_path / "run").exists()

    refused(tmp_path / "none.npz", "none.npz does not exist: give a file, as model.safetensors")
    refused(tmp_path, "is a folder: give a file in it, as model.safetensors, or OWNER/NAME of a")
    whole = file(weights()).read_bytes()
    broken = tmp_path / "broken.npz"
    for content in (b"", b"text", whole[: len(whole) // 2], whole[:4]):
        broken.write_bytes(content)
        refused(broken, "broken.npz cannot be read as an .npz file")
    flipped = bytearray(whole)
    with zipfile.ZipFile(file(weights())) as archive:
        start = archive.getinfo("Transformer/encoderblock_1/MlpBlock_3/Dense_0/kernel.npy")
    at = start.header_offset + 400
    flipped[at : at + 8] = bytes(255 - b for b in flipped[at : at + 8])
    broken.write_bytes(flipped)
    refused(broken, "encoderblock_1/MlpBlock_3/Dense_0/kernel in .*broken.npz cannot be read")
    np.save(tmp_path / "one.npy", np.zeros(3))
    refused(tmp_path / "one.npy", "one.npy is not read: give a file .safetensors, or .npz")
    refused(file({"a": np.zeros(3)}), "holds no ViT: there is no embedding/kernel")
    double = weights() | {"pos_embedding": np.zeros((1, 5, 16))}
    refused(file(double), "is one of two arrays in the place of position")
    odd = weights() | {"Transformer/encoderblock_0/LayerNorm_3/scale": np.ones(16)}
    refused(file(odd), r"no place in this ViT:\n  Transformer/encoderblock_0/LayerNorm_3/scale")
    cut = weights() | {"Transformer/posembed_input/pos_embedding": np.zeros((1, 7, WIDTH))}
    refused(file(cut), "7 positions, with 1 tokens, are not those of square pictures")
    with zipfile.ZipFile(file({k: x for k, x in weights().items() if k != "cls"}), "a") as archive:
        archive.writestr("cls", b"text")
    refused(tmp_path / "weights.npz", r"cls: of type \|S4")
    pickled = np.array([{}], dtype=object)
    refused(file(weights() | {"head/bias": pickled}), "head/bias in .*Object arrays cannot")


def test_values_that_are_no_weights_are_named(file):
    arrays = weights()
    arrays["cls"][0, 0, 3] = np.nan
    arrays["head/bias"] = np.full(CLASSES, 1e300)
    arrays["embedding/bias"] = np.arange(WIDTH)
    with pytest.raises(ValueError, match="that are no weights") as error:
        published.read(file(arrays))
    assert [line.strip() for line in str(error.value).splitlines()[1:]] == [
        "embedding/bias: of type int64",
        "cls: not finite",
        "head/bias: not finite",
    ]
