"""A run-api for the tests of a module. It is empty when a test starts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from atropos.run_api import RunApi, run_api


@pytest.fixture(scope="module")
def module_api() -> Iterator[RunApi]:
    pytest.importorskip("atroposlib")
    with run_api() as api:
        yield api


@pytest.fixture
def api(module_api: RunApi) -> RunApi:
    """Return the module's run-api, reset; restart it if the last test ended the process."""
    if module_api.process.poll() is None:
        module_api.reset()
    else:
        module_api.restart()
    return module_api
