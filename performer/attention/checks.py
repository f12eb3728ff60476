"""What `performer_attention` refuses, and masks and segments as its sums want them."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Bool

from performer import features

Lead = tuple[int, ...]


def key_mask(
    mask: ArrayLike | None, lengths: ArrayLike | None, lead: Lead, key: Array
) -> Bool[Array, "b s"] | None:
    """Mask and lengths together as one mask (b, s), or None."""
    b, s = key.shape[:2]
    lead = lead or (1,)
    keys = None
    if mask is not None:
        mask = jnp.asarray(mask)
        want = (*lead, 1, 1, s)
        if mask.ndim > len(want) or any(
            have not in (1, size) for have, size in zip(mask.shape[::-1], want[::-1], strict=False)
        ):
            raise ValueError(
                f"mask has shape {mask.shape}; linear attention honours masks over keys only, of a"
                f" shape that broadcasts to (batch, 1, 1, keys) = {want}. For a causal mask pass"
                " is_causal=True, for packed sequences segment_ids; for any other mask that differs"
                " between queries or heads use exact attention (jax.nn.dot_product_attention)"
            )
        if _smallest(mask) < 0:
            raise ValueError(
                f"mask has the negative value {_smallest(mask)}, as a mask that is added to the"
                " logits has; pass 1 (or True) where a key exists and 0 where it does not"
            )
        keys = jnp.broadcast_to(mask.astype(bool), want).reshape(b, s)
    if lengths is not None:
        lengths = jnp.asarray(lengths).astype(jnp.int32)
        if lengths.shape not in (lead, ()):
            raise ValueError(
                f"key_value_seq_lengths has shape {lengths.shape}; expected one length for each"
                f" batch entry, {lead}"
            )
        index = jnp.arange(s, dtype=jnp.int32)[None]
        exists = index < jnp.broadcast_to(lengths, lead).reshape(b, 1)
        keys = exists if keys is None else keys & exists
    return keys


def segments(segment_ids, lead: Lead, query: Array, key: Array):
    """(query ids, key ids); no key ids for self attention."""
    if segment_ids is None:
        return None
    pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    ids = [jnp.asarray(x) for x in pair]
    want = [(*lead, x.shape[1]) for x in (query, key)]
    if [x.shape for x in ids] != want:
        raise ValueError(
            f"segment_ids have the shapes {[x.shape for x in ids]} for queries and keys; expected"
            f" {want}, one number for each token, as a pair if the two differ"
        )
    query_ids, key_ids = (x.reshape(y.shape[:2]) for x, y in zip(ids, (query, key), strict=True))
    return query_ids, None if pair[0] is pair[1] else key_ids


def _smallest(x: Any) -> float:
    """The smallest number, or 0 for values that are not known while a function is traced."""
    return 0.0 if isinstance(x, Tracer) else float(np.min(np.asarray(x, np.float32), initial=0.0))


def check_dtypes(**arrays: Array) -> None:
    """Raises ValueError for arrays that are not of a dtype attention computes with."""
    for name, x in arrays.items():
        if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64):
            raise ValueError(
                f"{name} has dtype {x.dtype}; attention takes float32, bfloat16, float16 and"
                " float64: cast it"
            )


def check_shapes(query, key, value, frequencies, shift, weights) -> None:
    """Raises ValueError unless all shapes fit together."""
    (b, _, n, h), k = query.shape, key.shape[2]
    if key.shape[0] != b or key.shape[3] != h or k == 0 or n % k:
        raise ValueError(
            f"query has shape {query.shape} but key has {key.shape}: batch and head_dim must be the"
            " same, and the heads of query a multiple of those of key"
        )
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"key has shape {key.shape} but value has {value.shape}: batch, length and heads must"
            " be the same"
        )
    if frequencies.shape[-1] != h:
        raise ValueError(
            f"frequencies have head_dim {frequencies.shape[-1]} but query and key have head_dim {h}"
        )
    heads = sorted({k, n})
    if frequencies.ndim not in (2, 3) or (
        frequencies.ndim == 3 and frequencies.shape[0] not in heads
    ):
        raise ValueError(
            f"frequencies have shape {frequencies.shape}; expected (m, {h}), or"
            f" {' or '.join(f'({x}, m, {h})' for x in heads)} with one draw for each of the"
            f" {' key or '.join(map(str, heads))} heads"
        )
    m = frequencies.shape[-2]
    if shift is not None and shift.shape not in ((h,), (k, h)):
        raise ValueError(f"shift has shape {shift.shape}; expected ({h},) or ({k}, {h})")
    if weights is not None:
        if weights.shape not in ((m,), frequencies.shape[:-1]):
            raise ValueError(
                f"weights have shape {weights.shape}; expected ({m},), or one row for each head of"
                f" the frequencies, which have shape {frequencies.shape}"
            )
        if _smallest(weights) < 0:
            raise ValueError(f"weights must not be negative, got {_smallest(weights)}")


def check_combinations(
    query, key, feature_map, stabilizer, is_causal, segment_ids, shift, streaming
) -> None:
    """Raises ValueError for options that exclude each other."""
    if shift is not None and feature_map not in features.SOFTMAX:
        raise ValueError(
            f"shift changes attention with feature_map={feature_map!r}; only that of"
            f" {', '.join(features.SOFTMAX)} does not depend on it"
        )
    if stabilizer == "google" and feature_map != "positive":
        raise ValueError(f"stabilizer='google' is for feature_map='positive', not {feature_map!r}")
    if stabilizer == "google" and streaming:
        raise ValueError(
            "stabilizer='google' needs the maximum over all keys at once, so it has no state; use"
            " stabilizer='exact' for streaming"
        )
    if segment_ids is not None and streaming:
        raise ValueError("segment_ids and states do not go together: a segment ends with its call")
    if is_causal and query.shape[1] != key.shape[1]:
        lengths = f"{query.shape[1]} queries and {key.shape[1]} keys"
        if streaming:
            raise ValueError(f"a causal state needs one key for each query, got {lengths}")
        if segment_ids is not None:
            raise ValueError(f"causal segments need one key for each query, got {lengths}")


def check_calibration(calibration, key, shift, feature_map, stabilizer) -> None:
    """Raises ValueError where a calibration does not fit."""
    if shift is not None:
        raise ValueError("a calibration brings its own shift: pass shift or calibration")
    if feature_map != "positive" or stabilizer != "exact":
        raise ValueError(
            "a calibration needs feature_map='positive' and stabilizer='exact', got"
            f" {feature_map!r} and {stabilizer!r} (the pairs of 'hyperbolic' are the frequencies of"
            " an '-antithetic' coupling)"
        )
    k, h = key.shape[-2:]
    for name, leaf in calibration._asdict().items():
        want = (h,) if name in ("shift", "mean") else (h, h)
        if leaf is not None and leaf.shape not in (want, (k, *want)):
            raise ValueError(
                f"calibration.{name} has shape {leaf.shape}; expected {want}, or {(k, *want)} with"
                f" one for each of the {k} key heads"
            )


def check_split(lengths, segment_ids, stabilizer, is_causal, streaming) -> None:
    """Raises ValueError for what a sequence split over devices cannot have."""
    if lengths is not None:
        raise ValueError("key_value_seq_lengths do not go with axis_name; split a mask as the keys")
    if segment_ids is not None:
        raise ValueError("segment_ids do not go with axis_name: a segment stays on its device")
    if stabilizer == "google":
        raise ValueError("stabilizer='google' has no state to exchange, so it has no axis_name")
    if is_causal and streaming:
        raise ValueError("a causal state is that of one device; leave it out with axis_name")


def check_state(initial, lead, query, key, value, frequencies, num_features: int) -> None:
    """Raises ValueError unless the state is of the shapes that these inputs make."""
    heads = query.shape[2] if frequencies.shape[:-2] == (query.shape[2],) else key.shape[2]
    want = (*lead, heads, num_features, value.shape[3])
    if initial.numerator.shape != want or initial.maximum.shape != want[:-1]:
        raise ValueError(
            f"initial_state holds arrays of shape {initial.maximum.shape} and"
            f" {initial.numerator.shape}; these inputs need {want[:-1]} and {want}. A state serves"
            " calls with the same frequencies, batch and heads"
        )
