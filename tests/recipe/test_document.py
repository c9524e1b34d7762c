"""Wrong recipe files and values, each rejected in one line, and bases, file by file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from grpo_recipes.errors import ConfigError
from grpo_recipes.recipe import merge_recipe, read_recipe


def refusal(path: Path, text: str, *flags: str) -> str:
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_recipe(path, flags)
    (problem,) = refused.value.problems
    assert "\n" not in str(problem)
    return str(problem)


LAUGHS = "model_init_kwargs:\n  a: &a [l, l, l, l, l, l, l, l, l, l]\n" + "".join(
    f"  {name}: &{name} [{', '.join(['*' + before] * 10)}]\n" for before, name in zip("abcdefg", "bcdefgh", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("benchmarks: &x [*x]", "nested too deeply, or in themselves"),
        ("seed: 1\nmodel_init_kwargs: &x {a: *x}", "nested too deeply, or in themselves"),
        ("&x\nmodel_init_kwargs: *x", "nested too deeply, or in themselves"),
        (LAUGHS, "recipe.yaml: its anchors and aliases expand to more than 100,000"),
        ("model_init_kwargs: " + "[" * 3000 + "]" * 3000, "nested too deeply"),
        ("seed: 1\nrun_name: !!bool maybe", "recipe.yaml:2: not valid YAML ('maybe' cannot be read as bool)"),
        ("seed: 1\nmodel_init_kwargs:\n  a:\n    - !!bool maybe", "recipe.yaml:4: not valid YAML ('maybe' cannot be"),
        ("seed: !!int many", "recipe.yaml:1: not valid YAML ('many' cannot be read as int)"),
        ("seed: !!timestamp now", "'now' cannot be read as timestamp"),
        ("seed: " + "9" * 5000, "cannot be read as int"),
        ("x: &x {seed: 1}\n<<: *x\n", "recipe.yaml:2: '<<' is not supported. Fix: use base: FILE"),
        ("seed: 1\n---\nseed: 2\n", "not valid YAML (but found another document)"),
    ],
    ids=["list", "map", "whole", "laughs", "deep", "bool", "nested", "int", "timestamp", "long", "merge", "documents"],
)
def test_what_yaml_allows_and_no_recipe_needs_is_refused(tmp_path: Path, text: str, message: str) -> None:
    assert message in refusal(tmp_path / "recipe.yaml", text)


def test_anchors_of_ordinary_size_are_read(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("model_init_kwargs:\n  a: &a {b: [1, 2]}\n  c: *a\n  d:\n    <<: *a\n    e: 3\n")
    inner = {"b": [1, 2]}
    assert read_recipe(path)["model_init_kwargs"] == {"a": inner, "c": inner, "d": {**inner, "e": 3}}


def test_a_file_too_large_for_a_recipe_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    refusal(path, "x")
    os.truncate(path, 2 << 30)
    with pytest.raises(ConfigError, match="has 2147 MB, but a recipe has at most 1 MB"):
        read_recipe(path)


@pytest.mark.parametrize("name", ["a" * 300, "a/" * 3000], ids=["name", "path"])
def test_a_base_with_a_name_too_long_for_a_file_is_not_there(tmp_path: Path, name: str) -> None:
    assert "recipe 'a" in refusal(tmp_path / "recipe.yaml", f"base: {name}\n")


def test_a_long_chain_of_bases_is_not_called_a_circle(tmp_path: Path) -> None:
    for number in range(9):
        (tmp_path / f"b{number}.yaml").write_text(f"base: b{number + 1}.yaml\n")
    (tmp_path / "b9.yaml").write_text("seed: 7\n")
    (tmp_path / "recipe.yaml").write_text("base: b0.yaml\n")
    assert read_recipe(tmp_path / "recipe.yaml")["seed"] == 7


def test_a_base_may_use_another_name_of_a_key(tmp_path: Path) -> None:
    (tmp_path / "root.yaml").write_text("init_kl_coeff: 0.5\ntemperature: 0.5\n")
    path = tmp_path / "recipe.yaml"
    path.write_text("base: root.yaml\nbeta: 0.1\ngen_temperature: 0.7\n")
    recipe = read_recipe(path)
    assert (recipe["beta"], recipe.source("beta")) == (0.1, "recipe.yaml:2")
    assert (recipe["temperature"], recipe.source("temperature")) == (0.7, "recipe.yaml:3")


def test_a_date_or_time_is_the_text_that_was_written(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    for date in ("2024-01-01", "2024-13-45", "12:30", "12:30:45.5"):
        path.write_text(f"run_name: {date}\n")
        recipe = read_recipe(path)
        assert recipe["run_name"] == date
        frozen = tmp_path / "frozen.yaml"
        frozen.write_text(recipe.as_yaml())
        assert read_recipe(frozen)["run_name"] == date


HUGE = "9" * 400


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        (f"seed: {HUGE}", [], "seed: expected an integer, got"),
        (f"learning_rate: {HUGE}", [], "expected a finite number"),
        ("learning_rate: !!binary MQ==", [], "learning_rate: expected a number, got b'1'"),
        ("seed: !!binary MQ==", [], "seed: expected an integer, got b'1'"),
        (f"seed: {'a' * 90}", [], f"seed: expected an integer, got '{'a' * 90}'"),
        (f"seed: {'a' * 900}", [], f"seed: expected an integer, got '{'a' * 99}"),
        ("learning_rate: .inf", [], "expected a finite number"),
        ("", ["--learning_rate", "1e400"], "expected a finite number"),
        ("", ["--max_grad_norm=-inf"], "expected a finite number"),
        ("reward_weights: [.inf]", [], "expected a finite number"),
        ("", ["--seed", HUGE], "an integer"),
        ("seed: 4294967296", [], "at most 4294967295"),
        ('run_name: "a\\0b"', [], "control character"),
        ('run_name: "\\ud800"', [], "control character"),
        (
            "dataset_mixture: {datasets: a/b}",
            [],
            "datasets: expected a list of mappings, got 'a/b'",
        ),
        ("dataset_mixture: {datasets: {id: a/b}}", [], "expected a list of mappings, got {'id': 'a/b'}"),
        ("", ["--model_init_kwargs", "[" * 2000], "expected a mapping"),
        ("", ["--model_init_kwargs", "{a: !!bool x}"], "expected a mapping"),
        ("", ["--accelerator_config", "!!timestamp x"], "expected a mapping"),
    ],
)
def test_a_value_that_no_type_holds_is_refused_in_one_short_line(
    tmp_path: Path, text: str, flags: list[str], message: str
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_recipe(path, flags)
    (problem,) = refused.value.problems
    assert message in str(problem) and len(str(problem)) < 300


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("seed:", "set seed to an integer, e.g. 42, or remove it"),
        ("dataset_mixture: {datasets: null}", "set dataset_mixture.datasets to a list of mappings, or remove it"),
        ("vllm_mode: null", "set vllm_mode to one of server, colocate, or remove it"),
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
    with pytest.raises(ConfigError, match=r"expected (at least|at most) "):
        read_recipe(tmp_path / "recipe.yaml", [flag])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("seed: 042", "YAML reads 042 as an octal number"),
        ("lr_scheduler_kwargs: {min_lr: 1e-7}", "YAML reads 1e-7 as a string"),
        ("chat_template_kwargs: {enable_thinking: no}", "YAML reads no as false"),
        ("run_name: 1.10", "YAML reads 1.10 as the number 1.1"),
        ("model_revision: 0123456", "YAML reads 0123456 as the number 42798"),
        ("lora_target_modules: [q_proj, 1_0]", "YAML reads 1_0 as the number 10"),
    ],
)
def test_a_word_that_yaml_reads_otherwise_than_it_looks_is_told(line, message, tmp_path):
    (tmp_path / "recipe.yaml").write_text(f"{line}\n")
    assert any(problem.what.startswith(message) for problem in merge_recipe(tmp_path / "recipe.yaml")[1])


def test_a_number_that_yaml_does_not_change_may_be_the_value_of_a_text(tmp_path):
    (tmp_path / "recipe.yaml").write_text("run_name: 7\nmodel_revision: 1.5\nwandb_project: '1.10'\n")
    recipe = read_recipe(tmp_path / "recipe.yaml")
    assert (recipe["run_name"], recipe["model_revision"], recipe["wandb_project"]) == ("7", "1.5", "1.10")
