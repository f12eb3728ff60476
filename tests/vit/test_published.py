"""Encoders of transformers and timm: the same function, from files that they wrote themselves.

`tests/support/published` holds tiny ones with random weights, and what PyTorch computes
(`tests/support/make_published.py`).
"""

import json
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

import vit
from tests.support import make_published
from tests.support.small import read_csv, small_config
from tests.support.tiers import tiers
from vit import config, convert, data, evaluate, export, pretrained
from vit import weights as published
from vit.model import ViT, random_streams
from vit.weights import timm

FILES = Path(__file__).parents[1] / "support" / "published"
CLASS_NAMES = tuple(f"class {x}" for x in "abcde")


def filled(x):
    """Zeros, or a key; that no initialisation is compiled."""
    is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key(0) if is_key else jnp.zeros(x.shape, x.dtype)


def made(folder, image_size=0, **sections):
    """The model of a folder for pictures of that size, and the lines on it."""
    encoder = published.read(folder / "model.safetensors")
    options = config.Config(
        attention=config.Attention(kind="softmax"),
        data=config.Data(image_size=image_size or encoder.image_size),
        **sections,
    )
    options = pretrained.of_encoder(options, encoder)
    config.validate(options)
    classes = encoder.metadata.class_names or tuple(map(str, range(5)))
    dataset = data.Dataset((), (), classes, 3)

    def new():
        return ViT(options, num_classes=len(classes), channels=3, rngs=random_streams(0))

    model = nnx.eval_shape(new)
    nnx.update(model, jax.tree.map(filled, nnx.state(model)))
    named, lines = pretrained.fitted(encoder, model, dataset)
    lines += pretrained.load(model, named, "file")
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
    headless = any("head/kernel" in line and "not there" in line for line in lines)
    output = pooled if headless else logits
    return difference(output, want[f"{side}/logits"]), difference(hidden, want[f"{side}/hidden"])


CASES = [f"{name}-{side}" for name in make_published.ENCODERS for side in make_published.TINY.sides]
CORE = ("hf_dinov2-6", "hf_siglip-6", "timm_vit-6", "timm_vit-4")
"""At the size of their positions, and with fewer patches; the others are variants of these."""


@pytest.mark.parametrize("case", tiers(CASES, CORE))
def test_the_function_is_that_of_pytorch(case):
    """In float32, at the size of the positions and at one with fewer patches."""
    name, side = case.split("-")
    assert max(parity(FILES / name, int(side), make_published.TINY)) < 1e-5


ARCHITECTURES = {row["architecture"]: row for row in read_csv(FILES / "timm.csv")}


def is_read(architecture):
    """Return true if timm's architecture is read; an unnamed one is an error."""
    try:
        return bool(timm.fields(architecture, int(ARCHITECTURES[architecture]["width"])))
    except ValueError as error:
        if f"architecture={architecture!r} is not read" not in str(error):
            raise
        return False


def test_architectures_of_timm_have_what_timm_gives_them():
    """Read are 151 of 179 in its vision_transformer.py and deit.py, none of 65 in its eva.py."""
    read = {name: row for name, row in ARCHITECTURES.items() if is_read(name)}
    for name, row in read.items():
        activation = row["activation"].replace("SiLU", "swiglu")
        want = {"num_heads": int(row["heads"]), "epsilon": float(row["epsilon"])}
        assert timm.fields(name, int(row["width"])) == want | {"activation": activation}, name
    modules = [row["module"] for row in read.values()]
    assert Counter(modules) == {"vision_transformer": 135, "deit": 16}


@pytest.mark.slow
def test_every_architecture_of_timm_that_is_read_is_the_same_function(tmp_path):
    """Narrow, with one block; needs the group `published`."""
    for library in ("torch", "timm"):
        pytest.importorskip(library)
    worst = {}
    for name in filter(is_read, ARCHITECTURES):
        heads = int(ARCHITECTURES[name]["heads"])
        size = make_published.Size(8 * heads, 1, heads, 16 * heads, patch=4, sides=(4,))
        make_published.make(name, tmp_path, size)
        worst[name] = max(parity(tmp_path, 4, size))
        assert worst[name] < 1e-5, name
    print(f"{len(worst)} architectures: largest difference {max(worst.values()):.1e}")


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


def original(name):
    return published.read(FILES / name / "model.safetensors")


def beside(name, stem="config"):
    return json.loads((FILES / name / f"{stem}.json").read_text())


def timm_config(architecture="vit_tiny_patch16_224", **arguments):
    config = beside("timm_vit") | {"architecture": architecture}
    return config | {"model_args": config["model_args"] | arguments}


def hf_config(**wrong):
    return beside("hf_vit") | wrong


def without(*names):
    return lambda arrays: {k: x for k, x in arrays.items() if not k.endswith(names)}


def refused(path, message):
    with pytest.raises(ValueError, match=message) as error:
        published.read(path)
    return str(error.value)


UNKNOWN = (
    *("vit_pe_core_tiny_patch16_384", "vit_base_patch16_dinov3", "vit_base_patch16_rpn_224"),
    *("test_vit3", "vit_relpos_base_patch16_224", "eva_giant_patch14_224", ""),
)
ARGUMENTS = {"act_layer": "silu", "pool_include_prefix": True, "norm_layer": "rmsnorm"}
ARGUMENTS |= {"attn_layer": "diff", "global_pool": "avgmax", "unheard_of": 1}
READ = "act_layer of 'gelu', 'gelu_tanh', 'quick_gelu'; pool_include_prefix of False; .*mlp_ratio"
HEADLESS = timm_config()
HEADLESS["model_args"].pop("num_heads")
NORM = {"blocks.1.attn.q_norm.weight": np.ones(8, np.float32)}
NAN = {"norm.bias": np.full(16, np.nan, np.float32)}
CONV = {"conv1.weight": np.zeros((3, 3), np.float32)}
REFUSED = [
    *(
        (dict, timm_config(name), f"architecture='{name}' is not read: read are vit_SIZE")
        for name in UNKNOWN
    ),
    *(
        (dict, hf_config(model_type=kind), f"model_type='{kind}' is not read; read are vit, vit_")
        for kind in ("clip", "siglip2_vision_model", "dinov3_vit")
    ),
    *(
        (dict, timm_config(**{k: x}), f"the argument {k}={x!r} is not read; read are .*{READ}")
        for k, x in ARGUMENTS.items()
    ),
    (dict, None, '(?s)must name the network.*{"architecture": "vit_small_patch14_dinov2", "global'),
    (dict, [1], "config.json is no JSON object"),
    (dict, HEADLESS, "must name num_heads with embed_dim"),
    (lambda _: CONV, timm_config(), r"have no place in this ViT:\n  conv1.weight: \(3, 3\)"),
    (lambda x: x | NORM, timm_config(), r"no place in this ViT:\n  blocks.1.attn.q_norm.weight"),
    (lambda x: x | NAN, timm_config(), r"are no weights:\n  norm.bias: not finite"),
    (without("pos_embed"), timm_config(), "the file holds no ViT: there is no position"),
    (dict, timm_config(num_heads=3), "says 3 heads on a width of 16, the arrays have a width"),
    (dict, timm_config(img_size=[24, 48]), "37 positions, with 1 tokens, are not those of squ"),
    (dict, hf_config(hidden_act="relu"), "hidden_act='relu' is none of gelu"),
]


@pytest.mark.parametrize(("change", "about", "message"), REFUSED)
def test_what_is_refused_says_why(file, change, about, message):
    name = "hf_vit" if about and "model_type" in about else "timm_vit"
    refused(file(name, change, **({} if about is None else {"config": about})), message)


@pytest.mark.parametrize(
    ("name", "array", "missing"),
    [
        ("hf_vit", "layer.1.attention.attention.value.bias", ["value"]),
        ("timm_vit", "blocks.1.attn.qkv.bias", ["key", "query", "value"]),
    ],
)
def test_a_bias_that_one_block_lacks_is_missing(file, name, array, missing):
    """It is not taken for zeros: an encoder without biases lacks them in all blocks."""
    path = file(name, without(array), config=beside(name))
    with pytest.raises(ValueError, match="does not fit the model") as error:
        made(path.parent)
    lines = [f"blocks/1/attention/{x}/bias: (2, 8) here, not there" for x in missing]
    assert [line.strip() for line in str(error.value).splitlines()[1:]] == lines


def test_files_that_cannot_be_read(tmp_path):
    for suffix in (".bin", ".pth", ".pt"):
        refused(tmp_path / f"x{suffix}", "(?s)is a pickle, which can run programs.*torch.load")
    for name, message in [
        ("x.h5", "x.h5 is not read: give a file .safetensors, or .npz"),
        ("model-00001-of-00002.safetensors", "is not read: .*max_shard_size"),
    ]:
        refused(tmp_path / name, f"{name} does not exist: give a file, as model.safetensors, or")
        (tmp_path / name).touch()
        refused(tmp_path / name, message)
    whole = (FILES / "hf_vit" / "model.safetensors").read_bytes()
    (tmp_path / "config.json").write_text(json.dumps(beside("hf_vit")))
    for content in (b"", b"text", b"\xff" * 100, whole[:100], whole[:-10]):
        (tmp_path / "broken.safetensors").write_bytes(content)
        refused(tmp_path / "broken.safetensors", "cannot be read as a file of safetensors")


def test_arguments_of_timm_that_are_read(file):
    """Arguments beside the architecture go before what its name says; training's change nothing."""
    plain = original("timm_vit")
    assert plain.model["variant"] == "B/4"
    assert config.Model(**plain.model).size == config.Size(16, 2, 2, 32)
    for arguments, fields in [
        ({"drop_path_rate": 0.1, "pool_include_prefix": False, "dynamic_img_size": True}, {}),
        ({"act_layer": "gelu_tanh"}, {"activation": "gelu_tanh"}),
        ({"act_layer": "quick_gelu"}, {"activation": "quick_gelu"}),
        ({"num_heads": 4}, {"num_heads": 4}),
    ]:
        encoder = published.read(file("timm_vit", config=timm_config(**arguments)))
        assert encoder.model == plain.model | fields
    clip = timm_config("vit_base_patch16_clip_quickgelu_224", act_layer="gelu")
    encoder = published.read(file("timm_vit", config=clip))
    assert encoder.model == plain.model | {"epsilon": 1e-5}
    older = {k: x for k, x in timm_config().items() if k != "pretrained_cfg"}
    older |= beside("timm_vit")["pretrained_cfg"] | {"label_names": list(CLASS_NAMES)}
    encoder = published.read(file("timm_vit", config=older))  # of one level, before timm 0.8
    assert encoder.model == plain.model
    assert encoder.metadata == plain.metadata._replace(class_names=CLASS_NAMES)


def test_what_config_json_of_transformers_leaves_out_is_the_default_of_its_class(file):
    """SigLIP's published ones say little more than their model_type."""
    said = beside("hf_siglip")
    names = ("model_type", "hidden_size", "num_attention_heads", "image_size")
    sparse = {"model_type": "siglip", "vision_config": {k: said[k] for k in names}}
    assert said["layer_norm_eps"] == 1e-6
    encoder = published.read(file("hf_siglip", config=sparse))
    assert encoder.model == original("hf_siglip").model


@pytest.mark.parametrize("largest", [1, 2])
def test_mean_and_deviation_are_those_beside_the_file(file, largest):
    about = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    about |= {"rescale_factor": largest / 255} if largest > 1 else {}
    path = file("hf_vit", config=beside("hf_vit"), preprocessor_config=about)
    x = np.random.default_rng(0).uniform(0, 1, (4, 4, 3))
    plain = safetensors.numpy.load_file(path)
    kernel = plain["vit.embeddings.patch_embeddings.projection.weight"].transpose(2, 3, 1, 0)
    normalised = (largest * x - about["image_mean"]) / about["image_std"]
    want = np.einsum("ijc,ijcw->w", normalised, kernel)
    want += plain["vit.embeddings.patch_embeddings.projection.bias"]
    arrays = published.read(path).arrays
    got = np.einsum("ijc,ijcw->w", 2 * x - 1, arrays["embed/kernel"]) + arrays["embed/bias"]
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_what_a_run_without_data_sees_of_a_picture(file):
    """The preprocessor's crop and size, in whole patches; timm's share of the picture.

    Sizes without "shortest_edge" squeeze the picture: in old files of DINOv2 a number has one.
    """
    for name, about, want in [
        (
            "hf_dinov2",
            {"size": {"shortest_edge": 32}, "crop_size": {"height": 28}},
            (28, 32, "center"),
        ),
        ("hf_dinov2", {"size": 32, "crop_size": 28}, (28, 32, "center")),
        ("hf_deit", {"size": 32, "crop_size": 28}, (28, 32, "squash")),
        ("hf_siglip", {"size": {"height": 26, "width": 26}}, (24, 26, "squash")),
        ("hf_vit", {"size": 20}, (20, 0, "squash")),
        ("hf_vit", {}, (24, 0, "squash")),
    ]:
        crop = {"do_center_crop": "crop_size" in about}
        options = pretrained.of_encoder(
            None, published.read(file(name, config=beside(name), preprocessor_config=about | crop))
        )
        got = (options.data.image_size, options.data.eval_resize, options.data.eval_crop)
        assert got == want, name
        config.validate(options)
    for mode, want in [("center", "center"), ("squash", "squash"), ("border", "center")]:
        about = timm_config()
        about["pretrained_cfg"] |= {"crop_mode": mode}
        options = pretrained.of_encoder(None, published.read(file("timm_vit", config=about)))
        assert (options.data.image_size, options.data.eval_resize) == (24, 26)  # crop_pct 0.9
        assert options.data.eval_crop == want


def test_another_way_of_resizing_than_the_published_one_is_told(file):
    def told(name, preprocessor, settings=None, **weights):
        about = beside(name)
        if weights:
            about["pretrained_cfg"] |= weights
        encoder = published.read(file(name, config=about, preprocessor_config=preprocessor))
        return pretrained.resizing(encoder, pretrained.of_encoder(settings, encoder).data)

    square = {"size": {"height": 24, "width": 24}}
    here = "both sides to 24, centre of 24"
    assert told("hf_siglip", square) == told("timm_vit", {}) == told("hf_vit", {}) == []
    assert told("hf_vit", square | {"resample": 3}) == []
    for resample in ({}, {"resample": 2}):  # the default of its class, and as published
        assert told("hf_vit", square | resample) == [
            f"pictures as published: {here}, bilinear; here: {here}, bicubic"
        ]
    assert told("hf_siglip", square, small_config(data=config.Data(image_size=24))) == [
        f"pictures as published: {here}, bicubic; here: shorter side to 24, centre of 24, bicubic;"
        " closest: --config.data.eval_crop=squash"
    ]
    (line,) = told("hf_siglip", {"size": 26}, small_config())  # patches of 4
    assert line.endswith(
        "closest: --config.data.image_size=24 --config.data.eval_resize=26"
        " --config.data.eval_crop=squash"
    )
    assert told("timm_vit", {}, crop_mode="border") == [
        "pictures as published: crop mode border to 26, centre of 24, bicubic; here: shorter side"
        " to 26, centre of 24, bicubic"
    ]


def test_half_precision(file):
    exact = original("timm_vit").arrays

    def halved(arrays):
        return {name: x.astype(jnp.bfloat16) for name, x in arrays.items()}

    got = published.read(file("timm_vit", halved, config=beside("timm_vit"))).arrays
    for name, x in exact.items():
        assert got[name].dtype == np.float32
        np.testing.assert_allclose(got[name], x, rtol=2.0**-7, atol=0.02)


def test_a_mean_or_deviation_that_no_pictures_have_is_refused(file):
    half = [0.5] * 3
    for mean, std in [
        ([0.5], [0.5]),
        *((half, [0.5, x, 0.5]) for x in (1e-30, 0.0005, float("nan"))),
        ([127.5] * 3, half),
        (half, [127.5] * 3),
    ]:
        about = {"image_mean": mean, "image_std": std}
        path = file("hf_vit", config=beside("hf_vit"), preprocessor_config=about)
        message = refused(path, r"3 colours from 0 to 1 cannot be normalised by image_mean=\[")
        assert "set in a preprocessor_config.json next to the file" in message
    bare = {"architecture": "vit_tiny_patch16_224", "global_pool": "token"}
    bare |= {"model_args": {"embed_dim": 16, "num_heads": 2}}
    refused(file("timm_vit", config=bare), r"cannot be normalised by image_mean=\(\), image_std=")
    path = file("timm_vit", config=bare | {"mean": half, "std": half})
    arrays = [encoder.arrays for encoder in (published.read(path), original("timm_vit"))]
    jax.tree.map(np.testing.assert_array_equal, *arrays)


def test_grey_pictures_are_those_of_three_equal_colours():
    encoder = original("hf_dinov2")
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
    encoder = original("hf_vit")
    assert encoder.metadata.class_names == CLASS_NAMES
    options = pretrained.of_encoder(None, encoder)
    model = nnx.eval_shape(lambda: ViT(options, num_classes=5, channels=3, rngs=random_streams(0)))
    order = [4, 2, 0, 1, 3]
    other = ("ant", "bee", "cow", "dog", "eel")
    named, lines = pretrained.fitted(encoder, model, data.Dataset((), (), other, 3))
    assert "head/kernel" not in named
    assert "head: new, for its classes have other names; --match=number loads it" in lines[0]
    for names, columns, told in [
        (CLASS_NAMES, [0, 1, 2, 3, 4], []),
        (tuple(CLASS_NAMES[i] for i in order), order, ["sorted as the data's"]),
        (other, [0, 1, 2, 3, 4], ["'class a' for 'ant', its 'class b' for 'bee'"]),
    ]:
        match = "number" if names is other else "name"
        named, lines = pretrained.fitted(encoder, model, data.Dataset((), (), names, 3), match)
        np.testing.assert_array_equal(named["head/bias"], encoder.arrays["head/bias"][columns])
        kernel = encoder.arrays["head/kernel"][:, columns]
        np.testing.assert_array_equal(named["head/kernel"], kernel)
        assert len(lines) == len(told)
        assert all(part in line for part, line in zip(told, lines, strict=True))


@pytest.mark.thorough
def test_a_run_without_data_predicts_with_the_names_of_the_file(tmp_path):
    """It serves all that needs no data; what does says so."""
    folder, workdir = FILES / "hf_dinov2_registers", tmp_path / "run"
    lines = pretrained.pretrained(folder / "model.safetensors", None, workdir)
    assert "width 16, 2 blocks, 2 heads, MLP 64, gelu, patches of 4, pictures of 24" in lines[0]
    trained = vit.load(workdir)
    want = np.load(folder / "reference.npz")
    logits, features = trained.outputs(want["6/images"])
    assert difference(logits, want["6/logits"]) < 1e-5
    assert features.shape == (1, 32)
    assert trained.predict(want["6/images"]).labels == [CLASS_NAMES[np.argmax(want["6/logits"])]]
    program = export.symbolic(trained)
    assert program.in_avals[-1].shape[1:] == (24, 24, 3)
    with pytest.raises(
        ValueError, match="must name a data set: a run of vit.pretrained without data"
    ):
        evaluate.evaluate_run(workdir)
    with pytest.raises(ValueError, match="holds a run already; choose another --workdir"):
        pretrained.pretrained(folder / "model.safetensors", None, workdir)


@pytest.mark.thorough
def test_a_run_on_data_is_evaluated_and_converted(tmp_path):
    """DINOv2 with registers, on grey digits of another size, with a head of its own."""
    softmax, performer = tmp_path / "softmax", tmp_path / "performer"
    options = small_config(
        attention=config.Attention(kind="softmax"), data=config.Data(batch_size=32, image_size=16)
    )
    path = FILES / "hf_dinov2_registers" / "model.safetensors"
    lines = pretrained.pretrained(path, options, softmax)
    assert "position: resampled from 6 x 6 to 4 x 4 patches, bicubic with antialiasing" in lines
    assert evaluate.evaluate_run(softmax)["eval_examples"] == 360
    convert.convert(
        softmax,
        performer,
        coupling=["orf-antithetic"],
        calibration="full",
        num_features=[128],
        draws=1,
        images=64,
    )
    rows = read_csv(performer / "conversion.csv")
    uniform, drawn, calibrated = [float(row["attention error"]) for row in rows[1:]]
    assert calibrated < min(uniform, drawn)
    images = np.random.default_rng(0).integers(0, 256, (4, 16, 16, 1)).astype(np.uint8)
    features = [vit.load(workdir).features(images) for workdir in (softmax, performer)]
    assert 0.9 < np.corrcoef(*map(np.ravel, features))[0, 1] < 1
