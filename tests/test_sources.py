"""The forms of raw pictures beside IDX files and tars, and the part that is held out."""

import io
import json
import pickle
import zipfile

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from tests.test_prepare import write_idx
from vit import config, data
from vit.data.sources import forms
from vit.data.sources.source import holdout
from vit.prepare import prepare


def picture(shade, mode="RGB"):
    """A picture of one shade, as a PNG file."""
    buffer = io.BytesIO()
    Image.new(mode, (6, 5), shade if mode == "L" else (shade, 0, 9)).save(buffer, "PNG")
    return buffer.getvalue()


def shade(encoded):
    """Of such a picture."""
    return int(np.asarray(Image.open(io.BytesIO(encoded))).reshape(-1)[0])


@pytest.fixture
def source(tmp_path):
    (tmp_path / "source").mkdir()
    return tmp_path / "source"


def prepared(tmp_path, source, **options):
    """{split: {(shade, class name), ...}}, and the data set, of a source that was prepared."""
    prepare(source, tmp_path / "out", "made", **options)
    section = config.Data(name="made", dir=str(tmp_path / "out"), batch_size=1, eval_split="train")
    names = (tmp_path / "out/made/1.0.0/label.labels.txt").read_text().split("\n")
    found = {}
    for split in data.splits(section):
        records = data.load(config.Data(**vars(section) | {"eval_split": split})).evaluation
        rows = (records[i] for i in range(len(records)))
        found[split] = {(shade(row["image"]), names[row["label"]]) for row in rows}
    return found, data.load(section)


CLASSES = {"cat": range(0, 10), "dog": range(10, 16), "emu": range(16, 17)}
EXAMPLES = {(number, name) for name, numbers in CLASSES.items() for number in numbers}


@pytest.mark.parametrize("modes", [("RGB", "RGB"), ("L", "L"), ("L", "RGB")])
def test_class_folders_without_splits_are_split(source, tmp_path, modes):
    for name, numbers in CLASSES.items():
        (source / name).mkdir(parents=True)
        for number in numbers:
            (source / name / f"{number}.png").write_bytes(picture(number, modes[number % 2]))
    (source / ".hidden").mkdir()
    (source / ".hidden" / "x.png").write_bytes(b"none")
    found, dataset = prepared(tmp_path, source, validation=0.25)
    assert found["train"] | found["validation"] == EXAMPLES
    assert len(found["train"]) + len(found["validation"]) == len(EXAMPLES)
    assert {name: sum(n == name for _, n in found["validation"]) for name in CLASSES} in (
        {"cat": 3, "dog": 1, "emu": 0},
        {"cat": 2, "dog": 2, "emu": 0},
    )
    assert dataset.channels == (1 if modes == ("L", "L") else 3)


def test_pictures_of_other_formats_are_converted_or_counted(source, tmp_path, capsys):
    for name in ("cat", "dog"):
        (source / name).mkdir(parents=True)
        for kind in ("BMP", "GIF", "WEBP", "TIFF"):
            Image.new("RGB", (6, 5), "red").save(source / name / f"1.{kind.lower()}")
    counts = prepare(source, tmp_path / "out", validation=0.5)
    assert counts == {"train": 3, "validation": 3, "skipped": 2}
    assert capsys.readouterr().err.count(".tiff: ") == 2


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


@pytest.mark.parametrize("share", [0.0, 1.0, -1.0, float("nan")])
def test_shares_that_are_none(share):
    with pytest.raises(ValueError, match="must be a share between 0 and 1"):
        holdout(["a", "a"], share, 0)
    with pytest.raises(ValueError, match="no class has a second picture"):
        holdout(["a", "b"], 0.5, 0)


def test_idx_files_without_a_test_file_are_split(source, tmp_path):
    write_idx(source)
    for path in source.glob("t10k-*"):
        path.unlink()
    assert prepare(source, tmp_path / "out") == {"train": 18, "validation": 2, "skipped": 0}


def write_table(source, header, row, suffix=".png", delimiter=",", folder=""):
    (source / folder).mkdir(parents=True, exist_ok=True)
    lines = [header] if header else []
    for number, name in sorted(EXAMPLES):
        (source / folder / f"p{number}{suffix}").write_bytes(picture(number))
        lines.append(delimiter.join(row(number, name)))
    (source / "index.csv").write_text("\n".join(lines))


@pytest.mark.parametrize(
    "table",
    [
        dict(header="file,label", row=lambda i, name: (f"p{i}.png", name)),
        dict(header="", row=lambda i, name: (name, f"p{i}.png")),
        dict(header="id;other;class", row=lambda i, n: (f"p{i}", str(i), n), delimiter=";"),
        dict(header="id,Species", row=lambda i, n: (f"p{i}", n), suffix=".PNG", folder="images"),
        dict(
            header="number,group,class_name,file",
            row=lambda i, n: (str(i), n[0], n, f"images/p{i}.png"),
            folder="images",
        ),
    ],
)
def test_tables_of_files_and_classes(source, tmp_path, table, capsys):
    """A file that the table names and that is missing is counted."""
    write_table(source, **table)
    found, _ = prepared(tmp_path, source)
    assert len(found["validation"]) == 2
    assert found["train"] | found["validation"] == EXAMPLES
    next(source.rglob("p3.*")).unlink()
    assert prepare(source, tmp_path / "less")["skipped"] == 1
    assert "p3." in capsys.readouterr().err


def test_tables_whose_classes_cannot_be_told(source, tmp_path):
    write_table(source, "file,label,class", lambda i, name: (f"p{i}.png", name, str(i % 2)))
    found, _ = prepared(tmp_path, source, labels_column="class")
    assert {name for _, name in found["train"]} == {"0", "1"}
    text = (source / "index.csv").read_text()
    for content, message, column in [
        (text, "which column .*--labels_column=NAME; .* label, class", ""),
        (text, "--labels_column=nam: that of .* is one of label, class", "nam"),
        ("file,a,b\np0.png,cat,cat\np1.png,dog,dog\n", "which column", ""),
        ("file,label\np0.png,a\np1.png,b,x\n", "row 3 has 3 fields, the first 2", ""),
        ("file,label\np0.png,\udcff\n", "cannot be read as a csv file", ""),
        ("file,label\np0.png,\np1.png,a\n", "the class '' in .* or none", ""),
    ]:
        (source / "index.csv").write_text(content, errors="surrogateescape")
        with pytest.raises(ValueError, match=message):
            forms.read(source, column)


def images(number=17, channels=()):
    shape = (number, 5, 6, *channels)
    return np.broadcast_to(
        np.arange(number, dtype=np.uint8).reshape(-1, *[1] * (len(shape) - 1)), shape
    )


NUMBERS = np.array([k for k, numbers in enumerate(CLASSES.values()) for _ in numbers])


@pytest.mark.parametrize(
    ("arrays", "splits"),
    [
        (dict(images=images(), labels=NUMBERS, class_names=np.array(list(CLASSES))), 2),
        (dict(x=images(channels=(3,)), y=np.array(list(CLASSES))[NUMBERS]), 2),
        (
            dict(
                train_images=images()[:9],
                train_labels=NUMBERS[:9, None],
                val_images=images()[9:12],
                val_labels=NUMBERS[9:12, None],
                test_images=images()[12:],
                test_labels=NUMBERS[12:, None],
                class_names=np.array(list(CLASSES)),
            ),
            3,
        ),
    ],
)
def test_npz_files(source, tmp_path, arrays, splits):
    np.savez(source / "pictures.npz", **arrays)
    found, dataset = prepared(tmp_path, source)
    assert len(found) == splits
    assert set().union(*found.values()) == EXAMPLES
    assert dataset.channels == (3 if "x" in arrays else 1)


class Evil:
    def __reduce__(self):
        return print, ("executed",)


def zipped(content):
    """A file images.npz, of which images.npy has these bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("images.npy", content)
    return buffer.getvalue()


def true_as_a_number():
    buffer = io.BytesIO()
    np.save(buffer, images(1))
    return buffer.getvalue().replace(b"(1, 5, 6), }   ", b"(True, 5, 6), }")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (dict(images=images()), r"must hold images and labels.*it holds images uint8\[17, 5, 6\]"),
        (dict(images=images() / 255, labels=NUMBERS), "images are uint8, 0 to 255"),
        (dict(images=images(channels=(2,)), labels=NUMBERS), "with 1 or 3 channels behind"),
        (dict(images=images(), labels=NUMBERS[1:]), "17 images, its labels are int64"),
        (dict(images=images(), labels=NUMBERS - 1), "labels from -1 to 1"),
        (dict(images=images(), labels=NUMBERS, class_names=np.array(["a"])), "1 class_names"),
        (dict(images=images(), labels=np.array([Evil()] * 17)), "allow_pickle=False"),
        (dict(x_train=images(), y_test=NUMBERS), "must hold images and labels"),
        (dict(images=images()[:0], labels=NUMBERS[:0]), "is uint8.0, 5, 6.: .* n > 0"),
        (zipped(true_as_a_number()), "pictures.npz cannot be read"),
    ],
)
def test_npz_files_that_cannot_be_used(tmp_path, content, message, capsys):
    """No pickle is opened."""
    path = tmp_path / "pictures.npz"
    np.savez(path, **content) if isinstance(content, dict) else path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        forms.read(tmp_path)
    assert "executed" not in capsys.readouterr().out


def write_parquet(path, rows, names=None, struct=True, label="label", **more):
    path.parent.mkdir(parents=True, exist_ok=True)
    encoded = [picture(number) for number, _ in rows]
    order = list(CLASSES)
    table = {
        "image": [{"bytes": x, "path": None} for x in encoded] if struct else encoded,
        label: [order.index(name) if names else name for _, name in rows],
    }
    schema = pyarrow.table(table | more)
    if names:
        features = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
        schema = schema.replace_schema_metadata({"huggingface": json.dumps(features)})
    pyarrow.parquet.write_table(schema, path)


@pytest.mark.parametrize("named", [True, False])
def test_parquet_files(tmp_path, named):
    rows, source = sorted(EXAMPLES), tmp_path / "source"
    options = dict(names=list(CLASSES) if named else None, struct=named)
    for name, part in {
        "train-00000-of-00002": rows[:8],
        "train-00001-of-00002": rows[8:14],
        "test-00000-of-00001": rows[14:],
    }.items():
        write_parquet(source / "data" / f"{name}.parquet", part, **options)
    found, dataset = prepared(tmp_path, source)
    assert found == {"train": set(rows[:14]), "test": set(rows[14:])}
    assert dataset.num_classes == 3


def test_parquet_files_that_cannot_be_used(tmp_path):
    rows = sorted(EXAMPLES)
    path = tmp_path / "pictures.parquet"

    def refused(message, **table):
        if table:
            pyarrow.parquet.write_table(pyarrow.table({"image": [picture(1)] * 2} | table), path)
        with pytest.raises(ValueError, match=message):
            forms.read(tmp_path)

    write_parquet(path, rows, fine=["a"] * len(rows), label="coarse")
    refused("which column holds the classes.*there are coarse, fine")
    assert forms.read(tmp_path, "coarse").class_names == ["cat", "dog", "emu"]
    write_parquet(path, rows, names=["cat", "dog"])
    refused("the column 'label' has 2, but the classes are 0 to 1")
    write_parquet(path, rows, second=[b""] * len(rows))
    refused("one column must hold encoded pictures; there are image struct.*, second binary")
    whole = r"pictures.parquet: the column 'label' has None, but the classes are 0 to \.\.\."
    refused(whole, label=["a", None])
    refused("the column 'label' has -1, but .*: leave out rows without a label", label=[0, -1])
    for content in (path.read_bytes()[: path.stat().st_size // 2], b"PAR1"):
        path.write_bytes(content)
        refused("pictures.parquet cannot be read as a parquet file")
    for name, column in [("test", "label"), ("pictures", "class")]:
        table = pyarrow.table({"image": [picture(1)], column: ["a"]})
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet")
    refused("test.parquet cannot be read .*class")


def test_one_entry_of_a_parquet_dictionary_is_in_memory_once(tmp_path):
    """16 rows of the same 16 MB, some 2 kB on disk, were 16 times 16 MB at once."""
    path = tmp_path / "x.parquet"
    table = pyarrow.table({"image": [b"a" * 16_000_000] * 16, "label": ["a", "b"] * 8})
    limit = 2**25
    pyarrow.parquet.write_table(
        table, path, compression="gzip", dictionary_pagesize_limit=limit, data_page_size=limit
    )
    del table
    examples = forms.read(tmp_path).splits["train"]
    before = pyarrow.total_allocated_bytes()
    used = [(len(x.read()), pyarrow.total_allocated_bytes() - before) for x in examples()]
    assert [size for size, _ in used] == [16_000_000] * 16
    assert max(memory for _, memory in used) < 4 * 16_000_000


def test_a_table_names_nothing_outside_its_folder(tmp_path):
    outside, folder = tmp_path / "secret.png", tmp_path / "photos"
    folder.mkdir()
    for path in (outside, folder / "a.png"):
        path.write_bytes(picture(1))
    for word in (str(outside), "../secret.png"):
        (folder / "t.csv").write_text(f"file,label\na.png,cat\n{word},dog\n")
        with pytest.raises(ValueError, match=r"t.csv names '.*secret.png', outside .*photos"):
            forms.read(folder)
    (folder / "t.csv").write_text(f"file,label\n{folder / 'a.png'},cat\n")
    assert forms.read(folder).class_names == ["cat"]


def test_folders_of_no_form(tmp_path):
    (tmp_path / "a.jpg").write_bytes(picture(1))
    (tmp_path / "evil.pkl").write_bytes(pickle.dumps(Evil()))
    message = r"holds none of these \(1 pictures, and nothing that says their classes\): .*parquet"
    with pytest.raises(ValueError, match=message):
        forms.read(tmp_path)
    with pytest.raises(ValueError, match="is no folder"):
        forms.read(tmp_path / "nowhere")
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "b.jpg").write_bytes(picture(1))
    with pytest.raises(ValueError, match="holds class folders .*, no table"):
        forms.read(tmp_path, "label")
    with pytest.raises(ValueError, match="pictures of one class alone, 'cat'"):
        prepare(tmp_path, tmp_path / "out")
