"""`performer.nnx.linearize`: every kind of layer, against the op on the queries and keys it saw."""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import performer
from performer import Exact
from performer.linearization.layers import Measured
from performer.nnx import PerformerAttention, linearize, measure
from performer.refinement import Sample, softmax_attention
from tests.support.attention_inputs import by_op
from tests.support.tiers import tiers

B, T, WIDTH, HEADS = 3, 6, 8, 2
X = np.random.default_rng(0).normal(size=(2, B, T, WIDTH)) * np.linspace(2, 0.2, WIDTH)
X = jnp.asarray(X, jnp.float32)
BATCHES = list(X)
LENGTHS = jnp.array([6, 4, 2])
EXIST = np.arange(T) < np.array([6, 4, 2])[:, None]
KEYS = jnp.asarray(EXIST[:, None, None])
CAUSAL = jnp.asarray(np.broadcast_to(np.tri(T, dtype=np.float32), (B, 1, T, T)))
PADDED = jnp.asarray((EXIST[:, :, None] & EXIST[:, None])[:, None], jnp.float32)


class Model(nnx.Module):
    """A layer of attention and what it is called with."""

    def __init__(self, **options):
        rngs = nnx.Rngs(0)
        options = dict(num_heads=HEADS, in_features=WIDTH, decode=False, rngs=rngs) | options
        self.attention = nnx.MultiHeadAttention(**options)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, x, *others, **more):
        return x + self.attention(self.norm(x), *others, **more)


def projected(model, x, others=None):
    layer, x = model.attention, model.norm(x)
    other = x if others is None else others
    query, key, value = layer.query(x), layer.key(other), layer.value(other)
    if layer.normalize_qk:
        query, key = layer.query_ln(query), layer.key_ln(key)
    return query, key, value


def by_hand(model, x, others=None, *, pairs=None, **options):
    """The output of the model from the op, calibrated on all of x; frequencies as documented."""
    x = x.reshape(-1, T, WIDTH)
    return x + model.attention.out(by_op(*projected(model, x, others), pairs=pairs, **options))


@pytest.mark.parametrize(
    "options",
    tiers(
        [
            {"num_heads": 4, "num_kv_heads": 2},
            {},
            {"normalize_qk": True},
            {"dropout_rate": 0.3, "deterministic": False},
        ],
        0,
    ),
)
def test_a_layer_is_the_op_on_its_queries_and_keys(options):
    model = Model(**options)
    new, report = linearize(model, BATCHES, num_features=16)
    assert isinstance(new.attention.attention_fn, PerformerAttention)
    got = jnp.concatenate([new(x) for x in BATCHES])
    np.testing.assert_allclose(got, by_hand(model, X), atol=1e-5)
    assert not report.left
    assert model.attention.attention_fn is nnx.dot_product_attention


@pytest.mark.thorough
@pytest.mark.parametrize("is_causal", tiers([True, False], 1))
def test_a_window(is_causal):
    """By the op; the errors of the report are those with it, and it decodes with a cache."""
    pairs = Exact(2, 1) if is_causal else Exact(2, 1, 2, 1)
    model, window = Model(), dict(exact=pairs)
    batches = [{"x": x, "is_causal": is_causal} for x in BATCHES]
    measured = measure(model, batches)
    plain, new = (
        linearize(model, batches, num_features=16, measured=measured, **options)
        for options in ({}, window)
    )
    want = by_hand(model, X, is_causal=is_causal, **window)[:B]
    np.testing.assert_allclose(new[0](X[0], is_causal=is_causal), want, atol=1e-5)
    errors = [report.layer_errors()["attention"] for _, report in (plain, new)]
    assert errors[1] < 0.9 * errors[0]
    whole = linearize(model, batches, num_features=16, measured=measured, exact=Exact(T))[1]
    assert whole.layer_errors()["attention"] < 1e-9
    if is_causal:
        new[0].attention.init_cache((B, T, WIDTH))
        for i in range(T):
            last = new[0](X[0][:, i : i + 1], decode=True)
        np.testing.assert_allclose(last, want[:, -1:], atol=1e-5)


ALL_KEYS, PAIRS = (jnp.asarray(np.tile(x, (2, 1, 1, 1)) > 0) for x in (KEYS, PADDED))


@pytest.mark.parametrize(
    ("mask", "options"),
    [
        pytest.param(KEYS, {"pairs": PAIRS, "mask": ALL_KEYS}, marks=pytest.mark.thorough),
        pytest.param(PADDED, {"pairs": PAIRS, "mask": ALL_KEYS}, marks=pytest.mark.thorough),
        pytest.param(CAUSAL, {"is_causal": True}, marks=pytest.mark.thorough),
        (nnx.combine_masks(CAUSAL, PADDED), {"is_causal": True, "pairs": PAIRS, "mask": ALL_KEYS}),
    ],
    ids=["keys", "pairs of padding", "causal", "causal and padding"],
)
def test_masks_are_known_by_their_values(mask, options):
    """Rows of padding are compared no more than softmax attention defines them."""
    model = Model()
    batches = [{"x": x, "mask": mask} for x in BATCHES]
    new, report = linearize(model, batches, num_features=16)
    assert not report.left
    want = by_hand(model, X, **options)
    compiled = nnx.jit(lambda model, x, mask: model(x, mask=mask))
    got = jnp.concatenate([compiled(new, x, mask) for x in BATCHES])
    exists = jnp.concatenate([KEYS, KEYS])[:, 0, 0] if "mask" in options else jnp.ones((6, T), bool)
    np.testing.assert_allclose(got[exists], want[exists], atol=1e-5)


class Bare(nnx.Module):
    """A module of a user's own."""

    def __init__(self, attend):
        self.project = nnx.Linear(WIDTH, 3 * WIDTH, rngs=nnx.Rngs(0))
        self.attend = attend

    def __call__(self, x, **options):
        query, key, value = jnp.split(self.project(x).reshape(B, T, HEADS, -1), 3, axis=-1)
        return self.attend(query, key, value, **options).reshape(B, T, WIDTH)


@pytest.mark.parametrize(
    ("attend", "options", "same"),
    [
        pytest.param(nnx.dot_product_attention, {}, {}, marks=pytest.mark.thorough),
        (jax.nn.dot_product_attention, {"scale": 0.2}, {"scale": 0.2}),
        (
            jax.nn.dot_product_attention,
            {"key_value_seq_lengths": LENGTHS},
            {"pairs": PAIRS, "mask": ALL_KEYS},
        ),
        (partial(jax.nn.dot_product_attention, is_causal=True), {}, {"is_causal": True}),
    ],
    ids=["nnx", "scale", "lengths", "partial"],
)
def test_a_function_of_a_users_own_module(attend, options, same):
    model = Bare(attend)
    call = lambda model, x: model(x, **options)  # noqa: E731
    new, report = linearize(model, BATCHES, num_features=16, call=call)
    assert not report.left
    assert report.rows[0]["path"] == "attend"
    query, key, value = jnp.split(model.project(X).reshape(2 * B, T, HEADS, -1), 3, axis=-1)
    want = by_op(query, key, value, **same)
    got = jnp.concatenate([call(new, x) for x in BATCHES])
    np.testing.assert_allclose(got, want.reshape(2 * B, T, WIDTH), atol=1.5e-5)


class Stack(nnx.Module):
    """Layers under remat, one of which is used twice."""

    def __init__(self, depth=3):
        self.blocks = nnx.List([Model() for _ in range(depth)])

    def __call__(self, x):
        for i in (2, 0, 1, 1):
            x = nnx.remat(Model.__call__)(self.blocks[i], x)
        return x


def test_order_keep_and_where():
    """In the order of calls; the worst stay exact; a shared layer is measured at all its calls."""
    model = Stack()
    new, report = linearize(model, BATCHES, num_features=8, keep=1)
    errors = report.layer_errors()
    assert list(errors) == [f"blocks.{i}.attention" for i in (2, 0, 1)]
    worst = max(errors, key=errors.get)
    assert {r["path"] for r in report.rows if r["attention"] == "exact"} == {worst}
    for i, block in enumerate(new.blocks):
        exact = block.attention.attention_fn is nnx.dot_product_attention
        assert exact == (worst == f"blocks.{i}.attention")
    _, report = linearize(model, BATCHES, num_features=8, where=lambda path: "1" in path)
    assert list(report.layer_errors()) == ["blocks.1.attention"]
    assert report.left == {f"blocks.{i}.attention": "not chosen by where" for i in (0, 2)}
    with pytest.raises(ValueError, match="keep must not be negative, got -1"):
        linearize(model, BATCHES, keep=-1)


def test_sizes_of_each_layer_give_the_structure_again():
    """A checkpoint of the new model is restored; a layer without a recipe stays exact."""
    model = Stack()
    given = {"blocks.2.attention": (4, Exact(keys=2, rows=1)), "blocks.1.attention": (6, Exact())}
    new, report = linearize(model, BATCHES, recipes=given, seed=1)
    sizes = [(row["layer"], row["m"], row["exact keys"], row["exact rows"]) for row in report.rows]
    assert set(sizes) == {(0, 4, 2, 1), (2, 6, 0, 0)}
    assert report.recipes == given
    assert report.left == {"blocks.0.attention": "it has no recipe"}
    assert new.blocks[0].attention.attention_fn is nnx.dot_product_attention
    again, _ = linearize(model, BATCHES[:1], recipes=report.recipes, time=None)
    different = again(X[0]) - new(X[0])
    assert jnp.max(jnp.abs(different)) > 1e-3
    nnx.update(again, nnx.state(new))
    np.testing.assert_array_equal(again(X[0]), new(X[0]))


def test_recipes_that_do_not_fit_are_errors():
    refused = partial(linearize, Model(), BATCHES)
    with pytest.raises(ValueError, match="no layer 'attn': choose from attention"):
        refused(recipes={"attn": (4, Exact())})
    with pytest.raises(ValueError, match="num_features must not be negative, got -4"):
        refused(recipes={"attention": (-4, Exact())})
    for name, value in dict(num_features=4, exact=Exact(), tolerance=0.1).items():
        with pytest.raises(ValueError, match="leave out num_features, exact and tolerance"):
            refused(recipes={}, **{name: value})

    def step(x, _):
        return x + jax.nn.dot_product_attention(x, x, x), None

    line = f"test_linearize.py:{step.__code__.co_firstlineno + 1}"
    scanned = partial(jax.lax.scan, step, xs=None, length=2)
    one, two = (4, Exact()), (6, Exact())
    with pytest.raises(ValueError, match="recipes must be the same for all steps of a scan"):
        performer.linearize(
            scanned, [(X[0][:, :, None],)], recipes={f"{line}[0]": one, f"{line}[1]": two}
        )


@pytest.mark.parametrize("front", [linearize, performer.linearize])
def test_where_after_the_measurement_is_an_error(front):
    """It was ignored: all measured layers were replaced."""
    measured = Measured([], {}, [], (), tuple)
    with pytest.raises(ValueError, match="pass it to measure"):
        front(Model(), BATCHES, measured=measured, where=lambda path: "1" in path)


def test_the_measurement_of_another_model_is_an_error():
    """It was a KeyError, or attention of other sizes."""
    measured = measure(Model(), BATCHES)
    for other in (Stack(1), Model(num_heads=4)):
        with pytest.raises(ValueError, match="measured is of another model: .* has the shape"):
            linearize(other, BATCHES, measured=measured, num_features=8)


def test_what_cannot_be_taken_is_named_and_left():
    scale = jnp.linspace(-1, 1, T)
    arbitrary = jax.random.bernoulli(jax.random.key(3), 0.7, (B, 1, T, T)) | jnp.eye(T, dtype=bool)
    bare = nnx.dot_product_attention

    def why(model, call=None):
        with warnings.catch_warnings(record=True) as warned:
            new, report = linearize(model, BATCHES, num_features=8, call=call)
        assert not report.rows
        for path, reason in report.left.items():
            message = "".join(str(each.message) for each in warned)
            assert reason == "linear already" or f"  {path}: {reason}" in message
        before, after = (
            m(BATCHES[0]) if call is None else call(m, BATCHES[0]) for m in (model, new)
        )
        np.testing.assert_array_equal(before, after)
        assert " ".join(report.left) in str(report)
        return " ".join(report.left.values())

    assert "a bias" in why(Bare(bare), lambda m, x: m(x, bias=scale))
    assert "neither of keys, nor causal" in why(Model(), lambda m, x: m(x, mask=arbitrary))
    dropped = lambda m, x: m(x, dropout_rate=0.5, dropout_rng=jax.random.key(0))  # noqa: E731
    assert "changed after the softmax, as by dropout" in why(Bare(bare), dropped)
    local = lambda m, x: m(x, local_window_size=2)  # noqa: E731
    assert "a local window" in why(Bare(jax.nn.dot_product_attention), local)
    mine = Model(attention_fn=lambda query, key, value, **_: value)
    assert "its attention_fn is <lambda>" in why(mine)
    already, _ = linearize(Model(), BATCHES, num_features=8)
    assert "linear already" in why(already)


class ByName(Model):
    """Attention that is called by its name, beside a layer that the model holds."""

    def __call__(self, x):
        x = super().__call__(x)
        heads = x.reshape(B, T, HEADS, -1)
        return x + jax.nn.dot_product_attention(heads, heads, heads).reshape(x.shape)


def test_attention_that_no_attribute_holds_is_named():
    with pytest.warns(UserWarning, match=r"test_linearize.py:\d+: no layer that the model holds"):
        _, report = linearize(ByName(), BATCHES, num_features=8)
    assert list(report.layer_errors()) == ["attention"]
    with pytest.raises(ValueError, match="no softmax attention was found"):
        linearize(nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)), BATCHES, num_features=8)


def test_a_layer_with_a_call_that_cannot_be_replaced_stays_exact():
    model = Model()

    def call(model, x):
        return jax.lax.cond(x.sum() > 0, model, lambda x: x, model(x))

    with pytest.warns(UserWarning, match="attention: inside cond"):
        new, report = linearize(model, BATCHES, num_features=8, call=call)
    assert not report.rows
    assert new.attention.attention_fn is nnx.dot_product_attention


@pytest.mark.thorough
def test_layers_in_a_stack_or_not_called_are_left():
    @nnx.split_rngs(splits=2)
    @nnx.vmap
    def stack(rngs):
        return nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)

    model = Model()
    model.stack, model.spare = stack(nnx.Rngs(0)), Model()
    _, report = linearize(model, BATCHES[:1], num_features=8)
    assert list(report.layer_errors()) == ["attention"]
    assert report.left["spare.attention"] == "not called"
    assert "nnx.vmap" in report.left["stack"]


def test_a_mask_of_another_kind_later_is_an_error():
    batches = [{"x": x, "mask": CAUSAL} for x in BATCHES]
    new, _ = linearize(Model(), batches, num_features=8)
    with pytest.raises(ValueError, match="were causal when it was measured"):
        new(X[0], mask=PADDED)
    compiled = nnx.jit(lambda model, mask: model(X[0], mask=mask))
    assert np.isnan(compiled(new, PADDED)).all()
    np.testing.assert_allclose(compiled(new, CAUSAL), new(X[0], mask=CAUSAL), atol=4e-6)


@pytest.mark.thorough
def test_a_replaced_layer_with_dropout_trains():
    """Its attention dropout is off, in the copy alone."""
    model = Model(dropout_rate=0.1)
    new, _ = linearize(model, BATCHES, num_features=8)
    evaluated = new(X[0])
    new.train()
    np.testing.assert_array_equal(new(X[0]), evaluated)
    assert (model.attention.dropout_rate, new.attention.dropout_rate) == (0.1, 0.0)


def test_the_original_and_its_arrays_stay():
    model = Model()
    before = jax.tree.map(np.array, nnx.state(model))
    graph = nnx.graphdef(model)
    linearize(model, BATCHES, num_features=8, refine_steps=2)
    jax.tree.map(np.testing.assert_array_equal, before, nnx.state(model))
    assert nnx.graphdef(model) == graph


def test_the_report(tmp_path):
    model = Model()
    _, report = linearize(model, BATCHES, num_features=16)
    held_out = X[:, B // 2]  # one example of each batch
    query, key, _ = projected(model, held_out)
    exact = softmax_attention(Sample.of(query, key))
    row = report.rows[1]
    assert row["uniform attention"] == pytest.approx(
        float(jnp.sum((1 / T - exact[:, 1]) ** 2) / jnp.sum(exact[:, 1] ** 2)), rel=1e-5
    )
    entropy = -jnp.mean(jnp.sum(exact[:, 1] * jnp.log(exact[:, 1]), axis=-1))
    assert row["keys attended to"] == pytest.approx(float(jnp.exp(entropy)), rel=1e-5)
    assert row["|q|^2"] == pytest.approx(
        float(jnp.mean(jnp.sum(query[:, :, 1] ** 2, axis=-1)) / 4**0.5), rel=1e-5
    )
    report.to_csv(tmp_path / "report.csv")
    lines = (tmp_path / "report.csv").read_text().splitlines()
    sizes = "m,window,first,exact keys,exact rows,cost,keys"
    times = '"exact, ms","replacement, ms",speed-up'
    assert lines[0].startswith(f"path,layer,head,attention,{sizes},{times},attention error")
    assert len(lines) == 1 + HEADS
    assert "worst heads: attention head" in str(report)


class Twice(nnx.Module):
    """A layer that is called with a mask, then without one."""

    def __init__(self):
        options = dict(num_heads=HEADS, in_features=WIDTH, decode=False)
        self.attention = nnx.MultiHeadAttention(**options, rngs=nnx.Rngs(0))

    def __call__(self, x, mask):
        return self.attention(self.attention(x, mask=mask))


def test_a_mask_of_an_earlier_call_is_read():
    """The last call decided that there are none: a compiled program then refused the mask."""
    new, report = linearize(Twice(), [(x, PADDED) for x in BATCHES], num_features=16)
    assert not report.left
    compiled = nnx.jit(lambda model, x, mask: model(x, mask))
    got = compiled(new, X[0], PADDED)
    mask = KEYS  # the same keys, not as pairs
    exists = EXIST[..., None] * np.ones(WIDTH)
    np.testing.assert_allclose(got * exists, new(X[0], mask) * exists, atol=1e-5)
