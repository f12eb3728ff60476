"""Checkpoints: parameters, optimiser, random streams, frequencies and the step.

The position in the data needs no room of its own: the stream of batches is a function of the step.
Each array is saved with a checksum, for Orbax does not notice when its bytes have changed on disk.
"""

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Integer
from orbax.checkpoint import v1 as ocp
from orbax.checkpoint._src.futures.synchronization import OperationIdGenerator

from vit import files, hosts, metrics

KEEP = 2

PATTERN = "*?[\\"
"""What a path must not contain: Orbax takes the first three for a pattern when it puts a checkpoint
together, and TensorStore the last for a slash. Nor may it contain bytes that are no UTF-8."""


class SaveError(OSError):
    """A checkpoint could not be written."""


class Checkpoint(NamedTuple):
    """One of them, under its final name."""

    step: int
    folder: Path


@dataclasses.dataclass(frozen=True)
class BestEvaluated:
    """A preservation policy of Orbax: the checkpoint that `metrics.best` names."""

    log: Path

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """For each of them whether it stays."""
        del context
        steps = [each.step for each in checkpoints]
        best = metrics.best(self.log, steps)
        return [step == best for step in steps]


@dataclasses.dataclass
class Checkpoints:
    """The open checkpoints of a run, from `open_checkpoints`."""

    workdir: Path
    orbax: ocp.training.Checkpointer
    saving: tuple[int, Any] | None = None
    """Step and response of the save that goes on in the background. Its thread and descriptors end
    only when somebody asks for its result."""

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """Those that are there, readable or not, by step."""
        return found(self.workdir)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        finish(self)


def check_path(workdir: Path) -> None:
    """Looks whether checkpoints in that folder could be read again.

    Raises:
        ValueError: when its path contains what Orbax or TensorStore take for something else, or it
            is the address of a bucket.
    """
    if ":/" in str(workdir):
        raise ValueError(
            f"{workdir} is an address: runs are written to a file system. Mount the bucket (gcsfuse"
            " for gs://) and give its folder; data may be read from an address (config.data.dir)"
        )
    path = str(workdir.resolve())
    signs = [repr(c) for c in path if c in PATTERN or "\ud800" <= c <= "\udfff"]
    if signs:
        raise ValueError(
            f"{path} cannot hold checkpoints, for its path contains {' and '.join(signs)}; take or"
            " rename the folder to one without"
        )


def open_checkpoints(workdir: Path, *, write: bool = False, keep_every: int = 0) -> Checkpoints:
    """The checkpoints of a run. Close it with `finish`, or use it in a `with`.

    A checkpoint appears under its final name only when it is whole. With `write` the last `KEEP`
    of them are kept, that of the best evaluation and those at multiples of `keep_every` steps, and
    what an interrupted process left half-written is removed; without it nothing is changed, so that
    a run that is still going on can be read.

    Raises:
        ValueError: as `check_path`.
    """
    check_path(workdir)
    policies = ocp.training.preservation_policies
    kept: list[Any] = [policies.LatestN(KEEP), BestEvaluated(workdir / "metrics.jsonl")]
    if keep_every:
        kept.append(policies.EveryNSteps(keep_every))
    policy: Any = policies.AnyPreservationPolicy(kept) if write else None
    orbax = ocp.training.Checkpointer(
        str((workdir / "checkpoints").resolve()),
        preservation_policy=policy,
        cleanup_tmp_directories=write,
        lightweight_initialize=True,  # damage of one does not concern the others
    )
    return Checkpoints(workdir, orbax)


def exists(workdir: Path) -> bool:
    """Whether there is a checkpoint, readable or not."""
    return bool(found(workdir))


def check_not_lost(workdir: Path, progress: int) -> None:
    """Looks whether a run without checkpoints may begin.

    Args:
        workdir: of the run.
        progress: last step in its log, or 0.

    Raises:
        ValueError: when it has saved checkpoints, or has come some way, and its folder of them is
            not there: a disk that is not mounted, say.
    """
    folder = workdir / "checkpoints"
    if (workdir / "saved").exists() or (progress and not folder.exists()):
        raise ValueError(
            f"{workdir} has been trained (its log ends at step {progress}), but {folder} holds no"
            " checkpoint; bring it back (is its disk mounted?), or remove the folder of the run,"
            " log and all, to train from the start"
        )


def save(checkpoints: Checkpoints, step: int, state: Any) -> None:
    """Saves `state`, a pytree of arrays, in the background, after what is still being saved.

    Raises:
        SaveError: when this or the one before cannot be written; earlier checkpoints are intact.
    """
    content = {"state": state, "checksums": checksums(state)}
    try:
        _settle(checkpoints)
        response = checkpoints.orbax.save_checkpointables_async(
            step, content, force=True, overwrite=True
        )
    except Exception as error:
        raise _save_error(checkpoints, error) from error
    checkpoints.saving = step, response


def finish(checkpoints: Checkpoints) -> None:
    """Waits until everything is on disk, and closes.

    Raises:
        SaveError: as `save`.
    """
    try:
        try:
            _settle(checkpoints)
        finally:
            checkpoints.orbax.close()
    except Exception as error:
        raise _save_error(checkpoints, error) from error


def _settle(checkpoints: Checkpoints) -> None:
    """Waits for the save that goes on, and notes that there is a checkpoint."""
    saving, checkpoints.saving = checkpoints.saving, None
    if saving is None:
        return
    step, response = saving
    response.result()
    if jax.process_index() == 0:
        files.write(checkpoints.workdir / "saved", f"{step}\n")


def chosen_step(workdir: Path, step: int | str | None) -> int | None:
    """The number that is meant: "best" is that of the best evaluation, "100" is 100.

    Raises:
        ValueError: for another word, or when none of the checkpoints was evaluated.
    """
    if step is None or isinstance(step, int) or step.isdecimal():
        return step if step is None else int(step)
    if step != "best":
        raise ValueError(f"step={step}: give the number of a checkpoint, or best")
    number = metrics.best(workdir / "metrics.jsonl", [each.step for each in found(workdir)])
    if number is None:
        raise ValueError(f"{workdir} holds no checkpoint of a step that was evaluated")
    return number


def restore(workdir: Path, state: Any, step: int | str | None = None) -> tuple[int, Any]:
    """Step and state of the newest checkpoint that can be read; nothing is changed on disk.

    A damaged one is named and passed over. With a step it is that checkpoint or none. Several
    processes, all of which must ask, take the newest that every one of them can read.

    Args:
        workdir: of the run.
        state: arrays, or `jax.ShapeDtypeStruct`s with shardings, like those that were saved.
        step: of the checkpoint, as `chosen_step`; the newest if None.

    Raises:
        ValueError: when there is no checkpoint, none of that step, or none can be read.
    """
    failures: list[str] = []
    leaves = jax.tree.leaves(state)
    everywhere = leaves[0].sharding
    if isinstance(everywhere, NamedSharding):
        everywhere = NamedSharding(everywhere.mesh, PartitionSpec())
    sums = jax.ShapeDtypeStruct((len(leaves),), jnp.uint32, sharding=everywhere)
    content = {"state": state, "checksums": sums}
    check_path(workdir)
    there, step = found(workdir), chosen_step(workdir, step)
    chosen = [each for each in there if step in (None, each.step)]
    if there and not chosen:
        steps = ", ".join(str(each.step) for each in there)
        raise ValueError(f"{workdir} holds no checkpoint of step {step}, but of {steps}")
    numbers: list[int] = json.loads(hosts.gathered(json.dumps([each.step for each in chosen]))[0])
    for number in reversed(numbers):
        folder = workdir / "checkpoints" / str(number)
        loaded, reason = _loaded(folder, content)
        reasons = hosts.failures(reason)
        _count_alike()
        if not reasons:  # a checksum is computed by all together
            same = jnp.array_equal(checksums(loaded["state"]), loaded["checksums"])
            wrong = "ValueError: its checksums are wrong: the files were changed"
            reasons = hosts.failures("" if same else wrong)
        if reasons:
            failures.append(f"{folder} cannot be read ({'; '.join(reasons)})")
            continue
        for failure in failures:
            print(f"{failure}; going back to step {number}")
        return number, loaded["state"]
    if not failures:
        raise ValueError(f"{workdir} holds no checkpoint yet")
    raise ValueError("no checkpoint can be read:\n  " + "\n  ".join(failures))


def _count_alike() -> None:
    """Orbax's barriers have the number of its operation in their name, which all must have made."""
    number = int(OperationIdGenerator.get_current_operation_id())
    for _ in range(max(map(int, hosts.gathered(str(number)))) - number):
        OperationIdGenerator.next_operation_id()


def _loaded(folder: Path, content: Any) -> tuple[Any, str]:
    """What this process reads of a checkpoint, waiting for no other; or why it cannot."""
    try:
        files.check(folder)
        with _alone():
            return ocp.load_checkpointables(str(folder.resolve()), content), ""
    except Exception as error:  # Orbax, TensorStore, JSON: each has its own for damage
        return None, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _alone() -> contextlib.AbstractContextManager[Any]:
    """Orbax takes this process for the only one."""
    if jax.process_count() == 1:
        return contextlib.nullcontext()
    options = ocp.options.MultiprocessingOptions(
        primary_host=None,
        active_processes={jax.process_index()},
        barrier_sync_key_prefix=str(jax.process_index()),
    )
    return ocp.Context(multiprocessing_options=options)


def shapes(workdir: Path) -> Any:
    """The tree of the newest checkpoint, in plain dicts whose leaves have a shape and a dtype.

    Raises:
        ValueError: when there is no checkpoint, or none whose description can be read.
    """
    for _, folder in reversed(found(workdir)):
        with contextlib.suppress(Exception):  # as in `restore`
            files.check(folder)
            return ocp.checkpointables_metadata(str(folder.resolve())).metadata["state"]
    raise ValueError(f"{workdir} holds no checkpoint whose description can be read")


def found(workdir: Path) -> list[Checkpoint]:
    """Those that are there, readable or not, by step."""
    paths = (workdir / "checkpoints").glob("*")
    return sorted(Checkpoint(int(path.name), path) for path in paths if path.name.isdecimal())


def set_aside(workdir: Path, step: int) -> None:
    """Moves the checkpoints after `step`, which could not be read, to `workdir`/unreadable."""
    if jax.process_index() == 0:
        for number, folder in found(workdir):
            if number > step:
                target = workdir / "unreadable" / folder.name
                shutil.rmtree(target, ignore_errors=True)
                target.parent.mkdir(exist_ok=True)
                folder.rename(target)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("checkpoints set aside")


@jax.jit
def checksums(state: Any) -> Integer[Array, " arrays"]:
    """For each array the sum of (2 i + 1) word_i mod 2^32: any one changed word changes it."""

    def checksum(x: Array) -> Integer[Array, ""]:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
        words = jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
        factors = jax.lax.iota(jnp.uint32, x.size).reshape(x.shape) * 2 + 1
        return jnp.sum(words * factors, dtype=jnp.uint32)

    return jnp.stack([checksum(x) for x in jax.tree.leaves(state)])


def _save_error(checkpoints: Checkpoints, error: Exception) -> SaveError:
    reason = " ".join(str(error).split())[:500]
    complete = [each.step for each in checkpoints.checkpoints]
    return SaveError(
        f"a checkpoint could not be written to {checkpoints.orbax.directory}:"
        f" {type(error).__name__}: {reason}. Complete are those of steps {complete}; mend that (is"
        " there room on the disk?), and the same command resumes from the last of them"
    )
