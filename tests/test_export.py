"""A model written as one program: what it is worth to a process that has JAX alone."""

import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from tests.small import new_vit, small_config
from vit import config, export, use

ABSENT = (
    "performer",
    "vit",
    "flax",
    "orbax",
    "optax",
    "jaxtyping",
    "scipy.optimize",
)
NAMES = ("ant", "bee", "crane", "dove", "eel")


@pytest.fixture(autouse=True)
def _tiny(tiny):
    """Two layers of width 16."""


def trained(**sections):
    """A model with a head that is not zero: 5 classes of grey images 8 x 8."""
    settings = small_config(**sections)
    model = new_vit(settings)
    kernel = model.head.kernel[...]
    model.head.kernel[...] = np.random.default_rng(0).normal(size=kernel.shape).astype(np.float32)
    return use.Trained(Path("run"), settings, 3, NAMES, 1, model)


def images(number):
    return np.random.default_rng(number).integers(0, 256, (number, 8, 8, 1), np.uint8)


def served(written, number):
    """The logits and the printed line of the loader, in a process where most is missing."""
    folder = written.program.parent
    np.save(folder / "images.npy", images(number))
    lines = [
        f"import sys; sys.modules |= dict.fromkeys({ABSENT})",
        *written.loader().splitlines(),
        "np.save('logits.npy', logits)",
    ]
    zeros = next(i for i, line in enumerate(lines) if line.startswith("images = "))
    lines[zeros] = "images = np.load('images.npy')"
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    )
    return np.load(folder / "logits.npy"), done.stdout


def test_a_process_with_jax_alone_gives_the_same_logits(tmp_path):
    data = config.Data(eval_resize=10)
    model = trained(model=config.Model(variant="XS/4", pooling="token"), data=data)
    written = export.named(tmp_path / "new" / "birds.stablehlo")
    export.export(model, written)
    got, said = served(written, 3)
    want, _ = model.model(jnp.asarray(images(3)))  # as they are: pictures would be resized first
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert said.strip() == str([NAMES[i] for i in want.argmax(-1)])
    assert {path.suffix for path in written.about.parent.glob("birds.*")} == {".stablehlo", ".json"}
    about = json.loads(written.about.read_text())
    assert about["class_names"] == list(NAMES)
    assert (about["image_size"], about["channels"], about["step"]) == (8, 1, 3)
    assert about["preprocessing"]["shorter_side"] == 10
    assert about["program"] == "birds.stablehlo"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "sections",
    [
        dict(attention=config.Attention(kind="softmax")),
        dict(attention=config.Attention(num_features=8, calibration="shift")),
        dict(model=config.Model(variant="XS/4", dtype="bfloat16", remat=True)),
        dict(
            model=config.Model(variant="XS/2", pooling="token"),
            attention=config.Attention(num_features=8, exact_window=4),
        ),
    ],
    ids=["softmax", "calibrated", "bfloat16 and remat", "window"],
)
def test_every_model_for_every_number_of_images(sections):
    model = trained(**sections)
    program = export.symbolic(model)
    assert program.platforms == ("cpu", "tpu", "cuda")
    for number in (1, 6):
        want, _ = model.outputs(images(number))
        np.testing.assert_allclose(program.call(images(number)), want, atol=2e-2)


def test_nothing_is_overwritten(tmp_path):
    for name in ("bees", "bees.json"):
        with pytest.raises(ValueError, match=r"--out=.*let it end in .stablehlo"):
            export.named(tmp_path / name)
    for name in ("birds.json", "birds.stablehlo"):
        (tmp_path / name).touch()
        with pytest.raises(ValueError, match=rf"already there: .*{name}; remove it or take anoth"):
            export.named(tmp_path / "birds.stablehlo")
        (tmp_path / name).unlink()


@pytest.mark.thorough
def test_too_many_parameters_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "LARGEST", 1000)
    written = export.named(tmp_path / "birds.stablehlo")
    with pytest.raises(ValueError, match="at most 1,000 of them"):
        export.export(trained(), written)
    assert not any(tmp_path.iterdir())
