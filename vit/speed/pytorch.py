"""Times of PyTorch's exact attention on a CPU, in a process of its own.

    python -m vit.speed.pytorch 1024 12 7      # tokens, heads, repeats

Prints JSON: {"exact": {"forward": seconds, "forward + backward": seconds}, "exact, causal": ...},
the best of the repeats of `torch.nn.functional.scaled_dot_product_attention`, whose kernel for CPUs
is flash attention. Batch 1, heads of 64, float32, as many threads as cores. Requires PyTorch.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from vit.storage.machine import cores

WIDTH = 64
"""Width of a head."""
Seconds = dict[str, dict[str, float]]
"""Implementation -> pass -> seconds."""


def is_installed() -> bool:
    """Return True if PyTorch can be imported."""
    return find_spec("torch") is not None


def seconds(tokens: int, heads: int, repeats: int) -> Seconds:
    """Return the times, measured in a new process."""
    command = [sys.executable, "-m", "vit.speed.pytorch", *map(str, (tokens, heads, repeats))]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def best(call: Callable[[], Any], repeats: int) -> float:
    """Return the least time of a call in seconds, after one that does not count."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def measured(tokens: int, heads: int, repeats: int) -> Seconds:
    """Return the times of this process."""
    torch: Any = import_module("torch")

    torch.set_num_threads(cores())
    torch.manual_seed(0)
    query, key, value, gradient = torch.randn(4, 1, heads, tokens, WIDTH)
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    attention = torch.nn.functional.scaled_dot_product_attention

    def both(is_causal: bool) -> Any:
        return torch.autograd.grad(attention(*leaves, is_causal=is_causal), leaves, gradient)

    def forward(is_causal: bool) -> Any:
        with torch.no_grad():
            return attention(query, key, value, is_causal=is_causal)

    return {
        name: {
            "forward": best(lambda c=is_causal: forward(c), repeats),
            "forward + backward": best(lambda c=is_causal: both(c), repeats),
        }
        for name, is_causal in (("exact", False), ("exact, causal", True))
    }


if __name__ == "__main__":
    print(json.dumps(measured(*map(int, sys.argv[1:4]))))
