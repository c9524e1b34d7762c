"""Where TRL's advantages can be replaced by others before TRL trains on them, shows or writes them."""

from __future__ import annotations

from typing import Any

import torch


class Weighing:
    """Mixin before ``Scoring``: hands each training generation to ``_weigh``, which subclasses override.

    It stands below ``SampledTexts``, so that samples, like TRL's tables of completions, show what is trained on.
    """

    _rewards_BR: torch.Tensor  # of the generation being scored: all ranks' completions by rewards, as TRL gathered them

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._rewards_BR = super()._calculate_rewards(*args, **kwargs)
        return self._rewards_BR

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if self.model.training:
            advantages_PG = self._weigh(output)
            if advantages_PG is not None:
                self._replace_advantages(output, advantages_PG.flatten())
        return output

    def _weigh(self, output: dict[str, Any]) -> torch.Tensor | None:
        """The advantages to train on, of all ranks' completions, (P, G); None keeps TRL's.

        Args:
            output: what TRL's loss is given, this rank's rows; groups are contiguous over the ranks' rows in order.
        """
        return None

    def _replace_advantages(self, output: dict[str, Any], advantages_B: torch.Tensor) -> None:
        stock = output["advantages"]
        start = self.accelerator.process_index * len(stock)
        output["advantages"] = advantages_B[start : start + len(stock)].to(stock)
        logged = self._logs["advantages"]
        for _ in range(min(len(advantages_B), len(logged))):  # the generation's, which TRL has just appended
            logged.pop()
        logged.extend(advantages_B.to(stock).tolist())
