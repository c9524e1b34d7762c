"""The reward that this extension registers, and the rules of its keys. No torch."""

from collections.abc import Iterator, Mapping

from grpo_recipes.errors import Problem
from grpo_recipes.extensions.code.arguments import E2B, E2B_KEY, CodeKeys
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.registry import Reward
from grpo_recipes.recipe.rules import Rule, is_url, set_by_user

NAME = "code_tests"
_REWARD = "grpo_recipes.extensions.code.reward"

REWARDS = (
    Reward(NAME, f"{_REWARD}:code_tests", (
        "code_sandbox", "code_server_url", "code_score", "reward_timeout", "reward_memory_gib"),
        accuracy=True, in_children=True, writings=("```python\n%s\n```",), answers=f"{_REWARD}:list_programs",
        instead_of_solution=("verification_info",)),
)  # fmt: skip


def _is_used(recipe: Recipe) -> bool:
    """Return whether a recipe uses the reward ``code_tests``."""
    return NAME in recipe.rewards.funcs


def _uses_service(recipe: Recipe) -> bool:
    """Return whether the programs run on a service."""
    return CodeKeys(recipe).sandbox != "bwrap"


def check_sandbox(recipe: Recipe, _: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a problem if a small program does not run in this machine's sandbox.

    Run and yield nothing if the recipe does not use ``code_tests``, or runs programs on a service.
    """
    if _is_used(recipe) and not _uses_service(recipe):
        from grpo_recipes.extensions.code.jail import find_jail_problem

        if problem := find_jail_problem():
            yield recipe.problem("reward_funcs", f"{NAME}: {problem[0]}", problem[1])


# fmt: off
RULES: tuple[Rule, ...] = (
    Rule("code_sandbox", lambda r: _is_used(r) and _uses_service(r) and not CodeKeys(r).server_url
        and CodeKeys(r).sandbox != E2B,
        "code_sandbox: {code_sandbox} needs the address of the service",
        "set code_server_url: http://HOST:2000"),
    Rule("code_sandbox", lambda r: _is_used(r) and CodeKeys(r).sandbox == E2B and E2B_KEY not in r.rewards.environment,
        f"rewards don't get the variable {E2B_KEY}",
        lambda r, _: f"set reward_environment: [{', '.join([*r.rewards.environment, E2B_KEY])}]"),
    Rule("code_server_url", lambda r: (url := CodeKeys(r).server_url) and not is_url(url),
        "expected an http or https URL, got '{code_server_url}'", "set code_server_url: http://HOST:2000"),
    Rule("code_server_url", lambda r: _is_used(r) and not _uses_service(r) and bool(set_by_user(r, "code_server_url")),
        "code_server_url does nothing with code_sandbox: bwrap", "{removal}, or set code_sandbox: piston"),
)
CHECKS = (check_sandbox,)
# fmt: on
