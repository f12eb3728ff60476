"""Encoders of transformers and timm with random weights, and what they compute: for the tests.

    pip install --group published
    python -m tests.support.make_published --out=tests/support/published
    python -m tests.support.make_published --out=tests/support/published --architectures

For each encoder of `ENCODERS` a folder: the file of weights as its library writes it, the JSON
beside it, and `reference.npz`: pictures at two sizes, with logits (of its pooled output, where it
has no head) and last hidden states in float32. Weights are far from their initialisation: biases,
LayerScale and positions matter. The second size has fewer patches, for which each library resamples
the positions in its own way.

With --architectures timm.csv: width, heads, epsilon and activation that timm gives to each
architecture of its vision_transformer.py, deit.py and eva.py, built without weights.
"""

import argparse
import csv
import json
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np

CLASSES = 5


class Size(NamedTuple):
    """Of an encoder."""

    width: int
    depth: int
    heads: int
    mlp: int
    patch: int
    sides: tuple[int, ...]
    """Patches of a side: as trained, and as evaluated at another size."""


TINY = Size(width=16, depth=2, heads=2, mlp=32, patch=4, sides=(6, 4))
"""Content of `tests/support/published`."""

ENCODERS = {
    "hf_vit": ("ViTForImageClassification", {}),
    "hf_vit_headless": ("ViTModel", {}),
    "hf_msn": ("ViTMSNForImageClassification", {}),
    "hf_deit": ("DeiTForImageClassification", {}),
    "hf_deit_distilled": ("DeiTForImageClassificationWithTeacher", {}),
    "hf_dinov2": ("Dinov2ForImageClassification", {}),
    "hf_dinov2_swiglu": ("Dinov2Model", {"use_swiglu_ffn": True}),
    "hf_dinov2_registers": ("Dinov2WithRegistersForImageClassification", {}),
    "hf_siglip": ("SiglipVisionModel", {}),
    "hf_siglip_classifier": ("SiglipForImageClassification", {}),
    "timm_vit": ("vit_tiny_patch16_224", {}),
    "timm_vit_gap": ("vit_tiny_patch16_224", {"global_pool": "avg"}),
    "timm_clip": ("vit_base_patch16_clip_quickgelu_224", {}),
    "timm_registers": ("vit_small_patch14_reg4_dinov2", {}),
    "timm_siglip": ("vit_base_patch16_siglip_224", {}),
    "timm_deit_distilled": ("deit_tiny_distilled_patch16_224", {}),
}
"""By the name of the folder: the class or architecture, and its own arguments."""


def make(name, folder, size=TINY):
    """Writes the folder of an encoder; returns pictures, logits and last hidden states by size.

    A name that is none of `ENCODERS` is an architecture of timm.
    """
    import torch

    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    architecture, options = ENCODERS.get(name, (name, {}))
    folder.mkdir(parents=True, exist_ok=True)
    write = hugging_face if name.startswith("hf_") else timm
    rng = np.random.default_rng(0)
    run = write(architecture, options, size, folder)
    results = {}
    for side in size.sides:
        pixels = side * size.patch
        images = rng.integers(0, 256, (1, pixels, pixels, 3)).astype(np.uint8)
        logits, hidden = run(images, side)
        results |= {f"{side}/images": images, f"{side}/logits": logits, f"{side}/hidden": hidden}
    np.savez_compressed(folder / "reference.npz", **results)
    return results


def randomise(model):
    """All parameters of a size at which each of them shows."""
    import torch

    for name, x in model.named_parameters():
        spread = 0.25 if x.ndim < 2 else 1.5 / x[0].numel() ** 0.5
        centre = 1.0 if x.ndim == 1 and name.endswith(("weight", "lambda1", "gamma")) else 0.0
        if any(part in name for part in ("token", "pos", "probe", "latent")):
            spread = 0.5
        x.copy_(centre + spread * torch.randn_like(x))


def pixel_values(images, mean, std):
    """As the library's image processor makes them: (b, c, height, width)."""
    import torch

    x = (images.astype(np.float64) / 255 - np.array(mean)) / np.array(std)
    return torch.tensor(x.transpose(0, 3, 1, 2), dtype=torch.float32)


def hugging_face(architecture, options, size, folder):
    """Writes a model of transformers; returns (images, side) -> logits, hidden."""
    import transformers

    family = architecture.split("For")[0].removesuffix("Model").removesuffix("Vision")
    sizes = {
        "hidden_size": size.width,
        "num_hidden_layers": size.depth,
        "num_attention_heads": size.heads,
        "image_size": size.sides[0] * size.patch,
        "patch_size": size.patch,
    } | options
    names = {i: f"class {chr(97 + i)}" for i in range(CLASSES)}
    labels = {"id2label": names, "label2id": {v: k for k, v in names.items()}}
    if "Dinov2" not in family:
        sizes["intermediate_size"] = size.mlp
    if architecture == "SiglipForImageClassification":
        text = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        config = transformers.SiglipConfig(vision_config=sizes, text_config=text, **labels)
    elif family == "Siglip":
        config = transformers.SiglipVisionConfig(**sizes)
    else:
        config = getattr(transformers, f"{family}Config")(**sizes, **labels)
    model = getattr(transformers, architecture)(config).eval()
    randomise(model)
    model.save_pretrained(folder)
    mean, std = ([0.5] * 3,) * 2
    if family not in ("ViT", "Siglip"):
        mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    about = {"image_mean": mean, "image_std": std, "size": {"height": 24, "width": 24}}
    (folder / "preprocessor_config.json").write_text(json.dumps(about))

    def run(images, side):
        options = {} if "Dinov2" in family else {"interpolate_pos_encoding": True}
        x = pixel_values(images, mean, std)
        out = model(x, output_hidden_states=True, **options)
        last = ("layernorm", "post_layernorm", f"{model.base_model_prefix}.layernorm")
        last = (*last, "vision_model.post_layernorm")
        norm = next(module for name, module in model.named_modules() if name in last)
        hidden = norm(out.hidden_states[-1])
        if architecture == "ViTModel":  # its tanh layer, which few files have trained, is left out
            return hidden[:, 0].numpy(), hidden.numpy()
        logits = out.pooler_output if hasattr(out, "pooler_output") else out.logits
        return logits.numpy(), hidden.numpy()

    return run


def timm(architecture, options, size, folder):
    """Writes a model of timm; returns (images, side) -> logits, hidden."""
    import timm
    from timm.models import save_for_hf

    model = timm.create_model(
        architecture,
        img_size=size.sides[0] * size.patch,
        patch_size=size.patch,
        embed_dim=size.width,
        depth=size.depth,
        num_heads=size.heads,
        mlp_ratio=size.mlp / size.width,
        num_classes=CLASSES,
        **options,
    ).eval()
    randomise(model)
    save_for_hf(model, folder, safe_serialization=True)
    about = json.loads((folder / "config.json").read_text())["pretrained_cfg"]

    def run(images, side):
        if side != size.sides[0]:
            model.set_input_size(img_size=side * size.patch)
        x = pixel_values(images, about["mean"], about["std"])
        return model(x).numpy(), model.forward_features(x).numpy()

    return run


def architectures():
    """Yields for each architecture of timm: module, name, width, heads, epsilon, activation."""
    import timm
    import torch

    for module in ("vision_transformer", "deit", "eva"):
        for name in timm.list_models(module=module):
            with torch.device("meta"):
                model = timm.models.model_entrypoint(name)()
            block = model.blocks[0]
            heads = getattr(getattr(block, "attn", block), "num_heads", "")
            epsilon = getattr(getattr(block, "norm1", None), "eps", "")
            kind = type(getattr(getattr(block, "mlp", None), "act", None)).__name__
            activation = {"GELU": "gelu", "GELUTanh": "gelu_tanh", "QuickGELU": "quick_gelu"}
            yield module, name, model.embed_dim, heads, epsilon, activation.get(kind, kind)


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the folders")
    parser.add_argument("--only", default="", help="encoders whose name begins so")
    parser.add_argument("--architectures", action="store_true", help="write timm.csv alone")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.architectures:
        with (arguments.out / "timm.csv").open("w", newline="") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow(["module", "architecture", "width", "heads", "epsilon", "activation"])
            rows.writerows(architectures())
        return
    for name in ENCODERS:
        if name.startswith(arguments.only):
            results = make(name, arguments.out / name)
            spread = {k: float(np.std(x)) for k, x in results.items() if "images" not in k}
            print(name, {k: round(v, 3) for k, v in spread.items()})


if __name__ == "__main__":
    main()
