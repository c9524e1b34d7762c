"""A training on Atropos groups step by step: waiting, messages, stopping, and the weight guard."""

from __future__ import annotations

import itertools
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import run_ranks
from transformers import TrainerCallback

from grpo_recipes.extensions.atropos.client import AtroposError, NoLogprobs
from grpo_recipes.extensions.atropos.group import Group
from grpo_recipes.rollouts.backends import Rollouts
from grpo_recipes.runs.checkpoints import find_newest_complete
from grpo_recipes.runs.rundir import stop_file
from grpo_recipes.runs.stop_request import StoppedOnRequest
from grpo_recipes.trainers.grpo import GRPOTrainer
from grpo_recipes.weights.guard import WeightsDiffer

from .atropos_groups import generation, group, like_the_trainer, make_trainer, of_all_kinds
from .fixed_completions import rows_of, weights_of
from .tiny_training import GROUP

# --- taken groups and messages ---------------------------------------------------------------------------------------


def test_a_step_takes_whole_groups_that_fit_the_recipe(tmp_path: Path, model: str) -> None:
    trainer = make_trainer(tmp_path, model, atropos_max_staleness=2)
    trainer.train()
    vocabulary = trainer.model.get_input_embeddings().num_embeddings
    arguments = {"groups": 2, "size": GROUP, "longest": 8 + 24, "vocabulary": vocabulary, "max_staleness": 2}
    assert trainer.source._client.asked == [{**arguments, "step": step} for step in range(2)]


def test_rows_say_how_the_groups_came(tmp_path: Path, model: str) -> None:
    def make(step: int) -> list[Group]:
        if step == 1:
            client.counts["rejected"] += 2
            client.counts["stale"] += 3
            client.counts["lost_batches"] += 1
        of_now, of_begin = {"policy_version": step}, {"policy_version": 0}
        return [group("a", generation_params=of_now), group("b", generation_params=of_begin)]

    trainer = make_trainer(tmp_path, model, make, max_steps=3)
    client = trainer.source._client
    began = time.monotonic()
    trainer.train()
    minutes = (time.monotonic() - began) / 60
    rows = rows_of(tmp_path)
    assert [row["atropos/rejected"] for row in rows] == [0.0, 2.0, 0.0]
    assert [row["atropos/stale"] for row in rows] == [0.0, 3.0, 0.0]
    assert [row["atropos/lost_batches"] for row in rows] == [0.0, 1.0, 0.0]
    assert [row["atropos/staleness_mean"] for row in rows] == [0.0, 0.5, 1.0]
    assert [row["atropos/staleness_max"] for row in rows] == [0.0, 1.0, 2.0]
    assert {row["atropos/queue"] for row in rows} == {3.0} and {row["atropos/api_seconds"] for row in rows} == {0.25}
    assert sum(1 / row["atropos/batches_per_minute"] for row in rows[1:]) <= minutes  # the first waits for a model
    for before, row in itertools.pairwise(rows):
        assert 0 <= row["atropos/wait_seconds"] < row["seconds/step"]
        assert 1 / row["atropos/batches_per_minute"] >= row["atropos/wait_seconds"] / 60
        tokens_of_batch = 60 * row["atropos/tokens_per_second"] / row["atropos/batches_per_minute"]
        assert tokens_of_batch == pytest.approx(row["num_tokens"] - before["num_tokens"])
    of_each = ("atropos/reward_", "atropos/share_")
    assert not any(name.startswith(of_each) for row in rows for name in row)  # there is only one environment


def test_several_environments_have_rewards_of_their_own(tmp_path: Path, model: str) -> None:
    def make(step: int) -> list[Group]:
        named = group("a", (1.0, 0.0, 0.0, 0.0), generation_params={"environment": "sums"}, env_id=0)
        return [named, group("b", (3.0, 2.0, 0.0, 3.0), env_id=7)] if step else [named, named]

    trainer = make_trainer(tmp_path, model, make)
    trainer.train()
    first, second = ({k: v for k, v in row.items() if k.startswith("atropos/reward")} for row in rows_of(tmp_path))
    assert first == {} and second == {"atropos/reward_sums": 0.25, "atropos/reward_7": 2.0}
    shares = [{k: v for k, v in row.items() if k.startswith("atropos/share")} for row in rows_of(tmp_path)]
    assert shares == [{}, {"atropos/share_sums": 0.5, "atropos/share_7": 0.5}]
    assert "atropos/staleness_mean" not in rows_of(tmp_path)[0]  # no group says how old it is


def test_samples_show_prompt_turns_and_score(tmp_path: Path, model: str) -> None:
    trainer = make_trainer(tmp_path, model, report_samples=8)
    first = group("a", turns=2)
    trainer.source._client._make = lambda _: [first, group("b")]
    generation(trainer)
    (row,) = rows_of(tmp_path, "samples.jsonl")
    tokenizer, tokens, mask = trainer.processing_class, first.tokens[0], first.masks[0]
    begin = next(place for place, label in enumerate(mask) if label != -100)
    between = next(place for place in range(begin, len(mask)) if mask[place] == -100)
    second_turn = next(place for place in range(between, len(mask)) if mask[place] != -100)
    best = next(sample for sample in row["samples"] if sample["reward"] == 1.0)
    parts = [
        tokenizer.decode(tokens[part])
        for part in (slice(begin, between), slice(between, second_turn), slice(second_turn, None))
    ]
    assert best["prompt"] == f"[user]\n{tokenizer.decode(tokens[:begin])}"
    assert best["completion"] == "[assistant]\n{}\n\n[user]\n{}\n\n[assistant]\n{}".format(*parts)
    assert best["rewards"] == {"environment": 1.0} and "episode" not in best


# --- the weights of the server ---------------------------------------------------------------------------------------


class Synced(Rollouts):
    """A server that gets weights before each generation while ``syncs``, and has the correct weights."""

    syncs, bridge = True, "file"
    _numbers = itertools.count()

    @property
    def transfers(self) -> int:
        return next(self._numbers) if self.syncs else 0


def guarded(folder: Path, model: str) -> GRPOTrainer:
    trainer = make_trainer(folder, model)
    trainer.rollouts = Synced(trainer)
    trainer.rollouts.guarded = True
    return trainer


def taken(trainer: GRPOTrainer, *groups: Group) -> dict[str, float]:
    """Take these groups and return the logged metrics."""
    trainer.source._client._make = lambda _: list(groups)
    trainer._metrics["train"].clear()
    generation(trainer)
    return {name: values[0] for name, values in trainer._metrics["train"].items()}


def test_the_guard_compares_what_was_sampled_with_the_weights_of_now(tmp_path: Path, model: str) -> None:
    trainer = guarded(tmp_path, model)
    matching = [like_the_trainer(trainer, group(name)) for name in "ab"]
    other = like_the_trainer(trainer, group("a"), 2.0)
    wrong = Group.from_json({**other.to_json(), "generation_params": {"policy_version": 0}})
    assert taken(trainer, *matching)["sampling/sampling_logp_difference/mean"] == pytest.approx(0.0, abs=1e-5)
    with pytest.raises(WeightsDiffer, match=r"mean \|log-prob difference\| 0\.3"):
        taken(trainer, matching[1], wrong)
    unknown = Group.from_json({**other.to_json(), "generation_params": {}})
    logged = taken(trainer, matching[1], unknown)
    assert 0.1 < logged["sampling/sampling_logp_difference/mean"] < 0.6
    assert logged["sampling/sampling_logp_difference/max"] == pytest.approx(0.693, abs=1e-3)
    cut = Group.from_json({**other.to_json(), "generation_params": {"policy_version": 0, "top_p": 0.9}})
    taken(trainer, matching[1], cut)  # the log-probs of a truncated distribution are others


def test_the_guard_waits_for_a_batch_with_something_to_compare(tmp_path: Path, model: str) -> None:
    trainer = guarded(tmp_path, model)
    trainer.state.global_step = 3
    stale = like_the_trainer(trainer, group("a", generation_params={"policy_version": 2}), 2.0)
    now = like_the_trainer(trainer, group("b", generation_params={"policy_version": 3}), 2.0)
    taken(trainer, stale, stale)
    assert trainer.checks._unproven
    trainer.rollouts.syncs = False
    taken(trainer, stale, stale)
    with pytest.raises(WeightsDiffer):
        taken(trainer, stale, now)


def test_the_guard_compares_at_the_temperature_of_a_row(tmp_path: Path, model: str) -> None:
    trainer = guarded(tmp_path, model)
    params = {"policy_version": 0, "temperature": 0.5}
    cold = like_the_trainer(trainer, group("a", generation_params=params), 1.0, 0.5)
    logged = taken(trainer, cold, like_the_trainer(trainer, group("b")))
    assert logged["sampling/sampling_logp_difference/max"] == pytest.approx(0.0, abs=1e-4)


# --- stops, errors, resuming -----------------------------------------------------------------------------------------


def test_a_stop_request_ends_the_wait(tmp_path: Path, model: str) -> None:
    def make(step: int) -> list[Group] | None:
        if step < 1:
            return [group("a"), group("b")]
        threading.Timer(0.3, stop_file(tmp_path).touch).start()
        return None

    trainer = make_trainer(tmp_path, model, make, save_strategy="steps", save_steps=10)
    began = time.monotonic()
    with pytest.raises(StoppedOnRequest, match="after step 1, state saved"):
        trainer.train()
    assert time.monotonic() - began < 60
    assert find_newest_complete(tmp_path / "checkpoints").name == "checkpoint-1"


@pytest.mark.parametrize("error", [AtroposError("Maximum wait time (1.0s) exceeded"), NoLogprobs("none"), OSError("x")])
def test_an_error_of_the_client_ends_the_run_before_the_step(tmp_path: Path, model: str, error: Exception) -> None:
    def make(_: int) -> list[Group]:
        raise error

    trainer = make_trainer(tmp_path, model, make)
    before = weights_of(trainer)
    with pytest.raises(type(error), match=str(error).partition("(")[0]):
        trainer.train()
    assert all(torch.equal(before[name], weight) for name, weight in weights_of(trainer).items())
    assert not (tmp_path / "metrics.jsonl").exists()


class AskAt(TrainerCallback):
    """Request a stop after a step."""

    def __init__(self, step: int, file: Path):
        self._step, self._file = step, file

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            self._file.touch()


def test_groups_that_were_taken_are_used_after_a_resume(tmp_path: Path, model: str) -> None:
    """One generation has two steps. After a stop between them, the second step learns from the remaining groups."""
    keys = {"max_steps": 4, "per_device_train_batch_size": 6, "steps_per_generation": 2, "save_strategy": "steps",
            "save_steps": 10}  # fmt: skip
    whole = make_trainer(tmp_path / "whole", model, of_all_kinds, **keys)
    whole.train()
    parts = make_trainer(tmp_path / "parts", model, of_all_kinds, **keys)
    parts.add_callback(AskAt(1, stop_file(tmp_path / "parts")))
    with pytest.raises(StoppedOnRequest, match="after step 1, state saved"):
        parts.train()
    stop_file(tmp_path / "parts").unlink()
    resumed = make_trainer(tmp_path / "parts", model, of_all_kinds, **keys)
    resumed.train(resume_from_checkpoint=str(tmp_path / "parts/checkpoints/checkpoint-1"))
    assert [request["step"] for request in resumed.source._client.asked] == [2]
    expected = weights_of(whole)
    assert all(torch.equal(expected[name], weight) for name, weight in weights_of(resumed).items())
    assert [row["loss"] for row in rows_of(tmp_path / "parts")] == [row["loss"] for row in rows_of(tmp_path / "whole")]


def on_two_ranks(folder: Path, model: str, ends: str, keys: dict[str, Any]) -> None:
    """Train on three groups of four. Each rank has half of the second group."""
    sizes = {"per_device_train_batch_size": 6}
    run_ranks("trainers.atropos_groups", str(folder), model, ends, json.dumps({**keys, **sizes}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ends", "told"),
    [("error", "AtroposError: the groups are gone"), ("stop", "StoppedOnRequest: stopped on request after step 1")],
)
def test_what_ends_rank_0_while_it_waits_ends_all_ranks(tmp_path: Path, model: str, ends: str, told: str) -> None:
    on_two_ranks(tmp_path, model, ends, {})
    for rank in (0, 1):
        assert (tmp_path / f"rank_{rank}.txt").read_text().startswith(told)
    assert [row["step"] for row in rows_of(tmp_path)] == [1]


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{"beta": 0.1}, {"loss_type": "grpo", "atropos_normalize_advantages": True}], ids=str)
def test_two_processes_equal_one(tmp_path: Path, model: str, keys: dict[str, Any]) -> None:
    on_two_ranks(tmp_path / "two", model, "", keys)
    alone = make_trainer(tmp_path / "one", model, of_all_kinds, per_device_train_batch_size=12, **keys)
    before = weights_of(alone)
    alone.train()
    after, two = weights_of(alone), torch.load(tmp_path / "two/weights.pt")
    assert max((after[name] - before[name]).abs().max() for name in after) > 1e-3
    for name, weight in after.items():
        assert torch.allclose(two[name], weight, rtol=0, atol=1e-6), name
    for row, other in zip(rows_of(tmp_path / "one"), rows_of(tmp_path / "two"), strict=True):
        for name in ("loss", "reward", "grad_norm", "entropy", "atropos/staleness_max"):
            assert other[name] == pytest.approx(row[name], rel=1e-3, abs=1e-5), name
