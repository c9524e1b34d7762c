"""Rows without solutions: rewards get no argument for them, as in TRL."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_recipes.data import load_eval_prompts
from grpo_recipes.errors import ConfigError
from grpo_recipes.recipe.configs import GRPOConfig, ScriptArguments
from grpo_recipes.rewards.load import open_rewards

MINE = """
def columns_of(completions, **columns):
    return [float(len({"answer", "solution", "kind"} & columns.keys()))] * len(completions)

def optional(completions, solution=None):
    return [float(solution is None)] * len(completions)

def needs(completions, solution):
    return [1.0] * len(completions)

def plain(completions, kind):
    return [1.0] * len(completions)
"""
ROWS = [{"problem": "a", "kind": "x"}, {"problem": "a", "kind": "y"}, {"problem": "b", "kind": "x"}]


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, list[str]]:
    (tmp_path / "mine.py").write_text(MINE)
    return {"reward_funcs": [f"{tmp_path}/mine.py:columns_of", f"{tmp_path}/mine.py:optional"]}


@pytest.mark.parametrize("streaming", [False, True])
def test_a_dataset_without_solutions_gives_prompts(load, keys, streaming: bool) -> None:
    more = {"dataset_streaming": True, "max_train_prompts": 3} if streaming else {}
    prompts = load(ROWS, **keys, **more)
    assert set(prompts.dataset.column_names) == {"prompt", "kind"}
    assert len(prompts.dataset) == 2 and "1 equal to an earlier prompt and answer dropped" in str(prompts)


def test_an_evaluation_needs_no_solutions_either(write, tokenizer, keys) -> None:
    args = ScriptArguments(eval_dataset_name=write(ROWS), dataset_name="x", **keys)
    assert set(load_eval_prompts(args, tokenizer, 0).dataset.column_names) == {"prompt", "kind"}


def test_datasets_of_a_mixture_need_no_solutions_either(load, write, keys) -> None:
    entries = [{"id": write(ROWS, name="one")}, {"id": write([{"problem": "c", "kind": "z"}], name="two")}]
    prompts = load(dataset_mixture={"datasets": entries}, **keys)
    assert set(prompts.dataset.column_names) == {"prompt", "kind", "source"} and len(prompts.dataset) == 3


def test_a_reward_that_needs_solutions_rejects_rows_without_them(load, tmp_path, keys) -> None:
    with pytest.raises(ConfigError, match="has no column 'answer'"):
        load(ROWS, reward_funcs=[*keys["reward_funcs"], f"{tmp_path}/mine.py:needs"])


def test_rows_with_an_empty_solution_are_dropped_only_if_a_reward_may_read_it(load, tmp_path, keys) -> None:
    rows = [{"problem": "a", "answer": "1", "kind": "x"}, {"problem": "b", "answer": None, "kind": "x"}]
    assert load(rows, **keys).dataset["answer"] == ["1"]
    assert sorted(load(rows, reward_funcs=[f"{tmp_path}/mine.py:plain"]).dataset["answer"]) == ["", "1"]


@pytest.mark.parametrize("isolation", ["none", "completion"])
def test_rewards_get_no_argument_for_a_solution_that_is_not_there(tmp_path, keys, isolation: str) -> None:
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    settings = ScriptArguments(**keys, reward_isolation=isolation)
    for name, value in vars(settings).items():
        setattr(args, name, value)
    chat = [[{"role": "assistant", "content": "x"}]]
    with open_rewards(args, tmp_path) as (columns_of, optional):
        columns = {"completions": chat, "prompts": ["?"], "completion_ids": [[0]], "kind": ["x"]}
        assert (columns_of(**columns), optional(**columns)) == ([1.0], [1.0])
        assert (columns_of(**columns, answer=["1"]), optional(**columns, answer=["1"])) == ([3.0], [0.0])
