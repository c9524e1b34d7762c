"""Start an attempt's processes in the plan's order, restart what may be restarted, and end all of them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import traceback
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter

from grpo_recipes.errors import EXIT_STOPPED, ConfigError
from grpo_recipes.launch.attempt import Attempt, go_back, say_start
from grpo_recipes.launch.monitor import Monitor
from grpo_recipes.launch.nodes import RemoteChild
from grpo_recipes.launch.processes import Child, Ending, Group, Started, find_ending, shell_code, wait_for_ending
from grpo_recipes.launch.signals import StoppedAtOnce, StopSignals
from grpo_recipes.paths import shown
from grpo_recipes.plan.ports import NotReady, wait_until_ready
from grpo_recipes.plan.types import Process
from grpo_recipes.process.reports import say
from grpo_recipes.process.tree import become_subreaper, end_descendants, reap
from grpo_recipes.runs import rundir
from grpo_recipes.runs.checkpoints import verified_checkpoint
from grpo_recipes.secrets import masked
from grpo_recipes.smoke import SMOKE_SCHEME, smoke_command


def supervise(attempt: Attempt, stop: StopSignals) -> Ending:
    """Run the processes; however that ends, nothing of the run is left afterwards."""
    try:
        stop.release(rundir.stop_file(attempt.run.folder))
        say_start(attempt)
        ending = make_smoke_task(attempt) or Supervisor(attempt, stop).run()
    except StoppedAtOnce as stopped:
        ending = stopped.ending()
    except ConfigError as error:
        ending = Ending(1, str(error.problems[0]))  # not 2, which says that nothing was started
    except Exception as error:
        traceback.print_exc()
        ending = Ending(1, f"the launcher failed: {type(error).__name__}: {masked(str(error))}")
    finally:
        stop.ignore()
        attempt.workers.close()  # before the rest, which would take srun for one of ours
        end_descendants()
        shutil.rmtree(attempt.run.folder / rundir.SYNC_FOLDER, ignore_errors=True)
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


@dataclass
class Restarts:
    """Restarts of lost processes in one attempt, and their bounds."""

    most: int  # the recipe's server_restarts; 0 never restarts
    done: int = 0
    stepped: bool = True  # whether a step was completed since the last of them

    def after(self, ending: Ending, stopping: bool) -> tuple[bool, Ending]:
        """Return whether what was lost is started again, and the ending, with the reason where a bound forbids it.

        Nothing is started for a run that is ``stopping``, i.e. was asked to save and end.
        """
        lost, why = ending.lost, ""
        if lost is None or lost.on_loss == "fail" or stopping or self.most == 0:
            return False, ending
        if self.done >= self.most:
            why = f"; the {lost.role} was started again {self.done} times already (server_restarts)"
        elif not self.stepped:
            why = f"; no step was completed since the {lost.role} was started again"
        else:
            self.done, self.stepped = self.done + 1, False
        return not why, replace(ending, cause=ending.cause + why)


class Supervisor:
    """The processes of an attempt, by their roles; what differs between roles is in the plan."""

    def __init__(self, attempt: Attempt, stop: StopSignals) -> None:
        self._attempt = attempt
        self._folder = attempt.run.folder
        self._monitor = Monitor(attempt, stop)
        self._groups = self._monitor.groups
        self._restarts = Restarts(attempt.recipe["server_restarts"])
        self._epoch = 1  # of the server: every one that is started gets the next
        processes = attempt.plan.processes
        order = TopologicalSorter({process.role: process.after for process in processes}).static_order()
        planned = {role: [process for process in processes if process.role == role] for role in order}
        self._planned = {role: members for role, members in planned.items() if members}

    def run(self) -> Ending:
        """Start the plan's processes and those that are lost again, until one of them ends the run."""
        become_subreaper()
        monitor = self._monitor
        while True:
            ending = self._start_missing() or wait_for_ending(self._running(), monitor.tick, monitor.stopping)
            monitor.show_progress()
            self._restarts.stepped = self._restarts.stepped or monitor.stepped
            again, ending = self._restarts.after(ending, monitor.stopping())
            if not again or ending.lost is None:
                rundir.write_last_json(self._folder / rundir.SERVER_STATE, {"epoch": self._epoch, "state": "gone"})
                return ending
            self._end_lost(ending, ending.lost)

    def _running(self) -> list[Group]:
        return [self._groups[role] for role in self._planned if role in self._groups]

    def _end_lost(self, ending: Ending, lost: Process) -> None:
        """End what is left of a lost process, and the trainers where they cannot go on without it."""
        with_trainers = lost.on_loss == "restart with trainers"
        what = f"{lost.role} and trainers are started again from the newest checkpoint"
        what = what if with_trainers else f"the {lost.role} alone is started again"
        say(f"{ending.cause}: {what} ({self._restarts.done} of {self._restarts.most})")
        path = self._folder / "summary.json"
        summary = rundir.read_json(path)
        rundir.write_json(path, {**summary, "server_restarts": summary.get("server_restarts", 0) + 1})
        for group in self._running():
            if with_trainers and group.process.trains:
                self._groups.pop(group.process.role).end()
                verified_checkpoint(self._folder / "checkpoints", say)
                say(go_back(self._attempt.run))
        if lost.ready == "serving":
            self._epoch += 1
            self._write_server_state("starting")  # before its end, so that trainers that go on wait for the next one
        self._groups.pop(lost.role).end()

    def _start_missing(self) -> Ending | None:
        """Start what does not run, in the plan's order, each once those it starts after are ready.

        Returns why the run ends, or a process is lost, where that happens meanwhile.
        """
        attempt = self._attempt
        for role, members in self._planned.items():
            if role in self._groups:
                continue
            serving = members[0].ready == "serving"
            if serving:
                self._write_server_state("starting")
            started = [
                RemoteChild(attempt.workers, process) if process.node
                else Child(process, {**attempt.environment, **process.environment}, self._folder, attempt.scratch)
                for process in members
            ]  # fmt: skip
            if serving and (ending := self._wait_until_serving(started[0])):
                return ending
            self._groups[role] = Group(started)
        self._monitor.start_again()
        return None

    def _wait_until_serving(self, server: Started) -> Ending | None:
        """Wait for the server; return why the run ends if it did not become ready, or another process ended first."""
        assert isinstance(server, Child)
        attempt, monitor = self._attempt, self._monitor
        host, port, token = attempt.server_address()
        endings: list[Ending] = []

        def alive() -> bool:
            reap()
            if ending := monitor.tick() or find_ending(self._running(), monitor.stopping()):
                endings.append(ending)
            return not endings and server.alive()

        timeout = attempt.recipe["vllm_server_timeout"]
        try:
            waited = wait_until_ready(alive, server.guard_pid, host, port, attempt.names.served, token, timeout)
        except NotReady as error:
            if not endings:
                return Ending(shell_code(server.state().exit) or 1, str(error), log=server.log)
            if endings[0].lost:
                server.end()  # it is started anew after the one that was lost
            return endings[0]
        self._write_server_state("ready")
        say(f"server ready after {waited:.0f} s on {host}:{port}")
        return None

    def _write_server_state(self, state: str) -> None:
        rundir.write_json(self._folder / rundir.SERVER_STATE, {"epoch": self._epoch, "state": state})
