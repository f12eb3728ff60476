"""How far a model's own attention is from softmax attention, per layer and head.

The queries and keys are those of the model on given images; the frequencies are drawn anew, by the
coupling and with the calibration of each layer. See `performer.analysis` for what is measured.
"""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from performer.analysis import attention_error
from performer.calibration import Calibration
from performer.nnx import PerformerAttention
from vit import metrics, report
from vit.model import ViT

Triple = tuple[Float[Array, "b s n h"], Float[Array, "b s n h"], Float[Array, "b s n h"]]


def projections(model: ViT, images: Array) -> list[Triple]:
    """Queries, keys and values (b, tokens, heads, head_dim) of each layer on images."""
    _, intermediates = model(images)
    inputs = [intermediates[f"block{i:02d}/attention_input"] for i in range(len(model.blocks))]
    layers = [block.attention for block in model.blocks]
    return [(a.query(x), a.key(x), a.value(x)) for a, x in zip(layers, inputs, strict=True)]


def calibration(model: ViT, layer: int) -> Calibration | None:
    """The calibration of that layer, if its attention has one."""
    attention = model.blocks[layer].attention.attention_fn
    return attention.calibration if isinstance(attention, PerformerAttention) else None


def rows(
    model: ViT, images: Array, *, coupling: str, num_features: int, draws: int
) -> list[metrics.Record]:
    """One record for each layer and head: errors, means over the images.

    Args:
        model: in evaluation mode.
        images: (b, size, size, channels).
        coupling: of the frequencies that are drawn.
        num_features: m.
        draws: how many draws.
    """
    records = []
    for layer, (query, key, value) in enumerate(nnx.jit(projections)(model, images)):
        error = attention_error(
            query,
            key,
            value,
            coupling=coupling,
            num_features=num_features,
            draws=draws,
            calibration=calibration(model, layer),
        )
        assert error.output is not None
        assert error.uniform_output is not None
        squared_length = jnp.mean(jnp.sum(query**2 + key**2, axis=-1), axis=(0, 1))
        for head in range(query.shape[2]):
            at = (slice(None), head)
            attention, uniform = (
                error.attention.value[at].mean(),
                error.uniform_attention[at].mean(),
            )
            # The images share the draws, so that their standard errors do not average out.
            records.append(
                {
                    "layer": layer,
                    "head": head,
                    "attention error": float(attention),
                    "standard error": float(error.attention.standard_error[at].mean()),
                    "uniform attention": float(uniform),
                    "worse than uniform": bool(attention > uniform),
                    "output error": float(error.output.value[at].mean()),
                    "uniform output": float(error.uniform_output[at].mean()),
                    "row sum error": float(np.sqrt(np.mean(error.row_sum.value[at] ** 2))),
                    "(|q|^2 + |k|^2) / 2": float(squared_length[head] / 2 / key.shape[-1] ** 0.5),
                }
            )
    return records


def write(records: list[metrics.Record], out: Path, title: str) -> str:
    """Writes `out`.csv, `out`.md and the heat map `out`.png; returns what to print."""
    markdown = report.table(records, out)
    grid = {
        name: np.array([r[name] for r in records]).reshape(records[-1]["layer"] + 1, -1)
        for name in ("attention error", "uniform attention", "worse than uniform")
    }
    drawn, axes = report.figure(out, columns=2)
    shown = grid["attention error"], grid["attention error"] / grid["uniform attention"]
    names = "relative attention error", "the same over that of uniform attention"
    for axis, values, name in zip(axes, shown, names, strict=True):
        image = axis.imshow(values, cmap="viridis", vmin=0)
        drawn.colorbar(image, ax=axis)
        axis.set(title=name, xlabel="head", ylabel="layer")
        axis.set_xticks(range(values.shape[1]))
        axis.set_yticks(range(values.shape[0]))
        for (layer, head), worse in np.ndenumerate(grid["worse than uniform"]):
            text = f"{values[layer, head]:.2g}"
            bright = values[layer, head] > 0.6 * values.max()
            axis.text(
                head,
                layer,
                text + (" *" if worse else ""),
                ha="center",
                va="center",
                fontsize=7,
                color="black" if bright else "white",
            )
    drawn.suptitle(f"{report.literal(title)} (*: worse than uniform attention)")
    report.save(drawn, out)
    worse = [f"{r['layer']}.{r['head']}" for r in records if r["worse than uniform"]]
    verdict = f"worse than uniform attention: {', '.join(worse) or 'none'} (layer.head)"
    return f"{markdown}{len(worse)} of {len(records)} heads are {verdict}\n"
