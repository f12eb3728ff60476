"""Augmentations: plain functions of an image (height, width, channels) and a NumPy generator.

`mixup` and `cutmix` blend batches, in JAX, in the training step.
"""

import io
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from PIL import Image, ImageEnhance, ImageOps, PngImagePlugin, UnidentifiedImageError

Box = tuple[float, float, float, float]
"""Part of an image in pixels: left, top, right, bottom."""
Images = Float[Array, "b height width c"]
Targets = Float[Array, "b classes"]
"""Probabilities of the classes."""
Blended = tuple[Images, Targets]
Operation = Callable[[Image.Image, float], Image.Image]


def random_shift(image: np.ndarray, rng: np.random.Generator, max_shift: int) -> np.ndarray:
    """Move the image by up to `max_shift` pixels along each axis; zeros move in."""
    padded = np.pad(image, [(max_shift, max_shift), (max_shift, max_shift), (0, 0)])
    top, left = rng.integers(0, 2 * max_shift + 1, size=2)
    return padded[top : top + image.shape[0], left : left + image.shape[1]]


def random_flip(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Mirror the image left to right with probability 1/2."""
    if rng.random() < 0.5:
        return image
    mirrored = np.empty_like(image)
    for channel in range(image.shape[-1]):  # four times as fast as one copy of image[:, ::-1]
        mirrored[..., channel] = image[:, ::-1, channel]
    return mirrored


def inception_box(width: int, height: int, rng: np.random.Generator) -> Box:
    """Return a random part of an image (Szegedy et al. 2015, section 6), in whole pixels.

    Its share of the area is uniform in [0.08, 1] and the logarithm of width / height uniform
    between log 3/4 and log 4/3, given that it fits; its place is uniform. If ten tries do not fit,
    it is the largest part in the centre with width / height between 3/4 and 4/3.
    """
    part = _random_part(width, height, rng, (0.08, 1.0), (3 / 4, 4 / 3))
    if part is not None:
        return part
    w, h = min(width, max(1, round(height * 4 / 3))), min(height, max(1, round(width * 4 / 3)))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def random_erasing(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Fill a random rectangle with uniform random pixels (Zhong et al. 2020, RE-R).

    Its share of the area is uniform in [0.02, 1/3] and the logarithm of width / height uniform
    between log 0.3 and log 1/0.3, as in DeiT (the paper: share up to 0.4, uniform ratio), given
    that it fits; its place is uniform. If ten tries do not fit, the image is unchanged.
    """
    part = _random_part(image.shape[1], image.shape[0], rng, (0.02, 1 / 3), (0.3, 1 / 0.3))
    if part is None:
        return image
    left, top, right, bottom = part
    erased = image.copy()
    shape = (bottom - top, right - left, image.shape[2])
    erased[top:bottom, left:right] = rng.integers(0, 256, shape, dtype=np.uint8)
    return erased


def _random_part(
    width: int,
    height: int,
    rng: np.random.Generator,
    shares: tuple[float, float],
    ratios: tuple[float, float],
) -> tuple[int, int, int, int] | None:
    """Return the first of ten parts that fits; bounds of area and width / height are given."""
    for _ in range(10):
        area = rng.uniform(*shares) * width * height
        aspect = math.exp(rng.uniform(math.log(ratios[0]), math.log(ratios[1])))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1))
            return left, top, left + w, top + h
    return None


def randaugment(
    image: np.ndarray, rng: np.random.Generator, layers: int, magnitude: float
) -> np.ndarray:
    """Apply `layers` of the `OPERATIONS`, one after another (Cubuk et al. 2020, algorithm 1).

    Each is drawn uniformly, with repetition, and so is the sign of those with two directions.

    Args:
        image: (height, width, 1 or 3) uint8.
        rng: generator.
        layers: N of the paper.
        magnitude: M of the paper, 0 to 30. At 0 all but autocontrast and equalize do nothing.

    Returns:
        An image of the same shape and dtype.
    """
    drawn = to_pil(image)
    for name in rng.choice(list(OPERATIONS), size=layers):
        drawn = OPERATIONS[name](drawn, rng.choice([-1.0, 1.0]) * magnitude / 30)
    return np.asarray(drawn).reshape(image.shape)


def mixup(key: Array, images: Images, targets: Targets, alpha: float) -> Blended:
    """Blend a batch with itself, shifted by one (Zhang et al. 2018, eq. 1).

    lam x_i + (1 - lam) x_{i-1} for images and targets, one lam ~ Beta(alpha, alpha) for the batch;
    a small alpha > 0 keeps lam near 0 or 1.
    """
    share = jax.random.beta(key, alpha, alpha, dtype=images.dtype)
    images, targets = (share * x + (1 - share) * jnp.roll(x, 1, axis=0) for x in (images, targets))
    return images, targets


def cutmix(key: Array, images: Images, targets: Targets, alpha: float) -> Blended:
    """Replace a rectangle of each image by that of the one before (Yun et al. 2019, eq. 1, 2).

    Its centre is uniform and its sides sqrt(1 - lam) of the image's, lam ~ Beta(alpha, alpha), one
    rectangle for the batch, cut off at the edge. Targets are blended by the share of the pixels
    that stay. At alpha = 1 lam is uniform, as in the paper.
    """
    keys = jax.random.split(key, 3)
    side = jnp.sqrt(1 - jax.random.beta(keys[0], alpha, alpha, dtype=images.dtype))

    def inside(key: Array, size: int) -> Array:
        centre, half = jax.random.uniform(key, maxval=size), side * size / 2
        pixels = jnp.arange(size) + 0.5
        return (centre - half <= pixels) & (pixels < centre + half)

    rows, columns = (inside(k, n) for k, n in zip(keys[1:], images.shape[1:3], strict=True))
    cut = (rows[:, None] & columns)[..., None]
    share = 1 - jnp.mean(cut, dtype=images.dtype)
    images = jnp.where(cut, jnp.roll(images, 1, axis=0), images)
    return images, share * targets + (1 - share) * jnp.roll(targets, 1, axis=0)


def blended(
    key: Array, images: Images, targets: Targets, mixup_alpha: float, cutmix_alpha: float
) -> Blended:
    """Apply `mixup` or `cutmix`, whichever alpha is not 0; with both one of them, at random."""
    if not cutmix_alpha:
        return mixup(key, images, targets, mixup_alpha)
    if not mixup_alpha:
        return cutmix(key, images, targets, cutmix_alpha)
    choice, key = jax.random.split(key)
    return jax.lax.cond(
        jax.random.bernoulli(choice),
        lambda: mixup(key, images, targets, mixup_alpha),
        lambda: cutmix(key, images, targets, cutmix_alpha),
    )


FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP")
"""Image formats; some other formats of Pillow start programs (PostScript)."""


def open_image(encoded: bytes, bits: int = 16) -> Image.Image:
    """Open an image of one of the `FORMATS`, without transparency; others are decoded when used.

    Args:
        encoded: the file.
        bits: as `opaque`.

    Raises:
        OSError, SyntaxError, ...: errors of Pillow for broken files, or for more than 178,956,970
            pixels (DecompressionBombError).
    """
    try:
        opened = Image.open(io.BytesIO(encoded), formats=FORMATS)
    except UnidentifiedImageError:
        if encoded.startswith(b"\x89PNG\r\n\x1a\n"):  # Image.open does not say what is broken
            opened = PngImagePlugin.PngImageFile(io.BytesIO(encoded))
        else:
            formats = ", ".join(FORMATS)  # as HEIC of telephones
            raise OSError(f"it is none of {formats}: save it as JPEG or PNG") from None
    return opaque(opened, bits)


def opaque(image: Image.Image, bits: int = 16) -> Image.Image:
    """Return an image without transparency, on white as browsers show it, in 8 bits per channel.

    Of grey values of 16 bits, which Pillow's own conversion clips, the higher 8 of the lower `bits`
    are kept. Images without either are returned as they are.

    Raises:
        OSError: if a grey value has more bits.
    """
    if image.mode.startswith("I"):
        values = np.asarray(image).clip(0, 2**16 - 1)
        if values.max() >= 2**bits:
            raise OSError(f"it has the value {values.max()}, of more than --bits={bits}")
        new = Image.fromarray((values >> (bits - 8)).astype(np.uint8))
    elif image.has_transparency_data:
        colours = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        is_grey = image.mode in ("1", "L", "LA", "La")
        new = Image.alpha_composite(white, colours).convert("L" if is_grey else "RGB")
    else:
        return image
    new.info |= {name: x for name, x in image.info.items() if name == "exif"}
    return new


def to_pil(image: np.ndarray) -> Image.Image:
    """Return an array (height, width, 1 or 3) of uint8 as a PIL image of mode "L" or "RGB"."""
    return Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)


def _enhance(kind: Callable[[Image.Image], ImageEnhance._Enhance]) -> Operation:
    return lambda image, level: kind(image).enhance(1 + 0.9 * level)


def _affine(image: Image.Image, *matrix: float) -> Image.Image:
    """Move the pixel (a x + b y + c, d x + e y + f) to (x, y), grey outside."""
    return image.transform(image.size, Image.Transform.AFFINE, matrix, fillcolor=_grey(image))


def _grey(image: Image.Image) -> tuple[int, ...]:
    return (128,) * len(image.getbands())


SHIFT = 150 / 331
"""Largest translation, as a share of the side."""

OPERATIONS: dict[str, Operation] = {
    "identity": lambda image, level: image,
    "autocontrast": lambda image, level: ImageOps.autocontrast(image),
    "equalize": lambda image, level: ImageOps.equalize(image),
    "rotate": lambda image, level: image.rotate(30 * level, fillcolor=_grey(image)),
    "solarize": lambda image, level: ImageOps.solarize(image, round(256 * (1 - abs(level)))),
    "posterize": lambda image, level: ImageOps.posterize(image, 8 - round(4 * abs(level))),
    "color": _enhance(ImageEnhance.Color),
    "contrast": _enhance(ImageEnhance.Contrast),
    "brightness": _enhance(ImageEnhance.Brightness),
    "sharpness": _enhance(ImageEnhance.Sharpness),
    "shear_x": lambda image, level: _affine(image, 1, 0.3 * level, 0, 0, 1, 0),
    "shear_y": lambda image, level: _affine(image, 1, 0, 0, 0.3 * level, 1, 0),
    "translate_x": lambda image, level: _affine(image, 1, 0, SHIFT * level * image.width, 0, 1, 0),
    "translate_y": lambda image, level: _affine(image, 1, 0, 0, 0, 1, SHIFT * level * image.height),
}
"""The operations of Cubuk et al. 2020 with the ranges of Cubuk et al. 2019.

`level` is the magnitude over 30, -1 to 1; operations without a direction ignore its sign.
"""
