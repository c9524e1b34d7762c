"""The figures of bench/speed.py, from seconds and lengths that are written down."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from statistics import mean
from types import ModuleType, SimpleNamespace

import pytest

from grpo_recipes.recipe.configs import GRPOConfig

HOME = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def speed() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(HOME / "bench"), *sys.path])
        yield importlib.import_module("speed")


def test_a_ratio_is_of_neighbouring_steps(speed: ModuleType) -> None:
    theirs = [1.0, 10.0, 2.0, 4.0]
    assert speed.ratio([0.5 * one for one in theirs], theirs) == {"median": 0.5, "low": 0.5, "high": 0.5}
    found = speed.ratio([float(one) for one in range(1, 101)], [1.0] * 100)
    assert found == {"median": 50.5, "low": 41.0, "high": 60.0}


def test_lengths_are_those_that_the_page_tells(speed: ModuleType) -> None:
    for seed in range(20):
        assert {len(row) for row in speed.Shape("equal").completions(32, seed)} == {128}
    drawn = [[len(row) for row in speed.Shape().completions(32, seed)] for seed in range(200)]
    assert all(max(rows) == 128 for rows in drawn)
    assert 0.25 < mean(mean(rows) / 128 for rows in drawn) < 0.4
    assert speed.Shape().completions(8, 3) == speed.Shape().completions(8, 3) != speed.Shape().completions(8, 4)


def test_each_key_of_an_arm_is_a_recipe_key(speed: ModuleType) -> None:
    known = {one.name for one in fields(GRPOConfig)}
    for arms in (speed.ARMS, speed.ADDED, speed.MAXENT):
        assert {key for keys in arms.values() for key in keys or {}} <= known


def test_overlap_is_refused_while_there_is_no_such_key(speed: ModuleType) -> None:
    if speed.OVERLAP in {one.name for one in fields(GRPOConfig)}:
        pytest.skip("there is such a key")
    assert speed.overlap(SimpleNamespace()) == {"refused": "this code has no recipe key overlap_generation"}
