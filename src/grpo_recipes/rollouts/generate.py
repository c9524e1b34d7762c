"""Completions of a dataset in a JSONL file that can be continued.

A row is written as soon as all completions of its prompt are there, and a failed one is never written: what the file
has is whole. Beside it ``FILE.settings.json`` says how it was made, so that rows of two settings never mix. In the end
the rows are in the order of the dataset, whatever came first and however often it was continued.
"""

from __future__ import annotations

import fcntl
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_recipes.errors import config_error, translate
from grpo_recipes.paths import display_path
from grpo_recipes.rollouts.openai import CompletionClient, Failed, Sample, SamplingParameters
from grpo_recipes.rollouts.turns import derived
from grpo_recipes.runs.rundir import json_mapping, remove_files, without_damaged_end, write_json

Row = dict[str, Any]
_OUT = "--out"
_LOST_ROWS = 8  # in a row without an answer, after which the server counts as gone


@dataclass
class Generated:
    """What became of the prompts."""

    before: int = 0  # that an earlier call had completed
    made: int = 0
    failed: Counter[str] = field(default_factory=Counter)  # prompts by the reason of their first failure
    left: int = 0  # that were not tried, since the server is gone

    @property
    def complete(self) -> bool:
        """Return whether every prompt has its completions."""
        return not self.failed and not self.left


class CompletionsFile:
    """The file, held by this process; ``done`` has the numbers of the prompts that are in it."""

    def __init__(self, path: Path, rows: Sequence[Row]):
        self.path, self._rows = path, rows
        self._file = path.open("a+b")
        self.done: dict[int, None] = {}  # in the order of the file

    def add(self, index: int, completions: Sequence[Sample]) -> None:
        """Add the row of a prompt; it is on its way to the disk before this returns."""
        said = [{"text": one.text, "ids": one.ids, "finish_reason": one.finish_reason} for one in completions]
        self.put(index, said)

    def put(self, index: int, completions: Sequence[Mapping[str, Any]]) -> None:
        """Add the row of a prompt with these entries in the place of its completions."""
        row = {"index": index} | self._rows[index] | {"index": index, "completions": completions}
        self._file.write(json.dumps(row, ensure_ascii=False).encode(errors="replace") + b"\n")
        self._file.flush()
        self.done[index] = None

    def read(self) -> None:
        """Find the prompts that are done; cut off a damaged end, which a kill or a power loss leaves."""
        self._file.seek(0)
        whole = without_damaged_end(self._file.read())
        self._file.truncate(len(whole))
        for number, line in enumerate(whole.splitlines(), start=1):
            row = json_mapping(line) or {}
            index, where = row.get("index"), f"{display_path(self.path)}:{number}"
            if not isinstance(index, int) or not isinstance(row.get("completions"), list) or index in self.done:
                raise config_error(where, "is not a row of this command", "remove the line, or name another --out")
            if index < len(self._rows) and row.get("prompt") != self._rows[index]["prompt"]:
                what = f"prompt {index} is another one than the dataset's now"
                raise config_error(where, what, "name another --out, or remove the file")
            self.done[index] = None

    def sort(self) -> None:
        """Bring the rows into the order of the dataset."""
        if list(self.done) == sorted(self.done):
            return
        self._file.seek(0)
        lines = dict(zip(self.done, self._file.read().splitlines(keepends=True), strict=True))
        temporary = self.path.with_name(f".{self.path.name}.sorted")
        with translate(OSError, lambda error: config_error(_OUT, f"cannot be sorted ({error.strerror})", "make room")):
            temporary.write_bytes(b"".join(lines[index] for index in sorted(lines)))
            temporary.replace(self.path)

    def rows(self) -> list[Row]:
        """Return the rows of the dataset that are in the file, in their order."""
        self._file.seek(0)
        found = {index: json.loads(line) for index, line in zip(self.done, self._file, strict=True)}
        return [found[index] for index in sorted(found) if index < len(self._rows)]

    def close(self) -> None:
        """Let others have the file."""
        self._file.close()


@contextmanager
def opened(path: Path, rows: Sequence[Row], settings: Mapping[str, Any]) -> Iterator[CompletionsFile]:
    """Open the file of a dataset's ``rows``, new or as an earlier call left it; refuse one of other settings.

    A file that is still empty in the end is removed, with the folders that were made for it.
    """
    beside = path.with_name(f"{path.name}.settings.json")
    new_folders = [folder for folder in path.parents if not folder.exists()]

    def unwritable(error: OSError) -> Exception:
        return config_error(_OUT, f"cannot write {display_path(path)} ({error.strerror})", "name a file you may write")

    with translate(OSError, unwritable):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = CompletionsFile(path, rows)
    ours = False
    try:
        try:
            fcntl.flock(file._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fix = "wait for it, or name another --out"
            raise config_error(_OUT, f"another process writes {display_path(path)}", fix) from None
        ours = True
        if path.stat().st_size:
            _compare(path, json_mapping(beside), json.loads(json.dumps(settings)))
            file.read()
        with translate(OSError, unwritable):
            write_json(beside, settings)
        yield file
    finally:
        file.close()
        with suppress(OSError):  # somebody removed the file, or has others in the folder
            if ours and path.stat().st_size == 0:
                remove_files(path, beside)
                for folder in new_folders:
                    folder.rmdir()


def _compare(path: Path, before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> None:
    """Refuse to continue a file that was made otherwise."""
    if before is None:
        what = f"{display_path(path)} exists, and {path.name}.settings.json, which says how it was made, does not"
        raise config_error(_OUT, what, "name another file, or remove this one")
    others = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if others:
        said = "; ".join(f"{name} {before.get(name)}, now {now.get(name)}" for name in others)
        fix = "name another file, go back to those settings, or remove it"
        raise config_error(_OUT, f"{display_path(path)} was made with other settings: {said}", fix)


def generate(
    client: CompletionClient, prompts: Sequence[Sequence[int]], n: int, sampling: SamplingParameters,
    file: CompletionsFile, on_progress: Callable[[Generated], None] = lambda _: None,
) -> Generated:  # fmt: skip
    """Draw ``n`` completions of each prompt that is not in the file, and add the rows.

    A prompt whose completions are not all there has no row: the next call tries it again. The seeds follow from
    ``sampling.seed`` and the prompt's number. Where the server is gone, the rest is left.
    """
    assert sampling.seed is not None
    done = set(file.done)
    missing = [index for index in range(len(prompts)) if index not in done]
    outcome, lost = Generated(before=len(prompts) - len(missing)), 0
    seeds = [derived(sampling.seed, index) for index in missing]
    for place, drawn in client.completed([prompts[index] for index in missing], n, sampling, seeds):
        failed = [one for one in drawn if isinstance(one, Failed)]
        if failed:
            outcome.failed[failed[0].reason] += 1
        else:
            file.add(missing[place], [one for one in drawn if isinstance(one, Sample)])
            outcome.made += 1
        on_progress(outcome)
        lost = lost + 1 if any(one.lost for one in failed) else 0
        if lost >= _LOST_ROWS:
            break
    file.sort()
    outcome.left = len(missing) - outcome.made - outcome.failed.total()
    return outcome
