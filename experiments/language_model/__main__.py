"""The commands of the language model by their names, vit's among them; alone it lists them."""

from experiments.language_model import task
from vit.config import cli

vit = cli.programs("vit")
shared = {"convert": vit["convert"], "evaluate": vit["evaluate"], "resume": vit["train"]}
cli.run(task.COMMAND, cli.programs("experiments.language_model") | shared)
