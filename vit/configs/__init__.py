"""Configs: each defines `get_config()`; its docstring is the record of the experiment."""
