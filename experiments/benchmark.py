"""Speed of the samplers, of attention and of a training step.

    python -m experiments.benchmark couplings
    python -m experiments.benchmark attention --quick
    python -m experiments.benchmark attention --lengths=197,1024,4096,16384,65536
    python -m experiments.benchmark vit --quick

`couplings`: milliseconds of one draw (m = 128, d = 64) and of 144 at once (12 layers x 12 heads),
jitted, warm, the best of 7; and the ratio of dense to structured products of 1,024 vectors with d
frequencies.

`attention`: see `experiments.speed.attention`. With --quick all lengths are a 16th, a trial run
whose numbers mean nothing. With --lengths, values against float64, then times by the number of
tokens beside exact and cuDNN's attention, for the first ten minutes on a device:
`experiments.speed.lengths`.

`vit`: a training step of a ViT-Ti with softmax, random features, and these with an exact window, at
197, 785 and 3137 tokens: `experiments.speed.vit`. With --quick at 17, 65 and 257.

Tables and figures go to --out.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from experiments.common import harness, launch, timing
from experiments.speed import attention, samplers, vit
from experiments.speed import lengths as by_length


def of_attention(quick: bool, out: Path) -> None:
    """Print and write the tables of `performer_attention`."""
    scale = attention.Scale(repeats=2, divisor=16) if quick else attention.Scale()
    rows, times = attention.rounds(scale)
    harness.show(times, out / "times")
    harness.show([*rows, attention.decoding(scale)], out / "summary")
    harness.show(attention.crossover(scale), out / "crossover", attention.FIGURES)


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
        harness.show(samplers.samplers(), out / "samplers")
        harness.show(samplers.products(), out / "products")
    elif what == "attention" and lengths:
        by_length.measure(lengths, out, minutes)
    elif what == "attention":
        of_attention(quick, out)
    else:
        harness.show(vit.measured(64, 2) if quick else vit.measured(), out / "vit", vit.FIGURES)


if __name__ == "__main__":
    launch.run(main)
