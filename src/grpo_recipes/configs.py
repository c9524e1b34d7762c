"""Every recipe key: TRL's dataclasses plus ours, one documented line a field.

Only the trainer imports this module, since importing TRL takes torch and seconds. ``check``, ``plan`` and ``launch``
know keys from ``keys.json``, which ``make keys`` writes from here; a test fails when the two differ.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import types
import typing
from dataclasses import dataclass, field
from typing import Any

import trl

from grpo_recipes.keys import CATALOGUE_FILE, OWNED_KEYS, RANGES, TRL_CHOICES


def _key(default: Any, help: str, choices: list[str] | None = None) -> Any:
    """A field with its help line and choices. Ranges stand in ``keys.RANGES``: argparse knows none."""
    metadata = {"help": help, "choices": choices} if choices else {"help": help}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class ScriptArguments(trl.ScriptArguments):
    """Where prompts, solutions and rewards come from, and where the run goes."""

    dataset_prompt_column: str = _key("problem", "Column holding the problem text or a list of chat messages.")
    dataset_solution_column: str = _key("answer", "Column holding the reference solution given to the rewards.")
    dataset_solution_marker: str | None = _key(
        None, "Keep only what follows the last occurrence of this text in the solution, e.g. '####' for GSM8K."
    )
    system_prompt: str | None = _key(None, "System message put before every prompt.")
    chat_template: str | None = _key(None, "Jinja chat template that replaces the tokenizer's own.")
    max_prompt_length: int | None = _key(
        None, "Longest prompt in tokens after rendering; longer ones are dropped and counted."
    )
    reward_funcs: list[str] = _key(["pure_accuracy_math"], "Names of rewards in the registry, summed by weight.")
    run_root: str = _key("runs", "Folder in which the run directory <run_name>-<timestamp> is made.")
    accelerator: str = _key(
        "auto",
        "How training processes share the model: TRL's packaged accelerate file of that name.",
        choices=["auto", "single", "ddp", "zero2", "zero3", "fsdp2"],
    )
    num_processes: int | None = _key(None, "Training processes; by default one per training GPU, one on CPU.")
    main_process_port: int | None = _key(None, "Rendezvous port of the training processes; 29525 outside Slurm.")


@dataclass
class GRPOConfig(trl.GRPOConfig):
    """TRL's GRPO options plus the batch of the experiment, the weight bridge and its guard."""

    prompts_per_step: int | None = _key(
        None, "Prompts of one optimizer step over all devices; per-device size and accumulation follow from it."
    )
    weight_sync: str = _key(
        "auto",
        "How new weights reach the server: nccl between GPUs, file (safetensors in shared memory) on CPU.",
        choices=["auto", "nccl", "file"],
    )
    weight_guard: bool = _key(
        True, "After every sync prove that the server holds and uses the trainer's weights, or stop the run."
    )
    weight_guard_tolerance: float | None = _key(
        None,
        "Largest mean |log-prob difference| between server and trainer; by default 1e-3 in float32, 5e-2 in bfloat16.",
    )
    seed_server: bool | None = _key(
        None,
        "One sampling seed per prompt and step, so that a CPU run samples the same tokens again; on CPU by default.",
    )
    server_request_timeout: float = _key(
        1800.0, "Longest wait in seconds for one answer of the vLLM server before the run ends."
    )
    vllm_server_timeout: float = _key(600.0, "Longest wait in seconds for the vLLM server to be ready.")
    vllm_mode: str = _key(
        "server",
        "server: vLLM on the first GPUs, training on the others; colocate: vLLM inside every training process.",
        choices=["server", "colocate"],
    )
    vllm_server_host: str = _key("127.0.0.1", "Interface the vLLM server listens on; loopback on one node.")
    vllm_server_port: int = _key(8000, "Port of the vLLM server.")
    vllm_group_port: int = _key(51216, "Port of the NCCL group that carries the weights.")
    vllm_gpu_memory_utilization: float = _key(
        0.9, "Share of GPU memory vLLM may use: 0.90 on its own GPU, about 0.3 when colocated."
    )
    vllm_tensor_parallel_size: int = _key(1, "GPUs one vLLM model is split over.")
    vllm_max_model_length: int | None = _key(None, "Longest prompt plus completion in tokens the server accepts.")
    logging_steps: float = _key(1, "Always 1: one row of metrics.jsonl per optimizer step.")
    save_steps: float = _key(100, "Optimizer steps between checkpoints.")
    save_total_limit: int | None = _key(2, "Complete checkpoints kept; older ones are removed after a new one.")


@dataclass
class ModelConfig(trl.ModelConfig):
    """TRL's model options."""


CONFIGS = (ScriptArguments, GRPOConfig, ModelConfig)


def catalogue() -> dict[str, dict[str, Any]]:
    """The keys of a recipe as plain data: name -> type, default, help, limits, config class."""
    entries: dict[str, dict[str, Any]] = {}
    for config in CONFIGS:
        hints = typing.get_type_hints(config)
        for spec in dataclasses.fields(config):
            if spec.name in OWNED_KEYS or not spec.init or spec.name.startswith("_"):
                continue
            entries[spec.name] = _entry(config.__name__, spec, hints[spec.name])
    return dict(sorted(entries.items()))


def _entry(owner: str, spec: dataclasses.Field, hint: Any) -> dict[str, Any]:
    kind, optional = _kind(hint)
    default = spec.default_factory() if spec.default_factory is not dataclasses.MISSING else spec.default
    choices = spec.metadata.get("choices") or TRL_CHOICES.get(spec.name) or _enum_values(hint)
    entry = {
        "config": owner,
        "type": kind,
        "optional": optional or default is None,
        "default": default.value if isinstance(default, enum.Enum) else default,
        "help": " ".join(str(spec.metadata.get("help", "")).split()),
        **RANGES.get(spec.name, {}),
    }
    if choices:
        entry["choices"] = sorted(choices) if not isinstance(choices, list) else choices
    return entry


def _kind(hint: Any) -> tuple[str, bool]:
    """The catalogue's name of a type annotation, and whether None is allowed."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(hint) if member is not type(None)]
        kinds = {_kind(member)[0] for member in members}
        optional = len(members) < len(typing.get_args(hint))
        for wide in ("dict", "list[str]", "list[any]"):
            if wide in kinds:
                return wide, optional
        return (kinds.pop() if len(kinds) == 1 else "str"), optional
    if typing.get_origin(hint) is list:
        return f"list[{_kind(typing.get_args(hint)[0])[0]}]", False
    if typing.get_origin(hint) is dict or hint is dict:
        return "dict", False
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return "str", False
    return {bool: "bool", int: "int", float: "float", str: "str"}.get(hint, "any"), False


def _enum_values(hint: Any) -> list[str] | None:
    for member in (hint, *typing.get_args(hint)):
        if isinstance(member, type) and issubclass(member, enum.Enum):
            return sorted(str(value.value) for value in member)
    return None


def write_catalogue() -> None:
    """Write ``keys.json`` beside this file."""
    content = {"trl": trl.__version__, "keys": catalogue()}
    CATALOGUE_FILE.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    write_catalogue()
