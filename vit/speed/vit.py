"""Cost of a training step of a ViT by the number of tokens: time and memory.

Pictures of 224 pixels in patches of 16, 8 and 4: 197, 785 and 3137 tokens, class token included. On
a CPU one picture and size Ti; on a GPU or TPU `BATCHES` of pictures and size B in bfloat16. The
step is that of `vit.train`, gradients and optimiser included, as it is compiled for this machine;
at each number of tokens the kinds of attention take turns, in one process.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import numpy as np

from vit import config
from vit.model import classification
from vit.run import devices, dry_run, steps
from vit.study import harness, timing

M, WINDOW = 128, 16
KINDS = {
    "softmax": config.Attention(kind="softmax"),
    "performer": config.Attention(num_features=M, implementation="blocked"),
    f"performer, window {WINDOW}": config.Attention(num_features=M, exact_window=WINDOW),
}
KERNEL = config.Attention(num_features=M, implementation="pallas")
"""Also timed on a GPU or TPU, as "performer, kernel"."""
BATCHES = {16: 128, 8: 32, 4: 8}
"""Pictures of a step on a GPU or TPU, by the pixels of a patch."""
FIGURES: harness.Figures = {
    "vit": dict(
        x="tokens",
        y={"step, ms": "training step (ms)", "memory, MiB": "memory (MiB)"},
        line="{attention}",
        log="xy",
    )
}


def kinds() -> dict[str, config.Attention]:
    """Return the kinds of attention that are timed on this platform."""
    return KINDS if jax.default_backend() == "cpu" else KINDS | {"performer, kernel": KERNEL}


def measured(patches: Sequence[int], pixels: int = 224, repeats: int = 7) -> list[dict[str, Any]]:
    """Time each number of tokens with each kind of attention."""
    rows, on_cpu, kinds_here = [], jax.default_backend() == "cpu", kinds()
    for patch in patches:
        batch = 1 if on_cpu else BATCHES[patch]
        with ThreadPoolExecutor() as pool:  # compiled side by side
            build = partial(step, patch=patch, pixels=pixels, batch_size=batch)
            calls = pool.map(build, kinds_here.values())
            programs = dict(zip(kinds_here, calls, strict=True))
        best = timing.race({name: call for name, (call, _) in programs.items()}, repeats)
        for name, (_, memory) in programs.items():
            row = {
                "tokens": (pixels // patch) ** 2 + 1,
                "pictures": batch,
                "attention": name,
                "step, ms": 1e3 * best[name].wall,
                "CPU time, ms": 1e3 * best[name].cpu,
                "memory, MiB": memory / 2**20,
                "softmax / it": best["softmax"].wall / best[name].wall,
            }
            rows.append(row)
            print(*row.values(), flush=True)
    return rows


def step(
    attention: config.Attention, patch: int, pixels: int, batch_size: int
) -> tuple[Callable[[], Any], int]:
    """Compile a step; return a call that makes one after another, and the bytes it needs."""
    variant, dtype = ("Ti", "float32") if jax.default_backend() == "cpu" else ("B", "bfloat16")
    settings = config.Config(
        model=config.Model(f"{variant}/{patch}", dtype=dtype),
        attention=attention,
        data=config.Data(image_size=pixels, batch_size=batch_size),
    )
    mesh, task = devices.mesh(settings, jax.devices()[:1]), classification.task(1000, 3)
    program = steps.build(settings, task, 1000, mesh)
    shape = batch_size, pixels, pixels, 3
    image = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    arrays = {"image": image, "label": np.zeros(batch_size, np.int32)}
    batch = devices.put(mesh, arrays)
    compiled = program.train.lower(program.abstract, batch).compile()
    state = program.initial()

    def call() -> Any:
        nonlocal state
        state, values = program.train(state, batch)
        return values

    return call, dry_run.memory_of(compiled)["in all"]
