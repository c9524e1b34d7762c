"""Translate the Hydra keys of the offline trainer (conf/offline_grpo.yaml) to recipe keys, by ``keys.yaml``.

The offline trainer (docs/migrate.md) trains in iterations. An iteration samples ``problems_per_iteration`` x
``rollouts_per_problem`` completions, and makes an optimizer step for every ``batch_size`` x ``grad_accum_steps``
completions. This module imports neither Hydra nor torch, and the caller finds out whether a server answers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from grpo_recipes.errors import Problem
from grpo_recipes.recipe.converters.table import Setting, Settings, read_table, whole_number
from grpo_recipes.recipe.document import Value
from grpo_recipes.recipe.registry import SERVER_BACKENDS
from grpo_recipes.recipe.rules import is_url

TABLE = read_table(Path(__file__).with_suffix(".yaml"), "settings", __name__)
KEYS = tuple(TABLE.by_name)
# Hydra key -> recipe key with the same value. Sweeps can vary these keys.
SAME = {row.name: next(iter(row.sets)) for row in TABLE.rows if row.sets and not row.convert and not row.unless}
LISTS = ("eval.ids",)  # keys with a list as the value, in a sweep too
VLLM, _ = SERVER_BACKENDS
_LOCAL = ("localhost", "127.0.0.1")
_SIZES = ("data.problems_per_iteration", "data.rollouts_per_problem", "train.batch_size", "train.grad_accum_steps")


@dataclass
class OfflineKeys:
    """The recipe keys, the device and the problems that a Hydra configuration is translated to."""

    keys: dict[str, Value] = field(default_factory=dict)  # recipe keys
    device: str = "auto"  # device of the training
    problems: list[Problem] = field(default_factory=list)  # problems of the configuration


def translate(config: Mapping[str, Any], answers: Callable[[str], bool]) -> OfflineKeys:
    """Translate a flat Hydra configuration with every key of ``KEYS`` to recipe keys, device and problems.

    Problems are returned, not raised. ``answers`` returns whether a server answers at an address.
    """
    translation, settings = OfflineKeys(device=str(config["model.device"])), Settings(config)
    for name in KEYS:
        value = config[name]
        raw = Value("null", name, from_text=True) if value is None else Value(value, name)
        setting = TABLE.translate(name, raw, settings)
        translation.problems += [setting.problem] if setting.problem else []
        translation.keys |= {key: Value(inner, name, from_text=raw.from_text) for key, inner in setting.keys.items()}
    sizes = _read_sizes(config)
    if sizes and _count_steps(sizes) is None:
        problems, rollouts, size, accumulated = sizes
        fits = ", ".join(str(count) for count in range(1, problems * rollouts + 1) if problems * rollouts % count == 0)
        problem = f"steps of {size} x {accumulated} completions do not divide the {problems * rollouts} of an iteration"
        fix = f"set batch_size x grad_accum_steps to one of {fits}"
        translation.problems.append(Problem("train.batch_size", problem, fix))
    _translate_server_address(config, translation, answers)
    return translation


def _read_sizes(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return problems per iteration, rollouts per problem, batch size and accumulation steps of a configuration.

    Return None if one of them is not a positive integer.
    """
    sizes = tuple(whole_number(config[name]) or 0 for name in _SIZES)
    return sizes if all(sizes) else None


def _count_steps(sizes: tuple[int, ...]) -> int | None:
    """Return the optimizer steps of an iteration, or None if its completions do not divide into whole steps.

    ``sizes`` are problems, rollouts per problem, batch size and accumulation steps.
    """
    problems, rollouts, size, accumulated = sizes
    steps, remainder = divmod(problems * rollouts, size * accumulated)
    return None if remainder else steps


def in_steps(setting: Setting, settings: Settings) -> None:
    """Convert a number of iterations to optimizer steps, and set the recipe key of the table's row.

    Do nothing if the sizes of an iteration are wrong, because another problem reports them.
    """
    sizes = _read_sizes(settings.values)
    steps = _count_steps(sizes) if sizes else None
    if steps is not None:
        setting.write(setting.row.filled(int(setting.value) * steps))


def forward_passes(setting: Setting, settings: Settings) -> None:
    """Set the recipe key of the table's row to the forward passes between two generations: completions / batch size.

    Do nothing if the sizes of an iteration are wrong.
    """
    if sizes := _read_sizes(settings.values):
        problems, rollouts, size, _ = sizes
        setting.write(setting.row.filled(problems * rollouts // size))


def reference(setting: Setting, settings: Settings) -> None:
    """Set the recipe key of the reference model, unless the reference is the trained model."""
    if setting.value != settings.values["model.train_id"]:
        setting.write(setting.row.filled(setting.value))


def run_name(setting: Setting, _: Settings) -> None:
    """Set the recipe key of the run's name; an empty name becomes ``offline``."""
    setting.write(setting.row.filled("offline" if setting.value in ("", "null") else setting.value))


def problem_ids(setting: Setting, settings: Settings) -> None:
    """Set the recipe key eval_problem_ids if the list is not empty; reject anything except a list of integers."""
    ids = settings.values[setting.name] or []
    if not isinstance(ids, list) or not all(type(number) is int for number in ids):
        setting.reject(f"expected a list of integers, got {ids!r}", f"set e.g. {setting.name}=[5000,5001]")
    elif ids:
        setting.write({"eval_problem_ids": ids})


def greedy(setting: Setting, settings: Settings) -> None:
    """If sampling is off in evaluations, set eval_temperature: 0, and reject several completions of a problem."""
    if setting.value is False:
        setting.write({"eval_temperature": 0})
        if (count := settings.values["eval.replicates"]) != 1:
            problem = f"greedy completions of a problem are identical, but eval.replicates is {count}"
            setting.reject(problem, "set eval.replicates=1")


def same_server(setting: Setting, settings: Settings) -> None:
    """Reject a server for evaluations that differs from the training's server, because it lacks current weights."""
    name = setting.name.replace("eval.", "generation.")
    if settings.values[setting.name] != settings.values[name]:
        problem = "evaluations need the training's server, because other servers have only the initial weights"
        setting.reject(problem, f"remove it: evaluations use the server of {name}")


def _translate_server_address(
    config: Mapping[str, Any], translation: OfflineKeys, answers: Callable[[str], bool]
) -> None:
    """Add the recipe keys of the server's address, or a problem with it, to ``translation``.

    If no server answers at a local address of vLLM, set only the port: the launch starts a vLLM server there.
    Otherwise set the address and the backend of an external server. ``answers`` tests an address.
    """
    backend, url = config["generation.backend"], str(config["generation.base_url"])
    if backend not in SERVER_BACKENDS:
        fix = f"set one of {', '.join(SERVER_BACKENDS)}"
        translation.problems.append(Problem("generation.backend", f"'{backend}' is unknown", fix))
    elif not is_url(url):
        fix = "set e.g. http://127.0.0.1:30000"
        translation.problems.append(Problem("generation.base_url", f"'{url}' is not an address", fix))
    elif backend == VLLM and urlsplit(url).hostname in _LOCAL and not answers(url):
        if port := urlsplit(url).port:
            translation.keys["vllm_server_port"] = Value(port, "generation.base_url")
    else:
        translation.keys["vllm_server_base_url"] = Value(url, "generation.base_url")
        translation.keys["server_backend"] = Value(backend, "generation.backend")
