"""A new run at step 0 whose parameters come from another run, or from a file.

    performer-vit train --config=fashion_mnist --workdir=runs/fine \\
        --init_from=runs/coarse

The evaluated parameters of the other run are copied: the running mean if there is one. Parts that
depend on data, image or attention are adapted, or new:

    head         sorted as the classes of the data, by name; new if the classes differ in number, or
                 in name if both runs know the names, or if one has a tanh layer before it
    positions    resampled to the new grid (bicubic with antialiasing); "sincos" ones are computed
    patches      new if the patch size or the number of channels differs
    class token  new if the other run has none
    frequencies  copied if coupling, number of features and heads are the same; else drawn anew;
                 those learned by attention transfer must fit
    calibration  running moments are copied if both runs keep them; they are of queries and keys,
                 whatever the frequencies

The optimiser and the random streams begin anew; width and depth must be the same. The new run does
not need the other one any more.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.typing import ArrayLike

from performer.nnx import PerformerAttention
from vit import config as configs
from vit import data, use
from vit.data.classes import Match, matched
from vit.model.classification import ARCHITECTURES
from vit.run import runs
from vit.storage import buckets, files, folders
from vit.task import Model, Task, opened, random_streams
from vit.weights.positions import resampled

Resample = Callable[[Any, int], Any]
"""(positions of a square grid, new side) -> new positions."""


class Source(NamedTuple):
    """A trained run."""

    config: Any
    step: int
    class_names: tuple[str, ...]
    model: Model
    """In evaluation mode."""


ORIGIN = "origin.json"
"""File of a run that began from another: its path and step."""

HEAD = {"head/kernel", "head/bias"}
TOGETHER = ({"embed/kernel", "embed/bias"}, HEAD)
"""Pairs of arrays that are new together."""


def init_from(
    source: Path,
    config: Any,
    workdir: Path,
    dataset: data.Dataset | None = None,
    match: Match = "name",
) -> list[str]:
    """Begin a run from another; one that exists already is left as it is, to be resumed.

    Args:
        source: folder of a run of the same task, which is only read.
        config: config of the new run.
        workdir: folder of the new run; it appears in one piece.
        dataset: data set of the new run; None for the config's.
        match: how the classes of the head are matched, as `classes.matched`.

    Returns:
        A report on what was copied, in lines; empty if the run exists.

    Raises:
        ValueError: if the config cannot work, the source holds no run or one of another width or
            depth, or without features that the config has as `transferred`; the workdir holds
            anything else, or there are several processes.
        vit.run.checkpoint.SaveError: if the run cannot be written.
    """
    origin = files.read_json(workdir / ORIGIN) or {}
    place = str(source.resolve())
    if (workdir / "config.json").exists():
        if origin.get("init_from") == place:
            return []
        start = f"from {origin['init_from']}" if origin else "without --init_from"
        raise ValueError(
            f"{workdir} holds a run that was begun {start}, not from {place}; take another"
            " --workdir, or resume the run by the same command without --init_from"
        )
    if jax.process_count() > 1:
        raise ValueError(
            "--init_from makes a run by one process: give the same command on one host without"
            f" --distributed, stop it, and start it on all of them (--workdir={workdir})"
        )
    configs.validate(config)
    if (other := configs.of_run(source).task) != config.task:
        raise ValueError(
            f"--init_from={source} is a run of the task {other!r}, and the config is of"
            f" {config.task!r}"
        )
    if config.task in ARCHITECTURES:  # no data are needed
        donor = use.load(source)
        trained = Source(donor.config, donor.step, donor.class_names, donor.model)
    else:
        run = runs.restore(source)
        trained = Source(run.config, run.step, run.dataset.class_names, run.model())
    if trained.config.size != config.size:
        raise ValueError(
            f"{source} has the sizes {trained.config.size}; the new run {config.size}: give the"
            " same numbers in config.model (any patch size may follow the slash of a variant)"
        )
    origin = {"init_from": place, "step": trained.step}
    with begun(config, workdir, origin, dataset) as (model, run):
        return take(source, trained, model, run, match)


@contextlib.contextmanager
def begun(
    config: configs.TrainConfig,
    workdir: Path,
    origin: Mapping[str, Any],
    dataset: data.Dataset | None = None,
) -> Iterator[tuple[Model, runs.Run]]:
    """Yield a new model and its run, which is in the folder, at step 0, after the block.

    Args:
        config: config of the new run.
        workdir: folder of the new run. It appears in one piece; after a kill the same call begins
            anew. If the block raises, nothing is written.
        origin: saved in the folder.
        dataset: data set of the new run; None for the config's.

    Raises:
        ValueError: if the config cannot work, or the workdir is not empty.
        vit.run.checkpoint.SaveError: if the run cannot be written.
    """
    configs.validate(config)
    workdir = buckets.path(workdir)
    folders.check_vacant(workdir, "--workdir")
    dataset, task = opened(config, dataset=dataset)
    data.check_apart(dataset)
    run = runs.Run(config, dataset, task)
    _ = run.rate  # raises what cannot be
    model = task.create(config, rngs=random_streams(config.seed))
    yield model, run
    with folders.atomic(workdir, "--workdir") as folder:
        files.write_json(folder / ORIGIN, dict(origin))
        runs.begin(folder, model, run)


def parameters(model: Model) -> dict[str, nnx.Variable]:
    """Return the parameters by name, as "blocks/0/attention/key/kernel"."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {"/".join(map(str, path)): variable for path, variable in flat}


def put(model: Model, arrays: Mapping[str, ArrayLike]) -> None:
    """Set the parameters of those names, in place; ignore others."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    for path, variable in flat:
        if (name := "/".join(map(str, path))) in arrays:
            variable[...] = arrays[name]
    nnx.update(model, nnx.from_flat_state(flat))


def take(
    source: Path, trained: Source, model: Model, run: runs.Run, match: Match = "name"
) -> list[str]:
    """Put the fitting arrays of a run into a new model of the same size; see the module.

    Args:
        source: name of the run in messages.
        trained: the run.
        model: new model; is changed.
        run: new run.
        match: as in `init_from`.

    Returns:
        A report in lines.
    """
    old = {name: x[...] for name, x in parameters(trained.model).items()}
    new = {name: x[...] for name, x in parameters(model).items()}
    lines = fit_positions(old, new, resampled)
    is_images = trained.config.task in ARCHITECTURES
    if not is_images and trained.class_names != run.dataset.class_names:
        raise ValueError(f"--init_from={source} has other symbols than the data of the new run")
    fresh: set[str] = set()
    head = fit_head(old, trained.class_names, run.dataset.class_names, match)
    if head is None:
        fresh |= HEAD
        lines += ["head: new, for the classes differ; --match=number keeps it if as many"]
    else:
        lines += head
    if ("pre_logits/kernel" in old) != ("pre_logits/kernel" in new):
        fresh |= HEAD
        lines += ["head: new, for only one of the models has a layer before it"]
    fresh = unfit(old, new, fresh)
    put(model, {name: x for name, x in old.items() if name not in fresh})
    mean = " (the running mean)" if trained.config.optim.ema else ""
    count = f"{len(new) - len(fresh)} of {len(new)} arrays of parameters are copied{mean}"
    return [
        f"{source} at step {trained.step}: {count}",
        *lines,
        *differences(old, new, fresh, "new"),
        *_take_attention(source, trained, model, run.task, run.config),
    ]


def fit_positions(old: dict[str, Any], new: Mapping[str, Any], resample: Resample) -> list[str]:
    """Resample the positions among `old`, in place, to the grid of `new`; return a report."""
    if "position" not in old or "position" not in new:
        return []
    sides = [round(len(x["position"]) ** 0.5) for x in (old, new)]
    if sides[0] == sides[1]:
        return []
    old["position"] = resample(old["position"], sides[1])
    return ["position: resampled from {0} x {0} to {1} x {1} patches".format(*sides)]


def fit_head(
    named: dict[str, Any],
    class_names: Sequence[str],
    new_names: Sequence[str],
    match: Match = "name",
) -> list[str] | None:
    """Sort the classes of the head among `named`, in place, as the new names; return a report.

    Returns:
        None if the classes differ: the head does not fit.
    """
    if len(class_names) != len(new_names):
        return None
    try:
        order = matched(class_names, new_names, match)
    except ValueError:
        return None
    if order == list(range(len(order))):
        return []
    named |= {name: named[name][..., np.array(order)] for name in HEAD & named.keys()}
    return ["head: its classes are sorted as the data's"]


def unfit(old: Mapping[str, Any], new: Mapping[str, Any], more: Collection[str] = ()) -> set[str]:
    """Return the parameters `new` that are absent or of another shape in `old`, or `TOGETHER`."""
    fresh = {name for name in new if name not in old or old[name].shape != new[name].shape}
    fresh |= {name for names in TOGETHER if names & (fresh | {*more}) for name in names}
    return fresh & new.keys()


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], fresh: Iterable[str], word: str
) -> list[str]:
    """Return a line for each array that only one side has, or that differs in shape."""
    there = {name: f"{x.shape} there" for name, x in old.items()}
    return [
        *(f"{k}: {new[k].shape} {word}, {there.get(k, 'not there')}" for k in sorted(fresh)),
        *(f"{k}: left out, no place here" for k in sorted(old.keys() - new.keys())),
    ]


FREQUENCIES = ("kind", "coupling", "num_features", "share_heads", "blocks")
"""Fields of `config.attention` that determine the draw of frequencies."""


def _take_attention(
    source: Path, trained: Source, model: Model, task: Task, config: Any
) -> list[str]:
    """Copy frequencies and running moments into the new model, and return a report.

    Raises:
        ValueError: for a layer whose features are learned, if the source has none of their size.
    """
    if "attention" not in configs.sections(type(config)):
        return []
    attention, measured, drawn = (trained.config.attention, config.attention), False, False
    fields = {name: [getattr(each, name) for each in attention] for name in FREQUENCIES}
    different = [f"{name} {a!r} -> {b!r}" for name, (a, b) in fields.items() if a != b]
    pairs = zip(task.layers(trained.model), task.layers(model), strict=True)
    for number, layers in enumerate(pairs):
        old, new = (layer.attention_fn for layer in layers)
        given, wanted = _features(old), _features(new)
        if "weights" in wanted and _shapes(given) != _shapes(wanted):
            raise ValueError(
                f"config.attention.blocks[{number}].transferred=True, and {source} has no learned"
                " features of this size there: take its config.attention.blocks, or False"
            )
        if "weights" in wanted or not different:
            for name in given.keys() & wanted.keys():
                wanted[name][...] = given[name][...]
        else:
            drawn |= bool(wanted)
        if not (isinstance(old, PerformerAttention) and isinstance(new, PerformerAttention)):
            continue
        moments = [np.shape(x.statistics["moments"]) for x in (old, new) if x.statistics]
        if len(moments) == 2 and moments[0] == moments[1]:
            new.calibrate(old.statistics["moments"][...])
            measured = True
    if config.attention.kind != "performer":
        return []
    frequencies = f"drawn anew ({', '.join(different)})" if drawn else "copied"
    calibration = "running moments are copied" if measured else "begins anew"
    calibrated = config.attention.calibration != "none"
    return [f"frequencies: {frequencies}", *[f"calibration: {calibration}"] * calibrated]


def _features(function: Any) -> dict[str, nnx.Variable]:
    """Frequencies of an attention function, and what attention transfer learned; {} if exact."""
    if not isinstance(function, PerformerAttention) or function.frequencies is None:
        return {}
    return {"frequencies": function.frequencies, **function.learned}


def _shapes(variables: Mapping[str, nnx.Variable]) -> dict[str, tuple[int, ...]]:
    return {name: x[...].shape for name, x in variables.items()}
