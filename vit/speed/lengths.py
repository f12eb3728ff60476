"""Attention against the number of tokens on one device: values first, then times.

    performer-vit benchmark attention --lengths=197,512,1024,2048,4096,16384,65536

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

from vit.speed.attention import BOTH, FORWARD, feasible, program
from vit.speed.baselines import IMPLEMENTATIONS, D, inputs
from vit.study import harness, statistics, timing

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
TIMED: tuple[str, ...] = ("compilation, s", "temporary, MiB", "time, ms", "ns per token and head")
KEYS: tuple[str, ...] = ("implementation", "pass", "tokens", "batch", "heads")
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


def window(name: str) -> int:
    """Return the tokens of the window of an implementation such as "window 16, causal"; or 0."""
    return int(name.partition(",")[0].split()[1]) if name.startswith("window") else 0


def softmax64(name: str, args: Sequence[jax.Array]) -> list[np.ndarray]:
    """Return output and gradients from the whole matrix of logits, in float64 on the CPU.

    The logits are q.k for exact attention, and log (1 / m) sum_j e^{w_j.(q + k) - |q|^2 / 2 -
    |k|^2 / 2} for features; with a window of w tokens q.k for keys of the same w tokens
    and its neighbours. q and k are scaled by D^{-1/4}.
    """

    def attention(query, key, value, frequencies):
        query, key = query * D**-0.25, key * D**-0.25
        logits = jnp.einsum("bthd,bshd->bhts", query, key)
        if not name.startswith(("exact", "cuDNN")):
            left = jnp.einsum("bthd,md->bhtm", query, frequencies)[:, :, :, None]
            right = jnp.einsum("bshd,md->bhsm", key, frequencies)[:, :, None]
            norms = (jnp.einsum("bthd,bthd->bht", x, x) / 2 for x in (query, key))
            norms = jax.numpy.expand_dims(next(norms), -1) + next(norms)[:, :, None]
            far = jax.nn.logsumexp(left + right, axis=-1) - norms - np.log(len(frequencies))
            chunks = np.arange(query.shape[1]) // window(name) if window(name) else None
            near = chunks is not None and abs(chunks[:, None] - chunks) <= 1
            logits = jnp.where(near, logits, far)
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


def measure(
    lengths: Sequence[int],
    out: Path,
    deadline: float,
    names: Sequence[str] = (),
    dtype: str = "",
) -> str:
    """Write the missing rows of lengths_PLATFORM.csv, the table of speed-ups and the figure.

    Args:
        lengths: numbers of tokens.
        out: folder of the results.
        deadline: time of `time.monotonic` after which nothing is begun.
        names: implementations; `NAMES` of the platform if empty.
        dtype: of the tokens; float32 on a CPU and bfloat16 elsewhere if empty.

    Returns:
        The table of speed-ups.

    Raises:
        ValueError: for a name that is not in `IMPLEMENTATIONS`.
    """
    if unknown := {*names} - {*IMPLEMENTATIONS}:
        known = [name for name in IMPLEMENTATIONS if "causal" not in name]
        raise ValueError(f"--names: {sorted(unknown)} are not among {known}")
    platform = jax.default_backend()
    path = out / f"lengths_{platform}"
    heads, queued, usual = (1, 1, "float32") if platform == "cpu" else (12, 20, "bfloat16")
    tokens_dtype = jnp.dtype(dtype or usual)
    names = [name + end for name in names or NAMES[platform] for end in ("", ", causal")]
    cases = [(name, "values", CHECKED, 1, 2) for name in names]
    cases += [
        (name, which, tokens, max(TOKENS // tokens, 1), heads)
        for tokens in lengths
        for which in (FORWARD, BOTH)
        for name in feasible(names, tokens)
    ]

    def measured(case: Row, rows: list[Row]) -> Row | None:
        name, which, tokens, batch, heads = case.values()
        if name in {r["implementation"] for r in rows if r["pass"] == "values" and r["note"]}:
            return None
        if which != "values":
            return timed(name, which, inputs(tokens, heads, batch, tokens_dtype), queued)
        values = checked(name, tokens_dtype)
        right = values["relative error"] < DIFFERENCE
        return values | {"note": "" if right else "wrong values"}

    named: list[Row] = [dict(zip(KEYS, case, strict=True)) for case in cases]
    rows = harness.resumed(path, named, measured, ("relative error", *TIMED), deadline)
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
        speedup = {
            n: times[name, which, n] / times[ours, which, n]
            for n in lengths
            if {(name, which, n), (ours, which, n)} <= times.keys()
        }
        if speedup and kind not in (base, "kernel"):
            case = {"implementation": ours, "compared with": name, "pass": which}
            cells = {f"{n:,} tokens": speedup.get(n, "") for n in lengths}
            lines.append(case | {"break-even, tokens": break_even(speedup)} | cells)
    return lines or [{"implementation": "nothing was timed"}]


def break_even(speedup: dict[int, float]) -> float | str:
    """Return the length of speed-up 1, by log-linear interpolation; "" if it is not crossed."""
    for (n, low), (m, high) in zip(speedup.items(), list(speedup.items())[1:], strict=False):
        if low < 1 <= high:
            part = np.log(1 / low) / np.log(high / low)
            return round(float(np.exp(np.log(n) + part * np.log(m / n))))
    return ""
