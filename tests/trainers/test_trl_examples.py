"""Environments with the shapes of TRL's examples in a real trainer: they run as TRL runs them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from grpo_recipes import smoke
from grpo_recipes.data import load_prompts
from grpo_recipes.extensions.environments.datasets import RESET
from grpo_recipes.extensions.environments.tools import describe_tools, name_of
from grpo_recipes.recipe.check import check
from grpo_recipes.recipe.configs import ScriptArguments
from grpo_recipes.rewards.load import load_reward

from .test_tools import generate, written
from .test_trl_environments import Make, make, results  # noqa: F401  # a fixture

EXAMPLES = Path(__file__).parents[1] / "rollouts/trl_examples.py"


@pytest.fixture
def spec(request: pytest.FixtureRequest) -> str:
    """Return the name of the example in a recipe."""
    return f"{EXAMPLES}:{request.param}"


@pytest.fixture
def schemas(spec: str, tmp_path: Path) -> dict[str, Any]:
    """Describe the methods of the example."""
    return describe_tools(ScriptArguments(environment=spec, dataset_name="x").__getattribute__, tmp_path)


def read_rows(spec: str) -> Dataset:
    """Return the dataset of empty prompts."""
    args = ScriptArguments(environment=spec, dataset_name=RESET, environment_episodes=4, reward_funcs=["environment"])
    return load_prompts(args, smoke.build_tokenizer()).dataset


@pytest.mark.parametrize("spec", ["Increment", "make_increment"], indirect=True)
def test_an_environment_may_make_its_prompts_and_come_from_a_function(
    make: Make,  # noqa: F811
    schemas: dict[str, Any],
    spec: str,
) -> None:
    assert list(map(name_of, schemas.values())) == ["increment"]

    def count(row: int, turn: int) -> str:
        """Count to the target of the prompt in episodes 0 and 1, and too far in the others."""
        (question,) = trainer.source.played[row].opening
        target = int(re.findall(r"by (\d)\.", question["content"])[0])
        return "done" if turn else written("increment", step=target + (row > 1))

    trainer = make(count, read_rows(spec), environment=spec)
    generate(trainer)
    prompts = [episode.opening[-1]["content"] for episode in trainer.source.played]
    assert all(re.fullmatch(r"Increment the counter by \d\.", prompt) for prompt in prompts) and len(set(prompts)) > 1
    assert trainer.rewards_BR[:, 0].tolist() == [1.0, 1.0, 0.0, 0.0]
    assert trainer.rewards_BR[:, 1].tolist() == [float(results(trainer, row)[0]) for row in range(4)]


@pytest.mark.parametrize("spec", ["Target"], indirect=True)
def test_reset_gets_the_columns_of_a_row_and_get_reward_may_be_async(make: Make, spec: str) -> None:  # noqa: F811
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "Count."}], "target": 3}] * 2)
    trainer = make(lambda row, turn: "done" if turn else written("increment", step=row), rows, environment=spec)
    generate(trainer)
    assert trainer.rewards_BR[:, 0].tolist() == [0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("spec", ["Board"], indirect=True)
def test_a_game_that_has_ended_raises_errors_that_the_policy_reads(make: Make, spec: str, tmp_path: Path) -> None:  # noqa: F811
    move = written("move", direction="left")
    trainer = make(lambda row, turn: move if turn < 2 else "done", environment=spec, reward_funcs=["math_verify"])
    generate(trainer)
    assert results(trainer, 0) == ["score=4 [4] done=True", "Error: ValueError: Game over."]
    assert trainer._metrics["train"]["rewards/totals/mean"] == [4.0]
    assert load_reward(f"{EXAMPLES}:read_score", None) is not None  # it has no parameter ``completions``


def test_a_recipe_with_prompts_of_reset_passes_the_check(read: Any, tmp_path: Path) -> None:
    keys = {"dataset_name": RESET, "reward_funcs": ["environment"], "max_tool_calls": 2, "environment_episodes": 24}
    evaluation = {"eval_strategy": "steps", "eval_steps": 2, "environment_eval_episodes": 4}
    assert check(read(**keys, **evaluation, environment=f"{EXAMPLES}:Increment"), {}) == []
    assert check(read(**keys, environment=f"{EXAMPLES}:make_increment"), {}) == []
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"problem": [{"role": "user", "content": ""}]}\n' * 24)
    own_rows = {name: keys[name] for name in ("reward_funcs", "max_tool_calls")} | {"dataset_name": str(rows)}
    assert check(read(**own_rows, environment=f"{EXAMPLES}:Increment"), {}) == []
    messages = [problem.what for problem in check(read(dataset_name=RESET, reward_funcs=["format_tags"]), {})]
    assert any("for an environment of TRL whose reset returns the prompt" in message for message in messages)
