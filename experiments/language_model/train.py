"""Trains a language model of characters; the same command resumes a stopped run.

    python -m experiments.language_model train --workdir=runs/lm

Four blocks of width 128 with four heads of 32, on windows of 512 characters of --text, or of the
help topics that come with Python. The folder is that of a run of `vit.train`. Most is learned from
short windows, and sooner; a run of long ones then begins with what they gave:

    python -m experiments.language_model train --workdir=runs/short --length=128 --batch_size=24
    python -m experiments.language_model train --workdir=runs/lm --init_from=runs/short \\
        --steps=200 --batch_size=8 --learning_rate=1e-3

--quick is a smaller model, in half a minute.
"""

from pathlib import Path

from absl import flags

from experiments import launch
from experiments.language_model import runs, text
from vit import metrics


def main() -> None:
    """The command line."""
    workdir, steps, quick = Path(str(_WORKDIR.value)), int(_STEPS.value), bool(_QUICK.value)
    length = min(128, int(_LENGTH.value)) if quick else int(_LENGTH.value)
    steps = min(150, steps) if quick else steps
    own, window = runs.attention(_ATTENTION.value, int(_NUM_FEATURES.value), int(_WINDOW.value))
    dataset = text.dataset(text.read(_TEXT.value), length)
    config = runs.config(
        own,
        dataset,
        size=runs.QUICK if quick else runs.SIZE,
        optim=runs.optim(float(_LEARNING_RATE.value), steps),
        steps=steps,
        dir=_TEXT.value,
        batch_size=int(_BATCH_SIZE.value),
    )
    config.seed = int(_SEED.value)
    settings = runs.Settings(length, window, int(window > 0))
    if _INIT_FROM.value:
        runs.init_from(Path(_INIT_FROM.value), workdir, config, settings, dataset)
    record = runs.train(workdir, config, settings, dataset)
    print(f"held out: {metrics.results(record)}, {record['seconds']:.0f} s; in {workdir}")


if __name__ == "__main__":
    _WORKDIR = flags.DEFINE_string("workdir", None, "folder of the run", required=True)
    _TEXT = flags.DEFINE_string("text", "", "a file in UTF-8; Python's help topics if none")
    _INIT_FROM = flags.DEFINE_string("init_from", "", "run whose parameters a new run begins with")
    _ATTENTION = flags.DEFINE_enum("attention", "softmax", runs.ATTENTION, "of all layers")
    _NUM_FEATURES = flags.DEFINE_integer("num_features", 64, "of performer, both", lower_bound=2)
    _WINDOW = flags.DEFINE_integer("window", 16, "of window, both", lower_bound=1)
    _LENGTH = flags.DEFINE_integer("length", 512, "characters of a window", lower_bound=2)
    _STEPS = flags.DEFINE_integer("steps", 1500, "of the optimiser", lower_bound=1)
    _BATCH_SIZE = flags.DEFINE_integer("batch_size", 16, "windows of a step", lower_bound=1)
    _LEARNING_RATE = flags.DEFINE_float("learning_rate", 3e-3, "the highest one", lower_bound=0)
    _SEED = flags.DEFINE_integer("seed", 0, "of all that is random", lower_bound=0)
    _QUICK = flags.DEFINE_bool("quick", False, "smaller")
    launch.run(main)
