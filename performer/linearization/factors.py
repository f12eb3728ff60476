"""Scale, mask and bias of a place as factors, which are read in linear time.

Between q k^T and the softmax stand scores * scale, scores + bias and where(mask, scores, -inf). An
array in them has a number for each pair. Mostly it is made of one array along the queries and one
along the keys: valid_i valid_j, segment_i = segment_j, slope |i - j|. A tree is the operations that
make it, down to arrays before they are broadcast. From its trees a place is read as

    scale_i scale_j q_i.k_j + bias,   bias = -slope |i - j| + a number of i + a number of j

with keys that exist, segments and causality (`performer.linearization.reading`). An argument with a
number for each pair is read for all pairs; what is computed for each pair otherwise is a reason to
stay exact.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from performer.linearization.layout import Axis, Layout, Unfit
from performer.linearization.program import MASKED, Constants, Op, Place, Program, Ref
from performer.typing import Size

SAME = {"copy", "name", "optimization_barrier", "reduce_precision", "sharding_constraint"}
UNARY = {"abs", "exp", "log", "log1p", "neg", "not", "sign", "square", "stop_gradient"}
COMPARED = {"eq", "ne", "lt", "le", "gt", "ge"}
ELEMENTWISE = SAME | UNARY | COMPARED
ELEMENTWISE |= {"add", "add_any", "and", "convert_element_type", "div", "integer_pow", "max", "min"}
ELEMENTWISE |= {"mul", "or", "pow", "select_n", "sub", "xor", "is_finite", "sqrt", "rsqrt", "rem"}
ELEMENTWISE |= {"floor", "round", "clamp", "logistic", "tanh"}


class Leaf(NamedTuple):
    """An array that a tree begins with."""

    ref: Ref
    dims: tuple[int, ...]
    """Axis of the result that each of its axes becomes, -1 for none."""
    shape: tuple[Size, ...]
    """With the axes of the result, 1 where it has none."""
    varies: bool
    """True if it depends on the arguments."""
    name: str
    """Name of the operation that computes it, "" for an argument or a constant."""
    dtype: Any


class Node(NamedTuple):
    """An operation, entry by entry."""

    op: Op
    inputs: tuple["Tree", ...]
    shape: tuple[Size, ...]
    varies: bool

    @property
    def name(self) -> str:
        """Name of its primitive."""
        return self.op.name

    @property
    def dtype(self) -> Any:
        """Dtype of its result."""
        return self.op.equation.outvars[0].aval.dtype


Tree = Leaf | Node


class Step(NamedTuple):
    """An operation on scores or exponentials."""

    op: Op
    axes: list[Axis]
    """Axes of its result."""
    inputs: tuple[Tree | None, ...]
    """None stands for the scores or exponentials."""

    @property
    def name(self) -> str:
        """Name of its primitive."""
        return self.op.name


def steps(
    program: Program,
    inside: set[int],
    chain: Sequence[int],
    axes: dict[int, list[Axis]],
    varying: set[int],
) -> tuple[Step, ...]:
    """Operations of a place, with trees of the arrays that enter them from outside of it."""
    result = []
    for number in chain:
        op = program.ops[number]
        shape = op.equation.outvars[0].aval.shape
        trees = tuple(
            None if ref.op in inside else _tree(program, ref, x.aval, _dims(x.aval), shape, varying)
            for ref, x in zip(op.inputs, op.equation.invars, strict=True)
        )
        if len(trees) > 1 or op.name == "neg":
            result.append(Step(op, axes[number], trees))
    return tuple(result)


def sink(program: Program, given: Any, varying: set[int]) -> "SinkPart":
    """A sink, before it is broadcast."""
    dims, shape = _dims(given.aval), (1,) * len(given.axes)
    tree = _tree(program, given.ref, given.aval, dims, shape, varying)
    return SinkPart(Part(tree, given.axes), given.is_log)


def leaves(tree: Tree | None) -> Iterator[Leaf]:
    """The arrays that a tree begins with."""
    if isinstance(tree, Leaf):
        yield tree
    elif tree is not None:
        for each in tree.inputs:
            yield from leaves(each)


def _dims(aval: Any) -> tuple[int, ...]:
    return tuple(range(aval.ndim))


def _tree(
    program: Program,
    ref: Ref,
    aval: Any,
    dims: tuple[int, ...],
    whole: tuple[Size, ...],
    varying: set[int],
) -> Tree:
    """The tree of a value whose axes are these axes of a result of shape `whole`."""
    op = None if ref.op is None else program.ops[ref.op]
    if op is not None:
        outer = op.equation.params
        if op.name == "pvary":  # it cannot run outside a shard_map
            return _tree(program, op.inputs[0], aval, dims, whole, varying)
        if op.name == "iota" and isinstance(outer["shape"][outer["dimension"]], int):
            numbers = np.arange(outer["shape"][outer["dimension"]], dtype=outer["dtype"])
            aval, dims = jax.typeof(numbers), (dims[outer["dimension"]],)
            return _leaf(Ref(value=numbers), aval, dims, whole, varying, "")
        inner = before_move(op, dims)
        if inner is not None:
            given = op.equation.invars[0].aval
            return _tree(program, op.inputs[0], given, inner, whole, varying)
        avals = [x.aval for x in op.equation.invars]
        aligned = all(x.ndim in (0, aval.ndim) for x in avals)
        if op.name in ELEMENTWISE and op.inputs and aligned:
            inputs = tuple(
                _tree(program, x, y, dims if y.ndim else (), whole, varying)
                for x, y in zip(op.inputs, avals, strict=True)
            )
            shape = tuple(_longest(x) for x in zip(*(y.shape for y in inputs), strict=True))
            return Node(op, inputs, shape, any(x.varies for x in inputs))
    return _leaf(ref, aval, dims, whole, varying, "" if op is None else op.name)


def _leaf(
    ref: Ref, aval: Any, dims: tuple[int, ...], whole: Any, varying: set[int], name: str
) -> Leaf:
    shape: list[Size] = [1] * len(whole)
    for axis, length in zip(dims, aval.shape, strict=True):
        if axis >= 0:
            shape[axis] = length
    varies = ref.input is not None or ref.op in varying or isinstance(ref.value, Tracer)
    return Leaf(ref, dims, tuple(shape), varies, name, aval.dtype)


def _longest(lengths: Sequence[Size]) -> Size:
    return next((n for n in lengths if not _is_one(n)), 1)


def _is_one(length: Size) -> bool:
    return isinstance(length, int) and length == 1


def before_move(op: Op, dims: tuple[int, ...]) -> tuple[int, ...] | None:
    """Axes of the input of an operation that moves axes, None for others."""
    parameters, given = op.equation.params, op.equation.invars[0].aval if op.inputs else None
    if op.name == "broadcast_in_dim" and len(op.inputs) == 1:
        return tuple(dims[i] for i in parameters["broadcast_dimensions"])
    if op.name == "transpose":
        inner = [-1] * len(dims)
        for i, j in enumerate(parameters["permutation"]):
            inner[j] = dims[i]
        return tuple(inner)
    if op.name == "tile" and given is not None:
        whole = op.equation.outvars[0].aval.shape
        kept = zip(given.shape, whole, strict=True)
        return dims if all(_is_one(n) or n == repeated for n, repeated in kept) else None
    if op.name not in ("squeeze", "expand_dims", "reshape") or given is None:
        return None
    whole = op.equation.outvars[0].aval.shape
    kept = [i for i, n in enumerate(given.shape) if not _is_one(n)]
    onto = [dims[i] for i, n in enumerate(whole) if not _is_one(n)]
    if [given.shape[i] for i in kept] != [n for n in whole if not _is_one(n)]:
        return None  # it splits or joins axes
    inner = [-1] * given.ndim
    for i, axis in zip(kept, onto, strict=True):
        inner[i] = axis
    return tuple(inner)


Index = Callable[[Array], Array]


def evaluate(tree: Tree, read: Callable[[Ref], Any], index: Index = lambda x: x) -> Array:
    """Compute a tree, its arrays broadcast as far as they meet; `index` takes part of each."""
    if isinstance(tree, Leaf):
        x = jnp.asarray(read(tree.ref))
        kept = [i for i, axis in enumerate(tree.dims) if axis >= 0]
        x = x.reshape([x.shape[i] for i in kept])
        order = np.argsort([tree.dims[i] for i in kept]).tolist()
        return index(jnp.transpose(x, order).reshape(tree.shape))
    inputs = [evaluate(x, read, index) for x in tree.inputs]
    shape = tuple(_longest(x) for x in zip(*(y.shape for y in inputs), strict=True))
    return _bound(tree.op, [jnp.broadcast_to(x, shape) for x in inputs])


def _bound(op: Op, inputs: Sequence[Any]) -> Array:
    primitive = op.equation.primitive
    with op.equation.ctx.manager:
        output = primitive.bind(*inputs, **primitive.get_bind_params(op.equation.params))
    return output[0] if primitive.multiple_results else output


# Trees of a place as factors


class Part(NamedTuple):
    """A tree, and the axes of its result."""

    tree: Tree
    axes: list[Axis]

    def along(self, atoms: Sequence[tuple]) -> bool:
        """True if it differs along one of these axes of the scores."""
        lengths = zip(self.tree.shape, self.axes, strict=True)
        return any(not _is_one(n) and not {*atoms}.isdisjoint(axis) for n, axis in lengths)

    def of(self, *trees: Tree) -> "list[Part]":
        """Trees with the same axes."""
        return [Part(tree, self.axes) for tree in trees]

    @property
    def is_number(self) -> bool:
        """True for one number that is written in the code."""
        return not self.tree.varies and all(map(_is_one, self.tree.shape))


class SinkPart(NamedTuple):
    """A logit of no key, or its exponential."""

    part: Part
    is_log: bool


class Mask(NamedTuple):
    """Pairs that see each other where a part is true (not 0), or false."""

    part: Part
    when: bool


class Pairing(NamedTuple):
    """A comparison of an array along the queries with one along the keys."""

    name: str
    """eq, or ge: queries see the keys that are not larger."""
    queries: Part
    keys: Part


class Term(NamedTuple):
    """A number added to the scores: the product of a part and of factors."""

    part: Part
    factors: tuple["Factor", ...]

    @property
    def varies(self) -> bool:
        """True if arguments have a part in its factors."""
        return any(part.tree.varies for _, part in self.factors if part is not None)


Factor = tuple[str, Part | None]
"""mul or div by a part; neg and log, by none."""
NEG: Factor = ("neg", None)
LOG: Factor = ("log", None)


@dataclass
class Factors:
    """Scales, masks and biases of the steps of a place, sorted by the axes that they have."""

    program: Program
    layout: Layout
    scales: list[Factor] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)
    pairings: list[Pairing] = field(default_factory=list)
    constants: list[Term] = field(default_factory=list)
    keys: list[Term] = field(default_factory=list)
    """Terms that depend on the key alone."""
    given: list[Term] = field(default_factory=list)
    """Arguments with a number for each pair."""
    units: list[Part] = field(default_factory=list)
    """Arrays that must be 0 or 1."""
    zeros: list[Part] = field(default_factory=list)
    """Factors 0 and 1 over pairs, written in the code: pairs with 0 must be masked also (GPT-2)."""
    positive: list[Part] = field(default_factory=list)
    """Scales of scores that are masked already."""

    @classmethod
    def of(cls, program: Program, place: Place) -> "Factors":
        """Sort the steps of a place.

        Raises:
            Unfit: for those that linear time does not suffice for.
        """
        factors = cls(program, place.layout)
        for step in place.steps:
            factors._take(step)
        if place.base != 1:
            number = Ref(value=np.float32(place.base))
            leaf = Leaf(number, (), (), False, "", np.dtype(np.float32))
            factors._scale("mul", Part(leaf, []))
        for step in place.masks:
            factors._multiply(step)
        return factors

    def _take(self, step: Step) -> None:
        others = [Part(x, step.axes) for x in step.inputs if x is not None]
        if step.name == "neg" or (step.name == "sub" and step.inputs[1] is None):
            self._scale(*NEG)
        if step.name in ("mul", "div"):
            if len(others) != 1 or (step.name == "div" and step.inputs[0] is not None):
                raise Unfit("its scores are multiplied by themselves, or divide a number")
            self._scale(step.name, others[0])
        elif step.name in ("add", "add_any", "sub"):
            if len(others) != 1:
                raise Unfit("its scores are added to themselves")
            negative = step.name == "sub" and step.inputs[0] is None
            self._add(others[0], (NEG,) * negative)
        elif step.name == "select_n":
            self._select(step, others)

    def _multiply(self, step: Step) -> None:
        """Exponentials that are set to 0, or multiplied by an array."""
        if step.name == "select_n":
            condition, when = step.inputs[0], step.inputs[2] is None
            assert condition is not None
            self._require(Part(condition, step.axes), when)
            return
        (tree,) = (x for x in step.inputs if x is not None)
        self._weigh(Part(tree, step.axes))

    def _weigh(self, part: Part) -> None:
        """Exponentials times an array."""
        if not part.along(self.layout.keys):
            return  # the same factor for all keys of a query is divided out
        if not part.along(self.layout.time):
            (self.keys if part.tree.varies else self.constants).append(Term(part, (LOG,)))
            return
        if isinstance(part.tree, Node) and part.tree.name == "mul":
            for each in part.of(*part.tree.inputs):
                self._weigh(each)
            return
        two, units = self._two_valued(part), self._units(part)
        if units is None and isinstance(part.tree, Leaf) and part.tree.varies:
            units = [part]  # an argument with a number for each pair
        if two is not None and two[0] is not part and {*map(float, two[1:])} == {0, 1}:
            self._require(two[0], bool(two[1] == 1))
        elif units is not None:
            self.units += units
            self._require(part, True)
        else:
            raise Unfit(
                "its exponentials are multiplied by a number for each pair of a query and a key"
                " that is not 0 or 1" + f", by {part.tree.name}" * bool(part.tree.name)
            )

    def _scale(self, name: str, part: Part | None) -> None:
        """Scores times a number: also what was added to them before."""
        if part is not None and self.over_pairs(part) and part.tree.name == "mul":
            assert isinstance(part.tree, Node)
            for each in part.of(*part.tree.inputs):  # as the norms of queries and keys
                self._scale(name, each)
            return
        if part is not None and self.over_pairs(part):
            if name != "mul" or part.tree.varies or not np.isin(self.constant(part), (0, 1)).all():
                raise Unfit("its scale differs between pairs of a query and a key")
            self.zeros.append(part)
            return
        entry: Factor = (name, part)
        if part is not None and self.masks and part.tree.varies:
            self.positive.append(part)
        self.scales.append(entry)
        for terms in (self.constants, self.keys, self.given):
            terms[:] = [x._replace(factors=(*x.factors, entry)) for x in terms]

    def _select(self, step: Step, others: list[Part]) -> None:
        if len(others) != 2 or step.inputs[0] is None:
            raise Unfit("its scores are chosen from two of their own values")
        condition, fill = others
        if not self._is_masked(fill):
            raise Unfit("a bias that is no mask: scores are replaced by a number above -9000")
        self._require(condition, step.inputs[2] is None)

    @property
    def of_keys(self) -> list[Term]:
        """Terms that are a number of each key, from arguments or written in the code."""
        written = [x for x in self.constants if not x.part.along(self.layout.time)]
        return [*self.keys, *written]

    def over_pairs(self, part: Part) -> bool:
        """True if it has a number for each pair of a query and a key."""
        return part.along(self.layout.time) and part.along(self.layout.keys)

    def _is_masked(self, part: Part) -> bool:
        return not part.tree.varies and bool(np.all(self.constant(part) <= MASKED))

    def constant(self, part: Part, index: Index = lambda x: x) -> np.ndarray:
        """The value of a part that is written in the code, with the axes of the part."""
        with jax.ensure_compile_time_eval(), jax.disable_jit(False):
            return np.asarray(evaluate(part.tree, Constants(self.program).read, index))

    def _require(self, part: Part, when: bool) -> None:
        """Pairs see each other only where the part is true, or false."""
        tree, name = part.tree, part.tree.name
        if not self.over_pairs(part) or isinstance(tree, Leaf):
            self._readable(part)
            self.masks.append(Mask(part, when))
            return
        inputs = part.of(*tree.inputs)
        if name == "not" and tree.dtype == bool:
            self._require(inputs[0], not when)
        elif name in SAME or (name == "convert_element_type" and _keeps_zero(tree)):
            self._require(inputs[0], when)
        elif (tree.dtype == bool and name == ("and" if when else "or")) or (when and name == "mul"):
            for each in inputs:
                self._require(each, when)
        elif not tree.varies:
            self.masks.append(Mask(part, when))
        elif name in COMPARED and not any(map(self.over_pairs, inputs)):
            self._compare(name, inputs, when)
        else:
            self._decide(part, when)

    def _readable(self, part: Part) -> None:
        """Raise Unfit for an array over pairs that is computed from the arguments."""
        if part.tree.varies and part.tree.name and self.over_pairs(part):
            raise Unfit(
                "its mask or bias is computed for all pairs of a query and a key, by"
                f" {part.tree.name}: linear time does not suffice to read it"
            )

    def _compare(self, name: str, inputs: list[Part], when: bool) -> None:
        """Segments that are equal, or positions in order."""
        inverse = {"eq": "ne", "ne": "eq", "ge": "lt", "lt": "ge", "gt": "le", "le": "gt"}
        name, (left, right) = name if when else inverse[name], inputs
        if left.along(self.layout.keys):
            flipped = {"ge": "le", "le": "ge", "gt": "lt", "lt": "gt"}
            name, left, right = flipped.get(name, name), right, left
        if name not in ("eq", "ge"):
            raise Unfit(f"its mask compares queries and keys by {name}")
        self.pairings.append(Pairing(name, left, right))

    def _decide(self, part: Part, when: bool) -> None:
        """Require one of the two values of a part."""
        two = self._two_valued(part)
        if two is None or two[0] is part:
            raise Unfit(
                "its mask is no product of one of the queries and one of the keys, by"
                f" {part.tree.name}: linear time does not suffice to read it"
            )
        core, on, off = two
        if bool(on) == bool(off):
            raise Unfit("its mask does not depend on what it is made of")
        self._require(core, bool(on) == when)

    def _two_valued(self, part: Part) -> tuple[Part, Any, Any] | None:
        """A part over pairs that is `on` where another one is not 0, and `off` elsewhere."""
        tree = part.tree
        if tree.dtype == bool and not (isinstance(tree, Node) and self._of_numbers(tree, part)):
            return part, np.bool_(True), np.bool_(False)
        if isinstance(tree, Leaf):
            return None
        inputs = part.of(*tree.inputs)
        if tree.name == "select_n" and all(x.is_number for x in inputs[1:]):
            off, on = (self.constant(x).reshape(()) for x in inputs[1:])
            return inputs[0], on, off
        if tree.name == "mul" and not any(x.is_number for x in inputs):
            units = [self._units(x) for x in inputs]
            if any(x is None for x in units):
                return None
            self.units += [x for each in units for x in each or ()]
            return part, np.ones((), tree.dtype), np.zeros((), tree.dtype)
        cores = [i for i, x in enumerate(inputs) if not x.is_number]
        inner = self._two_valued(inputs[cores[0]]) if len(cores) == 1 else None
        if inner is None:
            return None
        with jax.ensure_compile_time_eval():
            numbers = [None if i in cores else self.constant(x) for i, x in enumerate(inputs)]
            on, off = (
                np.asarray(
                    _bound(
                        tree.op, [jnp.asarray(x if y is None else y.reshape(())) for y in numbers]
                    )
                )
                for x in inner[1:]
            )
        return inner[0], on, off

    def _of_numbers(self, tree: Node, part: Part) -> bool:
        """True for a comparison of an array over pairs with a number."""
        return tree.name in COMPARED and any(map(self.over_pairs, part.of(*tree.inputs)))

    def _units(self, part: Part) -> list[Part] | None:
        """Parts of an array of 0 and 1, for a check; None if it may have other numbers."""
        tree = part.tree
        if tree.dtype == bool:
            return []
        if not tree.varies:
            return [] if np.isin(self.constant(part), (0, 1)).all() else None
        if not self.over_pairs(part):
            return [part] if self._is_along(part) else None
        if isinstance(tree, Leaf) or tree.name not in ("mul", "convert_element_type"):
            return None
        inner = [self._units(x) for x in part.of(*tree.inputs)]
        return None if None in inner else [x for each in inner for x in each or ()]

    def _add(self, part: Part, factors: tuple[Factor, ...]) -> None:
        """A number added to the scores."""
        tree, name = part.tree, part.tree.name
        if not part.along(self.layout.keys):
            return  # the same number for all keys of a query has no effect
        if not tree.varies:
            self.constants.append(Term(part, factors))
            return
        inputs = part.of(*tree.inputs) if isinstance(tree, Node) else []
        numbers = [x for x in inputs if not self._is_along(x)]
        rest = [x for x in inputs if self._is_along(x)]
        is_product = name == "mul" or (name == "div" and not self._is_along(inputs[1]))
        if not part.along(self.layout.time):
            if is_product and len(rest) == 1 and not rest[0].tree.varies:
                self.constants.append(Term(rest[0], (*factors, (name, numbers[0]))))
            else:
                self.keys.append(Term(part, factors))
            return
        two = self._two_valued(part)
        if two is not None and not factors:
            core, on, off = two
            if (on <= MASKED) == (off <= MASKED):
                raise Unfit("a bias that is no mask: it has two numbers above -9000")
            self._require(core, bool(off <= MASKED))
        elif isinstance(tree, Leaf):
            self._readable(part)
            self.given.append(Term(part, factors))
        elif is_product and len(rest) == 1:
            self._add(rest[0], (*factors, (name, numbers[0])))
        elif name in ("add", "add_any", "sub"):
            self._add(inputs[0], factors)
            self._add(inputs[1], (*factors, NEG) if name == "sub" else factors)
        elif name == "neg":
            self._add(inputs[0], (*factors, NEG))
        elif name in SAME | {"convert_element_type", "stop_gradient"}:
            self._add(inputs[0], factors)
        elif name == "select_n" and any(map(self._is_masked, inputs[1:])):
            last = not self._is_masked(inputs[2])
            self._require(inputs[0], last)
            self._add(inputs[1 + last], factors)
        else:
            raise Unfit(
                f"a bias that is no mask, computed for all pairs of a query and a key by {name}"
            )

    def _is_along(self, part: Part) -> bool:
        return part.along(self.layout.time) or part.along(self.layout.keys)


def _keeps_zero(tree: Node) -> bool:
    """True for a conversion of a mask: not of fractions, or large numbers, to integers."""
    return tree.inputs[0].dtype == bool or not jnp.issubdtype(tree.dtype, jnp.integer)
