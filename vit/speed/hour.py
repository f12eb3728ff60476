"""All that a GPU has to show, in one command that goes on where it stopped.

    performer-vit benchmark gpu --out=results/gpu

In this order, each row written when it is measured; nothing is begun after --minutes, 9 by default,
and the same command goes on with what is missing:

    values    output and gradients of every kind of call that the kernels support, against float64
    lengths   attention by the number of tokens, with exact and cuDNN's: `vit.speed.lengths`
    windows   features with exact windows of 16 and 32 tokens, beside features alone
    vit       a training step of ViT-B/16 and ViT-B/8: `vit.speed.vit`
    demo      `vit.train --config=digits`, its accuracy and seconds

With --quick it is a rehearsal of a few minutes, also on a CPU, which has no kernels.
"""

import re
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from performer import Bias, Features, attention, couplings, performer_attention
from vit.speed import lengths, vit
from vit.study import harness, statistics, timing

LENGTHS = (197, 512, 1024, 2048, 4096, 16384, 65536)
WINDOWS = ("ours", "kernel", "window 16", "window 32")
BOUNDS = {"bfloat16": 0.03, "float16": 0.004}
"""Largest error of output and gradients, relative to their norm."""
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "float16": dict(dtype=jnp.float16),
    "grouped heads": dict(key_heads=2),
    "m = 100": dict(m=100),
    "head_dim 40": dict(h=40),
    "m = 256, head_dim 32": dict(m=256, h=32),
    "a draw for each head": dict(draws=4),
    "lengths": dict(lengths=True),
    "log-weights": dict(weighted=True),
    "calibrated": dict(calibrated=True),
}
"""Kinds of calls by name: arguments of `errors`."""
STEP = ("pictures", "step, ms", "memory, MiB")
Row = harness.Row


def value(case: Row, _: list[Row]) -> Row:
    """Return the errors of a call by the kernels, relative to `robust` in float64 on the CPU."""
    return errors(case["tokens"], case["order"] == "causal", **CALLS[case["call"]])


def errors(
    tokens: int,
    is_causal: bool,
    dtype: Any = jnp.bfloat16,
    h: int = 64,
    m: int = 128,
    key_heads: int = 4,
    draws: int = 0,
    lengths: bool = False,
    weighted: bool = False,
    calibrated: bool = False,
) -> Row:
    """Return the path of a call with two sequences of four heads, and its errors."""
    rng, heads, batch = np.random.default_rng(0), 4, 2
    shapes = [(batch, tokens, n, h) for n in (heads, key_heads, key_heads, heads)]
    query, key, value, gradient = (jnp.asarray(rng.standard_normal(x), dtype) for x in shapes)
    keys = jax.random.split(jax.random.key(0), draws) if draws else jax.random.key(0)
    coupling: Any = couplings.get("pm")
    draw = partial(coupling, m=m, d=h)
    frequencies = (jax.vmap(draw) if draws else draw)(keys).astype(dtype).astype(jnp.float32)
    options: dict[str, Any] = {"bias": Bias()}
    if lengths:
        options["key_value_seq_lengths"] = jnp.array([tokens, tokens // 3])
    if weighted:
        weights = jnp.asarray(rng.standard_normal((batch, tokens)), jnp.float32)
        options["bias"] = Bias(keys=weights)
    features = Features(frequencies)
    if calibrated:
        features = features.calibrated(query, key, "shift+scale")

    def both(implementation, tokens, gradient, features, options):
        call = partial(performer_attention, implementation=implementation, **options)
        call = partial(call, features=features, is_causal=is_causal)
        output, pull = jax.vjp(call, *tokens)
        return output, *pull(gradient.astype(output.dtype))

    args = (query, key, value), gradient, features, options
    paths = attention.explain(query, key, value, features, implementation="pallas", **options)
    path = next(line for line in paths.splitlines() if "(here)" in line)
    got = jax.jit(partial(both, "pallas"))(*args)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        want = both("robust", *jax.tree.map(wide, args))
        output, *gradients = (
            float(statistics.relative_error(np.asarray(wide(x)), np.asarray(y)))
            for x, y in zip(got, want, strict=True)
        )
    right = max(output, *gradients) < BOUNDS[jnp.dtype(dtype).name]
    return {
        "path": path.split(": ")[1],
        "output": output,
        "gradients": max(gradients),
        "note": "" if right else "wrong values",
    }


def wide(x: jax.Array) -> jax.Array:
    """Return floats in float64."""
    return jnp.asarray(np.asarray(x, np.float64)) if jnp.issubdtype(x.dtype, jnp.floating) else x


def step(case: Row, _: list[Row]) -> Row:
    """Return the time and memory of a training step of a ViT."""
    kind = vit.kinds()[case["attention"]]
    batch = 1 if jax.default_backend() == "cpu" else vit.BATCHES[case["patch"]]
    call, memory = vit.step(kind, case["patch"], case["pixels"], batch)
    best = timing.race({case["attention"]: call}, 7)[case["attention"]]
    return {"pictures": batch, "step, ms": 1e3 * best.wall, "memory, MiB": memory / 2**20}


def demo(case: Row, _: list[Row]) -> Row:
    """Return the accuracy and the seconds of the demo, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--config=digits", f"--workdir={folder}/digits"]
        words += [f"--config.num_epochs={case['epochs']}"] if case["epochs"] else []
        command, start = [sys.executable, "-m", "vit.train", *words], time.monotonic()
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        text = done.stdout + done.stderr
    accuracy = re.search(r"(?:test|validation) accuracy ([0-9.]+)", text)
    assert accuracy, text
    return {"accuracy": float(accuracy[1]), "seconds": time.monotonic() - start}


def measure(out: Path, minutes: float, quick: bool) -> None:
    """Measure what is missing in the folder."""
    deadline = time.monotonic() + 60 * minutes
    calls, tokens = (("plain", "float16"), (20,)) if quick else (CALLS, (198, 3000))
    cases = harness.cases(call=calls, tokens=tokens, order=("bidirectional", "causal"))
    harness.resumed(out / "values", cases, value, ("path", "output", "gradients"), deadline)
    some, windows = ((32,), ("ours", "window 16")) if quick else (LENGTHS, WINDOWS)
    lengths.measure(some, out, deadline)
    lengths.measure(some if quick else some[2:5], out / "windows", deadline, windows)
    patches, pixels = ((16,), 32) if quick else ((16, 8), 224)
    cases = harness.cases(patch=patches, pixels=(pixels,), attention=vit.kinds())
    harness.resumed(out / "vit", cases, step, STEP, deadline)
    cases = [{"epochs": 1.0 if quick else ""}]  # those of the config
    harness.resumed(out / "demo", cases, demo, ("accuracy", "seconds"), deadline)
