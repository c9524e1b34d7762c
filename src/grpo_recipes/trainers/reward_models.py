"""Reward models: models of ``reward_funcs`` that give a chat a score. TRL calls them in the trainer's process.

Each rank has a copy, or a shard with ZeRO-3. Their weights have the trained model's type.

    rewards, tokenizers = load_reward_models([format_tags, "org/reward-model"], run, args)
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerBase

from grpo_recipes.errors import config_error
from grpo_recipes.fetch.assets import find_model_folders
from grpo_recipes.recipe.configs import GRPOConfig
from grpo_recipes.recipe.model_kind import find_reward_model_fault
from grpo_recipes.trainers.model import as_config_error, loaded_by_every_rank

_KEY, _FIX = "reward_funcs", "name a reward model for chats with a single score"


def load_reward_models(
    rewards: Sequence[Any], run: Path, args: GRPOConfig
) -> tuple[list[Any], list[PreTrainedTokenizerBase | None]]:
    """Return the rewards with models instead of their names, and the tokenizer of each model, None for functions.

    A model's metrics have the last part of its name. Called by every rank. Raise ConfigError if a model can't be a
    reward.
    """
    kwargs = {**(args.model_init_kwargs or {}), "device_map": None}
    kwargs.pop("revision", None)  # the trained model's
    kwargs.setdefault("trust_remote_code", args.trust_remote_code)
    loaded, folders = list(rewards), find_model_folders(run)
    tokenizers: list[PreTrainedTokenizerBase | None] = [None] * len(rewards)
    for index, name in enumerate(rewards):
        if isinstance(name, str):
            folder = folders.get(name, name)
            tokenizers[index] = load_reward_tokenizer(name, folder, args.trust_remote_code)
            with loaded_by_every_rank(args, frozen=True):
                model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, **kwargs)
            model.config.name_or_path = name.rstrip("/")
            loaded[index] = model.requires_grad_(False)
    return loaded, tokenizers


def load_reward_tokenizer(name: str, folder: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the reward model ``name``; raise ConfigError if the model can't be a reward."""
    if fault := find_reward_model_fault(folder):
        raise config_error(_KEY, f"'{name}' can't be a reward: {fault}", _FIX)
    with as_config_error((OSError, ValueError), _KEY, f"the tokenizer of '{name}' can't be loaded", _FIX):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if tokenizer.chat_template is None:
        raise config_error(_KEY, f"the tokenizer of '{name}' has no chat template", _FIX)
    return tokenizer
