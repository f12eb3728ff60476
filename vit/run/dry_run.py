"""Cost of a run: its steps compiled, not run, for these devices or for others.

Of other devices (`vit.run.topologies`) no data set is read: how many examples and classes it has is
known of some, and given for the rest.
"""

import collections
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from vit import config as configs
from vit import data
from vit.run import costs, devices, runs, topologies
from vit.task import Task

KNOWN = {
    "digits": (1_437, 360, 10, 1),
    "fashion_mnist": (60_000, 10_000, 10, 1),
    "imagenet2012": (1_281_167, 50_000, 1_000, 3),
    "places365": (1_803_460, 36_500, 365, 3),
    "inaturalist2021": (2_686_843, 100_000, 10_000, 3),
}
"""Public data sets: examples of training and of evaluation, classes, channels."""

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "f64": 8}

ADVICE = (
    "take a smaller config.data.batch_size, more devices, a larger config.fsdp (parameters and"
    " moments are parted), config.optim.accumulate (a batch in parts), or config.model.remat=true"
)


class Cost(NamedTuple):
    """Cost of one call of a program, on each device."""

    seconds: float
    """Duration of the compilation."""
    memory: Mapping[str, int]
    """Bytes, as `costs.memory_of`."""
    operations: float
    """Operations as the compiler counts them; 0 for GPUs, whose compiler does not."""
    bytes: float
    """Traffic to and from memory, likewise."""
    collectives: Mapping[str, tuple[int, int]]
    """Number and bytes of the results of each kind; those inside a loop once."""


class Plan(NamedTuple):
    """Cost of a run, from `plan`."""

    device: str
    num_devices: int
    mesh: Mapping[str, int]
    parameters: str
    """Table of the parameters."""
    batch: Mapping[str, str]
    """Shape, dtype and sharding, by name."""
    steps_per_epoch: int
    num_steps: int
    batch_size: int
    noun: str
    """Name of an example."""
    model_operations: float
    """Operations of the forward pass for one example; 0 where the task does not count them."""
    train: Cost
    evaluate: Cost
    has: devices.Peak | None
    """Peak of a device, if known."""

    @property
    def fits(self) -> bool | None:
        """True when a training and an evaluation step fit into memory; None where it is unknown."""
        if self.has is None:
            return None
        need = max(self.train.memory["in all"], self.evaluate.memory["in all"])
        return need <= int(self.has.gib * 2**30)

    @property
    def roof(self) -> dict[str, float]:
        """Least seconds of a training step, by operations and by memory traffic."""
        if self.has is None:
            return {}
        model = 3 * self.model_operations * self.batch_size / self.num_devices
        return {
            "operations": max(self.train.operations, model) / self.has.flops,
            "memory traffic": self.train.bytes / self.has.bandwidth,
        }


def dataset(
    config: configs.Config, topology: str = "", size: Sequence[str] = ()
) -> data.Dataset | None:
    """Return the data set of a dry run, of which only the size is known; None to read the config's.

    Args:
        config: names it.
        topology: as `topologies.devices`: nothing is read; or "" for the devices that are there.
        size: numbers of examples of training and of evaluation, of classes and of channels.

    Raises:
        ValueError: when the size must be given, or is none.
    """
    if not topology and not size:
        return None
    if size and not (len(size) == 4 and all(n.isdecimal() and int(n) for n in size)):
        raise ValueError(
            f"--data_size={','.join(size)}: four numbers above 0, examples of training and of"
            " evaluation, classes, channels"
        )
    if not size and config.data.name not in KNOWN:
        raise ValueError(
            f"how large is config.data.name={config.data.name!r}? Say --data_size=TRAIN,EVALUATION,"
            f"CLASSES,CHANNELS; known are {', '.join(KNOWN)}"
        )
    train, evaluation, classes, channels = map(int, size) if size else KNOWN[config.data.name]
    names = tuple(map(str, range(classes)))
    return data.Dataset(range(train), range(evaluation), names, channels)


def plan(
    config: configs.Config,
    topology: str = "",
    dataset: data.Dataset | None = None,
    task: Task | None = None,
) -> Plan:
    """Compile the training and the evaluation step of a run.

    Args:
        config: of the run.
        topology: as `topologies.devices`; "" for the devices that are there.
        dataset: only its sizes and a blank example are read; that of the config if None.
        task: to classify images if None.

    Raises:
        ValueError: as `vit.run.loop.train`, or for a topology that cannot take the config, before
            anything is compiled.
    """
    there = topologies.devices(topology) if topology else jax.devices()
    configs.validate(config)
    mesh = devices.mesh(config, there)
    dataset, task = runs.subject(config, dataset, task)
    steps_per_epoch, num_steps = runs.length(config, dataset)
    program = runs.program(config, dataset, task, mesh)
    batch, masked = (runs.abstract_batch(dataset, config, mesh, mask=m) for m in (False, True))
    gpu = there[0].platform in ("cuda", "gpu")
    train = compiled(program.train, program.abstract, batch, gpu=gpu)
    parts = config.optim.accumulate  # a loop, whose inside the compiler counts once
    return Plan(
        device=there[0].device_kind,
        num_devices=len(there),
        mesh=dict(mesh.shape),
        parameters=costs.parameter_table(program.abstract),
        batch={name: f"{x.shape} {x.dtype}, {x.sharding.spec}" for name, x in batch.items()},
        steps_per_epoch=steps_per_epoch,
        num_steps=num_steps,
        batch_size=config.data.batch_size,
        noun=task.noun,
        model_operations=task.operations(config) if task.operations else 0.0,
        train=train._replace(operations=parts * train.operations, bytes=parts * train.bytes),
        evaluate=compiled(program.evaluate, program.abstract, masked, gpu=gpu),
        has=devices.peak_of(there[0].device_kind),
    )


def compiled(function: Any, *arguments: Any, gpu: bool) -> Cost:
    """Compile a program and return its cost; ValueError when the compiler finds no room for it."""
    start = time.perf_counter()
    # A described GPU tunes nothing, and Triton's products then find no tiles for some widths.
    described = gpu and jax.default_backend() == "cpu"
    options = {"xla_gpu_enable_triton_gemm": False} if described else None
    try:
        program = function.lower(*arguments).compile(options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        said = " ".join(str(error).split(". HLO module")[0].split())
        raise ValueError(
            f"{function.__name__} does not fit: {ADVICE}. The compiler: {said}"
        ) from error
    seconds = time.perf_counter() - start
    counted = {} if gpu else program.cost_analysis() or {}  # GPUs' libraries are not counted
    return Cost(
        seconds,
        costs.memory_of(program),
        counted.get("flops", 0.0),
        counted.get("bytes accessed", 0.0),
        collectives(program.as_text()),
    )


def collectives(text: str) -> dict[str, tuple[int, int]]:
    """Return the number of each kind in a compiled program, and the bytes of their results."""
    found: dict[str, list[int]] = collections.defaultdict(list)
    for kind in COLLECTIVES:
        for shapes in re.findall(rf"= (\(.*?\)|\S+) {kind}(?:-start)?\(", text):
            sizes = [
                BYTES.get(dtype, 4) * math.prod(int(n) for n in re.findall(r"\d+", shape))
                for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", shapes)
            ]
            found[kind].append(sum(sizes))
    return {kind: (len(sizes), sum(sizes)) for kind, sizes in found.items()}


def text(plan: Plan) -> str:
    """Return the plan in lines."""
    gib, has = 2.0**30, plan.has
    flops = plan.model_operations
    lines = [
        plan.parameters,
        f"devices: {plan.num_devices} x {plan.device}, mesh {dict(plan.mesh)}; compiled, not run",
        f"steps: {plan.num_steps:,} ({plan.steps_per_epoch:,} an epoch)",
        f"operations: {flops / 1e9:.3f} GFLOP an {plan.noun} forward,"
        f" {3 * flops * plan.batch_size / 1e12:.4g} TFLOP a training step"
        if flops
        else "operations: not counted",
        *(f"batch: {name} {shape}" for name, shape in plan.batch.items()),
    ]
    for name, cost in [("training step", plan.train), ("evaluation step", plan.evaluate)]:
        parts = ", ".join(f"{k} {v / gib:,.3f} GiB" for k, v in cost.memory.items())
        lines += [
            f"{name}, on each device:",
            f"  memory: {parts}" + (f"; it has {has.gib:,.0f} GiB" if has else ""),
            f"  operations {cost.operations / 1e12:,.4f} TFLOP, traffic {cost.bytes / gib:,.3f} GiB"
            if cost.operations
            else "  operations and traffic: this compiler does not count them",
            f"  compiled in {cost.seconds:,.1f} s",
            *(
                f"  {kind}: {count}, {size / 2**20:,.1f} MiB"
                for kind, (count, size) in cost.collectives.items()
            ),
        ]
    if plan.roof:
        bound, seconds = max(plan.roof.items(), key=lambda item: item[1])
        lines.append(
            f"roof: {plan.batch_size / seconds:,.0f} {plan.noun}s a second, bounded by {bound}"
            f" ({', '.join(f'{k} {1e3 * v:,.2f} ms' for k, v in plan.roof.items())})"
        )
    if plan.fits is not None:
        lines.append("fits" if plan.fits else f"does not fit: {ADVICE}")
    return "\n".join(lines)


def as_json(plan: Plan) -> str:
    """Return the plan as JSON."""
    parts = {name: getattr(plan, name)._asdict() for name in ("train", "evaluate")}
    has = plan.has and plan.has._asdict()
    values = plan._asdict() | parts | {"has": has, "fits": plan.fits, "roof": plan.roof}
    return json.dumps(values, indent=2)
