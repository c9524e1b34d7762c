"""`sbatch`: give a script to Slurm."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from grpo_recipes.errors import ConfigError, Problem, config_error

_SECONDS = 120  # a busy controller answers late


class MaybeSubmitted(ConfigError):
    """It is not known whether the job is in the queue: what it would run must stay."""


def submit(script: Path, cwd: Path) -> int:
    """Submit a batch script.

    Args:
        script: the script.
        cwd: the folder the job starts in, unless the script says another.

    Returns:
        The job id.

    Raises:
        ConfigError: there is no sbatch, or it refuses, in its own words.
        MaybeSubmitted: it does not answer, or tells no job id.
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
        raise config_error("sbatch", "is not on this machine", "submit on the cluster's login node") from None
    except subprocess.TimeoutExpired:
        raise _unknown(f"did not answer within {_SECONDS} seconds") from None
    if done.returncode:
        raise _refused(done.stderr)
    job = re.search(r"^(\d+)(;\S+)?$", done.stdout, re.MULTILINE)  # some sites print more than that
    if job is None:
        raise _unknown(f"tells no job id ('{' '.join(done.stdout.split())}')")
    return int(job[1])


def _unknown(what: str) -> MaybeSubmitted:
    return MaybeSubmitted(Problem("sbatch", what, "look with squeue whether it came through; what it runs was kept"))


def _refused(words: str) -> ConfigError:
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ").strip() for line in words.splitlines()]
    what = "; ".join(line for line in lines if line) or "refuses the script and does not say why"
    return config_error("sbatch", what.rstrip("."), "correct the profile, or give another value on the command line")
