"""The trace of a run: rows of each process, joined as Chrome trace events."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
from trace_spans import assert_nested, read_tracks

from grpo_recipes.runs.trace import Trace, sum_spans, write_trace


def test_a_trace_joins_processes_and_tracks(tmp_path: Path) -> None:
    rank, launcher, start = Trace("rank_0", tmp_path), Trace("launcher"), time.perf_counter()
    launcher.enter("check")
    launcher.enter("train")
    launcher.open(tmp_path)
    rank.add("sample", start + 1, start + 3, step=1)
    rank.add("step", start + 1, start + 4, step=1)
    rank.add("accuracy", start + 2, start + 3, "reward child 1", rows=8)
    launcher.enter("run", "server")
    launcher.leave_all()

    assert write_trace(tmp_path) == tmp_path / "trace.json"

    tracks = read_tracks(tmp_path)
    names = {place: [span["name"] for span in spans] for place, spans in tracks.items()}
    assert names == {
        ("rank 0", "steps"): ["step", "sample"],
        ("rank 0", "reward child 1"): ["accuracy"],
        ("launcher", "launcher"): ["check", "train"],
        ("launcher", "server"): ["run"],
    }
    step, sample = tracks["rank 0", "steps"]
    assert step["dur"] == pytest.approx(3e6, abs=1) and sample["args"] == {"step": 1}
    assert step["ts"] / 1e6 == pytest.approx(time.time() + 1, abs=5)
    assert_nested(tracks["rank 0", "steps"])


def trace_until_killed(folder: Path) -> None:
    launcher, rank = Trace("launcher", folder), Trace("rank_0", folder)
    launcher.enter("train")
    rank.add("step", time.perf_counter(), time.perf_counter() + 0.2, step=1)
    time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_resumed_run_continues_the_trace_of_a_killed_attempt(tmp_path: Path) -> None:
    """The span under way of the dead launcher ends with the last span of its attempt, not with the resume."""
    attempt = multiprocessing.get_context("fork").Process(target=trace_until_killed, args=(tmp_path,))
    attempt.start()
    attempt.join()
    with (tmp_path / "trace/rank_0.jsonl").open("a") as rows:
        rows.write('{"name": "step", "track": "st')  # the kill cut this row
    write_trace(tmp_path)
    (killed,) = read_tracks(tmp_path)["launcher", "launcher"]
    (step,) = read_tracks(tmp_path)["rank 0", "steps"]
    assert killed["ts"] + killed["dur"] == step["ts"] + step["dur"]

    time.sleep(0.5)
    launcher, now = Trace("launcher", tmp_path), time.perf_counter()
    launcher.enter("train")
    Trace("rank_0", tmp_path).add("step", now, now + 0.1, step=1)
    launcher.leave_all()
    write_trace(tmp_path)

    tracks = read_tracks(tmp_path)
    assert tracks["launcher", "launcher"][0]["dur"] == killed["dur"]
    assert [span["args"]["step"] for span in tracks["rank 0", "steps"]] == [1, 1]
    for spans in tracks.values():
        assert_nested(spans)


def test_a_trace_that_cannot_be_written_is_noted_once_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trace").write_text("a file")
    trace = Trace("rank_0", tmp_path)
    for _ in range(2):
        trace.add("sample", 0.0, 1.0)
    assert capsys.readouterr().out == "grpo: note: trace/rank_0.jsonl can't be written (File exists)\n"
    assert write_trace(tmp_path / "elsewhere") is None


def test_a_very_long_trace_keeps_the_newest_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_recipes.runs.trace._MOST_BYTES", 1000)
    trace = Trace("rank_0", tmp_path)
    for step in range(100):
        trace.add("step", step, step + 1, step=step)
    write_trace(tmp_path)
    (spans,) = read_tracks(tmp_path).values()
    assert [span["args"]["step"] for span in spans] == list(range(100 - len(spans), 100)) and 5 < len(spans) < 20
    json.loads((tmp_path / "trace.json").read_text())


def test_only_the_last_attempt_counts_for_a_step_that_was_trained_again(tmp_path: Path) -> None:
    trace = Trace("rank_0", tmp_path)
    for step, seconds in ((1, 9), (2, 1), (3, 4), (2, 8), (3, 2), (3, 1)):  # died after the save, resumed from step 1
        trace.add("save", 100.0, 100.0 + seconds, step=step)
    trace.add("update", 100.0, 200.0, step=3)
    assert sum_spans(tmp_path, 3, ("save",)) == {"save": pytest.approx(3)}
