"""Attention in kernels for NVIDIA GPUs (Pallas on Triton): features never leave the chip.

The sums and symbols are the same as in `tpu`. Tokens stay where they are in memory: a program has
one head of one batch entry. `Operands` are query (b, t, n, h), key (b, s, k, h), value
(b, s, k, v), W_q and W_k (k, m, h), log-weights of features (k, m) and of keys (b, k, s); the last
four may have one head for all.

Bidirectional: if the heads alone fill the GPU, a program folds all keys, then looks up all queries;
its backward pass folds the keys again. Else tokens are divided into spans, a program each: the
states of the spans of keys are combined, and each span of queries reads their sum.

Causal: a program goes through the chunks of a span, with the state in registers, from the state of
the spans before it. The backward pass goes forwards for the gradients of queries, a and the maxima
c before each chunk, and backwards for the gradients of keys and values. If there are several spans,
a kernel in between sums [dz ds] over the queries of each.

The instructions of a step decide the time (docs/results/speed.md). So features are rows, tokens
columns: products have m rows, and the matrix instructions of Hopper take 64. In `look_up` and
`from_keys` tokens are rows, of which a step has up to 64. The forward pass leaves L, the logarithm
of the normaliser of each query, for the backward pass.

Triton is the back end: it compiles for Ampere and Hopper, by JAX 0.10 to 0.12, and is interpreted
on a CPU. What a move to Mosaic GPU would take stands in docs/developing.md.
"""

import math
from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from performer.attention.kernels.which import Kernel, Operands
from performer.attention.maps import Arguments
from performer.attention.state import State, combine
from performer.attention.sweep import ABOVE_LOST, LOST
from performer.numerics import finite

Out = jax.ShapeDtypeStruct
f32 = jnp.float32
PROGRAMS = 264
"""Programs that fill a GPU: two for each of the 132 multiprocessors of an H100 or H200."""
BLOCK = 64
"""Tokens of a step, or twice as many as it has. The length of a span is a multiple."""
STEPS = 4
"""Least steps of a span."""


class Span(NamedTuple):
    """The tokens of a program, in steps of `block`."""

    count: Any
    block: int
    interpret: bool

    def real(self, i) -> Array:
        """Mask of the i-th step: its tokens up to the last."""
        return i * self.block + jnp.arange(self.block) < self.count

    def read(self, ref, i, other: float = 0.0) -> Array:
        """The rows, or numbers, of the i-th step; 0, or another number, past the last token."""
        at, mask = pl.ds(i * self.block, self.block), self.real(i)
        if len(ref.shape) == 1:
            return plt.load(ref.at[at], mask=mask, other=other)
        mask = jnp.broadcast_to(mask[:, None], (self.block, ref.shape[1]))
        return plt.load(ref.at[at, :], mask=mask, other=0.0).astype(operand(ref.dtype))

    def write(self, ref, i, value: Array) -> None:
        """Write the rows, or numbers, of the i-th step, up to the last token."""
        at, mask = pl.ds(i * self.block, self.block), self.real(i)
        if len(ref.shape) == 1:
            plt.store(ref.at[at], value.astype(ref.dtype), mask=mask)
        else:
            mask = jnp.broadcast_to(mask[:, None], value.shape)
            plt.store(ref.at[at, :], value.astype(ref.dtype), mask=mask)

    def each(self, step: Callable, carry: Any = 0) -> Any:
        """Do all steps in order."""
        return jax.lax.fori_loop(0, self.steps, step, carry)

    @property
    def steps(self):
        """Number of steps."""
        return (self.count + self.block - 1) // self.block

    def exp(self, x: Array) -> Array:
        """e^x; 0 below 1e-38."""
        return jnp.exp(x) if self.interpret else approximate("ex2", x * math.log2(math.e))

    def log(self, x: Array) -> Array:
        """The logarithm."""
        return jnp.log(x) if self.interpret else approximate("lg2", x) * math.log(2)


def approximate(instruction: str, x: Array) -> Array:
    """The result of an instruction of the GPU, exact to 2^-22.

    `jnp.exp` has nine instructions, which were a third of a kernel.
    """
    out = Out(x.shape, x.dtype)
    (y,) = plt.elementwise_inline_asm(
        f"{instruction}.approx.ftz.f32 $0, $1;",
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[out],
    )
    return y


class Program(NamedTuple):
    """Tokens of a program, and the scale of products."""

    queries: Span
    keys: Span
    scale: float


def dot(left: Array, right: Array) -> Array:
    """A product of matrices in bfloat16 or TF32, summed in float32."""
    return jnp.dot(left, right, preferred_element_type=f32)


def operand(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of operands of products.

    float16 has too small a range for sums over keys; as float32 its numbers are those of TF32.
    """
    return dtype if dtype == jnp.bfloat16 else jnp.dtype(f32)


def fine(left: Array, right: Array) -> Array:
    """A product of operands with float32, which is two operands if products are in bfloat16."""
    dtype = min(left.dtype, right.dtype, key=lambda dtype: dtype.itemsize)

    def summands(x):
        high = x.astype(dtype)
        return (high,) if x.dtype == dtype else (high, (x - high.astype(f32)).astype(dtype))

    return reduce(jnp.add, (dot(x, y) for x in summands(left) for y in summands(right)))


def times(left: Float[Array, "r n"], numbers: Float[Array, " n"]) -> Float[Array, " r"]:
    """The product of an operand with float32 numbers, which are two columns exact in bfloat16.

    A sum over a row would convert each element of the operand to float32 first.
    """
    high = numbers.astype(jnp.bfloat16).astype(f32)
    column = jax.lax.broadcasted_iota(jnp.int32, (numbers.size, 16), 1)
    columns = jnp.where(column == 0, high[:, None], (numbers - high)[:, None])
    columns = jnp.where(column < 2, columns, 0.0)
    return jnp.sum(dot(left, columns.astype(left.dtype)), axis=1)


def key_exponents(
    x: Operands, key: Array, i, keys: Span, scale: float, by_token: bool = False
) -> Float[Array, "m s"]:
    """l, a column for each key, -inf past the last; or a row for each, (s, m)."""
    shared = -scale / 2 * jnp.sum(key.astype(f32) ** 2, axis=1)  # (s,)
    if x.log_weights is not None:
        shared += keys.read(x.log_weights, i)
    shared = jnp.where(keys.real(i), shared, -jnp.inf)
    w, features = x.w_key[...], int(by_token)  # axis of the features
    out = dot(key, w.T) if by_token else dot(w, key.T)
    out += jnp.expand_dims(shared, features)
    bias = x.feature_bias
    return out if bias is None else out + jnp.expand_dims(bias[...], 1 - features)


def no_keys(x: Operands) -> State:
    """The state (m,) of no keys."""
    m, width = x.w_key.shape[0], x.value.shape[1]
    return State(jnp.full(m, -jnp.inf, f32), jnp.zeros(m, f32), jnp.zeros((m, width), f32))


def fold(keys: Span, state: State, exponents: Float[Array, "m s"], value: Array) -> State:
    """The state after these keys, with values (s, v)."""
    c = jnp.maximum(state.maximum, jnp.max(exponents, axis=1))  # (m,)
    earlier = keys.exp(state.maximum - finite(c))
    f = keys.exp(exponents - finite(c)[:, None]).astype(value.dtype)
    s = state.normaliser * earlier + times(f, jnp.ones(keys.block, f32))
    return State(c, s, state.numerator * earlier[:, None] + dot(f, value))


def fold_keys(x: Operands, keys: Span, scale: float) -> State:
    """The state of all keys of the program."""

    def step(i, state):
        key = keys.read(x.key, i)
        exponents = key_exponents(x, key, i, keys, scale)
        return fold(keys, state, exponents, keys.read(x.value, i))

    return keys.each(step, no_keys(x))


def look_up(x: Operands, state: State, output, log, queries: Span) -> None:
    """Write the output of all queries of the program, and L if there is a reference for it."""
    c, s, z = state
    z = z.astype(operand(output.dtype))

    def step(i, _):
        exponents = dot(queries.read(x.query, i), x.w_query[...].T) + c[None]  # x (t, m)
        largest = finite(jnp.max(exponents, axis=1))  # r (t,)
        e = queries.exp(exponents - largest[:, None]).astype(z.dtype)
        d = times(e, s)
        queries.write(output, i, dot(e, z) / jnp.where(d == 0, 1.0, d)[:, None])
        if log is not None:
            queries.write(log, i, jnp.where(d == 0, jnp.inf, largest + queries.log(d)))
        return _

    queries.each(step)


def no_weights(*refs) -> Any:
    """Sums for the gradients of frequencies and weights of features, None where not requested."""
    return jax.tree.map(lambda ref: jnp.zeros(ref.shape, f32), refs)


def add_weights(sums, tokens: Array, exponent_gradient: Float[Array, "m s"]) -> Any:
    """Add the gradients of frequencies and of weights of features from these tokens."""
    w, *bias = sums
    if w is not None:
        w += dot(exponent_gradient.astype(tokens.dtype), tokens)
    return w, *(y if y is None else y + jnp.sum(exponent_gradient, axis=1) for y in bias)


class Rows(NamedTuple):
    """L of each query, and the gradients of the output and, if it has one, of L."""

    log: Any
    gradient: Any
    log_gradient: Any = None

    def of_log(self, a: Float[Array, " t"], i, queries: Span) -> Float[Array, " t"]:
        """a of the output and of L: each exponent gets its weight p s times dL."""
        return a if self.log_gradient is None else a - queries.read(self.log_gradient, i)


def from_queries(x: Operands, state: State, rows: Rows, grads: Operands, queries: Span):
    """Write the gradients of all queries of the program; return ds and dz."""
    c, s, z = state

    def step(i, sums):
        (ds, dz), weights = sums
        query, g = queries.read(x.query, i), queries.read(rows.gradient, i)
        L = queries.read(rows.log, i, jnp.inf)
        p = queries.exp(dot(x.w_query[...], query.T) + c[:, None] - L[None])
        d = jnp.sum(p * s[:, None], axis=0)  # 1, but for rounding: large exponents have few digits
        p = p * (1 / jnp.where(d == 0, 1.0, d))[None]
        u = fine(z, g.T)  # (m, t)
        a = rows.of_log(jnp.sum(p * u, axis=0), i, queries)  # (t,)
        dx = p * (u - s[:, None] * a[None])
        queries.write(grads.query, i, dot(x.w_query[...].T, dx.astype(query.dtype)).T)
        weights = add_weights(weights, query, dx)
        # Past the last query g and a are 0.
        ds -= jnp.sum(p * a[None], axis=1)
        return (ds, dz + dot(p.astype(g.dtype), g)), weights

    zeros = (jnp.zeros_like(s), jnp.zeros_like(z)), no_weights(grads.w_query)
    sums, weights = queries.each(step, zeros)
    put((grads.w_query,), weights)
    return sums


def from_keys(x: Operands, c, ds, dz, grads: Operands, keys: Span, scale: float) -> None:
    """Write the gradients of all keys and values of the program."""

    def step(i, weights):
        key, value = keys.read(x.key, i), keys.read(x.value, i)
        # (s, m), not (m, s): keys and values are rows where they are written.
        exponents = key_exponents(x, key, i, keys, scale, by_token=True)
        f = keys.exp(exponents - finite(c)[None])
        dl = f * (fine(value, dz.T) + ds[None])
        dk = dot(dl.astype(key.dtype), x.w_key[...])
        write_key(i, key, dk, jnp.sum(dl, axis=1), grads, keys, scale)
        keys.write(grads.value, i, dot(f.astype(value.dtype), dz.astype(value.dtype)))
        return add_weights(weights, key, dl.T)

    weight_gradients = grads.w_key, grads.feature_bias
    put(weight_gradients, keys.each(step, no_weights(*weight_gradients)))


def write_key(i, key: Array, dk: Array, dl: Float[Array, " s"], grads, keys: Span, scale) -> None:
    """Write the gradients of keys and of their log-weights.

    dk is that through the products with frequencies; dl are sums over the features.
    """
    keys.write(grads.key, i, dk - scale * key.astype(f32) * dl[:, None])
    if grads.log_weights is not None:
        keys.write(grads.log_weights, i, dl)


class Chunk(NamedTuple):
    """A causal chunk and its pairs."""

    query: Float[Array, "t h"]
    key: Float[Array, "s h"]
    value: Float[Array, "s v"]
    y: Float[Array, "m t"]
    exponents: Float[Array, "m s"]
    A: Float[Array, "m s"]
    B: Float[Array, "m t"]
    near: Float[Array, "t s"]
    """e^{M - F} up to a factor of each query, the same as in the weights."""
    weights: Float[Array, "t s"]
    """K times `near`; the weights of a query sum to 1, or are 0 if the sum is lost."""
    maximum: Float[Array, " t"]
    """The weights are relative to e^maximum; -inf without keys."""


def chunk(x: Operands, i, tokens: Span, scale: float) -> Chunk:
    """The i-th chunk, stabilised as in `sweep`."""
    query, key, value = (tokens.read(ref, i) for ref in (x.query, x.key, x.value))
    exponents = key_exponents(x, key, i, tokens, scale)
    y, dtype = dot(x.w_query[...], query.T), query.dtype
    mu, nu = jnp.max(exponents, axis=0), jnp.max(y, axis=0)  # (s,), (t,)
    A = tokens.exp(exponents - finite(mu)[None]).astype(dtype)
    B = tokens.exp(y - nu[None]).astype(dtype)
    t, s = (jax.lax.broadcasted_iota(jnp.int32, (tokens.block,) * 2, axis) for axis in (0, 1))
    M = jnp.where(s <= t, mu[None], -jnp.inf)  # (t, s)
    largest = jnp.max(M, axis=1)
    near = tokens.exp(M - finite(largest)[:, None])
    weights = dot(B.T, A) * near
    total = jnp.sum(weights, axis=1)
    lost, total = total < LOST, jnp.maximum(total, LOST)
    maximum = nu + largest + jnp.where(lost, ABOVE_LOST, tokens.log(total))
    inverse = jnp.where(lost, 0.0, 1 / total)[:, None]
    near, weights = near * inverse, weights * inverse
    return Chunk(query, key, value, y, exponents, A, B, near, weights, maximum)


def _forward(program: Program, x, output, log):
    look_up(x, fold_keys(x, program.keys, program.scale), output, log, program.queries)


def _keys(program: Program, x, out):
    put(out, fold_keys(x, program.keys, program.scale))


def _queries(program: Program, x, state, output, log):
    look_up(x, get(state), output, log, program.queries)


def _backward(program: Program, x, rows, grads):
    state = fold_keys(x, program.keys, program.scale)
    ds, dz = from_queries(x, state, rows, grads, program.queries)
    from_keys(x, state.maximum, ds, dz, grads, program.keys, program.scale)


def _queries_backward(program: Program, x, state, rows, grads, sums):
    put(sums, from_queries(x, get(state), rows, grads, program.queries))


def _keys_backward(program: Program, x, c, sums, grads):
    ds, dz = get(sums)
    from_keys(x, c[...], ds, dz, grads, program.keys, program.scale)


def _causal(program: Program, x, before, output, log):
    tokens, dtype = program.queries, operand(output.dtype)

    def step(i, state):
        c, s, z = state
        y = chunk(x, i, tokens, program.scale)
        # One softmax over the features, for keys before the chunk, and over the keys of the chunk.
        exponents = y.y + c[:, None]
        largest = finite(jnp.maximum(jnp.max(exponents, axis=0), y.maximum))
        e = tokens.exp(exponents - largest[None]).astype(dtype).T
        near = (y.weights * tokens.exp(y.maximum - largest)[:, None]).astype(dtype)
        d = times(e, s) + jnp.sum(near.astype(f32), axis=1)
        d = jnp.where((d < 0.5) & (y.maximum > -jnp.inf), jnp.nan, d)  # lost, and it matters
        out = dot(e, z.astype(dtype)) + dot(near, y.value)
        tokens.write(output, i, out / jnp.where(d == 0, 1.0, d)[:, None])
        if log is not None:
            tokens.write(log, i, jnp.where(d == 0, jnp.inf, largest + tokens.log(d)))
        return fold(tokens, state, y.exponents, y.value)

    tokens.each(step, no_keys(x) if before is None else get(before))


def _causal_queries_backward(program: Program, x, before, rows, grads, a_ref, maxima):
    tokens = program.queries

    def step(i, carry):
        state, weights = carry
        c, s, z = state
        maxima[i] = c
        g, y = tokens.read(rows.gradient, i), chunk(x, i, tokens, program.scale)
        dtype, L = g.dtype, tokens.read(rows.log, i, jnp.inf)
        u, r = fine(z, g.T), dot(g, y.value.T)
        p, share = tokens.exp(y.y + c[:, None] - L[None]), tokens.exp(y.maximum - L)
        a = jnp.sum(p * u, axis=0) + jnp.sum(y.weights * r, axis=1) * share
        a = rows.of_log(a, i, tokens)
        D = (y.near * share[:, None] * (r - a[:, None])).astype(dtype)
        dy = p * (u - s[:, None] * a[None]) + y.B.astype(f32) * dot(y.A, D.T)
        tokens.write(grads.query, i, dot(x.w_query[...].T, dy.astype(dtype)).T)
        weights = add_weights(weights, y.query, dy)
        tokens.write(a_ref, i, a)
        return fold(tokens, state, y.exponents, y.value), weights

    first = no_keys(x) if before is None else get(before)
    put((grads.w_query,), tokens.each(step, (first, no_weights(grads.w_query)))[1])


def _causal_sums(program: Program, x, c, logs, gradient, sums):
    tokens, c = program.queries, c[...]

    def step(i, sums):
        ds, dz = sums
        L, a, g = (
            tokens.read(logs[0], i, jnp.inf),
            tokens.read(logs[1], i),
            tokens.read(gradient, i),
        )
        exponents = dot(x.w_query[...], tokens.read(x.query, i).T) + c[:, None] - L[None]
        p = tokens.exp(exponents).astype(g.dtype)
        return ds - times(p, a), dz + dot(p, g)

    put(sums, tokens.each(step, tuple(jnp.zeros(ref.shape, f32) for ref in sums)))


def _causal_keys_backward(program: Program, x, maxima, logs, gradient, later, grads):
    tokens = program.keys
    last = tokens.steps - 1
    first = no_keys(x)[1:] if later is None else get(later)

    def step(i, sums):
        i, ((ds, dz), weights) = last - i, sums
        c, y, g = maxima[i], chunk(x, i, tokens, program.scale), tokens.read(gradient, i)
        L, a, dtype = tokens.read(logs[0], i, jnp.inf), tokens.read(logs[1], i), g.dtype
        share = tokens.exp(y.maximum - L)[:, None]
        D = (y.near * share * (dot(g, y.value.T) - a[:, None])).astype(dtype)
        after = finite(jnp.maximum(c, jnp.max(y.exponents, axis=1)))
        f = tokens.exp(y.exponents - after[:, None])
        dl = f * (fine(dz, y.value.T) + ds[:, None]) + y.A.astype(f32) * dot(y.B, D)
        dk = dot(x.w_key[...].T, dl.astype(dtype)).T
        write_key(i, y.key, dk, jnp.sum(dl, axis=0), grads, tokens, program.scale)
        weights = add_weights(weights, y.key, dl)
        dv = dot(dz.astype(dtype).T, f.astype(dtype)) + dot(g.T, (y.weights * share).astype(dtype))
        tokens.write(grads.value, i, dv.T)
        p = tokens.exp(y.y + c[:, None] - L[None]).astype(dtype)
        # z after the chunk is z before it times `earlier`, plus its keys.
        earlier = tokens.exp(c - after)
        return (ds * earlier - times(p, a), dz * earlier[:, None] + dot(p, g)), weights

    weight_gradients = grads.w_key, grads.feature_bias
    put(weight_gradients, tokens.each(step, (first, no_weights(*weight_gradients)))[1])


SCHEDULE = {
    _forward: (BLOCK, 4, 2),
    _keys: (BLOCK, 4, 3),
    _queries: (BLOCK, 4, 3),
    _backward: (BLOCK // 2, 4, 2),
    _queries_backward: (BLOCK // 2, 4, 3),
    _keys_backward: (BLOCK, 4, 1),
    _causal: (BLOCK // 2, 4, 2),
    _causal_queries_backward: (BLOCK // 2, 8, 2),
    _causal_sums: (BLOCK, 4, 3),
    _causal_keys_backward: (BLOCK // 2, 8, 3),
}
"""Tokens of a step, warps of a program and stages of its pipeline: few instructions for a token,
and few spilled registers on an H100, or none."""


def get(refs):
    """Read all references."""
    return jax.tree.map(lambda ref: ref[...], refs)


def put(refs, values) -> None:
    """Write all references."""
    for ref, value in zip(jax.tree.leaves(refs), jax.tree.leaves(values), strict=True):
        ref[...] = value


class Piece(NamedTuple):
    """An operand or result, and the part of it that a program has.

    "tokens" of its span and their "scalars", "weights" or "state" of its head, one of the "states".
    Consecutive heads of the programs share an array with fewer heads.
    """

    array: Any
    kind: str

    @property
    def heads(self) -> int:
        """Number of heads of the array."""
        return self.array.shape[{"tokens": 2, "weights": 0}.get(self.kind, 1)]

    def spec(self, span: int | None, heads: int) -> pl.BlockSpec:
        """The part of program (batch entry, head, span); without spans it has all tokens."""
        shape, whole = self.array.shape, [0] * (len(self.array.shape) - 2)
        length, group = shape[2 if self.kind == "scalars" else 1], heads // self.heads
        size = span or -(-length // BLOCK) * BLOCK
        sizes, index = {
            "tokens": ((None, size, None, *shape[3:]), lambda b, h, j: (b, j, h // group, 0)),
            "scalars": ((None, None, size), lambda b, h, j: (b, h // group, j)),
            "weights": ((None, *shape[1:]), lambda b, h, j: (h // group, *whole, 0)),
            "state": ((None, None, *shape[2:]), lambda b, h, j: (b, h // group, *whole)),
            "states": (
                (None, None, None, *shape[3:]),
                lambda b, h, j: (b, h // group, j, *whole[1:]),
            ),
        }[self.kind]
        return pl.BlockSpec(sizes, index)


def pieces(tree, kind: str):
    """All arrays of a tree as parts of one kind."""
    return jax.tree.map(partial(Piece, kind=kind), tree)


def operands(x: Operands) -> Operands:
    """The operands as parts, each of its kind."""
    kinds = ("tokens", "tokens", "tokens", "weights", "weights", "weights", "scalars")
    return Operands(*(pieces(y, kind) for y, kind in zip(x, kinds, strict=True)))


def call(kernel, settings: Kernel, lengths, ins, outs, span: int | None = None):
    """Run a kernel on a `Program` and references to the parts; return the arrays of `outs`."""
    block, warps, stages = SCHEDULE[kernel]
    leaf = dict(is_leaf=lambda x: isinstance(x, Piece))
    tokens = [x for x in jax.tree.leaves((ins, outs), **leaf) if x.kind == "tokens"]
    batch, heads = tokens[0].array.shape[0], max(x.heads for x in tokens)
    longest = max(x.array.shape[1] for x in tokens)
    arrays, in_specs, results, out_specs = (
        jax.tree.map(look, tree, **leaf)
        for tree in (ins, outs)
        for look in (lambda x: x.array, lambda x: x.spec(span, heads))
    )
    # Inside `jax.shard_map` results vary over the axes of the arguments.
    varies = jax.typeof(jax.tree.leaves(arrays)[0]).manual_axis_type

    def program(*refs):
        counts = lengths
        if span:
            counts = (jnp.minimum(x - pl.program_id(2) * span, span) for x in lengths)
        queries, keys = (Span(count, block, settings.interpret) for count in counts)
        kernel(Program(queries, keys, settings.scale), *refs)

    return pl.pallas_call(
        program,
        grid=(batch, heads, -(-longest // span) if span else 1),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=jax.tree.map(lambda x: Out(x.shape, x.dtype, manual_axis_type=varies), results),
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=settings.interpret,
        name=kernel.__name__.strip("_"),
    )(*arrays)


def spans(length: int, programs: int) -> tuple[int, int]:
    """Number and length of the spans of each of so many sequences."""
    steps = -(-length // BLOCK)
    count = min(max(PROGRAMS // programs, 1), max(steps // STEPS, 1))
    span = -(-steps // count) * BLOCK
    return -(-length // span), span


def states(x: Operands, settings: Kernel, lengths, cut: tuple[int, int]) -> State:
    """The states of the spans of keys, (b, k, spans, ...)."""
    (b, _, k, width), m, (count, span) = x.value.shape, x.w_key.shape[1], cut
    arrays: Any = [Out((b, k, count, *shape), f32) for shape in ((m,), (m,), (m, width))]
    outs, ins = State(*arrays), (operands(key_operands(x)),)
    return call(_keys, settings, lengths, ins, (pieces(outs, "states"),), span)[0]


def state_of_keys(x: Operands, settings: Kernel) -> State:
    """The state (b, k, ...) of all keys."""
    b, s, k, _ = x.key.shape
    return total(states(x, settings, (s, s), spans(s, b * k)))


def rows_of_queries(x: Operands, state: State, settings: Kernel, log: bool):
    """The output (b, t, n, v) from a state (b, k, ...), and L (b, n, t) if `log`."""
    b, t, n, _ = x.query.shape
    ins = operands(query_operands(x)), pieces(state, "state")
    outs = results(x, state.numerator.shape[3], log)
    return call(_queries, settings, (t, t), ins, outs, spans(t, b * n)[1])


def results(x: Operands, width: int, log: bool) -> tuple[Piece, Piece | None]:
    """The output, of so many numbers for a query, and L if `log`."""
    b, t, n, _ = x.query.shape
    output = Piece(Out((b, t, n, width), x.query.dtype), "tokens")
    return output, Piece(Out((b, n, t), f32), "scalars") if log else None


def before_spans(
    x: Operands, first: State | None, settings: Kernel, cut: tuple[int, int]
) -> State | None:
    """The state before each span (b, k, spans, ...), after `first`; None for a span without it."""
    if first is not None:
        first = jax.tree.map(lambda y: y[:, :, None], first)
    if cut[0] == 1:
        return first
    earlier = before(states(x, settings, (x.key.shape[1],) * 2, cut))
    return earlier if first is None else combine(first, earlier)


def forward(x: Arguments, first: State | None, settings: Kernel, log: bool, residuals: bool):
    """The output (b, t, n, v), L (b, n, t) if `log`, and the residuals of the backward pass.

    `first` is the state (b, k, ...) of earlier keys, if causal.
    """
    y, log = operands_of(x, settings.scale), log or residuals
    (b, t, n, _), s = y.query.shape, y.key.shape[1]
    run = partial(call, settings=settings, lengths=(t, s), outs=results(y, y.value.shape[3], log))
    cut, state = spans(max(t, s), b * n), None
    if settings.is_causal:
        state = before_spans(y, first, settings, cut)
        output, L = run(_causal, ins=(operands(y), pieces(state, "states")), span=cut[1])
    elif cut[0] == 1:
        output, L = run(_forward, ins=(operands(y),))
    else:
        state = state_of_keys(y, settings)
        output, L = rows_of_queries(y, state, settings, log)
    return output, L, (state, L)


def forward_of_keys(x: Arguments, settings: Kernel) -> State:
    """The state (b, k, ...) of the keys."""
    return state_of_keys(operands_of(x, settings.scale), settings)


def forward_of_queries(x: Arguments, state: State, settings: Kernel, log: bool, residuals: bool):
    """The output from a state, L, and the residuals, as in `forward`."""
    y = operands_of(x, settings.scale)
    output, L = rows_of_queries(y, state, settings, log or residuals)
    return output, L, L


def backward(
    x: Arguments,
    first: State | None,
    residuals: Any,
    gradient: Array,
    log_gradient: Array | None,
    settings: Kernel,
    wanted,
) -> tuple[Arguments, Any]:
    """Gradients of the arguments, 0 if not wanted; and ds and dz of `first`, None without it."""
    y, pull = jax.vjp(partial(operands_of, scale=settings.scale), x)
    (b, t, n, _), s, (state, log) = y.query.shape, y.key.shape[1], residuals
    rows, cut, sums = rows_of(log, gradient, log_gradient), spans(max(t, s), b * n), None
    if settings.is_causal:
        grads, sums = causal_gradients(y, state, rows, settings, cut, wanted)
    elif cut[0] == 1:
        ins, outs = (operands(y), rows), (gradients(y, wanted, n, 1),)
        (grads,) = call(_backward, settings, (t, s), ins, outs)
    else:
        of_queries, by_head = query_gradients(y, state, rows, settings, wanted)
        grads = key_gradients(y, state.maximum, by_head, settings, wanted)
        grads = grads._replace(query=of_queries.query, w_query=of_queries.w_query)
    return pull(summed(grads, y))[0], None if first is None else sums


def backward_of_keys(x: Arguments, maximum: Array, sums, settings: Kernel, wanted) -> Arguments:
    """Gradients of the arguments of keys from ds and dz (b, k, ...); 0 if not wanted."""
    y, pull = jax.vjp(partial(operands_of, scale=settings.scale), x)
    return pull(summed(key_gradients(y, maximum, sums, settings, wanted), y))[0]


def backward_of_queries(
    x: Arguments,
    state: State,
    log: Array,
    gradient: Array,
    log_gradient: Array | None,
    settings: Kernel,
    wanted,
) -> tuple[Arguments, Any]:
    """Gradients of the arguments of queries, 0 if not wanted; and ds and dz (b, k, ...)."""
    y, pull = jax.vjp(partial(operands_of, scale=settings.scale), x)
    rows = rows_of(log, gradient, log_gradient)
    grads, sums = query_gradients(y, state, rows, settings, wanted)
    return pull(summed(grads, y))[0], sums


def rows_of(log: Array, gradient: Array, log_gradient: Array | None) -> Rows:
    """L and the gradients as parts; a query without keys has no L."""
    if log_gradient is not None:
        log_gradient = jnp.where(jnp.isinf(log), 0.0, log_gradient)
    log_piece, log_gradient_piece = pieces((log, log_gradient), "scalars")
    return Rows(log_piece, Piece(gradient, "tokens"), log_gradient_piece)


def query_gradients(x: Operands, state: State, rows: Rows, settings: Kernel, wanted):
    """Gradients of queries for each head; and ds and dz of the state (b, k, ...)."""
    b, t, n, _ = x.query.shape
    (count, span), y = spans(t, b * n), query_operands(x)
    outs = gradients(y, wanted, n, count), span_sums(b, n, count, *state.numerator.shape[2:])
    ins = operands(y), pieces(state, "state"), rows
    grads, sums = call(_queries_backward, settings, (t, t), ins, outs, span)
    return grads, [by_group(jnp.sum(z, axis=2), 1, state.numerator.shape[1]) for z in sums]


def key_gradients(x: Operands, maximum: Array, sums, settings: Kernel, wanted) -> Operands:
    """Gradients of keys for each head, from ds and dz of their state."""
    b, s, k, _ = x.key.shape
    (count, span), y = spans(s, b * k), key_operands(x)
    ins = operands(y), Piece(maximum, "state"), pieces(sums, "state")
    outs = (gradients(y, wanted, k, count),)
    return call(_keys_backward, settings, (s, s), ins, outs, span)[0]


def causal_gradients(
    x: Operands, state: State | None, rows: Rows, settings: Kernel, cut: tuple[int, int], wanted
):
    """Gradients for each head; and ds and dz of the state before the sequence, if any."""
    (b, t, n, _), (_, _, k, width), m = x.query.shape, x.value.shape, x.w_key.shape[1]
    (count, span), grads = cut, gradients(x, wanted, n, cut[0])
    run = partial(call, settings=settings, lengths=(t, t), span=span)
    chunks = span // SCHEDULE[_causal_queries_backward][0]
    maxima = Piece(Out((b, n, count, chunks, m), f32), "states")
    ins = operands(x), pieces(state, "states"), rows
    outs = query_operands(grads), Piece(Out((b, n, t), f32), "scalars"), maxima
    got, a, maxima = run(_causal_queries_backward, ins=ins, outs=outs)
    logs, later, first = (rows.log, Piece(a, "scalars")), None, None
    if state is not None:
        c = state.maximum
        ins = operands(query_operands(x)), Piece(c, "states"), logs, rows.gradient
        (sums,) = run(_causal_sums, ins=ins, outs=(span_sums(b, n, count, m, width),))
        first, later = after(jnp.repeat(c, n // k, axis=1), *sums)
        first, later = [by_group(z, 1, k) for z in first], pieces(later, "states")
    ins = operands(x), Piece(maxima, "states"), logs, rows.gradient, later
    (others,) = run(_causal_keys_backward, ins=ins, outs=(key_operands(grads),))
    return others._replace(query=got.query, w_query=got.w_query), first


def span_sums(b: int, n: int, count: int, m: int, width: int) -> Any:
    """ds and dz, of each of so many heads and spans."""
    return pieces([Out((b, n, count, *shape), f32) for shape in ((m,), (m, width))], "states")


def gradients(x: Operands, wanted, heads: int, count: int) -> Operands:
    """Gradients that programs write, None if not wanted; float32 for frequencies and weights.

    Each of so many heads has its own, and of frequencies and weights of features each of so many
    spans.
    """
    b = len(x.key if x.query is None else x.query)

    def of(name: str, part: Piece | None):
        if part is None or not getattr(wanted, name, True):
            return None
        y, tokens = part.array, part.kind == "tokens"
        if part.kind == "weights":
            return Piece(Out((b, heads, count, *y.shape[1:]), f32), "states")
        shape = (*y.shape[:2], heads, y.shape[3]) if tokens else (b, heads, y.shape[2])
        return Piece(Out(shape, y.dtype if tokens else f32), part.kind)

    return Operands(*(of(name, part) for name, part in operands(x)._asdict().items()))


def summed(grads: Operands, x: Operands) -> Operands:
    """Gradients of the operands: sums over the heads, and spans, that share one; 0 for None."""

    def of(name: str, heads_axis: int, over: tuple[int, ...] = ()):
        grad, operand = getattr(grads, name), getattr(x, name)
        if grad is None or operand is None:
            return None if operand is None else jnp.zeros_like(operand)
        grad = by_group(
            jnp.sum(grad, axis=over) if over else grad, heads_axis, operand.shape[heads_axis]
        )
        return grad.astype(operand.dtype)

    tokens = {name: of(name, 2) for name in ("query", "key", "value")}
    weights = {name: of(name, 0, (0, 2)) for name in ("w_query", "w_key", "feature_bias")}
    return Operands(**tokens, **weights, log_weights=of("log_weights", 1))


def by_group(x: Array, axis: int, heads: int) -> Array:
    """The sums over the query heads of each of so many key heads."""
    if x.shape[axis] == heads:
        return x
    split = x.reshape(*x.shape[:axis], heads, -1, *x.shape[axis + 1 :])
    return jnp.sum(split, axis=axis + 1, dtype=f32).astype(x.dtype)


def query_operands(x: Operands) -> Operands:
    """The operands of a kernel that has queries alone."""
    return Operands(query=x.query, w_query=x.w_query)


def key_operands(x: Operands) -> Operands:
    """The operands of a kernel that has keys and values alone."""
    return x._replace(query=None, w_query=None)


def operands_of(x: Arguments, scale: float) -> Operands:
    """The operands of the kernels."""
    keys, bias, weights = x.keys, x.feature_bias, x.keys.log_weights
    dtype = (keys.key if x.query is None else x.query).dtype

    def frequencies(w):  # the root of the scale is in W, rounded once, as without kernels
        return (w * scale**0.5).astype(dtype).astype(operand(dtype)).reshape(-1, *w.shape[-2:])

    w_query, w_key = jax.tree.map(frequencies, (x.w_query, x.w_key))
    bias = None if bias is None else bias.reshape(-1, bias.shape[-1])
    weights = None if weights is None else weights.transpose(0, 2, 1)  # (b, s, k) -> (b, k, s)
    return Operands(x.query, keys.key, keys.value, w_query, w_key, bias, weights)


def total(states: State) -> State:
    """The state of all spans."""
    c = jnp.max(states.maximum, axis=2)
    weights = jnp.exp(states.maximum - finite(c)[:, :, None])
    s = jnp.sum(states.normaliser * weights, axis=2)
    return State(c, s, jnp.sum(states.numerator * weights[..., None], axis=2))


def before(states: State) -> State:
    """The state before each span."""
    until = jax.lax.associative_scan(combine, states, axis=2)

    def shifted(x, first):
        return jnp.concatenate([jnp.full_like(x[:, :, :1], first), x[:, :, :-1]], axis=2)

    return State(*map(shifted, until, (-jnp.inf, 0.0, 0.0)))


def after(c: Array, ds: Array, dz: Array) -> tuple[Any, Any]:
    """ds and dz of the state before all spans, and of that after each.

    They are sums over later queries; given are those over the queries of each span, relative to
    c (b, n, spans, m), the maxima before it.
    """
    c = jnp.moveaxis(c, 2, 0)  # (spans, b, n, m)
    weights = jnp.exp(c - finite(jnp.concatenate([c[1:], c[-1:]])))

    def step(later, span):
        ds, dz, weight = span
        return (ds + later[0] * weight, dz + later[1] * weight[..., None]), later

    by_span = jnp.moveaxis(ds, 2, 0), jnp.moveaxis(dz, 2, 0)  # the axis of spans first
    zeros = jax.tree.map(lambda x: jnp.zeros_like(x[0]), by_span)
    first, later = jax.lax.scan(step, zeros, (*by_span, weights), reverse=True)
    return first, (jnp.moveaxis(later[0], 0, 2), jnp.moveaxis(later[1], 0, 2))
