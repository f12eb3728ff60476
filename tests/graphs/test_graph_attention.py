"""Attention between nodes under the mask of a graph, against dense float64 sums."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import performer
from performer import features as feature_maps
from performer.attention.maps import features_of
from performer.graphs import (
    attention,
    features,
    graph_random_features,
    kernels,
    masked_attention,
    matching,
)
from performer.graphs import couplings as walk_couplings
from tests.support.graph_examples import NUM_NODES, copies, example, masked, z_scores
from tests.support.tiers import tiers

B, HEADS, H, V, M = 2, 4, 3, 5, 6
DIFFUSION = kernels.Diffusion(sigma=1.5)
BOTH = pytest.mark.parametrize("implementation", ["dense", "pairs", "visits"])
VISITS = pytest.mark.parametrize("implementation", tiers(["visits", "dense", "pairs"], 1))


def attend(q, k, v, w, mask, *, implementation, **options):
    """Sums over pairs need concrete walks; traced ones are summed over visits."""
    if implementation == "dense":
        return masked_attention(q, k, v, w, mask, implementation="dense", **options)
    call = partial(masked_attention, implementation="sparse", **options)
    if implementation == "pairs":
        return call(q, k, v, w, mask)
    return jax.jit(lambda mask: call(q, k, v, w, mask))(mask)


def inputs(nodes=NUM_NODES, key_heads=HEADS, size=1.0):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((B, nodes, HEADS, H)) * size
    k = rng.standard_normal((B, nodes, key_heads, H)) * size
    v = rng.standard_normal((B, nodes, key_heads, V))
    w = rng.standard_normal((M, H))
    return [jnp.asarray(x, float) for x in (q, k, v, w)]


def estimate(key=0, kernel=DIFFUSION, **options):
    options = dict(num_walks=3, p_halt=0.4) | options
    return graph_random_features(jax.random.key(key), example(), kernel, **options)


def entries(side):
    """Phi (n, N, N), summed visit by visit."""
    start, node, value = (np.asarray(x) for x in (side.start, side.node, side.value))
    phi = np.zeros((*value.shape[:-1], side.num_nodes, side.num_nodes))
    for t in range(len(start)):
        phi[..., start[t], node[t]] += value[..., t]
    return phi


def matrix(mask):
    left = entries(mask.left)
    right = left if mask.right is None else entries(mask.right)
    product = left @ np.swapaxes(right, -1, -2)
    return (product + np.swapaxes(product, -1, -2)) / 2


@BOTH
@pytest.mark.parametrize("key_heads", tiers([1, 4], 1))
@pytest.mark.parametrize("unbiased", [False, True])
def test_it_is_the_sum_over_pairs(implementation, key_heads, unbiased):
    with jax.enable_x64(True):
        q, k, v, w = inputs(key_heads=key_heads)
        mask = estimate(unbiased_diagonal=unbiased)
        found = attend(q, k, v, w, mask, implementation=implementation)
        np.testing.assert_allclose(found, masked(q, k, v, w, matrix(mask)), rtol=1e-9, atol=1e-12)


@pytest.mark.thorough
@BOTH
def test_each_head_has_its_own_kernel_and_frequencies(implementation):
    with jax.enable_x64(True):
        q, k, v, _ = inputs(key_heads=2)
        w = jnp.asarray(np.random.default_rng(1).standard_normal((HEADS, M, H)))
        walks = features.sample(jax.random.key(0), example(), num_walks=3, p_halt=0.4)
        sigmas = jnp.asarray([0.5, 1.0, 1.5, 2.0])
        per_head = features.modulate(
            walks, lambda length: jax.vmap(lambda s: kernels.Diffusion(s)(length))(sigmas)
        )
        mask = features.EstimatedKernel(per_head)
        for sigma, phi in zip(sigmas, per_head.to_dense(), strict=True):
            alone = features.modulate(walks, kernels.Diffusion(float(sigma))).to_dense()
            np.testing.assert_allclose(phi, alone, rtol=1e-12)
        found = attend(q, k, v, w, mask, implementation=implementation)
        np.testing.assert_allclose(found, masked(q, k, v, w, matrix(mask)), rtol=1e-9, atol=1e-12)


@VISITS
def test_keys_that_do_not_exist_have_no_part(implementation):
    with jax.enable_x64(True):
        q, k, v, w = inputs()
        exists = np.ones((B, NUM_NODES), bool)
        exists[0, [1, 3, 5]] = False  # 5 is a node alone: its row has no mass
        exists[1] = False
        k, v = (jnp.where(exists[..., None, None], x, jnp.nan) for x in (k, v))
        mask, call = estimate(), partial(attend, implementation=implementation)
        found = call(q, k, v, w, mask, key_mask=exists[:, None, None])
        clean = [jnp.nan_to_num(x) for x in (k, v)]
        expected = masked(q, *clean, w, matrix(mask), exists)
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
        assert not np.any(found[1])
        assert not np.any(found[0, 5])

        def loss(k, v):
            return jnp.sum(call(q, k, v, w, mask, key_mask=exists[:, None, None]) ** 2)

        for gradient in jax.grad(loss, argnums=(0, 1))(k, v):
            assert jnp.isfinite(gradient).all()
            assert not np.any(gradient[1])


@BOTH
@pytest.mark.parametrize(
    "name", tiers(["hyperbolic", "trigonometric", "positive", "relu", "elu+1"], 1)
)
def test_feature_maps(implementation, name):
    """The attention of the feature map, times M."""
    with jax.enable_x64(True):
        q, k, v, w = inputs(size=0.3)
        mask, chosen = estimate(), feature_maps.get(name)
        given = performer.Features(w, feature_map=name)
        found = attend(q, k, v, given, mask, implementation=implementation)
        root = H**-0.25
        kernel = "softmax" if chosen.estimates_softmax else None
        left, right = (np.asarray(chosen(x * root, w, kernel=kernel)) for x in (q, k))
        weights = np.einsum("btnm,bsnm,ts->bnts", left, right, matrix(mask))
        total = weights.sum(-1, keepdims=True)
        weights /= np.where(total == 0, 1, total)  # relu may have no common feature
        expected = np.einsum("bnts,bsnv->btnv", weights, np.asarray(v))
        np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-9)


@VISITS
def test_calibration_changes_the_features_alone(implementation):
    """Under a mask of ones it is `performer_attention` with the same calibration."""
    with jax.enable_x64(True):
        q, k, v, w = inputs()
        calibration = performer.calibration.calibrate(q, k, method="tilt")
        ones = jnp.ones((NUM_NODES, NUM_NODES))
        if implementation != "dense":
            nodes = jnp.arange(NUM_NODES)
            star = features.Features(nodes, jnp.zeros_like(nodes), jnp.ones(NUM_NODES), NUM_NODES)
            mask = features.EstimatedKernel(star)
            np.testing.assert_array_equal(mask.gram(), ones)
        else:
            mask = ones
        given = performer.Features(w, calibration, jnp.arange(1.0, M + 1))
        found = attend(q, k, v, given, mask, implementation=implementation)
        expected = performer.performer_attention(q, k, v, given)
        np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.parametrize("summed", ["pairs", "visits"])
@pytest.mark.parametrize("coupling", tiers(["antithetic", "independent", "sigma"], 1))
def test_numerator_and_normaliser_are_unbiased(coupling, summed):
    """z-tests of 9 rows and 2 columns over 3,000 draws of the walks, for given frequencies.

    4.5 standard errors are exceeded by chance in 1 of 8,000 runs for each case.
    """
    draws = 3000
    if coupling == "sigma":
        coupling = walk_couplings.sigma(matching.learn(example(), DIFFUSION, p_halt=0.4))
    with jax.enable_x64(True):
        rng = np.random.default_rng(3)
        q, k, v = (rng.standard_normal((NUM_NODES, width)) * 0.6 for width in (H, H, 1))
        w = rng.standard_normal((M, H))
        mask = graph_random_features(
            jax.random.key(5), copies(example(), draws), DIFFUSION, num_walks=2, p_halt=0.4,
            coupling=coupling, unbiased_diagonal=True,
        )  # fmt: skip
        tokens = (jnp.asarray(np.tile(x, (draws, 1)))[None, :, None] for x in (q, k, v))
        given = features_of(*tokens, jnp.asarray(w), scale=1.0)
        links = attention.link(mask, M) if summed == "pairs" else None
        assert (links is None) == (summed == "visits")
        rows, tops = attention._sums(*given, mask, links, True)
        rows = np.asarray(rows * jnp.exp(tops)[..., None]).reshape(draws, NUM_NODES, 2)
        weights = np.exp(q @ w.T) @ np.exp(k @ w.T - np.sum(k**2, -1, keepdims=True) / 2).T
        weights *= np.asarray(DIFFUSION.dense(example()))
        expected = weights @ np.concatenate([v, np.ones_like(v)], axis=1)
        assert np.abs(z_scores(rows / 2, expected)).max() < 4.5  # 2 M of two ensembles


@BOTH
@pytest.mark.parametrize(
    ("size", "kernel", "long"),
    tiers([(40.0, DIFFUSION, 5), (40.0, kernels.RandomWalk(2), None), (1.0, DIFFUSION, 5)], 2),
)
def test_sums_hold_for_any_norm(size, kernel, long, implementation):
    """Long keys in one component, whose features are far below the ones of keys of 0 in another.

    With a polynomial, walks reach keys that have no part, however long they are.
    """
    q, k, v, w = inputs(size=size)
    k = k.at[:, long or len(k[0]) :].set(0)
    mask = estimate(kernel=kernel)
    attention_sum = partial(attend, implementation=implementation)
    found = attention_sum(q, k, v, w, mask)
    slope = jax.grad(lambda q: attention_sum(q, k, v, w, mask).sum())(q)
    assert np.isfinite(slope).all()
    if implementation == "dense":
        given = attention_sum(q, k, v, w, mask.gram())
        np.testing.assert_allclose(given, found, rtol=1e-4, atol=1e-5)
        sparse = partial(attend, implementation="visits")
        visits = jax.grad(lambda q: sparse(q, k, v, w, mask).sum())(q)
        np.testing.assert_allclose(slope, visits, rtol=1e-3, atol=1e-5)
    with jax.enable_x64(True):
        logs = np.einsum("btnh,mh->btnm", np.asarray(q, float), w) * H**-0.25
        keys = np.einsum("bsnh,mh->bsnm", np.asarray(k, float), w) * H**-0.25
        keys -= np.sum(np.asarray(k, float) ** 2, -1, keepdims=True) * H**-0.5 / 2
        exponents = logs[:, :, None] + keys[:, None]  # (b, t, s, n, m)
        gram = matrix(mask)
        linked = (gram != 0)[None, :, :, None, None]
        exponents -= np.where(linked, exponents, -np.inf).max(axis=(2, 4), keepdims=True)
        weights = np.where(linked[..., 0], np.exp(np.where(linked, exponents, -1e9)).sum(-1), 0)
        weights = weights * gram[None, :, :, None]
        weights /= weights.sum(2, keepdims=True)
        expected = np.einsum("btsn,bsnv->btnv", weights, np.asarray(v))
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("implementation", tiers(["pairs", "dense", "visits"], 1))
def test_gradients(implementation):
    """To queries, keys, values, frequencies and the modulation, against differences."""
    with jax.enable_x64(True):
        walks = features.sample(jax.random.key(0), example(), num_walks=3, p_halt=0.4)
        modulation = jnp.asarray([[1.0, 0.5, 0.0, 0.2]] * HEADS)
        target = jnp.asarray(np.random.default_rng(2).standard_normal((B, NUM_NODES, HEADS, V)))

        def loss(q, k, v, w, f, walks_given):
            chosen = walks_given if implementation == "visits" else walks
            phi = features.modulate(chosen, lambda n: jnp.pad(f, [(0, 0), (0, n - f.shape[1])]))
            mask, how = (
                features.EstimatedKernel(phi),
                "dense" if implementation == "dense" else "sparse",
            )
            trained = performer.Features(w, trainable=True)
            found = masked_attention(q, k, v, trained, mask, implementation=how)
            return jnp.sum(found * target)

        given = jax.jit(loss)
        check_grads(
            lambda *floats: given(*floats, walks), (*inputs(), modulation), order=1, modes=["rev"],
            rtol=1e-5,
        )  # fmt: skip


def test_small_normalisers_have_gradients():
    """Keys without a link set the maximum: normalisers are 1e-30, and their squares vanish."""
    *tokens, w = inputs(size=5.0)
    target = jnp.asarray(np.random.default_rng(2).standard_normal((B, NUM_NODES, HEADS, V)), float)

    def gradients(implementation):
        attention_sum = partial(attend, w=w, mask=estimate(), implementation=implementation)
        return jax.grad(lambda *x: jnp.sum(target * attention_sum(*x)), argnums=(0, 1, 2))(*tokens)

    for dense, pairs in zip(gradients("dense"), gradients("pairs"), strict=True):
        np.testing.assert_allclose(dense, pairs, rtol=1e-4, atol=1e-4)


def test_hubs_are_summed_over_visits():
    """A star has N^2 pairs that meet in the middle, and 2 N visits."""
    mask = features.EstimatedKernel(
        features.Features(jnp.arange(99), jnp.zeros(99, jnp.int32), jnp.ones(99), 99)
    )
    assert attention.link(mask, 98) is None
    links = attention.link(mask, 99)
    assert links is not None
    assert int(links.exists.sum()) == 99**2


def test_links_serve_traced_walks():
    q, k, v, w = inputs()
    mask = estimate()
    call = jax.jit(partial(masked_attention, implementation="sparse"))
    found = call(q, k, v, w, mask, links=attention.link(mask))
    np.testing.assert_allclose(found, call(q, k, v, w, mask), rtol=1e-5, atol=1e-6)


def test_the_product_of_a_constant_mask_is_not_folded():
    *tokens, w = inputs()
    mask = estimate()

    def flops(function, *arguments):
        compiled = jax.jit(function).lower(*arguments).compile()
        return compiled.cost_analysis()["flops"]

    constant = flops(lambda q: masked_attention(q, *tokens[1:], w, mask), tokens[0])
    given = flops(lambda q, mask: masked_attention(q, *tokens[1:], w, mask), tokens[0], mask)
    assert constant == given


def test_batch_axes_and_narrow_dtypes():
    q, k, v, w = inputs()
    mask = estimate()
    expected = masked_attention(q, k, v, w, mask)
    found = masked_attention(*(x[:, None] for x in (q, k, v)), w, mask)
    np.testing.assert_allclose(found[:, 0], expected, rtol=1e-6)
    np.testing.assert_allclose(masked_attention(q[0], k[0], v[0], w, mask), expected[0], rtol=1e-5)
    narrow = masked_attention(*(x.astype(jnp.bfloat16) for x in (q, k, v)), w, mask)
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_allclose(narrow.astype(float), expected, atol=0.1)


def test_forward_mode_of_sums_over_pairs_is_refused():
    mask = graph_random_features(jax.random.key(0), example(), DIFFUSION, num_walks=1, p_halt=0.9)
    x, w = jnp.ones((1, NUM_NODES, 1, 32)), jnp.ones((64, 32))

    def attend(x, implementation):
        return masked_attention(x, x, x, w, mask, implementation=implementation)

    with pytest.raises(TypeError, match="forward mode .* pass implementation='dense'"):
        jax.jvp(partial(attend, implementation="sparse"), (x,), (x,))
    jax.jvp(partial(attend, implementation="dense"), (x,), (x,))
