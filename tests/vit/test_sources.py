"""Sources of raw pictures: what is read of each, damage that is named, the part held out."""

import gzip
import io
import json
import pickle
import re
import shutil
import struct
import tarfile
import zipfile
from functools import partial

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from vit import config, data
from vit.data.sources import forms
from vit.data.sources.source import holdout, with_validation
from vit.data.sources.words import NONE, Words
from vit.prepare import prepare

CLASSES = {"cat": range(7, 17), "dog": range(1, 7), "emu": range(1)}
ROWS = sorted((number, name) for name, numbers in CLASSES.items() for number in numbers)
NUMBERS = np.array([list(CLASSES).index(name) for _, name in ROWS])
TEXT = np.array(list(CLASSES))


def picture(shade, mode="RGB"):
    """A picture of one shade, as a PNG file."""
    buffer = io.BytesIO()
    Image.new(mode, (6, 5), shade if mode == "L" else (shade, 0, 9)).save(buffer, "PNG")
    return buffer.getvalue()


def shade(encoded):
    """Of such a picture."""
    return int(np.asarray(Image.open(io.BytesIO(encoded))).reshape(-1)[0])


def images(number=17, channels=()):
    """The pictures 0, 1, ... as an array."""
    shades = np.arange(number, dtype=np.uint8).reshape(-1, *[1] * (2 + len(channels)))
    return np.broadcast_to(shades, (number, 5, 6, *channels))


# --- Writers of each form


def write_folders(folder, modes=("RGB", "RGB"), **splits):
    """Class folders, at once or in folders of splits, which have the rows of a slice."""
    for split, part in (splits or {"": slice(None)}).items():
        for number, name in ROWS[part]:
            (folder / split / name).mkdir(parents=True, exist_ok=True)
            path = folder / split / name / f"{number}.png"
            path.write_bytes(picture(number, modes[number % 2]))


def table(header, row, suffix=".png", folder="", name="index.csv"):
    """Pictures p0, p1, ... and a csv file of their numbers {0} and classes {1}."""

    def write(source):
        (source / folder).mkdir(parents=True, exist_ok=True)
        for number, _ in ROWS:
            (source / folder / f"p{number}{suffix}").write_bytes(picture(number))
        lines = [header] * bool(header) + [row.format(*each) for each in ROWS]
        (source / name).write_text("\n".join(lines))

    return write


def parted(header, row, name="index.csv", places=("",), folder="{}"):
    """Pictures in folders of splits, {2}, and a table with a row for each, in each of the places.

    {0} is the number of a picture, {1} its class.
    """

    def write(source):
        lines = {place: [header] * bool(header) for place in places}
        for number, label in ROWS:
            split = "train" if number < 14 else "test"
            where = source / folder.format(split)
            where.mkdir(exist_ok=True)
            (where / f"p{number}.png").write_bytes(picture(number))
            place = split if split in places else ""
            lines[place].append(row.format(number, label, split, int(split == "train")))
        for place, each in lines.items():
            (source / place / name).write_text("\n".join(each))

    return write


def write_deeper(source, suffix=".png"):
    """Folders Train and Val; some pictures one and two folders below that of their class."""
    for number, name in ROWS:
        for split in ["Train"] + ["Val"] * (number < 3):
            folder = source / split / name / ("", "batch", "batch/more")[number % 3]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number}{suffix}").write_bytes(picture(number))


def write_npz(folder, **arrays):
    np.savez(folder / "pictures.npz", **arrays)


def idx(array):
    """The IDX form of an array of bytes."""
    sizes = struct.pack(f">{array.ndim}I", *array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


def write_idx(folder, compress=False):
    for prefix, part in [("train", slice(14)), ("t10k", slice(14, 17))]:
        arrays = {"images-idx3": images()[part], "labels-idx1": NUMBERS[part].astype(np.uint8)}
        for name, array in arrays.items():
            content = gzip.compress(idx(array)) if compress else idx(array)
            (folder / f"{prefix}-{name}-ubyte{'.gz' * compress}").write_bytes(content)


def write_parquet(path, rows=ROWS, names=None, struct=True, label="label", **more):
    path.parent.mkdir(parents=True, exist_ok=True)
    encoded = [picture(number) for number, _ in rows]
    known = names if names and {name for _, name in rows} <= {*names} else list(CLASSES)
    table = {
        "image": [{"bytes": x, "path": ""} for x in encoded] if struct else encoded,
        label: [known.index(name) if names else name for _, name in rows],
    }
    schema = pyarrow.table(table | more)
    if names:
        kinds = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
        features = {"huggingface": json.dumps({"info": {"features": kinds}})}
        schema = schema.replace_schema_metadata(features)
    pyarrow.parquet.write_table(schema, path)


def write_parts(folder, **options):
    """Three parquet files, of two splits."""
    for name, part in [
        ("train-00000-of-00002", slice(8)),
        ("train-00001-of-00002", slice(8, 14)),
        ("test-00000-of-00001", slice(14, 17)),
    ]:
        write_parquet(folder / "data" / f"{name}.parquet", ROWS[part], **options)


def write_coded(folder, classes):
    """A parquet file with a code for each picture, and these classes."""
    rows = [(number, f"code{number % 5}") for number, _ in ROWS]
    write_parquet(folder / "x.parquet", rows, label="code", **{"class": classes})


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


LABELS = ["n01751748", "n09193705", "n02105855"]
"""The classes of the first pictures of validation: sea snake, alp, Shetland sheepdog."""
TRAIN, VAL = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"


def write_ilsvrc2012(source, names=("00000001", "00000002", "00000003"), **more):
    """Training has the shades 0 to 8, validation 100, 101, ..."""
    classes = {}
    for k, wnid in enumerate(LABELS):
        inner = source / f"{wnid}.tar"
        tar(inner, {f"{wnid}_{i}.JPEG": picture(3 * k + i) for i in range(3)})
        classes[inner.name] = inner.read_bytes()
        inner.unlink()
    tar(source / TRAIN, classes)
    val = {f"ILSVRC2012_val_{name}.JPEG": picture(100 + i) for i, name in enumerate(names)}
    tar(source / VAL, val | more)


# --- Each form is read


WHOLE = {"train": set(ROWS)}
FOLDERS = WHOLE | {"validation": set(ROWS[:3])}
HELD = {"train": set(ROWS[:14]), "test": set(ROWS[14:])}
NUMBERED_ALL = {"train": {(i, str(list(CLASSES).index(name))) for i, name in ROWS}}
NUMBERED = {k: {(i, str(list(CLASSES).index(name))) for i, name in x} for k, x in HELD.items()}
THREE = {"train": slice(9), "val": slice(9, 12), "test": slice(12, 17)}
SPLIT = {
    f"{split}_{kind}": array[part]
    for split, part in THREE.items()
    for kind, array in (("images", images()), ("labels", NUMBERS[:, None]))
}
NAMED = {"train": set(ROWS[:9]), "validation": set(ROWS[9:12]), "test": set(ROWS[12:])}
ILSVRC = {
    "train": {(3 * k + i, wnid) for k, wnid in enumerate(LABELS) for i in range(3)},
    "validation": {(100 + i, wnid) for i, wnid in enumerate(LABELS)},
}
JSON = '{{"file_name": "p{0}.png", "label": "{1}"}}'
INDEX = Words(("index.csv",), "{file}", "{label}")
BARE = {"no_header": True}
DEEPER = Words(classes=("Train:train", "Val:validation"))
ARRAYS = Words(images=("images",), labels=("labels",))
XY = Words(images=("x",), labels=("y",))
COLUMNS = Words(images=("image",), labels=("label",))
FORMS = {
    "classes": (write_folders, WHOLE, NONE),
    "splits": (partial(write_folders, train=slice(17), val=slice(3)), FOLDERS, NONE),
    "table": (table("file,label", "p{0}.png,{1}"), WHOLE, INDEX),
    "no header": (table("", "{1},p{0}.png"), WHOLE, Words(INDEX.table, "{1}", "{0}", **BARE)),
    "semicolons": (
        table("id;other;class", "p{0};{0};{1}"),
        WHOLE,
        Words(INDEX.table, "{id}.png", "{class}"),
    ),
    "capitals": (
        table("id,Species", "p{0},{1}", ".PNG", "images"),
        WHOLE,
        Words(INDEX.table, "images/{id}.PNG", "{Species}"),
    ),
    "backslashes": (
        table("file,label", "images\\p{0}.png,{1}", folder="images"),
        WHOLE,
        INDEX,
    ),
    "another machine": (
        table("label|file", "{1}|C:\\x\\p{0}.png", folder="images"),
        WHOLE,
        INDEX._replace(picture="images/{file:name}"),
    ),
    "any folder": (
        parted("file,label", "p{0},{1}"),
        WHOLE,
        INDEX._replace(picture="*/{file}.png"),
    ),
    "blanks": (
        table("", "p{0}.png {1}", name="labels.txt"),
        WHOLE,
        Words(("labels.txt",), "{0}", "{1}", **BARE),
    ),
    "metadata": (table("file_name,label", "p{0}.png,{1}", name="metadata.csv"), WHOLE, NONE),
    "metadata above splits": (
        parted("file_name,label", "{2}/p{0}.png,{1}", "metadata.csv"),
        HELD,
        NONE,
    ),
    "jsonl": (table("", JSON, name="metadata.jsonl"), WHOLE, NONE),
    "jsonl in splits": (parted("", JSON, "metadata.jsonl", ("train", "test")), HELD, NONE),
    "split column": (
        parted("file,split,label", "p{0}.png,{2},{1}", folder="all"),
        HELD,
        INDEX._replace(picture="all/{file}", split="{split}"),
    ),
    "numbers of splits": (
        parted("file,label,is_train", "{2}/p{0}.png,{1},{3}"),
        HELD,
        INDEX._replace(split="{is_train}", splits=("1:train", "0.0:test")),
    ),
    "folders of splits": (
        parted("file,label", "{2}/p{0},{1}"),
        HELD,
        INDEX._replace(picture="{file}.png", split="{file:folder}"),
    ),
    "tables of splits": (
        parted("file,label", "p{0}.png,{1}", places=("train", "test")),
        HELD,
        Words(("train/index.csv", "test/index.csv:test"), "*/{file}", "{label}"),
    ),
    "deeper": (write_deeper, FOLDERS, DEEPER),
    "jfif": (partial(write_deeper, suffix=".jfif"), FOLDERS, DEEPER),
    "npz": (partial(write_npz, images=images(), labels=NUMBERS, class_names=TEXT), WHOLE, ARRAYS),
    "npz of text": (partial(write_npz, x=images(channels=(3,)), y=TEXT[NUMBERS]), WHOLE, XY),
    "npz and others": (
        partial(write_npz, x=images(), y=TEXT[NUMBERS], image_ids=NUMBERS, label_names=TEXT),
        WHOLE,
        XY,
    ),
    "npz of splits": (partial(write_npz, class_names=TEXT, **SPLIT), NAMED, NONE),
    "npz of floats": (
        partial(write_npz, x_train=images(), y_train=NUMBERS / 1.0),
        NUMBERED_ALL,
        NONE,
    ),
    "idx": (write_idx, NUMBERED, NONE),
    "idx.gz": (partial(write_idx, compress=True), NUMBERED, NONE),
    "parquet": (partial(write_parts, names=list(CLASSES)), HELD, NONE),
    "parquet of text": (partial(write_parts, struct=False), HELD, COLUMNS),
    "parquet of categories": (
        lambda folder: write_coded(folder, pyarrow.array(TEXT[NUMBERS]).dictionary_encode()),
        WHOLE,
        COLUMNS._replace(labels=("class",)),
    ),
    "ilsvrc2012": (write_ilsvrc2012, ILSVRC, NONE),
}


@pytest.mark.parametrize(("write", "want", "words"), FORMS.values(), ids=FORMS)
def test_pictures_and_classes_of_each_form(tmp_path, write, want, words):
    write(tmp_path)
    source = forms.read(tmp_path, words)
    for _ in range(2):  # the same again
        found = {k: [(shade(x.read()), x.label) for x in f()] for k, f in source.splits.items()}
        assert {k: sorted(rows) for k, rows in found.items()} == {k: sorted(want[k]) for k in want}
    names = {name for rows in want.values() for _, name in rows}
    assert [x for x in source.class_names if x in names] == sorted(names)
    assert len(source.class_names) == (1000 if want == ILSVRC else 3)
    counted = {
        k: {name: sum(x == name for _, x in rows) for name in names} for k, rows in want.items()
    }
    assert {k: {name: x[name] for name in names} for k, x in source.counts.items()} == counted


OTHER = ["dog", "emu", "cat"]
"""The classes in another order."""


def write_files(folder, first, second):
    """Two npz files of different splits; of their arrays the labels are last."""
    for name, (part, more) in {
        "train": (slice(14), first),
        "test": (slice(14, 17), second),
    }.items():
        arrays = {k: x[part] if k == "y" else x for k, x in more.items()}
        np.savez(folder / f"{name}.npz", x=images()[part], **arrays)


def write_parquet_parts(train, test, folder):
    write_parquet(folder / "train.parquet", train, names=list(CLASSES))
    write_parquet(folder / "test.parquet", test, names=list(CLASSES))


def write_named_parts(folder, first, second):
    write_parquet(folder / "train.parquet", ROWS[:14], **first)
    write_parquet(folder / "test.parquet", ROWS[14:], **second)


ORDERED = {"y": NUMBERS, "class_names": TEXT}
SHUFFLED = {"y": np.array([OTHER.index(name) for _, name in ROWS]), "class_names": OTHER}
PLAIN, TEXTS = {"y": NUMBERS}, {"y": TEXT[NUMBERS]}
FILES = Words(
    images=("train.npz/x:train", "test.npz/x:test"),
    labels=("train.npz/y:train", "test.npz/y:test"),
)
OWN = {
    "npz": (write_files, ORDERED, SHUFFLED, FILES),
    "npz and text": (write_files, SHUFFLED, TEXTS, FILES),
    "parquet": (write_named_parts, {"names": list(CLASSES)}, {"names": OTHER}, NONE),
    "parquet and text": (write_named_parts, {"names": OTHER}, {}, COLUMNS),
}


@pytest.mark.parametrize(("write", "first", "second", "words"), OWN.values(), ids=OWN)
def test_each_file_has_its_own_names(tmp_path, write, first, second, words):
    """The order is that of the training file."""
    write(tmp_path, first, second)
    source = forms.read(tmp_path, words)
    found = {k: {(shade(x.read()), x.label) for x in f()} for k, f in source.splits.items()}
    assert found == HELD
    is_shuffled = first is SHUFFLED or first.get("names") == OTHER
    assert list(source.class_names) == (OTHER if is_shuffled else list(CLASSES))


@pytest.mark.parametrize("other", [ORDERED, TEXTS])
def test_names_in_one_file_and_numbers_in_another_are_refused(tmp_path, other):
    for first, second in ((PLAIN, other), (other, PLAIN)):
        write_files(tmp_path, first, second)
        with pytest.raises(ValueError, match="have no names, those of .* have names"):
            forms.read(tmp_path, FILES)


@pytest.mark.parametrize("modes", [("RGB", "RGB"), ("L", "L"), ("L", "RGB")])
def test_class_folders_without_splits_are_split(tmp_path, modes):
    """The data set is grey where all pictures are."""
    source = tmp_path / "source"
    write_folders(source, modes)
    for name in (".hidden", "__MACOSX", "@eaDir/a"):
        (source / name).mkdir(parents=True)
        (source / name / "x.png").write_bytes(b"none")
    prepare(source, tmp_path / "out", "made", validation=0.25)
    section = config.Data(name="made", dir=str(tmp_path / "out"), eval_split="validation")
    section.batch_size = 1
    dataset, found = data.load(section), {}
    for split in ("train", "evaluation"):
        records = getattr(dataset, split)
        rows = [records[i] for i in range(len(records))]
        found[split] = [(shade(x["image"]), dataset.class_names[x["label"]]) for x in rows]
    assert sorted(found["train"] + found["evaluation"]) == ROWS
    assert {name: sum(n == name for _, n in found["evaluation"]) for name in CLASSES} in (
        {"cat": 3, "dog": 1, "emu": 0},
        {"cat": 2, "dog": 2, "emu": 0},
    )
    assert dataset.channels == (1 if modes == ("L", "L") else 3)


# --- The part that is held out


def test_what_is_held_out_is_a_share_of_every_class_and_depends_on_the_seed():
    rng = np.random.default_rng(0)
    labels = [*rng.permutation(np.repeat(["a", "b", "c"], [600, 300, 100])).tolist(), "alone"]
    held = holdout(labels, 0.1, seed=1)
    assert held.sum() == 100
    for name, expected in {"a": 60, "b": 30, "c": 10, "alone": 0}.items():
        assert abs(held[np.asarray(labels) == name].sum() - expected) <= 1
    assert (holdout(labels, 0.1, seed=1) == held).all()
    assert 0 < (holdout(labels, 0.1, seed=2) & held).sum() < 40
    everything = holdout(labels, 0.999, seed=0)
    assert {label for label, h in zip(labels, everything, strict=True) if not h} == set(labels)
    assert holdout(["a", "a", "b"], 0.01, seed=0).sum() == 1
    small = np.repeat(["a", "b", "c", "d"], [8, 9, 9, 2])
    for seed in range(20):  # one of each class of five or more
        assert set(small[holdout(small.tolist(), 0.1, seed)]) >= {"a", "b", "c"}
    for share in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="must be a share between 0 and 1"):
            holdout(["a", "a"], share, 0)
    with pytest.raises(ValueError, match="no class has a second picture"):
        holdout(["a", "b"], 0.5, 0)


def test_groups_stay_on_one_side(tmp_path):
    """Every object has three pictures; as many as without groups are held out, but for one."""
    for number in range(60):
        (tmp_path / f"{number}.png").write_bytes(picture(number))
    rows = [f"{number},{'ab'[number % 2]},{number % 20}" for number in range(60)]
    (tmp_path / "x.csv").write_text("\n".join(["id,kind,lesion", *rows]))
    words = Words(("x.csv",), "{id}.png", "{kind}", group="{lesion}")
    held = with_validation(forms.read(tmp_path, words), 0.2, seed=1)
    lesions = {k: {shade(x.read()) % 20 for x in f()} for k, f in held.splits.items()}
    assert not lesions["train"] & lesions["validation"]
    assert {k: x.total() for k, x in held.counts.items()} == {"train": 48, "validation": 12}
    assert set(held.counts["validation"]) == {"a", "b"}


# --- Damage is named


class Evil:
    def __reduce__(self):
        return print, ("executed",)


def cut(name, end):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:end])


def member(name, content):
    """Add a member that is no array to the npz file."""

    def write(folder):
        with zipfile.ZipFile(folder / "pictures.npz", "a") as archive:
            archive.writestr(name, content)

    return write


def flipped(folder):
    """A member whose checksum is wrong is the end of the archive for tarfile."""
    content = bytearray((folder / VAL).read_bytes())
    content[content.index(b"ILSVRC2012_val_00000002") + 150] ^= 1
    (folder / VAL).write_bytes(content)


def lines(*lines, name="index.csv"):
    """Pictures p0 to p3 next to a table of these lines."""

    def write(folder):
        for number in range(4):
            (folder / f"p{number}.png").write_bytes(picture(number))
        (folder / name).write_bytes(b"\n".join(lines))

    return write


def header(number):
    """The header of an array of so many pictures, without the pictures."""
    content = io.BytesIO()
    claimed = {"descr": "|u1", "fortran_order": False, "shape": (number, 28, 28)}
    np.lib.format.write_array_header_1_0(content, claimed)
    return content.getvalue()


def npz(**arrays):
    return partial(write_npz, **arrays)


def parquet(**options):
    return lambda folder: write_parquet(folder / "x.parquet", **options)


TRAINING = partial(write_folders, train=slice(17), val=slice(3))
PAIR = lines(b"file,label", b"p0.png,a", b"p1.png,b")
DAMAGED = [
    (write_idx, cut("train-images-idx3-ubyte", -1), NONE, "cannot reshape array of size 419"),
    (write_idx, lambda f: [p.unlink() for p in f.iterdir()], NONE, "none of these: .*IDX files"),
    (
        write_idx,
        lambda f: (f / "t10k-images-idx3-ubyte").rename(f / "more-images-idx3-ubyte"),
        NONE,
        "more-images-idx3-ubyte must be named",
    ),
    (
        partial(write_idx, compress=True),
        cut("train-images-idx3-ubyte.gz", 50),
        NONE,
        "ubyte.gz cannot be read",
    ),
    (
        TRAINING,
        lambda f: shutil.copytree(f / "val", f / "validation"),
        NONE,
        "both val/ and validation/",
    ),
    (TRAINING, lambda f: (f / "train/dog").rename(f / "train/cow"), NONE, "that train lacks:.*dog"),
    (write_folders, lambda f: (f / "cat").rename(f / "\x1b[2J"), NONE, "or an unprintable"),
    (
        partial(write_folders, train=slice(17)),
        lambda f: [shutil.copytree(f / "train/cat", f / f"train/{x}") for x in ("1", "01")],
        NONE,
        "holds two folders of the class '1'",
    ),
    (write_ilsvrc2012, flipped, NONE, f"{VAL} cannot be read: .* at byte 1,024"),
    (write_ilsvrc2012, lambda f: (f / VAL).unlink(), NONE, f"{VAL} cannot be read"),
    (write_ilsvrc2012, lambda f: tar(f / VAL, {"0.JPEG": b""}), NONE, "cannot be read: '0.JPEG'"),
    (write_folders, write_idx, NONE, "holds IDX files and class folders, so .*--classes=[.]"),
    (PAIR, None, INDEX._replace(label="{x}"), "index.csv has no column 'x', but file, label"),
    (PAIR, None, INDEX._replace(picture="{0}"), "no column '0'.*; with --no_header they are"),
    (
        PAIR,
        None,
        INDEX._replace(split="{label}"),
        "the split 'a' is none of train, validation, val",
    ),
    (PAIR, None, INDEX._replace(table=("no.csv",)), "no.csv cannot be read as a table"),
    (
        lines(b"file,file", b"p0.png,p1.png"),
        None,
        INDEX._replace(label="{file}"),
        "several columns 'file'",
    ),
    (lines(b"file,label", b"p0.png,a,b"), None, INDEX, "row 2 has 3 fields, the first 2"),
    (lines(b"file,label", b"p0.png,", b"p1.png,a"), None, INDEX, "the class '' in .* is empty"),
    (
        lines(b"file,label,set", b"p0.png,a,test", b"p1.png,b,test"),
        None,
        INDEX._replace(split="{set}"),
        "no training split, but t",
    ),
    (
        lines(b"file,label,set", b"p0.png,a,train", b"p1.png,b,train", b"p2.png,c,test"),
        None,
        INDEX._replace(split="{set}"),
        r"test has classes that train lacks: \['c'\]",
    ),
    (
        lines(b"file,label", b"p0.png,a b", b"p1.png,a", b"p2.png,b"),
        None,
        INDEX,
        "'a b' .* names several classes: a picture has one class",
    ),
    (
        lines(b'{"file_name": "p0.png", "label": ["a", "b"]}', name="metadata.jsonl"),
        None,
        NONE,
        "'a|b' .* a picture has one class",
    ),
    (
        lines(b'{"file_name": "p0.png", "text": "a"}', name="metadata.jsonl"),
        None,
        NONE,
        "has no column 'label', but file_name, text",
    ),
    (
        lines(b"file,label", b"P0.png,a", b"p1.png,b"),
        None,
        INDEX,
        "1 of 2 rows .* P0.png .'P0.png' is 'p0.png' on the disk: only case, Unicode form or suf",
    ),
    (
        lines(b"file,label", b"p0.PNG,a", b"p1.png,b"),
        None,
        INDEX,
        "'p0.PNG' is 'p0.png' on the disk: only case",
    ),
    (
        lines(b"file,label", b"p0.jpg,a", b"p1.png,b"),
        None,
        INDEX,
        "'p0.jpg' is 'p0.png' on the disk: only case",
    ),
    (
        lines(b"file,label", "p\u00e9.png,a".encode(), b"p1.png,b"),
        lambda f: (f / "p0.png").rename(f / "pe\u0301.png"),
        INDEX,
        r"'p\\xe9.png' is 'pe\\u0301.png' on the disk: only case, Unic",
    ),
    (npz(y_train=NUMBERS), member("x_train", b"text"), NONE, r"is \|S4\[\]: images are uint8"),
    (
        npz(x_train=images(), y_train=NUMBERS),
        lambda f: shutil.copy(f / "pictures.npz", f / "again.npz"),
        NONE,
        "both again.npz/x_train and pictures.npz/x_train for the split 'train'",
    ),
    (npz(images=images()), None, NONE, r"of Keras.*; it holds .*/images uint8\[17, 5, 6\]"),
    (npz(x=images(), y=NUMBERS), None, XY._replace(labels=("z",)), "holds 0 arrays 'z'; there are"),
    (npz(x=images(), y=NUMBERS), None, XY._replace(labels=("y:test",)), "one array for each split"),
    (npz(x_train=images(channels=(2,)), y_train=NUMBERS), None, NONE, r"height, width\[, 1 or 3\]"),
    (npz(x_train=images(), y_train=NUMBERS - 1), None, NONE, "labels -1 to 1; they must be from 0"),
    (npz(x_train=images(), y_train=NUMBERS / 2), None, NONE, "text or a whole number for each"),
    (
        npz(x_train=images(), y_train=np.eye(3)[NUMBERS]),
        None,
        NONE,
        "has one class; store numpy.arg",
    ),
    (
        npz(x_train=images(), y_train=NUMBERS, class_names=["a", "a", "b"]),
        None,
        NONE,
        "'a' is the name of several classes",
    ),
    (
        npz(x_train=images(), y_train=NUMBERS, class_names=["a", "b"]),
        None,
        NONE,
        "0 to 2; they must be from 0 to 1, for there are 2 class_names",
    ),
    (
        npz(x_train=images(), y_train=NUMBERS, x_test=images(1), y_test=NUMBERS[:1] + 3),
        None,
        NONE,
        r"test has classes that train lacks: \['5'\]",
    ),
    (
        partial(write_parquet_parts, ROWS[:7], ROWS[7:]),
        None,
        NONE,
        r"test has classes that train lacks: \['cat'\]",
    ),
    (npz(x_train=images(), y_train=np.array([Evil()] * 17)), None, NONE, "allow_pickle=False"),
    (npz(x_train=images(), y_train=NUMBERS), cut("pictures.npz", 100), NONE, "npz cannot be read"),
    (parquet(label="a", b=["x"] * 17), None, NONE, "no metadata with one Image and one ClassLabel"),
    (parquet(names=["cat", "dog"]), None, NONE, "'label' has 2, but the classes are 0 to 1"),
    (
        lambda folder: write_coded(folder, [0.5] * 17),
        None,
        COLUMNS._replace(labels=("class",)),
        "the column 'class' must hold text or whole",
    ),
    (parquet(), None, COLUMNS._replace(images=("label",)), "'label' must hold encoded pictures"),
    (
        lambda folder: write_named_parts(
            folder, {"names": list(CLASSES)}, {"names": list(CLASSES)}
        ),
        lambda f: (f / "test.parquet").rename(f / "held_out.parquet"),
        NONE,
        "held_out.parquet names none of the splits",
    ),
    (parquet(), cut("x.parquet", 100), NONE, "x.parquet cannot be read as a parquet file"),
    (
        npz(y_train=NUMBERS),
        member("x_train.npy", header(10**13)),
        NONE,
        "pictures.npz cannot be read: Un",
    ),
]


@pytest.mark.parametrize(("write", "spoil", "words", "message"), DAMAGED)
def test_damaged_sources_are_named(tmp_path, write, spoil, words, message, capsys):
    """The message names the file and what is wrong; nothing in it is executed."""
    write(tmp_path)
    if spoil:
        spoil(tmp_path)
    with pytest.raises(ValueError, match=message):
        forms.read(tmp_path, words)
    assert "executed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (Words(("x.csv",), "{id}"), "--table needs --picture and --label"),
        (Words(label="{x}"), "--label describes a table"),
        (INDEX._replace(label="label"), "--label=label has no column of the table, as {label}"),
        (Words(no_header=True), "--no_header describes a table"),
        (Words(images=("x",)), "--images and --labels describe arrays or columns: give both"),
        (XY._replace(classes=("a",)), "--images describes arrays"),
        (Words(bits=7), "--bits=7 must be 8 to 16"),
        (INDEX._replace(max_missing=1.0), "--max_missing=1.0 must be a share"),
        (Words(classes=("a:half",)), "--classes: 'half' is no split; these are train"),
        (INDEX._replace(split="{a}", splits=("0:half",)), "--splits: 'half' is no split"),
        (Words(classes=("a",)), "--classes=a: .* holds no folders with pictures"),
    ],
)
def test_words_that_lack_others_or_contradict(tmp_path, words, message):
    PAIR(tmp_path)
    with pytest.raises(ValueError, match=message):
        forms.read(tmp_path, words)


def test_a_picture_next_to_the_class_folders_of_a_split_makes_it_no_class(tmp_path):
    write_folders(tmp_path, train=slice(17), val=slice(3))
    (tmp_path / "train" / "cover.png").write_bytes(picture(1))
    source = forms.read(tmp_path)
    assert (source.class_names, {*source.splits}) == (list(CLASSES), {"train", "validation"})
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "1.png").write_bytes(picture(1))  # without classes
    assert {*forms.read(tmp_path).splits} == {"train", "validation"}


def test_rows_without_a_picture_are_counted_and_named(tmp_path):
    """They are refused above the share that is said; the message says which one."""
    table("file,label", "p{0}.png,{1}")(tmp_path)
    lines = (tmp_path / "index.csv").read_text().splitlines()
    missing = [f"q{number}.png,cat" for number in range(12)]
    (tmp_path / "index.csv").write_text("\n".join([lines[0], *missing, *lines[1:]]))
    counted = "12 of 29 rows of .*index.csv name no picture: q0.png, q1.png, q2.png, ..."
    with pytest.raises(ValueError, match=f"{counted}; --max_missing=0.42 leaves them out"):
        forms.read(tmp_path, INDEX)
    source = forms.read(tmp_path, INDEX._replace(max_missing=0.42))
    assert [(shade(x.read()), x.label) for x in source.splits["train"]()] == ROWS
    assert re.fullmatch(f"left out: {counted}", source.notes[0])
    with pytest.raises(ValueError, match="--max_missing=0.42 leaves"):
        forms.read(tmp_path, INDEX._replace(max_missing=0.41))


def test_rows_of_no_split_are_left_out(tmp_path):
    parted("file,label,part", "{2}/p{0}.png,{1},{3}")(tmp_path)
    words = INDEX._replace(split="{part}", splits=("1:train", "0:none"))
    assert {k: x.total() for k, x in forms.read(tmp_path, words).counts.items()} == {"train": 14}


def test_a_picture_has_one_class_and_one_split(tmp_path):
    """Rows of boxes, and tables that contain others."""
    rows = [f"{number}.png,{name}" for number, name in ROWS]
    for number, _ in ROWS:
        (tmp_path / f"{number}.png").write_bytes(picture(number))
    (tmp_path / "index.csv").write_text("\n".join(["file,label", *rows, *rows[:5]]))
    read = partial(forms.read, tmp_path)
    assert [(shade(x.read()), x.label) for x in read(INDEX).splits["train"]()] == ROWS
    (tmp_path / "test.csv").write_text("\n".join(["file,label", *rows[:4]]))
    with pytest.raises(ValueError, match="0.png has the class 'emu' in test, and in another row"):
        read(INDEX._replace(table=("index.csv", "test.csv:test")))
    (tmp_path / "index.csv").write_text("\n".join(["file,label", *rows, "3.png,emu"]))
    with pytest.raises(
        ValueError, match="3.png has the class 'emu' in train, .* 'dog' in train: a"
    ):
        read(INDEX)


def test_one_word_for_a_label(tmp_path):
    """A whole number however it is written, text in NFC; so two folders are one class."""
    PAIR(tmp_path)
    rows = ["p0.png,01", "p1.png,1.0", "p2.png,e\u0301", "p3.png,\u00e9"]
    (tmp_path / "index.csv").write_text("\n".join(["file,label", *rows]))
    assert forms.read(tmp_path, INDEX).counts["train"] == {"1": 2, "\u00e9": 2}


def test_tables_that_are_joined(tmp_path):
    PAIR(tmp_path)
    (tmp_path / "index.csv").write_text("id,file\n7,p0.png\n8,p1.png")
    (tmp_path / "more.csv").write_text("id,label\n8,b\n7,a\n9,c")
    words = INDEX._replace(table=("index.csv+more.csv",))
    assert [x.label for x in forms.read(tmp_path, words).splits["train"]()] == ["a", "b"]
    for more, message in (("8,b", "it has no row '7'"), ("7,a\n7,b\n8,b", "several rows")):
        (tmp_path / "more.csv").write_text(f"id,label\n{more}")
        with pytest.raises(ValueError, match=f"more.csv cannot be joined with .*{message}"):
            forms.read(tmp_path, words)


def test_a_row_that_names_several_pictures(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        PAIR(tmp_path / folder)
    words = Words(("a/index.csv",), "*/{file}", "{label}")
    with pytest.raises(ValueError, match="'.*/p0.png' names several pictures, .*a/p0.png, .*b/p0"):
        forms.read(tmp_path, words)


def test_paths_instead_of_pictures_in_parquet(tmp_path):
    write_parquet(tmp_path / "x.parquet", names=list(CLASSES))
    table = pyarrow.parquet.read_table(tmp_path / "x.parquet")
    paths = [{"bytes": None, "path": f"{number}.png"} for number, _ in ROWS]
    column = pyarrow.array(paths, table["image"].type)
    pyarrow.parquet.write_table(table.set_column(0, "image", column), tmp_path / "x.parquet")
    first = next(forms.read(tmp_path).splits["train"]())
    with pytest.raises(FileNotFoundError, match="it has no bytes, but the path 0.png"):
        first.read()


def test_every_file_is_accounted_for(tmp_path, capsys):
    """Files that are read, and ignored ones by kind, with the reason and the first of them."""
    source = tmp_path / "pets"
    write_folders(source)
    (source / "7.png").write_bytes(picture(7))
    (source / "cat" / "._0.png").write_bytes(b"")
    (source / "cat" / "scan").write_bytes(picture(8))
    (source / "cat" / "notes").write_text("none")
    (source / "dog" / "scan.tif").write_bytes(b"II*")
    (source / "means.csv").write_text("a,b\n1,2\n")
    (source / "train_test_split.txt").write_text("7.png 1\n")
    prepare(source, tmp_path / "out")
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split() == ["class", "train", "validation"]
    for row, (name, numbers) in zip(printed[1:4], CLASSES.items(), strict=True):
        label, *counts = row.split()
        assert (label, sum(map(int, counts))) == (name, len(numbers) + (name == "dog"))
    assert printed[4].split() == ["all", "3", "16", "2"]
    assert printed[5] == "read: 17 .png"
    assert sorted(printed[6:]) == [
        "ignored: 1 .csv, not read; --table names a table (means.csv)",
        "ignored: 1 .png, hidden, or a copy of macOS or Synology (cat/._0.png)",
        "ignored: 1 .png, not in a class folder or not named by a table (7.png)",
        "ignored: 1 .txt, not read; --table names a table (train_test_split.txt)",
        "ignored: 1 without suffix, a picture without suffix: rename it (cat/scan)",
        "ignored: 1 without suffix, no picture (cat/notes)",
        "skipped: 1 .tif, unreadable",
    ]


def test_folders_of_no_form(tmp_path):
    (tmp_path / "a.jpg").write_bytes(picture(1))
    (tmp_path / "evil.pkl").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(
        ValueError, match=r"none of these \(1 pictures without classes\): .*parq.*pickl"
    ):
        forms.read(tmp_path)
    with pytest.raises(ValueError, match="is no folder$"):
        forms.read(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="is no folder. Archives are not read: unpack x.zip first"):
        forms.read(tmp_path / "x.zip")


def test_a_table_reads_nothing_outside_its_folder(tmp_path):
    outside, folder = tmp_path / "secret.png", tmp_path / "photos"
    folder.mkdir()
    PAIR(folder)
    outside.write_bytes(picture(1))
    for word in (str(outside), "../secret.png", str(folder / "p2.png")):
        (folder / "index.csv").write_text(f"file,label\np0.png,cat\np1.png,dog\n{word},dog\n")
        with pytest.raises(ValueError, match="1 of 3 rows .* name no picture: .*png"):
            forms.read(folder, INDEX)
