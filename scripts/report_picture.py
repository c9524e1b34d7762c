"""Make the picture of a report for the documentation: a made-up run, drawn by headless Chromium.

    python -m scripts.report_picture [--out docs/assets]

writes ``report-light.webp`` and ``report-dark.webp``. The run comes from formulas, so the picture changes only if
the report changes. Chromium must be on the path.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import subprocess
import tempfile
from pathlib import Path

from PIL import Image

from grpo_recipes.console.report.pages import write_report
from tests.console.report.synthetic_runs import make_run

HOME = Path(__file__).resolve().parents[1]
SIZE = (1280, 1080)  # of the window, in pixels
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main() -> None:
    """Write both pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HOME / "docs/assets", help="folder of the pictures")
    folder = parser.parse_args().out
    browser = find_browser()
    with tempfile.TemporaryDirectory() as temporary:
        recipe = {"model_name_or_path": ("none: a made-up run", ""), "dataset_name": ("none", "")}
        summary = {"restarts": 0}
        run = make_run(Path(temporary), "made-up-20261120-101500", steps=240, lift=0.45, summary=summary, recipe=recipe)
        with contextlib.chdir(temporary):  # commands on the page have paths relative to it
            page = write_report(run)
        for dark, name in enumerate(("light", "dark")):
            picture = Path(temporary) / f"{name}.png"
            photograph(browser, page, picture, dark=bool(dark))
            Image.open(picture).convert("RGB").save(folder / f"report-{name}.webp", quality=80, method=6)
            print(folder / f"report-{name}.webp")


def find_browser() -> str:
    """Return the path of a browser; exit if there is none."""
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        raise SystemExit(f"no browser: put one of {', '.join(BROWSERS)} on the path")
    return browser


def photograph(browser: str, page: Path, picture: Path, *, dark: bool, size: tuple[int, int] = SIZE) -> None:
    """Draw the first screen of a page, in light or dark colors, in a window of ``size`` pixels."""
    argv = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        f"--user-data-dir={picture.parent}/profile", f"--window-size={size[0]},{size[1]}",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--virtual-time-budget=3000",
        f"--screenshot={picture}", page.as_uri(),
    ]  # fmt: skip
    subprocess.run(argv, check=True, capture_output=True, timeout=120)


if __name__ == "__main__":
    main()
