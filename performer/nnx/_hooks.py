"""Places where a model calls exact attention, and the modules that replace it there."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Bool, Float

from performer.attention.calibration import pair_moments
from performer.attention.refinement import Sample
from performer.linearization.layers import EXAMPLES
from performer.nnx.layer import PerformerAttention
from performer.typing import float32_or_wider

EXACT = (nnx.dot_product_attention, jax.nn.dot_product_attention)


class Hook(NamedTuple):
    """An attribute of a module that is a function of attention."""

    path: str
    module: nnx.Module
    name: str

    @property
    def function(self) -> Any:
        """Value of the attribute."""
        return getattr(self.module, self.name)

    def put(self, module: nnx.Module) -> None:
        """Replace the function; without `nnx.data` Flax expects an attribute without arrays."""
        setattr(self.module, self.name, nnx.data(module))

    @property
    def in_layer(self) -> bool:
        """True in Flax's own layer, which calls it as `PerformerAttention` is called."""
        layer = isinstance(self.module, nnx.MultiHeadAttention)
        return layer and not isinstance(self.function, partial)


def hooks(model: nnx.Module) -> Iterator[Hook]:
    """All hooks of a model, and any `attention_fn` of an `nnx.MultiHeadAttention`."""
    for path, module in nnx.iter_modules(model):
        for name, value in vars(module).items():
            of_layer = isinstance(module, nnx.MultiHeadAttention) and name == "attention_fn"
            if of_layer or is_exact(value):
                parts = path if of_layer else (*path, name)
                yield Hook(".".join(map(str, parts)) or name, module, name)


def is_exact(value: Any) -> bool:
    """True for one of `EXACT`, also with arguments bound."""
    function = value.func if isinstance(value, partial) else value
    return any(function is exact for exact in EXACT)


class Seen(nnx.Variable):
    """Record of the calls of one layer during one call of the model."""


class Call(NamedTuple):
    """A call of attention, in the terms of `PerformerAttention`."""

    query: Float[Array, "*b t n h"]
    mask: Bool[Array, "*b #n #t s"] | None
    is_causal: bool
    refused: str
    """Reason why linear attention does not support the call, or ""."""


Record = Callable[[str, Call, Array], dict[str, Array] | None]
"""(path, call, key) -> what is kept of it, if anything."""


class Notes:
    """Static facts of the traced calls, by path, in the order of the first calls."""

    def __init__(self):
        self.refused: dict[str, str] = {}
        """"" where a layer can be taken."""
        self.is_causal: dict[str, bool] = {}
        self.masks: set[str] = set()
        """Paths of layers called with a mask over pairs of a query and a key."""

    def record(self, path: str, call: Call, key: Array) -> dict[str, Array] | None:
        """Statistics, where no call was refused so far."""
        refused = call.refused
        if self.is_causal.setdefault(path, call.is_causal) != call.is_causal:
            refused = refused or "calls that are causal beside calls that are not"
        self.refused[path] = self.refused.get(path, "") or refused
        if call.mask is not None and call.mask.shape[-3:-1] != (1, 1):
            self.masks.add(path)
        return None if self.refused[path] else statistics(call, key)


REFUSED = {
    "query_seq_lengths": "lengths of queries",
    "local_window_size": "a local window",
    "return_residual": "residuals",
    "qk_attn_weights_einsum": "products of its own",
    "attn_weights_value_einsum": "products of its own",
}


def call_of(query, key, bias=None, mask=None, is_causal=False, scale=None, **options) -> Call:
    """Parse the arguments of `nnx.` or `jax.nn.dot_product_attention`."""
    refused = [text for name, text in REFUSED.items() if options.get(name) not in (None, False)]
    if bias is not None:
        refused.append("a bias")
    if options.get("dropout_rate", 0) > 0 and not options.get("deterministic", False):
        refused.append("dropout on the attention")
    if is_causal and query.shape[-3] != key.shape[-3]:
        refused.append("causal attention of fewer queries than keys")
    if scale is not None:
        query = query * (scale * query.shape[-1] ** 0.5)
    if mask is not None:
        mask = jnp.asarray(mask).astype(bool)
        mask = mask.reshape(*[1] * (3 - mask.ndim), *mask.shape)
    lengths = options.get("key_value_seq_lengths")
    if lengths is not None:
        exists = jnp.arange(key.shape[-3]) < jnp.asarray(lengths)[..., None]
        exists = exists[..., None, None, :]
        mask = exists if mask is None else mask & exists
    return Call(query, mask, bool(is_causal), " and ".join(refused))


class Recorder(nnx.Module):
    """Attention as it was, that keeps what `record` makes of each call."""

    def __init__(self, function: Any, path: str, record: Record):
        self.function, self.path, self.record = function, path, record
        self.seen: Seen | None = nnx.data(None)

    def __call__(self, query, key, value, bias=None, mask=None, **options):
        """Record the call, and return the output of the function."""
        bound = self.function.keywords if isinstance(self.function, partial) else {}
        given = {"bias": bias, "mask": mask} | options
        given = {name: x for name, x in given.items() if x is not None}
        call = call_of(query, key, **bound | given)
        new = self.record(self.path, call, key)
        if new is not None:
            self.seen = Seen(new if self.seen is None else together(self.seen.get_value(), new))
        return self.function(query, key, value, **given)


def together(before: dict[str, Array], new: dict[str, Array]) -> dict[str, Array]:
    """Sums over calls and batches, what must hold in all of them, the first examples; or all."""
    if "moments" not in before:
        return {name: jnp.concatenate([x, new[name]]) for name, x in before.items()}
    sums = {name: before[name] + new[name] for name in ("moments", "count")}
    return before | sums | {name: before[name] & new[name] for name in ("by_keys", "causal")}


def statistics(call: Call, key: Array) -> dict[str, Array]:
    """Moments over the pairs that exist, of what kind the mask is, and a few examples."""
    sample, mask = existing(call, key)
    pairs, by_keys, causal = None, jnp.array(True), jnp.array(True)
    if mask is not None:
        by_keys, causal = (is_of_kind(sample, mask, is_causal) for is_causal in (False, True))
        pairs = sample.pairs(False) & mask[:, :1]
    count = jnp.float32(sample.queries.size)
    moments = pair_moments(sample.query, sample.key, mask=pairs, is_causal=call.is_causal)
    few = {name: x[:EXAMPLES] for name, x in sample._asdict().items() if x is not None}
    return {"moments": moments * count, "count": count, "by_keys": by_keys, "causal": causal} | few


def examples(path: str, call: Call, key: Array) -> dict[str, Array]:
    """All of them."""
    del path
    seen = existing(call, key)[0]._asdict()
    return {name: x for name, x in seen.items() if x is not None}


def existing(call: Call, key: Array) -> tuple[Sample, Array | None]:
    """The call with one batch axis, and the mask (b, #n, #t, s).

    A query exists where it sees a key; by a mask over keys alone, with as many queries, where its
    key does.
    """
    lead, (t, s) = call.query.shape[:-3], (call.query.shape[-3], key.shape[-3])
    dtype = float32_or_wider(call.query, key)
    query, key = (x.reshape(-1, *x.shape[-3:]).astype(dtype) for x in (call.query, key))
    sample, mask = Sample.of(query, key), call.mask
    if mask is None:
        return sample, None
    mask = jnp.broadcast_to(mask, (*lead, *mask.shape[-3:-1], s)).reshape(-1, *mask.shape[-3:-1], s)
    keys = jnp.any(mask, axis=(1, 2))
    queries = sample.queries
    if mask.shape[2] > 1:
        queries = jnp.any(mask, axis=(1, 3))
    elif t == s:
        queries = keys
    return sample._replace(queries=queries, keys=keys), mask


def is_of_kind(sample: Sample, mask: Array, is_causal: bool) -> Bool[Array, ""]:
    """True if the mask is determined by existing queries and keys, and causality."""
    _, _, t, s = mask.shape
    if t == 1:
        return jnp.array(True)
    if is_causal and t != s:
        return jnp.array(False)
    return jnp.all((mask == sample.pairs(is_causal)) | ~sample.queries[:, None, :, None])


class Adapter(nnx.Module):
    """`PerformerAttention`, called as the functions of exact attention are, with masks over pairs.

    Such a mask is read as it was in the batches that were measured: as a causal one or not, and
    for which keys exist. A mask of another kind raises; in a compiled program, where its values are
    not known, it makes the output NaN.
    """

    def __init__(self, attention: PerformerAttention, function: Any, is_causal: bool):
        self.attention, self.is_causal = attention, is_causal
        bound = function.keywords if isinstance(function, partial) else {}
        self.call_of = partial(call_of, **bound) if bound else call_of

    def __call__(self, query, key, value, bias=None, mask=None, **options):
        """Output of linear attention, in the shape of exact attention.

        Raises:
            ValueError: for what linear attention cannot honour.
        """
        given = {name: x for name, x in (("bias", bias), ("mask", mask)) if x is not None}
        call = self.call_of(query, key, **given, **options)
        mask, is_causal, fits = understood(call, key, self.is_causal)
        passed = {name: options[name] for name in ("dtype", "module") if name in options}
        output = self.attention(call.query, key, value, mask=mask, is_causal=is_causal, **passed)
        return output if fits is None else jnp.where(fits, output, jnp.nan)


def understood(
    call: Call, key: Array, masks_are_causal: bool
) -> tuple[Array | None, bool, Bool[Array, ""] | None]:
    """Return the mask over keys, whether attention is causal, and whether the mask is such a one.

    The last is None for a mask that is known to be.

    Raises:
        ValueError: for what it cannot take, and a mask over pairs of another kind than that.
    """
    if call.refused:
        raise ValueError(f"linear attention cannot take {call.refused}: leave this layer exact")
    if call.mask is None or call.mask.shape[-2] == 1:
        return call.mask, call.is_causal, None
    sample, mask = existing(call, key)
    assert mask is not None
    fits = is_of_kind(sample, mask, masks_are_causal)
    if not isinstance(fits, Tracer) and not fits:
        kind = "causal ones" if masks_are_causal else "those over keys"
        raise ValueError(
            f"the masks of this layer were {kind} when it was measured, and this one is not:"
            " measure it with such masks too, and it stays exact"
        )
    keys = jnp.any(call.mask, axis=(-3, -2), keepdims=True)
    return keys, call.is_causal or masks_are_causal, fits if isinstance(fits, Tracer) else None
