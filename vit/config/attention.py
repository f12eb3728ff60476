"""The section `attention`, of tasks whose blocks have exact or random-feature attention."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax

import performer
from performer.attention import Exact
from vit.config.base import choice, count, field, flatten, number, records


class Block(NamedTuple):
    """Attention of one block: a row of `config.attention.blocks`.

    Except for `transferred`, fields have the meaning of the same name in `Attention`.
    """

    kind: str = "performer"
    num_features: int = 128
    calibration: str = "none"
    exact_window: int = 0
    exact_keys: int = 0
    exact_rows: int = 0
    transferred: bool = False
    """Features are learned by attention transfer, whose parameters the layer holds."""

    @property
    def text(self) -> str:
        """The sizes that are not 0: "m = 64, exact_keys = 16", or "softmax attention"."""
        if self.kind == "softmax":
            return "softmax attention"
        sizes = {"m": self.num_features} | {
            name: x for name, x in self._asdict().items() if name.startswith("exact_")
        }
        return ", ".join(f"{name} = {x}" for name, x in sizes.items() if x)


@dataclasses.dataclass(slots=True)
class Attention:
    """Attention of the blocks; all kinds have the same parameters."""

    kind: str = choice("performer softmax", '"performer" (random features) or "softmax" (exact).')
    coupling: str = field(
        performer.couplings.DEFAULT,
        "Coupling of the frequencies.",
        f"one of {', '.join(performer.couplings.names())}, or DIRECTIONS*NORMS of two of them",
    )
    feature_map: str = choice(
        " ".join(performer.features.MAPS),
        """Map of queries and keys. All but "positive" are for comparison: they train without
        calibration, and "relu" and "elu+1", which do not estimate softmax, without exact pairs.""",
    )
    num_features: int = number(
        *(128, "Random features m, the frequencies of a head.", 1, 2**16),
        "the pairs of `exact_window` alone",
    )
    share_heads: bool = field(False, "Share one draw of frequencies among the heads of a layer.")
    calibration: str = field(
        "none",
        "Calibration of the features by running statistics of queries and keys.",
        f"{', '.join(performer.calibration.METHODS)}, or their parts joined by +",
    )
    redraw_every: int = count(0, "Training steps between draws of the frequencies; 0: one draw.")
    implementation: str = choice(
        "auto blocked pallas",
        """Implementation of `performer_attention`: "auto" for kernels on an NVIDIA GPU where they
        support the call, "blocked" by XLA, or "pallas", kernels for GPU and (not yet run) TPU.""",
    )
    exact_window: int = count(
        0,
        """Tokens of a window; 0 for none. A query attends exactly to its own window, to both
        neighbours, and to class token and registers. Patches are in the order of a Z-order curve,
        so a window is roughly a square of the image.""",
    )
    exact_keys: int = count(
        0, "Keys of a head that are exact for all queries, those with the largest weights."
    )
    exact_rows: int = count(0, "First tokens whose attention is exact: 1 for a class token.")
    blocks: tuple[Block, ...] = records(
        Block,
        """Attention of each block, in place of the fields above: `Block` records, in a config file.
        `vit.convert` writes what it has chosen for each layer.""",
    )


def blocks(config: Any) -> tuple[Block, ...]:
    """Return the attention of each block: the records of the config, or its one for all."""
    attention = config.attention
    shared = {name: getattr(attention, name) for name in Block._fields if hasattr(attention, name)}
    same = Block(**shared)
    return attention.blocks or (same,) * config.model.size.depth


def exact(config: Any, block: Block) -> Exact:
    """Return the exact pairs of a block; with a window also class token and registers are exact."""
    first = config.model.num_prefix if block.exact_window else 0
    return Exact(block.exact_window, first, block.exact_keys, block.exact_rows)


ATTENTION_RULES: dict[str, Callable[[Any], bool]] = {
    "config.attention.exact_window must be positive if config.attention.num_features is 0": (
        lambda c: all(block.num_features or block.exact_window for block in blocks(c))
    ),
    "config.attention.exact_window must be 0 with config.attention.implementation": lambda c: (
        c.attention.implementation != "pallas" or not any(block.exact_window for block in blocks(c))
    ),
    "config.seq must be 1 with config.attention.exact_window, config.attention.exact_keys and"
    " config.attention.exact_rows": lambda c: (
        c.seq == 1 or not any(any(exact(c, block)) for block in blocks(c))
    ),
}
"""Conditions on several fields, by message, of configs with this section."""


def check_attention(config: Any) -> None:
    """Raise ValueError for features that cannot be drawn for the heads of `config.model.size`."""
    flat, attention = flatten(config), config.attention
    try:
        for block in dict.fromkeys(blocks(config)):
            parts = performer.calibration.parts(block.calibration)
            feature_map = performer.features.get(attention.feature_map)
            if parts and not feature_map.exponential:
                raise ValueError(
                    "a calibration requires the feature map positive; for other maps give"
                    " --config.attention.calibration=none"
                )
            if any(exact(config, block)) and not feature_map.estimates_softmax:
                raise ValueError("exact pairs require a feature map that estimates softmax")
            draw = partial(performer.couplings.draw, coupling=attention.coupling)
            sizes = dict(num_features=block.num_features, head_dim=config.model.size.head_dim)
            if block.num_features:
                jax.eval_shape(partial(draw, **sizes), jax.random.key(0))
    except ValueError as error:
        names = ("calibration", "coupling", "feature_map", "num_features")
        names = [x for x in names if str(error).startswith(f"unknown {x} ")] or names
        names = [f"attention.{name}" for name in names]
        names += ["attention.blocks"] * bool(attention.blocks)
        given = ", ".join(f"config.{name}={flat[name]!r}" for name in names)
        raise ValueError(f"{given}: {error}") from error


def check_new(config: Any) -> None:
    """Raise ValueError for features of attention transfer, which only another run can give."""
    for i, block in enumerate(config.attention.blocks):
        if block.transferred:
            raise ValueError(
                f"config.attention.blocks[{i}].transferred=True: such features are learned by"
                " vit.convert. Begin from its run with --init_from, or set False to draw features"
            )
