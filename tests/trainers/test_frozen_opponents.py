"""A checkpoint that plays opponents: how it samples."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_recipes import smoke
from grpo_recipes.errors import ConfigError
from grpo_recipes.extensions.environments.opponents import FrozenModel


@pytest.fixture
def frozen(model: str) -> FrozenModel:
    trainer: Any = SimpleNamespace(
        model=SimpleNamespace(dtype=torch.float32),
        accelerator=SimpleNamespace(device="cpu"),
        args=SimpleNamespace(per_device_train_batch_size=16),
        processing_class=smoke.build_tokenizer(),
        eos_token_ids=[smoke.build_tokenizer().eos_token_id],
        **{"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0},
    )
    return FrozenModel(model, trainer)


def test_a_checkpoint_completes_a_row_alike_in_any_batch(frozen: FrozenModel) -> None:
    prompts = [[65 + row] * (3 + row) for row in range(6)]
    together = frozen.sample(prompts, "0/0", range(6), 8)
    assert [frozen.sample([prompt], "0/0", [row], 8)[0] for row, prompt in enumerate(prompts)] == together
    assert len(set(map(tuple, together))) == 6 and max(map(len, together)) <= 8
    assert frozen.sample(prompts, "0/1", range(6), 8) != together


def test_a_checkpoint_samples_its_own_distribution(frozen: FrozenModel) -> None:
    """First tokens come as often as the model's softmax has it; with top_k only the likeliest do."""
    prompt, draws = [70, 71, 72], 20_000
    frozen._trainer.args.per_device_train_batch_size = draws
    with torch.no_grad():
        frozen._model.lm_head.weight.mul_(4)  # a random model's distribution is nearly flat
        logits = frozen._model(torch.tensor([prompt])).logits[0, -1].double()
    expected = torch.softmax(logits, -1)
    found = Counter(one[0] for one in frozen.sample([prompt] * draws, "x", range(draws), 1))
    shares = torch.zeros_like(expected)
    for token, count in found.items():
        shares[token] = count / draws
    assert 0.5 * (shares - expected).abs().sum() < 0.06  # total variation; of a flat distribution it is larger
    assert 0.5 * (torch.full_like(expected, 1 / len(expected)) - expected).abs().sum() > 0.15

    frozen._trainer.top_k = 2
    two = {one[0] for one in frozen.sample([prompt] * 200, "x", range(200), 1)}
    assert two == set(logits.topk(2).indices.tolist())


def test_a_checkpoint_with_other_tokens_is_refused(frozen: FrozenModel, model: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(model, other)
    tokenizer = smoke.build_tokenizer()
    tokenizer.save_pretrained(other)
    FrozenModel(str(other), frozen._trainer)
    tokenizer.add_tokens(["<|king|>"])
    tokenizer.save_pretrained(other)
    with pytest.raises(ConfigError, match="has other tokens than the policy"):
        FrozenModel(str(other), frozen._trainer)


def test_a_checkpoint_ends_its_turn(frozen: FrozenModel) -> None:
    end = frozen._trainer.processing_class.eos_token_id
    frozen._model.generation_config.eos_token_id = None
    with torch.no_grad():
        frozen._model.lm_head.weight[end] = frozen._model.lm_head.weight.sum(0) * 50
    completions = frozen.sample([[65] * 4, [66] * 9, [67]], "0/0", range(3), 30)
    assert all(end not in one[:-1] for one in completions)


def test_a_checkpoint_ends_its_turn_with_any_token_that_ends_the_policys(frozen: FrozenModel) -> None:
    ends = set(range(0, 240, 2))
    frozen._trainer.eos_token_ids = [*frozen._trainer.eos_token_ids, *sorted(ends)]
    completions = frozen.sample([[65 + row] * 4 for row in range(16)], "0/0", range(16), 60)
    assert all(one[-1] in frozen._trainer.eos_token_ids and not ends & set(one[:-1]) for one in completions)
    assert len({len(one) for one in completions}) > 1
