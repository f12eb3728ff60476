"""Quadrature features: kernel error, accuracy and time (Munkhoeva et al. 2018, Sec. 5).

    python -m experiments.kernels.quadrature --data_dir=DIR   # with uci_regression/, fashion_mnist/
    python -m experiments.kernels.quadrature                  # the sets of scikit-learn
    python -m experiments.kernels.quadrature --parts=figure_1,figure_3 --quick

Methods: G independent, Gort orthogonal, ROM S-Rademacher, QMC Halton, GQ Gauss-Hermite; H and B are
spherical-radial rules with Haar and butterfly matrices. All have the points of n rules: n (d + 1)
for the Gaussian kernel, of lengthscale sqrt(d / 2) (gamma = 1 / d). The arc-cosine kernels of order
0 and 1 have twice as many, reflected in H and B. Variants of B: "B rejected", the paper's own rule
(Sec. 8: lengths are drawn again until a_0^2 >= 0), and "B one rho", Eq. 5 before the paper's
modification (one rho for all vertices of a rule).

    figure_1   |K - K^|_F / |K|_F against n, with 95% confidence intervals over draws
    figure_2   R^2 and accuracy of a linear SVM on the features against n, with the exact kernel
    figure_3   time of the explicit map against d: butterfly, and the dense product

To a linear model (figure_2) half of the reflected arc-cosine features bring little: step(-u) =
1 - step(u), and max(-u, 0) = max(u, 0) - u.

Differences to the paper. Columns of tables are standardised and pixels scaled to [0, 1]; the paper
gives neither. Of USPS the training images are read, of MNIST the test images. Fashion-MNIST and
digits are further pictures. Points N(0, I) of the same d stand for CIFAR100 and LEUKEMIA. There H
and Gort are left out, like QMC and GQ (a Haar matrix takes O(d^3); normal_7129 needs 11 GB
without); --methods adds them. --data_sets also accepts any csv file of the folder. The paper's
Table 2 has 10 to 500 runs; here 2 to 500 (`RUNS`, or --runs). All n of a run come from one draw, by
its first points, and all runs have the same data. B and H keep a negative constant
(`performer.quadrature`); the paper's rule is "B rejected". SVMs have the squared loss and C = 1, on
centred features of mean squared length 1 of at most 1,000 training rows; the paper gives no
settings.

Tables (csv, md) and figures (png) go to --out.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from sklearn import datasets, svm

from experiments.tabular import sets
from performer import kernels, quadrature
from performer.quadrature import Rule
from performer.typing import Key
from vit.data.sources.arrays import read_idx
from vit.study import harness, launch, statistics, timing

RULES = 5
"""Largest n."""
KERNELS = ("gaussian", "arc-cosine-0", "arc-cosine-1")
TRAIN, TEST = 1000, 2000
"""Rows at most, in Fig. 2."""
SVC: dict[str, Any] = dict(dual="auto", random_state=0)
SVR: dict[str, Any] = dict(dual="auto", random_state=0, loss="squared_epsilon_insensitive")
WIDTHS = (64, 128, 256, 512, 784, 1024, 2048, 3072, 4096, 7129, 8192)
BATCH, LARGE = 256, 512
"""Vectors, and the least d in the slopes of Fig. 3."""

SAMPLES = {"normal_3072": 50, "normal_7129": 10}
"""Points in Fig. 1 as in Table 2, which has 550 of the other sets."""
RUNS = dict.fromkeys(("power_plant", "letter", "digits"), 500)
RUNS |= {"mnist": 10, "fashion_mnist": 10, "normal_3072": 3, "normal_7129": 2}
"""Draws in Fig. 1; 50 of the other sets."""
IMAGES = {"fashion_mnist": "train", "mnist": "t10k"}
"""Folders of IDX files, and the part of them that is read."""
PIXELS = ("usps",)
"""csv files of pixels, from 0 to 1."""
IN_FOLDER = ("power_plant", "letter", "usps", "mnist", "digits", "fashion_mnist", *SAMPLES)
BUNDLED = ("diabetes", "digits", *SAMPLES)
LARGE_METHODS = ("G", "ROM", "B", "B rejected")
"""Methods in Fig. 1 on these random points."""


def one_length(key: Key, num_rules: int, d: int, *, reflect: bool) -> Rule:
    """Draw Quad Eq. 5: butterfly matrices, and one rho for all vertices of a rule."""
    rule = quadrature.structured(key, num_rules, d, reflect=reflect)
    first_of_each = jnp.broadcast_to(rule.lengths[:, :1], rule.lengths.shape)
    return replace(rule, lengths=first_of_each).dense()


METHODS: dict[str, Callable[..., Rule]] = quadrature.METHODS | {
    "B rejected": partial(quadrature.spherical_radial, orthogonal="butterfly", reject=True),
    "B one rho": one_length,
}
"""(key, num_rules, d, reflect=) -> Rule."""
CASE = "{data set}, {kernel}, {method}"
SPHERICAL_RADIAL = ("H", "B", "B rejected", "B one rho")


def at_largest(rows: list[harness.Row]) -> list[harness.Row]:
    """Return the rows of the largest n, in Fig. 2 with the scores less the exact kernel's."""
    kept, last = [], [row for row in rows if row["n"] == RULES]
    for group in harness.grouped(last, "{kernel}, {data set}").values():
        exact = [row["score"] for row in group if row["method"] == "exact"]
        kept += [row | {"score": row["score"] - exact[0]} if exact else row for row in group]
    return [row for row in kept if row["method"] != "exact"]


POINTS: harness.Row = dict(
    change=at_largest,
    x="{data set}",
    line="{method}",
    panel="{kernel}",
    across=1,
    high=2.2,
)
FIGURES: harness.Figures = {
    "figure_1": POINTS
    | dict(y="ratio", error="95% of ratio", log="y", ylabel=f"error / error of G, n = {RULES}"),
    "figure_2": POINTS
    | dict(y="score", error="95%", ylabel=f"score - score of the exact kernel, n = {RULES}"),
    "figure_3": dict(
        change=lambda rows: harness.melt(rows, ("butterfly, ms", "dense, ms")),
        x="d",
        line="{line}",
        log="xy",
        ylabel=f"time (ms for {BATCH} vectors)",
    ),
}


class Data(NamedTuple):
    """A data set: float32 (N, d), and targets or integer classes; none for random points."""

    name: str
    x: np.ndarray
    y: np.ndarray | None


def load(name: str, data_dir: Path | None) -> Data:
    """Read a data set, in random order.

    Raises:
        ValueError: for an unknown name, or a file that is not there or damaged.
    """
    rng, classes = np.random.default_rng(0), False
    if name in SAMPLES:
        d = int(name.split("_")[1])
        return Data(name, rng.normal(size=(SAMPLES[name], d)).astype(np.float32), None)
    if name == "digits":
        x, y = datasets.load_digits(return_X_y=True)
        x = x / 16
    elif name in IMAGES and data_dir:
        part = IMAGES[name]
        paths = (data_dir / name / f"{part}-{x}-ubyte.gz" for x in ("images-idx3", "labels-idx1"))
        x, y = (read_idx(path, 3 - 2 * i) for i, path in enumerate(paths))
        x, y = x.reshape(len(x), -1) / 255, y.astype(int)
    else:
        classes = bool(data_dir and (data_dir / "uci_classification" / f"{name}.csv").exists())
        table = sets.load(name, "classification" if classes else "regression", data_dir)
        x, y = ((z - z.mean(axis=0)) / z.std(axis=0) for z in (table.x, table.y))
        x, y = table.x if name in PIXELS else x, table.y if classes else y
    order = rng.permutation(len(x))
    return Data(name, x[order].astype(np.float32), y[order])


def owners(rule: Rule, name: str, reflect: bool) -> np.ndarray:
    """Return which of the `RULES` parts each point belongs to; reflected ones come last."""
    signs = 2 if reflect and name in SPHERICAL_RADIAL else 1
    return np.tile(np.repeat(np.arange(RULES), len(rule.weights) // RULES // signs), signs)


def first(rule: Rule, name: str, n: int | jax.Array, reflect: bool) -> Rule:
    """Return the rule of the first n of `RULES` parts; the other weights become 0."""
    weights = rule.weights * (owners(rule, name, reflect) < n) * (RULES / n)
    constant = 1 - weights.sum() if name in SPHERICAL_RADIAL else rule.constant
    return Rule(rule.points, weights, constant)


def singles(rule: Rule, name: str, reflect: bool) -> Rule:
    """Return the `RULES` rules whose mean is the rule, along a leading axis."""
    order = owners(rule, name, reflect).argsort(kind="stable").reshape(RULES, -1)
    weights = RULES * rule.weights[order]
    constant = jnp.broadcast_to(rule.constant, (RULES,))
    constants = 1 - weights.sum(axis=1) if name in SPHERICAL_RADIAL else constant
    return Rule(rule.points[order], weights, constants)


def lengthscale(kernel: str, d: int) -> float:
    """Return sqrt(d / 2), gamma = 1 / (2 sigma^2) = 1 / d, for the Gaussian kernel; else 1."""
    return (d / 2) ** 0.5 if kernel == "gaussian" else 1.0


@partial(jax.jit, static_argnames="kernel")
def exact(x: jax.Array, y: jax.Array, kernel: str) -> jax.Array:
    """Return the exact kernel, a few rows at a time for the memory."""
    k, length = kernels.get(kernel), lengthscale(kernel, x.shape[-1])
    return jax.lax.map(lambda row: k(row[None], y, lengthscale=length)[0], x, batch_size=32)


@partial(jax.jit, static_argnames=("name", "kernel"))
def frobenius_errors(x: jax.Array, keys: Key, name: str, kernel: str) -> jax.Array:
    """Return |K - K^|_F / |K|_F with n = 1, ..., RULES, (runs, n)."""
    d, reflect = x.shape[-1], not kernels.get(kernel).even
    options: Any = dict(lengthscale=lengthscale(kernel, d))
    gram = exact(x, x, kernel)

    def one(key: Key) -> jax.Array:
        single = singles(METHODS[name](key, RULES, d, reflect=reflect), name, reflect)
        grams = jax.lax.map(lambda rule: quadrature.gram(x, x, rule, kernel, **options), single)
        first = jnp.tril(jnp.ones((RULES, RULES))) / jnp.arange(1, RULES + 1)[:, None]
        means = jnp.tensordot(first, grams, axes=1, precision="highest")  # (n, N, N)
        return jax.vmap(statistics.relative_error, (0, None))(means, gram)

    return jax.lax.map(one, keys)


def figure_1(data: Sequence[Data], methods: Sequence[str], runs: int, out: Path) -> str:
    """Measure kernel errors: a row for each data set, kernel, method and n.

    Other cases that are in `out` stay. Ratios are to the error of G.
    """
    points = {name: jnp.asarray(x[: SAMPLES.get(name, 550)]) for name, x, _ in data}

    def measure(case: harness.Row) -> jax.Array:
        keys = jax.random.split(jax.random.key(0), runs or RUNS.get(case["data set"], 50))
        return frobenius_errors(points[case["data set"]], keys, case["method"], case["kernel"])

    cases = [
        {"data set": name, "d": x.shape[-1], "kernel": kernel, "method": method}
        for name, x in points.items()
        for method in methods or (LARGE_METHODS if name in SAMPLES else METHODS)
        for kernel in KERNELS
    ]
    path, new = out.with_suffix(".csv"), swept(cases, measure, "error")
    before, measured = harness.read(path) if path.exists() else [], harness.grouped(new, CASE)
    others = [row for row in before if CASE.format_map(row) not in measured]
    for group in harness.grouped([*others, *new], "{data set}, {kernel}, {n}").values():
        base = next((row for row in group if row["method"] == "G"), group[0])["error"]
        for row in group:
            row |= {"ratio": row["error"] / base, "95% of ratio": row["95%"] / base}
    return harness.show([*others, *new], out, FIGURES)


def score(train: np.ndarray, y: np.ndarray, test: np.ndarray, test_y: np.ndarray) -> float:
    """Return test accuracy or R^2 of a linear SVM on centred features of mean squared length 1."""
    centre = train.mean(axis=0)
    train, test = train - centre, test - centre
    if train.shape[1] > len(train):  # a linear model sees the span of its training rows only
        basis, coordinates = np.linalg.qr(train.T)
        train, test = coordinates.T, test @ basis
    size = np.sqrt(np.mean(np.sum(train**2, axis=1)))
    model: Any = svm.LinearSVR(**SVR) if y.dtype.kind == "f" else svm.LinearSVC(**SVC)
    return float(model.fit(train / size, y).score(test / size, test_y))


def exact_features(train: jax.Array, test: jax.Array, kernel: str) -> list[np.ndarray]:
    """Return features whose products are the exact kernel with the training rows."""
    values, vectors = np.linalg.eigh(np.asarray(exact(train, train, kernel), np.float64))
    kept = values > 1e-6 * values[-1]  # what float32 leaves of the kernel
    back = vectors[:, kept] / np.sqrt(values[kept])
    return [np.asarray(exact(x, train, kernel), np.float64) @ back for x in (train, test)]


@partial(jax.jit, static_argnames=("name", "kernel"))
def mapped(x: jax.Array, key: Key, n: int, name: str, kernel: str) -> jax.Array:
    """Return the features of n rules; the constant's sign does not matter with an intercept."""
    d, reflect = x.shape[-1], not kernels.get(kernel).even
    rule = first(METHODS[name](key, RULES, d, reflect=reflect), name, n, reflect)
    return quadrature.feature_maps(x, rule, kernel, lengthscale=lengthscale(kernel, d))[0]


def figure_2(data: Sequence[Data], runs: int, out: Path) -> str:
    """Measure scores: a row for each data set, kernel, method (not H, "B one rho") and n."""
    keys = jax.random.split(jax.random.key(1), runs)
    labelled = {name: (x, y) for name, x, y in data if y is not None}

    def measure(case: harness.Row) -> list[list[float]]:
        x, y = labelled[case["data set"]]
        m, kernel = min(TRAIN, len(x) // 2), case["kernel"]
        points, train_y, test_y = jnp.asarray(x[: m + TEST]), y[:m], y[m : m + TEST]
        if case["method"] == "exact":
            train, test = exact_features(points[:m], points[m:], kernel)
            return [[score(train, train_y, test, test_y)] * RULES] * 2

        def score_of(key: Key, n: int) -> float:
            phi = np.asarray(mapped(points, key, n, case["method"], kernel))
            phi = phi[:, phi.any(axis=0)]
            return score(phi[:m], train_y, phi[m:], test_y)

        return [[score_of(key, n) for n in range(1, RULES + 1)] for key in keys]

    cases = [
        {"data set": name, "d": x.shape[-1], "kernel": kernel, "method": method}
        for name, (x, _) in labelled.items()
        for kernel in KERNELS
        for method in ("exact", *METHODS)
        if method not in ("H", "B one rho")
    ]
    return harness.show(swept(cases, measure, "score"), out, FIGURES)


def figure_3(widths: Sequence[int], repeats: int, out: Path) -> str:
    """Time one rule's map of a batch, by an operator and by a matrix that are drawn before."""

    def by_operator(matrices: Any, lengths: jax.Array, x: jax.Array) -> jax.Array:
        # The operator by its parts: its types refuse the arguments without values of `lower`.
        return quadrature.StructuredRule(matrices, lengths, reflect=False).apply(x)

    def measure(case: harness.Row) -> harness.Row:
        operator = quadrature.structured(jax.random.key(case["d"]), 1, case["d"], reflect=False)
        x = jax.random.normal(jax.random.key(0), (BATCH, case["d"]))
        programs = {
            "butterfly": timing.compiled(by_operator, operator.matrices, operator.lengths, x),
            "dense": timing.compiled(lambda w, x: x @ w.T, operator.dense().points, x),
        }
        best = timing.race({name: program.call for name, program in programs.items()}, repeats)
        print(f"figure_3 d = {case['d']}", flush=True)
        row = case | {f"{name}, ms": 1e3 * times.wall for name, times in best.items()}
        row |= {f"{name}, CPU ms": 1e3 * times.cpu for name, times in best.items()}
        return row | {"dense / butterfly": best["dense"].wall / best["butterfly"].wall}

    rows = [measure({"d": d}) for d in widths]
    names, text = ("d", "butterfly, ms", "dense, ms"), f"{timing.hardware()}."
    d, *times = np.log([[row[name] for row in rows if row["d"] >= LARGE] for name in names])
    if len(d) > 1:
        b, w = np.polyfit(d, np.transpose(times), 1)[0]
        text = f"For d >= {LARGE} the time grows as butterfly d^{b:.2f}; dense d^{w:.2f}. {text}"
    return harness.show(rows, out, FIGURES, text)


def swept(cases: list[harness.Row], measure: Any, y: str) -> list[harness.Row]:
    """Return rows with the mean as y and half of its 95% interval."""
    rows = []
    for row in harness.sweep(cases, measure, n=range(1, RULES + 1)):
        values = np.asarray(row["values"], np.float64)
        line = {k: v for k, v in row.items() if k not in harness.ESTIMATE}
        line |= zip((y, "95%"), statistics.interval(values), strict=True)
        rows.append(line | ({"runs": len(values)} if y == "error" else {}))
    return rows


Part = Literal["figure_1", "figure_2", "figure_3"]
Method = Literal["G", "Gort", "ROM", "QMC", "GQ", "H", "B", "B rejected", "B one rho"]


def main(
    data_dir: Path | None = None,
    data_sets: Sequence[str] = (),
    parts: Sequence[Part] = get_args(Part),
    methods: Sequence[Method] = (),
    runs: int = 0,
    widths: Sequence[int] = WIDTHS,
    repeats: int = 20,
    out: Path = Path("results/kernels/quadrature"),
) -> None:
    """Print the tables.

    Args:
        data_sets: names; by default the data sets of the paper.
        methods: methods of Fig. 1; by default all, and on random points those in O(d log d).
        runs: draws in Figs 1 and 2; by data set, as in `RUNS`, if 0.
        widths: dimensions in Fig. 3.
        repeats: repeats of each time in Fig. 3.
    """
    names = data_sets or (IN_FOLDER if data_dir else BUNDLED)
    data = [load(name, data_dir) for name in dict.fromkeys(names)]
    if "figure_1" in parts:
        figure_1(data, methods, runs, out / "figure_1")
    if "figure_2" in parts:
        figure_2(data, runs or 3, out / "figure_2")
    if "figure_3" in parts:
        figure_3(widths, repeats, out / "figure_3")


if __name__ == "__main__":
    little = {"data_sets": ("diabetes",), "methods": ("G", "B"), "runs": 2}
    launch.run(main, quick=little | {"widths": (64, 128), "repeats": 3})
