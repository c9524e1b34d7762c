"""Check a recipe before a job waits in a queue: run the rules, and compare the recipe with files and variables.

``rules`` has the rules about combinations of keys. The functions here also read the first rows of data files, the
user's code and the environment. No torch, no datasets, no socket.

    recipe = resolve_recipe("recipe.yaml", None, flags, os.environ, "cuda")  # a ConfigError lists all problems
    notes(recipe)  # remarks about a valid recipe
"""

import contextlib
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from grpo_recipes.errors import ConfigError, Problem, config_error
from grpo_recipes.paths import display_path, find_code_root, shell_quote
from grpo_recipes.recipe import (
    BrokenKey,
    Recipe,
    check_data,
    dynamic_sampling,
    learning,
    maxent,
    merge_recipe,
    objectives,
    overlap,
    rendering,
    row_filter,
    rules,
    sort_problems,
)  # fmt: skip
from grpo_recipes.recipe.check_data import HUB_NAME, LOCAL_PREFIXES
from grpo_recipes.recipe.converters import reward_fix
from grpo_recipes.recipe.datafiles import columns_of
from grpo_recipes.recipe.document import Value, read_flags
from grpo_recipes.recipe.extensions import entries, parts
from grpo_recipes.recipe.keys import DEFAULT_RECIPE, nearest_of
from grpo_recipes.recipe.model_kind import find_reward_model_fault, head_size_problems, kind_problems
from grpo_recipes.recipe.passed_on import passed_problems
from grpo_recipes.recipe.registry import (
    benchmark_columns,
    benchmark_problem,
    is_file,
    list_reward_models,
    rewards,
    rewards_in_children,
    rewards_with_server,
)
from grpo_recipes.recipe.rules import Idle, Rule, isolates_rewards
from grpo_recipes.recipe.shapes import COLUMN_KEYS
from grpo_recipes.recipe.sources import requested_sampler, sampler_of
from grpo_recipes.recipe.tasks import GRPO, requested_task, with_task
from grpo_recipes.recipe.teacher import teacher_problems
from grpo_recipes.recipe.user_code import copy_path, find_comparison, function_source, spec_problem
from grpo_recipes.recipe.weight_sync import sync_problems
from grpo_recipes.smoke import SMOKE_SCHEME, list_smoke_tasks

_DEFAULT_RECIPES = {"cpu": "recipes/smoke/{task}.yaml", "cuda": "recipes/Qwen2.5-1.5B-Instruct/{task}/config_math.yaml"}
_Check = Callable[[Recipe, Mapping[str, str]], Iterator[Problem]]


def check(recipe: Recipe, environment: Mapping[str, str], device: str | None = None) -> list[Problem]:
    """Return the problems of a recipe with its task, files, environment variables and device; empty if it is valid.

    ``device`` is None if it is unknown. Checks that need a key with an invalid value are skipped.
    """
    problems: list[Problem] = []
    rows = itertools.chain(
        rules.RULES,
        maxent.RULES,
        entries("rules"),
        overlap.RULES,
        dynamic_sampling.RULES,
        row_filter.RULES,
        objectives.RULES,
    )
    checks: list[_Check] = [*(functools.partial(_check_rule, row) for row in rows), *_CHECKS, *entries("checks")]
    checks += [functools.partial(function, device=device) for function in (sync_problems, head_size_problems)]
    for problems_of in checks:
        with contextlib.suppress(BrokenKey):  # the problem of that key is reported already
            problems += problems_of(recipe, environment)
    return problems


def _check_rule(rule: Rule, recipe: Recipe, _: Mapping[str, str]) -> Iterator[Problem]:
    """Yield the problems that one rule of the tables finds."""
    broken = rule.broken(recipe)
    for item in broken if isinstance(broken, list) else [""] if broken else []:
        key = rule.key.format(item=item)
        values = {name: value.value for name, value in recipe.values.items()}
        values |= {"item": item, "removal": rules.removal(recipe, key)}
        texts = (rule.message, rule.fix)
        message, fix = (text(recipe, item) if callable(text) else text.format(**values) for text in texts)
        yield recipe.problem(key, message, fix)


def choose_recipe(argument: str | None, environment: Mapping[str, str], task: str, device: str) -> Path:
    """Return the recipe file named on the command line (``argument``) or by CONFIG.

    Raise ConfigError if no recipe is named, or the file does not exist.

    A relative name is searched in the working folder and in the repository. training.sh sets GRPO_DEFAULT_RECIPE, and
    then the default recipe of the task and device is used. Other commands require a name, because the default would
    train a different model on the user's allocation.
    """
    where, name = ("RECIPE", argument) if argument else ("CONFIG", environment.get("CONFIG"))
    default = _DEFAULT_RECIPES[device].format(task=task)
    if not name and not environment.get(DEFAULT_RECIPE):
        local_files = sorted(path.name for path in Path().glob("[!.]*.yaml"))
        examples = ", ".join([*map(shell_quote, local_files[:5]), default]) if len(local_files) <= 5 else default
        raise config_error("RECIPE", "no recipe is named", f"name a recipe, e.g. {examples}, or export CONFIG=FILE")
    where, name = (where, name) if name else ("default recipe", str(find_code_root() / default))
    name = os.path.expanduser(name)  # few shells expand --config=~/my.yaml
    for path in (Path(name), find_code_root() / name):
        if os.path.isfile(path):  # Path.is_file raises OSError for a name that is too long
            return path
    if os.path.isdir(name):
        raise config_error(where, f"'{name}' is a folder", "name a .yaml file in it")
    similar = _find_similar_recipes(name, default, task)
    fix = f"write {'e.g. ' if len(similar) > 1 else ''}{', '.join(map(shell_quote, similar[:3]))}"
    fix = fix if similar else "name a .yaml file in the current folder or under recipes/"
    raise config_error(where, f"recipe '{name}' not found", fix)


def _find_similar_recipes(name: str, default: str, task: str) -> list[str]:
    """Return the recipe with a path similar to ``name``, or else the recipes with a similar file name, [] if none.

    ``default`` comes first, then recipes of ``task``.
    """
    same_folder = Path(name).parent.glob("*.yaml") if os.path.isdir(os.path.dirname(name) or ".") else ()
    packaged = (path.relative_to(find_code_root()) for path in (find_code_root() / "recipes").rglob("*.yaml"))
    paths = (*same_folder, *Path().glob("*.yaml"), *Path("recipes").rglob("*.yaml"), *packaged)
    known = {str(path) for path in paths if os.path.isfile(path) or os.path.isfile(find_code_root() / path)}
    if close := nearest_of(name, known):
        return [close]
    stem = nearest_of(Path(name).stem, {Path(path).stem for path in known})
    matches = (path for path in known if Path(path).stem == stem)
    return sorted(matches, key=lambda path: (path != default, f"/{task}/" not in path, path))


def resolve_recipe(
    name: str | None, task: str | None, flags: Iterable[str], environment: Mapping[str, str], device: str,
    keys: Mapping[str, Value] | None = None,
) -> Recipe:  # fmt: skip
    """Read a recipe, resolve its task, check and return it; raise ConfigError with all problems at once.

    ``name`` is the recipe on the command line, or None to use CONFIG or the default recipe. ``task`` is the value of
    ``--task``. ``keys`` are set by the entry point of another tool.
    """
    request = requested_task(environment, task)
    if not (name or environment.get("CONFIG") or environment.get(DEFAULT_RECIPE)):
        flag_problems: list[Problem] = []
        read_flags(flags := list(flags), flag_problems)  # the recipe may be named behind the flags
        if flag_problems:
            raise ConfigError(*flag_problems)
    path = choose_recipe(name, environment, request.task or GRPO, device)
    recipe, problems = merge_recipe(path, flags, environment, device, keys)
    recipe, task_problems = with_task(recipe, request)
    problems += task_problems + check(recipe, environment, device)
    if problems:
        raise ConfigError(*sort_problems(problems))
    return recipe


def _check_model(recipe: Recipe, environment: Mapping[str, str]) -> Iterator[Problem]:
    """Yield problems of the model, the reference model and the variable VLLM_MODEL.

    A name must be a local folder or have the form of a hub id. Nothing is downloaded.
    """
    key, fix = "model_name_or_path", "name a model folder or a hub id"
    if recipe.model.name.startswith(SMOKE_SCHEME):
        if recipe.model.name not in list_smoke_tasks():
            message = f"built-in model '{recipe.model.name}' not found"
            yield recipe.problem(key, message, f"write {' or '.join(list_smoke_tasks())}")
    elif message := _find_model_fault(recipe.model.name):
        yield recipe.problem(key, message, f"{fix}, e.g. Qwen/Qwen2.5-1.5B-Instruct")
    for frozen_key in ("ref_model_name_or_path", "teacher_model_name_or_path"):
        if message := _find_model_fault(recipe[frozen_key] or ""):
            yield recipe.problem(frozen_key, message, fix)
    for name in list_reward_models(recipe.rewards.funcs):
        path = os.path.expanduser(name)
        if message := _find_model_fault(name):
            yield recipe.problem("reward_funcs", message, fix)
        elif os.path.isdir(path) and (fault := find_reward_model_fault(path)):
            yield recipe.problem("reward_funcs", f"'{name}' can't be a reward: {fault}", fix)
    served = environment.get("VLLM_MODEL")
    if served and served != recipe[key]:
        message = f"must equal model_name_or_path '{recipe[key]}', got '{served}'"
        yield Problem("VLLM_MODEL", message, "unset VLLM_MODEL, or set model_name_or_path to it")


def _find_model_fault(name: str) -> str:
    """Return what is wrong with the name of a model; empty for a folder with a model, a hub id or an empty name."""
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        is_model = os.path.isfile(os.path.join(path, "config.json"))
        return "" if is_model else f"'{name}' has no config.json, so it is not a model folder"
    if not name or (HUB_NAME.fullmatch(name) and not os.path.exists(path)):
        return ""
    is_local = name.startswith(LOCAL_PREFIXES)
    return f"model folder '{name}' not found" if is_local else f"'{name}' is not a local folder or a hub id"


def _check_rounding(recipe: Recipe, environment: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a problem if weights in bfloat16 or float16, without a float32 copy, would lose their updates to rounding.

    With ``dtype: auto`` or a ``CONFIG_FILE``, the trainer decides (``trainers.rank``). ``accelerator: auto`` selects an
    accelerator that keeps float32 weights.
    """
    accelerator, mixed = recipe.processes.accelerator, learning.mixed_precision(recipe)
    if environment.get("CONFIG_FILE") or accelerator == "auto" or learning.updates_float32(accelerator, mixed):
        return
    dtype, rate = recipe.model.dtype or "auto", recipe.optimizer.learning_rate
    reason = learning.lost_updates(dtype, rate, recipe.optimizer.optim, recipe.optimizer.optim_args)
    if reason and learning.trains_weights_as_loaded(recipe):
        prefix = "lora_modules_to_save: " if recipe.lora.use_peft else ""
        message = f"{prefix}{reason}, and accelerator: {accelerator} keeps no float32 copy"
        yield recipe.problem("accelerator", message, learning.float32_fix(mixed))


def _check_user_code(recipe: Recipe, _: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a problem for each reward or callback that is unknown or can't be loaded; the user's code does not run.

    Code that the run directory already has a copy of is not checked.
    """
    run = recipe.path.parent
    for key, copies in (("reward_funcs", "rewards"), ("callbacks", "callbacks")):
        for name in () if key in recipe.broken else dict.fromkeys(recipe[key]):
            if ":" in name or key == "callbacks":
                copied = (run / "run.json").exists() and copy_path(name, run / copies).exists()
                if not copied and (problem := spec_problem(name, recipe.location(key))):
                    yield problem
            elif name not in rewards() and not list_reward_models([name]):
                yield recipe.problem(key, f"unknown reward '{name}'", reward_fix(name))


def reward_notes(recipe: Recipe) -> Iterator[str]:
    """Yield a note for each user reward that compares completions, but is called on one completion at a time."""
    for name in filter(lambda name: ":" in name, recipe.rewards.funcs):
        function = function_source(name) if recipe.rewards.isolation == "completion" else None
        if function is not None and (comparison := find_comparison(function)):
            call, line = comparison
            message = f"'{name}' compares completions ({call}, line {line}), but gets one at a time"
            yield f"{recipe.location('reward_funcs')}: {message}. To pass all at once, set reward_isolation: none"


def _check_benchmarks(recipe: Recipe, _: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a problem for each unknown name in ``benchmarks``, and for each benchmark file without usable columns."""
    source = requested_sampler(recipe)
    played = source.benchmarks(recipe.__getitem__) if source else []
    for name in dict.fromkeys(recipe.evaluation.benchmarks):
        where = recipe.location("benchmarks")
        by_sources = (other.benchmark_problem(name, where, recipe.__getitem__) for other in parts("prompt_source"))
        if problem := next(filter(None, by_sources), None) or benchmark_problem(name, where, played):
            yield problem
        elif is_file(name):
            try:
                columns = columns_of(Path(os.path.expanduser(name)), rows=1)
            except (OSError, ValueError) as error:
                yield recipe.problem("benchmarks", str(error), "write one JSON object a line")
                continue
            recipe_columns = (recipe[COLUMN_KEYS[0]], recipe[COLUMN_KEYS[1]])
            if columns is not None and benchmark_columns(columns, recipe_columns) is None:
                message = f"'{name}': expected the columns problem and answer, got {', '.join(columns) or 'none'}"
                fix = "rename the columns, or set dataset_prompt_column and dataset_solution_column"
                yield recipe.problem("benchmarks", message, fix)


def _check_reward_variables(recipe: Recipe, environment: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a problem for each variable in ``reward_environment`` that is not set."""
    for name in recipe.rewards.environment:
        if name not in environment:
            fix = f"export {name} first, or remove it from reward_environment"
            yield recipe.problem("reward_environment", f"environment variable {name} is not set", fix)


_CHECKS: tuple[_Check, ...] = (
    _check_model, kind_problems, _check_rounding, _check_user_code, check_data.reward_arguments,
    _check_reward_variables, _check_benchmarks, check_data.training_data, check_data.evaluation_data,
    row_filter.find_column_problem, rendering.prompt_problems, passed_problems, teacher_problems,
)  # fmt: skip

# fmt: off
_IDLE: tuple[Idle, ...] = (
    Idle("reward_timeout reward_memory_gib reward_workers",
        lambda r: rewards_in_children().isdisjoint(r.rewards.funcs) and not isolates_rewards(r),
        "a reward in a child process (math_verify, or your own)"),
    Idle("reward_concurrency",
        lambda r: rewards_with_server().isdisjoint(r.rewards.funcs) and not isolates_rewards(r),
        "a reward that calls a server, or your own in a child process"),
    Idle("reward_environment",
        lambda r: rewards_in_children().isdisjoint(r.rewards.funcs) and not isolates_rewards(r)
            and not ((source := sampler_of(r.__getitem__)) and source.uses_reward_variables(r.__getitem__)),
        "an environment, or your own reward in a child process"),
    Idle("benchmark_*", lambda r: not r.evaluation.benchmarks, "benchmarks"),
    Idle("maxent_length_normalize_ref", lambda r: maxent.targets_q(r) and r.maxent.beta == 0, "maxent_beta above 0"),
    Idle("hub_*", lambda r: not r.run.push_to_hub, "push_to_hub"),
    Idle("fsdp_cpu_offload", lambda r: r.processes.accelerator != "fsdp2", "accelerator: fsdp2"),
    Idle("eval_*", lambda r: not rules.evaluates(r), "eval_strategy"),
    Idle("wandb_*", lambda r: "wandb" not in rules.reports_to(r), "report_to: wandb"),
    Idle("project", lambda r: {"none", "tensorboard"}.issuperset(rules.reports_to(r)), "report_to: trackio or wandb"),
    Idle("weight_sync_timeout vllm_server_host vllm_server_port vllm_group_port vllm_node vllm_gpu "
        "vllm_gpu_memory_utilization vllm_tensor_parallel_size vllm_data_parallel_size* vllm_max_model_length "
        "vllm_max_num_seqs vllm_args server_restarts server_stall_timeout",
        rules.uses_external_server, "a server that the launch starts (vllm_server_base_url is external)"),
    Idle("server_backend", lambda r: not rules.uses_external_server(r), "vllm_server_base_url"),
    Idle("max_concurrent_requests", lambda r: not rules.uses_external_server(r) and not rules.starts_server(r),
        "a vLLM server"),
    Idle("vllm_* weight_sync* weight_guard*", lambda r: not r.server.use_vllm, "use_vllm: true"),
)
# fmt: on
_SHARED_KEYS = ("max_completion_length", "reward_timeout", "reward_memory_gib")  # not only arguments of some rewards


def notes(recipe: Recipe) -> list[str]:
    """Return remarks about a valid recipe that the user should read before its job waits in a queue, a line each."""
    lines = [*recipe.notes, *filter(None, [maxent.limit_note(recipe)])]
    group, accumulation = recipe.batch.num_generations, recipe.batch.gradient_accumulation_steps
    rows_per_process = recipe.batch.per_device_train_batch_size * (recipe.batch.steps_per_generation or accumulation)
    multiple = group // math.gcd(group, rows_per_process)
    if multiple > 1 and recipe.batch.prompts_per_step is None and recipe.batch.generation_batch_size is None:
        lines.append(
            f"the batch has whole groups of {group} only if the number of training processes is a multiple of "
            f"{multiple}; prompts_per_step gives the same batch for every number"
        )
    if learning.MIN_FRACTION <= (fraction := learning.reached_fraction(recipe)) < 1:
        schedule = f"warmup_steps {recipe.optimizer.warmup_steps:g} with max_steps {recipe.batch.max_steps}"
        lines.append(f"{schedule}: the learning rate reaches {fraction:.0%} of learning_rate")
    nan_filter = "logging_nan_inf_filter"
    if recipe.is_set(nan_filter) and recipe[nan_filter]:
        reason = "a loss that is not finite ends the run before the step"
        lines.append(f"{recipe.location(nan_filter)}: {nan_filter} hides nothing here: {reason}")
    lines_of_file = f"{display_path(recipe.path)}:"
    for key in recipe.values:
        source = recipe.source(key)
        # A base file sets keys for different recipes, and the shell's variables apply to every run: no notes for them.
        in_this_file = source.startswith(lines_of_file)
        if (in_this_file or recipe.values[key].from_flag) and (requirement := missing_requirement(recipe, key)):
            lines.append(f"{source}: {key} does nothing without {requirement}")
    return lines


def missing_requirement(recipe: Recipe, key: str) -> str:
    """Return the setting without which ``key`` does nothing, as text, or "" if the recipe has the setting."""
    readers = [name for name, reward in rewards().items() if key in reward.keys]
    if readers and key not in _SHARED_KEYS:
        return "" if set(readers) & set(recipe.rewards.funcs) else " or ".join(readers)
    rows = (row for row in (*entries("idle"), *_IDLE) if key in rules.matching_keys(row.keys))
    return next((row.requirement for row in rows if key != row.requirement and row.is_idle(recipe)), "")
