"""Provenance of a table: the command, the day, versions, hardware."""

import datetime
import json
import platform
import shlex
import sys
from importlib import metadata
from pathlib import Path

import jax

from vit.run import files
from vit.run import machine as machines

PACKAGES = ("jax", "jaxlib", "flax", "optax", "grain", "numpy", "scipy")


def machine() -> dict[str, str]:
    """Versions, devices and host of this process."""
    return {package: metadata.version(package) for package in PACKAGES} | {
        "python": platform.python_version(),
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "host": f"{platform.machine()}, {machines.cores()} cores",
    }


def record(out: Path, seconds: float) -> None:
    """Note the command in out/run.json, with those that wrote to `out` before and were others.

    Tables grow, and parts of a program have the same folder. Nothing where there are no tables.
    """
    if not any(out.glob("*.csv")):
        return
    spec = sys.modules["__main__"].__spec__
    program = ["-m", spec.name] if spec else [sys.argv[0]]
    made = {
        "command": shlex.join(["python", *program, *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "minutes": str(round(seconds / 60, 1)),
    }
    path = out / "run.json"
    before = json.loads(path.read_text()) if path.exists() else []
    others = [each for each in before if each["command"] != made["command"]]
    files.write(path, json.dumps([*others, made | machine()], indent=2) + "\n")
