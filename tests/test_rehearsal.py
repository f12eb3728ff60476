"""The rehearsal of ImageNet: whole in the slow tier, of a model and pictures that are smaller."""

import json

import pytest

from experiments.training import rehearsal

SMALL = (
    "--config.model.depth=1",
    "--config.model.width=64",
    "--config.model.num_heads=2",
    "--config.model.mlp_dim=128",
    "--config.data.image_size=64",
    "--config.data.eval_resize=73",
    "--config.data.num_workers=1",
    "--config.attention.num_features=16",
)


@pytest.mark.slow
def test_an_imagenet_run_in_small(tmp_path):
    """`rehearse` looks at what came of it, and raises; the command does so for B/16's shapes."""
    rows = rehearsal.rehearse(tmp_path / "out", None, SMALL)
    assert [row["phase"] for row in rows] == [
        *("pictures", "prepare", "train, kill", "resume", "evaluate")
    ]
    assert all(float(row["seconds"]) >= 0 for row in rows)


def test_photographs_of_one_class_are_refused(tmp_path):
    for i in range(2):
        (tmp_path / f"cat_{i}.jpg").write_bytes(b"")
    with pytest.raises(ValueError, match="must hold JPEG files of two classes or more"):
        rehearsal.pictures(tmp_path / "out", tmp_path)


def write_log(folder, records):
    folder.joinpath("run").mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "run" / "metrics.jsonl").write_text(lines)


def test_what_is_not_as_it_should_be_is_named(tmp_path):
    """A good end, and then in turn what is wrong with another one."""
    (tmp_path / "data").mkdir()
    for i in range(rehearsal.FILES):
        (tmp_path / "data" / f"x-train.array_record-{i:05d}").touch()
    good = [{"step": i, "train_loss": 7.0 - i, "bad_records": 0} for i in (1, 2, 3)]
    good[-1] |= {"eval_examples": 40, "eval_bad_records": 0, "eval_loss": 6.9}
    (tmp_path / "process0.log").write_text("runs/x: at step 2 of 3\n")
    (tmp_path / "evaluate.log").write_text("step           3\neval_loss      6.91\n")
    write_log(tmp_path, good)
    assert rehearsal.check(tmp_path, good[:2]) == good[-1]
    for change, message in [
        ({"eval_examples": 48}, "all pictures are evaluated"),
        ({"eval_loss": 6.0}, "one device finds the same loss"),
        ({"eval_bad_records": 1}, "all records can be decoded"),
        ({"step": 4}, "every step is logged"),
    ]:
        write_log(tmp_path, [*good[:-1], good[-1] | change])
        with pytest.raises(RuntimeError, match=message):
            rehearsal.check(tmp_path, good[:2])
    write_log(tmp_path, good)
    with pytest.raises(RuntimeError, match="the same step has the same loss"):
        rehearsal.check(tmp_path, [good[0] | {"train_loss": 5.0}])
    (tmp_path / "process0.log").write_text("")
    with pytest.raises(RuntimeError, match="it resumed from a checkpoint"):
        rehearsal.check(tmp_path, good[:2])
