"""A new run that starts from published ViT weights: .safetensors of PyTorch, or .npz of JAX.

    python -m vit.pretrained --weights=dinov2/model.safetensors --workdir=runs/dinov2
    python -m vit.pretrained --weights=dinov2/model.safetensors --config=my_images:data/photos \\
        --workdir=runs/photos --config.attention.kind=softmax
    python -m vit.pretrained --weights=B_16.npz --config=imagenet \\
        --workdir=runs/augreg --config.attention.kind=softmax

The run stands at step 0, with the attention that the config names: the softmax that the weights
were trained with, or random features over the same parameters. `vit.evaluate`, `vit.convert` (of a
softmax run) and `vit.train --workdir` (which fine-tunes it) take it as any other run. Without a
config the run has no data: `vit.predict`, `vit.export` and `vit.load` take it.

Of .safetensors, Hugging Face's ViT, DeiT, DINOv2 and SigLIP and timm's vit_* and deit_* are read.
Beside the file lies its config.json, which names the network; a network or argument that is not
known is refused. The model section of the config is then theirs, but for what training needs
(dropout, drop_path, dtype, remat and the initial values). Made to fit are:

    positions   resampled to config.data.image_size, bicubic, as the library of the file does it:
                timm and DINOv2 with registers with antialiasing, the others of transformers without
    colours     mean and deviation are taken up by the patch embedding, so that this ViT's own
                range of -1 to 1 serves all; for grey pictures its colours are added up
    head        taken for the same number of classes, sorted by name where both name the same ones

Of .npz (`vit.weights.google`) the config's model must be that of the weights: a file without
positions was trained with fixed ones, --config.model.position=sincos; one without cls averages over
patches, --config.model.pooling=mean. Positions of another image size are resampled by a second run
that is begun from this one (`vit.train --init_from`).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from absl import flags, logging
from ml_collections import config_flags

from vit import config as configs
from vit import data
from vit import weights as published
from vit.config import cli
from vit.config.arguments import chosen_config, launch
from vit.model import ViT
from vit.run import devices
from vit.task import Task
from vit.weights import google, transfer
from vit.weights.encoder import Encoder, resampled
from vit.weights.files import Arrays

HEAD = ("head/kernel", "head/bias")
NOWHERE = "not in the file"
NO_HEAD = "(no head)"
"""The class of a run without data whose weights have no head."""


def pretrained(weights: Path, config: configs.Config | None, workdir: Path) -> list[str]:
    """Makes the run and returns what was found and what was not loaded, in lines.

    A head for another number of classes is left as it was initialised, and so is one that follows
    layers which this model does not have (big_vision's `MAPHead_0`; `pre_logits`, where the config
    has none).

    Args:
        weights: the file; only read, nothing is unpacked to disk.
        config: of the new run; None for a run without data, of a file .safetensors.
        workdir: folder of the new run; it appears in one piece, and after a kill the same call
            begins anew.

    Raises:
        ValueError: for a config that cannot work, a workdir that is not empty, a file that cannot
            be read, or arrays that do not fit the model, all of them in one message. Nothing has
            been written then.
        OSError: when there is no room on the disk, or the run cannot be written.
    """
    if weights.suffix == ".npz":
        if config is None:
            raise ValueError(f"{weights} needs a --config, whose model is that of the weights")
        fill = partial(_fill_npz, weights)
        dataset = None
    else:
        encoder = published.read(weights)
        fill = partial(_fill, weights, encoder)
        dataset = _no_data(encoder) if config is None else None
        config = of_encoder(config, encoder)
    origin = {"weights": str(weights.resolve())}
    return transfer.start(config, workdir, fill, origin, dataset)


def _fill_npz(weights: Path, model: ViT, task: Task, dataset: data.Dataset) -> list[str]:
    arrays, report = google.read(weights)
    named, origins = google.rename(arrays)
    google.fold_token(named, transfer.parameters(model))
    return report + load(model, named, str(weights), origins)


def _fill(
    weights: Path, encoder: Encoder, model: ViT, task: Task, dataset: data.Dataset
) -> list[str]:
    named, lines = fitted(encoder, model, dataset)
    return [*encoder.lines, *lines, *load(model, named, str(weights), {})]


def of_encoder(config: configs.Config | None, encoder: Encoder) -> configs.Config:
    """The config with the model of the encoder; without one, that of a run without data."""
    if config is None:
        pixels, patch = encoder.said.input_size, configs.Model(**encoder.model).patch_size
        side = pixels // patch * patch or encoder.image_size
        resize = encoder.said.resize or (pixels if pixels > side else 0)
        config = configs.Config(
            attention=configs.Attention(kind="softmax"),
            data=configs.Data(name="", image_size=side, eval_resize=resize),
        )
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **encoder.model))


def _no_data(encoder: Encoder) -> data.Dataset:
    """No examples, of the classes that the head has."""
    number = len(encoder.arrays.get("head/bias", ()))
    names = encoder.said.class_names or tuple(map(str, range(number))) or (NO_HEAD,)
    return data.Dataset((), (), names, encoder.arrays["embed/kernel"].shape[2])


def fitted(encoder: Encoder, model: ViT, dataset: data.Dataset) -> tuple[Arrays, list[str]]:
    """The arrays of an encoder for this grid, these colours and these classes; what was done."""
    named, lines = dict(encoder.arrays), []
    sides = [round(x.shape[0] ** 0.5) for x in (named["position"], model.position)]
    if sides[0] != sides[1]:
        antialias = encoder.said.antialias
        named["position"] = resampled(named["position"], sides[1], antialias=antialias)
        line = "position: resampled from {0} x {0} to {1} x {1} patches".format(*sides)
        lines += [f"{line}, {'with' if antialias else 'without'} antialiasing"]
    if dataset.channels == 1 < named["embed/kernel"].shape[2]:
        named["embed/kernel"] = named["embed/kernel"].sum(axis=2, keepdims=True)
        lines += ["embed: its colours are added up for grey pictures"]
    theirs, ours = encoder.said.class_names, dataset.class_names
    if len(named.get("head/bias", ())) != len(ours) or len(theirs) != len(ours):
        return named, lines
    if theirs != ours and sorted(theirs) == sorted(set(ours)):
        order = [theirs.index(name) for name in ours]
        named["head/kernel"], named["head/bias"] = (named[name][..., order] for name in HEAD)
        lines += ["head: its classes are sorted as those of the data"]
    elif theirs != ours:
        lines += [f"head: taken class by class, its {theirs[0]!r} for {ours[0]!r} and so on"]
    return named, lines


def load(model: ViT, named: Arrays, source: str, origins: Mapping[str, str]) -> list[str]:
    """Puts the arrays into the model, and returns a line on each that was not loaded.

    Args:
        model: is changed only if all is well.
        named: by the names of our parameters, and others.
        source: what messages call the file.
        origins: what the file calls them, where it is something else.

    Raises:
        ValueError: when parameters of the model other than the head are missing or of another
            shape, or when parts of the transformer have no place in it; all are listed.
    """
    params = {name: x[...].shape for name, x in transfer.parameters(model).items()}
    there = {name: x.shape for name, x in named.items()}
    ignored = [name for name in there if name not in params and google.is_foreign(name)]
    fresh = _fresh_head(there, params, ignored)
    wrong = []
    for name in [name for name in params if name not in fresh]:
        if there.get(name) != params[name]:
            theirs = f"{there[name]} in {origins.get(name, name)}" if name in there else NOWHERE
            wrong.append(f"{name}: {params[name]} here, {theirs}")
    for name in [name for name in there if name not in params and name not in ignored]:
        theirs = origins.get(name, name)
        wrong.append(f"{theirs}: {there[name]} in the file, no place here")
    if wrong:
        raise ValueError(f"{source} does not fit the model of the config:\n  " + "\n  ".join(wrong))
    transfer.put(model, {name: named[name] for name in params if name not in fresh})
    lines = [f"{name}: {there[name]} left out, no place here" for name in ignored]
    for name in fresh:
        theirs = f"{there[name]} in the file" if name in there else NOWHERE
        lines.append(f"{name}: {params[name]} left at its initialisation, {theirs}")
    return lines


def _fresh_head(
    there: Mapping[str, tuple], params: Mapping[str, tuple], ignored: Sequence[str]
) -> tuple[str, ...]:
    """The parameters of the head if they stay as initialised."""
    kernel, bias = (there.get(name) for name in HEAD)
    if kernel is None and bias is None:
        return HEAD
    if kernel is None or bias is None:
        return ()
    width, *classes = params[HEAD[0]]
    another = bias != tuple(classes) and kernel == (width, *bias)
    return HEAD if another or ignored else ()


def main(_: list[str]) -> None:
    """The command line."""
    logging.set_verbosity(logging.FATAL)  # a failed save is raised: Orbax logs it a dozen times
    workdir = Path(str(_WORKDIR.value))
    devices.check_alone()
    config = chosen_config() if _CONFIG.value else None
    report = pretrained(Path(str(_WEIGHTS.value)), config, workdir)
    print("\n".join([*report, f"{_WEIGHTS.value} is step 0 of the run in {workdir}"]))
    next_one = "evaluate" if config else "predict"
    print(
        f"next: {cli.command(next_one, workdir=workdir)}{'' if config else ' FILE_OR_FOLDER ...'}"
    )


if __name__ == "__main__":
    _WEIGHTS = flags.DEFINE_string("weights", None, ".safetensors or .npz of a ViT", required=True)
    _CONFIG = config_flags.DEFINE_config_file(
        "config", help_string="file with get_config(); a run without data if none is given"
    )
    _WORKDIR = flags.DEFINE_string("workdir", None, "folder of the new run", required=True)
    launch(main)
