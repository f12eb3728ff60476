"""`performer_attention`, the public call, and the sums that compute it.

A call makes three values (`_checks`). `_maps` turns them into features of queries and of keys.
`state` sums over the keys, `_sweep` chunk by chunk, `_window` beside exact keys.
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
from performer.attention._checks import Estimate, Plan, Tokens
from performer.attention._maps import Arguments
from performer.attention._masks import Pairs
from performer.attention._sweep import sweep
from performer.attention.calibration import Calibration
from performer.attention.parallel import on_one_side, over_devices
from performer.attention.state import (
    Keys,
    State,
    WindowState,
    combine,
    extended,
    pad,
    ratio,
    summarise,
    take,
)
from performer.choices import unknown
from performer.features import FeatureMap
from performer.typing import Window, float32_or_wider

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
    local_window_size: int | tuple[int, int] | None = None,
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
    exact_keys: int = 0,
    exact_rows: int = 0,
) -> Float[Array, "*b t n v"] | tuple[Float[Array, "*b t n v"], State | WindowState]:
    """Estimate softmax(scale q k^T) v by m random features, in O((t + s) m) time and memory.

    Shapes are those of `jax.nn.dot_product_attention`. With a feature map that estimates softmax
    the output converges to it as m grows. With non-negative features the rows of the estimated
    attention matrix are non-negative and sum to 1 for any m. The backward pass computes features
    again, so its memory is linear, too. Gradients of any order, forward mode, `vmap`,
    `jax.checkpoint` and `scan` work. Batch, lengths and heads may be symbols of `jax.export`; the
    program then suits the platform that runs it.

    The implementations are

        direct   all features at once, and the whole kernel matrix if causal
        blocked  block by block
        robust   blocked, and accurate for queries and keys of any norm
        pallas   kernels for TPU and NVIDIA GPUs; features never leave the chip

    Causal and packed rows of `direct` and `blocked` are wrong, without a warning, for long queries
    and keys: from norms of about 10, after the factor sqrt(scale), if all keys that a query sees
    are opposite to it, from 35 if they are orthogonal. To detect this, compare with `robust`: only
    there the results differ by more than rounding.

    `pallas` runs forward and backward; measured on an H200, compiled but not yet run on a TPU. It
    supports positive features with the exact stabilizer, masks, lengths, log-weights, calibration
    and grouped heads, and first reverse-mode gradients: on a TPU in float32 or bfloat16 for h, v
    and m that 16 divides, on a GPU in bfloat16 for powers of two with h m and v m up to 8,192.
    Other calls and platforms are computed without it, with one warning. Several devices share the
    batch if the mesh is in context (`jax.set_mesh`, axes of type Auto) and its size divides the
    batch; else use `jax.shard_map`. `jax.export` requires a single platform.

    Args:
        query: (b, t, n, h), with any number of batch axes; float32, bfloat16, float16 or float64,
            like `key` and `value`. Batch and lengths may be 0.
        key: (b, s, k, h). Each key head serves n / k consecutive query heads (grouped heads).
        value: (b, s, k, v).
        frequencies: N(0, I_h) rows drawn by a coupling, rounded to the dtype of `query`: (m, h) for
            all heads, (k, m, h) for key heads, or (n, m, h) for query heads at the cost of n key
            heads.
        mask: keys that exist, True or non-zero; broadcasts to (b, 1, 1, s). A query without any
            key returns 0.
        is_causal: query i attends to the keys up to i. Later keys change nothing, bit for bit.
        scale: factor on q.k; 1 / sqrt(h) if None.
        key_value_seq_lengths: (b,), number of keys that exist.
        key_log_weights: floats added to the logits of a key, with gradients; -inf removes it. They
            broadcast to (b, s), or with all axes to (b, s, k). Float32 resolves exponents to 6e-8
            of their size; features that may be 0 (relu, arc_cosine) lose keys below e^-80 of the
            heaviest. The epsilon of `stabilizer="google"` is weighted, too.
        alibi_slopes: (n,) or (k,), slopes of the bias -slope |i - j| (Press et al. 2022, Eq. 1),
            with positions counted within segments. Requires t = s.
        log_decay: (b, t, k) or (b, t, n), broadcast over axes of 1, with gradients: logarithms
            a <= 0 of the decay, as of RetNet or gated linear attention. Key j has the weight
            e^{a_(j+1) + ... + a_i} for query i >= j, e^{a_(i+1) + ... + a_j} for i < j; -inf
            forgets all, and a_1 fades the state before the call. Requires t = s.
        segment_ids: integers (b, t) of packed sequences, in any order: a query attends to the keys
            of its own number. A pair (b, t), (b, s) serves cross attention, at the cost of t + s
            tokens; causal queries then see the keys j <= i.
        bias: must be None: linear attention cannot add a matrix to q.k.
        local_window_size: must be None: `exact_window` keeps far keys, estimated.
        shift: (h,) or (k, h), subtracted from the keys before the scale. It changes the variance of
            the estimate, not softmax attention.
        query_frequencies: frequencies of the queries where learned features differ from the keys'
            (`performer.refinement`), in the same shape. The estimate is biased. A calibration may
            then have shift and scale alone.
        weights: (m,), or a row for each draw: non-negative weights of the frequencies in the kernel
            (importance sampling). They are added to exponents, which float32 resolves to 6e-8 of
            the sum of |w.q|, |w.k|, |k|^2 / 2 and |log weight|.
        calibration: result of `performer.calibration`, for each key head or for all. Shift and
            scale go with every map that estimates softmax, a tilt or a proposal with "positive".
            It changes the variance of the estimate, not softmax attention.
        feature_map: "positive", "hyperbolic" (pairs [W, -W] for half the projections),
            "trigonometric" (attention may be negative, sums may vanish), "relu", "elu+1", or a
            `features.FeatureMap`. The last two words are kernels of their own; with frequencies
            `jnp.eye(h)` and scale 1 they give linear attention (Katharopoulos et al. 2020), where a
            query that shares no feature with a key returns 0.
        stabilizer: "exact", or "google" to replicate the public code of Choromanski et al. 2021:
            one maximum over keys and features, and 1e-6 added to every positive feature. That is
            biased, and causal attention depends on future keys through the maximum.
        implementation: a name of the table above; None is "blocked".
        initial_state: state of earlier keys, from `return_state`.
        return_state: also return the state after all keys.
        axis_name: mesh axis of `jax.shard_map` that shards the sequence, in order. Devices exchange
            states of m (v + 2) numbers for each batch entry and head, whatever the length.
        exact_window: w > 0 computes near keys by e^{q.k} itself, in one normaliser with the
            estimate of the others. Tokens (of a segment, in their order) form chunks of w; keys of
            the same and the previous chunk are near, those of the next too if not causal. Requires
            t = s, a map that estimates softmax, `weights` of the kernel itself (1 / m if None), and
            w that divides the tokens of a device.
        exact_first: number of first keys (of each segment) that are exact for all queries.
        exact_keys: f > 0 computes the f keys of each head with the largest weights by e^{q.k}
            itself, for all queries, in one normaliser with the estimate of the others. Weights are
            estimated sums over all queries of the attention to a key, in O((t + s) m). The choice
            has no gradient; f >= s is softmax attention. A head is that of the sums: a key head, or
            a query head with its own frequencies. Excludes causal attention, `segment_ids`, decay
            and states. Requires what the map of `exact_window` does.
        exact_rows: number of first queries, as class token and registers, whose attention is exact,
            at the cost of O(s) each. Excludes states. Requires what the map of `exact_window` does.

    Returns:
        (b, t, n, v) in the dtype of `value`, or with `return_state` a pair of that and the state.
        Logits, sums and states are float32, or float64 if `query`, `key` or `value` is. With
        bfloat16 values large products have bfloat16 operands and float32 sums.

    Raises:
        ValueError: for shapes, dtypes or names that do not fit, and for what linear attention
            cannot compute, such as a bias or a mask that differs between queries or heads. The
            message has the value and the fix.

    Example:
        >>> frequencies = performer.couplings.get("pm")(jax.random.key(0), 128, 64)
        >>> output = performer_attention(query, key, value, frequencies)

        Streaming, with a state of constant size:

        >>> out, state = performer_attention(q, k, v, w, is_causal=True, return_state=True)
        >>> out, state = performer_attention(
        ...     next_q, next_k, next_v, w, is_causal=True, initial_state=state, return_state=True
        ... )

        Relative positions, and another feature map:

        >>> slopes = 2.0 ** -jnp.linspace(1, 8, 12)
        >>> output = performer_attention(q, k, v, w, is_causal=True, alibi_slopes=slopes)
        >>> output = performer_attention(q, k, v, w, feature_map=performer.features.arc_cosine(1))
    """
    if bias is not None:
        raise ValueError(
            "linear attention cannot add a bias to q.k; use exact attention"
            " (jax.nn.dot_product_attention), key_log_weights for a bias of keys, or alibi_slopes"
            " for one of the distance"
        )
    if local_window_size is not None:
        raise ValueError(
            "performer_attention has no local_window_size; use exact_window=w, which computes near"
            " keys exactly and estimates the others"
        )
    if stabilizer not in ("exact", "google"):
        raise ValueError(unknown("stabilizer", stabilizer, ("exact", "google")))
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(unknown("implementation", implementation, IMPLEMENTATIONS))
    if axis_name is not None and key_value_seq_lengths is not None:
        raise ValueError("key_value_seq_lengths do not go with axis_name: shard a mask like keys")
    lead, given = query.shape[:-3], Tokens(query, key, value)
    tokens = _checks.with_one_batch_axis(given)
    shapes, dtype = (lead, tokens.query, tokens.key), float32_or_wider(*tokens)
    scale = float(query.shape[-1] ** -0.5 if scale is None else scale)
    if shift is not None:  # a calibration is after the factor sqrt(scale)
        if calibration is not None:
            raise ValueError("a calibration has its own shift: pass shift or calibration")
        calibration = Calibration(shift=shift.astype(dtype) * max(scale, 0.0) ** 0.5)
    exact = Window(exact_window, exact_first, exact_keys, exact_rows)
    estimate = Estimate(
        frequencies,
        query_frequencies,
        weights,
        calibration,
        features.get(feature_map),
        scale=scale,
        google=stabilizer == "google",
        itself=any(exact),
    )
    _checks.check_estimate(estimate, tokens)
    exists = _masks.key_mask(mask, key_value_seq_lengths, lead, tokens.key)
    pairs = Pairs(
        _masks.log_weights(key_log_weights, exists, lead, tokens.key, dtype),
        _masks.log_decay(alibi_slopes, log_decay, *shapes, dtype),
        _masks.segments(segment_ids, *shapes),
        is_causal,
    )
    plan = Plan(axis_name, return_state, robust=implementation == "robust")
    streams = return_state or initial_state is not None
    _checks.check_together(tokens, estimate, exact, pairs, streams, plan)
    if initial_state is not None:
        _checks.check_state(initial_state, given, estimate, exact, pairs)
    state = jax.tree.map(lambda x: _checks.one_axis(x, len(lead)), initial_state)
    if implementation == "pallas":
        plan = _fused.with_kernels(tokens, estimate, exact, pairs, streams, plan)
    call = tokens, estimate, pairs, state
    output, state = _where_it_runs(call, exact, plan, implementation == "direct")
    if len(lead) != 1:
        output, state = jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), (output, state))
    return cast(Any, (output, state) if return_state else output)


def attention_weights(
    query: Float[Array, "*b t n h"],
    key: Float[Array, "*b s k h"],
    frequencies: Float[Array, "*n m h"],
    **options: Any,
) -> Float[Array, "*b n t s"]:
    """Return the estimated attention matrix: `performer_attention` of unit values.

    Time and memory are quadratic. `options` and errors are those of `performer_attention`.

    Raises:
        ValueError: for `initial_state`, `return_state` or `axis_name`: the columns are the keys of
            this call.
    """
    for name in ("initial_state", "return_state", "axis_name"):
        if options.get(name) not in (None, False):
            raise ValueError(
                f"attention_weights has no {name}: its columns are the keys of this call; use"
                " performer_attention"
            )
    unit = jnp.eye(key.shape[-3], dtype=float32_or_wider(query, key))[:, None]
    value = jnp.broadcast_to(unit, (*key.shape[:-1], key.shape[-3]))
    output = cast(Array, performer_attention(query, key, value, frequencies, **options))
    return jnp.moveaxis(output, -2, -3)  # (b, t, n, s) -> (b, n, t, s)


def _where_it_runs(call, exact: Window, plan: Plan, direct: bool):
    """Attention in chunks and blocks for this machine; for the one that runs it if exported."""
    (query, key, _), estimate, pairs, _ = call
    sweeping = pairs.is_causal or pairs.segments is not None
    batch_and_heads = key.shape[0] * key.shape[2]

    def on(platform):
        sizes = platform, batch_and_heads, estimate.num_features, sweeping
        whole = 2 * (query.shape[1] + key.shape[1])
        chunk, block = (whole, whole) if direct else _sizes.chunk_and_block(*sizes)
        return partial(_attention, exact, replace(plan, chunk=chunk, block=block))

    if any(map(is_symbolic_dim, (*query.shape, *key.shape))):  # maybe for several platforms
        return jax.lax.platform_dependent(*call, cpu=on("cpu"), default=on("other"))
    return on(_sizes.platform())(*call)


@partial(jax.jit, static_argnums=0)
def _attention(
    exact: Window,
    plan: Plan,
    tokens: Tokens,
    estimate: Estimate,
    pairs: Pairs,
    state: State | WindowState | None,
) -> tuple[Array, State | WindowState | None]:
    arguments, wide = _maps.arguments(tokens, estimate, pairs), float32_or_wider(*tokens)
    if plan.kernel is not None:

        def ordinary(x: Arguments) -> Array:  # kernels support neither states nor segments
            return _sums(x, estimate, exact, pairs, None, plan)[0].astype(tokens.value.dtype)

        return _fused.attention(arguments, ordinary, plan.kernel), None
    output, state = _sums(arguments, estimate, exact, pairs, _heads_first(state, wide), plan)
    state = _heads_first(state, wide) if plan.return_state else None
    return output.astype(tokens.value.dtype), state


def _heads_first(state: State | WindowState | None, dtype: jnp.dtype):
    """Transpose states (b, k, m) to (k, b, m), or back."""
    if isinstance(state, WindowState):
        return state._replace(far=_heads_first(state.far, dtype))
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).astype(dtype), state)


def _sums(
    x: Arguments,
    estimate: Estimate,
    exact: Window,
    pairs: Pairs,
    state: State | WindowState | None,
    plan: Plan,
) -> tuple[Array, State | WindowState | None]:
    """The output (b, t, n, v), and the state after the earlier and these keys."""
    (window, _, f, rows), keys, ids, order = exact, x.keys, None, None
    (b, t, n, h), (_, s, k, v) = x.query.shape, keys.value.shape
    if s == 0:
        x = x._replace(keys=(keys := extended(keys, 0, 1)))
    query = x.query.reshape(b, t, k, n // k, h)
    maps = _maps.feature_maps(x, estimate)
    nothing = states.empty(keys.key, estimate.num_features, v, query, *keys, x.w_query, x.w_key)
    if pairs.segments is not None and s and t:
        order, query, keys, ids = _sorted(query, keys, pairs.segments)
    chosen = None
    if f and t:
        fixed = _maps.feature_maps(jax.lax.stop_gradient(x), estimate)
        chosen, keys = _window.heaviest(fixed, query, keys, nothing, f, plan)
    if window:
        assert not isinstance(state, State)
        how = estimate.scale, exact, pairs.is_causal, plan
        call = _window.Call(maps, query, keys, nothing, *how, chosen)
        output, state = _window.attention(call, ids, state)
    else:
        assert not isinstance(state, WindowState)
        state, later = nothing if state is None else state, nothing
        if plan.axis_name is not None:
            beyond, later = _of_other_devices(maps[1], keys, nothing, pairs.is_causal, plan)
            state = combine(state, beyond)
        both_ways = ids is not None or (keys.log_decay is not None and not pairs.is_causal)
        if t and (both_ways or (pairs.is_causal and t != 1)):
            ends = state, None if pairs.is_causal else later
            sums, state = sweep(maps, query, keys, ends, plan, ids=ids)
            output = ratio(sums)
        else:
            state = _decay.faded(state, _decay.total(keys))  # at most one token
            if plan.axis_name is None or pairs.is_causal:
                state = summarise(maps[1], keys, state, plan.block)
            operands, look_up = states.operand_dtype(keys.value), maps[0]
            if chosen is not None:
                look_up, state = _window.beside_exact(look_up, state, chosen, estimate.scale)
            output = states.attend(look_up, query, state, operands, plan.block)
    if order is not None:
        output = take(output, jnp.argsort(order, axis=1)[:, order.shape[1] - t :])
    if rows:
        output = _window.with_rows(output, x, estimate.scale, rows, pairs, plan.axis_name)
    return output.reshape(b, t, n, v), state


def _of_other_devices(
    key_map, keys: Keys, nothing: State, is_causal: bool, plan: Plan
) -> tuple[State, State]:
    """States of the keys before this device's, or of all devices, and of those after it."""
    name = cast(str, plan.axis_name)
    if keys.log_decay is None and not is_causal:
        return over_devices(summarise(key_map, keys, nothing, plan.block), name), nothing
    options = nothing, plan.block, name
    before = on_one_side(key_map, keys, "until", *options)
    return before, nothing if is_causal else on_one_side(key_map, keys, "since", *options)


def _sorted(query, keys: Keys, segments):
    """The order of the tokens by segment; queries, keys and segments in this order."""
    ids, key_ids = segments
    t, s = query.shape[1], keys.key.shape[1]
    if key_ids is not None:
        # One sequence of s keys without queries (cut at the end) and t queries without keys.
        query, keys = pad(query, s, 0), extended(keys, 0, t)
        ids = jnp.concatenate([key_ids, ids], axis=1)
        time = jnp.concatenate([jnp.arange(s), jnp.arange(t)])
        # By number, then time, then the key before its query: causal order stays.
        order = jnp.lexsort((jnp.broadcast_to(time, ids.shape), ids), axis=1)
    else:
        order = jnp.argsort(ids, axis=1, stable=True)  # stable: causal order stays
    return order, *jax.tree.map(partial(take, index=order), (query, keys, ids))
