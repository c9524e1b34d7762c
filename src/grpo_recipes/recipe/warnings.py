"""What is no fault of a recipe and worth knowing before a job waits in a queue. Pure: no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator

from grpo_recipes.modebench.dataset import TASK_KEYS
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.check_learning import hidden_losses, unfinished_warmup
from grpo_recipes.recipe.check_modebench import named_tasks
from grpo_recipes.recipe.reward_names import IN_CHILDREN, REWARDS

# What keys of one beginning need to do anything.
_NEEDED = {
    "benchmark_": "benchmarks",
    "hub_": "push_to_hub",
    "eval_": "eval_strategy",
    "wandb_": "report_to: wandb",
    "vllm_": "use_vllm: true",
}
_LIMITS = ("reward_timeout", "reward_memory_gib", "reward_workers")


def notes(recipe: Recipe) -> list[str]:
    """What a person should be told of a right recipe, a line each."""
    return [
        *recipe.notes,
        *_batch(recipe),
        *unfinished_warmup(recipe),
        *hidden_losses(recipe),
        *_without_effect(recipe),
    ]


def _batch(recipe: Recipe) -> Iterator[str]:
    group, accumulation = recipe["num_generations"], recipe["gradient_accumulation_steps"]
    if recipe["prompts_per_step"] is not None or recipe["generation_batch_size"] is not None:
        return
    one = recipe["per_device_train_batch_size"] * (recipe["steps_per_generation"] or accumulation)
    multiple = group // math.gcd(group, one)
    if multiple > 1:
        yield (
            f"the batch is whole groups of {group} with a multiple of {multiple} training processes only; "
            "prompts_per_step makes it the same for every number"
        )


def _without_effect(recipe: Recipe) -> Iterator[str]:
    """Keys that this recipe or its command line gives, and that nothing reads without another."""
    for key in recipe.values:
        # A base sets keys for recipes that differ, and the shell's variables are there for every run.
        if not recipe.origin(key).startswith((f"{recipe.path.name}:", "--")):
            continue
        needed = needed_by(recipe, key)
        if needed:
            yield f"{recipe.origin(key)}: {key} does nothing without {needed}"


def needed_by(recipe: Recipe, key: str) -> str:
    """What the recipe lacks for a key to do anything, or an empty text."""
    rewards = recipe["reward_funcs"]
    readers = [name for name, keys in REWARDS.items() if key in keys and key != "max_completion_length"]
    if readers:
        return "" if set(readers) & set(rewards) else " or ".join(readers)
    if key in _LIMITS:
        own = recipe["reward_isolation"] == "completion" and any(":" in name for name in rewards)
        return "" if own or IN_CHILDREN & set(rewards) else "a reward in a child process (math_verify, or your own)"
    if key.startswith("modebench_"):
        readers = [task for task in TASK_KEYS if key in TASK_KEYS[task]] or list(TASK_KEYS)
        return "" if set(readers) & set(named_tasks(recipe)) else f"the dataset or benchmark {' or '.join(readers)}"
    begins = next((begin for begin in _NEEDED if key.startswith(begin)), None)
    if begins is None or key == "eval_strategy" or _is_on(recipe, begins):
        return ""
    return _NEEDED[begins]


def _is_on(recipe: Recipe, begins: str) -> bool:
    reports = recipe["report_to"] or []
    return {
        "benchmark_": bool(recipe["benchmarks"]),
        "hub_": bool(recipe["push_to_hub"]),
        "eval_": recipe["eval_strategy"] != "no",
        "wandb_": "wandb" in ([reports] if isinstance(reports, str) else reports),
        "vllm_": bool(recipe["use_vllm"]),
    }[begins]
