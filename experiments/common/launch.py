"""Start of an experiment: the flags of a command are the parameters of its `main`.

    def main(data_sets: Sequence[str] = (), draws: int = 100, out: Path = Path("results")) -> None:
        \"\"\"Print the table.

        Args:
            draws: number of draws.
        \"\"\"

    if __name__ == "__main__":
        launch.run(main)

accepts `--data_sets=a,b --draws=10` (see `vit.config.arguments`). The command is recorded in
run.json of the folder --out.
"""

import datetime
import functools
import json
import platform
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from vit.config import arguments
from vit.run import devices, files

PACKAGES = ("jax", "jaxlib", "flax", "optax", "grain", "numpy", "scipy")
COUNTS = ("draws", "repeats", "splits", "trials")
"""Flags whose values have a standard error."""


def run(main: Callable[..., Any], quick: Mapping[str, Any] | None = None) -> None:
    """Start an experiment by `vit.config.arguments.run`, and record its command.

    Counts that have a standard error must be at least 2.
    """

    @functools.wraps(main)
    def recorded(*words: Any, **values: Any) -> None:
        for name in COUNTS:
            if values.get(name, 2) < 2:
                raise ValueError(f"--{name}={values[name]} must be at least 2")
        start = time.monotonic()
        main(*words, **values)
        if isinstance(values.get("out"), Path):
            record(values["out"], time.monotonic() - start)

    arguments.run(recorded, quick)


def versions() -> dict[str, str]:
    """Return versions, devices and host of this process."""
    return {package: metadata.version(package) for package in PACKAGES} | {
        "python": platform.python_version(),
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "host": f"{platform.machine()}, {devices.cores()} cores",
    }


def record(out: Path, seconds: float) -> None:
    """Add the command to out/run.json; other commands that wrote to `out` stay.

    A folder without tables gets none.
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
    files.write(path, json.dumps([*others, made | versions()], indent=2) + "\n")
