"""The MLP-Mixer: another model of the task of images, and what it refuses."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import vit
from tests.support.small import small_config
from vit import config, convert, evaluate, pretrained, train
from vit.config import with_values
from vit.model import mixer
from vit.model.mixer import Config, Mixer, Model
from vit.reports import metrics
from vit.run import devices, dry_run
from vit.task import random_streams

SETTINGS = Config(
    model=Model(patch_size=4, width=16, depth=1, patch_dim=8, channel_dim=24),
    **{name: getattr(small_config(), name) for name in ("data", "optim", "num_epochs")},
    **{name: getattr(small_config(), name) for name in ("log_every", "eval_every")},
)


def test_the_block_is_eq_1_of_the_paper():
    """By NumPy, over patches and then over channels; each image has only its own."""
    block = mixer.Block(SETTINGS.model, 4, nnx.Rngs(params=0, dropout=1))
    x = np.random.default_rng(0).normal(size=(2, 4, 16)).astype(np.float32)

    def mlp(layers, x):
        hidden = nnx.gelu(x @ layers.up.kernel[...] + layers.up.bias[...])
        return hidden @ layers.down.kernel[...] + layers.down.bias[...]

    def norm(x):
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)

    u = x + np.swapaxes(mlp(block.over_patches, np.swapaxes(norm(x), 1, 2)), 1, 2)
    want = u + mlp(block.over_channels, norm(u))
    block.eval()
    np.testing.assert_allclose(block(jnp.asarray(x)), want, atol=1e-5)


def test_it_maps_pixels_to_logits_of_its_pooled_patches():
    model = Mixer(SETTINGS, num_classes=5, channels=1, rngs=random_streams(0))
    model.head.kernel[...] = jnp.ones((16, 5))
    images = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 1)).astype(np.uint8)
    logits, intermediates = model(jnp.asarray(images))
    want = intermediates["pooled"].sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(logits, np.repeat(want, 5, axis=1), atol=1e-4)
    assert np.std(intermediates["pooled"], axis=0).min() > 0


def test_its_fields_are_its_own():
    assert set(config.sections(Config)) == {"model", "data", "optim"}
    assert "model.patch_dim" in config.flag_types(Config)
    assert not [name for name in config.fields(Config) if name.startswith("attention")]
    with pytest.raises(ValueError, match=r"image_size \(8\) must be divisible by .*size \(3\)"):
        config.validate(with_values(SETTINGS, {"model.patch_size": 3}))
    with pytest.raises(ValueError, match=r"config.seq \(2\) must be 1 for an MLP over patches"):
        config.validate(with_values(SETTINGS, {"seq": 2}))


@pytest.mark.thorough
def test_a_run_is_used_as_one_of_a_vit_and_says_what_it_cannot_do(tmp_path, monkeypatch, capsys):
    """MFU, reports on attention, conversion and layer-wise decay: one line each, no traceback."""
    workdir = tmp_path / "run"
    monkeypatch.setattr(devices, "peak_flops", lambda: 1e12)
    record = train.train(SETTINGS, workdir)
    assert "MFU is not logged: the task does not count its oper" in capsys.readouterr().out
    assert not [each for each in metrics.read(workdir / "metrics.jsonl") if "mfu" in each]
    assert evaluate.evaluate_run(workdir)["eval_loss"] == pytest.approx(record["eval_loss"])
    model = vit.load(workdir)
    assert "MLP-Mixer Model(patch_size=4, width=16" in repr(model)
    prediction = model.predict(np.zeros((2, 8, 8), np.uint8))
    np.testing.assert_allclose(prediction.probabilities.sum(axis=1), 1, atol=1e-5)
    assert evaluate.report_classes(workdir).startswith("top-1 ")
    no_attention = f"{workdir} holds a run of the task 'mixer', whose config has no section attent"
    for call in (evaluate.report_attention, convert.convert):
        with pytest.raises(ValueError, match=no_attention):
            call(workdir, tmp_path / "none")
    decayed = with_values(SETTINGS, {"optim.layer_decay": 0.5})
    with pytest.raises(ValueError, match="layer_decay must be 1.0: the task of this run does not"):
        train.train(decayed, tmp_path / "none")
    with pytest.raises(ValueError, match="published weights are of ViTs, and .* of 'mixer'"):
        pretrained.pretrained(tmp_path / "x.npz", SETTINGS, tmp_path / "none")
    assert "operations: not counted" in dry_run.text(dry_run.plan(SETTINGS))
