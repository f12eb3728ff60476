"""Random-feature attention (FAVOR+) with swappable couplings of the frequencies.

Attention

performer_attention   softmax attention in linear time, estimated with random features
Features    how the kernel is estimated: `Features.draw(key, "pm", num_features, head_dim)`
Exact, Bias, alibi    exact pairs together with features; what is added to q.k
nnx, linen  layers and a transformer for Flax; linearized nnx models
linearize   a trained JAX function -> the same function with random-feature attention
load        a linearized function from its file
measure     queries and keys of a function, for several calls of `linearize`
attention   states for streaming and for several devices; the attention matrix for inspection
calibration   exact invariances and importance sampling that lower the error of attention
refinement  attention transfer: frequencies, or any map, trained towards softmax attention
analysis    error of attention on given queries and keys; the number of features that they need

Frequencies and features

couplings   joint laws of the frequencies, by name: `couplings.get("pm")`
norms, directions     the two parts of a coupling
features    feature maps whose dot products estimate a kernel
theory      errors of kernel estimates by coupling, in closed form
testing     assertions about attention functions and couplings of your own

Kernel methods and graphs

kernels     exact kernels with their features
gp          Gaussian processes, exact and with random features
quadrature  spherical-radial rules: weighted frequencies, exact to degree three
graphs      random walks on graphs: kernels between nodes, PageRank, Gaussian processes
sklearn     random features as a scikit-learn transformer

Modules are imported on first use, as in `performer.gp.GaussianProcess`: programs that use only
attention start as fast as JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from performer.attention import Bias as Bias
from performer.attention import Exact as Exact
from performer.attention import Features as Features
from performer.attention import alibi as alibi
from performer.attention import performer_attention as performer_attention

if TYPE_CHECKING:
    from performer import analysis as analysis
    from performer import attention as attention
    from performer import calibration as calibration
    from performer import couplings as couplings
    from performer import directions as directions
    from performer import features as features
    from performer import gp as gp
    from performer import graphs as graphs
    from performer import kernels as kernels
    from performer import linen as linen
    from performer import nnx as nnx
    from performer import norms as norms
    from performer import quadrature as quadrature
    from performer import refinement as refinement
    from performer import sklearn as sklearn
    from performer import testing as testing
    from performer import theory as theory
    from performer.linearization import linearize as linearize
    from performer.linearization import load as load
    from performer.linearization import measure as measure

__version__ = "0.1.0"
OF_LINEARIZATION = "linearize", "load", "measure"
__all__ = ["Bias", "Exact", "Features", "alibi", *OF_LINEARIZATION, "performer_attention"]

MODULES = (
    "analysis",
    "attention",
    "calibration",
    "couplings",
    "directions",
    "features",
    "gp",
    "graphs",
    "kernels",
    "norms",
    "quadrature",
    "refinement",
    "testing",
    "theory",
)
"""Public modules that are imported on first use."""
EXTRAS = ("nnx", "linen", "sklearn")
"""The same, of packages that may be missing; `dir` leaves them out."""


def __getattr__(name: str) -> Any:
    if name in OF_LINEARIZATION:
        return getattr(import_module("performer.linearization"), name)
    if name in (*MODULES, *EXTRAS):
        return import_module(f"performer.{name}")
    if name in ("PerformerAttention", "GraphAttention"):
        raise AttributeError(f"{name} is a layer for Flax: performer.nnx.{name} (pip install flax)")
    raise AttributeError(f"module 'performer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *MODULES, "__version__"})
