"""Training runs: the loop, its folder and checkpoints, devices, safety."""
