"""All objectives with the keys that select them and their papers, and the rules of these keys. No torch, no socket.

``algorithms.objectives`` computes those that TRL lacks, and ``algorithms.maxent`` the weights of MaxEnt-GRPO.
"""

from typing import Any, NamedTuple

from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.rules import Rule, set_by_user

_MAXENT = "docs/maxent.md"


class NamedObjective(NamedTuple):
    """An objective for `grpo keys objective`."""

    keys: dict[str, Any]  # the recipe keys that select it
    help: str  # one line
    paper: str  # address of the paper, or another source


# fmt: off
NAMED_OBJECTIVES = {
    "GRPO": NamedObjective({"loss_type": "grpo"},
        "rewards normalized in the group, mean over each completion's tokens", "https://arxiv.org/abs/2402.03300"),
    "DAPO": NamedObjective({"loss_type": "dapo"},
        "GRPO with a mean over the step's tokens; the default", "https://arxiv.org/abs/2503.14476"),
    "Dr. GRPO": NamedObjective({"loss_type": "dr_grpo", "scale_rewards": "none"},
        "no division by deviation or length", "https://arxiv.org/abs/2503.20783"),
    "BNPO": NamedObjective({"loss_type": "bnpo"}, "GRPO with a mean over the tokens of a forward pass", "TRL"),
    "GSPO": NamedObjective({"loss_type": "grpo", "importance_sampling_level": "sequence"},
        "ratios of whole completions", "https://arxiv.org/abs/2507.18071"),
    "GMPO": NamedObjective({"loss_type": "gmpo", "epsilon": 0.4},
        "geometric mean of a completion's clipped ratios", "https://arxiv.org/abs/2507.20673"),
    "CISPO": NamedObjective({"loss_type": "cispo", "epsilon_high": 5.0},
        "log-probs weighted by clipped ratios: every token learns", "https://arxiv.org/abs/2506.13585"),
    "SAPO": NamedObjective({"loss_type": "sapo"}, "a smooth gate instead of clipping", "https://arxiv.org/abs/2511.20347"),
    "LUSPO": NamedObjective({"loss_type": "luspo", "importance_sampling_level": "sequence"},
        "GSPO times the length of each completion", "https://arxiv.org/abs/2602.05261"),
    "VESPO": NamedObjective({"loss_type": "vespo"},
        "smooth weights of whole completions", "https://arxiv.org/abs/2602.10693"),
    "RLOO": NamedObjective({"advantage_estimator": "rloo", "loss_type": "dr_grpo"},
        "reward minus the mean of the group's other completions", "https://arxiv.org/abs/2402.14740"),
    "REINFORCE++": NamedObjective({"advantage_estimator": "reinforce_plus_plus"},
        "rewards normalized over the batch", "https://arxiv.org/abs/2501.03262"),
    "REINFORCE++-baseline": NamedObjective({"advantage_estimator": "reinforce_plus_plus_baseline"},
        "reward minus the group's mean, normalized over the batch", "https://arxiv.org/abs/2501.03262"),
    "On-policy distillation": NamedObjective({"teacher_model_name_or_path": "Qwen/Qwen2.5-7B-Instruct"},
        "adds a teacher's log-prob of each sampled token minus the sampler's",
        "https://thinkingmachines.ai/blog/on-policy-distillation"),
    "MaxEnt listwise": NamedObjective({"maxent_objective": "listwise"},
        "cross-entropy to a target over the group", _MAXENT),
    "MaxEnt weighted_mle": NamedObjective({"maxent_objective": "weighted_mle"},
        "likelihood weighted by that target", _MAXENT),
    "MaxEnt tempered": NamedObjective({"maxent_objective": "tempered"},
        "Dr. GRPO weighted by softmax(utility / tau)", _MAXENT),
    "MaxRL": NamedObjective({"maxent_objective": "maxrl"},
        "reward divided by the group's mean, minus 1", "https://arxiv.org/abs/2602.02710"),
}


def _replaces_advantages(recipe: Recipe) -> bool:
    """Return whether ``advantage_estimator`` replaces TRL's advantages; false for MaxEnt recipes."""
    return recipe.loss.advantage_estimator != "group" and recipe.maxent.objective is None


def _list_completion_ratio_keys(recipe: Recipe) -> list[str]:
    """Return the keys that give the recipe's loss one ratio for all tokens of a completion; [] without such keys."""
    is_sequence = recipe.loss.importance_sampling_level == "sequence"
    is_geometric = recipe.loss.loss_type == "gmpo"
    return ["importance_sampling_level"] * is_sequence + ["loss_type"] * is_geometric


RULES = (
    Rule("scale_rewards", lambda r: _replaces_advantages(r) and set_by_user(r, "scale_rewards"),
        "'scale_rewards' changes nothing with advantage_estimator: {advantage_estimator}", "{removal}"),
    Rule("multi_objective_aggregation",
        lambda r: _replaces_advantages(r) and r.rewards.multi_objective_aggregation != "sum_then_normalize",
        "multi_objective_aggregation: {multi_objective_aggregation} and advantage_estimator: {advantage_estimator}, "
        "which uses the sum of rewards, can't be combined", "{removal}"),
    Rule("dynamic_sampling",
        lambda r: r.batch.dynamic_sampling and r.loss.advantage_estimator == "reinforce_plus_plus",
        "dynamic_sampling replaces groups of equal rewards, but reinforce_plus_plus learns from them",
        "{removal}, or set advantage_estimator: reinforce_plus_plus_baseline"),
    Rule("{item}", lambda r: r.loss.loss_type == "gmpo" and set_by_user(r, "importance_sampling_level delta", False),
        "'{item}' can't be combined with loss_type: gmpo, which has ratios of whole completions and its own clipping",
        "{removal}"),
    Rule("{item}", lambda r: r.loss.teacher_model_name_or_path and _list_completion_ratio_keys(r),
        lambda r, key: f"{key}: {r[key]} and teacher_model_name_or_path can't be combined: a teacher weighs tokens, "
        "but this loss has one ratio for all tokens of a completion",
        lambda _, key: f"set {key}: {'token' if key == 'importance_sampling_level' else 'dapo'}"),
    Rule("teacher_model_name_or_path", lambda r: r.loss.teacher_model_name_or_path and r.maxent.objective is not None,
        "teacher_model_name_or_path and MaxEnt-GRPO, which weighs whole completions, can't be combined", "{removal}"),
    Rule("cast_lm_head_to_fp32", lambda r: r.loss.teacher_model_name_or_path and r.processes.cast_lm_head_to_fp32,
        "cast_lm_head_to_fp32 and teacher_model_name_or_path can't be combined: only the trained model's output layer "
        "is cast", "{removal}"),
    Rule("dynamic_sampling", lambda r: r.batch.dynamic_sampling and r.loss.teacher_model_name_or_path,
        "dynamic_sampling replaces groups of equal rewards, but a teacher teaches with them too", "{removal}"),
    Rule("teacher_coef", lambda r: not r.loss.teacher_model_name_or_path and set_by_user(r, "teacher_coef"),
        "teacher_coef does nothing without teacher_model_name_or_path", "{removal}"),
)
# fmt: on
