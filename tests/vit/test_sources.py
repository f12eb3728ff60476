"""The forms of raw pictures: what is read of each, damage that is named, the part held out."""

import gzip
import io
import json
import pickle
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
from vit.data.sources.source import holdout
from vit.prepare import prepare

CLASSES = {"cat": range(0, 10), "dog": range(10, 16), "emu": range(16, 17)}
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


def write_trains(source):
    """Classes with the names of splits, for they hold pictures; copies of macOS are none."""
    write_folders(source)
    for name, new in {"cat": "train", "dog": "Test", "emu": "valid"}.items():
        (source / name).rename(source / new)
        (source / new / "._0.png").write_bytes(b"")
    (source / "__MACOSX" / "train").mkdir(parents=True)
    (source / "__MACOSX" / "train" / "x.png").write_bytes(b"")


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
    known = names if names and {*names} == {*CLASSES} else list(CLASSES)
    table = {
        "image": [{"bytes": x, "path": None} for x in encoded] if struct else encoded,
        label: [known.index(name) if names else name for _, name in rows],
    }
    schema = pyarrow.table(table | more)
    if names:
        features = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
        schema = schema.replace_schema_metadata({"huggingface": json.dumps(features)})
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


WNIDS = ["n01440764", "n01443537"]
LABELS = ["n01751748", "n09193705", "n02105855"]  # sea snake, alp, Shetland sheepdog
TRAIN, VAL = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"


def write_ilsvrc2012(source, names=("00000001", "00000002", "00000003"), **more):
    """Training has the shades 0 to 5, validation 100, 101, ..."""
    classes = {}
    for k, wnid in enumerate(WNIDS):
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
NUMBERED = {k: {(i, str(list(CLASSES).index(name))) for i, name in x} for k, x in HELD.items()}
THREE = {"train": slice(9), "val": slice(9, 12), "test": slice(12, 17)}
SPLIT = {
    f"{split}_{kind}": array[part]
    for split, part in THREE.items()
    for kind, array in (("images", images()), ("labels", NUMBERS[:, None]))
}
NAMED = {"train": set(ROWS[:9]), "validation": set(ROWS[9:12]), "test": set(ROWS[12:])}
ILSVRC = {
    "train": {(3 * k + i, wnid) for k, wnid in enumerate(WNIDS) for i in range(3)},
    "validation": {(100 + i, wnid) for i, wnid in enumerate(LABELS)},
}
JSON = '{{"file_name": "p{0}.png", "label": "{1}"}}'
FORMS = {
    "classes": (write_folders, WHOLE),
    "splits": (partial(write_folders, train=slice(17), val=slice(3)), FOLDERS),
    "table": (table("file,label", "p{0}.png,{1}"), WHOLE),
    "no header": (table("", "{1},p{0}.png"), WHOLE),
    "semicolons": (table("id;other;class", "p{0};{0};{1}"), WHOLE),
    "capitals": (table("id,Species", "p{0},{1}", ".PNG", "images"), WHOLE),
    "folders": (table("id,group,class,file", "{0},x,{1},images/p{0}.png", folder="images"), WHOLE),
    "backslashes": (table("file,label", "C:\\data\\p{0}.png,{1}"), WHOLE),
    "another machine": (table("label|file", "{1}|/home/x/p{0}.png", folder="images"), WHOLE),
    "blanks": (table("", "p{0}.png {1}", name="labels.txt"), WHOLE),
    "jsonl": (table("", JSON, name="metadata.jsonl"), WHOLE),
    "jsonl in splits": (parted("", JSON, "metadata.jsonl", ("train", "test")), HELD),
    "split column": (parted("file,split,label", "p{0}.png,{2},{1}", folder="all"), HELD),
    "is_train": (parted("file,label,is_train", "{2}/p{0}.png,{1},{3}"), HELD),
    "folders of splits": (parted("file,label", "{2}/p{0},{1}"), HELD),
    "deeper": (write_deeper, FOLDERS),
    "jfif": (partial(write_deeper, suffix=".jfif"), FOLDERS),
    "npz": (partial(write_npz, images=images(), labels=NUMBERS, class_names=TEXT), WHOLE),
    "npz of text": (partial(write_npz, x=images(channels=(3,)), y=TEXT[NUMBERS]), WHOLE),
    "npz and others": (
        partial(write_npz, x=images(), y=TEXT[NUMBERS], image_ids=NUMBERS, label_names=TEXT),
        WHOLE,
    ),
    "npz of splits": (partial(write_npz, class_names=TEXT, **SPLIT), NAMED),
    "idx": (write_idx, NUMBERED),
    "idx.gz": (partial(write_idx, compress=True), NUMBERED),
    "parquet": (partial(write_parts, names=list(CLASSES)), HELD),
    "parquet of text": (partial(write_parts, struct=False), HELD),
    "parquet of categories": (
        lambda folder: write_coded(folder, pyarrow.array(TEXT[NUMBERS]).dictionary_encode()),
        WHOLE,
    ),
    "ilsvrc2012": (write_ilsvrc2012, ILSVRC),
}


@pytest.mark.parametrize(("write", "want"), FORMS.values(), ids=FORMS)
def test_pictures_and_classes_of_each_form(tmp_path, write, want):
    write(tmp_path)
    source = forms.read(tmp_path)
    for _ in range(2):  # the same again
        found = {k: [(shade(x.read()), x.label) for x in f()] for k, f in source.splits.items()}
        assert {k: sorted(rows) for k, rows in found.items()} == {k: sorted(want[k]) for k in want}
    names = {name for rows in want.values() for _, name in rows}
    assert [x for x in source.class_names if x in names] == sorted(names)
    assert len(source.class_names) == (1000 if want == ILSVRC else 3)


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


def write_named_parts(folder, first, second):
    write_parquet(folder / "train.parquet", ROWS[:14], **first)
    write_parquet(folder / "test.parquet", ROWS[14:], **second)


ORDERED = {"y": NUMBERS, "class_names": TEXT}
SHUFFLED = {"y": np.array([OTHER.index(name) for _, name in ROWS]), "class_names": OTHER}
PLAIN, TEXTS = {"y": NUMBERS}, {"y": TEXT[NUMBERS]}
OWN = {
    "npz": (write_files, ORDERED, SHUFFLED),
    "npz and text": (write_files, SHUFFLED, TEXTS),
    "parquet": (write_named_parts, {"names": list(CLASSES)}, {"names": OTHER}),
    "parquet and text": (write_named_parts, {"names": OTHER}, {}),
}


@pytest.mark.parametrize(("write", "first", "second"), OWN.values(), ids=OWN)
def test_each_file_has_its_own_names(tmp_path, write, first, second):
    """The order is that of the training file."""
    write(tmp_path, first, second)
    source = forms.read(tmp_path)
    found = {k: {(shade(x.read()), x.label) for x in f()} for k, f in source.splits.items()}
    assert found == HELD
    is_shuffled = first is SHUFFLED or first.get("names") == OTHER
    assert list(source.class_names) == (OTHER if is_shuffled else list(CLASSES))


@pytest.mark.parametrize("other", [ORDERED, TEXTS])
def test_names_in_one_file_and_numbers_in_another_are_refused(tmp_path, other):
    for first, second in ((PLAIN, other), (other, PLAIN)):
        write_files(tmp_path, first, second)
        with pytest.raises(ValueError, match="are numbers without names, those of .* have names"):
            forms.read(tmp_path)


@pytest.mark.parametrize("modes", [("RGB", "RGB"), ("L", "L"), ("L", "RGB")])
def test_class_folders_without_splits_are_split(tmp_path, modes):
    """The data set is grey where all pictures are."""
    source = tmp_path / "source"
    write_folders(source, modes)
    (source / ".hidden").mkdir()
    (source / ".hidden" / "x.png").write_bytes(b"none")
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


def lines(*lines):
    """Two pictures beside a csv file of these lines."""

    def write(folder):
        for name in ("p0.png", "p1.png"):
            (folder / name).write_bytes(picture(1))
        (folder / "index.csv").write_bytes(b"\n".join(lines))

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
DAMAGED = [
    (write_idx, cut("train-images-idx3-ubyte", -1), "cannot reshape array of size 419"),
    (write_idx, lambda f: [p.unlink() for p in f.iterdir()], "none of these: .*IDX files.*, class"),
    (
        partial(write_idx, compress=True),
        cut("train-images-idx3-ubyte.gz", 50),
        "ubyte.gz cannot be read",
    ),
    (TRAINING, lambda f: shutil.copytree(f / "val", f / "Valid"), "both Valid/ and val/"),
    (TRAINING, lambda f: (f / "train/cat").rename(f / "train/cow"), "classes that train/ lacks"),
    (write_folders, lambda f: (f / "cat").rename(f / "\x1b[2J"), "or an unprintable"),
    (write_ilsvrc2012, flipped, f"{VAL} cannot be read: .* at byte 1,024"),
    (write_ilsvrc2012, lambda f: (f / VAL).unlink(), f"{VAL} cannot be read"),
    (write_ilsvrc2012, lambda f: tar(f / VAL, {"0.JPEG": b""}), "cannot be read: '0.JPEG'"),
    (lines(b"file,a,b", b"p0.png,cat,x", b"p1.png,dog,y"), None, "which column .* there are a, b"),
    (lines(b"file,label", b"p0.png,", b"p1.png,a"), None, "the class '' in .* is empty"),
    (
        lines(b"file,label,set", b"p0.png,a,test", b"p1.png,b,test"),
        None,
        "no training split, but t",
    ),
    (npz(labels=NUMBERS), member("images.npy", header(10**13)), "pictures.npz cannot be read: Un"),
    (npz(labels=NUMBERS), member("images", b"text"), r"images is \|S4\[\]: images are uint8"),
    (npz(images=images()), None, r"images and labels.*it holds .*images uint8\[17, 5, 6\]"),
    (npz(x=images(), x_more=images(), y=NUMBERS), None, "holds x and x_more for the split 'train'"),
    (npz(x=images(), y=NUMBERS, y_old=NUMBERS), None, "holds y and y_old for the split 'train'"),
    (npz(images=images(channels=(2,)), labels=NUMBERS), None, r"height, width\[, 1 or 3\]"),
    (npz(images=images(), labels=np.array([Evil()] * 17)), None, "allow_pickle=False"),
    (npz(images=images(), labels=NUMBERS), cut("pictures.npz", 100), "pictures.npz cannot be read"),
    (parquet(label="a", b=["x"] * 17), None, "which column holds the classes.*there are a, b"),
    (parquet(names=["cat", "dog"]), None, "'label' has 2, but the classes are 0 to 1"),
    (lambda folder: write_coded(folder, [0.5] * 17), None, "'class' has double: make it text or"),
    (parquet(), cut("x.parquet", 100), "x.parquet cannot be read as a parquet file"),
]


def labels_of(folder):
    """All files are opened, as in the first pass of `vit.prepare`."""
    return [x.label for examples in forms.read(folder).splits.values() for x in examples()]


@pytest.mark.parametrize(("write", "spoil", "message"), DAMAGED)
def test_damaged_sources_are_named(tmp_path, write, spoil, message, capsys):
    """The message names the file and what is wrong; nothing in it is executed."""
    write(tmp_path)
    if spoil:
        spoil(tmp_path)
    with pytest.raises(ValueError, match=message):
        labels_of(tmp_path)
    assert "executed" not in capsys.readouterr().out


def test_the_column_of_classes_is_named(tmp_path):
    table("file,label,class", "p{0}.png,{1},x")(tmp_path)
    assert forms.read(tmp_path, "class").class_names == ["x"]
    for column, message in [
        ("", "which column .*--labels_column=NAME; .* label, class"),
        ("nam", "--labels_column=nam: .* has the columns label, class"),
    ]:
        with pytest.raises(ValueError, match=message):
            forms.read(tmp_path, column)


def test_a_folder_that_holds_pictures_is_a_class_whatever_its_name(tmp_path):
    write_trains(tmp_path)
    assert forms.read(tmp_path).class_names == ["Test", "train", "valid"]
    assert sorted(labels_of(tmp_path)).count("train") == 10


def test_a_picture_beside_the_class_folders_of_a_split_makes_it_no_class(tmp_path):
    write_folders(tmp_path, train=slice(17), val=slice(3))
    (tmp_path / "train" / "cover.png").write_bytes(picture(1))
    source = forms.read(tmp_path)
    assert (source.class_names, {*source.splits}) == (list(CLASSES), {"train", "validation"})
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "1.png").write_bytes(picture(1))  # without classes
    assert {*forms.read(tmp_path).splits} == {"train", "validation"}


def test_rows_without_a_picture_are_errors_that_name_them(tmp_path):
    """Also if they are the first; a table of which most pictures are missing is refused."""
    table("file,label", "p{0}.png,{1}")(tmp_path)
    lines = (tmp_path / "index.csv").read_text().splitlines()
    missing = [f"q{number}.png,cat" for number in range(12)]
    (tmp_path / "index.csv").write_text("\n".join([lines[0], *missing, *lines[1:]]))
    examples = list(forms.read(tmp_path).splits["train"]())
    assert [(shade(x.read()), x.label) for x in examples[12:]] == ROWS
    with pytest.raises(FileNotFoundError, match="no picture of .* has the name 'q0.png'"):
        examples[0].read()
    (tmp_path / "index.csv").write_text("\n".join([lines[0], *missing, *lines[1:9]]))
    with pytest.raises(ValueError, match="index.csv names 20 pictures, of which 8 are in .*"):
        forms.read(tmp_path)
    (tmp_path / "index.csv").write_text("file,split,label\np0.png,fold1,cat\np1.png,fold2,dog")
    with pytest.raises(ValueError, match="'split' has 'fold1': the splits are train, validation"):
        forms.read(tmp_path)


def read_of(source, split="train"):
    """Shade and class of each picture of a split."""
    return [(shade(x.read()), x.label) for x in forms.read(source).splits[split]()]


def test_a_picture_has_one_class_and_one_split(tmp_path):
    """Rows of boxes, tables that contain others, and made-up labels of a submission."""
    rows = [f"{number}.png,{name}" for number, name in ROWS]
    for number, _ in ROWS:
        (tmp_path / f"{number}.png").write_bytes(picture(number))
    (tmp_path / "labels.csv").write_text("\n".join(["file,label", *rows, *rows[:5]]))
    (tmp_path / "sample_submission.csv").write_text("file,label\n3.png,dog\n4.png,dog")
    assert read_of(tmp_path) == ROWS
    (tmp_path / "test.csv").write_text("\n".join(["file,label", *rows[:4]]))
    with pytest.raises(ValueError, match=r"0.png has the split and class test, 'cat', and in ano"):
        forms.read(tmp_path)
    (tmp_path / "test.csv").write_text("file,label\n")
    (tmp_path / "labels.csv").write_text("\n".join(["file,label", *rows, "3.png,emu"]))
    with pytest.raises(ValueError, match=r"3.png has .* train, 'emu', .* row train, 'cat': a pict"):
        forms.read(tmp_path)


def test_classes_that_are_also_names_of_pictures(tmp_path):
    for number, _ in ROWS:
        (tmp_path / f"{number}.png").write_bytes(picture(number))
    rows = [f"{number % 3},{number}" for number, _ in ROWS]
    (tmp_path / "labels.csv").write_text("\n".join(["label,file", *rows]))
    assert read_of(tmp_path) == [(number, str(number % 3)) for number, _ in ROWS]


def test_numbers_of_rows_that_are_also_names_of_pictures(tmp_path):
    """A first column without a name, as pandas writes it, is ignored; others are ambiguous.

    It has the names if no other column has.
    """
    for number, _ in ROWS:
        (tmp_path / f"{number}.png").write_bytes(picture(number))
    rows = [f"{row},{number}.png,{name}" for row, (number, name) in enumerate(ROWS[::-1])]
    (tmp_path / "labels.csv").write_text("\n".join([",file,label", *rows]))
    assert read_of(tmp_path) == ROWS[::-1]
    (tmp_path / "labels.csv").write_text("\n".join(["row,file,label", *rows]))
    with pytest.raises(ValueError, match="'row' and 'file' name different pictures in a row"):
        forms.read(tmp_path)
    again = ["18,3.png,cat", "19,3.png,cat"]
    (tmp_path / "labels.csv").write_text("\n".join(["row,file,label", *rows[:14], *again]))
    with pytest.raises(ValueError, match="'row' and 'file' name different pictures in a row"):
        forms.read(tmp_path)
    rows = [f"{number},{NUMBERS[number]}" for number, _ in ROWS[::-1]]
    (tmp_path / "labels.csv").write_text("\n".join([",label", *rows]))
    assert read_of(tmp_path) == [(n, str(NUMBERS[n])) for n, _ in ROWS[::-1]]


def test_a_head_that_is_also_the_name_of_a_picture(tmp_path):
    table("file,label", "p{0}.png,{1}")(tmp_path)
    (tmp_path / "file.png").write_bytes(picture(99))
    assert read_of(tmp_path) == ROWS


def test_a_lost_picture_is_not_replaced_by_one_of_another_folder(tmp_path):
    for number, _ in ROWS:
        for folder in ("one", "two/old")[number == 3 :]:
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / f"{number}.png").write_bytes(picture(number))
    rows = [f"/home/one/{number}.png,{name}" for number, name in ROWS]
    (tmp_path / "labels.csv").write_text("\n".join(["file,label", *rows]))
    examples = list(forms.read(tmp_path).splits["train"]())
    with pytest.raises(FileNotFoundError, match="no picture of .* has the name '/home/one/3.png'"):
        examples.pop(3).read()
    assert [(shade(x.read()), x.label) for x in examples] == [x for x in ROWS if x[0] != 3]


def test_pictures_that_are_lost_or_in_no_folder_do_not_change_the_split_of_others(tmp_path):
    parted("file,label", "{2}/p{0}.png,{1}")(tmp_path)
    (tmp_path / "train" / "p3.png").unlink()
    (tmp_path / "train" / "p4.png").rename(tmp_path / "p4.png")
    assert read_of(tmp_path, "test") == ROWS[14:]


def test_numbers_of_a_column_of_splits_have_no_meaning(tmp_path):
    """Except in `is_train`: 0 is training in some data sets."""
    parted("file,label,partition", "p{0}.png,{1},{3}", folder="all")(tmp_path)
    with pytest.raises(ValueError, match="'partition' has '1': the splits are train, validation"):
        forms.read(tmp_path)


def test_other_names_of_validation(tmp_path):
    for name in ("dev", "eval"):
        (tmp_path / name / "all").mkdir(parents=True)
        for number, _ in ROWS:
            (tmp_path / name / "all" / f"{number}.png").write_bytes(picture(number))
        for split, rows in (("train", ROWS[:14]), (name, ROWS[14:])):
            lines = [f"{number}.png,{label}" for number, label in rows]
            (tmp_path / name / f"{split}.csv").write_text("\n".join(["file,label", *lines]))
        assert read_of(tmp_path / name, "validation") == ROWS[14:]


def test_a_record_without_a_class_is_refused(tmp_path):
    records = [{"file_name": f"{i}.png", "label": name} for i, name in [*ROWS[:12], (12, None)]]
    for number in range(13):
        (tmp_path / f"{number}.png").write_bytes(picture(number))
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, records)))
    with pytest.raises(ValueError, match="the class '' in .* is empty"):
        forms.read(tmp_path)


def test_a_table_of_pictures_in_class_folders_needs_a_usual_column(tmp_path):
    """A table of widths does not replace the classes."""
    write_folders(tmp_path)
    rows = [f"{name}/{number}.png,{number}" for number, name in ROWS]
    (tmp_path / "sizes.csv").write_text("\n".join(["file,width", *rows]))
    message = "the column 'width', or the folders of the pictures. Give --labels_column=width, or"
    with pytest.raises(ValueError, match=message):
        forms.read(tmp_path)
    assert len(forms.read(tmp_path, "width").class_names) == 17


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
    prepare(source, tmp_path / "out")
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "read: 17 .png; 3 classes: cat, dog, emu"
    assert sorted(printed[1:]) == [
        "ignored: 1 .csv, not read as a table of pictures (means.csv)",
        "ignored: 1 .png, hidden, or a copy of macOS (cat/._0.png)",
        "ignored: 1 .png, not in a class folder or not named by the table (7.png)",
        "ignored: 1 without suffix, a picture without suffix: rename it (cat/scan)",
        "ignored: 1 without suffix, no picture (cat/notes)",
        "skipped: 1 .tif, unreadable",
    ]


def test_folders_of_no_form(tmp_path):
    (tmp_path / "a.jpg").write_bytes(picture(1))
    (tmp_path / "evil.pkl").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match=r"none of these \(1 pictures without classes\): .*parq"):
        forms.read(tmp_path)
    with pytest.raises(ValueError, match="is no folder"):
        forms.read(tmp_path / "nowhere")
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "b.jpg").write_bytes(picture(1))
    with pytest.raises(ValueError, match="holds class folders .*, no table"):
        forms.read(tmp_path, "label")


def test_a_table_reads_nothing_outside_its_folder(tmp_path):
    """Only the end of a path counts: a picture of that name in the folder, or none."""
    outside, folder = tmp_path / "secret.png", tmp_path / "photos"
    folder.mkdir()
    for path in (outside, folder / "a.png"):
        path.write_bytes(picture(1))
    for word in (str(outside), "../secret.png"):
        (folder / "t.csv").write_text(f"file,label\na.png,cat\n{word},dog\n")
        first, second = forms.read(folder).splits["train"]()
        assert first.read() == picture(1)
        with pytest.raises(FileNotFoundError, match="no picture of .*photos has the name '.*secr"):
            second.read()
    (folder / "t.csv").write_text(f"file,label\n{folder / 'a.png'},cat\n")
    assert forms.read(folder).class_names == ["cat"]
