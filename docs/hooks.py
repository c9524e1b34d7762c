"""Tables of the site that are made from the code, so that they cannot go stale.

A page says ``<!-- keys CLASS -->`` for the keys that ``configs.py`` defines in that class, ``<!-- TRL keys CLASS -->``
for those it takes over from TRL, ``<!-- other names -->`` for aliases, and ``<!-- refused keys -->`` for the keys that
are refused with a replacement. ``<!-- maxent objectives -->`` and ``<!-- maxent keys -->`` say what MaxEnt optimises,
and who reads which key. ``<!-- doctor SUBJECT -->`` lists the checks of a machine, a recipe or a run, and
``<!-- profile keys -->`` what a site's profile may hold. torch and TRL are not imported.
"""

from __future__ import annotations

import ast
import html
import inspect
import json
import re
from typing import Any

from grpo_recipes import doctor
from grpo_recipes.doctor import examine
from grpo_recipes.paths import home
from grpo_recipes.recipe import dialects, keys, read_recipe
from grpo_recipes.recipe.registry import DEFAULT_OBJECTIVE, OBJECTIVES
from grpo_recipes.slurm import profile

RECIPES = home() / "recipes"

_MARKER = re.compile(
    r"^<!-- (?P<what>keys|TRL keys|refused keys|other names|recipes|maxent|doctor|profile)( (?P<owner>\w+))? -->$",
    re.MULTILINE,
)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the tables in the place of their markers; called by mkdocs for every page."""

    def table(match: re.Match[str]) -> str:
        tables = {
            "keys": lambda: keys_table(match["owner"]),
            "TRL keys": lambda: trl_table(match["owner"]),
            "refused keys": refused_table,
            "other names": aliases_table,
            "recipes": recipes_table,
            "maxent": lambda: {"objectives": objectives_table, "keys": maxent_keys_table}[match["owner"]](),
            "doctor": lambda: doctor_table(match["owner"]),
            "profile": profile_table,
        }
        return tables[match["what"]]()

    return _MARKER.sub(table, markdown)


def own_keys() -> dict[str, list[str]]:
    """Return the fields that each class of ``configs.py`` defines itself, those of TRL redefined there included."""
    tree = ast.parse(keys.CATALOGUE_FILE.with_name("configs.py").read_text())
    return {
        node.name: [field.target.id for field in node.body if isinstance(field, ast.AnnAssign)]  # type: ignore[union-attr]
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }


def keys_table(owner: str) -> str:
    """Return a row for each key that ``owner`` defines itself: name, type with limits, default, help."""
    known = dict(keys.catalogue())
    for nested in keys.nested_catalogue().values():
        known |= {name: entry for name, entry in nested.items() if entry["config"] == owner}
    return _keys({name: known[name] for name in own_keys()[owner]})


def trl_table(owner: str) -> str:
    """Return a row for each key that ``owner`` takes over from TRL as it is."""
    own = own_keys()[owner]
    return _keys({name: e for name, e in keys.catalogue().items() if e["config"] == owner and name not in own})


def aliases_table() -> str:
    """Return a row for each other name of a key."""
    return _table(("name", "key"), [(f"`{alias}`", f"`{key}`") for alias, key in sorted(dialects.ALIASES.items())])


def recipes_table() -> str:
    """Return a row for each shipped recipe."""
    paths = sorted(path for path in RECIPES.rglob("*.yaml") if path.parent != RECIPES / "base")
    rows = [(path.relative_to(RECIPES.parent), read_recipe(path)) for path in paths]
    return _table(
        ("recipe", "model", "`accelerator`", "`per_device_train_batch_size`"),
        [
            (
                f"`{name}`",
                f"`{recipe['model_name_or_path']}`",
                recipe["accelerator"],
                recipe["per_device_train_batch_size"],
            )
            for name, recipe in rows
        ],
    )


def objectives_table() -> str:
    """Return a row for each objective of MaxEnt: the temperature and TRL's loss that it brings."""
    rows = [
        (
            f"`{name}`{', the default' * (name == DEFAULT_OBJECTIVE)}",
            f"`{objective.tau:g}`",
            " or ".join(f"`{loss}`" for loss in dict.fromkeys(map(objective.loss_type, (True, False)))),
            f"`{objective.fixed_keys(True)['scale_rewards']}`",
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
            linked = f"[`{key}`](configuration.md#grpoconfig)"
            rows.append((linked, ", ".join(readers), f"`{_default(entry)}`", _text(entry["help"])))
    return _table(("key", "read by", "default", "meaning"), rows)


def doctor_table(subject: str) -> str:
    """Return a row for each check of `grpo doctor` on a ``machine``, a ``recipe`` or a ``run``."""
    checks = {"machine": (*doctor.MACHINE, *doctor.DEEP), "recipe": doctor.RECIPE, "run": doctor.RUN}[subject]
    first_lines = [(inspect.getdoc(check) or "").splitlines()[0] for check in checks]
    names = map(examine.name_of, checks)
    return _table(("check", "looks at"), [(name, _text(line)) for name, line in zip(names, first_lines, strict=True)])


def profile_table() -> str:
    """Return a row for each key of a site's profile."""
    plain = profile.Profile("")
    return _keys({name: {**entry, "default": getattr(plain, name)} for name, entry in profile.KEYS.items()})


def _keys(entries: dict[str, dict[str, Any]]) -> str:
    return _table(
        ("key", "type", "default", "meaning"),
        [(f"`{name}`", _type(entry), f"`{_default(entry)}`", _text(entry["help"])) for name, entry in entries.items()],
    )


def refused_table() -> str:
    """Return a row for each key that is refused with what to do instead."""
    refused = sorted({**dialects.OBSOLETE_KEYS, **keys.OWNED_KEYS}.items())
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
