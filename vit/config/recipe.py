"""Config for a data set, derived from the number, size and colour of its pictures.

| training pictures | size, pixels at most | patches seen | augmentation | arithmetic |
|---|---|---|---|---|
| below 10,000 | XS, 128 | centre | shifts of 1/8, flips of colour pictures | float32 |
| below 100,000 | Ti, 224 | a random part | the same flips | float32 |
| below 1,000,000 | S, 224 | a random part | the same flips | bfloat16 |
| more | B, 224 | a random part | the same flips | bfloat16 |

The patch is the largest of 1, 2, 4, 8 and 16 pixels that leaves 7 x 7 patches. A batch is the power
of two at most 2 sqrt(pictures), and at most 4096; a run has 90 epochs, and at least 600 steps, a
tenth of them warm-up. It is evaluated 20 times. Attention has 2 head_dim random features that are
calibrated while training. A flag overrides any field; the others are then derived from it: with
fewer epochs the warm-up is also shorter.
"""

import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

from vit import data
from vit.config import Attention, Config, Data, Model, Optim, check_fields, flatten, with_values
from vit.config.cli import command
from vit.data import augment
from vit.storage import buckets

EPOCHS, FEWEST_STEPS = 90, 600
LARGEST_BATCH = 4096
EVALUATIONS = 20
SAMPLED = 200
"""Pictures of a data set whose sides are read."""


class Row(NamedTuple):
    """Model and training for a number of pictures."""

    below: float
    """Least number of training pictures that is too many."""
    size: str
    """Row of `vit.config.SIZES`."""
    pixels: int
    """Largest side of the input."""
    learning_rate: float
    dtype: str
    num_workers: int


ROWS = (
    Row(1e4, "XS", 128, 2e-3, "float32", 0),
    Row(1e5, "Ti", 224, 1e-3, "float32", -1),
    Row(1e6, "S", 224, 1e-3, "bfloat16", -1),
    Row(math.inf, "B", 224, 1e-3, "bfloat16", -1),
)
"""Rows from few pictures to many."""


def for_images(
    num_examples: int,
    num_classes: int,
    side: int,
    channels: int,
    values: Mapping[str, Any] | None = None,
) -> Config:
    """Return a config by the rules above, without the name of its data set.

    Args:
        num_examples: number of training pictures.
        num_classes: number of classes.
        side: shorter side of a typical picture, in pixels.
        channels: 1 or 3.
        values: given fields, as {"num_epochs": 5}; the other fields are derived from these too.

    Raises:
        ValueError: for less than two classes, or a value out of range.
    """
    if num_classes < 2:
        raise ValueError(f"num_classes={num_classes}: a classifier needs at least 2 classes")
    values = values or {}
    check_fields(with_values(Config(), values))
    row = next(row for row in ROWS if num_examples < row.below)
    image_size, patch_size = _pixels(values.get("data.image_size", min(side, row.pixels)))
    variant = values.get("model.variant", f"{row.size}/{patch_size}")
    batch_size = values.get("data.batch_size", _batch_size(num_examples))
    steps_per_epoch = max(1, num_examples // batch_size)
    num_epochs = max(EPOCHS, math.ceil(FEWEST_STEPS / steps_per_epoch))
    num_steps = max(1, int(values.get("num_epochs", num_epochs) * steps_per_epoch))
    intervals = (values.get(name, 0) for name in ("eval_every", "checkpoint_every"))
    log_every = values.get("log_every", math.gcd(max(1, min(50, num_steps // 200)), *intervals))
    eval_every = log_every * max(1, num_steps // (EVALUATIONS * log_every))
    few = row is ROWS[0]
    cropped = not few and image_size >= 64
    derived = Config(
        model=Model(variant=variant, pooling="mean", dtype=row.dtype),
        attention=Attention(num_features=2 * Model(variant).size.head_dim, calibration="full"),
        data=Data(
            image_size=image_size,
            eval_resize=max(image_size, min(side, image_size * 8 // 7)) if cropped else 0,
            crop="inception" if cropped else "center",
            max_shift=0 if cropped else image_size // 8,
            flip=channels == 3,
            batch_size=batch_size,
            num_workers=row.num_workers,
        ),
        optim=Optim(
            learning_rate=row.learning_rate,
            weight_decay=0.05,
            label_smoothing=0.1,
        ),
        num_epochs=float(num_epochs),
        log_every=log_every,
        eval_every=eval_every,
        checkpoint_every=min(eval_every, 10 * log_every),
    )
    return with_values(derived, values)


class Derived(Config):
    """Config from `for_data_set`; `overridden` derives it again, around the given fields."""

    __slots__ = ("derive",)

    derive: Callable[[dict[str, Any]], Config]

    def overridden(self, values: dict[str, Any]) -> Config:
        """Return the config with these values and everything else derived from them."""
        return self.derive(values)


def for_data_set(where: str) -> Derived:
    """Return a config for a prepared data set, derived from its pictures.

    Args:
        where: folder of the data set, as "data/photos".

    Raises:
        ValueError: when the folder is no prepared data set or has no split for evaluation; or as
            `data.load`.
    """
    if not where:
        prepare = command("prepare", source="PICTURES", out="data")
        raise ValueError(
            "give the folder of a prepared data set, --config=my_images:data/photos; it is prepared"
            f" from a folder of pictures by {prepare}"
        )
    folder = buckets.path(where)
    if not folder.is_dir():
        prepare = command("prepare", source="PICTURES", out=folder.parent)
        raise ValueError(
            f"--config=my_images:{where}: there is no folder {folder.resolve()}; a data set is"
            f" prepared from a folder of pictures by {prepare}"
        )
    section = Data(name=folder.name, dir=str(folder.parent), batch_size=1, eval_split="train")
    try:
        splits = data.splits(section)
    except ValueError as error:
        raise ValueError(
            f"--config=my_images:{where} gives the folder of a prepared data set: {error}"
        ) from error
    evaluated = next((name for name in ("validation", "test") if name in splits), None)
    if evaluated is None or "train" not in splits:
        raise ValueError(
            f"{where} has the splits {', '.join(splits)}; required are train, and validation or"
            " test"
        )
    dataset = data.load(section)
    number = len(dataset.train)
    pictures = (dataset.train[i]["image"] for i in range(0, number, max(1, number // SAMPLED)))
    side = int(statistics.median(min(augment.open_image(x).size) for x in pictures))
    fixed = {"data.name": section.name, "data.dir": section.dir, "data.eval_split": evaluated}

    def derive(values: dict[str, Any]) -> Config:
        return for_images(number, dataset.num_classes, side, dataset.channels, fixed | values)

    config = cast(Derived, with_values(Derived(), flatten(derive({}))))
    config.derive = derive
    return config


def _pixels(side: int) -> tuple[int, int]:
    """Return the side of an image and of a patch."""
    patch_size = next(p for p in (16, 8, 4, 2, 1) if side // p >= 7 or p == 1)
    return side // patch_size * patch_size, patch_size


def _batch_size(num_examples: int) -> int:
    """Return the largest power of two that is at most 2 sqrt(n), and at most n."""
    most = min(2 * math.sqrt(num_examples), num_examples, LARGEST_BATCH)
    return 2 ** int(math.log2(most))
