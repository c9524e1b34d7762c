"""The page that says what replaced the files of the original guides (M12)."""

from __future__ import annotations

import re

import pytest
import yaml
from doc_pages import REPOSITORY

PAGE = REPOSITORY / "docs/guide-files.md"
ROWS = re.findall(r"^\| (`.*?) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
ASKED = (
    "src/configs.py", "src/rewards.py", "docs/requirements.txt", "IMPLEMENTATION_STATUS.md", "scripts/offline_trainer",
)  # fmt: skip


@pytest.mark.parametrize("name", ASKED)
def test_the_page_says_what_replaced_a_file_of_the_guides(name: str) -> None:
    """M12: each of these files has a row with its replacement."""
    assert not (REPOSITORY / name).exists()
    assert [new for old, new in ROWS if f"`{name}`" in old]


def test_every_replacement_exists() -> None:
    """M12: paths in the page exist in this repository."""
    paths = [path for _, new in ROWS for path in re.findall(r"`([\w.]+/[\w./]*|\w+\.(?:py|sh))`", new)]
    assert len(paths) > 6
    assert [path for path in paths if not (REPOSITORY / path).exists()] == []


def test_the_page_is_searched_and_in_the_navigation() -> None:
    """M12: a search for an old path finds the page."""
    assert "exclude" not in PAGE.read_text().partition("# Files")[0]

    class Loader(yaml.SafeLoader):
        """YAML with the tags of mkdocs."""

    Loader.add_multi_constructor("", lambda *_: None)
    navigation = yaml.load((REPOSITORY / "mkdocs.yml").read_text(), Loader)["nav"]
    assert "guide-files.md" in str(navigation)
