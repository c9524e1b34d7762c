"""`trl vllm-serve` and the module for CPU start the same vLLM server."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_recipes.plan.commands import server_command, server_environment
from grpo_recipes.recipe import Recipe

# A package vllm that is found first. The exec at the end of TRL's wrapper starts it, and it prints what it received.
RECORDER = """
import json, os, sys
print("received", json.dumps([sys.argv[1:], dict(os.environ)]))
"""
COMPARISON = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

def parse(words):
    return vars(make_arg_parser(FlexibleArgumentParser(prog="vllm serve")).parse_args(words))

by_trl, by_us = map(parse, json.loads(sys.argv[1]))
by_trl["model"], by_trl["model_tag"] = by_trl["model_tag"], None  # as the subcommand serve does
print(json.dumps({name: [str(by_trl[name]), str(by_us[name])] for name in by_us if by_trl[name] != by_us[name]}))
"""


def record(argv: list[str], folder: Path, environment: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Run a command with a package vllm that only records; return the words and the environment that it received."""
    command = folder / "vllm/entrypoints/cli"
    command.mkdir(parents=True)
    for package in (folder / "vllm", folder / "vllm/entrypoints", command):
        (package / "__init__.py").touch()
    (command / "main.py").write_text(RECORDER)
    (folder / "vllm-0.31.0.dist-info").mkdir()
    (folder / "vllm-0.31.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.31.0\n")
    variables = {**os.environ, **environment, "PYTHONPATH": str(folder)}
    run = subprocess.run(argv, env=variables, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    received = next((line for line in run.stdout.splitlines() if line.startswith("received ")), None)
    assert received, run.stdout + run.stderr
    words, variables = json.loads(received.removeprefix("received "))
    return words, variables


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_trls_wrapper_starts_the_server_that_the_module_starts(
    read: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = read(dtype="bfloat16", model_revision="abc", trust_remote_code=True, vllm_enforce_eager=True)
    arguments = (recipe, "a/model", "served", "127.0.0.1", 8001, "cuda", 64)
    module = server_command(*arguments)
    assert module[:4] == [sys.executable, "-P", "-m", "grpo_recipes.server.serve"]
    installed = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.31.0" if name == "vllm" else installed(name))
    wrapper = server_command(*arguments)
    assert wrapper[:2] == [str(Path(sys.executable).with_name("trl")), "vllm-serve"]
    assert wrapper[2:] == module[4:], "both get the same flags"

    environment = server_environment("cuda", None, {})
    words, variables = record(wrapper, tmp_path, environment)

    assert words[0] == "serve"
    differences = subprocess.run(
        [sys.executable, "-c", COMPARISON, json.dumps([words[1:], module[4:]])],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert json.loads(differences.stdout.splitlines()[-1]) == {}, differences.stderr
    assert environment.items() <= variables.items()
