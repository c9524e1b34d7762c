"""Rewards called in child processes, within limits: a reward that hangs, dies or fills the memory costs one verdict.

from grpo_recipes.rewards.children import ChildRewards

with ChildRewards("math_verify", workers=2, timeout=5, memory_gib=4) as pool:
    verdicts = pool.score("math_verify", completions, {"answer": answers})
"""

from grpo_recipes.rewards.children.pool import ChildReward, ChildRewards, RewardFailed, default_workers
from grpo_recipes.rewards.children.score import Verdict

__all__ = ["ChildReward", "ChildRewards", "RewardFailed", "Verdict", "default_workers"]
