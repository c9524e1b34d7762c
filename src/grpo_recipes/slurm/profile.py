"""A site's profile: what its Slurm wants of a job, and what its nodes are like. One YAML file a site."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_recipes.errors import ConfigError, Problem
from grpo_recipes.recipe.document import read_document
from grpo_recipes.recipe.keys import nearest_of
from grpo_recipes.recipe.values import Raw, typed
from grpo_recipes.secrets import secret_name, secret_value
from grpo_recipes.slurm.walltime import walltime_seconds

GPU_FLAG_STYLES = ("none", "gpus", "gres")
# Keys that name files or folders, in which the home sign is read.
_PATHS = ("run_root", "cache_root", "env_dir", "env_activate", "conda_sh")
_TIME_FIX = "write hours:minutes:seconds, e.g. 72:00:00, or days-hours, e.g. 3-0"


def _option(kind: str, default: Any, about: str, **limits: Any) -> Any:
    """A field of the profile: its type as in the catalogue of recipe keys, its default, and what it does."""
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
    signal_lead: int = _option("int", 300, "seconds before the time limit at which a run is told to save", min=30)
    sbatch_options: list[str] = _option("list[str]", [], "further `#SBATCH` lines, e.g. `--container-image=...`")
    srun_options: list[str] = _option(
        "list[str]", [], "options of the `srun` that reaches the nodes of a job of several"
    )
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
        """The profile with texts of the command line, or of a variable, in place of its values.

        Args:
            given: texts by their key.
            where: who gives them; by default the flag of that key.

        Raises:
            ConfigError: everything that is wrong in them.
        """
        problems: list[Problem] = []
        values = {}
        for key, text in given.items():
            values[key], found = _read(key, Raw(text, where or f"--{key}", from_text=True))
            problems += found
        if problems:
            raise ConfigError(*problems)
        return dataclasses.replace(self, **values)


# Keys of a profile, as the catalogue describes keys of recipes.
KEYS: dict[str, Mapping[str, Any]] = {one.name: one.metadata for one in dataclasses.fields(Profile) if one.metadata}


def read_profile(path: Path) -> Profile:
    """Read a profile.

    Args:
        path: the YAML file; ``base`` in it names another one that it builds on, as in recipes.

    Raises:
        ConfigError: everything that is wrong in it, with file and line.
    """
    problems: list[Problem] = []
    values: dict[str, Any] = {"name": path.stem}
    sources: dict[str, str] = {}
    for layer in read_document(path, problems):
        for key, raw in layer.items():
            values[key], found = _read(key, raw)
            sources[key] = raw.source
            problems += found
    if not problems:
        problems = _contradictions(values, sources)
    if problems:
        raise ConfigError(*problems)
    return Profile(**values)


def _time_problem(text: str, where: str) -> Problem | None:
    if walltime_seconds(text):
        return None
    return Problem(where, f"'{text}' is not a time limit as Slurm writes it", _TIME_FIX)


def _read(key: str, raw: Raw) -> tuple[Any, list[Problem]]:
    if key not in KEYS:
        close = nearest_of(key, list(KEYS))
        return None, [
            Problem(raw.source, f"unknown key '{key}' of a profile", f"write '{close}'" if close else "remove it")
        ]
    value, problems = typed(key, KEYS[key], raw)
    if problems:
        return None, problems
    if key == "environment":
        problems = _environment_problems(value, raw)
        value = {name: str(text) for name, text in value.items()}
    elif _holds_secret(value):
        problems = [Problem(raw.source, f"'{key}' holds what looks like a secret", "export it as a variable instead")]
    elif "\n" in str(value):
        problems = [Problem(raw.source, f"'{key}' has more than one line", "write it in one line")]
    elif key in _PATHS and value is not None:
        problems = _path_problems(key, value, raw.source)
        value = os.path.expanduser(value)
    elif key == "time":
        problems = [problem] if (problem := _time_problem(value, raw.source)) else []
    elif key in ("sbatch_options", "srun_options"):
        problems = [
            Problem(raw.source, f"'{option}' is no option", "write --name=value")
            for option in value
            if option[:1] != "-"
        ]
    return value, problems


def _holds_secret(value: object) -> bool:
    """Whether a value, or an option's ``NAME=text`` (as of ``--export``), is a secret."""
    options = value if isinstance(value, list) else []
    named = [name for option in options for name in re.findall(r"(\w+)=", str(option)) if secret_name(name)]
    return bool(named) or secret_value(value)


def _path_problems(key: str, path: str, where: str) -> list[Problem]:
    if "$" not in path:
        return []
    return [Problem(where, f"variables in '{key}' are not read", "write the whole path; ~ is your home")]


def _environment_problems(variables: Mapping[str, Any], raw: Raw) -> list[Problem]:
    problems = []
    for name, text in variables.items():
        where = raw.lines.get((name,), raw.source)
        if not re.fullmatch(r"[A-Za-z_]\w*", str(name)):
            problems.append(Problem(where, f"'{name}' is no name of a variable", "write NAME: value"))
        elif not isinstance(text, str | int | float) or isinstance(text, bool):
            problems.append(Problem(where, f"'{name}' is {text!r} where a text belongs", "write it in quotes"))
        elif secret_name(name) or secret_value(text):
            problems.append(
                Problem(where, f"'{name}' holds a secret", "export it in your shell instead: jobs inherit it")
            )
    return problems


def _contradictions(values: Mapping[str, Any], sources: Mapping[str, str]) -> list[Problem]:
    """Keys that exclude one another."""
    ways = [key for key in ("env_dir", "env_activate", "conda_env") if values.get(key)]
    if len(ways) > 1:
        what = f"{' and '.join(ways)} name two environments"
        return [Problem(sources[ways[1]], what, "keep one of them")]
    if values.get("gpu_kind") and not values.get("gpus"):
        return [Problem(sources["gpu_kind"], "a kind of GPU, but no number of them", "write gpus: 8")]
    return []
