"""Unscored completions: no advantage, no weight in their group, counted, written down, and not too many."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object

from grpo_recipes.rewards.answers import completion_text
from grpo_recipes.rewards.load import RewardWrapper
from grpo_recipes.rewards.score import GIVEN_UP, Score
from grpo_recipes.secrets import masked
from grpo_recipes.trainers.metrics import append_json

_SLOW_SHARE = 0.5  # of the limit
_SLOWEST, _MOST_ROWS = 3, 20  # written for one generation
_LONGEST_TEXT = 500  # characters


class TooManyWithoutVerdict(RuntimeError):
    """A reward scored too few completions of a step for an update to be worth it."""


class Scoring:
    """Do what TRL does not do about rewards that gave no score.

    TRL leaves a completion out, with advantage 0, when every reward returned None for it. So all rewards of a
    completion become NaN when one of them should have scored it and could not (a limit, a death, an exception, no
    number). A reward that returns None by itself says that the completion is not its task: that stays TRL's.
    """

    def __init__(self, trainer: Any, run_dir: Path, max_unscored: float):
        self._trainer = trainer
        self._file = run_dir / "slow_rewards.jsonl"
        self.max_unscored = max_unscored  # largest share of a training generation that does not end the run

    def _rewards(self) -> list[RewardWrapper]:
        return [reward for reward in self._trainer.reward_funcs if isinstance(reward, RewardWrapper)]

    def begin(self, rows: int) -> None:
        """Give the rewards the generation's number, and how many unscored ones of ``rows`` here are too many."""
        trainer = self._trainer
        hopeless = self._most(rows * trainer.accelerator.num_processes)
        for reward in self._rewards():
            reward.generation, reward.stop = trainer._step, trainer.preemption.stop
            reward.give_up_after = hopeless if trainer.model.training else None

    def _most(self, rows: int) -> int:
        return math.floor(self.max_unscored * rows + 1e-9)  # 0.29 of 100 is 29, not 28

    def mark_unscored(self, rewards_BR: torch.Tensor, prompts: list[Any], completions: list[Any]) -> None:
        """Set every column of an unscored completion to NaN in the rewards of all ranks.

        Too many end the run on every rank, before an update is computed from this batch.
        """
        own, trainer = self._rewards(), self._trainer
        if not own:
            return
        reports = gather_object([[(reward.scores, _rows(reward, prompts, completions)) for reward in own]])
        by_reward = list(zip(*reports, strict=True))
        scores = [[score for of_rank, _ in ranks for score in of_rank] for ranks in by_reward]
        unscored = torch.tensor([any(score.unscored for score in row) for row in zip(*scores, strict=True)])
        rewards_BR[unscored.to(rewards_BR.device)] = math.nan

        training = trainer.model.training
        metrics = trainer._metrics["train" if training else "eval"]
        for reward, given in zip(own, scores, strict=True):
            name = reward.__name__
            metrics[f"rewards/{name}/no_verdict"].append(sum(score.unscored for score in given) / len(given))
            metrics[f"rewards/{name}/seconds_max"].append(max(score.seconds for score in given))
        metrics["rewards/no_verdict"].append(rewards_BR.isnan().all(dim=1).float().mean().item())
        if trainer.accelerator.is_main_process:
            self._write([row for ranks in by_reward for _, rows in ranks for row in rows], training)
        if training and int(unscored.sum()) > self._most(len(unscored)):
            raise self._too_many(own, scores, float(unscored.float().mean()))

    def _write(self, rows: list[dict[str, Any]], training: bool) -> None:
        """Add the slowest scored completions, and the unscored ones, to ``slow_rewards.jsonl``."""
        slow = sorted((row for row in rows if row["reason"] is None), key=lambda row: -row["seconds"])[:_SLOWEST]
        chosen = [*slow, *(row for row in rows if row["reason"] is not None)][:_MOST_ROWS]
        when = {"step": self._trainer.state.global_step + int(training), "training": training}
        if chosen:
            append_json(self._file, *({**when, **row} for row in chosen))

    def _too_many(self, rewards: list[RewardWrapper], scores: list[list[Score]], share: float) -> TooManyWithoutVerdict:
        """Return the error, with the reward at fault and the most common kind of reason: messages may all differ."""
        worst, given = max(zip(rewards, scores, strict=True), key=lambda one: sum(score.unscored for score in one[1]))
        reasons = [score.reason for score in given if score.reason not in (None, GIVEN_UP)]
        ((kind, count),) = Counter(reason.partition(":")[0] for reason in reasons).most_common(1)
        reason, _ = Counter(one for one in reasons if one.partition(":")[0] == kind).most_common(1)[0]
        return TooManyWithoutVerdict(
            f"{share:.0%} of the completions of step {self._trainer.state.global_step + 1} have no verdict, "
            f"more than reward_max_no_verdict: {self.max_unscored}. Reward '{worst.spec}' gave none for "
            f"{sum(score.unscored for score in given)} of {len(given)}; most often: {masked(reason)} ({count}). "
            f"See {self._file.name} in the run directory"
        )


def _rows(reward: RewardWrapper, prompts: list[Any], completions: list[Any]) -> list[dict[str, Any]]:
    """Return one rank's rows of one reward: its slowest scored completions, and unscored ones with their reasons."""
    scores, limit = reward.scores, _SLOW_SHARE * (reward.timeout or math.inf)
    slow = [row for row, score in enumerate(scores) if not score.unscored and score.seconds > limit]
    slow.sort(key=lambda row: -scores[row].seconds)
    unscored = [row for row, score in enumerate(scores) if score.unscored and score.reason != GIVEN_UP]
    return [
        {
            "reward": reward.spec,
            "seconds": round(scores[row].seconds, 3),
            "reason": masked(scores[row].reason) if scores[row].unscored else None,
            "replayed": scores[row].replayed,
            "prompt": masked(completion_text(prompts[row]))[:_LONGEST_TEXT],
            "completion": masked(completion_text(completions[row]))[:_LONGEST_TEXT],
        }
        for row in [*slow[:_SLOWEST], *unscored[:_MOST_ROWS]]
    ]
