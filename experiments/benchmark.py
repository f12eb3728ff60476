"""Speed of the samplers, of attention and of the input pipeline.

    python -m experiments.benchmark couplings
    python -m experiments.benchmark attention [--quick]
    python -m experiments.benchmark vit [--quick]
    taskset -c 0 python -m experiments.benchmark data [--images=DIR]

`couplings`: warm and jitted, keys as arguments. Prints milliseconds of one draw (m = 128, d = 64)
and of 144 at once (12 layers x 12 heads), the best of 7; how often the sampler was traced over all
keys; and the ratio of dense to structured products of 1,024 vectors with d frequencies,
implementations in turn.

`attention`: `benchmark_attention` says what is measured, `benchmark_lengths` what besides, and
`benchmark_kernels` what on a TPU. With --quick everything runs at a 16th of the length, to see that
it runs: the numbers mean nothing.

`vit`: a training step of a ViT-Ti with softmax, random features, and these with an exact window, at
197, 785 and 3137 tokens: `benchmark_vit`. With --quick at 17, 65 and 257.

`data`: images per second of one core, of the JPEG files in a folder (those that come with
scikit-learn if none is given), beside tf.data; `benchmark_data` says what differs. Then the
same from storage that answers late.

Tables and figures go to results/benchmark.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import jax

from experiments import (
    benchmark_attention,
    benchmark_data,
    benchmark_kernels,
    benchmark_lengths,
    benchmark_vit,
    timing,
)
from performer import couplings, structured
from vit import report

M, D, HEADS = 128, 64, 144
REPEATS = 7
OUT = Path("results/benchmark")


def samplers() -> list[dict[str, Any]]:
    """One row for each coupling."""
    rows = []
    keys = jax.random.split(jax.random.key(0), HEADS)
    for name in couplings.names():
        coupling, traces = couplings.get(name), []

        def draw(key, coupling=coupling, traces=traces):
            traces.append(None)
            return coupling(key, M, D)

        one, many = (
            jax.jit(draw),
            jax.jit(jax.vmap(lambda key, coupling=coupling: coupling(key, M, D))),
        )
        best = timing.race({"one": partial(one, keys[0]), "many": partial(many, keys)}, REPEATS)
        for key in keys[:REPEATS]:
            one(key)
        rows.append(
            {
                "coupling": name,
                "one draw, ms": 1e3 * best["one"].wall,
                "144 draws, ms": 1e3 * best["many"].wall,
                "traces": len(traces),
            }
        )
    return rows


def products() -> list[dict[str, Any]]:
    """Dense W x against structured W x, m = d."""
    rows = []
    for d in (256, 512, 1024, 2048, 4096):
        x = jax.random.normal(jax.random.key(1), (1024, d))
        for name in ("sorf", "fast-simrf"):
            frequencies = structured.draw(jax.random.key(0), d, d, simplex=name == "fast-simrf")
            W = frequencies.matrix()
            dense = jax.jit(lambda W, x: x @ W.T)
            fast = jax.jit(lambda f, x: f.apply(x))
            best = timing.race(
                {"dense": partial(dense, W, x), "fast": partial(fast, frequencies, x)}, REPEATS
            )
            rows.append(
                {
                    "coupling": name,
                    "d": d,
                    "dense, ms": 1e3 * best["dense"].wall,
                    "structured, ms": 1e3 * best["fast"].wall,
                    "dense / structured": best["dense"].wall / best["fast"].wall,
                }
            )
    return rows


def attention(quick: bool) -> None:
    """Prints and writes the tables of `performer_attention`."""
    scale, out = benchmark_attention.Scale(), OUT
    if quick:
        scale, out = benchmark_attention.Scale(repeats=2, divisor=16), OUT / "quick"
        print("Quick: short sequences, few repeats. The numbers mean nothing.\n")
    for name, rows in benchmark_attention.tables(scale):
        print(report.table(rows, out / name), flush=True)
    print("Nanoseconds per token and head, forward + backward\n")
    print(report.table(benchmark_lengths.crossover(scale, out / "crossover"), out / "crossover"))
    if jax.default_backend() == "cpu":
        rows = benchmark_lengths.package(scale)
        print(report.table(rows, out / "package") if rows else "performer_pytorch: not installed\n")
    accelerators = {"gpu": benchmark_lengths.gpu, "tpu": benchmark_kernels.tpu}
    if (platform := jax.default_backend()) in accelerators:
        rows, times = accelerators[platform](scale)
        print(report.table(times, out / f"times_{platform}"))
        print(report.table(rows, out / f"summary_{platform}"))
    if platform != "tpu":
        print(f"implementation='pallas': its kernel is for TPUs, not measured on {platform}")


def training_steps(quick: bool) -> None:
    """Prints, writes and draws the table of a ViT."""
    out = OUT / ("quick/vit" if quick else "vit")
    rows = benchmark_vit.measured(64, 2) if quick else benchmark_vit.measured()
    benchmark_vit.draw(rows, out)
    print(report.table(rows, out))


def pipeline(images: Path) -> None:
    """Prints and writes the table of the input pipeline."""
    files = benchmark_data.read(images)
    rows, compared = benchmark_data.rates(files)
    print(report.table(rows, OUT / f"data_{images.name}"))
    print("Records that come 30 ms late\n")
    print(report.table(benchmark_data.waiting(files), OUT / f"late_{images.name}"))
    if not compared:
        print("tf.data: tensorflow is not installed")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.benchmark",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(
        dest="what",
        required=True,
        metavar="{couplings,attention [--quick],vit [--quick],data [--images=DIR]}",
    )
    commands.add_parser("couplings", help="speed of the samplers")
    command = commands.add_parser("attention", help="speed, memory, exactness of attention")
    command.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    command = commands.add_parser("vit", help="a training step by the number of tokens")
    command.add_argument("--quick", action="store_true", help="small pictures, to see that it runs")
    command = commands.add_parser("data", help="images per second of the input pipeline")
    command.add_argument("--images", type=Path, help="folder of JPEG files")
    arguments = parser.parse_args()
    print(timing.machine() + "\n")
    if arguments.what == "data":
        pipeline(arguments.images or benchmark_data.sample_images())
        return
    if arguments.what in ("attention", "vit"):
        (attention if arguments.what == "attention" else training_steps)(arguments.quick)
        return
    print(report.table(samplers(), OUT / "samplers"))
    print(report.table(products(), OUT / "products"))


if __name__ == "__main__":
    main()
