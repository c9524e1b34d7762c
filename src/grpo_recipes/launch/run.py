"""`grpo launch`: check and plan a run, run its processes, and end them. ``launch`` is the entry point.

``Supervisor`` starts the processes in the order of the plan and restarts lost processes if the plan allows it.
``supervise`` guarantees that no process of the run is left at the end.
"""

import os
import secrets
import shutil
import signal
import traceback
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from grpo_recipes.errors import EXIT_CONFIG_ERROR, EXIT_STOPPED, ConfigError
from grpo_recipes.fetch.assets import ensure_assets, record_assets
from grpo_recipes.fetch.built_in import create_smoke_task
from grpo_recipes.launch import processes, resolve, stages
from grpo_recipes.launch.attempt import (
    Attempt,
    end_without_attempt,
    finish_attempt,
    prepare_attempt,
    print_start,
    rewind_to_checkpoint,
)
from grpo_recipes.launch.dry_run import print_dry_run
from grpo_recipes.launch.hooks import AllHooks
from grpo_recipes.launch.monitor import Monitor, StoppedAtOnce, StopSignals
from grpo_recipes.launch.nodes import NodeWorkers, RemoteChild, preflight_nodes, serve_node
from grpo_recipes.launch.processes import Child, Ending, Group
from grpo_recipes.launch.readiness import NotReady, PortTaken, wait_until_answering, wait_until_ready
from grpo_recipes.launch.rendezvous import MeetingChannel
from grpo_recipes.launch.restarts import Restarts
from grpo_recipes.launch.server_starts import with_server_port, with_server_seed
from grpo_recipes.launch.verification import CheckpointsDamaged, Verification, require_checkpoint
from grpo_recipes.paths import display_path
from grpo_recipes.plan.commands import with_processes
from grpo_recipes.plan.devices import Resources, find_resources
from grpo_recipes.plan.disk_space import require_disk_space
from grpo_recipes.plan.plan import make_plan, with_sources
from grpo_recipes.plan.ports import choose_free_ports, find_listener, make_busy_port_error, reserve_other_port
from grpo_recipes.plan.preflight import require_packages
from grpo_recipes.plan.roles import remove_access_files
from grpo_recipes.plan.types import MEETING_SECONDS, Process
from grpo_recipes.process.listeners import find_listening_sockets
from grpo_recipes.process.reports import format_bytes, print_line, say
from grpo_recipes.process.terminal import OUTPUT
from grpo_recipes.process.tree import become_subreaper, end_descendants, reap
from grpo_recipes.process.waiting import wait_until
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.registry import EXTERNAL
from grpo_recipes.runs import rundir
from grpo_recipes.runs.benchmark import write_benchmark
from grpo_recipes.runs.checkpoints import find_verified_checkpoint
from grpo_recipes.runs.progress import has_trained
from grpo_recipes.runs.stop_request import read_request_times, remove_old_requests
from grpo_recipes.runs.trace import LAUNCHER, Trace
from grpo_recipes.secrets import mask_secrets
from grpo_recipes.smoke import SMOKE_SCHEME

_PORT_SECONDS = 5.0  # a server's port is free within this time after the end of its processes


def launch(options: resolve.Options, resources: Resources | None = None) -> int:
    """Run a recipe and return its exit code: 0, 75 (stopped and saved), the code of the first failed rank, or 128+n.

    The recipes in ``options.then`` follow in order as long as the code is 0. ``resources`` are by default the resources
    of this machine. With ``options.dry_run``, only print the plans, and return the first code. Raise ConfigError before
    anything starts if a recipe, a flag or the environment is wrong.
    """
    resources = resources or find_resources(os.environ)
    later_stages = stages.list_later_stages(options, resources)
    code, run = _launch_one(options, resources)
    while code == 0 and run is not None and (stage := stages.next_stage(run, options)):
        options = stage
        code, run = _launch_one(options, resources)
    for stage in later_stages if options.dry_run else ():
        _launch_one(stage, resources)
    return code


def _launch_one(options: resolve.Options, resources: Resources) -> tuple[int, rundir.Run | None]:
    """Run one recipe, and return its exit code and its run. With ``options.dry_run``, only print the plan.

    On a node that joins another node's run, run the node worker instead. The run is None if there is no run directory.
    """
    trace = Trace(LAUNCHER)
    trace.enter("check")
    run: rundir.Run | None = None
    recipe: Recipe | None = None
    meeting, channel = options.meeting, None
    if meeting is not None:
        resources = resources if resources.nodes else resources.on_nodes(meeting.nodes)
        channel = MeetingChannel(meeting, options.as_json())
    if options.dry_run:
        return print_dry_run(options, resources), None
    if meeting is not None and meeting.rank > 0:
        run, recipe = resolve.resolve_run(options, resources)  # raises the errors of node 0 early
        is_finished = run is not None and resolve.is_finished(run, recipe, options)
        return 0 if is_finished else serve_node(meeting, options.as_json()), None
    with OUTPUT.store_lines(), StopSignals() as stop, closing(NodeWorkers(len(resources.nodes), channel)) as workers:
        try:
            run, recipe = resolve.resolve_run(options, resources)
            if run and resolve.is_finished(run, recipe, options):
                if options.benchmark:
                    print_line("\n".join(write_benchmark(run)))
                return 0, run
            attempt = _prepare_launch(run, recipe, options, resources, stop, workers, trace)
        except StoppedAtOnce as stopped:
            ending = stopped.ending()
            workers.close(ending)
            return end_without_attempt(ending, stop.wants_requeue, resources.job, run, recipe), None
        try:
            ending = supervise(attempt, stop)
        except CheckpointsDamaged:
            attempt.restore_summary()
            raise
        if ending.code == 0 and (stop.received or stop.requested) and attempt.run.identity.get("then"):
            ending = Ending(EXIT_STOPPED, "stopped on request before the next recipe")
        outcome = finish_attempt(attempt, ending, stop.wants_requeue, resources.job, options.benchmark)
        os.close(attempt.lock)  # the run is over, also while the next recipe runs
        return outcome.code, attempt.run


def _prepare_launch(
    run: rundir.Run | None, recipe: Recipe, options: resolve.Options, resources: Resources, stop: StopSignals,
    workers: NodeWorkers, trace: Trace,
) -> Attempt:  # fmt: skip
    """Check and plan the run, then create the run directory and everything that the processes need.

    ``run`` is the run to resume, or None for a new run. Missing models and datasets are downloaded. Signals are
    deferred from the moment when the run directory is created. Raise ConfigError if a check fails.
    """
    names = resolve.choose_names(recipe, run)
    old_requests = read_request_times(run.folder) if run else {}  # later ones are for this attempt
    trace.enter("check nodes")
    resources = preflight_nodes(workers, resources, os.environ, names.run_dir.parent)
    trace.enter("plan")
    plan = make_plan(recipe, resources, os.environ)
    require_packages(plan.mode)
    is_port_free = workers.make_port_checker(plan.placement[0].node)
    ports, notes = choose_free_ports(recipe, plan.ports, plan.server_host, is_port_free, plan.mode == "server")
    resolve.require_tracker_access(recipe, os.environ)
    # Missing models and datasets are downloaded now. A resumed run uses the commits that it started with.
    arguments = [*(["--resume", str(run.folder)] if run else [display_path(recipe.path)]), *options.words()]
    recorded = run.identity.get("sources") if run else None
    trace.enter("fetch")
    sources = ensure_assets(recipe, os.environ, recorded, arguments, options.allow_changed_code)
    plan = with_sources(replace(plan, ports=ports), recipe, resources, sources)
    if plan.mode == EXTERNAL:
        from grpo_recipes.rollouts.external import connect  # imports torch

        connect(recipe, plan.model, os.environ)
    trace.enter("create the run")
    require_disk_space(recipe, plan, names.run_dir)
    hooks = AllHooks()
    hook_lines = hooks.check(recipe, os.environ, names.run)
    resolve.create_log_folders()
    if run is not None:
        lock = rundir.lock_run(run)
        remove_old_requests(run.folder, old_requests)
        OUTPUT.start_log(run.folder)
        run = rundir.Run(run.folder)  # read again, because the previous launch may have written plan.json since
        require_checkpoint(run.folder / "checkpoints")
        resolve.require_same_world_size(run, plan)
        if note := resolve.require_same_data_order(run, recipe, plan):
            notes.append(note)
    stop.defer()
    if run is None:
        facts = {**resources.facts(), **stages.describe_later_recipes(options, resources.device)}
        run, names = resolve.create_run(recipe, facts, names)
        if options.previous is not None:
            rundir.write_json(Path(options.previous) / stages.NEXT_RUN, {"run": str(run.folder)})
        lock = rundir.lock_run(run)
        OUTPUT.start_log(run.folder)
    plan = with_processes(plan, recipe, resources, os.environ, names, sources)
    plan.notes.extend(notes)
    record_assets(run, sources)
    attempt = prepare_attempt(run, recipe, plan, names, resources, workers, options.update_rewards)
    attempt.scratch.locks.append(os.dup(lock))  # process guards hold the run's lock while a process of it lives
    trace.open(run.folder)
    return replace(attempt, lock=lock, hooks=hooks, hook_lines=hook_lines, trace=trace)


def supervise(attempt: Attempt, stop: StopSignals) -> Ending:
    """Run the processes of an attempt and return how they ended.

    The only failure that raises an exception is CheckpointsDamaged: no trainer has started then.
    At the end, no process and no scratch folder of the run is left, also on other nodes. The clean-up ignores signals.
    """
    ending = Ending(1, "the launcher failed")
    try:
        stop.resume(rundir.stop_file(attempt.run.folder))
        print_start(attempt)
        ending = make_smoke_task(attempt, stop) or Supervisor(attempt, stop).run()
    except StoppedAtOnce as stopped:
        ending = stopped.ending()
    except CheckpointsDamaged as error:
        ending = Ending(EXIT_CONFIG_ERROR, str(error))  # for the workers of other nodes
        raise
    except ConfigError as error:
        ending = Ending(1, str(error.problems[0]))  # not exit code 2, which means that no training started
    except Exception as error:
        print_line(traceback.format_exc(), error=True)
        ending = Ending(1, f"the launcher failed: {type(error).__name__}: {mask_secrets(str(error))}")
    finally:
        stop.ignore()
        OUTPUT.show_live("")
        attempt.trace.enter("end processes")
        if signal.SIGTERM in stop.received and ending.code not in (0, EXIT_STOPPED):
            # Slurm sends SIGTERM to every process of the job, so the failure is only its effect.
            ending = Ending(128 + signal.SIGTERM, "stopped by SIGTERM")
        attempt.workers.close(ending)  # first, because ``end_descendants`` would kill srun
        end_descendants()
        shutil.rmtree(attempt.run.folder / rundir.SYNC_FOLDER, ignore_errors=True)
        attempt.scratch.remove()
        remove_access_files(attempt.run.folder)
        attempt.trace.leave_all()
    return ending


def make_smoke_task(attempt: Attempt, stop: StopSignals) -> Ending | None:
    """Create the recipe's built-in smoke models and data if they are missing. Return an ending on failure, or None.

    Raise StoppedAtOnce after a request to stop.
    """
    keys = ("model_name_or_path", "dataset_name", "eval_dataset_name")
    for name in dict.fromkeys(attempt.recipe[key] or "" for key in keys):
        if name.startswith(SMOKE_SCHEME):
            attempt.trace.enter("create the smoke model")
            if code := create_smoke_task(name, attempt.environment, stop.check):
                return processes.ending_from_exit("python -m grpo_recipes.smoke", code)
    return None


class Supervisor:
    """Start, restart and end the processes of an attempt; the plan describes how the roles differ."""

    def __init__(self, attempt: Attempt, stop: StopSignals) -> None:
        """Sort the roles of the plan, so that each comes after the roles it waits for; start nothing yet."""
        self._attempt = attempt
        self._folder = attempt.run.folder
        self._monitor = Monitor(attempt, stop)
        self._groups = self._monitor.groups
        self._stopping = lambda: stop.requested
        self._restarts = Restarts(attempt.recipe.server.restarts)
        self._verification = Verification(attempt.run.folder / "checkpoints")
        self._epoch = 1  # number of the current server; each new server gets the next number
        self._model: str | None = None  # the newest model from the trainer for the server
        self._trained = False  # whether training is over and processes that only training needs have ended
        plan_processes = attempt.plan.processes
        order = TopologicalSorter({process.role: process.after for process in plan_processes}).static_order()
        planned = {role: [process for process in plan_processes if process.role == role] for role in order}
        self._planned = {role: members for role, members in planned.items() if members}

    def run(self) -> Ending:
        """Start the processes, restart lost ones, and return how the run ended; other processes may still run then."""
        become_subreaper()
        with self._verification:
            return self._run_to_the_end()

    def _run_to_the_end(self) -> Ending:
        """Start the processes and restart lost ones; return how the run ended."""
        monitor = self._monitor
        while True:
            ending = self._start_missing()
            ending = ending or self._wait_for_ending()
            monitor.print_progress()
            if monitor.stepped:
                self._restarts.idle.clear()
                self._restarts.stepped = True
            ending = self._restarts.decide(ending, self._stopping())
            if ending.lost is None:
                rundir.write_last_json(self._folder / rundir.SERVER_STATE, {"epoch": self._epoch, "state": "gone"})
                return ending
            lost, with_trainers = ending.lost, ending.lost.on_loss == "restart with trainers"
            # A companion (``with_trainers``) remembers later state than the checkpoint from which trainers restart.
            restarting = [
                group
                for group in self._list_running()
                if group.process.role == lost.role
                or (with_trainers and (group.process.trains or group.process.with_trainers))
            ]
            if not ending.renews:
                self._record_restart(ending, restarting)
            for group in reversed(restarting):  # in the reverse order of the start
                self._end_group(group)
            if any(group.process.trains for group in restarting):
                self._trained = False
                find_verified_checkpoint(self._folder / "checkpoints", say)
                say(rewind_to_checkpoint(self._attempt.run))

    def _wait_for_ending(self) -> Ending:
        """Wait for an ending; when training is over, end processes that only training needs.

        Environments would otherwise send requests to the server while it runs benchmarks.
        """
        running = self._list_running()

        def tick() -> Ending | None:
            """Return the ending that the monitor finds, or None. If training is over, end what only training needs."""
            ending = self._monitor.tick()
            training_only = [group for group in running if group.process.until_trained]
            if ending is None and training_only and not self._stopping() and has_trained(self._folder):
                self._trained = True
                say(f"training is over, ending {' and '.join(group.process.called for group in training_only)}")
                for group in reversed(training_only):
                    running.remove(group)
                    self._end_group(group)
            return ending

        return processes.wait_for_ending(running, tick, self._stopping)

    def _record_restart(self, ending: Ending, restarting: Sequence[Group]) -> None:
        """Print which groups restart because of an ending, and count the restart in the summary."""
        lost = ending.lost
        assert lost is not None
        if lost.on_loss == "restart with trainers":
            companions = [group.process.called for group in restarting if group.process.role != lost.role]
            if "trainers" not in companions:  # they have not started yet
                companions.append("trainers")
            names = [name.removeprefix("the ") for name in (lost.called, *companions)]
            action = f"{', '.join(names[:-1])} and {names[-1]} are started again from the newest checkpoint"
        else:
            action = f"only {lost.called} is started again"
        say(f"{ending.cause}: {action} ({self._restarts.counts[lost.role]} of {self._restarts.limit})")
        path = self._folder / "summary.json"
        summary = rundir.read_json(path)
        if lost.ready == "serving":
            counts: dict[str, Any] = {"server_restarts": summary.get("server_restarts", 0) + 1}
        else:
            by_role = summary.get("process_restarts", {})
            counts = {"process_restarts": {**by_role, lost.role: by_role.get(lost.role, 0) + 1}}
        rundir.write_json(path, {**summary, **counts})

    def _end_group(self, group: Group) -> None:
        """End the processes of a group; for a server, first write the state "starting", so that trainers wait."""
        if group.process.ready == "serving":
            self._epoch += 1
            self._write_server_state("starting")  # first, so that trainers wait instead of failing
        self._groups.pop(group.process.role).end()
        self._attempt.trace.enter("", group.process.track)

    def _list_running(self) -> list[Group]:
        """Return the running groups in the order of the plan; if two are lost, the first is blamed."""
        return [self._groups[role] for role in self._planned if role in self._groups]

    def _start_missing(self) -> Ending | None:
        """Start the missing groups in the order of the plan, and wait for each group that must be ready.

        Return an ending if a process fails before all groups have started, else None.
        """
        for role in self._planned:
            if not self._is_missing(role):
                continue
            self._attempt.trace.enter(f"start {self._planned[role][0].track}")
            group = self._start_role(role)
            if group.process.ready != "started":
                # Roles that wait for this one themselves may start before it is ready.
                missing = [(name, members[0]) for name, members in self._planned.items() if self._is_missing(name)]
                ready = set(self._groups)
                for name, process in missing:
                    if role in process.beside and {*process.after} - {role} <= ready:
                        self._groups[name] = self._start_role(name)
                if ending := self._wait_until_ready(group):
                    return ending
            self._groups[role] = group
        self._monitor.reset()
        self._attempt.trace.enter("train")
        return None

    def _is_missing(self, role: str) -> bool:
        """Return whether a role does not run, and training, if only that needs the role, is not over."""
        return role not in self._groups and not (self._trained and self._planned[role][0].until_trained)

    def _start_role(self, role: str) -> Group:
        """Start the processes of a role on their nodes and return them as a group.

        For trainers, first wait until the checkpoint of a resumed run is verified, and rewind the run if it is damaged.
        For a server, first write a new token to every node's token file, and the state "starting" to the run directory.
        If another process listens on its port, the server moves to another port. Raise ConfigError if the user set it.
        """
        attempt = self._attempt
        if self._planned[role][0].trains and self._verification.wait(self._monitor.tick):
            attempt.rewind()
        if self._planned[role][0].ready == "serving":
            self._leave_taken_port()
            token = secrets.token_hex(16)  # a client may have sent the old token to a foreign listener
            attempt.scratch.write_token(token)
            attempt.workers.send("token", token=token)
            self._write_server_state("starting")
        start = attempt.first_step, self._epoch
        members = [with_server_seed(self._with_newest_model(process), *start) for process in self._planned[role]]
        attempt.trace.enter("run" if members[0].ready == "started" else "start", members[0].track)
        return Group(
            [
                RemoteChild(attempt.workers, process) if process.node
                else Child(process, attempt.environment, self._folder, attempt.scratch)
                for process in members
            ]
        )  # fmt: skip

    def _leave_taken_port(self) -> None:
        """Move the server, which does not run now, to another port if another process listens on its port.

        Environments end, to restart with the new port. Trainers continue. Raise ConfigError if the user set the port.
        """
        host, old_port, _ = self._attempt.server_address()
        # vLLM's engines share the socket of their server. On a busy machine, the old ones may end a little later.
        if wait_until(lambda: not find_listening_sockets(host, old_port), _PORT_SECONDS):
            return
        if self._attempt.recipe.is_set("vllm_server_port"):
            raise make_busy_port_error(self._attempt.recipe, "vllm_server_port", find_listener(old_port))
        port = reserve_other_port(host, old_port)
        holder = f"another process (pid {find_listener(old_port) or '?'})"
        say(f"port {old_port} (vllm_server_port) was taken by {holder}; using {port}")
        self._attempt.move_server(port)
        planned, self._planned = self._planned, {
            role: [with_server_port(process, host, old_port, port) for process in members]
            for role, members in self._planned.items()
        }  # fmt: skip
        for group in reversed(self._list_running()):
            role = group.process.role
            if not group.process.trains and self._planned[role] != planned[role]:
                self._end_group(group)

    def _with_newest_model(self, process: Process) -> Process:
        """If a process restarts with new models, return it with the trainer's newest saved model as ``--model``.

        Other processes are returned unchanged, and all processes as long as the trainer has not saved a model.
        """
        self._model = processes.find_newest_model(process, self._attempt.environment) or self._model
        if not process.renewed or self._model is None:
            return process
        index = process.argv.index("--model") + 1
        return replace(process, argv=[*process.argv[:index], self._model, *process.argv[index + 1 :]])

    def _wait_until_ready(self, group: Group) -> Ending | None:
        """Wait until a group is ready and return None, or return an ending if it or another process ends first.

        If another process took the server's port and the recipe does not set it, the ending has the server as ``lost``.
        """
        started, headless = group.members[0], [Group(members) for members in (group.members[1:],) if members]
        assert isinstance(started, Child)
        monitor, endings = self._monitor, list[Ending]()

        def alive() -> bool:
            """Return whether the process and all others run; add the ending of another process to ``endings``."""
            reap()
            if ending := monitor.tick() or processes.find_ending([*self._list_running(), *headless], self._stopping()):
                endings.append(ending)
            return not endings and started.alive()

        wait = self._wait_until_serving if started.process.ready == "serving" else self._wait_until_answering
        try:
            wait(alive, started)
        except NotReady as error:
            can_move = started.process.ready == "serving" and not self._attempt.recipe.is_set("vllm_server_port")
            if isinstance(error, PortTaken) and can_move and all(ending.lost == started.process for ending in endings):
                group.end()
                return Ending(1, str(error), log=started.log, lost=started.process)
            if not endings:
                code = processes.ending_from_exit("", started.state().exit).code or 1
                return Ending(code, str(error), log=started.log)
            if lost := endings[0].lost:
                group.end()  # it is started again after the lost process
            if lost and lost.role == started.process.role:  # its engines on another node were never ready
                return replace(endings[0], cause=f"{error}: {endings[0].cause}", lost=None)
            return endings[0]
        self._attempt.trace.enter("run", started.process.track)
        return None

    def _wait_until_serving(self, alive: Callable[[], bool], server: Child) -> None:
        """Wait until vLLM serves, and write its state "ready". Raise NotReady if it is late or ``alive()`` is false."""
        attempt = self._attempt
        host, port, token = attempt.server_address()
        timeout, size = attempt.plan.server_timeout, attempt.plan.weight_bytes
        reads = f"reads {format_bytes(size)} of weights, " if size else ""
        say(f"waiting for the vLLM server, at most {timeout:.0f} s: it {reads}loads the model, compiles and warms up")
        waited = wait_until_ready(alive, server.guard_pid, host, port, attempt.names.served, token, timeout)
        self._write_server_state("ready", server.guard_pid)
        say(f"server ready after {waited:.0f} s on {host}:{port}")

    def _wait_until_answering(self, alive: Callable[[], bool], child: Child) -> None:
        """Wait until a process answers at its ``ready_url``. Raise NotReady if it ends or does not answer in time."""
        url, name = child.process.ready_url, child.process.label
        waited = wait_until_answering(alive, child.guard_pid, url, name, MEETING_SECONDS)
        say(f"{name} ready after {waited:.0f} s on {urlsplit(url).netloc}")

    def _write_server_state(self, state: str, guard: int | None = None) -> None:
        """Write the server's address, epoch, model and state for its clients; ``guard`` is the pid of its guard."""
        host, port, _ = self._attempt.server_address()
        facts = {"url": f"http://{host}:{port}", "guard": guard, "model": self._model}
        known_facts = {name: fact for name, fact in facts.items() if fact is not None}
        rundir.write_json(self._folder / rundir.SERVER_STATE, {"epoch": self._epoch, "state": state, **known_facts})
