"""Refusals of `performer_attention`, in the order in which a user meets them.

    explained   keywords that do not exist, with what to write instead
    checked     arguments of the wrong kind: names for arrays, floats for numbers of keys
    with_one_batch_axis, check_estimate, check_state   shapes and dtypes that do not fit
    REFUSALS    options that exclude each other: condition and message

Tests ask `reason` which options exclude each other.
"""

import inspect
import math
import operator
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from performer import features
from performer.attention import masks
from performer.attention.state import State, WindowState
from performer.attention.values import Estimate, Exact, Pairs, Tokens, state_heads
from performer.calibration import Calibration
from performer.choices import unknown
from performer.features import FeatureMap
from performer.typing import Size

STABILIZERS = ("exact", "google")
IMPLEMENTATIONS = ("direct", "blocked", "robust", "pallas")

INSTEAD = {
    "bias": "linear attention cannot add a bias to q.k; use key_log_weights for a bias of keys,"
    " alibi_slopes for one of the distance, or exact attention (jax.nn.dot_product_attention)",
    "causal": "write is_causal=True",
    "local_window_size": "write exact_window=w, which computes near keys exactly and estimates the"
    " others",
    "query_seq_lengths": "leave it out (every query has an output; ignore the outputs of padding)"
    " and pass key_value_seq_lengths for the keys",
    "shift": "write calibration=performer.calibration.Calibration(shift=...), after the factor"
    " sqrt(scale)",
    "dropout_rate": "there are no attention weights to drop; put dropout after attention",
    "num_features": "it is the number of the given frequencies: draw more of them",
    "coupling": "draw the frequencies: performer.couplings.get(coupling)(key, num_features,"
    " head_dim)",
}
"""Keywords of other functions: what to write here."""


WITHOUT_FREQUENCIES = (
    "performer_attention requires frequencies after value: draw them once by"
    " performer.couplings.draw(key, 'pm-antithetic', num_features, head_dim)"
)


def explained(function: Callable) -> Callable:
    """Explain unknown keywords of `INSTEAD`, and missing frequencies, in the TypeError."""
    names = set(inspect.signature(function).parameters)

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        for name in options.keys() - names:
            if name in INSTEAD:
                raise TypeError(f"{function.__name__} has no {name}: {INSTEAD[name]}")
        if len(args) == 3 and "frequencies" not in options:
            raise TypeError(WITHOUT_FREQUENCIES)
        return function(*args, **options)

    return call


# Kinds of arguments


def check_dtype(name: str, x: Array) -> None:
    """Raise ValueError for a dtype that attention does not compute in."""
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64):
        raise ValueError(
            f"{name} has dtype {x.dtype}; attention takes float32, bfloat16, float16 and"
            " float64: cast it"
        )


def check_arrays(query: Any, key: Any, value: Any, frequencies: Any) -> None:
    """Raise ValueError for tokens or frequencies that are no arrays of floats with all axes."""
    for name, x in dict(query=query, key=key, value=value).items():
        if not hasattr(x, "dtype") or len(x.shape) < 3:
            got = f"has shape {x.shape}" if hasattr(x, "shape") else f"is a {type(x).__name__}"
            raise ValueError(
                f"{name} {got}; expected an array (..., tokens, heads, width): of one head"
                f" {name}[:, None]"
            )
        check_dtype(name, x)
    if isinstance(frequencies, str):
        m, h = 2 * query.shape[-1], query.shape[-1]
        raise ValueError(
            f"frequencies={frequencies!r} is a name; draw them:"
            f" performer.couplings.get({frequencies!r})(jax.random.key(0), {m}, {h})"
        )
    check_unsplit(key)
    if frequencies is None:
        return
    if not hasattr(frequencies, "dtype") or len(frequencies.shape) < 2:
        shape = getattr(frequencies, "shape", None)
        got = f"have shape {shape}" if shape is not None else f"are {frequencies!r}"
        raise ValueError(
            f"frequencies {got}; expected an array (num_features, head_dim), drawn by"
            " performer.couplings.get(...)"
        )
    check_dtype("frequencies", frequencies)
    if 0 in (query.shape[-1], key.shape[-1], frequencies.shape[-2]):
        raise ValueError(
            f"head_dim is {query.shape[-1]} and frequencies have shape {frequencies.shape}:"
            " head_dim and num_features must be at least 1"
        )


def check_unsplit(key: Array) -> None:
    """Raise ValueError for keys whose tokens or width an explicit axis of a mesh splits."""
    spec = jax.typeof(key).sharding.spec
    if spec[-3] is not None:
        raise ValueError(
            f"the tokens of key are split over the axis {spec[-3]!r} of a mesh, which is Explicit:"
            f" call the function in jax.shard_map, with axis_name={spec[-3]!r}, or make the axis"
            " AxisType.Auto"
        )
    if spec[-1] is not None:
        raise ValueError(
            f"head_dim of key is split over the axis {spec[-1]!r} of a mesh, which is Explicit:"
            " split batch or heads instead (jax.sharding.reshard)"
        )


def number(name: str, x: Any) -> int:
    """Return the option as an integer of at least 0, or raise ValueError."""
    try:
        count = operator.index(x)
    except TypeError:
        raise ValueError(f"{name}={x!r}: must be an integer, static and at least 0") from None
    if count < 0:
        raise ValueError(f"{name}={count} must not be negative")
    return count


def positive_scale(scale: Any, head_dim: int) -> float:
    """Return the factor on q.k, 1 / sqrt(head_dim) for None, or raise ValueError."""
    if scale is None:
        return float(head_dim**-0.5)
    if isinstance(scale, Tracer):
        raise ValueError(
            "scale is traced; it must be a number. Multiply the query by a traced factor, with"
            " scale=1.0"
        )
    try:
        if isinstance(scale, str) or not 0 < float(scale) < math.inf:
            raise ValueError
    except (TypeError, ValueError):
        raise ValueError(f"scale must be positive and finite, got {scale!r}") from None
    return float(scale)


def check_words(
    stabilizer: Any, implementation: Any, is_causal: Any, mask: Any, calibration: Any
) -> None:
    """Raise ValueError for unknown words, and for what is no bool, mask or calibration."""
    if stabilizer not in STABILIZERS:
        raise ValueError(unknown("stabilizer", stabilizer, STABILIZERS))
    if implementation not in (None, *IMPLEMENTATIONS):
        hint = "; the path through XLA is 'blocked'" if implementation == "xla" else ""
        raise ValueError(unknown("implementation", implementation, IMPLEMENTATIONS) + hint)
    if not isinstance(is_causal, bool | np.bool_):
        raise ValueError(f"is_causal={is_causal!r}: must be True or False, and not traced")
    if isinstance(mask, str):
        raise ValueError(f"mask={mask!r}: pass an array of the keys that exist, or is_causal=True")
    if not isinstance(calibration, Calibration | None):
        raise ValueError(
            f"calibration is a {type(calibration).__name__}; expected a"
            " performer.calibration.Calibration, for example the result of calibrate(query, key)"
        )


# Shapes


def with_one_batch_axis(tokens: Tokens) -> Tokens:
    """Return queries, keys and values as (b, t, n, h); raise ValueError if they do not fit."""
    shapes, axes = [x.shape for x in tokens], tokens.query.ndim - 3
    (*lead, _, n, h), (*key_lead, s, k, width), (*value_lead, _) = shapes
    if not (lead == key_lead and h == width and value_lead == [*lead, s, k]) or not k or n % k:
        raise ValueError(
            f"query has shape {shapes[0]}, key has {shapes[1]} and value has {shapes[2]}: batch and"
            " head_dim must be the same, value must have the length and the heads of key, and the"
            " heads of query must be a multiple of the heads of key"
        )
    return Tokens(*(one_axis(x, axes) for x in tokens))


def one_axis(x: Array, axes: int) -> Array:
    """The first `axes` axes as one."""
    return x if axes == 1 else x.reshape(math.prod(x.shape[:axes]), *x.shape[axes:])


def check_estimate(estimate: Estimate, tokens: Tokens) -> None:
    """Raise ValueError for frequencies, weights or a calibration of shapes that do not fit."""
    (n, h), k = tokens.query.shape[2:], tokens.key.shape[2]
    frequencies, weights = estimate.frequencies, estimate.weights
    if frequencies.shape[-1] != h or frequencies.shape[:-2] not in ((), (k,), (n,)):
        heads = sorted({k, n})
        raise ValueError(
            f"frequencies have shape {frequencies.shape}; expected (m, {h}) for the head_dim {h},"
            f" or {' or '.join(f'({x}, m, {h})' for x in heads)} with one draw for each of the"
            f" {' key or '.join(map(str, heads))} heads"
        )
    given = estimate.query_frequencies
    if given is not None and given.shape != frequencies.shape:
        raise ValueError(
            f"query_frequencies have shape {given.shape} but frequencies have {frequencies.shape}:"
            " they must be the same"
        )
    for name, leaf in (estimate.calibration or Calibration())._asdict().items():
        want = (h,) if name in ("shift", "mean") else (h, h)
        if leaf is not None and leaf.shape not in (want, (k, *want)):
            raise ValueError(
                f"calibration.{name} has shape {leaf.shape}; expected {want}, or {(k, *want)} with"
                f" one for each of the {k} key heads"
            )
    if weights is not None:
        m = frequencies.shape[-2]
        if weights.shape not in ((m,), frequencies.shape[:-1]):
            raise ValueError(
                f"weights have shape {weights.shape}; expected ({m},), or one row for each head of"
                f" the frequencies, which have shape {frequencies.shape}"
            )
        if (bad := masks.first(weights, lambda x: ~(x >= 0))) is not None:
            raise ValueError(f"weights must not be negative, got {bad}")


def check_state(state: Any, tokens: Tokens, estimate: Estimate, exact: Exact, pairs: Pairs) -> None:
    """Raise ValueError for what is no state, or one of other frequencies, heads or exact keys.

    State and tokens have the batch axes of the call.
    """
    (*lead, _, n, _), k = tokens.query.shape, tokens.key.shape[-2]
    if not isinstance(state, State | WindowState):
        raise ValueError(
            f"initial_state is a {type(state).__name__}; expected the State or WindowState of a"
            " call with return_state=True: restore a saved one into that structure, for example by"
            " jax.tree.unflatten"
        )
    far, earlier = state, Exact()
    if isinstance(state, WindowState):
        far, near, first = state.far, state.near, state.first
        earlier = Exact(near.key.shape[-3] // 2, first.key.shape[-3])
        calibration = estimate.calibration
        if (near.given is not None) != (calibration is not None and calibration.changes_tokens):
            raise ValueError(
                "initial_state and this call must have the same calibration: the state holds near"
                " keys before and after it"
            )
        if (near.log_decay is None) != (pairs.log_decay is None):
            raise ValueError(
                "initial_state and this call must both have alibi_slopes or log_decay, or neither:"
                " the state holds the decay of near keys"
            )
    assert isinstance(far, State)
    if earlier != exact:
        raise ValueError(
            f"initial_state comes from a call with {str(earlier) or 'no exact keys'}, this one has"
            f" {str(exact) or 'none'}: they must be the same"
        )
    heads = state_heads(n, k, estimate, pairs)
    want = (*lead, heads, estimate.num_features, tokens.value.shape[-1])
    if far.numerator.shape != want or far.maximum.shape != want[:-1]:
        raise ValueError(
            f"initial_state holds arrays of shape {far.maximum.shape} and"
            f" {far.numerator.shape}; these inputs need {want[:-1]} and {want}. A state serves"
            " calls with the same frequencies, batch and heads"
        )


# Options that exclude each other


class Call(NamedTuple):
    """Sizes and options of a call, without arrays."""

    t: Size = 1
    """Number of queries."""
    s: Size = 1
    """Number of keys."""
    feature_map: FeatureMap = features.positive
    stabilizer: str = "exact"
    is_causal: bool = False
    exact: Exact = Exact()
    calibrated: bool = False
    sampled: bool = False
    """True if the calibration has a tilt or a proposal."""
    query_frequencies: bool = False
    weighted: bool = False
    """True with weights."""
    lengths: bool = False
    packed: bool = False
    """True with segment_ids."""
    cross_packed: bool = False
    """True with a pair of segment_ids."""
    decay: str = ""
    """Name of the option that decays pairs by distance."""
    streams: bool = False
    """True with a state before or after the call."""
    axis_name: str | None = None
    featureless: bool = False
    """True with frequencies=None."""


REFUSALS: tuple[tuple[Callable[[Call], Any], str], ...] = (
    # The estimate
    (
        lambda c: c.stabilizer == "google" and not c.feature_map.exponential,
        "stabilizer='google' requires feature_map={positive}, got {c.feature_map}",
    ),
    (
        lambda c: c.stabilizer == "google" and c.calibrated,
        "a calibration requires stabilizer='exact', got 'google'",
    ),
    (
        lambda c: c.calibrated and not c.feature_map.estimates_softmax,
        "a calibration requires a feature_map that estimates softmax, for example {positive}, got"
        " {c.feature_map}",
    ),
    (
        lambda c: c.sampled and not c.feature_map.exponential,
        "a calibration with a tilt or a proposal requires feature_map={positive}, got"
        " {c.feature_map}; one of shift and scale alone serves every map that estimates softmax"
        " (the pairs of {hyperbolic} are the frequencies of an '-antithetic' coupling)",
    ),
    (
        lambda c: c.sampled and c.query_frequencies,
        "query_frequencies require a calibration of shift and scale alone: its root and mean are a"
        " distribution that frequencies are drawn from, and these are learned",
    ),
    # Exact pairs
    (
        lambda c: c.featureless and (not c.exact.window or c.weighted),
        "frequencies=None attends to the pairs of a window alone: it requires exact_window > 0 and"
        " no weights",
    ),
    (
        lambda c: c.exact.first and not c.exact.window,
        "exact_first={c.exact.first} requires exact_window > 0",
    ),
    (
        lambda c: any(c.exact) and not c.feature_map.estimates_softmax,
        "{c.exact} requires a feature_map that estimates softmax, for example {positive}, got"
        " {c.feature_map}",
    ),
    (
        lambda c: any(c.exact) and c.stabilizer == "google",
        "{c.exact} requires stabilizer='exact', got 'google'",
    ),
    (
        lambda c: c.exact.window and c.t != c.s,
        "exact_window={c.exact.window} requires one key for each query, got {c.t} queries and"
        " {c.s} keys",
    ),
    (
        lambda c: c.exact.window and c.cross_packed,
        "exact_window={c.exact.window} requires the same segment_ids for queries and keys",
    ),
    (
        lambda c: c.exact.keys and c.is_causal,
        "exact_keys={c.exact.keys} cannot be combined with is_causal=True: the weight of a key is a"
        " sum over all queries, so the choice would depend on the future; use exact_window and"
        " exact_first",
    ),
    (
        lambda c: c.exact.keys and c.packed,
        "exact_keys={c.exact.keys} cannot be combined with segment_ids: keys are chosen for a whole"
        " sequence",
    ),
    (
        lambda c: c.exact.keys and c.decay,
        "exact_keys={c.exact.keys} cannot be combined with {c.decay}: keys are chosen by their"
        " content",
    ),
    (
        lambda c: c.exact.rows and c.is_causal,
        "exact_rows={c.exact.rows} cannot be combined with is_causal=True: the first queries see"
        " few keys; use exact_window",
    ),
    (
        lambda c: c.exact.rows and c.packed,
        "exact_rows={c.exact.rows} cannot be combined with segment_ids: it is for the class token"
        " of one sequence",
    ),
    (
        lambda c: c.exact.rows and c.decay,
        "exact_rows={c.exact.rows} cannot be combined with {c.decay}: it is for class tokens, which"
        " have no position",
    ),
    # Positions
    (
        lambda c: c.decay and (c.t != c.s or c.cross_packed),
        "{c.decay} requires one key for each query, got {c.t} queries and {c.s} keys (or segments"
        " of their own); for other keys there is key_log_weights",
    ),
    (
        lambda c: c.decay and c.stabilizer == "google",
        "{c.decay} requires stabilizer='exact', got 'google'",
    ),
    (
        lambda c: c.is_causal and c.packed and c.t != c.s,
        "causal segments require one key for each query, got {c.t} queries and {c.s} keys",
    ),
    # States
    (
        lambda c: c.streams and c.stabilizer == "google",
        "stabilizer='google' needs the maximum over all keys at once and has no state; use"
        " stabilizer='exact' for streaming",
    ),
    (
        lambda c: c.streams and c.packed,
        "segment_ids cannot be combined with states: a segment ends with its call",
    ),
    (
        lambda c: c.streams and c.is_causal and c.t != c.s,
        "a causal state requires one key for each query, got {c.t} queries and {c.s} keys",
    ),
    (
        lambda c: c.streams and c.exact.keys,
        "exact_keys={c.exact.keys} requires all queries and keys at once: leave out initial_state"
        " and return_state",
    ),
    (
        lambda c: c.streams and c.exact.rows,
        "exact_rows={c.exact.rows} requires all queries and keys at once: leave out initial_state"
        " and return_state",
    ),
    (
        lambda c: c.streams and not c.is_causal and c.exact.window,
        "exact_window={c.exact.window} has a state in causal attention alone: pass is_causal=True",
    ),
    (
        lambda c: c.streams and not c.is_causal and c.decay,
        "{c.decay} has a state in causal attention alone: pass is_causal=True",
    ),
    # A sequence that is split over devices
    (
        lambda c: c.axis_name and c.stabilizer == "google",
        "stabilizer='google' cannot be combined with axis_name: it needs the maximum over all keys",
    ),
    (
        lambda c: c.axis_name and c.lengths,
        "key_value_seq_lengths cannot be combined with axis_name: pass a mask, sharded like the"
        " keys",
    ),
    (
        lambda c: c.axis_name and c.packed,
        "segment_ids cannot be combined with axis_name: a segment stays on its device",
    ),
    (
        lambda c: c.axis_name and any(c.exact),
        "{c.exact} cannot be combined with axis_name: exact pairs would cross devices",
    ),
    (
        lambda c: c.axis_name and c.decay,
        "{c.decay} cannot be combined with axis_name",
    ),
    (
        lambda c: c.axis_name and c.is_causal and c.t != c.s,
        "axis_name={c.axis_name!r} with is_causal=True requires one key for each query, got {c.t}"
        " queries and {c.s} keys on a device: query i sees the keys up to i, which may be on"
        " another device",
    ),
    (
        lambda c: c.axis_name and c.is_causal and c.streams,
        "states cannot be combined with axis_name in causal attention: they belong to one device",
    ),
)
"""Condition on a call and message, in the order in which they are checked."""


def reason(call: Call) -> str | None:
    """Return the message of the first refusal that holds, or None."""
    known = dict(c=call, positive=features.positive, hyperbolic=features.hyperbolic)
    return next((text.format(**known) for holds, text in REFUSALS if holds(call)), None)


def check_together(call: Call) -> None:
    """Raise ValueError for options that exclude each other."""
    if (refused := reason(call)) is not None:
        raise ValueError(refused)
