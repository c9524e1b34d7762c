"""Golden recipes: a changed message fails, a recorded message passes, and a correction must have no problem."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from golden import compare_messages, matches

from grpo_recipes.recipe import Recipe

MESSAGE = "recipe.yaml:5: top_p 0.9 ... Fix: set top_p: 1.0, or ..."


@pytest.fixture
def golden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return a function that writes a golden file. The recipe is written in the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "golden").mkdir()

    def write(*messages: str, correction: str = "remove: [top_p]") -> Path:
        path = tmp_path / "golden/top_p.yaml"
        path.write_text("".join(f"# {line}\n" for line in messages) + f"top_p: 0.9\n---\n{correction}\n")
        return path

    return write


@pytest.mark.parametrize(
    ("messages", "correction"),
    [
        ((), "top_p: 1.0"),
        ((MESSAGE.replace("0.9", "0.8"),), "top_p: 1.0"),
        ((MESSAGE, MESSAGE), "top_p: 1.0"),
        ((MESSAGE,), "top_p: 0.8"),
        ((MESSAGE,), "temperature: 0.9"),
    ],
)
def test_other_messages_and_corrections_fail(golden, read: Callable[..., Recipe], messages, correction) -> None:
    with pytest.raises(AssertionError):
        compare_messages(golden(*messages, correction=correction), read)
    compare_messages(golden(MESSAGE), read)


def test_only_messages_that_do_not_match_are_written(golden, read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_GOLDEN", "write")
    path = golden(MESSAGE)
    before = path.read_text()
    compare_messages(path, read)
    assert path.read_text() == before
    compare_messages(golden("an old message", "another"), read)
    monkeypatch.delenv("GRPO_GOLDEN")
    compare_messages(path, read)
    assert path.read_text().startswith("# recipe.yaml:5: top_p 0.9 biases")
    assert path.read_text().endswith("\ntop_p: 0.9\n---\nremove: [top_p]\n")


def test_dots_stand_for_any_text() -> None:
    assert matches(["a ... c", "(x)"], ["a b c", "(x)"])
    assert not matches(["a ... c"], ["a b c d"]) and not matches(["x"], ["y"]) and not matches(["(x)"], ["x"])
