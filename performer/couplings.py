"""Couplings: joint laws of m random frequencies in R^d, each marginally N(0, I_d).

A coupling is a plain function `coupling(key, m, d) -> (m, d)`. It draws in float32, for a key the
same numbers with jax_enable_x64 and without it. It is made of two parts and one wrapper: a joint
law of the lengths (`norms`), a joint law of the directions given these lengths (`directions`),
repeated over independent blocks of d rows; and `antithetic`. The estimates built on it are unbiased
whatever the coupling is; their errors are not the same. (The exceptions say so: `norms.fixed` and
`directions.hadamard`.)

Adding one: write a function with that signature, add a row to `COUPLINGS`; the tests pick it up.

Sources: VRC (norms, Sec. 3), SimRF (directions, Sec. 3). Their m frequencies ω_i are the rows here.
"""

import math
from collections.abc import Callable
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from performer import directions, hadamard, norms
from performer.choices import positive_integer, unknown
from performer.typing import Coupling, Directions, Frequencies, Key, Norms


def blocks(draw_directions: Directions, draw_norms: Norms) -> Coupling:
    """ceil(m / d) independent blocks of d frequencies, of which the first m are kept.

    In a block the lengths are drawn first and handed to the directions. One program draws, outside
    of `jax.jit`, too.
    """

    @partial(jax.jit, static_argnums=(1, 2))
    def drawn(key: Key, m: int, d: int) -> Frequencies:
        def block(block_key: Key) -> Frequencies:
            norms_key, directions_key = jax.random.split(block_key)
            lengths = draw_norms(norms_key, d, d)
            return lengths[:, None] * draw_directions(directions_key, lengths, d)

        keys = jax.random.split(key, -(-m // d))
        # For directions of your own: on GPU and TPU the default matmul precision would cost three
        # digits of orthogonality.
        with jax.default_matmul_precision("highest"):
            return jax.vmap(block)(keys).reshape(-1, d)[:m]

    def coupling(key: Key, m: int, d: int) -> Frequencies:
        return drawn(
            key,
            positive_integer("m (the number of features)", m),
            positive_integer("d (the dimension)", d),
        )

    return coupling


def padded(coupling: Coupling) -> Coupling:
    """The coupling in the next power of two dimensions, cut to the first d coordinates.

    This is what padding the inputs with zeros amounts to. A cut Gaussian is Gaussian.
    """

    def padded_coupling(key: Key, m: int, d: int) -> Frequencies:
        return coupling(
            key, m, hadamard.next_power_of_two(positive_integer("d (the dimension)", d))
        )[:, :d]

    return padded_coupling


def antithetic(coupling: Coupling) -> Coupling:
    """[W, -W] with W drawn from `coupling` for m / 2 rows; m must be even."""

    def antithetic_coupling(key: Key, m: int, d: int) -> Frequencies:
        m = positive_integer("m (the number of features)", m)
        if m % 2:
            raise ValueError(f"antithetic couplings need an even number of features, got m = {m}")
        half = coupling(key, m // 2, d)
        return jnp.concatenate([half, -half])

    return antithetic_coupling


def halton(key: Key, m: int, d: int) -> Frequencies:
    """Scrambled Halton points, shifted modulo 1 by a uniform vector, through the normal quantile.

    The points are SciPy's (digits scrambled, Owen 2017), the same in every draw; the shift, one per
    draw, makes each of them exactly uniform, so that every row is N(0, I_d).
    """
    m, d = (
        positive_integer("m (the number of features)", m),
        positive_integer("d (the dimension)", d),
    )
    return _shifted_normal(key, jnp.asarray(_halton_points(m, d)))


@jax.jit
def _shifted_normal(key: Key, points: Frequencies) -> Frequencies:
    points = (points + jax.random.uniform(key, (1, points.shape[1]), jnp.float32)) % 1
    return jax.scipy.special.ndtri(jnp.clip(points, 2.0**-25, 1 - 2.0**-24))


@lru_cache(maxsize=16)
def _halton_points(m: int, d: int) -> np.ndarray:
    from scipy.stats import qmc  # slow to import

    return qmc.Halton(d, scramble=True, rng=np.random.default_rng(0)).random(m).astype(np.float32)


DIRECTIONS: dict[str, Directions] = {
    "independent": directions.independent,
    "orthogonal": directions.orthogonal,
    "simplex": directions.simplex,
    "simplex_weighted": directions.simplex_weighted,
    "hadamard": directions.hadamard,
    "hadamard_simplex": directions.hadamard_simplex,
}
NORMS: dict[str, Norms] = {
    "independent": norms.independent,
    "pairwise": norms.pairwise,
    "monotone": norms.monotone,
    "fixed": norms.fixed,
}
COUPLINGS: dict[str, Coupling] = {
    "iid": blocks(directions.independent, norms.independent),
    "orf": blocks(directions.orthogonal, norms.independent),
    "simrf": blocks(directions.simplex, norms.independent),
    "pnc": blocks(directions.orthogonal, norms.pairwise),
    "pm": blocks(directions.orthogonal, norms.monotone),
    "simrf+": blocks(directions.simplex_weighted, norms.independent),
    "sorf": padded(blocks(directions.hadamard, norms.independent)),
    "fast-simrf": padded(blocks(directions.hadamard_simplex, norms.independent)),
    "halton": halton,
    "fixed": blocks(directions.orthogonal, norms.fixed),
}
_ANTITHETIC = "-antithetic"


def get(name: str) -> Coupling:
    """The coupling of that name.

    A row of `COUPLINGS`; or "<directions>*<norms>" for any other pair of a row of `DIRECTIONS` and
    a row of `NORMS`; either with "-antithetic" appended.

    Raises:
        ValueError: for an unknown name; the message lists the names and the nearest match.

    Example:
        >>> coupling = performer.couplings.get("pm-antithetic")
        >>> frequencies = coupling(jax.random.key(0), 128, 64)  # (128, 64)
        >>> other = performer.couplings.get("simplex*monotone")
    """
    base = name.removesuffix(_ANTITHETIC)
    return _base(base, name) if base == name else _once(antithetic, _base(base, name))


def draw(
    name: str, key: Key, num_features: int, head_dim: int, num_heads: int | None = None
) -> Float[Array, "*n m h"]:
    """The frequencies of an attention layer: (m, h), or one independent draw per head, (n, m, h).

    Args:
        name: of the coupling.
        key: random key.
        num_features: m.
        head_dim: h.
        num_heads: n, or None for one draw that all heads share.

    Raises:
        ValueError: for an unknown coupling, or sizes that it does not admit.
    """
    coupling = get(name)
    if num_heads is None:
        return coupling(key, num_features, head_dim)
    keys = jax.random.split(key, positive_integer("num_heads", num_heads))
    return _for_each(coupling, keys, num_features, head_dim)


@partial(jax.jit, static_argnums=(0, 2, 3))
def _for_each(coupling: Coupling, keys: Array, m: int, d: int) -> Float[Array, "n m d"]:
    return jax.vmap(lambda key: coupling(key, m, d))(keys)


def redraw(
    name: str,
    frequencies: Float[Array, "*n m h"],
    key: Key,
    step: int | Integer[Array, ""],
    *,
    every: int,
) -> Float[Array, "*n m h"]:
    """New frequencies of the same shape where `every` divides the step, the old ones elsewhere.

    A new draw depends on the key and the step alone. Step 0 keeps the old ones. The step may be
    traced, and nothing is drawn at the steps between. All leading axes are of independent draws:
    heads, and layers that `nnx.vmap` or `nnx.scan` stacks. The dtype stays that of the old ones, to
    which the float32 draw is rounded.

    Raises:
        ValueError: when `every` is not a positive integer, or for an unknown coupling.
    """
    every = positive_integer("every", every)
    step = jnp.asarray(step)
    *lead, m, h = frequencies.shape

    def new(old):
        drawn = draw(name, jax.random.fold_in(key, step), m, h, math.prod(lead) if lead else None)
        return drawn.reshape(old.shape).astype(old.dtype)

    return jax.lax.cond((step % every == 0) & (step > 0), new, lambda old: old, frequencies)


def _base(base: str, name: str) -> Coupling:
    if base in COUPLINGS:
        return COUPLINGS[base]
    if base.count("*") != 1:
        shown = (
            f"{', '.join(COUPLINGS)}, or <directions>*<norms>, each also with"
            f" {_ANTITHETIC!r} appended"
        )
        raise ValueError(unknown("coupling", name, names(), shown))
    first, second = base.split("*")
    if first not in DIRECTIONS:
        raise ValueError(unknown(f"directions in coupling {name!r}:", first, DIRECTIONS))
    if second not in NORMS:
        raise ValueError(unknown(f"norms in coupling {name!r}:", second, NORMS))
    pair = _once(blocks, DIRECTIONS[first], NORMS[second])
    return _once(padded, pair) if first.startswith("hadamard") else pair


@lru_cache(maxsize=256)
def _once(wrapper: Callable[..., Coupling], *parts: Callable) -> Coupling:
    """One function for one name, so that `jax.jit` compiles it once."""
    return wrapper(*parts)


def names() -> tuple[str, ...]:
    """The names of all couplings: every row of `COUPLINGS`, then its antithetic version."""
    return (*COUPLINGS, *(name + _ANTITHETIC for name in COUPLINGS))
