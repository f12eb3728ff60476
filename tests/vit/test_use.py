"""A trained run as a thing to use: what it keeps, and what a model says of pictures."""

import io
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

import vit
from tests.support.small import SHALLOW, TRAINED, sized
from vit import config, data, evaluate, use
from vit.model import classification
from vit.prepare import prepare
from vit.run import loop, runs
from vit.storage import files
from vit.task import opened

_shallow = sized(SHALLOW)


@pytest.fixture(scope="module")
def model(digits_run):
    return vit.load(digits_run[0])


def noise(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.thorough
def test_the_model_is_the_evaluated_one_without_its_data(digits_run, monkeypatch):
    """The running mean of the parameters; same accuracy as in the log."""
    workdir, record = digits_run
    records = data.load(TRAINED.data).evaluation
    monkeypatch.setattr(data, "load", None)
    model = vit.load(workdir)
    logits, _ = model.outputs([record["image"] for record in records])
    labels = jnp.asarray([record["label"] for record in records])
    hits = classification.label_rank(jnp.asarray(logits), labels) == 0
    assert float(hits.mean()) == pytest.approx(record["eval_accuracy"])
    assert (model.step, model.channels) == (3, 1)
    assert repr(model) == (
        f"Trained('{workdir}' at step 3: ViT XS/4 (width 16, depth 1, num_heads 2, mlp_dim 32),"
        " performer attention, pm-antithetic, m = 8, 8 x 8 x 1 -> 10 classes)"
    )


@pytest.mark.thorough
def test_sigmoids_are_the_probabilities_of_a_run_that_learned_them(digits_run, model, tmp_path):
    """Those of each class by itself, from the very checkpoint."""
    workdir = shutil.copytree(digits_run[0], tmp_path / "run")
    values = json.loads((workdir / "config.json").read_text())
    values["optim"]["loss"] = "sigmoid"
    files.write(workdir / "config.json", json.dumps(values))
    images = noise(3, 8, 8)
    said, logits = vit.load(workdir).predict(images), model.outputs(images)[0]
    np.testing.assert_allclose(said.probabilities, 1 / (1 + np.exp(-logits)), rtol=1e-5)
    assert said.labels == model.predict(images).labels


@pytest.mark.thorough
def test_a_run_is_evaluated_on_other_data(digits_run, model, tmp_path):
    """Of two of its ten classes, in another order; and on its own data in other batches."""
    workdir, record = digits_run
    own = evaluate.evaluate_on(workdir, {"data.batch_size": 40})
    for name in ("eval_loss", "eval_accuracy", "eval_examples"):
        assert own[name] == pytest.approx(record[name])
    images = {"seven": noise(6, 8, 8, seed=9), "two": noise(6, 8, 8, seed=10)}
    names = ("two", "x", "seven", *"abcdefg")
    values = files.read_json(workdir / "task.json") | {"class_names": list(names)}
    other = shutil.copytree(workdir, tmp_path / "run")
    files.write_json(other / "task.json", values)
    for name, pictures in images.items():
        (tmp_path / "raw" / "train" / name).mkdir(parents=True)
        for i, picture in enumerate(pictures):
            Image.fromarray(picture).save(tmp_path / f"raw/train/{name}/{i}.png")
    prepare(tmp_path / "raw", tmp_path, "few", validation=0.5)
    fields = {"data.name": "few", "data.dir": str(tmp_path), "data.eval_split": "train"}
    got = evaluate.evaluate_on(other, fields | {"data.batch_size": 5})
    records = data.load(config.Data(**{k[5:]: v for k, v in fields.items()}, batch_size=1)).train
    said = vit.load(other).predict([np.array(Image.open(io.BytesIO(r["image"]))) for r in records])
    right = [("seven", "two")[r["label"]] for r in records]
    assert got["eval_examples"] == 6
    assert got["eval_accuracy"] == np.mean(
        [a == b for a, b in zip(said.labels, right, strict=True)]
    )
    losses = [-np.log(p[names.index(n)]) for p, n in zip(said.probabilities, right, strict=True)]
    assert got["eval_loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    with pytest.raises(ValueError, match="2 of the 2 classes of the data are none of the 10 of"):
        evaluate.evaluate_on(workdir, fields)


def test_probabilities_and_names(model):
    images = noise(5, 8, 8)
    said = model.predict(images)
    pixels = jnp.stack([model.pixels(image) for image in images])
    logits, intermediates = nnx.jit(lambda m, x: m(x))(model.model, pixels)
    np.testing.assert_allclose(said.probabilities, jax.nn.softmax(logits), atol=1e-6)
    np.testing.assert_allclose(model.features(images), intermediates["pooled"], atol=1e-5)
    assert said.labels == [str(i) for i in said.probabilities.argmax(axis=1)]
    first = said.top(3)[0]
    assert [p for _, p in first] == sorted(said.probabilities[0], reverse=True)[:3]
    assert first[0][0] == said.labels[0]


def test_images_are_those_of_the_evaluation(model, tmp_path):
    """Of any size, as arrays or files, in colour or grey, and in batches of any number."""
    wide = noise(30, 40, 3)
    Image.fromarray(wide).save(tmp_path / "wide.png")
    record = {"image": (tmp_path / "wide.png").read_bytes(), "label": 0}
    dataset = data.Dataset([], [record], tuple("0123456789"), channels=1)
    expected = next(data.eval_batches(dataset, TRAINED.data))["image"][0]
    np.testing.assert_array_equal(model.pixels(tmp_path / "wide.png"), expected)
    np.testing.assert_array_equal(model.pixels(wide), expected)
    rgba = Image.fromarray(wide).convert("RGBA")
    for orientation, pixels in {2: wide[:, ::-1], 6: np.rot90(wide, -1)}.items():
        exif, upright = Image.Exif(), model.pixels(np.ascontiguousarray(pixels))
        exif[0x0112] = orientation  # mirrored; turned by a quarter
        for name, image in {"turned.png": Image.fromarray(wide), "rgba.png": rgba}.items():
            image.save(tmp_path / name, exif=exif)
            np.testing.assert_array_equal(model.pixels(tmp_path / name), upright)
            np.testing.assert_array_equal(model.pixels(Image.open(tmp_path / name)), upright)
    many = [wide, noise(8, 8), noise(9, 7, 1), *noise(use.LARGEST, 8, 8, seed=1)]
    alone = np.concatenate([model.outputs([image])[0] for image in many[:3]])
    np.testing.assert_allclose(model.outputs(many)[0][:3], alone, atol=1e-5)
    assert model.outputs(many)[0].shape == (3 + use.LARGEST, 10)
    one = model.predict(str(tmp_path / "wide.png"))
    np.testing.assert_allclose(one.probabilities, jax.nn.softmax(alone[:1]), atol=1e-6)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([], "no images are given"),
        (noise(20, 30, 3), r"images have the shape \(20, 30, 3\): give .* one image as \[image\]"),
        (noise(2, 8, 8) / 255, "array of float64: give uint8"),
        ([Image.fromarray(np.float32(noise(8, 8) / 255))], "array of float32: give uint8"),
        ([noise(8, 8, 4)], r"its shape is \(8, 8, 4\): give"),
        (["nowhere.png"], "nowhere.png cannot be read as an image: .*No such file"),
        ([__file__], "test_use.py cannot be read as an image"),
        (["/dev/zero"], "/dev/zero cannot be read as an image: /dev/zero is no file"),
    ],
)
def test_what_is_no_image_is_refused(model, images, message):
    with pytest.raises(ValueError, match=message):
        model.predict(images)


def test_what_cannot_be_loaded_is_named(digits_run, tmp_path):
    """No run, another step, or a run without the names of its classes."""
    assert vit.load(digits_run[0], step=2).step == 2
    with pytest.raises(ValueError, match="has no checkpoint of step 7, but of 2, 3"):
        vit.load(digits_run[0], step=7)
    with pytest.raises(ValueError, match=r"no run \(no config.json\); train one with .*--config="):
        vit.load(tmp_path / "none")
    workdir = shutil.copytree(digits_run[0], tmp_path / "old")
    (workdir / "task.json").unlink()
    with pytest.raises(ValueError, match=r"old has no task.json, which names the classes"):
        vit.load(workdir)
    whole = files.read_json(digits_run[0] / "task.json")
    for changed, message in [
        ({k: x for k, x in whole.items() if k != "channels"}, "task.json lacks 'channels': it was"),
        (whole | {"class_names": "abc"}, "task.json: 'class_names' must be a list"),
        (whole | {"channels": "1"}, "task.json: 'channels' must be a int"),
    ]:
        files.write_json(workdir / "task.json", changed)
        with pytest.raises(ValueError, match=message):
            vit.load(workdir)
    (workdir / "task.json").unlink()
    runs.create_folder(workdir, TRAINED, opened(TRAINED)[0])  # the next start writes it
    assert files.read_json(workdir / "task.json") == files.read_json(digits_run[0] / "task.json")


def test_a_log_of_another_program_is_kept(tmp_path):
    log = tmp_path / "metrics.jsonl"
    log.write_text("theirs")
    with pytest.raises(ValueError, match="metrics.jsonl exists, but no config.json"):
        loop.train(TRAINED, tmp_path)
    assert log.read_text() == "theirs"


def test_other_data_under_the_same_config_are_refused(digits_run, tmp_path):
    """The labels of a data set that was made anew may mean other classes."""
    workdir = tmp_path / "run"
    shutil.copytree(digits_run[0], workdir)
    dataset, _ = opened(TRAINED)
    before = (workdir / "task.json").read_bytes()
    for other, message in [
        (dataset._replace(class_names=tuple("9876543210")), "class_names: "),
        (dataset._replace(train=dataset.train[:-1]), "training examples: 1437 -> 1436"),
        (dataset._replace(evaluation=dataset.train), "evaluation examples: 360 -> 1437"),
    ]:
        with pytest.raises(ValueError, match=f"(?s)holds another run.*{message}"):
            loop.train(TRAINED, workdir, other)
    assert (workdir / "task.json").read_bytes() == before
    newer = json.loads(before) | {"versions": {"jax": "0.1"}}
    files.write_json(workdir / "task.json", newer)
    runs.create_folder(workdir, TRAINED, dataset)  # another version is none
    marked = dataset._replace(fingerprint=lambda: "a")
    runs.create_folder(workdir, TRAINED, marked)  # a run without a fingerprint gets one
    with pytest.raises(ValueError, match="(?s)choose another --wor.* of the data: a -> b"):
        runs.create_folder(workdir, TRAINED, marked._replace(fingerprint=lambda: "b"))
    runs.create_folder(workdir, TRAINED, dataset)
