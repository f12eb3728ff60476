"""Every public function of `performer`, with arguments: what all must bear walks this table.

A row calls one function or method, and is under its name; further rows of the same function are
under "name[what is different]". The call is given `x`: `x(3, 2)` is an array of normal numbers, in
the dtype that the test asks for, the same ones whenever the shape and the seed are. It returns a
pytree of arrays.
"""

import inspect
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache, partial
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import networkx
import numpy as np
import optax
import scipy.sparse
from flax import linen, nnx

import performer
import performer.linen
import performer.nnx
import performer.sklearn
from performer import (
    analysis,
    attention,
    butterfly,
    calibration,
    copula,
    couplings,
    directions,
    features,
    gp,
    graphs,
    kernels,
    norms,
    quadrature,
    refinement,
    structured,
    testing,
    theory,
)
from performer.calibration import Calibration
from performer.graphs import Graph

Inputs = Callable[..., jax.Array]


class Row(NamedTuple):
    call: Callable[[Inputs], Any]
    kind: str
    """draws: random numbers, the same bits in float32 whatever the settings
    computes: of `x`, in its dtype
    wide: of no array, or of graphs, whose numbers are of JAX's default dtype
    numpy: in float64 NumPy, or nothing but Python"""
    host: bool
    """It looks at values, so that `jax.jit` and `jax.make_jaxpr` cannot take all of it."""


ROWS: dict[str, Row] = {}
UNEXPORTED = ("typing", "choices", "_descent", "_masks", "hadamard")
"""Modules that `import performer` merely loads."""
CHECKS = {
    *("nnx.Report.draw", "nnx.Report.to_csv"),
    "graphs.kernels.require_radius",
    "graphs.walks.require_lengths",
    "graphs.walks.require_steps",
    *(f"couplings.{kind}.properties" for kind in ("Blocks", "Padded", "Antithetic", "Halton")),
}
"""They look at arguments, or write, and compute nothing."""


def row(name: str, kind: str = "computes", *, host: bool = False):
    def register(call):
        assert name not in ROWS
        ROWS[name] = Row(call, kind, host)
        return call

    return register


def rows(kind: str, calls: dict[str, Callable[[Inputs], Any]], *, host: bool = False) -> None:
    for name, call in calls.items():
        row(name, kind, host=host)(call)


def inputs(dtype) -> Inputs:
    def x(*shape: int, seed: int = 0) -> jax.Array:
        return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) / 2, dtype)

    return x


def public_functions() -> dict[str, Any]:
    """All functions, methods and properties without an underscore, by dotted name."""
    found = {}
    modules = {performer.nnx, performer.linen, performer.sklearn}
    modules |= {getattr(performer, name) for name in performer.MODULES}
    modules |= {value for value in vars(graphs).values() if isinstance(value, ModuleType)}
    for module in modules:
        package = hasattr(module, "__path__")
        if not module.__name__.startswith("performer.") or (
            package and module not in (attention, performer.nnx)
        ):
            continue
        if module.__name__.removeprefix("performer.") in UNEXPORTED:
            continue
        for name, value in vars(module).items():
            home = getattr(value, "__module__", None) or ""
            here = home == module.__name__ or (package and home.startswith(module.__name__))
            if name.startswith("_") or not here or not callable(value):
                continue
            dotted = f"{module.__name__.removeprefix('performer.')}.{name}"
            if not inspect.isclass(value):
                found[dotted] = value
                continue
            for part, method in vars(value).items():
                of_class = isinstance(method, (property, classmethod)) or inspect.isfunction(method)
                if of_class and not part.startswith("_"):
                    found[f"{dotted}.{part}"] = method
    return {name: value for name, value in found.items() if name not in CHECKS}


def key(seed: int = 0):
    return jax.random.key(seed)


# Draws

M, D = 6, 4

rows(
    "draws",
    {
        "couplings.get": lambda x: [couplings.get(n)(key(), M, D) for n in couplings.names()],
        "couplings.Blocks": lambda x: couplings.Blocks(directions.simplex, norms.monotone)(
            key(), M, D
        ),
        "couplings.Padded": lambda x: couplings.Padded(
            couplings.Blocks(directions.hadamard, norms.pairwise)
        )(key(), 3, 3),
        "couplings.Antithetic": lambda x: couplings.Antithetic(couplings.halton)(key(), M, D),
        "couplings.halton": lambda x: couplings.halton(key(), M, D),
        "couplings.draw": lambda x: couplings.draw(key(), "pnc", M, D, 2),
        "couplings.redraw": lambda x: couplings.redraw(
            key(), "pm", jnp.zeros((2, M, D), jnp.float32), 4, every=2
        ),
        "norms.independent": lambda x: norms.independent(key(), M, D),
        "norms.pairwise": lambda x: norms.pairwise(key(), M, D),
        "norms.monotone": lambda x: norms.monotone(key(), M, D),
        "norms.fixed": lambda x: norms.fixed(key(), M, D),
        "norms.independent_scores": lambda x: norms.independent_scores(key(), M),
        "norms.pairwise_scores": lambda x: norms.pairwise_scores(key(), M),
        "norms.with_quantile": lambda x: norms.with_quantile(norms.pairwise, norms.matern(1.5))(
            key(), M, D
        ),
        "couplings.with_quantile": lambda x: couplings.with_quantile("pnc", norms.matern(1.5))(
            key(), M, D
        ),
        "norms.matern": lambda x: norms.independent(key(), M, D, norms.matern(1.5)),
        "directions.haar": lambda x: directions.haar(key(), 3, D),
        "structured.draw": lambda x: structured.draw(key(), M, 3, simplex=True),
        "structured.StructuredFrequencies.matrix": lambda x: structured.draw(key(), M, 3).matrix(),
        "butterfly.random_butterfly": lambda x: [
            butterfly.random_butterfly(key(), 5, products=t) for t in (1, 2)
        ],
        "butterfly.Butterfly.matrix": lambda x: butterfly.random_butterfly(key(), 5).matrix(),
        "quadrature.spherical_radial": lambda x: [
            quadrature.spherical_radial(key(), 2, 3, reject=True),
            quadrature.spherical_radial(key(), 2, 3, orthogonal="butterfly", reflect=False),
        ],
        "quadrature.structured": lambda x: quadrature.structured(key(), 2, 3),
        "quadrature.StructuredRule.weights": lambda x: quadrature.structured(key(), 2, 3).weights,
        "quadrature.StructuredRule.constant": lambda x: quadrature.structured(key(), 2, 3).constant,
        "quadrature.StructuredRule.dense": lambda x: quadrature.structured(key(), 2, 3).dense(),
        "quadrature.random_features": lambda x: quadrature.random_features("iid")(key(), M, D),
        "quadrature.gauss_hermite": lambda x: quadrature.gauss_hermite(key(), M, D),
        "quadrature.method": lambda x: [
            quadrature.method(key(), name, 1, 3, reflect=True) for name in quadrature.METHODS
        ],
        "kernels.Kernel.coupled": lambda x: kernels.softmax.coupled("orf")(key(), M, D),
        "kernels.frequencies": lambda x: kernels.frequencies(key(), kernels.matern(1.5), M, D),
        "quadrature.vertices": lambda x: quadrature.vertices(3),
        "copula.pairwise": lambda x: copula.pairwise(3),
        "copula.monotone": lambda x: copula.monotone(3),
        "copula.norms": lambda x: copula.norms(x(3))(key(), 3, 3),
        "copula.orthogonal": lambda x: copula.orthogonal(x(3))(key(), 5, 3),
    },
)
for _name in ("independent", "orthogonal", "simplex", "simplex_weighted", "hadamard"):
    row(f"directions.{_name}", "draws")(
        lambda x, name=_name: getattr(directions, name)(
            key(), jnp.arange(1, 4, dtype=jnp.float32), D
        )
    )
row("directions.hadamard_simplex", "draws")(
    lambda x: directions.hadamard_simplex(key(), jnp.ones(3, jnp.float32), D)
)

# Features, rules and operators of points

rows(
    "computes",
    {
        "norms.root_mean_square": lambda x: norms.root_mean_square(x(2, 3), 3),
        "norms.chi": lambda x: norms.chi(x(2, 3), 3),
        "norms.Tabulated": lambda x: norms.Tabulated(norms._log_chi)(x(3), 2),
        "directions.multiply_simplex": lambda x: directions.multiply_simplex(x(2, 3)),
        "structured.StructuredFrequencies.apply": lambda x: structured.draw(
            key(), M, 3, simplex=True
        ).apply(x(2, 3)),
        "butterfly.Butterfly.apply": lambda x: butterfly.random_butterfly(key(), 5).apply(x(2, 5)),
        "butterfly.Butterfly.apply_transpose": lambda x: butterfly.random_butterfly(
            key(), 5
        ).apply_transpose(x(2, 5)),
        "quadrature.StructuredRule.apply": lambda x: quadrature.structured(key(), 2, 3).apply(
            x(2, 3)
        ),
        "quadrature.multiply_vertices": lambda x: quadrature.multiply_vertices(x(2, 3)),
        "quadrature.feature_maps": lambda x: quadrature.feature_maps(
            x(2, 3), quadrature.spherical_radial(key(), 1, 3), "arc-cosine-0", lengthscale=0.5
        ),
        "quadrature.gram": lambda x: quadrature.gram(
            x(2, 3), x(4, 3), quadrature.spherical_radial(key(), 1, 3), output_scale=x(1)[0] ** 2
        ),
        "features.positive": lambda x: [
            features.positive(x(2, 5, D), frequencies(), kernel=kernel) for kernel in KERNELS
        ],
        "features.hyperbolic": lambda x: features.hyperbolic(
            x(2, D), frequencies(), weights=weights()
        ),
        "features.trigonometric": lambda x: features.trigonometric(
            x(2, D), frequencies(), lengthscale=x(D) ** 2, output_scale=2.0
        ),
        "features.get": lambda x: features.get("relu")(x(2, D), frequencies()),
        "features.relu": lambda x: features.relu(x(D), frequencies()),
        "features.elu": lambda x: features.elu(x(2, D), frequencies(), weights=weights()),
        "features.arc_cosine": lambda x: [
            features.arc_cosine(order)(x(2, D), frequencies(), weights=weights())
            for order in (0, 1)
        ],
    },
)
KERNELS = ("softmax", "gaussian")


def frequencies(*heads: int) -> jax.Array:
    """As a coupling draws them: float32 in all settings."""
    return inputs(jnp.float32)(*heads, M, D, seed=1)


def weights(*heads: int) -> jax.Array:
    return jnp.exp(inputs(jnp.float32)(*heads, M, seed=2))


# Attention


def tokens(x: Inputs, t: int = 5, s: int = 5, n: int = 2, k: int = 1) -> list[jax.Array]:
    return [x(2, t, n, D), x(2, s, k, D, seed=3), x(2, s, k, 3, seed=4)]


def attend(x: Inputs, *lead: int, **options: Any) -> Any:
    return performer.performer_attention(*tokens(x, k=2), frequencies(*lead), **options)


def fitted() -> Calibration:
    """A calibration with all its parts, for each of two heads."""
    query, key = (inputs(jnp.float32)(2, 9, 2, D, seed=seed) for seed in (5, 6))
    return calibration.calibrate(query, key, method="shift+scale+proposal")


MASK = np.array([[True] * 4 + [False], [True] * 5])
SEGMENTS = np.array([[0, 0, 1, 1, 1], [2, 3, 3, 3, 3]], np.int32)


@row("attention.performer_attention")
def _(x):
    query, key, value = tokens(x)
    return [
        performer.performer_attention(query, key, value, frequencies(), mask=MASK[:, None, None]),
        performer.performer_attention(query, key, value, frequencies(1), key_value_seq_lengths=3),
    ]


rows(
    "computes",
    {
        "attention.performer_attention[causal]": lambda x: attend(
            x, 2, is_causal=True, shift=x(D), return_state=True
        ),
        "attention.performer_attention[stream]": lambda x: attend(
            x, is_causal=True, initial_state=attend(x, return_state=True)[1]
        ),
        "attention.performer_attention[segments]": lambda x: [
            attend(x, segment_ids=SEGMENTS, is_causal=is_causal) for is_causal in (False, True)
        ],
        "attention.performer_attention[packed]": lambda x: attend(
            x, segment_ids=(SEGMENTS, SEGMENTS[::-1])
        ),
        "attention.performer_attention[calibration]": lambda x: attend(
            x, calibration=fitted(), weights=weights()
        ),
        "attention.performer_attention[maps]": lambda x: [
            attend(x, 2, weights=weights(2), feature_map=name, scale=0.5)
            for name in ("hyperbolic", "trigonometric", "relu", "elu+1", features.arc_cosine(0))
        ],
        "attention.performer_attention[key log-weights]": lambda x: [
            attend(
                x, key_log_weights=x(2, 5, *heads), is_causal=is_causal, mask=MASK[:, None, None]
            )
            for is_causal, heads in [(False, ()), (True, ()), (True, (2,))]
        ],
        "attention.performer_attention[google]": lambda x: attend(
            x, stabilizer="google", mask=MASK[:, None, None]
        ),
        "attention.performer_attention[gradient]": lambda x: jax.grad(
            lambda *args: performer.performer_attention(
                *args, frequencies(), is_causal=True, calibration=fitted()
            ).sum(),
            argnums=(0, 1, 2),
        )(*tokens(x, k=2)),
        "attention.performer_attention[devices]": lambda x: [
            jax.vmap(
                partial(performer.performer_attention, axis_name="i", is_causal=is_causal),
                (0, 0, 0, None),
                axis_name="i",
            )(*tokens(x), frequencies())
            for is_causal in (False, True)
        ],
        "attention.attention_weights": lambda x: attention.attention_weights(
            *tokens(x)[:2], frequencies(), is_causal=True
        ),
        "attention.combine": lambda x: attention.combine(state(x, 0), state(x, 1)),
        "attention.over_devices": lambda x: jax.vmap(
            lambda one: attention.over_devices(one, "i"), axis_name="i"
        )(state(x, 0)),
        "attention.earlier_devices": lambda x: jax.vmap(
            lambda one: attention.earlier_devices(one, "i"), axis_name="i"
        )(state(x, 0)),
        "linen.performer_attention_fn": lambda x: performer.linen.performer_attention_fn(
            *tokens(x, k=2), frequencies=frequencies(), deterministic=True
        ),
    },
)


def state(x: Inputs, seed: int) -> attention.State:
    return attention.State(x(2, 3, seed=seed), x(2, 3, seed=seed) ** 2, x(2, 3, 2, seed=seed))


def layer(**options: Any) -> performer.nnx.PerformerAttention:
    rngs = nnx.Rngs(frequencies=0)
    return performer.nnx.PerformerAttention(M, D, num_heads=2, rngs=rngs, **options)


@row("nnx.PerformerAttention.calibrate", "draws")
def _(x):
    module = layer(calibration="full")
    module.calibrate(calibration.pair_moments(*tokens(inputs(jnp.float32), k=2)[:2]))
    return nnx.state(module)


@row("nnx.PerformerAttention.calibration", "draws")
def _(x):
    return layer(calibration="full").calibration


@row("nnx.PerformerAttention[training]")
def _(x):
    module = layer(calibration="full")
    return [module(*tokens(x, k=2), mask=MASK[:, None, None]) for _ in range(2)]


def flax_model() -> nnx.Module:
    return nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))


def linen_model(x):
    module = linen.MultiHeadDotProductAttention(num_heads=2)
    variables = module.init(jax.random.key(0), x(2, 5, 8))
    layers, _ = performer.linen.linearize(module, variables, [x(2, 5, 8)], num_features=M)
    return module, variables, layers


def linen_output(x):
    module, variables, layers = linen_model(x)
    with performer.linen.linearized(layers):
        return module.apply(variables, x(2, 5, 8))


rows(
    "numpy",
    {
        "nnx.linearize": lambda x: nnx.state(
            performer.nnx.linearize(flax_model(), [x(2, 5, 8)], num_features=M)[0]
        ),
        "linen.linearize": lambda x: [y.frequencies for y in linen_model(x)[2].values()],
        "linen.linearized": lambda x: linen_output(x),
        "nnx.measure": lambda x: performer.nnx.measure(flax_model(), [x(2, 5, 8)]).layers[0][1:3],
    },
    host=True,
)


@row("nnx.Report.worst", "numpy")
def _(x):
    report = performer.nnx.Report([{"path": "a", "attention error": 0.5}])
    return [each["attention error"] for each in report.worst()]


@row("nnx.Report.layer_errors", "numpy")
def _(x):
    return performer.nnx.Report([{"path": "a", "attention error": 0.5}]).layer_errors()


def sample(x: Inputs) -> refinement.Sample:
    return refinement.Sample.of(*tokens(x, k=2)[:2])


def of_heads() -> jax.Array:
    return couplings.draw(key(), "orf", M, D, 2)


def near(x: Inputs) -> np.ndarray:
    return refinement.near_pairs(len(tokens(x)[0][0]), 2)


def far() -> refinement.Far:
    return refinement.Far.of(of_heads())


def estimated(x: Inputs) -> tuple[jax.Array, jax.Array, jax.Array]:
    of = sample(x)
    exact = refinement.softmax_attention(of, True)
    return refinement.performer_estimate(of_heads(), None, of, True), exact, of.pairs(True)


rows(
    "computes",
    {
        "refinement.Sample.of": sample,
        "refinement.Sample.pairs": lambda x: sample(x).pairs(True),
        "refinement.softmax_attention": lambda x: refinement.softmax_attention(sample(x), True),
        "refinement.performer_estimate": lambda x: estimated(x)[0],
        "refinement.Far.weights": lambda x: (
            refinement.Far(*(x(*shape) for shape in ((2, 3, D), (2, 3, D), (2, 3), (2,)))).weights
        ),
        "refinement.Far.of": lambda x: refinement.Far.of(tokens(x, k=2)[0][0].swapaxes(0, 1)),
        "refinement.hybrid_estimate": lambda x: refinement.hybrid_estimate(
            far(), (None, near(x)), sample(x), True
        ),
        "refinement.learned_estimate": lambda x: refinement.learned_estimate(
            far(), (None, near(x)), sample(x), True
        ),
        "refinement.squared": lambda x: refinement.squared(*estimated(x)),
        "refinement.divergence": lambda x: refinement.divergence(*estimated(x)),
    },
)
rows(
    "draws",
    {
        "refinement.at_least_near": lambda x: refinement.at_least_near(
            refinement.learned_estimate, far(), (None, near(x)), sample(x), True
        ),
        "refinement.refine_far": lambda x: refinement.refine_far(
            far(),
            None,
            near(x),
            sample(x),
            steps=3,
            optimizer=SGD,
        ),
        "refinement.transfer": lambda x: refinement.transfer(
            refinement.performer_estimate, of_heads(), None, sample(x), steps=3, optimizer=SGD
        ),
    },
)


@row("calibration.Calibration.changes_law", "numpy")
def _(x):
    return fitted().changes_law


@row("refinement.near_pairs", "numpy")
def _(x):
    return refinement.near_pairs(7, 2, 1)


@row("refinement.is_near", "numpy")
def _(x):
    return refinement.is_near(np.arange(7), np.arange(7), 2, 1)


@row("nnx.redraw", "draws")
def _(x):
    module = layer(redraw_every=2)
    performer.nnx.redraw(key(), module, 4)
    return nnx.state(module)


rows(
    "computes",
    {
        "calibration.calibrate": lambda x: calibration.calibrate(
            *tokens(x, k=2)[:2], mask=MASK[:, None, None], is_causal=True
        ),
        "calibration.pair_moments": lambda x: calibration.pair_moments(
            *tokens(x)[:2], num_queries=3
        ),
        "calibration.fit": lambda x: [
            calibration.fit(moments(x), method) for method in ("full", "shift+scale+proposal")
        ],
        "calibration.fold": lambda x: calibration.fold(
            calibration.fit(moments(x), "proposal"), frequencies()
        ),
        "calibration.for_heads": lambda x: calibration.for_heads(
            calibration.fit(moments(x), "shift"), 4
        ),
        "calibration.transform_queries": lambda x: calibration.transform_queries(
            calibration.fit(moments(x), "full"), x(2, 5, 2, D)
        ),
        "calibration.log_determinant": lambda x: calibration.log_determinant(
            jnp.eye(D, dtype=x(1).dtype)[None] + 0.05 * (x(2, D, D) + x(2, D, D).mT)
        ),
        "calibration.transform_keys": lambda x: calibration.transform_keys(
            calibration.fit(moments(x), "full"), x(2, 5, 2, D)
        ),
    },
)
rows(
    "numpy",
    {
        "features.FeatureMap.estimates_softmax": lambda x: features.relu.estimates_softmax,
        "calibration.parts": lambda x: len(calibration.parts("full")),
        "calibration.parts[coupling]": lambda x: len(calibration.parts("full", "pm")),
        "couplings.properties": lambda x: couplings.properties("pm", 3).block_length,
        "couplings.names": lambda x: len(couplings.names()),
    },
)


def moments(x: Inputs) -> jax.Array:
    z = jnp.concatenate([jnp.ones_like(x(2, 20, 1)), x(2, 20, 2 * D)], axis=-1)
    return jnp.einsum("kni,knj->kij", z, z, precision="highest") / 20


def _errors(x: Inputs, **options: Any) -> Any:
    query, key, value = tokens(x)
    found = analysis.attention_error(
        query, key, value, coupling="orf", num_features=4, draws=3, **options
    )
    return vars(found) | {"worse": found.worse_than_uniform}


rows(
    "numpy",
    {
        "analysis.attention_error": lambda x: _errors(x, mask=MASK[:, None, None]),
        "analysis.attention_error[calibration]": lambda x: _errors(
            x, calibration=calibration.fit(moments(x)[:1])
        ),
        "analysis.AttentionError.worse_than_uniform": lambda x: _errors(x)["worse"],
        "analysis.recommend": lambda x: (
            analysis.recommend(
                *tokens(x)[:2], coupling="orf", tolerance=0.1, limit=4, draws=3
            ).error
        ),
    },
    host=True,
)

# Kernels, Gaussian processes, copulas


def points(x: Inputs, n: int = 5) -> jax.Array:
    return 4 * x(n, 2, seed=n)


def gram(x: Inputs) -> jax.Array:
    return kernels.gaussian(points(x), points(x))


def law(x: Inputs, seed: int) -> gp.Gaussian:
    return gp.Gaussian(x(5, seed=seed), gram(x) + jnp.eye(5, dtype=x(1).dtype))


def phi(x: Inputs, n: int) -> jax.Array:
    return features.trigonometric(points(x, n), inputs(jnp.float32)(3, 2))


SGD = optax.sgd(1e-3)  # Adam itself mixes dtypes
START = gp.Scales(1.0, 1.0, 0.5)

rows(
    "computes",
    {
        "kernels.gaussian": lambda x: kernels.gaussian(points(x), points(x, 3), lengthscale=0.5),
        "kernels.gaussian[scales]": lambda x: kernels.gaussian(
            points(x), points(x, 3), lengthscale=x(2) ** 2 + 1, output_scale=x(1)[0] ** 2
        ),
        "kernels.softmax": lambda x: kernels.softmax(points(x), points(x, 3)),
        "kernels.matern": lambda x: kernels.matern(2.5)(points(x), points(x, 3)),
        "kernels.get": lambda x: kernels.get("rbf")(points(x), points(x, 3)),
        "kernels.random_features": lambda x: kernels.random_features(
            key(), kernels.matern(1.5), points(x), 4, lengthscale=0.5, output_scale=x(1)[0] ** 2
        ),
        "kernels.arc_cosine": lambda x: [
            kernels.arc_cosine(order)(points(x), points(x, 3)) for order in (0, 1)
        ],
        "gp.log_marginal_likelihood": lambda x: gp.log_marginal_likelihood(gram(x), x(5), 0.5),
        "gp.log_marginal_likelihood_features": lambda x: gp.log_marginal_likelihood_features(
            phi(x, 5), x(5), 0.5
        ),
        "gp.condition": lambda x: gp.condition(
            gram(x),
            kernels.gaussian(points(x, 3), points(x)),
            kernels.gaussian(points(x, 3), points(x, 3)),
            x(5),
            0.5,
        ),
        "gp.condition_features": lambda x: gp.condition_features(phi(x, 5), phi(x, 3), x(5), 0.5),
        "gp.observed": lambda x: gp.observed(law(x, 0), 0.5),
        "gp.kl": lambda x: gp.kl(law(x, 0), law(x, 1)),
        "gp.negative_log_density": lambda x: gp.negative_log_density(law(x, 0), x(5)),
        "gp.Scales.logarithms": lambda x: START.logarithms(x(1).dtype, ("noise_scale",)),
        "gp.fit": lambda x: gp.fit(points(x), x(5), START, num_steps=2, optimizer=SGD),
        "copula.cholesky": lambda x: copula.cholesky(x(3)),
        "copula.kernel_rmse": lambda x: copula.kernel_rmse(x(5, D))(frequencies()),
        "copula.attention_mse": lambda x: copula.attention_mse(x(3, D), x(5, D))(frequencies()),
        "copula.learn": lambda x: copula.learn(
            key(),
            copula.kernel_rmse(x(5, 2)),
            x(1),
            num_features=2,
            num_draws=2,
            num_steps=2,
            optimizer=SGD,
        ),
    },
)
row("copula.parameters", host=True)(
    lambda x: copula.parameters(copula.pairwise(3).astype(x(1).dtype))
)

X, Y = np.ones(3) / 4, np.arange(3) / 4
rows(
    "numpy",
    {
        "theory.conformity": lambda x: theory.conformity("pnc", 0.5, 4, 6),
        "theory.kernel_mse": lambda x: theory.kernel_mse("orf", X, Y, 4),
        "theory.orthogonality_gap": lambda x: theory.orthogonality_gap(X, Y, 4),
        "theory.pair_length_pdf": lambda x: theory.pair_length_pdf("simrf", X, 3),
        "theory.transport_cost": lambda x: theory.transport_cost(X, 0.5, 3),
    },
)


def _close_to_unbiased(x):
    expected = theory.kernel_mse("iid", *testing.general_points(2), 4)
    testing.assert_mse(couplings.get("iid"), 4, 2, float(expected), draws=500)


rows(
    "numpy",
    {
        "testing.samples": lambda x: testing.samples(couplings.get("iid"), 4, 2, 3),
        "testing.general_points": lambda x: testing.general_points(3),
        "testing.assert_gaussian_marginals": lambda x: testing.assert_gaussian_marginals(
            couplings.get("iid"), 4, 2, draws=500
        ),
        "testing.assert_unbiased": lambda x: testing.assert_unbiased(
            couplings.get("iid"), 4, 2, draws=500
        ),
        "testing.assert_mse": _close_to_unbiased,
        "testing.assert_lower_mse": lambda x: testing.assert_lower_mse(
            couplings.get("orf-antithetic"), couplings.get("iid"), 4, 2, draws=2000
        ),
    },
    host=True,
)


@cache
def transformer(odd: int) -> performer.sklearn.RandomFeatures:
    return performer.sklearn.RandomFeatures(n_components=4 + odd, random_state=0).fit(np.eye(3))


row("sklearn.RandomFeatures.fit", "numpy", host=True)(
    lambda x: (
        performer.sklearn.RandomFeatures(n_components=4, random_state=0).fit(np.eye(3)).frequencies_
    )
)
row("sklearn.RandomFeatures.transform", host=True)(
    lambda x: [transformer(odd).transform(np.asarray(x(2, 3))) for odd in (0, 1)]
)

# Graphs

EDGES, WEIGHTS = np.array([(0, 1), (1, 2), (2, 0), (2, 3)]), np.array([1.0, 0.5, 2.0, 1.5])
WALKS: dict[str, Any] = dict(num_walks=2, p_halt=0.5)


def graph(scale: float = 1.0) -> Graph:
    """A triangle with a tail, and a node alone."""
    return Graph.from_edges(EDGES, 5, scale * WEIGHTS)


@contextmanager
def drawn():
    """Walks are drawn outside `jit`; what their draws promote is not these rows' matter."""
    with (
        jax.ensure_compile_time_eval(),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield


def walked() -> Any:
    with drawn():
        return graphs.features.sample(key(), graph(), **WALKS)


def estimate(unbiased: bool = True) -> Any:
    with drawn():
        return graphs.graph_random_features(
            key(), graph(), graphs.kernels.Diffusion(), unbiased_diagonal=unbiased, **WALKS
        )


def vectors(*shape: int) -> jax.Array:
    return inputs(float)(*shape)


def series(name: str) -> Callable[[Inputs], Any]:
    return lambda x: getattr(graphs.kernels, name)()(6)


def dense(name: str, scale: float = 1.0) -> Callable[[Inputs], Any]:
    return lambda x: getattr(graphs.kernels, name)().dense(graph(scale))


def halves() -> graphs.kernels.Kernel:
    return graphs.kernels.FromSeries(lambda length: 0.5 ** np.arange(length))


def coupled(coupling: Callable, **options: Any) -> Callable[[Inputs], Any]:
    return lambda x: coupling(key(), 5, 0.3, **options)


def observed() -> jax.Array:
    return jnp.asarray([0, 2, 3], jnp.int32)


rows(
    "numpy",
    {
        "graphs.couplings.independent": coupled(graphs.couplings.independent),
        "graphs.couplings.antithetic": coupled(graphs.couplings.antithetic),
        "graphs.couplings.ensemble": coupled(graphs.couplings.ensemble),
        "graphs.couplings.sigma": lambda x: graphs.couplings.sigma(np.array([2, 0, 1]))(
            key(), 5, 0.3
        ),
        "graphs.couplings.get": lambda x: graphs.couplings.get("antithetic")(key(), 4, 0.5),
        "graphs.couplings.lengths": lambda x: graphs.couplings.lengths(
            key(), "ensemble", 3, 4, 0.3
        ),
        "graphs.couplings.require_probability": lambda x: graphs.couplings.require_probability(0.5),
    },
)
rows(
    "wide",
    {
        **{
            f"graphs.kernels.{name}": series(name)
            for name in ("RegularisedLaplacian", "Diffusion", "RandomWalk", "InverseCosine")
        },
        "graphs.kernels.Matern": series("Matern"),
        "graphs.kernels.Resolvent": series("Resolvent"),
        "graphs.kernels.FromSeries": lambda x: halves()(6),
    },
    host=True,
)
rows(
    "wide",
    {
        **{
            f"graphs.kernels.Kernel.dense[{name}]": dense(name)
            for name in ("RegularisedLaplacian", "Diffusion", "RandomWalk", "InverseCosine")
        },
        "graphs.kernels.Kernel.dense[Matern]": dense("Matern"),
        "graphs.kernels.Kernel.dense[FromSeries]": lambda x: halves().dense(graph()),
        "graphs.kernels.Resolvent.dense": dense("Resolvent", 0.1),
        "graphs.kernels.spectral_radius": lambda x: graphs.kernels.spectral_radius(graph()),
        "graphs.kernels.require_convergence": lambda x: graphs.kernels.require_convergence(
            graph(0.1), graphs.kernels.Resolvent()
        ),
        "graphs.graph.Graph.from_edges": lambda x: graph(),
        "graphs.graph.Graph.from_scipy": lambda x: Graph.from_scipy(scipy.sparse.eye_array(3)),
        "graphs.graph.Graph.from_networkx": lambda x: Graph.from_networkx(networkx.path_graph(3)),
        "graphs.graph.Graph.num_nodes": lambda x: graph().num_nodes,
        "graphs.graph.Graph.degrees": lambda x: graph().degrees,
        "graphs.graph.Graph.normalised": lambda x: graph().normalised(),
        "graphs.graph.Graph.to_scipy": lambda x: graph().to_scipy().data,
        "graphs.graph.Graph.to_dense": lambda x: graph().to_dense(),
        "graphs.graph.Graph[@]": lambda x: graph() @ vectors(5, 2),
        "graphs.graph.require_nonnegative": lambda x: graphs.graph.require_nonnegative(
            graph(), "this"
        ),
        "graphs.walks.sample": lambda x: graphs.walks.sample(
            key(), graph(), np.full((5, 2), 3), p_halt=0.5, steps="weighted"
        ),
        "graphs.reinforced.sample": lambda x: graphs.reinforced.sample(
            key(), graph(), np.full((5, 2), 3), p_halt=0.5
        ),
        "graphs.features.sample": lambda x: walked(),
        "graphs.features.modulate": lambda x: graphs.features.modulate(
            walked(), graphs.kernels.Diffusion()
        ),
        "graphs.features.graph_random_features": lambda x: estimate(),
        "graphs.features.Features.to_scipy": lambda x: estimate().left.to_scipy().todense(),
        "graphs.features.Estimate.shape": lambda x: estimate().shape,
        "graphs.pagerank.pagerank": lambda x: graphs.pagerank.pagerank(key(), graph(), **WALKS),
        "graphs.pagerank.power_iteration": lambda x: graphs.pagerank.power_iteration(
            graph(), p_halt=0.5, tolerance=1e-3
        ),
    },
    host=True,
)


rows(
    "wide",
    {
        "graphs.features.Features.transposed": lambda x: estimate().left.transposed(vectors(5)),
        "graphs.features.Features.to_dense": lambda x: estimate().left.to_dense(),
        "graphs.features.Estimate[@]": lambda x: estimate() @ vectors(5, 2),
        "graphs.features.Estimate.gram": lambda x: estimate().gram(),
        "graphs.gp.condition": lambda x: graphs.gp.condition(
            estimate(False), observed(), jnp.array([1, 4]), vectors(3), 0.5
        ),
        "graphs.gp.condition[dense]": lambda x: graphs.gp.condition(
            estimate(False).gram(), observed(), jnp.array([1, 4]), vectors(3), 0.5
        ),
        "graphs.gp.solve": lambda x: graphs.gp.solve(lambda v: 2 * v, vectors(3, 2)),
        "graphs.gp.fit": lambda x: graphs.gp.fit(
            key(), walked(), observed(), vectors(3), START, num_steps=2, optimizer=SGD
        ),
        "graphs.tasks.diffuse": lambda x: graphs.tasks.diffuse(estimate(False), vectors(5), 2),
        "graphs.tasks.regress": lambda x: graphs.tasks.regress(
            1 + estimate().gram(), vectors(5, 2), jnp.arange(5) < 3
        ),
        "graphs.tasks.kernel_kmeans": lambda x: (
            graphs.tasks.kernel_kmeans(
                key(), estimate().gram(), num_clusters=2, num_starts=2, num_steps=2
            ).objective
        ),
    },
)


def responses(order: int = 3) -> np.ndarray:
    return graphs.matching.spectral_responses(graph(), graphs.kernels.Diffusion(), 0.5, order)


def joined() -> Graph:
    return Graph.from_edges([(0, 1), (1, 2), (2, 0)], num_nodes=3)


def edges() -> np.ndarray:
    return graphs.matching.spectral_edges(responses())


rows(
    "numpy",
    {
        "graphs.matching.learn": lambda x: graphs.matching.learn(
            graph(), graphs.kernels.Diffusion(), p_halt=0.5, order=3
        ),
        "graphs.matching.series": lambda x: graphs.matching.series(
            graphs.kernels.Diffusion(), 0.5, 3
        ),
        "graphs.matching.spectral_responses": lambda x: responses(),
        "graphs.matching.node_responses": lambda x: graphs.matching.node_responses(
            graph(), graphs.kernels.Diffusion(), 0.5, 3, 1
        ),
        "graphs.matching.linear_costs": lambda x: graphs.matching.linear_costs(responses()),
        "graphs.matching.pair_costs": lambda x: graphs.matching.pair_costs(
            responses(), responses()
        ),
        "graphs.matching.assign": lambda x: graphs.matching.assign(np.eye(3)),
        "graphs.matching.spectral_edges": lambda x: edges(),
        "graphs.matching.node_edges": lambda x: graphs.matching.node_edges(responses()),
        "graphs.matching.reduced": lambda x: graphs.matching.reduced(
            np.random.default_rng(0), edges(), size=2
        ),
        "graphs.matching.objective": lambda x: graphs.matching.objective(
            np.arange(3), edges(), edges()
        ),
        "graphs.matching.enumerate_all": lambda x: graphs.matching.enumerate_all(edges(), edges()),
        "graphs.matching.project": lambda x: graphs.matching.project(
            np.random.default_rng(0), edges(), 2
        ),
        "graphs.theory.survival": lambda x: graphs.theory.survival(0.3, 0.5),
        "graphs.theory.expected_error": lambda x: graphs.theory.expected_error(
            joined(), graphs.kernels.Diffusion(), num_walks=2, p_halt=0.5
        ),
        "graphs.theory.recommend": lambda x: (
            graphs.theory.recommend(joined(), graphs.kernels.Diffusion(), 0.5).error
        ),
        "graphs.theory.pagerank_variance": lambda x: graphs.theory.pagerank_variance(
            joined(), num_walks=2, p_halt=0.5
        ),
        "graphs.pagerank.learn": lambda x: graphs.pagerank.learn(graph(), p_halt=0.5, order=3),
        "graphs.tasks.clustering_error": lambda x: graphs.tasks.clustering_error(
            np.array([0, 0, 1]), np.array([0, 1, 1])
        ),
    },
    host=True,
)
