"""Core commands find, show and stop a folder of several runs that an extension creates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import pytest

from grpo_recipes.cli import main
from grpo_recipes.errors import ConfigError, config_error
from grpo_recipes.runs import groups
from grpo_recipes.runs.groups import GONE, RunGroup, find_group, list_groups
from grpo_recipes.runs.rundir import CELLS, Run, lock_run, read_json, stop_file, write_json
from grpo_recipes.slurm import client


@dataclass(frozen=True)
class Pair(RunGroup):
    """A folder with two runs."""

    kind: ClassVar[str] = "pair"
    parent: ClassVar[str] = "pairs"
    record_file: ClassVar[str] = "pair.json"

    @classmethod
    def read(cls, folder: Path) -> Self:
        record = read_json(folder / cls.record_file)
        if "jobs" not in record:
            raise config_error(str(folder), "is damaged", "restore it")
        return cls(folder.absolute(), record)

    @property
    def names(self) -> list[str]:
        return ["left", "right"]

    @property
    def trial_count(self) -> int:
        return 2

    def trial_dir(self, index: int) -> Path:
        return self.folder / CELLS / self.names[index]

    def is_over(self) -> bool:
        return all(self.status(index) == "completed" for index in range(2))

    def resume_command(self) -> str:
        return f"pair again {self.folder.name}"


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a pair with a completed run and a missing run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUN_ROOT", str(tmp_path / "runs"))
    monkeypatch.setattr(client, "query", lambda *argv, **how: None)
    monkeypatch.setattr(groups, "group_kinds", lambda: (Pair,))
    folder = tmp_path / "runs/pairs/mine"
    (folder / CELLS / "left").mkdir(parents=True)
    write_json(folder / "pair.json", {"jobs": []})
    write_json(folder / CELLS / "left/summary.json", {"status": "completed"})
    return folder


def test_a_group_is_found_by_its_path_and_its_name(pair: Path, tmp_path: Path) -> None:
    for name in ("mine", str(pair)):
        group = find_group(tmp_path / "runs", name)
        assert isinstance(group, Pair) and group.folder == pair
        assert [group.status(index) for index in range(2)] == ["completed", GONE]
    assert find_group(tmp_path / "runs", "other") is None and find_group(tmp_path / "runs", "") is None


def test_a_damaged_group_hides_no_other(pair: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "runs/pairs/damaged"
    damaged.mkdir()
    (damaged / "pair.json").write_text("[]")
    assert [group.folder for group in list_groups(tmp_path / "runs")] == [pair]
    with pytest.raises(ConfigError, match="is damaged"):
        find_group(tmp_path / "runs", "damaged")


def test_a_damaged_trial_hides_no_other_run(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (pair / CELLS / "left/summary.json").write_text("")
    (pair.parents[1] / "run-1").mkdir()
    write_json(pair.parents[1] / "run-1/run.json", {"run_name": "run"})
    assert main(["status"]) == 0
    output = capsys.readouterr().out
    assert "pairs/mine  damaged: summary.json" in output and "run-1       lost" in output


def test_status_and_stop_handle_a_group(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "mine"]) == 0
    assert capsys.readouterr().out.startswith("pair     runs/pairs/mine\nstate    stopped, 1 of 2 trials completed\n")
    assert main(["status"]) == 0
    assert "pairs/mine  stopped, 1 of 2 trials completed" in capsys.readouterr().out
    assert main(["stop", "mine"]) == 2
    assert "Fix: resume it with: pair again mine" in capsys.readouterr().err
    lock = lock_run(Run(pair))
    assert main(["stop", "mine"]) == 0
    assert stop_file(pair).exists() and lock
