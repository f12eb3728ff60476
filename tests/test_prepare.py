"""vit.prepare: IDX files, class folders and tars, bad files, and reading the result back."""

import fcntl
import gzip
import io
import os
import re
import resource
import struct
import tarfile
import threading
from functools import partial

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from vit import config, data
from vit.data.sources.source import Example
from vit.prepare import VERSION, encode, encoded, prepare
from vit.run import machine
from vit.run.bounded import read_idx


def idx(array):
    """The IDX form of an array of bytes."""
    return (
        bytes([0, 0, 8, array.ndim])
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )


def write_idx(folder, n=20, compress=True):
    rng = np.random.default_rng(0)
    arrays = {}
    for prefix, size in [("train", n), ("t10k", 5)]:
        images = rng.integers(0, 256, (size, 6, 4)).astype(np.uint8)
        labels = (np.arange(size) % 3).astype(np.uint8)
        arrays[prefix] = images, labels
        for name, array in [("images-idx3-ubyte", images), ("labels-idx1-ubyte", labels)]:
            content = gzip.compress(idx(array)) if compress else idx(array)
            (folder / f"{prefix}-{name}{'.gz' if compress else ''}").write_bytes(content)
    return arrays


def picture(seed=0, mode="RGB", size=(12, 10), kind="JPEG", **options):
    """An encoded picture of noise."""
    depth = len(Image.new(mode, (1, 1)).getbands())
    pixels = (
        np.random.default_rng(seed).integers(0, 256, (size[1], size[0], depth)).astype(np.uint8)
    )
    image = Image.fromarray(pixels[..., 0] if depth == 1 else pixels, mode=mode)
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def load(out, name, eval_split):
    section = config.Data(
        name=name, dir=str(out), image_size=6, batch_size=2, eval_split=eval_split
    )
    return data.load(section)


@pytest.mark.parametrize("compress", [True, False])
def test_idx_files(tmp_path, compress):
    source = tmp_path / "My-MNIST"
    source.mkdir()
    arrays = write_idx(source, compress=compress)
    out = tmp_path / "out"
    assert prepare(source, out) == {"train": 20, "test": 5, "skipped": 0}
    dataset = load(out, "my_mnist", "test")
    assert (dataset.num_classes, dataset.channels) == (3, 1)
    read = {
        (np.asarray(Image.open(io.BytesIO(r["image"]))).tobytes(), int(r["label"]))
        for r in (dataset.train[i] for i in range(20))
    }
    assert read == {(i.tobytes(), int(k)) for i, k in zip(*arrays["train"], strict=True)}
    assert [p.name for p in out.iterdir()] == ["my_mnist"]


def write_folders(source, bad=()):
    for split, n in [("train", 3), ("val", 2)]:
        for number, name in enumerate(["cat", "dog"]):
            folder = source / split / name
            folder.mkdir(parents=True)
            for i in range(n):
                content = picture(seed=10 * number + i)
                (folder / f"{i}.jpg").write_bytes(content)
    for i, content in enumerate(bad):
        (source / "train" / "cat" / f"bad{i}.jpg").write_bytes(content)
    (source / "train" / "cat" / "notes.txt").write_text("no image")


BAD = [b"no image", picture()[:200], b""]


@pytest.fixture
def source(tmp_path):
    """Class folders: training has three pictures of either class, validation two."""
    write_folders(tmp_path / "pets")
    return tmp_path / "pets"


def test_class_folders_with_bad_files(tmp_path, capsys):
    source = tmp_path / "pets"
    write_folders(source, BAD)
    with pytest.raises(ValueError, match=r"max_bad_files=2 .*bad\d\.jpg"):
        prepare(source, tmp_path / "out", max_bad_files=2)
    assert not (tmp_path / "out").exists()
    counts = prepare(source, tmp_path / "out", max_bad_files=3)
    assert counts == {"train": 6, "validation": 4, "skipped": 3}
    err = capsys.readouterr().err
    assert all(f"bad{i}.jpg" in err for i in range(3))
    dataset = load(tmp_path / "out", "pets", "validation")
    assert (dataset.num_classes, dataset.channels) == (2, 3)
    got = {(r["image"], int(r["label"])) for r in (dataset.train[i] for i in range(6))}
    assert got == {(picture(seed=10 * k + i), k) for k in (0, 1) for i in range(3)}
    with pytest.raises(
        ValueError, match="'test' is no split of 'pets'; choices: train, validation"
    ):
        load(tmp_path / "out", "pets", "test")
    with pytest.raises(ValueError, match="unknown config.data.name 'pet'; did you mean 'pets'"):
        load(tmp_path / "out", "pet", "validation")


def test_a_name_of_a_file_that_is_not_utf8(source, tmp_path):
    cat = os.fsencode(source / "train" / "cat")
    os.rename(cat + b"/0.jpg", cat + b"/\xff.jpg")
    assert prepare(source, tmp_path / "out")["train"] == 6
    train = load(tmp_path / "out", "pets", "validation").train
    assert sum(train[i]["file_name"].decode() == "\ufffd.jpg" for i in range(6)) == 1


def test_what_a_killed_run_left_is_removed_unless_it_still_runs(source, tmp_path, capsys):
    leftover = tmp_path / "out" / "pets" / "incomplete.ABCDEF_1.0.0"
    leftover.mkdir(parents=True)
    (leftover / "dataset_info.json").write_text("{}")
    with pytest.raises(ValueError, match=r"out' holds no data set; one is made .*--out=.*out"):
        load(tmp_path / "out", "pets", "validation")
    running = os.open(leftover.parent, os.O_RDONLY)
    fcntl.flock(running, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match="pets is in use by another process"):
        prepare(source, tmp_path / "out")
    assert leftover.exists()
    os.close(running)
    assert prepare(source, tmp_path / "out")["train"] == 6
    assert f"{leftover} is left from a run that was killed" in capsys.readouterr().err
    assert [p.name for p in leftover.parent.iterdir()] == ["1.0.0"]
    assert len(load(tmp_path / "out", "pets", "validation").train) == 6


def test_a_full_disk_is_named_and_nothing_stays(source, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(OSError, match=r"File too large"):
            prepare(source, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "out").exists()
    assert prepare(source, tmp_path / "out")["train"] == 6


def test_what_is_no_file_is_left_out_and_nothing_waits(source, tmp_path, capsys):
    cat = source / "train" / "cat"
    os.mkfifo(cat / "fifo.jpg")
    (cat / "folder.jpg").mkdir()
    (cat / "dangling.jpg").symlink_to(tmp_path / "nowhere")
    (cat / "device.jpg").symlink_to("/dev/zero")
    with (cat / "large.jpg").open("wb") as file:
        file.truncate(2**28 + 1)  # takes no room on the disk
    counts = prepare(source, tmp_path / "out", max_bad_files=5)
    assert counts == {"train": 6, "validation": 4, "skipped": 5}
    err = capsys.readouterr().err
    for name, why in {
        "fifo": "no regular file",
        "folder": "no regular file",
        "dangling": "No such file",
        "device": "no regular file",
        "large": "268,435,457 bytes at once are more than 268,435,456",
    }.items():
        assert re.search(rf"skipped .*{name}\.jpg: .*{why}", err)


def tar(path, files, mode="w"):
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            if content is None:  # a link to nowhere
                info.type, info.linkname = tarfile.SYMTYPE, "nowhere"
                archive.addfile(info)
            else:
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))


WNIDS = ["n02000002", "n01000001"]  # the devkit's order is not the alphabet's
DEVKIT = "ILSVRC2012_devkit_t12/data/"


def write_devkit(source, truth=b"1\n2\n2\n1\n", **more):
    table = io.BytesIO()
    dtype = [("ILSVRC2012_ID", "O"), ("WNID", "O")]
    savemat(table, {"synsets": np.array([(i + 1, w) for i, w in enumerate(WNIDS)], dtype=dtype)})
    files = {"meta.mat": table.getvalue(), "ILSVRC2012_validation_ground_truth.txt": truth}
    files = {DEVKIT + name: content for name, content in (files | more).items()}
    tar(source / "ILSVRC2012_devkit_t12.tar.gz", files, "w:gz")


def write_ilsvrc2012(source, val=None):
    source.mkdir(exist_ok=True)
    classes = {}
    for k, wnid in enumerate(WNIDS):
        inner = source / f"{wnid}.tar"
        tar(inner, {f"{wnid}_{i}.JPEG": picture(10 * k + i) for i in range(3)})
        classes[inner.name] = inner.read_bytes()
        inner.unlink()
    tar(source / "ILSVRC2012_img_train.tar", classes)
    val = val or {f"ILSVRC2012_val_{i + 1:08d}.JPEG": picture(100 + i) for i in range(4)}
    tar(source / "ILSVRC2012_img_val.tar", val)
    write_devkit(source)


def test_ilsvrc2012(tmp_path):
    source = tmp_path / "tars"
    write_ilsvrc2012(source)
    counts = prepare(source, tmp_path / "out")
    assert counts == {"train": 6, "validation": 4, "skipped": 0}
    dataset = load(tmp_path / "out", "imagenet2012", "validation")
    index = {wnid: i for i, wnid in enumerate(sorted(WNIDS))}
    got = {(r["image"], int(r["label"])) for r in (dataset.evaluation[i] for i in range(4))}
    assert got == {(picture(100 + i), index[WNIDS[t - 1]]) for i, t in enumerate([1, 2, 2, 1])}
    got = {(r["image"], int(r["label"])) for r in (dataset.train[i] for i in range(6))}
    assert got == {(picture(10 * k + i), index[w]) for k, w in enumerate(WNIDS) for i in range(3)}


def test_validation_images_that_no_label_is_for_are_left_out(tmp_path, capsys):
    names = ["1", "00000000", "-1", "00000005", "readme", "2"]
    val = {f"ILSVRC2012_val_{name}.JPEG": picture(100 + i) for i, name in enumerate(names)}
    val |= {"link_3.JPEG": None}
    write_ilsvrc2012(tmp_path / "tars", val)
    counts = prepare(tmp_path / "tars", tmp_path / "out")
    assert counts == {"train": 6, "validation": 2, "skipped": 5}
    assert capsys.readouterr().err.count("does not end in a number from 1 to 4") == 4
    dataset = load(tmp_path / "out", "imagenet2012", "validation")
    got = {(r["image"], int(r["label"])) for r in (dataset.evaluation[i] for i in range(2))}
    assert got == {(picture(100), 1), (picture(105), 0)}


def test_an_archive_that_breaks_off_is_named_with_the_place(tmp_path):
    """A member whose checksum is wrong is the end of the archive for tarfile."""
    source = tmp_path / "tars"
    write_ilsvrc2012(source)
    val = source / "ILSVRC2012_img_val.tar"
    content = bytearray(val.read_bytes())
    second = content.index(b"ILSVRC2012_val_00000002")
    content[second + 150] ^= 1
    val.write_bytes(content)
    with pytest.raises(ValueError, match=f"img_val.tar cannot be read: .* at byte {second:,}"):
        prepare(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_odd_images_are_converted_and_plain_ones_keep_their_bytes():
    for mode, kind in (("RGB", "JPEG"), ("L", "PNG")):
        content = picture(mode=mode, kind=kind)
        assert encode(content, 3) == content
    cmyk = encode(picture(mode="CMYK"), 3)
    assert Image.open(io.BytesIO(cmyk)).mode == "RGB"
    rgba = encode(picture(mode="RGBA", kind="PNG"), 3)
    assert Image.open(io.BytesIO(rgba)).mode == "RGB"
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    turned = Image.open(io.BytesIO(encode(picture(exif=exif), 3)))
    assert turned.size == (10, 12)
    for upright in (0, 1):  # 0 is no orientation, but written by some cameras
        exif[0x0112] = upright
        assert encode(picture(exif=exif), 3) == picture(exif=exif)
    bitmap = Image.open(io.BytesIO(encode(picture(kind="BMP"), 3)))
    assert bitmap.format == "PNG"


def test_pictures_are_encoded_side_by_side_in_order(monkeypatch):
    """Read one after another by one thread; what fails is told in its place."""
    monkeypatch.setattr(machine, "cores", lambda: 3)
    together, read = threading.Barrier(3, timeout=60), []

    def content(number):
        read.append((number, threading.get_ident()))
        return b"" if number == 4 else [b"a", b"b", b"c"][number % 3]

    def encode(content):
        together.wait()  # breaks where fewer than three are encoded at a time
        if not content:
            raise OSError("empty")
        return content * 2

    examples = [Example(str(i), partial(content, i), "") for i in range(9)]
    found: list[tuple[str, object]] = []
    for example, result in encoded(examples, encode):
        try:
            found.append((example.name, result()))
        except OSError as error:
            found.append((example.name, str(error)))
    want: list[tuple[str, object]] = [(str(i), 2 * [b"a", b"b", b"c"][i % 3]) for i in range(9)]
    want[4] = ("4", "empty")
    assert found == want
    assert read == [(i, threading.get_ident()) for i in range(9)]


def test_the_shorter_side_is_bounded():
    """Of an upright picture; one that is small enough keeps its bytes, and so does its format."""
    for kind, mode in (("JPEG", "RGB"), ("PNG", "L")):
        content = picture(size=(90, 60), kind=kind, mode=mode)
        small = Image.open(io.BytesIO(encode(content, 3, 40)))
        assert (small.size, small.format, small.mode) == ((60, 40), kind, mode)
        assert encode(content, 3, 60) == encode(content, 3, 61) == content
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    turned = Image.open(io.BytesIO(encode(picture(size=(90, 60), exif=exif), 3, 40)))
    assert turned.size == (40, 60)
    pixels = np.asarray(Image.open(io.BytesIO(encode(picture(size=(400, 400), kind="PNG"), 3, 8))))
    assert np.std(pixels) < 10, "noise is averaged, not sampled"


def cut(path, end):
    path.write_bytes(path.read_bytes()[:end])


def renamed(source, name):
    """A class has another name."""
    for split in ("train", "val"):
        (source / split / "cat").rename(source / split / name)


def empty(source):
    for path in (source / "val").glob("*/*.jpg"):
        path.write_bytes(b"no image")


PLAIN_IDX = partial(write_idx, compress=False)
TRAIN, DEVKIT_FILE = "ILSVRC2012_img_train.tar", "ILSVRC2012_devkit_t12.tar.gz"
UNREADABLE = r"devkit_t12.tar.gz cannot be read \("
SPLIT = r"pets/test holds no <class>/\*\.jpg"
UNPRINTABLE = "has a line break, an outer blank or an unprintable"
FEW = idx(np.zeros(4, np.uint8))
DAMAGED = [
    (PLAIN_IDX, lambda f: (f / "train-labels-idx1-ubyte").unlink(), "has no labels beside it"),
    (PLAIN_IDX, lambda f: cut(f / "train-images-idx3-ubyte", -1), "header announces 480"),
    (PLAIN_IDX, lambda f: cut(f / "train-images-idx3-ubyte", 3), "no IDX file of 3 dimensions"),
    (PLAIN_IDX, lambda f: (f / "train-labels-idx1-ubyte").write_bytes(FEW), r"are uint8\[4\]"),
    (PLAIN_IDX, lambda f: (f / "extra-images-idx3-ubyte").touch(), "no labels beside it"),
    (PLAIN_IDX, lambda f: [p.unlink() for p in f.iterdir()], "none of these: .*IDX files.*, class"),
    (write_idx, lambda f: cut(f / "train-images-idx3-ubyte.gz", 50), "ubyte.gz cannot be read"),
    (lambda f: write_folders(f), lambda f: (f / "test").mkdir(), SPLIT),
    (lambda f: write_folders(f), empty, "no readable image for the split 'validation'"),
    (lambda f: write_folders(f), lambda f: (f / "validation/cat").mkdir(parents=True), "both val/"),
    *(
        (lambda f: write_folders(f), partial(renamed, name=name), UNPRINTABLE)
        for name in ("a\nb", " cat", "a\x85b", "\x1b[2J", "\udcff")
    ),
    (write_ilsvrc2012, lambda f: cut(f / TRAIN, 5000), f"{TRAIN} cannot be read"),
    (write_ilsvrc2012, lambda f: cut(f / DEVKIT_FILE, 200), f"{DEVKIT_FILE} cannot be read"),
    (write_ilsvrc2012, lambda f: (f / DEVKIT_FILE).unlink(), "lacks ILSVRC2012_devkit_t12"),
    (
        write_ilsvrc2012,
        lambda f: tar(f / TRAIN, {"n03000003.tar": b""}),
        "n03000003.tar, which is no archive of one of the 2",
    ),
    *(
        (write_ilsvrc2012, partial(write_devkit, truth=truth, **more), UNREADABLE + message)
        for truth, more, message in [
            (b"1\n0\n", {}, r"KeyError: 0.*\): download it again"),
            (b"1\n-1\n", {}, "KeyError: -1"),
            (b"1\nx\n", {}, "ValueError: invalid literal .* b'x'"),
            (b"1\n", {"meta.mat": b"no table"}, "MatReadError: .*truncated"),
            (b"1\n", {"meta.mat": None}, "KeyError: .*nowhere"),
        ]
    ),
]


@pytest.mark.parametrize(("write", "spoil", "message"), DAMAGED)
def test_damaged_sources_are_named(tmp_path, write, spoil, message):
    """The message names the file and what is wrong, and nothing is written."""
    source = tmp_path / "pets"
    source.mkdir()
    write(source)
    spoil(source)
    with pytest.raises(ValueError, match=message):
        prepare(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_idx_files_whose_header_is_wrong(tmp_path):
    path, empty = tmp_path / "images.gz", idx(np.zeros(0, np.uint8))
    damaged = "damaged: its header announces "
    for dimensions, content, message in [
        (1, empty[:4] + b"\xff" * 4, damaged + "4,294,967,295 values, 0 follow"),
        (1, empty, "announces 0 values"),
        (1, idx(np.zeros(9, np.uint8)) + b"\0", damaged + "9 values, 10 follow"),
    ]:
        path.write_bytes(gzip.compress(content, 9))
        with pytest.raises(ValueError, match=message):
            read_idx(path, dimensions)


def test_names(tmp_path):
    source = tmp_path / "mnist"
    source.mkdir()
    write_idx(source)
    with pytest.raises(ValueError, match="--name='../x' must be lower case"):
        prepare(source, tmp_path / "out", name="../x")
    prepare(source, tmp_path / "out", name="first")
    with pytest.raises(ValueError, match="exists already"):
        prepare(source, tmp_path / "out", name="first")


@pytest.fixture(scope="module")
def pets(tmp_path_factory):
    """A prepared data set: its folder, and that of its one version."""
    folder = tmp_path_factory.mktemp("pets")
    write_folders(folder / "pets")
    prepare(folder / "pets", folder / "out")
    return folder / "out", folder / "out" / "pets" / VERSION


def test_a_damaged_record_is_one_bad_record(pets):
    """A bit of one, in the middle of the file of six."""
    out, version = pets
    (path,) = version.glob("*train*record*")
    content = path.read_bytes()
    place = len(content.split(b"\0" * 1000)[0]) // 2  # zeros fill the file up to 64 KiB
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    dataset = load(out, "pets", "train")
    (batch,) = data.eval_batches(dataset, config.Data(batch_size=6, image_size=6))
    assert sorted(batch["bad"])[:-1] == [-1] * 5
    assert batch["mask"].sum() == 5
    stream = iter(data.train_batches(dataset, config.Data(batch_size=6, image_size=6), 0))
    assert sorted(next(stream)["bad"]) == sorted(batch["bad"])
    path.write_bytes(content)


def test_data_sets_that_are_not_what_they_say(pets):
    out, version = pets
    info, (train,) = version / "dataset_info.json", version.glob("*train*record*")
    text, content = info.read_text(), train.read_bytes()

    def refused(message, split="train"):
        with pytest.raises(ValueError, match=message) as error:
            load(out, "pets", split)
        assert "\n" not in str(error.value)

    assert '"shardLengths": [\n        "6"' in text
    for lie in ("5", "7"):
        info.write_text(text.replace('"6"', f'"{lie}"'))
        refused(f"train.* no whole .* it holds 6 records, and dataset_info.json says {lie}")
    for damaged in ("{", "[]", text.replace('"name": "pets"', '"name": 3')):
        info.write_text(damaged)
        refused("the description of 'pets' in config.data.dir=.* cannot be read")
    info.write_text(text)
    train.write_bytes(content[: len(content) // 2])
    refused("train.* is no whole array_record file")
    train.unlink()
    refused("train.* is no whole array_record file: .*No such file")
    train.write_bytes(content)
    for split in ("train[abc", "train[5:2]", "train[:0]", "train[200%:]", "train[:3"):
        refused(rf"eval_split='{re.escape(split)}' .*'train\[:500\]'|eval_split=.* is empty", split)
    for split in ("trainn", "", "train+trainn", "[:3]"):
        refused(rf"eval_split='{re.escape(split)}' is no split of 'pets'; choices: train,", split)
    assert len(load(out, "pets", "train[:2]+validation").evaluation) == 6
