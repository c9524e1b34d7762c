"""Spans of a run's trace.json, compared with metrics.jsonl."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

Span = dict[str, Any]


def read_tracks(folder: Path) -> dict[tuple[str, str], list[Span]]:
    """Return the spans of each process and track, by their start; outer spans come first."""
    events = json.loads((folder / "trace.json").read_text())
    names = {"process_name": {}, "thread_name": {}}
    for event in events:
        if event["ph"] == "M" and event["name"] in names:
            names[event["name"]][event["pid"], event.get("tid")] = event["args"]["name"]
    tracks: dict[tuple[str, str], list[Span]] = {}
    for event in (event for event in events if event["ph"] == "X"):
        place = names["process_name"][event["pid"], None], names["thread_name"][event["pid"], event["tid"]]
        tracks.setdefault(place, []).append(event)
    return {place: sorted(spans, key=lambda span: (span["ts"], -span["dur"])) for place, spans in tracks.items()}


def assert_nested(spans: list[Span]) -> None:
    """Any two spans of a track are nested, or the second starts after the first."""
    ends: list[int] = []
    for span in spans:
        end = span["ts"] + span["dur"]
        while ends and ends[-1] <= span["ts"]:
            ends.pop()
        assert not ends or end <= ends[-1], span
        ends.append(end)


def sum_phases(spans: list[Span], step: Span) -> Counter[str]:
    """Return the seconds of each phase directly inside a step. A sync inside a sample counts only as sync."""
    inside = [
        span for span in spans
        if span is not step and step["ts"] <= span["ts"] and span["ts"] + span["dur"] <= step["ts"] + step["dur"]
    ]  # fmt: skip
    seconds: Counter[str] = Counter()
    for span in inside:
        outer = [other["name"] for other in inside if other is not span and contains(other, span)]
        if not outer:
            seconds[span["name"]] += span["dur"] / 1e6
        elif outer == ["sample"]:
            seconds[span["name"]] += span["dur"] / 1e6
            seconds["sample"] -= span["dur"] / 1e6
    return seconds


def contains(outer: Span, inner: Span) -> bool:
    return outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


def iterate_steps(spans: list[Span]) -> Iterator[tuple[Span, Counter[str]]]:
    """Yield each step with the seconds of its phases."""
    for span in spans:
        if span["name"] == "step":
            yield span, sum_phases(spans, span)


def assert_agrees_with_rows(spans: list[Span], rows: list[dict[str, Any]]) -> None:
    """The steps of rank 0 have the seconds of metrics.jsonl, to some microseconds."""
    steps = list(iterate_steps(spans))
    assert [step["args"]["step"] for step, _ in steps] == [row["step"] for row in rows]
    for (step, seconds), row in zip(steps, rows, strict=True):
        measured = {key.removeprefix("seconds/"): value for key, value in row.items() if key.startswith("seconds/")}
        assert step["dur"] / 1e6 == pytest.approx(measured.pop("step"), abs=1e-5)
        assert sum(seconds.values()) == pytest.approx(step["dur"] / 1e6, abs=1e-4)
        measured["update"] -= seconds.pop("weigh", 0.0)
        assert {name: seconds[name] for name in measured} == pytest.approx(measured, abs=1e-4)
