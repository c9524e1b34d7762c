"""The command `grpo eval`: evaluate any model on any dataset and reward, in the same way as a training.

It samples completions (``completions.jsonl``), scores them (``scores.jsonl``), and writes ``eval.json`` and
``eval.html``. The same command continues an interrupted evaluation.
"""

import argparse
import functools
import hashlib
import itertools
import json
import math
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_recipes.cli import command, option, recipe_name
from grpo_recipes.console.chat import ensure_smoke_model, exit_on_sigterm, find_run_or_model
from grpo_recipes.console.eval_results import summarize_scores, write_results
from grpo_recipes.console.eval_tools import RowPrompt, Tools, open_tools, restore_columns
from grpo_recipes.console.filtered import KEPT_RATES, write_filtered
from grpo_recipes.console.generate import (
    BACKEND,
    REQUESTS,
    Progress,
    collect_generation_settings,
    connect_to_server,
    find_number_problems,
    load_tokenizer,
    make_sampling_parameters,
    make_trainer_arguments,
    read_request_limits,
    render_prompts,
    report_failures,
)
from grpo_recipes.errors import ConfigError, Problem, config_error, rename_places, translate_errors
from grpo_recipes.fetch.assets import find_assets, find_fetched_datasets, fingerprint
from grpo_recipes.fetch.hub import EXIT_INTERRUPTED
from grpo_recipes.launch.serve import ServerFailed, serving
from grpo_recipes.paths import display_path
from grpo_recipes.plan.commands import hub_environment, longest_sequence
from grpo_recipes.plan.devices import environment_device
from grpo_recipes.process.reports import say
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.check import resolve_recipe
from grpo_recipes.recipe.datafiles import ENVIRONMENTS
from grpo_recipes.recipe.document import Value
from grpo_recipes.recipe.generated import keys_of_data
from grpo_recipes.recipe.registry import list_reward_models, reward_keys
from grpo_recipes.recipe.row_filter import parse_range
from grpo_recipes.recipe.sources import starts_from_rows
from grpo_recipes.recipe.user_code import REWARD_COPIES, copy_path, missing_argument_problems
from grpo_recipes.runs.checkpoints import is_complete, list_complete_checkpoints
from grpo_recipes.runs.rundir import Run, load_json_mapping, remove_files
from grpo_recipes.smoke import SMOKE_SCHEME, smoke_command

if TYPE_CHECKING:
    from grpo_recipes.rewards.score import Reward
    from grpo_recipes.rollouts.generate import CompletionsFile, Sampler
    from grpo_recipes.rollouts.openai import CompletionClient, SamplingParameters

Rows = list[dict[str, Any]]
BASE = Path(__file__).with_name("eval.yaml")  # the recipe of a model without a recipe
_ME = "grpo eval"
# Options that set recipe keys; messages name the option.
_KEYS = {
    "dataset": "eval_dataset_name", "split": "eval_dataset_split", "limit": "eval_max_prompts",
    "model": "model_name_or_path", "reward": "reward_funcs",
}  # fmt: skip
_DATA_KEYS = (
    "dataset_name", "dataset_config", "dataset_test_split", "dataset_mixture", "eval_dataset_name",
    "eval_dataset_config", "eval_dataset_split", "eval_subsample",
)  # fmt: skip
_CHUNK = 256  # completions scored at a time


@command(
    "Evaluate a recipe, run, checkpoint or model like a training does: pass@k, a table, a page of samples",
    option(
        "--out", type=Path, metavar="FOLDER", help="Output folder; the same command continues it (default: evals/NAME)"
    ),
    option("--model", metavar="MODEL", help="Folder or hub id of a model that replaces the recipe's"),
    option("--dataset", metavar="NAME", help="Dataset to evaluate on (default: the recipe's evaluation set)"),
    option("--split", metavar="SPLIT", help="Split of --dataset (default: test)"),
    option("--reward", nargs="+", metavar="REWARD", help="Rewards (default: the recipe's reward_funcs)"),
    option("--limit", type=int, metavar="N", help="Maximum number of prompts (default: eval_max_prompts)"),
    option(
        "--num-generations",
        type=int,
        metavar="N",
        help="Completions per prompt (default: num_generations_eval, or 1 if greedy)",
    ),
    option("--temperature", type=float, metavar="T", help="Temperature (default: the recipe's; 0 is greedy)"),
    option(
        "--k",
        type=int,
        nargs="+",
        metavar="K",
        help="Values of k for pass@k and others (default: 1, 2, 4, ..., 5 and N)",
    ),
    option("--write-filtered", type=Path, metavar="FILE", help="JSONL file for the prompts with their pass rates"),
    option("--keep", metavar="RANGE", help="With --write-filtered: pass rates to keep (default: 0.1..0.9)"),
    option("--base-url", metavar="URL", help="URL of a server with the model (default: start a vLLM server)"),
    BACKEND,
    option("--served-model-name", metavar="NAME", help="With --base-url: name of the model on that server"),
    *REQUESTS,
    takes_recipe=True,
    usage="[RECIPE|RUN|CHECKPOINT|MODEL] [options] [--KEY VALUE ...]",
)
def eval(options: argparse.Namespace) -> int:
    """Sample and score completions of a model, and write the results to the output folder.

    Return 0, 1 if completions are missing or the server did not start, or 130 after Ctrl-C. Raise ConfigError for
    wrong options or settings.
    """
    _check_options(options)
    names = {f"--{key}": f"--{name}" for name, key in _KEYS.items() if getattr(options, name) is not None}
    names["--eval_strategy"] = "--dataset"
    with translate_errors(ConfigError, lambda error: rename_places(error, names)):
        return _evaluate(options)


def _evaluate(options: argparse.Namespace) -> int:
    """Sample and score the completions, and write and print the results. Set the hub's variables in ``os.environ``.

    Return 0, 1 if completions are missing or the server did not start, or 130 after Ctrl-C. Raise ConfigError before
    sampling if the model, dataset, rewards or sampling options do not work together. Later, raise it if the server at
    --base-url does not answer, or if a reward fails.
    """
    subject = _find_subject(options)
    recipe = subject.recipe
    os.environ.update(hub_environment(os.environ))
    n = options.num_generations or (1 if options.temperature == 0 else recipe.evaluation.num_generations_eval)
    n = n or recipe.batch.num_generations
    if options.k and max(options.k) > n:
        message = f"pass@{max(options.k)} needs {max(options.k)} completions per prompt, got {n}"
        raise config_error("--k", message, f"use --num-generations {max(options.k)}, or a k of at most {n}")
    from grpo_recipes.rollouts.generate import open_completions

    signal.signal(signal.SIGTERM, exit_on_sigterm)  # so that the blocks below stop their processes
    out: Path = options.out or Path("evals") / subject.name
    with ExitStack() as stack:
        copies = subject.run.folder / REWARD_COPIES if subject.run else None
        tools = stack.enter_context(open_tools(recipe, subject.weights, copies))
        rows, prompts, tokenizer = _load_prompts(subject, tools)
        sampling = _make_eval_sampling(recipe, options.temperature)
        if sampling.temperature == 0 and n > 1:
            message = f"{n} greedy completions of a prompt are equal"
            raise config_error("--num-generations", message, "use 1, or a temperature above 0")
        data_keys = (*_DATA_KEYS, *keys_of_data("eval_keys"))
        parts = data_keys, subject.model, options.backend, n, sampling, prompts[0]
        settings = collect_generation_settings(recipe, *parts) | (tools.source.benchmark_settings() if tools else {})
        if os.path.isdir(subject.weights) and not subject.is_built_in:
            settings["model_files"] = fingerprint(Path(subject.weights))
        rewards, code = stack.enter_context(_load_rewards(subject, rows))
        try:
            file = stack.enter_context(open_completions(out / "completions.jsonl", rows, settings))
            make_sampler = functools.partial(tools.sampler, tokenizer=tokenizer) if tools else None
            if not _sample_completions(subject, options, file, prompts, n, sampling, make_sampler):
                return 1
            scored = _score_completions(file, rows, {**settings, **code}, rewards, tokenizer, tools)
        except KeyboardInterrupt:
            say(f"interrupted; {display_path(out)} has the results so far. Continue with the same command")
            return EXIT_INTERRUPTED
    result = {
        "model": subject.model, "recipe": display_path(recipe.path), "prompts": len(rows), "samples": n,
        **summarize_scores(recipe, [reward.__name__ for reward in rewards], scored, n, options.k),
        "seed": sampling.seed, "settings": {**settings, **code},
    }  # fmt: skip
    write_results(result, scored, out)
    if options.write_filtered is not None:
        limits = parse_range(options.keep or KEPT_RATES)
        assert limits is not None  # _check_options has rejected other texts
        write_filtered(options.write_filtered, rows, scored, limits, recipe.model.system_prompt)
    return 0


def _get_max_tokens(recipe: Recipe) -> int:
    """Return eval_max_completion_length, or if unset max_completion_length. Raise ConfigError if neither is set."""
    limit = recipe.evaluation.max_completion_length or recipe.sampling.max_completion_length
    if limit is None:
        fix = "set max_completion_length, e.g. 256"
        raise ConfigError(recipe.problem("max_completion_length", "grpo eval needs a limit", fix))
    return limit


def _make_eval_sampling(recipe: Recipe, temperature: float | None) -> "SamplingParameters":
    """Return the sampling parameters of an evaluation, from the recipe's ``eval_*`` keys.

    ``temperature`` None means the recipe's eval_temperature. Raise ConfigError if no key limits a completion's length.
    """
    seed = recipe.batch.seed if recipe.evaluation.sampling_seed is None else recipe.evaluation.sampling_seed
    if temperature is None:
        temperature = recipe.evaluation.temperature
    sampling = make_sampling_parameters(recipe, temperature, _get_max_tokens(recipe), seed)
    return sampling if recipe.evaluation.top_p is None else replace(sampling, top_p=recipe.evaluation.top_p)


def _check_options(options: argparse.Namespace) -> None:
    """Raise ConfigError if an option has a wrong value, or does nothing without another option."""
    problems = find_number_problems(options)
    problems += [Problem("--k", f"expected 1 or more, got {k}", "use 1 or more") for k in options.k or () if k < 1]
    if options.split is not None and options.dataset is None:
        fix = "add --dataset NAME, or use the recipe's key --dataset_test_split"
        problems.append(Problem("--split", "does nothing without --dataset", fix))
    if options.served_model_name is not None and options.base_url is None:
        problems.append(
            Problem("--served-model-name", "does nothing without --base-url", "add --base-url URL, or remove it")
        )
    if options.keep is not None and options.write_filtered is None:
        fix = "add --write-filtered FILE, or remove it"
        problems.append(Problem("--keep", "does nothing without --write-filtered", fix))
    if parse_range(options.keep or KEPT_RATES) is None:
        problems.append(Problem("--keep", f"expected LEAST..MOST, got '{options.keep}'", f"write --keep {KEPT_RATES}"))
    if options.write_filtered is not None and options.write_filtered.suffix != ".jsonl":
        message = f"expected a .jsonl file, got '{options.write_filtered}'"
        problems.append(Problem("--write-filtered", message, "end the name with .jsonl"))
    if problems:
        raise ConfigError(*problems)


# --- model and prompts -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Subject:
    """A model to evaluate, and the recipe of its evaluation."""

    recipe: Recipe  # recipe with the model as its key model_name_or_path
    run: Run | None  # run of the recipe, if any
    name: str  # name of the default output folder

    @property
    def model(self) -> str:
        """The model: a folder, a hub id, or the name of a built-in model."""
        return self.recipe.model.name

    @functools.cached_property
    def weights(self) -> str:
        """The folder of the model, or a hub id that is not on this machine; a built-in model may not exist yet."""
        if self.is_built_in:
            return str(smoke_command(self.model, os.environ)[0] / "model")
        asset = find_assets(self.recipe, os.environ).model
        return os.path.abspath(os.path.expanduser(asset.path)) if asset else self.model

    @property
    def is_built_in(self) -> bool:
        """Whether the model is a generated smoke model."""
        return self.model.startswith(SMOKE_SCHEME)


def _find_subject(options: argparse.Namespace) -> _Subject:
    """Return the model to evaluate with its recipe, for the first argument: a recipe, run, checkpoint or model.

    Raise ConfigError if the argument is none of these, if its model is incomplete, or if options contradict it.
    """
    name = recipe_name(options)
    if name is None or name.endswith((".yaml", ".yml")) or os.path.isfile(name):
        recipe = _resolve_with_options(name, options)
        return _Subject(recipe, None, recipe.path.stem)
    if options.model is not None:
        raise config_error("--model", f"replaces the model of a recipe, but '{name}' is a model or a run", "remove it")
    _reject_flags(options, ("--model_name_or_path", "--model_revision"), f"'{name}' is the model")
    if name.startswith(SMOKE_SCHEME):
        return _make_model_subject(name, options)
    folder = Path(name).absolute()
    if folder.parent.name == "checkpoints" and (folder.parents[1] / "run.json").is_file():
        run, model, subject_name = Run(folder.parents[1]), str(folder), f"{folder.parents[1].name}-{folder.name}"
        if not is_complete(folder):
            names = [path.name for path in list_complete_checkpoints(folder.parent)]
            fix = f"use {' or '.join(names)}" if names else "use the run, or wait for its first checkpoint"
            raise config_error(display_path(folder), "not a complete checkpoint", fix)
        if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
            message = "no model that a server can load: only an adapter, or the shards of several trainers"
            raise config_error(display_path(folder), message, "use the run; its model/ is complete")
    else:
        fix = "use a recipe (.yaml), a run directory, last, a checkpoint, a model's folder, or a hub id"
        named_run, model = find_run_or_model(name, needs_model=True, fix=fix)
        if named_run is None:
            return _make_model_subject(model, options)
        run, subject_name = named_run, named_run.folder.name
    recipe = _resolve_with_options(str(run.folder / "recipe.yaml"), options)
    recipe = recipe.with_value("model_name_or_path", Value(model, _ME)).with_value("model_revision", Value("main", _ME))
    return _Subject(recipe, run, subject_name)


def _make_model_subject(model: str, options: argparse.Namespace) -> _Subject:
    """Return the subject for a model (folder or hub id) without a recipe, based on the recipe ``eval.yaml``.

    It evaluates on --dataset and --split, by default "test". Raise ConfigError without --dataset or --reward, and for
    the flags that they replace (--dataset_name, --dataset_train_split).
    """
    for name in ("dataset", "reward"):
        if getattr(options, name) is None:
            message = f"missing: '{model}' is a model without a recipe"
            raise config_error(f"--{name}", message, f"add --{name} {name.upper()}")
    _reject_flags(options, ("--dataset_name", "--dataset_train_split"), "--dataset and --split set it")
    flags = [f"--model_name_or_path={model}", f"--dataset_name={options.dataset}"]
    flags += [f"--dataset_train_split={options.split or 'test'}"]
    return _Subject(_resolve_with_options(str(BASE), options, flags), None, model.rpartition("/")[2].replace(":", "-"))


def _reject_flags(options: argparse.Namespace, keys: Sequence[str], reason: str) -> None:
    """Raise ConfigError with ``reason`` if the recipe flags on the command line set one of ``keys`` (``--KEY``)."""
    if names := [name for flag in options.flags if (name := flag.partition("=")[0]) in keys]:
        raise config_error(names[0], reason, "remove it")


def _resolve_with_options(name: str | None, options: argparse.Namespace, extra_flags: Sequence[str] = ()) -> Recipe:
    """Load, check and return the recipe ``name`` (None for the default) with evaluation enabled.

    The options --dataset, --split, --limit, --model and --reward, the recipe flags and ``extra_flags`` set keys. Raise
    ConfigError if the recipe is wrong.
    """
    values = {option: getattr(options, option) for option in _KEYS if getattr(options, option) is not None}
    flags = [*options.flags, *extra_flags, "--eval_strategy=epoch"]
    flags += [f"--{_KEYS[option]}={value}" for option, value in values.items() if option != "reward"]
    if "reward" in values:
        flags += ["--reward_funcs", *values["reward"]]
        if not any(flag.startswith("--reward_weights") for flag in options.flags):
            flags += ["--reward_weights", *("1.0" for _ in values["reward"])]
    return resolve_recipe(name, options.task, flags, os.environ, environment_device())


def _load_prompts(subject: _Subject, tools: Tools | None) -> tuple[Rows, list[list[int]], Any]:
    """Load the evaluation rows like a training does; return the rows, their prompts' token ids, and the tokenizer.

    The prompts show the ``tools``. Raise ConfigError if a prompt with its completion can exceed
    ``vllm_max_model_length``.
    """
    from datasets import disable_progress_bars

    from grpo_recipes.data.prompts import load_eval_prompts, make_renderer

    disable_progress_bars()
    recipe = subject.recipe
    lookups = [find_fetched_datasets(subject.run.folder)] if subject.run else []
    lookups.append(find_assets(recipe, os.environ).lookup)

    def fetched(*name: Any) -> Path | None:
        """Return the folder of a dataset from the run's record or from the downloads; None if it is in neither."""
        return next((path for lookup in lookups if (path := lookup(*name))), None)

    arguments = tools.arguments if tools else make_trainer_arguments(recipe)
    tokenizer, kwargs = load_tokenizer(recipe, subject.weights), arguments.chat_template_kwargs
    loaded = load_eval_prompts(arguments, tokenizer, recipe.batch.seed, kwargs, fetched)
    say(str(loaded))
    rows = loaded.dataset.to_list()
    ids = render_prompts(make_renderer(recipe.model.chat_template, tokenizer, kwargs), rows)
    longest, limit = max(map(len, ids)) + _get_max_tokens(recipe), recipe.server.max_model_length
    if limit is not None and longest > limit:
        message = f"a prompt and a completion have up to {longest} tokens, but vllm_max_model_length is {limit}"
        raise config_error(
            recipe.location("vllm_max_model_length"), message, "raise it, or lower max_completion_length"
        )
    return rows, [RowPrompt(*pair) for pair in zip(ids, rows, strict=True)], tokenizer


# --- sampling, scores, results ---------------------------------------------------------------------------------------


@contextmanager
def _load_rewards(subject: _Subject, rows: Rows) -> Iterator[tuple[list["Reward"], dict[str, Any]]]:
    """Load the recipe's rewards like a trainer; yield them with the settings that decide their scores.

    For a run, its copies of the user's reward files are loaded. The settings include hashes of these files. The
    processes of the rewards end after the block. Raise ConfigError if a reward can't be loaded, fails in the block, or
    needs a column that the rows don't have.
    """
    from grpo_recipes.rewards.load import open_rewards
    from grpo_recipes.rewards.probe import convert_reward_errors

    recipe = subject.recipe
    names = recipe.rewards.funcs
    if models := list_reward_models(names):
        message = f"reward model '{models[0]}' scores only in a training"
        raise config_error(recipe.location("reward_funcs"), message, "add --reward math_verify, or another reward")
    with convert_reward_errors(recipe), tempfile.TemporaryDirectory() as folder:
        copies = Path(folder) / REWARD_COPIES
        if subject.run and (subject.run.folder / REWARD_COPIES).is_dir():
            shutil.copytree(subject.run.folder / REWARD_COPIES, copies, ignore=shutil.ignore_patterns("limits_*"))
        with open_rewards(make_trainer_arguments(recipe), Path(folder)) as rewards:
            live = [ENVIRONMENTS] if starts_from_rows(recipe.__getitem__) else None
            if problems := list(missing_argument_problems(recipe, [dict.fromkeys(rows[0], "")], copies, live)):
                raise ConfigError(*problems)
            files = {name: copy_path(name, copies) for name in names if ":" in name}
            keys = sorted({*reward_keys(names), "reward_timeout"})
            code: dict[str, Any] = {"reward_funcs": names, "reward_weights": recipe.rewards.weights}
            code |= {name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for name, path in files.items()}
            yield rewards, {**code, **{key: recipe[key] for key in keys}}


def _sample_completions(
    subject: _Subject, options: argparse.Namespace, file: "CompletionsFile", prompts: list[list[int]], n: int,
    sampling: "SamplingParameters", make_sampler: Callable[["CompletionClient"], "Sampler"] | None,
) -> bool:  # fmt: skip
    """Sample the missing completions and write them to ``file``; return whether the file is complete.

    ``make_sampler`` returns a sampler for the server's client, by default the client itself.

    Use the server at --base-url, or start a vLLM server and stop it at the end. If no row is done, the results of an
    earlier evaluation in the folder are removed first. The reasons for missing completions, and why a server did not
    start, are printed. Raise ConfigError if the server at --base-url does not answer.
    """
    from grpo_recipes.rollouts.generate import generate
    from grpo_recipes.rollouts.openai import CompletionClient

    done = sum(index < len(prompts) for index in file.done)
    if done == 0:
        remove_files(*(file.path.with_name(name) for name in ("scores.jsonl", "eval.json", "eval.html")))
    if done == len(prompts):
        return True
    recipe, limits = subject.recipe, read_request_limits(options)
    with ExitStack() as stack:
        if options.base_url is not None:
            model = options.served_model_name or subject.weights
            client = connect_to_server(options.base_url, options.backend, model, options.wait, **limits)
        else:
            weights = ensure_smoke_model(subject.model) if subject.is_built_in else subject.weights
            say(f"starting a server for {display_path(weights) if os.path.isdir(weights) else weights}")
            if longest_sequence(recipe) is None:
                longest = max(map(len, prompts)) + _get_max_tokens(recipe)
                recipe = recipe.with_value("vllm_max_model_length", Value(longest, _ME))
            try:
                server = stack.enter_context(serving(recipe, weights, os.environ))
            except ServerFailed as error:
                print(f"grpo: {error}", file=sys.stderr)
                return False
            access: dict[str, Any] = {"token": server.token, "owner": server.owner}
            client = CompletionClient(server.url, model=server.name, say=say, **access, **limits)
        already = f" ({done} already done)" if done else ""
        say(f"{len(prompts)} prompts x {n} completions -> {display_path(file.path)}{already}")
        sampler = make_sampler(client) if make_sampler else client
        outcome = generate(sampler, prompts, n, sampling, file, Progress(len(prompts)))
    if not outcome.complete:
        report_failures(outcome)
    return outcome.complete


def _score_completions(
    completions: "CompletionsFile", rows: Rows, settings: dict[str, Any], rewards: "list[Reward]", tokenizer: Any,
    tools: Tools | None,
) -> Rows:  # fmt: skip
    """Score the completions, write them to ``scores.jsonl``, and return its rows, one per prompt.

    A completion has text, tokens (their number), truncated, rewards by name (None without a score), and maybe a
    reason. Each of ``rows`` needs completions. Prompts that are already in the file are not scored again, unless a
    reward failed to score one of their completions. If the settings have changed, the file is removed first. Raise
    RewardFailed if a reward cannot be called.
    """
    from grpo_recipes.evaluate.scores import call_rewards
    from grpo_recipes.rollouts.generate import open_completions

    samples = {row["index"]: row["completions"] for row in completions.rows()}
    path, names = completions.path.with_name("scores.jsonl"), [reward.__name__ for reward in rewards]
    settings_path = path.with_name("scores.jsonl.settings.json")
    if load_json_mapping(settings_path) != json.loads(json.dumps(settings)):
        remove_files(path, settings_path)
    with open_completions(path, rows, settings) as file:
        file.remove([row["index"] for row in file.rows() if any("reason" in entry for entry in row["completions"])])
        missing = [index for index in range(len(rows)) if index not in file.done]
        say(f"scoring {len(missing)} prompts with {', '.join(names)}")
        prompts_per_chunk = max(1, _CHUNK // len(samples[0]))
        for start in range(0, len(missing), prompts_per_chunk):
            chunk = missing[start : start + prompts_per_chunk]
            pairs = [(index, sample) for index in chunk for sample in samples[index]]
            ids = [sample["ids"] for _, sample in pairs]
            texts = tokenizer.batch_decode(ids, skip_special_tokens=True)  # as in the trainer
            replies = [sample.get("messages") or text for (_, sample), text in zip(pairs, texts, strict=True)]
            scored_rows = [rows[index] | restore_columns(tools, sample) for index, sample in pairs]
            rewards_BR, reasons = call_rewards(rewards, scored_rows, ids, replies)
            results = iter(zip(pairs, texts, rewards_BR.tolist(), reasons, strict=True))
            for index in chunk:
                entries = []
                for (_, sample), text, rewards_R, reason in itertools.islice(results, len(samples[index])):
                    scores = [None if math.isnan(score) else score for score in rewards_R]
                    truncated = sample["finish_reason"] == "length"
                    entry = {"text": text, "tokens": len(sample["ids"]), "truncated": truncated}
                    entry |= {name: sample[name] for name in ("text", "messages", "tokens") if "messages" in sample}
                    entry |= {"rewards": dict(zip(names, scores, strict=True))} | ({"reason": reason} if reason else {})
                    entries.append(entry)
                file.put(index, entries)
        file.sort()
        return file.rows()
