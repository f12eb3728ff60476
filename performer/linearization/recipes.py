"""How a layer is replaced: numbers of features and exact pairs, calibrated and refined.

A layer has a ladder of recipes, the fastest first (`timing`), and gets the first whose attention
error on held-out examples is within the tolerance, or a better one that is as fast. Recipes that
are not faster than exact attention are no steps of it, unless the user gives a tolerance. Sizes
that the user gives are a ladder of one step, for all layers or (`recipes`) for each; with a
tolerance they are its top.
"""

import math
import sys
import time as clock
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from performer import calibration as calibrations
from performer import couplings
from performer.analysis import by_cost
from performer.attention import sizes
from performer.attention.refusals import check_exact
from performer.attention.values import NOT_EXACT, Exact, Features
from performer.linearization.costs import COSTS, cost
from performer.linearization.layers import HeadErrors, Layer, Measured, head_errors, mean
from performer.linearization.report import Recipe, Report
from performer.linearization.timing import MARGIN, PASSES, Table, Time, table
from performer.refinement import (
    START,
    Far,
    Sample,
    calibrated_far,
    estimate,
    learned_features,
    positive_features,
    refine_far,
    row_squares,
    softmax_attention,
    traced,
    transfer,
)
from performer.typing import Coupling

TOLERANCE, REFINED = 0.1, 0.05
"""Largest attention error of a layer without and with refinement, if the user gives none."""
EXACT_KEYS, WINDOWS = (0, 16, 32, 64, 128), (16, 32, 64, 128)
"""Exact keys to try in layers without positions, windows to try in causal ones."""
REACH = 4
"""Refinement is tried where the error is at most so many times the tolerance: it divides errors by
3 to 5 (docs, "Results")."""

ENOUGH = 8
"""Held-out examples that suffice to compare two errors."""
SQUARE = "it requires as many queries as keys"
UNORDERED = "it requires attention without causality, segments and ALiBi"
REQUIRES = SQUARE, SQUARE, UNORDERED, UNORDERED
"""Why a layer has no pairs of a field of `Exact`."""
HOPELESS = 1.5
"""Recipes that are larger in every size than one that takes so many times the time of exact
attention are not timed."""


@dataclass(frozen=True)
class Options:
    """Attention that replaces softmax, by the keywords of `performer.linearize`."""

    coupling: str | Coupling = couplings.DEFAULT
    num_features: int | None = None
    calibration: str = "full"
    refine_steps: int = 0
    keep: int = 0
    tolerance: float | None = None
    seed: int = 0
    exact: Exact | None = None
    """None if no number of exact pairs is given."""
    recipes: Mapping[str, tuple[int, Exact]] | None = None
    """Sizes of each layer by its path, of those alone that are replaced."""
    time: str | None = "forward"
    """Passes to time, one of `timing.PASSES`; a platform of `costs.COSTS`, or None for this one, to
    time nothing."""
    show: Callable[[str], Any] | None = None

    @property
    def sized(self) -> bool:
        """True if the user gives sizes."""
        return any(x is not None for x in (self.num_features, self.exact, self.recipes))

    @property
    def is_timed(self) -> bool:
        """True if recipes are timed here."""
        return self.time in PASSES

    @property
    def platform(self) -> str:
        """Platform whose costs order the recipes that are not timed."""
        return next(x for x in (self.time, sizes.platform(), "cpu") if x in COSTS)

    @property
    def must_be_faster(self) -> bool:
        """True if a layer stays exact unless a recipe is faster: without sizes and tolerance."""
        return self.is_timed and self.tolerance is None and not self.sized

    @property
    def limit(self) -> float:
        """Largest attention error of a layer that is replaced."""
        if self.tolerance is None and not self.sized:
            return REFINED if self.refine_steps else TOLERANCE
        return math.inf if self.tolerance is None else self.tolerance

    def meets(self, error: float) -> bool:
        """True if a layer with this error is replaced; never for NaN, unless sizes are given."""
        return self.limit == math.inf or error <= self.limit

    def wanted(self, layer: Layer) -> tuple[int | None, Exact]:
        """Return the number of features and the exact pairs that are given for a layer."""
        if self.recipes is not None:
            return self.recipes[layer.path]
        return self.num_features, self.exact or NOT_EXACT

    def ladder(self, layer: Layer) -> list[Recipe]:
        """Return the recipes to try for a layer, in the order of their costs."""
        h, (t, s), (m, exact) = layer.head_dim, layer.lengths, self.wanted(layer)
        most, exact = 2 * h if m is None else m, layer.supported(exact)
        if most == 0 and not exact.window:
            raise ValueError(
                f"{layer.path} has no exact window, for {SQUARE}, and num_features=0 leaves it"
                " nothing else: leave it exact by where"
            )
        if self.sized and self.tolerance is None:
            return [Recipe(most, exact)]
        order = partial(cost, platform=self.platform, is_causal=layer.is_causal)
        if self.sized:
            even = [most] + [most >> i for i in (1, 2, 3) if most % 2 ** (i + 1) == 0]
            counts = by_cost(even, exact.keys)
            return sorted((Recipe(m, exact._replace(keys=f)) for m, f in counts), key=order)
        numbers = [m for m in (h // 4, h // 2, h, 2 * h, 4 * h) if m % 2 == 0 and m >= min(h, 8)]
        if layer.supported(Exact(keys=1)).keys:
            pairs = [Exact(keys=f) for f in EXACT_KEYS if f < s]
        else:
            windows = [w for w in WINDOWS if layer.supported(Exact(w)).window and 2 * w < t]
            pairs = [NOT_EXACT, *(Exact(w, first=1) for w in windows)]
        if not self.refine_steps:  # a window alone has nothing to refine
            numbers = [0, *numbers]
        return sorted(
            (Recipe(m, x) for m, x in product(numbers, pairs) if m or x.window), key=order
        )

    @classmethod
    def of(cls, batches: Any, **keywords: Any) -> "Options":
        """Check the keywords, and the batches.

        Raises:
            ValueError: for invalid ones.
        """
        options = cls(**keywords)
        calibrations.parts(options.calibration, options.coupling)
        for name, count in (("refine_steps", options.refine_steps), ("keep", options.keep)):
            if count < 0:
                raise ValueError(f"{name} must not be negative, got {count}")
        if options.recipes is None:
            _check_sizes(options.num_features, options.exact or NOT_EXACT)
        for m, exact in (options.recipes or {}).values():
            _check_sizes(m, exact)
        others = options.num_features, options.exact, options.tolerance
        if options.recipes is not None and any(x is not None for x in others):
            raise ValueError(
                "recipes has the sizes of each layer: leave out num_features, exact and tolerance"
            )
        if options.time not in (*PASSES, *COSTS, None):
            choices = ", ".join(map(repr, (*PASSES, *COSTS, None)))
            raise ValueError(f"time must be one of {choices}, got {options.time!r}")
        if options.tolerance is not None and not options.tolerance > 0:
            raise ValueError(f"tolerance must be positive, such as 0.1, got {options.tolerance}")
        if hasattr(batches, "shape"):
            raise ValueError(
                "batches must be a list of batches, and this is one array of shape"
                f" {batches.shape}: pass [x]"
            )
        if options.refine_steps and iter(batches) is batches:
            raise ValueError(
                "refine_steps reads the batches once for each layer, and these can be read only"
                " once: pass a list of them"
            )
        return options


def _check_sizes(num_features: int | None, exact: Exact) -> None:
    """Raise ValueError for sizes that no layer can have."""
    check_exact(exact)
    if num_features is not None and num_features < 0:
        raise ValueError(f"num_features must not be negative, got {num_features}")
    if exact.first and not exact.window:
        raise ValueError(f"{exact} requires a window, as in Exact(window=16, first=1)")
    if num_features == 0 and not exact.window:
        raise ValueError(
            "num_features=0 attends to a window alone: it requires exact=Exact(window=...)"
        )


class Drawn(NamedTuple):
    """Attention in the place of a layer."""

    recipe: Recipe
    ways: list[Features]
    """One, or with a window that is refined two: frequencies moved, or all parameters of `Far`."""
    error: float
    """The smallest attention error on held-out examples, mean over heads."""
    first_row: float = 0.0
    """The error of the first query's row."""
    is_slow: bool = False
    """True if it would be no faster than exact attention."""


Examples = Callable[[Layer], Sample]
"""Queries and keys of a layer in all batches, without those held out."""


def replacements(
    measured: Measured, examples: Examples, options: Options
) -> tuple[dict[int, Features], Report]:
    """Attention of the layers that do not stay exact, by number, and the report of all."""
    layers, show = measured.layers, options.show or _print
    keys = jax.random.split(jax.random.key(options.seed), len(layers))
    drawn: dict[int, Drawn] = {}
    tables: dict[int, Table] = {}
    places, left = _chosen_places(layers, options.recipes)
    for place in places:
        numbers = [i for i, layer in enumerate(layers) if layer.place == place]
        if options.is_timed:
            first, named = layers[numbers[0]], measured.places[place]
            kind: Any = dict(kind=first.kind, masked=first.masked, slopes=first.slopes is not None)
            kind["key_bias"] = first.has_key_bias
            tables[place] = table(named, str(options.time), **kind)
        keyed = [(keys[i], layers[i]) for i in numbers]
        steps = _Steps(keyed, tables.get(place), options, show, {})
        drawn |= dict(zip(numbers, _chosen(steps, examples), strict=True))
    # One way for all layers: that with the lower error.
    errors = {
        i: [head_errors(layers[i].held_out, way, layers[i].is_causal) for way in x.ways]
        for i, x in sorted(drawn.items())
    }
    way = -1 if sum(mean(x[0]) - mean(x[-1]) for x in errors.values()) > 0 else 0
    attention = {i: (drawn[i].ways[way], x[way]) for i, x in errors.items()}
    slow = {layers[i].place for i, x in drawn.items() if x.is_slow}
    largest: dict[int, float] = {}  # error of a layer of each place
    for i, (_, numbers) in attention.items():
        largest[layers[i].place] = max(mean(numbers), largest.get(layers[i].place, 0.0))
    largest = {place: error for place, error in largest.items() if place not in slow}
    ordered = sorted(largest, key=lambda x: -largest[x])
    kept = [x for i, x in enumerate(ordered) if i < options.keep or not options.meets(largest[x])]
    new = {i: x for i, (x, _) in attention.items() if layers[i].place not in (*slow, *kept)}
    rows: list[dict[str, Any]] = []
    remarks: list[tuple[str, str]] = []
    for i, (linear, numbers) in attention.items():
        layer, recipe = layers[i], drawn[i].recipe
        row = {"path": layer.path, "layer": i, "head": 0}
        row |= {"attention": "linear" if i in new else "exact", "m": recipe.num_features}
        window, first, *others = recipe.exact
        row |= {"window": window, "first": first}
        row |= dict(zip(("exact keys", "exact rows"), others, strict=True))
        cost, keys = recipe.cost(layer.is_causal), layer.lengths[1]
        row |= {"cost": cost if i in new else keys, "keys": keys}
        times = tables.get(layer.place)
        row |= _times_of(times, linear)
        for head, values in enumerate(zip(*(x.tolist() for x in numbers.values()), strict=True)):
            rows.append(row | {"head": head} | dict(zip(numbers, values, strict=True)))
        if layer.place in slow:
            remarks.append((layer.path, _slow(layer, row)))
        else:
            texts = _remarks(layer, linear, numbers, options, i in new)
            remarks += [(layer.path, text) for text in texts]
    return new, Report(rows, measured.left | left, _grouped(remarks), options.limit)


def _chosen_places(
    layers: Sequence[Layer], recipes: Mapping[str, tuple[int, Exact]] | None
) -> tuple[list[int], dict[str, str]]:
    """Return the places that have recipes, and path -> why the other layers stay exact.

    Raises:
        ValueError: for a path that is no layer's, and steps of a scan with several recipes.
    """
    by_place: dict[int, list[str]] = {}
    for layer in layers:
        by_place.setdefault(layer.place, []).append(layer.path)
    if recipes is None:
        return list(by_place), {}
    paths = [layer.path for layer in layers]
    unknown = [path for path in recipes if path not in paths]
    if unknown:
        raise ValueError(f"recipes has no layer {unknown[0]!r}: choose from {', '.join(paths)}")
    for scan in by_place.values():
        if len({recipes.get(path) for path in scan}) > 1:
            raise ValueError(f"recipes must be the same for all steps of a scan: {', '.join(scan)}")
    chosen = [place for place, (path, *_) in by_place.items() if path in recipes]
    return chosen, {path: "it has no recipe" for path in paths if path not in recipes}


class _Steps(NamedTuple):
    """The ladder of a place."""

    layers: Sequence[tuple[PRNGKeyArray, Layer]]
    """Layers of the place with the keys of their frequencies: several in a scan."""
    table: Table | None
    options: Options
    show: Callable[[str], Any]
    times: dict[Recipe, Time]
    """Times of the recipes that were timed so far."""

    @property
    def layer(self) -> Layer:
        """The first layer, of whose kind all are."""
        return self.layers[0][1]

    def seconds(self, recipe: Recipe) -> float:
        """Time of the first layer's attention by a recipe."""
        assert self.table is not None
        if recipe not in self.times:
            self.times[recipe] = self.table.time(_features(None, self.layer, recipe, self.options))
        return self.times[recipe].seconds

    def is_slow(self, recipe: Recipe, margin: float = MARGIN) -> bool:
        """True if the recipe takes longer than exact attention, divided by the margin."""
        return self.table is not None and self.seconds(recipe) * margin > self.table.exact.seconds

    def recipes(self) -> list[Recipe]:
        """The recipes, the fastest first; without times in the order of their costs."""
        recipes, hopeless, timed = self.options.ladder(self.layer), [], []
        if self.table is None or (self.options.sized and self.options.tolerance is None):
            return recipes
        start, before = clock.perf_counter(), len(self.table.times)
        for recipe in recipes:
            if not any(recipe.contains(other) for other in hopeless):
                timed.append(recipe)
                if self.is_slow(recipe, 1 / HOPELESS):
                    hopeless.append(recipe)
        if new := len(self.table.times) - before:
            seconds = clock.perf_counter() - start
            b, t, n, h = self.table.operands[0].shape
            self.show(
                f"timed {new} recipes of attention in {seconds:.0f} s: {b} x {t} tokens, {n} heads"
                f" of {h}"
            )
        timed.sort(key=self.seconds)
        others = [x for x in recipes if x not in timed]
        return timed if self.options.must_be_faster else timed + others

    def with_first_row(self, recipe: Recipe) -> Recipe:
        """The recipe with the exact row of the first query, where the layer can have it."""
        return recipe._replace(
            exact=self.layer.supported(recipe.exact._replace(rows=max(recipe.exact.rows, 1)))
        )


def _chosen(steps: _Steps, examples: Examples) -> list[Drawn]:
    """The layers of a place by the fastest recipe within the limit, else by the best one.

    Recipes whose times differ by no more than `MARGIN` are as fast: the best of them counts, unless
    they are refined, which takes long. The first query is exact where its row is not within the
    limit, as a class token's often is. All recipes are tried until one is within it: errors need
    not fall with the time. Features that overestimate far keys make a window worse than it is
    alone.
    """
    options, layers, best, least = steps.options, steps.layers, [], math.inf
    slow: list[Recipe] = []
    within: Recipe | None = None
    sample = cache(lambda i: examples(layers[i][1]))

    def calibrated(recipe: Recipe) -> list[Drawn]:
        return [_calibrated(key, layer, recipe, options) for key, layer in layers]

    def is_slower(recipe: Recipe) -> bool:
        return within is not None and steps.seconds(recipe) > MARGIN * steps.seconds(within)

    for recipe in steps.recipes():
        if is_slower(recipe):
            break
        if options.must_be_faster and steps.is_slow(recipe):
            slow.append(recipe)
            continue
        drawn = calibrated(recipe)
        if any(x.first_row > options.limit for x in drawn) and not options.sized:
            recipe = steps.with_first_row(recipe)
            if is_slower(recipe):
                continue
            if options.must_be_faster and steps.is_slow(recipe):
                slow.append(recipe)
                continue
            drawn = calibrated(recipe)
        worst = before = max(x.error for x in drawn)
        if options.refine_steps and recipe.num_features and worst <= REACH * options.limit:
            drawn = [_refined(x, layers[i][1], sample(i), options) for i, x in enumerate(drawn)]
            worst = max(x.error for x in drawn)
            steps.show(f"{steps.layer.path}: {recipe}: error {before:.3g}, refined {worst:.3g}")
        if not best or worst < least:
            best, least = drawn, worst
        if within is None and options.meets(worst):
            if steps.table is None or options.refine_steps:
                break
            within = recipe
    if best:
        return best
    fastest = min(slow, key=steps.seconds)
    return [x._replace(is_slow=True) for x in calibrated(fastest)]


def _features(key: PRNGKeyArray | None, layer: Layer, recipe: Recipe, options: Options) -> Features:
    """Frequencies of the coupling, calibrated to the moments; ones without a key, to be timed."""
    (m, exact), fitted, w = recipe, None, None
    if m:
        h, k = layer.held_out.key.shape[:-3:-1]
        w = jnp.ones((k, m, h)) if key is None else couplings.draw(key, options.coupling, m, h, k)
        if calibrations.parts(options.calibration):
            moments = layer.moments.astype(jnp.float32)
            given = options.calibration, options.coupling, exact.mixed
            fitted = calibrations.fit(moments, *given)
    return Features(w, fitted, coupling=options.coupling, exact=exact)


def _calibrated(key: PRNGKeyArray, layer: Layer, recipe: Recipe, options: Options) -> Drawn:
    """Features of a recipe, and their attention error on held-out examples."""
    features = _features(key, layer, recipe, options)
    w, fixed = features.frequencies, (features.calibration, traced(recipe.exact))
    error, first = _errors(positive_features, w, fixed, layer.held_out, layer.is_causal)
    return Drawn(recipe, [features], float(error), float(first))


@partial(jax.jit, static_argnums=(0, 4))
def _errors(
    features_of: Callable[..., Features],
    parameters: Any,
    fixed: Any,
    sample: Sample,
    is_causal: bool,
) -> tuple[Array, Array]:
    """The attention error of all rows and of the first row, means over heads."""

    def sums(example):
        one = jax.tree.map(lambda x: x[None], example)
        exact, pairs = softmax_attention(one, is_causal), one.pairs(is_causal)
        change = estimate(features_of(parameters, fixed), one, is_causal) - exact
        rows = jnp.stack([row_squares(x, pairs)[0] for x in (change, exact)])  # (2, n, t)
        return jnp.sum(rows, axis=2), rows[..., 0]

    whole, first = (jnp.sum(x, axis=0) for x in jax.lax.map(sums, sample))
    return jnp.mean(whole[0] / whole[1]), jnp.mean(first[0] / jnp.maximum(first[1], 1e-30))


def _refined(drawn: Drawn, layer: Layer, sample: Sample, options: Options) -> Drawn:
    """Parameters moved towards softmax attention on all examples of the layer."""
    (linear,), exact, is_causal = drawn.ways, drawn.recipe.exact, layer.is_causal
    w, fixed = linear.frequencies, (linear.calibration, traced(exact))
    how: Any = dict(steps=options.refine_steps, is_causal=is_causal)
    moved = transfer(positive_features, w, fixed, sample, **how)
    ways = [replace(linear, frequencies=moved)]
    errors = [_errors(positive_features, moved, fixed, layer.held_out, is_causal)[0]]
    if exact.window and w is not None:
        kind: Any = dict(method=options.calibration, coupling=options.coupling)
        start, fitted = calibrated_far(w, exact, sample, is_causal=is_causal, **kind)
        far = refine_far(Far.of(START * start.w_key), fitted, exact, sample, **how)
        ways.append(far.features(exact))
        errors.append(
            _errors(learned_features, far, (None, traced(exact)), layer.held_out, is_causal)[0]
        )
    return Drawn(drawn.recipe, ways, min(map(float, errors)))


def _times_of(times: Table | None, linear: Features) -> dict[str, float]:
    """Milliseconds of a layer's attention, exact and replaced; none without a table."""
    if times is None:
        return {}
    exact, new = times.exact.seconds, times.time(linear).seconds
    return {"exact, ms": 1e3 * exact, "replacement, ms": 1e3 * new, "speed-up": exact / new}


def _slow(layer: Layer, row: dict[str, Any]) -> str:
    """Why a layer stays exact for which no recipe is faster."""
    return (
        f"stays exact: the fastest recipe takes {1 / row['speed-up']:.2f} times the"
        f" time of exact attention at {layer.lengths[1]} tokens"
    )


def _remarks(
    layer: Layer, linear: Features, errors: HeadErrors, options: Options, is_new: bool
) -> list[str]:
    """Return what the user should know about a layer."""
    remarks, error, exact = [], mean(errors), linear.exact
    if not is_new and not options.meets(error):
        remarks.append(f"stays exact: its error is {error:.2g}, the tolerance {options.limit:g}")
    _, wanted = options.wanted(layer)
    for name, number, has, requires in zip(Exact._fields, wanted, exact, REQUIRES, strict=True):
        if number and not has and options.tolerance is None:
            remarks.append(f"has no {Exact(**{name: number})}: {requires}")
    if (
        is_new
        and layer.is_causal
        and not exact.window
        and error > mean(errors, "uniform attention")
    ):
        remarks.append(
            f"is worse than uniform attention ({error:.2g}): causal layers need a window, for"
            " example exact=Exact(window=32, first=1)"
        )
    if is_new and len(layer.held_out.query) >= ENOUGH:
        fitted_error = mean(head_errors(layer.fitted, linear, layer.is_causal))
        if error - fitted_error > max(3 * mean(errors, "standard error"), 0.01):
            remarks.append(
                f"has the error {error:.2g} on held-out examples and {fitted_error:.2g} on those"
                " fitted: give more batches, or fewer refine_steps"
            )
    return remarks


def _grouped(remarks: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Sentences about layers; one where several have the same."""
    paths: dict[str, list[str]] = {}
    for path, text in remarks:
        paths.setdefault(text, []).append(path)
    others = {text: f" (and {len(x) - 1} more)" * (len(x) > 1) for text, x in paths.items()}
    return tuple(f"{x[0]}{others[text]} {text}" for text, x in paths.items())


def _print(line: str) -> None:
    """Progress, on a terminal alone."""
    if sys.stderr.isatty():
        print(line, file=sys.stderr)
