"""bench/atropos_conversion.py: its groups are right ones, and a conversion that changes one is seen."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from bench.scripts import script


@pytest.fixture
def bench() -> Iterator[ModuleType]:
    with script("atropos_conversion", alias="bench_atropos") as module:
        yield module


def test_every_conversion_is_timed(bench: ModuleType) -> None:
    seconds = bench.measure(bench.wire_groups(20, seed=1))
    assert list(seconds) == ["parse", "to arrays", "from arrays", "there and back"]
    assert all(0 < value < 5 for value in seconds.values())


def test_a_group_that_comes_back_changed_is_no_measurement(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    back = bench.from_arrays
    monkeypatch.setattr(bench, "from_arrays", lambda rows: {**back(rows), "scores": [0.5] * bench.GROUP})
    with pytest.raises(AssertionError, match="came back changed"):
        bench.measure(bench.wire_groups(2, seed=1))
