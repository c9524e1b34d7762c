"""Passes without padding give the log-probs, losses and gradients of TRL's padded rows with fewer tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from rank_processes import run_ranks

from grpo_recipes.trainers import passes
from grpo_recipes.trainers.grpo import GRPOTrainer
from grpo_recipes.trainers.maxent import MaxEntGRPOTrainer
from grpo_recipes.trainers.micro_batches import needs_trl_order

from .fixed_completions import make_trainer, weights_of

WIDTH, COMPLETION = 40, 30


def lognormal(rows: int, seed: int, longest: int) -> list[int]:
    """Draw lengths with a mean of about 0.3 times the longest, similar to completions of real policies."""
    draw = random.Random(seed)
    lengths = [draw.lognormvariate(0.0, 0.9) for _ in range(rows)]
    return [max(1, round(length * longest / max(lengths))) for length in lengths]


@pytest.mark.parametrize("few_sizes", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_each_row_is_in_one_pass_and_little_of_a_pass_is_padding(seed: int, few_sizes: bool) -> None:
    draw = random.Random(seed)
    lengths, most = lognormal(draw.randrange(1, 200), seed, 1000), draw.randrange(1000, 9000)
    groups = passes.group_rows(lengths, most, few_sizes=few_sizes)
    assert not few_sizes or {len(group).bit_count() for group in groups} == {1}  # powers of two
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    for group in groups:
        fed = len(group) * max(lengths[row] for row in group)
        assert fed <= passes.MOST_FED * sum(lengths[row] for row in group) and (len(group) == 1 or fed <= most)
    count = draw.randrange(len(groups), len(lengths) + 3)
    padded_groups = passes.split_passes(groups, count)
    assert len(padded_groups) == count and sorted(row for group in padded_groups for row in group) == list(
        range(len(lengths))
    )


def test_rows_of_one_length_are_one_pass() -> None:
    assert len(passes.group_rows([7] * 50, most=7 * 50)) == 1
    assert len(passes.group_rows([7] * 50, most=7 * 10)) == 5


def rows_of_lengths(prompts: list[int], completions: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Make ids and mask like TRL: all prompts end, and all completions start, in one column."""
    torch.manual_seed(1)
    ids = torch.randint(60, 120, (len(prompts), WIDTH))
    at = torch.arange(WIDTH)
    first = WIDTH - COMPLETION - torch.tensor(prompts).unsqueeze(1)
    return ids, ((at >= first) & (at < WIDTH - COMPLETION + torch.tensor(completions).unsqueeze(1))).long()


ROWS = rows_of_lengths([3, 10, 7, 3, 10, 5, 5, 1], [30, 2, 3, 9, 0, 14, 13, 1])


def found(trainer: GRPOTrainer, trimmed: bool, rows: Any = ROWS, **how: Any) -> tuple[Any, Any, torch.Tensor]:
    """Return log-probs and entropies of the rows, and the gradient of a function of both."""
    trainer.args.trim_padding = trimmed
    trainer.model.zero_grad()
    logps, entropies, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model, *rows, COMPLETION, compute_entropy=True, **how
    )
    (logps * torch.linspace(-1, 1, COMPLETION) + entropies**2).sum().backward()
    return (
        logps.detach(),
        entropies.detach(),
        torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()]),
    )


@pytest.mark.parametrize("chunk", [None, 3])
def test_log_probs_entropies_and_gradients_are_those_of_padded_rows(
    tmp_path: Path, model: str, chunk: int | None
) -> None:
    trainer = make_trainer(tmp_path, model, GRPOTrainer)
    trimmed, padded = found(trainer, True, batch_size=chunk), found(trainer, False, batch_size=chunk)
    for value, expected, atol in zip(trimmed, padded, (1e-5, 1e-5, 1e-4), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=atol)
    assert (trimmed[0][ROWS[1][:, -COMPLETION:] == 0] == 0).all()


def test_at_most_a_tenth_of_what_is_fed_is_padding(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path, model, GRPOTrainer)
    fed: list[int] = []
    inner = trainer.model.model
    monkeypatch.setattr(
        inner, "forward", lambda *args, forward=inner.forward, **kwargs: (
            fed.append(kwargs["input_ids"].numel()), forward(*args, **kwargs))[1],
    )  # fmt: skip
    draw = random.Random(0)
    rows = rows_of_lengths([draw.randrange(3, 11) for _ in range(48)], lognormal(48, 5, COMPLETION))
    real = int(rows[1].sum())
    found(trainer, True, rows)
    assert len(fed) > 1 and sum(fed) <= 1.1 * real
    fed.clear()
    found(trainer, False, rows)
    assert fed == [48 * WIDTH] and sum(fed) > 2 * real


def test_lengths_of_passes_are_multiples(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path, model, GRPOTrainer, pad_to_multiple_of=8)
    lengths, sizes = set[int](), set[int]()
    inner = trainer.model.model
    monkeypatch.setattr(
        inner, "forward", lambda *args, forward=inner.forward, **kwargs: (
            sizes.add(len(kwargs["input_ids"])), lengths.add(kwargs["input_ids"].shape[1]),
            forward(*args, **kwargs))[2],
    )  # fmt: skip
    computed: set[tuple[int, int]] = set()  # length of a pass, and for how many of its last tokens logits are computed
    compute = trl.GRPOTrainer._get_per_token_logps_and_entropies

    def record_widths(self: Any, model: Any, ids: torch.Tensor, mask: torch.Tensor, width: int, **how: Any) -> Any:
        computed.add((ids.shape[1], width))
        return compute(self, model, ids, mask, width, **how)

    monkeypatch.setattr(trl.GRPOTrainer, "_get_per_token_logps_and_entropies", record_widths)
    trimmed = found(trainer, True)
    monkeypatch.setattr(trl.GRPOTrainer, "_get_per_token_logps_and_entropies", compute)
    assert len(lengths) > 1 and all(length % 8 == 0 and length < WIDTH + 8 for length in lengths)
    assert sizes <= {1, 2, 4, 8, 16, 32}
    assert all(width % 8 == 0 or width == length - 1 for length, width in computed), computed
    for value, expected, atol in zip(trimmed, found(trainer, False), (1e-5, 1e-5, 1e-4), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=atol)


def test_rows_with_little_padding_are_fed_as_trl_does_it(tmp_path: Path, model: str) -> None:
    trainer = make_trainer(tmp_path, model, GRPOTrainer)
    rows = rows_of_lengths([10] * 6, [30, 30, 30, 29, 30, 28])
    for value, expected in zip(found(trainer, True, rows), found(trainer, False, rows), strict=True):
        assert torch.equal(value, expected)


@pytest.mark.parametrize(
    "keys",
    [
        {"beta": 0.1},
        {"loss_type": "gmpo", "beta": 0.1},
        {"num_iterations": 2, "steps_per_generation": 4, "max_steps": 4},
        {"entropy_coef": 0.1},
        {"maxent_objective": "listwise", "maxent_beta": 0.5},
    ],
    ids=str,
)
def test_training_takes_the_steps_of_padded_rows(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any]
) -> None:
    """test_micro_batches.py compares the gradients of the other losses and options with TRL's."""
    split, counts = passes.split_passes, []
    monkeypatch.setattr(passes, "split_passes", lambda groups, count: counts.append(count) or split(groups, count))
    kind = MaxEntGRPOTrainer if "maxent_objective" in keys else GRPOTrainer
    keys = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 2} | keys
    trainers = {}
    for name, trimmed in (("trimmed", True), ("padded", False)):
        trainer = trainers[name] = make_trainer(tmp_path / name, model, kind, trim_padding=trimmed, **keys)
        before = weights_of(trainer)
        trainer.train()
    assert max(counts) > 1
    trimmed_weights, padded_weights = (weights_of(trainer) for trainer in trainers.values())
    moved = torch.cat([(padded_weights[name] - before[name]).flatten() for name in padded_weights])
    apart = torch.cat([(padded_weights[name] - trimmed_weights[name]).flatten() for name in padded_weights])
    assert moved.norm() > 1e-3
    assert apart.norm() < 1e-4 * moved.norm()  # a step moves float32 weights by a thousandth
    left_out = ("time", "seconds")
    if not needs_trl_order(trainer.args):  # sorted rows: these are over the tokens of the step
        left_out += ("kl", "entropy", "clip_ratio")
    for row, expected in zip(*(trainer.state.log_history[:-1] for trainer in trainers.values()), strict=True):
        assert _numbers(row, left_out) == pytest.approx(_numbers(expected, left_out), rel=1e-3, abs=1e-5)


def _numbers(row: dict[str, float], left_out: tuple[str, ...]) -> dict[str, float]:
    return {name: value for name, value in row.items() if not any(part in name for part in left_out)}


def test_a_mixture_of_experts_with_its_own_loss_is_fed_as_trl_does_it(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tmp_path, model, GRPOTrainer)
    calls: list[Any] = []
    monkeypatch.setattr(
        trl.GRPOTrainer, "_get_per_token_logps_and_entropies",
        lambda self, model, ids, *args, **kwargs: calls.append(ids.shape),
    )  # fmt: skip
    trainer._get_per_token_logps_and_entropies(trainer.model, *ROWS, COMPLETION, compute_aux_loss=True)
    assert calls == [ROWS[0].shape]


@pytest.mark.slow
@pytest.mark.parametrize("accelerator", ["multi_gpu", "zero2", "zero3", "fsdp2"])
def test_ranks_whose_rows_differ_make_as_many_passes(tmp_path: Path, model: str, accelerator: str) -> None:
    """Otherwise the ranks would deadlock, or mix up the gradients of different parameters."""
    outputs = run_ranks("trainers.passes_of_ranks", model, str(tmp_path), accelerator=accelerator, seconds=540)
    assert all("the steps are those of padded rows" in output for output in outputs)


@pytest.mark.parametrize("trims", [True, False])
def test_a_trainer_that_trims_switches_the_attention_of_cudnn_off(tmp_path: Path, model: str, trims: bool) -> None:
    """S11: importing vLLM does so too, but a launch must not depend on that."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        make_trainer(tmp_path, model, GRPOTrainer, trim_padding=trims)
        assert torch.backends.cuda.cudnn_sdp_enabled() is not trims
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
