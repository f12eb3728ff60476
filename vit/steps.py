"""What a run computes: the training step, evaluation, and both compiled for a mesh of devices."""

from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Integer

from performer.nnx import redraw
from vit import augment, data, devices, metrics, optim
from vit import config as configs
from vit.config import Config
from vit.model import ViT, random_streams

Counts = dict[str, jax.Array]
Seed = int | Integer[Array, ""]


class Program(NamedTuple):
    """What a run computes, compiled at the first call, and how its arrays lie on the devices."""

    graph: nnx.GraphDef
    """Structure of (model, optimizer)."""
    abstract: nnx.State
    """Their state: shapes, dtypes and shardings."""
    initial: Callable[[], nnx.State]
    train: Any
    """(state, batch) -> (state, values of the step); the state that goes in is given up."""
    evaluate: Any
    """(state, batch) -> `eval_step`."""


LOOP_ONLY = ("num_epochs", "log_every", "eval_every", "checkpoint_every")
"""What of a config the programs do not read: the number of steps is given to them."""


def build(config: Config, sizes: dict[str, int], num_steps: int, mesh: Mesh) -> Program:
    """The functions of a run of that many steps on those devices.

    They are made once in a process: who trains, evaluates and resumes compiles them once.

    Raises:
        ValueError: when warm-up and constant rate are longer than the run.
    """
    fields = {k: v for k, v in configs.flatten(config).items() if k not in LOOP_ONLY}
    size, _ = configs.parse_variant(config.model.variant)
    return _build(tuple(fields.items()), size, tuple(sizes.items()), num_steps, mesh)


@lru_cache(maxsize=8)
def _build(fields: tuple, _: configs.Size, sizes: tuple, num_steps: int, mesh: Mesh) -> Program:
    config = configs.with_values(Config(), dict(fields))  # a copy that nobody changes
    rate = optim.schedule(config.optim, num_steps)
    new = partial(create, config, dict(sizes), rate, config.seed)
    graph, shapes = nnx.split(nnx.eval_shape(new))
    everywhere, shardings = devices.everywhere(mesh), devices.of_state(mesh, shapes)
    return Program(
        graph=graph,
        abstract=jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
        ),
        initial=jax.jit(lambda: nnx.state(new()), out_shardings=shardings),
        train=jax.jit(
            partial(train_step, config, graph, config.seed),
            donate_argnums=0,
            out_shardings=(shardings, everywhere),
        ),
        evaluate=jax.jit(partial(eval_step, graph), out_shardings=everywhere),
    )


def create(
    config: Config, sizes: dict[str, int], rate: optax.Schedule, seed: Seed
) -> tuple[ViT, nnx.Optimizer]:
    """A new model, and its optimiser at that rate."""
    model = ViT(config, **sizes, rngs=random_streams(seed))
    return model, nnx.Optimizer(model, optim.optimizer(config.optim, rate), wrt=nnx.Param)


def train_step(
    config: Config, graph: nnx.GraphDef, seed: Seed, state: nnx.State, batch: data.Batch
) -> tuple[nnx.State, Counts]:
    """One step of the optimiser on the mean cross entropy of a batch; frequencies as due.

    Besides the state: train_loss, train_accuracy, gradient_norm, `finite` (for each parameter,
    whether its gradient and its new value are) and `bad` (of the batch, as `data.train_batches`).
    """
    model, optimizer = nnx.merge(graph, state)
    model.train()
    streams, step = random_streams(seed), optimizer.step[...]
    redraw(streams.frequencies.key[...], model, step)
    images, labels = batch["image"], batch["label"]
    targets = jax.nn.one_hot(labels, model.head.out_features)
    targets = optax.losses.smooth_labels(targets, config.optim.label_smoothing)
    if config.data.mixup:
        key = jax.random.fold_in(streams.mixup.key[...], step)
        images = images.astype(jnp.float32)
        images, targets = augment.mixup(key, images, targets, config.data.mixup)
    loss, hits, gradients = loss_and_gradients(
        model, (images, targets, labels), config.optim.accumulate
    )
    optimizer.update(model, gradients)
    finite = jax.tree.map(
        lambda *arrays: jnp.all(jnp.stack([jnp.isfinite(x).all() for x in arrays])),
        gradients,
        nnx.state(model, nnx.Param),
    )
    return nnx.state((model, optimizer)), {
        "train_loss": loss,
        "train_accuracy": hits / len(labels),
        "gradient_norm": optax.tree.norm(gradients),
        "finite": jnp.stack(jax.tree.leaves(finite)),
        "bad": batch["bad"],
    }


def loss_and_gradients(
    model: ViT, batch: tuple[jax.Array, jax.Array, jax.Array], parts: int
) -> tuple[jax.Array, jax.Array, nnx.State]:
    """Mean loss over (images, targets, labels), right answers, and gradients, in `parts` parts.

    The parts go through the model one after another and their gradients are added up, so that only
    one part's activations are kept; the result is that of the whole batch.
    """

    def mean_loss(model: ViT, images: jax.Array, targets: jax.Array, labels: jax.Array) -> Any:
        logits, _ = model(images)
        loss = optax.losses.softmax_cross_entropy(logits, targets).mean() / parts
        return loss, jnp.sum(jnp.argmax(logits, axis=-1) == labels)

    def part(carry: Any, batch: Any) -> tuple[Any, None]:
        rest, total = carry
        model = nnx.merge(graph, nnx.as_pure(params), rest)
        results = nnx.value_and_grad(mean_loss, has_aux=True)(model, *batch)
        rest = nnx.state(model, nnx.Not(nnx.Param))
        return (rest, jax.tree.map(jnp.add, total, results)), None

    def split(x: jax.Array) -> jax.Array:  # each device's rows stay on it
        return x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1)

    graph, params, rest = nnx.split(model, nnx.Param, ...)
    zeros = (jnp.zeros(()), jnp.zeros((), jnp.int32)), jax.tree.map(jnp.zeros_like, params)
    carry, _ = jax.lax.scan(part, (rest, zeros), jax.tree.map(split, batch))
    rest, ((loss, hits), gradients) = carry
    nnx.update(model, rest)
    return loss, hits, gradients


def eval_step(graph: nnx.GraphDef, state: nnx.State, batch: data.Batch) -> Counts:
    """Sums over the unmasked examples of a batch: loss, top1, top5, examples; and bad records."""
    return count(evaluated_model(graph, state), batch)


def evaluated_model(graph: nnx.GraphDef, state: nnx.State) -> ViT:
    """The model in evaluation mode, with the running mean of its parameters if there is one."""
    model, optimizer = nnx.merge(graph, state)
    mean = optim.averaged(optimizer)
    if mean is not None:
        nnx.update(model, mean)
    model.eval()
    return model


def count(model: ViT, batch: data.Batch) -> Counts:
    """The sums of `eval_step`, for a model in evaluation mode."""
    logits, _ = model(batch["image"])
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    counts = metrics.counts(logits, batch["label"], batch["mask"])
    return counts | {"loss": jnp.sum(losses * batch["mask"]), "bad": jnp.sum(batch["bad"] >= 0)}


def evaluate(count: Callable[[Any], Counts], batches: Iterable[data.Batch]) -> metrics.Record:
    """eval_loss, eval_accuracy, eval_top5 over all examples, how many they are, and bad records.

    Raises:
        ValueError: when none of the records can be decoded.
    """
    counts = [jax.device_get(count(batch)) for batch in batches]
    total = {name: sum(float(c[name]) for c in counts) for name in counts[0]}
    examples = total["examples"]
    if not examples:
        raise ValueError(
            f"none of the {int(total['bad'])} records of config.data.eval_split can be decoded"
        )
    return {
        "eval_loss": total["loss"] / examples,
        "eval_accuracy": total["top1"] / examples,
        "eval_top5": total["top5"] / examples,
        "eval_examples": int(examples),
        "eval_bad_records": int(total["bad"]),
    }


def sizes(dataset: data.Dataset) -> dict[str, int]:
    """What a model must know of the data."""
    return {"num_classes": dataset.num_classes, "channels": dataset.channels}
