"""Assertions about couplings and about attention, also of your own.

A coupling (`testing.couplings`): its draws are Gaussian, its estimates unbiased, its errors low.

    testing.assert_gaussian_marginals(my_coupling, m=24, d=8)
    testing.assert_unbiased(my_coupling, m=24, d=8)

An attention kernel (`testing.attention`): it computes the estimate, in all cases of a table.

    testing.assert_attention_matches(my_attention)
    testing.assert_causal(my_causal_attention)

References in float64, as the equations state them (`testing.reference`).

    want = testing.reference_attention(query, key, value, frequencies, is_causal=True)

All are plain functions that raise AssertionError: use them with pytest or without.
"""

from performer.testing.attention import assert_attention_consistent as assert_attention_consistent
from performer.testing.attention import assert_attention_error as assert_attention_error
from performer.testing.attention import assert_attention_matches as assert_attention_matches
from performer.testing.attention import assert_causal as assert_causal
from performer.testing.attention import assert_layers_close as assert_layers_close
from performer.testing.attention import assert_lower_attention_error as assert_lower_attention_error
from performer.testing.attention import assert_streams as assert_streams
from performer.testing.couplings import FALSE_ALARM_RATE as FALSE_ALARM_RATE
from performer.testing.couplings import assert_gaussian_marginals as assert_gaussian_marginals
from performer.testing.couplings import assert_lower_mse as assert_lower_mse
from performer.testing.couplings import assert_mse as assert_mse
from performer.testing.couplings import assert_unbiased as assert_unbiased
from performer.testing.couplings import general_points as general_points
from performer.testing.couplings import samples as samples
from performer.testing.reference import reference_attention as reference_attention
from performer.testing.reference import softmax_attention as softmax_attention
