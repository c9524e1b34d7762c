"""Classes for TRL's ``environment_factory`` in a real trainer: their methods are tools, and their state is kept."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from grpo_recipes import smoke
from grpo_recipes.errors import ConfigError
from grpo_recipes.extensions.environments.tools import describe_tools, name_of
from grpo_recipes.extensions.environments.trl_environments import SavedEnvironment, _dump
from grpo_recipes.extensions.environments.trl_episodes import TRLEpisodes
from grpo_recipes.recipe.configs import GRPOConfig, ScriptArguments
from grpo_recipes.recipe.user_code import load_object
from grpo_recipes.rewards.load import EpisodeReward, load_rewards
from grpo_recipes.rewards.score import RewardWrapper
from grpo_recipes.trainers.grpo import GRPOTrainer

from .test_tools import TEMPLATE, Script, follow_script, generate, written
from .tiny_training import DESCENT, SUMS, as_dataset

SHOP = Path(__file__).parents[1] / "rollouts/trl_shop.py"
Make = Callable[..., GRPOTrainer]
seen: list[Any] = []  # environments that the reward ``totals`` got
sent: list[str] = []  # and their texts


def totals(completions: list[Any], environments: list[str], **columns: Any) -> list[float]:
    """Score the totals of the environments, as they arrive in another process."""
    seen[:], sent[:] = pickle.loads(pickle.dumps(environments)), map(str, environments)
    return [environment.total for environment in seen]


@pytest.fixture(scope="module")
def schemas(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Describe the tools once, because it imports transformers in another process."""
    recipe = ScriptArguments(environment=f"{SHOP}:Shop", dataset_name="x")
    return describe_tools(recipe.__getattribute__, tmp_path_factory.mktemp("copies"))


@pytest.fixture
def make(tmp_path: Path, model: str, schemas: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Make a trainer with the shop whose policy follows a script."""
    sources: list[TRLEpisodes] = []
    monkeypatch.setattr("grpo_recipes.extensions.environments.tool_episodes.describe_tools", lambda *_: schemas)

    def make_it(script: Script, rows: Any = SUMS, **keys: Any) -> GRPOTrainer:
        args = GRPOConfig(output_dir=str(tmp_path / "checkpoints"), **DESCENT, max_completion_length=600)
        defaults = {"environment": f"{SHOP}:Shop", "dataset_name": "x", "reward_funcs": ["environment"]}
        source = TRLEpisodes(ScriptArguments(**defaults | {"environment_workers": 1} | keys), args, tmp_path)
        sources.append(source)
        tokenizer = smoke.build_tokenizer()
        tokenizer.chat_template = TEMPLATE
        trainer = GRPOTrainer(
            model=model, reward_funcs=[EpisodeReward(), RewardWrapper(totals, "t.py:totals", "totals")], args=args,
            train_dataset=rows if isinstance(rows, Dataset) else as_dataset(rows), processing_class=tokenizer,
            run_dir=tmp_path, source=source,
            reward_max_no_verdict=1.0,
        )  # fmt: skip
        follow_script(trainer, script)
        return trainer

    yield make_it
    for source in sources:
        source.close()


def results(trainer: GRPOTrainer, row: int) -> list[str]:
    return [message["content"] for turn in trainer.source.played[row].turns[1:] for message in turn.messages]


def test_methods_are_tools_that_share_the_state_of_an_episode(
    make: Make, schemas: dict[str, Any], tmp_path: Path
) -> None:
    assert sorted(map(name_of, schemas.values())) == ["buy", "misbehave"]
    buy, both = written("buy", item="fig"), written("buy", item="pear") + written("buy", item="fig", count=2)
    scripts = [[both, buy, "done"], [buy, "done"], ["done"], [written("get_reward"), "done"]]
    trainer = make(lambda row, turn: scripts[row][turn], environment_args={"currency": "USD"})
    generate(trainer)
    source = trainer.source
    assert [results(trainer, row) for row in range(3)] == [["3", "11", "15"], ["4"], []]
    assert results(trainer, 3) == ["Error: unknown tool 'get_reward'; the tools are buy, misbehave"]
    assert all(episode.opening[-1]["content"].endswith(" in USD") for episode in source.played)
    assert [episode.done for episode in source.played] == [True] * 4
    metrics = trainer._metrics["train"]
    assert metrics["rewards/totals/mean"] == [pytest.approx((15 + 4) / 4)]
    rewards = [source.reward(episode) for episode in source.played]
    lucks = [environment.luck for environment in seen]
    assert len(set(lucks)) == 4  # each episode draws its own random numbers
    assert rewards == [
        pytest.approx(total / 10 + luck / 1000) for total, luck in zip((15, 4, 0, 0), lucks, strict=True)
    ]
    assert metrics["episodes/tool_calls"] == [1.25] and metrics["episodes/tool_failures"] == [0.25]
    assert type(seen[0]).__name__ == "Shop" and seen[0].prompt[-1]["role"] == "user"
    with pytest.raises(AttributeError, match="a reward can't get the attribute 'lock'"):
        seen[0].lock.acquire()
    assert str(tmp_path) not in "".join(sent)  # the random numbers of a reward depend on its arguments


@pytest.mark.parametrize(("how", "told"), [("die", "its process exited (code 3)"), ("sleep", "time limit")])
def test_a_turn_that_ends_its_process_does_not_count(make: Make, how: str, told: str) -> None:
    buy = written("buy", item="fig")
    turns = [buy, buy + written("misbehave", how=how), buy, "done"]
    trainer = make(
        lambda row, turn: turns[turn] if row == 0 else buy * (turn < 2) or "done",
        environment_timeout=2.0,
        environment_turn_length=150,
    )
    generate(trainer)
    assert results(trainer, 0) == ["4", f"Error: {told}", f"Error: {told}", "8"]
    assert [results(trainer, row) for row in range(1, 4)] == [["4", "8"]] * 3
    assert trainer._metrics["train"]["rewards/totals/mean"] == [8.0]
    assert trainer._metrics["train"]["episodes/unscored"] == [0.0]


def test_calls_beyond_a_limit_end_an_episode_with_its_state(make: Make) -> None:
    trainer = make(lambda row, turn: written("buy", item="fig"), max_tool_calls=2)
    generate(trainer)
    assert {episode.unfinished for episode in trainer.source.played} == {"max_tool_calls"}
    assert trainer._metrics["train"]["rewards/totals/mean"] == [8.0]


def test_an_episode_that_cannot_start_is_unscored(make: Make) -> None:
    trainer = make(lambda row, turn: "done")
    trainer.train_dataset = trainer.train_dataset.map(
        lambda row, index: {"answer": "broken"} if not index else {}, with_indices=True
    )
    output = generate(trainer, prompts=2)
    assert trainer.rewards_BR.isnan().all(dim=1).tolist() == [True] * 4 + [False] * 4
    assert trainer._metrics["train"]["episodes/unscored"] == [0.5]
    assert trainer.source.played[0].failed == "ValueError: no such shop"
    assert len(seen) == 4  # rewards are called without failed episodes
    assert output["advantages"][:4].tolist() == [0.0] * 4


def test_built_in_rewards_do_not_score_a_failed_episode(tmp_path: Path) -> None:
    keys = {"environment": f"{SHOP}:Shop", "dataset_name": "x", "reward_funcs": ["pure_accuracy_math"]}
    (reward,) = load_rewards(
        ScriptArguments(**keys), GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False), tmp_path
    )
    completions = [[{"role": "assistant", "content": "<answer>1</answer>"}]] * 2
    columns = {"prompts": ["?"] * 2, "answer": ["1"] * 2, "episode_failed": ["ValueError: no such shop", None]}
    assert reward(completions=completions, **columns) == [None, 1.0]
    assert reward.scores[0].reason == "ValueError: no such shop"


def test_attributes_in_slots_are_sent(tmp_path: Path) -> None:
    instance = load_object(f"{SHOP}:Slotted", tmp_path)()
    instance.total = 3
    saved = SavedEnvironment(json.dumps({"spec": f"{SHOP}:Slotted", "state": _dump(instance)}))
    saved.copies = tmp_path
    assert pickle.loads(pickle.dumps(saved)).total == 3


def test_classes_that_cannot_be_described_are_refused(tmp_path: Path) -> None:
    for name, told in (("Vague", "can't be described"), ("Silent", "has no method for the policy to call")):
        recipe = ScriptArguments(environment=f"{SHOP}:{name}", dataset_name="x")
        with pytest.raises(ConfigError, match=told):
            describe_tools(recipe.__getattribute__, tmp_path)
