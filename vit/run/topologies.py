"""Absent devices to compile for: TPU slices by name and shape, and GPUs of one host.

    v5e:4x4   v6e:2x2   v5p:2x2x2   v4:2x2x1   h100:8   h200:8   a100:8

Their compilers run on any machine: `libtpu` for TPUs, JAX's CUDA plugin for GPUs, which the files
in `targets` describe. Programs are compiled and counted, not run.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

TARGETS = Path(__file__).parent / "targets"

LIBTPU = {
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
}
"""Variables that libtpu reads without a TPU, instead of asking a metadata server."""


def devices(topology: str) -> Sequence[Any]:
    """Return the devices of a topology, as above.

    Raises:
        ValueError: for another word, or without the compiler; the message has the command that
            installs it.
    """
    tpu = re.fullmatch(r"v(4|5e|5p|6e):(\d+(?:x\d+)+)", topology)
    gpu = re.fullmatch(r"([a-z]\w*):([1-8])", topology)
    gpus = sorted(path.stem for path in TARGETS.glob("*.txtpb"))
    if not tpu and not (gpu and gpu[1] in gpus):
        raise ValueError(
            f"--topology={topology}: a TPU slice, as v5e:4x4 (v4, v5e, v5p, v6e), or GPUs of one"
            f" host, as h100:8 ({', '.join(gpus)})"
        )
    try:
        if tpu:
            os.environ |= LIBTPU | dict(os.environ)
            options = {"chip_config_name": "megacore"} if tpu[1] == "4" else {}
            return topologies.get_topology_desc(topology, "tpu", **options).devices
        assert gpu
        jax.config.update("jax_platforms", "cpu")  # else the plugin looks for a driver
        jax.devices()  # finds the plugin
        target = (TARGETS / f"{gpu[1]}.txtpb").read_text()
        options = {"topology": f"1x1x{gpu[2]}", "target_config": target}
        return topologies.get_topology_desc("gpu", "cuda", **options).devices
    except (RuntimeError, ValueError) as error:
        extra = "libtpu" if tpu else "'jax[cuda13]'"
        raise ValueError(
            f"--topology={topology} requires its compiler, pip install {extra}, and an existing"
            f" shape: {' '.join(str(error).split())[:300]}"
        ) from error
