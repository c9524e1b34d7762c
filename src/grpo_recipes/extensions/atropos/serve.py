"""One environment of a run, which sends scored groups to run-api until the launcher ends it.

    python -m grpo_recipes.extensions.atropos.serve INDEX --api-url http://127.0.0.1:8001 --server-url http://127.0.0.1:8000

It is the INDEX-th of the run directory's recipe: one of ours, or any BaseEnv of atroposlib, with the run's server as
its server, the recipe's sizes in its configuration, and what its groups need to be trained on beside their scores.
"""

import os
import signal

from grpo_recipes.process.tree import die_with_parent

if __name__ == "__main__":  # before the imports, which take seconds
    die_with_parent(os.getppid())
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

import argparse
import asyncio
import logging
import sys
import traceback
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import requests
from atroposlib.envs.base import BaseEnv
from atroposlib.envs.server_handling.server_baseline import AsyncSemWithAdaptiveWeight
from pydantic import BaseModel, ValidationError
from tenacity import RetryError

from grpo_recipes.errors import EXIT_CONFIG_ERROR, ConfigError, Problem, config_error, translate
from grpo_recipes.extensions.atropos.access import ENDLESS
from grpo_recipes.extensions.atropos.environments import (
    ENVIRONMENT,
    ArithmeticEnv,
    DatasetEnv,
    Fetched,
    RecipeEnv,
    RecipeEnvConfig,
)  # fmt: skip
from grpo_recipes.extensions.atropos.fields import ARGS, argument_problems
from grpo_recipes.extensions.atropos.recipe import (
    AtroposEnvironment,
    atropos_environments,
    atropos_labels,
    longest_trajectory,
)
from grpo_recipes.extensions.atropos.recorded import metrics_file, recorded
from grpo_recipes.extensions.atropos.server import (
    PLAIN,
    PromptTooLong,
    RunServer,
    RunServerConfig,
    ServerGone,
    generation_params,
    noting,
)  # fmt: skip
from grpo_recipes.fetch.assets import fetched_datasets
from grpo_recipes.plan.ports import find_listener
from grpo_recipes.process.reports import run_folder, say
from grpo_recipes.process.sessions import BoundedAdapter
from grpo_recipes.recipe import Recipe, read_frozen
from grpo_recipes.recipe.user_code import REWARD_COPIES, load_object
from grpo_recipes.runs.rundir import Run, json_mapping, write_json
from grpo_recipes.weights.transport import ADAPTER

OURS: dict[str, type[RecipeEnv]] = {"arithmetic": ArithmeticEnv, "dataset": DatasetEnv}
# Why a run changes a field of an environment that is not ours. All other fields keep the environment's values.
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
}
# Of a trajectory, beside tokens, masks and scores.
_OF_ROWS = ("inference_logprobs", "advantages", "ref_logprobs", "messages", "images")
_MOST_FAILURES = 24  # groups in a row
_API_SECONDS = 10.0
_MARGIN_SECONDS = 60.0  # beyond a hang and the start after it
Found = dict[str, Any] | list[dict[str, Any] | None] | None  # what an environment collects
Collect = Callable[[Any], Awaitable[tuple[Found, list[Any]]]]


def main(argv: list[str] | None = None) -> int:
    """Run one environment of the run directory's recipe; return an exit code where it ends by itself."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("index", metavar="INDEX", type=int, help="which of the recipe's Atropos environments")
    parser.add_argument("--api-url", required=True, help="of run-api")
    parser.add_argument("--server-url", required=True, help="of the vLLM server")
    args = parser.parse_args(argv)
    run, api = run_folder(), args.api_url.rstrip("/")
    try:
        quieten()
        environment = made(run, args.index, api, args.server_url)
        remembered(environment, run / "processes" / f"atropos_{args.index}.json", api)
        asyncio.run(environment.env_manager())
    except ConfigError as error:
        say(str(error))
        return EXIT_CONFIG_ERROR
    except RetryError as error:  # of a request to run-api, which atroposlib tries three times
        say(f"run-api at {api} does not answer: {error.last_attempt.exception()}")
        return 1
    return 0


def made(run: Path, index: int, api_url: str, server_url: str) -> Any:
    """Return the INDEX-th environment of a run, which is to ask these two; ConfigError for what is wrong with it."""
    recipe, copies = read_frozen(run / "recipe.yaml"), run / REWARD_COPIES
    entry, label = atropos_environments(recipe.__getitem__)[index], atropos_labels(recipe.__getitem__)[index]
    kind = load_environment(entry.id, copies)
    plan = Run(run).plan
    config = configured(kind, entry, recipe, str(plan["model"]), api_url, label)
    for line in changes(kind.config_init()[0], config, entry.args):
        say(f"environment {label}: {line}")
    server = RunServerConfig(
        base_url=f"{server_url.rstrip('/')}/v1",
        model_name=ADAPTER if plan["bridge"] == "lora" else os.environ["GRPO_RUN"],
        tokenizer_name=str(plan["model"]),
        timeout=int(recipe["server_request_timeout"]),
        longest=config.max_token_length,
        longest_completion=recipe["max_completion_length"],
        sampling={key: recipe[key] for key in PLAIN if recipe[key] is not None},
        patience=plan["server_timeout"] + recipe["server_stall_timeout"] + _MARGIN_SECONDS,
    )
    if issubclass(kind, DatasetEnv):
        kind.copies, kind.fetched = copies, staticmethod(fetched_datasets(run))
    kind.server_cls = RunServer
    environment = recorded(kind, metrics_file(run, label))(config, [server], slurm=False, testing=False)
    if recipe["chat_template"] is not None:
        environment.tokenizer.chat_template = recipe["chat_template"]
    watched(environment, label)
    return environment


def load_environment(spec: str, copies: Path | None = None) -> type[BaseEnv]:
    """Return the class that a recipe names; ConfigError where it is no environment, or an unfinished one."""
    if (kind := OURS.get(spec)) is not None:
        return kind
    kind = load_object(spec, copies)
    if not (isinstance(kind, type) and issubclass(kind, BaseEnv)):
        fix = (
            "derive the class from grpo_recipes.extensions.atropos.environments.RecipeEnv, or from atroposlib's BaseEnv"
        )
        raise config_error(spec, "is not an Atropos environment", fix)
    missing = sorted(getattr(kind, "__abstractmethods__", ()))
    if issubclass(kind, RecipeEnv):
        plays = {name for name in ("score", "play", "scores") if getattr(kind, name) is not getattr(RecipeEnv, name)}
        missing += ["next_item"] if kind.next_item is RecipeEnv.next_item else []
        missing += [] if plays else ["score"]
    if missing:
        raise config_error(spec, f"has no {' and no '.join(missing)}", "define it in the class")
    return kind


def environment_problems(
    spec: str,
    args: Mapping[str, Any],
    where: str = "atropos_environment",
    copies: Path | None = None,
    fetched: Fetched | None = None,
) -> list[Problem]:
    """Return what is wrong with an environment and its arguments, found by importing it and reading its dataset.

    ``where`` is the place in the recipe that names it, ``fetched`` finds datasets of the hub on this machine.
    """
    try:
        kind = load_environment(spec, copies)
        base = kind.config_init()[0]
        check_arguments(type(base), args)
        config = _filled(base, {**_needed(base), **args})
        if issubclass(kind, RecipeEnv):
            kind.look(config, copies, fetched)
    except ConfigError as error:
        return [Problem(where, f"{problem.where}: {problem.what}", problem.fix) for problem in error.problems]
    except Exception as error:  # the user's code may raise anything
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return [Problem(where, f"'{spec}' cannot be used: {said}", "correct it there")]
    return []


def configured(
    kind: type[BaseEnv], entry: AtroposEnvironment, recipe: Recipe, model: str, api_url: str, label: str
) -> Any:
    """Return the configuration of an environment: its own values, except those that the run or its arguments set."""
    base = kind.config_init()[0]
    fields = type(base).model_fields
    check_arguments(type(base), entry.args)
    asked = {"seed": "seed", "max_tokens": "max_completion_length", "system_prompt": "system_prompt"}
    given = {name: recipe[key] for name, key in asked.items() if recipe[key] is not None}
    owned = {
        "group_size": recipe["num_generations"],
        "inference_weight": entry.weight,
        "max_token_length": longest(recipe),
        "min_batch_allocation": entry.min_allocation,
        "rollout_server_url": api_url,
        "temperature": recipe["temperature"],
        "tokenizer_name": model,
        "chat_template": recipe["chat_template"],
        "chat_template_kwargs": recipe["chat_template_kwargs"],
    }
    values = {**_needed(base), "wandb_name": label, **given, **entry.args, **owned}
    return _filled(base, {name: value for name, value in values.items() if name in fields or name in entry.args})


def changes_of(recipe: Recipe, index: int) -> list[str]:
    """Return the values that a run of this recipe would change in its INDEX-th environment, as ``changes`` does."""
    entry, label = atropos_environments(recipe.__getitem__)[index], atropos_labels(recipe.__getitem__)[index]
    kind, model = load_environment(entry.id), recipe["model_name_or_path"]
    config = configured(kind, entry, recipe, model, recipe["atropos_api_url"] or "of the launch", label)
    return changes(kind.config_init()[0], config, entry.args)


def longest(recipe: Recipe) -> int:
    """Return the most tokens of a prompt with its completion; refuse a recipe that sets no limit."""
    most = longest_trajectory(recipe.__getitem__)
    if most is None:
        raise config_error("max_prompt_length", "nothing limits the length of a prompt", "add max_prompt_length")
    return most


def check_arguments(config: type[BaseModel], args: Collection[str]) -> None:
    """Refuse arguments that a configuration has no field for, and those that the launch fills in."""
    fields = {*config.model_fields, *(args if config.model_config.get("extra") == "allow" else ())}
    if problems := [*argument_problems(config.__name__, fields, args)]:
        raise ConfigError(*problems)


def _needed(base: Any) -> dict[str, Any]:
    """Return the values without which an environment could not be part of a run; its arguments still win."""
    needed: dict[str, Any] = {"total_steps": max(base.total_steps, ENDLESS), "use_wandb": False}
    return needed if base.max_batches_offpolicy > 0 else {**needed, "max_batches_offpolicy": 1}


def changes(base: BaseModel, config: BaseModel, args: Collection[str]) -> list[str]:
    """Return a line for each value of an environment's author that the run changes: field, old, new and reason.

    Arguments of the recipe are left out, and so are defaults of ours.
    """
    defaults = {name: field.default for name, field in RecipeEnvConfig.model_fields.items()}
    ours = defaults if isinstance(base, RecipeEnvConfig) else {}
    lines = []
    for name, old in base.model_dump().items():
        new = getattr(config, name)
        if new != old and name not in args and not (name in ours and ours[name] == old):
            lines.append(f"{name} {old!r} -> {new!r}: {_REASONS[name]}")
    return lines


def _filled(base: BaseModel, values: Mapping[str, Any]) -> Any:
    """Return a configuration with other values; ConfigError where they do not fit."""

    def refusal(error: ValidationError) -> ConfigError:
        wrong = [(".".join(map(str, one["loc"])), one["msg"]) for one in error.errors()]
        return ConfigError(*[Problem(f"{ARGS}.{name}", said, "correct it") for name, said in wrong])

    with translate(ValidationError, refusal):
        return type(base)(**{**base.model_dump(), **values})


# --- what the environment does in the run --------------------------------------------------------------------------


def watched(environment: Any, label: str) -> None:
    """Have its groups say what they were sampled with, and its process end where no group comes about any more."""
    collect: Collect = environment.collect_trajectories
    if type(environment).collect_trajectories is BaseEnv.collect_trajectories:
        collect = _collector(environment)
    collect = _in_turn(environment, collect)
    failures = 0

    async def collect_trajectories(item: Any) -> tuple[Found, list[Any]]:
        """Collect as the environment does; end the process where it is configured wrongly, or fails again and again."""
        nonlocal failures
        try:
            with noting() as asked:
                found, backlog = await collect(item)
        except ConfigError as error:
            say(str(error))
            raise SystemExit(EXIT_CONFIG_ERROR) from error
        except Exception as error:  # atroposlib logs it, and goes on with the next item
            failures += not isinstance(error, ServerGone)
            if failures == 1 and not isinstance(error, PromptTooLong):  # which the log says, too
                traceback.print_exception(error)
            if failures >= _MOST_FAILURES:
                say(f"{label}: {failures} groups in a row failed, the last with {type(error).__name__}: {error}")
                raise SystemExit(1) from error
            raise
        failures = 0
        for group in found if isinstance(found, list) else [found]:
            if group is not None:
                own = group.get("generation_params") or {}
                group["generation_params"] = {**generation_params(asked), ENVIRONMENT: label, **own}
        return found, backlog

    environment.collect_trajectories = collect_trajectories


def _in_turn(environment: Any, collect: Collect) -> Collect:
    """Return a function that collects as ``collect`` does, so many groups at once as the environment's weight allows.

    atroposlib shares 512 requests out by weight, which no environment reaches that samples a group with one request.
    """
    turns: AsyncSemWithAdaptiveWeight | None = None

    async def collect_in_turn(item: Any) -> tuple[Found, list[Any]]:
        """Wait until the weight leaves room for another group, and collect it."""
        nonlocal turns
        if not hasattr(environment, "status_dict"):  # run-api has not been asked yet, so atroposlib does not collect
            return await collect(item)
        if turns is None:
            turns = AsyncSemWithAdaptiveWeight(_most_groups(environment))
        turns.update_weight(environment.status_dict["env_weight"])  # 1 where it is alone
        async with turns:
            return await collect(item)

    return collect_in_turn


def _most_groups(environment: Any) -> int:
    """Return the most groups that an environment has under way: those that may wait for the trainer, or fewer."""
    config = environment.config
    waiting = config.max_batches_offpolicy * config.batch_size // config.group_size
    return max(1, min(environment.max_num_workers, waiting))


def _collector(environment: Any) -> Collect:
    """Return a function that collects trajectories one by one, as BaseEnv does, but keeps their log-probs."""

    async def collect(item: Any) -> tuple[Found, list[Any]]:
        """Return the group of an item, and the items that are to be collected later."""
        size = environment.config.group_size
        results = await asyncio.gather(*(environment.collect_trajectory(item) for _ in range(size)))
        rows = [row for row, _ in results]
        if not all(isinstance(row, dict) for row in rows):
            raise ValueError("collect_trajectory returned something else than a trajectory")
        group: dict[str, Any] = {name: [row[name] for row in rows] for name in ("tokens", "masks", "scores")}
        group |= {name: [row[name] for row in rows] for name in _OF_ROWS if all(row.get(name) for row in rows)}
        if any(row.get("overrides") for row in rows):
            group["overrides"] = [row.get("overrides") or {} for row in rows]
        for name in ("group_overrides", "generation_params"):
            group[name] = {key: value for row in rows for key, value in (row.get(name) or {}).items()}
        return group, [one for _, backlog in results for one in backlog]

    return collect


def remembered(environment: Any, file: Path, api: str) -> None:
    """Disconnect the environment of an earlier life from the same run-api, and note the one of this.

    run-api counts an environment that died among the connected ones: its least share of a batch would never be filled.
    """
    life = {"api": api, "api_since": _began(api)}
    before = json_mapping(file) or {}
    if before.items() >= life.items() and "env_id" in before:
        with requests.Session() as session:
            session.trust_env = False  # a proxy of the environment does not know the run's run-api
            session.mount(api, BoundedAdapter(_API_SECONDS))
            answer = session.post(f"{api}/disconnect-env", json={"env_id": before["env_id"]})
        say(f"environment {before['env_id']} of before is disconnected from run-api: {answer.text[:200]}")
        file.unlink()
    register = environment.register_env

    async def register_env() -> None:
        await register()
        file.parent.mkdir(exist_ok=True)
        write_json(file, {**life, "env_id": environment.env_id, "pid": os.getpid()})
        say(f"registered at run-api as environment {environment.env_id}, {environment.config.wandb_name}")

    environment.register_env = register_env


def _began(url: str) -> float | None:
    """Return when the process that listens there began, where it is ours: another one knows nothing of the last."""
    parts = urlsplit(url)
    pid = find_listener(parts.port or 80) if parts.hostname in ("127.0.0.1", "localhost") else None
    return psutil.Process(pid).create_time() if pid else None


class _Repeats(logging.Filter):
    """Leave out a message that repeats the one before it."""

    last = ""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write it."""
        same, self.last = record.getMessage() == self.last, record.getMessage()
        return not same


def quieten() -> None:
    """Have logs show warnings alone, each once in a row: atroposlib's loop writes ten lines a second."""
    handler = logging.StreamHandler()
    handler.addFilter(_Repeats())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], format="%(levelname)s %(name)s: %(message)s")
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("atroposlib"):
            logging.getLogger(name).setLevel(logging.WARNING)


if __name__ == "__main__":
    sys.exit(main())
