"""Create a built-in smoke task in another process, so that this process need not import torch."""

import contextlib
import functools
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from grpo_recipes.errors import config_error, translate_errors
from grpo_recipes.paths import display_path
from grpo_recipes.process.reports import say
from grpo_recipes.process.tree import die_with_parent
from grpo_recipes.smoke import smoke_command

_POLL_SECONDS, _END_SECONDS = 0.1, 1.0
_COMPLETE = "COMPLETE"  # a file of a finished task
_LEAST_BYTES = 8 * 2**20  # free space for a task; the largest needs 2 MB


def create_smoke_task(name: str, environment: Mapping[str, str], check_stop: Callable[[], None] = lambda: None) -> int:
    """Create the smoke task ``name`` and return the exit code of the program that creates it; 0 if the task exists.

    The program has the variables ``environment``, and prints its progress. ``check_stop`` is called ten times per
    second. The program ends within ``_END_SECONDS`` after Ctrl-C, or if ``check_stop`` raises an exception. Raise
    ConfigError before the program starts if its folder can't be created, or the disk is full.
    """
    folder, command = smoke_command(name, environment)
    if os.path.exists(folder / _COMPLETE):
        return 0
    require_smoke_space(folder)
    say(f"creating the smoke model and data in {display_path(folder)} (once, about a minute)")
    quiet = {"DS_ACCELERATOR": "cpu", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}  # no warning of DeepSpeed, no second bar
    end_with_us = functools.partial(die_with_parent, os.getpid())
    # In its own session, so that Ctrl-C reaches only this process.
    with subprocess.Popen(
        command, env={**environment, **quiet}, start_new_session=True, preexec_fn=end_with_us
    ) as program:
        try:
            while program.poll() is None:
                check_stop()
                time.sleep(_POLL_SECONDS)
        finally:
            program.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(_END_SECONDS)
            program.kill()
    return program.returncode


def require_smoke_space(folder: Path) -> None:
    """Raise ConfigError if the smoke task in ``folder`` is missing, and its files can't be written there.

    The cause is a file instead of a folder, missing permissions or a full disk. Parent folders are created.
    """
    if os.path.exists(folder / _COMPLETE):
        return
    problem = f"cannot write the smoke model to {display_path(folder.parent)}"
    fix = "set CACHE_ROOT to a folder that you may write to, with 8 MB free"
    with translate_errors(OSError, lambda error: config_error("CACHE_ROOT", f"{problem} ({error.strerror})", fix)):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder.parent) as file:
            os.posix_fallocate(file.fileno(), 0, _LEAST_BYTES)
