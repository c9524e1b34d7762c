"""The commands for writing a recipe: new, keys, check, check-rewards, plan."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import re
import textwrap
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_recipes.cli import chosen_recipe, command, option, switch
from grpo_recipes.errors import EXIT_CONFIG_ERROR, ConfigError, config_error, printable, translate
from grpo_recipes.fetch.assets import find_assets
from grpo_recipes.fetch.hub import gated_note
from grpo_recipes.launch.resolve import names_of
from grpo_recipes.paths import display_path, shell_path
from grpo_recipes.plan.commands import hub_environment
from grpo_recipes.plan.devices import environment_device, find_resources
from grpo_recipes.plan.estimates import estimate
from grpo_recipes.plan.plan import describe, make_plan
from grpo_recipes.process.reports import aligned
from grpo_recipes.recipe.check import choose_recipe, notes, reward_notes
from grpo_recipes.recipe.check_data import evaluation_note
from grpo_recipes.recipe.converters import ALIASES, TranslatedRecipe, is_foreign, meaning_of, names, nearest
from grpo_recipes.recipe.document import read_file
from grpo_recipes.recipe.extensions import parts
from grpo_recipes.recipe.keys import (
    OWNED_KEYS,
    catalogue,
    nested_catalogue,
    schema_line,
    schema_note,
    search_words,
    variables,
)
from grpo_recipes.recipe.model_kind import kind_note
from grpo_recipes.recipe.registry import benchmarks
from grpo_recipes.recipe.rendering import prompt_notes
from grpo_recipes.recipe.sources import source_of
from grpo_recipes.recipe.tasks import GRPO
from grpo_recipes.slurm.client import job_end_time, walltime_seconds

if TYPE_CHECKING:
    from grpo_recipes.rewards.probe import ProbeCompletion, ProbeResult

_START = Path(__file__).parents[1] / "recipe/start"  # a recipe for each device, and optional sections
_SCHEMA_LINE = re.compile(r"\A# yaml-language-server: .*\n")
_ROWS = 200  # of the dataset, shown to the rewards
_WIDTH = 60  # characters of a prompt or completion in a line
_MOST = 10_000  # GPUs of a node, nodes, and GiB of a GPU


@command(
    "write a recipe to start from",
    option("file", metavar="FILE", help="the recipe to write, e.g. my.yaml"),
    option("--from", dest="source", metavar="RECIPE", help="a recipe to copy, or one of another project to translate"),
)
def new(options: argparse.Namespace) -> int:
    """Write a recipe that trains on this machine, with the line by which an editor finds the schema."""
    for where, name in (("FILE", options.file), ("--from", options.source)):
        if name == "":
            raise config_error(where, "is empty", "name a file")

    def unwritable(error: OSError | ValueError) -> ConfigError:
        what = f"cannot be written ({getattr(error, 'strerror', None) or error})"
        return config_error(options.file, what, "name a file in a folder of yours")

    path = Path(options.file)
    with translate((OSError, ValueError), unwritable):
        path.resolve()  # ValueError: a NUL in the name
    source = choose_recipe(options.source, {}, GRPO, "cpu") if options.source else None
    if source and source.suffix in (".py", ".sh"):
        fix = "write its settings into a .yaml file, one key: value a line, and translate that"
        raise config_error("--from", f"'{display_path(source)}' is a script, not a recipe", fix)
    translation = _translated(source, path) if source else None
    copied = source.read_text(encoding="utf-8") if source else start_text(environment_device())
    files = translation.files() if translation else {path: f"{schema_line(path)}\n{_SCHEMA_LINE.sub('', copied)}"}
    for other in files:
        if os.path.lexists(other):
            raise config_error(str(other), "exists already", "name another file")
    with translate((OSError, ValueError), unwritable):
        for other, content in files.items():
            other.write_text(content, encoding="utf-8")
    if translation:
        print(*translation.report(), sep="\n")
    print(f"grpo: wrote {printable(display_path(path))}; next: grpo check {shell_path(path)}")
    return 0


def _translated(source: Path, target: Path) -> TranslatedRecipe | None:
    """Translate a recipe of another project, or return None if the file is a recipe of this package."""
    translators = list(parts("translate"))
    if not translators and (source.suffix == ".toml" or is_foreign(read_file(source, []))):
        problem = f"'{display_path(source)}' is a recipe of another project, and no installed extension translates it"
        fix = "install the whole package with extensions/migrate, or write a recipe with the keys that grpo keys lists"
        raise config_error("--from", problem, fix)
    return next((made for translator in translators if (made := translator(source, target))), None)


def start_text(device: str) -> str:
    """Return the recipe that `grpo new` writes, which trains on the device as it is."""
    return "\n".join((_START / f"{name}.yaml").read_text(encoding="utf-8") for name in (device, "options"))


@command(
    "search the keys of a recipe",
    option("word", nargs="?", help="part of a name or of its meaning; every key by default"),
    switch("--json", help="print JSON"),
    exclusive=(
        switch("--env", help="the environment variables that are read"),
        switch("--benchmarks", help="the benchmarks that a recipe can name"),
    ),
)
def keys(options: argparse.Namespace) -> int:
    """Print the keys, variables or benchmarks that have the word in their name or meaning."""
    word = (options.word or "").lower()
    table = "--env" if options.env else "--benchmarks" if options.benchmarks else ""
    entries: dict[str, dict[str, Any]]
    if table:
        texts = variables() if options.env else {name: one.help for name, one in benchmarks().items()}
        entries = {name: {"help": text} for name, text in texts.items()}
    else:
        nested = {f"{path}.{name}": one for path, inner in nested_catalogue().items() for name, one in inner.items()}
        entries = {**catalogue(), **nested}
    known = meaning_of(word) if word and not table and word not in catalogue() else None
    topic = [] if table else [key for key, words in search_words().items() if word in words.split()]
    if known and not known.sets and not topic:
        raise config_error(f"'{options.word}'", "is not a key of a recipe", known.fix)
    exact = {*topic, *known.sets} if known else {word, *topic}
    begins = re.compile(rf"(?<![a-z0-9]){re.escape(word)}")  # "ema" is not found in "schema"

    def order(name: str) -> tuple[bool, bool, str]:
        return name.lower() not in exact, not begins.search(name.lower().replace("_", " ")), name

    def mentions(name: str) -> bool:
        text = f"{name} {entries[name]['help']}".lower()
        return bool(begins.search(text) or begins.search(text.replace("_", " ")))

    chosen = [name for name in entries if name in exact or mentions(name)]
    found = {name: entries[name] for name in sorted(chosen, key=order)}
    if word and not table:
        refused = {name: row.fix_for(None) for name, row in names().items() if name != word} | OWNED_KEYS
        found |= {
            name: {"help": refused[name], "refused": True}
            for name in sorted(refused)
            if begins.search(name.replace("_", " "))
        }
    if not found:
        close = None if table else nearest(options.word)
        fix = f"try {close}" if close else f"see grpo keys {table}".rstrip()
        where = f"nothing in grpo keys {table}" if table else "no key"
        raise config_error(f"'{options.word}'", f"{where} matches", fix)
    same = (
        f"'{word}' is read as {ALIASES[word]}"
        if word in ALIASES
        else f"for '{word}' {known.fix_for(None)}"
        if known and (known.sets or topic)
        else ""
    )
    note = f"grpo: {same}\n" if same else ""
    print(json.dumps(found, indent=1) if options.json else note + "\n".join(_key_lines(found)))
    return 0


def _key_lines(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    for name, entry in found.items():
        facts = ["refused"] if "refused" in entry else []
        if "type" in entry:
            limits = [f"{sign} {entry[limit]:g}" for sign, limit in ((">=", "min"), ("<=", "max")) if limit in entry]
            kind = " | ".join(entry["choices"]) if entry.get("choices") else entry["type"]
            facts = [" ".join([kind, *limits]), f"default {json.dumps(entry['default'])}", entry["config"]]
        yield f"{name}  ({', '.join(facts)})" if facts else name
        yield from textwrap.wrap(entry["help"], 110, initial_indent="    ", subsequent_indent="    ")


@command(
    "report everything that is wrong in a recipe",
    switch("--deep", help="also load tokenizer, data and rewards (seconds)"),
    switch("--json", help="print problems and notes as JSON"),
    takes_recipe=True,
)
def check(options: argparse.Namespace) -> int:
    """Report that the recipe is right, with notes; with ``--json`` print all that was found, right or wrong."""
    with _answer(options, notes=[], deep=[]) as found:
        recipe = chosen_recipe(options)
        more = [gated_note(recipe["model_name_or_path"]), schema_note(recipe.path), *reward_notes(recipe)]
        more += [kind_note(recipe, os.environ), evaluation_note(recipe), *prompt_notes(recipe, os.environ)]
        for notes_of in parts("notes"):
            more += notes_of(recipe)
        found |= {"recipe": str(recipe.path), "notes": [*notes(recipe), *(note for note in more if note)]}
        if not options.json:
            print(*(f"grpo: note: {printable(note)}\n" for note in found["notes"]), sep="", end="")
        if options.deep:
            # Before the import: the hub's clients read these once.
            os.environ.update(hub_environment(os.environ))
            os.environ.update({"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"})
            # Without a GPU, the import of vLLM warns that it does not use Triton.
            logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)
            from grpo_recipes.trainers.deep_check import look_deep

            found["deep"] = look_deep(recipe, os.environ)
    if not options.json:
        print(*found["deep"], f"grpo: {printable(display_path(found['recipe']))} is right", sep="\n")
    return 0 if found["ok"] else EXIT_CONFIG_ERROR


@contextlib.contextmanager
def _answer(options: argparse.Namespace, **empty: Any) -> Iterator[dict[str, Any]]:
    """Yield a dict for what a command finds; with ``--json`` print it, with the problems that else end the command."""
    found = {"ok": True, "recipe": options.recipe or options.config, "problems": [], **empty}
    try:
        yield found
    except ConfigError as error:
        if not options.json:
            raise
        found |= {"ok": False, "problems": [asdict(problem) for problem in error.problems]}
    if options.json:
        print(json.dumps(found, indent=1))


@command(
    "see that right answers get their reward and wrong ones do not",
    option("--rows", type=int, default=_ROWS, help=f"rows of the dataset that are tried (default {_ROWS})"),
    switch("--json", help="print the findings as JSON"),
    takes_recipe=True,
)
def check_rewards(options: argparse.Namespace) -> int:
    """Print what the rewards give right and wrong answers; one that does not distinguish them is a ConfigError."""
    if options.rows < 1:
        raise config_error("--rows", f"is {options.rows}", "write 1 or more")
    with _answer(options, rows=0, rewards=[]) as found:
        recipe = chosen_recipe(options)
        found["recipe"] = str(recipe.path)
        if source := source_of(recipe.__getitem__):
            raise config_error(display_path(recipe.path), *source.unchecked_rewards)
        os.environ.update(hub_environment(os.environ))
        # TRL and datasets come with these, which takes seconds.
        from grpo_recipes.rewards.probe import find_problems, probe_rewards, sample_rows

        rows, counts = sample_rows(recipe, options.rows, find_assets(recipe, os.environ).lookup)
        if not rows:
            raise config_error(
                display_path(recipe.path), "the dataset has no rows with a solution", "look at its columns"
            )
        if counts.left_out and not options.json:
            columns = ", ".join(f"{name} ({reason})" for name, reason in counts.left_out.items())
            print(f"grpo: note: columns not passed to rewards: {columns}")
        results = probe_rewards(recipe, rows, counts.left_out)
        found |= {"rows": len(rows), "rewards": [asdict(one) | {"tells_apart": one.tells_apart} for one in results]}
        if not options.json:
            _print_rewards(results)
        if problems := find_problems(recipe, rows, results):
            raise ConfigError(*problems)
    if not options.json:
        print(
            f"grpo: the rewards of {printable(display_path(found['recipe']))} tell right from wrong"
            f" on {found['rows']} rows"
        )
    return 0 if found["ok"] else EXIT_CONFIG_ERROR


def _print_rewards(results: list[ProbeResult]) -> None:
    table = [["reward", "right", "mean", "missed", "wrong", "mean", "taken", "unscored"]]
    for one in results:
        facts = (one.right, one.right_mean, one.missed, one.wrong, one.wrong_mean, one.taken, one.no_verdict)
        cells = ("-" if fact is None else f"{fact:.3f}" if isinstance(fact, float) else str(fact) for fact in facts)
        table.append([one.reward, *cells])
    print(*aligned(table, numbers=True), sep="\n")
    for result in results:
        if result.failures:
            print(f"\n{result.reward} on", *(_failure(result.reward, one) for one in result.failures), sep="\n")
        if result.missed is None and result.right_mean is not None and not result.tells_apart:
            from grpo_recipes.rewards.probe import describe_unpaid

            print(f"grpo: note: {result.reward} {describe_unpaid(result) or 'gives right and wrong answers the same'}")
        if result.skipped:
            print(f"grpo: note: {result.reward} is slow: {result.skipped} further completions were not tried")


def _failure(name: str, failure: ProbeCompletion) -> str:
    from grpo_recipes.rewards.probe import unscored_reason

    def short(text: str) -> str:
        text = " ".join(text.split())
        return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"

    given = f"no score ({unscored_reason(name, failure.reason)})" if failure.value is None else f"{failure.value:.4g}"
    kind = "right" if failure.right else "wrong"
    return f"  {short(failure.prompt)!r}: {kind} answer {short(failure.completion)!r} gets {given}"


@command(
    "show what a launch would start, without starting it",
    option("--gpus", type=int, help="plan for this many GPUs instead of those visible"),
    option("--nodes", type=int, default=1, help="with --gpus: on this many nodes like that"),
    option("--gpu-memory", type=float, metavar="GIB", help="memory of a GPU; that of the visible ones"),
    option("--time", help="time limit as Slurm writes it, e.g. 72:00:00; that of the job"),
    switch("-v", "--verbose", help="print argv and environment of every process"),
    switch("--json", help="print the plan as JSON"),
    takes_recipe=True,
)
def plan(options: argparse.Namespace) -> int:
    """Print what a launch would start, on this machine or another one."""
    resources, gpus, gib = find_resources(os.environ), options.gpus, options.gpu_memory
    if options.nodes > 1 and gpus is None:
        raise config_error("--nodes", "says nothing about the GPUs of a node", "add --gpus 8")
    fewest = 1 if options.nodes > 1 else 0
    if not 1 <= options.nodes <= _MOST or not fewest <= (gpus or 0) <= _MOST:
        what = f"cannot plan for {gpus or 0} GPUs on {options.nodes} nodes"
        raise config_error("--gpus, --nodes", what, "write --gpus 8 --nodes 2")
    if gib is not None and not 1 <= gib <= _MOST:
        raise config_error("--gpu-memory", f"no GPU has {gib:g} GiB", "write --gpu-memory 80")
    if options.time is not None and not walltime_seconds(options.time):
        what = f"'{options.time}' is not a time limit as Slurm writes it"
        raise config_error("--time", what, "write --time 72:00:00")
    if gpus is not None:
        resources = replace(resources, device="cuda", gpus=tuple(str(index) for index in range(gpus)))
        resources = resources.on_nodes(options.nodes)
    if gib is not None or gpus is not None:
        resources = replace(resources, gpu_gib=gib)
    recipe = chosen_recipe(options, resources.device)
    names = names_of(recipe)
    assets = find_assets(recipe, os.environ)
    made = make_plan(recipe, resources, os.environ, names, assets)
    end = None if options.time else job_end_time(os.environ)
    left = None if end is None else max(0.0, end - time.time())
    seconds = left if options.time is None else walltime_seconds(options.time)
    takes = estimate(made, recipe, names, resources.gpu_gib, seconds)
    plain = {**made.as_json(), **asdict(takes)}
    print(
        json.dumps(plain, indent=1) if options.json else describe(made, estimates=takes.lines(), argv=options.verbose)
    )
    return 0
