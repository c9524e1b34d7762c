"""The module that runs vLLM's server: every process of that imports it first."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import gc, sys
import grpo_recipes.server.serve
assert gc.get_threshold()[0] > 10_000, gc.get_threshold()
assert not {"torch", "vllm"} & sys.modules.keys(), "what is imported before is collected as often as ever"
"""


def test_imports_that_follow_are_seldom_interrupted_by_collections() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)


SERVER = """
import os
from vllm.entrypoints.cli.serve import ServeSubcommand
from grpo_recipes.server import serve
def check_variables(arguments):
    from vllm import envs
    assert envs.VLLM_CPU_KVCACHE_SPACE is None, envs.VLLM_CPU_KVCACHE_SPACE
    assert arguments.kv_cache_memory_bytes == 2**26
ServeSubcommand.cmd = staticmethod(check_variables)
serve.main()
"""


@pytest.mark.slow
def test_the_flag_for_the_kv_cache_overrides_the_variable() -> None:
    """Every server on CPU gets the variable. In vLLM, the variable would override the flag of the recipe."""
    flags = ["--model", "m", "--kv-cache-memory-bytes", str(2**26)]
    variables = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    subprocess.run([sys.executable, "-c", SERVER, *flags], env=variables, check=True, timeout=300)
