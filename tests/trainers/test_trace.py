"""The spans of a rank have the times of metrics.jsonl."""

from __future__ import annotations

from pathlib import Path

from trace_spans import assert_agrees_with_rows, assert_nested, read_tracks

from grpo_recipes.runs.rundir import read_metrics
from grpo_recipes.runs.trace import write_trace

from .tiny_training import train


def test_a_step_with_evaluation_and_save_has_the_seconds_of_its_row(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(
        run,
        max_steps=3,
        steps_per_generation=2,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=2,
    )
    write_trace(run)

    (spans,) = read_tracks(run).values()
    assert_nested(spans)
    assert_agrees_with_rows(spans, read_metrics(run))
    names = [span["name"] for span in spans]
    assert names[0] == "start" and names.count("evaluate") == 3 and names.count("save") == 2
    assert names.count("weigh") == 2 and names.count("step") == 3
