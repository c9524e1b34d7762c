"""The command `grpo keys`: search the keys of a recipe, the environment variables and the benchmarks; list objectives.

The most important keys come first, in the order of `topics.yaml`. Exact matches are printed with their whole
description, other keys in one row each.
"""

import argparse
import json
import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from grpo_recipes.cli import command, option, switch
from grpo_recipes.cli.display import print_notes, print_table, print_wrapped
from grpo_recipes.errors import config_error
from grpo_recipes.recipe.converters import ALIASES, meaning_of, names, nearest
from grpo_recipes.recipe.keys import OWNED_KEYS, catalogue, keys_by_topic, nested_catalogue, search_words, variables
from grpo_recipes.recipe.objectives import NAMED_OBJECTIVES
from grpo_recipes.recipe.registry import benchmarks
from grpo_recipes.recipe.rules import unsupported_keys

Entries = dict[str, dict[str, Any]]  # name -> type, default, help and limits; only help if it is not a key

_SENTENCE_END = re.compile(r"(?<!e\.g)(?<!i\.e)\. ")
_LONGEST_LINE = 110  # characters of a description
_LONGEST_DEFAULT = 20  # characters of a default in a row


@command(
    "Search the keys of a recipe",
    option("word", nargs="?", help="Part of a name or of its description (default: list all)"),
    switch("--json", help="Print JSON"),
    exclusive=(
        switch("--env", help="Search the environment variables instead"),
        switch("--benchmarks", help="Search the benchmarks instead"),
    ),
)
def keys(options: argparse.Namespace) -> int:
    """Print the recipe keys whose name or help has the word, or all of them without a word.

    ``--env`` prints variables instead, ``--benchmarks`` prints benchmarks, and the word "objectives" all objectives.
    With a word, settings of other tools and rejected keys are printed too, with their replacements. Return 0. Raise
    ConfigError if nothing matches, or if the word is a setting of another tool that no recipe key replaces.
    """
    word = (options.word or "").lower()
    if word in ("objective", "objectives"):
        _print_objectives(options.json)
        return 0
    table = "--env" if options.env else "--benchmarks" if options.benchmarks else ""
    sections: dict[str, Entries]
    if table:
        texts = variables() if options.env else {name: benchmark.help for name, benchmark in benchmarks().items()}
        sections = {"": {name: {"help": text} for name, text in texts.items()}}
    else:
        sections = {title: dict(_list_entries(keys)) for title, keys in keys_by_topic().items()}
    entries = {name: entry for section in sections.values() for name, entry in section.items()}
    if not word:
        if options.json:
            print(json.dumps(entries, indent=1))
        else:
            _print_sections(sections)
        return 0
    meaning = meaning_of(word) if not table and word not in catalogue() else None
    topic_keys = [] if table else [key for key, words in search_words().items() if word in words.split()]
    if meaning and not meaning.sets and not topic_keys:
        raise config_error(f"'{options.word}'", "is not a key of a recipe", meaning.fix)
    exact = {*topic_keys, *meaning.sets} if meaning else {word, *topic_keys}
    word_start = re.compile(rf"(?<![a-z0-9]){re.escape(word)}")  # "ema" does not match "schema"

    def sort_key(name: str) -> tuple[bool, bool]:
        """Return a sort key: exact matches come first, then names with a word that starts as the search word."""
        return name.lower() not in exact, not word_start.search(name.lower().replace("_", " "))

    def mentions_word(name: str) -> bool:
        """Return whether the name or the help has a word that starts as the search word."""
        text = f"{name} {entries[name]['help']}".lower()
        return bool(word_start.search(text) or word_start.search(text.replace("_", " ")))

    # The sort is stable, so that each group of matches keeps the order of importance.
    matches = {name: entries[name] for name in sorted(entries, key=sort_key) if name in exact or mentions_word(name)}
    rejected: dict[str, str] = {}
    if not table:
        fixes = {name: row.fix_for(None) for name, row in names().items() if name != word} | OWNED_KEYS
        rejected = {name: fixes[name] for name in sorted(fixes) if word_start.search(name.replace("_", " "))}
    if not matches and not rejected:
        suggestion = None if table else nearest(options.word)
        fix = f"try {suggestion}" if suggestion else f"see grpo keys {table}".rstrip()
        problem = f"nothing in grpo keys {table} matches" if table else "no key matches"
        raise config_error(f"'{options.word}'", problem, fix)
    if options.json:
        print(json.dumps(matches | {name: {"help": fix, "refused": True} for name, fix in rejected.items()}, indent=1))
        return 0
    if word in ALIASES:
        print(f"grpo: '{word}' is an alias of {ALIASES[word]}")
    elif meaning and (meaning.sets or topic_keys):
        print(f"grpo: for '{word}' {meaning.fix_for(None)}")
    _print_matches(matches, exact, word_start)
    if rejected:
        (name, fix), *others = rejected.items()
        listed = f"{', '.join(rejected)} (grpo keys NAME prints the replacement)" if others else f"{name} ({fix})"
        print_wrapped(f"Rejected names of other tools: {listed}")
    return 0


def _print_objectives(as_json: bool) -> None:
    """Print each objective with its keys, its help and its paper, as a table or as JSON."""
    if as_json:
        print(json.dumps({name: row._asdict() for name, row in NAMED_OBJECTIVES.items()}, indent=1))
        return
    rows = [
        [name, ", ".join(f"{key}: {value}" for key, value in row.keys.items()), f"{row.help} ({row.paper})"]
        for name, row in NAMED_OBJECTIVES.items()
    ]
    print_table(rows, "Objectives")
    keys = dict.fromkeys(next(iter(row.keys)) for row in NAMED_OBJECTIVES.values())
    print_notes([f"grpo keys {', '.join(keys)} describes the keys"])


def _list_entries(keys: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each key with its entry, followed by the keys of the mappings inside it: ``dataset_mixture.datasets``."""
    for key in keys:
        yield key, catalogue()[key]
        for path, part in nested_catalogue().items():
            if path.partition(".")[0] == key:
                yield from ((f"{path}.{name}", entry) for name, entry in part.items())


def _print_sections(sections: Mapping[str, Entries]) -> None:
    """Print a table for each topic, with the name, the default and the first sentence of the help of each key.

    ``sections`` maps topics to their keys. Keys that are not supported with any value are left out.
    """
    for number, (title, entries) in enumerate(sections.items()):
        rows = [_make_row(name, entry) for name, entry in entries.items() if name not in unsupported_keys()]
        print_table(rows, title, space=number > 0)


def _print_matches(matches: Entries, exact: set[str], word_start: re.Pattern[str]) -> None:
    """Print exact matches with type, limits and the whole help, then a table of the other matches.

    ``exact`` has names in lower case. ``word_start`` selects the sentence of the help in the table.
    """
    described = [name for name in matches if name.lower() in exact]
    for name in described:
        print(*_describe_key(name, matches[name]), sep="\n")
    rows = [_make_row(name, entry, word_start) for name, entry in matches.items() if name not in described]
    if rows:
        print_table(rows, space=bool(described))


def _describe_key(name: str, entry: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line with an entry's name, and for a key its type, limits and default, then its help in lines."""
    facts = []
    if "type" in entry:
        limits = [f"{sign} {entry[limit]:g}" for sign, limit in ((">=", "min"), ("<=", "max")) if limit in entry]
        kind = " | ".join(entry["choices"]) if entry.get("choices") else entry["type"]
        facts = [" ".join([kind, *limits]), f"default {json.dumps(entry['default'])}", entry["config"]]
    yield f"{name}  ({', '.join(facts)})" if facts else name
    width = min(shutil.get_terminal_size((_LONGEST_LINE, 0)).columns, _LONGEST_LINE)
    yield from textwrap.wrap(entry["help"], width, initial_indent="    ", subsequent_indent="    ")


def _make_row(name: str, entry: Mapping[str, Any], word_start: re.Pattern[str] | None = None) -> list[str]:
    """Return name, default and a sentence of the help: the first that ``word_start`` matches, or else the first.

    The default is JSON of at most 20 characters; it is shortened, or empty without a default.
    """
    sentences = [f"{sentence.removesuffix('.')}." for sentence in _SENTENCE_END.split(entry["help"])]
    with_word = (text for text in sentences if word_start and word_start.search(text.lower().replace("_", " ")))
    default = json.dumps(entry["default"]) if "default" in entry else ""
    short = default if len(default) <= _LONGEST_DEFAULT else f"{default[: _LONGEST_DEFAULT - 1]}…"
    return [name, short, next(with_word, sentences[0])]
