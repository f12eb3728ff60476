"""Kills a run, damages its files and changes its config, and looks what comes of it.

    python -m experiments.training.fault_injection --parts=kills,damages,configs --kills=20

Kills: two runs of the same config (scikit-learn's digits): one is left alone; the other is killed
(SIGKILL) in turn in a step, while it writes a checkpoint and while it evaluates, and started again
by the same command. In the end every array of the two last checkpoints must have the same bits, and
every loss in the logs must be the same number. `--out` receives the table, and both runs.

Damages: every file and folder of a small finished run is in turn changed, cut, emptied, removed,
replaced by a folder, a link or a pipe, or made unreadable, and the same call of `vit.train` goes on
with it. It may say what is wrong in one line that names the place ("told clearly"), or end with the
same bits and losses ("harmless"); another exception, or no end ("traceback"), and another result
without a word, or a change of the file that a link leads to ("silent"), must not be.

Configs: every field is given values that cannot be meant, by the command line; see
`experiments.training.config_mutations`, whose table has the same columns.
"""

import contextlib
import io
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import numpy as np
from absl import logging

from experiments.common import launch
from experiments.training import config_mutations
from vit import checkpoint, config, devices, loop, metrics, report, runs

FLAGS = [
    "--config=digits",
    "--config.num_epochs=40",
    "--config.model.dropout=0.1",
    "--config.data.max_shift=1",
    "--config.attention.calibration=full",
    "--config.attention.redraw_every=100",
    "--config.optim.ema=0.99",
    "--config.log_every=5",
    "--config.eval_every=20",
    "--config.checkpoint_every=10",
]
SMALL = config.Config(
    model=config.Model(variant="XS/8", pooling="mean"),
    attention=config.Attention(kind="softmax"),
    data=config.Data(batch_size=32),
    optim=config.Optim(learning_rate=1e-2, warmup_steps=1),
    num_epochs=3 / 44,
    log_every=1,
    eval_every=3,
    checkpoint_every=1,
)
"""Of the run whose files are damaged: three steps."""
OUTCOMES = ("told clearly", "harmless", "traceback", "silent")
SECONDS = 300
"""After which a call counts as one that never ends."""
MOMENTS = ("in a step", "while saving", "while evaluating")


def start(workdir: Path) -> subprocess.Popen[str]:
    """The training command, as a user gives it; compiled programs are kept for the next start."""
    cache = {"JAX_COMPILATION_CACHE_DIR": str(workdir.parent / "programs")}
    return subprocess.Popen(
        [sys.executable, "-m", "vit.train", *FLAGS, f"--workdir={workdir}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | cache | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"},
    )


def half_written(workdir: Path) -> bool:
    """Whether there is a checkpoint that does not have its final name yet."""
    return any(not p.name.isdecimal() for p in (workdir / "checkpoints").glob("*"))


def unevaluated(workdir: Path) -> bool:
    """Whether the log ends with a step after which an evaluation is due."""
    last = metrics.read(workdir / "metrics.jsonl")[-1:]
    return bool(last) and last[0]["step"] % 20 == 0 and "eval_accuracy" not in last[0]


def wait(process: subprocess.Popen[str], condition: Callable[[], bool], seconds: float) -> bool:
    """Until the condition holds; False when the process has ended or the time is over."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        if condition():
            return True
        time.sleep(0.0005)
    return False


def kill_once(workdir: Path, moment: str, chance: random.Random) -> dict[str, Any]:
    """One life of the process: a few records of the log, then SIGKILL at that moment."""
    log = workdir / "metrics.jsonl"
    process = start(workdir)
    known = len(metrics.read(log))
    records = chance.randint(1, 8)
    alive = wait(process, lambda: len(metrics.read(log)) >= known + records, 300)
    if moment == "while saving":
        alive = alive and wait(process, lambda: half_written(workdir), 60)
    if moment == "while evaluating":
        alive = alive and wait(process, lambda: unevaluated(workdir), 60)
    time.sleep(chance.uniform(0, 0.2 if moment == "in a step" else 0.03))
    process.send_signal(signal.SIGKILL)
    output, _ = process.communicate()
    if not alive:
        raise RuntimeError(f"the run ended before it could be killed {moment}:\n{output}")
    started = [line.split()[-3] for line in output.splitlines() if ": at step" in line]
    return {
        "started at step": int(started[0]) if started else 0,
        "killed": moment,
        "last step in the log": metrics.read(log)[-1]["step"],
        "checkpoint left half-written": "yes" if half_written(workdir) else "no",
        "evaluation cut off": "yes" if unevaluated(workdir) else "no",
    }


def finish(workdir: Path) -> None:
    """Lets the run go on to its end."""
    process = start(workdir)
    output, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(output)


def differences(one: Path, other: Path) -> list[str]:
    """Names of arrays of the last checkpoints that differ in any bit, and steps whose losses do."""

    def arrays(workdir: Path) -> dict[str, np.ndarray]:
        leaves = jax.tree.leaves_with_path(runs.restore(workdir).state)
        return {jax.tree_util.keystr(path): _bits(x) for path, x in leaves}

    a, b = arrays(one), arrays(other)
    different = [name for name in a if not np.array_equal(a[name], b[name])]
    pairs = zip(_losses(one), _losses(other), strict=True)
    return different + [f"step {x[0]}: {x[1:]} {y[1:]}" for x, y in pairs if x != y]


def _losses(workdir: Path) -> list[tuple[Any, ...]]:
    names = ("step", "train_loss", "gradient_norm", "eval_loss", "eval_accuracy")
    records = metrics.read(workdir / "metrics.jsonl")
    return [tuple(record.get(name) for name in names) for record in records]


def _bits(x: Any) -> np.ndarray:
    if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x).reshape(-1).view(np.uint8)


def damages(canary: Path, chance: random.Random) -> dict[str, Callable[[Path], object]]:
    """What can be done to a file; what is there instead of it leads to `canary` if it is a link."""

    def flipped(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(content)

    def remove(path: Path) -> None:
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    def instead(make: Callable[[Path], object]) -> Callable[[Path], object]:
        return lambda path: (remove(path), make(path))

    return {
        "one bit flipped": flipped,
        "cut": lambda p: p.write_bytes(p.read_bytes()[: chance.randrange(p.stat().st_size)]),
        "emptied": lambda p: p.write_bytes(b""),
        "bytes added": lambda p: p.write_bytes(p.read_bytes() + chance.randbytes(16)),
        "removed": remove,
        "a folder instead": instead(Path.mkdir),
        "a file instead": instead(lambda p: p.write_bytes(b"0")),
        "a link instead": instead(lambda p: p.symlink_to(canary)),
        "a dangling link instead": instead(lambda p: p.symlink_to(canary.with_name("nowhere"))),
        "a pipe instead": instead(os.mkfifo),
        "not readable": lambda p: p.chmod(0),
    }


def damage_files(
    settings: config.Config, seed: int, *, chosen: Callable[[str, str], bool] = lambda *_: True
) -> Iterator[tuple[str, str]]:
    """Kinds ("metrics.jsonl: emptied") and outcomes, one for each damage that was done.

    Args:
        settings: of a run of a few steps, with a checkpoint at each.
        seed: of the places in the files.
        chosen: whether this damage is done to the file of this name, as in "checkpoints/3/...".
    """
    dataset, task = runs.subject(settings)
    abstract = runs.program(settings, dataset, task, devices.mesh(settings)).abstract
    with tempfile.TemporaryDirectory() as folder:
        whole, workdir, canary = (Path(folder) / name for name in ("whole", "run", "canary"))
        with contextlib.redirect_stdout(io.StringIO()):
            loop.train(settings, whole)
        newest, state = checkpoint.restore(whole, abstract)
        want = jax.tree.map(_bits, jax.tree.leaves(state)), _losses(whole)
        names = sorted(str(path.relative_to(whole)) for path in whole.rglob("*"))
        for name, (damage, change) in itertools.product(
            names, damages(canary, random.Random(seed)).items()
        ):
            path = workdir / name
            if not chosen(name, damage):
                continue
            shutil.copytree(whole, workdir)
            canary.write_text("years of work")
            try:
                change(path)
            except OSError:  # a folder has no bytes
                shutil.rmtree(workdir)
                continue
            outcome = _outcome(settings, workdir, abstract, want)
            if canary.read_text() != "years of work" or canary.with_name("nowhere").exists():
                outcome = "silent"
            yield f"{_place(name, newest)}: {damage}", outcome
            with contextlib.suppress(FileNotFoundError):
                path.chmod(0o700)
            shutil.rmtree(workdir)


def _outcome(settings: config.Config, workdir: Path, abstract: Any, want: tuple[Any, Any]) -> str:
    """One of `OUTCOMES`, of the same call on the damaged folder."""

    def hang(*_: Any) -> None:
        raise SystemExit("it does not end")

    said, handler = io.StringIO(), signal.signal(signal.SIGALRM, hang)
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(said):
            loop.train(settings, workdir)
    except (ValueError, OSError, FloatingPointError) as error:  # one line of `vit.train`
        return "told clearly" if str(workdir) in str(error) else "traceback"
    except (Exception, SystemExit):
        return "traceback"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
    if any(word in said.getvalue() for word in ("cannot be read", "damaged", "missing")):
        return "told clearly"
    state = checkpoint.restore(workdir, abstract)[1]
    got = jax.tree.map(_bits, jax.tree.leaves(state)), _losses(workdir)
    same = all(map(np.array_equal, got[0], want[0])) and got[1] == want[1]
    return "harmless" if same else "silent"


def _place(name: str, newest: int) -> str:
    """What a file is of, for the table."""
    parts = Path(name).parts
    if len(parts) < 2:
        return name
    which = "newest checkpoint" if parts[1] == str(newest) else "older checkpoint"
    return which if len(parts) == 2 else f"file or folder of the {which}"


def table(rows: Iterable[tuple[str, str]]) -> list[dict[str, Any]]:
    """One row for each kind: how often it was tried, and how often each of `OUTCOMES` came.

    Args:
        rows: kinds and outcomes.
    """
    counts: dict[str, Counter[str]] = {}
    for kind, outcome in rows:
        counts.setdefault(kind, Counter())[outcome] += 1
    counts["all"] = sum(counts.values(), Counter())
    return [
        {"what": kind, "tried": count.total(), **{name: count[name] for name in OUTCOMES}}
        for kind, count in counts.items()
    ]


def kill(kills: int, seed: int, out: Path) -> None:
    """The first part: kills, and the comparison with the run that was left alone."""
    left_alone, killed = out / "left_alone", out / "killed"
    chance, rows = random.Random(seed), []
    for number in range(kills):
        rows.append(kill_once(killed, MOMENTS[number % len(MOMENTS)], chance))
        print(f"{number + 1} of {kills}: {rows[-1]}", flush=True)
    finish(killed)
    finish(left_alone)
    print("\n" + report.table(rows, out / "kills"))
    different = differences(left_alone, killed)
    if different:
        sys.exit("not the same as the run that was left alone:\n  " + "\n  ".join(different))
    print(f"{kills} kills: every array and loss is bitwise that of the run left alone.")


def show(rows: Iterable[tuple[str, str]], path: Path) -> None:
    """Prints each outcome as it comes, and writes the table; exits when one must not be."""
    outcomes = []
    for kind, outcome in rows:
        outcomes.append((kind, outcome))
        print(f"{kind}: {outcome}", file=sys.stderr, flush=True)
    counted = table(outcomes)
    print("\n" + report.table(counted, path))
    if counted[-1]["traceback"] + counted[-1]["silent"]:
        sys.exit("tracebacks or silent changes: see the table")


Part = Literal["kills", "damages", "configs"]


def main(
    parts: Sequence[Part] = get_args(Part),
    kills: int = 20,
    seed: int = 0,
    out: Path = Path("results/training/fault_injection"),
) -> None:
    """Prints the tables; exits where something is not as it should be.

    Args:
        parts: which.
        kills: how many.
        seed: of the moments and places.
        out: folder of the tables and of the runs that are killed.
    """
    launch.at_least(1, kills=kills)
    for workdir in (out / "left_alone", out / "killed"):
        if workdir.exists() and "kills" in parts:
            raise ValueError(f"{workdir} exists; remove it, or take another --out")
    out.mkdir(parents=True, exist_ok=True)
    if "kills" in parts:
        kill(kills, seed, out)
    if "damages" in parts:
        logging.set_verbosity(logging.FATAL)  # as in `vit.train`
        show(damage_files(SMALL, seed), out / "damages")
    if "configs" in parts:
        config_mutations.show(config_mutations.outcomes(seed), out / "configs")


if __name__ == "__main__":
    launch.run(main, quick={"parts": ("kills",), "kills": 3})
