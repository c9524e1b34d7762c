"""Test environments of verifiers: equal scores in its evaluation, its tools, and cleanup after an episode."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from grpo_recipes.extensions.environments import stage
from grpo_recipes.extensions.environments.libraries import find_library_problems
from grpo_recipes.extensions.environments.load import load_environment
from grpo_recipes.extensions.environments.verifiers_tasks import choose_row_index
from grpo_recipes.rollouts.turns import Turn

from .played import needs, play, said

pytestmark = pytest.mark.usefixtures("found")

CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'


def seed_of(row: int, rows: int) -> int:
    """Return a training seed that selects this row."""
    return next(seed for seed in range(0, 10_000, 2) if choose_row_index(seed, rows, False) == row)


def asked(first: int, **arguments: int) -> set[int]:
    """Return the numbers in the prompts of every second seed."""
    numbers = set()
    for seed in range(first, 600, 2):
        env = load_environment("verifiers:sums-single", arguments)
        numbers.add(int(env.reset(seed).messages[-1]["content"].partition("+")[0]))
        env.close()
    return numbers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "trained", "held_out"),
    [
        ({"n": 4}, set(range(4)), set(range(4))),
        ({"n": 9}, set(range(9)), set(range(9))),
        ({"n": 10}, set(range(9)), {9}),
        ({"n": 35}, set(range(35)) - {9, 19, 29}, {9, 19, 29}),
        ({"n": 7, "evaluation": 3}, set(range(7)), {100, 101, 102}),
        ({"n": 0, "evaluation": 20}, set(range(100, 120)) - {109, 119}, {109, 119}),
    ],
    ids=["few", "nine", "ten", "more", "two sets", "only one to evaluate on"],
)
def test_every_row_is_trained_on_or_evaluated_on(
    arguments: dict[str, int], trained: set[int], held_out: set[int]
) -> None:
    needs("verifiers:x")
    assert asked(0, **arguments) == trained
    assert asked(1, **arguments) == held_out


class Scripted:
    """An OpenAI client that answers from a list."""

    def __init__(self, answers: list[Any]):
        self.chat = self.completions = self
        self.answers = iter(answers)

    async def create(self, **_: Any) -> Any:
        return next(self.answers)


@pytest.mark.parametrize(
    ("name", "row", "actions"),
    [
        ("sums-single", 3, ["<answer>6</answer>"]),
        ("sums-single", 3, ["<answer>7</answer>"]),
        ("sums-single", 3, ["6"]),
        ("sums-single", 3, [""]),
        ("guess-multi", 1, ["x", "2"]),
        ("guess-multi", 1, ["x", "y", "z", "w"]),
        ("sums-tool", 0, [f"so {CALL}", "it is 5"]),
        ("sums-tool", 0, [CALL.replace("add", "divide"), "it is 4"]),
        ("sums-tool", 0, [CALL.replace("}}", "}"), "unused"]),
        ("gym-counter", 2, ["up", "down", "down", "down", "asked after the end"]),
        ("gym-counter", 1, ["up"] * 5),
        ("group", 1, ["<answer>2</answer>"]),
        ("group", 6, ["x", "2"]),
    ],
)
def test_scores_are_those_of_the_librarys_own_evaluation(name: str, row: int, actions: list[str]) -> None:
    needs("verifiers:x")
    import verifiers

    from grpo_recipes.extensions.environments.verifiers_tasks import _parse_completion

    library = verifiers.load_environment(name)
    rows = library.get_dataset()
    turns = play(load_environment(f"verifiers:{name}", {}), seed_of(row, len(rows)), said(actions))
    client = Scripted([_parse_completion(text, name == "sums-tool") for text in actions])
    output = asyncio.run(library.run_rollout(dict(rows[row]), client, "any", {}))  # type: ignore[arg-type]
    assert turns[-1].done and turns[-1].messages == []
    assert turns[-1].reward == output["reward"]
    assert {key: turns[-1].info[key] for key in output["metrics"]} == output["metrics"]


@pytest.mark.slow
def test_verifiers_own_game_of_several_turns_is_scored_as_its_own_evaluation_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("verifiers:x")
    import nltk
    import verifiers
    from word_game import WORDS, write_words

    from grpo_recipes.extensions.environments.verifiers_tasks import _parse_completion

    monkeypatch.setattr(nltk, "download", lambda *_, **__: False)  # the library requests it even if the data exists
    write_words(tmp_path / "nltk")
    args = {"folder": str(tmp_path / "nltk")}
    library = verifiers.load_environment("word-game", **args)
    row = dict(library.get_dataset()[3])
    wrong_guesses = [f"<guess>[{word}]</guess>" for word in WORDS if word != row["answer"]]
    for actions in (
        [wrong_guesses[0], f"<guess>[{row['answer']}]</guess>", "unused"],
        [*wrong_guesses, "no guess", "unused"],
    ):
        turns = play(load_environment("verifiers:word-game", args), seed_of(3, 8), said(actions))
        client = Scripted([_parse_completion(text, False) for text in actions])
        output = asyncio.run(library.run_rollout(dict(row), client, "any", {}))  # type: ignore[arg-type]
        assert (turns[-1].reward, len(turns)) == (output["reward"], output["metrics"]["num_turns"] + 1)
        assert {key: turns[-1].info[key] for key in output["metrics"]} == output["metrics"]
        assert "Feedback:" in turns[1].messages[0]["content"]
        assert (turns[-1].info["found"], len(turns)) == ((1.0, 3) if len(actions) == 3 else (0.0, 8))


def test_a_class_of_verifiers_is_played_unmodified_and_scored_as_its_own_evaluation_does() -> None:
    needs("verifiers:x")
    import verifiers

    from grpo_recipes.extensions.environments.verifiers_tasks import _parse_completion

    args = {"gym": "basic_arithmetic", "num_train_examples": 0, "num_eval_examples": 4, "seed": 5}
    library = verifiers.ReasoningGymEnv(**args)
    env = load_environment("verifiers:ReasoningGymEnv", args | {"num_train_examples": 4, "num_eval_examples": 0})
    answers = [str(library.rg_dataset[number]["answer"]) for number in range(4)]
    texts = [f"<answer>{answers[0]}</answer>", "<answer>no</answer>", answers[2], f"<answer>{answers[3]}</answer>"]
    client = Scripted([_parse_completion(text, False) for text in texts])
    evaluation = asyncio.run(library.evaluate(client, "any", max_concurrent=1))  # type: ignore[arg-type]
    last_turns = [play(env, seed_of(row, 4), said([text]))[-1] for row, text in enumerate(texts)]
    assert [turn.reward for turn in last_turns] == [output["reward"] for output in evaluation["outputs"]]
    assert [turn.reward for turn in last_turns][::3] == [1.0, 1.0]
    assert find_library_problems("verifiers:ReasoningGymEnv", args) == []


def test_an_environment_of_verifiers_is_made_once_for_all_episodes_of_a_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs("verifiers:x")
    import verifiers

    calls, load = [], verifiers.load_environment
    monkeypatch.setattr(verifiers, "load_environment", lambda name, **args: calls.append(args) or load(name, **args))
    first, second = (load_environment("verifiers:sums-single", {"n": 7}) for _ in range(2))
    assert first.reset(2) == second.reset(2) and calls == [{"n": 7}]
    first.close()
    second.close()
    load_environment("verifiers:sums-single", {"n": 8})
    assert calls == [{"n": 7}, {"n": 8}]


def test_tools_are_called_and_shown() -> None:
    needs("verifiers:x")
    env = load_environment("verifiers:sums-tool", {})
    env.reset(0)
    assert [tool["function"]["name"] for tool in env.tools] == ["add"]
    assert env.step(CALL).messages == [{"role": "tool", "content": "5"}]
    env.close()


def test_loading_one_leaves_the_signals_as_they_were() -> None:
    needs("verifiers:x")
    before = signal.getsignal(signal.SIGTERM)
    load_environment("verifiers:sums-single", {"n": 2})
    assert signal.getsignal(signal.SIGTERM) is before


def turn_of(name: str, episode: str, actions: list[str]) -> Turn:
    """Take an episode one turn further, as a child process does."""
    digest = stage.hash_turn("")
    return stage.parse_turn(
        stage.play([actions], [f"verifiers:{name}"], ["{}"], [seed_of(1, 4)], [episode], [digest])[0]
    )


def test_finished_episodes_leave_no_open_files() -> None:
    needs("verifiers:x")
    files = []
    for episode in range(50):
        turn_of("sums-single", f"files/{episode}", [])
        assert turn_of("sums-single", f"files/{episode}", ["x"]).done
        files.append(len(os.listdir("/proc/self/fd")))
    assert files == files[:1] * 50


def test_an_unfinished_episode_ends_without_a_word(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    needs("verifiers:x")
    assert not turn_of("guess-multi", "one/0", []).done
    capfd.readouterr()  # of its dataset
    assert not turn_of("guess-multi", "one/0", ["x"]).done
    assert not turn_of("guess-multi", "two/0", []).done
    assert turn_of("guess-multi", "two/0", ["2"]).reward == 1.0
    gc.collect()
    assert (capfd.readouterr().err, caplog.text) == ("", "")
