"""Who made a record under bench/results, for every script here: the command and the code."""

from __future__ import annotations

import shlex
import sys
from typing import Any

from grpo_recipes.runs.rundir import code_state


def made_by() -> dict[str, Any]:
    """Return the command that makes the record again, and the commit whose code it ran."""
    code = code_state()
    return {
        "command": f"python {shlex.join(sys.argv)}",
        "commit": code["commit"],
        "uncommitted_changes": code["dirty"],
    }
