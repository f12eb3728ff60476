"""`performer_attention`, the public call, and the sums that compute it.

A call makes its values (`values`) and refuses what does not fit (`refusals`). `maps` turns them
into features. Attention that depends on positions goes chunk by chunk (`sweep`, `exact`): each part
returns rows (`state.State`), `combine` adds them, and `ratio` divides. Other attention is one state
of all keys, which the queries look up block by block (`state.attend`).
"""

import warnings
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypedDict, Unpack, cast, overload

import jax
import jax.numpy as jnp
from jax.core import max_dim
from jax.export import is_symbolic_dim
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from performer import features
from performer.attention import decay, masks, refusals, sizes
from performer.attention import state as states
from performer.attention.exact import (
    Maps,
    Selected,
    counted,
    exact_rows,
    existing,
    first_keys,
    heavy_keys,
    stream,
)
from performer.attention.kernels import which
from performer.attention.maps import Arguments, arguments, feature_maps
from performer.attention.parallel import earlier_devices, over_devices
from performer.attention.state import (
    Features,
    Keys,
    Queries,
    State,
    WindowState,
    attend,
    by_block,
    combine,
    extended,
    moved_once,
    pad,
    ratio,
    summarise,
    take,
)
from performer.attention.sweep import Near, sweep
from performer.attention.values import Estimate, Exact, Pairs, Plan, Tokens
from performer.calibration import Calibration
from performer.features import FeatureMap
from performer.numerics import operand_dtype
from performer.typing import float32_or_wider

Implementation = Literal["direct", "blocked", "robust", "pallas"]
PLATFORMS = "cpu", "gpu", "tpu"


class Options(TypedDict, total=False):
    """Types of the keywords of `performer_attention`; it documents them."""

    mask: ArrayLike | None
    is_causal: bool
    scale: float | None
    key_value_seq_lengths: ArrayLike | None
    key_log_weights: ArrayLike | None
    alibi_slopes: ArrayLike | None
    log_decay: ArrayLike | None
    segment_ids: ArrayLike | tuple[ArrayLike, ArrayLike] | None
    query_frequencies: Float[Array, "..."] | None
    weights: Float[Array, "..."] | None
    calibration: Calibration | None
    feature_map: str | FeatureMap
    stabilizer: Literal["exact", "google"]
    implementation: Implementation | None
    initial_state: State | WindowState | None
    axis_name: str | None
    exact_window: int
    exact_first: int
    exact_keys: int
    exact_rows: int


@overload
def performer_attention(
    query: Array,
    key: Array,
    value: Array,
    frequencies: Array | None,
    *,
    return_state: Literal[False] = False,
    **options: Unpack[Options],
) -> Array: ...


@overload
def performer_attention(
    query: Array,
    key: Array,
    value: Array,
    frequencies: Array | None,
    *,
    return_state: Literal[True],
    **options: Unpack[Options],
) -> tuple[Array, State | WindowState]: ...


@refusals.explained
def performer_attention(
    query: Float[Array, "*b t n h"],
    key: Float[Array, "*b s k h"],
    value: Float[Array, "*b s k v"],
    frequencies: Float[Array, "*n m h"] | None,
    *,
    mask: ArrayLike | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    key_log_weights: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    log_decay: ArrayLike | None = None,
    segment_ids: ArrayLike | tuple[ArrayLike, ArrayLike] | None = None,
    query_frequencies: Float[Array, "..."] | None = None,
    weights: Float[Array, "*w m"] | None = None,
    calibration: Calibration | None = None,
    feature_map: str | FeatureMap = "positive",
    stabilizer: Literal["exact", "google"] = "exact",
    implementation: Implementation | None = None,
    initial_state: State | WindowState | None = None,
    return_state: bool = False,
    axis_name: str | None = None,
    exact_window: int = 0,
    exact_first: int = 0,
    exact_keys: int = 0,
    exact_rows: int = 0,
) -> Float[Array, "*b t n v"] | tuple[Float[Array, "*b t n v"], State | WindowState]:
    """Estimate softmax(scale q k^T) v by m random features, in O((t + s) m) time and memory.

    Shapes are as in `jax.nn.dot_product_attention`: tokens before heads. Transpose (batch, heads,
    tokens, width), the order of PyTorch. With a feature map that estimates softmax
    the output converges to it as m grows. With non-negative features the rows of the estimated
    attention matrix are non-negative and sum to 1 for any m. The backward pass computes features
    again, so its memory is linear. Gradients of any order, forward mode, `vmap`, `jax.checkpoint`
    and `scan` work; on a GPU name `implementation="blocked"` for forward mode and second
    derivatives, which kernels do not have. Batch, lengths and heads may be symbols of `jax.export`;
    the program then suits the platform that runs it.

    The implementations are

        direct   all features at once, and the whole kernel matrix if causal
        blocked  block by block
        robust   like blocked, but accurate for queries and keys of any norm
        pallas   kernels for TPU and NVIDIA GPUs; features never leave the chip

    None is `robust` with an exact window, else `blocked`, or a kernel (below). Causal and packed
    rows of `direct` and `blocked` can be wrong, without a warning, for queries and keys of large
    norm: from about 10, after the factor sqrt(scale), if all keys that a query sees are opposite to
    it, from 35 if they are orthogonal. To detect this, compare with `robust`: only there the
    results differ by more than rounding.

    `pallas` runs forward and backward; measured on an H200 in bfloat16, compiled but not yet run on
    a TPU. It supports positive features with the exact stabilizer, masks, lengths, log-weights,
    calibration and grouped heads, and first reverse-mode gradients: on a TPU in float32 or
    bfloat16, on a GPU in bfloat16 or float16 (products in TF32). Sizes are padded, on a TPU to
    multiples of 16, on a GPU to powers of two with h m and v m up to 8,192.
    Other calls and platforms are computed without it, with one warning. Several devices share the
    batch if the mesh is in context (`jax.set_mesh`, axes of type Auto) and its size divides the
    batch; else use `jax.shard_map`. `jax.export` requires a single platform.

    Linear attention cannot add a bias matrix to q.k, apply a mask that differs between queries, or
    drop attention weights. Instead of a bias use `key_log_weights` or `alibi_slopes`; instead of a
    local window `exact_window`, which keeps far keys, estimated.

    Args:
        query: (b, t, n, h), with any number of batch axes; float32, bfloat16, float16 or float64,
            like `key` and `value`. Batch and lengths may be 0.
        key: (b, s, k, h). Each key head serves n / k consecutive query heads (grouped heads).
        value: (b, s, k, v).
        frequencies: N(0, I_h) rows drawn by a coupling, rounded to the dtype of `query`: (m, h) for
            all heads, (k, m, h) for key heads, or (n, m, h) for query heads at the cost of n key
            heads. None has no features: only the pairs of an `exact_window`, blocks of windows, are
            attended to.
        mask: keys that exist, True or non-zero; broadcasts to (b, 1, 1, s). A query without any
            key returns 0.
        is_causal: query i attends to the keys up to i. Later finite keys change nothing, bit for
            bit. NaN or inf in a key spreads to the whole sequence; mask it out.
        scale: factor on q.k, positive; 1 / sqrt(h) if None.
        key_value_seq_lengths: (b,), number of keys that exist.
        key_log_weights: floats added to the logits of a key, with gradients; -inf removes it. They
            broadcast to (b, s), or with all axes to (b, s, k). Float32 resolves exponents to 6e-8
            of their size. With `relu` and `arc_cosine`, keys lighter than e^-80 times the heaviest
            are dropped. The epsilon of `stabilizer="google"` is also weighted.
        alibi_slopes: (n,) or (k,), slopes of the bias -slope |i - j| (Press et al. 2022, Eq. 1),
            with positions counted within segments. Requires t = s.
        log_decay: (b, t, k) or (b, t, n), broadcast over axes of 1, with gradients: logarithms
            a <= 0 of the decay of a head at a token, the forget gate of forgetting attention (Lin
            et al. 2025). Key j has the weight e^{a_(j+1) + ... + a_i} for query i >= j,
            e^{a_(i+1) + ... + a_j} for i < j; -inf forgets all, and a_1 fades the state before the
            call. Gates for each channel (gated linear attention) are not supported. Requires t = s.
        segment_ids: integers (b, t) of packed sequences, in any order: a query attends to the keys
            of its own number. A pair (b, t), (b, s) serves cross attention, at the cost of t + s
            tokens; causal queries then see the keys j <= i. NaN in one segment spreads to others.
        query_frequencies: frequencies of the queries where learned features differ from the keys'
            (`performer.refinement`), in the same shape. The estimate is biased. A calibration may
            then have shift and scale alone.
        weights: (m,), or a row for each draw: non-negative weights of the frequencies in the kernel
            (importance sampling). They are added to exponents, which float32 resolves to 6e-8 of
            the sum of |w.q|, |w.k|, |k|^2 / 2 and |log weight|.
        calibration: result of `performer.calibration`, for each key head or for all. Shift and
            scale can be combined with every map that estimates softmax, a tilt or a proposal only
            with "positive". It changes the variance of the estimate, not softmax attention.
        feature_map: "positive", "hyperbolic" (pairs [W, -W] for half the projections; with a
            coupling that has the pairs already, such as "pm-antithetic", it repeats features),
            "trigonometric" (attention may be negative, sums may vanish), "relu", "elu+1", or a
            `features.FeatureMap`. The last two words are kernels of their own; with frequencies
            `jnp.eye(h)` and scale 1 they give linear attention (Katharopoulos et al. 2020), where a
            query that shares no feature with a key returns 0.
        stabilizer: "exact", or "google" to replicate the public code of Choromanski et al. 2021:
            one maximum over features and keys (causal: the keys up to the last query), and 1e-6
            added to every positive feature. That is biased, and causal attention depends on future
            keys through the maximum.
        implementation: a name of the table above. None is "pallas" on an NVIDIA GPU in bfloat16
            with sizes that need no padding, if the kernels support the call, and a single device or
            the mesh in context is known to compute it; else "blocked". `explain` has the reason.
        initial_state: state of earlier keys, from `return_state`.
        return_state: also return the state after all keys.
        axis_name: mesh axis of `jax.shard_map` that shards the sequence, in order. Devices exchange
            states of m (v + 2) numbers for each batch entry and head, whatever the length. Cannot
            be combined with exact pairs, decay or segments. Causal attention requires t = s.
        exact_window: w > 0 computes near keys by e^{q.k} itself, in one normaliser with the
            estimate of the others. Tokens form windows of w; keys of the same and the previous
            window are near, and keys of the next if not causal. These are blocks: in a sliding
            window each query would have as many near keys. Packed sequences are cut one after
            another, in the order of their numbers, so their near keys depend on the lengths
            before them unless w divides these. Masked tokens count as positions: put padding at the
            end. Requires t = s, a map that estimates softmax, and `weights` of the kernel itself
            (1 / m if None).
        exact_first: number of first keys (of each segment) that are exact for all queries, among
            those that exist. Requires an `exact_window`.
        exact_keys: f > 0 computes the f keys of each head with the largest weights by e^{q.k}
            itself, for all queries, in one normaliser with the estimate of the others. Weights are
            estimated sums over all queries of the attention to a key, in O((t + s) m). The choice
            has no gradient; f >= s is softmax attention. A head is a key head, or a query head with
            its own frequencies. Cannot be combined with causal attention,
            `segment_ids`, decay or states. Requires what the map of `exact_window` does.
        exact_rows: number of first queries, such as class token and registers, with exact
            attention, at the cost of O(s) each. Cannot be combined with causal attention,
            `segment_ids`, decay or states. Requires what the map of `exact_window` does.

    Returns:
        (b, t, n, v) in the dtype of `value`, or with `return_state` a pair of that and the state.
        Logits, sums and states are float32, or float64 if `query`, `key` or `value` is. With
        bfloat16 values large products have bfloat16 operands and float32 sums.

    Raises:
        ValueError: for shapes, dtypes or names that do not fit, for options that exclude each
            other (`performer.attention.refusals`), and for a mask that differs between queries or
            heads. The message has the value and the fix.
        TypeError: for an unknown keyword. The message explains keywords of other attention
            functions.

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
    refusals.check_arrays(query, key, value, frequencies)
    refusals.check_words(stabilizer, implementation, is_causal, mask, calibration)
    scale = refusals.positive_scale(scale, query.shape[-1])
    numbers = dict(window=exact_window, first=exact_first, keys=exact_keys, rows=exact_rows)
    exact = Exact(**{name: refusals.number(f"exact_{name}", x) for name, x in numbers.items()})
    lead, inputs = query.shape[:-3], Tokens(query, key, value)
    tokens = refusals.with_one_batch_axis(inputs)
    none = jnp.zeros((1, query.shape[-1]), query.dtype), jnp.zeros(1)  # one feature of weight 0
    w, feature_weights = none if frequencies is None else (frequencies, weights)
    estimate = Estimate(
        w,
        query_frequencies,
        feature_weights,
        calibration,
        features.get(feature_map),
        scale=scale,
        stabilizer=stabilizer,
        absolute=any(exact),
    )
    refusals.check_estimate(estimate, tokens)
    shapes, dtype = (lead, tokens.query, tokens.key), float32_or_wider(*tokens)
    pairs = Pairs(
        masks.log_weights(key_log_weights, lead, tokens.key, dtype),
        masks.key_mask(mask, key_value_seq_lengths, lead, tokens.key),
        masks.log_decay(alibi_slopes, log_decay, *shapes, dtype),
        masks.segments(segment_ids, *shapes),
        bool(is_causal),
    )
    streams = return_state or initial_state is not None
    decayed = dict(alibi_slopes=alibi_slopes, log_decay=log_decay)
    call = refusals.Call(
        t=tokens.query.shape[1],
        s=tokens.key.shape[1],
        feature_map=estimate.feature_map,
        stabilizer=stabilizer,
        is_causal=pairs.is_causal,
        exact=exact,
        calibrated=calibration is not None,
        sampled=calibration is not None and calibration.changes_law,
        query_frequencies=query_frequencies is not None,
        weighted=weights is not None,
        lengths=key_value_seq_lengths is not None,
        packed=pairs.segments is not None,
        cross_packed=pairs.segments is not None and pairs.segments[1] is not None,
        decay=next((name for name, x in decayed.items() if x is not None), ""),
        streams=streams,
        axis_name=axis_name,
        featureless=frequencies is None,
    )
    refusals.check_together(call)
    if initial_state is not None:
        refusals.check_state(initial_state, inputs, estimate, exact, pairs)
    state = jax.tree.map(lambda x: refusals.one_axis(x, len(lead)), initial_state)
    # With a window what is left to the features is small: a lost row would be wrong for no gain.
    robust = implementation == "robust" or (implementation is None and exact.window > 0)
    plan = Plan(axis_name, return_state, robust)
    has_state = streams or axis_name is not None
    plan = which.planned(
        plan, which.Call(tokens, estimate, exact, pairs, has_state, implementation)
    )
    arrays = tokens, estimate, pairs, state
    output, state = _on_platform(arrays, exact, plan, implementation == "direct")
    if len(lead) != 1:
        output, state = jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), (output, state))
    return cast(Any, (output, state) if return_state else output)


def attention_weights(
    query: Float[Array, "*b t n h"],
    key: Float[Array, "*b s k h"],
    frequencies: Float[Array, "*n m h"] | None,
    **options: Any,
) -> Float[Array, "*b n t s"]:
    """Return the estimated attention matrix: `performer_attention` of unit values.

    Time and memory are quadratic. `options` and errors as in `performer_attention`.

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
    output = performer_attention(query, key, value, frequencies, **options)
    return jnp.moveaxis(output, -2, -3)  # (b, t, n, s) -> (b, n, t, s)


def explain(
    query: Array | jax.ShapeDtypeStruct,
    key: Array | jax.ShapeDtypeStruct,
    value: Array | jax.ShapeDtypeStruct,
    frequencies: Array | jax.ShapeDtypeStruct | None,
    **options: Unpack[Options],
) -> str:
    """Return how `performer_attention` computes a call on a CPU, a GPU and a TPU, and why.

    Nothing is computed: arguments may be `jax.ShapeDtypeStruct`. Arguments, `options` and errors as
    in `performer_attention`. Devices and mesh are those of this process.

    Example:
        >>> x = jax.ShapeDtypeStruct((8, 1024, 12, 64), jnp.float32)
        >>> w = jax.ShapeDtypeStruct((128, 64), jnp.float32)
        >>> performer.attention.explain(x, x, x, w, exact_window=16).splitlines()
        ['cpu (here): robust, no kernel for a CPU',
         'gpu: robust, no kernel for exact_window=16',
         'tpu: robust, no kernel for exact_window=16']
    """
    with which.noted() as calls, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that there is no kernel
        jax.eval_shape(partial(performer_attention, **options), query, key, value, frequencies)
    (call, _), here = calls[0], sizes.platform()
    paths = {name + " (here)" * (name == here): which.path(call, name) for name in PLATFORMS}
    return "\n".join(f"{name}: {path}" for name, path in paths.items())


def _on_platform(arrays, exact: Exact, plan: Plan, direct: bool):
    """Attention in the chunks and blocks of this machine; if exported, of the one that runs it."""
    (query, key, _), estimate, pairs, _ = arrays
    sweeping = pairs.is_causal or pairs.segments is not None or exact.window > 0
    batch_and_heads = key.shape[0] * key.shape[2]

    def on(platform):
        whole = 2 * (query.shape[1] + key.shape[1]) + 1  # not 0 without tokens
        chunk, block = whole, whole
        if not direct:
            length = max_dim(query.shape[1], key.shape[1])
            given = platform, length, batch_and_heads, estimate.num_features, sweeping
            chunk, block = sizes.chunk_and_block(*given)
        return partial(_attention, exact, replace(plan, chunk=chunk, block=block))

    if any(map(is_symbolic_dim, (*query.shape, *key.shape))):  # maybe for several platforms
        return jax.lax.platform_dependent(*arrays, cpu=on("cpu"), default=on("other"))
    return on(sizes.platform())(*arrays)


@partial(jax.jit, static_argnums=0)
def _attention(
    exact: Exact,
    plan: Plan,
    tokens: Tokens,
    estimate: Estimate,
    pairs: Pairs,
    state: State | WindowState | None,
) -> tuple[Array, State | WindowState | None]:
    x, wide = arguments(tokens, estimate, pairs), float32_or_wider(*tokens)
    if plan.kernel is not None:

        def without_kernel(x: Arguments) -> Array:  # kernels support neither states nor segments
            return _attend(x, estimate, exact, pairs, None, plan)[0].astype(tokens.value.dtype)

        return which.attention(x, without_kernel, plan.kernel), None
    output, state = _attend(x, estimate, exact, pairs, _heads_first(state, wide), plan)
    state = _heads_first(state, wide) if plan.return_state else None
    return output.astype(tokens.value.dtype), state


def _heads_first(state: State | WindowState | None, dtype: jnp.dtype):
    """Transpose states (b, k, m) to (k, b, m), or back."""
    if isinstance(state, WindowState):
        return state._replace(far=_heads_first(state.far, dtype))
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).astype(dtype), state)


def _attend(
    x: Arguments,
    estimate: Estimate,
    exact: Exact,
    pairs: Pairs,
    state: State | WindowState | None,
    plan: Plan,
) -> tuple[Array, State | WindowState | None]:
    """The output (b, t, n, v), and the state after the earlier and these keys."""
    (b, t, n, h), (_, s, k, v), scale = x.query.shape, x.keys.value.shape, estimate.scale
    keys = x.keys if s else extended(x.keys, 0, 1)
    many_causal = pairs.is_causal and t != 1
    faded = not pairs.is_causal and keys.log_decay is not None
    packed = pairs.segments is not None and s and t
    by_position = exact.window or packed or many_causal or faded
    x = _copies_per_device(x._replace(keys=keys), (pairs.segments, state) if by_position else None)
    keys, is_causal = x.keys, pairs.is_causal
    apart = jax.tree.map(lambda query: query.reshape(b, t, k, n // k, h), (x.query, x.given))
    queries = Queries(*apart)
    maps, dtype = feature_maps(x, estimate), operand_dtype(keys.value)
    nothing = states.empty(keys.key, estimate.num_features, v, x.query, *keys, x.w_query, x.w_key)
    streams = state is not None or plan.return_state
    order = segments = None
    if packed:
        order, queries, keys, segments = _sorted(queries, keys, pairs.segments)
    exists = existing(keys)
    selected = []  # keys that every query sees exactly
    if exact.keys and t:
        queries = queries._replace(query=moved_once(queries.query))
        keys = keys._replace(key=moved_once(keys.key))
        fixed = feature_maps(jax.lax.stop_gradient(x), estimate)
        heavy, keys = heavy_keys(fixed, queries.query, keys, nothing, exact.keys, plan)
        selected.append(heavy)
    if exact.first and t and not streams:  # a stream has them in its state
        first, keys = first_keys(keys, exact.first, exists, segments, is_causal)
        selected.append(first)
    if (exact.window and streams) or (t and by_position):
        ends = nothing, None if is_causal else nothing
        given = queries, keys, state, ends, exact, scale, segments
        rows, state = _chunk_by_chunk(maps, *given, plan, streams)
        for some in selected:
            rows = combine(rows, exact_rows(queries.exact, some, scale))
        output = ratio(rows).astype(dtype)
    else:
        assert not isinstance(state, WindowState)
        state = nothing if state is None else state
        state = _with_all_keys(maps[1], keys, state, nothing, plan, is_causal)
        heavy = selected[0].keys if selected else None

        def block_rows(queries):
            return attend(maps[0], queries, state, dtype, heavy, scale).astype(dtype)

        output = by_block(block_rows, queries, plan.block)
    if order is not None:
        output = take(output, jnp.argsort(order, axis=1)[:, order.shape[1] - t :])
    if r := exact.rows:
        rows = exact_rows(queries.exact[:, :r], Selected(counted(x.keys)), scale)
        output = output.at[:, :r].set(ratio(rows).astype(dtype))
    return output.reshape(b, t, n, v), state


def _copies_per_device(x: Arguments, others: Any) -> Arguments:
    """Arrays that devices share, as a copy for each device; with `others`, if not None, all alike.

    A gradient of shared arrays is a sum over devices. It must not stand in a loop, where it would
    be computed each time, or in a branch that some devices do not take: the others would wait.
    """
    like = () if others is None else (x, others)
    query, w_query, shift, given = states.varying((x.query, x.w_query, x.shift, x.given), *like)
    keys, w_key, feature_bias = states.varying((x.keys, x.w_key, x.feature_bias), *like)
    return Arguments(query, keys, w_query, w_key, feature_bias, shift, given)


def _chunk_by_chunk(
    maps: Maps,
    queries: Queries,
    keys: Keys,
    state: State | WindowState | None,
    ends: tuple[State, State | None],
    exact: Exact,
    scale: float,
    segments: Array | None,
    plan: Plan,
    streams: bool,
) -> tuple[State, State | WindowState]:
    """Rows (b, t, k, g) of attention that depends on positions, and the state after all keys.

    `ends` are states of no keys before and after the sequence; causal: None after it.
    """
    if exact.window and streams:
        assert not isinstance(state, State)
        return stream(maps, queries, keys, ends[0], exact, scale, plan, state)
    near = None
    if exact.window:
        keys = counted(keys)
        near = Near(keys, min(exact.window, queries.query.shape[1]), scale)
    assert not isinstance(state, WindowState)
    before = ends[0] if state is None else state
    if plan.axis_name is not None:  # causal
        shard = summarise(maps[1], keys, ends[0], plan.block)
        before = combine(before, earlier_devices(shard, plan.axis_name))
    return sweep(maps, queries, keys, (before, ends[1]), plan, segments=segments, near=near)


def _with_all_keys(
    key_map: Features, keys: Keys, state: State, nothing: State, plan: Plan, is_causal: bool
) -> State:
    """The state of the earlier keys and of these, of all devices if the sequence is split."""
    if plan.axis_name is None:
        state = decay.faded(state, decay.total(keys))  # decay has at most one token here
        return summarise(key_map, keys, state, plan.block)
    shard = summarise(key_map, keys, nothing, plan.block)
    if is_causal:  # one token on each device
        return combine(shard, earlier_devices(shard, plan.axis_name))
    every = over_devices(shard, plan.axis_name)
    # A sum over devices is known to be the same on all of them; with `nothing` it would not be.
    return every if state is nothing else combine(state, every)


def _sorted(queries: Queries, keys: Keys, segments):
    """The order of the tokens by segment; queries, keys and segments in this order."""
    ids, key_ids = segments
    t, s = queries.query.shape[1], keys.key.shape[1]
    if key_ids is not None:
        # One sequence of s keys without queries (cut at the end) and t queries without keys.
        queries = jax.tree.map(lambda x: pad(x, s, 0), queries)
        keys = extended(keys, 0, t)
        ids = jnp.concatenate([key_ids, ids], axis=1)
        time = jnp.concatenate([jnp.arange(s), jnp.arange(t)])
        # By number, then time, then the key before its query: causal order stays.
        order = jnp.lexsort((jnp.broadcast_to(time, ids.shape), ids), axis=1)
    else:
        order = jnp.argsort(ids, axis=1, stable=True)  # stable: causal order stays
    return order, *jax.tree.map(partial(take, index=order), (queries, keys, ids))
