"""Speed and memory of `performer_attention`; `python -m experiments.benchmark` runs it.

m = 128 frequencies, heads of width 64. A pass is the output ("forward") or the output and the
gradients with respect to query, key and value ("forward + backward"): one compiled program, made in
the same way for every implementation of `experiments.speed.baselines`, and timed as
`experiments.common.timing` says. A ratio of times comes twice: wall time, and time of all threads
on the CPU. Everywhere passes are in float32 with batch 1; a GPU and a TPU have rounds of their own
in bfloat16, twenty passes queued at a time.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.common import harness, timing
from experiments.speed.baselines import IMPLEMENTATIONS, inputs
from performer import performer_attention

Row = dict[str, Any]
FORWARD, BOTH = "forward", "forward + backward"
SIZES = ((1, 1024, 12), (1, 4096, 4), (1, 16384, 1))
"""(batch, tokens, heads)"""
EXACT_TOKENS = 4096
"""Most tokens of exact attention on a CPU."""
TOKENS_AND_HEADS = 16384
"""Product of tokens and heads in each case of `crossover`."""
CROSSOVER = ("exact", "public", "ours", "ours, causal")
FIGURES: harness.Figures = {
    "crossover": dict(
        columns=CROSSOVER,
        x="tokens",
        line="{line}",
        log="xy",
        ylabel="time per token and head (ns)",
    )
}
DIFFERENCE = 0.03
"""Bound of the error by bfloat16 in output and gradients, relative to their norm."""


class Scale(NamedTuple):
    """Amount of work: everything, or with --quick a 16th of the tokens and few repeats."""

    repeats: int = 7
    divisor: int = 1


class Round(NamedTuple):
    """Implementations that take turns, at each size."""

    which: str
    """The pass."""
    base: str
    """Baseline of the comparison."""
    others: tuple[str, ...]
    sizes: tuple[tuple[int, int, int], ...] = SIZES


TPU_SIZES = (64, 197, 12), (4, 4096, 12)
ROUNDS = {
    "": (
        Round(BOTH, "ours", ("exact", "public")),
        Round(BOTH, "ours, causal", ("exact, causal", "public, causal")),
        Round(FORWARD, "ours, causal", ("public, causal",)),
    ),
    "gpu": (
        Round(FORWARD, "ours", ("cuDNN",), ((8, 4096, 12), (8, 16384, 12))),
        Round(FORWARD, "ours, causal", ("public, causal",), ((8, 4096, 12),)),
    ),
    "tpu": (
        Round(FORWARD, "kernel", ("ours",), TPU_SIZES),
        Round(BOTH, "kernel", ("ours",), TPU_SIZES),
        Round(FORWARD, "kernel, causal", ("ours, causal",), TPU_SIZES[1:]),
        Round(BOTH, "kernel, causal", ("ours, causal",), TPU_SIZES[1:]),
    ),
}
"""Rounds of all machines, and of each kind of accelerator."""


def program(name: str, which: str, args: list[jax.Array]) -> timing.Program:
    """Compile one implementation for one pass."""
    function = IMPLEMENTATIONS[name]

    def both(query, key, value, frequencies, gradient):
        output, pull = jax.vjp(lambda *qkv: function(*qkv, frequencies), query, key, value)
        return output, pull(gradient)

    return timing.compiled(both, *args) if which == BOTH else timing.compiled(function, *args[:4])


def measured(
    programs: dict[str, timing.Program], which: str, shape: Sequence[int], **turns: int
) -> dict[str, Row]:
    """Time programs in turn (`timing.race`); return a row of the table of times for each."""
    best = timing.race({name: each.call for name, each in programs.items()}, **turns)
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


def row(quantity: str, case: str, measured: float, cpu: float | str = "") -> Row:
    """Return a row of the summary."""
    return {"quantity": quantity, "case": case, "measured": float(measured), "by CPU time": cpu}


def versus(names: str, case: str, above: Row, below: Row) -> Row:
    """Return a row of the summary with the ratio of two times."""
    wall, cpu = (above[key] / below[key] for key in ("wall, ms", "CPU, ms"))
    return row(f"time: {names}", case, wall, cpu)


def feasible(names: Iterable[str], tokens: int) -> list[str]:
    """Return the names without exact attention where it takes too long."""
    short = jax.default_backend() != "cpu" or tokens <= EXACT_TOKENS
    return [name for name in names if short or not name.startswith("exact")]


def rounds(kind: str, scale: Scale) -> tuple[list[Row], list[Row]]:
    """Return ratios of times and memory of `ROUNDS`, and all the times behind them.

    Raises:
        ValueError: by `difference`, before a kernel is timed.
    """
    rows, times = [], []
    dtype, queued = (jnp.bfloat16, 20) if kind else (jnp.float32, 1)
    for which, base, others, sizes in ROUNDS[kind]:
        for batch, full, heads in sizes:
            tokens = max(full // scale.divisor, 16)
            args = inputs(tokens, heads, batch, dtype)
            names = feasible((base, *others), tokens)
            programs = {name: program(name, which, args) for name in names}
            case = f"{which}, N = {tokens}, H = {heads}" + f", B = {batch}, bfloat16" * bool(kind)
            if base.startswith("kernel"):
                found = difference(*(each.call() for each in programs.values()))
                rows.append(row(f"relative difference: {' / '.join(names)}", case, found))
            turns = dict(repeats=scale.repeats, queued=queued)
            here = measured(programs, which, args[0].shape, **turns)
            times += here.values()
            for name in names[1:]:
                rows.append(versus(f"{name} / {base}", case, here[name], here[base]))
                ratio = here[base]["temporary, MiB"] / here[name]["temporary, MiB"]
                rows.append(row(f"temporary memory: {base} / {name}", case, ratio))
    return rows, times


def difference(kernel: Any, without: Any) -> float:
    """Return the largest relative difference of the output, and of any gradients.

    Raises:
        ValueError: for a difference above the error of bfloat16.
    """
    pairs = zip(jax.tree.leaves(kernel), jax.tree.leaves(without), strict=True)
    found = [relative(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
    if not max(found) < DIFFERENCE:
        raise ValueError(
            f"the kernel's output and gradients differ by {found} from those without it, more than"
            f" {DIFFERENCE}: do not use implementation='pallas' here, and report it"
        )
    return max(found)


def relative(value: np.ndarray, exact: np.ndarray) -> float:
    """Return |value - exact| / |exact|."""
    return float(np.linalg.norm(value - exact) / np.linalg.norm(exact))


def decoding(scale: Scale, heads: int = 12) -> Row:
    """Time sixteen tokens one by one, after many tokens and after few."""
    causal = partial(performer_attention, is_causal=True, return_state=True)
    step, token = jax.jit(causal), inputs(1, heads)[:4]

    def decode(state: Any) -> Any:
        for _ in range(16):
            _, state = step(*token, initial_state=state)
        return state

    lengths, programs = (65536 // scale.divisor, 1024 // scale.divisor), {}
    for length in lengths:
        _, state = jax.block_until_ready(jax.jit(causal)(*inputs(length, heads)[:4]))
        programs[str(length)] = timing.Program(partial(decode, state), 0.0, 0)
    shape, repeats = token[0].shape, max(50 // scale.divisor, 7)
    long, short = measured(programs, FORWARD, shape, repeats=repeats).values()
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
        here = measured(programs, BOTH, args[0].shape, repeats=scale.repeats)
        times = {name: 1e6 * each["wall, ms"] / (tokens * heads) for name, each in here.items()}
        rows.append({"tokens": tokens, "heads": heads, "exact": "", **times})
    return rows
