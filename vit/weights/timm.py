"""Encoders of timm: vit_*, deit_*, deit3_*, flexivit_* and eva_large_*.

Names follow vision_transformer.py and deit.py of huggingface/pytorch-image-models. The name
of the architecture, in config.json, stands for arguments in its code; `model_args` contains the
other arguments. An architecture or argument that is not in a table here is refused.
"""

import math
import re
from typing import Any

from vit.weights.encoder import Arrays, Encoder, Metadata, from_pytorch, side

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

SIZE = (
    "(tiny|xsmall|wee|little|small|mediumd?|betwixt|base|so150m2?|large|intern300m|so400m|huge"
    "|giant|giantopt|gigantic)"
)
ARCHITECTURES = {
    "vit_SIZE_patchN_N(_miil)?": {},
    "vit_SIZE_patchN_(36x1|plus)_N": {},
    "vit_base_patchN_gap_N": {"num_heads": 16},
    "vit_SIZE_patchN(_regN)?_(gap|map)_N": {},
    "vit_SIZE_patchN(_plus)?_clip_N": {"epsilon": 1e-5},
    "vit_SIZE_patchN_clip_quickgelu_N": {"epsilon": 1e-5, "activation": "quick_gelu"},
    "vit_giantopt_patchN_siglip(_gap)?_N": {"num_heads": 16, "activation": "gelu_tanh"},
    "vit_(base_patch32|so400m_patch16)_siglip(_gap)?_N": {"activation": "gelu_tanh"},
    "vit_large_patch16_siglip(_gap)?_512": {"activation": "gelu_tanh"},
    "vit_SIZE_patchN_siglip(_gap)?_N": {},
    "vit_giant_patchN(_regN)?_(dinov2|tipsv2)": {"activation": "swiglu"},
    "vit_SIZE_patchN(_regN)?_(dinov2|tipsv2)": {},
    "vit_SIZE_patchN_radio_vN": {},
    "deit3?_SIZE(_distilled)?_patchN_N": {},
    "eva_large_patchN_N": {},
    "flexivit_SIZE": {},
    "test_vit2?": {"num_heads": 2},
}
"""Supported architectures (N is a number), and differences from heads by the width, an epsilon of
1e-6 and the exact GELU; the first that fits holds."""
HEADS = {1152: 16, 1280: 16, 1408: 16, 1664: 16}
"""Heads of So400m, H, g and G by their width; at other widths a head has 64."""

POOLING = {"token": "token", "avg": "mean", "map": "attention"}
"""`global_pool` of config.json."""

OF_ANY_VALUE = """
    img_size dynamic_img_size patch_size in_chans num_classes embed_dim depth num_heads mlp_ratio
    qkv_bias qk_norm proj_bias init_values class_token reg_tokens no_embed_class pre_norm final_norm
    fc_norm drop_rate pos_drop_rate patch_drop_rate proj_drop_rate attn_drop_rate drop_path_rate
    weight_init fix_init
"""
"""Arguments that are read below, shown by the arrays, or of training only."""

VALUES = {
    "global_pool": tuple(POOLING),
    "act_layer": ("gelu", "gelu_tanh", "quick_gelu"),
    "pool_include_prefix": (False,),
}
"""Arguments with a restricted set of supported values."""


def to_read(names: list[str]) -> list[str]:
    """Return the names of the arrays that are read."""
    return [name for name in names if name != "mask_token"]


def read(arrays: Arrays, config: dict[str, Any], preprocessor: dict[str, Any]) -> Encoder:
    """Build the encoder of a file.

    Args:
        arrays: the arrays that `to_read` names.
        config: `config.json` as timm writes it.
        preprocessor: `preprocessor_config.json`, whose mean and deviation have precedence.

    Raises:
        ValueError: if an architecture or argument is not supported, or this ViT lacks a part.
    """
    name, weights = config["architecture"], config.get("pretrained_cfg", config)
    arguments = {"global_pool": config.get("global_pool")} | config.get("model_args", {})
    _check(arguments)
    width = len(arrays.get("patch_embed.proj.weight", ()))
    usual = fields(name, width)
    pooling = POOLING[arguments["global_pool"]]
    size = side(weights.get("input_size", 0))
    metadata = Metadata(
        origin=f"timm's {name}",
        width=arguments.get("embed_dim", width),
        num_heads=arguments.get("num_heads", usual["num_heads"]),
        epsilon=usual["epsilon"],
        activation=arguments.get("act_layer", usual["activation"]),
        mean=preprocessor.get("image_mean") or weights.get("mean") or (),
        std=preprocessor.get("image_std") or weights.get("std") or (),
        image_size=side(arguments.get("img_size", size)),
        pooling="token+register" if "head_dist.bias" in arrays else pooling,
        final_norm="after" if "fc_norm.weight" in arrays else "before",
        input_size=size,
        resize=math.floor(size / float(weights.get("crop_pct") or 1)),
        crop=weights.get("crop_mode") or "center",
        filter=weights.get("interpolation") or "bicubic",
        class_names=tuple(config.get("label_names") or weights.get("label_names") or ()),
    )
    return from_pytorch(arrays, NAMES, metadata)


def fields(architecture: str, width: int) -> dict[str, Any]:
    """Return heads, epsilon and activation of an architecture.

    Raises:
        ValueError: if it is not supported.
    """
    usual = {"num_heads": HEADS.get(width, width // 64), "epsilon": 1e-6, "activation": "gelu"}
    for pattern, different in ARCHITECTURES.items():
        if re.fullmatch(pattern.replace("SIZE", SIZE).replace("N", r"\d+"), architecture):
            return usual | different
    raise ValueError(
        f"config.json: architecture={architecture!r} is not read: read are"
        f" {', '.join(ARCHITECTURES)}, with a number for N and for SIZE one of {SIZE}"
    )


def _check(arguments: dict[str, Any]) -> None:
    """Raise ValueError for an argument that is not supported."""
    any_value = OF_ANY_VALUE.split()
    for name, value in arguments.items():
        if name not in any_value and value not in VALUES.get(name, ()):
            known = [f"{name} of {', '.join(map(repr, some))}" for name, some in VALUES.items()]
            raise ValueError(
                f"config.json: the argument {name}={value!r} is not read; read are"
                f" {'; '.join(known)}; and {', '.join(any_value)}"
            )
    if "embed_dim" in arguments and "num_heads" not in arguments:
        raise ValueError("config.json: model_args must name num_heads with embed_dim")
