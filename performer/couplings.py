"""Couplings: joint laws of m random frequencies in R^d, each marginally N(0, I_d).

A coupling is a plain function `coupling(key, m, d) -> (m, d)` in float32. It is made of two parts
and one wrapper: a joint law of the lengths (`norms`), a joint law of the directions given these
lengths (`directions`), repeated over independent blocks of at most d rows; and `antithetic`. The
estimates built on it are unbiased whatever the coupling is; their errors are not the same.

Adding one: write a function with that signature, add a row to `COUPLINGS`; the tests pick it up.

Sources: VRC (norms, Sec. 3), SimRF (directions, Sec. 3). Their m frequencies ω_i are the rows here.
"""

import operator
from typing import Any

import jax
import jax.numpy as jnp

from performer import directions, norms
from performer.choices import unknown
from performer.typing import Coupling, Directions, Frequencies, Key, Norms


def blocks(draw_directions: Directions, draw_norms: Norms) -> Coupling:
    """Independent blocks of at most d frequencies, the last one truncated.

    In a block the lengths are drawn first and handed to the directions. For m > d there are
    ceil(m / d) blocks, and rows of different blocks are independent.
    """

    def coupling(key: Key, m: int, d: int) -> Frequencies:
        m, d = _positive("m (the number of features)", m), _positive("d (the dimension)", d)

        def block(block_key: Key) -> Frequencies:
            norms_key, directions_key = jax.random.split(block_key)
            lengths = draw_norms(norms_key, min(m, d), d)
            return lengths[:, None] * draw_directions(directions_key, lengths, d)

        keys = jax.random.split(key, -(-m // d))
        # On GPU and TPU the default matmul precision would cost three digits of orthogonality.
        with jax.default_matmul_precision("highest"):
            return jax.vmap(block)(keys).reshape(-1, d)[:m]

    return coupling


def antithetic(coupling: Coupling) -> Coupling:
    """[W, -W] with W drawn from `coupling` for m / 2 rows; m must be even."""

    def antithetic_coupling(key: Key, m: int, d: int) -> Frequencies:
        m = _positive("m (the number of features)", m)
        if m % 2:
            raise ValueError(f"antithetic couplings need an even number of features, got m = {m}")
        half = coupling(key, m // 2, d)
        return jnp.concatenate([half, -half])

    return antithetic_coupling


COUPLINGS: dict[str, Coupling] = {
    "iid": blocks(directions.independent, norms.independent),
    "orf": blocks(directions.orthogonal, norms.independent),
    "simrf": blocks(directions.simplex, norms.independent),
    "pnc": blocks(directions.orthogonal, norms.pairwise),
    "pm": blocks(directions.orthogonal, norms.monotone),
}
_ANTITHETIC = "-antithetic"


def get(name: str) -> Coupling:
    """The coupling of that name: a row of `COUPLINGS`, or "<row>-antithetic".

    Raises:
        ValueError: for an unknown name; the message lists the names and the nearest match.

    Example:
        >>> coupling = performer.couplings.get("pm-antithetic")
        >>> frequencies = coupling(jax.random.key(0), 128, 64)  # (128, 64)
    """
    base = name.removesuffix(_ANTITHETIC)
    if base not in COUPLINGS:
        shown = f"{', '.join(COUPLINGS)}, each also with {_ANTITHETIC!r} appended"
        raise ValueError(unknown("coupling", name, names(), shown))
    return COUPLINGS[base] if base == name else antithetic(COUPLINGS[base])


def names() -> tuple[str, ...]:
    """The names of all couplings: every row of `COUPLINGS`, then its antithetic version."""
    return (*COUPLINGS, *(name + _ANTITHETIC for name in COUPLINGS))


def _positive(what: str, value: Any) -> int:
    try:
        value = operator.index(value)
    except TypeError:
        raise ValueError(f"{what} must be a positive integer, got {value!r}") from None
    if value < 1:
        raise ValueError(f"{what} must be a positive integer, got {value}")
    return value
