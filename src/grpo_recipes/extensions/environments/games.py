"""Games of the library ``textarena``: the policy plays one seat, opponents the others.

The adapter reads these ``environment_args`` and passes all others to the game: ``num_players``, ``player`` (the
policy's seat, "seed" for a seat drawn by the seed, or in SecretMafia a role), ``opponents`` ("random", in SecretMafia
also "crowd", or a model: "policy" or "base"), ``legal_reward``, ``illegal_reward`` and, in SecretMafia,
``useful_reward`` and ``observation`` ("whole" or "brief").
"""

import copy
import json
import random
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from grpo_recipes.errors import ConfigError, config_error
from grpo_recipes.extensions.environments import secret_mafia
from grpo_recipes.numbers import find_reward_problem
from grpo_recipes.rollouts.turns import BASE, POLICY, SCRIPTED, Environment, Noise, Turn, derive_seed, restoring_noise

_BRACKETED = re.compile(r"\[[^\[\]\n]{1,60}\]")
_SPEAKER = re.compile(r"\[(GAME|Player \d+)\]")
_MAX_OPPONENT_TURNS = 500  # between two turns of the policy
_TRIES = 40  # moves that a random opponent tries


class Game(Environment):
    """One episode at a time of ``textarena.make(name, **args)``; the last reward is the game's own."""

    def __init__(self, name: str, args: Mapping[str, Any]):
        """Check the arguments and start the game once; raise ConfigError if it does not accept them."""
        import textarena

        game_args = dict(args)
        self._mafia = name.startswith("SecretMafia")
        self._rewards = {kind: game_args.pop(f"{kind}_reward", 0.0) for kind in ("legal", "illegal", "useful")}
        for kind, reward in self._rewards.items():
            if type(reward) not in (int, float) or find_reward_problem(reward):
                raise _make_argument_error(f"{kind}_reward: {reward!r} is not a valid reward", "set a number")
        self._take_seats(game_args)
        self._observation = game_args.pop("observation", "whole")
        if self._observation not in (("whole", "brief") if self._mafia else ("whole",)):
            raise _make_argument_error(
                f"observation: {self._observation!r} is not for this game",
                'set "whole" or "brief"' if self._mafia else "remove it: it belongs to SecretMafia",
            )
        if self._rewards["useful"] and not self._mafia:
            raise _make_argument_error("useful_reward belongs to SecretMafia", "remove it")
        self._make: Callable[[], Any] = partial(textarena.make, name, **game_args)
        self._noise = Noise()
        self.tools: list[dict[str, Any]] = []
        self._find_player_count(name, game_args)

    def _take_seats(self, game_args: dict[str, Any]) -> None:
        """Move num_players, player (the policy's seat) and opponents from ``game_args`` to this object.

        Raise ConfigError if one of them is not valid.
        """
        self._players = game_args.pop("num_players", None)
        if self._players is not None and (type(self._players) is not int or self._players < 1):
            raise _make_argument_error(
                f"num_players: expected a number of players, got {self._players!r}", "set 1 or more"
            )
        self._player = game_args.pop("player", 0)
        drawn = ("seed", *(secret_mafia.ROLES if self._mafia else ()))
        if self._player not in drawn and (type(self._player) is not int or self._player < 0):
            fix = f"set a number from 0, or {' or '.join(map(json.dumps, drawn))}"
            raise _make_argument_error(f"player: {self._player!r} is not a seat", fix)
        self._opponents = game_args.pop("opponents", SCRIPTED[0])
        scripted = SCRIPTED if self._mafia else SCRIPTED[:1]
        if self._opponents not in (*scripted, POLICY, BASE):
            choices = ", ".join(f'"{choice}"' for choice in (*scripted, POLICY))
            raise _make_argument_error(f"opponents: {self._opponents!r} is not supported", f'set {choices} or "{BASE}"')
        self._model = "" if self._opponents in scripted else str(self._opponents)

    def _find_player_count(self, name: str, game_args: Mapping[str, Any]) -> None:
        """Start the game with num_players, or 1 to 15 players, and store the first number that it accepts.

        Raise ConfigError if the game does not start, accepts no number, or has no such seat or opponents.
        """
        try:
            env = self._make()
        except TypeError as error:
            message = f"'{name}' does not accept {sorted(game_args)} ({error})"
            raise _make_argument_error(message, "use the game's own arguments") from error
        except Exception as error:  # Python 3.12 only, missing data, or a judge without its API key
            raise _make_start_error(name, error) from error
        self._noise.seed("check")
        reason: Exception | None = None
        # Games do not list valid numbers of players; they reject the others by assertions or errors while dealing.
        for players in [self._players] if self._players else range(1, 16):
            try:
                with self._noise.running():
                    env.reset(num_players=players, seed=0)
                self._players = players
                break
            except (AssertionError, ValueError, IndexError, KeyError) as error:
                reason = error
            except Exception as error:
                raise _make_start_error(name, error) from error
        else:
            message = f"num_players: '{name}' can't be played by {self._players or 'any number up to 15'} ({reason})"
            raise _make_argument_error(message, "correct it") from reason
        if self._players == 1 and self._model:
            raise _make_argument_error(f"opponents: '{name}' has none", "remove it")
        if type(self._player) is int and self._player >= self._players:
            message = f"player: {self._player} is not a seat of {self._players} players"
            raise _make_argument_error(message, f"set 0 to {self._players - 1}")

    def reset(self, seed: int) -> Turn:
        """Start a game from the seed and play random opponents; return the first turn of the policy or a model.

        If the game ends before, return its last turn.
        """
        self._random = random.Random(derive_seed("opponents", seed))
        self._noise.seed("game", seed)
        self._turns, self._feedback, self._opponent_turns = 0, "", 0
        self._observations: dict[int, list[Any]] = {seat: [] for seat in range(self._players)}
        self._read = dict.fromkeys(self._observations, 0)  # how many observations the model in each seat has read
        with self._noise.running():
            self._env = self._make()
            self._env.reset(num_players=self._players, seed=derive_seed("game", seed))
            if type(self._player) is int:
                self._seat = self._player
            else:  # a seat drawn by the seed, of all seats or of the seats with a role
                seats = list(range(self._players))
                if self._player != "seed":
                    seats = [seat for seat in seats if self._state.game_state["player_roles"][seat] == self._player]
                self._seat = seats[derive_seed("seat", seed) % len(seats)]
            return self._play_opponents(0.0, {}, False)

    def choose_scripted_move(self, generator: random.Random, plan: bool = True) -> str:
        """Return a scripted move for the policy's turn in SecretMafia, chosen with ``generator``; do not play it.

        If ``plan`` is false, the move ignores what the policy knows about the other players.
        """
        game, observations = self._state.game_state, self._observations[self._seat]
        sides = secret_mafia.find_known_sides(game, self._seat, observations) if plan else {}
        return secret_mafia.choose_planned_action(game, self._seat, sides, generator)

    def step(self, action: str) -> Turn:
        """Play the action in the current seat, then random opponents; return the next turn of the policy or a model.

        If these actions end the game, return the last turn. Do not call ``step`` after that. After an action of the
        policy, the turn has the action's reward, and its info has ``legal``, 1.0 or 0.0. If the action is not valid,
        the info has the reason, and in SecretMafia the next messages have it too.
        """
        if self._state.current_player_id != self._seat:
            return self._step_opponent(action)
        state, problem, useful = self._state, "", False
        if self._mafia:
            problem = secret_mafia.find_action_problem(action, state.game_state, self._seat)
            useful = not problem and secret_mafia.is_useful(action, state.game_state, self._seat)
        with self._noise.running():
            # An invalid action is sent to the game as an empty one, so that the game counts repeated errors itself.
            done, game_problem = self._play_action(self._env, "" if problem else action)
            problem = problem or game_problem
            self._turns += 1
            self._feedback = f"Your action was not valid: {problem}" if problem and self._mafia else ""
            reward = self._rewards["illegal"] if problem else self._rewards["legal"] + useful * self._rewards["useful"]
            info: dict[str, float | str] = {"legal": float(not problem)} | ({"illegal": problem} if problem else {})
            if self._mafia:
                info["useful"] = float(useful)
            self._opponent_turns = 0
            return self._play_opponents(reward, info, done)

    def _step_opponent(self, action: str) -> Turn:
        """Play the move that a model wrote for an opponent's seat, or a random move if it is not valid.

        Return the next turn of the policy or a model, with ``opponent_legal`` in its info: 1 if the move was valid, or
        0.
        """
        seat = self._state.current_player_id
        with self._noise.running():
            legal = self._is_valid(action, seat)
            done, _ = self._play_action(self._env, action if legal else self._choose_random_move(seat))
            return self._play_opponents(0.0, {"opponent_legal": float(legal)}, done)

    @property
    def _state(self) -> Any:
        """The game's current state in textarena."""
        return self._env.state

    def _play_opponents(self, reward: float, info: dict[str, float | str], done: bool) -> Turn:
        """Play random opponents until the policy or a model as opponent is next, or the game ends; return that turn.

        ``reward`` and ``info`` become the turn's. A model's turn names the model in ``opponent``. ``done`` tells that
        the game is over already. Raise RuntimeError after 500 turns of opponents since the policy's last turn.
        """
        while not (done or self._state.done):
            seat = self._state.current_player_id
            self._observations[seat] += self._state.get_current_player_observation()
            if seat == self._seat:
                messages = [{"role": "user", "content": self._format_observation(seat)}]
                return Turn(messages, reward, False, info | self._read_role_and_phase())
            self._opponent_turns += 1
            if self._opponent_turns > _MAX_OPPONENT_TURNS:
                raise RuntimeError(f"the opponents played {_MAX_OPPONENT_TURNS} turns without a turn of the policy")
            if self._model:
                messages = [{"role": "user", "content": self._format_observation(seat)}]
                return Turn(messages, reward, False, info, opponent=self._model, seat=seat)
            done, _ = self._play_action(self._env, self._choose_random_move(seat))
        return self._make_last_turn(reward, info)

    def _format_observation(self, seat: int) -> str:
        """Return the text that a seat reads: the others' messages since its last turn, or with "brief", a summary.

        Messages count as read then. The text of the policy includes why its last action was not valid.
        """
        feedback = [self._feedback] if self._feedback and seat == self._seat else []
        observations = self._observations[seat]
        if self._observation == "brief":
            return "\n".join(
                [*feedback, secret_mafia.format_brief_observation(self._state.game_state, seat, observations)]
            )
        new = observations[self._read[seat] :]
        self._read[seat] = len(observations)
        lines = [
            f"[{'GAME' if sender == -1 else f'Player {sender}'}] {text}" for sender, text, _ in new if sender != seat
        ]
        return "\n".join([*lines, *feedback])

    def _read_role_and_phase(self) -> dict[str, float | str]:
        """Return a dict for a turn's info: ``role`` of the policy's seat, and ``phase`` if the game has phases."""
        phase = (self._state.game_state or {}).get("phase")
        role = self._state.game_info[self._seat].get("role") or f"Player {self._seat}"
        info: dict[str, float | str] = {"role": str(role)}
        return info | ({"phase": str(getattr(phase, "value", phase))} if phase is not None else {})

    def _make_last_turn(self, reward: float, info: dict[str, float | str]) -> Turn:
        """Close the game and return the last turn, with ``reward`` plus the game's reward for the policy.

        The info has "won" (0 or 1), "turns" and "end", the game's reason.
        """
        rewards, game_info = self._env.close()
        policy_reward = float((rewards or {}).get(self._seat, 0.0))
        best = max((float(player_reward) for player_reward in (rewards or {0: 0.0}).values()), default=0.0)
        won = policy_reward > 0 and policy_reward >= (best if self._players > 1 else 1.0)
        reason = game_info[self._seat].get("reason")
        info = info | self._read_role_and_phase() | {"won": float(won), "turns": float(self._turns), "end": str(reason)}
        if self._mafia:
            info[f"won_{info['role']}".lower()] = float(won)
        return Turn([], reward + policy_reward, True, info)

    def _play_action(self, env: Any, action: str) -> tuple[bool, str]:
        """Play the current player's action; return whether the game is over, and why the action was invalid or ""."""
        import textarena

        state, seat = env.state, env.state.current_player_id
        errors, was_invalid = getattr(state, "error_count", 0), bool(state.game_info[seat].get("invalid_move"))
        old_logs = len(state.logs)
        wrapper_class: Any = textarena.Wrapper
        while isinstance(env, wrapper_class):  # apply the wrappers of actions, but not the wrappers of prompts
            action = env.action(action) if hasattr(type(env), "action") and action else action
            env = env.env
        done, _ = env.step(action)
        fatal = bool(state.game_info[seat].get("invalid_move")) and not was_invalid
        if not fatal and getattr(state, "error_count", 0) <= errors:
            return bool(done), ""
        logs = [str(text) for _, text in state.logs[old_logs:]]  # some games log numbers
        reasons = [text.partition("Reason: ")[2] for text in logs if "invalid move. Reason: " in text]
        if reasons:
            reason = reasons[-1].partition(" Please resubmit")[0]
        else:
            reason = str(state.game_info[seat].get("reason", ""))
        return bool(done), reason or "invalid move"

    def _choose_random_move(self, seat: int) -> str:
        """Draw random moves for a seat and return the first valid one; if 40 are invalid, return the first.

        The moves are the bracketed texts of its observations, newest observation first, then "[0]" to "[9]". The moves
        of an observation, and the numbers, are in random order. [GAME] and [Player N] are left out.

        In SecretMafia, draw a valid move, and with ``opponents: crowd`` vote for a player that most messages name.
        """
        if self._mafia:
            crowd = self._opponents == "crowd"
            messages = secret_mafia.list_messages_today(self._observations[seat]) if crowd else []
            return secret_mafia.choose_random_action(self._state.game_state, seat, self._random, messages)
        moves: list[str] = []
        for _, text, _ in reversed(self._observations[seat]):
            bracketed = {move for move in _BRACKETED.findall(text) if not _SPEAKER.fullmatch(move)}
            new_moves = sorted(bracketed - set(moves))
            moves += self._random.sample(new_moves, len(new_moves))
        numbers = [f"[{number}]" for number in range(10) if f"[{number}]" not in moves]
        moves += self._random.sample(numbers, len(numbers))
        return next((move for move in moves[:_TRIES] if self._is_valid(move, seat)), moves[0])

    def _is_valid(self, move: str, seat: int) -> bool:
        """Return whether a seat's move is valid, by playing it on a copy of the game (in SecretMafia, by its rules)."""
        if self._mafia:
            return not secret_mafia.find_action_problem(move, self._state.game_state, seat)
        with restoring_noise():
            return not self._play_action(copy.deepcopy(self._env), move)[1]


def _make_start_error(name: str, error: Exception) -> ConfigError:
    """Return a ConfigError that says that a game of textarena can't start on this machine, and why."""
    reason = " ".join(str(error).split()).strip("* ")
    message = f"textarena's '{name}' does not start here ({type(error).__name__}: {reason[:120]})"
    return config_error("environment", message, "provide what the game requires, or choose another game")


def _make_argument_error(message: str, fix: str) -> ConfigError:
    """Return a ConfigError at the recipe key environment_args."""
    return config_error("environment_args", message, fix)
