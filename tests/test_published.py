"""Encoders of transformers and timm: the same function, from files that they wrote themselves.

`tests/published` holds tiny ones with random weights, and what PyTorch computes
(`tests/make_published.py`).
"""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import make_published
from vit import config, data, pretrained
from vit.model import ViT, random_streams
from vit.published import families

FILES = Path(__file__).parent / "published"
CLASS_NAMES = tuple(f"class {x}" for x in "abcde")


def made(folder, image_size=0, **sections):
    """The model of a folder for pictures of that size, and the lines on it."""
    encoder = families.read(folder / "model.safetensors")
    options = config.Config(
        attention=config.Attention(kind="softmax"),
        data=config.Data(image_size=image_size or encoder.image_size),
        **sections,
    )
    options = pretrained.of_encoder(options, encoder)
    config.validate(options)
    classes = encoder.said.class_names or tuple(map(str, range(5)))
    dataset = data.Dataset((), (), classes, 3)

    def new():
        return ViT(options, num_classes=len(classes), channels=3, rngs=random_streams(0))

    model = nnx.jit(new)()
    named, lines = pretrained.fitted(encoder, model, dataset)
    lines += pretrained.load(model, named, "file", {})
    return model, [*encoder.lines, *lines]


@nnx.jit
def computed(model, images):
    """Logits, what the head reads, and the last hidden states."""
    logits, passed = model(images)
    hidden = passed[f"block{len(model.blocks) - 1:02d}/output"]
    normed = model.norm(hidden) if model.final_norm == "before" else hidden
    return logits, passed["pooled"], normed


def difference(got, want):
    """Largest, relative to the largest value."""
    return float(np.abs(np.asarray(got) - want).max() / np.abs(want).max())


def parity(folder, side, size):
    """Relative differences of logits, or what a head would read, and of last hidden states."""
    want = np.load(folder / "reference.npz")
    model, lines = made(folder, side * size.patch)
    logits, pooled, hidden = computed(model, jnp.asarray(want[f"{side}/images"]))
    headless = any("head/kernel" in line and "not in the file" in line for line in lines)
    output = pooled if headless else logits
    return difference(output, want[f"{side}/logits"]), difference(hidden, want[f"{side}/hidden"])


@pytest.mark.parametrize("side", make_published.TINY.sides)
@pytest.mark.parametrize("name", make_published.ENCODERS)
def test_the_function_is_that_of_pytorch(name, side):
    """In float32, at the size of the positions and at one with fewer patches."""
    assert max(parity(FILES / name, side, make_published.TINY)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", make_published.ENCODERS)
def test_the_function_is_that_of_pytorch_at_usual_sizes(name, tmp_path):
    """Twelve blocks of width 192 on pictures of 224 and 160; needs the group `published`."""
    for library in ("torch", "timm", "transformers"):
        pytest.importorskip(library)
    make_published.make(name, tmp_path, make_published.USUAL)
    for side in make_published.USUAL.sides:
        logits, hidden = parity(tmp_path, side, make_published.USUAL)
        print(f"{name} at {16 * side} pixels: logits {logits:.1e}, hidden {hidden:.1e}")
        assert max(logits, hidden) < 1e-5
