"""A Vision Transformer with exact or random-feature attention, and what one does with it.

    import vit

    model = vit.load("runs/photos")             # a trained run; its data set is not needed
    model.predict(["cat.jpg"]).top(3)           # class names and probabilities
    model.features(images)                      # what the head reads

    model = vit.fit(images, labels, config="digits", workdir="runs/mine")     # trains on arrays

The commands: `performer-vit` lists them; python -m vit.train is performer-vit train.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vit.data.arrays import fit as fit
    from vit.use import load as load

PLACES = {"fit": "vit.data.arrays", "load": "vit.use"}
"""Where the functions for users are; a module is imported when its function is first named."""

__all__ = list(PLACES)


def __getattr__(name: str) -> Any:
    if name in PLACES:
        return getattr(import_module(PLACES[name]), name)
    raise AttributeError(f"module 'vit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *PLACES})
