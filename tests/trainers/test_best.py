"""The best checkpoint is kept and becomes the model, and a training stops early; both survive a stop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from grpo_recipes.launch.attempt import describe_rewards
from grpo_recipes.runs.checkpoints import list_complete_checkpoints, parse_step
from grpo_recipes.runs.progress import format_best
from grpo_recipes.runs.rundir import finish_summary, move_rows_after, stop_file
from grpo_recipes.trainers.grpo import GRPOTrainer

from .test_evaluation import rows_of
from .test_lora import LORA
from .test_lora import make_trainer as make_lora_trainer
from .tiny_training import different_characters, train

EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "num_generations_eval": 2, "per_device_eval_batch_size": 4}
SAVED = {"save_strategy": "steps", "save_steps": 6, "save_total_limit": 2}
KEEPS = {**EVALUATED, **SAVED, "load_best_model_at_end": True}


class Scores:
    """A reward with a fixed score of each evaluation by its step. It can request a stop in an evaluation."""

    __name__ = "different_characters"

    def __init__(self, scores: dict[int, float | None], stop_in: int | None = None, request: Path | None = None):
        self._scores, self._stop_in, self._request = scores, stop_in, request

    def __call__(self, completions: list[Any], answer: list[str], trainer_state: Any, **_: Any) -> list[float | None]:
        if int(answer[0]) < 7:
            return different_characters(completions)
        if trainer_state.global_step == self._stop_in and self._request is not None:
            self._request.touch()
        return [self._scores[trainer_state.global_step]] * len(completions)


class StopAfter(TrainerCallback):
    """Request a stop in the update of a step."""

    def __init__(self, request: Path, step: int):
        self._request, self._step = request, step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step + 1 == self._step:
            self._request.touch()


def read_best(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "best.json").read_text())


def steps_of(folder: Path) -> list[int]:
    return [row["step"] for row in rows_of(folder / "metrics.jsonl")]


def checkpoints_of(folder: Path) -> list[int]:
    return [parse_step(path) for path in list_complete_checkpoints(folder / "checkpoints")]


def assert_weights(trainer: GRPOTrainer, folder: Path, step: int) -> None:
    saved = load_file(folder / "checkpoints" / f"checkpoint-{step}" / "model.safetensors")
    weights = dict(trainer.model.named_parameters())
    assert saved.keys() <= weights.keys()
    for name, weight in saved.items():
        assert torch.equal(weight, weights[name]), name


def assert_same_weights(trainer: GRPOTrainer, other: GRPOTrainer) -> None:
    for weight, other_weight in zip(trainer.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(weight, other_weight)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, GRPOTrainer]:
    """Train 6 steps, of which the fourth is the best."""
    folder = tmp_path_factory.mktemp("kept")
    trainer, _ = train(folder, Scores({2: 1.0, 4: 3.0, 6: 2.0}), **KEEPS)
    return folder, trainer


def test_the_best_checkpoint_is_kept_and_becomes_the_model(kept: tuple[Path, GRPOTrainer]) -> None:
    folder, trainer = kept
    assert checkpoints_of(folder) == [4, 6]  # checkpoint-2 was the best, and went
    assert read_best(folder) == {"best_step": 4, "best_eval_reward": 3.0}
    assert_weights(trainer, folder, 4)
    with pytest.raises(AssertionError):
        assert_weights(trainer, folder, 6)
    state = json.loads((folder / "checkpoints" / "checkpoint-6" / "trainer_state.json").read_text())
    assert Path(state["best_model_checkpoint"]) == folder / "checkpoints" / "checkpoint-4"


def test_status_summary_and_the_last_lines_name_the_best(kept: tuple[Path, GRPOTrainer]) -> None:
    folder, _ = kept
    assert format_best(read_best(folder)) == "eval_reward 3.000 at step 4"
    summary = finish_summary(folder, status="completed")
    assert (summary["best_step"], summary["best_eval_reward"]) == (4, 3.0)
    assert describe_rewards(summary).endswith("; evaluated 1.000 -> 2.000, best 3.000 at step 4")


def test_without_the_key_the_model_is_of_the_last_step(tmp_path: Path, kept: tuple[Path, GRPOTrainer]) -> None:
    keys = KEEPS | {"load_best_model_at_end": False}
    trainer, _ = train(tmp_path, Scores({2: 1.0, 4: 3.0, 6: 2.0}), **keys)
    assert checkpoints_of(tmp_path) == [6] and not (tmp_path / "best.json").exists()
    assert_weights(trainer, tmp_path, 6)
    assert_weights(trainer, kept[0], 6)  # keeping the best changes no step


def test_with_a_limit_of_one_the_best_and_the_newest_stay(tmp_path: Path) -> None:
    train(tmp_path, Scores({2: 3.0, 4: 1.0, 6: 2.0}), **KEEPS | {"save_total_limit": 1, "save_steps": 2})
    assert checkpoints_of(tmp_path) == [2, 6]


@pytest.mark.slow
@pytest.mark.parametrize("best", [2, 6])
def test_equal_rewards_keep_the_first(tmp_path: Path, best: int) -> None:
    scores = {2: 2.0, 4: 2.0, 6: 2.0} if best == 2 else {2: 1.0, 4: None, 6: 2.0}
    trainer, _ = train(tmp_path, Scores(scores), **KEEPS)
    assert read_best(tmp_path)["best_step"] == best
    assert_weights(trainer, tmp_path, best)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_a_lost_best_checkpoint_is_no_model(tmp_path: Path, kept: tuple[Path, GRPOTrainer], damage: str) -> None:
    class Breaks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 5:
                weights = tmp_path / "checkpoints" / "checkpoint-4" / "model.safetensors"
                content = bytearray(weights.read_bytes())
                content[-1] ^= 1
                weights.unlink() if damage == "missing" else weights.write_bytes(content)

    with pytest.raises(ValueError, match=r"checkpoint-4, can't be loaded .* Fix: resume with --load_best_model_at_end"):
        train(tmp_path, Scores({2: 1.0, 4: 3.0, 6: 2.0}), (Breaks(),), **KEEPS)

    # The fix: the run ends with the model of the last step.
    trainer, _ = train(tmp_path, **KEEPS | {"load_best_model_at_end": False})
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert_weights(trainer, kept[0], 6)


def test_a_run_without_an_evaluation_keeps_the_last_step(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trainer, _ = train(tmp_path, **KEEPS | {"eval_delay": 10, "max_steps": 1})
    assert "no evaluation was completed, so the model is from the last step" in capfd.readouterr().out
    assert_weights(trainer, tmp_path, 1)


@pytest.fixture(scope="module")
def stopped_early(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, GRPOTrainer]:
    """Train with a patience of 2; the evaluations after steps 4 and 6 are no better than after step 2."""
    folder = tmp_path_factory.mktemp("early")
    trainer, _ = train(folder, Scores(FALLING), **PATIENT)
    return folder, trainer


FALLING = {2: 3.0, 4: 2.0, 6: 3.0, 8: 4.0, 10: 1.0}
PATIENT = {**KEEPS, "early_stopping_patience": 2, "max_steps": 10}


def test_a_training_ends_when_its_patience_runs_out(stopped_early: tuple[Path, GRPOTrainer]) -> None:
    folder, trainer = stopped_early
    assert steps_of(folder) == [1, 2, 3, 4, 5, 6]
    facts = {"best_step": 2, "best_eval_reward": 3.0, "evaluations_since_best": 2, "stopped_early": True}
    assert read_best(folder) == facts
    assert_weights(trainer, folder, 2)
    assert format_best(facts) == "eval_reward 3.000 at step 2, then 2 evaluations without improvement"


def test_a_training_without_checkpoints_can_stop_early(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, Scores(FALLING), **EVALUATED, early_stopping_patience=1, max_steps=8)
    assert steps_of(tmp_path) == [1, 2, 3, 4] and read_best(tmp_path)["best_step"] == 2
    assert "stopped early: no eval_reward above 3 of step 2 in 1 evaluation" in capfd.readouterr().out


@pytest.mark.slow
def test_a_finished_run_takes_no_step_and_a_larger_patience_continues(
    tmp_path: Path, stopped_early: tuple[Path, GRPOTrainer]
) -> None:
    keys = PATIENT | {"load_best_model_at_end": False}
    train(tmp_path, Scores(FALLING), **keys)
    train(tmp_path, Scores(FALLING), **keys)
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5, 6]

    train(tmp_path, Scores(FALLING), **keys | {"early_stopping_patience": 3})

    assert steps_of(tmp_path) == list(range(1, 11))
    assert read_best(tmp_path) | {"stopped_early": None} == {
        "best_step": 8, "best_eval_reward": 4.0, "evaluations_since_best": 1, "stopped_early": None,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("restores", [False, True], ids=["", "callback states"])
@pytest.mark.parametrize(
    ("stop_in", "stop_after"), [(2, None), (4, None), (6, None), (None, 3), (None, 5)],
    ids=["best", "first worse", "last", "after best", "after first worse"],
)  # fmt: skip
def test_best_and_patience_survive_a_stop(
    tmp_path: Path, stopped_early: tuple[Path, GRPOTrainer], stop_in: int | None, stop_after: int | None, restores: bool
) -> None:
    folder, trainer = stopped_early
    keys = PATIENT | {"restore_callback_states_from_checkpoint": restores}
    callbacks = () if stop_after is None else (StopAfter(stop_file(tmp_path), stop_after),)
    _, stopped = train(tmp_path, Scores(FALLING, stop_in, stop_file(tmp_path)), callbacks, **keys)
    assert stopped is not None and steps_of(tmp_path) == list(range(1, (stop_in or stop_after or 0) + 1))
    stop_file(tmp_path).unlink()

    resumed, stopped = train(tmp_path, Scores(FALLING), **keys)

    assert stopped is None
    assert rows_of(tmp_path / "metrics.jsonl") == rows_of(folder / "metrics.jsonl")
    assert rows_of(tmp_path / "eval.jsonl") == rows_of(folder / "eval.jsonl")
    assert read_best(tmp_path) == read_best(folder)
    assert_same_weights(resumed, trainer)


@pytest.mark.slow
def test_an_attempt_that_was_killed_leaves_no_best_of_the_future(
    tmp_path: Path, stopped_early: tuple[Path, GRPOTrainer]
) -> None:
    folder, _ = stopped_early

    class Killed(Exception):
        pass

    class Dies(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 5:
                raise Killed

    keys = PATIENT | {"save_steps": 2, "load_best_model_at_end": False}
    with pytest.raises(Killed):
        train(tmp_path, Scores(FALLING), (Dies(),), **keys)
    newest = list_complete_checkpoints(tmp_path / "checkpoints")[-1]
    newest.rename(newest.with_suffix(".damaged"))
    move_rows_after(tmp_path, 2)
    (tmp_path / "best.json").write_text('{"best_step": 4, "best_eval_reward": 9.0}')

    class Reads(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seen.append(read_best(tmp_path)["best_eval_reward"])

    seen: list[float] = []
    train(tmp_path, Scores(FALLING), (Reads(),), **keys)
    assert set(seen) == {3.0}
    assert rows_of(tmp_path / "metrics.jsonl") == rows_of(folder / "metrics.jsonl")
    assert read_best(tmp_path) == read_best(folder)


@pytest.mark.slow
def test_evaluations_of_callbacks_do_not_count(tmp_path: Path) -> None:
    class EvaluatesToo(TrainerCallback):
        trainer: GRPOTrainer

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.trainer.evaluate(self.trainer.eval_dataset.select(range(2)))

    scores = {step: float(step) for step in range(1, 5)}
    train(tmp_path, Scores(scores), (EvaluatesToo(),), **PATIENT | {"early_stopping_patience": 1, "max_steps": 4})
    assert steps_of(tmp_path) == [1, 2, 3, 4] and read_best(tmp_path)["best_step"] == 4


@pytest.mark.slow
def test_the_best_adapter_becomes_the_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    from grpo_recipes import smoke

    base = tmp_path / "base"
    tokenizer = smoke.build_tokenizer()
    smoke.build_model(tokenizer).save_pretrained(base)
    tokenizer.save_pretrained(base)
    keys = {**KEEPS, "max_steps": 4, "save_steps": 2}
    trainer = make_lora_trainer(base, tmp_path / "run", LORA, reward=Scores({2: 2.0, 4: 1.0}), **keys)

    trainer.train()

    adapters = [
        tmp_path / "run" / "checkpoints" / f"checkpoint-{step}" / "adapter_model.safetensors" for step in (2, 4)
    ]
    best, last = map(load_file, adapters)
    weights = {name.replace(".default.", "."): weight for name, weight in trainer.model.named_parameters()}
    assert best.keys() <= weights.keys() and best.keys()
    assert all(torch.equal(weights[name], best[name]) for name in best)
    assert not all(torch.equal(weights[name], last[name]) for name in last)
