"""Planted faults (`tests/faults.toml`) follow the code that they are planted in."""

import tomllib
from collections import Counter
from pathlib import Path

FAULTS = tomllib.loads(Path("tests/faults.toml").read_text())["fault"]


def test_no_fault_is_stale():
    """Its text stands once in its file, and its tests are there; else it would plant nothing."""
    texts = {name: Path(name).read_text() for name in {fault["file"] for fault in FAULTS}}
    stale = [x["name"] for x in FAULTS if texts[x["file"]].count(x["old"]) != 1]
    assert not stale
    assert not [x["name"] for x in FAULTS if x["old"] == x["new"]]
    for fault in FAULTS:
        for test in fault["tests"]:
            file, _, function = test.partition("::")
            definition = f"def {function.split('[')[0]}(" if function else ""
            assert definition in (Path("tests") / file).read_text(), (fault["name"], test)


def test_names_are_unique():
    assert max(Counter(fault["name"] for fault in FAULTS).values()) == 1
