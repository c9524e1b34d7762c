"""The command `grpo generate`: the prompts of a recipe's dataset through a server that runs, to a JSONL file."""

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from grpo_recipes.cli import chosen_recipe, command, option, switch
from grpo_recipes.errors import ConfigError, Problem, config_error, translate
from grpo_recipes.fetch.assets import find_assets
from grpo_recipes.fetch.hub import EXIT_INTERRUPTED
from grpo_recipes.paths import display_path
from grpo_recipes.plan.commands import hub_environment
from grpo_recipes.plan.ports import DEFAULT_PORTS
from grpo_recipes.process.reports import say
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.registry import SERVER_BACKENDS
from grpo_recipes.recipe.sources import source_of
from grpo_recipes.smoke import SMOKE_SCHEME

if TYPE_CHECKING:
    from grpo_recipes.rollouts.generate import Generated
    from grpo_recipes.rollouts.openai import CompletionClient, SamplingParameters

KEY_VARIABLE = "OPENAI_API_KEY"
BACKEND = option(
    "--backend", choices=list(SERVER_BACKENDS), default=SERVER_BACKENDS[0], help="what runs there (vllm_server)"
)
REQUESTS = (
    option("--batch-size", type=int, default=32, metavar="N", help="completions in flight at most (32)"),
    option("--timeout", type=float, default=600.0, metavar="SECONDS", help="for a completion (600)"),
    option("--attempts", type=int, default=4, metavar="N", help="for each completion (4)"),
    option("--wait", type=float, default=60.0, metavar="SECONDS", help="for a server that starts (60)"),
)
_DATA_KEYS = ("dataset_name", "dataset_mixture", "dataset_config", "dataset_train_split")
_PROGRESS_SECONDS = 10.0
_BATCH = 1000  # prompts rendered at a time


@command(
    "complete the prompts of a recipe's dataset with a server that runs, into a JSONL file",
    option("--out", type=Path, required=True, metavar="FILE", help="the file, which the same command continues"),
    option("--base-url", metavar="URL", help="the server's address; by default vllm_server_host and _port, or 8000"),
    BACKEND,
    option("--model", metavar="NAME", help="the model that must be served; by default the one that is"),
    option("--num-generations", type=int, default=1, metavar="N", help="completions of each prompt (1)"),
    option("--temperature", type=float, metavar="T", help="by default the recipe's; 0 is greedy"),
    option("--split", metavar="SPLIT", help="split of dataset_name; by default dataset_train_split"),
    option("--limit", type=int, metavar="N", help="the first N prompts alone"),
    *REQUESTS,
    option("--push", metavar="REPO", help="publish the finished file in this dataset repository of the hub, private"),
    switch("--public", help="with --push: a new repository is public"),
    takes_recipe=True,
)
def generate(options: argparse.Namespace) -> int:
    """Return 0 with all completions in the file, 1 where some failed, 130 after Ctrl-C; the same command goes on."""
    _check(options)
    if options.split is not None:
        options.flags = [*options.flags, f"--dataset_train_split={options.split}"]
    recipe = chosen_recipe(options)
    need_dataset(recipe)
    if options.split is not None and recipe["dataset_mixture"]:
        fix = "leave it out, or name one of them with --dataset_name"
        raise config_error("--split", "each dataset of dataset_mixture has its own split", fix)
    os.environ.update(hub_environment(os.environ))
    from grpo_recipes.rollouts.generate import generate as draw
    from grpo_recipes.rollouts.generate import opened

    host, port = recipe["vllm_server_host"], recipe["vllm_server_port"] or DEFAULT_PORTS["vllm_server_port"]
    url = options.base_url or f"http://{host}:{port}"
    client = connect(url, options.backend, options.model, options.wait, **bounds_of(options))
    served = str(client.model)
    repo = None
    if options.push is not None:
        from grpo_recipes.console.publish import push

        repo = push.need_dataset(options.push, "--push", os.environ)
    rows, prompts = _prompts(recipe, options.limit)
    sampling = sampling_of(recipe, options.temperature, recipe["max_completion_length"], recipe["seed"])
    settings = settings_of(recipe, _DATA_KEYS, served, options.backend, options.num_generations, sampling, prompts[0])
    with opened(options.out, rows, settings) as file:
        old = f"; {len(file.done)} are there already" if file.done else ""
        say(
            f"{served} at {client.root}: {_times(len(rows), options.num_generations)}"
            f" -> {display_path(options.out)}{old}"
        )
        try:
            outcome = draw(client, prompts, options.num_generations, sampling, file, Progress(len(rows)))
        except KeyboardInterrupt:
            say(f"interrupted: {len(file.done)} of {len(rows)} prompts are in the file; the same command goes on")
            return EXIT_INTERRUPTED
    return _report(outcome, options, len(rows), repo)


def small_numbers(options: argparse.Namespace) -> list[Problem]:
    """Return a problem for each number that means nothing."""
    least = {name: 1.0 for name in ("num_generations", "limit", "batch_size", "attempts")}
    least |= {"timeout": 1e-3, "wait": 0, "temperature": 0}
    given = {name: getattr(options, name) for name in least}
    return [
        Problem(f"--{name.replace('_', '-')}", f"is {value:g}", f"write {1 if least[name] else 0} or more")
        for name, value in given.items()
        if value is not None and not value >= least[name]
    ]


def _check(options: argparse.Namespace) -> None:
    problems = small_numbers(options)
    if options.public and options.push is None:
        problems.append(Problem("--public", "changes nothing without --push", "add --push REPO, or remove it"))
    if problems:
        raise ConfigError(*problems)


def bounds_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the limits of requests in ``REQUESTS``, but for the wait."""
    return {"batch_size": options.batch_size, "timeout": options.timeout, "attempts": options.attempts}


def need_dataset(recipe: Recipe) -> None:
    """Refuse a recipe whose prompts do not come from a dataset."""
    if source_of(recipe.__getitem__):
        fix = "name a recipe with a dataset_name"
        raise config_error(display_path(recipe.path), "its prompts come from an environment, not from a dataset", fix)


def connect(url: str, backend: str, model: str | None, wait: float, **bounds: Any) -> "CompletionClient":
    """Return a client of a server that somebody started, once it serves the wanted model; errors name our flags."""
    from grpo_recipes.rollouts.openai import CompletionClient

    names = {"base_url": "--base-url", "backend": "--backend"}

    def in_flags(error: ConfigError) -> ConfigError:
        return ConfigError(*(Problem(names.get(one.where, one.where), one.what, one.fix) for one in error.problems))

    key = os.environ.get(KEY_VARIABLE)
    with translate(ConfigError, in_flags):
        client = CompletionClient(url, backend, model, key, say=say, **bounds)
        client.ready(wait)
    return client


def _prompts(recipe: Recipe, limit: int | None) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Return the rows of the dataset as training reads them, and each prompt as training renders it."""
    from datasets import disable_progress_bars

    from grpo_recipes.data.prompts import load_prompts, make_renderer

    disable_progress_bars()
    sources, kwargs = find_assets(recipe, os.environ), recipe["chat_template_kwargs"]
    tokenizer = tokenizer_of(recipe, sources.model.path if sources.model else recipe["model_name_or_path"])
    found = load_prompts(arguments_of(recipe), tokenizer, 1, recipe["seed"], kwargs, sources.lookup)
    rows = found.dataset.select(range(min(limit or len(found.dataset), len(found.dataset)))).to_list()
    return rows, rendered(make_renderer(recipe["chat_template"], tokenizer, kwargs), rows)


def arguments_of(recipe: Recipe) -> Any:
    """Return the keys as attributes, as a trainer's config has them."""
    return SimpleNamespace(**{key: value.value for key, value in recipe.values.items()})


def rendered(renderer: Any, rows: list[dict[str, Any]]) -> list[list[int]]:
    """Return the token ids of the prompt of each row."""
    ids = list[list[int]]()
    for start in range(0, len(rows), _BATCH):
        ids += renderer.ids([row["prompt"] for row in rows[start : start + _BATCH]])
    return ids


def tokenizer_of(recipe: Recipe, name: str) -> Any:
    """Return the tokenizer of the recipe's model, a folder or a hub id."""
    if recipe["model_name_or_path"].startswith(SMOKE_SCHEME):
        from grpo_recipes.smoke import build_tokenizer

        return build_tokenizer(mafia=recipe["model_name_or_path"] == "smoke:mafia")
    from transformers import AutoTokenizer

    def unreadable(error: Exception) -> ConfigError:
        what = f"the tokenizer cannot be loaded ({' '.join(str(error).split())[:200]})"
        return config_error(recipe.location("model_name_or_path"), what, "name a model with its tokenizer files")

    revision = "main" if os.path.isdir(name) else recipe["model_revision"]
    with translate((OSError, ValueError), unreadable):
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=recipe["trust_remote_code"])


def sampling_of(recipe: Recipe, temperature: float | None, max_tokens: int, seed: int | None) -> "SamplingParameters":
    """Return how a recipe samples, at another temperature where one is given."""
    from grpo_recipes.rollouts.openai import SamplingParameters

    keys = {key: recipe[key] or 0 for key in ("top_p", "top_k", "min_p", "repetition_penalty")}
    keys["temperature"] = recipe["temperature"] if temperature is None else temperature
    return SamplingParameters(max_tokens=max_tokens, seed=seed, **keys)


def settings_of(
    recipe: Recipe, data_keys: Sequence[str], model: str, backend: str, n: int, sampling: "SamplingParameters",
    first: list[int],
) -> dict[str, Any]:  # fmt: skip
    """Return what rows of one file have in common, all of which decides the completions."""
    prompt = hashlib.sha256(json.dumps(first).encode()).hexdigest()[:16]  # by template, system prompt and tokenizer
    return {
        "model": model, "backend": backend, "num_generations": n,
        **{key: recipe[key] for key in data_keys if recipe[key]}, **vars(sampling), "first_prompt": prompt,
    }  # fmt: skip


class Progress:
    """Say every few seconds how far it is."""

    def __init__(self, prompts: int):
        self._prompts, self._next = prompts, time.monotonic() + _PROGRESS_SECONDS

    def __call__(self, outcome: "Generated") -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _PROGRESS_SECONDS
            failed = f", {outcome.failed.total()} failed" if outcome.failed else ""
            say(f"{outcome.before + outcome.completed} of {self._prompts} prompts{failed}")


def _report(outcome: "Generated", options: argparse.Namespace, prompts: int, repo: str | None) -> int:
    """Print what became of the prompts, publish a complete file, and return the exit code."""
    there = outcome.before + outcome.completed
    say(f"{_times(there, options.num_generations)} in {display_path(options.out)}")
    if not outcome.complete:
        report_failures(outcome)
        return 1
    if repo is not None:
        from grpo_recipes.console.publish.push import push_dataset

        message = f"{_times(prompts, options.num_generations)} by grpo generate"
        try:
            say(f"published at {push_dataset(repo, options.out, not options.public, message)}")
        except Exception as error:  # whatever the hub's client raises: the file is complete
            from grpo_recipes.fetch.hub import error_line

            print(
                f"grpo: the push to {repo} failed: {error_line(error)}; the same command tries again", file=sys.stderr
            )
            return 1
    return 0


def report_failures(outcome: "Generated") -> None:
    """Print why prompts have no completions, and what to do."""
    reasons = [f"{count} prompts failed: {reason}" for reason, count in outcome.failed.most_common(3)]
    more = [f"{len(outcome.failed) - 3} other reasons"] if len(outcome.failed) > 3 else []
    left = [f"the server is gone, and {outcome.skipped} were not tried"] if outcome.skipped else []
    for line in [*reasons, *more, *left, "run the same command again, which tries what is missing"]:
        print(f"grpo: {line}", file=sys.stderr)


def _times(prompts: int, n: int) -> str:
    return f"{prompts} prompts" if n == 1 else f"{prompts} prompts x {n} completions"
