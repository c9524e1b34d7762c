"""A sampled episode for the page: its messages, the reward of each action, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_recipes.console.report.page import format_number
from grpo_recipes.process.reports import plural
from grpo_recipes.runs.health import finite_number

POLICY = "policy"
_SEAT_INFO = ("role", "phase")  # info about the seat to move, so it belongs to the next action
_VISIBLE, _MAX_UNFOLDED = 4, 12  # an episode of more than 12 messages shows 4 before and after a folded part
Facts = list[tuple[str, Any]]  # (name, value); a value may be a text of the environment


@dataclass(frozen=True)
class TranscriptMessage:
    """A message of the environment, or an action of the policy with its reward."""

    speaker: str  # ``POLICY``, or the role of the message
    text: Any
    seat: str = ""  # the policy's role and phase in this turn
    facts: Facts | tuple[()] = ()  # reward, advantage and info of an action
    advantage: float | None = None  # of the tokens of an action, if the turns of the episode have different advantages


@dataclass(frozen=True)
class Transcript:
    """An episode from its first observation to its end."""

    environment: str
    seed: Any
    opening: list[TranscriptMessage]  # the first observation, equal in the whole group
    messages: list[TranscriptMessage]
    facts: Facts  # facts of the whole episode
    problem: str  # why it did not end normally, or ""

    @property
    def parts(self) -> list[tuple[bool, list[TranscriptMessage]]]:
        """One to three parts as (folded, messages): the page folds the middle of a long episode."""
        if len(self.messages) <= _MAX_UNFOLDED:
            return [(False, self.messages)]
        middle = self.messages[_VISIBLE:-_VISIBLE]
        return [(False, self.messages[:_VISIBLE]), (True, middle), (False, self.messages[-_VISIBLE:])]


def read_transcript(sample: Mapping[str, Any]) -> Transcript | None:
    """Convert a sample of ``samples.jsonl`` to a transcript, or return None if it has no episode.

    Values of a wrong type are omitted.
    """
    episode = sample.get("episode")
    if not isinstance(episode, dict):
        return None
    turns, messages = _select_mappings(episode.get("turns")), list[TranscriptMessage]()
    seat = _format_seat(_as_mapping(episode.get("info")))
    infos = [_as_mapping(turn.get("info")) for turn in turns]
    for turn, info in zip(turns, infos, strict=True):
        action_facts: Facts = [(name, _format_value(turn[name])) for name in ("reward", "advantage") if name in turn]
        action_facts += [(name, _format_value(value)) for name, value in info.items() if name not in _SEAT_INFO]
        action = TranscriptMessage(POLICY, turn.get("action"), seat, action_facts, finite_number(turn.get("advantage")))
        messages += [action, *_read_messages(turn.get("messages"))]
        seat = _format_seat(info) or seat
    ended_at_once = not turns and "reward" in episode  # before the policy's first turn
    last_info = infos[-1] if infos else _as_mapping(episode.get("info")) if ended_at_once else {}
    facts: Facts = [("length", plural(len(turns), "turn"))]
    facts += [("reward", _format_value(episode["reward"]))] if ended_at_once else []
    if "won" in last_info:
        won = finite_number(last_info["won"])
        facts.append(("won", "yes" if won == 1 else "no" if won == 0 else _format_value(last_info["won"])))
    if ended_at_once:
        facts += [(name, _format_value(value)) for name, value in last_info.items() if name not in (*_SEAT_INFO, "won")]
    problem = f"failed: {episode['failed']}" if episode.get("failed") else ""
    if limit := episode.get("unfinished"):
        problem = f"unfinished: reached the limit {limit}"
    opening = _read_messages(episode.get("messages"))
    return Transcript(str(episode.get("environment")), episode.get("seed"), opening, messages, facts, problem)


def _format_seat(info: Mapping[str, Any]) -> str:
    """Return "ROLE, PHASE" from an environment's info about a turn; "" if it has neither."""
    return ", ".join(str(info[name]) for name in _SEAT_INFO if info.get(name) is not None)


def _format_value(value: Any) -> Any:
    """Return a finite number as a short text, and any other value unchanged."""
    finite = finite_number(value)
    return value if finite is None else format_number(finite)


def _read_messages(value: Any) -> list[TranscriptMessage]:
    """Convert a JSON list of chat messages; skip entries that are not mappings, and return [] for any other value."""
    return [TranscriptMessage(str(message.get("role")), message.get("content")) for message in _select_mappings(value)]


def _as_mapping(value: Any) -> Mapping[str, Any]:
    """Return a JSON value if it is a mapping, otherwise an empty mapping."""
    return value if isinstance(value, dict) else {}


def _select_mappings(value: Any) -> list[Mapping[str, Any]]:
    """Return the entries of a JSON list that are mappings; [] if the value is not a list."""
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
