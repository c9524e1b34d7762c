"""Run one environment of a run: it sends scored groups to run-api until the launcher ends it.

    python -m grpo_recipes.extensions.atropos.serve INDEX --api-url URL --server-url URL

INDEX counts the environments of the run directory's recipe from 0. An environment is shipped with this package, or any
BaseEnv of atroposlib. It samples from the run's server, and the recipe sets the sizes in its configuration.
"""

import os
import signal

from grpo_recipes.extensions.atropos.arguments import AtroposKeys
from grpo_recipes.process.tree import die_with_parent

if __name__ == "__main__":  # before the imports, which take seconds
    die_with_parent(os.getppid())
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

import argparse
import asyncio
import logging
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import requests
from atroposlib.envs.base import BaseEnv
from pydantic import BaseModel, ValidationError
from tenacity import RetryError

from grpo_recipes.errors import EXIT_CONFIG_ERROR, ConfigError, Problem, config_error
from grpo_recipes.extensions.atropos.access import ENDLESS
from grpo_recipes.extensions.atropos.environments import (
    ArithmeticEnv,
    DatasetEnv,
    Fetched,
    RecipeEnv,
    RecipeEnvConfig,
)
from grpo_recipes.extensions.atropos.fields import ARGS, find_argument_problems
from grpo_recipes.extensions.atropos.recipe import (
    AtroposEnvironment,
    find_trajectory_limit,
    list_environments,
    make_environment_labels,
)
from grpo_recipes.extensions.atropos.run_environment import adapt_class, disconnect_predecessor
from grpo_recipes.extensions.atropos.server import NEUTRAL, RunServerConfig
from grpo_recipes.fetch.assets import find_fetched_datasets
from grpo_recipes.process.reports import run_folder, say
from grpo_recipes.recipe import Recipe, read_frozen
from grpo_recipes.recipe.registry import ADAPTER
from grpo_recipes.recipe.user_code import REWARD_COPIES, load_object
from grpo_recipes.runs.rundir import Run

SHIPPED: dict[str, type[RecipeEnv]] = {"arithmetic": ArithmeticEnv, "dataset": DatasetEnv}
# Field of an environment's configuration -> why a run changes it. The environment sets all other fields.
_REASONS = {
    "chat_template": "chat_template of the recipe",
    "chat_template_kwargs": "chat_template_kwargs of the recipe",
    "group_size": "num_generations of the recipe",
    "inference_weight": "the weight of the environment in the recipe",
    "max_batches_offpolicy": "below 1 it would never start a group",
    "max_token_length": "max_prompt_length and max_completion_length of the recipe",
    "max_tokens": "max_completion_length of the recipe",
    "min_batch_allocation": "the min_allocation of the environment in the recipe",
    "rollout_server_url": "the run-api of the run",
    "seed": "seed of the recipe",
    "system_prompt": "system_prompt of the recipe",
    "temperature": "temperature of the recipe",
    "tokenizer_name": "the model of the run",
    "total_steps": "an environment runs until the training ends",
    "use_wandb": "the trainer reports to W&B; metrics of the environment go to a file of the run directory",
    "wandb_name": "the name of the environment in the run",
    "worker_timeout": "atropos_batch_max_wait_time of the recipe; a slower group would be dropped",
}
_DERIVED = "the configuration derives it from other values"  # by a validator of the environment's class
_MARGIN_SECONDS = 60.0  # patience with the server beyond the limits of a hang and of a start


def main(argv: list[str] | None = None) -> int:
    """Run one environment of the run directory's recipe until it is terminated.

    Return 2 after printing a problem with its configuration, 1 if run-api does not answer, and 0 at its own end.
    """
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("index", metavar="INDEX", type=int, help="number of the environment in the recipe, from 0")
    parser.add_argument("--api-url", required=True, help="URL of run-api")
    parser.add_argument("--server-url", required=True, help="URL of the vLLM server")
    args = parser.parse_args(argv)
    run, api = run_folder(), args.api_url.rstrip("/")
    # Only warnings are logged, and no message twice in a row: atroposlib logs ten lines a second.
    handler = logging.StreamHandler()
    handler.addFilter(_RepetitionFilter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], format="%(levelname)s %(name)s: %(message)s")
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("atroposlib"):
            logging.getLogger(name).setLevel(logging.WARNING)
    try:
        environment = create_environment(run, args.index, api, args.server_url)
        disconnect_predecessor(environment.id_file, api)
        asyncio.run(environment.env_manager())
    except ConfigError as error:
        say(str(error))
        return EXIT_CONFIG_ERROR
    except (requests.RequestException, RetryError) as error:  # RetryError after three requests to run-api
        reason = error.last_attempt.exception() if isinstance(error, RetryError) else error
        say(f"run-api at {api} does not answer: {reason}")
        return 1
    return 0


def create_environment(run: Path, index: int, api_url: str, server_url: str) -> Any:
    """Create the INDEX-th environment of a run's recipe, with this run-api and vLLM server; print what the run changes.

    Raise ConfigError if its class or configuration is not usable.
    """
    recipe, copies = read_frozen(run / "recipe.yaml"), run / REWARD_COPIES
    entry, label = list_environments(recipe.__getitem__)[index], make_environment_labels(recipe.__getitem__)[index]
    kind = load_environment(entry.id, copies)
    plan = Run(run).plan
    config = build_config(kind, entry, recipe, str(plan["model"]), api_url, label)
    for line in describe_changes(kind.config_init()[0], config, entry.args):
        say(f"environment {label}: {line}")
    server = RunServerConfig(
        base_url=f"{server_url.rstrip('/')}/v1",
        model_name=ADAPTER if plan["bridge"] == "lora" else os.environ["GRPO_RUN"],
        tokenizer_name=str(plan["model"]),
        timeout=int(recipe.server.request_timeout),
        longest=config.max_token_length,
        longest_completion=recipe.sampling.max_completion_length,
        sampling={key: recipe[key] for key in NEUTRAL if recipe[key] is not None},
        patience=plan["server_timeout"] + recipe.server.stall_timeout + _MARGIN_SECONDS,
    )
    attributes: dict[str, Any] = {"api_url": api_url, "run_template": recipe.model.chat_template}
    if issubclass(kind, DatasetEnv):
        attributes |= {"copies": copies, "fetched": staticmethod(find_fetched_datasets(run))}
    return adapt_class(kind, run, index, label, **attributes)(config, [server], slurm=False, testing=False)


def load_environment(spec: str, copies: Path | None = None) -> type[BaseEnv]:
    """Return the class of a shipped environment, or import it from ``module:Class`` or ``file.py:Class``.

    Raise ConfigError if it is not an environment or lacks a method. Errors of the user's code are not caught.
    ``copies`` is the folder with the run's copies of user code.
    """
    if (kind := SHIPPED.get(spec)) is not None:
        return kind
    kind = load_object(spec, copies)
    if not (isinstance(kind, type) and issubclass(kind, BaseEnv)):
        fix = (
            "derive the class from grpo_recipes.extensions.atropos.environments.RecipeEnv, or from atroposlib's BaseEnv"
        )
        raise config_error(spec, "is not an Atropos environment", fix)
    missing = sorted(getattr(kind, "__abstractmethods__", ()))
    if issubclass(kind, RecipeEnv):
        scoring = ("score", "play", "scores")
        missing += ["next_item"] if kind.next_item is RecipeEnv.next_item else []
        missing += ["score"] if all(getattr(kind, name) is getattr(RecipeEnv, name) for name in scoring) else []
    if missing:
        raise config_error(spec, f"does not define {' and '.join(missing)}", "define it in the class")
    return kind


def find_environment_problems(
    spec: str,
    args: Mapping[str, Any],
    where: str = "atropos_environment",
    copies: Path | None = None,
    fetched: Fetched | None = None,
) -> list[Problem]:
    """Import an environment, check its arguments and read its dataset; return the problems, [] if it is usable.

    Any error of the environment's code is a problem too.

    Args:
        spec: the environment as the recipe names it.
        args: its arguments in the recipe.
        where: line of the recipe that names it, for the problems.
        copies: folder with the run's copies of the user's code.
        fetched: finds hub datasets on this machine.
    """
    try:
        kind = load_environment(spec, copies)
        base = kind.config_init()[0]
        check_arguments(type(base), args)
        config = _replace_values(base, {**_list_required_values(base), **args})
        if issubclass(kind, RecipeEnv):
            kind.check_config(config, copies, fetched)
    except ConfigError as error:
        return [Problem(where, f"{problem.where}: {problem.what}", problem.fix) for problem in error.problems]
    except Exception as error:  # the user's code may raise anything
        message = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return [Problem(where, f"'{spec}' can't be loaded: {message}", "correct its code")]
    return []


def build_config(
    kind: type[BaseEnv], entry: AtroposEnvironment, recipe: Recipe, model: str, api_url: str, label: str
) -> Any:
    """Build the configuration of an environment: its defaults, overridden by the run, the recipe and its arguments.

    In rising priority: values that every run needs, keys of the recipe, arguments of the environment, values that must
    agree with the run. Raise ConfigError for a wrong argument, or if nothing limits the prompts.
    """
    base = kind.config_init()[0]
    fields = type(base).model_fields
    check_arguments(type(base), entry.args)
    longest = find_trajectory_limit(recipe.__getitem__)
    if longest is None:
        raise config_error("max_prompt_length", "nothing limits the length of a prompt", "add max_prompt_length")
    key_of_field = {"seed": "seed", "max_tokens": "max_completion_length", "system_prompt": "system_prompt"}
    from_recipe = {name: recipe[key] for name, key in key_of_field.items() if recipe[key] is not None}
    if 0 < base.worker_timeout < (longest_wait := AtroposKeys(recipe).batch_max_wait_time):
        from_recipe["worker_timeout"] = longest_wait
    set_by_run = {
        "group_size": recipe.batch.num_generations,
        "inference_weight": entry.weight,
        "max_token_length": longest,
        "min_batch_allocation": entry.min_allocation,
        "rollout_server_url": api_url,
        "temperature": recipe.sampling.temperature,
        "tokenizer_name": model,
        "chat_template": recipe.model.chat_template,
        "chat_template_kwargs": recipe.model.chat_template_kwargs,
    }
    values = {**_list_required_values(base), "wandb_name": label, **from_recipe, **entry.args, **set_by_run}
    return _replace_values(
        base, {name: value for name, value in values.items() if name in fields or name in entry.args}
    )


def preview_changes(recipe: Recipe, index: int) -> list[str]:
    """Return a line for each default of environment ``index`` (from 0) that a run of this recipe would change.

    Values that the recipe sets in the environment's arguments are left out. Raise ConfigError if the environment or
    an argument is wrong.
    """
    entry, label = list_environments(recipe.__getitem__)[index], make_environment_labels(recipe.__getitem__)[index]
    kind, model = load_environment(entry.id), recipe.model.name
    config = build_config(kind, entry, recipe, model, AtroposKeys(recipe).api_url or "of the launch", label)
    return describe_changes(kind.config_init()[0], config, entry.args)


def check_arguments(config: type[BaseModel], args: Collection[str]) -> None:
    """Raise ConfigError if arguments are not fields of ``config``, or are set by the launch itself.

    ``args`` are names. The error has a problem for each of them.
    """
    fields = {*config.model_fields, *(args if config.model_config.get("extra") == "allow" else ())}
    if problems := [*find_argument_problems(config.__name__, fields, args)]:
        raise ConfigError(*problems)


def _list_required_values(base: Any) -> dict[str, Any]:
    """Return the fields that a run changes in an environment's configuration ``base``, before arguments override them.

    The environment never ends by itself, does not log to W&B, and may start at least one batch.
    """
    values: dict[str, Any] = {"total_steps": max(base.total_steps, ENDLESS), "use_wandb": False}
    return values if base.max_batches_offpolicy > 0 else {**values, "max_batches_offpolicy": 1}


def describe_changes(base: BaseModel, config: BaseModel, args: Collection[str]) -> list[str]:
    """Return a line with old value, new value and reason for each field that differs between two configurations.

    ``base`` is the environment's own configuration, ``config`` the run's. Fields in ``args``, which the recipe sets,
    and defaults of ``RecipeEnvConfig`` are left out.
    """
    defaults = {name: field.default for name, field in RecipeEnvConfig.model_fields.items()}
    hidden = defaults if isinstance(base, RecipeEnvConfig) else {}
    lines = []
    for name, old in base.model_dump().items():
        new = getattr(config, name)
        if new != old and name not in args and not (name in hidden and hidden[name] == old):
            lines.append(f"{name} {old!r} -> {new!r}: {_REASONS.get(name, _DERIVED)}")
    return lines


def _replace_values(base: BaseModel, values: Mapping[str, Any]) -> Any:
    """Return a copy of a configuration with the fields in ``values``; raise ConfigError if pydantic rejects one."""
    try:
        return type(base)(**{**base.model_dump(), **values})
    except ValidationError as error:
        details = [(".".join(map(str, detail["loc"])), detail["msg"]) for detail in error.errors()]
        problems = [Problem(f"{ARGS}.{name}", message, "correct it") for name, message in details]
        raise ConfigError(*problems) from error


class _RepetitionFilter(logging.Filter):
    """Leave out a message that equals the previous message."""

    _last = ""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write the message: it differs from the previous message."""
        is_new, self._last = record.getMessage() != self._last, record.getMessage()
        return is_new


if __name__ == "__main__":
    sys.exit(main())
