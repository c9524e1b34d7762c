"""`grpo keys`."""

from __future__ import annotations

import json

import pytest

from grpo_recipes import cli
from grpo_recipes.paths import find_code_root
from grpo_recipes.recipe.keys import READ_VARIABLES, SHELL_VARIABLES, catalogue, environment_keys, nested_catalogue
from grpo_recipes.recipe.objectives import NAMED_OBJECTIVES
from grpo_recipes.recipe.registry import benchmarks
from grpo_recipes.recipe.rules import unsupported_keys


def list_keys(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert cli.main(["keys", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["keys", *arguments]) == 2
    return capsys.readouterr().err


def test_every_key_is_listed(capsys):
    nested = {f"{path}.{name}" for path, names in nested_catalogue().items() for name in names}
    assert list_keys(capsys).keys() == catalogue().keys() | nested


def test_a_word_is_looked_for_in_names_and_meanings(capsys):
    matches = list_keys(capsys, "benchmark")
    assert {"benchmarks", "benchmark_samples"} <= matches.keys() < catalogue().keys()
    assert "dataset_mixture.datasets.weight" in list_keys(capsys, "WEIGHT")
    assert "accelerator" in list_keys(capsys, "accelerate")


def test_a_key_is_printed_with_type_limits_default_and_class(capsys):
    assert cli.main(["keys", "benchmark_samples"]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == "benchmark_samples  (int >= 1 <= 65536, default 1, ScriptArguments)"
    assert second.startswith("    Completions of each benchmark problem")
    assert cli.main(["keys", "reward_isolation"]) == 0
    assert "(completion | none, default" in capsys.readouterr().out


def test_without_a_word_each_key_is_one_row_below_its_topic_the_most_important_first(capsys):
    assert cli.main(["keys"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith("  ")]
    nested = sum(map(len, nested_catalogue().values()))
    assert len(rows) == len(catalogue().keys() - unsupported_keys()) + nested
    assert lines[0] == "Model" and lines[1].split()[:2] == ["model_name_or_path", "null"]
    (learning_rate,) = (row for row in rows if row.split()[0] == "learning_rate")
    assert learning_rate.split()[1:] == ["1e-06", "The", "initial", "learning", "rate", "for", "AdamW."]


def test_other_matches_are_rows_and_rejected_names_one_line(capsys):
    assert cli.main(["keys", "lr"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["grpo: for 'lr' write learning_rate", "learning_rate  (float >= 0, default 1e-06, GRPOConfig)"]
    assert sum("lr_schedule" in line for line in lines) == 3  # lr_scheduler_kwargs, lr_scheduler_type, rejected names
    assert lines[-1].startswith("Rejected names of other tools: lr_decay_style, lr_schedule, ")
    assert cli.main(["keys", "policy_lr"]) == 0  # the command that the line names
    assert capsys.readouterr().out.startswith("grpo: for 'policy_lr' write learning_rate\n")


def test_the_row_of_a_key_shows_the_sentence_with_the_word(capsys):
    assert cli.main(["keys", "temperature"]) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["loss_type"])
    assert "sapo_temperature_*" in row and row.split()[1] == '"dapo"'


def test_variables(capsys):
    assert list_keys(capsys, "--env").keys() == {
        *environment_keys(),
        *READ_VARIABLES,
        *SHELL_VARIABLES,
    }
    assert list_keys(capsys, "vllm_port", "--env").keys() == {"VLLM_PORT"}
    assert "nothing in grpo keys --env" in refused(capsys, "xyzzy", "--env")


def test_benchmarks(capsys):
    assert list_keys(capsys, "--benchmarks").keys() == benchmarks().keys()
    assert list_keys(capsys, "aime", "--benchmarks").keys() == {"aime24", "aime25"}


def test_objectives_are_listed_with_their_keys_and_papers(capsys):
    objectives = list_keys(capsys, "objective")
    assert cli.main(["keys", "objectives"]) == 0
    title, *lines, keys = capsys.readouterr().out.splitlines()
    assert title == "Objectives" and len(lines) == len(objectives)
    (rloo,) = (line for line in lines if line.split()[0] == "RLOO")
    assert "  advantage_estimator: rloo, loss_type: dr_grpo  " in rloo and rloo.endswith(
        "(https://arxiv.org/abs/2402.14740)"
    )
    names = "loss_type, advantage_estimator, teacher_model_name_or_path, maxent_objective"
    assert keys.endswith(f"keys {names} describes the keys")
    for key in ("loss_type", "advantage_estimator", "maxent_objective"):
        chosen = {objective["keys"].get(key, "group") for objective in objectives.values()}
        assert chosen >= set(catalogue()[key]["choices"]), key


@pytest.mark.parametrize("name", NAMED_OBJECTIVES)
def test_every_objective_can_be_trained(name):
    flags = [word for key, value in NAMED_OBJECTIVES[name].keys.items() for word in (f"--{key}", str(value))]
    assert cli.main(["check", str(find_code_root() / "recipes/smoke/grpo.yaml"), *flags]) == 0


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("leraning_rate", "try learning_rate"),
        ("logging_dir", "export TENSORBOARD_LOGGING_DIR"),
        ("output_dir", "set run_root and run_name"),
        ("xyzzyx", "no key matches. Fix: see grpo keys"),
    ],
)
def test_a_word_that_no_key_has(capsys, word, fix):
    assert fix in refused(capsys, word)


def test_the_key_itself_comes_first_then_names_then_meanings(capsys):
    matches = list(list_keys(capsys, "beta"))
    assert matches[0] == "beta" and matches[1:5] == ["kl_beta_min", "maxent_beta", "adam_beta1", "adam_beta2"]
    assert next(iter(list_keys(capsys, "VLLM_MODE"))) == "vllm_mode"
    with_word = ["seed" in name for name, entry in list_keys(capsys, "seed").items() if "refused" not in entry]
    assert with_word == sorted(with_word, reverse=True) and not all(with_word)


def test_names_that_are_refused_are_told_as_such_with_what_to_write(capsys):
    matches = list_keys(capsys, "output")
    assert matches["output_dir"]["refused"] is True and "run_root" in matches["output_dir"]["help"]
    assert "refused" not in matches["vllm_structured_outputs_regex"] and list(matches)[-1] == "overwrite_output_dir"
    assert cli.main(["keys", "output"]) == 0
    assert "Rejected names of other tools: output_dir, " in capsys.readouterr().out.splitlines()[-1]
    assert "set run_root and run_name" in refused(capsys, "output_dir")  # the command that the line names


@pytest.mark.parametrize(
    ("word", "key"), [("torch_dtype", "dtype"), ("lr", "learning_rate"), ("epochs", "num_train_epochs")]
)
def test_a_name_of_another_project_shows_the_key_to_write(capsys, word, key):
    assert cli.main(["keys", word]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == f"grpo: for '{word}' write {key}" and second.startswith(f"{key}  (")


def test_another_name_of_a_key_shows_the_key(capsys):
    assert cli.main(["keys", "init_kl_coeff"]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == "grpo: 'init_kl_coeff' is an alias of beta" and second.startswith("beta  (float")
    assert next(iter(list_keys(capsys, "gen_temperature"))) == "temperature"


@pytest.mark.parametrize(
    ("word", "keys"),
    [
        ("wandb", {"report_to", "wandb_project", "wandb_entity"}),
        ("tensorboard", {"report_to"}),
        ("think", {"chat_template_kwargs"}),
        ("lora", {"use_peft", "lora_r"}),
        ("deepspeed", {"accelerator"}),
        ("curriculum", {"shuffle_dataset"}),
    ],
)
def test_common_words_find_their_keys(capsys, word, keys):
    """M5: wandb, tensorboard and think found nothing useful."""
    matches = list_keys(capsys, word)
    assert keys <= matches.keys()
    refused = [index for index, entry in enumerate(matches.values()) if "refused" in entry]
    assert not refused or refused[0] >= len(keys), "keys come before names that are refused"


def test_a_word_is_not_found_inside_others(capsys):
    """M5: a word matches at the beginning of a word."""
    assert "no key matches" in refused(capsys, "hema")
    assert all("ate" not in name.split("_") for name in list_keys(capsys, "rate"))
