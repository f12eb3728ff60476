"""Output of a run: a line every so often."""

import numpy as np

from tests.small import small_config
from vit.run import loop, runs


def test_there_is_a_line_every_so_often(capsys, monkeypatch):
    now, settings = [0.0], small_config(log_every=1)
    monkeypatch.setattr(loop.time, "perf_counter", lambda: now[0])
    task = runs.subject(settings)[1]
    logs = [
        loop.Progress(settings, task, lambda _: 0.0, 44, 100, ["x"], lambda _: None, shown, 0.0)
        for shown in (True, False)  # of two processes one prints
    ]
    for step, seconds in enumerate((1, 4, 4, 4, 10), 11):
        values = {"train_loss": np.float32(2), "finite": np.array([True])}
        for log in logs:
            log.add(step, values, requested=now[0], waited=0.0)
        now[0] += seconds
        for log in logs:
            log.read()
    logs[0].line("x" * 200)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:-1]] == [
        f"step {number} of 100" for number in (11, 14, 15)
    ]
    assert lines[1].endswith("  8 images/s  0:05:44 left")
    assert lines[-1] == "x" * 200
