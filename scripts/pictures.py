"""Make pictures for the documentation from the product's own output: a terminal and the page of a sweep.

    python -m scripts.pictures [terminal] [sweep] [--out docs/assets]

``terminal`` runs `grpo check` on a recipe with mistakes and writes its output as ``terminal.svg``. ``sweep`` writes
the page of a sweep as ``sweep-light.webp`` and ``sweep-dark.webp``. The runs of the sweep come from formulas, so the
picture changes only if the page changes. It needs Chromium on the path. ``scripts.report_picture`` makes the picture of
a report. The drawings in ``docs/assets`` (architecture, step, weight-sync) are SVG files that are edited by hand.
"""

from __future__ import annotations

import argparse
import io
import tempfile
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.text import Text

from grpo_recipes.console.sweep.folder import write_sweep_page
from scripts.report_picture import HOME, find_browser, photograph
from tests.console.report.synthetic_runs import make_sweep
from tests.in_terminal import run_in_terminal

COLUMNS = 92  # of the terminal
SWEEP_SIZE = (1280, 1296)  # of the picture, in pixels: the page down to the first chart
_BELOW = 120  # further pixels of the window, because headless Chromium may cover its lower right corner
# Each line after the second has a mistake that `grpo check` finds without network and GPU.
RECIPE = """\
model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct
dataset_name: openai/gsm8k
reward_funcs: [math_verfy, format_tags]
learning_rat: 1e-6
beta: 0,04
bf16: auto
"""
# Rich's own template loads a font from a server. This one uses the viewer's font, and rich stretches each line to its
# columns.
TERMINAL = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">
<title>grpo check my.yaml</title>
<style>
.{unique_id}-matrix {{font: {char_height}px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; line-height: \
{line_height}px}}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}</defs>
{chrome}
<g transform="translate({terminal_x} {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def main() -> None:
    """Make the pictures that the command line names; without names, make all."""
    makers = {"terminal": make_terminal, "sweep": make_sweep_page}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", nargs="*", help=f"pictures to make: {', '.join(makers)} (default: all)")
    parser.add_argument("--out", type=Path, default=HOME / "docs/assets", help="folder of the pictures")
    options = parser.parse_args()
    if unknown := set(options.pictures) - makers.keys():
        parser.error(f"unknown pictures: {', '.join(sorted(unknown))}")
    for name in options.pictures or makers:
        for path in makers[name](options.out):
            print(path)


def make_terminal(folder: Path) -> list[Path]:
    """Write the recipe and the output of `grpo check` as a picture of a terminal."""
    console = Console(width=COLUMNS, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.assemble(("$ ", "green"), ("cat my.yaml", "bold")))
    console.print(Text(RECIPE, "dim"), end="")
    console.print(Text.assemble(("$ ", "green"), ("grpo check my.yaml", "bold")))
    console.print(Text.from_ansi(check_output()))
    console.print(Text("$ ", "green"))
    path = folder / "terminal.svg"
    path.write_text(console.export_svg(title="", code_format=TERMINAL, unique_id="terminal"))
    return [path]


def check_output() -> str:
    """Run `grpo check` on the recipe with mistakes in a terminal, and return what it prints there, with its colors."""
    with tempfile.TemporaryDirectory() as temporary:
        (Path(temporary) / "my.yaml").write_text(RECIPE)
        return run_in_terminal(COLUMNS, "check", "my.yaml", cwd=Path(temporary), HOME=temporary).rstrip("\n")


def make_sweep_page(folder: Path) -> list[Path]:
    """Write the page of a sweep with two learning rates and five seeds, in light and dark colors."""
    browser = find_browser()
    paths: list[Path] = []
    width, height = SWEEP_SIZE
    with tempfile.TemporaryDirectory() as temporary:
        sweep = make_sweep(Path(temporary) / "made-up-20261120-101500", seeds=(1, 2, 3, 4, 5))
        page, _ = write_sweep_page(sweep)
        for name in ("light", "dark"):
            picture, path = Path(temporary) / f"{name}.png", folder / f"sweep-{name}.webp"
            photograph(browser, page, picture, dark=name == "dark", size=(width, height + _BELOW))
            Image.open(picture).convert("RGB").crop((0, 0, width, height)).save(path, quality=80, method=6)
            paths.append(path)
    return paths


if __name__ == "__main__":
    main()
