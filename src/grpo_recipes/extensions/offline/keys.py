"""The Hydra keys of an offline trainer, which become flags of recipe keys. Pure: no Hydra, no torch.

An iteration samples ``problems_per_iteration`` times ``rollouts_per_problem`` completions, and takes an optimizer step
for every ``batch_size`` times ``grad_accum_steps`` of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from grpo_recipes.errors import Problem
from grpo_recipes.recipe.registry import SERVER_BACKENDS
from grpo_recipes.recipe.rules import is_url

# Generator of problems -> the reward that judges its answers.
GENERATORS = {
    "arithmetic": "pure_accuracy_math", "sums": "pure_accuracy_math", "sat": "satisfiability",
    "countdown": "modebench", "graph_coloring": "modebench",
}  # fmt: skip
VLLM, _ = SERVER_BACKENDS
_LOCAL = ("localhost", "127.0.0.1")
_BOOL = {True: "true", False: "false"}

# Hydra key -> recipe key, where the value stays what it is.
SAME = {
    "model.train_id": "model_name_or_path",
    "generation.batch_size": "max_concurrent_requests",
    "generation.max_new_tokens": "max_completion_length",
    "generation.temperature": "temperature",
    "generation.top_p": "top_p",
    "generation.top_k": "top_k",
    "generation.repetition_penalty": "repetition_penalty",
    "train.batch_size": "per_device_train_batch_size",
    "train.lr": "learning_rate",
    "train.grad_clip": "max_grad_norm",
    "train.kl_coef": "beta",
    "train.entropy_coef": "entropy_coef",
    "train.grad_accum_steps": "gradient_accumulation_steps",
    "data.rollouts_per_problem": "num_generations",
    "data.train_seed_start": "problem_seed_start",
    "data.num_train_seeds": "problem_seeds",
    "checkpoint.keep_last_k": "save_total_limit",
    "seed": "seed",
}
# The same of evaluations, which are left out where there are none.
OF_EVALUATIONS = {
    "eval.batch_size": "per_device_eval_batch_size",
    "eval.replicates": "num_generations_eval",
    "eval.num_ids": "eval_problem_seeds",
    "eval.id_seed_start": "eval_problem_seed_start",
    "eval.seed_base": "eval_sampling_seed",
    "eval.max_new_tokens": "eval_max_completion_length",
    "eval.temperature": "eval_temperature",
    "eval.top_p": "eval_top_p",
}
COUNTS = (
    "train.iterations", "train.batch_size", "train.grad_accum_steps", "data.problems_per_iteration",
    "data.rollouts_per_problem", "eval.interval", "checkpoint.save_interval",
)  # fmt: skip
OTHERS = (
    "model.ref_id", "model.device", "generation.backend", "generation.base_url", "data.problems", "eval.enabled",
    "eval.backend", "eval.base_url", "eval.do_sample", "eval.ids", "logging.wandb.enabled", "logging.wandb.project",
    "logging.wandb.run_name",
)  # fmt: skip
LISTS = ("eval.ids",)  # whose value is a list, in a sweep too
_SWITCHES = ("eval.enabled", "eval.do_sample", "logging.wandb.enabled")
KEYS = (*SAME, *OF_EVALUATIONS, *(key for key in COUNTS if key not in SAME), *OTHERS)


@dataclass
class Translated:
    """The recipe flags that Hydra keys come to, and what is wrong with them."""

    keys: dict[str, str | list[str]] = field(default_factory=dict)  # recipe key -> text, or those of a list
    sources: dict[str, str] = field(default_factory=dict)  # recipe key -> Hydra key
    device: str = "auto"  # of the training
    problems: list[Problem] = field(default_factory=list)

    def flags(self) -> list[str]:
        """Return the flags of recipe keys."""
        words: list[str] = []
        for key, text in self.keys.items():
            words += [f"--{key}={text}"] if isinstance(text, str) else [f"--{key}", *text]
        return words


def translate(config: Mapping[str, Any], answers: Callable[[str], bool]) -> Translated:
    """Return what a configuration, composed and flat, comes to.

    ``config`` has every key of ``KEYS``; ``answers`` says whether a server answers at an address.
    """
    found = Translated()

    def put(source: str, key: str, value: Any) -> None:
        found.keys[key] = [_text(one) for one in value] if isinstance(value, list) else _text(value)
        found.sources[key] = source

    def refuse(source: str, what: str, fix: str) -> None:
        found.problems.append(Problem(source, what, fix))

    for source in _SWITCHES:
        if not isinstance(config[source], bool):
            refuse(source, f"is {config[source]!r} where true or false belongs", f"write {source}=true or false")
    if found.problems:
        return found
    for source, key in SAME.items():
        put(source, key, config[source])
    counts = {source: _count(source, config[source], refuse) for source in COUNTS}
    if None not in counts.values():
        _batch({source: number for source, number in counts.items() if number is not None}, config, put, refuse)
    if config["model.ref_id"] != config["model.train_id"]:
        put("model.ref_id", "ref_model_name_or_path", config["model.ref_id"])
    found.device = str(config["model.device"])
    if config["data.problems"] in GENERATORS:
        put("data.problems", "dataset_name", f"seeded:{config['data.problems']}")
        put("data.problems", "reward_funcs", GENERATORS[config["data.problems"]])
    else:
        refuse("data.problems", f"'{config['data.problems']}' is unknown", f"write one of {', '.join(GENERATORS)}")
    _server(config, put, refuse, answers)
    if config["eval.enabled"]:
        _evaluation(config, put, refuse)
    if config["logging.wandb.enabled"]:
        put("logging.wandb.enabled", "report_to", "wandb")
        put("logging.wandb.project", "wandb_project", config["logging.wandb.project"])
    else:
        put("logging.wandb.enabled", "report_to", "none")
    put("logging.wandb.run_name", "run_name", config["logging.wandb.run_name"] or "offline")
    return found


def _batch(
    counts: Mapping[str, int], config: Mapping[str, Any], put: Callable[..., None], refuse: Callable[..., None]
) -> None:
    """Put the steps of an iteration, and what is counted in them."""
    completions = counts["data.problems_per_iteration"] * counts["data.rollouts_per_problem"]
    size, accumulated = counts["train.batch_size"], counts["train.grad_accum_steps"]
    if completions % (size * accumulated):
        fits = ", ".join(str(number) for number in range(1, completions + 1) if completions % number == 0)
        what = f"an iteration has {completions} completions, which steps of {size} x {accumulated} do not divide"
        return refuse("train.batch_size", what, f"choose batch_size times grad_accum_steps among {fits}")
    steps = steps_of_iteration(config)
    put("data.problems_per_iteration", "steps_per_generation", completions // size)
    put("train.iterations", "max_steps", counts["train.iterations"] * steps)
    put("checkpoint.save_interval", "save_steps", counts["checkpoint.save_interval"] * steps)
    put("eval.enabled", "eval_strategy", "steps" if config["eval.enabled"] else "no")
    if config["eval.enabled"]:
        put("eval.interval", "eval_steps", counts["eval.interval"] * steps)
    return None


def steps_of_iteration(config: Mapping[str, Any]) -> int:
    """Return the optimizer steps of an iteration."""
    completions = int(config["data.problems_per_iteration"]) * int(config["data.rollouts_per_problem"])
    return completions // (int(config["train.batch_size"]) * int(config["train.grad_accum_steps"]))


def _evaluation(config: Mapping[str, Any], put: Callable[..., None], refuse: Callable[..., None]) -> None:
    """Put how evaluations sample, and on what."""
    ids = config["eval.ids"] or []
    if not isinstance(ids, list) or not all(type(one) is int for one in ids):
        return refuse(
            "eval.ids", f"is {ids!r} where a list of whole numbers belongs", "write e.g. eval.ids=[5000,5001]"
        )
    of_ids = ("eval.num_ids", "eval.id_seed_start")
    for source, key in OF_EVALUATIONS.items():
        if not (ids and source in of_ids):
            put(source, key, config[source])
    if ids:
        put("eval.ids", "eval_problem_ids", ids)
    if not config["eval.do_sample"]:
        put("eval.do_sample", "eval_temperature", 0)
        if (count := config["eval.replicates"]) != 1:
            what = f"greedy completions of a problem are all the same, and eval.replicates is {count}"
            refuse("eval.do_sample", what, "write eval.replicates=1")
    return None


def _server(
    config: Mapping[str, Any], put: Callable[..., None], refuse: Callable[..., None], answers: Callable[[str], bool]
) -> None:
    """Put where the server is; one server samples for the training and its evaluations, with the current weights.

    On this machine the launch starts a vLLM where nothing answers yet.
    """
    backend, url = config["generation.backend"], str(config["generation.base_url"])
    if backend not in SERVER_BACKENDS:
        refuse("generation.backend", f"'{backend}' is unknown", f"write one of {', '.join(SERVER_BACKENDS)}")
    elif not is_url(url):
        refuse("generation.base_url", f"'{url}' is not an address", "write e.g. http://127.0.0.1:30000")
    elif backend == VLLM and urlsplit(url).hostname in _LOCAL and not answers(url):
        if port := urlsplit(url).port:
            put("generation.base_url", "vllm_server_port", port)
    else:
        put("generation.base_url", "vllm_server_base_url", url)
        put("generation.backend", "server_backend", backend)
    for name in ("backend", "base_url"):
        if config["eval.enabled"] and config[f"eval.{name}"] != config[f"generation.{name}"]:
            what = "another server than the training's would have the weights of the beginning"
            fix = f"leave it out: evaluations ask the server of generation.{name}"
            refuse(f"eval.{name}", what, fix)


def _count(source: str, value: Any, refuse: Callable[..., None]) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        refuse(source, f"is {value!r} where a whole number of 1 or more belongs", f"write e.g. {source}=4")
        return None
    return value


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return _BOOL[value]
    return "null" if value is None else str(value)
