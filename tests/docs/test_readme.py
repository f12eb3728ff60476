"""The README is true: its Python runs, its files and links exist, and it is short."""

import re
from pathlib import Path

import pytest

from tests.support.pages import code

README = Path("README.md").read_text()


@pytest.mark.thorough
def test_python_runs():
    namespace: dict = {}
    for body in code(README, "python"):
        exec(body, namespace)
    assert namespace["output"].shape == (2, 197, 768)
    assert namespace["attention_fn"].frequencies[...].shape == (12, 128, 64)


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
