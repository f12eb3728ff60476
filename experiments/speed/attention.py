"""Speed, memory and exactness of `performer_attention`; `python -m experiments.benchmark` runs it.

m = 128 frequencies, heads of width 64, batch 1, float32. A pass is the output ("forward") or the
output and the gradients with respect to query, key and value ("forward + backward"): one compiled
program, made in the same way for every implementation of `experiments.speed.baselines`, and timed
as `experiments.common.timing` says. A ratio of times comes twice: wall time, and time of all
threads on the CPU.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.common import timing
from experiments.speed import baselines
from experiments.speed.baselines import IMPLEMENTATIONS, inputs
from performer import performer_attention
from vit import config, model

SIZES = ((1024, 12), (4096, 4), (16384, 1))
"""(tokens, heads)"""
FORWARD, BOTH = "forward", "forward + backward"


class Race(NamedTuple):
    """A ratio of times."""

    which: str
    slow: str
    fast: str
    sizes: int = len(SIZES)
    """At so many of `SIZES`, the first ones."""


AUTODIFF, REVERSE = "public, causal", "public, causal, reverse scan"
RACES = (
    Race(BOTH, "exact", "ours", 2),
    Race(BOTH, "public", "ours"),
    Race(BOTH, "exact, causal", "ours, causal", 2),
    Race(BOTH, AUTODIFF, "ours, causal"),
    Race(BOTH, REVERSE, "ours, causal"),
    Race(FORWARD, AUTODIFF, "ours, causal"),
)


class Scale(NamedTuple):
    """How much is measured: everything, or with --quick a 16th of the tokens and few repeats."""

    repeats: int = 7
    divisor: int = 1


class Result(NamedTuple):
    """What was measured of one implementation."""

    best: timing.Best
    program: timing.Program


def program(name: str, which: str, args: list[jax.Array]) -> timing.Program:
    """One implementation, compiled for one pass."""
    function = IMPLEMENTATIONS[name]

    def both(query, key, value, frequencies, gradient):
        output, pull = jax.vjp(lambda *qkv: function(*qkv, frequencies), query, key, value)
        return output, pull(gradient)

    return timing.compiled(both, *args) if which == BOTH else timing.compiled(function, *args[:4])


def measure(names: Sequence[str], which: str, args: list[jax.Array], repeats: int, queued: int = 1):
    """A `Result` for each name; the implementations take turns."""
    programs = {name: program(name, which, args) for name in names}
    best = timing.race({name: p.call for name, p in programs.items()}, repeats, queued)
    return {name: Result(best[name], programs[name]) for name in names}


def measurements(results: dict[str, Result], which: str, shape: Sequence[int]):
    """Rows of the table of all times."""
    for name, (best, compiled) in results.items():
        yield {
            "implementation": name,
            "pass": which,
            "shape": "x".join(map(str, shape)),
            "wall, ms": 1e3 * best.wall,
            "CPU, ms": 1e3 * best.cpu,
            "compilation, s": compiled.compile_seconds,
            "temporary, MiB": compiled.temporary_bytes / 2**20,
        }


def row(quantity: str, case: str, measured: float, cpu: float | str = "") -> dict:
    """A row of the table of what was measured."""
    return {
        "quantity": quantity,
        "case": case,
        "measured": float(measured),
        "by CPU time": cpu,
    }


def versus(names: str, case: str, above: timing.Best, below: timing.Best) -> dict:
    """A row with the ratio of two times."""
    return row(f"time: {names}", case, above.wall / below.wall, above.cpu / below.cpu)


def races(scale: Scale) -> tuple[list[dict], list[dict]]:
    """Ratios of times and of memory, and all the times behind them."""
    times, results = [], {}
    for i, (full, heads) in enumerate(SIZES):
        tokens = full // scale.divisor
        args = inputs(tokens, heads)
        for which in (FORWARD, BOTH):
            here = [race for race in RACES if race.which == which and i < race.sizes]
            names = list(dict.fromkeys(name for race in here for name in (race.fast, race.slow)))
            results[which, full] = measure(names, which, args, scale.repeats)
            times += measurements(results[which, full], which, args[0].shape)
    rows = []
    for which, slow, fast, sizes in RACES:
        for full, heads in SIZES[:sizes]:
            best = {name: results[which, full][name].best for name in (slow, fast)}
            case = f"{which}, N = {full // scale.divisor}, H = {heads}"
            rows.append(versus(f"{slow} / {fast}", case, best[slow], best[fast]))
    full, heads = SIZES[1]
    memory = {name: r.program.temporary_bytes for name, r in results[BOTH, full].items()}
    tokens = full // scale.divisor
    for fast, slow in (
        ("ours", "public"),
        ("ours, causal", AUTODIFF),
        ("ours, causal", REVERSE),
    ):
        case = f"{BOTH}, N = {tokens}, H = {heads}"
        rows.append(row(f"temporary memory: {fast} / {slow}", case, memory[fast] / memory[slow]))
    for name in ("ours", "ours, causal"):
        longer = program(name, BOTH, inputs(4 * tokens, heads)).temporary_bytes
        case = f"{BOTH}, N = {4 * tokens} / {tokens}, H = {heads}"
        rows.append(row(f"temporary memory: {name}", case, longer / memory[name]))
    return rows, times


PARTS = {
    FORWARD: {"projections": 2, "exponentials": 2, "over tokens": 1, "over features": 1},
    BOTH: {"projections": 6, "exponentials": 4, "over tokens": 2, "over features": 4},
}
"""How often attention does what: the backward pass computes features again."""


def alone(args: Sequence[jax.Array]) -> dict[str, timing.Program]:
    """What attention consists of, each by itself, on arrays that lie as it needs them."""
    query, _, value, frequencies = (x[0].swapaxes(0, 1) if x.ndim == 4 else x for x in args[:4])
    features = jnp.einsum("nth,mh->ntm", query, frequencies)
    state = jnp.einsum("ntm,ntv->nmv", features, value)
    return {
        "projections": timing.compiled(
            lambda x, w: jnp.einsum("nth,mh->ntm", x, w), query, frequencies
        ),
        "exponentials": timing.compiled(lambda x: jnp.exp(x - 1.0), features),
        "over tokens": timing.compiled(
            lambda f, v: jnp.einsum("ntm,ntv->nmv", f, v), features, value
        ),
        "over features": timing.compiled(
            lambda f, z: jnp.einsum("ntm,nmv->ntv", f, z), features, state
        ),
    }


def parts(scale: Scale) -> list[dict]:
    """Attention against the sum of its own parts, timed alone in the same turns."""
    rows = []
    for full, heads in SIZES:
        args = inputs(full // scale.divisor, heads)
        calls = {name: p.call for name, p in alone(args).items()}
        calls |= {which: program("ours", which, args).call for which in PARTS}
        best = timing.race(calls, scale.repeats)
        for which, often in PARTS.items():
            total = [sum(n * best[name][i] for name, n in often.items()) for i in range(2)]
            case = f"{which}, N = {full // scale.divisor}, H = {heads}"
            rows.append(versus("ours / its parts alone", case, best[which], timing.Best(*total)))
    return rows


def layer(scale: Scale) -> dict:
    """Forward and backward pass of a ViT-B/16 layer, all its parameters and its input."""
    batch = max(1, 4 // scale.divisor)
    keys = jax.random.split(jax.random.key(0))
    x, gradient = (jax.random.normal(key, (batch, 197, config.SIZES["B"].width)) for key in keys)
    calls = {}
    for kind in ("performer", "softmax"):
        settings = config.Config(attention=config.Attention(kind=kind, num_features=baselines.M))
        block = model.Block(settings, model.random_streams(0))
        graph, parameters, rest = nnx.split(block, nnx.Param, ...)

        def step(parameters, rest, x, gradient, graph=graph):
            def forward(parameters, x):
                return nnx.merge(graph, parameters, rest)(x)[0]

            output, pull = jax.vjp(forward, parameters, x)
            return output, pull(gradient)

        calls[kind] = timing.compiled(step, parameters, rest, x, gradient).call
    best = timing.race(calls, scale.repeats)
    case = f"{BOTH} of a ViT-B/16 layer, batch {batch}"
    return versus("ours / exact", case, best["performer"], best["softmax"])


def exactness(scale: Scale) -> list[dict]:
    """Of causality, bit for bit, and of the numbers, against float64."""
    tokens, heads = SIZES[1][0] // scale.divisor, SIZES[1][1]
    query, key, value, frequencies, _ = inputs(tokens, heads)
    causal = jax.jit(IMPLEMENTATIONS["ours, causal"])
    output, differ = causal(query, key, value, frequencies), 0
    for end in (1, tokens // 3, tokens // 2, tokens - 1):
        later = jnp.arange(tokens)[:, None, None] >= end
        other = causal(query, jnp.where(later, 9 * key, key), value - later, frequencies)
        differ += int(jnp.sum(output[:, :end] != other[:, :end]))
    rows = [row("outputs that later tokens change: ours, causal", f"N = {tokens}", differ)]
    query, key, value, frequencies, _ = inputs(256, 2)
    for name in ("ours", "ours, causal"):
        for factor in (1, 3, 5):
            args = (factor * query, factor * key, value, frequencies)
            want = baselines.estimator(*args, is_causal="causal" in name)
            got = np.asarray(jax.jit(IMPLEMENTATIONS[name])(*args), np.float64)
            error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
            case = f"N = 256, q and k times {factor}"
            rows.append(row(f"relative error: {name}", case, error))
    return rows


def decoding(scale: Scale, heads: int = 12) -> dict:
    """Sixteen tokens one by one, after many tokens and after few."""
    query, key, value, frequencies, _ = inputs(1, heads)
    lengths, calls = (65536 // scale.divisor, 1024 // scale.divisor), {}

    @jax.jit
    def step(query, key, value, frequencies, state):
        return performer_attention(
            query, key, value, frequencies, is_causal=True, initial_state=state, return_state=True
        )

    def decode(state):
        for _ in range(16):
            _, state = step(query, key, value, frequencies, state)
        return state

    for length in lengths:
        prompt = inputs(length, heads)[:3]
        prefill = partial(performer_attention, is_causal=True, return_state=True)
        state = jax.block_until_ready(jax.jit(prefill)(*prompt, frequencies)[1])
        calls[str(length)] = partial(decode, state)
    best = timing.race(calls, max(50 // scale.divisor, 7))
    long, short = best.values()
    case = f"decoding step after {lengths[0]} / {lengths[1]} tokens, H = {heads}"
    return versus("ours, causal", case, long, short)


def tables(scale: Scale) -> Iterator[tuple[str, list[dict]]]:
    """Names and rows of the tables, as they come: all times, then their ratios and what else."""
    rows, times = races(scale)
    yield "times", times
    yield "summary", [*rows, *parts(scale), layer(scale), decoding(scale), *exactness(scale)]
