"""Starting is quick: what `import performer` brings in beside JAX, and what is asked for later."""

import json
import subprocess
import sys

import pytest

import performer

PROGRAM = """
import json, sys
import jax
before = set(sys.modules)
import performer
print(json.dumps([len(before), sorted(set(sys.modules) - before)]))
"""


def test_importing_adds_a_fifth_to_jax_at_most():
    """By the number of modules; and none of those that are slow to import."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    of_jax, added = json.loads(run.stdout)
    assert len(added) < 0.2 * of_jax, added
    assert not {"scipy.stats", "scipy.optimize", "optax", "flax", "sklearn"} & set(added)
    assert "performer.attention.op" in added


def test_every_module_is_there_when_it_is_named():
    for name in performer.MODULES:
        assert getattr(performer, name).__name__.split(".")[-1] == name
        assert name in dir(performer)


def test_other_names_are_not():
    with pytest.raises(AttributeError, match="module 'performer' has no attribute 'couplngs'"):
        performer.couplngs  # noqa: B018
