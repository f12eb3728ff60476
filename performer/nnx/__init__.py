"""Drop-ins for today's Flax (nnx): the layer, and what puts it into a model that is trained.

layer          `PerformerAttention`, the `attention_fn` of `nnx.MultiHeadAttention`
linearization  `linearize`: a trained model with exact attention -> one with random features
"""

from performer.linearization import Report as Report
from performer.nnx.layer import Frequencies as Frequencies
from performer.nnx.layer import PerformerAttention as PerformerAttention
from performer.nnx.layer import Statistics as Statistics
from performer.nnx.layer import redraw as redraw
from performer.nnx.linearization import linearize as linearize
from performer.nnx.linearization import measure as measure

__all__ = [
    "Frequencies",
    "PerformerAttention",
    "Report",
    "Statistics",
    "linearize",
    "measure",
    "redraw",
]
