"""Recipes whose run would complete and have learned nothing. Pure: no torch, no socket."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from grpo_recipes.errors import Problem
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.precision import (
    BY_GRADIENT,
    float32_fix,
    lost_updates,
    mixed_precision,
    trains_weights_as_loaded,
    updates_float32,
)

_WITHOUT_WARMUP = ("constant", "reduce_lr_on_plateau", "greedy")
_WARMUP_FROM_ABOVE_ZERO = ("cosine_warmup_with_min_lr",)
_LEAST_SHARE = 0.01  # of learning_rate; a run that never gets so far learns nothing


def precision(recipe: Recipe) -> list[Problem]:
    """Refuse ``bf16``, ``fp16`` and ``dtype`` where they contradict each other."""
    if recipe["bf16"] and recipe["fp16"]:
        return [Problem(recipe.place("fp16"), "'bf16' and 'fp16' are both true", "keep one")]
    if recipe["fp16"] and recipe["dtype"] == "float16":
        what = "fp16 scales the gradients of float32 weights, dtype is float16"
        return [Problem(recipe.place("dtype"), what, "write dtype: float32, or bf16: true and dtype: bfloat16")]
    return []


def rounded_away(recipe: Recipe, environment: Mapping[str, str]) -> list[Problem]:
    """Refuse weights whose updates are rounded away: bfloat16 or float16 ones, updated as they are.

    Of ``dtype: auto`` and of a ``CONFIG_FILE`` the trainer decides (``trainers.rank``); ``accelerator: auto`` takes one
    that keeps float32 weights.
    """
    accelerator, mixed = recipe["accelerator"], mixed_precision(recipe)
    if environment.get("CONFIG_FILE") or accelerator == "auto" or updates_float32(accelerator, mixed):
        return []
    lost = lost_updates(recipe["dtype"] or "auto", recipe["learning_rate"], recipe["optim"], recipe["optim_args"])
    if not lost or not trains_weights_as_loaded(recipe):
        return []
    of_copies = "lora_modules_to_save: " if recipe["use_peft"] else ""
    what = f"{of_copies}{lost}, and accelerator: {accelerator} keeps no float32 copy"
    return [Problem(recipe.place("accelerator"), what, float32_fix(mixed))]


def rate(recipe: Recipe) -> list[Problem]:
    """Refuse a learning rate that changes nothing, or everything at once."""
    asked, where = recipe["learning_rate"], recipe.place("learning_rate")
    if asked == 0:
        return [Problem(where, "learning_rate is 0: no weight is ever changed", "write e.g. learning_rate: 1e-6")]
    if asked >= 1 and recipe["optim"] not in BY_GRADIENT:
        what = f"learning_rate {asked:g}: the first step of {recipe['optim']} moves every weight by about as much"
        return [Problem(where, what, "write e.g. learning_rate: 1e-6")]
    return []


def warmup(recipe: Recipe) -> list[Problem]:
    """Refuse a warm-up of which the run sees next to nothing."""
    share = reached_share(recipe)
    if share >= _LEAST_SHARE:
        return []
    what = f"{_warmup_of_steps(recipe)}: no step takes more than {share:.1%} of learning_rate"
    return [Problem(recipe.place("warmup_steps"), what, "write warmup_steps: 0, or more max_steps")]


def unfinished_warmup(recipe: Recipe) -> Iterator[str]:
    """Yield a note where the run ends before its warm-up does."""
    share = reached_share(recipe)
    if _LEAST_SHARE <= share < 1:
        yield f"{_warmup_of_steps(recipe)}: the learning rate reaches {share:.0%} of learning_rate"


def hidden_losses(recipe: Recipe) -> Iterator[str]:
    """Yield a note where losses that are no number are asked to be hidden in the log."""
    if recipe.given("logging_nan_inf_filter") and recipe["logging_nan_inf_filter"]:
        yield (
            f"{recipe.place('logging_nan_inf_filter')}: logging_nan_inf_filter hides nothing here: a loss that is not "
            "finite ends the run before the step is taken"
        )


def reached_share(recipe: Recipe) -> float:
    """Return the largest share of ``learning_rate`` that a step takes, 1 where the number of steps is not known."""
    steps, warm = recipe["max_steps"], recipe["warmup_steps"]
    if steps < 1 or recipe["lr_scheduler_type"] in (*_WITHOUT_WARMUP, *_WARMUP_FROM_ABOVE_ZERO):
        return 1.0
    warm = int(warm) if warm >= 1 else math.ceil(warm * steps)
    return 1.0 if warm < steps else (steps - 1) / warm  # the first step is step 0 of the schedule


def _warmup_of_steps(recipe: Recipe) -> str:
    return f"warmup_steps {recipe['warmup_steps']:g} with max_steps {recipe['max_steps']}"


def weights(recipe: Recipe) -> list[Problem]:
    """Refuse factors that make every reward, or every gradient, 0."""
    problems = []
    of_rewards, most = recipe["reward_weights"], recipe["vllm_importance_sampling_clip_max"]
    if of_rewards and not any(of_rewards):
        what = "every reward has the weight 0: all completions score the same"
        problems.append(Problem(recipe.place("reward_weights"), what, "give one of them a weight, or remove the key"))
    if recipe["use_vllm"] and recipe["vllm_importance_sampling_correction"] and most is not None and most <= 0:
        what = f"vllm_importance_sampling_clip_max {most:g} multiplies every gradient by 0"
        problems.append(Problem(recipe.place("vllm_importance_sampling_clip_max"), what, "write 3.0, or remove it"))
    return problems


RULES = (precision, rate, warmup, weights)
