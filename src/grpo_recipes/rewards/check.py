"""Whether the rewards of a recipe distinguish right answers from wrong ones, on a sample of its own rows."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from datasets import disable_progress_bars

from grpo_recipes.data.prompts import first_problems
from grpo_recipes.errors import Problem, config_error
from grpo_recipes.modebench.verify import is_problem
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.registry import ACCURACY, Reward
from grpo_recipes.rewards.load import load_rewards
from grpo_recipes.rewards.probe import ProbeResult, probe
from grpo_recipes.rewards.score import RewardFailed, Score, call_reward
from grpo_recipes.rewards.wrapper import RewardWrapper

_LONG = 200  # characters; an answer that completions can repeat is shorter


def sample_rows(recipe: Recipe, most: int, fetched: Any) -> list[dict[str, Any]]:
    """Return the first ``most`` rows a recipe trains on, before any shuffle; ``fetched`` looks up fetched datasets."""
    disable_progress_bars()
    return first_problems(_settings(recipe), most, fetched)


def _settings(recipe: Recipe) -> Any:
    """Return the keys as attributes, as TRL's configs have them."""
    return SimpleNamespace(**{key: entry.value for key, entry in recipe.values.items()})


def probe_rewards(recipe: Recipe, rows: list[dict[str, Any]]) -> list[ProbeResult]:
    """Show every reward of a recipe, loaded as a trainer loads it, right and wrong completions of these rows."""
    settings = _settings(recipe)
    names = settings.reward_funcs = list(dict.fromkeys(recipe["reward_funcs"]))
    strict = recipe["answer_matching"] == "strict"
    rewards: list[Reward] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            rewards += load_rewards(settings, settings, Path(folder))
            return [
                probe(name, partial(_scores, reward), rows, strict, recipe["reward_max_no_verdict"])
                for name, reward in zip(names, rewards, strict=True)
            ]
        except RewardFailed as error:
            fix = "correct it, or name another in reward_funcs"
            raise config_error(recipe.place("reward_funcs"), str(error), fix) from error
        finally:
            for reward in rewards:
                if isinstance(reward, RewardWrapper):
                    reward.close()


def _scores(reward: Reward, completions: list[Any], columns: dict[str, list[Any]]) -> list[Score]:
    if isinstance(reward, RewardWrapper):
        reward(completions, **columns)
        return reward.scores
    return call_reward(reward, {"completions": completions, **columns}, len(completions))


def problems_of(recipe: Recipe, rows: list[dict[str, Any]], findings: list[ProbeResult]) -> list[Problem]:
    """Return what is wrong with the rewards, one line a fault."""
    where = recipe.place("reward_funcs")
    found = [
        Problem(where, f"reward '{finding.reward}' {what}", fix) for finding in findings for what, fix in finding.faults
    ]
    if not found and findings and not any(finding.tells_apart for finding in findings):
        what = "no reward tells right answers from wrong ones: all get the same on average"
        found.append(Problem(where, what, f"add one that does, e.g. {ACCURACY[0]}, or correct your own"))
    return found + _long_solutions(recipe, rows)


def _long_solutions(recipe: Recipe, rows: list[dict[str, Any]]) -> list[Problem]:
    """Refuse solutions with their reasoning: each equals itself, and no completion ever equals it."""
    compared = {*ACCURACY, "cosine_length"} & set(recipe["reward_funcs"])
    answers = [row["answer"] for row in rows if not is_problem(row["answer"])]
    long = [answer for answer in answers if "\n" in answer or len(answer) > _LONG]
    if not compared or len(long) * 2 <= len(rows):
        return []
    example = " ".join(long[0].split())[:60]
    what = f"{len(long)} of {len(rows)} reference solutions are not short answers, e.g. '{example}…'"
    marker = "'####'" if "####" in long[0] else "the text before the answer"
    fix = f"add dataset_solution_marker: {marker}, or name the column of the final answer"
    return [Problem(recipe.place("dataset_solution_column"), what, fix)]
