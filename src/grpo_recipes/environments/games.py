"""Games of the library ``textarena``: the policy plays one seat, scripted opponents the others.

``environment_args``: ``num_players``, ``player`` (the policy's seat, or "seed": chosen by the seed), ``opponents``
("random"), ``legal_reward``, ``illegal_reward`` and, in SecretMafia, ``useful_reward``; the rest goes to the game.
"""

import copy
import random
import re
from collections.abc import Mapping
from typing import Any

from grpo_recipes.environments import secret_mafia
from grpo_recipes.environments.turns import Noise, Turn, derived, kept
from grpo_recipes.errors import config_error

_BRACKETED = re.compile(r"\[[^\[\]\n]{1,60}\]")
_SPEAKER = re.compile(r"\[(GAME|Player \d+)\]")
_MOST_OPPONENT_TURNS = 2000  # between two turns of the policy
_TRIES = 40  # moves that a scripted opponent considers


class Game:
    """One episode at a time of ``textarena.make(name, **args)``; the reward of the end is the game's own."""

    def __init__(self, name: str, args: Mapping[str, Any]):
        import textarena

        given = dict(args)
        self._players = given.pop("num_players", None)
        self._player = given.pop("player", 0)
        self._worth = {kind: float(given.pop(f"{kind}_reward", 0.0)) for kind in ("legal", "illegal", "useful")}
        opponents = given.pop("opponents", "random")
        if opponents != "random":
            raise _wrong(f"opponents: {opponents!r} is unknown", 'write opponents: "random"')
        if self._player != "seed" and (type(self._player) is not int or self._player < 0):
            raise _wrong(f"player: {self._player!r} is no seat", 'write a number from 0, or "seed"')
        self._make = lambda: textarena.make(name, **given)
        self._mafia = name.startswith("SecretMafia")
        if self._worth["useful"] and not self._mafia:
            raise _wrong("useful_reward belongs to SecretMafia", "remove it")
        self._noise = Noise()
        self.tools: list[dict[str, Any]] = []
        self._check(name, given)

    def _check(self, name: str, given: Mapping[str, Any]) -> None:
        try:
            env = self._make()
        except TypeError as error:
            raise _wrong(
                f"'{name}' does not take {sorted(given)} ({error})", "write the game's own arguments"
            ) from error
        except Exception as error:  # of Python 3.12, missing data, a judge's key that is not there
            raise _broken(name, error) from error
        self._noise.seed("check")
        why: Exception | None = None
        # Games do not say how many play; they refuse the wrong numbers, by assertions or while they deal.
        for players in [self._players] if self._players else range(1, 16):
            try:
                with self._noise.running():
                    env.reset(num_players=players, seed=0)
                self._players = players
                break
            except (AssertionError, ValueError, IndexError, KeyError) as error:
                why = error
            except Exception as error:
                raise _broken(name, error) from error
        else:
            what = f"num_players: '{name}' is not for {self._players or 'any number up to 15'} ({why})"
            raise _wrong(what, "correct it") from why
        if self._player != "seed" and self._player >= self._players:
            raise _wrong(f"player: {self._player} of {self._players}", f"write 0 to {self._players - 1}")

    def reset(self, seed: int) -> Turn:
        self._random = random.Random(derived("opponents", seed))
        self._seat = derived("seat", seed) % self._players if self._player == "seed" else self._player
        self._noise.seed("game", seed)
        self._turns, self._told = 0, ""
        self._unread: dict[int, list[Any]] = {seat: [] for seat in range(self._players)}
        with self._noise.running():
            self._env = self._make()
            self._env.reset(num_players=self._players, seed=derived("game", seed))
            return self._until_policy(0.0, {}, False)

    def step(self, action: str) -> Turn:
        state, why, useful = self._state, "", False
        if self._mafia:
            why = secret_mafia.problem_with(action, state.game_state, self._seat)
            useful = not why and secret_mafia.useful(action, state.game_state, self._seat)
        with self._noise.running():
            # A refused action reaches the game as an empty one, so that its own rule of repeated errors holds.
            done, refused = self._play(self._env, "" if why else action)
            why = why or refused
            self._turns += 1
            self._told = f"Your action was not valid: {why}" if why and self._mafia else ""
            reward = self._worth["illegal"] if why else self._worth["legal"] + useful * self._worth["useful"]
            info: dict[str, float | str] = {"legal": float(not why)} | ({"illegal": why} if why else {})
            if self._mafia:
                info["useful"] = float(useful)
            return self._until_policy(reward, info, done)

    @property
    def _state(self) -> Any:
        return self._env.state

    def _until_policy(self, reward: float, info: dict[str, float | str], done: bool) -> Turn:
        """Let the opponents play until the policy's turn or the end."""
        for _ in range(_MOST_OPPONENT_TURNS):
            if done or self._state.done:
                return self._end(reward, info)
            seat = self._state.current_player_id
            self._unread[seat] += self._state.get_current_player_observation()
            if seat == self._seat:
                break
            done, _ = self._play(self._env, self._opponent(seat))
        else:
            raise RuntimeError(f"the game went on for {_MOST_OPPONENT_TURNS} turns of others without the policy's")
        return Turn([{"role": "user", "content": self._news()}], reward, False, info | self._named())

    def _news(self) -> str:
        """Return what came since the policy's last turn, in the form of the library, without its own words."""
        new = [one for one in self._unread[self._seat] if one[0] != self._seat]
        self._unread[self._seat] = []
        lines = [f"[{'GAME' if sender == -1 else f'Player {sender}'}] {text}" for sender, text, _ in new]
        return "\n".join([*lines, self._told] if self._told else lines)

    def _named(self) -> dict[str, float | str]:
        phase = (self._state.game_state or {}).get("phase")
        named: dict[str, float | str] = {"role": str(self._state.game_info[self._seat].get("role"))}
        return named | ({"phase": str(getattr(phase, "value", phase))} if phase is not None else {})

    def _end(self, reward: float, info: dict[str, float | str]) -> Turn:
        rewards, game_info = self._env.close()
        own = float((rewards or {}).get(self._seat, 0.0))
        best = max((float(one) for one in (rewards or {0: 0.0}).values()), default=0.0)
        won = own > 0 and own >= (best if self._players > 1 else 1.0)
        why = game_info[self._seat].get("reason")
        info = info | self._named() | {"won": float(won), "turns": float(self._turns), "end": str(why)}
        return Turn([], reward + own, True, info)

    def _play(self, env: Any, action: str) -> tuple[bool, str]:
        """Play the current player's action; return whether the game is over, and why the action was not valid."""
        state, seat = env.state, env.state.current_player_id
        errors, was = getattr(state, "error_count", 0), bool(state.game_info[seat].get("invalid_move"))
        seen = len(state.logs)
        wrapper: Any = _wrapper()
        while isinstance(env, wrapper):  # those of the game's name that form actions; not those that form prompts
            action = env.action(action) if hasattr(type(env), "action") and action else action
            env = env.env
        done, _ = env.step(action)
        fatal = bool(state.game_info[seat].get("invalid_move")) and not was
        if not fatal and getattr(state, "error_count", 0) <= errors:
            return bool(done), ""
        logged = [str(text) for _, text in state.logs[seen:]]  # some games log numbers
        told = [text.partition("Reason: ")[2] for text in logged if "invalid move. Reason: " in text]
        reason = told[-1].partition(" Please resubmit")[0] if told else str(state.game_info[seat].get("reason", ""))
        return bool(done), reason or "invalid move"

    def _opponent(self, seat: int) -> str:
        """Return a move drawn among those that the game takes, tried on a copy of it."""
        if self._mafia:
            return secret_mafia.drawn(self._state.game_state, seat, self._random)
        moves = self._candidates(seat)
        for move in moves[:_TRIES]:
            with kept():
                trial = copy.deepcopy(self._env)
                if not self._play(trial, move)[1]:
                    return move
        return moves[0]

    def _candidates(self, seat: int) -> list[str]:
        """Return the moves that texts name in brackets, newest text first, then numbers; each in drawn order."""
        found: list[str] = []
        for _, text, _ in reversed(self._unread[seat]):
            named = sorted({one for one in _BRACKETED.findall(text) if not _SPEAKER.fullmatch(one)} - set(found))
            found += self._random.sample(named, len(named))
        numbers = [f"[{number}]" for number in range(10) if f"[{number}]" not in found]
        return found + self._random.sample(numbers, len(numbers))


def _wrapper() -> type:
    import textarena

    return textarena.Wrapper


def _broken(name: str, error: Exception) -> Exception:
    words = " ".join(str(error).split()).strip("* ")
    what = f"textarena's '{name}' does not start here ({type(error).__name__}: {words[:120]})"
    return config_error("environment", what, "give it what it asks for, or take another game")


def _wrong(what: str, fix: str) -> Exception:
    return config_error("environment_args", what, fix)
