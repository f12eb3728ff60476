"""The optimiser: AdamW under a warm-up and cosine schedule, on clipped gradients."""

import optax
from flax import nnx
from jax.tree_util import tree_map_with_path

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
            f" run has {num_steps}; lower them or raise config.num_epochs"
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
    return optax.chain(
        optax.clip_by_global_norm(optim.clip_norm),
        optax.adamw(rate, weight_decay=optim.weight_decay, mask=_is_kernel),
    )


def _is_kernel(params: nnx.State) -> nnx.State:
    return tree_map_with_path(
        lambda path, _: "kernel" in [getattr(k, "key", 0) for k in path], params
    )
