"""From a checked recipe to processes and back: resources, plan, supervision. No torch."""
