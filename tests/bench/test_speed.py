"""The figures of bench/speed.py, from seconds and lengths that are written down."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import fields
from statistics import mean
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

from bench.scripts import script
from grpo_recipes.recipe.configs import GRPOConfig

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def speed() -> Iterator[ModuleType]:
    with script("speed") as module:
        yield module


def test_a_ratio_is_of_neighbouring_steps(speed: ModuleType) -> None:
    seconds = [1.0, 10.0, 2.0, 4.0]
    assert speed.ratio([0.5 * value for value in seconds], seconds) == {"median": 0.5, "low": 0.5, "high": 0.5}
    interval = speed.ratio([float(number) for number in range(1, 101)], [1.0] * 100)
    assert interval == {"median": 50.5, "low": 41.0, "high": 60.0}


def test_lengths_are_those_that_the_page_tells(speed: ModuleType) -> None:
    for seed in range(20):
        assert {len(row) for row in speed.Shape("equal").completions(32, seed)} == {128}
    drawn = [[len(row) for row in speed.Shape().completions(32, seed)] for seed in range(200)]
    assert all(max(rows) == 128 for rows in drawn)
    assert 0.25 < mean(mean(rows) / 128 for rows in drawn) < 0.4
    assert speed.Shape().completions(8, 3) == speed.Shape().completions(8, 3) != speed.Shape().completions(8, 4)


def test_each_key_of_an_arm_is_a_recipe_key(speed: ModuleType) -> None:
    known = {entry.name for entry in fields(GRPOConfig)}
    for arms in (speed.ARMS, speed.ADDED, speed.OVERLAP, speed.MAXENT):
        assert {key for keys in arms.values() for key in keys or {}} <= known


def arm(ratio: float, **figures: Any) -> dict[str, Any]:
    return {
        "ratio": {"median": ratio, "low": ratio - 0.05, "high": ratio + 0.1}, "seconds_median": 2.0,
        "fed_per_real_token": 1.1, "seconds": [2.0] * 3, **figures,
    }  # fmt: skip


def part(findings: dict[str, Any]) -> dict[str, Any]:
    return {"found": findings, "load_before": [0.1, 0.1, 0.1], "commit": "a" * 40, "uncommitted_changes": False}


def record(**parts: dict[str, Any]) -> dict[str, Any]:
    arms = {"bare TRL": arm(1.0), "bare TRL again": arm(1.01), "ours": arm(0.4)}
    return {name: part(findings) for name, findings in ({"update": {"lognormal": arms}} | parts).items()}


def of_class(drawn: str, kind: str) -> list[str]:
    paths = ElementTree.fromstring(drawn).iter(f"{SVG}path")
    return [path.attrib["d"] for path in paths if path.attrib["class"] == kind]


def words(drawn: str) -> list[str]:
    return [node.text or "" for node in ElementTree.fromstring(drawn).iter(f"{SVG}text")]


def test_the_figure_has_each_ratio_with_its_interval_and_its_goal(speed: ModuleType) -> None:
    figure = importlib.import_module("speed_figure")
    drawn = figure.figure(record())
    scale = (figure.WIDTH - 2 * figure.SIDE) / 1.5  # the axis ends at 1.5
    interval, point = of_class(drawn, "c1")[1], of_class(drawn, "c1 point")[1]  # after those of the legend
    assert interval == f"M{round(0.35 * scale, 1)} 87H{round(0.5 * scale, 1)}"
    assert point == f"M{round(0.4 * scale, 1)} 87h0"
    assert of_class(drawn, "goal")[1:] == [f"M{round(0.5 * scale, 1)} 80v14"]
    assert len(of_class(drawn, "noise point")) == 2 and "lognormal, bare TRL again" in words(drawn)
    slower = figure.figure(record(update={"lognormal": {"bare TRL": arm(1.0), "ours": arm(0.9)}}))
    assert of_class(slower, "c1 point")[1] == f"M{round(0.9 * scale, 1)} 55h0"
    assert not any(text in words(drawn) for text in figure.GROWTH.values())


def test_growth_is_drawn_once_it_is_recorded(speed: ModuleType) -> None:
    figure = importlib.import_module("speed_figure")
    cases = {name: [str(getattr(shape, name)) for shape in shapes] for name, shapes in speed.GROWTH.items()}
    ratios = {name: {case: 0.3 + 0.1 * index for index, case in enumerate(labels)} for name, labels in cases.items()}
    growth = {
        parameter: {case: {"bare TRL": arm(1.0), "ours": arm(value)} for case, value in values.items()}
        for parameter, values in ratios.items()
    }
    drawn = figure.figure(record(growth=growth))
    assert set(words(drawn)) > {*figure.GROWTH.values(), *(case for labels in cases.values() for case in labels)}
    points = of_class(drawn, "c1 point")[2:]  # a path for each frame
    up = [[float(point.split()[1].removesuffix("h0")) for point in path.split("M")[1:]] for path in points]
    assert [len(frame) for frame in up] == [3, 3, 2]
    heights = [[figure.GROWTH_HEIGHT * (1 - value / 1.5) for value in values.values()] for values in ratios.values()]
    assert up == [pytest.approx(frame, abs=0.1) for frame in heights]


def test_the_page_shows_every_part_of_a_record(speed: ModuleType) -> None:
    page = importlib.import_module("speed_page")
    growth = {"prompts": {"2": {"bare TRL": arm(1.0), "ours": arm(0.55)}}}
    step = {"lognormal, 8 x 16": {"bare TRL": arm(1.0), "ours": arm(0.6, seconds_sampling=0.75)}}
    commands = {
        "check": {"seconds": [0.4], "cpu": [0.3]}, "plan": {"seconds": [0.5], "cpu": [0.4]},
        "launch": [{"step 1": 20.04}],
    }  # fmt: skip
    tables = page.tables(record(step=step, growth=growth, commands=commands))
    assert tables.startswith(f"\n{page.FIGURE}\n")
    assert "| lognormal | ours | 0.40 | 0.35\u00a0to\u00a00.50 | 0.50 | 2.00 | 1.10 |\n" in f"{tables}\n"
    assert "| lognormal, 8 x 16 | ours | 0.60 | 0.55\u00a0to\u00a00.70 | 0.60 | 2.00 | 1.10 | 0.75 |\n" in tables
    assert "| prompts 2 | ours | 0.55 | 0.50\u00a0to\u00a00.65 |  | 2.00 | 1.10 |\n" in tables
    assert "| `grpo launch` to its first step | 20.0 | | 25 |" in tables


def test_sampling_is_clocked_also_where_it_fails(speed: ModuleType) -> None:
    seconds: list[float] = []
    assert speed._clocked(seconds, max, 2, 3) == 3
    with pytest.raises(ZeroDivisionError):
        speed._clocked(seconds, lambda: 1 / 0)
    assert len(seconds) == 2 and all(0 <= second < 1 for second in seconds)
