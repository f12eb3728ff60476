"""The language model: its text, its decoder, what conversion, recall and generation do."""

import csv
from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.language_model import config as configs
from experiments.language_model import (
    conversion,
    convert,
    generation,
    pairs,
    rows,
    scratch,
    text,
    train,
)
from experiments.language_model.attention import Hybrid, Softmax
from experiments.language_model.model import rotated
from experiments.language_model.task import layers, task
from performer.calibration import calibrate
from performer.refinement import LEARNED, Far, Sample, learned_estimate, near_pairs
from vit import evaluate, loop, report, runs
from vit.config import Size, validate
from vit.task import random_streams

SIZE = Size(width=16, depth=2, num_heads=2, mlp_dim=32)
WORDS = "the quick brown fox jumps over the lazy dog; " * 40


@cache
def decoder(kind, window=4):
    dataset = text.dataset(text.numbered(WORDS), 32)
    own, near = configs.attention(kind, 8, window)
    sizes = dict(size=SIZE, steps=4, batch_size=4)
    config = configs.of_run(own, dataset, optim=configs.optim(1e-3, 4), **sizes)
    validate(config)
    learned = task(dataset.num_classes, configs.Settings(32, near, int(near > 0)))
    return learned.create(config, rngs=random_streams(0)), config, learned, dataset


def tokens(length, rows=1):
    return jnp.asarray(np.random.default_rng(0).integers(0, 20, (rows, length)), jnp.int32)


def test_windows_of_a_text():
    """Those of training lie before the last tenth, moved or not; each next one is one further."""
    numbered = text.numbered("".join(map(chr, range(1000, 2000))))
    dataset = text.dataset(numbered, 16)
    for start in dataset.train:
        for rng in (None, np.random.default_rng(start)):
            window = dataset.decode(start, rng, None, dataset)["tokens"]
            np.testing.assert_array_equal(np.diff(window), 1)
            assert start <= window[0] < start + 16
            assert window[-1] < 900
    held_out = [dataset.decode(i, None, None, dataset)["tokens"] for i in dataset.evaluation]
    assert [x[0] for x in held_out] == list(range(900, 984, 16))


def test_texts_that_cannot_be_read(tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="as UTF-8: .*decode byte"):
        text.read(str(tmp_path / "bytes"))
    with pytest.raises(ValueError, match=r"--text=.*none cannot be read .*No such file"):
        text.read(str(tmp_path / "none"))
    with pytest.raises(ValueError, match="windows of 512 need at least 5642"):
        text.dataset(text.numbered("short"), 512)
    with pytest.raises(ValueError, match="has no 'é'"):
        text.encoded("café", tuple("acf"))


def test_the_help_topics_are_a_text():
    assert len(text.read().numbers) > 10**5


def test_rotations_leave_what_depends_on_the_distance_alone():
    x, y = np.random.default_rng(0).standard_normal((2, 1, 5, 1, 8))
    first, later = (rotated(jnp.asarray(x), jnp.arange(5) + shift) for shift in (0, 7))
    third, fourth = (rotated(jnp.asarray(y), jnp.arange(5) + shift) for shift in (2, 9))
    products = (np.einsum("btnh,btnh->t", *pair) for pair in ((first, third), (later, fourth)))
    np.testing.assert_allclose(*products, atol=1e-5)
    assert not np.allclose(first[:, 1:], x[:, 1:], atol=0.1)


@pytest.mark.parametrize("kind", configs.ATTENTION)
def test_streaming_is_the_whole_text(kind):
    """In pieces of 9, 1 and 11 characters; and no logit sees a later character."""
    model, *_ = decoder(kind)
    x = tokens(21)
    whole, states, parts = model(x), model.empty(24), []
    for start, end in ((0, 9), (9, 10), (10, 21)):
        logits, states = model.stream(x[:, start:end], jnp.int32(start), states)
        parts.append(logits)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole, atol=1e-5)
    changed = model(x.at[:, 15:].set(0))
    np.testing.assert_allclose(changed[:, :15], whole[:, :15], atol=1e-5)


def test_a_window_as_long_as_the_text_is_softmax():
    model, *_ = decoder("softmax")
    far = Far.of(jax.random.normal(jax.random.key(0), (2, 6, 8)))
    new = conversion.exchanged(model, [Hybrid(far, None, 12, 1)] * 2)
    np.testing.assert_allclose(new(tokens(20)), model(tokens(20)), atol=1e-5)
    assert isinstance(model.blocks[0].attention.attention_fn, Softmax)


@pytest.mark.parametrize("window", [4, 0])
def test_a_hybrid_is_what_was_fitted(window):
    """Its rows are those of attention transfer: frequencies of queries apart from those of keys."""
    keys = jax.random.split(jax.random.key(0), 6)
    query, key = jax.random.normal(keys[0], (2, 3, 20, 2, 8))
    shapes = [(2, 5, 8), (2, 5, 8), (2, 5), (2,)]
    far = Far(*(jax.random.normal(k, shape) for k, shape in zip(keys[1:5], shapes, strict=True)))
    fitted = calibrate(query, key, method="shift+scale", coupling="orf")
    unit = jnp.broadcast_to(jnp.eye(20)[:, None], (3, 20, 2, 20))
    got = Hybrid(far, fitted, window, 1)(query, key, unit)
    near = jnp.asarray(near_pairs(20, window, 1))
    want = learned_estimate(far, (fitted, near), Sample.of(query, key), True)
    np.testing.assert_allclose(jnp.moveaxis(got, -2, -3), want, atol=2e-6)


def test_features_that_cost_loss_are_left_out():
    """Of an untrained model features raise the loss as often as they lower it."""
    model, *_ = decoder("softmax")
    x, kept = tokens(32, rows=3), []

    def loss(attention):
        return conversion.held_out_losses(conversion.exchanged(model, attention), x).mean()

    alone = loss([Hybrid(None, None, 4, 1)] * 2)
    for key in jax.random.split(jax.random.key(0), 4):
        far = Far.of(jax.random.normal(key, (2, 6, 8)))
        chosen = conversion.no_worse(model, [Hybrid(far, None, 4, 1)] * 2, x)
        kept += [bool(jnp.isfinite(layer.far["weight"][...]).all()) for layer in chosen]
        assert loss(chosen) < alone or not any(kept[-2:])
    assert {*kept} == {True, False}


def test_without_a_far_weight_it_is_the_window():
    model, *_ = decoder("softmax")
    far = Far.of(jax.random.normal(jax.random.key(0), (2, 6, 8)))
    nothing = far._replace(weight=jnp.full(2, -jnp.inf))
    x = tokens(32)
    none, some, alone = (
        conversion.exchanged(model, [Hybrid(f, None, 4, 1)] * 2)(x) for f in (nothing, far, None)
    )
    np.testing.assert_allclose(none, alone, atol=1e-6)
    assert jnp.abs(some - alone).max() > 1e-3


@pytest.mark.parametrize("method", conversion.METHODS)
def test_conversion(method):
    """All parameters but those of the attention are as they were, and the losses are numbers."""
    model, *_ = decoder("softmax")
    x = tokens(33, rows=9)
    layers = conversion.samples(model, x[:, :-1])
    assert [sample.query.shape for sample in layers] == [(9, 32, 2, 8)] * 2
    attention = conversion.hybrids(layers, 4, 6, method, steps=3)
    new = conversion.exchanged(model, attention)
    losses = conversion.held_out_losses(new, x)
    assert losses.shape == (9,)
    assert np.isfinite(losses).all()
    for name, old in nnx.to_flat_state(nnx.state(model)):
        np.testing.assert_array_equal(dict(nnx.to_flat_state(nnx.state(new)))[name], old)


def test_a_run_and_what_it_is_converted_to(tmp_path):
    """Trained, found again, converted and trained on: by the one trainer."""
    _, config, learned, dataset = decoder("softmax")
    source = tmp_path / "text"
    source.write_text(WORDS)
    config.data.dir = str(source)
    record = loop.train(config, tmp_path / "run", dataset, learned)
    found = evaluate.evaluate_run(tmp_path / "run")
    assert found["eval_loss"] == pytest.approx(record["eval_loss"], rel=1e-5)
    of = convert.subject(tmp_path / "run", 8, 4)
    assert of.run.step == 4
    row = convert.measured(of, 3, 0, 4, 6, "transfer")
    alone = convert.measured(of, 3, 0, 4, 0, "window alone")
    assert {"loss", "lost", "standard error"} < set(row)
    assert alone["heads of the window alone"] == 0
    options = {"finetune_steps": 2, "finetune_rate": 1e-3, "steps": 3, "seed": 0}
    found = convert.finetuned(of, tmp_path, options, 4, 6, "transfer")
    again = runs.restore(tmp_path / "both_4_6")
    assert again.step == 2
    assert all(layer.attention_fn.feature_map is LEARNED for layer in layers(again.model()))
    assert np.isfinite(found["loss"])
    with pytest.raises(ValueError, match="only a run with 'softmax' can be converted"):
        convert.subject(tmp_path / "both_4_6", 8, 4)
    shorter = task(dataset.num_classes, learned.settings._replace(length=16))
    with pytest.raises(ValueError, match="holds another run: settings was {'length': 32"):
        loop.train(config, tmp_path / "run", dataset, shorter)
    source.write_text(WORDS.upper())
    with pytest.raises(ValueError, match="other characters"):
        runs.restore(tmp_path / "run")


def test_heads_of_the_window_alone_are_trained_on(tmp_path, monkeypatch):
    """Weight decay made NaN of their far weight, -inf."""
    model, config, learned, dataset = decoder("softmax")
    run = SimpleNamespace(config=config, dataset=dataset, task=learned)
    silent = [Hybrid(Far.of(jnp.ones((2, 6, 8))), None, 4, 1) for _ in range(2)]
    for layer in silent:
        layer.far["weight"][...] = jnp.full(2, -jnp.inf)
    monkeypatch.setattr(convert, "hybrids", lambda *_: silent)
    options = {"finetune_steps": 2, "finetune_rate": 1e-3, "steps": 3, "seed": 0}
    of = SimpleNamespace(run=run, model=model)
    assert np.isfinite(convert.finetuned(of, tmp_path, options, 4, 6, "transfer")["loss"])


def test_a_run_begins_with_the_parameters_of_another(tmp_path, monkeypatch, capsys):
    """With other attention its features are new, and all else is taken."""
    (tmp_path / "words").write_text(WORDS)
    (tmp_path / "other").write_text(WORDS.upper())
    monkeypatch.setattr(configs, "SIZE", SIZE)
    options = dict(steps=2, batch_size=4, length=32, text=tmp_path / "words")
    train.main(tmp_path / "short", **options)
    new = dict(init_from=tmp_path / "short", attention="both", num_features=6, window=4)
    with pytest.raises(ValueError, match="has other characters than the text"):
        train.main(tmp_path / "new", **options | new | {"text": tmp_path / "other"})
    for _ in range(2):  # the second call resumes
        train.main(tmp_path / "new", **options | new)
    printed = capsys.readouterr().out
    assert printed.count("short at step 2: 19 of 27 arrays of parameters are taken") == 1
    assert runs.restore(tmp_path / "new").step == 2


def test_the_table_from_scratch_has_the_difference_to_softmax():
    losses = {"softmax": (2.0, 2.2), "both": (2.1, 2.4)}
    table = [{"attention": kind, "loss": x} for kind, pair in losses.items() for x in pair]
    softmax, both = scratch.summary(table)
    assert [list(row) for row in (softmax, both)] == [[*both]] * 2
    assert both["more than softmax"].startswith("0.1500 (")


def test_tables_grow_and_go_on(tmp_path):
    calls = []

    def measured(a, b):
        calls.append((a, b))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return {"sum": a + 0.5, "word": b * 2}

    grow = lambda asked: rows.grown(  # noqa: E731
        tmp_path / "t", asked, [(1, "x"), (2, "y"), (3, "z")], ("n", "w"), measured
    )
    with pytest.raises(KeyboardInterrupt):
        grow({"steps": 5})
    assert len(list(csv.reader((tmp_path / "t.csv").open()))) == 3
    found = grow({"steps": 5})
    assert calls == [(1, "x"), (2, "y"), (3, "z"), (3, "z")]
    assert [row["sum"] for row in found] == [1.5, 2.5, 3.5]
    some = rows.grown(tmp_path / "t", {"steps": 5}, [(3, "z")], ("n", "w"), measured)
    assert [row["n"] for row in some] == [3]
    assert sorted(row["n"] for row in rows.whole(tmp_path / "t")) == [1, 2, 3]  # nothing is lost
    with pytest.raises(ValueError, match=r"was made with \{'steps': 5\}"):
        grow({"steps": 6})


def test_the_figure_of_conversion_shows_every_loss(tmp_path, monkeypatch):
    """Losses below 0, too: a window can lose less than nothing."""
    shown = []
    monkeypatch.setattr(report, "save", lambda drawn, out: shown.extend(drawn.axes))
    losses = {(0, 16): 2.0, (0, 64): 1.0, (16, 0): 0.01, (16, 16): 0.005, (32, 0): -0.002}
    table = [
        {"window": w, "m": m, "method": "transfer" if m else "window alone", "lost": lost}
        for (w, m), lost in losses.items()
    ]
    convert.figure(table, tmp_path / "x")
    drawn = [{y for line in axis.get_lines() for y in line.get_ydata()} - {0} for axis in shown]
    assert drawn == [{2.0, 1.0}, {0.01, 0.005}, {-0.002}]
    assert all(
        low < y < high
        for axis in shown
        for low, high in [axis.get_ylim()]
        for line in axis.get_lines()
        for y in line.get_ydata()
    )


@pytest.mark.parametrize("length", [64, 512])
def test_what_is_asked_was_said_first(length):
    dataset = pairs.dataset(length, 10)
    for number in range(20):
        example = dataset.decode(number, None, None, dataset)
        seen, count = example["tokens"], pairs.PAIRS
        said = dict(zip(seen[: 2 * count : 2], seen[1 : 2 * count : 2], strict=True))
        assert len(said) == count
        asked = np.flatnonzero(example["targets"] >= 0)
        assert list(asked) == list(range(length - length // 4, length))
        assert [said[x] for x in seen[asked]] == list(example["targets"][asked])
        assert not seen[2 * count : asked[0]].any()


def test_recall_reads_each_token_with_the_one_before():
    """Tables of its own, and nothing of what comes later."""
    embed = pairs.Bigrams(pairs.CHARACTERS, 4, rngs=nnx.Rngs(0))
    x = np.array([[3, 1, 4, 1]])
    own, before = (np.asarray(table.embedding[...]) for table in (embed.own, embed.before))
    np.testing.assert_allclose(embed(x), own[x] + before[[[3, 3, 1, 4]]], atol=1e-6)


def test_accuracy_of_recall():
    """Of a model that always says the same value."""

    examples = [pairs.example(64, 0, i) for i in range(6)]
    said = int(examples[5]["targets"][-1])  # right in the example that is padding

    def model(x):
        return jnp.zeros((*x.shape, pairs.CHARACTERS)).at[..., said].set(5.0)

    batch = {k: jnp.stack([x[k] for x in examples]) for k in ("tokens", "targets")}
    mask = jnp.array([1, 1, 1, 1, 1, 0.0])
    sums = pairs.count(model, batch | {"mask": mask})
    right = np.array([np.sum(x["targets"] == said) / 16 for x in examples])
    np.testing.assert_allclose(sums["accuracy"], right[:5].sum(), rtol=1e-6)


@pytest.mark.parametrize("kind", ["softmax", "both"])
def test_the_likeliest_text(kind):
    """With temperature 0: each character is the likeliest after all before; states keep a size."""
    model, *_ = decoder(kind)
    prompt = np.asarray(tokens(7)[0])
    place = generation.begun(model, prompt, 7 + 2 * generation.PIECE, seed=0)
    steps = generation.continued(model, place, 0.0)
    (first, after), (second, _) = next(steps), next(steps)
    sizes = [[x.shape for x in jax.tree.leaves(p.states)] for p in (place, after)]
    assert sizes[0] == sizes[1]
    said = np.concatenate([prompt, first, second])
    likeliest = np.argmax(model(jnp.asarray(said[None, :-1]))[0], axis=-1)
    np.testing.assert_array_equal(said[7:], likeliest[6:])


def test_a_seed_is_a_text():
    model, *_ = decoder("both")
    prompt = np.asarray(tokens(7)[0])

    def said(seed):
        place = generation.begun(model, prompt, 50, seed)
        return next(generation.continued(model, place, 1.0))[0].tolist()

    assert said(1) == said(1)
    assert said(1) != said(2)


def test_attention_by_words():
    assert configs.attention("window", 64, 16)[1] == 16
    assert configs.attention("performer", 64, 16)[1] == 0
    with pytest.raises(ValueError, match="unknown attention 'boht'"):
        configs.attention("boht", 64, 16)
    with pytest.raises(ValueError, match="a window of at least 1, got 0"):
        configs.attention("both", 64, 0)


def test_near_pairs_are_those_of_the_window():
    """A value far away changes nothing of the window alone, one near by does."""
    query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 24, 2, 8))
    near = near_pairs(24, 5, 1) & np.tri(24, dtype=bool)
    for s in (0, 3, 9, 17):
        moved = value.at[:, s].add(1.0)
        alone = Hybrid(None, None, 5, 1)
        changed = jnp.abs(alone(query, key, moved) - alone(query, key, value)).max((0, 2, 3)) > 1e-6
        np.testing.assert_array_equal(changed, near[:, s])
