"""Completions without a verdict: no advantage, no weight in their group, counted, written down, and not too many."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object

from grpo_recipes.rewards.answers import completion_text
from grpo_recipes.rewards.score import GIVEN_UP
from grpo_recipes.rewards.wrapper import RewardWrapper
from grpo_recipes.secrets import masked

_SLOW_SHARE = 0.5  # of the limit
_SLOWEST, _MOST_ROWS = 3, 20  # written for one generation
_LONGEST_TEXT = 500  # characters


class TooManyWithoutVerdict(RuntimeError):
    """A reward judged too few completions of a step for it to be worth an update."""


class Scoring:
    """Mixin before ``MetricsRows``: what TRL does not do about rewards that gave no verdict.

    TRL leaves a completion out, with advantage 0, when every reward returned None for it. So we set all rewards of a
    completion to NaN when one of them should have judged it and could not (a limit, a death, an exception, no number).
    A reward that returns None by itself says that the completion is not its task: that stays TRL's.

    Args:
        reward_max_no_verdict: share of a training generation's completions without a verdict that ends the run.
    """

    def __init__(self, *, run_dir: Path, reward_max_no_verdict: float = 0.5, **kwargs: Any):
        self._slow_rewards = run_dir / "slow_rewards.jsonl"
        self._max_no_verdict = reward_max_no_verdict
        super().__init__(run_dir=run_dir, **kwargs)

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], prompts: list[Any], completions: list[Any], completion_ids_list: list[Any]
    ) -> torch.Tensor:
        """TRL's rewards of all ranks, (B, rewards), with NaN in every column of a completion without a verdict.

        Raises:
            TooManyWithoutVerdict: on every rank, before an update is computed from this batch.
        """
        watched = [reward for reward in self.reward_funcs if isinstance(reward, RewardWrapper)]
        if not watched:
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        for reward in watched:
            reward.generation = self._step
            reward.give_up_after = self._hopeless_after(len(prompts))
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        reports = gather_object([[_report(reward, prompts, completions) for reward in watched]])
        per_reward = [_joined(list(of_ranks)) for of_ranks in zip(*reports, strict=True)]
        no_verdict = torch.tensor([any(row) for row in zip(*[one["missing"] for one in per_reward], strict=True)])
        rewards[no_verdict.to(rewards.device)] = math.nan
        self._log_verdicts(per_reward, rewards)
        if self.model.training:
            self._check_share(per_reward, no_verdict)
        return rewards

    def _hopeless_after(self, rows: int) -> int | None:
        """Completions of one reward without a verdict on this rank that are too many, whatever the other ranks say."""
        return _most(self._max_no_verdict, rows * self.accelerator.num_processes) if self.model.training else None

    def _log_verdicts(self, per_reward: list[dict[str, Any]], rewards: torch.Tensor) -> None:
        metrics = self._metrics["train" if self.model.training else "eval"]
        for one in per_reward:
            name = one["name"]
            metrics[f"rewards/{name}/no_verdict"].append(sum(one["missing"]) / len(one["missing"]))
            metrics[f"rewards/{name}/seconds_max"].append(one["seconds_max"])
        metrics["rewards/no_verdict"].append(rewards.isnan().all(dim=1).float().mean().item())
        if self.accelerator.is_main_process:
            self._write_slow([row for one in per_reward for row in one["rows"]])

    def _write_slow(self, rows: list[dict[str, Any]]) -> None:
        """Add the completions without a verdict, and the slowest others, to ``slow_rewards.jsonl``."""
        missing = [row for row in rows if row["reason"] is not None]
        slow = sorted((row for row in rows if row["reason"] is None), key=lambda row: -row["seconds"])[:_SLOWEST]
        chosen = [*slow, *missing][:_MOST_ROWS]
        if not chosen:
            return
        when = {"step": self.state.global_step + int(self.model.training), "training": self.model.training}
        with self._slow_rewards.open("a") as file:
            file.write("".join(json.dumps({**when, **row}) + "\n" for row in chosen))

    def _check_share(self, per_reward: list[dict[str, Any]], no_verdict: torch.Tensor) -> None:
        count, rows = int(no_verdict.sum()), len(no_verdict)
        if count <= _most(self._max_no_verdict, rows):
            return
        worst = max(per_reward, key=lambda one: sum(one["missing"]))
        reason, of_reason = _usual(worst["reasons"])
        raise TooManyWithoutVerdict(
            f"{count / rows:.0%} of the completions of step {self.state.global_step + 1} have no verdict, more than "
            f"reward_max_no_verdict: {self._max_no_verdict}. Reward '{worst['spec']}' gave none for "
            f"{sum(worst['missing'])} of {rows}; most often: {masked(reason)} ({of_reason}). "
            f"See {self._slow_rewards.name} in the run directory"
        )


def _report(reward: RewardWrapper, prompts: list[Any], completions: list[Any]) -> dict[str, Any]:
    """What one rank tells of one reward: who has no verdict, why, and the slowest calls."""
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
    """One reward's reports of all ranks, in their order, as one."""
    return {
        **of_ranks[0],
        "missing": [flag for one in of_ranks for flag in one["missing"]],
        "reasons": sum((one["reasons"] for one in of_ranks), Counter()),
        "seconds_max": max(one["seconds_max"] for one in of_ranks),
        "rows": [row for one in of_ranks for row in one["rows"]],
    }


def _most(share: float, rows: int) -> int:
    """The most rows that are no larger a share; 0.29 of 100 is 29, not 28."""
    return math.floor(share * rows + 1e-9)


def _usual(reasons: Counter[str]) -> tuple[str, int]:
    """The reason of the most common kind, and how often the kind came; messages of one exception may all differ."""
    kinds: Counter[str] = Counter()
    for reason, count in reasons.items():
        kinds[reason.partition(":")[0]] += count
    ((kind, count),) = kinds.most_common(1)
    return next(reason for reason, _ in reasons.most_common() if reason.partition(":")[0] == kind), count


def _short(text: Any) -> str:
    return masked(completion_text(text))[:_LONGEST_TEXT]
