"""Environments as benchmarks: a tiny model plays held-out episodes in real children."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from grpo_recipes.evaluate.benchmarks import StoppedInBenchmarks, run_benchmarks
from grpo_recipes.extensions.environments.benchmarks import draw_benchmark_episodes, make_next_prompts
from grpo_recipes.extensions.environments.episodes import Episodes
from grpo_recipes.extensions.environments.rows import make_evaluation_rows
from grpo_recipes.recipe.configs import ScriptArguments
from grpo_recipes.rollouts.turns import Turn
from grpo_recipes.runs.rundir import read_json
from grpo_recipes.stats import pass_at_k_table

sys.path.insert(0, str(Path(__file__).parents[1] / "trainers"))
from tiny_training import train

REPOSITORY = Path(__file__).parents[2]
TWO = f"{REPOSITORY}/recipes/examples/two_sums.py:TwoSums"
GYM = "reasoning_gym:basic_arithmetic"
KEYS = {"environment_max_turns": 2, "environment_turn_length": 6, "environment_workers": 1}


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory, known_sums: dict[str, Any]) -> Any:
    """Return a tiny trainer after training, with a model that knows some sums."""
    trainer, _ = train(tmp_path_factory.mktemp("trained"), max_steps=1, max_completion_length=24)
    trainer.model.load_state_dict(known_sums)
    return trainer


@pytest.fixture
def played(trainer: Any, tmp_path: Path) -> Iterator[Any]:
    """Run the benchmarks of a recipe with these keys, and return the results."""
    open_now = []

    def run(stopped: Any = lambda: False, **keys: Any) -> dict[str, Any]:
        args = ScriptArguments(**{"benchmark_temperature": 1.0, "environment_eval_episodes": 6, **KEYS, **keys})
        (tmp_path / "rewards").mkdir(exist_ok=True)
        trainer.source = Episodes(args, trainer.args, tmp_path)
        trainer.source._specs = {}  # a run copies the user's files first
        open_now.append(trainer.source)
        run_benchmarks(trainer, args, tmp_path, stopped)
        return read_json(tmp_path / "benchmarks.json")

    yield run
    trainer.source = None
    for source in open_now:
        source.close()


def rows_of(folder: Path) -> dict[str, list[dict[str, Any]]]:
    files = (folder / "benchmarks").glob("*.jsonl")
    return {file.stem: [json.loads(line) for line in file.read_text().splitlines()] for file in files}


@pytest.mark.slow
def test_episodes_of_several_turns_are_played_and_solved(played: Any, tmp_path: Path) -> None:
    (result,) = played(environment=TWO, benchmarks=[TWO], benchmark_samples=4, benchmark_solved=0.5).values()
    (rows,) = rows_of(tmp_path).values()
    assert result["problems"] == 6 and result["samples"] == 4 and result["reward"] == "environment"
    rewards = [reward for row in rows for reward in row["rewards"]]
    assert {0.0, 0.5} <= set(rewards) and result["mean_reward"] == pytest.approx(sum(rewards) / 24, abs=1e-6)
    assert [row["scores"] for row in rows] == [[float(reward >= 0.5) for reward in row["rewards"]] for row in rows]
    assert result.items() >= pass_at_k_table([row["scores"] for row in rows]).items()
    assert 0 < result["pass@1"] < result["pass@4"]
    for row in rows:
        for text, reward in zip(row["completions"], row["rewards"], strict=True):
            first, question, second = text.split("\n")
            assert first.startswith("[assistant] ") and question.startswith("[user] ")
            questions = row["problem"], question.removeprefix("[user] ")
            right = [f"[assistant] <answer>{eval(sum_.rstrip('='))}</answer>" for sum_ in questions]
            assert (
                reward == sum(action == expected for action, expected in zip((first, second), right, strict=True)) / 2
            )


@pytest.mark.slow
def test_each_environment_of_a_mixture_has_its_own_result(played: Any, tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    entries = [{"id": TWO}, {"id": GYM, "args": {"max_terms": 2, "max_digits": 1}}]
    results = played(environment_mixture={"environments": entries}, benchmarks=[TWO, GYM], benchmark_samples=2)
    assert {name: result["problems"] for name, result in results.items()} == {TWO: 3, GYM: 3}
    (gym,) = (rows for name, rows in rows_of(tmp_path).items() if name.startswith("reasoning_gym"))
    assert all(row["problem"].startswith("Calculate ") and row["gold"] for row in gym)


def test_a_solved_episode_is_one_whose_reward_reaches_the_key(played: Any) -> None:
    strict = played(environment=TWO, benchmarks=[TWO], benchmark_samples=4)[TWO]
    kind = played(environment=TWO, benchmarks=[TWO], benchmark_samples=4, benchmark_solved=0.5)[TWO]
    assert strict["mean_reward"] == kind["mean_reward"] and strict["pass@1"] < kind["pass@1"]


def test_the_same_seed_gives_the_same_result_and_only_changes_run_again(played: Any, tmp_path: Path) -> None:
    keys = {"environment": TWO, "benchmarks": [TWO], "benchmark_samples": 2}
    played(**keys)
    first, result = rows_of(tmp_path), tmp_path / "benchmarks.json"
    before = result.stat().st_mtime_ns
    played(**keys)
    assert result.stat().st_mtime_ns == before
    played(**keys, environment_timeout=29.0)
    assert result.stat().st_mtime_ns > before and rows_of(tmp_path) == first


def test_episodes_are_those_of_evaluation_and_fewer_are_drawn() -> None:
    args = ScriptArguments(environment=TWO, environment_eval_episodes=9, benchmark_samples=2)
    seeds = [row["seed"] for row in make_evaluation_rows(args)]
    assert [[episode.seed for episode in copies] for copies in draw_benchmark_episodes(TWO, args, 0)] == [
        [seed, seed] for seed in seeds
    ]
    args.benchmark_max_problems = 4
    some = [copies[0].seed for copies in draw_benchmark_episodes(TWO, args, 0)]
    assert (
        len(some) == 4
        and set(some) < set(seeds)
        and draw_benchmark_episodes(TWO, args, 0) == draw_benchmark_episodes(TWO, args, 0)
    )
    assert some != [copies[0].seed for copies in draw_benchmark_episodes(TWO, args, 1)]


def test_turns_and_copies_are_sampled_with_seeds_of_their_own() -> None:
    args = ScriptArguments(environment=TWO, environment_eval_episodes=3, benchmark_samples=2)
    played, prompts = [episode for copies in draw_benchmark_episodes(TWO, args, 0) for episode in copies], []
    for actions in ([], ["4"]):
        for episode in played:
            episode.turns, episode.actions = [Turn([{"role": "user", "content": "1+1="}])] * (1 + len(actions)), actions
        prompts += make_next_prompts(played, TWO, 0) or []
    assert len({prompt.seed for prompt in prompts}) == len(prompts) == 12
    for episode in played:
        episode.done = True
    assert make_next_prompts(played, TWO, 0) is None


def test_an_episode_that_fails_has_no_verdict_and_its_reason(played: Any, tmp_path: Path) -> None:
    result = played(environment=TWO, benchmarks=[TWO], max_prompt_length=2)[TWO]
    assert (result["pass@1"], result["no_verdict"], result["mean_reward"]) == (None, 6, None)
    (rows,) = rows_of(tmp_path).values()
    assert all("more than max_prompt_length" in reason for row in rows for reason in row["failed"])


def test_a_stop_request_ends_it_between_turns(played: Any) -> None:
    stop_answers = iter([False, True])
    with pytest.raises(StoppedInBenchmarks):
        played(partial(next, stop_answers), environment=TWO, benchmarks=[TWO])


def test_the_model_plays_itself(played: Any, tmp_path: Path) -> None:
    pytest.importorskip("textarena")
    game = "textarena:TicTacToe-v0"
    keys = {"environment": game, "environment_max_turns": 3, "benchmarks": [game], "environment_eval_episodes": 2}
    result = played(**keys, environment_args={"opponents": "policy"})[game]
    (rows,) = rows_of(tmp_path).values()
    assert result["problems"] == 2 and result["no_verdict"] == 0
    assert all(text.startswith("[assistant] ") for row in rows for text in row["completions"])
