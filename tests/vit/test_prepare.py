"""vit.prepare: what it writes, bad files, stops and full disks, and reading the result back."""

import io
import os
import re
import shutil

import numpy as np
import pytest
from PIL import Image

import vit.prepare
from tests.vit.test_sources import write_idx, write_ilsvrc2012
from vit import config, data, train
from vit.data.sources.words import Words
from vit.prepare import VERSION, encode, prepare


def picture(seed=0, mode="RGB", size=(12, 10), kind="JPEG", **options):
    """An encoded picture of noise."""
    depth = len(Image.new(mode, (1, 1)).getbands())
    pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], depth)).astype(np.uint8)
    image = Image.fromarray(pixels[..., 0] if depth == 1 else pixels, mode=mode)
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def opened(encoded):
    return Image.open(io.BytesIO(encoded))


def load(out, name, eval_split):
    section = config.Data(
        name=name, dir=str(out), image_size=6, batch_size=2, eval_split=eval_split
    )
    return data.load(section)


def rows(records):
    return {(x["image"], int(x["label"])) for x in (records[i] for i in range(len(records)))}


def write_folders(source):
    for split, n in [("train", 3), ("val", 2)]:
        for number, name in enumerate(["cat", "dog"]):
            folder = source / split / name
            folder.mkdir(parents=True)
            for i in range(n):
                seed = 100 * (split == "val") + 10 * number + i
                (folder / f"{i}.jpg").write_bytes(picture(seed=seed))
    (source / "train" / "cat" / "notes.txt").write_text("no image")


@pytest.fixture
def source(tmp_path):
    """Class folders: training has three pictures of either class, validation two."""
    write_folders(tmp_path / "pets")
    return tmp_path / "pets"


def test_a_part_is_held_out_where_there_is_no_other_split(tmp_path, capsys):
    """Names are the folder's, or ImageNet's."""
    source, out = tmp_path / "My-MNIST", tmp_path / "out"
    source.mkdir()
    write_idx(source)
    assert prepare(source, out) == {"train": 14, "test": 3, "skipped": 0}
    dataset = load(out, "my_mnist", "test")
    assert (dataset.num_classes, dataset.channels) == (3, 1)
    assert [p.name for p in out.iterdir()] == ["my_mnist"]
    for path in source.glob("t10k-*"):
        path.unlink()
    assert prepare(source, out, "less") == {"train": 12, "validation": 2, "skipped": 0}
    assert "pictures to evaluate on: 2, so that" in capsys.readouterr().err
    tars = tmp_path / "tars"
    tars.mkdir()
    write_ilsvrc2012(tars)
    assert prepare(tars, out) == {"train": 9, "validation": 3, "skipped": 0}
    assert load(out, "imagenet2012", "validation").channels == 3


def test_class_folders_with_bad_files(source, tmp_path, capsys):
    """JPEG files keep their bytes; bad ones are named and counted, too many an error."""
    cat = source / "train" / "cat"
    for i, content in enumerate([b"no image", picture()[:200], b""]):
        (cat / f"bad{i}.jpg").write_bytes(content)
    Image.new("RGB", (6, 5), "red").save(cat / "bad3.tiff")
    with pytest.raises(ValueError, match=r"max_bad_files=3 .*bad\d\.(jpg|tiff)"):
        prepare(source, tmp_path / "out", max_bad_files=3)
    assert not (tmp_path / "out").exists()
    counts = prepare(source, tmp_path / "out", max_bad_files=4)
    assert counts == {"train": 6, "validation": 4, "skipped": 4}
    err = capsys.readouterr().err
    assert all(f"bad{i}." in err for i in range(4))
    dataset = load(tmp_path / "out", "pets", "validation")
    assert (dataset.num_classes, dataset.channels) == (2, 3)
    want = {(picture(seed=10 * k + i), k) for k in (0, 1) for i in range(3)}
    assert rows(dataset.train) == want
    with pytest.raises(ValueError, match="unknown config.data.name 'pet'; did you mean 'pets'"):
        load(tmp_path / "out", "pet", "validation")


def test_a_data_set_is_read_from_its_folder_whatever_its_name(source, tmp_path):
    """TFDS has a builder `imagenette`, with other versions; the newest in the folder is read."""
    out = tmp_path / "a[1] *?é"
    prepare(source, out, "imagenette")
    dataset = load(out, "imagenette", "validation")
    assert dataset.class_names == ("cat", "dog")
    assert len(rows(dataset.train)) == 6
    newest = out / "imagenette" / "10.0.0"
    shutil.copytree(out / "imagenette" / VERSION, out / "imagenette" / "9.0.0")
    shutil.copytree(out / "imagenette" / VERSION, newest)
    (newest / "label.labels.txt").write_text("eel\nfox\n")
    changed = load(out, "imagenette", "validation")
    assert changed.class_names == ("eel", "fox")
    assert changed.fingerprint() != dataset.fingerprint() != ""


def test_a_folder_of_raw_pictures_is_named_with_the_command(source, tmp_path):
    """By its name or as the folder of data sets; beside a data set the name is unknown."""
    for out, name in ((tmp_path, "pets"), (source, "x")):
        with pytest.raises(ValueError, match="pets holds raw pictures: make .*prepare --source=.*"):
            load(out, name, "validation")
    prepare(source, source, "made")
    with pytest.raises(ValueError, match="unknown config.data.name 'x'. Choices: digits, made"):
        load(source, "x", "validation")


def test_other_pictures_have_another_fingerprint(source, tmp_path):
    """Equal numbers and classes are not enough; a copy elsewhere has the same fingerprint."""

    def fingerprint(folder):
        return load(tmp_path / folder, "pets", "validation").fingerprint()

    prepare(source, tmp_path / "first", "pets")
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    (source / "train" / "cat" / "0.jpg").write_bytes(picture(seed=99))
    prepare(source, tmp_path / "second", "pets")
    assert fingerprint("first") == fingerprint("copy") != fingerprint("second")


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_named_and_not_waited_for(source, tmp_path, capsys, make):
    make(source / "train" / "cat" / "x.jpg")
    assert prepare(source, tmp_path / "out") == {"train": 6, "validation": 4, "skipped": 1}
    assert "x.jpg is no file, but a folder, a pipe or a device" in capsys.readouterr().err
    make(source / "train" / "index.csv")
    assert sum(prepare(source / "train", tmp_path / "out", "parts").values()) == 7
    words = Words(("index.csv",), "{file}", "{label}")
    with pytest.raises(ValueError, match=r"index.csv cannot be read as a table: it is no file"):
        prepare(source / "train", tmp_path / "more", words=words)
    shutil.rmtree(source / "train" / "dog")  # nothing is waited for in a search for a hint
    with pytest.raises(ValueError, match="pictures of one class only, 'cat'"):
        prepare(source / "train", tmp_path / "more")


def test_a_dry_run_prints_the_classes_and_writes_nothing(source, tmp_path, capsys):
    counts = prepare(source, tmp_path / "out", dry_run=True)
    assert counts == {"train": 6, "validation": 4}
    assert not (tmp_path / "out").exists()
    printed = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in printed[:4]]
    assert rows[0] == ["class", "train", "validation"]
    assert rows[1:] == [["cat", "3", "2"], ["dog", "3", "2"], ["all", "2", "6", "4"]]
    assert printed[4] == "read: 10 .jpg"


def test_a_picture_in_colour_of_a_grey_data_set(tmp_path, monkeypatch):
    """It is no sample that makes it grey: the user says so."""
    monkeypatch.setattr(vit.prepare, "INSPECTED", 2)
    for number in range(8):
        folder = tmp_path / "mixed" / ("train" if number < 6 else "val") / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        mode = "RGB" if number == 2 else "L"  # the second of training
        (folder / f"{number}.png").write_bytes(picture(number, mode, kind="PNG"))
    with pytest.raises(ValueError, match="2.png: it is in colour, but .* --channels=3, or --chan"):
        prepare(tmp_path / "mixed", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    for channels in (1, 3):
        name = f"with{channels}"
        prepare(tmp_path / "mixed", tmp_path / "out", name, channels=channels)
        assert load(tmp_path / "out", name, "validation").channels == channels
    with pytest.raises(ValueError, match="--channels=2 must be 1"):
        prepare(tmp_path / "mixed", tmp_path / "out", channels=2)


def test_many_classes_are_counted_in_one_line(tmp_path, capsys):
    for i in range(50):
        folder = tmp_path / "many" / f"kind{i}"
        folder.mkdir(parents=True)
        for number in range(2 + (i == 49)):
            (folder / f"{number}.jpg").write_bytes(picture(number))
    prepare(tmp_path / "many", tmp_path / "out", validation=0.01, dry_run=True)
    more = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("30 more"))
    assert re.search(r"[12] to 3 .* 0 to [01]$", more)


def no_image(source):
    for path in (source / "val").glob("*/*.jpg"):
        path.write_bytes(b"no image")


@pytest.mark.parametrize(
    ("spoil", "options", "message"),
    [
        (no_image, {}, "0 readable images of split 'validation'"),
        (None, {"files": 5}, "4 readable images of split 'validation', fewer than --files=5"),
        (None, {"validation": 0.1}, "there is a validation split already"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(
    source, tmp_path, spoil, options, message
):
    if spoil:
        spoil(source)
    with pytest.raises(ValueError, match=message):
        prepare(source, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


# --- Encoding


def turned_exif(orientation=6):
    """By default a quarter."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def test_of_several_images_in_a_file_the_first_keeps_its_bytes():
    """MPO, as phones write it: a JPEG file followed by another."""
    images = [opened(picture(seed=seed, size=(90, 60))) for seed in (0, 1)]
    buffer = io.BytesIO()
    images[0].save(buffer, "MPO", save_all=True, append_images=images[1:])
    mpo = buffer.getvalue()
    assert opened(mpo).format == "MPO"
    kept = encode(mpo, 3)
    assert mpo.startswith(kept)
    assert len(kept) < 0.6 * len(mpo)
    np.testing.assert_array_equal(np.asarray(opened(kept)), np.asarray(opened(mpo)))
    assert encode(kept, 3) == kept
    assert opened(encode(mpo, 3, 30)).size == (45, 30)
    cut = mpo[: len(kept)]  # without the second one
    assert encode(cut, 3) == cut


def test_odd_images_are_converted_and_plain_ones_keep_their_bytes():
    """A shorter side above the bound becomes as long; colour model and format stay."""
    for mode, kind in (("RGB", "JPEG"), ("L", "PNG")):
        content = picture(mode=mode, kind=kind, size=(90, 60))
        assert encode(content, 3) == encode(content, 3, 60) == encode(content, 3, 61) == content
        small = opened(encode(content, 3, 40))
        assert (small.size, small.format, small.mode) == ((60, 40), kind, mode)
    for content in (picture(mode="CMYK"), picture(mode="RGBA", kind="PNG")):
        assert opened(encode(content, 3)).mode == "RGB"
    for kind, new in {"BMP": "PNG", "GIF": "PNG", "WEBP": "JPEG"}.items():
        converted = opened(encode(picture(kind=kind), 3))
        assert converted.format == new
        assert new == "PNG" or converted.quantization[0][0] == 2, "quality 95; 8 is 75"
    exif = turned_exif()
    turned = picture(exif=exif, size=(90, 60))
    assert opened(encode(turned, 3)).size == (60, 90)
    assert opened(encode(turned, 3, 40)).size == (40, 60)
    for upright in (0, 1):  # 0 is no orientation, but written by some cameras
        exif[0x0112] = upright
        assert encode(picture(exif=exif), 3) == picture(exif=exif)
    webp = io.BytesIO()
    opened(encode(picture(size=(90, 60)), 3)).save(webp, "WEBP", exif=turned_exif())
    assert opened(encode(webp.getvalue(), 3)).size == (60, 90)
    pixels = np.asarray(opened(picture(kind="PNG", size=(90, 60))))
    upright = {2: pixels[:, ::-1], 3: pixels[::-1, ::-1], 4: pixels[::-1], 6: np.rot90(pixels, -1)}
    for orientation, want in upright.items():
        exif = turned_exif(orientation)
        got = encode(picture(kind="PNG", size=(90, 60), exif=exif), 3)
        np.testing.assert_array_equal(opened(got), want)
    pixels = np.asarray(opened(encode(picture(size=(400, 400), kind="PNG"), 3, 8)))
    assert np.std(pixels) < 10, "noise is averaged, not sampled"


# --- Damaged data sets


@pytest.fixture(scope="module")
def pets(tmp_path_factory):
    """A prepared data set: its folder, and that of its one version."""
    folder = tmp_path_factory.mktemp("pets")
    write_folders(folder / "pets")
    prepare(folder / "pets", folder / "out")
    with pytest.raises(ValueError, match="exists already"):
        prepare(folder / "pets", folder / "out")
    return folder / "out", folder / "out" / "pets" / VERSION


def test_a_damaged_record_is_named(pets):
    """A bit of one, in the middle of the file of six."""
    out, version = pets
    (path,) = version.glob("*train*record*")
    content = path.read_bytes()
    place = len(content.split(b"\0" * 1000)[0]) // 2  # zeros fill the file up to 64 KiB
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    dataset = load(out, "pets", "train")
    with pytest.raises(ValueError, match="evaluation record . cannot be decoded"):
        next(data.eval_batches(dataset, config.Data(batch_size=6, image_size=6)))
    path.write_bytes(content)


def test_data_sets_that_are_not_what_they_say(pets):
    out, version = pets
    info = version / "dataset_info.json"
    text = info.read_text()

    def refused(message, split="train"):
        with pytest.raises(ValueError, match=message) as error:
            load(out, "pets", split)
        assert "\n" not in str(error.value)

    for damaged in ("{", "[]", text.replace('"name": "pets"', '"name": 3')):
        info.write_text(damaged)
        refused("the description of 'pets' in config.data.dir=.* cannot be read")
    info.write_text(text)
    for split in ("train[abc", "train[5:2]", "train[:0]", "train[200%:]", "train[:3"):
        refused(rf"eval_split='{re.escape(split)}' .*'train\[:500\]'|eval_split=.* is empty", split)
    for split in ("trainn", "", "train+trainn", "[:3]"):
        refused(rf"eval_split='{re.escape(split)}' is no split of 'pets'.*; choices: train,", split)
    assert len(load(out, "pets", "train[:2]+validation").evaluation) == 6


@pytest.mark.parametrize(
    ("trained", "evaluated", "shared"),
    [
        ("train[:90%]", "train[50%:]", 2),
        ("train+validation", "validation", 4),
        ("train", "train[2:3]", 1),
        ("train[:2]+validation[:1]", "validation[1:]+train[2:]", 0),
    ],
)
def test_training_and_evaluation_have_no_records_in_common(pets, trained, evaluated, shared):
    """By the records themselves; the pictures are all different."""
    section = config.Data(
        name="pets", dir=str(pets[0]), batch_size=2, train_split=trained, eval_split=evaluated
    )
    dataset = data.load(section)
    assert len(rows(dataset.train) & rows(dataset.evaluation)) == shared
    assert bool(dataset.shared) == (shared > 0)
    if shared:
        workdir = pets[0] / "run"
        message = rf"eval_split='{re.escape(evaluated)}' have {shared} records in common"
        with pytest.raises(ValueError, match=message):
            train.train(config.Config(model=config.Model("XS/4"), data=section), workdir)
        assert not workdir.exists()
