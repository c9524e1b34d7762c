"""Keys of other tools: translated to recipe keys, noted, or rejected with a replacement."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_recipes.errors import Problem
from grpo_recipes.recipe import merge_recipe
from grpo_recipes.recipe.check import check
from grpo_recipes.recipe.converters import (
    ALIASES,
    HARMLESS,
    UNREAD_VARIABLES,
    by_value,
    meaning_of,
    names,
    nearest,
    other_rewards,
    recipe_keys,
    reward_names,
)
from grpo_recipes.recipe.document import Value
from grpo_recipes.recipe.keys import OWNED_KEYS, READ_VARIABLES, SHELL_VARIABLES, catalogue, environment_keys
from grpo_recipes.recipe.registry import rewards

OTHERS = Path(__file__).with_name("options_elsewhere.txt")  # options of TRL, transformers, PEFT, accelerate and vLLM


def translated(**keys: object) -> tuple[dict[str, object], list[Problem], list[str]]:
    """Translate one layer. Return its keys of the catalogue, its problems and its notes."""
    problems: list[Problem] = []
    notes: list[str] = []
    layer = [(key, Value(value, f"recipe.yaml:{line}")) for line, (key, value) in enumerate(keys.items(), 1)]
    return {key: raw.value for key, raw in recipe_keys(layer, problems, notes).items()}, problems, notes


def fix(**key: object) -> str:
    """Return the fix of the only problem of this key."""
    (problem,) = translated(**key)[1]
    return problem.fix


def test_keys_of_the_catalogue_pass_as_they_are() -> None:
    assert translated(seed=1, beta=0.1) == ({"seed": 1, "beta": 0.1}, [], [])


@pytest.mark.parametrize(("name", "key"), ALIASES.items())
def test_another_name_is_read_as_its_key_and_noted(name: str, key: str) -> None:
    assert translated(**{name: 0.5}) == ({key: 0.5}, [], [f"recipe.yaml:1: '{name}' is read as {key}"])


def test_every_other_name_is_refused_at_its_place_and_gives_nothing() -> None:
    harmless = {name for name, values in HARMLESS.items() if values == "*"}
    for name in {*names(), *OWNED_KEYS, "seeed", "env"} - harmless:
        keys, (problem,), notes = translated(seed=1, **{name: "x"})
        assert (keys, problem.where, notes) == ({"seed": 1}, "recipe.yaml:2", [])
        assert f"'{name}'" in problem.what and problem.fix


@pytest.mark.parametrize(
    ("name", "usual", "other"),
    [
        ("do_eval", False, True),
        ("do_train", True, False),
        ("logging_strategy", "steps", "epoch"),
        ("save_safetensors", True, False),
        ("remove_unused_columns", False, True),
        ("vllm_device", "auto", "cuda:7"),
        ("packing", False, True),
        ("deepspeed", None, "zero3.json"),
        ("logging_steps", 10, "often"),
    ],
)
def test_what_asks_for_what_happens_anyway_is_noted_and_its_opposite_refused(name, usual, other) -> None:
    keys, problems, (note,) = translated(**{name: usual})
    assert (keys, problems) == ({}, []) and note.startswith(f"recipe.yaml:1: {name}") and "changes nothing: " in note
    keys, problems, notes = translated(**{name: other})
    assert not notes and (problems or keys)


@pytest.mark.parametrize("name", ["output_dir", "overwrite_output_dir", "logging_first_step"])
def test_what_cannot_change_a_run_is_noted_whatever_its_value(name) -> None:
    for value in (True, False, "data/x", None):
        keys, problems, (note,) = translated(**{name: value})
        assert (keys, problems) == ({}, []) and name in note


@pytest.mark.parametrize(("value", "scale"), [(True, "group"), (False, "none"), ("true", "group"), ("batch", "batch")])
def test_scale_rewards_takes_trls_booleans(value, scale) -> None:
    assert translated(scale_rewards=value) == ({"scale_rewards": scale}, [], [])


def test_save_steps_may_be_a_share_of_all_steps(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    for text, right in (("0.1", True), ("1", True), ("50", True), ("2.5", False), ("0", False)):
        path.write_text(f"model_name_or_path: a/b\ndataset_name: a/b\nsave_steps: {text}\n")
        recipe, problems = merge_recipe(path)
        assert (not [*problems, *check(recipe, {})]) is right, text


def test_a_fix_has_the_users_own_value() -> None:
    assert fix(torch_dtype="float16") == "write dtype: float16"
    assert fix(warmup_ratio=0.05) == "write warmup_steps: 0.05"
    assert fix(dataset_configs=["all"]) == "write dataset_config: all"
    assert fix(eval_every=50) == "write eval_strategy: steps and eval_steps: 50"
    assert fix(hub_model_revision="v1") == "write hub_revision: v1"
    assert fix(lr="hf_" + "a" * 30) == "write learning_rate", "no secret is repeated"


@pytest.mark.parametrize(
    ("names_", "key"),
    [
        ("model base_model actor_rollout_ref.model.path", "model_name_or_path"),
        ("lr actor_rollout_ref.actor.optim.lr trainer.optim.lr", "learning_rate"),
        ("use_lora", "use_peft"),
        ("epochs trainer.total_epochs", "num_train_epochs"),
        ("max_tokens data.max_response_length max_new_tokens", "max_completion_length"),
        ("group_size actor_rollout_ref.rollout.n orchestrator.rollouts_per_example", "num_generations"),
        ("kl_coef actor.kl_loss_coef", "beta"),
    ],
)
def test_names_of_other_projects_mean_keys(names_, key) -> None:
    for name in names_.split():
        known = meaning_of(name)
        assert known is not None and list(known.sets) == [key], name


@pytest.mark.parametrize("name", ["extends", "inherits"])
def test_a_name_for_building_on_another_recipe_is_answered_with_base(name: str) -> None:
    assert fix(**{name: "other.yaml"}) == "write base: FILE, the recipe that this one builds on"


def test_a_name_of_another_part_is_not_taken_for_ours() -> None:
    for name in ("critic.optim.lr", "rollout.val_kwargs.temperature", "eval.max_tokens", "reward_model.model.path"):
        assert meaning_of(name) is None


@pytest.mark.parametrize("name", ["batch_size", "gpus", "wandb", "vllm_device", "code_eval_test_batch_size"])
def test_a_name_without_one_key_is_answered_with_what_to_do(name) -> None:
    told = fix(**{name: 8})
    assert told == names()[name].fix and "per_device_eval_batch_size" not in told


def test_no_option_of_another_program_is_corrected_to_a_key_of_another_meaning() -> None:
    options = OTHERS.read_text().split()
    assert len(options) > 350
    suggested = {name: close for name in options if (close := nearest(name)) in catalogue()}
    assert suggested == {"master_port": "main_process_port"}


def test_names_have_one_meaning_and_keys_that_exist() -> None:
    refused = [*names(), *OWNED_KEYS, *ALIASES]
    assert len(refused) == len(set(refused)) and not set(refused) & set(catalogue())
    assert {key for row in names().values() for key in row.sets} | set(ALIASES.values()) <= set(catalogue())
    assert all(row.sets or row.fix for row in names().values())
    variables = [*environment_keys(), *READ_VARIABLES, *SHELL_VARIABLES]
    assert len({*variables, *UNREAD_VARIABLES}) == len(variables) + len(UNREAD_VARIABLES)
    assert set(reward_names().values()) <= set(rewards())
    assert not set(reward_names()) & {*rewards(), *other_rewards(True), *other_rewards(False)}


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("learning_rte", "learning_rate"),
        ("num_generation", "num_generations"),
        ("evaluation_strateg", "evaluation_strategy"),
        ("xyzzyx", None),
        ("rouge_weight", None),
    ],
)
def test_the_nearest_key_of_a_typo(typo, meant):
    assert nearest(typo) == meant


def told(folder: Path, text: str) -> list[str]:
    path = folder / "theirs.yaml"
    path.write_text(text)
    recipe, problems = merge_recipe(path)
    return list(map(str, [*problems, *check(recipe, {})]))


def test_a_recipe_of_another_project_is_answered_with_the_command_that_translates_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    head = "model_name_or_path: a/b\ndataset_name: a/b\n"
    messages = told(tmp_path, head + "torch_dtype: bfloat16\nwarmup_ratio: 0.1\nhub_model_revision: v1\n")
    assert messages[-1].endswith("Fix: grpo new my-theirs.yaml --from theirs.yaml translates it")
    assert len(messages) == 4
    assert len(told(tmp_path, head + "torch_dtype: bfloat16\n")) == 1, "one wrong key does not mean another project"


def test_a_reward_of_another_project_is_answered_with_ours_or_why_there_is_none(tmp_path):
    head = "model_name_or_path: a/b\ndataset_name: a/b\nreward_funcs: "
    assert told(tmp_path, head + "[accuracy]")[0].endswith("unknown reward 'accuracy'. Fix: write math_verify")
    assert "Fix: remove it (it needs the graders of its contest" in told(tmp_path, head + "[ioi_code]")[0]
    assert told(tmp_path, head + "[math_verfy]")[0].endswith("Fix: write math_verify")


@pytest.mark.parametrize("name", ["weight_sync", "weight_bridge_mode"])
@pytest.mark.parametrize(
    ("mode", "bridge", "adapter"),
    [
        ("none", "restart", {}),
        ("shared_vllm", "shared", {}),
        ("lora_only", "lora", {"use_peft": True}),
        ("lora_restart", "restart", {"use_peft": True}),
        ("file", "file", {}),
    ],
)
def test_the_modes_of_atropos_example_trainer_are_bridges(name, mode, bridge, adapter) -> None:
    keys, problems, notes = translated(**{name: mode})
    assert (keys, problems) == ({"weight_sync": bridge, **adapter}, [])
    assert len(notes) == (name != "weight_sync")


@pytest.mark.parametrize(("name", "value"), [("single_copy", True), ("vllm_config_path", "bridge.json")])
def test_the_names_of_their_single_copy_point_to_the_bridge(name, value) -> None:
    told = fix(**{name: value})
    assert "write weight_sync: shared" in told and told == names()[name].fix
    assert by_value("single_copy", True) == {"weight_sync": "shared"}


def test_a_mode_of_an_adapter_does_not_overrule_what_is_said_of_it() -> None:
    keys, _, _ = translated(use_peft=False, weight_sync="lora_restart")
    assert keys == {"use_peft": False, "weight_sync": "restart"}
