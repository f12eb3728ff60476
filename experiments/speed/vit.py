"""Cost of a training step of a ViT by the number of tokens: time and memory.

Size Ti, one picture of 224 pixels in patches of 16, 8 and 4: 197, 785 and 3137 tokens, class token
included. The step is that of `vit.train`, gradients and optimiser included, as it is compiled for
this machine; at each number of tokens the kinds of attention take turns, in one process.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from experiments.common import harness, timing
from vit import config
from vit.model import classification
from vit.run import devices, dry_run, steps

M, WINDOW = 128, 16
KINDS = {
    "softmax": config.Attention(kind="softmax"),
    "performer": config.Attention(num_features=M),
    f"performer, window {WINDOW}": config.Attention(num_features=M, exact_window=WINDOW),
}
PATCHES = (16, 8, 4)
FIGURES: harness.Figures = {
    "vit": dict(
        x="tokens",
        y={"step, ms": "training step (ms)", "memory, MiB": "memory (MiB)"},
        line="{attention}",
        log="xy",
    )
}


def measured(pixels: int = 224, repeats: int = 7) -> list[dict[str, Any]]:
    """Time each number of tokens with each kind of attention."""
    rows = []
    for patch in PATCHES:
        programs = {name: step(kind, patch, pixels) for name, kind in KINDS.items()}
        best = timing.race({name: call for name, (call, _) in programs.items()}, repeats)
        for name, (_, memory) in programs.items():
            row = {
                "tokens": (pixels // patch) ** 2 + 1,
                "attention": name,
                "step, ms": 1e3 * best[name].wall,
                "CPU time, ms": 1e3 * best[name].cpu,
                "memory, MiB": memory / 2**20,
                "softmax / it": best["softmax"].wall / best[name].wall,
            }
            rows.append(row)
            print(*row.values(), flush=True)
    return rows


def step(attention: config.Attention, patch: int, pixels: int) -> tuple[Callable[[], Any], int]:
    """Compile a step; return a call that makes one after another, and the bytes it needs."""
    settings = config.Config(
        model=config.Model(f"Ti/{patch}"),
        attention=attention,
        data=config.Data(image_size=pixels, batch_size=1),
    )
    mesh, task = devices.mesh(settings, jax.devices()[:1]), classification.task(1000, 3)
    program = steps.build(settings, task, 1000, mesh)
    image = np.random.default_rng(0).integers(0, 256, (1, pixels, pixels, 3), dtype=np.uint8)
    arrays = {"image": image, "label": np.zeros(1, np.int32)}
    batch = devices.put(mesh, arrays)
    compiled = program.train.lower(program.abstract, batch).compile()
    state = program.initial()

    def call() -> Any:
        nonlocal state
        state, values = program.train(state, batch)
        return values

    return call, dry_run.memory_of(compiled)["in all"]
