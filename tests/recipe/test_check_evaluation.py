"""Recipes that are wrong about evaluation, benchmarks and callbacks, and the next right ones."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from grpo_recipes.recipe.check import check
from grpo_recipes.recipe.registry import benchmark_problem, benchmark_sources, benchmarks
from grpo_recipes.recipe.user_code import copy_source


@pytest.mark.parametrize(
    ("wrong", "right", "said"),
    [
        ({"eval_strategy": "steps"}, {"eval_strategy": "steps", "eval_steps": 10}, "after every optimizer step"),
        ({"eval_steps": 10}, {"eval_strategy": "steps", "eval_steps": 10}, "'eval_steps' does nothing"),
        ({"eval_on_start": True}, {"eval_on_start": False}, "'eval_on_start' does nothing"),
        ({"num_generations_eval": 2}, {"eval_strategy": "epoch", "num_generations_eval": 2}, "does nothing"),
        (
            {"eval_strategy": "epoch", "use_transformers_continuous_batching": True},
            {"eval_strategy": "no", "use_transformers_continuous_batching": True},
            "back into training",
        ),
        (
            {"eval_strategy": "epoch", "lr_scheduler_type": "reduce_lr_on_plateau"},
            {"eval_strategy": "epoch", "lr_scheduler_type": "cosine"},
            "follows eval_loss, which is near zero whatever the model does",
        ),
        (
            {"eval_strategy": "steps", "eval_steps": 2.5},
            {"eval_strategy": "steps", "eval_steps": 0.25},
            "eval_steps 2.5 is neither a whole number of steps",
        ),
    ],
)
def test_evaluation(read, wrong, right, said):
    (problem,) = check(read(**wrong), {})
    assert said in str(problem) and problem.where.startswith("recipe.yaml:")
    assert check(read(**right), {}) == []


@pytest.mark.parametrize(
    ("wrong", "right", "said"),
    [
        ({"benchmarks": ["math500"]}, {"benchmarks": ["math_500"]}, "Fix: write 'math_500'"),
        ({"benchmarks": ["mmlu"]}, {"benchmarks": ["gpqa"]}, ", ".join(benchmarks())),
        ({"benchmarks": ["gsm8k", "gsm8k"]}, {"benchmarks": ["gsm8k"]}, "listed twice"),
        (
            {"benchmark_temperature": 0.0, "benchmark_samples": 4},
            {"benchmark_temperature": 0.0, "benchmark_samples": 1},
            "4 times the same completion",
        ),
    ],
)
def test_benchmarks(read, wrong, right, said):
    (problem,) = check(read(**wrong), {})
    assert said in str(problem) and problem.where.startswith("recipe.yaml:")
    assert check(read(**right), {}) == []


def test_benchmarks_in_a_file_need_its_columns(read, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "mine.jsonl"
    assert "no file 'mine.jsonl'" in str(check(read(benchmarks=["mine.jsonl"]), {})[0])

    file.write_text(json.dumps({"question": "1+1", "gold": "2"}) + "\n")
    assert "question, gold, not problem and answer" in str(check(read(benchmarks=["mine.jsonl"]), {})[0])
    columns = {"dataset_prompt_column": "question", "dataset_solution_column": "gold"}
    assert check(read(benchmarks=["mine.jsonl"], **columns), {}) == []

    file.write_text(json.dumps({"problem": "1+1", "answer": "2"}) + "\n")
    assert check(read(benchmarks=["mine.jsonl"]), {}) == []
    file.write_text("[1, 2]\n")
    assert "does not begin with a JSON object" in str(check(read(benchmarks=["mine.jsonl"]), {})[0])


@pytest.mark.parametrize("name", ["lcb", "lcb_v4"])
def test_benchmarks_that_run_code_name_the_command_that_does(name):
    problem = benchmark_problem(name, "recipe.yaml:3")
    assert problem is not None and "runs code that the model wrote" in problem.what
    command = shlex.split(problem.fix.partition("lighteval: ")[2])
    assert command[:3] == ["lighteval", "vllm", "model_name=<run>/model"]
    assert command[3].startswith("lcb:codegeneration") and command[3].endswith("|0")


def test_sources_are_what_fetch_needs():
    assert benchmark_sources(["gsm8k", "smoke:sums", "mine.jsonl", "gpqa"]) == [
        ("openai/gsm8k", "main", "test"),
        ("Idavidrein/gpqa", "gpqa_diamond", "train"),
    ]
    assert all(benchmark.help and "\n" not in benchmark.help for benchmark in benchmarks().values())
    assert [name for name, benchmark in benchmarks().items() if benchmark.gated] == ["gpqa"]


def test_callbacks(read, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("class Mine:\n    pass\n")
    assert check(read(callbacks=["mine.py:Mine"]), {}) == []
    frozen = read(callbacks=["mine.py:Mine"])
    (frozen.path.parent / "run.json").touch()
    copy_source("mine.py:Mine", frozen.path.parent / "callbacks")
    (tmp_path / "mine.py").rename(tmp_path / "gone.py")
    assert check(frozen, {}) == []  # a resumed run has its copy
    (frozen.path.parent / "run.json").unlink()
    assert "no file 'mine.py'" in str(check(frozen, {})[0])
    (tmp_path / "gone.py").rename(tmp_path / "mine.py")
    (problem,) = check(read(callbacks=["mine.py:Other"]), {})
    assert "'mine.py' has no 'Other'" in str(problem) and "write one of Mine" in problem.fix


@pytest.mark.parametrize("text", ["{}\n", '{"q": 1}\n{"problem": "1+1", "answer": "2"}\n'])
def test_the_first_row_of_a_benchmark_has_its_columns(read, tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jsonl").write_text(text)
    assert "not problem and answer" in str(check(read(benchmarks=["mine.jsonl"]), {})[0])
