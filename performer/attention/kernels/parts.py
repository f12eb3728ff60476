"""The sums of a call by kernels (`run`), joined with exact keys and states.

The features of all keys are rows (L, 1, output), which `state.combine` joins with the rows of exact
keys. L lacks |q|^2 / 2 and the shift of calibrated keys; they are added where the rows must be of
the kernel itself (`Plan.absolute`).

Heavy keys are chosen by the same kernels, without the matrix: with G_j the state of the queries,
weighted by e^{-L}, the weight of a key is what it looks up there (`exact`).
"""

from dataclasses import replace
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from performer.attention import state as states
from performer.attention.exact import Selected, counted, exact_rows, largest
from performer.attention.kernels import run
from performer.attention.maps import Arguments, along, feature_maps, half_norm
from performer.attention.parallel import earlier_devices, over_devices
from performer.attention.state import Keys, Queries, State, attend, by_block, combine, look_up
from performer.attention.state import heads_first as first
from performer.attention.sweep import sweep
from performer.attention.values import Features, Plan
from performer.numerics import operand_dtype

WIDTH = 16
"""Width of values that no one reads: the least that kernels have."""


def rows(
    x: Arguments, features: Features, state: State | None, plan: Plan
) -> tuple[Float[Array, "b t n v"], Float[Array, "b t n"] | None, State | None]:
    """Return outputs (b, t, n, v) and, with `Plan.absolute`, logarithms (b, t, n), by kernels.

    The third is the state (k, b, m) after the earlier and these keys, with `Plan.return_state`.
    """
    selected, keys = None, x.keys
    if features.exact.keys:
        selected, keys = _heavy(jax.lax.stop_gradient(x), x.keys, features, plan)
    x = x._replace(keys=keys)
    output, log, state = _of_features(x, features, state, plan)
    if log is None:
        return output, None, state
    b, t, n, _ = x.query.shape
    queries = Queries(*jax.tree.map(partial(_grouped, keys=keys), (x.query, x.given)))
    log = log - half_norm(x.query, plan.scale)[..., 0]
    if x.shift is not None:
        heads = jnp.moveaxis(along(first(queries.query), x.shift, plan.scale), 0, 2)
        log = log + heads.reshape(b, t, n)
    if selected is None:
        return output, log, state
    exists = log > -jnp.inf
    of_features = State(*map(partial(_grouped, keys=keys), (log, exists.astype(log.dtype), output)))
    joined = combine(of_features, exact_rows(queries.exact, selected, plan.scale))
    output, log = states.finished(joined)
    return output.astype(x.query.dtype).reshape(b, t, n, -1), log.reshape(b, t, n), state


def _of_features(x: Arguments, features: Features, state: State | None, plan: Plan):
    """The same of the features alone; logarithms as `run` has them."""
    plain = replace(plan, absolute=False, residual=False)
    of_keys = partial(_state_of_keys, features=features, plan=plain)
    of_state = partial(_rows_of_state, features=features, plan=plain)
    of_all = partial(_attention, features=features, plan=plain, log=plan.absolute)
    settings, log, t = plan.kernel, plan.absolute, x.query.shape[1]
    if state is None and not (plan.return_state or plan.axis_name):
        return *run.attention(x, of_all, settings, log=log), None
    own = run.summarise(x, of_keys, settings)
    if plan.axis_name is not None:
        if settings.is_causal:
            before = earlier_devices(own, plan.axis_name)
        else:
            own, before = over_devices(own, plan.axis_name), None
        state = before if state is None else state if before is None else combine(state, before)
    after = own if state is None else combine(state, own)
    if settings.is_causal and t != 1:
        output, L = run.attention(x, of_all, settings, before=state, log=log)
    else:
        output, L = run.look_up(x, after, of_state, settings, log=log)
    return output, L, after if plan.return_state else None


def _heavy(x: Arguments, keys: Keys, features: Features, plan: Plan) -> tuple[Selected, Keys]:
    """The heavy keys, and the others."""
    plain, settings = replace(plan, absolute=False, residual=False), plan.kernel
    of_keys = partial(_state_of_keys, features=features, plan=plain)
    of_state = partial(_rows_of_state, features=features, plan=plain)
    (b, t, n, _), k = x.query.shape, keys.key.shape[2]
    keys = counted(keys)
    narrow = x._replace(keys=_without_values(x.keys.key, keys.log_weights))
    sums = run.summarise(narrow, of_keys, settings)
    _, L = run.look_up(narrow, sums, of_state, settings)
    assert L is not None
    # Queries as keys: (b, t, n, .) -> (b, t g, k, .); as keys they would have the half norm.
    weights = jnp.where(-jnp.inf < L, half_norm(x.query, plan.scale)[..., 0] - L, -jnp.inf)
    query, weights = (
        jnp.moveaxis(y.reshape(b, t, k, n // k, -1), 3, 2).reshape(b, t * n // k, k, -1)
        for y in (x.query, weights[..., None])
    )
    columns = x._replace(keys=_without_values(query, weights[..., 0]), w_key=x.w_query)
    of_queries = run.summarise(columns, of_keys, settings)
    looked_up = x._replace(query=x.keys.key, w_query=x.w_key)
    _, logs = run.look_up(looked_up, of_queries, of_state, settings)
    assert logs is not None
    logs = logs - half_norm(x.keys.key, plan.scale)[..., 0] + cast(Array, keys.log_weights)
    return largest(logs, keys, features.exact.keys)


def _without_values(key: Array, log_weights: Array | None) -> Keys:
    return Keys(key, jnp.zeros((*key.shape[:3], WIDTH), key.dtype), log_weights)


# The same by XLA, for other platforms


def _state_of_keys(x: Arguments, *, features: Features, plan: Plan) -> State:
    keys = x.keys
    _, key_map = feature_maps(x._replace(query=keys.key, w_query=x.w_key), features, plan)
    arrays = (*keys, x.w_key)
    nothing = states.empty(keys.key, features.num_features, keys.value.shape[-1], *arrays)
    return states.summarise(key_map, keys, nothing, plan.block)


def _rows_of_state(x: Arguments, state: State, *, features: Features, plan: Plan):
    query_map, _ = feature_maps(x._replace(w_key=x.w_query), features, plan)
    b, t, n, h = x.query.shape
    query, dtype = x.query.reshape(b, t, len(state.maximum), -1, h), operand_dtype(x.query)
    rows = by_block(lambda query: look_up(query_map, query, state, dtype), query, plan.block)
    output, log = states.finished(rows)
    return output.astype(x.query.dtype).reshape(b, t, n, -1), log.reshape(b, t, n)


def _attention(
    x: Arguments, before: State | None = None, *, features: Features, plan: Plan, log: bool
):
    (b, t, n, _), keys = x.query.shape, x.keys
    query, dtype = _grouped(x.query, keys), operand_dtype(x.query)
    maps = feature_maps(x, features, plan)
    arrays = (x.query, *keys, x.w_query, x.w_key)
    nothing = states.empty(keys.key, features.num_features, keys.value.shape[-1], *arrays)
    if plan.kernel.is_causal:
        ends = nothing if before is None else before, None
        rows, _ = sweep(maps, Queries(query), keys, ends, plan)
        output, L = states.finished(rows)
        return output.astype(x.query.dtype).reshape(b, t, n, -1), L.reshape(b, t, n)
    state = states.summarise(maps[1], keys, nothing, plan.block)
    if log:
        return _rows_of_state(x, state, features=features, plan=plan)
    block = lambda queries: attend(maps[0], queries, state, dtype).astype(dtype)  # noqa: E731
    output = by_block(block, Queries(query), plan.block)
    return output.astype(x.query.dtype).reshape(b, t, n, -1), None


def _grouped(x: Array, keys: Keys) -> Array:
    """(b, t, n, ...) -> (b, t, k, g, ...)."""
    b, t, n, *rest = x.shape
    k = keys.key.shape[2]
    return x.reshape(b, t, k, n // k, *rest)
