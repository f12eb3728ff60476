"""Softmax attention in a traced program: where it is, and how its arrays lie.

JAX traces a function to a list of operations. A place is what computes, in whatever words,

    scores = q k^T;   weights = softmax(scale scores + bias);   output = weights v

Every product of two arrays is a candidate for q k^T. Its axes are followed by name through the
operations that keep or move them, past an exponential, to a product that sums over the keys. The
bias is what the operations between product and exponential make of scores that are all 0, and the
scale follows from scores that are all 64. Whether the place is softmax attention indeed is decided
by numbers (`performer.linearization.measure`): softmax of what was read out must be the output.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.interpreters import partial_eval
from jax.typing import ArrayLike
from jaxtyping import Array

Ref = tuple
"""Source of a value: ("value", x), ("input", i) or ("op", number, output)."""
Axis = tuple
"""Names of the axes of the scores that one axis is made of, () for an axis of length 1."""

INLINED = {"jit", "pjit", "closed_call", "core_call"}
BODIES = {"scan", "remat2", "checkpoint"}
"""Operations whose bodies are programs of their own: layers in a scan, and under a checkpoint."""
SOFTMAX = {"exp", "reduce_sum", "div"}
ATTENTION = {"exp", "dot_general"}
KERNELS = ("flash", "attention", "attn", "mha", "fmha")
"""Names of kernels that compute all of attention in one operation."""
NAMES = ("name", "name_and_src_info", "target_name")
"""Parameters of operations that name a kernel."""
OPAQUE = {"ffi_call", "custom_call", "pure_callback", "io_callback", "pallas_call"}
STIRS = {
    "cumsum",
    "cumlogsumexp",
    "cummax",
    "cumprod",
    "sort",
    "rev",
    "fft",
    "scatter",
    "triangular_solve",
}
"""Operations that keep a shape, and not the places of the numbers in it."""
MASKED = -9000.0
"""Scores of masked pairs lie below; public code adds -1e4, -1e9, -2e38 or -inf."""
FILL = 64.0


NOT_READ = "exponentials between two products that are not read as attention"
READ_ELSEWHERE = (
    "its weights are read elsewhere, as by a derivative or an output: linearize first, then"
    " differentiate"
)


class Unfit(Exception):
    """Reason why attention is left as it is."""


@dataclass
class Op:
    """An operation, where its inputs come from, and the program in it if it has places."""

    equation: Any
    inputs: list[Ref]
    scope: str = ""
    """Names of `jax.named_scope` around it, of the calls and bodies that it is in, too."""
    body: "Program | None" = None


@dataclass
class Place:
    """Softmax attention in a program."""

    scores: int
    """Number of the operation q k^T."""
    output: int
    """Number of the product with the values."""
    goal: Ref
    """The scores that enter the softmax."""
    chain: list[int]
    """Operations between the two."""
    layout: "Layout"
    line: str
    """File and line of the user's code."""
    scope: str
    """Scope of its operations."""
    words: tuple[str, ...]
    """Names of all operations of the place but those of layout."""
    along: frozenset
    """Axes of the scores along which the mask depends on the inputs of the program."""
    masked: bool
    """True if they have a part in the mask at all."""
    scaled: bool
    """True if they have a part in the scale."""

    @property
    def by_pairs(self) -> bool:
        """True if the inputs of the program decide which keys a query sees, pair by pair."""
        return self.layout.time in self.along


class Left(NamedTuple):
    """Attention that cannot be replaced."""

    line: str
    scope: str
    reason: str


@dataclass
class Program:
    """Operations in order, with calls inlined; `places` by the number of their output."""

    ops: list[Op]
    outputs: list[Ref]
    places: dict[int, Place] = field(default_factory=dict)
    left: list[Left] = field(default_factory=list)
    single: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Words of attention to a single key, by the number of its output: it is the value."""


def traced(function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Program, Any]:
    """The program of a function for these arguments, and the structure of its result."""
    closed, result = jax.make_jaxpr(function, return_shape=True)(*arguments)
    used = [True] * len(closed.jaxpr.outvars)
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, used, instantiate=True)
    return program_of(jaxpr, closed.consts), jax.tree.structure(result)


def program_of(jaxpr: Any, constants: Sequence[Any], scope: str = "") -> Program:
    """Read the operations, and find the places."""
    ops: list[Op] = []
    inputs = [("input", number) for number in range(len(jaxpr.invars))]
    program = Program(ops, _inlined(jaxpr, constants, inputs, ops, scope))
    for number, op in enumerate(ops):
        _look_inside(program, op)
        if op.equation.primitive.name == "dot_general":
            _add_place(program, number)
    return program


def run(
    program: Program,
    inputs: Sequence[Any],
    settings: dict[int, Any],
    handle: Callable[["Values", Place, tuple[int, ...], Any], tuple[Array, Any]],
    at: tuple[int, ...] = (),
) -> tuple[list[Any], dict[int, Any]]:
    """Outputs of a program, and what `handle` returns beside its output at each place.

    Args:
        program: as traced.
        inputs: arrays.
        settings: pytree for each place that is handled, by its number; for a body a dict of its
            own. In a scan the leaves have an axis more, of the steps. With () as the setting the
            place may be computed as it was, and all that it needs is.
        handle: (values, place, numbers that lead to it, setting) -> the output there, and anything.
        at: numbers that lead to the program.
    """
    values = Values(program, inputs)
    kept: dict[int, Any] = {}
    for number in _needed(program, settings):
        op = program.ops[number]
        if number in program.places and number in settings:
            output, kept[number] = handle(
                values, program.places[number], (*at, number), settings[number]
            )
            values.of[number] = [output]
        elif op.body is not None and settings.get(number):
            read = [values.read(ref) for ref in op.inputs]
            values.of[number], kept[number] = _run_body(
                op, read, settings[number], handle, (*at, number)
            )
        else:
            values.of[number] = values.bind(op, values.read)
    return [values.read(ref) for ref in program.outputs], kept


class Values:
    """Values of the operations of a program, as far as they are computed."""

    def __init__(self, program: Program, inputs: Sequence[Any]):
        self.program, self.inputs = program, inputs
        self.of: dict[int, list[Any]] = {}

    def read(self, ref: Ref) -> Any:
        """The value that a reference stands for."""
        if ref[0] == "value":
            return ref[1] if isinstance(ref[1], jax.Array | float | int) else jnp.asarray(ref[1])
        return self.inputs[ref[1]] if ref[0] == "input" else self.of[ref[1]][ref[2]]

    def bind(self, op: Op, read: Callable[[Ref], Any]) -> list[Any]:
        """The outputs of an operation."""
        primitive = op.equation.primitive
        parameters = primitive.get_bind_params(op.equation.params)
        with op.equation.ctx.manager:
            output = primitive.bind(*map(read, op.inputs), **parameters)
        return list(output) if primitive.multiple_results else [output]

    def scores(self, place: Place, fill: ArrayLike) -> Array:
        """(b, n, t, s): what enters the softmax if all products of queries and keys are `fill`."""
        shape = self.program.ops[place.scores].equation.outvars[0].aval
        new = {place.scores: [jnp.full(shape.shape, fill, shape.dtype)]}

        def read(ref: Ref) -> Any:
            known = ref[0] == "op" and ref[1] in new
            return new[ref[1]][ref[2]] if known else self.read(ref)

        for number in place.chain:
            new[number] = self.bind(self.program.ops[number], read)
        return place.layout.pairs(read(place.goal))

    def operands(self, place: Place) -> tuple[Array, Array, Array]:
        """Queries (b, t, n, h), keys (b, s, k, h) and values (b, s, k, v)."""
        of_scores, of_output = (self.program.ops[i].inputs for i in (place.scores, place.output))
        layout = place.layout
        query, key = (self.read(of_scores[i]) for i in layout.operands)
        return (
            layout.query(query),
            layout.key(key),
            layout.value(self.read(of_output[layout.values])),
        )


class Traced(Exception):
    """A constant of the program that is an argument of what is being traced around it."""


class Constants(Values):
    """Values that do not depend on the inputs of the program, computed when they are read."""

    def __init__(self, program: Program):
        super().__init__(program, ())

    def read(self, ref: Ref) -> Any:
        """The value that a reference stands for.

        Raises:
            Traced: if it is not known while tracing.
        """
        if ref[0] == "input" or isinstance(ref[1], Tracer):
            raise Traced
        if ref[0] == "op" and ref[1] not in self.of:
            self.of[ref[1]] = self.bind(self.program.ops[ref[1]], self.read)
        return super().read(ref)


def places_in(program: Program, at: tuple[int, ...] = ()) -> Iterator[tuple[tuple, Place, tuple]]:
    """Each place: the numbers that lead to it, the place, and the lengths of the scans around."""
    for number, op in enumerate(program.ops):
        if number in program.places:
            yield (*at, number), program.places[number], ()
        if op.body is not None:
            scan = op.equation.primitive.name == "scan"
            lengths = (op.equation.params["length"],) if scan else ()
            for inner, place, more in places_in(op.body, (*at, number)):
                yield inner, place, (*lengths, *more)


def single_in(program: Program, at: tuple[int, ...] = ()) -> Iterator[tuple[tuple, tuple]]:
    """The numbers that lead to attention to a single key, and its words."""
    for number, op in enumerate(program.ops):
        if number in program.single:
            yield (*at, number), program.single[number]
        if op.body is not None:
            yield from single_in(op.body, (*at, number))


def left_in(program: Program) -> list[Left]:
    """All that cannot be replaced."""
    bodies = [op.body for op in program.ops if op.body is not None]
    return program.left + [each for body in bodies for each in left_in(body)]


def _inlined(
    jaxpr: Any, constants: Sequence[Any], inputs: list[Ref], ops: list[Op], scope: str
) -> list[Ref]:
    known = dict(zip(jaxpr.constvars, (("value", x) for x in constants), strict=True))
    known |= dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> Ref:
        return ("value", atom.val) if isinstance(atom, jex.Literal) else known[atom]

    for equation in jaxpr.eqns:
        read_in = [read(atom) for atom in equation.invars]
        inner, own = _inner(equation), f"{scope}/{equation.source_info.name_stack}"
        called = equation.params.get("name", "") if equation.primitive.name in INLINED else ""
        if inner is not None:
            outputs = _inlined(*inner, read_in, ops, f"{own}/{called}")
        else:
            outputs = [("op", len(ops), i) for i in range(len(equation.outvars))]
            ops.append(Op(equation, read_in, own))
        known |= dict(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _inner(equation: Any) -> tuple[Any, Sequence[Any]] | None:
    """The program that a call stands for. Derivatives of one's own stay, but those of softmax."""
    name, parameters = equation.primitive.name, equation.params
    inner = next(
        (parameters[x] for x in ("call_jaxpr", "fun_jaxpr", "jaxpr") if x in parameters), None
    )
    custom = {"custom_jvp_call": SOFTMAX, "custom_vjp_call": ATTENTION}.get(name)
    if name not in INLINED and not (custom and custom <= _words(inner)):
        return None
    assert inner is not None
    return (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())


def _words(jaxpr: Any) -> set[str]:
    """Names of all operations of a program and the programs in it."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    inner = (_words(x) for equation in jaxpr.eqns for x in jex.jaxprs_in_params(equation.params))
    return {equation.primitive.name for equation in jaxpr.eqns}.union(*inner)


def _look_inside(program: Program, op: Op) -> None:
    """Find places in the body of an operation, and attention that cannot be reached."""
    equation = op.equation
    name, line = equation.primitive.name, line_of(equation)
    own = "".join(str(equation.params.get(x, "")) for x in NAMES)
    if "call_jaxpr" in equation.params:  # a function with a derivative of its own
        own += str(getattr(equation.params["call_jaxpr"].jaxpr.debug_info, "func_name", ""))
    around = op.scope.split("/")[::-1] if name in OPAQUE else []
    kernel = [x for x in (own, name, *around) if any(word in x.lower() for word in KERNELS)]
    inner = [
        program_of(getattr(x, "jaxpr", x), getattr(x, "consts", ()), op.scope)
        for x in jex.jaxprs_in_params(equation.params)
    ]
    if kernel and name not in BODIES:
        reason = f"a kernel, {kernel[0]}: its queries and keys are not read"
        program.left.append(Left(line, op.scope, reason))
    elif name in BODIES:
        if left_in(inner[0]) or any(places_in(inner[0])) or any(single_in(inner[0])):
            op.body = inner[0]
    else:
        reason = f"inside {name}, which is not entered"
        for body in inner:
            program.left += [Left(x.line, x.scope, reason) for _, x, _ in places_in(body)]
            program.left += left_in(body)


def _run_body(
    op: Op, inputs: list[Any], settings: Any, handle: Any, at: tuple[int, ...]
) -> tuple[list[Any], Any]:
    parameters, body = op.equation.params, op.body
    assert body is not None
    if op.equation.primitive.name != "scan":
        call = lambda *inputs: run(body, inputs, settings, handle, at)  # noqa: E731
        options = {name: parameters[name] for name in ("prevent_cse", "policy")}
        return jax.checkpoint(call, **options)(*inputs)
    # Inputs are constants, carry and slices; outputs carry and slices. JAX 0.11 has no numbers of
    # them, but slices have an axis more outside than in the body.
    inside = getattr(parameters["jaxpr"], "jaxpr", parameters["jaxpr"])
    last, count = (
        sum(x.aval.ndim == y.aval.ndim for x, y in zip(*both, strict=True))
        for both in (
            (op.equation.invars, inside.invars),
            (op.equation.outvars, inside.outvars),
        )
    )
    constants, carry = inputs[: last - count], inputs[last - count : last]

    def step(carry, slices):
        of_step, own = slices
        outputs, kept = run(body, [*constants, *carry, *of_step], own, handle, at)
        return outputs[:count], (outputs[count:], kept)

    options = {name: parameters[name] for name in ("length", "reverse", "unroll")}
    carry, (stacked, kept) = jax.lax.scan(step, carry, (inputs[last:], settings), **options)
    return [*carry, *stacked], kept


def _needed(program: Program, settings: dict[int, Any]) -> list[int]:
    """Operations that outputs and places with settings depend on once these are replaced."""
    needed: set[int] = set()
    left = [*settings, *(ref[1] for ref in program.outputs if ref[0] == "op")]
    left += [i for i, op in enumerate(program.ops) if op.equation.effects]
    while left:
        number = left.pop()
        if number in needed:
            continue
        needed.add(number)
        refs = program.ops[number].inputs
        if number in program.places and settings.get(number, ()) != ():
            refs = _read_by(program, program.places[number])
        left += [ref[1] for ref in refs if ref[0] == "op"]
    return sorted(needed)


def _read_by(program: Program, place: Place) -> list[Ref]:
    """Inputs of a replaced place: queries, keys, values, and the parts of its mask."""
    refs = [*program.ops[place.scores].inputs]
    refs.append(program.ops[place.output].inputs[place.layout.values])
    own = {place.scores, *place.chain}
    side = (ref for number in place.chain for ref in program.ops[number].inputs)
    return refs + [ref for ref in side if ref[0] != "op" or ref[1] not in own]


def _add_place(program: Program, output: int) -> None:
    """Add the place whose product with the values this is, if it is one."""
    for number, operand in enumerate(program.ops[output].inputs):
        exponential = _before(program, operand, ("exp", "exp2"))
        if exponential is None:
            continue
        scores = _before(program, program.ops[exponential].inputs[0], ("dot_general",))
        if scores is None:
            continue
        line = line_of(program.ops[scores].equation)
        if is_linear(program.ops[scores].equation):
            return
        try:
            place = _place(program, scores, exponential, output, number, line)
        except Unfit as reason:
            program.left.append(Left(line, program.ops[scores].scope, str(reason)))
        else:
            if place is not None:
                program.places[output] = place
        return


def _before(program: Program, ref: Ref, names: tuple[str, ...]) -> int | None:
    """The latest operation of these names that a value comes from, without a product between."""
    heap, seen = ([-ref[1]] if ref[0] == "op" else []), set()
    while heap:
        number = -heapq.heappop(heap)
        op = program.ops[number]
        if op.equation.primitive.name in names:
            return number
        if number in seen or op.equation.primitive.name == "dot_general" or op.body is not None:
            continue
        seen.add(number)
        for each in op.inputs:
            if each[0] == "op":
                heapq.heappush(heap, -each[1])
    return None


def _place(
    program: Program, scores: int, exponential: int, output: int, number: int, line: str
) -> Place | None:
    """The place of these operations, None if it is no attention at all.

    Raises:
        Unfit: if it looks like attention, and is written in a way that is not read.
    """
    names = _followed(program, scores, output)
    weights = program.ops[output].inputs[number]
    if weights[0] != "op" or exponential not in names or weights[1] not in names:
        if _is_softmax(program, scores, exponential, output, weights):
            raise Unfit(NOT_READ)
        return None
    inside = [scores, *(i for i in range(scores, output + 1) if i in names), output]
    words = (program.ops[i].equation.primitive.name for i in inside)
    kept = tuple(word for word in words if word not in MOVES and word != "convert_element_type")
    product = program.ops[output].equation
    summed = product.params["dimension_numbers"][0][number]
    if [product.invars[number].aval.shape[i] for i in summed] == [1]:
        program.single[output] = kept
        return None
    layout = Layout.of(program, scores, output, number, names[weights[1]])
    if layout is None:
        mixed = [x for i in summed for x in names[weights[1]][i] if x[0] == "batch"]
        if mixed and _is_softmax(program, scores, exponential, output, weights):
            raise Unfit(NOT_READ)
        return None
    if _is_read_elsewhere(program, exponential, output, weights):
        raise Unfit(READ_ELSEWHERE)
    goal = program.ops[exponential].inputs[0]
    while goal[0] == "op" and program.ops[goal[1]].equation.primitive.name == "sub":
        whole, part = program.ops[goal[1]].inputs
        if part[0] != "op" or part[1] not in names:
            break
        goal = whole  # the largest score, or the logarithm of the sum, was taken off
    chain = _between(program, scores, goal)
    if goal[0] != "op" or goal[1] not in names or (not chain and goal[1] != scores):
        raise Unfit("its scores do not come from one product of queries and keys")
    layout.goal = names[goal[1]]
    if {atom for axis in layout.goal for atom in axis} != {
        a for a, n in layout.sizes.items() if n > 1
    }:
        raise Unfit("axes of the scores are lost before the softmax")
    layout.name_heads()
    varying = _varying(program)
    own = {scores, *chain}
    masked = scaled = False
    along: set = set()
    queries = (atom for atom in layout.sizes if atom[0] != layout.keys[0])
    free = [atom for atom in queries if atom[0] != "batch"]
    for i in chain:
        word, inputs = program.ops[i].equation.primitive.name, program.ops[i].inputs
        of_scores = [ref[0] == "op" and ref[1] in own for ref in inputs]
        # jnp.where(mask, scores, -inf) has the scores last
        beside = word == "select_n" and of_scores == [False, False, True]
        scaled |= word == "select_n" and sum(of_scores) > 1
        for ref in (x for x, known in zip(inputs, of_scores, strict=True) if not known):
            if not _varies(ref, varying):
                continue
            if word in ("mul", "div"):
                scaled = True
                continue
            masked = True
            for atom in free:
                rows = [j for j, axis in enumerate(names[i]) if atom in axis]
                if not rows or not _is_same_along(program, ref, rows[0], varying, beside):
                    along.add(atom)
    for i in (i for i in names if exponential < i < output):
        if any(_varies(x, varying) and x[1] not in names for x in program.ops[i].inputs):
            raise Unfit("its weights are changed after the softmax, as by dropout")
    scope = program.ops[scores].scope
    own = frozenset(along)
    return Place(scores, output, goal, chain, layout, line, scope, kept, own, masked, scaled)


def _is_softmax(program: Program, scores: int, exponential: int, output: int, weights: Ref) -> bool:
    """True for a sum of exponentials between two products that sum over one axis each."""
    both = (program.ops[i].equation.params["dimension_numbers"][0] for i in (scores, output))
    between = (program.ops[i].equation for i in _between(program, exponential, weights))
    sums = any(equation.primitive.name == "reduce_sum" for equation in between)
    return sums and all(len(summed[0]) == 1 for summed in both)


def _is_read_elsewhere(program: Program, exponential: int, output: int, weights: Ref) -> bool:
    """True if more than the product with the values reads the weights, or parts of them."""
    inside = {exponential, *_between(program, exponential, weights)}
    refs = list(program.outputs)
    for number, op in enumerate(program.ops):
        if number not in inside and number != output:
            refs += op.inputs
    return any(ref[0] == "op" and ref[1] in inside for ref in refs)


def _between(program: Program, start: int, goal: Ref) -> list[int]:
    """Operations after `start` that depend on it and that `goal` depends on, in order."""
    if goal[0] != "op":
        return []
    after, towards = {start}, {goal[1]}
    for number in range(start + 1, goal[1] + 1):
        inputs = program.ops[number].inputs
        if any(ref[0] == "op" and ref[1] in after for ref in inputs):
            after.add(number)
    for number in range(goal[1], start, -1):
        if number in towards:
            towards |= {r[1] for r in program.ops[number].inputs if r[0] == "op" and r[1] > start}
    return sorted((after & towards) - {start})


def _varies(ref: Ref, varying: set[int]) -> bool:
    return ref[0] == "input" or (ref[0] == "op" and ref[1] in varying)


def _varying(program: Program) -> set[int]:
    """Operations that depend on inputs of the program."""
    varying: set[int] = set()
    for number, op in enumerate(program.ops):
        if any(_varies(ref, varying) for ref in op.inputs):
            varying.add(number)
    return varying


def _is_same_along(program: Program, ref: Ref, axis: int, varying: set[int], beside: bool) -> bool:
    """True if what depends on the inputs is the same along an axis, by being broadcast.

    With `beside`, constants that differ along the axis may be joined to it by "and", as a mask of
    keys is to a causal one.
    """
    shape = _shape(program, ref)
    is_constant = ref[0] == "value" or (ref[0] == "op" and ref[1] not in varying)
    if (is_constant and beside) or (shape is not None and (shape[axis:] or (1,))[0] == 1):
        return True
    if ref[0] != "op" or not program.ops[ref[1]].inputs:
        return False
    op = program.ops[ref[1]]
    word = op.equation.primitive.name
    if word == "broadcast_in_dim":
        onto = list(op.equation.params["broadcast_dimensions"])
        if axis not in onto:
            return True
        return _is_same_along(program, op.inputs[0], onto.index(axis), varying, beside)
    if word in MOVES or word in STIRS:
        return False
    shapes = [_shape(program, x) for x in op.inputs]
    aligned = shape is not None and all(x is not None and len(x) in (0, len(shape)) for x in shapes)
    beside = beside and word in ("and", "convert_element_type", "copy", "stop_gradient")
    return aligned and all(_is_same_along(program, x, axis, varying, beside) for x in op.inputs)


def _shape(program: Program, ref: Ref) -> tuple[int, ...] | None:
    if ref[0] == "value":
        return np.shape(ref[1])
    return program.ops[ref[1]].equation.outvars[ref[2]].aval.shape if ref[0] == "op" else None


MOVES = {"transpose", "reshape", "squeeze", "broadcast_in_dim", "expand_dims"}


def _followed(program: Program, scores: int, output: int) -> dict[int, list[Axis]]:
    """Names of the axes of each operation that comes from the scores, where they can be told."""
    sizes = _atoms(program.ops[scores].equation)
    names = {scores: [(atom,) if n != 1 else () for atom, n in sizes.items()]}
    for number in range(scores + 1, output):
        op = program.ops[number]
        known = [names.get(ref[1]) if ref[0] == "op" else None for ref in op.inputs]
        if any(known) and op.body is None:
            moved = _moved(op.equation, known, sizes)
            if moved is not None:
                names[number] = moved
    return names


def _atoms(equation: Any) -> dict:
    """Name and length of each axis of a product of one summed axis, in order."""
    _, (batch, _) = equation.params["dimension_numbers"]
    left, right = (x.aval.ndim - len(batch) - 1 for x in equation.invars)
    counts = ("batch", len(batch)), ("left", left), ("right", right)
    atoms = [(side, i) for side, count in counts for i in range(count)]
    return dict(zip(atoms, equation.outvars[0].aval.shape, strict=False))


def _moved(equation: Any, known: list, sizes: dict) -> list[Axis] | None:
    """The names of the axes of a result, by those of its inputs."""
    name, parameters = equation.primitive.name, equation.params
    shape = equation.outvars[0].aval.shape
    first = next(x for x in known if x)
    if name == "transpose":
        return [first[i] for i in parameters["permutation"]]
    if name == "broadcast_in_dim":
        onto = list(parameters["broadcast_dimensions"])
        moved: list[Axis] = [() for _ in shape]
        for axis, i in zip(first, onto, strict=True):
            moved[i] = axis
        return moved
    if name in ("reshape", "squeeze", "expand_dims"):
        return _regrouped([atom for axis in first for atom in axis], shape, sizes)
    if name in ("reduce_max", "reduce_sum", "argmax"):
        return [axis for i, axis in enumerate(first) if i not in parameters["axes"]]
    if name in STIRS or name == "dot_general":
        return None
    fits = [x for x in known if x and len(x) == len(shape)]
    if not fits or any(
        math.prod(sizes[a] for a in x) not in (1, n) for x, n in zip(fits[0], shape, strict=True)
    ):
        return None
    return [next((x[i] for x in fits if x[i]), ()) for i in range(len(shape))]


def _regrouped(atoms: list, shape: Sequence[int], sizes: dict) -> list[Axis] | None:
    """The atoms in order, in groups of these sizes."""
    groups, left = [], list(atoms)
    for length in shape:
        group: Axis = ()
        while left and math.prod(sizes[atom] for atom in group) < length:
            group = (*group, left.pop(0))
        if math.prod(sizes[atom] for atom in group) != length:
            return None
        groups.append(group)
    return None if left else groups


PARTS = ("batch", "heads", "groups")
"""Roles of the axes of the scores beside time and keys."""
WIDTH = ("value", 0)
"""Name of the last axis of queries, keys and values."""


@dataclass
class Layout:
    """Axes of the arrays of a place, and their order in the arrays of `performer_attention`.

    An atom is an axis of the scores: ("batch", i), ("left", i), ("right", i). Heads of keys are the
    last of two or more batch axes; other axes of the queries beside time are query heads of them.
    """

    sizes: dict
    """Length of each atom, in the order of the scores."""
    operands: tuple[int, int]
    """Which operand of q k^T is the queries, and which the keys."""
    dims: Any
    """Dimension numbers of q k^T."""
    time: tuple
    keys: tuple
    batch: list
    heads: list
    groups: list
    values: int
    """Which operand of the product with the values they are."""
    value_dims: Any
    """Names of the batch axes of the values in order, these axes, that of the keys, the rest."""
    shape: tuple[int, ...]
    """Shape of the output."""
    dtype: Any
    order: list
    """Names of the axes of the output."""
    goal: list[Axis] = field(default_factory=list)

    @classmethod
    def of(
        cls, program: Program, scores: int, output: int, number: int, weights: list[Axis]
    ) -> "Layout | None":
        """The layout; None if no axis of the scores is summed over.

        Raises:
            Unfit: if values, or axes, lie in a way that is not read.
        """
        equation, product = program.ops[scores].equation, program.ops[output].equation
        (contracted, batch) = equation.params["dimension_numbers"]
        (summed, batches) = product.params["dimension_numbers"]
        if len(contracted[0]) != 1 or len(summed[0]) != 1:
            return None
        (axis,), (of_values,) = summed[number], summed[1 - number]
        if len(weights[axis]) != 1 or weights[axis][0][0] == "batch":
            return None
        keys = weights[axis][0]
        side, other = keys[0], "left" if keys[0] == "right" else "right"
        all_sizes = _atoms(equation)
        sizes = {atom: n for atom, n in all_sizes.items() if n != 1}
        free = [atom for atom in all_sizes if atom[0] == other]
        length = all_sizes[keys]
        time = next((x for x in free if all_sizes[x] == length), None)
        time = time or max(free, key=all_sizes.__getitem__, default=None)
        if time is None:
            return None  # a single query without an axis
        lead = [atom for atom in all_sizes if atom[0] == "batch"]
        heads = lead[-1:] if len(lead) > 1 else []
        groups = [x for x in free if x != time]
        value = product.invars[1 - number].aval
        names = [weights[i] for i in batches[number]]
        # Queries without a batch axis, as a Perceiver's latents: it is among the keys' axes.
        shared = [atom for atom in all_sizes if atom[0] == side and atom != keys]
        if any(atom in sizes and (atom,) not in names for atom in shared):
            raise Unfit("its keys have more than one axis")
        of_batch = shared + lead[: len(lead) - len(heads)]
        if not of_batch:  # keys that all examples share, as a codebook
            of_batch, groups = groups[:1], groups[1:]
        if any(a[0] == other and a in sizes for axis in names for a in axis):
            return None  # values of each query, as of a mixture of experts
        inner = batches[1 - number]
        rest = [i for i in range(value.ndim) if i not in (*inner, of_values)]
        free_names = [x for i, x in enumerate(weights) if i not in (axis, *batches[number])]
        queries, values = [a for x in free_names for a in x], [WIDTH]
        order = [a for x in names for a in x]
        order += queries + values if number == 0 else values + queries
        return cls(
            sizes=all_sizes,
            operands=(0, 1) if side == "right" else (1, 0),
            dims=(contracted, batch),
            time=time,
            keys=keys,
            batch=of_batch,
            heads=heads,
            groups=groups,
            values=1 - number,
            value_dims=(names, list(inner), of_values, rest),
            shape=product.outvars[0].aval.shape,
            dtype=product.outvars[0].aval.dtype,
            order=order,
        )

    def name_heads(self) -> None:
        """Take the only batch axis for heads if a batch axis of length 1 was dropped before it."""
        if not self.heads and len(self.batch) == 1 and self.batch[0][0] == "batch":
            where = [i for i, axis in enumerate(self.goal) if axis == (self.batch[0],)]
            if where and () in self.goal[: where[0]]:
                self.batch, self.heads = [], self.batch

    @property
    def roles(self) -> tuple[tuple[str, ...], ...]:
        """Role of each axis of the scores at the softmax, () for an axis of length 1."""
        roles = {self.time: "time", self.keys: "keys"}
        roles |= {a: name for name in PARTS for a in getattr(self, name)}
        return tuple(tuple(roles[atom] for atom in axis) for axis in self.goal)

    def take(self, roles: Sequence[tuple[str, ...]]) -> bool:
        """Make each axis what it was in the measured program, whatever its length; false if not so.

        An axis that had length 1 counts as a batch axis.
        """
        if len(roles) != len(self.goal):
            return False
        known: dict[Any, str] = {}
        for axis, own in zip(self.goal, roles, strict=True):
            known |= dict(zip(axis[::-1], own[::-1], strict=False))
        known.pop(self.keys, None)
        free = [self.time, *self.groups, *(a for a in self.batch if a[0] in ("left", "right"))]
        lost = [a for a in free if a not in known and a[0] != self.keys[0]]
        times = [a for a, role in known.items() if role == "time"] + lost
        if not times or "keys" in known.values():
            return False
        self.time = times[0]
        others = [*self.batch, *self.heads, *self.groups, *free]
        others = [a for a in self.sizes if a in others and a not in (self.time, self.keys)]
        which = {name: [a for a in others if known.get(a, "batch") == name] for name in PARTS}
        self.batch, self.heads, self.groups = (which[name] for name in PARTS)
        return True

    def _arranged(self, x: Array, have: list, *groups: list) -> Array:
        """x, whose axes are named `have`, with an axis for each group; those it lacks repeat."""
        wanted = [atom for group in groups for atom in group]
        sizes = self.sizes | dict(zip(have, x.shape, strict=True))
        x = jnp.transpose(x, [have.index(atom) for atom in wanted if atom in have])
        x = jnp.expand_dims(x, [i for i, atom in enumerate(wanted) if atom not in have])
        x = jnp.broadcast_to(x, [sizes[atom] for atom in wanted])
        return x.reshape([math.prod(sizes[atom] for atom in group) for group in groups])

    def _operand(self, x: Array, which: int, *groups: list) -> Array:
        """(groups, h) of an operand of q k^T."""
        (contracted,), batch = self.dims[0][which], list(self.dims[1][which])
        rest = [i for i in range(x.ndim) if i not in (*batch, contracted)]
        side = "left" if which == 0 else "right"
        have = [("batch", i) for i in range(len(batch))] + [(side, i) for i in range(len(rest))]
        x = jnp.transpose(x, [*batch, *rest, contracted])
        return self._arranged(x, [*have, WIDTH], *groups, [WIDTH])

    def query(self, x: Array) -> Array:
        """(b, t, n, h)."""
        heads = [*self.heads, *self.groups]
        return self._operand(x, self.operands[0], self.batch, [self.time], heads)

    def key(self, x: Array) -> Array:
        """(b, s, k, h)."""
        return self._operand(x, self.operands[1], self.batch, [self.keys], self.heads)

    def value(self, x: Array) -> Array:
        """(b, s, k, v)."""
        names, inner, summed, rest = self.value_dims
        atoms = [atom for axis in names for atom in axis]
        x = jnp.transpose(x, [*inner, summed, *rest])
        x = x.reshape(*(self.sizes[atom] for atom in atoms), x.shape[len(inner)], -1)
        have = [*atoms, self.keys, WIDTH]
        return self._arranged(x, have, self.batch, [self.keys], self.heads, [WIDTH])

    def pairs(self, x: Array) -> Array:
        """(b, n, t, s) of scores as they enter the softmax."""
        have = [atom for axis in self.goal for atom in axis]
        x = x.reshape([self.sizes[atom] for atom in have])
        heads = [*self.heads, *self.groups]
        return self._arranged(x, have, self.batch, heads, [self.time], [self.keys])

    def back(self, x: Array) -> Array:
        """The output as the program has it, of (b, t, n, v)."""
        have = [*self.batch, self.time, *self.heads, *self.groups, WIDTH]
        kept, sizes = [atom for atom in have if atom in self.order], {WIDTH: x.shape[-1]}
        x = x.reshape([(self.sizes | sizes)[atom] for atom in kept])  # others have length 1
        x = jnp.transpose(x, [kept.index(atom) for atom in self.order])
        return x.reshape(self.shape).astype(self.dtype)


FOREIGN = tuple(f"/{name}/" for name in ("jax", "flax", "equinox", "haiku", "optax", "jaxtyping"))
OURS = str(Path(__file__).parents[1] / "attention")
"""Folder of `performer_attention`."""


def is_linear(equation: Any) -> bool:
    """True for an operation of `performer_attention`."""
    return any(x.file_name.startswith(OURS) for x in _frames(equation))


def _frames(equation: Any) -> list:
    trace = equation.source_info.traceback
    return [] if trace is None else list(trace.frames)


def line_of(equation: Any) -> str:
    """File and line of the user's code that an operation comes from."""
    frames = _frames(equation)
    own = [x for x in frames if not any(f"packages{name}" in x.file_name for name in FOREIGN)]
    ours = ("performer/linearization/places.py", "performer/nnx/_hooks.py")
    own = [x for x in own if not x.file_name.endswith(ours)]
    if not own:
        return "an unknown line"
    return f"{own[0].file_name.rsplit('/', 1)[-1]}:{own[0].line_num}"


class Named(NamedTuple):
    """A place with a name for the report."""

    number: int
    """In the order of the program."""
    at: tuple[int, ...]
    """Numbers of the operations that lead to it."""
    place: Place
    lengths: tuple[int, ...]
    """Lengths of the scans around it."""
    name: str


def named(program: Program) -> list[Named]:
    """All places, by file and line; numbered where a line has several."""
    found = list(places_in(program))
    lines = [place.line for _, place, _ in found]
    count: dict[str, int] = {}
    result = []
    for number, (at, place, lengths) in enumerate(found):
        same = count[place.line] = count.get(place.line, -1) + 1
        name = f"{place.line} #{same}" if lines.count(place.line) > 1 else place.line
        result.append(Named(number, at, place, lengths, name))
    return result
