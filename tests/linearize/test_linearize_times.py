"""`performer.linearize` by times: planted tables, and what the real ones are made of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import performer
from performer import Exact
from performer.linearization import costs, recipes, timing
from performer.linearization.costs import Cost
from performer.linearization.measure import program_of
from performer.linearization.program import Alone, named
from performer.linearization.report import Recipe
from performer.linearization.timing import Compiled, Table, Time
from tests.linearize.conftest import Planted

T, H = 40, 8


def attend(x):
    scores = jnp.einsum("bqh,bkh->bqk", x, x) / H**0.5
    return jnp.einsum("bqk,bkh->bqh", jax.nn.softmax(scores), x)


def tokens(size=0.3):
    return size * jax.random.normal(jax.random.key(0), (16, T, H))


def sizes(report):
    row = report.rows[0]
    return row["m"], row["exact keys"], row["attention"]


def plant(monkeypatch, seconds, exact=1.0):
    """Plants a table: (number of features, exact keys) -> seconds."""

    class Own(Planted):
        def time(self, features):
            return Time(seconds(int(features.num_features), features.exact.keys), 2**20)

    monkeypatch.setattr(recipes, "table", lambda *_, **__: Own(exact))


def test_the_fastest_recipe_within_the_tolerance_is_taken(monkeypatch):
    """By counts 8 features are the cheapest; here more features and keys are faster."""
    measured = performer.measure(attend, [(tokens(),)])
    _, report = performer.linearize(attend, [], measured=measured)
    assert sizes(report) == (8, 0, "linear")
    plant(monkeypatch, lambda m, keys: 1 / (m + keys))
    _, report = performer.linearize(attend, [], measured=measured)
    assert sizes(report) == (32, 32, "linear")
    _, report = performer.linearize(attend, [], measured=measured, time=None)
    assert sizes(report) == (8, 0, "linear")
    assert "speed-up" not in report.rows[0]


def test_of_recipes_that_are_as_fast_the_most_accurate_is_taken(monkeypatch):
    """Times that differ by 5% are equal; refined, the first one within the tolerance is taken."""
    measured = performer.measure(attend, [(tokens(),)])
    fast = {(8, 0): 0.2, (16, 0): 0.207, (16, 16): 0.209, (32, 32): 0.22}
    plant(monkeypatch, lambda m, keys: fast.get((m, keys), 0.5))
    _, report = performer.linearize(attend, [], measured=measured)
    assert sizes(report) == (16, 16, "linear")
    _, report = performer.linearize(attend, [(tokens(),)], measured=measured, refine_steps=1)
    assert sizes(report) == (8, 0, "linear")


def test_a_layer_stays_exact_where_no_recipe_is_faster(monkeypatch):
    """With its reason; a tolerance or sizes overrule. Recipes that are faster are taken."""
    measured = performer.measure(attend, [(tokens(),)])
    plant(monkeypatch, lambda m, keys: 1.3 if m == 16 else 1.4)
    reason = f"stays exact: the fastest recipe takes 1.30 times the time of .* at {T} tokens"
    with pytest.warns(UserWarning, match=reason):
        new, report = performer.linearize(attend, [], measured=measured)
    assert sizes(report) == (16, 0, "exact")
    np.testing.assert_array_equal(new(tokens()), jax.jit(attend)(tokens()))
    assert f"at {T} tokens the fastest replacement" in report.verdict()
    for given in (dict(tolerance=0.1), dict(num_features=8), dict(exact=Exact(keys=2))):
        _, report = performer.linearize(attend, [], measured=measured, **given)
        assert sizes(report)[-1] == "linear"
    plant(monkeypatch, lambda m, keys: 0.98 if m == 8 else 0.9 if (m, keys) == (32, 16) else 1.1)
    _, report = performer.linearize(attend, [], measured=measured)
    assert sizes(report) == (32, 16, "linear")  # 2% is no difference


def test_recipes_are_not_timed_that_are_larger_than_a_slow_one(monkeypatch):
    timed = []

    def seconds(m, keys):
        timed.append((m, keys))
        return 2.0 if m > 8 or keys else 1.1

    plant(monkeypatch, seconds)
    with pytest.warns(UserWarning, match="stays exact"):
        performer.linearize(attend, [(tokens(),)])
    assert set(timed) == {(8, 0), (16, 0), (8, 16)}


def test_the_report_has_times(monkeypatch):
    """Of each layer, and of the whole function with its memory."""
    plant(monkeypatch, lambda m, keys: 0.25, exact=1.0)
    _, report = performer.linearize(attend, [(tokens(),)])
    row = report.rows[0]
    assert [row[x] for x in ("exact, ms", "replacement, ms", "speed-up")] == [1e3, 250, 4]
    head, line = str(report).splitlines()[:2]
    assert "exact, ms replacement, ms speed-up error" in head
    assert "cost" not in head
    assert " 1,000             250        4 " in line
    before, after = report.whole.before, report.whole.after
    assert before.memory > 0 < after.memory
    last = str(report).splitlines()[-1]
    assert f"{before.seconds / after.seconds:.2g} times as fast at {T} tokens on this CPU" in last
    assert "MiB" in last


def test_layers_of_one_shape_share_a_table(monkeypatch):
    """Two layers of one length, one of another, and one with another softmax: three tables."""
    monkeypatch.undo()  # the table of conftest
    compiled = []

    def counted(function, arguments):
        compiled.append(arguments)
        return Compiled(print, (), 0)

    monkeypatch.setattr(timing, "compiled", counted)
    monkeypatch.setattr(
        timing, "race", lambda *x, **_: [Time(0.01 * (1 + i), 0) for i, _ in enumerate(x)]
    )
    monkeypatch.setattr(timing, "TABLES", {})

    def function(x):
        y = attend(attend(x))
        short = attend(y[:, : T // 2])
        scores = jnp.einsum("bqh,bkh->bqk", y, y)
        scores = jnp.where(jnp.tri(T, dtype=bool), scores, -jnp.inf)
        return short, jnp.einsum("bqk,bkh->bqh", jax.nn.softmax(scores), y)

    program, *_ = program_of(function, (tokens(),))
    tables = [timing.table(each, "forward") for each in named(program)]
    assert tables[0] is tables[1]
    assert len({id(x) for x in tables}) == len(compiled) == 3
    features = performer.Features(jnp.ones((1, 8, H)))
    times = [tables[0].time(features) for _ in range(2)]
    assert [x.seconds for x in times] == [0.02 / timing.REPEATS] * 2
    assert len(compiled) == 4
    assert timing.table(named(program)[0], "train") is not tables[0]


def test_exact_attention_is_timed_as_the_program_computes_it():
    """The operations from queries, keys, values and the mask's argument; nothing around them."""
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 6, H)), rng.normal(size=(H, 2 * H + 5))
    exists = np.arange(6) < np.array([6, 4])[:, None]

    def function(w, x, exists):
        query, key, value = jnp.split(jnp.tanh(x @ w), (H, 2 * H), axis=-1)
        scores = query @ key.mT / H**0.5 + jnp.where(exists, 0.0, -1e9)[:, None]
        return jnp.cos(jax.nn.softmax(scores) @ value)

    program, *_ = program_of(function, (w, x, exists))
    (place,) = named(program)
    alone = Alone.of(place.program, place.place)
    query, key, value = np.split(np.tanh(x @ w), (H, 2 * H), axis=-1)
    entering = {x.shape: x for x in (query, key.mT, value, exists)}
    assert {x.shape for x in alone.shapes} == set(entering)
    given = [entering[x.shape] for x in alone.shapes]
    weights = np.exp(query @ key.mT / H**0.5) * exists[:, None]
    want = (weights / weights.sum(axis=-1, keepdims=True)) @ value
    np.testing.assert_allclose(alone.attend(*given), want, atol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_table_times_the_attention_that_replaces_a_layer(is_causal):
    """A real one, forward and backward; a mask, and a window of causal attention."""
    kind = "causal" if is_causal else "of keys"
    program, *_ = program_of(attend, (tokens(),))
    (place,) = named(program)
    table = timing.table(place, "train", kind=kind, masked=True)
    exact = Exact(4, 1) if is_causal else Exact(keys=2)
    for m in (0, 8) if is_causal else (8,):
        frequencies = jnp.ones((1, m, H)) if m else None
        time = table.time(performer.Features(frequencies, exact=exact))
        assert time.seconds > 0 < time.memory
    assert isinstance(table, Table)


@pytest.mark.parametrize("is_causal", [False, True])
def test_for_another_platform_recipes_have_the_order_of_their_costs(monkeypatch, is_causal):
    """Nothing is timed; coefficients that are planted decide."""

    def masked(x):
        scores = jnp.einsum("bqh,bkh->bqk", x, x) / H**0.5
        scores = jnp.where(jnp.tri(T, dtype=bool), scores, -jnp.inf) if is_causal else scores
        return jnp.einsum("bqk,bkh->bqh", jax.nn.softmax(scores), x)

    measured = performer.measure(masked, [(tokens(),)])
    monkeypatch.setattr(recipes, "table", None)
    dear = Cost(9, 1, 0, 0, 0)  # features cost, pairs nothing; and the other way round
    monkeypatch.setitem(costs.COSTS, "tpu", (dear, dear))
    free = Cost(0, 0, 0, 5, 1)
    monkeypatch.setitem(costs.COSTS, "cpu", (free, free))
    for time, alone in (("tpu", not is_causal), ("cpu", True), (None, True)):
        ladder = recipes.Options(time=time).ladder(measured.layers[0])
        expected = [costs.cost(x, time or "cpu", is_causal) for x in ladder]
        assert expected == sorted(expected)
        assert (ladder[0].num_features > 0) == alone
        _, report = performer.linearize(masked, [], measured=measured, time=time)
        assert sizes(report)[2] == "linear"
        assert "speed-up" not in report.rows[0]
        assert report.whole is None


def test_times_are_checked():
    names = "'forward', 'train', 'cpu', 'gpu', 'tpu', None"
    with pytest.raises(ValueError, match=f"time must be one of {names}, got 'backward'"):
        performer.linearize(attend, [(tokens(),)], time="backward")
    assert Recipe(16, Exact(keys=16)).contains(Recipe(8, Exact(keys=16)))
    assert not Recipe(16, Exact(keys=8)).contains(Recipe(8, Exact(keys=16)))
