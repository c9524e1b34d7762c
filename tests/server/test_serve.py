"""The module that runs vLLM's server: every process of that imports it first."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import gc, sys
import grpo_recipes.server.serve
assert gc.get_threshold()[0] > 10_000, gc.get_threshold()
assert not {"torch", "vllm"} & sys.modules.keys(), "what is imported before is collected as often as ever"
"""


def test_imports_that_follow_are_seldom_interrupted_by_collections() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)
