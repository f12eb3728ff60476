"""Runs: data and task, length, batches, folder and state."""

import contextlib
import dataclasses
import math
import platform
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

import performer
from vit import config as configs
from vit import data
from vit.reports import metrics
from vit.run import checkpoint, devices, optim, steps
from vit.run.steps import Program, build, evaluated_model
from vit.storage import files
from vit.task import Task, description_of, opened


class Restored(NamedTuple):
    """Run restored at one of its checkpoints."""

    config: Any
    dataset: data.Dataset
    task: Task
    mesh: Mesh
    program: Program
    step: int
    state: nnx.State

    def batches(self) -> Iterator[data.Batch]:
        """Return the evaluation batches, on the devices."""
        return eval_batches(self.dataset, self.config, self.mesh)

    def model(self) -> Any:
        """Return the model in evaluation mode."""
        return evaluated_model(self.program.graph, self.state)


def length(config: configs.TrainConfig, dataset: data.Dataset) -> tuple[int, int]:
    """Return the numbers of steps of an epoch and of the run.

    Raises:
        ValueError: when the run has no steps, or more than an int32 can count.
    """
    steps_per_epoch = len(dataset.train) // config.data.batch_size
    num_steps = config.num_epochs * steps_per_epoch
    if not 0.5 < num_steps <= configs.LARGEST:
        raise ValueError(
            f"config.num_epochs={config.num_epochs} are {num_steps:.3g} steps"
            f" ({steps_per_epoch} per epoch): a run has 1 to {configs.LARGEST}"
        )
    return steps_per_epoch, round(num_steps)


def program(config: configs.TrainConfig, dataset: data.Dataset, task: Task, mesh: Mesh) -> Program:
    """Return the programs of the run; ValueError as `length` and `steps.build`."""
    return build(config, task, length(config, dataset)[1], mesh)


def rate(config: configs.TrainConfig, dataset: data.Dataset) -> optax.Schedule:
    """Return the learning rate of the run by step; 0 for a data set without training examples.

    Raises:
        ValueError: as `length` and `optim.schedule`.
    """
    if not len(dataset.train):
        return optax.constant_schedule(0.0)
    return optim.schedule(config.optim, length(config, dataset)[1])


@contextlib.contextmanager
def batches(
    dataset: data.Dataset, config: configs.TrainConfig, mesh: Mesh, step: int
) -> Iterator[Iterator[data.Batch]]:
    """Yield the training batches of a run from a step on, as `data.train_batches`, on the devices.

    Each process reads its own rows. Reading begins at once in a thread and ends with the block.
    """
    index, count = jax.process_index(), jax.process_count()
    stream = iter(data.train_batches(dataset, config.data, config.seed, index, count, step))

    def in_order() -> Iterator[data.Batch]:
        try:
            yield begun.result()
            yield from stream
        except RuntimeError as error:  # grain's
            if "Worker process" not in str(error):
                raise
            raise ChildProcessError(
                f"a worker of config.data.num_workers={config.data.num_workers} was killed"
                f" ({str(error).splitlines()[0]}), as for lack of memory: the same command resumes"
                " from the last checkpoint, also with fewer workers"
            ) from error

    with contextlib.closing(stream), ThreadPoolExecutor(1) as pool:
        begun = pool.submit(next, stream)
        yield (devices.put(mesh, batch) for batch in in_order())


def abstract_batch(
    dataset: data.Dataset, config: configs.TrainConfig, mesh: Mesh, *, mask: bool = False
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a training batch, or with `mask` of an evaluation batch."""
    extra = {"mask": np.float32(0)} if mask else {}
    sharding = devices.of_batch(mesh)

    def rows(x: Any) -> jax.ShapeDtypeStruct:
        shape = (config.data.batch_size, *np.shape(x))
        return jax.ShapeDtypeStruct(shape, np.asarray(x).dtype, sharding=sharding)

    return {name: rows(x) for name, x in (dataset.blank(config.data, dataset) | extra).items()}


def eval_batches(
    dataset: data.Dataset, config: configs.TrainConfig, mesh: Mesh
) -> Iterator[data.Batch]:
    """Return the evaluation batches, on the devices."""
    batches = data.eval_batches(dataset, config.data, jax.process_index(), jax.process_count())
    return (devices.put(mesh, batch) for batch in batches)


def evaluation_examples(
    dataset: data.Dataset, config: configs.TrainConfig, number: int
) -> data.Batch:
    """Return the first examples of the evaluation split as one batch."""
    return next(_batches_of(dataset.evaluation, range(number), dataset, config, number))


def training_examples(run: Restored, number: int) -> Iterator[data.Batch]:
    """Yield training examples, spread over the split, as preprocessed for evaluation."""
    train = run.dataset.train
    number = min(number, len(train))
    size = min(number, run.config.data.batch_size)
    chosen = range(0, number // size * size * (len(train) // number), len(train) // number)
    yield from _batches_of(train, chosen, run.dataset, run.config, size)


def _batches_of(
    records: Sequence[Any],
    chosen: range,
    dataset: data.Dataset,
    config: configs.TrainConfig,
    size: int,
) -> Iterator[data.Batch]:
    """Return the chosen records in batches of the size, or of their number if that is smaller."""
    few = [records[i] for i in chosen if i < len(records)]
    sizes = dataclasses.replace(config.data, batch_size=min(size, len(few)))
    return data.eval_batches(dataset._replace(evaluation=few), sizes)


def claim(workdir: Path, config: configs.TrainConfig, dataset: data.Dataset) -> None:
    """Create the folder of the run, with `config.json` and `task.json`.

    `task.json` describes the data, so that the model can be used without its data set.

    Raises:
        ValueError: when the folder contains a run with another config or other data, or a log
            without a run.
    """
    path, new = workdir / "config.json", description(config, dataset)
    if (log := workdir / "metrics.jsonl").exists() and not path.exists():
        raise ValueError(f"{log} exists, but no {path.name} of a run: choose another --workdir")
    different = configs.differences(configs.load(path), config) if path.exists() else []
    before_this = {} if different else description_of(workdir, config)
    for name, before in before_this.items():
        if name != "versions" and before != new.get(name, before):
            different.append(f"{name}: {str(before)[:200]} -> {str(new[name])[:200]}")
    if different:
        raise ValueError(
            f"{workdir} holds another run; choose another --workdir, or the run's own config and"
            " data:\n  " + "\n  ".join(different)
        )
    workdir.mkdir(parents=True, exist_ok=True)
    files.note(workdir / "task.json", new)
    configs.save(config, path)


def description(config: configs.TrainConfig, dataset: data.Dataset) -> dict[str, Any]:
    """Return the content of a run's `task.json`: task, classes, data and versions."""
    packages = ("jax", "flax", "optax", "orbax-checkpoint")
    fingerprint = dataset.fingerprint()
    return {
        "task": config.task,
        "class_names": list(dataset.class_names),
        "channels": dataset.channels,
        "training examples": len(dataset.train),
        "evaluation examples": len(dataset.evaluation),
        **({"fingerprint of the data": fingerprint} if fingerprint else {}),
        "versions": {
            "python": platform.python_version(),
            "performer": performer.__version__,
            **{name: version(name) for name in packages},
        },
    }


def shared_settings(config: configs.TrainConfig, dataset: data.Dataset) -> dict[str, Any]:
    """Return the settings that must be equal on all hosts."""
    local = configs.local_fields(type(config))
    fields = {f"config.{k}": v for k, v in configs.flatten(config).items() if k not in local}
    return fields | description(config, dataset)


def begin(
    workdir: Path, model: nnx.Module, config: configs.TrainConfig, dataset: data.Dataset, task: Task
) -> None:
    """Write a new run at step 0 with the given model and a new optimiser.

    Raises:
        vit.run.checkpoint.SaveError: when it cannot be written.
    """
    optimizer = steps.optimizer(config, task, rate(config, dataset), model)
    with checkpoint.open_checkpoints(workdir) as checkpoints:
        checkpoint.save(checkpoints, 0, nnx.state((model, optimizer)))
    claim(workdir, config, dataset)


def resume(workdir: Path, abstract: Any) -> tuple[int, Any]:
    """Return step and state of the newest readable checkpoint; 0 and None for a new run.

    Unreadable checkpoints are moved to the folder `unreadable`.

    Raises:
        ValueError: when no checkpoint can be read, or their folder is missing and there is a log.
    """
    if not devices.agree(bool(checkpoint.complete_steps(workdir))):
        step, folder = last_step(workdir / "metrics.jsonl"), workdir / "checkpoints"
        if step and not folder.exists():
            raise ValueError(
                f"{workdir} was trained to step {step} (by its log), but {folder} is missing:"
                " restore it (is its disk mounted?), or delete the folder of the run to train from"
                " the start"
            )
        return 0, None
    step, state = checkpoint.restore(workdir, abstract)
    checkpoint.set_aside(workdir, step)
    return step, state


def last_step(log: Path) -> int:
    """Return the last step of a log; 0 for none."""
    return max((record["step"] for record in metrics.read(log)), default=0)


def restore(
    workdir: Path,
    dataset: data.Dataset | None = None,
    step: int | str | None = None,
) -> Restored:
    """Restore a run on any number of devices; nothing in its folder changes.

    Args:
        workdir: folder of the run.
        dataset: data set that is not opened; None for the run's.
        step: step of the checkpoint, or "best"; None for the newest.

    Raises:
        ValueError: as `vit.task.opened`; when the folder has no run, or no such readable
            checkpoint; or when the data have classes that the run does not have.
    """
    config = configs.of_run(workdir)
    configs.validate(config)
    names = description_of(workdir, config).get("class_names")
    if dataset is not None and dataset.class_names and names:
        dataset = data.with_classes(dataset, names)
    dataset, task = opened(config, workdir, dataset)
    config.seq = math.gcd(config.seq, jax.device_count())
    config.fsdp = math.gcd(config.fsdp, jax.device_count() // config.seq)
    checkpoint.chosen_steps(workdir, step)
    mesh = devices.mesh(config)
    functions = program(config, dataset, task, mesh)
    number, state = checkpoint.restore(workdir, functions.abstract, step)
    return Restored(config, dataset, task, mesh, functions, number, state)
