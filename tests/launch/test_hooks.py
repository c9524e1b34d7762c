"""The hooks of extensions are called in turn, and an error of a hook never ends a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_recipes.errors import ConfigError, config_error
from grpo_recipes.launch.hooks import AllHooks, RunHooks


class Fine(RunHooks):
    def check(self, recipe, environment, run_name) -> list[str]:
        return [f"{run_name} is checked"]

    def on_end(self, run_dir: Path) -> list[str]:
        return [f"{run_dir} has ended"]

    def on_model(self, run_dir: Path) -> str:
        return ", copied"

    def next_command(self, run_dir: Path) -> str:
        return f"copy {run_dir}"

    def list_results(self, run_dir: Path) -> dict[str, str]:
        return {"copy": f"{run_dir}.copy"}


class Broken(RunHooks):
    def check(self, recipe, environment, run_name) -> list[str]:
        raise config_error("here", "the disk is full", "make room")

    def on_progress(self, run_dir: Path) -> None:
        raise OSError("the disk is full")

    def on_end(self, run_dir: Path) -> list[str]:
        raise OSError("the disk is full")

    def on_model(self, run_dir: Path) -> str:
        raise OSError("the disk is full")

    def next_command(self, run_dir: Path) -> str:
        raise OSError("the disk is full")

    def list_results(self, run_dir: Path) -> dict[str, str]:
        raise OSError("the disk is full")


def test_hooks_do_nothing_by_default(read) -> None:
    hooks = AllHooks([RunHooks()])
    hooks.on_progress(Path("run"))
    assert (hooks.check(read(), {}, "mine"), hooks.on_end(Path("run")), hooks.on_model(Path("run"))) == ([], [], "")
    assert hooks.list_results(Path("run")) == {}


def test_every_hook_is_called_and_an_error_becomes_a_line(read) -> None:
    hooks = AllHooks([Broken(), Fine()])
    hooks.on_progress(Path("run"))
    assert hooks.on_end(Path("run")) == ["Broken failed (OSError: the disk is full)", "run has ended"]
    assert hooks.on_model(Path("run")) == "; Broken failed (OSError: the disk is full), copied"
    assert hooks.next_command(Path("run")) == "Broken failed (OSError: the disk is full)"
    assert AllHooks([RunHooks(), Fine()]).next_command(Path("run")) == "copy run"
    assert hooks.list_results(Path("run")) == {"copy": "run.copy"}, "a broken hook has no results"
    assert AllHooks([Fine()]).check(read(), {}, "mine") == ["mine is checked"]


def test_an_error_while_a_run_trains_is_reported_once_for_each_hook() -> None:
    hooks = AllHooks([Broken(), Fine(), Broken()])
    assert hooks.take_failures() == []
    for _ in range(3):
        hooks.on_progress(Path("run"))
    assert hooks.take_failures() == ["Broken failed (OSError: the disk is full)"] * 2
    hooks.on_progress(Path("run"))
    assert hooks.take_failures() == []


def test_a_hook_can_keep_a_run_from_starting(read) -> None:
    with pytest.raises(ConfigError, match="the disk is full"):
        AllHooks([Fine(), Broken()]).check(read(), {}, "mine")
