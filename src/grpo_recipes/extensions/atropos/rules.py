"""What a recipe must hold whose groups come from Atropos: rules as a table, then what files and packages show.

Pure: no torch, no socket; atroposlib is looked for and not imported.
"""

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import replace

from grpo_recipes.errors import Problem
from grpo_recipes.extensions.atropos.fields import argument_problems, configuration_of
from grpo_recipes.extensions.atropos.packing import foreseen_deadlock
from grpo_recipes.extensions.atropos.recipe import (
    ATROPOS_ENVIRONMENTS,
    atropos_environments,
    longest_trajectory,
    starts_run_api,
)
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.keys import catalogue, environment_keys, nearest_of
from grpo_recipes.recipe.registry import SOURCE_REWARD
from grpo_recipes.recipe.rules import OF_DATASETS, Rule, evaluates, is_url, set_by_user, uses_external_server
from grpo_recipes.recipe.sources import Lookup, PromptSource
from grpo_recipes.recipe.user_code import REWARD_COPIES, copy_path, spec_problem

INSTALL = "EXTRAS=environments make setup"
_API_URL = "atropos_api_url"
_NAMES = ("atropos_environment", "atropos_mixture", _API_URL)  # one of them makes a recipe one of Atropos


def takes_groups(recipe: Recipe) -> bool:
    """Return whether groups come from Atropos. A variable of the shell is there for every run: alone it is not enough.

    ``uses_atropos`` says the same of a recipe that was checked.
    """
    url = recipe.values["atropos_api_url"]
    by_variable_alone = url.from_text and url.source in environment_keys() and not url.shadowed
    named = recipe["atropos_environment"] is not None or recipe["atropos_mixture"] is not None
    return named or (recipe["atropos_api_url"] is not None and not by_variable_alone)


class Atropos(PromptSource):
    """Groups that Atropos environments sample and score; the launch takes them from run-api."""

    title = "Atropos"
    keys = ("atropos_environment", "atropos_mixture", _API_URL)
    unchecked_rewards = (
        "Atropos' environments score what they sample themselves",
        "run grpo check --deep, which loads them",
    )

    def requested(self, recipe: Recipe) -> bool:
        """Return whether groups come from Atropos, as ``takes_groups``."""
        return takes_groups(recipe)

    def user_code(self, lookup: Lookup) -> list[str]:
        """Return the user's environments, and the rewards that the shipped ones call."""
        environments = atropos_environments(lookup)
        rewards = [environment.args.get("reward") for environment in environments]
        specs = [environment.id for environment in environments if ":" in environment.id]
        return [*specs, *(reward for reward in rewards if isinstance(reward, str))]

    def uses_reward_variables(self, lookup: Lookup) -> bool:
        """Return whether the launch starts environments: only these get the variables."""
        return bool(atropos_environments(lookup))


SOURCE = Atropos()


def _missing_limit(recipe: Recipe) -> list[str]:
    """Return the key that limits the prompts and completions of the environments to start, if no key does."""
    if not atropos_environments(recipe.__getitem__) or longest_trajectory(recipe.__getitem__) is not None:
        return []
    return ["vllm_max_model_length" if recipe["max_completion_length"] is None else "max_prompt_length"]


# fmt: off
RULES = (
    Rule("{item}", lambda r: not takes_groups(r)
        and [key for key in set_by_user(r, "atropos_*") if key not in ("atropos_environment_args", *_NAMES)],
        "'{item}' does nothing without atropos_environment", "{removal}, or add atropos_environment"),
    Rule("atropos_mixture", lambda r: r["atropos_environment"] is not None and r["atropos_mixture"] is not None,
        "atropos_environment and atropos_mixture are both given", "keep one of them"),
    Rule("atropos_environment_args",
        lambda r: r["atropos_environment_args"] is not None and r["atropos_environment"] is None,
        "'atropos_environment_args' does nothing without atropos_environment",
        "add atropos_environment, or write args in the mixture"),
    Rule(_API_URL, lambda r: r[_API_URL] is not None and not takes_groups(r),
        "'atropos_api_url' changes nothing in a run without Atropos",
        "{removal}, or add atropos_environment, or give the flag --atropos_api_url"),
    Rule(_API_URL, lambda r: takes_groups(r) and r[_API_URL] is not None and not is_url(r[_API_URL]),
        "'{atropos_api_url}' is not an http or https URL", "write e.g. http://localhost:8000"),
    Rule("atropos_port", lambda r: r[_API_URL] is not None and r.is_set("atropos_port"),
        "atropos_port is that of a run-api which the launch starts, atropos_api_url names one that runs already",
        "remove atropos_port, or remove atropos_api_url"),
    Rule("vllm_server_base_url", lambda r: uses_external_server(r) and takes_groups(r),
        "vllm_server_base_url can't be combined with Atropos, whose environments sample from the server that the "
        "launch starts", "{removal}"),
    Rule("{item}", lambda r: takes_groups(r) and [key for key in set_by_user(r, OF_DATASETS)
        if r[key] != catalogue()[key]["default"] and key != "system_prompt"],  # which the environments read
        "'{item}' does nothing with Atropos, from which the groups come", "{removal}"),
    Rule("reward_funcs", lambda r: takes_groups(r) and SOURCE_REWARD in r["reward_funcs"]
        and [name for name in r["reward_funcs"] if name != SOURCE_REWARD],
        "reward '{item}' would score completions that Atropos' environments have scored", "remove {item}"),
    Rule("max_steps", lambda r: takes_groups(r) and r["max_steps"] == -1,
        "groups of Atropos have no epochs, and max_steps is not given", "add max_steps, e.g. max_steps: 200"),
    Rule("{item}", lambda r: takes_groups(r) and _missing_limit(r),
        "nothing limits the tokens of a prompt with its completion, which run-api and the environments are told",
        lambda _, key: f"add {key}, e.g. {key}: {512 if key == 'max_prompt_length' else 2048}"),
    Rule("use_vllm", lambda r: takes_groups(r) and not r["use_vllm"],
        "Atropos' environments ask a vLLM server", "write use_vllm: true"),
    Rule("vllm_mode", lambda r: takes_groups(r) and r["use_vllm"] and r["vllm_mode"] == "colocate",
        "vllm_mode: colocate has no server that Atropos' environments could ask", "write vllm_mode: server"),
    Rule("vllm_node", lambda r: takes_groups(r) and starts_run_api(r.__getitem__) and r["vllm_node"] == "own",
        "vllm_node: own puts rank 0 on another node than run-api, which listens on the first node's loopback alone",
        "write vllm_node: shared, or start a run-api yourself and name it in atropos_api_url"),
    Rule("eval_strategy", lambda r: takes_groups(r) and evaluates(r),
        "eval_strategy: {eval_strategy} has nothing to evaluate on: groups of Atropos are for training",
        lambda r, _: "set eval_strategy: 'no'" + " and remove eval_steps" * r.is_set("eval_steps")
        + "; benchmarks test the final model"),
    Rule("atropos_batch_max_wait_time",
        lambda r: takes_groups(r) and r["atropos_batch_max_wait_time"] >= r["stall_timeout"],
        "atropos_batch_max_wait_time {atropos_batch_max_wait_time:g} is not below stall_timeout {stall_timeout:g}, "
        "after which a trainer that waits counts as hung", "raise stall_timeout, or wait less"),
    Rule("atropos_batch_max_wait_time",
        lambda r: takes_groups(r) and r["atropos_batch_max_wait_time"] >= r["ddp_timeout"],
        "atropos_batch_max_wait_time {atropos_batch_max_wait_time:g} is not below ddp_timeout {ddp_timeout}, after "
        "which ranks that wait for rank 0 give up", "raise ddp_timeout, or wait less"),
    Rule("{item}", lambda r: takes_groups(r) and set_by_user(r, "vllm_importance_sampling_*"),
        "'{item}' does nothing with Atropos: the loss is taken against the policy that sampled a group", "{removal}"),
)
# fmt: on


def place(recipe: Recipe, index: int, part: str = "id") -> str:
    """Return the line of an Atropos environment of the recipe, by its place among them, or of a part of it."""
    if recipe["atropos_environment"] is not None:
        has_args = part == "args" and recipe["atropos_environment_args"]
        return recipe.location("atropos_environment_args" if has_args else "atropos_environment")
    parts = recipe["atropos_mixture"]["environments"][index]
    inside = next((name for name in (part, "id", *parts) if name in parts), part)
    return recipe.location("atropos_mixture", "environments", index, inside)


def atropos_problems(recipe: Recipe, _: Mapping[str, str]) -> Iterator[Problem]:
    """Yield what is wrong with the environments themselves, and whether atroposlib is here."""
    if not takes_groups(recipe):
        return
    key = next(name for name in _NAMES if recipe[name] is not None)
    if importlib.util.find_spec("atroposlib") is None:
        what = f"{key} needs the package atroposlib, which is not installed"
        yield recipe.problem(key, what, f"install it with: {INSTALL}")
    found, size = atropos_environments(recipe.__getitem__), recipe["num_generations"]
    if recipe["atropos_mixture"] is not None and not found:
        fix = "add environments: a list of {id, args, weight, min_allocation}"
        yield recipe.problem("atropos_mixture", "atropos_mixture names no environments", fix)
    for index, one in enumerate(found):
        where, own = place(recipe, index), "your own as file.py:Class"
        if not one.id:
            what = "an Atropos environment has no id" if recipe["atropos_environment"] is None else f"{key} is empty"
            yield Problem(where, what, f"write one of {', '.join(ATROPOS_ENVIRONMENTS)}, or {own}")
        elif ":" in one.id:
            yield from _own(recipe, one.id, where)
        elif one.id not in ATROPOS_ENVIRONMENTS:
            near = nearest_of(one.id, ATROPOS_ENVIRONMENTS)
            fix = f"write {near}" if near else f"write one of {', '.join(ATROPOS_ENVIRONMENTS)}, or {own}"
            fix = f"write {one.id}:Class, the class in it" if one.id.endswith(".py") else fix
            yield Problem(where, f"there is no Atropos environment '{one.id}'", fix)
        if isinstance(reward := one.args.get("reward"), str) and ":" in reward:
            yield from _own(recipe, reward, place(recipe, index, "args"))
        if isinstance(ahead := one.args.get("max_batches_offpolicy"), int) and ahead < 1:
            what = f"max_batches_offpolicy {ahead} lets the environment have no group under way: it would never begin"
            yield Problem(place(recipe, index, "args"), what, "write max_batches_offpolicy: 1, or more")
        configuration = configuration_of(one.id) if one.args else None
        for problem in argument_problems(*configuration, one.args) if configuration else ():
            yield replace(problem, where=place(recipe, index, "args"), what=f"{problem.where}: {problem.what}")
        if (given_size := one.args.get("group_size", size)) != size:
            what = f"group_size {given_size} is not num_generations {size}, the completions of each group"
            yield Problem(place(recipe, index, "args"), what, "remove it, or write the same as num_generations")
    if (total := sum(one.min_allocation or 0.0 for one in found)) > 1 + 1e-9:
        what = f"min_allocation of all environments together is {total:g}, more than a batch"
        yield Problem(recipe.location("atropos_mixture"), what, "write shares that are at most 1 together")
    elif recipe["prompts_per_step"] is not None:
        yield from packing_problems(recipe, recipe["prompts_per_step"] * size)


def argument_notes(recipe: Recipe) -> Iterator[str]:
    """Yield a note for each environment whose arguments can only be checked by importing it."""
    for index, environment in enumerate(atropos_environments(recipe.__getitem__)):
        if environment.args and configuration_of(environment.id) is None:
            what = f"the source of '{environment.id}' does not show its fields: run grpo check --deep to check them"
            yield f"{place(recipe, index, 'args')}: {what}"


def _own(recipe: Recipe, spec: str, where: str) -> Iterator[Problem]:
    """Yield what keeps the user's code from being loaded, unless the run has a copy of it."""
    run = recipe.path.parent
    copied = (run / "run.json").exists() and copy_path(spec, run / REWARD_COPIES).exists()
    if not copied and (problem := spec_problem(spec, where)):
        yield problem


def packing_problems(recipe: Recipe, batch_size: int) -> Iterator[Problem]:
    """Yield why run-api would never hand out batches of so many sequences of this recipe's environments."""
    found, size = atropos_environments(recipe.__getitem__), recipe["num_generations"]
    if not found or any(one.args.get("group_size", size) != size for one in found):
        return  # the sizes have a problem of their own
    if why := foreseen_deadlock(batch_size, [size] * len(found), [one.min_allocation for one in found]):
        mixed = recipe["atropos_mixture"] is not None
        where = recipe.location("atropos_mixture" if mixed else "num_generations")
        fix = "raise prompts_per_step, or lower min_allocation" if mixed else "write prompts_per_step"
        yield Problem(where, why, fix)


CHECKS = (atropos_problems,)
