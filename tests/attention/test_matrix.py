"""The one definition of the estimate: each field of `Features` reaches all that estimate by it.

That the matrix makes the outputs of attention, with all options, is in `test_attention_options`.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from performer import Exact, Features, calibration, performer_attention
from performer.analysis import attention_error
from performer.attention import attention_weights, stream
from performer.attention.matrix import log_products
from performer.graphs import masked_attention
from performer.refinement import Sample, estimate, refined
from performer.testing import reference_attention
from tests.support.attention_inputs import close, inputs, matrix_of_op

QUERY, KEY, VALUE, FREQUENCIES = inputs(t=6, frequency_heads=2)
OTHER = {
    "frequencies": -2 * FREQUENCIES,
    "calibration": calibration.calibrate(QUERY, KEY + 1),
    "weights": jnp.linspace(0.0, 0.3, 12),
    "query_frequencies": 0.5 * FREQUENCIES,
    "feature_map": "hyperbolic",
    "exact": Exact(window=2),
    "coupling": None,
}
"""Fields of `Features`, each with another value than its default: no output stays the same."""
GIVEN = Features(FREQUENCIES)
EYE = jnp.broadcast_to(jnp.eye(6)[:, None], (2, 6, 2, 6))


def by_attention(features):
    return matrix_of_op(QUERY, KEY, features)


def by_states(query, key, value, features):
    return stream(query, key, value, features, is_causal=False)[0]


def by_neighbours(query, key, value, features):
    mask = jnp.ones((6, 6))  # all nodes are neighbours: attention itself
    return masked_attention(query, key, value, features, mask)


def by_stream(features):
    return jnp.moveaxis(by_states(QUERY, KEY, EYE, features), 2, 1)


def by_graph(features):
    return jnp.moveaxis(by_neighbours(QUERY, KEY, EYE, features), 2, 1)


def by_refinement(features):
    return estimate(features, Sample.of(QUERY, KEY))


def by_refined(features):
    """Refused, or the same fields after a step."""
    new = refined(features, Sample.of(QUERY, KEY), steps=1)
    moved = dataclasses.replace(new, frequencies=features.frequencies)
    for name in OTHER:
        assert getattr(moved, name) is getattr(features, name)
    return attention_weights(QUERY, KEY, features)


def by_analysis(features):
    """The error of a draw that is always the same; other fields are keywords, or unknown ones."""
    fields = {x.name: getattr(features, x.name) for x in dataclasses.fields(Features)}
    w = fields.pop("frequencies")
    default = {x.name: x.default for x in dataclasses.fields(Features)}
    given = {name: x for name, x in fields.items() if x is not default[name]}
    options = dict(coupling="iid", num_features=12, draws=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "performer.analysis._frequencies", lambda *_: jnp.broadcast_to(w, (3, *w.shape))
        )
        error = attention_error(QUERY, KEY, **options, **given)
    return error.attention.value


WAYS = {
    "op": by_attention,
    "stream": by_stream,
    "graph": by_graph,
    "estimate": by_refinement,
    "refined": by_refined,
    "analysis": by_analysis,
}
REFUSED = {
    # who: the fields that it refuses, by a message or an unknown keyword
    "stream": {"exact": "Exact\\(window=2\\)"},
    "graph": {"exact": "has no features of its own"},
    "refined": {"weights": "weights", "feature_map": "hyperbolic"}
    | {"query_frequencies": "query_frequencies"},
    "analysis": {"weights": "weights", "query_frequencies": "query_frequencies"},
}


def test_every_field_has_another_value():
    assert {*OTHER, "trainable"} == {x.name for x in dataclasses.fields(Features)}


@pytest.mark.parametrize("way", ["op", "stream", "graph"])
def test_features_are_constants_unless_trainable(way):
    """No gradient for any array of them; queries and keys have the same gradient."""
    fitted = calibration.calibrate(QUERY, KEY + 1)
    weights = jnp.linspace(0.1, 0.3, FREQUENCIES.shape[-2])
    target = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 6, 6)), jnp.float32)
    attend = {"op": performer_attention, "stream": by_states, "graph": by_neighbours}[way]

    def gradients(trainable):
        features = Features(FREQUENCIES, fitted, weights, trainable=trainable)

        def loss(query, features):
            output = attend(query, KEY, EYE, features)
            return jnp.sum(target * jnp.moveaxis(output, 2, 1))

        return jax.grad(loss, (0, 1))(QUERY, features)

    (query, constant), (same, trained) = gradients(False), gradients(True)
    assert all(not np.any(x) for x in jax.tree.leaves(constant))
    assert all(np.any(x) for x in jax.tree.leaves(trained))
    np.testing.assert_array_equal(query, same)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("field", [name for name in OTHER if name != "coupling"])
def test_each_field_is_computed_with_or_refused(field, way):
    """A new field of `Features` fails here until all of these know it."""
    features = dataclasses.replace(GIVEN, **{field: OTHER[field]})
    if field in REFUSED.get(way, {}):
        with pytest.raises((ValueError, TypeError), match=REFUSED[way][field]):
            WAYS[way](features)
        return
    want, before = (attention_weights(QUERY, KEY, x) for x in (features, GIVEN))
    if way == "analysis":
        exact = jax.nn.softmax(
            jnp.einsum("btkgh,bskh->bkgts", QUERY.reshape(2, 6, 2, 2, 8), KEY) / 8**0.5
        ).reshape(want.shape)
        size = partial(jnp.sum, axis=(-2, -1))
        want, before = (size((x - exact) ** 2) / size(exact**2) for x in (want, before))
    assert jnp.abs(want - before).max() > 1e-3
    close(WAYS[way](features), want, 1e-4 if way == "analysis" else 1e-5)


@pytest.mark.parametrize("feature_map", ["positive", "elu+1", "trigonometric"])
def test_products_in_logarithms(feature_map):
    """Of features that underflow and of factors with signs; gradients are finite."""
    rng = np.random.default_rng(0)
    a, b = 60 * rng.normal(size=(2, 3, 4, 5))
    f, g = rng.normal(size=(2, 3, 4, 5))
    if feature_map == "positive":
        f = g = None
    elif feature_map == "elu+1":
        f, g = np.maximum(f, 0), np.abs(g)
    else:
        a, b = a[..., :1], b[..., :1]
    terms = (a[:, :, None] + b[:, None]).astype(np.longdouble)
    product = 1.0 if f is None else f[:, :, None] * g[:, None]
    want = np.sum(np.exp(terms) * product, axis=-1)

    def logs(a, b):
        queries, keys = (a[:, None, None], b[:, None])
        split = [(x, None if y is None else jnp.asarray(y, jnp.float32)) for x, y in (
            (queries, None if f is None else f[:, None, None]),
            (keys, None if g is None else g[:, None]),
        )]  # fmt: skip
        return log_products(*split)

    a, b = (jnp.asarray(x, jnp.float32) for x in (a, b))
    size, sign = logs(a, b)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(size[:, 0, 0], np.log(abs(want)), rtol=1e-5, atol=1e-4)
    if sign is not None:
        np.testing.assert_array_equal(sign[:, 0, 0], np.sign(want))
    gradient = jax.grad(lambda a: jnp.sum(jnp.where(jnp.isinf(size), 0, logs(a, b)[0])))(a)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("exact", [Exact(), Exact(window=4, first=1)])
@pytest.mark.parametrize("norm", [1.0, 20.0, 50.0])
def test_the_matrix_of_any_norm_is_that_of_the_equations(norm, exact):
    """Kernels of long keys, far below the kernels of later short keys, are not floored.

    The limit is ten times the largest difference, which exponents of 3,000 have in float32.
    """
    rng = np.random.default_rng(0)
    query, key = rng.normal(size=(2, 2, 24, 2, 8))
    query, key = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (query, key))
    query, key = norm * 8**0.25 * query, norm * 8**0.25 * key * np.linspace(1, 0, 24)[:, None, None]
    query, key = (jnp.asarray(x, jnp.float32) for x in (query, key))
    features = Features.draw(jax.random.key(1), "orf", 16, 8, 2, exact=exact)
    features = features.calibrated(query, key, is_causal=True)
    fitted = features.calibration
    shifted = fitted._replace(shift=fitted.shift + 3.0)
    features = dataclasses.replace(features, calibration=shifted, coupling=None)
    got = attention_weights(query, key, features, is_causal=True)
    unit = np.broadcast_to(np.eye(24)[:, None], (2, 24, 2, 24))
    want = reference_attention(query, key, unit, features, is_causal=True)
    np.testing.assert_allclose(got, np.moveaxis(want, 2, 1), atol=5e-4)
