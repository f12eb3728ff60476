"""The report of a comparison, on logs that are written by hand: nothing is trained."""

import csv
import types

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy import stats

from performer.analysis import attention_error
from tests.support.small import SHALLOW, read_csv, shapes, sized, small_config
from vit import compare, config
from vit.reports import attention_report, metrics
from vit.run import loop, runs
from vit.study import comparison, statistics
from vit.study.comparison import Result, Run, Setting

_shallow = sized(SHALLOW)

BASE = [0.50, 0.52, 0.51, 0.49, 0.53]
RECORD = {"step": 1, "epoch": 1.0, "train_loss": 1.0, "images_per_second": 1.0, "seconds": 1.0}
END = {"step": 3, "epoch": 3 / 44, "eval_examples": 360}


def result(coupling, accuracies, values=(), diverged=(), folder=None, **measures):
    """Runs with one record each."""
    measures = {"eval_accuracy": accuracies} | {f"eval_{k}": x for k, x in measures.items()}
    logs = [
        [RECORD | {k: x for k, x in zip(measures, row, strict=True) if x is not None}]
        for row in zip(*measures.values(), strict=True)
    ]
    found = [Run(s, folder, log, 7 if s in diverged else None) for s, log in enumerate(logs)]
    return Result(Setting(coupling, values), found)


def accuracies(*results, look=1):
    return comparison.compared(results, "orf", look)


def test_the_verdict_follows_the_statistics():
    clear = result("pm", [x + 0.1 + 0.001 * i for i, x in enumerate(BASE)])
    nothing = result("pnc", [x + d for x, d in zip(BASE, [1, -1, 1, -1, 0.5], strict=True)])
    worse = result("iid", [x - 0.1 - 0.001 * i for i, x in enumerate(BASE)])
    found = accuracies(result("orf", BASE), clear, nothing, worse)
    text = comparison.verdict(found)
    smallest = f"{found[1].detectable:.2g}"
    assert text == (
        "Accuracy: significant differences over 5 seeds: 2 of 3. Better than the baseline: pm."
        " Worse than the baseline: iid."
        f" Smallest other difference that would have been detected: {smallest}."
    )
    assert comparison.verdict(found[1:2]) == (
        "Accuracy: no significant difference over 5 seeds, in 1 comparison."
        f" Smallest difference that would have been detected: {smallest}."
    )
    power = statistics.power(found[1].detectable, found[1].difference.deviation, 5, 0.025 / 3)
    assert power == pytest.approx(0.8)


def test_holm_covers_all_measures_of_a_report():
    """With a second measure, the p-value of the first is doubled; look 2 has a third of look 1."""
    higher = [x + e for x, e in zip(BASE, [0.04, 0.01, 0.06, 0.05, 0.02], strict=True)]
    pair = [result("orf", BASE), result("pm", higher)]
    (alone,) = accuracies(*pair)
    assert alone.corrected == pytest.approx(2 * alone.difference.p_value)
    (later,) = accuracies(*pair, look=2)
    assert later.corrected == pytest.approx(6 * later.difference.p_value)
    orf, pm = result("orf", BASE, loss=BASE), result("pm", higher, loss=BASE[::-1])
    first, second = accuracies(orf, pm)
    assert (first.measure, second.measure) == ("accuracy", "loss")
    assert first.corrected == pytest.approx(4 * alone.difference.p_value)


def test_less_loss_and_attention_error_is_better():
    lower = [x - 0.1 - 0.001 * i for i, x in enumerate(BASE)]
    nothing = [None] * 5
    orf = result("orf", nothing, loss=BASE)._replace(errors={s: (BASE[s], 1) for s in range(5)})
    pm = result("pm", nothing, loss=lower)._replace(errors={s: (lower[s], 1) for s in range(5)})
    found = accuracies(orf, pm)
    assert [each.measure for each in found] == ["loss", "attention error"]
    assert comparison.verdict(found).count("1 of 1. Better than the baseline: pm.") == 2
    assert [each.difference.mean for each in found] == pytest.approx([-0.102, -0.102])
    assert "seeds needed for +0.008" not in comparison.tests(found)[0]


def test_pairs_are_by_seed_and_leave_out_what_diverged():
    """Unpaired these accuracies overlap; paired they differ by 0.01 throughout, but for seed 1."""
    a = result("pm", [0.11, 9.0, 0.61, 0.911], diverged=[1])
    b = result("orf", [0.10, 0.3, 0.60, 0.90])
    (found,) = accuracies(b, a)
    assert found.difference.count == 3
    assert found.difference.mean == pytest.approx(0.0103, abs=1e-4)
    assert found.corrected < 0.01
    impossible = "No test is possible: that takes two seeds or more that"
    single = accuracies(result("orf", [0.5]), result("pm", [0.9]))
    equal = accuracies(result("orf", [0.5, 0.6]), result("pm", [0.5, 0.6]))
    other = result("pm", [0, 0, 0.6, 0.7])
    apart = accuracies(result("orf", [0.5, 0.6]), other._replace(runs=other.runs[2:]))
    assert comparison.tests(apart)[0]["difference"] == ""
    for found in (single, equal, apart):
        assert comparison.verdict(found).startswith(impossible)
        (row,) = comparison.tests(found)
        assert {row[x] for x in ("95% interval", "corrected p", "detectable")} == {""}
    assert comparison.verdict([]) == "One setting: nothing is compared."


def test_results_are_numbers(tmp_path):
    """In the csv; the report has them as texts, the figure a dot for each seed."""
    higher = [x + 0.02 + 0.01 * i for i, x in enumerate(BASE)]
    pm = result("pm", higher, loss=higher, folder=tmp_path)._replace(errors={0: (0.5, 0.25)})
    orf = result("orf", BASE, loss=BASE, folder=tmp_path)
    text = comparison.write([orf, pm], "", small_config(), tmp_path)
    with (tmp_path / "results.csv").open() as file:
        (head, *_) = csv.reader(file)
    rows = {(row["setting"], row["measure"]): row for row in read_csv(tmp_path / "results.csv")}
    tested = statistics.paired(higher, BASE)
    row = {name: float(rows["pm", "accuracy"][name]) for name in head[2:] if name != "baseline"}
    assert rows["pm", "accuracy"]["baseline"] == "orf"
    names = "mean", "difference", "low", "high", "difference, seed 4"
    assert [row[name] for name in names] == pytest.approx(
        [np.mean(higher), tested.mean, tested.low, tested.high, higher[4] - BASE[4]]
    )
    assert row["mean ±"] == pytest.approx(np.std(higher, ddof=1) / 5**0.5, rel=1e-6)
    found = [float(rows["pm", name]["mean"]) for name in ("attention error", "uniform attention")]
    assert found == [0.5, 0.25]
    needed = [int(row[name]) for name in comparison.NEEDED]
    level = statistics.LEVEL / 6 / 2  # of the second look, and Holm's of two tests
    ends = tested.deviation, *statistics.deviation_interval(tested.deviation, 5)
    assert needed == [statistics.seeds_needed(0.008, each, level) for each in ends]
    assert f"| {needed[0]:,} ({needed[1]:,} to {needed[2]:,}) |" in text
    assert (tmp_path / "results.png").stat().st_size > 5_000


def test_a_look_is_a_report_on_other_seeds(tmp_path):
    """The same seeds again are the same look: nothing new was seen. One seed allows no test."""
    one, few, more = ([result(name, BASE[:n]) for name in ("orf", "pm")] for n in (1, 2, 3))
    looks = [comparison.count_look(tmp_path, each) for each in (one, few, few, more, few, more)]
    assert looks == [1, 1, 1, 2, 1, 2]


def test_the_level_is_spent_over_the_looks():
    """4,000 comparisons without a difference, which add seeds until one is significant.

    Each t-test at the full level gives 12 to 24% false alarms; at the levels of the looks the
    share is at most 5%, plus three standard errors of the simulation.
    """
    differences = np.random.default_rng(0).normal(size=(4000, 20))
    counts = range(3, 21)
    p = np.stack([stats.ttest_1samp(differences[:, :n], 0, axis=1).pvalue for n in counts])
    levels = np.array([statistics.level_of_look(k + 1) for k in range(len(counts))])
    few = np.any(p[:4] < statistics.LEVEL, axis=0).mean()
    many = np.any(p < statistics.LEVEL, axis=0).mean()
    spent = np.any(p < levels[:, None], axis=0).mean()
    assert 0.08 < few < many < 0.25
    assert many > 0.18
    assert 0.01 < spent < 0.05 + 3 * (0.05 * 0.95 / 4000) ** 0.5
    assert sum(statistics.level_of_look(k) for k in range(1, 10**4)) == pytest.approx(
        statistics.LEVEL, rel=1e-3
    )


def test_curves_are_means_over_seeds():
    (row,) = comparison.curves([result("pm", [0.2, 0.4])], "accuracy")
    assert row["eval_accuracy"] == pytest.approx(0.3)


def written(settings, workdir):
    """Write what a whole run of three steps leaves; its accuracy is a third of its seed."""
    workdir.mkdir(parents=True, exist_ok=True)
    config.save(settings, workdir / "config.json")
    (workdir / "metrics.jsonl").unlink(missing_ok=True)
    metrics.append(workdir / "metrics.jsonl", RECORD | {"epoch": 1 / 44})
    last = RECORD | END | {"eval_accuracy": settings.seed / 3, "eval_loss": 1.0}
    metrics.append(workdir / "metrics.jsonl", last)


@pytest.fixture
def untrained(monkeypatch):
    """Train nothing; queries and keys follow from the name of the setting's folder."""
    monkeypatch.setattr(loop, "train", written)
    restored = []

    def restore(folder):
        restored.append(folder)
        x = np.random.default_rng(len(str(folder.parent.name))).normal(size=(3, 2, 6, 2, 8))
        task = types.SimpleNamespace(projections=lambda _, x: [tuple(x)], is_causal=False)
        return types.SimpleNamespace(
            task=task,
            model=lambda: None,
            evaluation_examples=lambda number: jnp.asarray(x),
            training_examples=lambda number: iter([jnp.asarray(x)]),
        )

    monkeypatch.setattr(runs, "restore", restore)
    return restored


def test_seeds_begin_with_that_of_the_config(untrained, tmp_path):
    settings = small_config(seed=3)
    compare.compare(settings, tmp_path, couplings=["orf", "pm"], num_seeds=2)
    rows = read_csv(tmp_path / "seeds.csv")
    assert [(row["coupling"], row["seed"]) for row in rows] == [
        (name, seed) for name in ("orf", "pm") for seed in ("3", "4")
    ]
    assert [config.of_run(tmp_path / row["folder"]).seed for row in rows] == [3, 4, 3, 4]


def test_softmax_is_trained_once_for_a_grid_of_features(untrained, tmp_path):
    """And compared with the baseline of each point."""
    grid = ["config.attention.num_features=4,8"]
    options = dict(couplings=["softmax", "orf"], num_seeds=2, grid=grid)
    text = compare.compare(small_config(), tmp_path, **options)
    folders = sorted(path.name for path in (tmp_path / "runs").iterdir())
    orf = [f"orf,attention.num_features={m}" for m in (4, 8)]
    assert folders == [*orf, "softmax"]
    for m in (4, 8):
        assert f"| softmax | orf, num_features={m} | accuracy |" in text
    again = [tmp_path / "runs" / name / f"seed{seed}" for name in folders for seed in (0, 1)]
    assert (
        compare.of_runs(again, tmp_path / "again", "softmax").count("| softmax | accuracy |") == 2
    )
    depths = {"model.depth": [1, 2], "attention.num_features": [4, 8]}
    chosen = compare.settings(small_config(), ["softmax"], depths)
    assert [setting.name for setting in chosen] == ["softmax, depth=1", "softmax, depth=2"]


def test_softmax_ignores_the_other_fields_of_attention():
    """The model is the same whatever they are; a window changes the order of its tokens alone."""
    softmax = config.with_values(small_config(), {"attention.kind": "softmax"})
    ignored = compare.unread(softmax)
    assert ignored == {x for x in config.fields(config.Config) if x.startswith("attention.")} - {
        "attention.kind"
    }
    others = {"num_features": 4, "exact_keys": 1, "calibration": "full"}
    others |= {"coupling": "pm", "redraw_every": 1, "share_heads": True, "exact_rows": 1}
    changed = config.with_values(softmax, {f"attention.{k}": x for k, x in others.items()})
    models = [nnx.split(shapes(each, 5, 1)) for each in (softmax, changed)]
    assert models[0][1] == models[1][1]
    assert str(models[0][0]) == str(models[1][0])
    assert not compare.unread(small_config())


def test_attention_errors_are_on_the_runs_of_the_baseline(untrained, tmp_path):
    """Features of all couplings on its queries and keys, with draws of its seed."""
    compare.compare(small_config(), tmp_path, couplings=["orf", "pm"], num_seeds=2)
    assert [folder.parent.name for folder in untrained] == ["orf", "orf"]
    rows = {(row["setting"], row["measure"]): row for row in read_csv(tmp_path / "results.csv")}
    x = jnp.asarray(np.random.default_rng(3).normal(size=(3, 2, 6, 2, 8)))
    for name in ("orf", "pm"):
        found = [
            attention_error(x[0], x[1], coupling=name, num_features=8, draws=4, seed=seed)
            for seed in (0, 1)
        ]
        errors = [each.attention.value.mean() for each in found]
        row = rows[name, "attention error"]
        assert errors[0] != pytest.approx(errors[1], rel=1e-3)
        assert float(row["mean"]) == pytest.approx(np.mean(errors), rel=1e-5)
        uniform = float(rows[name, "uniform attention"]["mean"])
        assert uniform == pytest.approx(found[0].uniform_attention.mean(), rel=1e-5)
    assert rows["pm", "attention error"]["corrected p"]


def test_errors_are_of_the_sizes_and_the_calibration_of_the_config():
    x = 2 * jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 6, 2, 8)))
    mixed = (config.Block("softmax"), config.Block(num_features=4, calibration="full"))

    def errors(blocks, number=2):
        attention = config.Attention(blocks=blocks)
        settings = small_config(attention=attention, model=config.Model("XS/4", depth=len(blocks)))
        triples = [tuple(x)] * number
        return attention_report.errors_on(triples, triples, settings, draws=4, seed=0)

    (half, uniform), (whole, _) = errors(mixed), errors(mixed[1:], 1)
    assert half == pytest.approx(whole / 2)
    assert uniform == errors(mixed[1:], 1)[1]
    drawn, _ = errors((config.Block(num_features=4),), 1)
    assert whole != pytest.approx(drawn, rel=0.01)
    with pytest.raises(ValueError, match="2 layers has no features for 1"):
        errors(mixed[1:])
    with pytest.raises(ValueError, match="positive alone"):
        errors((mixed[0], mixed[1]._replace(transferred=True)))


@pytest.mark.parametrize("lacks", [{"step": 2, "epoch": 2 / 44}, {"eval_loss": None}])
def test_a_stopped_run_is_not_reported(untrained, tmp_path, lacks):
    """Its log ends before the last step, or without the last evaluation."""
    folders = [tmp_path / name for name in ("a", "b")]
    for seed, folder in enumerate(folders):
        written(small_config(seed=seed), folder)
    compare.of_runs(folders, tmp_path / "out")
    log = folders[1] / "metrics.jsonl"
    *earlier, last = metrics.read(log)
    log.unlink()
    last = {k: x for k, x in (last | lacks).items() if x is not None}
    for record in (*earlier, last):
        metrics.append(log, record)
    with pytest.raises(ValueError, match="b has not ended"):
        compare.of_runs(folders, tmp_path / "early")


def test_a_task_without_attention_is_compared_by_its_grid():
    settings = config.bundled("mixer")
    (setting, other) = compare.settings(settings, None, {"model.depth": [1, 2]})
    assert (setting.coupling, setting.name) == ("", "depth=1")
    assert other.folder == "model.depth=2"
    assert comparison.baselines([setting, other], "") == {setting: [], other: [setting]}
    for couplings, grid in ((["orf"], {"model.depth": [1]}), (None, {})):
        with pytest.raises(ValueError, match="'mixer' has no section attention, so no --coup"):
            compare.settings(settings, couplings, grid)


def test_folders_of_settings_are_their_own_and_hold_no_patterns():
    grid = {"data.dir": ["/data/a", "/data-a", "train[:50%]", "a*?\\b", "#1"]}
    settings = compare.settings(small_config(), ["orf", "simplex*monotone"], grid)
    folders = {setting.folder for setting in settings}
    assert len(folders) == 10
    for folder in folders:
        assert not set(folder) & set("/*?[]\\")
    alike = {"data.dir": ["1", "1,data.name=3"], "data.name": ["3,data.name=4", "4"]}
    settings = compare.settings(small_config(), ["orf"], alike)
    assert len({setting.folder for setting in settings}) == 4
    (plain,) = compare.settings(small_config(), ["simrf+"], {"attention.num_features": [16]})
    assert plain.folder == "simrf+,attention.num_features=16"


@pytest.mark.parametrize(
    "options", [dict(couplings=("pm",)), dict(seeds=3), dict(grid=["config.model.depth=1,2"])]
)
def test_flags_of_training_are_refused_for_finished_runs(tmp_path, options):
    """They were ignored."""
    with pytest.raises(ValueError, match="give their folders alone"):
        compare.main(tmp_path / "run", out=tmp_path / "out", **options)
