"""Pictures of the documentation: drawings are small and described, and the terminal shows the output of today."""

from __future__ import annotations

import html
import re
from xml.etree import ElementTree

import pytest
from doc_pages import REPOSITORY
from in_terminal import COLOR
from PIL import Image

from scripts import pictures

ASSETS = REPOSITORY / "docs/assets"
DRAWINGS = ("architecture", "step", "weight-sync", "terminal")


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_is_small_and_has_a_title(name: str) -> None:
    text = (ASSETS / f"{name}.svg").read_text()
    root = ElementTree.fromstring(text)
    title = root.find("{http://www.w3.org/2000/svg}title")
    assert len(text.encode()) < 12_000
    assert root.get("role") == "img" and title is not None and title.text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")  # nothing is loaded from elsewhere


def test_pictures_on_the_pages_exist_and_are_described() -> None:
    shown = []
    for page in sorted((REPOSITORY / "docs").glob("*.md")):
        text = page.read_text()
        images = [(path, alt) for alt, path in re.findall(r"!\[([^]]*)\]\(([^)]+)\)", text)]
        images += re.findall(r'<img [^>]*src="([^"]+)" alt="([^"]*)"', text)
        assert len(images) == text.count("<img ") + text.count("!["), f"{page.name}: an image without alt"
        for path, alt in images:
            assert (page.parent / path.partition("#")[0]).is_file() and len(alt.split()) > 3, f"{page.name}: {path}"
        shown += [path for path, _ in images]
    assert {f"assets/{name}.svg" for name in DRAWINGS} <= set(shown)


def test_the_terminal_shows_what_the_command_prints() -> None:
    texts = re.findall(r"<text [^>]*>([^<]+)</text>", (ASSETS / "terminal.svg").read_text())
    lines = [html.unescape(text).replace("\xa0", " ") for text in texts]
    printed = " ".join(COLOR.sub("", pictures.check_output()).split())
    assert printed in " ".join(" ".join(lines).split()), "run: python -m scripts.pictures terminal"


@pytest.mark.parametrize("name", ["light", "dark"])
def test_the_page_of_a_sweep_has_its_size(name: str) -> None:
    path = ASSETS / f"sweep-{name}.webp"
    assert Image.open(path).size == pictures.SWEEP_SIZE and path.stat().st_size < 150_000
