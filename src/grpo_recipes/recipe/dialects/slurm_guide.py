"""The dialect of the Slurm training guide: keys of its recipes, flags of its script. Its variables are ours too."""

from __future__ import annotations

# Its name of a key -> ours; both in one place contradict each other.
ALIASES: dict[str, str] = {
    "gen_temperature": "temperature",
    "gen_top_p": "top_p",
    "init_kl_coeff": "beta",
}

# Its keys that have no counterpart -> what to write instead.
REFUSED: dict[str, str] = {
    "clip_range": "write epsilon (and epsilon_high)",
    "vllm_url": "write vllm_server_host and vllm_server_port",
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

# Variables that slurm/train.slurm turns into flags of grpo launch before there is a Python to ask.
SHELL_VARIABLES: dict[str, str] = {
    "MODEL": "of slurm/train.slurm: --model, the folder under recipes/",
    "TASK": "of slurm/train.slurm: --task, grpo or maxent",
    "CONFIG_SUFFIX": "of slurm/train.slurm: --config, the recipe config_SUFFIX.yaml",
    "TP": "of slurm/train.slurm: --tp, GPUs of the vLLM server",
    "DP": "of slurm/train.slurm: --dp, 1",
    "OPTIONAL_ARGS": "of slurm/train.slurm: --args, further options of grpo launch",
}
