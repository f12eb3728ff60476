"""Configs: files and flags, JSON, and what is refused before any work starts."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from absl import flags

from tests.support.small import run_of, small_config
from vit import config, data
from vit.config.arguments import chosen_config, parse_flags
from vit.run import devices, runs
from vit.task import opened

CONFIGS = [p for p in sorted(Path("vit/configs").glob("[a-z]*.py")) if "my_" not in p.stem]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_files_are_valid(path):
    namespace: dict = {}
    exec(compile(path.read_text(), path, "exec"), namespace)
    config.validate(namespace["get_config"]())
    assert "performer-vit train" in namespace["__doc__"]


FOREIGN = [
    *('"modell": {}', '"model": {"widths": 3}', '"model": null', '"model": 3'),
    *('"seed": "0"', '"seed": 1.0', '"seed": true', '"seed": {}', '"num_epochs": "inf"'),
    *('"data": {"flip": 1}', '"data": {"name": ["digits"]}', '"text": {}'),
    *('"seed": 1, "seed": 2', '"model": {"depth": 2, "depth": 2}'),
    *(f'"attention": {json.dumps({"blocks": x})}' for x in ([3], [{"kinds": "softmax"}], 3)),
]
"""Entries of a config of images."""
BROKEN = ["{", "[1]", '{"model":' * 100_000, "\ud83d", "{}", '{"seed": 1}']


def test_a_foreign_json_is_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"task": "classification", "seed": 1}')
    assert config.load(path).seed == 1
    for content in [*(f'{{"task": "classification", {x}}}' for x in FOREIGN), *BROKEN]:
        path.write_text(content, errors="replace")
        with pytest.raises(ValueError, match="no config of this ver|not a config of this ver"):
            config.load(path)


def test_a_config_that_lacks_fields_has_their_defaults(tmp_path):
    path = tmp_path / "config.json"
    values = {"task": "classification"} | dataclasses.asdict(small_config())
    del values["keep_every"], values["model"]["width"], values["optim"]["b2"]
    path.write_text(json.dumps(values))
    assert config.load(path) == small_config()
    blocks = (config.Block("softmax"), config.Block(num_features=64, exact_keys=16, exact_rows=1))
    section = config.Attention(blocks=blocks)
    config.save(small_config(attention=section), path)
    assert config.load(path) == small_config(attention=section)
    values["attention"]["mask"] = "grid"
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="mask"):
        config.load(path)


def test_a_run_of_an_unknown_task_is_refused_with_the_flag_that_imports_it(tmp_path):
    (tmp_path / "config.json").write_text('{"task": "lab.regression"}')
    with pytest.raises(ValueError, match="'lab.regression' is not .*example --task=lab.regression"):
        config.of_run(tmp_path)
    with pytest.raises(ValueError, match="--task=lab.regression: No module named 'lab'; give a mo"):
        config.use("lab.regression")
    with pytest.raises(ValueError, match="--task=json defines no task"):
        config.use("json")


def test_what_a_resumed_run_may_change():
    placed = {"data.dir": "x", "data.num_workers": 2, "fsdp": 2, "seq": 2, "checkpoint_every": 3}
    changed = config.with_values(small_config(), placed | {"keep_every": 3})
    assert config.differences(small_config(), changed) == []
    assert config.differences(small_config(), small_config(seed=1)) == ["seed: 0 -> 1"]


def test_a_number_of_the_model_takes_the_place_of_the_variants():
    model = config.Model("B/14", width=1536, num_heads=24)
    assert model.size == config.SIZES["B"]._replace(width=1536, num_heads=24)
    assert (model.size.head_dim, model.patch_size) == (64, 14)


REFUSED = [
    ({"attention.coupling": "pmm"}, "unknown coupling 'pmm'; did you mean 'pm'"),
    ({"attention.coupling": 3}, "coupling=3: must be one of iid, orf, simrf, "),
    (
        {"attention.feature_map": "relu", "attention.calibration": "full"},
        "feature_map='relu', .*: a calibration requires the feature map positive",
    ),
    ({"attention.feature_map": "elu+1", "attention.exact_keys": 2}, "map that estimates softmax"),
    ({"attention.num_features": 0}, r"exact_window \(0\) must be positive if .*num_features \(0\)"),
    ({"attention.blocks": (config.Block(),)}, r"blocks \(.*\) must have config.model.depth"),
    ({"attention.blocks": [config.Block()] * 4}, "must be a tuple of vit.config.Block"),
    (
        {"attention.blocks": (config.Block(num_features=-1),) * 4},
        r"blocks\[0\].num_features=-1: must be 0 \(the pairs of `exact_window` alone\), or",
    ),
    (
        {"attention.blocks": (*[config.Block()] * 3, config.Block("softmaxx"))},
        r"unknown config.attention.blocks\[3\].kind 'softmaxx'; did you mean 'softmax'",
    ),
    ({"attention.calibration": "ful"}, "calibration='ful': unknown .*; did you mean 'full'"),
    ({"attention.calibration": "tilt+full"}, "unknown calibration 'full'. Choices: none"),
    (
        {"attention.coupling": "pm-antithetic", "attention.num_features": 7},
        "even number of features, got m = 7",
    ),
    (
        {"attention.exact_window": 8, "attention.implementation": "pallas"},
        r"exact_window \(8\) must be 0 with config.attention.implementation \('pallas'\)",
    ),
    ({"model.variant": "XL/16"}, "config.model.variant 'XL/16'; did you mean"),
    (
        {"model.variant": "XS/3"},
        r"image_size \(8\) must be divisible by the patch of .*variant \('XS/3'\)",
    ),
    (
        {"model.pooling": "token+mean", "model.final_norm": "after"},
        r"final_norm \('after'\) must be before for config.model.pooling",
    ),
    (
        {"optim.learning_rate": 1e-6},
        r"final_learning_rate \(1e-05\) must be at most .*learning_rate \(1e-06",
    ),
    (
        {"data.image_size": 4, "data.max_shift": 4},
        r"max_shift \(4\) must be smaller than .*image_size \(4\)",
    ),
    (
        {"data.eval_resize": 33},
        r"eval_resize \(33\) must be 0, or one to four times .*image_size \(8\)",
    ),
    ({"seq": 3}, r"config.seq \(3\) must divide the number of tokens"),
    (
        {"seq": 2, "attention.exact_window": 2},
        r"config.seq \(2\) must be 1 with config.attention.exact_window \(2\)",
    ),
    ({"model.dropout": 1.0}, "model.dropout=1.0: must be a number from 0 to below 1"),
    (
        {"seq": 2, "attention.blocks": (*[config.Block()] * 3, config.Block(exact_window=2))},
        r"config.seq \(2\) must be 1 with config.attention.exact_window",
    ),
    (
        {"checkpoint_every": 2, "keep_every": 3},
        r"keep_every \(3\) must be a multiple of config.checkpoint_every \(2\)",
    ),
    (
        {"model.position": "sincos", "model.width": 66, "model.num_heads": 3},
        r"width \(66\) must be divisible by 4 for config.model.position \('sincos'\)",
    ),
    (
        {"attention.blocks": (*[config.Block()] * 3, config.Block(calibration="ful"))},
        "attention.blocks=.*: unknown calibration 'ful'; did you mean 'full'",
    ),
    (
        {
            "attention.coupling": "pm-antithetic",
            "attention.blocks": (*[config.Block()] * 3, config.Block(num_features=7)),
        },
        "attention.blocks=.*: .*even number of features, got m = 7",
    ),
    ({"optim.clip_norm": float("nan")}, "config.optim.clip_norm=nan: must be "),
    ({"log_every": 2}, r"config.eval_every \(3\) must be a multiple of config.log_every \(2\)"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED)
def test_bad_values_are_named(values, message):
    with pytest.raises(ValueError, match=message):
        config.validate(config.with_values(small_config(), values))


def parsed(path, *arguments):
    argv, values = ["program", f"--config={path}", *arguments], flags.FlagValues()
    flags.DEFINE_string("config", None, "file", values)
    parse_flags(argv, values)
    return chosen_config(values)


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
            "import numpy as np\nfrom tests.support.small import run_of, small_config\n"
            f"def get_config():\n  config = small_config()\n  {line}\n  return config\n"
        )
        with pytest.raises(ValueError, match=message):
            config.validate(parsed(path))
    path.write_text(
        "from tests.support.small import run_of, small_config\n"
        "def get_config(): return small_config(num_epochs=3)"
    )
    config.validate(parsed(path))
    assert parsed(path, "--config.num_epochs=5").num_epochs == 5


def test_a_config_file_changes_nothing_else(tmp_path, monkeypatch):
    """A variant would mean another model elsewhere; a command would end without a word."""
    path = tmp_path / "odd.py"
    given = "import sys\nfrom tests.support.small import run_of, small_config\n"
    for body, message in {
        "sys.exit(0)": r"odd.py ends the program: sys.exit\(0\)",
        "sys.exit()": r"odd.py ends the program: sys.exit\(None\)",
        "get_config = lambda: sys.exit(0)": r"ends the program: sys.exit\(0\)",
        "from vit.config import SIZES\nSIZES['B'] = SIZES['S']\nget_config = small_config": (
            "changes vit.config.SIZES.*: set config.model.width, depth"
        ),
        "get_config = lambda a: small_config()": "required argument: 'a'; give .*odd.py:ARGUMENT",
    }.items():
        path.write_text(f"{given}{body}\n")
        with pytest.raises(SystemExit, match=message) as error:
            parsed(path)
        assert isinstance(error.value.code, str)
    assert config.SIZES["B"].width == 768
    with pytest.raises(SystemExit, match="digits:x gives .*too many .*; give --config=digits"):
        parsed("digits:x")


def test_a_config_file_with_a_misspelled_name(tmp_path):
    """An assignment to what is no field was ignored."""
    path = tmp_path / "odd.py"
    given = "from tests.support.small import run_of, small_config\nconfig = small_config()\n"
    for line, message in {
        "config.num_epoch = 3": "'Config' object has no attribute 'num_epoch'.* .odd.py, line 3",
        "config.optim.lr = 0.1": "'Optim' object has no attribute 'lr'.* .odd.py, line 3",
        "def config_of(): return config": "odd.py defines no get_config()",
    }.items():
        path.write_text(f"{given}{line}\n")
        with pytest.raises(SystemExit, match=message):
            parsed(path)


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


def refusal(flag, text):
    """The message about the flag before the first step of a run; "" where it is accepted."""
    try:
        settings = parsed(config.bundled_path("digits"), f"--{flag}={text}")
        config.validate(settings)
        devices.mesh(settings)
        _ = runs.Run(settings, *opened(settings)).rate
    except (SystemExit, ValueError) as error:
        return str(error)
    return ""


def test_every_field_refuses_what_it_cannot_mean():
    """In one line that names the flag and what it may be; no value ends in another exception."""
    for field, kind in config.flag_types(config.Config).items():
        for text in (*WRONG[kind], *(EXTREME if kind in (int, float) else ())):
            said = refusal(f"config.{field}", text)
            assert said or text in EXTREME or field == "data.dir", (field, text)
            if said:
                assert "\n" not in said, (field, text)
                assert f"config.{field}" in said, (field, text)
                assert BOUNDS.search(said), (field, text, said)


def test_a_run_has_a_countable_number_of_steps():
    dataset = data.Dataset([{}] * 640, [{}], ("a", "b"), channels=1)
    assert run_of(small_config(num_epochs=0.03), dataset).length == (20, 1)
    for epochs, steps in [(0.02, "0.4"), (1e9, "2e\\+10"), (float("inf"), "inf")]:
        with pytest.raises(ValueError, match=f"num_epochs=.* are {steps} steps .* 1 to 2147483647"):
            _ = run_of(small_config(num_epochs=epochs), dataset).length
