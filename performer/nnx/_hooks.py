"""Places where a model calls exact attention, and the modules that replace it there."""

import re
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Bool, Float

from performer.linearization.masks import fits
from performer.nnx.layer import PerformerAttention

SCOPE = "performer_attention"
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

    def trace(self, noted: "dict[str, Note]") -> None:
        """Name the operations of the function by the path, and note how it is called."""
        function = self.function
        if isinstance(function, nnx.Module):
            return  # it may hold arrays, which the graph of the model must contain
        bound = function.keywords if isinstance(function, partial) else {}

        def traced(query, key, value, *args, **options):
            named = dict(zip(("bias", "mask"), args, strict=False)) | options
            call = call_of(query, key, **bound | named)
            before = noted.get(self.path, Note("", False))
            masked = before.masked or call.mask is not None
            noted[self.path] = Note(before.refused or call.refused, masked)
            with jax.named_scope(f"{SCOPE}[{self.path}]"):
                return function(query, key, value, *args, **options)

        setattr(self.module, self.name, traced)

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
            is_layer = isinstance(module, nnx.MultiHeadAttention) and name == "attention_fn"
            if is_layer or is_exact(value):
                names = path if is_layer else (*path, name)
                yield Hook(".".join(map(str, names)) or name, module, name)


class Note(NamedTuple):
    """How an attention function is called."""

    refused: str
    """Reason why linear attention does not support the call, or ""."""
    masked: bool
    """True if it is given a mask."""


class Recorded(NamedTuple):
    """The last call of an attention function."""

    name: str
    """Attribute of its module."""
    args: tuple[Any, ...]
    options: dict[str, Any]
    output: Array


def recorded(model: Any, arguments: tuple[Any, ...]) -> tuple[dict[str, Recorded], Any]:
    """Call a model; return the calls of its hooks by path, and its output.

    A function that is no nnx module has no hooks.
    """
    calls: dict[str, Recorded] = {}
    places = list(hooks(model)) if isinstance(model, nnx.Module) else []
    originals = [place.function for place in places]

    def recorder(place: Hook, function: Any) -> Any:
        def record(*args, **options):
            output = function(*args, **options)
            calls[place.path] = Recorded(place.name, args, options, output)
            return output

        return record

    for place, function in zip(places, originals, strict=True):
        setattr(place.module, place.name, recorder(place, function))
    try:
        output = model(*arguments)
    finally:
        for place, function in zip(places, originals, strict=True):
            setattr(place.module, place.name, function)
    return calls, output


def attention_at(model: nnx.Module, path: str, name: str) -> Any:
    """Attention of a converted model, at the path of a hook of the original."""
    for module_path, module in nnx.iter_modules(model):
        layer, attribute = (".".join(map(str, x)) for x in (module_path, (*module_path, name)))
        if path == attribute or (path == layer and isinstance(module, nnx.MultiHeadAttention)):
            return getattr(module, name)
    raise AssertionError(f"the converted model has no attention at {path}")


def is_exact(value: Any) -> bool:
    """True for one of `EXACT`, also with arguments bound."""
    function = value.func if isinstance(value, partial) else value
    return any(function is exact for exact in EXACT)


def path_of(scope: str) -> str | None:
    """Path of the hook that operations in this scope belong to."""
    match = re.search(re.escape(SCOPE) + r"\[(.*?)\]", scope)
    return match and match[1]


class Call(NamedTuple):
    """A call of attention, in the terms of `PerformerAttention`."""

    query: Float[Array, "*b t n h"]
    mask: Bool[Array, "*b #n #t s"] | None
    is_causal: bool
    refused: str
    """Reason why linear attention does not support the call, or ""."""


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
    if options.get("dropout_rate", 0) != 0 and not options.get("deterministic", False):
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
        lengths = jnp.asarray(lengths)[..., None]
        exists = jnp.arange(key.shape[-3]).reshape(*[1] * (lengths.ndim - 1), -1) < lengths
        exists = exists[..., None, None, :]
        mask = exists if mask is None else mask & exists
    return Call(query, mask, bool(is_causal), " and ".join(refused))


class Adapter(nnx.Module):
    """`PerformerAttention`, called as the functions of exact attention are, with any mask.

    A mask over pairs of a query and a key is read as it was in the batches that were measured: of
    keys, causal, or of packed sequences. A mask of another kind raises; in a compiled program,
    where its values are not known, it makes the output NaN.
    """

    def __init__(self, attention: PerformerAttention, function: Any, kind: str):
        self.attention, self.kind = attention, kind
        bound = function.keywords if isinstance(function, partial) else {}
        self.call_of = partial(call_of, **bound) if bound else call_of

    def __call__(self, query, key, value, bias=None, mask=None, **options):
        """Output of linear attention, in the shape of exact attention.

        Raises:
            ValueError: for what linear attention cannot honour.
        """
        given = {name: x for name, x in (("bias", bias), ("mask", mask)) if x is not None}
        call = self.call_of(query, key, **given, **options)
        if call.refused:
            raise ValueError(f"linear attention cannot take {call.refused}: leave this layer exact")
        passed = {name: options[name] for name in ("dtype", "module") if name in options}
        if call.mask is None or call.mask.shape[-2] == 1:
            passed |= {"mask": call.mask, "is_causal": call.is_causal}
            return self.attention(call.query, key, value, **passed)
        keys, segments, valid = self._read(call, key.shape[-3])
        passed |= {"mask": keys, "is_causal": "causal" in self.kind, "segment_ids": segments}
        output = self.attention(call.query, key, value, **passed)
        return jnp.where(valid, output, jnp.nan)

    def _read(self, call: Call, s: int) -> tuple[Array, Array | None, Array]:
        """Which keys exist, segments, and whether the mask is of the kind that was measured."""
        assert call.mask is not None
        lead, t = call.query.shape[:-3], call.query.shape[-3]
        mask = jnp.broadcast_to(call.mask, (*lead, *call.mask.shape[-3:-1], s))
        visible = jnp.any(mask, axis=-3)
        valid = jnp.all(mask == visible[..., None, :, :])
        if call.is_causal:
            visible &= jnp.tri(t, s, dtype=bool)
        pairs = visible.reshape(-1, t, s)
        valid &= fits(pairs, self.kind)
        if not isinstance(valid, Tracer) and not valid:
            raise ValueError(
                f"the masks of this layer were {self.kind} when it was measured, and this one is"
                " not: measure it with such masks too, and it stays exact"
            )
        segments = jnp.argmax(visible, axis=-1) if "segments" in self.kind else None
        return jnp.any(visible, axis=-2)[..., None, None, :], segments, valid
