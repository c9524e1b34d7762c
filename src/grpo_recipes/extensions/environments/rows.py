"""The prompts of a run with environments: one row for each episode, with its environment, arguments and seed."""

import hashlib
import json
from functools import partial

from datasets import Dataset

from grpo_recipes.data.problems import Counts
from grpo_recipes.data.prompts import Prompts
from grpo_recipes.errors import config_error
from grpo_recipes.extensions.environments.recipe import environments_of, episodes_of_each
from grpo_recipes.recipe.configs import ScriptArguments


def training_episodes(args: ScriptArguments, seed: int) -> Dataset:
    """Return ``environment_episodes`` rows, whose seeds follow from the run's."""
    return _episode_rows(args, args.environment_episodes, f"{seed}/", 0)


def evaluation_episodes(args: ScriptArguments) -> Dataset:
    """Return ``environment_eval_episodes`` rows, the same for every run and none of them among those to train on."""
    return _episode_rows(args, args.environment_eval_episodes, "", 1)


def _episode_rows(args: ScriptArguments, count: int, prefix: str, parity: int) -> Dataset:
    """Return rows whose seeds are even or odd, so that those of two sets differ."""
    rows, recipe = [], partial(getattr, args)
    for (spec, arguments, _), share in zip(environments_of(recipe), episodes_of_each(recipe, count), strict=True):
        for index in range(share):
            digest = hashlib.sha256(f"{prefix}{spec}/{index}".encode()).digest()
            number = (int.from_bytes(digest[:4], "big") >> 2) * 2 + parity
            prompt = [{"role": "user", "content": spec}]  # replaced by what the environment says first
            text = json.dumps(arguments, sort_keys=True)
            rows.append({"prompt": prompt, "environment": spec, "arguments": text, "seed": number})
    return Dataset.from_list(rows)


def episode_prompts(rows: Dataset, args: ScriptArguments, least: int, title: str = "") -> Prompts:
    """Return the rows of episodes; refuse fewer than a step needs."""
    if len(rows) < least:
        what = f"{len(rows)} episodes, one step needs {least}"
        raise config_error("environment_episodes", what, f"write {least} or more")
    names = ", ".join(spec for spec, _, _ in environments_of(partial(getattr, args)))
    return Prompts(rows, Counts(read=len(rows)), names, f"{title}{len(rows)} episodes of {names}")
