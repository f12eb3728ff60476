"""Attention in a program, measured on batches: what linear attention can replace, and how."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, reduce
from typing import Annotated, Any, NamedTuple, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from performer.calibration import pair_moments
from performer.linearization import reading
from performer.linearization.factors import Factors
from performer.linearization.layers import Layer
from performer.linearization.layout import Unfit
from performer.linearization.masks import KINDS, NO_SLOPE, alibi_slopes, fits
from performer.linearization.program import (
    MASKED,
    Alone,
    Named,
    Place,
    Program,
    Ref,
    Values,
    left_in,
    named,
    run,
)
from performer.linearization.search import READ_ELSEWHERE, traced
from performer.refinement import Sample, is_held_out, parted
from performer.typing import float32_or_wider

TOLERANCE = {"float32": 1e-3, "float64": 1e-6}
"""Largest error of what was read out, relative to the largest output; 0.05 for narrower types."""
SECOND = " (second reason)"
"""End of the name of a line that has two reasons to stay exact."""
ZERO = np.float32(0)
BYTES = 2**30
"""Memory for the arrays that enter attention; larger ones are computed one group of places after
another."""
BATCHES = 4
"""Batches from which on the last one is held out: answers are compared on it."""
EXAMPLES = 8
"""Examples held out, and as many of the others, whose queries and keys are kept."""


def added(before: Any, new: Any, scans: int) -> Any:
    """Sum of two records."""
    del scans
    return before + new


def both(before: Any, new: Any, scans: int) -> Any:
    """True where both records are."""
    del scans
    return before & new


def largest(before: Any, new: Any, scans: int) -> Any:
    """The larger numbers of two records."""
    del scans
    return np.maximum(before, new)


def first_examples(before: Sample, new: Sample, scans: int) -> Sample:
    """The first examples of two records, of the length of the first record."""
    shapes = ([x.shape[scans + 1 :] for x in sample if x is not None] for sample in (before, new))
    if len({tuple(x) for x in shapes}) > 1:
        return before
    joined = jax.tree.map(lambda *x: np.concatenate(x, axis=scans), before, new)
    first = np.arange(min(EXAMPLES, joined.key.shape[scans]))
    return jax.tree.map(lambda x: np.take(x, first, axis=scans), joined)


class Record(NamedTuple):
    """Measurements at a place; each field has the rule by which two records are joined.

    In a scan arrays have an axis of its steps before all others.
    """

    moments: Annotated[Any, added]
    """Moments of pairs, times their count."""
    count: Annotated[Any, added]
    batches: Annotated[Any, added]
    slopes: Annotated[Any, added]
    """Slopes of ALiBi, one for each head, summed over batches; in the second row as for `alibi`."""
    scale: Annotated[Any, largest]
    """The largest of each head."""
    same_heads: Annotated[Any, both]
    same_in_groups: Annotated[Any, both]
    """True if scale and bias of the keys are the same for all query heads of a key head."""
    alibi: Annotated[Any, both]
    """True if the bias has the form of ALiBi's; second, without numbers of each key."""
    exact: Annotated[Any, both]
    """True if softmax of what was read is what the program computes."""
    all_keys: Annotated[Any, both]
    """True if each key is seen by a query."""
    fits: Annotated[Any, both]
    """For each kind of masks: whether the mask is of it."""
    kinds: Annotated[Any, both]
    """True for each kind as which the mask is read in linear time; two rows as of `alibi`."""
    held_out: Annotated[Sample, first_examples]
    fitted: Annotated[Sample, first_examples]

    def together(self, new: "Record", scans: int = 0) -> "Record":
        """One record of two calls or batches; the first `scans` axes are the steps of scans."""
        hints = get_type_hints(Record, include_extras=True)
        rules = (hints[name].__metadata__[0] for name in self._fields)
        return Record(*(rule(x, y, scans) for rule, x, y in zip(rules, self, new, strict=True)))

    def unfitted(self, scans: int = 0) -> "Record":
        """The record without what features are fitted to."""
        fitted = jax.tree.map(lambda x: np.take(x, [], axis=scans), self.fitted)
        return self._replace(moments=0 * self.moments, count=0 * self.count, fitted=fitted)


class Observed(NamedTuple):
    """Attention that a function computes, and what was measured of it."""

    places: list[Named]
    records: dict[int, Record]
    """Number of a place -> its record."""
    left: dict[str, tuple[str, str]]
    """Name of what cannot be replaced -> its scope and the reason."""
    is_held_out: bool = False
    """True if nothing is fitted to the last batch."""


def observe(
    function: Callable[..., Any],
    batches: Iterable[Any],
    chosen: Callable[[Named], bool] = lambda place: True,
) -> Observed:
    """Call the function on the batches, and measure the chosen places.

    Raises:
        ValueError: if there are no batches, if they run different programs, or if one is no tuple
            of arguments.
    """
    observed, number, records = Observed([], {}, {}), None, {}
    places: list[Named] = []
    last: dict[int, Record] = {}

    def joined(new: dict[int, Record]) -> dict[int, Record]:
        same = observed.records.keys() & new
        records = {i: observed.records[i].together(new[i], len(places[i].lengths)) for i in same}
        return new | records

    for number, (program, new) in enumerate(_observations(function, batches, chosen)):
        places = named(program)
        observed = observed._replace(records=records)
        if number and words_of(places) != words_of(observed.places):
            raise ValueError(
                f"batch {number} runs another program than batch 0: its attention is computed"
                " differently, so linearize on one kind of batches"
            )
        for each in left_in(program):
            same = observed.left.get(each.line, (each.scope, each.reason))[1] == each.reason
            observed.left[each.line + SECOND * (not same)] = each.scope, each.reason
        observed, last = observed._replace(places=places), new
        records = joined(new)
    if number is None:
        raise ValueError("there are no batches: give at least one batch of arguments")
    if is_held_out := number + 1 >= BATCHES:
        records = joined({i: x.unfitted(len(places[i].lengths)) for i, x in last.items()})
    return observed._replace(records=records, is_held_out=is_held_out)


def program_of(
    function: Callable[..., Any], arguments: Sequence[Any], keywords: dict[str, Any] | None = None
) -> tuple[Program, list[Any], Any]:
    """The program for these arguments, the arrays among them, the structure of the result."""
    leaves, tree = jax.tree.flatten((tuple(arguments), keywords or {}))
    given = [hasattr(x, "shape") for x in leaves]

    def from_arrays(*arrays: Any) -> Any:
        left = iter(arrays)
        both = [next(left) if is_array else x for x, is_array in zip(leaves, given, strict=True)]
        positional, named = jax.tree.unflatten(tree, both)
        return function(*positional, **named)

    arrays = [x for x, is_array in zip(leaves, given, strict=True) if is_array]
    program, result = traced(from_arrays, arrays)
    return program, arrays, result


def words_of(places: Sequence[Named]) -> list[tuple[str, ...]]:
    """Operations of each place, which tell programs apart whatever the lengths of their arrays."""
    return [each.place.words for each in places]


def nested(places: Sequence[Named] | dict[int, Named], settings: dict[int, Any]) -> dict[int, Any]:
    """Settings by the numbers of places, as `program.run` takes them: {1: {2: x}} for at (1, 2)."""
    outer: dict[int, Any] = {}
    for number, setting in settings.items():
        inner, at = outer, places[number].at
        for i in at[:-1]:
            inner = inner.setdefault(i, {})
        inner[at[-1]] = setting
    return outer


def layer_of(observed: Observed, path: str, calls: Sequence[tuple[int, tuple[int, ...]]]) -> Layer:
    """The layer that is called at these places and steps.

    Raises:
        Unfit: with the reason why it stays exact.
    """
    lines = {
        name.removesuffix(SECOND)
        for name, (scope, _) in observed.left.items()
        if "transpose(" in scope
    }
    if any(observed.places[number].place.line in lines for number, _ in calls):
        raise Unfit(
            READ_ELSEWHERE
        )  # a derivative, for example of a checkpoint, computes them again
    records = [steps_of(observed, number)[step] for number, step in calls]
    record = reduce(Record.together, records)
    slopes = record.slopes / record.batches
    if not np.isfinite(record.moments).all():
        raise ValueError(
            f"{path}: queries or keys are not finite: is there a NaN in the batches or parameters?"
        )
    alibi = record.alibi & np.all(slopes > -NO_SLOPE, axis=1)
    kinds = record.fits & record.kinds
    plain, biased = alibi & kinds.any(axis=1)
    has_key_bias = bool(biased and not plain)
    slopes, kinds = slopes[int(has_key_bias)], kinds[int(has_key_bias)]
    requirements = {
        "its masks differ between heads (the last batch axis of the scores)": record.same_heads,
        "its scale or bias of the keys differs between query heads of one key head": (
            record.same_in_groups
        ),
        "a bias that is no mask": alibi.any(),
        "softmax(scale q.k + bias) v is not what it computes: are its weights changed"
        " after the softmax?": record.exact,
        "its masks are neither of keys, nor causal, nor of packed sequences with as many queries"
        " as keys": record.fits.any(),
        "its masks cannot be read in linear time: are positions or segments compared that differ"
        " between queries and keys?": kinds.any(),
    }
    for reason, holds in requirements.items():
        if not holds:
            raise Unfit(reason)
    kind = KINDS[int(np.argmax(kinds))]
    held_out, fitted = record.held_out, record.fitted
    if "segments" not in kind:
        held_out, fitted = (x._replace(segments=None) for x in (held_out, fitted))
    if not has_key_bias:
        held_out, fitted = (x._replace(key_bias=None) for x in (held_out, fitted))
    return Layer(
        path=path,
        moments=jnp.asarray(record.moments / record.count),
        held_out=jax.tree.map(jnp.asarray, held_out),
        fitted=jax.tree.map(jnp.asarray, fitted),
        kind=kind,
        scale=jnp.asarray(record.scale),
        slopes=jnp.asarray(np.maximum(slopes, 0)) if np.any(slopes > NO_SLOPE) else None,
        has_key_bias=has_key_bias,
        masked=any(observed.places[i].place.sources for i, _ in calls),
        padded=not record.all_keys,
        calls=tuple(calls),
    )


def steps_of(observed: Observed, number: int) -> dict[tuple[int, ...], Record]:
    """Records of a place: for each step of the scans around it, () if there are none."""
    steps = np.ndindex(observed.places[number].lengths)
    return {step: jax.tree.map(lambda x, i=step: x[i], observed.records[number]) for step in steps}


def examples(
    function: Callable[..., Any],
    batches: Iterable[Any],
    layer: Layer,
) -> Sample:
    """Queries and keys of one layer in all batches, at all its calls, but for those held out.

    Sequences of other lengths than those held out are left out.

    Raises:
        ValueError: if there are none.
    """
    lengths = [x.shape[1:] for x in (layer.held_out.query, layer.held_out.key)]
    numbers = {number for number, _ in layer.calls}
    samples: list[Any] = []
    for program, records in _observations(
        function, batches, lambda place: place.number in numbers, whole=True
    ):
        del program
        calls = (
            jax.tree.map(lambda x, i=step: x[i], records[number]) for number, step in layer.calls
        )
        samples.append([x for x in calls if [x.query.shape[1:], x.key.shape[1:]] == lengths])
    if len(samples) >= BATCHES:  # the last batch is held out
        samples.pop()
    samples = [x for each in samples for x in each]
    if not samples:
        raise ValueError(
            "refine_steps reads the batches again, and there are none of the length that was"
            " measured: pass a list of them, also with measured="
        )
    if layer.held_out.segments is None:
        samples = [sample._replace(segments=None) for sample in samples]
    if layer.held_out.key_bias is None:
        samples = [sample._replace(key_bias=None) for sample in samples]
    return jax.tree.map(lambda *x: jnp.asarray(np.concatenate(x)), *samples)


def _observations(
    function: Callable[..., Any],
    batches: Iterable[Any],
    chosen: Callable[[Named], bool],
    whole: bool = False,
) -> Iterator[tuple[Program, dict[int, Any]]]:
    """The program, and records of the chosen places, for each batch; compiled once for all alike.

    Raises:
        ValueError: for a batch that is no tuple of arguments.
    """
    last: Any = None
    programs: dict[Any, Any] = {}
    for number, arguments in enumerate(batches):
        if not isinstance(arguments, tuple | list):
            raise ValueError(
                f"batches must be tuples of arguments, such as (x,), and batch {number} is of type"
                f" {type(arguments).__name__}"
            )
        leaves, tree = jax.tree.flatten(tuple(arguments))
        kind = tree, [jax.typeof(x) if hasattr(x, "shape") else x for x in leaves]
        if last is None or kind != last[0]:
            program, _, _ = program_of(function, arguments)
            chosen_places = [place for place in named(program) if chosen(place)]
            last = kind, program, _recorder(program, chosen_places, whole, programs)
        _, program, recorded = last
        yield program, recorded([x for x in leaves if hasattr(x, "shape")])


def _recorder(
    program: Program, places: Sequence[Named], whole: bool, programs: dict[Any, Any]
) -> Callable[[list], dict[int, Any]]:
    """Return (arrays) -> a record of each of these places.

    The program returns what enters the places, and one program records all places that compute the
    same; `programs` holds those that were compiled.
    """
    alone = {place.number: Alone.of(place.program, place.place) for place in places}
    recorders = {}
    for number, each in alone.items():
        text = each.text()
        recorders[number] = programs.setdefault(text, jax.jit(partial(_record, each, whole=whole)))
    groups = [jax.jit(partial(_entering, program, x)) for x in _groups(places, alone)]

    def recorded(arrays: list) -> dict[int, Any]:
        records = {}
        for entering in groups:
            for number, leaves in entering(arrays).items():
                lengths = next(place.lengths for place in places if place.number == number)
                each = [
                    jax.device_get(recorders[number]([x[step] for x in leaves], ZERO))
                    for step in np.ndindex(lengths)
                ]
                records[number] = jax.tree.map(
                    lambda *x, lengths=lengths: np.stack(x).reshape((*lengths, *x[0].shape)), *each
                )
        return records

    return recorded


def _groups(places: Sequence[Named], alone: dict[int, Alone]) -> list[dict[int, tuple]]:
    """Places with the arrays that enter them, in groups that fit into memory together."""
    groups, left = [], 0
    for place in places:
        leaves, steps = alone[place.number], math.prod(place.lengths)
        size = steps * sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves.shapes)
        if size > left:
            groups.append({})
            left = BYTES
        groups[-1][place.number] = place, leaves.leaves
        left -= size
    return groups


def _entering(
    program: Program, places: dict[int, tuple[Named, tuple[Ref, ...]]], arrays: list
) -> dict[int, list[Array]]:
    """Arrays that enter these places."""

    def read(values: Values, place: Place, at: tuple, setting: Any) -> tuple[Array, Any]:
        del setting
        output = values.bind(values.program.ops[place.output], values.read)[0]
        return output, [values.read(ref) for ref in leaves[at]]

    leaves = {place.at: refs for place, refs in places.values()}
    every = {number: place for number, (place, _) in places.items()}
    nothing = nested(every, dict.fromkeys(places, ()))  # an empty tree: nothing is read ahead
    kept: Any = run(program, arrays, nothing, read)[1]
    return {i: reduce(lambda x, step: x[step], place.at, kept) for i, place in every.items()}


class Read(NamedTuple):
    """A place in the terms of `performer_attention`, and its values for all pairs."""

    sample: Sample
    visible: Bool[Array, "b t s"]
    bias: Float[Array, "b n t s"]
    scale: Float[Array, "..."]
    """(b, n, t, s) with axes of length 1 not broadcast, or a number."""
    value: Array
    kinds: Bool[Array, "2 4"]
    """`Record.kinds`."""
    sinks: Float[Array, "b n"] | None
    key_bias: Float[Array, "b heads 1 s"] | None
    """Numbers of each key in the bias; None if there are none."""
    same_in_groups: Bool[Array, ""]


def read(values: Values, place: Place, zero: Array) -> Read:
    """Measure a place; queries are multiplied as if the scale were 1 / sqrt(h)."""
    query, key, value = values.operands(place)
    bias = values.scores(place, zero)  # (b, n, t, s)
    dtype = float32_or_wider(query, key)
    query, key, bias = (x.astype(dtype) for x in (query, key, bias))
    allowed = bias > MASKED
    visible = jnp.any(allowed, axis=1)
    queries, keys = jnp.any(visible, axis=2), jnp.any(visible, axis=1)
    if visible.shape[1] == visible.shape[2]:  # padding is no query, though it sees earlier keys
        queries &= keys
    has_key_bias = bool(Factors.of(values.program, place).of_keys)
    first = reading.read(values, place, KINDS[0], None, has_key_bias)
    query, key, same = first.scaled(query, key)
    by_head = None
    if first.key_bias is not None:
        by_head, same_bias = reading.of_key_heads(first.key_bias.astype(dtype), key.shape[2])
        same &= same_bias
    by_key = 1 if first.key_scale is None else first.key_scale
    scale = (first.scale * by_key).astype(dtype)
    sample = Sample(query, key, queries, keys, jnp.argmax(visible, axis=-1), by_head)
    agree = [_agrees(values, place, kind, visible, queries, bias) for kind in KINDS]
    others = [jnp.array(False)] * len(KINDS)
    if first.key_bias is not None:
        rest = bias - first.key_bias
        others = [_agrees(values, place, kind, visible, queries, rest, True) for kind in KINDS]
    kinds = jnp.stack([jnp.stack(agree), jnp.stack(others)])
    return Read(sample, visible, bias, scale, value, kinds, first.sinks, first.key_bias, same)


def _agrees(
    values: Values,
    place: Place,
    kind: str,
    visible: Array,
    queries: Array,
    bias: Array,
    has_key_bias: bool = False,
) -> Bool[Array, ""]:
    """True if what is read in linear time is what all pairs have."""
    try:
        found = reading.read(values, place, kind, None, has_key_bias)
    except Unfit:
        return jnp.array(False)
    valid = jnp.array(all(found.agrees.values()))
    if kind != "of keys" and visible.shape[1] != visible.shape[2]:
        return jnp.array(False)
    pairs = jnp.broadcast_to(found.keys[:, None], visible.shape)
    if "causal" in kind:
        pairs &= jnp.tri(*visible.shape[1:], dtype=bool)[None]
    if found.segments is not None:
        pairs &= found.segments[:, :, None] == found.segments[:, None]
    if found.slopes is not None:
        slopes, _ = alibi_slopes(bias, bias > MASKED)
        valid &= jnp.allclose(slopes, found.slopes, rtol=1e-2, atol=1e-4)
    same = jnp.all((visible == pairs) | ~queries[..., None])
    return valid & same & (True if found.valid is None else found.valid)


def _record(alone: Alone, leaves: list[Array], zero: Array, whole: bool) -> Record | Sample:
    """Measure one call of a place: its record, or all examples that are not held out.

    Zero is an argument, for XLA would fold scores of a constant: minutes at 577 tokens.
    """
    place, values = alone.place, alone.values(leaves)
    sample, visible, bias, scale, value, by_kind, sinks, key_bias, same = read(values, place, zero)
    training, held_out = parted(sample)
    if whole:
        return training
    output = alone.attend(*leaves)
    _, t, n, h = sample.query.shape
    k = sample.key.shape[2]
    query = sample.query.reshape(len(bias), t, k, n // k, h)
    logits = jnp.einsum("btkgh,bskh->bkgts", query, sample.key, precision="highest") / h**0.5
    logits = logits.reshape(bias.shape) + bias
    allowed = bias > MASKED
    exact = _is_softmax(values, place, sinks, logits, allowed, value, output)
    slopes, alibi = alibi_slopes(bias, allowed)
    others, another = jnp.zeros_like(slopes), jnp.array(False)
    if key_bias is not None:
        others, another = alibi_slopes(bias - key_bias, allowed)
    count = jnp.float32(sample.queries.size)
    fitted_to = jnp.asarray(~is_held_out(len(bias)))
    pairs = (visible & (sample.queries & fitted_to[:, None])[..., None])[:, None]
    few = min(EXAMPLES, len(held_out.query))
    return Record(
        moments=pair_moments(sample.query, sample.key, mask=pairs) * count,
        count=count,
        batches=jnp.float32(1),
        slopes=jnp.stack([slopes, others]),
        scale=jnp.broadcast_to(jnp.max(_all_axes(scale), axis=(0, 2, 3)), (n,)),
        same_heads=jnp.all(allowed == visible[:, None]),
        same_in_groups=same,
        alibi=jnp.stack([alibi, another]),
        exact=exact,
        all_keys=jnp.all(sample.keys),
        fits=jnp.stack([fits(visible, kind) for kind in KINDS]),
        kinds=by_kind,
        held_out=jax.tree.map(lambda x: x[:few], held_out),
        fitted=jax.tree.map(lambda x: x[:few], training),
    )


def _all_axes(scale: Array) -> Array:
    """A scale as (b, n, t, s), axes of length 1 not broadcast."""
    return scale.reshape(scale.shape or (1, 1, 1, 1))


def _is_softmax(
    values: Values,
    place: Place,
    sinks: Array | None,
    scores: Array,
    allowed: Array,
    value: Array,
    output: Array,
) -> Bool[Array, ""]:
    """True if the output is softmax of the scores (b, n, t, s) times the values (b, s, k, v).

    Queries that see no key may have any output.
    """
    b, n, t, s = scores.shape
    if sinks is not None:
        joined = jnp.broadcast_to(sinks[..., None, None], (b, n, t, 1)).astype(scores.dtype)
        scores = jnp.concatenate([scores, joined], axis=-1)
    weights = jax.nn.softmax(scores)[..., :s].reshape(b, value.shape[2], -1, t, s)
    value = value.astype(weights.dtype)
    exact = jnp.einsum("bkgts,bskv->btkgv", weights, value, precision="highest")
    exact = values.moved(place, place.layout.back(exact.reshape(b, t, n, -1)))
    exact = exact.astype(weights.dtype)
    output = output.astype(weights.dtype)
    seeing = jnp.swapaxes(jnp.any(allowed, axis=-1), 1, 2)[..., None]
    seeing = jnp.broadcast_to(seeing, (b, t, n, value.shape[-1])).astype(int)
    seeing = values.moved(place, place.layout.back(seeing)) > 0
    alike = (jnp.isnan(exact) & jnp.isnan(output)) | ~seeing
    apart = jnp.max(jnp.where(alike, 0, jnp.abs(exact - output)), initial=0)
    largest = jnp.max(jnp.where(jnp.isnan(output), 0, jnp.abs(output)), initial=1e-30)
    return apart <= max(TOLERANCE.get(x, 0.05) for x in place.dtypes) * largest
