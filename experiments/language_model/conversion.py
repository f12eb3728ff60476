"""A trained decoder with another attention in the place of softmax, all else as it was."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from experiments.language_model.attention import AttentionFn, Hybrid
from experiments.language_model.config import COUPLING
from experiments.language_model.model import Decoder
from experiments.language_model.task import losses
from performer import couplings
from performer.calibration import Calibration, fit, fold, log_determinant, pair_moments
from performer.features import positive
from performer.refinement import (
    LEARNED,
    Far,
    Sample,
    at_least_near,
    hybrid_estimate,
    near_pairs,
    refine_far,
    transfer,
)

SIZE = 0.3
"""Of frequencies at the start of a transfer, relative to those of a coupling."""
EVALUATED = 8
"""Windows that go through the model at once."""


def samples(model: Decoder, tokens: Int[Array, "b t"]) -> list[Sample]:
    """Queries and keys of each layer."""
    layers = zip(*(_projected(model, part) for part in _parts(tokens)), strict=True)
    return [Sample.of(*map(jnp.concatenate, zip(*layer, strict=True))) for layer in layers]


@nnx.jit
def _projected(model: Decoder, tokens: Array) -> list[tuple[Array, Array]]:
    return [(query, key) for query, key, _ in model.projections(tokens)]


def held_out_losses(model: Decoder, tokens: Int[Array, "b t"]) -> Float[np.ndarray, " b"]:
    """The mean loss of each window, in nats a character."""
    return np.concatenate([_losses(model, {"tokens": part}) for part in _parts(tokens)])


_losses = nnx.jit(losses)


def _parts(tokens: Array) -> Iterable[Array]:
    return (tokens[i : i + EVALUATED] for i in range(0, len(tokens), EVALUATED))


def calibrated(
    sample: Sample, near: Array | None, num_features: int, method: str, seed: int
) -> tuple[Far, Calibration]:
    """Features of a coupling, calibrated to pairs that are not near, or to all pairs.

    Args:
        sample: queries and keys.
        near: which pairs have no part in the fit.
        num_features: m.
        method: of `performer.calibration`.
        seed: of the draw.
    """
    (*_, n, h), pairs = sample.query.shape, sample.pairs(True)
    if near is not None:
        pairs = pairs & ~near
    moments = pair_moments(*sample[:2], mask=pairs, num_queries=64)
    calibration = fit(moments, method, COUPLING)
    drawn = couplings.draw(jax.random.key(seed), COUPLING, num_features, h, n)
    _, of_key, log_weights = fold(calibration, drawn)
    far = Far.of(jnp.broadcast_to(of_key, drawn.shape))
    if log_weights is not None and calibration.root is not None:
        far = far._replace(bias=log_weights + log_determinant(calibration.root)[:, None])
    return far, calibration._replace(mean=None, root=None)


METHODS = ("none", "calibrated", "far weight", "transfer")
"""What is done to the features of a coupling: nothing; shift and scale; then one weight of the far
part of each head; or all of them moved by attention transfer."""


def hybrids(
    layers: Sequence[Sample],
    window: int,
    num_features: int,
    method: str,
    *,
    steps: int,
    seed: int = 0,
) -> list[Hybrid]:
    """The attention of each layer.

    Args:
        layers: what each sees.
        window: tokens of a chunk, beside which the first key is exact; 0 for features alone.
        num_features: m; 0 for the window alone.
        method: of `METHODS`.
        steps: of the last two.
        seed: of the draws, another in each layer.
    """
    if not num_features:
        return [Hybrid(None, None, window, 1) for _ in layers]
    near, found = jnp.asarray(near_pairs(layers[0].query.shape[1], window, 1)), []
    options: dict[str, Any] = dict(steps=steps, is_causal=True, examples=1)
    for i, sample in enumerate(layers):
        calibration = "none" if method == "none" else "shift+scale"
        number = seed * len(layers) + i
        far, moved = calibrated(sample, near, num_features, calibration, number)
        if method == "far weight":
            far = weighed(far, moved, near, sample, **options)
        if method == "transfer":
            start = Far.of(SIZE * far.of_key)
            far = refine_far(start, moved, near, sample, **options)
        found.append(Hybrid(far, moved, window, 1, LEARNED if method == "transfer" else positive))
    return found


def weighed(far: Far, calibration: Calibration, near: Array, sample: Sample, **options) -> Far:
    """With another weight of each head, -inf where none is better; its features as they are."""
    fixed = calibration, near
    weight = transfer(_weighed, far.weight, (far, fixed), sample, loss="squared", **options)
    far = far._replace(weight=weight)
    return at_least_near(hybrid_estimate, far, fixed, sample, True)


def _weighed(weight: Array, fixed: tuple, sample: Sample, is_causal: bool = False) -> Array:
    far, rest = fixed
    return hybrid_estimate(far._replace(weight=weight), rest, sample, is_causal)


def no_worse(
    model: Decoder, attention: Sequence[Hybrid], tokens: Int[Array, "b t"]
) -> list[Hybrid]:
    """Layer by layer the features beside the window, or far weights of -inf where they cost loss.

    So the loss on these tokens is never higher than that of the windows alone; the squared error of
    the attention matrix, which `weighed` looks at, does not say that.
    """
    chosen = [_silent(layer) for layer in attention]
    least = held_out_losses(exchanged(model, chosen), tokens).mean()
    for i, layer in enumerate(attention):
        tried = [*chosen[:i], layer, *chosen[i + 1 :]]
        loss = held_out_losses(exchanged(model, tried), tokens).mean()
        if loss < least:
            chosen, least = tried, loss
    return chosen


def _silent(layer: Hybrid) -> Hybrid:
    new = nnx.clone(layer)
    new.far["weight"][...] = jnp.full_like(new.far["weight"][...], -jnp.inf)
    return new


def exchanged(model: Decoder, attention: Sequence[AttentionFn]) -> Decoder:
    """A copy of the model with these modules for its attention."""
    new = nnx.clone(model)
    for block, attention_fn in zip(new.blocks, attention, strict=True):
        block.attention.attention_fn = attention_fn
    return new
