"""Errors of a model's own attention against softmax attention, per layer and head.

Queries and keys are the model's on given examples; the frequencies are drawn anew, by the
coupling and with the calibration of each layer. `performer.analysis` defines the errors.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from performer import features
from performer.analysis import attention_error
from performer.attention.values import NOT_EXACT, Exact
from performer.calibration import calibrate
from performer.nnx import PerformerAttention
from performer.refinement import LEARNED
from vit import config as configs
from vit import data
from vit.reports import metrics, report
from vit.run import runs
from vit.task import Task, Triple

ERRORS = ("attention error", "standard error", "output error", "row sum error")
EXACT = dict.fromkeys(ERRORS, 0.0) | {"worse than uniform": False}
"""Columns of a layer of exact attention if others have random features."""


def rows(
    task: Task,
    model: nnx.Module,
    batch: data.Batch,
    *,
    coupling: str,
    num_features: int,
    draws: int,
    exact: Exact = NOT_EXACT,
) -> list[metrics.Record]:
    """Return one record for each layer and head: errors, means over the examples.

    Exact layers have errors of 0 if others have random features. Each query is compared over all
    keys, also those that causal attention would hide.

    Args:
        task: task of the model.
        model: in evaluation mode.
        batch: examples, as `Run.evaluation_examples` gives.
        coupling: coupling of the frequencies that are drawn.
        num_features: m of layers with softmax attention.
        draws: number of draws.
        exact: pairs that are exact, with features for the others, in layers of softmax attention.

    Raises:
        ValueError: if the task does not describe its attention, the coupling is unknown, or the
            features are not positive: other maps are not measured.
        ValueError: for a layer with a bias, which is not measured.
    """
    functions = [layer.attention_fn for layer in task.layers(model)]
    linear = [isinstance(function, PerformerAttention) for function in functions]
    for function in itertools.compress(functions, linear):
        if function.features.map not in (features.positive, LEARNED):
            raise ValueError("attention errors are measured for the feature map positive alone")
        if function.biases != (None, None):
            raise ValueError("attention errors are measured without a bias, and a layer has one")
    triples, records = nnx.jit(task.projections)(model, batch), []
    for number, (function, (query, key, value)) in enumerate(zip(functions, triples, strict=True)):
        m, calibration, pairs, scale = num_features, None, exact, None
        if linear[number]:
            m, calibration, pairs = function.num_features, function.calibration, function.exact
            scale = function.options.get("scale")
        error = attention_error(
            query,
            key,
            value,
            coupling=coupling,
            num_features=m,
            draws=draws,
            calibration=calibration,
            exact=pairs,
            scale=scale,
        )
        assert error.output is not None
        assert error.uniform_output is not None
        scale = scale or key.shape[-1] ** -0.5
        squared_length = scale * jnp.mean(jnp.sum(query**2 + key**2, axis=-1), axis=(0, 1))
        for head in range(query.shape[2]):
            # The examples share the draws: averaging does not reduce their standard errors.
            attention, standard_error, uniform, output, uniform_output = (
                float(x[:, head].mean())
                for x in (
                    *error.attention,
                    error.uniform_attention,
                    error.output.value,
                    error.uniform_output,
                )
            )
            row = {
                "layer": number,
                "head": head,
                "attention error": attention,
                "standard error": standard_error,
                "uniform attention": uniform,
                "worse than uniform": attention > uniform,
                "output error": output,
                "uniform output": uniform_output,
                "row sum error": float(np.sqrt(np.mean(error.row_sum.value[:, head] ** 2))),
                "(|q|^2 + |k|^2) / 2": float(squared_length[head] / 2),
            }
            is_exact = any(linear) and not linear[number]
            records.append(row | (EXACT if is_exact else {}))
    return records


def errors_on(
    triples: Sequence[Triple],
    others: Sequence[Triple],
    config: Any,
    *,
    draws: int,
    seed: int,
    is_causal: bool = False,
) -> tuple[float, float]:
    """Return the attention errors of new features and of uniform attention, means over all heads.

    Args:
        triples: queries, keys and values of each layer, of any run.
        others: the same of other examples, to which the features are calibrated.
        config: config whose coupling, sizes and calibration the features have.
        draws: draws of the frequencies.
        seed: seed of the draws.
        is_causal: True if a query attends only to keys up to its own position.

    Raises:
        ValueError: for features that are not positive or are learned by attention transfer, or
            another number of layers.
    """
    attention, blocks = config.attention, configs.blocks(config)
    if attention.feature_map != "positive" or any(block.transferred for block in blocks):
        raise ValueError("attention errors are measured for the feature map positive alone")
    if len(blocks) != len(triples):
        raise ValueError(f"a model of {len(triples)} layers has no features for {len(blocks)}")
    errors, uniforms = [], []
    for block, (query, key, _), (*fitted, _) in zip(blocks, triples, others, strict=True):
        pairs = configs.exact(config, block)
        options: Any = dict(coupling=attention.coupling, is_causal=is_causal)
        calibration = calibrate(*fitted, method=block.calibration, mixed=any(pairs), **options)
        options |= dict(num_features=block.num_features, draws=draws, seed=seed, exact=pairs)
        error = attention_error(query, key, calibration=calibration, **options)
        is_exact = block.kind == "softmax"
        errors.append(0.0 if is_exact else float(error.attention.value.mean()))
        uniforms.append(float(error.uniform_attention.mean()))
    return float(np.mean(errors)), float(np.mean(uniforms))


LEGEND = """\
error, uniform: relative squared error of the attention matrix, and of uniform attention;
output, uniform output: the same of the layer's output; row sum: error of a normaliser;
squared norm: mean of |q|^2 and |k|^2, each after the factor sqrt(scale)
"""


def narrow(record: metrics.Record) -> dict[str, Any]:
    """Return a record as a line of a table that fits a terminal."""
    error = f"{record['attention error']:.4g} ± {record['standard error']:.2g}"
    return {
        "layer.head": f"{record['layer']}.{record['head']}",
        "error": error,
        "uniform": record["uniform attention"],
        "output": record["output error"],
        "uniform output": record["uniform output"],
        "row sum": record["row sum error"],
        "squared norm": record["(|q|^2 + |k|^2) / 2"],
    }


def write(records: list[metrics.Record], out: Path, title: str) -> str:
    """Write `out`.csv, `out`.md and the heat map `out`.png, and return the text to print."""
    markdown = report.table(records, out, shown=[*map(narrow, records)])
    error, uniform, is_worse = (
        np.array([r[name] for r in records]).reshape(records[-1]["layer"] + 1, -1)
        for name in ("attention error", "uniform attention", "worse than uniform")
    )
    with report.style():
        drawn, axes = report.figure(out, columns=2)
        names = "relative attention error", "relative to uniform attention"
        for axis, values, name in zip(axes, (error, error / uniform), names, strict=True):
            drawn.colorbar(axis.imshow(values, cmap="viridis", vmin=0), ax=axis)
            axis.set(title=name, xlabel="head", ylabel="layer")
            axis.grid(False)
            axis.set_xticks(range(values.shape[1]))
            axis.set_yticks(range(values.shape[0]))
            for (layer, head), worse in np.ndenumerate(is_worse):
                text = f"{values[layer, head]:.2g}" + " *" * bool(worse)
                color = "black" if values[layer, head] > 0.6 * values.max() else "white"
                axis.text(head, layer, text, ha="center", va="center", fontsize=7, color=color)
        drawn.suptitle(f"{title} (*: worse than uniform attention)")
        report.save(drawn, out)
    heads = [f"{r['layer']}.{r['head']}" for r in records if r["worse than uniform"]]
    verdict = f"worse than uniform attention: {', '.join(heads) or 'none'} (layer.head)"
    return f"{markdown}{LEGEND}{len(heads)} of {len(records)} heads are {verdict}\n"


def report_attention(
    workdir: Path,
    out: Path,
    *,
    images: int = 8,
    draws: int = 16,
    dataset: data.Dataset | None = None,
    step: int | str | None = None,
) -> str:
    """Write the attention errors of a run on its evaluation examples, and return the table.

    Args:
        workdir: folder of the run. A softmax run is measured without a calibration.
        out: name of the files, without suffix.
        images: number of examples.
        draws: draws of the frequencies.
        dataset: as `runs.restore`.
        step: as `runs.restore`.

    Raises:
        ValueError: if there is no such run, or its task does not describe its attention.
    """
    check_attention(workdir, configs.of_run(workdir))
    run = runs.restore(workdir, dataset, step)
    config, attention = run.config, run.config.attention
    records = rows(
        run.task,
        run.model(),
        run.evaluation_examples(images),
        coupling=attention.coupling,
        num_features=attention.num_features,
        draws=draws,
        exact=configs.exact(config, configs.blocks(config)[0]),
    )
    calibration = "none" if attention.kind == "softmax" else attention.calibration
    title = f"{workdir.name}: {attention.coupling}, m = {attention.num_features}"
    title += f", calibration {calibration}"
    title += f", window {attention.exact_window}" * (attention.exact_window > 0)
    return remark(workdir, config) + write(records, out, title)


def check_attention(workdir: Path, config: configs.TrainConfig) -> None:
    """Raise ValueError unless the config of a run has the section `attention`."""
    if "attention" not in configs.sections(type(config)):
        raise ValueError(
            f"{workdir} holds a run of the task {config.task!r}, whose config has no section"
            " attention: its model has no attention to report, draw or convert"
        )


def remark(workdir: Path, config: Any) -> str:
    """Return a sentence on the errors where they are not of the attention that the run computes."""
    attention = config.attention
    if attention.kind == "softmax":
        return (
            "The run has softmax attention. These are the errors that features would have:"
            f" {attention.coupling}, m = {attention.num_features}, not calibrated.\n\n"
        )
    if (workdir / "heads.csv").exists():  # of vit.convert
        return (
            f"These are errors of new draws. {workdir / 'heads.csv'} has those of the run's own"
            " frequencies, which may be refined.\n\n"
        )
    return ""
