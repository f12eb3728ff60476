"""The papers' figures and tables, and a language model; run from a checkout."""
