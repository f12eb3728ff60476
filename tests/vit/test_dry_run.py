"""What a run would cost, counted in compiled programs, for devices that are there or not."""

import importlib.util
import re

import pytest

from tests.support import commands
from tests.support.small import SHALLOW, run_of, sized, small_config
from vit import config, data
from vit.run import devices, dry_run, optim, runs, steps
from vit.task import opened

_shallow = sized(SHALLOW)


SETTINGS = small_config(model=config.Model(variant="XS/4", pooling="mean"))


@pytest.fixture(scope="module")
def plan():
    return dry_run.plan(SETTINGS)


@pytest.mark.thorough
def test_it_says_what_a_run_costs_and_writes_nothing(plan, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = dry_run.text(plan)
    assert "blocks.0.mlp_out.kernel" in text
    assert "(32, 16)" in text
    program = runs.Run(SETTINGS, *opened(SETTINGS), devices.mesh(SETTINGS)).program
    count = sum(x.size for x in steps.parameters(program.abstract).values())
    assert re.search(rf"total +{count:,}", text)
    flops = opened(SETTINGS)[1].operations(SETTINGS)
    assert f"{flops / 1e9:.3f} GFLOP per image forward" in text
    assert "attention with features: blocked, no kernel for a CPU" in text
    assert "batch: image (32, 8, 8, 1) uint8" in text
    assert "batch: mask" not in text
    assert text.count("memory: arguments") == 2
    assert "fits" not in text  # nothing is known of this device
    assert list(tmp_path.iterdir()) == []


def test_what_a_device_has_decides(plan):
    """Room for one byte less than is needed is too little; the roof is the slower of two."""
    need = max(plan[name]["memory"]["in all"] for name in ("train", "evaluate"))
    peak = devices.Peak(1e9, 1e6, need / 2**30)
    exact = plan | dry_run.limits(plan, peak)
    assert exact["fits"]
    assert "roof: " in dry_run.text(exact)
    assert dry_run.text(exact).endswith("\nfits")
    larger = plan | {"evaluate": {"memory": {"in all": need + 1}}}
    assert dry_run.limits(larger, peak)["fits"] is False
    short = plan | dry_run.limits(plan, devices.Peak(1e9, 1e6, (need - 1) / 2**30))
    assert short["fits"] is False
    assert "does not fit: use a smaller config.data.batch_size" in dry_run.text(short)
    bound = plan["train"]["bytes"] / 1e6
    assert exact["roof"]["memory traffic"] == pytest.approx(bound)
    assert f"{32 / bound:,.0f} images per second, bounded by memory traffic" in dry_run.text(exact)


def test_the_roof_is_that_of_all_devices():
    """Three forward passes of 4 operations for 32 examples, on 1 and on 8 devices of 6 a second."""
    step = {"memory": {"in all": 0}, "operations": 1.0, "bytes": 0.0}
    for number, seconds in ((1, 64.0), (8, 8.0)):
        plan = {"model_operations": 4.0, "batch_size": 32, "num_devices": number}
        plan |= {"train": step, "evaluate": step}
        roof = dry_run.limits(plan, devices.Peak(6.0, 1.0, 1.0))["roof"]
        assert roof["operations"] == seconds


@pytest.mark.thorough
def test_a_batch_in_parts_costs_as_much_as_whole(plan):
    """XLA counts the inside of a loop once."""
    settings = small_config(model=SETTINGS.model, optim=config.Optim(warmup_steps=1, accumulate=4))
    parts = dry_run.plan(settings)
    whole, parted = (each["train"]["operations"] for each in (plan, parts))
    assert whole < parted < 1.5 * whole


def test_sizes_of_data_that_are_not_read():
    known = dry_run.sized(SETTINGS, "v5e:4x4")
    assert (len(known.train), known.num_classes, known.channels) == (1437, 10, 1)
    assert dry_run.sized(SETTINGS) is None
    for path in config.BUNDLED.glob("[a-z]*.py"):  # without data, from a folder that has none
        if path.stem not in ("digits", "mixer", "my_images"):
            assert dry_run.sized(config.bundled(path.stem)) is not None, path.stem
    given = dry_run.sized(SETTINGS, size=[500, 50, 7, 3])
    assert (len(given.evaluation), given.num_classes) == (50, 7)
    other = small_config(data=config.Data(name="mine"))
    with pytest.raises(
        ValueError, match="the size of config.data.name='mine' is not known.*--data_size="
    ):
        dry_run.sized(other, "v5e:4x4")


def test_bytes_of_collectives():
    text = "a = f32[2,3]{1,0} all-reduce(x)\nb = (bf16[4]{0}, s8[5]{0}) all-gather-start(y)"
    assert dry_run.collectives(text) == {"all-reduce": (1, 24), "all-gather": (1, 13)}


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")
@pytest.mark.parametrize(("topology", "kind"), [("v5e:2x2", "TPU v5 lite"), ("v6e:2x2", "TPU v6")])
def test_a_run_is_compiled_for_tpus(topology, kind, tmp_path, monkeypatch):
    """With the kernels; libtpu does not know the tests' flags for CPUs."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    words = ["--config=digits", "--dry_run", f"--topology={topology}"]
    words.append("--config.attention.implementation=pallas")
    ((code, out, err),) = commands.start_all([["vit.train", f"--workdir={tmp_path}", *words]])
    assert code == 0, err
    assert f"devices: 4 x {kind}" in out
    assert "attention with features: kernel" in out
    assert out.rstrip().endswith("fits")
    assert float(re.search(r"all-reduce: \d+, ([0-9.]+) MiB", out)[1]) > 4 * 200_000 / 2**20


WARMUP = {"imagenet": 10_000, "imagenet_scenic": 10_000, "simrf": 10_000}
WARMUP |= {"vit_s16_imagenet": 10_000, "simrf:inaturalist2021": 10_000}
WARMUP |= {"simrf:places365": 10_000}


def test_bundled_configs_warm_up_as_published_and_train_for_any_number_of_epochs():
    """The warm-up is a share of the run; `--config.num_epochs=1` was refused by ten of eleven."""
    names = [path.stem for path in config.BUNDLED.glob("[a-z]*.py") if path.stem != "my_images"]
    for name in [*names, *(name for name in WARMUP if ":" in name)]:
        settings = config.bundled(name)
        dataset = dry_run.sized(settings) or data.load(settings.data)
        _, num_steps = run_of(settings, dataset).length
        if name in WARMUP:
            rate, steps = optim.schedule(settings.optim, num_steps), WARMUP[name]
            assert rate(steps - 1) < settings.optim.learning_rate, name
            assert rate(steps) == pytest.approx(settings.optim.learning_rate), name
        settings.num_epochs = 1.0
        _ = run_of(settings, dataset).rate
