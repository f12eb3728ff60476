"""Published encoders: the readers of their files, and what their parameters are called.

A file .safetensors is that of transformers (`hugging_face`) or of timm; .npz is `google`.
"""

from pathlib import Path

from vit.weights import files, google, hugging_face, timm
from vit.weights.encoder import Encoder


def read(path: Path) -> Encoder:
    """Read the encoder in a file .npz, or .safetensors with the JSON beside it.

    Args:
        path: the file. Beside .safetensors config.json is required, which names the network, and
            preprocessor_config.json is read if it exists.

    Raises:
        ValueError: if the file has another format or cannot be read, the network is not supported,
            or arrays and JSON contradict one another.
    """
    if path.suffix == ".npz":
        return google.read(path)
    files.check_form(path)
    config = files.beside(path, "config.json")
    preprocessor = files.beside(path, "preprocessor_config.json")
    if "model_type" not in config and "architecture" not in config:
        raise ValueError(
            f"{path.parent / 'config.json'} must name the network, for arrays alone do not, by its"
            f" model_type ({', '.join(hugging_face.FAMILIES)}) or by timm's architecture: use the"
            " one that is published with the file; or, if there is none, write the name that"
            ' timm gives it, as {"architecture": "vit_small_patch14_dinov2", "global_pool":'
            ' "token", "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}'
        )
    library = hugging_face if "model_type" in config else timm
    arrays, lines = files.read(path, library.wanted)
    try:
        encoder = library.read(arrays, config, preprocessor)
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
        message = error if isinstance(error, ValueError) else f"the JSON beside it: {error!r}"
        raise ValueError(f"{path}: {message}") from error
    return encoder._replace(lines=[*encoder.lines, *lines])
