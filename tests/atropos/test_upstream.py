"""Run atroposlib's own run-api tests against the version pinned here, on a separate port.

The client relies on the answers that these tests check. The other test files of atroposlib need no real server.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

atroposlib = pytest.importorskip("atroposlib")
FILES = ("test_api_legacy.py", "test_api_messages_handling.py", "test_api_compression.py")
HELPERS = ("api_test_utils.py", "conftest.py")


@pytest.mark.slow
def test_the_pinned_run_api_passes_the_tests_it_comes_with(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    for name in (*FILES, *HELPERS):
        text = (Path(atroposlib.__file__).parent / "tests" / name).read_text()
        text = text.replace("8000", port).replace("atroposlib.tests.", "")
        (tmp_path / name).write_text(text.replace("max_wait_for_api: int = 10", "max_wait_for_api: int = 120"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *FILES],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    match = re.search(r"^(\d+) passed", done.stdout, re.MULTILINE)
    assert match is not None and int(match[1]) >= 30 and "skipped" not in done.stdout
