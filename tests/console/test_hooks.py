"""Hooks of the console at the start, during and at the end of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fake_hub import FakeHub

from console.publish.conftest import hub, logged_in, run_dir
from console.report.synthetic_runs import make_run
from grpo_recipes.console.hooks import ConsoleHooks
from grpo_recipes.launch.hooks import AllHooks
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.extensions import is_served
from grpo_recipes.runs.rundir import read_json

__all__ = ["hub", "logged_in", "run_dir"]


def test_the_registry_lists_the_hooks_of_the_console() -> None:
    assert is_served("push_to_hub") and not is_served("learning_rate")
    assert any(isinstance(hook, ConsoleHooks) for hook in AllHooks()._hooks)


def test_a_run_that_publishes_is_checked_first_and_pushed_at_its_end(
    hub: FakeHub, logged_in: dict[str, str], run_dir: Path, read: Callable[..., Recipe], monkeypatch
) -> None:
    for name, value in logged_in.items():
        monkeypatch.setenv(name, value)
    hooks = ConsoleHooks()
    (line,) = hooks.check(read(push_to_hub=True, hub_model_id="ada/sums"), logged_in, "mine")
    assert line.startswith("the final model will be published in ada/sums (main; ")
    assert hooks.on_model(run_dir).startswith(", published in http")
    assert read_json(run_dir / "summary.json")["published"]["commit"] == hub.repos["model", "ada/sums"].at("main")


def test_a_run_that_does_not_publish_asks_no_hub(hub: FakeHub, run_dir: Path, read: Callable[..., Recipe]) -> None:
    hooks = ConsoleHooks()
    assert hooks.check(read(), {}, "mine") == [] and hooks.on_model(run_dir) == ""
    assert hub.requests == [] and (run_dir / "model/README.md").is_file()


def test_the_report_is_written_while_a_run_trains_and_at_its_end(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=3)
    ConsoleHooks().on_progress(folder)
    assert (folder / "report.html").is_file()
    (folder / "report.html").unlink()
    assert ConsoleHooks().list_results(folder) == {}
    assert ConsoleHooks().on_end(folder) == [f"report in {folder}/report.html"]
    assert ConsoleHooks().list_results(folder) == {"report": f"{folder}/report.html"}
    assert (folder / "report.html").is_file()
