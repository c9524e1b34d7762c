"""Read the Atropos keys of a recipe: the environments that the launch starts, their labels, and run-api.

The functions look up recipe keys with a function, so that they accept recipes and the trainer's arguments alike.
"""

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

RUN_API_PORT = 8001
ENVIRONMENT_TOKEN = "environment_token"  # file in the run directory, for environments that the user starts
_MAX_LABEL_LENGTH = 40  # labels are part of file names


@dataclass(frozen=True)
class AtroposEnvironment:
    """An environment of a recipe that posts scored groups to Atropos' run-api."""

    id: str  # a name of ATROPOS_ENVIRONMENTS, module:Class or file.py:Class
    args: dict[str, Any]  # fields of its configuration
    weight: float = 1.0  # relative number of its groups under way
    min_allocation: float | None = None  # fraction of a batch that its groups fill first


# Shipped environments: generated sums, and problems of a dataset. ``serve.SHIPPED`` has their classes.
ATROPOS_ENVIRONMENTS = ("arithmetic", "dataset")


def list_environments(recipe: Callable[[str], Any]) -> list[AtroposEnvironment]:
    """Return the environments in the recipe key atropos_environment, else in atropos_mixture; [] if neither is set.

    ``recipe`` looks up a recipe key.
    """
    if recipe("atropos_environment") is not None:
        return [AtroposEnvironment(recipe("atropos_environment"), recipe("atropos_environment_args") or {})]
    entries = (recipe("atropos_mixture") or {}).get("environments") or []
    return [
        AtroposEnvironment(
            entry.get("id", ""), entry.get("args") or {}, entry.get("weight") or 1.0, entry.get("min_allocation")
        )
        for entry in entries
    ]


def uses_atropos(recipe: Callable[[str], Any]) -> bool:
    """Return whether a recipe sets atropos_environment, atropos_mixture or atropos_api_url."""
    return any(recipe(key) is not None for key in ("atropos_environment", "atropos_mixture", "atropos_api_url"))


def starts_run_api(recipe: Callable[[str], Any]) -> bool:
    """Return whether a launch of this recipe starts its own run-api: it uses Atropos and sets no atropos_api_url."""
    return uses_atropos(recipe) and recipe("atropos_api_url") is None


def make_environment_labels(recipe: Callable[[str], Any]) -> list[str]:
    """Return a short, unique label of each Atropos environment of a recipe, made of ``a-z 0-9 _ -``."""
    labels: list[str] = []
    for environment in list_environments(recipe):
        name = re.sub("[^a-z0-9_-]+", "-", environment.id.rpartition(":")[2].lower()).strip("-")[:_MAX_LABEL_LENGTH]
        candidates = (f"{name or 'environment'}{f'-{count}' if count > 1 else ''}" for count in itertools.count(1))
        labels.append(next(label for label in candidates if label not in labels))
    return labels


def find_trajectory_limit(recipe: Callable[[str], Any]) -> int | None:
    """Return the most tokens that a recipe allows for a prompt with its completion; None if it sets no limit.

    This is max_prompt_length + max_completion_length, or vllm_max_model_length if one of them is missing.
    """
    prompt, completion = recipe("max_prompt_length"), recipe("max_completion_length")
    longest = recipe("vllm_max_model_length") if None in (prompt, completion) else prompt + completion
    return None if longest is None else int(longest)


def choose_run_api_port(recipe: Callable[[str], Any]) -> int | None:
    """Return 8001, the default port of run-api, if a launch of the recipe starts run-api; else None."""
    return RUN_API_PORT if starts_run_api(recipe) else None


def admits_environments(recipe: Callable[[str], Any]) -> bool:
    """Return whether environments that the user starts may sample from the run's server: with an external run-api."""
    return uses_atropos(recipe) and not starts_run_api(recipe)


def list_datasets(recipe: Callable[[str], Any]) -> Iterator[tuple[str, str | None, str | None, str]]:
    """Yield recipe key, name, configuration and split of each dataset that a shipped environment ``dataset`` reads."""
    for environment in list_environments(recipe):
        if environment.id == "dataset":
            key = "atropos_mixture" if recipe("atropos_environment") is None else "atropos_environment_args"
            name, config, split = (
                environment.args.get(f"dataset_{part}") for part in ("name", "config", "train_split")
            )
            yield key, name, config, split or "train"
