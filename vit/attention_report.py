"""How far a model's own attention is from softmax attention, per layer and head.

The queries and keys are those of the model on given examples; the frequencies are drawn anew, by
the coupling and with the calibration of each layer. See `performer.analysis` for what is measured.
"""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from performer.analysis import attention_error
from performer.calibration import Calibration
from performer.nnx import PerformerAttention
from performer.nnx.layer import NO_WINDOW, Window
from vit import data, metrics, report, runs
from vit.task import Task

ERRORS = ("attention error", "standard error", "output error", "row sum error")
"""Those of an estimate, beside those of uniform attention."""


def calibration(attention_fn: Any) -> Calibration | None:
    """Of a layer of attention, if it has one."""
    return attention_fn.calibration if isinstance(attention_fn, PerformerAttention) else None


def rows(
    task: Task,
    model: nnx.Module,
    batch: data.Batch,
    *,
    coupling: str,
    num_features: int,
    draws: int,
    window: Window = NO_WINDOW,
) -> list[metrics.Record]:
    """One record for each layer and head: errors, means over the examples.

    Beside layers with random features exact ones have errors of 0. Each query is compared over all
    keys, also those that causal attention would hide.

    Args:
        task: of the model.
        model: in evaluation mode.
        batch: of examples, as `runs.evaluation_examples` gives.
        coupling: of the frequencies that are drawn.
        num_features: m.
        draws: how many draws.
        window: of near keys that are exact.

    Raises:
        ValueError: when the task says nothing of attention, or for an unknown coupling.
    """
    layers, triples = task.layers(model), nnx.jit(task.projections)(model, batch)
    records, linear = [], [isinstance(x.attention_fn, PerformerAttention) for x in layers]
    for number, (layer, (query, key, value)) in enumerate(zip(layers, triples, strict=True)):
        error = attention_error(
            query,
            key,
            value,
            coupling=coupling,
            num_features=num_features,
            draws=draws,
            calibration=calibration(layer.attention_fn),
            **window._asdict(),
        )
        assert error.output is not None
        assert error.uniform_output is not None
        squared_length = jnp.mean(jnp.sum(query**2 + key**2, axis=-1), axis=(0, 1))
        for head in range(query.shape[2]):
            at = (slice(None), head)
            attention, uniform = (
                error.attention.value[at].mean(),
                error.uniform_attention[at].mean(),
            )
            # The examples share the draws, so that their standard errors do not average out.
            records.append(
                {
                    "layer": number,
                    "head": head,
                    "attention error": float(attention),
                    "standard error": float(error.attention.standard_error[at].mean()),
                    "uniform attention": float(uniform),
                    "worse than uniform": bool(attention > uniform),
                    "output error": float(error.output.value[at].mean()),
                    "uniform output": float(error.uniform_output[at].mean()),
                    "row sum error": float(np.sqrt(np.mean(error.row_sum.value[at] ** 2))),
                    "(|q|^2 + |k|^2) / 2": float(squared_length[head] / 2 / key.shape[-1] ** 0.5),
                }
            )
            if any(linear) and not linear[number]:
                records[-1] |= dict.fromkeys(ERRORS, 0.0) | {"worse than uniform": False}
    return records


def write(records: list[metrics.Record], out: Path, title: str) -> str:
    """Writes `out`.csv, `out`.md and the heat map `out`.png; returns what to print."""
    markdown = report.table(records, out)
    grid = {
        name: np.array([r[name] for r in records]).reshape(records[-1]["layer"] + 1, -1)
        for name in ("attention error", "uniform attention", "worse than uniform")
    }
    drawn, axes = report.figure(out, columns=2)
    shown = grid["attention error"], grid["attention error"] / grid["uniform attention"]
    names = "relative attention error", "the same over that of uniform attention"
    for axis, values, name in zip(axes, shown, names, strict=True):
        image = axis.imshow(values, cmap="viridis", vmin=0)
        drawn.colorbar(image, ax=axis)
        axis.set(title=name, xlabel="head", ylabel="layer")
        axis.set_xticks(range(values.shape[1]))
        axis.set_yticks(range(values.shape[0]))
        for (layer, head), worse in np.ndenumerate(grid["worse than uniform"]):
            text = f"{values[layer, head]:.2g}"
            bright = values[layer, head] > 0.6 * values.max()
            axis.text(
                head,
                layer,
                text + (" *" if worse else ""),
                ha="center",
                va="center",
                fontsize=7,
                color="black" if bright else "white",
            )
    drawn.suptitle(f"{report.literal(title)} (*: worse than uniform attention)")
    report.save(drawn, out)
    worse = [f"{r['layer']}.{r['head']}" for r in records if r["worse than uniform"]]
    verdict = f"worse than uniform attention: {', '.join(worse) or 'none'} (layer.head)"
    return f"{markdown}{len(worse)} of {len(records)} heads are {verdict}\n"


def report_attention(
    workdir: Path,
    out: Path,
    *,
    coupling: str = "",
    num_features: int = 0,
    images: int = 8,
    draws: int = 16,
    exact_window: int | None = None,
    dataset: data.Dataset | None = None,
    task: Task | None = None,
) -> str:
    """Attention errors of a run's layers and heads on its evaluation examples; returns the table.

    Args:
        workdir: of the run. A softmax run is measured without a calibration.
        out: name of the files, without suffix.
        coupling: of the frequencies; that in the run's config if empty.
        num_features: m; likewise if 0.
        images: how many examples.
        draws: of the frequencies.
        exact_window: near keys that are exact, with class token and registers; 0 for none, that in
            the run's config if None.
        dataset: as `runs.restore`.
        task: likewise.

    Raises:
        ValueError: when there is no such run, its task says nothing of attention, or for an unknown
            coupling.
    """
    run = runs.restore(workdir, dataset, task)
    if exact_window is not None:
        run = run.with_window(exact_window)
    config = run.config
    near = config.attention.exact_window
    coupling = coupling or config.attention.coupling
    num_features = num_features or config.attention.num_features
    records = rows(
        run.task,
        run.model(),
        runs.evaluation_examples(run.dataset, config, images),
        coupling=coupling,
        num_features=num_features,
        draws=draws,
        window=Window(near, config.model.num_prefix) if near else NO_WINDOW,
    )
    calibration = config.attention.calibration
    if config.attention.kind == "softmax":
        calibration = "none"
    title = f"{workdir.name}: {coupling}, m = {num_features}, calibration {calibration}"
    title += f", window {near}" * (near > 0)
    return write(records, out, title)
