"""`grpo sweep`: run a recipe at several values of some keys, and compare the runs. No torch."""
