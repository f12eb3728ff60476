"""Errors of kernel estimates."""
