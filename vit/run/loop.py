"""Training loop of any `Task`: steps, evaluations and checkpoints."""

import contextlib
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax

from vit import config as configs
from vit import data
from vit.reports import metrics
from vit.run import checkpoint, devices, files, hosts, loggers, runs, safety, steps
from vit.run.progress import Progress
from vit.task import Task

PROFILED = 5
"""Number of traced steps; viewers fail on files of many more."""


def compiled(function: Any, state: Any, batch: Any, progress: Progress) -> None:
    """Compile a function of state and batch, arrays or shapes; report how long it takes."""
    progress.line(f"compiling {function.__name__}")
    start = time.perf_counter()
    function.lower(state, batch).compile()
    progress.line(f"compiled {function.__name__} in {time.perf_counter() - start:.1f} s")


def due(step: int, every: int, num_steps: int) -> bool:
    """Return True at the last step and at multiples of `every`."""
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
    """Train to the end, from the newest readable checkpoint in `workdir` if any.

    Ctrl-C and SIGTERM finish the step, save and exit with code `safety.STOPPED`; the same call
    resumes. A run that was stopped or killed and resumed ends with the parameters of an
    uninterrupted run (on CPU bit for bit).

    Args:
        config: config of the run, valid also in the fields that the task does not use.
        workdir: folder of the run; with several hosts on a shared file system.
        dataset: as in `runs.subject`.
        task: as in `runs.subject`.
        profile: trace `PROFILED` steps after the first line of the log into `workdir`/profile.
        log: further loggers: "tensorboard", "wandb", "mlflow".

    Returns:
        The last record of the log: step, epoch, seconds, train_loss, eval_loss and other measures
        of the task.

    Raises:
        ValueError: for an invalid config; a workdir with another run, in use or without its
            checkpoints; a record that cannot be decoded; or hosts with different settings.
        FloatingPointError: when loss, gradients or parameters are not finite; nothing is saved.
        vit.run.checkpoint.SaveError: when a checkpoint cannot be written; earlier ones are intact.
    """
    # Check everything before anything is written.
    configs.validate(config)
    checkpoint.check_path(workdir)
    loggers.check(log)
    dataset, task = runs.subject(config, dataset, task, workdir)
    hosts.check_same(runs.shared_settings(config, dataset, task))
    mesh = devices.mesh(config)
    steps_per_epoch, num_steps = runs.length(config, dataset)
    lead, path = jax.process_index() == 0, workdir / "metrics.jsonl"
    rate = runs.rate(config, dataset)
    if lead:
        print("building the model", flush=True)
    program = runs.program(config, dataset, task, mesh)

    with contextlib.ExitStack() as stack:
        if lead:
            workdir.mkdir(parents=True, exist_ok=True)
            stack.enter_context(files.alone(workdir / "lock"))
            runs.claim(workdir, config, dataset, task)
        stopping = stack.enter_context(safety.interruption())

        # Resume from the newest readable checkpoint.
        first, state = runs.resume(workdir, program.abstract)
        if lead and state is not None:
            print(f"{workdir}: at step {first} of {num_steps}")
        state = program.initial() if state is None else state
        checkpoints = stack.enter_context(
            checkpoint.open_checkpoints(workdir, write=True, keep_every=config.keep_every)
        )
        past = metrics.keep_up_to(path, first) if lead else []
        start = time.perf_counter() - sum(record["seconds"] for record in past[-1:])
        write = stack.enter_context(loggers.writer(log, workdir, config, lead))
        evaluate_now = due(first, config.eval_every, num_steps) and not hosts.agree(
            bool(past) and past[-1]["step"] == first and "eval_loss" in past[-1]
        )
        names = list(steps.parameters(program.abstract))
        run = steps_per_epoch, num_steps
        progress = Progress(config, task, rate, *run, names, write, lead, start)
        tracing = stack.enter_context(contextlib.ExitStack())
        step, saved, evaluated = first, first, False
        traced = first + config.log_every if profile else -1  # the step before the traced ones

        batches = iter(())
        if step < num_steps:
            batches = stack.enter_context(runs.batches(dataset, config, mesh, step))
            compiled(program.train, state, runs.abstract_batch(dataset, config, mesh), progress)
        while evaluate_now or step < num_steps:
            if evaluate_now:
                record = {"step": step, "epoch": step / steps_per_epoch}
                evaluation = safety.until(stopping, runs.eval_batches(dataset, config, mesh))
                with contextlib.suppress(safety.Stopped):
                    if not evaluated:
                        masked = runs.abstract_batch(dataset, config, mesh, mask=True)
                        compiled(program.evaluate, state, masked, progress)
                        evaluated = True
                    record |= steps.evaluate(task, partial(program.evaluate, state), evaluation)
                    write(record | {"seconds": progress.seconds()})
                    evaluate_now = False
                    progress.line(
                        f"step {step}: {config.data.eval_split} {metrics.results(record)}"
                    )
            else:
                if step == traced:
                    progress.read()
                    tracing.enter_context(jax.profiler.trace(str(workdir / "profile")))
                requested = time.perf_counter()
                batch = next(batches)
                waited = time.perf_counter() - requested
                state, values = program.train(state, batch)
                step += 1
                progress.add(step, values, requested, waited)
                if step == traced + PROFILED:
                    progress.read()
                    tracing.close()
                evaluate_now = due(step, config.eval_every, num_steps)
            saving = due(step, config.checkpoint_every, num_steps)
            if saving or evaluate_now:
                progress.read()
            if stop := stopping():
                progress.read()
            if step != saved and (stop or saving):
                checkpoint.save(checkpoints, step, state)
                saved = step
            if stop and (evaluate_now or step < num_steps):
                checkpoint.finish(checkpoints)
                print(f"stopped at step {step} of {num_steps}; the same command resumes")
                sys.exit(safety.STOPPED)
        checkpoint.finish(checkpoints)

    if lead:
        metrics.plot_learning_curve(path, workdir / "learning_curve.png")
    return metrics.read(path)[-1]
