"""The tasks the guide evaluated on: known by their names, read from their datasets by their own columns."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest

from grpo_recipes.evaluate.benchmarks import load_problems
from grpo_recipes.recipe.configs import ScriptArguments
from grpo_recipes.recipe.registry import benchmark_problem, benchmark_sources

TASKS = {
    "math_500": (("HuggingFaceH4/MATH-500", None, "test"), ("problem", "answer")),
    "aime24": (("HuggingFaceH4/aime_2024", None, "train"), ("problem", "answer")),
    "aime25": (("math-ai/aime25", None, "test"), ("problem", "answer")),
    "gpqa": (("Idavidrein/gpqa", "gpqa_diamond", "train"), ("Question", "Correct Answer")),
}


@pytest.mark.parametrize("name", TASKS)
def test_a_task_of_the_guide_is_read_from_its_dataset(name: str, tmp_path: Path) -> None:
    source, (problem, answer) = TASKS[name]
    wrong_answers = {f"Incorrect Answer {number}": [f"not {number}"] for number in (1, 2, 3)}
    datasets.Dataset.from_dict({problem: ["How many?"], answer: ["204"], **wrong_answers}).save_to_disk(
        tmp_path / "set"
    )

    def fetched(*requested: str | None) -> Path | None:
        return tmp_path / "set" if requested == source else None

    assert benchmark_problem(name, "benchmarks") is None
    assert benchmark_sources([name]) == [source]
    (read,) = load_problems(name, ScriptArguments(dataset_name="x"), 0, fetched)
    assert read.prompt[-1]["content"].startswith("How many?")
    assert read.gold == "204" or f"{read.gold}) 204" in read.prompt[-1]["content"]
