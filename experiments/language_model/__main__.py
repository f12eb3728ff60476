"""The commands of vit, with the task of the language model, and `generate`."""

from experiments.language_model.task import Config
from vit.config import cli

cli.run(
    f"python -m {Config.task.removesuffix('.task')}",
    cli.vit_programs() | cli.programs("experiments.language_model"),
)
