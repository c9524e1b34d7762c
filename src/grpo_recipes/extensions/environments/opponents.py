"""Models that play the opponents of an episode: the policy itself, its base model, or a frozen checkpoint."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.generation import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from grpo_recipes.errors import config_error
from grpo_recipes.rollouts.backends import sampling_keys
from grpo_recipes.rollouts.turns import BASE, derived

Tokens = list[int]


class FrozenModel:
    """A copy of a model on each rank, which is not trained; it samples as the policy does."""

    def __init__(self, folder: str, trainer: Any):
        self._trainer, own = trainer, trainer.processing_class.get_vocab()
        if (Path(folder) / "tokenizer.json").is_file() and AutoTokenizer.from_pretrained(folder).get_vocab() != own:
            what = f"opponents: '{folder}' has other tokens than the policy"
            raise config_error("environment_args", what, "name a checkpoint of the policy's family")
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=trainer.model.dtype)
        self._model = loaded.to(trainer.accelerator.device).eval().requires_grad_(False)

    @torch.no_grad()
    def sample(self, prompts: Sequence[Tokens], name: str, rows: Sequence[int], longest: int) -> list[Tokens]:
        """Return a completion of at most ``longest`` tokens of each prompt.

        ``name`` and the number of its row alone decide a completion, up to rounding: not what it shares a batch with.
        """
        found: list[Tokens] = []
        size = self._trainer.args.per_device_train_batch_size
        for start in range(0, len(prompts), size):
            share = slice(start, start + size)
            found += self._sample(prompts[share], [derived(name, row) for row in rows[share]], longest)
        return found

    def _sample(self, prompts: Sequence[Tokens], seeds: Sequence[int], longest: int) -> list[Tokens]:
        tokenizer = self._trainer.processing_class
        batch = tokenizer.pad({"input_ids": list(prompts)}, padding_side="left", return_tensors="pt")
        batch = batch.to(self._model.device)
        ends = self._trainer.eos_token_ids
        config = GenerationConfig(
            max_new_tokens=longest, do_sample=False, eos_token_id=ends, pad_token_id=tokenizer.pad_token_id
        )
        processors = LogitsProcessorList([*self._truncation(), _Noise(seeds)])
        output = self._model.generate(**batch, generation_config=config, logits_processor=processors)
        found = [row.tolist() for row in output[:, batch["input_ids"].shape[1] :]]
        lengths = [next((place + 1 for place, token in enumerate(row) if token in ends), len(row)) for row in found]
        return [row[:length] for row, length in zip(found, lengths, strict=True)]

    def _truncation(self) -> list[LogitsProcessor]:
        """Return the processors of the recipe's own temperature and truncation."""
        keys = sampling_keys(self._trainer)
        return [
            RepetitionPenaltyLogitsProcessor(keys["repetition_penalty"]),
            TemperatureLogitsWarper(float(self._trainer.temperature)),
            *([TopKLogitsWarper(keys["top_k"])] if keys["top_k"] > 0 else []),
            *([TopPLogitsWarper(keys["top_p"])] if keys["top_p"] < 1 else []),
            *([MinPLogitsWarper(keys["min_p"])] if keys["min_p"] > 0 else []),
        ]


class _Noise(LogitsProcessor):
    """Add Gumbel noise, a generator per row, after which the greatest logit is a sample of the row's distribution."""

    def __init__(self, seeds: Sequence[int]):
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        drawn = [torch.empty(scores.shape[1]).exponential_(generator=one) for one in self._generators]
        return scores - torch.stack(drawn).log().to(scores)


def base_model(trainer: Any) -> str:
    """Return the name or folder of the model that the training began with."""
    return str(trainer.accelerator.unwrap_model(trainer.model).config._name_or_path)


class Opponents:
    """The models that play opponents in a training, each loaded when its first turn comes."""

    def __init__(self) -> None:
        self._frozen: dict[str, FrozenModel] = {}

    def frozen(self, model: str, trainer: Any) -> FrozenModel:
        """Return the copy of a checkpoint, or of the base model."""
        if model not in self._frozen:
            self._frozen[model] = FrozenModel(base_model(trainer) if model == BASE else model, trainer)
        return self._frozen[model]
