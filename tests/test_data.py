"""Data: the digits, the stream of batches and its position, evaluation of every example once."""

import numpy as np
import pytest
from PIL import Image

from tests.small import small_config
from vit import augment, config, data


@pytest.fixture(scope="module")
def digits():
    return data.load(config.Data())


def test_digits_are_split_without_overlap(digits):
    assert (len(digits.train), len(digits.evaluation)) == (1437, 360)
    train, evaluation = (
        {r["image"].tobytes() for r in split} for split in (digits.train, digits.evaluation)
    )
    assert not train & evaluation
    labels = np.array([r["label"] for r in digits.evaluation])
    assert np.bincount(labels).min() >= 34
    assert np.array_equal(digits.train[5]["image"], data.load(config.Data()).train[5]["image"])


def take(dataset, section, seed, n, start=None):
    iterator = iter(data.train_batches(dataset, section, seed))
    if start is not None:
        iterator.set_state(start)
    return [next(iterator) for _ in range(n)], iterator


def test_stream_is_deterministic_and_depends_on_the_seed(digits):
    section = small_config().data
    (a, _), (b, _), (c, _) = (take(digits, section, seed, 3) for seed in (0, 0, 1))
    for x, y in zip(a, b, strict=True):
        assert np.array_equal(x["image"], y["image"])
    assert not np.array_equal(a[0]["image"], c[0]["image"])
    assert a[0]["image"].shape == (32, 8, 8, 1)
    assert a[0]["image"].dtype == np.uint8


def test_stream_goes_on_from_a_saved_position(digits):
    section = small_config().data
    whole, _ = take(digits, section, 0, 100)
    _, iterator = take(digits, section, 0, 60)
    rest, _ = take(digits, section, 0, 40, start=iterator.get_state())
    for x, y in zip(whole[60:], rest, strict=True):
        assert np.array_equal(x["image"], y["image"])


def test_an_epoch_shows_every_image_once_and_the_next_in_another_order(digits):
    section = config.Data(batch_size=479)  # 3 x 479 = 1437
    batches, _ = take(digits, section, 0, 6)
    want = sorted(r["image"].tobytes() for r in digits.train)
    epochs = [np.concatenate([b["image"] for b in batches[i : i + 3]]) for i in (0, 3)]
    for epoch in epochs:
        assert sorted(image.tobytes() for image in epoch) == want
    assert not np.array_equal(*epochs)


@pytest.mark.parametrize("batch_size", [7, 360, 361])
def test_evaluation_counts_every_image_once(digits, batch_size):
    batches = list(data.eval_batches(digits, config.Data(batch_size=batch_size)))
    assert all(len(batch["label"]) == batch_size for batch in batches)
    mask = np.concatenate([batch["mask"] for batch in batches]).astype(bool)
    images = np.concatenate([batch["image"] for batch in batches])[mask]
    assert np.array_equal(images, [r["image"] for r in digits.evaluation])


@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_cropped_to_a_square_and_resized(channels):
    image = np.zeros((10, 30, channels), np.uint8)
    image[:, 10:20] = 200  # the centre square
    record = {"image": image, "label": 1}
    out = data._example(record, config.Data(image_size=4), channels)["image"]
    assert out.shape == (4, 4, channels)
    assert np.all(np.abs(out.astype(int) - 200) < 20)  # the filter reaches past the edge


def test_bytes_are_decoded(tmp_path):
    pixels = np.arange(64, dtype=np.uint8).reshape(8, 8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    record = {"image": (tmp_path / "a.png").read_bytes(), "label": 3}
    out = data._example(record, config.Data(image_size=8), 1)
    assert np.array_equal(out["image"][..., 0], pixels)
    rgb = data._example(record, config.Data(image_size=8), 3)
    assert np.array_equal(rgb["image"][..., 2], pixels)


def test_shift_and_flip():
    image = np.arange(1, 10, dtype=np.uint8).reshape(3, 3, 1)
    rng = np.random.default_rng(0)
    shifted = {augment.random_shift(image, rng, 1).tobytes() for _ in range(200)}
    assert len(shifted) == 9
    assert image.tobytes() in shifted
    flipped = {augment.random_flip(image, rng).tobytes() for _ in range(50)}
    assert flipped == {image.tobytes(), image[:, ::-1].tobytes()}


def test_unknown_names_and_splits(tmp_path):
    with pytest.raises(ValueError, match="unknown config.data.name 'mnist'.*Choices: digits"):
        data.load(config.Data(name="mnist", dir=str(tmp_path)))
    with pytest.raises(ValueError, match="batch_size=1438 is larger .* 1437 images"):
        data.load(config.Data(batch_size=1438))


def test_workers_do_not_change_the_stream(tmp_path):
    """In a process of its own: grain's workers need parsed flags and a guarded main module."""
    program = tmp_path / "program.py"
    program.write_text(
        "import numpy as np\n"
        "from absl import app\n"
        "from vit import config, data\n"
        "def take(num_workers):\n"
        "    section = config.Data(batch_size=32, max_shift=1, num_workers=num_workers)\n"
        "    stream = iter(data.train_batches(data.load(section), section, 0))\n"
        "    return [next(stream)['image'] for _ in range(5)]\n"
        "def main(_):\n"
        "    assert np.array_equal(take(0), take(2))\n"
        "    print('the same')\n"
        "if __name__ == '__main__':\n"
        "    app.run(main)\n"
    )
    import os
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, program],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": "."},
    )
    assert "the same" in done.stdout, done.stderr
