"""Sources of completions: vLLM servers, vLLM in the trainers, transformers, and turns of environments."""
