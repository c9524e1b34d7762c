"""The catalogue of recipe keys without torch, and the hand-kept tables that types cannot tell."""

from __future__ import annotations

import difflib
import functools
import json
from pathlib import Path
from typing import Any

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
    "enable_jit_checkpoint": "remove it; its ranks do not agree on the step they save",
    "auto_find_batch_size": "remove it; it changes the experiment's batch, lower per_device_train_batch_size instead",
    "hub_token": "remove it and export HF_TOKEN",
    "vllm_server_base_url": "remove it; the launcher owns the server, set vllm_server_host and vllm_server_port",
    "use_transformers_paged": "use use_transformers_continuous_batching",
    "vllm_importance_sampling_cap": "use vllm_importance_sampling_clip_max",
    "parallelism_config": "use accelerator",
}

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
    "gen_temperature": "write temperature",
    "gen_top_p": "write top_p",
    "env": "export variables in the shell; a recipe does not change the environment",
}

# Plain `str` in TRL's types, so that a typo would only fail inside the trainer.
TRL_CHOICES: dict[str, list[str]] = {
    "loss_type": ["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"],
    "scale_rewards": ["group", "batch", "none"],
    "importance_sampling_level": ["token", "sequence"],
    "vllm_importance_sampling_mode": ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"],
    "vllm_model_impl": ["auto", "vllm", "transformers", "terratorch"],
    "multi_objective_aggregation": ["sum_then_normalize", "normalize_then_sum"],
    "dtype": ["auto", "bfloat16", "float16", "float32"],
}

# Ranges of keys, ours and TRL's: dataclass types cannot tell them.
RANGES: dict[str, dict[str, float]] = {
    "max_prompt_length": {"min": 1},
    "num_processes": {"min": 1},
    "main_process_port": {"min": 1024, "max": 65535},
    "prompts_per_step": {"min": 1},
    "weight_guard_tolerance": {"min": 0.0},
    "server_request_timeout": {"min": 1.0},
    "vllm_server_timeout": {"min": 1.0},
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
    "seed": {"min": 0},
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
}


@functools.cache
def catalogue() -> dict[str, dict[str, Any]]:
    """Every key a recipe may hold: name -> type, default, help and limits."""
    return json.loads(CATALOGUE_FILE.read_text())["keys"]


@functools.cache
def catalogue_trl() -> str:
    """The TRL version whose options the catalogue lists."""
    return json.loads(CATALOGUE_FILE.read_text())["trl"]


def nearest(name: str) -> str | None:
    """The catalogue's key most like ``name``, or None when nothing is close."""
    close = difflib.get_close_matches(name, [*catalogue(), *OBSOLETE_KEYS], n=1, cutoff=0.6)
    return close[0] if close else None
