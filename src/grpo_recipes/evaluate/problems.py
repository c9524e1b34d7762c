"""The problems of a benchmark as chats with their right answers, and the rewards that score completions of them."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo_recipes.data.problems import DataSource, Fetched, Message, answer_of, chat_of, read_rows, rows_of
from grpo_recipes.errors import config_error
from grpo_recipes.modebench.dataset import TASKS
from grpo_recipes.recipe.configs import ScriptArguments
from grpo_recipes.recipe.registry import ACCURACY, BENCHMARKS, SMOKE_BENCHMARK, Benchmark, benchmark_columns, is_file
from grpo_recipes.rewards.score import RewardWrapper, make_reward
from grpo_recipes.smoke import smoke_folder

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_KEYS = ("benchmarks", "benchmarks")


@dataclass(frozen=True)
class BenchmarkProblem:
    """One problem."""

    index: int  # its place in the benchmark, from which sampling seeds come
    prompt: list[Message]  # the recipe's system prompt first, the question last
    gold: str  # the right answer


def load_problems(
    name: str, args: ScriptArguments, seed: int, fetched: Fetched | None = None
) -> list[BenchmarkProblem]:
    """Read a benchmark: all of it, or ``benchmark_max_problems`` drawn by seed, in the order of the dataset.

    ``name`` is one of ``BENCHMARKS``, or a .jsonl file. The seed also shuffles options of multiple choice.
    """
    benchmark = _file_benchmark(name, args) if is_file(name) else BENCHMARKS[name]
    smoke = name == SMOKE_BENCHMARK
    place = str(smoke_folder(SMOKE_BENCHMARK, os.environ) / "test.jsonl") if smoke else benchmark.id
    source = DataSource(place, benchmark.config, benchmark.split, benchmark.prompt, benchmark.solution, _KEYS)
    if name in TASKS:
        rows: Any = rows_of(source, args)
    else:
        rows = read_rows(place, benchmark.config, benchmark.split, fetched=fetched)
    if len(rows) == 0:
        raise config_error("benchmarks", f"'{place}' has no rows", "name a dataset with rows")
    count = min(len(rows), args.benchmark_max_problems or len(rows))
    indices = sorted(random.Random(seed).sample(range(len(rows)), count))
    return [_problem(index, rows[index], benchmark, source, args.system_prompt, seed) for index in indices]


def _file_benchmark(name: str, args: ScriptArguments) -> Benchmark:
    path = os.path.expanduser(name)
    if not os.path.isfile(path):
        raise config_error("benchmarks", f"no file '{name}'", "put it back, or leave it out")
    names = read_rows(path, None, "test").column_names or []
    columns = benchmark_columns(names, (args.dataset_prompt_column, args.dataset_solution_column))
    if columns is None:
        raise config_error("benchmarks", f"'{name}' has the columns {', '.join(names)}", "name two problem and answer")
    return Benchmark("", path, "test", prompt=columns[0], solution=columns[1])


def _problem(
    index: int, row: dict[str, Any], benchmark: Benchmark, source: DataSource, system: str | None, seed: int
) -> BenchmarkProblem:
    prompt = chat_of(row.get(benchmark.prompt), source, system)
    gold, _ = answer_of(row.get(benchmark.solution), benchmark.marker, source)
    if not prompt or not gold:
        what = f"row {index} of '{source.id}' has no problem or no answer"
        raise config_error("benchmarks", what, "correct the dataset")
    if benchmark.wrong:  # multiple choice: the options in a drawn order, answered by the right one's letter
        options = [gold, *(str(row[column]).strip() for column in benchmark.wrong)]
        order = random.Random(f"{seed}/{index}").sample(range(len(options)), len(options))
        lines = [f"{letter}) {options[place]}" for letter, place in zip(_LETTERS, order, strict=False)]
        question = [prompt[-1]["content"], "", *lines, "", "Answer with the letter of the right option."]
        prompt, gold = [*prompt[:-1], {**prompt[-1], "content": "\n".join(question)}], _LETTERS[order.index(0)]
    return BenchmarkProblem(index, prompt, gold)


@dataclass(frozen=True)
class Scorer:
    """A reward that scores completions of a benchmark."""

    name: str  # for the results
    reward: Any  # called as TRL calls it

    def scores(self, problems: Sequence[BenchmarkProblem], texts: Sequence[Sequence[str]]) -> list[list[float | None]]:
        """Return 1 for a right completion, 0 for a wrong one, None for an unscored one: (problems, samples)."""
        if isinstance(self.reward, RewardWrapper):
            self.reward.give_up_after = None
        flat = [(problem, text) for problem, row in zip(problems, texts, strict=True) for text in row]
        completions = [[{"role": "assistant", "content": text}] for _, text in flat]
        columns = {"prompts": [problem.prompt for problem, _ in flat], "answer": [problem.gold for problem, _ in flat]}
        scores = iter(self.reward(completions=completions, **columns))
        return [[next(scores) for _ in row] for row in texts]


# Scores ModeBench, whatever rewards the recipe has.
MODEBENCH = Scorer("modebench", make_reward("modebench", None, None))


def recipe_scorer(names: Sequence[str], rewards: Sequence[Any], script_args: Any, args: Any) -> Scorer:
    """Return the first of the recipe's rewards that says right or wrong; ``pure_accuracy_math`` when there is none.

    Not ``modebench``, which scores its own problems alone. ``rewards`` are those ``names``, as the trainer calls them.
    """
    for name, reward in zip(names, rewards, strict=True):
        if name in ACCURACY and name != MODEBENCH.name:
            return Scorer(name, reward)
    return Scorer(ACCURACY[0], make_reward(ACCURACY[0], script_args, args))
