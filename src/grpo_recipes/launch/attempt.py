"""One attempt at a run: what is made before any process starts, and what is said of it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from grpo_recipes.errors import ConfigError
from grpo_recipes.launch.freeze import SUBMITTED, keep
from grpo_recipes.launch.nodes import Agents
from grpo_recipes.launch.resolve_run import note_job
from grpo_recipes.paths import shown
from grpo_recipes.plan.devices import Resources
from grpo_recipes.plan.environment import base_environment, run_environment, wandb_environment
from grpo_recipes.plan.types import Names, Plan
from grpo_recipes.process.reports import say
from grpo_recipes.process.scratch import Scratch, make_scratch, remove_dead_scratch
from grpo_recipes.publish.publisher import Publisher
from grpo_recipes.recipe import Recipe
from grpo_recipes.runs.checkpoints import newest_complete, step_of
from grpo_recipes.runs.rundir import Run, move_rows_after, no_requeue_file, read_json, stop_file, write_json


@dataclass
class Attempt:
    """One attempt at a run: what is read, planned and made before any process starts.

    Attributes:
        run: the run directory.
        recipe: the recipe it goes by.
        plan: the plan of its processes.
        names: what it is called.
        scratch: node-local folders.
        environment: variables of every process.
        resumed: where it goes on, empty for a new run.
        first_step: step of the checkpoint it begins with, 0 without one.
        agents: what runs the processes of other nodes.
        publisher: publishes checkpoints and the final model, None without push_to_hub.
    """

    run: Run
    recipe: Recipe
    plan: Plan
    names: Names
    scratch: Scratch
    environment: dict[str, str]
    resumed: str
    agents: Agents
    first_step: int = 0
    publisher: Publisher | None = None

    def server_address(self) -> tuple[str, int, str]:
        """Host, port and token of the server."""
        return self.plan.server_host, self.plan.ports.server, self.scratch.token.read_text()


def prepare(run: Run, recipe: Recipe, plan: Plan, names: Names, resources: Resources, agents: Agents) -> Attempt:
    """Freeze recipe and plan in the run directory; make each node's scratch folders and the token.

    Raises:
        ConfigError: a node did not answer; no attempt has begun.
    """
    plan = replace(plan, processes=[replace(process, log=new_log(process.log)) for process in plan.processes])
    keep(run, recipe, plan)
    for record in (run.folder / "processes").glob("*.json"):
        record.unlink()
    for request in (stop_file(run.folder), no_requeue_file(run.folder)):
        request.unlink(missing_ok=True)
    if resources.job is not None:
        note_job(run.folder, recipe, resources.job.name)
    before = read_json(run.folder / "summary.json")
    if before and before["status"] == SUBMITTED:
        before = None  # nothing has run yet
    kept = {key: before[key] for key in ("idle_attempts", "server_restarts") if before and key in before}
    restarts = before["restarts"] + 1 if before else 0
    if removed := remove_dead_scratch(os.environ):
        say(removed)
    scratch = make_scratch(os.environ)
    tracking = {**wandb_environment(recipe), "WANDB_RUN_ID": run.identity["wandb_id"], "WANDB_RESUME": "allow"}
    environment = {
        **base_environment(os.environ),
        **run_environment(os.environ, scratch, run.folder, names.served),
        **tracking,
    }
    try:
        agents.begin(run.folder, names.served, scratch.token.read_text(), tracking)
    except ConfigError:
        scratch.remove()
        raise
    write_json(run.folder / "summary.json", {"status": "running", "smoke": plan.smoke, "restarts": restarts, **kept})
    resumed = go_back(run) if before else ""
    return Attempt(run, recipe, plan, names, scratch, environment, resumed, agents, newest_step(run))


def new_log(name: str) -> str:
    """Make an empty log of that name, or with a number behind it: two attempts can begin in one second."""
    path = Path(name)
    for number in range(2, 1000):
        try:
            path.touch(exist_ok=False)
            break
        except FileExistsError:
            path = Path(name).with_stem(f"{Path(name).stem}-{number}")
    return str(path)


def newest_step(run: Run) -> int:
    """The step of the newest complete checkpoint, 0 without one."""
    checkpoint = newest_complete(run.folder / "checkpoints")
    return step_of(checkpoint) if checkpoint else 0


def go_back(run: Run) -> str:
    """Go back to the newest checkpoint: forget the ranks that were, and move aside the rows that will be redone.

    Returns:
        Where the run goes on, for the person who watches.
    """
    for name in ("rank_*.json", "phase_*.json"):
        for record in (run.folder / "processes").glob(name):
            record.unlink()
    checkpoint = newest_complete(run.folder / "checkpoints")
    moved = move_rows_after(run.folder, newest_step(run))
    where = f"resuming from {checkpoint.name}" if checkpoint else "no complete checkpoint: starting again from step 0"
    return f"{where}; {moved} later rows of metrics.jsonl moved to metrics.redone.jsonl"


def say_start(attempt: Attempt) -> None:
    """Say what begins: the recipe and its run directory, the batch, notes, where it goes on, and the logs."""
    plan = attempt.plan
    smoke = "smoke test on CPU, not an experiment: " if plan.smoke else ""
    say(f"{smoke}{shown(plan.recipe)} -> {shown(attempt.run.folder)}")
    if plan.maxent:
        say(f"objective {plan.maxent}")
    say(f"batch {plan.batch}")
    say(f"vllm {plan.mode}, weights by {plan.bridge or 'none'} ({plan.why_bridge})")
    for note in plan.notes:
        say(f"note: {note}")
    if attempt.publisher:
        say(f"publishing in {attempt.publisher}")
    if attempt.resumed:
        say(attempt.resumed)
    for process in plan.processes:
        say(f"{process.role} log {process.log}")
