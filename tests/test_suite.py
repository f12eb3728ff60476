"""The suite itself: a damaged cache of programs changes nothing; what a change reaches."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import changed

ROOT = Path(__file__).parent.parent

PROGRAM = """
import jax, jax.numpy as jnp
print(jax.jit(lambda x: jnp.sin(x) @ x.T)(jnp.arange(6.0).reshape(2, 3)).tolist())
"""


def test_a_damaged_cache_changes_no_result(tmp_path):
    """A byte changed, an entry cut, an entry of another program: compiled again, same numbers."""
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path)}

    def run():
        done = subprocess.run(
            # A warning is shown once for each text: two programs may have one name and one error.
            [sys.executable, "-W", "always", "-c", PROGRAM],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    want, _ = run()
    entries = sorted(tmp_path.glob("*-cache"))
    assert len(entries) >= 2
    whole = {path: path.read_bytes() for path in entries}
    for damage in (
        lambda x: x[: len(x) // 2] + bytes([x[len(x) // 2] ^ 1]) + x[len(x) // 2 + 1 :],
        lambda x: x[: len(x) // 2],
    ):
        for path, data in whole.items():
            path.write_bytes(damage(data))
        got, errors = run()
        assert got == want
        assert errors.count("Error reading persistent compilation cache entry") == len(entries)


@pytest.mark.parametrize(
    ("path", "reached", "missed"),
    [
        ("performer/graphs/walks.py", {"graph_walks", "graph_pagerank"}, {"attention_op", "train"}),
        (
            "performer/couplings/norms.py",
            {"couplings", "train", "norms"},
            {"graph_walks", "augment"},
        ),
        ("performer/attention/state.py", {"attention_op", "nnx", "train"}, {"norms", "gp"}),
        ("vit/data/augment.py", {"augment", "data"}, {"couplings", "attention_op"}),
        ("experiments/common/statistics.py", {"statistics", "compare"}, {"train", "couplings"}),
        ("README.md", {"readme"}, {"couplings", "train"}),
    ],
)
def test_what_a_change_reaches(path, reached, missed):
    found = {name[len("tests/test_") : -len(".py")] for name in changed.reached({path})}
    assert reached <= found
    assert not missed & found


def test_a_change_of_the_shared_set_up_reaches_everything():
    everything = changed.reached({"tests/conftest.py"})
    assert len(everything) == len(list((changed.ROOT / "tests").glob("test_*.py")))
