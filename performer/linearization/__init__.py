"""A trained function with exact attention -> the same one with random features.

function  `linearize`: any function that JAX can trace
compare   a call compared with what was measured
places    softmax attention in a traced program
layers    measured layers, their calibration and draws, shared with `performer.nnx`
report    the attention error of every layer and head
"""

from performer.linearization.function import linearize as linearize
from performer.linearization.report import Report as Report
