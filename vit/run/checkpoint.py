"""Checkpoints: parameters, optimiser, random streams, frequencies and the step.

The position in the data is not saved: the stream of batches is a function of the step.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from vit.reports import metrics
from vit.run import devices
from vit.storage import buckets
from vit.storage.buckets import Address

COMMITTED = "commit_success.txt"
"""Last object of a checkpoint of Orbax in a bucket."""
KEEP = 2
"""Number of newest checkpoints that are kept."""


class SaveError(OSError):
    """A checkpoint could not be written."""


@dataclasses.dataclass(frozen=True)
class BestEvaluated:
    """Preservation policy of Orbax: keep the checkpoint of the best evaluation."""

    log: Path

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Return for each checkpoint whether to keep it."""
        del context
        numbers = [each.step for each in checkpoints]
        best = metrics.best(self.log, numbers)
        return [step == best for step in numbers]


@dataclasses.dataclass
class Checkpoints:
    """Open checkpoints of a run, from `open_checkpoints`."""

    workdir: Path
    orbax: ocp.training.Checkpointer
    saving: Any = None
    """Response of the save in the background, or None; reading its result ends its thread."""

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        finish(self)


def complete_steps(workdir: Path) -> list[int]:
    """Return the steps of all complete checkpoints, readable or not.

    On a disk a complete one has its final name, in a bucket an object that is written last.
    """
    folder = workdir / "checkpoints"
    if isinstance(workdir, Address):
        names = (path.parent.name for path in folder.glob(f"*/{COMMITTED}"))
    else:
        names = (path.name for path in folder.glob("*"))
    return sorted(int(name) for name in names if name.isdecimal())


def readable_path(workdir: Path) -> Path:
    """Return the folder of the checkpoints, by a path that Orbax and TensorStore do not misread.

    They read `*`, `?` and `[` as a pattern and a backslash as a slash. For a name with other than
    plain characters it is a link in the folder of temporary files, with the same name on all hosts.

    Raises:
        ValueError: if something else has the name of the link.
    """
    folder = workdir.resolve()
    if isinstance(folder, Address):
        return folder / "checkpoints"
    if re.fullmatch(r"[\w/ .,=+@~-]*", str(folder)):
        return folder / "checkpoints"
    name = hashlib.sha256(os.fsencode(folder)).hexdigest()[:32]
    link = Path(tempfile.gettempdir(), f"performer-run-{name}")
    with contextlib.suppress(FileExistsError):
        link.symlink_to(folder)
    if not link.is_symlink() or link.readlink() != folder:
        raise ValueError(f"{link} must be a link to {folder}: remove it")
    return link / "checkpoints"


def open_checkpoints(workdir: Path, keep_every: int = 0) -> Checkpoints:
    """Open the checkpoints of a run to save more; close with `finish`, or use them in a `with`.

    A checkpoint appears under its final name when it is complete. Unfinished ones are removed, and
    old ones except the last `KEEP`, the one of the best evaluation and the ones at multiples of
    `keep_every` steps.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    policies = ocp.training.preservation_policies
    kept: list[Any] = [policies.LatestN(KEEP), BestEvaluated(workdir / "metrics.jsonl")]
    if keep_every:
        kept.append(policies.EveryNSteps(keep_every))
    policy: Any = policies.AnyPreservationPolicy(kept)
    orbax = ocp.training.Checkpointer(
        str(readable_path(workdir)),
        preservation_policy=policy,
        cleanup_tmp_directories=True,
        lightweight_initialize=True,  # a damaged one does not affect the others
    )
    return Checkpoints(workdir, orbax)


def save(checkpoints: Checkpoints, step: int, state: Any) -> None:
    """Save `state`, a pytree of arrays, in the background, after the previous save.

    Raises:
        SaveError: when this or the previous one cannot be written; earlier checkpoints are intact.
    """
    with _failing_as_save_error(checkpoints):
        _settle(checkpoints)
        readable_path(checkpoints.workdir)  # temporary files may have been cleaned up
        checkpoints.saving = checkpoints.orbax.save_checkpointables_async(
            step, {"state": state}, force=True, overwrite=True
        )


def finish(checkpoints: Checkpoints) -> None:
    """Wait until all checkpoints are on disk, and close.

    Raises:
        SaveError: as `save`.
    """
    with _failing_as_save_error(checkpoints):
        try:
            _settle(checkpoints)
        finally:
            checkpoints.orbax.close()


def _settle(checkpoints: Checkpoints) -> None:
    """Wait for the save in the background."""
    saving, checkpoints.saving = checkpoints.saving, None
    if saving is not None:
        saving.result()


@contextlib.contextmanager
def _failing_as_save_error(checkpoints: Checkpoints) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise SaveError(
            f"a checkpoint could not be written to {checkpoints.workdir / 'checkpoints'}:"
            f" {type(error).__name__}: {' '.join(str(error).split())[:500]}. The checkpoints"
            f" of steps {complete_steps(checkpoints.workdir)} are complete. Fix the cause (is the"
            " disk full?); the same command resumes from the last of them"
        ) from error


def chosen_steps(workdir: Path, step: int | str | None) -> list[int]:
    """Return the steps of the chosen checkpoints: all of them for None.

    Args:
        workdir: folder of the run.
        step: number, as 100 or "100", or "best" for the best evaluation.

    Raises:
        ValueError: when no such checkpoint exists.
    """
    there = complete_steps(workdir)
    if not there:
        raise ValueError(f"{workdir} has no checkpoint yet")
    if step is None:
        return there
    if step == "best":
        best = metrics.best(workdir / "metrics.jsonl", there)
        if best is None:
            raise ValueError(f"{workdir} has no checkpoint of an evaluated step")
        return [best]
    if not str(step).isdecimal():
        raise ValueError(f"step={step}: give the number of a checkpoint, or best")
    if int(step) not in there:
        steps = ", ".join(map(str, there))
        raise ValueError(f"{workdir} has no checkpoint of step {step}, but of {steps}")
    return [int(step)]


def restore(workdir: Path, state: Any, step: int | str | None = None) -> tuple[int, Any]:
    """Return step and state of the newest readable checkpoint; change nothing on disk.

    A damaged checkpoint is reported and skipped. With several processes all must call this.

    Args:
        workdir: folder of the run.
        state: arrays, or `jax.ShapeDtypeStruct`s with shardings, like the saved ones.
        step: step of the checkpoint, as in `chosen_steps`.

    Raises:
        ValueError: as `chosen_steps`, or when no checkpoint can be read.
    """
    failures: list[str] = []
    chosen = json.loads(devices.gathered(json.dumps(chosen_steps(workdir, step)))[0])
    for number in reversed(chosen):
        folder = workdir / "checkpoints" / str(number)
        loaded, reason, path = {}, "", ""
        try:
            path = str(readable_path(workdir) / str(number))
            loaded = ocp.load_checkpointables(path, {"state": state})
        except Exception as error:  # Orbax, TensorStore and JSON raise many kinds
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            reason = _without_frequencies(path, state) or reason
        reasons = devices.failures(reason)
        if not reasons:
            for failure in failures:
                print(f"{failure}; going back to step {number}")
            return number, loaded["state"]
        failures.append(f"{folder} cannot be read ({'; '.join(reasons)})")
    raise ValueError("no checkpoint can be read:\n  " + "\n  ".join(failures))


def _without_frequencies(path: str, state: Any) -> str:
    """Return a reason if a checkpoint lacks the frequencies that the state has, else ""."""
    with contextlib.suppress(Exception):  # a damaged one has another reason
        saved = ocp.checkpointables_metadata(path).metadata["state"]
        has = [
            "frequencies" in jax.tree_util.keystr(k) for k, _ in jax.tree.leaves_with_path(saved)
        ]
        needs = [
            name
            for path, _ in jax.tree.leaves_with_path(state)
            if "frequencies" in (name := jax.tree_util.keystr(path))
        ]
        if needs and not any(has):
            return (
                f"it lacks the frequencies of attention, {len(needs)} arrays such as {needs[0]}:"
                " nnx.state(model, nnx.Param) leaves them out, save nnx.state(model)"
            )
    return ""


def set_aside(workdir: Path, step: int) -> None:
    """Move the unreadable checkpoints after `step` to `workdir`/unreadable."""
    if jax.process_index() == 0:
        for number in complete_steps(workdir):
            if number > step:
                target = workdir / "unreadable" / str(number)
                buckets.move(workdir / "checkpoints" / str(number), target)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("checkpoints set aside")
