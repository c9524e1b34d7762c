"""A site's profile, one YAML file about its Slurm and its nodes, and the batch script of a job rendered from it."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_recipes.errors import ConfigError, Problem
from grpo_recipes.recipe.document import Value, convert_value, read_document
from grpo_recipes.recipe.keys import SIGNAL_LEAD, SRUN_OPTIONS, nearest_of
from grpo_recipes.secrets import secret_name, secret_value
from grpo_recipes.slurm.client import walltime_seconds

GPU_FLAG_STYLES = ("none", "gpus", "gres")
# Module and conda code reads unset variables and ignores failures, so the script sets neither -u nor -e.
_FIND_MODULES = (
    "type module >/dev/null 2>&1 || source /etc/profile.d/modules.sh 2>/dev/null || source /etc/profile.d/lmod.sh"
)
_PATHS = ("run_root", "cache_root", "env_dir", "env_activate", "conda_sh")  # ~ in them is the home folder


def _option(kind: str, default: Any, about: str, **limits: Any) -> Any:
    """Return a field of the profile: its type as in the catalogue of recipe keys, its default, and what it does."""
    entry = {"type": kind, "optional": default is None, "help": about, **limits}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=entry)
    return field(default=default, metadata=entry)


@dataclass(frozen=True)
class Profile:
    """What is asked of Slurm and what its nodes are like; every key is optional."""

    name: str
    job_name: str | None = _option("str", None, "name of the jobs; the run's name by default")
    account: str | None = _option("str", None, "`--account`")
    partition: str | None = _option("str", None, "`--partition`")
    nodes: int = _option("int", 1, "`--nodes`", min=1)
    gpu_flag_style: str = _option(
        "str", "gres", "how GPUs are asked for: `gres`, `gpus` (`--gpus-per-node`), or `none`", choices=GPU_FLAG_STYLES
    )
    gpu_kind: str | None = _option("str", None, "kind of GPU in that flag, e.g. `a100`")
    gpus: int = _option("int", 0, "GPUs of a node; 0: the nodes train on CPU", min=0)
    gpu_memory_gib: float | None = _option("float", None, "memory of a GPU in GiB, for the plan's estimate", min=1)
    cpus: int | None = _option("int", None, "`--cpus-per-task`", min=1)
    mem: str | None = _option("str", None, "`--mem`, of a node")
    time: str = _option("str", "72:00:00", "`--time`")
    exclusive: bool = _option("bool", False, "`--exclusive`")
    qos: str | None = _option("str", None, "`--qos`")
    constraint: str | None = _option("str", None, "`--constraint`")
    exclude: str | None = _option("str", None, "`--exclude`: nodes to avoid")
    signal_lead: int = _option("int", 300, "seconds before the time limit at which a run has to save", min=30)
    sbatch_options: list[str] = _option("list[str]", [], "further `#SBATCH` lines, e.g. `--container-image=...`")
    srun_options: list[str] = _option("list[str]", [], "options of the `srun` that reaches the other nodes of a job")
    network_interface: str | None = _option("str", None, "interface by which nodes reach one another, e.g. `ib0`")
    internet: bool = _option("bool", False, "whether the nodes reach the internet")
    run_root: str | None = _option("str", None, "where run directories are made, unless recipe or command line say so")
    cache_root: str | None = _option("str", None, "where downloads are, unless CACHE_ROOT says so")
    modules: list[str] = _option("list[str]", [], "modules to load first")
    env_dir: str | None = _option("str", None, "the environment: a venv or a conda prefix; the current one by default")
    env_activate: str | None = _option("str", None, "a file to source instead, which activates the environment")
    conda_env: str | None = _option("str", None, "a conda environment to activate instead")
    conda_sh: str | None = _option("str", None, "conda's `etc/profile.d/conda.sh`, where `conda` is not set up")
    environment: dict[str, str] = _option("dict", {}, "further variables of the job")

    def with_values(self, given: Mapping[str, str], where: str = "") -> Profile:
        """Return the profile with values that are given as texts, by default by flags named as the keys."""
        raws = [(key, Value(text, where or f"--{key}", from_text=True)) for key, text in given.items()]
        return dataclasses.replace(self, **_checked(raws, []))


# Keys of a profile, as the catalogue describes keys of recipes.
KEYS: dict[str, Mapping[str, Any]] = {one.name: one.metadata for one in dataclasses.fields(Profile) if one.metadata}


def read_profile(path: Path) -> Profile:
    """Read a profile, and the one it builds on by ``base`` as recipes do; report everything wrong with its line."""
    problems: list[Problem] = []
    raws = [item for layer in read_document(path, problems) for item in layer.items()]
    values, sources = _checked(raws, problems), {key: raw.source for key, raw in raws}
    named = [key for key in ("env_dir", "env_activate", "conda_env") if values.get(key)]
    if len(named) > 1:
        what = f"{' and '.join(named)} name two environments"
        raise ConfigError(Problem(sources[named[1]], what, "keep one of them"))
    if values.get("gpu_kind") and not values.get("gpus"):
        what = "gpu_kind is set, but not gpus"
        raise ConfigError(Problem(sources["gpu_kind"], what, "write gpus: 8"))
    return Profile(path.stem, **values)


def _checked(raws: Iterable[tuple[str, Value]], problems: list[Problem]) -> dict[str, Any]:
    """Return the values, of each key the last; with any problem, add those of the values and raise them all."""
    values: dict[str, Any] = {}
    for key, raw in raws:
        if key not in KEYS:
            close = nearest_of(key, list(KEYS))
            fix = f"write '{close}'" if close else "remove it"
            problems.append(Problem(raw.source, f"unknown key '{key}' of a profile", fix))
            continue
        values[key], found = convert_value(key, KEYS[key], raw)
        problems += found or _problems(key, values[key], raw)
        if key in _PATHS and values[key]:
            values[key] = os.path.expanduser(values[key])
    if problems:
        raise ConfigError(*problems)
    if "environment" in values:
        values["environment"] = {name: str(text) for name, text in values["environment"].items()}
    return values


def _problems(key: str, value: Any, raw: Value) -> Iterator[Problem]:
    """Yield what is wrong with a value of the right type: of each text in it the first fault."""
    if isinstance(value, dict):
        for name, text in value.items():
            where = raw.lines.get(("environment", name), raw.source)
            if not re.fullmatch(r"[A-Za-z_]\w*", str(name)):
                yield Problem(where, f"'{name}' is not the name of a variable", "write NAME: value")
            elif not isinstance(text, str | int | float) or isinstance(text, bool):
                yield Problem(where, f"'{name}' is {text!r} where a text belongs", "write it in quotes")
            elif secret_name(name) or secret_value(text):
                yield Problem(where, f"'{name}' holds a secret", "export it in your shell instead: jobs inherit it")
        return
    for text in map(str, value if isinstance(value, list) else [value]):
        assigned = re.findall(r"(\w+)=", text) if isinstance(value, list) else []  # as in --export=NAME=text
        if secret_value(text) or any(map(secret_name, assigned)):
            yield Problem(raw.source, f"'{key}' holds what looks like a secret", "export it as a variable instead")
        elif "\n" in text:
            yield Problem(raw.source, f"'{key}' has more than one line", "write it in one line")
        elif key in _PATHS and "$" in text:
            yield Problem(raw.source, f"variables in '{key}' are not read", "write the whole path; ~ is your home")
        elif key == "time" and not walltime_seconds(text):
            fix = "write hours:minutes:seconds, e.g. 72:00:00, or days-hours, e.g. 3-0"
            yield Problem(raw.source, f"'{text}' is not a time limit as Slurm writes it", fix)
        elif key in ("sbatch_options", "srun_options") and text[:1] != "-":
            yield Problem(raw.source, f"'{text}' is not an option", "write --name=value")


def render(
    profile: Profile,
    job_name: str,
    command: list[str],
    environment: Mapping[str, str],
    chdir: Path | None = None,
    array: str | None = None,
    log: str = "%j",
) -> str:
    """Return the batch script, which ``bash -n`` and shellcheck accept.

    In the end it runs ``command`` in place of the shell, with the variables of ``environment`` beside the profile's, in
    the absolute folder ``chdir``, by default where it is submitted. ``array`` are the indices of an array job, e.g.
    0-5%2; ``log`` is what follows slurm_ in the names of its logs: %j is the job, %A_%a a job of an array.
    """
    kind = f"{profile.gpu_kind}:" if profile.gpu_kind else ""
    gpus = f"{kind}{profile.gpus}" if profile.gpus else ""
    options = {
        "--job-name": job_name, "--account": profile.account, "--partition": profile.partition, "--qos": profile.qos,
        "--constraint": profile.constraint, "--exclude": profile.exclude, "--nodes": profile.nodes,
        "--ntasks": profile.nodes,  # Slurm gives one node to a job of one task, however many nodes it names
        "--ntasks-per-node": 1 if profile.nodes > 1 else None,
        "--gpus-per-node": gpus if profile.gpu_flag_style == "gpus" else None,
        "--gres": f"gpu:{gpus}" if gpus and profile.gpu_flag_style == "gres" else None,
        "--cpus-per-task": profile.cpus, "--mem": profile.mem, "--time": profile.time,
        "--output": f"logs/slurm_{log}.out", "--exclusive": profile.exclusive, "--error": f"logs/slurm_{log}.err",
        "--open-mode": "append", "--signal": f"B:USR1@{profile.signal_lead}", "--requeue": True,
        "--chdir": chdir, "--array": array,
    }  # fmt: skip
    header = [_word(name if value is True else f"{name}={value}") for name, value in options.items() if value]
    header += [line if {*line} & {*"'\""} else _word(line) for line in profile.sbatch_options]
    variables = {
        SIGNAL_LEAD: str(profile.signal_lead),
        **profile.environment,
        **({"NETWORK_INTERFACE": profile.network_interface} if profile.network_interface else {}),
        **({SRUN_OPTIONS: shlex.join(profile.srun_options)} if profile.srun_options else {}),
        **({} if profile.internet else {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}),
        **environment,
    }
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {line}" for line in header),
        "",
        "# Slurm announces the end of the time limit with USR1; the launcher takes it over.",
        "trap '' USR1",
        "fail() { printf 'grpo: %s\\n' \"$*\" >&2; exit 2; }",
        "",
        *_environment_lines(profile),
        "# Packages of the login shell must not reach into the environment.",
        "unset PYTHONPATH PYTHONHOME",
        "export PYTHONNOUSERSITE=1",
        *(f"export {name}={shlex.quote(text)}" for name, text in variables.items()),
        f"exec {shlex.join(command)}",
    ]
    return "\n".join(lines) + "\n"


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
