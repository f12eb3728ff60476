"""`performer_attention`, the public call, and the sums that compute it.

A call makes its values (`values`, `bias`), refuses what does not fit (`refusals`) and plans the
sums (`kernels.which`). `maps` turns tokens into features. Attention that depends on positions goes
chunk by chunk (`sweep`, `exact`): each part returns rows (`state.State`), `combine` adds them, and
`ratio` divides. Other attention is one state of all keys, which the queries look up block by block
(`state.attend`). On a CPU some heads are computed at a time (`_by_heads`).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, cast, overload

import jax
import jax.numpy as jnp
from jax.core import max_dim
from jax.export import is_symbolic_dim
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from performer.attention import decay, masks, refusals, sizes
from performer.attention import state as states
from performer.attention.bias import Bias
from performer.attention.exact import (
    CHOSEN,
    Maps,
    Selected,
    attend_once,
    counted,
    exact_rows,
    existing,
    first_keys,
    heavy_keys,
)
from performer.attention.exact import stream as stream_of_window
from performer.attention.kernels import parts, which
from performer.attention.maps import Arguments, arguments, feature_maps
from performer.attention.matrix import attention_matrix
from performer.attention.parallel import earlier_devices, over_devices
from performer.attention.state import (
    Keys,
    Map,
    Queries,
    State,
    WindowState,
    attend,
    by_block,
    combine,
    extended,
    look_up,
    moved_once,
    pad,
    ratio,
    summarise,
    take,
)
from performer.attention.sweep import Near, sweep
from performer.attention.values import (
    Call,
    Exact,
    Features,
    Pairs,
    Plan,
    Tokens,
    as_features,
    state_heads,
)
from performer.numerics import operand_dtype
from performer.typing import float32_or_wider

Implementation = Literal["blocked", "robust", "pallas"]
PLATFORMS = "cpu", "gpu", "tpu"


class Options(TypedDict, total=False):
    """Types of the keywords of `performer_attention`; it documents them."""

    bias: Bias | None
    mask: ArrayLike | None
    is_causal: bool
    scale: float | None
    key_value_seq_lengths: ArrayLike | None
    segment_ids: ArrayLike | tuple[ArrayLike, ArrayLike] | None
    axis_name: str | None
    implementation: Implementation | None


@overload
def performer_attention(
    query: Array,
    key: Array,
    value: Array,
    features: Features | Array,
    *,
    return_residual: Literal[False] = False,
    **options: Unpack[Options],
) -> Array: ...


@overload
def performer_attention(
    query: Array,
    key: Array,
    value: Array,
    features: Features | Array,
    *,
    return_residual: Literal[True],
    **options: Unpack[Options],
) -> tuple[Array, Array]: ...


@refusals.explained
def performer_attention(
    query: Float[Array, "*b t n h"],
    key: Float[Array, "*b s k h"],
    value: Float[Array, "*b s k v"],
    features: Features | Float[Array, "*n m h"],
    *,
    bias: Bias | None = None,
    mask: ArrayLike | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    segment_ids: ArrayLike | tuple[ArrayLike, ArrayLike] | None = None,
    axis_name: str | None = None,
    implementation: Implementation | None = None,
    return_residual: bool = False,
) -> Float[Array, "*b t n v"] | tuple[Float[Array, "*b t n v"], Float[Array, "*b t n"]]:
    """Estimate softmax(scale q k^T + bias) v by m random features, in O((t + s) m) time and memory.

    Shapes and keywords are those of `jax.nn.dot_product_attention`: tokens before heads. Transpose
    (batch, heads, tokens, width), the order of PyTorch. With a feature map that estimates softmax
    the output converges to it as m grows. With non-negative features the rows of the estimated
    attention matrix are non-negative and sum to 1 for any m. The backward pass computes features
    again, so its memory is linear. Gradients of any order, forward mode, `vmap`, `jax.checkpoint`
    and `scan` work; on a GPU name `implementation="blocked"` for forward mode and second
    derivatives, which kernels do not have. Batch, lengths and heads may be symbols of `jax.export`;
    the program then suits the platform that runs it.

    The implementations are

        blocked  block by block
        robust   like blocked, but accurate for queries and keys of any norm
        pallas   kernels for TPU and NVIDIA GPUs; features never leave the chip

    None is `robust` with an exact window, else `blocked`, or a kernel (below). Causal and packed
    rows, and rows with decay, are NaN in `blocked` and `pallas` where float32 cannot hold their
    sums: for queries and keys of a norm from about 10, after the factor sqrt(scale), if all keys
    that a query sees are opposite to it, from 25 if they are orthogonal. `robust` computes them.

    `pallas` runs forward and backward; plain calls were measured on an H200 in bfloat16, all were
    compiled but not yet run on a TPU. It supports positive features, masks, lengths, biases of
    keys, calibration, grouped heads, exact keys and rows, states, `axis_name`, residuals, and first
    reverse-mode gradients: on a TPU in float32 or bfloat16, on a GPU in bfloat16 or float16
    (products in TF32). Sizes are padded, on a TPU to multiples of 16, on a GPU to powers of two
    with h m and v m up to 8,192. Other calls and platforms are computed without it, with one
    warning. Several devices share the batch if the mesh is in context (`jax.set_mesh`, axes of type
    Auto) and its size divides the batch; else use `jax.shard_map`. `jax.export` requires a single
    platform.

    Linear attention cannot add a bias matrix to q.k, apply a mask that differs between queries, or
    drop attention weights. Instead of a local window use `Exact(window=...)`, which keeps far keys,
    estimated.

    Args:
        query: (b, t, n, h), with any number of batch axes; float32, bfloat16, float16 or float64,
            like `key` and `value`. Batch and lengths may be 0.
        key: (b, s, k, h). Each key head serves n / k consecutive query heads (grouped heads).
        value: (b, s, k, v).
        features: how the kernel is estimated, and which pairs are exact; or an array of frequencies
            alone, (m, h), (k, m, h) or (n, m, h).
        bias: what is added to the logits: `alibi(slopes)`, `Bias(keys=..., decay=...)` or a sum.
        mask: keys that exist, True or non-zero; broadcasts to (b, 1, 1, s). A query without any
            key returns 0.
        is_causal: query i attends to the keys up to i. Later finite keys change nothing, bit for
            bit. NaN or inf in a key spreads to the whole sequence; mask it out.
        scale: factor on q.k, positive; 1 / sqrt(h) if None.
        key_value_seq_lengths: (b,), number of keys that exist.
        segment_ids: integers (b, t) of packed sequences, in any order: a query attends to the keys
            of its own number. A pair (b, t), (b, s) serves cross attention, at the cost of t + s
            tokens; causal queries then see the keys j <= i. NaN in one segment spreads to others.
        axis_name: mesh axis of `jax.shard_map` that shards the sequence, in order. Devices exchange
            states of m (v + 2) numbers for each batch entry and head, whatever the length. Cannot
            be combined with exact pairs, decay or segments. Causal attention requires t = s.
        implementation: a name of the table above. None is "pallas" on an NVIDIA GPU in bfloat16
            with sizes that need no padding, if the kernels support the call, and a single device or
            the mesh in context is known to compute it; else "blocked". `explain` has the reason.
        return_residual: also return log(sum_s e^{scale q.k_s + bias}) of each query, estimated, by
            which outputs over different keys can be joined; -inf for a query without keys. Requires
            a map that estimates softmax.

    Returns:
        (b, t, n, v) in the dtype of `value`; with `return_residual` a pair of that and (b, t, n).
        Logits, sums and residuals are float32, or float64 if `query`, `key` or `value` is. With
        bfloat16 values large products have bfloat16 operands and float32 sums.

    Raises:
        ValueError: for shapes, dtypes or names that do not fit, for options that exclude each
            other (`performer.attention.refusals`), and for a mask that differs between queries or
            heads. The message has the value and the fix.
        TypeError: for an unknown keyword. The message explains keywords of other attention
            functions.

    Example:
        >>> features = performer.Features.draw(jax.random.key(0), "pm-antithetic", 128, 64)
        >>> output = performer_attention(query, key, value, features)

        Relative positions, and another feature map:

        >>> bias = performer.alibi(2.0 ** -jnp.linspace(1, 8, 12))
        >>> output = performer_attention(q, k, v, w, bias=bias, is_causal=True)
        >>> relu = performer.Features(w, feature_map=performer.features.arc_cosine(1))
        >>> output = performer_attention(q, k, v, relu)
    """
    options: Any = dict(mask=mask, key_value_seq_lengths=key_value_seq_lengths)
    options |= dict(segment_ids=segment_ids, axis_name=axis_name)
    tokens = Tokens(query, key, value)
    ready = _prepared(
        tokens,
        features,
        bias,
        is_causal,
        scale,
        implementation,
        residual=return_residual,
        **options,
    )
    output, residual, _ = _computed(ready, None)
    return cast(Any, (output, residual) if return_residual else output)


def stream(
    query: Float[Array, "*b t n h"],
    key: Float[Array, "*b s k h"],
    value: Float[Array, "*b s k v"],
    features: Features | Float[Array, "*n m h"],
    state: State | WindowState | None = None,
    *,
    bias: Bias | None = None,
    mask: ArrayLike | None = None,
    is_causal: bool = True,
    scale: float | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    axis_name: str | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "*b t n v"], State | WindowState]:
    """Attention after earlier keys, and the state of those and these, of constant size.

    Calls for consecutive parts of a sequence, each with the state of the one before, are attention
    to the whole sequence.

    Args:
        query: as in `performer_attention`, like `key` and `value`.
        key: (b, s, k, h).
        value: (b, s, k, v).
        features: as there, without exact keys and rows; the same in all calls.
        state: of the earlier keys; None before the first.
        bias: as there.
        mask: as there.
        is_causal: as there. If False all queries see the earlier keys and all of these: with 0 keys
            a state of a whole sequence serves further queries.
        scale: as there.
        key_value_seq_lengths: as there.
        axis_name: as there, without `is_causal`.
        implementation: as there.

    Returns:
        The output, and a `State`, or a `WindowState` with an exact window.

    Raises:
        ValueError: as `performer_attention`, and for a state that does not fit the call.

    Example:
        >>> out, state = stream(q, k, v, w)
        >>> out, state = stream(next_q, next_k, next_v, w, state)
    """
    options: Any = dict(mask=mask, key_value_seq_lengths=key_value_seq_lengths)
    options |= dict(axis_name=axis_name, streams=True)
    tokens = Tokens(query, key, value)
    ready = _prepared(tokens, features, bias, is_causal, scale, implementation, **options)
    if state is not None:
        refusals.check_state(state, tokens, ready.features, ready.pairs)
    output, _, after = _computed(ready, state)
    return output, cast(Any, after)


def attention_weights(
    query: Float[Array, "*b t n h"],
    key: Float[Array, "*b s k h"],
    features: Features | Float[Array, "*n m h"],
    **options: Unpack[Options],
) -> Float[Array, "*b n t s"]:
    """Return the estimated attention matrix A^, so that `performer_attention` is A^ v.

    Time and memory are quadratic. It is computed pair by pair (`performer.attention.matrix`), in
    float32, or float64 if `query` or `key` is, whatever the implementation. `options` and errors as
    in `performer_attention`.

    Raises:
        ValueError: for `axis_name`: the columns are the keys of this call.
    """
    if options.get("axis_name") is not None:
        raise ValueError(
            "attention_weights has no axis_name: its columns are the keys of this call; use"
            " performer_attention"
        )
    given: Any = dict(bias=None, is_causal=False, scale=None, implementation=None) | options
    lead, tokens, features, pairs, call = _prepared(Tokens(query, key, key), features, **given)
    weights = _weights(call.scale, *tokens[:2], replace(features, coupling=None), pairs)
    return weights.reshape(*lead, *weights.shape[1:])


@partial(jax.jit, static_argnums=0)
def _weights(scale: float, query: Array, key: Array, features: Features, pairs: Pairs) -> Array:
    return attention_matrix(query, key, features.constant, pairs, scale)


def explain(
    query: Array | jax.ShapeDtypeStruct,
    key: Array | jax.ShapeDtypeStruct,
    value: Array | jax.ShapeDtypeStruct,
    features: Features | Array | jax.ShapeDtypeStruct,
    *,
    streams: bool = False,
    return_residual: bool = False,
    **options: Unpack[Options],
) -> str:
    """Return how `performer_attention` computes a call on a CPU, a GPU and a TPU, and why.

    Nothing is computed: arguments may be `jax.ShapeDtypeStruct`, also the arrays of features.
    Arguments, `options` and errors as in `performer_attention`; `streams=True` is for a call of
    `stream`. Devices and mesh are those of this process.

    Example:
        >>> x = jax.ShapeDtypeStruct((8, 1024, 12, 64), jnp.float32)
        >>> w = jax.ShapeDtypeStruct((128, 64), jnp.float32)
        >>> near = performer.Features(w, exact=performer.Exact(window=16))
        >>> performer.attention.explain(x, x, x, near).splitlines()
        ['cpu (here): robust, no kernel for a CPU',
         'gpu: robust, no kernel for Exact(window=16)',
         'tpu: robust, no kernel for Exact(window=16)']
    """
    calls: list[Call] = []

    def note(query: Array, key: Array, value: Array, features: Features) -> None:
        given: Any = dict(bias=None, is_causal=False, scale=None, implementation=None) | options
        given |= dict(streams=streams, residual=return_residual)
        calls.append(_prepared(Tokens(query, key, value), features, **given).call)

    jax.eval_shape(note, query, key, value, as_features(features))
    here = sizes.platform()
    paths = {name + " (here)" * (name == here): which.path(calls[0], name) for name in PLATFORMS}
    return "\n".join(f"{name}: {path}" for name, path in paths.items())


class Ready(NamedTuple):
    """A checked call: values with one batch axis."""

    lead: tuple[Any, ...]
    """The batch axes as given."""
    tokens: Tokens
    features: Features
    pairs: Pairs
    call: Call


def _prepared(
    inputs: Tokens,
    given: Any,
    bias: Any,
    is_causal: Any,
    scale: Any,
    implementation: Any,
    *,
    mask: Any = None,
    key_value_seq_lengths: Any = None,
    segment_ids: Any = None,
    axis_name: str | None = None,
    streams: bool = False,
    residual: bool = False,
) -> Ready:
    """The values of a call, or the error that it deserves."""
    bias, features = refusals.check_bias(bias), as_features(given)
    refusals.check_arrays(*inputs, features)
    refusals.check_words(implementation, is_causal, mask, features)
    exact = refusals.check_exact(features.exact)
    features = replace(features, exact=exact, feature_map=features.map)
    scale = refusals.positive_scale(scale, inputs.query.shape[-1])
    lead, tokens = inputs.query.shape[:-3], refusals.with_one_batch_axis(inputs)
    refusals.check_features(features, tokens)
    shapes, dtype = (lead, tokens.query, tokens.key), float32_or_wider(*tokens)
    pairs = Pairs(
        masks.log_weights(bias.keys, lead, tokens.key, dtype),
        masks.key_mask(mask, key_value_seq_lengths, lead, tokens.key),
        masks.log_decay(bias.decay, *shapes, dtype),
        masks.segments(segment_ids, *shapes),
        bool(is_causal),
    )
    options: Any = dict(streams=streams, residual=residual, axis_name=axis_name)
    options |= dict(lengths=key_value_seq_lengths is not None, scale=scale)
    call = refusals.call_of(tokens, features, pairs, implementation=implementation, **options)
    refusals.check_together(call)
    return Ready(lead, tokens, features, pairs, call)


def _computed(ready: Ready, state: State | WindowState | None):
    """Output, residual and state of a checked call, with its batch axes."""
    lead, tokens, features, pairs, call = ready
    state = jax.tree.map(lambda x: refusals.one_axis(x, len(lead)), state)
    plan = replace(which.planned(call, sizes.platform()), return_state=call.streams)
    if features.frequencies is None:  # one feature of weight 0
        none = jnp.zeros((1, call.h), tokens.query.dtype), jnp.zeros(1)
        features = replace(features, frequencies=none[0], weights=none[1])
    arrays = tokens, replace(features, coupling=None), pairs, state
    results = _on_platform(arrays, plan)
    if len(lead) != 1:
        results = jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), results)
    return results


def _on_platform(arrays, plan: Plan):
    """Attention in the chunks and blocks of this machine; if exported, of the one that runs it."""
    (query, key, _), features, pairs, state = arrays
    sweeping = pairs.is_causal or pairs.segments is not None or features.exact.window > 0
    (b, t, n, h), (_, s, k, _) = query.shape, key.shape
    heads, streams = state_heads(n, k, features, pairs), state is not None or plan.return_state

    def on(platform):
        length, widths = max_dim(t, s), (features.num_features, h)
        chunk, block = sizes.chunk_and_block(platform, length, b * k, widths, sweeping)
        if not streams and plan.axis_name is None:
            rows = b * max_dim(t * (n // heads), s)
            if features.exact.window:  # its pairs are as wide
                widths = max_dim(widths[0], 2 * h), h
            at_once = sizes.heads_at_once(platform, rows, heads, widths)
            if at_once != heads:
                return partial(_attention, replace(plan, heads=at_once, chunk=chunk, block=length))
        return partial(_attention, replace(plan, chunk=chunk, block=block))

    if any(map(is_symbolic_dim, (*query.shape, *key.shape))):  # maybe for several platforms
        return jax.lax.platform_dependent(*arrays, cpu=on("cpu"), default=on("other"))
    return on(sizes.platform())(*arrays)


@partial(jax.jit, static_argnums=0)
def _attention(
    plan: Plan,
    tokens: Tokens,
    features: Features,
    pairs: Pairs,
    state: State | WindowState | None,
) -> tuple[Array, Array | None, State | WindowState | None]:
    features, wide = features.constant, float32_or_wider(*tokens)
    x, dtype = arguments(tokens, features, pairs, plan), tokens.value.dtype
    if plan.kernel is not None:
        far = cast(State | None, _heads_first(state, wide))
        output, residual, state = parts.rows(x, features, far, plan)
        output, residual = _with_exact_rows(x, output, residual, features.exact.rows, plan)
        state = _heads_first(state, wide) if plan.return_state else None
        return output.astype(dtype), residual if plan.residual else None, state
    if plan.heads:
        x = _copies_per_device(x, pairs.segments)
        output, residual = _by_heads(
            lambda some: _attend(some, features, pairs, None, plan)[:2], x, plan.heads
        )
    else:
        output, residual, state = _attend(x, features, pairs, _heads_first(state, wide), plan)
    state = _heads_first(state, wide) if plan.return_state else None
    return output.astype(dtype), residual, state


def _by_heads(
    function: Callable[[Arguments], tuple[Array, Array | None]], x: Arguments, heads: int
) -> tuple[Array, Array | None]:
    """Apply a function of all arguments, to (b, t, n, ...), to so many key heads at a time."""
    count = x.keys.key.shape[2] // heads

    def grouped(y, axis, rank) -> Any:  # (..., n, ...) -> (count, ..., n / count, ...)
        if y is None:
            return None
        if y.ndim < rank or y.shape[axis] == 1:  # shared by the heads
            return jnp.broadcast_to(y, (count, *y.shape))
        y = y.reshape(*y.shape[:axis], count, -1, *y.shape[axis + 1 :])
        return jnp.moveaxis(y, axis, 0)

    tokens = x.query, x.keys, x.given
    query, keys, given = jax.tree.map(lambda y: grouped(y, 2, y.ndim), tokens)
    w_query, w_key = (grouped(w, 0, 3) for w in (x.w_query, x.w_key))
    feature_bias, shift = (grouped(y, 0, 2) for y in (x.feature_bias, x.shift))
    groups = Arguments(query, keys, w_query, w_key, feature_bias, shift, given)

    def joined(y):  # (count, b, t, n / count, ...) -> (b, t, n, ...)
        y = jnp.moveaxis(y, 0, 2)
        return y.reshape(*y.shape[:2], -1, *y.shape[4:])

    return jax.tree.map(joined, jax.lax.map(function, groups))


def _heads_first(state: State | WindowState | None, dtype: jnp.dtype):
    """Transpose states (b, k, m) to (k, b, m), or back."""
    if isinstance(state, WindowState):
        return state._replace(far=_heads_first(state.far, dtype))
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).astype(dtype), state)


def _attend(
    x: Arguments,
    features: Features,
    pairs: Pairs,
    state: State | WindowState | None,
    plan: Plan,
) -> tuple[Array, Array | None, State | WindowState | None]:
    """The output (b, t, n, v), the residual, and the state after the earlier and these keys."""
    (b, t, n, h), (_, s, k, v), exact = x.query.shape, x.keys.value.shape, features.exact
    keys, scale = x.keys if s else extended(x.keys, 0, 1), plan.scale
    many_causal = pairs.is_causal and t != 1
    faded = not pairs.is_causal and keys.log_decay is not None
    packed = pairs.segments is not None and s and t
    by_position = exact.window or packed or many_causal or faded
    x = _copies_per_device(x._replace(keys=keys), (pairs.segments, state) if by_position else None)
    keys, is_causal = x.keys, pairs.is_causal
    apart = jax.tree.map(lambda query: query.reshape(b, t, k, n // k, h), (x.query, x.given))
    queries = Queries(*apart)
    maps, dtype = feature_maps(x, features, plan), operand_dtype(keys.value)
    nothing = states.empty(keys.key, features.num_features, v, x.query, *keys, x.w_query, x.w_key)
    streams = state is not None or plan.return_state
    order = segments = None
    if packed:
        order, queries, keys, segments = _sorted(queries, keys, pairs.segments)
    exists = existing(keys)
    selected = []  # keys that every query sees exactly
    at_once = exact.keys and not by_position and _fits(x, features.num_features, plan)
    if exact.keys and t and not at_once:
        queries = queries._replace(query=moved_once(queries.query))
        keys = keys._replace(key=moved_once(keys.key))
        fixed = feature_maps(jax.lax.stop_gradient(x), features, plan)
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
        output, residual = _output(rows, plan)
    elif at_once:
        once = partial(attend_once, maps, f=exact.keys, scale=scale, dtype=dtype)
        policy = jax.checkpoint_policies.save_only_these_names(CHOSEN)
        output, residual = jax.checkpoint(once, policy=policy)(queries, keys), None
    else:
        assert not isinstance(state, WindowState)
        state = nothing if state is None else state
        state = _with_all_keys(maps[1], keys, state, nothing, plan, is_causal)
        output, residual = _of_state(maps[0], queries, state, selected, dtype, plan)
    if order is not None:
        back = jnp.argsort(order, axis=1)[:, order.shape[1] - t :]
        output, residual = jax.tree.map(partial(take, index=back), (output, residual))
    residual = None if residual is None else residual.reshape(b, t, n)
    output = output.astype(dtype).reshape(b, t, n, v)
    return *_with_exact_rows(x, output, residual, exact.rows, plan), state


def _with_exact_rows(
    x: Arguments, output: Array, residual: Array | None, r: int, plan: Plan
) -> tuple[Array, Array | None]:
    """The first r queries with softmax attention, at the cost of O(s) each."""
    if not r:
        return output, residual
    (b, t, n, v), k = output.shape, x.keys.key.shape[2]
    r = r if is_symbolic_dim(t) else min(r, t)
    query = x.query if x.given is None else x.given
    query = query[:, :r].reshape(b, r, k, n // k, -1)
    rows = exact_rows(query, Selected(counted(x.keys)), plan.scale)
    first, logs = states.finished(rows)
    output = output.at[:, :r].set(first.astype(output.dtype).reshape(b, r, n, v))
    if residual is not None:
        residual = residual.at[:, :r].set(logs.reshape(b, r, n))
    return output, residual


def _fits(x: Arguments, num_features: Any, plan: Plan) -> bool:
    """True if the features of all tokens may exist at once, to choose keys by them."""
    (b, t, n, _), (_, s, k, _) = x.query.shape, x.keys.key.shape
    symbols = any(map(is_symbolic_dim, (b, t, n, s, k)))
    return not (symbols or plan.residual or 0 in (t, s)) and (
        4 * b * (t * n + s * k) * num_features // sizes.devices() <= sizes.AT_ONCE
    )


def _output(rows: State, plan: Plan) -> tuple[Array, Array | None]:
    """The output of rows, and the logarithms of their normalisers if the plan has them."""
    return states.finished(rows) if plan.residual else (ratio(rows), None)


def _of_state(
    query_map: Map, queries: Queries, state: State, selected: list[Selected], dtype, plan: Plan
) -> tuple[Array, Array | None]:
    """Output and residual of queries that see all keys of a state, and the selected ones."""

    def block(queries):
        if not plan.residual:
            heavy = selected[0].keys if selected else None
            return attend(query_map, queries, state, dtype, heavy, plan.scale).astype(dtype), None
        rows = look_up(query_map, queries.query, state, dtype)
        for some in selected:
            rows = combine(rows, exact_rows(queries.exact, some, plan.scale))
        return _output(rows, plan)

    return by_block(block, queries, plan.block)


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
        return stream_of_window(maps, queries, keys, ends[0], exact, scale, plan, state)
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
    key_map: Map, keys: Keys, state: State, nothing: State, plan: Plan, is_causal: bool
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
