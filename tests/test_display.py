"""What a run shows: lines off a terminal, seldom; a bar on one, and no lines of progress."""

import io

import pytest
from rich.console import Console
from rich.progress import Progress

from vit.reports import metrics
from vit.run import progress


@pytest.fixture
def clock(monkeypatch):
    """Seconds that a test moves on."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_off_a_terminal_there_is_a_line_every_so_often(capsys, clock):
    with progress.display(True, 10, 100) as shown:
        shown.status("compiling train_step")
        for seconds in (0, 4, 4, 4, 10, 1):
            clock[0] += seconds
            shown.advance()
            shown.progress("loss 2.0", 0.5)
        shown.line("x" * 200)
    with progress.display(False, 0, 10) as shown:  # another process of several
        for show in (shown.status, shown.line, lambda text: shown.progress(text, 1.0)):
            show("loss 2.0")
    assert capsys.readouterr().out.splitlines() == [
        "compiling train_step",
        "step 11 of 100: loss 2.0  0:00:44 left",
        "step 14 of 100: loss 2.0  0:00:43 left",
        "step 15 of 100: loss 2.0  0:00:42 left",
        "x" * 200,
    ]


def test_on_a_terminal_there_is_the_bar(monkeypatch):
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    bar = metrics.progress_bar

    def on_terminal(shown=True):
        return Progress(*bar().columns, console=console, disable=not shown)

    monkeypatch.setattr(metrics, "progress_bar", on_terminal)
    with progress.display(True, 0, 10) as shown:
        shown.status("compiling train_step")
        shown.advance()
        shown.progress("loss 2.0", 1.0)
        shown.line("test accuracy 0.5")
    text = console.file.getvalue()
    assert "test accuracy" in text
    assert "loss 2.0" in text
    assert "step 1 of 10" not in text
