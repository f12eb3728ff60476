"""Quadrature features: kernel error, accuracy and time (Munkhoeva et al. 2018, Sec. 5).

    python -m experiments.kernels.quadrature --data_dir=DIR   # with uci_regression/, fashion_mnist/
    python -m experiments.kernels.quadrature                  # the sets of scikit-learn
    python -m experiments.kernels.quadrature --parts=figure_1,figure_3 --quick

Methods: G independent, Gort orthogonal, ROM S-Rademacher, QMC Halton, GQ Gauss-Hermite, H and B
spherical-radial rules with Haar and butterfly matrices, all with as many points as n of the last
two have: n (d + 1) for the Gaussian kernel, of lengthscale sqrt(d / 2) (gamma = 1 / d), and twice
as many, reflected in H and B, for the arc-cosine kernels of order 0 and 1. Of B there are the
paper's own rule, "B rejected" (Sec. 8: lengths are drawn again until a_0^2 >= 0), and Eq. 5 as it
stands before the paper's modification, "B one rho" (one rho for all vertices of a rule).

    figure_1   |K - K^|_F / |K|_F against n, with 95% confidence intervals over draws
    figure_2   R^2 and accuracy of a linear SVM on the features against n, beside the exact kernel
    figure_3   time of the explicit map against d: butterfly, and the dense product

To a linear model (figure_2) half of the reflected arc-cosine features bring little: step(-u) =
1 - step(u), and max(-u, 0) = max(u, 0) - u.

Differences to the paper. Columns of tables are standardised and pixels scaled to [0, 1]; it says
neither. Fashion-MNIST and digits stand for MNIST, LETTER and USPS, points N(0, I) of the same d for
CIFAR100 and LEUKEMIA, where H and Gort are left out besides QMC and GQ (a Haar matrix takes O(d^3);
normal_7129 needs 11 GB as it is); --methods names them. --data_sets takes any csv file of the
folder, too, as letter. Its Table 2 has 10 to 500 runs; here 2 to 500, see `RUNS`, or --runs. All n
of a run come from one draw, by its first points, and all runs have the same points of data. B and H
keep a negative constant (`performer.quadrature`), the paper's are "B rejected". SVMs have the
squared loss and C = 1, on centred features of mean squared length 1, and at most 1,000 rows to
train on, the exact kernel's by its features, too; what the paper's have it does not say.

Tables (csv, md) and figures (png) go to --out.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from sklearn import datasets, svm

from experiments.common import harness, launch, statistics, tabular, timing
from performer import kernels, quadrature
from performer.choices import unknown
from performer.quadrature import Rule
from performer.typing import Key
from vit import bounded, report

RULES = 5
"""n goes up to so many."""
KERNELS = ("gaussian", "arc-cosine-0", "arc-cosine-1")
TRAIN, TEST = 1000, 2000
"""Rows at most, in Fig. 2."""
SVC: dict[str, Any] = dict(dual="auto", random_state=0)
SVR: dict[str, Any] = dict(dual="auto", random_state=0, loss="squared_epsilon_insensitive")
WIDTHS = (64, 128, 256, 512, 784, 1024, 2048, 3072, 4096, 7129, 8192)
BATCH, LARGE = 256, 512
"""Vectors, and the least d that Fig. 3 takes the slopes from."""

SAMPLES = {"normal_3072": 50, "normal_7129": 10}
"""Points in Fig. 1 as in Table 2, which has 550 of the other sets."""
RUNS = {"power_plant": 500, "fashion_mnist": 10, "normal_3072": 3, "normal_7129": 2}
"""Draws in Fig. 1; 50 of the other sets."""
IN_FOLDER = ("power_plant", "digits", "fashion_mnist", *SAMPLES)
BUNDLED = ("diabetes", "digits", *SAMPLES)
LARGE_METHODS = ("G", "ROM", "B", "B rejected")
"""Of these random points."""


def one_length(key: Key, num_rules: int, d: int, *, reflect: bool) -> Rule:
    """Quad Eq. 5: butterfly matrices, and one rho for all vertices of a rule."""
    rule = quadrature.structured(key, num_rules, d, reflect=reflect)
    first_of_each = jnp.broadcast_to(rule.lengths[:, :1], rule.lengths.shape)
    return replace(rule, lengths=first_of_each).dense()


VARIANTS: dict[str, Callable[..., Rule]] = {
    "B rejected": partial(quadrature.spherical_radial, orthogonal="butterfly", reject=True),
    "B one rho": one_length,
}
METHODS = quadrature.METHODS | VARIANTS
"""(key, num_rules, d, reflect=) -> Rule."""
SPHERICAL_RADIAL = ("H", "B", *VARIANTS)


class Data(NamedTuple):
    """A data set: float32 (N, d), and targets or integer classes; none for random points."""

    name: str
    x: np.ndarray
    y: np.ndarray | None


def load(name: str, data_dir: Path | None) -> Data:
    """Reads a data set, in random order.

    Raises:
        ValueError: for an unknown name, or a file that is not there or damaged.
    """
    files = data_dir.glob("uci_*/*.csv") if data_dir else ()
    kinds = {path.stem: path.parent.name for path in files}
    choices = dict.fromkeys((*(IN_FOLDER if data_dir else BUNDLED), *kinds))
    if name not in choices:
        hint = "" if data_dir else "; or give a data_dir"
        raise ValueError(unknown("data set", name, choices) + hint)
    rng = np.random.default_rng(0)
    if name in SAMPLES:
        d = int(name.split("_")[1])
        return Data(name, rng.normal(size=(SAMPLES[name], d)).astype(np.float32), None)
    if name in ("digits", "fashion_mnist"):
        x, y = _images(name, data_dir)
    else:
        classes = kinds.get(name) == "uci_classification"
        table = tabular.load(name, "classification" if classes else "regression", data_dir)
        x, y = ((z - z.mean(axis=0)) / z.std(axis=0) for z in (table.x, table.y))
        y = table.y if classes else y
    order = rng.permutation(len(x))
    return Data(name, x[order].astype(np.float32), y[order])


def _images(name: str, data_dir: Path | None) -> tuple[np.ndarray, np.ndarray]:
    if name == "digits":
        x, y = datasets.load_digits(return_X_y=True)
        return x / 16, y
    assert data_dir is not None
    prefix = data_dir / name / "train"
    images, labels = (
        bounded.read_idx(prefix.with_name(f"train-{file}-ubyte.gz"), dimensions)
        for file, dimensions in (("images-idx3", 3), ("labels-idx1", 1))
    )
    if len(images) != len(labels):
        raise ValueError(f"{prefix.parent} has {len(images)} images but {len(labels)} labels")
    return images.reshape(len(images), -1) / 255, labels.astype(int)


def first(rule: Rule, name: str, n: int | jax.Array, reflect: bool) -> Rule:
    """The rule of the first n of `RULES` parts of another, whose other weights become 0."""
    signs = 2 if reflect and name in SPHERICAL_RADIAL else 1
    kept = jnp.arange(RULES)[:, None] < n
    weights = (rule.weights.reshape(signs, RULES, -1) * kept).reshape(-1) * (RULES / n)
    constant = 1 - weights.sum() if name in SPHERICAL_RADIAL else rule.constant
    return Rule(rule.points, weights, constant)


def singles(rule: Rule, name: str, reflect: bool) -> Rule:
    """The `RULES` rules of which another is the mean, along a leading axis."""
    signs = 2 if reflect and name in SPHERICAL_RADIAL else 1

    def split(x: jax.Array) -> jax.Array:
        parts = x.reshape(signs, RULES, -1, *x.shape[1:])
        return jnp.moveaxis(parts, 1, 0).reshape(RULES, -1, *x.shape[1:])

    weights = RULES * split(rule.weights)
    constant = jnp.broadcast_to(rule.constant, (RULES,))
    own = 1 - weights.sum(axis=1) if name in SPHERICAL_RADIAL else constant
    return Rule(split(rule.points), weights, own)


def lengthscale(kernel: str, d: int) -> float:
    """gamma = 1 / (2 sigma^2) = 1 / d for the Gaussian kernel; the others have none."""
    return (d / 2) ** 0.5 if kernel == "gaussian" else 1.0


@partial(jax.jit, static_argnames="kernel")
def exact(x: jax.Array, y: jax.Array, kernel: str) -> jax.Array:
    """The kernel that the features estimate; a few rows at a time, for the memory."""
    k, length = kernels.get(kernel), lengthscale(kernel, x.shape[-1])
    return jax.lax.map(lambda row: k(row[None], y, lengthscale=length)[0], x, batch_size=32)


@partial(jax.jit, static_argnames=("name", "kernel_names"))
def frobenius_errors(
    x: jax.Array, keys: Key, name: str, kernel_names: tuple[str, ...]
) -> dict[str, jax.Array]:
    """|K - K^|_F / |K|_F of kernels that are all even or all not, {kernel: (runs, n)}."""
    d, reflect = x.shape[-1], not kernels.get(kernel_names[0]).even
    grams = {kernel: exact(x, x, kernel) for kernel in kernel_names}

    def one(key: Key) -> dict[str, jax.Array]:
        single = singles(METHODS[name](key, RULES, d, reflect=reflect), name, reflect)
        return {kernel: errors_of(single, kernel, gram) for kernel, gram in grams.items()}

    def errors_of(single: Rule, kernel: str, gram: jax.Array) -> jax.Array:
        scales = dict(lengthscale=lengthscale(kernel, d))
        found = jax.lax.map(lambda rule: quadrature.gram(x, x, rule, kernel, **scales), single)
        first = jnp.tril(jnp.ones((RULES, RULES))) / jnp.arange(1, RULES + 1)[:, None]
        means = jnp.tensordot(first, found, axes=1, precision="highest")
        return jax.vmap(statistics.relative_error, (0, None))(means, gram)

    return jax.lax.map(one, keys)


def figure_1(data: Sequence[Data], methods: Sequence[str], runs: int, out: Path) -> str:
    """Kernel errors: a row for each data set, kernel, method and n; of `methods`, or those of d."""
    rows = []
    for name, x, _ in data:
        keys = jax.random.split(jax.random.key(0), runs or RUNS.get(name, 50))
        x = jnp.asarray(x[: SAMPLES.get(name, 550)])
        for method in methods or (LARGE_METHODS if name in SAMPLES else METHODS):
            errors = {}
            for even in (True, False):
                alike = tuple(word for word in KERNELS if kernels.get(word).even == even)
                errors |= frobenius_errors(x, keys, method, alike)
            for kernel, values in errors.items():
                for n, column in enumerate(np.asarray(values, np.float64).T, 1):
                    row = {"data set": name, "d": x.shape[-1], "kernel": kernel, "method": method}
                    mean, half = statistics.interval(column)
                    rows.append(row | {"n": n, "error": mean, "95%": half, "runs": len(keys)})
            print(f"figure_1 {name} {method}", flush=True)
    _grid(rows, "error", out)
    last = {(r["kernel"], r["data set"], r["method"]): r["error"] for r in rows if r["n"] == RULES}
    ratios = [
        f"{kernel}, {name}: {error / last[kernel, name, 'G']:.2g}"
        for (kernel, name, method), error in last.items()
        if method == "B" and (kernel, name, "G") in last
    ]
    return report.table(rows, out, f"Error of B / error of G at n = {RULES}. {'; '.join(ratios)}.")


def score(train: np.ndarray, y: np.ndarray, test: np.ndarray, test_y: np.ndarray) -> float:
    """Test accuracy or R^2 of a linear SVM on centred features of mean squared length 1."""
    centre = train.mean(axis=0)
    train, test = train - centre, test - centre
    if train.shape[1] > len(train):  # a linear model sees the span of its training rows only
        basis, coordinates = np.linalg.qr(train.T)
        train, test = coordinates.T, test @ basis
    size = np.sqrt(np.mean(np.sum(train**2, axis=1)))
    model: Any = svm.LinearSVR(**SVR) if y.dtype.kind == "f" else svm.LinearSVC(**SVC)
    return float(model.fit(train / size, y).score(test / size, test_y))


def exact_features(train: jax.Array, test: jax.Array, kernel: str) -> list[np.ndarray]:
    """Features whose products are the exact kernel of training rows with training and test rows."""
    values, vectors = np.linalg.eigh(np.asarray(exact(train, train, kernel), np.float64))
    kept = values > 1e-6 * values[-1]  # what float32 leaves of the kernel
    back = vectors[:, kept] / np.sqrt(values[kept])
    return [np.asarray(exact(x, train, kernel), np.float64) @ back for x in (train, test)]


@partial(jax.jit, static_argnames=("name", "kernel"))
def mapped(x: jax.Array, key: Key, n: int, name: str, kernel: str) -> jax.Array:
    """The features of n rules. The constant's sign does not matter beside an intercept."""
    d, reflect = x.shape[-1], not kernels.get(kernel).even
    rule = first(METHODS[name](key, RULES, d, reflect=reflect), name, n, reflect)
    return quadrature.feature_maps(x, rule, kernel, lengthscale=lengthscale(kernel, d))[0]


def figure_2(data: Sequence[Data], runs: int, out: Path) -> str:
    """Scores: a row for each data set, kernel, method and n; without H and a rho for each rule."""
    rows = []
    keys = jax.random.split(jax.random.key(1), runs)
    for name, x, y in data:
        if y is None:
            continue
        m = min(TRAIN, len(x) // 2)
        points, targets = jnp.asarray(x[: m + TEST]), (y[:m], y[m : m + TEST])

        def score_of(train: np.ndarray, test: np.ndarray, targets=targets) -> float:
            return score(train, targets[0], test, targets[1])

        for kernel in KERNELS:
            row = {"data set": name, "d": x.shape[-1], "kernel": kernel}
            reference = score_of(*exact_features(points[:m], points[m:], kernel))
            for n in range(1, RULES + 1):
                rows.append(row | {"method": "exact", "n": n, "score": reference, "95%": 0.0})
            for method, n in itertools.product(METHODS, range(1, RULES + 1)):
                if method in ("H", "B one rho"):
                    continue
                maps = [np.asarray(mapped(points, key, n, method, kernel)) for key in keys]
                maps = [phi[:, phi.any(axis=0)] for phi in maps]
                mean, half = statistics.interval([score_of(phi[:m], phi[m:]) for phi in maps])
                rows.append(row | {"method": method, "n": n, "score": mean, "95%": half})
            print(f"figure_2 {name} {kernel}", flush=True)
    _grid(rows, "score", out)
    return report.table(rows, out, "Scores: R^2 for regression, else accuracy.")


def slope(d: Sequence[float], seconds: Sequence[float]) -> float:
    """p of time ~ d^p, by least squares of the logarithms."""
    return float(np.polyfit(np.log(d), np.log(seconds), 1)[0])


def figure_3(widths: Sequence[int], repeats: int, out: Path) -> str:
    """Times of one rule's map of a batch, by an operator and by a matrix that are drawn before."""

    def by_operator(matrices: Any, lengths: jax.Array, x: jax.Array) -> jax.Array:
        return quadrature.StructuredRule(matrices, lengths, reflect=False).apply(x)

    rows = []
    for d in widths:
        operator = quadrature.structured(jax.random.key(d), 1, d, reflect=False)
        x = jax.random.normal(jax.random.key(0), (BATCH, d))
        points = jax.jit(lambda op, d=d: op.apply(jnp.eye(d)).T)(operator)
        programs = {
            "butterfly": timing.compiled(by_operator, operator.matrices, operator.lengths, x),
            "dense": timing.compiled(lambda w, x: x @ w.T, points, x),
        }
        best = timing.race({name: program.call for name, program in programs.items()}, repeats)
        row: dict[str, Any] = {"d": d}
        row |= {f"{name}, ms": 1e3 * times.wall for name, times in best.items()}
        row |= {f"{name}, CPU ms": 1e3 * times.cpu for name, times in best.items()}
        rows.append(row | {"dense / butterfly": best["dense"].wall / best["butterfly"].wall})
        print(f"figure_3 d = {d}", flush=True)
    lines = harness.melted(rows, ("butterfly, ms", "dense, ms"))
    label = f"ms for {BATCH} vectors"
    title = "explicit map of one rule"
    harness.figure(lines, out, x="d", line="{line}", log=True, ylabel=label, title=title)
    large = [row for row in rows if row["d"] >= LARGE]
    slopes = {
        name: slope([r["d"] for r in large], [r[f"{name}, ms"] for r in large])
        for name in ("butterfly", "dense")
        if len(large) > 1
    }
    text = "; ".join(f"{name} d^{value:.2f}" for name, value in slopes.items()) or "not measured"
    slow = [row["d"] for row in rows if row["dense / butterfly"] < 1]
    after = [d for d in widths if not slow or d > max(slow)]
    faster = f"butterfly is faster from d = {after[0]} on" if after else "dense is always faster"
    where = timing.machine()
    return report.table(rows, out, f"For d >= {LARGE} the time grows as {text}; {faster}. {where}.")


def _grid(rows: list[harness.Row], quantity: str, out: Path) -> None:
    """A panel for each kernel (rows) and data set (columns), a line for each method."""

    def style(method: str) -> harness.Row:
        if method not in METHODS:
            return dict(color="black", ls="--")
        return dict(color=f"C{list(METHODS).index(method)}")

    def limits(axis: Any, here: list[harness.Row]) -> None:
        """Few runs have wide intervals: the panel shows the means whole, and what fits of those."""
        low, high = (end(row[quantity] for row in here) for end in (min, max))
        if quantity == "error":
            axis.set(yscale="log", ylim=(0.7 * low, 1.4 * high))
        else:
            axis.set_ylim(low - 0.1 * (high - low) - 1e-3, high + 0.1 * (high - low) + 1e-3)

    harness.figure(
        [row for group in harness.grouped(rows, "{kernel}").values() for row in group],
        out,
        x="n",
        y=quantity,
        line="{method}",
        panel="{data set}, {kernel}",
        error="95%",
        columns=len(harness.grouped(rows, "{data set}")),
        style=style,
        finish=limits,
    )


Part = Literal["figure_1", "figure_2", "figure_3"]


def main(
    data_dir: Path | None = None,
    data_sets: Sequence[str] = (),
    parts: Sequence[Part] = get_args(Part),
    methods: Sequence[str] = (),
    runs: int = 0,
    quick: bool = False,
    out: Path = Path("results/kernels/quadrature"),
) -> None:
    """Prints the tables.

    Args:
        data_dir: folder with uci_regression/ and fashion_mnist/; scikit-learn's sets without.
        data_sets: names; those of the paper.
        parts: which.
        methods: of Fig. 1; all, or of random points those in O(d log d).
        runs: draws in Figs 1 and 2; those of RUNS if 0.
        quick: little of everything, to see that it runs.
        out: folder for tables and figures.
    """
    launch.at_least(0, runs=runs)
    names = data_sets or (IN_FOLDER if data_dir else BUNDLED)
    for method in methods:
        if method not in METHODS:
            raise ValueError(unknown("method", method, METHODS))
    data = [load(name, data_dir) for name in dict.fromkeys(names)]
    if quick:
        data = [d._replace(x=d.x[:60, :64], y=None if d.y is None else d.y[:60]) for d in data]
        runs, out = 2, out / "quick"
    if "figure_2" in parts and all(d.y is None for d in data):
        raise ValueError("figure_2 needs a data set with targets, not random points alone")
    if "figure_1" in parts:
        print(figure_1(data, methods, runs, out / "figure_1"))
    if "figure_2" in parts:
        print(figure_2(data, runs or 3, out / "figure_2"))
    if "figure_3" in parts:
        print(figure_3(WIDTHS[:4] if quick else WIDTHS, 3 if quick else 20, out / "figure_3"))


if __name__ == "__main__":
    launch.run(main)
