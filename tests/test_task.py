"""The seam between the loop and what is learned: a task that no file of `vit` knows."""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest
from flax import nnx

import vit
from tests.sequences import DATASET, TASK
from tests.small import small_config
from vit import config, convert, evaluate, train
from vit.reports import metrics
from vit.run import runs
from vit.task import SUBJECTS, no_attention
from vit.weights import transfer

SETTINGS = small_config(
    attention=config.Attention(num_features=8, coupling="pm"),
    data=config.Data(batch_size=32),
    optim=config.Optim(learning_rate=3e-2, final_learning_rate=3e-2, warmup_steps=1),
    num_epochs=8.0,
    eval_every=24,
    checkpoint_every=2,
)
"""Three steps an epoch; the last of two evaluation batches has eight sequences."""


def learn(workdir, settings=SETTINGS, **options):
    return train.train(settings, workdir, DATASET, TASK, **options)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("task") / "run"
    return workdir, learn(workdir)


@pytest.mark.thorough
def test_it_is_learned_and_measured_by_its_own_names(finished, capsys):
    workdir, record = finished
    log = metrics.read(workdir / "metrics.jsonl")
    assert [r["step"] for r in log] == list(range(1, 25))
    names = {"step", "epoch", "seconds", "memory_gib", "gradient_norm"}
    names |= {"learning_rate", "data_seconds"}
    assert set(log[0]) - names == {"train_loss", "train_error", "sequences_per_second"}
    assert log[-1]["train_loss"] < 0.7 * log[0]["train_loss"]
    assert record["eval_deviation"] == record["eval_loss"] ** 0.5
    assert (workdir / "learning_curve.png").exists()
    assert learn(workdir) == record
    assert "at step 24 of 24" in capsys.readouterr().out


@pytest.mark.thorough
def test_evaluation_is_that_of_the_sequences_without_padding(finished):
    workdir, record = finished
    report = evaluate.evaluate_run(workdir, DATASET, TASK)
    assert (report["step"], report["eval_examples"]) == (24, 40)
    assert report["eval_loss"] == pytest.approx(record["eval_loss"], rel=1e-5)
    model = runs.restore(workdir, DATASET, TASK).model()
    x, y = (np.stack([r[name] for r in DATASET.evaluation]) for name in ("x", "y"))
    d = np.asarray(nnx.jit(lambda model: model(x))(model), np.float64) - y
    assert report["eval_loss"] == pytest.approx(np.mean(d**2), rel=1e-5)
    assert report["eval_error"] == pytest.approx(np.mean(np.abs(d)), rel=1e-5)
    with pytest.raises(ValueError, match="holds a run of a task without a name, not of"):
        evaluate.evaluate_run(workdir)


@pytest.mark.thorough
def test_the_attention_of_a_task_is_reported_if_it_says_where(finished, tmp_path):
    workdir, _ = finished
    task = dict(images=4, draws=3, dataset=DATASET)
    text = evaluate.report_attention(workdir, tmp_path / "own", task=TASK, **task)
    assert "of 2 heads are worse than uniform attention" in text
    silent = TASK._replace(layers=no_attention)
    with pytest.raises(ValueError, match="does not define its attention layers"):
        evaluate.report_attention(workdir, tmp_path / "none", task=silent, **task)


OTHER = TASK._replace(name="regression", command="python -m regression")


def test_a_run_of_another_task_is_named_before_any_work(tmp_path):
    """By all functions that read a run: no data are loaded, and no checkpoint is looked for."""
    workdir, new = tmp_path / "run", tmp_path / "new"
    runs.claim(workdir, SETTINGS, DATASET, OTHER)
    images = small_config()
    options = dict(coupling=["orf"], calibration="none", num_features=[8])
    calls = [
        partial(train.train, SETTINGS, workdir),
        partial(train.train, images, workdir, *runs.subject(images)),
        partial(transfer.init_from, workdir, images, new),
        partial(evaluate.evaluate_run, workdir),
        partial(evaluate.evaluate_on, workdir, {"data.eval_split": "train"}),
        partial(evaluate.report_classes, workdir),
        partial(evaluate.report_attention, workdir, new),
        partial(convert.convert, workdir, new, **options),
        partial(vit.load, workdir),
    ]
    before = sorted(path.name for path in tmp_path.rglob("*"))
    message = f"^{workdir} holds a run of the task 'regression', not of .*: use python -m reg"
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call()
    assert sorted(path.name for path in tmp_path.rglob("*")) in (before, sorted([*before, "lock"]))


@pytest.mark.thorough
def test_a_run_is_found_again_by_the_name_of_its_task(tmp_path, monkeypatch):
    """Once its module has said how: no data set or task is handed over."""
    monkeypatch.setitem(SUBJECTS, "regression", lambda config, described: (DATASET, OTHER))
    settings = dataclasses.replace(SETTINGS, num_epochs=1.0)
    record = train.train(settings, tmp_path / "run", DATASET, OTHER)
    assert train.train(settings, tmp_path / "run") == record
    found = evaluate.evaluate_run(tmp_path / "run")
    assert found["eval_error"] == pytest.approx(record["eval_error"], rel=1e-5)
    transfer.init_from(tmp_path / "run", SETTINGS, tmp_path / "new", DATASET, OTHER)
    old, new = (runs.restore(tmp_path / name).model() for name in ("run", "new"))
    jax.tree.map(np.testing.assert_array_equal, *(nnx.state(x, nnx.Param) for x in (old, new)))
