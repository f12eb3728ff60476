"""Shared by the experiments on tabular regression data: splits, hyperparameters, couplings.

The settings are those of the authors' code (https://github.com/cambridge-mlg/learnable-qmc) at
commits f2e6f2f (Fourier) and 8f05728 (Laplace), from which the paper's tables come; its last commit
has twice the points. There are 20 folds of the first 512 rows, in the order of that code, with 25
test points and the first 256 of the others for training. All of the others standardise inputs and
targets. The three scales maximise the marginal likelihood of the training points. Only for Laplace
features at m = d is the lengthscale fixed, at twice the mean of |x_i - x_j| (VRC Eq. 36 prints
|x_i + x_j|). The optimiser is L-BFGS, from lengthscale sqrt(d), output scale 1 and noise 0.1;
theirs is Adam at 1e-2 for 5000 steps, which ends at the same optimum. Halton and Sobol points are
plain, shifted modulo 1 by one uniform vector and rotated in each draw.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import minimize
from scipy.spatial.distance import cdist
from scipy.stats import qmc

from experiments.tabular import sets
from performer import directions, features, gp, kernels
from performer.typing import Coupling, Frequencies, Key
from vit.study import harness

PRINTED = Path(__file__).parent / "vrc_tables.csv"
SCRAMBLE = (0x3EC8F720, 0x02461E29)
"""Key with which TensorFlow scrambles the seed of a stateless draw."""


class Scheme(NamedTuple):
    """A kind of features and the couplings to compare."""

    name: str
    kernel: kernels.Kernel
    per_dimension: int
    """Frequencies for each dimension: m = k d with k = 1 (Fourier) and 2 (Laplace)."""
    couplings: dict[str, str | Coupling]
    """The paper's word, and the coupling."""


def halton(key: Key, m: int, d: int) -> Frequencies:
    """Halton points, shifted modulo 1 and rotated at random, as in the authors' code."""
    return shifted(key, qmc.Halton(d, scramble=False).random(m))


def sobol(key: Key, m: int, d: int) -> Frequencies:
    """Sobol points, shifted modulo 1 and rotated at random."""
    return shifted(key, qmc.Sobol(d, scramble=False).random_base2(m.bit_length())[:m])


def shifted(key: Key, points: np.ndarray) -> Frequencies:
    """Return points (m, d) shifted modulo 1, through the normal quantile, and rotated."""
    shift_key, rotation_key = jax.random.split(key)
    d = points.shape[1]
    uniform = (jnp.asarray(points) + jax.random.uniform(shift_key, (1, d))) % 1
    normal = jax.scipy.special.ndtri(jnp.clip(uniform, 2.0**-25, 1 - 2.0**-24))
    return jnp.matmul(normal, directions.haar(rotation_key, d, d), precision="highest")


COUPLINGS: dict[str, str | Coupling] = {
    "iid": "iid",
    "halton": halton,
    "sobol": sobol,
    "orthogonal": "orf",
    "+ pnc": "pnc",
}
PAPER = ("iid", "halton", "sobol", "orthogonal", "+ pnc")
"""Couplings of the paper's tables; Sobol points are in those of its earlier version alone."""
ANTITHETIC = {"orthogonal": "orf-antithetic", "+ pnc": "pnc-antithetic"}
POSITIVE = partial(features.positive, kernel="gaussian")
SCHEMES = (
    Scheme("Fourier", kernels.gaussian, 1, COUPLINGS),
    Scheme("Laplace", replace(kernels.gaussian, feature_map=POSITIVE), 2, COUPLINGS | ANTITHETIC),
)
"""VRC Table 1. With Laplace features "orthogonal" means d orthogonal vectors and their negatives,
as App. B.1 says: the paper's figures are not those of two orthogonal blocks.
Its "+ PNC + antithetic" is "+ pnc" here, since the row before it is antithetic already."""


def tables(
    data_sets: Sequence[str], data_dir: Path | None, splits: int, points: int, permutation: int = 0
) -> Iterator[tuple[str, sets.Split]]:
    """Yield the folds of these data sets, or of all; all are read before any work."""
    names = sets.names(data_sets, "regression", data_dir)
    loaded = [sets.load(name, "regression", data_dir) for name in names]
    for table in loaded:
        order = row_order(min(len(table.x), 2 * points), permutation)
        yield table.name, sets.folds(table, splits, points, order)


def row_order(count: int, permutation: int = 0) -> np.ndarray:
    """Return an order of the first `count` rows; permutation 0 is that of the authors' code.

    It is the argsort of TensorFlow's stateless uniform numbers, whose seed is the first of two that
    are split from (0, 0).
    """
    if permutation:
        return np.random.default_rng(permutation).permutation(count)
    words = stateless_bits((0, 0), 2)
    seed = [word - 2**32 if word >= 2**31 else word for word in words]  # int32
    mantissas = np.array(stateless_bits(seed, count)) & (2**23 - 1)
    return np.argsort(mantissas, kind="stable")


def stateless_bits(seed: Sequence[int], count: int) -> list[int]:
    """Return `count` 32-bit words of TensorFlow's stateless generator, Philox 4x32-10."""
    counter = [word for part in seed for word in (part % 2**32, (part >> 32) % 2**32)]
    *key, c, d = philox(counter, SCRAMBLE)
    blocks = [philox((i, 0, c, d), key) for i in range(-(-count // 4))]
    return [word for block in blocks for word in block][:count]


def philox(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    """Return the four 32-bit words of a counter and a key (Salmon et al. 2011, ten rounds)."""
    (a, b, c, d), (first, second) = counter, key
    for _ in range(10):
        p, q = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (q >> 32) ^ b ^ first, q % 2**32, (p >> 32) ^ d ^ second, p % 2**32
        first, second = (first + 0x9E3779B9) % 2**32, (second + 0xBB67AE85) % 2**32
    return a, b, c, d


def fixes_lengthscale(scheme: Scheme, multiple: int) -> bool:
    """Return whether the lengthscale is fixed: only for Laplace features at m = d."""
    return scheme.name == "Laplace" and multiple == 1


@jax.jit
@jax.value_and_grad
def _loss(logs, x, y):
    lengthscale, output_scale, noise_scale = jnp.exp(logs)
    gram = kernels.gaussian(x, x, lengthscale=lengthscale, output_scale=output_scale)
    return -gp.log_marginal_likelihood(gram, y, noise_scale) / len(y)


def hyperparameters(name: str, splits: sets.Split, fixed_lengthscale: bool) -> gp.Scales:
    """Fit the scales of each split, (s,) each.

    Raises:
        ValueError: naming the data set, when a fit left the finite numbers.
    """
    fitted = []
    for x, y in zip(splits.train_x, splits.train_y, strict=True):
        length, bounds = x.shape[-1] ** 0.5, [(None, None)] * 3
        if fixed_lengthscale:
            length = performer_lengthscale(x)
            bounds[0] = (np.log(length), np.log(length))
        start = np.log([length, 1.0, 0.1])
        with jax.enable_x64(True):
            data = jnp.asarray(x, float), jnp.asarray(y, float)
            optimum = minimize(_loss, start, data, "L-BFGS-B", jac=True, bounds=bounds)
        fitted.append(np.exp(optimum.x) + 0 * optimum.fun)  # a loss that is not finite must show
    scales = np.stack(fitted, axis=1)
    if not np.isfinite(scales).all():
        raise ValueError(
            f"the scales of the Gaussian process of {name!r} are not finite: drop columns with few,"
            " extreme values, and duplicated rows with different targets"
        )
    return gp.Scales(*scales)


def performer_lengthscale(x: np.ndarray) -> float:
    """Return 2 / n^2 sum_ij |x_i - x_j|, for x (n, d)."""
    return 2 * float(cdist(x, x).mean())


def split_keys(count: int, draws: int) -> Key:
    """Return (s, draws) keys; couplings of one split share them, so that differences are paired."""
    return jax.random.split(jax.random.key(0), (count, draws))


def printed(quantity: str, features: str, coupling: str, name: str) -> tuple[float, float] | None:
    """Return value and standard error in the paper's Tables 1, 3 and 4 (`vrc_tables.csv`), or None.

    The printed errors are one standard error in Tables 1 and 3 and two in Table 4 (m = 8d). The
    caption of Table 3 states two.

    Args:
        quantity: "kernel ratio, m = d" (Table 1), "KL", "RMSE", "RMSE ratio" or "NLL", m = d (Table
            3) or 8d, or "kernel RMSE, m = 8d" (Table 4).
        features: Fourier or Laplace.
        coupling: iid, halton, orthogonal or + pnc (for Laplace + pnc + antithetic).
        name: name of the data set.
    """
    table = harness.printed(PRINTED, "quantity", "features", "coupling")
    cell = table.get((quantity, features, coupling), {}).get(name) or ""
    value, mark, error = cell.partition(" ± ")
    return (float(value), float(error) / (2 if "8d" in quantity else 1)) if mark else None
