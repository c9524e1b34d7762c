"""What a recipe must hold of a run's name, ports and parts that are not supported. Pure: no torch, no socket."""

from __future__ import annotations

import re

from grpo_recipes.errors import Problem
from grpo_recipes.recipe import Recipe, check_lora
from grpo_recipes.recipe.keys import catalogue

_RUN_NAME = re.compile(r"\w[^/\x00-\x1f]*")
_LONGEST_NAME = 100  # a folder's may have 255 bytes, and a time and more come behind it
_UNSUPPORTED = {
    "load_in_8bit": "remove it; quantized training is not supported",
    "load_in_4bit": "remove it; quantized training is not supported",
    "save_only_model": "remove it; a checkpoint without optimizer cannot be resumed",
    "load_best_model_at_end": "remove it; the model of the last step is kept",
}
# The beginnings of keys that are read with one of those alone.
_WITH_UNSUPPORTED = {
    "bnb_": "load_in_4bit",
    "use_bnb_": "load_in_4bit",
}


def run_name(recipe: Recipe) -> list[Problem]:
    """``run_name``, after which folders and logs are called."""
    name = recipe["run_name"]
    if name is None or (_RUN_NAME.fullmatch(name) and len(name.encode()) <= _LONGEST_NAME):
        return []
    what = f"run_name '{name[:_LONGEST_NAME]}' cannot be the name of a folder"
    fix = f"begin with a letter or digit, without '/' or line ends, at most {_LONGEST_NAME} bytes"
    return [Problem(recipe.place("run_name"), what, fix)]


def ports(recipe: Recipe) -> list[Problem]:
    """Ports that the user gave."""
    taken: dict[int, str] = {}
    problems = []
    for key in ("vllm_server_port", "vllm_group_port", "main_process_port"):
        if recipe.given(key) and recipe[key] in taken:
            what = f"{key} is {recipe[key]}, and so is {taken[recipe[key]]}"
            problems.append(Problem(recipe.place(key), what, "give each its own, or remove them"))
        elif recipe.given(key):
            taken[recipe[key]] = key
    return problems


def template(recipe: Recipe) -> list[Problem]:
    """``chat_template`` holds the template, not the name of a file."""
    if recipe["chat_template"] is None or "messages" in recipe["chat_template"]:
        return []
    what, fix = "chat_template does not mention messages", "write the template itself: chat_template: |"
    return [Problem(recipe.place("chat_template"), what, fix)]


def colocate(recipe: Recipe) -> list[Problem]:
    """Keys of a server where there is none."""
    if recipe["vllm_mode"] == "colocate" and recipe.given("weight_sync"):
        what = "weight_sync has no meaning with vllm_mode: colocate (vLLM shares the trainer's process)"
        return [Problem(recipe.place("weight_sync"), what, "remove weight_sync")]
    return []


def report(recipe: Recipe) -> list[Problem]:
    """``report_to``."""
    known = {"none", "wandb", "tensorboard"}
    names = recipe["report_to"] or []
    names = [names] if isinstance(names, str) else names
    return [
        Problem(recipe.place("report_to"), f"'{name}' is not supported", f"write one of {', '.join(sorted(known))}")
        for name in names
        if name not in known
    ]


# How accelerate could deal out batches otherwise than TRL's sampler, whose rows are whole groups in the ranks' order.
_DEALING = {
    "split_batches": "each rank would get a part of its own rows, and would sample the same prompts again",
    "dispatch_batches": "accelerate sends tensors alone to the other ranks, and prompts are texts",
}


def dealing(recipe: Recipe) -> list[Problem]:
    """Refuse settings of ``accelerator_config`` with which ranks get other rows than their own."""
    given = recipe["accelerator_config"] or {}
    return [
        Problem(recipe.place("accelerator_config"), f"with {name}: true {why}", f"remove {name}")
        for name, why in _DEALING.items()
        if given.get(name)
    ]


def unsupported(recipe: Recipe) -> list[Problem]:
    """Keys of TRL whose path through our server, checkpoints or model folder has not been shown to work."""
    fixes = dict(_UNSUPPORTED)
    for begins, needed in _WITH_UNSUPPORTED.items():
        fixes |= {key: f"remove it; it does nothing without {needed}" for key in catalogue() if key.startswith(begins)}
    return [
        Problem(recipe.place(key), f"'{key}' is not supported", fix)
        for key, fix in fixes.items()
        if key not in recipe.broken and recipe.given(key) and recipe[key] not in (False, None, "no")
    ]


RULES = (run_name, ports, template, colocate, report, dealing, unsupported, *check_lora.RULES)
