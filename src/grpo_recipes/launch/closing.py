"""The lines that close a run: its rewards, its model, and the next step.

`grpo launch` prints them when a run ends, and `grpo status` shows the same later.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_recipes.launch.hooks import AllHooks
from grpo_recipes.paths import display_path, shell_path
from grpo_recipes.process.reports import plural
from grpo_recipes.runs import rundir
from grpo_recipes.runs.checkpoints import find_newest_complete
from grpo_recipes.runs.commands import format_launch_command
from grpo_recipes.runs.endings import advice
from grpo_recipes.runs.health import format_rewards
from grpo_recipes.runs.rundir import Run


def describe_rewards(summary: Mapping[str, Any]) -> str:
    """Describe the rewards of a run's first and last steps, and of its first and last evaluation if it has any.

    A run without rewards is described by its loss. Without either, the text is ``none in 3 steps`` or ``no step was
    completed``.
    """
    steps, first, last = summary["steps"], summary["initial_reward"], summary["final_reward"]
    if first is None:
        first, last = summary.get("initial_loss"), summary.get("final_loss")
    text = f"none in {plural(steps, 'step')}" if steps else "no step was completed"
    if first is not None:
        text = format_rewards(first, last, steps)
    if "initial_eval_reward" in summary:
        text += f"; evaluated {summary['initial_eval_reward']:.3f} -> {summary['final_eval_reward']:.3f}"
    if "best_step" in summary:
        text += f", best {summary['best_eval_reward']:.3f} at step {summary['best_step']}"
    return text


def describe_model(run: Run) -> str:
    """Return the folder of a completed run's model, or the newest checkpoint of another ended run.

    With ``load_best_model_at_end``, the step of the model is added.
    """
    if run.summary.get("status") == "completed":
        is_best = "best_step" in run.summary and run.value("load_best_model_at_end")
        of_step = f" (step {run.summary['best_step']})" if is_best else ""
        return f"{display_path(run.folder / 'model')}{of_step}"
    checkpoint = find_newest_complete(run.folder / "checkpoints")
    return f"{display_path(checkpoint)} (newest checkpoint)" if checkpoint else "no complete checkpoint"


def describe_next_step(run: Run, hooks: AllHooks) -> tuple[str, str]:
    """Return what to do after a run has ended: advice on a failure, and a command to copy. Each may be empty.

    The command resumes the run, or starts it again without a checkpoint. It is empty if the advice contains it.
    """
    if run.summary.get("status") == "completed":
        return "", hooks.next_command(run.folder)
    fix = advice(run, run.cause) if run.summary.get("status") == "failed" else ""
    if command := format_resume_command(run.folder, run.cause):
        return fix, "" if "--resume" in fix else f"{command}{rundir.describe_damaged_rows(run.folder)}"
    command = format_launch_command(run)
    return fix, "" if command in fix else command


def format_resume_command(folder: Path, cause: str) -> str:
    """Return the command that resumes an unfinished run; an empty text without a checkpoint or with NaN weights.

    ``cause`` is the reason of its end. A run with NaN or infinite weights would fail again.
    """
    if "NotFinite" in cause or not find_newest_complete(folder / "checkpoints"):
        return ""
    return f"grpo launch --resume {shell_path(folder)}"
