"""A data set of your own, as `vit.prepare` makes it: everything is derived from what it holds.

    performer-vit prepare --source=photos --out=data
    performer-vit train --config=my_images:data/photos --workdir=runs/photos

`vit.config.recipe` has the rules; any field takes another value by its flag.
"""

from vit.config import Config, recipe


def get_config(where: str = "") -> Config:
    return recipe.for_data_set(where)
