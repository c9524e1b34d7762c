"""Connect the launcher with the node workers of a Slurm job: one srun carries orders and reports.

A channel transfers lines of text. It starts the workers, sends each order to all of them, and calls ``on_line`` with
each line that a worker reports. ``rendezvous.MeetingChannel`` does the same for nodes that the user starts by hand.
"""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from grpo_recipes.errors import config_error, translate_errors
from grpo_recipes.paths import module_command
from grpo_recipes.process.tree import OWN_CHILDREN
from grpo_recipes.recipe.keys import SRUN_OPTIONS

WORKER_MODULE = "grpo_recipes.launch.nodes"
# Options of an sbatch header that srun reads from the environment. They would hide GPUs from the only worker of a node.
_GPU_OPTIONS = ("SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_TRES_PER_TASK")
END_SECONDS = 30.0  # for the workers to end everything on their nodes
OnLine = Callable[[str], None]


class SrunChannel:
    """One srun over the ``count`` nodes of a Slurm job; its standard input and output carry the lines."""

    silent_fix = "check that node, or exclude it with sbatch --exclude"  # fix if a node does not answer
    lost_fix = "read the error of srun above, in the job's error log"  # fix if the channel itself ends

    def __init__(self, count: int) -> None:
        """Store the number of nodes; start nothing yet."""
        self._count = count
        self._srun: subprocess.Popen[str] | None = None

    def start(self, environment: Mapping[str, str], folder: Path, on_line: OnLine) -> None:
        """Start a worker on every node with srun, and a thread that calls ``on_line`` with each line that they print.

        Raise ConfigError outside the first node, or if srun is not installed.
        """
        if environment.get("SLURM_NODEID") != "0" or environment.get("SLURM_PROCID", "0") != "0":
            problem = "this is not the first node: a job on several nodes is launched once, on its first node"
            raise config_error("SLURM_NODEID", problem, "submit training.sh with sbatch")
        if shutil.which("srun") is None:
            raise config_error("srun", "is not installed here", "load the module that contains it, e.g. MODULES=slurm")
        # A site's prologue may print undecodable bytes. In the terminal's session, Ctrl-C would end the step.
        self._srun = subprocess.Popen(
            srun_command(self._count, environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            errors="replace", start_new_session=True,
            env={name: value for name, value in os.environ.items() if name not in _GPU_OPTIONS},
        )  # fmt: skip
        OWN_CHILDREN.add(self._srun.pid)
        threading.Thread(target=read_lines, args=(self._srun, on_line), daemon=True).start()

    def alive(self) -> bool:
        """Return whether srun runs. It ends as soon as one of the workers ends with an error."""
        return self._srun is not None and self._srun.poll() is None

    def ending(self) -> str:
        """Wait for srun, and return a sentence with its exit code."""
        return f"srun, which runs the node workers, exited with code {self._srun.wait() if self._srun else None}"

    def send(self, line: str) -> None:
        """Write a line to srun, which copies it to every worker."""
        if self._srun is not None:
            write_line(self._srun, line)

    def close(self) -> None:
        """Close srun's input, which ends the workers, wait for srun, and kill it if it does not end."""
        if self._srun is not None:
            end_worker(self._srun)


def read_lines(process: subprocess.Popen[str], on_line: OnLine) -> None:
    """Call ``on_line`` with each line that a process prints, until the process ends."""
    assert process.stdout is not None
    for line in process.stdout:
        on_line(line)


def write_line(process: subprocess.Popen[str], line: str) -> None:
    """Write a line to a process; ignore a process that has ended."""
    if process.stdin is not None:
        with contextlib.suppress(OSError, ValueError):
            process.stdin.write(line + "\n")
            process.stdin.flush()


def end_worker(process: subprocess.Popen[str]) -> None:
    """Close the input of srun or a worker, wait until it ends, and end it by force if it does not.

    Each of the three waits takes at most ``END_SECONDS``: after the input is closed, after SIGTERM, and after SIGKILL.
    """
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    for use_force in (process.terminate, process.kill, lambda: None):  # after SIGTERM srun kills the step
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
            return
        use_force()


def srun_command(count: int, environment: Mapping[str, str]) -> list[str]:
    """Return the srun command that starts a node worker on each of the job's ``count`` nodes.

    The step overlaps with other steps, because a second srun would otherwise wait for the first. Raise ConfigError if
    the site's options for srun, which a variable contains, have an open quote.
    """
    with translate_errors(
        ValueError, lambda error: config_error(SRUN_OPTIONS, str(error), "close the quotes, or unset it")
    ):
        site_options = shlex.split(environment.get(SRUN_OPTIONS, ""))
    cores = re.findall(r"(\d+)(?:\(x\d+\))?", environment.get("SLURM_JOB_CPUS_PER_NODE", ""))
    return [
        "srun", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--overlap",
        f"--cpus-per-task={min(map(int, cores), default=1)}",  # by default all processes of a node share a single core
        "--kill-on-bad-exit=1", "--mpi=none", "--input=all",
        "--export=ALL",  # a job submitted with --export=NONE would start the workers without an environment
        f"--chdir={os.getcwd()}",
        *site_options,
        *module_command(WORKER_MODULE),
    ]  # fmt: skip
