"""The trace of a run: the activities of each process over time, for Perfetto (ui.perfetto.dev) and chrome://tracing.

Each process appends to its own file, ``trace/<process>.jsonl``, so a killed process loses only the span under way. A
resumed run continues the files. ``write_trace`` joins them as Chrome trace events:

    trace = Trace("rank_0", run_dir)
    trace.add("sample", start, time.perf_counter(), step=3)
    write_trace(run_dir)  # writes run_dir / "trace.json"
"""

import bisect
import itertools
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_recipes.paths import display_path
from grpo_recipes.runs.rundir import load_json_mapping, write_atomically

FOLDER, TRACE = "trace", "trace.json"
LAUNCHER = "launcher"  # the launcher's process, and its track
_MOST_BYTES = 100_000_000  # read by ``write_trace``, the newest of each process; Perfetto opens the result
_RECENT_BYTES = 1_000_000  # read by ``sum_spans``
_MAIN_TRACK = "steps"
_TEXTS = ("name", "track")  # fields of each row


@dataclass
class TimedBlock:
    """Start and end of a block, as ``time.perf_counter()``."""

    start: float
    end: float = 0.0

    @property
    def seconds(self) -> float:
        """Return the duration in seconds. Inside the block, it is not valid, because ``end`` is not set yet."""
        return self.end - self.start


class Trace:
    """The spans of one process, in tracks. Within a track, spans are nested or follow one another.

    Times are values of ``time.perf_counter()`` or ``time.monotonic()``, which share a clock on Linux. Without
    ``run_dir``, rows wait in memory for ``open``. If the file can't be written, print a note and write no more rows:
    the run continues.
    """

    def __init__(self, process: str, run_dir: Path | None = None):
        self._process, self._run_dir = process, run_dir
        self._descriptor: int | None = None
        self._waiting: list[bytes] = []  # rows before ``open``
        self._failed = False
        self._epoch = time.time() - time.perf_counter()
        self._tracks: dict[str, None] = {}  # tracks with an open span of ``enter``

    def open(self, run_dir: Path) -> None:
        """Set the run directory, and write the rows that wait for it."""
        self._run_dir = run_dir
        rows, self._waiting = self._waiting, []
        for row in rows:
            self._write(row)

    def add(self, name: str, start: float, end: float, track: str = _MAIN_TRACK, **details: Any) -> None:
        """Append the span from ``start`` to ``end``, times of ``time.perf_counter()``, with its details.

        ``track`` is the name of the line that shows it. Times are rounded down, so that nested spans stay nested.
        """
        begin_us = self._to_microseconds(start)
        row = {"name": name, "track": track, "ts": begin_us, "dur": self._to_microseconds(end) - begin_us}
        self._write(json.dumps({**row, "args": details} if details else row).encode() + b"\n")

    def enter(self, name: str, track: str = LAUNCHER) -> None:
        """End the span under way of a track, and begin another. An empty name only ends it.

        If the process dies, the trace shows the span until the last event of this attempt.
        """
        if not name and track not in self._tracks:
            return
        self._tracks[track] = None
        if not name:
            del self._tracks[track]
        row = {"name": name, "track": track, "ts": self._to_microseconds(time.perf_counter()), "pid": os.getpid()}
        self._write(json.dumps(row).encode() + b"\n")

    def leave_all(self) -> None:
        """End the spans under way of all tracks."""
        for track in list(self._tracks):
            self.enter("", track)

    def _to_microseconds(self, seconds: float) -> int:
        """Return a time of ``time.perf_counter()`` in microseconds since 1970, rounded down."""
        return int((seconds + self._epoch) * 1e6)

    def _write(self, row: bytes) -> None:
        """Append a row to the process's file, or keep it for ``open``. After a failed write, drop all later rows."""
        if self._run_dir is None:
            self._waiting.append(row)
            return
        if self._failed:
            return
        try:
            if self._descriptor is None:
                path = self._run_dir / FOLDER / f"{self._process}.jsonl"
                path.parent.mkdir(mode=0o700, exist_ok=True)
                self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
                size = os.fstat(self._descriptor).st_size
                if size and os.pread(self._descriptor, 1, size - 1) != b"\n":  # an incomplete row, left by a kill
                    os.write(self._descriptor, b"\n")
            os.write(self._descriptor, row)
        except OSError as error:
            self._failed = True
            print(f"grpo: note: {FOLDER}/{self._process}.jsonl can't be written ({error.strerror})", flush=True)


def measure_process_age() -> float:
    """Return the seconds since this process started."""
    started_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")


def write_trace(run_dir: Path) -> Path | None:
    """Write ``trace.json`` from the rows of all processes, and return its path. None if the run has no rows.

    Keep at most the newest 100 MB of rows. Raise OSError if the file can't be written.
    """
    files = sorted((run_dir / FOLDER).glob("*.jsonl"), key=lambda path: (path.stem == LAUNCHER, len(path.stem), path))
    if not files:
        return None
    path = run_dir / TRACE
    texts = (json.dumps(event, separators=(",", ":")) for event in _iterate_events(files))
    write_atomically(path, itertools.chain(["[\n", next(texts)], (f",\n{text}" for text in texts), ["\n]\n"]))
    return path


def try_write_trace(run_dir: Path) -> str:
    """Write ``trace.json``, and return an empty text, or a note if it can't be written, e.g. on a full disk."""
    try:
        write_trace(run_dir)
    except OSError as error:
        return f"note: {display_path(run_dir / TRACE)} can't be written ({error.strerror})"
    return ""


def sum_spans(run_dir: Path, step: float, names: Sequence[str]) -> dict[str, float]:
    """Return the seconds of rank 0's spans with these names in an optimizer step, one of the newest: name -> sum.

    Names without a span, and spans before the newest megabyte of rows, are left out. If an attempt trained the step
    again, only its spans count.
    """
    path, seconds, previous = run_dir / FOLDER / "rank_0.jsonl", dict[str, float](), 0
    for row in _read_rows(path, _RECENT_BYTES) if path.exists() else ():
        details, duration = row.get("args"), row.get("dur")
        if not isinstance(details, dict) or "step" not in details:
            continue
        if details["step"] < previous:  # a resumed attempt, from an earlier step
            seconds.clear()
        previous = details["step"]
        if row["name"] in names and previous == step and duration:
            seconds[row["name"]] = seconds.get(row["name"], 0.0) + duration / 1e6
    return seconds


def _iterate_events(files: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Yield Chrome trace events. Each file is a process, and each track a thread. The launcher's file is the last."""
    transitions = [row for file in files if file.stem == LAUNCHER for row in _read_rows(file, _MOST_BYTES)]
    restarts = [row["ts"] for before, row in itertools.pairwise(transitions) if before.get("pid") != row.get("pid")]
    last_ends = [0] * (len(restarts) + 1)  # the last end of a rank's span in each attempt
    for pid, file in enumerate(files):
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": file.stem.replace("_", " ")}}
        order = -1 if file.stem == LAUNCHER else pid
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": order}}
        if file.stem == LAUNCHER:
            spans = _close_spans(transitions, restarts, last_ends)
        else:
            spans = (row for row in _read_rows(file, _MOST_BYTES // len(files)) if isinstance(row.get("dur"), int))
        tracks: dict[str, int] = {}
        for span in spans:
            track, end = span["track"], span["ts"] + span["dur"]
            if track not in tracks:
                tracks[track] = len(tracks)
                yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tracks[track], "args": {"name": track}}
            attempt = bisect.bisect_right(restarts, end)
            last_ends[attempt] = max(last_ends[attempt], end)
            yield {**span, "ph": "X", "pid": pid, "tid": tracks[track]}


def _close_spans(
    transitions: Sequence[dict[str, Any]], restarts: Sequence[int], last_ends: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Yield the spans between the transitions of a track.

    Spans under way at the end of an attempt end with its last event. ``restarts`` are the starts of later attempts.
    """
    under_way: dict[str, dict[str, Any]] = {}

    def close(row: dict[str, Any], end: int) -> dict[str, Any]:
        """Return the span from a row to the time ``end``; its duration is at least 0."""
        return {"name": row["name"], "track": row["track"], "ts": row["ts"], "dur": max(0, end - row["ts"])}

    attempt, last_time = 0, 0
    for row in transitions:
        if attempt < len(restarts) and row["ts"] >= restarts[attempt]:
            yield from (close(begun, max(last_time, last_ends[attempt])) for begun in under_way.values())
            under_way.clear()
            attempt += 1
        if (begun := under_way.pop(row["track"], None)) is not None:
            yield close(begun, row["ts"])
        if row["name"]:
            under_way[row["track"]] = row
        last_time = row["ts"]
    yield from (close(begun, max(last_time, last_ends[attempt])) for begun in under_way.values())


def _read_rows(path: Path, most_bytes: int) -> Iterator[dict[str, Any]]:
    """Yield the valid rows in the last ``most_bytes`` of a file."""
    with path.open("rb") as lines:
        start = lines.seek(max(0, path.stat().st_size - most_bytes))
        if start:
            lines.readline()  # the rest of a row
        for row in map(load_json_mapping, lines):
            if row and isinstance(row.get("ts"), int) and all(isinstance(row.get(key), str) for key in _TEXTS):
                yield row
