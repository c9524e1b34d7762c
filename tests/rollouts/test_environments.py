"""The adapters of environments: the same turns for the same seed, the libraries' own scores, and refusals."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy
import pytest

from grpo_recipes.errors import ConfigError
from grpo_recipes.extensions.environments import libraries
from grpo_recipes.extensions.environments.libraries import find_library_problems
from grpo_recipes.extensions.environments.load import load_environment

from .played import named_last, needs, play, written

pytestmark = pytest.mark.usefixtures("found")

HERE = Path(__file__).parent
OWN = str(HERE / "envs" / "own_game.py")
GAMES: dict[str, dict[str, Any]] = {
    f"{OWN}:Guess": {"most": 3},
    f"{OWN}:Dealt": {},
    "reasoning_gym:word_sorting": {},
    "reasoning_gym:maze": {},
    "textarena:SecretMafia-v0": {"player": "seed", "legal_reward": 0.1, "useful_reward": 0.5},
    "textarena:TicTacToe-v0": {"player": 1},
    "textarena:KuhnPoker-v0": {},
    "textarena:GuessTheNumber-v0": {},
    "verifiers:guess-multi": {},
    "verifiers:drawn-rows": {},
}


# --- seeds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", GAMES)
def test_the_same_seed_and_actions_give_the_same_turns(spec: str) -> None:
    needs(spec)
    env = load_environment(spec, GAMES[spec])
    first = {seed: written(play(env, seed, named_last)) for seed in range(4)}
    assert len(set(first.values())) > 1
    random.seed(time.time())
    numpy.random.seed(int(time.time()))
    reloaded = load_environment(spec, GAMES[spec])
    assert {seed: written(play(reloaded, seed, named_last)) for seed in reversed(range(4))} == first


@pytest.mark.parametrize(
    "spec", [pytest.param(spec, marks=() if spec == "textarena:KuhnPoker-v0" else pytest.mark.slow) for spec in GAMES]
)
def test_other_processes_give_the_same_turns_without_torch(spec: str) -> None:
    needs(spec)
    command = [sys.executable, str(HERE / "played.py"), spec, json.dumps(GAMES[spec]), "[1, 5]"]
    outputs = set()
    for hash_seed in "1", "2":
        env = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(HERE / "envs")}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        outputs.add(done.stdout)
    (output,) = outputs
    assert output.startswith("False ")


@pytest.mark.parametrize("spec", ["textarena:SecretMafia-v0", "verifiers:guess-multi", f"{OWN}:Guess"])
def test_episodes_played_in_turns_do_not_change_each_other(spec: str) -> None:
    needs(spec)
    separate = [written(play(load_environment(spec, {}), seed, named_last)) for seed in (1, 2)]
    envs = [load_environment(spec, {}) for _ in range(2)]
    before = random.getstate()
    turns = [[env.reset(seed)] for env, seed in zip(envs, (1, 2), strict=True)]
    while not all(episode[-1].done or len(episode) > 60 for episode in turns):
        for env, episode in zip(envs, turns, strict=True):
            if not episode[-1].done and len(episode) <= 60:
                episode.append(env.step(named_last(episode[-1])))
    assert [written(episode) for episode in turns] == separate
    assert random.getstate() == before


# --- a class of the user's own ---------------------------------------------------------------------------------------


def test_a_class_of_the_user_gives_texts_as_messages_of_the_user() -> None:
    env = load_environment(f"{OWN}:Guess", {"most": 0})
    assert env.reset(1).messages == [{"role": "user", "content": "Guess a number from 0 to 0, not [0] again."}]
    last = env.step(" 0 ")
    assert (last.messages, last.reward, last.done) == ([], 1.0, True)


def test_what_a_class_returns_beside_the_reward_is_kept() -> None:
    message = {"role": "tool", "content": "seen"}
    env = load_environment(f"{OWN}:Answers", {"step": [[message], 1, False, {"legal": True, "why": "so"}]})
    env.reset(0)
    turn = env.step("x")
    assert (turn.messages, turn.reward, turn.info) == ([message], 1.0, {"legal": 1.0, "why": "so"})


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (None, "Answers.step returned None"),
        (["seen", 1.0], "Answers.step returned ('seen', 1.0)"),
        ([5, 1.0, False], "Answers.step returned 5 as the observation"),
        ([[], 1.0, False], "as the observation"),
        ([[{"role": "robot", "content": ""}], 1.0, False], "as the observation"),
        (["seen", math.nan, False], "Answers.step returned nan as the reward"),
        (["seen", math.inf, True], "returned inf as the reward"),
        (["seen", 1e39, True], "returned 1e+39 as the reward. Fix: return a number between -1e+15 and 1e+15"),  # S8
        (["seen", "1", False], "returned '1' as the reward"),
        (["seen", None, False], "returned None as the reward"),
        (["seen", 1.0, None], "returned None as done"),
        (["seen", 1.0, False, {"legal": math.nan}], "as info"),
        (["seen", 1.0, False, [1]], "as info"),
    ],
)
def test_a_wrong_answer_of_a_class_names_it_and_what_to_return(answer: Any, told: str) -> None:
    env = load_environment(f"{OWN}:Answers", {"step": answer})
    env.reset(0)
    with pytest.raises(ConfigError) as error:
        env.step("x")
    assert told in str(error.value) and "Fix: return " in str(error.value)


def test_a_wrong_first_observation_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Answers\.reset returned 7"):
        load_environment(f"{OWN}:Answers", {"reset": 7}).reset(0)


# --- reasoning-gym ---------------------------------------------------------------------------------------------------


def test_a_task_is_scored_by_its_dataset() -> None:
    needs("reasoning_gym:x")
    env = load_environment("reasoning_gym:basic_arithmetic", {"max_terms": 2, "max_digits": 1})
    env.reset(3)
    wrong = env.step("<answer>no</answer>")
    assert (wrong.reward, wrong.done, wrong.messages, wrong.info["correct"]) == (0.0, True, [], 0.0)
    answer = wrong.info["answer"]
    right = env.step(f"<answer>5</answer> no: <answer> {answer} </answer>")
    assert (right.reward, right.info["correct"]) == (1.0, 1.0)
    untagged = env.step(str(answer))
    assert (untagged.reward, untagged.info["answered"]) == (0.0, 0.0)


def test_a_task_may_have_a_system_prompt_and_no_tag() -> None:
    needs("reasoning_gym:x")
    env = load_environment("reasoning_gym:basic_arithmetic", {"system_prompt": "direct", "answer_tag": ""})
    assert "<answer>" in env.reset(3).messages[0]["content"]
    assert env.step(f" {env.step('').info['answer']}\n").reward == 1.0


def test_an_answer_that_the_scorer_trips_over_is_wrong_and_shown() -> None:
    needs("reasoning_gym:x")
    env = load_environment("reasoning_gym:prime_factorization", {})
    env.reset(3)
    turn = env.step("<answer>2 x [</answer>")
    assert turn.reward == 0.0 and "ValueError" in str(turn.info["scorer"])


# --- TextArena -------------------------------------------------------------------------------------------------------


def test_a_game_ends_with_its_own_reward() -> None:
    needs("textarena:x")
    turns = [play(load_environment("textarena:TicTacToe-v0", {}), seed, named_last)[-1] for seed in range(12)]
    assert {turn.reward for turn in turns} >= {-1.0, 1.0}
    assert all(turn.info["won"] == float(turn.reward == 1) and turn.done and turn.messages == [] for turn in turns)


def test_a_turn_shows_only_what_is_new_and_no_words_of_its_own() -> None:
    needs("textarena:x")
    env = load_environment("textarena:TicTacToe-v0", {})
    first, second = env.reset(1), env.step("I take [4]")
    assert "Tic Tac Toe" in first.messages[0]["content"]
    text = second.messages[0]["content"]
    assert "Tic Tac Toe" not in text and "I take" not in text and "[Player 1] [" in text


def test_a_move_that_the_game_refuses_is_not_legal() -> None:
    needs("textarena:x")
    env = load_environment("textarena:TicTacToe-v0", {"illegal_reward": -0.5, "legal_reward": 0.25})
    env.reset(1)
    legal, refused, lost = env.step("[4]"), env.step("[4]"), env.step("[4]")
    assert (legal.reward, legal.info["legal"]) == (0.25, 1.0)
    assert (refused.reward, refused.info["legal"], refused.done) == (-0.5, 0.0, False)
    assert "already occupied" in str(refused.info["illegal"])
    assert (lost.reward, lost.done, lost.info["legal"]) == (-1.5, True, 0.0)


def test_opponents_play_moves_that_the_game_takes() -> None:
    needs("textarena:x")
    for name in "TicTacToe-v0", "ConnectFour-v0", "Nim-v0", "KuhnPoker-v0":
        for seed in range(4):
            last = play(load_environment(f"textarena:{name}", {"player": "seed"}), seed, named_last)[-1]
            assert last.info["legal"] == 0.0 or "invalid" not in str(last.info.get("end", "")).lower()


def test_secret_mafia_names_role_and_phase_and_takes_one_target_at_night() -> None:
    needs("textarena:x")
    env = load_environment("textarena:SecretMafia-v0", {"player": "seed", "legal_reward": 0.1, "illegal_reward": -0.3})
    seed = next(seed for seed in range(50) if env.reset(seed).info["role"] == "Detective")
    turn = env.reset(seed)
    assert turn.info["phase"] == "Night-Detective"
    refused = env.step("[1] or [2]")
    assert (refused.reward, refused.info["legal"], refused.info["phase"]) == (-0.3, 0.0, "Night-Detective")
    assert "one target in brackets, not 2" in str(refused.info["illegal"])
    assert "one target in brackets, not 2" in refused.messages[0]["content"]
    seat = refused.messages[0]["content"].partition("Player ")[2][0]
    env.reset(seed)
    assert "is no target" in str(env.step(f"[{seat}]").info["illegal"])
    env.reset(seed)
    accepted = env.step(named_last(turn))
    assert accepted.info["legal"] == 1.0 and accepted.info["phase"] != "Night-Detective"


def test_secret_mafia_rewards_what_helps_the_side_and_winning() -> None:
    needs("textarena:x")
    args = {"player": "seed", "useful_reward": 0.5}
    votes = {}
    for seed in range(30):
        env = load_environment("textarena:SecretMafia-v0", args)
        turns = play(env, seed, named_last)
        for before, after in itertools.pairwise(turns):
            bare = after.reward - (after.done and (1.0 if after.info["won"] else -1.0))
            assert bare == pytest.approx(0.5 * float(after.info["useful"]))
            votes[before.info["phase"], after.info["useful"]] = True
        assert turns[-1].done
    assert ("Day-Voting", 1.0) in votes and ("Day-Voting", 0.0) in votes and ("Night-Mafia", 1.0) in votes
    assert turns[-1].info[f"won_{turns[-1].info['role']}".lower()] == turns[-1].info["won"]


def test_a_secret_mafia_crowd_votes_for_whom_talk_names() -> None:
    needs("textarena:x")
    voted, useful = {"random": 0, "crowd": 0}, set()
    for seed, opponents in itertools.product(range(20), voted):
        args = {"opponents": opponents, "discussion_rounds": 1}
        turns = play(load_environment("textarena:SecretMafia-v0", args), seed, lambda turn: "[3]")
        useful |= {after.info["useful"] for before, after in itertools.pairwise(turns) if "Discuss" in str(before)}
        voted[opponents] += "Player 3 was eliminated by vote" in str(turns)
    assert voted["crowd"] > voted["random"] + 3 and useful == {0.0, 1.0}


BRIEF = {"num_players": 6, "mafia_ratio": 0.2, "discussion_rounds": 1, "observation": "brief", "opponents": "crowd"}


@pytest.mark.parametrize("role", ["Detective", "Doctor", "Mafia", "Villager"])
def test_the_policy_plays_the_role_that_it_is_given(role: str) -> None:
    needs("textarena:x")
    env = load_environment("textarena:SecretMafia-v0", BRIEF | {"player": role})
    texts = {str(play(env, seed, named_last)[-1].info["role"]) for seed in range(6)}
    seats = {
        turn.messages[0]["content"].partition("Player ")[2][0] for turn in map(env.reset, range(12)) if not turn.done
    }
    assert texts == {role} and len(seats) > 1


def test_a_brief_observation_has_what_the_seat_knows_and_nothing_else() -> None:
    needs("textarena:x")
    sides = {"Detective": set(), "Doctor": set(), "Mafia": set(), "Villager": set()}
    for role, seed in itertools.product(sides, range(12)):
        env = load_environment("textarena:SecretMafia-v0", BRIEF | {"player": role})
        turns = play(env, seed, named_last)
        for before, after in itertools.pairwise(turns):
            text, phase = before.messages[0]["content"], before.info["phase"]
            assert text.startswith(f"{phase}. You are Player ") and f", {role}." in text and "\n" not in text
            assert ("Valid: " in text) is (phase != "Day-Discussion") is ("Alive: " not in text)
            assert after.info["legal"] == 1.0
            sides[role] |= {name for name in ("Mafia", "Not Mafia") if f". {name}: " in text}
            assert "Named today" not in text or str(phase).startswith("Day")
    assert sides == {
        "Detective": {"Mafia", "Not Mafia"}, "Doctor": set(), "Mafia": {"Mafia", "Not Mafia"}, "Villager": set(),
    }  # fmt: skip


def test_a_brief_observation_after_an_investigation_and_after_an_invalid_move() -> None:
    needs("textarena:x")
    env = load_environment("textarena:SecretMafia-v0", BRIEF | {"player": "Detective"})
    verdicts = set()
    for seed in range(12):
        other = named_last(env.reset(seed))
        whole = load_environment("textarena:SecretMafia-v0", BRIEF | {"player": "Detective", "observation": "whole"})
        assert "Welcome to Secret Mafia!" in whole.reset(seed).messages[0]["content"]
        brief, told = env.step(other), whole.step(other)
        if not brief.done and other[1] in brief.messages[0]["content"].partition("Alive: ")[2]:
            is_mafia = f"Player {other[1]} IS a Mafia member" in told.messages[0]["content"]
            assert f"Detective. {'Mafia' if is_mafia else 'Not Mafia'}: {other[1]}. " in brief.messages[0]["content"]
            verdicts.add(is_mafia)
    assert verdicts == {True, False}
    env.reset(seed)
    refused = env.step("[1] [2]").messages[0]["content"]
    assert refused.startswith("Your action was not valid: Night-Detective takes one target in brackets, not 2; valid: ")
    assert refused.partition("\n")[2].startswith("Night-Detective. You are")


def test_a_brief_observation_names_whom_others_named_that_day() -> None:
    needs("textarena:x")
    env = load_environment("textarena:SecretMafia-v0", BRIEF | {"player": "Doctor"})
    turns = [turn for seed in range(20) for turn in play(env, seed, named_last)]
    votes = [turn.messages[0]["content"] for turn in turns if not turn.done and turn.info["phase"] == "Day-Voting"]
    named_today = [text.partition("Named today: ")[2].partition(".")[0] for text in votes]
    assert "" in named_today and any(len(names.split()) > 1 for names in named_today)
    assert all(f"[{name}]" in text for text, names in zip(votes, named_today, strict=True) for name in names.split())


@pytest.mark.parametrize("role", ["Detective", "Mafia"])
def test_the_script_of_secret_mafia_plays_valid_moves_and_wins_more_than_drawn_ones(role: str) -> None:
    needs("textarena:x")
    from grpo_recipes.extensions.environments.games import Game

    env, won = Game("SecretMafia-v0", BRIEF | {"player": role, "mafia_ratio": 0.4 if role == "Mafia" else 0.2}), {}
    for plan in True, False:
        generator = random.Random(0)
        ends = [play(env, seed, lambda turn: env.choose_scripted_move(generator, plan)) for seed in range(100)]  # noqa: B023
        assert all(turn.info["legal"] == 1.0 for turns in ends for turn in turns[1:])
        won[plan] = sum(float(turns[-1].info["won"]) for turns in ends)
    assert won[True] >= won[False] + (15 if role == "Detective" else 0)


# --- rejected environments and arguments -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "args", "told"),
    [
        ("textarena:SecretMafia", {}, "use textarena:SecretMafia-v0 or"),
        ("textarena:", {}, "set textarena:NAME"),
        ("textarena:SecretMafia-v0", {"num_players": 3}, "num_players: 'SecretMafia-v0' can't be played by 3"),
        ("textarena:SecretMafia-v0", {"player": 6}, "player: 6 is not a seat of 6 players. Fix: set 0 to 5"),
        ("textarena:SecretMafia-v0", {"player": "me"}, "player: 'me' is not a seat"),
        ("textarena:TicTacToe-v0", {"player": "Mafia"}, 'Fix: set a number from 0, or "seed"'),
        ("textarena:SecretMafia-v0", {"player": "Jester"}, 'or "seed" or "Detective" or "Doctor" or'),
        ("textarena:SecretMafia-v0", {"observation": "short"}, 'set "whole" or "brief"'),
        ("textarena:TicTacToe-v0", {"observation": "brief"}, "remove it: it belongs to SecretMafia"),
        ("textarena:SecretMafia-v0", {"opponents": "gpt"}, 'set "random", "crowd", "policy" or "base"'),
        ("textarena:TicTacToe-v0", {"opponents": "crowd"}, 'Fix: set "random", "policy" or "base"'),
        (
            "textarena:SecretMafia-v0",
            {"num_players": 0},
            "num_players: expected a number of players, got 0. Fix: set 1 or",
        ),
        ("textarena:TicTacToe-v0", {"num_players": 2.0}, "num_players: expected a number of players, got 2.0"),
        (
            "textarena:TicTacToe-v0",
            {"legal_reward": "lots"},
            "legal_reward: 'lots' is not a valid reward. Fix: set a number",
        ),
        ("textarena:TicTacToe-v0", {"illegal_reward": math.nan}, "illegal_reward: nan is not a valid reward"),
        ("textarena:TicTacToe-v0", {"illegal_reward": 1e39}, "illegal_reward: 1e+39 is not a valid reward"),
        ("textarena:TicTacToe-v0", {"legal_reward": None}, "legal_reward: None is not a valid reward"),
        ("textarena:Mastermind-v0", {"opponents": "policy"}, "opponents: 'Mastermind-v0' has none. Fix: remove it"),
        ("textarena:SecretMafia-v0", {"rounds": 1}, "unexpected keyword argument 'rounds'"),
        ("textarena:Debate-v0", {}, "does not start here (ValueError: OpenRouter API key"),
        ("textarena:TicTacToe-v0", {"useful_reward": 1}, "useful_reward belongs to SecretMafia"),
        ("reasoning_gym:basic_arithmatic", {}, "use reasoning_gym:basic_arithmetic"),
        ("reasoning_gym:basic_arithmetic", {"min_term": 1}, "use allow_negation"),
        ("reasoning_gym:basic_arithmetic", {"min_terms": 30}, "max_terms must be >= min_terms"),
        ("reasoning_gym:basic_arithmetic", {"seed": 1}, "follow from the run's seed"),
        ("verifiers:nowhere-env", {}, "verifiers has no environment 'nowhere-env'"),
        ("verifiers:a..b", {}, "verifiers has no environment 'a..b'"),
        (
            "verifiers:ReasoningGymEnv",
            {},
            "required argument: 'gym'). Fix: use the arguments of ReasoningGymEnv(gym, num",
        ),
        ("openenv:localhost", {}, "set openenv:http://HOST:PORT"),
        ("openenv:http://127.0.0.1:9", {"action": {}, "field": ""}, "openenv has no field"),
    ],
)
def test_what_is_wrong_is_said_before_a_run(spec: str, args: dict[str, Any], told: str) -> None:
    needs(spec)
    assert [told in str(problem) for problem in find_library_problems(spec, args)] == [True]


@pytest.mark.parametrize("spec", [*(spec for spec in GAMES if ".py:" not in spec), "openenv:http://127.0.0.1:9"])
def test_what_is_right_has_no_problem(spec: str) -> None:
    needs(spec)
    assert find_library_problems(spec, GAMES.get(spec, {})) == []


def test_a_missing_library_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(libraries.LIBRARIES, "textarena", "no_such_library")
    (problem,) = find_library_problems("textarena:SecretMafia-v0", {})
    assert str(problem).endswith("install it with: EXTRAS=environments bash scripts/setup.sh")


def test_arguments_of_a_class_are_checked_when_it_is_made() -> None:
    with pytest.raises(ConfigError, match=r"use the arguments of Guess\(most: int = 9\)"):
        load_environment(f"{OWN}:Guess", {"least": 1})
    with pytest.raises(ConfigError, match="has no step"):
        load_environment(f"{OWN}:NoStep", {})
    with pytest.raises(ConfigError, match="'verifiers:sums-single' can't be loaded"):
        needs("verifiers:x")
        load_environment("verifiers:sums-single", {"n": "many"})
