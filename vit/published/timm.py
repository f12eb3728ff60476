"""Encoders as timm writes them: vit_* and deit_*, DINOv2's and SigLIP's among them.

Names are those of vision_transformer.py and deit.py of huggingface/pytorch-image-models. What
arrays do not tell is in timm's config.json: the pooling, and the name of the architecture.
"""

import math
import re
from typing import Any

from vit.published.encoder import HALF, IMAGENET, Encoder, Said, built
from vit.published.files import Arrays

BLOCK = {
    "norm1": "attention_norm",
    "attn.qkv": "attention/qkv",
    "attn.proj": "attention/out",
    "ls1.gamma": "attention_scale",
    "norm2": "mlp_norm",
    "mlp.fc1": "mlp_in",
    "mlp.fc2": "mlp_out",
    "ls2.gamma": "mlp_scale",
}
NAMES = {
    "cls_token": "token",
    "dist_token": "distillation",
    "reg_token": "registers",
    "register_tokens": "registers",  # DINOv2's own files, whose names are else the same
    "pos_embed": "position",
    "patch_embed.proj": "embed",
    "norm_pre": "embed_norm",
    **{f"blocks.*.{theirs}": f"blocks/*/{ours}" for theirs, ours in BLOCK.items()},
    "norm": "norm",
    "fc_norm": "norm",
    "attn_pool.latent": "pool/query",
    "attn_pool.q": "pool/attention/query",
    "attn_pool.kv": "pool/attention/kv",
    "attn_pool.proj": "pool/attention/out",
    "attn_pool.norm": "pool/norm",
    "attn_pool.mlp.fc1": "pool/mlp_in",
    "attn_pool.mlp.fc2": "pool/mlp_out",
    "head": "head",
    "head_dist": "head_distillation",
}
"""Theirs -> ours."""

LEFT_OUT = ("mask_token",)

POOLING = {"token": "token", "avg": "mean", "map": "attention"}
"""`global_pool` of config.json."""

TANH = r".*(patch32_siglip|large_patch16_siglip(_gap)?_512|so400m_patch16_siglip|giantopt).*"
"""Architectures with `act_layer='gelu_tanh'`: SigLIP's others have the exact GELU in timm."""

HEADS = {"giantopt": 16, "vit_base_patch16_gap": 16, "test_vit3": 3, "test_vit4": 3, "test_vit": 2}
"""Architectures whose heads have another width than others of their width."""


def is_timm(names: list[str]) -> bool:
    """Whether a file with arrays of these names is timm's."""
    return "patch_embed.proj.weight" in names


def wanted(name: str, names: list[str]) -> bool:
    """Whether an array is a part of what is read."""
    del names
    return name not in LEFT_OUT


def read(
    arrays: Arrays, config: dict[str, Any], preprocessor: dict[str, Any], num_heads: int = 0
) -> Encoder:
    """The encoder of a file.

    Args:
        arrays: all but `LEFT_OUT`.
        config: `config.json` as timm writes it, or nothing.
        preprocessor: `preprocessor_config.json`, whose mean and deviation have precedence.
        num_heads: of the user, before that of the architecture.

    Raises:
        ValueError: when it has parts, or a pooling, that this ViT lacks.
    """
    return built(arrays, NAMES, _said(arrays, config, preprocessor), num_heads)


def _said(arrays: Arrays, config: dict[str, Any], preprocessor: dict[str, Any]) -> Said:
    architecture, weights = config.get("architecture", ""), config.get("pretrained_cfg", {})
    arguments = config.get("model_args", {})
    clip = "norm_pre.weight" in arrays
    activation = "quick_gelu" if "quickgelu" in architecture else "gelu"
    if re.fullmatch(TANH, architecture) or arguments.get("act_layer") == "gelu_tanh":
        activation = "gelu_tanh"
    heads = [number for name, number in HEADS.items() if name in architecture]
    half = not any(name.endswith("ls1.gamma") or name == "dist_token" for name in arrays)
    mean, std = HALF if half else IMAGENET
    size = int((weights.get("input_size") or [0, 0])[-1])
    lines = []
    if not config:
        lines = [f"epsilon, {activation}, mean and deviation are timm's usual ones: no config.json"]
    return Said(
        origin=f"timm's {architecture or 'ViT'}",
        epsilon=1e-5 if clip else 1e-6,
        activation=activation,
        num_heads=int(arguments.get("num_heads", heads[0] if heads else 0)),
        pooling=_pooling(arrays, config.get("global_pool", "")),
        final_norm="after" if "fc_norm.weight" in arrays else "before",
        image_size=size,
        mean=tuple(preprocessor.get("image_mean", weights.get("mean", mean))),
        std=tuple(preprocessor.get("image_std", weights.get("std", std))),
        input_size=size,
        resize=math.floor(size / float(weights.get("crop_pct") or 1)),
        class_names=tuple(weights.get("label_names") or ()),
        lines=tuple(lines),
    )


def _pooling(arrays: Arrays, said: str) -> str:
    """What the head reads."""
    if "attn_pool.latent" in arrays:
        return "attention"
    if "head_dist.weight" in arrays:
        return "token+register"
    if said and said not in POOLING:
        raise ValueError(f"config.json: global_pool={said!r} is none of {', '.join(POOLING)}")
    if said:
        return POOLING[said]
    averages = "cls_token" not in arrays or "fc_norm.weight" in arrays
    return "mean" if averages else "token"
