"""The seam between the loop and what is learned: the task of docs/howto/add-a-task.md.

The page itself trains it, resumes and finds it again by its name (`test_docs.py`).
"""

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
from vit.weights import transfer


def measures(totals):
    mean = totals["loss"] / totals["examples"]
    return {"loss": mean, "deviation": mean**0.5}


PAGE: dict = {}
exec(code(Path("docs/howto/add-a-task.md").read_text(), "{code-cell}")[0], PAGE)
TASK = PAGE["task"]._replace(name="", results=measures)


def sequences(number, seed):
    x, y = np.random.default_rng(seed).normal(size=(2, number, 12, 2)).astype(np.float32)
    return [{"x": a, "y": b} for a, b in zip(x, y[..., 0], strict=True)]


DATASET = data.in_memory(sequences(96, 0), sequences(40, 1))
SETTINGS = small_config(attention=config.Attention(num_features=8, coupling="pm"), num_epochs=1.0)
"""Three steps; the last of two evaluation batches has eight sequences."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("task") / "run"
    return workdir, train.train(SETTINGS, workdir, DATASET, TASK)


@pytest.mark.thorough
def test_it_is_measured_by_its_own_names_without_padding(finished):
    workdir, record = finished
    log = metrics.read(workdir / "metrics.jsonl")
    names = {"step", "epoch", "seconds", "memory_gib", "gradient_norm"}
    names |= {"learning_rate", "data_seconds"}
    assert set(log[0]) - names == {"train_loss", "sequences_per_second"}
    report = evaluate.evaluate_run(workdir, DATASET, TASK)
    assert (report["step"], report["eval_examples"]) == (3, 40)
    model = runs.restore(workdir, DATASET, TASK).model()
    x, y = (np.stack([r[name] for r in DATASET.evaluation]) for name in ("x", "y"))
    loss = np.mean((np.asarray(nnx.jit(lambda model: model(x))(model), np.float64) - y) ** 2)
    for found in (report, record):
        assert found["eval_loss"] == pytest.approx(loss, rel=1e-5)
        assert found["eval_deviation"] == found["eval_loss"] ** 0.5
    with pytest.raises(ValueError, match="holds a run of a task without a name, not of"):
        evaluate.evaluate_run(workdir)


@pytest.mark.thorough
def test_the_attention_of_a_task_is_reported_if_it_says_where(finished, tmp_path):
    def projections(model, batch):
        x, layer = model.embed(batch["x"]), model.attention
        return [(layer.query(x), layer.key(x), layer.value(x))]

    more = dict(layers=lambda model: [model.attention], projections=projections)
    options = dict(images=4, draws=3, dataset=DATASET)
    report = partial(evaluate.report_attention, finished[0], tmp_path / "own", **options)
    own = TASK._replace(**more)
    assert "of 2 heads are worse than uniform attention" in report(task=own)
    model = runs.restore(finished[0], DATASET, own).model()
    batch = runs.evaluation_examples(DATASET, SETTINGS, 4)
    query, key, _ = projections(model, batch)[0]
    squares = jnp.mean(jnp.sum(query**2 + key**2, axis=-1), axis=(0, 1))
    found = [float(row["(|q|^2 + |k|^2) / 2"]) for row in read_csv(tmp_path / "own.csv")]
    np.testing.assert_allclose(found, squares / 2 / query.shape[-1] ** 0.5, rtol=1e-4)
    with pytest.raises(ValueError, match="does not define its attention layers"):
        report(task=TASK)


def test_a_run_of_another_task_is_named_before_any_work(tmp_path):
    """By all functions that read a run: no data are loaded, and no checkpoint is looked for."""
    workdir, new = tmp_path / "run", tmp_path / "new"
    other = TASK._replace(name="regression", command="python -m regression")
    runs.claim(workdir, SETTINGS, DATASET, other)
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
