"""The arithmetic of one optimizer step: the experiment's batch spread over the trainers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_recipes.errors import config_error
from grpo_recipes.recipe import Recipe


@dataclass(frozen=True)
class Batch:
    """One optimizer step.

    Attributes:
        completions: completions of a step over all trainers, prompts x num_generations.
        num_generations: completions of one prompt.
        world_size: training processes.
        per_device: completions of one forward pass on one process.
        accumulation: forward passes of one process a step.
        tokens: most tokens of a step, prompts included; None when a length has no limit.
    """

    completions: int
    num_generations: int
    world_size: int
    per_device: int
    accumulation: int
    tokens: int | None = None

    def __str__(self) -> str:
        prompts = self.completions // self.num_generations
        trainers = f"{self.world_size} trainer{'s' if self.world_size > 1 else ''}"
        tokens = f", at most {self.tokens:,} tokens" if self.tokens else ""
        return (
            f"{prompts} prompts x {self.num_generations} completions = {self.completions} a step = "
            f"{trainers} x {self.per_device} per device x {self.accumulation} accumulated{tokens}"
        )


def derive_batch(recipe: Recipe, trainers: int) -> Batch:
    """Spread the recipe's batch over at most ``trainers`` processes.

    With ``prompts_per_step`` the batch is the same for every number of trainers: as many of them are used as divide it,
    and ``per_device_train_batch_size`` is the most one forward pass may hold. Without it TRL's keys mean what they mean
    in TRL.

    Raises:
        ConfigError: the batch is not a whole number of groups.
    """
    group, most = recipe["num_generations"], recipe["per_device_train_batch_size"]
    if group is None:
        raise config_error(recipe.origin("num_generations"), "num_generations is empty", "write num_generations: 8")
    if recipe["prompts_per_step"] is None:
        return _literal_batch(recipe, trainers)
    completions = recipe["prompts_per_step"] * group
    world = largest_divisor(completions, trainers)
    share = completions // world
    per_device = largest_divisor(share, most)
    return Batch(completions, group, world, per_device, share // per_device, _tokens(recipe, completions))


def _tokens(recipe: Recipe, completions: int) -> int | None:
    prompt, completion = recipe["max_prompt_length"], recipe["max_completion_length"]
    return completions * (prompt + completion) if prompt and completion else None


def _literal_batch(recipe: Recipe, trainers: int) -> Batch:
    group, per_device = recipe["num_generations"], recipe["per_device_train_batch_size"]
    accumulation = recipe["gradient_accumulation_steps"]
    completions = trainers * per_device * accumulation
    batch = Batch(completions, group, trainers, per_device, accumulation, _tokens(recipe, completions))
    generated = recipe["generation_batch_size"] or trainers * per_device * (
        recipe["steps_per_generation"] or accumulation
    )
    if generated % group or generated % (trainers * per_device):
        raise config_error(
            recipe.origin("num_generations"),
            f"{generated} completions a generation ({trainers} x {per_device} per device x accumulation) "
            f"are not whole groups of {group}",
            "set prompts_per_step and let the rest be derived",
        )
    return batch


def derive_eval_batch(recipe: Recipe, batch: Batch) -> int | None:
    """Completions of one evaluation batch on one process; None without evaluation.

    TRL wants whole groups: world size x this size divides by num_generations_eval. The recipe's
    ``per_device_eval_batch_size`` is the most; without it, what one generation of the training gives each process.

    Raises:
        ConfigError: no size the recipe allows holds whole groups.
    """
    if recipe["eval_strategy"] == "no":
        return None
    group = recipe["num_generations_eval"] or recipe["num_generations"]
    smallest = group // math.gcd(group, batch.world_size)
    if not recipe.given("per_device_eval_batch_size"):
        return max(smallest, batch.per_device * batch.accumulation // smallest * smallest)
    most = recipe["per_device_eval_batch_size"]
    if most < smallest:
        trainers = f"{batch.world_size} trainer{'s' if batch.world_size > 1 else ''}"
        what = f"{trainers} x {most} completions hold no whole number of evaluation groups of {group}"
        fix = f"write per_device_eval_batch_size: {smallest} (or a multiple), or set num_generations_eval"
        raise config_error(recipe.origin("per_device_eval_batch_size"), what, fix)
    return int(most // smallest * smallest)


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of ``number`` that is not above ``most``."""
    return max(divisor for divisor in range(1, min(number, most) + 1) if number % divisor == 0)


def spread(processes: int, rooms: Sequence[int]) -> list[int]:
    """Spread ``processes`` over nodes as evenly as their room allows, so that no node stands idle for want of order.

    Args:
        processes: how many, at most the sum of ``rooms``.
        rooms: most processes of each node.

    Returns:
        Processes of each node.
    """
    shares = [0] * len(rooms)
    for _ in range(processes):
        node = min((node for node, room in enumerate(rooms) if shares[node] < room), key=shares.__getitem__)
        shares[node] += 1
    return shares
