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
from grpo_recipes.rewards.score import GIVEN_UP
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
        """Tell the rewards which generation comes, and after how many unscored ones of its ``rows`` here to give up."""
        trainer = self._trainer
        hopeless = _most(self.max_unscored, rows * trainer.accelerator.num_processes)
        for reward in self._rewards():
            reward.generation = trainer._step
            reward.give_up_after = hopeless if trainer.model.training else None

    def mark_unscored(self, rewards: torch.Tensor, prompts: list[Any], completions: list[Any]) -> None:
        """Set every column of an unscored completion to NaN in the rewards of all ranks, (B, rewards).

        Too many end the run on every rank, before an update is computed from this batch.
        """
        own = self._rewards()
        if not own:
            return
        reports = gather_object([[_report(reward, prompts, completions) for reward in own]])
        per_reward = [_joined(list(of_ranks)) for of_ranks in zip(*reports, strict=True)]
        unscored = torch.tensor([any(row) for row in zip(*[one["missing"] for one in per_reward], strict=True)])
        rewards[unscored.to(rewards.device)] = math.nan
        self._log(per_reward, rewards)
        if self._trainer.model.training:
            self._check_share(per_reward, unscored)

    def _log(self, per_reward: list[dict[str, Any]], rewards: torch.Tensor) -> None:
        metrics = self._trainer._metrics["train" if self._trainer.model.training else "eval"]
        for one in per_reward:
            name = one["name"]
            metrics[f"rewards/{name}/no_verdict"].append(sum(one["missing"]) / len(one["missing"]))
            metrics[f"rewards/{name}/seconds_max"].append(one["seconds_max"])
        metrics["rewards/no_verdict"].append(rewards.isnan().all(dim=1).float().mean().item())
        if self._trainer.accelerator.is_main_process:
            self._write_slow([row for one in per_reward for row in one["rows"]])

    def _write_slow(self, rows: list[dict[str, Any]]) -> None:
        """Add the unscored completions, and the slowest others, to ``slow_rewards.jsonl``."""
        missing = [row for row in rows if row["reason"] is not None]
        slow = sorted((row for row in rows if row["reason"] is None), key=lambda row: -row["seconds"])[:_SLOWEST]
        training = self._trainer.model.training
        when = {"step": self._trainer.state.global_step + int(training), "training": training}
        if chosen := [*slow, *missing][:_MOST_ROWS]:
            append_json(self._file, *({**when, **row} for row in chosen))

    def _check_share(self, per_reward: list[dict[str, Any]], unscored: torch.Tensor) -> None:
        count, rows = int(unscored.sum()), len(unscored)
        if count <= _most(self.max_unscored, rows):
            return
        worst = max(per_reward, key=lambda one: sum(one["missing"]))
        reason, of_reason = _usual(worst["reasons"])
        raise TooManyWithoutVerdict(
            f"{count / rows:.0%} of the completions of step {self._trainer.state.global_step + 1} have no verdict, "
            f"more than reward_max_no_verdict: {self.max_unscored}. Reward '{worst['spec']}' gave none for "
            f"{sum(worst['missing'])} of {rows}; most often: {masked(reason)} ({of_reason}). "
            f"See {self._file.name} in the run directory"
        )


def _report(reward: RewardWrapper, prompts: list[Any], completions: list[Any]) -> dict[str, Any]:
    """Return one rank's report of one reward: what is unscored, why, and the slowest calls."""
    verdicts = reward.scores
    missing = [row for row, verdict in enumerate(verdicts) if verdict.unscored and verdict.reason != GIVEN_UP]
    slow = [
        row
        for row, verdict in enumerate(verdicts)
        if not verdict.unscored and reward.timeout is not None and verdict.seconds > _SLOW_SHARE * reward.timeout
    ]
    slow.sort(key=lambda row: -verdicts[row].seconds)
    return {
        "name": reward.__name__,
        "spec": reward.spec,
        "missing": [verdict.unscored for verdict in verdicts],
        "reasons": Counter(verdicts[row].reason for row in missing),
        "seconds_max": max((verdict.seconds for verdict in verdicts), default=0.0),
        "rows": [
            {
                "reward": reward.spec,
                "seconds": round(verdicts[row].seconds, 3),
                "reason": masked(verdicts[row].reason) if verdicts[row].reason else None,
                "replayed": verdicts[row].replayed,
                "prompt": _short(prompts[row]),
                "completion": _short(completions[row]),
            }
            for row in [*slow[:_SLOWEST], *missing[:_MOST_ROWS]]
        ],
    }


def _joined(of_ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Join one reward's reports of all ranks, in their order."""
    return {
        **of_ranks[0],
        "missing": [flag for one in of_ranks for flag in one["missing"]],
        "reasons": sum((one["reasons"] for one in of_ranks), Counter()),
        "seconds_max": max(one["seconds_max"] for one in of_ranks),
        "rows": [row for one in of_ranks for row in one["rows"]],
    }


def _most(share: float, rows: int) -> int:
    """Return the most rows within a share; 0.29 of 100 is 29, not 28."""
    return math.floor(share * rows + 1e-9)


def _usual(reasons: Counter[str]) -> tuple[str, int]:
    """Return the reason of the most common kind, and the kind's count; messages of one exception may all differ."""
    kinds: Counter[str] = Counter()
    for reason, count in reasons.items():
        kinds[reason.partition(":")[0]] += count
    ((kind, count),) = kinds.most_common(1)
    return next(reason for reason, _ in reasons.most_common() if reason.partition(":")[0] == kind), count


def _short(text: Any) -> str:
    return masked(completion_text(text))[:_LONGEST_TEXT]
