"""A model written as one program: what it is worth to a process that has JAX alone."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from tests.support.small import SHALLOW, new_vit, sized, small_config
from tests.support.tiers import tiers
from vit import config, export, use

ABSENT = ("performer", "vit", "flax", "orbax", "optax", "jaxtyping", "scipy.optimize")
_shallow = sized(SHALLOW)
NAMES = ("ant", "bee", "crane", "dove", "eel")


def trained(**sections):
    """A model with a head that is not zero: 5 classes of grey images 8 x 8."""
    settings = small_config(**sections)
    model = new_vit(settings)
    kernel = model.head.kernel[...]
    model.head.kernel[...] = np.random.default_rng(0).normal(size=kernel.shape).astype(np.float32)
    return use.Trained(Path("run"), settings, 3, NAMES, 1, model)


def images(number):
    return np.random.default_rng(number).integers(0, 256, (number, 8, 8, 1), np.uint8)


def served(folder, loader, picture):
    """The logits and the printed line of the loader, in a process where most is missing."""
    picture.save(folder / "photo.png")
    lines = [
        f"import sys; sys.modules |= dict.fromkeys({ABSENT})",
        *loader.replace("photo.jpg", "photo.png").splitlines(),
        "np.save('logits.npy', logits)",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    )
    return np.load(folder / "logits.npy"), done.stdout


@pytest.mark.thorough
@pytest.mark.parametrize("crop", ["center", "squash"])
def test_a_process_with_jax_and_pillow_gives_the_same_logits(tmp_path, crop):
    """For a picture in colour that is neither square nor small, as the evaluation reads it."""
    data = config.Data(eval_resize=10, eval_crop=crop)
    model = trained(model=config.Model(variant="XS/4", pooling="token"), data=data)
    pixels = np.random.default_rng(0).integers(0, 256, (31, 23, 3), np.uint8)
    loader = export.export(model, tmp_path / "birds.stablehlo")
    got, said = served(tmp_path, loader, Image.fromarray(pixels))
    ready = model.pixels(tmp_path / "photo.png")[None]
    want, _ = nnx.jit(lambda model, x: model(x))(model.model, ready)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert said.strip() == str([NAMES[i] for i in want.argmax(-1)])
    about = json.loads((tmp_path / "birds.json").read_text())
    assert about["preprocessing"][export.RESIZED[crop][0]] == 10


MODELS = {
    "softmax": dict(attention=config.Attention(kind="softmax")),
    "calibrated": dict(attention=config.Attention(num_features=8, calibration="shift")),
    "bfloat16 and remat": dict(model=config.Model(variant="XS/4", dtype="bfloat16", remat=True)),
    "window": dict(
        model=config.Model(variant="XS/2", pooling="token"),
        attention=config.Attention(num_features=8, exact_window=4),
    ),
}


@pytest.mark.parametrize("name", tiers(MODELS, []))
def test_every_model_for_every_number_of_images(name):
    model = trained(**MODELS[name])
    program = export.symbolic(model)
    assert program.platforms == ("cpu", "tpu", "cuda")
    for number in (1, 6):
        want, _ = model.outputs(images(number))
        np.testing.assert_allclose(program.call(images(number)), want, atol=2e-2)


@pytest.mark.parametrize("failing", ["birds.stablehlo", "birds.json"])
def test_a_full_disk_leaves_nothing_and_the_same_command_works(tmp_path, monkeypatch, failing):
    program = jax.export.export(jax.jit(lambda x: x))(jax.ShapeDtypeStruct((2,), np.float32))
    monkeypatch.setattr(export, "symbolic", lambda trained: program)
    model, out = trained(), tmp_path / "birds.stablehlo"

    def sync(number):
        if Path(os.readlink(f"/proc/self/fd/{number}")).name == f"{failing}.tmp":
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", sync)
        with pytest.raises(OSError, match=f"No space left on device: .*{failing}"):
            export.export(model, out)
    assert list(tmp_path.iterdir()) == []
    export.export(model, out)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["birds.json", "birds.stablehlo"]


@pytest.mark.parametrize("crop", ["center", "squash"])
def test_the_description_has_the_sizes_of_the_evaluation(crop):
    """`eval_resize`, or the size of the image if it is 0."""
    program = jax.export.export(jax.jit(lambda x: x))(jax.ShapeDtypeStruct((2,), np.float32))
    for resize, side in ((10, 10), (0, 8)):
        data = config.Data(image_size=8, eval_resize=resize, eval_crop=crop)
        model = use.Trained(Path("run"), small_config(data=data), 3, NAMES, 1, None)
        about = export.described(model, program)["preprocessing"]
        want = {"mode": "L", export.RESIZED[crop][0]: side, "center_crop": 8, "filter": "bicubic"}
        assert about == want


def test_nothing_is_overwritten(tmp_path):
    for name in ("bees", "bees.json"):
        with pytest.raises(ValueError, match=r"--out=.*let it end in .stablehlo"):
            export.description(tmp_path / name)
    for name in ("birds.json", "birds.stablehlo"):
        (tmp_path / name).touch()
        with pytest.raises(ValueError, match=rf"already there: .*{name}; remove it or take anoth"):
            export.description(tmp_path / "birds.stablehlo")
        (tmp_path / name).unlink()
