"""Couplings: joint laws of m random frequencies in R^d, each marginally N(0, I_d).

A coupling is a function `coupling(key, m, d) -> (m, d)`. It draws float32 numbers, which do not
depend on jax_enable_x64. `Blocks` combines a joint law of the lengths (`norms`) with a joint law of
the directions given these lengths (`directions`), repeated over independent blocks of d rows;
`Antithetic` adds the negatives. Estimates are unbiased with every coupling, except `norms.fixed`
and `directions.HADAMARD`; the couplings differ in the error.

The built-in couplings are values: frozen, hashable, equal if their parts are, with a repr that
evaluates to them. A function of your own is accepted wherever a built-in coupling is. To add one
under a name, add a row to `COUPLINGS`; the tests include it.

Sources: VRC (norms, Sec. 3), SimRF (directions, Sec. 3). Their m frequencies ω_i are the rows here.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from performer import directions, hadamard, norms
from performer.choices import positive_integer, unknown
from performer.typing import (
    Coupling,
    Directions,
    Frequencies,
    Key,
    Norms,
    Value,
    expression,
    jit_static,
)

__all__ = [
    "COUPLINGS",
    "DEFAULT",
    "DIRECTIONS",
    "NORMS",
    "Antithetic",
    "Blocks",
    "Halton",
    "Padded",
    "common_lengths",
    "draw",
    "get",
    "names",
    "redraw",
    "with_quantile",
]


@dataclass(frozen=True, repr=False)
class Blocks(Value):
    """The first m frequencies of ceil(m / d) independent blocks of d.

    In each block the lengths are drawn first and passed to the directions.

    Raises:
        ValueError: in a draw, for lengths or directions of another shape than (d,) and (d, d).

    Example:
        >>> coupling = couplings.Blocks(directions.simplex, norms.pairwise)
        >>> frequencies = coupling(jax.random.key(0), 12, 5)  # (12, 5)
    """

    directions: Directions
    norms: Norms

    def __call__(self, key: Key, m: int, d: int) -> Frequencies:
        """Draw the frequencies (m, d), by one compiled program outside of `jax.jit` too."""
        return _draw_blocks(self, *_checked(key, m, d))

    @property
    def common_lengths(self) -> bool | None:
        """True if all lengths of a block are equal; None if unknown."""
        return getattr(self.norms, "common", None)


@jit_static(0, 2, 3)
def _draw_blocks(coupling: Blocks, key: Key, m: int, d: int) -> Frequencies:
    def block(block_key: Key) -> Frequencies:
        norms_key, directions_key = jax.random.split(block_key)
        lengths = coupling.norms(norms_key, d, d)
        _require_shape("norms", coupling.norms, lengths, (d,))
        unit = coupling.directions(directions_key, lengths, d)
        _require_shape("directions", coupling.directions, unit, (d, d))
        return lengths[:, None] * unit

    keys = jax.random.split(key, -(-m // d))
    # For user-defined directions: the default precision of GPU and TPU loses three digits.
    with jax.default_matmul_precision("highest"):
        return jax.vmap(block)(keys).reshape(-1, d)[:m]


def _require_shape(part: str, function: Any, drawn: Any, shape: tuple[int, ...]) -> None:
    """Raise ValueError for another shape, which would be broadcast or cut."""
    got = getattr(drawn, "shape", type(drawn).__name__)
    if got != shape:
        name = expression(function)
        raise ValueError(f"the {part} {name} of a block return {got}, expected the shape {shape}")


def _checked(key, m, d) -> tuple[Key, int, int]:
    if isinstance(key, int):
        raise ValueError(f"the key is the integer {key}: write jax.random.key({key})")
    m = positive_integer("m (the number of features)", m)
    return key, m, positive_integer("d (the dimension)", d)


@dataclass(frozen=True, repr=False)
class Padded(Value):
    """A coupling in the next power of two dimensions, cut to the first d coordinates.

    This equals padding the inputs with zeros. A cut Gaussian is Gaussian.
    """

    coupling: Coupling

    def __call__(self, key: Key, m: int, d: int) -> Frequencies:
        """Draw the frequencies (m, d)."""
        key, m, d = _checked(key, m, d)
        return self.coupling(key, m, hadamard.next_power_of_two(d))[:, :d]

    @property
    def common_lengths(self) -> bool | None:
        """Attribute of the coupling before the cut."""
        return common_lengths(self.coupling)


@dataclass(frozen=True, repr=False)
class Antithetic(Value):
    """[W, -W], W drawn from the coupling with m / 2 rows; m must be even."""

    coupling: Coupling

    def __call__(self, key: Key, m: int, d: int) -> Frequencies:
        """Draw the frequencies (m, d)."""
        key, m, d = _checked(key, m, d)
        if m % 2:
            raise ValueError(f"antithetic couplings need an even number of features, got m = {m}")
        half = self.coupling(key, m // 2, d)
        return jnp.concatenate([half, -half])

    @property
    def common_lengths(self) -> bool | None:
        """Attribute of the coupling of each half."""
        return common_lengths(self.coupling)


@dataclass(frozen=True, repr=False)
class Halton(Value):
    """Halton points, shifted modulo 1 by a uniform vector, through the normal quantile.

    The points are SciPy's and the same in every draw. The shift, one per draw, makes each point
    exactly uniform, so that every row is N(0, I_d).
    """

    scramble: bool = True
    """Permute the digits (Owen 2017). Otherwise few points in many dimensions lie near lines, as in
    VRC Table 1 with Fourier features."""

    def __call__(self, key: Key, m: int, d: int) -> Frequencies:
        """Draw the frequencies (m, d)."""
        key, m, d = _checked(key, m, d)
        return _shifted_normal(key, jnp.asarray(_halton_points(m, d, self.scramble)))

    common_lengths = False


halton = Halton()


@jax.jit
def _shifted_normal(key: Key, points: Frequencies) -> Frequencies:
    points = (points + jax.random.uniform(key, (1, points.shape[1]), jnp.float32)) % 1
    return jax.scipy.special.ndtri(jnp.clip(points, 2.0**-25, 1 - 2.0**-24))


@lru_cache(maxsize=16)
def _halton_points(m: int, d: int, scramble: bool) -> np.ndarray:
    from scipy.stats import qmc  # slow to import

    halton = qmc.Halton(d, scramble=scramble, rng=np.random.default_rng(0))
    return halton.random(m).astype(np.float32)


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
    "iid": Blocks(directions.independent, norms.independent),
    "orf": Blocks(directions.orthogonal, norms.independent),
    "simrf": Blocks(directions.simplex, norms.independent),
    "pnc": Blocks(directions.orthogonal, norms.pairwise),
    "pm": Blocks(directions.orthogonal, norms.monotone),
    "simrf+": Blocks(directions.simplex_weighted, norms.independent),
    "sorf": Padded(Blocks(directions.hadamard, norms.independent)),
    "fast-simrf": Padded(Blocks(directions.hadamard_simplex, norms.independent)),
    "halton": halton,
    "fixed": Blocks(directions.orthogonal, norms.fixed),
}
DEFAULT = "pm-antithetic"
"""The default coupling of layers, conversions and analysis: unbiased.

At queries and keys of five trained models it has the lowest attention error of the unbiased
couplings, as drawn and calibrated: geometric means of 0.90 and 0.79 of the error of "orf". Of
"orf-antithetic" they are 0.95 and 0.86; calibrated, that one is lower at two of the models and at
small norms (docs, "Results")."""
_ANTITHETIC = "-antithetic"
_SHOWN = (
    ", ".join(COUPLINGS).replace("orf,", "orf (of FAVOR+),", 1)
    + f", <directions>*<norms> or module:function, each also with {_ANTITHETIC!r} appended"
)
Name = Literal[
    "iid",
    "orf",
    "simrf",
    "pnc",
    "pm",
    "simrf+",
    "sorf",
    "fast-simrf",
    "halton",
    "fixed",
    "iid-antithetic",
    "orf-antithetic",
    "simrf-antithetic",
    "pnc-antithetic",
    "pm-antithetic",
    "simrf+-antithetic",
    "sorf-antithetic",
    "fast-simrf-antithetic",
    "halton-antithetic",
    "fixed-antithetic",
]
"""`names()`, which editors complete."""


def __getattr__(name: str) -> Any:
    if name in COUPLINGS:
        raise AttributeError(f"couplings are taken by name: performer.couplings.get({name!r})")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def get(coupling: Name | str | Coupling | None = None) -> Coupling:
    """Return the coupling of that name; a coupling is returned as it is.

    A name is a row of `COUPLINGS`, "<directions>*<norms>" with rows of `DIRECTIONS` and `NORMS`, or
    "module:function" for one of your own; "-antithetic" may be appended to each.

    Raises:
        ValueError: for an unknown name (the message lists the names and the nearest match), and for
            anything that is neither a name nor a function.

    Example:
        >>> coupling = performer.couplings.get("pm-antithetic")
        >>> frequencies = coupling(jax.random.key(0), 128, 64)  # (128, 64)
        >>> other = performer.couplings.get("simplex*monotone")
        >>> other
        couplings.Blocks(directions.simplex, norms.monotone)
    """
    if callable(coupling):
        return coupling
    if not isinstance(coupling, str):
        raise ValueError(
            f"coupling must be a name or a function (key, m, d), got {coupling!r}. Names: {_SHOWN}"
        )
    if coupling.endswith(_ANTITHETIC):
        return Antithetic(_base(coupling.removesuffix(_ANTITHETIC), coupling))
    return _base(coupling, coupling)


def _base(base: str, name: str) -> Coupling:
    if base in COUPLINGS:
        return COUPLINGS[base]
    if base in DIRECTIONS or base in NORMS:  # a part of a coupling
        part = DIRECTIONS.get(base, NORMS.get(base))
        pair = f"{base}*independent" if base in DIRECTIONS else f"orthogonal*{base}"
        blocks = {x: c for x, c in COUPLINGS.items() if isinstance(c, Blocks)}
        whole = next((x for x, c in blocks.items() if part in (c.directions, c.norms)), pair)
        raise ValueError(f"{name!r} is a part of couplings, as in {whole!r} or {pair!r}: write one")
    if ":" in base:
        return _imported(*base.split(":", 1))
    if base.count("*") != 1:
        raise ValueError(unknown("coupling", name, names(), _SHOWN))
    first, second = base.split("*")
    if first not in DIRECTIONS:
        raise ValueError(unknown(f"directions in coupling {name!r}:", first, DIRECTIONS))
    if second not in NORMS:
        raise ValueError(unknown(f"norms in coupling {name!r}:", second, NORMS))
    pair = Blocks(DIRECTIONS[first], NORMS[second])
    return Padded(pair) if pair.directions in directions.HADAMARD else pair


def _imported(module: str, function: str) -> Coupling:
    """Return a coupling of a module that Python can import."""
    name = f"{module}:{function}"
    try:
        found = getattr(import_module(module), function, None)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0] and error.name != module:
            raise  # of the module's own imports
        raise ValueError(
            f"unknown coupling {name!r}: Python cannot import {module!r}; expected"
            f" 'module:function', for example of a file {module}.py in the folder where you start"
        ) from error
    if not callable(found):
        raise ValueError(
            f"unknown coupling {name!r}: {module} has no function {function!r}; expected a function"
            " (key, m, d) that returns (m, d) frequencies"
        )
    return cast(Coupling, found)


def names() -> tuple[str, ...]:
    """Return the names of all couplings: every row of `COUPLINGS`, then its antithetic version."""
    return (*COUPLINGS, *(name + _ANTITHETIC for name in COUPLINGS))


def common_lengths(coupling: str | Coupling) -> bool | None:
    """Return True if all lengths of a block are equal (see `calibration`), None if unknown.

    This is the attribute `common_lengths` of the coupling.

    Example:
        >>> performer.couplings.common_lengths("pm-antithetic")
        True
    """
    return getattr(get(coupling), "common_lengths", None)


def with_quantile(coupling: str | Coupling, quantile: norms.Quantile) -> Coupling:
    """Return the coupling with another radial law of the frequencies, hence of another kernel.

    Args:
        coupling: `Blocks` with lengths of `norms`, possibly padded or antithetic. With the usual
            law, `norms.chi`, any coupling.
        quantile: the law of each length, as `norms.matern(1.5)`.

    Raises:
        ValueError: for a coupling whose lengths have no law to replace, as "halton" and "fixed".

    Example:
        >>> matern = couplings.with_quantile("pnc", norms.matern(1.5))
        >>> matern.norms
        norms.FromScores(norms.pairwise_scores, norms.matern(1.5), False)
    """
    coupling = get(coupling)
    match coupling:
        case Padded(inner) | Antithetic(inner):
            return replace(coupling, coupling=with_quantile(inner, quantile))
        case Blocks(_, norms.FromScores()):
            if coupling.norms == norms.fixed:
                raise ValueError("norms.fixed are lengths sqrt(d) without a law: use 'monotone'")
            return replace(coupling, norms=replace(coupling.norms, quantile=quantile))
    if quantile != norms.chi:
        raise ValueError(
            f"{coupling!r} draws no lengths to be given another law; use couplings.Blocks, as"
            " 'orf' or 'pnc'"
        )
    return coupling


def draw(
    key: Key,
    coupling: str | Coupling,
    num_features: int,
    head_dim: int,
    num_heads: int | None = None,
) -> Float[Array, "*n m h"]:
    """Draw the frequencies of an attention layer.

    Args:
        key: random key.
        coupling: a name or a coupling.
        num_features: m.
        head_dim: h.
        num_heads: n, for independent draws (n, m, h); None for one draw (m, h) that heads share.

    Raises:
        ValueError: for an unknown coupling, or sizes that it does not admit.
    """
    coupling = get(coupling)
    if num_heads is None:
        return coupling(key, num_features, head_dim)
    keys = jax.random.split(key, positive_integer("num_heads", num_heads))
    return jax.vmap(lambda key: coupling(key, num_features, head_dim))(keys)


def redraw(
    key: Key,
    coupling: str | Coupling,
    frequencies: Float[Array, "*n m h"],
    step: int | Integer[Array, ""],
    *,
    every: int,
) -> Float[Array, "*n m h"]:
    """Draw new frequencies of the same shape and dtype if `every` divides the step, else keep them.

    A draw depends on the key and the step alone. Step 0 keeps the old frequencies. The step may be
    traced; steps in between cost nothing. Leading axes have independent draws: heads, and layers
    stacked by `nnx.vmap` or `nnx.scan`.

    Raises:
        ValueError: unless `every` is a positive integer, or for an unknown coupling.
    """
    every = positive_integer("every", every)
    step = jnp.asarray(step)
    *lead, m, h = frequencies.shape

    def new(old):
        heads = math.prod(lead) if lead else None
        drawn = draw(jax.random.fold_in(key, step), coupling, m, h, heads)
        return drawn.reshape(old.shape).astype(old.dtype)

    return jax.lax.cond((step % every == 0) & (step > 0), new, lambda old: old, frequencies)
