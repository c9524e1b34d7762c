"""The YAML of co-located trainers: every name changes the recipe, or is rejected at its line with a fix."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from grpo_recipes.errors import Problem
from grpo_recipes.extensions.colocated.keys import CONVERTERS
from grpo_recipes.extensions.migrate.migrate import migrate, needs_translation
from grpo_recipes.paths import find_code_root
from grpo_recipes.recipe import Recipe, merge_recipe
from grpo_recipes.recipe.check import check
from grpo_recipes.recipe.converters import names
from grpo_recipes.recipe.keys import catalogue

# From the co-located trainer's documentation, with another model and without comments.
THEIRS = """\
model_name: "smoke:sums"

vllm_config:
  tensor_parallel_size: 1
  max_num_seqs: 32
  max_model_len: 2048
  gpu_memory_utilization: 0.4
  enforce_eager: true
  disable_log_stats: true

fsdp_config:
  sharding_strategy: "FULL_SHARD"
  cpu_offload: false
  mixed_precision: true

learning_rate: 1e-5
batch_size: 64
max_iterations: 5000
sync_frequency: 100
"""
PAGE = find_code_root() / "docs/migrate.md"
SETTINGS = list(CONVERTERS[0].table.by_name)
SECTIONS = ("vllm_config", "fsdp_config")


def merged(folder: Path, text: str, *flags: str) -> tuple[Recipe, list[Problem]]:
    path = folder / "theirs.yaml"
    path.write_text(text)
    recipe, problems = merge_recipe(path, flags)
    return recipe, [*problems, *check(recipe, {})]


def told(problems: list[Problem]) -> dict[str, str]:
    """Return the fix by the line of the file (0: of the whole file)."""
    return {entry.where.partition("theirs.yaml")[2].lstrip(":") or "0": entry.fix for entry in problems}


def changed(folder: Path, old: str, new: str) -> tuple[Recipe, list[Problem]]:
    assert old in THEIRS
    return merged(folder, THEIRS.replace(old, new))


def test_their_own_example_is_a_recipe_on_every_device(tmp_path: Path) -> None:
    """R13: the co-located trainer's YAML is accepted unchanged; no result depends on the planning machine."""
    recipe, problems = merged(tmp_path, THEIRS)
    assert problems == []
    assert (recipe["vllm_enforce_eager"], recipe["vllm_max_num_seqs"], recipe["fsdp_cpu_offload"]) == (True, 32, False)
    assert any(
        "sync_frequency: 100 changes nothing: vLLM gets the weights before every" in note for note in recipe.notes
    )
    assert (recipe["dataset_name"], recipe["reward_funcs"]) == ("openai/gsm8k", ["pure_accuracy_math"])
    assert any("the file names no dataset and no rewards: dataset_name: openai/gsm8k" in note for note in recipe.notes)


@pytest.mark.parametrize(
    ("text", "flags"),
    [("dataset_name: smoke:sums\n", ()), ("", ("--dataset_name", "smoke:sums"))],
)
def test_a_task_of_the_user_is_kept(tmp_path: Path, text: str, flags: tuple[str, ...]) -> None:
    """R13: the default task is for a file without any."""
    recipe, problems = merged(tmp_path, THEIRS + text, *flags)
    assert problems == []
    assert (recipe["dataset_name"], recipe["dataset_prompt_column"]) == ("smoke:sums", "problem")


def test_their_example_plans_for_gpus_on_a_machine_without_any(tmp_path: Path, planned, option) -> None:
    """R13: each key of the file reaches the process that it changes."""
    recipe, _ = merged(tmp_path, THEIRS, "--num_processes", "4")
    plan = planned(recipe=recipe)
    assert plan.mode == "colocate" and plan.batch.completions == 64
    assert "--fsdp_offload_params" not in plan.process("trainer").argv
    recipe, _ = merged(tmp_path, THEIRS.replace("cpu_offload: false", "cpu_offload: true"), "--num_processes", "4")
    assert option(planned(recipe=recipe).process("trainer").argv, "--fsdp_offload_params") == "true"


@pytest.mark.parametrize("value", ["many", "0", "true"])
def test_a_sync_frequency_is_a_positive_integer(tmp_path: Path, value: str) -> None:
    _, problems = changed(tmp_path, "sync_frequency: 100", f"sync_frequency: {value}")
    assert told(problems)["19"].startswith("remove it; vLLM gets the weights before every generation")


def test_every_name_is_noted(tmp_path: Path) -> None:
    recipe, problems = merged(tmp_path, THEIRS)
    assert problems == []
    expected = {
        "model_name_or_path": "smoke:sums", "use_vllm": True, "vllm_mode": "colocate", "vllm_tensor_parallel_size": 1,
        "vllm_max_model_length": 2048, "vllm_gpu_memory_utilization": 0.4, "accelerator": "fsdp2", "bf16": True,
        "learning_rate": 1e-5, "prompts_per_step": 8, "max_steps": 5000,
    }  # fmt: skip
    assert {key: recipe[key] for key in expected} == expected
    notes = "\n".join(recipe.notes)
    for name in SETTINGS:
        assert name in notes, name


def test_the_example_of_the_page_is_a_recipe(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    recipe, problems = merged(tmp_path, text)
    assert problems == [] and recipe["vllm_mode"] == "colocate" and recipe["prompts_per_step"] == 8


def test_the_table_of_the_page_has_every_name() -> None:
    told = re.findall(r"^\| `([\w.]+)` \|", PAGE.read_text(), re.MULTILINE)
    assert sorted(told) == sorted(SETTINGS)


def test_after_the_fixes_it_is_a_plan_of_four_gpus(tmp_path: Path, planned, option) -> None:
    recipe, _ = merged(tmp_path, THEIRS, "--num_processes", "4")
    plan = planned(recipe=recipe)
    (trainer,) = plan.processes
    argv = trainer.argv
    assert plan.mode == "colocate" and trainer.gpus == ("0", "1", "2", "3") and plan.batch.completions == 64
    assert option(argv, "--mixed_precision") == "bf16"
    assert option(argv, "--vllm_gpu_memory_utilization") == "0.4"
    # FULL_SHARD as accelerate gets it: parameters are gathered for a layer and let go after it, in FSDP2.
    settings = yaml.safe_load(Path(option(argv, "--config_file")).read_text())
    assert settings["distributed_type"] == "FSDP"
    assert settings["fsdp_config"] == {
        "fsdp_activation_checkpointing": False,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_offload_params": False,
        "fsdp_reshard_after_forward": True,
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_version": 2,
    }


@pytest.mark.parametrize(
    ("old", "new", "key", "value"),
    [
        ('model_name: "smoke:sums"', "model_name: a/b", "model_name_or_path", "a/b"),
        ("tensor_parallel_size: 1", "tensor_parallel_size: 2", "vllm_tensor_parallel_size", 2),
        ("max_model_len: 2048", "max_model_len: 1024", "vllm_max_model_length", 1024),
        ("max_num_seqs: 32", "max_num_seqs: 16", "vllm_max_num_seqs", 16),
        ("gpu_memory_utilization: 0.4", "gpu_memory_utilization: 0.3", "vllm_gpu_memory_utilization", 0.3),
        ('"FULL_SHARD"', "NO_SHARD", "accelerator", "ddp"),
        ("mixed_precision: true", "mixed_precision: false", "bf16", False),
        ("mixed_precision: true", "mixed_precision: fp16", "fp16", True),
        ("batch_size: 64", "batch_size: 128", "prompts_per_step", 16),
        ("batch_size: 64", "batch_size: 64\nnum_generations: 16", "prompts_per_step", 4),
        ("max_iterations: 5000", "max_iterations: 7", "max_steps", 7),
        ("enforce_eager: true", "enforce_eager: false", "vllm_enforce_eager", False),
        ("cpu_offload: false", "cpu_offload: true", "fsdp_cpu_offload", True),
        ("learning_rate: 1e-5", "learning_rate: 2e-5", "learning_rate", 2e-5),
    ],
)  # fmt: skip
def test_every_name_changes_its_key(tmp_path: Path, old: str, new: str, key: str, value: object) -> None:
    before, _ = merged(tmp_path, THEIRS)
    recipe, problems = changed(tmp_path, old, new)
    assert recipe[key] == value != before[key]
    assert [
        entry.what for entry in problems if new.partition(":")[0] in entry.what and "has no equal" in entry.what
    ] == []


@pytest.mark.parametrize(
    ("old", "new", "expected_fix"),
    [
        ("disable_log_stats: true", "disable_log_stats: false", "remove it; vLLM inside the trainers logs no"),
        ('"FULL_SHARD"', "SHARD_GRAD_OP", "set accelerator: fsdp2 for FULL_SHARD, ddp for NO_SHARD, or zero2"),
        ("mixed_precision: true", "mixed_precision: fp8", "set bf16: true, or set bf16: false for float32"),
        ("batch_size: 64", "batch_size: 60", "set batch_size: 64, or change num_generations"),
        ("batch_size: 64", "batch_size: many", "set e.g. batch_size: 64"),
        ("batch_size: 64", "batch_size: 64\nprompts_per_step: 4", "keep prompts_per_step"),
        ("max_model_len: 2048", "max_modl_len: 2048", "write 'max_model_len'"),
        ("max_model_len: 2048", "max_model_length: 2048", "write vllm_max_model_length: 2048"),
        ("max_model_len: 2048", "max_model_len:", "give it a value, or remove it"),
        ("tensor_parallel_size: 1", "odd: 1", "write one of tensor_parallel_size, max_num_seqs"),
        ("max_iterations: 5000", "max_steps: 3\nmax_iterations: 5000", "keep max_steps"),
    ],
)
def test_what_has_no_equal_is_refused_at_its_line(tmp_path: Path, old: str, new: str, expected_fix: str) -> None:
    _, problems = changed(tmp_path, old, new)
    lines = THEIRS.replace(old, new).splitlines()
    (where,) = [where for where, fix in told(problems).items() if fix.startswith(expected_fix)]
    assert lines[int(where) - 1].strip() in [line.strip() for line in [*new.splitlines(), f"sharding_strategy: {new}"]]


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_is_a_mapping(tmp_path: Path, section: str) -> None:
    _, problems = merged(tmp_path, f"{THEIRS.split(section)[0]}sync_frequency: 1\n{section}: 3\ndataset_name: a/b\n")
    assert f"{section}: expected a mapping, got 3" in [entry.what for entry in problems]


def test_a_sync_at_every_generation_changes_nothing_and_says_so(tmp_path: Path) -> None:
    recipe, problems = merged(tmp_path, THEIRS.replace("sync_frequency: 100", "sync_frequency: 1"))
    assert problems == []
    assert any("sync_frequency: 1 changes nothing: " in note for note in recipe.notes)


def test_the_key_for_fewer_syncs_goes_with_their_batch(tmp_path: Path) -> None:
    recipe, problems = merged(tmp_path, f"{THEIRS}num_iterations: 4\n")
    assert problems == [] and (recipe["num_iterations"], recipe["prompts_per_step"]) == (4, 8)


def test_num_generations_of_a_flag_divides_the_batch(tmp_path: Path) -> None:
    recipe, problems = merged(tmp_path, THEIRS, "--num_generations", "32")
    assert problems == [] and recipe["prompts_per_step"] == 2


def test_what_the_file_says_of_vllm_itself_is_kept(tmp_path: Path) -> None:
    recipe, _ = merged(tmp_path, f"{THEIRS}vllm_mode: server\n")
    assert recipe["vllm_mode"] == "server"


def test_names_that_are_no_section_of_such_a_file_are_refused_as_everywhere(tmp_path: Path) -> None:
    _, problems = merged(tmp_path, "model_name: a/b\nmax_iterations: 3\ndataset_name: a/b\n")
    assert told(problems)["1"] == "write model_name_or_path: a/b" and told(problems)["2"] == "write max_steps: 3"


def test_grpo_new_writes_the_same_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs.yaml").write_text(THEIRS + "dataset_name: smoke:sums\n")
    assert needs_translation(tmp_path / "theirs.yaml")
    migration = migrate(Path("theirs.yaml"), Path("my.yaml"))
    migrated = yaml.safe_load(migration.text())
    direct, _ = merged(tmp_path, THEIRS)
    for key in ("model_name_or_path", "vllm_mode", "use_vllm", "accelerator", "bf16", "max_steps", "learning_rate",
                "vllm_max_model_length", "vllm_gpu_memory_utilization"):  # fmt: skip
        value = migrated.get(key, catalogue()[key]["default"])
        assert (float(value) if key == "learning_rate" else value) == direct[key], key


def test_every_name_is_known_elsewhere_too() -> None:
    assert [name for name in SETTINGS if name.rpartition(".")[2] not in {*names(), "batch_size"}] == []
