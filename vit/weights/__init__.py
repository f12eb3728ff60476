"""Published encoders: the readers of their files, and what their parameters are called.

A file .safetensors is that of transformers (`hugging_face`) or of timm; .npz is `google`.
"""

from collections import Counter
from pathlib import Path

from vit.weights import files, hugging_face, timm
from vit.weights.encoder import Encoder


def read(path: Path) -> Encoder:
    """Read the encoder in a file .safetensors, with the JSON beside it.

    Args:
        path: the file. In the same folder config.json is required, which names the network;
            preprocessor_config.json is read where it is there.

    Raises:
        ValueError: for a file that is refused (`files.check_form`) or cannot be read, a network
            that is not read, or arrays and JSON that contradict one another.
    """
    names = files.names(path)
    config = files.beside(path, "config.json")
    preprocessor = files.beside(path, "preprocessor_config.json")
    library = hugging_face if "model_type" in config else timm
    if "model_type" not in config and "architecture" not in config:
        raise ValueError(
            f"{path.parent / 'config.json'} must name the network, for arrays alone do not, by its"
            f" model_type ({', '.join(hugging_face.FAMILIES)}) or by timm's architecture: take the"
            " one that is published with the file; or, where there is none, write the name that"
            ' timm gives it, as {"architecture": "vit_small_patch14_dinov2", "global_pool":'
            ' "token", "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}'
        )
    try:
        wanted = library.wanted(names)
        encoder = library.read(files.read(path, wanted), config, preprocessor)
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
        message = error if isinstance(error, ValueError) else f"the JSON beside it: {error!r}"
        raise ValueError(f"{path}: {message}") from error
    left = Counter(".".join(name.split(".")[:2]) for name in names if name not in wanted)
    lines = [f"{group}: {count} arrays left out" for group, count in left.items()]
    return encoder._replace(lines=[*encoder.lines, *lines])
