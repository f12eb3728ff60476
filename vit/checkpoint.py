"""Checkpoints: parameters, optimiser, random streams, frequencies and the position in the data."""

from pathlib import Path
from typing import Any

from flax import nnx
from orbax.checkpoint import v1 as ocp

KEEP = 2


def open_checkpoints(workdir: Path) -> ocp.training.Checkpointer:
    """The checkpoints of a run, the last `KEEP` of them kept. Close it, or use it in a `with`.

    A checkpoint appears under its final name only when it is whole; what an interrupted process
    left half-written is removed.
    """
    policy: Any = ocp.training.preservation_policies.LatestN(KEEP)
    return ocp.training.Checkpointer(
        str((workdir / "checkpoints").resolve()),
        preservation_policy=policy,
        cleanup_tmp_directories=True,
    )


def save(checkpoints: ocp.training.Checkpointer, step: int, state: nnx.State, data: Any) -> None:
    """Saves `state` and the position of the iterator `data`, in the background."""
    checkpoints.save_checkpointables_async(step, {"state": state, "data": data}, force=True)


def restore(checkpoints: ocp.training.Checkpointer, state: nnx.State, data: Any) -> nnx.State:
    """The state of the last checkpoint, in the shapes of `state`; moves `data` to it."""
    return checkpoints.load_checkpointables(None, {"state": state, "data": data})["state"]


def restore_state(checkpoints: ocp.training.Checkpointer, state: nnx.State) -> nnx.State:
    """`restore` without the data: for evaluation."""
    return checkpoints.load_checkpointables(None, {"state": state})["state"]
