"""Search for softmax attention in a traced program.

A place is a subgraph that computes

    scores = q k^T;   weights = softmax(scale scores + bias);   output = weights v

Every product of two arrays is a candidate for weights v. Backwards from it lie an exponential and
the product q k^T. The axes of q k^T are followed by name through the operations that keep or move
them, up to the product that sums over the keys. Scale, mask and bias are read from the operations
between product and exponential (`performer.linearization.factors`).
Numbers decide whether the place is softmax attention indeed (`performer.linearization.measure`):
softmax of what was read must be the output.
"""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.interpreters import partial_eval

from performer.linearization import factors
from performer.linearization.layout import MOVES, Axis, Layout, Unfit, atoms_of, moved
from performer.linearization.program import (
    MASKED,
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
from performer.typing import Size

BODIES = {"scan", "remat2", "checkpoint"}
"""Operations whose bodies are programs of their own: layers in a scan, and under a checkpoint."""
KERNELS = ("flash", "attention", "attn", "mha", "fmha")
"""Names of kernels that compute all of attention in one operation."""
NAMES = ("name", "name_and_src_info", "target_name")
"""Parameters of operations that name a kernel."""
OPAQUE = {"ffi_call", "custom_call", "pure_callback", "io_callback", "pallas_call"}
NOT_READ = "exponentials between two products that are not read as attention"
READ_ELSEWHERE = (
    "its scores or weights are read elsewhere, as by an output, a second product, the logarithm of"
    " their sum, or a derivative: linearize first, then differentiate"
)
SEVERAL = "its keys, or entries of queries and keys, have more than one axis: reshape them to one"
SUMS_HEADS = "its product with the values sums over heads also: sum over heads after it"
SUM = "its scores are a sum of several products: if all are of queries and keys, concatenate these"
TABLE = (
    "its keys or values are an argument or a constant that all examples share, as the table of a"
    " vocabulary or of bins: parameters are no tokens (tokens of one example need an axis of"
    " examples)"
)
LOOP = "in a loop over queries: compute the attention of all queries at once"
COMPARISONS = {"lt", "le", "gt", "ge", "sort", "top_k"}
ROUNDING = 1e-6
"""Largest number that may be added to the weights or their sum, such as against 0 / 0."""
NEUTRAL = {
    "mul": lambda x: x == 1,
    "div": lambda x: x == 1,
    "add": lambda x: abs(x) <= ROUNDING,
    "sub": lambda x: abs(x) <= ROUNDING,
    "max": lambda x: x <= ROUNDING,
    "min": lambda x: x >= 1,
    **dict.fromkeys(("pow", "clamp", "custom_jvp_call"), lambda x: False),
}
"""Operation of weights and a number -> is it still softmax? It is for other operations."""
SAME_NUMBER = {*MOVES, "convert_element_type", "pvary"}
"""Operations on a constant that leave its number as it is; pvary cannot run outside a shard_map."""
AFFINE = {
    *("add", "add_any", "convert_element_type", "copy", "div", "mul", "name", "neg"),
    *("optimization_barrier", "reduce_precision", "select_n", "sharding_constraint", "sub"),
    *MOVES,
}
"""Operations from q.k to scale q.k + bias, whatever scale and bias are."""


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
    for number, op in enumerate(program.ops):
        _look_inside(program, op)
        if op.name == "dot_general":
            _add_place(program, number)
    return program


def _look_inside(program: Program, op: Op) -> None:
    """Find places in the body of an operation, and attention that cannot be reached."""
    equation, line = op.equation, line_of(op.equation)
    called = "".join(str(equation.params.get(x, "")) for x in NAMES)
    if "call_jaxpr" in equation.params:  # a function with a derivative of its own
        called += str(getattr(equation.params["call_jaxpr"].jaxpr.debug_info, "func_name", ""))
    around = op.scope.split("/")[::-1] if op.name in OPAQUE else []
    names = (called, op.name, *around)
    kernel = [x for x in names if any(word in x.lower() for word in KERNELS)]
    scanned = scan_counts(equation) if op.name == "scan" else None
    known = _known(program, op, scanned)
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


def _known(program: Program, op: Op, scanned: tuple[int, int] | None) -> dict[int, Ref]:
    """Inputs of a body that are constants, such as a causal mask: they are known in it also."""
    if op.name not in BODIES:
        return {}
    fixed = scanned[0] if scanned is not None else len(op.inputs)
    varying, known = _varying(program), {}
    for i, ref in enumerate(op.inputs[:fixed]):
        small = math.prod(op.equation.invars[i].aval.shape) <= LARGEST
        if _varies(ref, varying) or isinstance(ref.value, Tracer) or not small:
            continue
        try:
            with jax.ensure_compile_time_eval():
                known[i] = Ref(value=Constants(program).read(ref))
        except Traced:
            continue
    return known


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
    # A heap of negative numbers: the latest operation comes first.
    heap, visited = ([] if ref.op is None else [-ref.op]), set()
    while heap:
        number = -heapq.heappop(heap)
        op = program.ops[number]
        if op.name in names:
            return number
        if number in visited or op.name == "dot_general" or op.body is not None:
            continue
        visited.add(number)
        for each in op.inputs:
            if each.op is not None:
                heapq.heappush(heap, -each.op)
    return None


def _place(
    program: Program, scores: int, exponential: int, output: int, number: int, line: str
) -> Place | None:
    """The place of these operations, None if it is no attention at all.

    Raises:
        Unfit: if it looks like attention, and is written in a way that is not read.
    """
    ops, axes = program.ops, _followed(program, scores, output)
    weights = ops[output].inputs[number]
    if weights.op not in axes or exponential not in axes:
        if _is_softmax(program, scores, exponential, output, weights):
            raise Unfit(NOT_READ)
        return None
    inside = [scores, *(i for i in range(scores, output + 1) if i in axes), output]
    words = tuple(
        ops[i].name for i in inside if ops[i].name not in {*MOVES, "convert_element_type"}
    )
    product = ops[output].equation
    (contracted, _), _ = ops[scores].equation.params["dimension_numbers"]
    summed = product.params["dimension_numbers"][0][number]
    attention = {scores, *_between(program, scores, Ref(output))}
    if [product.invars[number].aval.shape[i] for i in summed] == [1]:
        program.attention |= attention
        program.single[output] = words
        return None
    keys = [axes[weights.op][i] for i in summed]
    path = _between(program, scores, weights)
    if max(len(contracted), len(summed), *map(len, keys)) > 1 and all(keys):
        whole = {atom for axis in keys for atom in axis}
        sums = [_reduced(program, axes, i) for i in path if ops[i].name == "reduce_sum"]
        if whole in sums:
            raise Unfit(SEVERAL)
        has_batch = product.params["dimension_numbers"][1][0]  # a projection of heads has none
        if len(summed) > 1 and has_batch and any(over and over < whole for over in sums):
            raise Unfit(SUMS_HEADS)
    goal = _unshifted(program, exponential, axes)
    chain = _between(program, scores, goal)
    is_sum = _is_softmax(program, scores, exponential, output, weights)
    is_sum = is_sum and _adds_product(program, {scores, *chain})
    try:
        layout = Layout.of(ops[scores].equation, product, number, axes[weights.op])
    except Unfit as reason:
        raise Unfit(SUM if is_sum else str(reason)) from None
    if layout is None and is_sum:
        raise Unfit(SUM)
    if layout is None:
        softmax = _is_softmax(program, scores, exponential, output, weights)
        if program.scanned is not None and softmax:
            raise Unfit(LOOP)
        mixed = [x for i in summed for x in axes[weights.op][i] if x[0] == "batch"]
        if mixed and _is_softmax(program, scores, exponential, output, weights):
            raise Unfit(NOT_READ)
        return None
    moves, tail = _late_division(program, axes, scores, exponential, output, layout.keys)
    if _is_read_elsewhere(program, scores, output, weights, tail):
        raise Unfit(READ_ELSEWHERE)
    if goal.op not in axes or (not chain and goal.op != scores):
        raise Unfit("its scores do not come from one product of queries and keys")
    layout.goal = axes[goal.op]
    whole = {atom for atom, n in layout.sizes.items() if n != 1}
    for when, known in (("before", layout.goal), ("after", axes[weights.op])):
        if {atom for axis in known for atom in axis} != whole:
            raise Unfit(f"axes of the scores are lost {when} the softmax, as by a mean over heads")
    dtype = ops[scores].equation.outvars[0].aval.dtype
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise Unfit("its scores are complex: make real and imaginary parts entries of one axis")
    if not jnp.issubdtype(dtype, jnp.floating):
        raise Unfit("its scores are integers, of quantized queries and keys")
    if any(_reduced(program, axes, i) for i in chain):
        raise Unfit("its scores are changed after their largest was subtracted, or normalized")
    layout.name_heads()
    if _is_loop(program, scores, layout):
        raise Unfit(LOOP)
    varying = _varying(program)
    scope = ops[scores].scope
    if _is_table(program, scores, output, layout, varying):
        raise Unfit(TABLE)
    _require_softmax(program, scores, exponential, chain, weights, varying)
    _require_keys(program, axes, [i for i in path if i not in chain], layout.keys)
    for i in chain:
        if ops[i].name not in AFFINE:
            name = ops[i].name
            raise Unfit(f"its scores are changed by {name}: they are not scale q.k + bias")
    steps = factors.steps(program, scores, chain, axes, varying)
    leaves = (x for step in steps for tree in step.inputs for x in factors.leaves(tree))
    sources = tuple(x.ref for x in leaves if x.varies)
    layout.take_time([factors.Part(x, y.axes) for y in steps for x in y.inputs if x is not None])
    program.attention |= attention
    operands = (x.aval for i in (scores, output) for x in ops[i].equation.invars)
    results = (ops[i].equation.outvars[0].aval for i in attention)
    both = (x.dtype for x in (*operands, *results))
    dtypes = frozenset(x.name for x in both if jnp.issubdtype(x, jnp.floating))
    words += tuple(ops[i].name for i in tail if ops[i].name not in {*MOVES, "convert_element_type"})
    base = math.log(2) if ops[exponential].name == "exp2" else 1.0
    place = Place(
        scores, output, goal, chain, path, layout, line, scope, words, steps, base, moves, tail,
        sources, dtypes,
    )  # fmt: skip
    factors.Factors.of(program, place)  # Unfit if it cannot be read in linear time
    return place


def _followed(program: Program, scores: int, output: int) -> dict[int, list[Axis]]:
    """Axes of each operation that comes from the scores, where they can be followed."""
    sizes = atoms_of(program.ops[scores].equation)
    axes = {scores: [(atom,) if n != 1 else () for atom, n in sizes.items()]}
    for number in range(scores + 1, output):
        op = program.ops[number]
        known = [None if ref.op is None else axes.get(ref.op) for ref in op.inputs]
        if any(known) and op.body is None:
            result = moved(op.equation, known, sizes)
            if result is not None:
                axes[number] = result
    return axes


def _unshifted(program: Program, exponential: int, axes: dict[int, list[Axis]]) -> Ref:
    """The scores before their largest, or the logarithm of their sum, was subtracted."""
    goal = program.ops[exponential].inputs[0]
    while goal.op is not None and program.ops[goal.op].name == "sub":
        whole, part = program.ops[goal.op].inputs
        if part.op not in axes:
            break
        goal = whole
    return goal


def _require_softmax(
    program: Program,
    scores: int,
    exponential: int,
    chain: list[int],
    weights: Ref,
    varying: set[int],
) -> None:
    """Raise Unfit for weights that are softmax of the scores for some inputs or lengths alone."""
    ops, path = program.ops, _between(program, scores, weights)
    masks = [ops[i].inputs[0] for i in chain if ops[i].name == "select_n"]
    for i in path:
        name, inputs = ops[i].name, ops[i].inputs
        if name in COMPARISONS:
            raise Unfit("its weights depend on which scores are large, as in top-k attention")
        if name == "stop_gradient" and (i in chain or i > exponential):
            raise Unfit("its derivative is cut by stop_gradient")
        if i in chain:
            continue
        # jax.nn.softmax(scores, where=mask) has the mask of the scores once more
        masks_again = name == "select_n" and any(_is_same(program, inputs[0], x) for x in masks)
        neutral = _is_masked if masks_again else NEUTRAL.get(name, lambda x: True)
        for number, ref in enumerate(inputs):
            if ref.op in (scores, *path) or (masks_again and number == 0):
                continue
            value = _number(program, ref, varying)
            if value is None or not neutral(value):
                others = (x for j in path for x in ops[j].inputs if x.op not in path)
                random = any(_is_random(program, x) for x in others)
                how = "as by dropout" if random else f"by {name}"
                raise Unfit(f"its weights are changed after the softmax, {how}")


def _is_random(program: Program, ref: Ref) -> bool:
    """True for what depends on random numbers."""
    left, visited = [ref.op], set()
    while left:
        number = left.pop()
        if number is None or number in visited:
            continue
        visited.add(number)
        if program.ops[number].name.startswith(("random_", "threefry")):
            return True
        left += [x.op for x in program.ops[number].inputs]
    return False


def _is_masked(number: float) -> bool:
    """True for the score or the weight of a masked pair."""
    return abs(number) <= ROUNDING or number <= MASKED


def _require_keys(
    program: Program, axes: dict[int, list[Axis]], path: Sequence[int], keys: tuple
) -> None:
    """Raise Unfit for exponentials whose sum, or the shift before it, is not over the keys."""
    for i in path:
        name, over = program.ops[i].name, _reduced(program, axes, i)
        if over is not None and (over != {keys} if name == "reduce_sum" else keys not in over):
            raise Unfit("its exponentials are not divided by their sum over the keys")


def _reduced(program: Program, axes: dict[int, list[Axis]], number: int) -> set | None:
    """Atoms that a sum or a maximum is over; None for other operations and unknown axes."""
    op = program.ops[number]
    known = axes.get(op.inputs[0].op) if op.inputs and op.inputs[0].op is not None else None
    if op.name not in ("reduce_sum", "reduce_max") or known is None:
        return None
    return {atom for i in op.equation.params["axes"] for atom in known[i]}


def _number(program: Program, ref: Ref, varying: set[int]) -> float | None:
    """A constant number, also if it was broadcast; None for anything else."""
    while ref.op is not None and program.ops[ref.op].name in SAME_NUMBER:
        ref = program.ops[ref.op].inputs[0]
    if _varies(ref, varying) or math.prod(_shape(program, ref) or ()) != 1:
        return None
    try:
        with jax.ensure_compile_time_eval():
            return np.asarray(Constants(program).read(ref)).item()
    except Traced:
        return None


def _is_same(program: Program, one: Ref, other: Ref) -> bool:
    """True for one value, also if it was broadcast twice."""
    if one.op is None or one.op == other.op:
        return one[:3] == other[:3] and one.value is other.value
    if other.op is None:
        return False
    both = program.ops[one.op], program.ops[other.op]
    alike = both[0].name == both[1].name in {*MOVES, "convert_element_type"}
    alike = alike and both[0].equation.params == both[1].equation.params
    return alike and _is_same(program, both[0].inputs[0], both[1].inputs[0])


def _is_softmax(program: Program, scores: int, exponential: int, output: int, weights: Ref) -> bool:
    """True for a sum of exponentials between two products that sum over one axis each."""
    both = (program.ops[i].equation.params["dimension_numbers"][0] for i in (scores, output))
    sums = any(program.ops[i].name == "reduce_sum" for i in _between(program, exponential, weights))
    return sums and all(len(summed[0]) == 1 for summed in both)


def _adds_product(program: Program, inside: set[int]) -> bool:
    """True if a product, scaled at most, is added to the scores or to what becomes of them."""
    refs = [ref for i in inside if program.ops[i].name == "add" for ref in program.ops[i].inputs]
    left, scaling = [ref.op for ref in refs if ref.op not in inside], AFFINE - {"select_n"}
    while left:
        number = left.pop()
        if number is None:
            continue
        op = program.ops[number]
        if op.name == "dot_general":
            return True
        if op.name in scaling:
            left += [ref.op for ref in op.inputs]
    return False


def _late_division(
    program: Program,
    axes: dict[int, list[Axis]],
    scores: int,
    exponential: int,
    output: int,
    keys: tuple,
) -> tuple[list[int], list[int]]:
    """Operations from a product with the values to its division by the sum of the weights.

    The first list has those that move its axes. The second one has also the sum, what follows it,
    and the division, which is the last. Both are empty if the weights were divided before.
    """
    ops, none, moving = program.ops, ([], []), {*MOVES, "convert_element_type"}
    moves, last = [], output
    while True:
        users = [i for i, op in enumerate(ops) if any(ref.op == last for ref in op.inputs)]
        if len(users) != 1 or any(ref.op == last for ref in program.outputs):
            return none
        (user,) = users
        if ops[user].name == "div" and ops[user].inputs[0].op == last:
            break
        if ops[user].name not in moving:
            return none
        moves.append(last := user)
    below, ref = [], ops[user].inputs[1]
    while ref.op is not None and ops[ref.op].name in {*moving, "add", "max"}:
        op = ops[ref.op]
        below.append(ref.op)
        number = _number(program, op.inputs[1], _varying(program)) if len(op.inputs) > 1 else 0
        if number is None or abs(number) > ROUNDING:
            return none
        ref = op.inputs[0]
    parts = {exponential, *_between(program, exponential, Ref(output))}
    if ref.op is None or ops[ref.op].name != "reduce_sum" or ops[ref.op].inputs[0].op not in parts:
        return none
    if _reduced(program, axes, ref.op) != {keys}:
        return none
    return moves, [*sorted([*moves, *below, ref.op]), user]


def _is_loop(program: Program, scores: int, layout: Layout) -> bool:
    """True in the body of a scan over queries: its keys are the same at each step."""
    if program.scanned is None:
        return False
    first, carried = program.scanned
    query, key = (_inputs(program, program.ops[scores].inputs[i]) for i in layout.operands)
    slices = {i for i in query if i >= first}
    return all(i < first for i in key) and min(slices, default=-1) >= first + carried


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


def _is_table(
    program: Program, scores: int, output: int, layout: Layout, varying: set[int]
) -> bool:
    """True for keys or values without an axis of examples that are not computed from tokens."""
    ops, sizes = program.ops, layout.sizes
    query, key = (ops[scores].inputs[i] for i in layout.operands)
    others = [atom for atom, n in sizes.items() if n != 1 and atom != layout.keys]
    batch = [x for x in others if x[0] in ("batch", layout.keys[0])]  # axes that the keys have
    values, (names, *_) = ops[output].inputs[layout.values], layout.value_dims
    batch_of_values = [x for axis in names for x in axis if x in others]

    def is_given(ref: Ref) -> bool:
        return not _varies(ref, varying) or _is_raw(program, ref)

    if not batch and not _varies(key, varying):
        return True
    if not batch and _is_raw(program, key):
        return len(others) > 1 or not _is_raw(program, query)
    return bool(batch) and not batch_of_values and is_given(values)


def _is_raw(program: Program, ref: Ref) -> bool:
    """True for an input of the program as it is."""
    while ref.op is not None and program.ops[ref.op].name in {*MOVES, "convert_element_type"}:
        ref = program.ops[ref.op].inputs[0]
    return ref.input is not None


def _is_read_elsewhere(
    program: Program, scores: int, output: int, weights: Ref, tail: Sequence[int]
) -> bool:
    """True if more than the product with the values reads the scores, weights, or parts of them."""
    inside = {scores, *_between(program, scores, weights), *tail[:-1]}
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


def _varies(ref: Ref, varying: set[int]) -> bool:
    """True if a value depends on inputs of the program."""
    return ref.input is not None or ref.op in varying


def _varying(program: Program) -> set[int]:
    """Operations that depend on inputs of the program."""
    varying: set[int] = set()
    for number, op in enumerate(program.ops):
        if any(_varies(ref, varying) for ref in op.inputs):
            varying.add(number)
    return varying


def _shape(program: Program, ref: Ref) -> tuple[Size, ...] | None:
    """Shape of a constant or of an output of an operation; None for an input of the program."""
    if ref.op is not None:
        return program.ops[ref.op].equation.outvars[ref.output].aval.shape
    return np.shape(ref.value) if ref.input is None else None


FOREIGN = tuple(f"/{name}/" for name in ("jax", "flax", "equinox", "haiku", "optax", "jaxtyping"))
OURS = str(Path(__file__).parents[1] / "attention")
"""Folder of `performer_attention`."""
REPLAYING = (
    *(f"performer/linearization/{name}.py" for name in ("layout", "program", "search")),
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
