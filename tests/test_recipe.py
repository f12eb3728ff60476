"""Configs that are derived from the data: valid for any number of pictures of any size."""

import itertools

import pytest

from vit import config, data, optim, recipe, runs

NUMBERS = (1, 2, 3, 7, 72, 80, 999, 9_999, 10_000, 60_000, 99_999, 800_000, 1_281_167, 10**8)
SIDES = (1, 5, 7, 8, 13, 28, 32, 63, 96, 127, 224, 500, 4000)


@pytest.mark.parametrize("number", NUMBERS)
def test_every_config_is_valid_and_its_run_has_a_length(number):
    for side, channels in itertools.product(SIDES, (1, 3)):
        derived = recipe.for_images(number, 10, side, channels)
        config.validate(derived)
        dataset = data.Dataset(range(number), range(1), 10, channels)
        data.check(dataset, derived.data)
        _, num_steps = runs.length(derived, dataset)
        assert 1000 <= num_steps <= 3_000_000
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
