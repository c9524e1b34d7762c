"""Commands to type for a run: start it again, and test its recipe.

Advice is written with placeholders: ``grpo launch RECIPE`` starts the run again, RECIPE is its recipe, and RUN its
directory. ``fill_commands`` replaces them, so that the user can copy the command.

    print(fill_commands("test it with grpo check-rewards RECIPE", run))   # ... grpo check-rewards my.yaml
"""

import os
import re
import shlex
from contextlib import suppress

from grpo_recipes.errors import ConfigError
from grpo_recipes.paths import shell_path
from grpo_recipes.runs.rundir import Run

_LAUNCH = "grpo launch RECIPE"


def format_launch_command(run: Run) -> str:
    """Return the command that started a run; typed again, it starts a new run.

    If it started several recipes in order, return the command that resumes this run, because the recipes before it need
    not run again. If ``run.json`` does not have the command, return ``grpo launch RECIPE`` with the run's recipe.
    """
    with suppress(ConfigError, ValueError):  # run.json is damaged, or a masked secret was quoted
        command = str(run.identity.get("command") or "")
        recipes = [word for word in shlex.split(command) if word.endswith((".yaml", ".yml"))]
        if command:
            return command if len(recipes) < 2 else f"grpo launch --resume {shell_path(run.folder)}"
    return _LAUNCH.replace("RECIPE", show_recipe(run))


def show_recipe(run: Run) -> str:
    """Return the path of a run's recipe, quoted for a shell: the user's file, or else its copy in the run directory.

    Return ``RECIPE`` if neither exists.
    """
    with suppress(ConfigError, OSError):  # plan.json is damaged, or the name is too long
        path = str(run.plan.get("recipe") or "")
        if path and os.path.isfile(path):
            return shell_path(path)
    copy = run.folder / "recipe.yaml"
    return shell_path(copy) if copy.is_file() else "RECIPE"


def format_test_command(run: Run) -> str:
    """Return the command that tests the current files of a run's rewards, not the run's copies of them."""
    return f"grpo check-rewards {show_recipe(run)}"


def fill_commands(text: str, run: Run) -> str:
    """Return a text with the run's commands and paths instead of the placeholders (see the module)."""
    values = {_LAUNCH: format_launch_command, "RECIPE": show_recipe, "RUN": lambda run: shell_path(run.folder)}
    return re.sub(rf"{_LAUNCH}|\b(RECIPE|RUN)\b", lambda match: values[match[0]](run), text)
