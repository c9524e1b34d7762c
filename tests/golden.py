"""Golden recipes: a wrong recipe per file, the messages of its check, and the corrected recipe.

A file contains YAML documents. The first has the keys that make the right recipe of ``conftest.py`` wrong. Each other
document is a correction: the keys to set, and `remove: [KEY, ...]`. Comments at the top are the messages, one line per
problem:

    # recipe.yaml:4: top_p 0.9 biases the importance-sampling correction ... Fix: remove top_p, or ...
    top_p: 0.9
    ---
    vllm_importance_sampling_correction: false

In a message, ``...`` stands for any text, and FOLDER for the folder of the file. After a change of messages, run
``GRPO_GOLDEN=write pytest tests/recipe``. It writes the messages that no longer match, and ``git diff`` shows them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_recipes.errors import ConfigError
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.check import check


def golden_files(module: str, group: str) -> list:
    """Return a test case per file of the folder ``golden/GROUP`` next to a test module."""
    files = sorted((Path(module).with_name("golden") / group).glob("*.yaml"))
    assert files, f"no golden files of {group}"
    return [pytest.param(path, id=path.stem) for path in files]


def compare_messages(path: Path, read: Callable[..., Recipe]) -> None:
    """Assert that a wrong recipe has the problems of the file's messages, and that each correction has none."""
    text = path.read_text()
    messages = [line.removeprefix("# ") for line in text.splitlines() if line.startswith("# ")]
    wrong, *corrections = yaml.safe_load_all(text.replace("FOLDER", str(path.parent)))
    problems = [problem.replace(str(path.parent), "FOLDER") for problem in problems_of(read, wrong)]
    if os.environ.get("GRPO_GOLDEN") == "write" and not matches(messages, problems):
        keys = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("# "))
        path.write_text("".join(f"# {problem}\n" for problem in problems) + keys)
    else:
        assert matches(messages, problems), "\n".join([f"{path.name} has other messages:", *problems])
    assert problems and all(". Fix: " in problem for problem in problems)
    assert corrections
    for correction in corrections:
        removed = correction.pop("remove", ())
        keys = {key: value for key, value in {**wrong, **correction}.items() if key not in removed}
        assert problems_of(read, keys) == [], correction


def problems_of(read: Callable[..., Recipe], keys: dict[str, Any]) -> list[str]:
    """Return the problems of a recipe with these keys: of its types, or else of the rules."""
    try:
        problems = check(read(**keys), {})
    except ConfigError as error:
        problems = error.problems
    return list(map(str, problems))


def matches(messages: list[str], problems: list[str]) -> bool:
    """Return whether there is a message for each problem, in order. ``...`` in a message stands for any text."""
    patterns = [".*".join(map(re.escape, message.split("..."))) for message in messages]
    return len(patterns) == len(problems) and all(map(re.fullmatch, patterns, problems))
