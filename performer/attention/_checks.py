"""The arguments of `performer_attention`, and what it refuses."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from performer import _masks, features
from performer.attention.state import State, WindowState
from performer.calibration import Calibration
from performer.features import FeatureMap
from performer.typing import Size, float32_or_wider


class Inputs(NamedTuple):
    """The arrays of a call, by their names in `performer_attention`."""

    query: Float[Array, "*b t n h"]
    key: Float[Array, "*b s k h"]
    value: Float[Array, "*b s k v"]
    frequencies: Float[Array, "*n m h"]
    mask: ArrayLike | None = None
    key_value_seq_lengths: ArrayLike | None = None
    key_log_weights: Any = None
    segment_ids: Any = None
    shift: Float[Array, "*c h"] | None = None
    weights: Float[Array, "*w m"] | None = None
    calibration: Calibration | None = None
    initial_state: State | WindowState | None = None
    alibi_slopes: ArrayLike | None = None
    log_decay: Any = None
    query_frequencies: Float[Array, "..."] | None = None


class Options(NamedTuple):
    """What is static in a call."""

    feature_map: FeatureMap
    scale: float
    google: bool = False
    is_causal: bool = False
    axis_name: str | None = None
    return_state: bool = False
    chunk: Size = 0
    """Tokens of a causal chunk."""
    block: Size = 0
    """Tokens whose features exist at a time."""
    robust: bool = False
    exact_window: int = 0
    """Tokens of a chunk whose keys are exact for it and its neighbours; 0 for none."""
    exact_first: int = 0
    """The first so many keys are exact for all."""
    kernel: tuple[int, int] | None = None
    """Key heads and tokens of a step of the kernels for TPU; None is without them."""
    interpret: bool = False
    """The kernels run anywhere, slowly."""

    def num_features(self, frequencies: Array) -> Size:
        """How many features these frequencies make."""
        return frequencies.shape[-2] * self.feature_map.features_per_frequency


def check(inputs: Inputs, options: Options) -> Inputs:
    """The inputs as the sums want them, after a look at what fits together.

    Returns:
        The inputs with one batch axis, mask and lengths as `key_log_weights` (b, s, 1 or k),
        segments as a pair of which the second is None for self attention, and slopes as
        `log_decay` (b, t, k or n); where that has n rows, so have the frequencies.

    Raises:
        ValueError: for shapes and dtypes that do not fit, and options that exclude each other.
    """
    _check_dtypes(inputs)
    lead, tokens = inputs.query.shape[:-3], inputs[:3]
    if any(x.shape[:-3] != lead for x in tokens):
        query, key, value = (x.shape for x in tokens)
        raise ValueError(
            f"query has shape {query}, key {key} and value {value}: their batch axes must be the"
            " same"
        )
    if not options.scale > 0:
        raise ValueError(f"scale must be positive, got {options.scale}")

    def one_axis(x):
        return x if len(lead) == 1 else x.reshape(math.prod(lead), *x.shape[len(lead) :])

    query, key, value = map(one_axis, tokens)
    flat = inputs._replace(query=query, key=key, value=value)
    for look in (_check_shapes, _check_weights, _check_combinations, _check_window, _check_split):
        look(flat, options)
    dtype = float32_or_wider(query, key, value)
    log_decay = _masks.log_decay(inputs.alibi_slopes, inputs.log_decay, lead, query, key, dtype)
    if log_decay is not None:
        _check_decay(flat, options)
        inputs, flat = (_for_heads_of_decay(x, log_decay.shape[-1]) for x in (inputs, flat))
    _check_state(inputs, options)
    exists = _masks.key_mask(inputs.mask, inputs.key_value_seq_lengths, lead, key)
    return flat._replace(
        alibi_slopes=None,
        log_decay=log_decay,
        initial_state=jax.tree.map(one_axis, inputs.initial_state),
        mask=None,
        key_value_seq_lengths=None,
        key_log_weights=_masks.log_weights(inputs.key_log_weights, exists, lead, key, dtype),
        segment_ids=_masks.segments(inputs.segment_ids, lead, query, key),
    )


def _check_dtypes(inputs: Inputs) -> None:
    for name, x in zip(Inputs._fields, inputs[:4], strict=False):
        if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64):
            raise ValueError(
                f"{name} has dtype {x.dtype}; attention takes float32, bfloat16, float16 and"
                " float64: cast it"
            )


def _check_shapes(inputs: Inputs, options: Options) -> None:
    query, key, value, frequencies = inputs[:4]
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
    own, calibration = inputs.query_frequencies, inputs.calibration or Calibration()
    if own is not None and own.shape != frequencies.shape:
        raise ValueError(
            f"query_frequencies have shape {own.shape} but frequencies have {frequencies.shape}:"
            " they must be the same"
        )
    if own is not None and calibration.changes_law:
        raise ValueError(
            "query_frequencies go with a calibration of shift and scale: its root and mean are a"
            " law that frequencies are drawn from, and these are learned"
        )
    if inputs.shift is not None and inputs.shift.shape not in ((h,), (k, h)):
        raise ValueError(f"shift has shape {inputs.shift.shape}; expected ({h},) or ({k}, {h})")
    for name, leaf in (inputs.calibration or Calibration())._asdict().items():
        want = (h,) if name in ("shift", "mean") else (h, h)
        if leaf is not None and leaf.shape not in (want, (k, *want)):
            raise ValueError(
                f"calibration.{name} has shape {leaf.shape}; expected {want}, or {(k, *want)} with"
                f" one for each of the {k} key heads"
            )


def _check_weights(inputs: Inputs, options: Options) -> None:
    weights, frequencies = inputs.weights, inputs.frequencies
    if weights is None:
        return
    m = frequencies.shape[-2]
    if weights.shape not in ((m,), frequencies.shape[:-1]):
        raise ValueError(
            f"weights have shape {weights.shape}; expected ({m},), or one row for each head of"
            f" the frequencies, which have shape {frequencies.shape}"
        )
    if not _masks.smallest(weights) >= 0:
        raise ValueError(f"weights must not be negative, got {_masks.smallest(weights)}")


def _check_combinations(inputs: Inputs, options: Options) -> None:
    feature_map, shift, calibration = options.feature_map, inputs.shift, inputs.calibration
    if shift is not None and not feature_map.estimates_softmax:
        raise ValueError(
            f"shift changes attention with feature_map={feature_map}; only that of maps that"
            f" estimate softmax, as {features.positive}, does not depend on it"
        )
    if options.google and not feature_map.exponential:
        raise ValueError(
            f"stabilizer='google' is for feature_map={features.positive}, not {feature_map}"
        )
    if calibration is not None and shift is not None:
        raise ValueError("a calibration brings its own shift: pass shift or calibration")
    got = f"got {feature_map} and {'google' if options.google else 'exact'!r}"
    if calibration is not None and (options.google or not feature_map.estimates_softmax):
        raise ValueError(
            f"a calibration needs a feature_map that estimates softmax, as {features.positive}, and"
            f" stabilizer='exact', {got}"
        )
    if calibration is not None and calibration.changes_law and not feature_map.exponential:
        raise ValueError(
            f"a calibration with a tilt or a proposal needs feature_map={features.positive}, {got};"
            " one of shift and scale alone serves every map that estimates softmax (the pairs of"
            f" {features.hyperbolic} are the frequencies of an '-antithetic' coupling)"
        )
    streaming = inputs.initial_state is not None or options.return_state
    if options.google and streaming:
        raise ValueError(
            "stabilizer='google' needs the maximum over all keys at once, so it has no state; use"
            " stabilizer='exact' for streaming"
        )
    if inputs.segment_ids is not None and streaming:
        raise ValueError("segment_ids and states do not go together: a segment ends with its call")
    t, s = inputs.query.shape[1], inputs.key.shape[1]
    if options.is_causal and t != s and streaming:
        raise ValueError(
            f"a causal state needs one key for each query, got {t} queries and {s} keys"
        )
    if options.is_causal and t != s and inputs.segment_ids is not None:
        raise ValueError(
            f"causal segments need one key for each query, got {t} queries and {s} keys"
        )


def _check_window(inputs: Inputs, options: Options) -> None:
    """Exact near keys."""
    w, f = options.exact_window, options.exact_first
    t, s = inputs.query.shape[1], inputs.key.shape[1]
    if w < 0 or f < 0:
        raise ValueError(f"exact_window={w} and exact_first={f} must not be negative")
    if f and not w:
        raise ValueError(f"exact_first={f} goes with an exact_window; give that one, too")
    if not w:
        return
    if not options.feature_map.estimates_softmax or options.google:
        raise ValueError(
            f"exact_window={w} needs an estimate of softmax beside it: a feature_map such as"
            f" {features.positive} and stabilizer='exact', got {options.feature_map} and"
            f" {'google' if options.google else 'exact'!r}"
        )
    if t != s:
        raise ValueError(f"exact_window={w} needs one key for each query, got {t} and {s}")
    ids = inputs.segment_ids
    if isinstance(ids, tuple) and ids[0] is not ids[1]:
        raise ValueError(f"exact_window={w} needs the same segment_ids for queries and keys")
    if not options.is_causal and (options.return_state or inputs.initial_state is not None):
        raise ValueError(
            f"exact_window={w} has a state in causal attention alone: pass is_causal=True"
        )
    if options.axis_name is not None and t % w:
        raise ValueError(
            f"exact_window={w} does not divide the {t} tokens of a device: choose one that does"
        )


def _check_decay(inputs: Inputs, options: Options) -> None:
    """Slopes or log-decays."""
    t, s, ids = inputs.query.shape[1], inputs.key.shape[1], inputs.segment_ids
    if t != s or (isinstance(ids, tuple) and ids[0] is not ids[1]):
        raise ValueError(
            f"alibi_slopes and log_decay need one key for each query, got {t} queries and {s} keys"
            " (or segments of their own); for other keys there is key_log_weights"
        )
    if options.google:
        raise ValueError("alibi_slopes and log_decay need stabilizer='exact', got 'google'")
    if not options.is_causal and (options.return_state or inputs.initial_state is not None):
        raise ValueError(
            "with alibi_slopes or log_decay there is a state in causal attention alone: pass"
            " is_causal=True"
        )


def _for_heads_of_decay(inputs: Inputs, heads: Size) -> Inputs:
    """With frequencies of each query head, if each has a decay of its own."""
    frequencies, weights, k = inputs.frequencies, inputs.weights, inputs.key.shape[-2]
    if heads == k or frequencies.shape[:-2] == (heads,):
        return inputs
    own = inputs.query_frequencies
    if frequencies.ndim == 2:
        shape = heads, *frequencies.shape
        return inputs._replace(
            frequencies=jnp.broadcast_to(frequencies, shape),
            query_frequencies=None if own is None else jnp.broadcast_to(own, shape),
            weights=None if weights is None else jnp.broadcast_to(weights, (heads, len(weights))),
        )
    repeat = partial(jnp.repeat, repeats=heads // k, axis=0)
    if weights is not None and weights.ndim == 2:
        weights = repeat(weights)
    own = None if own is None else repeat(own)
    return inputs._replace(frequencies=repeat(frequencies), query_frequencies=own, weights=weights)


def _check_split(inputs: Inputs, options: Options) -> None:
    """A sequence that is split over devices."""
    if options.axis_name is None:
        return
    if inputs.key_value_seq_lengths is not None:
        raise ValueError("key_value_seq_lengths do not go with axis_name; split a mask as the keys")
    if inputs.segment_ids is not None:
        raise ValueError("segment_ids do not go with axis_name: a segment stays on its device")
    if options.google:
        raise ValueError("stabilizer='google' has no state to exchange, so it has no axis_name")
    if options.is_causal and (inputs.initial_state is not None or options.return_state):
        raise ValueError("a causal state is that of one device; leave it out with axis_name")


def _check_state(inputs: Inputs, options: Options) -> None:
    (query, key, value, frequencies), state = inputs[:4], inputs.initial_state
    if state is None:
        return
    heads = query.shape[-2] if frequencies.shape[:-2] == query.shape[-2:-1] else key.shape[-2]
    m = options.num_features(frequencies)
    want = (*query.shape[:-3], heads, m, value.shape[-1])
    decays = inputs.alibi_slopes is not None or inputs.log_decay is not None
    state = _check_window_state(state, options, decays)
    if state.numerator.shape != want or state.maximum.shape != want[:-1]:
        raise ValueError(
            f"initial_state holds arrays of shape {state.maximum.shape} and"
            f" {state.numerator.shape}; these inputs need {want[:-1]} and {want}. A state serves"
            " calls with the same frequencies, batch and heads"
        )


def _check_window_state(state: State | WindowState, options: Options, decays: bool) -> State:
    """The sums of the state, which must be that of calls with the same window."""
    sizes = (0, 0)
    if isinstance(state, WindowState):
        sizes = (state.near.key.shape[-3] // 2, state.first.key.shape[-3])
    if isinstance(state, WindowState) and (state.near.log_decay is not None) != decays:
        raise ValueError(
            "initial_state and this call must both have alibi_slopes or log_decay, or neither: the"
            " state holds what the near keys fade"
        )
    if sizes != (options.exact_window, options.exact_first):
        raise ValueError(
            "initial_state comes from a call with exact_window, exact_first ="
            f" {sizes}, this one has {(options.exact_window, options.exact_first)}: they must be"
            " the same"
        )
    return state.far if isinstance(state, WindowState) else state
