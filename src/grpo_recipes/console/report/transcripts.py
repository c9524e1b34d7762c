"""A sampled episode as the page shows it: who said what, what each action was worth, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_recipes.console.report.page import short
from grpo_recipes.process.reports import plural
from grpo_recipes.runs.health import finite_number

POLICY = "policy"
_OF_THE_SEAT = ("role", "phase")  # what an environment says of who is to move, so of the next action
_SHOWN, _MOST = 4, 12  # messages before and after those that are folded, where there are more than ``_MOST``
Facts = list[tuple[str, Any]]  # names and values, texts of the environment among them


@dataclass(frozen=True)
class Said:
    """A message of the environment, or a turn of the policy with what it was worth."""

    speaker: str  # ``POLICY``, or the role of the message
    text: Any
    seat: str = ""  # role and phase in which the policy acts
    facts: Facts | tuple[()] = ()


@dataclass(frozen=True)
class Transcript:
    """An episode from its first observation to its end."""

    environment: str
    seed: Any
    begun: list[Said]  # the first observation, the same for the whole group
    said: list[Said]
    facts: Facts  # of the whole
    trouble: str  # why it did not come to its end; empty where it did

    @property
    def parts(self) -> list[tuple[bool, list[Said]]]:
        """The messages in one to three parts; the middle of a long episode is to be folded (True)."""
        if len(self.said) <= _MOST:
            return [(False, self.said)]
        middle = self.said[_SHOWN:-_SHOWN]
        return [(False, self.said[:_SHOWN]), (True, middle), (False, self.said[-_SHOWN:])]


def transcript_of(sample: Mapping[str, Any]) -> Transcript | None:
    """Return the episode of a row's sample, None where it has none; what does not fit is left out."""
    episode = sample.get("episode")
    if not isinstance(episode, dict):
        return None
    turns, said = _mappings(episode.get("turns")), list[Said]()
    seat = _seat(_mapping(episode.get("info")))
    infos = [_mapping(turn.get("info")) for turn in turns]
    for turn, given in zip(turns, infos, strict=True):
        worth: Facts = [(name, _shown(turn[name])) for name in ("reward", "advantage") if name in turn]
        worth += [(name, _shown(one)) for name, one in given.items() if name not in _OF_THE_SEAT]
        said += [Said(POLICY, turn.get("action"), seat, worth), *_messages(turn.get("messages"))]
        seat = _seat(given) or seat
    over = not turns and "reward" in episode  # before the policy's first turn
    last = infos[-1] if infos else _mapping(episode.get("info")) if over else {}
    facts: Facts = [("length", plural(len(turns), "turn"))]
    facts += [("reward", _shown(episode["reward"]))] if over else []
    if "won" in last:
        won = finite_number(last["won"])
        facts.append(("won", "yes" if won == 1 else "no" if won == 0 else _shown(last["won"])))
    if over:
        facts += [(name, _shown(one)) for name, one in last.items() if name not in (*_OF_THE_SEAT, "won")]
    trouble = f"failed: {episode['failed']}" if episode.get("failed") else ""
    if limit := episode.get("unfinished"):
        trouble = f"unfinished: no more room within {limit}"
    begun = _messages(episode.get("messages"))
    return Transcript(str(episode.get("environment")), episode.get("seed"), begun, said, facts, trouble)


def _seat(info: Mapping[str, Any]) -> str:
    return ", ".join(str(info[name]) for name in _OF_THE_SEAT if info.get(name) is not None)


def _shown(value: Any) -> Any:
    known = finite_number(value)
    return value if known is None else short(known)


def _messages(given: Any) -> list[Said]:
    return [Said(str(one.get("role")), one.get("content")) for one in _mappings(given)]


def _mapping(given: Any) -> Mapping[str, Any]:
    return given if isinstance(given, dict) else {}


def _mappings(given: Any) -> list[Mapping[str, Any]]:
    return [one for one in given if isinstance(one, dict)] if isinstance(given, list) else []
