"""The rules of ``task: sft``: it rejects the keys that supervised fine-tuning does not read. No torch."""

from grpo_recipes.extensions.sft.arguments import SFTArguments, SFTKeys
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.keys import catalogue, environment_keys
from grpo_recipes.recipe.rules import Idle, Rule, matching_keys, set_by_user
from grpo_recipes.recipe.tasks import AddedTask

TASK = AddedTask("sft", "src/sft.py", "sft_max_length")
# Keys of the core that only GRPO reads. The maxent keys have their own rule.
ONLY_GRPO = (
    "reward_* answer_matching cosine_* repetition_* soft_punish_cache benchmark* eval_* num_generations* "
    "per_device_eval_batch_size load_best_model_at_end early_stopping_patience num_iterations steps_per_generation "
    "generation_* dynamic_sampling* trim_padding padding_free loss_type beta delta epsilon* entropy_* kl_* "
    "importance_sampling_level scale_rewards multi_objective_aggregation mask_truncated_completions "
    "max_completion_length temperature top_* min_p off_policy_mask_threshold overlap_generation *ref_model* sapo_* "
    "teacher_* vespo_* use_adaptive_entropy use_bias_correction_kl use_vllm vllm_* weight_sync* weight_guard* server_* "
    "seed_server max_concurrent_requests cache_implementation cast_lm_head_to_fp32 disable_dropout *_full_eval "
    "ds3_gather_for_generation log_completions log_unique_prompts num_completions_to_print report_samples "
    "show_completion_steps advantage_estimator shuffle_dataset dataset_test_split *transformers_continuous_batching*"
)
_CONFIGS = ("ScriptArguments", "GRPOConfig", "ModelConfig", SFTArguments.__name__)


def _trains_on_solutions(recipe: Recipe) -> bool:
    """Return whether a recipe is one of supervised fine-tuning."""
    return SFTKeys(recipe).task == TASK.name


def _find_unread_keys(recipe: Recipe) -> list[str]:
    """Return the keys that the recipe or a flag sets and supervised fine-tuning does not read.

    Return [] for a recipe of another kind. Keys set by shell variables are left out: the variables apply to every
    run of a shell, and may be meant for the GRPO run that follows.
    """
    if not _trains_on_solutions(recipe):
        return []
    others = [key for key, entry in catalogue().items() if entry["config"] not in _CONFIGS]
    keys = set_by_user(recipe, " ".join([*matching_keys(ONLY_GRPO), *others]))
    return [key for key in keys if recipe.source(key) not in environment_keys()]


# fmt: off
RULES: tuple[Rule, ...] = (
    Rule("{item}", _find_unread_keys, "{item} does nothing with task: sft, which trains on solutions without sampling",
        "{removal}"),
    Rule("learning_rate", lambda r: _trains_on_solutions(r) and not r.is_set("learning_rate"),
        "learning_rate is not set, and the default {learning_rate:g} is too small for task: sft",
        "set learning_rate: 2e-5"),
)
IDLE: tuple[Idle, ...] = (Idle("sft_max_length", lambda r: not _trains_on_solutions(r), "task: sft"),)
# fmt: on
