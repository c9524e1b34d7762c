"""Weight synchronization: one module per method, and the guard that proves that the weights arrived."""
