"""The batch script of a job, rendered from a site's profile."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from grpo_recipes.recipe.keys import SRUN_OPTIONS
from grpo_recipes.slurm.profile import Profile

# Module and conda code reads unset variables and ignores failures, so the script sets neither -u nor -e.
_FIND_MODULES = (
    "type module >/dev/null 2>&1 || source /etc/profile.d/modules.sh 2>/dev/null || source /etc/profile.d/lmod.sh"
)


@dataclass(frozen=True)
class Request:
    """What one job asks for beside its site's profile."""

    job_name: str
    array: str | None = None  # indices of an array job, e.g. 0-5%2; None for a single job
    output: str = "logs/slurm_%j.out"  # %j is the job, %A_%a a job of an array
    error: str = "logs/slurm_%j.err"
    chdir: Path | None = None  # absolute; None for the folder the job is submitted from


def render(profile: Profile, request: Request, command: list[str], environment: Mapping[str, str]) -> str:
    """Return the batch script, which ``bash -n`` and shellcheck accept.

    In the end it runs ``command`` in place of the shell, e.g. ``["grpo", "launch", "--resume", DIR]``, which finds the
    programs of the environment by their names. The job gets the variables of ``environment`` beside the profile's.
    """
    header = [f"#SBATCH {line}" for line in _header(profile, request)]
    variables = {
        **profile.environment,
        **({"NETWORK_INTERFACE": profile.network_interface} if profile.network_interface else {}),
        **({SRUN_OPTIONS: shlex.join(profile.srun_options)} if profile.srun_options else {}),
        **({} if profile.internet else {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}),
        **environment,
    }
    exports = [f"export {name}={shlex.quote(text)}" for name, text in variables.items()]
    lines = [
        "#!/bin/bash",
        *header,
        "",
        "# Slurm announces the end of the time limit with USR1; the launcher takes it over.",
        "trap '' USR1",
        "fail() { printf 'grpo: %s\\n' \"$*\" >&2; exit 2; }",
        "",
        *_environment_lines(profile),
        "# Packages of the login shell must not reach into the environment.",
        "unset PYTHONPATH PYTHONHOME",
        "export PYTHONNOUSERSITE=1",
        *exports,
        f"exec {shlex.join(command)}",
    ]
    return "\n".join(lines) + "\n"


def _header(profile: Profile, request: Request) -> list[str]:
    kind = f"{profile.gpu_kind}:" if profile.gpu_kind else ""
    gpus = f"{kind}{profile.gpus}" if profile.gpus else ""
    options = {
        "--job-name": request.job_name,
        "--account": profile.account,
        "--partition": profile.partition,
        "--qos": profile.qos,
        "--constraint": profile.constraint,
        "--exclude": profile.exclude,
        "--nodes": profile.nodes,
        "--ntasks": profile.nodes,  # Slurm gives one node to a job of one task, however many nodes it names
        "--ntasks-per-node": 1 if profile.nodes > 1 else None,
        "--gpus-per-node": gpus if profile.gpu_flag_style == "gpus" else None,
        "--gres": f"gpu:{gpus}" if gpus and profile.gpu_flag_style == "gres" else None,
        "--cpus-per-task": profile.cpus,
        "--mem": profile.mem,
        "--time": profile.time,
        "--output": request.output,
        "--exclusive": profile.exclusive,
        "--error": request.error,
        "--open-mode": "append",
        "--signal": f"B:USR1@{profile.signal_lead}",
        "--requeue": True,
        "--chdir": request.chdir,
        "--array": request.array,
    }
    lines = [_word(name if value is True else f"{name}={value}") for name, value in options.items() if value]
    return lines + [line if {*line} & {*"'\""} else _word(line) for line in profile.sbatch_options]


def _word(line: str) -> str:
    """Return an option as sbatch reads it: spaces, quotes, backslashes and number signs mean something to it."""
    name, equals, text = line.partition("=")
    if not re.search(r"[\s'\"\\#]", text):
        return line
    escaped = re.sub(r'(["\\])', r"\\\1", text)
    return f'{name}{equals}"{escaped}"'


def _environment_lines(profile: Profile) -> list[str]:
    """Return lines that load modules and the environment, each of which must exist; by default the current one."""
    lines = ["# shellcheck disable=SC1091", _FIND_MODULES] if profile.modules else []
    for name in map(shlex.quote, profile.modules):
        lines.append(f"module load {name} || fail module load {name} failed")
    sourced = [file for file in (profile.conda_sh, profile.env_activate) if file]
    for file in map(shlex.quote, sourced):
        lines += ["# shellcheck disable=SC1090,SC1091", f"source {file} || fail {file} could not be sourced"]
    if profile.conda_env:
        name = shlex.quote(profile.conda_env)
        if not profile.conda_sh:
            lines.append('[[ $(type -t conda) == function ]] || eval "$(conda shell.bash hook)"')
        lines.append(f"conda activate {name} || fail conda activate {name} failed")
    elif not profile.env_activate:
        folder = Path(profile.env_dir) / "bin" if profile.env_dir else Path(sys.executable).parent
        lines.append(f'export PATH={shlex.quote(str(folder))}:"$PATH"')
    return lines
