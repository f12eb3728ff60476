"""A new run at step 0 whose parameters come from elsewhere: from another run, or from a file.

    python -m vit.train --config=experiments/configs/fashion_mnist.py --workdir=runs/fine \\
        --init_from=runs/coarse

The evaluated parameters of the other run are taken, the running mean if there is one. What fits is
taken; what depends on data, image or attention is made to fit, or is new:

    head         new where the classes differ: in number, or in name where both runs know them; or
                 where one of the runs has a tanh layer before it
    positions    resampled to the new grid (bicubic with antialiasing); "sincos" ones are computed
    patches      new where the patch size or the number of channels differs
    class token  new where the other run has none
    frequencies  taken where coupling, number of features and heads are the same; else drawn anew
    calibration  running moments are taken where both runs keep them; they are of queries and keys,
                 whatever the frequencies

The optimiser and the random streams begin anew, and width and depth must be the same. The new run
has all it needs: the other one may be removed when it has begun.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from performer.nnx import PerformerAttention
from vit import config as configs
from vit import data, use
from vit.run import checkpoint, files, runs, safety
from vit.task import Model, Task, of_folder, random_streams

Fill = Callable[[Model, Task, data.Dataset], list[str]]
"""Puts parameters into a model, and says in lines what it took."""


class Source(NamedTuple):
    """A trained run."""

    config: configs.Config
    step: int
    class_names: tuple[str, ...]
    model: Model
    """In evaluation mode."""


ORIGIN = "origin.json"
"""In the folder of a run that was begun from another: its place and step."""

HEAD = {"head/kernel", "head/bias"}
TOGETHER = ({"embed/kernel", "embed/bias"}, HEAD)
"""Pairs of arrays that are new together."""


def init_from(
    source: Path,
    config: configs.Config,
    workdir: Path,
    dataset: data.Dataset | None = None,
    task: Task | None = None,
) -> list[str]:
    """Begins a run from another; one that was begun so is left as it is, to be resumed.

    Args:
        source: folder of a run of the same task, which is only read.
        config: of the new run.
        workdir: its folder; it appears in one piece.
        dataset: of the new run, as `runs.subject`.
        task: likewise.

    Returns:
        What was taken and what not, in lines; nothing where the run had been begun.

    Raises:
        ValueError: for a config that cannot work, a source that holds no run or one of another
            width or depth, a workdir with anything else, or several processes.
        vit.run.checkpoint.SaveError: when the run cannot be written.
    """
    origin = files.noted(workdir / ORIGIN) or {}
    place = str(source.resolve())
    if (workdir / "config.json").exists():
        if origin.get("init_from") == place:
            return []
        begun = f"from {origin['init_from']}" if origin else "without --init_from"
        raise ValueError(
            f"{workdir} holds a run that was begun {begun}, not from {place}; take another"
            " --workdir, or resume the run by the same command without --init_from"
        )
    if jax.process_count() > 1:
        raise ValueError(
            "--init_from makes a run by one process: give the same command on one host without"
            f" --distributed, stop it, and start it on all of them (--workdir={workdir})"
        )
    configs.validate(config)
    if task is None:  # images: no data are needed
        own = use.load(source)
        trained = Source(own.config, own.step, own.class_names, own.model)
    else:
        of_folder(source, task.name)
        run = runs.restore(source)
        trained = Source(run.config, run.step, run.dataset.class_names, run.model())
    old, new = trained.config.model, config.model
    if old.size != new.size:
        raise ValueError(
            f"{source} has config.model.variant={old.variant!r}, {old.size}; the new run"
            f" {new.variant!r}, {new.size}: take the same numbers (any patch size may follow the"
            " variant's slash)"
        )
    fill = partial(take, source, trained, config=config)
    origin = {"init_from": place, "step": trained.step}
    return start(config, workdir, fill, origin, dataset, task)


def start(
    config: configs.Config,
    workdir: Path,
    fill: Fill,
    origin: Mapping[str, Any],
    dataset: data.Dataset | None = None,
    task: Task | None = None,
) -> list[str]:
    """Makes a run at step 0 with the parameters that `fill` puts into the model; what it says.

    Args:
        config: of the new run.
        workdir: its folder; it appears in one piece, and after a kill the same call begins anew.
        fill: what it raises leaves nothing behind.
        origin: is noted in the folder.
        dataset: of the new run, as `runs.subject`.
        task: likewise.

    Raises:
        ValueError: for a config that cannot work, or a workdir that is not empty.
        vit.run.checkpoint.SaveError: when the run cannot be written.
    """
    configs.validate(config)
    checkpoint.check_path(workdir)
    safety.check_vacant(workdir, "--workdir")
    dataset, task = runs.subject(config, dataset, task)
    runs.rate(config, dataset)
    model = task.create(config, rngs=random_streams(config.seed))
    report = fill(model, task, dataset)
    with safety.appearing(workdir, "--workdir") as folder:
        files.note(folder / ORIGIN, dict(origin))
        runs.begin(folder, model, config, dataset, task)
    return report


def parameters(model: Model) -> dict[str, nnx.Variable]:
    """Parameters by name, as "blocks/0/attention/key/kernel"."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {"/".join(map(str, path)): variable for path, variable in flat}


def put(model: Model, arrays: Mapping[str, ArrayLike]) -> None:
    """Sets the parameters of those names, in place; others are ignored."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    for path, variable in flat:
        if (name := "/".join(map(str, path))) in arrays:
            variable[...] = arrays[name]
    nnx.update(model, nnx.from_flat_state(flat))


def take(
    source: Path,
    trained: Source,
    model: Model,
    task: Task,
    dataset: data.Dataset,
    *,
    config: configs.Config,
) -> list[str]:
    """Puts what fits of a run into a new model of the same size; see the module.

    Args:
        source: what messages call the run.
        trained: what it has learned.
        model: new; is changed.
        task: of the new model.
        dataset: likewise.
        config: likewise.

    Returns:
        Lines on what was taken and what not.
    """
    old = {name: x[...] for name, x in parameters(trained.model).items()}
    new = {name: x[...] for name, x in parameters(model).items()}
    lines = []
    if "position" in old and "position" in new:
        sides = [round(len(x) ** 0.5) for x in (old["position"], new["position"])]
        if sides[0] != sides[1]:
            old["position"] = resampled(old["position"], sides[1])
            lines += ["position: resampled from {0} x {0} to {1} x {1} patches".format(*sides)]
    fresh = {name for name in new if name not in old or old[name].shape != new[name].shape}
    if not _same_classes(trained.class_names, dataset.class_names):
        fresh |= HEAD
        lines += ["head: new, for its classes are others"]
    if ("pre_logits/kernel" in old) != ("pre_logits/kernel" in new):
        fresh |= HEAD
        lines += ["head: new, for only one of the models has a layer before it"]
    fresh |= {name for names in TOGETHER if names & fresh for name in names}
    fresh &= set(new)
    put(model, {name: x for name, x in old.items() if name not in fresh})
    mean = " (the running mean)" if trained.config.optim.ema else ""
    count = f"{len(new) - len(fresh)} of {len(new)} arrays of parameters are taken{mean}"
    there = {name: f"{x.shape} there" for name, x in old.items()}
    return [
        f"{source} at step {trained.step}: {count}",
        *lines,
        *(f"{k}: {new[k].shape} new, {there.get(k, 'not there')}" for k in sorted(fresh)),
        *(f"{k}: left out, no place here" for k in sorted(set(old) - set(new))),
        *_take_attention(trained, model, task, config),
    ]


def _same_classes(old: Sequence[str], new: Sequence[str]) -> bool:
    """Numbers in the place of names say nothing of what the classes are."""
    numbers = [str(i) for i in range(len(new))]
    unknown = numbers in (list(old), list(new))
    return len(old) == len(new) and (unknown or list(old) == list(new))


def resampled(
    position: Float[Array, "positions width"], side: int
) -> Float[Array, "new_positions width"]:
    """Positions of a square grid, row by row, on one of another side: bicubic, antialiased."""
    grid = position.reshape(round(len(position) ** 0.5), -1, position.shape[-1])
    shape = (side, side, position.shape[-1])
    return jax.image.resize(grid, shape, "bicubic", antialias=True).reshape(-1, shape[-1])


FREQUENCIES = ("kind", "coupling", "num_features", "share_heads", "transferred")
"""Fields of `config.attention` that say how frequencies are drawn."""


def _take_attention(trained: Source, model: Model, task: Task, config: configs.Config) -> list[str]:
    """Frequencies and running moments into the new model; what became of them."""
    attention, measured = (trained.config.attention, config.attention), False
    fields = {name: [getattr(each, name) for each in attention] for name in FREQUENCIES}
    different = [f"{name} {a!r} -> {b!r}" for name, (a, b) in fields.items() if a != b]
    for layers in zip(task.layers(trained.model), task.layers(model), strict=True):
        old, new = (layer.attention_fn for layer in layers)
        if not (isinstance(old, PerformerAttention) and isinstance(new, PerformerAttention)):
            continue
        if not different:
            new.frequencies[...] = old.frequencies[...]
            for name, x in new.learned.items():
                x[...] = old.learned[name][...]
        moments = [np.shape(x.statistics["moments"]) for x in (old, new) if x.statistics]
        if len(moments) == 2 and moments[0] == moments[1]:
            new.calibrate(old.statistics["moments"][...])
            measured = True
    if config.attention.kind != "performer":
        return []
    drawn = f"drawn anew ({', '.join(different)})" if different else "taken"
    calibration = "running moments are taken" if measured else "begins anew"
    calibrated = config.attention.calibration != "none"
    return [f"frequencies: {drawn}", *[f"calibration: {calibration}"] * calibrated]
