"""Models of public repositories as plain JAX: parameters from their files, logits by `transformer`.

A `Model` names its file by repository, commit and sha256; the files stay out of this repository.
"""

import hashlib
import io
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from experiments.strangers.transformer import (
    dense,
    gelu,
    norm,
    patches,
    relu,
    silu,
    stack,
)

Arrays = Mapping[str, np.ndarray]


class Model(NamedTuple):
    """A trained model: where its file is, and how it is computed."""

    source: str
    """Repository, commit and path of the file."""
    sha256: str
    read: Callable[[bytes], Any]
    """File -> parameters, a pytree of arrays."""
    apply: Callable[[Any, Array], Array]
    """(parameters, examples) -> logits."""
    data: str
    """Name of its data in `experiments.strangers.data`."""
    heads: int
    is_causal: bool
    stated: str
    """Result that the repository reports."""

    def load(self, path: Path) -> Any:
        """Return the parameters of the file.

        Raises:
            ValueError: for another file than the one that was measured.
        """
        content = path.read_bytes()
        if (digest := hashlib.sha256(content).hexdigest()) != self.sha256:
            raise ValueError(f"{path}: sha256 {digest}, expected {self.sha256} ({self.source})")
        return self.read(content)


def torch_state(content: bytes, member: str = "") -> dict[str, np.ndarray]:
    """Return the tensors of a file of `torch.save`, read without running its pickle.

    Raises:
        ImportError: without PyTorch.
    """
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("a .pt or .pth file is read by PyTorch: pip install torch") from error
    state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    state = state[member] if member else state
    return {name: np.asarray(x.float()) for name, x in state.items()}


def linear(state: Arrays, *names: str) -> tuple[np.ndarray, ...]:
    """Return (weight, bias) of PyTorch's layers side by side, the weight as (in, out)."""
    weights = [state[f"{name}.weight"].T for name in names]
    bias = [state[f"{name}.bias"] for name in names if f"{name}.bias" in state]
    weight = np.concatenate(weights, axis=-1)
    return (weight, np.concatenate(bias)) if bias else (weight,)


def scale(state: Arrays, name: str) -> tuple[np.ndarray, ...]:
    """Return (scale, bias) of a norm."""
    return tuple(state[f"{name}.{part}"] for part in ("weight", "bias"))


def thirds(parameters: tuple[np.ndarray, ...]) -> dict[str, tuple[np.ndarray, ...]]:
    """Return query, key and value of one layer that computes all three."""
    split = zip(*(np.split(x, 3, axis=-1) for x in parameters), strict=True)
    return dict(zip(("query", "key", "value"), split, strict=True))


def encoder_layer(state: Arrays, prefix: str) -> dict[str, tuple[np.ndarray, ...]]:
    """Return a layer of `torch.nn.TransformerEncoder`."""
    joint = tuple(state[f"{prefix}.self_attn.in_proj_{x}"] for x in ("weight", "bias"))
    return thirds((joint[0].T, joint[1])) | {
        "out": linear(state, f"{prefix}.self_attn.out_proj"),
        "up": linear(state, f"{prefix}.linear1"),
        "down": linear(state, f"{prefix}.linear2"),
        "norm1": scale(state, f"{prefix}.norm1"),
        "norm2": scale(state, f"{prefix}.norm2"),
    }


def numbered(state: Arrays, prefix: str) -> range:
    """Return the numbers n of the names "prefix.n....": the layers."""
    names = (name.removeprefix(f"{prefix}.") for name in state if name.startswith(f"{prefix}."))
    return range(len({name.split(".")[0] for name in names}))


def with_class(parameters: Any, tokens: Array) -> Array:
    """Tokens after a class token, with positions."""
    first = jnp.broadcast_to(parameters["class"], (len(tokens), 1, tokens.shape[-1]))
    return jnp.concatenate([first, tokens], axis=1) + parameters["positions"]


# Llama of 260,000 parameters


def read_llama(content: bytes) -> Any:
    """llama2.c, version 0: seven integers, then float32, a tensor of all layers after another."""
    d, hidden, depth, n, kv, words, _ = (int(x) for x in np.frombuffer(content, np.int32, 7))
    numbers, at = np.frombuffer(content, np.float32, offset=28), 0

    def take(*shape: int) -> np.ndarray:
        nonlocal at
        at += int(np.prod(shape))
        return numbers[at - int(np.prod(shape)) : at].reshape(shape)

    shared = kv * d // n
    embedding = take(words, d)
    shapes = dict(norm1=(d,), query=(d, d), key=(shared, d), value=(shared, d), out=(d, d))
    shapes |= dict(norm2=(d,), gate=(hidden, d), down=(d, hidden), up=(hidden, d))
    tensors = {name: take(depth, *shape) for name, shape in shapes.items()}
    layers = [{name: (x[i].T,) for name, x in tensors.items()} for i in range(depth)]
    return {"embedding": embedding, "layers": layers, "norm": (take(d),)}


def llama(parameters: Any, tokens: Array) -> Array:
    """Logits of the next token, (b, t, words)."""
    embedding = parameters["embedding"]
    x = stack(parameters["layers"], embedding[tokens], 8, silu, causal=True, rotary=True)
    return norm(parameters["norm"], x) @ embedding.T


# GPT of characters and GPT that adds


def lecture(state: Arrays, embedding: str, positions: str) -> dict[str, Any]:
    """Return parameters of the GPT of Karpathy's lecture: its heads are modules of their own."""
    layers = []
    for i in numbered(state, "blocks"):
        block = f"blocks.{i}"
        heads = [f"{block}.sa.heads.{h}" for h in numbered(state, f"{block}.sa.heads")]
        layer = {
            "out": linear(state, f"{block}.sa.proj"),
            "up": linear(state, f"{block}.ffwd.net.0"),
            "down": linear(state, f"{block}.ffwd.net.2"),
            "norm1": scale(state, f"{block}.ln1"),
            "norm2": scale(state, f"{block}.ln2"),
        }
        for name in ("query", "key", "value"):
            layer[name] = linear(state, *(f"{head}.{name}" for head in heads))
        layers.append(layer)
    return {
        "embedding": state[embedding],
        "positions": state[positions],
        "layers": layers,
        "norm": scale(state, "ln_f"),
        "head": linear(state, "lm_head"),
    }


def read_gpt(content: bytes) -> Any:
    """A GPT of characters."""
    state = torch_state(content, "model_state")
    return lecture(state, "token_embedding.weight", "position_embedding.weight")


def read_ecg(content: bytes) -> Any:
    """A zip of one file. Scores are divided by the root of 64, the width of the model."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        state = torch_state(archive.read(archive.namelist()[0]))
    converted = lecture(state, "token_embedding_table.weight", "position_embedding_table.weight")
    for layer in converted["layers"]:
        layer["query"] = tuple(x * (8 / 64) ** 0.5 for x in layer["query"])
    return converted


def gpt(parameters: Any, tokens: Array, heads: int) -> Array:
    """Logits of the next token, (b, t, words)."""
    x = parameters["embedding"][tokens] + parameters["positions"][: tokens.shape[1]]
    x = stack(parameters["layers"], x, heads, relu, causal=True)
    return dense(parameters["head"], norm(parameters["norm"], x))


def read_adder(content: bytes) -> Any:
    """The file has a last norm that its program does not apply."""
    state = torch_state(content)
    layers = []
    for i in numbered(state, "layers"):
        block = f"layers.{i}"
        layer = {
            "out": linear(state, f"{block}.sa.c_proj"),
            "up": linear(state, f"{block}.mlp.up_proj"),
            "down": linear(state, f"{block}.mlp.down_proj"),
        }
        for n in (1, 2):
            scale_and_shift = (state[f"{block}.ln_{n}.my_{part}"] for part in ("weight", "bias"))
            layer[f"norm{n}"] = tuple(scale_and_shift)
        layers.append(layer | thirds(linear(state, f"{block}.sa.c_attn")))
    names = {"embedding": "wte.weight", "positions": "wpe.weight"}
    return {"layers": layers, "head": linear(state, "lm_head")} | {
        name: state[x] for name, x in names.items()
    }


def adder(parameters: Any, tokens: Array) -> Array:
    """Logits of the next symbol, (b, t, 14)."""
    x = parameters["embedding"][tokens] + parameters["positions"][: tokens.shape[1]]
    return dense(parameters["head"], stack(parameters["layers"], x, 8, gelu, causal=True))


# Vision transformers


def read_cifar(content: bytes) -> Any:
    """`torch.nn.TransformerEncoder` behind a class token."""
    state = torch_state(content)
    prefix = "transformer.layers"
    return {
        "embed": (
            state["patch_embed.proj.weight"].reshape(128, -1).T,
            state["patch_embed.proj.bias"],
        ),
        "class": state["cls_token"],
        "positions": state["pos_embed"],
        "layers": [encoder_layer(state, f"{prefix}.{i}") for i in numbered(state, prefix)],
        "norm": scale(state, "mlp_head.0"),
        "head": linear(state, "mlp_head.1"),
    }


def cifar(parameters: Any, images: Array) -> Array:
    """Logits of (b, 32, 32, 3) images in [0, 1]: norms last."""
    mean, deviation = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
    x = patches((images - jnp.array(mean)) / jnp.array(deviation), 4)
    x = with_class(parameters, dense(parameters["embed"], x))
    x = stack(parameters["layers"], x, 8, relu, norm_last=True)
    return dense(parameters["head"], norm(parameters["norm"], x[:, 0]))


def standardized(images: Array) -> Array:
    """MNIST with mean 0 and deviation 1, (b, 28, 28, 1) of (b, 28, 28) in [0, 1]."""
    return ((images - 0.1307) / 0.3081)[..., None]


def read_digits(content: bytes) -> Any:
    """A class token, heads of 64 in a model of width 64."""
    state = torch_state(content)
    layers = []
    for i in numbered(state, "transformer.layers"):
        block = f"transformer.layers.{i}"
        layers.append(
            thirds(linear(state, f"{block}.0.fn.to_qkv"))
            | {
                "out": linear(state, f"{block}.0.fn.to_out.0"),
                "up": linear(state, f"{block}.1.fn.net.0"),
                "down": linear(state, f"{block}.1.fn.net.3"),
                "norm1": scale(state, f"{block}.0.norm"),
                "norm2": scale(state, f"{block}.1.norm"),
            }
        )
    return {
        "embed": linear(state, "to_patch_embedding.1"),
        "class": state["cls_token"],
        "positions": state["pos_embedding"],
        "layers": layers,
        "norm": scale(state, "mlp_head.0"),
        "head": linear(state, "mlp_head.1"),
    }


def digits(parameters: Any, images: Array) -> Array:
    """Logits of (b, 28, 28) images in [0, 1]."""
    x = with_class(parameters, dense(parameters["embed"], patches(standardized(images), 4)))
    x = stack(parameters["layers"], x, 4, relu)
    return dense(parameters["head"], norm(parameters["norm"], x[:, 0]))


def read_overlapping(content: bytes) -> Any:
    """169 overlapping patches, eight heads of 6, mean of all tokens."""
    state = torch_state(content)
    prefix = "encoder.layers"
    return {
        "embed": linear(state, "patch_embed.proj"),
        "positions": state["pos_embed"],
        "layers": [encoder_layer(state, f"{prefix}.{i}") for i in numbered(state, prefix)],
        "norm": scale(state, "norm"),
        "hidden": linear(state, "classifier.0"),
        "head": linear(state, "classifier.2"),
    }


def overlapping(parameters: Any, images: Array) -> Array:
    """Logits of (b, 28, 28) images in [0, 1]."""
    x = dense(parameters["embed"], patches(standardized(images), 4, 2)) + parameters["positions"]
    x = norm(parameters["norm"], jnp.mean(stack(parameters["layers"], x, 8, gelu), axis=1))
    return dense(parameters["head"], gelu(dense(parameters["hidden"], x)))


# Keyword Transformer (Berg et al., 2021)


def tflite_tensors(content: bytes) -> dict[str, np.ndarray]:
    """Return the float32 constants of a TensorFlow Lite file.

    Raises:
        ImportError: without the package tflite.
    """
    try:
        import tflite  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("a .tflite file is read by tflite: pip install tflite") from error
    model = tflite.Model.GetRootAsModel(content, 0)
    graph, arrays = model.Subgraphs(0), {}
    for i in range(graph.TensorsLength()):
        tensor = graph.Tensors(i)
        buffer = model.Buffers(tensor.Buffer())
        if buffer.DataLength() and tensor.Type() == tflite.TensorType.FLOAT32:
            shape = tensor.ShapeAsNumpy() if tensor.ShapeLength() else ()
            numbers = buffer.DataAsNumpy().view(np.float32)
            arrays[tensor.Name().decode()] = numbers.reshape(shape)
    return arrays


def read_keywords(content: bytes) -> Any:
    """KWT-1; the file also computes its spectrogram by products of matrices."""
    arrays = tflite_tensors(content)

    def array(*parts: str) -> np.ndarray:
        (name,) = (x for x in arrays if all(f"{part}/" in f"{x}/" for part in parts))
        return arrays[name]

    def dense_of(number: int, bias: bool = True) -> tuple[np.ndarray, ...]:
        weight = array(f"dense_{number}", "MatMul").T
        return (weight, array(f"dense_{number}", "bias")) if bias else (weight,)

    def norm_of(number: int) -> tuple[np.ndarray, ...]:
        name = f"/layer_normalization_{number}" if number else "/layer_normalization"
        return array(name, "gamma"), array(name, "beta")

    layers = []
    for i in range(12):
        joint = zip(("query", "key", "value"), range(6 * i + 1, 6 * i + 4), strict=True)
        layer = {name: dense_of(n, bias=False) for name, n in joint}
        layer |= {x: dense_of(6 * i + n) for x, n in (("out", 4), ("up", 5), ("down", 6))}
        layers.append(layer | {"norm1": norm_of(2 * i), "norm2": norm_of(2 * i + 1)})
    spectrum = "magnitude_rdf_tmel"
    return {
        "window": array("windowing"),
        "cosines": arrays[f"speech_features/{spectrum}/MatMul"].T,
        "sines": arrays[f"speech_features/{spectrum}/MatMul_1"].T,
        "mel": arrays[f"speech_features/{spectrum}/MatMul_2"].T,
        "floor": array("Maximum"),
        "dct": array("dct").T,
        "mean": arrays["speech_features/normalizer/sub/y"],
        "factor": array("truediv"),
        "embed": (array("dense", "MatMul").T, array("dense", "bias")),
        "class": array("class_emb"),
        "positions": array("pos_emb"),
        "layers": layers,
        "head": dense_of(73),
    }


def keywords(parameters: Any, sound: Array) -> Array:
    """Logits of (b, 16000) samples of one second in [-1, 1]: one head of 64, norms last."""
    starts = jnp.arange(98)[:, None] * 160 + jnp.arange(480)
    frames = sound[:, starts] * parameters["window"]
    power = (frames @ parameters["cosines"]) ** 2 + (frames @ parameters["sines"]) ** 2
    mel = jnp.maximum(jnp.sqrt(power) @ parameters["mel"], parameters["floor"])
    features = (jnp.log(mel) @ parameters["dct"] - parameters["mean"]) * parameters["factor"]
    x = with_class(parameters, dense(parameters["embed"], features))
    x = stack(parameters["layers"], x, 1, jax.nn.gelu, norm_last=True, eps=1e-6)
    return dense(parameters["head"], x[:, 0])


# Texts: families of proteins, spam


def read_proteins(content: bytes) -> Any:
    """`torch.nn.TransformerEncoder` of tokens of amino acids."""
    state = torch_state(content)
    prefix = "stacked_encoders.layers"
    return {
        "embedding": state["embedding.weight"],
        "positions": state["positional_encoding.pe"][0],
        "layers": [encoder_layer(state, f"{prefix}.{i}") for i in numbered(state, prefix)],
        "head": linear(state, "linear"),
    }


def proteins(parameters: Any, tokens: Array) -> Array:
    """Logits of (b, t) tokens, of which the first is the class token and 0 is padding."""
    embedding = parameters["embedding"]
    x = embedding[tokens] * embedding.shape[1] ** 0.5 + parameters["positions"]
    x = stack(parameters["layers"], x, 4, gelu, norm_last=True, mask=tokens != 0)
    return dense(parameters["head"], x[:, 0])


def read_messages(content: bytes) -> Any:
    """`torch.nn.TransformerEncoder` of words."""
    state = torch_state(content, "model_state_dict")
    prefix = "transformer.layers"
    return {
        "embedding": state["word_embedding.weight"],
        "positions": state["position_encoding.position_embedding.weight"],
        "layers": [encoder_layer(state, f"{prefix}.{i}") for i in numbered(state, prefix)],
        "head": linear(state, "classifier"),
    }


def messages(parameters: Any, words: Array) -> Array:
    """Logits of (b, 64) words, of which 0 is padding: mean of the others."""
    known = words != 0
    x = parameters["embedding"][words] + parameters["positions"]
    x = stack(parameters["layers"], x, 4, relu, norm_last=True, mask=known)
    return dense(parameters["head"], jnp.mean(x, axis=1, where=known[..., None]))


MODELS = {
    "stories260K": Model(
        "ytmytm/llama2.c64@12b5bec stories260K.bin (karpathy/tinyllamas)",
        "b0a507e7ad0f626624f17112325e66691f9076d622e1d3274d103d00299f2696",
        read_llama,
        llama,
        "stories",
        8,
        True,
        "loss 1.2968 on validation stories",
    ),
    "shakespeare_gpt": Model(
        "tkim1515/gpt-project@11d00f8 shakespeare_gpt.pt",
        "a4c61d658bc55152b9f326b9249eb2df0cd76eb3c94b26e96a67d3fe1dc47b80",
        read_gpt,
        partial(gpt, heads=4),
        "shakespeare",
        4,
        True,
        "",
    ),
    "ecg_gpt": Model(
        "harryjdavies/HeartGPT@3acd468 Model_files/ECGPT_560k_iters.zip",
        "781eb1c7c6143c18b3795d12e05468fb50fb2d2bc1a3798a2f13cc6cb257736d",
        read_ecg,
        partial(gpt, heads=8),
        "ecg",
        8,
        True,
        "",
    ),
    "adder": Model(
        "saahithjanapati/adder-gpt@b8b8fde adder_gpt_state_dict.pth",
        "b133acec0fc7ab3731d35fed18c7952a09d85e355fa10c4f345417bfa902778a",
        read_adder,
        adder,
        "sums",
        8,
        True,
        "0.998 of whole sums",
    ),
    "vit_cifar10": Model(
        "smmk47/CIFAR10-Classification@6c007b7 vit_cifar10.pth",
        "2d061eb158b8ea126c1b96ee657862bf2217696ed40fff3bdc424007d13f1397",
        read_cifar,
        cifar,
        "cifar10",
        8,
        False,
        "accuracy 0.7372",
    ),
    "vit_mnist_tiny": Model(
        "researchase/vit-mnist-explorations@325a984 vit_mnist_gpu.pt",
        "f742611b57b99a601fb33fbb50f262131988a2bbca0bc2d3ae8544d25cd89b2c",
        read_digits,
        digits,
        "mnist",
        4,
        False,
        "accuracy 0.9721",
    ),
    "vit_mnist_overlap": Model(
        "tzhen11/PRCV-Project5@d4ab986 transformer_model.pth",
        "d5b713d792495b3a5215690aea2bbee8b9a441d37f4bc400963bea0c42b82789",
        read_overlapping,
        overlapping,
        "mnist",
        8,
        False,
        "",
    ),
    "kwt1": Model(
        "ARM-software/keyword-transformer@237e409"
        " models_data_v2_12_labels/kwt1/tflite_non_stream/non_stream.tflite",
        "b7dc15b422494adbdd1b721c4a0f073af36a4d93331e96299512eb1561278327",
        read_keywords,
        keywords,
        "commands",
        1,
        False,
        "accuracy 0.977 on 12 labels",
    ),
    "messages": Model(
        "Simdiode/sms-spam-classifier@4326f3f spam_transformer.pth",
        "eec699bba952df248fd31e7fe6a22846371d961afb41636b661aabe587eedb52",
        read_messages,
        messages,
        "sms",
        4,
        False,
        "accuracy 0.9689 on these 836 messages",
    ),
    "proteins": Model(
        "rictoo/Protein-Family-Classification@83bfe3f models/transformer_model.pth",
        "8bd721f027aa7d286f4dbf4d7b5046bcf0d00bbbd63fe32a56afdb196d218165",
        read_proteins,
        proteins,
        "families",
        4,
        False,
        "accuracy 0.8663 of 17,929 families",
    ),
}
"""By name."""
