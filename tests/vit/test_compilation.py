"""Compiled programs stay in the user's cache folder, unless JAX's own variable says otherwise."""

import jax
import pytest

from vit.storage import compilation


@pytest.fixture
def settings(monkeypatch):
    """The settings that are made, by name."""
    made = {}
    monkeypatch.setattr(jax.config, "update", made.__setitem__)
    return made


def test_programs_are_kept_in_the_users_folder(settings, monkeypatch, tmp_path):
    monkeypatch.delenv(compilation.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compilation.keep_programs()
    assert settings["jax_compilation_cache_dir"].startswith(f"{tmp_path}/performer/")
    assert settings["jax_compilation_cache_max_size"] == 2**31


@pytest.mark.parametrize("folder", ["", "/scratch/programs"])
def test_the_variable_of_jax_is_respected(settings, monkeypatch, folder):
    monkeypatch.setenv(compilation.VARIABLE, folder)
    compilation.keep_programs()
    assert not settings


def test_a_system_without_a_description_of_the_processor_has_a_folder(monkeypatch, tmp_path):
    """As macOS: no /proc."""
    before = compilation.cache_folder()
    monkeypatch.setattr(compilation, "PROCESSOR", tmp_path / "cpuinfo")
    assert compilation.cache_folder().parent == before.parent


def test_kinds_of_processors_have_folders_of_their_own(monkeypatch):
    folders = {compilation.cache_folder()}
    for kind in ("x86_64", "aarch64"):
        monkeypatch.setattr(compilation.platform, "machine", lambda kind=kind: kind)
        folders.add(compilation.cache_folder())
    assert len(folders) == 2
