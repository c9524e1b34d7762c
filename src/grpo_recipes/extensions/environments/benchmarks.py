"""Benchmarks in the recipe's environments: play new episodes on the run's evaluation seeds, several per seed.

``benchmark_samples`` is the number of episodes per seed, and ``benchmark_max_problems`` limits the seeds. All ranks
call ``play_benchmark``, which adds a row per seed, with the rewards of its episodes, to the benchmark's rows.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from grpo_recipes.evaluate.benchmarks import CHUNK, StoppedInBenchmarks
from grpo_recipes.extensions.environments.episode import Episode
from grpo_recipes.extensions.environments.rows import make_evaluation_rows
from grpo_recipes.recipe.configs import ScriptArguments
from grpo_recipes.rollouts.backends import Prompt, Sampling, Tokens, problem_seed
from grpo_recipes.secrets import mask_secrets

_ROUNDING = 1e-6  # tolerance for rewards that are sums


def draw_benchmark_episodes(name: str, args: ScriptArguments, seed: int) -> list[list[Episode]]:
    """Create ``benchmark_samples`` unplayed episodes per evaluation seed of the environment ``name``; a list per seed.

    If there are more seeds than ``benchmark_max_problems``, a random sample of them is drawn with ``seed``.
    """
    rows = [row for row in make_evaluation_rows(args) if row["environment"] == name]
    count, samples = min(len(rows), args.benchmark_max_problems or len(rows)), args.benchmark_samples
    drawn_rows = [rows[index] for index in sorted(random.Random(seed).sample(range(len(rows)), count))]
    return [
        [Episode(index * samples + copy, name, row["arguments"], row["seed"]) for copy in range(samples)]
        for index, row in enumerate(drawn_rows)
    ]


def make_next_prompts(episodes: Sequence[Episode], name: str, seed: int) -> list[Prompt] | None:
    """Return a prompt for the next turn of each active episode, or None if all episodes have ended.

    The list leaves out active episodes with a next model that has no tokens left for a turn. The sampling seed of a
    prompt derives from ``seed``, ``name``, turn and row.
    """
    active = [episode for episode in episodes if episode.active]
    if not active:
        return None
    return [
        Prompt(episode.context(), problem_seed(seed, f"{name}/turn{len(episode.actions)}", episode.row))
        for episode in active
        if episode.next_model
    ]


def make_result_rows(
    problems: Sequence[Sequence[Episode]], reward_of: Callable[[Episode], float | None], solved: float
) -> Iterator[dict[str, Any]]:
    """Yield one row per seed for the benchmark's file, with lists of its episodes' rewards, lengths and texts.

    ``reward_of`` returns an episode's reward or None. The score of an episode is 1 if its reward reaches
    ``solved``, else 0, and None without a reward.
    """
    for episodes in problems:
        rewards = [reward_of(episode) for episode in episodes]
        last_turns = [episode.turns[-1] for episode in episodes if episode.turns]
        yield {
            "problem": next((episode.opening[-1]["content"] for episode in episodes if episode.opening), ""),
            "gold": next((str(turn.info["answer"]) for turn in last_turns if "answer" in turn.info), ""),
            "scores": [None if reward is None else float(reward >= solved - _ROUNDING) for reward in rewards],
            "rewards": rewards,
            "failed": [episode.failed for episode in episodes],
            "lengths": [sum(turn is not None for turn in episode.turn_ids) for episode in episodes],
            "truncated": [bool(episode.unfinished) for episode in episodes],
            "completions": [_format_completion(episode) for episode in episodes],
        }


def _format_completion(episode: Episode) -> str:
    """Return an episode's messages after the first observation as text, one per line, with secrets masked."""
    messages = episode.transcript()[len(episode.opening) :]
    return mask_secrets("\n".join(f"[{message['role']}] {message['content']}" for message in messages))


def play_benchmark(source: Any, runner: Any, name: str, rows: list[dict[str, Any]]) -> None:
    """Play the evaluation episodes of the environment ``name`` in chunks.

    A row per seed is appended to the benchmark's file and, without the completions, to ``rows``. ``source`` is the
    run's Episodes, and ``runner`` runs its benchmarks. Every rank calls this. Rank 0 runs the environments. If only
    rank 0 can sample (``only_main_rank_samples``), it also samples every turn. Raise StoppedInBenchmarks if the run is
    asked to stop.
    """
    trainer, rollouts = runner.trainer, runner.trainer.rollouts
    sampling = Sampling(1, runner.args.benchmark_temperature, source.turn_tokens)
    problems = draw_benchmark_episodes(name, runner.args, trainer.args.seed)
    problems_per_chunk = max(1, CHUNK // runner.args.benchmark_samples)

    def play_turn(episodes: list[Episode], prompts: list[Prompt], samples: list[list[Tokens]] | None) -> None:
        """Add a sampled turn and the environment's answer to each active episode; sample it if ``samples`` is None."""
        if samples is None:
            samples = rollouts.sample(prompts, sampling) if prompts else []
        active = [episode for episode in episodes if episode.active]
        source.continue_episodes(active, [tokens for (tokens,) in samples], trainer)

    def save_rows(chunk: list[list[Episode]]) -> None:
        """Save the result rows of finished episodes, and add them to ``rows``."""
        runner.add_rows(name, list(make_result_rows(chunk, source.reward, runner.args.benchmark_solved)), rows)

    for start in range(0, len(problems), problems_per_chunk):
        chunk = problems[start : start + problems_per_chunk]
        episodes = [episode for problem in chunk for episode in problem]
        runner.on_main(partial(source.start_episodes, episodes, f"{name}/{start}", trainer))
        while not runner.on_main(runner.stop_requested):
            prompts = runner.on_main(partial(make_next_prompts, episodes, name, trainer.args.seed))
            if prompts is None:
                break
            samples = None if rollouts.only_main_rank_samples or not prompts else rollouts.sample(prompts, sampling)
            runner.on_main(partial(play_turn, episodes, prompts, samples))
        else:
            raise StoppedInBenchmarks(name, runner.stage.progress)
        runner.on_main(partial(save_rows, chunk))
