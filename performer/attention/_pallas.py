"""Bidirectional attention in kernels for TPU (Pallas): features never leave the core's memory.

The sums are those of `_tiles`. Where the tokens fit into one block, keys and queries are one
kernel, and the backward pass folds its keys again; else each is a kernel that goes over blocks.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from performer.attention import _tiles as tiles
from performer.attention._sizes import LANES, ROWS
from performer.attention._tiles import Operands, Settings
from performer.attention.state import finite

Out = jax.ShapeDtypeStruct


def read(refs):
    """The arrays of references."""
    return jax.tree.map(lambda ref: ref[...], refs)


def _forward(x, output, logsum, *, scale, lengths):
    x = tiles.real_keys(read(x), lengths[1])
    _, c, z = tiles.fold(tiles.exponents_of_keys(x, scale), x.value)
    out, logsum[...] = tiles.attend(x, c, tiles.numerators(z, x.query.dtype))
    output[...] = out.astype(output.dtype)


def _keys(x, c, z, zs, wide, *, scale, lengths):
    i = pl.program_id(2)
    start(wide, z, i == 0)
    x = tiles.real_keys(read(x), lengths[1], i)
    wide[...], z[...] = tiles.fold(tiles.exponents_of_keys(x, scale), x.value, wide[...], z[...])[
        1:
    ]
    c[...] = wide[:, :, :1]

    @pl.when(i == pl.num_programs(2) - 1)  # in the kernel: outside XLA may skip a rounding
    def _():
        zs[...] = tiles.numerators(z[...], zs.dtype)


def _queries(x, c, zs, output, logsum, *, scale, lengths):
    out, logsum[...] = tiles.attend(read(x), c[...], zs[...])
    output[...] = out.astype(output.dtype)


def _backward(x, logsum, gradient, grads, *, scale, lengths):
    x = tiles.real_keys(read(x), lengths[1])
    f, c, z = tiles.fold(tiles.exponents_of_keys(x, scale), x.value)
    x, logsum, gradient = tiles.real_queries(x, logsum[...], gradient[...], lengths[0])
    dq, dz, dx = tiles.from_queries(x, c, z, logsum, gradient)
    write_queries(x, dq, dx, grads)
    write_keys(x, *tiles.from_keys(x, f, dz, scale), grads)


def _queries_backward(x, c, z, logsum, gradient, grads, dz, *, scale, lengths):
    i = pl.program_id(2)
    x, logsum, gradient = tiles.real_queries(read(x), logsum[...], gradient[...], lengths[0], i)
    dq, of_block, dx = tiles.from_queries(x, c[...], z[...], logsum, gradient)
    add(dz, of_block, i == 0)
    write_queries(x, dq, dx, grads)


def _keys_backward(x, c, dz, grads, *, scale, lengths):
    x = tiles.real_keys(read(x), lengths[1], pl.program_id(2))
    f = jnp.exp(tiles.exponents_of_keys(x, scale) - finite(c[...]))
    write_keys(x, *tiles.from_keys(x, f, dz[...], scale), grads)


def write_queries(x: Operands, dq: Array, dx: Array, grads: Operands) -> None:
    """Gradients of the queries and, if they are wanted, of their frequencies."""
    grads.query[...] = dq.astype(grads.query.dtype)
    if grads.of_query is not None:
        add(
            grads.of_query,
            tiles.gathered(tiles.dot(dx, x.query, (2, 2)), len(x.of_query)),
            _first(),
        )


def write_keys(x: Operands, dk: Array, dv: Array, dl: Array, grads: Operands) -> None:
    """Gradients of keys and values and of what else has to do with the keys and is wanted."""
    grads.key[...], grads.value[...] = dk.astype(grads.key.dtype), dv.astype(grads.value.dtype)
    if grads.log_weights is not None:
        grads.log_weights[...] = jnp.sum(dl, axis=1, keepdims=True)
    if grads.of_key is not None:
        add(grads.of_key, tiles.dot(dl.astype(x.key.dtype), x.key, (2, 2)), _first())
    if grads.of_features is not None:
        add(grads.of_features, jnp.sum(dl, axis=2, keepdims=True), _first())


def start(c, z, first: Array) -> None:
    """The state of no keys, at the first step of the grid."""

    @pl.when(first)
    def _():
        c[...] = jnp.full_like(c, -jnp.inf)
        z[...] = jnp.zeros_like(z)


def add(ref, value: Array, first: Array) -> None:
    """A sum over steps of the grid, from nothing at the first."""

    @pl.when(first)
    def _():
        ref[...] = jnp.zeros_like(ref)

    ref[...] += value


def _first() -> Array:
    return (pl.program_id(1) == 0) & (pl.program_id(2) == 0)


@dataclasses.dataclass(frozen=True)
class Piece:
    """An array, or that of a kernel's result, and whether it is cut along tokens, or is a state."""

    array: Any
    kind: str

    def spec(self, settings: Settings, k: int, last: int | None) -> pl.BlockSpec:
        """The block of a step (group of heads, batch entry, tokens) of the grid.

        Of the steps of tokens, `last` is the first if it is not None.
        """
        shape = self.array.shape

        def at(i):
            return i if last is None else last - i

        if self.kind == "weights":
            return pl.BlockSpec((settings.heads, *shape[1:]), lambda g, b, i: (g, 0, 0))
        if self.kind == "states":
            sizes = (None, None, settings.heads, *shape[3:])
            return pl.BlockSpec(sizes, lambda g, b, i: (b, at(i), g, 0, 0))
        here = (None, settings.heads * shape[1] // k)
        if self.kind == "state":
            return pl.BlockSpec((*here, *shape[2:]), lambda g, b, i: (b, g, 0, 0))
        return pl.BlockSpec((*here, shape[2], settings.block), lambda g, b, i: (b, g, 0, at(i)))


def pieces(tree, kind: str):
    return jax.tree.map(partial(Piece, kind=kind), tree)


def operands(x: Operands) -> Operands:
    kinds = ("tokens", "tokens", "tokens", "weights", "weights", "weights", "tokens")
    return Operands(*(pieces(y, kind) for y, kind in zip(x, kinds, strict=True)))


def call(kernel, settings: Settings, lengths, ins, outs, scratch=(), backwards: bool = False):
    """The arrays of the pieces `outs`, by a kernel that sees one block of each piece at a time.

    The kernel gets references to the blocks of `ins`, `outs` and, to keep from step to step of the
    tokens, to arrays of the shapes `scratch` for its heads.
    """
    leaves = jax.tree.leaves((ins, outs))
    k = next(len(x.array) for x in leaves if x.kind == "weights")
    tokens = [x.array.shape for x in leaves if x.kind == "tokens"]
    steps = max(-(-shape[-1] // settings.block) for shape in tokens)
    last = steps - 1 if backwards else None
    ins, outs = (
        [
            jax.tree.map(look, tree)
            for look in (lambda x: x.array, lambda x: x.spec(settings, k, last))
        ]
        for tree in (ins, outs)
    )
    # Inside `jax.shard_map` the results vary over the axes that an argument varies over.
    varies = [jax.typeof(x).manual_axis_type for x in jax.tree.leaves(ins[0])]
    results = jax.tree.map(lambda x: Out(x.shape, x.dtype, manual_axis_type=varies[0]), outs[0])
    sums = any(len(x.shape) == 3 for x in jax.tree.leaves(outs[0]))
    return pl.pallas_call(
        partial(kernel, scale=settings.scale, lengths=lengths),
        grid=(k // settings.heads, tokens[0][0], steps),
        in_specs=ins[1],
        out_specs=outs[1],
        out_shape=results,
        scratch_shapes=[pltpu.VMEM((settings.heads, *shape), jnp.float32) for shape in scratch],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary" if sums else "parallel", "arbitrary")
        ),
        interpret=settings.interpret,
    )(*ins[0])


def forward(x: Operands, settings: Settings, residuals: bool = True):
    """The output (b, n, v, t), and for the backward pass L and (c, [z s]): small, so always."""
    (b, n, _, t), (k, m, _), width = x.query.shape, x.of_key.shape, x.value.shape[2]
    run = partial(call, settings=settings, lengths=(t, x.key.shape[3]))
    output = Out((b, n, width, t), x.value.dtype), Out((b, n, 1, t), jnp.float32)
    output = pieces(output, "tokens")
    if settings.block >= max(t, x.key.shape[3]):
        return *run(_forward, ins=(operands(x),), outs=output), None
    shapes = (m, 1), (m, width + ROWS), (width + ROWS, m)
    dtypes = jnp.float32, jnp.float32, x.query.dtype
    outs = [Out((b, k, *y), dtype) for y, dtype in zip(shapes, dtypes, strict=True)]
    ins, outs = (operands(_of_keys(x)),), pieces(outs, "state")
    c, z, zs = run(_keys, ins=ins, outs=outs, scratch=[(m, LANES)])
    ins = operands(_of_queries(x)), *pieces((c, zs), "state")
    return *run(_queries, ins=ins, outs=output), (c, z)


def backward(x: Operands, settings: Settings, wanted, logsum, state, gradient: Array) -> Operands:
    """The gradients of the operands, None for those that are not wanted."""
    t, s = x.query.shape[3], x.key.shape[3]
    run = partial(call, settings=settings, lengths=(t, s))
    grads = gradients(x, wanted)
    rows = pieces((logsum, gradient), "tokens")
    if settings.block >= max(t, s):
        return run(_backward, ins=(operands(x), *rows), outs=(operands(grads),))[0]
    c, z = state
    state, dz = pieces(state, "state"), pieces(Out(z.shape, z.dtype), "state")
    ins, outs = (operands(_of_queries(x)), *state, *rows), (operands(_of_queries(grads)), dz)
    of_queries, dz = run(_queries_backward, ins=ins, outs=outs)
    ins = operands(_of_keys(x)), *pieces((c, dz), "state")
    (of_keys,) = run(_keys_backward, ins=ins, outs=(operands(_of_keys(grads)),))
    return of_keys._replace(query=of_queries.query, of_query=of_queries.of_query)


def gradients(x: Operands, wanted) -> Operands:
    """Shapes and dtypes of the gradients that are wanted; those of weights are float32."""
    like = Operands(
        *(y if getattr(wanted, name, True) else None for name, y in x._asdict().items())
    )
    return jax.tree.map(lambda y: Out(y.shape, y.dtype if y.ndim == 4 else jnp.float32), like)


def _of_keys(x: Operands) -> Operands:
    return x._replace(query=None, of_query=None)


def _of_queries(x: Operands) -> Operands:
    return Operands(query=x.query, of_query=x.of_query)
