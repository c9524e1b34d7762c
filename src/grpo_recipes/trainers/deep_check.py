"""Check that configs, tokenizer, data and rewards work together (`grpo check --deep`).

It takes seconds, needs no GPU and downloads nothing.
"""

import contextlib
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from peft import LoraConfig
from transformers import GenerationConfig, PreTrainedModel
from trl import TrlParser, get_peft_config

from grpo_recipes import smoke
from grpo_recipes.data.prompts import make_renderer, shorten
from grpo_recipes.errors import ConfigError, Problem, config_error, translate_errors
from grpo_recipes.fetch.assets import MODEL, Assets, find_assets
from grpo_recipes.paths import cache_root, shell_path
from grpo_recipes.plan.devices import derive_batch
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.configs import CONFIGS, CONFIGS_OF_ROWS, GRPOConfig, ModelConfig
from grpo_recipes.recipe.registry import list_reward_models, reward_keys, rewards
from grpo_recipes.recipe.sources import extension_of, source_of, starts_from_rows
from grpo_recipes.recipe.tasks import added_task
from grpo_recipes.recipe.user_code import source_path
from grpo_recipes.rewards.probe import describe_unpaid, find_problems, probe_rewards, read_first_rows
from grpo_recipes.runs.rundir import write_atomically
from grpo_recipes.trainers.entry import load_callbacks
from grpo_recipes.trainers.model import as_config_error, build_without_weights, check_adapter, load_tokenizer
from grpo_recipes.trainers.reward_models import load_reward_tokenizer
from grpo_recipes.trainers.teacher import check_teacher_tokenizer

P = ParamSpec("P")
Result = TypeVar("Result")
_MOST_FILES = 200  # files of a folder of rewards that the digest covers
_MANY_CHARACTERS = 1_000_000  # characters of prompts from which counting tokens takes seconds
SAMPLE = 64  # number of rows of the dataset that are checked
ANSWER = "<answer>0</answer>"


def check_deeply(recipe: Recipe, environment: Mapping[str, str]) -> list[str]:
    """Build the configs, and try tokenizer, prompts, callbacks and rewards of a recipe that passed ``grpo check``.

    Return the lines to print. Raise ConfigError with all problems that were found.
    """
    sources = find_assets(recipe, environment)
    problems: list[Problem] = []

    def collect_problems(check: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result | None:
        """Return the result of a check, or None if it raises ConfigError.

        The problems of the error are added to ``problems``. Other errors are raised.
        """
        try:
            return check(*args, **kwargs)
        except ConfigError as error:
            problems.extend(error.problems)
            return None

    lines = collect_problems(_describe_assets, recipe, sources) or []
    configs = collect_problems(_build_configs, recipe, sources)
    if configs and not sources.missing:
        collect_problems(_check_teacher, DeepCheck(recipe, *configs, sources))
        collect_problems(_check_reward_models, DeepCheck(recipe, *configs, sources))
    callbacks = collect_problems(load_callbacks, recipe.run.callbacks)
    source = extension_of(recipe.__getitem__)
    data_lines: list[str] = []
    has_data = all(asset.kind == MODEL for asset in sources.missing)
    reads_datasets = source_of(recipe.__getitem__) is None
    if reads_datasets and has_data and (sample := collect_problems(read_first_rows, recipe, SAMPLE, sources.lookup)):
        rows, counts = sample
        if configs and not sources.missing:
            data_lines += collect_problems(_check_prompts, rows, DeepCheck(recipe, *configs, sources)) or []
        if rows and not added_task(recipe) and not starts_from_rows(recipe.__getitem__):
            data_lines += collect_problems(_check_rewards, recipe, rows, counts.left_out, environment) or []
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
    assert configs is not None  # otherwise there is a problem
    lines.append("configs    TRL accepts every value")
    if callbacks:
        lines.append(f"callbacks  {', '.join(recipe.run.callbacks)}")
    if recipe.lora.use_peft:
        lines.append(f"adapter    on {_count_adapted_layers(recipe, *configs)} layers")
    if source is not None and (deep_check := source.load("deep_check")):
        lines += deep_check(DeepCheck(recipe, *configs, sources))
    return lines + data_lines


@dataclass(frozen=True)
class DeepCheck:
    """The parts of a recipe for its deep check, with methods to load others. Extensions' deep checks receive it."""

    recipe: Recipe  # the checked recipe
    args: GRPOConfig  # TRL's arguments
    model_args: ModelConfig  # the model's arguments
    sources: Assets  # the model and datasets on this machine

    def tokenizer(self) -> Any:
        """Load the model's tokenizer. Raise ConfigError if it can't be loaded."""
        where, fix = self.recipe.location("model_name_or_path"), "set a model with tokenizer files"
        with as_config_error((OSError, ValueError), where, "the tokenizer can't be loaded", fix):
            if _is_smoke(self.recipe):
                return smoke.build_tokenizer(self.recipe.model.name)
            return load_tokenizer(self.model_args, self.args)

    def stops(self) -> list[int]:
        """Return the ids of the end tokens in the model's generation config. The built-in smoke model has none.

        Without a generation_config.json, they come from the model's config.json.
        """
        if _is_smoke(self.recipe):
            return []
        if _has_generation_config(self.model_args):
            config = GenerationConfig.from_pretrained(Path(str(self.model_args.model_name_or_path)))
        else:
            config = build_without_weights(self.model_args, self.args.trust_remote_code).generation_config
        return [config.eos_token_id] if isinstance(config.eos_token_id, int) else config.eos_token_id or []


def _describe_assets(recipe: Recipe, sources: Assets) -> list[str]:
    """Return a line for each downloaded model and dataset. Raise ConfigError for the missing ones."""
    if sources.missing:
        fix = f"run grpo fetch {shell_path(recipe.path)}"
        raise ConfigError(*[Problem(asset.where, f"{asset} is not on this machine", fix) for asset in sources.missing])
    return [f"{source.kind:<10} {source.id} at {source.commit[:12]}" for source in sources.present]


def _build_configs(recipe: Recipe, sources: Assets) -> tuple[GRPOConfig, ModelConfig]:
    """Build the training and model arguments of a training process, on CPU and with the model on this machine.

    Raise ConfigError if TRL rejects the recipe.
    """
    batch = derive_batch(recipe, 1)
    with tempfile.TemporaryDirectory() as folder:
        frozen = Path(folder) / "recipe.yaml"
        frozen.write_text(recipe.as_yaml())
        split = ["--per_device_train_batch_size", str(batch.per_device)]
        split += ["--gradient_accumulation_steps", str(batch.accumulation)]
        argv = ["--config", str(frozen), "--output_dir", folder, "--use_cpu", "true", *split]
        with as_config_error(
            (ValueError, TypeError), recipe.path.name, "TRL rejects the recipe", "change the keys it names"
        ):
            configs = CONFIGS_OF_ROWS if added_task(recipe) else CONFIGS
            _, args, model_args = TrlParser(configs, allow_abbrev=False).parse_args_and_config(argv)
    if sources.model is not None:
        model_args.model_name_or_path, model_args.model_revision = sources.model.path, "main"
    return args, model_args


def _check_teacher(check: DeepCheck) -> None:
    """Raise ConfigError if the recipe's teacher has another tokenizer. Do nothing without a teacher on this machine."""
    if asset := check.sources.find_model(check.recipe.loss.teacher_model_name_or_path):
        check_teacher_tokenizer(asset.path, check.tokenizer(), check.args.trust_remote_code)


def _check_reward_models(check: DeepCheck) -> None:
    """Raise ConfigError if a reward model on this machine can't be a reward."""
    for name in list_reward_models(check.recipe.rewards.funcs):
        if asset := check.sources.find_model(name):
            load_reward_tokenizer(name, asset.path, check.args.trust_remote_code)


def _is_smoke(recipe: Recipe) -> bool:
    """Return whether the recipe trains the built-in smoke model. Building all of it takes a minute."""
    return recipe.model.name.startswith(smoke.SMOKE_SCHEME)


def _count_adapted_layers(recipe: Recipe, args: GRPOConfig, model_args: ModelConfig) -> int:
    """Return the number of layers that the LoRA keys select. Raise ConfigError for unknown or tied layers."""
    model: PreTrainedModel
    if _is_smoke(recipe):
        model = smoke.build_model(smoke.build_tokenizer(), tied=recipe.model.name.endswith("-tied"))
    else:
        model = build_without_weights(model_args, args.trust_remote_code)

    def add_locations(error: ConfigError) -> ConfigError:
        """Return the same problems, each with the recipe's line of its key."""
        problems = [replace(problem, where=recipe.location(problem.where)) for problem in error.problems]
        return ConfigError(*problems)

    with translate_errors(ConfigError, add_locations):
        config = get_peft_config(model_args)
        assert isinstance(config, LoraConfig)  # the recipe has use_peft
        return check_adapter(model, config)


def _has_generation_config(model_args: ModelConfig) -> bool:
    """Return whether the model's folder has a generation_config.json. False if the model is a hub id."""
    return (Path(str(model_args.model_name_or_path)) / "generation_config.json").is_file()


def _check_prompts(rows: list[dict[str, Any]], check: DeepCheck) -> list[str]:
    """Return lines about the prompts of ``rows``: token lengths, end of an answer in the template, first prompt.

    Raise ConfigError without rows, if no prompt fits ``max_prompt_length``, or if the chat template can't render one or
    leaves out a message.
    """
    recipe = check.recipe
    if not rows:
        problem = "the dataset has no rows with a prompt and a solution"
        raise config_error(recipe.path.name, problem, "check its columns")
    tokenizer = check.tokenizer()
    renderer = make_renderer(recipe.model.chat_template, tokenizer, recipe.model.chat_template_kwargs)
    prompts = [row["prompt"] for row in rows]
    characters = sum(len(message["content"]) for prompt in prompts for message in prompt)
    if characters > _MANY_CHARACTERS:
        message = f"grpo: counting the tokens of {len(prompts)} prompts, {characters:,} characters in all"
        print(message, file=sys.stderr, flush=True)
    lengths = [len(ids) for ids in renderer.ids(prompts)]
    limit = recipe.data.max_prompt_length
    fitting = sum(length <= limit for length in lengths) if limit else len(lengths)
    if not fitting:
        problem = f"none of {len(lengths)} prompts fits, the shortest has {min(lengths)} tokens"
        fix = f"set max_prompt_length: {max(lengths)}, the longest of these, or more"
        raise config_error(recipe.location("max_prompt_length"), problem, fix)
    turn = [*prompts[0], {"role": "assistant", "content": ANSWER}]
    text = str(tokenizer.apply_chat_template(turn, tokenize=False, **renderer.template_kwargs))
    end_of_turn = text.rpartition(ANSWER)[2]
    ids = check.stops() if _has_generation_config(check.model_args) else []
    stops = [str(tokenizer.eos_token), *tokenizer.convert_ids_to_tokens(ids)]
    end = next((stop for stop in stops if stop in end_of_turn), "")
    note = f"note: the template ends an answer with {end_of_turn.strip()!r}, a completion ends at "
    note += " or ".join(dict.fromkeys(stops))
    renderer.check(prompts, set(), recipe.model.system_prompt)
    return [
        f"prompts    {fitting} of the first {len(lengths)} fit; {min(lengths)} to {max(lengths)} tokens",
        f"answers    end with {end}" if end else note,
        *(f"note: {note}" for note in renderer.notes(prompts[0])),
        f"first prompt, {lengths[0]} tokens:\n{shorten(renderer.text(prompts[0]))}",
    ]


def _check_rewards(
    recipe: Recipe, rows: list[dict[str, Any]], left_out: Mapping[str, str], environment: Mapping[str, str]
) -> list[str]:
    """Call each reward with right and wrong answers to these rows, and return a line with its means.

    If rows, keys and reward files are unchanged, the lines come from a cache file. Otherwise they are written to it.
    ``left_out`` has the columns that rewards do not get, with the reasons. The first line lists them. Raise ConfigError
    if a reward fails, if no reward distinguishes right from wrong answers, and for the other problems of
    ``find_problems``.
    """
    file = _get_result_file(recipe, rows, environment)
    with contextlib.suppress(OSError, ValueError):
        if file is not None:
            return [f"{line} (remembered: rows, keys and files are unchanged)" for line in json.loads(file.read_text())]
    results = probe_rewards(recipe, rows, left_out)
    if problems := find_problems(recipe, rows, results):
        raise ConfigError(*problems)

    def mean(value: float | None) -> str:
        """Return a mean reward as text."""
        return "without a score" if value is None else f"{value:.3f}"

    columns = ", ".join(f"{name} ({reason})" for name, reason in left_out.items())
    lines = [f"columns    not passed to rewards: {columns}"] * bool(columns) + [
        f"reward     {result.reward}: right answers {mean(result.right_mean)}, wrong answers {mean(result.wrong_mean)}"
        + (f"; {result.skipped} further completions were not tried, since it is slow" if result.skipped else "")
        + (f"; note: it {describe_unpaid(result)}" if result.unpaid else "")
        for result in results
    ]
    if file:
        with contextlib.suppress(OSError):  # a full or read-only cache costs only time
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, json.dumps(lines))
    return lines


def _get_result_file(recipe: Recipe, rows: list[dict[str, Any]], environment: Mapping[str, str]) -> Path | None:
    """Return the cache file for the reward check of these rows, keys and files.

    Return None for rewards that may call a server, and for the recipe of a run.
    """
    if recipe.rewards.environment or (recipe.path.parent / "run.json").exists():
        return None
    digest = hashlib.sha256()
    keys = {key for key in recipe.values if key.startswith("reward_")}
    keys |= {*reward_keys(recipe.rewards.funcs), "system_prompt"}
    digest.update(json.dumps([rows, {key: recipe[key] for key in sorted(keys)}], default=repr).encode())
    folders = {path.parent for name in recipe.rewards.funcs if ":" in name and (path := source_path(name))}
    folders.add(Path(__file__).parents[1] / "rewards")
    builtin = rewards()
    modules = (builtin[name].function.partition(":")[0] for name in recipe.rewards.funcs if name in builtin)
    folders |= {Path(spec.origin).parent for module in modules if (spec := find_spec(module)) and spec.origin}
    for folder in sorted(folders):
        for path in sorted(folder.glob("*.py"))[:_MOST_FILES]:
            digest.update(path.name.encode() + path.read_bytes())
    return cache_root(environment) / "checked-rewards" / f"{digest.hexdigest()[:32]}.json"
