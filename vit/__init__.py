"""A Vision Transformer with exact or random-feature attention, and a training loop for it."""
