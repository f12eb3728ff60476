"""Lazy products: the values of a program that softmax attention is made of.

A product q k^T is a value that remembers its operands. Rules say which operations keep it one of

    scores      scale q k^T + bias, less numbers of rows
    row         numbers of rows, such as the largest score
    exp         exponentials of scores, times masks or numbers of each key
    sum         their sum over keys; inverse, its reciprocal; log_sum, its logarithm
    weights     exponentials divided by their sum; log_weights, their logarithm
    numerator   exponentials times values, before the division
    output      after it

Every other operation materialises the value. It is the reason why attention stays exact, if the
result is divided by its sum and multiplied by values all the same.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from performer.linearization.factors import before_move
from performer.linearization.layout import MOVES, Axis, Unfit, atoms_of, moved
from performer.linearization.lines import line_of
from performer.linearization.program import MASKED, Constants, Op, Program, Ref, Traced

SAME = {"convert_element_type", "copy", "name", "reduce_precision", "sharding_constraint", "pvary"}
SAME |= {"optimization_barrier", "stop_gradient", *MOVES}
"""Operations that leave numbers as they are."""
REDUCED = {"reduce_max", "reduce_min", "reduce_sum"}
RESIZED = {"concatenate", "pad", "slice"}
COMPARISONS = {"lt", "le", "gt", "ge", "sort", "top_k"}
DIVIDED = {"sum", "inverse", "log_sum", "log_weights", "weights", "flags"}
"""Kinds whose product with values is attention, or what is left of it."""
ROUNDING = 1e-6
"""Largest number that may be added to the weights or their sum, such as against 0 / 0."""
NEUTRAL = {
    "div": lambda x: x == 1,
    "mul": lambda x: x == 1,
    "add": lambda x: abs(x) <= ROUNDING,
    "sub": lambda x: abs(x) <= ROUNDING,
    "max": lambda x: x <= ROUNDING,
    "min": lambda x: x >= 1,
}
"""Operation of weights and a number -> are they the same?"""
PRODUCTS = 4
"""Products that a value may come from: the latest ones."""
SUM = "its scores are a sum of several products: if all are of queries and keys, concatenate these"
CHANGED = "its weights are changed after the softmax, {}"
LARGEST = "its weights depend on which scores are large, as in top-k attention"
SHIFTED = "its scores are changed after their largest was subtracted, or normalized"
CUT = "its derivative is cut by stop_gradient"
NOT_READ = "exponentials between two products that are not read as attention"
READ_ELSEWHERE = (
    "its scores or weights are read elsewhere, as by an output, a second product, the logarithm of"
    " their sum, or a derivative: linearize first, then differentiate"
)


class Sink(NamedTuple):
    """A logit of no key: its exponential is part of the sum."""

    ref: Ref
    aval: Any
    axes: list[Axis]
    """Axes of the scores or of their sum."""
    is_log: bool
    """False for the exponential itself."""


class Lazy(NamedTuple):
    """A value in terms of one product."""

    kind: str
    product: int
    """Number of the product."""
    axes: list[Axis]
    goal: int
    """Operation of the scores before rows are subtracted and sinks are joined."""
    shifts: tuple[tuple[int | None, frozenset], ...] = ()
    """Rows that were subtracted: the operation, and the atoms that it is over."""
    base: float = 1.0
    """1 for e^x, the logarithm of 2 for 2^x."""
    masks: tuple[int, ...] = ()
    """Operations that multiply exponentials before these are summed."""
    again: str = ""
    """Operation that changed the weights, which must be divided by their sum again."""
    sinks: tuple[Sink, ...] = ()
    joined: tuple[int, int] | None = None
    """Numbers of sinks before and after the keys, as long as these are joined."""
    over: frozenset = frozenset()
    """Atoms that a row or a sum is over."""
    output: int = -1
    """Product with the values."""
    operand: int = 0
    """Which of its operands the weights are."""
    widths: tuple = ()
    """Length of each axis that the values add to it."""
    ones: tuple[int, int, int] | None = None
    """An axis of the values, and the range on it where all values are 1."""
    tail: tuple[int, ...] = ()
    """Operations from the product with the values to the division, which is the last."""
    why: str = ""
    """Why it is materialised; no rules apply any more."""

    @property
    def exponentials(self) -> tuple:
        """Facts that exponentials and their sum must have in common."""
        return self.goal, self.shifts, self.base, self.masks


class Walk:
    """Lazy values of a program, followed from operation to operation."""

    def __init__(self, program: Program):
        self.program = program
        self.of: dict[int, dict[int, Lazy]] = {}
        """Operation -> product -> the value in its terms."""
        self.varying: set[int] = set()
        """Operations that depend on inputs of the program."""
        self.numerators: dict[tuple[int, int], Lazy] = {}
        self.masks: dict[tuple, int] = {}
        """Factor of exponentials -> the first operation that multiplies them with it."""

    def take(self, number: int) -> list[Lazy]:
        """Follow lazy values through an operation; returns outputs of attention."""
        op = self.program.ops[number]
        if any(self.varies(ref) for ref in op.inputs):
            self.varying.add(number)
        if is_sum(op):
            axes: list[Axis] = [(x,) if n != 1 else () for x, n in atoms_of(op.equation).items()]
            self.of[number] = {number: Lazy("scores", number, axes, number)}
            return self._weighed(number, op)
        if op.body is not None:
            return []
        inputs = [self.at(ref) for ref in op.inputs]
        products = sorted({x for each in inputs for x in each})[-PRODUCTS:]
        results = {x: self._followed(number, op, [y.get(x) for y in inputs]) for x in products}
        self.of[number] = {x: y for x, y in results.items() if y and y.kind != "output"}
        outputs = [y for y in results.values() if y and y.kind == "output"]
        for x in outputs:
            self.numerators.pop((x.product, x.output), None)
        return outputs

    def at(self, ref: Ref) -> dict[int, Lazy]:
        """Product -> a value in its terms."""
        return {} if ref.op is None else self.of.get(ref.op, {})

    def undivided(self) -> Iterator[Lazy]:
        """Exponentials times values that are not divided later."""
        every = [x for each in self.of.values() for x in each.values() if x.kind in DIVIDED]
        for x in self.numerators.values():
            is_summed = any(
                (y.product, *y.exponentials) == (x.product, *x.exponentials) for y in every
            )
            changed = CHANGED.format(f"by {x.again}") if x.again else ""
            if not x.why or is_summed:
                yield x._replace(why=changed or READ_ELSEWHERE * is_summed)

    def _weighed(self, number: int, op: Op) -> list[Lazy]:
        """Weights that a product multiplies with another array; follows exponentials."""
        summed, batch = op.equation.params["dimension_numbers"]
        for i, ref in enumerate(op.inputs):
            read = self.at(ref).values()
            divided = [x for x in read if x.kind in DIVIDED]
            if divided:
                x = max(divided, key=lambda x: (not x.why, x.product))
                several = sum(not y.why for y in divided) > 1
                why = SUM if several else x.why
                if not why and x.kind != "weights":
                    why = f"{NOT_READ}: the sum of its exponentials is multiplied by values"
                return [x._replace(output=number, operand=i, why=why)]
            late = [x for x in read if x.kind == "exp"]
            for x in late:
                value = op.equation.invars[1 - i].aval.shape
                bound = (*summed[1 - i], *batch[1 - i])
                free_axes = [j for j in range(len(value)) if j not in bound]
                widths = tuple((("value", j), value[k]) for j, k in enumerate(free_axes))
                values: list[Axis] = [(name,) if n != 1 else () for name, n in widths]
                names = [x.axes[j] for j in batch[i]]
                rows = [y for j, y in enumerate(x.axes) if j not in (*summed[i], *batch[i])]
                axes = [*names, *rows, *values] if i == 0 else [*names, *values, *rows]
                over = frozenset(atom for j in summed[i] for atom in x.axes[j])
                if self.is_one(op.inputs[1 - i]):
                    axes = [() if axis in values else axis for axis in axes]
                    self.of[number][x.product] = x._replace(kind="sum", axes=axes, over=over)
                    continue
                ranges = ((j, self.ones(op.inputs[1 - i], k)) for j, k in enumerate(free_axes))
                ones = next(((j, *both) for j, both in ranges if both), None)
                x = x._replace(kind="numerator", axes=axes, over=over, output=number, operand=i)
                x = x._replace(widths=widths, ones=ones)
                self.of[number][x.product] = self.numerators[x.product, number] = x
            if late:
                return []
        return []

    def _followed(self, number: int, op: Op, inputs: list[Lazy | None]) -> Lazy | None:
        """The result of an operation; None if the product is only a factor of it."""
        x = max((y for y in inputs if y), key=lambda y: KINDS.index(y.kind))
        why = next((y.why for y in inputs if y and y.why), "")
        try:
            if why:
                drops = x.kind in DIVIDED and self.is_random(op, inputs)
                raise Unfit(CHANGED.format("as by dropout") if drops else why)
            return self._ruled(number, op, inputs, x)
        except Unfit as reason:
            after = {"exp": "exp", "exp2": "exp", "reduce_sum": "sum"}.get(op.name, "")
            known = {("scores", "exp"), ("row", "exp"), ("exp", "sum")}
            kind = after if (x.kind, after) in known else x.kind
            if x.kind == "numerator" and self._is_normalized(x, op, inputs):
                kind = "output"
            return x._replace(kind=kind, why=str(reason))

    def _is_normalized(self, x: Lazy, op: Op, inputs: list[Lazy | None]) -> bool:
        """True for a numerator that is divided by a sum, or by a part of itself."""
        if x.ones is not None and op.name in ("div", "mul"):
            return all(inputs)
        if op.name != "div":
            return False
        first = self.numerators.get((x.product, x.output))
        sound = first is not None and not first.why
        return any(y and y.kind in DIVIDED for y in inputs) or (sound and all(inputs))

    def _ruled(self, number: int, op: Op, inputs: list[Lazy | None], x: Lazy) -> Lazy | None:
        sizes = atoms_of(self.program.ops[x.product].equation) | dict(x.widths)
        known = [y and y.axes for y in inputs]
        axes = x.axes if op.name in RESIZED else moved(op.equation, known, sizes)
        if axes is None and op.name in MOVES | {"dot_general"}:
            where = f"{op.name} at {line_of(op.equation)}"
            raise Unfit(f"{NOT_READ}: axes of the scores are not followed through {where}")
        if axes is None:
            raise Unfit(self._changed(x, op, inputs))
        shape = op.equation.outvars[0].aval.shape
        named = all(n == 1 or axis for n, axis in zip(shape, axes, strict=True))
        if not named and op.name not in RESIZED:
            return None
        result = RULES[x.kind](self, number, op, inputs, x._replace(axes=axes))
        if result is None:
            raise Unfit(self._changed(x, op, inputs))
        return result

    def _changed(self, x: Lazy, op: Op, inputs: list[Lazy | None]) -> str:
        """Why an operation materialises a value."""
        if op.name in COMPARISONS:
            return LARGEST
        if x.again:
            return CHANGED.format(f"by {x.again}")
        if x.kind in ("scores", "row"):
            by = f"its scores are changed by {op.name}: they are not scale q.k + bias"
            return SHIFTED if x.shifts else by
        if x.kind == "numerator":
            return f"its product with the values is changed by {op.name} before it is divided"
        drops = self.is_random(op, inputs)
        if x.kind == "exp" and not drops:
            return f"its exponentials are changed by {op.name} before they are divided by their sum"
        return CHANGED.format("as by dropout" if drops else f"by {op.name}")

    def varies(self, ref: Ref) -> bool:
        """True if a value depends on inputs of the program."""
        return ref.input is not None or ref.op in self.varying

    def origin(self, ref: Ref) -> Ref:
        """A value before its axes were moved and its dtype was changed."""
        while ref.op is not None and self.program.ops[ref.op].name in SAME:
            ref = self.program.ops[ref.op].inputs[0]
        return ref

    def number(self, ref: Ref) -> float | None:
        """A constant number, also if it was broadcast; None for anything else."""
        ref = self.origin(ref)
        op = self._op(ref)
        shape = op.equation.outvars[ref.output].aval.shape if op else np.shape(ref.value)
        if self.varies(ref) or isinstance(ref.value, Tracer) or math.prod(shape) != 1:
            return None
        try:
            with jax.ensure_compile_time_eval():
                return np.asarray(Constants(self.program).read(ref)).item()
        except Traced:
            return None

    def is_one(self, ref: Ref) -> bool:
        """True for an array whose entries are all 1, written in the code."""
        value = self.origin(ref).value
        is_array = isinstance(value, np.ndarray | jax.Array) and not isinstance(value, Tracer)
        return self.number(ref) == 1 or (is_array and bool(np.all(np.asarray(value) == 1)))

    def ones(self, ref: Ref, axis: int) -> tuple[int, int] | None:
        """The range on an axis where an array was joined to one of ones, or padded by them."""
        op = self._op(ref)
        while op is not None and op.name in ("transpose", "convert_element_type", "copy"):
            axis = op.equation.params["permutation"][axis] if op.name == "transpose" else axis
            op = self._op(op.inputs[0])
        if op is None or op.name not in ("concatenate", "pad"):
            return None
        n = op.equation.outvars[0].aval.shape[axis]
        if op.name == "pad":
            grown = [(i, x) for i, x in enumerate(op.equation.params["padding_config"]) if any(x)]
            low, high = map(int, grown[0][1][:2])
            if [i for i, _ in grown] != [axis] or self.number(op.inputs[1]) != 1 or low * high:
                return None
            return (0, low) if low else (n - high, n)
        if op.equation.params["dimension"] != axis:
            return None
        ends = np.cumsum([x.aval.shape[axis] for x in op.equation.invars]).tolist()
        ranges = zip(op.inputs, [0, *ends], ends, strict=False)
        return next(((low, high) for x, low, high in ranges if self.is_one(x)), None)

    def source(self, number: int, operand: int, axes: list[Axis]) -> tuple:
        """An operand before it was broadcast, with the axes it has, to be compared with others."""
        op = self.program.ops[number]
        ref, dims = op.inputs[operand], tuple(range(op.equation.invars[operand].aval.ndim))
        while ref.op is not None:
            above = self.program.ops[ref.op]
            inner = dims if above.name in SAME - MOVES else before_move(above, dims)
            if inner is None:
                break
            ref, dims = above.inputs[0], inner
        names = tuple(axes[i] if i >= 0 else () for i in dims)
        return ref.op, ref.output, ref.input, id(ref.value), names

    def is_mask(self, number: int, operand: int, x: Lazy, when: bool) -> bool:
        """True if the scores are masked already except where an operand is true, or false."""
        mask, left, visited = self.source(number, operand, x.axes), [x.goal], set()
        while left:
            here = left.pop()
            if here is None or here in visited or x.product not in self.of.get(here, {}):
                continue
            visited.add(here)
            op = self.program.ops[here]
            left += [y.op for y in op.inputs]
            is_kept = op.name == "select_n" and (x.product in self.at(op.inputs[2])) == when
            if is_kept and self.source(here, 0, self.of[here][x.product].axes) == mask:
                return True
        return False

    def sink(self, ref: Ref, aval: Any, total: Lazy) -> Sink | None:
        """Return an addend of a sum as a sink; None if it is none."""
        if not total.shifts:
            return None if self.at(ref) else Sink(ref, aval, total.axes, False)
        power = self._op(self.origin(ref))
        below = self.origin(power.inputs[0]) if power and power.name == "exp" else Ref()
        op = self._op(below)
        if op is None or op.name != "sub":
            return None
        if [row for row, _ in total.shifts] != [self.origin(op.inputs[1]).op]:
            return None
        axes = self.at(below)[total.product].axes
        return Sink(op.inputs[0], op.equation.invars[0].aval, axes, True)

    def _op(self, ref: Ref) -> Op | None:
        return None if ref.op is None else self.program.ops[ref.op]

    def is_random(self, op: Op, inputs: list[Lazy | None]) -> bool:
        """True if what meets a value depends on random numbers."""
        left = [ref.op for x, ref in zip(inputs, op.inputs, strict=True) if not x]
        visited = set()
        while left:
            number = left.pop()
            if number is None or number in visited:
                continue
            visited.add(number)
            if self.program.ops[number].name.startswith(("random_", "threefry")):
                return True
            left += [x.op for x in self.program.ops[number].inputs]
        return False


def is_sum(op: Op) -> bool:
    """True for a product of two arrays that sums over an axis."""
    return op.name == "dot_general" and bool(op.equation.params["dimension_numbers"][0][0])


# Rules: (walk, number, op, inputs, the input of the latest kind with the axes of the result) ->
# the result, or None if the operation materialises it.


def _row(walk: Walk, number: int, op: Op, inputs: list, x: Lazy) -> Lazy | None:
    """Whatever numbers of rows become, they are numbers of rows."""
    return x._replace(over=x.over | _over(op, inputs)) if op.name in REDUCED else x


def _scores(walk: Walk, number: int, op: Op, inputs: list, x: Lazy) -> Lazy | None:
    name = op.name
    rows = [i for i, y in enumerate(inputs) if y and y.kind == "row"]
    if name == "stop_gradient":
        raise Unfit(CUT)
    if name in REDUCED:
        return x._replace(kind="row", over=_over(op, inputs))
    if name in ("exp", "exp2"):
        return x._replace(kind="exp", base=math.log(2) if name == "exp2" else 1.0)
    if rows == [1] and name == "sub":
        shift = walk.origin(op.inputs[1])
        return x._replace(shifts=(*x.shifts, (shift.op, walk.at(shift)[x.product].over)))
    if rows:
        return None
    if x.shifts or x.joined:
        return x if name in SAME and (x.shifts or name not in MOVES) else None
    if name in ("concatenate", "pad"):
        return _with_sinks(walk, op, inputs, x)
    affine = name in SAME | {"neg", "add", "add_any", "sub", "mul", "select_n"}
    return x._replace(goal=number) if affine or (name == "div" and inputs[0]) else None


def _exponentials(walk: Walk, number: int, op: Op, inputs: list, x: Lazy) -> Lazy | None:
    if op.name == "reduce_sum":
        return x._replace(kind="sum", over=_over(op, inputs))
    same = _the_same(walk, number, op, inputs, x)
    return same or _masked(walk, number, op, inputs, x)


def _sum(walk: Walk, number: int, op: Op, inputs: list, x: Lazy) -> Lazy | None:
    """A sum, its reciprocal or its logarithm."""
    name, first = op.name, inputs[0]
    if name in SAME | {"abs"}:
        return x
    if x.kind == "sum" and name == "reduce_sum" and not x.sinks:
        return x._replace(over=x.over | _over(op, inputs))
    if x.kind == "log_sum" and name == "add":
        row = next(ref for y, ref in zip(inputs, op.inputs, strict=True) if y.kind == "row")
        rows = tuple(y for y in x.shifts if y[0] != walk.origin(row).op)
        return x._replace(shifts=rows) if len(rows) < len(x.shifts) else None
    if x.kind == "log_sum" and name == "sub" and first and first.kind == "scores":
        above = first._replace(base=x.base)
        return _divided(above, x, "log_weights")
    if x.kind in ("sum", "inverse") and name == ("div" if x.kind == "sum" else "mul"):
        above = [y for y in inputs if y and y.kind == "exp"]
        if above and (first is above[0] or name == "mul"):
            return _divided(above[0], x, "weights")
    if x.kind == "log_weights" and name == "exp":
        return x._replace(kind="weights")
    if x.kind != "sum":
        return None
    if name == "log":
        return x._replace(kind="log_sum")
    if (name == "integer_pow" and op.equation.params["y"] == -1) or (
        name == "div" and walk.number(op.inputs[0]) == 1
    ):
        return x._replace(kind="inverse")
    if name in ("add", "max"):
        other = 1 if first and first.kind == "sum" else 0
        value = walk.number(op.inputs[other])
        if value is not None and NEUTRAL[name](value):
            return x
        aval = op.equation.invars[other].aval
        sink = walk.sink(op.inputs[other], aval, x) if name == "add" else None
        return sink and x._replace(sinks=(*x.sinks, sink))
    return None


def _weights(walk: Walk, number: int, op: Op, inputs: list, x: Lazy) -> Lazy | None:
    if op.name in ("ne", "eq", "is_finite"):  # nan and infinity
        others = (walk.number(ref) for y, ref in zip(inputs, op.inputs, strict=True) if not y)
        special = all(value is not None and not math.isfinite(value) for value in others)
        return x._replace(kind="flags") if special else None
    same = _the_same(walk, number, op, inputs, x)
    if same or x.sinks:
        return same
    masked = _masked(walk, number, op, inputs, x)
    shifts = (*x.shifts, (None, x.over))  # by the logarithm of their sum
    return masked and masked._replace(kind="exp", shifts=shifts, over=frozenset(), again=op.name)


def _flags(walk: Walk, number: int, op: Op, inputs: list, x: Lazy) -> Lazy | None:
    """Numbers in the place of weights that are nan or infinite change no others."""
    weights = next((y for y in inputs if y and y.kind == "weights"), None)
    if op.name == "select_n" and weights:
        return weights._replace(axes=x.axes)
    return x if op.name in SAME | {"not"} else None


def _numerator(walk: Walk, number: int, op: Op, inputs: list, x: Lazy) -> Lazy | None:
    if op.name in MOVES | {"convert_element_type"}:
        return x._replace(tail=(*x.tail, number))
    if op.name == "slice":
        return _columns(number, op, x)
    above, below = inputs if len(inputs) == 2 else (None, None)
    if op.name == "mul" and below and below.kind == "numerator":
        above, below = below, above
    if above and below and (op.name, above.kind, below.kind) in QUOTIENTS:
        result = _divided(above, below, "output")
        return result and result._replace(tail=(*x.tail, number))
    return None


QUOTIENTS = {("div", "numerator", "sum"), ("mul", "numerator", "inverse")}


def _columns(number: int, op: Op, x: Lazy) -> Lazy | None:
    """Columns of a numerator: a sum of the exponentials where the values are 1."""
    cut = _cut(op)
    if len(cut) != 1 or x.ones is None:
        return None
    ((i, low, high), (j, start, stop)), axes = (*cut, x.ones), list(x.axes)
    if axes[i] != (("value", j),):
        return None
    if start <= low and high <= stop:
        axes[i] = ()
        return x._replace(kind="sum", axes=axes, output=-1, widths=(), ones=None, tail=())
    if low < stop and start < high:
        return None
    axes[i] = axes[i] if high - low != 1 else ()
    widths = dict(x.widths) | {("value", j): high - low}
    tail = (*x.tail, number)
    return x._replace(axes=axes, widths=tuple(widths.items()), ones=None, tail=tail)


def _divided(above: Lazy, below: Lazy, kind: str) -> Lazy | None:
    """Exponentials, or what is made of them, divided by their sum."""
    same = above.exponentials == below.exponentials
    fits = not above.sinks or above.sinks is below.sinks
    return above._replace(kind=kind, over=below.over, sinks=below.sinks) if same and fits else None


def _the_same(walk: Walk, number: int, op: Op, inputs: list, x: Lazy) -> Lazy | None:
    """Exponentials or weights that an operation leaves as they are."""
    name, others = op.name, [i for i, y in enumerate(inputs) if not y]
    if name == "stop_gradient":
        raise Unfit(CUT)
    if name in SAME:
        return x
    if name == "slice":
        return _without_sinks(op, x)
    if name == "select_n" and len(others) == 2 and walk.is_mask(number, 0, x, bool(inputs[2])):
        value = walk.number(op.inputs[others[1]])
        return x if value is not None and (abs(value) <= ROUNDING or value <= MASKED) else None
    if name == "mul" and len(others) == 1 and walk.is_mask(number, others[0], x, True):
        return x
    is_one = len(others) == 1 and name in NEUTRAL
    value = walk.number(op.inputs[others[0]]) if is_one else None
    return x if value is not None and NEUTRAL[name](value) else None


def _masked(walk: Walk, number: int, op: Op, inputs: list, x: Lazy) -> Lazy | None:
    """Exponentials times an array, or 0 where a mask is false."""
    others = [i for i, y in enumerate(inputs) if not y]
    is_chosen = op.name == "select_n" and len(others) == 2 and not inputs[0]
    is_mask = op.name == "mul" and len(others) == 1
    is_mask |= is_chosen and walk.number(op.inputs[others[1]]) == 0
    if not is_mask or x.joined or walk.is_random(op, inputs):
        return None
    when = bool(inputs[2]) if is_chosen else True
    mask = op.name, when, x.exponentials, walk.source(number, others[0], x.axes)
    return x._replace(masks=(*x.masks, walk.masks.setdefault(mask, number)))


def _with_sinks(walk: Walk, op: Op, inputs: list, x: Lazy) -> Lazy | None:
    """Scores that sinks are joined to, before or after the keys."""
    if op.name == "pad":
        config = op.equation.params["padding_config"]
        grown = [entry for entry in config if any(entry)]
        if len(grown) != 1 or grown[0][2] or min(grown[0]) < 0 or not inputs[0]:
            return None
        low, high, _ = grown[0]
        sinks = (Sink(op.inputs[1], op.equation.invars[1].aval, x.axes, True),) * (low + high)
    else:
        axis, at = op.equation.params["dimension"], next(i for i, y in enumerate(inputs) if y)
        avals = [y.aval for y in op.equation.invars]
        for i, ref in enumerate(op.inputs):
            scored = any(y.kind == "scores" for y in walk.at(ref).values())
            if i != at and scored and avals[i].shape[axis] > 1:
                raise Unfit("scores of several products are joined: join their keys and values")
        low, high = (sum(y.shape[axis] for y in z) for z in (avals[:at], avals[at + 1 :]))
        both = enumerate(zip(op.inputs, avals, strict=True))
        sinks = tuple(Sink(ref, aval, x.axes, True) for i, (ref, aval) in both if i != at)
    return x._replace(sinks=sinks, joined=(low, high))


def _without_sinks(op: Op, x: Lazy) -> Lazy | None:
    """Keys that are left where the sinks are cut off."""
    cut, shape = _cut(op), op.equation.invars[0].aval.shape
    left = [(low, shape[i] - high) for i, low, high in cut]
    return x._replace(joined=None) if left == [x.joined] else None


def _cut(op: Op) -> list[tuple[int, int, int]]:
    """Axes of which a slice leaves a range, with the range."""
    shape, given = op.equation.invars[0].aval.shape, op.equation.params
    if any(step != 1 for step in given["strides"] or ()):
        return []
    edges = enumerate(zip(given["start_indices"], given["limit_indices"], shape, strict=True))
    return [(i, low, high) for i, (low, high, n) in edges if low or high != n]


def _over(op: Op, inputs: list) -> frozenset:
    """Atoms that an operation reduces."""
    return frozenset(a for i in op.equation.params["axes"] for a in inputs[0].axes[i])


RULES: dict[str, Callable] = {
    "row": _row,
    "scores": _scores,
    "exp": _exponentials,
    "sum": _sum,
    "inverse": _sum,
    "log_sum": _sum,
    "log_weights": _sum,
    "weights": _weights,
    "flags": _flags,
    "numerator": _numerator,
}
KINDS = [*RULES, "output"]
"""Kinds of values; where several meet, the rule of the last one applies."""
