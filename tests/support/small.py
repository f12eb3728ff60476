"""A run that takes seconds: a tiny ViT on a few digits."""

import csv
import dataclasses
import os
import signal
from functools import cache

import jax
import numpy as np
import pytest
from flax import nnx

from vit import config, data
from vit.model import ViT, classification, random_streams
from vit.reports import metrics
from vit.run import checkpoint, devices, runs

PATIENCE = 600
"""Seconds after which something is taken to hang: nine other processes may want the same core."""


def small_config(**sections):
    """Three steps of 32 digits each, unless the sections say otherwise."""
    defaults = dict(
        model=config.Model(variant="XS/4", pooling="mean", dropout=0.1),
        attention=config.Attention(num_features=8),
        data=config.Data(batch_size=32, max_shift=1, flip=True),
        optim=config.Optim(learning_rate=1e-2, warmup_steps=1),
        num_epochs=3.2 / 44,
        log_every=1,
        eval_every=3,
        checkpoint_every=1,
    )
    return config.Config(**(defaults | sections))


TRAINED = small_config(
    model=config.Model(variant="XS/4", pooling="token", dropout=0.1),
    optim=config.Optim(learning_rate=1e-2, warmup_steps=1, ema=0.5),
    data=config.Data(batch_size=32, max_shift=1, flip=True, eval_resize=10),
)
"""Config of the run that tests share."""


def new_vit(settings, seed=0, num_classes=5):
    """By one program for each config: the many small ones of `ViT(...)` take longer to compile."""
    fields = tuple(config.flatten(settings).items())
    return nnx.clone(_made(fields, settings.model.size, seed, num_classes))


@cache
def _made(fields, _, seed, num_classes):
    def new():
        settings = config.with_values(config.Config(), dict(fields))
        return ViT(settings, num_classes=num_classes, channels=1, rngs=random_streams(seed))

    return nnx.merge(nnx.graphdef(nnx.eval_shape(new)), jax.jit(lambda: nnx.state(new()))())


def shapes(settings, num_classes, channels):
    """A ViT of shapes alone: nothing is drawn or compiled."""
    return nnx.eval_shape(
        lambda: ViT(settings, num_classes=num_classes, channels=channels, rngs=random_streams(0))
    )


def run_of(settings, dataset, mesh=None):
    """A run of image classification on a data set that is not opened."""
    return runs.Run(settings, dataset, classification.task(10, 1), mesh)


def train_batches(dataset, settings, mesh):
    """The training batches of a run, on the devices."""
    stream = data.train_batches(dataset, settings.data, settings.seed)
    return (devices.put(mesh, batch) for batch in stream)


def final_state(run, workdir):
    """The arrays of the last checkpoint of a program, keys of random streams as numbers."""

    def number(x):
        is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    return jax.tree.map(number, checkpoint.restore(workdir, run.abstract)[1])


def bits(state):
    """The bits of every array, keys of random streams too."""

    def as_bytes(x):
        is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x).tobytes()

    return {jax.tree_util.keystr(path): as_bytes(x) for path, x in jax.tree.leaves_with_path(state)}


def losses(workdir):
    """Steps and values of the log, without times."""
    names = ("step", "train_loss", "gradient_norm", "eval_loss", "eval_accuracy")
    return [[r.get(name) for name in names] for r in metrics.read(workdir / "metrics.jsonl")]


def assert_same_losses(log, other):
    """Steps, losses and accuracies of two logs; some records have those of an evaluation."""
    names = ("step", "train_loss", "eval_loss", "eval_accuracy")
    for one, two in zip(log, other, strict=True):
        assert one.keys() == two.keys()
        a, b = ([record[name] for name in names if name in record] for record in (one, two))
        np.testing.assert_allclose(a, b, rtol=1e-5)


def stop_at(monkeypatch, step, end=SystemExit):
    """A run that has written the record of that step gets SIGTERM; or ends on the spot."""

    def append_and_stop(log, record, append=metrics.append):
        append(log, record)
        if record["step"] == step and end is SystemExit:
            os.kill(os.getpid(), signal.SIGTERM)
        elif record["step"] == step:
            raise end

    monkeypatch.setattr(metrics, "append", append_and_stop)


CALIBRATED = config.Attention(num_features=8, calibration="full")
"""With running statistics: compiling takes three times as long."""

TINY = config.Size(width=16, depth=2, num_heads=2, mlp_dim=32)

SHALLOW = TINY._replace(depth=1)
"""Half the compilation, where one layer shows what two would."""


def sized(size):
    """Return a fixture: in all tests of its module the variant XS has this size."""

    @pytest.fixture(scope="module", autouse=True)
    def fixture():
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(config.SIZES, "XS", size)
            yield

    return fixture


def read_csv(path):
    """The rows of a table, each a dictionary of texts."""
    with path.open() as file:
        return list(csv.DictReader(file))


STEADY = config.Optim(learning_rate=1e-2, final_learning_rate=1e-2, warmup_steps=1)
"""The same steps however long the run."""


def get_config():
    """For the command line: the model has the size `SHALLOW` whatever XS is there."""
    small = small_config()
    small.model = dataclasses.replace(small.model, **SHALLOW._asdict())
    return small
