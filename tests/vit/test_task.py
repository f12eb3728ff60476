"""The seam between the loop and what is learned: the task of docs/howto/add-a-task.md.

The page itself trains it, resumes and finds it again by its name (`test_docs.py`).
"""

import json
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import vit
from performer import alibi
from performer.nnx import PerformerAttention
from tests.support.pages import code
from tests.support.small import read_csv, small_config
from vit import config, convert, data, evaluate, train
from vit.reports import attention_report, metrics
from vit.run import runs
from vit.storage import files
from vit.weights import transfer


def measures(totals):
    mean = totals["loss"] / totals["examples"]
    return {"loss": mean, "deviation": mean**0.5}


PAGE: dict = {}
for cell in code(Path("docs/howto/add-a-task.md").read_text(), "{code-cell}")[:2]:
    exec(cell, PAGE)
TASK = PAGE["task"]._replace(results=measures)


def sequences(number, seed):
    x, y = np.random.default_rng(seed).normal(size=(2, number, 12, 2)).astype(np.float32)
    return [{"x": a, "y": b} for a, b in zip(x, y[..., 0], strict=True)]


DATASET = data.in_memory(sequences(96, 0), sequences(40, 1))
SETTINGS = PAGE["Config"](
    model=PAGE["Model"](num_features=8, coupling="pm"),
    data=config.Batches(batch_size=32),
    optim=config.Optimizer(learning_rate=1e-2, warmup_steps=1),
    num_epochs=1.0,
    log_every=1,
    eval_every=3,
    checkpoint_every=1,
)
"""Three steps; the last of two evaluation batches has eight sequences."""


@pytest.fixture(autouse=True)
def _defined(monkeypatch):
    """The task of the page, with these data and measures, in each test."""
    definition = config.Definition(PAGE["Config"], lambda *_: (DATASET, TASK))
    monkeypatch.setitem(config.tasks.TASKS, SETTINGS.task, definition)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("task") / "run"
    with pytest.MonkeyPatch.context() as patch:
        definition = config.Definition(PAGE["Config"], lambda *_: (DATASET, TASK))
        patch.setitem(config.tasks.TASKS, SETTINGS.task, definition)
        return workdir, train.train(SETTINGS, workdir)


@pytest.mark.thorough
def test_it_is_measured_by_its_own_names_without_padding(finished):
    workdir, record = finished
    log = metrics.read(workdir / "metrics.jsonl")
    names = {"step", "epoch", "seconds", "memory_gib", "gradient_norm"}
    names |= {"learning_rate", "data_seconds"}
    assert set(log[0]) - names == {"train_loss", "sequences_per_second"}
    report = evaluate.evaluate_run(workdir)
    assert (report["step"], report["eval_examples"]) == (3, 40)
    model = runs.restore(workdir).model()
    x, y = (np.stack([r[name] for r in DATASET.evaluation]) for name in ("x", "y"))
    loss = np.mean((np.asarray(nnx.jit(lambda model: model(x))(model), np.float64) - y) ** 2)
    for found in (report, record):
        assert found["eval_loss"] == pytest.approx(loss, rel=1e-5)
        assert found["eval_deviation"] == found["eval_loss"] ** 0.5


@pytest.mark.thorough
def test_the_attention_of_a_task_is_reported_if_it_says_where(finished, tmp_path, monkeypatch):
    def projections(model, batch):
        x, layer = model.embed(batch["x"]), model.attention
        return [(layer.query(x), layer.key(x), layer.value(x))]

    own = TASK._replace(layers=lambda model: [model.attention], projections=projections)
    options = dict(coupling="pm", num_features=8, draws=3)
    run = runs.restore(finished[0])
    batch = run.evaluation_examples(4)
    records = attention_report.rows(own, run.model(), batch, **options)
    text = attention_report.write(records, tmp_path / "own", "own")
    assert "of 2 heads are worse than uniform attention" in text
    assert max(map(len, text.splitlines())) <= 100, "it fits a terminal"
    query, key, _ = projections(run.model(), batch)[0]
    squares = jnp.mean(jnp.sum(query**2 + key**2, axis=-1), axis=(0, 1))
    found = [float(row["(|q|^2 + |k|^2) / 2"]) for row in read_csv(tmp_path / "own.csv")]
    np.testing.assert_allclose(found, squares / 2 / query.shape[-1] ** 0.5, rtol=1e-4)
    with pytest.raises(ValueError, match="or its task does not define them"):
        attention_report.rows(TASK, run.model(), batch, **options)
    for call in (evaluate.report_attention, partial(convert.convert, num_features=[8])):
        with pytest.raises(ValueError, match="'means so far', whose config has no section attent"):
            call(finished[0], tmp_path / "new")


def test_a_run_of_another_task_is_named_before_any_work(tmp_path, monkeypatch):
    """By all functions that read a run: no data are loaded, and no checkpoint is looked for."""
    workdir, new, images = tmp_path / "run", tmp_path / "new", small_config()
    runs.create_folder(workdir, SETTINGS, DATASET)
    of_images = [
        partial(evaluate.evaluate_on, workdir, {"data.eval_split": "train"}),
        partial(evaluate.report_classes, workdir),
        partial(vit.load, workdir),
    ]
    of_any = [
        partial(train.train, images, workdir),
        partial(evaluate.evaluate_run, workdir),
        partial(evaluate.report_attention, workdir, new),
        partial(convert.convert, workdir, new, num_features=[8]),
    ]
    other = partial(transfer.init_from, workdir, images, new)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    cases = [
        *((call, "holds a run of the task 'means so far': vit.load, ") for call in of_images),
        (other, "is a run of the task 'means so far', and the config is of 'classification'"),
        (of_any[0], "holds a run of the task 'means so far', and the config is of 'classif"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
    monkeypatch.delitem(config.tasks.TASKS, SETTINGS.task)
    for call in (*of_images, *of_any[1:]):
        with pytest.raises(ValueError, match=f"^{workdir} holds a run of another .*give --task="):
            call()
    assert sorted(path.name for path in tmp_path.rglob("*")) in (before, sorted([*before, "lock"]))


def test_a_run_names_one_task(tmp_path):
    """In its config.json; its task.json has the same."""
    runs.create_folder(tmp_path, small_config(), DATASET)
    values = json.loads((tmp_path / "config.json").read_text())
    described = files.read_json(tmp_path / "task.json")
    files.write_json(tmp_path / "task.json", described | {"task": "language model"})
    for call in (vit.load, evaluate.evaluate_run):
        with pytest.raises(ValueError, match="of the task 'language model', and the config is of"):
            call(tmp_path)
    del values["task"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="is not a config of this version: 'task'"):
        config.of_run(tmp_path)


def test_the_report_measures_layers_by_their_own_options():
    """A scale is measured: as the default scale with tokens in its place; others are refused."""
    triple = 2 * jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 12, 2, 4)))

    def rows(size, **options):
        rngs = nnx.Rngs(params=0, frequencies=1)
        function = PerformerAttention(8, 4, coupling="orf", num_heads=2, rngs=rngs, **options)
        layer = nnx.MultiHeadAttention(
            2, 8, attention_fn=function, decode=False, use_bias=False, rngs=rngs
        )
        query, key, value = triple
        task = TASK._replace(
            layers=lambda model: [model],
            projections=lambda model, batch: [(size * query, size * key, value)],
        )
        given = dict(coupling="orf", num_features=8, draws=4)
        return attention_report.rows(task, layer, {"x": np.zeros(2)}, **given)

    for given, same in zip(rows(1.0, scale=0.125), rows(0.5), strict=True):
        assert given == pytest.approx(same, rel=1e-4)
    with pytest.raises(ValueError, match="measured without a bias"):
        rows(1.0, bias=alibi(jnp.array([0.5, 0.25])))
