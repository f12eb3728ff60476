"""A run: its data and task, length, batches, folder and state."""

import contextlib
import dataclasses
import itertools
import math
import platform
from collections.abc import Iterator
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
from vit.model import classification
from vit.reports import metrics
from vit.run import checkpoint, devices, files, hosts, optim, steps
from vit.run.steps import Program, build, evaluated_model
from vit.task import SUBJECTS, Task, of_folder


class Restored(NamedTuple):
    """A run at one of its checkpoints."""

    config: configs.Config
    dataset: data.Dataset
    task: Task
    mesh: Mesh
    program: Program
    step: int
    state: nnx.State

    def batches(self) -> Iterator[data.Batch]:
        """Return its evaluation batches, on the devices."""
        return eval_batches(self.dataset, self.config, self.mesh)

    def model(self) -> Any:
        """Return its model in evaluation mode."""
        return evaluated_model(self.program.graph, self.state)

    def with_window(self, exact_window: int) -> "Restored":
        """Return the same state in a run with that `config.attention.exact_window`."""
        fields = {"attention.exact_window": exact_window}
        config = configs.with_values(self.config, fields)
        configs.validate(config)
        functions = program(config, self.dataset, self.task, self.mesh)
        return self._replace(config=config, program=functions)


def subject(
    config: configs.Config,
    dataset: data.Dataset | None = None,
    task: Task | None = None,
    workdir: Path | None = None,
) -> tuple[data.Dataset, Task]:
    """Return data set and task of a run.

    Args:
        config: of the run.
        dataset: returned as it is; the one that the run was trained on if None.
        task: likewise; with a dataset alone it is to classify its images.
        workdir: folder of the run; without one, the run classifies the images of its config.

    Raises:
        ValueError: as `data.load`, or for a folder with a run of another task, or of one whose
            module is not imported (`vit.task.SUBJECTS`).
    """
    if dataset is None and task is None:
        described = of_folder(workdir, *SUBJECTS) if workdir else {}
        return SUBJECTS[described.get("task", classification.NAME)](config, described)
    if dataset is None:
        dataset = data.load(config.data)
    elif config.data.name:
        data.check(dataset, config.data)
    sizes = dataset.num_classes, dataset.channels
    task = task or classification.task(*sizes, config.optim.loss)
    if workdir:
        of_folder(workdir, task.name)
    return dataset, task


def length(config: configs.Config, dataset: data.Dataset) -> tuple[int, int]:
    """Return the number of steps of an epoch, and of the run.

    Raises:
        ValueError: when the run has none, or more than an int32 counts.
    """
    steps_per_epoch = len(dataset.train) // config.data.batch_size
    num_steps = config.num_epochs * steps_per_epoch
    if not 0.5 < num_steps <= configs.LARGEST:
        raise ValueError(
            f"config.num_epochs={config.num_epochs} are {num_steps:.3g} steps, of which an epoch"
            f" has {steps_per_epoch}: a run has 1 to {configs.LARGEST}"
        )
    return steps_per_epoch, round(num_steps)


def restarts(config: configs.Config, steps_per_epoch: int) -> tuple[int, ...]:
    """Return the steps at which the rate of the run starts anew."""
    return tuple(round(epoch * steps_per_epoch) for epoch in configs.restarts(config.restarts))


def program(config: configs.Config, dataset: data.Dataset, task: Task, mesh: Mesh) -> Program:
    """Return the functions of the run; ValueError as `length` and `steps.build`."""
    steps_per_epoch, num_steps = length(config, dataset)
    return build(config, task, num_steps, mesh, restarts(config, steps_per_epoch))


def rate(config: configs.Config, dataset: data.Dataset) -> optax.Schedule:
    """Return the learning rate of the run, by step; 0 where the config names no data.

    Raises:
        ValueError: as `length` and `optim.schedule`.
    """
    if not config.data.name:
        return optax.constant_schedule(0.0)
    steps_per_epoch, num_steps = length(config, dataset)
    return optim.schedule(config.optim, num_steps, restarts(config, steps_per_epoch))


@contextlib.contextmanager
def batches(
    dataset: data.Dataset,
    config: configs.Config,
    mesh: Mesh,
    step: int,
    num_steps: int,
    *,
    evaluate_first: bool = False,
) -> Iterator[Iterator[data.Batch]]:
    """Give the batches of a run from a step on, as `data.run_batches`, on the devices.

    This process reads its rows. Reading begins at once, in a thread; workers end with the block.
    """
    index, count = jax.process_index(), jax.process_count()
    schedule = data.Schedule(
        config.eval_every, num_steps, data.evaluation_length(dataset, config.data)
    )
    first = schedule.evaluation(step) if evaluate_first else schedule.training(step)
    stream = iter(
        data.run_batches(dataset, config.data, config.seed, schedule, first, index, count)
    )

    def in_order() -> Iterator[data.Batch]:
        yield begun.result()
        yield from stream

    with contextlib.closing(stream), ThreadPoolExecutor(1) as pool:
        begun = pool.submit(next, stream)
        yield (devices.put(mesh, batch) for batch in in_order())


def abstract_batch(
    dataset: data.Dataset, config: configs.Config, mesh: Mesh, *, mask: bool = False
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a batch of training, or of one of evaluation, which has a mask."""
    extra = {"bad": np.int32(0)} | ({"mask": np.float32(0)} if mask else {})
    sharding = devices.of_batch(mesh)

    def rows(x: Any) -> jax.ShapeDtypeStruct:
        shape = (config.data.batch_size, *np.shape(x))
        return jax.ShapeDtypeStruct(shape, np.asarray(x).dtype, sharding=sharding)

    return {name: rows(x) for name, x in (dataset.blank(config.data, dataset) | extra).items()}


def eval_batches(dataset: data.Dataset, config: configs.Config, mesh: Mesh) -> Iterator[data.Batch]:
    """Return the evaluation batches, on the devices."""
    batches = data.eval_batches(dataset, config.data, jax.process_index(), jax.process_count())
    return (devices.put(mesh, batch) for batch in batches)


def evaluation_examples(dataset: data.Dataset, config: configs.Config, number: int) -> data.Batch:
    """Return the first examples of the evaluation split that can be decoded, as one batch."""
    rows = (
        {name: x[i] for name, x in batch.items()}
        for batch in data.eval_batches(dataset, config.data)
        for i in np.flatnonzero(batch["mask"])
    )
    return jax.tree.map(lambda *x: np.stack(x), *itertools.islice(rows, number))


def training_examples(run: Restored, number: int) -> Iterator[data.Batch]:
    """Give that many training examples, spread over the split, as evaluation sees them."""
    train = run.dataset.train
    number = min(number, len(train))
    size = min(number, run.config.data.batch_size)
    chosen = [train[i * (len(train) // number)] for i in range(number // size * size)]
    sizes = dataclasses.replace(run.config.data, batch_size=size)
    for batch in data.eval_batches(run.dataset._replace(evaluation=chosen), sizes):
        readable = batch["mask"] > 0
        yield {name: x[readable] for name, x in batch.items()}


def evaluated_on(run: Restored, number: int) -> Restored:
    """Return the run with so many examples in its evaluation split; all for 0."""
    split = run.dataset.evaluation
    if not number:
        return run
    first = [split[i] for i in range(min(number, len(split)))]
    return run._replace(dataset=run.dataset._replace(evaluation=first))


def check_same(workdir: Path, config: configs.Config) -> None:
    """Raise ValueError when the folder holds a run of another config."""
    path = workdir / "config.json"
    different = configs.differences(configs.load(path), config) if path.exists() else []
    if different:
        raise ValueError(
            f"{workdir} holds a run with another config; take another --workdir, or the run's"
            " own config:\n  " + "\n  ".join(different)
        )


def claim(workdir: Path, config: configs.Config, dataset: data.Dataset, task: Task) -> None:
    """Make the folder of the run; refuse one that holds a run of another config or other data.

    Its `task.json` is what a model can be used with when its data set is gone.
    """
    check_same(workdir, config)
    old, new = of_folder(workdir, task.name), description(dataset, task)
    for name, now in new.items():
        before = old.get(name, now)
        if name not in ("command", "versions") and before != now:
            raise ValueError(
                f"{workdir} holds another run: {name} was {str(before)[:200]}, and is"
                f" {str(now)[:200]}; take another --workdir, or the run's own data"
            )
    workdir.mkdir(parents=True, exist_ok=True)
    files.note(workdir / "task.json", new)
    configs.save(config, workdir / "config.json")


def description(dataset: data.Dataset, task: Task) -> dict[str, Any]:
    """Return the content of a run's `task.json`: task, settings, classes, data and versions."""
    packages = ("jax", "flax", "optax", "orbax-checkpoint")
    return {
        "task": task.name,
        "command": task.command,
        "settings": task.settings._asdict(),
        "class_names": list(dataset.class_names),
        "channels": dataset.channels,
        "training examples": len(dataset.train),
        "versions": {
            "python": platform.python_version(),
            "performer": performer.__version__,
            **{name: version(name) for name in packages},
        },
    }


def said_by_all(config: configs.Config, dataset: data.Dataset, task: Task) -> dict[str, Any]:
    """Return what must be the same on all hosts, each of which computes its part of a step."""
    own = ("data.dir", "data.num_workers")  # of each host
    fields = {f"config.{k}": v for k, v in configs.flatten(config).items() if k not in own}
    evaluation = {"evaluation examples": len(dataset.evaluation)}
    return fields | description(dataset, task) | evaluation


def begin(
    workdir: Path, model: nnx.Module, config: configs.Config, dataset: data.Dataset, task: Task
) -> None:
    """Write a run at step 0 with that model, its optimiser fresh; the config last.

    Raises:
        vit.run.checkpoint.SaveError: when it cannot be written.
    """
    optimizer = steps.optimizer(config, task, rate(config, dataset), model)
    with checkpoint.open_checkpoints(workdir, write=True) as checkpoints:
        checkpoint.save(checkpoints, 0, nnx.state((model, optimizer)))
    claim(workdir, config, dataset, task)


def resume(workdir: Path, abstract: Any) -> tuple[int, Any]:
    """Return step and state of the newest readable checkpoint; 0 and None for a new run.

    Checkpoints that cannot be read are set aside.

    Raises:
        ValueError: when none can be read, or the run has a log and its folder of them is missing.
    """
    if not hosts.agree(bool(checkpoint.found(workdir))):
        step, folder = last_step(workdir / "metrics.jsonl"), workdir / "checkpoints"
        if step and not folder.exists():
            raise ValueError(
                f"{workdir} has been trained (its log ends at step {step}), but {folder} is"
                " missing; bring it back (is its disk mounted?), or remove the folder of the run,"
                " log and all, to train from the start"
            )
        return 0, None
    step, state = checkpoint.restore(workdir, abstract)
    checkpoint.set_aside(workdir, step)
    return step, state


def last_step(log: Path) -> int:
    """Return the last step of a log; 0 where there is none."""
    return max((record["step"] for record in metrics.read(log)), default=0)


def restore(
    workdir: Path,
    dataset: data.Dataset | None = None,
    task: Task | None = None,
    step: int | str | None = None,
) -> Restored:
    """Read a run, on any number of devices; nothing in its folder changes.

    Args:
        workdir: of the run.
        dataset: as `subject`.
        task: likewise.
        step: of the checkpoint, or "best"; the newest if None.

    Raises:
        ValueError: as `subject`, or when the folder holds no run, or no such checkpoint that can be
            read.
    """
    config = configs.of_run(workdir)
    configs.validate(config)
    dataset, task = subject(config, dataset, task, workdir)
    config.fsdp = math.gcd(config.fsdp, jax.device_count())
    checkpoint.chosen_steps(workdir, step)
    mesh = devices.mesh(config)
    functions = program(config, dataset, task, mesh)
    number, state = checkpoint.restore(workdir, functions.abstract, step)
    return Restored(config, dataset, task, mesh, functions, number, state)


def extend(workdir: Path, epochs: float, config: configs.Config | None = None) -> configs.Config:
    """Write into the folder of a finished run that it has so many epochs more; train nothing.

    The rate rises again by a warm-up of its own, stays, and falls to the new end. The extended run
    has the parameters, bit for bit on a CPU, of one with these `config.restarts` from the start.

    Args:
        workdir: of the run.
        epochs: more than 0.
        config: must be that of the run, before an earlier extension or after it; None: not checked.

    Returns:
        The config of the extended run, with `num_epochs` and `restarts` changed.

    Raises:
        ValueError: when the folder holds no run, another one or one that has not ended; or when the
            extension is no longer than warm-up and constant rate. Nothing has changed then.
    """
    if not epochs > 0:
        raise ValueError(f"--extend={epochs:g}: must be a number of epochs above 0")
    configs.of_run(workdir)
    with files.alone(workdir / "lock"):
        run = configs.of_run(workdir)
        configs.validate(run)
        if config is not None:
            check_same(workdir, as_extended(config, workdir))
        dataset, _ = subject(run, workdir=workdir)
        _, num_steps = length(run, dataset)
        step = max(checkpoint.found(workdir), default=0)
        if step < num_steps:
            raise ValueError(
                f"{workdir} is at step {step} of {num_steps}: the same command without --extend"
                " trains it to its end; only a run that has ended is extended"
            )
        fields = {
            "num_epochs": run.num_epochs + epochs,
            "restarts": ",".join(
                f"{x:g}" if float(f"{x:g}") == x else repr(x) for x in cycles(run)
            ),
        }
        longer = configs.with_values(run, fields)
        configs.validate(longer)
        rate(longer, dataset)
        configs.save(longer, workdir / "config.json")
        noted = {"step": num_steps, "num_epochs": longer.num_epochs}
        metrics.append(workdir / "metrics.jsonl", noted)
    return longer


def cycles(config: configs.Config) -> tuple[float, ...]:
    """Return the epochs at which the rate has fallen: those of `restarts`, and the end."""
    return (*configs.restarts(config.restarts), config.num_epochs)


def as_extended(config: configs.Config, workdir: Path) -> configs.Config:
    """Return the config with the length of the run in the folder, if that extends this one.

    Raises:
        ValueError: when the folder's config cannot be read.
    """
    path = workdir / "config.json"
    if not path.exists():
        return config
    run = configs.load(path)
    before, now = cycles(config), cycles(run)
    if now[: len(before)] != before:
        return config
    return configs.with_values(config, {"num_epochs": run.num_epochs, "restarts": run.restarts})
