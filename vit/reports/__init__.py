"""Reports on a trained run."""
