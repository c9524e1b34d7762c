"""The grammar of TextArena's SecretMafia: which actions each phase takes, why not, and which help one's own side.

By day and night an action names exactly one target as ``[3]`` or ``[Player 3]``; in a discussion it is any text.
"""

import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_TARGET = re.compile(r"\[\s*(?:player\s*)?(\d+)\s*\]", re.IGNORECASE)
_FOUND = re.compile(r"Player (\d+) IS( NOT)? a Mafia member")
ROLES = ("Detective", "Doctor", "Mafia", "Villager")
_TALK = (
    "I have nothing to report.",
    "Let us vote together today.",
    "I am with the village.",
    "Who was quiet yesterday?",
)


def targets(game: Mapping[str, Any], seat: int) -> list[int]:
    """Return whom ``seat`` may name in this phase, as the game's observation lists them; nobody in a discussion."""
    phase, alive, roles = game["phase"].value, game["alive_players"], game["player_roles"]
    if phase == "Day-Discussion":
        return []
    if phase == "Night-Mafia":
        return [one for one in alive if roles[one] != "Mafia"]
    if phase == "Day-Voting":  # the game lists the voter too
        return list(alive)
    return [one for one in alive if one != seat]  # the game would take the seat itself, which it does not list


def problem_with(action: str, game: Mapping[str, Any], seat: int) -> str:
    """Return why the action is not valid in this phase, empty if it is."""
    phase, allowed = game["phase"].value, targets(game, seat)
    if phase == "Day-Discussion":
        return "" if action.strip() else "say something in the discussion"
    named = [int(one) for one in _TARGET.findall(action)]
    valid = ", ".join(f"[{one}]" for one in allowed)
    if len(named) != 1:
        return f"{phase} takes one target in brackets, not {len(named)}; valid: {valid}"
    return "" if named[0] in allowed else f"[{named[0]}] is no target in {phase}; valid: {valid}"


def useful(action: str, game: Mapping[str, Any], seat: int) -> bool:
    """Return whether a valid action helps the seat's side, seen with all roles.

    Votes of the village against the mafia, of the mafia against the village, and talk that names one such player;
    nights that kill or save a player, or find a member of the mafia.
    """
    phase, roles = game["phase"].value, game["player_roles"]
    named = [int(one) for one in _TARGET.findall(action)]
    if len(named) != 1 or named[0] not in game["alive_players"]:  # of talk; other valid actions name one
        return False
    if phase == "Night-Doctor":
        return bool(named[0] == game["pending_elimination"])
    return bool((roles[named[0]] == "Mafia") != (roles[seat] == "Mafia"))


def said_today(observations: Iterable[Sequence[Any]]) -> list[str]:
    """Return what players said since day broke, from a seat's (sender, text, kind)."""
    said: list[str] = []
    for sender, text, _ in observations:
        said = [] if sender == -1 and text.startswith("Day breaks") else said + [text] * (sender != -1)
    return said


def known(game: Mapping[str, Any], seat: int, heard: Iterable[Sequence[Any]]) -> dict[int, bool]:
    """Return of whom the seat knows whether they are of the Mafia: its own team, or those it has investigated.

    ``heard`` are all the (sender, text, kind) that the seat was sent.
    """
    roles = game["player_roles"]
    if roles[seat] == "Mafia":
        return {one: role == "Mafia" for one, role in roles.items()}
    return {int(one): not no for who, text, _ in heard if who == -1 for one, no in _FOUND.findall(text)}


def brief(game: Mapping[str, Any], seat: int, heard: Sequence[Sequence[Any]]) -> str:
    """Return what the seat knows in one line: phase, role, living players by side, whom others named, valid targets."""
    alive, phase, sides = game["alive_players"], game["phase"].value, known(game, seat, heard)
    others = said_today(one for one in heard if one[0] != seat) if phase.startswith("Day") else []
    named = {int(one) for text in others for one in _TARGET.findall(text)}
    lists = {
        "Mafia": [one for one in alive if sides.get(one) is True],
        "Not Mafia": [one for one in alive if sides.get(one) is False],
        "Named today": [one for one in alive if one in named],
        "Valid": [f"[{one}]" for one in targets(game, seat)],
    }
    lists |= {} if lists["Valid"] else {"Alive": alive}
    told = [f"{name}: {' '.join(map(str, players))}" for name, players in lists.items() if players]
    return ". ".join([f"{phase}. You are Player {seat}, {game['player_roles'][seat]}", *told])


def scripted(game: Mapping[str, Any], seat: int, sides: Mapping[int, bool], generator: random.Random) -> str:
    """Return the move of a player with a plan, to whom the players in ``sides`` are known to be of the Mafia or not.

    By day, and as the Mafia by night, it names an opponent that it knows; else a player of whom it knows nothing.
    """
    enemy, night = game["player_roles"][seat] != "Mafia", game["phase"].value == "Night-Detective"
    others = [one for one in targets(game, seat) or game["alive_players"] if one != seat]
    found = [one for one in others if sides.get(one) is enemy and not night]
    return f"[{generator.choice(found or [one for one in others if one not in sides] or others)}]"


def drawn(game: Mapping[str, Any], seat: int, generator: random.Random, said: Sequence[str] = ()) -> str:
    """Return a valid action of a scripted player: a vote is for whom most of what was ``said`` names, if anybody."""
    allowed = [one for one in targets(game, seat) if one != seat]
    if allowed and game["phase"].value == "Day-Voting":
        named = Counter(int(one) for text in said for one in set(_TARGET.findall(text)))
        most = max(named[one] for one in allowed)
        allowed = [one for one in allowed if named[one] == most]
    return f"[{generator.choice(allowed)}]" if allowed else generator.choice(_TALK)
