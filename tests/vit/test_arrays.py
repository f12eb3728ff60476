"""Training on arrays: the records that are made of them, and a run that is as any other."""

import numpy as np
import pytest

import vit
from tests.support.small import SHALLOW, sized, small_config
from vit import config, data, evaluate, use
from vit.run import loop
from vit.storage import files

_shallow = sized(SHALLOW)


@pytest.fixture(scope="module")
def digits():
    dataset = data.load(config.Data(batch_size=32))
    stack = [np.stack([r[k] for r in dataset.train[:400]]) for k in ("image", "label")]
    held_out = [np.stack([r[k] for r in dataset.evaluation]) for k in ("image", "label")]
    return *stack, tuple(held_out)


def test_records_of_arrays():
    sizes = [(3, 4), (5, 6, 1), (7, 8, 3)]
    images = [np.full(size, i, np.uint8) for i, size in enumerate(sizes)]
    records, names = use.examples(images, ["cat", "ant", "cat"])
    assert names == ("ant", "cat")
    assert [record["label"] for record in records] == [1, 0, 1]
    assert [record["image"].shape for record in records] == [(3, 4, 1), (5, 6, 1), (7, 8, 3)]
    assert use.examples(images, [7, 30, 7])[1] == ("7", "30")
    assert use.examples(images, np.array([1, "01", 2.0], object))[1] == ("1", "2")
    assert use.examples(images[:1], ["cat"], names)[0][0]["label"] == 1
    assert use.examples(images, np.array(["cät".encode(), b"ant", b"ant"], object))[1] == (
        "ant",
        "cät",
    )
    for bad, message in [
        ((images, [1, 2]), r"3 images need as many labels, got shape \(2,\)"),
        ((images, ["cat", "dog", "ant"], names), r"the labels \['dog'\] are not among"),
        ((np.zeros((2, 4, 4, 1)), [0, 1]), "array of float64: give uint8"),
        ((["a.png", "b.png"], [0, 1]), "file names, but vit.fit takes arrays"),
        ((images, ["cat", "ant", np.nan]), "the label of image 2 is nan: leave out"),
        ((images, np.array([1, np.nan, 2])), "the label of image 1 is nan: leave out"),
        ((images, ["cat", None, "ant"], names), "the label of image 1 is None: leave out"),
    ]:
        with pytest.raises(ValueError, match=message):
            use.examples(*bad)


@pytest.mark.thorough
def test_it_is_a_run_and_the_same_call_resumes(digits, tmp_path):
    images, labels, held_out = digits
    settings = small_config(num_epochs=3.2 / 12, checkpoint_every=3)
    values = {"attention.coupling": "orf", "log_every": 1}
    call = dict(config=settings, values=values, evaluation=held_out, workdir=tmp_path / "a")
    model = vit.fit(images, labels, **call)
    assert model.config.data.name == "arrays"
    assert model.config.attention.coupling == "orf"
    assert files.read_json(tmp_path / "a/task.json")["class_names"] == list("0123456789")
    again = vit.fit(images, labels, **call)
    assert again.step == model.step == 3
    expected = vit.load(tmp_path / "a").outputs(images[:5])[0]
    np.testing.assert_array_equal(model.outputs(images[:5])[0], expected)
    with pytest.raises(ValueError, match="(?s)holds another run.*training examples: 400 -> 399"):
        vit.fit(images[1:], labels[1:], **call)
    with pytest.raises(ValueError, match="(?s)holds another run.*fingerprint of the data: "):
        vit.fit(255 - images, labels, **call)
    with pytest.raises(ValueError, match="'arrays': this run was trained by vit.fit on arrays"):
        evaluate.evaluate_run(tmp_path / "a")
    other = evaluate.evaluate_on(tmp_path / "a", {"data.name": "digits"})
    wanted = [str(label) for label in held_out[1]]
    assert other["eval_examples"] == len(wanted) == 360
    assert other["eval_accuracy"] == pytest.approx(
        np.mean(np.array(model.predict(held_out[0]).labels) == wanted)
    )


def test_a_share_is_held_out_and_a_config_by_name(digits, tmp_path, monkeypatch):
    images, labels, held_out = digits
    seen = {}

    def train(config, workdir, dataset):
        seen.update(config=config, dataset=dataset)
        raise InterruptedError

    monkeypatch.setattr(loop, "train", train)
    with pytest.raises(InterruptedError):
        vit.fit(images, labels, config="digits", workdir=tmp_path)
    dataset = seen["dataset"]
    assert (len(dataset.train), len(dataset.evaluation)) == (360, 40)
    assert {record["label"] for record in dataset.evaluation} == set(range(10))
    assert seen["config"].model.variant == "XS/2"
    with pytest.raises(ValueError, match="all labels are '0': there is nothing to classify"):
        vit.fit(images, 0 * labels, workdir=tmp_path)
    for bad in (0, 1.0, 20, held_out[:1]):
        with pytest.raises(ValueError, match=r"evaluation=.*: give \(images, labels\), or a share"):
            vit.fit(images, labels, workdir=tmp_path, evaluation=bad)
    with pytest.raises(InterruptedError):
        vit.fit(images, labels, workdir=tmp_path, evaluation=list(held_out))
    assert seen["config"].data.image_size == 8
    for part, given in (("train", (images, labels)), ("evaluation", held_out)):
        records, names = use.examples(*given)
        assert names == seen["dataset"].class_names
        for a, b in zip(records, getattr(seen["dataset"], part), strict=True):
            np.testing.assert_array_equal(a["image"], b["image"])
            assert a["label"] == b["label"]
    config.validate(seen["config"])
