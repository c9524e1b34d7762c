"""Notes on a right recipe: keys that do nothing, and what is worth knowing before its job waits in a queue."""

import math

from grpo_recipes.modebench.dataset import TASK_KEYS
from grpo_recipes.paths import shown
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.learning import LEAST_SHARE, reached_share
from grpo_recipes.recipe.registry import IN_CHILDREN, REWARDS
from grpo_recipes.recipe.rules import Condition, evaluates, isolates, matching, modebench_tasks, reports_to

# fmt: off
# Keys that do nothing without another, worth a note: people set them for many recipes at once.
_IDLE: tuple[tuple[str, Condition, str], ...] = (
    ("reward_timeout reward_memory_gib reward_workers",
        lambda r: not IN_CHILDREN & set(r["reward_funcs"]) and not isolates(r),
        "a reward in a child process (math_verify, or your own)"),
    ("reward_environment reward_concurrency", lambda r: not isolates(r), "a reward of your own in a child process"),
    ("benchmark_*", lambda r: not r["benchmarks"], "benchmarks"),
    ("hub_*", lambda r: not r["push_to_hub"], "push_to_hub"),
    ("eval_*", lambda r: not evaluates(r), "eval_strategy"),
    ("wandb_*", lambda r: "wandb" not in reports_to(r), "report_to: wandb"),
    ("vllm_* weight_sync* weight_guard*", lambda r: not r["use_vllm"], "use_vllm: true"),
)
# fmt: on


def notes(recipe: Recipe) -> list[str]:
    """Return what is worth knowing of a right recipe before its job waits in a queue, a line each."""
    found = list(recipe.notes)
    group, accumulation = recipe["num_generations"], recipe["gradient_accumulation_steps"]
    one = recipe["per_device_train_batch_size"] * (recipe["steps_per_generation"] or accumulation)
    multiple = group // math.gcd(group, one)
    if multiple > 1 and recipe["prompts_per_step"] is None and recipe["generation_batch_size"] is None:
        found.append(
            f"the batch is whole groups of {group} with a multiple of {multiple} training processes only; "
            "prompts_per_step makes it the same for every number"
        )
    if LEAST_SHARE <= (share := reached_share(recipe)) < 1:
        schedule = f"warmup_steps {recipe['warmup_steps']:g} with max_steps {recipe['max_steps']}"
        found.append(f"{schedule}: the learning rate reaches {share:.0%} of learning_rate")
    hidden = "logging_nan_inf_filter"
    if recipe.given(hidden) and recipe[hidden]:
        why = "a loss that is not finite ends the run before the step is taken"
        found.append(f"{recipe.place(hidden)}: {hidden} hides nothing here: {why}")
    for key in recipe.values:
        source = recipe.source(key)
        # A base sets keys for recipes that differ, and the shell's variables are there for every run.
        if source.startswith((f"{shown(recipe.path)}:", "--")) and (needed := needed_by(recipe, key)):
            found.append(f"{source}: {key} does nothing without {needed}")
    return found


def needed_by(recipe: Recipe, key: str) -> str:
    """Return what the recipe lacks for a key to do anything, or an empty text."""
    readers = [name for name, keys in REWARDS.items() if key in keys and key != "max_completion_length"]
    if readers:
        return "" if set(readers) & set(recipe["reward_funcs"]) else " or ".join(readers)
    if key.startswith("modebench_"):
        readers = [task for task in TASK_KEYS if key in TASK_KEYS[task]] or list(TASK_KEYS)
        return "" if set(readers) & set(modebench_tasks(recipe)) else f"the dataset or benchmark {' or '.join(readers)}"
    idle = (needed for keys, idle, needed in _IDLE if key in matching(keys) and key != needed and idle(recipe))
    return next(idle, "")
