"""Public files -> the folder that `--data_dir` of the experiments names.

    python -m experiments.prepare_data --source=karate.gml --out=data
    python -m experiments.prepare_data --source=community-graphs/gml_graphs --out=data
    python -m experiments.prepare_data --source=cora.gml --largest_component --name=cora_lcc
    python -m experiments.prepare_data --source=trimesh/models/teapot.stl --out=data
    python -m experiments.prepare_data --source=DIR_OF_ROADS --name=pems_san_jose --out=data
    python -m experiments.prepare_data --source=abalone.data --kind=classification --target=rings \\
        --columns=sex,length,diameter,height,whole,shucked,viscera,shell,rings

    NAME.gml                       graphs/NAME.npz
    NAME.stl, NAME.obj             meshes/NAME.npz
    a folder with roads.csv        traffic_san_jose/NAME.npz: see `experiments.graphs.files.roads`
    NAME.csv, .data, .txt, .dat    uci_KIND/NAME.csv: a header, the target last

Another folder is searched for .gml, .stl and .obj files. A table may have its cells between commas,
semicolons, tabs or spaces; --columns names them where the file has no header. Each result is read
as the experiments read it before it is written, and no file is written over.
"""

import csv
import io
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from experiments.common import launch, tabular
from experiments.graphs import data
from experiments.graphs import files as public
from vit import bounded, files

MESHES, TABLES = (".stl", ".obj"), (".csv", ".data", ".txt", ".dat")
Kind = Literal["regression", "classification"]


def table(
    source: Path, columns: Sequence[str], target: str, drop: Sequence[str]
) -> tuple[list[str], list[list[str]]]:
    """Header and rows, the target last.

    Raises:
        ValueError: for a file of no rows, columns that are not there, or another number of cells.
    """
    lines = bounded.content(source).decode("utf-8-sig", errors="replace").splitlines()
    lines = [line.strip() for line in lines if line.strip()]
    if not lines:
        raise ValueError(f"{source} is empty")
    marks = [mark for mark in ",;\t" if mark in lines[0]]
    if marks:
        rows = list(csv.reader(lines, delimiter=marks[0], skipinitialspace=True))
    else:
        rows = [re.split(r"\s+", line) for line in lines]
    header = list(columns) or rows.pop(0)
    for number, row in enumerate(rows, len(lines) - len(rows) + 1):
        if len(row) != len(header):
            raise ValueError(
                f"row {number} of {source} has {len(row)} cells, but there are {len(header)}"
                " columns: see --columns"
            )
    target = target or header[-1]
    for name in (target, *drop):
        if name not in header:
            raise ValueError(f"{source} has no column {name!r}: it has {', '.join(header)}")
    kept = [i for i, name in enumerate(header) if name not in (*drop, target)]
    order = [*kept, header.index(target)]
    return [header[i] for i in order], [[row[i].strip() for i in order] for row in rows]


def write_table(out: Path, header: list[str], rows: list[list[str]], kind: Kind) -> None:
    """Writes the csv file, when `tabular` can read it."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / out.name).write_text(text.getvalue())
        tabular.load(out.stem, kind, Path(folder))
    out.parent.mkdir(parents=True, exist_ok=True)
    files.write(out, text.getvalue())


def write_arrays(out: Path, arrays: public.Arrays) -> None:
    """Writes the npz file, when `data` can read it."""
    content, parts = io.BytesIO(), dict[str, Any](arrays)
    np.savez_compressed(content, **parts)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graphs" / out.name
        path.parent.mkdir()
        path.write_bytes(content.getvalue())
        if "faces" in arrays:
            data.mesh_faces(path)
        elif "obs_nodes" in arrays:
            data.traffic(path)
        else:
            data.load(out.stem, Path(folder), weighted=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    files.write(out, content.getvalue())


def sources(source: Path) -> list[Path]:
    """The files to read; a folder of roads is one.

    Raises:
        ValueError: for a source that is not there, or is of no kind that is known.
    """
    known = (".gml", *MESHES)
    if (source / "roads.csv").is_file():
        return [source]
    if source.is_dir():
        found = sorted(path for path in source.rglob("*") if path.suffix.lower() in known)
    else:
        found = [source] if source.suffix.lower() in (*known, *TABLES) else []
    if not found or not all(path.is_file() for path in found):
        raise ValueError(
            f"--source={source} is no file that ends in {', '.join((*known, *TABLES))}, and no"
            " folder with such graphs or meshes, or with roads.csv"
        )
    return found


def main(
    source: Path,
    out: Path = Path("data"),
    name: str = "",
    largest_component: bool = False,
    kind: Kind = "regression",
    columns: Sequence[str] = (),
    target: str = "",
    drop: Sequence[str] = (),
) -> None:
    """Writes the files and prints their paths.

    Args:
        source: a file, or a folder of them.
        out: folder of the data, to be named by --data_dir.
        name: of the result; that of the source.
        largest_component: of a graph, and nothing of the others.
        kind: of a table, by its target.
        columns: names, for a table without a header.
        target: the column that goes last; the last one.
        drop: columns that are left out.
    """
    found = sources(source)
    if name and len(found) > 1:
        raise ValueError(f"--name={name} is one name, but {source} has {len(found)} files")
    for path in found:
        suffix, stem = path.suffix.lower(), name or path.stem
        if suffix in TABLES:
            result = out / f"uci_{kind}" / f"{stem}.csv"
        else:
            folder = "graphs" if suffix == ".gml" else "meshes"
            result = out / ("traffic_san_jose" if path.is_dir() else folder) / f"{stem}.npz"
        if result.exists():
            raise ValueError(f"{result} is there already: remove it, or give another --name")
        if suffix in TABLES:
            write_table(result, *table(path, columns, target, drop), kind)
        elif path.is_dir():
            write_arrays(result, public.roads(path))
        elif suffix == ".gml":
            write_arrays(result, public.gml(path, largest_component))
        else:
            write_arrays(result, public.mesh(path))
        print(result, flush=True)


if __name__ == "__main__":
    launch.run(main)
