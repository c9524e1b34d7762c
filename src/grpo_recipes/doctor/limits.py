"""Checks of what the kernel lets a process have: files, processes, cores, memory, socket names."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import psutil

from grpo_recipes.doctor.machine import Machine
from grpo_recipes.process.reports import gigabytes
from grpo_recipes.runs.finding import Finding, ok, problem, warning

_FILES = 4096  # torch keeps a descriptor a shared tensor, vLLM and aiohttp one a request
_PROCESSES = 4096
_LITTLE_MEMORY = 4e9
_SOCKET_BYTES = 107  # sizeof(sockaddr_un.sun_path) - 1
# A run's folder below TMPDIR, and the name vLLM gives a socket there (a uuid).
_SOCKET_NAME = "/grpo-xxxxxxxx/" + 36 * "x"
_INFINITE = resource.RLIM_INFINITY
_CGROUPS = Path("/sys/fs/cgroup")


def _shown(limit: int) -> str:
    return "unlimited" if limit == _INFINITE else str(limit)


def _below(limit: int, least: int) -> bool:
    return limit != _INFINITE and limit < least


def open_files(machine: Machine) -> Finding:
    """Soft limit of open files (ulimit -n); 4096 at least."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    what = f"{_shown(soft)} (hard {_shown(hard)})"
    if not _below(soft, _FILES):
        return ok(what)
    if _below(hard, _FILES):
        return warning(what, "ask the admins for more (LimitNOFILE of slurmd or of the container)")
    return warning(what, f"ulimit -n {_shown(hard)} before sbatch, which hands your soft limits on")


def processes(machine: Machine) -> Finding:
    """Soft limit of processes and threads of yours (ulimit -u); 4096 at least."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    what = f"{_shown(soft)} (hard {_shown(hard)})"
    if _below(soft, _PROCESSES):
        return warning(what, "ulimit -u $(ulimit -Hu) before sbatch; every thread counts")
    return ok(what)


def locked_memory(machine: Machine) -> Finding:
    """Limit of locked memory (ulimit -l), which InfiniBand needs unlimited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    infiniband = Path("/sys/class/infiniband").is_dir()
    if infiniband and soft != _INFINITE:
        fix = "ulimit -l unlimited before sbatch, or ask the admins (LimitMEMLOCK of slurmd)"
        return warning(f"{gigabytes(soft)} and there is InfiniBand", fix)
    what = "unlimited" if soft == _INFINITE else gigabytes(soft)
    return ok(f"{what}{'' if infiniband else ', no InfiniBand here'}")


def core_files(machine: Machine) -> Finding:
    """Whether a crash writes core files, as large as the process was (ulimit -c)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_CORE)
    if soft == 0:
        return ok("none are written")
    what = f"up to {'any size' if soft == _INFINITE else gigabytes(soft)}"
    piped = Path("/proc/sys/kernel/core_pattern").read_text().startswith("|")
    if piped:
        return ok(f"{what}, handed to a collector")
    return warning(what, "ulimit -c 0 before sbatch, unless you want them")


def other_limits(machine: Machine) -> Finding:
    """Limits of address space, file size and CPU time (ulimit -v, -f, -t), which runs need unlimited."""
    found = {
        "address space (ulimit -v)": resource.RLIMIT_AS,
        "file size (ulimit -f)": resource.RLIMIT_FSIZE,
        "CPU seconds (ulimit -t)": resource.RLIMIT_CPU,
    }
    limited = {name: resource.getrlimit(limit)[0] for name, limit in found.items()}
    limited = {name: limit for name, limit in limited.items() if limit != _INFINITE}
    if not limited:
        return ok("unlimited")
    what = ", ".join(f"{name} {limit}" for name, limit in limited.items())
    return problem(what, "set them to unlimited before sbatch; login nodes have such limits, jobs seldom")


def socket_paths(machine: Machine) -> Finding:
    """Length of socket names below TMPDIR; a unix socket's path ends at 107 bytes."""
    length = len(os.fsencode(str(machine.temporary) + _SOCKET_NAME))
    what = f"{length} of {_SOCKET_BYTES} bytes below {machine.temporary}"
    if length > _SOCKET_BYTES:
        return problem(what, "set TMPDIR to a short path on the node, e.g. /tmp")
    return ok(what)


def cores(machine: Machine) -> Finding:
    """CPU cores this process may use, by its affinity and its cgroup."""
    allowed, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    limit = cgroup_cores()
    usable = min(allowed, limit) if limit else allowed
    what = f"{usable:g} of {present}"
    if usable < 2:
        return warning(what, "ask for more (sbatch --cpus-per-task=8): server and trainer share one core")
    return ok(what)


def memory(machine: Machine) -> Finding:
    """Memory of the machine and of this job's cgroup."""
    found = psutil.virtual_memory()
    limit = cgroup_memory()
    free = min(found.available, limit[0] - limit[1]) if limit else found.available
    what = f"{gigabytes(free)} free of {gigabytes(found.total)}"
    if limit:
        what += f", limited to {gigabytes(limit[0])} here"
    if free < _LITTLE_MEMORY:
        return warning(what, "ask for more (sbatch --mem=64G), or end what uses it")
    return ok(what)


def cgroup_memory(own: str | None = None, root: Path = _CGROUPS) -> tuple[int, int] | None:
    """The tightest memory limit over this process, and how much of it is used, in bytes; None without a limit.

    Args:
        own: content of /proc/self/cgroup.
        root: where cgroups are mounted.
    """
    own = Path("/proc/self/cgroup").read_text() if own is None else own
    limits = []
    for folder, limit_file, used_file in _cgroup_folders(own, root, "memory"):
        limit = _number(folder / limit_file)
        # v1 writes a number near 2^63 for none
        if limit is not None and limit < 2**60:
            limits.append((limit, _number(folder / used_file) or 0))
    return min(limits) if limits else None


def _cgroup_folders(own: str, root: Path, controller: str) -> list[tuple[Path, str, str]]:
    """The folders of this process's cgroup and its parents, with the names of limit and use there, in v1 or v2."""
    names = {"v2": ("memory.max", "memory.current"), "v1": ("memory.limit_in_bytes", "memory.usage_in_bytes")}
    found = []
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        kind, top = ("v1", root / controller) if controllers else ("v2", root)
        folder = top / path.lstrip("/")
        # inside a container the path is that of the host: only the mount itself is there
        folders = [folder, *folder.parents][: len(folder.parts) - len(top.parts) + 1]
        found += [(each, *names[kind]) for each in folders if each.is_dir()]
    return found


def cgroup_cores(root: Path = _CGROUPS) -> float | None:
    """The cgroup's CPU quota in cores, None without one."""
    if (root / "cpu.max").is_file():
        quota, period = (root / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    quota_us, period_us = _number(root / "cpu/cpu.cfs_quota_us"), _number(root / "cpu/cpu.cfs_period_us")
    return quota_us / period_us if quota_us and quota_us > 0 and period_us else None


def _number(path: Path) -> int | None:
    text = path.read_text().strip() if path.is_file() else ""
    return int(text) if text.lstrip("-").isdigit() else None
