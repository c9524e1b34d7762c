"""Read the YAML of co-located trainers, e.g. with a section ``vllm_config``, as a recipe.

``keys.yaml`` has its settings. In any other recipe, ``recipe/converters/names.yaml`` rejects the same names.
"""

from collections.abc import Mapping
from pathlib import Path

from grpo_recipes.recipe.converters.files import FileConverter
from grpo_recipes.recipe.converters.table import Setting, Settings, whole_number
from grpo_recipes.recipe.document import Value

_FSDP_PARTS = {"sharding_strategy", "cpu_offload", "mixed_precision"}


def is_colocated(file: Mapping[str, Value]) -> bool:
    """Return whether a file is the YAML of a co-located trainer: by vllm_config, sync_frequency or fsdp_config.

    TRL's own ``fsdp_config`` has other parts.
    """
    sharding = file["fsdp_config"].value if "fsdp_config" in file else None
    sharded = isinstance(sharding, dict) and not _FSDP_PARTS.isdisjoint(sharding)
    return sharded or "vllm_config" in file or "sync_frequency" in file


CONVERTERS = (FileConverter(Path(__file__).with_suffix(".yaml"), __name__, is_colocated),)


def whole_groups(setting: Setting, settings: Settings) -> None:
    """Convert batch_size, in completions, to prompts_per_step; reject it if not a multiple of num_generations.

    Do nothing if num_generations is invalid, which is reported separately.
    """
    size, group = int(setting.value), whole_number(settings.key("num_generations"))
    if not group:
        return  # the setting num_generations reports its own problem
    if remainder := size % group:
        fix = f"set batch_size: {size - remainder + group}, or change num_generations"
        setting.reject(f"batch_size {size} is not whole groups of num_generations {group}", fix)
    else:
        setting.write({"prompts_per_step": size // group})


def sync(setting: Setting, settings: Settings) -> None:
    """Accept sync_frequency, the steps between two weight transfers, without setting a key; reject values below 1.

    Here, a transfer precedes every generation.
    """
    steps = setting.value
    if type(steps) is not int or steps < 1:
        setting.reject(f"'sync_frequency: {steps}' has no equivalent here")
    else:
        more_frequent = "vLLM gets the weights before every generation, which is more frequent"
        setting.accept(setting.row.why if steps == 1 else more_frequent)
