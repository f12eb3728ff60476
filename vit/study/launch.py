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

import functools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vit.config import arguments
from vit.reports import report

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
            report.record(values["out"], time.monotonic() - start)

    arguments.run(recorded, quick)
