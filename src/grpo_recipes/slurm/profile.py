"""Site profiles: a YAML file that describes a site's Slurm and nodes, and the batch script rendered from it.

profile = read_profile(Path("slurm/profiles/generic.yaml")).with_values({"gpus": "2"})
script = render_script(profile, "my-run", ["grpo", "launch", "recipe.yaml"], {})
"""

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
from grpo_recipes.secrets import contains_secret, is_secret_name
from grpo_recipes.slurm.client import parse_walltime

GPU_FLAG_STYLES = ("none", "gpus", "gres")
# Module and conda code reads unset variables and ignores failures, so the script sets neither -u nor -e.
_FIND_MODULES = (
    "type module >/dev/null 2>&1 || source /etc/profile.d/modules.sh 2>/dev/null || source /etc/profile.d/lmod.sh"
)
_PATHS = ("run_root", "cache_root", "env_dir", "env_activate", "conda_sh")  # keys with paths, which may start with ~


def _option(kind: str, default: Any, help_text: str, **limits: Any) -> Any:
    """Return a dataclass field for a key of the profile; its metadata has type, default, help and limits for checks."""
    metadata = {"type": kind, "optional": default is None, "help": help_text, **limits}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Profile:
    """The options of a job and the properties of a site's nodes; every key is optional."""

    name: str
    job_name: str | None = _option("str", None, "name of the jobs; by default the run's name")
    account: str | None = _option("str", None, "`--account`")
    partition: str | None = _option("str", None, "`--partition`")
    nodes: int = _option("int", 1, "`--nodes`", min=1)
    gpu_flag_style: str = _option(
        "str", "gres", "how GPUs are requested: `gres`, `gpus` (`--gpus-per-node`), or `none`", choices=GPU_FLAG_STYLES
    )
    gpu_kind: str | None = _option("str", None, "type of GPU in that flag, e.g. `a100`")
    gpus: int = _option("int", 0, "GPUs per node; 0: the nodes train on CPU", min=0)
    gpu_memory_gib: float | None = _option("float", None, "memory of a GPU in GiB, for the estimate of the plan", min=1)
    cpus: int | None = _option("int", None, "`--cpus-per-task`", min=1)
    mem: str | None = _option("str", None, "`--mem`, per node")
    time: str = _option("str", "72:00:00", "`--time`")
    exclusive: bool = _option("bool", False, "`--exclusive`")
    qos: str | None = _option("str", None, "`--qos`")
    constraint: str | None = _option("str", None, "`--constraint`")
    exclude: str | None = _option("str", None, "`--exclude`: nodes to avoid")
    signal_lead: int = _option("int", 300, "time for a run to save before the time limit, in seconds", min=30)
    sbatch_options: list[str] = _option("list[str]", [], "further `#SBATCH` lines, e.g. `--container-image=...`")
    srun_options: list[str] = _option("list[str]", [], "options of the `srun` that reaches the other nodes of a job")
    network_interface: str | None = _option("str", None, "network interface between the nodes, e.g. `ib0`")
    internet: bool = _option("bool", False, "whether the nodes can reach the internet")
    run_root: str | None = _option("str", None, "folder of the run directories, unless recipe or command line set it")
    cache_root: str | None = _option("str", None, "folder of downloads, unless CACHE_ROOT is set")
    modules: list[str] = _option("list[str]", [], "modules to load first")
    env_dir: str | None = _option(
        "str", None, "the environment: a venv or a conda prefix; by default the current environment"
    )
    env_activate: str | None = _option("str", None, "file to source that activates the environment, instead of env_dir")
    conda_env: str | None = _option("str", None, "conda environment to activate, instead of env_dir")
    conda_sh: str | None = _option("str", None, "conda's `etc/profile.d/conda.sh`, if the shell does not know `conda`")
    environment: dict[str, str] = _option("dict", {}, "further variables of the job")

    def with_values(self, texts: Mapping[str, str], source: str = "") -> Profile:
        """Return a copy of the profile with other values for some keys: ``texts`` maps keys to values as text.

        Raise ConfigError for an unknown key or an invalid value. Its message names ``source``, by default ``--KEY``.
        """
        values = [(key, Value(text, source or f"--{key}", from_text=True)) for key, text in texts.items()]
        return dataclasses.replace(self, **_convert_values(values, []))


# Keys of a profile with their metadata, in the format of the catalogue of recipe keys.
KEYS: dict[str, Mapping[str, Any]] = {key.name: key.metadata for key in dataclasses.fields(Profile) if key.metadata}


def read_profile(path: Path) -> Profile:
    """Read a profile from a YAML file and the file that its key ``base`` names.

    Raise one ConfigError with all problems and their lines.
    """
    problems: list[Problem] = []
    raw_values = [item for layer in read_document(path, problems) for item in layer.items()]
    values, sources = _convert_values(raw_values, problems), {key: raw.source for key, raw in raw_values}
    environments = [key for key in ("env_dir", "env_activate", "conda_env") if values.get(key)]
    if len(environments) > 1:
        conflict = f"{' and '.join(environments)} can't be combined"
        raise ConfigError(Problem(sources[environments[1]], conflict, "remove one of them"))
    if values.get("gpu_kind") and not values.get("gpus"):
        raise ConfigError(Problem(sources["gpu_kind"], "gpu_kind is set, but gpus is not", "set gpus: 8"))
    return Profile(path.stem, **values)


def _convert_values(raw_values: Iterable[tuple[str, Value]], problems: list[Problem]) -> dict[str, Any]:
    """Check the values of a profile and convert them to their types: key -> value; the last value of a key wins.

    ~ in paths is expanded. Raise ConfigError with ``problems`` and all new problems if there are any.
    """
    values: dict[str, Any] = {}
    for key, raw in raw_values:
        if key not in KEYS:
            close = nearest_of(key, list(KEYS))
            fix = f"use '{close}'" if close else "remove it"
            problems.append(Problem(raw.source, f"unknown profile key '{key}'", fix))
            continue
        values[key], type_problems = convert_value(key, KEYS[key], raw)
        problems += type_problems or _find_problems(key, values[key], raw)
        if key in _PATHS and values[key]:
            values[key] = os.path.expanduser(values[key])
    if problems:
        raise ConfigError(*problems)
    if "environment" in values:
        values["environment"] = {name: str(text) for name, text in values["environment"].items()}
    return values


def _find_problems(key: str, value: Any, raw: Value) -> Iterator[Problem]:
    """Yield the problems of a value that has the right type, at most one for each text in it.

    Problems are secrets, line breaks, variables in paths, time limits in a wrong format, invalid variable names, and
    options without a dash.
    """
    if isinstance(value, dict):
        for name, text in value.items():
            source = raw.lines.get(("environment", name), raw.source)
            if not re.fullmatch(r"[A-Za-z_]\w*", str(name)):
                yield Problem(source, f"'{name}' is not a valid variable name", "set NAME: value")
            elif not isinstance(text, str | int | float) or isinstance(text, bool):
                yield Problem(source, f"{name}: expected a string, got {text!r}", "put the value in quotes")
            elif is_secret_name(name) or contains_secret(text):
                yield Problem(source, f"'{name}' contains a secret", "export it in your shell, since jobs inherit it")
        return
    for text in map(str, value if isinstance(value, list) else [value]):
        names = re.findall(r"(\w+)=", text) if isinstance(value, list) else []  # e.g. of --export=NAME=text
        if contains_secret(text) or any(map(is_secret_name, names)):
            yield Problem(raw.source, f"'{key}' contains a possible secret", "export it as a variable instead")
        elif "\n" in text:
            yield Problem(raw.source, f"'{key}' must be a single line", "remove the line breaks")
        elif key in _PATHS and "$" in text:
            yield Problem(
                raw.source, f"variables in '{key}' are not expanded", "use the full path; ~ is your home folder"
            )
        elif key == "time" and not parse_walltime(text):
            fix = "use hours:minutes:seconds, e.g. 72:00:00, or days-hours, e.g. 3-0"
            yield Problem(raw.source, f"'{text}' is not a time limit in Slurm's format", fix)
        elif key in ("sbatch_options", "srun_options") and text[:1] != "-":
            yield Problem(raw.source, f"'{text}' is not an option", "use --name=value")


def render_script(
    profile: Profile,
    job_name: str,
    command: list[str],
    environment: Mapping[str, str],
    chdir: Path | None = None,
    array: str | None = None,
    log: str = "%j",
) -> str:
    """Return the text of a batch script with #SBATCH lines, the site's environment, exports and ``command``.

    At its end the script executes ``command`` with the variables of the profile and of ``environment``. The latter
    take precedence. It runs in the absolute folder ``chdir``, by default in the folder of the submission. ``array``
    contains the indices of an array job, e.g. 0-5%2. The logs are ``logs/slurm_<log>.out`` and ``.err``: %j is the
    job, %A_%a a task of an array.
    """
    kind = f"{profile.gpu_kind}:" if profile.gpu_kind else ""
    gpus = f"{kind}{profile.gpus}" if profile.gpus else ""
    options = {
        "--job-name": job_name, "--account": profile.account, "--partition": profile.partition, "--qos": profile.qos,
        "--constraint": profile.constraint, "--exclude": profile.exclude, "--nodes": profile.nodes,
        "--ntasks": profile.nodes,  # a job with a single task gets only a single node
        "--ntasks-per-node": 1 if profile.nodes > 1 else None,
        "--gpus-per-node": gpus if profile.gpu_flag_style == "gpus" else None,
        "--gres": f"gpu:{gpus}" if gpus and profile.gpu_flag_style == "gres" else None,
        "--cpus-per-task": profile.cpus, "--mem": profile.mem, "--time": profile.time,
        "--output": f"logs/slurm_{log}.out", "--exclusive": profile.exclusive, "--error": f"logs/slurm_{log}.err",
        "--open-mode": "append", "--signal": f"B:USR1@{profile.signal_lead}", "--requeue": True,
        "--chdir": chdir, "--array": array,
    }  # fmt: skip
    header = [
        _quote_option_value(name if value is True else f"{name}={value}") for name, value in options.items() if value
    ]
    header += [line if {*line} & {*"'\""} else _quote_option_value(line) for line in profile.sbatch_options]
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
        "# Slurm sends USR1 before the time limit; the launcher handles it.",
        "trap '' USR1",
        "fail() { printf 'grpo: %s\\n' \"$*\" >&2; exit 2; }",
        "",
        *_format_environment_lines(profile),
        "# Packages of the login shell must not be visible in the environment.",
        "unset PYTHONPATH PYTHONHOME",
        "export PYTHONNOUSERSITE=1",
        *(f"export {name}={shlex.quote(text)}" for name, text in variables.items()),
        f'exec {shlex.join(command)} "$@"',
    ]
    return "\n".join(lines) + "\n"


def _quote_option_value(line: str) -> str:
    """Return an option for a ``#SBATCH`` line, with its value in quotes if it contains spaces, quotes, \\ or ``#``."""
    name, equals, text = line.partition("=")
    if not re.search(r"[\s'\"\\#]", text):
        return line
    escaped = re.sub(r'(["\\])', r"\\\1", text)
    return f'{name}{equals}"{escaped}"'


def _format_environment_lines(profile: Profile) -> list[str]:
    """Return the lines of bash that load the profile's modules and activate its Python environment.

    The script ends with an error if a line fails. Without an environment in the profile, the current one is used.
    """
    lines = ["# shellcheck disable=SC1091", _FIND_MODULES] if profile.modules else []
    for name in map(shlex.quote, profile.modules):
        lines.append(f"module load {name} || fail module load {name} failed")
    files = [file for file in (profile.conda_sh, profile.env_activate) if file]
    for file in map(shlex.quote, files):
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
