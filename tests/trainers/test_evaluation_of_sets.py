"""Several evaluation sets in a training, evaluations that the user adds, stops in the middle, and the best metric."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from grpo_recipes.runs.checkpoints import find_newest_complete
from grpo_recipes.runs.rundir import stop_file
from grpo_recipes.trainers.grpo import GRPOTrainer

from .evaluated_sets import make_trainer, numbers
from .test_evaluation import EVALUATED, rows_of
from .tiny_training import as_dataset, different_characters, train

SETS = {"easy": [(a, 7) for a in range(3)], "hard": [(a, 20) for a in range(3)]}
KEYS = EVALUATED | {"max_steps": 4}


def sets() -> dict[str, Any]:
    return {name: as_dataset(sums) for name, sums in SETS.items()}


class Stops:
    """A reward that requests a stop when the set is evaluated at a step."""

    __name__ = "different_characters"

    def __init__(self, folder: Path, name: str, step: int):
        self._request, self._step = stop_file(folder), step
        self._answers = {str(a + b) for a, b in SETS[name]}

    def __call__(self, completions: list[Any], answer: list[str], trainer_state: Any, **_: Any) -> list[float | None]:
        if answer[0] in self._answers and trainer_state.global_step == self._step:
            self._request.touch()
        return different_characters(completions)


def places(folder: Path) -> list[tuple[int, str]]:
    file = folder / "eval.jsonl"
    return [(row["step"], row["set"]) for row in rows_of(file)] if file.exists() else []


def history(trainer: GRPOTrainer) -> list[tuple[int, float]]:
    return [(row["step"], row["eval_hard_reward"]) for row in trainer.state.log_history if "eval_hard_reward" in row]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, GRPOTrainer]:
    folder = tmp_path_factory.mktemp("whole")
    trainer, _ = train(folder, held_out=sets(), eval_on_start=True, metric_for_best_model="hard_reward", **KEYS)
    return folder, trainer


def test_a_training_evaluates_each_of_its_sets(whole: tuple[Path, GRPOTrainer]) -> None:
    folder, trainer = whole
    assert places(folder) == [(step, name) for step in (0, 2, 4) for name in ("easy", "hard")]
    rows = rows_of(folder / "eval.jsonl")
    assert {row["prompts"] for row in rows} == {3} and not any("eval_reward" in row for row in rows)
    assert history(trainer) == [(row["step"], row["eval_hard_reward"]) for row in rows if row["set"] == "hard"]
    assert [row["seconds/evaluate"] > 0 for row in read(folder / "metrics.jsonl")] == [False, False, True, False]
    for row in read(folder / "metrics.jsonl"):
        assert min(value for key, value in row.items() if key.startswith("seconds/")) >= 0


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["easy", "hard"])
@pytest.mark.parametrize("step", [0, 2], ids=["on start", "step 2"])
def test_a_run_stopped_among_its_sets_goes_on_with_those_left(
    tmp_path: Path, whole: tuple[Path, GRPOTrainer], name: str, step: int
) -> None:
    keys = KEYS | {"eval_on_start": True, "metric_for_best_model": "hard_reward"}
    done = [(0, "easy"), (0, "hard")] if step == 2 else []

    _, stopped = train(tmp_path, Stops(tmp_path, name, step), held_out=sets(), **keys)

    assert stopped is not None and ("step 2, state saved" if step == 2 else "nothing to save") in str(stopped)
    assert places(tmp_path) == done + ([(step, "easy")] if name == "hard" else [])
    stop_file(tmp_path).unlink()
    resumed, _ = train(tmp_path, held_out=sets(), **keys)
    folder, trainer = whole
    assert rows_of(tmp_path / "eval.jsonl") == rows_of(folder / "eval.jsonl")
    assert rows_of(tmp_path / "metrics.jsonl") == rows_of(folder / "metrics.jsonl")
    assert resumed.state.best_metric == trainer.state.best_metric
    assert resumed.state.best_global_step == trainer.state.best_global_step


@pytest.mark.slow
def test_an_evaluation_made_up_for_twice_still_counts_for_the_best_metric(tmp_path: Path) -> None:
    keys = KEYS | {"metric_for_best_model": "reward", "greater_is_better": True, "steps_per_generation": 2}
    run = tmp_path / "run"
    train(run, Requests(run, lambda step, evaluates: evaluates and step == 2), **keys)
    stop_file(run).unlink()
    # The evaluation is made up for, and then the run is stopped again before it completed a step.
    train(run, Requests(run, lambda step, evaluates: not evaluates), **keys)
    stop_file(run).unlink()
    assert find_newest_complete(run / "checkpoints") == run / "checkpoints" / "checkpoint-2"

    trainer, _ = train(run, Requests(run, lambda *_: False), **keys)

    second, fourth = rows_of(run / "eval.jsonl")
    assert (second["step"], fourth["step"]) == (2, 4) and second["eval_reward"] > fourth["eval_reward"]
    assert trainer.state.best_metric == second["eval_reward"]


class Requests:
    """A reward that requests a stop if a condition on the step and the mode (training, evaluation) is met.

    Later evaluations get lower scores.
    """

    __name__ = "different_characters"

    def __init__(self, folder: Path, condition: Any):
        self._request, self._condition = stop_file(folder), condition

    def __call__(self, completions: list[Any], answer: list[str], trainer_state: Any, **_: Any) -> list[float | None]:
        if self._condition(trainer_state.global_step, int(answer[0]) >= 7):
            self._request.touch()
        late = 100 * trainer_state.global_step if int(answer[0]) >= 7 else 0
        return [None if score is None else score - late for score in different_characters(completions)]


class EvaluatesToo(TrainerCallback):
    """Evaluate another set after a step, or predict on it."""

    trainer: GRPOTrainer

    def __init__(self, step: int, predicts: bool = False):
        self._step, self._predicts = step, predicts
        self.returned: dict[str, float] | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            mine = as_dataset(SETS["hard"])
            if self._predicts:
                self.returned = self.trainer.predict(mine, metric_key_prefix="mine").metrics
            else:
                self.returned = self.trainer.evaluate(mine, metric_key_prefix="mine")


def test_an_evaluation_of_the_users_own_changes_nothing_in_the_training(
    tmp_path: Path, whole: tuple[Path, GRPOTrainer]
) -> None:
    folder, _ = whole
    mine = EvaluatesToo(2)  # where another evaluation is due

    train(tmp_path, callbacks=(mine,), held_out=sets(), eval_on_start=True, **KEYS)

    assert mine.returned is not None and set(mine.returned) > {"mine_reward", "mine_loss"}
    rows = rows_of(tmp_path / "eval.jsonl")
    assert [row for row in rows if row["set"] != "mine"] == rows_of(folder / "eval.jsonl")
    assert [(row["step"], row["prompts"]) for row in rows if row["set"] == "mine"] == [(2, 3)]
    assert rows_of(tmp_path / "metrics.jsonl") == rows_of(folder / "metrics.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("predicts", [False, True], ids=["evaluate", "predict"])
def test_no_evaluation_is_owed_for_one_of_the_users_own(tmp_path: Path, predicts: bool) -> None:
    keys = KEYS | {"eval_steps": 4, "save_strategy": "steps", "save_steps": 2}
    train(tmp_path / "whole", **keys)
    run = tmp_path / "run"

    mine = EvaluatesToo(2, predicts)
    _, stopped = train(run, Stops(run, "hard", 2), (mine,), **keys)

    assert mine.returned == {} and "after step 2, state saved" in str(stopped)
    stop_file(run).unlink()
    train(run, **keys)
    assert rows_of(run / "eval.jsonl") == rows_of(tmp_path / "whole" / "eval.jsonl")
    assert rows_of(run / "metrics.jsonl") == rows_of(tmp_path / "whole" / "metrics.jsonl")


def test_the_evaluation_on_start_is_made_though_another_set_was_evaluated(tmp_path: Path) -> None:
    class Before(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            row = {"step": 0, "set": "mine", "eval_mine_reward": 1.0, "prompts": 3, "seconds": 1.0}
            (tmp_path / "eval.jsonl").write_text(json.dumps(row) + "\n")

    train(tmp_path, callbacks=(Before(),), eval_on_start=True, **EVALUATED | {"max_steps": 1})
    assert [(row["step"], row.get("set")) for row in rows_of(tmp_path / "eval.jsonl")] == [
        (0, "mine"),
        (0, None),
        (1, None),
    ]


@pytest.mark.slow
def test_a_stop_in_an_evaluation_that_the_learning_rate_waits_for(tmp_path: Path) -> None:
    keys = KEYS | {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5, "mode": "max"},
        "metric_for_best_model": "reward",
        "eval_steps": 1,
    }
    whole, run = tmp_path / "whole", tmp_path / "run"
    train(whole, Requests(whole, lambda *_: False), **keys)
    _, stopped = train(run, Requests(run, lambda step, evaluates: evaluates and step == 2), **keys)
    assert "after step 2, state saved" in str(stopped)
    stop_file(run).unlink()
    train(run, Requests(run, lambda *_: False), **keys)
    assert rows_of(run / "metrics.jsonl") == rows_of(whole / "metrics.jsonl")
    assert len({row["learning_rate"] for row in rows_of(whole / "metrics.jsonl")}) > 1


def test_an_evaluation_without_a_verdict_is_not_the_best(tmp_path: Path) -> None:
    def reward(completions: list[Any], answer: list[str], trainer_state: Any, **_: Any) -> list[float | None]:
        if int(answer[0]) >= 7 and trainer_state.global_step == 2:
            return [None] * len(completions)
        return different_characters(completions)

    reward.__name__ = "different_characters"
    trainer, _ = train(tmp_path, reward, metric_for_best_model="reward", greater_is_better=True, **KEYS)
    second, fourth = rows_of(tmp_path / "eval.jsonl")
    assert second["eval_reward"] == "nan" and second["prompts"] == 5
    assert trainer.state.best_metric == fourth["eval_reward"] and math.isfinite(fourth["eval_reward"])


def test_persistent_workers_do_not_keep_the_first_set(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, numbers([1, 3]), dataloader_num_workers=1, dataloader_persistent_workers=True)
    means = [
        trainer.evaluate(held_out)["eval_reward"] for held_out in (None, numbers([10, 20, 30]), numbers([5]), None)
    ]
    assert means == [2.0, 20.0, 5.0, 2.0]


@pytest.mark.slow
def test_the_draws_of_a_set_do_not_depend_on_the_sets_before_it(tmp_path: Path) -> None:
    folder = tmp_path / "reversed"
    train(folder, held_out=dict(reversed(sets().items())), eval_on_start=True, **KEYS | {"max_steps": 1})
    train(tmp_path / "run", held_out=sets(), eval_on_start=True, **KEYS | {"max_steps": 1})
    rows, other = (
        {row["set"]: row for row in rows_of(path / "eval.jsonl") if row["step"] == 0}
        for path in (folder, tmp_path / "run")
    )
    assert rows == other
