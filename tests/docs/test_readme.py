"""The README is true: its Python runs, its files and links exist, and it is short."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import performer
from tests.support.pages import code

README = Path("README.md").read_text()


@pytest.mark.thorough
def test_python_runs():
    namespace: dict = {}
    for body in code(README, "python"):
        exec(body, namespace)
    assert namespace["output"].shape == (1, 4096, 12, 64)
    assert {row["attention"] for row in namespace["report"].rows} == {"linear"}


@pytest.mark.thorough
def test_errors_of_the_first_example():
    """The numbers below it, with the factors on queries and keys and without them."""
    namespace: dict = {}
    exec(code(README, "python")[0], namespace)
    w, tokens = namespace["features"], [namespace[x] for x in ("query", "key", "value")]

    def errors(factor):
        squares = np.zeros(3)  # one head at a time: exact attention is large
        for i in range(tokens[0].shape[2]):
            query, key, value = (x[:, :, i : i + 1] for x in tokens)
            query, key = factor * query, factor * key
            exact = jax.nn.dot_product_attention(query, key, value)
            output = performer.performer_attention(query, key, value, w)
            mean = jnp.mean(value, axis=1, keepdims=True)
            squares += [float(jnp.sum(x**2)) for x in (output - exact, mean - exact, exact)]
        return squares[:2] / squares[2]

    text = re.search(r"The squared error.*?0\.64", README, flags=re.DOTALL)
    assert text
    printed = [x for x in re.findall(r"[\d.]*\d", text[0]) if x != "0.35"]
    for value, number in zip([*errors(1), *errors(1 / 0.35)], printed, strict=True):
        assert round(value, len(number.partition(".")[2])) == float(number)


def test_links_and_targets_exist():
    paths = re.findall(r"\]\(([^)#]+)", README)
    targets = re.findall(r"^make (\S+)", "\n".join(code(README, "bash")), flags=re.M)
    assert len(paths) > 10
    assert not [path for path in paths if not Path(path).exists()]
    makefile, script = Path("Makefile").read_text(), Path(".ci/run").read_text()
    assert targets
    assert not [x for x in targets if not re.search(rf"^{x}:", makefile, flags=re.M)]
    assert "make lint" in script
    assert "make test" in script
