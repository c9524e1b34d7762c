"""Overrides of TRL's trainer. These tests fail before a run does if TRL changes a signature."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
import trl

from grpo_recipes.trainers import temperatures
from grpo_recipes.trainers.grpo import GRPOTrainer
from grpo_recipes.trainers.maxent import MaxEntGRPOTrainer
from grpo_recipes.trainers.passes import compute_in_trimmed_passes
from grpo_recipes.trainers.temperatures import compute_at_own_temperatures

PADDED = SimpleNamespace(padding_free=False, pad_to_multiple_of=None)

# Every method of TRL's and transformers' that GRPOTrainer overrides, with its parameters there.
SIGNATURES = {
    "create_accelerator_and_postprocess": [],
    "train": ["resume_from_checkpoint", "trial", "ignore_keys_for_eval"],
    "_get_train_sampler": ["dataset"],
    "_run_epoch": [
        "model", "epoch", "train_dataloader", "steps_in_epoch", "num_update_steps_per_epoch", "trial",
        "ignore_keys_for_eval", "start_time", "resume_from_checkpoint", "epochs_trained",
        "steps_trained_in_current_epoch",
    ],
    "training_step": ["model", "inputs", "num_items_in_batch"],
    "_prepare_inputs": ["generation_batch"],
    "_generate_and_score_completions": ["inputs"],
    "_generate": ["prompts"],
    "_generate_single_turn": ["prompt_ids", "images", "multimodal_fields", "num_generations", "has_tool_images"],
    "_calculate_rewards": ["inputs", "prompts", "completions", "completion_ids_list"],
    "_get_grad_norm": ["model", "grad_norm"],
    "_maybe_log_save_evaluate": [
        "tr_loss", "grad_norm", "model", "trial", "epoch", "ignore_keys_for_eval", "start_time", "learning_rate",
    ],
    "log": ["logs", "start_time"],
    "_save_checkpoint": ["model", "trial"],
    "_get_output_dir": ["trial"],
    "_save_rng_state": ["output_dir"],
    "_load_optimizer_and_scheduler": ["checkpoint"],
    "_load_rng_state": ["checkpoint"],
    "evaluate": ["eval_dataset", "ignore_keys", "metric_key_prefix"],
    "predict": ["test_dataset", "ignore_keys", "metric_key_prefix"],
    "_evaluate": ["trial", "ignore_keys_for_eval", "skip_scheduler"],
    "_determine_best_metric": ["metrics", "trial"],
    "_finalize_training": ["trial", "num_train_samples", "start_time"],
    "_load_best_model": [],
    "evaluation_loop": ["dataloader", "description", "prediction_loss_only", "ignore_keys", "metric_key_prefix"],
    "prediction_step": ["model", "inputs", "prediction_loss_only", "ignore_keys"],
    "_get_per_token_logps_and_entropies": [
        "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy", "compute_aux_loss",
        "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles",
        "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids",
    ],
    "_compute_loss": ["model", "inputs"],
    "get_eval_dataloader": ["eval_dataset"],
    "get_test_dataloader": ["test_dataset"],
    "_get_dataloader": ["dataset", "description", "batch_size", "sampler_fn", "is_training", "dataloader_key"],
}  # fmt: skip


def parameters(function: FunctionType) -> list[str]:
    return list(inspect.signature(function).parameters)[1:]


@pytest.mark.parametrize("method", SIGNATURES)
def test_trls_method_takes_what_we_know(method: str) -> None:
    assert parameters(getattr(trl.GRPOTrainer, method)) == SIGNATURES[method]


@pytest.mark.parametrize("method", SIGNATURES)
def test_an_override_can_be_called_as_trls_is(method: str) -> None:
    original = inspect.signature(getattr(trl.GRPOTrainer, method))
    override = inspect.signature(vars(GRPOTrainer)[method])
    override.bind(None, **dict.fromkeys(list(original.parameters)[1:]))
    if method != "_run_epoch":  # transformers calls _run_epoch with keywords
        override.bind(*original.parameters)


@pytest.mark.parametrize("number", range(len(SIGNATURES["_get_per_token_logps_and_entropies"]) + 1))
@pytest.mark.parametrize("own_temperatures", [False, True])
def test_log_probs_are_computed_however_the_arguments_are_passed(number: int, own_temperatures: bool) -> None:
    """S14: arguments by position or by name, through all layers around TRL's method."""
    rows, width, length = 2, 6, 3
    values = {
        "model": None, "input_ids": torch.arange(rows * width).view(rows, width),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]]), "logits_to_keep": length,
        "batch_size": 1, "compute_entropy": True,
    }  # fmt: skip
    names = SIGNATURES["_get_per_token_logps_and_entropies"]
    passed = {name: values.get(name) for name in names}
    accelerator = SimpleNamespace(num_processes=1, gather=lambda tensor: tensor, device=torch.device("cpu"))
    layers = [partial(compute_in_trimmed_passes, SimpleNamespace(accelerator=accelerator, args=PADDED))]
    if own_temperatures:
        trainer = SimpleNamespace(accelerator=accelerator)
        layers.append(lambda inner, *a, **k: compute_at_own_temperatures(trainer, torch.ones(rows), inner, *a, **k))
    compute: Any = log_probs_of_trl
    for layer in layers:
        compute = partial(layer, compute)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(temperatures, "changing_head_temperature", lambda *_: nullcontext())
        first, by_name = names[:number], names[number:]
        logps, entropies, _ = compute(*(passed[name] for name in first), **{name: passed[name] for name in by_name})
    assert logps.shape == entropies.shape == (rows, length)


def log_probs_of_trl(
    model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, batch_size: Any = None,
    compute_entropy: bool = False, *args: Any, **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None, None]:  # fmt: skip
    """Return something of the shapes that TRL's method returns."""
    values = input_ids[:, -logits_to_keep:].float()
    return values, values if compute_entropy else None, None


def test_every_override_is_in_the_table_and_maxent_has_none() -> None:
    def overrides(cls: type) -> set[str]:
        return {
            name for name, member in vars(cls).items() if inspect.isfunction(member) and hasattr(trl.GRPOTrainer, name)
        }

    assert overrides(GRPOTrainer) == {"__init__", *SIGNATURES}
    assert overrides(MaxEntGRPOTrainer) == {"__init__"}
    assert GRPOTrainer.__bases__ == (trl.GRPOTrainer,) and MaxEntGRPOTrainer.__bases__ == (GRPOTrainer,)
