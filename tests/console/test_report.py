"""`grpo report`: reads paths, writes a page and prints its path."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from console.report.synthetic_runs import make_run
from grpo_recipes.cli import main
from grpo_recipes.runs.trace import Trace


def test_one_run_gets_its_page_in_the_run_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path, steps=3)
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"grpo: {folder}/report.html\n"
    assert "math-20261120-101500" in (folder / "report.html").read_text()


def test_one_run_gets_its_trace_and_a_link_to_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path, steps=3)
    Trace("rank_0", folder).add("step", 0.0, 1.0, step=1)
    assert main(["report", str(folder)]) == 0
    assert [event["name"] for event in json.loads((folder / "trace.json").read_text()) if event["ph"] == "X"] == [
        "step"
    ]
    assert '<a href="trace.json" download>' in (folder / "report.html").read_text()
    (folder / "trace.json").unlink()
    (folder / "trace.json").mkdir()
    capsys.readouterr()
    assert main(["report", str(folder)]) == 0
    assert "trace.json can't be written" in capsys.readouterr().out


def test_a_run_that_still_runs_is_reported_anew(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=3, summary={"status": "running"})
    assert main(["report", str(folder)]) == 0
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "max_steps": 9, "reward": 0.5}\n{"step": 5, "rew')
    assert main(["report", str(folder)]) == 0
    assert "4 of 9" in (folder / "report.html").read_text()


def test_several_runs_get_one_page_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [make_run(tmp_path, f"run-20261120-10150{number}", steps=3, seed=number) for number in (1, 2)]
    monkeypatch.chdir(tmp_path)
    assert main(["report", *map(str, folders)]) == 0
    assert capsys.readouterr().out == "grpo: report.html\n"
    assert "2 runs compared" in (tmp_path / "report.html").read_text()
    assert not (folders[0] / "report.html").exists()


def test_out_names_the_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=3)
    assert main(["report", str(folder), "--out", str(tmp_path / "x.html")]) == 0
    assert (tmp_path / "x.html").exists() and not (folder / "report.html").exists()


def test_last_is_the_newest_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = make_run(tmp_path, steps=3), make_run(tmp_path, "new-20261120-101501", steps=3)
    before = time.time() - 60
    os.utime(old / "run.json", (before, before))
    monkeypatch.setenv("RUN_ROOT", str(tmp_path))
    assert main(["report", "last"]) == 0
    assert (new / "report.html").exists() and not (old / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing"], "grpo: missing: is not a run directory (no run.json). Fix: name a folder under run_root"),
        (["RUN", "."], "grpo: .: is not a run directory (no run.json). Fix: name a folder under run_root"),
        (["last"], "grpo: last: no runs found in empty. Fix: give the run directory, or set run_root"),
        (["RUN", "--out", "no/such/folder.html"], "grpo: --out: can't write the page (No such file or directory). "
         "Fix: use a file that you may write"),
        (["RUN", "--nonsense"], "grpo: --nonsense: is not an option of grpo report. Fix: see grpo report --help"),
    ],
)  # fmt: skip
def test_what_is_no_run_is_refused_in_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    folder = make_run(tmp_path / "runs", steps=3)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUN_ROOT", "empty")
    assert main(["report", *[str(folder) if word == "RUN" else word for word in arguments]]) == 2
    assert capsys.readouterr().err.strip() == message
    assert not list(tmp_path.rglob("*.html"))
