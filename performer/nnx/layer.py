"""Drop-in attention for Flax nnx."""

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Integer, PRNGKeyArray

from performer import calibration as calibrations
from performer import choices, couplings
from performer import features as maps
from performer.attention import Bias, Exact, Features, performer_attention
from performer.attention.dropin import attention_fn
from performer.attention.parallel import over_tokens
from performer.attention.values import NOT_EXACT
from performer.calibration import Calibration
from performer.features import FeatureMap
from performer.refinement import LEARNED
from performer.typing import Coupling, float32_or_wider

OF_A_CALL = "mask", "is_causal", "segment_ids", "return_residual"
"""Options of `performer_attention` that a layer takes in each call."""


class Frequencies(nnx.Variable):
    """Frequencies of an attention layer: in state and checkpoint, never trained."""


class Statistics(nnx.Variable):
    """Running moments of a layer and their calibration: in the checkpoint, never trained."""


class PerformerAttention(nnx.Module):
    """FAVOR+ as the `attention_fn` of `nnx.MultiHeadAttention`.

    The stream `rngs.frequencies()` draws the frequencies once; layers that share `rngs` have draws
    of their own. With the stream named, as below, the parameters do not depend on the coupling.
    Call `redraw` in the training step for new draws; evaluation never changes them.

    Save `nnx.state(model)`, not `nnx.state(model, nnx.Param)`: the second lacks the frequencies and
    the running moments. A model that is rebuilt from it draws others, and its output differs.

    With a `calibration` the layer measures queries and keys as batch normalisation does. In
    training mode a call uses the calibration of earlier calls, then updates the running moments and
    with them the calibration. In evaluation mode (`model.eval()`, or `nnx.view` with
    `use_running_average=True`) they are constant. A sequence never enters its own calibration, so
    causal attention stays causal.

    Flax's decode mode passes all cached keys at each step. `performer.attention.stream` with
    `layer.features` decodes in constant time, also with an exact window.

    Args:
        num_features: m, number of frequencies per head; 0 for the pairs of an exact window alone.
        head_dim: width of one head's queries and keys.
        coupling: name of a coupling, as of `performer.couplings.get`, or a hashable coupling.
        num_heads: number of heads with independent draws: all heads of the layer or, for grouped
            heads, `num_kv_heads`. None shares one draw (the layer for linen always draws for each).
        redraw_every: steps between new draws by `redraw`; 0 for never.
        calibration: method of `performer.calibration`, as "none", "shift", "shift+scale" or "full".
            It is fitted for each head if `num_heads` is given, which must then be the number of key
            heads.
        momentum: weight of the old running moments. 0.9 trained better than 0.99, which lags behind
            a model that learns fast.
        num_queries: number of queries of each sequence that are measured, evenly spaced.
        use_running_average: evaluation mode; `train()` and `eval()` of the model and `nnx.view`
            switch it.
        split: axis of the mesh in context (`jax.set_mesh`, type Auto) over which the tokens of a
            sequence are split: its devices exchange m (v + 2) numbers for each head. A mesh without
            the axis, and calls with a mask or `sow_weights`, are left to the compiler. Cannot be
            combined with exact pairs.
        transferred: reserve `learned` for features of attention transfer, whose query frequencies
            and weights `performer.nnx.linearize` sets with a window.
        feature_map: as of `performer.Features`.
        exact: exact pairs; a window requires self attention, with or without Flax's cache.
        bias: constant bias of all calls, such as `performer.alibi(slopes)`. A decay requires what a
            window does.
        rngs: random streams; `frequencies` is used, or the default one.
        options: constant keywords of `performer.performer_attention`, such as `scale` and
            `implementation`.

    Raises:
        ValueError: for an unknown coupling or feature map, or sizes that it does not admit; for a
            number out of its range, or an argument of the call.
        TypeError: for an unknown option.

    Example:
        >>> rngs = nnx.Rngs(params=0, frequencies=1)
        >>> attention_fn = PerformerAttention(128, 64, coupling="pm", num_heads=12, rngs=rngs)
        >>> layer = nnx.MultiHeadAttention(
        ...     num_heads=12, in_features=768, attention_fn=attention_fn, decode=False, rngs=rngs
        ... )
        >>> output = layer(x, is_causal=True)
    """

    def __init__(
        self,
        num_features: int,
        head_dim: int,
        *,
        coupling: str | Coupling = couplings.DEFAULT,
        num_heads: int | None = None,
        redraw_every: int = 0,
        calibration: str = "none",
        momentum: float = 0.9,
        num_queries: int = 64,
        use_running_average: bool = False,
        split: str | None = None,
        transferred: bool = False,
        feature_map: str | FeatureMap = "positive",
        exact: Exact = NOT_EXACT,
        bias: Bias | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        if redraw_every < 0:
            raise ValueError(f"redraw_every must not be negative, got {redraw_every}")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be a number from 0 to below 1, got {momentum}")
        choices.positive_integer("num_queries", num_queries)
        if given := [name for name in OF_A_CALL if name in options]:
            raise ValueError(f"{given[0]} is an argument of the call, not of the layer")
        inspect.signature(performer_attention).bind_partial(**options)  # raises for unknown ones
        self.feature_map, self.exact = maps.get(feature_map), exact
        self.keywords = tuple(options.items())
        bias = bias or Bias()  # static: no array of a module is left out of its state
        self.biases = _hashable(bias.keys), _hashable(bias.decay)
        self.coupling, self.redraw_every = coupling, redraw_every
        drawn = None
        if num_features:
            draw = coupling, num_features, head_dim, num_heads
            drawn = Frequencies(couplings.draw(rngs.frequencies(), *draw))
        self.frequencies = nnx.data(drawn)
        names = calibrations.parts(calibration, coupling, exact.mixed)
        self.method = "+".join(names) or "none"
        self.momentum, self.num_queries = momentum, num_queries
        self.use_running_average, self.split = use_running_average, split
        self.learned, self.statistics = nnx.Dict(), nnx.Dict()
        if transferred and self.frequencies is not None:
            w = self.frequencies[...]
            self.learned["query_frequencies"] = Frequencies(w)
            self.learned["weights"] = Frequencies(jnp.full(w.shape[:-1], 1 / num_features))
        if calibrations.parts(self.method):
            heads = () if num_heads is None else (num_heads,)
            self.calibrate(jnp.zeros((*heads, *[2 * head_dim + 1] * 2), jnp.float32))

    @property
    def features(self) -> Features:
        """The features of the next call, for `performer_attention` and `stream`."""
        learned: Any = _arrays(self.learned)
        return Features(
            None if self.frequencies is None else self.frequencies[...],
            self.calibration,
            **learned,
            feature_map=LEARNED if learned else self.feature_map,
            coupling=self.coupling,
            exact=self.exact,
        )

    @property
    def options(self) -> dict[str, Any]:
        """Constant keywords of `performer_attention`, without the bias."""
        return dict(self.keywords)

    @property
    def bias(self) -> Bias:
        """The constant bias."""
        return Bias(*(None if x is None else np.asarray(x, np.float32) for x in self.biases))

    @property
    def num_features(self) -> int:
        """m; 0 for exact pairs alone."""
        return 0 if self.frequencies is None else self.frequencies[...].shape[-2]

    @property
    def calibration(self) -> Calibration | None:
        """The calibration in use."""
        fitted = {name: x for name, x in _arrays(self.statistics).items() if name != "moments"}
        return Calibration(**fitted) if fitted else None

    def calibrate(self, moments: calibrations.Moments) -> None:
        """Set the running moments, and fit the calibration to them.

        Args:
            moments: result of `performer.calibration.pair_moments`, (k, h', h') with
                h' = 2 head_dim + 1, or (h', h') if `num_heads` is None; stored in float32.
        """
        moments = moments.astype(jnp.float32)
        fitted = calibrations.fit(moments, self.method, self.coupling)._asdict()
        for name, value in {"moments": moments, **fitted}.items():
            if value is None:
                continue
            if name in self.statistics:
                self.statistics[name][...] = value
            else:
                self.statistics[name] = Statistics(value)

    def set_view(self, use_running_average: bool | None = None) -> None:
        """Switch the mode, for `nnx.view`.

        Args:
            use_running_average: evaluation mode; None leaves it.
        """
        if use_running_average is not None:
            self.use_running_average = use_running_average

    def update_moments(self, query: Array, key: Array, **pairs: Any) -> None:
        """Update the running moments and the calibration; nothing without them or in evaluation.

        Args:
            query: queries of a call.
            key: keys of a call.
            pairs: `mask`, `is_causal` and `segment_ids` of `performer.calibration.pair_moments`.

        Raises:
            ValueError: for running moments that were cast to a dtype below float32.
        """
        if "moments" not in self.statistics or self.use_running_average:
            return
        old, scale = self.statistics["moments"][...], self.options.get("scale")
        if old.dtype != float32_or_wider(old):
            raise ValueError(
                f"the running moments of this layer have dtype {old.dtype}, not exact enough for"
                " covariances: cast the parameters alone, nnx.state(model, nnx.Param), or call"
                " model.eval(), which keeps the calibration"
            )
        moments = calibrations.pair_moments(
            query, key, scale=scale, num_queries=self.num_queries, **pairs
        )
        if old.ndim == 2:
            moments = jnp.mean(moments, axis=0)
        new = (1 - self.momentum) * moments.astype(old.dtype)
        self.calibrate(self.momentum * old + new)

    def __call__(
        self,
        query: Float[Array, "*b t n h"],
        key: Float[Array, "*b s k h"],
        value: Float[Array, "*b s k v"],
        *,
        mask: ArrayLike | None = None,
        bias: Any = None,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        broadcast_dropout: bool = True,
        deterministic: bool = True,
        dtype: Any = None,
        precision: Any = None,
        module: nnx.Module | None = None,
        is_causal: bool = False,
        segment_ids: ArrayLike | None = None,
    ) -> Float[Array, "*b t n v"]:
        """Attend, with the arguments of `nnx.MultiHeadAttention`.

        `module` sows the estimated attention matrix as `attention_weights`, in quadratic time (the
        layer's `sow_weights=True`). `precision`, `dropout_rng` and `broadcast_dropout` are ignored:
        products are always exact, and there is no dropout.

        Raises:
            ValueError: for an array as bias, attention dropout, or a mask that depends on the query
                or the head, which linear attention cannot compute; or in training mode for running
                moments that were cast to a dtype below float32.
        """
        attend = partial(
            attention_fn,
            mask=mask,
            bias=bias,
            dropout_rate=dropout_rate,
            deterministic=deterministic,
            dtype=dtype,
            is_causal=is_causal,
            segment_ids=segment_ids,
            return_weights=module is not None,
            features=self.features,
            own_bias=self.bias,
            **self.options,
        )
        if self.split is not None and mask is segment_ids is module is None:
            attend = over_tokens(attend, self.split)
        output, weights = attend(query, key, value)
        self.update_moments(query, key, mask=mask, is_causal=is_causal, segment_ids=segment_ids)
        if module is not None:
            module.sow(nnx.Intermediate, "attention_weights", weights)
        return output


def _arrays(variables: Mapping[str, Any]) -> dict[str, Array]:
    """The arrays by name; `nnx.capture` adds an entry of its own to every module."""
    return {name: x[...] for name, x in variables.items() if isinstance(x, nnx.Variable)}


def _hashable(x: Any) -> Any:
    """An option as static metadata of a module: arrays as tuples."""
    x = x.tolist() if isinstance(x, np.ndarray | jax.Array) else x
    return tuple(map(_hashable, x)) if isinstance(x, list | tuple) else x


def redraw(key: PRNGKeyArray, model: nnx.Module, step: int | Integer[Array, ""]) -> None:
    """Draw new frequencies, in place, for layers whose `redraw_every` divides the step.

    Call it in the training step. Draws depend on the key, the step and the layer only, so a resumed
    run draws the same. Step 0 keeps the first draw. The step may be traced, without recompilation.
    Layers stacked by `nnx.vmap` have independent draws.

    Args:
        key: random key, the same at every step.
        model: module that holds `PerformerAttention` layers anywhere.
        step: number of the training step.
    """
    layers = [m for _, m in nnx.iter_modules(model) if isinstance(m, PerformerAttention)]
    for i, layer in enumerate(layers):
        if layer.redraw_every and layer.frequencies is not None:
            layer.frequencies[...] = couplings.redraw(
                jax.random.fold_in(key, i),
                layer.coupling,
                layer.frequencies[...],
                step,
                every=layer.redraw_every,
            )
