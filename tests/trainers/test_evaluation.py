"""Evaluation changes nothing in the training, counts every completion once, and survives a stop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from grpo_recipes.runs.checkpoints import find_newest_complete
from grpo_recipes.runs.rundir import finish_summary, move_rows_after, stop_file
from grpo_recipes.trainers.grpo import GRPOTrainer

from .tiny_training import STEPS, different_characters, train

EVALUATED = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "num_generations_eval": 2,
    "per_device_eval_batch_size": 4,  # 5 prompts x 2 completions: the last batch is half full
}


class Scores:
    """A reward that records its evaluation scores by step, and can request a stop during an evaluation."""

    __name__ = "different_characters"

    def __init__(self, stop_in: int | None = None, request: Path | None = None):
        self.given: dict[int, list[float]] = {}
        self._stop_in, self._request = stop_in, request

    def __call__(self, completions: list[Any], answer: list[str], trainer_state: Any, **_: Any) -> list[float | None]:
        scores = different_characters(completions)
        if int(answer[0]) >= 7:
            step = trainer_state.global_step
            self.given.setdefault(step, []).extend(scores)
            if step == self._stop_in and self._request is not None:
                self._request.touch()
        return scores


class RandomStates(TrainerCallback):
    """Record the random states of Python, numpy and torch at the start of every step."""

    def __init__(self) -> None:
        self.states: list[Any] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        import random

        import numpy

        self.states.append((hash(random.getstate()), hash(numpy.random.get_state()[1].tobytes()), _torch_state()))


def _torch_state() -> int:
    return hash(torch.get_rng_state().numpy().tobytes())


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    timed = ("seconds", "tokens_per_second", "step_time", "memory/", "syncs")
    return [{key: value for key, value in row.items() if not key.startswith(timed)} for row in rows]


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Scores, GRPOTrainer, RandomStates]:
    folder, reward, draws = tmp_path_factory.mktemp("evaluated"), Scores(), RandomStates()
    trainer, _ = train(folder, reward, (draws,), eval_on_start=True, **EVALUATED)
    return folder, reward, trainer, draws


def test_training_is_the_same_with_and_without_evaluation(
    tmp_path: Path, evaluated: tuple[Path, Scores, GRPOTrainer, RandomStates]
) -> None:
    folder, _, trainer, draws = evaluated
    undisturbed = RandomStates()

    alone, _ = train(tmp_path, callbacks=(undisturbed,))

    assert rows_of(folder / "metrics.jsonl") == rows_of(tmp_path / "metrics.jsonl")
    assert draws.states == undisturbed.states
    for weight, other in zip(trainer.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(weight, other)
    assert list(trainer._logs["completion"]) == list(alone._logs["completion"])


def test_a_row_for_every_evaluation_with_exact_means(
    evaluated: tuple[Path, Scores, GRPOTrainer, RandomStates],
) -> None:
    folder, reward, _, _ = evaluated
    rows = [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]

    assert [row["step"] for row in rows] == [0, 2, 4, 6]
    uneven = 0
    for row in rows:
        scores = reward.given[row["step"]]
        known = [score for score in scores if score is not None]
        assert len(scores) == 10 and row["prompts"] == 5
        assert row["eval_reward"] == pytest.approx(sum(known) / len(known))
        assert row["eval_rewards/different_characters/mean"] == pytest.approx(sum(known) / len(known))
        assert row["eval_completions/mean_length"] > 0 and row["seconds"] > 0
        assert "eval_runtime" not in row
        batches = [[score for score in scores[i : i + 4] if score is not None] for i in (0, 4, 8)]
        means = [sum(batch) / len(batch) for batch in batches if batch]
        uneven += sum(means) / len(means) != pytest.approx(row["eval_reward"])
    assert uneven > 0  # the mean of the batches' means, which TRL logs, is another number


def test_evaluation_is_a_phase_of_its_own(evaluated: tuple[Path, Scores, GRPOTrainer, RandomStates]) -> None:
    folder, _, _, _ = evaluated
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    evaluated_before = [row["step"] for row in rows if row["seconds/evaluate"] > 0]
    assert evaluated_before == [3, 5]  # after steps 2 and 4; the first and last evaluation belong to no row
    for row in rows:
        phases = [value for key, value in row.items() if key.startswith("seconds/") and key != "seconds/step"]
        assert sum(phases) == pytest.approx(row["seconds/step"])
        assert min(phases) >= 0


def test_the_summary_has_the_first_and_the_last_evaluation(
    evaluated: tuple[Path, Scores, GRPOTrainer, RandomStates],
) -> None:
    folder, _, _, _ = evaluated
    rewards = [row["eval_reward"] for row in rows_of(folder / "eval.jsonl")]

    summary = finish_summary(folder, status="completed")

    assert summary["initial_eval_reward"] == pytest.approx(rewards[0], abs=1e-6)
    assert summary["final_eval_reward"] == pytest.approx(rewards[-1], abs=1e-6)
    assert rewards[0] != rewards[-1]


@pytest.mark.slow
@pytest.mark.parametrize("stop_in", [2, 4], ids=lambda step: f"step-{step}")
def test_a_run_stopped_in_an_evaluation_makes_up_for_it(
    tmp_path: Path, evaluated: tuple[Path, Scores, GRPOTrainer, RandomStates], stop_in: int
) -> None:
    folder, _, _, _ = evaluated

    _, stopped = train(tmp_path, Scores(stop_in, stop_file(tmp_path)), eval_on_start=True, **EVALUATED)

    assert stopped is not None
    assert [row["step"] for row in rows_of(tmp_path / "metrics.jsonl")] == list(range(1, stop_in + 1))
    assert [row["step"] for row in rows_of(tmp_path / "eval.jsonl")] == list(range(0, stop_in, 2))
    assert find_newest_complete(tmp_path / "checkpoints") == tmp_path / "checkpoints" / f"checkpoint-{stop_in}"

    stop_file(tmp_path).unlink()
    train(tmp_path, eval_on_start=True, **EVALUATED)

    assert rows_of(tmp_path / "metrics.jsonl") == rows_of(folder / "metrics.jsonl")
    assert rows_of(tmp_path / "eval.jsonl") == rows_of(folder / "eval.jsonl")


@pytest.mark.slow
def test_a_stop_while_a_resumed_run_makes_up_for_an_evaluation(
    tmp_path: Path, evaluated: tuple[Path, Scores, GRPOTrainer, RandomStates]
) -> None:
    folder, _, _, _ = evaluated
    train(tmp_path, Scores(2, stop_file(tmp_path)), eval_on_start=True, **EVALUATED)
    stop_file(tmp_path).unlink()

    _, stopped = train(tmp_path, Scores(2, stop_file(tmp_path)), eval_on_start=True, **EVALUATED)

    assert stopped is not None and stopped.code == 75
    assert str(stopped) == "stopped on request before a step was completed; the newest checkpoint is checkpoint-2"
    assert [row["step"] for row in rows_of(tmp_path / "metrics.jsonl")] == [1, 2]
    stop_file(tmp_path).unlink()
    train(tmp_path, eval_on_start=True, **EVALUATED)
    assert rows_of(tmp_path / "metrics.jsonl") == rows_of(folder / "metrics.jsonl")
    assert rows_of(tmp_path / "eval.jsonl") == rows_of(folder / "eval.jsonl")


@pytest.mark.slow
def test_an_evaluation_that_was_made_up_for_counts_for_the_best_metric(tmp_path: Path) -> None:
    keys = EVALUATED | {"max_steps": 3, "metric_for_best_model": "reward", "save_strategy": "best"}
    train(tmp_path / "whole", **keys)
    second, third = (row["eval_reward"] for row in rows_of(tmp_path / "whole" / "eval.jsonl"))
    keys["greater_is_better"] = second > third
    run = tmp_path / "run"

    _, stopped = train(run, Scores(2, stop_file(run)), **keys)

    assert str(stopped) == "stopped on request after step 2, state saved"
    stop_file(run).unlink()
    trainer, _ = train(run, **keys)
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (second, 2)


@pytest.mark.slow
def test_a_run_resumed_without_evaluation_owes_none(tmp_path: Path) -> None:
    train(tmp_path, Scores(2, stop_file(tmp_path)), **EVALUATED)
    stop_file(tmp_path).unlink()

    trainer, _ = train(tmp_path)

    assert trainer.state.global_step == STEPS and not (tmp_path / "eval.jsonl").exists()


@pytest.mark.slow
def test_a_stop_in_an_evaluation_at_the_end_of_an_epoch_adds_no_row_twice(tmp_path: Path) -> None:
    keys = EVALUATED | {"eval_steps": 12, "max_steps": 14}  # an epoch has 12 steps
    whole, run = tmp_path / "whole", tmp_path / "run"
    train(whole, **keys)
    train(run, Scores(12, stop_file(run)), **keys)
    stop_file(run).unlink()
    train(run, **keys)
    assert [row["step"] for row in rows_of(run / "eval.jsonl")] == [12, 14]
    assert rows_of(run / "eval.jsonl") == rows_of(whole / "eval.jsonl")


class StopAfter(TrainerCallback):
    def __init__(self, request: Path, step: int):
        self._request, self._step = request, step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step + 1 == self._step:
            self._request.touch()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_a_stop_saves_before_it_evaluates(tmp_path: Path, strategy: str) -> None:
    keys = EVALUATED | {"eval_strategy": strategy}
    whole = tmp_path / "whole"
    train(whole, **keys)
    run = tmp_path / "run"
    stopped_at = 4 if strategy == "steps" else 5  # an evaluation is due, or an epoch is in its middle

    reward = Scores()
    train(run, reward, (StopAfter(stop_file(run), stopped_at),), **keys)

    assert find_newest_complete(run / "checkpoints") is not None and stopped_at not in reward.given
    stop_file(run).unlink()
    train(run, **keys)
    assert rows_of(run / "eval.jsonl") == rows_of(whole / "eval.jsonl")
    assert rows_of(run / "metrics.jsonl") == rows_of(whole / "metrics.jsonl")


def test_rows_past_the_checkpoint_are_moved_aside(tmp_path: Path) -> None:
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in (2, 4, 6)))

    move_rows_after(tmp_path, 4)

    assert [row["step"] for row in rows_of(tmp_path / "eval.jsonl")] == [2, 4]
    assert [row["step"] for row in rows_of(tmp_path / "eval.redone.jsonl")] == [6]


def test_a_large_evaluation_batch_is_scored_in_small_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _ = train(tmp_path, **EVALUATED | {"per_device_eval_batch_size": 10, "eval_steps": STEPS})
    shapes: list[torch.Size] = []
    fed: list[int] = []
    stock = trainer._get_per_token_logps_and_entropies

    def noted(model: Any, ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        shapes.append(ids.shape)
        with model.model.register_forward_pre_hook(
            lambda _, args, kwargs: fed.append(kwargs["input_ids"].numel()), with_kwargs=True
        ):
            return stock(model, ids, *args, **kwargs)

    monkeypatch.setattr(trainer, "_get_per_token_logps_and_entropies", noted)
    for trimmed in (True, False):
        trainer.args.trim_padding = trimmed
        trainer.evaluate()
        assert {rows for rows, _ in shapes} == {10}
        assert 0 < max(fed) <= 4 * max(width for _, width in shapes)  # at most the tokens of four padded rows
