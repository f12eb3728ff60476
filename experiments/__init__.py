"""Experiments: configs (`experiments/configs`), each runnable from a checkout."""
