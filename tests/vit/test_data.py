"""Data: the digits, the stream of batches and its position, evaluation of every example once."""

import io
import os
import struct
import subprocess
import sys
import threading
import zlib

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image, ImageOps

from tests.support.small import PATIENCE, run_of, small_config
from tests.support.tiers import tiers
from vit import config, data, prepare, use
from vit.data import augment
from vit.run import devices


@pytest.fixture(scope="module")
def digits():
    return data.load(config.Data())


def test_digits_are_split_without_overlap(digits):
    assert (len(digits.train), len(digits.evaluation)) == (1437, 360)
    parts = [{r["image"].tobytes() for r in part} for part in (digits.train, digits.evaluation)]
    assert parts[0].isdisjoint(parts[1])
    assert np.bincount([r["label"] for r in digits.evaluation]).min() >= 34
    assert np.array_equal(digits.train[5]["image"], data.load(config.Data()).train[5]["image"])


def take(dataset, section, seed, n, state=None, **share):
    """The next n batches, and the position after them."""
    iterator = iter(data.train_batches(dataset, section, seed, **share))
    if state is not None:
        iterator.set_state(state)
    batches = [next(iterator) for _ in range(n)]
    state = iterator.get_state()
    iterator.close()
    return batches, state


@pytest.mark.parametrize("part", ["train", "evaluation"])
def test_records_of_a_batch_are_waited_for_side_by_side(part):
    """Storage that answers late: eight records are asked for before any of them is there."""
    together = threading.Barrier(8)

    def decode(record, rng, section, dataset):
        together.wait(timeout=60)  # breaks where fewer are read at a time
        return record

    records = [{"x": np.float32(i)} for i in range(16)]
    dataset = data.in_memory(records, records)._replace(decode=decode)
    section = config.Data(batch_size=16)
    batches = {
        "train": lambda: take(dataset, section, 0, 1)[0],
        "evaluation": lambda: list(data.eval_batches(dataset, section)),
    }[part]()
    assert sorted(batches[0]["x"]) == list(range(16))


def encoded(pixels, kind="PNG", **options):
    buffer = io.BytesIO()
    augment.to_pil(pixels).save(buffer, kind, **options)
    return buffer.getvalue()


def noise(seed, height=12, width=10, channels=3):
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels)).astype(np.uint8)


JPEG = encoded(noise(0, 100, 100), "JPEG")
BROKEN = {
    "empty": b"",
    "text": b"no image",
    "half a JPEG": JPEG[: len(JPEG) // 2],
    "a JPEG without its last tenth": JPEG[: len(JPEG) * 9 // 10],
    "half a PNG": encoded(noise(0))[:200],
    "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n",
    "a PNG of another length": encoded(noise(0)).replace(b"IDAT", b"IDAB"),
}


def few(n=19):
    """A data set of n images; label = index."""
    records = [{"image": encoded(noise(i)), "label": i} for i in range(n)]
    return data.Dataset(records, records, tuple(map(str, range(n))), channels=3)


AUGMENTED = config.Data(
    batch_size=8, image_size=8, crop="inception", flip=True, max_shift=1, randaugment_layers=1
)


@pytest.mark.parametrize(("process", "processes"), tiers([(1, 2), (0, 1)], 1))
def test_stream_goes_on_from_a_saved_position(digits, process, processes):
    section, share = small_config().data, dict(process=process, processes=processes)
    whole, _ = take(digits, section, 0, 6, **share)
    assert whole[0]["image"].shape == (32 // processes, 8, 8, 1)
    assert whole[0]["image"].dtype == np.uint8
    (other,), _ = take(digits, section, 1, 1, **share)
    assert not np.array_equal(whole[0]["image"], other["image"])
    _, state = take(digits, section, 0, 4, **share)
    for place in (dict(state=state), dict(start=4)):
        rest, _ = take(digits, section, 0, 2, **share, **place)
        for x, y in zip(whole[4:], rest, strict=True):
            assert np.array_equal(x["image"], y["image"])


def test_processes_share_every_batch_of_one():
    dataset, processes = few(), 4
    want, _ = take(dataset, AUGMENTED, 0, 6)
    shares = [
        take(dataset, AUGMENTED, 0, 6, process=p, processes=processes)[0] for p in range(processes)
    ]
    for whole, *parts in zip(want, *shares, strict=True):
        for name in ("image", "label"):
            assert np.array_equal(whole[name], np.concatenate([part[name] for part in parts])), name


@pytest.mark.parametrize("image", BROKEN.values(), ids=BROKEN)
def test_what_cannot_be_decoded(image):
    records = [{"image": image, "label": 0}, {"image": JPEG, "label": 1}]
    dataset = data.Dataset(records, records, ("a", "b"), channels=3)
    section = config.Data(batch_size=2, image_size=8, crop="inception")
    with pytest.raises(ValueError, match="training record 0 cannot be decoded: "):
        take(dataset, section, 0, 1)
    with pytest.raises(ValueError, match="evaluation record 0 cannot be decoded: "):
        next(data.eval_batches(dataset, section))


def test_arrays_named_mask_are_refused():
    """Evaluation would replace them by its own mask (b,), training would not."""
    dataset, section = data.in_memory(*[[{"mask": np.ones(3)}] * 2] * 2), config.Data(batch_size=2)
    for batches in (data.train_batches(dataset, section, 0), data.eval_batches(dataset, section)):
        with pytest.raises(ValueError, match="record . cannot be decoded: .mask. is the name"):
            next(iter(batches))


@pytest.mark.parametrize("other", [{"x": np.ones(2)}, {"x": np.ones(3), "y": 1}, {"y": np.ones(3)}])
def test_examples_of_other_shapes_are_refused(other):
    """Arrays that the first example does not have would be dropped."""
    dataset = data.in_memory([{"x": np.ones(3)}], [{"x": np.ones(3)}, other])
    with pytest.raises(ValueError, match=r"the shapes .*'x': \(3,\), .* and "):
        next(data.eval_batches(dataset, config.Data(batch_size=2)))


def test_an_epoch_shows_every_image_once_and_the_next_in_another_order(digits):
    few, section = digits._replace(train=digits.train[:150]), config.Data(batch_size=50)
    batches, _ = take(few, section, 0, 6)
    want = sorted(r["image"].tobytes() for r in few.train)
    epochs = [np.concatenate([b["image"] for b in batches[i : i + 3]]) for i in (0, 3)]
    for epoch in epochs:
        assert sorted(image.tobytes() for image in epoch) == want
    assert not np.array_equal(*epochs)


@pytest.mark.parametrize(("processes", "n"), [(1, 36), (1, 47), (2, 37), (3, 36), (3, 47)])
def test_evaluation_counts_every_image_once(digits, processes, n):
    dataset, section = digits._replace(evaluation=digits.evaluation[:n]), config.Data(batch_size=12)
    shares = [list(data.eval_batches(dataset, section, p, processes)) for p in range(processes)]
    assert [len(share) for share in shares] == [-(-n // 12)] * processes
    assert {len(part["mask"]) for share in shares for part in share} == {12 // processes}
    for name, want in [("image", None), ("label", None), ("mask", [1.0] * n)]:
        got = np.concatenate([part[name] for parts in zip(*shares, strict=True) for part in parts])
        want = [r[name] for r in dataset.evaluation] if want is None else want
        assert np.array_equal(got[:n], want)
        assert len(got) % 12 == 0
        assert np.all(got[n:] == 0)


@pytest.mark.parametrize(
    ("fields", "augmented"),
    [
        (dict(max_shift=2), lambda image, rng: augment.random_shift(image, rng, 2)),
        (dict(flip=True), augment.random_flip),
        (
            dict(randaugment_layers=2, randaugment_magnitude=9),
            lambda image, rng: augment.randaugment(image, rng, 2, 9),
        ),
        (dict(erase=1.0), lambda image, rng: (rng.random(), augment.random_erasing(image, rng))[1]),
        (dict(), lambda image, rng: image),
    ],
    ids=["max_shift", "flip", "randaugment", "erase", "none"],
)
def test_each_augmentation_alone(fields, augmented):
    """It changes training records only; no other draw comes before it."""
    plain = dict(crop="center", flip=False, max_shift=0, erase=0.0, randaugment_layers=0)
    section = config.Data(image_size=12, **(plain | fields))
    record, dataset = {"image": noise(0, 12, 12), "label": 0}, few()
    changed = 0
    for seed in range(4):
        rngs = [np.random.default_rng(seed) for _ in range(2)]
        got = data.labelled_image(record, rngs[0], section, dataset)["image"]
        np.testing.assert_array_equal(got, augmented(record["image"], rngs[1]))
        changed += not np.array_equal(got, record["image"])
    assert bool(changed) == bool(fields)
    got = data.labelled_image(record, None, section, dataset)["image"]
    np.testing.assert_array_equal(got, record["image"])


def test_a_low_part_of_a_jpeg_is_not_decoded_at_an_eighth():
    """The shorter side of the part decides: 64 rows of 512 columns, for 64 pixels."""
    jpeg, box = encoded(noise(0, 512, 512), "JPEG"), (0, 400, 512, 464)
    got = data.records._pixels(jpeg, 64, 3, lambda *_: box, Image.Resampling.BILINEAR)
    want = Image.open(io.BytesIO(jpeg)).resize((64, 64), Image.Resampling.BILINEAR, box=box)
    np.testing.assert_array_equal(got, np.asarray(want))


def evaluated(image, channels=3, **fields):
    """What evaluation makes of one image."""
    dataset = data.Dataset([], [{"image": image, "label": 0}], ("a",), channels=channels)
    (batch,) = data.eval_batches(dataset, config.Data(batch_size=1, **fields))
    assert batch["mask"] == 1
    return batch["image"][0]


@pytest.mark.parametrize("encode", [encoded, lambda pixels: pixels], ids=["png", "array"])
def test_evaluation_resizes_the_shorter_side_and_takes_the_centre(encode):
    """The largest square, or less of it with `eval_resize`; the right size passes untouched."""
    for channels in (1, 3):
        pixels = noise(0, 31, 90, channels)
        want = ImageOps.fit(augment.to_pil(pixels), (16, 16), Image.Resampling.BICUBIC)
        got = evaluated(encode(pixels), channels, image_size=16)
        assert np.array_equal(got, np.asarray(want).reshape(16, 16, channels))
        square = pixels[:, :31]
        assert np.array_equal(evaluated(encode(square), channels, image_size=31), square)
    pixels = noise(0, 300, 200)
    resized = np.asarray(Image.fromarray(pixels).resize((100, 150), Image.Resampling.BICUBIC))
    got = evaluated(encode(pixels), image_size=80, eval_resize=100)
    assert np.abs(got.astype(int) - resized[35:-35, 10:-10]).max() <= 1  # one rounding


def test_evaluation_squeezes_pictures_to_a_square():
    """As Pillow does, or `ViTImageProcessor`; then the centre, as `DeiTImageProcessor`."""
    pixels = photograph(300, 200)
    for resize, crop in [(0, slice(None)), (64, slice(8, -8))]:
        side = resize or 48
        want = Image.fromarray(pixels).resize((side, side), Image.Resampling.BICUBIC)
        got = evaluated(pixels, image_size=48, eval_resize=resize, eval_crop="squash")
        assert np.abs(got.astype(int) - np.asarray(want)[crop, crop]).max() <= 1  # one rounding


def photograph(height, width):
    """Waves in three colours: smooth, and every shift or scale shows."""
    y, x = np.mgrid[:height, :width] / 40
    waves = [np.sin(x + 0.3 * y), np.cos(0.7 * x - y), np.sin(x * y / 30)]
    return np.round(127.5 + 120 * np.stack(waves, -1)).astype(np.uint8)


@pytest.mark.parametrize(("size", "scale"), [(64, 8), (300, 2), (500, 1)])
def test_large_jpegs_are_decoded_as_small_as_suffices(monkeypatch, size, scale):
    pixels = photograph(803, 1201)
    resized, resize = [], Image.Image.resize

    def spy(self, *args, **kwargs):
        if max(self.size) > 100:  # pipelines of other tests may still be reading ahead
            resized.append(self.size)
        return resize(self, *args, **kwargs)

    monkeypatch.setattr(Image.Image, "resize", spy)
    got = evaluated(encoded(pixels, "JPEG", quality=95), image_size=size)
    assert resized == [(-(-1201 // scale), -(-803 // scale))]
    want = evaluated(pixels, image_size=size)
    difference = np.abs(got.astype(int) - want)
    assert difference.mean() < 1.5
    assert difference.max() < 16


def test_training_crops_are_resized_parts(monkeypatch):
    pixels = photograph(60, 90)
    records = [{"image": encoded(pixels), "label": 0}]
    dataset = data.Dataset(records, records, ("a",), channels=3)
    section = config.Data(batch_size=1, image_size=32, crop="inception")
    (batch,), _ = take(dataset, section, 0, 1)
    (other,), _ = take(dataset, section, 1, 1)
    assert not np.array_equal(batch["image"], other["image"])
    monkeypatch.setattr(augment, "inception_box", lambda width, height, rng: (40, 20, 72, 52))
    (batch,), _ = take(dataset, section, 0, 1)
    assert np.array_equal(batch["image"][0], pixels[20:52, 40:72])


def test_colour_models_are_converted():
    grey = noise(0, 16, 16, 1)
    for kind in ("PNG", "JPEG"):
        image = evaluated(encoded(grey, kind), image_size=8)
        assert np.array_equal(image[..., 0], image[..., 2])
    assert evaluated(encoded(noise(0, 16, 16), "JPEG"), channels=1, image_size=8).shape == (8, 8, 1)
    buffer = io.BytesIO()
    Image.fromarray(photograph(16, 16)).convert("CMYK").save(buffer, "JPEG", quality=95)
    got = evaluated(buffer.getvalue(), image_size=16)
    assert np.abs(got.astype(int) - photograph(16, 16)).mean() < 3


WORKERS = """
import os, time
import numpy as np
from vit import config, data
def take(num_workers, process=0, processes=1, start=None, n=6):
    section = config.Data(batch_size=32, max_shift=1, num_workers=num_workers)
    stream = iter(data.train_batches(data.load(section), section, 0, process, processes))
    if start is not None:
        stream.set_state(start)
    images = [next(stream)["image"] for _ in range(n)]
    return np.stack(images), stream.get_state()
def held():
    names = [name for name in os.listdir("/dev/shm") if name.startswith("psm_")]
    return {name: os.stat(f"/dev/shm/{name}").st_size for name in names}
def largest(num_workers):
    examples = [{"image": np.zeros(2**19, np.uint8)}] * 64
    section = config.Data(name="", batch_size=2, num_workers=num_workers)
    before, most = held(), 0
    stream = iter(data.train_batches(data.in_memory(examples, examples), section, 0))
    for _ in range(20):
        batch = next(stream)
        time.sleep(0.05)
        most = max(most, sum(size for name, size in held().items() if name not in before))
    stream.close()
    return most / 2**20
def main():
    want, _ = take(0)
    half, state = take(2, 1, 2, n=3)
    rest, _ = take(2, 1, 2, start=state, n=3)
    assert np.array_equal(want[:, 16:], np.concatenate([half, rest]))
    print("the same")
    for n in (1, 2):
        assert 3 * n < largest(n) <= 4 * n + 2
    print("as counted")
if __name__ == "__main__":
    main()
"""


@pytest.mark.thorough
def test_workers_do_not_change_the_stream(tmp_path):
    """In a process of its own: grain's workers need a guarded main module.

    As many batches are in /dev/shm as `data.num_workers` counts.
    """
    (tmp_path / "program.py").write_text(WORKERS)
    done = subprocess.run(
        [sys.executable, tmp_path / "program.py"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=os.environ | {"PYTHONPATH": "."},
    )
    assert done.stdout.splitlines() == ["the same", "as counted"], done.stderr


def test_a_killed_worker_is_named(monkeypatch):
    """grain raises RuntimeError; others stay."""
    section, dataset = config.Data(batch_size=32, num_workers=3), data.load(config.Data())
    settings = small_config(data=section)
    for message, kind in (
        ("Worker process was term\nlogs", ChildProcessError),
        ("x", RuntimeError),
    ):

        def stream(*_, message=message):
            yield {"image": np.zeros((1, 8, 8, 1), np.uint8)}
            raise RuntimeError(message)

        monkeypatch.setattr(data, "train_batches", stream)
        run = run_of(settings, dataset, devices.mesh(settings))
        with run.batches(0) as batches:
            next(batches)
            with pytest.raises(kind, match=r"num_workers=3 was killed \(W.*term\)|^x$"):
                next(batches)


def test_bytes_are_taken_for_a_picture_only(monkeypatch):
    """Pillow's plugin for PostScript starts Ghostscript."""
    started = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *args, **kw: started.append(args))
    with pytest.raises(OSError, match="it is none of .*: save it as JPEG or PNG"):
        augment.open_image(BROKEN["PostScript"]).load()
    assert not started


@pytest.mark.parametrize("channels", [1, 3])
def test_grey_values_of_16_bits_keep_their_shades(channels):
    """Pillow's own conversion makes them black and white, in training and in `vit.prepare`."""
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16)
    buffer = io.BytesIO()
    Image.fromarray(grey.astype(np.uint16) * 257).save(buffer, "PNG")
    seen = data.evaluated_pixels(buffer.getvalue(), config.Data(image_size=16), channels)
    np.testing.assert_array_equal(seen, np.repeat(grey[..., None], channels, axis=-1))
    written = prepare.encode(buffer.getvalue(), channels)
    with Image.open(io.BytesIO(written)) as opened:
        assert opened.mode == "L"
        np.testing.assert_array_equal(np.asarray(opened), grey)


def test_transparent_pixels_are_white():
    """In training, prediction and `vit.prepare`; of all modes that have transparency."""
    hidden = np.zeros((8, 8, 4), np.uint8)
    hidden[:4] = 100, 100, 100, 255
    hidden[4:6, :, 3] = 51  # black, a fifth of it
    want = np.repeat([100, 204, 255], [4, 2, 2])
    rgba = Image.fromarray(hidden)
    grey, palette = rgba.convert("LA"), rgba.quantize(4)
    keyed = Image.fromarray(hidden[..., 3])  # a colour that is transparent
    for image, shades, more in [
        (rgba, want, {}),
        (grey, want, {}),
        (palette, want, {}),
        (keyed, np.repeat([255, 51, 255], [4, 2, 2]), {"transparency": 0}),
    ]:
        buffer = io.BytesIO()
        image.save(buffer, "PNG", **more)
        content, section = buffer.getvalue(), config.Data(image_size=8)
        given = [use.checked(image)] if not more else []
        written = np.asarray(Image.open(io.BytesIO(prepare.encode(content, 3))).convert("RGB"))
        for pixels in (data.evaluated_pixels(content, section, 3), written, *given):
            np.testing.assert_array_equal(pixels[:, 0, 0], shades)


def test_arrays_of_pillow_are_colours_not_numbers_of_a_palette():
    image = Image.fromarray(np.full((4, 4, 3), (200, 10, 10), np.uint8)).quantize(2)
    assert image.mode == "P"
    np.testing.assert_array_equal(use.checked(image)[0, 0], [200, 10, 10])


@pytest.mark.parametrize(("bits", "largest"), [(8, 255), (12, 4095), (16, 65535)])
def test_grey_values_have_as_many_bits_as_the_user_says(bits, largest):
    """Small values are dark, not of fewer bits."""
    image = Image.fromarray(np.array([[0, largest // 2, largest]], np.uint16))
    assert np.asarray(augment.opaque(image, bits)).tolist() == [[0, 127, 255]]
    assert np.asarray(augment.opaque(image)).max() == largest >> 8
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    written = prepare.encode(buffer.getvalue(), 1, bits=bits)
    assert np.asarray(Image.open(io.BytesIO(written))).tolist() == [[0, 127, 255]]
    if bits > 8:
        with pytest.raises(
            OSError, match=f"has the value {largest}, of more than --bits={bits - 1}"
        ):
            prepare.encode(buffer.getvalue(), 1, bits=bits - 1)


def test_a_broken_part_of_a_png_file_is_named():
    """Pillow alone says that it is no image."""
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4)).save(buffer, "PNG")
    text = b"tEXtComment\0x"
    part = struct.pack(">I", len(text) - 4) + text + struct.pack(">I", zlib.crc32(text) ^ 1)
    broken = buffer.getvalue()[:33] + part + buffer.getvalue()[33:]
    with pytest.raises(SyntaxError, match="bad header checksum in b'tEXt'"):
        augment.open_image(broken)


def test_a_fingerprint_changes_with_any_value():
    """It is that of equal examples, whatever their arrays; objects have no bytes to compare."""

    def found(image=0, label=1, split=1, kind=np.uint8):
        records = [{"image": np.full((2, 3), image, kind), "label": label, "more": object()}]
        return data.in_memory(records, records[:split]).fingerprint()

    assert found() == found()
    others = [found(image=1), found(label=2), found(split=0), found(kind=np.int8)]
    assert len({found(), *others}) == 5


def test_a_label_that_is_no_class_is_an_error():
    section = config.Data(batch_size=2, image_size=8)
    for label in (-1, 2, 10**6):
        records = [{"image": encoded(noise(0)), "label": label}] * 4
        dataset = data.Dataset(records, records, ("a", "b"), channels=3)
        message = f"record .* it has the label {label}, .* are 0 to 1"
        with pytest.raises(ValueError, match=f"training {message}"):
            take(dataset, section, 0, 1)
        with pytest.raises(ValueError, match=f"evaluation {message}"):
            next(data.eval_batches(dataset, section))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            dict(train_split="train[:50%]"),
            r"train_split='train\[:50%\]' must be 'train' for 'digits'",
        ),
        (dict(batch_size=1438), "batch_size=1438 is larger .* 1437 records"),
        (dict(name="mnist", dir="docs"), "data.dir='docs'; make a data set of pictures by"),
    ],
)
def test_data_that_are_not_there_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        data.load(config.Data(**fields))


@pytest.mark.parametrize("share", tiers([0.0, 1.0, 0.3], 2))
def test_as_many_images_are_erased_as_the_config_says(share):
    """Of 1,000: false-alarm rate 6e-7. Without it nothing is drawn: all else stays as it was."""
    number = 1000 if 0 < share < 1 else 20
    section, rng = config.Data(erase=share, image_size=8), np.random.default_rng(0)
    dataset = data.Dataset([], [], ("a",), channels=1)
    record = {"image": np.full((8, 8, 1), 255, np.uint8), "label": 0}
    images = (dataset.decode(record, rng, section, dataset)["image"] for _ in range(number))
    erased = [np.any(image < 255) for image in images]
    assert abs(np.mean(erased) - share) <= 5 * np.sqrt(share * (1 - share) / number)
    if share == 0:
        assert rng.random() == np.random.default_rng(0).random()
