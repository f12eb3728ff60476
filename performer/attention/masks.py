"""Arrays of `Pairs` from keywords: masks, log-weights, decay, packed segments."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from performer.typing import Size

Lead = tuple[Size, ...]
"""Sizes of the batch axes."""


def key_mask(
    mask: ArrayLike | None, lengths: ArrayLike | None, lead: Lead, key: Array
) -> Bool[Array, "b s"] | None:
    """Mask and lengths together as one mask (b, s), or None."""
    b, s = key.shape[:2]
    lead = lead or (1,)
    keys = None
    if mask is not None:
        mask = jnp.asarray(of_all_heads(mask))
        want = (*lead, 1, 1, s)
        if not _broadcasts(mask.shape, want):
            raise ValueError(
                f"mask has shape {mask.shape}; linear attention honours masks over keys only, of a"
                f" shape that broadcasts to (batch, 1, 1, keys) = {want}. For padding pass"
                " valid[:, None, None, :], for a causal mask is_causal=True, for packed sequences"
                " segment_ids; for a mask of keys that differs between heads"
                " bias=performer.Bias(keys=...) of shape (batch, keys, key heads), -inf where there"
                " is no key; for any other mask that"
                " differs between queries use exact attention (jax.nn.dot_product_attention)"
            )
        keys = jnp.broadcast_to(truth(mask), want).reshape(b, s)
    if lengths is not None:
        bad, lengths = first(lengths, lambda x: ~(x >= 0)), jnp.asarray(lengths)
        if lengths.shape not in (lead, ()):
            raise ValueError(
                f"key_value_seq_lengths has shape {lengths.shape}; expected one length for each"
                f" batch entry, {lead}"
            )
        if not jnp.issubdtype(lengths.dtype, jnp.integer) or bad is not None:
            raise ValueError(
                f"key_value_seq_lengths has {_got(lengths, bad)}; expected integers from 0, numbers"
                " of keys"
            )
        index = jnp.arange(s, dtype=jnp.int32)[None]
        exists = index < jnp.broadcast_to(lengths.astype(jnp.int32), lead).reshape(b, 1)
        keys = exists if keys is None else keys & exists
    return keys


def of_all_heads(mask: ArrayLike) -> ArrayLike:
    """A mask of keys (..., n, 1, s) as (..., 1, 1, s), if its heads agree and it is not traced."""
    if isinstance(mask, Tracer) or np.ndim(mask) < 3 or np.shape(mask)[-2] != 1:
        return mask
    one = np.asarray(mask)[..., :1, :, :]
    return one if np.array_equal(np.broadcast_to(one, np.shape(mask)), mask) else mask


def truth(mask: ArrayLike) -> Bool[Array, "..."]:
    """The mask as booleans; raise ValueError for one that is added to logits."""
    if (bad := first(mask, lambda x: ~(x >= 0))) is not None:
        raise ValueError(
            f"mask has the value {bad}: if it is added to the logits pass it as"
            " bias=performer.Bias(keys=...), else 1 (or True) where a key exists and 0 where it"
            " does not"
        )
    return jnp.asarray(mask).astype(bool)


def log_weights(
    given: ArrayLike | None, lead: Lead, key: Array, dtype: jnp.dtype
) -> Float[Array, "b s #k"] | None:
    """`Pairs.log_weights` of these log-weights."""
    b, s, k, _ = key.shape
    if given is None:
        return None
    weights = jnp.asarray(given)
    has_heads = weights.ndim > len(lead) + 1
    want = (*lead, s, k) if has_heads else (*lead, s)
    if not _broadcasts(weights.shape, want):
        raise ValueError(
            f"the bias of keys has shape {weights.shape}; expected one that broadcasts to (batch,"
            f" keys) = {(*lead, s)} or, with all the axes, to (batch, keys, key heads) ="
            f" {(*lead, s, k)}"
        )
    bad = first(given, lambda x: ~(x < np.inf), dtype)
    if not jnp.issubdtype(weights.dtype, jnp.floating) or bad is not None:
        raise ValueError(
            f"the bias of keys has {_got(weights, bad)}; expected floats, the logarithms of"
            " weights, below inf; -inf where there is no key"
        )
    return _broadcast(weights, want, (b, s, k if has_heads else 1), dtype)


@partial(jax.jit, static_argnums=(1, 2, 3))  # a single dispatch outside jit
def _broadcast(weights: Array, want: Lead, shape: Lead, dtype: jnp.dtype) -> Array:
    return jnp.broadcast_to(jnp.asarray(weights, dtype), want).reshape(shape)


def log_decay(
    given: ArrayLike | None, lead: Lead, query: Array, key: Array, dtype: jnp.dtype
) -> Float[Array, "b t n"] | None:
    """`Pairs.log_decay` of `Bias.decay`."""
    if given is None:
        return None
    (b, t, n, _), k, decay = query.shape, key.shape[2], jnp.asarray(given)
    heads = n if decay.ndim and decay.shape[-1] == n else k
    want = (*lead, t, heads)
    if decay.shape != (heads,) and (decay.ndim != len(want) or not _broadcasts(decay.shape, want)):
        raise ValueError(
            f"the decay of the bias has shape {decay.shape}; expected one number for each of the"
            f" {n} heads, ({n},), or (batch, tokens, heads) = {want}, any of which may be 1"
        )
    bad = first(given, lambda x: ~(x <= 0))
    if not jnp.issubdtype(decay.dtype, jnp.floating) or bad is not None:
        raise ValueError(
            f"the decay of the bias has {_got(decay, bad)}; expected floats that are not positive,"
            " for example from jax.nn.log_sigmoid"
        )
    return jnp.broadcast_to(decay.astype(dtype), want).reshape(b, t, heads)


def segments(
    segment_ids: ArrayLike | tuple[ArrayLike, ArrayLike] | None,
    lead: Lead,
    query: Array,
    key: Array,
) -> tuple[Int[Array, "b t"], Int[Array, "b s"] | None] | None:
    """`Pairs.segments` of `segment_ids`."""
    if segment_ids is None:
        return None
    pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    ids = [jnp.asarray(x) for x in pair]
    want = [(*lead, x.shape[1]) for x in (query, key)]
    if [x.shape for x in ids] != want:
        raise ValueError(
            f"segment_ids have the shapes {[x.shape for x in ids]} for queries and keys; expected"
            f" {want}, one number for each token, as a pair if they differ"
        )
    for x in ids:
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"segment_ids have dtype {x.dtype}; expected integers")
    query_ids, key_ids = (x.reshape(y.shape[:2]) for x, y in zip(ids, (query, key), strict=True))
    return query_ids, None if pair[0] is pair[1] else key_ids


def first(
    x: Any, bad: Callable[[np.ndarray], np.ndarray], dtype: Any = np.float32
) -> np.floating | None:
    """The first bad entry; None if there is none, or while traced."""
    if isinstance(x, Tracer):
        return None
    values = np.asarray(x).astype(dtype)
    wrong = values[bad(values)]
    return wrong[0] if wrong.size else None


def _got(x: Array, bad: Any) -> str:
    """The dtype, and the bad entry if there is one."""
    return f"dtype {x.dtype}" + f" and the entry {bad}" * (bad is not None)


def _broadcasts(shape: Lead, want: Lead) -> bool:
    return len(shape) <= len(want) and all(
        have in (1, size) for have, size in zip(shape[::-1], want[::-1], strict=False)
    )
