"""Weights by the name of a repository of the Hugging Face Hub: OWNER/NAME or OWNER/NAME@REVISION.

The package `huggingface_hub` downloads the files and keeps them in its cache (HF_HOME). Without a
network it returns what the cache holds.
"""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from vit.weights import CONVERT, PICKLES, joined

WEIGHTS, PARTS = "model.safetensors", "model.safetensors.index.json"
FILES = (WEIGHTS, PARTS, "config.json", "preprocessor_config.json")
ENDINGS = (".npz", ".npy", ".safetensors", ".json", *PICKLES)
"""Endings of local files, by which a missing file OWNER/NAME is not a name."""
UNREACHABLE = (
    "in the cache of huggingface_hub, and the Hub cannot be reached: check the network, HF_ENDPOINT"
    " and HF_HUB_OFFLINE, or give a local file"
)


def is_name(weights: Path) -> bool:
    """Return True for the name of a repository; an existing local path is none."""
    named = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*(@[\w.-]+)?", str(weights))
    return bool(named) and weights.suffix not in ENDINGS and not weights.exists()


def download(name: str) -> tuple[Path, str]:
    """Return the file of weights in the cache, next to its JSON files, and OWNER/NAME@COMMIT.

    Args:
        name: OWNER/NAME, or OWNER/NAME@REVISION with a branch, a tag or a commit.

    Raises:
        ValueError: if the package is missing, there is no such repository or revision, the Hub
            cannot be reached, or the repository has no file model.safetensors.
    """
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError as error:
        raise ValueError(
            f"--weights={name} is no local path, and as a name of the Hugging Face Hub it requires"
            " huggingface_hub: pip install huggingface_hub"
        ) from error
    repository, _, revision = name.partition("@")
    try:
        folder = huggingface_hub.snapshot_download(
            repository, revision=revision or None, allow_patterns=list(FILES)
        )
    except Exception as error:  # of several HTTP libraries, which differ among its versions
        raise ValueError(f"--weights={name} {_reason(error, errors)}") from error
    commit = Path(folder).name
    if (file := Path(folder) / WEIGHTS).exists():
        return file, f"{repository}@{commit}"
    if (Path(folder) / PARTS).exists():
        raise ValueError(f"--weights={name} has its weights in several parts. {joined(repository)}")
    try:
        siblings = huggingface_hub.model_info(repository, revision=commit).siblings or ()
    except Exception as error:  # another program left some of the files in the cache
        raise ValueError(f"--weights={name} has no {WEIGHTS} {UNREACHABLE}") from error
    names = [sibling.rfilename for sibling in siblings]
    raise ValueError(f"--weights={name} has no {WEIGHTS}{_instead(repository, names)}")


def _reason(error: Exception, errors: Any) -> str:
    """Return what failed, and what to do, for an exception of `huggingface_hub`."""
    if isinstance(error, errors.GatedRepoError):
        return "is restricted: accept its terms on its page of the Hub, and run: hf auth login"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            "is neither a local path nor a repository of the Hugging Face Hub: correct it; for a"
            " private one run: hf auth login"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return "has no such revision: give a branch, a tag or a commit after the @, or leave it out"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return f"is neither a local path nor {UNREACHABLE}"
    text = " ".join(str(error).split())[:300]
    return f"cannot be downloaded from the Hugging Face Hub: {type(error).__name__}: {text}"


def _instead(repository: str, names: Collection[str]) -> str:
    """Return what a repository without safetensors has, and what to do."""
    pickles = [name for name in names if name.endswith(PICKLES)]
    if not pickles:
        return ": choose a repository of a ViT that has one, or give a local file"
    download = f"hf download {repository} {pickles[0]} config.json --local-dir=."
    return (
        f", only pickles ({', '.join(pickles[:3])}), which can run programs when they are read, and"
        " are refused. Convert one that you trust, with torch installed, in an empty folder:"
        f'\n  {download} && python -c "{CONVERT.format(pickles[0])}"'
    )
