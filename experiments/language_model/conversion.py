"""The attention of a trained decoder, beside a window: features drawn, calibrated or transferred.

The loop over cases and the report are those of `vit.convert`. With `refine_steps` all features
move by attention transfer (`performer.refinement.refine_far`).
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.language_model.attention import SILENT, Hybrid
from experiments.language_model.model import Decoder, losses
from performer import couplings
from performer.attention import Exact
from performer.features import positive
from performer.refinement import (
    LEARNED,
    START,
    Far,
    Sample,
    calibrated_far,
    refine_far,
)
from vit.data import Batch
from vit.task import Task
from vit.weights.conversion import Case, exchanged


def replaced(
    learned: Task, model: Decoder, seen: Sequence[Sample], batches: Sequence[Batch], case: Case
) -> Decoder:
    """Return the decoder with another attention; transferred beside a window it is no worse.

    Args:
        learned: task of the model.
        model: decoder with softmax attention.
        seen: queries and keys of each layer on the batches.
        batches: training examples.
        case: the attention.

    Raises:
        ValueError: for layers that are to stay exact.
    """
    if case.keep:
        raise ValueError(f"--keep={case.keep}: all layers of a language model are replaced")
    attention = hybrids(seen, case)
    if case.refine_steps and case.attention.exact_window and case.attention.num_features:
        attention = no_worse(learned, model, attention, batches)
    return exchanged(learned, model, attention)


def hybrids(layers: Sequence[Sample], case: Case) -> list[Hybrid]:
    """Return the attention of each layer, by what it sees; m = 0 for the window alone."""
    own, near = case.attention, case.attention.exact_window
    if not own.num_features:
        return [Hybrid(None, None, near) for _ in layers]
    exact, found = Exact(near, int(near > 0)), []
    for i, sample in enumerate(layers):
        key, (*_, n, h) = jax.random.key(case.seed * len(layers) + i), sample.query.shape
        drawn = couplings.draw(key, own.coupling, own.num_features, h, n)
        kind: Any = dict(method=own.calibration, coupling=own.coupling, is_causal=True)
        far, fitted = calibrated_far(drawn, exact, sample, **kind)
        if case.refine_steps:
            start, options = Far.of(START * far.of_key), dict(steps=case.refine_steps, examples=1)
            far = refine_far(start, fitted, exact, sample, is_causal=True, **options)
            found.append(Hybrid(far, None, near, LEARNED))
        else:
            found.append(Hybrid(far, fitted, near, positive))
    return found


def no_worse(
    learned: Task, model: Decoder, attention: Sequence[Hybrid], batches: Sequence[Batch]
) -> list[Hybrid]:
    """Return each layer's features beside the window, `SILENT` ones where they cost loss.

    So the loss on these batches is never higher than that of the windows alone; the squared error
    of the attention matrix, by which features are transferred, does not bound it.
    """

    def loss(layers: Sequence[Hybrid]) -> float:
        new = exchanged(learned, model, layers)
        return float(np.mean(np.concatenate([_losses(new, batch) for batch in batches])))

    chosen = [nnx.clone(layer) for layer in attention]
    for layer in chosen:
        layer.far["weight"][...] = jnp.full_like(layer.far["weight"][...], SILENT)
    least = loss(chosen)
    for i, layer in enumerate(attention):
        tried = [*chosen[:i], layer, *chosen[i + 1 :]]
        if (value := loss(tried)) < least:
            chosen, least = tried, value
    return chosen


_losses = nnx.jit(losses)
