"""Published ViT weights become a run: the same function, whole error messages, nothing half done.

The reference is the original network written from its definition in float64 NumPy.
"""

import itertools
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import logsumexp

from tests.small import TINY, sized, small_config
from tests.tiers import tiers
from vit import config, data, pretrained
from vit import weights as published
from vit.model import ViT, random_streams

WIDTH, DEPTH, HEADS, MLP = TINY.width, TINY.depth, TINY.num_heads, TINY.mlp_dim
PATCH, GRID, CLASSES = 4, 2, 10


_tiny = sized(TINY)


def settings(kind="softmax", **sections):
    return small_config(
        attention=config.Attention(kind=kind, num_features=8),
        **sections,
    )


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

    token = pooling == "token"
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
    arrays["Transformer/encoder_norm/scale"] = 1 + draw(WIDTH)
    arrays["Transformer/encoder_norm/bias"] = draw(WIDTH)
    return arrays | {"head/kernel": draw(WIDTH, classes), "head/bias": draw(classes)}


def reference(arrays, images, pooling="token"):
    """Logits of the original network, in either layout, in float64."""
    w = {name: np.asarray(array, np.float64) for name, array in arrays.items()}
    augreg = "Transformer/posembed_input/pos_embedding" in w
    (_, second), attention, mlp = parts("augreg" if augreg else "big_vision")

    def norm(x, name):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
        return x * w[f"{name}/scale"] + w[f"{name}/bias"]

    def dense(x, name):
        return x @ w[f"{name}/kernel"] + w[f"{name}/bias"]

    def gelu(x):
        return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    def attend(x, name):
        q, k, v = (
            np.einsum("tw,whd->thd", x, w[f"{name}/{p}/kernel"]) + w[f"{name}/{p}/bias"]
            for p in ("query", "key", "value")
        )
        logits = np.einsum("thd,shd->hts", q, k) / np.sqrt(WIDTH // HEADS)
        shares = np.exp(logits - logsumexp(logits, axis=-1, keepdims=True))
        out = np.einsum("hts,shd->thd", shares, v)
        return np.einsum("thd,hdw->tw", out, w[f"{name}/out/kernel"]) + w[f"{name}/out/bias"]

    def logits_of(image):
        pixels = image.astype(np.float64) / 127.5 - 1
        patches = [
            np.einsum("ijc,ijcw->w", pixels[y : y + PATCH, x : x + PATCH], w["embedding/kernel"])
            for y in range(0, GRID * PATCH, PATCH)
            for x in range(0, GRID * PATCH, PATCH)
        ]
        x = np.stack(patches) + w["embedding/bias"]
        if augreg:  # the older network concatenates first, then adds positions
            if pooling == "token":
                x = np.concatenate([w["cls"][0], x])
            x = x + w["Transformer/posembed_input/pos_embedding"][0]
        else:
            x = x + w["pos_embedding"][0]
            if pooling == "token":
                x = np.concatenate([w["cls"][0], x])
        for i in range(DEPTH):
            block = f"Transformer/encoderblock_{i}"
            x = x + attend(norm(x, f"{block}/LayerNorm_0"), f"{block}/{attention}")
            hidden = gelu(dense(norm(x, f"{block}/{second}"), f"{block}/{mlp}/Dense_0"))
            x = x + dense(hidden, f"{block}/{mlp}/Dense_1")
        x = norm(x, "Transformer/encoder_norm")
        return dense(x[0] if pooling == "token" else x.mean(0), "head")

    return np.stack([logits_of(image) for image in images])


@pytest.fixture
def file(tmp_path):
    def write(arrays):
        np.savez(tmp_path / "weights.npz", **arrays)
        return tmp_path / "weights.npz"

    return write


IMAGES = np.random.default_rng(1).integers(0, 256, (3, 8, 8, 1)).astype(np.uint8)


def loaded(path):
    """The model of a file, and the lines on it but the first two, of sizes and normalisation."""
    encoder = published.read(path)
    options = pretrained.of_encoder(settings(), encoder)
    model = ViT(options, num_classes=CLASSES, channels=1, rngs=random_streams(0))
    dataset = data.Dataset((), (), tuple(map(str, range(CLASSES))), 1)
    named, lines = pretrained.fitted(encoder, model, dataset)
    return model, [*encoder.lines[2:], *lines, *pretrained.load(model, named, str(path))]


def logits_of(model):
    return model(jnp.asarray(IMAGES))[0]


def params(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


@pytest.mark.parametrize(
    ("pooling", "layout"), tiers(itertools.product(["token", "mean"], ["augreg", "big_vision"]), 2)
)
def test_the_loaded_model_is_the_original_function(file, pooling, layout):
    """Pooling and sizes are the file's, whatever the config says."""
    arrays = weights(pooling, layout)
    model, lines = loaded(file(arrays))
    assert (lines, model.pooling) == ([], pooling)
    want = reference(arrays, IMAGES, pooling)
    np.testing.assert_allclose(logits_of(model), want, rtol=1e-4, atol=1e-5 * np.abs(want).max())


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


@pytest.mark.thorough
def test_a_file_without_positions_has_fixed_ones(file):
    arrays = weights("mean", "big_vision")
    del arrays["pos_embedding"]
    model, lines = loaded(file(arrays))
    assert lines == []
    table = model.position[...][None]
    want = reference(arrays | {"pos_embedding": table}, IMAGES, "mean")
    np.testing.assert_allclose(logits_of(model), want, rtol=1e-4, atol=1e-5 * np.abs(want).max())


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
    assert loaded(file(behind))[1][-1] == "pre_logits/kernel: left out, no place here"


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

    refused(tmp_path / "none.npz", "none.npz cannot be read as an .npz file: .*No such file")
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
