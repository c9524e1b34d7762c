"""Create a built-in smoke task in another process, which is the only one that imports torch."""

import contextlib
import functools
import os
import subprocess
import time
from collections.abc import Callable, Mapping

from grpo_recipes.paths import display_path
from grpo_recipes.process.reports import say
from grpo_recipes.process.tree import die_with_parent
from grpo_recipes.smoke import smoke_command

_POLL_SECONDS, _END_SECONDS = 0.1, 1.0


def create_smoke_task(name: str, environment: Mapping[str, str], check_stop: Callable[[], None] = lambda: None) -> int:
    """Create the smoke task ``name`` and return the exit code of the program that creates it; 0 if the task exists.

    The program has the variables ``environment``, and prints its progress. ``check_stop`` is called ten times per
    second. The program ends within ``_END_SECONDS`` after Ctrl-C, or if ``check_stop`` raises an exception.
    """
    folder, command = smoke_command(name, environment)
    if (folder / "COMPLETE").exists():
        return 0
    say(f"creating the smoke model and data in {display_path(folder)} (once, about a minute)")
    end_with_us = functools.partial(die_with_parent, os.getpid())
    # In its own session, so that Ctrl-C reaches only this process.
    with subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=end_with_us) as program:
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
