"""Check by config.json, if it is on this machine, whether a model can be trained and served as the recipe says.

An encoder-decoder is rejected, and so are replicas of a mixture of experts. A model that reads pictures gets only text,
and only its text part is trained. An attention head size that vLLM lacks on CPU is rejected, because its engine dies at
the first request. No torch.
"""

import contextlib
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_recipes.errors import Problem, config_error
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.chat_template import model_folder
from grpo_recipes.recipe.rules import uses_external_server

KEY = "model_name_or_path"
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # vllm/v1/attention/backends/cpu_attn.py
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # names as vLLM reads them
_TEXT_MODEL = "set model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct or another text model"


def model_config(recipe: Recipe, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the content of the model's config.json; {} if it is not on this machine or can't be read."""
    with contextlib.suppress(OSError, ValueError):
        config = json.loads((model_folder(recipe, environment) / "config.json").read_bytes())
        return config if isinstance(config, dict) else {}
    return {}


def reads_pictures(config: Mapping[str, Any]) -> bool:
    """Return whether a model's config.json has a part for pictures (``vision_config``)."""
    return isinstance(config.get("vision_config"), dict)


def kind_problems(recipe: Recipe, environment: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a problem if the model is an encoder-decoder, or if vLLM can't serve it here as the recipe says.

    vLLM needs torchvision for models that read pictures, and it splits experts over all replicas. An external server is
    not checked.
    """
    config = model_config(recipe, environment)
    if config.get("is_encoder_decoder") is True:
        fault = "the model is an encoder-decoder, and GRPO trains only decoders"
        yield recipe.problem(KEY, fault, _TEXT_MODEL)
        return
    starts_vllm = recipe.server.use_vllm and not uses_external_server(recipe)
    if starts_vllm and reads_pictures(config) and importlib.util.find_spec("torchvision") is None:
        fault = "the model reads pictures, and vLLM can't serve it without torchvision, which is not installed"
        yield recipe.problem(KEY, fault, f"{_TEXT_MODEL}, or set use_vllm: false")
    text = config.get("text_config")
    parts = (config, text if isinstance(text, dict) else {})
    has_experts = any(part.get(name) for part in parts for name in _EXPERT_COUNTS)
    if starts_vllm and recipe.server.data_parallel_size != 1 and has_experts:
        fault = "the model is a mixture of experts, and vLLM would give each replica only a part of the experts"
        yield recipe.problem("vllm_data_parallel_size", fault, "set vllm_data_parallel_size: 1")


def find_reward_model_fault(folder: str | Path) -> str | None:
    """Return why the model in a folder can't be a reward, by its config.json; None if it gives one score for a text."""
    config: Any = None
    with contextlib.suppress(OSError, ValueError):
        config = json.loads((Path(folder) / "config.json").read_bytes())
    if not isinstance(config, dict):
        return "its config.json can't be read"
    kinds, labels = config.get("architectures") or ["unknown"], config.get("id2label") or {"0": "", "1": ""}
    if not str(kinds[0]).endswith("ForSequenceClassification"):
        return f"expected a model for sequence classification, got {kinds[0]}"
    return None if len(labels) == 1 else f"expected a model with 1 label, got {len(labels)}"


def kind_note(recipe: Recipe, environment: Mapping[str, str]) -> str:
    """If the model reads pictures, return a note that only its text part is trained, else an empty text."""
    if not reads_pictures(model_config(recipe, environment)):
        return ""
    return f"{recipe[KEY]} reads pictures; only its text part is trained, on prompts without pictures"


def check_unused_weights(recipe: Recipe, environment: Mapping[str, str], accelerator: str, trainers: int) -> None:
    """Raise ConfigError if training on several ranks with DDP would fail at step 2 because of unused weights.

    A model that reads pictures gets only text, so its weights for pictures get no gradient. With gradient
    checkpointing, DDP fails then unless the recipe sets ``use_peft`` or ``ddp_find_unused_parameters``. ``accelerator``
    is the method of the plan, for example "ddp". ``trainers`` is the number of ranks.
    """
    fails = (
        trainers > 1 and accelerator == "ddp" and recipe.processes.gradient_checkpointing and not recipe.lora.use_peft
    )
    if fails and not recipe.processes.ddp_find_unused_parameters and reads_pictures(model_config(recipe, environment)):
        key = "ddp_find_unused_parameters"
        fault = "the model reads pictures, and its weights for pictures get no gradient from text"
        raise config_error(recipe.source(key if recipe.is_set(key) else KEY), fault, f"set {key}: true")


def head_size_problems(recipe: Recipe, _: Mapping[str, str], device: str | None = None) -> Iterator[Problem]:
    """Yield a problem if vLLM on CPU does not support the head_dim of the model's folder.

    Without a local folder or a vLLM of the run, or if ``device`` is not "cpu", nothing is checked.
    """
    if not recipe.server.use_vllm or uses_external_server(recipe) or device != "cpu":
        return
    size = head_size(Path(os.path.expanduser(recipe.model.name)))
    if size is not None and size not in CPU_HEAD_SIZES:
        sizes = ", ".join(map(str, CPU_HEAD_SIZES))
        message = f"head_dim is {size}, but vLLM's attention on CPU supports only {sizes}"
        yield recipe.problem(KEY, message, "use a model with one of these, or set use_vllm: false")


def head_size(folder: Path) -> int | None:
    """Return the size of an attention head from a model folder's config.json, or None if it is unknown.

    Without ``head_dim``, the size is ``hidden_size // num_attention_heads``. Return None for a model with multi-head
    latent attention (MLA), and if the file is missing or damaged.
    """
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, ZeroDivisionError):
        config = json.loads((folder / "config.json").read_bytes())
        config = config.get("text_config") or config
        if config.get("kv_lora_rank"):
            return None
        heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
        return config.get("head_dim") or (hidden // heads if heads and hidden else None)
    return None
