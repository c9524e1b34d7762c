"""Rewards in child processes judge a group as soon as its completions are there, while others are still sampled.

Rank 0, which alone receives completions, has them judged by its own children, whichever rank trains on them, and hands
the scores on when all are sampled. Each rank then scores what is left of its share. A score is used for a completion
whose arguments are those it was given for, so that nothing else follows from when it was made.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from accelerate.utils import broadcast_object_list, gather_object
from trl.data_utils import is_conversational

from grpo_recipes.rewards.load import IsolatedReward
from grpo_recipes.rewards.score import Score

Early = list[dict[str, Score]]  # of each reward, by the hash of a call's arguments


class EarlyScoring:
    """The scores of a generation that is being sampled."""

    def __init__(self, trainer: Any):
        self._trainer = trainer
        # One thread for all of a run: the children that it starts end with it.
        self._thread = ThreadPoolExecutor(1, "early-scores")
        self._rows: list[dict[str, Any]] = []

    def expect(self, rows: list[dict[str, Any]]) -> None:
        """Take the rank's rows of the generation that is sampled next."""
        self._rows = rows

    def rewards(self) -> list[IsolatedReward]:
        """Return the rewards that can begin early: of completions that TRL decodes and changes no more."""
        trainer = self._trainer
        parsed = (getattr(trainer._tokenizer, name, None) for name in ("response_template", "response_schema"))
        if trainer.source or trainer.tools or not trainer.rollouts.main_rank_alone or any(parsed):
            return []
        return [reward for reward in trainer.reward_funcs if isinstance(reward, IsolatedReward)]

    @contextmanager
    def while_sampling(self, group: int) -> Iterator[None]:
        """Score groups of so many completions as they arrive inside; called by every rank."""
        rewards, rows, self._rows = self.rewards(), self._rows, []
        if not (rewards and rows):
            yield
            return
        judged = _Generation(self._trainer, rewards, gather_object(rows), group)
        try:
            with self._trainer.rollouts.arriving(lambda place, ids: self._thread.submit(judged.take, place, ids)):
                yield
            judged.ends = True  # what waits is left to the ranks
        finally:
            judged.given_up = not judged.ends
        trainer = self._trainer
        found = [self._thread.submit(judged.result).result() if trainer.accelerator.is_main_process else None]
        share, scores = broadcast_object_list(found, from_process=0)[0]
        for reward, early in zip(rewards, scores, strict=True):
            reward.early = early
        trainer._metrics["train" if trainer.model.training else "eval"]["rewards/judged_early"].append(share)


class _Generation:
    """The rows of all ranks, and what is known of them."""

    def __init__(self, trainer: Any, rewards: list[IsolatedReward], rows: list[dict[str, Any]], group: int):
        self._trainer, self._rewards, self._rows, self._group = trainer, rewards, rows, group
        self._number, self._stop = trainer._step, trainer.preemption.stop
        self._most = trainer.scoring.most_unscored(len(rows)) if trainer.model.training else len(rows)
        self._scores: Early = [{} for _ in rewards]
        self._judged: set[int] = set()  # prompts
        self._error: Exception | None = None
        self.ends = self.given_up = False  # whether nothing new is begun; whether nobody waits for the scores

    def take(self, place: int, ids: list[list[int]]) -> None:
        """Score the completions of a prompt."""
        if self.ends or self._error or self._stopped():
            return
        try:
            columns = self._columns(self._rows[place * self._group :][: self._group], ids)
            for reward, scores in zip(self._rewards, self._scores, strict=True):
                left = self._most - sum(score.unscored for score in scores.values())
                scores |= reward.score_early(columns, self._number, left, self._stopped)
            self._judged.add(place)
        except Exception as error:
            self._error = error

    def _stopped(self) -> bool:
        return self.given_up or self._stop.cuts()

    def _columns(self, rows: list[dict[str, Any]], ids: list[list[int]]) -> dict[str, list[Any]]:
        """Return the arguments that TRL gives to rewards."""
        texts = self._trainer.processing_class.batch_decode(ids, skip_special_tokens=True)
        chat = is_conversational({"prompt": rows[0]["prompt"]})
        completions = [[{"role": "assistant", "content": text}] for text in texts] if chat else texts
        given = {name: [row[name] for row in rows] for name in rows[0] if name not in ("prompt", "completion")}
        prompts = [row["prompt"] for row in rows]
        return given | {"prompts": prompts, "completions": completions, "completion_ids": ids}

    def result(self) -> tuple[float, Early]:
        """Return the share of groups that are judged, and their scores; raise what a reward raised."""
        if self._error:
            raise self._error
        return len(self._judged) * self._group / len(self._rows), self._scores
