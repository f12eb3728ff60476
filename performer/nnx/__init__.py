"""Drop-ins for today's Flax (nnx): the layer, and what puts it into a model that is trained.

layer          `PerformerAttention`, the `attention_fn` of `nnx.MultiHeadAttention`
linearization  `linearize`: a trained model with exact attention -> one with random features
report         what it says of every layer and head
"""

from performer.nnx.layer import Frequencies as Frequencies
from performer.nnx.layer import PerformerAttention as PerformerAttention
from performer.nnx.layer import Statistics as Statistics
from performer.nnx.layer import redraw as redraw
from performer.nnx.linearization import linearize as linearize
from performer.nnx.linearization import measure as measure
from performer.nnx.report import Report as Report
