"""Shared set-up: run-time shape checks of annotated functions, caches cleared per module."""

import jax
import pytest
from jaxtyping import install_import_hook

install_import_hook(["performer", "vit"], "beartype.beartype")


@pytest.fixture(autouse=True, scope="module")
def _clear_compilations():
    """Many hundred compiled programs in one process exhaust its memory maps on CPU."""
    yield
    jax.clear_caches()
