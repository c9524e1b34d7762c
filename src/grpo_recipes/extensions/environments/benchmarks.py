"""Benchmarks that are played: the held-out episodes of an environment of the recipe, several times each."""

import random
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from grpo_recipes.evaluate.benchmarks import CHUNK, StoppedInBenchmarks
from grpo_recipes.extensions.environments.episode import Episode
from grpo_recipes.extensions.environments.rows import evaluation_episodes
from grpo_recipes.recipe.configs import ScriptArguments
from grpo_recipes.rollouts.backends import Prompt, Sampling, Tokens, problem_seed
from grpo_recipes.secrets import masked

_ROUNDING = 1e-6  # of rewards that are sums


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


def play_benchmark(source: Any, runner: Any, name: str, rows: list[dict[str, Any]]) -> None:
    """Play an environment's held-out episodes; rank 0 has their children, and samples where it does so alone."""
    trainer, rollouts = runner.trainer, runner.trainer.rollouts
    how = Sampling(1, runner.args.benchmark_temperature, source.turn_tokens)
    problems = held_out(name, runner.args, trainer.args.seed)
    step = max(1, CHUNK // runner.args.benchmark_samples)

    def turn(played: list[Episode], asked: list[Prompt], drawn: list[list[Tokens]] | None) -> None:
        sampled = rollouts.sample(asked, how) if drawn is None and asked else drawn or []
        source.go_on([one for one in played if one.active], [one for (one,) in sampled], trainer)

    def keep(chunk: list[list[Episode]]) -> None:
        runner.add_rows(name, list(result_rows(chunk, source.reward, runner.args.benchmark_solved)), rows)

    for start in range(0, len(problems), step):
        chunk = problems[start : start + step]
        played = [one for problem in chunk for one in problem]
        runner.on_main(partial(source.enter, played, f"{name}/{start}", trainer))
        while not runner.on_main(runner.stop_requested):
            asked = runner.on_main(partial(prompts_of, played, name, trainer.args.seed))
            if asked is None:
                break
            drawn = None if rollouts.only_main_rank_samples or not asked else rollouts.sample(asked, how)
            runner.on_main(partial(turn, played, asked, drawn))
        else:
            raise StoppedInBenchmarks(name, runner.stage.progress)
        runner.on_main(partial(keep, chunk))
