"""Attention against the number of tokens on one device: values first, then times.

    python -m experiments.benchmark attention --lengths=197,512,1024,2048,4096,16384,65536

Output and gradients of 198 tokens are compared with float64. Then each implementation is timed at
each length, forward and forward + backward, bidirectional and causal: about 16,384 tokens of 12
heads in bfloat16 on a GPU or TPU, of one head in float32 on a CPU. An implementation whose values
are wrong is not timed. Each row is written when it is measured, and the same command goes on with
the missing ones. Nothing is begun after --minutes, 9 by default.
"""

import itertools
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.common import harness, statistics, timing
from experiments.speed.attention import BOTH, FORWARD, feasible, program
from experiments.speed.baselines import D, inputs
from vit.reports import report

NAMES = {
    "cpu": ("ours", "exact"),
    "gpu": ("kernel", "ours", "exact", "cuDNN"),
    "tpu": ("kernel", "ours", "exact"),
}
"""Implementations by platform."""
TOKENS = 16384
"""Tokens of all sequences together, at least."""
CHECKED = 198
"""Length of the sequences whose values are compared; cuDNN has no gradients of odd ones."""
DIFFERENCE = 0.03
"""Bound of the error by bfloat16 in output and gradients, relative to their norm."""
TIMED = ("compilation, s", "temporary, MiB", "time, ms", "ns per token and head")
KEYS = ("implementation", "pass", "tokens", "batch", "heads")
FIGURE: harness.Row = dict(
    change=lambda rows: [row for row in rows if row["time, ms"] != ""],
    x="tokens",
    y="ns per token and head",
    line="{implementation}",
    panel="{pass}",
    log="xy",
    ylabel="time per token and head (ns)",
)
Row = harness.Row


def softmax64(name: str, args: Sequence[jax.Array]) -> list[np.ndarray]:
    """Return output and gradients from the whole matrix of logits, in float64 on the CPU.

    The logits are q.k for exact attention, and log sum_j e^{w_j.(q + k) - |k|^2 / 2} otherwise:
    what does not depend on the key cancels. q and k are scaled by D^{-1/4}.
    """

    def attention(query, key, value, frequencies):
        query, key = query * D**-0.25, key * D**-0.25
        if name.startswith(("exact", "cuDNN")):
            logits = jnp.einsum("bthd,bshd->bhts", query, key)
        else:
            left = jnp.einsum("bthd,md->bhtm", query, frequencies)[:, :, :, None]
            right = jnp.einsum("bshd,md->bhsm", key, frequencies)[:, :, None]
            norms = jnp.einsum("bshd,bshd->bhs", key, key)[:, :, None]
            logits = jax.nn.logsumexp(left + right, axis=-1) - norms / 2
        if name.endswith("causal"):
            logits = jnp.where(jnp.tri(*logits.shape[-2:], dtype=bool), logits, -jnp.inf)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits), value)

    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        *qkvw, gradient = (jnp.asarray(np.asarray(x, np.float64)) for x in args)
        output, pull = jax.vjp(partial(attention, frequencies=qkvw.pop()), *qkvw)
        return [np.asarray(x) for x in (output, *pull(gradient))]


def checked(name: str, dtype: Any) -> Row:
    """Return the relative errors of output and gradients, the largest."""
    args = inputs(CHECKED, 2, 1, dtype)
    if dtype == jnp.bfloat16:  # the frequencies are rounded as the queries are
        args[3] = args[3].astype(dtype).astype(jnp.float32)
    got, exact = jax.tree.leaves(program(name, BOTH, args).call()), softmax64(name, args)
    pairs = ((np.asarray(a, np.float64), b) for a, b in zip(got, exact, strict=True))
    return {"relative error": max(float(statistics.relative_error(a, b)) for a, b in pairs)}


def timed(name: str, which: str, args: list[jax.Array], queued: int) -> Row:
    """Compile and time one implementation."""
    compiled = program(name, which, args)
    start = time.perf_counter()
    jax.block_until_ready(compiled.call())
    seconds = time.perf_counter() - start
    count = int(min(max(0.1 / seconds, 1), queued))
    best = timing.race({name: compiled.call}, 5 if seconds < 1 else 2, count)[name]
    batch, tokens, heads, _ = args[0].shape
    return {
        "compilation, s": compiled.compile_seconds,
        "temporary, MiB": compiled.temporary_bytes / 2**20,
        "time, ms": 1e3 * best.wall,
        "ns per token and head": 1e9 * best.wall / (batch * tokens * heads),
    }


def measure(lengths: Sequence[int], out: Path, minutes: float = 9.0) -> str:
    """Write the missing rows of lengths_PLATFORM.csv, the table of speed-ups and the figure.

    Returns the table.
    """
    start, platform = time.monotonic(), jax.default_backend()
    path = out / f"lengths_{platform}"
    dtype, heads, queued = (jnp.float32, 1, 1) if platform == "cpu" else (jnp.bfloat16, 12, 20)
    names = [name + end for name in NAMES[platform] for end in ("", ", causal")]
    cases = [(name, "values", CHECKED, 1, 2) for name in names]
    cases += [
        (name, which, tokens, max(TOKENS // tokens, 1), heads)
        for tokens in lengths
        for which in (FORWARD, BOTH)
        for name in feasible(names, tokens)
    ]
    csv = path.with_suffix(".csv")
    rows = harness.read(csv) if csv.exists() else []
    done = {tuple(row[key] for key in KEYS) for row in rows}
    for case in cases:
        wrong = {r["implementation"] for r in rows if r["pass"] == "values" and r["note"]}
        name, which, tokens, batch, heads = case
        if case in done or name in wrong:
            continue
        if time.monotonic() - start > 60 * minutes:
            print("Time is up: the same command goes on.", flush=True)
            break
        row: Row = {key: "" for key in (*KEYS, "relative error", *TIMED, "note")}
        row |= dict(zip(KEYS, case, strict=True))
        try:
            if which == "values":
                row |= checked(name, dtype)
                row["note"] = "" if row["relative error"] < DIFFERENCE else "wrong values"
            else:
                row |= timed(name, which, inputs(tokens, heads, batch, dtype), queued)
        except Exception as error:  # out of memory, or not supported there
            row["note"] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        rows.append(row)
        report.table(rows, path)
        print(*(f"{k} {x}" for k, x in row.items() if x != ""), sep=", ", flush=True)
    if any(row["time, ms"] for row in rows):
        harness.figure(path, **FIGURE)
    return harness.show(speedups(rows), out / f"speedups_{platform}")


def speedups(rows: Sequence[Row]) -> list[Row]:
    """Return the speed-ups over each baseline by length, and the break-even between lengths."""
    times = {tuple(r[k] for k in KEYS[:3]): r["time, ms"] for r in rows if r["time, ms"] != ""}
    lengths = sorted({tokens for *_, tokens in times})
    lines = []
    passes = dict.fromkeys(key[:2] for key in times)
    for (name, which), base in itertools.product(passes, ("ours", "kernel")):
        kind, comma, end = name.partition(", ")
        ours = base + comma + end
        found = {
            n: times[name, which, n] / times[ours, which, n]
            for n in lengths
            if {(name, which, n), (ours, which, n)} <= times.keys()
        }
        if found and kind not in (base, "kernel"):
            case = {"implementation": ours, "compared with": name, "pass": which}
            cells = {f"{n:,} tokens": found.get(n, "") for n in lengths}
            lines.append(case | {"break-even, tokens": break_even(found)} | cells)
    return lines or [{"implementation": "nothing was timed"}]


def break_even(found: dict[int, float]) -> float | str:
    """Return the length of speed-up 1, by log-linear interpolation; "" if it is not crossed."""
    for (n, low), (m, high) in zip(found.items(), list(found.items())[1:], strict=False):
        if low < 1 <= high:
            part = np.log(1 / low) / np.log(high / low)
            return round(float(np.exp(np.log(n) + part * np.log(m / n))))
    return ""
