"""A Vision Transformer with exact or random-feature attention, and a training loop for it."""

from collections.abc import Callable
from typing import NoReturn


def moved(module: str, **names: str) -> Callable[[str], NoReturn]:
    """A module's `__getattr__`, whose error says where a name is now."""

    def refuse(name: str) -> NoReturn:
        place = f"; it is {names[name]} now" if name in names else ""
        raise AttributeError(f"module {module!r} has no attribute {name!r}{place}")

    return refuse
