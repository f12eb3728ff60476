"""A run of the language model: its config, what no config says, and how it is found again."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.language_model import text
from experiments.language_model.model import Decoder
from experiments.language_model.task import task
from performer.choices import unknown
from performer.features import positive
from performer.refinement import LEARNED
from vit import checkpoint, files, loop, metrics
from vit import config as configs
from vit import runs as of_vit
from vit.config import Attention, Config, Data, Model, Optim, Size
from vit.data import Dataset
from vit.task import Task, random_streams

NAME, COUPLING = "text", "orf-antithetic"
NOTE = "language_model.json"
SIZE = Size(width=128, depth=4, num_heads=4, mlp_dim=512)
QUICK = Size(width=64, depth=2, num_heads=2, mlp_dim=256)
ATTENTION = ("softmax", "performer", "window", "both")


class Settings(NamedTuple):
    """What the config of a run does not say."""

    length: int = 512
    """Characters of a window of the text."""
    window: int = 0
    """Tokens of a chunk of exact attention; 0 for none."""
    first: int = 0
    """The first so many keys are exact."""
    transferred: bool = False
    """Features are those of attention transfer, without the half norm of positive ones."""


def attention(kind: str, num_features: int, window: int) -> tuple[Attention, int]:
    """Of one of `ATTENTION`: exact, features alone, exact near by alone, or both; and its window.

    Raises:
        ValueError: for another word, or a window where there must be one.
    """
    if kind not in ATTENTION:
        raise ValueError(unknown("attention", kind, ATTENTION))
    if kind in ("window", "both") and window < 1:
        raise ValueError(f"attention {kind!r} needs a window of at least 1, got {window}")
    features = {"softmax": 128, "window": 1}.get(kind, num_features)
    coupling = "orf" if kind == "window" else COUPLING  # one feature, which counts nothing
    own = Attention("softmax" if kind == "softmax" else "performer", coupling, features)
    return own, window if kind in ("window", "both") else 0


def config(
    own: Attention, dataset: Dataset, *, size: Size, optim: Optim, steps: int, **data: Any
) -> Config:
    """Of a run of so many steps; `data` are fields of that section."""
    section = Data(name=NAME, **data)
    per_epoch = max(1, len(dataset.train) // section.batch_size)
    every = max(1, steps // 10)
    return Config(
        model=Model("XS/1", *size),
        attention=own,
        data=section,
        optim=optim,
        num_epochs=steps / per_epoch,
        log_every=every,
        eval_every=5 * every,
        checkpoint_every=every,
    )


def optim(learning_rate: float, steps: int) -> Optim:
    """AdamW as language models take it."""
    return Optim(
        learning_rate=learning_rate,
        final_learning_rate=learning_rate / 10,
        warmup_steps=min(100, steps // 5),
        b2=0.99,
        weight_decay=0.1,
    )


def train(workdir: Path, config: Config, settings: Settings, dataset: Dataset) -> metrics.Record:
    """As `vit.loop.train`, with the settings noted in the folder.

    Raises:
        ValueError: as `vit.loop.train`, and for a folder with other settings.
    """
    claim(workdir, config, settings)
    return loop.train(config, workdir, dataset, of_settings(settings, dataset))


def claim(workdir: Path, config: Config, settings: Settings) -> None:
    """Notes the settings of a run in its folder; refuses one that holds another run."""
    configs.validate(config)
    of_vit.check_same(workdir, config)
    noted = files.noted(workdir / NOTE)
    if noted and Settings(**noted) != settings:
        raise ValueError(f"{workdir} holds a run with {Settings(**noted)}; take another --workdir")
    workdir.mkdir(parents=True, exist_ok=True)
    files.note(workdir / NOTE, settings._asdict())


def begin(
    workdir: Path, model: Decoder, config: Config, settings: Settings, dataset: Dataset
) -> None:
    """Makes a run that goes on from this model, unless the folder has one that has begun."""
    claim(workdir, config, settings)
    if not checkpoint.exists(workdir):
        of_vit.begin(workdir, model, config, dataset, of_settings(settings, dataset))


def init_from(
    source: Path, workdir: Path, config: Config, settings: Settings, dataset: Dataset
) -> None:
    """Makes a run that goes on from the parameters of another, whose sizes are the same.

    Raises:
        ValueError: for a source that holds no run, or one of other characters or sizes.
    """
    run, _ = restore(source)
    model = of_settings(settings, dataset).create(config, rngs=random_streams(config.seed))
    old, new = nnx.state(run.model(), nnx.Param), nnx.state(model, nnx.Param)
    same = jax.tree.map(jnp.shape, nnx.to_pure_dict(old)) == jax.tree.map(
        jnp.shape, nnx.to_pure_dict(new)
    )
    if not same or run.dataset.class_names != dataset.class_names:
        raise ValueError(f"--init_from={source} has other characters, sizes or attention")
    nnx.update(model, old)
    begin(workdir, model, config, settings, dataset)


def of_settings(settings: Settings, dataset: Dataset) -> Task:
    """The task of a run."""
    feature_map = LEARNED if settings.transferred else positive
    return task(dataset.num_classes, settings.window, settings.first, feature_map)


def restore(workdir: Path) -> tuple[of_vit.Restored, Settings]:
    """A run with its text, and its settings.

    Raises:
        ValueError: where there is none, or its text is not what it was.
    """
    noted, said = files.noted(workdir / NOTE), files.noted(workdir / "task.json")
    if not (noted and said):
        raise ValueError(
            f"{workdir} holds no language model; python -m experiments.language_model train makes"
            " one"
        )
    settings, source = Settings(**noted), configs.of_run(workdir).data.dir
    found = text.read(source)
    if list(found.characters) != said["class_names"]:
        raise ValueError(f"{source or 'the text'} has other characters than when it was learned")
    dataset = text.dataset(found, settings.length)
    return of_vit.restore(workdir, dataset, of_settings(settings, dataset)), settings
