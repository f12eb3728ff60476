"""Configs: files and flags, JSON, and what is refused before any work starts."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.small import small_config
from vit import config

CONFIGS = sorted(Path("experiments/configs").glob("[a-z]*.py"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_files_are_valid(path):
    namespace: dict = {}
    exec(compile(path.read_text(), path, "exec"), namespace)
    config.validate(namespace["get_config"]())
    assert "python -m vit.train" in namespace["__doc__"]


def test_json_round_trip(tmp_path):
    before = small_config()
    config.save(before, tmp_path / "config.json")
    assert config.load(tmp_path / "config.json") == before


@pytest.mark.parametrize("content", ['{"modell": {}}', '{"model": {"width": 3}}', "{", "[1]"])
def test_a_foreign_json_is_refused(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="no config of this version|not a config of this version"):
        config.load(path)


def test_differences_name_field_and_both_values():
    old = small_config()
    softmax = dataclasses.replace(old.attention, kind="softmax")
    new = dataclasses.replace(old, seed=1, attention=softmax)
    assert config.differences(old, new) == [
        "attention.kind: 'performer' -> 'softmax'",
        "seed: 0 -> 1",
    ]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            dict(attention=config.Attention(coupling="pmm")),
            "unknown coupling 'pmm'; did you mean 'pm'",
        ),
        (
            dict(attention=config.Attention(calibration="ful")),
            "config.attention: unknown calibration 'ful'; did you mean 'full'",
        ),
        (dict(attention=config.Attention(kind="sofmax")), "'sofmax'; did you mean 'softmax'"),
        (dict(attention=config.Attention(num_features=0)), "config.attention: m .* got 0"),
        (
            dict(attention=config.Attention(coupling="pm-antithetic", num_features=7)),
            "even number of features, got m = 7",
        ),
        (dict(model=config.Model(variant="XL/16")), "config.model.variant 'XL/16'; did you mean"),
        (dict(model=config.Model(variant="B/x")), "config.model.variant 'B/x'"),
        (
            dict(model=config.Model(variant="XS/3")),
            "image_size=8 is not divisible by the patch size 3",
        ),
        (dict(model=config.Model(pooling="max")), "config.model.pooling 'max'.*token, mean"),
        (
            dict(model=config.Model(position="none")),
            "config.model.position 'none'.*learned, sincos",
        ),
        (dict(model=config.Model(dropout=1.0)), r"config.model.dropout must be below 1, got 1\.0"),
        (
            dict(optim=config.Optim(learning_rate=-1.0)),
            r"learning_rate must not be negative, got -1\.0",
        ),
        (dict(optim=config.Optim(learning_rate=float("nan"))), "learning_rate must not be"),
        (dict(data=config.Data(batch_size=0)), "config.data.batch_size must be at least 1, got 0"),
        (dict(log_every=2), "config.eval_every=3 is not a multiple of config.log_every=2"),
    ],
)
def test_bad_values_are_named(sections, message):
    with pytest.raises(ValueError, match=message):
        config.validate(small_config(**sections))


# Imports once, then every command line in a process of its own, as `python -m vit.train` would.
COMMAND_LINES = """
import json, os, runpy, sys, traceback
import vit.train
outcomes = []
for flags in json.loads(sys.argv[1]):
    read, write = os.pipe()
    if not os.fork():
        os.dup2(write, 1), os.dup2(write, 2), os.close(read), os.close(write)
        code = 0
        try:
            sys.argv = ["vit.train", *flags]
            runpy.run_module("vit.train", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
        except BaseException:
            code = 1
            traceback.print_exc()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    os.close(write)
    with os.fdopen(read) as pipe:
        output = pipe.read()
    outcomes.append((os.waitstatus_to_exitcode(os.wait()[1]), output))
print(json.dumps(outcomes))
"""


def test_mistyped_flags_are_errors_before_any_work(tmp_path):
    workdir = tmp_path / "run"
    cases = {
        "--config.attention.cupling=pm": "did you mean '--config.attention.coupling'",
        "--config.attention.num_features=many": "num_features=many",
        "--config.seed=1.5": r"seed=1\.5",
        "--config.attention.coupling=orff": "unknown coupling 'orff'; did you mean 'orf'",
        "--config.data.name=mnist": "unknown config.data.name 'mnist'",
        "--config.data.batch_size=5000": "larger than the training split",
        "--config.num_epochs=1": "warmup_steps=132.* are 132 steps, but the whole run has 44",
        "--confg.seed=1": r"confg\.seed",
    }
    always = ["--config=experiments/configs/digits.py", f"--workdir={workdir}"]
    arguments = json.dumps([[*always, flag] for flag in cases])
    done = run("-c", COMMAND_LINES, arguments)
    outcomes = json.loads(done.stdout)
    for (flag, message), (code, output) in zip(cases.items(), outcomes, strict=True):
        assert code != 0, flag
        assert re.search(message, output), (flag, output)
        assert "Traceback" not in output, (flag, output)
    assert not workdir.exists()


def test_missing_config_file(tmp_path):
    result = run("-m", "vit.train", "--config=nowhere.py", f"--workdir={tmp_path}")
    assert result.returncode != 0
    assert "nowhere.py" in result.stderr
    assert "Traceback" not in result.stderr


def run(*arguments):
    environment = os.environ | {"PYTHONPATH": "."}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
