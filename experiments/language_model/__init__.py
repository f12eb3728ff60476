"""A causal language model of characters, in which a Performer takes the place of softmax."""
