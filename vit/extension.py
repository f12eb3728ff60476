"""A finished run is trained longer, in its own folder.

    python -m vit.train --workdir=runs/pm --extend=20

The rate rises again by a warm-up of its own, stays, and falls to the new end (`optim.schedule`).
Steps, the order of the data and the log go on; the extended run has the parameters, bit for bit on
a CPU, of one that was planned so from the start (`config.restarts`).
"""

from pathlib import Path

from vit import checkpoint, files, metrics, runs, safety
from vit import config as configs


def extend(workdir: Path, epochs: float, config: configs.Config | None = None) -> configs.Config:
    """Writes into the folder of a finished run that it has so many epochs more; trains nothing.

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
    with safety.exclusive(workdir):
        files.check(workdir / "config.json")
        run = configs.of_run(workdir)
        configs.validate(run)
        if config is not None:
            runs.check_same(workdir, as_extended(config, workdir))
        dataset, _ = runs.subject(run, workdir=workdir)
        _, num_steps = runs.length(run, dataset)
        step = max((each.step for each in checkpoint.found(workdir)), default=0)
        if step < num_steps:
            raise ValueError(
                f"{workdir} is at step {step} of {num_steps}: the same command without --extend"
                " trains it to its end; only a run that has ended is extended"
            )
        longer = configs.with_values(
            run,
            {
                "num_epochs": run.num_epochs + epochs,
                "restarts": ",".join(map(_number, configs.cycles(run))),
            },
        )
        configs.validate(longer)
        runs.rate(longer, dataset)
        configs.save(longer, workdir / "config.json")
        metrics.append(
            workdir / "metrics.jsonl", {"step": num_steps, "num_epochs": longer.num_epochs}
        )
    return longer


def as_extended(config: configs.Config, workdir: Path) -> configs.Config:
    """The config with the length that the run in the folder has, if it was extended from this one.

    Raises:
        ValueError: when the folder's config cannot be read.
    """
    path = workdir / "config.json"
    if not path.exists():
        return config
    run = configs.load(path)
    before, now = configs.cycles(config), configs.cycles(run)
    if now[: len(before)] != before:
        return config
    return configs.with_values(config, {"num_epochs": run.num_epochs, "restarts": run.restarts})


def _number(epochs: float) -> str:
    """10.0 -> "10"; as many digits as it takes."""
    short = f"{epochs:g}"
    return short if float(short) == epochs else repr(epochs)
