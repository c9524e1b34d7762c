"""Running an attempt's processes until one of them ends it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import traceback

from grpo_recipes.errors import EXIT_STOPPED, ConfigError
from grpo_recipes.launch.attempt import Attempt, go_back, say_start
from grpo_recipes.launch.monitor import Watch
from grpo_recipes.launch.nodes import RemoteChild, Trainers
from grpo_recipes.launch.restarts import Next, Restarts
from grpo_recipes.launch.signals import StoppedAtOnce, StopSignals
from grpo_recipes.launch.supervisor import Child, Ending, Trainer, shell_code, trainer_ending, wait_for_trainer
from grpo_recipes.paths import shown
from grpo_recipes.plan.server import NotReady, server_state_file, wait_until_ready
from grpo_recipes.plan.types import Process
from grpo_recipes.process.reports import say
from grpo_recipes.process.tree import become_subreaper, end_descendants, reap
from grpo_recipes.runs.checkpoints import verified_checkpoint
from grpo_recipes.runs.rundir import count_server_restart, stop_file, sync_folder, write_json, write_last_json
from grpo_recipes.secrets import masked
from grpo_recipes.smoke import SMOKE_SCHEME, smoke_command


def supervise(attempt: Attempt, stop: StopSignals) -> Ending:
    """Run the processes; however that ends, nothing of the run is left afterwards."""
    try:
        stop.release(stop_file(attempt.run.folder))
        say_start(attempt)
        ending = make_smoke_task(attempt) or run_processes(attempt, stop)
    except StoppedAtOnce as stopped:
        ending = stopped.ending()
    except ConfigError as refused:
        ending = Ending(1, str(refused.problems[0]))  # 2 says that nothing was started
    except Exception as error:
        traceback.print_exc()
        ending = Ending(1, f"the launcher failed: {type(error).__name__}: {masked(str(error))}")
    finally:
        stop.ignore()
        attempt.agents.close()  # before the rest, which would take srun for one of ours
        end_descendants()
        shutil.rmtree(sync_folder(attempt.run.folder), ignore_errors=True)
        attempt.scratch.remove()
    if stop.terminated and ending.code not in (0, EXIT_STOPPED):
        return Ending(128 + signal.SIGTERM, "stopped by SIGTERM")  # Slurm sends it to every process of the job
    return ending


def make_smoke_task(attempt: Attempt) -> Ending | None:
    """Make the built-in model and data of a smoke recipe, once."""
    name = attempt.recipe["model_name_or_path"]
    if not name.startswith(SMOKE_SCHEME):
        return None
    folder, command = smoke_command(name, os.environ)
    if (folder / "COMPLETE").exists():
        return None
    say(f"making the smoke model and data in {shown(folder)} (once, about a minute)")
    code = subprocess.Popen(command, env=attempt.environment).wait()
    return Ending(code, f"python -m grpo_recipes.smoke exited with code {code}") if code else None


def run_processes(attempt: Attempt, stop: StopSignals) -> Ending:
    """Start the server, then the trainers, and watch both; a lost server is started again within bounds."""
    become_subreaper()
    watch = Watch(attempt, stop)
    restarts = Restarts(attempt.recipe["server_restarts"], attempt.plan.bridge)
    if failed := _start_server(attempt, watch, epoch=1):
        return failed
    watch.trainer = _start_trainers(attempt)
    while True:
        ending = wait_for_trainer(watch.trainer, watch.server, watch.tick, watch.stopping)
        watch.show_progress()
        restarts.stepped = restarts.stepped or watch.stepped
        what, ending = restarts.after(ending, watch.stopping())
        if what is Next.END:
            write_last_json(server_state_file(attempt.run.folder), {"epoch": restarts.done + 1, "state": "gone"})
            return ending
        say(f"{ending.cause}: {what.value} ({restarts.done} of {restarts.most})")
        count_server_restart(attempt.run.folder)
        if what is Next.BOTH:
            watch.trainer.end()
            watch.trainer = None
            verified_checkpoint(attempt.run.folder / "checkpoints", say)
            say(go_back(attempt.run))
        if failed := _start_server(attempt, watch, epoch=restarts.done + 1):
            return failed
        watch.trainer = watch.trainer or _start_trainers(attempt)
        watch.stepped = False


def _start(attempt: Attempt, process: Process) -> Child:
    return Child(process, {**attempt.environment, **process.environment}, attempt.run.folder, attempt.scratch)


def _start_trainers(attempt: Attempt) -> Trainer:
    """Start the trainers of every node; those of this one here."""
    started: list[Child | RemoteChild] = [
        RemoteChild(attempt.agents, process) if process.node else _start(attempt, process)
        for process in attempt.plan.trainers()
    ]
    return started[0] if len(started) == 1 else Trainers(started)


def _start_server(attempt: Attempt, watch: Watch, epoch: int) -> Ending | None:
    """Start the plan's server, in the place of one that is lost, and wait until it is ready.

    Returns:
        Why the run ends: it did not become ready, or the trainers ended meanwhile. None: all is well.
    """
    process = attempt.plan.process("server")
    if process is None:
        return None
    _tell_server_state(attempt, epoch, "starting")
    if watch.server is not None:
        watch.server.end()
    server, watch.server = _start(attempt, process), None
    host, port, token = attempt.server_address()

    def alive() -> bool:
        reap()
        ending = watch.tick()
        if ending is None and watch.trainer is not None:
            ending = trainer_ending(watch.trainer, watch.stopping())
        if ending is not None:
            raise _Ended(ending)
        return server.alive()

    try:
        waited = wait_until_ready(
            alive, server.warden_pid, host, port, attempt.names.served, token, attempt.recipe["vllm_server_timeout"]
        )  # fmt: skip
    except _Ended as ended:
        return ended.ending
    except NotReady as error:
        _tell_server_state(attempt, epoch, "gone")
        return Ending(shell_code(server.exit_code()) or 1, str(error), log=server.log)
    watch.server = server
    watch.starts_again()
    _tell_server_state(attempt, epoch, "ready")
    say(f"server ready after {waited:.0f} s on {host}:{port}")
    return None


def _tell_server_state(attempt: Attempt, epoch: int, state: str) -> None:
    write_json(server_state_file(attempt.run.folder), {"epoch": epoch, "state": state})


class _Ended(Exception):
    """The run ended while it waited for its server."""

    def __init__(self, ending: Ending) -> None:
        self.ending = ending
