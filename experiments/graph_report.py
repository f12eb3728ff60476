"""What the experiments on coupled walks say of their couplings: tables, tests, panels."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse

from experiments import statistics
from vit import report

COUPLINGS = ("independent", "antithetic", "sigma")

Errors = dict[str, np.ndarray]
"""(repeats,) of each coupling, or of each graph."""


def columns(errors: Errors) -> dict[str, str]:
    """Mean errors, and their ratios to the first."""
    names, (first, *others) = list(errors), errors.values()
    row = {
        name: text(*statistics.mean_and_error(values.tolist())) for name, values in errors.items()
    }
    ratios = (text(*statistics.ratio(values, first)) for values in others)
    return row | {
        f"{name} / {names[0]}": values for name, values in zip(names[1:], ratios, strict=True)
    }


def text(mean: float, error: float) -> str:
    """Both with as many decimals as the error needs."""
    digits = 2 - int(np.floor(np.log10(error))) - 1 if error > 0 else 4
    return f"{mean:.{max(digits, 0)}f} ± {error:.{max(digits, 0)}f}"


def verdict(cases: dict[str, Errors]) -> str:
    """How often each coupling differs from the others; `cases` has those of each."""
    lines = []
    for name, other in itertools.combinations(reversed(COUPLINGS), 2):
        tests = [
            statistics.paired(errors[name].tolist(), errors[other].tolist())
            for errors in cases.values()
        ]
        p = np.asarray(statistics.holm([test.p_value for test in tests]))
        z = {
            label: test.mean / max(test.standard_error, 1e-300)
            for label, test in zip(cases, tests, strict=True)
        }
        highest = max(z, key=lambda label: z[label])
        below, above = (np.sum((p < 0.05) & (s * np.array([*z.values()]) > 0)) for s in (-1, 1))
        lines.append(
            f"- {name} below {other} in {below} and above in {above} of {len(z)} cases (paired"
            f" t-tests, Holm, 5%); highest in {highest}, z = {z[highest]:.1f}"
        )
    return "\n".join(lines)


def band(axis: Any, x: Sequence[float], values: Any, label: str) -> None:
    """A line of means with a band of standard errors."""
    means, errors = np.asarray(values).T
    axis.plot(x, means, marker="o", markersize=3, label=label)
    axis.fill_between(x, means - errors, means + errors, alpha=0.2)


def panels(out: Path, count: int, columns: int = 5) -> tuple[Any, Any]:
    """A figure with so many axes, by rows."""
    out.parent.mkdir(parents=True, exist_ok=True)
    columns = min(count, columns)
    rows = -(-count // columns)
    drawn, axes = report.subplots(
        rows, columns, figsize=(4 * columns, 3.4 * rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[count:]:
        axis.set_axis_off()
    return drawn, axes.flat[:count]


def frobenius_errors(phi: scipy.sparse.csr_array, exact: np.ndarray) -> np.ndarray:
    """|K - Phi Phi^T|_F / |K|_F for each block of a block-diagonal Phi, (blocks,)."""
    n, square, double = len(exact), np.sum(exact**2), scipy.sparse.csr_array(phi, dtype=np.float64)
    gram = scipy.sparse.coo_array(double @ double.T)
    row, column = gram.coords
    changes = gram.data * (gram.data - 2 * exact[row % n, column % n])
    squares = square + np.bincount(row // n, changes)  # no row is empty
    return np.sqrt(np.maximum(squares, 0) / square)
