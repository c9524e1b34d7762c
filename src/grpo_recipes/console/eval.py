"""The command `grpo eval`: the evaluation of a training alone, on any model, dataset and reward."""

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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_recipes.cli import command, option, recipe_name
from grpo_recipes.console.chat import leave, run_or_model, smoke_model
from grpo_recipes.console.generate import (
    BACKEND,
    REQUESTS,
    Progress,
    arguments_of,
    bounds_of,
    connect,
    need_dataset,
    rendered,
    report_failures,
    sampling_of,
    settings_of,
    small_numbers,
    tokenizer_of,
)
from grpo_recipes.errors import ConfigError, Problem, config_error, translate
from grpo_recipes.fetch.assets import fetched_datasets, find_assets, fingerprint
from grpo_recipes.fetch.hub import EXIT_INTERRUPTED
from grpo_recipes.launch.serve import ServerFailed, serving
from grpo_recipes.paths import display_path
from grpo_recipes.plan.commands import hub_environment, longest_sequence
from grpo_recipes.plan.devices import environment_device
from grpo_recipes.process.reports import say
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.check import resolve_recipe
from grpo_recipes.recipe.document import Value
from grpo_recipes.recipe.generated import keys_of_data, recorded_values
from grpo_recipes.recipe.registry import reward_keys
from grpo_recipes.recipe.user_code import REWARD_COPIES, copy_path, missing_argument_problems
from grpo_recipes.runs.checkpoints import complete_checkpoints, is_complete
from grpo_recipes.runs.rundir import Run, json_mapping, remove_files, write_atomically, write_json
from grpo_recipes.smoke import SMOKE_SCHEME, smoke_command

if TYPE_CHECKING:
    from grpo_recipes.rewards.score import Reward
    from grpo_recipes.rollouts.generate import CompletionsFile
    from grpo_recipes.rollouts.openai import SamplingParameters

Rows = list[dict[str, Any]]
BASE = Path(__file__).with_name("eval.yaml")  # the recipe of a bare model
_ME = "grpo eval"
# Our options for recipe keys, by which messages name them.
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
    "evaluate a recipe, a run, a checkpoint or any model as a training does: pass@k, a table, a page of samples",
    option("--out", type=Path, metavar="FOLDER", help="which the same command continues; by default evals/NAME"),
    option("--model", metavar="MODEL", help="a folder or hub id in the place of the recipe's model"),
    option("--dataset", metavar="NAME", help="evaluated on; by default the recipe's evaluation set"),
    option("--split", metavar="SPLIT", help="of --dataset (test)"),
    option("--reward", nargs="+", metavar="REWARD", help="by default the recipe's reward_funcs"),
    option("--limit", type=int, metavar="N", help="prompts at most; by default eval_max_prompts"),
    option("--num-generations", type=int, metavar="N", help="of each prompt; num_generations_eval, 1 where greedy"),
    option("--temperature", type=float, metavar="T", help="by default the recipe's; 0 is greedy"),
    option("--k", type=int, nargs="+", metavar="K", help="of pass@k and the others; by default 1, 2, 4, ..., 5 and N"),
    option("--base-url", metavar="URL", help="a server of the model; by default a vLLM server is started, and ended"),
    BACKEND,
    option("--served-model-name", metavar="NAME", help="with --base-url: how that server calls the model"),
    *REQUESTS,
    takes_recipe=True,
    usage="[RECIPE|RUN|CHECKPOINT|MODEL] [options] [--KEY VALUE ...]",
)
def eval(options: argparse.Namespace) -> int:
    """Return 0 with all scores, 1 where completions are missing, 130 after Ctrl-C; the same command goes on."""
    _check(options)
    given = {f"--{key}": f"--{name}" for name, key in _KEYS.items() if getattr(options, name) is not None}
    places = {"--eval_strategy": "--dataset", **given}

    def in_options(error: ConfigError) -> ConfigError:
        return ConfigError(*(Problem(places.get(one.where, one.where), one.what, one.fix) for one in error.problems))

    with translate(ConfigError, in_options):
        return _evaluate(options)


def _evaluate(options: argparse.Namespace) -> int:
    subject = _subject(options)
    recipe = subject.recipe
    need_dataset(recipe)
    os.environ.update(hub_environment(os.environ))
    n = options.num_generations or (1 if options.temperature == 0 else recipe["num_generations_eval"])
    n = n or recipe["num_generations"]
    if options.k and max(options.k) > n:
        what = f"pass@{max(options.k)} needs as many completions of a prompt, not {n}"
        raise config_error("--k", what, f"write --num-generations {max(options.k)}, or a k of at most {n}")
    rows, prompts, tokenizer = _prompts(subject)
    sampling = _sampling(recipe, options.temperature)
    if sampling.temperature == 0 and n > 1:
        what = f"{n} greedy completions of a prompt are the same"
        raise config_error("--num-generations", what, "write 1, or a temperature above 0")
    data_keys = (*_DATA_KEYS, *keys_of_data("eval_keys"))
    settings = settings_of(recipe, data_keys, subject.model, options.backend, n, sampling, prompts[0])
    if os.path.isdir(subject.place) and not subject.is_built_in:
        settings["model_files"] = fingerprint(Path(subject.place))
    from grpo_recipes.rollouts.generate import opened

    signal.signal(signal.SIGTERM, leave)  # by way of the end of the blocks below
    out: Path = options.out or Path("evals") / subject.name
    with ExitStack() as ending:
        rewards, code = ending.enter_context(_rewards(subject, rows))
        try:
            file = ending.enter_context(opened(out / "completions.jsonl", rows, settings))
            if not _sample(subject, options, file, prompts, n, sampling):
                return 1
            scored = _score(file, rows, {**settings, **code}, rewards, tokenizer)
        except KeyboardInterrupt:
            say(f"interrupted; {display_path(out)} has what is done, and the same command goes on")
            return EXIT_INTERRUPTED
    result = {
        "model": subject.model, "recipe": display_path(recipe.path), "prompts": len(rows), "samples": n,
        **_summary(recipe, [reward.__name__ for reward in rewards], scored, n, options.k),
        "seed": sampling.seed, "settings": {**settings, **code},
    }  # fmt: skip
    _present(result, scored, out)
    return 0


def _longest(recipe: Recipe) -> int:
    """Return the most tokens of a completion."""
    return int(recipe["eval_max_completion_length"] or recipe["max_completion_length"])


def _sampling(recipe: Recipe, temperature: float | None) -> "SamplingParameters":
    """Return how a training with this recipe samples in its evaluations, at another temperature where one is given."""
    seed = recipe["seed"] if recipe["eval_sampling_seed"] is None else recipe["eval_sampling_seed"]
    given = recipe["eval_temperature"] if temperature is None else temperature
    found = sampling_of(recipe, given, _longest(recipe), seed)
    return found if recipe["eval_top_p"] is None else replace(found, top_p=recipe["eval_top_p"])


def _check(options: argparse.Namespace) -> None:
    problems = small_numbers(options)
    problems += [Problem("--k", f"is {k}", "write 1 or more") for k in options.k or () if k < 1]
    if options.split is not None and options.dataset is None:
        fix = "add --dataset NAME, or write the recipe's key --dataset_test_split"
        problems.append(Problem("--split", "changes nothing without --dataset", fix))
    if options.served_model_name is not None and options.base_url is None:
        problems.append(Problem("--served-model-name", "changes nothing without --base-url", "add it, or remove this"))
    if problems:
        raise ConfigError(*problems)


# --- what is evaluated -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Subject:
    """A model with the recipe that says how it is evaluated."""

    recipe: Recipe  # which names the model
    run: Run | None  # that the recipe is of
    name: str  # for the default folder

    @property
    def model(self) -> str:
        """The model's name: a folder, a hub id, or that of a built-in one."""
        return str(self.recipe["model_name_or_path"])

    @functools.cached_property
    def place(self) -> str:
        """Where the model is: a folder, or a hub id that is not on this machine; a built-in one may not be made yet."""
        if self.is_built_in:
            return str(smoke_command(self.model, os.environ)[0] / "model")
        found = find_assets(self.recipe, os.environ).model
        return os.path.abspath(os.path.expanduser(found.path)) if found else self.model

    @property
    def is_built_in(self) -> bool:
        """Whether the model is one that is made on the spot."""
        return self.model.startswith(SMOKE_SCHEME)


def _subject(options: argparse.Namespace) -> _Subject:
    which = recipe_name(options)
    if which is None or which.endswith((".yaml", ".yml")) or os.path.isfile(which):
        recipe = _resolved(which, options)
        return _Subject(recipe, None, recipe.path.stem)
    if options.model is not None:
        raise config_error("--model", f"takes the place of a recipe's model, and '{which}' is one", "remove it")
    _refuse(options, ("--model_name_or_path", "--model_revision"), f"'{which}' is the model")
    if which.startswith(SMOKE_SCHEME):
        return _bare(which, options)
    folder = Path(which).absolute()
    if folder.parent.name == "checkpoints" and (folder.parents[1] / "run.json").is_file():
        run, model, name = Run(folder.parents[1]), str(folder), f"{folder.parents[1].name}-{folder.name}"
        _need_whole(folder)
    else:
        fix = "name a recipe (.yaml), a run directory, last, a checkpoint, a model's folder, or a hub id"
        named, model = run_or_model(which, needs_model=True, fix=fix)
        if named is None:
            return _bare(model, options)
        run, name = named, named.folder.name
    recipe = _resolved(str(run.folder / "recipe.yaml"), options)
    recipe = recipe.with_value("model_name_or_path", Value(model, _ME)).with_value("model_revision", Value("main", _ME))
    return _Subject(recipe, run, name)


def _need_whole(checkpoint: Path) -> None:
    """Refuse a checkpoint that is not complete, or has no model that a server can load."""
    if not is_complete(checkpoint):
        known = [one.name for one in complete_checkpoints(checkpoint.parent)]
        fix = f"name one of {', '.join(known)}" if known else "name the run, or wait for its first checkpoint"
        raise config_error(display_path(checkpoint), "is not a complete checkpoint", fix)
    if not (checkpoint / "config.json").is_file() or not any(checkpoint.glob("*.safetensors")):
        what = "has no model that a server can load: an adapter alone, or the shards of several trainers"
        raise config_error(display_path(checkpoint), what, "name the run, whose model/ is whole")


def _bare(model: str, options: argparse.Namespace) -> _Subject:
    """Return a model of no run, which says nothing of how it is evaluated."""
    for name, what in (("dataset", "what it is evaluated on"), ("reward", "what judges it")):
        if getattr(options, name) is None:
            raise config_error(f"--{name}", f"is missing: '{model}' is a model, and has no recipe", f"write {what}")
    _refuse(options, ("--dataset_name", "--dataset_train_split"), "--dataset and --split say it")
    own = [f"--model_name_or_path={model}", f"--dataset_name={options.dataset}"]
    own += [f"--dataset_train_split={options.split or 'test'}"]
    return _Subject(_resolved(str(BASE), options, own), None, model.rpartition("/")[2].replace(":", "-"))


def _refuse(options: argparse.Namespace, keys: Sequence[str], what: str) -> None:
    """Refuse flags of keys that something else decides."""
    if given := [name for flag in options.flags if (name := flag.partition("=")[0]) in keys]:
        raise config_error(given[0], what, "remove it")


def _resolved(name: str | None, options: argparse.Namespace, more: Sequence[str] = ()) -> Recipe:
    """Return a recipe that evaluates, with our options as its keys."""
    given = {one: getattr(options, one) for one in _KEYS if getattr(options, one) is not None}
    flags = [*options.flags, *more, "--eval_strategy=epoch"]
    flags += [f"--{_KEYS[one]}={value}" for one, value in given.items() if one != "reward"]
    if "reward" in given:
        flags += ["--reward_funcs", *given["reward"]]
        if not any(flag.startswith("--reward_weights") for flag in options.flags):
            flags += ["--reward_weights", *("1.0" for _ in given["reward"])]
    return resolve_recipe(name, options.task, flags, os.environ, environment_device())


def _prompts(subject: _Subject) -> tuple[Rows, list[list[int]], Any]:
    """Return the rows that training is evaluated on, their prompts as it renders them, and the tokenizer."""
    from datasets import disable_progress_bars

    from grpo_recipes.data.prompts import load_eval_prompts, make_renderer

    disable_progress_bars()
    recipe = subject.recipe
    lookups = [fetched_datasets(subject.run.folder)] if subject.run else []
    lookups.append(find_assets(recipe, os.environ).lookup)

    def fetched(*name: Any) -> Path | None:
        return next((found for lookup in lookups if (found := lookup(*name))), None)

    tokenizer, kwargs = tokenizer_of(recipe, subject.place), recipe["chat_template_kwargs"]
    found = load_eval_prompts(arguments_of(recipe), tokenizer, recipe["seed"], kwargs, fetched)
    say(str(found))
    rows = found.dataset.to_list()
    ids = rendered(make_renderer(recipe["chat_template"], tokenizer, kwargs), rows)
    longest, limit = max(map(len, ids)) + _longest(recipe), recipe["vllm_max_model_length"]
    if limit is not None and longest > limit:
        what = f"a prompt and a completion have up to {longest} tokens, vllm_max_model_length is {limit}"
        raise config_error(recipe.location("vllm_max_model_length"), what, "raise it, or lower max_completion_length")
    return rows, ids, tokenizer


# --- sample, score, sum up -------------------------------------------------------------------------------------------


@contextmanager
def _rewards(subject: _Subject, rows: Rows) -> Iterator[tuple[list["Reward"], dict[str, Any]]]:
    """Lend the recipe's rewards, loaded as a trainer loads them, and all that their scores depend on."""
    from grpo_recipes.rewards.load import lent_rewards
    from grpo_recipes.rewards.probe import reward_errors_as_config_errors

    recipe = subject.recipe
    names = recipe["reward_funcs"]
    with reward_errors_as_config_errors(recipe), tempfile.TemporaryDirectory() as own:
        copies = Path(own) / REWARD_COPIES
        if subject.run and (subject.run.folder / REWARD_COPIES).is_dir():
            shutil.copytree(subject.run.folder / REWARD_COPIES, copies, ignore=shutil.ignore_patterns("limits_*"))
        with lent_rewards(arguments_of(recipe), Path(own)) as rewards:
            if problems := list(missing_argument_problems(recipe, [dict.fromkeys(rows[0], "")], copies, live=None)):
                raise ConfigError(*problems)
            files = {name: copy_path(name, copies) for name in names if ":" in name}
            keys = sorted({*reward_keys(names), "reward_timeout"})
            code: dict[str, Any] = {"reward_funcs": names, "reward_weights": recipe["reward_weights"]}
            code |= {name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for name, path in files.items()}
            yield rewards, {**code, **{key: recipe[key] for key in keys}}


def _sample(
    subject: _Subject, options: argparse.Namespace, file: "CompletionsFile", prompts: list[list[int]], n: int,
    sampling: "SamplingParameters",
) -> bool:  # fmt: skip
    """Draw the completions that the file lacks, from a server that runs or one of ours; return whether it has all."""
    from grpo_recipes.rollouts.generate import generate
    from grpo_recipes.rollouts.openai import CompletionClient

    there = sum(index < len(prompts) for index in file.done)
    if there == 0:
        remove_files(*(file.path.with_name(name) for name in ("scores.jsonl", "eval.json", "eval.html")))
    if there == len(prompts):
        return True
    recipe, limits = subject.recipe, bounds_of(options)
    with ExitStack() as ending:
        if options.base_url is not None:
            wanted = options.served_model_name or subject.place
            client = connect(options.base_url, options.backend, wanted, options.wait, **limits)
        else:
            weights = smoke_model(subject.model) if subject.is_built_in else subject.place
            say(f"starting a server for {display_path(weights) if os.path.isdir(weights) else weights}")
            if longest_sequence(recipe) is None:
                longest = max(map(len, prompts)) + _longest(recipe)
                recipe = recipe.with_value("vllm_max_model_length", Value(longest, _ME))
            try:
                server = ending.enter_context(serving(recipe, weights, os.environ))
            except ServerFailed as error:
                print(f"grpo: {error}", file=sys.stderr)
                return False
            secured: dict[str, Any] = {"token": server.token, "owner": server.owner}
            client = CompletionClient(server.url, model=server.name, say=say, **secured, **limits)
        old = f"; {there} are there already" if there else ""
        say(f"{len(prompts)} prompts x {n} completions -> {display_path(file.path)}{old}")
        outcome = generate(client, prompts, n, sampling, file, Progress(len(prompts)))
    if not outcome.complete:
        report_failures(outcome)
    return outcome.complete


def _score(
    completions: "CompletionsFile", rows: Rows, settings: dict[str, Any], rewards: "list[Reward]", tokenizer: Any
) -> Rows:
    """Return a row for each prompt with its scored completions; ``scores.jsonl`` has those that are done."""
    from grpo_recipes.evaluate.scores import call_rewards
    from grpo_recipes.rollouts.generate import opened

    drawn = {row["index"]: row["completions"] for row in completions.rows()}
    path, names = completions.path.with_name("scores.jsonl"), [reward.__name__ for reward in rewards]
    beside = path.with_name("scores.jsonl.settings.json")
    if json_mapping(beside) != json.loads(json.dumps(settings)):
        remove_files(path, beside)
    with opened(path, rows, settings) as file:
        missing = [index for index in range(len(rows)) if index not in file.done]
        say(f"scoring {len(missing)} prompts by {', '.join(names)}")
        step = max(1, _CHUNK // len(drawn[0]))
        for start in range(0, len(missing), step):
            chunk = missing[start : start + step]
            whole = [(index, one) for index in chunk for one in drawn[index]]
            ids = [one["ids"] for _, one in whole]
            texts = tokenizer.batch_decode(ids, skip_special_tokens=True)  # as the trainer does
            rewards_BR, reasons = call_rewards(rewards, [rows[index] for index, _ in whole], ids, texts)
            made = iter(zip(whole, texts, rewards_BR.tolist(), reasons, strict=True))
            for index in chunk:
                entries = []
                for (_, one), text, given, reason in itertools.islice(made, len(drawn[index])):
                    scores = [None if math.isnan(score) else score for score in given]
                    entry = {"text": text, "tokens": len(one["ids"]), "truncated": one["finish_reason"] == "length"}
                    entry |= {"rewards": dict(zip(names, scores, strict=True))} | ({"reason": reason} if reason else {})
                    entries.append(entry)
                file.put(index, entries)
        file.sort()
        return file.rows()


def _summary(recipe: Recipe, names: list[str], scored: Rows, n: int, ks: Sequence[int] | None) -> dict[str, Any]:
    """Return the scores; each completion in ``scored`` gets its weighted ``reward``, and whether it is ``right``."""
    import torch

    from grpo_recipes.evaluate.scores import answer_in, group_scores, reward_means, verdicts, weighted_rewards

    every = [one for row in scored for one in row["completions"]]
    given = [[math.nan if one["rewards"][name] is None else one["rewards"][name] for name in names] for one in every]
    weights = torch.tensor(recipe["reward_weights"] or [1.0] * len(names), dtype=torch.float32)
    judged = torch.tensor(given, dtype=torch.float32), names, weights
    totals = weighted_rewards(judged[0], weights).tolist()
    for one, total, right in zip(every, totals, verdicts(*judged), strict=True):
        one.update(reward=None if math.isnan(total) else total, right=right)
    at_k = group_scores(*judged, [answer_in(one["text"]) for one in every], n, sorted(set(ks)) if ks else None)
    means = reward_means(*judged) | {name: score for name, (score, _) in at_k.items()}
    intervals = {f"{name}_ci": list(limits) for name, (_, limits) in at_k.items() if limits}
    return {
        **{name: None if math.isnan(value) else value for name, value in means.items()}, **intervals,
        "truncated": sum(one["truncated"] for one in every) / len(every),
        "mean_length": sum(one["tokens"] for one in every) / len(every),
        "no_verdict": sum(math.isnan(total) for total in totals),
        **recorded_values(scored),
    }  # fmt: skip


def _present(result: dict[str, Any], scored: Rows, out: Path) -> None:
    """Write ``eval.json`` and ``eval.html``, and print the table."""
    from grpo_recipes.console.report.pages import evaluation_page
    from grpo_recipes.stats import score_names

    write_json(out / "eval.json", result)
    write_atomically(out / "eval.html", evaluation_page(result, scored))
    print(f"{'score':<12}{'value':>8}  95 % interval")
    for name in [*score_names(result), "reward", "truncated", "mean_length", "no_verdict"]:
        value, limits = result[name], result.get(f"{name}_ci")
        text = "none" if value is None else str(value) if isinstance(value, int) else f"{value:.3f}"
        print(f"{name:<12}{text:>8}" + (f"  {limits[0]:.3f} to {limits[1]:.3f}" if limits else ""))
    if result.get("pass@1", 0.0) is None and result["reward"] is not None:
        say("pass@k counts rewards of at least 1, and these graded rewards are all lower; compare mean@k and best@k")
    say(f"{result['prompts']} prompts x {result['samples']} completions of {result['model']}")
    say(f"scores in {display_path(out / 'eval.json')}, samples in {display_path(out / 'eval.html')}")
