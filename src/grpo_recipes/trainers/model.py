"""The model: loaded as the recipe says, its LoRA adapter, its reference, and saved one ``from_pretrained`` away."""

import copy
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from accelerate import Accelerator
from accelerate.utils import is_peft_model
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from trl.trainer import grpo_trainer

from grpo_recipes.attributes import replaced
from grpo_recipes.errors import config_error, translate
from grpo_recipes.recipe.configs import GRPOConfig, ModelConfig
from grpo_recipes.trainers.rank import shards_weights
from grpo_recipes.weights.lora import base_name


def quoting(kinds: tuple[type[Exception], ...], where: str, what: str, fix: str) -> AbstractContextManager[None]:
    """Turn a library's error inside into a config error that quotes it in a line."""
    return translate(kinds, lambda error: config_error(where, f"{what}: {' '.join(str(error).split())[:300]}", fix))


def load_tokenizer(model_args: ModelConfig, args: GRPOConfig) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer at the recipe's revision."""
    name, revision = model_args.model_name_or_path, model_args.model_revision
    return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=args.trust_remote_code)


def model_init_kwargs(model_args: ModelConfig, args: GRPOConfig) -> dict[str, Any]:
    """Return arguments of ``from_pretrained`` for the trained model and its reference."""
    ours = {"dtype": model_args.dtype, "attn_implementation": model_args.attn_implementation}
    kwargs = {"revision": model_args.model_revision, **ours, **(args.model_init_kwargs or {})}
    return {name: value for name, value in kwargs.items() if value is not None}


def save_model(trainer: Any, folder: Path) -> None:
    """Write the whole model, of a LoRA run merged and with ``adapter/`` beside it, and its tokenizer; by every rank."""
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    main = trainer.accelerator.is_main_process

    def save_aside(folder: Path, save: Callable[[Path], None]) -> None:
        partial = folder.with_name(f".{folder.name}.partial")
        save(partial)
        if main:
            trainer.processing_class.save_pretrained(partial)
            shutil.rmtree(folder, ignore_errors=True)
            partial.replace(folder)
        trainer.accelerator.wait_for_everyone()

    lora = is_peft_model(model)
    save_aside(folder.with_name("adapter") if lora else folder, lambda partial: trainer.save_model(str(partial)))
    if lora:
        save_aside(folder, lambda partial: save_merged(model, partial) if main else None)


@contextmanager
def reference_of(args: GRPOConfig) -> Iterator[None]:
    """Let TRL build inside the reference that the recipe names; it knows none but the model as training begins."""
    name = args.ref_model_name_or_path
    with replaced(grpo_trainer, get_config_model_id=lambda _: name) if name else nullcontext():
        yield


@contextmanager
def loaded_by_every_rank(args: GRPOConfig) -> Iterator[None]:
    """Let every rank read the weights while TRL builds a reference under FSDP."""
    # With efficient loading rank 0 alone does, and under FSDP2 nobody sends the reference's to the others.
    name = "FSDP_CPU_RAM_EFFICIENT_LOADING"
    before = os.environ.get(name)
    if before is not None and args.beta != 0.0:
        os.environ[name] = "false"
    try:
        yield
    finally:  # of this variable alone: TRL and accelerate set others, which stay
        if before is not None:
            os.environ[name] = before


def save_reference(trainer: Any, folder: Path) -> None:
    """Write the reference, which ``sync_ref_model`` moves, into a checkpoint: TRL builds it from the initial model."""
    if shards_weights(trainer.accelerator) or trainer.accelerator.is_main_process:
        torch.save([own_part(one) for one in trainer.ref_model.parameters()], _reference_file(trainer, folder))


def load_reference(trainer: Any, folder: Path) -> None:
    """Put the reference back as it was last synced before the checkpoint."""
    path = _reference_file(trainer, folder)
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: sync_ref_model was not on when the checkpoint was made")
    saved = torch.load(path, map_location="cpu", weights_only=True)
    for parameter, value in zip(trainer.ref_model.parameters(), saved, strict=True):
        own_part(parameter).copy_(value)


def _reference_file(trainer: Any, folder: Path) -> Path:
    """Return this rank's where each holds a part, else rank 0's."""
    rank = trainer.args.process_index if shards_weights(trainer.accelerator) else 0
    return folder / f"reference_{rank}.pt"


def own_part(parameter: torch.Tensor) -> torch.Tensor:
    """Return what this process holds of a parameter, not a copy: FSDP's and ZeRO-3's are shards."""
    data = getattr(parameter, "ds_tensor", parameter).detach()
    return data.to_local() if hasattr(data, "to_local") else data


def load_lora_config(model_args: ModelConfig, trust_remote_code: bool) -> LoraConfig | None:
    """Return the recipe's adapter, None without ``use_peft``, checked against the model's configuration."""
    config = trl.get_peft_config(model_args)
    if config is not None:
        check_adapter(skeleton(model_args, trust_remote_code), config)
    return config


def skeleton(model_args: ModelConfig, trust_remote_code: bool) -> PreTrainedModel:
    """Build the model's layers on the meta device; OSError or ValueError without a configuration that is known."""
    name = model_args.model_name_or_path
    config = AutoConfig.from_pretrained(name, revision=model_args.model_revision, trust_remote_code=trust_remote_code)
    named = getattr(transformers, (config.architectures or [""])[0], None)
    with torch.device("meta"):
        if named is not None:  # TRL's own choice
            return named._from_config(config)
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def check_adapter(model: PreTrainedModel, config: LoraConfig) -> int:
    """Put an adapter on a skeleton; return how many layers get one. Refuse names that fit none, and tied layers."""

    def layers_called(name: str) -> list[nn.Module]:  # as PEFT matches: the whole name of a layer, or its end
        return [layer for place, layer in model.named_modules() if place == name or place.endswith(f".{name}")]

    kinds = {name.rpartition(".")[2] for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    linear = ", ".join(sorted(kinds))
    targets = config.target_modules if isinstance(config.target_modules, set | list) else []
    saved = config.modules_to_save or []
    for key, names in (("lora_target_modules", targets), ("lora_modules_to_save", saved)):
        for name in sorted(names):
            if not layers_called(name):
                raise config_error(key, f"the model has no layer '{name}'", f"its linear layers are {linear}")
    tied = (model.get_input_embeddings(), model.get_output_embeddings())
    for name in saved if model.config.get_text_config().tie_word_embeddings else []:  # trained alone, saved for both
        if any(layer is one for layer in layers_called(name) for one in tied):
            what = f"'{name}' shares its weights with another layer (tie_word_embeddings)"
            raise config_error("lora_modules_to_save", what, f"remove {name}, or remove use_peft")
    what, fix = "PEFT cannot put the adapter on this model", f"write all-linear, or some of {linear}"
    with quoting((ValueError, TypeError), "lora_target_modules", what, fix):
        return len(_adapted_layers(get_peft_model(model, copy.deepcopy(config))))


def refuse_shards(accelerator: Accelerator) -> None:
    """Refuse a LoRA run where a CONFIG_FILE leaves no process whole weights to merge the adapter into."""
    if shards_weights(accelerator):
        fix = "name another file in CONFIG_FILE, or unset it and write accelerator: ddp or zero2"
        raise ValueError(f"a LoRA run with ZeRO-3 or FSDP has not been shown to work; {fix}")


def merged_parameters(model: PeftModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter of the base model with the adapter merged into it, under the base model's name.

    TRL merges in place and subtracts again: rounding makes the base model drift with every transfer.
    """
    layers = {f"{name}.base_layer.weight": layer for name, layer in _adapted_layers(model).items()}
    for name, parameter in model.named_parameters():
        if model.prefix not in name and "original_module" not in name:
            merged = _merged(layers[name]) if name in layers else parameter.data
            yield base_name(name).replace(".modules_to_save.default.", "."), merged


def _adapted_layers(model: PeftModel) -> dict[str, BaseTunerLayer]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, BaseTunerLayer)}


def _merged(layer: Any) -> torch.Tensor:
    """Return the weight of one layer with its adapter, in a new tensor."""
    weight = layer.get_base_layer().weight
    kept = weight.data
    layer.merge(safe_merge=True)
    merged = weight.data
    weight.data = merged.clone()
    layer.unmerge()  # for PEFT's own books: it works on the copy
    weight.data = kept
    return merged


def save_merged(model: PeftModel, folder: Path) -> None:
    """Write the merged model as ``from_pretrained`` reads it."""
    base = model.get_base_model()
    parameters = dict(base.named_parameters(remove_duplicate=False))
    tensors = {name: tensor for name, tensor in base.state_dict().items() if name not in parameters}  # buffers
    tensors |= {name: tensor.to("cpu", copy=True) for name, tensor in merged_parameters(model)}
    base.save_pretrained(folder, state_dict=tensors)
