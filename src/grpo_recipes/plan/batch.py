"""The arithmetic of one optimizer step: the experiment's batch spread over the trainers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from grpo_recipes.errors import config_error
from grpo_recipes.recipe import Recipe


@dataclass(frozen=True)
class Batch:
    """One optimizer step."""

    completions: int  # of a step over all trainers: prompts x num_generations
    num_generations: int  # completions of one prompt
    world_size: int  # training processes
    per_device: int  # completions of one forward pass on one process
    accumulation: int  # forward passes of one process a step
    tokens: int | None = None  # most tokens of a step, prompts included; None when a length has no limit

    def __str__(self) -> str:
        prompts = self.completions // self.num_generations
        tokens = f", at most {self.tokens:,} tokens" if self.tokens else ""
        return (
            f"{prompts} prompts x {self.num_generations} completions = {self.completions} a step = "
            f"{_trainers(self.world_size)} x {self.per_device} per device x {self.accumulation} accumulated{tokens}"
        )


def derive_batch(recipe: Recipe, trainers: int) -> Batch:
    """Spread the recipe's batch, which must be whole groups, over at most ``trainers`` processes.

    With ``prompts_per_step`` the batch is the same for every number of trainers: as many of them are used as divide it,
    and ``per_device_train_batch_size`` is the most one forward pass may hold. Without it TRL's keys mean what they mean
    in TRL.
    """
    group, per_device = recipe["num_generations"], recipe["per_device_train_batch_size"]
    if group is None:
        raise config_error(recipe.source("num_generations"), "num_generations is empty", "write num_generations: 8")
    if recipe["prompts_per_step"] is not None:
        completions = recipe["prompts_per_step"] * group
        trainers = largest_divisor(completions, trainers)
        per_device = largest_divisor(completions // trainers, per_device)
        accumulation = completions // trainers // per_device
    else:
        accumulation = recipe["gradient_accumulation_steps"]
        per_pass, passes = trainers * per_device, recipe["steps_per_generation"] or accumulation
        completions = per_pass * accumulation
        generated = recipe["generation_batch_size"] or per_pass * passes
        if generated % group or generated % per_pass:
            raise config_error(
                recipe.source("num_generations"),
                f"{generated} completions a generation ({trainers} x {per_device} per device x accumulation) "
                f"are not whole groups of {group}",
                "set prompts_per_step and let the rest be derived",
            )
    prompt, completion = recipe["max_prompt_length"], recipe["max_completion_length"]
    tokens = completions * (prompt + completion) if prompt and completion else None
    return Batch(completions, group, trainers, per_device, accumulation, tokens)


def derive_eval_batch(recipe: Recipe, batch: Batch) -> int | None:
    """Return the completions of one evaluation batch on one process; None without evaluation.

    TRL wants whole groups: world size x this size divides by num_generations_eval. The recipe's
    ``per_device_eval_batch_size`` is the most; without it, what one generation of the training gives each process.
    """
    if recipe["eval_strategy"] == "no":
        return None
    group = recipe["num_generations_eval"] or recipe["num_generations"]
    smallest = group // math.gcd(group, batch.world_size)
    if not recipe.given("per_device_eval_batch_size"):
        return max(smallest, batch.per_device * batch.accumulation // smallest * smallest)
    most = recipe["per_device_eval_batch_size"]
    if most < smallest:
        processes = _trainers(batch.world_size)
        what = f"{processes} x {most} completions are not a whole number of evaluation groups of {group}"
        fix = f"write per_device_eval_batch_size: {smallest} (or a multiple), or set num_generations_eval"
        raise config_error(recipe.source("per_device_eval_batch_size"), what, fix)
    return int(most // smallest * smallest)


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of ``number`` that is not above ``most``."""
    return max(divisor for divisor in range(1, min(number, most) + 1) if number % divisor == 0)


def _trainers(count: int) -> str:
    return f"{count} trainer{'s' if count > 1 else ''}"
