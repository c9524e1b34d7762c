"""Benchmarks that are played: the held-out episodes of an environment of the recipe, several times each."""

import random
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from grpo_recipes.data.prompts import evaluation_episodes
from grpo_recipes.extensions.environments.episode import Episode
from grpo_recipes.extensions.environments.recipe import environments_of
from grpo_recipes.recipe.configs import ScriptArguments
from grpo_recipes.rollouts.backends import Prompt, problem_seed
from grpo_recipes.secrets import masked

_ROUNDING = 1e-6  # of rewards that are sums


def is_played(name: str, args: ScriptArguments) -> bool:
    """Return whether a benchmark is an environment of the recipe."""
    return name in [spec for spec, _, _ in environments_of(partial(getattr, args))]


def held_out(name: str, args: ScriptArguments, seed: int) -> list[list[Episode]]:
    """Return new episodes of an environment, (seeds, ``benchmark_samples``), at most ``benchmark_max_problems`` seeds.

    They are those that the run evaluates on; fewer are drawn by ``seed``.
    """
    rows = [row for row in evaluation_episodes(args) if row["environment"] == name]
    count, samples = min(len(rows), args.benchmark_max_problems or len(rows)), args.benchmark_samples
    drawn = [rows[index] for index in sorted(random.Random(seed).sample(range(len(rows)), count))]
    return [
        [Episode(place * samples + copy, name, row["arguments"], row["seed"]) for copy in range(samples)]
        for place, row in enumerate(drawn)
    ]


def prompts_of(played: Sequence[Episode], name: str, seed: int) -> list[Prompt] | None:
    """Return what the next turns are sampled from, of those whose mover has room for one; None where all have ended."""
    active = [one for one in played if one.active]
    return (
        [
            Prompt(one.read(), problem_seed(seed, f"{name}/turn{len(one.actions)}", one.row))
            for one in active
            if one.mover
        ]
        if active
        else None
    )


def result_rows(problems: Sequence[Sequence[Episode]], rewards: Any, solved: float) -> Iterator[dict[str, Any]]:
    """Yield the row of each seed for the benchmark's file; ``rewards`` returns that of an episode, or None."""
    for episodes in problems:
        worth = [rewards(one) for one in episodes]
        turns = [one.turns[-1] for one in episodes if one.turns]
        yield {
            "problem": next((one.opening[-1]["content"] for one in episodes if one.opening), ""),
            "gold": next((str(turn.info["answer"]) for turn in turns if "answer" in turn.info), ""),
            "scores": [None if one is None else float(one >= solved - _ROUNDING) for one in worth],
            "rewards": worth,
            "failed": [one.failed for one in episodes],
            "lengths": [sum(turn is not None for turn in one.turn_ids) for one in episodes],
            "truncated": [bool(one.unfinished) for one in episodes],
            "completions": [_as_text(one) for one in episodes],
        }


def _as_text(episode: Episode) -> str:
    """Return what was said after the policy first read something, a message a line."""
    said = episode.transcript()[len(episode.opening) :]
    return masked("\n".join(f"[{one['role']}] {one['content']}" for one in said))
