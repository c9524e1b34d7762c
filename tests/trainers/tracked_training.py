"""A training that reports to a tracker, in its own process: it stops after a step, and then resumes.

python -m trainers.tracked_training FOLDER TRACKER    # in tests/, with the variables of a launch
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import TrainerCallback

from grpo_recipes.runs.rundir import stop_file, write_json
from grpo_recipes.trainers.rank import recording_rank
from grpo_recipes.trainers.trackers import continue_tracked_runs

from .tiny_training import train

STOPPED_AFTER, STEPS = 2, 4


class StopsFirst(TrainerCallback):
    """Request a stop in the update of a step, unless the run was resumed."""

    def __init__(self, folder: Path):
        self._file = stop_file(folder)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step + 1 == STOPPED_AFTER:
            self._file.touch()


def main(folder: Path, tracker: str) -> None:
    """Train or resume, and exit as a rank does: with 75 after a stop."""
    (folder / "processes").mkdir(exist_ok=True)
    write_json(folder / "run.json", {"run_name": "mine", "timestamp": "now", "wandb_id": "abcd"})
    stop_file(folder).unlink(missing_ok=True)
    with recording_rank(folder):
        continue_tracked_runs(SimpleNamespace(report_to=[tracker], run_name=folder.name), folder)
        keys = {"report_to": [tracker], "run_name": folder.name, "project": "maths", "log_completions": True}
        _, stopped = train(folder, callbacks=(StopsFirst(folder),), max_steps=STEPS, **keys)
        if stopped:
            raise stopped


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
