"""Fixtures for the doctor tests: its command in a child process, fake programs and servers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from grpo_command import run_grpo
from run_folders import make_run, row_fixture, small_disk

from grpo_recipes.console.doctor.examine import Machine
from grpo_recipes.recipe.keys import READ_VARIABLES, environment_keys

__all__ = ["make_run", "row_fixture", "small_disk"]

GRPO = str(Path(sys.executable).with_name("grpo"))


def clean_environment(**variables: str) -> dict[str, str]:
    """Return the tester's environment without the launcher's variables and without a network."""
    # TRL sets VLLM_LOGGING_LEVEL on import, and other tests of this process import TRL.
    launcher_variables = {*READ_VARIABLES, *environment_keys(), "VLLM_LOGGING_LEVEL"}
    inherited = {
        name: text
        for name, text in os.environ.items()
        if name not in launcher_variables and not name.startswith("SLURM")
    }
    return {**inherited, "HF_HUB_OFFLINE": "1", **variables}


@pytest.fixture
def doctor() -> Callable[..., tuple[int, dict[str, dict[str, str]]]]:
    """``doctor(*arguments, before=..., NAME=VALUE)``: return exit code and results by name of `grpo doctor --json`."""

    def run(*arguments: str, before: Callable[[], None] | None = None, **variables: str) -> Any:
        words, environment = ["doctor", *arguments, "--json"], clean_environment(**variables)
        if before or "LC_ALL" in variables:  # Python reads it when it starts
            done = subprocess.run(
                [GRPO, *words], env=environment, capture_output=True, text=True, timeout=60, preexec_fn=before
            )
        else:
            done = run_grpo(*words, env=environment)
        assert done.stdout, done.stderr
        return done.returncode, {result["name"]: result for result in json.loads(done.stdout)["checks"]}

    return run


class FakeCudaMachine(Machine):
    """A machine with the CUDA packages."""

    @property
    def device(self) -> str:
        return "cuda"


@pytest.fixture
def cuda_machine() -> Callable[..., Machine]:
    """``cuda_machine(NAME=VALUE)``: a machine with the CUDA packages and these variables."""
    return lambda **variables: FakeCudaMachine(clean_environment(**variables))


@pytest.fixture
def fake_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """``fake_program(name, script)``: put a shell script of that name first on PATH."""
    folder = tmp_path / "fake_programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def make(name: str, script: str) -> None:
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)

    return make


@pytest.fixture
def no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a PATH without programs."""
    (tmp_path / "no_programs").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "no_programs"))


@pytest.fixture
def serve() -> Iterator[Callable[[type[BaseHTTPRequestHandler]], str]]:
    """``serve(handler)``: start an HTTP server on loopback and return its address."""
    servers = []

    def start(handler: type[BaseHTTPRequestHandler]) -> str:
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def machine() -> Callable[..., Machine]:
    """``machine(recipe=..., NAME=VALUE)``: a machine with these variables on top of a clean environment."""
    return lambda recipe=None, **variables: Machine(clean_environment(**variables), recipe)
