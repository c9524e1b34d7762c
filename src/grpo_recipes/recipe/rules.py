"""All rules about combinations of recipe keys, as one table. They read no files. No torch, no socket.

A rule names the key with the problem, a condition, a message and a fix. ``recipe.check`` runs the table:

    Rule("learning_rate", lambda r: r.optimizer.learning_rate == 0,
        "learning_rate is 0, so no weight changes", "set learning_rate: 1e-6")
"""

import functools
import math
import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from grpo_recipes.paths import shell_quote
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.extensions import is_served, merged, parts
from grpo_recipes.recipe.generated import generated, is_misspelled, own_reward
from grpo_recipes.recipe.keys import catalogue, environment_keys
from grpo_recipes.recipe.learning import GRADIENT_OPTIMIZERS, MIN_FRACTION, reached_fraction
from grpo_recipes.recipe.registry import (
    LORA_RANKS,
    NOT_WITH_LORA,
    PACKAGE_KEYS,
    SOURCE_REWARD,
    TRACKER_CALLBACKS,
    Reward,
    list_reward_models,
    missing_package,
    rewards,
)  # fmt: skip
from grpo_recipes.recipe.sources import requested_sampler, requested_source, source_keys, starts_from_rows
from grpo_recipes.recipe.trackers import TRACKERS

Condition = Callable[[Recipe], Any]
Text = str | Callable[[Recipe, str], str]
_RUN_NAME = re.compile(r"\w[^/\x00-\x1f]*")
_LONGEST_NAME = 100  # a folder name may have 255 bytes, and a timestamp and more are appended
_PART = r"[A-Za-z0-9](?:[\w.-]{0,94}[A-Za-z0-9_])?"
_REPOSITORY = re.compile(rf"(?!.*(?:--|\.\.|\.git$))(?:{_PART}/)?{_PART}")
_BRANCH = re.compile(r"(?![0-9a-f]{40}$)[\w][\w./-]{0,200}")
REPORTERS = ("none", *TRACKERS)
# Names of keys -> why they are rejected, and the fix.
_UNSUPPORTED = {
    "save_only_model": ("a checkpoint without optimizer cannot be resumed", "remove it"),
    "load_in_8bit load_in_4bit bnb_* use_bnb_*": (
        "the adapter would be trained on quantized weights, but the server adds it to weights that it quantizes "
        "differently or not at all, so no comparison can prove that it samples from the trained model",
        "remove it; LoRA on weights in bfloat16 (use_peft: true) saves most of the memory too",
    ),
}
EMBEDDINGS = ("lm_head", "embed_tokens", "wte", "embed_in", "embed_out")
OF_DATASETS = "dataset_* max_train_prompts system_prompt eval_dataset_* eval_subsample eval_max_prompts"
_OF_EVALUATION = "eval_steps eval_on_start num_generations_eval load_best_model_at_end early_stopping_patience"
_PORTS = ("vllm_server_port", "vllm_group_port", "main_process_port")
# Truncated sampling: the server's log-probs come from a different distribution than the trainer's.
NEUTRAL_SAMPLING = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
# Attention implementations that separate concatenated rows by their positions.
VARLEN_ATTENTION = ("flash_attention_2", "flash_attention_3", "sdpa")
# Options of accelerate that distribute batches differently from TRL's sampler -> why that fails.
# The sampler needs rows that are whole groups in the order of the ranks.
_DISTRIBUTION_FAULTS = {
    "split_batches": "each rank would get a part of its own rows, and would sample the same prompts again",
    "dispatch_batches": "accelerate sends only tensors to the other ranks, and prompts are strings",
}


class Rule(NamedTuple):
    """Reject a recipe at ``key`` if ``broken`` returns true, or once for each ``{item}`` if it returns a list.

    ``key`` may contain ``{item}``. The message and the fix may also contain values of the recipe, as ``{its_key}``, and
    ``{removal}``, the edit that removes the key. Instead of a string, they may be a function (recipe, item).
    """

    key: str
    broken: Condition
    message: Text
    fix: Text


class Idle(NamedTuple):
    """Keys that do nothing without another key. They get a note, because people set them in many recipes at once."""

    keys: str  # names separated by spaces, * for any ending
    is_idle: Condition  # whether the keys do nothing in a recipe
    requirement: str  # the setting that the recipe lacks, for the note


COLOCATED = "vllm_mode: colocate"


def starts_server(recipe: Recipe) -> bool:
    """Return whether a recipe needs its own vLLM server. With one GPU, the plan may still run vLLM in the trainer."""
    return recipe.server.use_vllm and recipe.server.mode != "colocate" and not uses_external_server(recipe)


def uses_external_server(recipe: Recipe) -> bool:
    """Return whether a recipe gets completions from an external server."""
    return recipe.server.use_vllm and recipe.server.base_url is not None


def reports_to(recipe: Recipe) -> list[str]:
    """Return the names in ``report_to`` as a list, [] if it is not set."""
    names = recipe.run.report_to or []
    return [names] if isinstance(names, str) else names


def evaluation_set(recipe: Recipe) -> str | None:
    """Return ``eval_dataset_name`` if the recipe evaluates and sets it, else None."""
    return recipe.evaluation.dataset_name if evaluates(recipe) else None


def set_by_user(recipe: Recipe, names: str, any_value: bool = True) -> list[str]:
    """Return the keys in ``names`` that the user set, except keys with an invalid value.

    ``names`` are separated by spaces, and * stands for any ending. Without ``any_value``, keys with the value false,
    null or no are omitted.
    """
    keys = [key for key in matching_keys(names) if recipe.is_set(key) and key not in recipe.broken]
    return [key for key in keys if any_value or recipe[key] not in (False, None, "no")]


def removal(recipe: Recipe, key: str) -> str:
    """Return the edit that removes a key from the recipe, the flags or the variables."""
    source = recipe.source(key)
    if source in environment_keys():
        return f"unset {source}"
    overridden = any(value.from_flag for value in recipe.values.values())
    return f"remove {key} (flag: --unset {key})" if overridden and not recipe.values[key].from_flag else f"remove {key}"


def unsupported_keys() -> set[str]:
    """Return TRL's keys that are not supported with any value except the default."""
    return set(matching_keys(" ".join(_UNSUPPORTED)))


def _explain_unsupported(key: str) -> tuple[str, str]:
    """Return why an unsupported key is rejected, and the fix; the key must be one of ``unsupported_keys``."""
    return next(entry for names, entry in _UNSUPPORTED.items() if key in matching_keys(names))


@functools.cache
def matching_keys(names: str) -> tuple[str, ...]:
    """Return the keys of the catalog that match one of ``names``; names are separated by spaces, * is any text."""
    patterns = [name for name in names.split() if "*" in name]
    keys = set(names.split())
    return tuple(key for key in catalogue() if key in keys or any(fnmatchcase(key, name) for name in patterns))


def is_url(text: str) -> bool:
    """Return whether a string is an http or https URL of a server, with a valid port if it has one."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def evaluates(recipe: Recipe) -> bool:
    """Return whether a recipe evaluates during training: ``eval_strategy`` is not "no"."""
    return recipe.evaluation.strategy != "no"


def isolates_rewards(recipe: Recipe) -> bool:
    """Return whether one of the user's own rewards runs in child processes."""
    return recipe.rewards.isolation == "completion" and any(":" in name for name in recipe.rewards.funcs)


def chosen_sources(recipe: Recipe) -> list[str]:
    """Return, for each prompt source that a recipe selects, the key that selects it; several are a problem."""
    sources = [source for source in parts("prompt_source") if source.requested(recipe)]
    return [next(key for key in source.keys if recipe.is_set(key)) for source in sources]


def _list_rewards(recipe: Recipe, condition: Callable[[Reward], Any]) -> list[str]:
    """Return the names of a recipe's registered rewards that meet ``condition``."""
    known = rewards()
    return [name for name in recipe.rewards.funcs if name in known and condition(known[name])]


def _is_generated(recipe: Recipe) -> bool:
    """Return whether the training data is generated from keys of the recipe."""
    data = generated(recipe.data.name)
    return data is not None and not data.in_files


def _suggest_callback(name: str) -> str:
    """Return "; " and the fix for a tracker that transformers supports with a callback; "" for other trackers."""
    if name not in TRACKER_CALLBACKS:
        return ""
    callback, (package, _) = TRACKER_CALLBACKS[name]
    return f"; for {name}, pip install {package} and add callbacks: [transformers.integrations:{callback}]"


def _find_duplicates(names: list[Any]) -> list[Any]:
    """Return the values that occur more than once in a list, each once."""
    return [name for name in dict.fromkeys(names) if names.count(name) > 1]


def _compute_longest_sequence(recipe: Recipe) -> int:
    """Return the tokens of the longest prompt (1 if unlimited) and completion; 0 if completions have no limit."""
    completion = longest_completion(recipe)
    return 0 if completion is None else (recipe.data.max_prompt_length or 1) + completion


def longest_completion(recipe: Recipe) -> int | None:
    """Return the most tokens of a completion in training or evaluation; None if there is no limit."""
    limit, eval_limit = recipe.sampling.max_completion_length, recipe.evaluation.max_completion_length
    return limit if limit is None or eval_limit is None or not evaluates(recipe) else max(limit, eval_limit)


def _round_to_groups(recipe: Recipe) -> int:
    """Return ``generation_batch_size`` reduced to whole groups, at least one group."""
    group = recipe.batch.num_generations
    return max(1, (recipe.batch.generation_batch_size or 0) // group) * group


def _find_repeated_ports(recipe: Recipe) -> dict[str, str]:
    """Return each key that repeats the port of an earlier key -> the earlier key."""
    first: dict[int, str] = {}
    ports = (key for key in (*_PORTS, *merged("ports")) if set_by_user(recipe, key, any_value=False))
    return {key: earlier for key in ports if (earlier := first.setdefault(recipe[key], key)) != key}


def _is_multiple(steps: float, unit: float) -> bool:
    """Return whether transformers accepts ``save_steps`` as a multiple of ``eval_steps``: both are steps or fractions.

    Fractions of all steps are below 1.
    """
    scale = 1_000_000 if unit < 1 else 1  # as in transformers, because of rounding
    return (steps < 1) == (unit < 1) and (steps * scale) % (unit * scale) == 0


def _round_up(steps: float, unit: float) -> float:
    """Return the least multiple of ``unit`` that is not below ``steps``, or ``unit`` if only one is a fraction."""
    return unit * math.ceil(steps / unit) if (steps < 1) == (unit < 1) else unit


# fmt: off
_MOST_COMPLETIONS = 10_000_000  # per step; the largest runs have about 100,000
RULES = (
    Rule("num_generations", lambda r: (r.batch.prompts_per_step or 0) * r.batch.num_generations > _MOST_COMPLETIONS,
        "prompts_per_step {prompts_per_step} x num_generations {num_generations} is more than "
        f"{_MOST_COMPLETIONS:,} completions",
        "set num_generations: 8 and prompts_per_step: 128, or another smaller batch"),
    Rule("model_name_or_path", lambda r: not r.model.name,
        "no model is set", "add model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct"),
    Rule("run_name", lambda r: r.run.name is not None
        and not (_RUN_NAME.fullmatch(r.run.name) and len(r.run.name.encode()) <= _LONGEST_NAME),
        f"run_name '{{run_name:.{_LONGEST_NAME}}}' can't be the name of a folder",
        f"begin with a letter or digit, without '/' or line ends, at most {_LONGEST_NAME} bytes"),
    Rule("report_to", lambda r: [name for name in reports_to(r) if name not in REPORTERS],
        "report_to: '{item}' is not supported",
        lambda _, name: f"set report_to to one of {', '.join(REPORTERS)}{_suggest_callback(name)}"),
    Rule("{item}", lambda r: [key for key in PACKAGE_KEYS if missing_package(key, r[key])],
        lambda r, key: f"{key} {r[key]} needs the package {missing_package(key, r[key])}, which is not installed",
        lambda r, key: f"{removal(r, key)}, or pip install {shell_quote(str(missing_package(key, r[key])))} into this "
        "environment"),
    Rule("{item}", lambda r: list(_find_repeated_ports(r)),
        lambda r, key: f"{key} and {_find_repeated_ports(r)[key]} are both {r[key]}",
        "use a different port for each, or remove them"),
    # Rewards.
    Rule("reward_funcs", lambda r: not r.rewards.funcs, "no reward is set", "add reward_funcs"),
    Rule("reward_funcs", lambda r: _find_duplicates(r.rewards.funcs),
        "reward '{item}' is listed more than once", "list it once, with a weight in reward_weights"),
    Rule("reward_weights",
        lambda r: r.rewards.weights is not None and len(r.rewards.weights) != len(r.rewards.funcs),
        lambda r, _: f"reward_weights: expected {len(r.rewards.funcs)} weights, one per reward, "
        f"got {len(r.rewards.weights or ())}",
        lambda r, _: f"set reward_weights: {[1.0] * len(r.rewards.funcs)}"),
    Rule("reward_weights", lambda r: r.rewards.weights is not None and not any(r.rewards.weights or [1])
        and not r.loss.teacher_model_name_or_path,
        "every reward has weight 0, so all completions score the same",
        lambda r, _: f"remove reward_weights, or set reward_weights: {[1.0] * len(r.rewards.funcs)}"),
    Rule("soft_punish_cache",
        lambda r: r.sampling.max_completion_length is not None
        and (r.rewards.soft_punish_cache or 0) > r.sampling.max_completion_length,
        "soft_punish_cache {soft_punish_cache} exceeds max_completion_length {max_completion_length}, so every "
        "completion would be penalized",
        lambda r, _: f"set soft_punish_cache: {(r.sampling.max_completion_length or 0) // 4}"),
    Rule("reward_funcs", lambda r: list_reward_models(r.rewards.funcs) if requested_sampler(r) else [],
        "reward model '{item}' reads a chat with one answer, and can't be combined with episodes or tools",
        lambda r, item: f"set reward_funcs: [{', '.join(name for name in r.rewards.funcs if name != item)}]"),
    # Generated data.
    Rule("reward_funcs",
        lambda r: not is_misspelled(r.data.name)
        and _list_rewards(r, lambda reward: reward.judges and reward.name != own_reward(r.data.name)),
        lambda _, name: f"reward '{name}' works only with {' and '.join(rewards()[name].judges)}",
        lambda _, name: f"set dataset_name: {rewards()[name].judges[0]}, or remove {name}"),
    Rule("reward_funcs", lambda r: own_reward(r.data.name) and _list_rewards(r, lambda reward: reward.one_answer),
        "reward '{item}' compares with one answer, but problems of {dataset_name} have several",
        lambda r, _: f"set reward_funcs: [{own_reward(r.data.name)}]"),
    Rule("eval_dataset_name",
        lambda r: evaluation_set(r) and not is_misspelled(r.data.name) and not is_misspelled(evaluation_set(r))
        and own_reward(evaluation_set(r)) != own_reward(r.data.name),
        lambda r, _: f"the rewards of '{r.data.name or 'dataset_mixture'}' can't judge '{evaluation_set(r)}'",
        "evaluate on data of the same kind, or list the other dataset in benchmarks"),
    Rule("dataset_streaming", lambda r: r.data.streaming and (_is_generated(r) or bool(r.data.mixture)),
        "dataset_streaming can't be combined with generated data or with a mixture, whose weights need all rows",
        "remove dataset_streaming"),
    Rule("dataset_streaming", lambda r: r.data.streaming and r.data.max_train_prompts is None
        and not r.data.mixture and not _is_generated(r),
        "dataset_streaming without max_train_prompts would read the whole stream",
        "add max_train_prompts, e.g. max_train_prompts: 10000"),
    # Prompt sources of extensions.
    Rule("{item}", lambda r: chosen_sources(r)[1:],
        lambda r, key: f"{key} and {chosen_sources(r)[0]} can't be combined: each is a source of completions",
        "keep one of them"),
    Rule("reward_funcs", lambda r: SOURCE_REWARD in r.rewards.funcs and not requested_source(r)
        and not starts_from_rows(r.__getitem__),
        f"reward '{SOURCE_REWARD}' comes from an environment, but the recipe has no environment",
        lambda _r, _: f"add {' or '.join(source_keys()) or 'dataset_name and another reward'}"),
    Rule("reward_funcs", lambda r: requested_source(r) and SOURCE_REWARD not in r.rewards.funcs,
        "the environment's reward is missing in reward_funcs", f"set reward_funcs: [{SOURCE_REWARD}]"),
    # Sampling.
    Rule("vllm_max_model_length", lambda r: r.server.use_vllm and r.server.max_model_length is not None
        and _compute_longest_sequence(r) > r.server.max_model_length,
        lambda r, _: f"prompt {r.data.max_prompt_length or 1} + completion {longest_completion(r)} tokens exceed "
        f"vllm_max_model_length {r.server.max_model_length}",
        lambda r, _: f"set vllm_max_model_length: {_compute_longest_sequence(r)}, or lower max_prompt_length"),
    Rule("{item}", lambda r: [key for key, neutral in NEUTRAL_SAMPLING.items() if key not in r.broken
        and (r[key] or 0) != neutral and r.server.use_vllm and r.sampling.importance_sampling_correction],
        lambda r, key: f"{key} {r[key]} biases the importance-sampling correction (the trainer scores the full "
        "distribution)",
        lambda _, key: f"set {key}: {NEUTRAL_SAMPLING[key]}, or vllm_importance_sampling_correction: false"),
    Rule("vllm_data_parallel_size", lambda r: r.server.data_parallel_size is None and r.server.gpu == "shared",
        "vllm_gpu: shared and vllm_data_parallel_size: auto can't be combined: a replica needs its own GPU",
        "remove vllm_gpu, or remove vllm_data_parallel_size"),
    Rule("vllm_data_parallel_size_local", lambda r: r.server.data_parallel_size_local is not None
        and r.server.data_parallel_size is None,
        "vllm_data_parallel_size_local and vllm_data_parallel_size: auto can't be combined: auto uses one node",
        "{removal}"),
    Rule("vllm_data_parallel_size_local",
        lambda r: r.server.data_parallel_size and r.server.replicas % (r.server.data_parallel_size_local or 1),
        "vllm_data_parallel_size {vllm_data_parallel_size} is not a multiple of vllm_data_parallel_size_local "
        "{vllm_data_parallel_size_local}",
        lambda r, _: "set vllm_data_parallel_size_local: "
        f"{math.gcd(r.server.replicas, r.server.data_parallel_size_local or 1)}"),
    Rule("vllm_importance_sampling_clip_max", lambda r: r.server.use_vllm and r.sampling.importance_sampling_correction
        and r.sampling.importance_sampling_clip_max is not None and r.sampling.importance_sampling_clip_max <= 0,
        "vllm_importance_sampling_clip_max {vllm_importance_sampling_clip_max:g} multiplies every gradient by 0",
        "set vllm_importance_sampling_clip_max: 3.0, or remove it"),
    Rule("chat_template", lambda r: r.model.chat_template is not None and "messages" not in r.model.chat_template,
        "chat_template does not use messages", "write the template itself: chat_template: |"),
    Rule("{item}",
        lambda r: r.server.mode == "colocate" and set_by_user(r, "weight_sync weight_sync_timeout vllm_args", False),
        "{item} does nothing with vllm_mode: colocate (vLLM shares the trainer's process)", "remove {item}"),
    Rule("weight_sync", lambda r: uses_external_server(r) and set_by_user(r, "weight_sync"),
        "weight_sync can't be combined with vllm_server_base_url: an external server always gets weights as files",
        "{removal}"),
    Rule("{item}", lambda r: uses_external_server(r)
        and set_by_user(r, "vllm_structured_outputs_regex generation_kwargs", False),
        "{item} is not sent to the server of vllm_server_base_url", "{removal}"),
    Rule("vllm_server_base_url", lambda r: uses_external_server(r) and not is_url(r.server.base_url or ""),
        "vllm_server_base_url: expected an http or https URL, got '{vllm_server_base_url}'",
        "set vllm_server_base_url to an address, e.g. http://127.0.0.1:30000"),
    Rule("vllm_server_base_url", lambda r: uses_external_server(r) and r.server.mode == "colocate",
        "vllm_server_base_url can't be combined with vllm_mode: colocate", "{removal}"),
    Rule("max_completion_length", lambda r: uses_external_server(r) and r.sampling.max_completion_length is None,
        "the server of vllm_server_base_url needs a limit", "set max_completion_length, e.g. 256"),
    # The batch, and the length of the run.
    Rule("{item}", lambda r: r.batch.prompts_per_step is not None
        and set_by_user(r, "gradient_accumulation_steps steps_per_generation generation_batch_size"),
        "{item} and prompts_per_step can't be combined: {item} is derived from prompts_per_step",
        "remove {item} (or prompts_per_step)"),
    Rule("steps_per_generation",
        lambda r: r.batch.steps_per_generation is not None and r.batch.generation_batch_size is not None,
        "generation_batch_size and steps_per_generation can't be combined",
        "remove generation_batch_size, or remove steps_per_generation"),
    Rule("generation_batch_size",
        lambda r: r.batch.steps_per_generation is None
        and (r.batch.generation_batch_size or 0) % r.batch.num_generations,
        "generation_batch_size {generation_batch_size} must be a multiple of num_generations {num_generations}",
        lambda r, _: f"set generation_batch_size: {_round_to_groups(r)}"),
    Rule("padding_free", lambda r: r.batch.padding_free and not r.batch.trim_padding,
        "padding_free and trim_padding: false can't be combined",
        "remove trim_padding, or remove padding_free"),
    Rule("padding_free", lambda r: r.batch.padding_free and r.batch.trim_padding
        and r.model.attn_implementation not in VARLEN_ATTENTION,
        lambda r, _: "padding_free needs an attention that separates rows by their positions, but "
        f"attn_implementation is {r.model.attn_implementation or 'not set'}",
        "set attn_implementation: sdpa (slower than padding), or flash_attention_2 (needs flash-attn)"),
    Rule("accelerator_config",
        lambda r: [name for name in _DISTRIBUTION_FAULTS if (r.processes.accelerator_config or {}).get(name)],
        lambda _, name: f"{name}: true is not supported: {_DISTRIBUTION_FAULTS[name]}",
        "remove {item} from accelerator_config"),
    Rule("max_steps", lambda r: r.batch.max_steps == 0 or r.batch.max_steps < -1,
        "max_steps: expected at least 1, or -1, got {max_steps}",
        "set max_steps to 1 or more, or to -1 to train for num_train_epochs"),
    Rule("num_train_epochs", lambda r: r.batch.max_steps == -1 and r.batch.num_train_epochs <= 0,
        "num_train_epochs {num_train_epochs:g} trains nothing", "set num_train_epochs: 1"),
    Rule("save_steps", lambda r: r.run.save_strategy == "steps" and r.run.save_steps > 1 and r.run.save_steps % 1,
        "save_steps: expected an integer, or a fraction below 1, got {save_steps:g}",
        lambda r, _: f"set save_steps: {round(r.run.save_steps)}"),
    Rule("epsilon_high", lambda r: r.loss.epsilon_high is not None and r.loss.epsilon_high < r.loss.epsilon,
        "epsilon_high {epsilon_high} is below epsilon {epsilon}", "set epsilon_high to {epsilon} or more, e.g. 0.28"),
    Rule("{item}", lambda r: set_by_user(r, " ".join(_UNSUPPORTED), any_value=False),
        lambda _, key: f"{key} is not supported: {_explain_unsupported(key)[0]}",
        lambda _, key: _explain_unsupported(key)[1]),
    # Precision and learning rate.
    Rule("learning_rate", lambda r: r.optimizer.learning_rate == 0,
        "learning_rate is 0, so no weight changes", "set learning_rate to more than 0, e.g. 1e-6"),
    Rule("learning_rate", lambda r: r.optimizer.learning_rate >= 1 and r.optimizer.optim not in GRADIENT_OPTIMIZERS,
        "learning_rate {learning_rate:g} is too large: the first step of {optim} moves every weight by about as much",
        "set learning_rate to less than 1, e.g. 1e-6"),
    Rule("warmup_steps", lambda r: reached_fraction(r) < MIN_FRACTION,
        lambda r, _: f"warmup_steps {r.optimizer.warmup_steps:g} with max_steps {r.batch.max_steps}: no step uses more "
        f"than {reached_fraction(r):.1%} of learning_rate", "set warmup_steps: 0, or raise max_steps"),
    Rule("fp16", lambda r: r.processes.bf16 and r.processes.fp16,
        "bf16 and fp16 can't be combined", "keep one of them"),
    Rule("dtype", lambda r: r.processes.fp16 and not r.processes.bf16 and r.model.dtype == "float16",
        "fp16: true needs float32 weights, but dtype is float16",
        "set dtype: float32, or bf16: true and dtype: bfloat16"),
    # Datasets.
    Rule("dataset_name",
        lambda r: not r.data.name and r.data.mixture is None and not requested_source(r),
        "no dataset is set", "add dataset_name: a hub id or a .jsonl file"),
    Rule("dataset_mixture", lambda r: bool(r.data.name and r.data.mixture),
        "dataset_mixture and dataset_name can't be combined", "keep one of them"),
    # Evaluation, benchmarks and publishing.
    Rule("{item}", lambda r: not evaluates(r)
        and set_by_user(r, _OF_EVALUATION, any_value=False),
        "{item} does nothing without eval_strategy", "{removal}, or add eval_strategy: steps"),
    Rule("eval_strategy", lambda r: r.evaluation.strategy == "steps" and not r.evaluation.steps,
        "eval_strategy: steps without eval_steps evaluates after every optimizer step",
        "add eval_steps, e.g. eval_steps: 50"),
    Rule("eval_steps",
        lambda r: r.evaluation.strategy == "steps" and (steps := r.evaluation.steps or 0) > 1 and steps % 1,
        "eval_steps: expected an integer, or a fraction below 1, got {eval_steps:g}",
        lambda r, _: f"set eval_steps: {round(r.evaluation.steps or 0)}"),
    Rule("save_strategy", lambda r: r.evaluation.load_best_model_at_end and evaluates(r)
        and r.run.save_strategy != r.evaluation.strategy,
        "load_best_model_at_end needs save_strategy {eval_strategy}, the value of eval_strategy, got {save_strategy}",
        "set save_strategy: {eval_strategy}, or remove load_best_model_at_end"),
    Rule("save_steps", lambda r: r.evaluation.load_best_model_at_end
        and r.evaluation.strategy == r.run.save_strategy == "steps"
        and r.evaluation.steps and not _is_multiple(r.run.save_steps, r.evaluation.steps),
        "load_best_model_at_end needs save_steps to be a multiple of eval_steps {eval_steps:g}, got {save_steps:g}",
        lambda r, _: f"set save_steps: {_round_up(r.run.save_steps, r.evaluation.steps or 1):g}"),
    Rule("dataset_mixture", lambda r: evaluates(r) and not r.evaluation.dataset_name and r.data.mixture
        and not r.data.mixture.get("test_split_size"),
        "the mixture has no evaluation data", "add test_split_size to it, or set eval_dataset_name"),
    Rule("lr_scheduler_type",
        lambda r: evaluates(r) and r.optimizer.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"),
        "lr_scheduler_type {lr_scheduler_type} follows eval_loss, which is always near zero in GRPO",
        "set lr_scheduler_type: cosine"),
    Rule("use_transformers_continuous_batching",
        lambda r: evaluates(r) and r.sampling.use_transformers_continuous_batching,
        "use_transformers_continuous_batching switches the model to training mode during an evaluation",
        "remove it, or set eval_strategy: 'no'"),
    Rule("eval_temperature", lambda r: evaluates(r) and r.evaluation.temperature == 0
        and (r.evaluation.num_generations_eval or r.batch.num_generations) > 1,
        "eval_temperature 0 makes all completions of a prompt equal",
        "set num_generations_eval: 1, or eval_temperature above 0"),
    Rule("benchmarks", lambda r: _find_duplicates(r.evaluation.benchmarks), "'{item}' is listed twice",
        "keep one of them"),
    Rule("benchmark_samples", lambda r: r.evaluation.benchmark_temperature == 0 and r.evaluation.benchmark_samples > 1,
        "benchmark_temperature 0 makes all benchmark_samples {benchmark_samples} of a problem equal",
        "set benchmark_samples: 1, or benchmark_temperature above 0, e.g. 0.6"),
    Rule("push_to_hub", lambda r: r.run.push_to_hub and not is_served("push_to_hub"),
        "push_to_hub needs the console, but it is not installed",
        "remove push_to_hub, and push the model after the run: hf upload"),
    Rule("hub_model_id", lambda r: r.run.push_to_hub and r.run.hub_model_id is not None
        and not _REPOSITORY.fullmatch(r.run.hub_model_id),
        "hub_model_id: expected the name of a repository, got '{hub_model_id}'",
        "write user/name: letters, digits, '-', '_' and '.', at most 96 each, without '--' and '..'"),
    Rule("hub_revision", lambda r: r.run.push_to_hub and r.run.hub_revision is not None
        and not _BRANCH.fullmatch(r.run.hub_revision),
        "hub_revision: expected the name of a branch, got '{hub_revision}'",
        "set hub_revision to a branch, or remove it"),
    # LoRA.
    Rule("{item}", lambda r: not r.lora.use_peft and set_by_user(r, "lora_* use_dora use_rslora", any_value=False),
        "{item} does nothing without use_peft", "add use_peft: true, or remove {item}"),
    Rule("accelerator", lambda r: r.lora.use_peft and r.processes.accelerator in NOT_WITH_LORA,
        "LoRA with accelerator: {accelerator} has not been shown to work", "set accelerator: ddp or zero2"),
    Rule("ref_model_name_or_path", lambda r: r.lora.use_peft and r.loss.ref_model_name_or_path,
        "ref_model_name_or_path and use_peft can't be combined: the reference of a LoRA run is its base model",
        "remove ref_model_name_or_path, or use_peft"),
    Rule("ref_model_name_or_path", lambda r: r.model.revision != "main" and r.loss.ref_model_name_or_path,
        "model_revision would also apply to the reference", "use local folders for both, or remove model_revision"),
    Rule("sync_ref_model", lambda r: r.lora.use_peft and r.loss.sync_ref_model,
        "sync_ref_model and use_peft can't be combined: the reference of a LoRA run is its base model",
        "remove sync_ref_model, or use_peft"),
    Rule("lora_dropout", lambda r: r.lora.use_peft and r.optimizer.disable_dropout and r.lora.dropout > 0,
        "disable_dropout turns lora_dropout {lora_dropout:g} off", "keep one of the two"),
    Rule("cast_lm_head_to_fp32", lambda r: r.lora.use_peft and r.processes.cast_lm_head_to_fp32,
        "cast_lm_head_to_fp32 and use_peft can't be combined: weight sync does not find the output layer",
        "remove cast_lm_head_to_fp32, or use_peft"),
    Rule("lora_target_parameters", lambda r: r.lora.use_peft and bool(r.lora.target_parameters),
        "adapters on parameters that are not layers (experts) have not been shown to reach the server",
        "use lora_target_modules"),
    Rule("lora_target_modules", lambda r: r.lora.use_peft and r.lora.target_modules == [],
        "lora_target_modules is empty", "set lora_target_modules: [all-linear], or list layers"),
    Rule("lora_target_modules", lambda r: r.lora.use_peft and "all-linear" in (layers := r.lora.target_modules or ())
        and len(layers) > 1, "all-linear and other lora_target_modules can't be combined",
        "set lora_target_modules: [all-linear], or list layers"),
    # Whether the model has the other layers is checked on loading.
    Rule("lora_target_modules", lambda r: r.lora.use_peft
        and [name for name in r.lora.target_modules or () if name.rpartition(".")[2] in EMBEDDINGS],
        "an adapter on '{item}' is not supported: log-probs are computed from the layer's own weights",
        "set lora_target_modules: [all-linear], or list linear layers such as q_proj"),
    Rule("{item}", lambda r: r.lora.use_peft and r.server.weight_sync == "lora"
        and set_by_user(r, "use_dora lora_modules_to_save", any_value=False),
        "weight_sync: lora can't be combined with {item}: vLLM serves only plain adapters",
        "remove {item}, or set weight_sync: file (the merged model)"),
    Rule("lora_r", lambda r: r.lora.use_peft and r.server.weight_sync == "lora" and r.lora.r > LORA_RANKS[-1],
        f"lora_r {{lora_r}} exceeds {LORA_RANKS[-1]}, the largest rank that vLLM serves",
        f"set lora_r: {LORA_RANKS[-1]}, or weight_sync: file"),
)

# fmt: on
