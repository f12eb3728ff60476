"""What is on pictures, and where the model looks: the command, and rollout by its definition."""

import csv
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import vit
from tests.support.small import SHALLOW, new_vit, sized, small_config
from vit import config, predict
from vit.model import classification
from vit.reports import rollout

_shallow = sized(SHALLOW)


@pytest.fixture(scope="module")
def workdir(digits_run):
    return digits_run[0]


@pytest.fixture(scope="module")
def model(workdir):
    return vit.load(workdir)


@pytest.fixture
def folder(tmp_path):
    """Three pictures, one of them in a folder within; one that is none; and a text."""
    rng = np.random.default_rng(0)
    (tmp_path / "deep").mkdir()
    for name in ("a.png", "b.JPG", "deep/c.bmp"):
        pixels = rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / name)
    (tmp_path / "broken.png").write_bytes(b"\x89PNG")
    (tmp_path / "notes.txt").write_text("nothing to see")
    return tmp_path


def test_every_readable_picture_is_seen_once_in_order(model, folder, monkeypatch):
    monkeypatch.setattr(predict.use, "LARGEST", 2)
    paths, bad = predict.pictures([folder]), []
    batches = list(predict.predict(model, paths, 3, lambda path, error: bad.append((path, error))))
    seen = [each for batch in batches for each in batch]
    assert [each.path for each in seen] == [p for p in paths if p.name != "broken.png"]
    assert [(path.name, str(error).split(": ")[1]) for path, error in bad] == [
        ("broken.png", "it is none of JPEG, PNG, BMP, GIF, WEBP")
    ]
    alone = model.predict([each.path for each in seen]).top(3)
    for each, expected in zip(seen, alone, strict=True):
        assert [name for name, _ in each.top] == [name for name, _ in expected]
        np.testing.assert_allclose([p for _, p in each.top], [p for _, p in expected], atol=1e-6)


def test_twelve_bits_in_sixteen_are_predicted_as_they_are_prepared(model, tmp_path):
    values = np.random.default_rng(0).integers(0, 2**12, (20, 30)).astype(np.uint16)
    Image.fromarray(values).save(tmp_path / "stored.png")
    expected = model.pixels((values >> 4).astype(np.uint8))
    ((seen,),) = predict.predict(model, [tmp_path / "stored.png"], bits=12)
    np.testing.assert_array_equal(seen.pixels, expected)
    assert model.pixels(tmp_path / "stored.png").max() < 16  # dark


def test_rollout_is_that_of_the_paper():
    """Abnar & Zuidema 2020, eq. 1, by a plain loop in float64; rows are distributions."""
    rng = np.random.default_rng(0)
    matrices = rng.dirichlet(np.ones(5), (3, 2, 4, 5))  # layers, images, heads, rows
    ours = rollout.rollout(jnp.asarray(matrices, jnp.float32))
    for image in range(2):
        expected = np.eye(5)
        for layer in matrices[:, image]:
            expected = (layer.mean(axis=0) / 2 + np.eye(5) / 2) @ expected
        np.testing.assert_allclose(ours[image], expected, atol=1e-6)
    np.testing.assert_allclose(ours.sum(axis=-1), 1, atol=1e-5)


@pytest.mark.thorough
def test_maps_with_a_window_lie_as_the_picture_does():
    """The exact ones are those of the model without one; its own are those of its attention."""
    images = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 1), dtype=np.uint8)
    both = []
    for attention in (config.Attention("softmax"), config.Attention(exact_window=16)):
        shape = config.Model(variant="XS/2", pooling="token")
        model = new_vit(small_config(model=shape, attention=attention))
        both.append(rollout.maps(model, images))
    for seen in (both[1].estimated, both[1].exact):
        np.testing.assert_allclose(seen, both[0].exact, atol=1e-5)


@pytest.mark.thorough
def test_maps_are_of_the_models_own_queries_and_keys(model):
    """The class token's row over the patches; exact from softmax written out, layer by layer."""
    images = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 1), dtype=np.uint8)
    maps = rollout.maps(model.model, images)
    assert maps.estimated.shape == maps.exact.shape == (2, 2, 2)
    assert not np.allclose(maps.estimated, maps.exact, atol=1e-4)
    matrices = []
    for query, key, _ in classification.projections(model.model, {"image": jnp.asarray(images)}):
        products = np.einsum("bthd,bshd->bhts", query, key) / SHALLOW.head_dim**0.5
        matrices.append(np.exp(products) / np.exp(products).sum(axis=-1, keepdims=True))
    row = np.asarray(rollout.rollout(jnp.asarray(np.stack(matrices))))[:, 0, 1:]
    expected = row / row.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(maps.exact.reshape(2, 4), expected, atol=1e-5)
    np.testing.assert_allclose(maps.estimated.sum(axis=(1, 2)), 1, atol=1e-5)


@pytest.fixture
def command(capsys, workdir):
    """The command in this process: what it prints on its two streams."""

    def run(*pictures, csv=None, top=5):
        try:
            predict.main(*pictures, workdir=workdir, top=top, csv=csv)
        finally:
            streams.append(capsys.readouterr())
        return streams[-1]

    streams = run.streams = []
    return run


def test_the_command(command, workdir, folder):
    """Writes the table, names and counts what cannot be read, and says what can be done next."""
    table = folder / "table.csv"
    _, told = command(folder, csv=table, top=2)
    assert told.startswith(f"loading {workdir} and compiling the model\n")
    assert "broken.png cannot be read as an image: it is none of" in told
    assert f"3 pictures -> {table}; 1 could not be read" in told
    assert f"export --workdir={workdir}" in told
    lines = list(csv.reader(table.open()))
    assert lines[0] == ["file", "class 1", "probability 1", "class 2", "probability 2"]
    assert [Path(line[0]).name for line in lines[1:]] == ["a.png", "b.JPG", "c.bmp"]
    before = table.read_bytes()
    with pytest.raises(ValueError, match="table.csv exists already"):
        command(folder, csv=table)
    assert table.read_bytes() == before
    command(folder / "a.png", csv=folder / "all.csv", top=99)
    head = (folder / "all.csv").read_text().splitlines()[0]
    assert head.endswith("class 10,probability 10")  # there are no more
    with pytest.raises(SystemExit, match="1"):
        command(folder / "broken.png")
    said, told = command.streams[-1]
    assert (said, "0 pictures; 1 could not be read" in told) == ("", True)


def test_rows_are_in_the_file_before_the_next_batch(tmp_path):
    with predict.table(tmp_path / "table.csv", 1) as add:
        add([predict.Predicted(Path("a.png"), None, [("cat", 0.5)])])
        lines = (tmp_path / "table.csv").read_text().splitlines()
    assert lines == ["file,class 1,probability 1", "a.png,cat,0.5"]
