"""The entry point ``run_offline_grpo.py`` for Hydra keys of the offline trainer: one launch, or with -m one sweep.

The offline trainer is another project (docs/migrate.md), whose command lines also work here.

    python run_offline_grpo.py train.lr=5e-6 data.problems=sat
    python run_offline_grpo.py -m train.lr=5e-6,1e-5

``keys.yaml`` has each key. Hydra only composes the configuration and parses overrides. Launches and sweeps replace
its launchers and its multirun, so that runs resume after a preemption and in Slurm's array jobs.
"""

import argparse
import glob
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from grpo_recipes.cli import Option, Parser, commands, load_command, option, run_reporting_errors
from grpo_recipes.cli.entry_points import launch_command, one_node_options, unknown_flags, with_flags_of
from grpo_recipes.cli.nodes import reject_other_launchers
from grpo_recipes.cli.runs import launch_options
from grpo_recipes.cli.sweeps import FlagsOf, need_sweeper
from grpo_recipes.errors import ConfigError, Problem, config_error, translate_errors
from grpo_recipes.extensions.offline import keys as offline
from grpo_recipes.launch.resolve import POINTERS
from grpo_recipes.launch.run import launch
from grpo_recipes.paths import display_path, find_code_root, sort_newest_first
from grpo_recipes.plan.devices import Resources, find_resources
from grpo_recipes.plan.plan import make_plan
from grpo_recipes.process.reports import say
from grpo_recipes.recipe.check import resolve_recipe
from grpo_recipes.recipe.document import Value, as_words
from grpo_recipes.recipe.keys import nearest_of
from grpo_recipes.runs.rundir import write_atomically
from grpo_recipes.slurm.client import SlurmJob

PROGRAM = "run_offline_grpo.py"
BASE = "recipes/base/offline_grpo.yaml"
CONFIG = "offline_grpo"
_ANSWER_SECONDS = 5.0
_ADDRESS = ("vllm_server_port", "vllm_server_base_url")
_RUN_FOLDER, _SWEEP_FOLDER = "hydra.run.dir", "hydra.sweep.dir"  # the only keys of Hydra itself that have an effect
_LAUNCH_KEYS = ("model.device", "generation.base_url", "eval.base_url")  # a resumed run may have other values
_OVERRIDE = re.compile(r"[+~]{0,2}[\w.]+=")
# Options that only a launch has, and options that only a sweep has.
_LAUNCH_OPTIONS = one_node_options(load_command("launch").options)
_ONLY_LAUNCH = [option("--cfg"), *(item for item in _LAUNCH_OPTIONS if item[0][0] != "--dry-run")]
_SWEEP_COMMAND = load_command("sweep") if "sweep" in commands() else None  # None if no extension has the command
_LOCAL_OR_SLURM = _SWEEP_COMMAND.exclusive if _SWEEP_COMMAND else ()
_SWEEP_OPTIONS = [
    sweep_option
    for sweep_option in (_SWEEP_COMMAND.options if _SWEEP_COMMAND else ())
    if sweep_option[0][0] not in ("--resume", "--dry-run", "--cell")
]
_ONLY_SWEEP = [*_SWEEP_OPTIONS, *_LOCAL_OR_SLURM]
_RESUME_SWEEP = "remove it; to resume a sweep, repeat its command, or use grpo sweep --resume DIR"
_ABOUT = "Train by iterations over seeded problems. KEY=VALUE sets a key of conf/offline_grpo.yaml: train.lr=5e-6."


def make_flags_of(fixed: Sequence[str], swept: Sequence[str], separate_ports: bool, answers: bool) -> FlagsOf:
    """Return a function that converts the values of a sweep's trial to the recipe flags of its whole configuration.

    ``fixed`` are the overrides of all trials and ``swept`` the Hydra keys of the axes. With ``separate_ports``, each
    server chooses its own port, because jobs of an array may share a node. ``answers`` is whether a server answers at
    the address in the overrides.
    """

    def flags_of(values: Mapping[str, str]) -> list[str]:
        """Return the recipe flags of a trial; ``values`` are in the order of the axes."""
        words = [f"{key}={text}" for key, text in zip(swept, values.values(), strict=True)]
        keys = _translate(_compose([*fixed, *words])[0], lambda _: answers).keys
        if separate_ports:
            keys.pop("vllm_server_port", None)
        return as_words(keys)

    return flags_of


def main(argv: Sequence[str] | None = None) -> int:
    """Start the launch or the sweep of a command line; return its exit code, or 2 after printing all problems."""
    return run_reporting_errors(lambda: _start_launch_or_sweep(list(sys.argv[1:] if argv is None else argv)))


def _start_launch_or_sweep(arguments: list[str]) -> int:
    """Start the launch or sweep of a command line, or resume the run in its folder; return the exit code.

    With -m, start a sweep. If the folder has a run with the same configuration, resume it. A requeued Slurm job uses
    its earlier folder. Before a new launch, check recipe and plan, and write Hydra's files; remove them if the launch
    is rejected. With --cfg, only print the configuration. Set the variables of the selected device in ``os.environ``.
    Raise ConfigError for wrong words and flags.
    """
    reject_other_launchers(f"python {PROGRAM} --num_processes", os.environ)
    words, flag_words = _split_words(arguments)
    options, flags = _build_parser().parse_known_args(flag_words)
    names = ["--cfg", "--multirun", *(option_names[0] for option_names, _ in _ONLY_SWEEP)]
    if problems := list(unknown_flags(flags, names, PROGRAM)):
        raise ConfigError(*problems)
    overrides = _parse_overrides(words, _SWEEP_FOLDER if options.multirun else _RUN_FOLDER)
    if options.multirun:
        return _start_sweep(options, overrides, flags)
    _reject_options(options, _ONLY_SWEEP, "has no effect without -m", "add -m, or remove it")
    if swept := [word for word, override in overrides if override.is_sweep_override()]:
        raise config_error(swept[0], "has several values", "add -m to start a run for each value")
    config, hydra, earlier_folders = _compose(words)
    if options.cfg:
        print(OmegaConf.to_yaml(config), end="")
        return 0
    # Without an address on the command line, a server at the default address may belong to another user.
    sets_address = any(override.get_key_element() == "generation.base_url" for _, override in overrides)
    translation = _translate(config, lambda url: sets_address and _server_answers(url))
    resources, variables = select_device(translation.device, find_resources(os.environ))
    folder = _find_folder_of_job(earlier_folders, resources.job, config) or Path(hydra.run.dir).absolute()
    if options.resume and words:
        raise config_error(words[0], "has no effect with --resume: a resumed run keeps its configuration", "remove it")
    resumed = options.resume or _find_earlier_run(folder, config)
    keys = {**translation.keys, "run_root": Value(str(folder), _RUN_FOLDER)}
    if resumed is not None:
        keys = {key: value for key, value in keys.items() if sets_address and key in _ADDRESS}
    request = launch_options(options, str(find_code_root() / BASE) if resumed is None else None, flags, keys=keys)
    request = replace(request, resume=resumed)
    os.environ.update(variables)
    with translate_errors(ConfigError, lambda error: with_flags_of(error, keys)):
        if resumed is None:  # find problems before writing anything
            recipe = resolve_recipe(request.recipe, request.task, request.flags, os.environ, resources.device, keys)
            make_plan(recipe, resources, os.environ)
        if options.dry_run:
            say(launch_command(replace(request, dry_run=False), variables))
            return launch(request, resources)
        if resumed is not None:
            return launch(request, resources)
        hydra_folder, existed = folder / ".hydra", folder.exists()
        _write_hydra_files(hydra_folder, config, hydra, words)
        say(f"metrics and checkpoints of each iteration: {display_path(folder)}")
        try:
            return launch(request, resources)
        except ConfigError:
            if _find_newest_run(folder) is None:  # no run has started, so remove our folders
                shutil.rmtree(hydra_folder, ignore_errors=True)
                with suppress(OSError):
                    if not existed:
                        folder.rmdir()
                _remove_empty_folders(folder.parent)
            raise


def _start_sweep(options: argparse.Namespace, overrides: list[tuple[str, Override]], flags: list[str]) -> int:
    """Start a sweep over the keys with several values; return its exit code.

    It runs every combination, or the ones that a search chooses. Set the variables of the selected device in
    ``os.environ``. Raise ConfigError if no key or an unsupported key has several values.
    """
    _reject_options(options, _ONLY_LAUNCH, "has no effect with -m", _RESUME_SWEEP)
    sweeper = need_sweeper("-m")(options)
    values = {override.get_key_element(): _list_values(word, override) for word, override in overrides}
    values = {key: texts for key, texts in values.items() if key not in offline.LISTS and texts}
    swept = {key: texts for key, texts in values.items() if len(texts) > 1 or (options.search and ".." in texts[0])}
    if not swept:
        raise config_error("-m", "no key has several values", "give a key several values, e.g. train.lr=5e-6,1e-5")
    if unsupported := [key for key in swept if key not in offline.SAME]:
        fix = f"vary one of {', '.join(offline.SAME)}, or start a sweep for each value"
        raise config_error(unsupported[0], "can't be swept", fix)
    fixed = [word for word, override in overrides if override.get_key_element() not in swept]
    axes = sweeper.axes({offline.SAME[key]: texts for key, texts in swept.items()}, flags)
    first_trial = [f"{key}={texts[0]}" for key, texts in zip(swept, axes.values(), strict=True)]
    config, hydra, earlier_folders = _compose([*fixed, *first_trial], "sweep")
    answers = "generation.base_url" in values and _server_answers(str(config.generation.base_url))
    translation, root = _translate(config, lambda _: answers), Path(hydra.sweep.dir).absolute()
    _, variables = select_device(translation.device, sweeper.resources(os.environ))
    if variables and sweeper.is_submitted:
        problem = f"'{translation.device}' is a GPU of this machine, but the runs are jobs on other machines"
        raise config_error("model.device", problem, "set model.device=auto")
    os.environ.update(variables)
    flags = [f"--run_root={root}", *([f"--run_name={options.name}"] if options.name else []), *flags]
    separate_ports = sweeper.is_submitted and "generation.base_url" not in values
    flags_of = make_flags_of(fixed, list(swept), separate_ports, answers)
    names = {f"--{key}": value.source for key, value in translation.keys.items()}
    try:
        with translate_errors(ConfigError, lambda error: with_flags_of(error, {}, names)):
            return sweeper.start(str(find_code_root() / BASE), axes, flags, flags_of, earlier_folders)
    except ConfigError:
        _remove_empty_folders(root / sweeper.folder)
        raise


def _list_values(word: str, override: Override) -> list[str]:
    """List the values of a Hydra override as texts: the values of a sweep or a list, or else the only value.

    ``key=a,b``, ``key=[a,b]`` and ``key=range(1,3)`` have several values. Raise ConfigError for a sweep whose values
    can't be listed, such as ``key=interval(0,1)``. ``word`` is the override on the command line, for the message.
    """
    if override.is_sweep_override():
        fix = "write values between commas, or LOW..HIGH or log:LOW..HIGH with --search optuna"
        with translate_errors(HydraException, lambda _: config_error(word, "does not list its values", fix)):
            return list(map(str, override.sweep_string_iterator()))
    value: Any = override.value()
    if isinstance(value, list):
        return list(map(str, value))
    return [value if isinstance(value, str) else override.get_value_element_as_str()]


def _reject_options(options: argparse.Namespace, rejected: Iterable[Option], problem: str, fix: str) -> None:
    """Raise ConfigError with ``problem`` and ``fix`` for each of the ``rejected`` options on the command line."""
    flags = [names[0] for names, _ in rejected]
    used = [flag for flag in flags if getattr(options, flag[2:].replace("-", "_")) not in (None, False)]
    if used:
        raise ConfigError(*(Problem(flag, problem, fix) for flag in used))


def _remove_empty_folders(folder: Path) -> None:
    """Remove a folder and its parents inside the working folder, as long as they are empty."""
    working_folder = Path.cwd()
    with suppress(OSError):
        for path in (folder, *folder.parents):
            if working_folder not in path.parents:
                return
            path.rmdir()


def _split_words(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split the command line into Hydra's overrides and flags with their values.

    After a flag, a word that is not KEY=VALUE is the value of the flag.
    """
    overrides: list[str] = []
    flag_words: list[str] = []
    for word in arguments:
        is_flag_value = flag_words and not _OVERRIDE.match(word)
        (flag_words if word.startswith("-") or is_flag_value else overrides).append(word)
    return overrides, flag_words


def _parse_overrides(words: list[str], folder_key: str) -> list[tuple[str, Override]]:
    """Parse KEY=VALUE words with Hydra; return each word with its override.

    ``folder_key`` is the only key of Hydra itself that has an effect. Raise ConfigError with all words that are
    invalid, have an unknown key or have no effect.
    """
    problems, overrides = [], []
    for word in words:
        try:
            (override,) = OverridesParser.create().parse_overrides([word])
        except HydraException as error:
            problems.append(Problem(word, " ".join(str(error).split()), "write KEY=VALUE"))
            continue
        key = override.get_key_element()
        if key.startswith("hydra."):
            if key != folder_key:
                problems.append(Problem(word, "has no effect here", f"remove it; {folder_key} sets the folder"))
        elif key not in offline.KEYS:
            nearest = nearest_of(key, offline.KEYS)
            value = word.partition("=")[2] or "VALUE"
            fix = f"write {nearest}={value}" if nearest else f"see conf/{CONFIG}.yaml for the keys"
            problems.append(Problem(word, f"unknown key '{key}'", fix))
        overrides.append((word, override))
    if problems:
        raise ConfigError(*problems)
    return overrides


def _compose(words: list[str], kind: str = "run") -> tuple[DictConfig, DictConfig, list[Path]]:
    """Compose Hydra's configuration with overrides; return it, its part ``hydra``, and folders of earlier starts.

    ``kind`` is "run" or "sweep", and the folders are those of its ``dir`` at any time, the newest first. Raise
    ConfigError if Hydra rejects the overrides.
    """
    errors = (HydraException, OmegaConfBaseException)
    fix = "see conf/offline_grpo.yaml"
    with (
        translate_errors(errors, lambda error: config_error("configuration", str(error).strip(), fix)),
        initialize_config_dir(str(find_code_root() / "conf"), version_base="1.3"),
    ):
        whole = compose(CONFIG, overrides=words, return_hydra_config=True)
        hydra = whole.hydra.copy()
        raw = OmegaConf.to_container(hydra[kind], resolve=False)
        pattern = re.sub(r"\$\{now:[^}]*\}", "*", str(raw["dir"] if isinstance(raw, dict) else ""))
        OmegaConf.resolve(hydra.run)
        OmegaConf.resolve(hydra.sweep)
    config = OmegaConf.masked_copy(whole, [str(key) for key in whole if key != "hydra"])
    OmegaConf.resolve(config)
    return config, hydra, sort_newest_first(map(Path, glob.glob(pattern)))


def _translate(config: DictConfig, answers: Callable[[str], bool]) -> offline.OfflineKeys:
    """Translate a Hydra configuration to recipe keys and a device; raise ConfigError with all of its problems.

    ``answers`` returns whether a server answers at an address.
    """
    values = OmegaConf.to_container(OmegaConf.create({key: OmegaConf.select(config, key) for key in offline.KEYS}))
    assert isinstance(values, dict)
    translation = offline.translate({str(key): value for key, value in values.items()}, answers)
    if translation.problems:
        raise ConfigError(*translation.problems)
    return translation


def select_device(device: str, resources: Resources) -> tuple[Resources, dict[str, str]]:
    """Limit the resources of a launch to ``device``; return them, and the environment variables that select them.

    "auto" and the environment's own device change nothing, and the variables are {}. For ``cuda:N``, the trainer gets
    GPU N, and the server the first other GPU, if there is any. Raise ConfigError if the device does not exist.
    """
    if device == "auto" or device == resources.device:
        return resources, {}
    if device == "cpu":
        problem = "'cpu' is not available: this environment is for GPUs"
        raise config_error("model.device", problem, "set auto, cuda or cuda:N, or set up with DEVICE=cpu")
    number = device.removeprefix("cuda:")
    if device != "cuda" and not (device.startswith("cuda:") and number.isdecimal()):
        raise config_error("model.device", f"'{device}' is unknown", "set auto, cpu, cuda or cuda:N")
    if resources.device == "cpu":
        fix = "set model.device=auto or cpu, or run `make setup` for GPUs"
        raise config_error("model.device", f"'{device}' is not available: this environment has the CPU build", fix)
    gpus = resources.gpus
    if int(number) >= len(gpus):
        problem = f"'{device}' is not available: {len(gpus)} GPUs are visible"
        raise config_error("model.device", problem, "set a visible GPU, e.g. cuda:0")
    other_gpus = [gpu for index, gpu in enumerate(gpus) if index != int(number)]
    selected = (*other_gpus[:1], gpus[int(number)])
    return replace(resources, gpus=selected), {"CUDA_VISIBLE_DEVICES": ",".join(selected)}


def _server_answers(url: str) -> bool:
    """Return whether a TCP connection to the URL's host and port succeeds within 5 s."""
    parts = urlsplit(url)
    with suppress(OSError, ValueError), socket.create_connection((parts.hostname, parts.port or 80), _ANSWER_SECONDS):
        return True
    return False


def _find_earlier_run(folder: Path, config: DictConfig) -> str | None:
    """Return the newest run directory in a folder, the last by name, to resume it; None if there is none.

    Raise ConfigError if the folder has a ``.hydra/config.yaml`` that can't be read or differs from ``config``; keys
    that only affect a launch may differ.
    """
    file = folder / ".hydra" / "config.yaml"
    if file.is_file():
        fix = "use another folder: hydra.run.dir=FOLDER"
        with translate_errors(
            (OSError, ValueError, YAMLError),
            lambda error: config_error(display_path(file), f"can't be read ({error})", fix),
        ):
            earlier = OmegaConf.load(file)
        keys = [key for key in offline.KEYS if key not in _LAUNCH_KEYS]
        pairs = {key: (OmegaConf.select(earlier, key), OmegaConf.select(config, key)) for key in keys}
        for key, (old, new) in pairs.items():
            if old != new:
                problem = f"is {new}, but the run in {display_path(folder)} started with {old}"
                raise config_error(key, problem, f"go back to {key}={old}, or {fix}")
    return _find_newest_run(folder)


def _find_folder_of_job(folders: Iterable[Path], job: SlurmJob | None, config: DictConfig) -> Path | None:
    """Return the first of ``folders`` with a run of a requeued Slurm job and this configuration; None without one.

    The default of hydra.run.dir contains the time of the start, so a requeued job would start again in a new folder.
    """
    if job is not None and job.restarts:
        for folder in (folder for folder in folders if (folder / POINTERS / job.name).is_file()):
            with suppress(ConfigError):  # another command of the job's script started this run
                if _find_earlier_run(folder, config):
                    return folder.absolute()
    return None


def _find_newest_run(folder: Path) -> str | None:
    """Return the run directory in a folder with the last name in alphabetical order; None if there is none."""
    runs = sorted(path.parent for path in folder.glob("*/run.json"))
    return str(runs[-1]) if runs else None


def _write_hydra_files(folder: Path, config: DictConfig, hydra: DictConfig, words: list[str]) -> None:
    """Write config.yaml, hydra.yaml and overrides.yaml to ``folder``, which is created, as Hydra does for a run."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "config.yaml", OmegaConf.to_yaml(config))
    write_atomically(folder / "hydra.yaml", OmegaConf.to_yaml(hydra))
    write_atomically(folder / "overrides.yaml", OmegaConf.to_yaml(OmegaConf.create(words)))


def _build_parser() -> Parser:
    """Return the parser for the options of launches and sweeps, and for Hydra's ``-m`` and ``--cfg``.

    It does not parse KEY=VALUE words.
    """
    epilog = "Any recipe key is a flag too, e.g. --max_prompt_length 512; see docs/migrate.md."
    usage = "%(prog)s [options] [KEY=VALUE ...]"
    parser = Parser(prog=PROGRAM, usage=usage, description=_ABOUT, epilog=epilog, allow_abbrev=False)
    parser.set_defaults(recipe=None, config=None)
    parser.add_argument("-m", "--multirun", action="store_true", help="Run every combination: KEY=A,B or KEY='[A,B]'")
    parser.add_argument("--cfg", choices=["job"], help="Print the configuration and exit")
    for names, settings in (*_LAUNCH_OPTIONS, *(item for item in _ONLY_SWEEP if item not in _LOCAL_OR_SLURM)):
        parser.add_argument(*names, **settings)
    if _LOCAL_OR_SLURM:  # argparse can't print the usage of an empty group
        group = parser.add_mutually_exclusive_group()
        for names, settings in _LOCAL_OR_SLURM:
            group.add_argument(*names, **settings)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.argv[0] = PROGRAM  # run.json, sweep.json and launch.log have this as the command
    sys.exit(main())
