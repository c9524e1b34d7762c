"""Check recipes with wrong evaluations, benchmarks and callbacks, and the corrected recipes."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from golden import compare_messages, golden_files

from grpo_recipes.recipe.check import check
from grpo_recipes.recipe.registry import benchmark_problem, benchmark_sources, benchmarks
from grpo_recipes.recipe.user_code import copy_source


@pytest.mark.parametrize("path", golden_files(__file__, "evaluation"))
def test_evaluation(read, path):
    compare_messages(path, read)


@pytest.mark.parametrize("path", golden_files(__file__, "benchmarks"))
def test_benchmarks(read, path):
    compare_messages(path, read)


def test_an_unknown_benchmark_is_answered_with_every_name(read):
    (problem,) = check(read(benchmarks=["mmlu"]), {})
    assert ", ".join(benchmarks()) in problem.fix


def test_benchmarks_in_a_file_need_its_columns(read, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "mine.jsonl"
    assert "file 'mine.jsonl' not found" in str(check(read(benchmarks=["mine.jsonl"]), {})[0])

    file.write_text(json.dumps({"question": "1+1", "gold": "2"}) + "\n")
    assert "expected the columns problem and answer, got question, gold" in str(
        check(read(benchmarks=["mine.jsonl"]), {})[0]
    )
    columns = {"dataset_prompt_column": "question", "dataset_solution_column": "gold"}
    assert check(read(benchmarks=["mine.jsonl"], **columns), {}) == []

    file.write_text(json.dumps({"problem": "1+1", "answer": "2"}) + "\n")
    assert check(read(benchmarks=["mine.jsonl"]), {}) == []
    file.write_text("[1, 2]\n")
    assert "does not begin with a JSON object" in str(check(read(benchmarks=["mine.jsonl"]), {})[0])


@pytest.mark.parametrize("name", ["lcb", "lcb_v4"])
def test_benchmarks_that_run_code_name_the_command_that_does(name):
    problem = benchmark_problem(name, "recipe.yaml:3")
    assert problem is not None and "runs code written by the model" in problem.what
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
    assert "expected the columns problem and answer" in str(check(read(benchmarks=["mine.jsonl"]), {})[0])
