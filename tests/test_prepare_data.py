"""Public files become what the experiments read: small ones of each kind, made here."""

import numpy as np
import pytest

from experiments import prepare_data
from experiments.common import tabular
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
    """The values of edges are weights; numbers are those of the nodes' order; loops are gone."""
    (tmp_path / "toy.gml").write_text(GML)
    prepare_data.main(tmp_path / "toy.gml", tmp_path)
    graph = data.load("toy", tmp_path, weighted=True)
    want = np.zeros((5, 5))
    for a, b, value in ((0, 1, 2), (1, 2, 4), (3, 4, 4)):
        want[a, b] = want[b, a] = value
    np.testing.assert_array_equal(graph.to_dense(), want)
    prepare_data.main(tmp_path / "toy.gml", tmp_path, name="lcc", largest_component=True)
    np.testing.assert_array_equal(
        data.load("lcc", tmp_path, weighted=True).to_dense(), want[:3, :3]
    )


def test_a_mesh(tmp_path):
    """A tetrahedron: 4 vertices, 4 faces, 6 edges, and the normals of its corners."""
    pytest.importorskip("trimesh")
    (tmp_path / "c.obj").write_bytes(obj())
    prepare_data.main(tmp_path / "c.obj", tmp_path)
    path = tmp_path / "meshes/c.npz"
    graph, normals = data.mesh(path)
    assert (graph.num_nodes, len(graph.indices)) == (4, 12)
    faces, _ = data.mesh_faces(path)
    np.testing.assert_array_equal(faces.to_dense(), 1 - np.eye(4))
    with np.load(path) as arrays:
        vertices = arrays["vertices"]
    assert sorted(map(tuple, vertices)) == sorted(map(tuple, SOLID))
    at_origin = normals[int(np.argmin(vertices.sum(axis=1)))]
    np.testing.assert_allclose(at_origin, -np.ones(3) / 3**0.5, rtol=1e-6)
    # At (2, 0, 0) two right angles' halves and one of 60 degrees: 45, 45 and 60.
    weights = np.pi * np.array([1 / 4, 1 / 4, 1 / 3])
    want = weights @ np.array([[0, 0, -1], [0, -1, 0], np.ones(3) / 3**0.5])
    found = normals[int(np.argmax(vertices[:, 0]))]
    np.testing.assert_allclose(found, want / np.linalg.norm(want), rtol=1e-6)


def test_roads(tmp_path):
    source = tmp_path / "raw"
    source.mkdir()
    (source / "roads.csv").write_text("from,to,length\nx,y,100\ny,z,300\nx,y,200\n")
    (source / "sensors.csv").write_text("speed,node\n61.5,z\n40,x\n")
    prepare_data.main(source, tmp_path, name="pems_san_jose")
    graph, nodes, speeds = data.traffic(tmp_path / "traffic_san_jose" / "pems_san_jose.npz")
    w = graph.to_dense()
    np.testing.assert_allclose([w[0, 1], w[1, 2], w[0, 2]], [3, 2 / 3, 0], rtol=1e-6)
    assert (nodes.tolist(), speeds.tolist()) == ([2, 0], [61.5, 40])


@pytest.mark.parametrize("mark", [",", ";", "  "])
def test_a_table_without_a_header(mark, tmp_path):
    rows = [(7, "M", 0.5, "x1"), (9, "F", 0.25, "x2"), (3, "M", 1.5, "x3"), (8, "F", 2.5, "x4")]
    text = "\n".join(mark.join(map(str, row)) for row in rows)
    (tmp_path / "toy.data").write_text(text)
    columns = dict(columns=("rings", "sex", "length", "id"), target="rings", drop=("id",))
    prepare_data.main(tmp_path / "toy.data", tmp_path, **columns)
    table = tabular.load("toy", "regression", tmp_path)
    assert table.columns == ("sex, value 0", "sex, value 1", "length")
    np.testing.assert_array_equal(table.y, [7, 9, 3, 8])
    np.testing.assert_array_equal(table.x, [[0, 1, 0.5], [1, 0, 0.25], [0, 1, 1.5], [1, 0, 2.5]])
