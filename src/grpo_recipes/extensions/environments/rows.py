"""The prompts of a run with environments: one row per episode, with its environment, arguments and seed."""

import hashlib
import json
from functools import partial

from datasets import Dataset

from grpo_recipes.data.problems import Counts
from grpo_recipes.data.prompts import Prompts
from grpo_recipes.errors import config_error
from grpo_recipes.extensions.environments.recipe import list_episode_environments, split_episodes
from grpo_recipes.recipe.configs import ScriptArguments


def make_training_rows(args: ScriptArguments, seed: int) -> Dataset:
    """Build a dataset of ``environment_episodes`` rows: environment, arguments, and a seed derived from ``seed``."""
    return _make_episode_rows(args, args.environment_episodes, f"{seed}/", 0)


def make_evaluation_rows(args: ScriptArguments) -> Dataset:
    """Build a dataset of ``environment_eval_episodes`` rows: equal in every run, and never used for training."""
    return _make_episode_rows(args, args.environment_eval_episodes, "", 1)


def _make_episode_rows(args: ScriptArguments, count: int, prefix: str, parity: int) -> Dataset:
    """Return ``count`` rows, divided among the environments; each seed derives from ``prefix``, environment and index.

    ``parity`` is 0 for even seeds, to train on, and 1 for odd seeds, to evaluate on, so the two sets differ.
    """
    rows, recipe = [], partial(getattr, args)
    for (spec, arguments, _), episodes in zip(
        list_episode_environments(recipe), split_episodes(recipe, count), strict=True
    ):
        for index in range(episodes):
            digest = hashlib.sha256(f"{prefix}{spec}/{index}".encode()).digest()
            seed = (int.from_bytes(digest[:4], "big") >> 2) * 2 + parity
            prompt = [{"role": "user", "content": spec}]  # replaced by the environment's first messages
            text = json.dumps(arguments, sort_keys=True)
            rows.append({"prompt": prompt, "environment": spec, "arguments": text, "seed": seed})
    return Dataset.from_list(rows)


def make_prompts(rows: Dataset, args: ScriptArguments, least: int, title: str = "") -> Prompts:
    """Wrap a dataset of episodes in Prompts; raise ConfigError if it has less than ``least`` rows.

    The Prompts count the rows, list the environments, and have a description that begins with ``title``.
    """
    if len(rows) < least:
        message = f"{len(rows)} episodes, but one step needs {least}"
        raise config_error("environment_episodes", message, f"set {least} or more")
    names = ", ".join(spec for spec, _, _ in list_episode_environments(partial(getattr, args)))
    return Prompts(rows, Counts(read=len(rows)), names, f"{title}{len(rows)} episodes of {names}")
