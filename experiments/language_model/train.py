"""Trains a language model of characters; the same command resumes a stopped run.

    python -m experiments.language_model train --workdir=runs/lm

Four blocks of width 128 with four heads of 32, on windows of 512 characters of --text, or of the
help topics that come with Python. The folder is that of a run of `vit.train`.
Most is learned from short windows, and sooner; a run of long ones then begins with what they gave:

    python -m experiments.language_model train --workdir=runs/short --length=128 --batch_size=24
    python -m experiments.language_model train --workdir=runs/lm --init_from=runs/short \\
        --steps=200 --batch_size=8 --learning_rate=1e-3

`convert --workdir=runs/lm --out=runs/converted` is `vit.convert`, `evaluate` is `vit.evaluate`, and
`resume --workdir=runs/converted` is `vit.train`: it trains a run on by its own config.

--quick is a smaller model, in half a minute.
"""

from pathlib import Path
from typing import Any, Literal

from experiments.language_model import text as texts
from experiments.language_model.task import NAME, Settings, task
from vit.config import Attention, Config, Data, Model, Optim, Size, of_run
from vit.data import Dataset
from vit.reports import metrics
from vit.run import loop
from vit.study import launch
from vit.task import of_folder
from vit.weights import transfer

SIZE = Size(width=128, depth=4, num_heads=4, mlp_dim=512)
QUICK = Size(width=64, depth=2, num_heads=2, mlp_dim=256)


def attention_of(kind: str, num_features: int, window: int) -> Attention:
    """Return softmax attention, or features alone, a window alone, or both."""
    if kind == "softmax":
        return Attention(kind)
    m, near = num_features * (kind != "window"), window * (kind != "performer")
    return Attention(num_features=m, exact_window=near)


def config_of(
    attention: Attention, dataset: Dataset, *, size: Size, rate: float, steps: int, **data: Any
) -> Config:
    """Return the config of a run of AdamW, as language models are trained.

    Args:
        own: attention of all layers.
        dataset: windows of the text.
        size: size of the model.
        rate: peak learning rate.
        steps: steps of the optimiser.
        data: fields of that section.
    """
    section = Data(name="text", **data)
    every = max(1, steps // 10)
    return Config(
        model=Model("XS/1", *size),
        attention=attention,
        data=section,
        optim=Optim(
            learning_rate=rate,
            final_learning_rate=rate / 10,
            warmup_steps=min(100 / steps, 0.2),
            b2=0.99,
            weight_decay=0.1,
        ),
        num_epochs=steps / max(1, len(dataset.train) // section.batch_size),
        log_every=every,
        eval_every=5 * every,
        checkpoint_every=every,
    )


def main(
    workdir: Path,
    text: Path | None = None,
    init_from: Path | None = None,
    attention: Literal["softmax", "performer", "window", "both"] = "softmax",
    num_features: int = 64,
    window: int = 16,
    length: int = 512,
    steps: int = 1500,
    batch_size: int = 16,
    learning_rate: float = 3e-3,
    seed: int = 0,
    quick: bool = False,
) -> None:
    """Train, or resume.

    Args:
        text: a file in UTF-8; Python's help topics if none.
        init_from: run whose parameters a new run begins with.
        attention: attention of all layers.
        num_features: m of performer and both.
        window: tokens of a chunk of window and both.
        length: characters of a window of the text.
        steps: steps of the optimiser.
        batch_size: windows of a step.
        learning_rate: peak learning rate.
        seed: seed of parameters, data and draws.
        quick: a smaller model, 150 steps of 128 characters.
    """
    numbers = dict(steps=steps, length=length, batch_size=batch_size, window=window)
    if small := [f"--{name}={x}" for name, x in numbers.items() if x < 1]:
        raise ValueError(f"{', '.join(small)} must be at least 1")
    if quick:
        length, steps = min(128, length), min(150, steps)
    source = str(text or "")
    dataset = texts.dataset(texts.read(source), length)
    config = config_of(
        attention_of(attention, num_features, window),
        dataset,
        size=QUICK if quick else SIZE,
        rate=learning_rate,
        steps=steps,
        dir=source,
        batch_size=batch_size,
    )
    config.seed = seed
    learned = task(dataset.num_classes, Settings(length))
    if init_from:
        source_attention = of_run(init_from).attention
        if of_folder(init_from, NAME).get("class_names") != list(dataset.class_names):
            raise ValueError(f"--init_from={init_from} has other characters than the text")
        if source_attention.blocks or source_attention.calibration != "none":
            raise ValueError(
                f"--init_from={init_from} is a converted run, whose features are fitted to its"
                " layers: train it on in its own folder, or take its softmax run"
            )
        print(*transfer.init_from(init_from, config, workdir, dataset, learned), sep="\n")
    record = loop.train(config, workdir, dataset, learned)
    print(f"held out: {metrics.results(record)}, {record['seconds']:.0f} s; in {workdir}")


if __name__ == "__main__":
    launch.run(main)
