"""What a run computes: the training step, evaluation, and both compiled for a mesh of devices."""

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

from performer.nnx import PerformerAttention, redraw
from vit import config as configs
from vit import data, devices, metrics, optim
from vit.config import Config
from vit.dropout import Dropout
from vit.task import Model, Sums, Task, random_streams

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


LOOP_ONLY = (
    *("num_epochs", "restarts"),
    *("log_every", "eval_every", "checkpoint_every", "keep_every"),
)
"""What of a config the programs do not read: numbers of steps are given to them."""


AHEAD = 3
"""Steps that may wait for the devices: their batches lie in the devices' memory."""

OVER_ROWS = (Dropout, PerformerAttention, nnx.BatchNorm)
"""Modules that draw for the rows of a batch, or average over them, along their `axis_name`."""


def build(
    config: Config, task: Task, num_steps: int, mesh: Mesh, restarts: tuple[int, ...] = ()
) -> Program:
    """The functions of a run of that many steps on those devices.

    They are made once in a process: who trains, evaluates and resumes compiles them once.

    Args:
        config: of the run.
        task: what it learns.
        num_steps: of the run.
        mesh: of devices.
        restarts: steps at which the rate starts anew, as `runs.restarts`.

    Raises:
        ValueError: when warm-up and constant rate are longer than the run, or than a cycle.
    """
    fields = {k: v for k, v in configs.flatten(config).items() if k not in LOOP_ONLY}
    return _build(tuple(fields.items()), config.model.size, task, (num_steps, restarts), mesh)


def shapes(
    config: Config, task: Task, rate: optax.Schedule | None = None
) -> tuple[nnx.GraphDef, nnx.State]:
    """Structure of (model, optimizer) of a run, and the shapes of their state."""
    new = partial(create, config, task, rate or optax.constant_schedule(0.0), config.seed)
    return nnx.split(nnx.eval_shape(new))


@lru_cache(maxsize=8)
def _build(fields: tuple, _: configs.Size, task: Task, length: tuple, mesh: Mesh) -> Program:
    config = configs.with_values(Config(), dict(fields))  # a copy that nobody changes
    rate = optim.schedule(config.optim, *length)
    new = partial(create, config, task, rate, config.seed)
    graph, arrays = shapes(config, task, rate)
    everywhere, shardings = devices.everywhere(mesh), devices.of_state(mesh, arrays)

    def initial() -> nnx.State:
        return nnx.state(new())

    return Program(
        graph=graph,
        abstract=jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), arrays, shardings
        ),
        initial=jax.jit(initial, out_shardings=shardings),
        train=jax.jit(
            _on(mesh, partial(train_step, config, task, graph, config.seed, mesh=mesh)),
            donate_argnums=0,
            out_shardings=(shardings, everywhere),
        ),
        evaluate=jax.jit(_on(mesh, partial(eval_step, task, graph)), out_shardings=everywhere),
    )


def _on(mesh: Mesh, function: partial) -> Callable:
    """With the mesh in context: attention reads there for how many devices of which kind it is."""

    def call(*arguments):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*arguments)

    call.__name__ = function.func.__name__
    return call


def create(
    config: Config, task: Task, rate: optax.Schedule, seed: Seed
) -> tuple[Model, nnx.Optimizer]:
    """A new model, and its optimiser at that rate."""
    model = task.create(config, rngs=random_streams(seed))
    return model, optimizer(config, task, rate, model)


def optimizer(config: Config, task: Task, rate: optax.Schedule, model: Model) -> nnx.Optimizer:
    """A new one for the parameters of the model."""
    transform = optim.optimizer(config.optim, rate, task.distances)
    return nnx.Optimizer(model, transform, wrt=nnx.Param)


def train_step(
    config: Config,
    task: Task,
    graph: nnx.GraphDef,
    seed: Seed,
    state: nnx.State,
    batch: data.Batch,
    mesh: Mesh | None = None,
) -> tuple[nnx.State, Sums]:
    """One step of the optimiser on the mean loss of a batch; frequencies as due.

    Besides the state: train_loss, train_NAME for each sum of `task.loss` over the number of
    examples, gradient_norm, `finite` (for each parameter, whether its gradient and its new value
    are) and `bad` (of the batch, as `data.train_batches`). With `optim.skip_nonfinite` a step whose
    loss or any of these is not finite leaves the state as it was, and `skipped` says so.
    """
    model, optimizer = nnx.merge(graph, state)
    model.train()
    streams, step = random_streams(seed), optimizer.step[...]
    redraw(streams.frequencies.key[...], model, step)
    key = jax.random.fold_in(streams.mixup.key[...], step)
    examples = task.examples(config, key, batch)
    before = jax.tree.map(lambda x: x, nnx.state((model, optimizer)))
    parts = config.optim.accumulate
    loss, sums, gradients = loss_and_gradients(task, model, examples, parts, mesh)
    optimizer.update(model, gradients)
    finite = jax.tree.map(
        lambda *arrays: jnp.all(jnp.stack([jnp.isfinite(x).all() for x in arrays])),
        gradients,
        nnx.state(model, nnx.Param),
    )
    after, values = (
        nnx.state((model, optimizer)),
        {
            "train_loss": loss,
            **{f"train_{name}": total / len(batch["bad"]) for name, total in sums.items()},
            "gradient_norm": optax.tree.norm(gradients),
            "finite": jnp.stack(jax.tree.leaves(finite)),
            "bad": batch["bad"],
        },
    )
    if not config.optim.skip_nonfinite:
        return after, values
    good = jnp.isfinite(loss) & values["finite"].all()
    return unless_skipped(good, before, after), values | {"skipped": ~good}


def unless_skipped(good: jax.Array, before: nnx.State, after: nnx.State) -> nnx.State:
    """The state after a good step; else that before, in which only the optimiser's counts go on.

    So the rate stays a function of the step. Adam's correction of its first moments, which reads
    such a count, too, is then too small by what a step without a gradient would make it.
    """

    def chosen(path: Any, old: jax.Array, new: jax.Array) -> jax.Array:
        is_count = path[0].key == 1 and jnp.issubdtype(new.dtype, jnp.integer)
        return new if is_count else jnp.where(good, new, old)

    return jax.tree.map_with_path(chosen, before, after)


def loss_and_gradients(
    task: Task, model: Model, examples: Any, parts: int, mesh: Mesh | None = None
) -> tuple[jax.Array, Sums, nnx.State]:
    """Mean loss over the examples, the sums of `task.loss`, and gradients, in `parts` parts.

    The parts go through the model one after another and their gradients are added up, so that only
    one part's activations are kept; the result is that of the whole batch. With a mesh whose
    devices all hold whole parameters (`fsdp` 1) each device adds up the gradients of its own rows,
    and those of all devices are added up once, after the last part (where `task.by_device`). With
    `fsdp` a device has no room for whole gradients: each part reduces them to its share.
    """
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    summed = partial(_summed, task, graph, parts)
    if parts > 1 and task.by_device and mesh is not None and mesh.shape["fsdp"] == 1 < mesh.size:
        whole, rows = devices.everywhere(mesh).spec, devices.of_batch(mesh).spec
        summed = jax.shard_map(
            partial(summed, axis_name=mesh.axis_names),
            mesh=mesh,
            in_specs=(whole, whole, rows),
            out_specs=whole,
            check_vma=False,
        )
    rest, loss, sums, gradients = summed(params, rest, examples)
    nnx.update(model, rest)
    return loss, sums, gradients


def _summed(
    task: Task,
    graph: nnx.GraphDef,
    parts: int,
    params: nnx.State,
    rest: nnx.State,
    examples: Any,
    axis_name: tuple[str, ...] | None = None,
) -> tuple[nnx.State, jax.Array, Sums, nnx.State]:
    """What is no parameter, loss, sums and gradients; over the devices along the axes, if any."""

    def share(model: Model, examples: Any) -> tuple[jax.Array, Sums]:
        loss, sums = task.loss(model, examples)
        return loss / parts, sums

    def part(carry: Any, examples: Any) -> tuple[Any, Sums]:
        rest, total = carry
        model = nnx.merge(graph, nnx.as_pure(params), rest)
        for _, module in nnx.iter_modules(model):
            if isinstance(module, OVER_ROWS):
                module.axis_name = axis_name  # pyright: ignore[reportAttributeAccessIssue]
        (loss, sums), gradients = nnx.value_and_grad(share, has_aux=True)(model, examples)
        rest = nnx.state(model, nnx.Not(nnx.Param))
        return (rest, jax.tree.map(jnp.add, total, (loss, gradients))), sums

    def split(x: jax.Array) -> jax.Array:  # each device's rows stay on it
        return x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1)

    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    (rest, total), sums = jax.lax.scan(part, (rest, zeros), jax.tree.map(split, examples))
    sums = jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)
    if axis_name is not None:
        total, sums = jax.lax.pmean(total, axis_name), jax.lax.psum(sums, axis_name)
    return rest, total[0], sums, total[1]


def eval_step(task: Task, graph: nnx.GraphDef, state: nnx.State, batch: data.Batch) -> Sums:
    """`count` of the model that `evaluated_model` gives."""
    return count(task, evaluated_model(graph, state), batch)


def evaluated_model(graph: nnx.GraphDef, state: nnx.State) -> Model:
    """The model in evaluation mode, with the running mean of its parameters if there is one."""
    model, optimizer = nnx.merge(graph, state)
    mean = optim.averaged(optimizer)
    if mean is not None:
        nnx.update(model, mean)
    model.eval()
    return model


def count(task: Task, model: Model, batch: data.Batch) -> Sums:
    """What `task.count` gives, how many examples are not masked, and how many records are bad."""
    numbers = {"examples": jnp.sum(batch["mask"]), "bad": jnp.sum(batch["bad"] >= 0)}
    return task.count(model, batch) | numbers


def totals(count: Callable[[Any], Sums], batches: Iterable[data.Batch]) -> dict[str, np.ndarray]:
    """The sums over all batches, in float64.

    Raises:
        ValueError: when none of the records can be decoded.
    """
    counts = []
    for batch in batches:
        counts.append(count(batch))
        jax.block_until_ready(counts[-AHEAD:][0])
    counts = jax.device_get(counts)
    total = {k: np.asarray(sum(np.asarray(c[k], np.float64) for c in counts)) for k in counts[0]}
    if not total["examples"].all():
        raise ValueError(
            f"none of the {int(total['bad'].max())} records of config.data.eval_split can be"
            " decoded"
        )
    return total


def evaluate(
    task: Task, count: Callable[[Any], Sums], batches: Iterable[data.Batch]
) -> metrics.Record:
    """eval_NAME for the results of the task, how many examples they are of, and bad records.

    Raises:
        ValueError: when none of the records can be decoded.
    """
    total = totals(count, batches)
    bad = total.pop("bad")
    results = {f"eval_{name}": float(value) for name, value in task.results(total).items()}
    return results | {"eval_examples": int(total["examples"]), "eval_bad_records": int(bad)}
