"""How low precision and warm-up can keep a run from learning anything. Pure: no torch, no socket."""

import math

from grpo_recipes.recipe import Recipe

# One step of AdamW changes a weight by about the learning rate; neighbouring bfloat16 numbers near 0.02 are 1e-4 apart.
# Of weights with that spread a step at 1e-6 changes 2 %, at 1e-5 15 %, at 3e-5 30 %, at 1e-4 88 %, and what is rounded
# away once is rounded away in every step: tests/recipe/test_learning.py measures it.
LEAST_BFLOAT16_RATE = 1e-4
# Optimizers whose step is the learning rate times the gradient; that of all others is about the learning rate itself.
GRADIENT_OPTIMIZERS = ("sgd", "schedule_free_sgd", "lomo", "adalomo", "adagrad")
# DeepSpeed updates float32 copies and rounds them into the model; accelerate's FSDP2 casts the model up first, but only
# under mixed precision.
_KEEPS_COPIES = ("zero2", "zero3")
_NOT_FROM_ZERO = ("constant", "reduce_lr_on_plateau", "greedy", "cosine_warmup_with_min_lr")
MIN_FRACTION = 0.01  # of learning_rate; a run that never gets so far learns nothing


def mixed_precision(recipe: Recipe) -> str:
    """Return what accelerate calls the precision of the computation: TRL turns bf16 on by default."""
    return "fp16" if recipe["fp16"] else "no" if recipe["bf16"] is False else "bf16"


def served_dtype(dtype: str | None, mixed: str, shared: bool = False) -> str:
    """Return the dtype that vLLM computes in: the trainer's precision; ``mixed`` as ``mixed_precision``.

    In float32, a GPU has no FlashAttention and needs twice the memory for weights and KV cache. With ``weight_sync:
    shared`` (``shared``) the server's weights are the trainer's own.
    """
    if dtype != "float32" or shared:
        return dtype or "auto"
    return {"bf16": "bfloat16", "fp16": "float16"}.get(mixed, dtype)


def updates_float32(accelerator: str, mixed: str) -> bool:
    """Return whether a run updates float32 weights, whatever the model's dtype is; ``mixed`` as ``mixed_precision``."""
    return accelerator in _KEEPS_COPIES or (accelerator == "fsdp2" and mixed != "no")


def trains_weights_as_loaded(recipe: Recipe) -> bool:
    """Return whether weights are trained in the dtype they are loaded in; PEFT keeps adapters in float32."""
    return not recipe["use_peft"] or bool(recipe["lora_modules_to_save"])


def lost_updates(dtype: str, learning_rate: float, optim: str, optim_args: str | None) -> str:
    """Return why updates of weights of this dtype are lost at the run's highest learning rate, or an empty text."""
    # Kahan summation keeps what is rounded away.
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
    """Return the edit after which float32 weights are updated."""
    computed = " (bf16: true keeps the computation in bfloat16)" if mixed == "bf16" else ""
    return f"write accelerator: zero2, or dtype: float32{computed}"


def reached_fraction(recipe: Recipe) -> float:
    """Return the largest share of ``learning_rate`` that a step takes, 1 where the number of steps is not known."""
    steps, warm = recipe["max_steps"], recipe["warmup_steps"]
    if steps < 1 or recipe["lr_scheduler_type"] in _NOT_FROM_ZERO:
        return 1.0
    warm = int(warm) if warm >= 1 else math.ceil(warm * steps)
    return 1.0 if warm < steps else (steps - 1) / warm  # the first step is step 0 of the schedule
