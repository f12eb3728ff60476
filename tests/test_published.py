"""Encoders of transformers and timm: the same function, from files that they wrote themselves.

`tests/published` holds tiny ones with random weights, and what PyTorch computes
(`tests/make_published.py`).
"""

import csv
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

import vit
from tests import make_published
from tests.small import small_config
from vit import config, convert, data, evaluate, export, pretrained
from vit.model import ViT, random_streams
from vit.published import families

FILES = Path(__file__).parent / "published"
CLASS_NAMES = tuple(f"class {x}" for x in "abcde")


def made(folder, image_size=0, **sections):
    """The model of a folder for pictures of that size, and the lines on it."""
    encoder = families.read(folder / "model.safetensors")
    options = config.Config(
        attention=config.Attention(kind="softmax"),
        data=config.Data(image_size=image_size or encoder.image_size),
        **sections,
    )
    options = pretrained.of_encoder(options, encoder)
    config.validate(options)
    classes = encoder.said.class_names or tuple(map(str, range(5)))
    dataset = data.Dataset((), (), classes, 3)

    def new():
        return ViT(options, num_classes=len(classes), channels=3, rngs=random_streams(0))

    model = nnx.jit(new)()
    named, lines = pretrained.fitted(encoder, model, dataset)
    lines += pretrained.load(model, named, "file", {})
    return model, [*encoder.lines, *lines]


@nnx.jit
def computed(model, images):
    """Logits, what the head reads, and the last hidden states."""
    logits, passed = model(images)
    hidden = passed[f"block{len(model.blocks) - 1:02d}/output"]
    normed = model.norm(hidden) if model.final_norm == "before" else hidden
    return logits, passed["pooled"], normed


def difference(got, want):
    """Largest, relative to the largest value."""
    return float(np.abs(np.asarray(got) - want).max() / np.abs(want).max())


def parity(folder, side, size):
    """Relative differences of logits, or what a head would read, and of last hidden states."""
    want = np.load(folder / "reference.npz")
    model, lines = made(folder, side * size.patch)
    logits, pooled, hidden = computed(model, jnp.asarray(want[f"{side}/images"]))
    headless = any("head/kernel" in line and "not in the file" in line for line in lines)
    output = pooled if headless else logits
    return difference(output, want[f"{side}/logits"]), difference(hidden, want[f"{side}/hidden"])


@pytest.mark.parametrize("side", make_published.TINY.sides)
@pytest.mark.parametrize("name", make_published.ENCODERS)
def test_the_function_is_that_of_pytorch(name, side):
    """In float32, at the size of the positions and at one with fewer patches."""
    assert max(parity(FILES / name, side, make_published.TINY)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", make_published.ENCODERS)
def test_the_function_is_that_of_pytorch_at_usual_sizes(name, tmp_path):
    """Twelve blocks of width 192 on pictures of 224 and 160; needs the group `published`."""
    for library in ("torch", "timm", "transformers"):
        pytest.importorskip(library)
    make_published.make(name, tmp_path, make_published.USUAL)
    for side in make_published.USUAL.sides:
        logits, hidden = parity(tmp_path, side, make_published.USUAL)
        print(f"{name} at {16 * side} pixels: logits {logits:.1e}, hidden {hidden:.1e}")
        assert max(logits, hidden) < 1e-5


WITHOUT_JSON = [
    "hf_vit",
    "hf_deit",
    "hf_dinov2_registers",
    "hf_siglip",
    "timm_vit",
    "timm_registers",
    "timm_deit_distilled",
]


@pytest.fixture
def file(tmp_path):
    """A copy of an encoder's file, changed: its arrays, its JSON, or with no JSON at all."""

    def copied(name, change=lambda arrays: arrays, **beside):
        folder = tmp_path / f"{name}{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        arrays = safetensors.numpy.load_file(FILES / name / "model.safetensors")
        safetensors.numpy.save_file(change(dict(arrays)), folder / "model.safetensors")
        for stem, values in beside.items():
            (folder / f"{stem}.json").write_text(json.dumps(values))
        return folder / "model.safetensors"

    return copied


def beside(name, stem="config"):
    return json.loads((FILES / name / f"{stem}.json").read_text())


@pytest.mark.parametrize("name", WITHOUT_JSON)
def test_without_json_it_is_the_same_but_for_the_heads(file, name):
    """Width 16 has one head of 64, by the guess; which is printed, and said otherwise."""
    whole, alone = families.read(FILES / name / "model.safetensors"), families.read(file(name), 2)
    assert alone.model == whole.model
    jax.tree.map(np.testing.assert_array_equal, alone.arrays, whole.arrays)
    guessed = families.read(file(name))
    assert config.Model(**guessed.model).size.num_heads == 1
    assert any(
        "1 heads, as a width of 16 has: num_attention_heads in a config.json, or" in line
        for line in guessed.lines
    )
    assert any("no config.json" in line for line in guessed.lines)


def test_sizes_of_the_table_are_named_by_their_letters():
    """The rest have all numbers in the place of the variant's."""
    encoder = families.read(FILES / "timm_vit" / "model.safetensors")
    assert encoder.model["variant"] == "B/4"
    assert config.Model(**encoder.model).size == config.Size(16, 2, 2, 32)


def test_mean_and_deviation_are_those_beside_the_file(file):
    about = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    path = file("hf_vit", config=beside("hf_vit"), preprocessor_config=about)
    x = np.random.default_rng(0).uniform(0, 1, (4, 4, 3))
    plain = safetensors.numpy.load_file(path)
    kernel = plain["vit.embeddings.patch_embeddings.projection.weight"].transpose(2, 3, 1, 0)
    normalised = (x - about["image_mean"]) / about["image_std"]
    want = np.einsum("ijc,ijcw->w", normalised, kernel)
    want += plain["vit.embeddings.patch_embeddings.projection.bias"]
    arrays = families.read(path).arrays
    got = np.einsum("ijc,ijcw->w", 2 * x - 1, arrays["embed/kernel"]) + arrays["embed/bias"]
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_what_a_run_without_data_sees_of_a_picture(file):
    """The preprocessor's crop and size, in whole patches; timm's share of the picture."""
    for name, about, want in [
        ("hf_dinov2", {"size": {"shortest_edge": 32}, "crop_size": {"height": 28}}, (28, 32)),
        ("hf_siglip", {"size": {"height": 26, "width": 26}}, (24, 26)),
        ("hf_vit", {"size": 20}, (20, 0)),
        ("hf_vit", {}, (24, 0)),
    ]:
        crop = {"do_center_crop": "crop_size" in about}
        options = pretrained.of_encoder(
            None, families.read(file(name, config=beside(name), preprocessor_config=about | crop))
        )
        assert (options.data.image_size, options.data.eval_resize) == want, name
        config.validate(options)
    timm = pretrained.of_encoder(None, families.read(FILES / "timm_vit" / "model.safetensors"))
    assert (timm.data.image_size, timm.data.eval_resize) == (24, 26)  # crop_pct 0.9


def test_half_precision(file):
    exact = families.read(FILES / "timm_vit" / "model.safetensors").arrays

    def halved(arrays):
        return {name: x.astype(jnp.bfloat16) for name, x in arrays.items()}

    got = families.read(file("timm_vit", halved, config=beside("timm_vit"))).arrays
    for name, x in exact.items():
        assert got[name].dtype == np.float32
        np.testing.assert_allclose(got[name], x, rtol=2.0**-7, atol=0.02)


def without(*names):
    return lambda arrays: {k: x for k, x in arrays.items() if not k.endswith(names)}


def test_what_is_refused_says_why(file, tmp_path):
    def refused(path, message, num_heads=0):
        with pytest.raises(ValueError, match=message):
            families.read(path, num_heads)

    for suffix in (".bin", ".pth", ".pt"):
        refused(tmp_path / f"x{suffix}", "(?s)is a pickle, which can run programs.*torch.load")
    refused(tmp_path / "x.h5", "x.h5 is not read: give a file .safetensors, or .npz")
    refused(tmp_path / "model-00001-of-00002.safetensors", "one part of several.*max_shard_size")
    whole = (FILES / "hf_vit" / "model.safetensors").read_bytes()
    for content in (b"", b"text", b"\xff" * 100, whole[:100], whole[:-10]):
        (tmp_path / "broken.safetensors").write_bytes(content)
        refused(tmp_path / "broken.safetensors", "cannot be read as a file of safetensors")
    os.mkfifo(tmp_path / "fifo.safetensors")
    refused(tmp_path / "fifo.safetensors", "is no regular file")

    other = {"conv1.weight": np.zeros((3, 3), np.float32)}
    refused(file("hf_vit", lambda _: other), "none of the encoders that are read.*conv1.weight")
    norm = {"blocks.1.attn.q_norm.weight": np.ones(8, np.float32)}
    refused(
        file("timm_vit", lambda x: x | norm),
        r"no place in this ViT:\n  blocks.1.attn.q_norm.weight",
    )
    nan = {"norm.bias": np.full(16, np.nan, np.float32)}
    refused(file("timm_vit", lambda x: x | nan), r"are no weights:\n  norm.bias: not finite")
    refused(file("timm_vit"), "width of 16 is not divided by 3 heads: set --config.model.num_", 3)
    refused(file("timm_vit", without("pos_embed")), "the file holds no ViT: there is no position")
    refused(
        file("timm_vit", config=beside("timm_vit") | {"global_pool": "max"}),
        "global_pool='max' is none of token, avg, map",
    )
    wrong = beside("hf_vit") | {"hidden_act": "relu"}
    refused(file("hf_vit", config=wrong), "hidden_act='relu' is none of gelu")
    wrong = beside("hf_vit") | {"hidden_size": 32}
    refused(file("hf_vit", config=wrong), "hidden_size is 32, that of the arrays 16")
    refused(file("hf_vit", config=[1]), "config.json is no JSON object")
    refused(
        file("hf_vit", preprocessor_config={"image_mean": [0.5], "image_std": [0.5]}),
        "of pictures with 3 colours: set image_mean and image_std",
    )


def test_an_array_that_is_missing_is_named(file, tmp_path):
    path = file("timm_vit", without("blocks.1.mlp.fc1.bias"), config=beside("timm_vit"))
    with pytest.raises(ValueError, match=r"blocks/1/mlp_in/bias: \(32,\) here, not in the file"):
        pretrained.pretrained(path, None, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_grey_pictures_are_those_of_three_equal_colours():
    encoder = families.read(FILES / "hf_dinov2" / "model.safetensors")
    options = pretrained.of_encoder(None, encoder)
    arrays = {}
    for channels in (1, 3):
        dataset = data.Dataset((), (), CLASS_NAMES, channels)
        model = nnx.eval_shape(
            lambda c=channels: ViT(options, num_classes=5, channels=c, rngs=random_streams(0))
        )
        arrays[channels], _ = pretrained.fitted(encoder, model, dataset)
    grey = np.random.default_rng(0).uniform(-1, 1, (4, 4, 1))
    got = np.einsum("ijc,ijcw->w", grey, arrays[1]["embed/kernel"])
    want = np.einsum("ijc,ijcw->w", grey.repeat(3, axis=-1), arrays[3]["embed/kernel"])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_classes_of_another_order_are_sorted():
    encoder = families.read(FILES / "hf_vit" / "model.safetensors")
    assert encoder.said.class_names == CLASS_NAMES
    options = pretrained.of_encoder(None, encoder)
    model = nnx.eval_shape(lambda: ViT(options, num_classes=5, channels=3, rngs=random_streams(0)))
    order = [4, 2, 0, 1, 3]
    for names, columns, told in [
        (CLASS_NAMES, [0, 1, 2, 3, 4], []),
        (tuple(CLASS_NAMES[i] for i in order), order, ["sorted as those of the data"]),
        (("ant", "bee", "cow", "dog", "eel"), [0, 1, 2, 3, 4], ["its 'class a' for 'ant'"]),
    ]:
        named, lines = pretrained.fitted(encoder, model, data.Dataset((), (), names, 3))
        np.testing.assert_array_equal(named["head/bias"], encoder.arrays["head/bias"][columns])
        kernel = encoder.arrays["head/kernel"][:, columns]
        np.testing.assert_array_equal(named["head/kernel"], kernel)
        assert len(lines) == len(told)
        assert all(part in line for part, line in zip(told, lines, strict=True))


def test_a_run_without_data_predicts_with_the_names_of_the_file(tmp_path):
    """It serves all that needs no data; what does says so."""
    folder, workdir = FILES / "hf_dinov2_registers", tmp_path / "run"
    lines = pretrained.pretrained(folder / "model.safetensors", None, workdir)
    assert "2 heads, as config.json or the flag says" in lines
    trained = vit.load(workdir)
    want = np.load(folder / "reference.npz")
    logits, features = trained.outputs(want["6/images"])
    assert difference(logits, want["6/logits"]) < 1e-5
    assert features.shape == (1, 32)
    assert trained.predict(want["6/images"]).labels == [CLASS_NAMES[np.argmax(want["6/logits"])]]
    arrays, call = export.as_function(trained)
    program = export.symbolic(trained, arrays, call, beside=True)
    assert program.in_avals[-1].shape[1:] == (24, 24, 3)
    with pytest.raises(ValueError, match="must name a data set: without one a run"):
        evaluate.evaluate_run(workdir)
    with pytest.raises(ValueError, match="holds a run already; take another --workdir"):
        pretrained.pretrained(folder / "model.safetensors", None, workdir)


def test_a_file_without_a_head_gives_features(tmp_path):
    folder, workdir = FILES / "hf_siglip", tmp_path / "run"
    lines = pretrained.pretrained(folder / "model.safetensors", None, workdir)
    assert "head/kernel: (16, 1) left at its initialisation, not in the file" in lines
    trained = vit.load(workdir)
    assert trained.class_names == (pretrained.NO_HEAD,)
    want = np.load(folder / "reference.npz")
    assert difference(trained.features(want["6/images"]), want["6/logits"]) < 1e-5


def test_a_run_on_data_is_evaluated_and_converted(tmp_path):
    """DINOv2 with registers, on grey digits of another size, with a head of its own."""
    softmax, performer = tmp_path / "softmax", tmp_path / "performer"
    options = small_config(
        attention=config.Attention(kind="softmax"),
        data=config.Data(batch_size=32, image_size=16),
    )
    path = FILES / "hf_dinov2_registers" / "model.safetensors"
    lines = pretrained.pretrained(path, options, softmax)
    assert "position: resampled from 6 x 6 to 4 x 4 patches, with antialiasing" in lines
    assert evaluate.evaluate_run(softmax)["eval_examples"] == 360
    convert.convert(
        softmax,
        performer,
        names=["orf-antithetic"],
        method="full",
        num_features=[128],
        draws=1,
        images=64,
    )
    with (performer / "conversion.csv").open() as table:
        uniform, drawn, calibrated = [float(r["attention error"]) for r in csv.DictReader(table)][
            1:
        ]
    assert calibrated < min(uniform, drawn)
    images = np.random.default_rng(0).integers(0, 256, (4, 16, 16, 1)).astype(np.uint8)
    features = [vit.load(workdir).features(images) for workdir in (softmax, performer)]
    assert 0.9 < np.corrcoef(*map(np.ravel, features))[0, 1] < 1
    assert evaluate.evaluate_run(performer)["eval_examples"] == 360
