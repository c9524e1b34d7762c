"""What a recipe must hold beyond the type of each key. Pure: no torch, no socket."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from grpo_recipes.errors import Problem
from grpo_recipes.recipe import Recipe
from grpo_recipes.rewards.registry import REWARDS

SMOKE_SCHEME = "smoke:"
_SAMPLING = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}


def check(recipe: Recipe, environment: Mapping[str, str]) -> list[Problem]:
    """Every contradiction between keys, and between keys and environment variables.

    Returns:
        One problem a fault, none when the recipe is right.
    """
    rules = (_model, _dataset, _rewards, _batch, _lengths, _sampling, _unsupported, _colocate, _report)
    problems = [problem for rule in rules for problem in rule(recipe)]
    return problems + _environment(recipe, environment)


def _at(recipe: Recipe, key: str) -> str:
    return recipe.origin(key) if recipe.given(key) else recipe.path.name


def _missing_file(value: str) -> bool:
    """Whether a name that can only be a path names nothing."""
    return value.startswith(("/", "./", "../", "~")) and not os.path.exists(os.path.expanduser(value))


def _model(recipe: Recipe) -> list[Problem]:
    model = recipe["model_name_or_path"]
    if not model:
        fix = "add model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct"
        return [Problem(recipe.path.name, "no model is named", fix)]
    if _missing_file(model):
        return [Problem(_at(recipe, "model_name_or_path"), f"no folder '{model}'", "name a model folder or a hub id")]
    return []


def _dataset(recipe: Recipe) -> list[Problem]:
    name = recipe["dataset_name"]
    if not name:
        return [Problem(recipe.path.name, "no dataset is named", "add dataset_name: a hub id or a .jsonl file")]
    suffixes = (".json", ".jsonl", ".csv", ".parquet")
    if _missing_file(name) or (name.endswith(suffixes) and not os.path.exists(os.path.expanduser(name))):
        return [Problem(_at(recipe, "dataset_name"), f"no file '{name}'", "name an existing file or a hub id")]
    return _columns(recipe, Path(os.path.expanduser(name)))


def _columns(recipe: Recipe, path: Path) -> list[Problem]:
    """The columns of a local .jsonl file, by its first line: six hours in a queue are long for a typo."""
    if path.suffix != ".jsonl" or not path.is_file():
        return []
    with path.open(encoding="utf-8", errors="replace") as file:
        first = file.readline()
    try:
        names = list(json.loads(first))
    except ValueError:
        return [Problem(_at(recipe, "dataset_name"), f"'{path}' does not begin with a JSON object", "write one a line")]
    return [
        Problem(_at(recipe, key), f"'{path.name}' has no column '{recipe[key]}'", f"write one of {', '.join(names)}")
        for key in ("dataset_prompt_column", "dataset_solution_column")
        if recipe[key] not in names
    ]


def _rewards(recipe: Recipe) -> list[Problem]:
    problems = []
    names, weights = recipe["reward_funcs"], recipe["reward_weights"]
    for name in names:
        if name not in REWARDS:
            fix = f"write one of {', '.join(sorted(REWARDS))}"
            problems.append(Problem(_at(recipe, "reward_funcs"), f"no reward '{name}'", fix))
    if not names:
        problems.append(Problem(_at(recipe, "reward_funcs"), "no reward is named", "add reward_funcs"))
    if weights is not None and len(weights) != len(names):
        what = f"{len(weights)} weights for {len(names)} rewards"
        problems.append(Problem(_at(recipe, "reward_weights"), what, "give one weight for each of reward_funcs"))
    return problems


def _batch(recipe: Recipe) -> list[Problem]:
    if recipe["prompts_per_step"] is None:
        return []
    problems = []
    for key in ("gradient_accumulation_steps", "steps_per_generation", "generation_batch_size"):
        if recipe.given(key):
            what = f"'{key}' contradicts prompts_per_step, from which it is derived"
            problems.append(Problem(_at(recipe, key), what, f"remove {key} (or prompts_per_step)"))
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
        return [Problem(_at(recipe, "vllm_max_model_length"), what, fix)]
    return []


def _sampling(recipe: Recipe) -> list[Problem]:
    """Truncated sampling makes the server's log-probs those of another distribution than the trainer's."""
    if not recipe["use_vllm"] or not recipe["vllm_importance_sampling_correction"]:
        return []
    return [
        Problem(
            _at(recipe, key),
            f"{key} {recipe[key]} biases the importance-sampling correction (the trainer scores the full distribution)",
            f"write {key}: {neutral if neutral is not None else 'null'}, or vllm_importance_sampling_correction: false",
        )
        for key, neutral in _SAMPLING.items()
        if (recipe[key] or None) != (neutral or None)
    ]


def _unsupported(recipe: Recipe) -> list[Problem]:
    """Keys of TRL whose path through our server, checkpoints or model folder has not been shown to work."""
    refused = {
        "use_peft": "remove it; LoRA runs are not supported yet",
        "load_in_8bit": "remove it; quantized training is not supported",
        "load_in_4bit": "remove it; quantized training is not supported",
        "push_to_hub": "remove it and upload <run>/model yourself; publishing is not supported yet",
        "dataset_streaming": "remove it; streaming datasets are not supported yet",
        "save_only_model": "remove it; a checkpoint without optimizer cannot be resumed",
        "load_best_model_at_end": "remove it; the model of the last step is kept",
    }
    problems = [
        Problem(_at(recipe, key), f"'{key}' is not supported", fix) for key, fix in refused.items() if recipe[key]
    ]
    if recipe["eval_strategy"] != "no":
        fix = "remove it; evaluation during training is not supported yet"
        problems.append(Problem(_at(recipe, "eval_strategy"), "'eval_strategy' is not supported", fix))
    return problems


def _colocate(recipe: Recipe) -> list[Problem]:
    if recipe["vllm_mode"] == "colocate" and recipe.given("weight_sync"):
        what = "weight_sync has no meaning with vllm_mode: colocate (vLLM shares the trainer's process)"
        return [Problem(_at(recipe, "weight_sync"), what, "remove weight_sync")]
    return []


def _report(recipe: Recipe) -> list[Problem]:
    known = {"none", "wandb", "tensorboard"}
    names = recipe["report_to"] or []
    names = [names] if isinstance(names, str) else names
    return [
        Problem(_at(recipe, "report_to"), f"'{name}' is not supported", f"write one of {', '.join(sorted(known))}")
        for name in names
        if name not in known
    ]


def _environment(recipe: Recipe, environment: Mapping[str, str]) -> list[Problem]:
    model = environment.get("VLLM_MODEL")
    if model and model != recipe["model_name_or_path"]:
        what = f"the server would serve '{model}', the recipe trains '{recipe['model_name_or_path']}'"
        return [Problem("VLLM_MODEL", what, "unset VLLM_MODEL, or set model_name_or_path to it")]
    return []
