"""The three functions of the kernels, interpreted, against float64: values and all gradients.

Features are exponentials of moderate size, so the oracle needs no maxima.
"""

from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from performer.attention.kernels import gpu, run, tpu
from performer.attention.kernels.which import Kernel
from performer.attention.maps import Arguments
from performer.attention.state import Keys, State, combine, ratio
from tests.support.tiers import tiers

PLATFORMS = ["cuda", "tpu"]
SCALE = 0.3
TOLERANCE = 7e-6
"""Five times the largest distance seen, relative to the norm of the oracle."""


class Sizes(NamedTuple):
    """Two query heads share each key head; head_dim, width and features are no kernel's."""

    b: int = 2
    t: int = 20
    s: int = 30
    n: int = 4
    k: int = 2
    h: int = 12
    v: int = 24
    m: int = 20


SHORT, LONG = Sizes(), Sizes(t=140, s=150, v=8)


def arguments(sizes=SHORT, heads=True, seed=0):
    """Keys with weights for each head, of which some, and all of the last sequence, are absent."""
    b, t, s, n, k, h, v, m = sizes
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    exists = (rng.random((b, s, 1)) < 0.8) & (np.arange(b) < b - 1)[:, None, None]
    log_weights = np.where(exists, normal(b, s, k), -np.inf)
    lead = (k,) if heads else ()
    keys = Keys(normal(b, s, k, h), normal(b, s, k, v), log_weights)
    w = normal(*lead, m, h), normal(*lead, m, h)
    x = Arguments(normal(b, t, n, h), keys, *w, normal(*lead, m))
    return jax.tree.map(jnp.asarray, x)


def of_dtype(x, dtype):
    query, key, value = (y.astype(dtype) for y in (x.query, *x.keys[:2]))
    return x._replace(query=query, keys=x.keys._replace(key=key, value=value))


def any_state(sizes=SHORT, seed=1):
    """A state of no keys in particular: a feature, and the last sequence, have none."""
    b, k, v, m = sizes.b, sizes.k, sizes.v, sizes.m
    rng = np.random.default_rng(seed)
    absent = (np.arange(m) == 3) | (np.arange(b) == b - 1)[:, None]
    maximum = np.where(absent, -np.inf, rng.standard_normal((k, b, m)))
    normaliser = np.where(absent, 0, rng.random((k, b, m)))
    numerator = np.where(absent[..., None], 0, rng.standard_normal((k, b, m, v)))
    arrays = maximum, normaliser, numerator
    return State(*(jnp.asarray(x, jnp.float32) for x in arrays))


def query_features(x):
    """(b, t, n, m)."""
    w = x.w_query * SCALE**0.5
    w = jnp.broadcast_to(w, (x.query.shape[2] if w.ndim == 2 else len(w), *w.shape[-2:]))
    w = jnp.repeat(w, x.query.shape[2] // len(w), axis=0)
    return jnp.exp(jnp.einsum("btnh,nmh->btnm", x.query, w))


def key_exponents(x):
    """(b, s, k, m)."""
    key, _, log_weights = x.keys[:3]
    w = jnp.broadcast_to(x.w_key * SCALE**0.5, (key.shape[2], *x.w_key.shape[-2:]))
    half = SCALE / 2 * jnp.sum(key**2, axis=-1) - log_weights
    return jnp.einsum("bskh,kmh->bskm", key, w) - half[..., None] + x.feature_bias


def rows(numerator, normaliser):
    """The output and L, from sums (b, t, n, v) and (b, t, n)."""
    some = normaliser > 0
    safe = jnp.where(some, normaliser, 1)
    return numerator / safe[..., None], jnp.where(some, jnp.log(safe), -jnp.inf)


def sums_of_state(features, state):
    maximum, s, z = (jnp.repeat(x, features.shape[2] // len(x), axis=0) for x in state)
    weights = features * jnp.exp(maximum).transpose(1, 0, 2)[:, None]
    return jnp.einsum("btnm,nbmv->btnv", weights, z), jnp.einsum("btnm,nbm->btn", weights, s)


def attention(x, before=None, is_causal=False):
    """Pair by pair."""
    features, f = query_features(x), jnp.exp(key_exponents(x))
    f, value = (jnp.repeat(y, features.shape[2] // y.shape[2], axis=2) for y in (f, x.keys.value))
    pairs = jnp.einsum("btnm,bsnm->bnts", features, f)
    pairs = jnp.tril(pairs) if is_causal else pairs
    sums = jnp.einsum("bnts,bsnv->btnv", pairs, value), jnp.sum(pairs, axis=-1).swapaxes(1, 2)
    if before is not None:
        sums = map(jnp.add, sums, sums_of_state(features, before))
    return rows(*sums)


def look_up(x, state):
    return rows(*sums_of_state(query_features(x), state))


def summarise(x):
    exponents = key_exponents(x)
    maximum = jax.lax.stop_gradient(jnp.max(exponents, axis=1))  # (b, k, m)
    f = jnp.exp(exponents - jnp.where(maximum == -jnp.inf, 0, maximum)[:, None])
    s, z = jnp.sum(f, axis=1), jnp.einsum("bskm,bskv->kbmv", f, x.keys.value)
    return State(maximum.swapaxes(0, 1), s.swapaxes(0, 1), z)


def settings(platform, is_causal=False, block=128, interpret=True):
    return Kernel(SCALE, is_causal, 1, block, platform, interpret)


def with_gradients(function, *args):
    """Results, and gradients of args for random ones of the results; those of -inf do not count."""
    results, pull = jax.vjp(function, *args)
    rng = np.random.default_rng(7)

    def given(y):
        draws = jnp.asarray(rng.standard_normal(y.shape), y.dtype)
        return jnp.where(jnp.isinf(y), jnp.nan, draws)

    return results, pull(jax.tree.map(given, results))


def check(function, oracle, *args):
    """All results and gradients are the oracle's in float64; infinities where it has them."""
    got = with_gradients(function, *args)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda y: jnp.asarray(np.float64(y)), args)
        want = with_gradients(oracle, *wide)
    leaves = jax.tree_util.tree_leaves_with_path(got)
    for (path, x), y in zip(leaves, jax.tree.leaves(want), strict=True):
        x, y = np.float64(x), np.float64(y)
        infinite = np.isinf(y)
        np.testing.assert_array_equal(x[infinite], y[infinite])
        x, y = x[~infinite], y[~infinite]
        assert distance(x, y) <= TOLERANCE * np.linalg.norm(y), jax.tree_util.keystr(path)


def distance(got, want):
    return np.linalg.norm(np.float64(got) - np.float64(want))


def never(*_):
    raise AssertionError("the kernels are not used")


@pytest.fixture
def spans(monkeypatch):
    """Three spans of 64 tokens on a GPU."""
    monkeypatch.setattr(gpu, "PROGRAMS", 24)
    monkeypatch.setattr(gpu, "STEPS", 1)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_attention_in_one_kernel(platform):
    """Frequencies are the same for all heads."""
    kernel = partial(run.attention, ordinary=never, settings=settings(platform))
    check(kernel, attention, arguments(heads=False))


@pytest.mark.parametrize("platform", PLATFORMS)
def test_attention_in_spans(platform, spans):
    kernel = partial(run.attention, ordinary=never, settings=settings(platform))
    check(kernel, attention, arguments(LONG))


@pytest.mark.parametrize(
    ("platform", "t"), tiers([(p, t) for t in (150, 40) for p in PLATFORMS], 2)
)
def test_causal_attention_after_a_state(platform, t, spans):
    """In several spans or chunks, and in one."""
    sizes = Sizes(t=t, s=t, v=8)
    options = dict(ordinary=never, settings=settings(platform, is_causal=True))
    check(
        lambda x, before: run.attention(x, before=before, **options),
        partial(attention, is_causal=True),
        *(arguments(sizes), any_state(sizes)),
    )


@pytest.mark.parametrize(
    ("platform", "sizes"),
    tiers([(p, x) for x in (SHORT, LONG) for p in PLATFORMS], 2, ids=lambda x: f"{x[0]}-{x[1].s}"),
)
def test_summarise(platform, sizes, spans):
    kernel = partial(run.summarise, ordinary=never, settings=settings(platform))
    check(kernel, summarise, arguments(sizes))


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("t", [1, 140])
def test_look_up(platform, t, spans):
    """Any state is looked up; also by one query, as in decoding."""
    kernel = partial(run.look_up, ordinary=never, settings=settings(platform))
    sizes = Sizes(t=t, v=8)
    check(kernel, look_up, arguments(sizes), any_state(sizes))


@pytest.mark.parametrize("platform", PLATFORMS)
def test_gradient_of_the_normaliser_alone(platform):
    """The output has none, not zeros."""
    kernel = partial(run.attention, ordinary=never, settings=settings(platform))
    check(lambda x: kernel(x)[1], lambda x: attention(x)[1], arguments(heads=False))


@pytest.mark.parametrize(
    ("platform", "dtype", "parts"),
    tiers([(p, *x) for x in ((jnp.bfloat16, 1), (np.float32, 2)) for p in PLATFORMS], 2),
)
def test_attention_looks_up_what_it_summarises(platform, dtype, parts):
    """Keys in parts have a state each.

    In bfloat16 the features are rounded, as in the fused kernel, but no sum of L.
    """
    x = of_dtype(arguments(Sizes(t=70, s=80, v=16, h=16, m=16)), dtype)
    options = dict(ordinary=never, settings=settings(platform))

    def composed(x):
        cut = [slice(i, None, parts) for i in range(parts)]
        keys = [jax.tree.map(lambda y, part=part: y[:, part], x.keys) for part in cut]
        states = [run.summarise(x._replace(keys=part), **options) for part in keys]
        return run.look_up(x, reduce(combine, states), **options)

    (got, L), got_gradients = with_gradients(composed, x)
    (want, same_L), want_gradients = with_gradients(partial(run.attention, **options), x)
    np.testing.assert_allclose(L, same_L, rtol=1e-6, atol=2e-6)
    tolerance = TOLERANCE if dtype == np.float32 else 2e-2
    both = map(jax.tree.leaves, ((got, got_gradients), (want, want_gradients)))
    for y, z in zip(*both, strict=True):
        assert distance(y, z) <= tolerance * np.linalg.norm(np.float64(z))


@pytest.mark.parametrize("platform", tiers(["tpu", "cuda"], 1))
def test_rows_of_two_sets_of_keys(platform):
    """State(L, 1, output) are rows: those of two sets of keys, which may be empty, add up."""
    kernel = partial(run.attention, ordinary=never, settings=settings(platform))

    def of(x, part):
        keys = jax.tree.map(lambda y: y[:, part], x.keys)
        output, L = kernel(x._replace(keys=keys))
        return State(L, jnp.ones_like(L), output)

    def in_two_sets(x):
        both = combine(of(x, np.s_[:12]), of(x, np.s_[12:]))
        return ratio(both), both.maximum + jnp.log(both.normaliser)

    check(in_two_sets, attention, arguments())


@pytest.mark.parametrize(
    ("function", "ordinary", "states"),
    [(run.attention, attention, 0), (run.look_up, look_up, 1), (run.summarise, summarise, 0)],
)
def test_other_platforms_compute_what_is_ordinary(function, ordinary, states):
    """With its gradients, also where only one of the results has a gradient."""
    args = (arguments(), any_state())[: 1 + states]
    kernel = partial(function, ordinary=ordinary, settings=settings("cuda", interpret=False))

    def twice(function):
        def both(*args):
            return function(*args), function(*args)[1]

        return jax.jit(partial(with_gradients, both))

    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5),
        twice(kernel)(*args),
        twice(ordinary)(*args),
    )


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_normaliser_that_is_not_used_costs_nothing(platform, is_causal, monkeypatch):
    """The kernels then read and write what they do without it."""
    module, x = {"cuda": gpu, "tpu": tpu}[platform], arguments(Sizes(s=20))
    original, calls = module.call, []

    def arrays(pieces):
        leaves = jax.tree.leaves(pieces, is_leaf=lambda x: isinstance(x, module.Piece))
        return sum(isinstance(x, module.Piece) for x in leaves)

    def call(kernel, settings, lengths, ins, outs, *rest, **options):
        calls.append((kernel.__name__, *(arrays(pieces) for pieces in (ins, outs))))
        return original(kernel, settings, lengths, ins, outs, *rest, **options)

    def kernels(part=0, derivative=jax.grad, **options):
        """Number of arrays that each kernel reads and writes."""
        calls.clear()
        options |= dict(ordinary=never, settings=settings(platform, is_causal))
        loss = lambda x: jnp.sum(run.attention(x, **options)[part])  # noqa: E731
        jax.eval_shape(derivative(loss), x)
        return {name: arrays for name, *arrays in calls}

    monkeypatch.setattr(module, "call", call)
    assert kernels() == kernels(log=False)
    more = kernels(part=1)
    (backward,) = (name for name in more if more[name] != kernels()[name])
    assert "backward" in backward
    assert more[backward][0] == kernels()[backward][0] + 1
    plain, with_log = (kernels(derivative=lambda f: f, log=log) for log in (False, True))
    assert (plain == with_log) == (platform == "tpu" and not is_causal)  # it always has L there


@pytest.mark.thorough
@pytest.mark.parametrize("platform", PLATFORMS)
def test_each_device_has_its_part_of_the_batch(platform, eight_devices):
    """Gradients of tokens and states; shared frequencies have sums over the devices."""
    sizes = Sizes(b=8)
    x, state = arguments(sizes), any_state(sizes)
    options = dict(ordinary=never, settings=settings(platform))

    def all_three(x, state):
        own = run.summarise(x, **options)
        return run.attention(x, **options), run.look_up(x, combine(own, state), **options)

    want = with_gradients(all_three, x, state)
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
    batch, of_state, whole = (
        NamedSharding(mesh, PartitionSpec(*axes)) for axes in (["data"], [None, "data"], [])
    )
    x = x._replace(**{n: jax.device_put(getattr(x, n), batch) for n in ("query", "keys")})
    x = x._replace(**{n: jax.device_put(getattr(x, n), whole) for n in Arguments._fields[2:5]})
    with jax.set_mesh(mesh):
        program = jax.jit(partial(with_gradients, all_three))
        got = program(x, jax.device_put(state, of_state))
        assert "all-gather" not in program.lower(x, state).compile().as_text()
    for y, z in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        real = np.isfinite(z)
        assert distance(y[real], z[real]) <= 1e-5 * np.linalg.norm(z[real])


@pytest.mark.thorough
@pytest.mark.parametrize("platform", PLATFORMS)
def test_lowers(platform):
    """Without a device: of one query and of many, and causal after a state, with all gradients."""

    def program(function, *args, is_causal=False):
        chosen = settings(platform, is_causal, interpret=False)
        kernel = partial(function, ordinary=never_on_others, settings=chosen)
        of_results = jax.jit(partial(with_gradients, kernel))
        if platform == "cuda":
            device = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")
            mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
            with jax.sharding.use_abstract_mesh(mesh):
                text = of_results.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
            return text.count("xla.gpu.triton")
        text = jax.export.export(of_results, platforms=["tpu"])(*args).mlir_module()
        return text.count("@tpu_custom_call")

    def never_on_others(*args):
        x = args[0]
        return jnp.zeros((*x.query.shape[:3], 8), x.query.dtype), jnp.zeros(x.query.shape[:3])

    for t in (1, 140):
        x, state = of_dtype(arguments(Sizes(t=t, s=t, v=8)), jnp.bfloat16), any_state(Sizes(v=8))
        assert program(run.look_up, x, state) == 2
    causal = lambda x, before, **o: run.attention(x, before=before, **o)  # noqa: E731
    assert program(causal, x, state, is_causal=True) >= 2
