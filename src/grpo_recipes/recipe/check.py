"""What a recipe must hold beyond the type of each key: the table in ``rules``, and what files and variables show.

Pure: no torch, no datasets, no socket; only the head of a data file is read. Otherwise a job would wait for hours in a
queue, and then fail on the typo of a column.
"""

import contextlib
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from grpo_recipes.errors import ConfigError, Problem, config_error
from grpo_recipes.paths import display_path, home, shell_quote
from grpo_recipes.recipe import (
    BrokenKey,
    Recipe,
    check_data,
    learning,
    maxent,
    merge_recipe,
    overlap,
    rendering,
    rules,
    sort_problems,
)  # fmt: skip
from grpo_recipes.recipe.check_data import HUB_NAME, LOCAL_PREFIXES
from grpo_recipes.recipe.converters import reward_fix
from grpo_recipes.recipe.datafiles import columns_of
from grpo_recipes.recipe.document import Value, read_flags
from grpo_recipes.recipe.extensions import entries, parts
from grpo_recipes.recipe.head_size import head_size_problems
from grpo_recipes.recipe.keys import DEFAULT_RECIPE, nearest_of
from grpo_recipes.recipe.model_kind import kind_problems
from grpo_recipes.recipe.passed_on import passed_problems
from grpo_recipes.recipe.registry import (
    benchmark_columns,
    benchmark_problem,
    is_file,
    rewards,
    rewards_in_children,
)
from grpo_recipes.recipe.rules import Idle, Rule, isolates_rewards
from grpo_recipes.recipe.shapes import COLUMN_KEYS
from grpo_recipes.recipe.sources import requested_source, source_of
from grpo_recipes.recipe.tasks import GRPO, requested_task, with_task
from grpo_recipes.recipe.user_code import copy_path, find_comparison, function_source, spec_problem
from grpo_recipes.recipe.weight_sync import sync_problems
from grpo_recipes.smoke import SMOKE_SCHEME, smoke_tasks

_DEFAULT_RECIPES = {"cpu": "recipes/smoke/{task}.yaml", "cuda": "recipes/Qwen2.5-1.5B-Instruct/{task}/config_math.yaml"}
_Check = Callable[[Recipe, Mapping[str, str]], Iterator[Problem]]


def check(recipe: Recipe, environment: Mapping[str, str], device: str | None = None) -> list[Problem]:
    """Return every contradiction between keys of a recipe, and with its task, the user's variables and the device."""
    problems: list[Problem] = []
    rows = itertools.chain(rules.RULES, maxent.RULES, entries("rules"), overlap.RULES)
    checks: list[_Check] = [*(functools.partial(_refused, row) for row in rows), *_CHECKS, *entries("checks")]
    checks += [functools.partial(of_device, device=device) for of_device in (sync_problems, head_size_problems)]
    for rule in checks:
        with contextlib.suppress(BrokenKey):  # reported already; a rule that reads a broken key cannot be judged
            problems += rule(recipe, environment)
    return problems


def _refused(rule: Rule, recipe: Recipe, _: Mapping[str, str]) -> Iterator[Problem]:
    """Yield what a row of the table refuses."""
    broken = rule.broken(recipe)
    for item in broken if isinstance(broken, list) else [""] if broken else []:
        key = rule.key.format(item=item)
        words = {name: value.value for name, value in recipe.values.items()}
        words |= {"item": item, "removal": rules.removal(recipe, key)}
        what, fix = (text(recipe, item) if callable(text) else text.format(**words) for text in (rule.what, rule.fix))
        yield recipe.problem(key, what, fix)


def choose_recipe(given: str | None, environment: Mapping[str, str], task: str, device: str) -> Path:
    """Return the recipe named on the command line or by CONFIG; it must exist.

    Where training.sh started us, none is the default one of the device. Elsewhere a forgotten name is asked for: the
    default would train another model on somebody's allocation.
    """
    where, name = ("RECIPE", given) if given else ("CONFIG", environment.get("CONFIG"))
    default = _DEFAULT_RECIPES[device].format(task=task)
    if not name and not environment.get(DEFAULT_RECIPE):
        here = sorted(path.name for path in Path().glob("[!.]*.yaml"))
        known = ", ".join([*map(shell_quote, here[:5]), default]) if len(here) <= 5 else default
        raise config_error("RECIPE", "none is named", f"name one, e.g. {known}, or export CONFIG=FILE")
    where, name = (where, name) if name else ("default recipe", str(home() / default))
    name = os.path.expanduser(name)  # of --config=~/my.yaml, which few shells expand
    for path in (Path(name), home() / name):
        if os.path.isfile(path):  # of Path itself a name too long raises OSError
            return path
    if os.path.isdir(name):
        raise config_error(where, f"'{name}' is a folder", "name a .yaml file in it")
    close = _close_recipes(name, default, task)
    several = "e.g. " if len(close) > 1 else ""
    nearest = f"write {several}{', '.join(map(shell_quote, close[:3]))}"
    fix = nearest if close else "name a .yaml file, from the folder where you are or under recipes/"
    raise config_error(where, f"there is no recipe '{name}'", fix)


def _close_recipes(name: str, default: str, task: str) -> list[str]:
    """Return the recipe whose path is misspelt, or those of nearly this file name, the default and the task's first."""
    beside = Path(name).parent.glob("*.yaml") if os.path.isdir(os.path.dirname(name) or ".") else ()
    ours = (path.relative_to(home()) for path in (home() / "recipes").rglob("*.yaml"))
    paths = (*beside, *Path().glob("*.yaml"), *Path("recipes").rglob("*.yaml"), *ours)
    known = {str(path) for path in paths if os.path.isfile(path) or os.path.isfile(home() / path)}
    if close := nearest_of(name, known):
        return [close]
    stem = nearest_of(Path(name).stem, {Path(path).stem for path in known})
    alike = (path for path in known if Path(path).stem == stem)
    return sorted(alike, key=lambda path: (path != default, f"/{task}/" not in path, path))


def resolve_recipe(
    name: str | None, task: str | None, flags: Iterable[str], environment: Mapping[str, str], device: str,
    keys: Mapping[str, Value] | None = None,
) -> Recipe:  # fmt: skip
    """Read the recipe of that name, resolve its task and check it; a ConfigError reports all that is wrong at once."""
    asked, stray = requested_task(environment, task), list[Problem]()
    if not (name or environment.get("CONFIG") or environment.get(DEFAULT_RECIPE)):
        read_flags(flags := list(flags), stray)  # a recipe behind the flags was named, at the wrong place
        if stray:
            raise ConfigError(*stray)
    path = choose_recipe(name, environment, asked.task or GRPO, device)
    recipe, problems = merge_recipe(path, flags, environment, device, keys)
    recipe, contradictions = with_task(recipe, asked)
    problems += contradictions + check(recipe, environment, device)
    if problems:
        raise ConfigError(*sort_problems(problems))
    return recipe


def _model(recipe: Recipe, environment: Mapping[str, str]) -> Iterator[Problem]:
    key, model = "model_name_or_path", recipe["model_name_or_path"] or ""
    path = os.path.expanduser(model)
    if model.startswith(SMOKE_SCHEME):
        if model not in smoke_tasks():
            yield recipe.problem(key, f"there is no built-in '{model}'", f"write {' or '.join(smoke_tasks())}")
    elif model and not os.path.isdir(path) and not (HUB_NAME.fullmatch(model) and not os.path.exists(path)):
        local = model.startswith(LOCAL_PREFIXES)
        what = f"no folder '{model}'" if local else f"'{model}' is neither a folder here nor a hub id"
        yield recipe.problem(key, what, "name a model folder or a hub id, e.g. Qwen/Qwen2.5-1.5B-Instruct")
    reference = recipe["ref_model_name_or_path"]
    path = os.path.expanduser(reference or "")
    if reference and not os.path.isdir(path) and (os.path.exists(path) or not HUB_NAME.fullmatch(reference)):
        what = f"'{reference}' is neither a folder here nor a hub id"
        yield recipe.problem("ref_model_name_or_path", what, "name a model folder or a hub id")
    served = environment.get("VLLM_MODEL")
    if served and served != recipe[key]:
        what = f"the server would serve '{served}', the recipe trains '{recipe[key]}'"
        yield Problem("VLLM_MODEL", what, "unset VLLM_MODEL, or set model_name_or_path to it")


def _rounded_away(recipe: Recipe, environment: Mapping[str, str]) -> Iterator[Problem]:
    """Refuse weights whose updates are rounded away: bfloat16 or float16 ones, updated as they are.

    Of ``dtype: auto`` and of a ``CONFIG_FILE`` the trainer decides (``trainers.rank``); ``accelerator: auto`` takes one
    that keeps float32 weights.
    """
    accelerator, mixed = recipe["accelerator"], learning.mixed_precision(recipe)
    if environment.get("CONFIG_FILE") or accelerator == "auto" or learning.updates_float32(accelerator, mixed):
        return
    dtype, rate = recipe["dtype"] or "auto", recipe["learning_rate"]
    lost = learning.lost_updates(dtype, rate, recipe["optim"], recipe["optim_args"])
    if lost and learning.trains_weights_as_loaded(recipe):
        of_copies = "lora_modules_to_save: " if recipe["use_peft"] else ""
        what = f"{of_copies}{lost}, and accelerator: {accelerator} keeps no float32 copy"
        yield recipe.problem("accelerator", what, learning.float32_fix(mixed))


def _user_code(recipe: Recipe, _: Mapping[str, str]) -> Iterator[Problem]:
    """Check rewards and callbacks: the user's code is read and not run, and a run keeps a copy of it."""
    run = recipe.path.parent
    for key, copies in (("reward_funcs", "rewards"), ("callbacks", "callbacks")):
        for name in () if key in recipe.broken else dict.fromkeys(recipe[key]):
            if ":" in name or key == "callbacks":
                copied = (run / "run.json").exists() and copy_path(name, run / copies).exists()
                if not copied and (problem := spec_problem(name, recipe.location(key))):
                    yield problem
            elif name not in rewards():
                yield recipe.problem(key, f"no reward '{name}'", reward_fix(name))


def reward_notes(recipe: Recipe) -> Iterator[str]:
    """Yield a note for each reward of the user's that compares completions, and is called with one at a time."""
    for name in filter(lambda name: ":" in name, recipe["reward_funcs"]):
        function = function_source(name) if recipe["reward_isolation"] == "completion" else None
        if function is not None and (found := find_comparison(function)):
            what = f"'{name}' compares completions ({found[0]}, line {found[1]}), and gets one at a time"
            yield f"{recipe.location('reward_funcs')}: {what}: write reward_isolation: none where it is to see all"


def _benchmarks(recipe: Recipe, _: Mapping[str, str]) -> Iterator[Problem]:
    source = requested_source(recipe)
    played = source.benchmarks(recipe.__getitem__) if source else []
    for name in dict.fromkeys(recipe["benchmarks"]):
        where = recipe.location("benchmarks")
        of_sources = (other.benchmark_problem(name, where, recipe.__getitem__) for other in parts("prompt_source"))
        if problem := next(filter(None, of_sources), None) or benchmark_problem(name, where, played):
            yield problem
        elif is_file(name):
            try:
                names = columns_of(Path(os.path.expanduser(name)), rows=1)
            except (OSError, ValueError) as error:
                yield recipe.problem("benchmarks", str(error), "write one JSON object a line")
                continue
            if names is not None and benchmark_columns(names, (recipe[COLUMN_KEYS[0]], recipe[COLUMN_KEYS[1]])) is None:
                what = f"'{name}' has the columns {', '.join(names) or 'none'}, not problem and answer"
                fix = "rename them, or name them as dataset_prompt_column and dataset_solution_column"
                yield recipe.problem("benchmarks", what, fix)


def _handed_variables(recipe: Recipe, environment: Mapping[str, str]) -> Iterator[Problem]:
    for name in recipe["reward_environment"]:
        if name not in environment:
            fix = f"export {name} first, or remove it from reward_environment"
            yield recipe.problem("reward_environment", f"there is no variable '{name}' to hand on", fix)


_CHECKS: tuple[_Check, ...] = (
    _model, kind_problems, _rounded_away, _user_code, check_data.reward_arguments, _handed_variables,
    _benchmarks, check_data.training_data, check_data.evaluation_data, rendering.prompt_problems, passed_problems,
)  # fmt: skip

# fmt: off
_IDLE: tuple[Idle, ...] = (
    Idle("reward_timeout reward_memory_gib reward_workers",
        lambda r: rewards_in_children().isdisjoint(r["reward_funcs"]) and not isolates_rewards(r),
        "a reward in a child process (math_verify, or your own)"),
    Idle("reward_concurrency", lambda r: not isolates_rewards(r), "a reward of your own in a child process"),
    Idle("reward_environment",
        lambda r: not isolates_rewards(r) and not ((source := source_of(r.__getitem__))
            and source.uses_reward_variables(r.__getitem__)),
        "an environment, or a reward of your own in a child process"),
    Idle("benchmark_*", lambda r: not r["benchmarks"], "benchmarks"),
    Idle("maxent_length_normalize_ref", lambda r: maxent.targets_q(r) and r["maxent_beta"] == 0, "maxent_beta above 0"),
    Idle("hub_*", lambda r: not r["push_to_hub"], "push_to_hub"),
    Idle("fsdp_cpu_offload", lambda r: r["accelerator"] != "fsdp2", "accelerator: fsdp2"),
    Idle("eval_*", lambda r: not rules.evaluates(r), "eval_strategy"),
    Idle("wandb_*", lambda r: "wandb" not in rules.reports_to(r), "report_to: wandb"),
    Idle("weight_sync_timeout vllm_server_host vllm_server_port vllm_group_port vllm_node vllm_gpu "
        "vllm_gpu_memory_utilization vllm_tensor_parallel_size vllm_max_model_length vllm_max_num_seqs "
        "server_restarts server_stall_timeout",
        rules.uses_external_server, "a server that the launch starts (vllm_server_base_url names another)"),
    Idle("server_backend", lambda r: not rules.uses_external_server(r), "vllm_server_base_url"),
    Idle("max_concurrent_requests", lambda r: not rules.uses_external_server(r) and not rules.starts_server(r),
        "a vLLM server"),
    Idle("vllm_* weight_sync* weight_guard*", lambda r: not r["use_vllm"], "use_vllm: true"),
)
# fmt: on


def notes(recipe: Recipe) -> list[str]:
    """Return what is worth knowing of a right recipe before its job waits in a queue, a line each."""
    found = [*recipe.notes, *filter(None, [maxent.limit_note(recipe)])]
    group, accumulation = recipe["num_generations"], recipe["gradient_accumulation_steps"]
    one = recipe["per_device_train_batch_size"] * (recipe["steps_per_generation"] or accumulation)
    multiple = group // math.gcd(group, one)
    if multiple > 1 and recipe["prompts_per_step"] is None and recipe["generation_batch_size"] is None:
        found.append(
            f"the batch is whole groups of {group} with a multiple of {multiple} training processes only; "
            "prompts_per_step makes it the same for every number"
        )
    if learning.MIN_FRACTION <= (share := learning.reached_fraction(recipe)) < 1:
        schedule = f"warmup_steps {recipe['warmup_steps']:g} with max_steps {recipe['max_steps']}"
        found.append(f"{schedule}: the learning rate reaches {share:.0%} of learning_rate")
    hidden = "logging_nan_inf_filter"
    if recipe.is_set(hidden) and recipe[hidden]:
        why = "a loss that is not finite ends the run before the step is taken"
        found.append(f"{recipe.location(hidden)}: {hidden} hides nothing here: {why}")
    for key in recipe.values:
        source = recipe.source(key)
        # A base sets keys for recipes that differ, and the shell's variables are there for every run.
        of_file = source.startswith(f"{display_path(recipe.path)}:")
        if (of_file or recipe.values[key].from_flag) and (needed := missing_requirement(recipe, key)):
            found.append(f"{source}: {key} does nothing without {needed}")
    return found


def missing_requirement(recipe: Recipe, key: str) -> str:
    """Return what the recipe lacks for a key to do anything, or an empty text."""
    readers = [name for name, reward in rewards().items() if key in reward.keys and key != "max_completion_length"]
    if readers:
        return "" if set(readers) & set(recipe["reward_funcs"]) else " or ".join(readers)
    rows = (row for row in (*entries("idle"), *_IDLE) if key in rules.matching_keys(row.keys) and key != row.needed)
    return next((row.needed for row in rows if row.idle(recipe)), "")
