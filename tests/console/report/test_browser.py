"""The pages in a real browser: at a phone's and a desk's width, light and dark, nothing overflows, hides or fails.

The page's policy blocks other scripts, so an outer page measures it in a frame.
"""

from __future__ import annotations

import csv
import html
import io
import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from PIL import Image

from grpo_recipes.console.report.comparison import write_comparison
from grpo_recipes.console.report.pages import write_report
from grpo_recipes.console.sweep.folder import write_sweep_page
from scripts import report_picture

from .synthetic_runs import game_samples, make_run, make_sweep, token_view, two_samples

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
HOME = Path(report_picture.__file__).parents[1]
WIDTHS = (390, 1400)
PROBE = (Path(__file__).parent / "browser_probe.html").read_text()


@dataclass(frozen=True)
class BrowserViews:
    """Measurements by (page, width), and the lines of the console."""

    dark: bool
    views: dict[tuple[str, int], dict[str, Any]]
    console: list[str]


def chromium(folder: Path, page: Path, budget: int, dark: bool) -> subprocess.CompletedProcess[str]:
    """Run a page for ``budget`` virtual milliseconds and return its content and the console."""
    done = subprocess.run(
        [
            str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files",
            f"--user-data-dir={folder}/profile", "--enable-logging=stderr", "--window-size=1500,4000",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}", f"--virtual-time-budget={budget}",
            "--dump-dom", page.as_uri(),
        ],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


def run_chromium(folder: Path, page: Path, budget: int) -> dict[str, Any]:
    (text,) = re.findall(r'<pre id="found">(.*?)</pre>', chromium(folder, page, budget, False).stdout, re.DOTALL)
    measurements: dict[str, Any] = json.loads(html.unescape(text))
    return measurements


pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write the page of a run with very long texts, its comparison with two runs, and the page of a sweep."""
    root = tmp_path_factory.mktemp("browser")
    long_word = {**two_samples()[0], "completion": "x" * 3000, "prompt": "<script>console.error(1)</script>" * 20}
    summary = {"status": "failed", "exit_code": 1, "cause": "y" * 300}
    run = make_run(root, steps=80, samples=[long_word, *two_samples()], summary=summary, objective="listwise")
    recipe = {"beta": (0.0, "config_math.yaml:20")}
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    ratios = {f"sampling/importance_sampling_ratio/{end}": lambda step: 1 - step * 3e-8 for end in ("mean", "min")}
    with (run / "metrics.jsonl").open("w") as file:
        for row in rows:
            json.dump(row | {name: ratio(row["step"]) for name, ratio in ratios.items()}, file)
            file.write("\n")
    base_runs = [make_run(root, f"base-20261120-10150{seed}", steps=40, seed=seed, recipe=recipe) for seed in (1, 2)]
    failed = game_samples(20, failed="z" * 300)
    failed[0]["episode"]["environment"] = f"/{'long_folder/' * 20}{'name' * 40}.py:Game"
    sweep = make_sweep(root / "sweep", statuses={"learning_rate=1e-6,seed=2": "failed"})
    return {
        "run": write_report(run),
        "comparison": write_comparison([run, *base_runs], root / "comparison.html"),
        "sweep": write_sweep_page(sweep)[0],
        "episodes": write_report(
            make_run(root, "game-20261120-101503", steps=30, samples=[*game_samples(20), *failed])
        ),
    }


@pytest.fixture(scope="module", params=["light", "dark"])
def browser_views(
    request: pytest.FixtureRequest, pages: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> BrowserViews:
    """Measure the pages at each width and collect the lines of the browser's console."""
    folder, dark = tmp_path_factory.mktemp(request.param), request.param == "dark"
    views = [(name, width) for name in pages for width in WIDTHS]
    frames = [f'<iframe src="{pages[name].as_uri()}" width="{width}" height="900"></iframe>' for name, width in views]
    (folder / "outer.html").write_text(PROBE.replace("FRAMES", "".join(frames)))
    done = chromium(folder, folder / "outer.html", 1_000_000, dark)
    (text,) = re.findall(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return BrowserViews(dark, dict(zip(views, json.loads(html.unescape(text)), strict=True)), console)


def test_the_console_is_silent(browser_views: BrowserViews) -> None:
    assert browser_views.console == []


def test_no_page_is_wider_than_the_screen(browser_views: BrowserViews) -> None:
    for (name, width), view in browser_views.views.items():
        assert view["width"] == width
        assert view["scroll"] <= width, f"{name}: {view['scroll']} px wide"
        assert view["opened"] <= width, f"{name}: {view['opened']} px wide with open folds"


def test_labels_stay_on_their_cards_and_names_break_between_words(browser_views: BrowserViews) -> None:
    for page, view in browser_views.views.items():
        assert view["spilled"] == [], page


def test_tables_of_a_run_fit_on_a_phone(browser_views: BrowserViews) -> None:
    for (name, width), view in browser_views.views.items():
        if name == "run":
            assert len(view["tables"]) == 5 and set(view["tables"]) == {0}, width


def test_every_text_stands_out_from_its_ground(browser_views: BrowserViews) -> None:
    for view in browser_views.views.values():
        assert (sum(view["ground"][:3]) < 200) == browser_views.dark
        assert 4.5 <= view["contrast"][0] < 21, view["contrast"]


def test_charts_are_wide_and_their_letters_large_enough(browser_views: BrowserViews) -> None:
    for view in browser_views.views.values():
        assert view["smallest"] > 250
        assert float(view["letters"].removesuffix("px")) >= 11


def test_read_out_and_slider_say_what_the_run_has(browser_views: BrowserViews) -> None:
    for width in WIDTHS:
        view = browser_views.views["run", width]
        lines = view["tip"].splitlines()
        assert lines[0] == "step 80"
        assert re.fullmatch(r"training: 0\.\d+ \(0\.\d+ to 0\.\d+\), unsmoothed 0\.\d+", lines[1])
        assert re.fullmatch(r"evaluation: 0\.\d+ at 78", lines[2])
        assert view["steps"] == [["80"], ["77"]]


def test_the_comparison_reads_out_every_group(browser_views: BrowserViews) -> None:
    lines = browser_views.views["comparison", 1400]["tip"].splitlines()
    assert [line.split(":")[0] for line in lines] == ["step 80", "math", "base (2 seeds)"]
    assert lines[2].endswith(" at 40")


def test_a_search_leaves_the_completions_that_have_the_words(browser_views: BrowserViews) -> None:
    (matches, note), none, (shown, _) = browser_views.views["run", 1400]["hits"]
    assert matches > 1 and note == f"{matches} completions"
    assert none == [0, "0 completions"]
    assert 0 < shown < matches  # without words, the page shows only the slider's step again


def test_figures_are_saved_as_numbers_drawing_and_picture(browser_views: BrowserViews) -> None:
    for (name, _), view in browser_views.views.items():
        files = view["files"]
        assert [files[kind][0] for kind in ("CSV", "SVG", "PNG")] == ["text/csv", "image/svg+xml", "image/png"], name
        head, *rows = list(csv.reader(io.StringIO(files["CSV"][1])))
        assert head == ["curve", "step", "value", "low", "high"] and len(rows) > 20
        drawing = ElementTree.fromstring(files["SVG"][1])
        words = {node.text for node in drawing.iter("{http://www.w3.org/2000/svg}text")}
        assert {"Reward", "mean reward", "optimizer step"} <= words
        strokes = {node.get("stroke") for node in drawing.iter("{http://www.w3.org/2000/svg}path")}
        assert len(strokes) > 2 and not any("var(" in str(stroke) for stroke in strokes)
        assert int(files["PNG"][1]) > 2000
    label, step, value, low, high = rows_of(browser_views.views["run", 1400])[-1]
    assert (label, step) == ("evaluation", "78") and 0 < float(value) < 1 and low == high == ""


def rows_of(view: dict[str, Any]) -> list[list[str]]:
    return list(csv.reader(io.StringIO(view["files"]["CSV"][1])))


@pytest.mark.slow
def test_a_running_page_loads_itself_again_and_keeps_what_is_open(tmp_path: Path) -> None:
    samples = [sample | token_view(["a", "b"], "2:1") for sample in two_samples()]
    page = write_report(make_run(tmp_path, steps=30, summary={"status": "running"}, samples=samples))
    outer = tmp_path / "outer.html"
    outer.write_text(RELOADS.replace("PAGE", page.as_uri()))
    assert run_chromium(tmp_path, outer, budget=60_000) == {"loads": 2, "open": True, "step": "3", "tokens": 2}
    page.write_text(page.read_text().replace('class="live"', 'class="over"'))
    assert run_chromium(tmp_path, outer, budget=60_000)["loads"] == 1


RELOADS = """<!doctype html><iframe src="PAGE"></iframe><pre id="found"></pre><script>
const frame = document.querySelector("iframe");
let loads = 0;
const note = () => {
  const doc = frame.contentDocument;
  const [open, step] = [doc.querySelector("details.more").open, doc.querySelector(".stepper input").value];
  const found = { loads, open, step, tokens: doc.querySelectorAll(".steps .token").length };
  document.getElementById("found").textContent = JSON.stringify(found);
};
frame.addEventListener("load", () => {
  loads += 1;
  const doc = frame.contentDocument;
  if (loads === 1) {
    for (const fold of ["details.more", ".steps .tokens"]) doc.querySelector(fold).open = true;
    const slider = doc.querySelector(".stepper input");
    slider.value = 3;
    slider.dispatchEvent(new Event("input"));
  }
  if (loads < 3) note();
});
setTimeout(note, 20000);
</script>"""


@pytest.mark.slow
def test_the_picture_of_the_docs_is_made_from_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["report_picture", "--out", str(tmp_path)])
    report_picture.main()
    means = {}
    for name in ("light", "dark"):
        file = f"report-{name}.webp"
        picture = Image.open(tmp_path / file).convert("RGB")
        assert picture.size == report_picture.SIZE == Image.open(HOME / "docs/assets" / file).size
        assert (HOME / "docs/assets" / file).stat().st_size < 150_000
        colours = picture.getcolors(2**24)
        assert colours is not None and len(colours) > 500  # text and curves, not an empty window
        means[name] = sum(count * sum(colour) for count, colour in colours) / (3 * picture.width * picture.height)
    assert means["dark"] < 60 and means["light"] > 200
