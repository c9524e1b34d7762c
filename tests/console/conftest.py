"""A fake OpenAI API server for the commands that need a server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rollouts.fake_openai import FakeServer


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.close()
