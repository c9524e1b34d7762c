"""The trace of a real run with two training processes, before and after a stop."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from real_runs import REPOSITORY, Launch
from trace_spans import assert_agrees_with_rows, assert_nested, iterate_steps, read_tracks

REWARD = """
def sums(completions, answer):
    return [float(answer[0] in completions[0][-1]["content"])]
"""


@pytest.mark.slow
def test_the_trace_of_two_ranks_agrees_with_the_metrics_and_goes_on_after_a_stop(
    launch: Callable[..., Launch], tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(REWARD)
    flags = {
        "num_processes": 2, "max_steps": 5, "prompts_per_step": 4, "num_generations": 8, "save_steps": 1,
        "reward_funcs": "own.py:sums", "eval_strategy": "steps", "eval_steps": 2, "eval_dataset_name": "smoke:sums",
    }  # fmt: skip
    recipe = str(REPOSITORY / "recipes/smoke/grpo.yaml")
    run = launch(recipe, *[word for key, value in flags.items() for word in (f"--{key}", str(value))])
    run.wait_for_step(2)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 75, run.output
    stopped = read_tracks(run.run_dir)
    resumed = launch("--resume", str(run.run_dir))
    assert resumed.wait() == 0, resumed.output

    tracks, rows = read_tracks(run.run_dir), run.rows()
    for spans in tracks.values():
        assert_nested(spans)
    assert_agrees_with_rows(tracks["rank 0", "steps"], rows)
    # Rank 1 has no rows: its phases fill its steps, which are as long as those of rank 0.
    steps = list(iterate_steps(tracks["rank 1", "steps"]))
    assert [step["args"]["step"] for step, _ in steps] == [1, 2, 3, 4, 5]
    for (step, seconds), row in zip(steps, rows, strict=True):
        phases = {"sample", "score", "weigh", "update", *(["sync"] if row["syncs"] else [])}
        assert phases <= seconds.keys()  # an evaluation has sent the weights, if the step did not
        assert sum(seconds.values()) == pytest.approx(step["dur"] / 1e6, abs=1e-4)
        assert step["dur"] / 1e6 == pytest.approx(row["seconds/step"], rel=0.2, abs=0.5)
    for rank in ("rank 0", "rank 1"):
        names = {span["name"] for span in tracks[rank, "steps"]}
        assert {"start", "evaluate", "save", "save model"} <= names
        children = tracks[rank, "reward child 1"]
        assert {"load rewards", "own.py:sums"} <= {span["name"] for span in children}
    phases = [span["name"] for span in tracks["launcher", "launcher"]]
    for name in ("check", "plan", "fetch", "start server", "train", "end processes"):
        assert phases.count(name) == 2, phases
    assert [span["name"] for span in tracks["launcher", "server"]] == ["start", "run"] * 2
    # The second attempt continues the first.
    for place, spans in stopped.items():
        assert [span["name"] for span in tracks[place]][: len(spans)] == [span["name"] for span in spans]
