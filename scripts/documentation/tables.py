"""Tables of the site that are made from the code, so that they cannot go stale.

A page contains a marker for each table:

* ``<!-- all keys -->``: every key of a recipe, by topic; ``<!-- nested keys CLASS -->``: the keys of a mapping;
* ``<!-- other names -->``: aliases of keys; ``<!-- refused keys -->``: rejected keys with their replacements;
* ``<!-- recipes -->``: the shipped recipes; ``<!-- profile keys -->``: the keys of a Slurm site profile;
* ``<!-- maxent objectives -->``: the MaxEnt objectives; ``<!-- maxent keys -->``: the keys that each of them reads;
* ``<!-- atropos SUBJECT -->``: the flags, variables and YAML keys of other trainers for Atropos;
* ``<!-- doctor SUBJECT -->``: the checks of a machine, a recipe or a run;
* ``<!-- weight bridges -->``: the setups that each weight sync method works with;
* ``<!-- command line -->``: the help of each command of `grpo`.

torch and TRL are not imported. Markers of tables that scripts write from records are removed.
"""

from __future__ import annotations

import argparse
import html
import inspect
import json
import os
import re
import textwrap
import unittest.mock
from typing import Any

from grpo_recipes.cli import make_parser
from grpo_recipes.console import doctor
from grpo_recipes.console.doctor import examine
from grpo_recipes.extensions.atropos import flags as atropos_flags
from grpo_recipes.extensions.atropos import verl as atropos
from grpo_recipes.paths import find_code_root
from grpo_recipes.recipe import converters, keys, read_recipe
from grpo_recipes.recipe.registry import OBJECTIVES, ON_CPU, ON_GPUS, SETUPS, SYNC_TABLE, YES, Objective
from grpo_recipes.slurm import profile

RECIPES = find_code_root() / "recipes"

_MARKER = re.compile(
    r"^(?P<indent> *)<!-- (?P<table>all keys|nested keys|refused keys|other names|recipes|maxent|atropos|doctor|"
    r"profile|weight|command)( (?P<owner>\w+))? -->$",
    re.MULTILINE,
)
_WRITTEN = re.compile(r"^<!-- (made by \S+\.py: .+|end) -->\n", re.MULTILINE)


def fill(markdown: str) -> str:
    """Return a page with tables instead of their markers."""

    def table(match: re.Match[str]) -> str:
        tables = {
            "all keys": keys_by_topic,
            "nested keys": lambda: nested_keys(match["owner"]),
            "refused keys": refused_table,
            "other names": aliases_table,
            "recipes": recipes_table,
            "maxent": lambda: {"objectives": objectives_table, "keys": maxent_keys_table}[match["owner"]](),
            "atropos": lambda: atropos_table(match["owner"]),
            "doctor": lambda: doctor_table(match["owner"]),
            "profile": profile_table,
            "weight": bridges_table,
            "command": commands_help,
        }
        return textwrap.indent(tables[match["table"]](), match["indent"])

    return _MARKER.sub(table, _WRITTEN.sub("", markdown))


def keys_by_topic() -> str:
    """Return a heading for each topic and the list of its keys."""
    known, keys_by_title = keys.catalogue(), keys.keys_by_topic()
    parts = [f"## {title}\n\n{_keys({name: known[name] for name in names})}" for title, names in keys_by_title.items()]
    return "\n\n".join(parts)


def nested_keys(owner: str) -> str:
    """Return the keys of the class ``owner``, which describes a mapping in a recipe."""
    nested = {name: e for part in keys.nested_catalogue().values() for name, e in part.items() if e["config"] == owner}
    return _keys(nested, prefix=f"{owner}.")


def aliases_table() -> str:
    """Return a row for each other name of a key."""
    return _table(("name", "key"), [(f"`{alias}`", f"`{key}`") for alias, key in sorted(converters.ALIASES.items())])


def recipes_table() -> str:
    """Return a row for each shipped recipe; a long name may wrap behind a slash."""
    paths = sorted(path for path in RECIPES.rglob("*.yaml") if path.parent != RECIPES / "base")
    rows = [(path.relative_to(RECIPES.parent), read_recipe(path)) for path in paths]
    return _table(
        ("recipe", "`accelerator`", "batch of a device"),
        [
            (
                f"<code>{str(name).replace('/', '/<wbr>')}</code>",
                recipe["accelerator"],
                recipe["per_device_train_batch_size"],
            )
            for name, recipe in rows
        ],
    )


def bridges_table() -> str:
    """Return a row for each setup: whether it works with each weight sync method, or the reason why not."""

    def cell(answer: str) -> str:
        return answer if answer in (YES, ON_GPUS, ON_CPU) else f"no: {answer}"

    rows = [(text, *(cell(method.serves[name]) for method in SYNC_TABLE.values())) for name, text in SETUPS.items()]
    return _table(("", *(f"`{name}`" for name in SYNC_TABLE)), rows)


def objectives_table() -> str:
    """Return a row for each objective of MaxEnt: the temperature and TRL's loss that it brings."""
    per_token = {"maxent_policy_temperature": 0.0, "maxent_length_normalize_policy": True}

    def losses(name: str, objective: Objective) -> str:
        settings = [per_token, per_token | {"maxent_length_normalize_policy": False}]
        types = (objective.loss_type((setting | {"maxent_objective": name}).__getitem__) for setting in settings)
        return " or ".join(f"`{loss_type}`" for loss_type in dict.fromkeys(types))

    rows = [
        (
            f"`{name}`",
            "none" if objective.tau is None else f"`{objective.tau:g}`",
            losses(name, objective),
            f"`{objective.fixed_keys((per_token | {'maxent_objective': name}).__getitem__)['scale_rewards']}`",
        )
        for name, objective in OBJECTIVES.items()
    ]
    return _table(("objective", "`maxent_tau` by default", "`loss_type`", "`scale_rewards`"), rows)


def maxent_keys_table() -> str:
    """Return a row for each key of MaxEnt, with the objectives that read it."""
    rows = []
    for key, entry in keys.catalogue().items():
        if key.startswith("maxent_"):
            readers = [name for name, objective in OBJECTIVES.items() if key not in objective.unread]
            readers = ["all"] if len(readers) == len(OBJECTIVES) else [f"`{name}`" for name in readers]
            linked = f"[`{key}`](configuration.md#{key})"
            rows.append((linked, ", ".join(readers), f"`{_default(entry)}`", _text(entry["help"])))
    return _table(("key", "read by", "default", "meaning"), rows)


def atropos_table(subject: str) -> str:
    """Return a row for each of the ``flags``, ``variables`` or YAML ``settings`` of others' trainers for Atropos."""
    head = {"flags": ("flag", "default", "does"), "variables": ("variable", "default", "is"), "settings": ("key", "is")}
    row_makers = {"flags": atropos_flags.list_flag_rows, "variables": atropos_flags.list_variable_rows}
    if subject in row_makers:
        rows = row_makers[subject]()
    else:
        rows = [(f"`{name}`", meaning) for name, meaning in atropos.rows()]
    return _table(head[subject], [tuple(cell.replace("|", "\\|") for cell in row) for row in rows])


def doctor_table(subject: str) -> str:
    """Return a row for each check of `grpo doctor` on a ``machine``, a ``recipe`` or a ``run``."""
    checks = {"machine": (*doctor.MACHINE, *doctor.DEEP), "recipe": doctor.RECIPE, "run": doctor.RUN}[subject]
    first_lines = [(inspect.getdoc(check) or "").splitlines()[0] for check in checks]
    names = map(examine.get_check_name, checks)
    return _table(("check", "looks at"), [(name, _text(line)) for name, line in zip(names, first_lines, strict=True)])


def profile_table() -> str:
    """Return a row for each key of a site's profile."""
    plain = profile.Profile("")
    return _keys({name: {**entry, "default": getattr(plain, name)} for name, entry in profile.KEYS.items()})


def commands_help() -> str:
    """Return a section for each command of `grpo` with its help text, as a terminal of 100 columns shows it."""
    parts = []
    with unittest.mock.patch.dict(os.environ, {"COLUMNS": "100"}):
        for name, parser in command_parsers().items():
            parts.append(f"## grpo {name}\n\n```console\n{parser.format_help().rstrip()}\n```")
    return "\n\n".join(parts)


def command_parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command by its name."""
    actions = make_parser()._actions
    (subparsers,) = (action for action in actions if isinstance(action, argparse._SubParsersAction))
    return dict(subparsers.choices)


def _keys(entries: dict[str, dict[str, Any]], prefix: str = "") -> str:
    """Return an HTML list of keys, each with an anchor, its type and limits, its default and its meaning."""
    parts = [
        f'<div id="{prefix}{name}"><dt><code>{name}</code><span>{_coded(_type(entry))}</span>'
        f"<span>default <code>{html.escape(_default(entry))}</code></span></dt>"
        f"<dd>{_coded(html.escape(entry['help'], quote=False))}</dd></div>"
        for name, entry in entries.items()
    ]
    return '<dl class="keys">\n' + "\n".join(parts) + "\n</dl>"


def _coded(text: str) -> str:
    """Convert Markdown's code and links to HTML. Code stands between single or double backticks."""
    linked = re.sub(r"\[([^]]+)\]\((https?://[^)\s]+)\)", r'<a href="\2">\1</a>', text)
    return re.sub(r"(`{1,2})([^`]+)\1", r"<code>\2</code>", linked)


def refused_table() -> str:
    """Return a row for each rejected key with the edit that replaces it."""
    renamed = {name: row.fix_for(None) for name, row in converters.names().items()}
    refused = sorted({**renamed, **keys.OWNED_KEYS}.items())
    return _table(("key", "do this instead"), [(f"`{name}`", _text(instead)) for name, instead in refused])


def _table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def _type(entry: dict[str, Any]) -> str:
    if entry.get("choices"):
        return ", ".join(f"`{choice}`" for choice in entry["choices"])
    low, high = entry.get("min"), entry.get("max")
    if low is None and high is None:
        return str(entry["type"])
    if high is None:
        return f"{entry['type']} ≥ {low:g}"
    if low is None:
        return f"{entry['type']} ≤ {high:g}"
    return f"{entry['type']}, {low:g}" if low == high else f"{entry['type']}, {low:g} to {high:g}"


def _default(entry: dict[str, Any]) -> str:
    return json.dumps(entry["default"]).strip('"')


def _text(text: str) -> str:
    return html.escape(text, quote=False).replace("|", "\\|")
