"""LoRA: the recipe's adapter, checked against the model's layers, and the base model with it merged, left untouched."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from accelerate import Accelerator
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from grpo_recipes.errors import config_error
from grpo_recipes.recipe.configs import ModelConfig
from grpo_recipes.trainers.rank import shards_weights

_ALL_LINEAR = "all-linear"


def load_lora_config(model_args: ModelConfig, trust_remote_code: bool) -> LoraConfig | None:
    """The adapter as the recipe says, None without ``use_peft``. Reads the model's configuration, no weights.

    Raises:
        ConfigError: it does not fit the model.
    """
    config = trl.get_peft_config(model_args)
    if config is not None:
        check_adapter(skeleton(model_args, trust_remote_code), config)
    return config


def skeleton(model_args: ModelConfig, trust_remote_code: bool) -> PreTrainedModel:
    """The model's layers on the meta device, made from its configuration alone.

    Raises:
        OSError, ValueError: there is no configuration, or none that transformers knows.
    """
    name = model_args.model_name_or_path
    config = AutoConfig.from_pretrained(name, revision=model_args.model_revision, trust_remote_code=trust_remote_code)
    named = getattr(transformers, (config.architectures or [""])[0], None)
    with torch.device("meta"):
        if named is not None:  # TRL's own choice
            return named._from_config(config)
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def check_adapter(model: PreTrainedModel, config: LoraConfig) -> int:
    """Whether every layer the recipe names is in the model; PEFT is content with one of them.

    Args:
        model: a skeleton; it gets the adapter.
        config: the adapter, left as it is.

    Returns:
        How many layers get an adapter.

    Raises:
        ConfigError: a name that fits no layer, a layer that cannot have an adapter, or one tied to another.
    """
    linear = ", ".join(
        sorted({name.rpartition(".")[2] for name, layer in model.named_modules() if isinstance(layer, nn.Linear)})
    )
    targets = config.target_modules if isinstance(config.target_modules, set | list) else []
    for key, names in (("lora_target_modules", targets), ("lora_modules_to_save", config.modules_to_save or [])):
        for name in sorted(names):
            if not _layers_called(model, name):
                raise config_error(key, f"the model has no layer '{name}'", f"its linear layers are {linear}")
    _check_tied(model, config)
    try:
        adapted = get_peft_model(model, copy.deepcopy(config))
    except (ValueError, TypeError) as error:
        what = f"PEFT cannot put the adapter on this model: {' '.join(str(error).split())[:300]}"
        raise config_error("lora_target_modules", what, f"write {_ALL_LINEAR}, or some of {linear}") from error
    return len(_adapted_layers(adapted))


def _layers_called(model: PreTrainedModel, name: str) -> list[nn.Module]:
    """As PEFT matches: the whole name of a layer, or its end."""
    return [layer for place, layer in model.named_modules() if place == name or place.endswith(f".{name}")]


def _check_tied(model: PreTrainedModel, config: LoraConfig) -> None:
    """Of two layers that share their weights, one alone would be trained, and saved for both."""
    if not model.config.get_text_config().tie_word_embeddings:
        return
    tied = (model.get_input_embeddings(), model.get_output_embeddings())
    for name in config.modules_to_save or []:
        if any(layer is one for layer in _layers_called(model, name) for one in tied):
            what = f"'{name}' shares its weights with another layer (tie_word_embeddings)"
            raise config_error("lora_modules_to_save", what, f"remove {name}, or remove use_peft")


def refuse_shards(accelerator: Accelerator) -> None:
    """The ``accelerator`` key is checked with the recipe; a file of the user's own (CONFIG_FILE) is seen here alone.

    Raises:
        ValueError: no process holds whole weights (ZeRO-3, FSDP), so none can merge the adapter into them.
    """
    if shards_weights(accelerator):
        raise ValueError(
            "a LoRA run with ZeRO-3 or FSDP has not been shown to work; name another file in CONFIG_FILE, or unset it "
            "and write accelerator: ddp or zero2"
        )


def merged_parameters(model: PeftModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter of the base model with the adapter merged into it, one at a time, under the base model's name.

    The model itself stays as it is. TRL merges in place and subtracts again: rounding leaves a base model that drifts
    with every transfer, of which a resumed run knows nothing.

    Args:
        model: with one LoRA adapter.
    """
    layers = {f"{name}.base_layer.weight": layer for name, layer in _adapted_layers(model).items()}
    for name, parameter in model.named_parameters():
        if model.prefix in name or "original_module" in name:
            continue
        plain = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        plain = plain.replace(".modules_to_save.default.", ".")
        layer = layers.get(name)
        yield plain, parameter.data if layer is None else _merged(layer)


def _adapted_layers(model: PeftModel) -> dict[str, BaseTunerLayer]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, BaseTunerLayer)}


def _merged(layer: Any) -> torch.Tensor:
    """The weight of one layer with its adapter, in a tensor of its own."""
    weight = layer.get_base_layer().weight
    kept = weight.data
    try:
        layer.merge(safe_merge=True)
        merged = weight.data
        weight.data = merged.clone()
        layer.unmerge()  # for PEFT's own books: it works on the copy
    finally:
        weight.data = kept
    return merged


def save_merged(model: PeftModel, folder: Path) -> None:
    """Write the merged model as ``from_pretrained`` reads it."""
    base = model.get_base_model()
    parameters = dict(base.named_parameters(remove_duplicate=False))
    tensors = {name: tensor for name, tensor in base.state_dict().items() if name not in parameters}  # buffers
    tensors |= {name: tensor.to("cpu", copy=True) for name, tensor in merged_parameters(model)}
    base.save_pretrained(folder, state_dict=tensors)
