"""The dialect of older TRL and transformers: keys and variables that today's do not read."""

from __future__ import annotations

# Key -> what to write instead.
REFUSED: dict[str, str] = {
    "torch_dtype": "write dtype: bfloat16",
    "evaluation_strategy": "write eval_strategy",
    "warmup_ratio": "write warmup_steps with a number below 1, e.g. warmup_steps: 0.1",
    "overwrite_output_dir": "remove it; every launch makes a new run directory, --resume continues one",
    "no_cuda": "remove it; use DEVICE=cpu for a CPU environment",
    "logging_dir": "export TENSORBOARD_LOGGING_DIR",
    "save_safetensors": "remove it; checkpoints are always safetensors",
    "use_mps_device": "remove it; use DEVICE=cpu or DEVICE=cuda",
}

# A refused key -> the value with which it asks for what happens anyway: accepted with a note.
HARMLESS = {"overwrite_output_dir": False}

# Variable -> what to set instead.
UNREAD_VARIABLES: dict[str, str] = {
    "TRANSFORMERS_CACHE": "set CACHE_ROOT or HF_HOME",
    "HF_HUB_ENABLE_HF_TRANSFER": "set HF_XET_HIGH_PERFORMANCE=1",
    "HF_HUB_REQUEST_TIMEOUT": "set HF_HUB_DOWNLOAD_TIMEOUT",
    "TORCH_LOAD_WEIGHTS_ONLY": "unset it",
    "TORCH_FORCE_FULL_STATE_DICT": "unset it",
    "FLASH_ATTENTION_FORCE_DISABLED": "write attn_implementation: sdpa",
    "TRANSFORMERS_NO_FLASH_ATTN": "write attn_implementation: sdpa",
}
