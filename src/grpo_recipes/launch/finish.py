"""The end of a run: summary, report, and the last lines said."""

from __future__ import annotations

import shlex
import sys

from grpo_recipes.errors import EXIT_STOPPED
from grpo_recipes.launch.attempt import Attempt, newest_step
from grpo_recipes.launch.supervisor import Ending, tail
from grpo_recipes.paths import shown
from grpo_recipes.process.reports import say
from grpo_recipes.publish.publisher import hand_over
from grpo_recipes.report.single import report_line
from grpo_recipes.runs.advice import advice
from grpo_recipes.runs.checkpoints import newest_complete
from grpo_recipes.runs.health import notices_of
from grpo_recipes.runs.rundir import finish_summary, no_requeue_file, read_json, read_metrics
from grpo_recipes.slurm.job import SlurmJob, requeue, why_no_requeue
from grpo_recipes.stats import result_line


def finish(attempt: Attempt, ending: Ending, wants_requeue: bool, job: SlurmJob | None) -> int:
    """Write the summary, say how it ended, have the job started again where that is due, and return the code.

    Args:
        attempt: the attempt that ended.
        ending: how.
        wants_requeue: whether it was asked to save and go on in a new attempt.
        job: the Slurm job, or None.
    """
    idle = _idle_attempts(attempt)
    goes_on, why_not = _goes_on(attempt, ending, wants_requeue, job, idle)
    status = "requeued" if goes_on else _status(ending)
    summary = finish_summary(
        attempt.run.folder,
        status=status,
        exit_code=ending.code,
        failed_rank=ending.failed_rank,
        cause=ending.cause or None,
        idle_attempts=idle,
    )
    say(report_line(attempt.run.folder))
    if ending.log is not None and ending.code != EXIT_STOPPED:
        print(f"--- last lines of {shown(ending.log)}\n{tail(ending.log)}\n---", file=sys.stderr)
    rewards = f"reward {summary['initial_reward']} -> {summary['final_reward']} over {summary['steps']} steps"
    if "initial_eval_reward" in summary:
        rewards += f", evaluated {summary['initial_eval_reward']} -> {summary['final_eval_reward']}"
    smoke = "smoke test on CPU, " if attempt.plan.smoke else ""
    rows = read_metrics(attempt.run.folder)
    for notice in notices_of(rows, attempt.recipe.__getitem__, over=not goes_on):
        if notice.serious:
            say(f"note: {notice}")
    for name, result in summary["benchmarks"].items():
        say(f"benchmark {name}: {result_line(result)}")
    if ending.code == 0:
        published = hand_over(attempt.publisher, attempt.run.folder)
        say(f"{smoke}done: {rewards}; model in {shown(attempt.run.folder / 'model')}{published}")
    else:
        if attempt.publisher:
            attempt.publisher.abandon()
        say(f"{smoke}{status} with exit code {ending.code}: {ending.cause} ({rewards})")
        if status == "failed":
            say(f"fix: {advice(attempt.run.folder, ending.cause)}")
        if goes_on and job is not None:
            why_not = requeue(job)
        if why_not:
            finish_summary(attempt.run.folder, status=_status(ending))
            say(f"not requeued: {why_not}")
        again = "NotFinite" not in ending.cause  # the same steps would end it again
        if again and (not goes_on or why_not) and newest_complete(attempt.run.folder / "checkpoints"):
            say(f"continue with: grpo launch --resume {shlex.quote(shown(attempt.run.folder))}")
    return ending.code


def end_without_run(ending: Ending, wants_requeue: bool, job: SlurmJob | None) -> int:
    """The end of a launch that was stopped before it had a run directory.

    Args:
        ending: how.
        wants_requeue: whether it was asked to go on in a new attempt.
        job: the Slurm job, or None.
    """
    say(f"{ending.cause}; there is no run directory yet")
    if wants_requeue and job is not None and (error := requeue(job)):
        say(f"not requeued: {error}")
    return ending.code


def _status(ending: Ending) -> str:
    if ending.code == 0:
        return "completed"
    stopped = ending.code == EXIT_STOPPED or ending.cause.startswith("stopped by")
    return "stopped" if stopped else "failed"


def _idle_attempts(attempt: Attempt) -> int:
    """Attempts in a row that left no newer checkpoint, this one included."""
    if newest_step(attempt.run) > attempt.first_step:
        return 0
    return int((read_json(attempt.run.folder / "summary.json") or {}).get("idle_attempts", 0)) + 1


def _goes_on(
    attempt: Attempt, ending: Ending, wanted: bool, job: SlurmJob | None, idle: int
) -> tuple[bool, str | None]:
    """Whether Slurm is to start the run again; else why not, where that needs a word."""
    if ending.code != EXIT_STOPPED or not wanted or job is None:
        return False, None
    forbidden = no_requeue_file(attempt.run.folder).exists()
    why_not = why_no_requeue(forbidden, job.restarts, attempt.recipe["max_requeues"], idle)
    return why_not is None, why_not
