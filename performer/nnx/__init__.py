"""Drop-ins for Flax nnx: the layer, and its conversion of trained models.

graph          `GraphAttention`: self-attention between the nodes of a graph
layer          `PerformerAttention`, the `attention_fn` of `nnx.MultiHeadAttention`
transformer    `Transformer`: encoder and decoder of these layers
linearization  `linearize`: a model with exact attention -> one with random features
"""

from performer.choices import optional
from performer.linearization import Report as Report

with optional():
    from performer.nnx.graph import GraphAttention as GraphAttention
    from performer.nnx.layer import Frequencies as Frequencies
    from performer.nnx.layer import PerformerAttention as PerformerAttention
    from performer.nnx.layer import Statistics as Statistics
    from performer.nnx.layer import redraw as redraw
    from performer.nnx.linearization import linearize as linearize
    from performer.nnx.linearization import measure as measure
    from performer.nnx.transformer import States as States
    from performer.nnx.transformer import Transformer as Transformer
