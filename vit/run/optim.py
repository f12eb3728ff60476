"""The optimiser: AdamW on clipped gradients, its rate, and the running mean of the parameters."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.tree_util import tree_map_with_path
from jaxtyping import Array, Integer

from vit import config
from vit.task import no_distances


def schedule(optim: config.Optim, num_steps: int, restarts: Sequence[int] = ()) -> optax.Schedule:
    """Return step -> rate: linear from 0 over the warm-up, constant, half a cosine to the end.

    With restarts this is done anew from each of them to the next, or to the end (SGDR, Loshchilov &
    Hutter 2017), the warm-up then from the final rate on. A run that is trained further needs the
    high rate again: at the final one next to nothing would be learned, and a model takes up more of
    new steps by warming up and decaying again (Ibrahim et al. 2024).

    Args:
        optim: section of the config.
        num_steps: of the run.
        restarts: steps.

    Raises:
        ValueError: when warm-up and constant rate are longer than the run, or than what lies
            between two restarts.
    """
    peak, final = optim.learning_rate, optim.final_learning_rate
    constant = optim.warmup_steps + optim.constant_steps
    pieces, bounds = [], []
    for start, end in itertools.pairwise((0, *restarts, num_steps)):
        if constant >= end - start:
            part = f"the cycle from step {start} on" if restarts else "the whole run"
            more = "config.num_epochs" + " (or --extend)" * bool(restarts)
            raise ValueError(
                f"config.optim.warmup_steps={optim.warmup_steps} and"
                f" config.optim.constant_steps={optim.constant_steps} are {constant} steps, but"
                f" {part} has {end - start}; lower them or config.data.batch_size, or raise {more}"
            )
        pieces += [
            optax.linear_schedule(final if start else 0.0, peak, optim.warmup_steps),
            optax.constant_schedule(peak),
            optax.cosine_decay_schedule(
                peak, end - start - constant, alpha=final / peak if peak else 0
            ),
        ]
        bounds += [start, start + optim.warmup_steps, start + constant]
    return optax.join_schedules(pieces, bounds[1:])


def optimizer(
    optim: config.Optim,
    rate: optax.Schedule,
    distances: Callable[[optax.Params], Any] = no_distances,
) -> optax.GradientTransformation:
    """Return AdamW at that rate; weights of linear maps decay, all other parameters do not.

    Args:
        optim: section of the config.
        rate: of a step.
        distances: of a `Task`, for `optim.layer_decay`: what AdamW does to a parameter is
            multiplied by decay^distance.
    """
    parts = [optax.adamw(rate, b2=optim.b2, weight_decay=optim.weight_decay, mask=_is_kernel)]
    if optim.layer_decay != 1:
        parts = [*parts, _layer_wise(optim.layer_decay, distances)]
    if optim.clip_norm:
        parts = [optax.clip_by_global_norm(optim.clip_norm), *parts]
    if optim.ema:
        parts = [*parts, running_mean(optim.ema)]
    return optax.chain(*parts)


def _layer_wise(
    decay: float, distances: Callable[[optax.Params], Any]
) -> optax.GradientTransformation:
    def init(params: optax.Params) -> optax.EmptyState:
        distances(params)  # a task that does not know raises before anything is compiled
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
    """Keep mean <- d mean + (1 - d) parameters, and lets the updates through; the last of a chain.

    d = min(decay, (1 + t) / (10 + t)) after t steps, so that the first steps are soon forgotten.
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
    """Return the running mean of the parameters that the optimiser keeps (config.optim.ema > 0)."""
    return optax.tree_utils.tree_get(nnx.as_pure(optimizer.opt_state), "mean")


def _is_kernel(params: optax.Params) -> optax.Params:
    return tree_map_with_path(
        lambda path, _: "kernel" in [getattr(k, "key", 0) for k in path], params
    )
