"""The rows of a run whose prompts come from environments: which environment, and the seed of the episode."""

import hashlib
import json
from functools import partial

from datasets import Dataset

from grpo_recipes.recipe.configs import ScriptArguments
from grpo_recipes.recipe.registry import environments_of


def training_episodes(args: ScriptArguments, seed: int) -> Dataset:
    """Return ``environment_episodes`` rows, whose seeds follow from the run's."""
    return _rows(args, args.environment_episodes, f"{seed}/", 0)


def evaluation_episodes(args: ScriptArguments) -> Dataset:
    """Return ``environment_eval_episodes`` rows, the same for every run and none of them among those to train on."""
    return _rows(args, args.environment_eval_episodes, "", 1)


def _rows(args: ScriptArguments, count: int, prefix: str, parity: int) -> Dataset:
    """Return rows whose seeds are even or odd, so that those of two sets differ."""
    rows, made, share = [], 0, 0.0
    for spec, arguments, weight in environments_of(partial(getattr, args)):
        share += weight
        for index in range(made, round(share * count)):
            digest = hashlib.sha256(f"{prefix}{spec}/{index - made}".encode()).digest()
            number = (int.from_bytes(digest[:4], "big") >> 2) * 2 + parity
            prompt = [{"role": "user", "content": spec}]  # replaced by what the environment says first
            text = json.dumps(arguments, sort_keys=True)
            rows.append({"prompt": prompt, "environment": spec, "arguments": text, "seed": number})
        made = round(share * count)
    return Dataset.from_list(rows)
