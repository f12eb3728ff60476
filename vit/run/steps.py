"""Programs of a run: training and evaluation step, compiled for a mesh of devices."""

from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Integer

from performer.nnx import redraw
from vit import config as configs
from vit import data
from vit.config import TrainConfig
from vit.reports import metrics
from vit.run import devices, optim
from vit.task import Model, Sums, Task, random_streams

Seed = int | Integer[Array, ""]


class Program(NamedTuple):
    """Programs of a run, compiled at the first call, and the sharding of its arrays."""

    graph: nnx.GraphDef
    """Structure of (model, optimizer)."""
    abstract: nnx.State
    """Shapes, dtypes and shardings of their state."""
    initial: Callable[[], nnx.State]
    train: Any
    """(state, batch) -> (state, values of the step); the first state is donated."""
    evaluate: Any
    """(state, batch) -> the sums of `eval_step`."""


LOOP_ONLY = {
    *("seed", "num_epochs", "log_every", "eval_every", "checkpoint_every", "keep_every"),
}
"""Fields that the programs do not read; seed and numbers of steps are arguments."""

AHEAD = 3
"""Maximum number of dispatched steps; their batches are in device memory."""


def build(config: TrainConfig, task: Task, num_steps: int, mesh: Mesh) -> Program:
    """Return the programs of a run.

    They are compiled once in a process: for all seeds, training, evaluation and resumption.

    Args:
        config: config of the run.
        task: task of the run.
        num_steps: number of steps of the run.
        mesh: mesh of devices.

    Raises:
        ValueError: when warm-up and constant rate are longer than the run.
    """
    fields = {k: v for k, v in configs.flatten(config).items() if k not in LOOP_ONLY}
    program = _build(type(config), tuple(fields.items()), config.size, task, num_steps, mesh)
    bound = {name: _bound(getattr(program, name), config.seed) for name in ("initial", "train")}
    return program._replace(**bound)


def _bound(function: Any, seed: int) -> Any:
    """Return a jitted function with its first argument, the seed, bound; it keeps `lower`."""
    on_device = jnp.int32(seed)  # a Python number would be transferred at each step
    bound = partial(function, on_device)
    bound.lower = partial(function.lower, on_device)  # pyright: ignore[reportAttributeAccessIssue]
    bound.__name__ = function.__name__  # pyright: ignore[reportAttributeAccessIssue]
    return bound


def shapes(
    config: TrainConfig, task: Task, rate: optax.Schedule | None = None
) -> tuple[nnx.GraphDef, nnx.State]:
    """Return the structure of (model, optimizer) of a run, and the shapes of their state."""
    new = partial(create, config, task, rate or optax.constant_schedule(0.0), config.seed)
    return nnx.split(nnx.eval_shape(new))


def parameters(state: nnx.State) -> dict[str, Any]:
    """Return the parameters in the state of (model, optimizer) by name.

    The order is as in `jax.tree.leaves`; a name is a path, as "blocks.0.attention.key.bias".
    """
    model = nnx.filter_state(state, nnx.Param)
    return {
        ".".join(str(key.key) for key in path[1:] if hasattr(key, "key")): x
        for path, x in jax.tree.leaves_with_path(model)
    }


@lru_cache(maxsize=8)
def _build(
    kind: type[TrainConfig], fields: tuple, _: Any, task: Task, num_steps: int, mesh: Mesh
) -> Program:
    """Return the programs; `initial` and `train` have the seed as first argument."""
    config = configs.with_values(kind(), dict(fields))  # a copy that stays unchanged
    rate = optim.schedule(config.optim, num_steps)
    graph, arrays = shapes(config, task, rate)
    everywhere, shardings = devices.everywhere(mesh), devices.of_state(mesh, arrays)

    def initial(seed: Seed) -> nnx.State:
        return nnx.state(create(config, task, rate, seed))

    return Program(
        graph=graph,
        abstract=jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), arrays, shardings
        ),
        initial=jax.jit(initial, out_shardings=shardings),
        train=jax.jit(
            _on(mesh, partial(train_step, config, task, graph)),
            donate_argnums=1,
            out_shardings=(shardings, everywhere),
        ),
        evaluate=jax.jit(_on(mesh, partial(eval_step, task, graph)), out_shardings=everywhere),
    )


def _on(mesh: Mesh, function: partial) -> Callable:
    """Set the context mesh, from which attention reads number and kind of the devices."""

    def call(*arguments):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*arguments)

    call.__name__ = function.func.__name__
    return call


def create(
    config: TrainConfig, task: Task, rate: optax.Schedule, seed: Seed
) -> tuple[Model, nnx.Optimizer]:
    """Return a new model and its optimiser."""
    model = task.create(config, rngs=random_streams(seed))
    return model, optimizer(config, task, rate, model)


def optimizer(config: TrainConfig, task: Task, rate: optax.Schedule, model: Model) -> nnx.Optimizer:
    """Return a new optimiser of the model's parameters."""
    transform = optim.optimizer(config.optim, rate, task.distances)
    return nnx.Optimizer(model, transform, wrt=nnx.Param)


def train_step(
    config: TrainConfig,
    task: Task,
    graph: nnx.GraphDef,
    seed: Seed,
    state: nnx.State,
    batch: data.Batch,
) -> tuple[nnx.State, Sums]:
    """Return the state after one optimiser step on the mean loss of a batch, and its values.

    Frequencies are redrawn if due.

    Returns:
        The new state, and a dict of values: train_loss; train_NAME, the mean of each sum of
        `task.loss`; gradient_norm; and `finite`, True for each parameter whose gradient and new
        value are finite.
    """
    model, optimizer = nnx.merge(graph, state)
    model.train()
    streams, step = random_streams(seed), optimizer.step[...]
    redraw(streams.frequencies.key[...], model, step)
    key = jax.random.fold_in(streams.mixup.key[...], step)
    examples = task.examples(config, key, batch)
    count, rows = config.optim.accumulate, len(jax.tree.leaves(batch)[0])
    loss, sums, gradients = loss_and_gradients(task, model, examples, count)
    optimizer.update(model, gradients)
    finite = jax.tree.map(
        lambda *arrays: jnp.all(jnp.stack([jnp.isfinite(x).all() for x in arrays])),
        gradients,
        nnx.state(model, nnx.Param),
    )
    values = {
        "train_loss": loss,
        **{f"train_{name}": total / rows for name, total in sums.items()},
        "gradient_norm": optax.tree.norm(gradients),
        "finite": jnp.stack(jax.tree.leaves(finite)),
    }
    return nnx.state((model, optimizer)), values


def loss_and_gradients(
    task: Task, model: Model, examples: Any, count: int
) -> tuple[jax.Array, Sums, nnx.State]:
    """Return the mean loss of the examples, the sums of `task.loss`, and the gradients.

    Gradients are accumulated over `count` parts of the batch, so that only the activations of one
    part are in memory. The result is the same as for the whole batch, except with dropout, and with
    calibration while training, whose running moments advance with each part.
    """
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def share(model: Model, examples: Any) -> tuple[jax.Array, Sums]:
        loss, sums = task.loss(model, examples)
        return loss / count, sums

    def part(carry: Any, examples: Any) -> tuple[Any, Sums]:
        rest, total = carry
        model = nnx.merge(graph, nnx.as_pure(params), rest)
        (loss, sums), gradients = nnx.value_and_grad(share, has_aux=True)(model, examples)
        rest = nnx.state(model, nnx.Not(nnx.Param))
        return (rest, jax.tree.map(jnp.add, total, (loss, gradients))), sums

    def split(x: jax.Array) -> jax.Array:  # rows stay on their device
        return x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1)

    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    (rest, (loss, gradients)), sums = jax.lax.scan(
        part, (rest, zeros), jax.tree.map(split, examples)
    )
    nnx.update(model, rest)
    return loss, jax.tree.map(lambda x: jnp.sum(x, axis=0), sums), gradients


def eval_step(task: Task, graph: nnx.GraphDef, state: nnx.State, batch: data.Batch) -> Sums:
    """Return the sums of `count` for the evaluated model."""
    return count(task, evaluated_model(graph, state), batch)


def evaluated_model(graph: nnx.GraphDef, state: nnx.State) -> Model:
    """Return the model in evaluation mode, with the running mean of the parameters if any."""
    model, optimizer = nnx.merge(graph, state)
    mean = optim.averaged(optimizer)
    if mean is not None:
        nnx.update(model, mean)
    model.eval()
    return model


def count(task: Task, model: Model, batch: data.Batch) -> Sums:
    """Return the sums of `task.count` and the number of unmasked examples."""
    return task.count(model, batch) | {"examples": jnp.sum(batch["mask"])}


def evaluate_model(task: Task, model: Model, batches: Iterable[data.Batch]) -> metrics.Record:
    """Return the results of `evaluate` for a model in evaluation mode.

    Models that differ in their arrays only share a program.
    """
    return evaluate(task, partial(_count, task, *nnx.split(model)), batches)


@partial(jax.jit, static_argnums=(0, 1))
def _count(task, graph, state, batch):
    return count(task, nnx.merge(graph, state), batch)


def evaluate(
    task: Task, count: Callable[[Any], Sums], batches: Iterable[data.Batch]
) -> metrics.Record:
    """Return eval_NAME for each result of the task, and the number of examples.

    Sums over batches are in float64.
    """
    counts = []
    for batch in batches:
        counts.append(count(batch))
        jax.block_until_ready(counts[-AHEAD:][0])
    counts = jax.device_get(counts)
    total = {k: np.asarray(sum(np.asarray(c[k], np.float64) for c in counts)) for k in counts[0]}
    results = {f"eval_{name}": float(value) for name, value in task.results(total).items()}
    return results | {"eval_examples": int(total["examples"])}
