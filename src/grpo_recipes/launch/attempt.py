"""One attempt at a run: what is made before any process starts, and what is said of it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from grpo_recipes.launch.checkpoints import newest_complete, step_of
from grpo_recipes.launch.environment import (
    Scratch,
    base_environment,
    make_scratch,
    run_environment,
    wandb_environment,
)  # fmt: skip
from grpo_recipes.launch.plan import Names, Plan
from grpo_recipes.launch.resources import Resources
from grpo_recipes.launch.rundir import Run, move_rows_after, read_json, stop_file, write_json
from grpo_recipes.launch.say import say
from grpo_recipes.launch.settle import job_pointer
from grpo_recipes.paths import shown
from grpo_recipes.publish.publisher import Publisher
from grpo_recipes.recipe import Recipe
from grpo_recipes.rewards.load import keep_rewards
from grpo_recipes.user_code import copy_source


@dataclass
class Attempt:
    """One attempt at a run: what is read, planned and made before any process starts."""

    run: Run
    recipe: Recipe
    plan: Plan
    names: Names
    scratch: Scratch
    environment: dict[str, str]
    resumed: str
    publisher: Publisher | None = None


def prepare(run: Run, recipe: Recipe, plan: Plan, names: Names, resources: Resources) -> Attempt:
    """Freeze recipe and plan in the run directory; make the scratch folder and the token."""
    (run.folder / "recipe.yaml").write_text(recipe.as_yaml())
    for spec in recipe["callbacks"]:
        copy_source(spec, run.folder / "callbacks")
    plan.notes.extend(keep_rewards(recipe["reward_funcs"], run.folder))
    write_json(run.folder / "plan.json", plan.as_json())
    for record in (run.folder / "processes").glob("*.json"):
        record.unlink()
    stop_file(run.folder).unlink(missing_ok=True)
    if resources.job is not None:
        pointer = job_pointer(resources, recipe)
        pointer.parent.mkdir(exist_ok=True)
        pointer.write_text(str(run.folder))
    before = read_json(run.folder / "summary.json")
    write_json(
        run.folder / "summary.json",
        {"status": "running", "smoke": plan.smoke, "restarts": before["restarts"] + 1 if before else 0},
    )
    scratch = make_scratch(os.environ)
    environment = {
        **base_environment(os.environ),
        **run_environment(os.environ, scratch, run.folder, names.served),
        **wandb_environment(recipe),
        "WANDB_RUN_ID": run.identity["wandb_id"],
        "WANDB_RESUME": "allow",
    }
    return Attempt(run, recipe, plan, names, scratch, environment, _rewind(run) if before else "")


def _rewind(run: Run) -> str:
    """Move aside the rows of metrics that will be redone, and say where the run goes on."""
    checkpoint = newest_complete(run.folder / "checkpoints")
    moved = move_rows_after(run.folder, step_of(checkpoint) if checkpoint else 0)
    where = f"resuming from {checkpoint.name}" if checkpoint else "no complete checkpoint: starting again from step 0"
    return f"{where}; {moved} later rows of metrics.jsonl moved to metrics.redone.jsonl"


def say_start(attempt: Attempt) -> None:
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
