"""The comparison: runs are those of vit.train, what is stopped resumes, and what is reported."""

import dataclasses
import shutil

import numpy as np
import pytest

from tests.support.small import SHALLOW, read_csv, sized, small_config
from vit import compare, config, evaluate, train
from vit.reports import metrics
from vit.run import loop
from vit.storage import files

_shallow = sized(SHALLOW)


def settings_of(**sections):
    return small_config(checkpoint_every=3, **sections)


def run(out, couplings=("softmax", "pm"), num_seeds=2, **options):
    return compare.compare(settings_of(), out, couplings=couplings, num_seeds=num_seeds, **options)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A whole comparison; tests leave it as it is."""
    out = tmp_path_factory.mktemp("compare") / "out"
    return out, run(out)


@pytest.mark.thorough
def test_a_run_of_a_comparison_is_that_of_vit_train(compared, tmp_path):
    """With the seed of its folder; other commands open it."""
    workdir = compared[0] / "runs" / "pm" / "seed1"
    attention = config.Attention(num_features=8, coupling="pm")
    settings = settings_of(seed=1, attention=attention)
    train.train(settings, tmp_path / "run")
    alone, there = (metrics.read(f / "metrics.jsonl") for f in (tmp_path / "run", workdir))
    for name in ("train_loss", "gradient_norm", "eval_loss"):
        assert [r.get(name) for r in alone] == [r.get(name) for r in there]
    assert config.of_run(workdir) == settings
    assert evaluate.evaluate_run(workdir)["eval_accuracy"] == there[-1]["eval_accuracy"]
    first = metrics.read(workdir.with_name("seed0") / "metrics.jsonl")
    assert first[-1]["eval_loss"] != pytest.approx(there[-1]["eval_loss"], rel=1e-4)
    exact = metrics.read(compared[0] / "runs" / "softmax" / "seed1" / "metrics.jsonl")
    assert exact[0]["train_accuracy"] == there[0]["train_accuracy"]  # the head is 0 at step 1
    assert exact[-1]["train_loss"] != there[-1]["train_loss"]


def test_the_report_has_what_was_asked_for(compared):
    out, text = compared
    assert text == (out / "report.md").read_text()
    assert text.startswith("# Comparison\n\n**Accuracy: no significant difference over 2 seeds")
    for part in ("| softmax | 2 |", "    config.optim.warmup_steps = 1", "    jax = "):
        assert part in text
    rows = {(row["setting"], row["measure"]): row for row in read_csv(out / "results.csv")}
    names = ["accuracy", "loss", "attention error", "uniform attention", "seconds", "images/s"]
    assert [name for setting, name in rows if setting == "pm"] == names
    assert {name for setting, name in rows if setting == "softmax"} < {*names}
    assert "| softmax | pm | loss | " in text
    assert rows["softmax", "loss"]["difference"] != "" == rows["pm", "loss"]["difference"]
    assert ("softmax", "attention error") not in rows
    error, uniform = (float(rows["pm", name]["mean"]) for name in names[2:4])
    assert error != uniform > 0
    runs = read_csv(out / "seeds.csv")
    accuracies = [float(run["eval_accuracy"]) for run in runs if run["coupling"] == "pm"]
    assert float(rows["pm", "accuracy"]["mean"]) == pytest.approx(np.mean(accuracies))
    assert files.read_json(out / "looks.json") == {"looks": [[0, 1]]}
    assert all((out / run["folder"] / "config.json").exists() for run in runs)
    assert (out / "results.png").stat().st_size > 5_000
    assert (out / "curves.png").stat().st_size > 5_000


@pytest.mark.thorough
def test_a_finished_comparison_only_reports(compared, monkeypatch):
    monkeypatch.setattr(loop, "compiled", None)
    assert run(compared[0]) == compared[1]


@pytest.mark.thorough
def test_other_runs_in_the_folder_are_refused_and_more_seeds_are_added(compared, tmp_path):
    out = shutil.copytree(compared[0], tmp_path / "out")
    with pytest.raises(ValueError, match="another --out:\n  num_epochs: .* -> 0.1"):
        compare.compare(settings_of(num_epochs=0.1), out, couplings=["pm"], num_seeds=1)
    text = run(out, couplings=["pm", "softmax"], num_seeds=3)
    assert "| pm | 3 | " in text
    assert "look 2 at this folder has the level 0.0083" in text


@pytest.mark.thorough
def test_a_seed_that_diverges_is_reported_and_the_rest_goes_on(compared, tmp_path, monkeypatch):
    """Before the first record of its log; it is not trained again."""
    out, seeds = shutil.copytree(compared[0], tmp_path / "out"), []
    shutil.rmtree(out / "runs" / "pm" / "seed0")

    def poisoned(settings, workdir, original=loop.train):
        seeds.append(settings.seed)
        if settings.seed == 0:
            config.save(settings, files_of(workdir) / "config.json")
            raise FloatingPointError("the loss is nan")
        return original(settings, workdir)

    def files_of(workdir):
        workdir.mkdir(parents=True)
        return workdir

    monkeypatch.setattr(loop, "train", poisoned)
    for _ in range(2):
        text = run(out, couplings=["pm"])
        assert "Diverged, and left out: pm, seed 0, after step 0." in text
    assert seeds == [0, 1, 1]
    assert {row["seeds"] for row in read_csv(out / "results.csv")} == {"1"}
    assert read_csv(out / "seeds.csv")[0]["diverged_after_step"] == "0"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(couplings=["orff"]), "unknown coupling 'orff'; did you mean 'orf'"),
        (dict(num_seeds=0), "--seeds=0 must be at least 1"),
        (dict(grid=["config.attention.num_feature=8"]), "mean 'config.attention.num_features'"),
        (dict(grid=["config.seed=1,2"]), "seeds and couplings have flags"),
        (dict(grid=["config.optim.warmup_steps=99"]), "warmup_steps=99 .* whole run has 3"),
    ],
)
def test_bad_input_is_named_before_any_work(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "out", **(dict(couplings=["orf"], num_seeds=1) | options))
    assert not (tmp_path / "out").exists()


@pytest.mark.thorough
def test_a_report_of_any_finished_runs(compared, tmp_path):
    """What differs in their configs is compared; a run that goes on, or twice the same, is none."""
    folders = [compared[0] / "runs" / "pm" / f"seed{seed}" for seed in (0, 1)]
    for folder in tuple(folders):
        other = shutil.copytree(folder, tmp_path / folder.name)
        attention = dataclasses.replace(config.of_run(other).attention, coupling="orf")
        changed = dataclasses.replace(config.of_run(other), attention=attention)
        config.save(changed, other / "config.json")
        folders.append(other)
    text = compare.of_runs(folders, tmp_path / "report", baseline="orf")
    assert "| pm | 2 |" in text
    assert "| pm | orf | accuracy | +0.0000 |" in text
    with pytest.raises(ValueError, match="seed0 has the setting and the seed of .*seed0, 0"):
        compare.of_runs([folders[0], folders[0]], tmp_path / "twice")
    changed = dataclasses.replace(config.of_run(folders[2]), log_every=3)
    config.save(changed, folders[2] / "config.json")
    with pytest.raises(ValueError, match="--baseline=orf has no run with log_every=1"):
        compare.of_runs([folders[0], folders[2]], tmp_path / "unpaired", baseline="orf")
    task = files.read_json(folders[0] / "task.json")
    pair = []
    for name, epochs in (("first", 3.2 / 44), ("other", 3.3 / 44)):
        pair.append(shutil.copytree(folders[0], tmp_path / name))
        files.write_json(pair[-1] / "task.json", task | {"fingerprint of the data": name})
        changed = dataclasses.replace(config.of_run(pair[-1]), num_epochs=epochs)
        config.save(changed, pair[-1] / "config.json")
    with pytest.raises(ValueError, match="other and .*first have the same seed but other examples"):
        compare.of_runs(pair, tmp_path / "data")
    alone = compare.of_runs(pair[:1], tmp_path / "alone")
    assert "One setting: nothing is compared." in alone
    assert "results.png" not in alone
    described = task | {"task": "language model"}
    shutil.copytree(folders[0], tmp_path / "text")
    files.write_json(tmp_path / "text" / "task.json", described)
    with pytest.raises(ValueError, match="text holds a run of the task 'language model', and"):
        compare.of_runs([tmp_path / "text"], tmp_path / "texts")
    log = tmp_path / "seed1" / "metrics.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(ValueError, match="seed1 has not ended"):
        compare.of_runs(folders[3:], tmp_path / "early")
