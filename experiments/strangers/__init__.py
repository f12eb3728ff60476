"""Trained models of public repositories, linearized: `python -m experiments.strangers`."""
