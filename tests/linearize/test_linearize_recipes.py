"""`performer.linearize` without sizes: the cheapest recipe that holds, and its warnings."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import performer
from performer import Exact
from performer.linearization import recipes
from performer.linearization.outputs import Change, Whole
from performer.linearization.recipes import TOLERANCE, Options
from performer.linearization.report import Report
from performer.linearization.timing import Time
from tests.support.tiers import tiers

B, T, H = 16, 48, 8


def attend(x, is_causal=False):
    scores = jnp.einsum("bqh,bkh->bqk", x, x) / H**0.5
    scores = jnp.where(jnp.tri(T, dtype=bool), scores, -1e9) if is_causal else scores
    return jnp.einsum("bqk,bkh->bqh", jax.nn.softmax(scores), x)


def attend_to(query, x):
    scores = jnp.einsum("bqh,bkh->bqk", query, x) / H**0.5
    return jnp.einsum("bqk,bkh->bqh", jax.nn.softmax(scores), x)


def tokens(seed=0, size=1.0):
    return size * jax.random.normal(jax.random.key(seed), (B, T, H))


def chosen(report):
    """(m, window, exact keys, exact rows) of each layer, and whether it is linear."""
    names = ("m", "window", "exact keys", "exact rows", "attention")
    return [tuple(row[name] for name in names) for row in report.rows]


@pytest.mark.parametrize(
    ("size", "is_causal", "tolerance"),
    tiers([(1.4, True, TOLERANCE), (0.6, False, TOLERANCE), (0.7, False, 0.2)], 1),
)
def test_the_first_recipe_within_the_tolerance_is_taken(size, is_causal, tolerance):
    """In the order of its cost: the cheaper ones with the same arguments are not within it."""
    function, x = (lambda x: attend(x, is_causal)), tokens(size=size)
    measured = performer.measure(function, [(x,)])
    given = {} if tolerance == TOLERANCE else {"tolerance": tolerance}
    _, report = performer.linearize(function, [], measured=measured, **given)
    ((*sizes, kind),) = chosen(report)
    ladder = sorted(Options().ladder(measured.layers[0]), key=lambda x: x.cost(is_causal))
    assert kind == "linear"
    for recipe in ladder:
        window, first, keys, _ = recipe.exact
        exact = Exact(window, first, keys, sizes[3])
        pinned = dict(exact=exact, num_features=recipe.num_features)
        _, one = performer.linearize(function, [], measured=measured, **pinned)
        (error,) = one.layer_errors().values()
        if [recipe.num_features, window, keys] == sizes[:3]:
            break
        assert error > tolerance
    assert error == pytest.approx(*report.layer_errors().values())
    assert error <= tolerance
    assert np.log2(report.rows[0]["cost"] / ladder[0].cost(is_causal)) > (0.5 if size > 0.6 else -1)


def test_a_cheap_window_is_found_where_dearer_recipes_are_worse(monkeypatch):
    """Errors need not fall with the cost: here features, however many, add an error of 1."""

    def calibrated(*args, inner=recipes._calibrated):
        drawn = inner(*args)
        return drawn._replace(error=drawn.error + min(drawn.recipe.num_features, 1))

    monkeypatch.setattr(recipes, "_calibrated", calibrated)
    angles = 0.4 * jnp.arange(T)[:, None] * (1 + jnp.arange(H // 2))
    x = 4 * jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1) + 0.1 * tokens()
    _, report = performer.linearize(lambda x: attend(x, is_causal=True), [(x,)])
    ((m, window, *_, kind),) = chosen(report)
    assert (m, window, kind) == (0, 16, "linear")


@pytest.mark.filterwarnings("ignore:linearize")
def test_a_first_query_that_differs_is_exact():
    x = tokens(size=0.5)
    far = x.at[:, 0].multiply(8)  # its row has one or two large entries, the mean error is small
    for query, rows in ((x, 0), (far, 1)):
        new, report = performer.linearize(attend_to, [(query, x)])
        assert chosen(report) == [(8, 0, 0, rows, "linear")]
    want = attend_to(far, x)[:, 0]
    np.testing.assert_allclose(jax.jit(new)(far, x)[:, 0], want, atol=1e-5)


@pytest.mark.filterwarnings("ignore:linearize")
def test_refined_it_is_cheaper_or_better():
    x = jnp.concatenate([tokens(i, 1.2) * jnp.linspace(1.6, 0.2, H) for i in range(4)])
    measured = performer.measure(attend, [(x,)])
    lines = []
    reports = [
        performer.linearize(
            attend, [(x,)], measured=measured, refine_steps=steps, show=lines.append
        )[1]
        for steps in (0, 100)
    ]
    (before,), (after,) = (x.layer_errors().values() for x in reports)
    assert after < 0.6 * before
    assert reports[1].rows[0]["cost"] <= reports[0].rows[0]["cost"]
    assert all("refined" in line for line in lines)
    assert lines


@pytest.mark.filterwarnings("ignore:linearize")
@pytest.mark.parametrize("is_causal", [False, True])
def test_padding_is_neither_key_nor_query(is_causal):
    """Whatever it holds, the errors are the same."""
    exists = np.arange(6) < np.array([6, 4, 3, 2])[:, None]

    def function(x, exists):
        visible = exists[:, None] & (jnp.tri(6, dtype=bool) | (not is_causal))
        return jax.nn.softmax(jnp.where(visible, x @ x.mT, -1e9)) @ x

    x, given = tokens()[:4, :6], dict(num_features=8)
    batches = [(jnp.where(exists[..., None], x, fill), jnp.asarray(exists)) for fill in (0.0, 2.0)]
    rows = [performer.linearize(function, [batch], **given)[1].rows for batch in batches]
    np.testing.assert_equal(*rows)


def test_refining_on_batches_of_other_lengths():
    """Batches as long as the examples held out give the same as without the others."""
    step = dict(num_features=2, refine_steps=1)
    function = lambda x: jax.nn.softmax(x @ x.mT) @ x  # noqa: E731
    batches = [(tokens()[:4, :6],), (tokens()[:4, :5],)]
    measured = performer.measure(function, batches)
    rows = [
        performer.linearize(function, x, measured=measured, **step)[1].rows
        for x in (batches, batches[:1])
    ]
    np.testing.assert_equal(*rows)
    with pytest.raises(ValueError, match="refine_steps reads the batches again"):
        performer.linearize(function, [], measured=measured, **step)


def test_a_window_alone():
    """Softmax over the chunk of each query and the one before; a report of m = 0."""
    function, x = (lambda x: attend(x, is_causal=True)), tokens()
    new, report = performer.linearize(function, [(x,)], num_features=0, exact=Exact(4))
    scores = jnp.einsum("bqh,bkh->bqk", x, x) / H**0.5
    chunk, place = jnp.arange(T) // 4, jnp.arange(T)
    near = (chunk[:, None] - chunk <= 1) & (place <= place[:, None])
    want = jax.nn.softmax(jnp.where(near, scores, -jnp.inf)) @ x
    np.testing.assert_allclose(jax.jit(new)(x), want, atol=1e-5)
    assert chosen(report) == [(0, 4, 0, 0, "linear")]
    row = report.rows[0]
    assert row["attention error"] == pytest.approx(row["exact pairs alone"], rel=1e-4)
    with pytest.raises(ValueError, match="num_features=0 attends to a window alone"):
        performer.linearize(function, [(x,)], num_features=0)


def test_what_no_recipe_serves_stays_exact_with_a_warning():
    x = tokens(size=6.0)
    with pytest.warns(UserWarning, match=r"stays exact: its error is .*, the tolerance 1e-06"):
        new, report = performer.linearize(attend, [(x,)], tolerance=1e-6)
    np.testing.assert_array_equal(new(x), jax.jit(attend)(x))
    assert "no layer was replaced" in report.verdict()
    assert not report.worst()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"exact": Exact(keys=4)},
            r"has no Exact\(keys=4\): it requires attention without causality",
        ),
        ({"num_features": 4}, "worse than uniform attention .* need a window, for example"),
    ],
)
def test_a_causal_layer_is_warned_of(options, message):
    with pytest.warns(UserWarning, match=message):
        performer.linearize(lambda x: attend(x, True), [(tokens(size=3.0),)], **options)


def test_examples_that_were_fitted_too_well():
    """One example of eight is held out of eight batches; the others are the same one."""
    same, others = tokens(1, 2.0)[:1], tokens(2, 2.0)
    batches = [(jnp.concatenate([*[same] * 4, others[i : i + 1], *[same] * 3]),) for i in range(8)]
    options = dict(num_features=16, refine_steps=100)
    with pytest.warns(UserWarning, match="on held-out examples and .* on those fitted"):
        performer.linearize(attend, batches, **options)


@pytest.mark.parametrize(
    ("error", "expected"),
    [(0.05, "2% of accuracy"), (0.2, "2 to 6%"), (0.48, "18% of"), (np.nan, "18% of")],
)
def test_the_verdict(error, expected):
    """Equal answers first, what ten models lost, and without times the count."""
    row = {"path": "a", "attention": "linear", "attention error": error, "cost": 9, "keys": 8}
    rows = [row, row | {"attention": "exact", "attention error": 9.0}]
    answers, losses, costs = Report(rows, change=Change(0.01, 0.9)).verdict().splitlines()
    assert answers.startswith("90.0% of the rows of the last batch have the same largest")
    assert losses.startswith(f"mean error {error:.2g}: of ten models")
    assert expected in losses
    assert ("refine" in losses) == (expected != "2% of accuracy")
    assert costs.startswith("at 8 tokens 1 of 1 replaced layers cost more operations than exact")


def test_a_function_that_became_slower_is_named():
    row = {"path": "a", "attention": "linear", "attention error": 0.1, "cost": 9, "keys": 65}
    whole = Whole(Time(0.054, 2**20), Time(0.098, 2**21), "forward", "cpu")
    assert Report([row], whole=whole).verdict().splitlines()[-1] == (
        "0.55 times as fast at 65 tokens on this CPU (forward pass 98 ms, before 54 ms; memory"
        " 2 MiB, before 1 MiB): keep softmax attention there"
    )


def test_a_window_without_features_is_called_a_sliding_window():
    function, x = (lambda x: attend(x, is_causal=True)), tokens()
    _, report = performer.linearize(function, [(x,)], num_features=0, exact=Exact(4))
    head, line = str(report).splitlines()[:2]
    assert "window alone" in head
    assert "sliding window" in line


def test_the_change_of_the_outputs_is_reported():
    """Compare the last batch with a computation in float64; integers are no outputs."""
    first, last = tokens(0), tokens(1, 2.0)

    def function(x):
        return {"outputs": attend(x), "total": jnp.sum(x), "length": jnp.int32(T)}

    measured = performer.measure(function, [(first,), (last,)])
    for batches in ([(first,), (last,)], []):
        given = dict(num_features=8, measured=None if batches else measured)
        new, report = performer.linearize(function, batches, **given)
        before, after = (jax.jit(f)(last) for f in (function, new))
        names = ("outputs", "total")
        x, y = (
            np.concatenate([np.asarray(each[name], np.float64).ravel() for name in names])
            for each in (before, after)
        )
        np.testing.assert_allclose(report.change.relative, np.sum((y - x) ** 2) / np.sum(x**2))
        largest = [np.asarray(each["outputs"]).argmax(axis=-1) for each in (before, after)]
        assert report.change.same == np.mean(largest[0] == largest[1])
        assert 0 < report.change.same < 1


@pytest.mark.parametrize(("gap", "sensitive"), [(0.01, True), (10.0, False)])
def test_a_model_that_is_sensitive_to_its_attention_is_named(gap, sensitive):
    """The same attention, errors within the tolerance; two classes are near each other, or not."""

    def classes(x):
        y = attend(x).mean(axis=2, keepdims=True)
        return jnp.concatenate([y, y.mean() + gap * jnp.sign(y - y.mean())], axis=-1)

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        _, report = performer.linearize(classes, [(tokens(size=0.3),)])
    assert report.linear
    assert report.mean_error < TOLERANCE
    assert report.is_sensitive == sensitive == any("sensitive" in str(x.message) for x in warned)
    assert ("sensitive" in report.verdict()) == sensitive
