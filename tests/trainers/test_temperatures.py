"""Rows with their own sampling temperature have log-probs, entropies and gradients at that temperature."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from grpo_recipes.trainers import temperatures
from grpo_recipes.trainers.grpo import GRPOTrainer
from grpo_recipes.trainers.temperatures import changing_head_temperature

from .fixed_completions import generation, make_trainer

OWN = torch.tensor([1.0, 0.5, 1.5, 1.0, 0.5, 1.0, 1.0, 0.5], dtype=torch.float64)


def trainer_of(folder: Path, model: str, **keys: Any) -> GRPOTrainer:
    return make_trainer(folder, model, GRPOTrainer, temperature=1.0, **keys)


def logps_at(trainer: GRPOTrainer, output: dict[str, Any], temperature_B: torch.Tensor | None, **how: Any) -> Any:
    trainer.temperature_B = temperature_B
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
    mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
    keep = output["completion_ids"].shape[1]
    return trainer._get_per_token_logps_and_entropies(
        trainer.model, ids, mask, keep, compute_entropy=True, **how
    )  # fmt: skip


def plain(trainer: GRPOTrainer, output: dict[str, Any], temperature_B: torch.Tensor) -> Any:
    """Compute token log-probs and entropies from logits divided by hand."""
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
    mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
    logits = trainer.model(input_ids=ids, attention_mask=mask).logits[:, :-1] / temperature_B[:, None, None].float()
    full = logits.log_softmax(-1)[:, -output["completion_ids"].shape[1] :]
    logps = full.gather(-1, output["completion_ids"].unsqueeze(-1)).squeeze(-1)
    return logps, -(full.exp() * full).sum(-1)


@pytest.mark.parametrize("chunk", [None, 3])
def test_each_row_has_the_log_probs_of_its_own_temperature(tmp_path: Path, model: str, chunk: int | None) -> None:
    trainer = trainer_of(tmp_path, model)
    output = generation(trainer)
    mask = output["completion_mask"].bool()
    logps, entropies, _ = logps_at(trainer, output, OWN, batch_size=chunk)
    expected, expected_entropies = plain(trainer, output, OWN)
    torch.testing.assert_close(logps[mask], expected[mask], rtol=0, atol=2e-5)
    torch.testing.assert_close(entropies[mask], expected_entropies[mask], rtol=0, atol=2e-5)
    alike, _, _ = logps_at(trainer, output, None)
    tokens_elsewhere = (OWN != 1.0).unsqueeze(1) & mask
    assert (logps - alike)[tokens_elsewhere].abs().max() > 1e-2  # the fixed temperature gives other values
    after, _, _ = logps_at(trainer, output, None)
    assert torch.equal(after, alike)  # and nothing of it stays


def test_the_gradient_is_that_of_the_rows_own_temperatures(tmp_path: Path, model: str) -> None:
    trainer = trainer_of(tmp_path, model)
    output = generation(trainer)
    mask = output["completion_mask"].bool()

    def gradient(logps: torch.Tensor) -> torch.Tensor:
        trainer.model.zero_grad()
        (logps * mask).sum().backward()
        return torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()])

    expected = gradient(logps_at(trainer, output, OWN)[0])
    torch.testing.assert_close(expected, gradient(plain(trainer, output, OWN)[0]), rtol=1e-3, atol=1e-4)
    assert not torch.allclose(expected, gradient(logps_at(trainer, output, None)[0]), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("keys", [{"bf16": True}, {"cast_lm_head_to_fp32": True}, {"peft": True}], ids=str)
def test_the_recipes_temperature_gives_the_same_bits_either_way(
    tmp_path: Path, model: str, keys: dict[str, Any]
) -> None:
    """This also holds if accelerate and PEFT wrap the patched method."""
    adapter = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False) if keys.pop("peft", None) else None
    trainer = trainer_of(tmp_path, model, peft_config=adapter, **keys)
    output = generation(trainer)
    trainer.model = trainer.accelerator.prepare_model(trainer.model)  # a training does the same
    assert hasattr(trainer.model, "_original_forward") == ("bf16" in keys)
    with torch.no_grad():
        as_trl, entropies, _ = logps_at(trainer, output, None)
        with changing_head_temperature(trainer, trainer.model, 1.0):
            repeated, entropies_again, _ = logps_at(trainer, output, None)
        with changing_head_temperature(trainer, trainer.model, 0.5):
            other, _, _ = logps_at(trainer, output, None)
    assert repeated.dtype == as_trl.dtype and torch.equal(repeated, as_trl) and torch.equal(entropies_again, entropies)
    assert (other - as_trl).abs().max() > 1e-2


def test_rows_without_temperatures_of_their_own_take_trls_path(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(temperatures, "add_fused_lm_head", None)  # not called
    trainer = trainer_of(tmp_path, model)
    output = generation(trainer)
    trainer.compute_loss(trainer.model, output).backward()


def test_a_rank_without_rows_of_a_temperature_makes_as_many_passes(tmp_path: Path, model: str) -> None:
    """Sharded models need equally many passes on every rank. An extra pass does not change the gradient."""
    trainer = trainer_of(tmp_path, model)
    output = generation(trainer)
    passes: list[int] = []
    trainer.model.register_forward_pre_hook(
        lambda _, args, kwargs: passes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    alone = torch.full((8,), 0.5, dtype=torch.float64)

    def gradient() -> torch.Tensor:
        trainer.model.zero_grad()
        logps_at(trainer, output, alone)[0].sum().backward()
        return torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()])

    expected = gradient()
    trainer.accelerator.gather = lambda counts: torch.cat([counts, torch.tensor([1.5, 2.0], dtype=counts.dtype)])
    passes.clear()
    assert torch.equal(gradient(), expected) and passes == [8, 1, 1]
