"""The configs that come with the packages, by name: "digits" is `experiments/configs/digits.py`.

They are found beside this package, wherever the process runs: a folder `experiments` of the user's
own does not hide them.
"""

import runpy
from pathlib import Path

from performer.choices import unknown
from vit.config import Config

FOLDER = Path(__file__).parents[2] / "experiments" / "configs"


def names() -> list[str]:
    """Names of all configs."""
    return sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))


def path(name: str) -> Path:
    """The file of a name; a file that there is stands for itself.

    Raises:
        ValueError: when there is neither; the message lists the names.
    """
    if Path(name).is_file():
        return Path(name)
    if name not in names():
        raise ValueError(f"{unknown('config', name, names())}; and there is no such file")
    return FOLDER / f"{name}.py"


def config(name: str) -> Config:
    """The config that the file makes; "my_images:data/photos" hands it the part after the colon.

    Raises:
        ValueError: as `path`.
    """
    stem, *argument = name.split(":", 1)
    return runpy.run_path(str(path(stem)))["get_config"](*argument)
