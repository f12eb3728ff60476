"""Cost of a run: its steps compiled, not run, for present or absent devices.

Absent devices are TPU slices by number, name and shape, or GPUs of one host:

    v5e:4x4   2xv5e:4x4   v6e:2x2   v5p:2x2x2   v4:2x2x1   h100:8   h200:8   a100:8

Their compilers run on any machine: `libtpu` for TPUs, JAX's CUDA plugin for GPUs, which the files
in `targets` describe. A task may know the size of its data without reading them
(`vit.config.Definition.sized`).
"""

import collections
import math
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.experimental import topologies

from performer.attention.kernels import which
from vit import config as configs
from vit import data
from vit.run import devices, runs
from vit.run.steps import parameters
from vit.task import opened

Plan = dict[str, Any]
"""Cost of a run as returned by `plan`."""

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
COLLECTIVES += ("send",)  # an all-reduce between slices of TPUs
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "f64": 8}

ADVICE = (
    "use a smaller config.data.batch_size, more devices, a larger config.fsdp (sharded parameters),"
    " config.optim.accumulate (a batch in parts) or, if the model has it, config.model.remat=true"
)


TARGETS = Path(__file__).parent / "targets"

LIBTPU = {
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
}
"""Variables that libtpu reads without a TPU, instead of asking a metadata server."""


def absent(topology: str) -> Sequence[Any]:
    """Return the devices of a topology, as above.

    Raises:
        ValueError: for another word, or without the compiler; the message has the command that
            installs it.
    """
    tpu = re.fullmatch(r"(?:([1-9]\d*)x)?(v(4|5e|5p|6e):\d+(?:x\d+)+)", topology)
    gpu = re.fullmatch(r"([a-z]\w*):([1-8])", topology)
    gpus = sorted(path.stem for path in TARGETS.glob("*.txtpb"))
    if not tpu and not (gpu and gpu[1] in gpus):
        raise ValueError(
            f"--topology={topology}: a TPU slice, as v5e:4x4 (v4, v5e, v5p, v6e), several, as"
            f" 2xv5e:4x4, or GPUs of one host, as h100:8 ({', '.join(gpus)})"
        )
    try:
        if tpu:
            os.environ |= LIBTPU | dict(os.environ)
            options: Any = {"chip_config_name": "megacore"} if tpu[3] == "4" else {}
            slices = int(tpu[1] or 1)
            return topologies.get_topology_desc(tpu[2], "tpu", num_slices=slices, **options).devices
        assert gpu
        jax.config.update("jax_platforms", "cpu")  # else the plugin looks for a driver
        jax.devices()  # finds the plugin
        target = (TARGETS / f"{gpu[1]}.txtpb").read_text()
        options = {"topology": f"1x1x{gpu[2]}", "target_config": target}
        return topologies.get_topology_desc("gpu", "cuda", **options).devices
    except (RuntimeError, ValueError) as error:
        extra = "libtpu" if tpu else "'jax[cuda13]'"
        raise ValueError(
            f"--topology={topology} requires its compiler, pip install {extra}, and an existing"
            f" shape: {' '.join(str(error).split())[:300]}"
        ) from error


def sized(
    config: configs.TrainConfig, topology: str = "", size: Sequence[int] = ()
) -> data.Dataset | None:
    """Return a data set of known size without examples; None to open the data set of the config.

    Args:
        config: config of the run.
        topology: as above; "" for the present devices.
        size: sizes, for `--data_size`.

    Raises:
        ValueError: when the size is missing, or given for a task that always opens its data.
    """
    of_task = configs.definition(config.task).sized
    if of_task:
        return of_task(config, size, bool(topology))
    if size:
        raise ValueError(f"--data_size is not supported by the task {config.task!r}: remove it")


def plan(
    config: configs.TrainConfig,
    topology: str = "",
    size: Sequence[int] = (),
) -> Plan:
    """Compile the training and the evaluation step of a run and return their cost.

    Args:
        config: config of the run.
        topology: as above; "" for the present devices.
        size: sizes of the data, as the `sized` of the task takes them; () for its own.

    Raises:
        ValueError: as `vit.run.loop.train`, or for a config that does not fit the topology.
    """
    there = absent(topology) if topology else jax.devices()
    configs.validate(config)
    mesh = devices.mesh(config, there)
    dataset, task = opened(config, dataset=sized(config, topology, size))
    data.check_apart(dataset)
    run = runs.Run(config, dataset, task, mesh)
    (steps_per_epoch, num_steps), program = run.length, run.program
    batch, masked = run.abstract_batch(), run.abstract_batch(mask=True)
    gpu = there[0].platform in ("cuda", "gpu")
    with which.noted() as calls:
        train = compiled(program.train, program.abstract, batch, gpu=gpu)
    for counted in ("operations", "bytes"):  # the compiler counts the body of a loop once
        train[counted] *= config.optim.accumulate
    counts = {
        "device": there[0].device_kind,
        "num_devices": len(there),
        "mesh": dict(mesh.shape),
        "parameters": parameter_table(program.abstract),
        "batch": {name: f"{x.shape} {x.dtype}, {x.sharding.spec}" for name, x in batch.items()},
        "steps_per_epoch": steps_per_epoch,
        "num_steps": num_steps,
        "batch_size": config.data.batch_size,
        "noun": task.noun,
        "model_operations": task.operations(config) if task.operations else 0.0,  # of one example
        "attention": sorted({path for _, path in calls}),
        "train": train,
        "evaluate": compiled(program.evaluate, program.abstract, masked, gpu=gpu),
    }
    return counts | limits(counts, devices.peak_of(there[0].device_kind))


def parameter_table(state: nnx.State) -> str:
    """Return a table of the parameters: name, shape, elements, elements per device."""
    rows = [
        (name, x.shape, x.size, math.prod(x.sharding.shard_shape(x.shape)))
        for name, x in parameters(state).items()
    ]
    rows.append(("total", "", sum(row[2] for row in rows), sum(row[3] for row in rows)))
    width = max(len(row[0]) for row in rows)
    lines = [f"{'parameter':{width}}  {'shape':18} {'elements':>12} {'per device':>12}"]
    lines += [f"{a:{width}}  {b!s:18} {c:12,} {d:12,}" for a, b, c, d in rows]
    return "\n".join(lines)


def memory_of(compiled: Any) -> dict[str, int]:
    """Return the bytes per device of a compiled program: arguments, temporary, in all."""
    analysis = compiled.memory_analysis()
    arguments, temporary = analysis.argument_size_in_bytes, analysis.temp_size_in_bytes
    new = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return {"arguments": arguments, "temporary": temporary, "in all": arguments + temporary + new}


def limits(plan: Plan, has: devices.Peak | None) -> Plan:
    """Return the peak of a device, whether the steps fit into its memory, and the roof of training.

    The roof is the minimum time of a training step, by operations and by memory traffic.
    """
    if has is None:
        return {"has": None, "fits": None, "roof": {}}
    need = max(plan[step]["memory"]["in all"] for step in ("train", "evaluate"))
    model = 3 * plan["model_operations"] * plan["batch_size"] / plan["num_devices"]
    roof = {
        "operations": max(plan["train"]["operations"], model) / has.flops,
        "memory traffic": plan["train"]["bytes"] / has.bandwidth,
    }
    return {"has": has._asdict(), "fits": need <= int(has.gib * 2**30), "roof": roof}


def compiled(function: Any, *arguments: Any, gpu: bool) -> dict[str, Any]:
    """Compile a program and return its cost per device.

    Returns:
        Seconds of compilation, `memory_of`, operations and bytes of memory traffic as counted by
        the compiler (0 on GPUs, whose compiler does not count), and `collectives`.

    Raises:
        ValueError: when the program does not fit into the memory.
    """
    start = time.perf_counter()
    # Without autotuning on an absent GPU, Triton's products have no tiles for some widths.
    described = gpu and jax.default_backend() == "cpu"
    options = {"xla_gpu_enable_triton_gemm": False} if described else None
    try:
        program = function.lower(*arguments).compile(options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        message = " ".join(str(error).split(". HLO module")[0].split())
        raise ValueError(
            f"{function.__name__} does not fit: {ADVICE}. The compiler: {message}"
        ) from error
    seconds = time.perf_counter() - start
    counted = {} if gpu else program.cost_analysis() or {}  # libraries of GPUs are not counted
    return {
        "seconds": seconds,
        "memory": memory_of(program),
        "operations": counted.get("flops", 0.0),
        "bytes": counted.get("bytes accessed", 0.0),
        "collectives": collectives(program.as_text()),
    }


def collectives(text: str) -> dict[str, tuple[int, int]]:
    """Return the number of collectives by kind in a compiled program, and their bytes."""
    by_kind: dict[str, list[int]] = collections.defaultdict(list)
    for kind in COLLECTIVES:
        for shapes in re.findall(rf"= (\(.*?\)|\S+) {kind}(?:-start)?\(", text):
            sizes = [
                BYTES.get(dtype, 4) * math.prod(int(n) for n in re.findall(r"\d+", shape))
                for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", shapes)
            ]
            by_kind[kind].append(sum(sizes))
    return {kind: (len(sizes), sum(sizes)) for kind, sizes in by_kind.items()}


def text(plan: Plan) -> str:
    """Return the plan as text."""
    batch_size, noun, flops = (plan[x] for x in ("batch_size", "noun", "model_operations"))
    gib = 2.0**30
    lines = [
        plan["parameters"],
        f"devices: {plan['num_devices']} x {plan['device']}, mesh {plan['mesh']}; compiled, not"
        " run",
        f"steps: {plan['num_steps']:,} ({plan['steps_per_epoch']:,} per epoch)",
        f"operations: {flops / 1e9:.3f} GFLOP per {noun} forward,"
        f" {3 * flops * batch_size / 1e12:.4g} TFLOP per training step"
        if flops
        else "operations: not counted",
        *(f"attention with features: {path}" for path in plan["attention"]),
        *(f"batch: {name} {shape}" for name, shape in plan["batch"].items()),
    ]
    has = f"; it has {plan['has']['gib']:,.0f} GiB" if plan["has"] else ""
    for name, cost in [("training step", plan["train"]), ("evaluation step", plan["evaluate"])]:
        memory = ", ".join(f"{k} {v / gib:,.3f} GiB" for k, v in cost["memory"].items())
        operations, traffic = cost["operations"] / 1e12, cost["bytes"] / gib
        lines += [
            f"{name}, per device:",
            f"  memory: {memory}{has}",
            f"  operations {operations:,.4f} TFLOP, traffic {traffic:,.3f} GiB"
            if operations
            else "  operations and traffic: this compiler does not count them",
            f"  compiled in {cost['seconds']:,.1f} s",
        ]
        for kind, (count, size) in cost["collectives"].items():
            lines.append(f"  {kind}: {count}, {size / 2**20:,.1f} MiB")
    if plan["roof"]:
        bound, seconds = max(plan["roof"].items(), key=lambda item: item[1])
        times = ", ".join(f"{k} {1e3 * v:,.2f} ms" for k, v in plan["roof"].items())
        rate = f"{batch_size / seconds:,.0f} {noun}s per second"
        lines += [f"roof: {rate}, bounded by {bound} ({times})"]
        lines += ["fits" if plan["fits"] else f"does not fit: {ADVICE}"]
    return "\n".join(lines)
