"""Checkpoints: parameters, optimiser, random streams, frequencies and the step.

The position in the data needs no room of its own: the stream of batches is a function of the step.
Each array is saved with a checksum, for Orbax does not notice when its bytes have changed on disk.
"""

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Integer
from orbax.checkpoint import v1 as ocp
from orbax.checkpoint._src.futures.synchronization import OperationIdGenerator

from vit.reports import metrics
from vit.run import hosts

KEEP = 2
"""Newest checkpoints that are kept."""

PATTERN = "*?[\\"
"""Signs that a path must not contain: Orbax takes the first three for a pattern when it puts a
checkpoint together, and TensorStore the last for a slash. Nor may it contain bytes that are no
UTF-8."""


class SaveError(OSError):
    """A checkpoint could not be written."""


@dataclasses.dataclass(frozen=True)
class BestEvaluated:
    """Preservation policy of Orbax: the checkpoint that `metrics.best` names."""

    log: Path

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Return for each checkpoint whether it stays."""
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
    """Response of the save that goes on in the background, or None. Its thread and descriptors end
    when its result is read."""

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        finish(self)


def found(workdir: Path) -> list[int]:
    """Return the steps of the checkpoints that are there, readable or not."""
    names = (path.name for path in (workdir / "checkpoints").glob("*"))
    return sorted(int(name) for name in names if name.isdecimal())


def check_path(workdir: Path) -> None:
    """Raise ValueError for a folder whose checkpoints could not be read again.

    Its path contains what Orbax or TensorStore misread (`PATTERN`), or is the address of a bucket.
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
    """Open the checkpoints of a run. Close it with `finish`, or use it in a `with`.

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


def save(checkpoints: Checkpoints, step: int, state: Any) -> None:
    """Save `state`, a pytree of arrays, in the background, after what is still being saved.

    Raises:
        SaveError: when this or the one before cannot be written; earlier checkpoints are intact.
    """
    content = {"state": state, "checksums": checksums(state)}
    with _failing_as_save_error(checkpoints):
        _settle(checkpoints)
        checkpoints.saving = checkpoints.orbax.save_checkpointables_async(
            step, content, force=True, overwrite=True
        )


def finish(checkpoints: Checkpoints) -> None:
    """Wait until everything is on disk, and close.

    Raises:
        SaveError: as `save`.
    """
    with _failing_as_save_error(checkpoints):
        try:
            _settle(checkpoints)
        finally:
            checkpoints.orbax.close()


def _settle(checkpoints: Checkpoints) -> None:
    """Wait for the save that goes on."""
    saving, checkpoints.saving = checkpoints.saving, None
    if saving is not None:
        saving.result()


@contextlib.contextmanager
def _failing_as_save_error(checkpoints: Checkpoints) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise SaveError(
            f"a checkpoint could not be written to {checkpoints.orbax.directory}:"
            f" {type(error).__name__}: {' '.join(str(error).split())[:500]}. Complete are those of"
            f" steps {found(checkpoints.workdir)}; mend that (is there room on the disk?), and the"
            " same command resumes from the last of them"
        ) from error


def chosen_steps(workdir: Path, step: int | str | None) -> list[int]:
    """Return the steps of the checkpoints that are meant: all of them for None.

    Args:
        workdir: of the run.
        step: number, as 100 or "100", or "best" for that of the best evaluation.

    Raises:
        ValueError: when there is no such checkpoint.
    """
    there = found(workdir)
    if not there:
        raise ValueError(f"{workdir} holds no checkpoint yet")
    if step is None:
        return there
    if step == "best":
        best = metrics.best(workdir / "metrics.jsonl", there)
        if best is None:
            raise ValueError(f"{workdir} holds no checkpoint of a step that was evaluated")
        return [best]
    if not str(step).isdecimal():
        raise ValueError(f"step={step}: give the number of a checkpoint, or best")
    if int(step) not in there:
        steps = ", ".join(map(str, there))
        raise ValueError(f"{workdir} holds no checkpoint of step {step}, but of {steps}")
    return [int(step)]


def restore(workdir: Path, state: Any, step: int | str | None = None) -> tuple[int, Any]:
    """Return step and state of the newest checkpoint that can be read; change nothing on disk.

    A damaged one is named and passed over. Several processes, all of which must call this, take the
    newest that every one of them can read.

    Args:
        workdir: of the run.
        state: arrays, or `jax.ShapeDtypeStruct`s with shardings, like those that were saved.
        step: of the one checkpoint to read, as `chosen_steps`.

    Raises:
        ValueError: as `chosen_steps`, or when none can be read.
    """
    failures: list[str] = []
    leaves = jax.tree.leaves(state)
    everywhere = leaves[0].sharding
    if isinstance(everywhere, NamedSharding):
        everywhere = NamedSharding(everywhere.mesh, PartitionSpec())
    sums = jax.ShapeDtypeStruct((len(leaves),), jnp.uint32, sharding=everywhere)
    content = {"state": state, "checksums": sums}
    check_path(workdir)
    chosen = json.loads(hosts.gathered(json.dumps(chosen_steps(workdir, step)))[0])
    for number in reversed(chosen):
        folder = workdir / "checkpoints" / str(number)
        loaded, reason = _loaded(folder, content)
        reasons = hosts.failures(reason)
        _count_alike()
        if not reasons:  # a checksum is computed by all together
            same = jnp.array_equal(checksums(loaded["state"]), loaded["checksums"])
            wrong = "ValueError: its checksums are wrong: the files were changed"
            reasons = hosts.failures("" if same else wrong)
        if not reasons:
            for failure in failures:
                print(f"{failure}; going back to step {number}")
            return number, loaded["state"]
        failures.append(f"{folder} cannot be read ({'; '.join(reasons)})")
    raise ValueError("no checkpoint can be read:\n  " + "\n  ".join(failures))


def _count_alike() -> None:
    """Orbax's barriers have the number of its operation in their name, which all must have made."""
    number = int(OperationIdGenerator.get_current_operation_id())
    for _ in range(max(map(int, hosts.gathered(str(number)))) - number):
        OperationIdGenerator.next_operation_id()


def _loaded(folder: Path, content: Any) -> tuple[Any, str]:
    """Return what this process reads of a checkpoint, waiting for no other; or why it cannot."""
    alone: Any = contextlib.nullcontext()
    if jax.process_count() > 1:
        options = ocp.options.MultiprocessingOptions(
            primary_host=None,
            active_processes={jax.process_index()},
            barrier_sync_key_prefix=str(jax.process_index()),
        )
        alone = ocp.Context(multiprocessing_options=options)
    try:
        with alone:
            return ocp.load_checkpointables(str(folder.resolve()), content), ""
    except Exception as error:  # Orbax, TensorStore, JSON: each has its own for damage
        return None, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def shapes(workdir: Path) -> Any:
    """Return the tree of the newest checkpoint, in dicts whose leaves have a shape and a dtype.

    Raises:
        ValueError: when there is no checkpoint, or none whose description can be read.
    """
    for step in reversed(found(workdir)):
        with contextlib.suppress(Exception):  # as in `_loaded`
            folder = str((workdir / "checkpoints" / str(step)).resolve())
            return ocp.checkpointables_metadata(folder).metadata["state"]
    raise ValueError(f"{workdir} holds no checkpoint whose description can be read")


def set_aside(workdir: Path, step: int) -> None:
    """Move the checkpoints after `step`, which could not be read, to `workdir`/unreadable."""
    if jax.process_index() == 0:
        for number in found(workdir):
            if number > step:
                target = workdir / "unreadable" / str(number)
                shutil.rmtree(target, ignore_errors=True)
                target.parent.mkdir(exist_ok=True)
                (workdir / "checkpoints" / str(number)).rename(target)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("checkpoints set aside")


@jax.jit
def checksums(state: Any) -> Integer[Array, " arrays"]:
    """Return the sum of (2 i + 1) word_i mod 2^32 of each array: any changed word changes it."""

    def checksum(x: Array) -> Integer[Array, ""]:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
        words = jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
        factors = jax.lax.iota(jnp.uint32, x.size).reshape(x.shape) * 2 + 1
        return jnp.sum(words * factors, dtype=jnp.uint32)

    return jnp.stack([checksum(x) for x in jax.tree.leaves(state)])
