"""Parameters and memory of a run."""

import math
from typing import Any

import jax
from flax import nnx


def parameters(state: nnx.State) -> dict[str, Any]:
    """Return name -> array (or shape) of each parameter in the state of (model, optimizer).

    The order is that of `jax.tree.leaves`; a name is a path, "blocks.0.attention.key.bias".
    """
    model = nnx.filter_state(state, nnx.Param)
    return {
        ".".join(str(key.key) for key in path[1:] if hasattr(key, "key")): x
        for path, x in jax.tree.leaves_with_path(model)
    }


def parameter_table(state: nnx.State) -> str:
    """Return a table of name, shape, elements and elements on a device of each parameter."""
    rows = [
        (name, x.shape, x.size, math.prod(x.sharding.shard_shape(x.shape)))
        for name, x in parameters(state).items()
    ]
    rows.append(("total", "", sum(row[2] for row in rows), sum(row[3] for row in rows)))
    width = max(len(row[0]) for row in rows)
    lines = [f"{'parameter':{width}}  {'shape':18} {'elements':>12} {'on a device':>12}"]
    lines += [f"{a:{width}}  {b!s:18} {c:12,} {d:12,}" for a, b, c, d in rows]
    return "\n".join(lines)


def memory_of(compiled: Any) -> dict[str, int]:
    """Return the bytes on each device of a compiled program: arguments, temporary, in all."""
    analysis = compiled.memory_analysis()
    arguments, temporary = analysis.argument_size_in_bytes, analysis.temp_size_in_bytes
    new = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return {"arguments": arguments, "temporary": temporary, "in all": arguments + temporary + new}
