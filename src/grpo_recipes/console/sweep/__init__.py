"""`grpo sweep`: one recipe at several values of some of its keys, and one comparison at the end. No torch."""
