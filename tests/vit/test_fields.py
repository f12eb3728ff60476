"""Every value of every field trains, and changes the programs of a run or its data."""

import jax
import numpy as np
import pytest

from tests.support.small import small_config
from vit import config, task, train
from vit.run import devices, optim, runs

LEVELS = {
    "model.variant": ["XS/2", "XS/4"],
    "model.width": [24],
    "model.depth": [3],
    "model.num_heads": [1],
    "model.mlp_dim": [20],
    "model.registers": [0],
    "model.dropout": [0.1],
    "model.drop_path": [0.5],
    "model.layer_scale": [0.1],
    "model.epsilon": [1e-5],
    "model.head_bias": [-2.0],
    "attention.coupling": ["orf", "simrf+"],
    "attention.num_features": [8],
    "attention.calibration": ["shift", "full"],
    "attention.redraw_every": [1],
    "attention.exact_window": [2],
    "attention.exact_keys": [1],
    "attention.exact_rows": [1],
    "attention.blocks": [
        (config.Block("softmax"), config.Block(num_features=4, exact_keys=1, calibration="full")),
        (config.Block(num_features=0, exact_window=2), config.Block(num_features=8)),
    ],
    "data.image_size": [16],
    "data.eval_resize": [20],
    "data.max_shift": [1],
    "data.randaugment_layers": [2],
    "data.randaugment_magnitude": [5.0],
    "data.mixup": [0.2],
    "data.cutmix": [1.0],
    "data.erase": [0.5],
    "data.batch_size": [16],
    "optim.learning_rate": [1e-2],
    "optim.final_learning_rate": [1e-3],
    "optim.warmup_steps": [1],
    "optim.constant_steps": [1],
    "optim.weight_decay": [0.1],
    "optim.b2": [0.95],
    "optim.clip_norm": [0.0, 0.1],
    "optim.label_smoothing": [0.1],
    "optim.accumulate": [2],
    "optim.ema": [0.5],
    "optim.layer_decay": [0.75],
    "seed": [7],
    "log_every": [2],
    "eval_every": [1],
    "checkpoint_every": [1],
    "keep_every": [2],
}
"""Values other than those of `BASE`; words of a choice and both values of a switch are added."""

ELSEWHERE = {
    "data.name": "test_data.py",
    "data.dir": "test_data.py",
    "data.train_split": "test_data.py",
    "data.eval_split": "test_data.py",
    "data.num_workers": "test_data.py",
    "fsdp": "test_devices.py",
    "seq": "test_devices.py",
    "num_epochs": "set by this test",
}
"""File that tests the field."""

BASE = small_config(
    model=config.Model("XS/4", registers=1),
    data=config.Data(batch_size=8),
    optim=config.Optim(warmup_steps=0),
    eval_every=2,
    checkpoint_every=2,
)


def levels():
    """Each field with one of its values; the first fields are those that others depend on."""
    for name, field in config.fields(config.Config).items():
        values = field.metadata.get("choices", LEVELS.get(name, []))
        values = [True, False] if field.type is bool else values
        assert values or name in ELSEWHERE, f"add values of the new field {name}"
        yield from ((name, x) for x in values if x != "pallas")  # that needs a GPU


IN_THE_LOOP = ("seed", "log_every", "eval_every", "checkpoint_every", "keep_every")
"""Fields that neither programs nor data read: tested by `test_train.py`."""
WITH = {"data.randaugment_magnitude": {"data.randaugment_layers": 2}}
"""Values without which the values of a field have no effect."""
SAME = {
    ("attention.implementation", "blocked"): "`auto` on a CPU",
    ("data.eval_crop", "squash"): "digits are squares",
}
"""Values that have no effect here."""
STEPS = 2


def is_valid(values):
    """Exact attention ignores the other fields of attention: those are not shown by such a run."""
    settings = config.with_values(BASE, values)
    others = sum(name.startswith("attention.") for name in values) - 1
    if settings.attention.kind == "softmax" and others:
        return False
    try:
        config.validate(settings)
        optim.schedule(settings.optim, STEPS)
    except ValueError:
        return False
    return True


def array():
    """Few dictionaries of values, each valid, in which every value of every field occurs."""
    rows = []
    for name, value in levels():
        tried = (row for row in [*rows, {}] if name not in row)
        row = next(row for row in tried if is_valid(row | {name: value}))
        if not row:
            rows.append(row)
        row[name] = value
    return rows


@pytest.mark.thorough
def test_every_value_of_every_field_trains(tmp_path, tiny):
    rows = array()
    assert len(rows) <= 10
    for number, row in enumerate(rows):
        settings = config.with_values(BASE, row)
        settings.num_epochs = STEPS / (1437 // settings.data.batch_size)
        assert train.train(settings, tmp_path / str(number))["step"] == STEPS, row


def test_every_field_has_values():
    assert len(list(levels())) > len(config.fields(config.Config)) - len(ELSEWHERE)


def effect(settings):
    """The programs of a run as text, and examples of training and evaluation."""
    dataset, learned = task.opened(settings)
    run = runs.Run(settings, dataset, learned, devices.mesh(settings, jax.devices()[:1]))
    program, rng = run.program, np.random.default_rng(0)
    train_step = program.train.lower(program.abstract, run.abstract_batch())
    eval_step = program.evaluate.lower(program.abstract, run.abstract_batch(mask=True))
    lowered = (train_step, eval_step, program.initial.lower())
    records = [(x, rng) for x in dataset.train[:8]] + [(x, None) for x in dataset.evaluation[:1]]
    examples = [dataset.decode(x, each, settings.data, dataset) for x, each in records]
    arrays = [np.asarray(x).tolist() for example in examples for x in example.values()]
    return [x.as_text() for x in lowered], arrays


@pytest.mark.thorough
def test_every_value_changes_the_programs_or_the_data(tiny):
    """A field that is declared and read nowhere fails."""
    without = []
    for name, value in levels():
        if name in IN_THE_LOOP or (name, value) in SAME:
            continue
        base = config.with_values(BASE, WITH.get(name, {}))
        changed = config.with_values(base, {name: value})
        config.validate(changed)
        if config.flatten(changed) != config.flatten(base) and effect(changed) == effect(base):
            without.append((name, value))
    assert not without
