"""Read the inputs of TRL's loss, a dict of tensors with a row per completion.

mask_BT = trained_mask(output)
"""

from collections.abc import Mapping
from typing import Any

import torch


def trained_mask(output: Mapping[str, Any]) -> torch.Tensor:
    """Return a mask of the tokens in the loss, (B, T): 1 for tokens of the policy, else 0.

    Padding, messages of tools and environments, and completions that failed are not in the loss.
    """
    mask_BT: torch.Tensor = output["completion_mask"] * output.get("tool_mask", 1)
    return mask_BT


def sampled_logps(output: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the log-probs at sampling, (B, T): vLLM's, or TRL's for the same weights; None if neither is known."""
    logps_BT: torch.Tensor | None = output.get("sampling_per_token_logps", output.get("old_per_token_logps"))
    return logps_BT
