"""The problems of a benchmark as chats with their right answers."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_recipes.data.problems import Message, answer_of, chat_of
from grpo_recipes.data.rows import DataSource, Fetched, column_names, read_rows, rows_of
from grpo_recipes.errors import config_error
from grpo_recipes.modebench.dataset import TASKS
from grpo_recipes.recipe.configs import ScriptArguments
from grpo_recipes.recipe.registry import (
    BENCHMARKS,
    SMOKE_BENCHMARK,
    Benchmark,
    benchmark_columns,
    is_file,
)
from grpo_recipes.smoke import smoke_folder

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_KEYS = ("benchmarks", "benchmarks")


@dataclass(frozen=True)
class BenchmarkProblem:
    """One problem.

    Attributes:
        index: its place in the benchmark: what sampling seeds come from.
        prompt: chat messages, the recipe's system prompt first.
        gold: the right answer.
    """

    index: int
    prompt: list[Message]
    gold: str

    @property
    def text(self) -> str:
        """What the user asks."""
        return self.prompt[-1]["content"]


def load_problems(
    name: str, args: ScriptArguments, seed: int, fetched: Fetched | None = None
) -> list[BenchmarkProblem]:
    """Read a benchmark: all of it, or ``benchmark_max_problems`` drawn by seed, in the order of the dataset.

    Args:
        name: of ``BENCHMARKS``, or a .jsonl file.
        args: system prompt, columns of files, and the number of problems.
        seed: draws problems, and shuffles options of multiple choice.
        fetched: as in ``data.read_rows``.

    Raises:
        ConfigError: the dataset cannot be read, or a problem or answer is missing.
    """
    benchmark = _file_benchmark(name, args) if is_file(name) else BENCHMARKS[name]
    place = _smoke_file() if name == SMOKE_BENCHMARK else benchmark.id
    source = DataSource(place, benchmark.config, benchmark.split, benchmark.prompt, benchmark.solution, _KEYS)
    if name in TASKS:
        rows: Any = rows_of(source, args)
    else:
        rows = read_rows(place, benchmark.config, benchmark.split, fetched=fetched)
    if len(rows) == 0:
        raise config_error("benchmarks", f"'{place}' has no rows", "name a dataset with rows")
    indices = _drawn(len(rows), args.benchmark_max_problems, seed)
    return [_problem(index, rows[index], benchmark, source, args.system_prompt, seed) for index in indices]


def _file_benchmark(name: str, args: ScriptArguments) -> Benchmark:
    path = os.path.expanduser(name)
    if not os.path.isfile(path):
        raise config_error("benchmarks", f"no file '{name}'", "put it back, or leave it out")
    names = column_names(read_rows(path, None, "test"))
    columns = benchmark_columns(names, (args.dataset_prompt_column, args.dataset_solution_column))
    if columns is None:
        raise config_error("benchmarks", f"'{name}' has the columns {', '.join(names)}", "name two problem and answer")
    return Benchmark("", path, "test", prompt=columns[0], solution=columns[1])


def _smoke_file() -> str:
    file: Path = smoke_folder(SMOKE_BENCHMARK, os.environ) / "test.jsonl"
    return str(file)


def _drawn(count: int, most: int | None, seed: int) -> list[int]:
    if most is None or most >= count:
        return list(range(count))
    return sorted(random.Random(seed).sample(range(count), most))


def _problem(
    index: int, row: dict[str, Any], benchmark: Benchmark, source: DataSource, system: str | None, seed: int
) -> BenchmarkProblem:
    prompt = chat_of(row.get(benchmark.prompt), source)
    gold, _ = answer_of(row.get(benchmark.solution), benchmark.marker, source)
    if not prompt or not gold:
        raise config_error(
            "benchmarks", f"row {index} of '{source.id}' has no problem or no answer", "mend the dataset"
        )
    if benchmark.wrong:
        options = [gold, *(str(row[column]).strip() for column in benchmark.wrong)]
        prompt, gold = _multiple_choice(prompt, options, random.Random(f"{seed}/{index}"))
    if system and prompt[0]["role"] not in ("system", "developer"):
        prompt = [{"role": "system", "content": system}, *prompt]
    return BenchmarkProblem(index, prompt, gold)


def _multiple_choice(prompt: list[Message], options: list[str], rng: random.Random) -> tuple[list[Message], str]:
    """The question with its options, the first of which is right, in a drawn order; and the right letter."""
    order = rng.sample(range(len(options)), len(options))
    lines = [f"{letter}) {options[place]}" for letter, place in zip(_LETTERS, order, strict=False)]
    question = "\n".join([prompt[-1]["content"], "", *lines, "", "Answer with the letter of the right option."])
    return [*prompt[:-1], {"role": prompt[-1]["role"], "content": question}], _LETTERS[order.index(0)]
