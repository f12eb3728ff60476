"""Compare a window alone with a smaller window and features, at equal cost.

    python -m experiments.strangers.windows --model=stories260K --file=stories260K.bin \\
        --data=stories --lengths=128,256,512

A window of w costs 2 w exact keys for each query of a causal layer, as much as a window of w / 2
and w / 2 features. The features are refined; the first key is exact in both.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.strangers.__main__ import rows_of
from experiments.strangers.data import READERS, Data, Examples
from experiments.strangers.models import MODELS
from performer import Exact
from vit.reports import report
from vit.study import launch


def recipes(windows: Sequence[int], steps: int) -> dict[str, dict[str, Any]]:
    """Return options of `performer.linearize`: windows alone, and half of each with features."""
    alone = {f"window of {w}": dict(num_features=0, exact=Exact(w, first=1)) for w in windows}
    refined = dict(refine_steps=steps)
    halves = {
        f"window of {w // 2}, m = {w // 2}": dict(num_features=w // 2, exact=Exact(w // 2, first=1))
        for w in windows
    }
    return alone | {name: sizes | refined for name, sizes in halves.items()}


def shorter(data: Data, length: int) -> Data:
    """Return the first tokens of all examples."""
    held_out = Examples(*(x[:, :length] for x in data.held_out))
    return Data(data.calibration[:, :length], held_out)


def main(
    model: str,
    file: Path,
    data: Path = Path(),
    lengths: Sequence[int] = (),
    windows: Sequence[int] = (16, 32, 64),
    refine_steps: int = 300,
    out: Path = Path("results"),
) -> None:
    """Print and write a row for each length, window and recipe.

    Args:
        model: name in `experiments.strangers.models`, a causal one.
        file: the model's file.
        data: folder of its data (`experiments.strangers.data`).
        lengths: tokens of an example.
        windows: sizes of the window alone.
        refine_steps: of the features.
        out: folder of the table MODEL-windows.csv.
    """
    known, rows = MODELS[model], []
    parameters, examples = known.load(file), READERS[known.data](data)
    for length in lengths:
        named = recipes([w for w in windows if 2 * w < length], refine_steps)
        for row in rows_of(known, parameters, shorter(examples, length), named):
            rows.append({"length": length} | row)
            report.table(rows, out / f"{model}-windows", known.source)
    print(report.table(rows, out / f"{model}-windows", known.source))


if __name__ == "__main__":
    launch.run(main)
