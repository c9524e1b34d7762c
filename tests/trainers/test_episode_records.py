"""Records of an episode: its limits, for a resumed run, and its numbers in metrics and samples."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_recipes.extensions.environments import episodes as module
from grpo_recipes.extensions.environments.episode import Episode
from grpo_recipes.extensions.environments.episodes import Episodes, choose_environment_labels
from grpo_recipes.recipe.configs import GRPOConfig, ScriptArguments
from grpo_recipes.rewards.score import Score
from grpo_recipes.rollouts.turns import Turn

from .tiny_training import ON_CPU

TURN = '{"messages": []}'
Play = Callable[..., list[Score]]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Return a function that starts a generation's episodes in a fake pool. All calls share a run folder."""
    game = tmp_path / "game.py"
    game.write_text("class Game: pass\n")
    called_rows: list[int] = []

    def run(name: str, late: set[int], rows: int = 4, code: str = "", **keys: Any) -> list[Score]:
        if code:
            game.write_text(code)

        def pool(recipe: Any, copies: Any, function: str) -> Any:
            limits = {"timeout": recipe("environment_timeout"), "memory_gib": recipe("environment_memory_gib")}
            return SimpleNamespace(start=lambda: None, score=score, **limits)

        def score(_: str, actions: list[Any], columns: dict[str, Any], *arguments: Any) -> list[Score]:
            called = [int(episode.rpartition("/")[2]) for episode in columns["episode"]]
            called_rows[:] = called
            return [Score(None, "time limit", by_limit=True) if row in late else Score(TURN) for row in called]

        monkeypatch.setattr(module, "make_environment_pool", pool)
        script_args = ScriptArguments(environment=f"{game}:Game", **keys)
        episodes = Episodes(script_args, GRPOConfig(output_dir=str(tmp_path / "out"), **ON_CPU), tmp_path)
        episodes._specs = {}
        episodes.start_generation([], name)
        rows_of = [Episode(row, f"{game}:Game", "{}", 7) for row in range(rows)]
        return episodes._request_answers(rows_of, None, lambda: False)

    run.asked = called_rows  # type: ignore[attr-defined]
    return run


def test_a_limit_is_repeated_for_its_own_row_alone(play: Play) -> None:
    """All rows of a group start with the same call: seed, arguments and no action."""
    first = play("3/3", late={1})
    assert [score.reason for score in first] == [None, "time limit", None, None]
    repeated = play("3/3", late=set())
    assert [score.reason for score in repeated] == [None, "time limit", None, None] and repeated[1].replayed
    assert play.asked == [0, 2, 3]  # type: ignore[attr-defined]


def test_a_step_before_the_limit_is_redone_as_it_was(play: Play) -> None:
    play("3/3", late={0, 1, 2, 3})
    assert all(score.value == TURN for score in play("2/2", late=set()))
    assert all(score.value == TURN for score in play("4/4", late=set()))


@pytest.mark.parametrize(
    "remedy",
    [{"environment_timeout": 60.0}, {"environment_memory_gib": 8.0}, {"code": "class Game: slow = False\n"}],
    ids=["more time", "more memory", "corrected code"],
)
def test_what_the_advice_names_plays_an_episode_again(play: Play, remedy: dict[str, Any]) -> None:
    assert all(score.by_limit for score in play("0/0", late={0, 1, 2, 3}, environment_timeout=0.5))
    assert all(score.replayed for score in play("0/0", late=set(), environment_timeout=0.5))
    scores = play("0/0", late=set(), **{"environment_timeout": 0.5, **remedy})
    assert all(score.value == TURN for score in scores)


def over(**info: float | str) -> Episode:
    """Make an episode that ends before the policy's first turn."""
    messages = [{"role": "user", "content": "You are out."}]
    turn = Turn(messages, 0.5, True, {"role": "Villager", "won": 0.0, **info})
    return Episode(0, "textarena:SecretMafia-v0", "{}", 5, turns=[turn], done=True)


def test_an_episode_that_begins_at_its_end_counts() -> None:
    mixture = {"environments": [{"id": "textarena:SecretMafia-v0"}, {"id": "games.py:Easy"}]}
    source = SimpleNamespace(
        _script=ScriptArguments(environment_mixture=mixture), _labels={("textarena:SecretMafia-v0", "{}"): "mafia"}
    )
    for name in ("reward", "_is_zeroed"):
        setattr(source, name, partial(getattr(Episodes, name), source))
    assert Episodes._compute_metrics(source, over()) == {
        "won": 0.0, "turns": 0.0, "unfinished": 0.0, "unscored": 0.0, "reward_villager": 0.5,
        "reward_mafia": 0.5, "won_mafia": 0.0,
    }  # fmt: skip


def test_an_episode_that_begins_at_its_end_is_shown() -> None:
    record = over(end="The Mafia has won.").record()
    assert record["reward"] == 0.5 and record["turns"] == []
    assert record["info"] == {"role": "Villager", "won": 0.0, "end": "The Mafia has won."}


def test_several_environments_have_short_names_that_differ() -> None:
    easy, hard = ("a/games.py:Game", {"n": 1}, 0.5), ("a/games.py:Game", {"n": 2}, 0.25)
    gym = ("reasoning_gym:maze", {}, 0.25)
    assert choose_environment_labels([easy]) == {}
    assert choose_environment_labels([easy, gym]) == {
        ("a/games.py:Game", '{"n": 1}'): "Game",
        ("reasoning_gym:maze", "{}"): "maze",
    }
    assert list(choose_environment_labels([easy, gym, hard]).values()) == ["Game_1", "maze", "Game_3"]
