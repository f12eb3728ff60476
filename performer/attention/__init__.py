"""Random-feature attention (FAVOR+) in linear time and memory, exactly normalised.

With positive features the estimate of softmax attention is itself two softmax attentions through
m landmarks. With logits l_j(k) = w_j.k - |k|^2 / 2 + the log-weight of the key, 0 without one:

    each feature attends over the keys   c_j = max_k l_j(k),  s_j = sum_k e^{l_j(k) - c_j},
                                         z_j = sum_k e^{l_j(k) - c_j} v(k)
    each query attends over the features a_j = e^{w_j.q + c_j - max_j(w_j.q + c_j)}
                                         output = sum_j a_j z_j / sum_j a_j s_j

The factors e^{c_j} cancel exactly, and so do |q|^2 / 2 and the row maximum: no epsilon is added,
the denominator is at least 1, nothing overflows. (Choromanski et al. 2021 add an epsilon after one
global maximum, which changes the estimate.) The queries depend on the keys through the state
(c, s, z) alone, and states combine associatively.

Parts return rows (maximum, normaliser, numerator) of the queries; `combine` adds the rows of two
sets of keys, and `ratio` divides, once. Without positions all keys are one state, and `attend` does
both at once. The modules, in the order in which a call meets them:

    op          `performer_attention`
    refusals    what a call refuses, as a table
    masks       masks, lengths, decay and segments as arrays
    values      the values of a call: Tokens, Features, Exact, Pairs, Call, Plan
    bias        Bias: numbers of keys, and decay by distance
    maps        tokens and frequencies -> features, after calibration, scale and weights
    state       the state and its monoid: keys -> state, state and queries -> rows
    sweep       causal and packed attention, chunk by chunk
    exact       near, first and heavy keys, and first queries, exactly
    decay       relative positions: weights of pairs by distance
    parallel    sequences sharded over devices
    matrix      the estimated matrix, pair by pair: the one definition of the estimate
    sizes       tokens of chunks and blocks, by platform
    kernels     kernels for TPU and GPU, in the place of all sums
    calibration, refinement   what lowers the error
    dropin      the common part of the layers for Flax
"""

from performer.attention.bias import Bias as Bias
from performer.attention.bias import alibi as alibi
from performer.attention.op import attention_weights as attention_weights
from performer.attention.op import explain as explain
from performer.attention.op import performer_attention as performer_attention
from performer.attention.op import stream as stream
from performer.attention.parallel import earlier_devices as earlier_devices
from performer.attention.parallel import over_devices as over_devices
from performer.attention.state import State as State
from performer.attention.state import WindowState as WindowState
from performer.attention.state import combine as combine
from performer.attention.state import ratio as ratio
from performer.attention.values import Exact as Exact
from performer.attention.values import Features as Features
