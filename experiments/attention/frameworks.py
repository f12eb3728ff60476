"""One transformer in Flax linen, Equinox and Haiku, converted by `performer.linearize`.

    python -m experiments.attention.frameworks --parts=digits,cost \\
        --out=results/attention/frameworks

Part "digits": scikit-learn's digits as 16 patches of 2 x 2 pixels, one image of five held out. The
model has 2 layers with 2 heads of 16, written with the attention layer of each framework, and is
trained once in each. The table has test accuracy and loss with exact attention, and after the
conversion without further training: frequencies as drawn, calibrated, and calibrated and refined.
The draws are those of `seed=0, 1, ...`; the standard errors are over them.

Part "cost": time and peak memory of `performer.linearize` for 24 layers of width 256 (8 heads, 64
tokens, random parameters), and of compiling the new function and the old one. The layers are a list
that Python loops over, or are stacked for `jax.lax.scan`. Each case is a fresh process.

Equinox and Haiku are no dependencies of this package: `pip install equinox dm-haiku`.
"""

import functools
import importlib
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import performer
from experiments.common import launch, statistics
from vit.reports import report

PATCHES, PIXELS, CLASSES = 16, 4, 10
LAYERS, HEADS, HEAD_DIM = 2, 2, 16
WIDTH = HEADS * HEAD_DIM
BATCH_SIZE, RATE = 32, 2e-3
METHODS: dict[str, dict[str, Any]] = {
    "as drawn": {"calibration": "none"},
    "calibrated": {"calibration": "full"},
    "calibrated and refined": {"calibration": "full"},
}
REFINED = "calibrated and refined"

Parameters = Any
Apply = Callable[[Parameters, jax.Array], jax.Array]


class Cost(NamedTuple):
    """Size of the model of part "cost"."""

    layers: int = 24
    width: int = 256
    heads: int = 8
    tokens: int = 64
    examples: int = 8


def main(
    parts: Sequence[Literal["digits", "cost"]] = ("digits", "cost"),
    frameworks: Sequence[Literal["linen", "equinox", "haiku"]] = ("linen", "equinox", "haiku"),
    num_features: Sequence[int] = (16, 32, 64),
    epochs: int = 40,
    steps: int = 200,
    draws: int = 3,
    images: int = 512,
    layers: int = 24,
    out: Path = Path("results/attention/frameworks"),
) -> None:
    """Write and print the tables, `digits` and `cost` in `out`.

    Args:
        frameworks: in which the model is written.
        num_features: each m; even numbers.
        epochs: of training.
        steps: of Adam, at most, where frequencies are refined.
        images: of the training split, for calibration and refinement.
        layers: of the model of part "cost".

    Raises:
        ImportError: if Equinox or Haiku is not installed.
        ValueError: for numbers below 1.
    """
    numbers: dict[str, Any] = dict(epochs=epochs, steps=steps, draws=draws, images=images)
    launch.at_least(1, **numbers, layers=layers, num_features=min(num_features))
    for name in frameworks if "digits" in parts else ():
        MODELS[name](jax.random.key(0))  # a missing package is reported before any work
    if "cost" in parts:
        print(report.table(costs(Cost(layers)), out / "cost"))
    if "digits" in parts:
        made = (converted(name, num_features=num_features, **numbers) for name in frameworks)
        print(report.table([row for rows in made for row in rows], out / "digits"))


# --- The same model in three frameworks: key -> parameters, and (parameters, patches) -> logits


def optional(name: str) -> Any:
    """Import a framework that is no dependency.

    Raises:
        ImportError: if it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{name} is not installed, and this experiment compares frameworks:"
            " pip install equinox dm-haiku"
        ) from error


def in_linen(key: jax.Array) -> tuple[Parameters, Apply]:
    """A model with `linen.MultiHeadDotProductAttention`."""
    linen = optional("flax.linen")

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
    """A model of one image with `eqx.nn.MultiheadAttention`, under `jax.vmap`."""
    eqx = optional("equinox")
    nn = eqx.nn

    class Block(eqx.Module):
        attention: Any
        norms: Any
        layers: Any

        def __init__(self, key):
            first, *others = jax.random.split(key, 3)
            options = dict(use_query_bias=True, use_key_bias=True, use_value_bias=True)
            self.attention = nn.MultiheadAttention(
                HEADS, WIDTH, use_output_bias=True, **options, key=first
            )
            self.norms = [nn.LayerNorm(WIDTH) for _ in range(2)]
            sizes = (WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH)
            self.layers = [nn.Linear(*x, key=k) for x, k in zip(sizes, others, strict=True)]

        def __call__(self, x):
            normed = jax.vmap(self.norms[0])(x)
            x = x + self.attention(normed, normed, normed)
            hidden = jax.nn.gelu(jax.vmap(self.layers[0])(jax.vmap(self.norms[1])(x)))
            return x + jax.vmap(self.layers[1])(hidden)

    class Classifier(eqx.Module):
        ends: Any
        places: Any
        blocks: Any
        norm: Any

        def __init__(self, key):
            keys = jax.random.split(key, LAYERS + 3)
            self.ends = [nn.Linear(PIXELS, WIDTH, key=keys[0])]
            self.ends += [nn.Linear(WIDTH, CLASSES, key=keys[1])]
            self.places = 0.02 * jax.random.normal(keys[2], (PATCHES, WIDTH))
            self.blocks = [Block(k) for k in keys[3:]]
            self.norm = nn.LayerNorm(WIDTH)

        def __call__(self, x):
            x = jax.vmap(self.ends[0])(x) + self.places
            for block in self.blocks:
                x = block(x)
            return self.ends[1](jnp.mean(jax.vmap(self.norm)(x), axis=0))

    arrays, static = eqx.partition(Classifier(key), eqx.is_array)
    return arrays, lambda arrays, x: jax.vmap(eqx.combine(arrays, static))(x)


def in_haiku(key: jax.Array) -> tuple[Parameters, Apply]:
    """A model with `hk.MultiHeadAttention`."""
    hk = optional("haiku")

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


# --- Part "digits"


class Digits(NamedTuple):
    """Patches (b, 16, 4) in [0, 1] and labels."""

    patches: np.ndarray
    labels: np.ndarray


@functools.cache
def digits() -> tuple[Digits, Digits]:
    """Training and test images: the split of `vit.train`."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    # (b, 4, 2, 4, 2) -> (b, 4, 4, 2, 2)
    patches = np.moveaxis(pixels.reshape(-1, 4, 2, 4, 2), 2, 3).reshape(-1, PATCHES, PIXELS)
    parts: Any = train_test_split(
        patches.astype(np.float32) / 16, labels, test_size=0.2, random_state=0, stratify=labels
    )
    return Digits(parts[0], parts[2]), Digits(parts[1], parts[3])


def trained(name: str, epochs: int, seed: int = 0) -> tuple[Parameters, Apply]:
    """A model after Adam with a cosine schedule."""
    train, _ = digits()
    key, order = jax.random.split(jax.random.key(seed))
    parameters, apply = MODELS[name](key)
    batches = len(train.labels) // BATCH_SIZE
    optimiser = optax.adam(optax.cosine_decay_schedule(RATE, epochs * batches))

    def loss(parameters, patches, labels):
        logits = apply(parameters, patches)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))

    def step(state, rows):
        parameters, moments = state
        patches, labels = (jnp.asarray(x)[rows] for x in train)
        updates, moments = optimiser.update(jax.grad(loss)(parameters, patches, labels), moments)
        return (optax.apply_updates(parameters, updates), moments), None

    def epoch(state, key):
        rows = jax.random.permutation(key, len(train.labels))[: batches * BATCH_SIZE]
        return jax.lax.scan(step, state, rows.reshape(batches, BATCH_SIZE))

    state = parameters, optimiser.init(parameters)
    keys = jax.random.split(order, epochs)
    (parameters, _), _ = jax.jit(lambda state: jax.lax.scan(epoch, state, keys))(state)
    return parameters, apply


@jax.jit
def tested(apply: jax.tree_util.Partial, parameters: Parameters) -> tuple[jax.Array, jax.Array]:
    """Accuracy and mean loss on the test images."""
    _, test = digits()
    logits = apply(parameters, test.patches)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, test.labels)
    return jnp.mean(jnp.argmax(logits, axis=-1) == test.labels), jnp.mean(losses)


def converted(
    name: str, *, num_features: Sequence[int], epochs: int, steps: int, draws: int, images: int
) -> list[dict[str, Any]]:
    """Rows of one framework: exact attention, then each method with each m."""
    start = time.monotonic()
    parameters, apply = trained(name, epochs)
    seconds = time.monotonic() - start
    accuracy, loss = map(float, tested(jax.tree_util.Partial(apply), parameters))
    print(f"{name}: trained in {seconds:.0f} s, test accuracy {accuracy:.3f}", flush=True)
    exact = {"accuracy": accuracy, "accuracy ±": 0.0, "loss": loss, "loss ±": 0.0}
    errors = {"attention error": 0.0, "uniform attention": ""}
    rows = [{"framework": name, "attention": "exact", "m": 0} | exact | errors]
    patches = digits()[0].patches[:images]
    batches = [(parameters, x) for x in np.array_split(patches, -(-len(patches) // 128))]
    for method, options in METHODS.items():
        for m in num_features:
            found, heads = [], []
            for seed in range(draws):
                new, result = performer.linearize(
                    apply,
                    batches,
                    coupling="orf-antithetic",
                    num_features=m,
                    refine_steps=steps if method == REFINED else 0,
                    seed=seed,
                    **options,
                )
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


# --- Part "cost"


def costs(size: Cost) -> list[dict[str, Any]]:
    """A row for a list of layers, and one for layers in a scan."""
    # Processes of a server that has computed nothing: peak memory is that of their own work.
    context = multiprocessing.get_context("forkserver")
    rows = []
    for form in FORMS:
        row: dict[str, Any] = {"layers": form}
        for measure in (cost_of_exact, cost_of_linearize):
            with context.Pool(1) as pool:
                row |= pool.apply(measure, (form, size))
        rows.append(row)
        print(*row.values(), flush=True)
    return rows


def cost_of_exact(form: str, size: Cost) -> dict[str, float]:
    """Seconds to trace and compile the function with exact attention; peak memory of one call."""
    function, stack, x = deep(form, size)
    lower, compile_, call = compiled(jax.jit(function), stack, x)
    jax.block_until_ready(call(stack, x))
    return {
        "exact: trace, s": lower,
        "exact: compile, s": compile_,
        "exact: peak memory, MiB": peak_memory(),
    }


def cost_of_linearize(form: str, size: Cost) -> dict[str, float]:
    """Seconds of `linearize`, and to trace and compile the new function; peak memory."""
    function, stack, x = deep(form, size)
    start = time.perf_counter()
    new, _ = performer.linearize(function, [(stack, x)], calibration="full")
    jax.block_until_ready(new)
    seconds, memory = time.perf_counter() - start, peak_memory()
    lower, compile_, _ = compiled(jax.jit(lambda new, *x: new(*x)), new, stack, x)
    return {
        "linearize, s": seconds,
        "linearize: peak memory, MiB": memory,
        "new: trace, s": lower,
        "new: compile, s": compile_,
    }


def compiled(function: Any, *arguments: Any) -> tuple[float, float, Any]:
    """Seconds to trace and lower, seconds to compile, and the program."""
    start = time.perf_counter()
    lowered = function.lower(*arguments)
    middle = time.perf_counter()
    program = lowered.compile()
    return middle - start, time.perf_counter() - middle, program


def peak_memory() -> float:
    """Largest resident memory of this process so far, in MiB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def deep(form: str, size: Cost) -> tuple[Callable[..., jax.Array], Any, jax.Array]:
    """A transformer of many layers, its random parameters and tokens."""
    keys = jax.random.split(jax.random.key(0), 5)
    wide = {"qkv": (size.width, 3 * size.width), "out": (size.width, size.width)}
    wide |= {"first": (size.width, 4 * size.width), "second": (4 * size.width, size.width)}
    stack: Any = {
        name: jax.random.normal(key, (size.layers, *shape)) * shape[0] ** -0.5
        for key, (name, shape) in zip(keys, wide.items(), strict=False)
    }
    x = jax.random.normal(keys[-1], (size.examples, size.tokens, size.width))
    layer = functools.partial(block, heads=size.heads)
    if form == "list":
        stack = [jax.tree.map(lambda x, i=i: x[i], stack) for i in range(size.layers)]
    return functools.partial(FORMS[form], layer), stack, x


def block(x: jax.Array, layer: dict[str, jax.Array], heads: int) -> jax.Array:
    """Attention and a multilayer perceptron, each behind a normalisation."""
    query, key, value = (
        y.reshape(*y.shape[:2], heads, -1)
        for y in jnp.split(jax.nn.standardize(x) @ layer["qkv"], 3, axis=-1)
    )
    scores = jnp.einsum("bqnh,bknh->bnqk", query, key) / query.shape[-1] ** 0.5
    mixed = jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(scores), value)
    x = x + mixed.reshape(x.shape) @ layer["out"]
    return x + jax.nn.gelu(jax.nn.standardize(x) @ layer["first"]) @ layer["second"]


def in_a_list(layer: Callable[..., jax.Array], stack: Any, x: jax.Array) -> jax.Array:
    """One layer after another, in Python."""
    for each in stack:
        x = layer(x, each)
    return x


def in_a_scan(layer: Callable[..., jax.Array], stack: Any, x: jax.Array) -> jax.Array:
    """The body of `jax.lax.scan`, traced once."""
    return jax.lax.scan(lambda x, each: (layer(x, each), None), x, stack)[0]


FORMS = {"list": in_a_list, "scan": in_a_scan}


if __name__ == "__main__":
    quick = {"num_features": (16,), "epochs": 1, "steps": 2, "draws": 1, "images": 32, "layers": 2}
    launch.run(main, quick=quick)
