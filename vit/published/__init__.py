"""Published encoders: which file holds which, and what its parameters are called."""
