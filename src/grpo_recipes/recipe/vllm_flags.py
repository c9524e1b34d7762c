"""The flags of ``vllm serve`` that a recipe may set with ``vllm_args``, and the flags that the launcher sets itself.

``keys.json`` has the name and the type of every flag of the locked vLLM (``scripts/make_keys.py``), so a check imports
no vLLM. ``passed_on.py`` checks the names and the types::

    flag_words({"max_num_batched_tokens": 4096})  # ["--max-num-batched-tokens", "4096"]
"""

import json
from collections.abc import Mapping
from typing import Any

from grpo_recipes.recipe.keys import expand_names, passed_catalogue

KEY = "vllm_args"
_PLACES = "the launcher places the server's processes"
_ANSWERS = "the trainer needs it to read the answers"
_TOKEN = "requests need the run's token"
_WEIGHTS = "the server must have the trainer's weights"
# Flags that a recipe must not set -> the recipe key that sets them, or the reason.
OWNED_FLAGS = expand_names(
    ("model model_tag tokenizer hf_config_path", "model_name_or_path"),
    ("revision code_revision tokenizer_revision", "model_revision"),
    ("dtype", "dtype"),
    ("chat_template", "chat_template"),
    ("trust_remote_code", "trust_remote_code"),
    ("host", "vllm_server_host"),
    ("port", "vllm_server_port"),
    ("max_model_len", "vllm_max_model_length"),
    ("max_num_seqs", "vllm_max_num_seqs"),
    ("tensor_parallel_size", "vllm_tensor_parallel_size"),
    ("data_parallel_size", "vllm_data_parallel_size"),
    ("data_parallel_size_local", "vllm_data_parallel_size_local"),
    ("gpu_memory_utilization device_memory_utilization", "vllm_gpu_memory_utilization"),
    ("enforce_eager", "vllm_enforce_eager"),
    ("model_impl", "vllm_model_impl"),
    ("seed scheduling_policy", "seed_server"),
    ("enable_lora max_lora_rank", "weight_sync: lora sets it"),
    ("lora_modules default_mm_loras max_loras max_cpu_loras", "the server has only the trained adapter"),
    ("enable_sleep_mode", "a server does not sleep"),
    ("generation_config override_generation_config", "keys such as temperature and top_p set the sampling"),
    ("hf_token", "export HF_TOKEN instead"),
    ("download_dir", "export HF_HOME instead"),
    ("log_level logging_config log_config_file", "export VLLM_LOGGING_LEVEL instead"),
    ("api_key middleware", _TOKEN),
    ("uds root_path ssl_keyfile ssl_certfile ssl_ca_certs enable_ssl_refresh ssl_cert_reqs ssl_ciphers",
     "the trainer uses http and the port"),
    ("quantization quantization_config hf_overrides model_class_overrides config_format", _WEIGHTS),
    ("served_model_name", "the name identifies the run"),
    ("worker_cls worker_extension_cls weight_transfer_config", "the launcher loads and verifies weights with it"),
    ("logits_processors watermark_config", "the trainer scores the model's own distribution"),
    ("logprobs_mode max_logprobs enable_scale_out", _ANSWERS),
    ("skip_tokenizer_init tokens_only runner convert", _ANSWERS),
    ("disable_log_stats", "the launcher detects a hung server by its statistics"),
    ("config", "set its flags in vllm_args"),
    ("api_server_count", "each process would count only its own requests and syncs"),
    ("headless grpc nnodes node_rank master_addr master_port pipeline_parallel_size "
     "prefill_context_parallel_size device_ids distributed_executor_backend aggregate_engine_logging "
     "enable_elastic_ep elastic_ep_max_dp_size enable_fault_tolerance fault_tolerance_config "
     "data_parallel_rank data_parallel_start_rank data_parallel_address "
     "data_parallel_rpc_port data_parallel_backend data_parallel_hybrid_lb data_parallel_external_lb "
     "data_parallel_multi_port_external_lb data_parallel_supervisor_port dp_supervisor_probe_interval_s "
     "dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold", _PLACES),
)  # fmt: skip


def flag_words(arguments: Mapping[str, Any] | None) -> list[str]:
    """Return ``vllm_args`` as words of vLLM's command line, [] for None; a flag with the value None is omitted.

    Raise KeyError for a name that is not a flag of vLLM in ``keys.json``.
    """
    words: list[str] = []
    for name, value in (arguments or {}).items():
        flag, kind = name.replace("_", "-"), passed_catalogue()[KEY][""][name]["type"]
        if value is None:
            continue
        if kind == "bool":
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif kind.startswith("list["):
            words += [f"--{flag}", *map(str, value)]
        else:
            words += [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]
    return words
