"""A private two-node Slurm cluster on one machine, for the end-to-end tests.

The daemons are the distribution's own (Debian and Ubuntu: `apt-get install slurm-wlm munge`); the nodes `n1` and `n2`
are slurmd processes on this machine. Their GPUs are empty files: Slurm counts and grants them. They are not
devices, so it does not set CUDA_VISIBLE_DEVICES. Each cluster has its own ports, sockets, keys and state, so
several can coexist.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest

Extra = dict[str, str] | None  # environment variables on top of the cluster's own
NODES = ("n1", "n2")
GPUS_PER_NODE = 4
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "scancel", "sinfo", "setpriv")
# States that a job does not leave by itself. NODE_FAIL and PREEMPTED are not here: Slurm may requeue such a job.
FINAL_STATES = frozenset({"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "OUT_OF_MEMORY", "TIMEOUT"})

SLURM_CONF = """\
ClusterName={run.name}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthInfo=socket={run}/munge/socket,cred_expire={delay}
StateSaveLocation={run}/state
SlurmdSpoolDir={run}/spool-%n
SlurmctldPidFile={run}/slurmctld.pid
SlurmdPidFile={run}/slurmd-%n.pid
SlurmctldLogFile={logs}/slurmctld.log
SlurmdLogFile={logs}/slurmd-%n.log
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
# Memory is not a counted resource: a job without --mem would otherwise ask for a whole node.
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=1,sched_interval=5,bf_interval=5
# A machine with fewer cores or less memory than the node lines say must not take the nodes down.
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=10
MinJobAge=300
# Job numbers of two clusters differ: logs/slurm_%j.out of a checkout is appended to.
FirstJobId={first_job}
JobCompType=jobcomp/filetxt
JobCompLoc={logs}/jobs.txt
GresTypes=gpu
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=8000 Gres=gpu:a100:{gpus}
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=8000 Gres=gpu:a100:{gpus}
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


class SlurmError(RuntimeError):
    """The cluster or one of its jobs failed or timed out. The message ends with the last log lines."""


def unavailable() -> str | None:
    """Why a cluster cannot run on this machine (for pytest.skip), or None if it can."""
    if os.geteuid() != 0:
        return "a Slurm cluster for tests needs root: slurmd starts jobs as their users"
    if missing := [program for program in PROGRAMS if _program(program) is None]:
        return f"{', '.join(missing)} not found; on Debian or Ubuntu: apt-get install slurm-wlm munge"
    if "munge" not in {account.pw_name for account in pwd.getpwall()}:
        return "the user munge is missing; on Debian or Ubuntu: apt-get install munge"
    return None


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """One cluster for the tests of a file, ready in a second or two. Skips if this machine cannot run Slurm.

    Not for the whole test run: tests of the launcher, which ends all that runs below it, run in this process too.
    """
    if reason := unavailable():
        pytest.skip(reason)
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


class SlurmCluster:
    """`with SlurmCluster(directory) as cluster:` starts slurmctld and two slurmds and ends them with all their jobs.

    `directory` receives the configuration and the logs. `env` is the environment for every process that talks to the
    cluster. A requeued job waits `requeue_delay` seconds (Slurm's own default is 120) unless `start_requeued` helps.
    """

    def __init__(self, directory: Path, requeue_delay: int = 30) -> None:
        self.directory = Path(directory).resolve()
        self.conf = self.directory / "slurm.conf"
        # SLURM_CONF stays last: slurmstepd writes its title over the first variables, and `_owns` needs this one.
        self.env = _clean_environment() | {"SLURM_CONF": str(self.conf)}
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._requeue_delay = requeue_delay
        self._run: Path | None = None

    def __enter__(self) -> SlurmCluster:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            # Sockets and spool live here: a socket's path has at most 107 bytes, and user munge must be able to enter.
            self._run = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
            self._run.chmod(0o755)
            self._configure(self._run)
            self._start_munged(self._run / "munge")
            self._start("slurmctld", "slurmctld", "-D", "-f", str(self.conf))
            for node in NODES:
                self._start(f"slurmd-{node}", "slurmd", "-D", "-N", node, "-f", str(self.conf))
            self._until(self._all_idle, "not both nodes became idle", timeout=60)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def cli(self, *argv: str, cwd: Path | None = None, env: Extra = None) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands against this cluster; the caller looks at the return code."""
        return subprocess.run(argv, cwd=cwd, env=self.env | (env or {}), capture_output=True, text=True, timeout=60)

    def sbatch(self, *args: str, cwd: Path, env: Extra = None) -> int:
        """Submit a job from `cwd`; the job sees `env` on top of the cluster's environment."""
        return int(self._must("sbatch", "--parsable", *args, cwd=cwd, env=env).strip().partition(";")[0])

    def job(self, job_id: int) -> dict[str, str]:
        """The fields of `scontrol show job`; they stay available for five minutes after the job's end."""
        line = self._must("scontrol", "show", "job", str(job_id), "-o").splitlines()[0]
        # A value may contain spaces; it ends before the next `Key=`.
        return dict(re.findall(r"(?:^|\s)([A-Z][\w/:]*)=(.*?)(?=\s+[A-Z][\w/:]*=|\s*$)", line))

    def wait(self, job_id: int, states: str | Collection[str], timeout: float) -> dict[str, str]:
        """Wait until the job is in one of `states` and return its record; fail early if it ended in another one."""
        expected = {states} if isinstance(states, str) else set(states)
        deadline = time.monotonic() + timeout
        while (record := self.job(job_id))["JobState"] not in expected:
            if record["JobState"] in FINAL_STATES or time.monotonic() > deadline:
                raise SlurmError(
                    f"job {job_id} is {record['JobState']}, not {' or '.join(sorted(expected))} (limit {timeout} s)\n"
                    f"{record}\n{_tail(Path(record.get('StdOut', '')))}\n{self.logs()}"
                )
            time.sleep(0.25)
        return record

    def scancel(self, job_id: int, *args: str) -> None:
        self._must("scancel", *args, str(job_id))

    def start_requeued(self, job_id: int, timeout: float = 30) -> None:
        """Have a requeued job start at once instead of after `requeue_delay`."""
        self.wait(job_id, "PENDING", timeout)
        # Not simply `now`: a node rejects the new run's credential if it was made in the second in which the old run
        # ended, and the controller then fails the job ("Job credential revoked").
        self._must("scontrol", "update", f"JobId={job_id}", "StartTime=now+2")

    def logs(self) -> str:
        """Return the last lines of every daemon's log, or of its standard error if it wrote no log."""
        paths = ((self.directory / f"{name}.log", self.directory / f"{name}.err") for name in self.daemons)
        return "\n".join(_tail(log if log.is_file() else err) for log, err in paths)

    def pids(self) -> set[int]:
        """Return the live processes of this cluster: daemons, their helpers, and processes of jobs, also orphans."""
        daemons = {process.pid for process in self.daemons.values() if process.poll() is None}
        return daemons | {int(path.name) for path in Path("/proc").glob("[0-9]*") if self._owns(path)}

    def close(self) -> None:
        """End the daemons and the remaining processes of jobs; safe to call twice."""
        # The controller first: with it gone, no job starts or is requeued while the rest is ended.
        for name in ("slurmctld", *(f"slurmd-{node}" for node in NODES), "munged"):
            if name in self.daemons:
                _stop(self.daemons[name])
        deadline = time.monotonic() + 10
        while pids := self.pids():
            if time.monotonic() > deadline:
                raise SlurmError(f"processes {sorted(pids)} outlived the cluster")
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        if self._run is not None:
            shutil.rmtree(self._run, ignore_errors=True)

    def _must(self, *argv: str, cwd: Path | None = None, env: Extra = None) -> str:
        done = self.cli(*argv, cwd=cwd, env=env)
        if done.returncode != 0:
            raise SlurmError(f"{' '.join(argv)}: exit code {done.returncode}: {done.stderr.strip()}\n{self.logs()}")
        return done.stdout

    def _configure(self, run: Path) -> None:
        (run / "state").mkdir()
        host = socket.gethostname().partition(".")[0]
        ports = _free_ports(1 + len(NODES))
        gpus, delay = GPUS_PER_NODE, self._requeue_delay
        first_job = int(time.time()) % 50_000_000 + 1  # Slurm's own largest is 67,043,328
        text = SLURM_CONF.format(
            run=run, logs=self.directory, host=host, ports=ports, gpus=gpus, delay=delay, first_job=first_job
        )
        self.conf.write_text(text)
        # Slurm takes a node down if its GPUs have a count but no files.
        for index in range(gpus):
            (self.directory / f"gpu{index}").touch()
        gres = f"AutoDetect=off\nNodeName=n[1-2] Name=gpu Type=a100 File={self.directory}/gpu[0-{gpus - 1}]\n"
        (self.directory / "gres.conf").write_text(gres)

    def _start_munged(self, home: Path) -> None:
        home.mkdir()
        key = home / "key-file"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        for path in (home, key):
            shutil.chown(path, "munge", "munge")
        # munged refuses a directory that others may write to, and the umask may have allowed that.
        home.chmod(0o755)
        args = [f"--{option}={home / option}" for option in ("socket", "key-file", "seed-file", "pid-file")]
        self._start("munged", "munged", "--foreground", *args, user="munge")
        self._until((home / "socket").exists, "munged made no socket", timeout=20)

    def _start(self, name: str, program: str, *args: str, user: str = "root") -> None:
        # Should the tests be killed, the kernel ends the daemon: it does so when the thread that started it is gone.
        account = pwd.getpwnam(user)
        argv = [f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--clear-groups", "--pdeathsig=TERM"]
        with (self.directory / f"{name}.err").open("wb") as err:
            self.daemons[name] = subprocess.Popen(
                ["setpriv", *argv, str(_program(program)), *args],
                cwd="/",
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=err,
                stderr=err,
                start_new_session=True,
            )

    def _all_idle(self) -> bool:
        states = self.cli("sinfo", "--noheader", "--Node", "--format=%N %t").stdout.split("\n")
        return {f"{node} idle" for node in NODES} <= set(states)

    def _until(self, ready: Callable[[], bool], failure: str, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not ready():
            ended = {name: process.returncode for name, process in self.daemons.items() if process.poll() is not None}
            if ended or time.monotonic() > deadline:
                raise SlurmError(f"{failure} in {timeout} s; ended daemons: {ended}\n{self.logs()}")
            time.sleep(0.2)

    def _owns(self, process: Path) -> bool:
        # Slurm's own record follows parent ids and loses orphans, so a process is recognized by its environment. A job
        # id keeps the caller's processes out: those may have the same environment.
        try:
            environment = (process / "environ").read_bytes()
            slurms_own = (process / "comm").read_text().startswith("slurm")
        except OSError:
            return False
        is_ours = f"SLURM_CONF={self.conf}\0".encode() in environment
        return is_ours and (slurms_own or b"\0SLURM_JOB_ID=" in environment)


def _program(name: str) -> str | None:
    # The daemons are in sbin, which is not on every root's PATH.
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin")


def _clean_environment() -> dict[str, str]:
    # The tests may run in a Slurm job. Its variables would become options of every command.
    foreign = re.compile(r"(SLURM|SLURMD|SBATCH|SALLOC|SRUN|SCANCEL|SINFO|SQUEUE)_")
    user = pwd.getpwuid(os.geteuid())
    login = {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name, "PATH": os.defpath}
    return login | {key: value for key, value in os.environ.items() if not foreign.match(key)}


def _free_ports(count: int) -> list[int]:
    """Return free ports below the kernel's range for outgoing connections."""
    # Not the shared generator: tests that seed it would give two clusters the same ports.
    generator = random.SystemRandom()
    ports: set[int] = set()
    while len(ports) < count:
        port = generator.randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("0.0.0.0", port))
            ports.add(port)
    return sorted(ports)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _tail(path: Path, lines: int = 12) -> str:
    if not path.is_file():
        return f"--- {path}: no such file"
    return "\n".join([f"--- {path}", *path.read_text(errors="replace").splitlines()[-lines:]])
