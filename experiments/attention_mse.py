"""The README's first table: how far the estimated attention matrix is from softmax attention.

    python -m experiments.attention_mse --couplings=orf,pm,pm-antithetic --num_features=128

Relative error |A_hat - A|^2 / |A|^2 at the geometry of a ViT (197 tokens, head_dim 64), averaged
over draws of the frequencies and over data sets of isotropic Gaussian queries and keys, whose mean
squared norm after scaling is `--squared_norm`. Uniform attention stands beside it.
"""

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import performer
from performer.attention import attention_weights

TOKENS, HEAD_DIM = 197, 64


def relative_errors(name: str, num_features: int, squared_norm: float, draws: int) -> list[float]:
    """One error for each of four data sets; "uniform" needs no draws."""
    errors = []
    for seed in range(4):
        data_key, draw_key = jax.random.split(jax.random.key(seed))
        scale = (squared_norm / HEAD_DIM) ** 0.5
        query, key = scale * jax.random.normal(data_key, (2, TOKENS, HEAD_DIM))
        exact = jax.nn.softmax(query @ key.T)

        def error(estimate, exact=exact):
            return jnp.sum((estimate - exact) ** 2) / jnp.sum(exact**2)

        if name == "uniform":
            errors.append(float(error(jnp.full((TOKENS, TOKENS), 1 / TOKENS))))
            continue
        coupling = performer.couplings.get(name)

        def draw(draw_key, coupling=coupling, q=query[:, None], k=key[:, None], error=error):
            frequencies = coupling(draw_key, num_features, HEAD_DIM)
            return error(attention_weights(q, k, frequencies, scale=1.0)[0])

        errors.append(float(jnp.mean(jax.lax.map(draw, jax.random.split(draw_key, draws)))))
    return errors


def main(_: list[str]) -> None:
    """Prints the table."""
    names = _COUPLINGS.value or performer.couplings.names()
    for name in names:  # all names are right before any work starts
        performer.couplings.get(name)
    print("| coupling | attention error |\n|---|---|")
    for name in [*names, "uniform"]:
        errors = relative_errors(name, _NUM_FEATURES.value, _SQUARED_NORM.value, _DRAWS.value)
        print(f"| {name} | {np.mean(errors):.4f} ± {np.std(errors, ddof=1) / 2:.4f} |")


if __name__ == "__main__":
    _COUPLINGS = flags.DEFINE_list("couplings", [], "names; all if none is given")
    _NUM_FEATURES = flags.DEFINE_integer("num_features", 128, "m", lower_bound=1)
    _SQUARED_NORM = flags.DEFINE_float("squared_norm", 1.0, "mean |q|^2 and |k|^2 after scaling")
    _DRAWS = flags.DEFINE_integer("draws", 200, "draws of the frequencies", lower_bound=1)
    app.run(main)
