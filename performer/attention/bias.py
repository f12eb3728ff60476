"""The biases that linear attention can add to q.k.

A bias matrix has an entry for each pair, and reading it takes quadratic time. Two kinds do not: a
number for each key, and a decay, which is a sum over the tokens between a query and a key.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from performer.attention.masks import first


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Bias:
    """Terms that are added to the logits scale q.k; `+` adds two of them.

    Example:
        >>> bias = alibi(2.0 ** -jnp.linspace(1, 8, 12)) + Bias(keys=jnp.zeros(query.shape[:2]))
        >>> output = performer_attention(query, key, value, w, bias=bias, is_causal=True)
    """

    keys: ArrayLike | None = None
    """Floats for each key, with gradients; -inf removes it. They broadcast to (b, s), or with all
    axes to (b, s, k). Float32 resolves exponents to 6e-8 of their size. With `relu` and
    `arc_cosine`, keys lighter than e^-80 times the heaviest are dropped."""
    decay: ArrayLike | None = None
    """(b, t, k) or (b, t, n), broadcast over axes of 1, or one number for each head, (k,) or (n,);
    with gradients: logarithms a <= 0 of the decay of a head at a token, the forget gate of
    forgetting attention (Lin et al. 2025). Key j has the weight e^{a_(j+1) + ... + a_i} for query
    i >= j, e^{a_(i+1) + ... + a_j} for i < j; -inf forgets all, and a_1 fades the state before the
    call. Gates for each channel (gated linear attention) are not supported. Requires t = s."""

    def __add__(self, other: "Bias") -> "Bias":
        """The sum of both; ValueError for biases of keys with different axes."""
        if not isinstance(other, Bias):
            return NotImplemented
        axes = [np.ndim(x.keys) for x in (self, other) if x.keys is not None]
        if len(set(axes)) > 1:
            raise ValueError(
                f"biases of keys with {axes[0]} and {axes[1]} axes cannot be added: give both the"
                " axes (batch, keys, key heads)"
            )
        return Bias(_sum(self.keys, other.keys), _sum(self.decay, other.decay))


def alibi(slopes: ArrayLike) -> Bias:
    """The bias -slope |i - j| (Press et al. 2022, Eq. 1): a decay that is the same at each token.

    Args:
        slopes: (n,) or (k,), from 0. Positions are counted within segments. Requires t = s.

    Raises:
        ValueError: for slopes that are negative or no finite floats.

    Example:
        >>> bias = alibi(2.0 ** -jnp.linspace(1, 8, 12))
    """
    given: Float[Array, " n"] = jnp.asarray(slopes)
    bad = first(slopes, lambda x: ~((x >= 0) & (x < np.inf)))
    if given.ndim != 1 or not jnp.issubdtype(given.dtype, jnp.floating) or bad is not None:
        entry = "" if bad is None else f" and the entry {bad}"
        raise ValueError(
            f"slopes have shape {given.shape}, dtype {given.dtype}{entry}; expected finite floats"
            " from 0, one for each head, for example 2^-1 ... 2^-8"
        )
    return Bias(decay=-given)


def _sum(left: ArrayLike | None, right: ArrayLike | None) -> ArrayLike | None:
    if left is None or right is None:
        return left if right is None else right
    return jnp.asarray(left) + jnp.asarray(right)
