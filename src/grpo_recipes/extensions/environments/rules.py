"""What a recipe with environments must contain: rules as a table, then what classes, packages and templates show.

Pure: no torch, no socket. The user's classes are read and not run.
"""

import ast
import contextlib
import importlib.util
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_recipes.errors import Problem
from grpo_recipes.extensions.environments.libraries import LIBRARIES, library_problems
from grpo_recipes.extensions.environments.recipe import (
    environments_of,
    episodes_of_each,
    model_opponents,
    turn_tokens,
)
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.chat_template import find_left_out_part, templates_of
from grpo_recipes.recipe.keys import catalogue, nearest_of
from grpo_recipes.recipe.registry import SOURCE_REWARD, benchmarks, rewards
from grpo_recipes.recipe.rules import OF_DATASETS, Idle, Rule, evaluates, set_by_user, starts_server
from grpo_recipes.recipe.sources import Lookup, PromptSource
from grpo_recipes.recipe.tasks import MAXENT, task_of
from grpo_recipes.recipe.user_code import call_parameters, copy_path, spec_problem
from grpo_recipes.rollouts.turns import BASE, POLICY

_WITH_TOOLS = ("ToolEnv", "MCPEnv", "SandboxEnv", "PythonEnv")  # how verifiers' classes with tools are called


def plays(recipe: Recipe) -> bool:
    """Return whether prompts come from environments."""
    return recipe["environment"] is not None or recipe["environment_mixture"] is not None


def plays_benchmarks(recipe: Recipe) -> bool:
    """Return whether an environment of a recipe is one of its benchmarks."""
    return not {spec for spec, _, _ in environments_of(recipe.__getitem__)}.isdisjoint(recipe["benchmarks"])


class Environments(PromptSource):
    """Episodes that are played with the policy, whose environment brings prompts and rewards."""

    title = "an environment"
    keys = ("environment", "environment_mixture")
    unchecked_rewards = (
        "the rewards of an environment come with its episodes",
        "run grpo check --deep, which plays one",
    )

    def user_code(self, lookup: Lookup) -> list[str]:
        """Return the user's own environment classes."""
        return [spec for spec, _, _ in environments_of(lookup) if spec.partition(":")[0] not in LIBRARIES]

    def benchmarks(self, lookup: Lookup) -> list[str]:
        """Return the recipe's environments: their evaluation episodes can be benchmarks."""
        return [spec for spec, _, _ in environments_of(lookup)]

    def benchmark_problem(self, name: str, where: str, lookup: Lookup) -> Problem | None:
        """Return a problem for an environment that the recipe does not train on."""
        own = self.benchmarks(lookup)
        if name.partition(":")[0] not in LIBRARIES or name in own or nearest_of(name, [*benchmarks(), *own]):
            return None
        what = f"the recipe does not train on '{name}', so it cannot play that environment"
        return Problem(where, what, "name it as environment or in environment_mixture, or remove it")


SOURCE = Environments()

# fmt: off
RULES = (
    Rule("environment_mixture", lambda r: bool(r["environment"] and r["environment_mixture"]),
        "environment and environment_mixture are both given", "keep one of them"),
    Rule("environment_args", lambda r: r["environment_args"] is not None and not r["environment"],
        "'environment_args' does nothing without environment", "add environment, or write args in the mixture"),
    Rule("{item}", lambda r: not plays(r)
        and [key for key in set_by_user(r, "environment_*") if key not in ("environment_args", "environment_mixture")],
        "'{item}' does nothing without environment", "{removal}, or add environment"),
    Rule("{item}", lambda r: plays(r) and [key for key in set_by_user(r, OF_DATASETS)
        if r[key] != catalogue()[key]["default"]],
        "'{item}' does nothing with environment, from which the prompts come", "{removal}"),
    Rule("reward_funcs", lambda r: plays(r) and r.is_set("reward_funcs")
        and [name for name in r["reward_funcs"] if name in rewards() and rewards()[name].reads_answer],
        "reward '{item}' compares with an answer, which an episode does not have", "remove {item}"),
    Rule("environment_turn_length", lambda r: r["max_completion_length"] is not None
        and r["environment_max_turns"] * (r["environment_turn_length"] or 0) > r["max_completion_length"],
        "environment_max_turns {environment_max_turns} by environment_turn_length {environment_turn_length} exceeds "
        "max_completion_length {max_completion_length}, which is for all turns and what is said between them",
        lambda r, _: "raise max_completion_length, or write environment_turn_length: "
        f"{turn_tokens(None, r['max_completion_length'], r['environment_max_turns'])}"),
    Rule("environment_max_turns", lambda r: plays(r) and r["max_completion_length"] is not None
        and r["environment_max_turns"] > r["max_completion_length"],
        "environment_max_turns {environment_max_turns} leaves no token for a turn of max_completion_length "
        "{max_completion_length}", "raise max_completion_length"),
    Rule("environment_credit", lambda r: r["environment_credit"] == "per_turn" and task_of(r) == MAXENT,
        "environment_credit: per_turn contradicts MaxEnt-GRPO, which weighs whole completions",
        "write all_turns or last_turn"),
    Rule("environment_credit", lambda r: r["environment_credit"] == "per_turn" and len(r["reward_funcs"]) > 1,
        "environment_credit: per_turn takes the environment's rewards alone",
        f"write reward_funcs: [{SOURCE_REWARD}], or all_turns"),
    Rule("environment_credit", lambda r: r["environment_credit"] == "per_turn"
        and r["multi_objective_aggregation"] != "sum_then_normalize",
        "environment_credit: per_turn contradicts multi_objective_aggregation {multi_objective_aggregation}, which "
        "weighs whole completions", "write multi_objective_aggregation: sum_then_normalize, or all_turns"),
    Rule("mask_truncated_completions", lambda r: plays(r) and r["mask_truncated_completions"],
        "mask_truncated_completions leaves out an episode whose last turn was cut, and not one that has no end",
        "{removal}; environment_unfinished: unscored leaves out episodes without an end"),
    Rule("eval_max_completion_length", lambda r: plays(r) and r["eval_max_completion_length"],
        "an episode has max_completion_length, in evaluations too", "{removal}"),
)
# Keys that do nothing without another.
IDLE = (
    Idle("environment_eval_episodes", lambda r: not evaluates(r) and not plays_benchmarks(r),
        "eval_strategy, or an environment of the recipe among benchmarks"),
    Idle("benchmark_solved", lambda r: not plays_benchmarks(r), "an environment of the recipe among benchmarks"),
)
# fmt: on


def environment_place(recipe: Recipe, index: int, part: str = "id") -> str:
    """Return the line of an environment of the recipe, by its place among them, or of its ``args``."""
    if recipe["environment"] is not None:
        return recipe.location("environment_args" if part == "args" and recipe["environment_args"] else "environment")
    parts = recipe["environment_mixture"]["environments"][index]
    inside = next((name for name in (part, "id", *parts) if name in parts), part)
    return recipe.location("environment_mixture", "environments", index, inside)


def _names(recipe: Recipe, environment: Mapping[str, str]) -> Iterator[Problem]:
    run, found = recipe.path.parent, environments_of(recipe.__getitem__)
    if recipe["environment_mixture"] is not None and not found:
        fix = "add environments: a list of {id, args, weight}"
        yield recipe.problem("environment_mixture", "environment_mixture names no environments", fix)
    for index, (spec, arguments, _) in enumerate(found):
        where, (kind, colon, name) = environment_place(recipe, index), spec.partition(":")
        copied = (run / "run.json").exists() and copy_path(spec, run / "rewards").exists()
        if not spec:
            what = "an environment has no id" if recipe["environment"] is None else "environment names nothing"
            yield Problem(where, what, "name it as file.py:Class, or a library's, e.g. textarena:Nim-v0")
        elif kind in LIBRARIES:
            problems = library_problems(spec, arguments)
            places = [environment_place(recipe, index, one.where.removeprefix("environment_")) for one in problems]
            yield from (replace(one, where=place) for one, place in zip(problems, places, strict=True))
            if kind == "textarena" and arguments.get("opponents") == BASE and not serves_base_model(recipe):
                what = "opponents: base needs a vLLM server that has the base model next to the adapter"
                fix = "write opponents: policy"
                fix += ", or add use_peft: true and weight_sync: lora" if starts_server(recipe) else ""
                yield Problem(environment_place(recipe, index, "args"), what, fix)
        elif not copied and (problem := spec_problem(spec, where)):
            near = nearest_of(kind.replace("-", "_"), LIBRARIES) if colon else None
            yield replace(problem, fix=f"write {near}:{name}") if near else problem
        if kind == "openenv" and not recipe["environment_network"]:
            yield Problem(where, f"'{spec}' is reached through the network", "add environment_network: true")
    evaluated = ["environment_eval_episodes"] if evaluates(recipe) or plays_benchmarks(recipe) else []
    for key in ("environment_episodes", *evaluated):
        for (spec, _, _), share in zip(found, episodes_of_each(recipe.__getitem__, recipe[key]), strict=True):
            if not share:
                yield recipe.problem(key, f"{key}: {recipe[key]} leaves none for '{spec}'", "raise it, or that weight")


def serves_base_model(recipe: Recipe) -> bool:
    """Return whether the run's server has the untrained model, which ``opponents: base`` plays with."""
    return starts_server(recipe) and bool(recipe["use_peft"]) and recipe["weight_sync"] == "lora"


def _arguments(recipe: Recipe, environment: Mapping[str, str]) -> Iterator[Problem]:
    """Yield the arguments that the user's own environment classes do not accept, or lack; the code is not run."""
    for index, (spec, arguments, _) in enumerate(environments_of(recipe.__getitem__)):
        parameters = None if spec.partition(":")[0] in LIBRARIES else call_parameters(spec)
        if parameters is None:
            continue
        inside = ("environments", index, "args") if recipe["environment"] is None else ()
        key = "environment_mixture" if inside else "environment_args"
        for name in (str(name) for name in arguments if str(name) not in parameters):
            close = nearest_of(name, parameters)
            names = f"; it accepts {', '.join(parameters)}" if parameters else ""
            fix = f"write '{close}'" if close else f"remove {name}{names}"
            yield Problem(
                recipe.location(key, *inside, name), f"environment_args: '{spec}' has no parameter '{name}'", fix
            )
        for name in (name for name, required in parameters.items() if required and name not in arguments):
            where = recipe.location(key, *inside) if inside or arguments else recipe.location("environment")
            yield Problem(where, f"'{spec}' needs the argument '{name}'", f"add {name} to environment_args")


def _templates(recipe: Recipe, environment: Mapping[str, str]) -> Iterator[Problem]:
    """Yield what the chat template leaves out of the environments, as far as both are known before a download."""
    environments = [(spec, arguments) for spec, arguments, _ in environments_of(recipe.__getitem__)]
    if not environments:
        return
    own = recipe["chat_template"]
    templates = templates_of(recipe, environment) if own is None else {"default": own}
    key = "model_name_or_path" if own is None else "chat_template"
    if templates is None:
        return
    if "default" not in templates:
        yield recipe.problem(key, "the model has no chat template", "add chat_template to the recipe")
        return
    tools = any(_has_tools(spec) for spec, _ in environments)
    system = any(_system_prompt(spec, arguments) for spec, arguments in environments)
    answered = tools and recipe["environment_max_turns"] > 1
    roles = ["user", "assistant", *["system"] * system, *["tool"] * answered]
    if what := find_left_out_part(templates, roles, tools, recipe["chat_template_kwargs"] or {}):
        yield recipe.problem(key, what, "write a chat_template that does not")


def _system_prompt(spec: str, arguments: Mapping[str, Any]) -> str:
    """Return the system prompt of a library's environment, the class's own where none is given."""
    kind, _, name = spec.partition(":")
    if kind not in ("reasoning_gym", "verifiers"):
        return ""
    default = None
    if kind == "verifiers" and importlib.util.find_spec(kind):
        from grpo_recipes.extensions.environments.verifiers_tasks import own_class

        made = own_class(name)
        parameter = inspect.signature(made).parameters.get("system_prompt") if made else None
        default = parameter.default if parameter else None
    return str(arguments.get("system_prompt", default) or "")


def _has_tools(spec: str) -> bool:
    """Return whether a package of verifiers' names one of its classes with tools; the code is read and not run."""
    kind, _, name = spec.partition(":")
    module = name.replace("-", "_").split("/")[-1]
    found = importlib.util.find_spec(module) if kind == "verifiers" and module.isidentifier() else None
    if found is None or not found.origin or not found.origin.endswith(".py"):
        return False
    files = Path(found.origin).parent.rglob("*.py") if found.submodule_search_locations else [Path(found.origin)]
    with contextlib.suppress(SyntaxError):  # reported when the environment is loaded
        trees = (ast.walk(ast.parse(file.read_text())) for file in files)
        names = (getattr(node, "attr", getattr(node, "id", "")) for tree in trees for node in tree)
        return any(str(one).endswith(_WITH_TOOLS) for one in names)
    return False


def _opponents(recipe: Recipe, environment: Mapping[str, str]) -> Iterator[Problem]:
    """Yield the benchmarks whose other seats another model plays."""
    for spec, model in model_opponents(recipe.__getitem__):
        if spec in recipe["benchmarks"] and model != POLICY:
            what = f"a benchmark cannot play '{spec}' against '{model}'"
            yield recipe.problem("benchmarks", what, "write opponents: policy or random, or remove it from benchmarks")


CHECKS = (_names, _arguments, _templates, _opponents)
