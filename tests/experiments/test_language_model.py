"""The language model: its text, its decoder, conversion and generate."""

import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.language_model import converted, generate, text
from experiments.language_model.model import cross_entropies, losses
from experiments.language_model.task import Config, Data, Model, layers, task
from performer.nnx import PerformerAttention
from tests.support import commands
from tests.support.small import read_csv, small_config
from tests.support.tiers import tiers
from vit import compare, convert, evaluate
from vit.config import Attention, Block, Optimizer, bundled, of_run, save, validate, with_values
from vit.reports import metrics
from vit.run import loop, runs
from vit.task import random_streams
from vit.weights import transfer
from vit.weights.conversion import Case, linearized

WORDS = "the quick brown fox jumps over the lazy dog; " * 40
ATTENTION = {
    "softmax": Attention("softmax"),
    "performer": Attention(num_features=8),
    "window": Attention(num_features=0, exact_window=4),
    "both": Attention(num_features=8, exact_window=4),
}


def settings(kind, depth=2, **data):
    return Config(
        model=Model(width=16, depth=depth, num_heads=2, mlp_dim=32),
        attention=ATTENTION[kind],
        data=Data(**{"length": 32, "batch_size": 4} | data),
        optim=Optimizer(learning_rate=1e-3, warmup_steps=0),
        num_epochs=0.08,
        log_every=1,
        eval_every=4,
        checkpoint_every=4,
    )


@cache
def decoder(kind, depth=2):
    dataset = text.dataset(text.numbered(WORDS), 32)
    config = settings(kind, depth)
    validate(config)
    learned = task(dataset.num_classes)
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


def test_the_shortest_text_is_named():
    with pytest.raises(ValueError, match="165 characters: windows of 16 need at least 166;"):
        text.dataset(text.numbered("a" * 165), 16)
    shortest = text.dataset(text.numbered("a" * 166), 16)
    assert len(shortest.evaluation) == 1


@pytest.mark.parametrize("kind", tiers([*ATTENTION][::-1], 1))
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


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "steps", "m", "window"),
    [("full", 0, 6, 0), ("shift+scale", 3, 6, 4), ("none", 0, 0, 4), ("none", 0, 0, 32)],
)
def test_conversion(method, steps, m, window):
    """All parameters but those of attention are as they were; losses are of the next character.

    A window as long as the text is softmax attention.
    """
    model, config, learned, _ = decoder("softmax")
    batch = {"tokens": tokens(33, rows=9), "mask": jnp.ones(9)}
    replaced = linearized(learned, config, model, [batch])
    block = Block(num_features=m, calibration=method, exact_window=window)
    new, report = replaced(Case("orf-antithetic", block, steps))
    assert len(report.linear) == 2 * 2
    sizes = [(x.attention_fn.num_features, x.attention_fn.exact) for x in layers(new)]
    assert sizes == [(m, (window, int(window > 0), 0, 0))] * 2
    found = losses(new, batch)
    if window == 32:
        np.testing.assert_allclose(found, losses(model, batch), rtol=1e-5)
    logits = np.asarray(new(batch["tokens"][:, :-1]), np.float64)
    chosen = np.take_along_axis(logits, np.asarray(batch["tokens"])[:, 1:, None], axis=-1)
    of_next = (np.log(np.sum(np.exp(logits), axis=-1, keepdims=True)) - chosen)[..., 0]
    np.testing.assert_allclose(found, of_next.mean(axis=1), rtol=1e-5)
    sums = learned.count(new, batch | {"mask": jnp.arange(9) < 5})
    late = cross_entropies(new, batch)[:5, 16:]
    np.testing.assert_allclose(sums["loss_second_half"], late.sum() / 16, rtol=1e-5)
    for name, old in nnx.to_flat_state(nnx.state(model)):
        np.testing.assert_array_equal(dict(nnx.to_flat_state(nnx.state(new)))[name], old)


@pytest.mark.thorough
def test_a_run_and_what_it_is_converted_to(tmp_path):
    """Trained, found again, converted and trained on: by the one trainer and the one conversion."""
    source, out = tmp_path / "text", tmp_path / "converted"
    source.write_text(WORDS)
    config = settings("softmax", depth=1, text=str(source))
    record = loop.train(config, tmp_path / "run")
    found = evaluate.evaluate_run(tmp_path / "run")
    assert found["eval_loss"] == pytest.approx(record["eval_loss"], rel=1e-5)
    convert.convert(
        tmp_path / "run",
        out,
        coupling=["orf-antithetic"],
        calibration="shift+scale",
        num_features=[6],
        refine_steps=3,
        exact_window=[4],
        draws=2,
        images=8,
        num_epochs=1,
    )
    rows = read_csv(out / "conversion.csv")
    refined = "shift+scale, refined"
    assert [(r["coupling"], r["calibration"], r["window"]) for r in rows] == [
        *(("softmax", "", "0"), ("uniform", "", "0"), ("window alone", "", "4")),
        *(("orf-antithetic", method, "4") for method in ("none", "shift+scale", refined)),
    ]
    assert float(rows[0]["loss"]) == pytest.approx(record["eval_loss"], rel=1e-5)
    late = float(rows[0]["loss_second_half"])
    assert late == pytest.approx(found["eval_loss_second_half"], rel=1e-5)
    errors = [float(row["attention error"]) for row in rows]
    assert errors[0] == 0 < min(errors[1:])
    assert isinstance(layers(runs.restore(out).model())[0].attention_fn, PerformerAttention)
    again = evaluate.evaluate_run(out)
    assert again["step"] == 0
    converted.main([str(tmp_path / "run"), str(out)], after=40, repeats=2, out=tmp_path)
    exact, new = read_csv(tmp_path / "converted.csv")
    for row, whole in ((exact, found), (new, again)):
        assert float(row["loss"]) == pytest.approx(whole["eval_loss"], rel=1e-5)
        assert float(row["second half"]) == pytest.approx(whole["eval_loss_second_half"], rel=1e-5)
    lost = again["eval_loss"] - found["eval_loss"]
    assert float(new["loss, lost"]) == pytest.approx(lost, abs=1e-5)
    assert (float(exact["loss, lost"]), float(exact["forward, times as fast"])) == (0, 1)
    keys = 2 * (40 + 9 * generate.PIECE) * 16 * 4  # keys and values of one layer of width 16
    assert float(exact["state, MiB"]) == pytest.approx((keys + 4) / 2**20)
    assert float(new["state, MiB"]) < float(exact["state, MiB"])
    converted.main([str(tmp_path / "run")], length=16, after=40, repeats=2, out=tmp_path)
    (shorter,) = read_csv(tmp_path / "converted.csv")
    assert int(shorter["windows"]) == 2 * int(exact["windows"]) + 1  # the held-out text is short
    assert float(shorter["loss"]) != float(exact["loss"])
    converted.main([str(tmp_path / "run")], windows=2, after=40, repeats=2, out=tmp_path)
    (few,) = read_csv(tmp_path / "converted.csv")
    assert int(few["windows"]) == 2
    with pytest.raises(ValueError, match="is the first run of its size: give softmax first"):
        converted.main([str(out)], out=tmp_path)
    images = tmp_path / "images"
    images.mkdir()
    save(small_config(), images / "config.json")
    with pytest.raises(ValueError, match="images holds a run of .*, not of a language model"):
        converted.main([str(images)], out=tmp_path)
    with pytest.raises(ValueError, match="after=8000, but 1.. characters are held out"):
        converted.main([str(tmp_path / "run")], repeats=2, out=tmp_path)
    trained = loop.train(of_run(out), out)
    assert trained["step"] > 0
    assert np.isfinite(trained["eval_loss"])
    with pytest.raises(ValueError, match="only a run with 'softmax' can be converted"):
        convert.convert(out, tmp_path / "x", coupling=["orf"], calibration="none", num_features=[8])
    shorter = with_values(config, {"data.length": 16})
    with pytest.raises(ValueError, match="(?s)holds another run.*data.length: 32 -> 16"):
        loop.train(shorter, tmp_path / "run")
    other = text.dataset(text.numbered(WORDS[::-1]), 32)
    with pytest.raises(ValueError, match="(?s)holds another run.*fingerprint of the data: "):
        loop.train(config, tmp_path / "run", other)
    lines = transfer.init_from(tmp_path / "run", shorter, tmp_path / "short")
    assert re.search("(\\d+) of \\1 arrays of parameters are copied", lines[0])
    source.write_text(WORDS.upper())
    with pytest.raises(ValueError, match="other characters"):
        runs.restore(tmp_path / "run")


@pytest.mark.thorough
def test_couplings_are_compared_by_the_loss(tmp_path):
    report = compare.compare(
        settings("performer", depth=1), tmp_path, couplings=["orf", "softmax"], num_seeds=1
    )
    rows = {(x["setting"], x["measure"]): x for x in read_csv(tmp_path / "results.csv")}
    for setting in ("orf", "softmax"):
        (log,) = (tmp_path / "runs" / setting).glob("*/metrics.jsonl")
        loss = float(rows[setting, "loss"]["mean"])
        assert loss == pytest.approx(metrics.last(log)["eval_loss"], abs=1e-3)
    assert float(rows["orf", "attention error"]["mean"]) > 0
    assert float(rows["orf", "windows/s"]["mean"]) > 0
    assert ("softmax", "attention error") not in rows
    assert ("orf", "accuracy") not in rows
    assert "over the seeds, on 'held out'" in report
    assert "seeds needed" not in report


@pytest.mark.thorough
def test_the_config_has_every_flag_and_is_compiled_by_a_dry_run():
    path = "experiments/language_model/config.py"
    validate(bundled(path))
    lines = [
        ["vit.train", f"--config={path}", "--dry_run", "--config.data.length=16"],
        ["vit.train", f"--config={path}", "--dry_run", "--config.data.crop=center"],
        ["vit.train", f"--config={path}", "--config.seq=2", "--workdir=none"],
    ]
    small = ["--config.model.width=16", "--config.model.depth=1", "--config.data.batch_size=4"]
    lines[0] += small
    (code, out, err), *refused = commands.start_all(lines, ("vit.train",))
    assert code == 0, err
    assert "batch: tokens (4, 17) int32" in out
    assert "operations: not counted" in out
    messages = ("unknown flag '--config.data.crop' of the task 'exp", "ValueError: config.seq (2)")
    for (code, _, err), message in zip(refused, messages, strict=True):
        assert code == 1
        assert err.startswith(message)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": -1}, "--length=-1 must be from 0 to"),
        ({"length": 10**12}, "--length=1000000000000 must be from 0 to"),
        ({"seed": 10**20}, "--seed=1000.* must be from 0 to"),
        ({"temperature": float("nan")}, "--temperature=nan must be a finite number from 0"),
        ({"temperature": -1.0}, "--temperature=-1.0 must be"),
        ({"prompt": ""}, "--prompt must have"),
    ],
)
def test_texts_that_cannot_be_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        generate.main(tmp_path, **options)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"data.batch_size": 0}, "config.data.batch_size=0: must be"),
        ({"data.length": -3}, "config.data.length=-3: must be"),
        ({"data.length": 10**9}, "windows of 1000000000 need"),
        ({"model.num_heads": 3}, r"num_heads \(3\)"),
        ({"attention.exact_rows": 1}, r"exact_rows \(1\) must be 0 in causal attention"),
        ({"optim.layer_decay": 0.5}, "layer_decay must be 1.0: the task of this run"),
    ],
)
def test_runs_that_cannot_be_are_refused(tmp_path, values, message):
    with pytest.raises(ValueError, match=message):
        loop.train(with_values(settings("both"), values), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["softmax", "both"])
def test_the_likeliest_text(kind):
    """With temperature 0: each character is the likeliest after all before; states keep a size.

    With temperature 1 a seed is a text.
    """
    model, *_ = decoder(kind)
    prompt = np.asarray(tokens(7)[0])

    def begun(seed):
        return generate.begun(model, prompt, 7 + 2 * generate.PIECE, seed)

    place = begun(0)
    steps = generate.continued(model, place, 0.0)
    (first, after), (second, _) = next(steps), next(steps)
    sizes = [[x.shape for x in jax.tree.leaves(p.states)] for p in (place, after)]
    assert sizes[0] == sizes[1]
    said = np.concatenate([prompt, first, second])
    likeliest = np.argmax(model(jnp.asarray(said[None, :-1]))[0], axis=-1)
    np.testing.assert_array_equal(said[7:], likeliest[6:])
    drawn = [next(generate.continued(model, begun(i), 1.0))[0].tolist() for i in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    cold = next(generate.continued(model, begun(1), 1e-4))[0]
    np.testing.assert_array_equal(cold, first)
