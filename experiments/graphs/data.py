"""Data of the experiments on graphs: generated graphs, files of graphs, meshes, traffic.

A folder of data has `graphs/*.gml`, `meshes/*.stl` or `*.obj`, and `traffic_san_jose/*.npz`. Each
file may be an npz instead, with the arrays that are read from it: of a graph `edges` (E, 2), every
undirected edge once, and `n_nodes`; of a mesh `vertices` (V, 3), `faces`
(F, 3), `edges` and `vertex_normals` (V, 3); of traffic the arrays of a graph, `obs_nodes` and
`obs_speed`. Nothing is unpickled.

The edge probabilities of the qGRF paper's two Erdos-Renyi graphs, 0.2 (20 nodes) and 0.04 (100
nodes), are those of its notebook (isaac-reid/antithetic_termination); its draws are a pickle, which
is not opened. The seeds are the first that make connected graphs.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import networkx
import numpy as np
import scipy.sparse
from jaxtyping import Float, Int

from performer import choices
from performer.graphs import Graph

GENERATED = {
    "Small ER": lambda: networkx.gnp_random_graph(20, 0.2, seed=1),
    "Larger ER": lambda: networkx.gnp_random_graph(100, 0.04, seed=3),
    "Binary tree": lambda: networkx.balanced_tree(2, 6),
    "Ladder": lambda: networkx.ladder_graph(50),
}
"""The four made-up graphs of qGRF Fig. 2: 20, 100, 127 and 100 nodes."""
BUNDLED = GENERATED | {"karate": networkx.karate_club_graph}
"""Graphs that need no folder of data."""


def load(name: str, data_dir: Path | None = None) -> Graph:
    """Read a graph by its name.

    Args:
        name: in `GENERATED`, or of a file; in `BUNDLED` without data_dir.
        data_dir: folder with a folder `graphs`.

    Raises:
        ValueError: for a name that is not there, with the choices, and as `arrays`.
    """
    made = GENERATED if data_dir else BUNDLED
    if name in made:
        return Graph.from_networkx(made[name](), weight=None)
    if data_dir is None:
        raise ValueError(f"{choices.unknown('graph', name, made)}; files need --data_dir")
    stored = arrays(data_dir / "graphs" / f"{name}.npz", "edges", "n_nodes")
    return Graph.from_edges(stored["edges"], int(stored["n_nodes"]))


def chosen(names: Sequence[str], default: Sequence[str], data_dir: Path | None) -> dict[str, Graph]:
    """Read the graphs of these names; of `default` those that are available if there are none."""
    there = [name for name in default if data_dir or name in BUNDLED]
    return {name: load(name, data_dir) for name in names or there}


def copies(graph: Graph, count: int) -> Graph:
    """Return copies of a graph side by side: one draw of walks has as many repetitions of each."""
    return Graph.from_scipy(scipy.sparse.kron(scipy.sparse.eye_array(count), graph.to_scipy()))


def side_by_side(graphs: Sequence[Graph]) -> Graph:
    """Return one graph of all these, without edges between them."""
    return Graph.from_scipy(scipy.sparse.block_diag([graph.to_scipy() for graph in graphs]))


def frobenius_errors(phi: scipy.sparse.csr_array, exact: np.ndarray) -> np.ndarray:
    """Return |K - Phi Phi^T|_F / |K|_F for each block of a block-diagonal Phi, (blocks,)."""
    n, square, double = len(exact), np.sum(exact**2), scipy.sparse.csr_array(phi, dtype=np.float64)
    gram = scipy.sparse.coo_array(double @ double.T)
    row, column = gram.coords
    changes = gram.data * (gram.data - 2 * exact[row % n, column % n])
    squares = square + np.bincount(row // n, changes)  # no row is empty
    return np.sqrt(np.maximum(squares, 0) / square)


def mesh(path: Path) -> tuple[Graph, Float[np.ndarray, "v 3"]]:
    """Read the graph of the vertices of a mesh, and their unit normals (qGRF Sec. 4.4)."""
    stored = arrays(path, "edges", "vertex_normals")
    normals = stored["vertex_normals"].astype(np.float64)
    return Graph.from_edges(stored["edges"], len(normals)), normals


def vertex_normals(path: Path, by_area: bool) -> Float[np.ndarray, "v 3"]:
    """Return the means of the unit normals of the faces around each vertex, of unit length.

    Args:
        path: as in `mesh`.
        by_area: weigh the faces by their areas; equally otherwise.
    """
    stored = arrays(path, "vertices", "faces")
    vertices, faces = stored["vertices"].astype(np.float64), stored["faces"]
    a, b, c = np.moveaxis(vertices[faces], 1, 0)
    face_normals = np.cross(b - a, c - a)
    if not by_area:
        face_normals /= np.linalg.norm(face_normals, axis=1, keepdims=True)
    sums = np.zeros_like(vertices)
    np.add.at(sums, faces.ravel(), np.repeat(face_normals, 3, axis=0))
    return sums / np.linalg.norm(sums, axis=1, keepdims=True)


def mesh_faces(path: Path) -> tuple[Graph, Float[np.ndarray, "f 3"]]:
    """Read the graph of the faces of a mesh, adjacent by an edge, and their unit normals.

    As in VRC Fig. 4. A face without area raises ValueError.
    """
    stored = arrays(path, "vertices", "faces")
    vertices, faces = stored["vertices"].astype(np.float64), stored["faces"]
    sides = np.sort(np.concatenate([faces[:, [0, 1]], faces[:, [1, 2]], faces[:, [2, 0]]]), axis=1)
    edges = np.unique(sides, axis=0, return_inverse=True)[1].reshape(-1)
    owners = np.tile(np.arange(len(faces)), 3)
    bounds = scipy.sparse.csr_array((np.ones(len(edges)), (owners, edges)))
    shared = scipy.sparse.triu(bounds @ bounds.T, k=1).tocoo()
    a, b, c = np.moveaxis(vertices[faces], 1, 0)
    normals = np.cross(b - a, c - a)
    areas = np.linalg.norm(normals, axis=1, keepdims=True)
    if not np.all(areas > 0):
        raise ValueError(f"face {int(np.argmin(areas))} of {path} has no area: leave it out")
    return Graph.from_edges(np.stack(shared.coords, axis=1), len(faces)), normals / areas


def traffic(path: Path) -> tuple[Graph, Int[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """Read the graph of roads, the nodes with a sensor, and the speeds there in mph."""
    stored = arrays(path, "edges", "n_nodes", "obs_nodes", "obs_speed")
    graph = Graph.from_edges(stored["edges"], int(stored["n_nodes"]))
    return graph, stored["obs_nodes"], stored["obs_speed"]


Arrays = dict[str, np.ndarray]


def gml(path: Path) -> Arrays:
    """Read a graph by networkx, without its loops."""
    graph = networkx.Graph(networkx.read_gml(path, label="id"))
    graph.remove_edges_from(list(networkx.selfloop_edges(graph)))
    none: Any = None  # every edge counts once
    matrix = networkx.to_scipy_sparse_array(graph, weight=none, format="csr")
    upper = scipy.sparse.triu(matrix, format="csr").tocoo()
    return {"edges": np.stack(upper.coords, axis=1), "n_nodes": np.asarray(len(graph))}


def triangles(path: Path) -> Arrays:
    """Read a mesh by trimesh.

    Equal vertices become one; faces without area, or that are there twice, and vertices without a
    face are left out. A normal is the mean of the normals of the faces around, weighted by their
    angles.
    """
    import trimesh  # pyright: ignore[reportMissingImports]

    mesh: Any = trimesh.load_mesh(path)
    mesh.update_faces(mesh.nondegenerate_faces() & mesh.unique_faces())
    mesh.remove_unreferenced_vertices()
    return {
        "vertices": np.asarray(mesh.vertices),
        "faces": np.asarray(mesh.faces),
        "edges": mesh.edges_unique,
        "vertex_normals": mesh.vertex_normals.astype(np.float32),
    }


def npz(path: Path) -> Arrays:
    """Read the arrays of an npz file."""
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


FORMATS: dict[str, Callable[[Path], Arrays]] = {
    ".npz": npz,
    ".gml": gml,
    ".stl": triangles,
    ".obj": triangles,
}


def arrays(path: Path, *names: str) -> Arrays:
    """Read the arrays of `path`, or of a file of the same name in another of the `FORMATS`.

    Raises:
        ValueError: for no such file, with those that are there; a missing array.
    """
    others = [file for file in sorted(path.parent.glob("*")) if file.suffix.lower() in FORMATS]
    same = next((file for file in others if file.stem == path.stem), None)
    if same is None:
        there = ", ".join(file.stem for file in others) or "none"
        raise ValueError(f"no file {path}; files of this kind there: {there}")
    stored = FORMATS[same.suffix.lower()](same)
    if missing := [name for name in names if name not in stored]:
        raise ValueError(f"{same} has no {', '.join(missing)}, only {', '.join(stored)}")
    return stored


def erdos_renyi() -> Graph:
    """Return the graph on which permutations are learned."""
    return Graph.from_networkx(networkx.gnp_random_graph(100, 0.1, seed=0))
