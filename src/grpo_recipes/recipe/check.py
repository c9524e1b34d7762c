"""What a recipe must hold beyond the type of each key: the tables of ``rules``, and the rules that compute more.

Pure: no torch, no socket.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from grpo_recipes.errors import ConfigError, Problem
from grpo_recipes.recipe import BrokenKey, Recipe, in_order, learning, merge_recipe
from grpo_recipes.recipe.check_data import DATA_RULES, is_hub_name
from grpo_recipes.recipe.keys import catalogue
from grpo_recipes.recipe.registry import (
    OBJECTIVES,
    REWARDS,
    SCALE_REWARDS,
    benchmark_columns,
    benchmark_problem,
    is_file,
)
from grpo_recipes.recipe.rules import broken_rules, objective_of, removal, reports_to
from grpo_recipes.recipe.tasks import RequestedTask, with_task
from grpo_recipes.recipe.user_code import copy_path, problem_with
from grpo_recipes.smoke import SMOKE_SCHEME, SMOKE_TASKS

_NEUTRAL_SAMPLING = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
_RUN_NAME = re.compile(r"\w[^/\x00-\x1f]*")
_LONGEST_NAME = 100  # a folder's may have 255 bytes, and a time and more come behind it
_REPORTERS = ("none", "tensorboard", "wandb")
_EMBEDDINGS = ("lm_head", "embed_tokens", "wte", "embed_in", "embed_out")
# How accelerate could deal out batches otherwise than TRL's sampler, whose rows are whole groups in the ranks' order.
_DEALING = {
    "split_batches": "each rank would get a part of its own rows, and would sample the same prompts again",
    "dispatch_batches": "accelerate sends tensors alone to the other ranks, and prompts are texts",
}
_PART = r"[A-Za-z0-9](?:[\w.-]{0,94}[A-Za-z0-9_])?"
_REPOSITORY = re.compile(rf"(?!.*(?:--|\.\.|\.git$))(?:{_PART}/)?{_PART}")
_BRANCH = re.compile(r"(?![0-9a-f]{40}$)[\w][\w./-]{0,200}")


def check(recipe: Recipe, environment: Mapping[str, str]) -> list[Problem]:
    """Return every contradiction between keys of a recipe with its task, and with the user's variables."""
    problems = list(broken_rules(recipe))
    for rule in (*_RULES, *DATA_RULES):
        with contextlib.suppress(BrokenKey):  # reported already; a rule that reads a broken key cannot be judged
            problems += rule(recipe)
    for rule_of_environment in (_environment, learning.rounded_away):
        with contextlib.suppress(BrokenKey):
            problems += rule_of_environment(recipe, environment)
    return problems


def checked_recipe(path: Path, flags: Iterable[str], environment: Mapping[str, str], asked: RequestedTask) -> Recipe:
    """Read a recipe, resolve its task and check it; a ConfigError reports everything that is wrong at once."""
    recipe, problems = merge_recipe(path, flags, environment)
    recipe, contradictions = with_task(recipe, asked)
    problems += contradictions + check(recipe, environment)
    if problems:
        raise ConfigError(*in_order(problems))
    return recipe


def _environment(recipe: Recipe, environment: Mapping[str, str]) -> Iterator[Problem]:
    model = environment.get("VLLM_MODEL")
    if model and model != recipe["model_name_or_path"]:
        what = f"the server would serve '{model}', the recipe trains '{recipe['model_name_or_path']}'"
        yield Problem("VLLM_MODEL", what, "unset VLLM_MODEL, or set model_name_or_path to it")


def _model(recipe: Recipe) -> Iterator[Problem]:
    model = recipe["model_name_or_path"] or ""
    fix = "name a model folder or a hub id, e.g. Qwen/Qwen2.5-1.5B-Instruct"
    path = os.path.expanduser(model)
    if model.startswith(SMOKE_SCHEME):
        if model not in SMOKE_TASKS:
            what = f"there is no built-in '{model}'"
            yield recipe.problem("model_name_or_path", what, f"write {' or '.join(SMOKE_TASKS)}")
    elif model and not os.path.isdir(path) and not (is_hub_name(model) and not os.path.exists(path)):
        local = model.startswith(("/", "./", "../", "~"))
        what = f"no folder '{model}'" if local else f"'{model}' is neither a folder here nor a hub id"
        yield recipe.problem("model_name_or_path", what, fix)


def _rewards(recipe: Recipe) -> Iterator[Problem]:
    """Check each reward: a name of ours, or the user's, whose code is read and not run."""
    names = recipe["reward_funcs"]
    for name in dict.fromkeys(names):
        if ":" in name:
            yield from _user_code(recipe, "reward_funcs", name, "rewards")
        elif name not in REWARDS:
            fix = f"write one of {', '.join(sorted(REWARDS))}, or your own as module:function or file.py:function"
            if "." in name:
                fix = f"write {name}:function" if name.endswith(".py") else f"write {':'.join(name.rsplit('.', 1))}"
            yield recipe.problem("reward_funcs", f"no reward '{name}'", fix)
        if names.count(name) > 1:
            what = f"reward '{name}' is named {names.count(name)} times"
            yield recipe.problem("reward_funcs", what, "name it once, with a weight in reward_weights")


def _callbacks(recipe: Recipe) -> Iterator[Problem]:
    for spec in recipe["callbacks"]:
        yield from _user_code(recipe, "callbacks", spec, "callbacks")


def _user_code(recipe: Recipe, key: str, spec: str, copies: str) -> Iterator[Problem]:
    """Check the user's code, which a run has a copy of from its beginning."""
    run = recipe.path.parent
    if not ((run / "run.json").exists() and copy_path(spec, run / copies).exists()):
        problem = problem_with(spec, recipe.place(key))
        if problem:
            yield problem


def _lengths(recipe: Recipe) -> Iterator[Problem]:
    limit, completion = recipe["vllm_max_model_length"], recipe["max_completion_length"]
    prompt = recipe["max_prompt_length"] or 1
    if recipe["use_vllm"] and None not in (limit, completion) and prompt + completion > limit:
        what = f"prompt {prompt} + completion {completion} tokens exceed the server's {limit}"
        fix = f"write vllm_max_model_length: {prompt + completion} or shorten max_prompt_length"
        yield recipe.problem("vllm_max_model_length", what, fix)


def _sampling(recipe: Recipe) -> Iterator[Problem]:
    """Refuse truncated sampling, by which the server's log-probs are of another distribution than the trainer's."""
    if not recipe["use_vllm"] or not recipe["vllm_importance_sampling_correction"]:
        return
    for key, neutral in _NEUTRAL_SAMPLING.items():
        if (recipe[key] or None) != (neutral or None):
            what = f"{key} {recipe[key]} biases the importance-sampling correction"
            fix = f"write {key}: {json.dumps(neutral)}, or vllm_importance_sampling_correction: false"
            yield recipe.problem(key, f"{what} (the trainer scores the full distribution)", fix)


def _run_name(recipe: Recipe) -> Iterator[Problem]:
    name = recipe["run_name"]
    if name is not None and not (_RUN_NAME.fullmatch(name) and len(name.encode()) <= _LONGEST_NAME):
        what = f"run_name '{name[:_LONGEST_NAME]}' cannot be the name of a folder"
        fix = f"begin with a letter or digit, without '/' or line ends, at most {_LONGEST_NAME} bytes"
        yield recipe.problem("run_name", what, fix)


def _ports(recipe: Recipe) -> Iterator[Problem]:
    taken: dict[int, str] = {}
    for key in ("vllm_server_port", "vllm_group_port", "main_process_port"):
        if recipe.given(key) and (other := taken.setdefault(recipe[key], key)) != key:
            yield recipe.problem(key, f"{key} is {recipe[key]}, and so is {other}", "give each its own, or remove them")


def _report_to(recipe: Recipe) -> Iterator[Problem]:
    for name in reports_to(recipe):
        if name not in _REPORTERS:
            yield recipe.problem("report_to", f"'{name}' is not supported", f"write one of {', '.join(_REPORTERS)}")


def _dealing(recipe: Recipe) -> Iterator[Problem]:
    for name, why in _DEALING.items():
        if (recipe["accelerator_config"] or {}).get(name):
            yield recipe.problem("accelerator_config", f"with {name}: true {why}", f"remove {name}")


def _lora_layers(recipe: Recipe) -> Iterator[Problem]:
    """Refuse adapters on embeddings; whether the model has the other layers shows with its configuration."""
    for name in recipe["lora_target_modules"] or () if recipe["use_peft"] else ():
        if name.rpartition(".")[2] in _EMBEDDINGS:
            what = f"an adapter on '{name}' is not supported: log-probs are computed from the layer's own weights"
            fix = "name linear layers between the embeddings, e.g. [q_proj, v_proj], or [all-linear]"
            yield recipe.problem("lora_target_modules", what, fix)


def _benchmarks(recipe: Recipe) -> Iterator[Problem]:
    names = recipe["benchmarks"]
    for name in dict.fromkeys(names):
        problem = benchmark_problem(name, recipe.place("benchmarks")) or _benchmark_file(recipe, name)
        if problem:
            yield problem
        if names.count(name) > 1:
            yield recipe.problem("benchmarks", f"'{name}' is listed twice", "keep one")


def _benchmark_file(recipe: Recipe, name: str) -> Problem | None:
    if not is_file(name):
        return None
    path = Path(os.path.expanduser(name))
    with path.open(encoding="utf-8", errors="replace") as file:
        first = file.readline()
    try:
        names = list(dict(json.loads(first)))
    except (ValueError, TypeError):
        return recipe.problem("benchmarks", f"'{path}' does not begin with a JSON object", "write one a line")
    if benchmark_columns(names, (recipe["dataset_prompt_column"], recipe["dataset_solution_column"])) is None:
        what = f"'{path.name}' has the columns {', '.join(names)}, not problem and answer"
        fix = "rename them, or name them as dataset_prompt_column and dataset_solution_column"
        return recipe.problem("benchmarks", what, fix)
    return None


def _publishing(recipe: Recipe) -> Iterator[Problem]:
    """Refuse names that the hub would refuse when the model is trained."""
    name, branch = recipe["hub_model_id"], recipe["hub_revision"]
    if recipe["push_to_hub"] and name is not None and not _REPOSITORY.fullmatch(name):
        fix = "write user/name: letters, digits, '-', '_' and '.', at most 96 each, without '--' and '..'"
        yield recipe.problem("hub_model_id", f"'{name}' is not the name of a repository", fix)
    if recipe["push_to_hub"] and branch is not None and not _BRANCH.fullmatch(branch):
        what = f"a push goes to a branch, '{branch}' is not one"
        yield recipe.problem("hub_revision", what, "write the name of a branch, or remove it")


def _unread_by_objective(recipe: Recipe) -> Iterator[Problem]:
    """Refuse MaxEnt keys that another objective reads."""
    objective = objective_of(recipe)
    for key in catalogue() if objective else ():
        if key.startswith("maxent_") and recipe.given(key) and objective and key not in objective.keys:
            readers = " or ".join(name for name, other in sorted(OBJECTIVES.items()) if key in other.keys)
            what = f"'{key}' changes nothing under maxent_objective: {recipe['maxent_objective']}"
            yield recipe.problem(key, what, f"{removal(recipe, key)}, or write maxent_objective: {readers}")


def _fixed_by_objective(recipe: Recipe) -> Iterator[Problem]:
    """Refuse keys of TRL that the objective fixes to another value."""
    objective = objective_of(recipe)
    if objective is None:
        return
    fixed = {
        "loss_type": objective.loss_type(recipe["maxent_length_normalize_policy"]),
        "scale_rewards": SCALE_REWARDS,
        "multi_objective_aggregation": "sum_then_normalize",
    }
    for key, value in fixed.items():
        if recipe.given(key) and recipe[key] != value:
            what = f"{key}: {recipe[key]} contradicts maxent_objective: {recipe['maxent_objective']}"
            yield recipe.problem(key, f"{what}, whose {key} is {value}", removal(recipe, key))


def _tau_controller(recipe: Recipe) -> Iterator[Problem]:
    """Check the controller that moves tau to hold an entropy or an effective number of completions."""
    objective, rollouts, entropy = objective_of(recipe), "maxent_target_eff_rollouts", "maxent_target_weight_entropy"
    targets = [key for key in (entropy, rollouts) if recipe[key] is not None]
    if objective is None or not targets:
        return
    if len(targets) == 2:
        what = f"{entropy} and {rollouts} are both given, one tau holds one of them"
        yield recipe.problem(rollouts, what, "keep one of the two")
        return
    (key,) = targets
    group = recipe["num_generations"]
    of_equal = {rollouts: ("num_generations", 1, group), entropy: ("log(num_generations)", 0, math.log(group))}
    name, least, most = of_equal[key]
    if recipe[key] <= least:
        what = f"{key} {recipe[key]:g} is that of all weight on one completion, which no tau above 0 has"
        yield recipe.problem(key, what, f"write more than {least}")
    elif recipe[key] > most:
        what = f"{key} {recipe[key]:g} is more than {name} ({most:g}), that of equal weights"
        yield recipe.problem(key, what, f"write less than {most:g}")
    yield from _first_tau(recipe, objective.tau_or_default(recipe["maxent_tau"]))


def _first_tau(recipe: Recipe, tau: float) -> Iterator[Problem]:
    """Refuse a tau from which the controller cannot start."""
    low, high = recipe["maxent_tau_min"], recipe["maxent_tau_max"]
    if low > high:
        yield recipe.problem(
            "maxent_tau_min", f"maxent_tau_min {low:g} is above maxent_tau_max {high:g}", "swap the two"
        )
    if tau == 0 or math.isinf(tau):
        what = f"the controller multiplies tau, which stays {tau:g}"
        yield recipe.problem("maxent_tau", what, "write a maxent_tau above 0 and below .inf, e.g. 0.2")
    elif low <= high and not low <= tau <= high:
        key = "maxent_tau_min" if tau < low else "maxent_tau_max"
        place = next((name for name in ("maxent_tau", key) if recipe.given(name)), key)
        what = f"tau starts at {tau:g}, outside of maxent_tau_min {low:g} and maxent_tau_max {high:g}"
        yield recipe.problem(place, what, f"write a maxent_tau between them, or another {key}")


_RULES: tuple[Callable[[Recipe], Iterator[Problem]], ...] = (
    _model, _rewards, _callbacks, _lengths, _sampling, _run_name, _ports, _report_to, _dealing, _lora_layers,
    _benchmarks, _publishing, _unread_by_objective, _fixed_by_objective, _tau_controller, learning.warmup,
)  # fmt: skip
