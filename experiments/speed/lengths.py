"""More of `attention`: all lengths in one figure, another package, another device.

The figure has the time of a token and head, forward + backward, for about 16,384 tokens x heads:
where a curve rises, attention costs more than linear. `performer_pytorch` (lucidrains) is measured
where it is installed together with torch; it is no dependency. `gpu` measures forward passes in
bfloat16 on a GPU, twenty queued at a time.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments.common import harness, timing
from experiments.speed import baselines
from experiments.speed.attention import (
    BOTH,
    FORWARD,
    SIZES,
    Scale,
    measure,
    measurements,
    program,
    row,
    versus,
)

TOKENS_AND_HEADS = 16384
EXACT_TOKENS = 4096
"""On a CPU exact attention is measured with up to so many."""
ROOF = 0.187e-3
"""Seconds of the longest pass on an H200 if nothing but its inputs and output were in memory."""


def crossover(scale: Scale, out: Path) -> list[dict[str, Any]]:
    """Nanoseconds per token and head against the number of tokens; draws `out`.png."""
    total = TOKENS_AND_HEADS // scale.divisor
    sizes = [2**i for i in range(7, total.bit_length())]
    on_cpu = jax.default_backend() == "cpu"
    rows = []
    for tokens in sizes:
        heads = total // tokens
        names = ["exact", "public", "ours", "ours, causal"]
        if on_cpu and tokens > EXACT_TOKENS:
            names.remove("exact")
        results = measure(names, BOTH, baselines.inputs(tokens, heads), scale.repeats)
        times = {name: 1e9 * r.best.wall / (tokens * heads) for name, r in results.items()}
        rows.append({"tokens": tokens, "heads": heads, "exact": "", **times})
    harness.figure(
        harness.melted(rows, ("exact", "public", "ours", "ours, causal")),
        out,
        x="tokens",
        line="{line}",
        log=True,
        ylabel="time per token and head, ns",
        title=f"{BOTH}, m = {baselines.M}, d = {baselines.D}, float32",
    )
    return rows


def package(scale: Scale) -> list[dict[str, Any]]:
    """Ours against `performer_pytorch`, bidirectional; no rows where that is not installed."""
    rows = []
    for full, heads in SIZES:
        tokens = full // scale.divisor
        args = baselines.inputs(tokens, heads)
        query, key, value, _, gradient = args
        other = baselines.torch_call(query, key, value, gradient)
        if other is None:
            break
        calls = {"ours": program("ours", BOTH, args).call, "other": other}
        best = timing.race(calls, scale.repeats)
        rows.append(
            {
                "pass": f"{BOTH}, N = {tokens}, H = {heads}",
                "ours, ms": 1e3 * best["ours"].wall,
                "performer_pytorch, ms": 1e3 * best["other"].wall,
                "performer_pytorch / ours": best["other"].wall / best["ours"].wall,
                "by CPU time": best["other"].cpu / best["ours"].cpu,
            }
        )
    return rows


def gpu(scale: Scale) -> tuple[list[dict], list[dict]]:
    """Ratios of times on a GPU, and the times behind them."""
    times, rows, heads, batch = [], [], 12, 8
    for full, names in (
        (4096, ["ours", "cuDNN", "ours, causal"]),
        (16384, ["ours", "cuDNN"]),
    ):
        args = baselines.inputs(full // scale.divisor, heads, batch, jnp.bfloat16)
        case = f"{FORWARD}, bfloat16, B = {batch}, H = {heads}, N = {full // scale.divisor}"
        results = measure(names, FORWARD, args, scale.repeats, queued=20)
        best = {name: result.best for name, result in results.items()}
        rows.append(versus("cuDNN / ours", case, best["cuDNN"], best["ours"]))
        if full == 4096:
            # Thousands of small programs a call: queued ones would change nothing.
            results |= measure(["public, causal"], FORWARD, args, scale.repeats)
            slow, fast = results["public, causal"].best, best["ours, causal"]
            rows.append(versus("public, causal / ours, causal", case, slow, fast))
        else:
            roof = ROOF / scale.divisor
            rows.append(row("time: memory traffic alone / ours", case, roof / best["ours"].wall))
        times += measurements(results, FORWARD, args[0].shape)
    return rows, times
