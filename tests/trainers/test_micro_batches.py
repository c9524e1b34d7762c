"""Micro-batches of a token budget: the gradient, the loss and the metrics of a step are unmodified TRL's."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from peft import LoraConfig
from transformers import TrainerCallback
from transformers.training_args import OptimizerNames

from grpo_recipes import smoke
from grpo_recipes.trainers import micro_batches
from grpo_recipes.trainers.grpo import GRPOTrainer
from grpo_recipes.trainers.maxent import MaxEntGRPOTrainer

from .fixed_completions import make_trainer, tokens_mod_5, weights_of
from .tiny_training import DESCENT, SUMS, as_dataset

LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]
LONGEST = 24
# A rank's rows of a step are of several micro-batches of TRL's, and of lengths of 1 to 24 tokens.
KEYS = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "max_completion_length": LONGEST}
OURS = ("micro_batches", "fed_per_real_token")


class Gradients(TrainerCallback):
    """The gradient of each optimizer step."""

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        grads = [one.grad for one in model.parameters() if one.requires_grad]
        self.found.append(torch.cat([grad.flatten().clone() for grad in grads if grad is not None]))


def completion(step: int, row: int, end: int) -> list[int]:
    draw = random.Random(f"{step}/{row}")
    ids = [draw.randrange(60, 120) for _ in range(min(LONGEST, 1 + int(draw.lognormvariate(1.2, 0.9))))]
    return ids if len(ids) == LONGEST else [*ids, end]


def unmodified(folder: Path, model: str, **keys: Any) -> trl.GRPOTrainer:
    """TRL's own trainer on the same completions."""
    args = trl.GRPOConfig(output_dir=str(folder), logging_steps=1, **{**DESCENT, **keys})
    return trl.GRPOTrainer(
        model=model, reward_funcs=[tokens_mod_5], args=args, train_dataset=as_dataset(SUMS),
        processing_class=smoke.build_tokenizer(),
    )  # fmt: skip


def gradients_of(trainer: Any) -> tuple[list[torch.Tensor], list[dict[str, float]]]:
    """The gradients and the logged rows of a training on completions from a table."""
    end = trainer.processing_class.eos_token_id

    def from_table(prompt_ids: list[Any], *_: Any) -> tuple[list[list[int]], None]:
        first = trainer.accelerator.process_index * len(prompt_ids)
        return [completion(trainer._step, first + row, end) for row in range(len(prompt_ids))], None

    trainer._generate_single_turn = from_table
    taken = Gradients()
    trainer.add_callback(taken)
    torch.manual_seed(3)  # TRL shuffles the rows of a generation
    trainer.train()
    return taken.found, [row for row in trainer.state.log_history if "loss" in row]


def same(ours: Any, theirs: Any, tolerance: float = 1e-6) -> None:
    (our_gradients, our_rows), (gradients, rows) = gradients_of(ours), gradients_of(theirs)
    assert len(our_gradients) == len(gradients) > 1
    for own, other in zip(our_gradients, gradients, strict=True):
        assert other.norm() > 0
        assert (own - other).norm() <= tolerance * other.norm()
    for own, other in zip(our_rows, rows, strict=True):
        shared = {name for name in own.keys() & other.keys() if "time" not in name}
        assert {"loss", "entropy"} < shared
        assert {name: own[name] for name in shared} == pytest.approx(
            {name: other[name] for name in shared}, rel=1e-4, abs=1e-6, nan_ok=True
        )


@pytest.mark.parametrize(
    ("loss_type", "budget"), [*((name, 120) for name in LOSSES), ("bnpo", 30), ("dapo", 30), ("bnpo", 10_000)]
)
def test_each_loss_has_the_gradient_of_unmodified_trl(tmp_path: Path, model: str, loss_type: str, budget: int) -> None:
    keys = {**KEYS, "loss_type": loss_type, "beta": 0.1, "max_steps": 2, "learning_rate": 1e-3}
    same(make_trainer(tmp_path, model, GRPOTrainer, tokens_per_micro_batch=budget, **keys),
         unmodified(tmp_path, model, **keys))  # fmt: skip


@pytest.mark.parametrize(
    "keys",
    [
        {"steps_per_generation": 8, "num_iterations": 2, "max_steps": 4},  # old log-probs are of other weights
        {"steps_per_generation": 2, "loss_type": "dapo"},  # a step has two generations of other lengths
        {"steps_per_generation": 2, "loss_type": "vespo"},
        {"steps_per_generation": 2, "loss_type": "bnpo", "entropy_coef": 0.1},
        {"importance_sampling_level": "sequence", "loss_type": "luspo"},
        {"entropy_coef": 0.1},
        {"mask_truncated_completions": True, "loss_type": "bnpo"},
        {"off_policy_mask_threshold": 0.1, "num_iterations": 2, "max_steps": 4},
        {"top_entropy_quantile": 0.4},  # these two keep TRL's micro-batches
        {"entropy_target": 1.0, "entropy_coef": 0.1, "use_adaptive_entropy": True},
        {"gradient_checkpointing": True},
    ],
    ids=str,
)  # fmt: skip
def test_options_of_the_loss_have_the_gradient_of_unmodified_trl(
    tmp_path: Path, model: str, keys: dict[str, Any]
) -> None:
    keys = {**KEYS, "beta": 0.1, "max_steps": 2, "learning_rate": 1e-2, **keys}
    ours = make_trainer(tmp_path, model, GRPOTrainer, tokens_per_micro_batch=60, **keys)
    same(ours, unmodified(tmp_path, model, **keys), tolerance=3e-6 if keys["max_steps"] > 2 else 1e-6)


@pytest.mark.parametrize("optim", ["lomo", "adalomo", "sgd"])
def test_an_optimizer_that_steps_in_the_backward_pass_keeps_trls_micro_batches(
    tmp_path: Path, model: str, optim: str
) -> None:
    trainer = make_trainer(tmp_path, model, GRPOTrainer, **KEYS)
    trainer.args.optim = OptimizerNames(optim)  # as transformers keeps it
    ours = micro_batches.MicroBatches(trainer)
    with ours.collecting():
        assert ours.take({}) == (optim == "sgd")


@pytest.mark.parametrize("trims", [True, False])
def test_log_probs_in_bfloat16_train_with_gradients_of_their_own_dtype(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, trims: bool
) -> None:
    """R15: a model that FSDP2 shards may return bfloat16, and the factor of a row is float32."""
    of_trl = trl.GRPOTrainer._get_per_token_logps_and_entropies

    def rounded(*args: Any, **kwargs: Any) -> Any:
        logps, entropies, aux_loss = of_trl(*args, **kwargs)
        return logps.bfloat16(), None if entropies is None else entropies.bfloat16(), aux_loss

    monkeypatch.setattr(trl.GRPOTrainer, "_get_per_token_logps_and_entropies", rounded)
    keys = {**KEYS, "beta": 0.1, "max_steps": 2, "learning_rate": 1e-3, "trim_padding": trims}
    gradients, rows = gradients_of(make_trainer(tmp_path, model, GRPOTrainer, **keys))
    assert all(one.isfinite().all() and one.norm() > 0 for one in gradients) and len(rows) == 2


def test_the_factor_of_a_row_does_not_change_the_dtype_of_its_gradient(tmp_path: Path, model: str) -> None:
    """R15: torch rejects a hook that returns another dtype."""
    trainer = make_trainer(tmp_path, model, GRPOTrainer, **KEYS)
    leaf = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
    kept: list[torch.Tensor] = []
    factors = [torch.tensor([[0.5], [2.0]]), torch.ones(2, 1)]
    logps, entropies, _ = trainer.micro_batches._forward(lambda: (leaf * 1, leaf * 0, None), factors, kept)
    (logps.sum() + entropies.sum()).backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [[0.5] * 3, [2.0] * 3]


@pytest.mark.parametrize("objective", ["tempered", "listwise", "weighted_mle"])
def test_maxent_has_the_gradient_that_it_has_in_micro_batches_of_trl(
    tmp_path: Path, model: str, objective: str
) -> None:
    keys = {**KEYS, "max_steps": 2, "learning_rate": 1e-3, "maxent_objective": objective, "maxent_tau": 0.3}
    keys |= {} if objective == "tempered" else {"maxent_beta": 0.2}
    budgeted, stock = (
        make_trainer(tmp_path / str(on), model, MaxEntGRPOTrainer, tokens_per_micro_batch=60, trim_padding=on, **keys)
        for on in (True, False)
    )
    same(budgeted, stock)


def test_a_pass_has_at_most_the_budget_and_little_padding(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tmp_path, model, GRPOTrainer, tokens_per_micro_batch=90, max_steps=2, **KEYS)
    fed: list[tuple[int, int]] = []
    forward = trainer.model.model.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        fed.append((kwargs["input_ids"].numel(), int(kwargs["attention_mask"].sum())))
        return forward(*args, **kwargs)

    monkeypatch.setattr(trainer.model.model, "forward", counted)
    _, rows = gradients_of(trainer)
    assert len(fed) == sum(row["micro_batches"] for row in rows) > 2 * 2
    assert max(tokens for tokens, _ in fed) <= 90
    total, real = (sum(column) for column in zip(*fed, strict=True))
    assert total <= 1.1 * real
    shares = [row["fed_per_real_token"] for row in rows]
    assert min(shares) <= total / real <= max(shares)
    assert max(shares) <= 1.1


def test_without_a_budget_a_pass_has_at_most_what_one_of_trl_would_have(tmp_path: Path, model: str) -> None:
    _, [row, _] = gradients_of(make_trainer(tmp_path, model, GRPOTrainer, **KEYS))
    assert 1 < row["micro_batches"] < KEYS["gradient_accumulation_steps"] + 3


def test_trim_padding_false_leaves_micro_batches_to_trl(tmp_path: Path, model: str) -> None:
    _, rows = gradients_of(make_trainer(tmp_path, model, GRPOTrainer, trim_padding=False, **KEYS))
    assert not any(name in row for row in rows for name in OURS)


@pytest.mark.parametrize("seed", range(20))
def test_rows_go_to_other_ranks_where_that_makes_the_work_even(seed: int) -> None:
    draw = random.Random(seed)
    ranks = draw.randrange(2, 9)
    costs = [draw.lognormvariate(0, 1) for _ in range(ranks * draw.randrange(8, 60))]
    found = micro_batches.places(costs, ranks)
    assert sorted(row for place in found for row in place) == list(range(len(costs)))
    loads = [sum(costs[row] for row in place) for place in found]
    assert max(loads) <= max(max(costs), 1.02 * sum(costs) / ranks, min(loads) + max(costs))


def test_ranks_with_even_work_keep_their_rows() -> None:
    assert micro_batches.places([3.0, 1.0, 2.0, 2.01], 2) == [[0, 1], [2, 3]]
    assert micro_batches.places([3.0, 3.0, 1.0, 1.0], 2) == [[0, 2], [1, 3]]


def test_generations_of_other_widths_are_joined_with_what_changes_nothing() -> None:
    def part(prompt: int, completion: int) -> dict[str, torch.Tensor]:
        ones = torch.ones(2, completion, dtype=torch.long)
        return {
            "prompt_ids": torch.full((2, prompt), 7), "prompt_mask": torch.ones(2, prompt, dtype=torch.long),
            "completion_ids": ones, "completion_mask": ones, "advantages": torch.ones(2),
            "importance_sampling_ratio": torch.full((2, completion), 0.5), "num_items_in_batch": torch.tensor(4),
        }  # fmt: skip

    rows = micro_batches.joined([part(2, 5), part(4, 3)])
    assert rows["prompt_ids"].tolist() == [[0, 0, 7, 7]] * 2 + [[7] * 4] * 2
    assert rows["completion_mask"].sum(dim=1).tolist() == [5, 5, 3, 3]
    assert rows["importance_sampling_ratio"][3].tolist() == [0.5] * 3 + [1.0] * 2  # 0 has no logarithm
    assert "num_items_in_batch" not in rows and rows["advantages"].shape == (4,)
    short = micro_batches.trimmed(rows, [2, 3])
    assert short["completion_ids"].shape == (2, 3) and short["prompt_ids"].shape == (2, 4)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo"])
def test_padding_free_rows_have_the_gradient_of_unmodified_trl(tmp_path: Path, model: str, loss_type: str) -> None:
    keys = {**KEYS, "loss_type": loss_type, "beta": 0.1, "max_steps": 2, "learning_rate": 1e-3}
    free = make_trainer(tmp_path, model, GRPOTrainer, tokens_per_micro_batch=120, padding_free=True, **keys)
    fed: list[tuple[int, int]] = []
    forward = free.model.model.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        assert kwargs.get("attention_mask") is None
        fed.append(tuple(kwargs["input_ids"].shape))
        return forward(*args, **kwargs)

    free.model.model.forward = watched
    same(free, unmodified(tmp_path, model, **keys), tolerance=2e-6)
    assert fed and all(rows == 1 and tokens <= 120 for rows, tokens in fed)


def test_an_adapter_has_the_gradient_that_it_has_in_micro_batches_of_trl(tmp_path: Path, model: str) -> None:
    def adapted(on: bool) -> GRPOTrainer:
        torch.manual_seed(0)  # adapters begin at random
        return make_trainer(
            tmp_path / str(on), model, GRPOTrainer, peft_config=LoraConfig(r=4, init_lora_weights=False),
            tokens_per_micro_batch=60, trim_padding=on, loss_type="bnpo", beta=0.1, max_steps=2, **KEYS,
        )  # fmt: skip

    same(adapted(True), adapted(False), tolerance=2e-6)


@pytest.mark.slow
@pytest.mark.rotating
def test_sixty_steps_of_adam_end_with_the_weights_of_trls_own_micro_batches(tmp_path: Path, model: str) -> None:
    keys = {**KEYS, "max_steps": 60, "optim": "adamw_torch", "learning_rate": 1e-5, "max_grad_norm": 1.0, "beta": 0.04}
    before = weights_of(make_trainer(tmp_path, model, GRPOTrainer, **keys))
    ends = []
    for on in (True, False):
        trainer = make_trainer(tmp_path / str(on), model, GRPOTrainer, trim_padding=on, **keys)
        gradients_of(trainer)
        ends.append(weights_of(trainer))
    ours, theirs = ends
    assert max((theirs[name] - before[name]).abs().max() for name in theirs) > 1e-4
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], rtol=0, atol=1e-5)
