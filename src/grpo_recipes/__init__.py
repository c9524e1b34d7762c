"""Train language models with GRPO from one YAML recipe and one command."""

__version__ = "0.1.0"
