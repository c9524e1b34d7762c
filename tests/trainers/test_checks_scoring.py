"""A completion without a verdict changes no advantage. It is counted and recorded, and there is a limit."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_processes import run_ranks
from transformers import TrainerCallback

from grpo_recipes.rewards.load import LimitRecords
from grpo_recipes.rewards.score import RewardWrapper, Score
from grpo_recipes.runs.checkpoints import find_newest_complete
from grpo_recipes.runs.rundir import move_rows_after
from grpo_recipes.trainers import checks
from grpo_recipes.trainers.checks import Scoring, TooManyWithoutVerdict

from .scored_trainer import REWARD, length, make_trainer, own_rewards, own_value, scored

EPSILON = 1e-4  # TRL's, in the denominator


def expected_advantages(ids: list[list[int]], group: int, scale: str, with_length: bool = True) -> list[float]:
    """Compute advantages by hand, only over completions with a verdict."""
    totals = [total_reward(row_ids, with_length) for row_ids in ids]
    known = [total for total in totals if total is not None]
    batch_std = statistics.stdev(known)
    advantages = []
    for row, total in enumerate(totals):
        start = row - row % group
        of_group = [value for value in totals[start : start + group] if value is not None]
        if total is None or (scale == "group" and len(of_group) < 2):
            advantages.append(0.0)
            continue
        std = {"group": lambda of=of_group: statistics.stdev(of) + EPSILON, "batch": lambda: batch_std + EPSILON}
        advantages.append((total - statistics.mean(of_group)) / std.get(scale, lambda: 1.0)())
    return advantages


def total_reward(ids: list[int], with_length: bool) -> float | None:
    value = own_value(ids)
    if value == "none" or (value is None and not with_length):
        return None
    return (len(set(ids)) if with_length else 0) + (value or 0.0)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("run")
    rewards = own_rewards(folder)
    yield make_trainer(folder, [length, *rewards])
    rewards[0].pool.close()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("alone")
    rewards = own_rewards(folder)
    yield make_trainer(folder, rewards)
    rewards[0].pool.close()


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("which", ["trainer", "alone"])
def test_advantages_are_those_of_the_others(which: str, scale: str, request: pytest.FixtureRequest) -> None:
    trainer = request.getfixturevalue(which)
    trainer.model.train()
    trainer.scale_rewards = scale
    rows = scored(trainer, prompts=8, each=8)
    ids = [row["ids"] for row in rows]
    outcomes = [own_value(row_ids) for row_ids in ids]
    assert "none" in outcomes and None in outcomes and len(set(outcomes)) > 4  # every kind is there
    expected = expected_advantages(ids, 8, scale, with_length=which == "trainer")
    assert [row["advantage"] for row in rows] == pytest.approx(expected, abs=1e-4)
    for row, outcome in zip(rows, outcomes, strict=True):
        assert outcome != "none" or row["advantage"] == 0.0


def test_metrics_count_what_is_missing_and_mean_the_rest(trainer: Any) -> None:
    trainer.model.train()
    trainer._metrics["train"].clear()
    ids = [row["ids"] for row in scored(trainer, prompts=8, each=8)]
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    known = [row_ids for row_ids in ids if own_value(row_ids) != "none"]
    missing = 1 - len(known) / len(ids)
    assert 0 < missing < 1
    assert metrics["rewards/own/no_verdict"] == metrics["rewards/no_verdict"] == pytest.approx(missing)
    assert 0 < metrics["rewards/own/seconds_max"] < 1
    assert metrics["reward"] == pytest.approx(
        statistics.mean(total_reward(row_ids, True) for row_ids in known), rel=1e-5
    )
    assert metrics["rewards/length/mean"] == pytest.approx(
        statistics.mean(len(set(row_ids)) for row_ids in known), rel=1e-5
    )
    numbers = [value for row_ids in known if (value := own_value(row_ids)) is not None]
    assert metrics["rewards/own/mean"] == pytest.approx(statistics.mean(numbers), rel=1e-5)


def test_completions_without_a_verdict_are_written_down(
    trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.model.train()
    monkeypatch.setattr(trainer.scoring, "_file", tmp_path / "slow_rewards.jsonl")
    ids = [row["ids"] for row in scored(trainer, prompts=8, each=8)]
    rows = [json.loads(line) for line in (tmp_path / "slow_rewards.jsonl").read_text().splitlines()]
    assert len(rows) == min(20, sum(own_value(row_ids) == "none" for row_ids in ids)) > 0
    for row in rows:
        assert (row["step"], row["training"], row["replayed"]) == (1, True, False)
        assert row["reward"].endswith("own.py:own") and row["prompt"].endswith("+1=")
        assert row["reason"].startswith("ValueError: about [{'role': 'assistant'")


def test_the_slowest_are_written_down_too_and_texts_are_cut(tmp_path: Path) -> None:
    code = "import time\ndef own(completions):\n    time.sleep(0.7)\n    return [1.0]\n"
    rewards = own_rewards(tmp_path, code)
    trainer = make_trainer(tmp_path, rewards, num_generations=4)
    long = [[{"role": "assistant", "content": f"{n} hf_{'a' * 20} " + "x" * 1000}] for n in range(4)]
    trainer._calculate_rewards([{"prompt": "?"}] * 4, ["?"] * 4, long, [[1]] * 4)
    rewards[0].pool.close()
    rows = [json.loads(line) for line in (tmp_path / "slow_rewards.jsonl").read_text().splitlines()]
    assert len(rows) == 3 and all(row["reason"] is None and 0.7 <= row["seconds"] < 1 for row in rows)
    assert all(len(row["completion"]) == 500 and "hf_a" not in row["completion"] for row in rows)


def test_the_three_slowest_of_all_ranks_and_rewards_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reward(spec: str, *seconds: float) -> RewardWrapper:
        wrapper = RewardWrapper(len, spec, spec)
        wrapper.timeout, wrapper.scores = 1.0, [Score(1.0, None, each) for each in seconds]
        return wrapper

    rewards = [reward("a", 0.6, 0.9, 0.7, 0.1), reward("b", 0.8, 0.6, 0.7, 0.95)]
    rewards[1].scores[1] = Score(None, "time limit", 1.0)

    def both_ranks(mine: list[Any]) -> list[Any]:  # the other rank was a little slower
        return [
            *mine,
            [(scores, [{**row, "seconds": row["seconds"] + 0.02} for row in rows]) for scores, rows in mine[0]],
        ]

    monkeypatch.setattr(checks, "gather_object", both_ranks)
    trainer = SimpleNamespace(
        reward_funcs=rewards,
        model=SimpleNamespace(training=False),
        add_metric=lambda name, value, mode: None,
        state=SimpleNamespace(global_step=3),
        accelerator=SimpleNamespace(is_main_process=True),
    )
    texts = [f"text {n}" for n in range(4)]
    Scoring(trainer, tmp_path, 1.0).mark_unscored(torch.ones(8, 2), texts, texts)
    rows = [json.loads(line) for line in (tmp_path / "slow_rewards.jsonl").read_text().splitlines()]
    slow = [("b", 0.97, None), ("b", 0.95, None), ("a", 0.92, None)]
    unscored = [("b", 1.0, "time limit"), ("b", 1.02, "time limit")]
    assert [(row["reward"], row["seconds"], row["reason"]) for row in rows] == slow + unscored


def test_too_many_without_a_verdict_end_training_and_not_an_evaluation(trainer: Any) -> None:
    trainer.scoring.max_unscored = 0.01
    try:
        trainer.model.eval()
        trainer._metrics["eval"].clear()
        scored(trainer, prompts=8, each=8)
        assert trainer._metrics["eval"]["rewards/no_verdict"][0] > 0.01
        trainer.model.train()
        message = (
            r"% of the completions of step 1 are unscored, more than reward_max_no_verdict: 0.01\. Reward .*own\.py:"
        )
        with pytest.raises(TooManyWithoutVerdict, match=message + r"own' gave no score .* most often: ValueError"):
            scored(trainer, prompts=8, each=8)
    finally:
        trainer.scoring.max_unscored = 1.0


def test_a_resumed_run_calls_the_rewards_of_the_step_that_ended_it(tmp_path: Path) -> None:
    reward = own_rewards(tmp_path)[0]
    reward.pool.close()
    file, late = tmp_path / "records" / "limits_0.jsonl", Score(None, "time limit", by_limit=True)
    reward._records = records = LimitRecords(file)
    for key, generation in (("a", 3), ("b", 4), ("c", 4)):
        records.add(key, generation, late)
    reward.generation, reward.scores = 4, [late, Score(1.0), late]
    trainer = SimpleNamespace(
        reward_funcs=[reward],
        model=SimpleNamespace(training=True),
        add_metric=lambda name, value, mode: None,
        state=SimpleNamespace(global_step=3),
        accelerator=SimpleNamespace(is_main_process=False),
        args=SimpleNamespace(generation_batch_size=3),
    )
    scoring = Scoring(trainer, tmp_path, 0.7)
    scoring.mark_unscored(torch.ones(3, 1), ["?"] * 3, ["?"] * 3)
    assert len(file.read_text().splitlines()) == 3, "the step is taken"
    scoring.max_unscored = 0.5
    with pytest.raises(TooManyWithoutVerdict, match="time limit"):
        scoring.mark_unscored(torch.ones(3, 1), ["?"] * 3, ["?"] * 3)
    for remaining in (records, LimitRecords(file)):
        assert [remaining.find(key, 4) is not None for key in "abc"] == [True, False, False]


def test_rewards_that_are_not_watched_are_left_to_trl(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, [length])
    scored(trainer, prompts=1, each=8)
    assert not [name for name in trainer._metrics["train"] if "no_verdict" in name]
    assert not (tmp_path / "slow_rewards.jsonl").exists()


# --- two processes ---------------------------------------------------------------------------------------------------


def run_two(folder: Path) -> list[dict[str, Any]]:
    run_ranks("trainers.scored_trainer", str(folder))
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.slow
def test_two_processes_share_a_group_and_stop_with_the_same_words(tmp_path: Path) -> None:
    first, second = run_two(tmp_path)
    ids = [row["ids"] for rank in (first, second) for row in rank["rows"]]
    outcomes = [[own_value(row["ids"]) == "none" for row in rank["rows"]] for rank in (first, second)]
    assert outcomes[0] != outcomes[1] and any(outcomes[0] + outcomes[1])
    advantages = [row["advantage"] for rank in (first, second) for row in rank["rows"]]
    assert advantages == pytest.approx(expected_advantages(ids, 8, "group"), abs=1e-4)
    share = sum(outcomes[0] + outcomes[1]) / 24
    for rank in (first, second):
        assert rank["metrics"]["rewards/own/no_verdict"] == pytest.approx(share)
    rows = [json.loads(line) for line in (tmp_path / "slow_rewards.jsonl").read_text().splitlines()]
    assert len(rows) >= sum(outcomes[0] + outcomes[1])
    assert first["stopped"] == second["stopped"]
    assert first["stopped"].startswith("TooManyWithoutVerdict: ")


# --- whole steps -----------------------------------------------------------------------------------------------------

HANGS = """
import time
from pathlib import Path

def own(completions, completion_ids):
    if sum(completion_ids[0]) % 3 == 0 and (Path(__file__).parent / "slow").exists():
        time.sleep(100)
    return [sum(completion_ids[0]) % 7 / 7]
"""


class SaveAt(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        control.should_save = state.global_step == 2
        return control


def train(folder: Path) -> list[dict[str, Any]]:
    rewards = own_rewards(folder, HANGS, reward_timeout=0.5)
    trainer = make_trainer(folder, rewards, max_steps=4)
    trainer.add_callback(SaveAt())
    checkpoint = find_newest_complete(folder / "checkpoints")
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    rewards[0].pool.close()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("seconds", "tokens_per_second", "step_time", "memory/", "syncs")
    return [{key: value for key, value in row.items() if not any(word in key for word in timed)} for row in rows]


@pytest.mark.slow
def test_a_resumed_run_gives_the_verdicts_of_the_time_limit_again(tmp_path: Path) -> None:
    (tmp_path / "slow").touch()
    rows = train(tmp_path)
    assert len(rows) == 4 and all(row["rewards/own/no_verdict"] == row["rewards/no_verdict"] for row in rows)
    redone = rows[2:]
    assert any(row["rewards/no_verdict"] > 0 for row in redone)
    records = (tmp_path / "rewards/limits_0.jsonl").read_text().splitlines()
    assert len({json.loads(record)["generation"] for record in records}) > 1  # limits of several generations
    assert all(math.isfinite(row["loss"]) for row in rows)

    (tmp_path / "slow").unlink()  # acts like a faster machine
    assert move_rows_after(tmp_path, 2) == 2
    assert train(tmp_path)[2:] == redone


def test_a_step_without_any_verdict_changes_no_weight(tmp_path: Path) -> None:
    code = "def own(completions):\n    raise ValueError('never')\n"
    rewards = own_rewards(tmp_path, code)
    trainer = make_trainer(tmp_path, rewards, max_steps=1)
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    rewards[0].pool.close()
    (row,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert (row["reward"], row["rewards/no_verdict"], row["grad_norm"]) == (None, 1.0, 0.0)
    assert all(torch.equal(parameter, before[name]) for name, parameter in trainer.model.named_parameters())


def test_the_code_of_the_test_reward_is_what_the_test_computes() -> None:
    space: dict[str, Any] = {}
    exec(REWARD, space)
    for total in range(1, 6):
        assert space["own"](["x"], [[total]]) == [own_value([total])]
    with pytest.raises(ValueError, match="about x"):
        space["own"](["x"], [[6]])
