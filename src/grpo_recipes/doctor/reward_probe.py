"""A recipe's rewards, shown a sample of its own rows."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

from grpo_recipes.errors import ConfigError, Problem
from grpo_recipes.fetch.assets import find_assets
from grpo_recipes.modebench.verify import is_problem
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.registry import ACCURACY, IN_CHILDREN, REWARDS, make_reward
from grpo_recipes.recipe.user_code import load_object
from grpo_recipes.rewards.pool import PoolReward, RewardPool
from grpo_recipes.rewards.probe import ProbeResult, ScoreFunction, probe
from grpo_recipes.rewards.score import RewardFailed, Score, call_reward, described

_MEND = "mend it, or name another in reward_funcs"
_LONG = 200  # characters; an answer that completions can repeat is shorter


def sample_rows(recipe: Recipe, most: int, environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the first ``most`` rows a recipe trains on, before any shuffle; ``environment`` has the caches.

    Raises:
        ConfigError: the dataset cannot be read, or lacks a column.
    """
    from datasets import disable_progress_bars

    from grpo_recipes.data.prompts import first_problems

    disable_progress_bars()
    args: Any = SimpleNamespace(**{key: entry.value for key, entry in recipe.values.items()})
    return first_problems(args, most, find_assets(recipe, environment).lookup)


def probe_rewards(recipe: Recipe, rows: list[dict[str, Any]]) -> list[ProbeResult]:
    """Show every reward of a recipe right and wrong completions of these rows.

    Raises:
        ConfigError: a reward cannot be loaded.
    """
    strict = recipe["answer_matching"] == "strict"
    most_missing = recipe["reward_max_no_verdict"]
    with _scores(recipe) as scores:
        return [probe(name, score, rows, strict, most_missing) for name, score in scores.items()]


def problems_of(recipe: Recipe, rows: list[dict[str, Any]], findings: list[ProbeResult]) -> list[Problem]:
    """Return what is wrong with the rewards, one line a fault."""
    where = recipe.place("reward_funcs")
    found = [
        Problem(where, f"reward '{finding.reward}' {what}", fix) for finding in findings for what, fix in finding.faults
    ]
    if not found and findings and not any(finding.tells_apart for finding in findings):
        what = "no reward tells right answers from wrong ones: all get the same on average"
        found.append(Problem(where, what, f"add one that does, e.g. {ACCURACY[0]}, or mend your own"))
    return found + _long_solutions(recipe, rows)


def _long_solutions(recipe: Recipe, rows: list[dict[str, Any]]) -> list[Problem]:
    """Refuse solutions with their reasoning: each equals itself, and no completion ever equals it."""
    compared = {*ACCURACY, "cosine_length"} & set(recipe["reward_funcs"])
    answers = [row["answer"] for row in rows if not is_problem(row["answer"])]
    long = [answer for answer in answers if "\n" in answer or len(answer) > _LONG]
    if not compared or len(long) * 2 <= len(rows):
        return []
    example = " ".join(long[0].split())[:60]
    what = f"{len(long)} of {len(rows)} reference solutions are no short answers, e.g. '{example}…'"
    marker = "'####'" if "####" in long[0] else "the text before the answer"
    fix = f"add dataset_solution_marker: {marker}, or name the column of the final answer"
    return [Problem(recipe.place("dataset_solution_column"), what, fix)]


@contextmanager
def _scores(recipe: Recipe) -> Iterator[dict[str, ScoreFunction]]:
    """Yield the recipe's rewards by their names, in children where the trainer has them there."""
    names = list(dict.fromkeys(recipe["reward_funcs"]))
    isolated = recipe["reward_isolation"] == "completion"
    away = [name for name in names if name in IN_CHILDREN or (name not in REWARDS and isolated)]
    if not away:
        yield {name: _here(recipe, name) for name in names}
        return
    pool = RewardPool(
        *[PoolReward(name, _keys(recipe, name)) for name in away],
        workers=recipe["reward_workers"],
        timeout=recipe["reward_timeout"],
        memory_gib=recipe["reward_memory_gib"],
    )
    try:
        with pool:
            yield {name: partial(pool.score, name) if name in away else _here(recipe, name) for name in names}
    except RewardFailed as error:
        raise ConfigError(Problem(recipe.place("reward_funcs"), str(error), _MEND)) from error


def _here(recipe: Recipe, name: str) -> ScoreFunction:
    def score(completions: list[Any], columns: dict[str, list[Any]]) -> list[Score]:
        everything = {"completions": completions, **columns}
        if name in REWARDS:
            reward = make_reward(name, SimpleNamespace(**_keys(recipe, name)), None)
            return call_reward(reward, everything, len(completions))
        try:
            return call_reward(load_object(name), everything, len(completions))
        except ConfigError:
            raise
        except Exception as error:  # theirs: whatever it raises would end the run
            traceback.print_exc()
            what = f"reward '{name}' failed: {described(error)}"
            raise ConfigError(Problem(recipe.place("reward_funcs"), what, _MEND)) from error

    return score


def _keys(recipe: Recipe, name: str) -> dict[str, Any]:
    return {key: recipe[key] for key in REWARDS.get(name, ())}
