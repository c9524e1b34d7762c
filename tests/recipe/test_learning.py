"""Measure how optimizer steps change weights of each dtype, and check which recipes keep float32 weights."""

from __future__ import annotations

import pytest
import torch

from grpo_recipes.recipe.learning import LEAST_BFLOAT16_RATE, lost_updates, mixed_precision, updates_float32

COUNT = 100_000


def steps_of_adamw(dtype: torch.dtype, learning_rate: float, steps: int) -> tuple[float, float]:
    """Return the fraction of changed weights, and their movement relative to the movement of float32 weights."""
    torch.manual_seed(0)
    first = (0.02 * torch.randn(COUNT)).to(dtype)
    drift = 1e-3 * torch.randn(COUNT)
    low, exact = torch.nn.Parameter(first.clone()), torch.nn.Parameter(first.float().clone())
    optimizers = [torch.optim.AdamW([weight], lr=learning_rate, weight_decay=0.0) for weight in (low, exact)]
    for _ in range(steps):
        gradient = drift + 1e-3 * torch.randn(COUNT)
        low.grad, exact.grad = gradient.to(dtype), gradient
        for optimizer in optimizers:
            optimizer.step()
    expected, got = exact.detach() - first.float(), low.detach().float() - first.float()
    return float((got != 0).float().mean()), float((got * expected).sum() / (expected * expected).sum())


@pytest.mark.parametrize(
    ("learning_rate", "least", "most"), [(1e-6, 0.01, 0.05), (1e-5, 0.1, 0.2), (3e-5, 0.25, 0.45), (1e-4, 0.8, 1.0)]
)
def test_steps_are_rounded_away_in_bfloat16_below_the_limit(learning_rate: float, least: float, most: float) -> None:
    for steps in (1, 10):
        changed, movement = steps_of_adamw(torch.bfloat16, learning_rate, steps)
        assert least <= changed <= most, f"{changed:.3f} after {steps} steps, and they do not add up"
        assert (movement > 0.8) == (learning_rate >= LEAST_BFLOAT16_RATE)
    assert bool(lost_updates("bfloat16", learning_rate, "adamw_torch", None)) == (learning_rate < LEAST_BFLOAT16_RATE)


def test_float32_weights_take_every_step_and_float16_weights_steps_of_any_size() -> None:
    for learning_rate in (1e-6, 1e-3):
        assert steps_of_adamw(torch.float32, learning_rate, 10) == (pytest.approx(1.0, abs=1e-3), pytest.approx(1.0))
        assert lost_updates("float32", learning_rate, "adamw_torch", None) == ""
        assert not steps_of_adamw(torch.float16, learning_rate, 10)[1] < 5, "far more than wanted, or no number"
        assert "of any size" in lost_updates("float16", learning_rate, "adamw_torch", None)


def test_kahan_summation_keeps_what_is_rounded_away() -> None:
    kahan = "use_kahan_summation=True, momentum_dtype=bfloat16"
    assert lost_updates("bfloat16", 1e-6, "adamw_anyprecision", kahan) == ""
    assert lost_updates("bfloat16", 1e-6, "adamw_anyprecision", None)
    assert lost_updates("bfloat16", 1e-6, "adamw_torch", kahan)


@pytest.mark.parametrize(
    ("accelerator", "mixed", "keeps"),
    [("zero2", "no", True), ("zero3", "bf16", True), ("fsdp2", "bf16", True), ("fsdp2", "no", False),
     ("ddp", "bf16", False), ("single", "bf16", False)],
)  # fmt: skip
def test_who_keeps_float32_weights(accelerator: str, mixed: str, keeps: bool) -> None:
    assert updates_float32(accelerator, mixed) is keeps


def test_trl_computes_in_bfloat16_unless_told_otherwise(read) -> None:
    assert mixed_precision(read()) == mixed_precision(read(bf16=True)) == "bf16"
    assert mixed_precision(read(bf16=False)) == "no" and mixed_precision(read(fp16=True)) == "fp16"


def test_steps_by_the_gradient_are_rounded_away_too() -> None:
    torch.manual_seed(0)
    weights = (torch.randn(10_000) * 0.02).to(torch.bfloat16).requires_grad_()
    before = weights.detach().clone()
    weights.grad = (torch.randn(10_000) * 1e-4).to(torch.bfloat16)
    torch.optim.SGD([weights], lr=0.1).step()
    assert (weights.detach() != before).float().mean() < 0.2
    assert "times the gradient" in lost_updates("bfloat16", 1e-6, "sgd", None)
    assert lost_updates("float32", 1e-6, "sgd", None) == ""
