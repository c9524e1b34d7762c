"""Extend vLLM's ``LLM`` class: a seed for each row, and batches that can be aborted."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from vllm import LLM, SamplingParams

from grpo_recipes.attributes import replace_attributes


class Engine(LLM):
    """vLLM's ``LLM``, which can sample each row of a batch with its own seed and abort a batch."""

    _row_seeds: Callable[[int], Sequence[int]] | None = None
    _stops: Callable[[], bool] | None = None

    def abort_when(self, stops: Callable[[], bool] | None) -> None:
        """Set a function that is called before each engine step: once it returns True, the running batch is aborted.

        Unfinished rows are then missing from the result. None removes the function.
        """
        self._stops = stops

    @contextmanager
    def seeding_rows(self, seeds: Callable[[int], Sequence[int]]) -> Iterator[None]:
        """In the block, sample each of the ``n`` rows of a batch with its own seed; ``seeds(n)`` returns all seeds."""
        self._row_seeds = seeds
        try:
            yield
        finally:
            self._row_seeds = None

    def generate(self, prompts: Any, sampling_params: Any = None, **kwargs: Any) -> Any:
        """Generate as vLLM does. A stop request (``abort_when``) ends the batch early.

        Inside ``seeding_rows``, each prompt gets its own seed if ``sampling_params`` has none, and the prefix cache is
        emptied first.
        """
        if self._row_seeds and isinstance(sampling_params, SamplingParams) and sampling_params.seed is None:
            rows = [sampling_params.clone() for _ in prompts]
            for row, seed in zip(rows, self._row_seeds(len(rows)), strict=True):
                row.seed = seed
            sampling_params = rows
            self.reset_prefix_cache()  # a cache hit changes the last bits, and a resumed run would not have it
        with replace_attributes(self.llm_engine, step=partial(self._step_unless_stopped, self.llm_engine.step)):
            return super().generate(prompts, sampling_params=sampling_params, **kwargs)

    def _step_unless_stopped(self, step: Callable[[], Any]) -> Any:
        """Run an engine step and return its outputs. If a stop is requested, abort all requests and return none."""
        if self._stops and self._stops():
            self.llm_engine.abort_request(list(self.llm_engine.output_processor.request_states), internal=True)
            return []
        return step()
