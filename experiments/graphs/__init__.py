"""Random walks on graphs."""
