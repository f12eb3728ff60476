"""Encoders of transformers: ViT, ViT-MSN, DeiT, DINOv2 (also with registers) and SigLIP.

Of a model with two towers the vision tower is read.

Names follow the published files, modeling_vit.py, modeling_deit.py, modeling_dinov2.py,
modeling_dinov2_with_registers.py and modeling_siglip.py of huggingface/transformers. config.json
contains only values that differ from the defaults of the class in transformers.
"""

import re
from typing import Any

from PIL.Image import Resampling

from vit.weights.encoder import HALF, IMAGENET, Arrays, Encoder, Metadata, from_pytorch, side
from vit.weights.positions import ANTIALIASED, BICUBIC

BLOCK = {
    **{f"attention.attention.{x}": f"attention/{x}" for x in ("query", "key", "value")},
    **{f"self_attn.{x[0]}_proj": f"attention/{x}" for x in ("query", "key", "value")},
    **dict.fromkeys(("attention.output.dense", "self_attn.out_proj"), "attention/out"),
    **dict.fromkeys(("layernorm_before", "norm1", "layer_norm1"), "attention_norm"),
    **dict.fromkeys(("layernorm_after", "norm2", "layer_norm2"), "mlp_norm"),
    "layer_scale1.lambda1": "attention_scale",
    "layer_scale2.lambda1": "mlp_scale",
    **dict.fromkeys(("intermediate.dense", "mlp.fc1", "mlp.weights_in"), "mlp_in"),
    **dict.fromkeys(("output.dense", "mlp.fc2", "mlp.weights_out"), "mlp_out"),
}
POOL = {
    "probe": "query",
    "attention.in_proj": "attention/qkv",
    "attention.out_proj": "attention/out",
    "layernorm": "norm",
    "mlp.fc1": "mlp_in",
    "mlp.fc2": "mlp_out",
}
NAMES = {
    "embeddings.cls_token": "token",
    "embeddings.distillation_token": "distillation",
    "embeddings.register_tokens": "registers",
    **dict.fromkeys(
        ("embeddings.position_embeddings", "embeddings.position_embedding.weight"), "position"
    ),
    **dict.fromkeys(
        ("embeddings.patch_embeddings.projection", "embeddings.patch_embedding"), "embed"
    ),
    **{f"encoder.layer.*.{theirs}": f"blocks/*/{ours}" for theirs, ours in BLOCK.items()},
    **{f"encoder.layers.*.{theirs}": f"blocks/*/{ours}" for theirs, ours in BLOCK.items()},
    **dict.fromkeys(("layernorm", "post_layernorm"), "norm"),
    **{f"head.{theirs}": f"pool/{ours}" for theirs, ours in POOL.items()},
    **dict.fromkeys(("classifier", "cls_classifier"), "head"),
    "distillation_classifier": "head_distillation",
}
"""Theirs -> ours; no name stands for two things in two families."""

SIGLIP = Metadata("Hugging Face's SigLIP", 768, 12, 1e-6, "gelu_pytorch_tanh", *HALF)
DINOV2 = Metadata("Hugging Face's DINOv2", 768, 12, 1e-6, "gelu", *IMAGENET)
FAMILIES = {
    "vit": Metadata("Hugging Face's ViT", 768, 12, 1e-12, "gelu", *HALF, filter="bilinear"),
    "vit_msn": Metadata(
        "Hugging Face's ViT-MSN", 768, 12, 1e-6, "gelu", *IMAGENET, filter="bilinear"
    ),
    "deit": Metadata("Hugging Face's DeiT", 768, 12, 1e-12, "gelu", *IMAGENET),
    "dinov2": DINOV2,
    "siglip": SIGLIP,
    "dinov2_with_registers": DINOV2,
    "siglip_vision_model": SIGLIP,
}
"""Defaults by the `model_type` of config.json."""

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}
HEADS = ("classifier", "cls_classifier")
PREFIX = r"^(vit|deit|dinov2|dinov2_with_registers|vision_model)\."
LEFT_OUT = r"text_model\..*|logit_(scale|bias)|embeddings\.(mask_token|position_ids)|pooler\..*"


def to_read(names: list[str]) -> list[str]:
    """Return the names of the arrays that are read: a classifier of SigLIP needs no pooling."""
    left_out = LEFT_OUT + (r"|head\..*" if "classifier.weight" in names else "")
    return [name for name in names if not re.fullmatch(left_out, re.sub(PREFIX, "", name))]


def read(arrays: Arrays, config: dict[str, Any], preprocessor: dict[str, Any]) -> Encoder:
    """Build the encoder of a file.

    Args:
        arrays: the arrays that `to_read` names.
        config: `config.json`.
        preprocessor: `preprocessor_config.json`, or nothing.

    Raises:
        ValueError: if the family is not supported, or has parts that this ViT lacks.
    """
    kind = config["model_type"]
    if kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ValueError(f"config.json: model_type={kind!r} is not read; read are {known}")
    default = FAMILIES[kind]
    arrays = {re.sub(PREFIX, "", name): array for name, array in arrays.items()}
    labels = config.get("id2label", {})
    config = config.get("vision_config", config)
    act = config.get("hidden_act", default.activation)
    if act not in ACTIVATIONS:
        raise ValueError(f"config.json: hidden_act={act!r} is none of {', '.join(ACTIVATIONS)}")
    if preprocessor.get("do_normalize") is False:
        preprocessor = preprocessor | {"image_mean": [0.0] * 3, "image_std": [1.0] * 3}
    mean = preprocessor.get("image_mean") or default.mean
    std = preprocessor.get("image_std") or default.std
    stretch = 255 * (preprocessor.get("rescale_factor") or 1 / 255)
    if abs(stretch - 1) > 1e-6:  # (stretch x - mean) / std, x from 0 to 1
        mean, std = (tuple(number / stretch for number in each) for each in (mean, std))
    size = preprocessor.get("size") or 0
    keeps_ratio = "shortest_edge" in size if isinstance(size, dict) else kind.startswith("dinov2")
    resample = preprocessor.get("resample")
    metadata = default._replace(
        width=config.get("hidden_size", default.width),
        num_heads=config.get("num_attention_heads", default.num_heads),
        epsilon=float(config.get("layer_norm_eps", default.epsilon)),
        activation="swiglu" if config.get("use_swiglu_ffn") else ACTIVATIONS[act],
        mean=mean,
        std=std,
        image_size=side(config.get("image_size", 224)),
        pooling=_pooling(arrays),
        resample=ANTIALIASED if kind == "dinov2_with_registers" else BICUBIC,
        input_size=side(preprocessor.get("crop_size") or size),
        resize=side(size) if preprocessor.get("do_center_crop") else 0,
        crop="center" if keeps_ratio else "squash",
        filter=default.filter if resample is None else Resampling(resample).name.lower(),
        class_names=_class_names(arrays, labels),
    )
    return from_pytorch(arrays, NAMES, metadata)


def _class_names(arrays: Arrays, names: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of the classes; none without a head, or if they were never named."""
    biases = [arrays[f"{head}.bias"] for head in HEADS if f"{head}.bias" in arrays]
    numbers = range(len(biases[0])) if biases else ()
    unnamed = all(names.get(str(i), f"LABEL_{i}") == f"LABEL_{i}" for i in numbers)
    return () if unnamed else tuple(str(names.get(str(i), i)) for i in numbers)


def _pooling(arrays: Arrays) -> str:
    """Return the input of the head: DINOv2's class token and mean, distilled DeiT's both."""
    if "embeddings.cls_token" not in arrays:
        return "attention" if "head.probe" in arrays else "mean"
    if "distillation_classifier.weight" in arrays:
        return "token+register"
    head, token = arrays.get("classifier.weight"), arrays["embeddings.cls_token"]
    return "token+mean" if head is not None and head.shape[-1] == 2 * token.shape[-1] else "token"
