"""What the experiments on coupled walks say of their couplings."""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import scipy.sparse

from experiments.common import statistics

COUPLINGS = ("independent", "antithetic", "sigma")

Errors = dict[str, np.ndarray]
"""(repeats,) of each coupling, or of each graph."""


def columns(errors: Errors) -> dict[str, str]:
    """Mean errors, and their ratios to the first."""
    first, *others = errors
    ratios = {name: statistics.ratio(errors[name], errors[first]) for name in others}
    row = {name: statistics.estimate(values) for name, values in errors.items()}
    return row | {f"{name} / {first}": statistics.plus_minus(*x) for name, x in ratios.items()}


def verdict(cases: Mapping[str, Errors], names: Sequence[str] = COUPLINGS) -> str:
    """Each coupling against each of those before it; `cases` has the errors of all."""
    return "\n".join(
        "- "
        + statistics.verdict(name, other, {k: (x[name], x[other]) for k, x in cases.items()})
        + "."
        for name, other in itertools.combinations(reversed(names), 2)
    )


def frobenius_errors(phi: scipy.sparse.csr_array, exact: np.ndarray) -> np.ndarray:
    """|K - Phi Phi^T|_F / |K|_F for each block of a block-diagonal Phi, (blocks,)."""
    n, square, double = len(exact), np.sum(exact**2), scipy.sparse.csr_array(phi, dtype=np.float64)
    gram = scipy.sparse.coo_array(double @ double.T)
    row, column = gram.coords
    changes = gram.data * (gram.data - 2 * exact[row % n, column % n])
    squares = square + np.bincount(row // n, changes)  # no row is empty
    return np.sqrt(np.maximum(squares, 0) / square)
