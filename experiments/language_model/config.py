"""The config of a run of the language model, and the settings that the config does not hold."""

from typing import Any, NamedTuple

from performer.choices import unknown
from vit.config import Attention, Config, Data, Model, Optim, Size
from vit.data import Dataset

NAME, COUPLING = "text", "orf-antithetic"
SIZE = Size(width=128, depth=4, num_heads=4, mlp_dim=512)
QUICK = Size(width=64, depth=2, num_heads=2, mlp_dim=256)
ATTENTION = ("softmax", "performer", "window", "both")


class Settings(NamedTuple):
    """Settings of a run, in its `task.json`."""

    length: int = 512
    """Characters of a window of the text."""
    window: int = 0
    """Tokens of a chunk of exact attention; 0 for none."""
    first: int = 0
    """Number of first keys that are exact."""
    transferred: bool = False
    """Features are those of attention transfer, without the half norm of positive ones."""


def attention(kind: str, num_features: int, window: int) -> tuple[Attention, int]:
    """One kind of `ATTENTION`: exact, features alone, exact near by alone, or both; and its window.

    Raises:
        ValueError: for another word, or a window where there must be one.
    """
    if kind not in ATTENTION:
        raise ValueError(unknown("attention", kind, ATTENTION))
    if kind in ("window", "both") and window < 1:
        raise ValueError(f"attention {kind!r} needs a window of at least 1, got {window}")
    features = {"softmax": 128, "window": 1}.get(kind, num_features)
    coupling = "orf" if kind == "window" else COUPLING  # one feature, which counts nothing
    own = Attention("softmax" if kind == "softmax" else "performer", coupling, features)
    return own, window if kind in ("window", "both") else 0


def of_run(
    own: Attention, dataset: Dataset, *, size: Size, optim: Optim, steps: int, **data: Any
) -> Config:
    """The config of a run of so many steps; `data` are fields of that section."""
    section = Data(name=NAME, **data)
    per_epoch = max(1, len(dataset.train) // section.batch_size)
    every = max(1, steps // 10)
    return Config(
        model=Model("XS/1", *size),
        attention=own,
        data=section,
        optim=optim,
        num_epochs=steps / per_epoch,
        log_every=every,
        eval_every=5 * every,
        checkpoint_every=every,
    )


def optim(learning_rate: float, steps: int) -> Optim:
    """AdamW as language models take it."""
    return Optim(
        learning_rate=learning_rate,
        final_learning_rate=learning_rate / 10,
        warmup_steps=min(100, steps // 5),
        b2=0.99,
        weight_decay=0.1,
    )
