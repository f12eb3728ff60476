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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from performer import features as maps
from performer.attention import masks
from performer.attention.bias import Bias
from performer.attention.state import State, WindowState
from performer.attention.values import Call, Exact, Features, Pairs, Tokens, state_heads
from performer.calibration import Calibration
from performer.choices import unknown

IMPLEMENTATIONS = ("blocked", "robust", "pallas")

OF_FEATURES = "write performer.Features(frequencies, {name}=...)"
OF_EXACT = "write performer.Features(frequencies, exact=performer.Exact({name}=...))"
OF_STREAM = "write output, state = performer.attention.stream(query, key, value, features, state)"
INSTEAD = {
    "frequencies": "the fourth argument is called features: performer.Features, or an array of"
    " frequencies",
    **{name: OF_FEATURES.format(name=name) for name in ("calibration", "weights")},
    **{name: OF_FEATURES.format(name=name) for name in ("query_frequencies", "feature_map")},
    **{f"exact_{name}": OF_EXACT.format(name=name) for name in Exact._fields},
    "exact": "write performer.Features(frequencies, exact=...)",
    "initial_state": OF_STREAM,
    "return_state": OF_STREAM,
    "state": OF_STREAM,
    "key_log_weights": "write bias=performer.Bias(keys=...)",
    "alibi_slopes": "write bias=performer.alibi(slopes)",
    "log_decay": "write bias=performer.Bias(decay=...)",
    "stabilizer": "normalisation is exact, without an epsilon; leave it out",
    "causal": "write is_causal=True",
    "local_window_size": "write performer.Features(frequencies, exact=performer.Exact(window=w)),"
    " which computes near keys exactly and estimates the others",
    "query_seq_lengths": "leave it out (every query has an output; ignore the outputs of padding)"
    " and pass key_value_seq_lengths for the keys",
    "sinks": "a sink is a key of zeros with a value of zeros, of the logit 0 for every query: join"
    " both to key and value, and give its log-weight by bias=performer.Bias(keys=...)",
    "softcap": "linear attention cannot change single logits; use exact attention"
    " (jax.nn.dot_product_attention)",
    "logits_soft_cap": "linear attention cannot change single logits; use exact attention"
    " (jax.nn.dot_product_attention)",
    "shift": "write performer.Features(frequencies,"
    " calibration=performer.calibration.Calibration(shift=...)), after the factor sqrt(scale)",
    "dropout_rate": "there are no attention weights to drop; put dropout after attention",
    "num_features": "draw them: performer.Features.draw(key, coupling, num_features, head_dim)",
    "coupling": "draw the features: performer.Features.draw(key, coupling, num_features, head_dim)",
}
"""Keywords of other functions, and of fields of `Features`: what to write here."""
MATRIX = (
    "bias is {got}: linear attention cannot add a bias matrix to q.k; pass performer.alibi(slopes)"
    " for one of the distance, performer.Bias(keys=...) for one of each key, or use exact attention"
    " (jax.nn.dot_product_attention)"
)

WITHOUT_FEATURES = (
    "performer_attention requires features after value: draw them once by"
    " performer.Features.draw(key, 'pm-antithetic', num_features, head_dim)"
)


def explained(function: Callable) -> Callable:
    """Explain unknown keywords of `INSTEAD`, and missing features, in the TypeError."""
    names = set(inspect.signature(function).parameters)

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        for name in options.keys() - names:
            if name in INSTEAD:
                raise TypeError(f"{function.__name__} has no {name}: {INSTEAD[name]}")
        if len(args) == 3 and "features" not in options:
            raise TypeError(WITHOUT_FEATURES)
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


def check_arrays(query: Any, key: Any, value: Any, features: Features) -> None:
    """Raise ValueError for tokens or frequencies that are no arrays of floats with all axes."""
    for name, x in dict(query=query, key=key, value=value).items():
        if not hasattr(x, "dtype") or len(x.shape) < 3:
            got = f"has shape {x.shape}" if hasattr(x, "shape") else f"is a {type(x).__name__}"
            raise ValueError(
                f"{name} {got}; expected an array (..., tokens, heads, width): of one head"
                f" {name}[:, None]"
            )
        check_dtype(name, x)
    check_unsplit(key)
    if (w := features.frequencies) is None:
        return
    if not hasattr(w, "dtype") or len(w.shape) < 2:
        got = f"have shape {w.shape}" if hasattr(w, "shape") else f"are {w!r}"
        raise ValueError(
            f"frequencies {got}; expected an array (num_features, head_dim), drawn by"
            " performer.Features.draw(...)"
        )
    check_dtype("frequencies", w)
    if 0 in (query.shape[-1], key.shape[-1], w.shape[-2]):
        raise ValueError(
            f"head_dim is {query.shape[-1]} and frequencies have shape {w.shape}:"
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


def check_exact(exact: Any) -> Exact:
    """Return exact pairs with integers of at least 0, or raise ValueError."""
    if not isinstance(exact, Exact):
        raise ValueError(
            f"exact={exact!r} is a {type(exact).__name__}; expected performer.Exact(window=...,"
            " first=..., keys=..., rows=...)"
        )
    return Exact(*(number(name, x) for name, x in exact._asdict().items()))


def number(name: str, x: Any) -> int:
    """Return a field of `Exact` as an integer of at least 0, or raise ValueError."""
    try:
        count = operator.index(x)
    except TypeError:
        raise ValueError(
            f"Exact({name}={x!r}): must be an integer, static and at least 0"
        ) from None
    if count < 0:
        raise ValueError(f"Exact({name}={count}) must not be negative")
    return count


def check_bias(bias: Any) -> Bias:
    """Return the bias, an empty one for None, or raise ValueError for another type."""
    if isinstance(bias, Bias | None):
        return bias or Bias()
    got = f"an array of shape {np.shape(bias)}" if hasattr(bias, "shape") else repr(bias)
    raise ValueError(MATRIX.format(got=got))


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


def check_words(implementation: Any, is_causal: Any, mask: Any, features: Features) -> None:
    """Raise ValueError for unknown words, and for what is no bool, mask or calibration."""
    if implementation not in (None, *IMPLEMENTATIONS):
        hint = "; the path through XLA is 'blocked'" if implementation in ("xla", "direct") else ""
        raise ValueError(unknown("implementation", implementation, IMPLEMENTATIONS) + hint)
    if not isinstance(is_causal, bool | np.bool_):
        raise ValueError(f"is_causal={is_causal!r}: must be True or False, and not traced")
    if isinstance(mask, str):
        raise ValueError(f"mask={mask!r}: pass an array of the keys that exist, or is_causal=True")
    if not isinstance(features.calibration, Calibration | None):
        raise ValueError(
            f"calibration is a {type(features.calibration).__name__}; expected a"
            " performer.calibration.Calibration, as of features.calibrated(query, key)"
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


def check_features(features: Features, tokens: Tokens) -> None:
    """Raise ValueError for frequencies, weights or a calibration of shapes that do not fit."""
    (n, h), k = tokens.query.shape[2:], tokens.key.shape[2]
    frequencies, weights = features.frequencies, features.weights
    if frequencies is not None and (
        frequencies.shape[-1] != h or frequencies.shape[:-2] not in ((), (k,), (n,))
    ):
        heads = sorted({k, n})
        raise ValueError(
            f"frequencies have shape {frequencies.shape}; expected (m, {h}) for the head_dim {h},"
            f" or {' or '.join(f'({x}, m, {h})' for x in heads)} with one draw for each of the"
            f" {' key or '.join(map(str, heads))} heads. Axes of queries are (batch, tokens, heads,"
            " head_dim)"
        )
    given, shape = features.query_frequencies, getattr(frequencies, "shape", None)
    if given is not None and given.shape != shape:
        raise ValueError(
            f"query_frequencies have shape {given.shape} but frequencies have {shape}:"
            " they must be the same"
        )
    for name, leaf in (features.calibration or Calibration())._asdict().items():
        want = (h,) if name in ("shift", "mean") else (h, h)
        if leaf is not None and leaf.shape not in (want, (k, *want)):
            raise ValueError(
                f"calibration.{name} has shape {leaf.shape}; expected {want}, or {(k, *want)} with"
                f" one for each of the {k} key heads"
            )
    if weights is not None and frequencies is not None:
        m = frequencies.shape[-2]
        if weights.shape not in ((m,), frequencies.shape[:-1]):
            raise ValueError(
                f"weights have shape {weights.shape}; expected ({m},), or one row for each head of"
                f" the frequencies, which have shape {frequencies.shape}"
            )
        if (bad := masks.first(weights, lambda x: ~(x >= 0))) is not None:
            raise ValueError(f"weights must not be negative, got {bad}")


def check_state(state: Any, tokens: Tokens, features: Features, pairs: Pairs) -> None:
    """Raise ValueError for what is no state, or one of other frequencies, heads or exact keys.

    State and tokens have the batch axes of the call.
    """
    (*lead, _, n, _), k = tokens.query.shape, tokens.key.shape[-2]
    if not isinstance(state, State | WindowState):
        raise ValueError(
            f"state is a {type(state).__name__}; expected the State or WindowState of an earlier"
            " call of stream: restore a saved one into that structure, for example by"
            " jax.tree.unflatten"
        )
    far, earlier = state, Exact()
    if isinstance(state, WindowState):
        far, near, first = state.far, state.near, state.first
        earlier = Exact(near.key.shape[-3] // 2, first.key.shape[-3])
        calibration = features.calibration
        if (near.given is not None) != (calibration is not None and calibration.changes_tokens):
            raise ValueError(
                "the state and this call must have the same calibration: the state holds near"
                " keys before and after it"
            )
        if (near.log_decay is None) != (pairs.log_decay is None):
            raise ValueError(
                "the state and this call must both have a decay (of alibi, for example), or"
                " neither: the state holds the decay of near keys"
            )
    assert isinstance(far, State)
    if earlier != features.exact:
        raise ValueError(
            f"the state comes from a call with {earlier}, this one has {features.exact}: they must"
            " be the same"
        )
    heads = state_heads(n, k, features, pairs)
    want = (*lead, heads, max(features.num_features, 1), tokens.value.shape[-1])
    if far.numerator.shape != want or far.maximum.shape != want[:-1]:
        raise ValueError(
            f"the state holds arrays of shape {far.maximum.shape} and"
            f" {far.numerator.shape}; these inputs need {want[:-1]} and {want}. A state serves"
            " calls with the same frequencies, batch and heads"
        )


# Options that exclude each other


def call_of(tokens: Tokens, features: Features, pairs: Pairs, **options: Any) -> Call:
    """The call of checked values, with one batch axis; options are further fields."""
    (batch, t, n, h), (_, s, k, v) = tokens.query.shape, tokens.value.shape
    w, calibration = features.frequencies, features.calibration
    return Call(
        batch, t, s, n, k, h, v, 0 if w is None else w.shape[-2],
        per_query_head=w is not None and w.shape[:-2] == (n,),
        dtypes=tuple(x.dtype.name for x in tokens),
        feature_map=features.map,
        exact=features.exact,
        calibrated=calibration is not None,
        sampled=calibration is not None and calibration.changes_law,
        learned=features.query_frequencies is not None,
        weighted=features.weights is not None,
        is_causal=pairs.is_causal,
        packed=pairs.segments is not None,
        cross_packed=pairs.segments is not None and pairs.segments[1] is not None,
        decayed=pairs.log_decay is not None,
        **options,
    )  # fmt: skip


REFUSALS: tuple[tuple[Callable[[Call], Any], str], ...] = (
    # The estimate
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
        lambda c: c.sampled and c.learned,
        "query_frequencies require a calibration of shift and scale alone: its root and mean are a"
        " distribution that frequencies are drawn from, and these are learned",
    ),
    (
        lambda c: c.residual and not c.feature_map.estimates_softmax,
        "return_residual=True requires a feature_map that estimates softmax, for example"
        " {positive}, got {c.feature_map}",
    ),
    # Exact pairs
    (
        lambda c: not c.m and (not c.exact.window or c.weighted),
        "Features(None) attends to the pairs of a window alone: it requires exact=Exact(window=...)"
        " and no weights",
    ),
    (
        lambda c: c.exact.first and not c.exact.window,
        "{c.exact} requires a window, as in Exact(window=16, first={c.exact.first})",
    ),
    (
        lambda c: any(c.exact) and not c.feature_map.estimates_softmax,
        "{c.exact} requires a feature_map that estimates softmax, for example {positive}, got"
        " {c.feature_map}",
    ),
    (
        lambda c: c.exact.window and c.t != c.s,
        "{c.exact} requires one key for each query, got {c.t} queries and {c.s} keys",
    ),
    (
        lambda c: c.exact.window and c.cross_packed,
        "{c.exact} requires the same segment_ids for queries and keys",
    ),
    (
        lambda c: c.exact.keys and c.is_causal,
        "{c.exact} cannot be combined with is_causal=True: the weight of a key is a"
        " sum over all queries, so the choice would depend on the future; use Exact(window=...,"
        " first=...)",
    ),
    (
        lambda c: c.exact.keys and c.packed,
        "{c.exact} cannot be combined with segment_ids: keys are chosen for a whole sequence",
    ),
    (
        lambda c: c.exact.keys and c.decayed,
        "{c.exact} cannot be combined with a decay: keys are chosen by their content",
    ),
    (
        lambda c: c.exact.rows and c.is_causal,
        "{c.exact} cannot be combined with is_causal=True: the first queries see"
        " few keys; use Exact(window=...)",
    ),
    (
        lambda c: c.exact.rows and c.packed,
        "{c.exact} cannot be combined with segment_ids: it is for the class token of one sequence",
    ),
    (
        lambda c: c.exact.rows and c.decayed,
        "{c.exact} cannot be combined with a decay: it is for class tokens, which have no position",
    ),
    # Positions
    (
        lambda c: c.decayed and (c.t != c.s or c.cross_packed),
        "a decay of the bias (alibi has one) requires one key for each query, got {c.t} queries and"
        " {c.s} keys (or segments of their own); for other keys there is Bias(keys=...)",
    ),
    (
        lambda c: c.is_causal and c.packed and c.t != c.s,
        "causal segments require one key for each query, got {c.t} queries and {c.s} keys",
    ),
    # States
    (
        lambda c: c.streams and c.is_causal and c.t != c.s,
        "a causal state requires one key for each query, got {c.t} queries and {c.s} keys",
    ),
    (
        lambda c: c.streams and c.exact.keys,
        "{c.exact} requires all queries and keys at once: use performer_attention",
    ),
    (
        lambda c: c.streams and c.exact.rows,
        "{c.exact} requires all queries and keys at once: use performer_attention",
    ),
    (
        lambda c: c.streams and not c.is_causal and c.exact.window,
        "{c.exact} has a state in causal attention alone: pass is_causal=True",
    ),
    (
        lambda c: c.streams and not c.is_causal and c.decayed,
        "a decay has a state in causal attention alone: pass is_causal=True",
    ),
    # A sequence that is split over devices
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
        lambda c: c.axis_name and c.decayed,
        "a decay cannot be combined with axis_name",
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
    known = dict(c=call, positive=maps.positive, hyperbolic=maps.hyperbolic)
    return next((text.format(**known) for holds, text in REFUSALS if holds(call)), None)


def check_together(call: Call) -> None:
    """Raise ValueError for options that exclude each other."""
    if (refused := reason(call)) is not None:
        raise ValueError(refused)
