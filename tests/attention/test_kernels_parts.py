"""Calls that kernels serve beside plain ones, interpreted: values and gradients as by XLA."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from performer import Exact, Features, calibration, performer_attention
from performer.attention import explain, stream
from performer.attention.kernels import which
from tests.support.tiers import tiers

T, N, K, SIZE = 40, 4, 2, 16
NAMED = {
    "residual": dict(residual=True),
    "causal residual": dict(residual=True, causal=True),
    "exact rows": dict(exact=Exact(rows=2)),
    "exact keys": dict(exact=Exact(keys=5)),
    "exact keys and rows": dict(exact=Exact(keys=5, rows=1), calibrated=True, residual=True),
    "cross attention": dict(s=24, exact=Exact(keys=3)),
    "shift": dict(calibrated=True, residual=True),
    "stream": dict(streamed=True, causal=True),
    "stream, not causal": dict(streamed=True),
    "decoding": dict(streamed=True, causal=True, t=1),
    "split": dict(split=True),
    "split, causal": dict(split=True, causal=True),
}
CASES = [("cuda", name) for name in NAMED]
CASES += [("tpu", name) for name in NAMED]
LATE = ("split", "split, causal", "stream, not causal", "cross attention", "causal residual")


def arrays(t, s):
    rng = np.random.default_rng(4)
    shapes = (2, t, N, SIZE), (2, s, K, SIZE), (2, s, K, SIZE), (SIZE, SIZE)
    return [jnp.asarray(rng.standard_normal(x), jnp.float32) for x in shapes]


def outputs(call, implementation, query, key, value, features):
    """All results of a call, of float arrays alone."""
    attend = partial(performer_attention, implementation=implementation)
    causal = call.get("causal", False)
    if call.get("streamed"):
        one = partial(stream, is_causal=causal, implementation=implementation)
        _, state = stream(query[:, :7], -key[:, :7], value[:, :7] + 1, features)
        output, state = one(query, key, value, features, state)
        return output, *state[1:]
    if call.get("split"):
        spec = PartitionSpec(None, "s")
        split = jax.shard_map(
            partial(attend, features=features, is_causal=causal, axis_name="s"),
            mesh=jax.make_mesh((2,), ("s",), (AxisType.Auto,)),
            in_specs=spec,
            out_specs=spec,
            check_vma=False,  # of interpreted kernels
        )
        return (split(query, key, value),)
    options = dict(is_causal=causal, return_residual=call.get("residual", False))
    result = attend(query, key, value, features, **options)
    return result if options["return_residual"] else (result,)


@pytest.mark.parametrize(
    ("platform", "name"), tiers(CASES, [x for x in CASES if x[1] not in LATE and x[0] == "cuda"])
)
def test_kernels_serve_it(platform, name, monkeypatch, eight_devices):
    call = NAMED[name]
    t = call.get("t", T)
    query, key, value, w = arrays(t, call.get("s", t))
    fitted = None
    if call.get("calibrated"):
        fitted = calibration.calibrate(query, key, method="shift+scale")
    features = Features(w, fitted, exact=call.get("exact", Exact()))
    rng = np.random.default_rng(5)

    def both(implementation):
        def loss(query, key, value, w):
            given = Features(w, fitted, exact=features.exact)
            results = outputs(call, implementation, query, key, value, given)
            return sum(jnp.vdot(x, y) for x, y in zip(results, weights, strict=True)), results

        shapes = jax.eval_shape(partial(outputs, call, "blocked"), query, key, value, features)
        weights = [jnp.asarray(rng.standard_normal(x.shape), jnp.float32) for x in shapes]
        return jax.grad(loss, (0, 1, 2, 3), has_aux=True)(query, key, value, w)

    want = both("blocked")
    rng = np.random.default_rng(5)
    monkeypatch.setattr(which, "INTERPRET", platform)
    streams = call.get("streamed", False)
    shown = explain(query, key, value, features, implementation="pallas", streams=streams)
    assert platform != "cuda" or "gpu: kernel" in shown
    got = both("pallas")
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-4 * np.abs(y).max())
