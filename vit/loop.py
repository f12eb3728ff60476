"""The training loop: an evaluation if it is due, else a stretch of steps; then a checkpoint.

It knows no more of what is learned than its `Task` says.
"""

import contextlib
import itertools
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from vit import (
    checkpoint,
    data,
    devices,
    extension,
    hosts,
    loggers,
    machine,
    metrics,
    runs,
    safety,
    steps,
)
from vit import config as configs
from vit.display import Display, display
from vit.progress import Progress
from vit.task import Task

PROFILED = 5
"""Steps that are traced: more make files that no viewer opens."""


class Stretch(NamedTuple):
    """What `stretch` gives."""

    state: Any
    values: list[dict[str, jax.Array]]
    """Of each step; the last ones are still being computed."""
    waited: float
    """Seconds in which the next batch was not there yet."""


def stretch(
    train_step: Callable[[Any, data.Batch], tuple[Any, Any]],
    state: Any,
    batches: Iterator[data.Batch],
    number: int,
    stopping: Callable[[], bool] = lambda: False,
    advance: Callable[[], object] = lambda: None,
    meanwhile: Callable[[], object] = lambda: None,
    running: deque[Any] | None = None,
) -> Stretch:
    """That many steps; fewer, but one at least, when somebody asks to stop.

    Args:
        train_step: (state, batch) -> (state, values of the step), as `steps.Program.train`.
        state: is given up.
        batches: the next ones.
        number: of steps.
        stopping: asked between two steps.
        advance: called after each.
        meanwhile: called once, when what ran before has ended and steps of this stretch wait.
        running: losses of the steps that ran before, `steps.AHEAD` at most; of these later.
    """
    values, waited = [], 0.0
    running = deque() if running is None else running
    while len(values) < number and not (values and stopping()):
        asked = time.perf_counter()
        batch = next(batches)
        waited += time.perf_counter() - asked
        state, new = train_step(state, batch)
        values.append(new)
        running.append(new["train_loss"])
        if len(running) >= steps.AHEAD:
            jax.block_until_ready(running.popleft())
        if len(values) == steps.AHEAD - 1:
            meanwhile()
        advance()
    if len(values) < steps.AHEAD - 1:
        meanwhile()
    return Stretch(state, values, waited)


def compiled(function: Any, state: Any, batch: Any, shown: Display) -> None:
    """Compiles the function of state and batch, of which shapes suffice; shows how long it took."""
    shown.status(f"compiling {function.__name__}")
    start = time.perf_counter()
    function.lower(state, batch).compile()
    shown.status(f"compiled {function.__name__} in {time.perf_counter() - start:.1f} s")


def until_log(step: int, config: configs.Config, num_steps: int) -> int:
    """Steps to the next line of the log."""
    return min(config.log_every - step % config.log_every, num_steps - step)


def due(step: int, every: int, num_steps: int) -> bool:
    """Whether it is time for what is done at the end, and after each so many steps."""
    return step == num_steps or (step > 0 and step % every == 0)


def train(
    config: configs.Config,
    workdir: Path,
    dataset: data.Dataset | None = None,
    task: Task | None = None,
    *,
    profile: bool = False,
    log: Sequence[str] = (),
) -> metrics.Record:
    """Trains to the end, from the newest readable checkpoint in `workdir` if there is one.

    Ctrl-C and SIGTERM finish the step, save and exit with code `safety.STOPPED`; the same call
    resumes. A resumed run ends with the same parameters as an uninterrupted one (on CPU bit for
    bit), wherever it was stopped or killed.

    Args:
        config: of the run.
        workdir: its folder; on several hosts one that all of them see.
        dataset: what is learned from, as `runs.subject`.
        task: what is learned; likewise. Fields of the config that mean nothing to it must be valid
            all the same.
        profile: traces the first `PROFILED` steps after the first stretch into `workdir`/profile.
        log: other loggers for the metrics, of `loggers.LOGGERS`: "tensorboard", "wandb", "mlflow".

    Returns:
        The last record of the log: step, epoch, seconds, train_loss, eval_loss and what else
        the task measures.

    Raises:
        ValueError: for a config that cannot work, a workdir that holds another run, is in use or
            has lost its checkpoints, more unreadable records than `config.data.max_bad_records`,
            or hosts that were not started alike or do not see one folder.
        FloatingPointError: when loss, gradients or parameters are not finite, in more steps in a
            row than `config.optim.skip_nonfinite` passes over; nothing is saved.
        vit.checkpoint.SaveError: when a checkpoint cannot be written; earlier ones are intact.
    """
    # What is asked for, checked before anything is written.
    config = extension.as_extended(config, workdir)
    configs.validate(config)
    checkpoint.check_path(workdir)
    loggers.check(log)
    dataset, task = runs.subject(config, dataset, task, workdir)
    hosts.check_same(runs.said_by_all(config, dataset, task))
    mesh = devices.mesh(config)
    batch_bytes = data.batch_bytes(dataset, config.data, jax.process_count())
    workers = machine.workers(config.data.num_workers, batch_bytes)
    machine.check_shared_memory(batch_bytes, workers)
    steps_per_epoch, num_steps = runs.length(config, dataset)
    lead, path = jax.process_index() == 0, workdir / "metrics.jsonl"
    rate = runs.rate(config, dataset)
    if lead:
        print("building the model", flush=True)
    program = runs.program(config, dataset, task, mesh)

    with contextlib.ExitStack() as stack:
        if lead:
            stack.enter_context(safety.exclusive(workdir))
            runs.claim(workdir, config, dataset, task)
        stopping = stack.enter_context(safety.interruption())

        # Where the run stands.
        hosts.check_same_folder(workdir)  # then all know that process 0 holds it
        step, state = runs.resume(workdir, program.abstract)
        if lead and state is not None:
            print(f"{workdir}: at step {step} of {num_steps}")
        state = program.initial() if state is None else state
        checkpoints = stack.enter_context(
            checkpoint.open_checkpoints(workdir, write=True, keep_every=config.keep_every)
        )
        past = metrics.keep_up_to(path, step) if lead else []
        start = time.perf_counter() - sum(record["seconds"] for record in past[-1:])
        write = stack.enter_context(loggers.writer(log, workdir, config, lead))
        evaluate_now = due(step, config.eval_every, num_steps) and not hosts.agree(
            bool(past) and past[-1]["step"] == step and "eval_loss" in past[-1]
        )
        shown = stack.enter_context(display(lead, step, num_steps))
        progress = Progress(
            config, task, rate, steps_per_epoch, program.abstract, write, shown, start
        )
        saved, number, evaluated, running = step, 0, False, deque()

        # The loop.
        batches = iter(())
        if evaluate_now or step < num_steps:
            batches = stack.enter_context(
                runs.batches(dataset, config, mesh, step, num_steps, evaluate_first=evaluate_now)
            )
        if step < num_steps:
            compiled(program.train, state, runs.abstract_batch(dataset, config, mesh), shown)
        while evaluate_now or step < num_steps:
            if evaluate_now:
                record = {"step": step, "epoch": step / steps_per_epoch}
                length = data.evaluation_length(dataset, config.data)
                evaluation = safety.until(stopping, itertools.islice(batches, length))
                with contextlib.suppress(safety.Stopped):
                    if not evaluated:
                        masked = runs.abstract_batch(dataset, config, mesh, mask=True)
                        compiled(program.evaluate, state, masked, shown)
                        evaluated = True
                    record |= steps.evaluate(task, partial(program.evaluate, state), evaluation)
                    write(record | {"seconds": progress.seconds()})
                    evaluate_now = False
                    shown.line(f"step {step}: {config.data.eval_split} {metrics.results(record)}")
            else:
                remaining, traced = until_log(step, config, num_steps), profile and number == 1
                if traced:
                    remaining = min(remaining, PROFILED)
                    progress.read()
                progress.begin()
                with profiler(workdir, traced):
                    state, values, waited = stretch(
                        program.train,
                        state,
                        batches,
                        remaining,
                        stopping,
                        shown.advance,
                        progress.read,
                        running,
                    )
                    step += len(values)
                    number += 1
                    progress.started = step, values, waited
                    if traced:
                        progress.read()
                evaluate_now = due(step, config.eval_every, num_steps)
            saving = due(step, config.checkpoint_every, num_steps)
            if saving or evaluate_now or progress.too_many_bad:
                progress.read()
            if stop := stopping():
                progress.read()
            if step != saved and (stop or saving or progress.too_many_bad):
                checkpoint.save(checkpoints, step, state)
                saved = step
            if progress.too_many_bad:
                raise ValueError(
                    f"{len(progress.bad)} records of {config.data.train_split!r} cannot be decoded,"
                    f" more than config.data.max_bad_records={config.data.max_bad_records}; their"
                    f" numbers are {sorted(progress.bad)[:20]}"
                )
            if stop and (evaluate_now or step < num_steps):
                checkpoint.finish(checkpoints)
                print(f"stopped at step {step} of {num_steps}; the same command resumes")
                sys.exit(safety.STOPPED)
        checkpoint.finish(checkpoints)

    if lead:
        metrics.plot_learning_curve(path, workdir / "learning_curve.png")
    return metrics.read(path)[-1]


def profiler(workdir: Path, wanted: bool) -> contextlib.AbstractContextManager[Any]:
    """Traces what runs inside, if wanted; for TensorBoard, xprof or Perfetto."""
    return jax.profiler.trace(str(workdir / "profile")) if wanted else contextlib.nullcontext()
