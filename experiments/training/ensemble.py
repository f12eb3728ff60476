"""Several seeds of one config trained at once: one program, mapped over the seeds.

Seed s has the parameters, the order of the data, the dropout and the frequencies that
`vit.train --config.seed=s` gives it. Small models leave most of a device idle; eight of them at
once take far less than eight times as long. With several devices the seeds are spread over them.

The folder holds `metrics.jsonl`, with a list over the seeds where `vit.train` has a number, and
checkpoints; a stopped or killed one goes on where it was. A seed that diverges is noted, and the
others go on; `optim.skip_nonfinite` is not read.
"""

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from vit import checkpoint, costs, data, files, loop, machine, metrics, progress, runs, steps
from vit import config as configs
from vit.config import Config
from vit.model import ViT


class Ensemble(NamedTuple):
    """Trained seeds of one config."""

    seeds: tuple[int, ...]
    records: list[metrics.Record]
    """The log: lists over the seeds."""
    diverged: list[int | None]
    """For each seed the step of the first record in which it was not finite."""
    graph: Any
    state: Any
    """Structure and state of (model, optimizer); every array has a first axis for the seeds."""
    temporary_mib: float
    """Memory that the compiled training step needs besides its arguments, for all seeds."""

    def model(self, place: int) -> ViT:
        """The model of the seed at that place, in evaluation mode."""
        return steps.evaluated_model(self.graph, jax.tree.map(lambda x: x[place], self.state))


def train(
    config: Config,
    seeds: Sequence[int],
    folder: Path,
    *,
    advance: Callable[[int, metrics.Record], None] = lambda steps, record: None,
) -> Ensemble:
    """Trains to the end, or reads what has been trained.

    Args:
        config: of the runs; its own seed is not read, and `data.num_workers` are for all seeds.
        seeds: one run for each.
        folder: of the log and the checkpoints.
        advance: called with the number of steps done and the last record.

    Raises:
        ValueError: for a config that cannot work, lost checkpoints or a log that lacks records.
    """
    checkpoint.check_path(folder)
    config = configs.with_values(config, {"optim.skip_nonfinite": 0})
    dataset, task = runs.subject(config)
    steps_per_epoch, num_steps = runs.length(config, dataset)
    rate = runs.rate(config, dataset)
    over_seeds, everywhere = _shardings(len(seeds))
    numbers = jax.device_put(np.asarray(seeds, np.int32), over_seeds)

    new = partial(steps.create, config, task, rate)
    graph = nnx.graphdef(nnx.eval_shape(lambda: new(0)))
    initial = jax.jit(jax.vmap(lambda seed: nnx.state(new(seed))), out_shardings=over_seeds)
    train_step = jax.jit(
        jax.vmap(lambda *arguments: steps.train_step(config, task, graph, *arguments)),
        donate_argnums=1,
    )
    eval_step = jax.jit(jax.vmap(partial(steps.eval_step, task, graph), in_axes=(0, None)))

    log = folder / "metrics.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=over_seeds),
        jax.eval_shape(initial, numbers),
    )
    step, state = runs.resume(folder, abstract)
    state = initial(numbers) if state is None else state
    past = metrics.keep_up_to(log, step)
    if not _complete(past, step, num_steps, config):
        raise ValueError(
            f"{log} lacks records up to step {step}, the last checkpoint's, and without them the"
            f" report would be another; remove {folder}, and the same command trains it again"
        )
    past = past[-1:]
    start = time.perf_counter() - sum(record["seconds"] for record in past)
    diverged: list[int | None] = past[0]["diverged"] if past else [None] * len(seeds)
    advance(step, past[0] if past else {})
    workers = machine.workers(config.data.num_workers, data.batch_bytes(dataset, config.data))
    share = dataclasses.replace(config.data, num_workers=workers // len(seeds))
    streams = [iter(data.train_batches(dataset, share, seed, start=step)) for seed in seeds]
    batches = (
        jax.device_put(jax.tree.map(lambda *rows: np.stack(rows), *each), over_seeds)
        for each in zip(*streams, strict=True)
    )
    memory = files.noted(folder / "memory.json")

    with contextlib.ExitStack() as stack:
        for stream in streams:
            stack.enter_context(contextlib.closing(stream))  # ends its workers
        checkpoints = stack.enter_context(checkpoint.open_checkpoints(folder, write=True))
        if memory is None or (step < num_steps and not all(diverged)):
            first = next(batches)
            batches = itertools.chain([first], batches)
            compiled = train_step.lower(numbers, state, first).compile()
            memory = costs.memory_of(compiled)
            files.note(folder / "memory.json", memory)
        while step < num_steps and not all(diverged):
            remaining = loop.until_log(step, config, num_steps)
            begun = time.perf_counter()
            state, values, _ = loop.stretch(partial(compiled, numbers), state, batches, remaining)
            values = jax.device_get(values)
            seconds = time.perf_counter() - begun
            step += len(values)
            record = {"step": step, "epoch": step / steps_per_epoch, **progress.means(values)}
            record[task.rate] = len(seeds) * len(values) * config.data.batch_size / seconds
            finite = np.all([v["finite"].all(axis=-1) for v in values], axis=0)
            finite &= np.isfinite(record["train_loss"])
            diverged = [
                s if s or ok else step for s, ok in zip(diverged, finite.tolist(), strict=True)
            ]
            if loop.due(step, config.eval_every, num_steps):
                split = data.eval_batches(dataset, config.data)
                on_devices = (jax.device_put(batch, everywhere) for batch in split)
                results = task.results(steps.totals(partial(eval_step, state), on_devices))
                record |= {f"eval_{name}": value.tolist() for name, value in results.items()}
            record |= {"diverged": diverged, "seconds": time.perf_counter() - start}
            metrics.append(log, record)
            advance(step, record)
            if loop.due(step, config.checkpoint_every, num_steps) or all(diverged):
                checkpoint.save(checkpoints, step, state)
        checkpoint.finish(checkpoints)

    records, temporary = metrics.read(log), memory["temporary"] / 2**20
    return Ensemble(tuple(seeds), records, diverged, graph, state, temporary)


def _complete(records: list[metrics.Record], step: int, num_steps: int, config: Config) -> bool:
    """Whether the log has every record up to the step, and every evaluation."""
    due = sorted({*range(config.log_every, step + 1, config.log_every), *([step] if step else [])})
    return [record["step"] for record in records] == due and all(
        "eval_loss" in record
        for record in records
        if loop.due(record["step"], config.eval_every, num_steps)
    )


def _shardings(seeds: int) -> tuple[NamedSharding, NamedSharding]:
    """The seeds over as many devices as divide them, and what all of these hold whole."""
    count = math.gcd(seeds, jax.device_count())
    mesh = jax.make_mesh((count,), ("seed",), (AxisType.Auto,), devices=jax.devices()[:count])
    return NamedSharding(mesh, PartitionSpec("seed")), NamedSharding(mesh, PartitionSpec())
