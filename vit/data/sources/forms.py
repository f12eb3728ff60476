"""The forms of raw pictures, one row each; a folder has the first form that it shows."""

import itertools
from pathlib import Path

from vit.data.sources import arrays, folders, ilsvrc2012, parquet, tables
from vit.data.sources.source import Source, is_picture

INSPECTED = 10_000
"""Files that are looked at for a hint."""

FORMS = {
    "ILSVRC2012's tar files": ilsvrc2012.read,
    "IDX files (*-images-idx3-ubyte)": arrays.read_idx_folder,
    "class folders (train/<class>/*.jpg)": folders.read_splits,
    "a table that names pictures and their classes (csv, txt, jsonl)": tables.read,
    "class folders (<class>/*.jpg)": folders.read_classes,
    "npz files (images, labels)": arrays.read_npz,
    "parquet files": parquet.read,
}
"""(folder, column of classes or "") -> its source, or None if it does not show this form."""


def find(folder: Path, labels_column: str = "") -> tuple[str, Source] | None:
    """Return the form of a folder and its source; None if it has no pictures with classes.

    Raises:
        ValueError: if the files are inconsistent or damaged, or a text file with a class name in
            each line cannot hold the names.
    """
    shown = ((form, read(folder, labels_column)) for form, read in FORMS.items())
    single = None
    for form, source in shown:
        if source is not None and len(source.class_names) > 1:
            break
        single = single or (source and (form, source))  # another form may tell classes apart
    else:
        if single is None:
            return None
        form, source = single
    if labels_column and FORMS[form] not in (tables.read, parquet.read):
        raise ValueError(f"--labels_column={labels_column}: {folder} holds {form}, no table")
    if "train" not in source.splits:
        raise ValueError(f"{folder} has no training split, but {', '.join(source.splits)}")
    for name in source.class_names:
        if name.splitlines() != [name.strip()] or not name.isprintable():
            raise ValueError(
                f"the class {name!r} in {folder} is empty, or has a line break, an outer blank or"
                " an unprintable character in its name: rename it"
            )
    return form, source


def is_raw(folder: Path) -> bool:
    """Detect pictures, or files of many, among the first `INSPECTED` files near a folder."""
    paths = itertools.chain.from_iterable(map(folder.glob, ("*", "*/*", "*/*/*")))
    return any(
        is_picture(path) or path.suffix in (".npz", ".parquet", ".tar") or "-ubyte" in path.name
        for path in itertools.islice(paths, INSPECTED)
    )


def read(folder: Path, labels_column: str = "") -> Source:
    """Return the source of a folder.

    Raises:
        ValueError: if it is no folder or has none of the forms, or as `find`.
    """
    if not folder.is_dir():
        raise ValueError(f"--source={folder} is no folder")
    first = find(folder, labels_column)
    if first is None:
        number = sum(is_picture(path) for path in folder.iterdir())
        alone = f" ({number} pictures without classes)" * bool(number)
        raise ValueError(f"--source={folder} holds none of these{alone}: {', '.join(FORMS)}")
    return first[1]
