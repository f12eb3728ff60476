"""What a run would cost: its steps compiled, not run, for these devices or for others.

Of other devices (`vit.topologies`) no data set is read: how many examples and classes it has is
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
from vit import costs, data, devices, runs, topologies
from vit.task import Task


class Size(NamedTuple):
    """Of a data set."""

    train: int
    evaluation: int
    num_classes: int
    channels: int


KNOWN = {
    "digits": Size(1_437, 360, 10, 1),
    "fashion_mnist": Size(60_000, 10_000, 10, 1),
    "imagenet2012": Size(1_281_167, 50_000, 1_000, 3),
    "places365": Size(1_803_460, 36_500, 365, 3),
    "inaturalist2021": Size(2_686_843, 100_000, 10_000, 3),
}
"""Data sets whose sizes are public, by the names that the bundled configs give them."""

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "f64": 8}


ADVICE = (
    "take a smaller config.data.batch_size, more devices, a larger config.fsdp (parameters and"
    " moments are parted), config.optim.accumulate (a batch in parts), or config.model.remat=true"
)


class Cost(NamedTuple):
    """Of one call of a program, on each device."""

    seconds: float
    """That compiling took."""
    memory: Mapping[str, int]
    """Bytes, as `costs.memory_of`."""
    operations: float
    """As the compiler counts them, for each part of a batch; that of GPUs does not: 0."""
    bytes: float
    """To and from memory, likewise."""
    collectives: Mapping[str, tuple[int, int]]
    """By kind how many, and bytes of what they return; those inside a loop once."""


class Plan(NamedTuple):
    """What `plan` found."""

    device: str
    num_devices: int
    mesh: Mapping[str, int]
    parameters: str
    """Their table."""
    batch: Mapping[str, str]
    """Shape, dtype and sharding, by name."""
    steps_per_epoch: int
    num_steps: int
    batch_size: int
    noun: str
    """What an example is called."""
    model_operations: float
    """Of the forward pass for one example, as the task counts them; 0 where it does not."""
    train: Cost
    evaluate: Cost
    has: devices.Peak | None
    """What a device has, if that is known."""

    @property
    def fits(self) -> bool | None:
        """Whether a training and an evaluation step find room; None where that is not known."""
        if self.has is None:
            return None
        return max(x.memory["in all"] for x in (self.train, self.evaluate)) <= self.has.memory

    @property
    def roof(self) -> dict[str, float]:
        """Seconds of a training step by what bounds it, if all else came for nothing."""
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
    """The data set of a dry run: for other devices, or of a given size, none is read.

    Args:
        config: names it.
        topology: as `topologies.devices`; empty: the devices that are there.
        size: numbers of examples of training and of evaluation, of classes and of channels.

    Returns:
        One of which only the size is known; or None for that of the config, read.

    Raises:
        ValueError: when the size must be given, or is none.
    """
    if not topology and not size:
        return None
    if not size and config.data.name not in KNOWN:
        raise ValueError(
            f"how large is config.data.name={config.data.name!r}? Say --data_size=TRAIN,EVALUATION,"
            f"CLASSES,CHANNELS; known are {', '.join(KNOWN)}"
        )
    if size and not (len(size) == 4 and all(n.isdecimal() and int(n) for n in size)):
        raise ValueError(
            f"--data_size={','.join(size)}: four numbers above 0, examples of training and of"
            " evaluation, classes, channels"
        )
    known = Size(*map(int, size)) if size else KNOWN[config.data.name]
    names = tuple(map(str, range(known.num_classes)))
    return data.Dataset(range(known.train), range(known.evaluation), names, known.channels)


def plan(
    config: configs.Config,
    topology: str = "",
    dataset: data.Dataset | None = None,
    task: Task | None = None,
) -> Plan:
    """Compiles the training and the evaluation step of a run.

    Args:
        config: of the run.
        topology: as `topologies.devices`; the devices that are there if empty.
        dataset: only its sizes and a blank example are read; what the config names if None.
        task: to classify images if None.

    Raises:
        ValueError: as `vit.loop.train`, or for a topology that cannot take the config, before
            anything is compiled.
    """
    there = topologies.devices(topology) if topology else jax.devices()
    configs.validate(config)
    mesh = devices.mesh(config, there)
    dataset, task = runs.subject(config, dataset, task)
    steps_per_epoch, num_steps = runs.length(config, dataset)
    program = runs.program(config, dataset, task, mesh)
    unmasked, batch = (
        runs.abstract_batch(dataset, config, mesh, mask=mask) for mask in (False, True)
    )
    gpu = there[0].platform in ("cuda", "gpu")
    train = compiled(program.train, program.abstract, unmasked, gpu=gpu)
    parts = config.optim.accumulate  # a loop, which the compiler counts as one turn
    train = train._replace(operations=parts * train.operations, bytes=parts * train.bytes)
    evaluate = compiled(program.evaluate, program.abstract, batch, gpu=gpu)
    return Plan(
        there[0].device_kind,
        len(there),
        dict(mesh.shape),
        costs.parameter_table(program.abstract),
        {name: f"{x.shape} {x.dtype}, {x.sharding.spec}" for name, x in unmasked.items()},
        steps_per_epoch,
        num_steps,
        config.data.batch_size,
        task.noun,
        task.operations(config) if task.operations else 0.0,
        train,
        evaluate,
        devices.peak_of(there[0].device_kind),
    )


def compiled(function: Any, *arguments: Any, gpu: bool) -> Cost:
    """What a program costs."""
    start = time.perf_counter()
    try:
        # A described GPU tunes nothing, and Triton's products then find no tiles for some widths.
        described = gpu and jax.default_backend() == "cpu"
        options = {"xla_gpu_enable_triton_gemm": False} if described else None
        program = function.lower(*arguments).compile(options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        said = " ".join(str(error).split(". HLO module")[0].split())
        raise ValueError(
            f"{function.__name__} does not fit: {ADVICE}. The compiler: {said}"
        ) from error
    seconds, counted = time.perf_counter() - start, program.cost_analysis() or {}
    if gpu:  # of its libraries' kernels it knows nothing
        counted = {}
    return Cost(
        seconds,
        costs.memory_of(program),
        counted.get("flops", 0.0),
        counted.get("bytes accessed", 0.0),
        collectives(program.as_text()),
    )


def collectives(text: str) -> dict[str, tuple[int, int]]:
    """How many of each kind a compiled program has, and the bytes of what they return."""
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
    """The plan in lines."""
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
            f"  memory: {parts}" + (f"; it has {has.memory / gib:,.0f} GiB" if has else ""),
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
    """The plan, for programs."""
    values = plan._asdict() | {
        name: getattr(plan, name)._asdict() for name in ("train", "evaluate")
    }
    values |= {"has": plan.has and plan.has._asdict(), "fits": plan.fits, "roof": plan.roof}
    return json.dumps(values, indent=2)
