"""Load the trained model, its LoRA adapter and its reference, and save them so that ``from_pretrained`` reads them.

``merge_parameters`` and ``save_merged`` merge the adapter into the base model. ``check_adapter`` finds problems of a
LoRA config on a model without weights. Under FSDP and ZeRO-3, each rank saves and loads its own part of the reference.
"""

import copy
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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

from grpo_recipes.errors import config_error, translate_errors
from grpo_recipes.recipe.configs import GRPOConfig, ModelConfig
from grpo_recipes.trainers.protocol import InnerTrainer
from grpo_recipes.trainers.rank import shards_weights
from grpo_recipes.weights.lora import get_base_name


def as_config_error(
    kinds: tuple[type[Exception], ...], where: str, problem: str, fix: str
) -> AbstractContextManager[None]:
    """Return a context manager that turns errors of these kinds into a ConfigError.

    Its message is ``problem`` and the error's text in one line.
    """
    return translate_errors(
        kinds, lambda error: config_error(where, f"{problem}: {' '.join(str(error).split())[:300]}", fix)
    )


def load_tokenizer(model_args: ModelConfig, args: GRPOConfig) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer at the recipe's revision."""
    name, revision = model_args.model_name_or_path, model_args.model_revision
    return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=args.trust_remote_code)


def model_init_kwargs(model_args: ModelConfig, args: GRPOConfig) -> dict[str, Any]:
    """Return the arguments of ``from_pretrained`` for the trained model and its reference, without any that is None.

    The recipe's ``model_init_kwargs`` override its revision, dtype and attention implementation. A single process on a
    GPU loads the whole model there.
    """
    from_recipe = {"dtype": model_args.dtype, "attn_implementation": model_args.attn_implementation}
    # TRL passes device_map: auto, which leaves layers that do not fit in the machine's memory.
    is_alone = args.device.type == "cuda" and not torch.distributed.is_initialized()
    place = {"": str(args.device)} if is_alone else None
    defaults: dict[str, Any] = {"revision": model_args.model_revision, "device_map": place, **from_recipe}
    kwargs = {**defaults, **(args.model_init_kwargs or {})}
    return {name: value for name, value in kwargs.items() if value is not None}


def save_model(trainer: transformers.Trainer, folder: Path) -> None:
    """Write the model and its tokenizer to ``folder``. Called by every rank.

    LoRA runs write the merged model there, and the adapter to ``adapter/`` next to it. A folder is replaced only when
    the new folder is complete.
    """
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    is_main = trainer.accelerator.is_main_process

    def save_then_rename(folder: Path, save: Callable[[Path], None]) -> None:
        """Call ``save`` with a temporary folder, add the tokenizer, and let that folder replace ``folder``."""
        partial = folder.with_name(f".{folder.name}.partial")
        save(partial)
        if is_main:
            assert trainer.processing_class is not None
            trainer.processing_class.save_pretrained(partial)
            shutil.rmtree(folder, ignore_errors=True)
            partial.replace(folder)
        trainer.accelerator.wait_for_everyone()

    is_lora = is_peft_model(model)
    trained = folder.with_name("adapter") if is_lora else folder
    save_then_rename(trained, lambda partial: trainer.save_model(str(partial)))
    if is_lora:
        save_then_rename(folder, lambda partial: save_merged(model, partial) if is_main else None)


@contextmanager
def configured_reference(args: GRPOConfig) -> Iterator[None]:
    """In the block, let TRL load the reference model from ``ref_model_name_or_path`` if it is set.

    TRL has no setting for this: it loads the reference from the name of the trained model. The block replaces
    ``get_config_model_id``, TRL's function that returns this name.
    """
    name, model_id = args.ref_model_name_or_path, grpo_trainer.get_config_model_id
    if name:
        grpo_trainer.get_config_model_id = lambda config: str(name)
    try:
        yield
    finally:
        grpo_trainer.get_config_model_id = model_id


@contextmanager
def loaded_by_every_rank(args: GRPOConfig, frozen: bool = False) -> Iterator[None]:
    """In the block, turn off FSDP's efficient loading, an environment variable, if a frozen model is loaded there.

    With efficient loading only rank 0 reads weights from disk, and FSDP2 never sends a frozen model to the other ranks.
    ``frozen`` tells that the block loads a frozen model. A reference and a teacher in the recipe are frozen too.
    """
    name = "FSDP_CPU_RAM_EFFICIENT_LOADING"
    setting = os.environ.get(name)
    if setting is not None and (frozen or args.beta != 0.0 or args.teacher_model_name_or_path):
        os.environ[name] = "false"
    try:
        yield
    finally:
        if setting is not None:
            os.environ[name] = setting


def save_reference(trainer: InnerTrainer, folder: Path) -> None:
    """Write the reference model, which ``sync_ref_model`` updates, into a checkpoint. Called by every rank.

    Under FSDP and ZeRO-3 each rank writes its shard, otherwise only rank 0 writes. On a resume, TRL would load the
    initial model.
    """
    assert trainer.ref_model is not None  # TRL requires it for sync_ref_model
    if shards_weights(trainer.accelerator) or trainer.accelerator.is_main_process:
        shards = [get_local_shard(parameter) for parameter in trainer.ref_model.parameters()]
        torch.save(shards, _get_reference_file(trainer, folder))


def load_reference(trainer: InnerTrainer, folder: Path) -> None:
    """Copy the reference in a checkpoint into the trainer's reference model, in place.

    Raise FileNotFoundError if this rank's file is missing.
    """
    assert trainer.ref_model is not None  # TRL requires it for sync_ref_model
    path = _get_reference_file(trainer, folder)
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: sync_ref_model was not on when the checkpoint was made")
    shards = torch.load(path, map_location="cpu", weights_only=True)
    for parameter, shard in zip(trainer.ref_model.parameters(), shards, strict=True):
        get_local_shard(parameter).copy_(shard)


def _get_reference_file(trainer: InnerTrainer, folder: Path) -> Path:
    """Return the path of this rank's part of the reference model in a checkpoint.

    If the ranks do not hold shards of the weights, this is rank 0's file, which has the whole reference.
    """
    rank = trainer.args.process_index if shards_weights(trainer.accelerator) else 0
    return folder / f"reference_{rank}.pt"


def get_local_shard(parameter: torch.Tensor) -> torch.Tensor:
    """Return the part of a parameter that this process has, without a copy. Only FSDP and ZeRO-3 have shards."""
    data = getattr(parameter, "ds_tensor", parameter).detach()
    shard: torch.Tensor = data.to_local() if hasattr(data, "to_local") else data
    return shard


def load_lora_config(model_args: ModelConfig, trust_remote_code: bool) -> LoraConfig | None:
    """Return the recipe's LoRA config, or None without ``use_peft``. Raise ConfigError if it does not fit the model."""
    config = trl.get_peft_config(model_args)
    if config is None:
        return None
    assert isinstance(config, LoraConfig)  # the only kind that TRL makes
    check_adapter(build_without_weights(model_args, trust_remote_code), config)
    return config


def build_without_weights(model_args: ModelConfig, trust_remote_code: bool) -> PreTrainedModel:
    """Build the model on the meta device, without weights. Raise OSError or ValueError for an unknown configuration."""
    name = model_args.model_name_or_path
    assert name is not None  # `grpo check` requires it
    config = AutoConfig.from_pretrained(name, revision=model_args.model_revision, trust_remote_code=trust_remote_code)
    architecture = getattr(transformers, (config.architectures or [""])[0], None)
    with torch.device("meta"):
        if architecture is not None:  # the class that TRL chooses too
            model: PreTrainedModel = architecture._from_config(config)
            return model
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        return model


def check_adapter(model: PreTrainedModel, config: LoraConfig) -> int:
    """Add the adapter to a model without weights, in place, and return how many layers get one.

    Raise ConfigError for names that the model does not have, for tied layers that would be trained whole, and for
    configs that PEFT rejects.
    """

    def layers_called(name: str) -> list[nn.Module]:  # PEFT compares with the whole path of a layer, or its end
        """Return the layers with this whole path, or with a path that ends in it."""
        return [layer for path, layer in model.named_modules() if path == name or path.endswith(f".{name}")]

    kinds = {name.rpartition(".")[2] for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    linear = ", ".join(sorted(kinds))
    targets = config.target_modules if isinstance(config.target_modules, set | list) else []
    trained_whole = config.modules_to_save or []
    for key, names in (("lora_target_modules", targets), ("lora_modules_to_save", trained_whole)):
        for name in sorted(names):
            if not layers_called(name):
                raise config_error(key, f"the model has no layer '{name}'", f"its linear layers are {linear}")
    tied_layers = (model.get_input_embeddings(), model.get_output_embeddings())
    # Training would change only one of the two layers, and the saved model would have the change in both.
    for name in trained_whole if model.config.get_text_config().tie_word_embeddings else []:
        if any(layer is tied for layer in layers_called(name) for tied in tied_layers):
            problem = f"'{name}' shares its weights with another layer (tie_word_embeddings)"
            raise config_error("lora_modules_to_save", problem, f"remove {name}, or remove use_peft")
    problem, fix = "PEFT can't add the adapter to this model", f"set all-linear, or some of {linear}"
    with as_config_error((ValueError, TypeError), "lora_target_modules", problem, fix):
        return len(_find_adapted_layers(get_peft_model(model, copy.deepcopy(config))))


def reject_shards(accelerator: Accelerator) -> None:
    """Raise ValueError if weights are sharded, which a CONFIG_FILE can request: no process could merge the adapter."""
    if shards_weights(accelerator):
        fix = "set another file in CONFIG_FILE, or unset it and set accelerator: ddp or zero2"
        raise ValueError(f"LoRA with ZeRO-3 or FSDP is not supported. Fix: {fix}")


def merge_parameters(model: PeftModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name in the base model, value) of each parameter, with the adapter merged into a copy of the value.

    The model is unchanged. TRL merges into the model and subtracts the adapter again, so that rounding changes the
    base model with every transfer.
    """
    layers = {f"{name}.base_layer.weight": layer for name, layer in _find_adapted_layers(model).items()}
    for name, parameter in model.named_parameters():
        if model.prefix not in name and "original_module" not in name:
            merged = _merge_layer(layers[name]) if name in layers else parameter.data
            yield get_base_name(name).replace(".modules_to_save.default.", "."), merged


def _find_adapted_layers(model: PeftModel) -> dict[str, BaseTunerLayer]:
    """Return the layers that have an adapter, by name."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, BaseTunerLayer)}


def _merge_layer(layer: Any) -> torch.Tensor:
    """Return the weight of one layer with its adapter merged, in a new tensor. The layer is unchanged."""
    weight = layer.get_base_layer().weight
    base_data = weight.data
    layer.merge(safe_merge=True)
    merged: torch.Tensor = weight.data
    weight.data = merged.clone()
    layer.unmerge()  # resets PEFT's flags and changes only the clone
    weight.data = base_data
    return merged


def save_merged(model: PeftModel, folder: Path) -> None:
    """Write the base model with the adapter merged into it, for ``from_pretrained``. The model is unchanged."""
    base: Any = model.get_base_model()
    parameters = dict(base.named_parameters(remove_duplicate=False))
    tensors = {name: tensor for name, tensor in base.state_dict().items() if name not in parameters}  # buffers
    tensors |= {name: tensor.to("cpu", copy=True) for name, tensor in merge_parameters(model)}
    base.save_pretrained(folder, state_dict=tensors)
