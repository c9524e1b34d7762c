"""Injected fault: a worker extension whose replica 1 answers that it loaded the third weights, and keeps the second."""

from __future__ import annotations

from grpo_recipes.server.plugin import WeightReport


class StaleReplica(WeightReport):
    """Loads weights as the real extension does, except in replica 1 from the third load on."""

    def grpo_load(self, folder: str) -> int:
        """Load the weights in ``folder``, or only say so."""
        if self.vllm_config.parallel_config.data_parallel_index == 1 and self._grpo_loads == 2:
            return 3
        return super().grpo_load(folder)
