"""A fake hub, and run directories with the files of a real launch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from fake_hub import WRITER, FakeHub

COMMIT = "c0ffee" * 6 + "c0de"
MODEL = {
    "config.json": b"{}",
    "model.safetensors": b"final weights",
    "tokenizer.json": b"{}",
    "training_args.bin": b"!",
}


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub().running() as fake:
        yield fake


@pytest.fixture
def logged_in(hub: FakeHub, tmp_path: Path) -> dict[str, str]:
    """Return the environment of a user with write access."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return {**inherited, **hub.environment(WRITER), "HF_HOME": str(tmp_path / "hf")}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Create a run that has trained five steps."""
    folder = tmp_path / "run"
    write(folder / "model", MODEL)
    source = {"config": None, "split": None, "limit": None, "revision": "main", "commit": COMMIT, "path": "/there"}
    facts: dict[str, Any] = {
        "run.json": {
            "run_name": "sums",
            "command": "grpo launch recipe.yaml",
            "code": {"commit": "0123abc", "dirty": False},
            "versions": {"trl": "1.16.0", "python": "3.11"},
            "sources": [
                {**source, "kind": "model", "id": "ada/base", "licence": "mit"},
                {**source, "kind": "dataset", "id": "ada/rows", "split": "train", "licence": None},
            ],
        },
        "summary.json": {
            "status": "completed",
            "benchmarks": {"gsm8k": {"pass@1": 0.5, "pass@1_ci": [0.4, 0.6], "problems": 8}},
        },
        "plan.json": {
            "flavour": "cuda",
            "smoke": False,
            "batch": {"completions": 32, "num_generations": 8, "world_size": 2},
        },
    }
    for name, content in facts.items():
        (folder / name).write_text(json.dumps(content))
    rows = [{"step": step, "max_steps": 5, "reward": step / 10} for step in range(1, 6)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.yaml").write_text(
        "# /home/ada/own/recipe.yaml:1\nmodel_name_or_path: ada/base\ndataset_name: ada/rows\n"
    )
    return folder


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
