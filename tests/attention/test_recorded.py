"""Outputs and gradients of sixty calls do not change, except where a change is meant."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from performer import Bias, Exact, Features, alibi, performer_attention
from performer.attention import sizes, stream
from performer.calibration import Calibration
from performer.refinement import LEARNED
from tests.attention.recorded import CALLS, KEPT, SEED, Recorded
from tests.support.tiers import tiers

STORED = np.load(Path(__file__).with_name("recorded.npz"))
TOLERANCE = {"float32": 5e-6, "bfloat16": 2**-7}
"""Relative to the largest entry. Compiled alike they agreed to 1.1e-7 (float32); 1.2e-6 is the most
that another compilation changes."""


def features_of(name: str, call: Recorded) -> Features:
    """The features of a recorded call."""
    leaves = ("weights", "query_frequencies")
    arrays = {x: jnp.asarray(STORED[f"{name}/{x}"]) for x in leaves if f"{name}/{x}" in STORED}
    fitted = {x: STORED.get(f"{name}/calibration/{x}") for x in Calibration._fields}
    given = jax.tree.map(jnp.asarray, Calibration(**fitted))
    features = Features(
        jnp.asarray(STORED[f"{name}/frequencies"]),
        given if any(x is not None for x in given) else None,
        **arrays,
        exact=Exact(**call.exact),
    )
    return replace(features, feature_map=LEARNED if call.learned else call.feature_map)


def biases(call: Recorded, tokens: slice = slice(None)) -> Bias:
    """The bias of a recorded call, or of a part of its tokens."""
    arrays, bias = call.others(), Bias()
    if call.alibi:
        bias = bias + alibi(arrays["slopes"])
    if call.decay:
        bias = bias + Bias(decay=arrays["decay"][:, tokens])
    return bias + Bias(keys=arrays.get("keys"))


def attend(call: Recorded, features: Features, query, key, value):
    """The output of a recorded call."""
    others, options = call.others(), dict(scale=call.scale, implementation=call.implementation)
    if call.streamed:
        cut, outputs, state = call.t // 2 - 1, [], None
        for part in (slice(None, cut), slice(cut, None)):
            tokens = (x[:, part] for x in (query, key, value))
            output, state = stream(*tokens, features, state, bias=biases(call, part), **options)
            outputs.append(output)
        return jnp.concatenate(outputs, axis=1)
    names = ("mask", "key_value_seq_lengths", "segment_ids")
    options |= {x: others.get(x) for x in names} | dict(is_causal=call.causal, bias=biases(call))
    return performer_attention(query, key, value, features, **options)


AT_ONCE = ("all heads", "one head")
BY_HEAD = ("grouped", "causal masked", "segments alibi", "learned window", "exact keys calibrated")
"""Calls of the core that compute one head after another."""


@pytest.mark.parametrize(
    ("at_once", "name"),
    tiers(product(AT_ONCE, CALLS), [*product(AT_ONCE[:1], CALLS), *product(AT_ONCE[1:], BY_HEAD)]),
)
def test_calls_are_those_recorded(at_once, name, monkeypatch):
    """Output and gradients of queries, keys and values; also one head after another."""
    if at_once == "one head":
        monkeypatch.setattr(sizes, "heads_at_once", lambda *_: 1)
    call = CALLS[name]
    features, tokens = features_of(name, call), [jnp.asarray(x, call.dtype) for x in call.tokens()]
    output, pull = jax.vjp(lambda *tokens: attend(call, features, *tokens), *tokens)
    along = np.random.default_rng(SEED + 3).standard_normal(output.shape)
    gradients = pull(jnp.asarray(along, jnp.float32).astype(output.dtype))
    names = "output", "query", "key", "value"
    for label, x in zip(names, (output, *gradients), strict=True):
        axis = len(call.batch)
        kept = np.linspace(0, x.shape[axis] - 1, min(KEPT, x.shape[axis])).astype(int)
        got, want = np.take(np.asarray(x, np.float32), kept, axis), STORED[f"{name}/{label}"]
        limit = TOLERANCE[call.dtype] * max(1.0, np.abs(want).max())
        np.testing.assert_allclose(got, want, rtol=0, atol=limit, err_msg=label)
