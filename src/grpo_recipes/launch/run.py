"""`grpo launch`: preflight, processes, and their end. Reads top to bottom in ``launch``."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path

from grpo_recipes.errors import config_error
from grpo_recipes.fetch.assets import find_assets, need_assets, record_assets
from grpo_recipes.launch import resolve
from grpo_recipes.launch.attempt import Attempt, end_without_run, finish, prepare
from grpo_recipes.launch.nodes import NodeWorkers, preflight_nodes
from grpo_recipes.launch.resolve import Options, names_of
from grpo_recipes.launch.signals import StoppedAtOnce, StopSignals
from grpo_recipes.launch.supervisor import supervise
from grpo_recipes.paths import shown
from grpo_recipes.plan.commands import base_environment, run_environment, wandb_environment, with_processes
from grpo_recipes.plan.devices import Resources, find_resources
from grpo_recipes.plan.estimates import need_room
from grpo_recipes.plan.plan import describe, make_plan, with_sources
from grpo_recipes.plan.ports import free_ports
from grpo_recipes.process.reports import say
from grpo_recipes.process.scratch import Scratch
from grpo_recipes.publish.publisher import Publisher
from grpo_recipes.publish.push import need_target
from grpo_recipes.runs.checkpoints import verified_checkpoint
from grpo_recipes.runs.rundir import Run, claim
from grpo_recipes.secrets import masked_environment


def launch(options: Options) -> int:
    """Run a recipe to its end and return the exit code.

    That is 0, 75 when it was stopped with its state saved, the first failed rank's, or 128+n for a signal. Where the
    recipe, a flag or the environment is wrong, a ConfigError is raised and nothing was started.
    """
    resources = find_resources(os.environ)
    if options.dry_run:
        return _dry_run(options, resources)
    with StopSignals() as stop, NodeWorkers(len(resources.nodes)) as workers:
        try:
            attempt = _prepare(options, resources, stop, workers)
        except StoppedAtOnce as stopped:
            return end_without_run(stopped.ending(), stop.wants_requeue, resources.job)
        ending = supervise(attempt, stop)
        return finish(attempt, ending, stop.wants_requeue, resources.job)


def _prepare(options: Options, resources: Resources, stop: StopSignals, workers: NodeWorkers) -> Attempt:
    """Check and plan, then make the run directory and all that the processes need."""
    run, recipe = resolve.resolve_run(options, resources)
    names = names_of(recipe, run)
    resources = preflight_nodes(workers, resources, os.environ)
    plan = make_plan(recipe, resources, os.environ)
    ports, notes = free_ports(recipe, plan.ports, plan.server_host)
    resolve.need_wandb_route(recipe, os.environ)
    # Downloaded now if it must be; of a resumed run the commits it began with.
    again = [*(["--resume", str(run.folder)] if run else [shown(recipe.path)]), *options.flags]
    recorded = run.identity.get("sources") if run else None
    sources = need_assets(recipe, os.environ, recorded, again, options.allow_changed_code)
    plan = with_sources(replace(plan, ports=ports), sources)
    need_room(recipe, plan, names.run_dir)
    target = need_target(recipe, os.environ, names.run)
    try:
        Path("logs").mkdir(exist_ok=True)
    except OSError as error:
        what = f"cannot make the folder logs here ({error.strerror})"
        raise config_error("working folder", what, "launch from a folder you may write to") from None
    if run is not None:
        claim(run)
        run = Run(run.folder)  # the launch that had it until now may have written plan.json since we looked
        verified_checkpoint(run.folder / "checkpoints", say)  # seconds for a large one: signals still end the launch
        resolve.need_same_world(run, plan)
        if note := resolve.need_same_data(run, recipe, plan):
            notes.append(note)
    stop.hold()
    if run is None:
        run, names = resolve.make_run(recipe, resources, names)
        claim(run)
    plan = with_processes(plan, recipe, resources, os.environ, names, sources)
    plan.notes.extend(notes)
    record_assets(run, sources)
    attempt = prepare(run, recipe, plan, names, resources, workers)
    attempt.publisher = Publisher(target, run.folder, os.environ, say) if target else None
    return attempt


def _dry_run(options: Options, resources: Resources) -> int:
    run, recipe = resolve.resolve_run(options, resources)
    names = names_of(recipe, run)
    sources = find_assets(recipe, os.environ, run.identity.get("sources") if run else None)
    plan = make_plan(recipe, resources, os.environ, names, sources)
    nowhere = Path(tempfile.gettempdir()) / "grpo-dry-run"
    shared = run_environment(os.environ, Scratch(nowhere, nowhere), names.run_dir, names.served)
    differences = {}
    for process in plan.processes:
        wanted = {**base_environment(os.environ), **shared, **wandb_environment(recipe), **process.environment}
        changed = {name: value for name, value in wanted.items() if os.environ.get(name) != value}
        removed = {name: "(removed)" for name in os.environ if name not in wanted}
        differences[process.name] = masked_environment({**changed, **removed})
    print(describe(plan, differences))
    return 0
