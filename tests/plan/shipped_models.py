"""The models that recipes are shipped for, with the number of their parameters."""

from __future__ import annotations

from grpo_recipes.plan.models import load_shipped_configs

# Folder under recipes/ -> parameters as published, in billions.
PUBLISHED = {
    "Qwen2.5-0.5B-Instruct": 0.494, "Qwen2.5-1.5B-Instruct": 1.544, "Qwen2.5-3B-Instruct": 3.086,
    "Qwen2.5-7B-Instruct": 7.616, "Qwen3-0.6B": 0.596, "Qwen3-4B": 4.022, "Llama-3.1-8B-Instruct": 8.030,
}  # fmt: skip
# Folder under recipes/ -> (config.json, parameters as published, in billions).
SHIPPED = {
    hub_id.partition("/")[2]: (config, PUBLISHED[hub_id.partition("/")[2]])
    for hub_id, config in load_shipped_configs().items()
    if not hub_id.startswith("smoke:")
}
