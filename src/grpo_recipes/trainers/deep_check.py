"""Whether configs, tokenizer, data and rewards work together (`grpo check --deep`). Seconds; nothing is downloaded."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trl import TrlParser, get_peft_config

from grpo_recipes import smoke
from grpo_recipes.data.problems import Message
from grpo_recipes.data.prompts import Renderer, use_template
from grpo_recipes.errors import ConfigError, Problem, collect, config_error
from grpo_recipes.fetch.assets import Assets, find_assets
from grpo_recipes.paths import shown
from grpo_recipes.plan.devices import derive_batch
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.configs import CONFIGS
from grpo_recipes.rewards.probe import probe_rewards, problems_of, sample_rows
from grpo_recipes.trainers.entry import load_callbacks
from grpo_recipes.trainers.model import check_adapter, load_tokenizer, skeleton

SAMPLE = 64  # rows of the dataset that are looked at
_ANSWER = "<answer>0</answer>"


def look_deep(recipe: Recipe, environment: Mapping[str, str]) -> list[str]:
    """Build, load and try everything of a checked recipe that needs no GPU, and return what was seen.

    ``environment`` has the user's caches. A ConfigError reports everything that does not work, one line a fault.
    """
    sources = find_assets(recipe, environment)
    seen = collect((_present, _configs, _callbacks), lambda look: look(recipe, sources))
    seen.append(_adapter(recipe, sources))
    rows = sample_rows(recipe, SAMPLE, sources.lookup)
    seen += collect((_prompts, _rewards), lambda look: look(recipe, sources, rows))
    return [line for lines in seen for line in lines]


def _present(recipe: Recipe, sources: Assets) -> list[str]:
    if sources.missing:
        fix = f"run grpo fetch {shlex.quote(shown(recipe.path))}"
        raise ConfigError(*[Problem(asset.where, f"{asset} is not on this machine", fix) for asset in sources.missing])
    return [f"{source.kind:<10} {source.id} at {source.commit[:12]}" for source in sources.found]


def _configs(recipe: Recipe, sources: Assets) -> list[str]:
    _local_configs(recipe, sources)
    return ["configs    TRL takes every value"]


def _local_configs(recipe: Recipe, sources: Assets) -> tuple[Any, Any]:
    """Return training and model arguments as a training process builds them, on CPU and with the model found here."""
    batch = derive_batch(recipe, 1)
    with tempfile.TemporaryDirectory() as folder:
        frozen = Path(folder) / "recipe.yaml"
        frozen.write_text(recipe.as_yaml())
        split = ["--per_device_train_batch_size", str(batch.per_device)]
        split += ["--gradient_accumulation_steps", str(batch.accumulation)]
        argv = ["--config", str(frozen), "--output_dir", folder, "--use_cpu", "true", *split]
        try:
            _, args, model_args = TrlParser(CONFIGS, allow_abbrev=False).parse_args_and_config(argv)
        except (ValueError, TypeError) as error:
            what = f"TRL refuses the recipe: {_one_line(error)}"
            raise config_error(recipe.path.name, what, "change the keys it names") from error
    if sources.model is not None:
        model_args.model_name_or_path, model_args.model_revision = sources.model.path, "main"
    return args, model_args


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _callbacks(recipe: Recipe, sources: Assets) -> list[str]:
    load_callbacks(recipe["callbacks"])
    return [f"callbacks  {', '.join(recipe['callbacks'])}"] if recipe["callbacks"] else []


def _is_smoke(recipe: Recipe) -> bool:
    """Return whether the model is the built-in one, which takes a minute to make: its parts are built here instead."""
    return bool(recipe["model_name_or_path"].startswith(smoke.SMOKE_SCHEME))


def _adapter(recipe: Recipe, sources: Assets) -> list[str]:
    """Count the layers that the LoRA keys name in the model."""
    if not recipe["use_peft"]:
        return []
    args, model_args = _local_configs(recipe, sources)
    if _is_smoke(recipe):
        model = smoke.build_model(smoke.build_tokenizer(), tied=recipe["model_name_or_path"].endswith("-tied"))
    else:
        model = skeleton(model_args, args.trust_remote_code)
    try:
        layers = check_adapter(model, get_peft_config(model_args))
    except ConfigError as error:
        raise ConfigError(*[replace(one, where=recipe.place(one.where)) for one in error.problems]) from error
    return [f"adapter    on {layers} layers"]


def _prompts(recipe: Recipe, sources: Assets, rows: list[dict[str, Any]]) -> list[str]:
    """Render the first prompt as the model sees it, and measure all that were looked at."""
    if not rows:
        what = "the dataset has no rows with a prompt and a solution"
        raise config_error(recipe.path.name, what, "look at its columns")
    tokenizer = _tokenizer(recipe, sources)
    use_template(recipe["chat_template"], tokenizer)
    renderer = Renderer(tokenizer, recipe["chat_template_kwargs"] or {})
    prompts = [row["prompt"] for row in rows]
    lengths = renderer.lengths(prompts)
    limit = recipe["max_prompt_length"]
    fitting = sum(length <= limit for length in lengths) if limit else len(lengths)
    if not fitting:
        what = f"none of {len(lengths)} prompts fits, the shortest has {min(lengths)} tokens"
        raise config_error(recipe.place("max_prompt_length"), what, f"write {max(lengths)} or more")
    return [
        f"prompts    {fitting} of the first {len(lengths)} fit; {min(lengths)} to {max(lengths)} tokens",
        _end_of_turn(renderer, prompts[0]),
        f"first prompt, {lengths[0]} tokens:\n{renderer.text(prompts[0])}",
    ]


def _tokenizer(recipe: Recipe, sources: Assets) -> Any:
    if _is_smoke(recipe):
        return smoke.build_tokenizer()
    args, model_args = _local_configs(recipe, sources)
    try:
        return load_tokenizer(model_args, args)
    except (OSError, ValueError) as error:
        what = f"the tokenizer cannot be loaded: {_one_line(error)}"
        raise config_error(recipe.place("model_name_or_path"), what, "name a model with its tokenizer files") from error


def _end_of_turn(renderer: Renderer, prompt: list[Message]) -> str:
    """Compare the token that ends a completion with the one by which the template ends an answer."""
    tokenizer = renderer.tokenizer
    turn = [*prompt, {"role": "assistant", "content": _ANSWER}]
    text = str(tokenizer.apply_chat_template(turn, tokenize=False, **renderer.template_kwargs))
    after = text.rpartition(_ANSWER)[2]
    if str(tokenizer.eos_token) in after:
        return f"answers    end with {tokenizer.eos_token}"
    return f"note: the template ends an answer with {after.strip()!r}, a completion ends at {tokenizer.eos_token}"


def _rewards(recipe: Recipe, sources: Assets, rows: list[dict[str, Any]]) -> list[str]:
    """Show the rewards right and wrong answers to these rows."""
    findings = probe_rewards(recipe, rows)
    if problems := problems_of(recipe, rows, findings):
        raise ConfigError(*problems)
    return [
        f"reward     {one.reward}: right answers {_mean(one.right_mean)}, wrong ones {_mean(one.wrong_mean)}"
        for one in findings
    ]


def _mean(value: float | None) -> str:
    return "without a score" if value is None else f"{value:.3f}"
