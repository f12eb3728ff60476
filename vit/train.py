"""Trains a Vision Transformer; the same command resumes a stopped run.

    python -m vit.train --config=experiments/configs/digits.py --workdir=runs/pm \\
        --config.attention.coupling=pm

The folder of the run holds `config.json`, `metrics.jsonl`, `learning_curve.png` and `checkpoints/`.
With --dry_run nothing is trained or written: parameters, operations, memory and the shapes of a
batch are printed. On several hosts each runs the same command with --distributed.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags, logging
from flax import nnx
from jax.sharding import Mesh
from ml_collections import config_flags

from performer.nnx import redraw
from vit import augment, checkpoint, costs, data, devices, metrics, optim, safety
from vit import config as configs
from vit.model import ViT, random_streams

Counts = dict[str, jax.Array]


def train(
    config: configs.Config, workdir: Path, *, profile: bool = False, tensorboard: bool = False
) -> metrics.Record:
    """Trains to the end, from the newest readable checkpoint in `workdir` if there is one.

    Ctrl-C and SIGTERM finish the step, save and exit with code `safety.STOPPED`; the same call
    resumes. A resumed run ends with the same parameters as an uninterrupted one (on CPU bit for
    bit), wherever it was stopped or killed.

    Args:
        config: of the run.
        workdir: its folder; on several hosts one that all of them see.
        profile: traces the second stretch of steps into `workdir`/profile.
        tensorboard: writes the metrics to `workdir`/tensorboard, too; needs tensorboardX.

    Returns:
        The last record of the log: step, epoch, seconds, train_loss, eval_loss, eval_accuracy, ...

    Raises:
        ValueError: for a config that cannot work, a workdir that holds another run or is in use,
            or more unreadable records than `config.data.max_bad_records`.
        FloatingPointError: when loss, gradients or parameters are not finite; nothing is saved.
        vit.checkpoint.SaveError: when a checkpoint cannot be written; earlier ones are intact.
    """
    # What is asked for, checked before anything is written.
    configs.validate(config)
    mesh = devices.mesh(config)
    dataset = data.load(config.data)
    steps_per_epoch, num_steps = length(config, dataset)
    program = build(config, dataset, optim.schedule(config.optim, num_steps), mesh)
    names = list(costs.parameters(program.abstract))
    step_flops = 3 * config.data.batch_size * costs.forward_flops(config, **sizes(dataset))
    peak_flops = devices.peak_flops()
    lead, log = jax.process_index() == 0, workdir / "metrics.jsonl"

    with contextlib.ExitStack() as stack:
        if lead:
            stack.enter_context(safety.exclusive(workdir))
            claim(workdir, config)
        stopping = stack.enter_context(safety.interruption())

        # Where the run stands.
        if devices.agree(checkpoint.exists(workdir)):
            step, state = checkpoint.restore(workdir, program.abstract)
            checkpoint.set_aside(workdir, step)
            if lead:
                print(f"{workdir}: at step {step} of {num_steps}")
        else:
            step, state = 0, program.initial()
        checkpoints = stack.enter_context(checkpoint.open_checkpoints(workdir, write=True))
        past = metrics.keep_up_to(log, step) if lead else []
        start = time.perf_counter() - sum(record["seconds"] for record in past[-1:])
        write = stack.enter_context(metrics.writer(log, lead=lead, tensorboard=tensorboard))
        batches = iter(train_batches(dataset, config, mesh, step))

        def due(step: int) -> bool:
            return step == num_steps or (step > 0 and step % config.eval_every == 0)

        evaluate_now = due(step) and not devices.agree(
            bool(past) and past[-1]["step"] == step and "eval_accuracy" in past[-1]
        )
        saved, bad_records, number = step, set(), 0

        # The loop: an evaluation if it is due, else a stretch of steps; then a checkpoint if due.
        bar = stack.enter_context(metrics.progress_bar(lead))
        task = bar.add_task(
            "train", total=num_steps, completed=step, status="compiling" if step < num_steps else ""
        )
        while evaluate_now or step < num_steps:
            record = {"step": step, "epoch": step / steps_per_epoch}
            if evaluate_now:
                evaluation = safety.until(stopping, eval_batches(dataset, config, mesh))
                with contextlib.suppress(safety.Stopped):
                    record |= evaluate(partial(program.evaluate, state), evaluation)
                    write(record | {"seconds": time.perf_counter() - start})
                    evaluate_now = False
                    bar.console.print(
                        f"step {step}: {config.data.eval_split} accuracy"
                        f" {record['eval_accuracy']:.4f}, loss {record['eval_loss']:.4f}"
                    )
            else:
                end = min(step - step % config.log_every + config.log_every, num_steps)
                stretch, stretch_start = [], time.perf_counter()
                with profiler(workdir, profile and number == 1):
                    while step < end and not (stretch and stopping()):
                        state, values = program.train(state, next(batches))
                        stretch.append(values)
                        step += 1
                        bar.advance(task)
                    stretch = jax.device_get(stretch)
                number += 1
                seconds = time.perf_counter() - stretch_start
                safety.check_finite(stretch, step, names, config.optim.learning_rate)
                bad_records |= {int(i) for values in stretch for i in values["bad"] if i >= 0}
                record = {"step": step, "epoch": step / steps_per_epoch, **_mean(stretch)}
                record["images_per_second"] = len(stretch) * config.data.batch_size / seconds
                if peak_flops:
                    record["mfu"] = len(stretch) * step_flops / seconds / peak_flops
                record |= {"bad_records": len(bad_records)} | devices.memory()
                write(record | {"seconds": time.perf_counter() - start})
                bar.update(task, status=metrics.status(record))
                evaluate_now = due(step)
            stop, too_many = stopping(), len(bad_records) > config.data.max_bad_records
            if step != saved and (
                stop or too_many or step == num_steps or step % config.checkpoint_every == 0
            ):
                checkpoint.save(checkpoints, step, state)
                saved = step
            if too_many:
                raise ValueError(
                    f"{len(bad_records)} records of {config.data.train_split!r} cannot be decoded,"
                    f" more than config.data.max_bad_records={config.data.max_bad_records}; their"
                    f" numbers are {sorted(bad_records)[:20]}"
                )
            if stop and (evaluate_now or step < num_steps):
                checkpoint.finish(checkpoints)
                print(f"stopped at step {step} of {num_steps}; the same command resumes")
                sys.exit(safety.STOPPED)
        checkpoint.finish(checkpoints)

    if lead:
        metrics.plot_learning_curve(log, workdir / "learning_curve.png")
    return metrics.read(log)[-1]


class Program(NamedTuple):
    """What a run computes, compiled at the first call, and how its arrays lie on the devices."""

    graph: nnx.GraphDef
    """Structure of (model, optimizer)."""
    abstract: nnx.State
    """Their state: shapes, dtypes and shardings."""
    initial: Callable[[], nnx.State]
    train: Any
    """(state, batch) -> (state, values of the step); the state that goes in is given up."""
    evaluate: Any
    """(state, batch) -> `eval_step`."""


def build(
    config: configs.Config, dataset: data.Dataset, rate: optax.Schedule, mesh: Mesh
) -> Program:
    """The functions of a run on those devices."""

    def initial() -> nnx.State:
        model = ViT(config, **sizes(dataset), rngs=random_streams(config.seed))
        optimizer = nnx.Optimizer(model, optim.optimizer(config.optim, rate), wrt=nnx.Param)
        graphs.append(nnx.graphdef((model, optimizer)))
        return nnx.state((model, optimizer))

    graphs: list[nnx.GraphDef] = []
    shapes = jax.eval_shape(initial)
    graph, everywhere = graphs[0], devices.everywhere(mesh)
    shardings = devices.of_state(mesh, shapes)
    return Program(
        graph=graph,
        abstract=jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
        ),
        initial=jax.jit(initial, out_shardings=shardings),
        train=jax.jit(
            partial(train_step, config, graph),
            donate_argnums=0,
            out_shardings=(shardings, everywhere),
        ),
        evaluate=jax.jit(partial(eval_step, graph), out_shardings=everywhere),
    )


def train_step(
    config: configs.Config, graph: nnx.GraphDef, state: nnx.State, batch: data.Batch
) -> tuple[nnx.State, Counts]:
    """One step of the optimiser on the mean cross entropy of a batch; frequencies as due.

    Besides the state: train_loss, train_accuracy, gradient_norm, `finite` (for each parameter,
    whether its gradient and its new value are) and `bad` (of the batch, as `data.train_batches`).
    """
    model, optimizer = nnx.merge(graph, state)
    model.train()
    streams, step = random_streams(config.seed), optimizer.step[...]
    redraw(model, streams.frequencies.key[...], step)
    images, labels = batch["image"], batch["label"]
    targets = jax.nn.one_hot(labels, model.head.out_features)
    targets = optax.losses.smooth_labels(targets, config.optim.label_smoothing)
    if config.data.mixup:
        key = jax.random.fold_in(streams.mixup.key[...], step)
        images = images.astype(jnp.float32)
        images, targets = augment.mixup(key, images, targets, config.data.mixup)
    loss, hits, gradients = loss_and_gradients(
        model, (images, targets, labels), config.optim.accumulate
    )
    optimizer.update(model, gradients)
    finite = jax.tree.map(
        lambda *arrays: jnp.all(jnp.stack([jnp.isfinite(x).all() for x in arrays])),
        gradients,
        nnx.state(model, nnx.Param),
    )
    return nnx.state((model, optimizer)), {
        "train_loss": loss,
        "train_accuracy": hits / len(labels),
        "gradient_norm": optax.tree.norm(gradients),
        "finite": jnp.stack(jax.tree.leaves(finite)),
        "bad": batch["bad"],
    }


def loss_and_gradients(
    model: ViT, batch: tuple[jax.Array, jax.Array, jax.Array], parts: int
) -> tuple[jax.Array, jax.Array, nnx.State]:
    """Mean loss over (images, targets, labels), right answers, and gradients, in `parts` parts.

    The parts go through the model one after another and their gradients are added up, so that only
    one part's activations are kept; the result is that of the whole batch.
    """

    def mean_loss(model: ViT, images: jax.Array, targets: jax.Array, labels: jax.Array) -> Any:
        logits, _ = model(images)
        loss = optax.losses.softmax_cross_entropy(logits, targets).mean() / parts
        return loss, jnp.sum(jnp.argmax(logits, axis=-1) == labels)

    def part(carry: Any, batch: Any) -> tuple[Any, None]:
        rest, total = carry
        model = nnx.merge(graph, nnx.as_pure(params), rest)
        results = nnx.value_and_grad(mean_loss, has_aux=True)(model, *batch)
        rest = nnx.state(model, nnx.Not(nnx.Param))
        return (rest, jax.tree.map(jnp.add, total, results)), None

    def split(x: jax.Array) -> jax.Array:  # each device's rows stay on it
        return x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1)

    graph, params, rest = nnx.split(model, nnx.Param, ...)
    zeros = (jnp.zeros(()), jnp.zeros((), jnp.int32)), jax.tree.map(jnp.zeros_like, params)
    carry, _ = jax.lax.scan(part, (rest, zeros), jax.tree.map(split, batch))
    rest, ((loss, hits), gradients) = carry
    nnx.update(model, rest)
    return loss, hits, gradients


def eval_step(graph: nnx.GraphDef, state: nnx.State, batch: data.Batch) -> Counts:
    """Sums over the unmasked examples of a batch: loss, top1, top5, examples; and bad records."""
    return count(evaluated_model(graph, state), batch)


def evaluated_model(graph: nnx.GraphDef, state: nnx.State) -> ViT:
    """The model in evaluation mode, with the running mean of its parameters if there is one."""
    model, optimizer = nnx.merge(graph, state)
    mean = optim.averaged(optimizer)
    if mean is not None:
        nnx.update(model, mean)
    model.eval()
    return model


def count(model: ViT, batch: data.Batch) -> Counts:
    """The sums of `eval_step`, for a model in evaluation mode."""
    logits, _ = model(batch["image"])
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    counts = metrics.counts(logits, batch["label"], batch["mask"])
    return counts | {"loss": jnp.sum(losses * batch["mask"]), "bad": jnp.sum(batch["bad"] >= 0)}


def evaluate(count: Callable[[Any], Counts], batches: Iterable[data.Batch]) -> metrics.Record:
    """eval_loss, eval_accuracy, eval_top5 over all examples, how many they are, and bad records."""
    counts = [jax.device_get(count(batch)) for batch in batches]
    total = {name: sum(float(c[name]) for c in counts) for name in counts[0]}
    examples = total["examples"]
    return {
        "eval_loss": total["loss"] / examples,
        "eval_accuracy": total["top1"] / examples,
        "eval_top5": total["top5"] / examples,
        "eval_examples": int(examples),
        "eval_bad_records": int(total["bad"]),
    }


def length(config: configs.Config, dataset: data.Dataset) -> tuple[int, int]:
    """Steps of an epoch, and of the run."""
    steps_per_epoch = len(dataset.train) // config.data.batch_size
    return steps_per_epoch, max(1, round(config.num_epochs * steps_per_epoch))


def sizes(dataset: data.Dataset) -> dict[str, int]:
    """What a model must know of the data."""
    return {"num_classes": dataset.num_classes, "channels": dataset.channels}


def train_batches(
    dataset: data.Dataset, config: configs.Config, mesh: Mesh, start: int
) -> Iterator[data.Batch]:
    """The training batches from step `start` on, on the devices; this process reads its rows."""
    index, count = jax.process_index(), jax.process_count()
    batches = data.train_batches(dataset, config.data, config.seed, index, count, start)
    return (devices.put(mesh, batch) for batch in batches)


def eval_batches(dataset: data.Dataset, config: configs.Config, mesh: Mesh) -> Iterator[data.Batch]:
    """The evaluation batches on the devices."""
    batches = data.eval_batches(dataset, config.data, jax.process_index(), jax.process_count())
    return (devices.put(mesh, batch) for batch in batches)


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


def profiler(workdir: Path, wanted: bool) -> contextlib.AbstractContextManager[Any]:
    """Traces what runs inside, if wanted; for TensorBoard, xprof or Perfetto."""
    return jax.profiler.trace(str(workdir / "profile")) if wanted else contextlib.nullcontext()


def dry_run(config: configs.Config) -> str:
    """Parameters, operations, memory and the first batch of a run; nothing is written.

    Raises:
        ValueError: as `train`, before anything is compiled.
    """
    configs.validate(config)
    mesh = devices.mesh(config)
    dataset = data.load(config.data)
    steps_per_epoch, num_steps = length(config, dataset)
    program = build(config, dataset, optim.schedule(config.optim, num_steps), mesh)
    batch = next(train_batches(dataset, config, mesh, 0))
    compiled = program.train.lower(program.abstract, batch).compile()
    flops = costs.forward_flops(config, **sizes(dataset))
    lines = [
        costs.parameter_table(program.abstract),
        f"devices: {jax.device_count()} x {jax.devices()[0].device_kind},"
        f" mesh {dict(mesh.shape)}, {jax.process_count()} processes",
        f"steps: {num_steps:,} ({steps_per_epoch:,} an epoch)",
        f"operations: {flops / 1e9:.3f} GFLOP an image forward,"
        f" {3 * flops * config.data.batch_size / 1e12:.4g} TFLOP a training step",
        "memory on each device: "
        + ", ".join(f"{k} {v / 2**20:,.1f} MiB" for k, v in costs.memory_of(compiled).items()),
        *(f"batch: {k} {x.shape} {x.dtype}, {x.sharding.spec}" for k, x in batch.items()),
    ]
    return "\n".join(lines)


def _mean(stretch: list[dict[str, np.ndarray]]) -> dict[str, float]:
    scalars = [name for name, value in stretch[0].items() if np.ndim(value) == 0]
    return {name: float(np.mean([values[name] for values in stretch])) for name in scalars}


def main(_: list[str]) -> None:
    """The command line."""
    logging.set_verbosity(logging.FATAL)  # a failed save is raised: Orbax logs it a dozen times
    workdir = Path(str(_WORKDIR.value))
    try:
        if _DISTRIBUTED.value or _COORDINATOR.value:
            devices.initialize(_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
        given = flags.FLAGS["config"].present
        config = configs.from_flag(_CONFIG) if given else configs.of_run(workdir)
        if _DRY_RUN.value:
            print(dry_run(config))
            return
        record = train(config, workdir, profile=_PROFILE.value, tensorboard=_TENSORBOARD.value)
    except (ValueError, FloatingPointError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    if jax.process_index() == 0:
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
    _DRY_RUN = flags.DEFINE_bool("dry_run", False, "print what the run would cost, and stop")
    _PROFILE = flags.DEFINE_bool("profile", False, "trace the second stretch of steps")
    _TENSORBOARD = flags.DEFINE_bool("tensorboard", False, "metrics for TensorBoard as well")
    _DISTRIBUTED = flags.DEFINE_bool("distributed", False, "one of several processes")
    _COORDINATOR = flags.DEFINE_string("coordinator", "", "host:port of process 0")
    _NUM_PROCESSES = flags.DEFINE_integer("num_processes", 0, "how many there are")
    _PROCESS_ID = flags.DEFINE_integer("process_id", -1, "the number of this one, from 0")
    flags.mark_flags_as_required(["workdir"])
    app.run(main, flags_parser=configs.parse_flags)
