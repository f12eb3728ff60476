"""`performer.linearize`: called with other lengths and batches than it was measured with.

All keys are exact, so that a replaced place must equal the function.
"""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import performer
from performer import Exact
from tests.support import zoo
from tests.support.tiers import tiers

EXACT = dict(exact=Exact(1000), num_features=4)
KEYS = dict(exact=Exact(keys=1000), num_features=4)
WINDOW_AND_KEYS = dict(exact=Exact(window=1000, keys=1000), num_features=4)
"""All keys of attention without causality, of cross attention also."""


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def replaced(function, *batches, **options):
    """The new function; no attention is left."""
    new, report = performer.linearize(function, [tuple(x) for x in batches], **options)
    assert not report.left
    assert {row["attention"] for row in report.rows} == {"linear"}
    return new


def name(function):
    return function.__name__


def agree(new, function, *arguments, atol=5e-6):
    got, want = jax.jit(lambda *x: (new(*x), function(*x)))(*arguments)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol), got, want)


# Axes


def grouped(x):
    """One key head, heads before tokens, causal."""
    t, h = x.shape[1], x.shape[-1]
    scores = jnp.einsum("bnth,bsh->bnts", jnp.swapaxes(x, 1, 2), x[:, :, 0]) / h**0.5
    weights = jax.nn.softmax(jnp.where(jnp.tri(t, dtype=bool), scores, -1e9))
    return jnp.einsum("bnts,bsh->btnh", weights, x[:, :, 0])


@pytest.mark.parametrize("measured", tiers([12, 3], 1))
def test_the_axis_of_time_is_the_measured_one(measured):
    """Grouped attention with as many query heads as tokens."""
    new = replaced(grouped, [normal(0, 2, measured, 4, 8)], **EXACT)
    for t in (3, 4, 5, measured):
        agree(new, grouped, normal(t, 2, t, 4, 8))


def matmuls(q, k, v):
    """Heads before tokens; `@` drops batches of length 1."""
    return jax.nn.softmax(q @ k.mT / 3) @ v


def codebook(x, keys, values):
    """Keys and values without a batch axis."""
    return jax.nn.softmax(x @ keys.T / 3) @ values


@pytest.mark.parametrize("measured", tiers([3, 1], 1))
def test_other_batch_sizes(measured):
    new = replaced(matmuls, [normal(i, measured, 4, 6, 8) for i in range(3)], **EXACT)
    assert jax.tree.leaves(new)[0].shape[0] == 4  # frequencies of each head
    for b in (1, 2, 3, 4, 6):
        agree(new, matmuls, *(normal(b + i, b, 4, 6, 8) for i in range(3)))


def test_a_table_of_keys_is_no_attention():
    """Also the values alone, as bins of a distribution."""

    def bins(x):
        return jax.nn.softmax(x @ x.mT / 3) @ jnp.linspace(0, 1, x.shape[1])[:, None]

    tables = [normal(1, 9, 8), normal(2, 9, 5)]
    for function, arguments in (
        (codebook, tables),
        (bins, []),
        (lambda x: codebook(x, *tables), []),
    ):
        with pytest.raises(ValueError, match="that all examples share"):
            performer.linearize(function, [(normal(0, 3, 6, 8), *arguments)], **KEYS)


def test_heads_that_cannot_be_told_from_examples():
    """`vmap` over the second axis counts the batch as heads: an error, never another number."""
    attend = jax.vmap(lambda x: jax.nn.softmax(x @ x.mT / 3) @ x, in_axes=2, out_axes=2)
    new = replaced(attend, [normal(0, 3, 6, 4, 8)], **EXACT)
    agree(new, attend, normal(1, 3, 5, 4, 8))
    with pytest.raises(ValueError, match=r"test_linearize_calls.py:\d+: its axis of heads"):
        new(normal(1, 2, 6, 4, 8))


# Lengths


def cross(x, y):
    """Queries of x, keys of y: (b, t, n, h) and (b, s, n, h)."""
    weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", x, y) / 3)
    return jnp.einsum("bnts,bsnh->btnh", weights, y)


@pytest.mark.parametrize(("t", "s"), tiers([(4, 12), (9, 9), (1, 5)], 1))
def test_cross_attention_of_other_lengths(t, s):
    new = replaced(cross, [normal(0, 2, t, 2, 8), normal(1, 2, s, 2, 8)], **KEYS)
    for b, t, s in ((2, 9, 9), (1, 4, 12), (3, 12, 4), (2, 1, 5), (2, 5, 1), (1, 1, 1)):
        agree(new, cross, normal(t, b, t, 2, 8), normal(s, b, s, 2, 8))


def test_a_window_requires_as_many_queries_as_keys():
    new = replaced(cross, [normal(0, 2, 9, 2, 8)] * 2, **EXACT)
    with pytest.raises(ValueError, match="computed differently"):
        new(normal(0, 2, 9, 2, 8), normal(1, 2, 12, 2, 8))


def attend(mask, x, bias=0.0, scale=0.3):
    """Self attention of one head."""
    scores = jnp.einsum("bth,bsh->bts", x, x) * scale + bias
    return jnp.einsum("bts,bsh->bth", jax.nn.softmax(jnp.where(mask, scores, -1e9)), x)


def causal(x):
    return attend(jnp.tri(x.shape[1], dtype=bool), x)


def decoder(x, y):
    """Causal, then cross attention."""
    return cross(causal(x)[:, :, None], y[:, :, None])


@pytest.mark.parametrize("function", tiers([decoder, grouped, matmuls, zoo.gpt], 1, name))
def test_one_token(function):
    arguments = {
        grouped: lambda t: [normal(0, 2, t, 4, 8)],
        matmuls: lambda t: [normal(i, 2, 4, t, 8) for i in range(3)],
        decoder: lambda t: [normal(0, 2, t, 8), normal(1, 2, 7, 8)],
        zoo.gpt: lambda t: [zoo.projections(), normal(0, 2, t, zoo.WIDTH)],
    }[function]
    function = function()[0] if function is zoo.gpt else function
    new = replaced(function, arguments(6), **WINDOW_AND_KEYS)
    for t in (1, 2, 6):
        agree(new, function, *arguments(t))


def test_beside_a_shard_map():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec()

    def function(x):
        return causal(jax.shard_map(jnp.tanh, mesh=mesh, in_specs=spec, out_specs=spec)(x))

    new = replaced(function, [normal(0, 2, 6, 8)], **EXACT)
    agree(new, function, normal(1, 3, 9, 8))


def late_bias(x):
    """A bias of the keys from position 13 on."""
    return attend(True, x, jnp.where(jnp.arange(x.shape[1]) > 12, 1.0, 0.0))


def test_a_bias_of_keys_that_the_batches_did_not_have():
    """It is read at each length if a batch had it, else an error."""
    longer = replaced(late_bias, [normal(0, 2, 16, 8)], **KEYS)
    for t in (1, 9, 16, 20):
        agree(longer, late_bias, normal(t, 2, t, 8))
    shorter = replaced(late_bias, [normal(0, 2, 9, 8)], **KEYS)
    agree(shorter, late_bias, normal(0, 2, 12, 8))
    with pytest.raises(ValueError, match="its bias is of another kind with 16 queries"):
        shorter(normal(1, 2, 16, 8))


def on_a_grid(x):
    """Queries and keys on two axes, causal in the order of the rows."""
    _, i, j, _ = x.shape
    scores = jnp.einsum("bijh,bklh->bijkl", x, x) / 3
    mask = jnp.tri(i * j, dtype=bool).reshape(i, j, i, j)
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=(3, 4))
    return jnp.einsum("bijkl,bklh->bijh", weights, x)


@pytest.mark.parametrize("measured", [(2, 3)], ids=str)
def test_a_grid_of_another_size(measured):
    new = replaced(on_a_grid, [normal(0, 2, *measured, 8)], **EXACT)
    for b, *sizes in ((1, 4, 5), (3, 5, 3), (2, 1, 4), (2, 4, 1), (2, 1, 1)):
        agree(new, on_a_grid, normal(b, b, *sizes, 8))


# Masks, biases and scales that are constants of the program


def tri(x, k=0):
    return jnp.tri(x.shape[1], k=k, dtype=bool)


def local(x):
    """Causal for up to 16 tokens."""
    return attend(tri(x) & ~tri(x, -16), x)


def local_of_jax(x):
    x = x[:, :, None]
    return jax.nn.dot_product_attention(x, x, x, is_causal=True, local_window_size=(15, 0))


def prefix(x):
    """Without a mask for up to 16 tokens."""
    return attend(tri(x) | (jnp.arange(x.shape[1]) < 16), x)


def logarithmic(x):
    return attend(tri(x), x, scale=0.2 * np.log(x.shape[1]))


def clipped(x):
    """ALiBi for up to 20 tokens."""
    i = jnp.arange(x.shape[1])
    return attend(tri(x), x, -0.2 * jnp.minimum(i[:, None] - i, 20))


def padded_local(x, exists):
    """A causal window, and padding that is an argument."""
    return attend(tri(x) & ~tri(x, -16) & exists[:, None], x)


def near_scores(x):
    """Scores of far keys become 0 instead of masked; up to 16 tokens none is far."""
    i = jnp.arange(x.shape[1])
    near = (jnp.abs(i[:, None] - i) < 16).astype(x.dtype)
    scores = jnp.einsum("bth,bsh->bts", x, x) * 0.3 * near
    return jnp.einsum("bts,bsh->bth", jax.nn.softmax(scores), x)


def local_in_a_scan(x):
    return jax.lax.scan(lambda x, _: (local(x), None), x, length=2)[0]


CONSTANTS = [local, clipped, logarithmic, near_scores, prefix, local_of_jax, local_in_a_scan]


@pytest.mark.parametrize("measured", tiers([12, 16], 1))
@pytest.mark.parametrize("function", tiers(CONSTANTS, 3, name))
def test_constants_of_another_kind_at_another_length(function, measured):
    new = replaced(function, [normal(0, 2, measured, 8)], **EXACT)
    for t in (1, 8, 16) if function is not logarithmic else (measured,):
        agree(new, function, normal(t, 3, t, 8))
    for b, t in ((2, 40), (1, 70)):
        with pytest.raises(ValueError, match=r"test_linearize_calls.py:\d+: its (mask|bias|scale)"):
            jax.jit(new)(normal(t, b, t, 8))


def test_a_constant_of_another_kind_beside_a_mask_that_is_an_argument():
    """It is read apart from the mask, while tracing."""
    exists = lambda t: jnp.arange(t) < jnp.array([[t], [t - 3]])  # noqa: E731
    new = replaced(padded_local, [normal(0, 2, 12, 8), exists(12)], **EXACT)
    for t in (8, 16):
        agree(new, padded_local, normal(t, 2, t, 8), exists(t))
    with pytest.raises(ValueError, match="its mask is of another kind with 40 queries"):
        new(normal(1, 2, 40, 8), exists(40))


def padded_inside(x):
    """Tokens are padded to a multiple of 16."""
    t = x.shape[1]
    x = jnp.pad(x, ((0, 0), (0, -t % 16), (0, 0)), constant_values=3.0)
    return attend(jnp.arange(x.shape[1]) < t, x)[:, :t]


@pytest.mark.parametrize("measured", tiers([16, 12], 1))
def test_padding_inside(measured):
    new = replaced(padded_inside, [normal(0, 2, measured, 8)], **KEYS)
    for t in (1, 12, 16, 40, 48):
        agree(new, padded_inside, normal(t, 2, t, 8))


def buffer(x):
    """Causal, in a buffer of 24 tokens: neither queries nor keys of padding."""
    t = x.shape[1]
    x = jnp.pad(x, ((0, 0), (0, 24 - t), (0, 0)), constant_values=3.0)
    exists = jnp.arange(24) < t
    return attend(tri(x) & exists & exists[:, None], x)[:, :t]


def test_queries_of_padding_in_a_causal_mask():
    new = replaced(buffer, [normal(0, 2, 12, 8)], **EXACT)
    for t in (3, 12, 21, 24):
        agree(new, buffer, normal(t, 2, t, 8))


def test_a_mask_of_some_heads_is_nan():
    """Seen by other heads, a key is not seen by all."""

    def function(x, exists):
        mask = exists[:, None]
        scores = jnp.einsum("btnh,bsnh->bnts", x, x) / 9
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
        return jnp.einsum("bnts,bsnh->btnh", weights, x)

    x, exists = normal(0, 2, 6, 2, 8), jnp.ones((2, 6), bool)
    new = replaced(function, [x, exists], **KEYS)
    agree(new, function, x, exists)
    agree(new, function, x, exists.at[:, 3].set(False))
    assert jnp.isnan(new(x, exists.at[0, 3].set(False))).all()


def where(x, mask):
    """The mask is read before and after the exponential."""
    return jax.nn.softmax(x @ x.mT / 9, where=mask[:, None]) @ x


def test_a_mask_of_the_softmax():
    new = replaced(where, [normal(0, 2, 6, 8), jnp.ones((2, 6), bool)], **KEYS)
    for b, t in ((2, 6), (3, 9)):
        agree(new, where, normal(t, b, t, 8), jnp.arange(t) < 1 + jnp.arange(b)[:, None])


def test_a_scale_of_each_key():
    """It is read along the keys, also in a head of small scale."""

    def function(x, scale):
        scores = jnp.einsum("btnh,bsnh->bnts", x, x) * scale
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), x)

    x, scale = normal(0, 2, 6, 2, 8), jnp.array([5.0, 0.05])[:, None, None]
    keys = jnp.linspace(0.1, 1, 6)
    new = replaced(function, [x, jnp.broadcast_to(scale, (2, 1, 6))], **KEYS)
    agree(new, function, x, jnp.broadcast_to(scale / 2, (2, 1, 6)))
    agree(new, function, x, jnp.concatenate([scale[:1] + 0 * keys, scale[1:] * keys]))


def test_weights_of_a_narrow_type():
    def function(x):
        weights = jax.nn.softmax(x @ x.mT / 3).astype(jnp.bfloat16)
        return jnp.matmul(weights, x, precision="highest")

    new, x = replaced(function, [normal(0, 2, 6, 8)], **KEYS), normal(1, 2, 9, 8)
    np.testing.assert_allclose(new(x), function(x), atol=0.02)


def test_a_scan_with_another_number_of_steps():
    """Examples by `jax.lax.map`."""
    new = replaced(lambda x: jax.lax.map(lambda x: causal(x[None]), x), [normal(0, 2, 6, 8)])
    with pytest.raises(ValueError, match=r"had \(2,\) steps when it was measured and have \(3,\)"):
        new(normal(0, 3, 6, 8))


# Derivatives


@jax.custom_jvp
def gate(x):
    return jax.nn.softmax(x)


gate.defjvp(lambda x, dx: (gate(*x), 5 * dx[0]))


@jax.custom_vjp
def penalty(x):
    return jax.nn.logsumexp(x @ x.mT, axis=-1, keepdims=True) * x


penalty.defvjp(lambda x: (penalty(x), x), lambda x, dy: (5 * dy,))


@pytest.mark.parametrize("other", [gate, penalty], ids=["jvp", "vjp"])
def test_a_derivative_of_its_own_beside_attention(other):
    """Exponentials and products are no reason to lose it."""

    def function(x):
        return causal(x) + 0.1 * other(0.1 * x)

    new, x = replaced(function, [normal(0, 2, 6, 8)], **EXACT), normal(1, 2, 6, 8)
    slopes = (jax.grad(lambda x, f=f: jnp.sum(f(x) ** 2)) for f in (new, function))
    agree(*slopes, x, atol=1e-3)  # a lost derivative is off by 0.2


# What must stay exact


def capped(x, scale=1 / 16, dtype=jnp.float32):
    """Gemma 2's cap, where the scores of the batch are small."""
    x = x.astype(dtype)
    scores = 50 * jnp.tanh(jnp.einsum("bth,bsh->bts", x, x) * scale / 50)
    return jnp.einsum("bts,bsh->bth", jax.nn.softmax(scores), x)


@pytest.mark.parametrize(
    ("scale", "size", "dtype"),
    tiers([(1 / 16, 0.25, "float32"), (1 / 64, 1, "float32"), (1 / 16, 1, "bfloat16")], 1),
)
def test_a_cap_that_the_batch_does_not_reach(scale, size, dtype):
    with pytest.raises(ValueError, match="changed by tanh"):
        performer.linearize(
            lambda x: capped(x, scale, dtype), [(size * normal(0, 2, 6, 8),)], **EXACT
        )


def changed(x):
    """A window of 16 after the softmax."""
    i = jnp.arange(x.shape[1])
    return (jax.nn.softmax(x @ x.mT) * (abs(i[:, None] - i) < 16)) @ x


def largest(x):
    """The 16 largest scores."""
    scores = x @ x.mT
    least = jax.lax.top_k(scores, min(16, x.shape[1]))[0][..., -1:]
    return jax.nn.softmax(jnp.where(scores < least, -1e9, scores)) @ x


def capped_by(x, cap=1e6):
    return jax.nn.softmax(cap * jnp.tanh(x @ x.mT / cap)) @ x


def permuted(x, order=tuple(range(6))):
    return jax.nn.softmax((x @ x.mT)[..., jnp.asarray(order)]) @ x


def stopped(x):
    """Another derivative than softmax has."""
    return jax.lax.stop_gradient(jax.nn.softmax(x @ x.mT)) @ x


def shared_keys(x):
    """Two heads of queries and values, one of keys."""
    heads = jnp.stack([x, jnp.cos(x)], axis=2)
    weights = jax.nn.softmax(jnp.einsum("btnh,bsh->bnts", heads, x))
    return jnp.einsum("bnts,bsnh->btnh", weights, heads)


def mean_of_heads(x):
    heads = jnp.stack([x, jnp.cos(x)], axis=2)
    weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", heads, heads))
    return jnp.mean(weights, axis=1) @ x


def sum_over_heads(x):
    """By the product with the values."""
    heads = jnp.stack([x, jnp.cos(x)], axis=2)
    weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", heads, heads))
    return jnp.einsum("bnts,bsnh->bth", weights, heads)


def over_queries(x):
    """Scores so small that any division by a sum gives their softmax."""
    return jax.nn.softmax(1e-3 * x @ x.mT, axis=1) @ x


def squared(x):
    """Scores so small that squares of their softmax, normalised, are nearly the same."""
    weights = jax.nn.softmax(1e-4 * x @ x.mT) ** 2
    return weights / weights.sum(axis=-1, keepdims=True) @ x


def rounded(x):
    """Scores may be so small that all are 0."""
    return jax.nn.softmax(jnp.round(1e-4 * x @ x.mT)) @ x


def towards_far_keys(x):
    """ALiBi with a negative slope, which `performer_attention` refuses."""
    i = jnp.arange(x.shape[1])
    return attend(tri(x), x, 0.2 * (i[:, None] - i))


def quantized(x):
    scores = jnp.einsum("bth,bsh->bts", *[x.astype(jnp.int8)] * 2, preferred_element_type=jnp.int32)
    return jax.nn.softmax(scores / 9) @ x


def scaled_after_the_shift(x):
    scores = x @ x.mT
    weights = jnp.exp((scores - scores.max(axis=-1, keepdims=True)) / 3)
    return weights / weights.sum(axis=-1, keepdims=True) @ x


def complex_scores(x):
    """Rotary positions as complex numbers."""
    z = x[..., :4] + 1j * x[..., 4:]
    return jax.nn.softmax(jnp.einsum("bth,bsh->bts", z, z.conj()).real) @ x


def weights_of_masked_pairs(x, mask):
    """Small, and not 0. The batch has no masked pairs."""
    return jnp.where(mask, jax.nn.softmax(jnp.where(mask, x @ x.mT, -1e9)), 1e-3) @ x


def relative(x):
    """A product of queries and positions is added to the scores."""
    positions = jnp.sin(jnp.arange(6)[:, None, None] + jnp.arange(6)[:, None] * jnp.arange(8))
    scores = jnp.einsum("bth,bsh->bts", x, x) + jnp.einsum("bth,tsh->bts", x, positions)
    return jax.nn.softmax(scores) @ x


def in_a_shard_map(x):
    """Its constants cannot be computed outside."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    return jax.shard_map(causal, mesh=mesh, in_specs=spec, out_specs=spec)(x)


SOME = {
    changed: "changed after the softmax",
    largest: "which scores are large",
    capped_by: "changed by tanh",
    permuted: "changed by gather",
    stopped: "cut by stop_gradient",
    shared_keys: "heads that its keys do not have",
    mean_of_heads: "changed after the softmax, by reduce_sum",
    sum_over_heads: "sums over more axes than the softmax",
    over_queries: "not divided by their sum over the keys",
    squared: "changed after the softmax, by integer_pow",
    rounded: "changed by round",
    towards_far_keys: "a bias that is no mask",
    quantized: "integers",
    complex_scores: "are complex",
    weights_of_masked_pairs: "changed after the softmax",
    relative: "a sum of several products",
    in_a_shard_map: "inside shard_map",
    scaled_after_the_shift: "after their largest was subtracted",
}
"""Softmax attention at some lengths, for some arguments, or almost -> why it stays exact."""


@pytest.mark.parametrize("function", SOME, ids=name)
def test_softmax_for_some_lengths_or_arguments_alone(function):
    more = {capped_by: (jnp.float32(1e6),), permuted: (jnp.arange(6),)}
    more |= {weights_of_masked_pairs: (jnp.ones(6, bool),)}
    with pytest.raises(ValueError, match=SOME[function]):
        performer.linearize(function, [(normal(0, 2, 6, 8), *more.get(function, ()))], **EXACT)


def static(x, scale=1 / 3, axis=-1, factor=1.0):
    return factor * jax.nn.softmax(x @ x.mT * scale, axis=axis) @ x


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"axis": 1}, "computed differently"),
        ({"factor": 0.5}, "computed differently"),
        ({"scale": 0.5}, "its scale is another one with these arguments"),
    ],
    ids=["axis", "factor", "scale"],
)
def test_static_arguments_of_another_value(other, message):
    """By name, also those that change nothing."""
    new, x = replaced(static, [normal(0, 2, 6, 8)], **KEYS), normal(1, 2, 6, 8)
    np.testing.assert_allclose(new(x, factor=1.0), static(x), atol=1e-4)
    with pytest.raises(ValueError, match=message):
        new(x, **other)


def test_slopes_that_are_a_parameter():
    """They may change, and have a derivative."""

    def function(slope, x):
        i = jnp.arange(x.shape[1])
        return attend(tri(x), x, -slope * abs(i[:, None] - i))

    x = normal(0, 2, 6, 8)
    new = replaced(function, [jnp.float32(0.1), x], **EXACT)
    both = (jax.value_and_grad(lambda *x, f=f: jnp.sum(f(*x) ** 2)) for f in (new, function))
    agree(*both, jnp.float32(0.3), x, atol=1e-3)


def test_other_entries_of_queries():
    """Attention between channels has the tokens for entries."""

    def channels(x):
        return cross(x.mT[:, :, None], x.mT[:, :, None])

    new = replaced(channels, [normal(0, 2, 6, 8)], num_features=4)
    with pytest.raises(ValueError, match=r"calls.py:\d+: its queries had 6 entries .* have 9 here"):
        new(normal(0, 2, 9, 8))


def test_a_window_alone_requires_a_window():
    arguments = [normal(0, 2, 9, 2, 8), normal(1, 2, 12, 2, 8)]
    with pytest.raises(ValueError, match=r"calls.py:\d+ has no exact window, for it requires"):
        performer.linearize(cross, [tuple(arguments)], num_features=0, exact=Exact(4))


def test_a_symbolic_batch_size():
    new, (b,) = replaced(causal, [normal(0, 2, 6, 8)], **EXACT), jax.export.symbolic_shape("b")
    exported = jax.export.export(jax.jit(new))(jax.ShapeDtypeStruct((b, 6, 8), jnp.float32))
    for b in (1, 3):
        agree(exported.call, causal, normal(b, b, 6, 8))


def padded(x, lengths):
    return attend((jnp.arange(x.shape[1]) < lengths[:, None])[:, None], x)


def by_jax(x, lengths):
    x = x[:, :, None]
    return jax.nn.dot_product_attention(x, x, x, key_value_seq_lengths=lengths)[:, :, 0]


@pytest.mark.parametrize("function", [padded, by_jax])
def test_symbolic_lengths(function):
    """One program for all lengths, where no mask is written in the code."""
    new = replaced(function, [normal(0, 2, 6, 8), jnp.array([6, 4])], num_features=4)
    b, t = jax.export.symbolic_shape("b, t")
    shapes = jax.ShapeDtypeStruct((b, t, 8), jnp.float32), jax.ShapeDtypeStruct((b,), jnp.int32)
    exported = jax.export.export(jax.jit(new))(*shapes)
    agree(exported.call, new, normal(1, 3, 9, 8), jnp.array([9, 5, 7]))


def test_a_mask_in_the_code_at_a_symbolic_length_is_an_error():
    program = jax.export.export(jax.jit(replaced(causal, [normal(0, 2, 6, 8)], num_features=4)))
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("2, t, 8"), jnp.float32)
    with pytest.raises(ValueError, match="the length t is symbolic: export a program for each"):
        program(shape)


@pytest.mark.thorough
def test_without_jit_and_with_checks_of_leaks():
    new, x = replaced(causal, [normal(0, 2, 6, 8)], **EXACT), normal(1, 2, 6, 8)
    with jax.checking_leaks():
        agree(new, causal, x)
    with jax.disable_jit():
        np.testing.assert_allclose(new(x), causal(x), atol=1e-4)


def loss(x):
    return jnp.sum(causal(x) ** 2)


def with_weights(x):
    """Weights are another output."""
    weights = jax.nn.softmax(jnp.einsum("bth,bsh->bts", x, x) / 3)
    return jnp.einsum("bts,bsh->bth", weights, x), weights


READ_ELSEWHERE = {
    "gradient": jax.value_and_grad(loss),
    "checkpoint": jax.value_and_grad(jax.checkpoint(loss)),
    "forward": lambda x: jax.jvp(loss, (x,), (x,)),
    "scan": jax.grad(lambda x: jax.lax.scan(lambda x, _: (causal(x), None), x, length=2)[0].sum()),
    "hessian": lambda x: jax.jvp(jax.grad(loss), (x,), (x,)),
    "weights": with_weights,
}


@pytest.mark.parametrize("how", tiers(READ_ELSEWHERE, ["gradient", "checkpoint"]))
def test_weights_that_are_read_elsewhere(how):
    with pytest.raises(ValueError, match="linearize first, then differentiate"):
        performer.linearize(READ_ELSEWHERE[how], [(normal(0, 2, 6, 8),)], **EXACT)


def test_a_nan_in_a_batch_is_an_error():
    x, y = normal(0, 2, 4, 2, 8), normal(1, 2, 9, 2, 8)
    with pytest.raises(ValueError, match=r"test_linearize_calls.py:\d+: queries or keys are not f"):
        performer.linearize(cross, [(x, y), (x.at[1, 2, 1, 3].set(jnp.nan), y)], **KEYS)
