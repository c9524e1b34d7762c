"""Checks of the GPUs: those of this machine, from ``nvidia-smi``, and those that Slurm grants, from ``sinfo``."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from grpo_recipes.doctor.machine import Machine, NoAnswer, judge
from grpo_recipes.paths import home
from grpo_recipes.plan.devices import select_gpus
from grpo_recipes.runs.finding import WARNING, Finding, ok, problem, warning
from grpo_recipes.slurm.client import slurm_job, walltime_seconds

# Oldest driver branch for a CUDA major version (NVIDIA, CUDA minor version compatibility, table 1).
_OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
_FIELDS = (
    "index", "uuid", "name", "driver_version", "memory.total", "memory.used", "ecc.errors.uncorrected.volatile.total",
    "mig.mode.current", "compute_mode",
)  # fmt: skip
_QUERY = ("nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
_PROCESSES = ("nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader,nounits")
_BUSY_MIB = 1024
_ASK_FOR_GPUS = "submit with sbatch --gres=gpu:8 training.sh; look from inside a job: srun --gres=gpu:1 grpo doctor"
_TRAIN_ON_THEM = "to train on them: DEVICE=cuda make setup"
# partition, its time limit, nodes, generic resources, state of the nodes, their names
_SINFO = ("sinfo", "-h", "-o", "%R|%l|%D|%G|%T|%N")
_UNUSABLE = ("down", "drain", "fail", "maint", "inval", "unk")


@dataclass(frozen=True)
class Gpu:
    """A row of nvidia-smi; a number that a GPU does not report (``[N/A]``) is 0."""

    index: str
    uuid: str
    name: str
    driver: str
    total_mib: int
    used_mib: int
    ecc_errors: int
    mig: str
    compute_mode: str


def gpus_of(machine: Machine) -> list[Gpu]:
    """Return the GPUs of this machine, none without a driver.

    Raises:
        NoAnswer: nvidia-smi hangs, or fails.
    """
    rows = machine.table(_QUERY, ",", len(_FIELDS)) or []
    return [
        Gpu(index, uuid, name, version, _number(total), _number(used), _number(errors), mig, mode)
        for index, uuid, name, version, total, used, errors, mig, mode in rows
    ]


def _number(cell: str) -> int:
    return int(cell) if cell.isdigit() else 0


def _known_gpus(machine: Machine) -> list[Gpu]:
    """Return the GPUs of this machine, none where nvidia-smi fails: the check ``driver`` says why."""
    with contextlib.suppress(NoAnswer):
        return gpus_of(machine)
    return []


def _visible_ids(machine: Machine) -> tuple[str, ...]:
    """Return what CUDA_VISIBLE_DEVICES leaves of them, as ``select_gpus`` does: indices, UUIDs or MIG slices."""
    listing = machine.ask("nvidia-smi", "-L")
    return select_gpus(listing.out if listing else "", machine.environment.get("CUDA_VISIBLE_DEVICES"))


def visible(machine: Machine) -> list[Gpu]:
    """Return the whole GPUs among the visible ones; a MIG slice has no row of its own."""
    ids = _visible_ids(machine)
    return [gpu for gpu in _known_gpus(machine) if any(id == gpu.index or gpu.uuid.startswith(id) for id in ids)]


def driver(machine: Machine) -> Finding:
    """Whether the NVIDIA driver answers, and is new enough for the CUDA build of torch."""
    try:
        found = gpus_of(machine)
    except NoAnswer as error:
        return problem(str(error), "leave this node out and tell the admins: its driver must be loaded again")
    if not found and machine.device != "cuda":
        return ok("none, none needed (CPU environment)")
    if not found:
        what = "nvidia-smi is not there or lists no GPU, and this is a CUDA environment"
        if machine.ask("sinfo", "--version") is not None and not machine.in_job:
            return warning(f"{what}: usual on a login node", _ASK_FOR_GPUS)
        return problem(what, f"{_ASK_FOR_GPUS}; without Slurm install the driver, or DEVICE=cpu make setup")
    version, cuda = found[0].driver, torch_cuda()
    if machine.device != "cuda" or cuda is None:
        return ok(f"{version}; torch is a CPU build")
    oldest = _OLDEST_DRIVER.get(int(cuda.split(".")[0]), max(_OLDEST_DRIVER.values()))
    if int(version.split(".")[0]) < oldest:
        what = f"{version} is too old for the CUDA {cuda} of torch"
        return problem(what, f"ask for a driver of branch {oldest} or newer, or load the site's cuda-compat module")
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
    everything, ids = _known_gpus(machine), _visible_ids(machine)
    chosen, granted = (machine.environment.get(name) for name in ("CUDA_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE"))
    sizes = {f"{gpu.name}, {gpu.total_mib / 1024:.0f} GiB" for gpu in everything if gpu.total_mib}
    what = f"{len(ids)} visible of {len(everything)}" + (f" (CUDA_VISIBLE_DEVICES={chosen})" if chosen else "")
    what += f": {'; '.join(sorted(sizes))}" if everything else ""
    if machine.device == "cpu":
        everywhere = f"{what}, but this is a CPU environment"
        return warning(everywhere, _TRAIN_ON_THEM) if everything else ok("none (CPU environment)")
    if everything and not ids:
        return problem(f"{what}: CUDA_VISIBLE_DEVICES is empty", "unset CUDA_VISIBLE_DEVICES, or name GPUs in it")
    if not ids and machine.in_job:
        return problem(f"{what} in job {machine.environment['SLURM_JOB_ID']}", _ASK_FOR_GPUS)
    if granted and granted.isdigit() and int(granted) != len(ids):
        fix = "the driver's count is used; check --gres and the site's gres.conf"
        return warning(f"{what}, Slurm granted {granted}", fix)
    return ok(what)


def gpu_memory(machine: Machine) -> Finding:
    """Memory of the visible GPUs that other processes hold."""
    busy = [gpu for gpu in visible(machine) if gpu.used_mib > _BUSY_MIB]
    if not busy:
        return ok("free" if _known_gpus(machine) else "no GPU")
    pids: dict[str, list[str]] = {}
    for uuid, pid, _ in machine.table(_PROCESSES, ",", 3) or []:
        pids.setdefault(uuid, []).append(pid)
    what = "; ".join(
        f"GPU {gpu.index}: {gpu.used_mib / 1024:.1f} of {gpu.total_mib / 1024:.0f} GiB held"
        + (f" by pid {', '.join(pids[gpu.uuid])}" if gpu.uuid in pids else "")
        for gpu in busy
    )
    fix = "wait for them, or name other GPUs in CUDA_VISIBLE_DEVICES (vLLM takes its share of all the memory)"
    return warning(what, fix)


def gpu_health(machine: Machine) -> Finding:
    """Uncorrected memory errors, MIG slices and exclusive mode of the GPUs."""
    found = _known_gpus(machine)
    if broken := [gpu.index for gpu in found if gpu.ecc_errors > 0]:
        what = f"uncorrected memory errors on GPU {', '.join(broken)}"
        return problem(what, "leave it out (CUDA_VISIBLE_DEVICES) and tell the admins")
    if sliced := [gpu.index for gpu in found if gpu.mig == "Enabled"]:
        what = f"GPU {', '.join(sliced)} is cut into MIG slices, which have no direct way to each other"
        return warning(what, "ask for whole GPUs, or train on one slice with vllm_mode: colocate")
    if exclusive := [gpu.index for gpu in found if gpu.compute_mode == "Exclusive_Process"]:
        fix = "keep server and trainers on GPUs of their own (vllm_mode: server), or ask for mode Default"
        return warning(f"GPU {', '.join(exclusive)} takes one process at a time", fix)
    return ok("no errors reported" if found else "no GPU")


@dataclass(frozen=True)
class Nodes:
    """A line of sinfo: nodes of one partition in one state."""

    partition: str
    time_limit: str
    count: str
    gres: str
    state: str
    names: str

    @property
    def usable(self) -> bool:
        """Return whether a job could start on them now or later."""
        return not any(word in self.state.lower() for word in _UNUSABLE)


def _known_nodes(machine: Machine) -> list[Nodes]:
    """Return what sinfo shows, nothing where it fails: the check ``slurm`` says why."""
    with contextlib.suppress(NoAnswer):
        return [Nodes(*row) for row in machine.table(_SINFO, "|", 6) or []]
    return []


def slurm(machine: Machine) -> Finding:
    """Whether sbatch and sinfo are there, and the partitions and GPUs that Slurm shows."""
    try:
        rows = machine.table(_SINFO, "|", 6)
    except NoAnswer as error:
        return warning(str(error), "load the site's Slurm module, or ask the admins: sbatch will not work either")
    if rows is None:
        return ok("no Slurm here")
    if machine.ask("sbatch", "--version") is None:
        return warning("sinfo is there, sbatch is not", "load the site's Slurm module, or work on the login node")
    partitions = sorted({row[0] for row in rows})
    granted = sorted({part for row in rows for part in row[3].split(",") if part.startswith("gpu")})
    what = f"partitions {', '.join(partitions) or 'none'}; {', '.join(granted) or 'no GPUs'}"
    if machine.device == "cpu" and granted:
        return warning(f"{what}, but this is a CPU environment", _TRAIN_ON_THEM)
    ungranted = machine.device == "cuda" and not granted
    return judge(what, (ungranted, WARNING, "Slurm grants no GPUs here: ask the admins how they are asked for"))


def nodes(machine: Machine) -> Finding:
    """Nodes that are down or drained; a problem where no node with GPUs is left."""
    found = _known_nodes(machine)
    if not found:
        return ok("not known: see slurm")
    wanted = [row for row in found if re.search(r"(^|,)gpu\b", row.gres)] or found
    # a node of two partitions is in two lines, under one name
    lost = ", ".join({row.names: f"{row.names} {row.state}" for row in wanted if not row.usable}.values())
    usable = {row.names: int(row.count) for row in wanted if row.usable}
    if not usable:
        return problem(f"none is up: {lost}", "sinfo -R says why; ask the admins")
    return ok(f"{sum(usable.values())} up" + (f", lost: {lost}" if lost else ""))


def time_limit(machine: Machine) -> Finding:
    """Time limits of the partitions against the one in training.sh: a job that asks for more stays pending."""
    found = _known_nodes(machine)
    if not found:
        return ok("not known: see slurm")
    header = re.search(r"^#SBATCH --time=(\S+)", (home() / "training.sh").read_text(), re.MULTILINE)
    wanted = header[1] if header else "0"
    short = {row.partition: row.time_limit for row in found if _seconds(row.time_limit) < _seconds(wanted)}
    if not short:
        return ok(f"{wanted} in training.sh, no partition ends earlier")
    what = ", ".join(f"{name} ends at {limit}" for name, limit in short.items())
    longest = max(short.values(), key=_seconds)
    fix = f"submit there with sbatch --time={longest} training.sh; a run that ends then is continued with --resume"
    return warning(f"{wanted} in training.sh, but {what}", fix)


def _seconds(limit: str) -> float:
    """Return a time limit in seconds, without end where Slurm says ``infinite``."""
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
