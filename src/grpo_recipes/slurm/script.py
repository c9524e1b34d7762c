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
    """What one job asks for beside its site's profile.

    Attributes:
        job_name: name of the job.
        array: indices of an array job, e.g. ``0-5%2``; None: a single job.
        output: file of standard output; ``%j`` is the job, ``%A_%a`` a job of an array.
        error: file of standard error.
        chdir: folder the job starts in, absolute; None: the one it is submitted from.
    """

    job_name: str
    array: str | None = None
    output: str = "logs/slurm_%j.out"
    error: str = "logs/slurm_%j.err"
    chdir: Path | None = None


def render(profile: Profile, request: Request, command: list[str], environment: Mapping[str, str]) -> str:
    """The batch script.

    Args:
        profile: the site's profile.
        request: what this job asks for.
        command: what it runs in the end, in place of the shell, e.g. ``["grpo", "launch", "--resume", DIR]``; the
            environment's programs are found by their names.
        environment: variables of the job beside the profile's.

    Returns:
        The text of the script, which `bash -n` and shellcheck accept.
    """
    header = [f"#SBATCH {line}" for line in _header(profile, request)]
    variables = {**_profile_variables(profile), **environment}
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
    optional = {
        "--account": profile.account,
        "--partition": profile.partition,
        "--qos": profile.qos,
        "--constraint": profile.constraint,
        "--exclude": profile.exclude,
    }
    named = {name: text for name, text in optional.items() if text}
    lines = [
        f"--job-name={request.job_name}",
        *(f"{name}={text}" for name, text in named.items()),
        f"--nodes={profile.nodes}",
        # Slurm gives one node to a job of one task, however many nodes it names.
        f"--ntasks={profile.nodes}",
        *(["--ntasks-per-node=1"] if profile.nodes > 1 else []),
        *_gpu_lines(profile),
        *([f"--cpus-per-task={profile.cpus}"] if profile.cpus else []),
        *([f"--mem={profile.mem}"] if profile.mem else []),
        f"--time={profile.time}",
        f"--output={request.output}",
        *(["--exclusive"] if profile.exclusive else []),
        f"--error={request.error}",
        "--open-mode=append",
        f"--signal=B:USR1@{profile.signal_lead}",
        "--requeue",
        *([f"--chdir={request.chdir}"] if request.chdir else []),
        *([f"--array={request.array}"] if request.array else []),
    ]
    own = [line if {*line} & {*"'\""} else _word(line) for line in profile.sbatch_options]
    return [*map(_word, lines), *own]


def _word(line: str) -> str:
    """An option as sbatch reads it: spaces, quotes, backslashes and number signs mean something to it."""
    name, equals, text = line.partition("=")
    if not re.search(r"[\s'\"\\#]", text):
        return line
    escaped = re.sub(r'(["\\])', r"\\\1", text)
    return f'{name}{equals}"{escaped}"'


def _gpu_lines(profile: Profile) -> list[str]:
    """How this site is asked for GPUs."""
    gpus = profile.gpus
    if not gpus or profile.gpu_flag_style == "none":
        return []
    kind = f"{profile.gpu_kind}:" if profile.gpu_kind else ""
    if profile.gpu_flag_style == "gpus":
        return [f"--gpus-per-node={kind}{gpus}"]
    return [f"--gres=gpu:{kind}{gpus}"]


def _profile_variables(profile: Profile) -> dict[str, str]:
    variables = dict(profile.environment)
    if profile.network_interface:
        variables["NETWORK_INTERFACE"] = profile.network_interface
    if profile.srun_options:
        variables[SRUN_OPTIONS] = shlex.join(profile.srun_options)
    if not profile.internet:
        variables |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    return variables


def _environment_lines(profile: Profile) -> list[str]:
    """Modules and the environment, each of which must be there; by default the environment this runs in."""
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
