"""The commands for writing a recipe: `grpo new`, `check` and `check-rewards`.

Modules of a launch, torch and datasets are imported inside the commands that need them, so that the others start fast.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_recipes.cli import chosen_recipe, command, option, switch
from grpo_recipes.cli.display import print_notes
from grpo_recipes.errors import EXIT_CONFIG_ERROR, ConfigError, config_error, mask_and_escape, translate_errors
from grpo_recipes.fetch.hub import describe_gated_model
from grpo_recipes.paths import display_path, shell_path
from grpo_recipes.plan.devices import environment_device
from grpo_recipes.process.reports import align_columns
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.check import choose_recipe, notes, reward_notes
from grpo_recipes.recipe.check_data import evaluation_note
from grpo_recipes.recipe.converters import TranslatedRecipe, is_foreign
from grpo_recipes.recipe.document import read_file
from grpo_recipes.recipe.extensions import parts
from grpo_recipes.recipe.keys import schema_line, schema_note
from grpo_recipes.recipe.model_kind import kind_note
from grpo_recipes.recipe.registry import list_reward_models
from grpo_recipes.recipe.rendering import prompt_notes
from grpo_recipes.recipe.sources import sampler_of, starts_from_rows
from grpo_recipes.recipe.tasks import GRPO

if TYPE_CHECKING:
    from grpo_recipes.rewards.probe import ProbeCompletion, ProbeResult

_START = Path(__file__).parents[1] / "recipe/start"  # a recipe for each device, and optional sections
_SCHEMA_LINE = re.compile(r"\A# yaml-language-server: .*\n")
_ROWS = 200  # default number of dataset rows for check-rewards
_WIDTH = 60  # longest prompt or completion to print


@command(
    "Write a new recipe",
    option("file", metavar="FILE", help="Recipe to write, e.g. my.yaml"),
    option("--from", dest="source", metavar="RECIPE", help="Recipe to copy, or recipe of another project to translate"),
)
def new(options: argparse.Namespace) -> int:
    """Write a recipe that trains on this machine, with a line that tells editors its schema.

    A recipe of another project is translated, which may write several files. Return 0. Raise ConfigError if a file
    exists or can't be written, or if ``--from`` is a .py or .sh file.
    """
    for where, name in (("FILE", options.file), ("--from", options.source)):
        if name == "":
            raise config_error(where, "is empty", "give a file")

    def unwritable(error: OSError | ValueError) -> ConfigError:
        """Return a ConfigError for a recipe file that can't be written."""
        problem = f"can't be written ({getattr(error, 'strerror', None) or error})"
        return config_error(options.file, problem, "use a file in your own folder")

    path = Path(options.file)
    with translate_errors((OSError, ValueError), unwritable):
        path.resolve()  # raises ValueError for a NUL in the name
    source = choose_recipe(options.source, {}, GRPO, "cpu") if options.source else None
    if source and source.suffix in (".py", ".sh"):
        fix = "write its settings to a .yaml file, one key: value per line, and translate that file"
        raise config_error("--from", f"'{display_path(source)}' is a script, not a recipe", fix)
    translators = list(parts("translate"))
    if source and not translators and (source.suffix == ".toml" or is_foreign(read_file(source, []))):
        problem = f"'{display_path(source)}' is a recipe of another project, and no installed extension translates it"
        fix = "install the complete package with extensions/migrate, or write a recipe with the keys of grpo keys"
        raise config_error("--from", problem, fix)
    translations = (translator(source, path) for translator in translators if source)
    translation: TranslatedRecipe | None = next(filter(None, translations), None)  # None for our own recipes
    text = source.read_text(encoding="utf-8") if source else start_text(environment_device())
    files = translation.files() if translation else {path: f"{schema_line(path)}\n{_SCHEMA_LINE.sub('', text)}"}
    for file in files:
        if os.path.lexists(file):
            raise config_error(str(file), "already exists", "use another name")
    with translate_errors((OSError, ValueError), unwritable):
        for file, content in files.items():
            file.write_text(content, encoding="utf-8")
    if translation:
        print(*translation.report(), sep="\n")
    print(f"grpo: wrote {mask_and_escape(display_path(path))}; next: grpo check {shell_path(path)}")
    return 0


def start_text(device: str) -> str:
    """Return the recipe that `grpo new` writes for a device; it trains without changes."""
    return "\n".join((_START / f"{name}.yaml").read_text(encoding="utf-8") for name in (device, "options"))


@command(
    "Validate a recipe",
    switch("--deep", help="Also load tokenizer, data and rewards (takes seconds)"),
    switch("--json", help="Print problems and notes as JSON"),
    takes_recipe=True,
)
def check(options: argparse.Namespace) -> int:
    """Print the notes of a recipe; raise ConfigError with all problems if it is not valid.

    With ``--json``, print notes and problems as JSON instead of raising, and return EXIT_CONFIG_ERROR if there are any
    problems. Return 0 for a valid recipe. ``--deep`` also checks tokenizer, prompts and rewards, and sets the hub's
    variables in ``os.environ``.
    """
    with _json_report(options, notes=[], deep=[]) as report:
        recipe = chosen_recipe(options)
        optional_notes = [
            describe_gated_model(recipe.model.name),
            schema_note(recipe.path),
            *reward_notes(recipe),
        ]
        optional_notes += [kind_note(recipe, os.environ), evaluation_note(recipe), *prompt_notes(recipe, os.environ)]
        for find_notes in parts("notes"):
            optional_notes += find_notes(recipe)
        report |= {"recipe": str(recipe.path), "notes": [*notes(recipe), *filter(None, optional_notes)]}
        if not options.json:
            print_notes(f"note: {mask_and_escape(note)}" for note in report["notes"])
        if options.deep:
            import logging

            from grpo_recipes.plan.commands import hub_environment

            # Set these before the import, because the hub's clients read them once.
            os.environ.update(hub_environment(os.environ))
            os.environ.update({"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"})
            # Without a GPU, the import of vLLM warns that it does not use Triton.
            logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)
            from grpo_recipes.trainers.deep_check import check_deeply

            report["deep"] = check_deeply(recipe, os.environ)
    if not options.json:
        print(*(f"{line}\n" for line in report["deep"]), sep="", end="")
        print_notes(_list_checked(recipe, options.deep))
        print(f"grpo: {mask_and_escape(display_path(report['recipe']))} is valid")
    return 0 if report["ok"] else EXIT_CONFIG_ERROR


def _list_checked(recipe: Recipe, deep: bool) -> list[str]:
    """Return lines that say which parts of a valid recipe were checked, and which were not."""
    key_count = sum(recipe.is_set(key) for key in recipe.values)
    subjects = [f"{key_count} keys (names, types, limits, combinations)", "batch sizes", "names of rewards and data"]
    subjects += ["tokenizer, prompts and rewards"] if deep else []
    unchecked = [] if deep else ["tokenizer, prompts and rewards (--deep)"]
    unchecked += ["memory, disk and GPUs (grpo plan)", "rewards of wrong answers (grpo check-rewards)"]
    return [f"checked {', '.join(subjects)}", f"not checked: {', '.join(unchecked)}"]


@contextlib.contextmanager
def _json_report(options: argparse.Namespace, **fields: Any) -> Iterator[dict[str, Any]]:
    """Yield a dict for a command's results. With ``--json``, print it, and add problems instead of raising them.

    The field ``ok`` is then False. Without ``--json``, a ConfigError is raised as usual and nothing is printed.
    """
    report = {"ok": True, "recipe": options.recipe or options.config, "problems": [], **fields}
    try:
        yield report
    except ConfigError as error:
        if not options.json:
            raise
        report |= {"ok": False, "problems": [asdict(problem) for problem in error.problems]}
    if options.json:
        print(json.dumps(report, indent=1))


@command(
    "Check that rewards distinguish correct from incorrect answers",
    option("--rows", type=int, default=_ROWS, help=f"Number of dataset rows to try (default {_ROWS})"),
    switch("--json", help="Print the results as JSON"),
    takes_recipe=True,
)
def check_rewards(options: argparse.Namespace) -> int:
    """Print the rewards of correct and incorrect answers; raise ConfigError if a reward can't distinguish them.

    Problems of the recipe and a dataset without solutions also raise ConfigError. With ``--json``, print the problems
    and return 2 instead. Return 0 without problems. Set the hub's variables in ``os.environ``.
    """
    if options.rows < 1:
        raise config_error("--rows", f"expected 1 or more, got {options.rows}", f"use --rows {_ROWS}")
    with _json_report(options, rows=0, rewards=[]) as report:
        recipe = chosen_recipe(options)
        report["recipe"] = str(recipe.path)
        source = sampler_of(recipe.__getitem__)
        if starts_from_rows(recipe.__getitem__):
            problem = "the rewards need episodes, which only a training plays"
            raise config_error(display_path(recipe.path), problem, "run grpo launch with --max_steps 1")
        if source and not source.reads_datasets(recipe.__getitem__):
            raise config_error(display_path(recipe.path), *source.unchecked_rewards)
        from grpo_recipes.fetch.assets import find_assets
        from grpo_recipes.plan.commands import hub_environment

        os.environ.update(hub_environment(os.environ))
        # Imported here, because it loads TRL and datasets, which takes seconds.
        from grpo_recipes.rewards.probe import find_problems, probe_rewards, read_first_rows

        rows, counts = read_first_rows(recipe, options.rows, find_assets(recipe, os.environ).lookup)
        if not rows:
            raise config_error(
                display_path(recipe.path), "the dataset has no rows with a solution", "check its columns"
            )
        if counts.left_out and not options.json:
            columns = ", ".join(f"{name} ({reason})" for name, reason in counts.left_out.items())
            print(f"grpo: note: columns not passed to rewards: {columns}")
        results = probe_rewards(recipe, rows, counts.left_out)
        report["rows"] = len(rows)
        report["rewards"] = [asdict(result) | {"tells_apart": result.distinguishes} for result in results]
        if not options.json:
            _print_rewards(results)
            if models := list_reward_models(recipe.rewards.funcs):
                print(f"grpo: note: reward models are tried only by a training: {', '.join(models)}")
        if problems := find_problems(recipe, rows, results):
            raise ConfigError(*problems)
    if not options.json and results:
        recipe_path = mask_and_escape(display_path(report["recipe"]))
        does = "distinguish correct from incorrect answers on"
        does = does if any(result.right for result in results) else "can be called on"
        print(f"grpo: the rewards of {recipe_path} {does} {report['rows']} rows")
    return 0 if report["ok"] else EXIT_CONFIG_ERROR


def _print_rewards(results: list[ProbeResult]) -> None:
    """Print a table with the test results of rewards, then wrong scores and notes for each reward."""
    table = [["reward", "correct", "mean", "missed", "incorrect", "mean", "accepted", "unscored"]]
    for result in results:
        values = (
            result.right, result.right_mean, result.missed, result.wrong, result.wrong_mean, result.taken,
            result.no_verdict,
        )  # fmt: skip
        cells = ("-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
                 for value in values)  # fmt: skip
        table.append([result.reward, *cells])
    print(*align_columns(table, numbers=True), sep="\n")
    for result in results:
        if result.failures:
            lines = [_format_failure(result.reward, failure) for failure in result.failures]
            print(f"\n{result.reward} on", *lines, sep="\n")
        if result.missed is None and result.right_mean is not None and not result.distinguishes:
            from grpo_recipes.rewards.probe import describe_unpaid

            problem = describe_unpaid(result) or "gives correct and incorrect answers the same reward"
            print(f"grpo: note: {result.reward} {problem}")
        if result.skipped:
            print(f"grpo: note: {result.reward} is slow: {result.skipped} further completions were not tried")


def _format_failure(name: str, failure: ProbeCompletion) -> str:
    """Return a line with the prompt, the answer and its wrong score by the reward ``name``, each text shortened."""
    from grpo_recipes.rewards.probe import describe_unscored

    def shorten(text: str) -> str:
        """Return a text in quotes on one line, with secrets masked, and cut if it is long."""
        text = mask_and_escape(" ".join(text.split()))
        return f"'{text}'" if len(text) <= _WIDTH else f"'{text[: _WIDTH - 1]}…'"

    score = f"no score ({describe_unscored(name, failure.reason)})" if failure.value is None else f"{failure.value:.4g}"
    kind = "correct" if failure.right else "incorrect"
    return f"  {shorten(failure.prompt)}: {kind} answer {shorten(failure.completion)} gets {score}"
