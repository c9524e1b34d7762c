"""Benchmarks of the final model: pass@1 and pass@k with intervals."""
