"""Gaussian processes on meshes and on roads, with coupled walks: VRC Figs 4 and 11.

    python -m experiments.graphs.gp                        # a torus
    python -m experiments.graphs.gp --data_dir=DIR --graphs=teapot,traffic --repeats=10

Fig. 4: the nodes are the faces of a mesh, the values the z-components of their normals, and 5% of
them are test nodes. Fig. 11, "traffic": speeds on the roads of San Jose, standardised by 250
sensors; the other 75 are test nodes. The kernel is that of diffusion. Its scales are fitted under
an estimate with 8 independent walks by Adam, 300 steps at 0.05, the paper's by 1000 at 0.01. With
the exact kernel of these scales are then compared its estimates by m walks, independent, antithetic
and sigma-coupled, all at p_halt = 0.4; the permutation of 50 is learned on an Erdos-Renyi graph for
this kernel.

    error   |K - K_hat|_F / |K|_F, over all nodes
    RMSE    of the predictive mean, in the units of the values
    KL      KL(exact || estimate) of the predictive laws of the test values, noise included, in nats

Means ± standard errors over repeats of the walks, four times as many in Fig. 11. The split is the
same for all repeats; of traffic each repeat is the mean over several splits. Posteriors are dense
and in float64. Repeats of two couplings share their keys, so tests are paired.

All roads weigh 1 in Fig. 11. With the weights of the file, the mean length over a road's own, and
scales fitted as above the exact kernel hardly predicts better than the mean of all sensors does.
The table "predictors" says why. It has, over the same splits, the errors of that mean, of the mean
of the nearest 5 sensors, and of Gaussian processes with both kinds of weights: with scales fitted
under the estimate, with those of the likelihood of the exact kernel, and of an estimate with the
latter scales by 16 walks.

Writes figure_4, figure_11 (csv, md, png) and predictors (csv, md) to --out.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import scipy.sparse

from experiments.common import harness, launch, statistics
from experiments.graphs import data
from experiments.graphs.regression import (
    P_HALT,
    Scales,
    Task,
    exact_kernel,
    fitted,
    law,
    likeliest,
    load,
    nearest,
    rmse,
)
from performer import gp
from performer.graphs import couplings, features, kernels, matching
from performer.graphs.couplings import Coupling
from vit import report

MESHES = ("teapot", "unit_sphere", "idler_riser", "fandisk")
ORDER, NEIGHBOURS, MOST_WALKS = 50, 5, 16
QUANTITIES = ("error", "RMSE", "KL")


def scores(
    task: Task, scales: Scales, exact: np.ndarray, reference: gp.Gaussian, phi: Any
) -> tuple[float, float, float]:
    """Error, RMSE and KL of the features `phi`; `reference` is the law under `exact`."""
    predicted = law(task, phi @ phi.T, scales)
    with jax.enable_x64(True):
        divergence = float(gp.kl(reference, predicted))
    error = float(data.frobenius_errors(phi, exact)[0])
    return error, rmse(task, predicted.mean), divergence


def estimated(
    task: Task, scales: Scales, repeat: int, num_walks: int, coupling: str | Coupling
) -> scipy.sparse.csr_array:
    """The features of all nodes."""
    walks = features.sample(
        jax.random.key(repeat), task.graph, num_walks=num_walks, p_halt=P_HALT, coupling=coupling
    )
    phi = features.modulate(walks, kernels.diffusion(scales.lengthscale))
    return scipy.sparse.csr_array(phi.to_scipy(), dtype=np.float64)


def compared(task: Task, scales: Scales, repeats: int) -> tuple[dict, float]:
    """{(m, coupling): (repeats, 3)}, and the RMSE of the exact kernel."""
    kernel, exact = kernels.diffusion(scales.lengthscale), exact_kernel(task, scales)
    reference = law(task, exact, scales)
    permutation = matching.learn(data.erdos_renyi(), kernel, p_halt=P_HALT, order=ORDER)
    chosen: dict[str, str | Coupling] = {name: name for name in ("independent", "antithetic")}
    chosen["sigma"] = couplings.sigma(permutation)
    results = {
        (m, name): np.array([
            scores(task, scales, exact, reference, estimated(task, scales, repeat, m, coupling))
            for repeat in range(repeats)
        ])
        for m in task.walks
        for name, coupling in chosen.items()
    }  # fmt: skip
    return results, rmse(task, reference.mean)


def averaged(name: str, splits: Sequence[Task], repeats: int) -> tuple[dict, str]:
    """What `compared` has, each repeat the mean over the splits, and a line about the scales."""
    scales = [fitted(task) for task in splits]
    parts = [compared(task, found, repeats) for task, found in zip(splits, scales, strict=True)]
    results = {key: np.mean([part[key] for part, _ in parts], axis=0) for key in parts[0][0]}
    texts = (", ".join(f"{x:.3g}" for x in of) for of in zip(*scales, strict=True))
    told = "; ".join(f"{key} {x}" for key, x in zip(Scales._fields, texts, strict=True))
    least = np.mean([error for _, error in parts])
    without = np.mean([rmse(task, 0.0) for task in splits])
    said = f"RMSE of the exact kernel {least:.4g}, of no prediction {without:.4g}."
    return results, f"- {name} (splits: {len(splits)}): {told}; {said}"


def figure(tasks: Mapping[str, Sequence[Task]], repeats: int, out: Path) -> str:
    """A line for each graph, m and coupling; a panel for each quantity and graph."""
    rows, said = [], []
    for name, splits in tasks.items():
        results, line = averaged(name, splits, repeats)
        for (m, coupling), values in results.items():
            case = {"graph": name, "N": splits[0].graph.num_nodes, "m": m, "coupling": coupling}
            rows += harness.rows_of(case, values, quantity=QUANTITIES)
        said.append(line)
        print(out.name, line, flush=True)
    by_quantity = harness.grouped(rows, "{quantity}")
    harness.figure(
        [row for group in by_quantity.values() for row in group],
        out,
        x="m",
        panel="{graph}, N = {N}: {quantity}",
        columns=len(tasks),
        ylabel="",
    )
    for quantity, group in by_quantity.items():
        said.append(f"\n{quantity}:\n\n{harness.verdict(group, '{graph}, m = {m}')}")
    return report.table(harness.wide(rows, "{quantity}"), out, "\n".join(said))


def predictors(roads: Mapping[str, Sequence[Task]], out: Path) -> str:
    """A row for each way to predict, means over splits; `roads` has the tasks of each weighting."""
    weighted = next(iter(roads.values()))
    mean = np.array([rmse(task, 0.0) for task in weighted])
    close = [rmse(task, nearest(task, NEIGHBOURS)) for task in weighted]
    found = {"mean of all sensors": (mean, ""), f"mean of the nearest {NEIGHBOURS}": (close, "")}
    for kind, splits in roads.items():
        for how, fit in (("fitted", fitted), ("likeliest", likeliest)):
            scales = [fit(task) for task in splits]
            texts = " ".join(f"{of.lengthscale:.3g}" for of in scales)
            pairs = [process_errors(task, of) for task, of in zip(splits, scales, strict=True)]
            exact, estimates = np.transpose(pairs)
            found[f"{kind}, {how}, exact"] = exact, texts
            found[f"{kind}, {how}, {MOST_WALKS} walks"] = estimates, texts
        print(out.name, kind, flush=True)
    rows = [
        {
            "predictor": name,
            "RMSE": statistics.estimate(errors),
            "RMSE less that of the mean": statistics.estimate(errors - mean),
            "lengthscales": lengthscales,
        }
        for name, (errors, lengthscales) in found.items()
    ]
    return report.table(rows, out)


def process_errors(task: Task, scales: Scales) -> tuple[float, float]:
    """RMSE of the exact kernel, and of its estimate by `MOST_WALKS` independent walks."""
    phi = estimated(task, scales, 0, MOST_WALKS, "independent")
    grams = exact_kernel(task, scales), phi @ phi.T
    exact, estimate = (rmse(task, law(task, gram, scales).mean) for gram in grams)
    return exact, estimate


def main(
    data_dir: Path | None = None,
    graphs: Sequence[str] = (),
    repeats: int = 10,
    splits: int = 10,
    out: Path = Path("results/graphs/gp"),
) -> None:
    """Prints the tables.

    Args:
        data_dir: folder with meshes/ and traffic_san_jose/; a torus without.
        graphs: names of meshes, "traffic" or "torus"; those of the paper.
        repeats: of the walks; four times as many of traffic.
        splits: of the sensors of traffic into known ones and others.
        out: folder for tables and figures.
    """
    launch.at_least(2, repeats=repeats, splits=splits)
    names = graphs or ([*MESHES, "traffic"] if data_dir else ["torus"])
    meshes = {name: [load(name, data_dir)] for name in names if name != "traffic"}
    if meshes:
        print(figure(meshes, repeats, out / "figure_4"))
    if "traffic" in names:
        roads = {
            kind: [
                load("traffic", data_dir, number, weighted=kind != "weights 1")
                for number in range(splits)
            ]
            for kind in ("weights 1 / length", "weights 1")
        }
        print(predictors(roads, out / "predictors"))
        print(figure({"traffic": roads["weights 1"]}, 4 * repeats, out / "figure_11"))


if __name__ == "__main__":
    launch.run(main, quick={"repeats": 2, "splits": 2})
