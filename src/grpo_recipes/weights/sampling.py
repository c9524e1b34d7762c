"""Sampling seeds: one for each prompt of each generation."""

import hashlib


def sampling_seed(run_seed: int, generation: str, prompt: int) -> int:
    """Return the seed of the prompt with this number in a generation. vLLM gives completion k the seed + k.

    The seed is a hash: completions of prompts with neighboring seeds would share noise.
    """
    return int.from_bytes(hashlib.sha256(f"{run_seed}/{generation}/{prompt}".encode()).digest()[:6], "big")
