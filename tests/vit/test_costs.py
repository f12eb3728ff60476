"""Operations against what XLA counts."""

import math
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from flax import nnx

from performer import Exact
from performer.linearization import costs
from performer.linearization.report import Recipe
from performer.testing import reference_attention
from tests.support.small import shapes, small_config
from tests.support.tiers import tiers
from vit import config, convert, train
from vit.config import arguments
from vit.model import classification
from vit.speed import attention, hour, lengths, photographs, pytorch, recipes
from vit.speed.baselines import IMPLEMENTATIONS, inputs
from vit.study import harness

RESULTS = Path(__file__).parents[2] / "experiments/results"
ACCELERATORS = "speed/accelerators/recipes"
BLOCKS = (config.Block(num_features=256), config.Block("softmax"))


@pytest.mark.parametrize(
    ("kind", "options"),
    tiers(
        [
            ("softmax", {"pooling": "attention", "activation": "swiglu", "registers": 40}),
            ("performer", {"pooling": "token+mean", "pre_logits": True, "blocks": BLOCKS}),
            ("performer", {"pooling": "mean", "exact_window": 32}),
        ],
        1,
    ),
)
def test_operations_are_those_that_xla_counts(kind, options):
    """XLA adds what is no product (normalisation, exponentials); attention is half of the rest."""
    options = dict(options)
    own = {name: options.pop(name) for name in ("blocks", "exact_window") if name in options}
    settings = small_config(
        model=config.Model("XS/4", depth=2, **options),
        attention=config.Attention(kind, num_features=256, **own),
        data=config.Data(image_size=64),
    )
    graph, state = nnx.split(shapes(settings, 10, 3))
    images = jax.ShapeDtypeStruct((2, 64, 64, 3), jnp.float32)
    compiled = jax.jit(lambda s, x: nnx.merge(graph, s)(x)[0]).lower(state, images).compile()
    counted = compiled.cost_analysis()["flops"] / 2
    ours = classification.forward_flops(settings, num_classes=10, channels=3)
    chunks = 3 if "exact_window" in own else 1  # what the chunks of a window add is not counted
    assert 0.85 * counted < chunks * ours
    assert ours < 1.02 * counted


def test_operations_of_features_by_hand():
    """17 tokens of width 64: features and sums of queries and of keys, each 2 n m w, by layer."""

    def operations(**attention):
        model = config.Model("XS/2", depth=3, width=64, num_heads=2, pooling="token")
        settings = small_config(model=model, attention=config.Attention(**attention))
        return classification.forward_flops(settings, num_classes=10, channels=1)

    exact, few, many = (operations(kind="softmax"), *(operations(num_features=m) for m in (8, 24)))
    assert many - few == 3 * 4 * 2 * 17 * 16 * 64
    assert exact - few == 3 * (2 * 2 * 17 * 17 * 64 - 4 * 2 * 17 * 8 * 64)
    near = operations(num_features=8, exact_keys=4) - few
    assert near == 3 * 2 * 2 * 17 * 4 * 64


@pytest.mark.parametrize("name", ["public", "public, causal"])
def test_the_published_baseline_is_the_published_estimate(name):
    """Values against float64, gradients against differences: the benchmark times what it names."""
    *tokens, frequencies, gradient = inputs(tokens=24, heads=2, batch=2)
    causal = "causal" in name
    public = partial(IMPLEMENTATIONS[name], frequencies=frequencies)
    got, pull = jax.vjp(public, *tokens)
    exact = partial(reference_attention, features=frequencies, is_causal=causal, with_epsilon=True)
    # One maximum over all keys, also of a causal query: the constant epsilon is relative to it.
    assert np.linalg.norm(got - exact(*tokens)) < 1e-5 * np.linalg.norm(got)
    along = [np.random.default_rng(i).standard_normal(x.shape) for i, x in enumerate(tokens)]
    ends = [
        np.vdot(
            gradient, exact(*(np.asarray(x) + s * y for x, y in zip(tokens, along, strict=True)))
        )
        for s in (1e-5, -1e-5)
    ]
    slope = sum(np.vdot(x, y) for x, y in zip(pull(gradient), along, strict=True))
    np.testing.assert_allclose(slope, (ends[0] - ends[1]) / 2e-5, rtol=1e-3)


@pytest.mark.parametrize("platform", costs.COSTS)
def test_coefficients_of_recipes_are_those_of_the_committed_times(platform):
    """They order recipes better than chance: of pairs that differ by a tenth, four of five."""
    folder = "benchmark/recipes/times" if platform == "cpu" else f"{ACCELERATORS}_{platform}"
    rows = harness.read(RESULTS / f"{folder}.csv")
    for fit, known in zip(recipes.coefficients(rows), costs.COSTS[platform], strict=True):
        got = [fit[name] for name in known._fields]
        np.testing.assert_allclose(known, got, rtol=0.01, atol=0.01)
        assert fit["pairs ordered alike"] > 0.8


def test_coefficients_of_recipes_are_found_again():
    """From costs that have them exactly, with a length of other costs that no pair crosses."""
    known, rows = costs.Cost(5.0, 2.0, 0.5, 30.0, 1.5), []
    for recipe in recipes.RECIPES[False]:
        sizes = {"m": recipe.num_features, "window": 0, "exact keys": recipe.exact.keys}
        cost = float(np.dot(known, costs.terms(recipe, is_causal=False)))
        rows.append({"tokens": 577, "attention": "all keys", "cost": cost} | sizes)
    fit, _ = recipes.coefficients(rows + [x | {"attention": "causal"} for x in rows])
    np.testing.assert_allclose([fit[name] for name in known._fields], known, rtol=1e-6)
    assert fit["pairs ordered alike"] == 1
    window = Recipe(8, Exact(16, first=1))
    assert costs.terms(window, is_causal=True) == (1, 8, 0, 1, 33)
    assert costs.terms(window, is_causal=False) == (1, 8, 0, 1, 49)


@pytest.mark.thorough
def test_recipes_are_timed(monkeypatch):
    """A row for each, with the cost relative to softmax of the same attention."""
    monkeypatch.setattr(recipes, "LENGTHS", (40,))
    some = {False: [Recipe(16, Exact(keys=4))], True: [Recipe(0, Exact(8, first=1))]}
    monkeypatch.setattr(recipes, "RECIPES", some)
    rows = recipes.measured(repeats=1)
    sizes = [(row["attention"], row["m"], row["window"], row["exact keys"]) for row in rows]
    alone = [("all keys", "", "", ""), ("causal", "", "", "")]
    assert sizes == [alone[0], ("all keys", 16, 0, 4), alone[1], ("causal", 0, 8, 0)]
    assert [rows[0]["cost"], rows[2]["cost"]] == [40, 40]
    ratio = rows[3]["time, ms"] / rows[2]["time, ms"]
    assert rows[3]["cost"] == pytest.approx(40 * ratio)


@pytest.mark.thorough
def test_lengths_are_timed_once_and_only_if_the_values_are_right(tmp_path, monkeypatch):
    """Against float64: attention that sees the future is found, and the second run adds nothing."""
    monkeypatch.setattr(lengths, "TOKENS", 32)
    monkeypatch.setattr(lengths, "CHECKED", 9)
    monkeypatch.setitem(IMPLEMENTATIONS, "exact, causal", IMPLEMENTATIONS["exact"])
    table = lengths.measure((8, 16), tmp_path, math.inf)
    rows = harness.read(tmp_path / "lengths_cpu.csv")
    errors = {r["implementation"]: r["relative error"] for r in rows if r["pass"] == "values"}
    assert max(errors.pop("ours"), errors.pop("ours, causal"), errors.pop("exact")) < 3e-6
    assert errors["exact, causal"] > 0.1
    names = [row["implementation"] for row in rows if row["time, ms"] != ""]
    assert sorted(set(names)) == ["exact", "ours", "ours, causal"]
    assert len(names) == 3 * 2 * 2
    assert [line.split(" | ")[1] for line in table.splitlines()[2:]] == ["exact"] * 2
    assert lengths.measure((8, 16), tmp_path, math.inf) == table
    assert harness.read(tmp_path / "lengths_cpu.csv") == rows


@pytest.mark.thorough
def test_the_gpu_hour_goes_on_where_it_stopped(tmp_path, monkeypatch):
    """Rehearsed on a CPU: nothing after the deadline; the second command measures what is missing.

    Windows are compared with float64.
    """
    monkeypatch.setattr(lengths, "TOKENS", 32)
    monkeypatch.setattr(lengths, "CHECKED", 40)
    monkeypatch.setattr(hour, "demo", lambda *_: {"accuracy": 0.5, "seconds": 1.0})
    monkeypatch.setattr(hour, "step", lambda *_: dict.fromkeys(hour.STEP, 1.0))
    hour.measure(tmp_path, minutes=0, quick=True)
    assert not (tmp_path / "values.csv").exists()
    hour.measure(tmp_path, minutes=10, quick=True)

    def csvs():
        """All but the speed-ups, whose digits are computed from rounded rows the second time."""
        paths = [x for x in tmp_path.rglob("*.csv") if not x.stem.startswith("speedups")]
        return {str(x.relative_to(tmp_path)): harness.read(x) for x in paths}

    read = csvs()
    names = {"values.csv", "lengths_cpu.csv", "windows/lengths_cpu.csv", "vit.csv", "demo.csv"}
    assert names <= set(read)
    for row in read["values.csv"]:
        assert max(row["output"], row["gradients"]) < hour.BOUNDS["bfloat16"], row
        assert row["path"] == "blocked, no kernel for a CPU"
    errors = [r["relative error"] for r in read["windows/lengths_cpu.csv"] if r["pass"] == "values"]
    assert len(errors) == 4
    assert max(errors) < 3e-6
    monkeypatch.setattr(hour, "value", lambda *_: pytest.fail("measured again"))
    monkeypatch.setattr(lengths, "program", None)
    hour.measure(tmp_path, minutes=10, quick=True)
    assert csvs() == read


RUN = """
import json, pathlib, sys, time
folder, is_softmax = pathlib.Path(sys.argv[1]), sys.argv[2] == "softmax"
folder.mkdir(parents=True, exist_ok=True)
if not is_softmax and sys.argv[3] == "too long":
    time.sleep(60)
step = 40 if is_softmax else 10
for i, accuracy in enumerate([0.2, 0.5, 0.7] if is_softmax else [0.1, 0.4, 0.6], 1):
    records = {"images_per_second": 9.0 * i}, {"eval_accuracy": accuracy}
    with open(folder / "metrics.jsonl", "a") as log:
        for record in records:
            print(json.dumps(record | {"step": i, "epoch": i, "seconds": step * i}), file=log)
"""
"""A run of `vit.train`, as far as its log is read; with features it can take too long."""


def test_photographs_to_equal_accuracy(tmp_path, monkeypatch):
    """A run is stopped when time is up, and the same command goes on; the lower best accuracy."""
    duration, compared = "too long", []

    def command(case, data, runs, quick):
        where = str(photographs.folder(runs, case))
        return [sys.executable, "-c", RUN, where, case["attention"], duration]

    monkeypatch.setattr(photographs, "command", command)
    monkeypatch.setattr(photographs, "compare_conversion", lambda *x: compared.append(x))
    with pytest.raises(ValueError, match="prepare the photographs"):
        photographs.measure(tmp_path / "nothing", tmp_path / "out", 1, True)
    out = tmp_path / "out"
    photographs.measure(tmp_path, out, 0.05, True)
    trained = harness.read(out / "trained.csv")
    assert [(r["pixels"], r["attention"]) for r in trained] == [(16, "softmax"), (32, "softmax")]
    assert not (out / "equal.csv").exists()
    assert not compared
    duration = "short"
    photographs.measure(tmp_path, out, 1, True)
    rows = harness.read(out / "equal.csv")
    assert [(r["accuracy reached"], r["seconds until then"]) for r in rows] == [
        (0.6, 120),
        (0.6, 30),
    ]
    assert (out / "curves.png").exists()
    trained = harness.read(out / "trained.csv")
    assert [(r["accuracy"], r["images/s"]) for r in trained] == [(0.7, 27), (0.7, 27), (0.6, 27)]
    assert compared == [(out / "runs/32-softmax", out / "runs/32-performer", out, 32)]


@pytest.mark.parametrize("quick", [False, True])
def test_photographs_go_on_from_the_low_resolution(quick, tmp_path):
    """Flags are read as `vit.train` does: runs at 224 pixels begin with the first one's arrays."""
    folder, found = tmp_path / "my pictures", []
    for case in photographs.cases(quick):
        words, values = photographs.command(case, folder, folder, quick), flags.FlagValues()
        parameters = arguments.define(train.main, None, values)
        arguments.parse_flags(words[2:], values)
        named = arguments.given(parameters, (), None, values)[1]
        settings = named["config"]
        config.validate(settings)
        found.append((named["workdir"].name, named["init_from"], settings.attention.kind))
        sizes = settings.data.image_size, settings.data.eval_resize
        assert sizes[0] == case["pixels"] <= sizes[1] <= 224
        assert settings.data.dir == str(folder)
    (start, none, kind), softmax, features = found
    assert (none, kind) == (None, "softmax")
    assert [x[1:] for x in (softmax, features)] == [
        (folder / start, kind) for kind in photographs.KINDS
    ]
    values = flags.FlagValues()
    arguments.define(convert.main, None, values)
    sizes = [f"--{x}" for x in photographs.SIZES.split()]
    arguments.parse_flags(["convert", "--workdir=run", *sizes], values)


def test_pytorchs_times_are_compared_with_those_of_the_same_pass(monkeypatch):
    """With times that tell the rows apart: 16 ms, 32 with the backward pass, causal 64 and 128."""
    ours = [
        {"implementation": name, "pass": which, "shape": f"1x16x{heads}x64", "wall, ms": ms}
        for heads in (12, 4)
        for name, which, ms in (
            ("ours", attention.FORWARD, 16.0),
            ("ours", attention.BOTH, 32.0),
            ("ours, causal", attention.FORWARD, 64.0),
            ("ours, causal", attention.BOTH, 128.0),
        )
    ]
    both = {attention.FORWARD: 0.064, attention.BOTH: 0.256}
    monkeypatch.setattr(pytorch, "seconds", lambda *_: {"exact": both, "exact, causal": both})
    monkeypatch.setattr(attention, "SIZES", ((16, 12), (16, 4)))
    rows, times = attention.pytorch_rounds(ours, attention.Scale(2, 1))
    assert [x["measured"] for x in rows] == [4.0, 8.0, 1.0, 2.0] * 2
    assert rows[0]["quantity"] == "time: PyTorch, exact / ours"
    assert [x["wall, ms"] for x in times] == [64.0, 256.0, 64.0, 256.0] * 2
    assert all(x.keys() == ours[0].keys() for x in times)
