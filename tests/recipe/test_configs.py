"""Compare the catalogue with its dataclasses, and parse a frozen recipe with TRL's parser."""

from __future__ import annotations

import dataclasses
import enum
import json
import subprocess
import sys
from pathlib import Path

import pytest

trl = pytest.importorskip("trl")

from grpo_recipes.recipe import configs, read_recipe  # noqa: E402
from grpo_recipes.recipe.converters import names  # noqa: E402
from grpo_recipes.recipe.keys import CATALOGUE_FILE, OWNED_KEYS, catalogue  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from make_keys import catalogue_content  # noqa: E402

ROOT = Path(__file__).parents[2] / "recipes"
RECIPES = sorted(path for path in ROOT.rglob("*.yaml") if path.parent != ROOT / "base")


def fields() -> set[str]:
    return {spec.name for config in configs.CONFIGS for spec in dataclasses.fields(config)}


def plain(value):
    return value.value if isinstance(value, enum.Enum) else value


def test_the_catalogue_file_is_what_the_dataclasses_say():
    generated = json.loads(json.dumps(catalogue_content()))
    assert json.loads(CATALOGUE_FILE.read_text()) == generated, "run make keys"


def test_owned_keys_are_fields_and_obsolete_ones_are_not():
    assert set(OWNED_KEYS) <= fields()
    assert not set(names()) & fields()


def test_every_field_is_in_the_catalogue_or_owned():
    assert {name for name in fields() if not name.startswith("_")} - set(OWNED_KEYS) == set(catalogue())


@pytest.mark.parametrize("table", [configs.RANGES, configs.TRL_CHOICES], ids=["ranges", "choices"])
def test_hand_kept_limits_are_of_existing_keys_and_in_the_catalogue(table):
    for key, limits in table.items():
        entry = catalogue()[key]
        if isinstance(limits, dict):
            assert {name: entry[name] for name in limits} == limits
        else:
            assert entry["choices"] == limits


def test_our_own_keys_are_told_apart_from_trls():
    added = {spec.name for spec in dataclasses.fields(configs.GRPOConfig)} - {
        spec.name for spec in dataclasses.fields(trl.GRPOConfig)
    }
    assert added == {
        "advantage_estimator", "dynamic_sampling", "dynamic_sampling_max_rounds",
        "early_stopping_patience", "prompts_per_step", "trim_padding", "padding_free", "ref_model_name_or_path",
        "teacher_model_name_or_path", "teacher_coef",
        "eval_temperature", "eval_top_p", "eval_max_completion_length", "eval_sampling_seed", "server_backend",
        "max_concurrent_requests", "weight_sync", "weight_guard", "weight_guard_tolerance", "seed_server",
        "server_request_timeout", "overlap_generation", "vllm_node", "vllm_gpu", "vllm_max_num_seqs", "wandb_project",
        "wandb_entity", "wandb_run_group", "report_samples", "show_completion_steps", "weight_sync_timeout",
        "server_restarts", "vllm_enforce_eager", "vllm_args", "vllm_data_parallel_size",
        "vllm_data_parallel_size_local",
        "server_stall_timeout", "stall_timeout", "max_requeues", "kl_target", "kl_horizon", "kl_ctl_step_size",
        "maxent_objective", "maxent_utility", "maxent_tau", "maxent_tau_lr", "maxent_tau_min", "maxent_tau_max",
        "maxent_tau_warmup_steps", "maxent_beta", "maxent_q_temperature", "maxent_q_epsilon",
        "maxent_length_normalize_ref", "maxent_length_normalize_policy", "maxent_policy_temperature",
        "maxent_policy_spread", "maxent_target_weight_entropy",
        "maxent_target_eff_rollouts", "maxent_target_ratio", "kl_beta_min",
    }  # fmt: skip


def parsed(frozen: Path, out: Path, *flags: str) -> dict[str, object]:
    """Parse a frozen recipe with TRL and the launcher's flags for a CPU machine. Return every field."""
    parser = trl.TrlParser(configs.CONFIGS, allow_abbrev=False)
    arguments = ["--config", str(frozen), "--output_dir", str(out), "--use_cpu", "true", "--bf16", "false"]
    arguments += flags
    values: dict[str, object] = {}
    for config in parser.parse_args_and_config(arguments):
        values |= {spec.name: getattr(config, spec.name) for spec in dataclasses.fields(config)}
    return values


# Values that the launcher sets, or that TRL derives from other keys.
DERIVED = {"bf16", "generation_batch_size", "steps_per_generation", "run_name"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_trl_reads_the_same_values_from_a_frozen_recipe(path, tmp_path):
    recipe = read_recipe(path, ["--reward_weights", *["0.5"] * len(read_recipe(path)["reward_funcs"])])
    frozen = tmp_path / "recipe.yaml"
    frozen.write_text(recipe.as_yaml())

    # The launcher computes a generation of whole groups from prompts_per_step.
    accumulation = str(recipe["prompts_per_step"] * recipe["num_generations"])
    values = parsed(frozen, tmp_path / "out", "--gradient_accumulation_steps", accumulation)

    keys = [key for key in catalogue() if recipe.is_set(key) and key not in DERIVED]
    assert len(keys) > 15
    for key in keys:
        value = plain(values[key])
        expected = recipe[key]
        if key == "report_to":
            assert value in ([], ["none"], "none") and expected == []
        else:
            assert value == expected, key


def test_trl_reads_awkward_values_from_a_frozen_recipe(tmp_path):
    path, frozen = tmp_path / "awkward.yaml", tmp_path / "recipe.yaml"
    path.write_text(
        "run_name: 'no'\nsystem_prompt: |\n  a: b # c\n\n  'd' ä\nlearning_rate: 1e-6\nmax_prompt_length: null\n"
        "maxent_tau: .inf\n"
        'model_init_kwargs: {a: {b: [1, null]}}\nnum_generations: 4\nchat_template: "{% if a %}\\t# {{ b }}\\n"\n'
    )
    recipe = read_recipe(path)
    frozen.write_text(recipe.as_yaml())

    values = parsed(frozen, tmp_path / "out")

    for key in (
        "run_name",
        "system_prompt",
        "learning_rate",
        "max_prompt_length",
        "maxent_tau",
        "model_init_kwargs",
        "chat_template",
    ):
        assert values[key] == recipe[key], key


@pytest.mark.parametrize("name", ["grpo.py", "maxent-grpo.py"])
def test_an_entry_script_refuses_to_run_without_the_launcher_and_before_it_imports_torch(name):
    script = Path(__file__).parents[2] / "src" / name
    argv = [sys.executable, "-X", "importtime", script]
    done = subprocess.run(argv, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"}, timeout=120)
    assert done.returncode == 1 and "run grpo launch RECIPE" in done.stderr
    assert "grpo_recipes.process" in done.stderr and "torch" not in done.stderr
