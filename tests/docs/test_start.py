"""Starting is quick: what `import performer` brings in beside JAX, and what is asked for later."""

import json
import subprocess
import sys

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
