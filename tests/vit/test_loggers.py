"""Other loggers get what the log gets, with stand-ins for their packages; a resumed run goes on."""

import sys
from unittest import mock

import pytest

from tests.support.small import small_config
from vit import config
from vit.reports import metrics
from vit.run import loggers

RECORDS = [{"step": 5, "train_loss": 0.5}, {"step": 6, "eval_loss": 0.25}]
SENT = [mock.call(record, step=record["step"]) for record in RECORDS]


def logged(workdir, *names):
    workdir.mkdir(exist_ok=True)
    with loggers.writer(names, workdir, small_config()) as write:
        for record in RECORDS:
            write(record)


@pytest.fixture
def package(monkeypatch):
    """Stands for the package of each logger; it notes the calls."""
    package = mock.MagicMock()
    for name in loggers.PACKAGES.values():
        monkeypatch.setitem(sys.modules, name, package)
    return package


def test_tensorboard(tmp_path, package):
    metrics.append(tmp_path / "metrics.jsonl", {"step": 4})
    logged(tmp_path, "tensorboard")
    package.SummaryWriter.assert_called_once_with(str(tmp_path / "tensorboard"), purge_step=5)
    board = package.SummaryWriter.return_value
    assert [call.args for call in board.__enter__().add_scalar.mock_calls] == [
        *(("step", 5, 5), ("train_loss", 0.5, 5), ("step", 6, 6), ("eval_loss", 0.25, 6))
    ]
    board.__exit__.assert_called_once()
    assert metrics.read(tmp_path / "metrics.jsonl") == [{"step": 4}, *RECORDS]


def test_wandb_goes_on_in_the_same_run(tmp_path, package):
    for name in ("run", "run", "other"):
        logged(tmp_path / name, "wandb")
    first, second, other = (call.kwargs for call in package.init.call_args_list)
    assert first == second
    assert (first["name"], first["resume"]) == ("run", "allow")
    assert first["config"]["attention.num_features"] == 8
    assert other["id"] != first["id"]
    run = package.init.return_value
    assert run.log.mock_calls == SENT * 3
    assert run.__enter__.call_count == run.__exit__.call_count == 3


def test_mlflow_goes_on_in_the_same_run(tmp_path, package):
    """And gives its parameters once: MLflow refuses another value, as an extended run has."""
    package.start_run.return_value.__enter__.return_value.info.run_id = "abc"
    for _ in range(2):
        logged(tmp_path / "run", "mlflow")
    begun = [mock.call(run_id=known, run_name="run") for known in (None, "abc")]
    assert package.start_run.call_args_list == begun
    package.log_params.assert_called_once_with(config.flatten(small_config()))
    assert package.log_metrics.mock_calls == SENT * 2


def test_one_process_of_several_writes(tmp_path):
    with loggers.writer(["wandb"], tmp_path, small_config(), lead=False) as write:
        write(RECORDS[0])
    assert list(tmp_path.iterdir()) == []
