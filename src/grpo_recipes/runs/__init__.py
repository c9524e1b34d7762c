"""A run directory and what can be read from it."""
