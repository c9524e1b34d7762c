"""The mutants: each has its place in today's code and tests that exist; `make mutants` runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import mutants
import pytest
from ledgers import REPOSITORY, exists
from mutants import Mutant, emptied, rows, survivors


def test_each_has_its_place_and_its_tests_exist() -> None:
    assert len({mutant.name for mutant in rows()}) == len(rows()) >= 30
    for mutant in rows():
        text = (REPOSITORY / mutant.path()).read_text()
        assert mutant.of(text) != text and mutant.promise, mutant.name
        assert mutant.tests and all(map(exists, mutant.tests)), mutant.name
        if mutant.function:
            compile(mutant.of(text), mutant.path(), "exec")


def test_a_function_is_emptied_and_what_stands_around_it_is_kept() -> None:
    text = 'def one(a):\n    """Says it."""\n    return a\n\n'
    text += "class Two:\n    @staticmethod\n    def three():\n        yield 1\n"
    scope: dict = {}
    exec(emptied(text, ["one"], "'x'"), scope)
    assert scope["one"](1) == "x" and list(scope["Two"].three()) == [1]
    exec(emptied(text, ["Two", "three"], "None"), scope)
    assert scope["one"](1) == 1 and list(scope["Two"].three()) == []
    with pytest.raises(ValueError, match=r"no Two\.four"):
        emptied(text, ["Two", "four"], "None")


def test_a_text_has_to_be_there_once() -> None:
    mutant = Mutant("promise", (), file="a.sh", replace="pip", by="true")
    assert mutant.of("pip install") == "true install"
    for text in ("none", "pip pip"):
        with pytest.raises(ValueError, match="times 'pip'"):
            mutant.of(text)


@pytest.mark.slow
def test_one_that_no_test_notices_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/planted.py").write_text("def number():\n    return 1\n")
    asserts = "from planted import number\ndef test_right(): assert number() == 1\ndef test_empty(): number()\n"
    (tmp_path / "test_it.py").write_text(asserts)
    monkeypatch.setattr(mutants, "REPOSITORY", tmp_path)
    good, bad = (Mutant("promise", (f"test_it.py::test_{name}",), "planted:number") for name in ("right", "empty"))
    assert survivors(tmp_path, (good, bad)) == ["planted:number can be emptied: promise"]
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["noticed", "SURVIVED"]
    assert "return 1" in (tmp_path / "src/planted.py").read_text()
    (tmp_path / "src/planted.py").write_text("def number():\n    return 2\n")
    assert survivors(tmp_path, (good,))[0].startswith("the tests fail without a mutant")


def test_words_choose_some() -> None:
    done = subprocess.run([sys.executable, mutants.__file__, "no-such"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "mutants: 0 to try, 0 things are wrong\n")
