"""Plants faults in a copy of the tree, one at a time, and looks whether the tests see them.

    python -m tests.faults [--list] [--only PART ...] [--root DIR]

A fault of `FAULTS` changes one place of one file, and names the cheapest tests that must fail then;
they run in the copy, in a process of their own. It is caught when a test fails: not when the
process is killed, when nothing comes back in ten minutes, or when the tests fail without it. With
--root another checkout is copied (before a change, and after it). There a fault may not apply, and
of a test without that name all parameters run, or all tests of its file.
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

LIMIT = 600.0
"""Seconds that the tests of one fault may take."""


class Fault(NamedTuple):
    """A change for the worse."""

    name: str
    """What is wrong then."""
    file: str
    old: str
    """Stands in the file once."""
    new: str
    tests: str
    """In the folder of this file, with spaces between."""


FAULTS = [
    # performer: couplings and what they are made of
    Fault(
        "PNC pairs have the scores g and g",
        "performer/norms.py",
        "jnp.stack([scores, -scores], axis=-1)",
        "jnp.stack([scores, scores], axis=-1)",
        "test_norms.py::test_pairs_satisfy_vrc_eq_7",
    ),
    Fault(
        "PM has a length for each row",
        "performer/norms.py",
        "self.scores(key, 1 if self.common else m)",
        "self.scores(key, m)",
        "test_norms.py::test_monotone_repeats_one_length",
    ),
    Fault(
        "the Matern density is one of cycles, without 2 pi",
        "performer/norms.py",
        "return np.log(2 * self.nu * odds) / 2",
        "return np.log(2 * self.nu * odds) / 2 - np.log(2 * np.pi)",
        "test_norms.py::test_matern_is_the_law_of_a_multivariate_t",
    ),
    Fault(
        "lengths are chi with one degree of freedom less",
        "performer/norms.py",
        "special.gammaincinv(d / 2, tail), special.gammainccinv(d / 2, tail)",
        "special.gammaincinv((d - 1) / 2, tail), special.gammainccinv((d - 1) / 2, tail)",
        "test_norms.py::test_chi_is_accurate_in_both_tails",
    ),
    Fault(
        "one length for all blocks",
        "performer/couplings.py",
        "lengths = coupling.norms(norms_key, d, d)",
        "lengths = coupling.norms(key, d, d)",
        "test_couplings.py::test_pm_shares_one_length_per_block",
    ),
    Fault(
        "antithetic halves are equal",
        "performer/couplings.py",
        "jnp.concatenate([half, -half])",
        "jnp.concatenate([half, half])",
        "test_couplings.py::test_antithetic_halves_are_the_coupling_and_its_opposite[pm-antithetic]",
    ),
    Fault(
        "Halton points are shifted by one number in all dimensions",
        "performer/couplings.py",
        "jax.random.uniform(key, (1, points.shape[1]), jnp.float32)",
        "jax.random.uniform(key, (1, 1), jnp.float32)",
        "test_couplings.py::test_rows_are_gaussian[halton]",
    ),
    Fault(
        "Halton points are scrambled, whatever is asked for",
        "performer/couplings.py",
        "qmc.Halton(d, scramble=scramble,",
        "qmc.Halton(d, scramble=True,",
        "test_uci.py::test_halton_and_sobol_points",
    ),
    Fault(
        "Sobol points have one digital shift for all dimensions",
        "experiments/tabular/low_discrepancy.py",
        "jax.random.bits(key, (1, d), jnp.uint32)",
        "jax.random.bits(key, (1, 1), jnp.uint32)",
        "test_uci.py::test_sobol_rows_are_gaussian",
    ),
    Fault(
        "the heads of a layer share their seed",
        "performer/couplings.py",
        "lambda key: coupling(key, m, d)",
        "lambda _: coupling(keys[0], m, d)",
        "test_nnx.py::test_heads_and_layers_draw_their_own",
    ),
    Fault(
        "frequencies are drawn anew at step 0",
        "performer/couplings.py",
        "(step % every == 0) & (step > 0)",
        "step % every == 0",
        "test_nnx.py::test_redraw_every_so_many_steps",
    ),
    Fault(
        "every new draw is the same",
        "performer/couplings.py",
        "draw(jax.random.fold_in(key, step), coupling, m, h,",
        "draw(key, coupling, m, h,",
        "test_nnx.py::test_redraw_every_so_many_steps",
    ),
    Fault(
        "Haar rows without their signs",
        "performer/directions.py",
        "return -sign[:, None] * jax.lax.fori_loop(",
        "return jax.lax.fori_loop(",
        "test_directions.py::test_haar_has_the_moments_of_haar_measure",
    ),
    Fault(
        "the simplex of Eq. 9 with another sign",
        "performer/directions.py",
        "(root(d) + 1) / (d - 1) * last",
        "(root(d) - 1) / (d - 1) * last",
        "test_directions.py::test_simplex_vertices_are_simrf_eq_9",
    ),
    Fault(
        "SimRF+ turns vectors towards the others' resultant",
        "performer/directions.py",
        "unit = -_normalise(others)",
        "unit = _normalise(others)",
        "test_directions.py::test_simplex_weighted_is_at_its_optimum",
    ),
    Fault(
        "SimRF+ is not rotated",
        "performer/directions.py",
        "return _product(units, haar(key, d, d))",
        "return units",
        "test_couplings.py::test_rows_are_gaussian[simrf+]",
    ),
    Fault(
        "the Hadamard transform is not normalised",
        "performer/hadamard.py",
        "return h / math.sqrt(p)",
        "return h",
        "test_structured.py::test_transform_is_the_hadamard_matrix",
    ),
    Fault(
        "HD products of two blocks",
        "performer/hadamard.py",
        "NUM_BLOCKS = 3",
        "NUM_BLOCKS = 2",
        "test_structured.py::test_multiply_is_three_hd_blocks",
    ),
    Fault(
        "butterfly angles are uniform",
        "performer/butterfly.py",
        "squares.reshape(joins, 2, -1).sum(axis=-1)",
        "squares.reshape(joins, 2, -1)[..., 0]",
        "test_butterfly.py::test_squared_cosines_are_beta",
    ),
    Fault(
        "the transposed butterfly turns the same way",
        "performer/butterfly.py",
        ", 0) * (-1 if back else 1)",
        ", 0)",
        "test_butterfly.py::test_apply_is_the_product_with_an_orthogonal_matrix",
    ),
    Fault(
        "structured lengths are those of unpadded dimensions",
        "performer/structured.py",
        "draw_norms(norms_key, p, p)",
        "draw_norms(norms_key, p, d)",
        "test_structured.py::test_apply_is_the_product_with_the_coupling",
    ),
    # performer: features, kernels, Gaussian processes, closed forms
    Fault(
        "Gaussian features have |x|^2 / 2 once",
        "performer/features.py",
        "exponent = exponent - half",
        "pass",
        "test_features.py::test_positive_matches_the_equation",
    ),
    Fault(
        "hyperbolic weights are not shared by the two signs",
        "performer/features.py",
        'FeatureMap(_hyperbolic, 2, kernel="softmax", weight=0.5)',
        'FeatureMap(_hyperbolic, 2, kernel="softmax")',
        "test_features.py::test_hyperbolic_is_positive_of_both_signs",
    ),
    Fault(
        "Matern distances without 2 nu",
        "performer/kernels.py",
        "squares = (2 * degree + 1) * _summed_squares",
        "squares = _summed_squares",
        "test_kernels.py::test_matern_matches_the_bessel_function",
    ),
    Fault(
        "arc-cosine angles from cosines lose small ones",
        "performer/kernels.py",
        "return 1 - _angles(u, v) / jnp.pi",
        "return 1 - jnp.arccos(jnp.clip(u @ v.T, -1.0, 1.0)) / jnp.pi",
        "test_kernels.py::test_arc_cosine_at_the_origin_and_near_by",
    ),
    Fault(
        "the frequencies of every kernel are Gaussian",
        "performer/kernels.py",
        "return couplings.with_quantile(coupling, self.quantile)",
        "return couplings.get(coupling)",
        "test_kernels.py::test_random_features_of_every_kernel",
    ),
    Fault(
        "VRC Eq. 39 as printed: no 1 / sigma_n^2",
        "performer/gp.py",
        "phi / noise_scale, y / noise_scale",
        "phi / noise_scale, y",
        "test_gp.py::test_features_are_the_exact_form_of_their_gram_matrix",
    ),
    Fault(
        "the KL divergence has its determinants the wrong way round",
        "performer/gp.py",
        "_log_det(q_factor) - _log_det(p_factor)",
        "_log_det(p_factor) - _log_det(q_factor)",
        "test_gp.py::test_kl_against_simulation",
    ),
    Fault(
        "a density without 2 pi",
        "performer/gp.py",
        "jnp.log(2 * jnp.pi * variance)",
        "jnp.log(variance)",
        "test_gp.py::test_negative_log_density",
    ),
    Fault(
        "VRC Eq. 34 as printed: correlations are positive",
        "performer/copula.py",
        "[jnp.tril_indices(m, -1)].set(theta)",
        "[jnp.tril_indices(m, -1)].set(jnp.abs(theta))",
        "test_copula.py::test_cholesky_matches_the_equation",
    ),
    Fault(
        "scores by the transposed Cholesky factor",
        "performer/copula.py",
        "jnp.matmul(factor, independent_scores",
        "jnp.matmul(factor.T, independent_scores",
        "test_copula.py::test_scores_have_the_correlation",
    ),
    Fault(
        "quadrature weights for reflected points, without them",
        "performer/quadrature.py",
        "jnp.tile(weights / 2, 2) if reflect else weights",
        "jnp.tile(weights / 2, 2) if reflect else weights / 2",
        "test_quadrature.py::test_exact_on_monomials_to_degree_three",
    ),
    Fault(
        "the constant of a rule loses its sign",
        "performer/quadrature.py",
        "for sign in (1.0, jnp.sign(constant))",
        "for sign in (1.0, 1.0)",
        "test_quadrature.py::test_the_sign_of_the_constant_is_on_one_side",
    ),
    Fault(
        "lengths of rules are chi_d",
        "performer/quadrature.py",
        "norms.independent(draw_key, d + 1, d + 2)",
        "norms.independent(draw_key, d + 1, d)",
        "test_quadrature.py::test_unbiased[8]",
    ),
    Fault(
        "Quad Sec. 8: lengths are always drawn again",
        "performer/quadrature.py",
        "    if not reject:\n",
        "    if False:\n",
        "test_quadrature.py::test_unbiased[8]",
    ),
    Fault(
        "a copula is scored on the tokens that it was learned on",
        "experiments/attention/errors.py",
        "learned(name, others, other_keys, m)",
        "learned(name, query, key, m)",
        "test_attention_mse.py::test_a_copula_is_learned_on_other_tokens",
    ),
    Fault(
        "Quad Eq. 5: a rho for each vertex",
        "experiments/kernels/quadrature.py",
        "jnp.broadcast_to(rule.lengths[:, :1], rule.lengths.shape)",
        "rule.lengths",
        "test_quadrature_experiment.py::test_variants_of_b",
    ),
    Fault(
        "Quad Sec. 8: B rejected keeps its draws",
        "experiments/kernels/quadrature.py",
        'orthogonal="butterfly", reject=True',
        'orthogonal="butterfly", reject=False',
        "test_quadrature_experiment.py::test_variants_of_b",
    ),
    Fault(
        "SimRF Eq. 25 as printed: v^2k / k!, without 2^k",
        "performer/theory.py",
        "return _kummer(t / 2, d, log_factor)",
        "return _kummer(t, d, log_factor)",
        "test_theory.py::test_orf_is_simrf_eq_23",
    ),
    Fault(
        "SimRF Eq. 77 as printed: (1 + e^-z^2)^2",
        "performer/theory.py",
        "np.expm1(t) ** 2 / 2",
        "(1 + np.exp(t)) ** 2 / 2",
        "test_theory.py::test_errors_agree_with_simulation[orf]",
    ),
    Fault(
        "vectors of a simplex have the cosine -1/d",
        "performer/theory.py",
        "return -1 / (d - 1)",
        "return -1 / d",
        "test_theory_optimal.py::test_simrf_prefactor_at_small_v",
    ),
    Fault(
        "the theory of PNC has two equal lengths",
        "performer/theory.py",
        "(squares + squares[::-1])",
        "(squares + squares)",
        "test_theory_optimal.py::test_vrc_lemma_a_6",
    ),
    Fault(
        "the transport cost of trigonometric features grows with z",
        "performer/theory.py",
        "t = np.asarray(t, np.float64)[..., None, None] / 4",
        "t = np.abs(np.asarray(t, np.float64)[..., None, None]) / 4",
        "test_theory_optimal.py::test_vrc_theorem_3_2",
    ),
    Fault(
        "all pairs of a block count as PNC pairs",
        "performer/theory.py",
        "sum(2 * (size // 2) for size in sizes)",
        "sum(size * (size - 1) for size in sizes)",
        "test_theory.py::test_pairs_of_truncated_blocks_are_counted",
    ),
    Fault(
        "a lower error need not be significant",
        "performer/testing.py",
        "assert score > threshold, (",
        "assert score > -threshold, (",
        "test_testing.py::test_equal_couplings_are_not_lower",
    ),
    Fault(
        "laws are not tested",
        "performer/testing.py",
        "assert result.pvalue > level",
        "assert result.pvalue >= 0",
        "test_testing.py::test_lengths_of_one_degree_less_are_found",
    ),
    Fault(
        "the shift of a calibration has the wrong sign",
        "performer/calibration.py",
        "c = mean[..., keys] + _apply(",
        "c = mean[..., keys] - _apply(",
        "test_calibration.py::test_fit_is_that_of_the_equations",
    ),
    Fault(
        "frequencies of another law without their weights",
        "performer/calibration.py",
        "jnp.sum(jnp.broadcast_to(frequencies, w.shape) ** 2 - w**2, axis=-1) / 2",
        "jnp.zeros(w.shape[:-1])",
        "test_calibration.py::test_attention_is_that_of_the_changed_kernel[tilt]",
    ),
    Fault(
        "a common length has no traceless tilt",
        "performer/calibration.py",
        ".common_lengths is False",
        ".gaussian",
        "test_nnx.py::test_a_common_length_has_a_traceless_tilt",
    ),
    Fault(
        "causal moments leave out a query's own key",
        "performer/calibration.py",
        "jnp.arange(s)[None] <= position[:, None]",
        "jnp.arange(s)[None] < position[:, None]",
        "test_calibration.py::test_moments_are_means_over_pairs",
    ),
    Fault(
        "VRC Eq. 45 as printed: coefficients 4 and 3",
        "performer/_moments.py",
        "squares(residual - A * of_sum)",
        "counts @ jnp.sum(residual**2 - 4 * residual * A * of_sum + 3 * (A * of_sum) ** 2, -1)",
        "test_analysis.py::test_a_named_coupling",
    ),
    Fault(
        "Helmert's residuals without their factor",
        "performer/_moments.py",
        "residual = jnp.sqrt(i / (i + 1)) * change",
        "residual = change",
        "test_analysis.py::test_a_named_coupling",
    ),
    # performer: attention
    Fault(
        "masked keys stay",
        "performer/attention/state.py",
        "if log_weights is None:\n        return split\n",
        "if True:\n        return split\n",
        "test_attention_masks.py::test_masks_lengths_and_removed_keys_are_the_same",
    ),
    Fault(
        "the mask is out of the maximum",
        "performer/attention/state.py",
        "return jnp.where(jnp.isneginf(log_weights), -jnp.inf, exponent + log_weights), factor",
        "w = jnp.exp(log_weights)\n    return exponent, w if factor is None else w * factor",
        "test_attention_masks.py::test_finite_for_any_finite_input[masked-positive]",
    ),
    Fault(
        "padding counts as keys",
        "performer/attention/state.py",
        "pad(log_weights, before, after, -jnp.inf)",
        "pad(log_weights, before, after)",
        "test_attention_masks.py::test_streaming_gives_the_same_numbers[positive]"
        " test_attention_masks.py::test_packed_cross_attention",
    ),
    Fault(
        "a log-weight brings a masked key back",
        "performer/_masks.py",
        "jnp.where(exists[..., None], weights, -jnp.inf)",
        "weights",
        "test_attention_key_weights.py::test_a_mask_is_log_weights_of_zero_and_minus_infinity",
    ),
    Fault(
        "the estimate beside exact keys is a multiple of the kernel",
        "performer/attention/_maps.py",
        "even = jnp.full(m, math.log(weight / m), wide)",
        "even = jnp.full(m, math.log(weight), wide)",
        "test_attention_window.py::test_near_pairs_are_exact_and_far_ones_estimated",
    ),
    Fault(
        "the determinant of a calibration is left out beside exact keys",
        "performer/attention/_maps.py",
        "tilt = tilt + log_determinant(calibration.root)[..., None]",
        "tilt = tilt + 0 * log_determinant(calibration.root)[..., None]",
        "test_attention_window.py::test_calibration",
    ),
    Fault(
        "the chunk beside a query's own is counted twice",
        "performer/attention/_near_and_far.py",
        "chunk, number), (carry.far, carry.far_segment)",
        "chunk, number), (far, carry.far_segment)",
        "test_attention_window.py::test_near_pairs_are_exact_and_far_ones_estimated",
    ),
    Fault(
        "far keys of another segment are seen",
        "performer/attention/_near_and_far.py",
        "goes_on = (carry.far_segment == carry.segment)[..., None]",
        "goes_on = (carry.far_segment == carry.far_segment)[..., None]",
        "test_attention_window.py::test_segments_have_windows_and_first_keys_of_their_own",
    ),
    Fault(
        "a stream forgets the chunk that has become far",
        "performer/attention/_window.py",
        "return rows, jax.lax.cond(exists,",
        "return rows, jax.lax.cond(~exists,",
        "test_attention_window.py::test_streaming",
    ),
    Fault(
        "closed forms take one order of a pair of walkers",
        "performer/graphs/theory.py",
        "count = 2 * (groups * (size - apart)",
        "count = 1 * (groups * (size - apart)",
        "test_graph_theory.py::test_expected_errors",
    ),
    Fault(
        "a visit's later visits are counted from one side",
        "performer/graphs/theory.py",
        "return own + own.T",
        "return 2 * own",
        "test_graph_theory.py::test_second_moments_of_one_walk",
    ),
    Fault(
        "both walkers halt where only one does",
        "performer/graphs/theory.py",
        "one_halts, both_halt = 1 - p_halt - q, 2 * p_halt - 1 + q",
        "one_halts, both_halt = 1 - p_halt - q, p_halt**2 + 0 * q",
        "test_graph_theory.py::test_pagerank_of_pairs",
    ),
    Fault(
        "what has decayed is only counted in the maxima",
        "performer/attention/_decay.py",
        "    drift = jnp.clip(drift, -8.0, 8.0)",
        "    drift = 0 * jnp.clip(drift, -8.0, 8.0)",
        "test_attention_decay.py::test_a_million_tokens_lose_no_digit",
    ),
    Fault(
        "keys after a query do not decay",
        "performer/attention/_decay.py",
        "return lower + jnp.swapaxes(lower, -1, -2)",
        "return lower",
        "test_attention_decay.py::test_within_the_window_it_is_softmax_with_the_bias",
    ),
    Fault(
        "the sweep back takes each token's decay for its neighbour's",
        "performer/attention/_decay.py",
        "jnp.roll(keys.log_decay, 1, axis=1).at[:, 0].set(0.0)",
        "keys.log_decay",
        "test_attention_decay.py::test_decay_of_the_data",
    ),
    Fault(
        "a state does not fade from chunk to chunk of a window",
        "performer/attention/_near_and_far.py",
        "far = _decay.faded(combine(far, carry.beside), total)",
        "far = combine(far, carry.beside)",
        "test_attention_decay.py::test_alibi",
    ),
    Fault(
        "a stream fades by tokens that are near",
        "performer/attention/_near_and_far.py",
        "begins &= place <= folded[:, None]",
        "begins &= place <= folded[:, None] + t",
        "test_attention_decay.py::test_streaming",
    ),
    Fault(
        "states do not fade over the devices between",
        "performer/attention/parallel.py",
        "states = _decay.faded(states, faded)",
        "states = _decay.faded(states, 0 * faded)",
        "test_attention_decay.py::test_split_over_devices",
    ),
    Fault(
        "first keys do not decay for queries before them",
        "performer/attention/_window.py",
        "if not options.is_causal:  # queries before them, too",
        "if False:  # queries before them, too",
        "test_attention_decay.py::test_decay_of_the_data",
    ),
    Fault(
        "a device takes the first of its neighbour's keys for the last",
        "performer/attention/parallel.py",
        "lambda x, count: x[:, x.shape[1] - count :]",
        "lambda x, count: x[:, :count]",
        "test_attention_window.py::test_split_over_devices",
    ),
    Fault(
        "a query that decodes stands beside the first key of the cache",
        "performer/attention/_dropin.py",
        "last = jnp.max(jnp.where(exists, index, -1), axis=-1, keepdims=True)",
        "last = jnp.min(jnp.where(exists, index, s), axis=-1, keepdims=True)",
        "test_nnx.py::test_decoding_with_places_is_causal_attention_with_them",
    ),
    Fault(
        "while decoding, slopes are those of a first token",
        "performer/attention/_dropin.py",
        "places = exact_window or alibi_slopes is not None",
        "places = exact_window",
        "test_nnx.py::test_decoding_with_places_is_causal_attention_with_them",
    ),
    Fault(
        "a linearized linen layer forgets its window",
        "performer/linen.py",
        "            **layer.window._asdict(),\n",
        "",
        "test_linen.py::test_linearize",
    ),
    Fault(
        "cross attention gets a window",
        "performer/nnx/linearization.py",
        "itself = layer.sample.query.shape[1] == layer.sample.key.shape[1]",
        "itself = True",
        "test_linearize.py::test_cross_attention_has_no_window",
    ),
    Fault(
        "errors of linearized layers are those without their window",
        "performer/nnx/report.py",
        "estimate = estimate_with(window)(",
        "estimate = estimate_with(NO_WINDOW)(",
        "test_linearize.py::test_a_window",
    ),
    Fault(
        "patches take the places that they should come from",
        "vit/model.py",
        "x = x[:, self.order]",
        "x = x[:, np.argsort(self.order)]",
        "test_model.py::test_softmax_attention_does_not_see_the_order_that_a_window_wants[token]",
    ),
    Fault(
        "columns are the higher bits of the Z-order curve",
        "vit/model.py",
        "(row >> i & 1) * 2 * 4**i + (column >> i & 1) * 4**i",
        "(row >> i & 1) * 4**i + (column >> i & 1) * 2 * 4**i",
        "test_model.py::test_the_z_order_curve_is_that_of_interleaved_bits",
    ),
    Fault(
        "the class token is estimated beside a window",
        "vit/model.py",
        "exact_first=config.model.num_prefix if attention.exact_window else 0",
        "exact_first=0",
        "test_model.py::test_a_window_over_all_tokens_is_softmax_and_a_small_one_is_on_the_way",
    ),
    Fault(
        "attention maps with a window lie along the Z-order curve",
        "vit/rollout.py",
        "rows = rows[:, np.argsort(order)]",
        "rows = rows[:, order]",
        "test_predict.py::test_maps_leave_out_tokens_without_a_place",
    ),
    Fault(
        "a window is compared on patches row by row",
        "vit/convert.py",
        "run = runs.restore(workdir).with_window(max(exact_window))",
        "run = runs.restore(workdir)",
        "test_convert.py::test_with_a_window",
    ),
    Fault(
        "far keys keep their scale beside a larger near one",
        "performer/_moments.py",
        "kernel * jnp.exp(top - new))",
        "kernel)",
        "test_analysis.py::test_an_exact_window_is_that_of_the_package",
    ),
    Fault(
        "rows that are formed again forget the log-weights",
        "performer/attention/_sweep.py",
        "jnp.moveaxis(x, -2, 0), weighted(key_split, log_weights))",
        "jnp.moveaxis(x, -2, 0), key_split)",
        "test_attention_key_weights.py::test_rows_that_are_formed_again",
    ),
    Fault(
        "log-weights have no gradient",
        "performer/attention/state.py",
        "-jnp.inf, exponent + log_weights)",
        "-jnp.inf, exponent + jax.lax.stop_gradient(log_weights))",
        "test_attention_key_weights.py::test_gradients",
    ),
    Fault(
        "queries lose their norm in a feature map of no softmax",
        "performer/attention/_maps.py",
        "if feature_map.estimates_softmax and not options.exact_window:",
        "if not options.exact_window:",
        "test_attention_options.py::test_options",
    ),
    Fault(
        "records are equal only to themselves",
        "performer/features.py",
        "@dataclasses.dataclass(frozen=True, repr=False)",
        "@dataclasses.dataclass(frozen=True, repr=False, eq=False)",
        "test_features.py::test_equal_records_are_compiled_once",
    ),
    Fault(
        "what stands at masked keys is looked at",
        "performer/attention/op.py",
        "(jnp.where(absent, 0, x) for x in (key, value))",
        "(x for x in (key, value))",
        "test_attention_masks.py::test_what_stands_at_masked_keys_does_not_matter",
    ),
    Fault(
        "under padding, keys after the query are masked",
        "performer/attention/op.py",
        "elif options.is_causal and t not in (0, 1):",
        "elif (options.is_causal or keys.log_weights is not None) and t not in (0, 1):",
        "test_attention_masks.py::test_padding_changes_nothing",
    ),
    Fault(
        "a length that is a symbol is taken for one token",
        "performer/attention/op.py",
        "elif options.is_causal and t not in (0, 1):",
        "elif options.is_causal and isinstance(t, int) and t > 1:",
        "test_attention_symbolic.py::test_later_keys_change_nothing_bit_for_bit",
    ),
    Fault(
        "two lengths that are symbols are compared",
        "performer/attention/op.py",
        "max_dim(t - keys.key.shape[1], 0)",
        "max(t - keys.key.shape[1], 0)",
        "test_attention_symbolic.py::test_causal_cross_attention_with_a_calibration",
    ),
    Fault(
        "features that only fill up a program count",
        "performer/_moments.py",
        "counts = jnp.arange(w.shape[-2]) < num_features",
        "counts = jnp.arange(w.shape[-2]) < w.shape[-2]",
        "test_analysis.py::test_a_named_coupling",
    ),
    Fault(
        "every number of features is compiled anew",
        "performer/_moments.py",
        "_draw(coupling, most if _nested(coupling) else m, *rest)",
        "_draw(coupling, m, *rest)",
        "test_analysis.py::test_all_numbers_of_features_are_compiled_once",
    ),
    Fault(
        "antithetic draws are the first of more",
        "performer/_moments.py",
        "    if isinstance(coupling, couplings.Antithetic):\n        half",
        "    if isinstance(coupling, couplings.Antithetic):\n"
        "        return np.asarray(_draw(coupling, most, *rest))[:, :m]\n        half",
        "test_analysis.py::test_what_is_recommended_has_the_error_of_its_own_draws[orf-antithetic]",
    ),
    Fault(
        "a single evaluation is drawn as a line",
        "experiments/training/report.py",
        "if len(records) == 1:",
        "if False:",
        "test_compare.py::test_one_evaluation_is_drawn_as_points",
    ),
    Fault(
        "links of a report lead astray",
        "experiments/training/report.py",
        'urllib.parse.quote(f"{folder}/")',
        'f"{folder}/"',
        "test_compare.py::test_links_lead_to_folders_whose_names_are_quoted",
    ),
    Fault(
        "an export replaces what somebody else wrote",
        "vit/export.py",
        "    if there:\n",
        "    if False:\n",
        "test_export.py::test_nothing_is_overwritten",
    ),
    Fault(
        "parameters beside a program are read from the wrong place",
        "vit/export.py",
        'start = 8 + int.from_bytes(content[:8], "little")',
        'start = int.from_bytes(content[:8], "little")',
        "test_export.py::test_a_process_with_jax_alone_gives_the_same_logits[beside]",
    ),
    Fault(
        "an export says nothing of the resizing before the crop",
        "vit/export.py",
        '"shorter_side": data.eval_resize or data.image_size',
        '"shorter_side": data.image_size',
        "test_export.py::test_what_stands_beside_it",
    ),
    Fault(
        "a batch over devices is cut as if it were on one",
        "performer/attention/op.py",
        "rows = max_dim(b * k // _devices(), 1)",
        "rows = max_dim(b * k, 1)",
        "test_attention_symbolic.py::test_rows_are_those_of_a_device",
    ),
    Fault(
        "what a map over devices has split is split again",
        "performer/attention/op.py",
        "math.prod(size for size, kind in kinds if kind != AxisType.Manual)",
        "math.prod(size for size, kind in kinds)",
        "test_attention_symbolic.py::test_rows_are_those_of_a_device",
    ),
    Fault(
        "values are rounded with their mean, in the backward pass",
        "performer/attention/state.py",
        "near, d_near = z - mean * s[..., None], dz - mean * ds[..., None]",
        "mean = 0 * mean\n    near, d_near = z - mean * s[..., None], dz - mean * ds[..., None]",
        "test_attention_bfloat16.py::test_random_queries[3]",
    ),
    Fault(
        "the normaliser's gradient does not know what was rounded",
        "performer/attention/state.py",
        "return (s, z), (ds, rounded(dz) + mean)",
        "return (s, z), (ds, rounded(dz + mean))",
        "test_attention_bfloat16.py::test_random_queries[3]",
    ),
    Fault(
        "an exported program works in the blocks of a CPU everywhere",
        "performer/attention/op.py",
        'default=on("other")',
        'default=on("cpu")',
        "test_attention_symbolic.py::test_sizes_are_those_of_the_platform_that_runs_it",
    ),
    Fault(
        "symbolic blocks leave out the last tokens",
        "performer/attention/_sizes.py",
        "return count, -(-length // (count * multiple)) * multiple",
        "return count, max_dim(length // (count * multiple), 1) * multiple",
        "test_attention_symbolic.py::test_blocks_are_those_of_numbers_but_for_those_without_padding",
    ),
    Fault(
        "a query without any key is divided by zero",
        "performer/attention/state.py",
        "(1 / jnp.where(denominator == 0, 1.0, denominator))",
        "(1 / denominator)",
        "test_attention_masks.py::test_masks_lengths_and_removed_keys_are_the_same",
    ),
    Fault(
        "the maximum of the chunk in the place of the row's",
        "performer/attention/_sweep.py",
        "running = jax.lax.cummax(mu, axis=mu.ndim - 1)",
        "running = jnp.broadcast_to(jnp.max(mu, axis=-1, keepdims=True), mu.shape)",
        "test_attention_masks.py::test_early_queries_keep_their_precision",
    ),
    Fault(
        "states are added without a common maximum",
        "performer/attention/state.py",
        "*(_rescaled(x, maximum) for x in (left, right))",
        "*((x.normaliser, x.numerator) for x in (left, right))",
        "test_attention_masks.py::test_causal_of_any_length[40]",
    ),
    Fault(
        "a chunk sees the state after it",
        "performer/attention/_sweep.py",
        "return combine(seen, chunk), state",
        "return (combine(seen, chunk),) * 2",
        "test_attention_masks.py::test_the_future_changes_nothing_bit_for_bit[positive]",
    ),
    Fault(
        "the own chunk counts in both sweeps of packed segments",
        "performer/attention/op.py",
        'window="none"',
        'window="all"',
        "test_attention_masks.py::test_packed_segments",
    ),
    Fault(
        "a state does not end with its segment",
        "performer/attention/_sweep.py",
        "jnp.where(continues[..., None], seen.maximum, -jnp.inf)",
        "seen.maximum",
        "test_attention_masks.py::test_packed_segments",
    ),
    Fault(
        "query heads are dealt to key heads in turn",
        "performer/attention/op.py",
        "jnp.repeat(x, n // x.shape[2], axis=2)",
        "jnp.tile(x, (1, 1, n // x.shape[2], *[1] * (x.ndim - 3)))",
        "test_attention_op.py::test_grouped_heads",
    ),
    Fault(
        "the shift is added to the keys",
        "performer/attention/_maps.py",
        "key.astype(wide) - jnp.broadcast_to(inputs.shift",
        "key.astype(wide) + jnp.broadcast_to(inputs.shift",
        "test_attention_op.py::test_shift_moves_the_keys_and_not_the_limit[positive]",
    ),
    Fault(
        "|k|^2 / 2 without the scale",
        "performer/attention/_maps.py",
        "return options.scale / 2 * jnp.sum(",
        "return 0.5 * jnp.sum(",
        "test_attention.py::test_matches_the_oracle",
    ),
    Fault(
        "float16 values are summed over the keys in float16",
        "performer/attention/state.py",
        "value.dtype if value.dtype == jnp.bfloat16 else float32_or_wider(value)",
        "value.dtype",
        "test_attention_op.py::test_low_precision",
    ),
    Fault(
        "a device counts its own keys twice in causal attention",
        "performer/attention/parallel.py",
        "_of_some(state, axis_name, jnp.less,",
        "_of_some(state, axis_name, jnp.less_equal,",
        "test_attention_parallel.py",
    ),
    Fault(
        "additive masks are taken for masks of ones and zeros",
        "performer/_masks.py",
        "if smallest(mask) < 0:",
        "if False:",
        "test_attention_op.py::test_bad_input_names_the_fix",
    ),
    Fault(
        "attention dropout is left out without a word",
        "performer/attention/_dropin.py",
        "if dropout_rate > 0 and not deterministic:",
        "if False:",
        "test_nnx.py::test_what_linear_attention_cannot_do_is_an_error",
    ),
    Fault(
        "the dtype of a layer is not that of its attention",
        "performer/attention/_dropin.py",
        "if dtype is not None:",
        "if False:",
        "test_nnx.py::test_the_dtype_of_the_layer_is_that_of_its_attention",
    ),
    Fault(
        "the kernel counts keys past the last",
        "performer/attention/_tiles.py",
        "    weights = jnp.where(inside, weights, -jnp.inf)\n",
        "    weights = jnp.where(inside, weights, 0.0)\n",
        "test_attention_pallas.py::test_values_against_the_oracle",
    ),
    Fault(
        "the kernel's gradient of queries forgets the normaliser",
        "performer/attention/_tiles.py",
        "dx = (p * (u - s * a)).astype(dtype)",
        "dx = (p * u).astype(dtype)",
        "test_attention_pallas.py::test_gradients",
    ),
    Fault(
        "the kernel's gradient of keys forgets their norm",
        "performer/attention/_tiles.py",
        "dk -= scale * x.key",
        "dk -= 0 * scale * x.key",
        "test_attention_pallas.py::test_gradients",
    ),
    Fault(
        "the kernel adds gradients of frequencies up over one batch entry alone",
        "performer/attention/_pallas.py",
        "    return (pl.program_id(1) == 0) & (pl.program_id(2) == 0)",
        "    return pl.program_id(2) == 0",
        "test_attention_pallas.py::test_gradients",
    ),
    Fault(
        "the kernel rounds z in its own gradient",
        "performer/attention/_tiles.py",
        "jnp.concatenate([high, low], axis=2)",
        "jnp.concatenate([high, 0 * low], axis=2)",
        "test_attention_pallas.py::test_bfloat16_gradients_are_as_good_as_those_of_softmax",
    ),
    Fault(
        "the causal kernel lets a query miss its own key",
        "performer/attention/_pallas_causal.py",
        "jnp.where(s <= t, mu",
        "jnp.where(s < t, mu",
        "test_attention_pallas.py::test_causal_values_against_the_oracle",
    ),
    Fault(
        "the causal kernel hands gradients to earlier chunks unscaled",
        "performer/attention/_pallas_causal.py",
        "dz = dz * jnp.exp(c - finite(after)) + ",
        "dz = dz + ",
        "test_attention_pallas.py::test_gradients",
    ),
    Fault(
        "the causal kernel keeps rows that have underflowed",
        "performer/attention/_pallas_causal.py",
        "lost = (total < LOST) &",
        "lost = (total < 0) &",
        "test_attention_pallas.py::test_lost_rows_are_those_without_the_kernel",
    ),
    Fault(
        "the kernel is taken for widths that it has no tiles for",
        "performer/attention/_fused.py",
        "if any(width % 16 for width in widths):",
        "if any(width % 1 for width in widths):",
        "test_attention_pallas.py::test_what_it_does_not_take",
    ),
    Fault(
        "the benchmark times a kernel whose values are wrong",
        "experiments/speed/kernels.py",
        "if not max(found) < DIFFERENCE:",
        "if not max(found) < 1:",
        "test_attention_pallas.py::test_the_benchmark_compares_before_it_times",
    ),
    Fault(
        "statistics are moved before they are used",
        "performer/nnx/layer.py",
        "        output, weights = attention_fn(\n",
        "        if self.statistics and not self.use_running_average:\n"
        "            self._measure(query, key, mask, is_causal)\n"
        "        output, weights = attention_fn(\n",
        "test_nnx.py::test_calibrated_causal_attention_does_not_see_the_future_in_training",
    ),
    Fault(
        "momentum is the weight of what is new",
        "performer/nnx/layer.py",
        "new = (1 - self.momentum) * moments.astype(old.dtype)",
        "new = self.momentum * moments.astype(old.dtype)",
        "test_nnx.py::test_running_statistics_move_in_training_and_stay_in_evaluation",
    ),
    Fault(
        "statistics move in evaluation",
        "performer/nnx/layer.py",
        "if self.statistics and not self.use_running_average:",
        "if self.statistics:",
        "test_nnx.py::test_running_statistics_move_in_training_and_stay_in_evaluation",
    ),
    Fault(
        "all layers draw the same new frequencies",
        "performer/nnx/layer.py",
        "jax.random.fold_in(key, i),",
        "key,",
        "test_nnx.py::test_redraw_every_so_many_steps",
    ),
    Fault(
        "linen's causal attention is not causal",
        "performer/linen.py",
        "is_causal=is_causal,",
        "is_causal=False,",
        "test_linen.py::test_is_performer_attention_between_the_projections",
    ),
    Fault(
        "gamma without its factor of 2",
        "performer/sklearn.py",
        "(2 * self.gamma_) ** -0.5",
        "self.gamma_**-0.5",
        "test_sklearn.py::test_float64_is_computed_in_float64",
    ),
    Fault(
        "the transformer has the features of the RBF kernel, whatever the kernel",
        "performer/sklearn.py",
        "phi = kernel.feature_map(x, frequencies",
        "phi = features.trigonometric(x, frequencies",
        "test_sklearn.py::test_other_kernels",
    ),
    Fault(
        "float64 inputs are computed in float32",
        "performer/sklearn.py",
        "with jax.enable_x64(X.dtype == np.float64):",
        "with jax.enable_x64(False):",
        "test_sklearn.py::test_float64_is_computed_in_float64",
    ),
    # performer.graphs
    Fault(
        "the adjacency matrix is divided by degrees without their roots",
        "performer/graphs/graph.py",
        "np.sqrt(np.where(alone, 1, matrix.sum(axis=1)))",
        "np.where(alone, 1, matrix.sum(axis=1))",
        "test_graph.py::test_normalised_is_one_minus_the_laplacian",
    ),
    Fault(
        "the sigma-coupling pairs each quantile with itself",
        "performer/graphs/couplings.py",
        "jnp.stack([q, table[q]], axis=-1)",
        "jnp.stack([q, q], axis=-1)",
        "test_graph_couplings.py::test_sigma_matches_quantiles",
    ),
    Fault(
        "two antithetic walkers may halt at the same step",
        "performer/graphs/couplings.py",
        "(alive & ~stops, now + 1, ",
        "(alive & ~stops, now, ",
        "test_graph_couplings.py::test_antithetic_pairs_follow_the_table_of_the_paper",
    ),
    Fault(
        "an ensemble is spaced like a pair",
        "performer/graphs/couplings.py",
        "offset=p_halt, size=size)",
        "offset=0.5, size=size)",
        "test_graph_couplings.py::test_no_two_of_an_ensemble_halt_at_once",
    ),
    Fault(
        "loads do not divide by the chance to go on",
        "performer/graphs/walks.py",
        "load * factor / (1 - p_halt)",
        "load * factor",
        "test_graph_walks.py::test_loads_are_unbiased_for_the_powers_of_the_weights[uniform]",
    ),
    Fault(
        "a walk draws the same number at each step",
        "performer/graphs/walks.py",
        "node, _bits(seed, walker, step)",
        "node, _bits(seed, walker, 0 * step)",
        "test_graph_walks.py::test_loads_are_unbiased_for_the_powers_of_the_weights[uniform]",
    ),
    Fault(
        "walks do not avoid the edges of earlier ones",
        "performer/graphs/reinforced.py",
        "jnp.where(there, passed[edges[places]], jnp.inf)",
        "jnp.where(there, 0 * passed[edges[places]], jnp.inf)",
        "test_graph_walks.py::test_reinforced_walks_avoid_edges_of_earlier_ones",
    ),
    Fault(
        "reinforced loads divide by uniform chances",
        "performer/graphs/reinforced.py",
        "sums[-1] / chances[chosen]",
        "there.sum().astype(sums.dtype)",
        "test_graph_walks.py::test_loads_are_unbiased_for_the_powers_of_the_weights[reinforced]",
    ),
    Fault(
        "two ensembles are one",
        "performer/graphs/features.py",
        "for half in jax.random.split(key))",
        "for half in (key, key))",
        "test_graph_walks.py::test_estimates_are_unbiased[antithetic]",
    ),
    Fault(
        "a node alone has the load of every step",
        "performer/graphs/features.py",
        "load=jnp.where(alone & (sampled.step > 0), 0, sampled.load)",
        "load=jnp.where(alone, 1, sampled.load)",
        "test_graph_walks.py::test_estimates_are_unbiased[antithetic]",
    ),
    Fault(
        "features are not divided by the number of walks",
        "performer/graphs/features.py",
        "* sampled.load / sampled.num_walks",
        "* sampled.load",
        "test_graph_walks.py::test_the_features_are_those_of_the_equation",
    ),
    Fault(
        "VRC App. F.1 as printed: I - sigma^2 L",
        "performer/graphs/kernels.py",
        "(1 + self.sigma**2 * laplacian) ** -self.d",
        "(1 - self.sigma**2 * laplacian) ** -self.d",
        "test_graph_kernels.py::test_dense_kernels_are_the_functions_of_the_laplacian",
    ),
    Fault(
        "a modulation is of the kernel, not of its root",
        "performer/graphs/kernels.py",
        "_binomial(-d / 2, -rho, (1 + sigma**2) ** (-d / 2), length)",
        "_binomial(-d, -rho, (1 + sigma**2) ** (-d), length)",
        "test_graph_kernels.py::test_series_square_to_the_kernels",
    ),
    Fault(
        "what halts at a node alone stays there",
        "performer/graphs/pagerank.py",
        "jnp.where(alone, p_halt * halted, halted)",
        "halted",
        "test_graph_pagerank.py::test_walks_are_unbiased[independent-uniform]",
    ),
    Fault(
        "the power iteration loses what is at nodes alone",
        "performer/graphs/pagerank.py",
        "shared = p_halt + (1 - p_halt) * x[alone].sum()",
        "shared = p_halt",
        "test_graph_pagerank.py::test_power_iteration_is_that_of_networkx",
    ),
    Fault(
        "a Johnson-Lindenstrauss matrix without its scale",
        "performer/graphs/matching.py",
        ", size)) / np.sqrt(size)",
        ", size))",
        "test_graph_matching.py::test_solvers_find_the_best_of_all",
    ),
    Fault(
        "costs of the assignment are squares",
        "performer/graphs/matching.py",
        "np.sum(sums**4, axis=-1)",
        "np.sum(sums**2, axis=-1)",
        "test_graph_matching.py::test_averages_over_all_pairs_of_nodes",
    ),
    Fault(
        "float16 projections",
        "performer/graphs/matching.py",
        "candidate = assign(edges @ rng",
        "candidate = assign(edges.astype(np.float16).astype(float) @ rng",
        "test_graph_matching.py::test_projections_and_norms_are_in_float64",
    ),
    Fault(
        "float16 norms",
        "performer/graphs/matching.py",
        "value = objective(candidate, edges, edges)",
        "value = float(np.float16(objective(candidate, edges, edges)))",
        "test_graph_matching.py::test_projections_and_norms_are_in_float64",
    ),
    Fault(
        "the halves of a permutation meet in one order",
        "performer/graphs/matching.py",
        "a @ (costs + costs.T) @ b.T",
        "2 * a @ costs @ b.T",
        "test_graph_matching.py::test_all_permutations_are_tried[6]",
    ),
    Fault(
        "the permutation of PageRank costs most",
        "performer/graphs/pagerank.py",
        "return matching.assign(rows @ rows.T)",
        "return matching.assign(-rows @ rows.T)",
        "test_graph_pagerank.py::test_permutations_of_high_order_reach_the_optimal_transport",
    ),
    Fault(
        "walkers at any offset are taken for antithetic ones",
        "performer/graphs/theory.py",
        "        return coupling\n    if coupling not in",
        "        return Group(0.5, coupling.size)\n    if coupling not in",
        "test_graph_theory.py::test_expected_errors[four, of whom neighbours halt at once]",
    ),
    Fault(
        "of couplings with as many walks any is recommended",
        "performer/graphs/theory.py",
        "(x.visits, x.error)",
        "x.visits",
        "test_graph_theory.py::test_of_couplings_that_take_as_many_walks_the_best_is_recommended",
    ),
    Fault(
        "all that is nearest is far away",
        "experiments/graphs/regression.py",
        "lengths.data = 1 / lengths.data",
        "lengths.data = lengths.data",
        "test_graph_sigma.py::test_nearest",
    ),
    Fault(
        "half the distance in k-means",
        "performer/graphs/tasks.py",
        "own[None] - 2 * sums",
        "own[None] - sums",
        "test_graph_tasks.py::test_it_is_k_means_of_points",
    ),
    Fault(
        "the noise scale is a variance",
        "performer/graphs/gp.py",
        "noise_scale**2 * v",
        "noise_scale * v",
        "test_graph_gp.py::test_the_posterior_is_that_of_the_gram_matrix",
    ),
    Fault(
        "a scale that is fixed moves",
        "performer/graphs/gp.py",
        "start.logarithms(y.dtype, fixed)",
        "start.logarithms(y.dtype)",
        "test_graph_gp.py::test_a_scale_that_is_fixed",
    ),
    Fault(
        "the likelihood has no determinant",
        "performer/graphs/gp.py",
        "(-products[0] + jnp.mean(products[1:]))",
        "(-products[0] + 0 * jnp.mean(products[1:]))",
        "test_graph_gp.py::test_fitted_scales_maximise_the_dense_likelihood",
    ),
    # vit
    Fault(
        "a resumed run begins with the first batch",
        "vit/data.py",
        "slice(start * processes + process, None, processes)",
        "slice(process, None, processes)",
        "test_data.py::test_stream_goes_on_from_a_saved_position",
    ),
    Fault(
        "training does not ask for the batch of its step",
        "vit/loop.py",
        "runs.batches(dataset, config, mesh, step, num_steps",
        "runs.batches(dataset, config, mesh, 0, num_steps",
        "test_train.py::test_a_resumed_run_is_bitwise_the_uninterrupted_one",
    ),
    Fault(
        "the moments of Adam are not restored",
        "vit/runs.py",
        "    checkpoint.set_aside(workdir, step)\n",
        "    checkpoint.set_aside(workdir, step)\n"
        "    state = jax.tree.map_with_path(\n"
        '        lambda p, x: 0 * x if "mu" in jax.tree_util.keystr(p) else x, state\n'
        "    )\n",
        "test_train.py::test_a_resumed_run_is_bitwise_the_uninterrupted_one",
    ),
    Fault(
        "a signal does not stop a stretch",
        "vit/loop.py",
        "while len(values) < number and not (values and stopping()):",
        "while len(values) < number:",
        "test_train.py::test_a_signal_stops_within_a_stretch_and_within_an_evaluation",
    ),
    Fault(
        "a signal does not stop an evaluation",
        "vit/safety.py",
        "            raise Stopped\n",
        "            pass\n",
        "test_safety.py::test_until",
    ),
    Fault(
        "the second signal is swallowed, too",
        "vit/safety.py",
        "            signal.signal(number, previous[number])\n",
        "            pass\n",
        "test_safety.py::test_the_second_signal_ends_the_process",
    ),
    Fault(
        "two processes may hold a folder",
        "vit/safety.py",
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_SH | fcntl.LOCK_NB",
        "test_safety.py::test_a_folder_is_held_until_the_process_ends_even_if_killed",
    ),
    Fault(
        "the step before the one that diverged is named",
        "vit/safety.py",
        "last_step - len(stretch) + 1)",
        "last_step - len(stretch))",
        "test_safety.py::test_the_first_step_that_diverged_is_named",
    ),
    Fault(
        "checksums that do not see every bit",
        "vit/checkpoint.py",
        ".reshape(x.shape) * 2 + 1",
        ".reshape(x.shape) * 2",
        "test_checkpoint.py::test_every_single_changed_word_changes_its_checksum",
    ),
    Fault(
        "checksums are not compared",
        "vit/checkpoint.py",
        'checksums(loaded["state"]), loaded["checksums"]',
        'loaded["checksums"], loaded["checksums"]',
        "test_checkpoint.py::test_nothing_that_can_be_read",
    ),
    Fault(
        "the oldest checkpoint is read",
        "vit/checkpoint.py",
        "in reversed(found(workdir)):",
        "in found(workdir):",
        "test_checkpoint.py::test_the_newest_two_are_kept_and_read",
    ),
    Fault(
        "the log is not cut at the step of the checkpoint",
        "vit/metrics.py",
        ' if line["step"] <= step]',
        "]",
        "test_metrics.py::test_log",
    ),
    Fault(
        "hidden examples count as right ones",
        "vit/classification.py",
        "jnp.sum((rank < k) * mask)",
        "jnp.sum(rank < k)",
        "test_metrics.py::test_counts",
    ),
    Fault(
        "ties go for the label",
        "vit/classification.py",
        "jnp.sum(~(logits < label_logit), axis=-1) - 1",
        "jnp.sum(logits > label_logit, axis=-1)",
        "test_metrics.py::test_ties_and_nan_are_no_hits",
    ),
    Fault(
        "hidden examples count in the loss of an evaluation",
        "vit/classification.py",
        'jnp.sum(losses * batch["mask"])',
        "jnp.sum(losses)",
        "test_metrics.py::test_hidden_examples_have_no_loss",
    ),
    Fault(
        "labels of other classes are trained on in the folder of a run",
        "vit/runs.py",
        "        if old[name] != new[name]:",
        "        if False:",
        "test_use.py::test_other_data_under_the_same_config_are_refused",
    ),
    Fault(
        "a turned photograph is seen as it lies",
        "vit/use.py",
        "in range(2, 9):",
        "in ():",
        "test_use.py::test_a_turned_photograph_is_seen_upright",
    ),
    Fault(
        "what a batch is padded with is predicted, too",
        "vit/use.py",
        "np.asarray(logits)[: len(pixels)]",
        "np.asarray(logits)",
        "test_use.py::test_images_are_those_of_the_evaluation",
    ),
    Fault(
        "pictures are cut out of another part than in the evaluation",
        "vit/use.py",
        "return data.evaluated_pixels(content, self.config.data, self.channels)",
        "return data.evaluated_pixels(content, configs.Data(), self.channels)",
        "test_use.py::test_images_are_those_of_the_evaluation",
    ),
    Fault(
        "rollout goes from the last layer to the first",
        "vit/rollout.py",
        "total = layer @ total",
        "total = total @ layer",
        "test_predict.py::test_rollout_is_that_of_the_paper",
    ),
    Fault(
        "the map of exact attention is that of the estimate",
        "vit/rollout.py",
        "for x in (own, exact)))",
        "for x in (own, own)))",
        "test_predict.py::test_maps_are_of_the_models_own_queries_and_keys",
    ),
    Fault(
        "a table of predictions takes the place of another file",
        "vit/predict.py",
        'path.open("x", newline',
        'path.open("w", newline',
        "test_predict.py::test_a_table_is_looked_at_first_and_grows_batch_by_batch",
    ),
    Fault(
        "what is held out of arrays is trained on, too",
        "vit/arrays.py",
        "zip(records, held, strict=True) if not out]",
        "zip(records, held, strict=True)]",
        "test_arrays.py::test_a_share_is_held_out_and_a_config_by_name",
    ),
    Fault(
        "a program for other devices has the blocks of this machine",
        "performer/attention/op.py",
        "return jax.default_backend() if device is None else device.platform",
        "return jax.default_backend()",
        "test_attention_symbolic.py::test_blocks_are_those_of_the_mesh_in_context",
    ),
    Fault(
        "a plan forgets the evaluation step",
        "vit/dry_run.py",
        "for x in (self.train, self.evaluate)) <=",
        "for x in (self.train,)) <=",
        "test_dry_run.py::test_what_a_device_has_decides",
    ),
    Fault(
        "collectives of several arrays count their first",
        "vit/dry_run.py",
        "found[kind].append(sum(sizes))",
        "found[kind].append(sizes[0])",
        "test_dry_run.py::test_collectives_of_a_program_by_kind_and_bytes",
    ),
    Fault(
        "the running mean is not evaluated",
        "vit/steps.py",
        "        nnx.update(model, mean)\n",
        "        pass\n",
        "test_train.py::test_the_running_mean_is_what_is_evaluated",
    ),
    Fault(
        "label smoothing is dropped",
        "vit/classification.py",
        "smooth_labels(targets, config.optim.label_smoothing)",
        "smooth_labels(targets, 0.0)",
        "test_train.py::test_one_compilation_for_all_steps_and_label_smoothing",
    ),
    Fault(
        "mixup does not reach the training step",
        "vit/classification.py",
        "if any(alphas):",
        "if False:",
        "test_train.py::test_mixup_is_in_the_step",
    ),
    Fault(
        "gradients of parts are sums of means",
        "vit/steps.py",
        "return loss / parts, sums",
        "return loss, sums",
        "test_train.py::test_a_batch_in_parts_gives_the_same_step",
    ),
    Fault(
        "what is counted in parts is that of the last one",
        "vit/steps.py",
        "jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)",
        "jax.tree.map(lambda x: x[-1], sums)",
        "test_train.py::test_a_batch_in_parts_gives_the_same_step",
    ),
    Fault(
        "a task's own results are taken for means",
        "vit/steps.py",
        "task.results(total).items()",
        'Task._field_defaults["results"](total).items()',
        "test_task.py::test_it_is_learned_and_measured_by_its_own_names",
    ),
    Fault(
        "a task that is given is forgotten when its run is restored",
        "vit/runs.py",
        "dataset, task = subject(config, dataset, task, workdir)",
        "dataset, task = subject(config, dataset)",
        "test_task.py::test_evaluation_is_that_of_the_sequences_without_padding",
    ),
    Fault(
        "queries and keys are reported without the calibration of their layer",
        "vit/attention_report.py",
        "calibration=calibration(layer.attention_fn)",
        "calibration=None",
        "test_task.py::test_the_report_has_the_calibration_of_the_layer",
    ),
    Fault(
        "weights decay everywhere, biases too",
        "vit/optim.py",
        "weight_decay=optim.weight_decay, mask=_is_kernel",
        "weight_decay=optim.weight_decay",
        "test_optim.py::test_only_weights_of_linear_maps_decay",
    ),
    Fault(
        "the running mean has no warm-up",
        "vit/optim.py",
        "share = 1 - jnp.minimum(decay, (1 + t) / (10 + t))",
        "share = 1 - decay",
        "test_optim.py::test_running_mean",
    ),
    Fault(
        "the user's own folder of compiled programs is not taken",
        "vit/machine.py",
        ' or jax.config.values["jax_compilation_cache_dir"]:',
        ":",
        "test_machine.py::test_programs_are_kept_but_those_of_cpus",
    ),
    Fault(
        "one worker of a slice waits for the others",
        "vit/devices.py",
        "    if number > 1:\n",
        "    if number > 99:\n",
        "test_devices.py::test_one_worker_of_a_slice_is_refused_instead_of_waiting_for_the_others",
    ),
    Fault(
        "a run that has lost its terminal prints to it",
        "vit/safety.py",
        "if error.errno not in (errno.EPIPE, errno.EIO):",
        "if error.errno != errno.EPIPE:",
        "test_safety.py::test_a_terminal_that_closes_asks_to_stop",
    ),
    Fault(
        "a run ends with the reader of its log",
        "vit/safety.py",
        "if error.errno not in (errno.EPIPE, errno.EIO):",
        "if error.errno != errno.EIO:",
        "test_train.py::test_a_dead_reader_of_the_log_stops_nothing",
    ),
    Fault(
        "grey values of 16 bits are clipped",
        "vit/bounded.py",
        'if opened.mode.startswith("I"):',
        "if False:",
        "test_bounded.py::test_grey_values_of_16_bits_keep_their_shades",
    ),
    Fault(
        "the checkpoint of the worst evaluation is kept",
        "vit/metrics.py",
        '(-record.get("eval_accuracy", 0.0)',
        '(record.get("eval_accuracy", 0.0)',
        "test_checkpoint.py::test_the_best_and_milestones_are_kept_beside_the_newest_two",
    ),
    Fault(
        "a host that sees another folder is not noticed",
        "vit/hosts.py",
        'failures("" if seen else',
        'failures("" if True else',
        "test_hosts.py::test_both_say_that_one_has_another_folder",
    ),
    Fault(
        "hosts with other flags are not noticed",
        "vit/hosts.py",
        "        if said != first\n",
        "        if said == 0\n",
        "test_hosts.py::test_both_say_that_one_has_another_flag",
    ),
    Fault(
        "all seconds so far count as waiting for data",
        "vit/loop.py",
        "asked = time.perf_counter()",
        "asked = start",
        "test_train.py::test_seconds_without_a_batch_are_counted_and_said",
    ),
    Fault(
        "the rate that is logged is that of the next step",
        "vit/progress.py",
        "np.asarray(self.rate(step - 1))",
        "np.asarray(self.rate(step))",
        "test_train.py::test_three_steps",
    ),
    Fault(
        "what a step that is passed over computed is kept",
        "vit/steps.py",
        "return new if is_count else jnp.where(good, new, old)",
        "return new",
        "test_train.py::test_steps_that_are_not_finite_are_passed_over",
    ),
    Fault(
        "a step that is passed over does not count",
        "vit/steps.py",
        "return new if is_count else jnp.where(good, new, old)",
        "return jnp.where(good, new, old)",
        "test_train.py::test_steps_that_are_not_finite_are_passed_over",
    ),
    Fault(
        "steps are passed over for ever",
        "vit/safety.py",
        "if row <= allowed:",
        "if row <= allowed or allowed:",
        "test_safety.py::test_so_many_steps_in_a_row_may_be_passed_over",
    ),
    Fault(
        "b2 is not given to Adam",
        "vit/optim.py",
        "optax.adamw(rate, b2=optim.b2, ",
        "optax.adamw(rate, ",
        "test_optim.py::test_b2_is_that_of_adam",
    ),
    Fault(
        "the final learning rate is taken for a share of the peak",
        "vit/optim.py",
        "alpha=final / peak if peak else 0",
        "alpha=final if peak else 0",
        "test_optim.py::test_schedule",
    ),
    Fault(
        "the sharding of the parameters is dropped",
        "vit/devices.py",
        "if fsdp == 1 or x.size < SMALLEST or not axes:",
        "if True:",
        "test_devices.py::test_each_of_eight_devices_holds_an_eighth",
    ),
    Fault(
        "the peak is that of the shortest name that fits",
        "vit/devices.py",
        "PEAK[max(known, key=len)]",
        "PEAK[min(known, key=len)]",
        "test_devices.py::test_the_peak_is_that_of_the_longest_name_that_fits",
    ),
    Fault(
        "metrics are read before the next steps are started",
        "vit/loop.py",
        "if len(values) == steps.AHEAD - 1:",
        "if len(values) == 0:",
        "test_train.py::test_metrics_are_read_while_the_next_steps_compute",
    ),
    Fault(
        "each stretch waits for its first step before it starts the second",
        "vit/loop.py",
        "running = deque() if running is None else running",
        "running = deque([0.0] * 2)",
        "test_train.py::test_metrics_are_read_while_the_next_steps_compute",
    ),
    Fault(
        "evaluation stands a place too early in the stream of a run",
        "vit/data.py",
        "return step + self.evaluation_length * ((step - 1) // self.every)",
        "return step + self.evaluation_length * (step // self.every)",
        "test_data.py::test_a_run_reads_training_and_evaluation_in_its_order",
    ),
    Fault(
        "seeds in turn are all the first one",
        "experiments/training/in_turn.py",
        "loop.train(dataclasses.replace(config, seed=seed), workdir)",
        "loop.train(config, workdir)",
        "test_compare.py::test_seeds_in_turn_are_those_that_are_trained_at_once",
    ),
    Fault(
        "a run that goes on counts as finished",
        "experiments/training/in_turn.py",
        "if not noted and not ended(config, records):",
        "if False:",
        "test_compare.py::test_a_report_of_any_finished_runs",
    ),
    Fault(
        "pictures without a reassessed label count as wrong",
        "vit/evaluate.py",
        '"mask": batch["mask"] * rows.any(axis=-1)',
        '"mask": batch["mask"]',
        "test_use.py::test_reassessed_labels_of_imagenet",
    ),
    Fault(
        "reassessed labels are of the file before",
        "vit/real_labels.py",
        "return int(found[1]) - 1",
        "return int(found[1]) - 2",
        "test_use.py::test_reassessed_labels_of_imagenet",
    ),
    Fault(
        "the rehearsal does not compare the losses of both meshes",
        "experiments/training/rehearsal.py",
        "np.allclose(*losses, rtol=0.01)",
        "np.allclose(*losses, rtol=10)",
        "test_rehearsal.py::test_what_is_not_as_it_should_be_is_named",
    ),
    Fault(
        "the gradients of all devices are added up in every part",
        "vit/steps.py",
        "if parts > 1 and task.by_device",
        "if parts < 1 and task.by_device",
        "test_devices.py::test_a_batch_in_parts_adds_up_the_gradients_of_all_devices_once",
    ),
    Fault(
        "dropout of a batch in parts is the same on every device",
        "vit/dropout.py",
        "start = rows * jax.lax.axis_index(self.axis_name)",
        "start = 0 * jax.lax.axis_index(self.axis_name)",
        "test_devices.py::test_a_batch_in_parts_adds_up_the_gradients_of_all_devices_once",
    ),
    Fault(
        "calibration's moments are those of one device",
        "vit/steps.py",
        "OVER_ROWS = (Dropout, PerformerAttention, nnx.BatchNorm)",
        "OVER_ROWS = (Dropout, nnx.BatchNorm)",
        "test_devices.py::test_a_batch_in_parts_adds_up_the_gradients_of_all_devices_once",
    ),
    Fault(
        "records are not shuffled",
        "vit/data.py",
        ".seed(seed).shuffle().repeat()",
        ".seed(seed).repeat()",
        "test_data.py::test_an_epoch_shows_every_image_once_and_the_next_in_another_order",
    ),
    Fault(
        "the rows that pad the last evaluation batch are counted",
        "vit/data.py",
        '{"mask": np.float32(mask), "bad": np.int32(bad)}',
        '{"mask": np.float32(1), "bad": np.int32(bad)}',
        "test_data.py::test_evaluation_counts_every_image_once",
    ),
    Fault(
        "a restart begins at the rate 0",
        "vit/optim.py",
        "final if start else 0.0, peak",
        "0.0, peak",
        "test_optim.py::test_restarts_are_cycles",
    ),
    Fault(
        "the head learns least",
        "vit/classification.py",
        "return depth - number",
        "return 1 + number",
        "test_optim.py::test_layers_learn_by_their_distance_from_the_head",
    ),
    Fault(
        "the extension is forgotten when a run is resumed",
        "vit/loop.py",
        "config = extension.as_extended(config, workdir)",
        "pass",
        "test_extension.py::test_an_extended_run_is_bitwise_one_that_was_planned_so",
    ),
    Fault(
        "a run that has not ended is extended",
        "vit/extension.py",
        "if step < num_steps:",
        "if False:",
        "test_extension.py::test_only_a_run_that_has_ended_is_extended_and_only_once",
    ),
    Fault(
        "the order of the data begins anew in an extension",
        "vit/loop.py",
        "runs.batches(dataset, config, mesh, step, num_steps",
        "runs.batches(dataset, config, mesh, 0, num_steps",
        "test_extension.py::test_an_extended_run_is_bitwise_one_that_was_planned_so",
    ),
    Fault(
        "a run is begun from another checkpoint than the last",
        "vit/transfer.py",
        "trained = use.load(source)",
        "trained = use.load(source, 2)",
        "test_transfer.py::test_with_the_same_config_it_is_the_same_function",
    ),
    Fault(
        "positions are resampled without antialiasing",
        "vit/transfer.py",
        '"bicubic", antialias=True',
        '"bicubic", antialias=False',
        "test_transfer.py::test_positions_are_resampled",
    ),
    Fault(
        "frequencies of another coupling are taken for the new one's",
        "vit/transfer.py",
        "if not different:",
        "if True:",
        "test_transfer.py::test_other_frequencies_are_drawn_and_the_moments_stay",
    ),
    Fault(
        "a run begun from another takes any source for its own",
        "vit/transfer.py",
        'if origin.get("init_from") == place:',
        "if origin:",
        "test_transfer.py::test_what_cannot_be_is_refused_and_leaves_nothing",
    ),
    Fault(
        "CutMix blends targets by lam, not by the pixels that stay",
        "vit/augment.py",
        "share = 1 - jnp.mean(cut, dtype=images.dtype)",
        "share = 1 - side**2",
        "test_augment.py::test_cutmix_takes_a_rectangle_of_the_neighbour",
    ),
    Fault(
        "the sides of CutMix are 1 - lam, not its root",
        "vit/augment.py",
        "side = jnp.sqrt(1 - jax.random.beta(keys[0], alpha, alpha, dtype=images.dtype))",
        "side = 1 - jax.random.beta(keys[0], alpha, alpha, dtype=images.dtype)",
        "test_augment.py::test_cutmix_has_the_law_of_the_paper",
    ),
    Fault(
        "erased rectangles have the aspects of crops",
        "vit/augment.py",
        "(0.02, 1 / 3), (0.3, 1 / 0.3)",
        "(0.02, 1 / 3), (3 / 4, 4 / 3)",
        "test_augment.py::test_erased_rectangles_have_the_law_they_should",
    ),
    Fault(
        "stochastic depth is of tokens, not of examples",
        "vit/model.py",
        "broadcast_dims=(1, 2)",
        "broadcast_dims=(2,)",
        "test_model.py::test_stochastic_depth_has_the_law_of_its_definition",
    ),
    Fault(
        "stochastic depth adds a stream of keys where it is off",
        "vit/model.py",
        "stream = rngs if drop_path else None",
        "stream = rngs",
        "test_model.py::test_without_stochastic_depth_there_is_no_stream_for_it",
    ),
    Fault(
        "the right answer of a blend is the own label",
        "vit/classification.py",
        "jnp.argmax(logits, axis=-1) == jnp.argmax(targets, axis=-1)",
        "jnp.argmax(logits, axis=-1) == jnp.argmax(targets > 0, axis=-1)",
        "test_metrics.py::test_the_right_answer_of_a_blend_is_the_larger_share",
    ),
    Fault(
        "a resumed run is a new one of W&B",
        "vit/loggers.py",
        'noted = files.noted(path) or {"id": uuid',
        'noted = {"id": uuid',
        "test_loggers.py::test_wandb_goes_on_in_the_same_run",
    ),
    Fault(
        "lines of progress at every record",
        "vit/display.py",
        "now - self.last >= EVERY",
        "True",
        "test_display.py::test_off_a_terminal_there_is_a_line_every_so_often",
    ),
    Fault(
        "mixup without labels",
        "vit/augment.py",
        "images, targets = (share * x + (1 - share) * jnp.roll(x, 1, axis=0)"
        " for x in (images, targets))",
        "images = share * images + (1 - share) * jnp.roll(images, 1, axis=0)",
        "test_augment.py::test_mixup_blends_with_the_neighbour",
    ),
    Fault(
        "aspects of crops are uniform, not their logarithms",
        "vit/augment.py",
        "math.exp(rng.uniform(math.log(ratios[0]), math.log(ratios[1])))",
        "rng.uniform(*ratios)",
        "test_augment.py::test_inception_boxes_have_the_law_they_should",
    ),
    Fault(
        "pixels are scaled to [0, 1]",
        "vit/model.py",
        "astype(jnp.float32) / 127.5 - 1",
        "astype(jnp.float32) / 255",
        "test_pretrained.py::test_the_loaded_model_is_the_original_function",
    ),
    Fault(
        "a new model is in training mode",
        "vit/model.py",
        "        self.eval()\n",
        "",
        "test_model.py::test_dropout_only_in_training",
    ),
    Fault(
        "validation labels are those of the next image",
        "vit/sources/ilsvrc2012.py",
        "labels[int(number[1]) - 1]",
        "labels[int(number[1]) % len(labels)]",
        "test_prepare.py::test_ilsvrc2012",
    ),
    Fault(
        "the only picture of a class is held out",
        "vit/sources/source.py",
        "rest = order[~first]",
        "rest = order",
        "test_sources.py::test_what_is_held_out_is_a_share_of_every_class_and_depends_on_the_seed",
    ),
    Fault(
        "what is held out does not depend on the seed",
        "vit/sources/source.py",
        "rng = np.random.default_rng(seed)",
        "rng = np.random.default_rng(0)",
        "test_sources.py::test_what_is_held_out_is_a_share_of_every_class_and_depends_on_the_seed",
    ),
    Fault(
        "what is held out is no share of every class",
        "vit/sources/source.py",
        "np.lexsort([rng.random(len(classes)), classes])",
        "rng.permutation(len(classes))",
        "test_sources.py::test_what_is_held_out_is_a_share_of_every_class_and_depends_on_the_seed",
    ),
    Fault(
        "a held-out picture is trained on, too",
        "vit/sources/source.py",
        "compress(train(), ~held)",
        "train()",
        "test_sources.py::test_class_folders_without_splits_are_split",
    ),
    Fault(
        "a part is held out beside a test split",
        "vit/prepare.py",
        'list(opened.splits) == ["train"]',
        '"validation" not in opened.splits',
        "test_prepare.py::test_idx_files",
    ),
    Fault(
        "one grey picture makes all of them grey",
        "vit/prepare.py",
        "all(readable)",
        "any(readable)",
        "test_sources.py::test_class_folders_without_splits_are_split",
    ),
    Fault(
        "of columns that say different things the first is taken",
        "vit/sources/tables.py",
        "for name in usual}) == 1",
        "for name in usual}) > 0",
        "test_sources.py::test_tables_whose_classes_cannot_be_told",
    ),
    Fault(
        "npz files are unpickled",
        "vit/sources/arrays.py",
        "allow_pickle=False",
        "allow_pickle=True",
        "test_sources.py::test_npz_files_that_cannot_be_used",
    ),
    Fault(
        "parquet files unpack to any size",
        "vit/sources/parquet.py",
        "if not 0 <= announced <= most:",
        "if announced < 0:",
        "test_sources.py::test_parquet_files_are_bounded",
    ),
    Fault(
        "integers of parquet files are classes in the order of their text",
        "vit/sources/parquet.py",
        "return self.class_names[label]",
        "return str(label)",
        "test_sources.py::test_parquet_files",
    ),
    Fault(
        "my_images goes by the largest picture",
        "vit/recipe.py",
        "statistics.median(sides)",
        "max(sides)",
        "test_recipe.py::test_my_images_reads_the_data_set",
    ),
    Fault(
        "a derived batch may be larger than the data",
        "vit/recipe.py",
        "min(2 * math.sqrt(num_examples), num_examples, LARGEST_BATCH)",
        "min(2 * math.sqrt(num_examples), LARGEST_BATCH)",
        "test_recipe.py::test_every_config_is_valid_and_its_run_has_a_length",
    ),
    Fault(
        "pictures are encoded one after another",
        "vit/prepare.py",
        "with ThreadPoolExecutor(machine.cores()) as pool:",
        "with ThreadPoolExecutor(1) as pool:",
        "test_prepare.py::test_pictures_are_encoded_side_by_side_in_order",
    ),
    Fault(
        "labels of other data are taken for those of the run",
        "vit/evaluate.py",
        '{"label": label[batch["label"]]}',
        '{"label": batch["label"]}',
        "test_use.py::test_a_run_is_evaluated_on_other_data",
    ),
    Fault(
        "the longer side is bounded",
        "vit/prepare.py",
        "scale = max_side / min(opened.size)",
        "scale = max_side / max(opened.size)",
        "test_prepare.py::test_the_shorter_side_is_bounded",
    ),
    Fault(
        "as many workers as cores, whatever room there is",
        "vit/machine.py",
        "return max(0, min(cores() - 1, room))",
        "return max(0, cores() - 1)",
        "test_machine.py::test_workers_by_the_machine",
    ),
    Fault(
        "sigmoid losses are averaged over the classes",
        "vit/classification.py",
        "return jnp.sum(optax.losses.sigmoid_binary_cross_entropy(logits, targets), axis=-1)",
        "return jnp.mean(optax.losses.sigmoid_binary_cross_entropy(logits, targets), axis=-1)",
        "test_metrics.py::test_a_sigmoid_for_each_class",
    ),
    Fault(
        "probabilities of sigmoids are a softmax",
        "vit/use.py",
        '"sigmoid": jax.nn.sigmoid}',
        '"sigmoid": jax.nn.softmax}',
        "test_use.py::test_sigmoids_are_the_probabilities_of_a_run_that_learned_them",
    ),
    Fault(
        "the layer before the head has no tanh",
        "vit/model.py",
        "pooled = jnp.tanh(self.pre_logits(pooled))",
        "pooled = self.pre_logits(pooled)",
        "test_model.py::test_options_of_the_head_and_the_mlp",
    ),
    Fault(
        "the layer before the head learns as slowly as the embedding",
        "vit/classification.py",
        'top in ("norm", "pool", "pre_logits", "head")',
        'top in ("norm", "head")',
        "test_optim.py::test_layers_learn_by_their_distance_from_the_head",
    ),
    Fault(
        "bundled configs are found from the checkout alone",
        "vit/bundled.py",
        "FOLDER = Path(__file__).parent.parent",
        "FOLDER = Path()",
        "test_arguments.py::test_bundled_configs_by_name_from_any_folder",
    ),
    Fault(
        "a bundled config hides a file of the user's",
        "vit/bundled.py",
        "if Path(name).is_file():",
        "if name not in names() and Path(name).is_file():",
        "test_arguments.py::test_bundled_configs_by_name_from_any_folder",
    ),
    Fault(
        "a flag is guessed by its spelling alone",
        "vit/arguments.py",
        "if word not in known and last in known:",
        "if not known:",
        "test_arguments.py::test_the_flag_that_is_meant",
    ),
    Fault(
        "a console script names python -m",
        "vit/cli.py",
        "_typed[:] = [script if shutil.which(script) == typed else typed]",
        "_typed.clear()",
        "test_cli.py::test_the_program_runs_as_main_and_names_the_script",
    ),
    Fault(
        "the position of the class token is lost",
        "vit/published/google.py",
        "= token + position[0], position[1:]",
        "= token, position[1:]",
        "test_pretrained.py::test_the_loaded_model_is_the_original_function",
    ),
    Fault(
        "a model's layers have other frequencies than those documented",
        "performer/nnx/linearization.py",
        "attention.frequencies[...] = drawn",
        "del drawn",
        "test_linearize.py::test_a_layer_is_the_op_on_its_queries_and_keys",
    ),
    Fault(
        "a dense causal mask is read as one of keys",
        "performer/nnx/_hooks.py",
        "return keys, call.is_causal or masks_are_causal",
        "return keys, call.is_causal",
        "test_linearize.py::test_masks_are_known_by_their_values",
    ),
    Fault(
        "padding counts in the moments",
        "performer/nnx/_hooks.py",
        "pairs = sample.pairs(False) & mask[:, :1]",
        "pairs = None",
        "test_linearize.py::test_masks_are_known_by_their_values",
    ),
    Fault(
        "every dense mask is taken for one of keys",
        "performer/nnx/_hooks.py",
        "return jnp.all((mask == sample.pairs(is_causal)) | ~sample.queries[:, None, :, None])",
        "return jnp.array(True)",
        "test_linearize.py::test_what_cannot_be_taken_is_named_and_left",
    ),
    Fault(
        "a scale of jax.nn's attention is lost",
        "performer/nnx/_hooks.py",
        "query = query * (scale * query.shape[-1] ** 0.5)",
        "query = query * 1.0",
        "test_linearize.py::test_a_function_of_a_users_own_module",
    ),
    Fault(
        "moments are those of the last batch",
        "performer/nnx/_hooks.py",
        "joined[name] = before[name] + new[name]",
        "joined[name] = new[name]",
        "test_linearize.py::test_a_layer_is_the_op_on_its_queries_and_keys",
    ),
    Fault(
        "linearize changes the model it is given",
        "performer/nnx/linearization.py",
        "    model = nnx.clone(model)\n    model.eval()",
        "    model.eval()",
        "test_linearize.py::test_the_original_and_its_arrays_stay",
    ),
    Fault(
        "the layers with the least errors stay exact",
        "performer/nnx/linearization.py",
        "key=lambda i: -errors[i])[:keep]",
        "key=lambda i: errors[i])[:keep]",
        "test_linearize.py::test_order_keep_and_where",
    ),
    Fault(
        "refinement keeps the last parameters, not the best",
        "performer/refinement.py",
        "return _Search(trained, state, best, least,",
        "return _Search(trained, state, trained, least,",
        "test_refinement.py::test_what_gets_worse_where_it_is_held_out_is_not_kept",
    ),
    Fault(
        "a masked row of softmax attention counts in the divergence",
        "performer/refinement.py",
        "rows = jnp.sum(jnp.any(pairs, axis=-1), dtype=exact.dtype)",
        "rows = jnp.sum(jnp.ones_like(pairs[..., 0]), dtype=exact.dtype)",
        "test_refinement.py::test_the_losses_are_those_of_the_equations",
    ),
    Fault(
        "the first keys are estimated in attention transfer",
        "performer/refinement.py",
        "return (abs(apart) <= 1) | (place < first)",
        "return abs(apart) <= 1",
        "test_refinement.py::test_a_hybrid_in_numpy",
    ),
    Fault(
        "far pairs lose the half norm of the query beside exact ones",
        "performer/refinement.py",
        "return _hybrid(far, fixed, sample, is_causal, half=0.5)",
        "return _hybrid(far, fixed, sample, is_causal, half=0.0)",
        "test_refinement.py::test_a_hybrid_in_numpy",
    ),
    Fault(
        "a head keeps features that make it worse than its window",
        "performer/refinement.py",
        "jnp.where(kept, far.weight, -jnp.inf)",
        "far.weight",
        "test_refinement.py::test_refining_what_is_far",
    ),
    Fault(
        "queries take the frequencies of the keys",
        "performer/attention/_maps.py",
        "own = of_key if given is None else given.astype(wide)",
        "own = of_key",
        "test_attention_window.py::test_frequencies_of_queries_alone",
    ),
    Fault(
        "a streamed text begins anew at each piece",
        "experiments/language_model/model.py",
        "position + jnp.arange(tokens.shape[1])",
        "jnp.arange(tokens.shape[1])",
        "test_language_model.py::test_streaming_is_the_whole_text",
    ),
    Fault(
        "training sees the held-out text",
        "experiments/language_model/text.py",
        "range(0, end - 2 * length, length)",
        "range(0, end, length)",
        "test_language_model.py::test_windows_of_a_text",
    ),
    Fault(
        "a table forgets the rows that are there",
        "experiments/language_model/rows.py",
        "known[case] if case in known else first | measured(*case)",
        "first | measured(*case)",
        "test_language_model.py::test_tables_grow_and_go_on",
    ),
    Fault(
        "a described GPU takes products that it cannot tune",
        "vit/dry_run.py",
        'options = {"xla_gpu_enable_triton_gemm": False} if described else None',
        "options = None",
        "test_dry_run.py::test_a_compiler_that_finds_no_room_says_what_to_change",
    ),
    Fault(
        "features are kept that cost loss",
        "experiments/language_model/conversion.py",
        "if loss < least:",
        "if True:",
        "test_language_model.py::test_features_that_cost_loss_are_left_out",
    ),
    Fault(
        "a folder of another task is taken for one of images",
        "vit/task.py",
        "if found and name not in names:",
        "if False:",
        "test_task.py::test_a_run_of_another_task_is_named_before_any_work",
    ),
    Fault(
        "a run goes on with other settings of its task",
        "vit/runs.py",
        '"settings": task.settings._asdict(),',
        "",
        "test_language_model.py::test_a_run_and_what_it_is_converted_to",
    ),
    Fault(
        "a run that was transferred goes on with other features",
        "experiments/language_model/convert.py",
        "transferred=m > 0",
        "transferred=False",
        "test_language_model.py::test_a_run_and_what_it_is_converted_to",
    ),
    Fault(
        "weight decay of an infinite weight",
        "experiments/language_model/convert.py",
        "SILENT = -1e4",
        "SILENT = -jnp.inf",
        "test_language_model.py::test_heads_of_the_window_alone_are_trained_on",
    ),
    Fault(
        "a run begins with the embedding of other characters",
        "experiments/language_model/train.py",
        '.get("class_names", characters) != characters:',
        '.get("class_names", characters) == []:',
        "test_language_model.py::test_a_run_begins_with_the_parameters_of_another",
    ),
    Fault(
        "tokens of recall are read alone",
        "experiments/language_model/pairs.py",
        "before = jnp.concatenate([tokens[:, :1], tokens[:, :-1]], axis=1)",
        "before = tokens",
        "test_language_model.py::test_recall_reads_each_token_with_the_one_before",
    ),
    Fault(
        "the command is recorded without its flags",
        "experiments/common/provenance.py",
        '"python", *program, *sys.argv[1:]',
        '"python", *program',
        "test_launch.py::test_tables_say_what_made_them",
    ),
    Fault(
        "padding counts in the accuracy of recall",
        "experiments/language_model/pairs.py",
        'jnp.where(batch["mask"] > 0, x, 0)',
        "x",
        "test_language_model.py::test_accuracy_of_recall",
    ),
    Fault(
        "linen's causal masks are read as masks of keys",
        "performer/linen.py",
        "mask, is_causal = understood(call, key, layer.masks_are_causal)",
        "mask, is_causal = understood(call, key, False)",
        "test_linen.py::test_linearize",
    ),
    Fault(
        "a converted run's config does not name its exact layers",
        "vit/convert.py",
        'new_config.attention.exact_layers = ",".join(map(str, dict.fromkeys(exact)))',
        "_ = exact",
        "test_convert.py::test_kept_layers_are_in_the_config_and_stay_softmax",
    ),
    Fault(
        "a folder takes a run of another seed",
        "vit/config.py",
        '    "checkpoint_every",\n    "keep_every",\n)',
        '    "checkpoint_every",\n    "keep_every",\n    "seed",\n)',
        "test_config.py::test_differences_name_field_and_both_values",
    ),
    Fault(
        "NaN is a learning rate",
        "vit/rules.py",
        "lambda rate: 0 <= rate <= 10",
        "lambda rate: not (rate < 0 or rate > 10)",
        "test_config.py::test_bad_values_are_named",
    ),
    Fault(
        "padding is in the confusion matrix",
        "vit/class_report.py",
        'np.asarray(batch["mask"]) > 0',
        'np.asarray(batch["mask"]) >= 0',
        "test_class_report.py::test_counts_are_those_of_a_plain_count",
    ),
    Fault(
        "half the operations of random features",
        "vit/classification.py",
        "(2 * m + near) * (size.depth - exact)",
        "(m + near) * (size.depth - exact)",
        "test_costs.py::test_operations_are_those_that_xla_counts",
    ),
    # experiments
    Fault(
        "Holm without its step",
        "experiments/common/statistics.py",
        "p[i] * (len(tested) - rank)",
        "p[i] * len(tested)",
        "test_statistics.py::test_holm_by_hand",
    ),
    Fault(
        "the paired test is unpaired",
        "experiments/common/statistics.py",
        "    mean, error = mean_and_error(d.tolist())\n",
        "    mean, error = mean_and_error(d.tolist())\n"
        "    error = float(np.hypot(mean_and_error(a)[1], mean_and_error(b)[1]))\n",
        "test_statistics.py::test_paired_differences_are_scipys",
    ),
    Fault(
        "the power of a one-sided test",
        "experiments/common/statistics.py",
        "stats.t.ppf(1 - level / 2, freedom)",
        "stats.t.ppf(1 - level, freedom)",
        "test_statistics.py::test_power_is_how_often_the_test_finds_the_effect",
    ),
    Fault(
        "the verdict takes p-values that are not corrected",
        "experiments/training/report.py",
        "shown = [c for c in compared if c.corrected < LEVEL]",
        "shown = [c for c in compared if c.difference.p_value < LEVEL]",
        "test_compare.py::test_the_verdict_takes_corrected_p_values",
    ),
    Fault(
        "a seed that diverged is compared",
        "experiments/training/report.py",
        "for seed, value, step in runs if step is None}",
        "for seed, value, step in runs}",
        "test_compare.py::test_pairs_are_by_seed_and_leave_out_what_diverged",
    ),
    Fault(
        "all seeds of an ensemble have the data of the first",
        "experiments/training/ensemble.py",
        "data.train_batches(dataset, share, seed, start=step",
        "data.train_batches(dataset, share, seeds[0], start=step",
        "test_compare.py::test_a_seed_of_the_ensemble_is_the_run_of_vit_train",
    ),
    Fault(
        "columns are centred by the test rows, too",
        "experiments/common/tabular.py",
        "centre = np.where(constant, x.mean(axis=0), x[first].mean(axis=0))",
        "centre = x.mean(axis=0)",
        "test_tabular.py::test_splits",
    ),
    Fault(
        "VRC Eq. 36 without its factor of 2",
        "experiments/tabular/uci.py",
        "return 2 * jnp.mean(jnp.sqrt(",
        "return jnp.mean(jnp.sqrt(",
        "test_uci.py::test_summed_norms_match_the_equation",
    ),
    Fault(
        "the KL divergence of the Gaussian processes is the other one",
        "experiments/tabular/gp.py",
        "gp.kl(reference, law) / count",
        "gp.kl(law, reference) / count",
        "test_uci.py::test_scores_match_the_equations",
    ),
    Fault(
        "--quick overrules the flags that are given",
        "experiments/common/launch.py",
        "if not flags.FLAGS[k].present}",
        "if True}",
        "test_launch.py::test_a_program",
    ),
    Fault(
        "a list flag keeps the blanks after its commas",
        "experiments/common/launch.py",
        "self._one(part.strip()) for part",
        "self._one(part) for part",
        "test_launch.py::test_values_are_of_their_kinds",
    ),
    Fault(
        "the lower bound of a flag lets NaN through",
        "experiments/common/launch.py",
        "if not value >= least:",
        "if value < least:",
        "test_launch.py::test_at_least",
    ),
    Fault(
        "a verdict counts uncorrected p-values",
        "experiments/common/statistics.py",
        "shown = [p < LEVEL for p in corrected]",
        "shown = [test.p_value < LEVEL for test in tests.values()]",
        "test_statistics.py::test_verdict",
    ),
    Fault(
        "a calibration is scored on the tokens that it was fitted to",
        "experiments/attention/errors.py",
        "calibrate(others, other_keys,",
        "calibrate(query, key,",
        "test_attention_mse.py::test_calibrations_are_scored_on_other_tokens",
    ),
    Fault(
        "prepared data are written over what is there",
        "experiments/prepare_data.py",
        "if result.exists():",
        "if False:",
        "test_prepare_data.py::test_a_folder_and_nothing_written_over",
    ),
    Fault(
        "long roads weigh more",
        "experiments/prepare_data.py",
        "lengths.mean() / lengths,",
        "lengths / lengths.mean(),",
        "test_prepare_data.py::test_roads",
    ),
    Fault(
        "a ratio is that to the last coupling of its case",
        "experiments/common/harness.py",
        'statistics.ratio(row["values"], group[0]["values"])',
        'statistics.ratio(row["values"], group[-1]["values"])',
        "test_harness.py::test_ratios_are_those_to_the_first_of_a_case",
    ),
    Fault(
        "a verdict tests each coupling against itself",
        "experiments/common/harness.py",
        "{k: (x[name], x[other]) for k, x in cases.items()}",
        "{k: (x[name], x[name]) for k, x in cases.items()}",
        "test_harness.py::test_verdict",
    ),
    Fault(
        "the Cayley distance counts the places that differ",
        "experiments/graphs/sigma.py",
        "return n - int(scipy.sparse.csgraph.connected_components(steps)[0])",
        "return int(np.sum(between != np.arange(n)))",
        "test_graph_sigma.py::test_cayley_distance",
    ),
    Fault(
        "points are padded in training alone",
        "experiments/tabular/classification.py",
        "test_x=np.pad(problem.test_x, width)",
        "test_x=problem.test_x",
        "test_classification.py::test_padding",
    ),
    Fault(
        "a field of the model does not take the place of the variant's",
        "vit/fields.py",
        "for name in Size._fields if getattr(self, name)}",
        "for name in Size._fields[1:] if getattr(self, name)}",
        "test_config.py::test_a_number_of_the_model_takes_the_place_of_the_variants",
    ),
    Fault(
        "registers are averaged with the patches",
        "vit/model.py",
        "patches = x[:, self.num_prefix :] if self.num_prefix else x",
        "patches = x",
        "test_model.py::test_tokens_without_a_place_and_what_the_head_reads",
    ),
    Fault(
        "norms have an epsilon of their own",
        "vit/model.py",
        "norm = partial(nnx.LayerNorm, size.width, epsilon=model.epsilon, dtype=dtype, rngs=rngs)",
        "norm = partial(nnx.LayerNorm, size.width, dtype=dtype, rngs=rngs)",
        "test_model.py::test_tokens_without_a_place_and_what_the_head_reads",
    ),
    Fault(
        "the MLP has no LayerScale",
        "vit/model.py",
        "added = added * self.mlp_scale[...].astype(added.dtype)",
        "pass",
        "test_published.py::test_the_function_is_that_of_pytorch[hf_dinov2-6]",
    ),
    Fault(
        "the exact GELU is the approximation",
        "vit/model.py",
        "partial(jax.nn.gelu, approximate=False)",
        "jax.nn.gelu",
        "test_published.py::test_the_function_is_that_of_pytorch[hf_vit-6]",
    ),
    Fault(
        "the gate of SwiGLU is its value",
        "vit/model.py",
        "return jax.nn.silu(gate) * value",
        "return gate * jax.nn.silu(value)",
        "test_published.py::test_the_function_is_that_of_pytorch[hf_dinov2_swiglu-6]",
    ),
    Fault(
        "pooling by attention has no MLP",
        "vit/model.py",
        "return (y + self.mlp_out(ACTIVATIONS[self.activation](self.mlp_in(self.norm(y)))))[:, 0]",
        "return y[:, 0]",
        "test_published.py::test_the_function_is_that_of_pytorch[hf_siglip-6]",
    ),
    Fault(
        "keys of a fused projection are its queries",
        "vit/published/encoder.py",
        '{"qkv": ("query", "key", "value")',
        '{"qkv": ("key", "query", "value")',
        "test_published.py::test_the_function_is_that_of_pytorch[timm_vit-6]",
    ),
    Fault(
        "positions of the registers are lost",
        "vit/published/encoder.py",
        "tokens = tokens + np.pad(position[:count], [(0, len(tokens) - count), (0, 0)])",
        "tokens = tokens + 0 * count",
        "test_published.py::test_the_function_is_that_of_pytorch[hf_deit-6]",
    ),
    Fault(
        "all positions are resampled with antialiasing",
        "vit/published/encoder.py",
        "    if antialias:\n",
        "    if True:\n",
        "test_published.py::test_the_function_is_that_of_pytorch[hf_dinov2-4]",
    ),
    Fault(
        "two heads are added up",
        "vit/published/encoder.py",
        "np.concatenate([x / 2 for x in kernels",
        "np.concatenate([x for x in kernels",
        "test_published.py::test_the_function_is_that_of_pytorch[hf_deit_distilled-6]",
    ),
    Fault(
        "pictures are not shifted to the mean of the weights",
        "vit/published/encoder.py",
        "(0.5 - np.array(mean)) / np.array(std))",
        "np.zeros(len(mean)))",
        "test_published.py::test_mean_and_deviation_are_those_beside_the_file",
    ),
    Fault(
        "a pickle is no longer known",
        "vit/published/files.py",
        'PICKLES = (".bin", ".pth", ".pt", ".ckpt", ".pkl")',
        "PICKLES = ()",
        "test_published.py::test_what_is_refused_says_why",
    ),
    Fault(
        "classes are sorted the wrong way round",
        "vit/pretrained.py",
        "order = [theirs.index(name) for name in ours]",
        "order = [ours.index(name) for name in theirs]",
        "test_published.py::test_classes_of_another_order_are_sorted",
    ),
    Fault(
        "tokens without a place are patches of the map",
        "vit/rollout.py",
        "    rows = rows[:, num_prefix:]\n",
        "    rows = rows[:, 1:]\n",
        "test_predict.py::test_maps_leave_out_tokens_without_a_place",
    ),
]

PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "--no-header")


def copy(root: Path, tree: Path) -> None:
    """The files that git tracks, and those that it does not ignore."""
    listing = ["git", "-C", str(root), "ls-files", "-z", "-c", "-o", "--exclude-standard"]
    found = subprocess.run(listing, check=True, capture_output=True, text=True).stdout
    for name in filter(None, found.split("\0")):
        if (root / name).is_file():  # not deleted
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, tree / name)


def python(tree: Path, *arguments: str, limit: float | None = None) -> tuple[int | None, str]:
    """The exit code, None past the limit, and the output; nothing that it started outlives it."""
    command, environment = [sys.executable, *arguments], os.environ | {"PYTHONPATH": str(tree)}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        output.seek(0)
        return code, output.read()


def failures(output: str) -> list[str]:
    """The tests that failed, as the summary of pytest names them."""
    return re.findall(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", output, re.MULTILINE)


def belongs(test: str, node: str) -> bool:
    """Whether a test is that node, a parameter of it, or in that file."""
    return test == node or test.startswith((f"{node}[", f"{node}::"))


def nodes(fault: Fault, collected: list[str]) -> list[str]:
    """Its tests as the tree has them; empty when the file is not there."""
    found = []
    for node in (f"tests/{test}" for test in fault.tests.split()):
        names = (node, node.split("[")[0], node.split("::")[0])
        found += [n for n in names if any(belongs(test, n) for test in collected)][:1]
    return found


def outcome(fault: Fault, tree: Path, tests: list[str], failed: list[str]) -> str:
    """What its tests say; `failed` fail without it."""
    path = tree / fault.file
    text = path.read_text() if path.exists() else ""
    if text.count(fault.old) != 1:
        return "does not apply"
    if not tests or any(belongs(test, node) for test in failed for node in tests):
        return "broken: its tests are not there, or fail without it"
    path.write_text(text.replace(fault.old, fault.new))
    code, output = python(tree, *PYTEST, "-x", *tests, limit=LIMIT)
    path.write_text(text)
    if code == 1 and failures(output):
        return f"caught by {failures(output)[0].removeprefix('tests/')}"
    if code is None:
        return f"NOT CAUGHT: nothing after {LIMIT:.0f} s"
    if code < 0:
        return f"NOT CAUGHT: died of {signal.Signals(-code).name}"
    return "NOT CAUGHT" if code == 0 else f"broken: pytest ended with {code}"


def plant(faults: list[Fault], tree: Path) -> list[str]:
    """The outcomes, said one by one, after a run of all their tests without any fault."""
    where = "import importlib.util as u; print(u.find_spec('performer').origin)"
    assert python(tree, "-c", where)[1].startswith(str(tree)), "another performer is imported"
    files = {f"tests/{test.split('::')[0]}" for fault in faults for test in fault.tests.split()}
    there = sorted(file for file in files if (tree / file).exists())
    collected = python(tree, *PYTEST, "--collect-only", *there)[1].splitlines()
    tests = [nodes(fault, collected) for fault in faults]
    code, output = python(tree, *PYTEST, *sorted({node for of in tests for node in of}))
    assert code in (0, 1), f"without any fault pytest ended with {code}: {output[-3000:]}"
    failed, found = failures(output), []
    print(f"without any fault {len(failed)} tests fail", *failed, sep="\n", flush=True)
    for fault, of in zip(faults, tests, strict=True):
        start = time.perf_counter()
        found.append(outcome(fault, tree, of, failed))
        print(f"{fault.name}: {found[-1]} ({time.perf_counter() - start:.0f} s)", flush=True)
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="plants faults and sees whether tests fail")
    parser.add_argument("--list", action="store_true", help="the faults, and nothing more")
    parser.add_argument("--only", nargs="+", metavar="PART", default=[""], help="parts of names")
    parser.add_argument("--root", type=Path, help="the checkout; this one if not given")
    options = parser.parse_args()
    faults = [fault for fault in FAULTS if any(part in fault.name for part in options.only)]
    if options.list or not faults:
        print(*(f"{f.name} | {f.file} | {f.tests}" for f in faults), sep="\n")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # cleans up, as Ctrl-C does
    with tempfile.TemporaryDirectory() as folder:
        copy(options.root or Path(__file__).parents[1], Path(folder).resolve())
        found = plant(faults, Path(folder).resolve())
    print("\n| fault | file | tests |\n|---|---|---|")
    for fault, said in zip(faults, found, strict=True):
        print(f"| {fault.name} | {fault.file} | {said} |")
    caught = sum(said.startswith("caught") for said in found)
    foreign = sum(said == "does not apply" for said in found) if options.root else 0
    print(f"\n{caught} of {len(found)} are caught, {foreign} do not apply")
    sys.exit(caught + foreign < len(found))


if __name__ == "__main__":
    main()
