"""Vision Transformer with exact or random-feature attention: training, prediction, conversion.

    import vit

    model = vit.load("runs/photos")             # a trained run; its data set is not needed
    model.predict(["cat.jpg"]).top(3)           # class names and probabilities
    model.features(images)                      # input of the head

    model = vit.fit(images, labels, workdir="runs/mine")        # trains on arrays

`performer-vit` lists the commands; `performer-vit train` is `python -m vit.train`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vit.use import fit as fit
    from vit.use import load as load

__all__ = ["fit", "load"]


def missing(error: ModuleNotFoundError) -> str:
    """Return how to install a missing library; raise the error if it is a module of ours."""
    if str(error.name).split(".")[0] in ("performer", "vit"):
        raise error
    from performer.choices import install

    others = "pip install '.[vit]' in a checkout installs all that vit needs"
    return f"{error.name} is not installed: {install(error.name)}; {others}"


def __getattr__(name: str) -> Any:
    if name in __all__:  # imported at the first use
        try:
            return getattr(import_module("vit.use"), name)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"vit.{name}: {missing(error)}", name=error.name) from error
    raise AttributeError(f"module 'vit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
