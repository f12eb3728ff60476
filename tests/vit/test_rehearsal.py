"""An ImageNet run in small, on CPUs: all that a run of days meets (slow tier, some minutes).

`vit.prepare` writes 1,024 files, as TFDS writes ImageNet. Four processes of two devices train under
a limit of 1,024 open files. The last one is killed, and the others must end without it. Two
processes resume on another mesh, and one on one device must evaluate to the same loss.
"""

import contextlib
import os
import re
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image

from vit.reports import metrics

PICTURES, EVALUATED, FILES, LIMIT = 1024, 40, 1024, 1024
"""Pictures of each split; those that are evaluated, which no batch divides; files; open files."""
PATIENCE = 1800.0
"""Seconds after which a phase counts as one that never ends."""
FLAGS = [
    "--config=imagenet",
    *("--config.model.depth=1", "--config.model.width=64", "--config.model.num_heads=2"),
    *("--config.model.mlp_dim=128", "--config.model.dropout=0.1", "--config.fsdp=2"),
    *("--config.attention.num_features=16", "--config.attention.calibration=full"),
    *("--config.data.name=rehearsal", f"--config.data.eval_split=validation[:{EVALUATED}]"),
    *("--config.data.image_size=64", "--config.data.eval_resize=73", "--config.data.mixup=0.2"),
    *("--config.data.randaugment_layers=2", "--config.data.randaugment_magnitude=15"),
    *("--config.data.batch_size=16", "--config.data.num_workers=1"),
    *("--config.optim.warmup_steps=2", "--config.optim.constant_steps=0"),
    *("--config.optim.weight_decay=0.1", "--config.optim.accumulate=1"),
    *("--config.num_epochs=0.09375", "--config.log_every=1"),  # six steps
    *("--config.eval_every=6", "--config.checkpoint_every=2"),
]
WAITING = (
    "--xla_cpu_collective_call_terminate_timeout_seconds=600"
    " --xla_cpu_collective_timeout_seconds=600"
)
"""For XLA: devices that share a busy core wait for one another."""


def draw(folder):
    """Class folders of JPEG files of ImageNet's usual size: waves and noise."""
    y, x = np.mgrid[:375, :500] / 20
    for i in range(32):
        angle, noise = np.pi * (i % 8) / 8, np.random.default_rng(i).normal(0, 20, (375, 500, 3))
        wave = np.sin(x * np.cos(angle) + y * np.sin(angle))[..., None] * [80, 60, 40]
        image = Image.fromarray((128 + wave + noise).clip(0, 255).astype(np.uint8))
        for split in ("train", "val"):
            for number in range(i, PICTURES, 32):
                path = folder / split / f"class{i % 8}" / f"{number:04d}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                image.save(path, quality=90)


def python(log, *words, devices=1):
    """A process with so many devices and few open files; its output is appended to the log."""
    flags = f"--xla_force_host_platform_device_count={devices} {WAITING}"
    with log.open("a") as file:
        return subprocess.Popen(
            ["sh", "-c", f'ulimit -Sn {LIMIT}; exec "$0" -m "$@"', sys.executable, *words],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        )


@contextlib.contextmanager
def training(folder, count):
    """The training command on so many hosts, all of them this one; none outlives the block."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        hosts = f"--coordinator=localhost:{free.getsockname()[1]}", f"--num_processes={count}"
    command = [*FLAGS, f"--workdir={folder / 'run'}", f"--config.data.dir={folder / 'data'}"]
    processes = [
        python(
            *(folder / f"process{i}.log", "vit.train", *command, *hosts, f"--process_id={i}"),
            devices=2,
        )
        for i in range(count)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()


def finish(folder, *processes):
    codes = [process.wait(PATIENCE) for process in processes]
    logs = [path.read_text()[-1500:] for path in sorted(folder.glob("*.log"))]
    assert not any(codes), "\n".join([str(codes), *logs])


@pytest.mark.slow
def test_an_imagenet_run_in_small(tmp_path):
    draw(tmp_path / "classes")
    source = f"--source={tmp_path / 'classes'}", f"--out={tmp_path / 'data'}", "--name=rehearsal"
    finish(tmp_path, python(tmp_path / "prepare.log", "vit.prepare", *source, f"--files={FILES}"))
    assert len(list((tmp_path / "data").rglob("*train.array_record*"))) == FILES

    log, end = tmp_path / "run" / "metrics.jsonl", time.monotonic() + PATIENCE
    with training(tmp_path, 4) as processes:
        while max((r["step"] for r in metrics.read(log)), default=0) < 4:
            assert all(process.poll() is None for process in processes)
            assert time.monotonic() < end
            time.sleep(0.2)
        processes[-1].kill()
        assert all(process.wait(PATIENCE) for process in processes)
    before = metrics.read(log)
    with training(tmp_path, 2) as processes:
        finish(tmp_path, *processes)
    finish(
        tmp_path, python(tmp_path / "evaluate.log", "vit.evaluate", f"--workdir={tmp_path / 'run'}")
    )

    records, said = metrics.read(log), (tmp_path / "process0.log").read_text()
    (resumed,) = re.findall(r": at step (\d+) of", said)
    assert int(resumed) >= 2
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    for one, other in zip(before, records, strict=False):  # of another mesh
        assert one["train_loss"] == pytest.approx(other["train_loss"], rel=0.01)
    last = records[-1]
    assert last["eval_examples"] == EVALUATED
    found = re.search(r"^eval_loss +(\S+)$", (tmp_path / "evaluate.log").read_text(), re.MULTILINE)
    assert found
    assert float(found[1]) == pytest.approx(last["eval_loss"], rel=0.01)
