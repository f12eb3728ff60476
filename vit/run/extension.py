"""Training a finished run longer, in its own folder.

    python -m vit.train --workdir=runs/pm --extend=20

The rate rises again by a warm-up of its own, stays, and falls to the new end (`optim.schedule`).
Steps, the order of the data and the log go on; the extended run has the parameters, bit for bit on
a CPU, of one that was planned so from the start (`config.restarts`).
"""

from pathlib import Path

from vit import config as configs
from vit.reports import metrics
from vit.run import checkpoint, files, runs


def extend(workdir: Path, epochs: float, config: configs.Config | None = None) -> configs.Config:
    """Write into the folder of a finished run that it has so many epochs more; train nothing.

    Args:
        workdir: of the run.
        epochs: more than 0.
        config: must be that of the run, before an earlier extension or after it; None: not checked.

    Returns:
        The config of the extended run, with `num_epochs` and `restarts` changed.

    Raises:
        ValueError: when the folder holds no run, another one or one that has not ended; or when the
            extension is no longer than warm-up and constant rate. Nothing has changed then.
    """
    if not epochs > 0:
        raise ValueError(f"--extend={epochs:g}: must be a number of epochs above 0")
    configs.of_run(workdir)
    with files.alone(workdir / "lock"):
        run = configs.of_run(workdir)
        configs.validate(run)
        if config is not None:
            runs.check_same(workdir, as_extended(config, workdir))
        dataset, _ = runs.subject(run, workdir=workdir)
        _, num_steps = runs.length(run, dataset)
        step = max(checkpoint.found(workdir), default=0)
        if step < num_steps:
            raise ValueError(
                f"{workdir} is at step {step} of {num_steps}: the same command without --extend"
                " trains it to its end; only a run that has ended is extended"
            )
        fields = {
            "num_epochs": run.num_epochs + epochs,
            "restarts": ",".join(
                f"{x:g}" if float(f"{x:g}") == x else repr(x) for x in cycles(run)
            ),
        }
        longer = configs.with_values(run, fields)
        configs.validate(longer)
        runs.rate(longer, dataset)
        configs.save(longer, workdir / "config.json")
        noted = {"step": num_steps, "num_epochs": longer.num_epochs}
        metrics.append(workdir / "metrics.jsonl", noted)
    return longer


def cycles(config: configs.Config) -> tuple[float, ...]:
    """Return the epochs at which the rate has fallen: those of `restarts`, and the end."""
    return (*configs.restarts(config.restarts), config.num_epochs)


def as_extended(config: configs.Config, workdir: Path) -> configs.Config:
    """Return the config with the length of the run in the folder, if that extends this one.

    Raises:
        ValueError: when the folder's config cannot be read.
    """
    path = workdir / "config.json"
    if not path.exists():
        return config
    run = configs.load(path)
    before, now = cycles(config), cycles(run)
    if now[: len(before)] != before:
        return config
    return configs.with_values(config, {"num_epochs": run.num_epochs, "restarts": run.restarts})
