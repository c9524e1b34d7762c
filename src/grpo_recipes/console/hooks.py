"""Hooks of a run: write ``report.html`` during and after the training, and push the model.

The launcher calls them before the start, on progress and at the end of a run, and knows nothing else of the console.
"""

from collections.abc import Mapping
from pathlib import Path

from grpo_recipes.console.publish.publisher import publish_model
from grpo_recipes.console.publish.push import Target, check_push_target
from grpo_recipes.console.report.pages import try_write_report
from grpo_recipes.launch.hooks import RunHooks
from grpo_recipes.paths import display_path, shell_path
from grpo_recipes.recipe import Recipe


class ConsoleHooks(RunHooks):
    """Hooks that the launcher calls: they write the report of a run and push its model."""

    def __init__(self) -> None:
        self._target: Target | None = None  # the repository of the final model; None without push_to_hub
        self._environment: Mapping[str, str] = {}

    def check(self, recipe: Recipe, environment: Mapping[str, str], run_name: str) -> list[str]:
        """Raise ConfigError if ``push_to_hub`` is set and the model can't be pushed; store the target for ``on_model``.

        Return a line with the target repository, or no line without ``push_to_hub``.
        """
        self._target, self._environment = check_push_target(recipe, environment, run_name), environment
        return [f"the final model will be published in {self._target}"] if self._target else []

    def on_progress(self, run_dir: Path) -> None:
        """Write ``report.html`` of a run that is still running; ignore errors."""
        try_write_report(run_dir)

    def on_end(self, run_dir: Path) -> list[str]:
        """Write ``report.html`` of an ended run, and return a line with its path or with the error."""
        return [try_write_report(run_dir)]

    def on_model(self, run_dir: Path) -> str:
        """Write the model card and push the model; return the result of the push for the launcher's output."""
        return publish_model(self._target, run_dir, self._environment)

    def next_command(self, run_dir: Path) -> str:
        """Return the command that talks to the model of a completed run."""
        return f"grpo chat {shell_path(run_dir)}"

    def list_results(self, run_dir: Path) -> dict[str, str]:
        """Return the path of the report, if it was written."""
        report = run_dir / "report.html"
        return {"report": display_path(report)} if report.is_file() else {}
