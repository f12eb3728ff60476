"""Kernels on tabular data."""
