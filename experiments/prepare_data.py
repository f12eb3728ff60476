"""Public files -> the folder that `--data_dir` of the experiments names.

    python -m experiments.prepare_data --source=karate.gml --out=data
    python -m experiments.prepare_data --source=community-graphs/gml_graphs --out=data
    python -m experiments.prepare_data --source=cora.gml --largest_component --name=cora_lcc
    python -m experiments.prepare_data --source=trimesh/models/teapot.stl --out=data
    python -m experiments.prepare_data --source=DIR_OF_ROADS --name=pems_san_jose --out=data
    python -m experiments.prepare_data --source=abalone.data --kind=classification --target=rings \\
        --columns=sex,length,diameter,height,whole,shucked,viscera,shell,rings

    NAME.gml                       graphs/NAME.npz, read by networkx
    NAME.stl, NAME.obj             meshes/NAME.npz, read by trimesh
    a folder with roads.csv        traffic_san_jose/NAME.npz: see `roads`
    NAME.csv, .data, .txt, .dat    uci_KIND/NAME.csv: a header, the target last

Another folder is searched for .gml, .stl and .obj files. A table may have its cells between commas,
semicolons, tabs or spaces; --columns names them where the file has no header. Each result is read
as the experiments read it before it stays, and no file is written over.
"""

import csv
import io
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import networkx
import numpy as np
import scipy.sparse

from experiments.common import launch, tabular
from experiments.graphs import data

TABLES = (".csv", ".data", ".txt", ".dat")
FOLDERS = {".gml": "graphs", ".stl": "meshes", ".obj": "meshes"}
KINDS = (*FOLDERS, *TABLES)
Kind = Literal["regression", "classification"]
Arrays = dict[str, np.ndarray]


def graph(path: Path, largest_component: bool) -> Arrays:
    """Read `edges`, `n_nodes` and, where the edges have values that differ, `weights`.

    Each edge is there once, undirected, without loops.
    """
    found = networkx.Graph(networkx.read_gml(path, label="id"))
    found.remove_edges_from(list(networkx.selfloop_edges(found)))
    weight = "value" if networkx.get_edge_attributes(found, "value") else "weight"
    nodes = list(found)
    if largest_component:
        kept = max(networkx.connected_components(found), key=len)
        nodes = [node for node in nodes if node in kept]
    matrix = networkx.to_scipy_sparse_array(found, nodes, weight=weight, format="csr")
    upper = scipy.sparse.triu(matrix, format="csr").tocoo()
    arrays = {"edges": np.stack(upper.coords, axis=1), "n_nodes": np.asarray(len(nodes), np.int32)}
    return arrays | ({"weights": upper.data} if np.ptp(upper.data) else {})


def mesh(path: Path) -> Arrays:
    """Read `vertices`, `faces`, `edges` and `vertex_normals` of a mesh.

    Equal vertices become one; faces without area, or that are there twice, and vertices without a
    face are left out. A normal is the mean of those of the faces around, weighted by their angles.
    """
    import trimesh  # pyright: ignore[reportMissingImports]

    found: Any = trimesh.load_mesh(path)
    found.update_faces(found.nondegenerate_faces() & found.unique_faces())
    found.remove_unreferenced_vertices()
    return {
        "vertices": np.asarray(found.vertices),
        "faces": found.faces.astype(np.int32),
        "edges": found.edges_unique.astype(np.int32),
        "vertex_normals": found.vertex_normals.astype(np.float32),
    }


def roads(folder: Path) -> Arrays:
    """Read roads.csv (from, to, length in metres) and sensors.csv (node, speed in mph).

    Nodes are any names; a road weighs the mean length over its own.
    """
    tables = []
    for name in ("roads.csv", "sensors.csv"):
        with (folder / name).open(encoding="utf-8-sig", newline="") as file:
            tables.append(list(csv.DictReader(file)))
    roads, sensors = tables
    ends = [(row["from"], row["to"]) for row in roads]
    lengths = np.array([float(row["length"]) for row in roads])
    at = {name: i for i, name in enumerate(sorted({name for pair in ends for name in pair}))}
    return {
        "n_nodes": np.asarray(len(at), np.int32),
        "edges": np.array([[at[a], at[b]] for a, b in ends], np.int32),
        "weights": lengths.mean() / lengths,
        "lengths_m": lengths,
        "obs_nodes": np.array([at[row["node"]] for row in sensors], np.int32),
        "obs_speed": np.array([float(row["speed"]) for row in sensors]),
    }


def table(source: Path, columns: Sequence[str], target: str, drop: Sequence[str]) -> str:
    """Return the content of the csv file, the target last.

    Raises:
        ValueError: for a column that is not there, or another number of cells in a row.
    """
    lines = [x.strip() for x in source.read_text("utf-8-sig", errors="replace").splitlines()]
    lines = [line for line in lines if line]
    mark = next((mark for mark in ",;\t" if mark in lines[0]), " ")
    table = csv.reader(lines, delimiter=mark, skipinitialspace=True)
    rows = [[cell.strip() for cell in row] for row in table]
    header = list(columns) or rows.pop(0)
    target = target or header[-1]
    if wrong := [row for row in rows if len(row) != len(header)]:
        raise ValueError(f"{source} has {len(header)} columns, but a row {wrong[0]}: see --columns")
    if missing := sorted({target, *drop} - {*header}):
        raise ValueError(f"{source} has no column {missing[0]!r}: it has {', '.join(header)}")
    order = [i for i, name in enumerate(header) if name not in (*drop, target)]
    order.append(header.index(target))
    content = io.StringIO(newline="")
    writer = csv.writer(content, lineterminator="\n")
    writer.writerows([row[i] for i in order] for row in [header, *rows])
    return content.getvalue()


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
    """Write the files and print their paths.

    Args:
        source: file, or folder of files.
        out: folder of the data, the later --data_dir.
        name: name of the result; by default that of the source.
        largest_component: keep only the largest component of a graph.
        kind: kind of target of a table.
        columns: names of the columns of a table without a header.
        target: target column, written last; the last one by default.
        drop: columns to leave out.
    """
    if source.suffix.lower() in KINDS or (source / "roads.csv").is_file():
        found = [source]
    else:
        found = sorted(path for path in source.rglob("*") if path.suffix.lower() in FOLDERS)
    if not found:
        raise ValueError(f"--source={source} has no file that ends in {', '.join(KINDS)}")
    if name and len(found) > 1:
        raise ValueError(f"--name={name}: {source} has {len(found)} files, which need a name each")
    for path in found:
        suffix, stem = path.suffix.lower(), name or path.stem
        folder = "traffic_san_jose" if path.is_dir() else FOLDERS.get(suffix, f"uci_{kind}")
        result = out / folder / f"{stem}.{'csv' if suffix in TABLES else 'npz'}"
        if result.exists():
            raise ValueError(f"{result} already exists: remove it, or use another --name")
        if suffix in TABLES:
            content: Any = table(path, columns, target, drop)
            read = partial(tabular.load, stem, kind, out)
        elif path.is_dir():
            content, read = roads(path), partial(data.traffic, result)
        elif suffix == ".gml":
            content = graph(path, largest_component)
            read = partial(data.load, stem, out, weighted=True)
        else:
            content, read = mesh(path), partial(data.mesh_faces, result)
        result.parent.mkdir(parents=True, exist_ok=True)
        try:
            if isinstance(content, str):
                result.write_text(content)
            else:
                np.savez_compressed(result, **content)
            read()
        except BaseException:
            result.unlink(missing_ok=True)
            raise
        print(result, flush=True)


if __name__ == "__main__":
    launch.run(main)
