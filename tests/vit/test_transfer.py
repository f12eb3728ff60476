"""A run begun from another: what is taken, made to fit or new; resuming bit for bit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from performer.nnx import Frequencies
from tests.support.small import CALIBRATED, SHALLOW, sized, small_config
from vit import config, data, train, use
from vit.run import checkpoint, runs
from vit.weights import positions, transfer

SETTINGS = small_config(
    model=config.Model("XS/4"),
    attention=CALIBRATED,
    optim=config.Optim(learning_rate=1e-2, warmup_steps=1, ema=0.9),
    checkpoint_every=3,
)
SOFTMAX = config.Attention(kind="softmax")


_shallow = sized(SHALLOW)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A run of three steps; its head is not zero."""
    workdir = tmp_path_factory.mktemp("transfer") / "source"
    train.train(SETTINGS, workdir)
    return workdir


def begun(source, workdir, **sections):
    """The new run's model, that of the source, and what was said."""
    settings = dataclasses.replace(SETTINGS, **sections)
    lines = transfer.init_from(source, settings, workdir)
    return runs.restore(workdir).model(), runs.restore(source).model(), lines


def params(model):
    return {name: np.asarray(x[...]) for name, x in transfer.parameters(model).items()}


def taken(new, old):
    """Names of the parameters that are those of the source."""
    a, b = params(new), params(old)
    return {n for n in a if n in b and a[n].shape == b[n].shape and np.array_equal(a[n], b[n])}


def test_with_the_same_config_it_is_the_same_function(source, tmp_path):
    """The running mean of the parameters, frequencies and calibration are those of the source."""
    new, old, lines = begun(source, tmp_path / "run")
    images = jnp.asarray(np.random.default_rng(0).integers(0, 256, (3, 8, 8, 1)).astype(np.uint8))
    forward = nnx.jit(lambda model: model(images)[0])
    logits = [forward(model) for model in (new, old)]
    assert np.any(logits[1])
    np.testing.assert_array_equal(*logits)
    count = len(params(old))
    assert lines == [
        f"{source} at step 3: {count} of {count} arrays of parameters are copied"
        " (the running mean)",
        "frequencies: copied",
        "calibration: running moments are copied",
    ]
    raw = checkpoint.restore(source, runs.restore(source).program.abstract)[1]
    trained = nnx.merge(runs.restore(source).program.graph, raw)[0]
    assert not np.array_equal(trained.head.kernel[...], new.head.kernel[...])


@pytest.mark.thorough
def test_other_frequencies_are_drawn_and_the_moments_stay(source, tmp_path):
    attention = dataclasses.replace(CALIBRATED, coupling="orf", num_features=6)
    new, old, lines = begun(source, tmp_path / "run", attention=attention)
    assert taken(new, old) == set(params(new))
    assert [x.shape for x in jax.tree.leaves(nnx.state(new, Frequencies))] == [(2, 6, 8)]
    moments = [model.blocks[0].attention.attention_fn.statistics["moments"] for model in (new, old)]
    assert np.any(moments[1][...])
    np.testing.assert_array_equal(*(x[...] for x in moments))
    assert lines[-2:] == [
        "frequencies: drawn anew (coupling 'pm-antithetic' -> 'orf', num_features 8 -> 6)",
        "calibration: running moments are copied",
    ]


@pytest.mark.thorough
def test_learned_features_come_from_a_run_that_has_them(source, tmp_path):
    """Drawn frequencies in their place would be features of another kernel."""
    learned = config.Block(num_features=8, exact_window=2, transferred=True)
    attention = config.Attention(blocks=(learned,) * SETTINGS.model.size.depth)
    settings = dataclasses.replace(SETTINGS, attention=attention)
    with transfer.begun(settings, tmp_path / "learned", {}) as (model, run):
        for layer in run.task.layers(model):
            weights = layer.attention_fn.learned["weights"]
            weights[...] = jnp.linspace(0, 1, weights[...].size).reshape(weights[...].shape)
    message = r"blocks\[0\].transferred=True: such features are learned by vit.convert"
    with pytest.raises(ValueError, match=message):
        train.train(settings, tmp_path / "run")
    with pytest.raises(ValueError, match="has no learned features of this size there"):
        begun(source, tmp_path / "run", attention=attention)
    assert not (tmp_path / "run").exists()
    other = dataclasses.replace(attention, coupling="orf")  # of draws: these are copied
    new, old, lines = begun(tmp_path / "learned", tmp_path / "run", attention=other)
    assert lines[-1] == "frequencies: copied"
    features = [jax.tree.leaves(nnx.state(model, Frequencies)) for model in (new, old)]
    assert len(features[0]) == 3 * len(attention.blocks)
    for pair in zip(*features, strict=True):
        np.testing.assert_array_equal(*pair)
    assert train.train(dataclasses.replace(settings, attention=other), tmp_path / "run")["step"]


def keys_kernel(x):
    """Cubic convolution with a = -1/2 (Keys 1981)."""
    x = np.abs(x)
    inner = 1.5 * x**3 - 2.5 * x**2 + 1
    return np.where(x < 1, inner, np.where(x < 2, -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2, 0))


def by_hand(table, side):
    """Positions on another grid, in float64: one axis after the other."""
    old = round(len(table) ** 0.5)
    stretch = max(old / side, 1)  # antialiasing: as wide as a new cell
    centres = (np.arange(side) + 0.5) * old / side - 0.5
    weights = keys_kernel((centres[:, None] - np.arange(old)) / stretch)
    weights /= weights.sum(axis=1, keepdims=True)
    grid = np.asarray(table, np.float64).reshape(old, old, -1)
    return np.einsum("ay,bx,yxw->abw", weights, weights, grid).reshape(side**2, -1)


@pytest.mark.parametrize("side", [2, 3, 5, 8])
def test_positions_are_resampled(side):
    """To a coarser grid without aliasing, and to a finer one."""
    table = np.random.default_rng(0).normal(size=(25, 4)).astype(np.float32)
    got = positions.resampled(jnp.asarray(table), side)
    np.testing.assert_allclose(got, by_hand(table, side), rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_a_larger_image_has_resampled_positions_and_all_else(source, tmp_path):
    section = config.Data(batch_size=32, image_size=16)
    new, old, lines = begun(source, tmp_path / "run", data=section, attention=SOFTMAX)
    assert taken(new, old) == set(params(new)) - {"position"}
    want = by_hand(old.position[...], 4)
    np.testing.assert_allclose(new.position[...], want, rtol=1e-4, atol=1e-6)
    assert lines[1:] == ["position: resampled from 2 x 2 to 4 x 4 patches"]


@pytest.mark.thorough
def test_other_patches_pooling_and_positions(source, tmp_path):
    model = config.Model("XS/2", pooling="mean", position="sincos")
    new, old, lines = begun(source, tmp_path / "run", model=model)
    assert set(params(new)) - taken(new, old) <= {"embed/kernel", "embed/bias"}
    assert lines[1:-2] == [
        "embed/bias: (16,) new, (16,) there",
        "embed/kernel: (2, 2, 1, 16) new, (4, 4, 1, 16) there",
        "position: left out, no place here",
        "token: left out, no place here",
    ]
    back = dataclasses.replace(SETTINGS.model, pooling="token")
    again, _, lines = begun(tmp_path / "run", tmp_path / "back", model=back)
    assert "token: (16,) new, not there" in lines
    assert "position: (4, 16) new, not there" in lines
    np.testing.assert_array_equal(again.head.kernel[...], old.head.kernel[...])


@pytest.mark.thorough
def test_a_head_of_other_classes_is_new(source, tmp_path, monkeypatch):
    load = data.load
    fewer = [r | {"label": r["label"] % 5} for r in load(SETTINGS.data).train]
    few = data.Dataset(fewer, fewer[:40], tuple("01234"), channels=1)
    old = use.load(source).model  # whose own data are not looked at
    assert np.any(old.head.kernel[...])
    cases = {
        "fewer": (few, "head/kernel: (16, 5) new, (16, 10) there"),
        "named": (load(SETTINGS.data)._replace(class_names=tuple("abcdefghij")), None),
        "other": (load(SETTINGS.data)._replace(class_names=tuple("bcdefghijk")), "head: new, for"),
        "unsaid": (load(SETTINGS.data)._replace(class_names=tuple("abcdefghij")), "head: new, for"),
    }
    for name, (dataset, line) in cases.items():
        monkeypatch.setattr(data, "load", lambda section, dataset=dataset: dataset)
        origin = source if name != "other" else tmp_path / "named"
        match = "number" if name == "named" else "name"
        lines = transfer.init_from(origin, SETTINGS, tmp_path / name, match=match)
        new = use.load(tmp_path / name).model
        head = transfer.HEAD if line else set()
        assert taken(new, old) == set(params(new)) - head, name
        assert bool(np.any(new.head.kernel[...])) == (line is None)
        assert line is None or any(each.startswith(line) for each in lines), lines


@pytest.mark.thorough
def test_a_head_that_reads_another_layer_is_new(source, tmp_path):
    model = dataclasses.replace(SETTINGS.model, pre_logits=True)
    new, old, lines = begun(source, tmp_path / "run", model=model)
    fresh = {"pre_logits/kernel", "pre_logits/bias", *transfer.HEAD}
    assert set(params(new)) - taken(new, old) == fresh
    assert "head: new, for only one of the models has a layer before it" in lines


@pytest.mark.thorough
def test_what_cannot_be_is_refused_and_leaves_nothing(source, tmp_path):
    workdir = tmp_path / "run"
    other = dataclasses.replace(SETTINGS, model=config.Model("Ti/4"))
    with pytest.raises(ValueError, match="Size.width=16.*Size.width=192"):
        transfer.init_from(source, other, workdir)
    with pytest.raises(ValueError, match="holds no run"):
        transfer.init_from(tmp_path / "none", SETTINGS, workdir)
    assert list(tmp_path.iterdir()) == []
    begun(source, workdir)
    with pytest.raises(ValueError, match="was begun from .*source, not from .*none"):
        transfer.init_from(tmp_path / "none", SETTINGS, workdir)
    with pytest.raises(ValueError, match="source holds a run that was begun without --init_from"):
        transfer.init_from(workdir, SETTINGS, source)
