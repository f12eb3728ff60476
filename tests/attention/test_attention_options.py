"""Every option of attention, calibration and the Flax layer with every other one, pair by pair.

Shapes whose sizes all differ, each array closed over and traced, eagerly and under `jit`, against
float64 oracles that share no code with the package. Rows of attention that have 79% of the
pairs are in the core, rows with 98% in both tiers. The others are in the slow tier, with the
fuzzer, which draws options and shapes at random for `FUZZ_MINUTES`.
"""

import dataclasses
import inspect
import itertools
import os
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from performer import Bias, Exact, Features, features, performer_attention
from performer.attention import State, attention_weights, refusals, sizes, stream
from performer.attention.values import Call
from performer.calibration import Calibration, calibrate, pair_moments, parts
from performer.nnx import PerformerAttention
from performer.testing import reference
from tests.support import oracles
from tests.support.attention_inputs import (
    OF_FEATURES,
    by_keywords,
    feature_map,
    oracle,
    ours,
    ours_streamed,
)
from tests.support.covering import covering_array, random_row
from tests.support.tiers import tiers

MINUTES = float(os.environ.get("FUZZ_MINUTES", "2"))
SEED = int(os.environ.get("FUZZ_SEED", "0"))
ARRAY = ("none", "closed over", "traced")
FACTORS = {
    "jit": (True, False),
    "tokens": ("closed over", "traced"),
    "frequencies": ("closed over", "traced"),
    "heads of the frequencies": ("none of 2", "key of 1", "key of 2", "query of 2"),  # grouped
    "order": ("t < s", "t = s", "causal t = s", "causal t < s", "t > s", "causal t > s"),
    "mask": ARRAY,
    "kind of mask": ("(b, 1, 1, s) bool", "(b, 1, 1, s) float", "(s,) bool"),
    "lengths": ARRAY,
    "keys": ("none", "keys traced", "heads closed over", "one for all closed over"),
    "segments": ("none", "same traced", "pair closed over", "pair traced"),
    "weights": ("none", "one traced", "heads closed over"),
    "calibration": ("none", "one closed over", "heads traced", "shift of heads traced"),
    "scale": (None, 0.3),
    "feature_map": ("positive", "hyperbolic", "trigonometric", "relu", "elu+1", "own"),
    "implementation": (None, "blocked", "robust"),
    "state": ARRAY,
    "streams": (False, True),
    "return_residual": (False, True),
    "batch": ("one axis", "none", "two axes"),
    "dtype": ("float32", "bfloat16 values", "float16", "float64"),
    "exact": (Exact(), Exact(window=2), Exact(window=3, first=2), Exact(window=99)),
    "exact_rows": (0, 2),
    "exact_keys": (0, "some"),
    "place": ("none", "slopes closed over", "decay of keys traced", "decay of queries closed over"),
    "query_frequencies": ARRAY,
    "run": ("whole", "pieces", "tokens", "two devices"),
}
ARGUMENTS = {
    **{
        "tokens": {"query", "key", "value"},
        "order": {"is_causal"},
        "lengths": {"key_value_seq_lengths"},
    },
    **{"segments": {"segment_ids"}, "exact": {"exact_window", "exact_first"}},
    **{"place": {"slopes", "decay"}, "run": {"axis_name"}, "streams": set()},
}
"""Keywords that a factor gives to attention (`by_keywords`), where its name is another."""
MORE = {
    "heads of the frequencies": (*FACTORS["heads of the frequencies"], "none of 1"),
    "keys": (*FACTORS["keys"], "heads traced"),
    "segments": (*FACTORS["segments"], "same closed over"),
    "weights": ("none", "one closed over", "one traced", "heads closed over", "heads traced"),
    "calibration": (*FACTORS["calibration"], "one traced", "heads closed over", "shift traced"),
    "dtype": (*FACTORS["dtype"], "bfloat16"),
    "place": (*FACTORS["place"], "slopes traced", "decay of queries traced"),
}
"""Levels that only the fuzzer draws."""
NEUTRAL = ("none", "exact", "whole", False, 0, Exact())
NOT_HERE = {
    # (factor, what its level has in it): another factor, its levels that these tests can express
    ("weights", "heads"): ("heads of the frequencies", ("key of 1", "key of 2", "query of 2")),
    ("segments", "same"): ("order", ("t = s", "causal t = s")),
    ("exact_keys", "some"): ("feature_map", ("positive", "hyperbolic")),  # others may have signs
    ("run", "pieces"): ("order", ("causal t = s",)),
    ("run", "tokens"): ("order", ("causal t = s",)),
    ("run", "devices"): ("order", ("t = s", "causal t = s")),
    ("run", "two"): ("jit", (True,)),
}
UNCUT = ("lengths", "segments", "state", "streams", "return_residual")
"""No sequence in pieces or on two devices has them here."""
APART = [
    *(("run", factor) for factor in UNCUT),
    *(("exact", factor) for factor in ("state", "streams")),  # `WindowState`
    *(("place", factor) for factor in ("state", "streams")),
    ("query_frequencies", "state"),
    *(("return_residual", factor) for factor in ("state", "streams")),
    *(("segments", factor) for factor in ("state", "streams")),
]
"""Pairs of options for which there is no oracle here, or a test of its own."""


def call_of(levels):
    """The call of these levels, as the table of refusals sees it."""
    order, place = levels.get("order", "t = s"), levels.get("place", "none")
    run, segments = levels.get("run", "whole"), levels.get("segments", "none")
    calibration, exact = levels.get("calibration", "none"), levels.get("exact", Exact())
    streams = [levels.get(x, False) not in NEUTRAL for x in ("state", "streams")]
    in_pieces = run in ("pieces", "tokens")
    return Call(
        t=7 if ">" in order or "=" in order else 5,
        s=7 if "<" in order or "=" in order else 5,
        feature_map=features.get(feature_map(levels.get("feature_map", "positive"))),
        residual=levels.get("return_residual", False),
        is_causal="causal" in order or in_pieces,
        exact=exact._replace(
            keys=int(levels.get("exact_keys") == "some"), rows=levels.get("exact_rows", 0)
        ),
        calibrated=calibration != "none",
        sampled=calibration != "none" and "shift" not in calibration,
        learned=levels.get("query_frequencies", "none") != "none",
        lengths=levels.get("lengths", "none") != "none",
        packed=segments != "none",
        cross_packed="pair" in segments,
        decayed=place != "none",
        streams=in_pieces or any(streams),
        axis_name="s" if run == "two devices" else None,
    )


def excluded(one, other):
    """True for pairs that are refused, traced without `jit`, or have no oracle here."""
    for (factor, level), (another, its) in ((one, other), (other, one)):
        if factor == "jit" and level is False and str(its).endswith("traced"):
            return True
        for (name, word), (required, levels) in NOT_HERE.items():
            has = level not in NEUTRAL and word in str(level)
            if factor == name and has and another == required and its not in levels:
                return True
        if (factor, another) in APART and level not in NEUTRAL and its not in NEUTRAL:
            return True
    return refusals.reason(call_of(dict((one, other)))) is not None


PLAIN = {name: levels[0] for name, levels in FACTORS.items()}
PAIRS = covering_array(FACTORS, excluded)
CASES = PAIRS + [
    # A pair may be covered by pieces alone, which work another way: whole sequences, too.
    PLAIN | {"order": "causal t = s", "exact": exact, "place": place}
    for exact in FACTORS["exact"][1:]
    for place in FACTORS["place"]
]
LATE = range(60, len(PAIRS))
ROWS = tiers([x for x in range(len(CASES)) if x not in LATE], [*range(16), 18, 20, 21, 39])
ROWS += [pytest.param(x, marks=pytest.mark.slow) for x in LATE]
EXACT = {
    # The chosen keys depend on all the others.
    "calibrated": {"exact_keys": "some", "order": "t < s", "calibration": "heads traced"}
    | {"heads of the frequencies": "query of 2"},
    "masked": {"exact_keys": "some", "order": "t > s", "mask": "traced", "exact_rows": 2}
    | {"implementation": "blocked"},
    "window": {"exact_keys": "some", "order": "t = s", "exact": Exact(window=2)}
    | {"lengths": "traced", "exact_rows": 2},
    "more rows than queries": {"exact_rows": 9},
    "float16": {"exact_rows": 2, "dtype": "float16", "calibration": "one traced"},
}


class Sizes(dict):
    """b, k, t, s, h, v, m and the norms of a case."""

    __getattr__ = dict.__getitem__


def sizes_of(case, rng=None):
    """Sizes that all differ, or random ones."""
    short, long = (5, 7) if rng is None else sorted(map(int, rng.integers(1, 14, 2)))
    if rng is None:
        sizes = dict(k=3, h=4, v=2, m=6, scale=1.0)
        sizes["block"] = {"one axis": (2, 4), "none": (3, 3), "two axes": (5, 15)}[case["batch"]]
    else:
        chunk = int(rng.integers(1, 6))
        sizes = {name: int(rng.integers(1, 7)) for name in "khvm"}
        sizes["scale"] = float(rng.choice([0.1, 1.0, 3.0]))
        sizes["block"] = (chunk, chunk * int(rng.integers(1, 4)))
    order = case["order"]
    if "<" in order and short == long:
        long += 1
    t, s = (short, long) if "<" in order else (long, short) if ">" in order else (long, long)
    if ">" in order and t == s:
        t += 1
    if case["run"] == "two devices":
        t = s = 12
    lead = {"none": (), "one axis": (2,), "two axes": (2, 1)}[case["batch"]]
    if rng is not None:
        lead = tuple(int(rng.integers(1, 4)) for _ in lead)
    groups = int(case["heads of the frequencies"][-1])
    return Sizes(sizes, t=t, s=s, lead=lead, b=int(np.prod(lead)), n=sizes["k"] * groups)


def arrays_of(case, size, rng):
    """All arrays of a case, those of its options None where it has none."""
    n, k, h, m, v, s = size.n, size.k, size.h, size.m, size.v, size.s
    given = {name for name, level in case.items() if level not in NEUTRAL}

    def normal(*shape, scale=1.0):
        return (scale * rng.normal(size=shape)).astype(np.float32)

    def per_head(name, heads, *shape):
        return (heads, *shape) if "heads" in str(case[name]) else shape

    kind = case["heads of the frequencies"].split()[0]
    of_frequencies = {"none": (), "key": (k,), "query": (n,)}[kind]
    arrays = dict(
        query=normal(size.b, size.t, n, h, scale=size.scale),
        key=normal(size.b, s, k, h, scale=size.scale),
        value=normal(size.b, s, k, v),
        frequencies=normal(*of_frequencies, m, h),
    )
    dtype = case["dtype"].split()[0]
    for name, x in arrays.items():
        narrow = case["dtype"] == "float64" and name == "frequencies"  # as couplings draw them
        if not narrow and (case["dtype"] != "bfloat16 values" or name == "value"):
            arrays[name] = x.astype(jnp.dtype(dtype))
    if "mask" in given:
        of_mask = (1, s) if case["kind of mask"] == "(s,) bool" else (size.b, s)
        arrays["mask"] = rng.random(of_mask) < 0.7
        arrays["mask"][0, 2 : rng.choice([2, 6])] = False  # whole chunks, too
    if "lengths" in given:
        arrays["lengths"] = rng.integers(0, s + 1, size.b)
    if "keys" in given:
        level = case["keys"].split()[0]
        of_keys = {"keys": (size.b, s, 1), "heads": (size.b, s, k), "one": (1, s, 1)}[level]
        # Features of relu may be 0: in float32 they lose keys below e^-80 of the heaviest.
        spread = rng.choice([1.0, 10.0 if case["feature_map"] == "relu" else 200.0])
        log_weights = np.where(rng.random(of_keys) < 0.2, -np.inf, normal(*of_keys, scale=spread))
        arrays["log_weights"] = log_weights.astype(np.float32)
    if "segments" in given:
        pair = [rng.integers(0, 3, (size.b, x)) for x in (size.t, s)]
        arrays["segments"] = pair[:1] * 2 if "same" in case["segments"] else pair
    if "weights" in given:
        heads = of_frequencies if "heads" in case["weights"] else ()
        arrays["weights"] = rng.choice([0.0, 1e-5, 1.0, 2.0], (*heads, m)).astype(np.float32)
        arrays["weights"][..., 0] = 1.0
    if "calibration" in given:
        scale = np.eye(h) + normal(*per_head("calibration", k, h, h), scale=0.15)
        scale = scale @ scale.swapaxes(-1, -2)
        arrays["calibration"] = [
            np.asarray(x, np.float32)
            for x in (
                normal(*per_head("calibration", k, h), scale=0.4),
                scale,
                np.linalg.inv(scale),
                normal(*per_head("calibration", k, h), scale=0.4),
                np.eye(h) + normal(*per_head("calibration", k, h, h), scale=0.15),
            )
        ]
        if "shift" in case["calibration"]:
            same = (None, np.eye(h), np.eye(h), np.zeros(h), np.eye(h))
            arrays["calibration"][1:] = same[1:]
    if "state" in given:
        arrays["earlier"] = normal(size.b, 4, k, h, scale=size.scale), normal(size.b, 4, k, v)
    if "query_frequencies" in given:
        arrays["query_frequencies"] = arrays["frequencies"] + normal(
            *of_frequencies, m, h, scale=0.3
        )
    if "slopes" in case["place"]:
        arrays["slopes"] = rng.choice([0.0, 0.1, 1.0, 9.0], n).astype(np.float32)
    if "decay" in case["place"]:
        of_decay = size.b, size.t, k if "keys" in case["place"] else n
        decay = -rng.exponential(0.3, of_decay).astype(np.float32)
        arrays["decay"] = np.where(rng.random(of_decay) < 0.05, -np.inf, decay)
    return arrays


def of_reference(case, arrays):
    """Keywords of the reference, which takes those of `performer_attention`."""
    names = ("weights", "slopes", "decay", "query_frequencies", "earlier")
    options = {name: arrays.get(name) for name in names}
    if "calibration" in arrays:
        options["calibration"] = Calibration(*arrays["calibration"])
    if "mask" in arrays:
        options["mask"] = arrays["mask"][:, None, None]
    if "segments" in arrays:
        options["segment_ids"] = tuple(arrays["segments"])
    return options | dict(
        key_value_seq_lengths=arrays.get("lengths"),
        keys=arrays.get("log_weights"),
        feature_map=oracles.own_features if case["feature_map"] == "own" else case["feature_map"],
        is_causal="causal" in case["order"],
        with_bound=True,
        scale=case["scale"],
    )


def in_package(case, size, arrays):
    """The arrays as `performer_attention` takes them: NaN at masked keys, batch axes."""

    def batched(x):
        return x.reshape((*size.lead, *x.shape[1:]))

    same = ("frequencies", "weights", "query_frequencies", "slopes")
    given = {name: arrays[name] for name in same if name in arrays}
    exists = oracle_log_weights(arrays, size)[..., None] > -np.inf
    for name in ("key", "value"):
        x = np.where(exists, arrays[name], np.asarray(np.nan, arrays[name].dtype))
        given[name] = batched(x)
    given["query"] = batched(arrays["query"])
    if "mask" in arrays:
        kind, mask = case["kind of mask"], arrays["mask"]
        mask = mask[0] if kind == "(s,) bool" else mask.reshape(*size.lead, 1, 1, size.s)
        given["mask"] = mask.astype(np.float32) if "float" in kind else mask
    if "lengths" in arrays:
        given["key_value_seq_lengths"] = batched(arrays["lengths"]).astype(np.int32)
    if "log_weights" in arrays:
        log_weights, level = arrays["log_weights"], case["keys"]
        log_weights = log_weights[0] if "one for all" in level else batched(log_weights)
        given["keys"] = log_weights if "heads" in level else log_weights[..., 0]
    if "segments" in arrays:
        ids = [batched(x).astype(np.int32) for x in arrays["segments"]]
        given["segment_ids"] = ids[0] if "same" in case["segments"] else tuple(ids)
    if "calibration" in arrays:
        leaves = arrays["calibration"]
        only_shift = "shift" in case["calibration"]
        given["calibration"] = Calibration(*leaves[: 1 if only_shift else 5])
    if "decay" in arrays:
        given["decay"] = batched(arrays["decay"])
    if "earlier" in arrays:
        given["state"] = State(*state_of(case, size, arrays, *arrays["earlier"]))
    return given


def oracle_log_weights(arrays, size):
    """Mask, lengths and log-weights of keys in one, (b, s, k)."""
    exists = np.ones((size.b, size.s), bool)
    if "mask" in arrays:
        exists &= arrays["mask"]
    if "lengths" in arrays:
        exists &= np.arange(size.s) < arrays["lengths"][:, None]
    of_keys = np.broadcast_to(arrays.get("log_weights", 0.0), (size.b, size.s, size.k))
    return np.where(exists[..., None], of_keys, -np.inf)


def state_heads(case, size):
    """A state for each key head, or for each query head that has frequencies of its own."""
    return size.n if "query" in case["heads of the frequencies"] else size.k


def options_of(case, arrays):
    """What both the oracle and the oracle of states take."""
    names = ("weights", "calibration")
    return dict(scale=case["scale"], feature_map=case["feature_map"]) | {
        name: arrays.get(name) for name in names
    }


def state_of(case, size, arrays, key, value):
    heads, none = state_heads(case, size), np.zeros(key.shape[:3])
    state = oracles.key_state(
        key, value, arrays["frequencies"], heads, none, **options_of(case, arrays)
    )
    dtype = np.float64 if case["dtype"] == "float64" else np.float32
    return [x.reshape(*size.lead, *x.shape[1:]).astype(dtype) for x in state]


UNITS = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11}


def product(query, key, value, features, **options):
    """Attention by its matrix; values of keys that do not exist may be NaN."""
    weights = attention_weights(query, key, features, **options)
    value = jnp.nan_to_num(value)
    *lead, n, t, s = weights.shape
    weights = weights.astype(value.dtype).reshape(*lead, value.shape[-2], -1, t, s)
    rows = jnp.einsum("...kgts,...skv->...tkgv", weights, value, precision="highest")
    return rows.reshape(*lead, t, n, value.shape[-1])


by_matrix = partial(by_keywords, product)


def off(case, size, rng, attend=ours):
    """How far attention is from the oracle, over what the dtype explains: below 1.

    Under strict promotion; float64 tokens stand beside frequencies and options in float32.
    """
    strict = jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise")
    with jax.enable_x64(case["dtype"] == "float64"), strict[0], strict[1]:
        return _off(case, size, rng, attend)


def _off(case, size, rng, attend):
    arrays = arrays_of(case, size, rng)
    unit = UNITS.get(case["dtype"], 2.0**-8)
    tokens = [arrays[name] for name in ("query", "key", "value", "frequencies")]
    options, keys, chosen = of_reference(case, arrays), 0, None
    if case["exact_keys"]:
        units = np.broadcast_to(np.eye(size.s)[:, None], (size.b, size.s, size.k, size.s))
        matrix, off_by = oracle(*tokens[:2], units, tokens[3], **options)
        heads, off_by = state_heads(case, size), FAR * unit * off_by
        keys, chosen = oracles.heaviest(matrix, off_by, heads)
    near = dict(zip(("exact_window", "exact_first"), case["exact"][:2], strict=True))
    near |= dict(exact_rows=case["exact_rows"])
    given = {
        name: jax.tree.map(jnp.asarray, x) for name, x in in_package(case, size, arrays).items()
    }
    static = dict(
        is_causal="causal" in case["order"],
        **{name: case[name] for name in ("scale", "implementation")},
        feature_map=feature_map(case["feature_map"]),
        exact_keys=keys,
        **near,
    )
    factor_of = {name: factor for factor, names in ARGUMENTS.items() for name in names}
    level_of = {name: case[factor_of.get(name, name)] for name in given}
    traced = {name: x for name, x in given.items() if "traced" in level_of[name]}
    closed = {name: x for name, x in given.items() if name not in traced}

    has_state = case["streams"] or case["state"] != "none"
    if case["return_residual"]:
        static["return_residual"] = True

    def run_with(traced):
        return run(case["run"], size, closed | traced, static, has_state, attend)

    blocks = {"blocked": size.block, "robust": size.block}.get(case["implementation"])
    with pytest.MonkeyPatch.context() as patch:
        if blocks:
            patch.setattr(sizes, "chunk_and_block", lambda *_: blocks)
        got = (jax.jit(run_with) if case["jit"] else run_with)(traced)
    output, other = got if isinstance(got, tuple) else (got, None)
    assert output.dtype == given["value"].dtype
    residual = case["return_residual"]
    *wanted, bound = oracle(*tokens, **options, **near, exact_pairs=chosen, with_residual=residual)
    want = wanted[0]
    error = np.abs(np.asarray(output, np.float64).reshape(want.shape) - want).max(axis=-1)
    assert not np.any(np.isnan(error))
    bound = unit * (bound + 2 * np.abs(want).max(axis=-1)) + 1e-30
    # First order says nothing where the normaliser of signed features vanishes but for rounding:
    # the bound is above the values, or the output a hundred times as large as they are.
    largest = np.abs(arrays["value"].astype(np.float64)).max(initial=0)
    vanishes = (bound > largest) | (np.abs(want).max(axis=-1, initial=0) > 100 * largest)
    # Nor where all features of relu are 0: rounded to bfloat16, a projection may be positive.
    vanishes |= (case["feature_map"] == "relu") & (unit > 2.0**-20) & (bound <= 1e-30)
    error = np.where(vanishes, 0, error)
    ratios = [np.where(error == 0, 0, error / bound).max()]
    if has_state:
        ratios.append(state_off(case, size, arrays, other, unit))
    if residual:
        ratios.append(residual_off(np.asarray(other, np.float64), wanted[1], bound, unit))
    return max(ratios)


TOKENS = {"query": -3, "key": -3, "value": -3, "mask": -1, "decay": -2}
"""The axis of the tokens."""


def run(how, size, arguments, static, has_state, attend):
    """Attention of the whole sequence, of pieces with their state, or on two devices."""

    def call(arguments, function=attend, **more):
        arguments = dict(arguments)
        tokens = [arguments.pop(name) for name in ("query", "key", "value", "frequencies")]
        return function(*tokens, **arguments, **static | more)

    if how == "whole":
        return call(arguments, ours_streamed if has_state else attend)
    axes = {name: x.ndim + TOKENS[name] for name, x in arguments.items() if name in TOKENS}
    if "keys" in arguments:
        axes["keys"] = 0 if arguments["keys"].ndim == 1 else len(size.lead)
    if how in ("pieces", "tokens"):
        outputs, state, sizes = [], None, set()
        ends = [0, 1, 4, size.t] if size.t > 4 else [0, 1, size.t]
        for start, end in itertools.pairwise(ends if how == "pieces" else range(size.t + 1)):
            part = {
                name: jax.lax.slice_in_dim(x, start, end, axis=axes[name]) if name in axes else x
                for name, x in arguments.items()
            }
            output, state = call(part, ours_streamed, state=state)
            outputs.append(output)
            sizes.add(tuple(x.shape for x in jax.tree.leaves(state)))
        assert len(sizes) == 1
        return jnp.concatenate(outputs, axis=-3)
    mesh = jax.make_mesh((2,), ("s",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = jax.tree.map(lambda x: jax.P(), arguments)
    specs |= {name: jax.P(*[None] * axis, "s") for name, axis in axes.items()}
    split = jax.shard_map(
        lambda arguments: call(arguments, axis_name="s"),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=jax.P(*[None] * (arguments["query"].ndim - 3), "s"),
    )
    return split(arguments)


def state_off(case, size, arrays, state, unit):
    """The same of the state, against the sizes of the exponents and of the sums."""
    maximum, normaliser, numerator = (
        np.asarray(x, np.float64).reshape(size.b, *x.shape[len(size.lead) :]) for x in state
    )
    key, value = (np.asarray(arrays[name], np.float64) for name in ("key", "value"))
    of_keys = oracle_log_weights(arrays, size)
    if "causal" in case["order"]:
        of_keys[:, size.t :] = -np.inf
    if "earlier" in arrays:
        key, value = (
            np.concatenate([x, y], axis=1)
            for x, y in zip(arrays["earlier"], (key, value), strict=True)
        )
        of_keys = np.concatenate([np.zeros((size.b, 4, size.k)), of_keys], axis=1)
    heads, options = state_heads(case, size), options_of(case, arrays)
    c, s, z = oracles.key_state(key, value, arrays["frequencies"], heads, of_keys, **options)
    # The maximum is that of the exponents: far above the features where their factors are 0.
    top = c if "log_weights" not in arrays else np.maximum(c, maximum)
    with np.errstate(invalid="ignore"):
        factor, theirs = (np.where(np.isinf(c), 0, np.exp(x - top)) for x in (maximum, c))
    known = np.abs(of_keys, where=np.isfinite(of_keys), out=np.zeros_like(of_keys)).max()
    # Of the exponents, generously.
    spread = np.abs(key).max() ** 2 * key.shape[-1] * 4 + 30 + known
    terms = key.shape[1] * (1 + np.abs(value).max(initial=0))
    errors = [
        normaliser * factor - s * theirs,
        numerator * factor[..., None] - z * theirs[..., None],
    ]
    return max(np.abs(x).max() for x in errors) / (unit * spread * terms)


def residual_off(got, want, bound, unit):
    """The same of the logarithm of normalisers, against the sizes of the exponents."""
    got, want = got.reshape(want.shape), np.where(np.isnan(want), -np.inf, want)  # signed features
    np.testing.assert_array_equal(np.isinf(got), np.isinf(want))
    finite = np.isfinite(want)
    error = np.abs(np.where(finite, got, 0) - np.where(finite, want, 0))
    return (error / (bound + unit * (20 + np.abs(np.where(finite, want, 0))))).max(initial=0)


KNOWN = 1e-5
"""Of the mean squares: float32 moments about zero know no covariance that is less, as where all
attention goes to one key. A calibration is then right for any attention, and not the oracle's."""
FAR = 4.0
"""Errors of first order over the bound stay below 1 but for sums over a few terms."""


def test_every_field_of_a_feature_map_differs_between_the_maps():
    """A new field fails here until a map of the covering array has another value."""
    maps = [features.get(feature_map(name)) for name in FACTORS["feature_map"]]
    for field in dataclasses.fields(features.FeatureMap):
        assert len({getattr(x, field.name) for x in maps}) > 1, field.name


def test_every_argument_of_attention_is_a_factor():
    of_calls = (set(inspect.signature(x).parameters) for x in (performer_attention, stream))
    fields = {x.name for kind in (Features, Bias) for x in dataclasses.fields(kind)}
    exact = {f"exact_{name}" for name in Exact._fields}
    arguments = set().union(*of_calls, fields, exact, {"slopes"}) - {"features", "bias", "exact"}
    assert set(OF_FEATURES) == fields - {"frequencies", "exact", "keys", "decay"}
    own = {"jit", "heads of the frequencies", "kind of mask", "batch", "dtype"}
    factors = [ARGUMENTS.get(factor, {factor}) for factor in FACTORS if factor not in own]
    assert set().union(*factors) == arguments - {"coupling", "trainable"}  # gradients: test_matrix


@pytest.mark.parametrize("number", ROWS)
def test_options(number, eight_devices):
    case = CASES[number]
    assert off(case, sizes_of(case), np.random.default_rng(number)) < FAR, case


@pytest.mark.parametrize("number", tiers(range(0, len(CASES), 2), range(0, 60, 12)))
def test_options_of_heads_one_after_another(number, monkeypatch, eight_devices):
    """Heads in groups, as on a CPU where the features of all do not fit (`sizes`)."""
    monkeypatch.setattr(sizes, "heads_at_once", lambda *_: 1)
    case = CASES[number]
    assert off(case, sizes_of(case), np.random.default_rng(number)) < FAR, case


@pytest.mark.parametrize("number", tiers(range(len(CASES)), range(0, 60, 5)))
def test_the_matrix_makes_the_output(number):
    """`attention_weights` with all options, but states, residuals and pieces."""
    whole = dict(run="whole", state="none", streams=False, return_residual=False)
    case = CASES[number] | whole
    assert off(case, sizes_of(case), np.random.default_rng(number), by_matrix) < FAR, case


@pytest.mark.parametrize("name", tiers(EXACT, ["calibrated", "masked", "more rows than queries"]))
def test_exact_keys_and_rows(name, eight_devices):
    case = PLAIN | EXACT[name]
    for attend in (ours, by_matrix):
        assert off(case, sizes_of(case), np.random.default_rng(0), attend) < FAR


# Calibration


OF_CALIBRATION = {
    "jit": (True, False),
    "tokens": ("closed over", "traced"),
    "mask": ("none", "closed over", "traced"),
    "kind of mask": ("(b, 1, 1, s)", "(s,)", "(b, 1, 1, s) float"),
    "is_causal": (False, True),
    "scale": (None, 0.3),
    "groups": (2, 1),
    "batch": ("one axis", "none", "two axes"),
    "num_queries": (None, 2, 99),
    "method": ("full", "shift", "shift+proposal", "scale+traceless"),
    "norm": (1.0, 1e4),
}


def calibration_off(case, b, t, s, k, h, rng):
    """How far moments and calibration are from their oracles, over what is allowed."""
    n = k * case["groups"]
    lead = {"none": (), "one axis": (b,), "two axes": (b, 1)}[case["batch"]]
    b = int(np.prod(lead))
    spread = rng.normal(size=(2, h, h))
    query, key = (
        ((rng.normal(size=(b, *shape, h)) @ matrix + 0.5) * 0.7).astype(np.float32)
        for shape, matrix in zip(((t, n), (s, k)), spread, strict=True)
    )
    query, key = case["norm"] * query, case["norm"] * key
    mask = None if case["mask"] == "none" else rng.random((b, s)) < 0.6
    options = dict(scale=case["scale"], is_causal=case["is_causal"])
    given = {name: x.reshape(*lead, *x.shape[1:]) for name, x in (("query", query), ("key", key))}
    if mask is not None:
        mask[:] = mask[:1] if case["kind of mask"] == "(s,)" else mask
        given["mask"] = mask[0] if case["kind of mask"] == "(s,)" else mask.reshape(*lead, 1, 1, s)
        if "float" in case["kind of mask"]:
            given["mask"] = given["mask"].astype(np.float32)
        junk = np.where(mask[..., None, None], key, np.float32(np.nan))
        given["key"] = junk.reshape(given["key"].shape)
    given = {name: jnp.asarray(x) for name, x in given.items()}
    levels = dict(query=case["tokens"], key=case["tokens"], mask=case["mask"])
    traced = {name: x for name, x in given.items() if levels[name] == "traced"}

    def both(traced):
        arguments = {name: x for name, x in given.items() if name not in traced} | traced
        moments = pair_moments(**arguments, **options, num_queries=case["num_queries"])
        return moments, calibrate(**arguments, **options, method=case["method"], coupling="orf")

    moments, fitted = (jax.jit(both) if case["jit"] else both)(traced)
    count = t if case["num_queries"] is None else min(case["num_queries"], t)
    positions = [(2 * i + 1) * t // (2 * count) for i in range(count)]
    of_all, want = (
        oracles.pair_moments(query, key, mask=mask, positions=some, **options)
        for some in (None, positions)
    )
    # At norms of 1e4 attention is the one largest key, and float32 knows the moments.
    ratios = [np.abs(moments - want).max() / (2e-6 * np.abs(want).max() + 1e-30)]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(fitted))
    for head in range(k):
        if of_all[head, 0, 0] == 0:
            continue
        mine = of_all[head] / of_all[head, 0, 0]
        squares, means = np.diag(mine)[1:].reshape(2, -1), mine[0, 1:].reshape(2, -1)
        if np.any((squares - means**2).sum(axis=1) < KNOWN * squares.sum(axis=1)):
            continue
        expected = oracles.calibration(mine, parts(case["method"], "orf"))
        got = [None if x is None else np.asarray(x[head], np.float64) for x in fitted]
        for x, y in zip((got[0], got[1], got[3]), expected[:3], strict=True):
            if x is not None:
                ratios.append(np.abs(x - y).max() / (2e-3 * np.abs(y).max() + 2e-3 * case["norm"]))
        if got[4] is not None:
            size = np.abs(expected[3]).max()
            ratios.append(np.abs(got[4] @ got[4].T - expected[3]).max() / (5e-3 * size))
    return max(ratios)


def never(one, other):
    return any(a == ("jit", False) and b[1] == "traced" for a, b in ((one, other), (other, one)))


CALIBRATIONS = covering_array(OF_CALIBRATION, never)


@pytest.mark.parametrize("number", tiers(range(len(CALIBRATIONS)), 8))
def test_options_of_calibration(number):
    case = CALIBRATIONS[number]
    assert calibration_off(case, 2, 6, 7, 3, 4, np.random.default_rng(number)) < 1, case


# The layer of Flax


OF_LAYER = {
    "jit": (True, False),
    "mask": ("none", "closed over", "traced"),
    "is_causal": (False, True),
    "calibration": ("full", "none"),
    "training": (True, False),
    "heads": ("each", "one for all"),
    "groups": (1, 2),
}
LAYERS = covering_array(OF_LAYER, never)


@pytest.mark.parametrize("number", tiers(range(len(LAYERS)), 4))
def test_options_of_the_layer(number):
    """Two calls: what the first measured is what the second uses, in training alone."""
    case, rng = LAYERS[number], np.random.default_rng(number)
    b, t, k, h, momentum = 2, 7, 3, 4, 0.75
    heads = k if case["heads"] == "each" else None
    options = dict(calibration=case["calibration"], momentum=momentum, num_queries=3)
    layer = PerformerAttention(6, h, coupling="orf", num_heads=heads, **options, rngs=nnx.Rngs(0))
    shapes = ((b, t, k * case["groups"], h), (b, t, k, h), (b, t, k, 2))
    tokens = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    exists = np.ones((b, t), bool) if case["mask"] == "none" else rng.random((b, t)) < 0.7
    exists[:, 0] = True
    mask = None if case["mask"] == "none" else jnp.asarray(exists[:, None, None])
    closed = dict(mask=mask) if case["mask"] == "closed over" else {}
    traced = dict(mask=mask) if case["mask"] == "traced" else {}

    def call(layer, tokens, traced):
        return layer(*tokens, is_causal=case["is_causal"], **closed, **traced)

    call = nnx.jit(call) if case["jit"] else call
    tokens = list(map(jnp.asarray, tokens))
    measured = case["calibration"] != "none"
    first = call(layer, tokens, traced)  # in training mode; nothing is known yet
    if not case["training"]:
        layer.eval()
    fitted = layer.calibration
    before = layer.statistics["moments"][...] if measured else None
    output = call(layer, tokens, traced)
    method = parts(case["calibration"], "orf")
    got = dict(calibration=None)
    if measured:
        moments = oracles.pair_moments(
            *tokens[:2],
            mask=exists,
            is_causal=case["is_causal"],
            positions=[(2 * i + 1) * t // 6 for i in range(3)],
        )
        moments = moments if heads else moments.mean(axis=0, keepdims=True)
        once, twice = (1 - momentum) * moments, (1 - momentum**2) * moments
        np.testing.assert_allclose(before, once if heads else once[0], atol=1e-5)
        now = layer.statistics["moments"][...]
        want = twice if case["training"] else once
        np.testing.assert_allclose(now, want if heads else want[0], atol=1e-5)
        leaves = [np.asarray(x) for x in reference._leaves(fitted, h)]
        got = dict(calibration=Calibration(*leaves))
        for head, of_head in enumerate(moments):
            expected = oracles.calibration(of_head / of_head[0, 0], method)
            mine = [_of(x, rank, head) for x, rank in zip(leaves, (1, 2, 2, 1, 2), strict=True)]
            np.testing.assert_allclose(mine[0], expected[0], atol=2e-4)
            np.testing.assert_allclose(mine[1], expected[1], atol=2e-4)
            np.testing.assert_allclose(mine[4] @ mine[4].T, expected[3], atol=2e-3)
    for mine, options in ((first, {}), (output, got)):
        options |= dict(mask=exists[:, None, None], is_causal=case["is_causal"])
        want = oracle(*tokens, layer.frequencies[...], **options)
        np.testing.assert_allclose(mine, want, atol=5e-5)


def _of(leaf, rank, head):
    return leaf[head] if leaf.ndim > rank else leaf


# Fuzzing


@pytest.mark.slow
def test_fuzz(eight_devices):
    """Options and shapes at random, for `FUZZ_MINUTES`; prints how many cases there were."""
    rng, start, off_by, count = np.random.default_rng(SEED), time.monotonic(), [], 0
    while time.monotonic() - start < 60 * MINUTES:
        seed, of_calibration = int(rng.integers(2**32)), count % 4 == 3
        draw = np.random.default_rng(seed)
        factors = (OF_CALIBRATION, never) if of_calibration else (FACTORS | MORE, excluded)
        case = random_row(*factors, draw)
        try:
            if of_calibration:
                ratio = calibration_off(case, *map(int, draw.integers(1, 9, 5)), draw)
            else:
                ratio = off(case, sizes_of(case, draw), draw) / FAR
            if not ratio < 1:
                off_by.append((seed, ratio, case))
        except Exception as error:
            # XLA on CPU has no bfloat16 product of single numbers: one feature, query and head
            if "ElementalIrEmitter: ALG_DOT_BF16" not in str(error):
                off_by.append((seed, str(error)[:300], case))
        count += 1
        if count % 50 == 0:
            jax.clear_caches()
    print(f"{count} cases, off: {off_by}")
    assert not off_by
