"""Random-feature attention times a learned kernel of the grid of patches."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from performer.attention import attention_weights
from performer.graphs import Graph, features, kernels, masked_attention
from performer.nnx import PerformerAttention
from performer.nnx.layer import Frequencies

NUM_WALKS = 16
P_HALT = 0.2
NUM_TERMS = 8
"""Number of learned coefficients of the kernel: the steps of a walk, and one."""


class GridAttention(PerformerAttention):
    """`PerformerAttention` whose weights are multiplied by M = Phi Phi^T + w^2 between patches.

    Phi are graph random features of the grid, where each patch has an edge to those above, below,
    left and right (Reid et al. 2025, "Linear transformer topological masking with graph random
    features"). The walks are drawn once and are state, not a parameter. Each head learns log f, the
    modulation of the walks, and log w. Class token and registers are nodes that all patches are
    joined to: M is w between one of them and a patch, and 1 between two of them. M is formed, so
    that time and memory are quadratic in the number of patches.

    Args:
        heads: number of heads.
        side: patches in a row of the grid.
        num_prefix: number of tokens before the patches.
        args: arguments of `PerformerAttention`.
        rngs: as of `PerformerAttention`.
        options: keywords of `PerformerAttention`.
    """

    def __init__(
        self, heads: int, side: int, num_prefix: int, *args: Any, rngs: nnx.Rngs, **options: Any
    ):
        super().__init__(*args, rngs=rngs, **options)
        self.num_prefix, self.num_patches = num_prefix, side**2
        drawn = features.sample(
            rngs.frequencies(),
            grid(side),
            num_walks=NUM_WALKS,
            p_halt=P_HALT,
            max_steps=NUM_TERMS - 1,
        )
        visits = {name: getattr(drawn, name) for name in ("start", "node", "step", "load")}
        self.walks = nnx.Dict({name: Frequencies(x) for name, x in visits.items()})
        self.modulation = nnx.Param(jnp.tile(jnp.log(kernels.Diffusion()(NUM_TERMS)), (heads, 1)))
        self.joined = nnx.Param(jnp.zeros(heads))

    @property
    def matrix(self) -> Float[Array, "n s s"]:
        """The mask M of each head."""
        drawn = {name: x[...] for name, x in self.walks.items()}
        value = jnp.exp(self.modulation[...])[:, drawn["step"]] * drawn["load"] / NUM_WALKS
        phi = features.Features(drawn["start"], drawn["node"], value, self.num_patches).to_dense()
        rows = jnp.pad(phi, ((0, 0), (self.num_prefix, 0), (0, 1)))
        rows = rows.at[:, : self.num_prefix, -1].set(1)
        rows = rows.at[:, self.num_prefix :, -1].set(jnp.exp(self.joined[...])[:, None])
        return jnp.matmul(rows, rows.mT, precision="highest")

    def masked(self, weights: Float[Array, "b n s s"]) -> Float[Array, "b n s s"]:
        """Return attention weights times M, with rows that sum to 1."""
        weights = weights * self.matrix
        return weights / jnp.sum(weights, axis=-1, keepdims=True)

    def __call__(
        self,
        query: Float[Array, "*b s n h"],
        key: Float[Array, "*b s n h"],
        value: Float[Array, "*b s n v"],
        *,
        mask: ArrayLike | None = None,
        bias: ArrayLike | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = True,
        dtype: Any = None,
        module: nnx.Module | None = None,
        is_causal: bool = False,
        segment_ids: ArrayLike | None = None,
        **ignored: Any,
    ) -> Float[Array, "*b s n v"]:
        """Attend, with the arguments of `PerformerAttention`.

        Raises:
            ValueError: for causal attention, segments, a bias or attention dropout.
        """
        dropped = dropout_rate != 0 and not deterministic
        if is_causal or dropped or not (bias is None and segment_ids is None):
            raise ValueError(
                "attention under the mask of a grid is that of whole images: it has no causal order"
                " and no streaming, no segments, no bias and no dropout of attention weights"
            )
        if dtype is not None:
            query, key, value = (jnp.asarray(x, dtype) for x in (query, key, value))
        own: Any = dict(calibration=self.calibration, key_mask=mask)
        output = masked_attention(query, key, value, self.frequencies[...], self.matrix, **own)
        if self.statistics and not self.use_running_average:
            self._measure(query, key, mask, is_causal)
        if module is not None:
            weights = self.masked(attention_weights(query, key, mask=mask, **self.estimate))
            module.sow(nnx.Intermediate, "attention_weights", weights)
        return output


def grid(side: int) -> Graph:
    """Return the graph of side x side patches, row by row."""
    index = np.arange(side**2).reshape(side, side)
    pairs = [(index[:, :-1], index[:, 1:]), (index[:-1], index[1:])]
    edges = np.concatenate([np.stack([a.ravel(), b.ravel()], axis=1) for a, b in pairs])
    with jax.ensure_compile_time_eval():  # the model may be built under `jit`
        return Graph.from_edges(edges, side**2)
