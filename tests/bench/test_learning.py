"""bench/learning.py: the rows of its record, and the runs that a further call makes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bench.scripts import HOME, script
from grpo_recipes.recipe import read_recipe


@pytest.fixture(scope="module")
def learning() -> Iterator[ModuleType]:
    with script("learning", alias="bench_learning") as module:
        yield module


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_row_has_first_and_last_rewards_and_unscored_completions(learning: ModuleType, tmp_path: Path) -> None:
    rewards = [None, 0.1, 0.2, 0.3, 0.4, 0.5, 0.9, 0.9, 0.9, 0.9, 0.9]  # no completion of the first step is scored
    rows = [{"reward": reward, "rewards/no_verdict": float(reward is None)} for reward in rewards]
    write_rows(tmp_path / "metrics.jsonl", rows)
    write_rows(tmp_path / "eval.jsonl", [{"eval_reward": 0.25}, {"eval_reward": 0.75}])
    (tmp_path / "summary.json").write_text('{"status": "completed"}')
    assert learning.summarize(tmp_path) == {
        "status": "completed", "steps": 11, "first_reward": 0.3, "last_reward": 0.9,
        "unscored": 0.0909, "unscored_max": 1.0, "evaluated_rewards": [0.25, 0.75],
    }  # fmt: skip


def test_a_further_call_makes_only_the_missing_runs(
    learning: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, runs = tmp_path / "learning.jsonl", []

    def measure(case: str, seed: int) -> dict[str, Any]:
        runs.append((case, seed))
        row = {"case": case, "seed": seed, "status": "completed", "first_reward": 0.1, "last_reward": 0.9}
        return {**row, "seconds": 1.0}

    monkeypatch.setattr(learning, "measure", measure)
    for words in (["code", "--seeds", "1"], ["code", "judge", "--seeds", "1", "2"]):
        monkeypatch.setattr(sys, "argv", ["learning.py", *words, "--out", str(out)])
        learning.main()
    assert runs == [("code", 1), ("code", 2), ("judge", 1), ("judge", 2)]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["case"], row["seed"]) for row in rows] == runs and all(row["commit"] for row in rows)


def test_the_flags_of_each_case_fit_its_recipe(learning: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HOME)
    recipes = {case: read_recipe(HOME / path, flags) for case, (path, flags) in learning.CASES.items()}
    assert list(recipes) == ["judge", "code"] and recipes["judge"]["judge_retries"] == 1
