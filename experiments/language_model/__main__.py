"""The experiments on a language model, by their names; alone it lists them."""

from vit import cli

cli.run("python -m experiments.language_model", cli.programs("experiments.language_model"))
