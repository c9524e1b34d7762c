"""A reward that is 0 and writes down which prompts each rank took: its recipes have ``reward_isolation: none``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from real_runs import Launch

FLAGS = (
    *("--reward_funcs", "pure_accuracy_math", f"{Path(__file__)}:taken"),
    *("--reward_weights", "1", "0", "--reward_isolation", "none"),
)


def taken(prompts: list[Any], trainer_state: Any, **_: Any) -> list[float]:
    """Add a line to the file of this rank."""
    line = json.dumps([trainer_state.global_step, [prompt[0]["content"] for prompt in prompts]])
    with _file(Path(os.environ["GRPO_RUN_DIR"]), int(os.environ.get("RANK", "0"))).open("a") as lines:
        lines.write(f"{line}\n")
    return [0.0] * len(prompts)


def taken_by(run: Launch, rank: int) -> dict[int, list[str]]:
    """Return the prompts of a rank by the number of completed steps. For a repeated step, the last prompts count."""
    return dict(json.loads(line) for line in _file(run.run_dir, rank).read_text().splitlines())


def forget(run_dir: Path) -> None:
    """Remove the files of a run directory that was copied."""
    for file in run_dir.glob(_file(run_dir, 0).name.replace("0", "*")):
        file.unlink()


def _file(run_dir: Path, rank: int) -> Path:
    return run_dir / f"taken_by_{rank}.jsonl"
