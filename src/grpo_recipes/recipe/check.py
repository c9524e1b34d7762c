"""What a recipe must hold beyond the type of each key. Pure: no torch, no socket."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from grpo_recipes.errors import ConfigError, Problem
from grpo_recipes.recipe import BrokenKey, Recipe, check_learning, check_maxent, check_run, in_order, merge_recipe
from grpo_recipes.recipe import check_evaluation as rules
from grpo_recipes.recipe import check_modebench as modebench
from grpo_recipes.recipe.check_data import SMOKE_TASKS, evaluation_data, is_hub_name, streaming, training_data
from grpo_recipes.recipe.check_publishing import publishing
from grpo_recipes.recipe.reward_names import REWARDS
from grpo_recipes.recipe.tasks import RequestedTask, with_task
from grpo_recipes.recipe.user_code import copy_path, problem_with
from grpo_recipes.smoke import SMOKE_SCHEME as SMOKE_SCHEME

_SAMPLING = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}


def check(recipe: Recipe, environment: Mapping[str, str]) -> list[Problem]:
    """Every contradiction between keys, and between keys and environment variables.

    Args:
        recipe: typed, its task settled.
        environment: variables of the user.

    Returns:
        One problem a fault, none when the recipe is right.
    """
    problems: list[Problem] = []
    for rule in _RULES:
        with contextlib.suppress(BrokenKey):  # told already; a rule that reads a broken key cannot be judged
            problems += rule(recipe)
    with contextlib.suppress(BrokenKey):
        problems += _environment(recipe, environment)
    with contextlib.suppress(BrokenKey):
        problems += check_learning.rounded_away(recipe, environment)
    return problems


def checked_recipe(path: Path, flags: Iterable[str], environment: Mapping[str, str], asked: RequestedTask) -> Recipe:
    """Read a recipe, settle its task and check it, so that everything that is wrong is told at once.

    Raises:
        ConfigError: unreadable, wrong keys or values, or contradictions.
    """
    recipe, problems = merge_recipe(path, flags, environment)
    recipe, contradictions = with_task(recipe, asked)
    problems += contradictions + check(recipe, environment)
    if problems:
        raise ConfigError(*in_order(problems))
    return recipe


def _model(recipe: Recipe) -> list[Problem]:
    model = recipe["model_name_or_path"]
    if not model:
        fix = "add model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct"
        return [Problem(recipe.path.name, "no model is named", fix)]
    where, fix = recipe.place("model_name_or_path"), "name a model folder or a hub id, e.g. Qwen/Qwen2.5-1.5B-Instruct"
    if model.startswith(SMOKE_SCHEME):
        fix = f"write {' or '.join(SMOKE_TASKS)}"
        return [] if model in SMOKE_TASKS else [Problem(where, f"there is no built-in '{model}'", fix)]
    path = os.path.expanduser(model)
    if os.path.isdir(path) or (is_hub_name(model) and not os.path.exists(path)):
        return []
    if model.startswith(("/", "./", "../", "~")):
        return [Problem(where, f"no folder '{model}'", fix)]
    return [Problem(where, f"'{model}' is neither a folder here nor a hub id", fix)]


def _rewards(recipe: Recipe) -> list[Problem]:
    problems = []
    names, weights = recipe["reward_funcs"], recipe["reward_weights"]
    for name in dict.fromkeys(names):
        problems += _reward(recipe, name)
        if names.count(name) > 1:
            what = f"reward '{name}' is named {names.count(name)} times"
            problems.append(
                Problem(recipe.place("reward_funcs"), what, "name it once, with a weight in reward_weights")
            )
    if not names:
        problems.append(Problem(recipe.place("reward_funcs"), "no reward is named", "add reward_funcs"))
    if weights is not None and len(weights) != len(names):
        what = f"{len(weights)} weights for {len(names)} rewards"
        problems.append(Problem(recipe.place("reward_weights"), what, "give one weight for each of reward_funcs"))
    return problems


def _reward(recipe: Recipe, name: str) -> list[Problem]:
    """A name of ours, or the user's ``module:function`` or ``file.py:function``, whose code is read and not run."""
    where = recipe.place("reward_funcs")
    if ":" in name:
        run = recipe.path.parent
        copied = (run / "run.json").exists() and copy_path(name, run / "rewards").exists()
        problem = None if copied else problem_with(name, where)
        return [problem] if problem else []
    if name in REWARDS:
        return []
    fix = f"write one of {', '.join(sorted(REWARDS))}, or your own as module:function or file.py:function"
    if "." in name:
        fix = f"write {':'.join(name.rsplit('.', 1))}" if not name.endswith(".py") else f"write {name}:function"
    return [Problem(where, f"no reward '{name}'", fix)]


def _batch(recipe: Recipe) -> list[Problem]:
    if recipe["prompts_per_step"] is None:
        return []
    problems = []
    for key in ("gradient_accumulation_steps", "steps_per_generation", "generation_batch_size"):
        if recipe.given(key):
            what = f"'{key}' contradicts prompts_per_step, from which it is derived"
            problems.append(Problem(recipe.place(key), what, f"remove {key} (or prompts_per_step)"))
    return problems


def _lengths(recipe: Recipe) -> list[Problem]:
    limit, prompt, completion = (
        recipe["vllm_max_model_length"],
        recipe["max_prompt_length"],
        recipe["max_completion_length"],
    )
    if None in (limit, completion) or not recipe["use_vllm"]:
        return []
    if (prompt or 1) + completion > limit:
        what = f"prompt {prompt or 1} + completion {completion} tokens exceed the server's {limit}"
        fix = f"write vllm_max_model_length: {(prompt or 1) + completion} or shorten max_prompt_length"
        return [Problem(recipe.place("vllm_max_model_length"), what, fix)]
    return []


def _sampling(recipe: Recipe) -> list[Problem]:
    """Truncated sampling makes the server's log-probs those of another distribution than the trainer's."""
    if not recipe["use_vllm"] or not recipe["vllm_importance_sampling_correction"]:
        return []
    return [
        Problem(
            recipe.place(key),
            f"{key} {recipe[key]} biases the importance-sampling correction (the trainer scores the full distribution)",
            f"write {key}: {neutral if neutral is not None else 'null'}, or vllm_importance_sampling_correction: false",
        )
        for key, neutral in _SAMPLING.items()
        if (recipe[key] or None) != (neutral or None)
    ]


def _batch_sizes(recipe: Recipe) -> list[Problem]:
    """TRL takes one of the two, and a generation holds whole groups."""
    steps, size, group = recipe["steps_per_generation"], recipe["generation_batch_size"], recipe["num_generations"]
    if steps is not None and size is not None:
        what = "'generation_batch_size' and 'steps_per_generation' say the same in two ways"
        return [Problem(recipe.place("steps_per_generation"), what, "remove one of the two")]
    if size is not None and group and size % group:
        what = f"generation_batch_size {size} is not whole groups of num_generations {group}"
        fix = f"write {size // group * group or group} or {(size // group + 1) * group}"
        return [Problem(recipe.place("generation_batch_size"), what, fix)]
    return []


def _steps(recipe: Recipe) -> list[Problem]:
    if recipe["max_steps"] == 0 or recipe["max_steps"] < -1:
        what = f"'max_steps' is {recipe['max_steps']}"
        return [Problem(recipe.place("max_steps"), what, "write 1 or more, or -1 for num_train_epochs")]
    if recipe["max_steps"] == -1 and recipe["num_train_epochs"] <= 0:
        return [Problem(recipe.place("num_train_epochs"), "nothing is trained", "write num_train_epochs: 1")]
    return []


def _save_steps(recipe: Recipe) -> list[Problem]:
    steps = recipe["save_steps"]
    if recipe["save_strategy"] != "steps" or steps == int(steps):
        return []
    what = f"save_steps {steps:g} is no whole number of steps"
    return [Problem(recipe.place("save_steps"), what, f"write save_steps: {round(steps)}")]


def _clip_range(recipe: Recipe) -> list[Problem]:
    low, high = recipe["epsilon"], recipe["epsilon_high"]
    if high is not None and high < low:
        what = f"epsilon_high {high} is below epsilon {low}"
        return [Problem(recipe.place("epsilon_high"), what, f"write {low} or more, e.g. 0.28")]
    return []


def _overlong(recipe: Recipe) -> list[Problem]:
    cache, longest = recipe["soft_punish_cache"], recipe["max_completion_length"]
    if cache is None or longest is None or cache <= longest:
        return []
    what = f"soft_punish_cache {cache} exceeds max_completion_length {longest}: every completion would be punished"
    return [Problem(recipe.place("soft_punish_cache"), what, f"write {longest // 4}, a quarter of it")]


def _environment(recipe: Recipe, environment: Mapping[str, str]) -> list[Problem]:
    model = environment.get("VLLM_MODEL")
    if model and model != recipe["model_name_or_path"]:
        what = f"the server would serve '{model}', the recipe trains '{recipe['model_name_or_path']}'"
        return [Problem("VLLM_MODEL", what, "unset VLLM_MODEL, or set model_name_or_path to it")]
    return []


_RULES = (
    _model, training_data, streaming, evaluation_data,
    _rewards, _batch, _batch_sizes, _lengths, _sampling, _steps, _save_steps, _clip_range, _overlong,
    *check_learning.RULES, *check_run.RULES, *check_maxent.RULES,
    rules.evaluation, rules.benchmarks, rules.callbacks, publishing, modebench.sizes, modebench.rewards,
)  # fmt: skip
