"""Checks of a recipe with environments: a table of rules, then checks of classes, packages and chat templates.

Pure: no torch, no socket. The user's classes are parsed and not run.
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
from grpo_recipes.extensions.environments.arguments import EnvironmentKeys
from grpo_recipes.extensions.environments.datasets import RESET
from grpo_recipes.extensions.environments.environment_python import check_python, find_missing_library, find_python
from grpo_recipes.extensions.environments.libraries import LIBRARIES, find_library_problems
from grpo_recipes.extensions.environments.recipe import (
    compute_turn_tokens,
    list_episode_environments,
    list_model_opponents,
    split_episodes,
    uses_trl_environment,
)
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.chat_template import find_left_out_part, templates_of
from grpo_recipes.recipe.keys import catalogue, nearest_of
from grpo_recipes.recipe.registry import SOURCE_REWARD, benchmarks, rewards
from grpo_recipes.recipe.rules import (
    OF_DATASETS,
    Idle,
    Rule,
    evaluates,
    set_by_user,
    starts_server,
    uses_external_server,
)
from grpo_recipes.recipe.sources import Lookup, PromptSource
from grpo_recipes.recipe.tasks import MAXENT, task_of
from grpo_recipes.recipe.user_code import call_parameters, class_methods, find_copy, function_source, spec_problem
from grpo_recipes.rollouts.turns import BASE, POLICY

# Keys of environments that also apply to tools.
_OF_TOOLS = {f"environment_{name}" for name in ("timeout", "memory_gib", "workers", "network", "turn_length")}
_EPISODES = ("environment_episodes", "environment_eval_episodes")
_TOOL_CLASSES = ("ToolEnv", "MCPEnv", "SandboxEnv", "PythonEnv")  # endings of verifiers' classes with tools


def uses_environments(recipe: Recipe) -> bool:
    """Return whether a recipe sets ``environment`` or ``environment_mixture``, to train on episodes, not a dataset."""
    return _sets_environment(recipe.__getitem__) and not uses_trl_environment(recipe.__getitem__)


def _sets_environment(lookup: Lookup) -> bool:
    """Return whether a recipe sets ``environment`` or ``environment_mixture``; ``lookup`` returns a key's value."""
    return lookup("environment") is not None or lookup("environment_mixture") is not None


def uses_tools(recipe: Recipe) -> bool:
    """Return whether the policy of a recipe may call tools before it answers, also tools of a TRL environment."""
    return bool(EnvironmentKeys(recipe).tools) or uses_trl_environment(recipe.__getitem__)


def plays_benchmarks(recipe: Recipe) -> bool:
    """Return whether an environment of a recipe is one of its benchmarks."""
    return not set(SOURCE.benchmarks(recipe.__getitem__)).isdisjoint(recipe.evaluation.benchmarks)


class Environments(PromptSource):
    """The source of training data in runs with environments: episodes give prompts and rewards."""

    title = "an environment"
    keys = ("environment", "environment_mixture", "tools")
    unchecked_rewards = (
        "the rewards of an environment come with its episodes",
        "run grpo check --deep, which plays an episode",
    )

    def chosen(self, lookup: Lookup) -> bool:
        """Return whether a recipe uses environments or tools."""
        return bool(lookup("tools")) or _sets_environment(lookup)

    def reads_datasets(self, lookup: Lookup) -> bool:
        """Return whether the policy has tools: then prompts come from a dataset, and rewards from ``reward_funcs``."""
        return uses_trl_environment(lookup) or (bool(lookup("tools")) and not _sets_environment(lookup))

    def starts_from_rows(self, lookup: Lookup) -> bool:
        """Return whether the recipe has a TRL environment: its ``reset`` gets a row of the dataset."""
        return uses_trl_environment(lookup)

    def rollouts(self, lookup: Lookup) -> str:
        """Return "module:Class" of the class that plays episodes with tools, or "" if the recipe has no tools."""
        if uses_trl_environment(lookup):
            return "grpo_recipes.extensions.environments.trl_episodes:TRLEpisodes"
        return "grpo_recipes.extensions.environments.tool_episodes:ToolEpisodes" if lookup("tools") else ""

    def user_code(self, lookup: Lookup) -> list[str]:
        """Return the specs (``module:name`` or ``file.py:name``) of the user's own environment classes and tools.

        ``lookup`` returns the value of a recipe key.
        """
        specs = [spec for spec, _, _ in list_episode_environments(lookup) if spec.partition(":")[0] not in LIBRARIES]
        return [*specs, *(lookup("tools") or ())]

    def benchmarks(self, lookup: Lookup) -> list[str]:
        """Return the names of the recipe's environments, which can be benchmarks; [] with TRL's."""
        return [] if uses_trl_environment(lookup) else [spec for spec, _, _ in list_episode_environments(lookup)]

    def benchmark_problem(self, name: str, where: str, lookup: Lookup) -> Problem | None:
        """Return a problem if the benchmark ``name`` is a library's environment that the recipe does not have.

        Return None in all other cases, also if the name resembles a known benchmark. ``where`` is the file and line.
        """
        environments = self.benchmarks(lookup)
        if name.partition(":")[0] not in LIBRARIES or name in environments:
            return None
        if nearest_of(name, [*benchmarks(), *environments]):
            return None
        message = f"the recipe does not train on '{name}', so it can't play that environment"
        return Problem(where, message, "add it as environment or in environment_mixture, or remove it")


SOURCE = Environments()

# fmt: off
RULES = (
    Rule("environment_mixture", lambda r: bool(EnvironmentKeys(r).environment and EnvironmentKeys(r).mixture),
        "environment and environment_mixture can't be combined", "keep one of them"),
    Rule("environment_args", lambda r: EnvironmentKeys(r).args is not None and not EnvironmentKeys(r).environment,
        "'environment_args' does nothing without environment", "add environment, or set args in the mixture"),
    Rule("tools", lambda r: bool(EnvironmentKeys(r).tools) and _sets_environment(r.__getitem__),
        "tools and environment can't be combined: the prompts of tools come from a dataset",
        "remove tools, or let the environment run them"),
    Rule("vllm_server_base_url", lambda r: uses_external_server(r) and [key for key in SOURCE.keys if r[key]],
        "vllm_server_base_url can't be combined with {item}: an external server may leave out a turn of an episode",
        "{removal}"),
    Rule("dataset_name", lambda r: r.data.name == RESET and not uses_trl_environment(r.__getitem__),
        "{dataset_name} has empty prompts, for an environment of TRL whose reset returns the prompt",
        "add environment: file.py:Class, or set another dataset_name"),
    Rule("benchmarks", lambda r: uses_trl_environment(r.__getitem__) and bool(r.evaluation.benchmarks),
        "benchmarks can't be combined with a TRL environment, whose reset needs the columns of its own dataset",
        "remove benchmarks, and set eval_strategy with eval_dataset_name"),
    Rule("{item}", lambda r: not _sets_environment(r.__getitem__) and [key for key in set_by_user(r, "environment_*")
        if key not in ("environment_args", "environment_mixture") and not (uses_tools(r) and key in _OF_TOOLS)],
        "'{item}' does nothing without environment", "{removal}, or add environment"),
    Rule("{item}", lambda r: uses_trl_environment(r.__getitem__) and [key for key in set_by_user(r, "environment_*")
        if key not in ("environment_args", *(_EPISODES if r.data.name == RESET else ())) and key not in _OF_TOOLS],
        "'{item}' does nothing with a TRL environment, whose episodes start from rows of a dataset", "{removal}"),
    Rule("{item}", lambda r: uses_environments(r) and [key for key in set_by_user(r, OF_DATASETS)
        if r[key] != catalogue()[key]["default"]],
        "'{item}' does nothing with environment, which provides the prompts", "{removal}"),
    Rule("reward_funcs", lambda r: uses_environments(r) and r.is_set("reward_funcs")
        and [name for name in r.rewards.funcs if name in rewards() and rewards()[name].reads_answer],
        "reward '{item}' compares with an answer, but episodes have no answer", "remove {item}"),
    Rule("max_completion_length", lambda r: (uses_environments(r) or uses_tools(r))
        and r.sampling.max_completion_length is None,
        "episodes need a limit", "set max_completion_length, e.g. 256"),
    Rule("environment_turn_length", lambda r: not uses_tools(r) and r.sampling.max_completion_length is not None
        and EnvironmentKeys(r).max_turns * (EnvironmentKeys(r).turn_length or 0) > r.sampling.max_completion_length,
        "environment_max_turns {environment_max_turns} times environment_turn_length {environment_turn_length} exceeds "
        "max_completion_length {max_completion_length}, the limit of all turns and the messages between them",
        lambda r, _: "raise max_completion_length, or set environment_turn_length: "
        f"{compute_turn_tokens(None, r.sampling.max_completion_length or 0, EnvironmentKeys(r).max_turns)}"),
    Rule("environment_max_turns", lambda r: uses_environments(r) and r.sampling.max_completion_length is not None
        and EnvironmentKeys(r).max_turns > r.sampling.max_completion_length,
        "environment_max_turns {environment_max_turns} leaves no token for a turn of max_completion_length "
        "{max_completion_length}", "raise max_completion_length"),
    Rule("environment_credit", lambda r: EnvironmentKeys(r).credit == "per_turn" and task_of(r) == MAXENT,
        "environment_credit: per_turn and MaxEnt-GRPO, which weighs whole completions, can't be combined",
        "set environment_credit: all_turns or last_turn"),
    Rule("advantage_estimator", lambda r: EnvironmentKeys(r).credit == "per_turn"
        and r.loss.advantage_estimator != "group",
        "advantage_estimator: {advantage_estimator} and environment_credit: per_turn, which has its own advantages, "
        "can't be combined", "{removal}, or set environment_credit: all_turns"),
    Rule("environment_credit", lambda r: EnvironmentKeys(r).credit == "per_turn" and len(r.rewards.funcs) > 1,
        "environment_credit: per_turn uses only the environment's rewards",
        f"set reward_funcs: [{SOURCE_REWARD}], or environment_credit: all_turns"),
    Rule("environment_credit", lambda r: EnvironmentKeys(r).credit == "per_turn"
        and r.rewards.multi_objective_aggregation != "sum_then_normalize",
        "environment_credit: per_turn and multi_objective_aggregation {multi_objective_aggregation}, which weighs "
        "whole completions, can't be combined",
        "set multi_objective_aggregation: sum_then_normalize, or environment_credit: all_turns"),
    Rule("mask_truncated_completions", lambda r: uses_environments(r) and r.sampling.mask_truncated_completions,
        "mask_truncated_completions leaves out episodes with a truncated last turn, but not unfinished episodes",
        "{removal}, and set environment_unfinished: unscored to leave out unfinished episodes"),
    Rule("mask_truncated_completions", lambda r: uses_tools(r) and r.sampling.mask_truncated_completions,
        "mask_truncated_completions leaves out episodes with a truncated last turn, but not unfinished episodes",
        "{removal}"),
    Rule("eval_max_completion_length", lambda r: (uses_environments(r) or uses_tools(r))
        and r.evaluation.max_completion_length,
        "eval_max_completion_length does nothing with environment or tools: evaluations use max_completion_length",
        "{removal}"),
)
# Keys that do nothing without another key.
IDLE = (
    Idle("environment_eval_episodes", lambda r: not evaluates(r) and not plays_benchmarks(r),
        "eval_strategy, or an environment of the recipe among benchmarks"),
    Idle("max_tool_calls", lambda r: not uses_tools(r), "tools"),
    Idle("benchmark_solved", lambda r: not plays_benchmarks(r), "an environment of the recipe among benchmarks"),
)
# fmt: on


def locate_environment(recipe: Recipe, index: int, part: str = "id") -> str:
    """Return "file:line" of the recipe's environment with this index, or of its ``args`` if ``part`` is "args".

    If an entry of the mixture lacks the key, return the line of its id or first key.
    """
    keys = EnvironmentKeys(recipe)
    if keys.environment is not None or keys.mixture is None:
        return recipe.location("environment_args" if part == "args" and keys.args else "environment")
    parts = keys.mixture["environments"][index]
    inside = next((name for name in (part, "id", *parts) if name in parts), part)
    return recipe.location("environment_mixture", "environments", index, inside)


def _check_environments(recipe: Recipe, environment: Mapping[str, str]) -> Iterator[Problem]:
    """Yield the problems of each environment, and of environments that get no episode to train or evaluate on."""
    environments = list_episode_environments(recipe.__getitem__)
    if EnvironmentKeys(recipe).mixture is not None and not environments:
        fix = "add environments: a list of {id, args, weight}"
        yield recipe.problem("environment_mixture", "environment_mixture has no environments", fix)
    for index, (spec, arguments, _) in enumerate(environments):
        yield from _check_environment(recipe, index, spec, arguments)
    evaluation_keys = ["environment_eval_episodes"] if evaluates(recipe) or plays_benchmarks(recipe) else []
    for key in ("environment_episodes", *evaluation_keys):
        for (spec, _, _), episodes in zip(environments, split_episodes(recipe.__getitem__, recipe[key]), strict=True):
            if not episodes:
                message = f"{key}: {recipe[key]} leaves no episode for '{spec}'"
                yield recipe.problem(key, message, f"raise {key}, or the weight of '{spec}'")


def _check_environment(recipe: Recipe, index: int, spec: str, arguments: dict[str, Any]) -> Iterator[Problem]:
    """Yield the problems of an environment: a wrong name or file, a library's arguments, opponents, or no network.

    ``spec`` is its id, and ``index`` its index in the recipe. A library is imported for the check, and its environment
    created, except by verifiers. The user's file is not checked if the run has a copy.
    """
    line, (kind, colon, name) = locate_environment(recipe, index), spec.partition(":")
    python = find_python(recipe.__getitem__)
    if not spec:
        is_entry = EnvironmentKeys(recipe).environment is None
        message, key = ("an environment has no id", "id") if is_entry else ("environment is empty", "environment")
        yield Problem(line, message, f"set {key}: file.py:Class, or an environment of a library, e.g. textarena:Nim-v0")
    elif kind in LIBRARIES:
        problems = find_missing_library(python, spec) if python else find_library_problems(spec, arguments)
        for problem in problems:
            part = problem.where.removeprefix("environment_")
            yield replace(problem, where=locate_environment(recipe, index, part))
        serves_base_model = starts_server(recipe) and recipe.lora.use_peft and recipe.server.weight_sync == "lora"
        if kind == "textarena" and arguments.get("opponents") == BASE and not serves_base_model:
            message = "opponents: base needs a vLLM server that has the base model next to the adapter"
            fix = "set opponents: policy"
            fix += ", or add use_peft: true and weight_sync: lora" if starts_server(recipe) else ""
            yield Problem(locate_environment(recipe, index, "args"), message, fix)
    elif not find_copy(spec, recipe.path.parent) and (code_problem := spec_problem(spec, line, python is None)):
        library = nearest_of(kind.replace("-", "_"), LIBRARIES) if colon else None
        yield replace(code_problem, fix=f"use {library}:{name}") if library else code_problem
    if kind == "openenv" and not EnvironmentKeys(recipe).network:
        yield Problem(line, f"'{spec}' needs the network", "add environment_network: true")


def _check_arguments(recipe: Recipe, environment: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a problem for each unknown or missing argument of the user's environment classes; the code is not run."""
    for index, (spec, arguments, _) in enumerate(list_episode_environments(recipe.__getitem__)):
        parameters = None if spec.partition(":")[0] in LIBRARIES else call_parameters(spec)
        if parameters is None:
            continue
        inside = ("environments", index, "args") if EnvironmentKeys(recipe).environment is None else ()
        key = "environment_mixture" if inside else "environment_args"
        for name in (str(name) for name in arguments if str(name) not in parameters):
            close = nearest_of(name, parameters)
            names = f", or use {', '.join(parameters)}" if parameters else ""
            fix = f"use '{close}'" if close else f"remove {name}{names}"
            yield Problem(
                recipe.location(key, *inside, name), f"environment_args: '{spec}' has no parameter '{name}'", fix
            )
        for name in (name for name, required in parameters.items() if required and name not in arguments):
            line = recipe.location(key, *inside) if inside or arguments else recipe.location("environment")
            yield Problem(line, f"'{spec}' needs the argument '{name}'", f"add {name} to environment_args")


def _check_templates(recipe: Recipe, environment: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a problem if the chat template is missing, or leaves out roles or tools that the environments use.

    Nothing is downloaded. Yield nothing without a local copy of the model's template, or if a class or tool of the user
    is missing, which another check reports.
    """
    installed_here = EnvironmentKeys(recipe).python is None
    if any(spec_problem(spec, "", installed_here) for spec in SOURCE.user_code(recipe.__getitem__)):
        return
    environments = [(spec, arguments) for spec, arguments, _ in list_episode_environments(recipe.__getitem__)]
    if not environments and not uses_tools(recipe):
        return
    template = recipe.model.chat_template
    templates = templates_of(recipe, environment) if template is None else {"default": template}
    key = "model_name_or_path" if template is None else "chat_template"
    if templates is None:
        return
    if "default" not in templates:
        yield recipe.problem(key, "the model has no chat template", "add chat_template to the recipe")
        return
    tools = uses_tools(recipe) or (installed_here and any(_uses_tools(spec) for spec, _ in environments))
    system = any(_find_system_prompt(spec, arguments, installed_here) for spec, arguments in environments)
    tool_answers = tools and (uses_tools(recipe) or EnvironmentKeys(recipe).max_turns > 1)
    roles = ["user", "assistant", *["system"] * system, *["tool"] * tool_answers]
    if message := find_left_out_part(templates, roles, tools, recipe.model.chat_template_kwargs or {}):
        yield recipe.problem(key, message, "set a chat_template that renders them")


def _find_system_prompt(spec: str, arguments: Mapping[str, Any], installed_here: bool) -> str:
    """Return the system prompt of an environment of reasoning_gym or verifiers: its argument, or the class's default.

    Return "" if it has none, and for other environments. The default is only known if the library is
    ``installed_here``.
    """
    kind, _, name = spec.partition(":")
    if kind not in ("reasoning_gym", "verifiers"):
        return ""
    default = None
    if kind == "verifiers" and installed_here and importlib.util.find_spec(kind):
        from grpo_recipes.extensions.environments.verifiers_tasks import find_library_class

        environment_class = find_library_class(name)
        parameters = inspect.signature(environment_class).parameters if environment_class else {}
        parameter = parameters.get("system_prompt")
        default = parameter.default if parameter else None
    return str(arguments.get("system_prompt", default) or "")


def _uses_tools(spec: str) -> bool:
    """Return whether an environment package of verifiers uses a class with tools; the code is parsed and not run.

    Return false for other environments, and if the code is not found or can't be parsed.
    """
    kind, _, name = spec.partition(":")
    module = name.replace("-", "_").split("/")[-1]
    module_spec = importlib.util.find_spec(module) if kind == "verifiers" and module.isidentifier() else None
    if module_spec is None or not module_spec.origin or not module_spec.origin.endswith(".py"):
        return False
    origin = Path(module_spec.origin)
    files = origin.parent.rglob("*.py") if module_spec.submodule_search_locations else [origin]
    with contextlib.suppress(SyntaxError):  # reported when the environment is loaded
        trees = (ast.walk(ast.parse(file.read_text())) for file in files)
        names = (getattr(node, "attr", getattr(node, "id", "")) for tree in trees for node in tree)
        return any(str(name).endswith(_TOOL_CLASSES) for name in names)
    return False


def _check_benchmark_opponents(recipe: Recipe, environment: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a problem for each benchmark with the base model as an opponent, because benchmarks can't play it."""
    for spec, model in list_model_opponents(recipe.__getitem__):
        if spec in recipe.evaluation.benchmarks and model != POLICY:
            message = f"a benchmark can't play '{spec}' against '{model}'"
            yield recipe.problem("benchmarks", message, "set opponents: policy or random, or remove it from benchmarks")


def _check_tools(recipe: Recipe, environment: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a problem for each tool that is missing, repeated, or lacks type hints or a docstring; no code is run."""
    specs = EnvironmentKeys(recipe).tools or []
    for index, spec in enumerate(specs):
        line, copy = recipe.location("tools", index), find_copy(spec, recipe.path.parent)
        if copy is None and (problem := spec_problem(spec, line)):
            yield problem
        elif (function := function_source(spec, copy)) is not None:
            yield from _find_missing_parts(line, spec, function)
    names = [spec.partition(":")[2] for spec in specs]
    if repeated := next((name for name in names if names.count(name) > 1), ""):
        yield recipe.problem("tools", f"two tools have the name '{repeated}'", "remove or rename one of them")


def _find_missing_parts(
    line: str, name: str, function: ast.FunctionDef | ast.AsyncFunctionDef, bound: int = 0
) -> Iterator[Problem]:
    """Yield a problem if a tool lacks type hints or a docstring; its first ``bound`` parameters need no type hint."""
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs][bound:]
    missing = [f"a type hint for '{argument.arg}'" for argument in arguments if argument.annotation is None]
    missing += [] if ast.get_docstring(function) else ["a docstring"]
    if missing:
        fix = f"add {' and '.join(missing)} to {function.name}"
        yield Problem(line, f"the model would not know how to call '{name}'", fix)


def _check_trl_environments(recipe: Recipe, environment: Mapping[str, str]) -> Iterator[Problem]:
    """Yield the problems of classes without step, if their source shows all methods; no code is run.

    TRL's ``environment_factory`` accepts them: they need a dataset, and methods that the policy can call.
    """
    for index, (spec, _, _) in enumerate(list_episode_environments(recipe.__getitem__)):
        line = locate_environment(recipe, index)
        is_library = spec.partition(":")[0] in LIBRARIES
        methods = None if is_library else class_methods(spec, find_copy(spec, recipe.path.parent))
        if methods is None or "step" in methods:
            continue
        message = f"'{spec}' has no step, as in TRL"
        if "reset" not in methods:
            yield Problem(line, f"'{spec}' has no reset", "add the method reset to it")
        elif EnvironmentKeys(recipe).environment is None:
            yield Problem(line, f"{message}, and can't be part of a mixture", f"set environment: {spec} instead")
        elif not uses_trl_environment(recipe.__getitem__):
            yield Problem(
                line,
                f"{message}, so that its prompts come from a dataset",
                f"add dataset_name: {RESET} if reset returns the prompt, or the method step",
            )
        else:
            yield from _check_methods(recipe, spec, methods)


def _check_methods(
    recipe: Recipe, spec: str, methods: Mapping[str, ast.FunctionDef | ast.AsyncFunctionDef]
) -> Iterator[Problem]:
    """Yield the problems of a TRL environment's methods.

    The policy can call no method, a method is undescribed, or ``get_reward`` is unused, or missing although the recipe
    uses its reward.
    """
    line, rewards_used = recipe.location("environment"), recipe.rewards.funcs
    tools = [name for name in methods if not name.startswith("_") and name not in ("reset", "get_reward")]
    if not tools:
        yield Problem(line, f"'{spec}' has no method for the policy to call", "add a method with a docstring")
    for name in tools:
        if not methods[name].decorator_list:
            yield from _find_missing_parts(line, f"{spec}.{name}", methods[name], bound=1)
    if "get_reward" in methods and SOURCE_REWARD not in rewards_used:
        fix = f"set reward_funcs: [{', '.join([*rewards_used, SOURCE_REWARD])}]"
        yield recipe.problem("reward_funcs", f"get_reward of '{spec}' is not used", fix)
    elif "get_reward" not in methods and SOURCE_REWARD in rewards_used:
        fix = "add get_reward to it, or set reward_funcs: [file.py:function]"
        yield recipe.problem("reward_funcs", f"'{spec}' has no get_reward, so that it gives no reward", fix)


CHECKS = (
    check_python, _check_environments, _check_arguments, _check_tools, _check_trl_environments, _check_templates,
    _check_benchmark_opponents,
)  # fmt: skip
