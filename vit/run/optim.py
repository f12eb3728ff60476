"""Optimiser: AdamW on clipped gradients, its learning rate, and the parameters' running mean."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Integer

from vit import config
from vit.task import no_distances


def schedule(optim: config.Optimizer, num_steps: int) -> optax.Schedule:
    """Return step -> learning rate: linear warm-up from 0, constant, half a cosine to the end.

    Args:
        optim: section of the config.
        num_steps: number of steps of the run.

    Raises:
        ValueError: when warm-up and constant rate are longer than the run.
    """
    peak, final = optim.learning_rate, optim.final_learning_rate
    warmup, at_peak = (
        round(x * num_steps if x < 1 else x) for x in (optim.warmup_steps, optim.constant_steps)
    )
    constant = warmup + at_peak
    if constant >= num_steps:
        raise ValueError(
            f"config.optim.warmup_steps={optim.warmup_steps:g} and"
            f" config.optim.constant_steps={optim.constant_steps:g} are {constant} steps, but the"
            f" whole run has {num_steps}; lower them or config.data.batch_size, or raise"
            " config.num_epochs"
        )
    pieces = [
        optax.linear_schedule(0.0, peak, warmup),
        optax.constant_schedule(peak),
        optax.cosine_decay_schedule(peak, num_steps - constant, alpha=final / peak if peak else 0),
    ]
    return optax.join_schedules(pieces, [warmup, constant])


def optimizer(
    optim: config.Optimizer,
    rate: optax.Schedule,
    distances: Callable[[optax.Params], Any] = no_distances,
) -> optax.GradientTransformation:
    """Return AdamW; weight decay is applied to the kernels of linear maps only.

    Args:
        optim: section of the config.
        rate: step -> learning rate.
        distances: `distances` of a `Task`, for `optim.layer_decay`: updates of a parameter are
            multiplied by decay^distance.
    """

    def is_kernel(path: Any, _: Any) -> bool:
        return "kernel" in [getattr(key, "key", 0) for key in path]

    mask = partial(jax.tree.map_with_path, is_kernel)
    transforms = [optax.adamw(rate, b2=optim.b2, weight_decay=optim.weight_decay, mask=mask)]
    if optim.layer_decay != 1:
        transforms = [*transforms, _layer_wise(optim.layer_decay, distances)]
    if optim.clip_norm:
        transforms = [optax.clip_by_global_norm(optim.clip_norm), *transforms]
    if optim.ema:
        transforms = [*transforms, running_mean(optim.ema)]
    return optax.chain(*transforms)


def _layer_wise(
    decay: float, distances: Callable[[optax.Params], Any]
) -> optax.GradientTransformation:
    def init(params: optax.Params) -> optax.EmptyState:
        distances(params)  # a task without distances raises before compilation
        return optax.EmptyState()

    def update(updates: optax.Updates, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        return jax.tree.map(lambda u, n: u * decay**n, updates, distances(updates)), state

    return optax.GradientTransformation(init, update)


class RunningMean(NamedTuple):
    """State of `running_mean`."""

    count: Integer[Array, ""]
    mean: optax.Params


def running_mean(decay: float) -> optax.GradientTransformation:
    """Keep mean <- d mean + (1 - d) parameters; the last of a chain, it changes no updates.

    d = min(decay, (1 + t) / (10 + t)) after t steps, which soon forgets the first steps.
    """

    def init(params: optax.Params) -> RunningMean:
        return RunningMean(jnp.zeros((), jnp.int32), jax.tree.map(jnp.copy, params))

    def update(
        updates: optax.Updates, state: RunningMean, params: optax.Params
    ) -> tuple[optax.Updates, RunningMean]:
        t = state.count
        new = optax.apply_updates(params, updates)
        share = 1 - jnp.minimum(decay, (1 + t) / (10 + t))
        return updates, RunningMean(t + 1, optax.incremental_update(new, state.mean, share))

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def averaged(optimizer: nnx.Optimizer) -> optax.Params:
    """Return the running mean of the parameters, or None without one (`config.optim.ema`)."""
    return optax.tree_utils.tree_get(nnx.as_pure(optimizer.opt_state), "mean")
