"""Values that no type of the catalogue can hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_recipes.errors import ConfigError
from grpo_recipes.recipe import read_recipe

HUGE = "9" * 400


@pytest.mark.parametrize(
    ("text", "flags", "said"),
    [
        (f"seed: {HUGE}", [], "'seed' is"),
        (f"learning_rate: {HUGE}", [], "is not finite"),
        ("learning_rate: .inf", [], "is not finite"),
        ("", ["--learning_rate", "1e400"], "is not finite"),
        ("", ["--max_grad_norm=-inf"], "is not finite"),
        ("reward_weights: [.inf]", [], "is not finite"),
        ("", ["--seed", HUGE], "a whole number"),
        ("seed: 4294967296", [], "above 4294967295"),
        ('run_name: "a\\0b"', [], "control character"),
        ('run_name: "\\ud800"', [], "control character"),
        ("", ["--model_init_kwargs", "[" * 2000], "where a mapping belongs"),
        ("", ["--model_init_kwargs", "{a: !!bool x}"], "where a mapping belongs"),
    ],
)
def test_it_is_refused_in_one_short_line(tmp_path: Path, text: str, flags: list[str], said: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_recipe(path, flags)
    (problem,) = refused.value.problems
    assert said in str(problem) and len(str(problem)) < 300


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("seed:", "write a whole number, or remove it"),
        ("dataset_mixture: {datasets: null}", "write a list of mappings, or remove it"),
        ("vllm_mode: null", "write one of server, colocate, or remove it"),
    ],
)
def test_what_to_write_in_place_of_nothing_is_said_in_words(tmp_path: Path, text: str, fix: str) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_recipe(tmp_path / "recipe.yaml")
    assert refused.value.problems[0].fix == fix


def test_lines_and_tabs_in_a_text_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text('system_prompt: "a\\tb\\nc"\n')
    assert read_recipe(path)["system_prompt"] == "a\tb\nc"


@pytest.mark.parametrize(
    "flag",
    [
        "--adam_beta1=2", "--adam_beta2=-1", "--weight_decay=-1", "--max_grad_norm=-1", "--warmup_steps=-1",
        "--top_k=-2", "--dataloader_num_workers=-1", "--repetition_penalty=0", "--steps_per_generation=0",
        "--generation_batch_size=0", "--num_generations_eval=0", "--epsilon_high=-1", "--ref_model_mixup_alpha=2",
        "--top_entropy_quantile=2", "--num_completions_to_print=-1", "--eval_steps=-1", "--num_train_epochs=-1",
        "--min_p=2",
    ],
)  # fmt: skip
def test_numbers_that_the_trainer_would_die_of_are_out_of_range(tmp_path: Path, flag: str) -> None:
    (tmp_path / "recipe.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"(below|above) "):
        read_recipe(tmp_path / "recipe.yaml", [flag])
