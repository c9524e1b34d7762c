"""Checks of this machine: GPUs, Slurm, disks, limits, cores and memory.

They read /proc, resource limits, and the output of nvidia-smi and sinfo. They change nothing.
"""

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

from grpo_recipes.console.doctor.examine import Machine, NoAnswer, apply_first_rule, record_errors_as_findings
from grpo_recipes.errors import translate_errors
from grpo_recipes.paths import cache_root, display_path, find_code_root, nearest_existing_folder
from grpo_recipes.plan import preflight
from grpo_recipes.plan.devices import select_gpus
from grpo_recipes.process.reports import format_bytes
from grpo_recipes.process.scratch import SHARED_MEMORY, find_used_names, is_owner_alive, measure_folder
from grpo_recipes.runs.endings import PROBLEM, WARNING, Finding, combine_findings, ok, problem, warning
from grpo_recipes.slurm.client import parse_walltime

_GPU_FIELDS = ("index", "uuid", "name", "driver_version", "memory.total", "memory.used")
_NODE_FIELDS = ("partition", "time limit", "nodes", "gres", "state", "names")
_UNUSABLE = ("down", "drain", "fail", "maint", "inval", "unk")
_REQUEST_GPUS = "submit with sbatch --gres=gpu:8 training.sh; to check inside a job: srun --gres=gpu:1 grpo doctor"
_TRAIN_ON_THEM = "to train on them: DEVICE=cuda make setup"

_LITTLE_SPACE = 20e9  # a 1.5B checkpoint with its optimizer needs about 9 GB, a 7B checkpoint more than this
_FULL = 1e9
_LITTLE_SHARED = 2**30
_LITTLE_MEMORY = 4e9
_NEW_SECONDS = 60.0  # a younger folder may belong to a starting launch


def gpus(machine: Machine) -> Finding:
    """Visible and free GPUs, and whether the NVIDIA driver is new enough for torch.

    Run nvidia-smi. In a CUDA environment, an old driver and missing GPUs are problems; on a login node, missing GPUs
    are only a warning. GPUs in a CPU environment, GPU memory in use, and another number of GPUs than Slurm granted are
    warnings.
    """
    query = f"--query-gpu={','.join(_GPU_FIELDS)}"
    try:
        rows = machine.read_table(",", _GPU_FIELDS, "nvidia-smi", query, "--format=csv,noheader,nounits")
    except NoAnswer as error:
        return problem(str(error), "exclude this node and report it to the admins: its driver must be reloaded")
    if not rows and machine.device != "cuda":
        return ok("none, none needed (CPU environment)")
    if not rows:
        message = "nvidia-smi is missing or lists no GPU, but this is a CUDA environment"
        if shutil.which("sinfo") and not machine.in_job:
            return warning(f"{message}: normal on a login node", _REQUEST_GPUS)
        return problem(message, f"{_REQUEST_GPUS}; without Slurm, install the driver or run DEVICE=cpu make setup")
    chosen, granted = (machine.environment.get(name) for name in ("CUDA_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE"))
    ids, findings = tuple(gpu["index"] for gpu in rows), list[Finding]()
    if chosen is not None:  # avoid the call if possible: it takes seconds without persistence mode
        with record_errors_as_findings(findings):
            ids = select_gpus(machine.run_program("nvidia-smi", "-L").stdout, chosen)
    names = sorted(
        {gpu["name"] + (f", {gib:.0f} GiB" if (gib := _read_gpu_memory(gpu, "total")) else "") for gpu in rows}
    )
    value = f"{len(ids)} visible of {len(rows)}" + ("" if chosen is None else f" (CUDA_VISIBLE_DEVICES={chosen})")
    value += f": {'; '.join(names)}"
    if machine.device == "cpu":
        findings.append(warning(f"{value}, but this is a CPU environment", _TRAIN_ON_THEM))
    else:
        findings.append(apply_first_rule(value, (not ids, PROBLEM, "unset CUDA_VISIBLE_DEVICES, or set it to GPUs")))
    if machine.device == "cuda":
        version = rows[0]["driver_version"]
        old = preflight.find_driver_problem(version, machine.environment)
        findings.append(problem(*old) if old else ok(f"driver {version}, torch for CUDA {preflight.read_torch_cuda()}"))
    if granted and granted.isdigit() and int(granted) != len(ids):
        fix = "the driver's count is used; check --gres and the site's gres.conf"
        findings.append(warning(f"{value}, but Slurm granted {granted}", fix))
    visible = [gpu for gpu in rows if any(id == gpu["index"] or gpu["uuid"].startswith(id) for id in ids)]
    for gpu in visible:
        if _read_gpu_memory(gpu, "used") > 1:
            memory = f"{_read_gpu_memory(gpu, 'used'):.1f} of {_read_gpu_memory(gpu, 'total'):.0f} GiB"
            used = f"GPU {gpu['index']}: {memory} are in use"
            fix = "wait for its processes (nvidia-smi lists them), or set CUDA_VISIBLE_DEVICES to other GPUs"
            findings.append(warning(used, fix))
    return combine_findings(findings)


def _read_gpu_memory(gpu: dict[str, str], kind: str) -> float:
    """Return the field ``memory.KIND`` (total or used) of a row of nvidia-smi in GiB; 0 if it is not a number."""
    return int(gpu[f"memory.{kind}"]) / 1024 if gpu[f"memory.{kind}"].isdigit() else 0.0


def slurm(machine: Machine) -> Finding:
    """Slurm's partitions, GPUs, nodes and the current job; time limits below the time of training.sh.

    Run sinfo. If no node is up, that is a problem. Warnings are: short time limits, a missing sbatch, no GPUs in a CUDA
    environment, GPUs in a CPU environment, and a shell outside of its job's node. Without Slurm, the finding is ok.
    """
    if machine.in_job and "SLURMD_NODENAME" not in machine.environment:
        message = f"job {machine.environment['SLURM_JOB_ID']}, but this is {socket.gethostname()}, outside of it"
        return warning(message, "run srun --pty bash: the shell of salloc is on the login node")
    if not shutil.which("sinfo"):
        return ok("no Slurm here")
    # One row per partition and state of its nodes.
    fix = "load the site's Slurm module, or ask the admins: sbatch will fail too"
    with translate_errors(NoAnswer, lambda error: NoAnswer(str(error), fix)):
        rows = machine.read_table("|", _NODE_FIELDS, "sinfo", "-h", "-o", "%R|%l|%D|%G|%T|%N")
    if not shutil.which("sbatch"):
        return warning("sinfo exists, but sbatch does not", "load the site's Slurm module, or work on the login node")
    partitions = sorted({row["partition"] for row in rows})
    gpu_types = sorted({part for row in rows for part in row["gres"].split(",") if part.startswith("gpu")})
    value = f"partitions {', '.join(partitions) or 'none'}; {', '.join(gpu_types) or 'no GPUs'}"
    no_gpus = machine.device == "cuda" and not gpu_types
    findings = [apply_first_rule(value, (no_gpus, WARNING, "ask the admins how to request GPUs: Slurm lists none"))]
    if machine.device == "cpu" and gpu_types:
        findings = [warning(f"{value}, but this is a CPU environment", _TRAIN_ON_THEM)]
    usable_rows = [row for row in rows if re.search(r"(^|,)gpu\b", row["gres"])] or rows
    lost = [row for row in usable_rows if any(word in row["state"].lower() for word in _UNUSABLE)]
    # Nodes of two partitions are in two rows with the same names.
    names = {row["names"]: f"{row['names']} {row['state']}" for row in lost}
    usable = {row["names"]: int(row["nodes"]) for row in usable_rows if row not in lost}
    number = sum(usable.values())
    up = f"{number} node{'s' * (number != 1)} up" + (f", lost: {', '.join(names.values())}" if lost else "")
    findings.append(apply_first_rule(up, (lost and not usable, PROBLEM, "sinfo -R gives the reason; ask the admins")))
    header = re.search(r"^#SBATCH --time=(\S+)", (find_code_root() / "training.sh").read_text(), re.MULTILINE)
    longest = (parse_walltime(header[1]) if header else None) or 0.0
    for name, limit in {row["partition"]: row["time limit"] for row in (usable_rows if gpu_types else rows)}.items():
        if (parse_walltime(limit) or math.inf) < longest:  # a job that requests more stays pending
            fix = f"submit there with sbatch --time={limit} training.sh, and continue the run with --resume"
            findings.append(warning(f"partition {name} has the limit {limit}, less than the time in training.sh", fix))
    finding = combine_findings(findings)  # show the nodes next to warnings too
    return finding if up in finding.value else replace(finding, value=f"{finding.value}; {up}")


def disk(machine: Machine) -> Finding:
    """Free space for runs, downloads and temporary files (at least 20 GB), and in the home folder.

    Return a warning below 20 GB, and a problem below 1 GB or for a folder that is not writable. In the home folder, the
    limit is 1 GB, and all findings are warnings.
    """
    folders = {"run_root": machine.run_root, "CACHE_ROOT": cache_root(machine.environment), "TMPDIR": machine.temporary}
    hub = {name: machine.environment.get(name) for name in ("HF_HOME", "HF_HUB_CACHE")}
    findings: list[Finding] = []
    for name, path in {**folders, **hub}.items():
        with record_errors_as_findings(findings):
            findings += [_check_space(name, Path(path))] if path else []
    tmpdir = machine.environment.get("TMPDIR")
    if tmpdir and not os.access(tmpdir, os.W_OK):
        message = f"TMPDIR={tmpdir} is not writable, so {machine.temporary} is used"
        findings.append(warning(message, "set TMPDIR to an existing folder"))
    if not machine.home.is_dir() or not os.access(machine.home, os.W_OK):
        fix = "set HOME to your own folder: some tools always write there"
        return combine_findings([*findings, warning(f"HOME {machine.home} is not writable", fix)])
    with record_errors_as_findings(findings):
        free, fix = (
            shutil.disk_usage(machine.home).free,
            "free space; ~/.cache is often the largest (du -sh ~/.cache/*)",
        )
        findings.append(
            apply_first_rule(f"HOME {machine.home}: {format_bytes(free)} free", (free < _FULL, WARNING, fix))
        )
    return combine_findings(findings)


def _check_space(name: str, path: Path) -> Finding:
    """Check the free space of a folder, or of its nearest parent that exists; return a finding.

    It is a problem if the folder is not writable or has less than 1 GB free, a warning below 20 GB, otherwise ok.
    ``name`` is the variable or key that sets the folder, for the message.
    """
    folder = nearest_existing_folder(path)
    if not os.access(folder, os.W_OK):
        return problem(f"{name}: {display_path(folder)} is not writable", f"set {name} to a writable folder")
    free = shutil.disk_usage(folder).free
    value = f"{name} {display_path(path)}: {format_bytes(free)} free"
    larger = f"free space there, or set {name} to a larger file system"
    return apply_first_rule(value, (free < _FULL, PROBLEM, larger), (free < _LITTLE_SPACE, WARNING, larger))


def shared_memory(machine: Machine) -> Finding:
    """Size and free space of /dev/shm, through which weights are sent to the server (at least 1 GiB).

    Return a warning if its size or free space is below 1 GiB, or if it is not writable.
    """
    if not os.access(SHARED_MEMORY, os.W_OK):
        return warning(
            f"{SHARED_MEMORY} is not writable",
            "make it writable; otherwise weights are sent through TMPDIR, which is slower",
        )
    size, _, free = shutil.disk_usage(SHARED_MEMORY)
    larger = "start the container with docker run --shm-size=16g, or apptainer --bind /dev/shm"
    empty = "remove leftovers (see the check leftovers), or stop processes that use it"
    value = f"{format_bytes(free)} free of {format_bytes(size)}"
    return apply_first_rule(value, (size < _LITTLE_SHARED, WARNING, larger), (free < _LITTLE_SHARED, WARNING, empty))


def leftovers(machine: Machine) -> Finding:
    """Folders of dead runs in /dev/shm and TMPDIR.

    Look for the user's folders ``grpo-*`` that no running process uses. If there are any, return a warning with the
    command that removes them; nothing is removed here.
    """
    paths = [path for root in {SHARED_MEMORY, machine.temporary} for path in sorted(root.glob("grpo-*"))]
    folders = []
    for path in filter(Path.is_dir, paths):
        with suppress(OSError):  # removed in the meantime
            state = path.lstat()
            if state.st_uid == os.getuid() and time.time() - state.st_mtime > _NEW_SECONDS:
                folders.append(path)
    alive = find_used_names(path.name for path in folders)
    dead = [path for path in folders if path.name not in alive and not is_owner_alive(path)]
    value = f"{len(dead)} of dead runs, {format_bytes(sum(measure_folder(path) for path in dead))}" if dead else "none"
    return apply_first_rule(value, (dead, WARNING, f"remove them: rm -r {shlex.join(map(str, dead))}"))


# Letter of `ulimit`, name, resource, minimum of a run, status below it, fix if the hard limit is too low.
_ADMINS = "ask the admins for more (the limits of slurmd or of the container)"
_JOBS = "set it to unlimited before sbatch; such limits are common on login nodes and rare in jobs"
_ULIMITS = (
    (
        "n",
        "open files",
        resource.RLIMIT_NOFILE,
        4096,
        WARNING,
        _ADMINS,
    ),  # torch and vLLM open one per shared tensor or request
    ("u", "processes", resource.RLIMIT_NPROC, 4096, WARNING, _ADMINS),
    ("v", "address space", resource.RLIMIT_AS, math.inf, PROBLEM, _JOBS),
    ("f", "file size", resource.RLIMIT_FSIZE, math.inf, PROBLEM, _JOBS),
    ("t", "CPU seconds", resource.RLIMIT_CPU, math.inf, PROBLEM, _JOBS),
)


def limits(machine: Machine) -> Finding:
    """Limits of open files, processes, memory, file size, CPU time and core files (ulimit).

    Limits below 4,096 open files or processes, and enabled core files, are warnings. Any limit of memory, file size or
    CPU time is a problem.
    """
    findings = []
    for letter, name, number, minimum, status, hard_fix in _ULIMITS:
        soft, hard = (math.inf if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(number))
        fix = f"run ulimit -{letter} {hard} before sbatch, which passes on your soft limits".replace("inf", "unlimited")
        value = f"{name} (ulimit -{letter}) {soft}".replace("inf", "unlimited")
        findings.append(apply_first_rule(value, (soft < minimum, status, hard_fix if hard < minimum else fix)))
    pattern = Path("/proc/sys/kernel/core_pattern")
    if resource.getrlimit(resource.RLIMIT_CORE)[0] != 0 and not pattern.read_text().startswith("|"):
        message = "a crash writes a core file as large as the process"
        findings.append(warning(message, "run ulimit -c 0 before sbatch, unless you need core files"))
    return combine_findings(findings)


def socket_paths(machine: Machine) -> Finding:
    """Length of socket paths in TMPDIR; the limit of unix sockets is 107 bytes.

    Return a problem if the path of a run's socket would be longer.
    """
    length = preflight.socket_length(machine.temporary)
    value = f"{length} of {preflight.SOCKET_BYTES} bytes in {machine.temporary}"
    return apply_first_rule(
        value, (length > preflight.SOCKET_BYTES, PROBLEM, "set TMPDIR to a short path on the node, e.g. /tmp")
    )


def compiler(machine: Machine) -> Finding:
    """C compiler and Python.h, which Triton needs to build kernels on GPUs.

    Return a problem for each that is missing. In a CPU environment, the finding is always ok.
    """
    if machine.device != "cuda":
        return ok("none needed (CPU environment)")
    problems = [problem(fault.what, fault.fix) for fault in preflight.compiler_problems(machine.environment)]
    return combine_findings(problems or [ok("found, with Python.h")])


def cores_and_memory(machine: Machine) -> Finding:
    """CPU cores and memory that this process may use, and whether they suffice for the visible GPUs.

    Affinity and cgroup can limit them. Return a warning for fewer than 2 cores, for less than 4 GB of free memory, and
    for too few cores or too little memory per visible GPU.
    """
    usable, free, (limit, _) = (
        min(len(os.sched_getaffinity(0)), preflight.cgroup_cores()),
        preflight.measure_free_memory(),
        preflight.cgroup_memory(),
    )
    total = f"{format_bytes(free)} of memory free of {format_bytes(psutil.virtual_memory().total)}"
    total += f", limited to {format_bytes(limit)} here" if limit < math.inf else ""
    share = "request more (sbatch --cpus-per-task=8): server and trainer share one core"
    more_memory = "request more (sbatch --mem=64G), or stop processes that use it"
    cores = apply_first_rule(f"{usable:g} of {os.cpu_count() or 1} cores", (usable < 2, WARNING, share))
    findings = [cores, apply_first_rule(total, (free < _LITTLE_MEMORY, WARNING, more_memory))]
    if machine.device == "cuda":
        with record_errors_as_findings(findings):
            listing = machine.run_program("nvidia-smi", "-L").stdout
            gpu_count = len(select_gpus(listing, machine.environment.get("CUDA_VISIBLE_DEVICES")))
            short = preflight.find_shortages(gpu_count, usable, min(limit, free))
            findings += [warning(message, f"submit with sbatch {option}") for message, option in short]
    return combine_findings(findings)
