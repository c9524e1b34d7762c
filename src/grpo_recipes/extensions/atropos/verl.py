"""Convert the YAML of verl's integration with Atropos to a recipe, by the rows of the table ``verl.yaml``.

The functions convert settings that depend on other settings: batches, trackers and GPUs.
"""

from collections.abc import Mapping
from pathlib import Path

from grpo_recipes.recipe.converters.files import FileConverter
from grpo_recipes.recipe.converters.table import Setting, Settings, short, whole_number
from grpo_recipes.recipe.document import Value
from grpo_recipes.recipe.keys import catalogue
from grpo_recipes.recipe.trackers import TRACKERS

SECTION, ESTIMATOR = "atropos", "grpo_atropos"
_GROUP, _BATCH = "actor_rollout_ref.rollout.n", "data.train_batch_size"
_TENSORS = "actor_rollout_ref.rollout.tensor_model_parallel_size"


def is_atropos(file: Mapping[str, Value]) -> bool:
    """Return whether a YAML file has the section ``atropos`` or the advantage estimator ``grpo_atropos`` of verl."""
    algorithm = file["algorithm"].value if "algorithm" in file else None
    estimator = algorithm.get("adv_estimator") if isinstance(algorithm, dict) else None
    return SECTION in file or estimator == ESTIMATOR


VERL = FileConverter(Path(__file__).with_suffix(".yaml"), __name__, is_atropos)
CONVERTERS = (VERL,)


def whole_groups(setting: Setting, settings: Settings) -> None:
    """Convert verl's train_batch_size, in sequences, to prompts_per_step; reject it if not a multiple of ``n``.

    ``n`` is verl's number of completions per prompt. Do nothing if ``n`` is invalid, which is reported separately.
    """
    size = int(setting.value)
    group = whole_number(settings.values.get(_GROUP, catalogue()["num_generations"]["default"]))
    if not group:
        return  # a wrong number of completions is reported separately
    if remainder := size % group:
        problem = f"{size} is not a multiple of {_GROUP} {group}: run-api would never hand out a batch"
        setting.reject(problem, f"set {size - remainder + group}, or another {_GROUP}")
    else:
        setting.write({"prompts_per_step": size // group})


def mini_batch(setting: Setting, settings: Settings) -> None:
    """Accept verl's mini-batch size without setting a key; reject it if it differs from the whole batch."""
    setting.accept("a step uses the whole batch")
    if setting.value != settings.values.get(_BATCH):
        written = f"{setting.name}{short(setting.value)}"
        setting.reject(f"'{written}' differs from {_BATCH}, but a step uses the whole batch")


def reporters(setting: Setting, _: Settings) -> None:
    """Convert verl's list of loggers to report_to, without "console"; reject a logger that the key does not accept."""
    names = setting.value if isinstance(setting.value, list) else [setting.value]
    unknown = [name for name in names if name not in ("console", *TRACKERS)]
    if unknown:
        setting.reject(f"'{setting.name}' names '{unknown[0]}', which is not supported")
    else:
        setting.write({"report_to": [name for name in names if name != "console"] or ["none"]})


def trainers(setting: Setting, settings: Settings) -> None:
    """Convert verl's n_gpus_per_node to num_processes: all GPUs except the vLLM server's.

    Reject it if no GPU remains. On CPU, accept it without setting a key.
    """
    gpus, parallel = int(setting.value), whole_number(settings.values.get(_TENSORS, 1)) or 1
    count = count_trainers(gpus, parallel)
    if settings.device == "cpu":
        setting.accept("the run is on CPU")
    elif count is None:
        problem = f"'{setting.name}' {gpus} leaves no GPU for training: the server uses {parallel}"
        setting.reject(problem, f"set {parallel + 1} or more, or a smaller {_TENSORS}")
    else:
        setting.write({"num_processes": count})


def count_trainers(gpus: int, parallel: int = 1, shared: bool = False) -> int | None:
    """Return the number of GPUs for training processes: ``gpus`` minus the server's ``parallel``, or all if ``shared``.

    Return None if no GPU remains.
    """
    return max(0, gpus if shared else gpus - parallel) or None


def rows() -> list[tuple[str, str]]:
    """Return the rows of the docs' table of settings: name and meaning, in Markdown."""
    return [(name, row.meaning()) for name, row in VERL.table.by_name.items()]
