"""Our overrides of TRL's trainer: this fails when one of their signatures changes there, before a run does."""

from __future__ import annotations

import inspect
from types import FunctionType

import pytest
import trl

from grpo_recipes.trainers.grpo import GRPOTrainer
from grpo_recipes.trainers.maxent import MaxEntGRPOTrainer

# Every method of TRL's and transformers' that GRPOTrainer overrides, with its parameters there.
SIGNATURES = {
    "train": ["resume_from_checkpoint", "trial", "ignore_keys_for_eval"],
    "_get_train_sampler": ["dataset"],
    "_run_epoch": [
        "model", "epoch", "train_dataloader", "steps_in_epoch", "num_update_steps_per_epoch", "trial",
        "ignore_keys_for_eval", "start_time", "resume_from_checkpoint", "epochs_trained",
        "steps_trained_in_current_epoch",
    ],
    "training_step": ["model", "inputs", "num_items_in_batch"],
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
    theirs = inspect.signature(getattr(trl.GRPOTrainer, method))
    ours = inspect.signature(vars(GRPOTrainer)[method])
    ours.bind(None, **dict.fromkeys(list(theirs.parameters)[1:]))
    if method != "_run_epoch":  # which transformers calls with keywords
        ours.bind(*theirs.parameters)


def test_every_override_is_in_the_table_and_maxent_has_none() -> None:
    def overrides(cls: type) -> set[str]:
        return {name for name, held in vars(cls).items() if inspect.isfunction(held) and hasattr(trl.GRPOTrainer, name)}

    assert overrides(GRPOTrainer) == {"__init__", *SIGNATURES}
    assert overrides(MaxEntGRPOTrainer) == {"__init__"}
    assert GRPOTrainer.__bases__ == (trl.GRPOTrainer,) and MaxEntGRPOTrainer.__bases__ == (GRPOTrainer,)
