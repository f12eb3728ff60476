"""The shell commands of the how-to pages run, in order, on small data and for a few steps."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.support import commands
from tests.support.pages import code
from tests.vit.test_prepare import picture
from tests.vit.test_sources import LABELS, write_ilsvrc2012

BRIEF = ["--config.num_epochs=0.05", "--config.optim.warmup_steps=0"]
SHALLOW = ["--config.model.depth=1", "--config.model.width=16", "--config.model.num_heads=1"]
IMAGENET = [
    *("--config.data.image_size=32", "--config.data.eval_resize=0", "--config.data.batch_size=4"),
    *("--config.data.train_split=train", "--config.data.num_workers=0", "--config.data.mixup=0.0"),
    *("--config.optim.constant_steps=0", "--config.optim.accumulate=1", "--config.num_epochs=2"),
    *("--config.model.mlp_dim=32", "--config.optim.warmup_steps=0", *SHALLOW),
]
BY_CONFIG = {
    "digits": [*BRIEF, *SHALLOW],
    "my_images": [*BRIEF, "--config.num_epochs=2", "--config.data.batch_size=8"],
    "fashion_mnist_small": [
        *("--config.num_epochs=1", "--config.data.train_split=train", *BRIEF[1:], *SHALLOW),
        *("--config.data.batch_size=8", "--config.model.mlp_dim=32"),
    ],
    "imagenet": IMAGENET,
    "imagenette": IMAGENET,
    "imagenet_scenic": IMAGENET,
    "vit_s16_imagenet": IMAGENET,
}
"""Flags that make a run of the config small, by its name."""
BY_PROGRAM = {
    "vit.convert": [
        *("--num_features=8", "--refine_steps=2", "--draws=1", "--images=16", "--eval_images=8"),
        *("--exact_keys=2", "--num_epochs=1"),
    ],
    "vit.pretrained": ["--config.data.image_size=16"],
    "vit.compare": ["--seeds=2"],
    "experiments.kernels.conformity": ["--figures=4"],
}
ELSEWHERE = {
    "--distributed": "several processes: test_hosts.py, test_rehearsal.py",
    "--coordinator": "several processes: test_hosts.py, test_rehearsal.py",
    "--workdir=RUN": "stands in large-runs.md with the name of a run",
    "--config=experiments/language_model/config.py": "test_language_model.py",
    "--workdir=runs/lm": "a run of the language model: test_language_model.py",
    "--weights=B_16.npz": "a published file: test_pretrained.py",
    "--weights=google/vit-base-patch16-224": "a download: test_hub.py",
    "experiments.figures": "draws all committed figures: test_results.py",
    "experiments.verdicts": "writes the pages: test_verdicts.py",
}
"""Words of commands that do not run here, and where they are tested."""


PREPARED = {"published-weights": ["photos"]}
"""Data sets that a page assumes."""


def shell(page):
    return "\n".join(code(page.read_text(), "bash"))


PAGES = [p for p in sorted(Path("docs/howto").glob("*.md")) if commands.COMMAND.search(shell(p))]


def small(module, given):
    """The arguments, and those that make the command short: the last of a flag counts."""
    name = re.search(r"--config=(?:[^\s:]*/)?(\w+)", " ".join(given))
    if module in ("vit.train", "vit.pretrained", "vit.compare") and not name:
        return given
    added = BY_CONFIG[name[1]] if name else []
    if module == "vit.pretrained":  # the weights have the sizes
        added = [x for x in added if x not in SHALLOW]
    return [*given, *added, *BY_PROGRAM.get(module, [])]


def write_photos(folder, classes, number=8):
    for i, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for k in range(number):
            (folder / name / f"{k}.jpg").write_bytes(picture(seed=100 * i + k))


def run(lines, folder):
    imported = ("vit.train", "vit.convert", "vit.compare")
    for line, (status, _, errors) in zip(
        lines, commands.start_all(lines, imported, folder), strict=True
    ):
        assert status == 0, (line, errors[-3000:])


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Folder with the data that readers bring, and a run that some pages begin with."""
    folder = tmp_path_factory.mktemp("base")
    write_photos(folder / "photos", ["cat", "dog"])
    write_photos(folder / "holiday_pictures", [""])
    write_photos(folder / "v2" / "train", LABELS, 1)
    shutil.copytree(folder / "v2" / "train", folder / "v2" / "test")
    shutil.copy(folder / "photos" / "cat" / "0.jpg", folder / "cat.jpg")
    coupling = "opposite = performer.couplings.get('orf-antithetic')"
    (folder / "lattices.py").write_text(f"import performer\n\n{coupling}\n")
    for split in ("train", "val"):
        write_photos(folder / "IMAGENETTE" / split, LABELS[:2], 4)
    (folder / "DIR_OF_ILSVRC2012_TARS").mkdir()
    write_ilsvrc2012(folder / "DIR_OF_ILSVRC2012_TARS")
    (folder / "fashion").mkdir()
    images = np.random.default_rng(0).integers(0, 256, (2, 16, 28, 28)).astype(np.uint8)
    x, labels = dict(zip(["x_train", "x_test"], images, strict=True)), np.arange(16) % 10
    np.savez(folder / "fashion" / "all.npz", **x, y_train=labels, y_test=labels)
    for name, weights in {"dinov2": "hf_dinov2", "vit": "hf_vit"}.items():
        shutil.copytree(Path("tests/support/published", weights), folder / name)
    (folder / "tests").symlink_to(Path("tests").resolve())
    (folder / "experiments").symlink_to(Path("experiments").resolve())
    prepare, train = ["vit.prepare", "--out=base"], ["vit.train", "--config=digits"]
    lines = [
        ["vit.prepare", "--source=v2", "--out=data", "--name=imagenet_v2"],
        ["vit.prepare", "--source=fashion", "--out=data", "--name=fashion_mnist"],
        [*prepare, "--source=DIR_OF_ILSVRC2012_TARS"],
        [*prepare, "--source=photos"],
        ["vit.pretrained", "--weights=vit/model.safetensors", "--workdir=runs/vit"],
        ["vit.train", "--config=my_images:base/photos", "--workdir=runs/photos"],
    ]
    lines[-1] += BY_CONFIG["my_images"]
    for coupling in ("orf", "pm"):
        line = [*train, *BY_CONFIG["digits"], f"--config.attention.coupling={coupling}"]
        lines += [[*line, f"--workdir=runs/{coupling}{i}", f"--config.seed={i}"] for i in (0, 1)]
    run(lines, folder)
    return folder


def without_earlier(folder, lines):
    """Remove what the lines make and earlier blocks have made; a second data set is elsewhere."""
    flag = {"vit.pretrained": "--workdir=", "vit.convert": "--out="}
    prepared = [line for line in lines if line[0] == "vit.prepare"]
    for line in prepared[1:]:
        line.append("--out=again")
    for module, *given in lines:
        for word in given:
            if module in flag and word.startswith(flag[module]):
                shutil.rmtree(folder / word.removeprefix(flag[module]), ignore_errors=True)


@pytest.mark.thorough
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_run(base, tmp_path, page):
    """Each block of commands with the folders that those above have left."""
    folder = tmp_path / "folder"
    shutil.copytree(base, folder, symlinks=True)
    for name in PREPARED.get(page.stem, []):
        shutil.copytree(folder / "base" / name, folder / "data" / name)
    for block in code(page.read_text(), "bash"):
        lines = []
        for module, given in commands.printed(block):
            if not any(word.startswith(tuple(ELSEWHERE)) for word in [module, *given]):
                lines.append([module, *small(module, given)])
        without_earlier(folder, lines)
        run(lines, folder)
