"""Any set can be evaluated. Its means are exact, and its row has the name of the set."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from rank_processes import run_ranks

from grpo_recipes.runs.rundir import finish_summary, read_rows

from .evaluated_sets import OWN, evaluate_all, make_trainer, numbers, rewards_of


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]


def by_two_processes(folder: Path) -> dict[str, Any]:
    run_ranks("trainers.evaluated_sets", str(folder))
    first, second = (json.loads((folder / f"rank_{rank}.json").read_text()) for rank in (0, 1))
    assert str(first) == str(second)  # compared by text: NaN is not equal to itself
    return dict(first)


@pytest.fixture(
    scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)], ids=["one process", "two processes"]
)
def evaluated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("evaluated")
    return folder, evaluate_all(folder) if request.param == 1 else by_two_processes(folder)


@pytest.mark.slow
def test_the_mean_is_that_of_the_set_evaluated(evaluated: tuple[Path, dict[str, Any]]) -> None:
    _, results = evaluated
    own_mean, twenty, seven, two = fmean(OWN), 9.5, 3.0, 6.5
    assert math.isnan(results.pop("empty")["empty_reward"])
    assert results == {
        "own": {"eval_reward": own_mean},
        "larger": {"eval_reward": twenty},
        "smaller": {"test_reward": two},
        "dict": {"eval_low_reward": two, "eval_high_reward": twenty},
        "dict, prefix": {"test_low_reward": two, "test_high_reward": seven},
        "own, prefix": {"final_reward": own_mean},
        "own, passed": {"eval_reward": own_mean},
        "stream": {"stream_reward": seven},
        "stream in parts": {"parts_reward": seven},
        "no verdict": {"partly_reward": 7.5},
        "own dict": {"eval_low_reward": two, "eval_high_reward": seven},
        "one of the own dict": {"eval_reward": seven},
        "no own": {"eval_seven_reward": seven},
    }


def test_a_row_says_which_set_it_is_of(evaluated: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = evaluated
    own_mean, expected = fmean(OWN), []
    for name, prompts, mean in [
        (None, 5, own_mean),
        ("other", 20, 9.5),
        ("test", 2, 6.5),
        ("low", 2, 6.5),
        ("high", 20, 9.5),
        ("test_low", 2, 6.5),
        ("test_high", 7, 3.0),
        (None, 5, own_mean),
        (None, 5, own_mean),
        ("stream", 7, 3.0),
        ("parts", 7, 3.0),
        ("partly", 5, 7.5),
        ("empty", 0, "nan"),
        ("low", 2, 6.5),
        ("high", 7, 3.0),
        ("high", 7, 3.0),
        ("seven", 7, 3.0),
    ]:
        key = "eval_reward" if name is None else f"eval_{name}_reward"
        expected.append({"step": 0, **({} if name is None else {"set": name}), key: mean, "prompts": prompts})
    rows = rows_of(folder)
    assert all(row["seconds"] > 0 for row in rows)
    columns = ("step", "set", "prompts")
    assert [{key: row[key] for key in row if key in columns or key.endswith("_reward")} for row in rows] == expected
    assert not [key for row in rows if "set" in row for key in row if key.startswith(("eval_rewards/", "eval_loss"))]


def test_only_the_runs_own_set_gives_its_evaluation_reward(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, numbers(OWN))
    trainer.evaluate(numbers([1, 2]))
    assert "final_eval_reward" not in finish_summary(tmp_path, status="completed")

    trainer.evaluate()
    trainer.evaluate(numbers([1, 2]))
    trainer.evaluate({"low": numbers([3])})

    summary = finish_summary(tmp_path, status="completed")
    assert (summary["initial_eval_reward"], summary["final_eval_reward"]) == (fmean(OWN), fmean(OWN))
    rows = read_rows(tmp_path / "eval.jsonl")
    assert [row.get("eval_reward") for row in rows] == [None, fmean(OWN), None, None]


def test_every_metric_has_the_prefix(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)

    logged = trainer.evaluate({"low": numbers([3]), "high": numbers([7, 8])}, metric_key_prefix="test")

    assert {name for name in logged if not name.startswith(("test_low_", "test_high_"))} <= {"epoch"}
    for name in ("loss", "reward", "reward_std", "rewards/value/mean", "completions/mean_length", "entropy", "runtime"):
        assert {f"test_low_{name}", f"test_high_{name}"} <= set(logged)
    logged_keys = [set(row) for row in trainer.state.log_history]
    assert (
        "test_low_reward" in logged_keys[0]
        and "test_high_reward" in logged_keys[1]
        and not logged_keys[0] & {"test_high_reward"}
    )


def test_a_prediction_is_exact_and_leaves_no_trace(tmp_path: Path) -> None:
    plain, predicting = make_trainer(tmp_path / "plain"), make_trainer(tmp_path / "predicting")
    for folder in ("plain", "predicting"):
        (tmp_path / folder).mkdir(exist_ok=True)

    predicted = predicting.predict(numbers([3, 5, 10]))

    assert rewards_of(predicted.metrics) == {"test_reward": 6.0}
    assert rewards_of(predicting.predict(numbers([3, 5, 10]).to_iterable_dataset()).metrics) == {"test_reward": 6.0}
    assert not (tmp_path / "predicting" / "eval.jsonl").exists()
    assert not list(predicting._logs["completion"])
    first, second = (trainer.evaluate(numbers([1, 2])) for trainer in (plain, predicting))
    timed = ("runtime", "per_second", "preparation_time")
    assert {k: v for k, v in first.items() if not k.endswith(timed)} == {
        k: v for k, v in second.items() if not k.endswith(timed)
    }
