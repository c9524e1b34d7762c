"""The command `grpo generate`: sample completions of a recipe's dataset from a running server to a JSONL file.

The same command continues an interrupted file. `grpo eval` and `grpo chat` use the functions of this module too.
"""

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
from grpo_recipes.errors import ConfigError, Problem, config_error, rename_places, translate_errors
from grpo_recipes.fetch.assets import find_assets
from grpo_recipes.fetch.hub import EXIT_INTERRUPTED
from grpo_recipes.paths import display_path
from grpo_recipes.plan.commands import hub_environment
from grpo_recipes.process.reports import say
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.registry import SERVER_BACKENDS
from grpo_recipes.recipe.sources import sampler_of
from grpo_recipes.smoke import SMOKE_SCHEME

if TYPE_CHECKING:
    from grpo_recipes.rollouts.generate import Generated
    from grpo_recipes.rollouts.openai import CompletionClient, SamplingParameters

KEY_VARIABLE = "OPENAI_API_KEY"
BACKEND = option(
    "--backend",
    choices=list(SERVER_BACKENDS),
    default=SERVER_BACKENDS[0],
    help="Kind of server (default: vllm_server)",
)
REQUESTS = (
    option("--batch-size", type=int, default=32, metavar="N", help="Maximum parallel requests (default: 32)"),
    option("--timeout", type=float, default=600.0, metavar="SECONDS", help="Timeout of a completion (default: 600)"),
    option("--attempts", type=int, default=4, metavar="N", help="Attempts per completion (default: 4)"),
    option(
        "--wait", type=float, default=60.0, metavar="SECONDS", help="Time to wait for a starting server (default: 60)"
    ),
)
_DATA_KEYS = ("dataset_name", "dataset_mixture", "dataset_config", "dataset_train_split")
_PROGRESS_SECONDS = 10.0
_BATCH = 1000  # prompts rendered at a time


@command(
    "Sample completions of a recipe's dataset from a running server to a JSONL file",
    option("--out", type=Path, required=True, metavar="FILE", help="Output file; the same command continues it"),
    option("--base-url", metavar="URL", help="URL of the server (default: vllm_server_host and vllm_server_port)"),
    BACKEND,
    option("--model", metavar="NAME", help="Model that the server must have (default: the served model)"),
    option("--num-generations", type=int, default=1, metavar="N", help="Completions per prompt (default: 1)"),
    option("--temperature", type=float, metavar="T", help="Temperature (default: the recipe's; 0 is greedy)"),
    option("--split", metavar="SPLIT", help="Split of dataset_name (default: dataset_train_split)"),
    option("--limit", type=int, metavar="N", help="Use only the first N prompts"),
    *REQUESTS,
    option("--push", metavar="REPO", help="Publish the finished file in this (private) dataset repository of the hub"),
    switch("--public", help="With --push: make a new repository public"),
    takes_recipe=True,
)
def generate(options: argparse.Namespace) -> int:
    """Sample completions of a recipe's prompts from a running server, and write the missing ones to the output file.

    With --push, publish the finished file on the hub. Return 0 if all completions are in the file, 1 if some failed, or
    130 after Ctrl-C. Set the hub's variables in ``os.environ``. Raise ConfigError for wrong options, or if the server
    does not answer.
    """
    _check_options(options)
    if options.split is not None:
        options.flags = [*options.flags, f"--dataset_train_split={options.split}"]
    recipe = chosen_recipe(options)
    if sampler_of(recipe.__getitem__):
        problem = "the command samples without the recipe's environment or tools"
        raise config_error(display_path(recipe.path), problem, "use a recipe with a dataset_name and without tools")
    if options.split is not None and recipe.data.mixture:
        fix = "leave it out, or use one of the datasets with --dataset_name"
        raise config_error("--split", "each dataset of dataset_mixture has its own split", fix)
    os.environ.update(hub_environment(os.environ))
    from grpo_recipes.rollouts.generate import generate as sample_completions
    from grpo_recipes.rollouts.generate import open_completions

    host, port = recipe.server.host, recipe.server.port
    url = options.base_url or f"http://{host}:{port}"
    client = connect_to_server(url, options.backend, options.model, options.wait, **read_request_limits(options))
    model = str(client.model)
    repo = None
    if options.push is not None:
        from grpo_recipes.console.publish import push

        repo = push.check_dataset_repository(options.push, "--push", os.environ)
    rows, prompts = _load_prompts(recipe, options.limit)
    limit = recipe.sampling.max_completion_length
    sampling = make_sampling_parameters(recipe, options.temperature, limit, recipe.batch.seed)
    settings = collect_generation_settings(
        recipe, _DATA_KEYS, model, options.backend, options.num_generations, sampling, prompts[0]
    )
    with open_completions(options.out, rows, settings) as file:
        done = f" ({len(file.done)} already done)" if file.done else ""
        say(
            f"{model} at {client.root}: {_format_counts(len(rows), options.num_generations)}"
            f" -> {display_path(options.out)}{done}"
        )
        try:
            outcome = sample_completions(client, prompts, options.num_generations, sampling, file, Progress(len(rows)))
        except KeyboardInterrupt:
            say(f"interrupted with {len(file.done)} of {len(rows)} prompts done; continue with the same command")
            return EXIT_INTERRUPTED
    return _report_outcome(outcome, options, len(rows), repo)


def find_number_problems(options: argparse.Namespace) -> list[Problem]:
    """Return a problem for each option of `grpo generate` or `grpo eval` whose number is too small; [] if none is."""
    minimums = {name: 1.0 for name in ("num_generations", "limit", "batch_size", "attempts")}
    minimums |= {"timeout": 1e-3, "wait": 0, "temperature": 0}
    problems = []
    for name, minimum in minimums.items():
        value, limit = getattr(options, name), f"{1 if minimum else 0} or more"
        if value is not None and not value >= minimum:
            problems.append(Problem(f"--{name.replace('_', '-')}", f"expected {limit}, got {value:g}", f"use {limit}"))
    return problems


def _check_options(options: argparse.Namespace) -> None:
    """Raise ConfigError if an option has a number that is too small, or if --public is used without --push."""
    problems = find_number_problems(options)
    if options.public and options.push is None:
        problems.append(Problem("--public", "does nothing without --push", "add --push REPO, or remove it"))
    if problems:
        raise ConfigError(*problems)


def read_request_limits(options: argparse.Namespace) -> dict[str, Any]:
    """Return --batch-size, --timeout and --attempts as keyword arguments for ``connect_to_server``."""
    return {"batch_size": options.batch_size, "timeout": options.timeout, "attempts": options.attempts}


def connect_to_server(url: str, backend: str, model: str | None, wait: float, **limits: Any) -> "CompletionClient":
    """Wait at most ``wait`` seconds until the server at ``url`` answers, and return a client of it.

    ``model`` is the model that the server must have, or None for any model. ``limits`` are arguments of the client. The
    API key comes from OPENAI_API_KEY. Raise ConfigError if the server does not answer or has another model.
    """
    from grpo_recipes.rollouts.openai import CompletionClient

    flags = {"base_url": "--base-url", "backend": "--backend"}
    key = os.environ.get(KEY_VARIABLE)
    with translate_errors(ConfigError, lambda error: rename_places(error, flags)):
        client = CompletionClient(url, backend, model, key, say=say, **limits)
        client.ready(wait)
    return client


def _load_prompts(recipe: Recipe, limit: int | None) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Load at most ``limit`` training rows (None: all) and render their prompts like a trainer.

    Return the rows, and the token ids of each row's prompt.
    """
    from datasets import disable_progress_bars

    from grpo_recipes.data.prompts import load_prompts, make_renderer

    disable_progress_bars()
    sources, kwargs = find_assets(recipe, os.environ), recipe.model.chat_template_kwargs
    tokenizer = load_tokenizer(recipe, sources.model.path if sources.model else recipe.model.name)
    loaded = load_prompts(make_trainer_arguments(recipe), tokenizer, 1, recipe.batch.seed, kwargs, sources.lookup)
    rows = loaded.dataset.select(range(min(limit or len(loaded.dataset), len(loaded.dataset)))).to_list()
    return rows, render_prompts(make_renderer(recipe.model.chat_template, tokenizer, kwargs), rows)


def make_trainer_arguments(recipe: Recipe) -> Any:
    """Create an object that has each recipe key as an attribute, for functions that expect a trainer's config."""
    return SimpleNamespace(**{key: value.value for key, value in recipe.values.items()})


def render_prompts(renderer: Any, rows: list[dict[str, Any]]) -> list[list[int]]:
    """Return the token ids of each row's ``prompt``, with the chat template of ``renderer``."""
    ids = list[list[int]]()
    for start in range(0, len(rows), _BATCH):
        ids += renderer.ids([row["prompt"] for row in rows[start : start + _BATCH]])
    return ids


def load_tokenizer(recipe: Recipe, name: str) -> Any:
    """Load and return the tokenizer of ``name``, the model's folder or hub id; raise ConfigError if that fails.

    For a smoke model (``smoke:...``), the tokenizer is built in memory, so its folder need not exist.
    """
    if recipe.model.name.startswith(SMOKE_SCHEME):
        from grpo_recipes.smoke import build_tokenizer

        return build_tokenizer(recipe.model.name)
    from transformers import AutoTokenizer

    def make_load_error(error: Exception) -> ConfigError:
        """Return a ConfigError at the recipe's line with the model, with the message of the original error."""
        message = f"the tokenizer can't be loaded ({' '.join(str(error).split())[:200]})"
        return config_error(recipe.location("model_name_or_path"), message, "use a model with tokenizer files")

    revision = "main" if os.path.isdir(name) else recipe.model.revision
    with translate_errors((OSError, ValueError), make_load_error):
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=recipe.model.trust_remote_code)


def make_sampling_parameters(
    recipe: Recipe, temperature: float | None, max_tokens: int | None, seed: int | None
) -> "SamplingParameters":
    """Return sampling parameters with the recipe's top_p, top_k, min_p and repetition_penalty.

    ``temperature`` None means the recipe's temperature.
    """
    from grpo_recipes.rollouts.openai import SamplingParameters

    keys: dict[str, Any] = {key: recipe[key] or 0 for key in ("top_p", "top_k", "min_p", "repetition_penalty")}
    keys["temperature"] = recipe.sampling.temperature if temperature is None else temperature
    return SamplingParameters(max_tokens=max_tokens, seed=seed, **keys)


def collect_generation_settings(
    recipe: Recipe, data_keys: Sequence[str], model: str, backend: str, n: int, sampling: "SamplingParameters",
    first_prompt: list[int],
) -> dict[str, Any]:  # fmt: skip
    """Return a mapping of all settings that decide the completions; a file continues only with equal settings.

    It contains the model, the kind of server (``backend``), ``n`` completions per prompt, the recipe's ``data_keys``
    that are set, the sampling parameters, and a hash of the token ids of the first prompt.
    """
    # The first prompt stands for chat template, system prompt and tokenizer.
    prompt = hashlib.sha256(json.dumps(first_prompt).encode()).hexdigest()[:16]
    return {
        "model": model, "backend": backend, "num_generations": n,
        **{key: recipe[key] for key in data_keys if recipe[key]}, **vars(sampling), "first_prompt": prompt,
    }  # fmt: skip


class Progress:
    """A callback that prints how many of ``prompts`` are finished, at most every 10 seconds."""

    def __init__(self, prompts: int):
        self._prompts, self._next = prompts, time.monotonic() + _PROGRESS_SECONDS

    def __call__(self, outcome: "Generated") -> None:
        """Print the number of finished and failed prompts if the last line is at least 10 seconds old."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _PROGRESS_SECONDS
            failed = f", {outcome.failed.total()} failed" if outcome.failed else ""
            say(f"{outcome.before + outcome.completed} of {self._prompts} prompts{failed}")


def _report_outcome(outcome: "Generated", options: argparse.Namespace, prompts: int, repo: str | None) -> int:
    """Print the number of completions, push a complete file to ``repo`` unless it is None, and return the exit code.

    The exit code is 0, or 1 if completions are missing or the push failed. Errors of the push are printed, not raised.
    """
    done = outcome.before + outcome.completed
    say(f"{_format_counts(done, options.num_generations)} in {display_path(options.out)}")
    if not outcome.complete:
        report_failures(outcome)
        return 1
    if repo is not None:
        from grpo_recipes.console.publish.push import push_dataset

        message = f"{_format_counts(prompts, options.num_generations)} by grpo generate"
        try:
            say(f"published at {push_dataset(repo, options.out, not options.public, message)}")
        except Exception as error:  # any error of the hub's client; the file is complete
            from grpo_recipes.fetch.hub import format_error_line

            retry = "Try again with the same command"
            print(f"grpo: the push to {repo} failed: {format_error_line(error)}. {retry}", file=sys.stderr)
            return 1
    return 0


def report_failures(outcome: "Generated") -> None:
    """Print to stderr the most frequent reasons why prompts have no completions, and how to continue."""
    reasons = [f"{count} prompts failed: {reason}" for reason, count in outcome.failed.most_common(3)]
    other_reasons = [f"{len(outcome.failed) - 3} other reasons"] if len(outcome.failed) > 3 else []
    untried = [f"the server is gone, and {outcome.skipped} prompts were not tried"] if outcome.skipped else []
    for line in [*reasons, *other_reasons, *untried, "run the same command again to try the missing prompts"]:
        print(f"grpo: {line}", file=sys.stderr)


def _format_counts(prompts: int, n: int) -> str:
    """Return "8 prompts", or "8 prompts x 4 completions" if ``n``, the completions per prompt, is not 1."""
    return f"{prompts} prompts" if n == 1 else f"{prompts} prompts x {n} completions"
