"""Check the dictionaries that a recipe passes on to other libraries: their names, kinds of values, and who owns a name.

``keys.json`` lists the names that each library reads (``scripts/make_keys.py`` asks the libraries). A name that the
recipe or the launcher sets is rejected with the key to use, any other unknown name with the nearest known one. Two
dictionaries have no fixed names: ``chat_template_kwargs``, whose names the model's chat template reads, and the
arguments of the user's own environment classes.
"""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import yaml

from grpo_recipes.errors import Problem
from grpo_recipes.recipe import BrokenKey, Recipe
from grpo_recipes.recipe.chat_template import templates_of, variables_of
from grpo_recipes.recipe.document import Entry, Value, convert_value
from grpo_recipes.recipe.keys import expand_names, nearest_of, passed_catalogue
from grpo_recipes.recipe.rules import NEUTRAL_SAMPLING
from grpo_recipes.recipe.vllm_flags import KEY as VLLM_ARGS
from grpo_recipes.recipe.vllm_flags import OWNED_FLAGS

# Names inside a dictionary that the recipe must not set -> the recipe key that sets them, or the reason.
_SAMPLING = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
_MESSAGES = "the trainer sets it for every prompt"
OWNED_NAMES: dict[str, dict[str, str]] = {
    "generation_kwargs": {
        **_SAMPLING,
        **expand_names(
            ("max_tokens max_new_tokens max_length", "max_completion_length"),
            ("n num_return_sequences", "num_generations"),
            ("seed", "seed"),
            ("use_cache cache_implementation", "cache_implementation"),
            ("guided_regex guided_decoding_regex regex", "vllm_structured_outputs_regex"),
            ("do_sample", "the trainer always samples"),
            ("pad_token_id bos_token_id eos_token_id", "the tokenizer sets it"),
            ("stop_strings", "transformers needs the tokenizer for it; use_vllm: true accepts stop"),
            (
                "logprobs prompt_logprobs logprob_token_ids flat_logprobs skip_special_tokens detokenize output_kind "
                "stream stream_interval priority output_attentions output_hidden_states output_scores output_logits "
                "return_dict_in_generate disable_compile compile_config is_assistant routed_experts_prompt_start",
                "the trainer sets it to read the completions",
            ),
        ),
    },
    "model_init_kwargs": {
        **expand_names(
            ("trust_remote_code", "trust_remote_code"),
            ("revision code_revision", "model_revision"),
            ("dtype torch_dtype", "dtype"),
            ("attn_implementation", "attn_implementation"),
            ("device_map max_memory offload_folder offload_buffers", "accelerate places the model"),
            ("tp_plan tp_size device_mesh distributed_config", "the key accelerator splits the model"),
            ("quantization_config load_in_8bit load_in_4bit", "use_peft: true saves memory instead"),
            ("cache_dir", "export HF_HOME instead"),
            ("local_files_only", "export HF_HUB_OFFLINE=1 instead"),
            ("force_download", "grpo fetch downloads the model"),
            ("token", "export HF_TOKEN instead"),
        ),
    },
    "chat_template_kwargs": expand_names(
        ("chat_template", "chat_template"),
        (
            "messages conversation tools documents tokenize add_generation_prompt continue_final_message padding "
            "truncation max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs",
            _MESSAGES,
        ),
    ),
    "lr_scheduler_kwargs": expand_names(
        ("num_warmup_steps", "warmup_steps"),
        ("num_training_steps", "max_steps"),
        ("optimizer last_epoch", "the trainer sets it"),
        ("lr", "learning_rate"),
    ),
    "optim_args": expand_names(
        ("lr learning_rate", "learning_rate"),
        ("betas", "adam_beta1"),
        ("beta1", "adam_beta1"),
        ("beta2", "adam_beta2"),
        ("eps", "adam_epsilon"),
        ("weight_decay", "weight_decay"),
    ),
    "transformers_continuous_batching_config": expand_names(
        ("seed", "seed"),
        ("return_logprobs", "the trainer sets it to read the completions"),
    ),
    "accelerator_config.gradient_accumulation_kwargs": {"num_steps": "gradient_accumulation_steps"},
    VLLM_ARGS: OWNED_FLAGS,
}
# vLLM's names that change the distribution which completions are sampled from, as top_p does.
_CHANGE_DISTRIBUTION = frozenset(
    (
        "presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "bad_words", "min_tokens",
        "structured_outputs", "thinking_token_budget",
    )
)  # fmt: skip
_CORRECTION = "vllm_importance_sampling_correction"
_DICTIONARIES = ("generation_kwargs", "model_init_kwargs", "lr_scheduler_kwargs", "liger_kernel_config",
                 "transformers_continuous_batching_config", VLLM_ARGS)  # fmt: skip
_LONGEST = 60  # characters of a value in a fix
_ONE_OF = {"cosine_with_min_lr": ("min_lr", "min_lr_rate"), "cosine_warmup_with_min_lr": ("min_lr", "min_lr_rate")}


def passed_problems(recipe: Recipe, environment: Mapping[str, str]) -> Iterator[Problem]:
    """Yield the problems inside the dictionaries that a recipe passes on to other libraries.

    Values in the dictionaries are converted in place; a value of a wrong type becomes None.
    """
    for key in _DICTIONARIES:
        with contextlib.suppress(BrokenKey):  # one wrong dictionary does not hide another's problems
            yield from _find_part_problems(recipe, key, recipe[key] or {}, Value(None, recipe.source(key)))
    checks: list[Callable[[Recipe], Iterator[Problem]]] = [
        _check_accumulation,
        _check_optimizer,
        _check_scheduler,
        _check_sampling,
    ]
    checks.append(partial(_check_template, environment=environment))
    for check in checks:
        with contextlib.suppress(BrokenKey):
            yield from check(recipe)


def _check_accumulation(recipe: Recipe) -> Iterator[Problem]:
    """Yield a problem for each argument of accelerate's accumulation plugin that has its own recipe key."""
    key, part = "accelerator_config", "gradient_accumulation_kwargs"
    for name, value in ((recipe[key] or {}).get(part) or {}).items():
        if name in OWNED_NAMES[f"{key}.{part}"]:
            yield owned_name(recipe, f"{key}.{part}", name, value, recipe.location(key, part, name))


def owned_name(recipe: Recipe, key: str, name: str, value: Any, where: str) -> Problem:
    """Return the problem of a name inside ``key`` that a recipe key or the launcher sets, at ``where``.

    The fix is to remove it, and to set the recipe key to ``value`` if there is such a key.
    """
    owner = OWNED_NAMES[key][name]
    if not owner.isidentifier():
        return Problem(where, f"{key}: '{name}' can't be set here: {owner}", f"remove {name} from {key}")
    message = f"{key}: '{name}' would override the key {owner}"
    text = yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n").strip()
    fix = f"remove {name} from {key}"
    if isinstance(value, dict | list | bool) or len(text) > _LONGEST:
        return Problem(where, message, f"{fix}; use {owner}")
    if (
        owner in NEUTRAL_SAMPLING
        and recipe.server.use_vllm
        and value != NEUTRAL_SAMPLING[owner]
        and recipe[_CORRECTION]
    ):
        return Problem(where, message, f"{fix}, or remove it and set {owner}: {text} and {_CORRECTION}: false")
    return Problem(where, message, f"{fix} and set {owner}: {text}")


def known_names(recipe: Recipe, key: str) -> tuple[Mapping[str, Entry], str]:
    """Return the names that the dictionary ``key`` may contain in this recipe, and a text that names their reader.

    The names depend on the sampler, the scheduler or the optimizer of the recipe. An optimizer may have none.
    """
    variants = passed_catalogue()[key]
    if key == "generation_kwargs":
        engine = "vllm" if recipe.server.use_vllm else "transformers"
        return variants[engine], {"vllm": "vLLM", "transformers": "transformers (use_vllm: false)"}[engine]
    if key == "lr_scheduler_kwargs":
        return variants[recipe.optimizer.lr_scheduler_type], f"lr_scheduler_type: {recipe.optimizer.lr_scheduler_type}"
    if key == "optim_args":
        return variants.get(recipe.optimizer.optim, {}), f"optim: {recipe.optimizer.optim}"
    return variants[""], "it"


def _find_part_problems(recipe: Recipe, key: str, parts: dict[str, Any], raw: Value) -> Iterator[Problem]:
    """Yield problems for owned names, unknown names, and values of a wrong kind in a dictionary of the recipe.

    ``parts`` is the dictionary; its values are converted in place. ``raw`` is the value of ``key`` with its source.
    """
    known, reader = known_names(recipe, key)
    if key == "model_init_kwargs" and parts.get("use_kernels") and importlib.util.find_spec("kernels") is None:
        message = f"{key}: use_kernels needs the package kernels, which is not installed"
        fix = f"remove use_kernels from {key}, or pip install kernels into this environment"
        yield Problem(recipe.location(key, "use_kernels"), message, fix)
    for name, part in list(parts.items()):
        where = recipe.location(key, str(name))
        if name in OWNED_NAMES.get(key, {}) and name not in known:
            yield owned_name(recipe, key, name, part, where)
        elif name not in known:
            yield _describe_unknown_name(recipe, key, str(name), where, known, reader)
        else:
            value = Value(part, where, from_text=raw.from_text)
            parts[name], problems = convert_value(f"{key}.{name}", known[name], value)
            yield from problems


def _describe_unknown_name(
    recipe: Recipe, key: str, name: str, where: str, known: Mapping[str, Any], reader: str
) -> Problem:
    """Return the problem of a name that the dictionary ``key`` must not contain; the fix is the nearest known name.

    ``known`` are the names that it may contain, and ``reader`` names the library that reads them. If no name is near,
    the fix is to remove the name.
    """
    if not known:
        return Problem(where, f"{key}: {reader} reads no such arguments, got '{name}'", f"remove {key}")
    is_read_elsewhere = any(name in names for names in passed_catalogue()[key].values())
    close = None if is_read_elsewhere else nearest_of(name, [*known, *OWNED_NAMES.get(key, {})])
    message = f"{key}: unknown name '{name}'" + (f"; {reader} does not read it" if is_read_elsewhere else "")
    if close in OWNED_NAMES.get(key, {}) and close not in known:
        owner = OWNED_NAMES[key][str(close)]
        return Problem(where, message, f"remove {name} from {key}" + (f"; use {owner}" if owner.isidentifier() else ""))
    if key == "model_init_kwargs" and not close:
        fix = f"remove {name} from {key}; change the model's configuration in the config.json of a model folder"
        return Problem(where, f"{message}. The server would not get it", fix)
    fix = f"write '{close}'" if close else f"remove {name} from {key}; the names are {', '.join(known)}"
    return Problem(where, message, fix)


def _check_optimizer(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems in ``optim_args``: it is not ``name=value`` pairs, or has wrong names or values."""
    if not recipe.optimizer.optim_args:
        return
    parts = {}
    for pair in str(recipe.optimizer.optim_args).split(","):
        name, equals, text = (part.strip() for part in pair.partition("="))
        if not (name and equals and text):
            message = f"optim_args: expected name=value pairs separated by commas, got '{pair}'"
            known = known_names(recipe, "optim_args")[0]
            fix = f"set optim_args: {next(iter(known))}=VALUE" if known else "remove optim_args"
            yield recipe.problem("optim_args", message, fix)
            return
        parts[name] = text
    raw = Value(None, recipe.source("optim_args"), from_text=True)
    yield from _find_part_problems(recipe, "optim_args", parts, raw)


def _check_scheduler(recipe: Recipe) -> Iterator[Problem]:
    """Yield a problem for each argument that the scheduler needs, but that ``lr_scheduler_kwargs`` lacks.

    For some schedulers, exactly one of two arguments must be given; none or both are a problem too.
    """
    kind, kwargs = recipe.optimizer.lr_scheduler_type, recipe.optimizer.lr_scheduler_kwargs or {}
    known = passed_catalogue()["lr_scheduler_kwargs"][kind]
    key = "lr_scheduler_kwargs" if kwargs else "lr_scheduler_type"
    for name in (name for name, entry in known.items() if entry.get("required") and name not in kwargs):
        message = f"lr_scheduler_type: {kind} needs {name} in lr_scheduler_kwargs"
        example = max(1, recipe.batch.max_steps // 10) if recipe.batch.max_steps > 0 else 10
        yield recipe.problem(key, message, f"set lr_scheduler_kwargs: {{{name}: {example}}}")
    alternatives = _ONE_OF.get(kind, ())
    if alternatives and len([name for name in alternatives if kwargs.get(name) is not None]) != 1:
        message = f"lr_scheduler_type: {kind} needs {' or '.join(alternatives)} in lr_scheduler_kwargs, and only one"
        yield recipe.problem(key, message, "set lr_scheduler_kwargs: {min_lr_rate: 0.1}")


def _check_sampling(recipe: Recipe) -> Iterator[Problem]:
    """Yield problems for names in ``generation_kwargs`` that make the server sample from another distribution.

    They are allowed without importance-sampling correction. ``structured_outputs`` next to its own key is a problem
    too. Yield nothing without vLLM.
    """
    kwargs, correction = recipe.sampling.generation_kwargs or {}, _CORRECTION
    if not recipe.server.use_vllm:
        return
    for name in (name for name in kwargs if name in _CHANGE_DISTRIBUTION and kwargs[name] and recipe[correction]):
        message = f"generation_kwargs: {name} biases the importance-sampling correction (the trainer scores the full "
        message += "distribution)"
        fix = f"remove {name} from generation_kwargs, or set {correction}: false"
        yield Problem(recipe.location("generation_kwargs", name), message, fix)
    if kwargs.get("structured_outputs") and recipe.sampling.structured_outputs_regex is not None:
        message = "generation_kwargs: structured_outputs and the key vllm_structured_outputs_regex can't be combined"
        fix = "remove structured_outputs from generation_kwargs"
        yield Problem(recipe.location("generation_kwargs", "structured_outputs"), message, fix)


def _check_template(recipe: Recipe, environment: Mapping[str, str]) -> Iterator[Problem]:
    """Yield problems for names in ``chat_template_kwargs`` that the trainer sets or the chat template does not read."""
    key = "chat_template_kwargs"
    kwargs = recipe[key] or {}
    recipe_template = recipe.model.chat_template
    templates = (
        {"default": recipe_template}
        if recipe_template is not None
        else templates_of(recipe, environment)
        if kwargs
        else None
    )
    read = variables_of(templates.values()) if templates else None
    for name, value in kwargs.items():
        where = recipe.location(key, str(name))
        if name in OWNED_NAMES[key]:
            yield owned_name(recipe, key, name, value, where)
        elif read is not None and name not in read:
            names = sorted(read - set(OWNED_NAMES[key]))
            close = nearest_of(str(name), names)
            fix = f"remove {name} from {key}" + (f"; it reads {', '.join(names)}" if names else "")
            message = f"{key}: the chat template does not read '{name}'"
            yield Problem(where, message, f"write '{close}'" if close else fix)
