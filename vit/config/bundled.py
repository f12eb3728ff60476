"""Bundled configs by name: "digits" is `experiments/configs/digits.py`.

They are found beside this package from any working directory, even one with its own `experiments`.
"""

import runpy
from pathlib import Path

from performer.choices import unknown
from vit.config import Config

FOLDER = Path(__file__).parents[2] / "experiments" / "configs"


def names() -> list[str]:
    """Return the names of all bundled configs."""
    return sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))


def path(name: str) -> Path:
    """Return the file of a bundled config, or the path of an existing file as it is.

    Raises:
        ValueError: for neither; the message lists the names.
    """
    if Path(name).is_file():
        return Path(name)
    if name not in names():
        raise ValueError(f"{unknown('config', name, names())}; and no such file exists")
    return FOLDER / f"{name}.py"


def config(name: str) -> Config:
    """Return the config of a file; in "my_images:data/photos" the argument follows the colon.

    Raises:
        ValueError: as `path`, or as the file.
    """
    stem, *argument = name.split(":", 1)
    return runpy.run_path(str(path(stem)))["get_config"](*argument)
