"""The examples of the docstrings run, with the names that their readers have at hand."""

import doctest
import importlib
import pkgutil
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import performer
from performer import graphs


def modules():
    for package in (performer, graphs):
        for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            yield importlib.import_module(module.name)
    yield importlib.import_module("performer.attention.op")


def examples():
    finder = doctest.DocTestFinder()
    for module in modules():
        for test in finder.find(module, module.__name__, module=module, globs={}):
            if test.examples:
                yield pytest.param(module, test, id=test.name)


def namespace(module):
    """What stands before the examples: packages, inputs of attention, points, a graph."""
    rng = np.random.default_rng(0)
    b, t, n, h = 2, 6, 12, 64

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape, np.float32))

    names = {
        "performer": performer,
        "jax": jax,
        "jnp": jnp,
        "np": np,
        "nnx": nnx,
        "linen": linen,
        "partial": partial,
        "performer_attention": performer.performer_attention,
        "Graph": graphs.Graph,
    }
    names |= {name: importlib.import_module(f"performer.{name}") for name in performer.MODULES}
    heads = [normal(b, t, n, h) / 2 for _ in range(6)]
    names |= dict(zip(["query", "key", "value", "q", "k", "v"], heads, strict=True))
    names |= dict(zip(["next_q", "next_k", "next_v"], [x[:, :1] for x in heads], strict=True))
    names |= {"w": normal(128, h), "random_key": jax.random.key(0)}
    path = module.__name__
    if path not in ("performer.attention.op", "performer.calibration", "performer.analysis"):
        names["key"] = jax.random.key(0)
    return names | NEEDED.get(path, lambda normal: {})(normal) | {path.split(".")[-1]: module}


NEEDED = {}


@pytest.mark.parametrize(("module", "test"), examples())
def test_examples_run(module, test):
    """Line by line; what a line prints is compared where the docstring shows it."""
    names = namespace(module) | vars(module)
    checker = doctest.OutputChecker()
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    for example in test.examples:
        got = None
        if example.want:
            got = repr(eval(example.source, names))
            assert checker.check_output(example.want, got + "\n", flags), got
        else:
            exec(example.source, names)
