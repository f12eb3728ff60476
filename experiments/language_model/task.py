"""The task of predicting the next character, of which `config.py` is a config.

The trainer and the commands of `vit` serve it: `--config=experiments/language_model/config.py`
begins a run, and `--task=experiments.language_model.task` is given for a run that exists.
`python -m experiments.language_model` has the same commands without that flag.
"""

import dataclasses
from functools import cache, partial
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array

from experiments.language_model import text
from experiments.language_model.model import Attention, Decoder, cross_entropies, losses
from vit import config as configs
from vit.config import ATTENTION_RULES, Size, count, field, number
from vit.data import Batch, Dataset, check
from vit.task import Sums, Task, Triple


@dataclasses.dataclass(slots=True)
class Model:
    """A decoder of characters: pre-norm blocks with rotary positions, without biases."""

    width: int = number(128, "Width of a token, divisible by num_heads.", 1, 2**17)
    depth: int = number(4, "Number of blocks.", 1, 2**10)
    num_heads: int = number(4, "Number of attention heads.", 1, 2**10)
    mlp_dim: int = number(512, "Hidden width of the MLP.", 1, 2**17)

    @property
    def size(self) -> Size:
        """The sizes as one value."""
        return Size(self.width, self.depth, self.num_heads, self.mlp_dim)

    @property
    def num_prefix(self) -> int:
        """Number of first characters that are exact for all if there is a window."""
        return 1


@dataclasses.dataclass(slots=True)
class Data(configs.Batches):
    """A text as windows of characters; its last tenth is held out."""

    text: str = field("", "Text file in UTF-8; Python's help topics if empty.", is_local=True)
    length: int = count(512, "Characters of a window.", 1)


@dataclasses.dataclass(slots=True)
class Config(configs.TrainConfig):
    """Settings of a run that learns a text."""

    task: ClassVar[str] = "experiments.language_model.task"
    model: Model = dataclasses.field(default_factory=Model)
    attention: configs.Attention = dataclasses.field(default_factory=configs.Attention)
    data: Data = dataclasses.field(default_factory=Data)

    @property
    def size(self) -> Size:
        """Sizes of the model."""
        return self.model.size

    def check(self) -> None:
        """Raise ValueError for fields that cannot be combined."""
        configs.hold(self, RULES | ATTENTION_RULES)
        configs.check_attention(self)

    def check_new(self) -> None:
        """Raise ValueError for features that only another run can give."""
        configs.check_new(self)


RULES: Any = {
    "config.model.width must be divisible by two times config.model.num_heads": lambda c: (
        c.model.width % (2 * c.model.num_heads) == 0
    ),
    "config.attention.blocks must have config.model.depth records, or none": lambda c: (
        len(c.attention.blocks) in (0, c.model.depth)
    ),
    "config.attention.exact_keys and config.attention.exact_rows must be 0 in causal attention": (
        lambda c: not any(block.exact_keys or block.exact_rows for block in configs.blocks(c))
    ),
    "config.seq must be 1 for a text": lambda c: c.seq == 1,
}


@cache
def task(characters: int) -> Task:
    """Return the task: cross entropy of each next character, in nats.

    Args:
        characters: number of characters.
    """
    return Task(
        create=partial(Decoder, characters=characters),
        loss=loss,
        count=count_losses,
        layers=layers,
        projections=projections,
        is_causal=True,
        noun="window",
    )


def opened(
    config: Config, described: dict[str, Any], dataset: Dataset | None = None
) -> tuple[Dataset, Task]:
    """Return the windows of the text, and the task.

    Args:
        config: config of the run.
        described: content of its `task.json`.
        dataset: windows that are not read from the text.

    Raises:
        ValueError: for a text that cannot be read, or has other characters than the run.
    """
    source = config.data.text
    if dataset is None:
        dataset = text.dataset(text.read(source), config.data.length)
    if described and list(dataset.class_names) != described["class_names"]:
        raise ValueError(f"{source or 'the text'} has other characters than the text of the run")
    check(dataset, config.data)
    return dataset, task(dataset.num_classes)


configs.define(Config, opened)


def loss(model: Decoder, batch: Batch) -> tuple[Array, Sums]:
    """Return the mean loss of the windows."""
    return jnp.mean(losses(model, batch)), {}


def count_losses(model: Decoder, batch: Batch) -> Sums:
    """Return sums over windows that are not padding: mean loss, and that of the second half."""
    values = cross_entropies(model, batch)
    halves = {"loss": values, "loss_second_half": values[:, values.shape[1] // 2 :]}
    return {name: jnp.sum(batch["mask"] * jnp.mean(x, axis=-1)) for name, x in halves.items()}


def layers(model: Decoder) -> list[Attention]:
    """Return the layers of attention, in order."""
    return [block.attention for block in model.blocks]


def projections(model: Decoder, batch: Batch) -> list[Triple]:
    """Return queries, keys and values of each layer."""
    return model.projections(batch["tokens"][:, :-1])
