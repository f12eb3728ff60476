"""The optimiser: AdamW on clipped gradients, its rate, and the running mean of the parameters."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.tree_util import tree_map_with_path
from jaxtyping import Array, Integer

from vit import config


def schedule(optim: config.Optim, num_steps: int) -> optax.Schedule:
    """Step -> learning rate: linear from 0 over the warm-up, constant, half a cosine to the end.

    Raises:
        ValueError: when warm-up and constant rate are longer than the run.
    """
    start = optim.warmup_steps + optim.constant_steps
    if start >= num_steps:
        raise ValueError(
            f"config.optim.warmup_steps={optim.warmup_steps} and"
            f" config.optim.constant_steps={optim.constant_steps} are {start} steps, but the whole"
            f" run has {num_steps}; lower them or config.data.batch_size, or raise"
            " config.num_epochs"
        )
    peak, final = optim.learning_rate, optim.final_learning_rate
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, peak, optim.warmup_steps),
            optax.constant_schedule(peak),
            optax.cosine_decay_schedule(peak, num_steps - start, alpha=final / peak if peak else 0),
        ],
        [optim.warmup_steps, start],
    )


def optimizer(optim: config.Optim, rate: optax.Schedule) -> optax.GradientTransformation:
    """AdamW at that rate; weights of linear maps decay, all other parameters do not."""
    parts = [optax.adamw(rate, weight_decay=optim.weight_decay, mask=_is_kernel)]
    if optim.clip_norm:
        parts = [optax.clip_by_global_norm(optim.clip_norm), *parts]
    if optim.ema:
        parts = [*parts, running_mean(optim.ema)]
    return optax.chain(*parts)


class RunningMean(NamedTuple):
    """State of `running_mean`."""

    count: Integer[Array, ""]
    mean: optax.Params


def running_mean(decay: float) -> optax.GradientTransformation:
    """Keeps mean <- d mean + (1 - d) parameters, and lets the updates through; the last of a chain.

    d = min(decay, (1 + t) / (10 + t)) after t steps, so that the first steps are soon forgotten.
    """

    def init(params: optax.Params) -> RunningMean:
        return RunningMean(jnp.zeros((), jnp.int32), jax.tree.map(jnp.copy, params))

    def update(
        updates: optax.Updates, state: RunningMean, params: optax.Params | None = None
    ) -> tuple[optax.Updates, RunningMean]:
        if params is None:
            raise ValueError("running_mean needs the parameters: update(updates, state, params)")
        t = state.count
        new = optax.apply_updates(params, updates)
        share = 1 - jnp.minimum(decay, (1 + t) / (10 + t))
        return updates, RunningMean(t + 1, optax.incremental_update(new, state.mean, share))

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def averaged(optimizer: nnx.Optimizer) -> optax.Params:
    """The running mean of the parameters that the optimiser keeps (config.optim.ema > 0)."""
    return optax.tree_utils.tree_get(nnx.as_pure(optimizer.opt_state), "mean")


def _is_kernel(params: optax.Params) -> optax.Params:
    return tree_map_with_path(
        lambda path, _: "kernel" in [getattr(k, "key", 0) for k in path], params
    )
