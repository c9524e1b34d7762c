"""What a recipe must hold of LoRA: ``use_peft`` and the keys that belong to it. Pure: no torch, no socket.

Whether the model has the layers that are named shows with its configuration: ``trainers.lora``.
"""

from __future__ import annotations

from collections.abc import Iterator

from grpo_recipes.errors import Problem
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.keys import catalogue

_EMBEDDINGS = ("lm_head", "embed_tokens", "wte", "embed_in", "embed_out")
_WITHOUT = (False, None)


def lora(recipe: Recipe) -> list[Problem]:
    """LoRA keys, alone and against the others."""
    if not recipe["use_peft"]:
        return list(_orphans(recipe))
    return [*_conflicts(recipe), *_layers(recipe)]


def _orphans(recipe: Recipe) -> Iterator[Problem]:
    """A whole model would be trained by a recipe that looks like LoRA."""
    for key in catalogue():
        belongs = key.startswith("lora_") or key in ("use_dora", "use_rslora")
        if belongs and key not in recipe.broken and recipe.given(key) and recipe[key] not in _WITHOUT:
            yield Problem(
                recipe.place(key), f"'{key}' does nothing without use_peft", f"add use_peft: true, or remove {key}"
            )


def _conflicts(recipe: Recipe) -> Iterator[Problem]:
    if recipe["accelerator"] in ("zero3", "fsdp2"):
        what = f"a LoRA run with accelerator: {recipe['accelerator']} has not been shown to work"
        yield Problem(recipe.place("accelerator"), what, "write accelerator: ddp or zero2")
    if recipe["sync_ref_model"]:
        what = "the reference of a LoRA run is its base model, which sync_ref_model cannot move"
        yield Problem(recipe.place("sync_ref_model"), what, "remove sync_ref_model, or use_peft")
    if recipe["disable_dropout"] and recipe["lora_dropout"] > 0:
        what = f"disable_dropout turns lora_dropout {recipe['lora_dropout']:g} off"
        yield Problem(recipe.place("lora_dropout"), what, "keep one of the two")
    if recipe["cast_lm_head_to_fp32"]:
        what = "cast_lm_head_to_fp32 puts the output layer beside a LoRA model, where no transfer finds it"
        yield Problem(recipe.place("cast_lm_head_to_fp32"), what, "remove cast_lm_head_to_fp32, or use_peft")
    if recipe["push_to_hub"] and recipe["hub_strategy"] != "end":
        what = f"hub_strategy {recipe['hub_strategy']} publishes checkpoints: of a LoRA run, the adapter alone"
        yield Problem(recipe.place("hub_strategy"), what, "write hub_strategy: end (the merged model)")
    if recipe["lora_target_parameters"]:
        what = "adapters on parameters that are no layer (experts) have not been shown to reach the server"
        yield Problem(recipe.place("lora_target_parameters"), what, "write lora_target_modules")


def _layers(recipe: Recipe) -> Iterator[Problem]:
    names = recipe["lora_target_modules"]
    if names is None:
        return
    where = recipe.place("lora_target_modules")
    if not names or ("all-linear" in names and len(names) > 1):
        what = "lora_target_modules names all-linear and others" if names else "lora_target_modules names no layer"
        yield Problem(where, what, "write lora_target_modules: [all-linear], or the names of layers")
    for name in names:
        if name.rpartition(".")[2] in _EMBEDDINGS:
            what = f"an adapter on '{name}' is not supported: log-probs are computed from the layer's own weights"
            yield Problem(
                where, what, "name linear layers between the embeddings, e.g. [q_proj, v_proj], or [all-linear]"
            )


RULES = (lora,)
