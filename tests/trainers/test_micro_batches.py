"""With rows sorted by length, gradient and loss equal unmodified TRL's. Token means cover the whole step."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
from peft import LoraConfig
from transformers import TrainerCallback
from transformers.training_args import OptimizerNames

from grpo_recipes import smoke
from grpo_recipes.trainers.grpo import GRPOTrainer
from grpo_recipes.trainers.maxent import MaxEntGRPOTrainer
from grpo_recipes.trainers.micro_batches import TOKENS, MicroBatches, needs_trl_order

from .fixed_completions import make_trainer, tokens_mod_5, weights_of
from .tiny_training import DESCENT, SUMS, as_dataset

LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]
LONGEST = 24
# A rank's rows of a step are of several micro-batches of TRL's, and of lengths of 1 to 24 tokens.
KEYS = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "max_completion_length": LONGEST}
WHOLE_STEP = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}  # in one micro-batch
TOKEN_MEANS = ("kl", "entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")


class Gradients(TrainerCallback):
    """Record the gradient of each optimizer step."""

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        grads = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
        self.found.append(torch.cat([grad.flatten().clone() for grad in grads if grad is not None]))


def completion(step: int, row: int, end: int) -> list[int]:
    draw = random.Random(f"{step}/{row}")
    ids = [draw.randrange(60, 120) for _ in range(min(LONGEST, 1 + int(draw.lognormvariate(1.2, 0.9))))]
    return ids if len(ids) == LONGEST else [*ids, end]


def unmodified(folder: Path, model: str, **keys: Any) -> trl.GRPOTrainer:
    """Make TRL's own trainer on the same completions."""
    args = trl.GRPOConfig(output_dir=str(folder), logging_steps=1, **{**DESCENT, **keys})
    return trl.GRPOTrainer(
        model=model, reward_funcs=[tokens_mod_5], args=args, train_dataset=as_dataset(SUMS),
        processing_class=smoke.build_tokenizer(),
    )  # fmt: skip


def gradients_of(trainer: Any) -> tuple[list[torch.Tensor], list[dict[str, float]]]:
    """Return gradients and logged rows of a training on completions from a table."""
    end = trainer.processing_class.eos_token_id

    def from_table(prompt_ids: list[Any], *_: Any) -> tuple[list[list[int]], None]:
        first = trainer.accelerator.process_index * len(prompt_ids)
        start = trainer._step * trainer.args.per_device_train_batch_size  # rows, in micro-batches of any size
        return [completion(start, first + row, end) for row in range(len(prompt_ids))], None

    trainer._generate_single_turn = from_table
    gradients = Gradients()
    trainer.add_callback(gradients)
    torch.manual_seed(3)  # TRL shuffles the rows of a generation
    trainer.train()
    return gradients.found, [row for row in trainer.state.log_history if "loss" in row]


def assert_same_gradients(gradients: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float = 1e-6) -> None:
    assert len(gradients) == len(expected) > 1
    for gradient, other in zip(gradients, expected, strict=True):
        assert other.norm() > 0
        assert (gradient - other).norm() <= tolerance * other.norm()


def assert_same_metrics(
    rows: list[dict[str, float]], expected: list[dict[str, float]], names: tuple[str, ...] = ()
) -> None:
    """Compare these metrics, or all metrics except times."""
    for row, other in zip(rows, expected, strict=True):
        shared = {name for name in row.keys() & other.keys() if "time" not in name and (not names or name in names)}
        assert shared
        assert {name: row[name] for name in shared} == pytest.approx(
            {name: other[name] for name in shared}, rel=1e-4, abs=1e-6, nan_ok=True
        )


@pytest.mark.parametrize("loss_type", LOSSES)
def test_each_loss_has_the_gradient_of_unmodified_trl(tmp_path: Path, model: str, loss_type: str) -> None:
    keys = {**KEYS, "loss_type": loss_type, "beta": 0.1, "max_steps": 2, "learning_rate": 1e-3}
    gradients, rows = gradients_of(make_trainer(tmp_path, model, GRPOTrainer, **keys))
    their_gradients, their_rows = gradients_of(unmodified(tmp_path, model, **keys))
    assert_same_gradients(gradients, their_gradients)
    assert_same_metrics(rows, their_rows, ("loss", "grad_norm", "reward", "completions/mean_length"))
    if loss_type == "bnpo":  # keeps TRL's order, and with it all of TRL's metrics
        assert_same_metrics(rows, their_rows)
    else:
        assert_same_metrics(rows, gradients_of(unmodified(tmp_path, model, **keys | WHOLE_STEP))[1], TOKEN_MEANS)


@pytest.mark.parametrize(
    "keys",
    [
        {"steps_per_generation": 8, "num_iterations": 2, "max_steps": 4},  # old log-probs are of other weights
        {"steps_per_generation": 2, "loss_type": "dapo"},  # a step has two generations of other lengths
        {"steps_per_generation": 6, "loss_type": "dapo", "max_steps": 3},  # a step has parts of two generations
        {"steps_per_generation": 2, "loss_type": "vespo"},
        {"steps_per_generation": 2, "loss_type": "bnpo", "entropy_coef": 0.1},
        {"importance_sampling_level": "sequence", "loss_type": "luspo"},
        {"entropy_coef": 0.1},
        {"mask_truncated_completions": True, "loss_type": "bnpo"},
        {"mask_truncated_completions": True},
        {"off_policy_mask_threshold": 0.1, "num_iterations": 2, "max_steps": 4},
        {"top_entropy_quantile": 0.4},
        {"entropy_target": 1.0, "entropy_coef": 0.1, "use_adaptive_entropy": True},
        {"gradient_checkpointing": True},
        {"pad_to_multiple_of": 8},
    ],
    ids=str,
)  # fmt: skip
def test_options_of_the_loss_have_the_gradient_of_unmodified_trl(
    tmp_path: Path, model: str, keys: dict[str, Any]
) -> None:
    keys = {**KEYS, "beta": 0.1, "max_steps": 2, "learning_rate": 1e-2, **keys}
    gradients, rows = gradients_of(make_trainer(tmp_path, model, GRPOTrainer, **keys))
    their_gradients, their_rows = gradients_of(unmodified(tmp_path, model, **keys))
    assert_same_gradients(gradients, their_gradients, tolerance=3e-6 if keys["max_steps"] > 2 else 1e-6)
    keeps_order = keys.keys() & {"entropy_coef", "top_entropy_quantile"} or keys.get("loss_type") == "bnpo"
    assert_same_metrics(rows, their_rows, () if keeps_order else ("loss", "grad_norm", "reward"))


@pytest.mark.parametrize("optim", ["lomo", "adalomo", "sgd"])
def test_an_optimizer_that_steps_in_the_backward_pass_keeps_trls_order(tmp_path: Path, model: str, optim: str) -> None:
    args = make_trainer(tmp_path, model, GRPOTrainer, **KEYS).args
    args.optim = OptimizerNames(optim)  # transformers stores the enum
    assert needs_trl_order(args) == (optim != "sgd")


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
    assert all(gradient.isfinite().all() and gradient.norm() > 0 for gradient in gradients) and len(rows) == 2


@pytest.mark.parametrize("objective", ["tempered", "listwise", "weighted_mle"])
def test_maxent_has_the_gradient_that_it_has_in_micro_batches_of_trl(
    tmp_path: Path, model: str, objective: str
) -> None:
    keys = {**KEYS, "max_steps": 2, "learning_rate": 1e-3, "maxent_objective": objective, "maxent_tau": 0.3}
    keys |= {} if objective == "tempered" else {"maxent_beta": 0.2}
    trimmed, stock = (
        gradients_of(make_trainer(tmp_path / str(trims), model, MaxEntGRPOTrainer, trim_padding=trims, **keys))
        for trims in (True, False)
    )
    assert_same_gradients(trimmed[0], stock[0])
    assert_same_metrics(trimmed[1], stock[1], ("loss", "grad_norm", "maxent/tau", "maxent/incorrect_mass"))


def test_a_step_has_trls_micro_batches_with_little_padding(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tmp_path, model, GRPOTrainer, max_steps=2, **KEYS)
    lengths: list[list[int]] = []  # lengths of the rows, by micro-batch
    fed: list[tuple[int, int]] = []
    forward, compute_loss = trainer.model.model.forward, trainer.compute_loss

    def counted(*args: Any, **kwargs: Any) -> Any:
        fed.append((kwargs["input_ids"].numel(), int(kwargs["attention_mask"].sum())))
        return forward(*args, **kwargs)

    def watched(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        lengths.append((inputs["prompt_mask"].sum(dim=1) + inputs["completion_mask"].sum(dim=1)).tolist())
        return compute_loss(model, inputs, *args, **kwargs)

    monkeypatch.setattr(trainer.model.model, "forward", counted)
    monkeypatch.setattr(trainer, "compute_loss", watched)
    gradients_of(trainer)
    assert [len(rows) for rows in lengths] == [4] * 8
    for step in (lengths[:4], lengths[4:]):
        rows = [length for micro_batch in step for length in micro_batch]
        assert rows == sorted(rows, reverse=True)
    total, real = (sum(column) for column in zip(*fed, strict=True))
    assert total <= 1.1 * real


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "bnpo"])
def test_without_trimming_the_weights_are_those_of_unmodified_trl_bit_for_bit(
    tmp_path: Path, model: str, loss_type: str
) -> None:
    keys = {**KEYS, "loss_type": loss_type, "beta": 0.1, "max_steps": 3}
    trainer, reference = (
        make_trainer(tmp_path, model, GRPOTrainer, trim_padding=False, **keys),
        unmodified(tmp_path, model, **keys),
    )
    before = weights_of(trainer)
    rows, their_rows = gradients_of(trainer)[1], gradients_of(reference)[1]
    weights = weights_of(reference)
    assert any(not torch.equal(weight, before[name]) for name, weight in weights.items())
    assert all(torch.equal(weight, weights[name]) for name, weight in weights_of(trainer).items())
    assert [row["entropy"] for row in rows] == [row["entropy"] for row in their_rows]


def sorter(steps_per_generation: int, accumulated: int, **keys: Any) -> MicroBatches:
    options = {
        "trim_padding": True, "loss_type": "dapo", "entropy_coef": 0.0, "use_adaptive_entropy": False,
        "top_entropy_quantile": 1.0, "optim": "sgd", "importance_sampling_level": "token",
        "steps_per_generation": steps_per_generation, "gradient_accumulation_steps": accumulated, **keys,
    }  # fmt: skip
    accelerator = SimpleNamespace(reduce=lambda values, reduction: values)
    return MicroBatches(
        SimpleNamespace(accelerator=accelerator, args=SimpleNamespace(**options), aux_loss_enabled=False)
    )


def micro_batch(first: int, *lengths: int) -> dict[str, Any]:
    steps = torch.arange(6)
    return {
        "prompt_mask": torch.ones(len(lengths), 1, dtype=torch.long),
        "completion_mask": (steps < torch.tensor(lengths).unsqueeze(1)).long(),
        "row": first + torch.arange(len(lengths)), "num_items_in_batch": torch.tensor(9), "images": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("accumulated", "order"),
    [
        (4, [[7, 5], [1, 3], [2, 4], [0, 6]]),
        (2, [[1, 3], [2, 0], [7, 5], [4, 6]]),
        (6, [[1, 3], [2, 0], [7, 5], [4, 6]]),
    ],
)
def test_rows_stay_in_their_optimizer_step(accumulated: int, order: list[list[int]]) -> None:
    """Six accumulated micro-batches span generations of four: pairs are always in one step."""
    parts = [micro_batch(0, 1, 4), micro_batch(2, 2, 3), micro_batch(4, 2, 5), micro_batch(6, 1, 6)]
    parts = sorter(4, accumulated).sort(parts)
    assert [rows["row"].tolist() for rows in parts] == order
    for rows in parts:
        assert rows["num_items_in_batch"] == 9 and rows["images"] is None


def test_token_means_are_weighted_by_the_tokens_of_a_micro_batch() -> None:
    trainer = sorter(2, 2)
    long, short = trainer.sort([micro_batch(0, 1, 4), micro_batch(2, 1, 6)])
    assert (long[TOKENS], short[TOKENS]) == (pytest.approx(10 / 6), pytest.approx(2 / 6))
    metrics = {"entropy": [7.0, 3.0], "kl": [3.0], "clip_ratio/high_max": [3.0]}
    trainer.weight_token_means(metrics, short)
    assert metrics == {"entropy": [7.0, pytest.approx(1.0)], "kl": [pytest.approx(1.0)], "clip_ratio/high_max": [3.0]}
    trainer.weight_token_means(metrics, {})
    assert metrics["kl"] == [pytest.approx(1.0)]


@pytest.mark.parametrize(
    "keys", [{"trim_padding": False}, {"loss_type": "bnpo"}, {"entropy_coef": 0.1}, {"top_entropy_quantile": 0.5},
             {"use_adaptive_entropy": True}, {"optim": "lomo"}], ids=str,
)  # fmt: skip
def test_options_that_depend_on_the_micro_batch_keep_trls_order(keys: dict[str, Any]) -> None:
    parts = [micro_batch(0, 1, 4), micro_batch(2, 1, 6)]
    assert sorter(2, 2, **keys).sort(parts) is parts


def test_rows_with_images_keep_trls_order() -> None:
    parts = [micro_batch(0, 1, 4) | {"num_images": [1, 1]}, micro_batch(2, 1, 6) | {"num_images": [1, 1]}]
    assert sorter(2, 2).sort(parts) is parts


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo"])
def test_padding_free_rows_have_the_gradient_of_unmodified_trl(tmp_path: Path, model: str, loss_type: str) -> None:
    keys = {**KEYS, "loss_type": loss_type, "beta": 0.1, "max_steps": 2, "learning_rate": 1e-3}
    free = make_trainer(tmp_path, model, GRPOTrainer, padding_free=True, **keys)
    fed: list[tuple[int, int]] = []
    forward = free.model.model.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        assert kwargs.get("attention_mask") is None
        fed.append(tuple(kwargs["input_ids"].shape))
        return forward(*args, **kwargs)

    free.model.model.forward = watched
    assert_same_gradients(gradients_of(free)[0], gradients_of(unmodified(tmp_path, model, **keys))[0], tolerance=2e-6)
    assert fed and all(rows == 1 for rows, _ in fed)


@pytest.mark.parametrize("loss_type", ["dapo", "bnpo"])
def test_an_adapter_has_the_gradient_that_it_has_in_micro_batches_of_trl(
    tmp_path: Path, model: str, loss_type: str
) -> None:
    def adapted(on: bool) -> GRPOTrainer:
        torch.manual_seed(0)  # adapters begin at random
        return make_trainer(
            tmp_path / str(on), model, GRPOTrainer, peft_config=LoraConfig(r=4, init_lora_weights=False),
            trim_padding=on, loss_type=loss_type, beta=0.1, max_steps=2, **KEYS,
        )  # fmt: skip

    assert_same_gradients(gradients_of(adapted(True))[0], gradients_of(adapted(False))[0], tolerance=2e-6)


@pytest.mark.slow
def test_sixty_steps_of_adam_end_with_the_weights_of_trls_own_micro_batches(tmp_path: Path, model: str) -> None:
    keys = {**KEYS, "max_steps": 60, "optim": "adamw_torch", "learning_rate": 1e-5, "max_grad_norm": 1.0, "beta": 0.04}
    before = weights_of(make_trainer(tmp_path, model, GRPOTrainer, **keys))
    ends = []
    for on in (True, False):
        trainer = make_trainer(tmp_path / str(on), model, GRPOTrainer, trim_padding=on, **keys)
        gradients_of(trainer)
        ends.append(weights_of(trainer))
    weights, expected = ends
    assert max((expected[name] - before[name]).abs().max() for name in expected) > 1e-4
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-5)
