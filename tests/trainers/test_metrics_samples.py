"""Choice of the completions for the report, which must match the training's completions."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_recipes.evaluate.scores import sum_weighted_rewards
from grpo_recipes.trainers.samples import LONGEST_TEXT, choose_rows, write_samples

from .tiny_training import train

NAN = math.nan


def test_totals_are_weighted_and_unscored_completions_have_none() -> None:
    rewards_BR = torch.tensor([[1.0, 0.5], [NAN, 0.5], [NAN, NAN], [0.25, 0.0]])
    totals_B = sum_weighted_rewards(rewards_BR, torch.tensor([2.0, 1.0]))
    assert totals_B.nan_to_num(-1.0).tolist() == [2.5, 0.5, -1.0, 0.5]


@pytest.mark.parametrize(
    ("totals", "count", "rows"),
    [
        # The best and the worst of the first group and of the one that differs most.
        ([0, 1, 0, 0, 0, 0, 0, 9, 0, 2, 0, 0], 4, [1, 3, 7, 6]),
        ([0, 1, 0, 0, 0, 0, 0, 9, 0, 2, 0, 0], 1, [1]),
        ([0, 1, 0, 0, 0, 0, 0, 9, 0, 2, 0, 0], 3, [1, 3, 7]),
        ([0, 1, 2, 3], 2, [3, 0]),
        ([0, 1, 2, 3], 9, [3, 0, 2, 1]),
        # A completion without a verdict is the worst.
        ([0, None, 2, -3], 2, [2, 1]),
        ([None] * 8, 2, [0, 4]),
        # A group without any differs less than one of equal rewards.
        ([0, 1, 0, 0] + [None] * 4 + [1] * 4, 4, [1, 3, 8, 11]),
    ],
)
def test_rows_worth_reading(totals: list[float | None], count: int, rows: list[int]) -> None:
    assert choose_rows(totals, group=4, answered=len(totals), count=count) == rows


def test_only_groups_that_begin_in_rank_0_are_chosen() -> None:
    totals: list[float | None] = [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 9.0]
    assert choose_rows(totals, group=4, answered=4, count=4) == [1, 3, 0, 2]
    assert choose_rows(totals, group=4, answered=2, count=2) == [1, 3]  # a group spread over ranks


def test_a_prompt_of_the_first_generation_takes_the_part_of_the_first_group(tmp_path: Path) -> None:
    assert choose_rows([0, 1, 0, 9, 2, 0], group=2, answered=6, count=4, first_group=4) == [4, 5, 3, 2]
    trainer = FakeTrainer(tmp_path)
    trainer.row(["36"] * 4)
    trainer._logs["prompt"] = ["another question", "another question", "question", "question"]
    assert [sample["prompt"] for sample in trainer.row(["36"] * 4)["samples"]][:2] == ["question", "question"]


class FakeTokenizer:
    """A vocabulary in the style of SentencePiece, in which the token 0 pads."""

    pad_token_id = 0

    def __init__(self, secret: str):
        self._names = {0: "<pad>", 2: "</s>", 5: "\u2581the", 6: secret or "<0x0A>", 7: "\u2581"}

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [self._names[token] for token in ids]

    def decode(self, ids: list[int]) -> str:
        texts = (self._names[token].replace("<0x0A>", "\n").replace("<pad>", "") for token in ids)
        return "".join(texts).replace("\u2581", " ").removeprefix(" ")

    def batch_decode(self, rows: list[list[int]], **_: Any) -> list[str]:
        return [self.decode(ids) for ids in rows]


class FakeTrainer:
    """TRL's state after a generation of two prompts with two completions each."""

    def __init__(
        self, folder: Path, prompt: Any = "question", completion: Any = "text", samples: int = 4, secret: str = ""
    ):
        self._samples_file = folder / "samples.jsonl"
        self.reward_func_names, self.num_generations = ["a", "b"], 2
        self.reward_weights = torch.tensor([1.0, 0.5])
        self.rewards_BR = torch.tensor([[1.0, 1.0], [0.33333, 1.0], [NAN, NAN], [0.0, 1.0]])
        self.state, self.args = SimpleNamespace(global_step=6), SimpleNamespace(report_samples=samples)
        self._logs = {
            "prompt": [prompt] * 4,
            "completion": [completion] * 4,
            "advantages": [0.70710678, -0.70710678, 0.0, 0.0],
        }
        self.eos_token_ids, self._tokenizer = [2], FakeTokenizer(secret)
        self.output: dict[str, Any] = {
            "completion_mask": torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 0]]),
            "advantages": torch.tensor([0.70710678, -0.70710678, 0.0]),
        }
        self.completion_ids = [[5, 2], [5, 6, 7], [5, 0]]  # the fourth row belongs to another rank

    def row(self, answers: list[Any], episodes: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        write_samples(self._samples_file, self, answers, self.completion_ids, self.output, episodes)
        line = self._samples_file.read_text().splitlines()[-1]
        return json.loads(line)


def test_a_row_holds_texts_scores_and_advantages(tmp_path: Path) -> None:
    row = FakeTrainer(tmp_path).row(["36", "36", 7, 7])
    assert (row["step"], row["rewards"]) == (7, [1.5, 0.8333, None, 0.5])
    assert row["samples"][0] == {
        "prompt": "question",
        "completion": "text",
        "answer": "36",
        "reward": 1.5,
        "rewards": {"a": 1.0, "b": 1.0},
        "advantage": 0.7071,
        "group_rewards": [1.5, 0.8333],
        "tokens": 2,
        "truncated": False,
        "token_view": {"text": " the</s>", "lengths": "4 4", "advantages": "2:0.7071"},
    }
    assert [sample["group_rewards"] for sample in row["samples"]][2:] == [[None, 0.5]] * 2
    lengths = [(sample.get("tokens"), sample.get("truncated")) for sample in row["samples"]]
    assert lengths == [(2, False), (3, True), (None, None), (2, False)]
    assert [sample["answer"] for sample in row["samples"]] == ["36", "36", "7", "7"]
    assert {"a": 0.3333, "b": 1.0} in [sample["rewards"] for sample in row["samples"]]
    assert row["samples"][3]["rewards"] == {"a": None, "b": None} and row["samples"][3]["reward"] is None


def test_tokens_have_advantages_masks_and_log_probs(tmp_path: Path) -> None:
    trainer = FakeTrainer(tmp_path)
    trainer.output |= {
        "tool_mask": torch.tensor([[1, 1, 1], [1, 0, 1], [0, 0, 1]]),
        "advantages": torch.tensor([[0.5, 0.25, 9.0], [-1.0, 9.0, -1.0], [9.0, 9.0, 9.0]]),
        "sampling_per_token_logps": torch.tensor([[-0.12345, NAN, 9.0], [-2.0, 0.0, -0.0], [-1.0, -1.0, 9.0]]),
    }
    views = [sample.get("token_view") for sample in trainer.row([None] * 4)["samples"]]
    assert views == [
        {"text": " the</s>", "lengths": "4 4", "advantages": "1:0.5 1:0.25", "logprobs": "-0.123 nan"},
        {"text": " the\n ", "lengths": "4 1 1", "advantages": "1:-1 1:- 1:-1", "logprobs": "-2 0 0"},
        None,  # of another rank
        {"text": " the<pad>", "lengths": "4 5", "advantages": "2:-", "logprobs": "-1 -1"},
    ]


def test_few_tokens_and_none_of_a_text_with_a_secret_are_kept(tmp_path: Path) -> None:
    trainer = FakeTrainer(tmp_path, secret="hf_" + "abcdefghij" * 2)
    trainer.completion_ids[:2] = [[5] * 2000, [7, 6, 7]]
    trainer.output["completion_mask"] = torch.ones(3, 2000)
    first, secret, *_ = trainer.row([None] * 4)["samples"]
    assert first["tokens"] == 2000 and first["token_view"]["lengths"].split() == ["4"] * 512
    assert "token_view" not in secret and "hf_" not in json.dumps(secret)


def test_chat_messages_are_kept_under_their_roles(tmp_path: Path) -> None:
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "?"}]}]
    row = FakeTrainer(tmp_path, prompt, [{"role": "assistant", "content": "yes"}]).row([None] * 4)
    (sample, *_) = row["samples"]
    assert sample["prompt"] == '[system]\nBe brief.\n\n[user]\n[{"type": "text", "text": "?"}]'
    assert sample["completion"] == "yes" and sample["answer"] is None


def test_several_messages_of_a_completion_are_kept(tmp_path: Path) -> None:
    calls = [{"role": "assistant", "content": "call"}, {"role": "tool", "content": "5"}]
    row = FakeTrainer(tmp_path, completion=calls).row([""] * 4)
    assert row["samples"][0]["completion"] == "[assistant]\ncall\n\n[tool]\n5"


def test_long_texts_are_cut_and_secrets_masked(tmp_path: Path) -> None:
    secret = "hf_" + "abcdefghij" * 2
    row = FakeTrainer(tmp_path, prompt=f"{secret} {'x' * 5000}", completion="\ud800\x00").row([secret] * 4)
    (sample, *_) = row["samples"]
    assert sample["prompt"].endswith(" […1,009 more characters]")
    assert len(sample["prompt"]) < LONGEST_TEXT + 40
    assert secret not in json.dumps(row) and sample["answer"] == "********"
    assert sample["completion"] == "\ud800\x00"


@pytest.mark.parametrize("samples", [0, 2])
def test_training_writes_a_row_a_generation(tmp_path: Path, samples: int) -> None:
    train(tmp_path / "run", report_samples=samples, steps_per_generation=2, eval_strategy="steps", eval_steps=3,
          per_device_eval_batch_size=4)  # fmt: skip
    file = tmp_path / "run/samples.jsonl"
    if samples == 0:
        assert not file.exists()
        return
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 3, 5]  # evaluations leave none
    assert all(len(row["rewards"]) == 8 and len(row["samples"]) == 2 for row in rows)
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    for row in rows:
        known = [reward for reward in row["rewards"] if reward is not None]
        logged = next(metrics_row["reward"] for metrics_row in metrics if metrics_row["step"] == row["step"])
        assert sum(known) / len(known) == pytest.approx(logged, abs=1e-3)
        for sample in row["samples"]:
            first, second = sample["prompt"].removeprefix("[user]\n").removesuffix("=").split("+")
            assert sample["answer"] == str(int(first) + int(second))
            assert sample["reward"] == sample["rewards"]["different_characters"]
            assert sample["reward"] is None or sample["reward"] == len(set(sample["completion"]))
            view, lengths = sample["token_view"], [*map(int, sample["token_view"]["lengths"].split())]
            assert len(lengths) == sample["tokens"] and sum(lengths) == len(view["text"])
            assert view["text"].startswith(sample["completion"]) or "\ufffd" in view["text"]
            assert float(view["advantages"].removeprefix(f"{len(lengths)}:")) == pytest.approx(
                sample["advantage"], abs=1e-3
            )
            logprobs = [*map(float, view["logprobs"].split())]  # of the policy before the first of two steps
            assert len(logprobs) == len(lengths) and all(-20 < logprob < 0 for logprob in logprobs)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "now"), [(8, 4), (4, 8)])
def test_after_a_resume_with_another_batch_the_rows_are_those_of_the_new_generations(
    tmp_path: Path, before: int, now: int
) -> None:
    keys = {"report_samples": 2, "steps_per_generation": 1, "save_strategy": "steps", "save_steps": 2}
    train(tmp_path / "run", **keys, max_steps=2, per_device_train_batch_size=before)
    trainer, _ = train(tmp_path / "run", **keys, max_steps=3, per_device_train_batch_size=now, ignore_data_skip=True)
    row = json.loads((tmp_path / "run/samples.jsonl").read_text().splitlines()[-1])
    assert row["step"] == 3 and len(row["rewards"]) == now and len(row["samples"]) == 2
    assert {values.maxlen for values in trainer._logs["rewards"].values()} == {now}
    for sample in row["samples"]:
        first, second = sample["prompt"].removeprefix("[user]\n").removesuffix("=").split("+")
        assert sample["answer"] == str(int(first) + int(second))
        assert sample["reward"] is None or sample["reward"] == len(set(sample["completion"]))


def test_completions_are_not_copied_to_be_kept(tmp_path: Path) -> None:
    trainer, _ = train(tmp_path / "run", max_steps=1)
    saved, completions = trainer.checkpoints.state()["logs"]["completion"], trainer._logs["completion"]
    with trainer.evaluation.undisturbed():
        assert all(text is other for text, other in zip(saved, trainer._logs["completion"], strict=True))
        completions.clear()
    assert trainer._logs["completion"] is completions
    assert len(saved) > 0 and all(text is other for text, other in zip(saved, completions, strict=True))


def test_a_long_episode_is_kept_to_its_last_turn_with_secrets_masked(tmp_path: Path) -> None:
    secret = "hf_" + "abcdefghij" * 2
    messages = [{"role": "user", "content": "y" * 3000}]
    info = {"end": secret, "won": math.nan}
    actions = [f"{turn} {'x' * 3000}" for turn in range(20)]
    turns = [{"action": action, "reward": 0.5, "info": info, "messages": messages} for action in actions]
    episodes = [{"environment": "games:Go", "seed": row, "messages": messages, "turns": turns} for row in range(4)]
    row = FakeTrainer(tmp_path).row([None] * 4, episodes)
    shown = [sample["episode"] for sample in row["samples"]]
    assert sorted(episode["seed"] for episode in shown) == [0, 1, 2, 3]
    assert [turn["action"][:2].strip() for turn in shown[0]["turns"]] == [str(turn) for turn in range(20)]
    assert len(json.dumps(shown[0])) < 25_000 and shown[0]["turns"][19]["messages"][0]["content"].endswith(
        "characters]"
    )
    assert shown[0]["turns"][0]["info"] == {"end": "********", "won": "nan"} and secret not in json.dumps(row)
