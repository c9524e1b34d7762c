"""Checks of disks, shared memory, quotas and clocks."""

from __future__ import annotations

import getpass
import os
import re
import shlex
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from grpo_recipes.doctor.machine import Machine, existing
from grpo_recipes.paths import shown
from grpo_recipes.process.reports import gigabytes
from grpo_recipes.process.scratch import SHARED_MEMORY, is_held, names_in_use, size_of
from grpo_recipes.runs.finding import Finding, ok, problem, together, warning

LITTLE_SPACE = 20e9  # a 7B checkpoint is larger; a 1.5B one with its optimizer is about 9 GB
FULL = 1e9
LITTLE_MEMORY = 2**30
_FEW_FILES = 10_000
_SKEW_SECONDS = 2.0
_NEW_SECONDS = 60.0


def disk(machine: Machine) -> Finding:
    """Free space where runs, downloads and temporary files go; 20 GB at least."""
    places = {"run_root": machine.run_root, "CACHE_ROOT": machine.cache, "TMPDIR": machine.temporary}
    for name in ("HF_HOME", "HF_HUB_CACHE"):
        if machine.environment.get(name):
            places[name] = Path(machine.environment[name])
    findings = [_space(name, path) for name, path in places.items()]
    wanted = machine.environment.get("TMPDIR")
    if wanted and not os.access(wanted, os.W_OK):
        findings.append(
            warning(
                f"TMPDIR={wanted} cannot be written, {machine.temporary} is used", "set TMPDIR to a folder that exists"
            )
        )
    return together(findings)


def _space(name: str, path: Path) -> Finding:
    folder = existing(path)
    if not os.access(folder, os.W_OK):
        return problem(f"{name}: {shown(folder)} is not yours to write", f"set {name} to a folder you may write to")
    stat = os.statvfs(folder)
    free = stat.f_bavail * stat.f_frsize
    what = f"{name} {shown(path)}: {gigabytes(free)} free"
    if free < FULL:
        return problem(what, f"make room there, or set {name} to a larger file system")
    if free < LITTLE_SPACE:
        return warning(what, f"make room there, or set {name} to a larger file system")
    if stat.f_files > 0 and stat.f_favail < _FEW_FILES:
        return warning(f"{what}, {stat.f_favail} more files", "remove files there: the file system counts them")
    return ok(what)


def home_folder(machine: Machine) -> Finding:
    """Free space in the home folder, which tools fill whatever we set."""
    folder = Path(machine.environment.get("HOME", "/"))
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return warning(
            f"{folder} cannot be written", "set HOME to a folder of yours: some tools write there whatever is set"
        )
    stat = os.statvfs(folder)
    free = stat.f_bavail * stat.f_frsize
    if free < FULL:
        return warning(
            f"{folder}: {gigabytes(free)} free", "make room; ~/.cache is often the largest (du -sh ~/.cache/*)"
        )
    return ok(f"{folder}: {gigabytes(free)} free")


def quota(machine: Machine) -> Finding:
    """Your quotas, by the programs quota and lfs where they are installed; warns from 90 %."""
    asked: list[tuple[str, ...]] = [("quota", "-w")]
    mounts = {existing(machine.run_root), existing(machine.cache), Path(machine.environment.get("HOME", "/"))}
    asked += [("lfs", "quota", "-q", "-u", getpass.getuser(), str(path)) for path in sorted(mounts)]
    answers = [answer for answer in (machine.ask(*argv) for argv in asked) if answer is not None]
    rows = {row for answer in answers for row in quota_rows(answer.out)}
    if not rows:
        return ok("none found" if answers else "quota and lfs are not installed")
    return together(_share(*row) for row in sorted(rows))


def quota_rows(text: str) -> Iterator[tuple[str, int, int]]:
    """File system, kilobytes used, and the lower limit, of each quota in the output of ``quota -w`` or ``lfs quota``.

    A long name puts its numbers on the next line; a star marks what is exceeded; 0 is no limit.
    """
    for name, used, soft, hard in re.findall(r"^\s*(\S*[/:]\S*)\s+(\d+)\*?\s+(\d+)\s+(\d+)", text, re.MULTILINE):
        limits = [int(limit) for limit in (soft, hard) if int(limit)]
        if limits:
            yield name, int(used), min(limits)


def _share(name: str, used: int, limit: int) -> Finding:
    what = f"{name}: {gigabytes(used * 1024)} of {gigabytes(limit * 1024)} used"
    if used >= limit:
        return problem(what, "remove files there, or set run_root and CACHE_ROOT to another file system")
    if used > 0.9 * limit:
        return warning(what, "remove files there, or set run_root and CACHE_ROOT to another file system")
    return ok(what)


def shared_memory(machine: Machine) -> Finding:
    """Size and free space of /dev/shm, where weights pass to the server; 1 GiB at least."""
    if not os.access(SHARED_MEMORY, os.W_OK):
        return warning(f"{SHARED_MEMORY} cannot be written", "weights pass through TMPDIR instead, which is slower")
    stat = os.statvfs(SHARED_MEMORY)
    size, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    what = f"{gigabytes(free)} free of {gigabytes(size)}"
    if size < LITTLE_MEMORY:
        return warning(what, "start the container with more: docker run --shm-size=16g, or apptainer --bind /dev/shm")
    if free < LITTLE_MEMORY:
        return warning(what, "remove what is left there (see leftovers), or end what uses it")
    return ok(what)


def leftovers(machine: Machine) -> Finding:
    """Folders of runs that died without removing them, in /dev/shm and TMPDIR."""
    found = [path for root in {SHARED_MEMORY, machine.temporary} for path in sorted(root.glob("grpo-*")) if _ours(path)]
    alive = names_in_use(path.name for path in found)
    dead = [path for path in found if path.name not in alive and not is_held(path)]
    if not dead:
        return ok("none")
    size = sum(size_of(path) for path in dead)
    more = f" (and {len(dead) - 5} more)" if len(dead) > 5 else ""
    names = " ".join(shlex.quote(str(path)) for path in dead[:5])
    return warning(f"{len(dead)} of dead runs, {gigabytes(size)}", f"remove them: rm -r {names}{more}")


def _ours(path: Path) -> bool:
    """A folder of ours that is no launch's first second."""
    stat = path.lstat()
    return path.is_dir() and stat.st_uid == os.getuid() and time.time() - stat.st_mtime > _NEW_SECONDS


def clock(machine: Machine) -> Finding:
    """Clock of the file system of run_root against this machine's: the newest run is told by file times."""
    folder = existing(machine.run_root)
    if not os.access(folder, os.W_OK):
        return ok("run_root cannot be written: nothing to compare")
    before = time.time()
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".grpo-clock-") as file:
        written = os.stat(file.name).st_mtime
    late = max(before - written, written - time.time(), 0.0)
    if late > _SKEW_SECONDS:
        return warning(
            f"{shown(folder)} is {late:.0f} s off", "tell the admins (NTP of the file server or of this node)"
        )
    return ok(f"{shown(folder)} agrees")
