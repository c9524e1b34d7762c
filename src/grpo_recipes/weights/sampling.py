"""Derive sampling seeds: one for each prompt of each generation, from the run's seed and the generation's name."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager


def sampling_seed(run_seed: int, generation: str, prompt: int) -> int:
    """Return the seed of the prompt with this number in a generation. vLLM gives completion k the seed + k.

    The seed is a hash: completions of prompts with neighboring seeds would share noise.
    """
    return int.from_bytes(hashlib.sha256(f"{run_seed}/{generation}/{prompt}".encode()).digest()[:6], "big")


class SamplingSeeds:
    """A mixin with the values that sampling seeds derive from: run seed, generation name, and a number per prompt."""

    _run_seed: int | None = None  # None leaves sampling to vLLM's own seed
    generation_name = ""
    seed_numbers: list[int] | None = None  # a number per prompt; None: its index

    def name_generation(self, name: str) -> None:
        """Set the generation's name. The next sampling seeds depend on it."""
        self.generation_name = name

    @contextmanager
    def named_generation(self, name: str, numbers: list[int] | None) -> Iterator[None]:
        """Derive sampling seeds in the block from this name and a number for each prompt (None: its index)."""
        outside = self.generation_name, self.seed_numbers
        self.generation_name, self.seed_numbers = name, numbers
        try:
            yield
        finally:
            self.generation_name, self.seed_numbers = outside

    @contextmanager
    def using_seed(self, seed: int) -> Iterator[None]:
        """Derive sampling seeds in the block from ``seed``. In a run without a seed, change nothing."""
        run_seed = self._run_seed
        self._run_seed = None if run_seed is None else seed
        try:
            yield
        finally:
            self._run_seed = run_seed

    def derive_prompt_seed(self, number: int) -> int:
        """Return the seed of the prompt with this number in the current generation. The run must have a seed."""
        assert self._run_seed is not None
        return sampling_seed(self._run_seed, self.generation_name, number)
