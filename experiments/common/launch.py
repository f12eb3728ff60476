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

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

from absl import flags

from vit.config.arguments import Parser, define, launch
from vit.reports import report

COUNTS = ("draws", "repeats", "splits", "trials")
"""Flags whose values have a standard error."""


def run(main: Callable[..., Any], quick: Mapping[str, Any] | None = None) -> None:
    """Parse the command line and call `main`; `vit.config.arguments.launch` reports failures.

    Counts that have a standard error must be at least 2.

    Args:
        main: its parameters are the flags.
        quick: values of flags under `--quick`, a short trial run; its tables are written to the
            folder `quick` of --out.
    """
    parameters = define(main, quick)
    words = [p for p in parameters if p.kind is p.POSITIONAL_ONLY]

    def call(argv: list[str]) -> None:
        if len(argv[1:]) != len(words):
            wanted = " ".join(f"{{{'|'.join(get_args(p.annotation))}}}" for p in words)
            raise ValueError(f"{' '.join(argv[1:]) or 'no word'}: give {wanted}")
        given = [Parser(p.annotation).parse(x) for p, x in zip(words, argv[1:], strict=True)]
        named = [p.name for p in parameters if p not in words]
        values: dict[str, Any] = {name: flags.FLAGS[name].value for name in named}
        if quick is not None and flags.FLAGS["quick"].value:
            values |= {k: v for k, v in quick.items() if not flags.FLAGS[k].present}
            values["out"] /= "quick"
        for name in COUNTS:
            if values.get(name, 2) < 2:
                raise ValueError(f"--{name}={values[name]} must be at least 2")
        start = time.monotonic()
        main(*given, **values)
        if isinstance(values.get("out"), Path):
            report.record(values["out"], time.monotonic() - start)

    flags.FLAGS.set_gnu_getopt(True)  # flags may stand behind a word
    launch(call, words=bool(words))
