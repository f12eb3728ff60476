"""Encoders as transformers writes them: ViT, DeiT, DINOv2 with and without registers, SigLIP.

Names are those of the published files, modeling_vit.py, modeling_deit.py, modeling_dinov2.py,
modeling_dinov2_with_registers.py and modeling_siglip.py of huggingface/transformers. Of a model for
two towers the vision tower is read.
"""

import re
from typing import Any

from vit.config import Model
from vit.published.encoder import HALF, IMAGENET, Encoder, Said, built
from vit.published.files import Arrays

EMBEDDINGS = {
    "embeddings.cls_token": "token",
    "embeddings.distillation_token": "distillation",
    "embeddings.register_tokens": "registers",
    "embeddings.position_embeddings": "position",
    "embeddings.patch_embeddings.projection": "embed",
    "layernorm": "norm",
    "classifier": "head",
    "cls_classifier": "head",
    "distillation_classifier": "head_distillation",
}
ATTENTION = {
    **{f"attention.attention.{x}": f"attention/{x}" for x in ("query", "key", "value")},
    "attention.output.dense": "attention/out",
}
VIT_BLOCK = ATTENTION | {
    "layernorm_before": "attention_norm",
    "layernorm_after": "mlp_norm",
    "intermediate.dense": "mlp_in",
    "output.dense": "mlp_out",
}
DINOV2_BLOCK = ATTENTION | {
    "norm1": "attention_norm",
    "norm2": "mlp_norm",
    "layer_scale1.lambda1": "attention_scale",
    "layer_scale2.lambda1": "mlp_scale",
    "mlp.fc1": "mlp_in",
    "mlp.fc2": "mlp_out",
    "mlp.weights_in": "mlp_in",
    "mlp.weights_out": "mlp_out",
}
SIGLIP_BLOCK = {
    **{f"self_attn.{x[0]}_proj": f"attention/{x}" for x in ("query", "key", "value")},
    "self_attn.out_proj": "attention/out",
    "layer_norm1": "attention_norm",
    "layer_norm2": "mlp_norm",
    "mlp.fc1": "mlp_in",
    "mlp.fc2": "mlp_out",
}
SIGLIP = {
    "embeddings.patch_embedding": "embed",
    "embeddings.position_embedding.weight": "position",
    "post_layernorm": "norm",
    "classifier": "head",
    "head.probe": "pool/query",
    "head.attention.in_proj": "pool/attention/qkv",
    "head.attention.out_proj": "pool/attention/out",
    "head.layernorm": "pool/norm",
    "head.mlp.fc1": "pool/mlp_in",
    "head.mlp.fc2": "pool/mlp_out",
}
BLOCKS = {"ViT": VIT_BLOCK, "DeiT": VIT_BLOCK, "DINOv2": DINOV2_BLOCK}
NAMES = {
    family: EMBEDDINGS | {f"encoder.layer.*.{k}": f"blocks/*/{v}" for k, v in block.items()}
    for family, block in BLOCKS.items()
} | {"SigLIP": SIGLIP | {f"encoder.layers.*.{k}": f"blocks/*/{v}" for k, v in SIGLIP_BLOCK.items()}}
"""Theirs -> ours."""

HABITS = {
    "ViT": (1e-12, "gelu", HALF),
    "DeiT": (1e-12, "gelu", IMAGENET),
    "DINOv2": (1e-6, "gelu", IMAGENET),
    "SigLIP": (1e-6, "gelu_tanh", HALF),
}
"""Epsilon, activation, normalisation, where no JSON says them."""

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}
HEADS = ("classifier", "cls_classifier")
PREFIX = r"(vit|deit|dinov2|dinov2_with_registers|vision_model)\."
LEFT_OUT = r"text_model\..*|logit_(scale|bias)|embeddings\.(mask_token|position_ids)|pooler\..*"


def family(names: list[str]) -> str:
    """Which of them a file with arrays of these names is; "" for none."""
    names = [re.sub(f"^{PREFIX}", "", name) for name in names]
    if "embeddings.patch_embedding.weight" in names:
        return "SigLIP"
    if "embeddings.patch_embeddings.projection.weight" not in names:
        return ""
    if any(name.endswith(".layer_scale1.lambda1") for name in names):
        return "DINOv2"
    return "DeiT" if "embeddings.distillation_token" in names else "ViT"


def wanted(name: str, names: list[str]) -> bool:
    """Whether an array is a part of what is read: SigLIP's pooling is none beside a classifier."""
    name = re.sub(f"^{PREFIX}", "", name)
    pooling = name.startswith("head.") and "classifier.weight" in names
    return not (re.fullmatch(LEFT_OUT, name) or pooling)


def read(
    arrays: Arrays, config: dict[str, Any], preprocessor: dict[str, Any], num_heads: int = 0
) -> Encoder:
    """The encoder of a file.

    Args:
        arrays: of the names that are `wanted`.
        config: `config.json`, or nothing.
        preprocessor: `preprocessor_config.json`, or nothing.
        num_heads: of the user, before config.json's.

    Raises:
        ValueError: when it has parts that this ViT lacks, or JSON and arrays contradict.
    """
    kind = family(list(arrays))
    arrays = {re.sub(f"^{PREFIX}", "", name): array for name, array in arrays.items()}
    config = config.get("vision_config", config) | {"id2label": config.get("id2label", {})}
    said = _said(kind, arrays, config, preprocessor)
    encoder = built(arrays, NAMES[kind], said, num_heads)
    size = Model(**encoder.model).size
    for name, value in {"hidden_size": size.width, "num_hidden_layers": size.depth}.items():
        if config.get(name, value) != value:
            raise ValueError(f"config.json: {name} is {config[name]}, that of the arrays {value}")
    return encoder


def _class_names(arrays: Arrays, names: dict[str, Any]) -> tuple[str, ...]:
    """Of the head; nothing where it has none, or where they were never named."""
    biases = [arrays[f"{head}.bias"] for head in HEADS if f"{head}.bias" in arrays]
    numbers = range(len(biases[0])) if biases else ()
    unnamed = all(names.get(str(i), f"LABEL_{i}") == f"LABEL_{i}" for i in numbers)
    return () if unnamed else tuple(str(names.get(str(i), i)) for i in numbers)


def _said(kind: str, arrays: Arrays, config: dict[str, Any], preprocessor: dict[str, Any]) -> Said:
    epsilon, activation, (mean, std) = HABITS[kind]
    act = config.get("hidden_act")
    if act is not None and act not in ACTIVATIONS:
        raise ValueError(
            f"config.json: hidden_act={act!r} is none of {', '.join(sorted(ACTIVATIONS))}"
        )
    lines = []
    if "hidden_size" not in config:
        lines = [f"epsilon {epsilon:g} and {activation} are {kind}'s: no config.json says them"]
    if preprocessor.get("do_normalize") is False:
        preprocessor = preprocessor | {"image_mean": (0.0,) * 3, "image_std": (1.0,) * 3}
    if not preprocessor:
        lines += [f"mean and deviation are {kind}'s: there is no preprocessor_config.json"]
    return Said(
        origin=f"Hugging Face's {kind}",
        epsilon=float(config.get("layer_norm_eps", epsilon)),
        activation=ACTIVATIONS[act] if act else activation,
        num_heads=int(config.get("num_attention_heads", 0)),
        pooling=_pooling(kind, arrays),
        image_size=_side(config.get("image_size", 0)),
        mean=tuple(preprocessor.get("image_mean") or mean),
        std=tuple(preprocessor.get("image_std") or std),
        antialias="embeddings.register_tokens" in arrays,
        input_size=_side(preprocessor.get("crop_size") or preprocessor.get("size") or 0),
        resize=_side(preprocessor.get("size") or 0) if preprocessor.get("do_center_crop") else 0,
        class_names=_class_names(arrays, config["id2label"]),
        lines=tuple(lines),
    )


def _pooling(kind: str, arrays: Arrays) -> str:
    """What its head reads: DINOv2's class token and mean, distilled DeiT's both tokens."""
    head = arrays.get("classifier.weight")
    if kind == "SigLIP":
        return "attention" if "head.probe" in arrays else "mean"
    if "distillation_classifier.weight" in arrays:
        return "token+register"
    width = arrays["embeddings.cls_token"].shape[-1]
    return "token+mean" if head is not None and head.shape[-1] == 2 * width else "token"


def _side(size: Any) -> int:
    """Of 224, [224, 224], {"height": 224, "width": 224} or {"shortest_edge": 224}."""
    if isinstance(size, dict):
        size = size.get("shortest_edge") or size.get("height") or 0
    return int(size[0] if isinstance(size, list | tuple) else size)
