"""S13: rewards that use chance give the same scores in every launch with the same seed, and after a resume."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_recipes.rewards.load import open_rewards
from grpo_recipes.rewards.pool import RewardPool

DRAWING = """
import random

AT_IMPORT = random.random()

def plain(completions, **columns):
    return [random.random() for _ in completions]

def libraries(completions, **columns):
    import numpy
    import torch
    return [random.random() + numpy.random.random() + float(torch.rand(1)) for _ in completions]

def at_import(completions, **columns):
    return [AT_IMPORT for _ in completions]

def order_of_a_set(completions, **columns):
    return [float(list({"a", "b", "c", "d", "e"}).index("a")) for _ in completions]

async def awaited(completions, **columns):
    return [random.random() for _ in completions]
"""
ROWS = ["a", "b", "c", "d", "e", "f"]


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a working folder with rewards that draw random numbers."""
    (tmp_path / "drawing.py").write_text(DRAWING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONHASHSEED", "random")


def launch(
    tmp_path: Path, reward: str, steps: range, seed: int = 1, workers: int = 2, rows: list[str] = ROWS
) -> list[dict]:
    """Return completion -> reward of each step of a run with new child processes."""
    settings = SimpleNamespace(
        reward_funcs=[f"drawing.py:{reward}"], reward_isolation="completion", reward_workers=workers, seed=seed,
        reward_timeout=300.0, reward_memory_gib=4.0, reward_environment=[], reward_concurrency=4, dataset_mixture=None,
        dataset_solution_column="answer", eval_dataset_solution_column=None,
    )  # fmt: skip
    (tmp_path / "run").mkdir(exist_ok=True)
    scores = []
    with open_rewards(settings, tmp_path / "run") as (function,):
        for step in steps:
            function.generation = step
            scores.append(dict(zip(rows, function(rows, prompts=["p"] * len(rows)), strict=True)))
    return scores


OTHERS = ("libraries", "at_import", "order_of_a_set", "awaited")


@pytest.mark.parametrize("reward", ["plain", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_two_launches_and_a_resumed_run_agree(tmp_path, reward):
    """S13: the number of workers and the order of the rows do not matter, and a resume begins in the middle."""
    first = launch(tmp_path, reward, range(3))

    assert launch(tmp_path, reward, range(3), workers=1, rows=ROWS[::-1]) == first
    assert launch(tmp_path, reward, range(2, 3)) == first[2:], "resumed after step 2"
    assert len({score for step in first for score in step.values()}) in ((1,) if "_" in reward else (18,))


def test_another_seed_draws_other_numbers(tmp_path):
    """S13: the run's seed and the step decide."""
    runs = [launch(tmp_path, "plain", range(2), seed=seed) for seed in (1, 2)]
    assert len({score for run in runs for step in run for score in step.values()}) == 4 * len(ROWS)


@pytest.mark.slow
def test_libraries_that_the_call_imports_are_seeded():
    """S13: numpy and torch draw the same numbers if they are imported before or during the call."""
    code = """
import sys
from grpo_recipes.rewards.chance import seed_later_imports, seed_libraries
if "early" in sys.argv:
    import numpy, torch
seed_later_imports()
seed_libraries(7)
import numpy, torch
print(numpy.random.random(), float(torch.rand(1)))
"""

    late, early = (
        subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, check=True).stdout
        for arguments in ([], ["early"])
    )
    assert late == early and len(late.split()) == 2


def test_a_pool_without_seeds_still_draws_at_random():
    """S13: only callers that pass seeds get reproducible calls."""
    with RewardPool("drawing.py:plain", workers=1) as pool:
        scores = [pool.score("drawing.py:plain", ["a", "b"]) for _ in range(2)]
        seeded = [pool.score("drawing.py:plain", ["a", "b"], seeds=[1, 1]) for _ in range(2)]
    values = [[score.value for score in row] for row in (*scores, *seeded)]
    assert values[0] != values[1] and values[2] == values[3] and values[2][0] == values[2][1]
