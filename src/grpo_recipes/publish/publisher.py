"""Push checkpoints and the final model to the hub, from the launcher; nothing here ends or delays a training step."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from grpo_recipes.paths import shown
from grpo_recipes.plan.commands import base_environment, hub_environment
from grpo_recipes.process.tree import OWN_CHILDREN
from grpo_recipes.publish.card import card_of
from grpo_recipes.publish.push import WAITS, Job, Target
from grpo_recipes.runs.checkpoints import (
    checkpoint_folders,
    complete_checkpoints,
    is_complete,
    newest_complete,
    step_of,
)
from grpo_recipes.runs.rundir import finish_summary, read_json, write_json
from grpo_recipes.secrets import masked

_LOOK_SECONDS = 1.0
_LONGEST_PUSH = 2 * 3600.0
_MODEL_SUFFIXES = (".safetensors", ".json", ".txt", ".model", ".jinja")


def model_files(checkpoint: Path) -> list[Path]:
    """Return the files that make the model: weights, configuration, tokenizer. Empty without whole weights."""
    found = [path for path in checkpoint.iterdir() if path.is_file() and path.name.endswith(_MODEL_SUFFIXES)]
    files = [path for path in found if path.name != "trainer_state.json"]
    return sorted(files) if any(path.name.endswith(".safetensors") for path in files) else []


def stage(checkpoint: Path, folder: Path, strategy: str) -> dict[str, str]:
    """Link the files of a checkpoint that are pushed into ``folder``, where no pruning reaches them.

    Return local folder -> folder in the repository; empty when the checkpoint holds nothing to push, or was pruned
    meanwhile.
    """
    shutil.rmtree(folder, ignore_errors=True)
    places = {}
    with suppress(FileNotFoundError):
        if files := model_files(checkpoint):
            _link(files, checkpoint, folder / "model")
            places[str(folder / "model")] = ""
        if place := _place(checkpoint, strategy):
            _link([path for path in checkpoint.rglob("*") if path.is_file()], checkpoint, folder / "checkpoint")
            places[str(folder / "checkpoint")] = place
        if places and is_complete(checkpoint):
            return places
    shutil.rmtree(folder, ignore_errors=True)
    return {}


def _link(files: list[Path], root: Path, folder: Path) -> None:
    for path in files:
        target = folder / path.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, target)
        except FileNotFoundError:
            raise
        except OSError:  # a file system without hard links, or with too few: each says so in another way
            shutil.copy2(path, target)


def _place(checkpoint: Path, strategy: str) -> str:
    """Return the folder of the repository that gets a checkpoint; an empty text where only the model is pushed."""
    return {"checkpoint": "last-checkpoint", "all_checkpoints": checkpoint.name}.get(strategy, "")


class Publisher:
    """Pushes complete checkpoints in the background and the final model at the end, as ``hub_strategy`` says."""

    def __init__(self, target: Target, run_dir: Path, environment: Mapping[str, str], say: Callable[[str], None]):
        self._target, self._run_dir, self._environment, self._say = target, run_dir, dict(environment), say
        self._checkpoints, self._folder = run_dir / "checkpoints", run_dir / "publish"
        self._remove_staged()
        self._seen = {path.name for path in complete_checkpoints(self._checkpoints)}
        self._waiting: dict[str, dict[str, str]] = {}  # checkpoint -> its staged folders and their places
        self._child: subprocess.Popen[bytes] | None = None
        self._pushing = ""
        self._next_look = 0.0
        self._waits = WAITS
        self._last: dict[str, Any] = {}  # the last push that went well

    def __str__(self) -> str:
        return str(self._target)

    def tick(self) -> None:
        """Look for a new complete checkpoint and start or collect its push. Never raises: the run goes on."""
        if self._target.strategy == "end" or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK_SECONDS
        try:
            self._collect()
            self._stage_new_checkpoints()
            if self._child is None and self._waiting:
                name, folders = next(iter(self._waiting.items()))
                del self._waiting[name]
                if "" in folders.values():
                    (self._folder / name / "model" / "README.md").write_text(card_of(self._run_dir))
                self._start(name, folders, f"Training in progress, step {step_of(Path(name))}")
        except Exception as error:  # a full disk, say; publishing must never end a run
            self._say(f"could not publish a checkpoint: {type(error).__name__}: {error}; training goes on")

    def finish(self) -> dict[str, Any]:
        """Push the final model and its card, with the checkpoints that were not pushed yet, and wait for that.

        Return repo, revision, commit and url; or repo and error.
        """
        self._end_background()
        strategy, newest = self._target.strategy, newest_complete(self._checkpoints)
        wanted = {"all_checkpoints": complete_checkpoints(self._checkpoints), "checkpoint": [newest] if newest else []}
        unpushed = [path for path in wanted.get(strategy, []) if path.name not in self._pushed()]
        folders = {str(self._run_dir / "model"): "", **{str(path): _place(path, strategy) for path in unpushed}}
        self._say(f"publishing the model in {self._target.repo}")
        cut_off = _wait_for(self._start("model", folders, "Final model"))
        return self._result("model") or {"repo": self._target.repo, "error": cut_off or "the pushing process died"}

    def abandon(self) -> None:
        """Give up what is not pushed yet: the run ended without a final model."""
        if self._child is not None or self._waiting:
            self._say(f"{', '.join([self._pushing, *self._waiting])} may not be published: the run ended before")
        self._end_background()
        if self._last:
            finish_summary(self._run_dir, published=self._last)

    def upload_command(self) -> str:
        """Return the command by which a person publishes the model later."""
        target = self._target
        branch = [] if target.branch == "main" else ["--revision", target.branch]
        private = ["--private"] if target.private else []
        return shlex.join(["hf", "upload", target.repo, shown(self._run_dir / "model"), *branch, *private])

    def _end_background(self) -> None:
        if self._child is not None and self._child.poll() is None:
            self._child.kill()
            self._child.wait()
        self._child, self._waiting = None, {}
        self._remove_staged()

    def _remove_staged(self) -> None:
        """Remove the links, which keep the bytes of a checkpoint that is pruned."""
        for staged in self._folder.glob("checkpoint-*/"):
            shutil.rmtree(staged, ignore_errors=True)

    def _stage_new_checkpoints(self) -> None:
        """Stage every new checkpoint for its push, unless one is under way."""
        new = [path for path in checkpoint_folders(self._checkpoints) if path.name not in self._seen]
        for checkpoint in filter(is_complete, new):
            name = checkpoint.name
            self._seen.add(name)
            if (self._child or self._waiting) and not self._target.always:
                self._say(f"{name} is not published, the push before it is not finished (hub_always_push: true)")
            elif folders := stage(checkpoint, self._folder / name, self._target.strategy):
                self._waiting[name] = folders
            else:
                self._say(f"{name} is not published: it holds no whole model, only shards of it")

    def _start(self, name: str, folders: dict[str, str], message: str) -> subprocess.Popen[bytes]:
        self._folder.mkdir(exist_ok=True)
        result, job = self._folder / f"{name}.json", self._folder / f"{name}.job.json"
        result.unlink(missing_ok=True)
        target = self._target
        write_json(
            job, asdict(Job(target.repo, target.private, target.branch, message, folders, str(result), self._waits))
        )
        argv = [sys.executable, "-m", "grpo_recipes.publish.push", str(job)]
        with (self._folder / "push.log").open("ab") as log:
            self._child = subprocess.Popen(
                argv, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        OWN_CHILDREN.add(self._child.pid)
        self._pushing = name
        return self._child

    def _collect(self) -> None:
        """Report a push that has ended."""
        if self._child is None or self._child.poll() is None:
            return
        name, self._child = self._pushing, None
        shutil.rmtree(self._folder / name, ignore_errors=True)
        result = self._result(name) or {"error": "the pushing process died"}
        if "error" in result:
            self._say(f"could not publish {name}: {result['error']}; training goes on")
        else:
            self._say(f"published {name} in {result['url']} (commit {result['commit'][:12]})")

    def _result(self, name: str) -> dict[str, Any]:
        result = read_json(self._folder / f"{name}.json")
        if result and "error" not in result:
            write_json(self._folder / "pushed.json", {**self._pushed(), name: result})
            self._last = result
        return result

    def _pushed(self) -> dict[str, Any]:
        return read_json(self._folder / "pushed.json")


def _wait_for(child: subprocess.Popen[bytes]) -> str:
    """Wait for the last push, which Ctrl-C, SIGTERM or the time limit cuts off; return why, or nothing."""
    seen: list[int] = []
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {signum: signal.signal(signum, lambda number, _: seen.append(number)) for signum in signals}
    deadline, reason = time.monotonic() + _LONGEST_PUSH, ""
    while child.poll() is None and not reason:
        if seen:
            reason = f"stopped by {signal.Signals(seen[0]).name}"
        elif time.monotonic() > deadline:
            reason = f"not finished after {_LONGEST_PUSH / 3600:.0f} hours"
        time.sleep(0.1)
    if reason:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    for signum, handler in before.items():
        signal.signal(signum, handler)
    return reason


def make_publisher(
    target: Target | None, run_dir: Path, environment: Mapping[str, str], say: Callable[[str], None]
) -> Publisher | None:
    """Return the publisher of a run, None when it does not publish. Its processes get the user's login."""
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    variables = {**base_environment(environment), **hub_environment(environment), **quiet}
    return Publisher(target, run_dir, variables, say) if target else None


def hand_over(publisher: Publisher | None, run_dir: Path) -> str:
    """Leave the model card beside the trained model, and push both if the run publishes.

    ``published`` in summary.json gets the result. Return the part of the run's last line about it.
    """
    result = {}
    try:
        (run_dir / "model" / "README.md").write_text(card_of(run_dir))
        if publisher:
            result = publisher.finish()
    except Exception as error:  # a full disk, say: the run is complete, and must not fail for its card
        result = {"error": masked(f"{type(error).__name__}: {error}")}
    if publisher is None:
        return f"; no model card ({result['error']})" if result else ""
    finish_summary(run_dir, published=result)
    if "error" in result:
        return f"; NOT published ({result['error']}), do it with: {publisher.upload_command()}"
    return f", published in {result['url']}"
