"""`performer_attention`: the public call, and the sums that it is computed by.

A call makes three values (`_checks`), which `_maps` turns into features of queries and of keys; the
sums over them are those of `state`, chunk by chunk those of `_sweep`, beside exact keys those of
`_window`.
"""

from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from performer import features
from performer.attention import _checks, _decay, _fused, _maps, _masks, _sizes, _window
from performer.attention import state as states
from performer.attention._checks import Estimate, Exact, Plan, Tokens
from performer.attention._maps import Arguments
from performer.attention._masks import Pairs
from performer.attention._sweep import ratio, sweep
from performer.attention.calibration import Calibration
from performer.attention.parallel import earlier_devices, later_devices, over_devices
from performer.attention.state import Keys, State, WindowState, extended, pad
from performer.choices import unknown
from performer.features import FeatureMap
from performer.typing import float32_or_wider

IMPLEMENTATIONS = ("direct", "blocked", "robust", "pallas")


def performer_attention(
    query: Float[Array, "*b t n h"],
    key: Float[Array, "*b s k h"],
    value: Float[Array, "*b s k v"],
    frequencies: Float[Array, "*n m h"],
    *,
    mask: ArrayLike | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    key_log_weights: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    log_decay: ArrayLike | None = None,
    segment_ids: ArrayLike | tuple[ArrayLike, ArrayLike] | None = None,
    bias: ArrayLike | None = None,
    shift: Float[Array, "*c h"] | None = None,
    query_frequencies: Float[Array, "..."] | None = None,
    weights: Float[Array, "*w m"] | None = None,
    calibration: Calibration | None = None,
    feature_map: str | FeatureMap = "positive",
    stabilizer: Literal["exact", "google"] = "exact",
    implementation: Literal["direct", "blocked", "robust", "pallas"] | None = None,
    initial_state: State | WindowState | None = None,
    return_state: bool = False,
    axis_name: str | None = None,
    exact_window: int = 0,
    exact_first: int = 0,
) -> Float[Array, "*b t n v"] | tuple[Float[Array, "*b t n v"], State | WindowState]:
    """FAVOR+ attention: an estimate of softmax(scale q k^T) v in O((t + s) m) time.

    The shapes are those of `jax.nn.dot_product_attention`. As m grows the result converges to it
    (for feature maps that estimate softmax); with non-negative features the rows of the estimated
    attention matrix are non-negative and sum to 1 for any m. The memory grows with t + s, never
    with (t + s) m, in the backward pass too: features are computed again there. Gradients of any
    order, forward mode, `vmap`, `jax.checkpoint` and `scan` work. Batch, lengths and heads may be
    symbols of `jax.export`: one program then serves all of their sizes, and works in blocks and
    chunks that suit the platform it is run on; with numbers, those of the machine that traces it.

    Args:
        query: (b, t, n, h), with any number of batch axes or none; float32, bfloat16, float16 or
            float64, like `key` and `value`. An axis may be empty, but for those of heads and of h.
        key: (b, s, k, h), where n is a multiple of k: each key head serves n / k
            consecutive query heads (grouped, or multi-query attention).
        value: (b, s, k, v).
        frequencies: (m, h), shared by the heads; (k, m, h), one draw for each key head; or
            (n, m, h), one for each query head, which makes grouped heads cost as much as n key
            heads. Rows are N(0, I_h): the draw of a coupling. Rounded to the dtype of `query`.
        mask: which keys exist, True or non-zero where they do; anything that broadcasts to
            (b, 1, 1, s). A masked key leaves the numerator, the normaliser and the maximum, and a
            query without any key returns 0.
        is_causal: query i sees the keys up to i; nothing of an output changes, bit for bit, when
            later keys do. For long queries and keys see `implementation`.
        scale: the factor on q.k; 1 / sqrt(h) if None.
        key_value_seq_lengths: (b,), only the first so many keys exist.
        key_log_weights: floats l, with gradients: a key counts e^l times, as if l were added to its
            scale q.k (a bias of keys); -inf stands for no such key. Of a shape that broadcasts to
            (b, s); or with an axis for each of (b, s, k), where any may be 1, one for each key
            head. They go into the exponents, which float32 knows to 6e-8 of their size. Features
            that may be 0 (relu, arc_cosine) lose keys that weigh less than e^-80 of the heaviest.
            With `stabilizer="google"` the epsilon of a key is weighted too.
        alibi_slopes: (n,), one number for each head (or for each key head): a key loses slope |i -
            j| of its scale q.k, as if softmax had that bias (Press et al. 2022, Eq. 1), causal or
            not, with features and with an exact window, in linear time. In packed sequences i and
            j are counted in their segment. For as many keys as queries.
        log_decay: (b, t, k), any of which may be 1, or one for each query head: numbers a <= 0 of
            the data, with gradients, -inf to forget all. The key j counts e^{a_(j+1) + ... + a_i}
            times for the query i, or e^{a_(i+1) + ... + a_j} times if it comes after it; with
            a state, a_1 is what that fades before the first token. RetNet's decay, or the gates of
            gated linear attention (with `feature_map="relu"`, say).
        segment_ids: packed sequences: a query sees only the keys with its own number. Integers
            (b, t) in any order, or a pair (b, t), (b, s) for cross attention, which costs as much
            as t + s tokens do; causal, query i then sees the keys j <= i with its number.
        bias: linear attention has no place for one that depends on the query; anything but None is
            an error that says so.
        shift: (h,) or (k, h), subtracted from every key of the head before the scale. Softmax
            attention does not change; the variance of its estimate does.
        query_frequencies: those of the queries, in the shape of `frequencies`, which then are the
            keys': for features that are learned (`performer.refinement`), where nothing is
            unbiased. With a calibration of shift and scale alone.
        weights: (m,) or one row for each head as in `frequencies`, non-negative: the features of
            frequency j count that many times in the kernel (importance sampling). They go into the
            exponents: float32 knows a feature, and what it gives to a gradient, to 6e-8 times the
            size of w.q, w.k, |k|^2 / 2 and log weight together.
        calibration: from `performer.calibration`, with one entry for each key head or one for all;
            it has a shift of its own. Shift and scale serve every map that estimates softmax, a
            tilt or a proposal needs `feature_map="positive"`. Softmax attention does not change;
            the variance of its estimate does. It goes into the frequencies, one bias for each
            feature and, for a scale, one (h, h) map of the keys.
        feature_map: a word, "positive", "hyperbolic", "trigonometric", "relu" or "elu+1", or any
            `features.FeatureMap`, as `features.arc_cosine(1)` or one of your own. `hyperbolic` is
            the antithetic pair [W, -W] for half the projections; `trigonometric` rows may be
            negative and their sums vanish; `relu` and `elu+1` are kernels of their own, applied to
            W q and W k (frequencies `jnp.eye(h)` and scale 1 give linear attention, Katharopoulos
            et al. 2020). A query that shares no feature with any key returns 0, as without keys.
        stabilizer: "exact" adds nothing. "google" is for replication: positive features with the
            maximum over all keys and features of a batch entry and head, and an epsilon of 1e-6
            added to every feature, as in the public code of Choromanski et al. 2021; it is biased,
            and causal attention then looks into the future through the maximum.
        implementation: None chooses. "direct" holds the features of all tokens at once, and all of
            the kernel matrix if causal; "blocked" works block by block. "robust" does too, and is
            exact for queries and keys of any norm where the others are not: causal and packed rows
            go wrong, without a sign, once norms are past some 10 after the factor sqrt(scale) if
            all keys that a query sees are opposite to it, 35 if they are orthogonal. It is the
            check, too: the two differ by more than rounding just there. "pallas" is a kernel for
            TPU, forward and backward, compiled and counted but not yet run on one: features never
            leave the core's memory. It takes positive features with the exact stabiliser, masks,
            lengths, log-weights, calibration and grouped heads, in float32 or bfloat16, for widths
            and numbers of features that 16 divides. What it does not take, and what is compiled for
            anything but a TPU, is computed without it, and a warning says so once. It has first
            gradients in reverse mode alone. On several devices each takes its part of the batch if
            the mesh is in context (`jax.set_mesh`, with axes of type Auto) and its size divides the
            batch; else use `jax.shard_map`. `jax.export` takes one platform at a time.
        initial_state: the state of keys that came before, from `return_state`.
        return_state: also return the state after all keys, for the next call.
        axis_name: inside `jax.shard_map`, the mesh axis that the sequence is split over, in order:
            every query sees the keys of all devices (up to itself if causal). The devices exchange
            states of m (v + 2) numbers for each batch entry and head, whatever the length.
        exact_window: w > 0 makes near keys exact, in the same normaliser as the estimate of the far
            ones: tokens are in chunks of w, and a query sees the keys of its own chunk and the one
            before by e^{q.k} itself (between w and 2 w keys if causal; else the chunk after, too).
            With w >= t it is softmax attention. Within chunks of segments, counted in the order of
            their tokens. For as many keys as queries, and feature maps that estimate softmax;
            `weights` are then those of the kernel, 1 / m each where none are given. Sequences that
            are split over devices need parts that w divides.
        exact_first: the first so many keys (of each segment) are exact, too, for all queries.

    Returns:
        (b, t, n, v), in the dtype of `value`; with `return_state`, a pair of it and the state.
        Logits, maxima, normaliser and state are float32 whatever the inputs are, or all of it is
        float64 as soon as `query`, `key` or `value` is (the others do not count, so that float32
        draws serve both); with bfloat16 values the large products take bfloat16 operands and add in
        float32.

    Raises:
        ValueError: when shapes or dtypes do not fit, for a name that is not on its list, or for
            what linear attention cannot honour: a bias, or a mask that depends on the query or the
            head. The message names the value and the fix.

    Example:
        >>> frequencies = performer.couplings.get("pm")(jax.random.key(0), 128, 64)
        >>> output = performer_attention(query, key, value, frequencies)

        Streaming, with a state whose size does not depend on the length:

        >>> out, state = performer_attention(q, k, v, w, is_causal=True, return_state=True)
        >>> out, state = performer_attention(
        ...     next_q, next_k, next_v, w, is_causal=True, initial_state=state, return_state=True
        ... )

        Relative positions: older keys count less, at a rate for each head; and a feature map that
        is on no list:

        >>> slopes = 2.0 ** -jnp.linspace(1, 8, 12)
        >>> output = performer_attention(q, k, v, w, is_causal=True, alibi_slopes=slopes)
        >>> output = performer_attention(q, k, v, w, feature_map=performer.features.arc_cosine(1))
    """
    if bias is not None:
        raise ValueError(
            "linear attention cannot add a bias to q.k; use exact attention"
            " (jax.nn.dot_product_attention), key_log_weights if it is that of a key alone, or"
            " alibi_slopes if it is that of the distance"
        )
    if stabilizer not in ("exact", "google"):
        raise ValueError(unknown("stabilizer", stabilizer, ("exact", "google")))
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(unknown("implementation", implementation, IMPLEMENTATIONS))
    if axis_name is not None and key_value_seq_lengths is not None:
        raise ValueError("key_value_seq_lengths do not go with axis_name; split a mask as the keys")
    lead, given = query.shape[:-3], Tokens(query, key, value)
    tokens = _checks.with_one_batch_axis(given)
    of, dtype = (lead, tokens.query, tokens.key), float32_or_wider(*tokens)
    scale = float(query.shape[-1] ** -0.5 if scale is None else scale)
    if shift is not None:  # after the factor sqrt(scale), as calibrations are
        if calibration is not None:
            raise ValueError("a calibration brings its own shift: pass shift or calibration")
        calibration = Calibration(shift=shift.astype(dtype) * max(scale, 0.0) ** 0.5)
    estimate = Estimate(
        frequencies,
        query_frequencies,
        weights,
        calibration,
        features.get(feature_map),
        scale=scale,
        google=stabilizer == "google",
    )
    _checks.check_estimate(estimate, tokens)
    exists = _masks.key_mask(mask, key_value_seq_lengths, lead, tokens.key)
    pairs = Pairs(
        _masks.log_weights(key_log_weights, exists, lead, tokens.key, dtype),
        _masks.log_decay(alibi_slopes, log_decay, *of, dtype),
        _masks.segments(segment_ids, *of),
        is_causal,
    )
    exact = Exact(exact_window, exact_first)
    _checks.check_exact(exact, tokens, estimate, pairs)
    plan = Plan(axis_name, return_state, robust=implementation == "robust")
    streams = return_state or initial_state is not None
    _checks.check_together(tokens, estimate, exact, pairs, streams, plan)
    if initial_state is not None:
        _checks.check_state(initial_state, given, estimate, exact, pairs)
    state = jax.tree.map(lambda x: _checks.one_axis(x, len(lead)), initial_state)
    call = tokens, estimate, exact, pairs, state
    if implementation == "pallas":
        plan = _fused.with_kernels(*call, plan)
    output, state = _where_it_runs(call, plan, implementation == "direct")
    if len(lead) != 1:
        output, state = jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), (output, state))
    return cast(Any, (output, state) if return_state else output)


def attention_weights(
    query: Float[Array, "*b t n h"],
    key: Float[Array, "*b s k h"],
    frequencies: Float[Array, "*n m h"],
    **options: Any,
) -> Float[Array, "*b n t s"]:
    """The estimated attention matrix itself, to look at: `performer_attention` of unit values.

    Takes (t, s) memory and time for every head. `options` are those of `performer_attention`;
    arguments, shapes and errors are the same.

    Raises:
        ValueError: for `initial_state`, `return_state` or `axis_name` too: a state holds sums over
            keys, and devices would add the columns of different ones.
    """
    for name in ("initial_state", "return_state", "axis_name"):
        if options.get(name) not in (None, False):
            raise ValueError(
                f"attention_weights has no {name}: its columns are the keys of this call alone; use"
                " performer_attention"
            )
    unit = jnp.eye(key.shape[-3], dtype=float32_or_wider(query, key))[:, None]
    value = jnp.broadcast_to(unit, (*key.shape[:-1], key.shape[-3]))
    output = cast(Array, performer_attention(query, key, value, frequencies, **options))
    return jnp.moveaxis(output, -2, -3)


def _where_it_runs(call, plan: Plan, direct: bool):
    """Attention in the sizes of this machine; of symbolic shapes, in those of the one it is run on.

    What has symbolic shapes is exported, and maybe for several platforms.
    """
    (query, key, _), estimate, _, pairs, _ = call
    sweeping = pairs.is_causal or pairs.segments is not None
    batch_and_heads = key.shape[0] * key.shape[2]

    def on(platform):
        sizes = (2 * (query.shape[1] + key.shape[1]),) * 2
        if not direct:
            sizes = _sizes.chunk_and_block(
                platform, batch_and_heads, estimate.num_features, sweeping
            )
        chunk, block = sizes
        return partial(_attention, plan=replace(plan, chunk=chunk, block=block))

    if any(map(is_symbolic_dim, (*query.shape, *key.shape))):
        return jax.lax.platform_dependent(*call, cpu=on("cpu"), default=on("other"))
    return on(_sizes.platform())(*call)


@jax.jit
def _attention(
    tokens: Tokens,
    estimate: Estimate,
    exact: Exact,
    pairs: Pairs,
    state: State | WindowState | None,
    plan: Plan,
) -> tuple[Array, State | WindowState | None]:
    arguments, wide = _maps.arguments(tokens, estimate, exact, pairs), float32_or_wider(*tokens)
    if plan.kernel is not None:

        def ordinary(x: Arguments) -> Array:  # kernels know neither states nor segments
            return _sums(x, estimate, exact, pairs, None, plan)[0].astype(tokens.value.dtype)

        return _fused.attention(arguments, ordinary, plan.kernel), None
    output, state = _sums(arguments, estimate, exact, pairs, _heads_first(state, wide), plan)
    state = _heads_first(state, wide) if plan.return_state else None
    return output.astype(tokens.value.dtype), state


def _heads_first(state: State | WindowState | None, dtype: jnp.dtype):
    """Sums over keys (b, k, m) as (k, b, m), or back again."""
    if isinstance(state, WindowState):
        return state._replace(far=_heads_first(state.far, dtype))
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).astype(dtype), state)


def _sums(
    x: Arguments,
    estimate: Estimate,
    exact: Exact,
    pairs: Pairs,
    state: State | WindowState | None,
    plan: Plan,
) -> tuple[Array, State | WindowState | None]:
    """The output, and the state after all keys, that of earlier ones included."""
    keys, ids, order = x.keys, None, None
    (b, t, n, h), (_, s, k, v) = x.query.shape, keys.value.shape
    if s == 0:
        keys = extended(keys, 0, 1)
    query = x.query.reshape(b, t, k, n // k, h)
    maps = _maps.feature_maps(x._replace(keys=keys), estimate, exact)
    nothing = states.empty(keys.key, estimate.num_features, v, query, *keys, x.of_query, x.of_key)
    if pairs.segments is not None and s and t:
        order, query, keys, ids = _sorted(query, keys, pairs.segments)
    if exact.window:
        assert not isinstance(state, State)
        output, state = _window.attention(
            maps, query, keys, ids, state, nothing, estimate.scale, exact, pairs.is_causal, plan
        )
    else:
        assert not isinstance(state, WindowState)
        state, later = nothing if state is None else state, nothing
        if plan.axis_name is not None:
            beyond, later = _of_other_devices(maps[1], keys, nothing, pairs.is_causal, plan)
            state = states.combine(state, beyond)
        both_ways = ids is not None or (keys.log_decay is not None and not pairs.is_causal)
        if t and (both_ways or (pairs.is_causal and t != 1)):
            ends = state, None if pairs.is_causal else later
            rows, state = sweep(maps, query, keys, ends, plan, ids=ids)
            output = ratio(rows)
        else:
            state = _decay.faded(state, _decay.total(keys))  # one token, or none
            if plan.axis_name is None or pairs.is_causal:
                state = states.summarise(maps[1], keys, state, plan.block)
            operands = states.operand_dtype(keys.value)
            output = states.attend(maps[0], query, state, operands, plan.block)
    if order is not None:
        output = _take(output, jnp.argsort(order, axis=1)[:, order.shape[1] - t :])
    return output.reshape(b, t, n, v), state


def _of_other_devices(
    key_map, keys: Keys, nothing: State, is_causal: bool, plan: Plan
) -> tuple[State, State]:
    """The states of the keys that come before this device's, or of all, and of those after."""
    name, fading = cast(str, plan.axis_name), _decay.total(keys)
    own = states.summarise(key_map, _decay.as_seen(keys, "until"), nothing, plan.block)
    if is_causal:
        return earlier_devices(own, name, fading), nothing
    if fading is None:
        return over_devices(own, name), nothing
    as_seen_before = states.summarise(key_map, _decay.as_seen(keys, "since"), nothing, plan.block)
    return earlier_devices(own, name, fading), later_devices(as_seen_before, name, fading)


def _sorted(query, keys: Keys, segments):
    """The order of the tokens by segment; queries, keys and segments in this order."""
    ids, key_ids = segments
    t, s = query.shape[1], keys.key.shape[1]
    if key_ids is not None:
        # Keys and queries in one sequence: the key of a query does not exist, the query of a key
        # is cut.
        query, keys = pad(query, s, 0), extended(keys, 0, t)
        ids = jnp.concatenate([key_ids, ids], axis=1)
        time = jnp.concatenate([jnp.arange(s), jnp.arange(t)])
        # By number, then time, then the key before its query: causal order stays.
        order = jnp.lexsort((jnp.broadcast_to(time, ids.shape), ids), axis=1)
    else:
        order = jnp.argsort(ids, axis=1, stable=True)  # stable: causal order stays
    return order, *jax.tree.map(partial(_take, order=order), (query, keys, ids))


def _take(x: Array, order: Array) -> Array:
    """Tokens of (b, t, ...) in the order (b, t)."""
    index = order.reshape(*order.shape, *[1] * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=1)
