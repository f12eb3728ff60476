"""Walks split over 8 virtual devices, equal to those of one."""

import os
import subprocess
import sys
from pathlib import Path


def test_eight_devices_walk_as_one():
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": str(Path(__file__).parent.parent),
    }
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [
        "8 parts of 5 nodes, walks equal",
        "features equal",
        "weighted, two axes: walks equal",
    ]


def main():
    import jax
    import networkx
    import numpy as np
    from jax.sharding import AxisType

    from performer.graphs import Graph, features, graph_random_features, modulations

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
    print("8 parts of 5 nodes, walks equal")

    v = np.arange(34.0, dtype=np.float32)
    a, b = (
        graph_random_features(jax.random.key(0), graph, modulations.diffusion(), mesh=m, **options)
        for m in (None, mesh)
    )
    np.testing.assert_allclose(a @ v, jax.jit(lambda k, v: k @ v)(b, v), rtol=1e-5)
    print("features equal")

    square = jax.make_mesh((2, 4), ("a", "b"), (AxisType.Auto,) * 2)
    one = features.sample(jax.random.key(1), graph, steps="weighted", **options)
    eight = features.sample(jax.random.key(1), graph, steps="weighted", mesh=square, **options)
    assert visits(one) == visits(eight)
    print("weighted, two axes: walks equal")


if __name__ == "__main__":
    main()
