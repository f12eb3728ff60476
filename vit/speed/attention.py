"""Speed and memory of `performer_attention`; `performer-vit benchmark` runs it.

m = 128 frequencies, heads of width 64. A pass is the output ("forward") or the output and the
gradients with respect to query, key and value ("forward + backward"): one compiled program, made in
the same way for every implementation of `vit.speed.baselines`, and timed as `vit.study.timing`
says. Where PyTorch is installed, its exact attention is also timed (`vit.speed.pytorch`). A ratio
of times comes twice: wall time, and time of all threads on the CPU. Passes are in float32 with
batch 1. `vit.speed.lengths` measures a GPU or TPU.
"""

import itertools
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax

from performer.attention import stream
from vit.speed import pytorch
from vit.speed.baselines import IMPLEMENTATIONS, inputs
from vit.study import harness, timing

Row = dict[str, Any]
FORWARD, BOTH = "forward", "forward + backward"
SIZES = ((1024, 12), (4096, 4), (16384, 1))
"""(tokens, heads)"""
EXACT_TOKENS = 4096
"""Most tokens of exact attention on a CPU."""
TOKENS_AND_HEADS = 16384
"""Product of tokens and heads in each case of `crossover`."""
CROSSOVER = ("exact", "public", "ours", "ours, causal")
FIGURES: harness.Figures = {
    "crossover": dict(
        change=lambda rows: harness.melt(rows, CROSSOVER),
        x="tokens",
        line="{line}",
        log="xy",
        ylabel="time per token and head (ns)",
    )
}


class Scale(NamedTuple):
    """Amount of work: everything, or with --quick a 16th of the tokens and few repeats."""

    repeats: int = 7
    divisor: int = 1


ROUNDS = (
    (BOTH, "ours", ("exact", "public")),
    (BOTH, "ours, causal", ("exact, causal", "public, causal")),
    (FORWARD, "ours", ("exact",)),
    (FORWARD, "ours, causal", ("exact, causal", "public, causal")),
)
"""Pass, baseline of the comparison, and the implementations that take turns with it."""


def program(name: str, which: str, args: list[jax.Array]) -> timing.Program:
    """Compile one implementation for one pass."""
    function = IMPLEMENTATIONS[name]

    def both(query, key, value, frequencies, gradient):
        output, pull = jax.vjp(lambda *qkv: function(*qkv, frequencies), query, key, value)
        return output, pull(gradient)

    return timing.compiled(both, *args) if which == BOTH else timing.compiled(function, *args[:4])


def measured(
    programs: dict[str, timing.Program], which: str, shape: Sequence[int], repeats: int
) -> dict[str, Row]:
    """Time programs in turn (`timing.race`); return a row of the table of times for each."""
    best = timing.race({name: each.call for name, each in programs.items()}, repeats)
    return {
        name: {
            "implementation": name,
            "pass": which,
            "shape": "x".join(map(str, shape)),
            "wall, ms": 1e3 * best[name].wall,
            "CPU, ms": 1e3 * best[name].cpu,
            "compilation, s": each.compile_seconds,
            "temporary, MiB": each.temporary_bytes / 2**20,
        }
        for name, each in programs.items()
    }


def versus(names: str, case: str, above: Row, below: Row) -> Row:
    """Return a row of the summary with the ratio of two times."""
    wall, cpu = (above[key] / below[key] for key in ("wall, ms", "CPU, ms"))
    return {"quantity": f"time: {names}", "case": case, "measured": wall, "by CPU time": cpu}


def feasible(names: Iterable[str], tokens: int) -> list[str]:
    """Return the names without exact attention where it takes too long."""
    short = jax.default_backend() != "cpu" or tokens <= EXACT_TOKENS
    return [name for name in names if short or not name.startswith("exact")]


def rounds(scale: Scale) -> tuple[list[Row], list[Row]]:
    """Return ratios of times and memory of `ROUNDS`, and all the times behind them."""
    rows, times = [], []
    for (which, base, others), (full, heads) in itertools.product(ROUNDS, SIZES):
        tokens = max(full // scale.divisor, 16)
        args = inputs(tokens, heads)
        names = feasible((base, *others), tokens)
        programs = {name: program(name, which, args) for name in names}
        here = measured(programs, which, args[0].shape, scale.repeats)
        times += here.values()
        case = f"{which}, N = {tokens}, H = {heads}"
        for name in names[1:]:
            rows.append(versus(f"{name} / {base}", case, here[name], here[base]))
            ratio = here[base]["temporary, MiB"] / here[name]["temporary, MiB"]
            quantity = {"quantity": f"temporary memory: {base} / {name}", "case": case}
            rows.append(quantity | {"measured": ratio, "by CPU time": ""})
    return rows, times


def pytorch_rounds(times: Sequence[Row], scale: Scale) -> tuple[list[Row], list[Row]]:
    """Return the ratios of PyTorch's exact attention to these times, and its own times.

    It has a process of its own, after these; the strongest exact attention on a CPU.
    """
    rows, more = [], []
    for full, heads in SIZES:
        tokens = max(full // scale.divisor, 16)
        if tokens > EXACT_TOKENS:
            continue
        shape = "x".join(map(str, inputs(tokens, heads)[0].shape))
        for name, passes in pytorch.seconds(tokens, heads, scale.repeats).items():
            base = name.replace("exact", "ours")
            for which, seconds in passes.items():
                row = {"implementation": f"PyTorch, {name}", "pass": which, "shape": shape}
                more.append(dict.fromkeys(times[0], "") | row | {"wall, ms": 1e3 * seconds})
                key = {"implementation": base, "pass": which, "shape": shape}
                ours = next(x for x in times if key.items() <= x.items())
                case = f"{which}, N = {tokens}, H = {heads}"
                ratio = {"measured": 1e3 * seconds / ours["wall, ms"], "by CPU time": ""}
                rows.append({"quantity": f"time: PyTorch, {name} / {base}", "case": case} | ratio)
    return rows, more


def decoding(scale: Scale, heads: int = 12) -> Row:
    """Time sixteen tokens one by one, after many tokens and after few."""
    step, token = jax.jit(stream), inputs(1, heads)[:4]

    def decode(state: Any) -> Any:
        for _ in range(16):
            _, state = step(*token, state)
        return state

    lengths, programs = (65536 // scale.divisor, 1024 // scale.divisor), {}
    for length in lengths:
        _, state = jax.block_until_ready(step(*inputs(length, heads)[:4]))
        programs[str(length)] = timing.Program(partial(decode, state), 0.0, 0)
    shape, repeats = token[0].shape, max(50 // scale.divisor, 7)
    long, short = measured(programs, FORWARD, shape, repeats).values()
    case = f"decoding step after {lengths[0]} / {lengths[1]} tokens, H = {heads}"
    return versus("ours, causal", case, long, short)


def crossover(scale: Scale) -> list[Row]:
    """Time attention against the number of tokens, in nanoseconds per token and head.

    Forward + backward, for about 16,384 tokens x heads: where a curve rises, attention costs more
    than linear.
    """
    total, rows = TOKENS_AND_HEADS // scale.divisor, []
    for tokens in (2**i for i in range(7, total.bit_length())):
        heads = total // tokens
        args = inputs(tokens, heads)
        programs = {name: program(name, BOTH, args) for name in feasible(CROSSOVER, tokens)}
        here = measured(programs, BOTH, args[0].shape, scale.repeats)
        times = {name: 1e6 * each["wall, ms"] / (tokens * heads) for name, each in here.items()}
        rows.append({"tokens": tokens, "heads": heads, "exact": "", **times})
    return rows
