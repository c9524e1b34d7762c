"""The reward that this extension registers, and the rules of its keys. No torch."""

import re
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from grpo_recipes.extensions.judge.arguments import JudgeKeys
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.registry import Reward
from grpo_recipes.recipe.rules import Idle, Rule, set_by_user

NAME = "llm_judge"
# The parts of judge_prompt that are replaced: judge_mode -> (required, optional).
PLACEHOLDERS = {"absolute": (("completion",), ("prompt", "answer")), "pairwise": (("first", "second"), ("prompt",))}


def _reads_answer(lookup: Callable[[str], Any]) -> bool:
    """Return whether the judge of a recipe reads the reference answer: its own prompt may leave it out."""
    prompt = lookup("judge_prompt")
    return lookup("judge_mode") == "pairwise" or prompt is None or "{answer}" in prompt


REWARDS = (
    Reward(NAME, "grpo_recipes.extensions.judge.reward:llm_judge", (
        "judge_base_url", "judge_model", "judge_api_key_variable", "judge_mode", "judge_prompt", "judge_scale",
        "judge_max_tokens", "judge_temperature", "judge_retries", "judge_cache", "reward_timeout"),
        in_children=True, calls_server=True,
        needs_solution=_reads_answer),
)  # fmt: skip


def _is_used(recipe: Recipe) -> bool:
    """Return whether a recipe uses the reward ``llm_judge``."""
    return NAME in recipe.rewards.funcs


def _get_key_variable(recipe: Recipe) -> str:
    """Return the name of the variable with the key of the judge's server, or an empty string."""
    return JudgeKeys(recipe).api_key_variable or ""


def _is_address(url: str) -> bool:
    """Return whether a text is an http or https URL with a host."""
    parts = urlsplit(url)
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def _list_placeholders(recipe: Recipe) -> list[str]:
    """Return the placeholders that ``judge_prompt`` may contain."""
    required, optional = PLACEHOLDERS[JudgeKeys(recipe).mode]
    return [*required, *optional]


def _find_unknown_placeholders(recipe: Recipe) -> list[str]:
    """Return the placeholders of ``judge_prompt`` that do not exist."""
    names = re.findall(r"\{([a-z_]+)\}", JudgeKeys(recipe).prompt or "")
    return [name for name in dict.fromkeys(names) if name not in _list_placeholders(recipe)]


def _find_missing_placeholders(recipe: Recipe) -> list[str]:
    """Return the required placeholders that ``judge_prompt`` lacks; [] if the recipe does not set it."""
    prompt = JudgeKeys(recipe).prompt
    required, _ = PLACEHOLDERS[JudgeKeys(recipe).mode]
    return [] if prompt is None else [name for name in required if f"{{{name}}}" not in prompt]


def _suggest_placeholder(recipe: Recipe, _: str) -> str:
    """Return the fix for an unknown placeholder: a missing one, or else any that exists."""
    return f"use {[*_find_missing_placeholders(recipe), *_list_placeholders(recipe)][0]}"


# fmt: off
RULES: tuple[Rule, ...] = (
    Rule("judge_base_url", lambda r: _is_used(r) and not JudgeKeys(r).base_url,
        "llm_judge needs the address of the judge's server", "set judge_base_url: http://HOST:8000/v1"),
    Rule("judge_base_url", lambda r: (url := JudgeKeys(r).base_url) and not _is_address(url),
        "expected an address such as http://HOST:8000/v1, got '{judge_base_url}'",
        "set judge_base_url: http://HOST:8000/v1"),
    Rule("judge_model", lambda r: _is_used(r) and not JudgeKeys(r).model,
        "llm_judge needs the name of the judge on its server", "set judge_model: NAME"),
    Rule("judge_api_key_variable",
        lambda r: _is_used(r) and (name := _get_key_variable(r)) and name not in r.rewards.environment,
        "rewards don't get the variable {judge_api_key_variable}",
        lambda r, _: f"set reward_environment: [{', '.join([*r.rewards.environment, _get_key_variable(r)])}]"),
    Rule("judge_prompt", _find_unknown_placeholders,
        lambda r, name: f"unknown placeholder '{name}', expected one of {', '.join(_list_placeholders(r))}",
        _suggest_placeholder),
    Rule("judge_prompt", lambda r: not _find_unknown_placeholders(r) and _find_missing_placeholders(r),
        "the judge would not see '{item}', because judge_prompt does not contain this placeholder",
        lambda _, name: f"add {{{name}}} to judge_prompt"),
    Rule("judge_scale", lambda r: len(JudgeKeys(r).scale) != 2 or JudgeKeys(r).scale[0] >= JudgeKeys(r).scale[1],
        "expected the lowest and the highest grade, got {judge_scale}", "set judge_scale: [0, 10]"),
    Rule("judge_scale", lambda r: JudgeKeys(r).mode == "pairwise" and bool(set_by_user(r, "judge_scale")),
        "judge_scale and judge_mode: pairwise can't be combined, because a comparison has no grades",
        "{removal}, or set judge_mode: absolute"),
)
IDLE: tuple[Idle, ...] = (Idle("judge_*", lambda r: not _is_used(r), "reward_funcs: [llm_judge]"),)
# fmt: on
