"""Augmentations: plain functions of an image (height, width, channels) and a NumPy generator."""

import numpy as np


def random_shift(image: np.ndarray, rng: np.random.Generator, max_shift: int) -> np.ndarray:
    """Moves the image by up to `max_shift` pixels along each axis; zeros move in."""
    padded = np.pad(image, [(max_shift, max_shift), (max_shift, max_shift), (0, 0)])
    top, left = rng.integers(0, 2 * max_shift + 1, size=2)
    return padded[top : top + image.shape[0], left : left + image.shape[1]]


def random_flip(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Mirrors the image left to right with probability 1/2."""
    return image[:, ::-1] if rng.random() < 0.5 else image
