"""The dashboard in a real browser: a page shows a new step, though nobody reloads it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from grpo_recipes.console.dashboard.command import Pages
from grpo_recipes.console.dashboard.pages import LivePage

from ..report.synthetic_runs import make_run
from .test_server import append_row, get, serving

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
BEFORE = 5  # requests before the row is appended: two of the test, the page, and two polls

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")


@pytest.mark.parametrize("which", ["list", "report"])
def test_an_open_page_shows_a_step_that_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    monkeypatch.setattr("grpo_recipes.console.dashboard.pages._IDLE_SHARE", 0.0)
    run = make_run(tmp_path / "runs", steps=20, summary={"status": "running"})
    find, reads = Pages.find, list[str]()

    def find_and_append(pages: Pages, path: str) -> LivePage | None:
        reads.append(path)
        if len(reads) == BEFORE:
            append_row(run, 21, 0.9)
        return find(pages, path)

    monkeypatch.setattr(Pages, "find", find_and_append)
    with serving(tmp_path / "runs", tmp_path / "copies") as server:
        page = "" if which == "list" else re.findall(r'href="(run/\w+/)"', get(server, "")[2])[0]
        old, new = ("<td>20/20</td>", "<td>21/60</td>") if which == "list" else ("over 20 steps", "over 21 steps")
        assert old in get(server, page)[2]
        done = subprocess.run(
            [
                str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile",
                "--enable-logging=stderr", "--virtual-time-budget=60000", "--dump-dom", server.url + page,
            ],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert len(reads) > BEFORE and set(reads[BEFORE:]) == {page}
    assert new in done.stdout and old not in done.stdout
    assert "CONSOLE" not in done.stderr, done.stderr
