"""Public files of graphs and meshes are read as the arrays of the experiments."""

import numpy as np
import pytest

from experiments.graphs import data

GML = """graph [
  directed 0
  node [ id 7 label "a" gt "1" ]
  node [ id 3 label "b" gt "2" ]
  node [ id 5 label "c" gt "1" ]
  node [ id 9 label "d" gt "1" ]
  node [ id 8 label "e" gt "1" ]
  edge [ source 3 target 7 value 2 ]
  edge [ source 5 target 3 value 4 ]
  edge [ source 5 target 5 value 9 ]
  edge [ source 9 target 8 value 4 ]
]
"""

SOLID = np.array([[0.0, 0, 0], [2, 0, 0], [0, 2, 0], [0, 0, 2]])
"""The corners of a tetrahedron."""
FACES = np.array([[0, 2, 1], [0, 1, 3], [0, 3, 2], [1, 2, 3]])


def obj():
    vertices = "".join(f"v {x} {y} {z}\n" for x, y, z in SOLID)
    relative = "f -4/1/1 -2/2/2 -3/3/3\n"
    rest = "".join(f"f {a + 1}//1 {b + 1}//2 {c + 1}//3\n" for a, b, c in FACES[1:])
    return f"# a comment\n{vertices}vt 0 0\n{relative}{rest}".encode()


def test_a_graph(tmp_path):
    """Numbers are those of the nodes' order; all weights are 1, and loops are gone."""
    (tmp_path / "graphs").mkdir()
    (tmp_path / "graphs" / "toy_0.1.gml").write_text(GML)
    graph = data.load("toy_0.1", tmp_path)
    want = np.zeros((5, 5))
    for a, b in ((0, 1), (1, 2), (3, 4)):
        want[a, b] = want[b, a] = 1
    np.testing.assert_array_equal(graph.to_dense(), want)


def test_a_mesh(tmp_path):
    """A tetrahedron: 4 vertices, 4 faces, 6 edges, and the normals of its corners."""
    pytest.importorskip("trimesh")
    (tmp_path / "c.OBJ").write_bytes(obj())
    path = tmp_path / "c.npz"
    graph, normals = data.mesh(path)
    assert (graph.num_nodes, len(graph.indices)) == (4, 12)
    faces, _ = data.mesh_faces(path)
    np.testing.assert_array_equal(faces.to_dense(), 1 - np.eye(4))
    vertices = data.arrays(path)["vertices"]
    assert sorted(map(tuple, vertices)) == sorted(map(tuple, SOLID))
    at_origin = normals[int(np.argmin(vertices.sum(axis=1)))]
    np.testing.assert_allclose(at_origin, -np.ones(3) / 3**0.5, rtol=1e-6)
    # At (2, 0, 0) two right angles' halves and one of 60 degrees: 45, 45 and 60.
    weights = np.pi * np.array([1 / 4, 1 / 4, 1 / 3])
    want = weights @ np.array([[0, 0, -1], [0, -1, 0], np.ones(3) / 3**0.5])
    found = normals[int(np.argmax(vertices[:, 0]))]
    np.testing.assert_allclose(found, want / np.linalg.norm(want), rtol=1e-6)


def test_normals_of_vertices(tmp_path):
    """At (2, 0, 0) three faces meet: of equal weights, and of areas 2, 2 and 2 times sqrt(3)."""
    np.savez(tmp_path / "c.npz", vertices=SOLID, faces=FACES)
    weights = {False: [1, 1, 1], True: [1, 1, 3**0.5]}
    for by_area, w in weights.items():
        want = np.array(w) @ np.array([[0, 0, -1], [0, -1, 0], np.ones(3) / 3**0.5])
        found = data.vertex_normals(tmp_path / "c.npz", by_area)
        np.testing.assert_allclose(found[1], want / np.linalg.norm(want), atol=1e-12)
