"""The pages in a real browser: at a phone's and a desk's width, light and dark, nothing overflows, hides or fails.

The page's own policy lets no other script into it, so a frame around it looks in from outside.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from grpo_recipes.report.pages import write_comparison, write_report
from grpo_recipes.sweep.folder import write_sweep

from .synthetic_runs import make_run, make_sweep, two_samples

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
WIDTHS = (390, 1400)
PROBE = (Path(__file__).parent / "browser_probe.html").read_text()


@dataclass(frozen=True)
class Seen:
    """(page, width) -> what was measured there, and the lines of the console."""

    dark: bool
    views: dict[tuple[str, int], dict[str, Any]]
    console: list[str]


pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The page of a run with texts that overflow if they can, one that compares it with two others, and a sweep's."""
    root = tmp_path_factory.mktemp("browser")
    long_word = {**two_samples()[0], "completion": "x" * 3000, "prompt": "<script>console.error(1)</script>" * 20}
    summary = {"status": "failed", "exit_code": 1, "cause": "y" * 300}
    run = make_run(root, steps=80, samples=[long_word, *two_samples()], summary=summary, objective="listwise")
    recipe = {"beta": (0.0, "config_math.yaml:20")}
    others = [make_run(root, f"base-20261120-10150{seed}", steps=40, seed=seed, recipe=recipe) for seed in (1, 2)]
    sweep = make_sweep(root / "sweep", statuses={"learning_rate=1e-6,seed=2": "failed"})
    return {
        "run": write_report(run),
        "comparison": write_comparison([run, *others], root / "comparison.html"),
        "sweep": write_sweep(sweep)[0],
    }


@pytest.fixture(scope="module", params=["light", "dark"])
def seen(request: pytest.FixtureRequest, pages: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What the pages look like at each width, and what the browser's console said."""
    folder, dark = tmp_path_factory.mktemp(request.param), request.param == "dark"
    views = [(name, width) for name in pages for width in WIDTHS]
    frames = [f'<iframe src="{pages[name].as_uri()}" width="{width}" height="900"></iframe>' for name, width in views]
    (folder / "outer.html").write_text(PROBE.replace("FRAMES", "".join(frames)))
    done = subprocess.run(
        [
            str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files",
            f"--user-data-dir={folder}/profile", "--enable-logging=stderr", "--window-size=1500,4000",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--virtual-time-budget=5000",
            "--dump-dom", (folder / "outer.html").as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (found,) = re.findall(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return Seen(dark, dict(zip(views, json.loads(html.unescape(found)), strict=True)), console)


def test_the_console_is_silent(seen: Seen) -> None:
    assert seen.console == []


def test_no_page_is_wider_than_the_screen(seen: Seen) -> None:
    for (name, width), view in seen.views.items():
        assert view["width"] == width
        assert view["scroll"] <= width, f"{name}: {view['scroll']} px wide"


def test_every_text_stands_out_from_its_ground(seen: Seen) -> None:
    for view in seen.views.values():
        assert (sum(view["ground"][:3]) < 200) == seen.dark
        assert 4.5 <= view["contrast"][0] < 21, view["contrast"]


def test_charts_are_wide_and_their_letters_large_enough(seen: Seen) -> None:
    for view in seen.views.values():
        assert view["smallest"] > 250
        assert float(view["letters"].removesuffix("px")) >= 11


def test_read_out_and_slider_say_what_the_run_has(seen: Seen) -> None:
    for width in WIDTHS:
        view = seen.views["run", width]
        lines = view["tip"].splitlines()
        assert lines[0] == "step 80"
        assert re.fullmatch(r"training: 0\.\d+ \(0\.\d+ to 0\.\d+\)", lines[1])
        assert re.fullmatch(r"evaluation: 0\.\d+ at 78", lines[2])
        assert view["steps"] == [["80"], ["77"]]


def test_the_comparison_reads_out_every_group(seen: Seen) -> None:
    lines = seen.views["comparison", 1400]["tip"].splitlines()
    assert [line.split(":")[0] for line in lines] == ["step 80", "math", "base (2 seeds)"]
    assert lines[2].endswith(" at 40")
