"""`performer.linearize` of functions as strangers write them: see `zoo`."""

import dataclasses
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import performer
from performer import Exact, calibration, couplings
from performer.linearization import costs, recipes
from performer.linearization.masks import alibi_slopes
from performer.linearization.program import Values
from tests.support import zoo
from tests.support.attention_inputs import by_op
from tests.support.tiers import tiers
from tests.support.zoo import HEAD, HEADS, LEFT, LENGTHS, LINEAR, SEGMENTS, TRIL, B, T

EXACT = dict(exact=Exact(1000), num_features=4)
"""All keys are exact: the new function is the old one."""


def named(models, core):
    """Others than the models of the core, whose ways to write attention are like theirs, later."""
    return tiers(models, core, lambda model: model.__name__)


@pytest.fixture(autouse=True)
def _nothing_to_warn_of(request):
    """Attention that stays exact warns: the tests of it say so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "attention that stays exact")
        yield


def rows_of(report):
    """Layer -> its state; of each the heads have one."""
    return {row["path"]: row["attention"] for row in report.rows}


NO_GRADIENTS = (zoo.ways, zoo.linen_layer, zoo.equinox_layer, zoo.haiku_layer, zoo.perceiver)
"""Models whose attention becomes that of others: their outputs are enough."""


def evaluate(function, arguments):
    """Outputs, and gradients of the sum of their squares in all that is a float."""
    leaves, tree = jax.tree.flatten(arguments)
    real = [
        i
        for i, x in enumerate(leaves)
        if hasattr(x, "dtype") and jnp.isdtype(x.dtype, "real floating")
    ]

    def loss(own):
        new = [own[real.index(i)] if i in real else x for i, x in enumerate(leaves)]
        outputs = function(*jax.tree.unflatten(tree, new))
        return sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(outputs)), outputs

    (_, outputs), slopes = jax.value_and_grad(loss, has_aux=True)([leaves[i] for i in real])
    return outputs, slopes


def same(new, old, tolerance):
    """Leaves agree, relative to the largest of all (at least 1)."""
    size = max(1, *(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(old)))
    for x, y in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * size)


def both(new, old, arguments, evaluate=evaluate):
    """Outputs and gradients of two functions by one program; the new one is an argument."""
    leaves, tree = jax.tree.flatten(arguments)
    arrays = [x if hasattr(x, "shape") else None for x in leaves]

    @jax.jit
    def compute(new, arrays):
        filled = [x if y is None else y for x, y in zip(leaves, arrays, strict=True)]
        own = jax.tree.unflatten(tree, filled)
        return evaluate(new, own), evaluate(old, own)

    return compute(new, arrays)


@pytest.mark.thorough
@pytest.mark.parametrize("model", LINEAR, ids=lambda model: model.__name__)
def test_with_all_keys_exact_it_is_the_same_function(model):
    """Outputs and most gradients, but for cross attention, which has no window."""
    function, batches = model()
    new, report = performer.linearize(function, batches, **EXACT)
    assert set(rows_of(report).values()) == {"linear"}
    assert len(rows_of(report)) == LINEAR[model]
    assert not report.left
    assert str(report)
    if model is zoo.encoder_decoder:
        last = list(rows_of(report))[-1]
        new, report = performer.linearize(
            function, batches, where=lambda name: name != last, **EXACT
        )
        assert report.left == {last: "not chosen by where"}
    outputs_alone = {"evaluate": lambda f, x: (f(*x), ())} if model in NO_GRADIENTS else {}
    (outputs, slopes), (old, old_slopes) = both(new, function, batches[1], **outputs_alone)
    narrow = model is zoo.bfloat16
    same(outputs, old, 0.03 if narrow else 1e-5)
    if slopes:
        same(slopes, old_slopes, 0.03 if narrow else 1e-4)


def test_what_stays_exact_is_named():
    """A kernel of another platform is named, too, though it cannot run here."""
    with pytest.warns(UserWarning, match="attention that stays exact") as caught:
        measured = performer.measure(*zoo.beside(*LEFT))
    assert len(measured.layers) == 1
    assert len(measured.left) == len(LEFT)
    for wanted in LEFT.values():
        assert [x for x in measured.left.values() if re.search(wanted, x)], wanted
    for name, reason in measured.left.items():
        assert re.fullmatch(r"zoo\.py:\d+( #\d)?", name)
        assert f"{name}: {reason}" in str(caught[0].message)
    function, batches = zoo.beside(*[x for x in LEFT if x is not zoo.foreign_function])
    with pytest.warns(UserWarning, match="attention that stays exact"):
        new, report = performer.linearize(function, batches, num_features=4)
    for name, reason in report.left.items():
        assert f"{name}: left as it is, {reason}" in str(report)
    both_of = jax.jit(lambda new, x: (new(*x), function(*x)))
    (changed, left), (before, exact) = both_of(new, batches[0])
    for x, y in zip(left, exact, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)
    assert not np.allclose(changed, before, atol=1e-3)


def test_slopes_of_alibi():
    """BLOOM has a bias of key positions: a constant for each row has no effect."""
    slopes, allowed = np.array([0.5, 0.25]), np.tri(5, dtype=bool)[None, None].repeat(2, axis=0)
    bias = np.where(allowed, slopes[:, None, None] * np.arange(5), -1e9).astype(np.float32)
    for change, holds in ((0.0, True), (0.1, False)):
        bias[1, 1, 4, 2] += change
        with jax.numpy_rank_promotion("raise"):
            found, flat = alibi_slopes(jnp.asarray(bias), jnp.asarray(allowed).repeat(2, axis=1))
        np.testing.assert_allclose(found, slopes, rtol=1e-6)
        assert flat == holds


def test_nothing_to_replace_is_an_error():
    with pytest.raises(ValueError, match="no softmax attention was found"):
        performer.linearize(lambda x: jax.nn.softmax(x @ x.T), [(jnp.ones((3, 2)),)])
    function, batches = zoo.beside(zoo.sliding_window)
    alone = lambda *x: function(*x)[1][0]  # noqa: E731
    with pytest.raises(
        ValueError, match=r"no attention can be replaced:\n  zoo\.py:\d+: its masks"
    ):
        performer.linearize(alone, batches)


@pytest.mark.parametrize("model", named([zoo.plain, zoo.cross, zoo.any_mask], [zoo.cross]))
def test_it_is_the_op_on_queries_and_keys(model):
    """Also where JAX forbids operands of different ranks."""
    function, batches = model()
    with jax.numpy_rank_promotion("allow" if model is zoo.cross else "raise"):  # its own code
        new, _ = performer.linearize(function, batches, num_features=6, exact=Exact(0))
        got = jax.jit(lambda *batches: jnp.concatenate([new(*x) for x in batches]))(*batches)
    operands = [zoo.project(x[0], *x[-2:] if model is zoo.cross else x[-1:]) for x in batches]
    query, key, value = (jnp.concatenate(x) for x in zip(*operands, strict=True))
    if model is zoo.cross:
        exists = jnp.asarray(jnp.arange(T) < LENGTHS[:, None])[:, None, None]
        exists = jnp.concatenate([exists, exists])
        pairs = jnp.broadcast_to(exists, (2 * B, 1, zoo.S, T))
        want = by_op(query, key, value, batch=B, num_features=6, pairs=pairs, mask=exists)
    else:
        want = by_op(query, key, value, batch=B, num_features=6, is_causal=True)
        want = zoo.out(batches[0][0], want)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_cross_attention_has_no_window():
    function, batches = zoo.cross()
    plain, windowed = (
        performer.linearize(function, batches, num_features=4, exact=Exact(n))[0] for n in (0, 3)
    )
    outputs = jax.jit(lambda *x: (windowed(*x), plain(*x)))(*batches[0])
    np.testing.assert_array_equal(*outputs)


CAUSAL = np.broadcast_to(TRIL, (B, T, T))
KEYS = np.broadcast_to(np.arange(T) < LENGTHS[:, None, None], (B, T, T))
DOCUMENTS, OTHERS = (
    np.equal(x[:, :, None], x[:, None]) for x in map(np.asarray, (SEGMENTS, zoo.OTHER_SEGMENTS))
)
WINDOW = CAUSAL & ~np.tri(T, k=-3, dtype=bool)


@pytest.mark.parametrize(
    ("measured", "alike", "others"),
    [
        (CAUSAL, CAUSAL & KEYS, (DOCUMENTS, CAUSAL & DOCUMENTS, WINDOW, KEYS)),
        (KEYS, KEYS[::-1], (CAUSAL, DOCUMENTS, CAUSAL & KEYS)),
        pytest.param(
            *(DOCUMENTS, OTHERS, (CAUSAL, CAUSAL & DOCUMENTS, WINDOW)), marks=pytest.mark.thorough
        ),
        pytest.param(
            *(CAUSAL & DOCUMENTS, CAUSAL & OTHERS, (DOCUMENTS, WINDOW)), marks=pytest.mark.thorough
        ),
    ],
    ids=["causal", "keys", "documents", "causal documents"],
)
def test_masks_of_the_kind_that_was_measured(measured, alike, others):
    """Another pattern of the kind works; another kind gives NaN, compiled or not."""
    function, batches = zoo.any_mask()
    params, _, x = batches[0]
    new, _ = performer.linearize(function, [(params, measured, x)], **EXACT)
    compiled = jax.jit(lambda mask: (new(params, mask, x), function(params, mask, x)))
    for mask in (measured, alike):
        np.testing.assert_allclose(*compiled(mask), atol=1e-5)
    for mask in others:
        output, exact = compiled(mask)
        wrong = jnp.any(jnp.abs(output - exact) > 1e-5, axis=-1)
        assert not wrong.any()
        assert jnp.isnan(output).any()


@pytest.mark.parametrize("by", tiers(["mask", "hidden", "scale", "heads"], ["mask", "heads"]))
def test_a_flag_that_changes_attention(by):
    """Never another finite number: it stays exact, follows the flag, or is NaN."""
    function, [(params, flag, x), *_] = zoo.switched(by)  # it is set
    beside = lambda *x: (function(*x), zoo.plain()[0](x[0], x[2]))  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        new, _ = performer.linearize(beside, [(params, flag, x)], **EXACT)
    compiled = jax.jit(lambda flag: (new(params, flag, x)[0], function(params, flag, x)))
    for state in (True, False):
        got, want = map(np.asarray, compiled(state))
        assert np.isnan(got).any() or np.max(np.abs(got - want)) < 1e-5


def test_a_step_with_a_cache_is_another_program():
    function, [(params, x), *_] = zoo.gpt()
    new, _ = performer.linearize(function, [(params, x)], num_features=4)
    _, cache = new(params, x[:, : T - 1])
    cache = tuple(jnp.pad(y, ((0, 0), (0, 1), (0, 0), (0, 0))) for y in cache)
    with pytest.raises(ValueError, match="computed differently"):
        new(params, x[:, T - 1 :], cache, jnp.int32(T - 1))


def test_training_with_dropout_is_another_program():
    function, [(params, x, _), *_] = zoo.dropout_in_training()
    new, _ = performer.linearize(function, [(params, x, False)], num_features=4)
    with pytest.raises(ValueError, match="computed differently"):
        new(params, x, True)
    with pytest.raises(ValueError, match="batch 1 runs another program than batch 0"):
        performer.linearize(function, [(params, x, False), (params, x, True)])


def test_steps_of_a_scan_have_frequencies_of_their_own():
    function, batches = zoo.scanned()
    new, report = performer.linearize(function, batches, num_features=6)
    shapes = [x.shape for x in jax.tree.leaves(new) if x.shape[-3:] == (HEADS, 6, HEAD)]
    assert shapes == [(3, HEADS, 6, HEAD)]
    (drawn,) = (x for x in jax.tree.leaves(new) if x.shape == shapes[0])
    assert jnp.min(jnp.max(jnp.abs(drawn[:2] - drawn[1:]), axis=(1, 2, 3))) > 0.1
    assert [name[-3:] for name in rows_of(report)] == ["[0]", "[1]", "[2]"]
    p = batches[0][0]
    q, k, _ = zoo.project(
        jax.tree.map(lambda y: y[0], p), jnp.concatenate([b[1][:1] for b in batches])
    )
    moments = calibration.pair_moments(q, k, is_causal=True)
    fitted = calibration.fit(moments, "full", couplings.DEFAULT)
    first = jax.tree.map(lambda y: y[:1], new.arrays)
    found = jax.tree.leaves(first, is_leaf=lambda y: hasattr(y, "frequencies"))
    (attention,) = (y for y in found if hasattr(y, "frequencies"))
    jax.tree.map(
        lambda got, want: np.testing.assert_allclose(got[0], want, atol=1e-4),
        attention.calibration,
        fitted,
    )


@pytest.mark.thorough
def test_a_tolerance_chooses_the_cheapest_sizes_of_each_place():
    """A layer of short tokens, one of long ones that no size serves, and two steps of a scan."""

    def attend(x):
        scores = jnp.einsum("bqh,bkh->bqk", x, x) / x.shape[-1] ** 0.5
        return jnp.einsum("bqk,bkh->bqh", jax.nn.softmax(scores), x)

    def function(x):
        ends = attend(0.3 * x), attend(9 * x)
        return ends, jax.lax.scan(lambda y, c: (y, attend(c * y)), x, jnp.array([0.4, 0.6]))

    def numbers(batches, **options):
        _, report = performer.linearize(function, batches, **options)
        return {row["path"].split(" ")[1]: row for row in report.rows}

    batches = [(jax.random.normal(jax.random.key(i), (4, 12, 8)),) for i in range(2)]
    rows = numbers(batches, num_features=64, tolerance=0.1)
    kinds = {"#0": "linear", "#1": "exact", "#2[0]": "linear", "#2[1]": "linear"}
    assert {name: row["attention"] for name, row in rows.items()} == kinds
    m = rows["#2[1]"]["m"]
    assert [row["m"] for row in rows.values()] == [8, 64, m, m]
    errors = [numbers(batches, num_features=x)["#2[1]"]["attention error"] for x in (m // 2, m)]
    assert errors[1] <= 0.1 < errors[0]
    assert rows["#2[1]"]["attention error"] == pytest.approx(errors[1], rel=1e-4)
    options = recipes.Options(num_features=48, tolerance=1.0, exact=Exact(keys=16))
    sizes = [(6, 0), (6, 8), (12, 0), (6, 16), (12, 8), (12, 16), (24, 0), (24, 8), (24, 16)]
    sizes += [(48, 0), (48, 8), (48, 16)]
    (layer,) = performer.measure(attend, batches).layers
    ladder = options.ladder(layer)
    assert sorted((m, exact.keys) for m, exact in ladder) == sorted(sizes)
    expected = [costs.cost(x, "cpu", is_causal=False) for x in ladder]
    assert expected == sorted(expected)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:linearize")
def test_refining_lowers_the_errors_of_the_report():
    function, ((parameters, x), *_) = zoo.plain()
    keys = jax.random.split(jax.random.key(5), 16)
    tokens = jax.vmap(lambda key: jax.random.normal(key, x.shape[1:]))(keys)
    batches = [(parameters, tokens * jnp.linspace(3, 0.2, x.shape[-1]))]
    plain, refined = (
        performer.linearize(function, batches, num_features=4, refine_steps=n)[1] for n in (0, 40)
    )
    for path, error in refined.layer_errors().items():
        assert error < 0.8 * plain.layer_errors()[path]


SPOILT = {
    "frequencies": ("refine_far", lambda far, *_, **__: far._replace(w_key=99 + far.w_key)),
    "features": ("transfer", lambda _, w, *__, **___: 99 + w),
}
"""Way of refinement -> what is spoilt of the other one."""


def test_the_way_of_refinement_with_the_lower_error_is_taken(monkeypatch):
    """Nothing is refined here: frequencies stay as drawn."""
    function, batches = zoo.plain()
    window = dict(num_features=6, exact=Exact(1))
    _, plain = performer.linearize(function, batches, **window)
    monkeypatch.setattr(recipes, "transfer", lambda _, w, *__, **___: w)
    monkeypatch.setattr(recipes, *SPOILT["frequencies"])
    _, refined = performer.linearize(function, batches, refine_steps=1, **window)
    assert refined.layer_errors() == plain.layer_errors()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "way"),
    [(zoo.plain, "frequencies"), (zoo.packed_causal, "features"), (zoo.scanned, "features")],
    ids=["plain", "packed_causal", "scanned"],
)
def test_refining_beside_a_window(model, way, monkeypatch):
    """Frequencies move, or features of far keys are learned."""
    function, batches = model()
    window = dict(num_features=6, exact=Exact(1))
    _, plain = performer.linearize(function, batches, **window)
    monkeypatch.setattr(recipes, *SPOILT[way])
    new, refined = performer.linearize(function, batches, refine_steps=60, **window)
    before, after = (np.mean(list(x.layer_errors().values())) for x in (plain, refined))
    if way == "features":  # none is worse than the window alone, but some than what is calibrated
        before = np.mean([row["uniform attention"] for row in refined.rows])
    assert after < before
    shapes = [x.shape[-3:] for x in jax.tree.leaves(new)]
    assert shapes.count((HEADS, 6, HEAD)) == 1 + (way == "features")
    outputs = jax.jit(lambda new, x: new(*x))(new, batches[0])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(outputs))


@pytest.mark.thorough
def test_the_function_is_a_tree_of_its_frequencies():
    """It works without and with `jax.jit`, and its copies do; gradients, if they are trainable."""
    function, batches = zoo.plain()
    new, _ = performer.linearize(function, batches, num_features=6)
    copy = jax.tree.map(lambda x: x + 0, new)
    arguments = batches[0]
    compiled = jax.jit(lambda f, x: f(*x))(copy, arguments)
    np.testing.assert_allclose(compiled, new(*arguments), atol=1e-6)
    is_features = lambda x: isinstance(x, performer.Features)  # noqa: E731
    trainable = jax.tree.map(
        lambda x: dataclasses.replace(x, trainable=True) if is_features(x) else x,
        new,
        is_leaf=is_features,
    )
    gradient = jax.grad(lambda f: jnp.sum(f(*arguments) ** 2))
    assert not any(x.any() for x in jax.tree.leaves(gradient(new)) if x.shape == (HEADS, 6, HEAD))
    slopes = gradient(trainable)
    (frequencies,) = (x for x in jax.tree.leaves(slopes) if x.shape == (HEADS, 6, HEAD))
    assert jnp.any(frequencies != 0)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(slopes))
    less = jax.tree.map(lambda x: x - 0.1, new)
    assert not np.allclose(less(*arguments), new(*arguments), atol=1e-3)
    np.testing.assert_allclose(
        jax.vmap(new, (None, 0))(arguments[0], arguments[1][None])[0], compiled, atol=1e-5
    )


@pytest.mark.thorough
def test_batches_of_other_lengths_are_measured_together():
    function, [(params, x), *_] = zoo.gpt()
    batches = [(params, x), (params, x[:1, :5])]
    new, report = performer.linearize(function, batches, **EXACT)
    assert not report.left
    for arguments in batches:
        same(new(*arguments), function(*arguments), 1e-5)


@pytest.mark.parametrize("causal", tiers([False, True], 1))
def test_a_mask_written_in_the_code(causal):
    """Constants: padding at the keys, alone and beside causality."""
    exists = jnp.arange(9) < jnp.array([9, 5])[:, None]
    x = jax.random.normal(jax.random.key(0), (2, 9, 2, 8))

    def attend(x, causal):
        mask = exists[:, None, None] & (jnp.tri(9, dtype=bool) if causal else True)
        scores = jnp.einsum("bqnh,bknh->bnqk", x, x)
        return jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(jnp.where(mask, scores, -1e9)), x)

    new, _ = performer.linearize(attend, [(x, causal)], exact=Exact(9))
    both = jax.jit(lambda x: (new(x, causal), attend(x, causal)))
    np.testing.assert_allclose(*both(x), atol=1e-5)
    changed = x.at[1, 5:].set(7.0)  # keys that do not exist
    new, _ = performer.linearize(attend, [(x, causal)], num_features=8)
    outputs = jax.jit(lambda *inputs: [new(x, causal)[1, :5] for x in inputs])(changed, x)
    np.testing.assert_allclose(*outputs, atol=1e-5)


def test_steps_of_a_scan_with_other_masks_stay_exact():
    x = jax.random.normal(jax.random.key(0), (2, 6, 4))
    masks = jnp.stack([jnp.tri(6, dtype=bool), jnp.arange(6)[:, None] // 3 == jnp.arange(6) // 3])

    def step(x, mask):
        scores = jnp.where(mask, jnp.einsum("bqh,bkh->bqk", x, x), -1e9)
        return jnp.einsum("bqk,bkh->bqh", jax.nn.softmax(scores), x), None

    with pytest.raises(ValueError, match="of another kind in each step of a scan"):
        performer.linearize(lambda x, masks: jax.lax.scan(step, x, masks)[0], [(x, masks)])


def test_what_was_read_is_compared_with_the_program(monkeypatch):
    """Keys in another order stand for a layout that was read wrong."""
    read = Values.operands

    def in_another_order(values, place):
        query, key, value = read(values, place)
        return query, key[:, ::-1], value

    monkeypatch.setattr(Values, "operands", in_another_order)
    x = jax.random.normal(jax.random.key(0), (2, T, 4))
    with pytest.raises(ValueError, match="is not what it computes"):
        performer.linearize(lambda x: jax.nn.softmax(x @ x.mT) @ x, [(x,)], **EXACT)
