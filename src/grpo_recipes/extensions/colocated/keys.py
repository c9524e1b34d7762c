"""The YAML of co-located trainers, e.g. with a section ``vllm_config``, as a recipe. Its settings are in ``keys.yaml``.

The same names in any other recipe are rejected by ``recipe/converters/names.yaml``.
"""

from collections.abc import Mapping
from pathlib import Path

from grpo_recipes.recipe.converters.files import FileConverter
from grpo_recipes.recipe.converters.table import Setting, Settings, whole_number
from grpo_recipes.recipe.document import Value

_FSDP_PARTS = {"sharding_strategy", "cpu_offload", "mixed_precision"}


def is_colocated(file: Mapping[str, Value]) -> bool:
    """Return whether a file is the YAML of a co-located trainer; TRL has an ``fsdp_config`` of other parts."""
    sharding = file["fsdp_config"].value if "fsdp_config" in file else None
    sharded = isinstance(sharding, dict) and not _FSDP_PARTS.isdisjoint(sharding)
    return sharded or "vllm_config" in file or "sync_frequency" in file


CONVERTERS = (FileConverter(Path(__file__).with_suffix(".yaml"), __name__, is_colocated),)


def whole_groups(setting: Setting, settings: Settings) -> None:
    """Read a batch of completions as prompts: it is whole groups of ``num_generations``."""
    size, group = setting.number, whole_number(settings.key("num_generations"))
    if not group:
        return  # a wrong num_generations is reported at its own place
    if remainder := size % group:
        fix = f"write batch_size: {size - remainder + group}, or another num_generations"
        setting.reject(f"batch_size {size} is not whole groups of num_generations {group}", fix)
    else:
        setting.write({"prompts_per_step": size // group})


def sync(setting: Setting, settings: Settings) -> None:
    """Accept any number of steps between two transfers of weights; no higher number is needed."""
    steps = setting.value
    if type(steps) is not int or steps < 1:
        setting.reject(f"'sync_frequency: {steps}' has no equal here")
    else:
        often = "vLLM gets the weights before every generation, which is more often"
        setting.accept(setting.row.why if steps == 1 else often)
