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
def test_an_empty_size_of_the_kv_cache_leaves_it_to_the_flag() -> None:
    """The launcher empties the variable if the recipe sets the flag. vLLM's workers read every variable as a number."""
    flags = ["--model", "m", "--kv-cache-memory-bytes", str(2**26)]
    variables = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": ""}
    subprocess.run([sys.executable, "-c", SERVER, *flags], env=variables, check=True, timeout=300)
