"""Write the model of a run as one program that only needs JAX: no Performer, no Flax, no data.

    performer-vit export --workdir=runs/photos --out=photos.stablehlo

The program (StableHLO, by `jax.export`) maps images (b, size, size, channels) of uint8, for any
number b, to logits (b, classes) in float32, on CPU, TPU and CUDA GPU. A small json with it holds
class names, image size, channels, preprocessing and versions. The parameters are in the program.

The command prints the lines of Python that run the program; they need jax and flatbuffers. JAX
reads such a file for six months of its releases: keep the run, from which it can be written again.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.export import Exported, symbolic_shape
from jaxtyping import Array, Float, UInt8

import performer
from vit import config as configs
from vit import use
from vit.config import arguments
from vit.run import devices
from vit.storage import buckets, files

PLATFORMS = ("cpu", "tpu", "cuda")

LOADER = """\
import json, jax, jax.export, numpy as np  # pip install jax flatbuffers pillow
from PIL import Image, ImageOps

program = jax.export.deserialize(bytearray(open({program!r}, "rb").read()))
about = json.load(open({about!r}))
how, size = about["preprocessing"], about["image_size"]
photo = ImageOps.exif_transpose(Image.open("photo.jpg")).convert(how["mode"])
w, h = (size / how[{resized!r}] * side for side in {sides})
left, top = (photo.width - w) / 2, (photo.height - h) / 2
photo = photo.resize((size, size), Image.Resampling.BICUBIC, box=(left, top, left + w, top + h))
images = np.asarray(photo).reshape(1, size, size, about["channels"])
logits = jax.jit(program.call)(images)
print([about["class_names"][i] for i in logits.argmax(-1)])
"""
"""Python that runs the program on a picture, with JAX and Pillow, in the folder of its files."""
RESIZED = {
    "center": ("shorter_side", "[min(photo.size)] * 2"),
    "squash": ("both_sides", "photo.size"),
}
"""Name and expression of the sides that are resized, by `data.eval_crop`."""


def description(out: Path) -> Path:
    """Return the json file of a program.

    Raises:
        ValueError: if the ending belongs to the other file, a file exists already, or `out` is in a
            bucket.
    """
    buckets.check_local(out, "--out=")
    if out.suffix in ("", ".json"):
        raise ValueError(
            f"--out={out} is the name of the program, with .json next to it: let it end in"
            " .stablehlo"
        )
    there = [str(path) for path in (out, out.with_suffix(".json")) if path.exists()]
    if there:
        raise ValueError(f"already there: {', '.join(there)}; remove it or take another --out")
    return out.with_suffix(".json")


def export(trained: use.Trained, out: Path) -> str:
    """Write the program of a model and its description, each atomically; return the loader.

    Args:
        trained: result of `vit.load`.
        out: the program; its folder is made.

    Raises:
        ValueError: as `description`.
        OSError: if a file cannot be written; neither exists then.
    """
    about, program = description(out), symbolic(trained)
    content = bytes(program.serialize())  # fails above 2 GiB
    out.parent.mkdir(parents=True, exist_ok=True)
    record = {"program": out.name, **described(trained, program)}
    files.write(out, content)
    try:
        files.write(about, json.dumps(record, indent=2) + "\n")
    except OSError:
        out.unlink()  # the same command would be refused
        raise
    resized, sides = RESIZED[trained.config.data.eval_crop]
    return LOADER.format(program=out.name, about=about.name, resized=resized, sides=sides)


def symbolic(trained: use.Trained) -> Exported:
    """Return the program images -> logits for any batch size."""
    graph, state = nnx.split(trained.model)

    def call(images: UInt8[Array, "b size size c"]) -> Float[Array, "b classes"]:
        logits, _ = nnx.merge(graph, state, copy=True)(images)
        return logits

    side = trained.config.data.image_size
    images = jax.ShapeDtypeStruct((*symbolic_shape("b"), side, side, trained.channels), jnp.uint8)
    return jax.export.export(jax.jit(call), platforms=PLATFORMS)(images)


def described(trained: use.Trained, program: Exported) -> dict[str, Any]:
    """Return input, output, classes, preprocessing and versions of the program."""
    data = trained.config.data
    resized, _ = RESIZED[data.eval_crop]
    return {
        "input": "images: uint8 (b, image_size, image_size, channels), 0 to 255",
        "output": "logits: float32 (b, classes); their"
        f" {trained.config.optim.loss} are the probabilities",
        "class_names": trained.class_names,
        "image_size": data.image_size,
        "channels": trained.channels,
        "preprocessing": {
            "mode": "L" if trained.channels == 1 else "RGB",
            resized: data.eval_resize or data.image_size,
            "center_crop": data.image_size,
            "filter": "bicubic",
        },
        "step": trained.step,
        "platforms": program.platforms,
        "calling_convention_version": program.calling_convention_version,
        "versions": {"performer-jax": performer.__version__, "jax": version("jax")},
    }


def main(workdir: Path, out: Path, task: str = "", step: str | None = None) -> None:
    """Run the command.

    Args:
        out: program to write, as photos.stablehlo.
    """
    devices.check_alone()
    configs.use(task)
    about = description(out)
    print(f"loading {workdir} and lowering it for {', '.join(PLATFORMS)}", file=sys.stderr)
    loader = export(use.load(workdir, step), out)
    for path in (out, about):
        print(f"{path}  {path.stat().st_size:,} bytes")
    print(f"\nThis runs it, in the folder {out.parent}:\n\n{loader}", end="")


if __name__ == "__main__":
    arguments.run(main)
