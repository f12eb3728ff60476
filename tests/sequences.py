"""A second task: regression of sequences by a causal Performer. No file of `vit` knows of it."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from performer.nnx import PerformerAttention
from vit import data
from vit.task import Task

LENGTH, WIDTH, HEADS = 12, 16, 2


class Regressor(nnx.Module):
    """x (b, s, 2) -> (b, s), where entry t is of x_1, ..., x_t."""

    def __init__(self, config, *, rngs):
        attention = config.attention
        attention_fn = PerformerAttention(
            attention.num_features,
            WIDTH // HEADS,
            coupling=attention.coupling,
            num_heads=HEADS,
            redraw_every=attention.redraw_every,
            calibration=attention.calibration,
            rngs=rngs,
        )
        self.embed = nnx.Linear(2, WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, attention_fn=attention_fn, decode=False, rngs=rngs
        )
        self.dropout = nnx.Dropout(config.model.dropout, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 1, rngs=rngs)
        self.eval()

    def __call__(self, x):
        x = self.embed(x)
        x = x + self.dropout(self.attention(x, is_causal=True))
        return self.head(nnx.gelu(x))[..., 0]


def differences(model, batch):
    """(b, s)."""
    return model(batch["x"]) - batch["y"]


def loss(model, batch):
    d = differences(model, batch)
    return jnp.mean(d**2), {"error": jnp.sum(jnp.mean(jnp.abs(d), axis=1))}


def count(model, batch):
    d, mask = differences(model, batch), batch["mask"]
    return {
        "loss": jnp.sum(mask * jnp.mean(d**2, axis=1)),
        "error": jnp.sum(mask * jnp.mean(jnp.abs(d), axis=1)),
    }


def results(totals):
    mean = totals["loss"] / totals["examples"]
    return {"loss": mean, "error": totals["error"] / totals["examples"], "deviation": mean**0.5}


def projections(model, batch):
    x, layer = model.embed(batch["x"]), model.attention
    return [(layer.query(x), layer.key(x), layer.value(x))]


TASK = Task(
    create=Regressor,
    loss=loss,
    count=count,
    results=results,
    layers=lambda model: [model.attention],
    projections=projections,
    noun="sequence",
)


def sequences(number, seed):
    """Targets: the mean of the first coordinate so far, times the second."""
    x = np.random.default_rng(seed).normal(size=(number, LENGTH, 2)).astype(np.float32)
    means = np.cumsum(x[..., 0], axis=1) / np.arange(1, LENGTH + 1)
    return [
        {"x": a, "y": b} for a, b in zip(x, (means * x[..., 1]).astype(np.float32), strict=True)
    ]


DATASET = data.in_memory(sequences(96, 0), sequences(40, 1))
