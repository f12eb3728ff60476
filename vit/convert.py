"""Replaces the attention of a trained softmax ViT by a Performer's, without retraining.

    python -m vit.convert --workdir=runs/softmax --coupling=orf-antithetic,pm --calibration=full \\
        --num_features=32,64,128 --out=runs/converted

Queries and keys of a few hundred training images calibrate the estimate (`performer.calibration`);
parameters stay as they are. The folder `--out` then holds `conversion.csv`, `.md` and `.png`:
accuracy and attention error against m for every coupling, with and without the calibration, over
several draws of the frequencies, between the softmax original and uniform attention, which looks
at nothing.

The folder is also a run: the first coupling, calibrated, with the most features.
`python -m vit.evaluate --workdir=OUT` takes it, and `python -m vit.train --workdir=OUT` fine-tunes
it, for `--num_epochs` at the peak rate `--learning_rate`.
"""

import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from flax import nnx
from jaxtyping import Array

from performer import couplings, performer_attention
from performer.analysis import attention_error
from performer.calibration import Moments, fit, for_coupling, pair_moments
from vit import checkpoint, data, metrics, optim, report
from vit import config as configs
from vit.attention_report import projections
from vit.evaluate import evaluation_images, restore_model
from vit.model import ViT, random_streams
from vit.train import claim, count, evaluate

ERROR_IMAGES = 8
"""Evaluation images whose attention errors are measured."""


def measure(model: ViT, batches: Iterable[Array]) -> list[Moments]:
    """What each layer is calibrated with: means over all images, (heads, 2 h + 1, 2 h + 1).

    Args:
        model: with softmax attention, in evaluation mode.
        batches: of images (b, size, size, channels), all of one shape.
    """
    moments = nnx.jit(
        lambda model, images: [pair_moments(q, k) for q, k, _ in projections(model, images)]
    )
    measured = [moments(model, jnp.asarray(images)) for images in batches]
    return [jnp.mean(jnp.stack(layer), axis=0) for layer in zip(*measured, strict=True)]


def performer_of(
    model: ViT, config: configs.Config, dataset: data.Dataset, moments: Sequence[Moments]
) -> ViT:
    """The same parameters with random-feature attention, in evaluation mode.

    Args:
        model: trained, with softmax attention.
        config: what `attention` the new model has, with the seed of its frequencies; the rest as
            of the trained one.
        dataset: of the run.
        moments: from `measure`.
    """
    new = ViT(
        config,
        num_classes=dataset.num_classes,
        channels=dataset.channels,
        rngs=random_streams(config.seed),
    )
    nnx.update(new, nnx.state(model, nnx.Param))
    for block, of_layer in zip(new.blocks, moments, strict=True):
        attention = block.attention.attention_fn
        if attention.calibration is not None:
            attention.calibrate(jnp.mean(of_layer, 0) if config.attention.share_heads else of_layer)
    return new


def accuracy(
    model: ViT,
    config: configs.Config,
    dataset: data.Dataset,
    attention_fn: Callable[..., Array],
    *of_layers: Any,
) -> float:
    """Accuracy on the evaluation split with another attention.

    Args:
        model: in evaluation mode.
        config: of its run.
        dataset: of its run.
        attention_fn: (query, key, value, *of_layer) -> output.
        of_layers: sequences with one entry for each layer: what is passed to `attention_fn`.
    """
    graph, state = nnx.split(model)
    count = partial(_count, graph, attention_fn, state, of_layers)
    return evaluate(count, data.eval_batches(dataset, config.data))["eval_accuracy"]


@partial(jax.jit, static_argnums=(0, 1))
def _count(graph, attention_fn, state, of_layers, batch):
    model = nnx.merge(graph, state)
    for layer, block in enumerate(model.blocks):
        arguments = [x[layer] for x in of_layers]
        block.attention.attention_fn = lambda query, key, value, arguments=arguments, **_: (
            attention_fn(query, key, value, *arguments)
        )
    return count(model, batch)


def _uniform(query: Array, key: Array, value: Array) -> Array:
    del query, key
    return jnp.broadcast_to(jnp.mean(value, axis=-3, keepdims=True), value.shape)


def _performer(query, key, value, frequencies, calibration):
    output = performer_attention(query, key, value, frequencies, calibration=calibration)
    return cast(Array, output)


def compare(
    model: ViT,
    config: configs.Config,
    dataset: data.Dataset,
    moments: Sequence[Moments],
    *,
    names: Sequence[str],
    methods: Sequence[str],
    num_features: Sequence[int],
    draws: int,
) -> Iterator[metrics.Record]:
    """One record for each coupling, method and m: accuracy over draws, attention error by layer.

    The first two records are of softmax and of uniform attention. Attention errors are those on
    the inputs that the layers have with softmax attention, means over heads and images.
    """
    triples = nnx.jit(projections)(model, evaluation_images(dataset, config, ERROR_IMAGES))
    depth, heads, head_dim = len(triples), triples[0][1].shape[-2], triples[0][1].shape[-1]

    def record(coupling, method, m, accuracies, errors):
        spread = np.std(accuracies, ddof=1) / len(accuracies) ** 0.5 if accuracies[1:] else 0.0
        named = {"coupling": coupling, "calibration": method, "m": m}
        of_layers = {f"error layer {i}": float(error) for i, error in enumerate(errors)}
        return {
            **named,
            "accuracy": float(np.mean(accuracies)),
            "standard error": float(spread),
            "attention error": float(np.mean(errors)),
            **of_layers,
        }

    error = partial(attention_error, draws=max(draws, 8))
    uniform_errors = [
        error(q, k, coupling="iid", num_features=1, draws=3).uniform_attention.mean()
        for q, k, _ in triples
    ]
    original = accuracy(model, config, dataset, nnx.dot_product_attention)
    yield record("softmax", "", 0, [original], [0.0] * depth)
    yield record("uniform", "", 0, [accuracy(model, config, dataset, _uniform)], uniform_errors)
    for name, method, m in itertools.product(names, methods, num_features):
        fitted = [fit(x, for_coupling(method, name)) for x in moments]
        accuracies = []
        for draw in range(draws):
            keys = jax.random.split(jax.random.key(draw), depth)
            frequencies = [couplings.draw(name, key, m, head_dim, heads) for key in keys]
            accuracies.append(accuracy(model, config, dataset, _performer, frequencies, fitted))
        errors = [
            error(q, k, coupling=name, num_features=m, calibration=c).attention.value.mean()
            for (q, k, _), c in zip(triples, fitted, strict=True)
        ]
        yield record(name, method, m, accuracies, errors)


def plot(records: Sequence[metrics.Record], out: Path) -> None:
    """Accuracy and attention error against m, a line for each coupling and method."""
    drawn, axes = report.figure(out, columns=2)
    (softmax, uniform), rest = records[:2], records[2:]
    lines = dict.fromkeys((r["coupling"], r["calibration"]) for r in rest)
    for number, line in enumerate(lines):
        points = [r for r in rest if (r["coupling"], r["calibration"]) == line]
        label = f"{line[0]}, {line[1]}" if line[1] != "none" else line[0]
        style = {"label": label, "marker": "o", "markersize": 4, "color": f"C{number}"}
        style["linestyle"] = "--" if line[1] == "none" else "-"
        sizes = [r["m"] for r in points]
        axes[0].errorbar(
            sizes, [r["accuracy"] for r in points], [r["standard error"] for r in points], **style
        )
        axes[1].plot(sizes, [r["attention error"] for r in points], **style)
    for end, style in [(softmax, "-"), (uniform, ":")]:
        axes[0].axhline(end["accuracy"], color="black", linestyle=style, label=end["coupling"])
    axes[1].axhline(uniform["attention error"], color="black", linestyle=":", label="uniform")
    report.log_log(axes[1], sorted({r["m"] for r in rest}))
    axes[0].set(xscale="log", xlabel="m", ylabel="accuracy, not retrained")
    axes[0].set_xticks(sorted({r["m"] for r in rest}), sorted({r["m"] for r in rest}))
    axes[0].minorticks_off()
    axes[0].legend(fontsize="small")
    axes[1].set(ylabel="relative attention error")
    report.save(drawn, out)


def convert(
    workdir: Path,
    out: Path,
    *,
    names: Sequence[str],
    method: str,
    num_features: Sequence[int],
    draws: int = 4,
    images: int = 256,
    eval_images: int = 0,
    num_epochs: float = 1.0,
    learning_rate: float = 1e-4,
) -> str:
    """Writes the report and the converted run, and returns the table.

    Args:
        workdir: of a run with softmax attention.
        out: folder of the report and the converted run; must not hold another run.
        names: couplings that are compared; the first is that of the converted run.
        method: of calibration; "none" stands beside it.
        num_features: each m; the largest is that of the converted run.
        draws: of the frequencies, for each coupling, method and m.
        images: training images to calibrate with.
        eval_images: how many to measure accuracy on; 0 for all.
        num_epochs: of fine-tuning, for the config of the converted run.
        learning_rate: likewise.

    Raises:
        ValueError: before any work, for a run that has no softmax attention, an unknown coupling or
            method, sizes that a coupling does not admit, or an `out` that holds another run.
    """
    config = configs.of_run(workdir)
    if config.attention.kind != "softmax":
        raise ValueError(
            f"{workdir} was trained with config.attention.kind={config.attention.kind!r}; only a"
            " run with 'softmax' can be converted"
        )
    for number, least in [
        (images, 1),
        (draws, 1),
        (eval_images, 0),
        *((m, 1) for m in num_features),
    ]:
        if number < least:
            raise ValueError(f"images, draws and num_features must be positive, got {number}")
    methods = ["none"] if method == "none" else ["none", method]
    for name, m in itertools.product(names, num_features):
        attention = configs.Attention(coupling=name, num_features=m, calibration=method)
        configs.validate(dataclasses.replace(config, attention=attention))
    optimiser = dataclasses.replace(
        config.optim, learning_rate=learning_rate, warmup_epochs=0.1 * num_epochs
    )
    new_config = dataclasses.replace(
        config,
        attention=configs.Attention(
            coupling=names[0], num_features=max(num_features), calibration=method
        ),
        optim=optimiser,
        num_epochs=num_epochs,
    )
    if (out / "checkpoints").exists():
        raise ValueError(f"{out} holds a run already; take another --out")
    _, dataset, model = restore_model(workdir)
    claim(out, new_config)
    moments = measure(model, _training_images(dataset, config, images))
    save_run(model, new_config, dataset, moments, out)
    if eval_images:
        count = min(eval_images, len(dataset.evaluation))
        dataset = dataset._replace(evaluation=[dataset.evaluation[i] for i in range(count)])
    records = []
    with metrics.progress_bar() as bar:
        task = bar.add_task(
            "convert", total=2 + len(names) * len(methods) * len(num_features), status=""
        )
        for record in compare(
            model,
            config,
            dataset,
            moments,
            names=names,
            methods=methods,
            num_features=num_features,
            draws=draws,
        ):
            records.append(record)
            bar.update(task, advance=1, status=f"{record['coupling']} {record['accuracy']:.4f}")
    plot(records, out / "conversion")
    return report.table(records, out / "conversion")


def save_run(
    model: ViT, config: configs.Config, dataset: data.Dataset, moments: Sequence[Moments], out: Path
) -> None:
    """The converted model at step 0 of a run with that config, its optimiser and data fresh."""
    steps_per_epoch = len(dataset.train) // config.data.batch_size
    num_steps = max(1, round(config.num_epochs * steps_per_epoch))
    rate = optim.schedule(config.optim, steps_per_epoch, num_steps)
    new = performer_of(model, config, dataset, moments)
    optimizer = nnx.Optimizer(new, optim.optimizer(config.optim, rate), wrt=nnx.Param)
    batches = iter(data.train_batches(dataset, config.data, config.seed))
    with checkpoint.open_checkpoints(out) as checkpoints:
        checkpoint.save(checkpoints, 0, nnx.state((new, optimizer)), batches)


def _training_images(dataset: data.Dataset, config: configs.Config, number: int) -> Iterator[Array]:
    """That many training images as evaluation sees them, spread over the split, in batches."""
    number = min(number, len(dataset.train))
    size = min(number, config.data.batch_size)
    step = len(dataset.train) // number
    chosen = [dataset.train[i * step] for i in range(number // size * size)]
    sizes = dataclasses.replace(config.data, batch_size=size)
    for batch in data.eval_batches(dataset._replace(evaluation=chosen), sizes):
        yield batch["image"]


def main(_: list[str]) -> None:
    """The command line."""
    logging.set_verbosity(logging.WARNING)
    workdir = Path(str(_WORKDIR.value))
    out = Path(_OUT.value or f"{workdir}-performer")
    try:
        table = convert(
            workdir,
            out,
            names=_COUPLING.value,
            method=str(_CALIBRATION.value),
            num_features=[int(m) for m in _NUM_FEATURES.value],
            draws=_DRAWS.value,
            images=_IMAGES.value,
            eval_images=_EVAL_IMAGES.value,
            num_epochs=_NUM_EPOCHS.value,
            learning_rate=_LEARNING_RATE.value,
        )
    except ValueError as error:
        sys.exit(f"ValueError: {error}")
    print(f"{table}\nThe report and the converted run are in {out}.")


if __name__ == "__main__":
    _WORKDIR = flags.DEFINE_string("workdir", None, "run with softmax attention", required=True)
    _OUT = flags.DEFINE_string("out", "", "converted run; <workdir>-performer if none")
    _COUPLING = flags.DEFINE_list("coupling", ["orf-antithetic"], "names; the run takes the first")
    _CALIBRATION = flags.DEFINE_string("calibration", "full", "none, shift, shift+scale, full, ...")
    _NUM_FEATURES = flags.DEFINE_list("num_features", ["32", "64", "128"], "each m")
    _DRAWS = flags.DEFINE_integer("draws", 4, "draws of the frequencies", lower_bound=1)
    _IMAGES = flags.DEFINE_integer("images", 256, "to calibrate with", lower_bound=1)
    _EVAL_IMAGES = flags.DEFINE_integer("eval_images", 0, "0: all", lower_bound=0)
    _NUM_EPOCHS = flags.DEFINE_float("num_epochs", 1.0, "of fine-tuning with vit.train")
    _LEARNING_RATE = flags.DEFINE_float("learning_rate", 1e-4, "likewise")
    app.run(main)
