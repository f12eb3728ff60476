"""The attention of a trained decoder, beside a window: features drawn, calibrated or transferred.

The loop over cases and the report are those of `vit.convert`. With `refine_steps` all features
move by attention transfer (`performer.refinement.refine_far`).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from experiments.language_model.attention import SILENT, Hybrid
from experiments.language_model.model import Decoder, losses
from performer import couplings
from performer.attention.calibration import Calibration, fit, fold, log_determinant, pair_moments
from performer.attention.refinement import LEARNED, Far, Sample, near_pairs, refine_far
from performer.features import positive
from vit.data import Batch
from vit.task import Task
from vit.weights.conversion import Case, exchanged

SIZE = 0.3
"""Size of frequencies at the start of a transfer, relative to those of a coupling."""


def replaced(
    learned: Task, model: Decoder, seen: Sequence[Sample], batches: Sequence[Batch], case: Case
) -> Decoder:
    """Return the decoder with another attention; transferred beside a window it is no worse.

    Args:
        learned: task of the model.
        model: with softmax attention.
        seen: queries and keys of each layer on the batches.
        batches: of training examples.
        case: the attention.

    Raises:
        ValueError: for layers that are to stay exact.
    """
    if case.keep:
        raise ValueError(f"--keep={case.keep}: all layers of a language model are replaced")
    attention = hybrids(seen, case)
    if case.refine_steps and case.window and case.num_features:
        attention = no_worse(learned, model, attention, batches)
    return exchanged(learned, model, attention)


def calibrated(sample: Sample, near: Array, case: Case, seed: int) -> tuple[Far, Calibration]:
    """Draw features of a coupling, calibrated to pairs that are not near.

    Args:
        sample: queries and keys.
        near: which pairs have no part in the fit.
        case: its coupling, calibration and number of features.
        seed: of the draw.
    """
    *_, n, h = sample.query.shape
    moments = pair_moments(*sample[:2], mask=sample.pairs(True) & ~near, num_queries=64)
    calibration = fit(moments, case.calibration, case.coupling)
    drawn = couplings.draw(jax.random.key(seed), case.coupling, case.num_features, h, n)
    _, of_key, log_weights = fold(calibration, drawn)
    far = Far.of(jnp.broadcast_to(of_key, drawn.shape))
    if log_weights is not None and calibration.root is not None:
        far = far._replace(bias=log_weights + log_determinant(calibration.root)[:, None])
    return far, calibration._replace(mean=None, root=None)


def hybrids(layers: Sequence[Sample], case: Case) -> list[Hybrid]:
    """Return the attention of each layer, by what it sees; m = 0 for the window alone."""
    if not case.num_features:
        return [Hybrid(None, None, case.window) for _ in layers]
    near = jnp.asarray(near_pairs(layers[0].query.shape[1], case.window, 1))
    found = []
    for i, sample in enumerate(layers):
        far, moved = calibrated(sample, near, case, case.seed * len(layers) + i)
        if case.refine_steps:
            start, steps = Far.of(SIZE * far.of_key), case.refine_steps
            far = refine_far(start, moved, near, sample, steps=steps, is_causal=True, examples=1)
        found.append(Hybrid(far, moved, case.window, LEARNED if case.refine_steps else positive))
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
