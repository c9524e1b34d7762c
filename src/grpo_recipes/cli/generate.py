"""The command `grpo generate`: the prompts of a recipe's dataset through a server that runs, to a JSONL file."""

import argparse
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from grpo_recipes.cli import chosen_recipe, command, option, switch
from grpo_recipes.errors import ConfigError, Problem, config_error, translate
from grpo_recipes.fetch.assets import find_assets
from grpo_recipes.fetch.hub import EXIT_INTERRUPTED
from grpo_recipes.paths import shown
from grpo_recipes.plan.commands import hub_environment
from grpo_recipes.plan.ports import DEFAULT_PORTS
from grpo_recipes.process.reports import say
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.registry import SERVER_BACKENDS, environments_of, uses_atropos
from grpo_recipes.smoke import SMOKE_SCHEME

if TYPE_CHECKING:
    from grpo_recipes.rollouts.generate import Generated
    from grpo_recipes.rollouts.openai import CompletionClient, SamplingParameters

KEY_VARIABLE = "OPENAI_API_KEY"
BACKEND = option(
    "--backend", choices=list(SERVER_BACKENDS), default=SERVER_BACKENDS[0], help="what runs there (vllm_server)"
)
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
    option("--batch-size", type=int, default=32, metavar="N", help="completions in flight at most (32)"),
    option("--timeout", type=float, default=600.0, metavar="SECONDS", help="for a completion (600)"),
    option("--attempts", type=int, default=4, metavar="N", help="for each completion (4)"),
    option("--wait", type=float, default=60.0, metavar="SECONDS", help="for a server that starts (60)"),
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
    _need_dataset(recipe, options)
    os.environ.update(hub_environment(os.environ))
    from grpo_recipes.rollouts.generate import generate as draw
    from grpo_recipes.rollouts.generate import opened

    host, port = recipe["vllm_server_host"], recipe["vllm_server_port"] or DEFAULT_PORTS["vllm_server_port"]
    bounds = {"batch_size": options.batch_size, "timeout": options.timeout, "attempts": options.attempts}
    client = connect(options.base_url or f"http://{host}:{port}", options, options.wait, **bounds)
    served = str(client.model)
    repo = None
    if options.push is not None:
        from grpo_recipes.publish.push import need_dataset

        repo = need_dataset(options.push, "--push", os.environ)
    rows, prompts = _prompts(recipe, options.limit)
    sampling = sampling_of(recipe, options.temperature, recipe["max_completion_length"], recipe["seed"])
    settings = _settings(recipe, served, options, sampling, prompts[0])
    with opened(options.out, rows, settings) as file:
        old = f"; {len(file.done)} are there already" if file.done else ""
        say(f"{served} at {client.root}: {_times(len(rows), options.num_generations)} -> {shown(options.out)}{old}")
        try:
            outcome = draw(client, prompts, options.num_generations, sampling, file, _Progress(len(rows)))
        except KeyboardInterrupt:
            say(f"interrupted: {len(file.done)} of {len(rows)} prompts are in the file; the same command goes on")
            return EXIT_INTERRUPTED
    return _report(outcome, options, len(rows), repo)


def _check(options: argparse.Namespace) -> None:
    """Refuse numbers that mean nothing."""
    least = {
        "num_generations": 1,
        "limit": 1,
        "batch_size": 1,
        "attempts": 1,
        "timeout": 1e-3,
        "wait": 0,
        "temperature": 0,
    }
    given = {name: getattr(options, name) for name in least}
    problems = [
        Problem(
            f"--{name.replace('_', '-')}", f"is {value:g}", f"write {max(1, least[name]) if least[name] else 0} or more"
        )
        for name, value in given.items()
        if value is not None and not value >= least[name]
    ]
    if options.public and options.push is None:
        problems.append(Problem("--public", "changes nothing without --push", "add --push REPO, or remove it"))
    if problems:
        raise ConfigError(*problems)


def _need_dataset(recipe: Recipe, options: argparse.Namespace) -> None:
    """Refuse a recipe whose prompts do not come from a dataset, and what its dataset has no use for."""
    if environments_of(recipe.__getitem__) or uses_atropos(recipe.__getitem__):
        fix = "name a recipe with a dataset_name"
        raise config_error(shown(recipe.path), "its prompts come from an environment, not from a dataset", fix)
    if options.split is not None and recipe["dataset_mixture"]:
        fix = "leave it out, or name one of them with --dataset_name"
        raise config_error("--split", "each dataset of dataset_mixture has its own split", fix)


def connect(url: str, options: argparse.Namespace, wait: float, **bounds: Any) -> "CompletionClient":
    """Return a client of a server that somebody started, once it serves the wanted model; errors name our flags."""
    from grpo_recipes.rollouts.openai import CompletionClient

    names = {"base_url": "--base-url", "backend": "--backend"}

    def in_flags(error: ConfigError) -> ConfigError:
        return ConfigError(*(Problem(names.get(one.where, one.where), one.what, one.fix) for one in error.problems))

    key = os.environ.get(KEY_VARIABLE)
    with translate(ConfigError, in_flags):
        client = CompletionClient(url, options.backend, options.model, key, say=say, **bounds)
        client.ready(wait)
    return client


def _prompts(recipe: Recipe, limit: int | None) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Return the rows of the dataset as training reads them, and each prompt as training renders it."""
    from datasets import disable_progress_bars

    from grpo_recipes.data.prompts import load_prompts, renderer_of

    disable_progress_bars()
    args = SimpleNamespace(**{key: value.value for key, value in recipe.values.items()})
    sources, kwargs = find_assets(recipe, os.environ), recipe["chat_template_kwargs"]
    tokenizer = _tokenizer(recipe, sources.model.path if sources.model else recipe["model_name_or_path"])
    found = load_prompts(args, tokenizer, 1, recipe["seed"], kwargs, sources.lookup)
    rows = found.dataset.select(range(min(limit or len(found.dataset), len(found.dataset)))).to_list()
    renderer, ids = renderer_of(recipe["chat_template"], tokenizer, kwargs), []
    for start in range(0, len(rows), _BATCH):
        ids += renderer.ids([row["prompt"] for row in rows[start : start + _BATCH]])
    return rows, ids


def _tokenizer(recipe: Recipe, name: str) -> Any:
    """Return the tokenizer of the recipe's model, a folder or a hub id."""
    if recipe["model_name_or_path"].startswith(SMOKE_SCHEME):
        from grpo_recipes.smoke import build_tokenizer

        return build_tokenizer(mafia=recipe["model_name_or_path"] == "smoke:mafia")
    from transformers import AutoTokenizer

    def unreadable(error: Exception) -> ConfigError:
        what = f"the tokenizer cannot be loaded ({' '.join(str(error).split())[:200]})"
        return config_error(recipe.place("model_name_or_path"), what, "name a model with its tokenizer files")

    revision = "main" if os.path.isdir(name) else recipe["model_revision"]
    with translate((OSError, ValueError), unreadable):
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=recipe["trust_remote_code"])


def sampling_of(recipe: Recipe, temperature: float | None, max_tokens: int, seed: int | None) -> "SamplingParameters":
    """Return how a recipe samples, at another temperature where one is given."""
    from grpo_recipes.rollouts.openai import SamplingParameters

    keys = {key: recipe[key] or 0 for key in ("top_p", "top_k", "min_p", "repetition_penalty")}
    keys["temperature"] = recipe["temperature"] if temperature is None else temperature
    return SamplingParameters(max_tokens=max_tokens, seed=seed, **keys)


def _settings(
    recipe: Recipe, served: str, options: argparse.Namespace, sampling: "SamplingParameters", first: list[int]
) -> dict[str, Any]:
    """Return what rows of one file have in common, all of which decides the completions."""
    data = {key: recipe[key] for key in ("dataset_name", "dataset_mixture", "dataset_config", "dataset_train_split")}
    rendered = hashlib.sha256(json.dumps(first).encode()).hexdigest()[:16]  # by template, system prompt and tokenizer
    given = {"model": served, "backend": options.backend, "num_generations": options.num_generations}
    return {
        **given,
        **{name: value for name, value in data.items() if value},
        **vars(sampling),
        "first_prompt": rendered,
    }


class _Progress:
    """Say every few seconds how far it is."""

    def __init__(self, prompts: int):
        self._prompts, self._next = prompts, time.monotonic() + _PROGRESS_SECONDS

    def __call__(self, outcome: "Generated") -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _PROGRESS_SECONDS
            failed = f", {outcome.failed.total()} failed" if outcome.failed else ""
            say(f"{outcome.before + outcome.made} of {self._prompts} prompts{failed}")


def _report(outcome: "Generated", options: argparse.Namespace, prompts: int, repo: str | None) -> int:
    """Print what became of the prompts, publish a complete file, and return the exit code."""
    there = outcome.before + outcome.made
    say(f"{_times(there, options.num_generations)} in {shown(options.out)}")
    if not outcome.complete:
        reasons = [f"{count} prompts failed: {reason}" for reason, count in outcome.failed.most_common(3)]
        more = [f"{len(outcome.failed) - 3} other reasons"] if len(outcome.failed) > 3 else []
        left = [f"the server is gone, and {outcome.left} were not tried"] if outcome.left else []
        for line in [*reasons, *more, *left, "run the same command again, which tries what is missing"]:
            print(f"grpo: {line}", file=sys.stderr)
        return 1
    if repo is not None:
        from grpo_recipes.publish.push import push_dataset

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


def _times(prompts: int, n: int) -> str:
    return f"{prompts} prompts" if n == 1 else f"{prompts} prompts x {n} completions"
