"""Attention of the decoder, as modules that can be exchanged.

`Hybrid` is exact near by and estimates what is far with features of its own: for each head

    sum_j exp(w_j.q + u_j.k + b_j + far) / m

with frequencies w of queries and u of keys, a bias b of each feature and a weight of the far part,
all of them parameters (`performer.refinement.Far`). With far = `SILENT` it is the window alone.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from performer import couplings, performer_attention
from performer.calibration import Calibration
from performer.features import FeatureMap, positive
from performer.refinement import LEARNED, Far
from vit.config import Config

SILENT = -1e4
"""The least far weight: e^SILENT = 0, and weight decay makes NaN of -inf."""


class Cache(NamedTuple):
    """All keys and values so far, with room for more."""

    key: Float[Array, "b s n h"]
    value: Float[Array, "b s n h"]
    position: Int[Array, ""]


class Softmax(nnx.Module):
    """Exact attention."""

    def __call__(self, query: Array, key: Array, value: Array) -> Array:
        """The output, causal."""
        return jax.nn.dot_product_attention(query, key, value, is_causal=True)

    def empty(self, shape: tuple[int, ...]) -> Cache:
        """Cache of no tokens, with room for (b, s, n, h)."""
        return Cache(jnp.zeros(shape), jnp.zeros(shape), jnp.int32(0))

    def stream(self, query: Array, key: Array, value: Array, state: Any) -> tuple[Array, Any]:
        """Return the output after earlier keys, and all keys."""
        start = (0, state.position, 0, 0)
        keys = jax.lax.dynamic_update_slice(state.key, key, start)
        values = jax.lax.dynamic_update_slice(state.value, value, start)
        place = state.position + jnp.arange(query.shape[1])
        mask = (jnp.arange(keys.shape[1]) <= place[:, None])[None, None]
        output = jax.nn.dot_product_attention(query, keys, values, mask=mask)
        return output, Cache(keys, values, state.position + query.shape[1])


class Fixed(nnx.Variable):
    """Arrays that are in the checkpoint and not trained."""


class Hybrid(nnx.Module):
    """Near keys exactly, far ones by features; features alone without a window.

    Args:
        far: the features; None for the window alone.
        calibration: its shift and scale move queries and keys (see `performer.calibration`); None
            for the identity.
        window: tokens of a chunk, beside which the first key is exact; 0 for none.
        feature_map: positive features, which may be unbiased, in the place of `LEARNED`.
    """

    def __init__(
        self,
        far: Far | None,
        calibration: Calibration | None,
        window: int,
        feature_map: FeatureMap = LEARNED,
    ):
        self.far, self.calibration = nnx.Dict(), nnx.Dict()
        if far is not None:
            far = far._replace(weight=jnp.maximum(far.weight, SILENT))
            moved = _whole(calibration or Calibration(), *far.of_key.shape[::2])
            self.far.update({name: nnx.Param(x) for name, x in far._asdict().items()})
            self.calibration.update({name: Fixed(x) for name, x in moved.items()})
        self.feature_map, self.window = feature_map, window

    def __call__(self, query: Array, key: Array, value: Array) -> Array:
        """The output, causal."""
        return self._attend(query, key, value)

    def empty(self, shape: tuple[int, ...]) -> None:
        """Nothing: the first call makes the state."""

    def stream(self, query: Array, key: Array, value: Array, state: Any) -> tuple[Array, Any]:
        """Return the output after earlier keys, and their state, of constant size."""
        return self._attend(query, key, value, initial_state=state, return_state=True)

    def _attend(self, query: Array, key: Array, value: Array, **options: Any) -> Any:
        if self.far:
            far = Far(**{name: x[...] for name, x in self.far.items()})
            calibration = Calibration(**{name: x[...] for name, x in self.calibration.items()})
            options |= dict(query_frequencies=far.of_query, calibration=calibration)
            frequencies, weights = far.of_key, far.weights
        else:
            frequencies = weights = None
        return performer_attention(
            query,
            key,
            value,
            frequencies,
            is_causal=True,
            weights=weights,
            feature_map=self.feature_map,
            exact_window=self.window,
            exact_first=int(self.window > 0),
            **options,
        )


AttentionFn = Softmax | Hybrid


def of_config(config: Config, *, rngs: nnx.Rngs) -> AttentionFn:
    """Return the attention of a new layer: softmax, or features of a coupling beside a window.

    With num_features = 1 and a window it is the window alone.
    """
    size, own = config.model.size, config.attention
    if own.kind == "softmax":
        return Softmax()
    feature_map = LEARNED if own.transferred else positive
    if own.exact_window and own.num_features == 1:
        return Hybrid(None, None, own.exact_window, feature_map)
    draw = own.coupling, own.num_features, size.head_dim, size.num_heads
    far = Far.of(couplings.draw(rngs.frequencies(), *draw))
    return Hybrid(far, None, own.exact_window, feature_map)


def _whole(calibration: Calibration, heads: int, head_dim: int) -> dict[str, Array]:
    """Return shift, scale and its inverse of each head; what is left out is the identity."""
    eye = jnp.broadcast_to(jnp.eye(head_dim), (heads, head_dim, head_dim))
    identity = {"shift": jnp.zeros((heads, head_dim)), "scale": eye, "inverse_scale": eye}
    given = {name: x for name, x in calibration._asdict().items() if x is not None}
    return identity | {name: x for name, x in given.items() if name in identity}
