"""The comparison: seeds are those of vit.train, what is stopped goes on, and what is reported."""

import csv
import dataclasses
import html.parser
import json
import shutil
import urllib.parse

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.common import statistics
from experiments.training import comparison as compare
from experiments.training import ensemble, in_turn
from experiments.training import report as compare_report
from tests.small import TINY, small_config
from vit import checkpoint, config, files, metrics, train

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A whole comparison; tests leave it as it is."""
    out = tmp_path_factory.mktemp("compare") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(config.SIZES, "XS", TINY)
        text = compare.compare(small_config(), out, couplings=["softmax", "pm"], num_seeds=3)
    return out, text


def test_a_seed_of_the_ensemble_is_the_run_of_vit_train(compared, tmp_path):
    """The same losses up to the rounding of batched products."""
    out, _ = compared
    attention = config.Attention(num_features=8, coupling="pm")
    train.train(small_config(seed=1, attention=attention), tmp_path / "run")
    alone = metrics.read(tmp_path / "run" / "metrics.jsonl")
    together = metrics.read(out / "runs" / "pm" / "metrics.jsonl")
    for a, b in zip(alone, together, strict=True):
        assert b["train_loss"][1] == pytest.approx(a["train_loss"], rel=1e-5)
        assert b["gradient_norm"][1] == pytest.approx(a["gradient_norm"], rel=1e-4)
    assert together[-1]["eval_loss"][1] == pytest.approx(alone[-1]["eval_loss"], rel=1e-5)
    assert together[-1]["eval_loss"][0] != pytest.approx(alone[-1]["eval_loss"], rel=1e-4)


def test_settings_share_all_but_what_is_compared(compared):
    """At step 1, where the rate is still 0, the head is 0 and every setting has the same loss."""
    out, _ = compared
    logs = [metrics.read(out / "runs" / n / "metrics.jsonl") for n in ("softmax", "pm")]
    assert logs[0][0]["train_accuracy"] == logs[1][0]["train_accuracy"]
    assert logs[0][-1]["train_loss"] != logs[1][-1]["train_loss"]


def test_the_report_has_what_was_asked_for(compared):
    out, text = compared
    assert text == (out / "report.md").read_text()
    for part in ("Verdict", "How many seeds", "Versions and hardware", "Every value", "| jax |"):
        assert part in text
    assert "| [softmax](runs/softmax/) |" in text
    assert "config.optim.warmup\\_steps" in text or "config.optim.warmup_steps" in text
    with (out / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["setting"] for row in rows] == ["softmax", "pm"]
    assert rows[1]["difference to baseline"] == "baseline"
    assert rows[0]["attention error"] == "exact"
    assert float(rows[1]["attention error"].split(" ")[0]) > 0
    noted = files.noted(out / "runs" / "pm" / "attention_errors.json")
    assert len(set(noted["uniform"]) - set(noted["errors"])) == 3
    assert rows[1]["of uniform attention"] == statistics.estimate(noted["uniform"])
    assert rows[0]["of uniform attention"] == ""
    with (out / "seeds.csv").open() as file:
        runs = list(csv.DictReader(file))
    accuracies = [float(run["eval_accuracy"]) for run in runs if run["coupling"] == "pm"]
    assert rows[1]["accuracy"] == statistics.estimate(accuracies)
    page = (out / "report.html").read_text()
    assert page.count("data:image/svg+xml;base64,") == 2
    assert '<td><a href="runs/pm/">pm</a></td>' in page
    assert "http" not in page.replace("http://www.w3.org", "")  # it needs no network
    for name in ("curves.png", "differences.png"):
        assert (out / name).stat().st_size > 10_000


def test_a_finished_comparison_only_reports(compared, monkeypatch):
    out, text = compared
    monkeypatch.setattr(ensemble.steps, "train_step", None)
    again = compare.compare(small_config(), out, couplings=["softmax", "pm"], num_seeds=3)
    assert again == text


def test_another_comparison_in_the_folder_is_refused(compared, tmp_path):
    out, _ = compared
    with pytest.raises(
        ValueError, match=r"holds another comparison.*\n  seeds: \[0, 1, 2\] -> \[0"
    ):
        compare.compare(small_config(), out, couplings=["softmax", "pm"], num_seeds=4)
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="is not empty and holds no comparison"):
        compare.compare(small_config(), tmp_path, couplings=["orf"], num_seeds=1)


def test_a_stopped_ensemble_goes_on_and_ends_the_same(compared, tmp_path):
    out, _ = compared
    (setting,) = compare.settings(small_config(), ["pm"], {})

    def stop(step, record):
        if step == 2 and record:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensemble.train(setting.config, [0, 1, 2], tmp_path, advance=stop)
    assert checkpoint.exists(tmp_path)
    trained = ensemble.train(setting.config, [0, 1, 2], tmp_path)
    whole = metrics.read(out / "runs" / "pm" / "metrics.jsonl")
    for a, b in zip(trained.records, whole, strict=True):
        assert (a["step"], a["train_loss"]) == (b["step"], b["train_loss"])
    assert trained.records[-1]["eval_loss"] == whole[-1]["eval_loss"]


def test_a_seed_that_diverges_is_reported_and_the_rest_goes_on(tmp_path, monkeypatch):
    """Its loss is poisoned from the second step on."""
    original = ensemble.steps.train_step

    def poisoned(config, task, graph, seed, state, batch):
        state, values = original(config, task, graph, seed, state, batch)
        _, optimizer = nnx.merge(graph, state)
        bad = (seed == 1) & (optimizer.step[...] >= 2)
        return state, values | {"train_loss": jnp.where(bad, jnp.nan, values["train_loss"])}

    monkeypatch.setattr(ensemble.steps, "train_step", poisoned)
    text = compare.compare(small_config(), tmp_path, couplings=["softmax"], num_seeds=3)
    assert "seed 1 at step 2" in text
    with (tmp_path / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["seeds"] for row in rows] == ["2"]
    log = metrics.read(tmp_path / "runs" / "softmax" / "metrics.jsonl")
    assert log[-1]["diverged"] == [None, 2, None]
    assert np.isfinite(log[-1]["train_loss"][2])


def test_folders_of_settings_are_their_own_and_hold_no_patterns():
    data, dirs = config.Data(batch_size=32), ["/data/a", "/data-a", "train[:50%]", "a*?\\b"]
    settings = compare.settings(
        small_config(data=data), ["orf", "simplex*monotone"], {"data.dir": [*dirs, "x" * 300]}
    )
    folders = [setting.folder for setting in settings]
    assert len(set(folders)) == 10
    assert max(map(len, folders)) < 255
    for folder in folders:
        assert not set(folder) & set("/*?[]\\")
    (plain,) = compare.settings(small_config(), ["pm"], {"attention.num_features": [16]})
    assert plain.folder == "pm_attention.num_features=16"
    with pytest.raises(ValueError, match="would share the folder 'orf_data.dir=1_data.name"):
        compare.settings(
            small_config(),
            ["orf"],
            {"data.dir": ["1", "1_data.name=3"], "data.name": ["3_data.name=4", "4"]},
        )


@pytest.fixture
def copied(compared, tmp_path):
    """A finished comparison that a test may damage, and what it said."""
    return shutil.copytree(compared[0], tmp_path / "out"), compared[1]


def again(out):
    return compare.compare(small_config(), out, couplings=["softmax", "pm"], num_seeds=3)


def test_a_finished_comparison_with_a_damaged_log_reports_nothing(copied):
    out, _ = copied
    log = out / "runs" / "pm" / "metrics.jsonl"
    content = log.read_text()
    (setting,) = compare.settings(small_config(), ["pm"], {})
    for damage in (
        content[: content.index("step", 9)],
        content.replace("1", "2", 1),
        "",
        content.replace("eval_accuracy", "eval_accuracx"),
    ):
        log.write_text(damage)
        assert not ensemble._complete(metrics.keep_up_to(log, 3), 3, 3, setting.config)
    with pytest.raises(ValueError, match="pm/metrics.jsonl lacks records up to step 3"):
        ensemble.train(setting.config, [0, 1, 2], log.parent)


def test_side_files_that_are_damaged_are_made_again(copied):
    out, text = copied
    (out / "runs" / "pm" / "attention_errors.json").write_text('{"errors": [0.1, 0.1, 0.1]}')
    (out / "runs" / "softmax" / "memory.json").write_text("")
    assert again(out) == text


def test_a_comparison_whose_claim_is_damaged_is_named(copied):
    out, _ = copied
    for content in ("", "[1]", "{"):
        (out / "grid.json").write_text(content)
        with pytest.raises(ValueError, match="out/grid.json, which says what .* is damaged"):
            again(out)


def test_a_claim_that_was_killed_does_not_stand_in_the_way(tmp_path):
    for name in ("lock", "grid.tmp", "grid.json.tmp"):
        (tmp_path / name).write_text("{")
    compare.claim(tmp_path, {"seeds": [0]})
    compare.claim(tmp_path, {"seeds": [0]})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(couplings=["orff"]), "unknown coupling 'orff'; did you mean 'orf'"),
        (dict(couplings=["orf", "orf"]), "name each once"),
        (dict(num_seeds=0), "--seeds=0 must be at least 1"),
        (dict(baseline="simrf"), "--baseline 'simrf'"),
        (dict(grid=["config.attention.num_feature=8"]), "mean 'config.attention.num_features'"),
        (dict(grid=["attention.num_features=8"]), "mean 'config.attention.num_features'"),
        (dict(grid=["config.attention.num_features=8,x"]), "num_features=x: must be an integer"),
        (dict(grid=["config.data.flip=maybe"]), "flip=maybe: must be true or false"),
        (dict(grid=["config.optim.learning_rate=0.001,1e-3"]), "0.001 is there more than once"),
        (dict(grid=["config.seed=1,2"]), "seeds and couplings have flags"),
        (dict(grid=["config.attention.num_features=0"]), "num_features=0: must be an"),
        (dict(grid=["config.optim.warmup_steps=99"]), "warmup_steps=99 .* whole run has 3"),
    ],
)
def test_bad_input_is_named_before_any_work(tmp_path, options, message):
    arguments = dict(couplings=["orf"], num_seeds=1) | options
    with pytest.raises(ValueError, match=message):
        compare.compare(small_config(), tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()


def result(coupling, accuracies, point="", diverged=None):
    seeds = tuple(range(len(accuracies)))
    records = [
        {
            "step": 1,
            "epoch": 1.0,
            "train_loss": [1.0] * len(seeds),
            "train_accuracy": [0.5] * len(seeds),
            "eval_accuracy": list(accuracies),
            "eval_loss": [1.0] * len(seeds),
            "eval_top5": [1.0] * len(seeds),
            "images_per_second": 1.0,
            "seconds": 1.0,
        }
    ]
    trained = ensemble.Ensemble(seeds, records, diverged or [None] * len(seeds), None, None, 1.0)
    return compare_report.Result(coupling, point, small_config(), trained, [0.5])


BASE = [0.50, 0.52, 0.51, 0.49, 0.53]


def test_the_verdict_follows_the_statistics():
    clear = result("pm", [x + 0.1 + 0.001 * i for i, x in enumerate(BASE)])
    nothing = result("pnc", [x + d for x, d in zip(BASE, [1, -1, 1, -1, 0.5], strict=True)])
    worse = result("iid", [x - 0.1 - 0.001 * i for i, x in enumerate(BASE)])
    found = compare_report.comparisons([result("orf", BASE), clear, nothing, worse], "orf")
    words = [compare_report.sentence(c) for c in found]
    assert words[0].startswith("pm is better than orf (+0.1020")
    assert words[1].startswith("pnc against orf: no difference that 5 seeds can show")
    assert words[2].startswith("iid is worse than orf")
    overall = compare_report.verdict(found)
    assert "2 show a difference. better than the baseline: pm. worse: iid." in overall
    assert "For the other 1, no difference that 5 seeds can show." in overall
    assert compare_report.verdict(found[1:2]).startswith("No difference that 5 seeds can show")


def test_the_verdict_takes_corrected_p_values():
    """Two comparisons with p = 0.03 each show nothing: 0.06 after Holm's correction."""
    better = [x + 0.0117 + d for x, d in zip(BASE, np.linspace(-0.01, 0.01, 5), strict=True)]
    results = [result("orf", BASE), result("pm", better), result("pnc", better)]
    found = compare_report.comparisons(results, "orf")
    assert all(c.difference.p_value < 0.05 < c.corrected for c in found)
    assert compare_report.verdict(found).startswith("No difference that 5 seeds can show")
    assert "no difference that 5 seeds can show" in compare_report.sentence(found[0])


def test_pairs_are_by_seed_and_leave_out_what_diverged():
    """Unpaired these accuracies overlap; paired they differ by 0.01 throughout, but for seed 1."""
    a = result("pm", [0.11, 9.0, 0.61, 0.911], diverged=[None, 7, None, None])
    b = result("orf", [0.10, 0.3, 0.60, 0.90])
    (found,) = compare_report.comparisons([b, a], "orf")
    assert found.difference.count == 3
    assert found.difference.mean == pytest.approx(0.0103, abs=1e-4)
    assert found.corrected < 0.01


def test_with_one_coupling_the_first_point_is_the_baseline():
    points = [result("orf", BASE, f"num_features={m}") for m in (8, 16, 32)]
    found = compare_report.comparisons(points, "orf")
    assert [c.baseline for c in found] == [points[0]] * 2
    grids = [result(n, BASE, f"m={m}") for m in (8, 16) for n in ("orf", "pm")]
    found = compare_report.comparisons(grids, "orf")
    assert [(c.result.point, c.baseline.point) for c in found] == [("m=8",) * 2, ("m=16",) * 2]


def test_one_seed_says_that_it_says_nothing():
    found = compare_report.comparisons([result("orf", [0.5]), result("pm", [0.9])], "orf")
    assert "cannot show a difference or its absence" in compare_report.sentence(found[0])
    assert compare_report.power(found[0]) == "unknown: no spread was seen"


def test_links_lead_to_folders_whose_names_are_quoted():
    setting = compare.Setting("a/b", (("data.dir", "#1"),), small_config())
    link = compare_report._link(f"runs/{setting.folder}")
    assert urllib.parse.unquote(link) == f"runs/{setting.folder}/"
    assert "#" not in link
    assert "%252F" in link  # the folder itself is called a%2Fb


def test_one_evaluation_is_drawn_as_points():
    """A line through one point is not seen."""
    drawn = compare_report._curves([result("orf", BASE), result("pm", [0.7] * 5)])
    for axis in drawn.axes:
        assert [c.lines[0].get_marker() for c in axis.containers] == ["o", "o"]
    accuracy = drawn.axes[1].containers
    assert [float(c.lines[0].get_ydata()[0]) for c in accuracy] == pytest.approx([0.51, 0.7])
    assert accuracy[0].lines[0].get_xdata() != accuracy[1].lines[0].get_xdata()


def test_each_seed_has_its_dot_beside_the_interval():
    (found,) = compare_report.comparisons([result("orf", BASE), result("pm", BASE[::-1])], "orf")
    axis = compare_report._differences([found]).axes[0]
    dots = axis.lines[0]
    np.testing.assert_allclose(dots.get_xdata(), np.subtract(BASE[::-1], BASE))
    (mean,) = axis.containers
    assert set(dots.get_ydata()) != set(mean.lines[0].get_ydata())


def test_strings_of_the_config_are_escaped(tmp_path):
    evil = "<script>alert(1)</script>|*"
    values = dataclasses.asdict(small_config())
    values["data"]["dir"] = evil
    contents = {"config": values, "couplings": ["orf"], "seeds": [0], "grid": [], "baseline": "orf"}
    compare_report.write([result("orf", BASE, evil)], contents, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "<script>" not in page
    assert "Differences</h2>" not in page  # there is but one setting
    assert not (tmp_path / "differences.png").exists()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    tags = []
    parser = html.parser.HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.append(tag)
    parser.feed(page)
    assert {"table", "img", "section"} <= set(tags)
    assert r"&lt;script>alert(1)&lt;/script>\|\*" in (tmp_path / "report.md").read_text()
    assert json.loads(json.dumps(contents)) == contents


@pytest.fixture(scope="module")
def one_by_one(tmp_path_factory):
    """Two seeds in turn."""
    out = tmp_path_factory.mktemp("compare") / "in_turn"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(config.SIZES, "XS", TINY)
        text = compare.compare(small_config(), out, couplings=["pm"], num_seeds=2, one_by_one=True)
    return out, text


def test_seeds_in_turn_are_those_that_are_trained_at_once(compared, one_by_one):
    together = metrics.read(compared[0] / "runs" / "pm" / "metrics.jsonl")
    folders = [one_by_one[0] / "runs" / "pm" / f"seed{seed}" for seed in (0, 1)]
    found = in_turn.read(folders)
    assert found.seeds == (0, 1)
    assert [r["step"] for r in found.records] == [r["step"] for r in together]
    for a, b in zip(found.records, together, strict=True):
        np.testing.assert_allclose(a["train_loss"], b["train_loss"][:2], rtol=1e-5)
    last = [metrics.read(folder / "metrics.jsonl")[-1]["eval_accuracy"] for folder in folders]
    assert f"| [pm](runs/pm/) | 2 | {statistics.estimate(last)} |" in one_by_one[1]


def test_a_report_of_any_finished_runs(one_by_one, tmp_path):
    """What differs in their configs is compared; a run that goes on, or twice the same, is none."""
    folders = [one_by_one[0] / "runs" / "pm" / f"seed{seed}" for seed in (0, 1)]
    for folder in tuple(folders):
        other = shutil.copytree(folder, tmp_path / folder.name)
        settings = config.of_run(other)
        config.save(
            dataclasses.replace(
                settings, attention=dataclasses.replace(settings.attention, coupling="orf")
            ),
            other / "config.json",
        )
        folders.append(other)
    text = compare.of_runs(folders, tmp_path / "report", baseline="orf")
    assert "pm against orf" in text
    assert "+0.0000" in text
    assert (tmp_path / "report" / "report.html").exists()
    with pytest.raises(ValueError, match="seed0 has the seed of .*seed0, 0"):
        compare.of_runs([folders[0], folders[0]], tmp_path / "twice")
    log = tmp_path / "seed1" / "metrics.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(ValueError, match="seed1 has not ended"):
        compare.of_runs(folders[2:], tmp_path / "early")
