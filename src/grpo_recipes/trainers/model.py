"""Loading the model's parts as the recipe says, and leaving the trained one a single ``from_pretrained`` away."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from grpo_recipes.recipe.configs import GRPOConfig, ModelConfig
from grpo_recipes.trainers.lora import save_merged


def load_tokenizer(model_args: ModelConfig, args: GRPOConfig) -> PreTrainedTokenizerBase:
    """The model's tokenizer at the recipe's revision."""
    tokenizer = AutoTokenizer.from_pretrained(
        model_args.model_name_or_path,
        revision=model_args.model_revision,
        trust_remote_code=args.trust_remote_code,
    )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def model_init_kwargs(model_args: ModelConfig, args: GRPOConfig) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` for the trained model and its reference."""
    kwargs = {
        "revision": model_args.model_revision,
        "dtype": model_args.dtype,
        "attn_implementation": model_args.attn_implementation,
        **(args.model_init_kwargs or {}),
    }
    return {name: value for name, value in kwargs.items() if value is not None}


def save_model(trainer: Any, folder: Path) -> None:
    """Write the whole model (gathered from ZeRO-3 or FSDP shards) and its tokenizer, aside first.

    Of a LoRA run that is the merged model; the adapter comes into ``adapter/`` beside it first. Called by every rank:
    gathering is collective.
    """
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    if not is_peft_model(model):
        _save_aside(trainer, folder, lambda partial: trainer.save_model(str(partial)))
        return
    _save_aside(trainer, folder.with_name("adapter"), lambda partial: trainer.save_model(str(partial)))
    main = trainer.accelerator.is_main_process
    _save_aside(trainer, folder, lambda partial: save_merged(model, partial) if main else None)


def _save_aside(trainer: Any, folder: Path, save: Callable[[Path], None]) -> None:
    partial = folder.with_name(f".{folder.name}.partial")
    save(partial)
    if trainer.accelerator.is_main_process:
        trainer.processing_class.save_pretrained(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.replace(folder)
    trainer.accelerator.wait_for_everyone()
