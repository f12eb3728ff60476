"""Plant the faults of `faults.toml` in a copy of the tree, one at a time, and run their tests.

    python -m tests.faults [PART ...]

Each fault breaks one promised property: a text of a file, which stands in it once, is replaced, and
one of the named tests must fail: one of the core, or else one of the second tier. Only faults with
one of the PARTs in their name are planted. A fault is stale when its text or its tests are no
longer there; stale faults and faults that no test catches are listed at the end, and the exit
status is then 1.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
SECONDS = 600
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "--no-header", "-x")
TIERS = {"the core": (), "the second tier": ("-m", "thorough"), "all tiers": ("-m", "")}


def run_tests(tree: Path, tests: list[str], tier: str) -> tuple[int, str]:
    """Run tests in a copy of the tree and return the exit status of pytest and its output."""
    environment = os.environ | {"PYTHONPATH": str(tree)}
    command = [sys.executable, *PYTEST, *TIERS[tier], *(f"tests/{test}" for test in tests)]
    done = subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    return done.returncode, done.stdout


def outcome(fault: dict, tree: Path) -> str:
    """Plant a fault, run its tests, and take the fault out again."""
    path = tree / fault["file"]
    text = path.read_text() if path.exists() else ""
    if text.count(fault["old"]) != 1:
        return "STALE: the text does not stand once in the file"
    path.write_text(text.replace(fault["old"], fault["new"]))
    try:
        for tier in ("the core", "the second tier"):
            code, output = run_tests(tree, fault["tests"], tier)
            failed = re.findall(r"^(?:FAILED|ERROR) tests/(.*?)(?: - .*)?$", output, re.MULTILINE)
            if code == 1 and failed:
                return f"caught by {tier}: {failed[0]}"
    except subprocess.TimeoutExpired:
        return f"NOT CAUGHT: no result after {SECONDS} s"
    finally:
        path.write_text(text)
    return "NOT CAUGHT" if code in (0, 5) else f"STALE: pytest ended with {code}"


def main(parts: list[str]) -> None:
    """Plant the faults whose names have one of the parts in them, or all."""
    faults = tomllib.loads((ROOT / "tests/faults.toml").read_text())["fault"]
    faults = [f for f in faults if not parts or any(part in f["name"] for part in parts)]
    if not faults:
        sys.exit(f"no fault has any of {parts} in its name")
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder).resolve() / "tree"
        ignored = shutil.ignore_patterns(".*", "__pycache__", "_build", "runs")
        shutil.copytree(ROOT, tree, ignore=ignored)
        tests = sorted({test for fault in faults for test in fault["tests"]})
        code, output = run_tests(tree, tests, "all tiers")
        assert code == 0, f"the tests fail without any fault:\n{output[-3000:]}"
        found = {}
        for fault in faults:
            start = time.perf_counter()
            found[fault["name"]] = outcome(fault, tree)
            seconds = time.perf_counter() - start
            print(f"{fault['name']}: {found[fault['name']]} ({seconds:.0f} s)", flush=True)
    bad = [name for name, result in found.items() if not result.startswith("caught")]
    print(f"\n{len(found) - len(bad)} of {len(found)} faults are caught")
    sys.exit("\n".join(bad) or 0)


if __name__ == "__main__":
    main(sys.argv[1:])
