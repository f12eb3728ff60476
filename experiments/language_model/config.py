"""The config of a run of the language model, and the settings that the config does not hold."""

from typing import Any, NamedTuple

from vit.config import Attention, Config, Data, Model, Optim, Size
from vit.data import Dataset

SIZE = Size(width=128, depth=4, num_heads=4, mlp_dim=512)
QUICK = Size(width=64, depth=2, num_heads=2, mlp_dim=256)


class Settings(NamedTuple):
    """Settings of a run, in its `task.json`."""

    length: int = 512
    """Characters of a window of the text."""


def of_run(
    own: Attention, dataset: Dataset, *, size: Size, rate: float, steps: int, **data: Any
) -> Config:
    """Return the config of a run of AdamW, as language models are trained.

    Args:
        own: attention of all layers.
        dataset: windows of the text.
        size: size of the model.
        rate: peak learning rate.
        steps: steps of the optimiser.
        data: fields of that section.
    """
    section = Data(name="text", **data)
    every = max(1, steps // 10)
    return Config(
        model=Model("XS/1", *size),
        attention=own,
        data=section,
        optim=Optim(
            learning_rate=rate,
            final_learning_rate=rate / 10,
            warmup_steps=min(100, steps // 5),
            b2=0.99,
            weight_decay=0.1,
        ),
        num_epochs=steps / max(1, len(dataset.train) // section.batch_size),
        log_every=every,
        eval_every=5 * every,
        checkpoint_every=every,
    )
