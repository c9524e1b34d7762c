"""Running an attempt's processes until one of them ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import traceback

from grpo_recipes.check import SMOKE_SCHEME
from grpo_recipes.errors import EXIT_STOPPED
from grpo_recipes.fetch.pieces import smoke_command
from grpo_recipes.launch.attempt import Attempt, say_start
from grpo_recipes.launch.descendants import end_descendants, reap
from grpo_recipes.launch.prctl import become_subreaper
from grpo_recipes.launch.progress import Progress
from grpo_recipes.launch.rundir import stop_file
from grpo_recipes.launch.say import print_line, say
from grpo_recipes.launch.server import NotReady, wait_until_ready
from grpo_recipes.launch.signals import StoppedBySignal, StopSignals
from grpo_recipes.launch.supervisor import Child, Ending, shell_code, wait_for_trainer
from grpo_recipes.paths import shown
from grpo_recipes.secrets import masked


def supervise(attempt: Attempt) -> Ending:
    """Run the processes; however that ends, nothing of the run is left afterwards."""
    stop = StopSignals(stop_file(attempt.run.folder))
    try:
        say_start(attempt)
        ending = make_smoke_task(attempt) or run_processes(attempt, stop)
    except StoppedBySignal as stopped:
        ending = Ending(128 + stopped.signum, f"stopped by {signal.Signals(stopped.signum).name}")
    except Exception as error:
        traceback.print_exc()
        ending = Ending(1, f"the launcher failed: {type(error).__name__}: {masked(str(error))}")
    finally:
        stop.ignore()
        end_descendants()
        attempt.scratch.remove()
    if stop.seen == signal.SIGTERM and ending.code not in (0, EXIT_STOPPED):
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
    """Start the server, then the trainers, and watch both."""
    become_subreaper()
    plan = attempt.plan
    server = _start(attempt, "server") if plan.process("server") else None
    trainer = _start(attempt, "trainer") if server is None else None
    if server is not None:
        try:
            _wait_for_server(attempt, server)
        except NotReady as error:
            return Ending(shell_code(server.exit_code()) or 1, str(error), log=server.log)
        trainer = _start(attempt, "trainer")
    assert trainer is not None
    progress = Progress(attempt.run.folder)

    def tick() -> None:
        lines = progress.new_lines()
        stop.trainers_run = stop.trainers_run or bool(lines)
        stop.check_deadline()
        for line in lines:
            print_line(line)
        if attempt.publisher:
            attempt.publisher.tick()

    ending = wait_for_trainer(trainer, server, attempt.run.folder, tick)
    for line in progress.new_lines():
        print_line(line)
    return ending


def _start(attempt: Attempt, role: str) -> Child:
    process = attempt.plan.process(role)
    assert process is not None
    return Child(process, {**attempt.environment, **process.environment}, attempt.run.folder, attempt.scratch)


def _wait_for_server(attempt: Attempt, server: Child) -> None:
    plan, recipe = attempt.plan, attempt.recipe
    token = attempt.scratch.token.read_text()

    def alive() -> bool:
        reap()
        return server.alive()

    waited = wait_until_ready(
        alive, server.warden_pid, recipe["vllm_server_host"], plan.ports.server, attempt.names.served, token,
        recipe["vllm_server_timeout"],
    )  # fmt: skip
    say(f"server ready after {waited:.0f} s on {recipe['vllm_server_host']}:{plan.ports.server}")
