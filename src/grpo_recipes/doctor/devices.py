"""Checks of driver and GPUs, all from ``nvidia-smi``."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from grpo_recipes.doctor.machine import Machine, NoAnswer
from grpo_recipes.plan.devices import select_gpus
from grpo_recipes.runs.finding import Finding, ok, problem, warning

# Oldest driver branch for a CUDA major version (NVIDIA, CUDA minor version compatibility, table 1).
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
_FIELDS = (
    "index", "uuid", "name", "driver_version", "memory.total", "memory.used", "ecc.errors.uncorrected.volatile.total",
    "mig.mode.current", "compute_mode",
)  # fmt: skip
QUERY = ("nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
LISTING = ("nvidia-smi", "-L")
PROCESSES = ("nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader,nounits")
_BUSY_MIB = 1024
_ASK_FOR_GPUS = "submit with sbatch --gres=gpu:8 training.sh; look from inside a job: srun --gres=gpu:1 grpo doctor"


@dataclass(frozen=True)
class Gpu:
    """A row of nvidia-smi; what a GPU does not report is ``[N/A]``."""

    index: str
    uuid: str
    name: str
    driver: str
    total_mib: str
    used_mib: str
    ecc_errors: str
    mig: str
    compute_mode: str


def gpus_of(machine: Machine) -> list[Gpu]:
    """The GPUs of this machine, none without a driver.

    Raises:
        NoAnswer: nvidia-smi hangs, or fails.
    """
    answer = machine.ask(*QUERY)
    if answer is None:
        return []
    if answer.code != 0:
        raise NoAnswer(f"nvidia-smi fails: {answer.complaint}")
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.out.splitlines()]
    return [Gpu(*row) for row in rows if len(row) == len(_FIELDS)]


def told(machine: Machine) -> list[Gpu]:
    """The GPUs of this machine, none where nvidia-smi does not answer: the check ``driver`` says so."""
    try:
        return gpus_of(machine)
    except NoAnswer:
        return []


def visible_ids(machine: Machine) -> tuple[str, ...]:
    """What CUDA_VISIBLE_DEVICES leaves of them: indices, UUIDs or ids of MIG slices.

    Raises:
        ConfigError: it names what the driver does not list.
    """
    listing = machine.ask(*LISTING)
    return select_gpus(listing.out if listing else "", machine.environment.get("CUDA_VISIBLE_DEVICES"))


def visible(machine: Machine) -> list[Gpu]:
    """The whole GPUs among them; a MIG slice has no row of its own."""
    ids = visible_ids(machine)
    return [gpu for gpu in told(machine) if any(id == gpu.index or gpu.uuid.startswith(id) for id in ids)]


def driver(machine: Machine) -> Finding:
    """Whether the NVIDIA driver answers, and is new enough for the CUDA build of torch."""
    try:
        gpus = gpus_of(machine)
    except NoAnswer as error:
        return problem(str(error), "leave this node out and tell the admins: its driver must be loaded again")
    if not gpus:
        return _without_driver(machine)
    version, cuda = gpus[0].driver, torch_cuda()
    if machine.flavour != "cuda" or cuda is None:
        return ok(f"{version}; torch is a CPU build")
    oldest = OLDEST_DRIVER.get(int(cuda.split(".")[0]), max(OLDEST_DRIVER.values()))
    if int(version.split(".")[0]) < oldest:
        what = f"{version} is too old for the CUDA {cuda} of torch"
        return problem(what, f"ask for a driver of branch {oldest} or newer, or load the site's cuda-compat module")
    return ok(f"{version}, torch for CUDA {cuda}")


def _without_driver(machine: Machine) -> Finding:
    if machine.flavour != "cuda":
        return ok("none, none needed (CPU environment)")
    what = "nvidia-smi is not there or lists no GPU, and this is a CUDA environment"
    if machine.ask("sinfo", "--version") is not None and not machine.in_job:
        return warning(f"{what}: usual on a login node", _ASK_FOR_GPUS)
    return problem(what, f"{_ASK_FOR_GPUS}; without Slurm install the driver, or DEVICE=cpu make setup")


def torch_cuda() -> str | None:
    """The CUDA version torch was built for, read from its files; None for a CPU build or without torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    return cuda_in((Path(spec.origin).parent / "version.py").read_text())


def cuda_in(text: str) -> str | None:
    """The CUDA version that a ``torch/version.py`` names."""
    found = re.search(r"^cuda\b[^=\n]*= *'([\d.]+)'", text, re.MULTILINE)
    return found and found[1]


def gpus(machine: Machine) -> Finding:
    """GPUs the driver lists, those CUDA_VISIBLE_DEVICES leaves, and what the flavour makes of them."""
    everything, ids = told(machine), visible_ids(machine)
    what = _counted(machine, everything, ids)
    if machine.flavour == "cpu":
        if everything:
            return warning(f"{what}, but this is a CPU environment", "to train on them: DEVICE=cuda make setup")
        return ok("none (CPU environment)")
    if everything and not ids:
        return problem(f"{what}: CUDA_VISIBLE_DEVICES is empty", "unset CUDA_VISIBLE_DEVICES, or name GPUs in it")
    if not ids and machine.in_job:
        return problem(f"{what} in job {machine.environment['SLURM_JOB_ID']}", _ASK_FOR_GPUS)
    granted = machine.environment.get("SLURM_GPUS_ON_NODE", "")
    if granted.isdigit() and int(granted) != len(ids):
        fix = "the driver's count is used; check --gres and the site's gres.conf"
        return warning(f"{what}, Slurm granted {granted}", fix)
    return ok(what)


def _counted(machine: Machine, everything: list[Gpu], ids: tuple[str, ...]) -> str:
    chosen = machine.environment.get("CUDA_VISIBLE_DEVICES")
    what = f"{len(ids)} visible of {len(everything)}" + (f" (CUDA_VISIBLE_DEVICES={chosen})" if chosen else "")
    if not everything:
        return what
    sizes = {f"{gpu.name}, {int(gpu.total_mib) / 1024:.0f} GiB" for gpu in everything if gpu.total_mib.isdigit()}
    return f"{what}: {'; '.join(sorted(sizes))}"


def gpu_memory(machine: Machine) -> Finding:
    """Memory of the visible GPUs that other processes hold."""
    busy = [gpu for gpu in visible(machine) if gpu.used_mib.isdigit() and int(gpu.used_mib) > _BUSY_MIB]
    if not busy:
        return ok("free" if told(machine) else "no GPU")
    answer = machine.ask(*PROCESSES)
    rows = [line.split(", ") for line in (answer.out.splitlines() if answer else [])]
    holders = {gpu.uuid: [row[1] for row in rows if row[0] == gpu.uuid] for gpu in busy}
    what = "; ".join(
        f"GPU {gpu.index}: {int(gpu.used_mib) / 1024:.1f} of {int(gpu.total_mib) / 1024:.0f} GiB held"
        + (f" by pid {', '.join(holders[gpu.uuid])}" if holders[gpu.uuid] else "")
        for gpu in busy
    )
    return warning(
        what, "wait for them, or name other GPUs in CUDA_VISIBLE_DEVICES (vLLM takes its share of all the memory)"
    )


def gpu_health(machine: Machine) -> Finding:
    """Uncorrected memory errors, MIG slices and exclusive mode of the GPUs."""
    found = told(machine)
    broken = [gpu.index for gpu in found if gpu.ecc_errors.isdigit() and int(gpu.ecc_errors) > 0]
    if broken:
        return problem(
            f"uncorrected memory errors on GPU {', '.join(broken)}",
            "leave it out (CUDA_VISIBLE_DEVICES) and tell the admins",
        )
    sliced = [gpu.index for gpu in found if gpu.mig == "Enabled"]
    if sliced:
        what = f"GPU {', '.join(sliced)} is cut into MIG slices, which have no direct way to each other"
        return warning(what, "ask for whole GPUs, or train on one slice with vllm_mode: colocate")
    exclusive = [gpu.index for gpu in found if gpu.compute_mode == "Exclusive_Process"]
    if exclusive:
        what = f"GPU {', '.join(exclusive)} takes one process at a time"
        return warning(
            what, "keep server and trainers on GPUs of their own (vllm_mode: server), or ask for mode Default"
        )
    return ok("no errors reported" if found else "no GPU")
