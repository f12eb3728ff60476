"""A trained function with exact attention -> the same one with random features.

function  `linearize`: any function that JAX can trace
compare   what is written in the code of a call, compared with what was measured
program   a traced function as a list of operations, computed with attention replaced
lazy      products q k^T, followed through these operations
search    softmax attention among them
lines     lines of the user's code that operations come from
factors   scale, mask and bias as factors of queries and keys, down to arrays before broadcasting
reading   these factors as arguments of `performer_attention`, in linear time
masks     kinds of masks and biases, told from their values
layout    axes of its arrays, in the order of `performer_attention`
measure   attention in a program, measured on batches
layers    measured layers and their attention errors, shared with `performer.nnx`
recipes   numbers of features and exact pairs of each layer, calibrated and refined
saved     the replacements of a function in one file
report    the attention error of every layer and head
"""

from performer.linearization.function import Linearized as Linearized
from performer.linearization.function import linearize as linearize
from performer.linearization.function import load as load
from performer.linearization.function import measure as measure
from performer.linearization.report import Report as Report
