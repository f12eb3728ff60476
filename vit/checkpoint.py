"""Checkpoints: parameters, optimiser, random streams, frequencies and the step.

The position in the data needs no room of its own: the stream of batches is a function of the step.
Each array is saved with a checksum, for Orbax does not notice when its bytes have changed on disk.
"""

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Integer
from orbax.checkpoint import v1 as ocp

KEEP = 2


class SaveError(OSError):
    """A checkpoint could not be written."""


def open_checkpoints(workdir: Path, *, write: bool = False) -> ocp.training.Checkpointer:
    """The checkpoints of a run. Close it, or use it in a `with`.

    A checkpoint appears under its final name only when it is whole. With `write` the last `KEEP`
    of them are kept, and what an interrupted process left half-written is removed; without it
    nothing is changed, so that a run that is still going on can be read.
    """
    policy: Any = ocp.training.preservation_policies.LatestN(KEEP) if write else None
    return ocp.training.Checkpointer(
        str((workdir / "checkpoints").resolve()),
        preservation_policy=policy,
        cleanup_tmp_directories=write,
    )


def exists(workdir: Path) -> bool:
    """Whether there is a checkpoint, readable or not."""
    return any(p.name.isdecimal() for p in (workdir / "checkpoints").glob("*"))


def save(checkpoints: ocp.training.Checkpointer, step: int, state: Any) -> None:
    """Saves `state`, a pytree of arrays, in the background, after what is still being saved.

    Raises:
        SaveError: when this or the one before cannot be written; earlier checkpoints are intact.
    """
    content = {"state": state, "checksums": checksums(state)}
    try:
        checkpoints.save_checkpointables_async(step, content, force=True, overwrite=True)
    except Exception as error:
        raise _save_error(checkpoints, error) from error


def finish(checkpoints: ocp.training.Checkpointer) -> None:
    """Waits until everything is on disk, and closes.

    Raises:
        SaveError: as `save`.
    """
    try:
        checkpoints.close()
    except Exception as error:
        raise _save_error(checkpoints, error) from error


def restore(workdir: Path, state: Any) -> tuple[int, Any]:
    """Step and state of the newest checkpoint that can be read; nothing is changed on disk.

    A damaged one is named and passed over.

    Args:
        workdir: of the run.
        state: arrays, or `jax.ShapeDtypeStruct`s with shardings, like those that were saved.

    Raises:
        ValueError: when there is no checkpoint, or none can be read.
    """
    failures: list[str] = []
    leaves = jax.tree.leaves(state)
    everywhere = leaves[0].sharding
    if isinstance(everywhere, NamedSharding):
        everywhere = NamedSharding(everywhere.mesh, PartitionSpec())
    sums = jax.ShapeDtypeStruct((len(leaves),), jnp.uint32, sharding=everywhere)
    with open_checkpoints(workdir) as checkpoints:
        for found in reversed(checkpoints.checkpoints):
            try:
                loaded = checkpoints.load_checkpointables(
                    found.step, {"state": state, "checksums": sums}
                )
                if not jnp.array_equal(checksums(loaded["state"]), loaded["checksums"]):
                    raise ValueError("its checksums are wrong: the files were changed")
            except Exception as error:  # Orbax, TensorStore, JSON: each has its own for damage
                reason = " ".join(str(error).split())[:300]
                failures.append(f"{found.path} cannot be read ({type(error).__name__}: {reason})")
                continue
            for failure in failures:
                print(f"{failure}; going back to step {found.step}")
            return found.step, loaded["state"]
    if not failures:
        raise ValueError(f"{workdir} holds no checkpoint yet")
    raise ValueError("no checkpoint can be read:\n  " + "\n  ".join(failures))


def set_aside(workdir: Path, step: int) -> None:
    """Moves the checkpoints after `step`, which could not be read, to `workdir`/unreadable."""
    if jax.process_index() == 0:
        for folder in (workdir / "checkpoints").iterdir():
            if folder.name.isdecimal() and int(folder.name) > step:
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


def _save_error(checkpoints: ocp.training.Checkpointer, error: Exception) -> SaveError:
    steps = sorted(int(p.name) for p in Path(checkpoints.directory).glob("*") if p.name.isdecimal())
    reason = " ".join(str(error).split())[:500]
    return SaveError(
        f"a checkpoint could not be written to {checkpoints.directory}:"
        f" {type(error).__name__}: {reason}. Complete are those of steps {steps}; make room, and"
        " the same command resumes from the last of them"
    )
