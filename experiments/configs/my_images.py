"""A data set of your own, as `vit.prepare` makes it: everything is derived from what it holds.

    python -m vit.prepare --source=photos --out=data
    python -m vit.train --config=my_images:data/photos --workdir=runs/photos

`vit.recipe` has the rules; any field takes another value by its flag.
"""

from vit import recipe
from vit.config import Config


def get_config(where: str = "") -> Config:
    return recipe.for_data_set(where)
