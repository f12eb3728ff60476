"""Shared by the experiments on tabular regression data: splits, hyperparameters, couplings.

The settings are those of the authors' code (https://github.com/cambridge-mlg/learnable-qmc): 20
folds of the first 1024 rows, at most 512 training points of each (the paper's App. B.1 prints 256),
inputs and targets standardised by the training part. For Fourier features the three scales maximise
the marginal likelihood of the training points. For Laplace features the lengthscale is twice the
mean of |x_i - x_j| (VRC Eq. 36 prints |x_i + x_j|), and the other two are fitted. The optimiser is
L-BFGS, from lengthscale sqrt(d), output scale 1 and noise 0.1; theirs is Adam at 1e-2 for 2000
steps. Halton points are plain, shifted modulo 1 by one uniform vector and rotated in each draw.
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

from experiments.common import harness, tabular
from performer import couplings, directions, features, gp, kernels
from performer.typing import Coupling, Frequencies, Key

PRINTED = Path(__file__).parent / "vrc_tables.csv"


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
    shift_key, rotation_key = jax.random.split(key)
    points = couplings.Halton(scramble=False)(shift_key, m, d)
    return jnp.matmul(points, directions.haar(rotation_key, d, d), precision="highest")


COUPLINGS: dict[str, str | Coupling] = {
    "iid": "iid",
    "halton": halton,
    "orthogonal": "orf",
    "+ pnc": "pnc",
}
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
    data_sets: Sequence[str], data_dir: Path | None, splits: int, points: int
) -> Iterator[tuple[str, tabular.Split]]:
    """Yield the folds of these data sets, or of all; all are read before any work."""
    names = tabular.names(data_sets, "regression", data_dir)
    loaded = [tabular.load(name, "regression", data_dir) for name in names]
    for table in loaded:
        yield table.name, tabular.folds(table, splits, points)


def hyperparameters(name: str, scheme: Scheme, splits: tabular.Split) -> gp.Scales:
    """Fit the three scales of each split, (s,) each.

    Raises:
        ValueError: naming the data set, when a fit left the finite numbers.
    """

    @jax.jit
    @jax.value_and_grad
    def loss(logs, x, y):
        lengthscale, output_scale, noise_scale = jnp.exp(logs)
        gram = kernels.gaussian(x, x, lengthscale=lengthscale, output_scale=output_scale)
        return -gp.log_marginal_likelihood(gram, y, noise_scale) / len(y)

    fitted = []
    for x, y in zip(splits.train_x, splits.train_y, strict=True):
        length, bounds = x.shape[-1] ** 0.5, [(None, None)] * 3
        if scheme.name == "Laplace":
            length = performer_lengthscale(x)
            bounds[0] = (np.log(length), np.log(length))
        start = np.log([length, 1.0, 0.1])
        with jax.enable_x64(True):
            data = jnp.asarray(x, float), jnp.asarray(y, float)
            found = minimize(loss, start, data, "L-BFGS-B", jac=True, bounds=bounds)
        fitted.append(np.exp(found.x) + 0 * found.fun)  # a loss that is not finite must show
    scales = np.stack(fitted, axis=1)
    if not np.isfinite(scales).all():
        raise ValueError(
            f"the scales of the Gaussian process of {name!r} ({scheme.name} features) are not"
            " finite: drop columns with few, extreme values, and duplicated rows with different"
            " targets"
        )
    return gp.Scales(*scales)


def performer_lengthscale(x: np.ndarray) -> float:
    """Return 2 / n^2 sum_ij |x_i - x_j|, for x (n, d)."""
    return 2 * float(cdist(x, x).mean())


def split_keys(count: int, draws: int) -> Key:
    """Return (s, draws) keys; couplings of one split share them, so that differences are paired."""
    return jax.random.split(jax.random.key(0), (count, draws))


def printed(quantity: str, features: str, coupling: str, name: str) -> str:
    """Return "value ± error" of the paper's Tables 1, 3 and 4 (`vrc_tables.csv`), or "".

    The errors of Table 1 are standard errors, those of Tables 3 and 4 twice that.

    Args:
        quantity: "kernel ratio, m = d" (Table 1), "KL", "RMSE" or "NLL", m = d (Table 3) or 8d, or
            "kernel RMSE, m = 8d" (Table 4).
        features: Fourier or Laplace.
        coupling: iid, halton, orthogonal or + pnc (for Laplace + pnc + antithetic).
        name: name of the data set.
    """
    table = harness.printed(PRINTED, "quantity", "features", "coupling")
    cell = table.get((quantity, features, coupling), {}).get(name) or ""
    value, mark, error = cell.partition(" ± ")
    return f"{float(value):g} ± {float(error):g}" if mark else ""
