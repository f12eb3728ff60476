"""Attention between the nodes of a graph, for Flax nnx."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from performer import couplings
from performer.graphs import features, kernels, masked_attention
from performer.graphs.features import EstimatedKernel
from performer.graphs.walks import Walks
from performer.nnx.layer import Frequencies, PerformerAttention
from performer.typing import Coupling

Mask = Walks | EstimatedKernel | Array
"""Walks, whose modulation the layer learns, a kernel estimate, or a dense matrix."""


class GraphAttention(nnx.Module):
    """Self-attention between nodes, its weights multiplied by a kernel of the graph.

    Four projections (query, key, value, output) around `performer.graphs.masked_attention`; without
    a mask around `performer.performer_attention`. Frequencies are those of `PerformerAttention`,
    which `redraw` finds.

    With walks as the mask each head learns its kernel (sum_t f_t A^t)^2 (Reid et al. 2025, "Linear
    transformer topological masking with graph random features"), from that of diffusion on. The
    parameter `modulation` is log f: the mask is never negative, and every row of attention weights
    sums to 1.

    Args:
        num_heads: number of heads.
        in_features: width of the input and the output.
        num_features: m, number of random features per head.
        mask: walks, estimate or matrix, used where a call has none.
        num_terms: number of learned coefficients f_0, f_1, ...; later steps of walks are ignored.
        coupling: coupling of the frequencies.
        rngs: random streams, `params` and `frequencies`.
        options: keywords of `PerformerAttention` that `masked_attention` knows, such as
            `feature_map` and `scale`, and `calibration`, which is fitted to attention without the
            graph.

    Raises:
        ValueError: if `num_heads` does not divide the width; in a call as `masked_attention`.

    Example:
        >>> walks = graphs.features.sample(key, graph, num_walks=8, p_halt=0.3)
        >>> layer = GraphAttention(4, 64, mask=walks, rngs=nnx.Rngs(params=0, frequencies=1))
        >>> y = layer(x)  # (..., nodes, 64)
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        num_features: int = 32,
        *,
        mask: Mask | None = None,
        num_terms: int = 8,
        coupling: str | Coupling = couplings.DEFAULT,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        head_dim, rest = divmod(in_features, num_heads)
        if rest:
            raise ValueError(f"{num_heads} heads must divide the width {in_features}")
        heads = (num_heads, head_dim)
        self.query, self.key, self.value = (
            nnx.LinearGeneral(in_features, heads, rngs=rngs) for _ in range(3)
        )
        self.output = nnx.LinearGeneral(heads, in_features, axis=(-2, -1), rngs=rngs)
        self.attention_fn = PerformerAttention(
            num_features, head_dim, num_heads=num_heads, coupling=coupling, rngs=rngs, **options
        )
        self.mask = nnx.data(None if mask is None else Frequencies(mask))
        logs = jnp.log(kernels.Diffusion(1.0)(num_terms))
        self.modulation = nnx.Param(jnp.tile(logs, (num_heads, 1)))

    def __call__(
        self,
        x: Float[Array, "*b nodes d"],
        mask: Mask | None = None,
        *,
        key_mask: ArrayLike | None = None,
    ) -> Float[Array, "*b nodes d"]:
        """Attend; a `mask` replaces the mask of the layer.

        Args:
            x: values at the nodes.
            mask: walks, estimate or matrix for these nodes.
            key_mask: nodes that exist, as the `mask` of `performer_attention`.
        """
        query, key, value = (project(x) for project in (self.query, self.key, self.value))
        if mask is None and self.mask is not None:
            mask = self.mask.get_value()
        if isinstance(mask, Walks):
            mask = self.modulated(mask)
        return self.output(self.attend(query, key, value, mask, key_mask))

    def modulated(self, walks: Walks) -> EstimatedKernel:
        """Return the mask of each head: the walks with its learned modulation."""
        f = jnp.exp(self.modulation[...])

        def modulation(length: int) -> Array:
            kept = f[:, :length]
            return jnp.pad(kept, ((0, 0), (0, length - kept.shape[1])))

        return EstimatedKernel(features.modulate(walks, modulation))

    def attend(
        self, query: Array, key: Array, value: Array, mask: Any, key_mask: ArrayLike | None
    ) -> Array:
        """Return the attention of the heads; a subclass may compute it in another way."""
        if mask is None:
            return self.attention_fn(query, key, value, mask=key_mask)
        given, options = self.attention_fn.features, self.attention_fn.options
        output = masked_attention(query, key, value, given, mask, key_mask=key_mask, **options)
        self.attention_fn.update_moments(query, key, mask=key_mask)
        return output
