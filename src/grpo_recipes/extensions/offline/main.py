"""The entry point for Hydra keys of the offline trainer: one launch, or with -m one sweep.

``keys.yaml`` has each key. Hydra composes the configuration and parses overrides. Its launchers and its multirun are
not used: runs resume after a preemption and in Slurm's array jobs here.
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
from grpo_recipes.errors import ConfigError, Problem, config_error, translate
from grpo_recipes.extensions.offline import keys as offline
from grpo_recipes.launch.run import launch
from grpo_recipes.paths import display_path, home, newest_first
from grpo_recipes.plan.devices import Resources, find_resources
from grpo_recipes.plan.plan import make_plan
from grpo_recipes.process.reports import say
from grpo_recipes.recipe.check import resolve_recipe
from grpo_recipes.recipe.document import Value, as_words
from grpo_recipes.recipe.keys import nearest_of
from grpo_recipes.runs.rundir import write_atomically

PROGRAM = "run_offline_grpo.py"
BASE = "recipes/base/offline_grpo.yaml"
CONFIG = "offline_grpo"
_ANSWER_SECONDS = 5.0
_ADDRESS = ("vllm_server_port", "vllm_server_base_url")
_OF_A_LAUNCH = ("model.device", "generation.base_url", "eval.base_url")  # another one does not make another run
_OVERRIDE = re.compile(r"[+~]{0,2}[\w.]+=")
# Options of a launch that a sweep lacks, and of a sweep that a launch lacks.
_STARTS = one_node_options(load_command("launch").options)
_LAUNCH = [option("--cfg"), *(start for start in _STARTS if start[0][0] != "--dry-run")]
_SWEEP_COMMAND = load_command("sweep") if "sweep" in commands() else None  # None if no extension has the command
_LOCAL_OR_SLURM = _SWEEP_COMMAND.exclusive if _SWEEP_COMMAND else ()
_SWEEP_OPTIONS = [
    sweep_option
    for sweep_option in (_SWEEP_COMMAND.options if _SWEEP_COMMAND else ())
    if sweep_option[0][0] not in ("--resume", "--dry-run", "--cell")
]
_SWEEP = [*_SWEEP_OPTIONS, *_LOCAL_OR_SLURM]
_INSTEAD = "remove it; the same command again goes on with a sweep, as grpo sweep --resume DIR does"
_ABOUT = "Train by iterations over seeded problems. KEY=VALUE sets a key of conf/offline_grpo.yaml: train.lr=5e-6."


def flags_of(fixed: Sequence[str], swept: Sequence[str], own_port: bool, answers: bool) -> FlagsOf:
    """Return a function that translates the values of a trial: its flags are those of its whole configuration.

    ``fixed`` are the overrides of all trials, ``swept`` the Hydra keys of the axes. With ``own_port`` each server takes
    a port of its own, because jobs of an array may share a node. ``answers`` says whether a server answers at the
    address that the command names.
    """

    def translated(values: Mapping[str, str]) -> list[str]:
        words = [f"{key}={text}" for key, text in zip(swept, values.values(), strict=True)]
        keys = _translated(_composed([*fixed, *words])[0], lambda _: answers).keys
        if own_port:
            keys.pop("vllm_server_port", None)
        return as_words(keys)

    return translated


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code; 2 with a line for each thing that is wrong, before anything is started."""
    return run_reporting_errors(lambda: _run(list(sys.argv[1:] if argv is None else argv)))


def _run(arguments: list[str]) -> int:
    reject_other_launchers(f"python {PROGRAM} --num_processes", os.environ)
    words, others = _overrides(arguments)
    options, flags = _parser().parse_known_args(others)
    if problems := list(unknown_flags(flags, ["--cfg", "--multirun", *(names[0] for names, _ in _SWEEP)], PROGRAM)):
        raise ConfigError(*problems)
    overrides = _parsed(words)
    if options.multirun:
        return _sweep(options, overrides, flags)
    _refuse_given(options, _SWEEP, "changes nothing without -m", "add -m, or remove it")
    if swept := [word for word, one in overrides if one.is_sweep_override()]:
        raise config_error(swept[0], "has several values", "add -m for a run with each of them")
    config, hydra, _ = _composed(words)
    if options.cfg:
        print(OmegaConf.to_yaml(config), end="")
        return 0
    # A server at the address that nobody named is somebody else's.
    named = any(one.get_key_element() == "generation.base_url" for _, one in overrides)
    translation = _translated(config, lambda url: named and _answers(url))
    folder = Path(hydra.run.dir).absolute()
    resources, variables = on_device(translation.device, find_resources(os.environ))
    if options.resume and words:
        raise config_error(words[0], "changes nothing with --resume: a run goes on as it began", "remove it")
    resumed = options.resume or _earlier(folder, config)
    keys = {**translation.keys, "run_root": Value(str(folder), "hydra.run.dir")}
    if resumed is not None:
        keys = {key: value for key, value in keys.items() if named and key in _ADDRESS}
    asked = launch_options(options, str(home() / BASE) if resumed is None else None, flags, keys=keys)
    asked = replace(asked, resume=resumed)
    os.environ.update(variables)
    with translate(ConfigError, lambda error: with_flags_of(error, keys)):
        if resumed is None:  # before anything is written
            recipe = resolve_recipe(asked.recipe, asked.task, asked.flags, os.environ, resources.device, keys)
            make_plan(recipe, resources, os.environ)
        if options.dry_run:
            say(launch_command(replace(asked, dry_run=False), variables))
            return launch(asked, resources)
        if resumed is not None:
            return launch(asked, resources)
        kept, existed = folder / ".hydra", folder.exists()
        _write_hydra(kept, config, hydra, words)
        say(f"metrics and checkpoints of each iteration: {display_path(folder)}")
        try:
            return launch(asked, resources)
        except ConfigError:
            if _run_in(folder) is None:  # nothing was started: leave nothing of ours
                shutil.rmtree(kept, ignore_errors=True)
                with suppress(OSError):
                    if not existed:
                        folder.rmdir()
                _remove_empty(folder.parent)
            raise


def _sweep(options: argparse.Namespace, overrides: list[tuple[str, Override]], flags: list[str]) -> int:
    """Run every combination of the values of swept keys, or those that a search chooses."""
    _refuse_given(options, _LAUNCH, "changes nothing with -m", _INSTEAD)
    sweeper = need_sweeper("-m")(options)
    values = {one.get_key_element(): _values(word, one) for word, one in overrides}
    values = {key: texts for key, texts in values.items() if key not in offline.LISTS and texts}
    swept = {key: texts for key, texts in values.items() if len(texts) > 1 or (options.search and ".." in texts[0])}
    if not swept:
        raise config_error("-m", "nothing is varied", "name a key with several values, e.g. train.lr=5e-6,1e-5")
    if wrong := [key for key in swept if key not in offline.SAME]:
        fix = f"vary one of {', '.join(offline.SAME)}, or begin a sweep for each value"
        raise config_error(wrong[0], "cannot be swept", fix)
    fixed = [word for word, one in overrides if one.get_key_element() not in swept]
    axes = sweeper.axes({offline.SAME[key]: texts for key, texts in swept.items()}, flags)
    first = [f"{key}={texts[0]}" for key, texts in zip(swept, axes.values(), strict=True)]
    config, hydra, earlier = _composed([*fixed, *first])
    answers = "generation.base_url" in values and _answers(config.generation.base_url)
    translation, root = _translated(config, lambda _: answers), Path(hydra.sweep.dir).absolute()
    _, variables = on_device(translation.device, sweeper.resources(os.environ))
    if variables and sweeper.is_submitted:
        what = f"'{translation.device}' is a GPU of this machine, and the runs are jobs"
        raise config_error("model.device", what, "write model.device=auto")
    os.environ.update(variables)
    flags = [f"--run_root={root}", *([f"--run_name={options.name}"] if options.name else []), *flags]
    own_port = sweeper.is_submitted and "generation.base_url" not in values
    translated = flags_of(fixed, list(swept), own_port, answers)
    names = {f"--{key}": value.source for key, value in translation.keys.items()}
    try:
        with translate(ConfigError, lambda error: with_flags_of(error, {}, names)):
            return sweeper.start(str(home() / BASE), axes, flags, translated, earlier)
    except ConfigError:
        _remove_empty(root / sweeper.folder)
        raise


def _values(word: str, override: Override) -> list[str]:
    """Return the values of an override, in Hydra's spelling ``a,b`` or in that of a list, ``[a,b]``."""
    if override.is_sweep_override():
        fix = "write LOW..HIGH or log:LOW..HIGH with --search optuna, or values between commas"
        with translate(HydraException, lambda _: config_error(word, "does not name its values", fix)):
            return list(map(str, override.sweep_string_iterator()))
    value: Any = override.value()
    if isinstance(value, list):
        return [str(one) for one in value]
    return [value if isinstance(value, str) else override.get_value_element_as_str()]


def _refuse_given(options: argparse.Namespace, others: Iterable[Option], what: str, fix: str) -> None:
    """Refuse some options where the command line has them."""
    names = [one[0] for one, _ in others if getattr(options, one[0][2:].replace("-", "_")) not in (None, False)]
    if names:
        raise ConfigError(*(Problem(name, what, fix) for name in names))


def _remove_empty(folder: Path) -> None:
    """Remove a folder and those above it, as far as they are empty and in the working folder."""
    here = Path.cwd()
    with suppress(OSError):
        for one in (folder, *folder.parents):
            if here not in one.parents:
                return
            one.rmdir()


def _overrides(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return Hydra's overrides, and the flags with their values: after a flag, what is not KEY=VALUE is its value."""
    words: list[str] = []
    others: list[str] = []
    for word in arguments:
        of_a_flag = others and not _OVERRIDE.match(word)
        (others if word.startswith("-") or of_a_flag else words).append(word)
    return words, others


def _parsed(words: list[str]) -> list[tuple[str, Override]]:
    """Return each word with the override that it is; a ConfigError names all that are wrong, with the nearest key."""
    problems, found = [], []
    for word in words:
        try:
            (override,) = OverridesParser.create().parse_overrides([word])
        except HydraException as error:
            problems.append(Problem(word, " ".join(str(error).split()), "write KEY=VALUE"))
            continue
        key = override.get_key_element()
        if not key.startswith("hydra.") and key not in offline.KEYS:
            close = nearest_of(key, offline.KEYS)
            fix = f"write {close}={word.partition('=')[2]}" if close else f"see conf/{CONFIG}.yaml for the keys"
            problems.append(Problem(word, f"unknown key '{key}'", fix))
        found.append((word, override))
    if problems:
        raise ConfigError(*problems)
    return found


def _composed(words: list[str]) -> tuple[DictConfig, DictConfig, list[Path]]:
    """Return the configuration, Hydra's own, and the folders of earlier sweeps, whose names have other times."""
    told = (HydraException, OmegaConfBaseException)
    with (
        translate(told, lambda error: config_error("configuration", str(error).strip(), "see conf/offline_grpo.yaml")),
        initialize_config_dir(str(home() / "conf"), version_base="1.3"),
    ):
        whole = compose(CONFIG, overrides=words, return_hydra_config=True)
        hydra = whole.hydra.copy()
        raw = OmegaConf.to_container(hydra.sweep, resolve=False)
        pattern = re.sub(r"\$\{now:[^}]*\}", "*", str(raw["dir"] if isinstance(raw, dict) else ""))
        OmegaConf.resolve(hydra.run)
        OmegaConf.resolve(hydra.sweep)
    config = OmegaConf.masked_copy(whole, [str(key) for key in whole if key != "hydra"])
    OmegaConf.resolve(config)
    return config, hydra, newest_first(map(Path, glob.glob(pattern)))


def _translated(config: DictConfig, answers: Callable[[str], bool]) -> offline.OfflineKeys:
    plain = OmegaConf.to_container(OmegaConf.create({key: OmegaConf.select(config, key) for key in offline.KEYS}))
    assert isinstance(plain, dict)
    translation = offline.translate({str(key): value for key, value in plain.items()}, answers)
    if translation.problems:
        raise ConfigError(*translation.problems)
    return translation


def on_device(device: str, resources: Resources) -> tuple[Resources, dict[str, str]]:
    """Return the devices of a launch that trains on ``device``, and the variables that say so.

    The server takes the first of the others. A device that is not there is a ConfigError, never another one.
    """
    if device == "auto" or device == resources.device:
        return resources, {}
    if device == "cpu":
        what = "'cpu' is not there: this environment is for GPUs"
        raise config_error("model.device", what, "write auto, cuda or cuda:N, or set up with DEVICE=cpu")
    kind, _, number = device.partition(":")
    if kind != "cuda" or (number and not number.isdecimal()):
        raise config_error("model.device", f"'{device}' is unknown", "write auto, cpu, cuda or cuda:N")
    if resources.device == "cpu":
        fix = "write model.device=auto or cpu, or run `make setup` for GPUs"
        raise config_error("model.device", f"'{device}' is not there: this environment has the CPU build", fix)
    gpus = resources.gpus
    if int(number) >= len(gpus):
        raise config_error("model.device", f"'{device}' is not there: {len(gpus)} GPUs are visible", "name one of them")
    others = [gpu for place, gpu in enumerate(gpus) if place != int(number)]
    chosen = (*others[:1], gpus[int(number)])
    return replace(resources, gpus=chosen), {"CUDA_VISIBLE_DEVICES": ",".join(chosen)}


def _answers(url: str) -> bool:
    """Return whether a server listens there, whatever it serves."""
    parts = urlsplit(url)
    with suppress(OSError, ValueError), socket.create_connection((parts.hostname, parts.port or 80), _ANSWER_SECONDS):
        return True
    return False


def _earlier(folder: Path, config: DictConfig) -> str | None:
    """Return the run in a folder of an earlier launch, which goes on; one of another configuration is a ConfigError."""
    kept = folder / ".hydra" / "config.yaml"
    if kept.is_file():
        fix = "name another folder: hydra.run.dir=FOLDER"
        with translate(
            (OSError, ValueError, YAMLError),
            lambda error: config_error(display_path(kept), f"cannot be read ({error})", fix),
        ):
            before = OmegaConf.load(kept)
        decisive = [key for key in offline.KEYS if key not in _OF_A_LAUNCH]
        pairs = {key: (OmegaConf.select(before, key), OmegaConf.select(config, key)) for key in decisive}
        for key, (old, new) in pairs.items():
            if old != new:
                what = f"is {new}, and what is in {display_path(folder)} began with {old}"
                raise config_error(key, what, f"go back to {key}={old}, or {fix}")
    return _run_in(folder)


def _run_in(folder: Path) -> str | None:
    """Return the last run that was begun in a folder."""
    runs = sorted(path.parent for path in folder.glob("*/run.json"))
    return str(runs[-1]) if runs else None


def _write_hydra(kept: Path, config: DictConfig, hydra: DictConfig, words: list[str]) -> None:
    """Keep what Hydra keeps of a run."""
    kept.mkdir(parents=True, exist_ok=True)
    write_atomically(kept / "config.yaml", OmegaConf.to_yaml(config))
    write_atomically(kept / "hydra.yaml", OmegaConf.to_yaml(hydra))
    write_atomically(kept / "overrides.yaml", OmegaConf.to_yaml(OmegaConf.create(words)))


def _parser() -> Parser:
    epilog = "Any recipe key is a flag too, e.g. --max_prompt_length 512; see docs/offline-trainer.md."
    usage = "%(prog)s [options] [KEY=VALUE ...]"
    parser = Parser(prog=PROGRAM, usage=usage, description=_ABOUT, epilog=epilog, allow_abbrev=False)
    parser.set_defaults(recipe=None, config=None)
    parser.add_argument("-m", "--multirun", action="store_true", help="run every combination: KEY=A,B or KEY='[A,B]'")
    parser.add_argument("--cfg", choices=["job"], help="print the configuration, and end")
    for names, settings in (
        *_STARTS,
        *(sweep_option for sweep_option in _SWEEP if sweep_option not in _LOCAL_OR_SLURM),
    ):
        parser.add_argument(*names, **settings)
    if _LOCAL_OR_SLURM:  # argparse can't print the usage of an empty group
        group = parser.add_mutually_exclusive_group()
        for names, settings in _LOCAL_OR_SLURM:
            group.add_argument(*names, **settings)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
