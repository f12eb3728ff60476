"""The patches of docs/integrations on the engines' own files, with their layers run tiny.

    PERFORMER_ENGINES=DIR pytest -m slow tests/docs/test_engines.py

DIR has clones named `big_vision`, `scenic`, `flax` and `maxtext`, with the commits of the page
docs/howto/engines.md. What a layer does not need of its engine is a stub.
"""

import ast
import os
import subprocess
import sys
import types
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from jax.sharding import AxisType, NamedSharding, PartitionSpec

ENGINES = Path(os.environ.get("PERFORMER_ENGINES", ""))
FILES = {
    "big_vision": ("0127fb6", "big_vision/models/vit.py"),
    "scenic": ("4a38d47", "scenic/projects/baselines/vit.py"),
    "flax": ("18f8f31", "examples/nlp_seq/models.py"),
    "maxtext": ("e591f30", "src/maxtext/layers/attention_op.py"),
}
STUBS = {
    "big_vision": ("big_vision", "big_vision.utils", "big_vision.models"),
    "scenic": (
        "ml_collections",
        "scenic.model_lib.base_models.multilabel_classification_model",
        "scenic.model_lib.layers",
        "tensorflow.io",
    ),
    "flax": (),
}
WIDTH, HEADS, TOKENS = 32, 2, 12

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not ENGINES.name, reason="needs PERFORMER_ENGINES, a folder of clones"),
]


class MlpBlock(linen.Module):
    """In place of scenic's, whose arguments it ignores."""

    mlp_dim: int
    dtype: jnp.dtype = jnp.float32
    dropout_rate: float = 0.0
    activation_fn: object = None
    kernel_init: object = None
    bias_init: object = None

    @linen.compact
    def __call__(self, x, deterministic=True):
        return linen.Dense(x.shape[-1])(linen.gelu(linen.Dense(self.mlp_dim)(x)))


def patched(engine: str, folder: Path) -> str:
    """The file of the commit, patched."""
    commit, name = FILES[engine]
    clone = ENGINES / engine
    if not clone.exists():
        pytest.skip(f"no clone {clone}")
    shown = subprocess.run(
        ["git", "-C", clone, "show", f"{commit}:{name}"], capture_output=True, check=True
    )
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_bytes(shown.stdout)
    patch = Path(f"docs/integrations/{engine}.patch").resolve()
    subprocess.run(["git", "apply", "--unidiff-zero", patch], cwd=folder, check=True)
    return (folder / name).read_text()


def module(engine: str, folder: Path, monkeypatch) -> types.ModuleType:
    """The patched file as a module, beside stubs."""
    out = types.ModuleType(f"patched_{engine}")
    stubs = {name: mock.MagicMock() for name in STUBS[engine]}
    if engine == "scenic":
        base = stubs["scenic.model_lib.base_models.multilabel_classification_model"]
        base.MultiLabelClassificationModel = object
        layers = stubs["scenic.model_lib.layers"]
        layers.attention_layers.MlpBlock = MlpBlock
        layers.nn_layers.get_stochastic_depth_mask = lambda *_: 0
        layers.nn_layers.StochasticDepth = lambda **_: lambda x, *_: x
    for name, stub in stubs.items():
        parents = name.split(".")[:-1]
        for i in range(len(parents)):
            if (above := ".".join(parents[: i + 1])) not in stubs:
                monkeypatch.setitem(sys.modules, above, mock.MagicMock())
        monkeypatch.setitem(sys.modules, name, stub)
    monkeypatch.setitem(sys.modules, out.__name__, out)
    exec(compile(patched(engine, folder), engine, "exec"), out.__dict__)
    return out


def layer(engine: str, code: types.ModuleType):
    """A layer, and how it is called with tokens."""
    if engine == "big_vision":
        block = code.Encoder1DBlock(mlp_dim=WIDTH, num_heads=HEADS)
        return block, lambda apply, x: apply(x)[0]
    if engine == "scenic":
        block = code.Encoder1DBlock(mlp_dim=WIDTH, num_heads=HEADS, dtype=jnp.float32)
        return block, lambda apply, x: apply(x, deterministic=True)
    sizes = dict(emb_dim=WIDTH, qkv_dim=WIDTH, mlp_dim=WIDTH, num_heads=HEADS)
    config = code.TransformerConfig(vocab_size=8, output_vocab_size=8, **sizes)
    return code.Encoder1DBlock(config), lambda apply, x: apply(x, deterministic=True)


@pytest.mark.parametrize("engine", list(STUBS))
def test_layers_with_the_patch(engine, tmp_path, eight_devices, monkeypatch):
    """Rows split over eight devices give the values of one; frequencies get no gradient."""
    block, called = layer(engine, module(engine, tmp_path, monkeypatch))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((8, TOKENS, WIDTH), np.float32))
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = called(
        lambda *args, **options: block.init_with_output(keys, *args, **options)[1:], x
    )
    variables = variables[0] if isinstance(variables, tuple) else variables

    def loss(variables, x):
        return jnp.sum(
            called(lambda *args, **options: block.apply(variables, *args, **options), x) ** 2
        )

    value, grads = jax.jit(jax.value_and_grad(loss))(variables, x)
    split = jax.device_put(
        x, NamedSharding(jax.make_mesh((8,), ("x",), (AxisType.Auto,)), PartitionSpec("x"))
    )
    also, _ = jax.jit(jax.value_and_grad(loss))(variables, split)
    np.testing.assert_allclose(value, also, rtol=1e-5)
    leaves = jax.tree_util.tree_leaves_with_path(grads)
    of_frequencies = [np.any(np.asarray(g)) for path, g in leaves if "frequencies" in str(path)]
    assert of_frequencies == [False]
    assert all(np.all(np.isfinite(g)) for _, g in leaves)


def test_maxtext_with_the_patch(tmp_path):
    """The patched branch of `apply_attention` alone: causal, in packed segments."""
    tree = ast.parse(patched("maxtext", tmp_path))
    branch = next(
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and '== "performer"' in ast.unparse(node.test).replace("'", '"')
    )
    names = "query, key, value, decoder_segment_ids, model_mode, self"
    body = "\n".join(
        "    " + line for part in branch.body for line in ast.unparse(part).splitlines()
    )
    kinds = types.SimpleNamespace(GLOBAL="global", FULL="full")
    from performer import Features, performer_attention

    scope = dict(jax=jax, Features=Features, performer_attention=performer_attention)
    scope |= dict(AttentionType=kinds, MODEL_MODE_TRAIN="train")
    exec(f"def run({names}):\n{body}", scope)
    query, key, value = jax.random.normal(jax.random.key(0), (3, 2, TOKENS, HEADS, 16))
    segments = jnp.repeat(jnp.arange(2), TOKENS // 2)[None].repeat(2, axis=0)
    me = types.SimpleNamespace(attention_type="global")
    out, *_ = scope["run"](query, key, value, segments, "train", me)
    changed, *_ = scope["run"](query, key.at[:, -1].add(1.0), value, segments, "train", me)
    assert np.all(np.isfinite(out))
    np.testing.assert_array_equal(out[:, :-1], changed[:, :-1])
    with pytest.raises(ValueError, match="trains global attention"):
        scope["run"](query, key, value, segments, "prefill", me)
