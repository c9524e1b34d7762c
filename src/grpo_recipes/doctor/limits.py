"""Checks of what this machine lets a run have: disks, quotas, shared memory, files, processes, cores, memory."""

from __future__ import annotations

import getpass
import math
import os
import re
import resource
import shlex
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from grpo_recipes.doctor.examine import Machine, judge
from grpo_recipes.paths import cache_root, existing, shown
from grpo_recipes.process.reports import gigabytes
from grpo_recipes.process.scratch import SHARED_MEMORY, is_held, names_in_use, size_of
from grpo_recipes.runs.finding import PROBLEM, WARNING, Finding, ok, problem, together, warning

_LITTLE_SPACE = 20e9  # a 7B checkpoint is larger; a 1.5B one with its optimizer is about 9 GB
_FULL = 1e9
_LITTLE_SHARED = 2**30
_LITTLE_MEMORY = 4e9
_FEW_FILES = 10_000  # that a file system still takes
_SKEW_SECONDS = 2.0
_NEW_SECONDS = 60.0  # a folder this new may be that of a launch that begins
_FEW_DESCRIPTORS = 4096  # torch keeps one a shared tensor, vLLM and aiohttp one a request
_FEW_PROCESSES = 4096
_SOCKET_BYTES = 107  # sizeof(sockaddr_un.sun_path) - 1
# A run's folder below TMPDIR, and the name vLLM gives a socket there (a uuid).
_SOCKET_NAME = "/grpo-xxxxxxxx/" + 36 * "x"
_CGROUPS = Path("/sys/fs/cgroup")
_ELSEWHERE = "remove files there, or set run_root and CACHE_ROOT to another file system"


def disk(machine: Machine) -> Finding:
    """Free space where runs, downloads and temporary files go; 20 GB at least."""
    places = {"run_root": machine.run_root, "CACHE_ROOT": cache_root(machine.environment), "TMPDIR": machine.temporary}
    hub = {name: machine.environment.get(name) for name in ("HF_HOME", "HF_HUB_CACHE")}
    findings = [_space(name, Path(path)) for name, path in {**places, **hub}.items() if path]
    wanted = machine.environment.get("TMPDIR")
    if wanted and not os.access(wanted, os.W_OK):
        what = f"TMPDIR={wanted} cannot be written, {machine.temporary} is used"
        findings.append(warning(what, "set TMPDIR to a folder that exists"))
    return together(findings)


def _space(name: str, path: Path) -> Finding:
    folder = existing(path)
    if not os.access(folder, os.W_OK):
        return problem(f"{name}: you may not write to {shown(folder)}", f"set {name} to a folder you may write to")
    free, stat = shutil.disk_usage(folder).free, os.statvfs(folder)
    few = stat.f_files > 0 and stat.f_favail < _FEW_FILES
    what = f"{name} {shown(path)}: {gigabytes(free)} free" + (f", {stat.f_favail} more files" if few else "")
    larger = f"make room there, or set {name} to a larger file system"
    fewer = "remove files there: the file system counts them"
    return judge(what, (free < _FULL, PROBLEM, larger), (free < _LITTLE_SPACE, WARNING, larger), (few, WARNING, fewer))


def home_folder(machine: Machine) -> Finding:
    """Free space in the home folder, which tools fill whatever we set."""
    folder = machine.home
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return warning(f"{folder} cannot be written", "set HOME to a folder of yours: some tools always write there")
    free = shutil.disk_usage(folder).free
    fix = "make room; ~/.cache is often the largest (du -sh ~/.cache/*)"
    return judge(f"{folder}: {gigabytes(free)} free", (free < _FULL, WARNING, fix))


def quota(machine: Machine) -> Finding:
    """Your quotas, by the programs quota and lfs where they are installed; warns from 90 %."""
    mounts = {existing(machine.run_root), existing(cache_root(machine.environment)), machine.home}
    commands = [("lfs", "quota", "-q", "-u", getpass.getuser(), str(path)) for path in sorted(mounts)]
    answers = [answer for argv in [("quota", "-w"), *commands] if (answer := machine.ask(*argv)) is not None]
    rows = sorted({row for answer in answers for row in _quota_rows(answer.stdout)})
    if not rows:
        return ok("none found" if answers else "quota and lfs are not installed")
    return together(
        judge(
            f"{name}: {gigabytes(used * 1024)} of {gigabytes(limit * 1024)} used",
            (used >= limit, PROBLEM, _ELSEWHERE),
            (used > 0.9 * limit, WARNING, _ELSEWHERE),
        )
        for name, used, limit in rows
    )


def _quota_rows(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield file system, kilobytes used, and the lower limit, of each quota that ``quota -w`` or ``lfs quota`` prints.

    A long name puts its numbers on the next line; a star marks what is exceeded; 0 means no limit.
    """
    for name, used, soft, hard in re.findall(r"^\s*(\S*[/:]\S*)\s+(\d+)\*?\s+(\d+)\s+(\d+)", text, re.MULTILINE):
        if limits := [int(limit) for limit in (soft, hard) if int(limit)]:
            yield name, int(used), min(limits)


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
    found = [path for root in {SHARED_MEMORY, machine.temporary} for path in sorted(root.glob("grpo-*")) if _ours(path)]
    alive = names_in_use(path.name for path in found)
    dead = [path for path in found if path.name not in alive and not is_held(path)]
    if not dead:
        return ok("none")
    names = " ".join(shlex.quote(str(path)) for path in dead[:5])
    more = f" (and {len(dead) - 5} more)" if len(dead) > 5 else ""
    what = f"{len(dead)} of dead runs, {gigabytes(sum(size_of(path) for path in dead))}"
    return warning(what, f"remove them: rm -r {names}{more}")


def _ours(path: Path) -> bool:
    """Return whether this is a folder of the user's runs, and older than the first seconds of a launch."""
    stat = path.lstat()
    return path.is_dir() and stat.st_uid == os.getuid() and time.time() - stat.st_mtime > _NEW_SECONDS


def clock(machine: Machine) -> Finding:
    """Clock of the file system of run_root against this machine's: file times decide which run is the newest."""
    folder = existing(machine.run_root)
    if not os.access(folder, os.W_OK):
        return ok("run_root cannot be written: nothing to compare")
    before = time.time()
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".grpo-clock-") as file:
        written = os.stat(file.name).st_mtime
    off = max(before - written, written - time.time())
    fix = "report it to the admins (NTP of the file server or of this node)"
    return warning(f"{shown(folder)} is {off:.0f} s off", fix) if off > _SKEW_SECONDS else ok(f"{shown(folder)} agrees")


def _limits(which: int) -> tuple[float, float]:
    """Return the soft and the hard limit of a resource."""
    soft, hard = (math.inf if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(which))
    return soft, hard


def _few(which: int, letter: str, least: int, why: str) -> Finding:
    """Compare a soft limit, ``ulimit -<letter>``, with the least that a run needs."""
    soft, hard = (str(limit).replace("inf", "unlimited") for limit in _limits(which))
    fix = f"ulimit -{letter} {hard} before sbatch, which hands your soft limits on"
    if _limits(which)[1] < least:
        fix = "ask the admins for more (the limits of slurmd or of the container)"
    return judge(f"{soft} (hard {hard})", (_limits(which)[0] < least, WARNING, f"{fix}; {why}"))


def open_files(machine: Machine) -> Finding:
    """Soft limit of open files (ulimit -n); 4096 at least."""
    return _few(resource.RLIMIT_NOFILE, "n", _FEW_DESCRIPTORS, "every connection and shared tensor counts")


def processes(machine: Machine) -> Finding:
    """Soft limit of processes and threads of yours (ulimit -u); 4096 at least."""
    return _few(resource.RLIMIT_NPROC, "u", _FEW_PROCESSES, "every thread counts")


def locked_memory(machine: Machine) -> Finding:
    """Limit of locked memory (ulimit -l), which InfiniBand needs unlimited."""
    soft, _ = _limits(resource.RLIMIT_MEMLOCK)
    what = "unlimited" if soft == math.inf else gigabytes(soft)
    if not Path("/sys/class/infiniband").is_dir():
        return ok(f"{what}, no InfiniBand here")
    fix = "ulimit -l unlimited before sbatch, or ask the admins (LimitMEMLOCK of slurmd)"
    return judge(f"{what}, with InfiniBand", (soft < math.inf, WARNING, fix))


def core_files(machine: Machine) -> Finding:
    """Whether a crash writes core files, as large as the process was (ulimit -c)."""
    soft, _ = _limits(resource.RLIMIT_CORE)
    if soft == 0:
        return ok("none are written")
    what = f"up to {'any size' if soft == math.inf else gigabytes(soft)}"
    if Path("/proc/sys/kernel/core_pattern").read_text().startswith("|"):
        return ok(f"{what}, handed to a collector")
    return warning(what, "ulimit -c 0 before sbatch, unless you want them")


def other_limits(machine: Machine) -> Finding:
    """Limits of address space, file size and CPU time (ulimit -v, -f, -t), which runs need unlimited."""
    names = {
        "address space (ulimit -v)": resource.RLIMIT_AS,
        "file size (ulimit -f)": resource.RLIMIT_FSIZE,
        "CPU seconds (ulimit -t)": resource.RLIMIT_CPU,
    }
    limits = {name: _limits(which)[0] for name, which in names.items()}
    what = ", ".join(f"{name} {limit}" for name, limit in limits.items() if limit < math.inf)
    fix = "set them to unlimited before sbatch; login nodes have such limits, jobs seldom"
    return judge(what or "unlimited", (what, PROBLEM, fix))


def socket_paths(machine: Machine) -> Finding:
    """Length of socket names below TMPDIR; a unix socket's path ends at 107 bytes."""
    length = len(os.fsencode(str(machine.temporary) + _SOCKET_NAME))
    what = f"{length} of {_SOCKET_BYTES} bytes below {machine.temporary}"
    return judge(what, (length > _SOCKET_BYTES, PROBLEM, "set TMPDIR to a short path on the node, e.g. /tmp"))


def cores(machine: Machine) -> Finding:
    """CPU cores this process may use, by its affinity and its cgroup."""
    usable = min(len(os.sched_getaffinity(0)), cgroup_cores() or math.inf)
    fix = "ask for more (sbatch --cpus-per-task=8): server and trainer share one core"
    return judge(f"{usable:g} of {os.cpu_count() or 1}", (usable < 2, WARNING, fix))


def memory(machine: Machine) -> Finding:
    """Memory of the machine and of this job's cgroup."""
    free, limit = free_memory(), cgroup_memory()
    what = f"{gigabytes(free)} free of {gigabytes(psutil.virtual_memory().total)}"
    what += f", limited to {gigabytes(limit[0])} here" if limit else ""
    return judge(what, (free < _LITTLE_MEMORY, WARNING, "ask for more (sbatch --mem=64G), or end what uses it"))


def free_memory() -> int:
    """Return the bytes that this process may still allocate, by the machine and by its cgroup."""
    available, limit = psutil.virtual_memory().available, cgroup_memory()
    return min(available, limit[0] - limit[1]) if limit else available


def cgroup_memory(own: str | None = None, root: Path = _CGROUPS) -> tuple[int, int] | None:
    """Return the tightest memory limit over this process, and how much of it is used, in bytes; None without a limit.

    ``own`` is the content of /proc/self/cgroup, ``root`` is where cgroups are mounted, v1 or v2.
    """
    own = Path("/proc/self/cgroup").read_text() if own is None else own
    found = []
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        files = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        folder = top / path.lstrip("/")
        # inside a container the path is that of the host: only the mount itself is there
        for each in [folder, *folder.parents][: len(folder.parts) - len(top.parts) + 1]:
            limit, used = (_number(each / name) for name in files)
            if limit is not None and limit < 2**60:  # v1 writes a number near 2^63 for none
                found.append((limit, used or 0))
    return min(found, default=None)


def cgroup_cores(root: Path = _CGROUPS) -> float | None:
    """Return the cgroup's CPU quota in cores, None without one."""
    if (root / "cpu.max").is_file():
        quota, period = (root / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    quota_us, period_us = _number(root / "cpu/cpu.cfs_quota_us"), _number(root / "cpu/cpu.cfs_period_us")
    return quota_us / period_us if quota_us and quota_us > 0 and period_us else None


def _number(path: Path) -> int | None:
    text = path.read_text().strip() if path.is_file() else ""
    return int(text) if text.lstrip("-").isdigit() else None
