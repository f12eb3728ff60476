"""What `performer.measure` records of batches, and how records of several are one."""

from typing import get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import performer
from performer import Exact
from performer.linearization import reading
from performer.linearization.measure import EXAMPLES, Record, examples
from performer.refinement import Sample

T, H = 6, 8


def attend(x):
    scores = jnp.einsum("bqh,bkh->bqk", x, x) / H**0.5
    return jnp.einsum("bqk,bkh->bqh", jax.nn.softmax(scores), x)


def tokens(seed, size=1.0, batch=8):
    return size * jax.random.normal(jax.random.key(seed), (batch, T, H))


def sample(value, count=3, length=2):
    return Sample.of(*[jnp.full((count, length, 1, 1), value)] * 2)


FLAGS = ("same_heads", "same_in_groups", "alibi", "exact", "all_keys", "fits", "kinds")


def record(value, flags, **fields):
    numbers = dict.fromkeys(("moments", "count", "batches", "slopes", "scale"), np.array([value]))
    numbers |= dict.fromkeys(FLAGS, np.array(flags))
    return Record(**numbers | dict(held_out=sample(value), fitted=sample(value)) | fields)


def test_records_merge_by_the_rules_of_their_fields():
    """Sums, what holds in both, the largest, the first examples: each field has a rule."""
    both = record(1.0, [True, True]).together(record(2.0, [True, False]))
    for name in ("moments", "count", "batches", "slopes"):
        assert getattr(both, name) == 3, name
    assert both.scale == 2
    for name in FLAGS:
        np.testing.assert_array_equal(getattr(both, name), [True, False], name)
    np.testing.assert_array_equal(both.fitted.key.ravel(), np.repeat([1, 2], 6))
    hints = get_type_hints(Record, include_extras=True)
    assert all(callable(hints[name].__metadata__[0]) for name in Record._fields)
    longer = record(2.0, [True], held_out=sample(2.0, length=3), fitted=sample(2.0, count=20))
    both = record(1.0, [True]).together(longer)
    assert both.held_out.key.shape == (3, 2, 1, 1)
    assert both.fitted.key.shape == (EXAMPLES, 2, 1, 1)
    unfitted = record(1.0, [True]).together(longer.unfitted())
    assert (unfitted.moments, unfitted.count, len(unfitted.fitted.key)) == (1, 1, 3)


def test_of_four_batches_the_last_is_held_out():
    """Nothing is fitted to it, neither by calibration nor by refinement; answers are of it."""
    batches = [(tokens(i, 1 + (i == 3)),) for i in range(4)]
    four, three = (performer.measure(attend, x) for x in (batches, batches[:3]))
    np.testing.assert_allclose(four.layers[0].moments, three.layers[0].moments, rtol=1e-6)
    assert (four.is_held_out, three.is_held_out) == (True, False)
    np.testing.assert_array_equal(four.arguments[0], batches[3][0])
    read = examples(attend, batches, four.layers[0])
    assert len(read.query) == 3 * 7  # one of eight is held out
    _, report = performer.linearize(attend, [], measured=four, num_features=8)
    assert "of a held-out batch" in str(report.change)


def test_weights_in_float16():
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.normal(size=(H, 3 * H)) / 4, jnp.float16)
    x = jnp.asarray(rng.normal(size=(8, T, H)), jnp.float16)

    def function(w, x):
        query, key, value = jnp.split(x @ w, 3, axis=-1)
        return jax.nn.softmax(query @ key.mT / H**0.5) @ value

    new, report = performer.linearize(function, [(w, x)], num_features=8, exact=Exact(keys=T))
    output = new(w, x)
    assert output.dtype == jnp.float16
    largest = np.abs(np.asarray(function(w, x), float)).max()
    np.testing.assert_allclose(output, function(w, x), atol=2e-3 * largest)
    assert len(report.linear) == 1


@pytest.mark.parametrize("calibration", ["none", "full"])
def test_with_all_keys_exact_nothing_changes_whatever_the_calibration(calibration):
    """Keys with a mean far from 0, to which the features are calibrated."""
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=(8, T, H)), jnp.float32) for _ in range(3))
    key = key + 5 * jnp.asarray(rng.normal(size=H), jnp.float32)

    def function(query, key, value):
        scores = jnp.einsum("bqh,bkh->bqk", query, key, precision="highest") / H**0.5
        return jnp.einsum("bqk,bkh->bqh", jax.nn.softmax(scores), value, precision="highest")

    given = dict(num_features=8, exact=Exact(keys=T), calibration=calibration)
    new, _ = performer.linearize(function, [(query, key, value)], **given)
    scores = np.asarray(query, float) @ np.asarray(key, float).mT / H**0.5
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    want = weights / weights.sum(axis=-1, keepdims=True) @ np.asarray(value, float)
    before = np.abs(function(query, key, value) - want).max()
    assert np.abs(new(query, key, value) - want).max() < max(1e-6, 3 * before)


def test_a_mask_without_arguments_is_computed_while_tracing(monkeypatch):
    """XLA would fold its arrays over pairs, which takes seconds at 512 tokens."""
    seen = []

    def computed(function, *arrays, inner=reading.computed):
        seen.extend(arrays)
        return inner(function, *arrays)

    monkeypatch.setattr(reading, "computed", computed)
    performer.measure(attend, [(tokens(0),)])
    assert seen
    assert not any(isinstance(x, jax.core.Tracer) for x in seen)
