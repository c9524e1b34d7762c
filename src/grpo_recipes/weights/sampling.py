"""The seed of each prompt's completions."""

import hashlib


def sampling_seed(run_seed: int, generation: str, prompt: int) -> int:
    """Return the seed of a prompt, by its place in a generation; vLLM gives completion k of it this seed + k.

    A hash: the completions of prompts with neighbouring seeds would share noise.
    """
    return int.from_bytes(hashlib.sha256(f"{run_seed}/{generation}/{prompt}".encode()).digest()[:6], "big")
