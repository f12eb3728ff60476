"""The examples of the docstrings run, with the names that their readers have at hand."""

import doctest
import importlib
import inspect
import pkgutil
import re
import tempfile
import traceback
from functools import partial
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.datasets
from flax import linen, nnx
from jax.extend.core.primitives import dot_general_p
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import performer
import performer.nnx
from performer import graphs
from performer.attention import op
from performer.numerics import BFLOAT16

HIGHEST = (jax.lax.Precision.HIGHEST,) * 2


COSTLY = (
    *("recommend", "attention_error", "refine_far", "calibrate", "learn", "matern", "sample"),
    *(
        "linearize",
        "load",
        "Transformer",
        "measure",
        "GraphAttention",
        "RandomFeatures",
        "GaussianProcess",
    ),
    *("spherical_radial", "transfer", "PerformerAttention", "performer_attention"),
    *("masked_attention", "random_features", "random_butterfly", "Blocks"),
    *("performer_attention_fn", "refined", "assert_attention_matches"),
    "assert_attention_consistent",
)
"""Examples that cost more than a second."""


def modules():
    for module in pkgutil.walk_packages(performer.__path__, "performer."):
        if "._" not in module.name:
            yield importlib.import_module(module.name)


def examples():
    finder = doctest.DocTestFinder()
    for module in modules():
        for test in finder.find(module, module.__name__, module=module, globs={}):
            marks = [pytest.mark.thorough] * test.name.endswith(COSTLY)
            if test.examples:
                yield pytest.param(module, test, id=test.name, marks=marks)


def namespace(module):
    """What stands before the examples: packages, inputs of attention, points, a graph."""
    rng = np.random.default_rng(0)
    b, t, n, h = 2, 6, 12, 64

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape, np.float32))

    names = dict(performer=performer, jax=jax, jnp=jnp, np=np, nnx=nnx, linen=linen)
    names |= dict(partial=partial, Graph=graphs.Graph)
    names |= dict(performer_attention=performer.performer_attention)
    names |= {name: getattr(performer, name) for name in performer.MODULES}
    heads = [normal(b, t, n, h) / 2 for _ in range(6)]
    names |= dict(zip(["query", "key", "value", "q", "k", "v"], heads, strict=True))
    names |= {f"next_{name}": names[name][:, :1] for name in "qkv"}
    names |= {"w": normal(128, h), "random_key": jax.random.key(0)}
    path = module.__name__
    of_testing = ("performer.testing.attention", "performer.testing.reference")
    own = ("op", "bias", "values", "calibration", "analysis")
    if path.split(".")[-1] not in own and path not in of_testing:
        names["key"] = jax.random.key(0)
    names |= {path.split(".")[-1]: module} | names  # by its own name, where that is free
    if path.startswith("performer.graphs."):
        names |= vars(graphs) | {"graphs": graphs, "graph": _ring()}
    return names | NEEDED.get(path, lambda normal: {})(normal)


def small_heads(normal):
    return {name: normal(1, 8, 2, 4) for name in ("query", "key", "value")}


def _circle():
    angles = np.linspace(0, 6, 9)
    return jnp.asarray(np.stack([np.cos(angles), np.sin(angles)], axis=1), jnp.float32)


def _ring():
    return graphs.Graph.from_edges([(i, (i + 1) % 8) for i in range(8)], num_nodes=8)


def _ring_kernel():
    kernel, options = graphs.kernels.Diffusion(1.0), dict(num_walks=4, p_halt=0.5)
    return graphs.graph_random_features(jax.random.key(0), _ring(), kernel, **options)


NEEDED = {
    "performer.structured": lambda normal: {"x": normal(3, 1024)},
    "performer.kernels": lambda normal: {"x": _circle(), "m": 8, "d": 2},
    "performer.quadrature": lambda normal: {"x": normal(5, 4), "d": 4},
    "performer.gp": lambda normal: ({"x": _circle(), "new": _circle() / 2, "y": jnp.arange(9.0)}),
    "performer.graphs.attention": lambda normal: {
        "graph": graphs.Graph.from_edges([(i, i + 1) for i in range(5)], num_nodes=6),
    },
    "performer.graphs.features": lambda normal: {"v": jnp.arange(8.0)},
    "performer.graphs.gp": lambda normal: (
        {"K": _ring_kernel(), "seen": jnp.array([0, 3, 4]), "y": jnp.arange(3.0)}
    ),
    "performer.nnx.graph": lambda normal: {"graph": _ring(), "graphs": graphs, "x": normal(8, 64)},
    "performer.analysis": small_heads,
    "performer.nnx.linearization": lambda normal: (
        {"x": normal(2, 6, 8)}
        | {"model": nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))}
    ),
    "performer.linearization.function": lambda normal: {
        "path": Path(tempfile.mkdtemp()) / "linear.npz",
    },
    "performer.nnx.transformer": lambda normal: (
        {"x": normal(2, 6, 64), "tokens": jnp.ones((2, 5), int), "exists": jnp.ones(6, bool)}
    ),
    "performer.nnx.layer": lambda normal: {"x": normal(2, 6, 768)},
    "performer.linen": lambda normal: {"x": normal(2, 6, 768)},
    "performer.sklearn": lambda normal: SKLEARN,
}
SKLEARN = dict(sklearn=sklearn, make_pipeline=make_pipeline, GridSearchCV=GridSearchCV)
SKLEARN |= dict(StandardScaler=StandardScaler, Ridge=Ridge)


PROMOTE = ("learn", "transfer", "refined", "refine_far", "GaussianProcess")
"""Functions whose optimisers, of optax, promote dtypes."""


def run(module, test):
    """Line by line; what a line prints is compared where the docstring shows it."""
    names = vars(module) | namespace(module)
    checker = doctest.OutputChecker()
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    for example in test.examples:
        if example.want:
            got = repr(eval(example.source, names))
            assert checker.check_output(example.want, got + "\n", flags), got
        else:
            exec(example.source, names)


FOREIGN = ("/flax/", "<string>")
"""Files of the functions that are linearized: Flax's, and the examples themselves."""
PACKAGE = str(Path(performer.__file__).parent)
REPLAYED = f"{PACKAGE}/linearization/program.py"
"""The operations that it binds are those of such a function, with the precision they had."""


@pytest.mark.parametrize(("module", "test"), list(examples()))
def test_examples_run(module, test, monkeypatch):
    """With 64 bits, strict promotion of dtypes, and products of float32 numbers in float32.

    GPUs and TPUs take TF32 or bfloat16 for products unless they are told otherwise: three digits.
    """
    rounded, bind = [], dot_general_p.bind

    def overheard(*operands, **params):
        is_named = params["precision"] in (HIGHEST, BFLOAT16)  # the latter of bfloat16 arguments
        if any(x.dtype == np.float32 for x in operands) and not is_named:
            places = [f"{x.filename}:{x.lineno}" for x in reversed(traceback.extract_stack())]
            own = next((x for x in places if any(y in x for y in (PACKAGE, *FOREIGN))), "")
            rounded.extend([own] if PACKAGE in own and REPLAYED not in own else [])
        return bind(*operands, **params)

    monkeypatch.setattr(dot_general_p, "bind", overheard)
    promotion = "standard" if test.name.endswith(PROMOTE) else "strict"
    with jax.enable_x64(True), jax.numpy_dtype_promotion(promotion):
        run(module, test)
    assert not rounded


def test_public_names_exist():
    for module in (*modules(), performer):
        assert not [x for x in getattr(module, "__all__", ()) if not hasattr(module, x)]


def test_each_name_has_one_path():
    """Modules are attributes and can be imported by the same name; so can all names on pages."""
    for name in performer.MODULES:
        assert importlib.import_module(f"performer.{name}") is getattr(performer, name)
    assert {*performer.MODULES, *performer.__all__} <= set(dir(performer))
    for name in performer.EXTRAS:
        assert performer.__getattr__(name) is importlib.import_module(f"performer.{name}")
    pages = [Path("README.md"), *Path("docs").rglob("*.md")]
    made = {"_build", "reference"}  # by a build, maybe of another version
    text = "\n".join(page.read_text() for page in pages if not made & {*page.parts})
    for name in sorted(set(re.findall(r"\bperformer(?:\.[a-zA-Z_]\w*)+", text))):
        pkgutil.resolve_name(name)


def test_types_name_all_couplings_and_options():
    assert get_args(performer.couplings.Name) == performer.couplings.names()
    parameters = inspect.signature(performer.performer_attention).parameters.values()
    keywords = {x.name for x in parameters if x.kind is x.KEYWORD_ONLY}
    assert {*op.Options.__annotations__, "return_residual"} == keywords
