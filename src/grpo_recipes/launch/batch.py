"""The arithmetic of one optimizer step: the experiment's batch spread over the trainers."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_recipes.errors import refuse
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
    """

    completions: int
    num_generations: int
    world_size: int
    per_device: int
    accumulation: int

    def __str__(self) -> str:
        prompts = self.completions // self.num_generations
        trainers = f"{self.world_size} trainer{'s' if self.world_size > 1 else ''}"
        return (
            f"{prompts} prompts x {self.num_generations} completions = {self.completions} a step = "
            f"{trainers} x {self.per_device} per device x {self.accumulation} accumulated"
        )


def derive_batch(recipe: Recipe, trainers: int) -> Batch:
    """Spread the recipe's batch over at most ``trainers`` processes.

    With ``prompts_per_step`` the batch is the same for every number of trainers: as many of them are used as divide it,
    and ``per_device_train_batch_size`` is the most one forward pass may hold. Without it TRL's keys mean what they mean
    in TRL.

    Raises:
        Refused: the batch is not a whole number of groups.
    """
    group, most = recipe["num_generations"], recipe["per_device_train_batch_size"]
    if group is None:
        raise refuse(recipe.origin("num_generations"), "num_generations is empty", "write num_generations: 8")
    if recipe["prompts_per_step"] is None:
        return _literal_batch(recipe, trainers)
    completions = recipe["prompts_per_step"] * group
    world = largest_divisor(completions, trainers)
    share = completions // world
    per_device = largest_divisor(share, most)
    return Batch(completions, group, world, per_device, share // per_device)


def _literal_batch(recipe: Recipe, trainers: int) -> Batch:
    group, per_device = recipe["num_generations"], recipe["per_device_train_batch_size"]
    accumulation = recipe["gradient_accumulation_steps"]
    batch = Batch(trainers * per_device * accumulation, group, trainers, per_device, accumulation)
    generated = recipe["generation_batch_size"] or trainers * per_device * (
        recipe["steps_per_generation"] or accumulation
    )
    if generated % group or generated % (trainers * per_device):
        raise refuse(
            recipe.origin("num_generations"),
            f"{generated} completions a generation ({trainers} x {per_device} per device x accumulation) "
            f"are not whole groups of {group}",
            "set prompts_per_step and let the rest be derived",
        )
    return batch


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of ``number`` that is not above ``most``."""
    return max(divisor for divisor in range(1, min(number, most) + 1) if number % divisor == 0)
