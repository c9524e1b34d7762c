"""A fake hub with a tiny model and a dataset of sums, and a shell that runs `grpo` against it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_hub import FakeHub
from grpo_command import run_grpo

from grpo_recipes import smoke
from grpo_recipes.recipe.keys import READ_VARIABLES, environment_keys

GRPO = str(Path(sys.executable).with_name("grpo"))
ROWS = [{"problem": f"{number}+1=", "answer": str(number + 1)} for number in range(30)]
RECIPE = {
    "model_name_or_path": "ada/sums",
    "dataset_name": "ada/rows",
    "dtype": "float32",
    "bf16": False,
    "prompts_per_step": 4,
    "num_generations": 4,
    "max_prompt_length": 32,
    "max_completion_length": 8,
    "run_name": "offline",
}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save the smoke model with random weights; training it would take a minute."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    tokenizer = smoke.build_tokenizer()
    smoke._save_model(smoke.build_model(tokenizer), tokenizer, "float32", folder)
    return folder


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture
def hub(tiny_model: Path) -> Iterator[FakeHub]:
    """Start a hub with ``ada/sums`` and ``ada/rows``."""
    with FakeHub().running() as fake:
        fake.add("model", "ada/sums", tiny_model, license="apache-2.0")
        fake.add("dataset", "ada/rows", {"data/train-0.jsonl": jsonl(ROWS), "data/test-0.jsonl": jsonl(ROWS[:5])})
        yield fake


class Shell:
    """A user's shell with a folder, separate caches and the hub's address."""

    def __init__(self, folder: Path, hub: FakeHub):
        self.folder, self.cache = folder, folder / "cache"
        mine = {*READ_VARIABLES, *environment_keys()}
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in mine and not name.startswith(("SLURM_", "HF_", "VLLM_"))
        }
        self.environment = {**inherited, **hub.environment(), "CACHE_ROOT": str(self.cache), "HOME": str(folder)}

    def recipe(self, **changes: Any) -> str:
        (self.folder / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, **changes}))
        return "recipe.yaml"

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.folder,
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def grpo(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return run_grpo(*arguments, cwd=self.folder, env={**self.environment, **variables})

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted((self.cache / "fetched").glob("*@main*.json"))]


@pytest.fixture
def shell(tmp_path: Path, hub: FakeHub) -> Shell:
    return Shell(tmp_path, hub)


@pytest.fixture
def variables(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, str]]:
    """Return the shell's environment for functions called in this process."""
    return lambda: dict(shell.environment)
