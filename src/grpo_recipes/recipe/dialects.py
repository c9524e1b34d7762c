"""Where foreign names become recipe keys: each is translated, or refused with what to write instead.

A dialect is a table below. ``recipe_keys`` reads one layer of a recipe (a file, the variables, the flags); after
it there are only keys of the catalogue.
"""

from collections.abc import Iterable

from grpo_recipes.errors import Problem
from grpo_recipes.recipe.document import Value, as_bool
from grpo_recipes.recipe.keys import ENVIRONMENT_KEYS, OWNED_KEYS, catalogue, each, nearest_of

# Keys of older TRL and transformers that today's do not read.
OLDER_TRL = each(
    ("torch_dtype", "write dtype: bfloat16"),
    ("evaluation_strategy", "write eval_strategy"),
    ("warmup_ratio", "write warmup_steps with a number below 1, e.g. warmup_steps: 0.1"),
    ("overwrite_output_dir", "remove it; every launch makes a new run directory, --resume continues one"),
    ("no_cuda", "remove it; use DEVICE=cpu for a CPU environment"),
    ("logging_dir", "export TENSORBOARD_LOGGING_DIR"),
    ("save_safetensors", "remove it; checkpoints are always safetensors"),
    ("use_mps_device", "remove it; use DEVICE=cpu or DEVICE=cuda"),
)
# A refused key -> the value with which it asks for what happens anyway: accepted with a note.
HARMLESS = {"overwrite_output_dir": False}
# Variables of older TRL and transformers -> what to set instead.
UNREAD_VARIABLES = each(
    ("TRANSFORMERS_CACHE", "set CACHE_ROOT or HF_HOME"),
    ("HF_HUB_ENABLE_HF_TRANSFER", "set HF_XET_HIGH_PERFORMANCE=1"),
    ("HF_HUB_REQUEST_TIMEOUT", "set HF_HUB_DOWNLOAD_TIMEOUT"),
    ("TORCH_LOAD_WEIGHTS_ONLY TORCH_FORCE_FULL_STATE_DICT", "unset it"),
    ("FLASH_ATTENTION_FORCE_DISABLED TRANSFORMERS_NO_FLASH_ATTN", "write attn_implementation: sdpa"),
)
# Keys of the Slurm training guide: its name -> ours (both in one place contradict each other), and those without one.
ALIASES = {"gen_temperature": "temperature", "gen_top_p": "top_p", "init_kl_coeff": "beta"}
SLURM_GUIDE = each(
    ("clip_range", "write epsilon (and epsilon_high)"),
    ("vllm_url", "write vllm_server_host and vllm_server_port"),
    ("hub_model_revision", "write hub_revision"),
    ("overwrite_hub_revision", "remove it; a push adds a commit to hub_revision"),
    ("push_to_hub_revision", "write push_to_hub: true and hub_revision"),
    ("wandb_log_unique_prompts", "write log_unique_prompts"),
    ("max_completion_len", "write max_completion_length"),
    ("vf_coef gae_lambda gamma horizon clip_range_vf", "remove it; it belongs to PPO's value function"),
    (
        "advantage_normalization reward_normalization reward_clip advantage_clip",
        "write scale_rewards: group, batch or none",
    ),
    (
        "maxent_use_clip_objective maxent_clip_objective_coef maxent_clip_adv_baseline maxent_clip_range",
        "remove it; the clip ratio of every objective is epsilon (and epsilon_high)",
    ),
    ("maxent_logprob_chunk_size", "write per_device_train_batch_size: log-probs are computed in batches of that size"),
    ("vllm_return_logprobs", "remove it; vLLM always returns them, for vllm_importance_sampling_correction"),
    ("init_kl_coef", "write init_kl_coeff, or beta"),
    ("log_kl_per_token log_grad_norm_after_clip return_reward", "remove it; kl and grad_norm are in metrics.jsonl"),
    ("env", "export variables in the shell; a recipe does not change the environment"),
)
OBSOLETE_KEYS = {**OLDER_TRL, **SLURM_GUIDE}


def recipe_keys(layer: Iterable[tuple[str, Value]], problems: list[Problem], notes: list[str]) -> dict[str, Value]:
    """Return what a layer gives for each recipe key; every name that cannot be one becomes a problem."""
    found: dict[str, Value] = {}
    names: dict[str, str] = {}
    for name, raw in layer:
        key = ALIASES.get(name, name)
        if name in HARMLESS and as_bool(raw.value) is HARMLESS[name]:
            notes.append(f"{raw.source} {str(raw.value).lower()} has no effect: {OBSOLETE_KEYS[name]}")
        elif problem := refusal(key, raw.source):
            problems.append(problem)
        else:
            if names.get(key, name) != name:
                what = f"'{name}' and '{names[key]}' are two names of one key"
                problems.append(Problem(raw.source, what, f"keep {key}"))
            elif key != name:
                notes.append(f"{raw.source}: '{name}' is read as {key}")
            found[key], names[key] = raw, name
    return found


def refusal(key: str, source: str) -> Problem | None:
    """Return why a name is not a key of the catalogue, and what to write instead; None where it is one."""
    if key in catalogue():
        return None
    if key in OWNED_KEYS:
        return Problem(source, f"'{key}' is not a recipe's to set", OWNED_KEYS[key])
    if key in OBSOLETE_KEYS:
        return Problem(source, f"'{key}' is obsolete", OBSOLETE_KEYS[key])
    close = nearest(key)
    flag = " (flags are not abbreviated)" if source.startswith("--") and close and close.startswith(key) else ""
    return Problem(source, f"unknown key '{key}'{flag}", f"write '{close}'" if close else "remove it")


def nearest(name: str) -> str | None:
    """Return the key most like ``name``, or that a variable ``name`` stands for; None when nothing is close."""
    if name.upper() in ENVIRONMENT_KEYS:
        return ENVIRONMENT_KEYS[name.upper()]
    begun = [key for key in catalogue() if key.startswith(name)]
    return begun[0] if len(begun) == 1 else nearest_of(name, [*catalogue(), *OBSOLETE_KEYS])
