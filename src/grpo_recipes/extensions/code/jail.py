"""Run a Python program in a jail of bubblewrap: no network, a read-only system, and limits on everything it uses.

The jail contains only /usr, the C library and this environment's Python. It has its own processes, an empty /tmp, and
no variable of the caller. A filter rejects system calls that would leave the limits. As root, the program gets another
user id, because the kernel does not limit root.

    run_program("print(input())", "7", seconds=4, memory_bytes=2**30)  # "7\n", or None if the program failed
"""

import contextlib
import json
import math
import os
import platform
import selectors
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from grpo_recipes.extensions.code.system_calls import make_filter
from grpo_recipes.process import tree
from grpo_recipes.rewards.memory import measure_memory

MOST_PROCESSES = 32  # processes and threads of a program
_MOST_FILE_BYTES = 16 << 20  # of each file, also of the program's output
_TMP_BYTES = 64 << 20
_WATCH_SECONDS = 0.1
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
_MOST_FILES = 64  # open files of each process, because full sockets use memory of the kernel
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_FIRST_UID, _UIDS = 60000, 5000  # user ids for the programs of root
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}  # fmt: skip
_SERVICE = "set code_sandbox: piston and code_server_url"


class JailFailed(Exception):
    """The jail could not be made, so the program did not run."""


def find_jail_problem() -> tuple[str, str] | None:
    """Run a small program in a jail; return the fault and its fix if that fails, else None."""
    if shutil.which("bwrap") is None:
        return "the sandbox needs bwrap, which is not installed", f"apt-get install bubblewrap, or {_SERVICE}"
    try:
        output = run_program("print(6 * 7)", "", seconds=30.0, memory_bytes=1 << 30)
    except JailFailed as error:
        fix = f"allow user namespaces (sysctl user.max_user_namespaces; a container's seccomp profile), or {_SERVICE}"
        return f"the sandbox does not start ({error})", fix
    return None if output == "42\n" else (f"the sandbox can't run {sys.executable}", _SERVICE)


def run_program(source: str, text: str, seconds: float, memory_bytes: int) -> str | None:
    """Run a Python program with ``text`` as its input; return its output, or None if it failed or exceeded a limit.

    ``seconds`` limits the program's time, and the processor time of each of its processes. ``memory_bytes`` limits each
    process and their sum. Raise JailFailed if the program could not be started.
    """
    with contextlib.ExitStack() as stack:
        program, stdin = (stack.enter_context(_open_in_memory(content)) for content in (source, text))
        stdout, stderr = (stack.enter_context(_open_in_memory("")) for _ in range(2))
        try:
            calls = stack.enter_context(_open_in_memory(make_filter(platform.machine())))
        except ValueError as error:
            raise JailFailed(str(error)) from None
        status, status_end = os.pipe()
        reports = stack.enter_context(os.fdopen(status, "rb"))
        with os.fdopen(status_end, "wb"):
            process = subprocess.Popen(
                _make_command(program.fileno(), calls.fileno(), status_end, seconds, memory_bytes), stdin=stdin,
                stdout=stdout, stderr=stderr, env=_ENVIRONMENT,
                pass_fds=(program.fileno(), calls.fileno(), status_end),
            )  # fmt: skip
        try:
            report = _watch(process.pid, reports, seconds, memory_bytes)
        finally:
            process.kill()  # the kernel then kills all processes of the jail
            process.wait()
        if report is None:
            return None
        code = next((line["exit-code"] for line in map(json.loads, report.splitlines()) if "exit-code" in line), None)
        if code is None:
            raise JailFailed(_read(stderr).strip().rpartition("\n")[2] or f"bwrap: exit code {process.returncode}")
        return _read(stdout) if code == 0 else None


def _watch(pid: int, reports: IO[bytes], seconds: float, memory_bytes: int) -> bytes | None:
    """Wait for the end of bwrap, process ``pid``; return its reports, one JSON object a line.

    Return None as soon as the jail exceeds its time or its memory; the caller then ends it.
    """
    deadline = time.monotonic() + seconds
    report = b""
    with selectors.DefaultSelector() as selector:
        selector.register(reports, selectors.EVENT_READ)
        while (remaining := deadline - time.monotonic()) > 0:
            if selector.select(min(remaining, _WATCH_SECONDS)):
                part = os.read(reports.fileno(), 1 << 12)
                if not part:
                    return report
                report += part
            elif measure_memory(tree.descendants(pid)) > memory_bytes:
                return None
    return None


def _make_command(program: int, calls: int, status: int, seconds: float, memory_bytes: int) -> list[str]:
    """Return bwrap's command for the program in the file descriptor ``program``; ``status`` gets bwrap's reports.

    The file descriptor ``calls`` has the filter of system calls.
    """
    is_root = os.geteuid() == 0
    command = [shutil.which("bwrap") or "bwrap", "--die-with-parent", "--new-session", "--json-status-fd", str(status)]
    command += ["--seccomp", str(calls)]
    command += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    command += [] if is_root else ["--unshare-user"]
    command += ["--perms", "1777", "--size", str(_TMP_BYTES), "--tmpfs", "/tmp"]  # first, the environment may be in it
    # A virtual environment needs its folder, the folder of its Python, and their links.
    for path in (*_SYSTEM, sys.base_prefix, sys.prefix):
        command += ["--ro-bind-try", path, path]
    for path in _DEVICES:
        command += ["--dev-bind", path, path]
    command += ["--chdir", "/tmp", "--perms", "0444", "--ro-bind-data", str(program), "/program.py"]
    command += ["--remount-ro", "/", "--"]
    other_tasks = 0
    # Before Linux 5.14, the kernel counts all tasks of a user except root. The number of all tasks is an upper limit.
    if not is_root and tuple(int(part) for part in platform.release().split(".")[:2]) < (5, 14):
        other_tasks = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])
    command += ["prlimit", f"--nproc={MOST_PROCESSES + other_tasks}", f"--as={memory_bytes}", "--core=0"]
    command += [f"--nofile={_MOST_FILES}", f"--fsize={_MOST_FILE_BYTES}", f"--cpu={math.ceil(seconds)}", "--"]
    if is_root:
        uid = _FIRST_UID + os.getpid() % _UIDS
        command += ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--"]
    return [*command, sys.executable, "-I", "/program.py"]


def _open_in_memory(content: str | bytes) -> IO[bytes]:
    """Return a new file in memory with this content, at its beginning."""
    file = os.fdopen(os.memfd_create("code_tests"), "w+b")
    file.write(content if isinstance(content, bytes) else content.encode(errors="replace"))
    file.seek(0)
    return file


def _read(file: IO[bytes]) -> str:
    """Return the whole content of a file as text."""
    file.seek(0)
    return file.read().decode(errors="replace")
