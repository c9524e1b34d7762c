"""The table format of config converters: every part of a row has its effect, for any tool."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_recipes.errors import Problem
from grpo_recipes.recipe.converters.files import FileConverter, Surroundings
from grpo_recipes.recipe.converters.table import Setting, Settings, read_table
from grpo_recipes.recipe.document import Value, as_words, read_file

TABLE = """
implied:
  - {reason: the file is read as, keys: {use_vllm: true}}
  - {reason: "'data' is read as", section: data, unless: ["dataset_*"], keys: {dataset_name: a/b}}
settings:
  - {names: lr rate, key: learning_rate, default: 1e-5}
  - {names: mode, key: optim, values: {fast: adamw_8bit, "slow*": {optim: adamw_torch, max_grad_norm: 0.5}}}
  - {names: clip, values: {"none": {}, "0": {}}, why: nothing is clipped, fix: write 0}
  - {names: gone, fix: remove it}
  - {names: data.size, least: 2, convert: doubled, fix: write e.g. 4}
  - {names: data.seed, key: seed, unless: {mode: fast}}
  - {names: data.order, type: bool, values: {"true": {shuffle_dataset: true}, "false": {shuffle_dataset: false}}}
  - {names: data.rank, key: lora_r, needs: {mode: slow slower}}
"""


def doubled(setting: Setting, settings: Settings) -> None:
    """Convert a value with the help of another setting. The table lists this function."""
    setting.write({"max_steps": int(setting.value) * settings.values.get("data.seed", 2)})


@pytest.fixture
def converter(tmp_path: Path) -> FileConverter:
    (tmp_path / "table.yaml").write_text(TABLE)
    return FileConverter(tmp_path / "table.yaml", __name__, lambda file: "data" in file)


def read(
    converter: FileConverter, folder: Path, file: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return the recipe keys of a file, its problems and its notes."""
    path = folder / "theirs.yaml"
    path.write_text(yaml.safe_dump(dict(file), sort_keys=False))
    problems: list[Problem] = []
    notes: list[str] = []
    keys = converter.as_keys(read_file(path, []), Surroundings(dict(file)), problems, notes)
    return {key: value.value for key, value in keys.items()}, list(map(str, problems)), notes


@pytest.mark.parametrize(
    ("file", "keys"),
    [
        ({"lr": 0.1}, {"learning_rate": 0.1}),
        ({"rate": 0.1}, {"learning_rate": 0.1}),
        ({"mode": "fast"}, {"optim": "adamw_8bit"}),
        ({"mode": "slower"}, {"optim": "adamw_torch", "max_grad_norm": 0.5}),
        ({"mode": "other"}, {"optim": "other"}),
        ({"data": {"size": 4}}, {"max_steps": 8}),
        ({"data": {"size": 4, "seed": 3}}, {"max_steps": 12, "seed": 3}),
        ({"data": {"order": False}}, {"shuffle_dataset": False}),
        ({"mode": "slow", "data": {"rank": 4}}, {"optim": "adamw_torch", "max_grad_norm": 0.5, "lora_r": 4}),
        ({"max_steps": 3}, {"max_steps": 3}),
    ],
)
def test_a_setting_becomes_recipe_keys(converter, tmp_path: Path, file: dict, keys: dict) -> None:
    converted, problems, _ = read(converter, tmp_path, {"dataset_name": "c/d", **file})
    assert problems == []
    assert converted == {"use_vllm": True, "dataset_name": "c/d", **keys}


@pytest.mark.parametrize(
    ("file", "note"),
    [
        ({"lr": 0.1}, "theirs.yaml:1: 'lr' is read as learning_rate: 0.1"),
        ({"clip": 0}, "theirs.yaml:1: clip: 0 changes nothing: nothing is clipped"),
        ({"clip": None}, "theirs.yaml:1: clip changes nothing: nothing is clipped"),
        ({"mode": "fast", "data": {"seed": 1}}, "theirs.yaml:3: data.seed: 1 changes nothing: mode is fast"),
        ({"data": {"size": 2}}, "theirs.yaml:1: 'data' is read as dataset_name: a/b"),
    ],
)
def test_a_note_tells_how_a_setting_is_read(converter, tmp_path: Path, file: dict, note: str) -> None:
    _, problems, notes = read(converter, tmp_path, file)
    assert problems == [] and any(line.endswith(note) for line in notes), notes


@pytest.mark.parametrize(
    ("file", "problem"),
    [
        ({"clip": 1}, "1: 'clip: 1' has no equivalent here. Fix: write 0"),
        ({"gone": 1}, "1: 'gone: 1' has no equivalent here. Fix: remove it"),
        ({"lr": None}, "1: 'lr' is empty. Fix: give it a value, or remove it"),
        ({"data": {"size": 1}}, "2: 'data.size' must be an integer of at least 2, got 1. Fix: write e.g. 4"),
        (
            {"data": {"order": "maybe"}},
            "2: 'data.order' must be true or false, got 'maybe'. Fix: write data.order=",
        ),
        (
            {"mode": "fast", "data": {"rank": 4}},
            "3: 'data.rank' does nothing with mode fast. Fix: write mode slow, or leave it out",
        ),
        ({"data": {"ordeer": 1}}, "2: unknown key 'ordeer' in data. Fix: write 'order'"),
        ({"data": {"xyzzy": 1}}, "2: unknown key 'xyzzy' in data. Fix: write one of size, seed, order, rank"),
        ({"data": {"max_tokens": 1}}, "2: unknown key 'max_tokens' in data. Fix: write max_completion_length: 1"),
        ({"data": 3}, "1: data: expected a mapping, got 3. Fix: write its settings below it"),
        ({"lr": 1, "rate": 2}, "2: 'rate' and 'lr' give learning_rate two values. Fix: keep one of the two"),
        (
            {"lr": 1, "learning_rate": 2},
            "1: 'lr' and 'learning_rate' give learning_rate two values. Fix: keep learning",
        ),
    ],
)
def test_any_other_setting_is_rejected_at_its_line(converter, tmp_path: Path, file: dict, problem: str) -> None:
    _, (line,), _ = read(converter, tmp_path, file)
    assert line.partition("theirs.yaml:")[2].startswith(problem)


def test_a_flag_is_named_by_its_own_spelling(tmp_path: Path) -> None:
    (tmp_path / "flags.yaml").write_text("flags:\n  - {names: --lr, key: learning_rate}\n  - {names: --n, least: 1}\n")
    table = read_table(tmp_path / "flags.yaml", "flags")
    setting = table.translate("--n", Value("0", "--n", from_text=True), Settings({}))
    assert str(setting.problem) == ("--n: must be an integer of at least 1, got '0'. Fix: write e.g. --n 2")
    assert table.translate("--lr", Value("1", "--lr", from_text=True), Settings({})).keys == {"learning_rate": "1"}


def test_keys_are_printed_as_flags_that_mean_the_same() -> None:
    keys = {"max_steps": 3, "bf16": False, "top_k": None, "reward_funcs": ["a", "b"], "report_to": [],
            "atropos_environment_args": {"seed": 7}}  # fmt: skip
    assert as_words({key: Value(value, "here") for key, value in keys.items()}) == [
        "--max_steps", "3", "--bf16", "false", "--top_k", "null", "--reward_funcs", "a", "b", "--report_to", "none",
        "--atropos_environment_args", "{seed: 7}",
    ]  # fmt: skip
