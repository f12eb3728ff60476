"""Files and lines of the user's code that operations of a program come from."""

from pathlib import Path
from typing import Any

FOREIGN = tuple(f"/{name}/" for name in ("jax", "flax", "equinox", "haiku", "optax", "jaxtyping"))
OURS = str(Path(__file__).parents[1] / "attention")
"""Folder of `performer_attention`."""
REPLAYING = (
    *(f"performer/linearization/{name}.py" for name in ("layout", "lazy", "program", "search")),
    "performer/nnx/_hooks.py",
)
"""Files that trace and compute the operations of others."""


def is_linear(equation: Any) -> bool:
    """True for an operation of `performer_attention`."""
    return any(x.file_name.startswith(OURS) for x in _frames(equation))


def _frames(equation: Any) -> list:
    trace = equation.source_info.traceback
    return [] if trace is None else list(trace.frames)


def line_of(equation: Any) -> str:
    """File and line of the user's code that an operation comes from."""
    frames = _frames(equation)
    users = [x for x in frames if not any(f"packages{name}" in x.file_name for name in FOREIGN)]
    users = [x for x in users if not x.file_name.endswith(REPLAYING)]
    if not users:
        return "an unknown line"
    return f"{users[0].file_name.rsplit('/', 1)[-1]}:{users[0].line_num}"
