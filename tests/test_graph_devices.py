"""Walks split over 8 virtual devices, equal to those of one."""

import jax
import networkx
import numpy as np
from jax.sharding import AxisType

from performer.graphs import Graph, features, graph_random_features, kernels


def test_eight_devices_walk_as_one(eight_devices):
    graph = Graph.from_networkx(networkx.karate_club_graph())  # 34 nodes: no multiple of 8
    mesh = jax.make_mesh((8,), ("nodes",), (AxisType.Auto,))
    options = {"num_walks": 6, "p_halt": 0.3}

    def visits(found):
        kept = np.asarray(found.load) != 0
        columns = (found.start, found.step, found.node, found.load, found.last)
        return sorted(zip(*(np.asarray(x)[kept].tolist() for x in columns), strict=True))

    one = features.sample(jax.random.key(0), graph, **options)
    eight = features.sample(jax.random.key(0), graph, mesh=mesh, **options)
    assert visits(one) == visits(eight)
    parts = [np.asarray(part.data) for part in eight.start.addressable_shards]
    kept = [np.asarray(part.data) != 0 for part in eight.load.addressable_shards]
    sizes = {len(set(p[k].tolist())) for p, k in zip(parts, kept, strict=True) if k.any()}
    assert len(parts) == 8
    assert sizes == {5, 4}

    v = np.arange(34.0, dtype=np.float32)
    a, b = (
        graph_random_features(jax.random.key(0), graph, kernels.Diffusion(), mesh=m, **options)
        for m in (None, mesh)
    )
    np.testing.assert_allclose(a @ v, jax.jit(lambda k, v: k @ v)(b, v), rtol=1e-5)

    square = jax.make_mesh((2, 4), ("a", "b"), (AxisType.Auto,) * 2)
    one = features.sample(jax.random.key(1), graph, steps="weighted", **options)
    eight = features.sample(jax.random.key(1), graph, steps="weighted", mesh=square, **options)
    assert visits(one) == visits(eight)
