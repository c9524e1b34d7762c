"""Rules of recipes as tables: keys that contradict each other, and keys that change nothing without another.

A text of a row may hold values of the recipe as ``{key}``, or be a function of the recipe. Rules that compute more
stand in ``check``, ``check_data``, ``check_maxent`` and ``learning``. Pure: no torch, no socket.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from grpo_recipes.errors import Problem
from grpo_recipes.modebench.dataset import SCHEME, TASK_KEYS, TASKS
from grpo_recipes.recipe import BrokenKey, Recipe
from grpo_recipes.recipe.keys import ENVIRONMENT_KEYS, catalogue
from grpo_recipes.recipe.learning import BY_GRADIENT, hidden_losses, unfinished_warmup
from grpo_recipes.recipe.registry import IN_CHILDREN, OBJECTIVES, REWARDS, Objective
from grpo_recipes.recipe.tasks import MAXENT, task_of

Condition = Callable[[Recipe], Any]
Text = str | Callable[[Recipe], str]
_OFF = (False, None, "no")
_LARGEST_OF_FOUR = 14  # listing all problems of four larger numbers takes minutes


class Contradiction(NamedTuple):
    """A recipe that is refused at ``key`` where ``broken`` holds."""

    key: str
    broken: Condition
    what: Text
    fix: Text


class Unread(NamedTuple):
    """Keys that are refused where a recipe gives them and ``unread`` holds, so that nothing would read them."""

    keys: str  # names, * for any ending
    unread: Condition
    what: str  # {key} is the key in question, {removal} how to take it back
    fix: str
    any_value: bool = False  # refuse false, null and "no" too


def objective_of(recipe: Recipe) -> Objective | None:
    """Return the objective of a MaxEnt recipe, None of another."""
    return OBJECTIVES[recipe["maxent_objective"]] if task_of(recipe) == MAXENT else None


def reports_to(recipe: Recipe) -> list[str]:
    """Return the names in ``report_to``."""
    names = recipe["report_to"] or []
    return [names] if isinstance(names, str) else names


def modebench_tasks(recipe: Recipe) -> list[str]:
    """Return the ModeBench tasks that a recipe trains, evaluates or tests on."""
    sets = [recipe["dataset_name"], recipe["eval_dataset_name"] if recipe["eval_strategy"] != "no" else None]
    return [task for task in TASKS if task in (*sets, *recipe["benchmarks"])]


def _evaluates(recipe: Recipe) -> bool:
    return bool(recipe["eval_strategy"] != "no")


def _targets_q(recipe: Recipe) -> bool:
    objective = objective_of(recipe)
    return objective is not None and objective.targets_q


def _tau(recipe: Recipe) -> float:
    return OBJECTIVES[recipe["maxent_objective"]].tau_or_default(recipe["maxent_tau"])


def _tau_is_fixed(recipe: Recipe) -> bool:
    targets = (recipe["maxent_target_weight_entropy"], recipe["maxent_target_eff_rollouts"])
    return task_of(recipe) == MAXENT and targets == (None, None)


def _whole_groups(size: int, group: int) -> str:
    below = size // group * group
    return f"write {below or group} or {below + group}"


# fmt: off
CONTRADICTIONS = (
    Contradiction("model_name_or_path", lambda r: not r["model_name_or_path"],
        "no model is named", "add model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct"),
    Contradiction("reward_funcs", lambda r: not r["reward_funcs"], "no reward is named", "add reward_funcs"),
    Contradiction("reward_weights",
        lambda r: r["reward_weights"] is not None and len(r["reward_weights"]) != len(r["reward_funcs"]),
        lambda r: f"{len(r['reward_weights'])} weights for {len(r['reward_funcs'])} rewards",
        "give one weight for each of reward_funcs"),
    Contradiction("reward_weights", lambda r: r["reward_weights"] and not any(r["reward_weights"]),
        "every reward has the weight 0: all completions score the same",
        "give one of them a weight, or remove the key"),
    Contradiction("vllm_importance_sampling_clip_max",
        lambda r: r["use_vllm"] and r["vllm_importance_sampling_correction"]
        and r["vllm_importance_sampling_clip_max"] is not None and r["vllm_importance_sampling_clip_max"] <= 0,
        "vllm_importance_sampling_clip_max {vllm_importance_sampling_clip_max:g} multiplies every gradient by 0",
        "write 3.0, or remove it"),
    # The batch, and how long the run is.
    Contradiction("steps_per_generation",
        lambda r: r["steps_per_generation"] is not None and r["generation_batch_size"] is not None,
        "'generation_batch_size' and 'steps_per_generation' say the same in two ways", "remove one of the two"),
    Contradiction("generation_batch_size",
        lambda r: r["steps_per_generation"] is None and (r["generation_batch_size"] or 0) % r["num_generations"],
        "generation_batch_size {generation_batch_size} is not whole groups of num_generations {num_generations}",
        lambda r: _whole_groups(r["generation_batch_size"], r["num_generations"])),
    Contradiction("max_steps", lambda r: r["max_steps"] == 0 or r["max_steps"] < -1,
        "'max_steps' is {max_steps}", "write 1 or more, or -1 for num_train_epochs"),
    Contradiction("num_train_epochs", lambda r: r["max_steps"] == -1 and r["num_train_epochs"] <= 0,
        "nothing is trained", "write num_train_epochs: 1"),
    Contradiction("save_steps", lambda r: r["save_strategy"] == "steps" and r["save_steps"] % 1,
        "save_steps {save_steps:g} is not a whole number of steps",
        lambda r: f"write save_steps: {round(r['save_steps'])}"),
    Contradiction("epsilon_high", lambda r: r["epsilon_high"] is not None and r["epsilon_high"] < r["epsilon"],
        "epsilon_high {epsilon_high} is below epsilon {epsilon}", "write {epsilon} or more, e.g. 0.28"),
    Contradiction("soft_punish_cache",
        lambda r: r["max_completion_length"] is not None
        and (r["soft_punish_cache"] or 0) > r["max_completion_length"],
        "soft_punish_cache {soft_punish_cache} exceeds max_completion_length {max_completion_length}: every completion "
        "would be punished", lambda r: f"write {r['max_completion_length'] // 4}, a quarter of it"),
    Contradiction("chat_template",
        lambda r: r["chat_template"] is not None and "messages" not in r["chat_template"],
        "chat_template does not mention messages", "write the template itself: chat_template: |"),
    # Precision and learning rate.
    Contradiction("learning_rate", lambda r: r["learning_rate"] == 0,
        "learning_rate is 0: no weight is ever changed", "write e.g. learning_rate: 1e-6"),
    Contradiction("learning_rate", lambda r: r["learning_rate"] >= 1 and r["optim"] not in BY_GRADIENT,
        "learning_rate {learning_rate:g}: the first step of {optim} moves every weight by about as much",
        "write e.g. learning_rate: 1e-6"),
    Contradiction("fp16", lambda r: r["bf16"] and r["fp16"], "'bf16' and 'fp16' are both true", "keep one"),
    Contradiction("dtype", lambda r: r["fp16"] and not r["bf16"] and r["dtype"] == "float16",
        "fp16 scales the gradients of float32 weights, dtype is float16",
        "write dtype: float32, or bf16: true and dtype: bfloat16"),
    # Datasets.
    Contradiction("dataset_mixture", lambda r: r["dataset_name"] and r["dataset_mixture"],
        "dataset_mixture and dataset_name are both given", "keep one of them"),
    Contradiction("dataset_streaming",
        lambda r: r["dataset_streaming"] and (r["dataset_name"] or "").startswith(SCHEME),
        "'{dataset_name}' is made on the spot, there is nothing to stream", "remove dataset_streaming"),
    Contradiction("dataset_streaming", lambda r: r["dataset_streaming"] and r["dataset_mixture"],
        "dataset_streaming has no meaning with dataset_mixture, whose weights are shares of all rows",
        "remove dataset_streaming"),
    Contradiction("dataset_streaming",
        lambda r: r["dataset_streaming"] and r["max_train_prompts"] is None and not r["dataset_mixture"]
        and not (r["dataset_name"] or "").startswith(SCHEME),
        "dataset_streaming without max_train_prompts would read the stream to its end",
        "add max_train_prompts, e.g. max_train_prompts: 10000"),
    Contradiction("modebench_min_modes",
        lambda r: modebench_tasks(r) and r["modebench_min_modes"] > r["modebench_max_modes"],
        "modebench_min_modes {modebench_min_modes} exceeds modebench_max_modes {modebench_max_modes}",
        "write at most {modebench_max_modes}"),
    Contradiction("modebench_largest_number",
        lambda r: "modebench:countdown" in modebench_tasks(r) and r["modebench_numbers"] == 4
        and (r["modebench_largest_number"] or 0) > _LARGEST_OF_FOUR,
        "modebench_largest_number {modebench_largest_number} with 4 numbers takes minutes to list",
        f"write at most {_LARGEST_OF_FOUR}"),
    Contradiction("modebench_hidden",
        lambda r: "modebench:graph_coloring" in modebench_tasks(r) and r["modebench_hidden"] > r["modebench_vertices"],
        "modebench_hidden {modebench_hidden} exceeds modebench_vertices {modebench_vertices}",
        "write at most {modebench_vertices}"),
    # Evaluation and benchmarks.
    Contradiction("eval_strategy", lambda r: r["eval_strategy"] == "steps" and not r["eval_steps"],
        "eval_strategy: steps without eval_steps evaluates after every optimizer step",
        "add eval_steps, e.g. eval_steps: 50"),
    Contradiction("eval_steps",
        lambda r: r["eval_strategy"] == "steps" and (r["eval_steps"] or 0) > 1 and r["eval_steps"] % 1,
        "eval_steps {eval_steps:g} is neither a whole number of steps nor a share below 1",
        lambda r: f"write eval_steps: {round(r['eval_steps'])}"),
    Contradiction("lr_scheduler_type",
        lambda r: _evaluates(r) and r["lr_scheduler_type"] in ("reduce_lr_on_plateau", "greedy"),
        "lr_scheduler_type {lr_scheduler_type} follows eval_loss, which is near zero whatever the model does",
        "write lr_scheduler_type: cosine"),
    Contradiction("use_transformers_continuous_batching",
        lambda r: _evaluates(r) and r["use_transformers_continuous_batching"],
        "use_transformers_continuous_batching puts the model back into training in an evaluation",
        "remove it, or write eval_strategy: 'no'"),
    Contradiction("benchmark_samples", lambda r: r["benchmark_temperature"] == 0 and r["benchmark_samples"] > 1,
        "benchmark_samples {benchmark_samples} at benchmark_temperature 0 are {benchmark_samples} times the same "
        "completion", "write benchmark_samples: 1, or a benchmark_temperature above 0, e.g. 0.6"),
    # LoRA.
    Contradiction("accelerator", lambda r: r["use_peft"] and r["accelerator"] in ("zero3", "fsdp2"),
        "a LoRA run with accelerator: {accelerator} has not been shown to work", "write accelerator: ddp or zero2"),
    Contradiction("sync_ref_model", lambda r: r["use_peft"] and r["sync_ref_model"],
        "the reference of a LoRA run is its base model, which sync_ref_model cannot move",
        "remove sync_ref_model, or use_peft"),
    Contradiction("lora_dropout", lambda r: r["use_peft"] and r["disable_dropout"] and r["lora_dropout"] > 0,
        "disable_dropout turns lora_dropout {lora_dropout:g} off", "keep one of the two"),
    Contradiction("cast_lm_head_to_fp32", lambda r: r["use_peft"] and r["cast_lm_head_to_fp32"],
        "cast_lm_head_to_fp32 puts the output layer beside a LoRA model, where no transfer finds it",
        "remove cast_lm_head_to_fp32, or use_peft"),
    Contradiction("hub_strategy", lambda r: r["use_peft"] and r["push_to_hub"] and r["hub_strategy"] != "end",
        "hub_strategy {hub_strategy} publishes checkpoints: of a LoRA run, the adapter alone",
        "write hub_strategy: end (the merged model)"),
    Contradiction("lora_target_parameters", lambda r: r["use_peft"] and r["lora_target_parameters"],
        "adapters on parameters that are not layers (experts) have not been shown to reach the server",
        "write lora_target_modules"),
    Contradiction("lora_target_modules", lambda r: r["use_peft"] and r["lora_target_modules"] == [],
        "lora_target_modules names no layer", "write lora_target_modules: [all-linear], or the names of layers"),
    Contradiction("lora_target_modules",
        lambda r: r["use_peft"] and "all-linear" in (r["lora_target_modules"] or ())
        and len(r["lora_target_modules"]) > 1,
        "lora_target_modules names all-linear and others",
        "write lora_target_modules: [all-linear], or the names of layers"),
    # MaxEnt-GRPO, its controllers and the reference.
    Contradiction("maxent_q_epsilon", lambda r: _targets_q(r) and r["maxent_q_epsilon"] * r["num_generations"] >= 1,
        lambda r: f"maxent_q_epsilon {r['maxent_q_epsilon']:g} is not below 1 / num_generations "
        f"({1 / r['num_generations']:g}): q would be negative",
        lambda r: f"write less than {1 / r['num_generations']:g}, e.g. maxent_q_epsilon: 1e-6"),
    Contradiction("maxent_tau", lambda r: _targets_q(r) and _tau(r) + r["maxent_beta"] <= 0,
        "maxent_tau and maxent_beta are both 0: the target's exponents 1 / (tau + beta) are not defined",
        "write maxent_tau: 0.01 or more, or a maxent_beta"),
    Contradiction("kl_target", lambda r: r["kl_target"] is not None and r["beta"] == 0,
        "the controller multiplies beta, which is 0: there is no KL to hold",
        "write beta (init_kl_coeff) above 0, e.g. beta: 0.04"),
    Contradiction("sync_ref_model",
        lambda r: r["sync_ref_model"] and not r["use_peft"] and r["beta"] == 0
        and not (_targets_q(r) and r["maxent_beta"] > 0),
        lambda r: "sync_ref_model has no reference to sync: "
        + ("beta and maxent_beta are 0" if _targets_q(r) else "beta is 0"),
        "remove sync_ref_model, or write beta above 0"),
)

UNREAD = (
    Unread("gradient_accumulation_steps steps_per_generation generation_batch_size",
        lambda r: r["prompts_per_step"] is not None,
        "'{key}' contradicts prompts_per_step, from which it is derived",
        "remove {key} (or prompts_per_step)", any_value=True),
    Unread("weight_sync", lambda r: r["vllm_mode"] == "colocate",
        "{key} has no meaning with vllm_mode: colocate (vLLM shares the trainer's process)",
        "remove {key}", any_value=True),
    Unread("load_in_8bit load_in_4bit", lambda _: True,
        "'{key}' is not supported", "remove it; quantized training is not supported"),
    Unread("bnb_* use_bnb_*", lambda _: True,
        "'{key}' is not supported", "remove it; it does nothing without load_in_4bit"),
    Unread("save_only_model", lambda _: True,
        "'{key}' is not supported", "remove it; a checkpoint without optimizer cannot be resumed"),
    Unread("load_best_model_at_end", lambda _: True,
        "'{key}' is not supported", "remove it; the model of the last step is kept"),
    Unread("lora_* use_dora use_rslora", lambda r: not r["use_peft"],
        "'{key}' does nothing without use_peft", "add use_peft: true, or remove {key}"),
    Unread("eval_steps eval_on_start num_generations_eval", lambda r: not _evaluates(r),
        "'{key}' does nothing without eval_strategy", "add eval_strategy: steps"),
    Unread("maxent_*", lambda r: task_of(r) != MAXENT, "'{key}' changes nothing in a GRPO run",
        "{removal}, or make it a MaxEnt run (maxent_objective in the recipe, or MAXENT=1)", any_value=True),
    Unread("maxent_length_normalize_ref", lambda r: _targets_q(r) and r["maxent_beta"] == 0,
        "'{key}' changes nothing with maxent_beta 0: no reference is read",
        "{removal}, or add a maxent_beta", any_value=True),
    Unread("maxent_tau_lr maxent_tau_min maxent_tau_max maxent_tau_warmup_steps", _tau_is_fixed,
        "'{key}' changes nothing without a target: tau is fixed",
        "{removal}, or add maxent_target_weight_entropy or maxent_target_eff_rollouts", any_value=True),
    Unread("kl_horizon kl_ctl_step_size", lambda r: r["kl_target"] is None,
        "'{key}' changes nothing without kl_target: beta is fixed", "{removal}, or add kl_target", any_value=True),
)

# Keys that do nothing without another, worth a note: people set them for many recipes at once.
_IDLE: tuple[tuple[str, Condition, str], ...] = (
    ("reward_timeout reward_memory_gib reward_workers", lambda r: not _scores_in_children(r),
        "a reward in a child process (math_verify, or your own)"),
    ("benchmark_*", lambda r: not r["benchmarks"], "benchmarks"),
    ("hub_*", lambda r: not r["push_to_hub"], "push_to_hub"),
    ("eval_*", lambda r: not _evaluates(r), "eval_strategy"),
    ("wandb_*", lambda r: "wandb" not in reports_to(r), "report_to: wandb"),
    ("vllm_*", lambda r: not r["use_vllm"], "use_vllm: true"),
)
# fmt: on


def broken_rules(recipe: Recipe) -> Iterator[Problem]:
    """Yield what the tables refuse; a rule that reads a key whose value is wrong is not judged."""
    for rule in CONTRADICTIONS:
        with contextlib.suppress(BrokenKey):
            if rule.broken(recipe):
                yield recipe.problem(rule.key, _text(rule.what, recipe), _text(rule.fix, recipe))
    for row in UNREAD:
        with contextlib.suppress(BrokenKey):
            for key in _matching(row.keys) if row.unread(recipe) else ():
                if recipe.given(key) and key not in recipe.broken and (row.any_value or recipe[key] not in _OFF):
                    words = {"key": key, "removal": removal(recipe, key)}
                    yield recipe.problem(key, row.what.format(**words), row.fix.format(**words))


def removal(recipe: Recipe, key: str) -> str:
    """Return how to take back a key that the recipe, a flag or a variable gives."""
    source = recipe.source(key)
    return f"unset {source}" if source in ENVIRONMENT_KEYS else f"remove {key}"


def notes(recipe: Recipe) -> list[str]:
    """Return what is worth knowing of a right recipe before its job waits in a queue, a line each."""
    found = [*recipe.notes, *_batch_note(recipe), *unfinished_warmup(recipe), *hidden_losses(recipe)]
    for key in recipe.values:
        source = recipe.source(key)
        # A base sets keys for recipes that differ, and the shell's variables are there for every run.
        if source.startswith((f"{recipe.path.name}:", "--")) and (needed := needed_by(recipe, key)):
            found.append(f"{source}: {key} does nothing without {needed}")
    return found


def needed_by(recipe: Recipe, key: str) -> str:
    """Return what the recipe lacks for a key to do anything, or an empty text."""
    readers = [name for name, keys in REWARDS.items() if key in keys and key != "max_completion_length"]
    if readers:
        return "" if set(readers) & set(recipe["reward_funcs"]) else " or ".join(readers)
    if key.startswith("modebench_"):
        readers = [task for task in TASK_KEYS if key in TASK_KEYS[task]] or list(TASK_KEYS)
        return "" if set(readers) & set(modebench_tasks(recipe)) else f"the dataset or benchmark {' or '.join(readers)}"
    return next(
        (needed for keys, idle, needed in _IDLE if key in _matching(keys) and key != needed and idle(recipe)), ""
    )


def _batch_note(recipe: Recipe) -> Iterator[str]:
    group, accumulation = recipe["num_generations"], recipe["gradient_accumulation_steps"]
    if recipe["prompts_per_step"] is not None or recipe["generation_batch_size"] is not None:
        return
    one = recipe["per_device_train_batch_size"] * (recipe["steps_per_generation"] or accumulation)
    multiple = group // math.gcd(group, one)
    if multiple > 1:
        yield (
            f"the batch is whole groups of {group} with a multiple of {multiple} training processes only; "
            "prompts_per_step makes it the same for every number"
        )


def _scores_in_children(recipe: Recipe) -> bool:
    names = recipe["reward_funcs"]
    own = recipe["reward_isolation"] == "completion" and any(":" in name for name in names)
    return own or bool(IN_CHILDREN & set(names))


def _text(text: Text, recipe: Recipe) -> str:
    return text(recipe) if callable(text) else text.format_map(recipe)


@functools.cache
def _matching(names: str) -> tuple[str, ...]:
    """Return the keys of the catalogue that one of some names, * for any ending, stands for."""
    return tuple(key for key in catalogue() if any(fnmatchcase(key, name) for name in names.split()))
