"""Hooks of extensions that run in the launcher, for example to write a report or to push the model.

The launcher calls the hooks of every extension at four points of an attempt: before anything is created, from time to
time while the run trains, after the processes have ended, and when the model is complete. An object serves one attempt,
so ``check`` may store a result for the other methods.

    class Report(RunHooks):
        def on_end(self, run_dir: Path) -> list[str]:
            return [f"report in {write_report(run_dir)}"]
"""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.extensions import parts
from grpo_recipes.runs.trace import try_write_trace
from grpo_recipes.secrets import mask_secrets


class RunHooks:
    """The hooks of an extension; each does nothing by default."""

    def check(self, recipe: Recipe, environment: Mapping[str, str], run_name: str) -> list[str]:
        """Raise ConfigError if the run can't start; return lines that are printed at the start of the run."""
        return []

    def on_progress(self, run_dir: Path) -> None:
        """Handle a run that trains; called in a thread, at most every half minute."""

    def on_end(self, run_dir: Path) -> list[str]:
        """Handle a run after its processes have ended and its summary is written; return lines to print."""
        return []

    def on_model(self, run_dir: Path) -> str:
        """Handle the model of a completed run in ``model/``; return a text to append to the launcher's line on it."""
        return ""

    def next_command(self, run_dir: Path) -> str:
        """Return a command that the user may run after a completed run, or "" for none."""
        return ""

    def list_results(self, run_dir: Path) -> dict[str, str]:
        """Return results of an ended run that `grpo status` shows: a label of at most 8 characters and a text."""
        return {}


class AllHooks(RunHooks):
    """The hooks of every extension, called one after the other.

    An error of a hook never ends or fails a run, except in ``check``.
    """

    def __init__(self, hooks: Sequence[RunHooks] | None = None) -> None:
        self._hooks = [make() for make in parts("run_hooks")] if hooks is None else hooks
        self._failed: set[RunHooks] = set()  # hooks with a failed ``on_progress``
        self._failures: list[str] = []  # their errors, until ``take_failures`` returns them

    def check(self, recipe: Recipe, environment: Mapping[str, str], run_name: str) -> list[str]:
        """Call ``check`` of all hooks before a run starts; return their lines; raise the ConfigError of a hook."""
        return [line for hook in self._hooks for line in hook.check(recipe, environment, run_name)]

    def on_progress(self, run_dir: Path) -> None:
        """Call ``on_progress`` of all hooks; store the first error of each hook for ``take_failures``."""
        for hook in self._hooks:
            try:
                hook.on_progress(run_dir)
            except Exception as error:
                if hook not in self._failed:
                    self._failed.add(hook)
                    self._failures.append(_describe_failure(hook, error))

    def take_failures(self) -> list[str]:
        """Return and forget the errors of ``on_progress`` since the last call, at most one for each hook in an attempt.

        Later errors of a hook are dropped, because they are likely to be the same. ``on_progress`` runs in a thread and
        must not print, so the launcher prints these lines.
        """
        return [self._failures.pop(0) for _ in range(len(self._failures))]

    def on_end(self, run_dir: Path) -> list[str]:
        """Write the trace and call ``on_end`` of all hooks; return their lines, with a line for each failure."""
        note = try_write_trace(run_dir)  # first, because the report links to it
        lines = [note] if note else []
        for hook in self._hooks:
            try:
                lines += hook.on_end(run_dir)
            except Exception as error:
                lines.append(_describe_failure(hook, error))
        return lines

    def on_model(self, run_dir: Path) -> str:
        """Call ``on_model`` of all hooks; return their texts and errors joined, for the end of a line."""
        texts = []
        for hook in self._hooks:
            try:
                texts.append(hook.on_model(run_dir))
            except Exception as error:
                texts.append(f"; {_describe_failure(hook, error)}")
        return "".join(texts)

    def next_command(self, run_dir: Path) -> str:
        """Return the first command that a hook suggests, or its error; an empty text if no hook suggests any."""
        for hook in self._hooks:
            try:
                if command := hook.next_command(run_dir):
                    return command
            except Exception as error:
                return _describe_failure(hook, error)
        return ""

    def list_results(self, run_dir: Path) -> dict[str, str]:
        """Return the results of all hooks, except of hooks that fail."""
        results: dict[str, str] = {}
        for hook in self._hooks:
            with contextlib.suppress(Exception):
                results |= hook.list_results(run_dir)
        return results


def _describe_failure(hook: RunHooks, error: Exception) -> str:
    """Return a text with the class of the hook and its error, without secrets."""
    return f"{type(hook).__name__} failed ({type(error).__name__}: {mask_secrets(str(error))})"
