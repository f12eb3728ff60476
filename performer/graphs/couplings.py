"""Joint laws of the lengths of the random walks that leave one node.

A coupling is a function (key, num_walks, p_halt) -> (num_walks,) that draws int32 lengths. Each is
marginally geometric, P(length = l) = (1 - p_halt)^l p_halt, l = 0, 1, ...; nothing else is required
for unbiased estimates. Walks from different nodes are independent.

    independent   independent lengths
    antithetic    pairs that never halt at the same step (qGRF Def. 3.1)
    ensemble      floor(1 / p_halt) walkers of which no two halt at the same step (qGRF Cor. 3.3)
    sigma         pairs by a permutation of the quantiles (VRC Def. 4.2); `matching` learns it

Our lengths are len(omega) of the papers, num_walks is their m. qGRF Eq. 92 prints
p(not s_2 | not s_1) and p(not s_2 | s_1) in exchanged places: the first is
(1 - p - Delta) / (1 - p), the second Delta / p.
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from performer import choices
from performer.typing import Key

Coupling = Callable[[Key, int, float], Int[Array, " m"]]
"""coupling(key, num_walks, p_halt) -> lengths."""


def independent(key: Key, num_walks: int, p_halt: float) -> Int[Array, " m"]:
    """Draw independent lengths."""
    return _geometric(_uniform(key, (num_walks,)), p_halt)


def antithetic(
    key: Key, num_walks: int, p_halt: float, *, offset: float = 0.5, size: int = 2
) -> Int[Array, " m"]:
    """Draw lengths with antithetic termination: walker k halts when mod_1(t + k offset) < p_halt.

    qGRF Eq. 11, for any offset (Thm 3.4) and size of the groups, t uniform and new at each step.
    Drawn event by event, not step by step: the time until a walker of the group halts is geometric,
    and one draw of the arc of the circle that contains t decides which walkers halt.

    Args:
        key: random key.
        num_walks: m; the last group is cut off if m is not a multiple of the size.
        p_halt: probability to halt at each step.
        offset: difference of the termination variables of neighbours in a group. From p_halt to
            1 - p_halt two walkers never halt at once; at p_halt (1 - p_halt) two are independent.
        size: number of walkers in a group.
    """
    groups = -(-num_walks // size)
    draws = _uniform(key, (groups, size, 2))
    group = partial(_group, p_halt=p_halt, offset=offset)
    return jax.vmap(group)(draws).reshape(-1)[:num_walks]


def ensemble(key: Key, num_walks: int, p_halt: float) -> Int[Array, " m"]:
    """Draw groups of floor(1 / p_halt) antithetic walkers, the largest possible (qGRF Cor. 3.3)."""
    size = max(int(1 / p_halt + 1e-9), 1)
    return antithetic(key, num_walks, p_halt, offset=p_halt, size=size)


def sigma(permutation: Int[np.ndarray, " n"]) -> Coupling:
    """Return the coupling of pairs with lengths in the q-th and the sigma(q)-th of n quantiles.

    The permutation density p_sigma(x, y) = n 1[sigma(ceil(n x)) = ceil(n y)], mapped by the inverse
    geometric distribution function (VRC Def. 4.2). The last of an odd number of walks is alone.

    Args:
        permutation: sigma, of 0 to n - 1, as learned by `matching.learn`.

    Raises:
        ValueError: if it is not a permutation.
    """
    order = len(permutation)
    if sorted(np.asarray(permutation).tolist()) != list(range(order)):
        raise ValueError(f"not a permutation of 0..{order - 1}: {permutation}")
    table = jnp.asarray(permutation, jnp.int32)

    def coupling(key: Key, num_walks: int, p_halt: float) -> Int[Array, " m"]:
        pairs = -(-num_walks // 2)
        tile_key, place_key = jax.random.split(key)
        q = jax.random.randint(tile_key, (pairs,), 0, order, jnp.int32)
        tiles = jnp.stack([q, table[q]], axis=-1)
        above = (order - 1 - tiles + _uniform(place_key, (pairs, 2))) / order  # 1 - the quantile
        return _geometric(above.reshape(-1)[:num_walks], p_halt)

    return coupling


COUPLINGS: dict[str, Coupling] = {
    "independent": independent,
    "antithetic": antithetic,
    "ensemble": ensemble,
}


def get(coupling: str | Coupling) -> Coupling:
    """Return the coupling of that name; a function is returned as it is.

    Raises:
        ValueError: for an unknown name, with the list of names and the nearest.
    """
    if not isinstance(coupling, str):
        return coupling
    if coupling == "sigma":
        raise ValueError(
            "the coupling sigma is learned: pass couplings.sigma(matching.learn(graph, ...))"
        )
    if coupling not in COUPLINGS:
        raise ValueError(choices.unknown("coupling of walks", coupling, [*COUPLINGS, "sigma"]))
    return COUPLINGS[coupling]


def lengths(
    key: Key, coupling: str | Coupling, num_nodes: int, num_walks: int, p_halt: float
) -> Int[Array, "n m"]:
    """Draw the lengths of the walks from every node (num_nodes, num_walks).

    The lengths of a node depend on the key and the node alone.

    Raises:
        ValueError: for an unknown coupling, num_walks below 1, more walks than int32 can number, or
            p_halt outside (0, 1).
    """
    coupling = get(coupling)
    choices.positive_integer("num_walks", num_walks)
    choices.require_numbered("walks", num_nodes * num_walks)
    require_probability(p_halt)
    return _lengths(key, coupling, num_nodes, num_walks, float(p_halt))


def require_probability(p_halt: float) -> None:
    """Raise ValueError unless 0 < p_halt < 1."""
    if not 0 < p_halt < 1:
        raise ValueError(
            f"p_halt, the probability to halt at each step, must be in (0, 1), got {p_halt}"
        )


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _lengths(key: Key, coupling: Coupling, num_nodes: int, num_walks: int, p_halt: float) -> Array:
    keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(num_nodes))
    return jax.vmap(lambda key: coupling(key, num_walks, p_halt))(keys)


def _group(draws: Array, p_halt: float, offset: float) -> Array:
    """Return the lengths of a group of walkers, given uniform draws (size, 2)."""
    size = len(draws)
    shifts = offset * np.arange(size)
    ends = np.unique(np.concatenate([[0, 1], np.mod(-shifts, 1), np.mod(p_halt - shifts, 1)]))
    middles = (ends[1:] + ends[:-1]) / 2
    widths = jnp.asarray(np.diff(ends), jnp.float32)
    halting = jnp.asarray(np.mod(middles[:, None] + shifts, 1) < p_halt)  # (arcs, size)

    def event(carry, draws):
        alive, time, lengths = carry
        chances = jnp.cumsum(jnp.where((halting & alive[None]).any(axis=1), widths, 0))
        now = time + _geometric(draws[0], chances[-1])
        arc = jnp.sum(chances < draws[1] * chances[-1])
        stops = halting[arc] & alive
        return (alive & ~stops, now + 1, jnp.where(stops, now, lengths)), None

    none = jnp.zeros(size, jnp.int32)
    start = (jnp.ones(size, bool), jnp.zeros((), jnp.int32), none)
    return jax.lax.scan(event, start, draws)[0][2]


def _geometric(u: Array, p: float | Array) -> Array:
    """Return the geometric quantile at 1 - u; 0 if p rounds to 0 or 1."""
    length = jnp.floor(jnp.log(u) / jnp.log1p(-p))
    return jnp.where(jnp.isfinite(length), length, 0).astype(jnp.int32)


def _uniform(key: Key, shape: tuple[int, ...]) -> Float[Array, "..."]:
    """Draw uniform numbers in (0, 1]; long walks need all digits of small ones (not 2^-24)."""
    bits = jax.random.bits(key, (math.prod(shape),), jnp.uint32).reshape(shape)  # quick to compile
    return (bits.astype(jnp.float32) + 0.5) * jnp.float32(2**-32)
