"""What `grpo check` and `grpo plan` say of a recipe whose prompts come from environments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_recipes import cli
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.check import check

GAME = Path(__file__).parents[1] / "rollouts/wild_environment.py"
PLAYS = {"dataset_name": None, "environment": f"{GAME}:Sums", "reward_funcs": ["environment"]}
MIXED = {**PLAYS, "environment": None, "environment_mixture": {"environments": [{"id": f"{GAME}:Sums"}]}}
Read = Callable[..., Recipe]


def test_a_reward_that_nobody_wrote_is_not_to_be_removed(read: Read) -> None:
    (problem,) = check(read(dataset_name=None, environment=f"{GAME}:Sums"), {})
    assert problem.fix == "write reward_funcs: [environment]"


def test_a_models_copy_is_not_split(read: Read) -> None:
    pytest.importorskip("textarena")
    keys = PLAYS | {"environment": "textarena:TicTacToe-v0", "environment_args": {"opponents": "base"}}
    (problem,) = check(read(**keys, accelerator="zero3"), {})
    assert "ZeRO-3 would split a game's opponent" in str(problem)
    assert check(read(**keys, accelerator="zero2"), {}) == []


def test_a_server_of_openenv_needs_the_network(read: Read) -> None:
    pytest.importorskip("openenv")
    keys = PLAYS | {"environment": "openenv:http://127.0.0.1:9"}
    (problem,) = check(read(**keys), {})
    assert "is reached through the network. Fix: add environment_network: true" in str(problem)
    assert check(read(**keys, environment_network=True), {}) == []


@pytest.mark.parametrize(
    ("wrong", "right", "said"),
    [
        (PLAYS | {"environment": f"{GAME}:Summs"}, PLAYS, "has no 'Summs'. Fix: write one of Forgetful, Sums, Wild"),
        (PLAYS | {"environment": "gone.py:Sums"}, PLAYS, "gone.py"),
        (PLAYS | {"environment": "reasoning-gym:maze"}, PLAYS, "Fix: write reasoning_gym:maze"),
        (PLAYS | {"environment": "text_arena:Nim-v0"}, PLAYS, "Fix: write textarena:Nim-v0"),
        (PLAYS | {"environment_mixture": MIXED["environment_mixture"]}, MIXED, "are both given"),
        (MIXED | {"environment_mixture": {"environments": [{"weight": 2.0}]}}, MIXED, "an environment has no id"),
        (MIXED | {"environment_mixture": {"environments": []}}, MIXED, "an environment has no id"),
        (MIXED | {"environment_args": {"most": 2}}, PLAYS | {"environment_args": {"most": 2}}, "does nothing without"),
        ({"environment_max_turns": 2}, PLAYS | {"environment_max_turns": 2}, "does nothing without environment"),
        (PLAYS | {"dataset_name": "openai/gsm8k"}, PLAYS, "'dataset_name' does nothing with environment"),
        (PLAYS | {"system_prompt": "Add."}, PLAYS, "'system_prompt' does nothing with environment"),
        (PLAYS | {"reward_funcs": ["format_tags"]}, PLAYS, "Fix: write reward_funcs: [environment]"),
        (PLAYS | {"reward_funcs": ["environment", "math_verify"]},
         PLAYS | {"reward_funcs": ["environment", "format_tags"]}, "an episode does not have. Fix: remove math_verify"),
        ({"reward_funcs": ["environment"]}, PLAYS, "no environment is named"),
        (PLAYS | {"benchmarks": ["reasoning_gym:maze"]}, PLAYS | {"benchmarks": [PLAYS["environment"]]},
         "'reasoning_gym:maze' is no environment of the recipe"),
        (PLAYS | {"environment_turn_length": 9000}, PLAYS | {"environment_turn_length": 100}, "which is for all turns"),
        (PLAYS | {"environment_max_turns": 9000}, PLAYS, "leaves no token for a turn"),
        (PLAYS | {"environment_credit": "per_turn", "maxent_objective": "tempered"},
         PLAYS | {"environment_credit": "per_turn"}, "per_turn contradicts MaxEnt-GRPO"),
        (PLAYS | {"environment_credit": "per_turn", "reward_funcs": ["environment", "format_tags"]},
         PLAYS | {"environment_credit": "per_turn"}, "takes the environment's rewards alone"),
    ],
)  # fmt: skip
def test_what_is_refused_of_environments(read: Read, wrong: dict[str, Any], right: dict[str, Any], said: str) -> None:
    assert said in " ".join(map(str, check(read(**wrong), {})))
    assert check(read(**right), {}) == []


@pytest.mark.parametrize(
    ("named", "said"),
    [
        (f"environment: {GAME}:Sums", ":Sums; an episode has at most 4 turns of 16 tokens, 64 with what"),
        (f"environment: {GAME}:Sums\nenvironment_turn_length: 12", "at most 4 turns of 12 tokens"),
        (f"environment_mixture: {{environments: [{{id: '{GAME}:Sums', weight: 3}}, {{id: '{GAME}:Wild'}}]}}",
         ":Wild (25%); an episode"),
    ],
)  # fmt: skip
def test_the_plan_says_how_long_an_episode_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, named: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model_name_or_path: smoke:sums\ndtype: float32\nbf16: false\n{named}\n"
        "reward_funcs: [environment]\nenvironment_max_turns: 4\nmax_completion_length: 64\nprompts_per_step: 4\n"
    )
    assert cli.main(["plan", str(recipe)]) == 0
    assert said in capsys.readouterr().out


def test_the_rewards_of_an_environment_are_not_tried_on_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model_name_or_path: smoke:sums\nenvironment: {GAME}:Sums\nreward_funcs: [environment]\n")
    assert cli.main(["check-rewards", str(recipe)]) == 2
    assert "Fix: run grpo check --deep, which plays one" in capsys.readouterr().err


def test_a_model_that_only_training_has_is_no_opponent_in_a_benchmark(read: Read) -> None:
    pytest.importorskip("textarena")
    game = {**PLAYS, "environment": "textarena:TicTacToe-v0", "benchmarks": ["textarena:TicTacToe-v0"]}
    assert check(read(**game, environment_args={"opponents": "policy"}), {}) == []
    (problem,) = check(read(**game, environment_args={"opponents": "base"}), {})
    assert "in benchmarks nobody plays 'base'" in str(problem)
