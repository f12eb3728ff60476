"""What Vision Transformers would cost on TPUs and GPUs: compiled and counted, not run.

    python -m experiments.speed.accelerators
    python -m experiments.speed.accelerators --topologies=v5e:4x4 --variants=Ti/16,B/16
    python -m experiments.speed.accelerators --what=lengths

`steps`: the training step of the ImageNet config with exact attention, random features, and random
features with calibration, for each topology and variant: memory on each device, operations,
traffic, collectives, and the roof, images a second if what bounds it were all. One row takes from
half a minute to ten, B/16 some 330 CPU seconds. The compiler of GPUs counts memory alone.

`lengths`: milliseconds of attention alone on one TPU v5e, bfloat16, 12 heads of 64, m = 128, from
197 to 16,384 tokens, up to 16,384 of them in all; and where the lines cross.
`experiments.speed.counted` says how they are counted.

Each row is written as soon as it is known, and a row that is there is not compiled again: the same
command goes on. Writes steps and lengths, csv and md, and lengths.png to --out. Needs libtpu, and
jax[cuda13] for GPUs.
"""

import csv
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from experiments.common import launch
from experiments.configs import imagenet
from experiments.speed import counted
from performer import performer_attention
from vit import config as configs
from vit import devices, dry_run, report, runs
from vit import topologies as there_are

TOPOLOGIES = ("v5e:4x4", "h100:8")
VARIANTS = ("Ti/16", "S/16", "B/16", "L/16", "B/8", "B/4")
KINDS = {
    "softmax": {"attention.kind": "softmax"},
    "performer": {"attention.kind": "performer"},
    "calibrated": {"attention.kind": "performer", "attention.calibration": "full"},
}
LENGTHS = (197, 512, 1024, 2048, 4096, 8192, 16384)
TOKENS, HEADS, WIDTH, FEATURES = 16384, 12, 64, 128
COUNTED = ("TFLOP", "traffic, GiB", "roof, images/s", "collectives", "compiled in, s")
NOTHING = dict.fromkeys(COUNTED, "")
NOTE = "Compiled and counted, not run."


def step(topology: str, variant: str, kind: str, batch_size: int) -> dict[str, Any]:
    """A row: the training step of one model on one topology."""
    values = {"model.variant": variant, "data.batch_size": batch_size, "optim.accumulate": 1}
    config = configs.with_values(imagenet.get_config(), values | KINDS[kind])
    dataset = dry_run.dataset(config, topology)
    there = there_are.devices(topology)
    mesh = devices.mesh(config, there)
    dataset, task = runs.subject(config, dataset, None)
    program = runs.program(config, dataset, task, mesh)
    batch = runs.abstract_batch(dataset, config, mesh)
    gpu = there[0].platform in ("cuda", "gpu")
    peak = devices.peak_of(there[0].device_kind)
    assert peak is not None
    row = {"topology": topology, "variant": variant, "attention": kind, "batch": batch_size}
    try:
        cost = dry_run.compiled(program.train, program.abstract, batch, gpu=gpu)
    except ValueError:  # the compiler of TPUs ends where the memory does
        return row | {"memory, GiB": "does not fit", "of": peak.memory / 2**30, **NOTHING}
    seconds = max(cost.operations / peak.flops, cost.bytes / peak.bandwidth)
    return row | {
        "memory, GiB": cost.memory["in all"] / 2**30,
        "of": peak.memory / 2**30,
        "TFLOP": cost.operations / 1e12 or "",
        "traffic, GiB": cost.bytes / 2**30 or "",
        "roof, images/s": batch_size / seconds if seconds else "",
        "collectives": "; ".join(
            f"{count} {name}, {size / 2**20:.0f} MiB"
            for name, (count, size) in cost.collectives.items()
        ),
        "compiled in, s": cost.seconds,
    }


def exact(query: jax.Array, key: jax.Array, value: jax.Array, _: jax.Array) -> jax.Array:
    """Softmax attention."""
    return jax.nn.dot_product_attention(query, key, value)


def kernel(query: jax.Array, key: jax.Array, value: jax.Array, frequencies: jax.Array) -> Any:
    """Random features in the kernel for TPU."""
    return performer_attention(query, key, value, frequencies, implementation="pallas")


ATTENTION: dict[str, Callable] = {
    "exact": exact,
    "performer": performer_attention,
    "performer, kernel": kernel,
}


def length(tokens: int) -> dict[str, Any]:
    """A row: milliseconds of attention at one length."""
    batch = 2 ** int(math.log2(TOKENS / tokens))  # 64 of 197
    shape = (batch, tokens, HEADS, WIDTH)
    query = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    frequencies = jax.ShapeDtypeStruct((HEADS, FEATURES, WIDTH), jnp.float32)
    row: dict[str, Any] = {"tokens": tokens, "batch": batch}
    for name, function in ATTENTION.items():

        def both(query, key, value, frequencies, gradient, function=function):
            output, pull = jax.vjp(lambda *x: function(*x, frequencies), query, key, value)
            return output, pull(gradient)

        row[f"{name}, forward"] = milliseconds(function, *[query] * 3, frequencies)
        row[f"{name}, both"] = milliseconds(both, *[query] * 3, frequencies, query)
    return row


def milliseconds(function: Callable, *shapes: jax.ShapeDtypeStruct) -> float | str:
    """Counted, or nothing where the device has not the memory."""
    try:
        return counted.count(function, *shapes)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return ""


def crossing(rows: list[dict[str, Any]], which: str) -> str:
    """Between which lengths random features become cheaper than exact attention."""
    dearer = [
        row["tokens"]
        for row in rows
        if row[f"exact, {which}"] and row[f"performer, {which}"] >= row[f"exact, {which}"]
    ]
    cheaper = [row["tokens"] for row in rows if row["tokens"] > max(dearer, default=0)]
    return f"{which}: cheaper from {min(cheaper, default='more')} tokens on"


def draw(rows: list[dict[str, Any]], out: Path) -> None:
    """Milliseconds against tokens, as `out`.png."""
    drawn, axes = report.figure(out, columns=2)
    for axis, which in zip(axes, ("forward", "both"), strict=True):
        for name in ATTENTION:
            shown = [row for row in rows if row[f"{name}, {which}"]]
            axis.plot(
                [row["tokens"] for row in shown],
                [row[f"{name}, {which}"] for row in shown],
                "o-",
                ms=3,
                label=name,
            )
        report.log_log(axis, [row["tokens"] for row in rows])
        axis.tick_params(axis="x", rotation=45)
        axis.set(xlabel="tokens", ylabel="ms, counted", title=which.replace("both", "and backward"))
    report.save(drawn, out)


def known(path: Path) -> list[dict[str, Any]]:
    """The rows of a table that is there."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [{k: number(v) for k, v in row.items()} for row in csv.DictReader(file)]


def number(text: str) -> Any:
    """What a cell of csv says."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def table(wanted: Iterable[tuple], keys: tuple[str, ...], row: Callable, out: Path, **given: Any):
    """The rows wanted, those that `out`.csv has not compiled now, each written at once."""
    rows = known(out.with_suffix(".csv"))
    there = {tuple(x[key] for key in keys) for x in rows}
    for case in wanted:
        if case in there:
            continue
        print(*case, flush=True)
        rows.append(row(*case, **given))
        report.table(rows, out, NOTE)
    return rows


Kind = Literal["softmax", "performer", "calibrated"]


def main(
    what: Sequence[Literal["lengths", "steps"]] = ("lengths", "steps"),
    topologies: Sequence[str] = TOPOLOGIES,
    variants: Sequence[str] = VARIANTS,
    attention: Sequence[Kind] = get_args(Kind),
    batch_size: int = 1024,
    out: Path = Path("results/speed/accelerators"),
) -> None:
    """Compiles what is wanted and not there.

    Args:
        what: tables.
        topologies: as --topology of vit.train.
        variants: of ViT.
        attention: kinds.
        batch_size: images of a training step.
        out: folder of the tables.
    """
    launch.at_least(1, batch_size=batch_size)
    if "lengths" in what:
        counted.dump()  # libtpu reads it when it starts
        rows = table([(n,) for n in LENGTHS], ("tokens",), length, out / "lengths")
        rows.sort(key=lambda row: row["tokens"])
        says = "; ".join(crossing(rows, which) for which in ("forward", "both"))
        print(report.table(rows, out / "lengths", f"{NOTE} Random features, {says}."))
        draw(rows, out / "lengths")
    if "steps" in what:
        wanted = [(t, v, k) for t in topologies for v in variants for k in attention]
        keys = ("topology", "variant", "attention")
        rows = table(wanted, keys, step, out / "steps", batch_size=batch_size)
        print(report.table(rows, out / "steps", NOTE))


if __name__ == "__main__":
    launch.run(main)
