"""The suite itself: a damaged cache of programs changes nothing."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import jax, jax.numpy as jnp
print(jax.jit(lambda x: jnp.sin(x) @ x.T)(jnp.arange(6.0).reshape(2, 3)).tolist())
"""


@pytest.mark.thorough
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
