"""Keep the groups that a training consumed in a file, and post them again to a run-api.

run-api hands a batch out once, so nobody can listen beside a trainer: a run keeps its own groups (``atropos_record``),
or ``record`` stands in the place of a trainer. Each line is a generation, ``{"step": 1, "groups": [...]}``: the
optimizer step that begins with it, and the groups as on the wire. ``replay`` posts a line and waits until the trainer
took it, so that a training gets in each step what the recorded one got, with policy versions that fit the step.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_recipes.errors import config_error, translate
from grpo_recipes.extensions.atropos.client import AtroposClient, AtroposError, Registration
from grpo_recipes.extensions.atropos.group import Group, problem_of
from grpo_recipes.paths import shown

RECORDING = "atropos_groups.jsonl"  # in the run directory
_BEGIN = re.compile(rb'\{"step": (\d+), ')  # of a line that Recording wrote
_LOOK_SECONDS = 0.1  # between two looks at run-api
_SOURCE = f"name the {RECORDING} of a run with atropos_record, or a file of grpo atropos record"


class Recording:
    """A file to which the groups of each generation are added.

    Lines past ``step``, where this attempt begins, are removed: the attempt that wrote them was killed after its last
    checkpoint, and their steps are taken again.
    """

    def __init__(self, file: Path, step: int):
        self._file, kept = file, 0
        with file.open("a+b") as lines:
            lines.seek(0)
            for line in lines:
                begin = _BEGIN.match(line)
                if begin is None or int(begin[1]) > step or not line.endswith(b"\n"):
                    break
                kept += len(line)
            lines.truncate(kept)

    def add(self, step: int, groups: Sequence[Group]) -> None:
        """Write the groups with which an optimizer step begins."""
        row = {"step": step, "groups": [group.as_wire() for group in groups]}
        with self._file.open("a") as lines:
            lines.write(json.dumps(row) + "\n")


def record(
    file: Path, client: AtroposClient, *, groups: int, size: int, longest: int, batches: int,
    say: Callable[[str], object],
) -> None:  # fmt: skip
    """Register at a run-api in the place of a trainer, and write the batches that it hands out.

    Args:
        file: a new one.
        client: of a run-api that no trainer has used.
        groups: of a batch.
        size: trajectories of a group.
        longest: most tokens of a trajectory.
        batches: how many.
        say: prints a line.
    """
    if file.exists():
        raise config_error(shown(file), "is there already", "name a new file, or remove it")
    with translate(OSError, lambda error: config_error(shown(file), f"cannot be written ({error.strerror})", _SOURCE)):
        recording = Recording(file, 0)
    # Environments drop what has as many tokens as they are told.
    about = {"wandb_group": "", "wandb_project": "", "checkpoint_dir": "", "save_checkpoint_interval": 0}
    sizes = {"batch_size": groups * size, "max_token_len": longest + 1, "starting_step": 0, "num_steps": batches}
    client.register(Registration.of({**about, **sizes}))
    for step in range(1, batches + 1):
        # No weights are made here that groups could be newer or older than.
        taken = client.take(
            groups, size=size, longest=longest, vocabulary=None, current=sys.maxsize, max_staleness=None
        )
        recording.add(step, taken)
        say(f"batch {step} of {batches} is in {shown(file)}")


@dataclass(frozen=True)
class _Line:
    """What is known of a line of a recording without its groups."""

    number: int
    offset: int  # of its first byte
    step: int
    sequences: int
    longest: int  # tokens
    version: int  # the newest of its groups


def replay(
    file: Path, client: AtroposClient, *, wait: float, versions: bool = True, say: Callable[[str], object] = print
) -> None:
    """Post the groups of a recording to a run-api, those of each step when the trainer has taken those before.

    Nothing is posted before all of the file was read and found right, and a trainer has registered. A training that
    goes on after a checkpoint gets the steps from there on. ConfigError where file and training do not fit;
    AtroposError where run-api is gone, or nobody takes the groups.

    Args:
        file: a recording.
        client: of a run-api to which nobody else posts.
        wait: longest wait in seconds for a trainer, and until it takes the groups of a step.
        versions: whether groups keep their policy versions. The trainer compares the log-probs of a group with its own
            where the version is that of its weights: without versions, weights may be others than the recorded ones.
        say: prints a line.
    """
    lines = _read(file, say)
    _need_fitting(file, lines, _registered(client, wait))
    found = client.status()
    if found["queue_size"]:
        what = f"groups of something else are in the queue of run-api already ({found['queue_size']})"
        raise config_error(client.url, what, "start it again, then the training, and nothing else that posts")
    rest = [line for line in lines if line.step > found["current_step"]]
    if not rest:
        what = f"ends with step {lines[-1].step}, and the training begins after step {found['current_step']}"
        raise config_error(
            shown(file), what, "replay a longer recording, or start the training from an earlier checkpoint"
        )
    if versions and rest[0].step > found["current_step"] + 1:
        what = f"begins with step {rest[0].step}, and the training after step {found['current_step']}"
        fix = f"start the training from the checkpoint of step {rest[0].step - 1}, or write --without-versions"
        raise config_error(shown(file), what, fix)
    if versions and (newer := [line for line in rest if line.version >= line.step]):
        what = (
            f"the trainer would reject a group in step {newer[0].step}: weights of step {newer[0].version} sampled it"
        )
        raise config_error(f"{shown(file)}:{newer[0].number}", what, "write --without-versions")
    if len(rest) < len(lines):
        say(f"the training goes on after step {found['current_step']}: the steps up to there are not posted")
    with file.open("rb") as source:
        for line in rest:
            step = client.status()["current_step"]
            source.seek(line.offset)
            groups = _groups_of(json.loads(source.readline()))
            client.post(groups if versions else [_without_version(group) for group in groups])
            say(f"Successfully submitted scored data for step {line.step}")
            if line is not rest[-1]:
                _wait_until_taken(client, line, step, wait)


def _read(file: Path, say: Callable[[str], object]) -> list[_Line]:
    """Return the lines of a recording without a last one that was cut short; ConfigError for the first wrong one."""
    found: list[_Line] = []
    offset = 0
    with (
        translate(OSError, lambda error: config_error(shown(file), f"cannot be read ({error.strerror})", _SOURCE)),
        file.open("rb") as source,
    ):
        for number, text in enumerate(source, start=1):
            try:
                found.append(_line(number, offset, text, found[-1].step if found else 0))
            except ValueError as error:
                if not text.endswith(b"\n") or b"\0" in text:  # its writer was killed, or the machine lost power
                    say(f"{shown(file)}:{number} is cut short, and left out")
                    break
                fix = f"remove the line and what follows, or {_SOURCE}"
                raise config_error(f"{shown(file)}:{number}", str(error), fix) from error
            offset += len(text)
    if not found:
        raise config_error(shown(file), "holds no groups", _SOURCE)
    return found


def _line(number: int, offset: int, text: bytes, before: int) -> _Line:
    """Return what a line holds; ValueError says what is wrong with it, given the step before."""
    with translate((ValueError, RecursionError), lambda _: ValueError("is no JSON")):
        row = json.loads(text)
    if not isinstance(row, dict) or type(row.get("step")) is not int or not isinstance(row.get("groups"), list):
        raise ValueError("has no step with a list of groups")
    if row["step"] < max(1, before):
        raise ValueError(f"step {row['step']} stands after step {before}")
    if not row["groups"]:
        raise ValueError("has no groups")
    for index, group in enumerate(groups := _groups_of(row)):
        if problem := problem_of(group, size=len(group.tokens), longest=None, vocabulary=None):
            raise ValueError(f"group {index} cannot be trained on: {problem}")
    longest = max(len(tokens) for group in groups for tokens in group.tokens)
    version = max(group.policy_version or 0 for group in groups)
    return _Line(number, offset, row["step"], sum(len(group.tokens) for group in groups), longest, version)


def _groups_of(row: dict[str, Any]) -> list[Group]:
    return [Group.of_wire(plain) for plain in row["groups"]]


def _without_version(group: Group) -> Group:
    params = {name: value for name, value in group.generation_params.items() if name != "policy_version"}
    return replace(group, generation_params=params)


def _registered(client: AtroposClient, wait: float) -> dict[str, Any]:
    """Wait for a trainer; return what it registered. A group posted before that would spoil the run-api for good."""
    deadline, reason = time.monotonic() + wait, ""
    while True:
        try:
            if (info := client.info())["batch_size"] != -1:
                return info
            reason = "no trainer has registered"
        except AtroposError as error:  # it may still be starting
            reason = str(error)
        if time.monotonic() > deadline:
            fix = f"start the training, with atropos_api_url: {client.url}"
            raise AtroposError(f"nothing is posted to {client.url}: {reason}, for {wait:g} s. Fix: {fix}")
        time.sleep(_LOOK_SECONDS)


def _need_fitting(file: Path, lines: Sequence[_Line], info: dict[str, Any]) -> None:
    """Raise where the trainer would wait for more groups than a step has, or train on no group of some length."""
    for line in lines:
        where = f"{shown(file)}:{line.number}"
        if line.sequences != info["batch_size"]:
            what = f"the batch has {line.sequences} sequences, and the trainer registered {info['batch_size']}"
            raise config_error(where, what, "train with prompts_per_step and num_generations of the recording")
        if line.longest >= info["max_token_len"]:
            what = f"a trajectory has {line.longest} tokens, and the trainer takes at most {info['max_token_len'] - 1}"
            raise config_error(where, what, "raise max_prompt_length or max_completion_length of the training")


def _wait_until_taken(client: AtroposClient, line: _Line, step: int, wait: float) -> None:
    """Wait until run-api has handed out what was posted; it counts a batch when it does so."""
    deadline = time.monotonic() + wait
    while (found := client.status())["queue_size"] or found["current_step"] == step:
        if time.monotonic() > deadline:
            what = f"nobody took the groups of step {line.step} from {client.url} within {wait:g} s"
            raise AtroposError(f"{what}: the training ended, or waits for something else. Fix: see its log")
        time.sleep(_LOOK_SECONDS)
    if found["current_step"] < step:
        raise AtroposError(f"the run-api at {client.url} was started again after step {line.step}. Fix: start all anew")
