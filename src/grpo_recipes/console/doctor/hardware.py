"""Checks of what this machine offers: GPUs, what Slurm grants, disks, limits, cores and memory."""

import math
import os
import re
import resource
import shlex
import shutil
import socket
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from grpo_recipes.console.doctor.examine import Machine, NoAnswer, judge, noted
from grpo_recipes.errors import translate
from grpo_recipes.paths import cache_root, display_path, home, nearest_existing_folder
from grpo_recipes.plan import preflight
from grpo_recipes.plan.devices import select_gpus
from grpo_recipes.process.reports import gigabytes
from grpo_recipes.process.scratch import SHARED_MEMORY, is_held, names_in_use, size_of
from grpo_recipes.runs.endings import PROBLEM, WARNING, Finding, combine_findings, ok, problem, warning
from grpo_recipes.slurm.client import walltime_seconds

_GPU_FIELDS = ("index", "uuid", "name", "driver_version", "memory.total", "memory.used")
_NODE_FIELDS = ("partition", "time limit", "nodes", "gres", "state", "names")
_UNUSABLE = ("down", "drain", "fail", "maint", "inval", "unk")
_ASK_FOR_GPUS = "submit with sbatch --gres=gpu:8 training.sh; look from inside a job: srun --gres=gpu:1 grpo doctor"
_TRAIN_ON_THEM = "to train on them: DEVICE=cuda make setup"

_LITTLE_SPACE = 20e9  # a 7B checkpoint is larger; a 1.5B one with its optimizer is about 9 GB
_FULL = 1e9
_LITTLE_SHARED = 2**30
_LITTLE_MEMORY = 4e9
_NEW_SECONDS = 60.0  # a folder this new may be that of a launch that begins


def gpus(machine: Machine) -> Finding:
    """The NVIDIA driver, whether it is new enough for torch, and the GPUs that are visible and free."""
    query = f"--query-gpu={','.join(_GPU_FIELDS)}"
    try:
        found = machine.table(",", _GPU_FIELDS, "nvidia-smi", query, "--format=csv,noheader,nounits")
    except NoAnswer as error:
        return problem(str(error), "leave this node out and report it to the admins: its driver must be loaded again")
    if not found and machine.device != "cuda":
        return ok("none, none needed (CPU environment)")
    if not found:
        what = "nvidia-smi is not there or lists no GPU, and this is a CUDA environment"
        if shutil.which("sinfo") and not machine.in_job:
            return warning(f"{what}: usual on a login node", _ASK_FOR_GPUS)
        return problem(what, f"{_ASK_FOR_GPUS}; without Slurm install the driver, or DEVICE=cpu make setup")
    chosen, granted = (machine.environment.get(name) for name in ("CUDA_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE"))
    ids, findings = tuple(gpu["index"] for gpu in found), list[Finding]()
    if chosen is not None:  # without the driver's persistence mode each call takes seconds
        with noted(findings):
            ids = select_gpus(machine.ask("nvidia-smi", "-L").stdout, chosen)
    names = sorted({gpu["name"] + (f", {gib:.0f} GiB" if (gib := _gib(gpu, "total")) else "") for gpu in found})
    what = f"{len(ids)} visible of {len(found)}" + ("" if chosen is None else f" (CUDA_VISIBLE_DEVICES={chosen})")
    what += f": {'; '.join(names)}"
    if machine.device == "cpu":
        findings.append(warning(f"{what}, but this is a CPU environment", _TRAIN_ON_THEM))
    else:
        findings.append(judge(what, (not ids, PROBLEM, "unset CUDA_VISIBLE_DEVICES, or name GPUs in it")))
    if machine.device == "cuda":
        version = found[0]["driver_version"]
        old = preflight.old_driver(version, machine.environment)
        findings.append(problem(*old) if old else ok(f"driver {version}, torch for CUDA {preflight.torch_cuda()}"))
    if granted and granted.isdigit() and int(granted) != len(ids):
        fix = "the driver's count is used; check --gres and the site's gres.conf"
        findings.append(warning(f"{what}, Slurm granted {granted}", fix))
    visible = [gpu for gpu in found if any(id == gpu["index"] or gpu["uuid"].startswith(id) for id in ids)]
    for gpu in visible:
        if _gib(gpu, "used") > 1:
            used = f"GPU {gpu['index']}: {_gib(gpu, 'used'):.1f} of {_gib(gpu, 'total'):.0f} GiB are in use"
            fix = "wait for its processes (nvidia-smi lists them), or set CUDA_VISIBLE_DEVICES to other GPUs"
            findings.append(warning(used, fix))
    return combine_findings(findings)


def _gib(gpu: dict[str, str], kind: str) -> float:
    """Return GiB of a GPU's memory, 0 where it does not report them (``[N/A]``)."""
    return int(gpu[f"memory.{kind}"]) / 1024 if gpu[f"memory.{kind}"].isdigit() else 0.0


def slurm(machine: Machine) -> Finding:
    """What Slurm offers: partitions, GPUs, nodes, and time limits below that of training.sh; and the job we are in."""
    if machine.in_job and "SLURMD_NODENAME" not in machine.environment:
        what = f"job {machine.environment['SLURM_JOB_ID']}, but this is {socket.gethostname()}, outside it"
        return warning(what, "salloc leaves its shell on the login node: go on with srun --pty bash")
    if not shutil.which("sinfo"):
        return ok("no Slurm here")
    # a row for the nodes of one partition in one state
    dead = "load the site's Slurm module, or ask the admins: sbatch will not work either"
    with translate(NoAnswer, lambda error: NoAnswer(str(error), dead)):
        rows = machine.table("|", _NODE_FIELDS, "sinfo", "-h", "-o", "%R|%l|%D|%G|%T|%N")
    if not shutil.which("sbatch"):
        return warning("sinfo is there, sbatch is not", "load the site's Slurm module, or work on the login node")
    partitions = sorted({row["partition"] for row in rows})
    granted = sorted({part for row in rows for part in row["gres"].split(",") if part.startswith("gpu")})
    what = f"partitions {', '.join(partitions) or 'none'}; {', '.join(granted) or 'no GPUs'}"
    ungranted = machine.device == "cuda" and not granted
    findings = [judge(what, (ungranted, WARNING, "Slurm grants no GPUs here: ask the admins how to ask for them"))]
    if machine.device == "cpu" and granted:
        findings = [warning(f"{what}, but this is a CPU environment", _TRAIN_ON_THEM)]
    wanted = [row for row in rows if re.search(r"(^|,)gpu\b", row["gres"])] or rows
    lost = [row for row in wanted if any(word in row["state"].lower() for word in _UNUSABLE)]
    # a node of two partitions is in two lines, under one name
    names = {row["names"]: f"{row['names']} {row['state']}" for row in lost}
    usable = {row["names"]: int(row["nodes"]) for row in wanted if row not in lost}
    number = sum(usable.values())
    up = f"{number} node{'s' * (number != 1)} up" + (f", lost: {', '.join(names.values())}" if lost else "")
    findings.append(judge(up, (lost and not usable, PROBLEM, "sinfo -R gives the reason; ask the admins")))
    header = re.search(r"^#SBATCH --time=(\S+)", (home() / "training.sh").read_text(), re.MULTILINE)
    longest = (walltime_seconds(header[1]) if header else None) or 0.0
    for name, limit in {row["partition"]: row["time limit"] for row in (wanted if granted else rows)}.items():
        if (walltime_seconds(limit) or math.inf) < longest:  # a job that asks for more stays pending
            fix = f"submit there with sbatch --time={limit} training.sh; a run that ends then goes on with --resume"
            findings.append(warning(f"partition {name} ends at {limit}, before the time in training.sh", fix))
    found = combine_findings(findings)  # beside a warning, too, the nodes are shown
    return found if up in found.value else replace(found, value=f"{found.value}; {up}")


def disk(machine: Machine) -> Finding:
    """Free space where runs, downloads and temporary files go, 20 GB at least, and in the home folder."""
    places = {"run_root": machine.run_root, "CACHE_ROOT": cache_root(machine.environment), "TMPDIR": machine.temporary}
    hub = {name: machine.environment.get(name) for name in ("HF_HOME", "HF_HUB_CACHE")}
    findings: list[Finding] = []
    for name, path in {**places, **hub}.items():
        with noted(findings):
            findings += [_space(name, Path(path))] if path else []
    wanted = machine.environment.get("TMPDIR")
    if wanted and not os.access(wanted, os.W_OK):
        what = f"TMPDIR={wanted} cannot be written, {machine.temporary} is used"
        findings.append(warning(what, "set TMPDIR to a folder that exists"))
    if not machine.home.is_dir() or not os.access(machine.home, os.W_OK):
        fix = "set HOME to a folder of yours: some tools always write there"
        return combine_findings([*findings, warning(f"HOME {machine.home} cannot be written", fix)])
    with noted(findings):
        free, fix = shutil.disk_usage(machine.home).free, "make room; ~/.cache is often the largest (du -sh ~/.cache/*)"
        findings.append(judge(f"HOME {machine.home}: {gigabytes(free)} free", (free < _FULL, WARNING, fix)))
    return combine_findings(findings)


def _space(name: str, path: Path) -> Finding:
    folder = nearest_existing_folder(path)
    if not os.access(folder, os.W_OK):
        return problem(
            f"{name}: you may not write to {display_path(folder)}", f"set {name} to a folder you may write to"
        )
    free = shutil.disk_usage(folder).free
    what = f"{name} {display_path(path)}: {gigabytes(free)} free"
    larger = f"make room there, or set {name} to a larger file system"
    return judge(what, (free < _FULL, PROBLEM, larger), (free < _LITTLE_SPACE, WARNING, larger))


def shared_memory(machine: Machine) -> Finding:
    """Size and free space of /dev/shm, where weights pass to the server; 1 GiB at least."""
    if not os.access(SHARED_MEMORY, os.W_OK):
        return warning(f"{SHARED_MEMORY} cannot be written", "weights pass through TMPDIR instead, which is slower")
    size, _, free = shutil.disk_usage(SHARED_MEMORY)
    larger = "start the container with more: docker run --shm-size=16g, or apptainer --bind /dev/shm"
    empty = "remove what is left there (see leftovers), or end what uses it"
    what = f"{gigabytes(free)} free of {gigabytes(size)}"
    return judge(what, (size < _LITTLE_SHARED, WARNING, larger), (free < _LITTLE_SHARED, WARNING, empty))


def leftovers(machine: Machine) -> Finding:
    """Folders of runs that died without removing them, in /dev/shm and TMPDIR."""
    there = [path for root in {SHARED_MEMORY, machine.temporary} for path in sorted(root.glob("grpo-*"))]
    ours = []
    for path in filter(Path.is_dir, there):
        with suppress(OSError):  # removed meanwhile
            state = path.lstat()
            if state.st_uid == os.getuid() and time.time() - state.st_mtime > _NEW_SECONDS:
                ours.append(path)
    alive = names_in_use(path.name for path in ours)
    dead = [path for path in ours if path.name not in alive and not is_held(path)]
    what = f"{len(dead)} of dead runs, {gigabytes(sum(size_of(path) for path in dead))}" if dead else "none"
    return judge(what, (dead, WARNING, f"remove them: rm -r {shlex.join(map(str, dead))}"))


# The letter of `ulimit`, what it limits, the least a run needs, the status below it, the fix where the hard one is low.
_ADMINS = "ask the admins for more (the limits of slurmd or of the container)"
_JOBS = "set it to unlimited before sbatch; login nodes have such limits, jobs seldom"
_ULIMITS = (
    ("n", "open files", resource.RLIMIT_NOFILE, 4096, WARNING, _ADMINS),  # torch, vLLM: one a shared tensor or request
    ("u", "processes", resource.RLIMIT_NPROC, 4096, WARNING, _ADMINS),
    ("v", "address space", resource.RLIMIT_AS, math.inf, PROBLEM, _JOBS),
    ("f", "file size", resource.RLIMIT_FSIZE, math.inf, PROBLEM, _JOBS),
    ("t", "CPU seconds", resource.RLIMIT_CPU, math.inf, PROBLEM, _JOBS),
)


def limits(machine: Machine) -> Finding:
    """Limits of open files, processes, memory, file size and CPU time (ulimit); whether a crash writes a core file."""
    findings = []
    for letter, name, which, least, status, beyond in _ULIMITS:
        soft, hard = (math.inf if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(which))
        fix = f"ulimit -{letter} {hard} before sbatch, which hands your soft limits on".replace("inf", "unlimited")
        what = f"{name} (ulimit -{letter}) {soft}".replace("inf", "unlimited")
        findings.append(judge(what, (soft < least, status, beyond if hard < least else fix)))
    pattern = Path("/proc/sys/kernel/core_pattern")
    if resource.getrlimit(resource.RLIMIT_CORE)[0] != 0 and not pattern.read_text().startswith("|"):
        what = "a crash writes a core file, as large as the process was"
        findings.append(warning(what, "ulimit -c 0 before sbatch, unless you want them"))
    return combine_findings(findings)


def socket_paths(machine: Machine) -> Finding:
    """Length of socket names below TMPDIR; a unix socket's path ends at 107 bytes."""
    length = preflight.socket_length(machine.temporary)
    what = f"{length} of {preflight.SOCKET_BYTES} bytes below {machine.temporary}"
    return judge(what, (length > preflight.SOCKET_BYTES, PROBLEM, "set TMPDIR to a short path on the node, e.g. /tmp"))


def compiler(machine: Machine) -> Finding:
    """C compiler and Python.h, with which Triton builds its kernels on GPUs."""
    if machine.device != "cuda":
        return ok("none needed (CPU environment)")
    lacking = [problem(found.what, found.fix) for found in preflight.compiler_problems(machine.environment)]
    return combine_findings(lacking or [ok("there, with Python.h")])


def cores_and_memory(machine: Machine) -> Finding:
    """CPU cores and memory that this process may use, by the machine, its affinity and its cgroup, and per GPU."""
    usable, free, (limit, _) = (
        min(len(os.sched_getaffinity(0)), preflight.cgroup_cores()),
        preflight.free_memory(),
        preflight.cgroup_memory(),
    )
    total = f"{gigabytes(free)} of memory free of {gigabytes(psutil.virtual_memory().total)}"
    total += f", limited to {gigabytes(limit)} here" if limit < math.inf else ""
    share = "ask for more (sbatch --cpus-per-task=8): server and trainer share one core"
    more = "ask for more (sbatch --mem=64G), or end what uses it"
    cores = judge(f"{usable:g} of {os.cpu_count() or 1} cores", (usable < 2, WARNING, share))
    findings = [cores, judge(total, (free < _LITTLE_MEMORY, WARNING, more))]
    if machine.device == "cuda":
        with noted(findings):
            listing = machine.ask("nvidia-smi", "-L").stdout
            many = len(select_gpus(listing, machine.environment.get("CUDA_VISIBLE_DEVICES")))
            short = preflight.find_shortages(many, usable, min(limit, free))
            findings += [warning(what, f"submit with sbatch {option}") for what, option in short]
    return combine_findings(findings)
