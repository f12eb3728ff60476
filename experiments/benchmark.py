"""Speed of the samplers, of attention and of a training step.

    python -m experiments.benchmark couplings
    python -m experiments.benchmark attention --quick
    python -m experiments.benchmark attention --lengths=197,1024,4096,16384,65536
    python -m experiments.benchmark vit --quick

`couplings`: milliseconds of one draw (m = 128, d = 64) and of 144 at once (12 layers x 12 heads),
jitted, warm, the best of 7; and the ratio of dense to structured products of 1,024 vectors with d
frequencies.

`attention`: see `experiments.speed.attention`. A GPU or TPU adds a second table. With --quick all
lengths are a 16th, a trial run whose numbers mean nothing. With --lengths, values against float64,
then times by the number of tokens beside exact and cuDNN's attention, for the first ten minutes on
a device: `experiments.speed.lengths`.

`vit`: a training step of a ViT-Ti with softmax, random features, and these with an exact window, at
197, 785 and 3137 tokens: `experiments.speed.vit`. With --quick at 17, 65 and 257.

Tables and figures go to --out.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jax

from experiments.common import harness, launch, timing
from experiments.speed import attention, samplers, vit
from experiments.speed import lengths as by_length
from vit.reports import report


def of_attention(quick: bool, out: Path) -> None:
    """Print and write the tables of `performer_attention`."""
    scale = attention.Scale(repeats=2, divisor=16) if quick else attention.Scale()
    rows, times = attention.rounds("", scale)
    print(report.table(times, out / "times"), flush=True)
    rows.append(attention.decoding(scale))
    print(report.table(rows, out / "summary"), flush=True)
    print("Nanoseconds per token and head, forward + backward\n")
    times = attention.crossover(scale)
    print(harness.write(times, out / "crossover", attention.FIGURES["crossover"]))
    if (platform := jax.default_backend()) in attention.ROUNDS:
        rows, times = attention.rounds(platform, scale)
        print(report.table(times, out / f"times_{platform}"))
        print(report.table(rows, out / f"summary_{platform}"))


def main(
    what: Literal["couplings", "attention", "vit"],
    /,
    quick: bool = False,
    lengths: Sequence[int] = (),
    minutes: float = 9.0,
    out: Path = Path("results/benchmark"),
) -> None:
    """Print the tables.

    Args:
        what: part to measure.
        quick: attention and vit at a part of the length, as a trial run.
        lengths: numbers of tokens for attention, instead of its tables.
        minutes: with --lengths, time after which nothing is begun; the same command goes on.
    """
    print(timing.hardware() + "\n")
    if quick and what in ("attention", "vit"):
        print("Quick: short sequences, few repeats. The numbers mean nothing.\n")
        out /= "quick"
    if what == "couplings":
        print(report.table(samplers.samplers(), out / "samplers"))
        print(report.table(samplers.products(), out / "products"))
    elif what == "attention" and lengths:
        print(by_length.measure(lengths, out, minutes))
    elif what == "attention":
        of_attention(quick, out)
    else:
        rows = vit.measured(64, 2) if quick else vit.measured()
        print(harness.write(rows, out / "vit", vit.FIGURES["vit"]))


if __name__ == "__main__":
    launch.run(main)
