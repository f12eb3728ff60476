"""A softmax run becomes a calibrated Performer's: exact ends, report, a run that trains on."""

import shutil

import numpy as np
import pytest
from flax import nnx

from performer.nnx import PerformerAttention
from tests.support.small import TINY, read_csv, sized, small_config
from vit import config, convert, data, evaluate, train
from vit.run import runs
from vit.speed import converted as speed
from vit.study import harness

_tiny = sized(TINY)


@pytest.fixture(scope="module")
def softmax_run(tmp_path_factory):
    """Three steps with a class token and 16 patches."""
    workdir = tmp_path_factory.mktemp("run") / "softmax"
    model = config.Model(variant="XS/2", pooling="token")
    settings = small_config(
        model=model, attention=config.Attention(kind="softmax"), checkpoint_every=3
    )
    train.train(settings, workdir)
    return workdir


def softmax_blocks(run):
    blocks = config.of_run(run).attention.blocks
    return [number for number, block in enumerate(blocks) if block.kind == "softmax"]


OPTIONS = dict(coupling=["orf-antithetic"], calibration="full", num_features=[16])


@pytest.fixture(scope="module")
def converted(softmax_run):
    """One of the two layers is kept."""
    out = softmax_run.with_name("converted")
    more = dict(keep=1, refine_steps=5, draws=2, images=40, num_epochs=2 / 44)
    return out, convert.convert(softmax_run, out, **OPTIONS | more)


def test_report(converted, softmax_run):
    out, table = converted
    rows = read_csv(out / "conversion.csv")
    assert [(r["coupling"], r["calibration"], r["m"]) for r in rows] == [
        ("softmax", "", "0"),
        ("uniform", "", "0"),
        *(("orf-antithetic", method, "16") for method in ("none", "full", "full, refined")),
    ]
    trained = evaluate.evaluate_run(softmax_run)
    assert trained["step"] == 3
    assert float(rows[0]["accuracy"]) == pytest.approx(trained["eval_accuracy"], abs=1e-6)
    assert float(rows[0]["attention error"]) == 0
    assert float(rows[1]["attention error"]) > 0
    rates = (out / "conversion.md").read_text()
    assert table.startswith(rates)
    assert "times as fast at 17 tokens on this CPU" in table[len(rates) :]
    heads = [r for r in read_csv(out / "heads.csv") if r["attention"] == "linear"]
    assert len(heads) == 2
    mean = sum(float(row["attention error"]) for row in heads) / 2
    errors = (float(rows[-1][f"error layer {i}"]) for i in range(2))
    assert mean == pytest.approx(max(errors), rel=0.5)  # other images
    assert mean < float(rows[1]["attention error"])


@pytest.mark.thorough
def test_data_of_other_classes_are_refused(softmax_run, tmp_path, monkeypatch):
    load = data.load
    names = tuple("0123456789X")
    monkeypatch.setattr(data, "load", lambda section: load(section)._replace(class_names=names))
    with pytest.raises(ValueError, match="is not the data set of the run: 1 of the 11 .* run: X; "):
        convert.convert(softmax_run, tmp_path / "out", **OPTIONS)
    assert not (tmp_path / "out").exists()


@pytest.mark.thorough
def test_kept_layers_are_in_the_config_and_stay_softmax(converted):
    out, _ = converted
    (exact,) = softmax_blocks(out)
    layers = [block.attention.attention_fn for block in runs.restore(out).model().blocks]
    assert layers[exact] is nnx.dot_product_attention
    assert isinstance(layers[1 - exact], PerformerAttention)
    rows = read_csv(out / "conversion.csv")
    for row in rows[2:]:
        errors = [float(row[f"error layer {i}"]) for i in range(2)]
        assert (errors[exact] == 0) == (row["calibration"] != "none" or errors[1 - exact] > 0)


@pytest.mark.thorough
def test_with_a_window(softmax_run, tmp_path):
    """The class token is exact; the run is that of its row."""
    out = tmp_path / "window"
    options = dict(coupling=["orf"], calibration="none", num_features=[8], draws=1, images=32)
    options |= dict(exact_rows=1)
    table = convert.convert(softmax_run, out, exact_window=[0, 4], **options)
    rows = read_csv(out / "conversion.csv")
    assert [(r["coupling"], r["calibration"], int(r["window"])) for r in rows] == [
        *(("softmax", "", 0), ("uniform", "", 0), ("window alone", "", 4)),
        *(("orf", "none", window) for window in (0, 4)),
    ]
    assert "| window alone |  | 4 | 0 |" in table
    errors = [float(row["attention error"]) for row in rows]
    assert 0 < errors[4] < errors[3]
    assert config.of_run(out).attention.exact_window == 4
    for block in runs.restore(out).model().blocks:
        assert block.attention.attention_fn.exact == (4, 1, 0, 1)
    trained = evaluate.evaluate_run(softmax_run)["eval_accuracy"]
    assert float(rows[0]["accuracy"]) == pytest.approx(trained, abs=1e-6)  # in the other order
    own = evaluate.evaluate_run(out)["eval_accuracy"]
    assert float(rows[-1]["accuracy"]) == pytest.approx(own, abs=1e-6)


@pytest.mark.thorough
def test_a_tolerance_chooses_the_sizes_of_each_block(softmax_run, tmp_path):
    """The first block meets it below the limits, the second stays exact; the run is that model."""
    out = tmp_path / "tolerance"
    convert.convert(softmax_run, out, **OPTIONS, exact_keys=2, draws=1, images=32, tolerance=0.09)
    own = config.of_run(out).attention
    first, *_, last = read_csv(out / "heads.csv")
    assert [block.kind for block in own.blocks] == ["performer", "softmax"]
    assert own.blocks[0][1:3] == (int(first["m"]), "full")
    assert own.blocks[0].exact_keys == int(first["exact keys"])
    assert last["attention"] == "exact"
    attention = runs.restore(out).model().blocks[0].attention.attention_fn
    size = attention.frequencies.shape[-2], attention.exact.keys
    assert size in {(m, f) for m in (2, 4, 8, 16) for f in (0, 1, 2)} - {(16, 2)}
    reported = float(read_csv(out / "conversion.csv")[-1]["accuracy"])
    assert reported == pytest.approx(evaluate.evaluate_run(out)["eval_accuracy"], abs=1e-6)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:linearize")
def test_without_sizes_each_block_has_its_own(softmax_run, tmp_path):
    out = tmp_path / "chosen"
    convert.convert(softmax_run, out, draws=1, images=32, tolerance=0.2)
    own, rows = config.of_run(out).attention, read_csv(out / "heads.csv")
    sizes = ("m", "exact keys", "exact rows")
    given = {int(row["layer"]): [int(row[name]) for name in sizes] for row in rows}
    linear = [int(r["layer"]) for r in rows if r["attention"] == "linear"]
    assert linear
    for block in linear:
        m, *_, keys, rows = own.blocks[block][1:6]
        assert [m, keys, rows] == given[block]
    last = read_csv(out / "conversion.csv")[-1]
    assert last["m"] == "by layer"
    accuracy = evaluate.evaluate_run(out)["eval_accuracy"]
    assert float(last["accuracy"]) == pytest.approx(accuracy, abs=1e-6)


@pytest.mark.thorough
def test_refusals(converted, softmax_run, tmp_path):
    out, _ = converted

    def refused(workdir, message, target=tmp_path / "new", **changes):
        with pytest.raises(ValueError, match=message):
            convert.convert(workdir, target, **(OPTIONS | changes))
        assert not (tmp_path / "new").exists()

    refused(tmp_path / "nowhere", "holds no run")
    refused(out, "was trained with config.attention.kind='performer'")
    refused(softmax_run, "holds a run already; choose another --out", out)
    refused(softmax_run, "unknown coupling 'orff'", coupling=["orff"])
    refused(softmax_run, "give num_features also", num_features=[], exact_keys=2)
    refused(softmax_run, "unknown calibration 'fulll'", calibration="fulll")
    refused(softmax_run, "even number of features", coupling=["pm-antithetic"], num_features=[7])
    refused(softmax_run, "draws=0 must be positive", draws=0)
    refused(softmax_run, "exact_window=-1: must be an integer from 0", exact_window=[0, -1])


@pytest.mark.thorough
def test_attention_report_of_a_run(softmax_run, converted, tmp_path):
    text = evaluate.report_attention(softmax_run, tmp_path / "softmax", images=2, draws=3)
    assert "of 4 heads are worse than uniform attention" in text
    assert text.startswith("The run has softmax attention. These are the errors that features")
    own = evaluate.report_attention(converted[0], tmp_path / "own", images=2, draws=3)
    told, _, first, *_ = own.splitlines()
    assert told.startswith(f"These are errors of new draws. {converted[0] / 'heads.csv'} has")
    assert first.startswith("| layer.head | error | uniform | output |")
    for name in ("softmax", "own"):
        for suffix in ("csv", "md", "png"):
            assert (tmp_path / f"{name}.{suffix}").exists()
    rows = read_csv(tmp_path / "own.csv")
    assert [r["layer"] + r["head"] for r in rows] == ["00", "01", "10", "11"]
    (exact,) = softmax_blocks(converted[0])
    for row in rows:
        assert (float(row["attention error"]) == 0) == (row["layer"] == str(exact))


@pytest.mark.thorough
def test_the_attention_of_other_feature_maps_is_not_reported(tmp_path):
    attention = config.Attention(feature_map="relu", num_features=8)
    model = config.Model(variant="XS/2", pooling="token")
    train.train(
        small_config(model=model, attention=attention, checkpoint_every=3), tmp_path / "run"
    )
    with pytest.raises(ValueError, match="for the feature map positive alone"):
        evaluate.report_attention(tmp_path / "run", tmp_path / "own", images=2, draws=3)


@pytest.mark.thorough
def test_converted_run_evaluates_and_trains_on(converted, tmp_path):
    out = shutil.copytree(converted[0], tmp_path / "run")
    settings = config.of_run(out)
    assert settings.attention == config.Attention(
        coupling="orf-antithetic",
        num_features=16,
        calibration="full",
        blocks=settings.attention.blocks,
    )
    before = evaluate.evaluate_run(out)
    assert before["step"] == 0
    record = train.train(settings, out)
    assert record["step"] == 2
    assert np.isfinite(record["train_loss"])
    assert evaluate.evaluate_run(out)["step"] == 2


@pytest.mark.thorough
def test_a_run_and_its_conversion_on_the_same_pictures(converted, softmax_run, tmp_path):
    """Accuracies are those of the evaluation; the paired difference has McNemar's error."""
    settings, other = config.of_run(softmax_run), tmp_path / "other"
    settings.seed = 1
    train.train(settings, other)
    folders = [softmax_run, converted[0], other]
    speed.measure([str(x) for x in folders], tmp_path, batch_size=2, repeats=2)
    rows = harness.read(tmp_path / "converted.csv")
    wanted = [evaluate.evaluate_run(folder) for folder in folders]
    assert [row["tokens"] for row in rows] == [17, 17, 17]
    assert rows[0]["attention"] == "softmax"
    assert "1 x softmax attention" in rows[1]["attention"]
    for row, want in zip(rows, wanted, strict=True):
        np.testing.assert_allclose(row["accuracy"], want["eval_accuracy"], rtol=1e-5)  # six digits
        assert row["pictures"] == want["eval_examples"]
    hits = [speed.correct(runs.restore(x)) for x in (softmax_run, other)]
    lost, won, n = np.sum(hits[0] > hits[1]), np.sum(hits[1] > hits[0]), len(hits[0])
    assert lost + won > 0
    np.testing.assert_allclose(rows[2]["difference"], (won - lost) / n, rtol=1e-5)
    error = (lost + won - (won - lost) ** 2 / n) ** 0.5 / n
    np.testing.assert_allclose(rows[2]["difference ±"], error, rtol=1e-2)  # n, not n - 1
    speed.measure([str(x) for x in folders[::2]], tmp_path, images=9, batch_size=2, repeats=1)
    rows = harness.read(tmp_path / "converted.csv")
    assert [row["pictures"] for row in rows] == [9, 9]
    for row, hit in zip(rows, hits, strict=True):
        np.testing.assert_allclose(row["accuracy"], np.mean(hit[:9]), rtol=1e-5)
        assert row["training, MiB"] > row["forward, MiB"]
    with pytest.raises(ValueError, match="give softmax first"):
        speed.measure([str(converted[0])], tmp_path)
