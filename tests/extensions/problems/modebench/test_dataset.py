"""The rows of both tasks: pinned, disjoint, and changed by every key."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_recipes.data.prompts import load_eval_prompts, load_prompts
from grpo_recipes.errors import ConfigError
from grpo_recipes.evaluate.benchmarks import load_problems
from grpo_recipes.extensions.problems.modebench.dataset import TASK_KEYS, TASKS, Settings, make_rows
from grpo_recipes.paths import find_code_root
from grpo_recipes.recipe.keys import catalogue

DEFAULTS = Settings.read(lambda key: catalogue()[key]["default"])
# sha256 of the rows as JSON lines with sorted keys: every Python version gives the same hash for the default keys.
PINNED = {
    ("modebench:countdown", "train"): "30ac3b682874ca56a2b228a1c27d7cfee7a177c475e25eb9398e7b4aa6227df6",
    ("modebench:countdown", "test"): "9848d73b855234162bbd7855957a6f00533d128ae6d262978cbb4262e6f642e9",
    ("modebench:graph_coloring", "train"): "dd1e4ce2c2b6266c4ab7c45ec09157203bd5cde3c073477f167f06b9a941b855",
    ("modebench:graph_coloring", "test"): "faba6741f87a3c622e5332f450ecc80da2d37cb4bfb5a066d31dfe3fabe8127f",
}
OTHER_VALUES = {
    "prompts": 100, "test_prompts": 50, "seed": 1, "min_modes": 3, "max_modes": 2, "numbers": 4, "largest_number": 30,
    "vertices": 9, "hidden": 4,
}  # fmt: skip


def digest(task: str, split: str, settings: Settings = DEFAULTS) -> str:
    lines = "\n".join(json.dumps(row, sort_keys=True) for row in make_rows(task, split, settings))
    return hashlib.sha256(lines.encode()).hexdigest()


@pytest.mark.parametrize(("task", "split"), PINNED)
def test_the_splits_are_these(task: str, split: str) -> None:
    assert digest(task, split) == PINNED[task, split]
    assert len(make_rows(task, split, DEFAULTS)) == {"train": 384, "test": 128}[split]


def interpreter(version: str) -> str | None:
    """Return a working Python of this version from PATH or pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates = [shutil.which(f"python{version}"), *map(str, pyenv.glob(f"versions/{version}.*/bin/python"))]
    answers = (
        candidate
        for candidate in candidates
        if candidate and not subprocess.run([candidate, "-V"], capture_output=True).returncode
    )
    return next(answers, None)


@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_another_python_makes_the_same_rows(version: str) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    # Import the package without its __init__, which registers the extension and needs YAML.
    code = (
        "import sys, json, hashlib, types; sys.path.insert(0, sys.argv[1])\n"
        "package = sys.modules['grpo_recipes.extensions.problems'] = types.ModuleType('problems')\n"
        "package.__path__ = [f'{sys.argv[1]}/grpo_recipes/extensions/problems']\n"
        "from grpo_recipes.extensions.problems.modebench.dataset import Settings, make_rows\n"
        f"settings = {DEFAULTS!r}\n"
        "for task, split in json.loads(sys.argv[2]):\n"
        "    lines = '\\n'.join(json.dumps(row, sort_keys=True) for row in make_rows(task, split, settings))\n"
        "    print(hashlib.sha256(lines.encode()).hexdigest())\n"
    )
    command = [python, "-c", code, str(find_code_root() / "src"), json.dumps(list(PINNED))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == list(PINNED.values())


@pytest.mark.parametrize("task", TASKS)
def test_no_problem_is_in_both_splits_or_twice(task: str) -> None:
    for settings in (DEFAULTS, replace(DEFAULTS, prompts=200, seed=5)):
        prompts = [row["problem"] for split in ("train", "test") for row in make_rows(task, split, settings)]
        assert len(set(prompts)) == len(prompts) == settings.prompts + settings.test_prompts


@pytest.mark.parametrize("task", TASKS)
def test_the_test_split_does_not_depend_on_the_size_of_the_other(task: str) -> None:
    fewer = replace(DEFAULTS, prompts=10)
    assert make_rows(task, "test", fewer) == make_rows(task, "test", DEFAULTS)
    assert make_rows(task, "train", fewer) == make_rows(task, "train", DEFAULTS)[:10]


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_every_key_changes_the_data(name: str) -> None:
    small = replace(DEFAULTS, prompts=60, test_prompts=30)
    changed = replace(small, **{name: OTHER_VALUES[name]})
    readers = [task for task in TASKS if f"modebench_{name}" in TASK_KEYS[task]] or TASKS
    for task in TASKS:
        same = [digest(task, split, small) == digest(task, split, changed) for split in ("train", "test")]
        assert all(same) == (task not in readers)
        assert small.fingerprint(task) != changed.fingerprint(task)
    assert OTHER_VALUES.keys() == Settings.__dataclass_fields__.keys()


@pytest.mark.parametrize("task", TASKS)
def test_modes_are_as_asked_for(task: str) -> None:
    for low, high in ((2, 24), (1, 1), (3, 4)):
        test_rows = make_rows(
            task, "test", replace(DEFAULTS, min_modes=low, max_modes=high, prompts=10, test_prompts=10)
        )
        assert all(low <= row["modes"] <= high for row in test_rows)
        assert all(json.loads(row["answer"])["modes"] == row["modes"] for row in test_rows)


def test_too_many_are_refused_with_how_many_there_are() -> None:
    with pytest.raises(ConfigError, match="only 725 exist"):
        make_rows("modebench:countdown", "train", replace(DEFAULTS, prompts=598))
    assert len(make_rows("modebench:countdown", "train", replace(DEFAULTS, prompts=597))) == 597


@pytest.mark.parametrize(
    ("changes", "key", "fix"),
    [
        ({"prompts": 598}, "modebench_prompts", "set modebench_prompts: 597 or less"),
        (
            {"test_prompts": 725},
            "modebench_test_prompts",
            "set modebench_test_prompts: 181 and modebench_prompts: 544",
        ),
        ({"min_modes": 999, "max_modes": 999}, "modebench_test_prompts", "widen modebench_min_modes to modebench_max"),
    ],
)
def test_the_key_that_is_too_large_is_named_with_a_number_that_is_not(
    changes: dict[str, int], key: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as error:
        make_rows("modebench:countdown", "train", replace(DEFAULTS, **changes))
    (problem,) = error.value.problems
    assert problem.where == key and problem.fix.startswith(fix)


def arguments(**keys: Any) -> Any:
    from grpo_recipes.recipe.configs import ScriptArguments

    return ScriptArguments(**{"dataset_name": "modebench:countdown", "modebench_prompts": 20, **keys})


def test_a_recipe_trains_and_is_evaluated_on_them(tokenizer: Any) -> None:
    args = arguments(system_prompt="Return only the final answer.", eval_subsample=1.0)
    trained, held_out = load_prompts(args, tokenizer), load_eval_prompts(args, tokenizer, seed=0)
    assert (len(trained.dataset), len(held_out.dataset)) == (20, 128)
    first = trained.dataset[0]
    assert [message["role"] for message in first["prompt"]] == ["system", "user"]
    assert first["prompt"][1]["content"].startswith("Using the numbers [")
    assert json.loads(first["answer"])["modes"] == first["modes"] >= 2
    named = arguments(eval_dataset_name="modebench:graph_coloring", eval_subsample=1.0)
    assert "Color this graph" in load_eval_prompts(named, tokenizer, seed=0).example


def test_too_many_are_refused_where_they_are_loaded(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"only 725 exist\. Fix: set modebench_prompts: 597 or less"):
        load_prompts(arguments(modebench_prompts=9999), tokenizer)


def test_a_benchmark_has_the_test_split() -> None:
    problems = load_problems("modebench:countdown", arguments(dataset_name="x"), 0)
    expected = make_rows("modebench:countdown", "test", replace(DEFAULTS, prompts=20))
    assert [(problem.prompt[-1]["content"], problem.gold) for problem in problems] == [
        (row["problem"], row["answer"]) for row in expected
    ]
