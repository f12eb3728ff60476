"""One transformer in Flax linen, Equinox and Haiku, converted by `performer.linearize`.

    python -m experiments.attention.frameworks --out=results/attention/frameworks

scikit-learn's digits as 16 patches of 2 x 2 pixels, one image of five held out. The
model has 2 layers with 2 heads of 16, written with the attention layer of each framework, and is
trained once in each. The table has test accuracy and loss with exact attention, and after the
conversion without further training: frequencies as drawn, calibrated, and calibrated and refined.
The draws are those of `seed=0, 1, ...`; the standard errors are over them.

Equinox and Haiku are no dependencies of this package: `pip install equinox dm-haiku`.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

import performer
from experiments.common import harness, launch, statistics

PATCHES, PIXELS, CLASSES = 16, 4, 10
LAYERS, HEADS, HEAD_DIM = 2, 2, 16
WIDTH = HEADS * HEAD_DIM
BATCH_SIZE, RATE = 32, 2e-3
METHODS = {
    "as drawn": ("none", False),
    "calibrated": ("full", False),
    "calibrated and refined": ("full", True),
}
"""Calibration, and whether frequencies are refined."""

Parameters = Any
Apply = Callable[[Parameters, jax.Array], Any]


def main(
    frameworks: Sequence[Literal["linen", "equinox", "haiku"]] = ("linen", "equinox", "haiku"),
    num_features: Sequence[int] = (16, 32, 64),
    epochs: int = 40,
    steps: int = 200,
    draws: int = 3,
    images: int = 512,
    out: Path = Path("results/attention/frameworks"),
) -> None:
    """Write and print the table `digits` in `out`.

    Args:
        frameworks: frameworks of the model.
        num_features: each m; even numbers.
        epochs: training epochs.
        steps: most steps of Adam to refine frequencies.
        images: training images for calibration and refinement.
    """
    for name in frameworks:
        MODELS[name](jax.random.key(0))  # a missing package is reported before any work
    options: dict[str, Any] = dict(epochs=epochs, steps=steps, draws=draws, images=images)
    made = (converted(name, num_features=num_features, **options) for name in frameworks)
    harness.show([row for rows in made for row in rows], out / "digits")


# --- The same model in three frameworks: key -> parameters, and (parameters, patches) -> logits


def in_linen(key: jax.Array) -> tuple[Parameters, Apply]:
    """Return a model with `linen.MultiHeadDotProductAttention`."""
    from flax import linen

    class Classifier(linen.Module):
        @linen.compact
        def __call__(self, x):
            places = self.param("places", linen.initializers.normal(0.02), (PATCHES, WIDTH))
            x = linen.Dense(WIDTH)(x) + places
            for _ in range(LAYERS):
                x += linen.MultiHeadDotProductAttention(num_heads=HEADS)(linen.LayerNorm()(x))
                hidden = linen.gelu(linen.Dense(2 * WIDTH)(linen.LayerNorm()(x)))
                x += linen.Dense(WIDTH)(hidden)
            return linen.Dense(CLASSES)(jnp.mean(linen.LayerNorm()(x), axis=1))

    model = Classifier()
    return model.init(key, jnp.zeros((1, PATCHES, PIXELS))), model.apply


def in_equinox(key: jax.Array) -> tuple[Parameters, Apply]:
    """Return a model of one image with `eqx.nn.MultiheadAttention`, under `jax.vmap`."""
    import equinox as eqx  # pyright: ignore[reportMissingImports]

    nn = eqx.nn
    biases = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}

    def block(key):
        first, *others = jax.random.split(key, 3)
        sizes = (WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH)
        return {
            "attention": nn.MultiheadAttention(HEADS, WIDTH, **biases, key=first),
            "norms": [nn.LayerNorm(WIDTH) for _ in range(2)],
            "layers": [nn.Linear(*x, key=k) for x, k in zip(sizes, others, strict=True)],
        }

    def classify(model, x):
        x = jax.vmap(model["first"])(x) + model["places"]
        for each in model["blocks"]:
            norm, second_norm = map(jax.vmap, each["norms"])
            up, down = map(jax.vmap, each["layers"])
            y = norm(x)
            x = x + each["attention"](y, y, y)
            x = x + down(jax.nn.gelu(up(second_norm(x))))
        return model["last"](jnp.mean(jax.vmap(model["norm"])(x), axis=0))

    keys = jax.random.split(key, LAYERS + 3)
    model = {
        "first": nn.Linear(PIXELS, WIDTH, key=keys[0]),
        "last": nn.Linear(WIDTH, CLASSES, key=keys[1]),
        "places": 0.02 * jax.random.normal(keys[2], (PATCHES, WIDTH)),
        "blocks": [block(k) for k in keys[3:]],
        "norm": nn.LayerNorm(WIDTH),
    }
    arrays, static = eqx.partition(model, eqx.is_array)
    return arrays, lambda arrays, x: jax.vmap(partial(classify, eqx.combine(arrays, static)))(x)


def in_haiku(key: jax.Array) -> tuple[Parameters, Apply]:
    """Return a model with `hk.MultiHeadAttention`."""
    import haiku as hk  # pyright: ignore[reportMissingImports]

    def classifier(x):
        def normed(x):
            return hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)

        places = hk.get_parameter(
            "places", (PATCHES, WIDTH), init=hk.initializers.RandomNormal(0.02)
        )
        x = hk.Linear(WIDTH)(x) + places
        for _ in range(LAYERS):
            scaled = hk.initializers.VarianceScaling(1.0)
            y = normed(x)
            x += hk.MultiHeadAttention(HEADS, HEAD_DIM, w_init=scaled)(y, y, y)
            x += hk.Linear(WIDTH)(jax.nn.gelu(hk.Linear(2 * WIDTH)(normed(x))))
        return hk.Linear(CLASSES)(jnp.mean(normed(x), axis=1))

    model = hk.without_apply_rng(hk.transform(classifier))
    return model.init(key, jnp.zeros((1, PATCHES, PIXELS))), model.apply


MODELS: dict[str, Callable[[jax.Array], tuple[Parameters, Apply]]] = {
    "linen": in_linen,
    "equinox": in_equinox,
    "haiku": in_haiku,
}


# --- Training and conversion


@functools.cache
def digits() -> Any:
    """Return training and test patches (b, 16, 4), training and test labels, as `vit.train`."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    # (b, 4, 2, 4, 2) -> (b, 4, 4, 2, 2)
    patches = np.moveaxis(pixels.reshape(-1, 4, 2, 4, 2), 2, 3).reshape(-1, PATCHES, PIXELS)
    patches = patches.astype(np.float32) / 16
    split: Any = train_test_split(patches, labels, test_size=0.2, random_state=0, stratify=labels)
    return split


def trained(name: str, epochs: int, seed: int = 0) -> tuple[Parameters, Apply]:
    """Train a model by Adam with a cosine schedule."""
    patches, _, labels, _ = digits()
    key, order = jax.random.split(jax.random.key(seed))
    parameters, apply = MODELS[name](key)
    batches = len(labels) // BATCH_SIZE
    optimiser = optax.adam(optax.cosine_decay_schedule(RATE, epochs * batches))

    def loss(parameters, rows):
        logits = apply(parameters, jnp.asarray(patches)[rows])
        wanted = jnp.asarray(labels)[rows]
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, wanted))

    def step(state, rows):
        parameters, moments = state
        updates, moments = optimiser.update(jax.grad(loss)(parameters, rows), moments)
        return (optax.apply_updates(parameters, updates), moments), None

    def epoch(state, key):
        rows = jax.random.permutation(key, len(labels))[: batches * BATCH_SIZE]
        return jax.lax.scan(step, state, rows.reshape(batches, BATCH_SIZE))

    state = parameters, optimiser.init(parameters)
    keys = jax.random.split(order, epochs)
    (parameters, _), _ = jax.jit(lambda state: jax.lax.scan(epoch, state, keys))(state)
    return parameters, apply


@jax.jit
def tested(apply: jax.tree_util.Partial, parameters: Parameters) -> tuple[jax.Array, jax.Array]:
    """Return accuracy and mean loss on the test images."""
    _, patches, _, labels = digits()
    logits = apply(parameters, patches)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.mean(jnp.argmax(logits, axis=-1) == labels), jnp.mean(losses)


def converted(
    name: str, *, num_features: Sequence[int], epochs: int, steps: int, draws: int, images: int
) -> list[dict[str, Any]]:
    """Return the rows of one framework: exact attention, then each method with each m."""
    parameters, apply = trained(name, epochs)
    accuracy, loss = map(float, tested(jax.tree_util.Partial(apply), parameters))
    exact = {"accuracy": accuracy, "accuracy ±": 0.0, "loss": loss, "loss ±": 0.0}
    errors = {"attention error": 0.0, "uniform attention": ""}
    rows = [{"framework": name, "attention": "exact", "m": 0} | exact | errors]
    patches = digits()[0][:images]
    batches = [(parameters, x) for x in np.array_split(patches, -(-len(patches) // 128))]
    for (method, (calibration, refined)), m in itertools.product(METHODS.items(), num_features):
        options: Any = dict(calibration=calibration, refine_steps=steps * refined)
        options |= dict(coupling="orf-antithetic", num_features=m)
        found, heads = [], []
        for seed in range(draws):
            new, result = performer.linearize(apply, batches, seed=seed, **options)
            if result.left or len(result.layer_errors()) != LAYERS:
                raise ValueError(f"not all attention of {name} was replaced:\n{result}")
            found.append([float(x) for x in tested(new, parameters)])
            heads += result.rows
        row: dict[str, Any] = {"framework": name, "attention": method, "m": m}
        for column, values in zip(("accuracy", "loss"), np.transpose(found), strict=True):
            row[column], row[f"{column} ±"] = statistics.mean_and_error(values)
        rows.append(row | {x: float(np.mean([head[x] for head in heads])) for x in errors})
        print(name, method, m, *found, flush=True)
    return rows


if __name__ == "__main__":
    quick = {"num_features": (16,), "epochs": 1, "steps": 2, "draws": 2, "images": 32}
    launch.run(main, quick=quick)
