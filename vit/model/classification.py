"""Image classification: the task of runs on images with labels, by the model `ViT` or another.

Another model is a module with a config class, an `Architecture` and one call of `define`
(`vit.model.mixer`).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Integer

from vit import config as configs
from vit import data
from vit.config import Block, Config, TrainConfig, blocks
from vit.data import Batch, Dataset, augment
from vit.model import ViT
from vit.task import Sums, Task, Triple, no_attention, no_distances

Examples = tuple[Array, Array]
"""Images and class probabilities."""


class Architecture(NamedTuple):
    """A model of images, with the functions of its task."""

    create: Callable[..., nnx.Module]
    """(config, num_classes, channels, rngs) -> a new model, images -> (logits, intermediates), of
    which "pooled" is the input of the head."""
    operations: Callable[..., float] | None = None
    """(config, num_classes, channels) -> operations of the forward pass for one image."""
    layers: Callable[[Any], Sequence[Any]] = no_attention
    """As in `vit.task.Task`."""
    projections: Callable[[Any, Batch], list[Triple]] = no_attention
    """As in `vit.task.Task`."""
    distances: Callable[[Any], Any] = no_distances
    """As in `vit.task.Task`."""


ARCHITECTURES: dict[str, Architecture] = {}
"""Models of images by the name of their task."""


def define(config: type[TrainConfig], architecture: Architecture) -> None:
    """Add a task of image classification, whose config has the sections `data` and `optim` here."""
    ARCHITECTURES[config.task] = architecture
    configs.define(config, opened, sized)


@cache
def task(num_classes: int, channels: int, kind: str = "softmax", name: str = Config.task) -> Task:
    """Return the task: cross entropy with smoothing, mixup and CutMix; top-1 and top-5 accuracy.

    Args:
        num_classes: number of classes.
        channels: channels of the images.
        kind: kind of loss, `config.optim.loss`.
        name: name of the task, in `ARCHITECTURES`.
    """
    model, sizes = ARCHITECTURES[name], dict(num_classes=num_classes, channels=channels)
    return Task(
        create=partial(model.create, **sizes),
        loss=partial(loss, kind=kind),
        count=partial(count, kind=kind),
        results=results,
        examples=partial(examples, num_classes),
        operations=model.operations and partial(model.operations, **sizes),
        layers=model.layers,
        projections=model.projections,
        distances=model.distances,
        noun="image",
    )


def check_images(workdir: Path, config: Any) -> None:
    """Raise ValueError unless the run in a folder classifies images."""
    if config.task not in ARCHITECTURES:
        raise ValueError(
            f"{workdir} holds a run of the task {config.task!r}: vit.load, vit.predict, vit.export,"
            " --report=classes and evaluation on other data are for runs that classify images"
        )


def opened(
    config: Any, described: Mapping[str, Any], dataset: Dataset | None = None
) -> tuple[Dataset, Task]:
    """Return the data set of the config, and the task of classifying its images.

    Labels are the run's, by the names in its `task.json`, and so are the channels of the images
    that are opened here.

    Raises:
        ValueError: as `data.load`; or if the data have classes that the run does not have.
    """
    if dataset is not None:
        if config.data.name:
            data.check(dataset, config.data)
    else:
        dataset = data.load(config.data)
        if described:
            dataset = dataset._replace(channels=described["channels"])
            try:
                dataset = data.with_classes(dataset, described["class_names"])
            except ValueError as error:
                raise ValueError(
                    f"config.data.name={config.data.name!r} in config.data.dir="
                    f"{config.data.dir!r} is not the data set of the run: {error}"
                ) from error
    sizes = dataset.num_classes, dataset.channels
    return dataset, task(*sizes, config.optim.loss, config.task)


def sized(config: Any, size: Sequence[int], is_absent: bool) -> Dataset | None:
    """Return a data set without examples for a dry run, as `data.sized`."""
    return data.sized(config.data, size, is_absent)


def examples(num_classes: int, config: Any, key: Array, batch: Batch) -> Examples:
    """Return a training batch with smoothed labels, after mixup or CutMix if configured."""
    images, labels = batch["image"], batch["label"]
    targets = jax.nn.one_hot(labels, num_classes)
    targets = optax.losses.smooth_labels(targets, config.optim.label_smoothing)
    alphas = config.data.mixup, config.data.cutmix
    if any(alphas):
        images, targets = augment.blended(key, images.astype(jnp.float32), targets, *alphas)
    return images, targets


def sigmoid_cross_entropy(
    logits: Float[Array, "b classes"], targets: Float[Array, "b classes"]
) -> Float[Array, " b"]:
    """Return the sum over the classes of their binary cross entropies."""
    return jnp.sum(optax.losses.sigmoid_binary_cross_entropy(logits, targets), axis=-1)


def loss(model: Any, examples: Examples, kind: str = "softmax") -> tuple[Array, Sums]:
    """Return the mean cross entropy, and the number of correct answers ("accuracy").

    The correct class of a blend of two images is the class of the larger share.
    """
    images, targets = examples
    logits, _ = model(images)
    entropy = {"softmax": optax.losses.softmax_cross_entropy, "sigmoid": sigmoid_cross_entropy}
    losses = entropy[kind](logits, targets)
    right = jnp.argmax(logits, axis=-1) == jnp.argmax(targets, axis=-1)
    return losses.mean(), {"accuracy": jnp.sum(right)}


def count(model: Any, batch: Batch, kind: str = "softmax") -> Sums:
    """Return sums over the unmasked examples of a batch: loss, and those of `counts`."""
    logits, _ = model(batch["image"])
    labels = batch["label"]
    if kind == "softmax":
        losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)
    else:
        losses = sigmoid_cross_entropy(logits, jax.nn.one_hot(labels, logits.shape[-1]))
    sums = counts(logits, labels, batch["mask"])
    return sums | {"loss": jnp.sum(losses * batch["mask"])}


def counts(
    logits: Float[Array, "b classes"], labels: Integer[Array, " b"], mask: Float[Array, " b"]
) -> dict[str, Array]:
    """Return the number of examples, and of those with the label among the top 1 and 5 classes.

    Examples with mask 0 are not counted. A tie counts against the label. There is no "top5" of up
    to five classes, which would be all examples.
    """
    rank, tops = label_rank(logits, labels), [k for k in (1, 5) if k < logits.shape[-1]]
    sums = {f"top{k}": jnp.sum((rank < k) * mask) for k in tops}
    return sums | {"examples": jnp.sum(mask)}


def label_rank(
    logits: Float[Array, "b classes"], labels: Integer[Array, " b"]
) -> Integer[Array, " b"]:
    """Return the number of other classes at least as likely as the label; all of them for NaN."""
    label_logit = jnp.take_along_axis(logits, labels[:, None], axis=-1)
    return jnp.sum(~(logits < label_logit), axis=-1) - 1


def results(totals: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return loss, accuracy and, with more than five classes, top5."""
    names = {"loss": "loss", "accuracy": "top1", "top5": "top5"}
    counted = {name: key for name, key in names.items() if key in totals}
    return {name: totals[key] / totals["examples"] for name, key in counted.items()}


def layers(model: ViT) -> list[nnx.MultiHeadAttention]:
    """Return the attention layers in order."""
    return [block.attention for block in model.blocks]


def projections(model: ViT, batch: Batch) -> list[Triple]:
    """Return queries, keys and values (b, tokens, heads, head_dim) of each layer on images."""
    _, intermediates = model(batch["image"])
    inputs = [intermediates[f"block{i:02d}/attention_input"] for i in range(len(model.blocks))]
    return [(a.query(x), a.key(x), a.value(x)) for a, x in zip(layers(model), inputs, strict=True)]


def distances(params: Any) -> Any:
    """Return the number of layers between each parameter and the head (Bao et al. 2022).

    It is 0 for the head, the layer before it and the last norm, 1 for the last of L blocks, ..., L
    for the first block, and L + 1 for the embedding: patches, class token and positions.
    """

    def name(path: tuple) -> tuple:
        return tuple(getattr(key, "key", "") for key in path)

    paths = [name(path) for path, _ in jax.tree.leaves_with_path(params)]
    depth = 1 + max(path[1] for path in paths if path[0] == "blocks")

    def distance(path: tuple, _: Any) -> int:
        names = name(path)
        if names[0] == "blocks":
            return depth - names[1]
        return 0 if names[0] in ("norm", "pool", "pre_logits", "head") else depth + 1

    return jax.tree.map_with_path(distance, params)


def forward_flops(config: Config, *, num_classes: int, channels: int) -> float:
    """Return the operations of the forward pass for one image, two per multiply-add.

    With n tokens of width w, L layers and m features: 2 n p^2 c w for the embedding, and in each
    layer 8 n w^2 for the projections, 4 n w mlp_dim (6 with SwiGLU), and 4 n^2 w for softmax or
    8 n m w for random features, plus 4 n w for each exact key of a query. Pooling by attention is a
    layer with one query; `pre_logits` adds 2 w^2. A training step has three times as many. Not
    counted are recomputation by `remat`, and with an exact window what its chunks add: states on
    both sides and pairs by features, up to twice as many again.
    """
    size, patch_size = config.model.size, config.model.patch_size
    patches = (config.data.image_size // patch_size) ** 2
    pooling, width = config.model.pooling, size.width
    n = patches + config.model.num_prefix

    def block_operations(block: Block) -> int:
        if block.kind == "softmax":
            return 4 * n**2 * width
        window = block.exact_window
        near = min(n, 3 * window + config.model.num_prefix) if window else 0
        return 4 * n * width * (2 * block.num_features + near + min(n, block.exact_keys))

    attention = sum(map(block_operations, blocks(config)))
    mlp = (6 if config.model.activation == "swiglu" else 4) * size.mlp_dim
    layer = width * (8 * n * width + n * mlp)
    pooled = width * (4 * (patches + 1) * width + mlp + 4 * patches) * (pooling == "attention")
    read = width * (1 + ("+" in pooling))
    head = read * num_classes
    if config.model.pre_logits:
        head = width * (read + num_classes)
    ends = 2 * patches * patch_size**2 * channels * width + pooled + 2 * head
    return float(size.depth * layer + attention + ends)


define(
    Config,
    Architecture(
        create=ViT,
        operations=forward_flops,
        layers=layers,
        projections=projections,
        distances=distances,
    ),
)
