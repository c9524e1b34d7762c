"""The rules of TextArena's SecretMafia: valid actions per phase, actions that help a side, and scripted players.

A day or night action contains exactly one target as ``[3]`` or ``[Player 3]``. In a discussion it is any text.
"""

import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_TARGET = re.compile(r"\[\s*(?:player\s*)?(\d+)\s*\]", re.IGNORECASE)
_INVESTIGATED = re.compile(r"Player (\d+) IS( NOT)? a Mafia member")
ROLES = ("Detective", "Doctor", "Mafia", "Villager")
_TALK = (
    "I have nothing to report.",
    "Let us vote together today.",
    "I am with the village.",
    "Who was quiet yesterday?",
)


def list_valid_targets(game: Mapping[str, Any], seat: int) -> list[int]:
    """Return the players that ``seat`` may target in this phase, as its observation lists them; [] in a discussion.

    They are living players: in a vote all, for the Mafia at night those outside of it, and for other roles all others.
    """
    phase, alive, roles = game["phase"].value, game["alive_players"], game["player_roles"]
    if phase == "Day-Discussion":
        return []
    if phase == "Night-Mafia":
        return [player for player in alive if roles[player] != "Mafia"]
    if phase == "Day-Voting":  # the game lists the voter too
        return list(alive)
    return [player for player in alive if player != seat]  # the game accepts the seat itself, but does not list it


def find_action_problem(action: str, game: Mapping[str, Any], seat: int) -> str:
    """Return why the action of a seat is not valid in this phase of the game, or "" if it is valid."""
    phase, valid = game["phase"].value, list_valid_targets(game, seat)
    if phase == "Day-Discussion":
        return "" if action.strip() else "say something in the discussion"
    targets = _parse_targets(action)
    choices = ", ".join(f"[{player}]" for player in valid)
    if len(targets) != 1:
        return f"{phase} takes one target in brackets, not {len(targets)}; valid: {choices}"
    return "" if targets[0] in valid else f"[{targets[0]}] is no target in {phase}; valid: {choices}"


def is_useful(action: str, game: Mapping[str, Any], seat: int) -> bool:
    """Return whether a valid action helps the seat's side, judged with all roles known.

    Useful are votes and talk against one player of the other side, and night actions that kill or save a player or
    find a member of the Mafia.
    """
    phase, roles = game["phase"].value, game["player_roles"]
    targets = _parse_targets(action)
    if len(targets) != 1 or targets[0] not in game["alive_players"]:  # only talk; other valid actions have one target
        return False
    if phase == "Night-Doctor":
        return bool(targets[0] == game["pending_elimination"])
    return bool((roles[targets[0]] == "Mafia") != (roles[seat] == "Mafia"))


def list_messages_today(observations: Iterable[Sequence[Any]]) -> list[str]:
    """Return the players' messages since the last daybreak.

    ``observations`` are (sender, text, kind) that a seat received; the sender of the game's messages is -1.
    """
    messages: list[str] = []
    for sender, text, _ in observations:
        new_day = sender == -1 and text.startswith("Day breaks")
        messages = [] if new_day else messages + [text] * (sender != -1)
    return messages


def find_known_sides(game: Mapping[str, Any], seat: int, observations: Iterable[Sequence[Any]]) -> dict[int, bool]:
    """Return the sides that a seat knows: a mapping from player to whether the player is a member of the Mafia.

    A member of the Mafia knows all sides. Other seats know the results of investigations that the game has sent them,
    but their own side is not in the mapping. ``observations`` are the seat's messages: (sender, text, kind), with
    sender -1 for the game.
    """
    roles = game["player_roles"]
    if roles[seat] == "Mafia":
        return {player: role == "Mafia" for player, role in roles.items()}
    reports = [text for sender, text, _ in observations if sender == -1]
    return {int(player): not negation for text in reports for player, negation in _INVESTIGATED.findall(text)}


def format_brief_observation(game: Mapping[str, Any], seat: int, observations: Sequence[Sequence[Any]]) -> str:
    """Return the seat's knowledge in one line: phase, role, living players by side, players named today, targets.

    Names count only by day and in messages of other players. Without valid targets, the line lists the living players.
    """
    alive, phase, sides = game["alive_players"], game["phase"].value, find_known_sides(game, seat, observations)
    by_others = [observation for observation in observations if observation[0] != seat]
    messages = list_messages_today(by_others) if phase.startswith("Day") else []
    mentioned = {player for text in messages for player in _parse_targets(text)}
    lists = {
        "Mafia": [player for player in alive if sides.get(player) is True],
        "Not Mafia": [player for player in alive if sides.get(player) is False],
        "Named today": [player for player in alive if player in mentioned],
        "Valid": [f"[{player}]" for player in list_valid_targets(game, seat)],
    }
    lists |= {} if lists["Valid"] else {"Alive": alive}
    parts = [f"{name}: {' '.join(map(str, players))}" for name, players in lists.items() if players]
    return ". ".join([f"{phase}. You are Player {seat}, {game['player_roles'][seat]}", *parts])


def choose_planned_action(
    game: Mapping[str, Any], seat: int, sides: Mapping[int, bool], generator: random.Random
) -> str:
    """Choose a target for a seat that knows whether the players in ``sides`` are of the Mafia; return e.g. "[3]".

    It is a known opponent if there is one, else a player of unknown side, else any other player. A detective at night
    prefers players of unknown side.
    """
    opponents_are_mafia = game["player_roles"][seat] != "Mafia"
    investigates = game["phase"].value == "Night-Detective"
    candidates = [player for player in list_valid_targets(game, seat) or game["alive_players"] if player != seat]
    opponents = [player for player in candidates if sides.get(player) is opponents_are_mafia and not investigates]
    return f"[{generator.choice(opponents or [player for player in candidates if player not in sides] or candidates)}]"


def choose_random_action(
    game: Mapping[str, Any], seat: int, generator: random.Random, messages: Sequence[str] = ()
) -> str:
    """Return a random valid action: another player's number in brackets, or a fixed sentence in a discussion.

    A vote goes to a player with a number that appears in brackets in the most ``messages``.
    """
    targets = [player for player in list_valid_targets(game, seat) if player != seat]
    if targets and game["phase"].value == "Day-Voting":
        mentions = Counter(player for text in messages for player in set(_parse_targets(text)))
        most = max(mentions[player] for player in targets)
        targets = [player for player in targets if mentions[player] == most]
    return f"[{generator.choice(targets)}]" if targets else generator.choice(_TALK)


def _parse_targets(text: str) -> list[int]:
    """Return the numbers of the players in brackets in a text, e.g. 3 for "[Player 3]"."""
    return [int(player) for player in _TARGET.findall(text)]
