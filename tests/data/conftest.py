"""Data files written on the spot, and prompts loaded from them."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from grpo_recipes import smoke
from grpo_recipes.data import Prompts, load_prompts
from grpo_recipes.recipe.configs import ScriptArguments

Rows = list[dict[str, Any]]
ROWS = [{"problem": f"{n}+1=", "answer": f"because\n#### {n + 1}"} for n in range(3)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


@pytest.fixture
def tokenizer():
    return smoke.build_tokenizer()


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """``write(rows, kind, name)``: a data file, or a folder of ``save_to_disk`` with kind ``saved``; its path."""

    def write_it(rows: Rows = ROWS, kind: str = "jsonl", name: str = "rows") -> str:
        path = tmp_path / (name if kind == "saved" else f"{name}.{kind}")
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        elif kind == "json":
            path.write_text(json.dumps(rows))
        elif kind == "csv":
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
        elif kind == "parquet":
            datasets.Dataset.from_list(rows).to_parquet(path)
        else:
            datasets.Dataset.from_list(rows).save_to_disk(path)
        return str(path)

    return write_it


@pytest.fixture
def load(write: Callable[..., str], tokenizer: Any) -> Callable[..., Prompts]:
    """``load(rows, KEY=VALUE, ...)``: the training prompts of a file with these rows, or of the dataset named."""

    def load_it(rows: Rows = ROWS, least: int = 1, seed: int = 0, **keys: Any) -> Prompts:
        if not {"dataset_name", "dataset_mixture"} & keys.keys():
            keys["dataset_name"] = write(rows)
        return load_prompts(ScriptArguments(**keys), tokenizer, least, seed)

    return load_it


def contents(prompts: Prompts) -> list[str]:
    """The last message of each prompt."""
    return [messages[-1]["content"] for messages in prompts.dataset["prompt"]]


@pytest.fixture(name="contents")
def contents_fixture() -> Callable[[Prompts], list[str]]:
    return contents
