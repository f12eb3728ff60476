"""Configs that are derived from the data: valid for any number of pictures of any size."""

import itertools

import numpy as np
import pytest
from PIL import Image

from tests.support.small import run_of
from tests.vit.test_sources import write_idx
from vit import config, data
from vit.config import recipe
from vit.prepare import prepare
from vit.run import optim

NUMBERS = (1, 2, 7, 80, 999, 9_999, 60_000, 800_000, 1_281_167, 10**8)
SIDES = (1, 7, 8, 13, 32, 63, 96, 127, 224, 4000)


@pytest.mark.parametrize("number", NUMBERS)
def test_every_config_is_valid_and_its_run_has_a_length(number):
    for side, channels in zip(SIDES, itertools.cycle((1, 3)), strict=False):
        derived = recipe.for_images(number, 10, side, channels)
        config.validate(derived)
        dataset = data.Dataset(range(number), range(1))
        data.check(dataset, derived.data)
        _, num_steps = run_of(derived, dataset).length
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
    derived = config.bundled(f"my_images:{photos}/data/photos")
    misspelled = "num_epoch"
    with pytest.raises(AttributeError, match=misspelled):
        setattr(derived, misspelled, 3)
    config.validate(derived)
    assert derived.overridden({}) == config.with_values(
        recipe.for_images(10, 2, 96, 3),
        {"data.name": "photos", "data.dir": f"{photos}/data", "data.eval_split": "validation"},
    )
    assert (len(data.load(derived.data).train), derived.model.variant) == (10, "XS/8")


def test_a_folder_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = f"there is no folder {tmp_path}/data/nosuch; .*prepare --source=PICTURES --out=data$"
    with pytest.raises(ValueError, match=message):
        config.bundled("my_images:data/nosuch")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"num_epochs": 10.0}, {"log_every": 1}),
        ({"num_epochs": 600.0}, {"optim.warmup_steps": 0.1}),
        ({"data.image_size": 32, "model.variant": "Ti/4"}, {"attention.num_features": 128}),
        ({"data.batch_size": 2, "log_every": 7}, {"data.batch_size": 2}),
        ({"eval_every": 10, "checkpoint_every": 15}, {"optim.warmup_steps": 0.1}),
    ],
)
def test_given_values_enter_before_the_others_are_derived(photos, values, expected):
    """By a flag of my_images and as an argument of `vit.fit`; both refused two epochs before."""
    derived = config.bundled(f"my_images:{photos}/data/photos").overridden(values)
    config.validate(derived)
    assert type(derived) is config.Config
    flat = config.flatten(derived)
    assert {name: flat[name] for name in values | expected} == values | expected
    dataset = data.load(derived.data)
    optim.schedule(derived.optim, run_of(derived, dataset).length[1])
    given = values | {"data.name": "photos", "data.dir": f"{photos}/data"}
    given |= {"data.eval_split": "validation"}
    assert recipe.for_images(11, 2, 96, 3, given) == derived
    with pytest.raises(ValueError, match="config.num_epochs=-1.0: must be a number above 0"):
        recipe.for_images(11, 2, 96, 3, {"num_epochs": -1.0})


def test_my_images_takes_the_test_split_where_there_is_no_validation(tmp_path):
    (tmp_path / "mnist").mkdir()
    write_idx(tmp_path / "mnist")
    prepare(tmp_path / "mnist", tmp_path)
    derived = config.bundled(f"my_images:{tmp_path}/mnist")
    assert derived.data.eval_split == "test"
    assert not derived.data.flip
