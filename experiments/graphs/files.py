"""Public files of graphs, meshes and roads -> the arrays that `experiments.graphs.data` reads.

Nothing is unpickled, and nothing but what a file says is kept: no node is named, no face is mended.
"""

import csv
import io
import itertools
from collections.abc import Sequence
from pathlib import Path

import networkx
import numpy as np

from vit import bounded

Arrays = dict[str, np.ndarray]
TRIANGLE = np.dtype([("normal", "<f4", 3), ("corners", "<f4", (3, 3)), ("attributes", "<u2")])
"""Of a binary STL file."""


def gml(path: Path, largest_component: bool = False) -> Arrays:
    """`edges`, `n_nodes` and, where the edges have values that differ, `weights`.

    Every edge is there once, undirected; loops are left out, values of parallel edges averaged.

    Raises:
        ValueError: for a file that is no GML, or has no edge.
    """
    lines = bounded.content(path).decode("utf-8", errors="replace").splitlines()
    try:
        found = networkx.parse_gml(lines, label="id")
    except (networkx.NetworkXError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as GML: {error}") from error
    values: dict[tuple[int, int], list[float]] = {}
    at = {node: i for i, node in enumerate(found)}
    for a, b, attributes in found.edges(data=True):
        ends = at[a], at[b]
        if a != b:
            value = attributes.get("value", attributes.get("weight", 1.0))
            values.setdefault((min(ends), max(ends)), []).append(float(value))
    if not values:
        raise ValueError(f"{path} has no edge between two nodes")
    edges, weights = np.array(list(values)), np.array([np.mean(x) for x in values.values()])
    count = len(at)
    if largest_component:
        edges, weights, count = _largest(edges, weights, count)
    order = np.lexsort(edges.T[::-1])
    arrays = {"edges": edges[order].astype(np.int32), "n_nodes": np.asarray(count, np.int32)}
    return arrays | ({"weights": weights[order]} if np.ptp(weights) else {})


def _largest(edges: np.ndarray, weights: np.ndarray, count: int):
    """The component with most nodes, numbered anew in their order."""
    graph = networkx.Graph(edges.tolist())
    kept = sorted(max(networkx.connected_components(graph), key=len))
    number = np.full(count, -1)
    number[kept] = np.arange(len(kept))
    inside = number[edges[:, 0]] >= 0
    return number[edges[inside]], weights[inside], len(kept)


def mesh(path: Path) -> Arrays:
    """`vertices`, `faces`, `edges` and `vertex_normals` of an STL or OBJ file.

    Vertices that agree to 1e-8 of the extent become one; faces without area, or that are there
    twice, and vertices without a face are left out. A normal is the mean of those of the faces
    around, weighted by their angles.

    Raises:
        ValueError: for a file that is none, or has no face.
    """
    content = bounded.content(path)
    try:
        corners = _obj(content) if path.suffix.lower() == ".obj" else _stl(content)
    except (ValueError, IndexError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as {path.suffix[1:].upper()}: {error}") from error
    if not np.isfinite(corners).all():
        raise ValueError(f"{path} has coordinates that are not finite")
    corners = corners[np.linalg.norm(_across(corners), axis=1) > 0]
    if not len(corners):
        raise ValueError(f"{path} has no face with an area")
    points = corners.reshape(-1, 3)
    rounded = np.round(points / np.ptp(points), 8)
    _, first, faces = np.unique(rounded, axis=0, return_index=True, return_inverse=True)
    vertices, faces = points[first], faces.reshape(-1, 3)
    a, b, c = faces.T
    faces = faces[(a != b) & (b != c) & (c != a)]
    used, faces = np.unique(faces, return_inverse=True)
    vertices, faces = vertices[used], faces.reshape(-1, 3)
    faces = faces[np.sort(np.unique(np.sort(faces, axis=1), axis=0, return_index=True)[1])]
    sides = np.sort(np.concatenate([faces[:, [0, 1]], faces[:, [1, 2]], faces[:, [2, 0]]]), axis=1)
    return {
        "vertices": vertices,
        "faces": faces.astype(np.int32),
        "edges": np.unique(sides, axis=0).astype(np.int32),
        "vertex_normals": _normals(vertices, faces).astype(np.float32),
    }


def _stl(content: bytes) -> np.ndarray:
    """Corners (F, 3, 3) of a binary file, whose length says that it is one, or of an ASCII file."""
    count = int.from_bytes(content[80:84], "little")
    if len(content) == 84 + TRIANGLE.itemsize * count:
        return np.frombuffer(content, TRIANGLE, offset=84)["corners"].astype(np.float64)
    words = [line.split() for line in content.decode("ascii").splitlines()]
    points = [[float(x) for x in line[1:4]] for line in words if line[:1] == ["vertex"]]
    return np.array(points).reshape(-1, 3, 3)


def _obj(content: bytes) -> np.ndarray:
    """Corners (F, 3, 3); a polygon is a fan of triangles, a negative number counts from the end."""
    points: list[list[float]] = []
    triangles = []
    for line in content.decode().splitlines():
        kind, *words = line.split() or [""]
        if kind == "v":
            points.append([float(x) for x in words[:3]])
        elif kind == "f":
            at = [int(word.split("/")[0]) for word in words]
            if min(map(abs, at)) < 1:
                raise ValueError("vertex 0 is none: they are numbered from 1")
            corners = [points[i - 1 if i > 0 else i] for i in at]
            triangles += [[corners[0], *pair] for pair in itertools.pairwise(corners[1:])]
    return np.array(triangles, np.float64).reshape(-1, 3, 3)


def _across(corners: np.ndarray) -> np.ndarray:
    a, b, c = np.moveaxis(corners, 1, 0)
    return np.cross(b - a, c - a)


def _normals(vertices: np.ndarray, faces: np.ndarray) -> np.ndarray:
    """Unit vectors (V, 3)."""
    corners = vertices[faces]
    across = _across(corners)
    units = across / np.linalg.norm(across, axis=1, keepdims=True)
    total = np.zeros_like(vertices)
    for i in range(3):
        a, b = (corners[:, (i + k) % 3] - corners[:, i] for k in (1, 2))
        lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        angle = np.arccos(np.clip(np.sum(a * b, axis=1) / lengths, -1, 1))
        np.add.at(total, faces[:, i], angle[:, None] * units)
    lengths = np.linalg.norm(total, axis=1, keepdims=True)
    return np.where(lengths > 0, total / np.where(lengths > 0, lengths, 1), [0.0, 0.0, 1.0])


def roads(folder: Path) -> Arrays:
    """Traffic, of roads.csv (from, to, length in metres) and sensors.csv (node, speed in mph).

    Nodes are any names; a road weighs the mean length over its own.

    Raises:
        ValueError: for a column or a file that is missing, a node without a road, or a length or
            speed that is none; the message names file and line.
    """
    ends, lengths = _columns(folder / "roads.csv", ("from", "to", "length"))
    sensors, speeds = _columns(folder / "sensors.csv", ("node", "speed"))
    if not np.all(lengths > 0):
        raise ValueError(f"{folder / 'roads.csv'} has a length that is not positive: correct it")
    names = sorted({name for pair in ends for name in pair})
    at = {name: i for i, name in enumerate(names)}
    lost = [name for (name,) in sensors if name not in at]
    if lost or len(set(sensors)) < len(sensors):
        raise ValueError(
            f"{folder / 'sensors.csv'}: node {lost[0]!r} has no road"
            if lost
            else f"{folder / 'sensors.csv'} has a node twice: give one speed for each"
        )
    return {
        "n_nodes": np.asarray(len(names), np.int32),
        "edges": np.array([[at[a], at[b]] for a, b in ends], np.int32),
        "weights": lengths.mean() / lengths,
        "lengths_m": lengths,
        "obs_nodes": np.array([at[name] for (name,) in sensors], np.int32),
        "obs_speed": speeds,
    }


def _columns(path: Path, names: Sequence[str]) -> tuple[list[tuple[str, ...]], np.ndarray]:
    """All columns of these names but the last as text, the last as finite numbers."""
    reader = csv.DictReader(io.StringIO(bounded.content(path).decode("utf-8-sig")))
    if missing := [name for name in names if name not in (reader.fieldnames or ())]:
        raise ValueError(f"{path} has no column {missing[0]!r}: it needs {', '.join(names)}")
    texts, numbers = [], []
    for row in reader:
        try:
            number = float(row[names[-1]])
        except (TypeError, ValueError):
            number = float("nan")
        if not np.isfinite(number):
            place = f"line {reader.line_num} of {path}"
            raise ValueError(f"{place}: {names[-1]} {row[names[-1]]!r} is no finite number")
        texts.append(tuple(row[name] or "" for name in names[:-1]))
        numbers.append(number)
    if not texts:
        raise ValueError(f"{path} has no rows")
    return texts, np.array(numbers)
