"""The forms of raw pictures, one row each; a folder is of the first that it shows."""

from pathlib import Path

from vit.data.sources import arrays, folders, ilsvrc2012, parquet, tables
from vit.data.sources.source import Source, is_picture

FORMS = {
    "ILSVRC2012's tar files": ilsvrc2012.read,
    "IDX files (*-images-idx3-ubyte)": arrays.read_idx,
    "class folders (train/<class>/*.jpg)": folders.read_splits,
    "a csv file that names pictures and their classes": tables.read,
    "class folders (<class>/*.jpg)": folders.read_classes,
    "npz files (images, labels)": arrays.read_npz,
    "parquet files": parquet.read,
}
"""(folder, column of classes or "") -> its source, or None where it does not show this form."""


def find(folder: Path, labels_column: str = "") -> tuple[str, Source] | None:
    """The form of a folder, and its source; None where there is no picture with a class.

    Raises:
        ValueError: when what it holds is inconsistent or damaged; for the name of a class that
            would come back as another of the text file whose lines are the names.
    """
    for words, read in FORMS.items():
        source = read(folder, labels_column)
        if source is None:
            continue
        if labels_column and read not in (tables.read, parquet.read):
            raise ValueError(f"--labels_column={labels_column}: {folder} holds {words}, no table")
        for name in source.class_names:
            if name.splitlines() != [name.strip()] or not name.isprintable():
                raise ValueError(
                    f"the class {name!r} in {folder} has a line break, an outer blank or an"
                    " unprintable character in its name, or none: rename it"
                )
        return words, source
    return None


def read(folder: Path, labels_column: str = "") -> Source:
    """The source that a folder is.

    Raises:
        ValueError: when it is none, is of no form, or as `find`.
    """
    if not folder.is_dir():
        raise ValueError(f"--source={folder} is no folder")
    found = find(folder, labels_column)
    if found is None:
        pictures = sum(is_picture(path) for path in folder.iterdir())
        told = f" ({pictures} pictures, and nothing that says their classes)" * bool(pictures)
        raise ValueError(f"--source={folder} holds none of these{told}: {', '.join(FORMS)}")
    return found[1]
