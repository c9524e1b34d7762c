"""The benchmarks a recipe can name, and what a recipe can get wrong about them. No torch: ``check`` reads it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from grpo_recipes.errors import Problem
from grpo_recipes.recipe.keys import nearest_of

SMOKE_BENCHMARK = "smoke:sums"


@dataclass(frozen=True)
class Benchmark:
    """Where the problems of a benchmark are and how they are read.

    Attributes:
        help: one line for `grpo keys --benchmarks`.
        id: dataset on the hub.
        split: split that is read.
        config: configuration of the dataset, or None.
        prompt: column of the problem.
        solution: column of the right answer.
        marker: the answer is what follows the last occurrence of this text in the solution.
        wrong: columns of wrong answers: a multiple-choice benchmark, answered by a letter.
        gated: whether the hub wants an accepted licence and HF_TOKEN.
    """

    help: str
    id: str
    split: str
    config: str | None = None
    prompt: str = "problem"
    solution: str = "answer"
    marker: str | None = None
    wrong: tuple[str, ...] = ()
    gated: bool = False


BENCHMARKS: dict[str, Benchmark] = {
    "math_500": Benchmark("500 competition problems of MATH", "HuggingFaceH4/MATH-500", "test"),
    "gsm8k": Benchmark(
        "1,319 grade-school word problems", "openai/gsm8k", "test", "main", prompt="question", marker="####"
    ),
    "aime24": Benchmark("30 problems of AIME 2024, answers 0 to 999", "HuggingFaceH4/aime_2024", "train"),
    "aime25": Benchmark("30 problems of AIME 2025, answers 0 to 999", "math-ai/aime25", "test"),
    "gpqa": Benchmark(
        "198 multiple-choice questions of GPQA diamond; gated: needs HF_TOKEN",
        "Idavidrein/gpqa",
        "train",
        "gpqa_diamond",
        prompt="Question",
        solution="Correct Answer",
        wrong=("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"),
        gated=True,
    ),
    **{
        name: Benchmark(f"{about}: pass@k, mean@k, distinct@k, coverage@k; needs no network", name, "test")
        for name, about in {
            "modebench:countdown": "test split: make a target of three or four numbers",
            "modebench:graph_coloring": "test split: complete a colouring of a graph",
        }.items()
    },
    SMOKE_BENCHMARK: Benchmark("20 held-out sums of the smoke task; needs no network", SMOKE_BENCHMARK, "test"),
}

# They run code that the model wrote, which needs a sandbox that we do not have.
_RUNS_MODEL_CODE = {"lcb": "lcb:codegeneration", "lcb_v4": "lcb:codegeneration_v4"}


def is_file(name: str) -> bool:
    """Whether a benchmark is a local file of problems rather than a name of the registry."""
    return name.endswith(".jsonl")


def benchmark_columns(names: Iterable[str], recipe_columns: tuple[str, str]) -> tuple[str, str] | None:
    """Columns of problem and answer in a user's file: ``problem`` and ``answer``, else the recipe's, else None."""
    known = set(names)
    candidates = (("problem", "answer"), recipe_columns)
    return next((columns for columns in candidates if known.issuperset(columns)), None)


def benchmark_problem(name: str, where: str) -> Problem | None:
    """What is wrong with a name in ``benchmarks``, or None."""
    if name in _RUNS_MODEL_CODE:
        what = f"benchmark '{name}' runs code that the model wrote, which this package does not do"
        command = f'lighteval vllm "model_name=<run>/model" "{_RUNS_MODEL_CODE[name]}|0"'
        return Problem(where, what, f"remove it and run, in an environment of lighteval: {command}")
    if is_file(name):
        missing = not Path(os.path.expanduser(name)).is_file()
        return Problem(where, f"no file '{name}'", "name an existing .jsonl file") if missing else None
    if name in BENCHMARKS:
        return None
    close = nearest_of(name, BENCHMARKS)
    known = ", ".join(BENCHMARKS)
    fix = f"write '{close}'" if close else f"write one of {known}, or the path of a .jsonl file"
    return Problem(where, f"no benchmark '{name}'", fix)


def benchmark_sources(names: Iterable[str]) -> list[tuple[str, str | None, str]]:
    """The hub datasets of some benchmarks, to be fetched before a job: (id, config, split), without files and smoke."""
    chosen = [BENCHMARKS[name] for name in names if name in BENCHMARKS and name != SMOKE_BENCHMARK]
    return [(benchmark.id, benchmark.config, benchmark.split) for benchmark in chosen]
