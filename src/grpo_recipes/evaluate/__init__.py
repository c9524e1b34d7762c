"""Scores of completions (pass@k and others, with intervals), and the benchmarks of a run that use them."""
