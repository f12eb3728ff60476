"""Attention rollout: the patches that a model attends to, by its own and by exact attention.

Abnar & Zuidema 2020, eq. 1: with A_l the attention matrix of layer l, mean over heads,

    R_l = (A_l + I) / 2 R_{l-1},    R_0 = I,

whose row t has the share of each patch in token t of the last layer.
"""

import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from performer.attention import attention_weights
from performer.nnx import PerformerAttention
from vit.data import augment
from vit.model import ViT, classification
from vit.reports import report


class Maps(NamedTuple):
    """Weight of each patch in n images; each map sums to 1."""

    estimated: Float[Array, "n side side"]
    """Maps of the model's own attention: the estimate of its frequencies, or softmax."""
    exact: Float[Array, "n side side"]
    """Maps of softmax of the same queries and keys."""


def rollout(matrices: Float[Array, "layers n heads s s"]) -> Float[Array, "n s s"]:
    """Return R_L, from the first layer to the last."""
    mixed = (jnp.mean(matrices, axis=2) + jnp.eye(matrices.shape[-1])) / 2
    total = mixed[0]
    for layer in mixed[1:]:
        total = layer @ total
    return total


@nnx.jit
def maps(model: ViT, images: Array) -> Maps:
    """Return the rollout from each patch to the class token, or to the mean over the patches.

    Args:
        model: in evaluation mode.
        images: (n, size, size, c), input of the model.
    """
    estimated, exact = [], []
    triples = classification.projections(model, {"image": images})
    for layer, (query, key, _) in zip(classification.layers(model), triples, strict=True):
        products = jnp.einsum("bthd,bshd->bhts", query, key) / query.shape[-1] ** 0.5
        exact.append(jax.nn.softmax(products.astype(jnp.float32)))
        estimate = layer.attention_fn
        if not isinstance(estimate, PerformerAttention):
            estimated.append(exact[-1])
            continue
        options: Any = estimate.options | {"bias": estimate.bias}
        estimated.append(attention_weights(query, key, estimate.features, **options))
    tokens = model.has_token, model.num_prefix, model.order
    return Maps(*(_on_patches(rollout(jnp.stack(x)), *tokens) for x in (estimated, exact)))


def _on_patches(
    total: Float[Array, "n s s"], has_token: bool, num_prefix: int, order: np.ndarray
) -> Float[Array, "n side side"]:
    rows = total[:, 0] if has_token else jnp.mean(total[:, num_prefix:], axis=1)
    rows = rows[:, num_prefix:][:, np.argsort(order)]
    rows = rows / jnp.sum(rows, axis=-1, keepdims=True)
    side = round(rows.shape[-1] ** 0.5)
    return rows.reshape(-1, side, side)


def draw(image: np.ndarray, title: str, maps: Maps, path: Path, *, same: bool) -> None:
    """Write `path`.png: the picture, and over it the weight of each patch.

    Args:
        image: (size, size, c), input of the model.
        title: title of the picture.
        maps: maps of this picture, without the axis n.
        path: name of the file, without suffix.
        same: true if the model's own attention is exact; then there is one map.
    """
    shown = {"exact attention": maps.exact}
    if not same:
        shown = {"estimated attention": maps.estimated, **shown}
    with report.style():
        drawn, axes = report.figure(path, columns=1 + len(shown))
        picture = augment.to_pil(image).convert("RGB")
        largest = max(float(values.max()) for values in shown.values())
        whole, heat = (0, 1, 1, 0), None
        for axis, name in zip(axes, [title, *shown], strict=True):
            axis.imshow(picture, extent=whole)
            axis.grid(False)
            lines = textwrap.fill(name, 84 // len(axes))  # letters that a panel has room for
            axis.set(title=lines, xticks=[], yticks=[])
        for axis, values in zip(axes[1:], shown.values(), strict=True):
            heat = axis.imshow(np.asarray(values), extent=whole, alpha=0.65, vmin=0, vmax=largest)
        drawn.colorbar(heat, ax=axes[1:], label="share of the patch (rollout)", shrink=0.8)
        report.save(drawn, path)
