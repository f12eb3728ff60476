"""Other loggers get what the log gets, with stand-ins for their packages; a resumed run goes on."""

import contextlib
import sys
from types import SimpleNamespace

import pytest

from tests.small import small_config
from vit import config
from vit.reports import metrics
from vit.run import loggers

RECORDS = [{"step": 5, "train_loss": 0.5}, {"step": 6, "eval_loss": 0.25}]


def logged(workdir, *names):
    workdir.mkdir(exist_ok=True)
    with loggers.writer(names, workdir, small_config()) as write:
        for record in RECORDS:
            write(record)


def test_tensorboard(tmp_path, monkeypatch):
    seen = []

    class Board:
        def __init__(self, folder, purge_step):
            seen.append((folder, purge_step))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            seen.append("closed")

        def add_scalar(self, *scalar):
            seen.append(scalar)

    monkeypatch.setitem(sys.modules, "tensorboardX", SimpleNamespace(SummaryWriter=Board))
    metrics.append(tmp_path / "metrics.jsonl", {"step": 4})
    logged(tmp_path, "tensorboard")
    assert seen == [
        (str(tmp_path / "tensorboard"), 5),
        ("step", 5, 5),
        ("train_loss", 0.5, 5),
        ("step", 6, 6),
        ("eval_loss", 0.25, 6),
        "closed",
    ]
    assert metrics.read(tmp_path / "metrics.jsonl") == [{"step": 4}, *RECORDS]


def test_wandb_goes_on_in_the_same_run(tmp_path, monkeypatch):
    runs, ended = [], []

    class Run:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            ended.append(self)

        def log(self, record, step):
            runs[-1][1].append((record, step))

    def init(**options):
        runs.append((options, []))
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    for _ in range(2):
        logged(tmp_path / "run", "wandb")
    (first, records), (second, _) = runs
    assert first == second
    assert (first["name"], first["resume"]) == ("run", "allow")
    assert first["config"]["attention.num_features"] == 8
    assert records == [(record, record["step"]) for record in RECORDS]
    assert len(ended) == 2
    logged(tmp_path / "other", "wandb")
    assert runs[2][0]["id"] != first["id"]


def test_mlflow_goes_on_in_the_same_run(tmp_path, monkeypatch):
    """And gives its parameters once: MLflow refuses another value, as an extended run has."""
    calls = []

    @contextlib.contextmanager
    def start_run(run_id, run_name):
        calls.append((run_id, run_name))
        yield SimpleNamespace(info=SimpleNamespace(run_id="abc"))

    package = SimpleNamespace(
        start_run=start_run,
        log_params=lambda params: calls.append(len(params)),
        log_metrics=lambda record, step: calls.append((record, step)),
    )
    monkeypatch.setitem(sys.modules, "mlflow", package)
    for _ in range(2):
        logged(tmp_path / "run", "mlflow")
    sent = [(record, record["step"]) for record in RECORDS]
    fields = len(config.flatten(small_config()))
    assert calls == [(None, "run"), fields, *sent, ("abc", "run"), *sent]


def test_a_logger_that_is_not_installed_is_told_before_anything_starts(monkeypatch):
    for name, package in loggers.PACKAGES.items():
        monkeypatch.setitem(sys.modules, package, None)
        message = f"--log={name} needs {package}: pip install 'performer-jax\\[{name}\\]'"
        with pytest.raises(ValueError, match=message):
            loggers.check([name])
    with pytest.raises(ValueError, match="unknown --log 'tensorbord'; did you mean 'tensorboard'"):
        loggers.check(["tensorbord"])


def test_one_process_of_several_writes(tmp_path):
    with loggers.writer(["wandb"], tmp_path, small_config(), lead=False) as write:
        write(RECORDS[0])
    assert list(tmp_path.iterdir()) == []
