"""The precision of a recipe, and recipes that can't learn: rounded-away updates, an endless warm-up. No torch."""

import math

from grpo_recipes.recipe import Recipe

# One step of AdamW changes a weight by about the learning rate. Neighboring bfloat16 numbers near 0.02 are 1e-4 apart.
# A step with learning rate 1e-6 changes 2 % of such weights, 1e-5 15 %, 3e-5 30 %, and 1e-4 88 %. An update that is
# rounded away once is rounded away in every step (measured in tests/recipe/test_learning.py).
LEAST_BFLOAT16_RATE = 1e-4
# Optimizers with a step of the learning rate times the gradient. The step of all others is about the learning rate.
GRADIENT_OPTIMIZERS = ("sgd", "schedule_free_sgd", "lomo", "adalomo", "adagrad")
# DeepSpeed updates float32 copies and rounds them into the model. accelerate's FSDP2 casts the model to float32 first,
# but only under mixed precision.
_KEEPS_COPIES = ("zero2", "zero3")
_NOT_FROM_ZERO = ("constant", "reduce_lr_on_plateau", "greedy", "cosine_warmup_with_min_lr")
MIN_FRACTION = 0.01  # smallest useful fraction of learning_rate; a run that stays below it learns nothing


def mixed_precision(recipe: Recipe) -> str:
    """Return accelerate's name for the precision of the computation: "fp16", "no" for ``bf16: false``, else "bf16"."""
    return "fp16" if recipe.processes.fp16 else "no" if recipe.processes.bf16 is False else "bf16"


def served_dtype(dtype: str | None, mixed: str, shared: bool = False) -> str:
    """Return vLLM's dtype: the recipe's ``dtype``, or "auto"; float32 becomes the dtype of the trainer's computation.

    ``mixed`` is the result of ``mixed_precision``. In float32, a GPU has no FlashAttention and needs twice the memory
    for weights and KV cache. With ``weight_sync: shared`` (``shared``), the server uses the trainer's weights, and
    therefore their dtype.
    """
    if dtype != "float32" or shared:
        return dtype or "auto"
    return {"bf16": "bfloat16", "fp16": "float16"}.get(mixed, dtype)


def updates_float32(accelerator: str, mixed: str) -> bool:
    """Return whether the run updates float32 weights for every dtype of the model.

    ``accelerator`` is a value of the recipe key, and ``mixed`` a result of ``mixed_precision``.
    """
    return accelerator in _KEEPS_COPIES or (accelerator == "fsdp2" and mixed != "no")


def trains_weights_as_loaded(recipe: Recipe) -> bool:
    """Return whether weights are trained in the dtype in which they are loaded; PEFT keeps adapters in float32."""
    return not recipe.lora.use_peft or bool(recipe.lora.modules_to_save)


def lost_updates(dtype: str, learning_rate: float, optim: str, optim_args: str | None) -> str:
    """Return the reason why weights of this dtype lose their updates, or an empty text if they do not.

    In bfloat16, updates are lost with a learning rate below 1e-4, in float16 always. An optimizer with Kahan summation
    loses none. ``learning_rate`` is the highest learning rate of the run.
    """
    # Kahan summation keeps the rounding errors.
    if optim == "adamw_anyprecision" and "use_kahan_summation=True" in (optim_args or "").replace(" ", ""):
        return ""
    if dtype == "float16":
        return "squares of small gradients are 0 in float16, so that the optimizer's steps are of any size"
    if dtype == "bfloat16" and learning_rate < LEAST_BFLOAT16_RATE:
        rate = f"learning_rate {learning_rate:g}"
        size = f"{rate} times the gradient" if optim in GRADIENT_OPTIMIZERS else f"about {rate}"
        return f"steps of {size} are rounded away in bfloat16 weights"
    return ""


def float32_fix(mixed: str) -> str:
    """Return the fix, as text for the user, that makes the run update float32 weights.

    ``mixed`` is the result of ``mixed_precision``.
    """
    hint = " (bf16: true keeps the computation in bfloat16)" if mixed == "bf16" else ""
    return f"write accelerator: zero2, or dtype: float32{hint}"


def reached_fraction(recipe: Recipe) -> float:
    """Return the largest fraction of ``learning_rate`` in any step; below 1 if the warm-up is as long as the run.

    Return 1 if the number of steps is not known, and for schedules that do not start at 0.
    """
    steps, warmup = recipe.batch.max_steps, recipe.optimizer.warmup_steps
    if steps < 1 or recipe.optimizer.lr_scheduler_type in _NOT_FROM_ZERO:
        return 1.0
    warmup = int(warmup) if warmup >= 1 else math.ceil(warmup * steps)
    return 1.0 if warmup < steps else (steps - 1) / warmup  # the first step is step 0 of the schedule
