"""What a run pushes to the hub and when. The launcher calls it; nothing here ends or delays a training step."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from grpo_recipes.paths import shown
from grpo_recipes.plan.environment import base_environment, hub_environment
from grpo_recipes.process.tree import OWN_CHILDREN
from grpo_recipes.publish.card import card_of
from grpo_recipes.publish.preflight import Target
from grpo_recipes.publish.push import WAITS, Job, wait_for
from grpo_recipes.publish.stage import stage
from grpo_recipes.runs.checkpoints import complete_checkpoints, is_complete, newest_complete, step_of
from grpo_recipes.runs.rundir import finish_summary, read_json, write_json
from grpo_recipes.secrets import masked

_LOOK_SECONDS = 1.0


class Publisher:
    """Pushes complete checkpoints in the background and the final model at the end, as ``hub_strategy`` says.

    Args:
        target: where to.
        run_dir: the run directory.
        environment: variables of the pushing process.
        say: prints a line for the person who watches.
    """

    def __init__(self, target: Target, run_dir: Path, environment: Mapping[str, str], say: Callable[[str], None]):
        self._target, self._run_dir, self._environment, self._say = target, run_dir, dict(environment), say
        self._folder = run_dir / "publish"
        self._remove_staged()
        self._seen = {path.name for path in complete_checkpoints(run_dir / "checkpoints")}
        self._waiting: list[str] = []
        self._child: subprocess.Popen[bytes] | None = None
        self._pushing = ""
        self._next_look = 0.0
        self._waits = WAITS
        self.last: dict[str, Any] | None = None

    def __str__(self) -> str:
        target = self._target
        kind = "a private repository if it is new" if target.private else "a public repository if it is new"
        told = f"{target.repo} ({target.branch}, {target.strategy}; {kind})"
        return f"{told}; {target.note}" if target.note else told

    def tick(self) -> None:
        """Look for a new complete checkpoint and start or collect its push. Never raises: the run goes on."""
        if self._target.strategy == "end" or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK_SECONDS
        try:
            self._collect()
            for checkpoint in self._new_checkpoints():
                self._take(checkpoint)
            self._start_next()
        except Exception as error:  # a full disk, say; publishing must never end a run
            self._say(f"could not publish a checkpoint: {type(error).__name__}: {error}; training goes on")

    def finish(self) -> dict[str, Any]:
        """Push the final model and its card, and wait for that.

        Returns:
            repo, revision, commit and url; or repo and error.
        """
        self._end_background()
        folders = {str(self._run_dir / "model"): "", **self._final_checkpoints()}
        self._say(f"publishing the model in {self._target.repo}")
        self._start("model", folders, "Final model")
        assert self._child is not None
        cut_off = wait_for(self._child)
        return self._result("model") or {"repo": self._target.repo, "error": cut_off or "the pushing process died"}

    def abandon(self) -> None:
        """Give up what is not pushed yet: the run ended without a final model."""
        if self._child is not None or self._waiting:
            self._say(f"{', '.join([self._pushing, *self._waiting])} may not be published: the run ended before")
        self._end_background()
        if self.last is not None:
            finish_summary(self._run_dir, published=self.last)

    def _end_background(self) -> None:
        if self._child is not None and self._child.poll() is None:
            self._child.kill()
            self._child.wait()
        self._child, self._waiting = None, []
        self._remove_staged()

    def upload_command(self) -> str:
        """What a person types to publish the model later."""
        target = self._target
        branch = [] if target.branch == "main" else ["--revision", target.branch]
        private = ["--private"] if target.private else []
        return shlex.join(["hf", "upload", target.repo, shown(self._run_dir / "model"), *branch, *private])

    def _remove_staged(self) -> None:
        """Links keep the bytes of a checkpoint that is pruned."""
        for staged in self._folder.glob("checkpoint-*/"):
            shutil.rmtree(staged, ignore_errors=True)

    def _new_checkpoints(self) -> list[Path]:
        found = [path for path in (self._run_dir / "checkpoints").glob("checkpoint-*") if path.name not in self._seen]
        new = sorted((path for path in found if is_complete(path)), key=step_of)
        self._seen |= {path.name for path in new}
        return new

    def _take(self, checkpoint: Path) -> None:
        """Keep a checkpoint for its push, unless one is under way."""
        if (self._child or self._waiting) and not self._target.always:
            self._say(f"{checkpoint.name} is not published, the push before it is not finished (hub_always_push: true)")
        elif stage(checkpoint, self._folder / checkpoint.name, self._target.strategy):
            self._waiting.append(checkpoint.name)
        else:
            self._say(f"{checkpoint.name} is not published: it holds no whole model, only shards of it")

    def _start_next(self) -> None:
        if self._child is not None or not self._waiting:
            return
        name = self._waiting.pop(0)
        staged = self._folder / name
        folders = {}
        if (staged / "model").exists():
            (staged / "model" / "README.md").write_text(card_of(self._run_dir))
            folders[str(staged / "model")] = ""
        if (staged / "checkpoint").exists():
            folders[str(staged / "checkpoint")] = self._place(name)
        self._start(name, folders, f"Training in progress, step {step_of(staged)}")

    def _place(self, name: str) -> str:
        return "last-checkpoint" if self._target.strategy == "checkpoint" else name

    def _final_checkpoints(self) -> dict[str, str]:
        """Checkpoints that belong to the final push: those that never came to theirs."""
        folder, pushed = self._run_dir / "checkpoints", self._pushed()
        if self._target.strategy == "checkpoint":
            newest = newest_complete(folder)
            wanted = [newest] if newest else []
        elif self._target.strategy == "all_checkpoints":
            wanted = complete_checkpoints(folder)
        else:
            wanted = []
        return {str(path): self._place(path.name) for path in wanted if path.name not in pushed}

    def _start(self, name: str, folders: dict[str, str], message: str) -> None:
        self._folder.mkdir(exist_ok=True)
        result = self._folder / f"{name}.json"
        result.unlink(missing_ok=True)
        target = self._target
        job = self._folder / f"{name}.job.json"
        Job(target.repo, target.private, target.branch, message, folders, str(result), self._waits).write(job)
        with (self._folder / "push.log").open("ab") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "grpo_recipes.publish.push", str(job)],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        OWN_CHILDREN.add(self._child.pid)
        self._pushing = name

    def _collect(self) -> None:
        """Take note of a push that has ended."""
        if self._child is None or self._child.poll() is None:
            return
        name, self._child = self._pushing, None
        shutil.rmtree(self._folder / name, ignore_errors=True)
        result = self._result(name) or {"error": "the pushing process died"}
        if "error" in result:
            self._say(f"could not publish {name}: {result['error']}; training goes on")
        else:
            self._say(f"published {name} in {result['url']} (commit {result['commit'][:12]})")

    def _result(self, name: str) -> dict[str, Any] | None:
        result = read_json(self._folder / f"{name}.json")
        if result is not None and "error" not in result:
            write_json(self._folder / "pushed.json", {**self._pushed(), name: result})
            self.last = result
        return result

    def _pushed(self) -> dict[str, Any]:
        return read_json(self._folder / "pushed.json") or {}


def make_publisher(
    target: Target | None, run_dir: Path, environment: Mapping[str, str], say: Callable[[str], None]
) -> Publisher | None:
    """The publisher of a run, None when it does not publish. Its processes get the user's login."""
    if target is None:
        return None
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    return Publisher(target, run_dir, {**base_environment(environment), **hub_environment(environment), **quiet}, say)


def hand_over(publisher: Publisher | None, run_dir: Path) -> str:
    """Leave the model card beside the trained model, and push both if the run publishes.

    ``published`` in summary.json tells how that went.

    Returns:
        What the last line of the run says of it.
    """
    try:
        (run_dir / "model" / "README.md").write_text(card_of(run_dir))
        if publisher is None:
            return ""
        result = publisher.finish()
    except Exception as error:  # a full disk, say: the run is complete, and must not fail for its card
        result = {"error": masked(f"{type(error).__name__}: {error}")}
    if publisher is None:
        return f"; no model card ({result['error']})"
    finish_summary(run_dir, published=result)
    if "error" not in result:
        return f", published in {result['url']}"
    return f"; NOT published ({result['error']}), do it with: {publisher.upload_command()}"
