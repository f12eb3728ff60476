"""Refusals of `performer`, with the value and the fix; of attention: `test_attention.py`."""

import inspect
from functools import partial as call
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import networkx
import numpy as np
import pytest
from flax import nnx

import performer
from performer import (
    Exact,
    alibi,
    analysis,
    calibration,
    couplings,
    directions,
    features,
    gp,
    hadamard,
    kernels,
    norms,
    quadrature,
    refinement,
    structured,
    theory,
)
from performer.graphs import (
    Graph,
    graph_random_features,
    masked_attention,
    matching,
    pagerank,
    walks,
)
from performer.graphs import couplings as walk_couplings
from performer.graphs import gp as graph_gp
from performer.graphs import kernels as graph_kernels
from performer.graphs import theory as graph_theory
from performer.nnx import GraphAttention, PerformerAttention
from performer.sklearn import RandomFeatures
from tests.support import zoo
from tests.support.graph_examples import example

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal([0, 2, 4], size=(8, 3))
raw = inspect.unwrap  # without the checks of annotations, which users do not have


def ones(*shape):
    return jnp.asarray(np.ones(shape, np.float32))


def of_analysis():
    Q, K = ones(2, 10, 4, 4), ones(2, 12, 2, 4)
    measured = call(raw(analysis.attention_error), query=Q, key=K, coupling="orf", num_features=6)
    recommended = call(raw(analysis.recommend), Q, K, coupling="orf")
    transfer = call(raw(refinement.transfer), refinement.positive_features, None, None, None)
    moments = raw(calibration.pair_moments)
    calibrated = call(calibration.calibrate, Q, K, coupling="orf")
    fitted = calibration.Calibration(shift=ones(2, 4))

    def attend(calibration, **fields):
        features = performer.Features(ones(6, 4), calibration, **fields)
        return performer.performer_attention(Q, K, K, features)

    return [
        (call(recommended, tolerance=0.0), "tolerance must be positive, such as 0.1, got 0.0"),
        (call(recommended, tolerance=0.1, limit=1), "limit must be at least 2, the fewest feature"),
        (call(measured, coupling=lambda key, m, d: ones(m, d + 1)), r"shape \(6, 5\); expected .*"),
        (call(measured, query=ones(2, 0, 4, 4)), r"query has shape \(2, 0, 4, 4\).* no axis empty"),
        (call(measured, mask=ones(10, 12)), "honours masks over keys only"),
        (call(measured, mask=jnp.arange(2)[:, None, None, None]), "1 batch entries have no key"),
        (call(moments, ones(2, 10, 3, 4), K), r"\(2, 10, 3, 4\) and key .* a multiple of the h"),
        (call(moments, ones(2, 10, 4, 5), K), r"\(2, 10, 4, 5\) and key .* must be the same"),
        (call(moments, ones(1, 10, 4, 4), K), r"\(1, 10, 4, 4\) and key .* must be the same"),
        (call(transfer, steps=0), "steps must be a positive integer, got 0"),
        (call(moments, Q, K, scale=-1.0), "scale must be positive and finite, got -1.0"),
        (call(calibrated, method="fulll"), "unknown calibration 'fulll'; did you mean 'full'"),
        (call(raw(calibration.parts), None), "method=None: must be a text, such as 'full' or 'no"),
        (call(moments, Q[:, :2], K, mask=ones(2, 12)), r"\(2, 12\); exp.* padding pass valid\["),
        (call(calibrated, mask=ones(3, 10, 12)), r"\(3, 10, 12\); expected one that broadcasts"),
        (call(calibrated, method="shift+tilt+proposal"), "use one of tilt, traceless, proposal"),
        (
            call(attend, calibration=fitted._replace(mean=ones(4)), feature_map="hyperbolic"),
            "requires",
        ),
        (call(attend, calibration=fitted._replace(shift=ones(3, 4))), r"calibration.shift has sha"),
    ]


def of_couplings():
    orf = call(raw(couplings.Blocks.__call__), couplings.get("orf"), KEY)
    quantile = couplings.with_quantile
    map_of = call(raw(features.FeatureMap.__call__), features.positive)
    projected = call(raw(features.FeatureMap.from_projections), features.positive)
    of_rules = call(raw(quadrature.spherical_radial), KEY)
    rule = quadrature.Rule(ones(8, 3), ones(8), ones())
    fast = structured.draw(KEY, 6, 3)
    return [
        (call(couplings.get, "orff"), "did you mean 'orf'.* Choices: iid, orf .*, simrf, pnc, pm"),
        (call(couplings.get, "xyz"), r"unknown coupling 'xyz'\. Choices: iid, orf"),
        (call(raw(couplings.get), 3), "must be a name or a function .* got 3"),
        (
            call(couplings.get, "orthogonal"),
            "'orthogonal' is a part of couplings, as in 'orf' or 'or",
        ),
        (
            call(raw(couplings.Blocks.__call__), couplings.get("pm"), 0, 8, 4),
            "write jax.random.key",
        ),
        (call(couplings.get, "iid*pairwise"), r"directions in .* 'iid\*pairwise': 'iid'.*indep"),
        (call(couplings.get, "simplex*pm"), "unknown norms .* 'pm'. Choices: independent, pa"),
        (call(orf, 0, 4), "got 0"),
        (call(couplings.get("pm-antithetic"), KEY, 7, 4), "even .* got m = 7"),
        (call(quantile, "halton", norms.matern(1.5)), "halton draws no lengths"),
        (call(quantile, "fixed-antithetic", norms.matern(1.5)), "without a law"),
        (call(directions.simplex, KEY, ones(1), 1), "d = 1"),
        (call(norms.matern, 0.0), r"positive, got 0\.0"),
        (call(structured.random_butterfly, KEY, 0), "must be a positive integer, got 0"),
        (call(structured.random_butterfly(KEY, 8).apply, ones(2, 7)), "width 7 but the butterfly"),
        (structured.draw(KEY, 3, 1, simplex=True).matrix, "simplex directions need d >= 2, got"),
        (call(raw(structured.StructuredFrequencies.apply), fast, ones(7)), "width 7 but frequenci"),
        (call(hadamard.transform, ones(6)), "power of two, got size 6"),
        (call(map_of, ones(5, 6), ones(7, 6), kernel="gauss"), "unknown kernel 'gauss'"),
        (
            call(features.FeatureMap.__post_init__, SimpleNamespace(kernel="Gaussian")),
            "unknown kernel 'Gaussian'",
        ),
        (call(map_of, ones(5, 6), ones(7, 6), lengthscale=ones(5, 1)), r"of the shape \(6,\), got"),
        (call(projected, ones(5, 7), ones(5, 1), weights=ones(6)), r"shape \(7,\), got \(6,\)"),
        (call(map_of, ones(5, 6), ones(7, 6), weights=-ones(7)), "not be negative, got -1.0"),
        (call(map_of, ones(5, 6), ones(7, 6), output_scale=ones(7)), "output_scale must be one nu"),
        (call(map_of, ones(5, 6), ones(7, 5)), "width 6 but frequencies have 5"),
        (call(features.relu, ones(5, 6), ones(7, 6), kernel="gaussian"), "has a kernel of its own"),
        (call(of_rules, 0, 3), "num_rules must be a positive integer, got 0"),
        (call(of_rules, 1, 3, orthogonal="har"), "orthogonal matrices 'har'; did you mean 'haar'"),
        (call(quadrature.gram, ones(1, 3), ones(1, 3), rule, "gauss"), "unknown kernel 'gauss'"),
        (call(quadrature.feature_maps, ones(1, 3), rule, kernels.matern(1.5)), r"N\(0, I\), not"),
        (call(theory.conformity, "sorf", 1.0, 4, 4), "no theory of couplings.Padded"),
        (call(theory.kernel_mse, "fixed", X[0], X[1], 1), "no theory of"),
        (call(theory.kernel_mse, "orf-antithetic", X[0], X[1], 1), "even .* got m = 1"),
        (call(theory.conformity, "orf", 1.0, 4, 1), "m >= 2 frequencies, got m = 1"),
        (call(theory.conformity, "orf-antithetic", 1.0, 4, 5), "even number of features, got m ="),
        (call(theory.conformity, "simrf", 1.0, 1, 4), "d >= 2, got d = 1"),
    ]


def of_kernels():
    gaussian = call(raw(kernels.Kernel.__call__), kernels.gaussian)
    process = call(raw(gp.GaussianProcess.fit), gp.GaussianProcess())
    likelihood = call(raw(gp.log_marginal_likelihood), y=ones(3))
    scales = call(raw(gp.fit_scales), KEY, None, [X], (), gp.Scales(), num_steps=1, optimizer=None)
    fitted = gp.GaussianProcess().fit(X, X[:, 0], num_steps=1)
    eye = jnp.eye(3)
    return [
        (call(gaussian, X[:, 0], X), r"x must have the shape \(n, d\), got \(8,\); .* x\[:, None"),
        (call(gaussian, X, X[:4, :1]), r"y must have the shape \(k = 4, d = 3\), got \(4, 1\)"),
        (call(gaussian, X, X, lengthscale=np.ones(5)), r"lengthscale must be .*, got \(5,\)"),
        (call(gaussian, X, X, lengthscale=0.0), "must be positive and finite, got 0.0"),
        (call(gaussian, X, X, output_scale=np.nan), "output_scale must be .* got nan"),
        (call(kernels.frequencies, KEY, kernels.matern(1.5), 6, 3, "halton"), "draws no lengths"),
        (call(kernels.arc_cosine, 2), "order of an arc-cosine kernel must be 0 or 1, got 2"),
        (call(process, X[:, 0], X[:, 1]), r"x must have the shape .*, got \(8,\); .* x\[:, None\]"),
        (call(process, X, X[:, :1]), r"y must have the shape \(n = 8\), got \(8, 1\)"),
        (call(process, X, X[:, 0], fixed=("lengthscales",)), "'lengthscales' is none of lengthsca"),
        (call(scales, fixed="noise_scale"), r"tuple of names, as \('noise_scale',\), got 'noise_s"),
        (call(fitted.predict, X[:, :2]), r"x must have the shape \(k = 8, d = 3\), got \(8, 2\)"),
        (call(gp.condition, eye, eye, eye, ones(3), 0.0), "noise_scale must be positive and finit"),
        (call(fitted.sample, KEY, X, 0), "num_samples must be a positive integer, got 0"),
        (call(likelihood, -eye, noise_scale=0.2), "3 x 3, is not positive definite"),
        (call(gp.kl, gp.Gaussian(ones(3), eye), gp.Gaussian(ones(3), -eye)), "covariance of q, 3"),
        (call(gp.negative_log_density, gp.Gaussian(ones(3), -eye), ones(3)), "a variance must be"),
    ]


def of_graphs():
    edge, negative = Graph.from_edges([(0, 1)], 2), Graph.from_edges([(0, 1)], 2, [-1.0])
    diffusion = graph_kernels.Diffusion()
    estimate = call(graph_random_features, KEY, example(), diffusion, num_walks=2, p_halt=0.5)
    some = estimate()
    masked = call(raw(masked_attention), *[ones(1, 9, 4, 3)] * 3, ones(6, 3))
    drawn = call(raw(graph_random_features), KEY, num_walks=2)
    lengths = call(walk_couplings.lengths, KEY)
    walk = call(raw(walks.sample), KEY, p_halt=0.5)
    posterior = call(raw(graph_gp.condition), some)
    expected = call(graph_theory.expected_error, example(), num_walks=2, p_halt=0.5)
    short = graph_kernels.FromSeries(lambda n: np.array([1.0, 0.5]))
    return [
        (call(Graph.from_edges, [(0, 3)], 3), r"edge 0, \(0, 3\), names a node outside 0..2"),
        (call(Graph.from_edges, [(0, 1)], 3, [np.nan]), "not finite"),
        (call(Graph.from_edges, [(0, 1), (1, 2)], 3, [1, 1e-60]), "weights of node 2 round to 0"),
        (call(Graph.from_edges, [(0, 1, 2), (1, 2, 0)], 3), r"as edge_index\.T"),
        (call(Graph.from_edges, [("a", "b")], 2), "integer node ids, .* from_networkx"),
        (call(Graph.from_scipy, np.triu(np.ones((3, 3)), 1)), r"not symmetric: \[0, 1\] is 1"),
        (call(Graph.from_networkx, networkx.DiGraph([(0, 1)])), "directed; use"),
        (call(some.__matmul__, ones(8)), r"vectors must be .* N = 9, got \(8,\)"),
        (call(some.left.transposed, ones(10, 2)), r"vectors must be .* N = 9, got \(10, 2\)"),
        (call(raw(Graph.__matmul__), edge, ones(3)), r"vectors must be .* N = 2, got \(3,\)"),
        (negative.normalised, "weights >= 0, the least is -1"),
        (call(graph_kernels.Diffusion, sigma=-1.0), "sigma must be positive and finite"),
        (call(graph_kernels.RandomWalk, alpha=1.5), "alpha must be at least 2"),
        (call(graph_kernels.FromSeries, lambda n: -np.ones(n)), "begin with c_0 > 0, got -1"),
        (call(graph_kernels.Resolvent().dense, example()), r"radius of the weights is 3\."),
        (call(drawn, example(), diffusion, p_halt=1.5), r"in \(0, 1\), got 1.5"),
        (call(drawn, example(), graph_kernels.Resolvent(), p_halt=0.5), "diverges: the spectral "),
        (call(drawn, example(), graph_kernels.Diffusion, p_halt=0.5), r"as kernels.Diffusion\(sig"),
        (call(drawn, edge, lambda n: jnp.ones(3), p_halt=0.5), "has 3 coefficients where 1024"),
        (call(drawn, edge, short, p_halt=0.5), "has 2 coefficients where 1024 are .* add zeros"),
        (call(matching.learn, edge, short, p_halt=0.5), "has 2 coefficients where"),
        (call(expected, kernel=short), "has 2 coefficients where"),
        (call(lengths, "antithetc", 3, 2, 0.5), "walks 'antithetc'; did you mean 'antithetic'"),
        (call(lengths, "sigma", 3, 2, 0.5), r"learned: pass couplings.sigma\(matching.learn"),
        (call(lengths, "independent", 3, 0, 0.5), "num_walks must be a positive integer, got 0"),
        (call(lengths, "independent", 3, 2, 0.0), r"in \(0, 1\), got 0.0"),
        (call(walk_couplings.sigma, np.array([0, 0, 2])), r"not a permutation of 0..2: \[0 0 2\]"),
        (call(walk, edge, np.ones((2, 2), np.int32), steps="fast"), "'weighted', got 'fast'"),
        (call(walk, edge, np.ones((1, 2), np.int32)), r"of 2 nodes; got \(1, 2\)"),
        (call(walk, negative, np.ones((2, 2), np.int32), steps="weighted"), "needs weights >= 0"),
        (call(matching.learn, edge, diffusion, p_halt=0.5, order=0), "order must be a positive"),
        (call(pagerank.power_iteration, edge, p_halt=1.0), r"in \(0, 1\), got 1.0"),
        (call(expected, kernel=diffusion, coupling="sigma"), "unknown coupling of walks 'sigma'"),
        (call(graph_theory.recommend, edge, diffusion, 0.0), "tolerance must be positive, got 0"),
        (call(graph_theory.recommend, edge, diffusion, 1e-9), "do not reach an error of 1e-09"),
        (call(graph_theory.pagerank_variance, example(), num_walks=2, p_halt=0.5), "teleports"),
        (call(posterior, [0], [1], ones(1), 0.0), "noise_scale must be positive"),
        (call(posterior, [0, 9], [0], ones(2), 1.0), "observed must be nodes from 0 to 8, got 9"),
        (call(posterior, [0.0], [0], ones(1), 1.0), r"whole numbers \(n,\), got float32"),
        (
            call(raw(graph_gp.sample), KEY, some, [0], ones(1), 1.0, num_samples=0),
            "num_samples must be a positive integer, got 0",
        ),
        (call(posterior, [0], [0], jnp.array([jnp.nan]), 1.0), "y has entries that are not finite"),
        (call(masked, ones(8, 8)), r"the mask is \(8, 8\) for 9 queries and 9 keys"),
        (call(masked, ones(3, 9, 9)), r"the mask is \(3, 9, 9\).*of 4 heads"),
        (call(masked, some, implementation="robust"), "unknown implementation 'robust'"),
        (call(masked, some.gram(), implementation="sparse"), "needs walks"),
    ]


def layer(**options):
    return PerformerAttention(16, 4, num_heads=2, **options, rngs=nnx.Rngs(0))


def heads(attention=None, **options):
    options |= dict(attention_fn=attention or layer(), decode=False, rngs=nnx.Rngs(0))
    return nnx.MultiHeadAttention(2, 8, **options)


def transform(scale=1.0, dtype=float, **parameters):
    features = RandomFeatures().set_params(**parameters).fit(X.astype(dtype))
    return features.transform((scale * X).astype(dtype))


def of_layers():
    of_graph = call(GraphAttention, 2, rngs=nnx.Rngs(0))
    token, sequence = ones(3, 1, 8), ones(3, 5, 8)
    slopes = np.array([0.5, 0.125])
    function, (arguments, *_) = zoo.plain()
    linearized = call(performer.linearize, function)
    return [
        (
            call(heads(layer(exact=Exact(2))), token, sequence),
            r"Exact\(window=2\) requires one key f",
        ),
        (call(heads(layer(exact=Exact(-1))), sequence), r"Exact\(window=-1\) must not be negative"),
        (
            call(heads(layer(bias=alibi(slopes))), token, sequence),
            "requires one key for each query",
        ),
        (call(layer, redraw_every=-1), "redraw_every must not be negative, got -1"),
        (call(heads(), sequence, mask=jnp.tril(ones(1, 1, 5, 5), 1)), "masks over keys only"),
        (call(heads(), token, sequence, is_causal=True), "when decoding leave is_causal out"),
        (call(heads(dropout_rate=0.5), sequence, deterministic=False), r"dropout_rate=0\.5"),
        (
            call(layer(), *[ones(3, 5, 2, 4)] * 3, dropout_rate=float("nan"), deterministic=False),
            "dropout_rate=nan",
        ),
        (call(layer(), *[ones(3, 5, 2, 4)] * 3, bias=ones(1, 1, 5, 5)), "bias"),
        (call(layer(calibration="full"), ones(1, 5, 2, 4), *[ones(1, 5, 1, 4)] * 2), "one for eac"),
        (call(layer, calibration="ful"), "unknown calibration 'ful'"),
        (call(of_graph, 7), "2 heads must divide the width 7"),
        (call(transform, n_components=0), "must be a positive integer such as 100, got 0"),
        (call(transform, n_components=6, coupling="pm-antithetic"), "n_components=6 has m = 3 fre"),
        (call(transform, gamma=-1), "gamma must be a positive, finite number or 'scale', got -1"),
        (call(transform, coupling="pncc"), "unknown coupling 'pncc'; did you mean 'pnc'"),
        (call(transform, kernel=kernels.matern(1.5), coupling="halton"), "halton draws no lengths"),
        (call(transform, coupling=lambda key, m, d: np.ones((d, m))), r"\(50, 3\), got \(3, 50\)"),
        (call(transform, coupling=lambda key, m, d: np.full((m, d), np.nan)), "150 values that ar"),
        (call(transform, 1e25, np.float32), "is too large for float32: scale it"),
        (call(linearized, iter([arguments]), refine_steps=1), "these can be read only once"),
        (call(linearized, [arguments], tolerance=0), "tolerance must be positive, such as 0.1"),
        (call(linearized, [arguments[1]]), "batches must be tuples of arguments.*batch 0"),
        (call(linearized, arguments[1]), r"must be a list of batches.* of shape \(.*pass \[x\]"),
        (call(linearized, []), "no batches|at least one batch"),
        (call(linearized, [arguments], keep=-1), "keep must not be negative, got -1"),
        (
            call(linearized, [arguments], exact=Exact(first=1)),
            r"Exact\(first=1\) requires a window",
        ),
        (call(linearized, [arguments], where=lambda name: False), "not chosen by where"),
    ]


@pytest.mark.parametrize("calls", [of_analysis, of_couplings, of_kernels, of_graphs, of_layers])
def test_an_error_names_the_value_and_the_fix(calls):
    for refused, message in calls():
        with pytest.raises(ValueError, match=message):
            refused()
