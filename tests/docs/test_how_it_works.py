"""The page "How it works" says what the code does: packages, and the files that a key passes."""

from __future__ import annotations

import re
import sys

import pytest
from doc_pages import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))
import packages

PAGE = (REPOSITORY / "docs/how-it-works.md").read_text()
MOST_FILES = 10


@pytest.mark.parametrize(
    ("key", "attribute"), [("maxent_tau", "maxent.tau"), ("vllm_mode", "server.mode"), ("save_steps", "run.save_steps")]
)
def test_the_way_of_a_key_is_that_of_the_code(key: str, attribute: str) -> None:
    section = PAGE.split(f"### {key}\n")[1].split("\n#")[0]
    told = re.findall(r"^\| `([\w/]+\.py)` \| .+ \|$", section, re.MULTILINE)
    word = rf"{key}|(?:recipe|r)\.{attribute}"
    assert sorted(told) == sorted(name for name, _ in packages.files_with(word)) and len(told) <= MOST_FILES


def test_the_way_of_a_key_of_an_extension_is_that_of_the_code() -> None:
    section = PAGE.split("### environment\n")[1].split("\n#")[0]
    told = re.findall(r"^\| `([\w/]+\.py)` \| .+ \|$", section, re.MULTILINE)
    readers = {name for name, _ in packages.files_with("list_episode_environments")}
    assert {*told} == readers | {"extensions/environments/arguments.py"} and len(told) <= MOST_FILES


def test_every_file_the_page_names_is_there() -> None:
    named = re.findall(r"`((?:[\w-]+/)+[\w-]+\.py)`", PAGE)
    assert len(named) > 20
    for name in named:
        assert (REPOSITORY / name).is_file() or (packages.SOURCE / name).is_file(), name


def test_the_drawing_has_every_package_and_every_arrow_points_down() -> None:
    drawing = packages.drawing()
    used = packages.package_imports()
    assert sorted(re.findall(r"<text [^>]*>(\w+)</text>", drawing)) == sorted(
        name.removeprefix("extensions.") for name in used
    )
    arrows = re.findall(r'<path d="M(\d+) (\d+) L(\d+) (\d+)"/>', drawing)
    assert len(arrows) == len(set(packages.direct(used))) > len(used)
    assert all(int(start) < int(end) for _, start, _, end in arrows)
