"""The YAML of verl's integration with Atropos: every setting changes the recipe, changes nothing, or is rejected."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_recipes.errors import Problem
from grpo_recipes.extensions.atropos.verl import VERL, count_trainers, rows
from grpo_recipes.extensions.migrate.migrate import migrate, needs_translation
from grpo_recipes.recipe import Recipe, merge_recipe
from grpo_recipes.recipe.check import check
from grpo_recipes.recipe.keys import catalogue

IMPLIED = {"use_vllm": True, "vllm_mode": "server", "reward_funcs": ["environment"]}
# The settings of the original file, with numbers that YAML reads as numbers.
THEIRS = """\
defaults: [ppo_trainer, _self_]
algorithm:
  adv_estimator: grpo_atropos
  use_kl_in_reward: false
atropos:
  api_url: "http://localhost:8000"
  timeout: 30
  batch_retry_attempts: 8
  batch_retry_delay: 0.3
  batch_max_wait_time: 12.0
  environment_sync_timeout: 60
  max_environments: 10
  inference_endpoints: []
actor_rollout_ref:
  model:
    path: "Qwen/Qwen2.5-3B-Instruct"
    use_shm: true
    lora_rank: 0
    lora_alpha: 32
    use_remove_padding: true
    enable_gradient_checkpointing: true
    trust_remote_code: false
  actor:
    strategy: "fsdp"
    optim:
      lr: 3.0e-6
    ppo_mini_batch_size: 256
    ppo_micro_batch_size_per_gpu: 40
    ppo_epochs: 1
    use_kl_loss: true
    kl_loss_coef: 0.001
    kl_loss_type: "low_var_kl"
    entropy_coeff: 0
    clip_ratio: 0.2
    loss_agg_mode: "token-mean"
    fsdp_config:
      param_offload: false
      optimizer_offload: false
  rollout:
    name: "atropos"
    log_prob_micro_batch_size_per_gpu: 40
    tensor_model_parallel_size: 2
    gpu_memory_utilization: 0.6
    max_model_len: 2048
    enforce_eager: false
    disable_log_stats: false
    enable_prefix_caching: true
    kv_cache_dtype: "auto"
    n: 5
    load_format: "safetensors"
    layered_summon: true
    mode: "sync"
  ref:
    log_prob_micro_batch_size_per_gpu: 40
    fsdp_config:
      param_offload: true
data:
  train_files: null
  val_files: null
  train_batch_size: 1024
  max_prompt_length: 512
  max_response_length: 1024
  filter_overlong_prompts: true
  truncation: "error"
  shuffle: false
  trust_remote_code: false
trainer:
  strategy: "fsdp"
  critic_warmup: 0
  logger: ["console", "wandb"]
  project_name: "verl_atropos_grpo"
  experiment_name: "atropos_grpo_integration"
  wandb_group: "atropos_integration"
  n_gpus_per_node: 8
  nnodes: 1
  save_freq: 20
  test_freq: 5
  total_epochs: 100
  output_dir: "checkpoints"
critic:
  strategy: "fsdp"
  optim:
    lr: 1.0e-5
reward_model:
  enable: false
ray_init:
  num_cpus: 32
"""
REFUSED = ("environment_sync_timeout", "max_environments", "ppo_mini_batch_size", "test_freq")
FIXED = "".join(f"{line}\n" for line in THEIRS.splitlines() if not any(name in line for name in REFUSED))
FIXED = FIXED.replace("train_batch_size: 1024", "train_batch_size: 1025")

# Setting, a value, and the recipe keys that it adds to the keys of every such file.
CHANGES: list[tuple[str, Any, dict[str, Any]]] = [
    ("atropos.api_url", "http://there:9000", {"atropos_api_url": "http://there:9000"}),
    ("atropos.timeout", 7, {"atropos_timeout": 7.0}),
    ("actor_rollout_ref.rollout.enforce_eager", True, {"vllm_enforce_eager": True}),
    ("atropos.batch_retry_attempts", 3, {"atropos_batch_retry_attempts": 3}),
    ("atropos.batch_retry_delay", 0.5, {"atropos_batch_retry_delay": 0.5}),
    ("atropos.batch_max_wait_time", 60.0, {"atropos_batch_max_wait_time": 60.0}),
    ("algorithm.adv_estimator", "rloo", {"advantage_estimator": "rloo"}),
    ("algorithm.norm_adv_by_std_in_grpo", True, {"scale_rewards": "group"}),
    ("algorithm.norm_adv_by_std_in_grpo", False, {"scale_rewards": "none"}),
    ("actor_rollout_ref.model.path", "a/b", {"model_name_or_path": "a/b"}),
    ("actor_rollout_ref.model.lora_rank", 32, {"use_peft": True, "lora_r": 32}),
    ("actor_rollout_ref.model.enable_gradient_checkpointing", False, {"gradient_checkpointing": False}),
    ("actor_rollout_ref.model.trust_remote_code", True, {"trust_remote_code": True}),
    ("actor_rollout_ref.model.override_config.attn_implementation", "sdpa", {"attn_implementation": "sdpa"}),
    ("actor_rollout_ref.actor.strategy", "fsdp2", {"accelerator": "fsdp2"}),
    ("actor_rollout_ref.actor.optim.lr", 2.0e-6, {"learning_rate": 2e-6}),
    ("actor_rollout_ref.actor.optim.lr_warmup_steps", 5, {"warmup_steps": 5.0}),
    ("actor_rollout_ref.actor.optim.weight_decay", 0.1, {"weight_decay": 0.1}),
    ("actor_rollout_ref.actor.grad_clip", 0.3, {"max_grad_norm": 0.3}),
    ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", 3, {"per_device_train_batch_size": 3}),
    ("actor_rollout_ref.actor.ppo_epochs", 2, {"num_iterations": 2}),
    ("actor_rollout_ref.actor.use_kl_loss", False, {"beta": 0.0}),
    ("actor_rollout_ref.actor.kl_loss_coef", 0.04, {"beta": 0.04}),
    ("actor_rollout_ref.actor.entropy_coeff", 0.01, {"entropy_coef": 0.01}),
    ("actor_rollout_ref.actor.clip_ratio", 0.1, {"epsilon": 0.1}),
    ("actor_rollout_ref.actor.clip_ratio_low", 0.1, {"epsilon": 0.1}),
    ("actor_rollout_ref.actor.clip_ratio_high", 0.3, {"epsilon_high": 0.3}),
    ("actor_rollout_ref.actor.loss_agg_mode", "seq-mean-token-mean", {"loss_type": "grpo"}),
    ("actor_rollout_ref.actor.loss_agg_mode", "seq-mean-token-sum-norm", {"loss_type": "dr_grpo"}),
    ("actor_rollout_ref.actor.loss_agg_mode", "token-mean", {"loss_type": "dapo"}),
    ("actor_rollout_ref.rollout.n", 4, {"num_generations": 4}),
    ("actor_rollout_ref.rollout.temperature", 0.7, {"temperature": 0.7}),
    ("actor_rollout_ref.rollout.tensor_model_parallel_size", 2, {"vllm_tensor_parallel_size": 2}),
    ("actor_rollout_ref.rollout.gpu_memory_utilization", 0.4, {"vllm_gpu_memory_utilization": 0.4}),
    ("actor_rollout_ref.rollout.max_model_len", 999, {"vllm_max_model_length": 999}),
    ("data.train_batch_size", 64, {"prompts_per_step": 8}),
    ("data.max_prompt_length", 100, {"max_prompt_length": 100}),
    ("data.max_response_length", 200, {"max_completion_length": 200}),
    ("data.trust_remote_code", True, {"trust_remote_code": True}),
    ("trainer.strategy", "fsdp", {"accelerator": "fsdp2"}),
    ("trainer.logger", ["console", "wandb"], {"report_to": ["wandb"]}),
    ("trainer.logger", "console", {"report_to": ["none"]}),
    ("trainer.project_name", "mine", {"wandb_project": "mine"}),
    ("trainer.experiment_name", "first", {"run_name": "first"}),
    ("trainer.wandb_group", "ours", {"wandb_run_group": "ours"}),
    ("trainer.n_gpus_per_node", 8, {"num_processes": 7}),
    ("trainer.save_freq", 9, {"save_steps": 9.0}),
    ("trainer.save_freq", -1, {"save_strategy": "no"}),
    ("trainer.total_epochs", 12, {"max_steps": 12}),
    ("trainer.total_training_steps", 12, {"max_steps": 12}),
    ("trainer.output_dir", "there", {"run_root": "there"}),
    ("trainer.default_local_dir", "there", {"run_root": "there"}),
]
# Setting and a value that matches the default behavior or has no effect here.
NOTHING: list[tuple[str, Any]] = [
    ("defaults", ["ppo_trainer", "_self_"]),
    ("critic", {"strategy": "fsdp", "optim": {"lr": 1.0e-5}}),
    ("ray_init", {"num_cpus": 32}),
    ("algorithm.adv_estimator", "grpo_atropos"),
    ("algorithm.adv_estimator", "grpo"),
    ("algorithm.use_kl_in_reward", False),
    ("atropos.inference_endpoints", []),
    ("actor_rollout_ref.model.use_shm", True),
    ("actor_rollout_ref.model.lora_rank", 0),
    ("actor_rollout_ref.model.lora_alpha", 32),  # without a rank
    ("actor_rollout_ref.model.target_modules", ["q_proj"]),
    ("actor_rollout_ref.model.use_remove_padding", True),
    ("actor_rollout_ref.actor.use_kl_loss", True),
    ("actor_rollout_ref.actor.kl_loss_type", "low_var_kl"),
    ("actor_rollout_ref.actor.fsdp_config.param_offload", False),
    ("actor_rollout_ref.actor.fsdp_config.optimizer_offload", False),
    ("actor_rollout_ref.rollout.name", "atropos"),
    ("actor_rollout_ref.rollout.name", "vllm"),
    ("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu", 40),
    ("actor_rollout_ref.rollout.disable_log_stats", True),
    ("actor_rollout_ref.rollout.enable_prefix_caching", True),
    ("actor_rollout_ref.rollout.enable_chunked_prefill", True),
    ("actor_rollout_ref.rollout.max_num_batched_tokens", 8192),
    ("actor_rollout_ref.rollout.free_cache_engine", True),
    ("actor_rollout_ref.rollout.kv_cache_dtype", "auto"),
    ("actor_rollout_ref.rollout.load_format", "safetensors"),
    ("actor_rollout_ref.rollout.layered_summon", True),
    ("actor_rollout_ref.rollout.mode", "sync"),
    ("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu", 40),
    ("actor_rollout_ref.ref.fsdp_config.param_offload", True),
    ("data.train_files", None),
    ("data.val_files", None),
    ("data.filter_overlong_prompts", True),
    ("data.truncation", "error"),
    ("data.shuffle", False),
    ("trainer.critic_warmup", 0),
    ("trainer.nnodes", 1),
    ("trainer.test_freq", -1),
    ("trainer.val_before_train", False),
    ("reward_model.enable", False),
]
# Setting, a rejected value, and words of the fix.
OTHERS: list[tuple[str, Any, str]] = [
    ("atropos.environment_sync_timeout", 60, "atropos.batch_max_wait_time limits the wait"),
    ("atropos.max_environments", 10, "every environment that registers at run-api takes part"),
    ("atropos.inference_endpoints", ["http://a:9001"], "the launch starts the server"),
    ("algorithm.adv_estimator", "gae", "set grpo_atropos, grpo, rloo, "),
    ("algorithm.use_kl_in_reward", True, "set false, and use actor_rollout_ref.actor.kl_loss_coef"),
    ("algorithm.norm_adv_by_std_in_grpo", "often", "set true or false"),
    ("actor_rollout_ref.actor.strategy", "megatron", "set fsdp, or replace the strategy with accelerator: zero2"),
    ("actor_rollout_ref.actor.ppo_mini_batch_size", 256, "set the same number as data.train_batch_size"),
    ("actor_rollout_ref.actor.use_kl_loss", "no idea", "set true or false"),
    ("actor_rollout_ref.actor.kl_loss_type", "mse", "set low_var_kl"),
    ("actor_rollout_ref.actor.loss_agg_mode", "seq-mean-token-sum", "set token-mean, seq-mean-token-mean or"),
    ("actor_rollout_ref.actor.fsdp_config.param_offload", True, "parameters are never moved to the CPU"),
    ("actor_rollout_ref.actor.fsdp_config.optimizer_offload", True, "parameters are never moved to the CPU"),
    ("actor_rollout_ref.rollout.name", "sglang", "set atropos or vllm"),
    ("actor_rollout_ref.rollout.enable_prefix_caching", False, "vLLM caches prefixes"),
    ("actor_rollout_ref.rollout.kv_cache_dtype", "fp8", "set auto"),
    ("data.train_files", "train.parquet", "set atropos_environment and atropos_environment_args"),
    ("data.val_files", "test.parquet", "steps_per_eval"),
    ("data.train_batch_size", "many", "set e.g. 1024"),
    ("data.truncation", "left", "sequences are never cut"),
    ("trainer.strategy", "megatron", "set fsdp"),
    ("trainer.critic_warmup", 5, "no value function is trained"),
    ("trainer.logger", ["console", "clearml"], "set console, wandb, tensorboard, trackio, mlflow or swanlab"),
    ("trainer.n_gpus_per_node", "all", "set e.g. 8"),
    ("trainer.n_gpus_per_node", 1, "set 2 or more"),
    ("trainer.nnodes", 2, "a run uses the nodes of its job (sbatch --nodes)"),
    ("trainer.test_freq", 5, "steps_per_eval"),
    ("trainer.val_before_train", True, "steps_per_eval"),
    ("reward_model.enable", True, "environments score"),
]


def merged(folder: Path, text: str) -> tuple[Recipe, list[Problem]]:
    path = folder / "theirs.yaml"
    path.write_text(text)
    return merge_recipe(path)


def with_setting(folder: Path, name: str, value: Any) -> tuple[Recipe, list[Problem], int]:
    """Read a verl file plus a setting; return recipe, problems and the line of the setting."""
    file: dict[str, Any] = {} if name.startswith("algorithm.adv_") else {"algorithm": {"adv_estimator": "grpo_atropos"}}
    if name.startswith("algorithm.adv_"):
        file["atropos"] = {"timeout": 30}
    inner = file
    *sections, last = name.split(".")
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[last] = value
    text = yaml.safe_dump(file, sort_keys=False)
    line = next(number for number, line in enumerate(text.splitlines(), 1) if line.strip().startswith(f"{last}:"))
    return *merged(folder, text), line


def given(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe keys that differ from the keys of every verl file."""
    values = {key: recipe[key] for key in catalogue() if recipe.is_set(key)}
    return {key: value for key, value in values.items() if IMPLIED.get(key) != value}


def leaves(value: Any, *names: str) -> Iterator[str]:
    if isinstance(value, dict) and value and ".".join(names) not in ("critic", "ray_init"):
        for name, inner in value.items():
            yield from leaves(inner, *names, name)
    else:
        yield ".".join(names)


@pytest.mark.parametrize(("name", "value", "keys"), CHANGES, ids=lambda value: str(value)[:60])
def test_a_setting_changes_the_recipe(tmp_path: Path, name: str, value: Any, keys: dict[str, Any]) -> None:
    recipe, problems, line = with_setting(tmp_path, name, value)
    assert problems == []
    assert {key: value for key, value in given(recipe).items() if key != "atropos_timeout" or key in keys} == keys
    assert all(catalogue()[key]["default"] != value for key, value in keys.items() if key not in AT_ITS_DEFAULT)
    (note,) = [note for note in recipe.notes if f"theirs.yaml:{line}: '{name}' is read as " in note]
    assert all(key in note for key in keys)


# Keys that are tested with their default: another row changes the value or leaves it out.
AT_ITS_DEFAULT = ("loss_type", "beta", "scale_rewards", "report_to")


@pytest.mark.parametrize(("name", "value"), NOTHING, ids=str)
def test_a_setting_that_asks_for_what_happens_anyway_is_noted_with_the_reason(
    tmp_path: Path, name: str, value: Any
) -> None:
    recipe, problems, line = with_setting(tmp_path, name, value)
    assert problems == [] and given(recipe).keys() <= {"atropos_timeout"}
    (note,) = [note for note in recipe.notes if note.partition(f"theirs.yaml:{line}: {name}")[2]]
    assert " changes nothing: " in note and len(note.partition(" changes nothing: ")[2]) > 10


@pytest.mark.parametrize(("name", "value", "fix"), OTHERS, ids=lambda value: str(value)[:60])
def test_any_other_value_is_refused_at_its_line_with_what_to_write(
    tmp_path: Path, name: str, value: Any, fix: str
) -> None:
    recipe, (problem,), line = with_setting(tmp_path, name, value)
    assert problem.where.endswith(f"theirs.yaml:{line}") and fix in problem.fix and name in problem.what
    assert given(recipe).keys() <= {"atropos_timeout"}


def test_every_setting_of_the_table_and_of_their_file_is_tested() -> None:
    tested = {name for name, *_ in (*CHANGES, *NOTHING, *OTHERS)}
    assert tested == set(VERL.table.by_name)
    assert set(leaves(yaml.safe_load(THEIRS))) <= tested
    assert [name for name, _ in rows()] == list(VERL.table.by_name) and all(about for _, about in rows())


def test_their_own_file_is_answered_line_by_line(tmp_path: Path) -> None:
    _, problems = merged(tmp_path, THEIRS)
    lines = THEIRS.splitlines()
    refused = {int(entry.where.rpartition(":")[2]): entry for entry in problems}
    assert [next(name for name in (*REFUSED, "train_batch_size") if name in lines[line - 1]) for line in refused] == [
        "environment_sync_timeout", "max_environments", "ppo_mini_batch_size", "train_batch_size", "test_freq"
    ]  # fmt: skip
    batch = next(entry for entry in problems if "1024" in entry.what)
    assert batch.what == (
        "1024 is not a multiple of actor_rollout_ref.rollout.n 5: run-api would never hand out a batch"
    )
    assert batch.fix == "set 1025, or another actor_rollout_ref.rollout.n"


def test_after_the_fixes_it_is_a_recipe(tmp_path: Path) -> None:
    pytest.importorskip("atroposlib")
    recipe, problems = merged(tmp_path, FIXED)
    assert [*problems, *check(recipe, {})] == []
    assert given(recipe) == {
        "atropos_api_url": "http://localhost:8000", "atropos_timeout": 30.0, "atropos_batch_retry_attempts": 8,
        "atropos_batch_retry_delay": 0.3, "atropos_batch_max_wait_time": 12.0,
        "model_name_or_path": "Qwen/Qwen2.5-3B-Instruct", "gradient_checkpointing": True, "trust_remote_code": False,
        "accelerator": "fsdp2", "learning_rate": 3e-6, "per_device_train_batch_size": 40, "num_iterations": 1,
        "beta": 0.001, "entropy_coef": 0.0, "epsilon": 0.2, "loss_type": "dapo", "vllm_tensor_parallel_size": 2,
        "vllm_gpu_memory_utilization": 0.6, "vllm_max_model_length": 2048, "num_generations": 5,
        "prompts_per_step": 205, "max_prompt_length": 512, "max_completion_length": 1024, "report_to": ["wandb"],
        "wandb_project": "verl_atropos_grpo", "run_name": "atropos_grpo_integration",
        "wandb_run_group": "atropos_integration", "num_processes": 6, "save_steps": 20.0, "max_steps": 100,
        "run_root": "checkpoints", "vllm_enforce_eager": False,
    }  # fmt: skip
    assert recipe["use_vllm"] and recipe["vllm_mode"] == "server" and recipe["reward_funcs"] == ["environment"]


def test_a_wrong_address_is_refused_at_its_line(tmp_path: Path) -> None:
    recipe, problems = merged(tmp_path, FIXED.replace("http://localhost:8000", "localhost:8000"))
    assert problems == []
    (url_problem,) = [entry for entry in check(recipe, {}) if "URL" in entry.what]
    line = next(number for number, text in enumerate(FIXED.splitlines(), 1) if "api_url" in text)
    assert url_problem.where.endswith(f"theirs.yaml:{line}") and "http" in url_problem.fix


@pytest.mark.parametrize(
    ("name", "message", "fix"),
    [
        ("atropos.batch_retry_attempt", "unknown key 'batch_retry_attempt' in atropos", "write 'batch_retry_attempts'"),
        ("actor_rollout_ref.actor.lr", "unknown key 'lr' in actor_rollout_ref.actor", "write learning_rate: 3"),
        ("trainer.zzz", "unknown key 'zzz' in trainer", "remove it"),
        ("trainer.zzz.deep", "unknown key 'deep' in trainer.zzz", "remove it"),
        ("reward_model.path", "unknown key 'path' in reward_model", "remove it"),
    ],
)
def test_an_unknown_setting_is_refused_at_its_line(tmp_path: Path, name: str, message: str, fix: str) -> None:
    _, (problem,), line = with_setting(tmp_path, name, 3)
    assert (problem.where.rpartition(":")[2], problem.what, problem.fix) == (str(line), message, fix)


def test_an_empty_setting_is_refused(tmp_path: Path) -> None:
    _, (problem,), _ = with_setting(tmp_path, "atropos.timeout", None)
    assert (problem.what, problem.fix) == ("'atropos.timeout' is empty", "give it a value, or remove it")


def test_an_adapter_has_the_settings_of_adapters(tmp_path: Path) -> None:
    text = FIXED.replace("lora_rank: 0", "lora_rank: 64\n    target_modules: [q_proj, v_proj]")
    recipe, problems = merged(tmp_path, text)
    assert problems == []
    assert [recipe[key] for key in ("use_peft", "lora_r", "lora_alpha")] == [True, 64, 32]
    assert recipe["lora_target_modules"] == ["q_proj", "v_proj"]
    assert recipe.source("use_peft") == recipe.source("lora_r")


def test_no_kl_loss_means_no_coefficient(tmp_path: Path) -> None:
    recipe, problems = merged(tmp_path, FIXED.replace("use_kl_loss: true", "use_kl_loss: false"))
    assert problems == [] and recipe["beta"] == 0.0
    assert any(
        "kl_loss_coef: 0.001 changes nothing: actor_rollout_ref.actor.use_kl_loss is" in note for note in recipe.notes
    )


def test_a_step_of_the_whole_batch_is_what_happens_anyway(tmp_path: Path) -> None:
    text = FIXED.replace("    ppo_epochs: 1", "    ppo_epochs: 1\n    ppo_mini_batch_size: 1025")
    recipe, problems = merged(tmp_path, text)
    assert problems == []
    assert any(
        "ppo_mini_batch_size: 1025 changes nothing: a step uses the whole batch" in note for note in recipe.notes
    )


def test_two_settings_of_one_key_may_agree_and_not_differ(tmp_path: Path) -> None:
    recipe, problems = merged(tmp_path, FIXED)
    assert problems == [] and recipe["accelerator"] == "fsdp2"  # of two settings
    _, (problem,) = merged(
        tmp_path, FIXED.replace("shuffle: false\n  trust_remote_code: false", "trust_remote_code: true")
    )
    assert problem.what == (
        "'data.trust_remote_code' and 'actor_rollout_ref.model.trust_remote_code' give trust_remote_code two values"
    )
    _, (problem,) = merged(tmp_path, FIXED + "max_steps: 7\n")
    assert problem.what == "'trainer.total_epochs' and 'max_steps' give max_steps two values"


def test_keys_of_a_recipe_may_stand_beside_the_sections(tmp_path: Path) -> None:
    text = FIXED + "atropos_environment: arithmetic\nweight_sync: file\nvllm_mode: colocate\n"
    recipe, problems = merged(tmp_path, text)
    assert problems == [] and recipe["weight_sync"] == "file" and recipe["atropos_environment"] == "arithmetic"
    assert recipe["vllm_mode"] == "colocate"  # rejected by the check: the user's value is not replaced
    assert not any("read as use_vllm: true and vllm_mode" in note for note in recipe.notes)


@pytest.mark.parametrize(
    ("gpus", "parallel", "shared", "trainers"),
    [(8, 1, False, 7), (8, 2, False, 6), (1, 1, False, None), (1, 1, True, 1)],
)
def test_the_server_has_some_of_the_gpus(gpus: int, parallel: int, shared: bool, trainers: int | None) -> None:
    assert count_trainers(gpus, parallel, shared) == trainers


@pytest.mark.parametrize("device", [None, "cuda", "cpu"])
def test_gpus_count_by_the_machine_that_runs(tmp_path: Path, device: str | None) -> None:
    """R12: with --gpus, the plan does not depend on the planning machine."""
    path = tmp_path / "theirs.yaml"
    path.write_text("algorithm: {adv_estimator: grpo_atropos}\ntrainer:\n  n_gpus_per_node: 8\n")
    recipe, problems = merge_recipe(path, device=device)
    assert problems == [] and recipe["num_processes"] == (None if device == "cpu" else 7)
    on_cpu = "n_gpus_per_node: 8 changes nothing: the run is on CPU"
    assert any(on_cpu in note for note in recipe.notes) == (device == "cpu")


def test_other_files_are_read_as_before(tmp_path: Path) -> None:
    foreign = Path(__file__).parents[1] / "migrate/foreign/verl_nested.yaml"
    assert not set(yaml.safe_load(foreign.read_text())) >= {"atropos"}
    _, problems = merge_recipe(foreign)
    assert any("this looks like a recipe of another project" in entry.what for entry in problems)
    _, (problem,) = merged(tmp_path, "model_name_or_path: a/b\ntrainer: {nnodes: 1}\n")
    assert "'trainer'" in problem.what


def test_grpo_new_writes_the_same_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("atroposlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs.yaml").write_text(FIXED)
    assert needs_translation(tmp_path / "theirs.yaml")
    migration = migrate(Path("theirs.yaml"), Path("my.yaml"))
    assert migration.problems == []
    (tmp_path / "my.yaml").write_text(migration.text())
    direct, _ = merged(tmp_path, FIXED)
    migrated, problems = merge_recipe(tmp_path / "my.yaml")
    assert problems == []
    assert {key: migrated[key] for key in catalogue()} == {key: direct[key] for key in catalogue()}
    assert set(VERL.sections).isdisjoint(yaml.safe_load(migration.text()))
    assert "# not translated: no value function is trained" in migration.text()
