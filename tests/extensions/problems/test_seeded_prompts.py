"""Prompts from seeds: their order over steps and epochs, and an evaluation set without training prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from trl.trainer.utils import RepeatSampler

from grpo_recipes.data import load_eval_prompts, load_prompts
from grpo_recipes.data.prompts import load_first_problems
from grpo_recipes.errors import ConfigError
from grpo_recipes.recipe.configs import ScriptArguments


@pytest.mark.parametrize(("count", "prompts"), [(64, 4), (10, 4), (3, 8), (5, 5), (6, 4)])
def test_generation_i_has_the_seeds_of_its_place(tokenizer: Any, count: int, prompts: int) -> None:
    args = ScriptArguments(dataset_name="seeded:arithmetic", problem_seeds=count, problem_seed_start=70)
    dataset = load_prompts(args, tokenizer, prompts).dataset
    sampler = RepeatSampler(dataset, mini_repeat_count=2, batch_size=prompts, shuffle=False)

    rows = [*sampler, *sampler]  # two epochs
    seeds = dataset["problem_seed"]
    for generation in range(len(rows) // (2 * prompts)):
        chosen = rows[generation * 2 * prompts : (generation + 1) * 2 * prompts : 2]
        expected = [70 + (generation * prompts + place) % count for place in range(prompts)]
        assert [seeds[row] for row in chosen] == expected
    assert len(rows) // (2 * prompts) >= 2 and set(seeds) == set(range(70, 70 + count))


def test_a_resumed_run_repeats_the_stored_problems(
    tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = {"kind": "dataset", "id": "seeded:arithmetic", "revision": None, "path": "."}
    (tmp_path / "sources.json").write_text(json.dumps({"sources": [source]}))
    args = ScriptArguments(dataset_name="seeded:arithmetic", problem_seeds=10)
    first, second = (load_prompts(args, tokenizer, 7, run=tmp_path) for _ in range(2))
    (folder,) = (tmp_path / "prompts").iterdir()
    assert len(datasets.load_from_disk(folder)) == 10 and len(first.dataset) == 70
    assert first.dataset.to_list() == second.dataset.to_list() and str(first) == str(second)
    assert first.example == second.example
    assert capsys.readouterr().out.count("using the prompts in prompts/train-") == 1


def test_a_row_has_what_its_reward_needs(tokenizer: Any) -> None:
    args = ScriptArguments(dataset_name="seeded:sat", system_prompt="Think.", problem_seeds=3)
    prompts = load_prompts(args, tokenizer, 1)
    assert prompts.dataset.column_names == ["prompt", "answer", "clauses", "problem_seed"]
    assert prompts.dataset["prompt"][0][0] == {"role": "system", "content": "Think."}
    assert str(prompts).startswith("3 problems of seeded:sat (3 read")
    assert load_first_problems(args, 2)[0] == prompts.dataset.select(range(2)).to_list()


def test_an_evaluation_has_every_seed_of_its_own(tokenizer: Any) -> None:
    args = ScriptArguments(dataset_name="seeded:sat", eval_problem_seeds=5)
    held_out = load_eval_prompts(args, tokenizer, seed=3)
    assert held_out.dataset["problem_seed"][:] == [5000, 5001, 5002, 5003, 5004]
    assert str(held_out).startswith("evaluating on 5 problems of seeded:sat")


def test_a_problem_that_is_trained_on_is_not_evaluated_on(tokenizer: Any) -> None:
    keys = {"dataset_name": "seeded:countdown", "modebench_largest_number": 8, "problem_seeds": 20}
    args = ScriptArguments(**keys, eval_problem_seeds=20)
    trained = {str(prompt) for prompt in load_prompts(args, tokenizer, 4).dataset["prompt"]}
    held_out = load_eval_prompts(args, tokenizer, seed=3)
    assert 0 < len(held_out.dataset) < 20 and not trained & {str(prompt) for prompt in held_out.dataset["prompt"]}
    assert f"{20 - len(held_out.dataset)} copies of training problems left out" in str(held_out)


def test_a_problem_too_long_is_refused_and_not_left_out(tokenizer: Any) -> None:
    args = ScriptArguments(dataset_name="seeded:arithmetic", max_prompt_length=50)
    with pytest.raises(ConfigError, match="of 64 problems of 'seeded:arithmetic' are longer than max_prompt_length"):
        load_prompts(args, tokenizer, 4)
