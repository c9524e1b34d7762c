"""`grpo compare`: one recipe with several ways for new weights to reach vLLM, side by side, and one table."""

import os
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import Popen
from typing import Any

from grpo_recipes.console.report.page import NOTHING, short
from grpo_recipes.console.sweep.folder import COMPARISON, COMPARISONS, COMPLETED, Comparison
from grpo_recipes.console.sweep.run import SignalForwarder, note_refusal
from grpo_recipes.console.sweep.spec import for_each
from grpo_recipes.errors import EXIT_STOPPED, ConfigError, config_error, translate
from grpo_recipes.fetch.assets import find_assets
from grpo_recipes.launch.submission import Submission, freeze, frozen_environment
from grpo_recipes.paths import python_module, shown
from grpo_recipes.plan.devices import Resources, find_resources
from grpo_recipes.plan.plan import make_plan
from grpo_recipes.plan.ports import PORT_KEYS, need_named_ports
from grpo_recipes.plan.types import Names
from grpo_recipes.process.reports import aligned, print_line, say
from grpo_recipes.process.terminal import LOG
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.check import resolve_recipe
from grpo_recipes.recipe.converters import ADAPTER_MODES, BRIDGE_MODES
from grpo_recipes.recipe.document import read_flags
from grpo_recipes.recipe.keys import nearest_of
from grpo_recipes.recipe.registry import BRIDGES
from grpo_recipes.recipe.rules import removal, takes_groups
from grpo_recipes.runs.benchmark import FILE
from grpo_recipes.runs.checkpoints import newest_complete
from grpo_recipes.runs.rundir import Run, claim, make_folder, read_json, stop_file, timestamp, write_json

COLOCATE = "colocate"
_LOOK_SECONDS = 0.5
# Name -> its bridge, and whether it trains with LoRA; where not, that is as the recipe says.
MODES: dict[str, tuple[str | None, bool]] = {
    COLOCATE: (None, False),
    **{name: (name, name == "lora") for name in BRIDGES},
    **{name: (bridge, name in ADAPTER_MODES) for name, bridge in BRIDGE_MODES.items()},
}
_SET_BY_MODES = ("weight_sync", "weight_bridge_mode", "vllm_mode", "use_vllm")
_STEPS = "max_steps"


@dataclass(frozen=True)
class Contest:
    """What is compared, as the command line says it."""

    recipe: str | None  # as the user names it; None for CONFIG or the default one
    task: str | None
    flags: Sequence[str]  # recipe flags of all modes
    modes: str  # names between commas
    steps: int | None = None  # None: as many as the recipe says
    jobs: int | None = None  # modes that run at the same time, None for all


@dataclass(frozen=True)
class Entry:
    """One mode of a comparison."""

    mode: str  # as the user wrote it
    recipe: Recipe  # checked
    names: Names


def compare(contest: Contest, environment: Mapping[str, str]) -> int:
    """Run the modes, print and write the table; return 0, 1 where a mode failed, 75 where a signal ended it.

    A ConfigError says what is wrong with any of the modes, before anything is written or started.
    """
    modes = read_modes(contest)
    resources = _own_node(find_resources(environment))
    shares = _shares(resources, min(contest.jobs or len(modes), len(modes)), modes)

    def planned(mode: str) -> Recipe:
        with translate(ConfigError, lambda error: _of_the_mode(error, mode)):
            flags = _flags_of(contest, mode)
            recipe = resolve_recipe(contest.recipe, contest.task, flags, environment, resources.device)
            make_plan(recipe, shares[0], environment)
        return recipe

    recipes = dict(zip(modes, for_each({mode: mode for mode in modes}, planned), strict=True))
    _need_different(recipes)
    _need_own_ports(recipes, len(shares))
    folder, entries = _new_comparison(recipes, shares[0], environment)
    at_once = "one after another" if len(shares) == 1 else f"{len(shares)} at the same time"
    say(f"{len(entries)} modes, {at_once}, in {shown(folder)}")
    with os.fdopen(claim(Run(folder))):
        codes, stopped = _run(entries, [share.gpus for share in shares], environment, stop_file(folder))
    rows = [_row(entry, codes.get(entry.mode)) for entry in entries]
    facts = {"device": resources.device, "cores": resources.cores, "gpus": list(resources.gpus)}
    record = {**read_json(folder / COMPARISON), **facts, "at_once": len(shares), "modes": rows}
    write_json(folder / COMPARISON, record)
    for line in table(rows, len(shares), resources):
        print_line(line)
    say(f"comparison in {shown(folder / COMPARISON)}")
    incomplete = any(row["status"] != COMPLETED for row in rows)
    if incomplete:
        say(f"a mode that has not completed goes on with: {Comparison(folder, record).again()}")
    return EXIT_STOPPED if stopped else int(incomplete)


def read_modes(contest: Contest) -> list[str]:
    """Return the names of the modes; refuse unknown ones, flags that they set, and numbers below one."""
    modes = [name.strip() for name in contest.modes.split(",")]
    for name in modes:
        if not name:
            raise config_error("--modes", f"'{contest.modes}' has an empty name", "write a comma between two names")
        if name not in MODES:
            close = nearest_of(name, MODES)
            raise config_error("--modes", f"'{name}' is not a mode", f"write {close or 'some of ' + ', '.join(MODES)}")
    if twice := next((name for name in modes if modes.count(name) > 1), None):
        raise config_error("--modes", f"{twice} is named twice", "name it once")
    if len(modes) < 2:
        raise config_error("--modes", "one mode compares nothing", "name two or more, e.g. file,shared")
    given = {name.replace("-", "_") for name, _ in read_flags(contest.flags, [])}
    for key in _SET_BY_MODES:
        if key in given:
            raise config_error(f"--{key}", "is set by the modes", f"remove it, and name modes: {', '.join(MODES)}")
    if contest.steps is not None and _STEPS in given:
        raise config_error("--steps", f"--{_STEPS} is given too", "keep one of the two")
    for option, number in (("--steps", contest.steps), ("--jobs", contest.jobs)):
        if number is not None and number < 1:
            raise config_error(option, f"is {number}", "write 1 or more")
    return modes


def _flags_of(contest: Contest, mode: str) -> list[str]:
    bridge, lora = MODES[mode]
    flags = [*contest.flags, "--use_vllm", "true", "--vllm_mode", "server" if bridge else COLOCATE]
    flags += ["--weight_sync", bridge] if bridge else []
    flags += ["--use_peft", "true"] if lora else []
    return flags if contest.steps is None else [*flags, f"--{_STEPS}", str(contest.steps)]


def _of_the_mode(error: ConfigError, mode: str) -> ConfigError:
    """Return the error with what is wrong with a key that the mode sets as a fault of the mode."""
    ours = {f"--{key}" for key in _SET_BY_MODES}
    of_mode = {"where": "--modes", "fix": f"leave {mode} out"}
    return ConfigError(*(replace(one, **of_mode) if one.where in ours else one for one in error.problems))


def _own_node(resources: Resources) -> Resources:
    """Return the resources without the job's, in which the comparison itself may run; several nodes are refused."""
    if len(resources.nodes) > 1:
        what = f"{len(resources.nodes)} nodes are allocated, and modes are compared on one"
        raise config_error("sbatch --nodes", what, "ask for one node, with the GPUs of all modes")
    return replace(resources, job=None)


def _shares(resources: Resources, jobs: int, modes: Sequence[str]) -> list[Resources]:
    """Deal the GPUs out to as many modes as run at the same time, each the same number of neighbours."""
    if resources.device == "cpu":
        return [resources] * jobs
    each, need = len(resources.gpus) // jobs, 2 if any(MODES[mode][0] for mode in modes) else 1
    if each < need:
        what = f"{jobs} at the same time need {need * jobs} GPUs, {len(resources.gpus)} are visible"
        fewer = len(resources.gpus) // need
        raise config_error("--modes", what, f"add --jobs {fewer}" if fewer else "ask for more GPUs")
    return [replace(resources, gpus=resources.gpus[place * each : (place + 1) * each]) for place in range(jobs)]


def _need_different(recipes: Mapping[str, Recipe]) -> None:
    """Refuse modes that are one and the same with this recipe."""
    alike: dict[tuple[Any, ...], str] = {}
    for mode, recipe in recipes.items():
        first = alike.setdefault((MODES[mode][0], recipe["use_peft"]), mode)
        if first != mode:
            what = f"{first} and {mode} are the same with this recipe (weight_sync and use_peft)"
            raise config_error("--modes", what, "keep one of the two")


def _need_own_ports(recipes: Mapping[str, Recipe], jobs: int) -> None:
    """Refuse a port that the user chose where it is taken, or modes run at the same time, and a run-api for all."""
    if jobs == 1:
        for_each(recipes, need_named_ports)
    recipe = next(iter(recipes.values()))
    if takes_groups(recipe) and recipe["atropos_api_url"] is not None:
        what = "modes cannot share a run-api: it keeps its first registration, and hands the groups of all to each"
        fix = f"{removal(recipe, 'atropos_api_url')}: each mode starts one of its own"
        raise config_error(recipe.source("atropos_api_url"), what, fix)
    for key in PORT_KEYS:
        if jobs > 1 and recipe.given(key):
            what = f"{jobs} modes at the same time cannot have one {key}"
            raise config_error(recipe.source(key), what, "remove it and let each choose, or add --jobs 1")


def _new_comparison(
    recipes: Mapping[str, Recipe], share: Resources, environment: Mapping[str, str]
) -> tuple[Path, list[Entry]]:
    """Make the folder with a frozen run for each mode; where that fails, leave nothing of it."""
    recipe = next(iter(recipes.values()))
    stamp, name = timestamp(), str(recipe["run_name"] or recipe.path.stem.removeprefix("config_"))
    folder = (Path(os.path.expanduser(recipe["run_root"])) / COMPARISONS / f"{name}-{stamp}").absolute()
    begun = make_folder(folder, f"cannot make the folder of the comparison {shown(folder)}")
    if begun is None:
        raise config_error("run_root", f"{shown(folder)} exists: another has just taken that name", "try again")
    entries = []
    try:
        for mode, one in recipes.items():
            names = Names(folder / mode, f"{name}-{mode}", f"{name}-{mode}", stamp)
            assets = find_assets(one, environment)
            plan = make_plan(one, share, environment, names, assets)
            freeze(Submission(one, names, share, assets, plan, environment))
            entries.append(Entry(mode, one, names))
        record = {"name": name, "timestamp": stamp, **begun, "recipe": str(recipe.path.absolute())}
        write_json(folder / COMPARISON, {**record, "modes": [{"mode": mode} for mode in recipes]})
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder, entries


def _run(
    entries: Sequence[Entry], shares: Sequence[tuple[str, ...]], environment: Mapping[str, str], request: Path
) -> tuple[dict[str, int], bool]:
    """Run every mode as soon as a share of the devices is free; return their exit codes, and whether it was stopped.

    One that fails keeps the others going. A signal, or `grpo stop` by the file ``request``, is passed on to those that
    run, and no other begins.
    """
    forwarder, waiting, free = SignalForwarder(request), list(entries), list(shares)
    running: dict[str, tuple[Entry, Popen[bytes], tuple[str, ...]]] = {}
    codes: dict[str, int] = {}
    while (not forwarder.asked() and waiting) or running:
        while waiting and free and not forwarder.asked():
            entry, gpus = waiting.pop(0), free.pop(0)
            running[entry.mode] = entry, _begin(entry, gpus, forwarder, environment), gpus
        for entry, child, gpus in list(running.values()):
            if (code := child.poll()) is not None:
                del running[entry.mode]
                free.append(gpus)
                codes[entry.mode] = code = code if code >= 0 else 128 - code
                folder = entry.names.run_dir
                note_refusal(folder, code)
                cause = read_json(folder / "summary.json").get("cause") or "its log says why"
                say(f"{entry.mode} " + ("completed" if code == 0 else f"ended with code {code}: {cause}"))
        time.sleep(_LOOK_SECONDS)
    if forwarder.seen is not None:
        why = "grpo stop" if request.exists() else signal.Signals(forwarder.seen).name
        say(f"{why}: the comparison ends here")
    return codes, forwarder.seen is not None


def _begin(
    entry: Entry, gpus: tuple[str, ...], forwarder: SignalForwarder, environment: Mapping[str, str]
) -> Popen[bytes]:
    """Start the launch of a mode on its share of the GPUs."""
    folder = entry.names.run_dir
    own = {**environment, **frozen_environment(folder, environment)}
    own |= {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
    where = f" on GPU {', '.join(gpus)}" if gpus else ""
    say(f"{entry.mode} begins{where}; output in {shown(folder / LOG)}")
    argv = python_module("grpo_recipes", "launch", "--resume", str(folder), "--benchmark")
    return forwarder.begin(argv, own, folder / LOG)


def _row(entry: Entry, code: int | None) -> dict[str, Any]:
    """Return what a mode came to; None for what is not known."""
    folder = entry.names.run_dir
    summary, numbers = read_json(folder / "summary.json"), read_json(folder / FILE)
    checkpoint = newest_complete(folder / "checkpoints")
    files = [path for path in checkpoint.rglob("*") if path.is_file()] if checkpoint else []
    return {
        "mode": entry.mode,
        "bridge": MODES[entry.mode][0] or COLOCATE,
        "use_peft": entry.recipe["use_peft"],
        "run": str(folder),
        "status": "not started" if code is None else summary.get("status", "unknown"),
        "exit_code": code,
        "cause": summary.get("cause"),
        "benchmark": numbers if numbers.get("total_steps") else None,  # without a step it measured nothing
        "checkpoint_bytes": sum(path.stat().st_size for path in files) if files else None,
        "initial_reward": summary.get("initial_reward"),
        "final_reward": summary.get("final_reward"),
    }


def table(rows: Sequence[Mapping[str, Any]], at_once: int, resources: Resources) -> list[str]:
    """Return the table, its foot, and a line for each mode that did not complete."""
    cells = [("mode", "status", "steps", "step s", "sync s", "syncs", "mem GB", "save MB", "reward")]
    for row in rows:
        numbers, size = row["benchmark"] or {}, row["checkpoint_bytes"]
        peak = numbers.get("peak_gpu_memory_gb", numbers.get("peak_process_memory_gb"))
        known = [
            numbers.get(name) for name in ("total_steps", "avg_step_time_seconds", "avg_sync_time_seconds", "syncs")
        ]
        known += [peak, None if size is None else size / 1e6, row["final_reward"]]
        cells.append((row["mode"], str(row["status"]), *(NOTHING if one is None else short(one) for one in known)))
    whose = "process (RSS)" if resources.device == "cpu" else "process on its GPU"
    foot = [f"mem: the peak of the first training {whose}; save: a checkpoint"]
    foot.append("mem leaves out the server, which has its own copy of the weights, except with shared_vllm")
    if resources.device == "cpu" and at_once > 1:
        foot.append(
            f"{at_once} modes shared {resources.cores} CPU cores: their times are longer than of one alone (--jobs 1)"
        )
    if len({row["use_peft"] for row in rows}) > 1:
        foot.append(
            "LoRA and full training learn at different speeds: compare their rewards at learning rates of their own"
        )
    ended = [f"{row['mode']}: {row['cause'] or row['status']}" for row in rows if row["status"] != COMPLETED]
    return [*aligned(cells, numbers=True), *foot, *ended]
