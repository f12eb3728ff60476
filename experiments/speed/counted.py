"""Milliseconds of a program for TPU, counted in what its compiler wrote; no TPU is there.

Each kernel of the compiled program is given the larger of its cycles, which are its final
instruction bundles times the turns of their loops, and of its traffic to and from memory; `count`
returns the sum. Not in it: waiting for copies that run beside, collectives, starts of kernels. A
kernel without bundles of its own takes those of one with the same result, or its traffic alone.
"""

import math
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vit import devices, topologies

CLOCK = 1.5e9
"""Cycles a second of a TPU v5e."""
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(\w\w)?\s*:\s(?:> ?)*\s*\{")
TURNS = re.compile(r"scmp\.\w+\.[su]32(?:\.totalorder)? [^,]+, (\d+) /\* loop exit test")
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)(.*)$")
FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "iota", "after-all")


class Instruction(NamedTuple):
    """A line of a compiled program."""

    name: str
    shape: str
    kind: str
    operands: list[str]
    rest: str


def bundles(text: str) -> float:
    """Cycles of a kernel: its bundles, those in a loop as often as it turns."""
    lines: list[list[str]] = []
    for line in text.splitlines():
        if found := BUNDLE.match(line):
            lines.append([found[1] or "", line])
        elif lines:
            lines[-1][1] += line
    times, begun = np.ones(len(lines)), []
    for i, (tag, line) in enumerate(lines):
        if tag == "LB":
            begun.append(i)
        if "loop exit test" in line and begun:
            turns = TURNS.search(line)
            times[begun.pop() : i + 7] *= int(turns[1]) if turns else 1
    return float(times.sum())


def arrays(shape: str) -> list[tuple[int, bool]]:
    """Bytes of each array of a shape, and whether it lies in the core's memory."""
    found = re.findall(r"(\w+)\[([\d,]*)\](?:\{([^{}]*)\})?", shape)
    return [
        (BYTES.get(dtype, 4) * math.prod(int(n) for n in sizes.split(",") if n), "S(" in layout)
        for dtype, sizes, layout in found
    ]


def traffic(shape: str) -> int:
    """Bytes of the arrays of a shape that lie in the device's memory, not in the core's."""
    return sum(size for size, inside in arrays(shape) if not inside)


def instructions(text: str) -> list[Instruction]:
    """Those of the program itself, not of its kernels.

    Raises:
        ValueError: for a program with a loop around its kernels.
    """
    entry = text[text.index("ENTRY ") :]
    found = [INSTRUCTION.match(line) for line in entry.splitlines()]
    listed = [
        Instruction(m[1], m[2], m[3], re.findall(r"%([\w.\-]+)", m[4]), m[5]) for m in found if m
    ]
    if any(x.kind in ("while", "conditional") for x in listed):
        raise ValueError("a program with a loop around its kernels is not counted")
    return listed


def milliseconds(text: str, cycles: dict[str, float], bandwidth: float) -> float:
    """Of a compiled program, with the cycles of its kernels by name."""
    listed = instructions(text)
    shapes = {x.name: x.shape for x in listed}
    twins = {x.shape: cycles[x.name] for x in listed if x.name in cycles}
    total = 0.0
    for x in listed:
        if x.kind in FREE or x.kind.endswith("-done"):
            continue
        moved = traffic(x.shape) + sum(traffic(shapes.get(name, "")) for name in x.operands)
        if x.kind.endswith("-start"):  # a copy or a slice: operand, result, and a number
            moved = sorted(size for size, _ in arrays(x.shape))[-2]
        worked = cycles.get(x.name, twins.get(x.shape, 0.0))
        total += max(worked / CLOCK, moved / bandwidth)
    return 1e3 * total


def count(function: Callable, *shapes: jax.ShapeDtypeStruct) -> float:
    """Milliseconds of jit(function) on one TPU v5e.

    The process must not have compiled for a TPU before: only then its compiler writes bundles.

    Raises:
        ValueError: when libtpu is not installed, or as `instructions`.
    """
    folder = dump()
    there = topologies.devices("v5e:2x2")[:1]
    mesh = Mesh(np.array(there), ("x",))
    one = NamedSharding(mesh, PartitionSpec())
    placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one) for x in shapes]

    def run(*arguments: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*arguments)

    for path in folder.iterdir():
        path.unlink()
    program = jax.jit(run).lower(*placed).compile()
    found = {
        name[1]: bundles(path.read_text(errors="replace"))
        for path in folder.iterdir()
        if (name := re.fullmatch(r"\d+-(.*)-\d+-final_bundles\.txt", path.name))
        and not re.search("schedule-analysis|static_gap", path.name)
    }
    peak = devices.peak_of(there[0].device_kind)
    assert peak is not None
    return milliseconds(program.as_text() or "", found, peak.bandwidth)


def dump() -> Path:
    """Where libtpu writes the bundles; it is told so before it starts."""
    flags = os.environ.get("LIBTPU_INIT_ARGS", "")
    if found := re.search(r"--xla_jf_dump_to=(\S+)", flags):
        return Path(found[1])
    folder = tempfile.mkdtemp(prefix="bundles-")
    os.environ["LIBTPU_INIT_ARGS"] = " ".join(
        [
            flags,
            f"--xla_jf_dump_to={folder}",
            "--xla_jf_dump_llo_text=true",
            "--xla_jf_dump_llo_html=false",
            "--xla_jf_dump_llo_pass_label_regex=final_bundles",
        ]
    )
    return Path(folder)
