"""A function as a list of operations, and its values with attention replaced.

JAX traces a function to a jaxpr. A `Program` is its operations in order, with calls inlined, and
the softmax attention that `performer.linearization.search` finds among them. `run` computes the
outputs and calls a handler at each place of attention.
"""

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array

from performer.linearization.layout import Layout
from performer.typing import float32_or_wider

INLINED = {"jit", "pjit", "closed_call", "core_call"}
SOFTMAX = {"exp", "reduce_sum", "div"}
ATTENTION = {"exp", "dot_general"}
MASKED = -9000.0
"""Scores of masked pairs lie below; public code adds -1e4, -1e9, -2e38 or -inf."""


class Ref(NamedTuple):
    """Source of a value: an output of an operation, an input of the program, or a constant."""

    op: int | None = None
    """Number of the operation; None for inputs and constants."""
    output: int = 0
    """Which of the outputs of the operation."""
    input: int | None = None
    """Number of the input of the program."""
    value: Any = None
    """The constant."""


@dataclass
class Op:
    """An operation, where its inputs come from, and the program in it if it has places."""

    equation: Any
    inputs: list[Ref]
    scope: str = ""
    """Names of `jax.named_scope` around it, also of the calls and bodies that it is in."""
    body: "Program | None" = None
    known: dict[int, Ref] = field(default_factory=dict)
    """Inputs that are constants in the body."""
    custom: tuple[tuple[int, ...], ...] = ()
    """Functions with a derivative of their own that it is inlined from: numbers of equations."""

    @property
    def name(self) -> str:
        """Name of its primitive."""
        return self.equation.primitive.name


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
    layout: Layout
    line: str
    """File and line of the user's code."""
    scope: str
    """Scope of its operations."""
    words: tuple[str, ...]
    """Names of all operations of the place except those that move axes or convert dtypes."""
    steps: tuple[Any, ...]
    """The chain with the arrays that enter it (`factors.Step`)."""
    base: float
    """1 for e^x, the logarithm of 2 for 2^x."""
    moves: list[int]
    """Operations from the product with the values to its division by the sum of the weights."""
    tail: list[int]
    """These, the sum and the division, which is the last; none if the weights are divided."""
    sources: tuple[Ref, ...]
    """Arrays of the chain that depend on the inputs of the program, before they are broadcast."""
    dtypes: frozenset[str]
    """Names of the floating-point types that it is computed with."""
    sinks: tuple[Any, ...] = ()
    """Logits of no key (`factors.SinkPart`)."""
    masks: tuple[Any, ...] = ()
    """Factors of the exponentials, with the arrays that enter them (`factors.Step`)."""


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
    scanned: tuple[int, int] | None = None
    """In the body of a scan: numbers of inputs that are the same at each step and are carried."""
    attention: set[int] = field(default_factory=set)
    """Operations of places and of attention to a single key."""


def inlined(
    jaxpr: Any,
    constants: Sequence[Any],
    scope: str = "",
    whole: Collection[tuple[int, ...]] = (),
    known: Mapping[int, Ref] | None = None,
) -> Program:
    """Return the operations of a jaxpr, with calls inlined but those in `whole` (`Op.custom`).

    Inputs that are `known` are constants.
    """
    ops: list[Op] = []
    inputs = [(known or {}).get(i, Ref(input=i)) for i in range(len(jaxpr.invars))]
    return Program(ops, _inlined(jaxpr, constants, inputs, ops, scope, whole))


def _inlined(
    jaxpr: Any,
    constants: Sequence[Any],
    inputs: list[Ref],
    ops: list[Op],
    scope: str,
    whole: Collection[tuple[int, ...]],
    at: tuple[int, ...] = (),
    custom: tuple[tuple[int, ...], ...] = (),
) -> list[Ref]:
    """Append the operations of a jaxpr to `ops` and return its outputs."""
    known = dict(zip(jaxpr.constvars, (Ref(value=x) for x in constants), strict=True))
    known |= dict(zip(jaxpr.invars, inputs, strict=True))

    def source(atom: Any) -> Ref:
        return Ref(value=atom.val) if isinstance(atom, jex.Literal) else known[atom]

    for number, equation in enumerate(jaxpr.eqns):
        sources, here = [source(atom) for atom in equation.invars], (*at, number)
        inner = None if here in whole else _called(equation)
        inner_scope = f"{scope}/{equation.source_info.name_stack}"
        if inner is not None:
            is_jit = equation.primitive.name in (*INLINED, "split")
            called = equation.params.get("name", "") if is_jit else ""
            around = custom if is_jit else (*custom, here)
            outputs = _inlined(*inner, sources, ops, f"{inner_scope}/{called}", whole, here, around)
        else:
            outputs = [Ref(len(ops), i) for i in range(len(equation.outvars))]
            ops.append(Op(equation, sources, inner_scope, custom=custom))
        known |= dict(zip(equation.outvars, outputs, strict=True))
    return [source(atom) for atom in jaxpr.outvars]


def _called(equation: Any) -> tuple[Any, Sequence[Any]] | None:
    """Return the jaxpr of a call and its constants; None for what is no call.

    A function with a derivative of its own counts as an operation, unless it is softmax or all of
    attention.
    """
    name, parameters = equation.primitive.name, equation.params
    if name == "split":
        return _slices(equation).jaxpr, ()
    inner = next(
        (parameters[x] for x in ("call_jaxpr", "fun_jaxpr", "jaxpr") if x in parameters), None
    )
    custom = {"custom_jvp_call": SOFTMAX, "custom_vjp_call": ATTENTION}.get(name)
    if name not in INLINED and not (custom and custom <= _words(inner)):
        return None
    assert inner is not None
    return (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())


def _slices(equation: Any) -> Any:
    """A split as slices: an operation of a program that is followed has one output."""
    axis, ends = equation.params["axis"], np.cumsum(equation.params["sizes"]).tolist()
    aval = equation.invars[0].aval

    def slices(x: Array) -> list[Array]:
        both = zip([0, *ends], ends, strict=False)
        return [jax.lax.slice_in_dim(x, low, high, axis=axis) for low, high in both]

    return jax.make_jaxpr(slices)(jax.ShapeDtypeStruct(aval.shape, aval.dtype))


def _words(jaxpr: Any) -> set[str]:
    """Names of all operations of a jaxpr and the jaxprs in it."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    inner = (_words(x) for equation in jaxpr.eqns for x in jex.jaxprs_in_params(equation.params))
    return {equation.primitive.name for equation in jaxpr.eqns}.union(*inner)


class Values:
    """Values of the operations of a program, as far as they are computed."""

    def __init__(self, program: Program, inputs: Sequence[Any] | Mapping[int, Any]):
        self.program, self.inputs = program, inputs
        self.of: dict[int, Any] = {}

    def read(self, ref: Ref) -> Any:
        """Return the value that a reference stands for."""
        if ref.op is not None:
            if ref.op not in self.of:  # no output depends on it
                self.of[ref.op] = self.bind(self.program.ops[ref.op], self.read)
            return self.of[ref.op][ref.output]
        if ref.input is not None:
            return self.inputs[ref.input]
        return (
            ref.value if isinstance(ref.value, jax.Array | float | int) else jnp.asarray(ref.value)
        )

    def bind(self, op: Op, read: Callable[[Ref], Any]) -> list[Any]:
        """Return the outputs of an operation."""
        primitive = op.equation.primitive
        parameters = primitive.get_bind_params(op.equation.params)
        with op.equation.ctx.manager:
            output = primitive.bind(*map(read, op.inputs), **parameters)
        return list(output) if primitive.multiple_results else [output]

    def scores(self, place: Place, fill: ArrayLike) -> Array:
        """Return what enters the softmax if all q.k are `fill`: (b, n, t, s), to base e.

        What multiplies exponentials is added as its logarithm.
        """
        shape = self.program.ops[place.scores].equation.outvars[0].aval
        new = {place.scores: [jnp.full(shape.shape, fill, shape.dtype)]}

        def read(ref: Ref) -> Any:
            return new[ref.op][ref.output] if ref.op in new else self.read(ref)

        for number in place.chain:
            new[number] = self.bind(self.program.ops[number], read)
        scores = place.layout.pairs(read(place.goal), place.layout.goal)
        scores = scores.astype(float32_or_wider(scores))
        if place.base != 1:
            scores = jnp.where(scores > MASKED, scores * place.base, scores)
        for mask in place.masks:
            ones = jnp.ones_like(mask.op.equation.outvars[0].aval)
            exponentials = mask.op.inputs[mask.inputs.index(None)]
            others = {id(x): self.read(x) for x in mask.op.inputs if x is not exponentials}
            kept = self.bind(mask.op, lambda x, known=others, y=ones: known.get(id(x), y))
            scores += jnp.log(place.layout.pairs(kept[0], mask.axes).astype(scores.dtype))
        return scores

    def moved(self, place: Place, output: Array) -> Array:
        """Return an output of the product with the values as it is after the division."""
        for number in place.moves:
            output = self.bind(self.program.ops[number], lambda ref, x=output: x)[0]
        return output

    def operands(self, place: Place) -> tuple[Array, Array, Array]:
        """Return queries (b, t, n, h), keys (b, s, k, h) and values (b, s, k, v)."""
        ops = self.program.ops
        score_inputs, output_inputs = ops[place.scores].inputs, ops[place.output].inputs
        layout = place.layout
        query, key = (self.read(score_inputs[i]) for i in layout.operands)
        return (
            layout.query(query),
            layout.key(key),
            layout.value(self.read(output_inputs[layout.values])),
        )


class Traced(Exception):
    """A constant of the program that is an argument of what is being traced around it."""


class Constants(Values):
    """Values that do not depend on the inputs of the program, computed when they are read."""

    def __init__(self, program: Program):
        super().__init__(program, ())

    def read(self, ref: Ref) -> Any:
        """Return the value that a reference stands for.

        Raises:
            Traced: if it is not known while tracing.
        """
        if ref.input is not None or isinstance(ref.value, Tracer):
            raise Traced
        return super().read(ref)


class Alone(NamedTuple):
    """Attention of a place without the program around it: a function of its leaves."""

    program: Program
    place: Place
    leaves: tuple[Ref, ...]
    """Queries, keys, values and sources of the mask; also other values that it depends on, if they
    are not computed from these."""
    shapes: tuple[jax.ShapeDtypeStruct, ...]

    @classmethod
    def of(cls, program: Program, place: Place) -> "Alone":
        """Return the attention of a place."""
        stops = {_key(ref) for ref in _read_by(program, place)}
        last = [place.output, *place.tail][-1]
        derived: list[bool] = []  # from leaves and constants alone
        after = {place.scores}
        for number in range(last + 1):
            refs = program.ops[number].inputs
            derived.append(all(_is_derived(ref, stops, derived) for ref in refs))
            if any(ref.op in after for ref in refs):
                after.add(number)
        leaves: dict[tuple, tuple[Ref, Any]] = {}
        left, seen = [last], {last}
        while left:
            op = program.ops[left.pop()]
            for ref, atom in zip(op.inputs, op.equation.invars, strict=True):
                if ref.op is None and ref.input is None:
                    continue
                inside = ref.op in after or (ref.op is not None and derived[ref.op])
                if ref.op is None or _key(ref) in stops or not inside:
                    leaves[_key(ref)] = ref, jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)
                elif ref.op not in seen:
                    left.append(ref.op)
                    seen.add(ref.op)
        refs, shapes = zip(*leaves.values(), strict=True)
        return cls(program, place, refs, shapes)

    def values(self, arrays: Sequence[Any]) -> Values:
        """Values of the program, computed from these leaves when they are read."""
        inputs: dict[int, Any] = {}
        values = Values(self.program, inputs)
        for ref, array in zip(self.leaves, arrays, strict=True):
            if ref.op is None:
                inputs[ref.input or 0] = array
            else:
                values.of.setdefault(ref.op, {})[ref.output] = array
        return values

    def attend(self, *arrays: Any) -> Array:
        """Compute attention from the leaves."""
        return self.values(arrays).read(Ref([self.place.output, *self.place.tail][-1]))

    def text(self) -> tuple[str, ...]:
        """Return the same for places whose programs and constants are."""
        traced = jax.make_jaxpr(self.attend)(*self.shapes)
        digests = (hashlib.sha256(np.asarray(x).tobytes()).hexdigest() for x in traced.consts)
        return str(traced), *digests


def _key(ref: Ref) -> tuple:
    return ref.op, ref.output, ref.input


def _is_derived(ref: Ref, stops: set[tuple], derived: list[bool]) -> bool:
    """True for constants, leaves, and outputs of operations on these."""
    if _key(ref) in stops:
        return True
    return derived[ref.op] if ref.op is not None else ref.input is None


def run(
    program: Program,
    inputs: Sequence[Any],
    settings: dict[int, Any],
    handle: Callable[[Values, Place, tuple[int, ...], Any], tuple[Array, Any]],
    at: tuple[int, ...] = (),
) -> tuple[list[Any], dict[int, Any]]:
    """Return the outputs of a program, and the second result of `handle` at each place.

    A division after the product with the values drops out where the product is replaced.

    Args:
        program: as traced.
        inputs: arrays.
        settings: pytree for each place that is handled, by its number; for a body a dict of the
            same kind. In a scan the leaves have an axis more, of the steps. With () as the setting
            the operations of the place are computed also, for a handler that needs them.
        handle: (values, place, numbers that lead to it, setting) -> the output there, and anything.
        at: numbers that lead to the program.
    """
    values = Values(program, inputs)
    kept: dict[int, Any] = {}
    divisions = _divisions(program, settings)
    for number in _needed(program, settings):
        op = program.ops[number]
        if number in program.places and number in settings:
            output, kept[number] = handle(
                values, program.places[number], (*at, number), settings[number]
            )
            values.of[number] = [output]
        elif number in divisions:
            values.of[number] = [values.read(divisions[number])]
        elif op.body is not None and settings.get(number):
            read = [values.read(op.known.get(i, ref)) for i, ref in enumerate(op.inputs)]
            values.of[number], kept[number] = _run_body(
                op, read, settings[number], handle, (*at, number)
            )
        else:
            values.of[number] = values.bind(op, values.read)
    return [values.read(ref) for ref in program.outputs], kept


def _run_body(
    op: Op, inputs: list[Any], settings: Any, handle: Any, at: tuple[int, ...]
) -> tuple[list[Any], Any]:
    parameters, body = op.equation.params, op.body
    assert body is not None
    if op.name != "scan":
        call = lambda *inputs: run(body, inputs, settings, handle, at)  # noqa: E731
        options = {name: parameters[name] for name in ("prevent_cse", "policy")}
        return jax.checkpoint(call, **options)(*inputs)
    first, count = scan_counts(op.equation)
    last = first + count
    constants, carry = inputs[:first], inputs[first:last]

    def step(carry, slices):
        step_inputs, setting = slices
        outputs, kept = run(body, [*constants, *carry, *step_inputs], setting, handle, at)
        return outputs[:count], (outputs[count:], kept)

    options = {name: parameters[name] for name in ("length", "reverse", "unroll")}
    carry, (stacked, kept) = jax.lax.scan(step, carry, (inputs[last:], settings), **options)
    return [*carry, *stacked], kept


def scan_counts(equation: Any) -> tuple[int, int]:
    """Numbers of inputs of a scan that are the same at each step, and of those that are carried.

    Inputs are constants, carry and slices; outputs carry and slices. JAX 0.11 has no numbers of
    them, but slices have an axis more outside than in the body.
    """
    inside = getattr(equation.params["jaxpr"], "jaxpr", equation.params["jaxpr"])
    last, count = (
        sum(x.aval.ndim == y.aval.ndim for x, y in zip(*both, strict=True))
        for both in ((equation.invars, inside.invars), (equation.outvars, inside.outvars))
    )
    return last - count, count


def _needed(program: Program, settings: dict[int, Any]) -> list[int]:
    """Operations that outputs and places with settings depend on once these are replaced."""
    needed: set[int] = set()
    divisions = _divisions(program, settings)
    left = [*settings, *(ref.op for ref in program.outputs)]
    left += [i for i, op in enumerate(program.ops) if op.equation.effects]
    while left:
        number = left.pop()
        if number is None or number in needed:
            continue
        needed.add(number)
        refs, op = program.ops[number].inputs, program.ops[number]
        if op.body is not None and settings.get(number):
            refs = [op.known.get(i, ref) for i, ref in enumerate(refs)]
        if number in program.places and settings.get(number, ()) != ():
            refs = _read_by(program, program.places[number])
        elif number in divisions:
            refs = [divisions[number]]
        left += [ref.op for ref in refs]
    return sorted(needed)


def _divisions(program: Program, settings: dict[int, Any]) -> dict[int, Ref]:
    """Divisions after the products of places that are replaced, and what they divide."""
    replaced = [program.places[i] for i in program.places if settings.get(i, ()) != ()]
    above = {place.tail[-1]: [place.output, *place.moves][-1] for place in replaced if place.tail}
    return {
        number: next(ref for ref in program.ops[number].inputs if ref.op == numerator)
        for number, numerator in above.items()
    }


def _read_by(program: Program, place: Place) -> list[Ref]:
    """Inputs of a replaced place: queries, keys, values, and the parts of its mask."""
    refs = [*program.ops[place.scores].inputs]
    refs.append(program.ops[place.output].inputs[place.layout.values])
    return [*refs, *place.sources]


def places_in(
    program: Program, at: tuple[int, ...] = ()
) -> Iterator[tuple[tuple, Place, tuple, Program]]:
    """Each place: the numbers that lead to it, the place, the lengths of the scans, its program."""
    for number, op in enumerate(program.ops):
        if number in program.places:
            yield (*at, number), program.places[number], (), program
        if op.body is not None:
            lengths = (op.equation.params["length"],) if op.name == "scan" else ()
            for inner, place, more, own in places_in(op.body, (*at, number)):
                yield inner, place, (*lengths, *more), own


def single_in(program: Program, at: tuple[int, ...] = ()) -> Iterator[tuple[tuple, tuple]]:
    """The numbers that lead to attention to a single key, and its words."""
    for number, op in enumerate(program.ops):
        if number in program.single:
            yield (*at, number), program.single[number]
        if op.body is not None:
            yield from single_in(op.body, (*at, number))


def left_in(program: Program) -> list[Left]:
    """Attention that cannot be replaced, also in bodies."""
    bodies = [op.body for op in program.ops if op.body is not None]
    return program.left + [each for body in bodies for each in left_in(body)]


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
    program: Program
    """The program or the body of a scan that it is in."""


def named(program: Program) -> list[Named]:
    """All places, by file and line; numbered where a line has several."""
    places = list(places_in(program))
    lines = [place.line for _, place, *_ in places]
    count: dict[str, int] = {}
    result = []
    for number, (at, place, lengths, own) in enumerate(places):
        same = count[place.line] = count.get(place.line, -1) + 1
        name = f"{place.line} #{same}" if lines.count(place.line) > 1 else place.line
        result.append(Named(number, at, place, lengths, name, own))
    return result
