"""Times of recipes of `performer.linearize`; `performer-vit benchmark recipes` runs it.

Forward passes of attention with 12 heads of 64: softmax, features alone, with exact keys, and
causal with windows, in turn. A CPU has one sequence in float32, an accelerator eight in bfloat16.
"cost" is the time in keys of exact attention: relative to softmax, times the number of keys.
`performer.linearization.costs` has the coefficients that fit these costs.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from performer import Exact, Features, performer_attention
from performer.linearization import costs
from performer.linearization.report import Recipe
from vit.speed.baselines import D, exact, inputs
from vit.study import timing

Row = dict[str, Any]
HEADS = 12
LENGTHS = (577, 2048)
ALONE = [Recipe(m) for m in (16, 32, 64, 128, 256)]
RECIPES = {
    False: [*ALONE, *(Recipe(m, Exact(keys=f)) for m in (16, 32, 128) for f in (16, 64, 128))],
    True: [*ALONE, *(Recipe(m, Exact(w, first=1)) for m in (0, 32, 128) for w in (16, 64, 128))],
}
"""Recipes of attention to all keys, and of causal attention."""


def measured(divisor: int = 1, repeats: int = 10) -> list[Row]:
    """Time each recipe in turn with softmax; a row for each."""
    batch, dtype = (1, jnp.float32) if jax.default_backend() == "cpu" else (8, jnp.bfloat16)
    rows = []
    for tokens in (length // divisor for length in LENGTHS):
        for is_causal, recipes in RECIPES.items():
            args = inputs(tokens, HEADS, batch, dtype)[:4]
            softmax = timing.compiled(partial(exact, is_causal=is_causal), *args)
            programs = {None: softmax} | {x: _program(x, is_causal, args) for x in recipes}
            calls = {str(x): each.call for x, each in programs.items()}
            best = timing.race(calls, repeats)
            for recipe in programs:
                ms = 1e3 * best[str(recipe)].wall
                sizes = dict.fromkeys(("m", "window", "exact keys"), "")
                if recipe:
                    window, _, keys, _ = recipe.exact
                    sizes = {"m": recipe.num_features, "window": window, "exact keys": keys}
                row = {"tokens": tokens, "attention": "causal" if is_causal else "all keys"}
                cost = tokens * ms / (1e3 * best["None"].wall)
                rows.append(row | sizes | {"time, ms": ms, "cost": cost})
    return rows


def _program(recipe: Recipe, is_causal: bool, args: list[jax.Array]) -> timing.Program:
    def attend(query, key, value, frequencies):
        w = jnp.resize(frequencies, (recipe.num_features, D)) if recipe.num_features else None
        features = Features(w, exact=recipe.exact)
        return performer_attention(query, key, value, features, is_causal=is_causal)

    return timing.compiled(attend, *args)


def coefficients(rows: Sequence[Row]) -> list[Row]:
    """Return the coefficients that fit the costs, and the share of pairs that they order alike.

    Pairs have the same length and attention, and costs that differ by a tenth or more.
    """
    table = []
    for is_causal, attention in ((False, "all keys"), (True, "causal")):
        some = [row for row in rows if row["attention"] == attention and row["m"] != ""]
        recipes, tokens = [_recipe(row) for row in some], [row["tokens"] for row in some]
        measured = np.array([row["cost"] for row in some])
        fit = costs.fitted(recipes, measured, is_causal)
        expected = np.array([costs.terms(x, is_causal) for x in recipes]) @ fit
        first, second = np.triu_indices(len(some), 1)
        apart = np.log(measured[first] / measured[second])
        by_fit = expected[first] - expected[second]
        counted = np.equal(*np.array(tokens)[[first, second]]) & (abs(apart) > np.log(1.1))
        alike = float(np.mean(np.sign(apart) == np.sign(by_fit), where=counted))
        table.append({"attention": attention} | fit._asdict() | {"pairs ordered alike": alike})
    return table


def _recipe(row: Row) -> Recipe:
    window, keys = int(row["window"]), int(row["exact keys"])
    return Recipe(int(row["m"]), Exact(window, int(window > 0), keys))
