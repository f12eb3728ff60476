"""Which encoder a file of safetensors holds: one of Hugging Face's, or one of timm's."""

from collections import Counter
from pathlib import Path

from vit.published import files, hugging_face, timm
from vit.published.encoder import Encoder


def read(path: Path, num_heads: int = 0) -> Encoder:
    """The encoder in a file .safetensors, with what config.json and preprocessor_config.json say.

    Args:
        path: of the file; these two are looked for beside it.
        num_heads: in the place of what they say, or of a guess by the width; 0: as they say.

    Raises:
        ValueError: for a file that is refused (`files.check_form`), cannot be read, holds another
            network, or contradicts itself.
    """
    names = files.names(path)
    family = hugging_face.family(names)
    if not family and not timm.is_timm(names):
        raise ValueError(
            f"{path} holds none of the encoders that are read (Hugging Face's ViT, DeiT, DINOv2 and"
            f" SigLIP, timm's vit_* and deit_*); its arrays begin with {', '.join(names[:3])}"
        )
    module = hugging_face if family else timm
    wanted = [name for name in names if module.wanted(name, names)]
    arrays = files.read(path, wanted)
    config = files.beside(path, "config.json")
    preprocessor = files.beside(path, "preprocessor_config.json")
    try:
        encoder = module.read(arrays, config, preprocessor, num_heads)
    except (ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
        said = error if isinstance(error, ValueError) else f"it or the JSON beside it: {error!r}"
        raise ValueError(f"{path}: {said}") from error
    left = Counter(".".join(name.split(".")[:2]) for name in names if name not in wanted)
    lines = [f"{group}: {count} arrays left out" for group, count in left.items()]
    return encoder._replace(lines=[*encoder.lines, *lines])
