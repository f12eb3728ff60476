"""A release has the repository's address wherever one belongs; `make release` runs whole."""

import re
import shutil
import tomllib
from pathlib import Path

import pytest

from tests import release

ADDRESS = "https://github.com/someone/features"


@pytest.fixture
def tree(tmp_path):
    for name in release.ADDRESSED:
        shutil.copy(name, tmp_path)
    for name in ("docs", "experiments", "LICENSE"):
        (tmp_path / name).symlink_to(Path(name).resolve())
    return tmp_path


def test_the_address_is_filled_in(tree):
    """Metadata, clone lines and citation; the README's links work away from the checkout."""
    before = release.placeholder(tree)
    release.fill(tree, ADDRESS, "0.1.0")
    texts = {name: (tree / name).read_text() for name in release.ADDRESSED}
    assert not [name for name, text in texts.items() if before in text or ADDRESS not in text]
    urls = tomllib.loads(texts["pyproject.toml"])["project"]["urls"]
    assert urls["Repository"] == ADDRESS
    readme = texts["README.md"]
    links = re.findall(r'\]\(([^)]+)\)|src(?:set)?="([^"]+)"', readme)
    assert len(links) > 15
    assert all("".join(link).startswith("https://") for link in links)
    assert f"({ADDRESS}/blob/v0.1.0/docs/learn/exact.md)" in readme
    assert f'srcset="{ADDRESS}/raw/v0.1.0/docs/_static/idea-dark.svg"' in readme


@pytest.mark.parametrize("address", ["", "you/performer", "http://github.com/you/performer"])
def test_a_release_needs_an_address(tree, address):
    with pytest.raises(ValueError, match="make release REPOSITORY=https://"):
        release.fill(tree, address, "0.1.0")


def test_a_link_to_nothing_is_found(tree):
    (tree / "README.md").write_text(f"{release.placeholder(tree)} [more](docs/nothing.md)")
    with pytest.raises(ValueError, match=r"README.md links to docs/nothing.md"):
        release.fill(tree, ADDRESS, "0.1.0")
