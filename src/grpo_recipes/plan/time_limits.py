"""Choose the time limits of a run that depend on the size of its model or on its other limits.

plan = with_time_limits(plan, recipe, weight_bytes)
"""

from __future__ import annotations

import math
from dataclasses import replace

from grpo_recipes.plan.types import MEETING_SECONDS, Plan
from grpo_recipes.recipe import Recipe

_SECONDS_A_GB = 30.0  # added for each GB of weights: reading at 50 MB/s, longer compilation and capture
SAVE_MULTIPLE = 2  # times ``stall_timeout``: the limit of a save to a slow disk


def with_time_limits(plan: Plan, recipe: Recipe, weight_bytes: int) -> Plan:
    """Return a copy of the plan with the size of the model's files, and with limits that are longer for large models.

    A ``vllm_server_timeout`` in the recipe stays unchanged.
    """
    extra_seconds = round(_SECONDS_A_GB * weight_bytes / 1e9)
    server_timeout = recipe.server.timeout + (0 if recipe.is_set("vllm_server_timeout") else extra_seconds)
    meeting_timeout = MEETING_SECONDS + extra_seconds
    return replace(plan, weight_bytes=weight_bytes, server_timeout=server_timeout, meeting_timeout=meeting_timeout)


def choose_collective_timeout(recipe: Recipe, plan: Plan) -> int | None:
    """Return the seconds that NCCL may wait in a collective operation, or None to use the recipe's ``ddp_timeout``.

    The other ranks wait in an operation while rank 0 finishes a checkpoint, or while a server restarts and samples
    again. NCCL would kill them after 30 minutes. The launcher detects hung ranks by its own, longer limits. On CPU,
    transformers does not use the key.
    """
    if plan.device == "cpu" or recipe.is_set("ddp_timeout"):
        return None
    restart = plan.server_timeout + 2 * recipe.server.request_timeout
    return math.ceil(max(recipe.processes.ddp_timeout, SAVE_MULTIPLE * recipe.processes.stall_timeout, restart))
