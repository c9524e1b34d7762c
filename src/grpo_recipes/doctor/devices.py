"""Checks of the GPUs: those of this machine, from ``nvidia-smi``, and those that Slurm grants, from ``sinfo``."""

from __future__ import annotations

import importlib.util
import math
import re
import shutil
import socket
from pathlib import Path

from grpo_recipes.doctor.examine import Machine, NoAnswer, judge
from grpo_recipes.paths import home
from grpo_recipes.plan.devices import select_gpus
from grpo_recipes.runs.finding import PROBLEM, WARNING, Finding, ok, problem, warning
from grpo_recipes.slurm.client import slurm_job, walltime_seconds

# Oldest driver branch for a CUDA major version (NVIDIA, CUDA minor version compatibility, table 1).
_OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
_GPU_FIELDS = (
    "index", "uuid", "name", "driver_version", "memory.total", "memory.used", "ecc.errors.uncorrected.volatile.total",
    "mig.mode.current", "compute_mode",
)  # fmt: skip
_APP_FIELDS = ("gpu_uuid", "pid", "used_memory")
_FORMAT = "--format=csv,noheader,nounits"
_GPUS = (("nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", _FORMAT), ",", _GPU_FIELDS)
_APPS = (("nvidia-smi", f"--query-compute-apps={','.join(_APP_FIELDS)}", _FORMAT), ",", _APP_FIELDS)
# a row for the nodes of one partition in one state
_NODES = (
    ("sinfo", "-h", "-o", "%R|%l|%D|%G|%T|%N"), "|", ("partition", "time limit", "nodes", "gres", "state", "names"),
)  # fmt: skip
_UNUSABLE = ("down", "drain", "fail", "maint", "inval", "unk")
_BUSY_MIB = 1024
_ASK_FOR_GPUS = "submit with sbatch --gres=gpu:8 training.sh; look from inside a job: srun --gres=gpu:1 grpo doctor"
_TRAIN_ON_THEM = "to train on them: DEVICE=cuda make setup"


def _mib(gpu: dict[str, str], kind: str) -> int:
    """Return MiB of a GPU's memory, 0 where it does not report them (``[N/A]``)."""
    return int(gpu[f"memory.{kind}"]) if gpu[f"memory.{kind}"].isdigit() else 0


def _visible_ids(machine: Machine) -> tuple[str, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves, as a plan takes them: indices, UUIDs or MIG slices."""
    listing = machine.ask("nvidia-smi", "-L")
    return select_gpus(listing.stdout if listing else "", machine.environment.get("CUDA_VISIBLE_DEVICES"))


def driver(machine: Machine) -> Finding:
    """Whether the NVIDIA driver answers, and is new enough for the CUDA build of torch."""
    try:
        found = machine.table(*_GPUS)
    except NoAnswer as error:
        return problem(str(error), "leave this node out and report it to the admins: its driver must be loaded again")
    cuda = torch_cuda() if machine.device == "cuda" else None
    if not found and machine.device != "cuda":
        return ok("none, none needed (CPU environment)")
    if not found:
        what = "nvidia-smi is not there or lists no GPU, and this is a CUDA environment"
        if shutil.which("sinfo") and not machine.in_job:
            return warning(f"{what}: usual on a login node", _ASK_FOR_GPUS)
        return problem(what, f"{_ASK_FOR_GPUS}; without Slurm install the driver, or DEVICE=cpu make setup")
    version = found[0]["driver_version"]
    if cuda is None:
        return ok(f"{version}; torch is a CPU build")
    oldest = _OLDEST_DRIVER.get(int(cuda.split(".")[0]), max(_OLDEST_DRIVER.values()))
    fix = f"ask for a driver of branch {oldest} or newer, or load the site's cuda-compat module"
    if int(version.split(".")[0]) < oldest:
        return problem(f"{version} is too old for the CUDA {cuda} of torch", fix)
    return ok(f"{version}, torch for CUDA {cuda}")


def torch_cuda() -> str | None:
    """Return the CUDA version torch was built for, read from its files; None for a CPU build or without torch."""
    spec = importlib.util.find_spec("torch")
    return cuda_in((Path(spec.origin).parent / "version.py").read_text()) if spec and spec.origin else None


def cuda_in(text: str) -> str | None:
    """Return the CUDA version that a ``torch/version.py`` names."""
    found = re.search(r"^cuda\b[^=\n]*= *'([\d.]+)'", text, re.MULTILINE)
    return found and found[1]


def gpus(machine: Machine) -> Finding:
    """GPUs the driver lists, those CUDA_VISIBLE_DEVICES leaves, and whether the environment can use them."""
    everything, ids = machine.rows(*_GPUS), _visible_ids(machine)
    chosen, granted = (machine.environment.get(name, "") for name in ("CUDA_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE"))
    sizes = {f"{gpu['name']}, {_mib(gpu, 'total') / 1024:.0f} GiB" for gpu in everything if _mib(gpu, "total")}
    what = f"{len(ids)} visible of {len(everything)}" + (f" (CUDA_VISIBLE_DEVICES={chosen})" if chosen else "")
    what += f": {'; '.join(sorted(sizes))}" if everything else ""
    if machine.device == "cpu":
        what = f"{what}, but this is a CPU environment" if everything else "none (CPU environment)"
        return judge(what, (everything, WARNING, _TRAIN_ON_THEM))
    if everything and not ids:
        return problem(f"{what}: CUDA_VISIBLE_DEVICES is empty", "unset CUDA_VISIBLE_DEVICES, or name GPUs in it")
    if not ids and machine.in_job:
        return problem(f"{what} in job {machine.environment['SLURM_JOB_ID']}", _ASK_FOR_GPUS)
    if granted.isdigit() and int(granted) != len(ids):
        fix = "the driver's count is used; check --gres and the site's gres.conf"
        return warning(f"{what}, Slurm granted {granted}", fix)
    return ok(what)


def gpu_memory(machine: Machine) -> Finding:
    """Memory of the visible GPUs that other processes hold."""
    found, ids = machine.rows(*_GPUS), _visible_ids(machine)
    busy = [
        gpu
        for gpu in found
        if _mib(gpu, "used") > _BUSY_MIB and any(id == gpu["index"] or gpu["uuid"].startswith(id) for id in ids)
    ]
    if not busy:
        return ok("free" if found else "no GPU")
    holders = machine.rows(*_APPS)
    parts = []
    for gpu in busy:
        pids = ", ".join(holder["pid"] for holder in holders if holder["gpu_uuid"] == gpu["uuid"])
        held = f"GPU {gpu['index']}: {_mib(gpu, 'used') / 1024:.1f} of {_mib(gpu, 'total') / 1024:.0f} GiB held"
        parts.append(held + (f" by pid {pids}" if pids else ""))
    fix = "wait for them, or name other GPUs in CUDA_VISIBLE_DEVICES (vLLM takes its share of all the memory)"
    return warning("; ".join(parts), fix)


# Field of nvidia-smi, the values that are wrong, what they mean, the status, the fix.
_GPU_FAULTS = (
    ("ecc.errors.uncorrected.volatile.total", r"[1-9]\d*", "had uncorrected memory errors", PROBLEM,
     "leave it out (CUDA_VISIBLE_DEVICES) and report it to the admins"),
    ("mig.mode.current", "Enabled", "is cut into MIG slices, which have no direct way to each other", WARNING,
     "ask for whole GPUs, or train on one slice with vllm_mode: colocate"),
    ("compute_mode", "Exclusive_Process", "takes one process at a time", WARNING,
     "keep server and trainers on separate GPUs (vllm_mode: server), or ask for mode Default"),
)  # fmt: skip


def gpu_health(machine: Machine) -> Finding:
    """Uncorrected memory errors, MIG slices and exclusive mode of the GPUs."""
    found = machine.rows(*_GPUS)
    for field, wrong, what, status, fix in _GPU_FAULTS:
        if names := [gpu["index"] for gpu in found if re.fullmatch(wrong, gpu[field])]:
            return Finding(status, f"GPU {', '.join(names)} {what}", fix)
    return ok("no errors reported" if found else "no GPU")


def slurm(machine: Machine) -> Finding:
    """Whether sbatch and sinfo are there, and the partitions and GPUs that Slurm shows."""
    try:
        rows = machine.table(*_NODES)
    except NoAnswer as error:
        return warning(str(error), "load the site's Slurm module, or ask the admins: sbatch will not work either")
    if rows is None:
        return ok("no Slurm here")
    if not shutil.which("sbatch"):
        return warning("sinfo is there, sbatch is not", "load the site's Slurm module, or work on the login node")
    partitions = sorted({row["partition"] for row in rows})
    granted = sorted({part for row in rows for part in row["gres"].split(",") if part.startswith("gpu")})
    what = f"partitions {', '.join(partitions) or 'none'}; {', '.join(granted) or 'no GPUs'}"
    if machine.device == "cpu" and granted:
        return warning(f"{what}, but this is a CPU environment", _TRAIN_ON_THEM)
    ungranted = machine.device == "cuda" and not granted
    return judge(what, (ungranted, WARNING, "Slurm grants no GPUs here: ask the admins how to ask for them"))


def nodes(machine: Machine) -> Finding:
    """Nodes that are down or drained; a problem where no node with GPUs is left."""
    found = machine.rows(*_NODES)
    if not found:
        return ok("not known: see slurm")
    wanted = [row for row in found if re.search(r"(^|,)gpu\b", row["gres"])] or found
    lost = [row for row in wanted if any(word in row["state"].lower() for word in _UNUSABLE)]
    # a node of two partitions is in two lines, under one name
    names = ", ".join({row["names"]: f"{row['names']} {row['state']}" for row in lost}.values())
    usable = {row["names"]: int(row["nodes"]) for row in wanted if row not in lost}
    if not usable:
        return problem(f"none is up: {names}", "sinfo -R gives the reason; ask the admins")
    return ok(f"{sum(usable.values())} up" + (f", lost: {names}" if lost else ""))


def time_limit(machine: Machine) -> Finding:
    """Time limits of the partitions against the one in training.sh: a job that asks for more stays pending."""
    found = machine.rows(*_NODES)
    if not found:
        return ok("not known: see slurm")
    header = re.search(r"^#SBATCH --time=(\S+)", (home() / "training.sh").read_text(), re.MULTILINE)
    wanted = header[1] if header else "0"
    limits = {row["partition"]: row["time limit"] for row in found}
    short = {name: limit for name, limit in limits.items() if _seconds(limit) < _seconds(wanted)}
    if not short:
        return ok(f"{wanted} in training.sh, no partition ends earlier")
    what = ", ".join(f"{name} ends at {limit}" for name, limit in short.items())
    longest = max(short.values(), key=_seconds)
    fix = f"submit there with sbatch --time={longest} training.sh; a run that ends then is continued with --resume"
    return warning(f"{wanted} in training.sh, but {what}", fix)


def _seconds(limit: str) -> float:
    """Return a time limit in seconds, infinite where Slurm writes ``infinite``."""
    seconds = walltime_seconds(limit)
    return math.inf if seconds is None else seconds


def job(machine: Machine) -> Finding:
    """The Slurm job we are in: its nodes, and whether this is one of them."""
    found = slurm_job(machine.environment)
    if found is None:
        return ok("none: a login node, or a machine without Slurm")
    what = f"job {found.id} on {machine.environment.get('SLURM_JOB_NODELIST', '?')}"
    if "SLURMD_NODENAME" in machine.environment:
        return ok(what)
    fix = "salloc leaves its shell on the login node: go on with srun --pty bash"
    return warning(f"{what}, but this is {socket.gethostname()}, outside it", fix)
