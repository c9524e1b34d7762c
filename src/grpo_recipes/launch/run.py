"""`grpo launch`: preflight, processes, and their end. Reads top to bottom in ``launch``.

Processes are started in the plan's order, restarted where they may be, and ended, all of them.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from grpo_recipes.errors import EXIT_CONFIG_ERROR, EXIT_STOPPED, ConfigError
from grpo_recipes.fetch.assets import ensure_assets, find_assets, record_assets
from grpo_recipes.launch import processes, resolve
from grpo_recipes.launch.attempt import Attempt, end_without_run, finish, go_back, prepare, say_start
from grpo_recipes.launch.hooks import AllHooks
from grpo_recipes.launch.monitor import Monitor, StoppedAtOnce, StopSignals
from grpo_recipes.launch.nodes import NodeWorkers, RemoteChild, preflight_nodes, serve_node
from grpo_recipes.launch.processes import Child, Ending, Group, Started
from grpo_recipes.launch.rendezvous import MeetingChannel
from grpo_recipes.paths import display_path
from grpo_recipes.plan.commands import (
    base_environment,
    run_environment,
    wandb_environment,
    with_processes,
    with_server_port,
)
from grpo_recipes.plan.devices import Resources, find_resources
from grpo_recipes.plan.plan import describe, make_plan, with_sources
from grpo_recipes.plan.ports import (
    NotReady,
    PortTaken,
    busy_port,
    choose_free_ports,
    find_listener,
    reserve_other_port,
    wait_until_answering,
    wait_until_ready,
)
from grpo_recipes.plan.preflight import need_packages
from grpo_recipes.plan.roles import dismiss
from grpo_recipes.plan.room import need_room
from grpo_recipes.plan.types import MEETING_SECONDS, Process
from grpo_recipes.process.listeners import listening_sockets
from grpo_recipes.process.reports import gigabytes, print_line, say
from grpo_recipes.process.scratch import Scratch
from grpo_recipes.process.terminal import OUTPUT
from grpo_recipes.process.tree import become_subreaper, end_descendants, reap
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.registry import EXTERNAL
from grpo_recipes.runs import rundir
from grpo_recipes.runs.benchmark import write_benchmark
from grpo_recipes.runs.checkpoints import verified_checkpoint
from grpo_recipes.runs.progress import has_trained
from grpo_recipes.secrets import masked, masked_environment
from grpo_recipes.smoke import SMOKE_SCHEME, smoke_command


def launch(options: resolve.Options, resources: Resources | None = None) -> int:
    """Run a recipe to its end and return the exit code: 0, 75 (stopped and saved), the first failed rank's, or 128+n.

    ``resources`` are by default those of this machine. Where the recipe, a flag or the environment is wrong, a
    ConfigError is raised and nothing was started.
    """
    resources = resources or find_resources(os.environ)
    meeting, channel = options.meeting, None
    if meeting is not None:
        resources = resources if resources.nodes else resources.on_nodes(meeting.nodes)
        channel = MeetingChannel(meeting, options.as_json())
    if options.dry_run:
        return _dry_run(options, resources)
    if meeting is not None and meeting.rank > 0:
        run, recipe = resolve.resolve_run(options, resources)  # raises the errors of node 0 before the nodes meet
        return 0 if run and resolve.nothing_is_left(run, recipe, options) else serve_node(meeting, options.as_json())
    with OUTPUT.launch(), StopSignals() as stop, closing(NodeWorkers(len(resources.nodes), channel)) as workers:
        try:
            run, recipe = resolve.resolve_run(options, resources)
            if run and resolve.nothing_is_left(run, recipe, options):
                if options.benchmark:
                    print_line("\n".join(write_benchmark(run)))
                return 0
            attempt = _prepare(run, recipe, options, resources, stop, workers)
        except StoppedAtOnce as stopped:
            workers.close(stopped.ending())
            return end_without_run(stopped.ending(), stop.wants_requeue, resources.job)
        ending = supervise(attempt, stop)
        return finish(attempt, ending, stop.wants_requeue, resources.job, options.benchmark)


def _prepare(
    run: rundir.Run | None, recipe: Recipe, options: resolve.Options, resources: Resources, stop: StopSignals,
    workers: NodeWorkers,
) -> Attempt:  # fmt: skip
    """Check and plan, then make the run directory and all that the processes need."""
    names = resolve.names_of(recipe, run)
    resources = preflight_nodes(workers, resources, os.environ, names.run_dir.parent)
    plan = make_plan(recipe, resources, os.environ)
    need_packages(plan.mode)
    there = workers.port_of(plan.placement[0].node)
    ports, notes = choose_free_ports(recipe, plan.ports, plan.server_host, there, plan.mode == "server")
    resolve.need_wandb_route(recipe, os.environ)
    # Downloaded now if it must be; of a resumed run the commits it began with.
    again = [*(["--resume", str(run.folder)] if run else [display_path(recipe.path)]), *options.words()]
    recorded = run.identity.get("sources") if run else None
    sources = ensure_assets(recipe, os.environ, recorded, again, options.allow_changed_code)
    plan = with_sources(replace(plan, ports=ports), recipe, resources, sources)
    if plan.mode == EXTERNAL:
        from grpo_recipes.rollouts.external import connect  # imports torch

        connect(recipe, plan.model, os.environ)
    need_room(recipe, plan, names.run_dir)
    hooks = AllHooks()
    hook_lines = hooks.check(recipe, os.environ, names.run)
    resolve.make_logs()
    if run is not None:
        claimed = rundir.lock_run(run)
        # Requests to the attempt before; what comes from now on is to this one.
        rundir.remove_files(rundir.stop_file(run.folder), run.folder / rundir.NO_REQUEUE)
        OUTPUT.keep(run.folder)
        run = rundir.Run(run.folder)  # the launch that had it until now may have written plan.json since we looked
        verified_checkpoint(run.folder / "checkpoints", say)  # seconds for a large one: signals still end the launch
        resolve.need_same_world(run, plan)
        if note := resolve.need_same_data(run, recipe, plan):
            notes.append(note)
    stop.hold()
    if run is None:
        run, names = resolve.make_run(recipe, resources, names)
        claimed = rundir.lock_run(run)
        OUTPUT.keep(run.folder)
    plan = with_processes(plan, recipe, resources, os.environ, names, sources)
    plan.notes.extend(notes)
    record_assets(run, sources)
    attempt = prepare(run, recipe, plan, names, resources, workers, options.update_rewards)
    attempt.scratch.locks.append(os.dup(claimed))  # process guards hold the run while anything of it lives
    return replace(attempt, hooks=hooks, hook_lines=hook_lines)


def _dry_run(options: resolve.Options, resources: Resources) -> int:
    run, recipe = resolve.resolve_run(options, resources)
    names = resolve.names_of(recipe, run)
    sources = find_assets(recipe, os.environ, run.identity.get("sources") if run else None)
    plan = make_plan(recipe, resources, os.environ, names, sources)
    nowhere = Path(tempfile.gettempdir()) / "grpo-dry-run"
    shared = run_environment(os.environ, Scratch(nowhere, nowhere), names.run_dir, names.served)
    differences = {}
    for process in plan.processes:
        everyones = {**base_environment(os.environ), **shared, **wandb_environment(recipe)}
        wanted = process.full_environment(everyones)
        changed = {name: value for name, value in wanted.items() if os.environ.get(name) != value}
        removed = {name: "(removed)" for name in os.environ if name not in wanted}
        differences[process.name] = masked_environment({**changed, **removed})
    print(describe(plan, differences))
    return 0


def supervise(attempt: Attempt, stop: StopSignals) -> Ending:
    """Run the processes; however that ends, nothing of the run is left afterwards."""
    ending = Ending(1, "the launcher failed")
    try:
        stop.release(rundir.stop_file(attempt.run.folder))
        say_start(attempt)
        ending = make_smoke_task(attempt) or Supervisor(attempt, stop).run()
    except StoppedAtOnce as stopped:
        ending = stopped.ending()
    except ConfigError as error:
        ending = Ending(1, str(error.problems[0]))  # not 2, which says that nothing was started
    except Exception as error:
        print_line(traceback.format_exc(), error=True)
        ending = Ending(1, f"the launcher failed: {type(error).__name__}: {masked(str(error))}")
    finally:
        stop.ignore()
        OUTPUT.live("")
        ending = _ended_by_slurm(ending, stop)
        attempt.workers.close(ending)  # before the rest, which would take srun for one of ours
        end_descendants()
        shutil.rmtree(attempt.run.folder / rundir.SYNC_FOLDER, ignore_errors=True)
        attempt.scratch.remove()
        dismiss(attempt.run.folder)
    return ending


def _ended_by_slurm(ending: Ending, stop: StopSignals) -> Ending:
    """Blame SIGTERM, which Slurm sends to every process of the job, for whatever failed after it."""
    if signal.SIGTERM in stop.seen and ending.code not in (0, EXIT_STOPPED):
        return Ending(128 + signal.SIGTERM, "stopped by SIGTERM")
    return ending


def make_smoke_task(attempt: Attempt) -> Ending | None:
    """Make the built-in model and data that a recipe names, once: a recipe with a model of its own needs the data."""
    keys = ("model_name_or_path", "dataset_name", "eval_dataset_name")
    for name in dict.fromkeys(attempt.recipe[key] or "" for key in keys):
        if not name.startswith(SMOKE_SCHEME):
            continue
        folder, command = smoke_command(name, os.environ)
        if (folder / "COMPLETE").exists():
            continue
        say(f"making the smoke model and data in {display_path(folder)} (once, about a minute)")
        if code := subprocess.call(command, env=attempt.environment):
            return processes.ending_of("python -m grpo_recipes.smoke", code)
    return None


@dataclass
class Restarts:
    """Restarts of lost processes in one attempt, and their bounds, which count for each role."""

    most: int  # the recipe's server_restarts; 0 never restarts
    done: Counter[str] = field(default_factory=Counter)
    idle: set[str] = field(default_factory=set)  # roles that were started again since a step was completed
    stepped: bool = False  # whether a step was completed in this attempt

    def after(self, ending: Ending, stopping: bool) -> Ending:
        """Return the ending; where nothing is started again it has no ``lost``, and names the bound that forbids it."""
        lost = ending.lost
        if ending.renews:
            return ending
        # With that code a process refuses what it was given, which will be the same the next time.
        if lost is None or lost.on_loss == "fail" or stopping or self.most == 0 or ending.code == EXIT_CONFIG_ERROR:
            return replace(ending, lost=None)
        if ending.error and not self.stepped:
            why = "before the first step, so the next one would fail alike: it is not started again"
        elif self.done[lost.role] >= self.most:
            why = f"{lost.called} was started again {self.done[lost.role]} times already (server_restarts)"
        elif lost.role in self.idle:
            why = f"no step was completed since {lost.called} was started again"
        else:
            self.done[lost.role] += 1
            self.idle.add(lost.role)
            return ending
        return replace(ending, lost=None, cause=f"{ending.cause}; {why}")


class Supervisor:
    """The processes of an attempt, by their roles; what differs between roles is in the plan."""

    def __init__(self, attempt: Attempt, stop: StopSignals) -> None:
        self._attempt = attempt
        self._folder = attempt.run.folder
        self._monitor = Monitor(attempt, stop)
        self._groups = self._monitor.groups
        self._stopping = lambda: stop.requested
        self._restarts = Restarts(attempt.recipe["server_restarts"])
        self._epoch = 1  # of the server: every one that is started gets the next
        self._model: str | None = None  # that the trainer gave it
        self._trained = False  # whether the trainers have trained, and what only training needs is ended
        every = attempt.plan.processes
        order = TopologicalSorter({process.role: process.after for process in every}).static_order()
        planned = {role: [process for process in every if process.role == role] for role in order}
        self._planned = {role: members for role, members in planned.items() if members}

    def run(self) -> Ending:
        """Start the plan's processes and those that are lost again, until one of them ends the run."""
        become_subreaper()
        monitor = self._monitor
        while True:
            ending = self._start_missing()
            ending = ending or self._wait_for_ending()
            monitor.show_progress()
            if monitor.stepped:
                self._restarts.idle.clear()
                self._restarts.stepped = True
            ending = self._restarts.after(ending, self._stopping())
            if ending.lost is None:
                rundir.write_last_json(self._folder / rundir.SERVER_STATE, {"epoch": self._epoch, "state": "gone"})
                return ending
            again = self._going_with(ending.lost)
            if not ending.renews:
                self._note_restart(ending, again)
            for group in reversed(again):  # what was started last first
                self._end(group)
            if any(group.process.trains for group in again):
                self._trained = False
                verified_checkpoint(self._folder / "checkpoints", say)
                say(go_back(self._attempt.run))

    def _wait_for_ending(self) -> Ending:
        """Wait as ``processes.wait_for_ending`` does; end what only training needs once the trainers have trained.

        Environments would go on asking the server, and benchmarks share it with nobody.
        """
        running = self._running()

        def tick() -> Ending | None:
            """Look at the run as the monitor does, and whether the training is over."""
            ending = self._monitor.tick()
            over = [group for group in running if group.process.until_trained]
            if ending is None and over and not self._stopping() and has_trained(self._folder):
                self._trained = True
                say(f"training is over, ending {' and '.join(group.process.called for group in over)}")
                for group in reversed(over):
                    running.remove(group)
                    self._end(group)
            return ending

        return processes.wait_for_ending(running, tick, self._stopping)

    def _going_with(self, lost: Process) -> list[Group]:
        """Return what is ended and started again for a lost process: the rest of it, and trainers with what is theirs.

        Trainers begin again at the newest checkpoint, and nothing may go on that remembers them as they were.
        """
        with_trainers = lost.on_loss == "restart with trainers"
        running = ((group, group.process) for group in self._running())
        return [
            group
            for group, one in running
            if one.role == lost.role or (with_trainers and (one.trains or one.with_trainers))
        ]

    def _note_restart(self, ending: Ending, again: Sequence[Group]) -> None:
        """Print what is started again for what is lost, and count it in the summary."""
        lost = ending.lost
        assert lost is not None
        if lost.on_loss == "restart with trainers":
            others = [group.process.called for group in again if group.process.role != lost.role]
            if "trainers" not in others:  # they have not started yet
                others.append("trainers")
            names = [one.removeprefix("the ") for one in (lost.called, *others)]
            what = f"{', '.join(names[:-1])} and {names[-1]} are started again from the newest checkpoint"
        else:
            what = f"{lost.called} alone is started again"
        say(f"{ending.cause}: {what} ({self._restarts.done[lost.role]} of {self._restarts.most})")
        path = self._folder / "summary.json"
        summary = rundir.read_json(path)
        if lost.ready == "serving":
            counted: dict[str, Any] = {"server_restarts": summary.get("server_restarts", 0) + 1}
        else:
            of_others = summary.get("process_restarts", {})
            counted = {"process_restarts": {**of_others, lost.role: of_others.get(lost.role, 0) + 1}}
        rundir.write_json(path, {**summary, **counted})

    def _end(self, group: Group) -> None:
        """End what is left of a process; trainers that go on wait for the next server."""
        if group.process.ready == "serving":
            self._epoch += 1
            self._write_server_state("starting")  # before its end
        self._groups.pop(group.process.role).end()

    def _running(self) -> list[Group]:
        """Return what runs, in the plan's order: of two that are lost, the first is blamed."""
        return [self._groups[role] for role in self._planned if role in self._groups]

    def _start_missing(self) -> Ending | None:
        """Start what does not run, in the plan's order; return why the run ends, or what is lost, meanwhile."""
        for role in self._planned:
            if not self._is_missing(role):
                continue
            group = self._start(role)
            if group.process.ready != "started":
                for other in self._beside(role):
                    self._groups[other] = self._start(other)
                if ending := self._wait_until_ready(group.members[0]):
                    return ending
            self._groups[role] = group
        self._monitor.start_again()
        return None

    def _is_missing(self, role: str) -> bool:
        return role not in self._groups and not (self._trained and self._planned[role][0].until_trained)

    def _start(self, role: str) -> Group:
        """Start the processes of a role."""
        attempt = self._attempt
        if self._planned[role][0].ready == "serving":
            self._leave_taken_port()
            attempt.renew_token()  # a client may have sent the last one before it saw that the server had died
            self._write_server_state("starting")
        members = [self._with_newest_model(process) for process in self._planned[role]]
        return Group(
            [
                RemoteChild(attempt.workers, process) if process.node
                else Child(process, attempt.environment, self._folder, attempt.scratch)
                for process in members
            ]
        )  # fmt: skip

    def _leave_taken_port(self) -> None:
        """Move the server, which does not run now, to another port if another process listens on its own.

        A port that the user named is never replaced: that is a ConfigError, which ends the run.
        """
        host, before, _ = self._attempt.server_address()
        if not listening_sockets(host, before):
            return
        if self._attempt.recipe.is_set("vllm_server_port"):
            raise busy_port(self._attempt.recipe, "vllm_server_port", find_listener(before))
        port = reserve_other_port(host, before)
        holder = f"another process (pid {find_listener(before) or '?'})"
        say(f"port {before} (vllm_server_port) was taken by {holder}; using {port}")
        self._attempt.move_server(port)
        planned, self._planned = self._planned, {
            role: [with_server_port(process, host, before, port) for process in members]
            for role, members in self._planned.items()
        }  # fmt: skip
        # Trainers read the address from the server's state. Environments have it in their command.
        for group in reversed(self._running()):
            role = group.process.role
            if not group.process.trains and self._planned[role] != planned[role]:
                self._end(group)

    def _beside(self, role: str) -> list[str]:
        """Return what may start now that ``role`` has started and is not ready: it waits for that itself."""
        waiting = ((other, members[0]) for other, members in self._planned.items() if self._is_missing(other))
        return [other for other, one in waiting if role in one.beside and {*one.after} - {role} <= self._groups.keys()]

    def _with_newest_model(self, process: Process) -> Process:
        self._model = processes.newest_model(process, self._attempt.environment) or self._model
        if not process.renewed or self._model is None:
            return process
        index = process.argv.index("--model") + 1
        return replace(process, argv=[*process.argv[:index], self._model, *process.argv[index + 1 :]])

    def _wait_until_ready(self, started: Started) -> Ending | None:
        """Wait for a process; return why the run ends if it did not become ready, or another process ended first."""
        assert isinstance(started, Child)
        monitor, endings = self._monitor, list[Ending]()

        def alive() -> bool:
            reap()
            if ending := monitor.tick() or processes.find_ending(self._running(), self._stopping()):
                endings.append(ending)
            return not endings and started.alive()

        wait = self._wait_until_serving if started.process.ready == "serving" else self._wait_until_answering
        try:
            wait(alive, started)
        except NotReady as error:
            moves = started.process.ready == "serving" and not self._attempt.recipe.is_set("vllm_server_port")
            others_live = all(ending.lost == started.process for ending in endings)
            if isinstance(error, PortTaken) and moves and others_live:
                started.end()
                return Ending(1, str(error), log=started.log, lost=started.process)
            if not endings:
                return Ending(processes.ending_of("", started.state().exit).code or 1, str(error), log=started.log)
            if endings[0].lost:
                started.end()  # it is started anew after the one that was lost
            return endings[0]
        return None

    def _wait_until_serving(self, alive: Callable[[], bool], server: Child) -> None:
        attempt = self._attempt
        host, port, token = attempt.server_address()
        timeout, size = attempt.plan.server_timeout, attempt.plan.weight_bytes
        reads = f"reads {gigabytes(size)} of weights, " if size else ""
        say(f"waiting for the vLLM server, at most {timeout:.0f} s: it {reads}loads the model, compiles and warms up")
        waited = wait_until_ready(alive, server.guard_pid, host, port, attempt.names.served, token, timeout)
        self._write_server_state("ready", server.guard_pid)
        say(f"server ready after {waited:.0f} s on {host}:{port}")

    def _wait_until_answering(self, alive: Callable[[], bool], child: Child) -> None:
        url, who = child.process.ready_url, child.process.label
        waited = wait_until_answering(alive, child.guard_pid, url, who, MEETING_SECONDS)
        say(f"{who} ready after {waited:.0f} s on {urlsplit(url).netloc}")

    def _write_server_state(self, state: str, guard: int | None = None) -> None:
        host, port, _ = self._attempt.server_address()
        facts = {"url": f"http://{host}:{port}", "guard": guard, "model": self._model}
        known = {name: fact for name, fact in facts.items() if fact is not None}
        rundir.write_json(self._folder / rundir.SERVER_STATE, {"epoch": self._epoch, "state": state, **known})
