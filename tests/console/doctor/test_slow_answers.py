"""A server that answers slowly does not hold up the doctor."""

from __future__ import annotations

import time

import pytest
from process.test_bounded_answers import ANSWERS, SECONDS, SlowServer, server

from grpo_recipes.console.doctor import environment

__all__ = ["server"]


@pytest.mark.alone
def test_the_doctor_waits_for_slow_headers_as_long_as_for_silence(
    server: SlowServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "_SECONDS", SECONDS)
    server.answer = ANSWERS["slow headers"]
    began = time.monotonic()
    assert "timed out" in environment._check_address(server.url, "warning", "look").value
    assert time.monotonic() - began < 3 * SECONDS
