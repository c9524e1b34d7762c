"""Check recipes with Atropos: rules as a table, then checks that look at files and installed packages.

No torch and no socket. The checks find out whether atroposlib is installed, but do not import it.
"""

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import replace

from grpo_recipes.errors import Problem
from grpo_recipes.extensions.atropos.arguments import AtroposKeys
from grpo_recipes.extensions.atropos.fields import find_argument_problems, read_configuration
from grpo_recipes.extensions.atropos.packing import predict_deadlock
from grpo_recipes.extensions.atropos.recipe import (
    ATROPOS_ENVIRONMENTS,
    AtroposEnvironment,
    find_trajectory_limit,
    list_environments,
    starts_run_api,
)
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.keys import catalogue, environment_keys, nearest_of
from grpo_recipes.recipe.registry import SOURCE_REWARD
from grpo_recipes.recipe.rules import OF_DATASETS, Rule, evaluates, is_url, set_by_user, uses_external_server
from grpo_recipes.recipe.sources import Lookup, PromptSource
from grpo_recipes.recipe.user_code import find_copy, spec_problem

INSTALL = "EXTRAS=environments make setup"
_API_URL = "atropos_api_url"
_SOURCE_KEYS = ("atropos_environment", "atropos_mixture", _API_URL)  # each of them makes Atropos the source of groups


class Atropos(PromptSource):
    """The source of training data in runs with Atropos: groups that environments sample and score."""

    title = "Atropos"
    keys = _SOURCE_KEYS
    unchecked_rewards = (
        "Atropos' environments score their own samples",
        "run grpo check --deep, which loads them",
    )

    def requested(self, recipe: Recipe) -> bool:
        """Return whether a recipe trains on groups of Atropos: it sets an environment, a mixture or atropos_api_url.

        A URL from the variable ATROPOS_API_URL does not count, because it affects all runs. For a checked recipe,
        ``uses_atropos`` returns the same.
        """
        url = recipe.values["atropos_api_url"]
        is_variable = url.from_text and url.source in environment_keys() and not url.shadowed
        has_environment = AtroposKeys(recipe).environment is not None or AtroposKeys(recipe).mixture is not None
        return has_environment or (AtroposKeys(recipe).api_url is not None and not is_variable)

    def user_code(self, lookup: Lookup) -> list[str]:
        """Return the specs of the user's code: environment classes, and rewards of shipped environments.

        A spec is ``module:name`` or ``file.py:name``. A shipped reward is listed by its name.
        """
        environments = list_environments(lookup)
        rewards = [environment.args.get("reward") for environment in environments]
        specs = [environment.id for environment in environments if ":" in environment.id]
        return [*specs, *(reward for reward in rewards if isinstance(reward, str))]

    def uses_reward_variables(self, lookup: Lookup) -> bool:
        """Return whether the recipe lists environments: then the launch passes them ``reward_environment``."""
        return bool(list_environments(lookup))


SOURCE = Atropos()


def _find_missing_limit(recipe: Recipe) -> list[str]:
    """Return the recipe key of the missing length limit as a list; [] if there is a limit or no environment.

    The key is vllm_max_model_length, or max_prompt_length if the recipe sets max_completion_length.
    """
    if not list_environments(recipe.__getitem__) or find_trajectory_limit(recipe.__getitem__) is not None:
        return []
    return ["vllm_max_model_length" if recipe.sampling.max_completion_length is None else "max_prompt_length"]


# fmt: off
RULES = (
    Rule("{item}", lambda r: not SOURCE.requested(r)
        and [key for key in set_by_user(r, "atropos_*") if key not in ("atropos_environment_args", *_SOURCE_KEYS)],
        "'{item}' does nothing without atropos_environment", "{removal}, or add atropos_environment"),
    Rule("atropos_mixture", lambda r: AtroposKeys(r).environment is not None and AtroposKeys(r).mixture is not None,
        "atropos_environment and atropos_mixture can't be combined", "remove one of them"),
    Rule("atropos_environment_args",
        lambda r: AtroposKeys(r).environment_args is not None and AtroposKeys(r).environment is None,
        "'atropos_environment_args' does nothing without atropos_environment",
        "add atropos_environment, or set args in the mixture"),
    Rule(_API_URL, lambda r: r[_API_URL] is not None and not SOURCE.requested(r),
        "'atropos_api_url' changes nothing in a run without Atropos",
        "{removal}, or add atropos_environment, or use the flag --atropos_api_url"),
    Rule(_API_URL, lambda r: SOURCE.requested(r) and r[_API_URL] is not None and not is_url(r[_API_URL]),
        "'{atropos_api_url}' is not an http or https URL", "set e.g. http://localhost:8000"),
    Rule("atropos_port", lambda r: r[_API_URL] is not None and r.is_set("atropos_port"),
        "atropos_port, for a run-api that the launch starts, can't be combined with atropos_api_url",
        "remove atropos_port, or remove atropos_api_url"),
    Rule("vllm_server_base_url", lambda r: uses_external_server(r) and SOURCE.requested(r),
        "vllm_server_base_url can't be combined with Atropos: its environments sample from the server that the "
        "launch starts", "{removal}"),
    Rule("{item}", lambda r: SOURCE.requested(r) and [key for key in set_by_user(r, OF_DATASETS)
        if r[key] != catalogue()[key]["default"] and key != "system_prompt"],  # environments read system_prompt
        "'{item}' does nothing with Atropos: groups replace the dataset", "{removal}"),
    Rule("reward_funcs", lambda r: SOURCE.requested(r) and SOURCE_REWARD in r.rewards.funcs
        and [name for name in r.rewards.funcs if name != SOURCE_REWARD],
        "reward '{item}' can't be combined with Atropos: its environments score their completions", "remove {item}"),
    Rule("max_steps", lambda r: SOURCE.requested(r) and r.batch.max_steps == -1,
        "max_steps is missing: groups from Atropos have no epochs", "add max_steps, e.g. max_steps: 200"),
    Rule("{item}", lambda r: SOURCE.requested(r) and _find_missing_limit(r),
        "nothing limits the length of a prompt with its completion; run-api and the environments need a limit",
        lambda _, key: f"add {key}, e.g. {key}: {512 if key == 'max_prompt_length' else 2048}"),
    Rule("use_vllm", lambda r: SOURCE.requested(r) and not r.server.use_vllm,
        "Atropos' environments need a vLLM server", "set use_vllm: true"),
    Rule("vllm_mode", lambda r: SOURCE.requested(r) and r.server.use_vllm and r.server.mode == "colocate",
        "vllm_mode: colocate has no server, but Atropos' environments need one", "set vllm_mode: server"),
    Rule("vllm_node", lambda r: SOURCE.requested(r) and starts_run_api(r.__getitem__) and r.server.node == "own",
        "vllm_node: own puts rank 0 on another node than run-api, which listens only on the first node's loopback",
        "set vllm_node: shared, or start a run-api yourself and set atropos_api_url"),
    Rule("eval_strategy", lambda r: SOURCE.requested(r) and evaluates(r),
        "eval_strategy: {eval_strategy} has no data: groups from Atropos are only for training",
        lambda r, _: "set eval_strategy: 'no'" + " and remove eval_steps" * r.is_set("eval_steps")
        + "; benchmarks test the final model"),
    Rule("atropos_batch_max_wait_time",
        lambda r: SOURCE.requested(r) and AtroposKeys(r).batch_max_wait_time >= r.processes.stall_timeout,
        "atropos_batch_max_wait_time {atropos_batch_max_wait_time:g} must be below stall_timeout {stall_timeout:g}: "
        "a trainer that waits longer counts as hung", "raise stall_timeout, or lower atropos_batch_max_wait_time"),
    Rule("atropos_batch_max_wait_time",
        lambda r: SOURCE.requested(r) and AtroposKeys(r).batch_max_wait_time >= r.processes.ddp_timeout,
        "atropos_batch_max_wait_time {atropos_batch_max_wait_time:g} must be below ddp_timeout {ddp_timeout}: "
        "the other ranks wait no longer for rank 0", "raise ddp_timeout, or lower atropos_batch_max_wait_time"),
    Rule("{item}", lambda r: SOURCE.requested(r) and set_by_user(r, "vllm_importance_sampling_*"),
        "'{item}' does nothing with Atropos: the ratio of the loss uses the policy that sampled a group", "{removal}"),
)
# fmt: on


def locate_environment(recipe: Recipe, index: int, part: str = "id") -> str:
    """Return "file:line" of the INDEX-th Atropos environment of a recipe, or of its key ``part``, e.g. ``args``.

    If an entry of the mixture lacks this key, return the line of its id or first key.
    """
    keys = AtroposKeys(recipe)
    if keys.environment is not None or keys.mixture is None:
        has_args = part == "args" and keys.environment_args
        return recipe.location("atropos_environment_args" if has_args else "atropos_environment")
    entry = keys.mixture["environments"][index]
    key = next((name for name in (part, "id", *entry) if name in entry), part)
    return recipe.location("atropos_mixture", "environments", index, key)


def find_atropos_problems(recipe: Recipe, _: Mapping[str, str]) -> Iterator[Problem]:
    """Yield problems of a recipe with Atropos: atroposlib is missing, wrong environments, batches that never fill.

    Yield nothing for a recipe without Atropos. The ids, arguments and min_allocations of environments are checked.
    """
    if not SOURCE.requested(recipe):
        return
    source_key = next(name for name in _SOURCE_KEYS if recipe[name] is not None)
    if importlib.util.find_spec("atroposlib") is None:
        message = f"{source_key} needs the package atroposlib, which is not installed"
        yield recipe.problem(source_key, message, f"install it with: {INSTALL}")
    environments, size = list_environments(recipe.__getitem__), recipe.batch.num_generations
    if AtroposKeys(recipe).mixture is not None and not environments:
        fix = "add environments: a list of {id, args, weight, min_allocation}"
        yield recipe.problem("atropos_mixture", "atropos_mixture lists no environments", fix)
    for index, environment in enumerate(environments):
        yield from _find_id_problems(recipe, index, environment.id)
        yield from _find_args_problems(recipe, index, environment)
    total = sum(environment.min_allocation or 0.0 for environment in environments)
    if total > 1 + 1e-9:
        message = f"the min_allocation of all environments adds up to {total:g}, more than a batch"
        yield Problem(recipe.location("atropos_mixture"), message, "lower them to at most 1 in total")
    elif recipe.batch.prompts_per_step is not None:
        yield from find_packing_problems(recipe, recipe.batch.prompts_per_step * size)


def _find_id_problems(recipe: Recipe, index: int, spec: str) -> Iterator[Problem]:
    """Yield a problem if the id of an environment is missing or unknown, or the file with the user's class is wrong."""
    where, choices = locate_environment(recipe, index), f"{', '.join(ATROPOS_ENVIRONMENTS)}, or file.py:Class"
    if not spec:
        is_entry = AtroposKeys(recipe).environment is None
        message = "an Atropos environment has no id" if is_entry else "atropos_environment is empty"
        yield Problem(where, message, f"set one of {choices}")
    elif ":" in spec:
        yield from _find_code_problems(recipe, spec, where)
    elif spec not in ATROPOS_ENVIRONMENTS:
        near = nearest_of(spec, ATROPOS_ENVIRONMENTS)
        fix = f"set {near}" if near else f"set one of {choices}"
        fix = f"set {spec}:Class, with the name of the class" if spec.endswith(".py") else fix
        yield Problem(where, f"unknown Atropos environment '{spec}'", fix)


def _find_args_problems(recipe: Recipe, index: int, environment: AtroposEnvironment) -> Iterator[Problem]:
    """Yield problems of an environment's arguments: unknown fields, a reward that can't be loaded, wrong numbers.

    max_batches_offpolicy must be at least 1, and group_size must equal num_generations.
    """
    args, size = environment.args, recipe.batch.num_generations
    where = locate_environment(recipe, index, "args")
    if isinstance(reward := args.get("reward"), str) and ":" in reward:
        yield from _find_code_problems(recipe, reward, where)
    if isinstance(batches := args.get("max_batches_offpolicy"), int) and batches < 1:
        message = f"max_batches_offpolicy must be at least 1, got {batches}: the environment would never start a group"
        yield Problem(where, message, "set max_batches_offpolicy: 1, or more")
    configuration = read_configuration(environment.id) if args else None
    for problem in find_argument_problems(*configuration, args) if configuration else ():
        yield replace(problem, where=where, what=f"{problem.where}: {problem.what}")
    if (group_size := args.get("group_size", size)) != size:
        message = f"group_size {group_size} is not num_generations {size}, the completions of each group"
        yield Problem(where, message, "remove it, or set the same number as num_generations")


def find_unchecked_arguments(recipe: Recipe) -> Iterator[str]:
    """Yield a note for each environment with arguments that only `grpo check --deep` can check, by importing code."""
    for index, environment in enumerate(list_environments(recipe.__getitem__)):
        if environment.args and read_configuration(environment.id) is None:
            message = f"the source of '{environment.id}' does not show its fields: run grpo check --deep to check them"
            yield f"{locate_environment(recipe, index, 'args')}: {message}"


def _find_code_problems(recipe: Recipe, spec: str, where: str) -> Iterator[Problem]:
    """Yield a problem if the user's code in ``spec`` can't be loaded and the run directory has no copy of it."""
    if not find_copy(spec, recipe.path.parent) and (problem := spec_problem(spec, where)):
        yield problem


def find_packing_problems(recipe: Recipe, batch_size: int) -> Iterator[Problem]:
    """Yield a problem if run-api could never fill a batch of ``batch_size`` sequences with the environments' groups.

    Yield nothing if a group_size differs from num_generations, because another check reports it.
    """
    environments, size = list_environments(recipe.__getitem__), recipe.batch.num_generations
    if not environments or any(environment.args.get("group_size", size) != size for environment in environments):
        return  # a wrong group_size is reported separately
    allocations = [environment.min_allocation for environment in environments]
    if reason := predict_deadlock(batch_size, [size] * len(environments), allocations):
        is_mixture = AtroposKeys(recipe).mixture is not None
        where = recipe.location("atropos_mixture" if is_mixture else "num_generations")
        fix = "raise prompts_per_step, or lower min_allocation" if is_mixture else "set prompts_per_step"
        yield Problem(where, reason, fix)


CHECKS = (find_atropos_problems,)
