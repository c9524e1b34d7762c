"""Train language models with GRPO from a YAML recipe with a single command."""

__version__ = "0.1.0"
