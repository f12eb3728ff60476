"""Speed of the samplers, of attention and of a training step.

    performer-vit benchmark couplings
    performer-vit benchmark attention --quick
    performer-vit benchmark attention --lengths=197,1024,4096,16384,65536
    performer-vit benchmark attention --lengths=1024,4096 --names=ours,"window 16"
    performer-vit benchmark recipes
    performer-vit benchmark vit --quick
    performer-vit benchmark gpu
    performer-vit benchmark photographs --data=data
    performer-vit benchmark converted --runs=runs/softmax,runs/converted

`couplings`: milliseconds of one draw (m = 128, d = 64) and of 144 at once (12 layers x 12 heads),
jitted, warm, the best of 7; and the ratio of dense to structured products of 1,024 vectors with d
frequencies.

`attention`: see `vit.speed.attention`. With --quick all lengths are a 16th, a trial run
whose numbers mean nothing. With --lengths, values against float64, then times by the number of
tokens with exact and cuDNN's attention, for the first ten minutes on a device:
`vit.speed.lengths`.

`recipes`: attention by the sizes that `performer.linearize` tries, and the coefficients of their
costs: `vit.speed.recipes`.

`vit`: a training step of a ViT-Ti, on a GPU or TPU ViT-B, with softmax, random features, and these
with an exact window, at 197, 785 and 3137 tokens: `vit.speed.vit`. With --quick at 17, 65
and 257.

`gpu`: all that a GPU has to show, in parts of ten minutes: `vit.speed.hour`.

`photographs`: ten classes of ImageNet at a low resolution, at a high one, and converted:
`vit.speed.photographs`.

`converted`: accuracy and speed of a trained run and its conversions, on the same pictures:
`vit.speed.converted`.

Tables and figures go to --out.
"""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax

from performer import couplings, structured
from vit.speed import attention, converted, hour, photographs, pytorch, recipes, vit
from vit.speed import lengths as by_length
from vit.study import harness, launch, timing

M, D, HEADS = 128, 64, 144
REPEATS = 7


def samplers() -> list[dict[str, Any]]:
    """Time each coupling."""
    rows = []
    keys = jax.random.split(jax.random.key(0), HEADS)
    for name in couplings.names():
        coupling: Any = couplings.get(name)
        draw = partial(coupling, m=M, d=D)
        one, many = jax.jit(draw), jax.jit(jax.vmap(draw))
        best = timing.race({"one": partial(one, keys[0]), "many": partial(many, keys)}, REPEATS)
        times = {"one draw, ms": best["one"], f"{HEADS} draws, ms": best["many"]}
        rows.append({"coupling": name} | {k: 1e3 * seconds.wall for k, seconds in times.items()})
    return rows


def products() -> list[dict[str, Any]]:
    """Time dense W x and structured W x, m = d."""
    rows = []
    dense, fast = jax.jit(lambda W, x: x @ W.T), jax.jit(lambda f, x: f.apply(x))
    for d in (256, 512, 1024, 2048, 4096):
        x = jax.random.normal(jax.random.key(1), (1024, d))
        for name in ("sorf", "fast-simrf"):
            frequencies = structured.draw(jax.random.key(0), d, d, simplex=name == "fast-simrf")
            calls = {"dense": partial(dense, frequencies.matrix(), x)}
            calls |= {"structured": partial(fast, frequencies, x)}
            best = timing.race(calls, REPEATS)
            row = {"coupling": name, "d": d}
            row |= {f"{kind}, ms": 1e3 * seconds.wall for kind, seconds in best.items()}
            ratio = best["dense"].wall / best["structured"].wall
            rows.append(row | {"dense / structured": ratio})
    return rows


def attention_tables(quick: bool, out: Path) -> None:
    """Print and write the tables of `performer_attention`."""
    scale = attention.Scale(repeats=2, divisor=16) if quick else attention.Scale()
    rows, times = attention.rounds(scale)
    if pytorch.is_installed():
        more, others = attention.pytorch_rounds(times, scale)
        rows, times = [*rows, *more], [*times, *others]
    harness.show(times, out / "times")
    harness.show([*rows, attention.decoding(scale)], out / "summary")
    harness.show(attention.crossover(scale), out / "crossover", attention.FIGURES)


def main(
    part: Literal["couplings", "attention", "recipes", "vit", "gpu", "photographs", "converted"],
    /,
    quick: bool = False,
    lengths: Sequence[int] = (),
    names: Sequence[str] = (),
    dtype: Literal["", "float32", "bfloat16"] = "",
    minutes: float = 9.0,
    patches: Sequence[int] = (16, 8, 4),
    data: Path = Path("data"),
    runs: Sequence[str] = (),
    images: int = 0,
    repeats: int = 20,
    out: Path = Path("results/benchmark"),
) -> None:
    """Print the tables.

    Args:
        part: part to measure.
        quick: a part of the length, or of an epoch, as a trial run.
        lengths: numbers of tokens for attention, instead of its tables.
        names: with --lengths, implementations, such as "ours" and "window 16"; else the device's.
        dtype: with --lengths, of the tokens; else float32 on a CPU and bfloat16 elsewhere.
        minutes: with gpu, photographs or --lengths, time after which nothing is begun; the same
            command goes on.
        patches: pixels of a patch of the ViT; 224 / patch squared plus one are its tokens.
        data: folder of prepared photographs.
        runs: with converted, folders of runs; the first of each size has softmax attention.
        images: with converted, pictures that are evaluated, 0 for all.
        repeats: with converted, timed passes of each run.
    """
    print(timing.hardware() + "\n")
    if quick and part != "couplings":
        print("Quick: a trial run. The numbers mean nothing.\n")
        out /= "quick"
    if part == "couplings":
        harness.show(samplers(), out / "samplers")
        harness.show(products(), out / "products")
    elif part == "attention" and lengths:
        by_length.measure(lengths, out, time.monotonic() + 60 * minutes, names, dtype)
    elif part == "gpu":
        hour.measure(out, minutes, quick)
    elif part == "photographs":
        photographs.measure(data, out, minutes, quick)
    elif part == "converted":
        converted.measure(runs, out, images, repeats=repeats)
    elif part == "attention":
        attention_tables(quick, out)
    elif part == "recipes":
        rows = recipes.measured(*((16, 2) if quick else ()))
        harness.show(rows, out / "times")
        harness.show(recipes.coefficients(rows), out / "coefficients")
    else:
        rows = vit.measured(patches, *((64, 2) if quick else ()))
        harness.show(rows, out / "vit", vit.FIGURES)


if __name__ == "__main__":
    launch.run(main)
