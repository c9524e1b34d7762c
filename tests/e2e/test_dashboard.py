"""The dashboard in Chromium while a real run trains: its open page shows steps that come later."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from console.dashboard.test_server import get, serving
from real_runs import Launch

from grpo_recipes.console.dashboard.command import Pages
from grpo_recipes.console.dashboard.pages import LivePage

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
BEFORE = 4  # requests before a step is awaited: two of the test, the page, and a poll


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_an_open_page_follows_a_run_that_trains(
    launch: Callable[..., Launch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_recipes.console.dashboard.pages._IDLE_SHARE", 0.0)
    run = launch("--max_steps", "1000")
    run.wait_for_step(2)
    find, reads, steps = Pages.find, list[str](), list[int]()

    def find_after_a_step(pages: Pages, path: str) -> LivePage | None:
        reads.append(path)
        if len(reads) == BEFORE:
            steps.append(len(run.rows()))
            run.wait_for_step(steps[0] + 2)
        return find(pages, path)

    monkeypatch.setattr(Pages, "find", find_after_a_step)
    with serving(tmp_path / "runs", tmp_path / "copies") as server:
        (page,) = set(re.findall(r'href="(run/\w+/)"', get(server, "")[2]))
        before = int(re.findall(r"over (\d+) steps", get(server, page)[2])[0])
        done = subprocess.run(
            [
                str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile",
                "--enable-logging=stderr", "--virtual-time-budget=60000", "--dump-dom", server.url + page,
            ],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
    assert done.returncode == 0 and "CONSOLE" not in done.stderr, done.stderr
    assert len(reads) > BEFORE and run.process.poll() is None, "it still trains"
    assert int(re.findall(r"over (\d+) steps", done.stdout)[0]) >= steps[0] + 2 > before
