"""The catalogue of recipe keys without torch, and the hand-kept tables that types cannot tell."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from grpo_recipes.paths import CODE_VARIABLE

CATALOGUE_FILE = Path(__file__).with_name("keys.json")

# Keys of TRL that the launcher sets, or that have no meaning here: not in the catalogue, refused with the reason.
OWNED_KEYS: dict[str, str] = {
    "output_dir": "remove it; the run directory is <run_root>/<run_name>-<timestamp>, set run_root and run_name",
    "deepspeed": "use accelerator: zero2 or zero3",
    "fsdp": "use accelerator: fsdp2",
    "fsdp_config": "use accelerator: fsdp2",
    "local_rank": "remove it; accelerate sets it",
    "do_train": "remove it; the run always trains",
    "do_eval": "use eval_strategy",
    "do_predict": "remove it; there is nothing to predict",
    "use_cpu": "remove it; the environment's flavour decides (DEVICE=cpu)",
    "resume_from_checkpoint": "use grpo launch --resume last or --resume RUN_DIR",
    "logging_strategy": "remove it; every optimizer step is logged",
    "logging_first_step": "remove it; every optimizer step is logged",
    "enable_jit_checkpoint": (
        "remove it; SIGTERM saves here already, while with it ranks save different steps, in the middle of one, and "
        "what it marks as unfinished is resumed from"
    ),
    "auto_find_batch_size": "remove it; it changes the experiment's batch, lower per_device_train_batch_size instead",
    "hub_token": "remove it and export HF_TOKEN",
    "vllm_server_base_url": "remove it; the launcher owns the server, set vllm_server_host and vllm_server_port",
    "use_transformers_paged": "use use_transformers_continuous_batching",
    "vllm_importance_sampling_cap": "use vllm_importance_sampling_clip_max",
    "parallelism_config": "use accelerator",
    "ignore_bias_buffers": "remove it; nothing reads it",
    "log_completions_hub_repo": "remove it; sampled completions are in report.html",
    "trackio_space_id": "remove it; use report_to: wandb or tensorboard",
    "trackio_static_space_id": "remove it; use report_to: wandb or tensorboard",
    "trackio_bucket_id": "remove it; use report_to: wandb or tensorboard",
    "project": "write wandb_project",
    "data_seed": "write seed",
    "remove_unused_columns": "remove it; rewards read the other columns",
    "include_num_input_tokens_seen": "remove it; the trainer counts tokens itself",
    # TRL's GRPO trainer has its own sampler, loss and evaluation, which read none of these.
    **dict.fromkeys(
        (
            "label_smoothing_factor", "label_names", "train_sampling_strategy", "length_column_name",
            "prediction_loss_only", "include_for_metrics", "batch_eval_metrics", "eval_do_concat_batches",
            "eval_accumulation_steps", "eval_use_gather_object", "log_multimodal", "max_tool_calling_iterations",
        ),
        "remove it; GRPO does not read it",
    ),
    **dict.fromkeys(
        ("metric_for_best_model", "greater_is_better"), "remove it; the model of the last step is kept"
    ),
}  # fmt: skip

# Keys of older TRL and transformers, and of the guide's origin, with what to write today.
OBSOLETE_KEYS: dict[str, str] = {
    "torch_dtype": "write dtype: bfloat16",
    "evaluation_strategy": "write eval_strategy",
    "warmup_ratio": "write warmup_steps with a number below 1, e.g. warmup_steps: 0.1",
    "overwrite_output_dir": "remove it; every launch makes a new run directory, --resume continues one",
    "clip_range": "write epsilon (and epsilon_high)",
    "no_cuda": "remove it; use DEVICE=cpu for a CPU environment",
    "logging_dir": "export TENSORBOARD_LOGGING_DIR",
    "save_safetensors": "remove it; checkpoints are always safetensors",
    "vllm_url": "write vllm_server_host and vllm_server_port",
    "use_mps_device": "remove it; use DEVICE=cpu or DEVICE=cuda",
    "hub_model_revision": "write hub_revision",
    "overwrite_hub_revision": "remove it; a push adds a commit to hub_revision",
    "push_to_hub_revision": "write push_to_hub: true and hub_revision",
    "wandb_log_unique_prompts": "write log_unique_prompts",
    "max_completion_len": "write max_completion_length",
    **dict.fromkeys(
        ("vf_coef", "gae_lambda", "gamma", "horizon", "clip_range_vf"),
        "remove it; it belongs to PPO's value function, which GRPO does not have",
    ),
    **dict.fromkeys(
        ("advantage_normalization", "reward_normalization", "reward_clip", "advantage_clip"),
        "write scale_rewards: group, batch or none",
    ),
    **dict.fromkeys(
        ("maxent_use_clip_objective", "maxent_clip_objective_coef", "maxent_clip_adv_baseline", "maxent_clip_range"),
        "remove it; the clip ratio of every objective is epsilon (and epsilon_high)",
    ),
    "maxent_logprob_chunk_size": "write per_device_train_batch_size: log-probs are computed in batches of that size",
    "vllm_return_logprobs": "remove it; vLLM always returns them, for vllm_importance_sampling_correction",
    "init_kl_coef": "write init_kl_coeff, or beta",
    **dict.fromkeys(
        ("log_kl_per_token", "log_grad_norm_after_clip", "return_reward"),
        "remove it; kl and grad_norm are in every row of metrics.jsonl",
    ),
    "env": "export variables in the shell; a recipe does not change the environment",
}

# Other names of a key, as the guide's recipes write them: accepted, unless both are given.
ALIASES: dict[str, str] = {
    "gen_temperature": "temperature",
    "gen_top_p": "top_p",
    "init_kl_coeff": "beta",
}

# Plain `str` in TRL's types, so that a typo would only fail inside the trainer.
TRL_CHOICES: dict[str, list[str]] = {
    "loss_type": ["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"],
    "scale_rewards": ["group", "batch", "none"],
    "importance_sampling_level": ["token", "sequence"],
    "vllm_importance_sampling_mode": ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"],
    "vllm_model_impl": ["auto", "vllm", "transformers", "terratorch"],
    "multi_objective_aggregation": ["sum_then_normalize", "normalize_then_sum"],
    "lora_task_type": ["CAUSAL_LM"],
    "dtype": ["auto", "bfloat16", "float16", "float32"],
    "save_strategy": ["no", "steps", "epoch"],
}

# Ranges of keys, ours and TRL's: dataclass types cannot tell them. No number but an `infinite` key's may be .inf.
RANGES: dict[str, dict[str, float]] = {
    "max_prompt_length": {"min": 1},
    "num_processes": {"min": 1},
    "main_process_port": {"min": 1024, "max": 65535},
    "prompts_per_step": {"min": 1},
    "weight_guard_tolerance": {"min": 0.0},
    "server_request_timeout": {"min": 1.0},
    "vllm_server_timeout": {"min": 1.0},
    "server_restarts": {"min": 0},
    "server_stall_timeout": {"min": 1.0},
    "stall_timeout": {"min": 1.0},
    "max_requeues": {"min": 0},
    "vllm_server_port": {"min": 1024, "max": 65535},
    "vllm_group_port": {"min": 1024, "max": 65535},
    "vllm_gpu_memory_utilization": {"min": 0.05, "max": 1.0},
    "vllm_tensor_parallel_size": {"min": 1},
    "vllm_max_model_length": {"min": 1},
    "logging_steps": {"min": 1, "max": 1},
    "save_steps": {"min": 1},
    "save_total_limit": {"min": 1},
    "learning_rate": {"min": 0.0},
    "num_generations": {"min": 2},
    "max_completion_length": {"min": 1},
    "temperature": {"min": 1e-6},
    "top_p": {"min": 0.0, "max": 1.0},
    "beta": {"min": 0.0},
    "epsilon": {"min": 0.0},
    "per_device_train_batch_size": {"min": 1},
    "per_device_eval_batch_size": {"min": 1},
    "gradient_accumulation_steps": {"min": 1},
    "num_iterations": {"min": 1},
    "seed": {"min": 0, "max": 2**32 - 1},  # numpy takes no other
    "max_train_prompts": {"min": 1},
    "eval_subsample": {"min": 0.0001, "max": 1.0},
    "eval_max_prompts": {"min": 1},
    "modebench_prompts": {"min": 1},
    "modebench_test_prompts": {"min": 1},
    "modebench_seed": {"min": 0},
    "modebench_min_modes": {"min": 1},
    "modebench_max_modes": {"min": 1},
    "modebench_numbers": {"min": 3, "max": 4},
    "modebench_largest_number": {"min": 5, "max": 30},
    "modebench_vertices": {"min": 3, "max": 12},
    "modebench_hidden": {"min": 1, "max": 8},
    "benchmark_samples": {"min": 1},
    "benchmark_max_problems": {"min": 1},
    "benchmark_temperature": {"min": 0.0},
    "repetition_n_grams": {"min": 1},
    "repetition_max_penalty": {"max": 0.0},
    "cosine_max_len": {"min": 1},
    "soft_punish_cache": {"min": 1},
    "reward_timeout": {"min": 0.01},
    "reward_memory_gib": {"min": 0.1},
    "reward_workers": {"min": 1},
    "reward_max_no_verdict": {"min": 0.0, "max": 1.0},
    "report_samples": {"min": 0},
    "kl_target": {"min": 1e-9},
    "kl_horizon": {"min": 1.0},
    "kl_ctl_step_size": {"min": 1e-6, "max": 0.99},
    "maxent_tau": {"min": 0.0, "infinite": True},
    "maxent_beta": {"min": 0.0},
    "maxent_q_temperature": {"min": 1e-6},
    "maxent_q_epsilon": {"min": 0.0},
    "maxent_target_weight_entropy": {"min": 0.0},
    "maxent_target_eff_rollouts": {"min": 1.0},
    "maxent_tau_lr": {"min": 1e-6},
    "maxent_tau_min": {"min": 1e-9},
    "maxent_tau_max": {"min": 1e-9},
    "maxent_tau_warmup_steps": {"min": 0},
    "lora_r": {"min": 1},
    "lora_alpha": {"min": 1},
    "lora_dropout": {"min": 0.0, "max": 0.99},
    # TRL, torch and vLLM refuse these too, after the server has started.
    "adam_beta1": {"min": 0.0, "max": 1.0},
    "adam_beta2": {"min": 0.0, "max": 1.0},
    "weight_decay": {"min": 0.0},
    "max_grad_norm": {"min": 0.0},
    "warmup_steps": {"min": 0.0},
    "num_train_epochs": {"min": 0.0},
    "min_p": {"min": 0.0, "max": 1.0},
    "top_k": {"min": -1},
    "repetition_penalty": {"min": 1e-6},
    "dataloader_num_workers": {"min": 0},
    "steps_per_generation": {"min": 1},
    "generation_batch_size": {"min": 1},
    "num_generations_eval": {"min": 1},
    "epsilon_high": {"min": 0.0},
    "ref_model_mixup_alpha": {"min": 0.0, "max": 1.0},
    "top_entropy_quantile": {"min": 0.0, "max": 1.0},
    "num_completions_to_print": {"min": 0},
    "eval_steps": {"min": 0.0},
    "eval_delay": {"min": 0.0},
    "DatasetConfig.weight": {"min": 0.0001, "max": 1.0},
}

# Environment variables that stand for a key; a flag of the same key wins over the variable, which wins over the recipe.
ENVIRONMENT_KEYS: dict[str, str] = {
    "RUN_NAME": "run_name",
    "RUN_ROOT": "run_root",
    "VLLM_MODE": "vllm_mode",
    "VLLM_PORT": "vllm_server_port",
    "VLLM_GROUP_PORT": "vllm_group_port",
    "VLLM_TP_SIZE": "vllm_tensor_parallel_size",
    "VLLM_MAX_LEN": "vllm_max_model_length",
    "VLLM_MEM_UTIL": "vllm_gpu_memory_utilization",
    "MASTER_PORT": "main_process_port",
    "ACCELERATOR": "accelerator",
    "TRAIN_SEED": "seed",
    "MAXENT_OBJECTIVE": "maxent_objective",
    "MAXENT_TAU": "maxent_tau",
    "MAXENT_BETA": "maxent_beta",
    "MAXENT_Q_TEMPERATURE": "maxent_q_temperature",
    "MAXENT_Q_EPS": "maxent_q_epsilon",
    "MAXENT_LENGTH_NORM_REF": "maxent_length_normalize_ref",
    "WANDB_PROJECT": "wandb_project",
    "WANDB_ENTITY": "wandb_entity",
    "WANDB_RUN_GROUP": "wandb_run_group",
}


@functools.cache
def catalogue() -> dict[str, dict[str, Any]]:
    """Every key a recipe may hold: name -> type, default, help and limits."""
    return json.loads(CATALOGUE_FILE.read_text(encoding="utf-8"))["keys"]


@functools.cache
def nested_catalogue() -> dict[str, dict[str, dict[str, Any]]]:
    """Keys of the mappings inside a key, e.g. ``dataset_mixture.datasets`` -> name -> type, default, help."""
    return json.loads(CATALOGUE_FILE.read_text(encoding="utf-8"))["nested"]


@functools.cache
def catalogue_trl() -> str:
    """The TRL version whose options the catalogue lists."""
    return json.loads(CATALOGUE_FILE.read_text(encoding="utf-8"))["trl"]


def nearest(name: str) -> str | None:
    """The catalogue's key most like ``name``, or that a variable ``name`` stands for; None when nothing is close."""
    if name.upper() in ENVIRONMENT_KEYS:
        return ENVIRONMENT_KEYS[name.upper()]
    begun = [key for key in catalogue() if key.startswith(name)]
    return begun[0] if len(begun) == 1 else nearest_of(name, [*catalogue(), *OBSOLETE_KEYS])


def nearest_of(name: str, names: Iterable[str]) -> str | None:
    """The one of ``names`` most like ``name``, or None when nothing is close."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return close[0] if close else None


SRUN_OPTIONS = "GRPO_SRUN_OPTIONS"


# Every variable the launcher reads beside those in keys.ENVIRONMENT_KEYS.
READ_VARIABLES: dict[str, str] = {
    "CONFIG": "the recipe, when none is named on the command line",
    "CONFIG_FILE": "an accelerate file instead of TRL's packaged one",
    "TRAIN_ENTRYPOINT": "entry script of the trainers, by default src/grpo.py, or src/maxent-grpo.py of a MaxEnt run",
    "MAXENT": "1 selects src/maxent-grpo.py and a MaxEnt recipe, 0 refuses one",
    "VLLM_MODEL": "must equal the recipe's model_name_or_path",
    "CACHE_ROOT": "where downloads go unless HF_HOME says otherwise; .cache in the repository by default",
    "HF_HOME": "where the hub's clients keep downloads and the login",
    "HF_ENDPOINT": "the hub's address, of a mirror for example",
    "HF_HUB_OFFLINE": "1: the hub is never asked; 0: a run's processes may ask it though everything is here",
    "HF_TOKEN": "the login at the hub; never written or printed",
    "GRPO_HOME": "the repository, when training.sh is submitted from elsewhere",
    CODE_VARIABLE: "the frozen code of a submitted run, which its batch script names",
    "CUDA_VISIBLE_DEVICES": "the GPUs to use",
    "SLURM_GPU_FLAG_STYLE": "none, gpus or gres: how grpo submit asks for GPUs, whatever the profile says",
    "SLURM_TMPDIR": "node-local folder for temporary files",
    "NETWORK_INTERFACE": "the network interface by which the nodes of a job reach each other, e.g. ib0",
    "NCCL_SOCKET_IFNAME": "NCCL's own: the nodes' interface where NETWORK_INTERFACE is unset",
    "GLOO_SOCKET_IFNAME": "gloo's own: the nodes' interface where the two above are unset",
    SRUN_OPTIONS: "further options of the srun that reaches the nodes of a job; srun_options of a profile",
}


# What training.sh, scripts/setup.sh and slurm/train.slurm read before there is a Python to ask.
SHELL_VARIABLES: dict[str, str] = {
    "DEVICE": "cuda, cpu or auto: the packages that are installed",
    "ENV_MODE": "venv or conda: the kind of environment that is made",
    "ENV_DIR": "where the environment is; .venv in the repository by default",
    "PYTHON": "the Python that makes the environment",
    "MODULES": "modules to load first, separated by spaces",
    "ENV_ACTIVATE": "a file to source: that environment is used as it is",
    "CONDA_ENV": "a conda environment to use as it is",
    "CONDA_SH": "conda's etc/profile.d/conda.sh",
    "MODEL": "of slurm/train.slurm: --model, the folder under recipes/",
    "TASK": "of slurm/train.slurm: --task, grpo or maxent",
    "CONFIG_SUFFIX": "of slurm/train.slurm: --config, the recipe config_SUFFIX.yaml",
    "TP": "of slurm/train.slurm: --tp, GPUs of the vLLM server",
    "DP": "of slurm/train.slurm: --dp, 1",
    "OPTIONAL_ARGS": "of slurm/train.slurm: --args, further options of grpo launch",
}
