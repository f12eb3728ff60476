"""Configs: files and flags, JSON, and what is refused before any work starts."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags
from ml_collections import config_flags

from tests.small import PATIENCE, small_config
from vit import config, data
from vit.config import bundled
from vit.config.arguments import from_flag, parse_flags
from vit.run import devices, runs

CONFIGS = [p for p in sorted(Path("experiments/configs").glob("[a-z]*.py")) if "my_" not in p.stem]


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


@pytest.mark.parametrize(
    "content",
    [
        '{"modell": {}}',
        '{"model": {"widths": 3}}',
        '{"model": null}',
        '{"model": 3}',
        '{"seed": "0"}',
        '{"seed": 1.0}',
        '{"seed": true}',
        '{"seed": {}}',
        '{"num_epochs": "inf"}',
        '{"data": {"flip": 1}}',
        '{"data": {"name": ["digits"]}}',
        "{",
        "[1]",
        '{"model":' * 100_000,
        "\ud83d",
    ],
)
def test_a_foreign_json_is_refused(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_text(content, errors="replace")
    with pytest.raises(ValueError, match="no config of this version|not a config of this version"):
        config.load(path)


def test_a_config_that_never_ends_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ValueError, match="not a config of this version: .* no regular file"):
        config.of_run(tmp_path)


def test_a_config_of_before_the_numbers_of_a_model_loads(tmp_path):
    """They are the variant's then, as they were."""
    path, new = tmp_path / "config.json", small_config()
    values = dataclasses.asdict(new)
    for field in config.Size._fields:
        del values["model"][field]
    path.write_text(json.dumps(values))
    assert config.load(path) == new
    assert config.load(path).model.size == config.SIZES["XS"]


def test_a_number_of_the_model_takes_the_place_of_the_variants():
    model = config.Model("B/14", width=1536, num_heads=24)
    assert model.size == config.SIZES["B"]._replace(width=1536, num_heads=24)
    assert (model.size.head_dim, model.patch_size) == (64, 14)


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
            dict(attention=config.Attention(coupling="softmax")),
            "coupling='softmax', .*: no coupling: did you mean config.attention.kind=softmax",
        ),
        (
            dict(attention=config.Attention(coupling="orthogonal")),
            "unknown coupling 'orthogonal'; did you mean 'orf'",
        ),
        (
            dict(attention=config.Attention(calibration="ful")),
            "config.attention.calibration='ful': unknown calibration 'ful'; did you mean 'full'",
        ),
        (dict(attention=config.Attention(kind="sofmax")), "'sofmax'; did you mean 'softmax'"),
        (
            dict(attention=config.Attention(num_features=0)),
            "config.attention.num_features=0: must be an integer from 1 to 65536",
        ),
        (
            dict(attention=config.Attention(coupling="pm-antithetic", num_features=7)),
            "even number of features, got m = 7",
        ),
        (
            dict(attention=config.Attention(exact_window=-1)),
            "config.attention.exact_window=-1: must be an integer from 0",
        ),
        (
            dict(attention=config.Attention(exact_window=8, implementation="pallas")),
            "config.attention.exact_window=8, config.attention.implementation='pallas': the kernel",
        ),
        (dict(model=config.Model(variant="XL/16")), "config.model.variant 'XL/16'; did you mean"),
        (dict(model=config.Model(variant="B/x")), "config.model.variant 'B/x'"),
        (
            dict(model=config.Model(variant="XS/3")),
            "config.model.variant='XS/3', config.data.image_size=8: the image size is not divi",
        ),
        (
            dict(model=config.Model("XS/2", width=66)),
            "config.model.width=66, config.model.num_heads=0: the width must be divisible by the",
        ),
        (
            dict(model=config.Model("XS/2", depth=-1)),
            "config.model.depth=-1: must be 0 .* or an int",
        ),
        (
            dict(model=config.Model("XS/2", width=18, num_heads=2, position="sincos")),
            "fixed positions need a width divisible by 4",
        ),
        (
            dict(model=config.Model(pooling="token+register")),
            "config.model.registers=0: the head reads a register: there must be one",
        ),
        (
            dict(model=config.Model(pooling="token+mean", final_norm="after")),
            "the norm of two tokens side by side must be before pooling",
        ),
        (dict(model=config.Model(epsilon=0.0)), "config.model.epsilon=0.0: must be a number from"),
        (dict(model=config.Model(pooling="max")), "config.model.pooling 'max'.*token, mean"),
        (
            dict(model=config.Model(position="none")),
            "config.model.position 'none'.*learned, sincos",
        ),
        (
            dict(model=config.Model(dropout=1.0)),
            r"config.model.dropout=1\.0: must be a number from 0 to below 1",
        ),
        (
            dict(optim=config.Optim(learning_rate=-1.0)),
            r"config.optim.learning_rate=-1\.0: must be a number from 0 to 10",
        ),
        (dict(optim=config.Optim(learning_rate=float("nan"))), "learning_rate=nan: must be a num"),
        (
            dict(data=config.Data(batch_size=0)),
            "config.data.batch_size=0: must be an integer from 1",
        ),
        (
            dict(optim=config.Optim(learning_rate=1e-6)),
            "config.optim.final_learning_rate=1e-05, config.optim.learning_rate=1e-06: the rate",
        ),
        (
            dict(data=config.Data(image_size=4, max_shift=4)),
            "the first must be smaller than the se",
        ),
        (
            dict(data=config.Data(cutmix=-1.0)),
            r"config.data.cutmix=-1.0: must be 0 \(no CutMix\), or a number",
        ),
        (dict(data=config.Data(erase=1.5)), "config.data.erase=1.5: must be a number from 0 to 1"),
        (dict(model=config.Model(drop_path=1.0)), "config.model.drop_path=1.0: must be a number"),
        (dict(optim=config.Optim(layer_decay=0.0)), "layer_decay=0.0: must be a number from 0.001"),
        (dict(optim=config.Optim(loss="sigmoids")), "'sigmoids'; did you mean 'sigmoid'"),
        (dict(model=config.Model(mlp_init="xavier")), "'xavier'.*lecun_normal, xavier_uniform"),
        (dict(model=config.Model(head_bias=-1e3)), "head_bias=-1000.0: must be a number from -100"),
        (dict(restarts="10,ten"), "config.restarts='10,ten': must be rising numbers of epochs"),
        (dict(restarts="3,2"), "config.restarts='3,2': must be rising numbers of epochs"),
        (dict(restarts="0"), "config.restarts='0': must be rising numbers of epochs"),
        (dict(restarts="1", num_epochs=1.0), "the last restart must be before the end of the run"),
        (dict(data=config.Data(eval_resize=33)), "the first must be 0, or from the second to four"),
        (dict(data=config.Data(image_size=8192)), "an image has at most 1048576 patches"),
        (
            dict(log_every=2),
            "config.eval_every=3, config.log_every=2: the first must be a multiple of the second",
        ),
    ],
)
def test_bad_values_are_named(sections, message):
    with pytest.raises(ValueError, match=message):
        config.validate(small_config(**sections))


# Imports once, then every command line in a process of its own, as `python -m vit.train` would.
COMMAND_LINES = """
import json, os, runpy, sys, traceback, warnings
import vit.train
warnings.simplefilter("ignore")  # runpy's, that it is imported already
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
        "--config.seed=4294967296": "seed=4294967296: must be an integer from 0 to 2147483647",
        "--config.model=build": "unknown flag '--config.model'; did you mean '--config.model.",
        "--config.optim.learning_rate=inf": "learning_rate=inf: must be a number from 0 to 10",
        "config.num_epochs=3": "'config.num_epochs=3' is no flag: did you mean '--config.num_ep",
        "--num_processes=4": "--num_processes=4 --process_id=None: give all three, or none",
        "--process_id=0": "--num_processes=None --process_id=0: give all three, or none",
        "--workdir=": "--workdir= is empty",
    }
    always = ["--config=experiments/configs/digits.py", f"--workdir={workdir}"]
    arguments = json.dumps([[*always, flag] for flag in cases])
    done = run("-c", COMMAND_LINES, arguments)
    outcomes = json.loads(done.stdout)
    for (flag, message), (code, output) in zip(cases.items(), outcomes, strict=True):
        assert code != 0, flag
        assert re.search(message, output), (flag, output)
        assert "Traceback" not in output, (flag, output)
        assert len(output.splitlines()) == 1, (flag, output)
    assert not workdir.exists()


CONFIG_FILES = {
    "no program": ("def get_config(:", r"SyntaxError: invalid syntax \(bad.py, line 1\)"),
    "an error": ("x = 1\ny = x / 0", r"ZeroDivisionError: division by zero \(bad.py, line 2\)"),
    "a bad value": ("def get_config(): int('x')", "ValueError: invalid literal for int"),
    "no function": ("x = 1", "AttributeError: .* has no attribute 'get_config'"),
    "nothing": ("def get_config(): pass", "must return a vit.config.Config, .* a NoneType"),
    "a dict": (
        "def get_config(): return {'seed': 1}",
        "must return a vit.config.Config, .* a dict",
    ),
}


@pytest.mark.parametrize("case", CONFIG_FILES)
def test_config_files_that_are_none_are_told_in_one_line(tmp_path, case):
    text, message = CONFIG_FILES[case]
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(SystemExit) as error:
        parsed(tmp_path / "bad.py")
    assert re.search(message, str(error.value))
    assert "\n" not in str(error.value)


def parsed(path, *arguments):
    sys.modules.pop("config_config", None)  # the module of another file
    argv, values = ["program", f"--config={path}", *arguments], flags.FlagValues()
    flag = config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv)
    parse_flags(argv, values)
    return from_flag(flag)


def test_a_config_file_with_values_of_another_type(tmp_path):
    path = tmp_path / "odd.py"
    for line, message in {
        "config.seed = '1'": "config.seed='1': must be an integer from 0 to 2147483647",
        "config.data.flip = 1": "config.data.flip=1: must be true or false",
        "config.model.variant = None": "config.model.variant=None: must be text",
        "config.optim = None": "config.optim=None: must be a vit.config.Optim",
        "config.seed = np.int64(1)": r"config.seed=np.int64\(1\): must be an integer",
    }.items():
        path.write_text(
            "import numpy as np\nfrom tests.small import small_config\n"
            f"def get_config():\n  config = small_config()\n  {line}\n  return config\n"
        )
        with pytest.raises(ValueError, match=message):
            config.validate(parsed(path))
    path.write_text(
        "from tests.small import small_config\ndef get_config(): return small_config(num_epochs=3)"
    )
    config.validate(parsed(path))
    assert parsed(path, "--config.num_epochs=5").num_epochs == 5


def test_every_program_refuses_what_it_would_drop():
    """`arguments.launch` starts all of them."""
    programs = [p for top in ("vit", "experiments") for p in Path(top).rglob("*.py")]
    starters = {str(p) for p in programs if "app.run(" in p.read_text()}
    assert starters == {"vit/config/arguments.py"}


WRONG = {
    bool: ("maybe", "2", ""),
    int: ("many", "nan", "", "1,2", "0.5"),
    float: ("many", "nan", "", "1,2"),
    str: ("nowhere", "a\nb", "["),
}
"""No field of the type can mean these; a folder may have any name."""
EXTREME = ("0", "-1", "inf", "1e20", "9" * 30)
BOUNDS = re.compile(
    r"must|hoices|did you mean|divisible|divide|multiple|larger than|lower them|has 1 to|always"
)


def refusal(field, text):
    """The message about the value before the first step of a run; "" where it is accepted."""
    try:
        settings = parsed(bundled.path("digits"), f"--config.{field}={text}")
        config.validate(settings)
        devices.mesh(settings)
        runs.rate(settings, runs.subject(settings)[0])
    except (SystemExit, ValueError) as error:
        return str(error)
    return ""


def test_every_field_refuses_what_it_cannot_mean():
    """In one line that names the flag and what it may be; no value ends in another exception."""
    for field, kind in config.TYPES.items():
        for text in (*WRONG[kind], *(EXTREME if kind in (int, float) else ())):
            said = refusal(field, text)
            assert said or text in EXTREME or field == "data.dir", (field, text)
            if said:
                assert "\n" not in said, (field, text)
                assert f"config.{field}" in said, (field, text)
                assert BOUNDS.search(said), (field, text, said)


def test_a_run_has_a_countable_number_of_steps():
    dataset = data.Dataset([{}] * 640, [{}], ("a", "b"), channels=1)
    assert runs.length(small_config(num_epochs=0.03), dataset) == (20, 1)
    for epochs, steps in [(0.02, "0.4"), (1e9, "2e\\+10"), (float("inf"), "inf")]:
        with pytest.raises(
            ValueError, match=f"num_epochs=.* are {steps} steps, .* 1 to 2147483647"
        ):
            runs.length(small_config(num_epochs=epochs), dataset)


@pytest.mark.parametrize("more", [(), ("--config.seed=1",)])
def test_missing_config_file(more):
    with pytest.raises(SystemExit, match="^--config: .*nowhere.py"):
        parsed("nowhere.py", *more)


def run(*arguments):
    environment = os.environ | {"PYTHONPATH": "."}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE, env=environment
    )
