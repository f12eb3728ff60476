"""The programs of a run: training step and evaluation, compiled for a mesh of devices."""

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
from vit import data
from vit.config import Config
from vit.model.dropout import Dropout
from vit.reports import metrics
from vit.run import devices, optim
from vit.task import Model, Sums, Task, random_streams

Seed = int | Integer[Array, ""]


class Program(NamedTuple):
    """Programs of a run, compiled at the first call, and how its arrays lie on the devices."""

    graph: nnx.GraphDef
    """Structure of (model, optimizer)."""
    abstract: nnx.State
    """Their state: shapes, dtypes and shardings."""
    initial: Callable[[], nnx.State]
    train: Any
    """(state, batch) -> (state, values of the step); the state that goes in is given up."""
    evaluate: Any
    """(state, batch) -> `eval_step`."""


LOOP_ONLY = {
    *("seed", "num_epochs", "restarts"),
    *("log_every", "eval_every", "checkpoint_every", "keep_every"),
}
"""Fields that the programs do not read: they are given the seed and numbers of steps."""

AHEAD = 3
"""Steps that may wait for the devices: their batches lie in the devices' memory."""

OVER_ROWS = (Dropout, PerformerAttention, nnx.BatchNorm)
"""Modules that draw for the rows of a batch, or average over them, along their `axis_name`."""


def build(
    config: Config, task: Task, num_steps: int, mesh: Mesh, restarts: tuple[int, ...] = ()
) -> Program:
    """Return the programs of a run of that many steps on those devices.

    They are made once in a process, for all seeds, training, evaluation and resumption.

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
    program = _build(tuple(fields.items()), config.model.size, task, (num_steps, restarts), mesh)
    bound = {name: _bound(getattr(program, name), config.seed) for name in ("initial", "train")}
    return program._replace(**bound)


def _bound(function: Any, seed: int) -> Any:
    """Return a compiled function of a seed and more, at that seed; it can still be lowered."""
    on_device = jnp.int32(seed)  # a number of Python would be sent there at each step
    bound = partial(function, on_device)
    bound.lower = partial(function.lower, on_device)  # pyright: ignore[reportAttributeAccessIssue]
    bound.__name__ = function.__name__  # pyright: ignore[reportAttributeAccessIssue]
    return bound


def shapes(
    config: Config, task: Task, rate: optax.Schedule | None = None
) -> tuple[nnx.GraphDef, nnx.State]:
    """Return the structure of (model, optimizer) of a run, and the shapes of their state."""
    new = partial(create, config, task, rate or optax.constant_schedule(0.0), config.seed)
    return nnx.split(nnx.eval_shape(new))


def parameters(state: nnx.State) -> dict[str, Any]:
    """Return name -> array (or shape) of each parameter in the state of (model, optimizer).

    The order is that of `jax.tree.leaves`; a name is a path, "blocks.0.attention.key.bias".
    """
    model = nnx.filter_state(state, nnx.Param)
    return {
        ".".join(str(key.key) for key in path[1:] if hasattr(key, "key")): x
        for path, x in jax.tree.leaves_with_path(model)
    }


@lru_cache(maxsize=8)
def _build(fields: tuple, _: configs.Size, task: Task, length: tuple, mesh: Mesh) -> Program:
    """Return the programs of all seeds: the seed is the first argument of `initial` and `train`."""
    config = configs.with_values(Config(), dict(fields))  # a copy that nobody changes
    rate = optim.schedule(config.optim, *length)
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
            _on(mesh, partial(train_step, config, task, graph, mesh=mesh)),
            donate_argnums=1,
            out_shardings=(shardings, everywhere),
        ),
        evaluate=jax.jit(_on(mesh, partial(eval_step, task, graph)), out_shardings=everywhere),
    )


def _on(mesh: Mesh, function: partial) -> Callable:
    """Set the mesh in context, where attention reads number and kind of the devices."""

    def call(*arguments):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*arguments)

    call.__name__ = function.func.__name__
    return call


def create(
    config: Config, task: Task, rate: optax.Schedule, seed: Seed
) -> tuple[Model, nnx.Optimizer]:
    """Return a new model, and its optimiser at that rate."""
    model = task.create(config, rngs=random_streams(seed))
    return model, optimizer(config, task, rate, model)


def optimizer(config: Config, task: Task, rate: optax.Schedule, model: Model) -> nnx.Optimizer:
    """Return a new optimiser for the parameters of the model."""
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
    after = nnx.state((model, optimizer))
    finite = jax.tree.map(
        lambda *arrays: jnp.all(jnp.stack([jnp.isfinite(x).all() for x in arrays])),
        gradients,
        nnx.state(model, nnx.Param),
    )
    values = {
        "train_loss": loss,
        **{f"train_{name}": total / len(batch["bad"]) for name, total in sums.items()},
        "gradient_norm": optax.tree.norm(gradients),
        "finite": jnp.stack(jax.tree.leaves(finite)),
        "bad": batch["bad"],
    }
    if not config.optim.skip_nonfinite:
        return after, values
    good = jnp.isfinite(loss) & values["finite"].all()
    return unless_skipped(good, before, after), values | {"skipped": ~good}


def unless_skipped(good: jax.Array, before: nnx.State, after: nnx.State) -> nnx.State:
    """Return the state after a good step; else that before, with the optimiser's counts going on.

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
    """Return mean loss over the examples, the sums of `task.loss`, and gradients.

    The batch goes through the model in `parts` parts, one after another, whose gradients are added
    up: only one part's activations are kept; the result is that of the whole batch. With a mesh
    whose devices all hold whole parameters (`fsdp` 1) each device adds up the gradients of its own
    rows, and those of all devices are added up once, after the last part (where `task.by_device`).
    With `fsdp` a device has no room for whole gradients: each part reduces them to its share.
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
    """Return other state, loss, sums and gradients; over the devices along the axes, if any."""

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
    """Return `count` of the model that `evaluated_model` gives."""
    return count(task, evaluated_model(graph, state), batch)


def evaluated_model(graph: nnx.GraphDef, state: nnx.State) -> Model:
    """Return the model in evaluation mode, with the running mean of its parameters if any."""
    model, optimizer = nnx.merge(graph, state)
    mean = optim.averaged(optimizer)
    if mean is not None:
        nnx.update(model, mean)
    model.eval()
    return model


def count(task: Task, model: Model, batch: data.Batch) -> Sums:
    """Return the sums of `task.count`, the number of unmasked examples, and of bad records."""
    numbers = {"examples": jnp.sum(batch["mask"]), "bad": jnp.sum(batch["bad"] >= 0)}
    return task.count(model, batch) | numbers


def evaluate(
    task: Task, count: Callable[[Any], Sums], batches: Iterable[data.Batch]
) -> metrics.Record:
    """Return eval_NAME for the results of the task, the number of examples, and bad records.

    Sums over the batches are in float64.

    Raises:
        ValueError: when none of the records can be decoded.
    """
    counts = []
    for batch in batches:
        counts.append(count(batch))
        jax.block_until_ready(counts[-AHEAD:][0])
    counts = jax.device_get(counts)
    total = {k: np.asarray(sum(np.asarray(c[k], np.float64) for c in counts)) for k in counts[0]}
    bad = int(total.pop("bad"))
    if not total["examples"]:
        raise ValueError(f"none of the {bad} records of config.data.eval_split can be decoded")
    results = {f"eval_{name}": float(value) for name, value in task.results(total).items()}
    return results | {"eval_examples": int(total["examples"]), "eval_bad_records": bad}
