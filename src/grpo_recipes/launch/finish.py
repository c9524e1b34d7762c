"""The end of a run: summary, report, and the last lines said."""

from __future__ import annotations

import shlex
import sys

from grpo_recipes.doctor.advice import advice
from grpo_recipes.errors import EXIT_STOPPED
from grpo_recipes.evaluate.pass_at_k import result_line
from grpo_recipes.launch.attempt import Attempt
from grpo_recipes.launch.checkpoints import newest_complete
from grpo_recipes.launch.rundir import finish_summary
from grpo_recipes.launch.say import say
from grpo_recipes.launch.supervisor import Ending, tail
from grpo_recipes.paths import shown
from grpo_recipes.publish.publisher import hand_over
from grpo_recipes.report.single import report_line


def finish(attempt: Attempt, ending: Ending) -> int:
    """Write the summary, say how it ended, and return the code."""
    if ending.code == 0:
        status = "completed"
    else:
        stopped = ending.code == EXIT_STOPPED or ending.cause.startswith("stopped by")
        status = "stopped" if stopped else "failed"
    summary = finish_summary(
        attempt.run.folder,
        status=status,
        exit_code=ending.code,
        failed_rank=ending.failed_rank,
        cause=ending.cause or None,
    )
    say(report_line(attempt.run.folder))
    if ending.log is not None and ending.code != EXIT_STOPPED:
        print(f"--- last lines of {shown(ending.log)}\n{tail(ending.log)}\n---", file=sys.stderr)
    rewards = f"reward {summary['initial_reward']} -> {summary['final_reward']} over {summary['steps']} steps"
    if "initial_eval_reward" in summary:
        rewards += f", evaluated {summary['initial_eval_reward']} -> {summary['final_eval_reward']}"
    smoke = "smoke test on CPU, " if attempt.plan.smoke else ""
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
            say(f"fix: {advice(attempt.run.folder)}")
        if newest_complete(attempt.run.folder / "checkpoints"):
            say(f"continue with: grpo launch --resume {shlex.quote(shown(attempt.run.folder))}")
    return ending.code
