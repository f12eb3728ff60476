"""Trained models: couplings compared, runs that are killed."""
