"""Search for softmax attention in a traced program.

A place is a subgraph that computes

    scores = q k^T;   weights = softmax(scale scores + bias);   output = weights v

Every product of two arrays is a lazy value, which is followed from operation to operation
(`performer.linearization.lazy`). Where weights are multiplied by another array there is a place,
unless its axes cannot be arranged, its scores are read elsewhere, or its keys are no tokens. Scale,
mask and bias are read from the operations between product and exponential
(`performer.linearization.factors`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.core import Tracer
from jax.interpreters import partial_eval

from performer.linearization import factors
from performer.linearization.layout import MOVES, Layout, Unfit
from performer.linearization.lazy import NOT_READ, READ_ELSEWHERE, Lazy, Walk
from performer.linearization.lines import is_linear, line_of
from performer.linearization.program import (
    Constants,
    Left,
    Op,
    Place,
    Program,
    Ref,
    Traced,
    inlined,
    left_in,
    places_in,
    scan_counts,
    single_in,
)

BODIES = {"scan", "remat2", "checkpoint"}
"""Operations whose bodies are programs of their own: layers in a scan, and under a checkpoint."""
KERNELS = ("flash", "attention", "attn", "mha", "fmha")
"""Names of kernels that compute all of attention in one operation."""
NAMES = ("name", "name_and_src_info", "target_name")
"""Parameters of operations that name a kernel."""
OPAQUE = {"ffi_call", "custom_call", "pure_callback", "io_callback", "pallas_call"}
SUMS_HEADS = (
    "its product with the values sums over more axes than the softmax, as over heads: sum over"
    " these after it"
)
TABLE = (
    "its keys or values are an argument or a constant that all examples share, as the table of a"
    " vocabulary or of bins: parameters are no tokens (tokens of one example need an axis of"
    " examples)"
)
LOOP = "in a loop over queries: compute the attention of all queries at once"
NOT_DIVIDED = "its exponentials are not divided by their sum over the keys"
LOST = "axes of the scores are lost {} the softmax, as by a mean over heads"
MOVED = {*MOVES, "convert_element_type"}
"""Operations that a program may have more or less of with arrays of other lengths."""


def traced(function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Program, Any]:
    """Return the program of a function for these arguments, and the structure of its result."""
    closed, result = jax.make_jaxpr(function, return_shape=True)(*arguments)
    used = [True] * len(closed.jaxpr.outvars)
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, used, instantiate=True)
    return program_of(jaxpr, closed.consts), jax.tree.structure(result)


def program_of(
    jaxpr: Any,
    constants: Sequence[Any],
    scope: str = "",
    scanned: tuple[int, int] | None = None,
    known: Mapping[int, Ref] | None = None,
) -> Program:
    """Return the operations of a jaxpr, with the places among them.

    `scanned` are the `scan_counts` of a body of a scan, and `known` its inputs that are constants.
    A function with a derivative of its own is inlined only if it has a part in a place.
    """
    program = _searched(replace(inlined(jaxpr, constants, scope, known=known), scanned=scanned))
    in_places = {x for i in program.attention for x in program.ops[i].custom}
    whole = {x for op in program.ops for x in op.custom} - in_places
    if not whole:
        return program
    again = replace(inlined(jaxpr, constants, scope, whole, known), scanned=scanned)
    return replace(_searched(again), left=program.left)


def _searched(program: Program) -> Program:
    """The program with its places and the places of its bodies."""
    walk = Walk(program)
    for number, op in enumerate(program.ops):
        _look_inside(walk, op)
        for x in walk.take(number):
            _add_place(walk, x)
    for x in walk.undivided():
        _add_place(walk, x)
    return program


def _look_inside(walk: Walk, op: Op) -> None:
    """Find places in the body of an operation, and attention that cannot be reached."""
    program, equation, line = walk.program, op.equation, line_of(op.equation)
    called = "".join(str(equation.params.get(x, "")) for x in NAMES)
    if "call_jaxpr" in equation.params:  # a function with a derivative of its own
        called += str(getattr(equation.params["call_jaxpr"].jaxpr.debug_info, "func_name", ""))
    around = op.scope.split("/")[::-1] if op.name in OPAQUE else []
    names = (called, op.name, *around)
    kernel = [x for x in names if any(word in x.lower() for word in KERNELS)]
    scanned = scan_counts(equation) if op.name == "scan" else None
    known = _known(walk, op, scanned)
    inner = [
        program_of(getattr(x, "jaxpr", x), getattr(x, "consts", ()), op.scope, scanned, known)
        for x in jex.jaxprs_in_params(equation.params)
    ]
    if kernel and op.name not in BODIES:
        reason = f"a kernel, {kernel[0]}: its queries and keys are not read"
        program.left.append(Left(line, op.scope, reason))
    elif op.name in BODIES:
        if left_in(inner[0]) or any(places_in(inner[0])) or any(single_in(inner[0])):
            op.body, op.known = inner[0], known
    else:
        reason = f"inside {op.name}, which is not entered"
        for body in inner:
            program.left += [Left(x.line, x.scope, reason) for _, x, *_ in places_in(body)]
            program.left += left_in(body)


LARGEST = 2**26
"""Entries of the largest constant that is computed while tracing, to be known inside a body."""


def _known(walk: Walk, op: Op, scanned: tuple[int, int] | None) -> dict[int, Ref]:
    """Inputs of a body that are constants, such as a causal mask: they are known in it also."""
    if op.name not in BODIES:
        return {}
    fixed = scanned[0] if scanned is not None else len(op.inputs)
    known = {}
    for i, ref in enumerate(op.inputs[:fixed]):
        small = math.prod(op.equation.invars[i].aval.shape) <= LARGEST
        if walk.varies(ref) or isinstance(ref.value, Tracer) or not small:
            continue
        try:
            with jax.ensure_compile_time_eval():
                known[i] = Ref(value=Constants(walk.program).read(ref))
        except Traced:
            continue
    return known


def _add_place(walk: Walk, x: Lazy) -> None:
    """Add the place of a product with values, or the reason why it stays exact."""
    program, product = walk.program, walk.program.ops[x.product]
    if is_linear(product.equation):
        return
    try:
        place = _place(walk, x)
    except Unfit as reason:
        program.left.append(Left(line_of(product.equation), product.scope, str(reason)))
    else:
        if place is not None:
            program.places[x.output] = place


def _place(walk: Walk, x: Lazy) -> Place | None:
    """The place of a product with values, None if it is no attention at all.

    Raises:
        Unfit: if it looks like attention, and is written in a way that is not read.
    """
    program, scores, output = walk.program, x.product, x.output
    ops, product = program.ops, program.ops[output].equation
    weights = ops[output].inputs[x.operand]
    axes = walk.at(weights)[scores].axes
    (contracted, _), _ = ops[scores].equation.params["dimension_numbers"]
    summed, batch = product.params["dimension_numbers"]
    keys = [axes[i] for i in summed[x.operand]]
    whole = {atom for axis in keys for atom in axis}
    is_whole = len(contracted) == len(keys) == 1 or (all(keys) and whole == x.over)
    path, tail = _between(program, scores, Ref(output)), list(x.tail)
    if x.kind == "output" and not x.why:
        above = [output, *tail[:-1]][-1]
        (divisor,) = (ref for ref in ops[tail[-1]].inputs if ref.op != above)
        below = _between(program, scores, divisor)
        tail = [*sorted({*tail[:-1], *below} - {*path}), tail[-1]]
    words = tuple(ops[i].name for i in (scores, *path, *tail) if ops[i].name not in MOVED)
    if {product.invars[x.operand].aval.shape[i] for i in summed[x.operand]} == {1}:
        program.attention |= {scores, *path, *tail}
        program.single[output] = words
        return None
    dtype = ops[scores].equation.outvars[0].aval.dtype
    if x.kind != "numerator" and jnp.issubdtype(dtype, jnp.complexfloating):
        raise Unfit("its scores are complex: make real and imaginary parts entries of one axis")
    if x.kind != "numerator" and not jnp.issubdtype(dtype, jnp.floating):
        raise Unfit("its scores are integers, of quantized queries and keys")
    if x.why and is_whole:
        raise Unfit(x.why)
    if len(keys) > 1 and all(keys) and batch[0] and x.over < whole:
        raise Unfit(SUMS_HEADS)  # a projection of heads has no batch axes
    if x.why:
        return None
    layout = Layout.of(ops[scores].equation, product, x.operand, axes)
    if layout is None:
        if program.scanned is not None and is_whole:
            raise Unfit(LOOP)
        if is_whole and any(atom[0] == "batch" for atom in whole):
            raise Unfit(f"{NOT_READ}: its weights are multiplied along heads or examples")
        return None
    if _is_read_elsewhere(program, scores, output, weights, tail):
        raise Unfit(READ_ELSEWHERE)
    layout.goal = walk.of[x.goal][scores].axes
    every = {atom for atom, n in layout.sizes.items() if n != 1}
    for when, known in (("before", layout.goal), ("after", axes)):
        if {atom for axis in known for atom in axis} != every:
            raise Unfit(LOST.format(when))
    layout.name_heads()
    if _is_loop(program, scores, layout):
        raise Unfit(LOOP)
    if _is_table(walk, scores, output, layout):
        if x.kind == "numerator":
            return None
        raise Unfit(TABLE)
    rows = [over for _, over in x.shifts]
    if x.kind == "numerator" or x.over != whole or not all(whole <= y for y in rows):
        raise Unfit(NOT_DIVIDED)
    chain = _between(program, scores, Ref(x.goal))
    known = {i: walk.of[i][scores].axes for i in chain}
    steps = factors.steps(program, {scores, *chain}, chain, known, walk.varying)
    known = {i: walk.of[i][scores].axes for i in x.masks}
    inside = {i for i, values in walk.of.items() if scores in values}
    masks = factors.steps(program, inside, x.masks, known, walk.varying)
    both = *steps, *masks
    sinks = tuple(factors.sink(program, y, walk.varying) for y in x.sinks)
    leaves = [y for step in both for tree in step.inputs for y in factors.leaves(tree)]
    leaves += [y for sink in sinks for y in factors.leaves(sink.part.tree)]
    sources = tuple(y.ref for y in leaves if y.varies)
    layout.take_time([factors.Part(y, z.axes) for z in both for y in z.inputs if y is not None])
    if any(sink.part.along(layout.time) for sink in sinks):
        raise Unfit("its sink, a logit of no key, differs between queries")
    program.attention |= {scores, *path, *tail}
    operands = (y.aval for i in (scores, output) for y in ops[i].equation.invars)
    results = (ops[i].equation.outvars[0].aval for i in (scores, *path))
    computed = (y.dtype for y in (*operands, *results))
    dtypes = frozenset(y.name for y in computed if jnp.issubdtype(y, jnp.floating))
    place = Place(
        scores, output, Ref(x.goal), chain, layout, line_of(ops[scores].equation),
        ops[scores].scope, words, steps, x.base, list(x.tail[:-1]), tail, sources, dtypes, sinks,
        masks,
    )  # fmt: skip
    factors.Factors.of(program, place)  # Unfit if it cannot be read in linear time
    return place


def _is_loop(program: Program, scores: int, layout: Layout) -> bool:
    """True in the body of a scan over queries: its keys are the same at each step."""
    if program.scanned is None:
        return False
    first, carried = program.scanned
    query, key = (_inputs(program, program.ops[scores].inputs[i]) for i in layout.operands)
    avals = {
        ref.input: x.aval
        for op in program.ops
        for ref, x in zip(op.inputs, op.equation.invars, strict=True)
    }
    counters = {
        i for i in query if i >= first and avals[i].shape == () and avals[i].dtype.kind == "i"
    }
    moving = {i for i in query if i >= first} - counters
    by_step = min(moving, default=-1) >= first + carried or (bool(counters) and not moving)
    return all(i < first for i in key) and by_step


def _inputs(program: Program, ref: Ref) -> set[int]:
    """Inputs of the program that a value depends on."""
    found, left, visited = set(), [ref], set()
    while left:
        ref = left.pop()
        if ref.input is not None:
            found.add(ref.input)
        if ref.op is not None and ref.op not in visited:
            visited.add(ref.op)
            left += program.ops[ref.op].inputs
    return found


def _is_table(walk: Walk, scores: int, output: int, layout: Layout) -> bool:
    """True for keys or values without an axis of examples that are not computed from tokens."""
    program, ops, sizes = walk.program, walk.program.ops, layout.sizes
    query, key = (ops[scores].inputs[i] for i in layout.operands)
    others = [atom for atom, n in sizes.items() if n != 1 and atom not in layout.keys]
    batch = [x for x in others if x[0] in ("batch", layout.keys[0][0])]  # axes that the keys have
    values, (names, _, count) = ops[output].inputs[layout.values], layout.value_dims
    batch_of_values = [x for axis in names[:count] for x in axis if x in others]

    def is_given(ref: Ref) -> bool:
        return not walk.varies(ref) or _is_raw(program, ref)

    if not batch and not walk.varies(key):
        return True
    if not batch and _is_raw(program, key):
        return len(others) > len(layout.time) or not _is_raw(program, query)
    return bool(batch) and not batch_of_values and is_given(values)


def _is_raw(program: Program, ref: Ref) -> bool:
    """True for an input of the program as it is."""
    while ref.op is not None and program.ops[ref.op].name in MOVED:
        ref = program.ops[ref.op].inputs[0]
    return ref.input is not None


def _is_read_elsewhere(
    program: Program, scores: int, output: int, weights: Ref, tail: Sequence[int]
) -> bool:
    """True if more than the product with the values reads the scores, weights, or parts of them."""
    inside = {scores, *_between(program, scores, weights), *tail[:-1]}
    if tail:
        inside.add(output)  # it is divided when the place is replaced
    refs = list(program.outputs)
    for number, op in enumerate(program.ops):
        if number not in (*inside, output, *tail[-1:]):
            refs += op.inputs
    return any(ref.op in inside for ref in refs)


def _between(program: Program, start: int, goal: Ref) -> list[int]:
    """Operations after `start` that depend on it and that `goal` depends on, in order."""
    if goal.op is None:
        return []
    after, towards = {start}, {goal.op}
    for number in range(start + 1, goal.op + 1):
        if any(ref.op in after for ref in program.ops[number].inputs):
            after.add(number)
    for number in range(goal.op, start, -1):
        if number in towards:
            towards |= {ref.op for ref in program.ops[number].inputs}
    return sorted((after & towards) - {start})
