r"""How near assertions on numbers came to their limits: a plugin of pytest, and its report.

    pytest -p tests.support.margins --margins=FOLDER/NAME.json \
        -o enable_assertion_pass_hook=true -o verbosity_assertions=2
    python -m tests.support.margins FOLDER

The plugin writes the largest share of its limit that each assertion used: `assert_allclose` and
what calls it, `assert a < b`, `assert a == pytest.approx(b)`. The report compares the runs of a
folder, one for each kind of processor. It lists the assertions that used more than a fifth of
their limit and whose values differ between the runs: rounding moves them, and on another processor
they may fail. `make margins` does all of it.
"""

import json
import re
import sys
from collections import defaultdict
from pathlib import Path

NEAR = 0.2
"""Share of the limit above which an assertion is near it."""
MOVED = 0.01
"""Difference between runs, as a share of the limit, above which rounding moves a value."""
TESTS = Path(__file__).parents[1]
NUMBER = r"(?:[a-z.]*float\d*\(|[a-z.]*Array\()?(-?\d+\.?\d*(?:e[-+]?\d+)?)(?:, dtype=\w+)?\)?"
COMPARED = re.compile(rf"^{NUMBER} (<|<=|>|>=) {NUMBER}$")
APPROXIMATE = re.compile(rf"^{NUMBER} == {NUMBER} ± {NUMBER}$")

used: dict[str, float] = {}
"""Share of its limit by `test at file:line`."""


def note(test: str, line: int | str, share: float) -> None:
    """Keep the largest share of an assertion."""
    name = f"{test} line {line}"
    used[name] = max(share, used.get(name, 0.0))


def share_of(explanation: str) -> float | None:
    """Share of the limit that a comparison used, from pytest's words for it; None for others."""
    first = explanation.splitlines()[0].strip()
    if match := APPROXIMATE.match(first):
        value, want, limit = map(float, match.groups())
        return abs(value - want) / limit if limit else None
    if match := COMPARED.match(first):
        left, sign, right = float(match[1]), match[2], float(match[3])
        value, limit = (left, right) if "<" in sign else (right, left)
        return value / limit if value >= 0 and limit > 0 else None
    return None


def pytest_addoption(parser):
    parser.addoption("--margins", help="file that gets the shares of limits", default="")


def pytest_assertion_pass(item, lineno, expl):
    if (share := share_of(expl)) is not None:
        note(item.nodeid, lineno, share)


def pytest_configure(config):
    """Record what `assert_allclose` compares, also in the assertions of chex."""
    import numpy as np

    original = np.testing.assert_allclose

    def recorded(actual, desired, rtol=1e-7, atol=0, **options):
        original(actual, desired, rtol, atol, **options)
        a, b = (np.asarray(x, np.complex128) for x in (actual, desired))
        with np.errstate(all="ignore"):
            share = abs(a - b) / (atol + rtol * abs(b))
        share = share[np.isfinite(share)]
        note(*_caller(), float(share.max(initial=0.0)))

    np.testing.assert_allclose = recorded


def _caller() -> tuple[str, int]:
    """The running test, and the line in its file."""
    import os

    frame = sys._getframe(2)
    while frame and not Path(frame.f_code.co_filename).is_relative_to(TESTS):
        frame = frame.f_back
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    return test, frame.f_lineno if frame else 0


def pytest_sessionfinish(session):
    path = session.config.getoption("--margins")
    if path and used:
        worker = getattr(session.config, "workerinput", {}).get("workerid", "main")
        Path(path).with_suffix(f".{worker}.json").write_text(json.dumps(used))


def report(folder: Path) -> str:
    """Return the table of assertions near their limits that rounding moves."""
    runs: dict[str, dict[str, float]] = defaultdict(dict)
    for path in sorted(folder.glob("*.json")):
        runs[path.name.split(".")[0]].update(json.loads(path.read_text()))
    rows = []
    for name in sorted({name for run in runs.values() for name in run}):
        shares = [run[name] for run in runs.values() if name in run]
        if max(shares) > NEAR and max(shares) - min(shares) > MOVED:
            rows.append((max(shares), name, " ".join(f"{x:.3f}" for x in shares)))
    lines = [f"{share:.3f}  {name}  ({shares})" for share, name, shares in sorted(rows)[::-1]]
    count = len({name for run in runs.values() for name in run})
    return "\n".join([*lines, f"{len(rows)} of {count} assertions, in runs {', '.join(runs)}"])


if __name__ == "__main__":
    print(report(Path(sys.argv[1])))
