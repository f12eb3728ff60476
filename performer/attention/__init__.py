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
(c, s, z) alone, and states combine associatively. The modules:

    op         `performer_attention`
    maps       tokens and frequencies -> features, after shift, calibration, scale and weights
    state      the state, its monoid, keys -> state, state -> queries
    sweep      causal and packed attention, chunk by chunk
    window     near, first and heavy keys exactly, beside the states of the others
    parallel   sequences sharded over devices
    pallas     kernels for TPU
"""

from performer.attention.op import attention_weights as attention_weights
from performer.attention.op import performer_attention as performer_attention
from performer.attention.parallel import earlier_devices as earlier_devices
from performer.attention.parallel import over_devices as over_devices
from performer.attention.state import State as State
from performer.attention.state import WindowState as WindowState
from performer.attention.state import combine as combine
