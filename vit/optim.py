"""The optimiser: AdamW under a warm-up and cosine schedule, on clipped gradients."""

import optax
from flax import nnx
from jax.tree_util import tree_map_with_path

from vit import config


def schedule(optim: config.Optim, steps_per_epoch: int, num_steps: int) -> optax.Schedule:
    """Step -> learning rate: linear from 0 over the warm-up, then a half cosine to the final one.

    Raises:
        ValueError: when the warm-up is longer than the run.
    """
    warmup_steps = round(optim.warmup_epochs * steps_per_epoch)
    if warmup_steps >= num_steps:
        raise ValueError(
            f"config.optim.warmup_epochs={optim.warmup_epochs} is {warmup_steps} steps, but the"
            f" whole run has {num_steps}; lower it or raise config.num_epochs"
        )
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=optim.learning_rate,
        warmup_steps=warmup_steps,
        decay_steps=num_steps,
        end_value=optim.final_learning_rate,
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
