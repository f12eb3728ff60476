"""A new run that starts from published ViT weights: .safetensors of PyTorch, or .npz of JAX.

    performer-vit pretrained --weights=google/vit-base-patch16-224 --workdir=runs/vit
    performer-vit pretrained --weights=dinov2/model.safetensors --workdir=runs/dinov2
    performer-vit pretrained --weights=dinov2/model.safetensors --config=my_images:data/photos \\
        --workdir=runs/photos --config.attention.kind=softmax
    performer-vit pretrained --weights=B_16.npz --config=imagenet \\
        --workdir=runs/augreg --config.attention.kind=softmax

The run stands at step 0, with the attention of the config: the softmax that the weights were
trained with, or random features over the same parameters. `vit.evaluate`, `vit.convert` (of a
softmax run) and `vit.train --workdir` (which fine-tunes it) accept it as any other run. Without a
config the run has no data; `vit.predict`, `vit.export` and `vit.load` accept it.

OWNER/NAME is a repository of the Hugging Face Hub, at OWNER/NAME@REVISION if that is given. Its
files are downloaded into the cache of huggingface_hub. An existing local path has precedence.

Supported are Hugging Face's ViT, DeiT, DINOv2 and SigLIP and timm's vit_* and deit_*
(.safetensors), and google-research's vision_transformer and big_vision (.npz). Beside .safetensors
config.json is required, which names the network; an unknown network or argument is refused. The
model section of the config becomes the one of the weights, except for dropout, drop_path, dtype,
remat and the initial values. Adapted are:

    positions   resampled to config.data.image_size as the library of the file does it: bicubic with
                antialiasing by timm and in DINOv2 with registers, bicubic without by the other
                models of transformers, linear with aligned corners by google-research
    colours     mean and deviation become part of the patch embedding, so that pixels from -1 to 1
                serve all; for grey pictures its colours are added up
    head        loaded for the same classes, sorted by name; with --match=number for as many
                classes, in the order of the labels; new otherwise

Without a config pictures are resized as the published preprocessing does, with the filter bicubic;
a line is printed where the run does something else.
"""

import dataclasses
from functools import partial
from pathlib import Path

from absl import logging

from vit import config as configs
from vit import data
from vit import weights as published
from vit.config import arguments, cli
from vit.data.classes import Match, placeholders
from vit.model import ViT
from vit.run import devices
from vit.storage import buckets, folders
from vit.weights import hub, positions, transfer
from vit.weights.encoder import Arrays, Encoder

HEAD = {"head/kernel", "head/bias"}
OWN = ("blocks", "embed", "token", "position", "norm", "head")
"""First parts of the names of the transformer's parameters."""
NO_HEAD = "(no head)"
"""The class of a run without data whose weights have no head."""
LISTED = 10
"""Classes that are listed if names differ."""
IMAGE_SIZE = 224
"""Side of the pictures of a run without data, if neither positions nor JSON show it."""


def pretrained(
    weights: Path, config: configs.TrainConfig | None, workdir: Path, match: Match = "name"
) -> list[str]:
    """Make the run and return lines on what was read and what was not loaded.

    A head for other classes stays as initialised, and so does one that follows layers
    which this model lacks (`pre_logits`, if the config has none). A run without a config always has
    the head of the file.

    Args:
        weights: the file, which is only read, or the name of a repository of the Hugging Face Hub.
        config: of the new run; None for a run without data.
        workdir: folder of the new run. It appears in one piece, and after a kill the same call
            begins anew.
        match: how classes are matched, as `vit.data.classes.matched`.

    Raises:
        ValueError: if the config cannot work, the workdir is not empty, the file cannot be read or
            downloaded, arrays do not fit the model (all are listed), or without a config the head
            follows layers that the ViT lacks. There is no run then.
        OSError: if the run cannot be written, as on a full disk.
    """
    buckets.check_local(weights, "--weights=")
    if config is not None and not isinstance(config, configs.Config):
        raise ValueError(f"published weights are of ViTs, and the config is of {config.task!r}")
    folders.check_vacant(buckets.path(workdir), "--workdir")  # before a download
    is_name = hub.is_name(weights)
    file, origin = hub.download(str(weights)) if is_name else (weights, str(weights.resolve()))
    encoder = published.read(file)
    dataset = _no_data(encoder) if config is None else None
    new = of_encoder(config, encoder)
    new.check_new()
    with transfer.begun(new, workdir, {"weights": origin}, dataset) as (model, run):
        named, lines = fitted(encoder, model, run.dataset, match)
        lines += resizing(encoder, new.data)
        report = [f"downloaded: {origin}"] * is_name + [*encoder.lines, *lines]
        return [*report, *load(model, named, str(weights), needs_head=config is None)]


def of_encoder(config: configs.Config | None, encoder: Encoder) -> configs.Config:
    """Return the config with the model of the encoder; without one, for a run without data."""
    if config is None:
        pixels, patch = encoder.metadata.input_size, configs.Model(**encoder.model).patch_size
        side = pixels // patch * patch or encoder.image_size or IMAGE_SIZE
        resize = encoder.metadata.resize or (pixels if pixels > side else 0)
        crop = "squash" if encoder.metadata.crop == "squash" else "center"
        config = configs.Config(
            attention=configs.Attention(kind="softmax"),
            data=configs.Data(name="", image_size=side, eval_resize=resize, eval_crop=crop),
            model=configs.Model(pre_logits=True),  # False if the file has none
        )
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **encoder.model))


def resizing(encoder: Encoder, ours: configs.Data) -> list[str]:
    """Return a line if pictures are resized in another way than the file was published with.

    It ends with the flags that come closest to the file.
    """
    theirs = encoder.metadata
    if not theirs.input_size:  # the file has no such information
        return []
    size = theirs.resize or theirs.input_size
    published = _resized(theirs.crop, size, theirs.input_size, theirs.filter)
    here = _resized(ours.eval_crop, ours.eval_resize or ours.image_size, ours.image_size)
    expected = of_encoder(None, encoder).data
    differing = [
        name
        for name in ("image_size", "eval_resize", "eval_crop")
        if getattr(expected, name) != getattr(ours, name)
    ]
    flags = [f" --config.data.{name}={getattr(expected, name)}" for name in differing]
    closest = "; closest:" * bool(flags) + "".join(flags)
    return [f"pictures as published: {published}; here: {here}{closest}"] * (published != here)


def _resized(crop: str, size: int, image_size: int, filter: str = "bicubic") -> str:
    sides = {"center": "shorter side", "squash": "both sides"}.get(crop, f"crop mode {crop}")
    return f"{sides} to {size}, centre of {image_size}, {filter}"


def _no_data(encoder: Encoder) -> data.Dataset:
    """Return a data set without examples, of the classes of the head."""
    number = len(encoder.arrays.get("head/bias", ()))
    names = encoder.metadata.class_names or placeholders(number) or (NO_HEAD,)
    return data.Dataset((), (), names, encoder.arrays["embed/kernel"].shape[2])


def fitted(
    encoder: Encoder, model: ViT, dataset: data.Dataset, match: Match = "name"
) -> tuple[Arrays, list[str]]:
    """Return the arrays of an encoder for this grid, these colours and classes, and a report."""
    named, how = dict(encoder.arrays), encoder.metadata.resample
    resample = partial(positions.resampled, how=how)
    lines = transfer.fit_positions(named, {"position": model.position}, resample)
    lines = [f"{line}, {how}" for line in lines]
    if dataset.channels == 1 < named["embed/kernel"].shape[2]:
        named["embed/kernel"] = named["embed/kernel"].sum(axis=2, keepdims=True)
        lines += ["embed: its colours are added up for grey pictures"]
    ours, number = dataset.class_names, len(named.get("head/bias", ()))
    theirs = encoder.metadata.class_names
    if number != len(ours):
        return named, lines
    named_by = theirs if len(theirs) == number else placeholders(number)
    report = transfer.fit_head(named, named_by, ours, match)
    if report is None:
        named = {name: x for name, x in named.items() if name not in HEAD}
        report = [
            f"head: new, for its classes have {'other' if theirs else 'no'} names;"
            " --match=number loads it in the order of the labels"
        ]
    elif not report and len(theirs) == number and tuple(theirs) != tuple(ours):
        pairs = [f"its {a!r} for {b!r}" for a, b in zip(theirs, ours, strict=True)]
        more = ", ..." * (number > LISTED)
        report = [f"head: loaded in order, whatever the names: {', '.join(pairs[:LISTED])}{more}"]
    return named, [*lines, *report]


def load(model: ViT, named: Arrays, source: str, *, needs_head: bool = False) -> list[str]:
    """Put the arrays into the model, and return a line on each that was not loaded.

    Args:
        model: is changed only if all arrays fit.
        named: by the names of our parameters, and others.
        source: name of the file in messages.
        needs_head: if true, a head of the file that cannot be loaded is an error.

    Raises:
        ValueError: if parameters other than the head are missing or of another shape, or parts of
            the transformer have no place in the model; all are listed. Or the head is needed.
    """
    new = {name: x[...] for name, x in transfer.parameters(model).items()}
    fitting = {name: x for name, x in named.items() if name in new or name.split("/")[0] in OWN}
    strange = sorted(named.keys() - fitting.keys())
    fresh = transfer.unfit(fitting, new, HEAD if strange else ())
    if fresh - HEAD or fitting.keys() - new.keys():
        lines = "\n  ".join(transfer.differences(fitting, new, fresh, "here"))
        raise ValueError(f"{source} does not fit the model of the config:\n  {lines}")
    if needs_head and strange and named.keys() & HEAD:
        raise ValueError(
            f"{source} has a head behind layers that this ViT lacks ({', '.join(strange)}): give"
            " --config for a run with a new head"
        )
    transfer.put(model, {name: named[name] for name in new if name not in fresh})
    lines = transfer.differences(named, new, fresh, "new")
    fits = all(named[name].shape == new[name].shape for name in HEAD & named.keys())
    if "pre_logits/kernel" in strange and fits:
        lines += ["head: new, for it follows pre_logits; --config.model.pre_logits=True keeps both"]
    return lines


def main(
    weights: Path,
    workdir: Path,
    config: configs.Config | None = None,
    match: Match = "name",
) -> None:
    """Run the command.

    Args:
        weights: file .safetensors or .npz of a ViT, or OWNER/NAME of the Hugging Face Hub.
        workdir: folder of the new run.
        config: bundled config or file with get_config(); none makes a run without data.
        match: match the classes of the head by name, or by number: in the order of the labels.
    """
    logging.set_verbosity(logging.FATAL)  # a failed save is raised: Orbax logs it a dozen times
    devices.check_alone()
    report = pretrained(weights, config, workdir, match)
    print("\n".join([*report, f"{weights} is step 0 of the run in {workdir}"]))
    following = cli.command("evaluate" if config else "predict", workdir=workdir)
    print(f"next: {following}{'' if config else ' FILE_OR_FOLDER ...'}")


if __name__ == "__main__":
    arguments.run(main)
