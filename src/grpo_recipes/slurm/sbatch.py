"""`sbatch`: give a script to Slurm."""

from __future__ import annotations

import subprocess
from pathlib import Path

from grpo_recipes.errors import Refused, refuse

_SECONDS = 120  # a busy controller answers late


def submit(script: Path, cwd: Path) -> int:
    """Submit a batch script.

    Args:
        script: the script.
        cwd: the folder the job starts in, unless the script says another.

    Returns:
        The job id.

    Raises:
        Refused: there is no sbatch, it does not answer, or it refuses, in its own words.
    """
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(script)],
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        raise refuse("sbatch", "is not on this machine", "submit on the cluster's login node") from None
    except subprocess.TimeoutExpired:
        raise refuse(
            "sbatch", f"did not answer within {_SECONDS} seconds", "look with squeue whether it came through"
        ) from None
    if done.returncode:
        raise _refused(done.stderr)
    return int(done.stdout.strip().partition(";")[0])


def _refused(words: str) -> Refused:
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ").strip() for line in words.splitlines()]
    what = "; ".join(line for line in lines if line) or "refuses the script and does not say why"
    return refuse("sbatch", what.rstrip("."), "correct the profile, or give another value on the command line")
