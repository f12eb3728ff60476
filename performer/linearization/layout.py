"""Axes of attention in a program: followed by name, and arranged as `performer_attention` has them.

An atom is an axis of the scores q k^T: ("batch", i), or ("left", i) and ("right", i) for an axis of
the left and of the right operand. An axis of another array is a tuple of atoms, several where a
reshape has joined them, and () for an axis of length 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from performer.typing import Size

Axis = tuple
"""Atoms that one axis is made of, () for an axis of length 1."""
MOVES = {"transpose", "reshape", "squeeze", "broadcast_in_dim", "expand_dims"}
"""Operations that move axes and leave the numbers as they are."""
STIRS = {
    *("cumsum", "cumlogsumexp", "cummax", "cummin", "cumprod", "sort", "top_k", "rev", "fft"),
    *("reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum"),
    *("scatter", "dynamic_update_slice", "conv_general_dilated", "triangular_solve"),
    *("scan", "while", "cond"),
}
"""Operations that keep a shape, and not the positions of the numbers in it."""
PARTS = ("batch", "heads", "groups")
"""Roles of the axes of the scores other than time and keys."""
WIDTH = ("value", 0)
"""Name of the last axis of queries, keys and values."""


class Unfit(Exception):
    """Reason why attention is left as it is."""


def atoms_of(equation: Any) -> dict:
    """Name and length of each axis of a product, in order."""
    (summed, _), (batch, _) = equation.params["dimension_numbers"]
    left, right = (x.aval.ndim - len(batch) - len(summed) for x in equation.invars)
    counts = ("batch", len(batch)), ("left", left), ("right", right)
    atoms = [(side, i) for side, count in counts for i in range(count)]
    return dict(zip(atoms, equation.outvars[0].aval.shape, strict=False))


def moved(equation: Any, known: Sequence[list[Axis] | None], sizes: dict) -> list[Axis] | None:
    """Axes of a result, from the axes of its inputs; None if they cannot be followed.

    Args:
        equation: the operation.
        known: axes of each input, None for an input that does not come from the scores.
        sizes: length of each atom.
    """
    name, parameters = equation.primitive.name, equation.params
    shape = equation.outvars[0].aval.shape
    first = next(x for x in known if x is not None)
    if name == "transpose":
        return [first[i] for i in parameters["permutation"]]
    if name == "broadcast_in_dim":
        axes: list[Axis] = [() for _ in shape]
        for axis, i in zip(first, parameters["broadcast_dimensions"], strict=True):
            axes[i] = axis
        return axes
    if name in ("reshape", "squeeze", "expand_dims"):
        return _regrouped([atom for axis in first for atom in axis], shape, sizes)
    if name in ("reduce_max", "reduce_min", "reduce_sum", "argmax"):
        return [axis for i, axis in enumerate(first) if i not in parameters["axes"]]
    if name in STIRS or name == "dot_general":
        return None
    # Elementwise: an axis has the name that any of the inputs knows.
    if not is_elementwise([x.aval.shape for x in equation.invars], shape):
        return None
    names = [{x[i] for x in known if x and x[i]} for i in range(len(shape))]
    return None if any(len(x) > 1 for x in names) else [next(iter(x), ()) for x in names]


def is_elementwise(inputs: Sequence[tuple[Size, ...] | None], output: tuple[Size, ...]) -> bool:
    """True for shapes of an operation that may be elementwise: numbers, and equal ranks."""
    ranked = [x for x in inputs if x != ()]
    shapes = [x for x in ranked if x is not None and len(x) == len(output)]
    if not shapes or len(shapes) < len(ranked):
        return False
    return all({*lengths} <= {1, n} for n, *lengths in zip(output, *shapes, strict=True))


def _regrouped(atoms: list, shape: Sequence[Size], sizes: dict) -> list[Axis] | None:
    """Atoms in order, in groups of these sizes; None if a group would split an atom."""
    groups, left = [], list(atoms)
    for length in shape:
        group: Axis = ()
        while left and math.prod(sizes[atom] for atom in group) != length:
            group = (*group, left.pop(0))
        if math.prod(sizes[atom] for atom in group) != length:
            return None
        groups.append(group)
    return None if left else groups


@dataclass
class Layout:
    """Axes of the arrays of a place, and their order in the arrays of `performer_attention`.

    Heads of keys are the last of two or more batch axes. Axes of the queries other than time are
    query heads of them. Time and keys may each have several axes, as of an image.
    """

    sizes: dict
    """Length of each atom, in the order of the scores."""
    operands: tuple[int, int]
    """Which operand of q k^T is the queries, and which the keys."""
    dims: Any
    """Dimension numbers of q k^T."""
    time: list
    keys: list
    batch: list
    heads: list
    groups: list
    values: int
    """Which operand of the product with the values they are."""
    value_dims: Any
    """Names of the batch and key axes of the values, the order of all axes, number of the batch's.

    The axes of the width are the last ones.
    """
    shape: tuple[Size, ...]
    """Shape of the output."""
    dtype: Any
    order: list
    """Names of the axes of the output."""
    goal: list[Axis] = field(default_factory=list)
    """Axes of the scores that enter the softmax."""

    @classmethod
    def of(cls, scores: Any, product: Any, number: int, weights: list[Axis]) -> "Layout | None":
        """Return the layout; None if no axis of the scores is summed over.

        Args:
            scores: equation of q k^T.
            product: equation of the product with the values.
            number: which operand of that product is the weights.
            weights: their axes.

        Raises:
            Unfit: if the axes of the values cannot be arranged.
        """
        (contracted, batch) = scores.params["dimension_numbers"]
        (summed, batches) = product.params["dimension_numbers"]
        all_sizes = atoms_of(scores)
        key_names = [weights[i] for i in summed[number]]
        keys = [atom for atom in all_sizes if any(atom in axis for axis in key_names)]
        side = keys[0][0] if keys else "batch"
        if side == "batch" or any(atom[0] != side for atom in keys):
            return None
        other = "left" if side == "right" else "right"
        sizes = {atom: n for atom, n in all_sizes.items() if n != 1}
        free = [atom for atom in all_sizes if atom[0] == other]
        if not free:
            return None  # a single query without an axis
        # Time is the first free axes as long as the keys, or else the longest, or all for several.
        left = iter(free)
        time = [next((x for x in left if all_sizes[x] == all_sizes[key]), None) for key in keys]
        if None in time:
            time = [max(free, key=all_sizes.__getitem__)] if len(keys) == 1 else free
        lead = [atom for atom in all_sizes if atom[0] == "batch"]
        heads = lead[-1:] if len(lead) > 1 else []
        groups = [x for x in free if x not in time]
        value = product.invars[1 - number].aval
        names = [weights[i] for i in batches[number]]
        # Queries without a batch axis, such as a Perceiver's latents: it is among the keys' axes.
        shared = [atom for atom in all_sizes if atom[0] == side and atom not in keys]
        if any(atom in sizes and (atom,) not in names for atom in shared):
            raise Unfit("its keys have more than one axis, or heads are mixed before the softmax")
        batch_axes = shared + lead[: len(lead) - len(heads)]
        if not batch_axes:  # keys that all examples share, such as a codebook
            batch_axes, groups = groups[:1], groups[1:]
        repeated = [a for axis in names for a in axis if a[0] == other and a in sizes]
        if repeated and all(a in repeated for a in free if a in sizes):
            return None  # values of each query, such as of a mixture of experts
        if repeated:
            raise Unfit("its values have examples or heads that its keys do not have")
        inner = [*batches[1 - number], *summed[1 - number]]
        rest = [i for i in range(value.ndim) if i not in inner]
        bound = (*summed[number], *batches[number])
        free_names = [x for i, x in enumerate(weights) if i not in bound]
        queries, values = [a for x in free_names for a in x], [WIDTH]
        # A product has its batch axes first, then the free axes of its left and right operand.
        order = [a for x in names for a in x]
        order += queries + values if number == 0 else values + queries
        return cls(
            sizes=all_sizes,
            operands=(0, 1) if side == "right" else (1, 0),
            dims=(contracted, batch),
            time=time,
            keys=keys,
            batch=batch_axes,
            heads=heads,
            groups=groups,
            values=1 - number,
            value_dims=([*names, *key_names], [*inner, *rest], len(names)),
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

    def take_time(self, parts: Sequence[Any]) -> None:
        """Take the axis that masks have, apart from the keys, for time, where heads are as many."""
        same = [x for x in self.groups if self.sizes[x] == self.sizes[self.time[0]]]
        pairs = [x for x in parts if x.along(self.keys)]
        if len(self.time) > 1 or any(x.along(self.time) for x in pairs):
            return
        for atom in same:
            if any(x.along([atom]) for x in pairs):
                self.groups[self.groups.index(atom)], self.time = self.time[0], [atom]
                return

    @property
    def roles(self) -> tuple[tuple[str, ...], ...]:
        """Role of each axis of the scores at the softmax, () for an axis of length 1."""
        roles = dict.fromkeys(self.time, "time") | dict.fromkeys(self.keys, "keys")
        roles |= {a: name for name in PARTS for a in getattr(self, name)}
        return tuple(tuple(roles[atom] for atom in axis) for axis in self.goal)

    def take(self, roles: Sequence[tuple[str, ...]]) -> bool:
        """Make each axis what it was in the measured program, whatever its length; false if not so.

        An axis that had length 1 counts as a batch axis.
        """
        if len(roles) != len(self.goal):
            return False
        known: dict[Any, str] = {}
        for axis, parts in zip(self.goal, roles, strict=True):
            known |= dict(zip(axis[::-1], parts[::-1], strict=False))
        known = {a: role for a, role in known.items() if a not in self.keys}
        free = [*self.time, *self.groups, *(a for a in self.batch if a[0] in ("left", "right"))]
        lost = [a for a in free if a not in known and a[0] != self.keys[0][0]]
        times = [a for a in self.sizes if known.get(a) == "time"] or lost[:1]
        if not times or "keys" in known.values():
            return False
        self.time = times
        others = [*self.batch, *self.heads, *self.groups, *free]
        others = [a for a in self.sizes if a in others and a not in (*self.time, *self.keys)]
        which = {name: [a for a in others if known.get(a, "batch") == name] for name in PARTS}
        self.batch, self.heads, self.groups = (which[name] for name in PARTS)
        return True

    def _arranged(self, x: Array, have: list, *groups: list) -> Array:
        """x, whose axes are named `have`, with an axis for each group; those it lacks repeat."""
        order = [atom for group in groups for atom in group]
        sizes = self.sizes | dict(zip(have, x.shape, strict=True))
        x = jnp.transpose(x, [have.index(atom) for atom in order if atom in have])
        x = jnp.expand_dims(x, [i for i, atom in enumerate(order) if atom not in have])
        x = jnp.broadcast_to(x, [sizes[atom] for atom in order])
        return x.reshape([math.prod(sizes[atom] for atom in group) for group in groups])

    def _operand(self, x: Array, which: int, *groups: list) -> Array:
        """(groups, h) of an operand of q k^T."""
        contracted, batch = (list(dims[which]) for dims in self.dims)
        rest = [i for i in range(x.ndim) if i not in (*batch, *contracted)]
        side = "left" if which == 0 else "right"
        have = [("batch", i) for i in range(len(batch))] + [(side, i) for i in range(len(rest))]
        x = jnp.transpose(x, [*batch, *rest, *contracted])
        if len(contracted) != 1:
            x = x.reshape(*x.shape[: len(have)], -1)
        return self._arranged(x, [*have, WIDTH], *groups, [WIDTH])

    def query(self, x: Array) -> Array:
        """(b, t, n, h)."""
        heads = [*self.heads, *self.groups]
        return self._operand(x, self.operands[0], self.batch, self.time, heads)

    def key(self, x: Array) -> Array:
        """(b, s, k, h)."""
        return self._operand(x, self.operands[1], self.batch, self.keys, self.heads)

    def value(self, x: Array) -> Array:
        """(b, s, k, v)."""
        names, order, _ = self.value_dims
        atoms = [atom for axis in names for atom in axis]
        x = jnp.transpose(x, order).reshape(*(self.sizes[atom] for atom in atoms), -1)
        return self._arranged(x, [*atoms, WIDTH], self.batch, self.keys, self.heads, [WIDTH])

    def pairs(self, x: Array, axes: Sequence[Axis]) -> Array:
        """(b, n, t, s) of an array with all axes of the scores."""
        have = [atom for axis in axes for atom in axis]
        x = x.reshape([self.sizes[atom] for atom in have])
        heads = [*self.heads, *self.groups]
        return self._arranged(x, have, self.batch, heads, self.time, self.keys)

    @property
    def lengths(self) -> tuple[Size, Size]:
        """t and s, the numbers of queries and keys."""
        t, s = (math.prod(self.sizes[atom] for atom in x) for x in (self.time, self.keys))
        return t, s

    @property
    def head_count(self) -> Size:
        """n, the number of query heads."""
        return math.prod(self.sizes[atom] for atom in (*self.heads, *self.groups))

    @property
    def batch_size(self) -> Size:
        """b."""
        return math.prod(self.sizes[atom] for atom in self.batch)

    def thin(self, x: Array, axes: Sequence[Axis]) -> Array:
        """(b, n, t, s) of an array with these axes of the scores, 1 where it has length 1.

        Axes that `x` has other lengths of, of some queries, stay as long as they are.
        """
        lengths = {}
        for n, axis in zip(x.shape, axes, strict=True):
            whole = n != 1 and len(axis) > 1
            lengths |= {atom: self.sizes[atom] if whole else n for atom in axis}
        x = x.reshape(list(lengths.values()))
        groups = (self.batch, [*self.heads, *self.groups], self.time, self.keys)
        order, have = [atom for group in groups for atom in group], list(lengths)
        x = jnp.transpose(x, [have.index(atom) for atom in order if atom in have])
        x = jnp.expand_dims(x, [i for i, atom in enumerate(order) if atom not in have])
        joined = [any(lengths.get(atom, 1) != 1 for atom in group) for group in groups]
        sizes = [
            self.sizes[atom] if whole and len(group) > 1 else lengths.get(atom, 1)
            for group, whole in zip(groups, joined, strict=True)
            for atom in group
        ]
        x = jnp.broadcast_to(x, sizes)
        parts = [[sizes[order.index(atom)] for atom in group] for group in groups]
        return x.reshape([math.prod(part) for part in parts])

    def back(self, x: Array) -> Array:
        """The output as the program has it, of (b, t, n, v)."""
        have = [*self.batch, *self.time, *self.heads, *self.groups, WIDTH]
        kept, sizes = [atom for atom in have if atom in self.order], {WIDTH: x.shape[-1]}
        x = x.reshape([(self.sizes | sizes)[atom] for atom in kept])  # others have length 1
        x = jnp.transpose(x, [kept.index(atom) for atom in self.order])
        return x.reshape(self.shape).astype(self.dtype)
