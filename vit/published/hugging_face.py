"""Encoders as transformers writes them: ViT, ViT-MSN, DeiT, DINOv2 (with registers too), SigLIP.

Names are those of the published files, modeling_vit.py, modeling_deit.py, modeling_dinov2.py,
modeling_dinov2_with_registers.py and modeling_siglip.py of huggingface/transformers. Of a model for
two towers the vision tower is read. A value that config.json leaves out is the default of the class
in transformers, for it writes only the others.
"""

import re
from typing import Any

from vit.published.encoder import HALF, IMAGENET, Encoder, Said, built, side
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
VIT = EMBEDDINGS | {f"encoder.layer.*.{k}": f"blocks/*/{v}" for k, v in VIT_BLOCK.items()}
DINOV2 = EMBEDDINGS | {f"encoder.layer.*.{k}": f"blocks/*/{v}" for k, v in DINOV2_BLOCK.items()}
SIGLIP |= {f"encoder.layers.*.{k}": f"blocks/*/{v}" for k, v in SIGLIP_BLOCK.items()}

FAMILIES = {
    "vit": (VIT, Said("Hugging Face's ViT", 768, 12, 1e-12, "gelu", *HALF)),
    "vit_msn": (VIT, Said("Hugging Face's ViT-MSN", 768, 12, 1e-6, "gelu", *IMAGENET)),
    "deit": (VIT, Said("Hugging Face's DeiT", 768, 12, 1e-12, "gelu", *IMAGENET)),
    "dinov2": (DINOV2, Said("Hugging Face's DINOv2", 768, 12, 1e-6, "gelu", *IMAGENET)),
    "siglip": (SIGLIP, Said("Hugging Face's SigLIP", 768, 12, 1e-6, "gelu_pytorch_tanh", *HALF)),
}
FAMILIES["dinov2_with_registers"] = FAMILIES["dinov2"]
FAMILIES["siglip_vision_model"] = FAMILIES["siglip"]
"""Names (theirs -> ours) and defaults, by the `model_type` of config.json."""

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


def wanted(names: list[str]) -> list[str]:
    """Return the names of the arrays that are read: a classifier of SigLIP needs no pooling."""
    left_out = LEFT_OUT + (r"|head\..*" if "classifier.weight" in names else "")
    return [name for name in names if not re.fullmatch(left_out, re.sub(PREFIX, "", name))]


def read(arrays: Arrays, config: dict[str, Any], preprocessor: dict[str, Any]) -> Encoder:
    """Build the encoder of a file.

    Args:
        arrays: those that are `wanted`.
        config: `config.json`.
        preprocessor: `preprocessor_config.json`, or nothing.

    Raises:
        ValueError: for a family that is not read, or parts that this ViT lacks.
    """
    kind = config["model_type"]
    if kind not in FAMILIES:
        read = ", ".join(FAMILIES)
        raise ValueError(f"config.json: model_type={kind!r} is not read; read are {read}")
    names, said = FAMILIES[kind]
    arrays = {re.sub(PREFIX, "", name): array for name, array in arrays.items()}
    labels = config.get("id2label", {})
    config = config.get("vision_config", config)
    act = config.get("hidden_act", said.activation)
    if act not in ACTIVATIONS:
        raise ValueError(f"config.json: hidden_act={act!r} is none of {', '.join(ACTIVATIONS)}")
    if preprocessor.get("do_normalize") is False:
        preprocessor = preprocessor | {"image_mean": [0.0] * 3, "image_std": [1.0] * 3}
    size = preprocessor.get("size") or 0
    said = said._replace(
        width=config.get("hidden_size", said.width),
        num_heads=config.get("num_attention_heads", said.num_heads),
        epsilon=float(config.get("layer_norm_eps", said.epsilon)),
        activation="swiglu" if config.get("use_swiglu_ffn") else ACTIVATIONS[act],
        mean=preprocessor.get("image_mean") or said.mean,
        std=preprocessor.get("image_std") or said.std,
        image_size=side(config.get("image_size", 224)),
        pooling=_pooling(arrays),
        antialias=kind == "dinov2_with_registers",
        input_size=side(preprocessor.get("crop_size") or size),
        resize=side(size) if preprocessor.get("do_center_crop") else 0,
        class_names=_class_names(arrays, labels),
    )
    return built(arrays, names, said)


def _class_names(arrays: Arrays, names: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of the classes; none without a head, or where they were never named."""
    biases = [arrays[f"{head}.bias"] for head in HEADS if f"{head}.bias" in arrays]
    numbers = range(len(biases[0])) if biases else ()
    unnamed = all(names.get(str(i), f"LABEL_{i}") == f"LABEL_{i}" for i in numbers)
    return () if unnamed else tuple(str(names.get(str(i), i)) for i in numbers)


def _pooling(arrays: Arrays) -> str:
    """Return what its head reads: DINOv2's class token and mean, distilled DeiT's both tokens."""
    if "embeddings.cls_token" not in arrays:
        return "attention" if "head.probe" in arrays else "mean"
    if "distillation_classifier.weight" in arrays:
        return "token+register"
    head, token = arrays.get("classifier.weight"), arrays["embeddings.cls_token"]
    return "token+mean" if head is not None and head.shape[-1] == 2 * token.shape[-1] else "token"
