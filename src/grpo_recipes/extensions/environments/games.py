"""Games of the library ``textarena``: the policy plays one seat, opponents the others.

``environment_args``: ``num_players``, ``player`` (the policy's seat, "seed": chosen by the seed, or in SecretMafia the
role it is dealt), ``opponents`` ("random", in SecretMafia also "crowd", or a model: "policy" or "base"),
``legal_reward``, ``illegal_reward`` and, in SecretMafia, ``useful_reward`` and ``observation`` ("whole" or "brief").
The game receives all others.
"""

import copy
import json
import random
import re
from collections.abc import Mapping
from typing import Any

from grpo_recipes.errors import config_error
from grpo_recipes.extensions.environments import secret_mafia
from grpo_recipes.numbers import reward_problem
from grpo_recipes.rollouts.turns import BASE, POLICY, SCRIPTED, Environment, Noise, Turn, derive_seed, restoring_noise

_BRACKETED = re.compile(r"\[[^\[\]\n]{1,60}\]")
_SPEAKER = re.compile(r"\[(GAME|Player \d+)\]")
_MOST_OPPONENT_TURNS = 500  # between two turns of the policy
_TRIES = 40  # moves that a scripted opponent considers


class Game(Environment):
    """One episode at a time of ``textarena.make(name, **args)``; the reward of the end is the game's own."""

    def __init__(self, name: str, args: Mapping[str, Any]):
        import textarena

        given = dict(args)
        self._players = given.pop("num_players", None)
        self._player = given.pop("player", 0)
        self._worth = {kind: given.pop(f"{kind}_reward", 0.0) for kind in ("legal", "illegal", "useful")}
        for kind, worth in self._worth.items():
            if type(worth) not in (int, float) or reward_problem(worth):
                raise _wrong(f"{kind}_reward: {worth!r} is no reward", "write a number")
        self._mafia = name.startswith("SecretMafia")
        self._opponents = given.pop("opponents", SCRIPTED[0])
        scripted = SCRIPTED if self._mafia else SCRIPTED[:1]
        if self._opponents not in (*scripted, POLICY, BASE):
            known = ", ".join(f'"{name}"' for name in (*scripted, POLICY))
            raise _wrong(f"opponents: {self._opponents!r} is not supported", f'write {known} or "{BASE}"')
        self._model = "" if self._opponents in scripted else str(self._opponents)
        if self._players is not None and (type(self._players) is not int or self._players < 1):
            raise _wrong(f"num_players: {self._players!r} is not a number of players", "write 1 or more")
        self._observation = given.pop("observation", "whole")
        drawn = ("seed", *(secret_mafia.ROLES if self._mafia else ()))
        if self._player not in drawn and (type(self._player) is not int or self._player < 0):
            fix = f"write a number from 0, or {' or '.join(map(json.dumps, drawn))}"
            raise _wrong(f"player: {self._player!r} is no seat", fix)
        if self._observation not in (("whole", "brief") if self._mafia else ("whole",)):
            what = f"observation: {self._observation!r} is not for this game"
            raise _wrong(what, 'write "whole" or "brief"' if self._mafia else "remove it: it belongs to SecretMafia")
        self._make = lambda: textarena.make(name, **given)
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
        if self._players == 1 and self._model:
            raise _wrong(f"opponents: '{name}' has none", "remove it")
        if type(self._player) is int and self._player >= self._players:
            raise _wrong(f"player: {self._player} of {self._players}", f"write 0 to {self._players - 1}")

    def reset(self, seed: int) -> Turn:
        """Deal a game, and let the others play until it is the policy's turn."""
        self._random = random.Random(derive_seed("opponents", seed))
        self._noise.seed("game", seed)
        self._turns, self._told, self._others = 0, "", 0
        self._heard: dict[int, list[Any]] = {seat: [] for seat in range(self._players)}
        self._read = dict.fromkeys(self._heard, 0)  # how much of it the policy, or a model, was shown
        with self._noise.running():
            self._env = self._make()
            self._env.reset(num_players=self._players, seed=derive_seed("game", seed))
            self._seat = self._dealt(derive_seed("seat", seed))
            return self._until_policy(0.0, {}, False)

    def _dealt(self, number: int) -> int:
        """Return the policy's seat; the number decides where there are several."""
        if type(self._player) is int:
            return self._player
        seats = list(range(self._players))
        if self._player != "seed":  # a role
            seats = [one for one in seats if self._state.game_state["player_roles"][one] == self._player]
        return seats[number % len(seats)]

    def scripted(self, generator: random.Random, plan: bool = True) -> str:
        """Return a scripted move for the policy's turn in SecretMafia; without a plan it names any other player."""
        game, heard = self._state.game_state, self._heard[self._seat]
        sides = secret_mafia.known(game, self._seat, heard) if plan else {}
        return secret_mafia.scripted(game, self._seat, sides, generator)

    def step(self, action: str) -> Turn:
        """Play a move and those of scripted opponents after it; one that is not valid is answered with the reason."""
        if self._state.current_player_id != self._seat:
            return self._opponent_said(action)
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
            self._others = 0
            return self._until_policy(reward, info, done)

    def _opponent_said(self, action: str) -> Turn:
        """Play what a model wrote for its seat, or a drawn move where the game does not take that."""
        seat = self._state.current_player_id
        with self._noise.running():
            legal = self._takes(action, seat)
            done, _ = self._play(self._env, action if legal else self._drawn(seat))
            return self._until_policy(0.0, {"opponent_legal": float(legal)}, done)

    @property
    def _state(self) -> Any:
        return self._env.state

    def _until_policy(self, reward: float, info: dict[str, float | str], done: bool) -> Turn:
        """Let the opponents play until the turn of the policy, or of a model that plays one of them, or the end."""
        while not (done or self._state.done):
            seat = self._state.current_player_id
            self._heard[seat] += self._state.get_current_player_observation()
            if seat == self._seat:
                return Turn([{"role": "user", "content": self._news(seat)}], reward, False, info | self._named())
            self._others += 1
            if self._others > _MOST_OPPONENT_TURNS:
                raise RuntimeError(f"the others took {_MOST_OPPONENT_TURNS} turns, and it was never the policy's")
            if self._model:
                news = [{"role": "user", "content": self._news(seat)}]
                return Turn(news, reward, False, info, opponent=self._model, seat=seat)
            done, _ = self._play(self._env, self._drawn(seat))
        return self._end(reward, info)

    def _news(self, seat: int) -> str:
        """Return what came since the seat's last turn, in the library's form and without its own words, or in brief."""
        told = [self._told] if self._told and seat == self._seat else []
        if self._observation == "brief":
            return "\n".join([*told, secret_mafia.brief(self._state.game_state, seat, self._heard[seat])])
        new = [one for one in self._heard[seat][self._read[seat] :] if one[0] != seat]
        self._read[seat] = len(self._heard[seat])
        lines = [f"[{'GAME' if sender == -1 else f'Player {sender}'}] {text}" for sender, text, _ in new]
        return "\n".join([*lines, *told])

    def _named(self) -> dict[str, float | str]:
        phase = (self._state.game_state or {}).get("phase")
        role = self._state.game_info[self._seat].get("role") or f"Player {self._seat}"
        named: dict[str, float | str] = {"role": str(role)}
        return named | ({"phase": str(getattr(phase, "value", phase))} if phase is not None else {})

    def _end(self, reward: float, info: dict[str, float | str]) -> Turn:
        rewards, game_info = self._env.close()
        own = float((rewards or {}).get(self._seat, 0.0))
        best = max((float(one) for one in (rewards or {0: 0.0}).values()), default=0.0)
        won = own > 0 and own >= (best if self._players > 1 else 1.0)
        why = game_info[self._seat].get("reason")
        info = info | self._named() | {"won": float(won), "turns": float(self._turns), "end": str(why)}
        if self._mafia:
            info[f"won_{info['role']}".lower()] = float(won)
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

    def _drawn(self, seat: int) -> str:
        """Return a move drawn among those that the game takes."""
        if self._mafia:
            said = secret_mafia.said_today(self._heard[seat]) if self._opponents == "crowd" else []
            return secret_mafia.drawn(self._state.game_state, seat, self._random, said)
        moves = self._candidates(seat)
        return next((move for move in moves[:_TRIES] if self._takes(move, seat)), moves[0])

    def _takes(self, move: str, seat: int) -> bool:
        """Return whether the move is valid, tried on a copy of the game."""
        if self._mafia:
            return not secret_mafia.problem_with(move, self._state.game_state, seat)
        with restoring_noise():
            return not self._play(copy.deepcopy(self._env), move)[1]

    def _candidates(self, seat: int) -> list[str]:
        """Return the moves that texts name in brackets, newest text first, then numbers; each in drawn order."""
        found: list[str] = []
        for _, text, _ in reversed(self._heard[seat]):
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
