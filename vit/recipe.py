"""A config for pictures of which only the number, the classes, the sides and the colours are known.

| training pictures | size, pixels at most | patches seen | augmentation | arithmetic |
|---|---|---|---|---|
| below 10,000 | XS, 128 | centre | shifts of 1/8, flips of colour pictures | float32 |
| below 100,000 | Ti, 224 | a random part | the same flips | float32 |
| below 1,000,000 | S, 224 | a random part | the same flips | bfloat16 |
| more | B, 224 | a random part | the same flips | bfloat16 |

The patch is the largest of 1, 2, 4, 8 and 16 pixels that leaves 7 x 7 patches. A batch is the power
of two at most 2 sqrt(pictures), and at most 4096; a run has 90 epochs, and at least 1,000 steps, a
tenth of them warm-up. It is evaluated 20 times. Each number is a field, which a flag overrides.
"""

import math
from typing import NamedTuple

from vit.config import SIZES, Attention, Config, Data, Model, Optim

EPOCHS, FEWEST_STEPS = 90, 1_000
LARGEST_BATCH = 4096
EVALUATIONS = 20


class Row(NamedTuple):
    """What data of some number of pictures is trained with."""

    below: float
    """So many training pictures."""
    size: str
    """A row of `vit.config.SIZES`."""
    pixels: int
    """At most, on a side."""
    learning_rate: float
    dtype: str
    num_workers: int


ROWS = (
    Row(1e4, "XS", 128, 2e-3, "float32", 0),
    Row(1e5, "Ti", 224, 1e-3, "float32", 4),
    Row(1e6, "S", 224, 1e-3, "bfloat16", 16),
    Row(math.inf, "B", 224, 1e-3, "bfloat16", 16),
)
"""From few pictures to many."""


def for_images(num_examples: int, num_classes: int, side: int, channels: int) -> Config:
    """A config by the rules above; its data set is yet to be named.

    Args:
        num_examples: of training.
        num_classes: of them.
        side: the shorter one of a typical picture, in pixels.
        channels: 1 or 3.

    Raises:
        ValueError: when there is less than a picture, a class or a pixel.
    """
    for name, value in [("num_examples", num_examples), ("side", side), ("channels", channels)]:
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if num_classes < 2:
        raise ValueError(f"num_classes={num_classes}: there is nothing to tell apart")
    row = next(row for row in ROWS if num_examples < row.below)
    image_size, patch_size = _pixels(min(side, row.pixels))
    batch_size = _batch_size(num_examples)
    steps_per_epoch = num_examples // batch_size
    num_epochs = max(EPOCHS, math.ceil(FEWEST_STEPS / steps_per_epoch))
    num_steps = num_epochs * steps_per_epoch
    log_every = min(50, num_steps // 200)
    eval_every = log_every * (num_steps // (EVALUATIONS * log_every))
    few = row is ROWS[0]
    cropped = not few and image_size >= 64
    return Config(
        model=Model(variant=f"{row.size}/{patch_size}", pooling="mean", dtype=row.dtype),
        attention=Attention(num_features=2 * SIZES[row.size].head_dim),
        data=Data(
            image_size=image_size,
            eval_resize=min(side, image_size * 8 // 7) if cropped else 0,
            crop="inception" if cropped else "center",
            max_shift=0 if cropped else image_size // 8,
            flip=channels == 3,
            batch_size=batch_size,
            num_workers=row.num_workers,
        ),
        optim=Optim(
            learning_rate=row.learning_rate,
            warmup_steps=num_steps // 10,
            weight_decay=0.05,
            label_smoothing=0.1,
        ),
        num_epochs=float(num_epochs),
        log_every=log_every,
        eval_every=eval_every,
        checkpoint_every=min(eval_every, 10 * log_every),
    )


def _pixels(side: int) -> tuple[int, int]:
    """Of an image and of a patch, on a side."""
    patch_size = next(p for p in (16, 8, 4, 2, 1) if side // p >= 7 or p == 1)
    return side // patch_size * patch_size, patch_size


def _batch_size(num_examples: int) -> int:
    """The power of two at most 2 sqrt(n), and at most n."""
    most = min(2 * math.sqrt(num_examples), num_examples, LARGEST_BATCH)
    return 2 ** int(math.log2(most))
