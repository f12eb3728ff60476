"""The experiments on a language model, by their names; alone it lists them."""

from experiments.language_model import task
from vit import cli

own = cli.programs("experiments.language_model")
cli.run(task.COMMAND, own | {"evaluate": cli.programs("vit")["evaluate"]})
