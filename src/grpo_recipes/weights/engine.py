"""vLLM's engine as the training processes hold it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from vllm import LLM, SamplingParams

from grpo_recipes.attributes import replaced


class Engine(LLM):
    """vLLM's engine, which can draw each row of a batch with a seed of its own, and give a batch up."""

    seeds: Callable[[int], Sequence[int]] | None = None  # of the rows of a batch, by their number
    stops: Callable[[], bool] | None = None  # whether to give up the batch under way, of which rows are then missing

    def generate(self, prompts: Any, sampling_params: Any = None, **kwargs: Any) -> Any:
        """Generate as vLLM does; one set of parameters without a seed is given a seed for each prompt."""
        if self.seeds and isinstance(sampling_params, SamplingParams) and sampling_params.seed is None:
            rows = [sampling_params.clone() for _ in prompts]
            for row, seed in zip(rows, self.seeds(len(rows)), strict=True):
                row.seed = seed
            sampling_params = rows
            self.reset_prefix_cache()  # a hit, which a resumed run would not have, changes the last bits
        with replaced(self.llm_engine, step=partial(self._step, self.llm_engine.step)):
            return super().generate(prompts, sampling_params=sampling_params, **kwargs)

    def _step(self, step: Callable[[], Any]) -> Any:
        if self.stops and self.stops():
            self.llm_engine.abort_request(list(self.llm_engine.output_processor.request_states), internal=True)
            return []
        return step()
