"""The forms of raw pictures, one row each; a folder is of the first that it shows."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from vit.sources import arrays, folders, ilsvrc2012, parquet, tables
from vit.sources.source import Source, is_picture


class Form(NamedTuple):
    """One way to keep pictures with their classes."""

    words: str
    found: Callable[[Path], object]
    """True, or anything else that is not empty, where a folder shows it."""
    read: Callable[..., Source]
    """(folder) -> its source; (folder, column of classes) where there are columns."""
    has_columns: bool = False


FORMS = (
    Form("ILSVRC2012's tar files", ilsvrc2012.found, ilsvrc2012.read),
    Form("IDX files (*-images-idx3-ubyte)", arrays.idx_files, arrays.read_idx),
    Form("class folders (train/<class>/*.jpg)", folders.splits_found, folders.read),
    Form("a csv file that names pictures and their classes", tables.tables, tables.read, True),
    Form("class folders (<class>/*.jpg)", folders.classes_found, folders.read),
    Form("npz files (images, labels)", arrays.npz_files, arrays.read_npz),
    Form("parquet files", parquet.files, parquet.read, True),
)


def form(folder: Path) -> Form | None:
    """The form of a folder; None where there is no picture with a class."""
    return next((form for form in FORMS if form.found(folder)), None)


def read(folder: Path, labels_column: str = "") -> Source:
    """The source that a folder is.

    Raises:
        ValueError: when it is none, is of no form, or is damaged; for the name of a class that
            would come back as another of the text file whose lines are the names.
    """
    if not folder.is_dir():
        raise ValueError(f"--source={folder} is no folder")
    its = form(folder)
    if its is None:
        pictures = sum(is_picture(path) for path in folder.iterdir())
        told = f" ({pictures} pictures, and nothing that says their classes)" * bool(pictures)
        raise ValueError(
            f"--source={folder} holds none of these{told}: " + ", ".join(f.words for f in FORMS)
        )
    if labels_column and not its.has_columns:
        raise ValueError(f"--labels_column={labels_column}: {folder} holds {its.words}, no table")
    source = its.read(folder, labels_column) if its.has_columns else its.read(folder)
    for name in source.class_names:
        if name.splitlines() != [name.strip()] or not name.isprintable():
            raise ValueError(
                f"the class {name!r} in {folder} has a line break, an outer blank or an unprintable"
                " character in its name, or none: rename it"
            )
    return source
