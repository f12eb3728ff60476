"""Quadrature rules as attention estimators, beside couplings: a part of `experiments.kernels`.

Relative errors |A^ - A|^2 / |A|^2 of the attention matrix on the tokens of
`experiments.attention.data`, all with the same number of positive features. Rules without their
constant have positive weights and go into `performer_attention`. With it the estimate of exp(q.k),
v = q + k, is e^{-|q|^2/2 - |k|^2/2} (a_0 + sum_j a_j e^{w_j.v}): with reflected points at least
a_0 + sum_j a_j = 1 times the factor, positive whatever the sign of a_0, since cosh >= 1. Without
reflected points it may be negative.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.attention import data
from experiments.common import statistics
from performer import couplings, features, quadrature
from performer.attention import attention_weights
from performer.quadrature import Rule
from performer.typing import Key
from vit import report

TOKENS = (("isotropic", 0.5), ("isotropic", 1.0), ("isotropic", 2.0), ("anisotropic", 2.0))


def signed_estimates(query: jax.Array, key: jax.Array, rule: Rule) -> jax.Array:
    """exp(q.k) for (t, h) and (s, h) by the whole rule: its constant weighs the frequency 0."""
    q, k = (features.positive(x, rule.points, weights=rule.weights) for x in (query, key))
    q_0, k_0 = (jnp.exp(-jnp.sum(x**2, axis=-1) / 2) for x in (query, key))
    return jnp.matmul(q, k.T, precision="highest") + rule.constant * q_0[:, None] * k_0


def not_positive(estimates: jax.Array) -> jax.Array:
    """The share of rows whose sum, or any of whose entries, is not positive."""
    return jnp.mean((estimates.sum(axis=-1) <= 0) | (estimates <= 0).any(axis=-1))


def relative_error(estimate: jax.Array, attention: jax.Array) -> jax.Array:
    """|A^ - A|^2 / |A|^2."""
    return jnp.sum((estimate - attention) ** 2) / jnp.sum(attention**2)


def estimators(d: int) -> dict[str, tuple[Callable[[Key], Rule], bool]]:
    """Rules of 2 (d + 1) points, and whether their constant is used."""

    def method(name: str) -> Callable[[Key], Rule]:
        return lambda key: quadrature.method(key, name, 1, d, reflect=True)

    def coupling(name: str) -> Callable[[Key], Rule]:
        rule = quadrature.random_features(couplings.get(name))
        return lambda key: rule(key, 2 * (d + 1), d)

    not_reflected = partial(quadrature.spherical_radial, num_rules=2, d=d, reflect=False)
    return {
        "G": (method("G"), False),
        "Gort": (method("Gort"), False),
        "orf-antithetic": (coupling("orf-antithetic"), False),
        "pm-antithetic": (coupling("pm-antithetic"), False),
        "H": (method("H"), False),
        "H with constant": (method("H"), True),
        "H with constant, not reflected": (not_reflected, True),
    }


@partial(jax.jit, static_argnames="name")
def attention_errors(
    query: jax.Array, key: jax.Array, draws: Key, name: str
) -> tuple[jax.Array, jax.Array]:
    """Of p pairs (p, t, 1, h): relative errors and shares of bad rows, (draws, p) each."""
    draw_rule, with_constant = estimators(query.shape[-1])[name]

    def draw_errors(draw: Key) -> tuple[jax.Array, jax.Array]:
        rule = draw_rule(draw)

        def pair_errors(pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            q, k = pair
            if with_constant:
                kernel = signed_estimates(q[:, 0], k[:, 0], rule)
                rows = kernel / kernel.sum(axis=-1, keepdims=True)
            else:
                rows = attention_weights(q, k, rule.points, weights=rule.weights, scale=1.0)[0]
                kernel = rows
            return relative_error(rows, softmax(q, k)), not_positive(kernel)

        return jax.lax.map(pair_errors, (query, key))

    return jax.lax.map(draw_errors, draws)


def softmax(query: jax.Array, key: jax.Array) -> jax.Array:
    """Exact attention, (t, 1, h) and (s, 1, h) -> (t, s)."""
    products = jnp.matmul(query[:, 0], key[:, 0].T, precision="highest")
    return jax.nn.softmax(products, axis=-1)


def attention(draws: int, out: Path) -> str:
    """Relative attention errors: a row for each estimator, a column for each kind of tokens."""
    seeds = range(data.DATA_SETS)
    pairs = [data.DATA[kind](norm, seed) for kind, norm in TOKENS for seed in seeds]
    query, key = (jnp.stack(x) for x in zip(*pairs, strict=True))
    columns = [f"{kind} {norm:g}" for kind, norm in TOKENS]
    uniform = [float(relative_error(jnp.asarray(1 / len(k)), softmax(q, k))) for q, k in pairs]
    results = {"uniform": (np.asarray([uniform]), np.zeros(1))}
    keys = jax.random.split(jax.random.key(2), draws)
    for name in estimators(query.shape[-1]):
        errors, bad = attention_errors(query, key, keys, name)
        results[name] = np.asarray(errors), np.asarray(bad)
        print(f"attention {name}", flush=True)
    rows = []
    for name, (errors, bad) in results.items():
        row: dict[str, Any] = {"estimator": name}
        by_kind = errors.reshape(len(errors), len(columns), -1).mean(axis=-1).T
        for column, values in zip(columns, by_kind, strict=True):
            mean, half = statistics.interval(values)
            row |= {column: mean, f"{column}, 95%": half if len(values) > 1 else ""}
        rows.append(row | {"rows not positive": float(bad.mean())})
    reference = next(row for row in rows if row["estimator"] == "G")
    ratios = [
        " ".join([row["estimator"], *(f"{row[c] / reference[c]:.2f}" for c in columns)])
        for row in rows
    ]
    text = f"Errors in units of G's ({', '.join(columns)}): {'; '.join(ratios)}."
    return report.table(rows, out, text)
