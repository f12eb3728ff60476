"""Quadrature features: stochastic spherical-radial rules of degree three.

A rule replaces E f(w), w ~ N(0, I_d), by

    Rule(f) = constant f(0) + sum_j weights_j f(points_j)

and so estimates every kernel E f(w) with f(w) = phi(w.x) phi(w.y). One spherical-radial rule has
the d + 1 vertices v_j of a regular simplex, turned by a random orthogonal Q, at random lengths
rho_j ~ chi_{d+2}. With reflected points it is (Quad, after Eq. 6)

    (1 - sum_j d / ((d+1) rho_j^2)) f(0)
        + d / (d+1) sum_j (f(rho_j Q v_j) + f(-rho_j Q v_j)) / (2 rho_j^2)

exact for polynomials of degree three for all Q and rho, and unbiased for all f (Prop. 2.1). Even f
(the Gaussian kernel) need no reflected points (Eq. 7). Several rules are averaged (Eq. 6).

The constant is one minus the sum of the weights: of either sign, with mean zero. Corrections:

    Quad Sec. 8              Lengths are drawn again until the constant is not negative, for its
                             square root in the features. That is biased (`reject=True` replicates
                             it); here one side of the product has the sign (`feature_maps`).
    Quad, explicit mapping   a_j = sqrt(d / (2 (d+1))) / rho_j is with reflected points; without
                             them it is sqrt(d / (d+1)) / rho_j.
    Quad Prop. 2.1           Sec. 10 drops a factor rho^2 from A_i and B_i, and the bound fails: for
                             the Gaussian kernel at d = 16, x = -y, |x| = 1/2 it is 3.9e-4, the
                             variance 8.9e-4. The terms A_i of degree two add up to a constant, and
                             the B_i leave 140/3 M_1^2 l^8 d / (n (d + 6)). Prop. 2.2 holds.
    Quad Sec. 3              Butterfly matrices are not Haar distributed (`structured`), and rules
                             with them only nearly unbiased: "haar" is the reference.

Without the constant a rule is still unbiased, since d / rho^2 is the density of chi_d over that of
chi_{d+2}: importance sampling with positive weights. Attention uses it, with reflected points:

    performer_attention(query, key, value, rule.points, weights=rule.weights)

(With reflected points, estimates of exp(q.k) with the constant are also positive: cosh >= 1 and the
weights add up to one. `experiments.kernels.quadrature` finds no lower error with the constant.)

Source: Munkhoeva et al. 2018 (Quad), Sec. 2 to 4, after Genz and Monahan 1998. Its D is the number
of features, n our num_rules, V the matrix of `multiply_vertices`.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Num
from scipy.special import roots_hermitenorm

from performer import couplings, directions, kernels, norms
from performer.choices import positive_integer, unknown
from performer.kernels import Kernel
from performer.structured import Butterfly, random_butterfly
from performer.typing import Key

Matrices = Literal["haar", "butterfly"]
_GRID = 8  # nodes in each dimension of the Gauss-Hermite grid: exact to degree 15


class Rule(NamedTuple):
    """constant f(0) + sum_j weights_j f(points_j)."""

    points: Float[Array, "n d"]
    weights: Float[Array, " n"]
    """Positive."""
    constant: Float[Array, ""]
    """The weight of f(0), of either sign; 0 for plain random features."""


@partial(jax.jit, static_argnames=("num_rules", "d", "orthogonal", "reflect", "reject"))
def spherical_radial(
    key: Key,
    num_rules: int,
    d: int,
    *,
    orthogonal: Matrices = "haar",
    reflect: bool = True,
    reject: bool = False,
) -> Rule:
    """Draw the average of `num_rules` spherical-radial rules of degree three.

    Args:
        key: random key.
        num_rules: number of rules; each has d + 1 points, 2 (d + 1) with reflected ones.
        d: dimension of the points.
        orthogonal: law of Q: "haar", or "butterfly" (`structured.random_butterfly`), for which
            `structured` has products in O(d log d).
        reflect: include both w and -w; False only for even integrands, as the Gaussian kernel's.
        reject: draw lengths again until the constant is not negative, as in the paper. Biased.

    Returns:
        The rule, float32. For d <= 2 its weights have infinite variance, but not its estimates of
        smooth integrands.

    Raises:
        ValueError: for a number that is not a positive integer, or unknown matrices.

    Example:
        >>> rule = quadrature.spherical_radial(key, 4, d, reflect=False)
        >>> gram = quadrature.gram(x, x, rule, "gaussian", lengthscale=2.0)
    """
    if orthogonal not in ("haar", "butterfly"):
        raise ValueError(unknown("orthogonal matrices", orthogonal, ("haar", "butterfly")))
    num_rules, d = positive_integer("num_rules", num_rules), positive_integer("d", d)
    if orthogonal == "butterfly":
        return structured(key, num_rules, d, reflect=reflect, reject=reject).dense()

    def one(rule_key: Key) -> tuple[Array, Array]:  # (v, d), (v,)
        matrix_key, lengths_key = jax.random.split(rule_key)
        lengths = _lengths(lengths_key, d, reject)
        turned = multiply_vertices(directions.haar(matrix_key, d, d).T).T
        return lengths[:, None] * turned, lengths

    points, lengths = jax.vmap(one)(jax.random.split(key, num_rules))
    points, weights = points.reshape(-1, d), _weights(lengths, reflect)
    points = jnp.concatenate([points, -points]) if reflect else points
    return Rule(points, weights, 1 - weights.sum())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StructuredRule:
    """Rules with butterfly matrices as an operator of O(n d) numbers. A pytree."""

    matrices: Butterfly
    """Matrices of all rules, along a leading axis."""
    lengths: Float[Array, "n v"]
    reflect: bool = dataclasses.field(metadata=dict(static=True))

    @property
    def weights(self) -> Float[Array, " p"]:
        """Weights of the points."""
        return _weights(self.lengths, self.reflect)

    @property
    def constant(self) -> Float[Array, ""]:
        """Weight of f(0)."""
        return 1 - self.weights.sum()

    def dense(self) -> Rule:
        """Return the same rule with its points as a matrix."""
        eye = jnp.eye(self.lengths.shape[-1] - 1, dtype=jnp.float32)
        return Rule(self.apply(eye).T, self.weights, self.constant)

    @jax.jit
    def apply(self, x: Float[Array, "*b d"]) -> Float[Array, "*b p"]:
        """Return points @ x along the last axis, (..., d) -> (..., p), O(d log d) for each rule.

        The result is float64 for a float64 x, else float32.

        Raises:
            ValueError: if x is not d wide.
        """

        def one(matrix: Butterfly, lengths: Array) -> Float[Array, "*b v"]:
            rows = multiply_vertices(matrix.apply_transpose(x))
            return jnp.broadcast_to(lengths.astype(rows.dtype), rows.shape) * rows

        rows = jax.vmap(one, out_axes=-2)(self.matrices, self.lengths)
        rows = rows.reshape(*x.shape[:-1], self.lengths.size)
        return jnp.concatenate([rows, -rows], axis=-1) if self.reflect else rows


@partial(jax.jit, static_argnames=("num_rules", "d", "reflect", "reject"))
def structured(
    key: Key, num_rules: int, d: int, *, reflect: bool = True, reject: bool = False
) -> StructuredRule:
    """Draw `spherical_radial` with butterfly matrices as an operator; equal for equal keys."""
    num_rules, d = positive_integer("num_rules", num_rules), positive_integer("d", d)

    def one(rule_key: Key) -> tuple[Butterfly, Array]:
        matrix_key, lengths_key = jax.random.split(rule_key)
        return random_butterfly(matrix_key, d), _lengths(lengths_key, d, reject)

    return StructuredRule(*jax.vmap(one)(jax.random.split(key, num_rules)), reflect)


def gauss_hermite(key: Key, m: int, d: int) -> Float[Array, "m d"]:
    """Draw m points of the dense Gauss-Hermite grid by its weights (Dao et al. 2017): method GQ.

    The coordinates are independent draws of the eight nodes of one dimension. Unbiased only for
    polynomials of degree up to 15 in each coordinate.
    """
    nodes, weights = roots_hermitenorm(_GRID)
    nodes, chances = (jnp.asarray(x, jnp.float32) for x in (nodes, weights / weights.sum()))
    return jax.random.choice(key, nodes, (m, d), p=chances)


def plain(points: Callable[[Key, int, int], Float[Array, "m d"]]) -> Callable[..., Rule]:
    """Return rule(key, num_rules, d, reflect=), the mean over as many points as these rules have.

    Args:
        points: (key, m, d) -> (m, d), as a coupling. None of the points is reflected.
    """

    def rule(key: Key, num_rules: int, d: int, *, reflect: bool) -> Rule:
        m = (1 + reflect) * num_rules * (d + 1)
        drawn = points(key, m, d)
        return Rule(drawn, jnp.full(m, 1 / m, drawn.dtype), jnp.zeros((), drawn.dtype))

    return rule


METHODS: dict[str, Callable[..., Rule]] = {
    "G": plain(couplings.get("iid")),
    "Gort": plain(couplings.get("orf")),
    "ROM": plain(couplings.get("hadamard*fixed")),
    "QMC": plain(couplings.get("halton")),
    "GQ": plain(gauss_hermite),
    "H": spherical_radial,
    "B": partial(spherical_radial, orthogonal="butterfly"),
}
"""Methods of Quad Sec. 5.1, (key, num_rules, d, reflect=) -> Rule, all of n (d + 1) points, twice
as many if reflected: "H" and "B" spherical-radial rules with Haar and butterfly matrices, "G"
independent, "Gort" orthogonal, "ROM" S-Rademacher with three blocks (of length sqrt(d): biased),
"QMC" Halton, "GQ" Gauss-Hermite."""


def feature_maps(
    x: Num[ArrayLike, "*b d"],
    rule: Rule,
    kernel: str | Kernel = "gaussian",
    *,
    lengthscale: ArrayLike = 1.0,
    output_scale: ArrayLike = 1.0,
) -> tuple[Float[Array, "*b p"], Float[Array, "*b p"]]:
    """Return two feature maps whose products estimate the kernel: left(x) . right(y).

    They differ only in the sign of the first column, sqrt(|constant| f(0)): the right one has the
    sign of the constant. For a linear model with an intercept either map suffices.

    Args:
        x: points (..., d).
        rule: of `spherical_radial` or `METHODS`; reflected unless the kernel's f is even.
        kernel: a name in `kernels.KERNELS` or a `Kernel`, with frequencies N(0, I) and f(0).
        lengthscale: as in `features`.
        output_scale: as in `features`.

    Raises:
        ValueError: for an unknown or unsupported kernel, and as the feature map.
    """
    kernel = kernels.get(kernel)
    if kernel.at_zero is None or kernel.quantile != norms.chi:
        raise ValueError(
            f"rules are for kernels with `at_zero`, of frequencies N(0, I), not {kernel}: use"
            " kernels.random_features, or rule.points and rule.weights in a feature map"
        )
    scales = dict(lengthscale=lengthscale, output_scale=output_scale)
    phi = kernel.feature_map(x, rule.points, weights=rule.weights, **scales)
    constant = rule.constant.astype(phi.dtype)
    first = jnp.sqrt(jnp.abs(constant) * kernel.at_zero)
    first = jnp.broadcast_to(first * jnp.asarray(output_scale, phi.dtype), (*phi.shape[:-1], 1))
    left = jnp.concatenate([first, phi], axis=-1)
    return left, jnp.concatenate([jnp.sign(constant) * first, phi], axis=-1)


def gram(
    x: Num[ArrayLike, "n d"],
    y: Num[ArrayLike, "k d"],
    rule: Rule,
    kernel: str | Kernel = "gaussian",
    *,
    lengthscale: ArrayLike = 1.0,
    output_scale: ArrayLike = 1.0,
) -> Float[Array, "n k"]:
    """Estimate the kernel of all pairs, with the constant; arguments as in `feature_maps`."""
    scales = dict(lengthscale=lengthscale, output_scale=output_scale)
    left, _ = feature_maps(x, rule, kernel, **scales)
    _, right = feature_maps(y, rule, kernel, **scales)
    return jnp.matmul(left, right.T, precision="highest")


def multiply_vertices(x: Float[Array, "*b d"]) -> Float[Array, "*b v"]:
    """Return V x along the last axis in O(d), by cumulative sums: (..., d) -> (..., d + 1).

    The rows of V are the vertices of a regular simplex on the unit sphere, v_i . v_j = -1 / d;
    v_j has -a_i at i < j and b_j at j, a_i^2 = (d+1) / (d (d-i+2) (d-i+1)) and b_j = (d-j+1) a_j.
    """
    d = x.shape[-1]
    i = np.arange(1, d + 1)
    a = np.sqrt((d + 1) / (d * (d - i + 2) * (d - i + 1)))
    below, at = (jnp.broadcast_to(y.astype(x.dtype), x.shape) for y in (a, (d - i + 1) * a))
    before, diagonal = jnp.cumsum(x * below, axis=-1), x * at
    zero = jnp.zeros_like(before[..., :1])
    return jnp.concatenate([diagonal, zero], axis=-1) - jnp.concatenate([zero, before], axis=-1)


def _lengths(key: Key, d: int, reject: bool) -> Float[Array, " v"]:
    """Draw d + 1 lengths chi_{d+2}; with `reject` until the constant is not negative."""
    if not reject:
        return norms.independent(key, d + 1, d + 2)

    def again(carry: tuple[Key, Array]) -> tuple[Key, Array]:
        next_key, draw_key = jax.random.split(carry[0])
        return next_key, norms.independent(draw_key, d + 1, d + 2)

    def negative(carry: tuple[Key, Array]) -> Array:
        return _weights(carry[1][None], reflect=False).sum() > 1

    return jax.lax.while_loop(negative, again, again((key, jnp.zeros(d + 1, jnp.float32))))[1]


def _weights(lengths: Float[Array, "n v"], reflect: bool) -> Float[Array, " p"]:
    """Return d / ((d + 1) rho^2) averaged over the rules, shared by points and reflected points."""
    n, v = lengths.shape
    weights = ((v - 1) / (v * n) / lengths**2).reshape(-1)
    return jnp.tile(weights / 2, 2) if reflect else weights
