"""A wait ends with its condition, at its deadline, or when waiting is pointless."""

from __future__ import annotations

import math

import pytest

from grpo_recipes.process import waiting
from grpo_recipes.process.waiting import wait_until


class Clock:
    """A clock that only advances in ``sleep`` and ``advance``; replaces the module ``time``."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sleeps: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(waiting, "time", clock)
    return clock


def test_the_first_true_value_is_returned_without_a_sleep_after_it(clock):
    values = iter(["", "", "value"])
    assert wait_until(lambda: next(values), seconds=10) == "value"
    assert clock.sleeps == [0.1, 0.1]


def test_the_last_sleep_ends_at_the_deadline_and_the_condition_is_checked_then(clock):
    assert wait_until(lambda: clock.now >= 101.0, seconds=1.0, pause=0.75) is True
    assert clock.sleeps == [0.75, 0.25]
    assert wait_until(lambda: None, seconds=1.0, pause=0.75) is None
    assert clock.now == 102.0


def test_a_condition_is_checked_once_if_there_is_no_time(clock):
    checks = []
    assert wait_until(lambda: checks.append("check"), seconds=0) is None
    assert checks == ["check"] and clock.sleeps == []


def test_a_check_that_takes_longer_than_the_wait_is_not_repeated(clock):
    checks = []

    def check() -> bool:
        checks.append("check")
        clock.advance(60)
        return False

    assert wait_until(check, seconds=5) is False
    assert checks == ["check"]


def test_a_wait_that_is_stopped_checks_once_more(clock):
    files = []

    def is_dead() -> bool:
        if clock.now < 100.25:
            return False
        files.append("written just before the process ended")
        return True

    assert wait_until(lambda: files, seconds=math.inf, stopped=is_dead) == ["written just before the process ended"]
    assert wait_until(lambda: 0, seconds=math.inf, stopped=lambda: True) == 0
    assert len(clock.sleeps) == 3


def test_an_exception_of_the_condition_ends_the_wait(clock):
    def check() -> bool:
        raise ConnectionRefusedError("nothing listens")

    with pytest.raises(ConnectionRefusedError):
        wait_until(check, seconds=5)
    assert clock.sleeps == []
