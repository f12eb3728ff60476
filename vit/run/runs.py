"""Runs: config, data set, task and devices as one value; their folder and state."""

import contextlib
import dataclasses
import math
import platform
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import performer
from vit import config as configs
from vit import data
from vit.reports import metrics
from vit.run import checkpoint, devices, optim, steps
from vit.run.steps import Program, build, evaluated_model
from vit.storage import files
from vit.task import Task, description_of, opened


@dataclasses.dataclass
class Run:
    """A config with its data set, task and devices. The other values are computed when needed."""

    config: Any
    dataset: data.Dataset
    task: Task
    mesh: Any = None
    """`Mesh` of devices, on which programs and batches are; None for a run that is only written."""

    @cached_property
    def length(self) -> tuple[int, int]:
        """Numbers of steps of an epoch and of the run.

        Raises:
            ValueError: when the run has no steps, or more than an int32 can count.
        """
        steps_per_epoch = len(self.dataset.train) // self.config.data.batch_size
        num_steps = self.config.num_epochs * steps_per_epoch
        if not 0.5 < num_steps <= configs.LARGEST:
            raise ValueError(
                f"config.num_epochs={self.config.num_epochs} are {num_steps:.3g} steps"
                f" ({steps_per_epoch} per epoch): a run has 1 to {configs.LARGEST}"
            )
        return steps_per_epoch, round(num_steps)

    @cached_property
    def rate(self) -> optax.Schedule:
        """Learning rate by step; 0 for a data set without training examples.

        Raises:
            ValueError: as `length` and `optim.schedule`.
        """
        if not len(self.dataset.train):
            return optax.constant_schedule(0.0)
        return optim.schedule(self.config.optim, self.length[1])

    @cached_property
    def program(self) -> Program:
        """Programs; ValueError as `length` and `steps.build`."""
        return build(self.config, self.task, self.length[1], self.mesh)

    @contextlib.contextmanager
    def batches(self, step: int) -> Iterator[Iterator[data.Batch]]:
        """Yield the training batches from a step on, as `data.train_batches`, on the devices.

        Each process reads its own rows. Reading begins at once in a thread and ends with the block.
        """
        config, index, count = self.config, jax.process_index(), jax.process_count()
        batches = data.train_batches(self.dataset, config.data, config.seed, index, count, step)
        stream = iter(batches)

        def in_order() -> Iterator[data.Batch]:
            try:
                yield begun.result()
                yield from stream
            except RuntimeError as error:  # grain's
                if "Worker process" not in str(error):
                    raise
                raise ChildProcessError(
                    f"a worker of config.data.num_workers={config.data.num_workers} was killed"
                    f" ({str(error).splitlines()[0]}), as for lack of memory: the same command"
                    " resumes from the last checkpoint, also with fewer workers"
                ) from error

        with contextlib.closing(stream), ThreadPoolExecutor(1) as pool:
            begun = pool.submit(next, stream)
            yield (devices.put(self.mesh, batch) for batch in in_order())

    def eval_batches(self) -> Iterator[data.Batch]:
        """Return the evaluation batches, on the devices."""
        index, count = jax.process_index(), jax.process_count()
        batches = data.eval_batches(self.dataset, self.config.data, index, count)
        return (devices.put(self.mesh, batch) for batch in batches)

    def abstract_batch(self, *, mask: bool = False) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes of a training batch, or with `mask` of an evaluation batch."""
        extra = {"mask": np.float32(0)} if mask else {}
        sharding, size = devices.of_batch(self.mesh), self.config.data.batch_size

        def rows(x: Any) -> jax.ShapeDtypeStruct:
            shape = (size, *np.shape(x))
            return jax.ShapeDtypeStruct(shape, np.asarray(x).dtype, sharding=sharding)

        blank = self.dataset.blank(self.config.data, self.dataset)
        return {name: rows(x) for name, x in (blank | extra).items()}

    def evaluation_examples(self, number: int) -> data.Batch:
        """Return the first examples of the evaluation split as one batch."""
        return next(self._batches_of(self.dataset.evaluation, range(number), number))

    def training_examples(self, number: int) -> Iterator[data.Batch]:
        """Yield training examples, spread over the split, as preprocessed for evaluation."""
        train = self.dataset.train
        number = min(number, len(train))
        size = min(number, self.config.data.batch_size)
        chosen = range(0, number // size * size * (len(train) // number), len(train) // number)
        yield from self._batches_of(train, chosen, size)

    def _batches_of(self, records: Sequence[Any], chosen: range, size: int) -> Iterator[data.Batch]:
        """Return the chosen records in batches of the size, or of their number if smaller."""
        few = [records[i] for i in chosen if i < len(records)]
        sizes = dataclasses.replace(self.config.data, batch_size=min(size, len(few)))
        return data.eval_batches(self.dataset._replace(evaluation=few), sizes)


@dataclasses.dataclass
class Restored(Run):
    """Run restored at one of its checkpoints."""

    step: int = 0
    state: Any = None
    """Arrays of (model, optimizer), an `nnx.State`."""

    def model(self) -> Any:
        """Return the model in evaluation mode."""
        return evaluated_model(self.program.graph, self.state)


def create_folder(workdir: Path, config: configs.TrainConfig, dataset: data.Dataset) -> None:
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
    files.write_json(workdir / "task.json", new)
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


def begin(workdir: Path, model: nnx.Module, run: Run) -> None:
    """Write a new run at step 0 with the given model and a new optimiser.

    Raises:
        vit.run.checkpoint.SaveError: when it cannot be written.
    """
    optimizer = steps.optimizer(run.config, run.task, run.rate, model)
    with checkpoint.open_checkpoints(workdir) as checkpoints:
        checkpoint.save(checkpoints, 0, nnx.state((model, optimizer)))
    create_folder(workdir, run.config, run.dataset)


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
    run = Run(config, dataset, task, devices.mesh(config))
    number, state = checkpoint.restore(workdir, run.program.abstract, step)
    return Restored(config, dataset, task, run.mesh, number, state)
