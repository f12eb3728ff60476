"""Vision Transformer with exact or random-feature attention: training, prediction, conversion.

    import vit

    model = vit.load("runs/photos")             # a trained run; its data set is not needed
    model.predict(["cat.jpg"]).top(3)           # class names and probabilities
    model.features(images)                      # input of the head

    model = vit.fit(images, labels, config="digits", workdir="runs/mine")     # trains on arrays

`performer-vit` lists the commands; `performer-vit train` is `python -m vit.train`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vit.data.arrays import fit as fit
    from vit.use import load as load

PLACES = {"fit": "vit.data.arrays", "load": "vit.use"}
"""Modules of the functions, imported at the first use."""

__all__ = list(PLACES)


def __getattr__(name: str) -> Any:
    if name in PLACES:
        return getattr(import_module(PLACES[name]), name)
    raise AttributeError(f"module 'vit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *PLACES})
