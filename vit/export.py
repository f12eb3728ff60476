"""Write the model of a run as one program that only needs JAX: no Performer, no Flax, no data.

    python -m vit.export --workdir=runs/photos --out=photos.stablehlo
    python -m vit.export --workdir=runs/photos --out=photos.stablehlo --parameters=beside

The program (StableHLO, by `jax.export`) maps images (b, size, size, channels) of uint8, for any
number b, to logits (b, classes) in float32, on CPU, TPU and CUDA GPU. A small json beside it holds
class names, image size, channels, preprocessing and versions. The parameters are in the program, or
beside it in a file of safetensors, which other programs can read, too.

The command prints the lines of Python that run the program; they need jax and flatbuffers. JAX
reads such a file for six months of its releases: keep the run, from which it can be written again.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from absl import flags
from flax import nnx
from jax.export import Exported, symbolic_shape
from jaxtyping import Array, Float, UInt8

import performer
from vit import use
from vit.config.arguments import launch
from vit.run import devices, files

PLATFORMS = ("cpu", "tpu", "cuda")
LARGEST = 2**31 - 2**24
"""Bytes of parameters in a program, whose format counts to 2^31."""

READ = """\
import json, jax, jax.export, numpy as np  # pip install jax flatbuffers
program = jax.export.deserialize(bytearray(open({program!r}, "rb").read()))
about = json.load(open({about!r}))
"""
READ_PARAMETERS = """\
content = open({parameters!r}, "rb").read()
start = 8 + int.from_bytes(content[:8], "little")
parameters = {{
    name: np.frombuffer(content[start:][slice(*x["data_offsets"])], "f4").reshape(x["shape"])
    for name, x in json.loads(content[8:start]).items()
}}
"""
CALL = """\
images = np.zeros((1, about["image_size"], about["image_size"], about["channels"]), np.uint8)
logits = jax.jit(program.call)({arguments})
print([about["class_names"][i] for i in logits.argmax(-1)])
"""


class Written(NamedTuple):
    """The files of an export, with one name and different endings."""

    program: Path
    about: Path
    parameters: Path | None

    def loader(self) -> str:
        """Return Python that runs the program, in the folder of these files, with JAX alone."""
        names = {name: path and path.name for name, path in self._asdict().items()}
        text = READ + (READ_PARAMETERS if self.parameters else "") + CALL
        return text.format(**names, arguments="parameters, " * bool(self.parameters) + "images")


def named(out: Path, *, beside: bool = False) -> Written:
    """Return the files of an export with that program.

    Raises:
        ValueError: if the ending is that of another of them, or a file exists already.
    """
    if out.suffix in ("", ".json", ".safetensors"):
        raise ValueError(
            f"--out={out} is the name of the program, with .json and .safetensors beside it: let it"
            " end in .stablehlo"
        )
    parameters = out.with_suffix(".safetensors") if beside else None
    written = Written(out, out.with_suffix(".json"), parameters)
    there = [str(path) for path in written if path is not None and path.exists()]
    if there:
        raise ValueError(f"already there: {', '.join(there)}; remove it or take another --out")
    return written


def export(trained: use.Trained, written: Written) -> None:
    """Write the program of a model and the files beside it, each atomically.

    Args:
        trained: result of `vit.load`.
        written: result of `named`; folders are made.

    Raises:
        ValueError: if a program cannot hold that many parameters.
    """
    beside = written.parameters is not None
    arrays, call = as_function(trained)
    size = sum(x.nbytes for x in arrays.values())
    if not beside and size > LARGEST:
        raise ValueError(
            f"the parameters take {size:,} bytes and a program has at most {LARGEST:,} of them:"
            " --parameters=beside"
        )
    program = symbolic(trained, arrays, call, beside=beside)
    written.program.parent.mkdir(parents=True, exist_ok=True)
    if written.parameters:
        content = safetensors.numpy.save(jax.tree.map(np.asarray, arrays))
        files.write(written.parameters, content)
    files.write(written.about, json.dumps(about(trained, program, written), indent=2) + "\n")
    files.write(written.program, bytes(program.serialize()))


def as_function(trained: use.Trained) -> tuple[dict[str, Array], Callable[..., Array]]:
    """Return the arrays by name, "blocks.0.mlp_in.kernel", ..., and (arrays, images) -> logits."""
    graph, state, streams = nnx.split(trained.model, nnx.Not(nnx.RngState), ...)
    leaves, tree = jax.tree.flatten(state)
    names = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]

    def call(
        arrays: dict[str, Array], images: UInt8[Array, "b size size c"]
    ) -> Float[Array, "b classes"]:
        state = jax.tree.unflatten(tree, [arrays[name] for name in names])
        logits, _ = nnx.merge(graph, state, streams, copy=True)(images)
        return logits

    return dict(zip(names, leaves, strict=True)), call


def symbolic(
    trained: use.Trained, arrays: dict[str, Array], call: Callable[..., Array], *, beside: bool
) -> Exported:
    """Return the program images -> logits, or (arrays, images) -> logits, for any batch size."""
    side = trained.config.data.image_size
    images = jax.ShapeDtypeStruct((*symbolic_shape("b"), side, side, trained.channels), jnp.uint8)
    shapes = [jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)] * beside
    function = jax.jit(call if beside else partial(call, arrays))
    return jax.export.export(function, platforms=PLATFORMS)(*shapes, images)


def about(trained: use.Trained, program: Exported, written: Written) -> dict[str, Any]:
    """Return the content of the json beside the program."""
    data = trained.config.data
    return {
        "program": written.program.name,
        "parameters": written.parameters and written.parameters.name,
        "input": "images: uint8 (b, image_size, image_size, channels), 0 to 255",
        "output": "logits: float32 (b, classes); their"
        f" {trained.config.optim.loss} are the probabilities",
        "class_names": trained.class_names,
        "image_size": data.image_size,
        "channels": trained.channels,
        "preprocessing": {
            "mode": "L" if trained.channels == 1 else "RGB",
            "shorter_side": data.eval_resize or data.image_size,
            "center_crop": data.image_size,
            "filter": "bicubic",
        },
        "step": trained.step,
        "platforms": program.platforms,
        "calling_convention_version": program.calling_convention_version,
        "versions": {"performer-jax": performer.__version__, "jax": version("jax")},
    }


def main(_: list[str]) -> None:
    """The command line."""
    devices.check_alone()
    written = named(Path(str(_OUT.value)), beside=_PARAMETERS.value == "beside")
    print(f"loading {_WORKDIR.value} and lowering it for {', '.join(PLATFORMS)}", file=sys.stderr)
    export(use.load(str(_WORKDIR.value), _STEP.value), written)
    for path in filter(None, written):
        print(f"{path}  {path.stat().st_size:,} bytes")
    folder = written.program.parent
    print(f"\nThis runs it, in the folder {folder}:\n\n{written.loader()}", end="")


if __name__ == "__main__":
    _WORKDIR = flags.DEFINE_string("workdir", None, "folder of the run", required=True)
    _OUT = flags.DEFINE_string("out", None, "program to write: photos.stablehlo", required=True)
    _PARAMETERS = flags.DEFINE_enum(
        "parameters", "inside", ["inside", "beside"], "in the program, or in .safetensors beside it"
    )
    _STEP = flags.DEFINE_string(
        "step", None, "step of the checkpoint, or best; default: the newest"
    )
    launch(main)
