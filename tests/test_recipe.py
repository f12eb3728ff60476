"""Configs that are derived from the data: valid for any number of pictures of any size."""

import itertools
import re

import numpy as np
import pytest
from PIL import Image

from tests.test_sources import write_idx
from vit import config, data
from vit.config import bundled, recipe
from vit.prepare import prepare
from vit.run import optim, runs

NUMBERS = (1, 2, 7, 80, 999, 9_999, 60_000, 800_000, 1_281_167, 10**8)
SIDES = (1, 7, 8, 13, 32, 63, 96, 127, 224, 4000)


@pytest.mark.parametrize("number", NUMBERS)
def test_every_config_is_valid_and_its_run_has_a_length(number):
    for side, channels in zip(SIDES, itertools.cycle((1, 3)), strict=False):
        derived = recipe.for_images(number, 10, side, channels)
        config.validate(derived)
        dataset = data.Dataset(range(number), range(1))
        data.check(dataset, derived.data)
        _, num_steps = runs.length(derived, dataset)
        assert 600 <= num_steps <= 3_000_000
        optim.schedule(derived.optim, num_steps)
        assert derived.data.image_size <= side
        assert 18 <= num_steps // derived.eval_every <= 40


def test_a_million_photos_look_like_imagenet_and_eighty_do_not():
    many, few = recipe.for_images(1_281_167, 1000, 375, 3), recipe.for_images(80, 10, 224, 3)
    assert (many.model.variant, many.data.image_size, many.data.eval_resize) == ("B/16", 224, 256)
    assert many.data.crop == "inception"
    assert many.num_epochs == 90
    assert (few.model.variant, few.data.batch_size) == ("XS/16", 16)
    assert few.model.dtype == "float32"


def test_what_cannot_be_learned_from_is_refused():
    for wrong, message in [((0, 2, 8, 1), "num_examples=0"), ((9, 1, 8, 1), "nothing to tell")]:
        with pytest.raises(ValueError, match=message):
            recipe.for_images(*wrong)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A prepared data set of 12 pictures, 96 pixels on the shorter side, one of them larger."""
    folder = tmp_path_factory.mktemp("photos")
    for name in ("cat", "dog"):
        (folder / "raw" / name).mkdir(parents=True)
        for i in range(6):
            size = (2000, 1500) if (name, i) == ("cat", 0) else (120, 96)
            Image.fromarray(np.zeros((*size[::-1], 3), np.uint8)).save(
                folder / f"raw/{name}/{i}.png"
            )
    prepare(folder / "raw", folder / "data", "photos")
    return folder


def test_my_images_reads_the_data_set(photos):
    derived = bundled.config(f"my_images:{photos}/data/photos")
    config.validate(derived)
    assert derived == config.with_values(
        recipe.for_images(11, 2, 96, 3),
        {"data.name": "photos", "data.dir": f"{photos}/data", "data.eval_split": "validation"},
    )
    assert (len(data.load(derived.data).train), derived.model.variant) == (11, "XS/8")


def test_my_images_takes_the_test_split_where_there_is_no_validation(tmp_path):
    (tmp_path / "mnist").mkdir()
    write_idx(tmp_path / "mnist")
    prepare(tmp_path / "mnist", tmp_path)
    derived = bundled.config(f"my_images:{tmp_path}/mnist")
    assert derived.data.eval_split == "test"
    assert not derived.data.flip


def test_a_wrong_folder_says_what_is_wrong_with_it(photos):
    def told(directory, name="photos"):
        with pytest.raises(ValueError, match="config.data|raw pictures") as error:
            data.load(config.Data(name=name, dir=str(directory)))
        return str(error.value)

    assert told(photos / "nowhere") == f"config.data.dir='{photos}/nowhere' does not exist"
    for directory, name in [(photos / "raw", "photos"), (photos, "raw")]:
        assert re.search(
            rf"raw holds raw pictures \(class folders .*\): .* -m vit.prepare --source={photos}/raw"
            " --out=data",
            told(directory, name),
        )
    itself = f"is a data set itself: give --config.data.dir={photos}/data --config.data.name=photos"
    assert itself in told(photos / "data" / "photos", "other")
    assert "holds no data set; one is made of pictures by" in told(photos / "raw" / "cat")
    assert "unknown config.data.name 'photo'; did you mean 'photos'? Choices: digits, photos" in (
        told(photos / "data", "photo")
    )
    with pytest.raises(ValueError, match=rf"vit.prepare --source={photos}/raw"):
        recipe.for_data_set(f"{photos}/raw")
