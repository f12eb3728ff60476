"""Augmentations: laws of the random ones, each operation against plain arithmetic."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.tiers import tiers
from vit.data import augment
from vit.data.augment import OPERATIONS


def test_shift_and_flip():
    image = np.arange(1, 10, dtype=np.uint8).reshape(3, 3, 1)
    rng = np.random.default_rng(0)
    shifted = {augment.random_shift(image, rng, 1).tobytes() for _ in range(200)}
    assert len(shifted) == 9
    assert image.tobytes() in shifted
    image = np.random.default_rng(0).integers(0, 256, (5, 7, 3)).astype(np.uint8)
    flipped = [augment.random_flip(image, rng).tobytes() for _ in range(1000)]
    assert {*flipped} == {image.tobytes(), image[:, ::-1].tobytes()}
    assert abs(flipped.count(image.tobytes()) / 1000 - 0.5) < Z * 0.5 / np.sqrt(1000)


# --- the inception crop and random erasing

DRAWS = 4000
Z = 5.0  # a mean of draws is further from its expectation with probability 6e-7


def inception():
    """Boxes on a square of so many pixels that rounding does not show."""
    rng = np.random.default_rng(0)
    boxes = [augment.inception_box(10_000, 10_000, rng) for _ in range(DRAWS)]
    return np.array(boxes).T / 10_000


def erased():
    """Rectangles on a square of 200 pixels; inside they are uniform, outside all stays."""
    image, rng = np.full((200, 200, 1), 255, np.uint8), np.random.default_rng(0)
    parts, inside = [], []
    for _ in range(DRAWS):
        got = augment.random_erasing(image, rng)
        rows, columns = (np.flatnonzero((got < 255).any(axis=(axis, 2))) for axis in (1, 0))
        parts.append((columns[0], rows[0], columns[-1] + 1, rows[-1] + 1))
        inside.append(got[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1][:3, :3].ravel())
    pixels = np.concatenate(inside)
    assert abs(pixels.mean() - 127.5) < Z * 256 / np.sqrt(12 * len(pixels))
    assert pixels.min() == 0
    return np.array(parts).T / 200


@pytest.mark.parametrize(
    ("boxes", "shares", "ratio", "least", "most", "edge", "slack"),
    [
        (inception, (0.08, 1), 4 / 3, (0.0799, 0.09), (0.95, 1.0), 1e-3, 1e-3),
        (erased, (0.02, 1 / 3), 1 / 0.3, (0.018, 0.03), (0.31, 0.345), 0.1, 4e-3),  # of a pixel
    ],
)
def test_random_parts_have_the_law_they_should(boxes, shares, ratio, least, most, edge, slack):
    """Area, aspect and place over 4,000 draws, given that the part fits into the square.

    With share s and a = |log aspect|, uniform between their bounds, it fits if s <= exp(-a).
    """
    left, top, right, bottom = boxes()
    width, height = right - left, bottom - top
    assert min(left.min(), top.min()) >= 0
    assert max(right.max(), bottom.max()) <= 1
    area, aspect = width * height, np.log(width / height)
    assert least[0] < area.min() < least[1]
    assert most[0] < area.max() <= most[1]
    assert np.abs(aspect).max() < np.log(ratio) + edge
    s, a = np.meshgrid(np.linspace(*shares, 2001), np.linspace(0, np.log(ratio), 2001))
    fits = s <= np.exp(-a)
    for values, mean in [
        (area, s[fits].mean()),
        (np.abs(aspect), a[fits].mean()),
        (np.sign(aspect), 0.0),
        (left / (1 - width + 1e-9), 0.5),
        (top / (1 - height + 1e-9), 0.5),
    ]:
        assert abs(values.mean() - mean) < Z * values.std() / np.sqrt(DRAWS) + slack


@pytest.mark.parametrize(
    ("size", "want"),
    [((1000, 10), (493, 0, 506, 10)), ((10, 1000), (0, 493, 10, 506)), ((1, 1), (0, 0, 1, 1))],
)
def test_where_nothing_fits_it_is_the_centre(size, want):
    class Largest(np.random.Generator):
        """Asks for the whole area as a square."""

        def uniform(self, low, high):
            return high if high == 1 else 0.0

        def integers(self, high):
            return 0

    assert augment.inception_box(*size, Largest(np.random.PCG64(0))) == want
    rng = np.random.default_rng(0)
    for _ in range(100):
        left, top, right, bottom = augment.inception_box(3, 2, rng)
        assert 0 <= left < right <= 3
        assert 0 <= top < bottom <= 2


# --- RandAugment


def image_of(channels):
    return np.random.default_rng(0).integers(20, 220, (21, 33, channels)).astype(np.uint8)


def apply(name, image, level):
    return np.asarray(OPERATIONS[name](augment.to_pil(image), level)).reshape(image.shape)


def luma(image):
    """ITU-R 601: what grey means to PIL."""
    return image @ np.array([0.299, 0.587, 0.114]) if image.shape[-1] == 3 else image[..., 0] * 1.0


def moved(image, angle=0.0, shear=(0, 0), shift=(0, 0)):
    """Counterclockwise about the centre, each pixel from the nearest; grey from outside."""
    height, width = image.shape[:2]
    out = np.full_like(image, 128)
    for row in range(height):
        for column in range(width):
            x, y = column + 0.5, row + 0.5
            if angle:
                dx, dy = x - width / 2, y - height / 2
                x = width / 2 + np.cos(angle) * dx - np.sin(angle) * dy
                y = height / 2 + np.sin(angle) * dx + np.cos(angle) * dy
            x, y = x + shear[0] * y + shift[0], y + shear[1] * x + shift[1]
            if 0 <= x < width and 0 <= y < height:
                out[row, column] = image[int(y), int(x)]
    return out


def blended(image, other, level):
    return np.clip(other + (1 + 0.9 * level) * (image - other), 0, 255)


PLAIN = {  # by arithmetic, at level 0.5 or -0.5, and the gap that rounding may cause
    "identity": (lambda x, level: x, 0),
    "rotate": (lambda x, level: moved(x, np.deg2rad(30 * level)), None),
    "solarize": (lambda x, level: np.where(x < 128, x, 255 - x), 0),
    "posterize": (lambda x, level: x // 4 * 4, 0),
    "color": (lambda x, level: blended(x, luma(x)[..., None], level), 2),
    "contrast": (lambda x, level: blended(x, luma(x).mean(), level), 2),
    "brightness": (lambda x, level: blended(x, 0.0, level), 1),
    "shear_x": (lambda x, level: moved(x, shear=(0.3 * level, 0)), None),
    "shear_y": (lambda x, level: moved(x, shear=(0, 0.3 * level)), None),
    "translate_x": (lambda x, level: moved(x, shift=(150 / 331 * level * x.shape[1], 0)), 0),
    "translate_y": (lambda x, level: moved(x, shift=(0, 150 / 331 * level * x.shape[0])), 0),
}


@pytest.mark.parametrize("level", [0.5, -0.5])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", PLAIN)
def test_operations_are_what_their_names_say(name, channels, level):
    image = image_of(channels)
    got = apply(name, image, level)
    assert (got.shape, got.dtype) == (image.shape, np.uint8)
    plain, gap = PLAIN[name]
    difference = np.abs(got - np.asarray(plain(image, level), float))
    if gap is None:  # a pixel on the edge between two may come from either
        assert np.mean(difference > 0) < 0.02
    else:
        assert difference.max() <= gap


def test_randaugment_draws_all_operations_and_both_signs(monkeypatch):
    drawn = []
    assert set(OPERATIONS) == {*PLAIN, "autocontrast", "equalize", "sharpness"}
    for name in OPERATIONS:
        monkeypatch.setitem(
            OPERATIONS, name, lambda image, level, name=name: drawn.append((name, level)) or image
        )
    rng = np.random.default_rng(0)
    for _ in range(700):
        augment.randaugment(image_of(1), rng, 2, 15.0)
    names, levels = zip(*drawn, strict=True)
    counts = np.array([names.count(name) for name in OPERATIONS])
    assert counts.sum() == 1400
    assert np.abs(counts - 100).max() < Z * np.sqrt(1400 / 14 * 13 / 14)  # 14 x 6e-7
    assert set(levels) == {-0.5, 0.5}
    assert abs(np.mean(levels)) < Z * 0.5 / np.sqrt(1400)


# --- mixup


@pytest.mark.parametrize("alpha", tiers([0.2, 1.0], 1))
def test_the_share_is_beta_distributed(alpha):
    n = 4000

    def share(key):
        targets = jnp.eye(2)
        return augment.mixup(key, jnp.zeros((2, 1, 1, 1)), targets, alpha)[1][0, 0]

    shares = np.asarray(jax.vmap(share)(jax.random.split(jax.random.key(0), n)), float)
    variance = 1 / (4 * (2 * alpha + 1))
    assert abs(shares.mean() - 0.5) < Z * np.sqrt(variance / n)
    squares = (shares - 0.5) ** 2
    assert abs(squares.mean() - variance) < Z * squares.std() / np.sqrt(n)


# --- CutMix

SIDE = 16
PIXELS = np.arange(4 * SIDE * SIDE * 2, dtype=np.float32).reshape(4, SIDE, SIDE, 2)


def cut(keys, alpha):
    """For each key the images and targets."""

    def one(key):
        return augment.cutmix(key, jnp.asarray(PIXELS), jnp.eye(4), alpha)

    return [np.asarray(x) for x in jax.jit(jax.vmap(one))(keys)]


def test_cutmix_takes_a_rectangle_of_the_neighbour():
    """Every pixel is one of two, the foreign ones are a rectangle, and targets say how many."""
    images, targets = cut(jax.random.split(jax.random.key(0), 300), 1.0)
    for got, labels in zip(images, targets, strict=True):
        own = (got == PIXELS).all(axis=-1)
        foreign = (got == np.roll(PIXELS, 1, axis=0)).all(axis=-1)
        assert (own ^ foreign).all()
        assert (foreign == foreign[0]).all()
        rows, columns = foreign[0].any(axis=1), foreign[0].any(axis=0)
        assert np.array_equal(foreign[0], np.outer(rows, columns))
        for edge in (rows, columns):
            assert np.count_nonzero(np.diff(edge.astype(int))) <= 2
        share = 1 - foreign[0].mean()
        want = share * np.eye(4) + (1 - share) * np.roll(np.eye(4), 1, axis=0)
        np.testing.assert_allclose(labels, want, atol=1e-6)


@pytest.mark.parametrize("alpha", tiers([0.3, 1.0], 1))
def test_cutmix_has_the_law_of_the_paper(alpha):
    """Mean foreign share and mean foreign rows: those of a centre uniform over the image.

    Of a side r = sqrt(1 - lam) of 1, r - r^2 / 4 stays inside on average; the share has its square.
    4,000 draws: false-alarm rate 2 x 6e-7.
    """
    n = 4000
    _, targets = cut(jax.random.split(jax.random.key(1), n), alpha)
    foreign = 1 - targets[:, 0, 0].astype(float)
    lam = np.random.default_rng(0).beta(alpha, alpha, 1_000_000)
    r = np.sqrt(1 - lam)
    want = np.mean((r - r**2 / 4) ** 2)
    assert abs(foreign.mean() - want) < Z * foreign.std() / np.sqrt(n)
    inside = np.mean(foreign > 0.5)
    centres = np.random.default_rng(1).random((2, len(r)))
    sides = np.clip(centres + r / 2, 0, 1) - np.clip(centres - r / 2, 0, 1)
    want = np.mean(sides.prod(axis=0) > 0.5)
    # Rows of sixteenths move the share by up to a sixteenth at the threshold.
    assert abs(inside - want) < Z * np.sqrt(want * (1 - want) / n) + 0.02


@pytest.mark.thorough
def test_with_both_one_is_drawn_evenly():
    """Mixup leaves no pixel as it was; 1,000 draws, false-alarm rate 6e-7."""
    keys = jax.random.split(jax.random.key(2), 1000)
    images = jnp.asarray(PIXELS + 1)

    def mixed(key):
        got, targets = augment.blended(key, images, jnp.eye(4), 1.0, 1.0)
        return ~jnp.any((got == images) | (got == jnp.roll(images, 1, axis=0))), targets

    is_mixup, targets = jax.jit(jax.vmap(mixed))(keys)
    assert abs(np.mean(is_mixup) - 0.5) < Z * 0.5 / np.sqrt(1000)
    np.testing.assert_allclose(np.sum(targets, axis=-1), 1, rtol=1e-6)
    for alphas, function in (((0.4, 0.0), augment.mixup), ((0.0, 0.7), augment.cutmix)):

        def both(key, alphas=alphas, function=function):
            alone = function(key, images, jnp.eye(4), max(alphas))
            return augment.blended(key, images, jnp.eye(4), *alphas), alone

        jax.tree.map(np.testing.assert_array_equal, *jax.jit(both)(keys[0]))
