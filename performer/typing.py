"""Notation and array aliases of the package.

One letter means one thing in every signature, as in `Float[Array, "b t n h"]`:

    b  batch                  h  head_dim, the width of a query or key
    t  query length           v  width of a value
    s  key length             m  num_features, the number of frequencies
    n  heads                  d  dimension of the inputs of a kernel (h, inside attention)

The papers write the frequencies w_i or ω_i (the rows of W here) and call their number m or s.

Dtypes: draws (frequencies, lengths, signs, quadrature rules) are float32 and do not depend on
jax_enable_x64. Functions of points compute in `float32_or_wider` of the points and cast everything
else to it.
"""

import dataclasses
import sys
from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

Key = PRNGKeyArray
Size = Any
"""Size of an axis: an int, or a dimension of `jax.export.symbolic_shape` (no public type)."""
Lengths = Float[Array, " m"]
Frequencies = Float[Array, "m d"]

Norms = Callable[[Key, int, int], Lengths]
"""norms(key, m, d) -> (m,): the joint law of the lengths of the m frequencies of one block."""

Directions = Callable[[Key, Lengths, int], Frequencies]
"""directions(key, lengths, d) -> (m, d): the joint law of unit vectors, given their lengths."""

Coupling = Callable[[Key, int, int], Frequencies]
"""coupling(key, m, d) -> (m, d): the joint law of m frequencies, each marginally N(0, I_d)."""


def float32_or_wider(*arrays: Array) -> jnp.dtype:
    """Return float64 if one of the arrays is, else float32.

    Unlike `jnp.promote_types` this is allowed by jax_numpy_dtype_promotion="strict".
    """
    dtypes = {jax.dtypes.canonicalize_dtype(x.dtype) for x in arrays}
    return jnp.dtype(jnp.float64 if jnp.dtype(jnp.float64) in dtypes else jnp.float32)


def expression(value: object) -> str:
    """Return an expression for the value, given `from performer import norms, directions, ...`.

    This is the qualified name of a function, and the repr of everything else.
    """
    if not isinstance(value, FunctionType):
        return repr(value)
    return f"{_public(value.__module__ or '__main__')}.{value.__qualname__}"


def _public(module: str) -> str:
    """Return the name of a module in `performer`: "gp" for performer.gp."""
    return module.removeprefix("performer.")


class Value:
    """Base of frozen dataclasses with a repr that evaluates to them."""

    def __repr__(self) -> str:
        """Return the name of an equal value in the module of the class, or else a call."""
        kind = type(self)
        module = _public(kind.__module__)
        for name, value in vars(sys.modules[kind.__module__]).items():
            if type(value) is kind and hashable(value) and value == self:
                return f"{module}.{name}"
        values = [getattr(self, field.name) for field in dataclasses.fields(self)]  # pyright: ignore
        return f"{module}.{kind.__qualname__}({', '.join(map(expression, values))})"


def hashable(value: object) -> bool:
    """Return True if `jax.jit` accepts the value as static (one without arrays)."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


def jit_static(*static: int) -> Callable[[Callable], Callable]:
    """`jax.jit` with static arguments at these positions.

    Nothing is compiled if one of them is not hashable, as a coupling with traced parameters.
    """

    def decorate(function: Callable) -> Callable:
        compiled = jax.jit(function, static_argnums=static)

        @wraps(function)
        def call(*args):
            return (compiled if all(hashable(args[i]) for i in static) else function)(*args)

        return call

    return decorate
