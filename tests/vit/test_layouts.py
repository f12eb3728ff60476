"""Layouts that data sets are published in: read right, or refused with a command that reads them.

The command of the message is typed. Pictures are remade, each of one shade.
"""

import shlex
import subprocess
import sys
from functools import partial

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import scipy.io
from absl import flags

from tests.vit.test_sources import (
    idx,
    picture,
    shade,
    write_parquet,
)
from vit import prepare
from vit.config import arguments
from vit.data.sources import forms

A, B = "ash", "bee"


def write(folder, files):
    """Files by path; a number is a picture of that shade."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        content = picture(content) if isinstance(content, int) else content
        content = content.encode() if isinstance(content, str) else content
        (folder / name).write_bytes(content)


def lines(*rows):
    return "\n".join(rows) + "\n"


def classed(template, shades=range(4), names=(A, B)):
    """Pictures of two classes in turn: {0} is the shade, {1} the class."""
    return {template.format(i, names[i % 2]): i for i in shades}


def want(shades=range(4), names=(A, B), split="train"):
    return {split: {(i, names[i % 2]) for i in shades}}


TRAIN, TEST = range(4), range(10, 14)
"""Shades of training and of the test part."""
BOTH = want(TRAIN) | want(TEST, split="test")
ALL = BOTH | want(range(20, 22), split="validation")


def parted(train="train", test="test", inner="{1}/{0}.jpg", names=(A, B)):
    return classed(f"{train}/{inner}", TRAIN, names) | classed(f"{test}/{inner}", TEST, names)


def table(shades, row, header="", names=(A, B)):
    rows = [row.format(i, names[i % 2], i % 2) for i in shades]
    return lines(*[header] * bool(header), *rows)


def npz(folder, file="x.npz", **arrays):
    np.savez(folder / file, **arrays)


def images(shades):
    return np.broadcast_to(np.array(shades, np.uint8)[:, None, None], (len(shades), 5, 6))


def labels(shades):
    return np.array([i % 2 for i in shades])


NUMBERS = ("0", "1")
ARRAYS = {
    "train": images(TRAIN),
    "test": images(TEST),
    "labels": labels(TRAIN),
    "held": labels(TEST),
}


def write_idx(folder, dot="-", prefix="", suffix=""):
    for word, shades in (("train", TRAIN), ("t10k", TEST)):
        for kind, x in (("images", images(shades)), ("labels", labels(shades).astype(np.uint8))):
            name = f"{prefix}{word}-{kind}{dot}idx{x.ndim}-ubyte"
            (folder / name).write_bytes(idx(np.ascontiguousarray(x)))


def write_flowers(folder):
    """flowers-102: labels of all pictures in order, and lists of their numbers from 1."""
    write(folder, {f"jpg/image_{i + 1:05}.jpg": i for i in range(6)})
    scipy.io.savemat(folder / "imagelabels.mat", {"labels": [[1, 2, 1, 2, 1, 2]]})
    parts = {"trnid": [[1, 2]], "valid": [[5, 6]], "tstid": [[4, 3]]}
    scipy.io.savemat(folder / "setid.mat", parts)


def write_digits(folder):
    """Kaggle's tables of pixels."""
    head = ["label", *(f"pixel{i}" for i in range(4))]
    for part, shades in (("", TRAIN), ("_test", TEST)):
        rows = [",".join(map(str, [i % 2, *[i] * 4])) for i in shades]
        (folder / f"mnist{part}.csv").write_text(lines(",".join(head), *rows))


def write_metadata(folder):
    """Hugging Face's metadata as parquet, with pictures in folders of splits."""
    write(folder, parted(inner="p{0}.png"))
    for split, shades in (("train", TRAIN), ("test", TEST)):
        rows = [{"file_name": f"p{i}.png", "label": (A, B)[i % 2]} for i in shades]
        path = folder / split / "metadata.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def write_hub(folder, train="train-00000-of-00001", test="test-00000-of-00001", **options):
    for name, shades in ((train, TRAIN), (test, TEST)):
        rows = [(i, (A, B)[i % 2]) for i in shades]
        write_parquet(folder / f"{name}.parquet", rows, **options)


def write_paths(folder):
    """A parquet table of paths, with the pictures next to it."""
    write(folder, classed("pictures/{0}.jpg"))
    rows = [{"path": f"pictures/{i}.jpg", "label": (A, B)[i % 2]} for i in TRAIN]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "all.parquet")


CUB = {
    **parted("images", "images", "00{1}/x_{0}.jpg"),
    "images.txt": table([*TRAIN, *TEST], "{0} 00{1}/x_{0}.jpg"),
    "image_class_labels.txt": table([*TRAIN, *TEST], "{0} {2}"),
    "train_test_split.txt": table(TRAIN, "{0} 1") + table(TEST, "{0} 0"),
    "classes.txt": lines(f"1 00{A}", f"2 00{B}"),
    "bounding_boxes.txt": table([*TRAIN, *TEST], "{0} 60.0 27.0 325.0 304.0"),
    "attributes/class_attribute_labels_continuous.txt": "0.5 1.0\n",
}
TINY = {
    **classed("train/{1}/images/{1}_{0}.JPEG", TRAIN),
    **{
        f"train/{x}/{x}_boxes.txt": table([i], f"{x}_{{0}}.JPEG\t0\t0\t9\t9")
        for i, x in [(0, A), (1, B)]
    },
    **classed("val/images/val_{0}.JPEG", TEST),
    "val/val_annotations.txt": table(TEST, "val_{0}.JPEG\t{1}\t0\t32\t44\t62"),
    "test/images/test_0.JPEG": 99,
    "wnids.txt": lines(A, B),
    "words.txt": lines(f"{A}\ta tree", f"{B}\tan insect"),
}
DOGS = {
    **classed("train/{0:04}.jpg"),
    "test/0009.jpg": 9,
    "labels.csv": table(TRAIN, "{0:04},{1}", "id,breed"),
    "sample_submission.csv": lines("id,ash,bee", "0009,0.5,0.5"),
}
HAM = {
    **classed("HAM10000_images_part_1/ISIC_{0}.jpg", range(2)),
    **classed("HAM10000_images_part_2/ISIC_{0}.jpg", range(2, 4)),
    "HAM10000_metadata.csv": table(
        TRAIN,
        "HAM_{2},ISIC_{0},{1},histo,80.0,male,scalp",
        "lesion_id,image_id,dx,dx_type,age,sex,localization",
    ),
    "hmnist_8_8_L.csv": lines("pixel0000,pixel0001,label", "1,2,2"),
}
CASSAVA = {
    **classed("train_images/{0}.jpg"),
    "test_images/9.jpg": 9,
    "train.csv": table(TRAIN, "{0}.jpg,{2}", "image_id,label"),
    "sample_submission.csv": lines("image_id,label", "9.jpg,0"),
    "label_num_to_disease_map.json": "{}",
}
FOOD = {
    **parted("images", "images"),
    "meta/classes.txt": lines(A, B),
    "meta/train.txt": table(TRAIN, "{1}/{0}"),
    "meta/test.txt": table(TEST, "{1}/{0}"),
}
PETS = {
    **parted("images", "images", "{1}_{0}.jpg"),
    "annotations/trainval.txt": table(TRAIN, "{1}_{0} {2} 1 1"),
    "annotations/test.txt": table(TEST, "{1}_{0} {2} 1 1"),
    "annotations/list.txt": lines("#Image CLASS-ID SPECIES BREED ID", "#1:37 Class ids"),
}
CELEBA = {
    **{f"img_align_celeba/img_align_celeba/{i:06}.jpg": i for i in [*TRAIN, *TEST]},
    "list_attr_celeba.csv": lines(
        "image_id,Smiling,Young", *(f"{i:06}.jpg,{(-1, 1)[i % 2]},1" for i in [*TRAIN, *TEST])
    ),
    "list_eval_partition.csv": table(TRAIN, "{0:06}.jpg,0", "image_id,partition")
    + table(TEST, "{0:06}.jpg,2"),
}
GTSRB = {
    **classed("Train/{1}/{0}.png", TRAIN, NUMBERS),
    **classed("Test/{0}.png", TEST),
    **classed("Meta/{1}.png", range(40, 42), NUMBERS),
    "Train.csv": table(TRAIN, "5,5,{2},Train/{2}/{0}.png", "Width,Height,ClassId,Path"),
    "Test.csv": table(TEST, "5,5,{2},Test/{0}.png", "Width,Height,ClassId,Path"),
    "Meta.csv": table(range(40, 42), "Meta/{2}.png,{2},0", "Path,ClassId,ShapeId"),
}
CARS = {
    **parted("car_data/car_data/train", "car_data/car_data/test"),
    "names.csv": lines(A, B),
    "anno_train.csv": table(TRAIN, "{0}.jpg,39,116,569,375,{2}"),
    "anno_test.csv": table(TEST, "{0}.jpg,36,116,868,587,{2}"),
}
EUROSAT = {
    **parted("EuroSAT", "EuroSAT", "{1}/{1}_{0}.jpg"),
    "EuroSAT/train.csv": table(TRAIN, "{0},{1}/{1}_{0}.jpg,{2},{1}", ",Filename,Label,ClassName"),
    "EuroSAT/test.csv": table(TEST, "{0},{1}/{1}_{0}.jpg,{2},{1}", ",Filename,Label,ClassName"),
    "EuroSAT/label_map.json": "{}",
}
LEAVES = {
    **classed("color/{1}/{0}.jpg"),
    **classed("grayscale/{1}/{0}.jpg", range(20, 24)),
    **classed("segmented/{1}/{0}_final_masked.jpg", range(30, 34)),
}
SIZES = {
    **classed("{1}/{0}.jpg"),
    "sizes.csv": table(TRAIN, "{1}/{0}.jpg,{0}", "file,width"),
    "train_test_split.txt": table(TRAIN, "{0} 1"),
}
JSON = '{{"file_name": "{0}.png", "label": "{1}"}}'
NESTED = {f"{x}/shot_{i}/{i}.jpg": i for i, x in [(0, A), (1, B), (2, A), (3, B)]}
ONE_HOT = {
    **classed("images/{0}.jpg"),
    "train.csv": lines("id,ok,rust,scab,UNK", "0,1,0,0,0", "1,0,1,0,0", "2,0,0,1,0", "3,1,0,0,0"),
}
MARKED = {
    **{f"images/{i}.png": i for i in range(3)},
    "Data_Entry.csv": lines("Image Index,Label", "0.png,a", "1.png,a|b", "2.png,b"),
}
IN_NUMBERS = want(names=NUMBERS)
MAKERS = "Boeing", "British Aerospace"
WNIDS = "n01440764", "n02102040"
SPECIES = want(TRAIN, (f"00{A}", f"00{B}")) | want(TEST, (f"00{A}", f"00{B}"), "test")
IN_BOTH = want(TRAIN, NUMBERS) | want(TEST, NUMBERS, "test")

READ = {
    "ImageFolder": (classed("{1}/{0}.jpg"), want()),
    "splits": (parted() | classed("val/{1}/{0}.jpg", range(20, 22)), ALL),
    "Imagenette": (parted(names=WNIDS), want(TRAIN, WNIDS) | want(TEST, WNIDS, "test")),
    "tables next to class folders": (SIZES, want()),
    "other metadata": (
        classed("{1}/{0}.jpg") | {"metadata.csv": table(TRAIN, "{0},{2}", "isic_id,benign")},
        want(),
    ),
    "numbers with zeros": (parted(inner="0000{1}/{0}.ppm.png", names=NUMBERS), IN_BOTH),
    "folders below a class": (NESTED, want()),
    "a test part without classes": (classed("train/{1}/{0}.jpg") | {"test/9.jpg": 9}, want()),
    "imagefolder with metadata.csv": (
        classed("all/{0}.png")
        | {"metadata.csv": table(TRAIN, "all/{0}.png,{1}", "file_name,label")},
        want(),
    ),
    "imagefolder with metadata.jsonl": (
        parted(inner="{0}.png")
        | {"train/metadata.jsonl": table(TRAIN, JSON), "test/metadata.jsonl": table(TEST, JSON)},
        BOTH,
    ),
    "imagefolder with metadata.parquet": (write_metadata, BOTH),
    "Hub parquet": (partial(write_hub, names=[A, B]), BOTH),
    "Hub, converted": (
        partial(write_hub, train="default/train/0000", test="default/test/0000", names=[A, B]),
        BOTH,
    ),
    "Keras": (
        partial(
            npz,
            **dict(zip(("x_train", "x_test", "y_train", "y_test"), ARRAYS.values(), strict=True)),
        ),
        IN_BOTH,
    ),
    "MedMNIST": (
        partial(
            npz,
            train_images=images(TRAIN),
            train_labels=labels(TRAIN)[:, None],
            val_images=images(TEST),
            val_labels=labels(TEST)[:, None],
        ),
        want(TRAIN, NUMBERS) | want(TEST, NUMBERS, "validation"),
    ),
    "MNIST": (write_idx, IN_BOTH),
    "MNIST with dots": (partial(write_idx, dot="."), IN_BOTH),
    "EMNIST": (partial(write_idx, prefix="emnist-letters-"), IN_BOTH),
    "names as bytes": (
        partial(
            npz, x_train=images(TRAIN), y_train=labels(TRAIN), class_names=[A.encode(), B.encode()]
        ),
        want(),
    ),
    "numbers with gaps": (
        partial(npz, x_train=images(TRAIN), y_train=5 * labels(TRAIN)),
        want(names=("0", "5")),
    ),
}
COMMANDS = {
    "Intel scenes": (
        parted("seg_train/seg_train", "seg_test/seg_test") | {"seg_pred/seg_pred/9.jpg": 9},
        BOTH,
        "--classes=seg_test/seg_test:test,seg_train/seg_train:train",
    ),
    "PlantVillage": (LEAVES, want(), "--classes=color"),
    "batches": (
        classed("batch_0/{1}/{0}.jpg", range(2)) | classed("batch_1/{1}/{0}.jpg", range(2, 4)),
        want(),
        "--classes=batch_0,batch_1",
    ),
    "images and masks": (
        classed("images/{1}/{0}.jpg") | classed("masks/{1}/{0}.png", range(30, 34)),
        want(),
        "--classes=images",
    ),
    "the classes again in a folder": (
        classed("{1}/{0}.jpg") | classed("flowers/{1}/{0}.jpg"),
        want(),
        "x/flowers",
    ),
    "arrays of splits in two files": (
        lambda folder: [
            npz(folder, f"{part}.npz", x=images(shades), y=labels(shades))
            for part, shades in (("train", TRAIN), ("test", TEST))
        ],
        IN_BOTH,
        "--images=test.npz/x:test,train.npz/x:train",
    ),
    "one folder more": (classed("archive/{1}/{0}.jpg"), want(), "/archive"),
    "train/train": (classed("train/train/{1}/{0}.jpg"), want(), "/train"),
    "splits in a folder": (parted("archive/data/train", "archive/data/test"), BOTH, "archive/data"),
    "brain MRI": (parted("Training", "Testing"), BOTH, "--classes=Testing:test,Training:train"),
    "train, valid, test": (
        parted() | classed("valid/{1}/{0}.jpg", range(20, 22)),
        ALL,
        "--classes=test:test,train:train,valid:validation",
    ),
    "vehicles": (
        classed("{1}/{0}.jpg", names=("train", "bus")),
        want(names=("train", "bus")),
        "--classes=.",
    ),
    "CUB-200-2011": (CUB, SPECIES, "--table=images.txt+train_test_split.txt"),
    "Tiny ImageNet": (TINY, want() | want(TEST, split="validation"), "--table=val/val_annotations"),
    "flowers-102": (
        write_flowers,
        {
            "train": {(0, "1"), (1, "2")},
            "validation": {(4, "1"), (5, "2")},
            "test": {(2, "1"), (3, "2")},
        },
        "--table=labels.csv",
    ),
    "dog breeds": (DOGS, want(), "train/{id}.jpg"),
    "HAM10000": (HAM, want(), "*/{image_id}.jpg --label={dx} --group={lesion_id}"),
    "cassava": (CASSAVA, IN_NUMBERS, "train_images/{image_id}"),
    "Food-101": (FOOD, BOTH, "meta/test.txt:test,meta/train.txt:train"),
    "Oxford pets": (PETS, IN_BOTH, "annotations/test.txt:test"),
    "CelebA": (CELEBA, want(TRAIN, ("-1", "1")) | want(TEST, ("-1", "1"), "test"), "{Smiling}"),
    "GTSRB": (GTSRB, IN_BOTH, "--table=Test.csv:test,Train.csv:train"),
    "Stanford cars": (CARS, BOTH, "car_data/car_data"),
    "Caltech-101": (classed("101_ObjectCategories/{1}/{0}.jpg"), want(), "101_ObjectCategories"),
    "EuroSAT": (EUROSAT, IN_BOTH, "EuroSAT/test.csv:test,EuroSAT/train.csv:train"),
    "FGVC-Aircraft": (
        parted("images", "images", "{0}.jpg")
        | {
            f"images_{kind}_{part}.txt": table(shades, row, names=MAKERS)
            for part, shades in (("train", TRAIN), ("test", TEST))
            for kind, row in (
                ("family", "{0} Boeing"),
                ("maker", "{0} {1}"),
                ("variant", "{0} {2}"),
            )
        },
        want(TRAIN, MAKERS) | want(TEST, MAKERS, "test"),
        "images_maker_test.txt:test,images_maker_train.txt:train",
    ),
    "retinopathy": (
        classed("train_images/a{0}.png")
        | classed("test_images/b{0}.png")
        | {
            "train.csv": table(TRAIN, "a{0},{2}", "id_code,diagnosis"),
            "test.csv": table(TRAIN, "b{0}", "id_code"),
        },
        IN_NUMBERS,
        "train_images/{id_code}.png --label={diagnosis}",
    ),
    "Fruits-360": (
        parted("fruits-360_dataset/fruits-360/Training", "fruits-360_dataset/fruits-360/Test"),
        BOTH,
        "fruits-360_dataset/fruits-360 --classes=Test:test,Training:train",
    ),
    "Tiny ImageNet, sorted": (
        classed("train/{1}/images/{0}.JPEG") | classed("val/{1}/images/{0}.JPEG", TEST),
        want() | want(TEST, split="validation"),
        "--classes=train:train,val:validation",
    ),
    "digits of Kaggle": (write_digits, IN_BOTH, "numpy"),
    "npz of other names": (
        partial(npz, imgs=images(TRAIN), targets=labels(TRAIN)),
        IN_NUMBERS,
        "--images=imgs --labels=targets",
    ),
    "parquet without metadata": (write_hub, BOTH, "--images=image --labels=label"),
    "parquet of paths": (write_paths, want(), "--picture={path}"),
    "paths of another machine": (
        classed("pictures/{0}.jpg")
        | {"all.csv": table(TRAIN, "C:\\data\\{0}.jpg,{1}", "file,label")},
        want(),
        "pictures/{file:name}",
    ),
    "a table without a header": (
        classed("{0}.jpg") | {"labels.txt": table(TRAIN, "{0}.jpg {1}")},
        want(),
        "--no_header",
    ),
    "a column of splits": (
        parted("all", "all", "{0}.jpg")
        | {
            "all.csv": table(TRAIN, "{0}.jpg,{1},1", "file,species,is_train")
            + table(TEST, "{0}.jpg,{1},0")
        },
        BOTH,
        "--splits=1:train,0:test",
    ),
}
LAYOUTS = {name: (*row, None) for name, row in READ.items()} | COMMANDS
"""The files, what is read of them, and a part of the command if they are refused."""
REFUSED = {
    "one-hot columns": (ONE_HOT, "a column for each class, but a picture has one class"),
    "a|b": (MARKED, r"'a\|b' .* names several classes: a picture has one class"),
    "WebDataset": ({"x-000000.tar": b""}, "WebDataset.*unpack them"),
    "CIFAR pickles": ({"data_batch_1": b"", "batches.meta": b""}, "pickled files may run code"),
    "TFRecords": ({"512/x.tfrecord-00000-of-00001": b""}, "TFRecords are not read: .*tfds build"),
    "several configs of parquet": (
        lambda folder: [write_hub(folder, f"{x}/train", f"{x}/test", names=[A, B]) for x in "ab"],
        "in several folders; give one of .*/a, .*/b",
    ),
    "zip": ({"archive.zip": b""}, "unpack archive.zip first, as with unzip"),
    "splits without classes": (
        parted(inner="{0}.jpg"),
        "test has the name of a split, but holds pictures, not class folders. Put the pictures",
    ),
    "pictures alone": (classed("{0}.jpg"), "Put the pictures of each class into a folder"),
}


def made(folder, content):
    folder.mkdir(exist_ok=True)
    write(folder, content) if isinstance(content, dict) else content(folder)
    return folder


def typed(words):
    """The arguments of `prepare` for the words of a command line."""
    values = flags.FlagValues()
    parameters = arguments.define(prepare.prepare, None, values)
    arguments.parse_flags(["prepare", *words], values)
    return arguments.given(parameters, (), None, values)[1]


def read_by(command):
    """The source that a command reads, after the program before it, if there is one."""
    program, _, line = command.rpartition(" && ")
    if program:
        subprocess.run([sys.executable, *shlex.split(program)[1:]], check=True)
    given = typed([word for word in shlex.split(line) if word.startswith("--")])
    return forms.read(given["source"], given["words"])


def pairs(source):
    """Shade and class of each picture, once each."""
    rows = {k: [(shade(x.read()), x.label) for x in f()] for k, f in source.splits.items()}
    assert all(len(each) == len({*each}) for each in rows.values())
    return {k: {*each} for k, each in rows.items()}


@pytest.mark.parametrize(("content", "wanted", "part"), LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_are_read_right_or_refused_with_a_command_that_reads_them(
    tmp_path, content, wanted, part
):
    folder = made(tmp_path / "x", content)
    if part is None:
        assert pairs(forms.read(folder)) == wanted
        return
    with pytest.raises(ValueError, match=r"\. Probably meant: [^\n]*$") as error:
        forms.read(folder)
    command = str(error.value).partition("Probably meant: ")[2]
    assert part in command.replace("'", "")
    assert pairs(read_by(command)) == wanted


@pytest.mark.parametrize(("content", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_read_is_named_with_what_to_do(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        forms.read(made(tmp_path / "x", content))
