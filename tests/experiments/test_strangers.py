"""Models of other repositories: the transformer, readers of their files, what is measured."""

import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import performer
from experiments.strangers import __main__ as command
from experiments.strangers import couplings, data, models, transformer, windows
from performer.linearization.outputs import Whole
from performer.linearization.report import Recipe, Report
from performer.linearization.timing import Time

MODEL = models.MODELS["stories260K"]


def arrays(seed, *shape):
    return 0.5 * jax.random.normal(jax.random.key(seed), shape)


def layer(width, heads=4, key_heads=4):
    shared = width * key_heads // heads
    names = dict(query=width, key=shared, value=shared, out=width)
    return {
        name: (arrays(i, width, n), arrays(9 + i, n)) for i, (name, n) in enumerate(names.items())
    }


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"mask": jnp.arange(6) < jnp.array([[6], [3]])}]
)
@pytest.mark.parametrize("key_heads", [4, 2])
def test_attention_is_that_of_jax(options, key_heads):
    own, x = layer(8, key_heads=key_heads), arrays(30, 2, 6, 8)
    query, key, value = (
        transformer.dense(own[name], x).reshape(2, 6, -1, 2) for name in ("query", "key", "value")
    )
    mask = options.get("mask", jnp.ones((2, 6), bool))[:, None, None]
    expected = jax.nn.dot_product_attention(
        query, key, value, mask=mask, is_causal="causal" in options
    )
    expected = transformer.dense(own["out"], expected.reshape(2, 6, 8))
    np.testing.assert_allclose(transformer.attention(own, x, 4, **options), expected, atol=1e-5)


def test_rotary_scores_depend_on_the_distance_only():
    query, key = (jnp.broadcast_to(arrays(i, 8), (1, 7, 1, 8)) for i in (0, 1))
    query, key = transformer.rotated(query)[0, :, 0], transformer.rotated(key)[0, :, 0]
    scores = query @ key.T
    np.testing.assert_allclose(scores[3:, 2:6], scores[2:6, 1:5], atol=1e-5)
    assert np.ptp(scores[3]) > 0.1


def test_patches_are_those_of_a_convolution_in_pytorch():
    image = np.arange(2 * 4 * 6 * 3, dtype=np.float32).reshape(2, 4, 6, 3)
    rows = transformer.patches(jnp.asarray(image), 2)
    assert rows.shape == (2, 6, 12)
    np.testing.assert_array_equal(rows[1, 4], image[1, 2:4, 2:4].transpose(2, 0, 1).ravel())
    assert transformer.patches(jnp.asarray(image), 2, 1).shape == (2, 15, 12)


def test_file_of_llama2_c():
    d, hidden, depth, heads, key_heads, words = 16, 12, 2, 8, 4, 20
    header = struct.pack("7i", d, hidden, depth, heads, key_heads, words, 32)
    sizes = [words * d, depth * d, depth * d * d, depth * d * d // 2, depth * d * d // 2]
    sizes += [depth * d * d, depth * d, *3 * [depth * d * hidden], d, 32]
    numbers = [np.full(size, i, np.float32) for i, size in enumerate(sizes)]
    parameters = MODEL.read(header + b"".join(x.tobytes() for x in numbers))
    assert len(parameters["layers"]) == depth
    own = parameters["layers"][1]
    order = ("norm1", "query", "key", "value", "out", "norm2", "gate", "down", "up")
    for i, name in enumerate(order, 1):
        assert (own[name][0] == i).all(), name
    assert own["key"][0].shape == (d, d // 2)
    assert own["down"][0].shape == (hidden, d)
    assert (parameters["norm"][0] == 10).all()
    assert MODEL.apply(parameters, jnp.zeros((1, 5), int)).shape == (1, 5, words)


def test_another_file_is_refused(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"1")
    with pytest.raises(ValueError, match=r"model\.bin: sha256 6b86b2.*, expected b0a507"):
        MODEL.load(tmp_path / "model.bin")


def test_byte_pairs_are_merged_by_rank():
    ranks = {"ab": 1.0, "bc": 0.0, "abc": 2.0}
    assert data.merged("abcab", ranks) == ["abc", "ab"]
    assert data.merged("abd", {"bc": 0.0}) == ["a", "b", "d"]


def test_sums_are_asked_from_their_end():
    own = data.sums(calibrated=1, held_out=50)
    symbols = "0123456789+=$."
    for tokens, labels in zip(*own.held_out, strict=True):
        question, _ = "".join(symbols[x] for x in tokens).split("=")
        answer = "".join(symbols[x] for x in labels if x != data.IGNORED)
        assert answer == f"{sum(map(int, question.split('+')))}"[::-1] + "$"


def test_measured():
    old = np.log(np.array([[[0.5, 0.5], [0.75, 0.25]], [[0.25, 0.75], [0.5, 0.5]]]))
    new = np.log(np.array([[[0.6, 0.4], [0.25, 0.75]], [[0.25, 0.75], [0.4, 0.6]]]))
    labels = np.array([[0, 0], [1, data.IGNORED]])
    row = command.measured(new, old, labels)
    assert (row["accuracy"], row["accuracy of labels"]) == (0.5, 2 / 3)
    np.testing.assert_allclose(row["loss, nats"], -np.log([0.6, 0.25, 0.75]).mean())
    assert row["agreement"] == 2 / 3
    divergence = [np.log(25 / 24) / 2, np.log(3) / 2, 0]
    np.testing.assert_allclose(row["divergence, nats"], np.mean(divergence), atol=1e-12)
    row = command.measured(new, old, np.full_like(labels, data.IGNORED))
    assert (row["loss, nats"], row["agreement"]) == ("", 0.5)


def test_numbers_of_a_report():
    sizes = {"m": 8, "window": 16, "exact keys": 0, "exact rows": 0, "keys": 64}
    heads = [
        {"path": path, "head": head, "attention": kind, "attention error": error, "cost": cost}
        for path, kind, cost, errors in (
            ("a", "linear", 49, (0.1, 0.3)),
            ("b", "exact", 64, (9, 9)),
        )
        for head, error in enumerate(errors)
    ]
    row = command.numbers_of(Report([head | sizes for head in heads], {"c": "a soft cap"}))
    np.testing.assert_allclose(row.pop("attention error"), 0.1)  # (0.2 + 0) / 2
    expected = {"m": "8 -", "window": "16 -", "exact keys": "0 -", "exact rows": "0 -"}
    assert row == expected | {"cost": 56.5, "keys": 64, "exact layers": 1, "left": 1}
    times = {"exact, ms": 3.0, "replacement, ms": 2.0, "speed-up": 1.5}
    whole = Whole(Time(0.04, 0), Time(0.01, 0), "forward", "cpu")
    row = command.numbers_of(Report([head | sizes | times for head in heads], whole=whole))
    assert [row[name] for name in command.TIMES] == [6, 5, 40, 10, 4]


def test_windows_are_compared_at_equal_cost():
    def cost(sizes):
        return Recipe(sizes["num_features"], sizes["exact"]).cost(is_causal=True)

    assert [cost(x) for x in windows.recipes([16, 32], 300).values()] == [33, 65, 33, 65]
    tokens = np.arange(12).reshape(2, 6)
    cut = windows.shorter(data.Data(tokens, data.Examples(tokens, tokens + 1)), 4)
    assert cut.calibration.shape == cut.held_out.labels.shape == (2, 4)


def test_uniform_attention_is_the_mean_of_visible_values():
    own, x = layer(8), arrays(5, 1, 4, 8)
    (even,) = command.uniform({"layers": [own]})["layers"]
    value = transformer.dense(own["value"], x)
    means = jnp.cumsum(value, axis=1) / jnp.arange(1, 5)[:, None]
    expected = transformer.dense(own["out"], means)
    np.testing.assert_allclose(transformer.attention(even, x, 4, causal=True), expected, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_linearize_reads_the_transformer(causal):
    own = layer(8, key_heads=2) | {f"norm{n}": (jnp.ones(8),) for n in (1, 2)}
    own |= {"gate": (arrays(7, 8, 12),), "up": (arrays(8, 8, 12),), "down": (arrays(9, 12, 8),)}

    def model(layers, x):
        return transformer.stack(layers, x, 4, transformer.silu, causal=causal, rotary=True)

    x = arrays(11, 4, 16, 8)
    new, report = performer.linearize(model, [([own, own], x)], num_features=16)
    assert len(report.layer_errors()) == 2
    assert not report.left
    assert new([own, own], x).shape == x.shape


def test_errors_of_couplings_are_those_of_the_equations():
    """Of one layer, in float64: geometric means over heads and draws, and the ratio to orf."""

    def function(x):
        query, key = x[..., :2, :], x[..., 2:, :]
        weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", query, key), axis=-1)
        return jnp.einsum("bnts,bsnh->btnh", weights, x[..., :2, :])

    batches = [(arrays(i, 2, 5, 4, 4),) for i in range(2)]
    rows = [*couplings.rows_of(("toy", function, batches), ["iid"], 3)]
    sample = performer.linearization.measure(function, batches).layers[0].held_out
    query, key = (np.asarray(x, np.float64) / 4**0.25 for x in (sample.query, sample.key))

    def matrix(kernel):
        return kernel / kernel.sum(axis=-1, keepdims=True)

    exact = matrix(np.exp(np.einsum("btnh,bsnh->bnts", query, key)))
    errors = {}
    for name in ("orf", "iid"):
        keys = jax.random.split(jax.random.key(0), 3)
        w = np.stack([performer.couplings.draw(k, name, 8, 4, 2) for k in keys]).astype(np.float64)
        of_query, of_key = (
            np.exp(np.einsum("btnh,dnmh->dbntm", x, w) - np.moveaxis(half, 1, 2)[None])
            for x, half in ((y, (y**2).sum(-1, keepdims=True) / 2) for y in (query, key))
        )
        change = matrix(np.einsum("dbntm,dbnsm->dbnts", of_query, of_key)) - exact
        size = (exact**2).sum(axis=(0, 2, 3))
        errors[name] = np.exp(np.mean(np.log((change**2).sum(axis=(1, 3, 4)) / size)))
    assert [x["coupling"] for x in rows] == ["orf", "iid"] * 2
    assert [x["calibration"] for x in rows] == ["none"] * 2 + ["full"] * 2
    for row, name in zip(rows, errors, strict=False):
        np.testing.assert_allclose(row["error"], errors[name], rtol=1e-4)
    np.testing.assert_allclose(rows[1]["ratio"], errors["iid"] / errors["orf"], rtol=1e-4)
    assert rows[2]["error"] != rows[0]["error"]
