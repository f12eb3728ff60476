"""Trains a Vision Transformer; the same command resumes a stopped run.

    python -m vit.train --config=experiments/configs/digits.py --workdir=runs/pm \\
        --config.attention.coupling=pm

The folder of the run holds `config.json`, `metrics.jsonl`, `learning_curve.png` and `checkpoints/`.
"""

import contextlib
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags, logging
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from ml_collections import config_flags

from performer.nnx import redraw
from vit import checkpoint, data, metrics, optim
from vit import config as configs
from vit.model import ViT, random_streams

Counts = dict[str, jax.Array]


def train(config: configs.Config, workdir: Path) -> metrics.Record:
    """Trains to the end, from the last checkpoint in `workdir` if there is one.

    Ctrl-C and SIGTERM save a checkpoint and exit; the same call resumes, and a resumed run ends
    with the same parameters as an uninterrupted one (on CPU bit for bit).

    Returns:
        The last record of the log: step, epoch, seconds, train_loss, eval_loss, eval_accuracy, ...

    Raises:
        ValueError: for a config that cannot work, or a workdir that holds another run.
        FloatingPointError: when the loss is not finite; the last checkpoint is kept.
    """
    # What is asked for, checked before anything is written.
    configs.validate(config)
    dataset = data.load(config.data)
    steps_per_epoch, num_steps = length(config, dataset)
    rate = optim.schedule(config.optim, num_steps)
    replicated, split = shardings(config.data.batch_size)
    claim(workdir, config)
    log = workdir / "metrics.jsonl"

    # The model and its optimiser, on all devices; each batch is split among the devices.
    graph, state = create(config, dataset, rate)
    state = jax.device_put(state, replicated)
    redraw_key = random_streams(config.seed).frequencies.key[...]
    train_fn = jax.jit(
        partial(train_step, graph, config.optim.label_smoothing, redraw_key), donate_argnums=0
    )
    eval_fn = jax.jit(partial(eval_step, graph))
    batches = iter(data.train_batches(dataset, config.data, config.seed))

    with contextlib.ExitStack() as stack:
        # Where the run stands.
        checkpoints = stack.enter_context(checkpoint.open_checkpoints(workdir))
        interrupted = stack.enter_context(interruption())
        step = 0
        if checkpoints.latest is not None:
            step = checkpoints.latest.step
            state = checkpoint.restore(checkpoints, state, batches)
            print(f"{workdir}: at step {step} of {num_steps}")
        metrics.keep_up_to(log, step)
        start = time.perf_counter() - sum(record["seconds"] for record in metrics.read(log)[-1:])

        # The loop: a stretch of steps, a line in the log, and what is due.
        bar = stack.enter_context(metrics.progress_bar())
        task = bar.add_task("train", total=num_steps, completed=step, status="compiling")
        while step < num_steps:
            stretch, stretch_start = [], time.perf_counter()
            for _ in range(min(config.log_every - step % config.log_every, num_steps - step)):
                state, step_metrics = train_fn(state, jax.device_put(next(batches), split))
                stretch.append(step_metrics)
                bar.advance(task)
            step += len(stretch)
            record = {"step": step, "epoch": step / steps_per_epoch, **_mean(stretch)}
            if not math.isfinite(record["train_loss"]):
                raise FloatingPointError(
                    f"the loss is {record['train_loss']} at step {step}; lower"
                    f" config.optim.learning_rate={config.optim.learning_rate} and start again"
                    " with another --workdir"
                )
            seconds = time.perf_counter() - stretch_start
            record["images_per_second"] = len(stretch) * config.data.batch_size / seconds
            if step % config.eval_every == 0 or step == num_steps:
                sharded = (
                    jax.device_put(b, split) for b in data.eval_batches(dataset, config.data)
                )
                record |= evaluate(partial(eval_fn, state), sharded)
                bar.console.print(
                    f"step {step}: {config.data.eval_split} accuracy {record['eval_accuracy']:.4f},"
                    f" loss {record['eval_loss']:.4f}"
                )
            metrics.append(log, record | {"seconds": time.perf_counter() - start})
            bar.update(task, status=metrics.status(record))
            if step % config.checkpoint_every == 0 or step == num_steps or interrupted.is_set():
                checkpoint.save(checkpoints, step, state, batches)
            if interrupted.is_set() and step < num_steps:
                sys.exit(f"stopped at step {step} of {num_steps}; the same command resumes")

    metrics.plot_learning_curve(log, workdir / "learning_curve.png")
    return metrics.read(log)[-1]


def length(config: configs.Config, dataset: data.Dataset) -> tuple[int, int]:
    """Steps of an epoch, and of the run."""
    steps_per_epoch = len(dataset.train) // config.data.batch_size
    return steps_per_epoch, max(1, round(config.num_epochs * steps_per_epoch))


def create(
    config: configs.Config, dataset: data.Dataset, rate: optax.Schedule
) -> tuple[nnx.GraphDef, nnx.State]:
    """A new model and optimiser: their structure, and their state as a pytree of arrays."""

    @jax.jit
    def initial_state() -> nnx.State:
        model = ViT(
            config,
            num_classes=dataset.num_classes,
            channels=dataset.channels,
            rngs=random_streams(config.seed),
        )
        optimizer = nnx.Optimizer(model, optim.optimizer(config.optim, rate), wrt=nnx.Param)
        graphs.append(nnx.graphdef((model, optimizer)))
        return nnx.state((model, optimizer))

    graphs: list[nnx.GraphDef] = []
    state = initial_state()
    return graphs[0], state


def train_step(
    graph: nnx.GraphDef,
    label_smoothing: float,
    redraw_key: jax.Array,
    state: nnx.State,
    batch: data.Batch,
) -> tuple[nnx.State, Counts]:
    """One step of the optimiser on the mean cross entropy of a batch; frequencies as due."""
    model, optimizer = nnx.merge(graph, state)
    model.train()
    redraw(model, redraw_key, optimizer.step[...])

    def mean_loss(model: ViT) -> tuple[jax.Array, jax.Array]:
        logits, _ = model(batch["image"])
        targets = jax.nn.one_hot(batch["label"], logits.shape[-1])
        targets = optax.losses.smooth_labels(targets, label_smoothing)
        return optax.losses.softmax_cross_entropy(logits, targets).mean(), logits

    (loss, logits), gradients = nnx.value_and_grad(mean_loss, has_aux=True)(model)
    optimizer.update(model, gradients)
    accuracy = jnp.mean(jnp.argmax(logits, axis=-1) == batch["label"])
    step_metrics = {
        "train_loss": loss,
        "train_accuracy": accuracy,
        "gradient_norm": optax.tree.norm(gradients),
    }
    return nnx.state((model, optimizer)), step_metrics


def eval_step(graph: nnx.GraphDef, state: nnx.State, batch: data.Batch) -> Counts:
    """Sums over the unmasked examples of a batch: loss, top1, top5, examples."""
    model, _ = nnx.merge(graph, state)
    model.eval()
    return count(model, batch)


def count(model: ViT, batch: data.Batch) -> Counts:
    """The sums of `eval_step`, for a model in evaluation mode."""
    logits, _ = model(batch["image"])
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    counts = metrics.counts(logits, batch["label"], batch["mask"])
    return counts | {"loss": jnp.sum(losses * batch["mask"])}


def evaluate(count: Callable[[Any], Counts], batches: Iterable[data.Batch]) -> metrics.Record:
    """eval_loss, eval_accuracy, eval_top5 over all examples, and how many they are."""
    counts = [jax.device_get(count(batch)) for batch in batches]
    total = {name: sum(float(c[name]) for c in counts) for name in counts[0]}
    examples = total["examples"]
    return {
        "eval_loss": total["loss"] / examples,
        "eval_accuracy": total["top1"] / examples,
        "eval_top5": total["top5"] / examples,
        "eval_examples": int(examples),
    }


def shardings(batch_size: int) -> tuple[NamedSharding, NamedSharding]:
    """For the state (a copy on each device) and for a batch (split among the devices)."""
    devices = jax.device_count()
    if batch_size % devices:
        raise ValueError(
            f"config.data.batch_size={batch_size} is not divisible by the {devices} devices"
        )
    mesh = jax.make_mesh((devices,), ("batch",), (AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("batch"))


def claim(workdir: Path, config: configs.Config) -> None:
    """Makes the folder of the run; refuses one that holds a run of another config."""
    path = workdir / "config.json"
    if path.exists():
        different = configs.differences(configs.load(path), config)
        if different:
            raise ValueError(
                f"{workdir} holds a run with another config; take another --workdir, or the run's"
                " own config:\n  " + "\n  ".join(different)
            )
    workdir.mkdir(parents=True, exist_ok=True)
    configs.save(config, path)


@contextlib.contextmanager
def interruption() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set, instead of ending the process at once."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # signals reach only the main one
        yield event
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = [signal.signal(number, lambda *_: event.set()) for number in numbers]
    try:
        yield event
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)


def _mean(stretch: list[Counts]) -> dict[str, float]:
    host = jax.device_get(stretch)
    return {name: float(np.mean([m[name] for m in host])) for name in host[0]}


def main(_: list[str]) -> None:
    """The command line."""
    logging.set_verbosity(logging.WARNING)
    workdir = Path(str(_WORKDIR.value))
    try:
        given = flags.FLAGS["config"].present
        config = configs.from_flag(_CONFIG) if given else configs.of_run(workdir)
        record = train(config, workdir)
    except (ValueError, FloatingPointError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print(
        f"{config.data.eval_split} accuracy {record['eval_accuracy']:.4f}"
        f" ({record['eval_examples']} images) after {record['epoch']:.0f} epochs,"
        f" {record['seconds']:.0f} s; the run is in {workdir}"
    )


if __name__ == "__main__":
    _CONFIG = config_flags.DEFINE_config_file(
        "config", help_string="file with get_config(); the run's own config if none is given"
    )
    _WORKDIR = flags.DEFINE_string("workdir", None, "folder of the run; made if it does not exist")
    flags.mark_flags_as_required(["workdir"])
    app.run(main, flags_parser=configs.parse_flags)
